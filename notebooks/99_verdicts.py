# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Verdicts: every claim of both papers, judged or not
#
# ![Stacked bars, the claims of each section by verdict: replicated, same direction, inconclusive, not replicated, out of
# reach](../outputs/laptop/99_verdicts/verdicts_by_section.png)
#
# *Laptop run: how the claims of every section were judged; what is out of reach needs another scale.*
# Words: [glossary](00_reading_guide.ipynb#Glossary).
#
# **Claim, paper's number and rule** of every row stand in the tables below: one row for every number and statement the
# replication answers for. The rules stand in `params/claims.yaml` and were written
# before the runs. The copy in `notebooks/` shows smoke results, which decide nothing; the
# [laptop run](../outputs/laptop/99_verdicts/notebook.ipynb) is the one to read. A few seconds at every scale.
#
# * **replicated**: the rule holds
# * **same direction**: the effect has the claimed sign with an interval that excludes 0, but the rule's full condition fails
# * **not replicated**: an interval excludes the claimed direction, or an exact statement is false
# * **inconclusive**: the interval covers both answers
# * **not competent**: the models do not do the task well enough to be judged
# * **out of reach**: cannot be judged at this scale; the reason says what it takes

# %% tags=["parameters"]
scale: str = "smoke"  # whose results to collect: smoke, laptop, overnight or paper

# %%
import pandas as pd

from lib import claims, params, paths, plots, results

p = params.of(globals())
out = results.begin("99_verdicts", scale)
plots.setup()
frame, points = claims.collect(paths.outputs() / scale)

# %% [markdown]
# ## At a glance

# %%
out.chart(plots.verdict_counts(frame), "verdicts_by_section")

# %% [markdown]
# ## Judged at this scale

# %% tags=["nbval-ignore-output"]
built = frame[frame["reason"] != claims.NOT_BUILT]
with pd.option_context("display.max_colwidth", None, "display.max_rows", None):
    display(built[["id", "section", "verdict", "paper", "ours", "n", "reason", "notebook"]].set_index("id"))

# %% [markdown]
# ## All claims, as the papers make them

# %%
stated = frame[["id", "section", "kind", "paper"]].set_index("id")
with pd.option_context("display.max_rows", None, "display.max_colwidth", 60):
    display(stated)

# %%
assert list(frame["id"]) == list(claims.load()), "every claim has its row"
folder = out.finish(p, [], {"models": 0, "claims": len(frame)})
