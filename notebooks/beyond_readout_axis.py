# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Beyond the paper: the readout axis
#
# ![Accuracy without the boundary norm minus accuracy with it, against the loop count, for a normalised and a raw readout:
# near zero at the trained loop count, above zero away from it, and more so with the normalised
# readout](../outputs/laptop/beyond_readout_axis/cost_of_the_norm.png)
#
# *Laptop run: what the boundary norm costs at every loop count, under two kinds of readout; bands are intervals.*
# Words: [glossary](00_reading_guide.ipynb#Glossary).
#
# > Future directions: "varying the readout normalization axis (the orthogonal axis studied by Sharma & Vu, 2026)" (contract paper,
# > conclusion)
#
# **Claim.** What the boundary norm costs beyond the budget does not depend on whether the readout normalises the state or reads it
# raw.
#
# **Paper's number.** None: the paper leaves this axis to others.
#
# **Rule.** Written before any run in `params/claims.yaml`. On circuit, eight seeds: the interaction of boundary and readout on
# accuracy at 8 r0, (no norm - norm with a normalised readout) - (no norm - norm with a raw readout). Its interval inside +-0.05 is
# replicated; outside and excluding 0, not replicated; otherwise inconclusive.
#
# **Scale.** The copy of this notebook in `notebooks/` holds *smoke* results (two small models an arm, under a minute): they
# show that everything runs and decide nothing. The results that count are in
# [the laptop run](../outputs/laptop/beyond_readout_axis/notebook.ipynb) (`make replicate`: eight seeds in each of four arms; the
# two with a normalised readout are section 4.3's own models).

# %% tags=["parameters"]
scale: str = "smoke"  # names the outputs folder: smoke, laptop, overnight or paper
tasks: list[str] = ["circuit"]  # families to train on; the claim is about circuit
seeds: int = 2  # models an arm and task; seeds count from 0
r0: int = 4  # loop steps in training; the sweep goes to 8 r0
d_model: int = 32  # channels of the state
n_heads: int = 4  # attention heads
d_ff: int = 64  # width of the gated feed-forward
core: int = 1  # layers that are looped
circuit_width: int = 3  # gates a layer
circuit_depth: int = 1  # largest depth d*
circuit_steps: int = 350  # optimiser steps
circuit_lr_no_norm: float = 4.0e-3  # peak learning rate
circuit_lr_with_norm: float = 4.0e-3  # peak learning rate
circuit_lr_no_norm_raw: float = 4.0e-3  # peak learning rate, raw readout
circuit_lr_with_norm_raw: float = 4.0e-3  # peak learning rate, raw readout
hops_width: int = 4  # symbols in the map, of 26
hops_depth: int = 1  # largest number of hops d*
hops_steps: int = 300  # optimiser steps
hops_lr_no_norm: float = 8.0e-3  # peak learning rate
hops_lr_with_norm: float = 8.0e-3  # peak learning rate
hops_lr_no_norm_raw: float = 8.0e-3  # peak learning rate, raw readout
hops_lr_with_norm_raw: float = 8.0e-3  # peak learning rate, raw readout
batch_size: int = 32  # sequences a step
optimizer: str = "adamw"  # adamw or muon
warmup: int = 30  # steps of linear warm-up, then a cosine to zero
weight_decay: float = 0.0  # on the blocks' matrices
loop_sampling: str = "fixed"  # fixed: r0 loops at every step; poisson_lognormal: drawn around r0
n_test: int = 64  # test instances at each depth
device: str = "cpu"  # cpu or cuda
workers: int = 0  # processes that train at once; 0: one a core

# %%
import pandas as pd

from lib import claims, experiment, params, paths, plots, results, rules_beyond, stats
from lib.boundary import Boundary
from lib.experiment import ARMS, Job

p = params.of(globals())
out = results.begin("beyond_readout_axis", scale)
plots.setup()

# %% [markdown]
# ## Four arms
#
# Boundary (with, without) crossed with readout (normalised, raw), in training as in use. The raw readout is the head on the raw
# state, $\mathrm{logits} = W z_K$; nothing else differs. The final norm then serves the boundary alone, or nothing.

# %%
cells = [
    {"task": task, "arm": arm, "readout": readout, "seed": seed}
    for task in tasks
    for (arm, readout) in experiment.kinds(p, task)
    for seed in range(seeds)
]
jobs = []
for cell in cells:
    run = experiment.kinds(p, cell["task"])[cell["arm"], cell["readout"]](cell["seed"])
    jobs.append(Job(run, ((Boundary(ARMS[cell["arm"]].period), 8 * r0),), n_test, paths.runs()))
made = experiment.make(jobs, workers or None, title="beyond, readout")
sweeps, training = experiment.collect(cells, jobs, made)
accuracy = experiment.metric(sweeps, "accuracy")
state_norm = experiment.metric(sweeps[sweeps["d_star"] == "all"], "state_norm")
whole = accuracy[accuracy["d_star"] == "all"]
floors = experiment.floor_table([experiment.task_of(p, task) for task in tasks], n_test)
print(len(made), "models")

# %% [markdown]
# ## Accuracy against the loop count


# %%
def by_readout(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.assign(panel=frame["task"] + ", " + frame["readout"] + " readout")


panels = by_readout(whole)[["task", "panel"]].drop_duplicates().merge(floors.groupby("task", as_index=False)["value"].mean())
out.chart(plots.against_loops(by_readout(whole), "accuracy", r0, panel="panel", floors=panels), "accuracy_against_loops")

# %% [markdown]
# Each line is the mean over seeds with its 95 % bootstrap interval, each point a seed.
#
# ## The state's norm

# %%
chart = plots.against_loops(by_readout(state_norm), "L2 norm of the raw state", r0, panel="panel", log_y=True)
out.chart(chart, "state_norm")

# %% [markdown]
# ## What the boundary norm costs at each loop count, by readout
#
# The difference of the arms' means, no norm minus norm. The claim is that the two lines coincide at 8 r0.

# %%
rows = []
for (task, readout, K), found in whole.groupby(["task", "readout", "K"], sort=False):
    pair = [found.loc[found["arm"] == arm, "value"] for arm in ARMS]
    rows.append({"task": task, "readout": readout, "K": K} | stats.bootstrap_difference(*pair)._asdict())
cost = pd.DataFrame(rows)
out.chart(plots.cost_of_norm(cost, r0), "cost_of_the_norm")

# %% [markdown]
# ## What training reached

# %% tags=["nbval-ignore-output"]
loss = training.groupby(["task", "arm", "readout"])["final_loss"].describe()[["count", "min", "50%", "max"]]
loss.rename(columns={"count": "seeds", "50%": "median"}).round(4)

# %% [markdown]
# ## Verdict

# %% tags=["nbval-ignore-output"]
judgements = rules_beyond.judge_readout_axis(whole, floors, r0)
verdicts = pd.DataFrame([claims.row(claims.load()[j.id], j, "") for j in judgements])
with pd.option_context("display.max_colwidth", None):
    display(verdicts[["id", "verdict", "ours", "n", "reason", "rule"]].set_index("id").T)

# %% [markdown]
# ## What this can and cannot say
#
# The rule asks whether an *interaction* is absent, which takes arms that all learned the task: where one did not, the difference
# at 8 r0 also holds what training failed to reach, and the table above shows it.
#
# **Departs (smoke and laptop):** models of well under 0.1M parameters that loop a single layer.

# %%
diverged = int(training["diverged"].sum())
fitted = training[~training["diverged"]]
assert (fitted["final_loss"] < fitted["first_loss"]).all(), "every loss must fall"
for name in ("accuracy", "state_norm", "cost", "floors", "training"):
    out.table(globals()[name], name)
here = training[training["readout"] == "raw"]  # those with a normalised readout are section 4.3's
figures = {"models": len(here), "models of section 4.3": len(made) - len(here), "diverged": diverged}
folder = out.finish(p, judgements, figures, here["seconds"].sum())
