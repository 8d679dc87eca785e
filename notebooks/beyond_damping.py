# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Beyond the paper: does a growing state damp its own loop?
#
# > "The block's output scale is set by internal normalizations, so as the state grows, each application moves it by a smaller
# > relative amount and the iteration settles. A boundary normalization rescales the state before every step, keeping updates at
# > full relative size." (contract paper, theoretical implications; left untested there)
#
# **Claim.** Beyond the budget the arm with the boundary norm moves its state by a larger relative amount at each step than the arm
# without, and the models that move more lose more accuracy.
#
# **Paper's number.** None: the paper names per-step update size as future work.
#
# **Rule.** Written before any run in `params/claims.yaml`. On circuit, with u the step's actual input after any boundary norm:
# the relative update ||R(u) - u|| / ||u|| at 8 r0 is larger with the norm, intervals apart; and over seeds and arms its rank
# correlation with the accuracy lost from r0 to 8 r0 has an interval above 0.
#
# **Scale.** No model is trained here: these are section 4.3's, taken from the run store. The copy of this notebook in `notebooks/`
# holds *smoke* results (two small models an arm): they show that everything runs and decide nothing. The results that count are in
# [the laptop run](../outputs/laptop/beyond_damping/notebook.ipynb) (`make replicate`).

# %% tags=["parameters"]
scale: str = "smoke"  # names the outputs folder: smoke, laptop, overnight or paper
tasks: list[str] = ["circuit", "hops"]  # families to train on
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
hops_width: int = 4  # symbols in the map, of 26
hops_depth: int = 1  # largest number of hops d*
hops_steps: int = 300  # optimiser steps
hops_lr_no_norm: float = 8.0e-3  # peak learning rate
hops_lr_with_norm: float = 8.0e-3  # peak learning rate
batch_size: int = 32  # sequences a step
optimizer: str = "adamw"  # adamw or muon
warmup: int = 30  # steps of linear warm-up, then a cosine to zero
weight_decay: float = 0.0  # on the blocks' matrices
loop_sampling: str = "fixed"  # fixed: r0 loops at every step; poisson_lognormal: drawn around r0
n_test: int = 64  # test instances at each depth
device: str = "cpu"  # cpu or cuda
workers: int = 0  # processes that train at once; 0: one a core

# %%
import numpy as np
import pandas as pd

from lib import claims, engine, experiment, params, paths, plots, results, rules_beyond, updates
from lib.experiment import ARMS, Job

p = params.of(globals())
out = results.begin("beyond_damping", scale)
plots.setup()

# %% [markdown]
# ## The models of section 4.3

# %%
cells = [{"task": task, "arm": arm, "seed": seed} for task in tasks for arm in ARMS for seed in range(seeds)]
jobs = []
for cell in cells:
    arm = cell["arm"]
    sweeps = ((ARMS[arm], 8 * r0), (experiment.other(arm), 8 * r0))
    jobs.append(Job(experiment.arm_run(p, *cell.values()), sweeps, n_test, paths.runs()))
made = experiment.make(jobs, workers or None, title="beyond, models")
own, swapped, training = experiment.collect(cells, jobs, made)
accuracy = experiment.metric(own[own["d_star"] == "all"], "accuracy")
floors = experiment.floor_table([experiment.task_of(p, task) for task in tasks], n_test)
lost_models = set(training.loc[training["diverged"], ["task", "arm", "seed"]].itertuples(index=False, name=None))
print(len(made), "models")

# %% [markdown]
# ## How far each step moves the state
#
# One trajectory of 8 r0 steps a model, at the answer's position. The *relative update* compares a step's output with what it was
# given; *raw to raw* compares successive raw states, so that with a boundary norm it also holds the rescaling.


# %%
def measure(wanted: list[updates.Job], title: str) -> list[dict]:
    return [updates.series(f) for f in engine.map_local(updates.measured, wanted, workers or None, title=title)]


moved = measure([updates.Job(j.run, j.sweeps[0][0], 8 * r0, n_test, paths.runs()) for j in jobs], "beyond, updates")
rows = []
for cell, found in zip(cells, moved, strict=True):
    gone = tuple(cell.values()) in lost_models
    for name, values in found.items():
        rows += [cell | {"K": K, "metric": name, "value": np.nan if gone else v} for K, v in enumerate(values, start=1)]
steps = pd.DataFrame(rows)
relative = experiment.metric(steps, "relative")

# %%
out.chart(plots.against_loops(relative, "relative update ||R(u) - u|| / ||u||", r0, log_y=True), "relative_update")

# %% [markdown]
# The same from raw state to raw state, the angle by which a step turns its input, and how far the raw state still is from where the
# trajectory ends (on circuit):

# %%
MEASURES = {
    "raw to raw": ("raw_to_raw", "||z' - z|| / ||z||, z the raw state"),
    "angle of a step": ("angle", "degrees between u and R(u)"),
    "distance to the last state": ("to_final", "||z - z_last|| / ||z_last||"),
    "angle to the last state": ("angle_to_final", "degrees between z and z_last"),
}
names = {metric: panel for panel, (metric, _) in MEASURES.items()}
shown = steps[(steps["task"] == tasks[0]) & steps["metric"].isin(names) & (steps["value"] > 0)]
shown = shown.assign(panel=shown["metric"].map(names))
for pair in (list(MEASURES)[:2], list(MEASURES)[2:]):
    titles = {panel: MEASURES[panel][1] for panel in pair}
    part = shown[shown["panel"].isin(pair)]
    chart = plots.against_loops(part, titles, r0, panel="panel", log_y=True, title=tasks[0])
    display(out.chart(chart, "_and_".join(MEASURES[panel][0] for panel in pair)))

# %% [markdown]
# ## Does it predict what is lost?
#
# Each point is a model: its relative update at step 8 r0 against the accuracy it lost from r0 to 8 r0. A correlation over both arms
# may come from the arms' difference alone, so it is given inside each arm too.

# %%
models = pd.concat(rules_beyond.update_and_loss(relative, accuracy, r0, task).assign(task=task) for task in tasks)
shown = models.rename(columns={"update": "x", "lost": "value"}).dropna(subset=["x", "value"])
out.chart(plots.scatter(shown, "relative update at 8 r0", "accuracy lost, r0 to 8 r0"), "update_against_loss")

# %% tags=["nbval-ignore-output"]
rows = []
for task, found in models.dropna().groupby("task", sort=False):
    for name, group in [("both arms", found), *found.groupby("arm")]:
        r = rules_beyond.rank_correlation(group["update"], group["lost"], group["arm"])
        rows.append({"task": task, "models": name, "rank correlation": r.value, "low": r.low, "high": r.high, "n": r.n})
correlations = pd.DataFrame(rows).set_index(["task", "models"]).round(3)
correlations

# %% [markdown]
# ## Scale alone
#
# If damping is what protects, then scale alone should do it. The next runs change nothing but the length of each step's input, from
# step r0 + 1 on (so that accuracy at r0 is untouched) or from step 2 on: every token's u is set, without turning it, to the length
# it has on average in the *other* arm at that step. The core reads u through its own norm, so its output hardly changes; what
# changes is how much of u that output outweighs.
#
# * the arm without the norm is held at the small, constant length that the norm gives: its updates stay large
# * the arm with the norm is given the other arm's growing length, after its boundary norm: its updates shrink

# %%
lengths = experiment.metric(steps, "input_norm").groupby(["task", "arm", "K"])["value"].mean()
other_arm = {"no_norm": "with_norm", "with_norm": "no_norm"}
scaled_cells, scaled_jobs = [], []
for cell, job in zip(cells, jobs, strict=True):
    target = tuple(round(float(v), 6) for v in lengths[cell["task"], other_arm[cell["arm"]]].sort_index())
    if not np.isfinite(target).all():  # every seed of the other arm diverged
        continue
    for start, when in ((r0, f"other arm's length beyond r0 = {r0}"), (1, "other arm's length from step 2")):
        scaled_cells.append(cell | {"run": when})
        scaled_jobs.append(updates.Job(job.run, job.sweeps[0][0], 8 * r0, n_test, paths.runs(), target, start))
scaled = measure(scaled_jobs, "beyond, scale")
rows = []
for cell, found in zip(scaled_cells, scaled, strict=True):
    gone = tuple(cell[k] for k in ("task", "arm", "seed")) in lost_models
    rows += [cell | {"K": K, "value": np.nan if gone else v} for K, v in enumerate(found["accuracy"], start=1)]
rescaled = pd.concat(
    [
        accuracy.assign(run="own length"),
        experiment.metric(swapped[swapped["d_star"] == "all"], "accuracy").assign(run="other arm's boundary"),
        pd.DataFrame(rows),
    ]
)[["task", "arm", "seed", "run", "K", "value"]]

# %%
for arm in ARMS:
    shown = rescaled[rescaled["arm"] == arm].assign(arm=lambda f: f["run"])
    chart = plots.against_loops(shown, "accuracy", r0, title=f"trained with: {plots.LABELS[arm]}")
    display(out.chart(chart, f"scale_alone_{arm}"))

# %% [markdown]
# What scale alone does at 8 r0: the accuracy it adds or takes, paired by seed, beside what the whole other boundary does.

# %% tags=["nbval-ignore-output"]
at_end = (
    rescaled[rescaled["K"] == 8 * r0]
    .fillna({"value": 0})
    .pivot_table(index=["task", "arm", "seed"], columns="run", values="value")
)
changes = at_end.drop(columns="own length").sub(at_end["own length"], axis=0)
effect = plots.means(changes.reset_index().melt(["task", "arm", "seed"], var_name="run"), ["task", "arm", "run"])
effect.set_index(["task", "arm", "run"]).round(3)

# %% [markdown]
# ## Verdict

# %% tags=["nbval-ignore-output"]
judgements = rules_beyond.judge_damping(relative, accuracy, floors, r0)
verdicts = pd.DataFrame([claims.row(claims.load()[j.id], j, "") for j in judgements])
with pd.option_context("display.max_colwidth", None):
    display(verdicts[["id", "verdict", "ours", "n", "reason", "rule"]].set_index("id").T)

# %% [markdown]
# ## What this can and cannot say
#
# The paper leaves the reading untested, so there is nothing to agree with. The rule asks for a correlation, which is not a cause;
# the rescaled runs are the test of cause, and they decide no verdict.
#
# **Departs (smoke and laptop):** section 4.3's small models, which loop a single layer; the answer's position alone is measured.

# %%
assert steps["value"].dropna().ge(0).all()
one = rescaled[rescaled["K"] == 1].pivot_table(index=["task", "arm", "seed"], columns="run", values="value")
assert (one.nunique(axis=1) <= 1).all(), "at one loop no run differs: nothing has been rescaled yet"
before = rescaled[(rescaled["K"] == r0) & rescaled["run"].isin(["own length", f"other arm's length beyond r0 = {r0}"])]
assert (before.groupby(["task", "arm", "seed"])["value"].agg(np.ptp) < 0.02).all(), "up to r0 nothing is rescaled"
for name in ("steps", "models", "rescaled", "effect", "floors"):
    out.table(globals()[name], name)
figures = {"models": 0, "models of section 4.3": len(made), "diverged": len(lost_models)}
folder = out.finish(p, judgements, figures)
