# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Audit: what is a model's loop contract?
#
# ![Accuracy lost at the trained loop count when the boundary norm is changed, with its interval, a row a model and a panel a
# task](../outputs/laptop/4_1_asymmetry/cost_at_r0.png)
#
# *Laptop run: the question of an audit, asked of the stand-ins of [4.1](4_1_asymmetry.ipynb): what does it cost to change the
# norm?*
# Words: [glossary](00_reading_guide.ipynb#Glossary).
#
# Point this notebook at a looped model, and it answers what the contract paper asks of Ouro and Huginn: where does the norm sit,
# how far do the loop steps go beyond the trained budget, what does the boundary norm cost or save, and how does the readout fail
# without it?
#
# ```
# make audit MODEL=ByteDance/Ouro-1.4B              # a hub id that was downloaded, or a folder
# python -m lib audit outputs/runs/<key> --n 256    # a model trained here, on its own task
# ```
#
# **Rule.** The norm is part of the contract when changing it costs something at the trained loop count r0: the cluster-bootstrap
# interval of the difference leaves 0 out, and the exact McNemar p, Holm-adjusted over the costs shown, is below 0.05. A model that
# reads text answers few-shot prompts; one trained here its own symbolic task; any other is asked how far the changed arm *agrees*
# with the intact one, on random tokens.
#
# **Scale.** The copy in `notebooks/` holds *smoke* results, of a model that was never trained: it shows what a report looks like and
# says nothing about looped models. It takes seconds; a report of a model is in `outputs/audit/<its name>/`.

# %% tags=["parameters"]
scale: str = "smoke"  # of the copy without a model; a model's results go to outputs/audit/<its name>
model: str = ""  # a hub id that was downloaded, or a folder; empty: a small model that was never trained
at_loops: list[int] = [1, 2, 4, 8, 16, 32]  # loop counts that are shown; all up to the largest are read
tasks: list[str] = ["circuit", "hops", "paragg"]  # families, for a model that reads text
n: int = 32  # instances at each depth of each task, or random rows
shots: int = 4  # solved examples in a prompt
circuit_width: int = 3  # gates a layer
circuit_depth: int = 2  # largest depth d*
hops_width: int = 8  # symbols in the map, of 26
hops_depth: int = 2  # largest number of hops d*
paragg_width: int = 2  # circuits
paragg_circuit_width: int = 3  # gates a layer
paragg_depth: int = 1  # largest depth d*
precision: str = ""  # bfloat16, float16, float32 or float64; empty: the checkpoint's own
device: str = "cpu"  # cpu or cuda
batch_size: int = 32  # rows at once
boundary: int = -1  # of the intact arm: 0 never, k after every k-th step, -1 as trained

# %%
import pandas as pd

from lib import audit, audit_facts, audit_readings, audit_report, params, plots, results

p = params.of(globals())
subject = audit.subject(p)
out = results.begin(*((subject.name, "audit") if model else ("audit", scale)))
plots.setup()
print(f"{subject.name}: {subject.family}, {subject.parameters:,} parameters, trained for {subject.r0} loop steps")
print("read on", subject.read_on)

# %% [markdown]
# ## Reading it
#
# The intact arm is the model as trained. The other arm has the norm removed from every loop boundary where it was trained with it,
# and added to every one where it was not; between the two, the norm after every 2nd, 3rd, 4th and 8th step. All are the same
# weights, read on the same inputs at every loop count. Each reading is kept in the run store, so a second call only looks it up.

# %%
read = audit_readings.measure(subject)
drawn = audit_report.figures(subject, read)


def show(name):
    """One figure, kept beside the report; what an audit of this kind has no figure for is None."""
    return out.chart(drawn[name].chart, name) if name in drawn else None


# %% [markdown]
# ## Where the norm sits
#
# Found by counting the calls of every normalisation at two loop counts, not by reading code. A norm that gains a call with every
# loop step acts inside the loop; beside its layers, it acts at the loop boundary.

# %%
show("norm_placement")

# %%
read.norms["acts"].value_counts().sort_index()

# %% [markdown]
# ## Beyond the trained budget
#
# Accuracy, or agreement with the intact arm at r0, against the loop count. Both arms are the same model at one loop.

# %%
show("value")

# %%
show("swept")

# %% [markdown]
# A class without a loader has no arms: only its own loop setting can be swept, and what is shown is how far its last hidden state
# still moves.

# %% [markdown]
# ## Dose
#
# A gradient from left to right says that every norm taken away costs a little; a cliff, that the loop needs it at a certain pace.

# %%
show("dose")

# %% [markdown]
# ## What the head says, and whether the loop settles

# %%
show("entropy")

# %%
show("update_size")

# %% [markdown]
# ## The contract
#
# What changing the boundary costs, at r0 and beyond it, and how the changed arm's readout fails. The rules of both tables stand in
# `lib/audit_facts.py`.

# %% tags=["nbval-ignore-output"]
facts = audit_facts.facts(subject, read)
print(facts["verdict"])
pd.DataFrame(facts.get("costs", facts.get("swept"))).round(3)

# %% tags=["nbval-ignore-output"]
pd.DataFrame(facts.get("readout", []), columns=["task", "K", "value", "entropy_bits", "modal_share", "kind", "said"]).round(3)

# %% [markdown]
# ## The report

# %%
assert facts.get("equal_at_one_loop", True), "an arm differs at one loop, where nothing was changed"
for name, figure in drawn.items():
    out.table(figure.data, name)
audit_report.write(out.staging, facts, drawn, audit_report.made(p, subject, out.started))
folder = out.finish(p, [], {"models": 0, "verdict": facts["verdict"]})
print("written:", ", ".join(sorted({path.suffix for path in folder.iterdir()} - {".ipynb"})))
