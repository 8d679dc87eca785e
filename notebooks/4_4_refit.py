# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 4.4 The damage sits in the last block layer and the head
#
# ![Recovered fraction against refit steps: the last layer refitted with the head comes back to the accuracy before the change
# within few steps, the head alone rises slowly and later](../outputs/laptop/4_4_refit/recovered_fraction.png)
#
# *Laptop run: what a new head alone, and the last layer with it, bring back after the loop was changed; points are seeds.*
# Words: [glossary](00_reading_guide.ipynb#Glossary).
#
# > "Freezing the loop and refitting only the head (unembedding + final normalization, 300 steps): Recovers 33% of lost accuracy
# > on circuit (0.639 → 0.756), 31% on hops." (contract paper, section 4.4)
#
# **Claim.** Change the loop of a trained model and its accuracy falls. A new head over the frozen, changed loop brings back a
# part and then no more; the last layer of the loop, refitted with the head, brings back all.
#
# | paper, 19M parameters | head, 300 steps | head, 3000 | last layer and head, 30 | last layer and head, 3000 |
# |---|---|---|---|---|
# | circuit, recovered fraction | 0.33 | 0.35 | 0.43 | 1.00 |
# | hops, recovered fraction | 0.31 | | 0.98 | |
#
# **Rules.** Written before any run in `params/claims.yaml` and printed in full below. In short, on circuit with the norm added:
# layer minus head above 0 at the largest shared count of steps, and the layer's interval reaching 0.95; ten times the steps
# adding less than 0.05 to the head. Where the changed loop loses under 0.05 nothing can be recovered, and the claims are
# inconclusive.
#
# **Scale.** The copy of this notebook in `notebooks/` holds *smoke* results (two small models an arm, under a minute): they
# show that everything runs and decide nothing. The results that count are in
# [the laptop run](../outputs/laptop/4_4_refit/notebook.ipynb) (`make replicate`: circuit alone, four seeds an arm, the layer's
# refit ending at 1000 steps). `params/4_4_refit/overnight.yaml` adds hops, seeds and all 3000 steps; `paper.yaml` is the
# paper's size, for a GPU. The models here loop two layers, since with section 4.3's single one "the last layer" would be the
# whole loop.

# %% tags=["parameters"]
scale: str = "smoke"  # names the outputs folder: smoke, laptop, overnight or paper
tasks: list[str] = ["circuit"]  # families to train on
seeds: int = 2  # models an arm and task; seeds count from 0
r0: int = 4  # loop steps in training; the sweep goes to 8 r0
d_model: int = 32  # channels of the state
n_heads: int = 4  # attention heads
d_ff: int = 64  # width of the gated feed-forward
core: int = 2  # layers that are looped, at least 2: the last of them is refitted
circuit_width: int = 3  # gates a layer
circuit_depth: int = 1  # largest depth d*
circuit_steps: int = 250  # optimiser steps
circuit_lr_no_norm: float = 2.0e-3  # peak learning rate
circuit_lr_with_norm: float = 2.0e-3  # peak learning rate
hops_width: int = 4  # symbols in the map, of 26
hops_depth: int = 1  # largest number of hops d*
hops_steps: int = 300  # optimiser steps
hops_lr_no_norm: float = 8.0e-3  # peak learning rate
hops_lr_with_norm: float = 8.0e-3  # peak learning rate
refit_steps_head: list[int] = [3, 10, 30, 100]  # optimiser steps after which the head refit is read
refit_steps_layer: list[int] = [3, 10, 30]  # the same for the last layer with the head
refit_lr: float = 4.0e-3  # constant learning rate of a refit
refit_batches: int = 16  # training batches in the fixed set a refit goes round
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

from lib import claims, engine, experiment, params, paths, plots, refit, results, rules_refit
from lib.experiment import ARMS, Job

p = params.of(globals())
out = results.begin("4_4_refit", scale)
plots.setup()

# %% [markdown]
# ## Two changed loops
#
# * **norm added**: the arm trained without the boundary norm, run with it. This is the paper's direction by inference: 0.639 to
#   0.756 as a third of the loss implies an intact accuracy near 0.994, which is its arm without the norm.
# * **norm removed**: the arm trained with the norm, run without it.
#
# Every model is trained, then read at K = r0 in its own loop and in the changed one. The difference is the loss to recover.

# %%
DIRECTIONS = {"no_norm": "added", "with_norm": "removed"}
cells = [{"task": task, "arm": arm, "seed": seed} for task in tasks for arm in ARMS for seed in range(seeds)]
jobs = []
for cell in cells:
    run = experiment.arm_run(p, *cell.values())
    sweeps = ((ARMS[cell["arm"]], r0), (experiment.other(cell["arm"]), r0))
    jobs.append(Job(run, sweeps, n_test, paths.runs()))
made = experiment.make(jobs, workers or None, title="4.4, training")
own, changed, training = experiment.collect(cells, jobs, made)
print(len(made), "models of", core, "looped layers")

# %%
at = {"metric": "accuracy", "d_star": "all", "K": r0}
own, changed = (table[(table[list(at)] == pd.Series(at)).all(axis=1)] for table in (own, changed))
both = pd.concat([own.assign(run="own boundary"), changed.assign(run="other boundary")])
out.chart(plots.swap(both), "loss")

# %% [markdown]
# ## Refit
#
# What may move is one of two parts; all else is frozen, also the boundary's norm, which keeps a copy of its own where the
# readout's norm is refitted. The last layer is applied at every loop step, so refitting it refits a part of the loop:

# %%
for part in refit.PARTS:
    model = refit.frozen(experiment.untrained(jobs[0].run))
    moving = sum(q.numel() for q in refit.free(model, part))
    print(f"{part}: {moving} of {sum(q.numel() for q in model.parameters())} parameters move")

# %% [markdown]
# The training set is fixed: the first batches of each model's own training. For the head the loop's states are computed once and
# kept, so that thousands of steps cost seconds.

# %%
counts = {"head": refit_steps_head, "layer": refit_steps_layer}
wanted = [(cell, job, part) for cell, job in zip(cells, jobs, strict=True) for part in refit.PARTS]
refit_jobs = []
for cell, job, part in wanted:
    how = refit.Refit(part, tuple(counts[part]), refit_lr, refit_batches, batch_size)
    refit_jobs.append(refit.Job(job.run, experiment.other(cell["arm"]), how, n_test, paths.runs()))
folders = engine.map_missing(refit.refit_and_read, refit_jobs, refit.stored, workers or None, title="4.4, refits")

# %%
diverged = set(training.loc[training["diverged"], ["task", "arm", "seed"]].itertuples(index=False, name=None))
parts = []
for (cell, _, part), folder in zip(wanted, folders, strict=True):
    frame = refit.readings(folder).assign(**cell, part=part, direction=DIRECTIONS[cell["arm"]])
    parts.append(frame.assign(value=float("nan")) if tuple(cell.values()) in diverged else frame)
refits = pd.concat(parts)[["task", "direction", "part", "steps", "seed", "value"]]
intact = own.assign(direction=own["arm"].map(DIRECTIONS))[["task", "direction", "seed", "value"]]
floors = experiment.floor_table([experiment.task_of(p, task) for task in tasks], n_test)

# %% [markdown]
# ## Accuracy after refitting

# %% tags=["nbval-ignore-output"]
mean = refits.groupby(["task", "direction", "part", "steps"])["value"].mean().unstack("steps").round(3)
mean.insert(0, "intact", [intact[(intact["task"] == t) & (intact["direction"] == d)]["value"].mean() for t, d, _ in mean.index])
mean

# %% [markdown]
# ## Recovered fraction
#
# The ratio of seed means, (refitted - changed) / (intact - changed) at K = r0, with its bootstrap interval; never clipped, and
# shown only where the changed loop lost at least 0.05 with an interval above 0. Points are seeds that lost at least 0.05 each.
# Crosses are the paper's.

# %%
rows, seed_rows = [], []
for (task, direction, part), found in refits.groupby(["task", "direction", "part"]):
    panel = f"{task}, norm {direction}"
    for steps in sorted(set(found["steps"]) - {0}):
        cell = rules_refit.recovered(refits, intact, task, direction, part, steps, "", r0)
        each, others = rules_refit.by_seed_fractions(refits, intact, task, direction, part, steps)
        found_here = {k: cell[k] for k in ("value", "low", "high", "n")} | {"seeds that lost under 0.05": others}
        rows.append({"panel": panel, "arm": part, "steps": steps} | found_here)
        seed_rows += [{"panel": panel, "arm": part, "steps": steps, "seed": s, "value": v} for s, v in each.items()]
fractions = pd.DataFrame(rows).astype({k: float for k in ("value", "low", "high")})
seed_fractions = pd.DataFrame(seed_rows, columns=["panel", "arm", "steps", "seed", "value"])
rules = claims.load()
paper = [("circuit", "head", 300, rules["refit_head"]["value"]["circuit"])]
paper += [("hops", "head", 300, rules["refit_head"]["value"]["hops"])]
paper += [("circuit", "head", 3000, rules["refit_head_plateau"]["value"])]
paper += [("circuit", "layer", s, v) for s, v in zip(*(rules["refit_layer"][k] for k in ("steps", "value")), strict=True)]
paper += [("hops", "layer", rules["refit_layer_hops"]["steps"], rules["refit_layer_hops"]["value"])]
reported = pd.DataFrame(paper, columns=["task", "arm", "steps", "value"])
reported = reported.assign(panel=reported["task"] + ", norm added")

# %%
chart = plots.recovery(fractions, seed_fractions, reported)
out.chart(chart, "recovered_fraction")

# %% [markdown]
# A plateau would be a curve of the head that is flat over its last decade, at whatever height. Seeds without a point lost under
# 0.05 themselves:

# %% tags=["nbval-ignore-output"]
fractions.groupby(["panel", "arm"])[["n", "seeds that lost under 0.05"]].max()

# %% [markdown]
# ## Tests and verdicts

# %% tags=["nbval-ignore-output"]
judgements = rules_refit.judge(refits, intact, floors, r0, scale)
verdicts = pd.DataFrame([claims.row(rules[j.id], j, "") for j in judgements])
with pd.option_context("display.max_colwidth", None):
    display(verdicts[["id", "verdict", "paper", "ours", "n", "reason"]])

# %% [markdown]
# The rules, as they stood before the run:

# %%
with pd.option_context("display.max_colwidth", None):
    display(verdicts.loc[verdicts["kind"] == "order", ["id", "rule"]].set_index("id"))

# %% [markdown]
# ## What is the same as in the paper, and what is not
#
# Same at every scale: the two parts, the frozen changed loop, the step counts as far as they go, the recovered fraction at
# K = r0. Not stated by the summary, and chosen here: the direction (inferred); that the last layer is refitted at every loop step
# with gradients through all of them; the refit's optimiser (AdamW at a constant rate, in the parameters above) and its training
# set (the first batches of the model's own training).
#
# **Departs (smoke and laptop):** models of under 0.2M parameters with two looped layers, where the paper has 19M and six: the
# last layer is half of the loop here, a sixth there. Seeds are few, so intervals over seeds decide, not rank tests. The reported
# values are out of reach; the directions are judged.

# %%
assert (refits.groupby(["task", "direction", "seed", "steps"])["value"].nunique().xs(0, level="steps") <= 1).all()
fitted = training[~training["diverged"]]
assert (fitted["final_loss"] < fitted["first_loss"]).all(), "every loss must fall"
start = refits[refits["steps"] == 0].merge(
    changed.assign(direction=changed["arm"].map(DIRECTIONS)), on=["task", "direction", "seed"], suffixes=("", "_swept")
)
assert not ((start["value"] - start["value_swept"]).abs() > 1e-9).any(), "before any step a refit reads what the sweep read"
last = refits[refits["steps"] == refits.groupby("part")["steps"].transform("max")]
assert len(last) == len(folders), "every refit ran to its last step"
for name in ("intact", "refits", "fractions", "seed_fractions", "floors", "training"):
    out.table(globals()[name], name)
figures = {"models": len(made), "diverged": len(diverged), "refits": len(folders)}
folder = out.finish(p, judgements, figures, training["seconds"].sum())
