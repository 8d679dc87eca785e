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
# ![Accuracy lost beyond the budget against the relative update, a point a model: the models without the boundary norm move
# little and lose less, those with it move far and lose more](../outputs/laptop/beyond_damping/update_against_loss.png)
#
# *Laptop run: each point is one trained model, how far its late steps move the state against the accuracy it loses.*
# Words: [glossary](00_reading_guide.ipynb#Glossary).
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
# **Scale.** The models are section 4.3's, taken from the run store where they are there. The copy of this notebook in `notebooks/`
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
import itertools

import numpy as np
import pandas as pd

from lib import claims, engine, experiment, params, paths, plots, results, rules_beyond, stats, updates
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
    made = engine.map_missing(updates.measured, wanted, updates.stored, workers or None, title=title)
    return [updates.series(folder) for folder in made]


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
# trajectory ends (on the first task):

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
        r = stats.rank_correlation(group["update"], group["lost"], group["arm"])
        rows.append({"task": task, "models": name, "rank correlation": r.value, "low": r.low, "high": r.high, "n": r.n})
correlations = pd.DataFrame(rows)
correlations.set_index(["task", "models"]).round(3)

# %% [markdown]
# ## Scale alone
#
# If damping is what protects, then scale alone should do it. The next runs change nothing but the length of each step's input: every
# token's u is set, without turning it, to a length that depends on the step alone. Up to r0 nothing is changed.
#
# * *other arm's length*: what u measures in the other arm at that step, averaged over tokens, instances and seeds. The arm without
#   the norm is held at the small, constant length that the norm gives; the arm with it gets a growing length, after its norm.
# * *own length, evened out* is the control: the same, with the arm's own averages, so that only the differences between tokens go.
# * *other arm's length from step 2*: the same exchange within the budget too.

# %%
lengths = experiment.metric(steps, "length").groupby(["task", "arm", "K"])["value"].mean()
other_arm = {"no_norm": "with_norm", "with_norm": "no_norm"}
RUNS = {
    "own length, evened out beyond r0": (r0, lambda arm: arm),
    "other arm's length beyond r0": (r0, other_arm.get),
    "other arm's length from step 2": (1, other_arm.get),
}
scaled_cells, scaled_jobs = [], []
for (cell, job), (name, (start, whose)) in itertools.product(zip(cells, jobs, strict=True), RUNS.items()):
    target = tuple(round(float(v), 6) for v in lengths[cell["task"], whose(cell["arm"])].sort_index())
    if np.isfinite(target).all():  # else an arm diverged, and its lengths are not to be had
        scaled_cells.append(cell | {"run": name})
        scaled_jobs.append(updates.Job(job.run, job.sweeps[0][0], 8 * r0, n_test, paths.runs(), target, start))
scaled = measure(scaled_jobs, "beyond, scale")
print(len(scaled_jobs), "rescaled runs of", len(cells) * len(RUNS))

# %%
rows, moved_rows = [], []
for cell, found in zip(scaled_cells, scaled, strict=True):
    gone = tuple(cell[k] for k in ("task", "arm", "seed")) in lost_models
    rows += [cell | {"K": K, "value": np.nan if gone else v} for K, v in enumerate(found["accuracy"], start=1)]
    moved_rows.append(cell | {"K": 8 * r0, "value": np.nan if gone else found["relative"][-1]})
everywhere = swapped[swapped["d_star"] == "all"]
rescaled = pd.concat(
    [
        accuracy.assign(run="own length"),
        experiment.metric(everywhere, "accuracy").assign(run="other arm's boundary"),
        pd.DataFrame(rows),
    ]
)[["task", "arm", "seed", "run", "K", "value"]]

# %% [markdown]
# That the exchange of lengths does exchange the sizes of updates: the mean relative update at step 8 r0.

# %% tags=["nbval-ignore-output"]
own_moves = relative[relative["K"] == 8 * r0].assign(run="own length")
update_sizes = pd.concat([own_moves, pd.DataFrame(moved_rows)])[["task", "arm", "run", "seed", "K", "value"]]
update_sizes.groupby(["task", "arm", "run"])["value"].mean().unstack("run").round(4)

# %%
for arm in ARMS:
    shown = rescaled[rescaled["arm"] == arm].assign(arm=lambda f: f["run"])
    chart = plots.against_loops(shown, "accuracy", r0, title=f"trained with: {plots.LABELS[arm]}")
    display(out.chart(chart, f"scale_alone_{arm}"))

# %% [markdown]
# Where the control changes nothing, its curve covers the one of the model's own length.
#
# What scale alone does at 8 r0: the accuracy it adds or takes, paired by seed, beside what the whole other boundary does.

# %% tags=["nbval-ignore-output"]
at_end = (
    rescaled[rescaled["K"] == 8 * r0]
    .fillna({"value": 0})
    .pivot_table(index=["task", "arm", "seed"], columns="run", values="value")
)
changes = at_end.drop(columns="own length").sub(at_end["own length"], axis=0)
changes = changes.reset_index().melt(["task", "arm", "seed"], var_name="run").dropna(subset="value")
effect = plots.means(changes, ["task", "arm", "run"])
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
# The paper leaves the reading untested, so there is nothing to agree with. The rule's correlation over both arms is nearly implied
# by the arms lying apart; whether single models that move more also lose more is what the rows inside each arm say. Neither is a
# cause: the rescaled runs are the test of cause, and they decide no verdict.
#
# Length is not quite all that the rescaled runs change: the feed-forward half of a layer reads u plus what attention added to it,
# so a longer u also turns what the layer adds.
#
# **Departs (smoke and laptop):** section 4.3's small models, which loop a single layer; the answer's position alone is measured.

# %%
assert steps["value"].dropna().ge(0).all()
one = rescaled[rescaled["K"] == 1].round({"value": 9}).pivot_table(index=["task", "arm", "seed"], columns="run", values="value")
assert (one.nunique(axis=1) <= 1).all(), "at one loop no run differs: nothing has been rescaled yet"
before = (
    rescaled[(rescaled["K"] <= r0) & rescaled["run"].isin(["own length", *list(RUNS)[:2]])]
    .dropna(subset="value")
    .round({"value": 9})
)
assert (before.groupby(["task", "arm", "seed", "K"])["value"].nunique() == 1).all(), "up to r0 nothing is rescaled"
for name in ("steps", "models", "correlations", "rescaled", "update_sizes", "effect", "floors"):
    out.table(globals()[name], name)
figures = {"models": 0, "models of section 4.3": len(made), "diverged": len(lost_models)}
folder = out.finish(p, judgements, figures)
