"""All models of a laptop replication: which of them the run store lacks, and how long they take from nothing."""

from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np

from lib import axes_arms, engine, experiment, params, standins, training
from lib.store import Store, key
from lib.training import Run, loop_count
from tests.bench.measure import row, seconds

ARMS = ("4_3_scratch_training", "4_4_refit", "4_5_overshoot", "beyond_damping", "beyond_readout_axis")
STANDINS = "4_1_asymmetry"  # whose models 4_2 reads
AXES = ("dense_axes", "moe_transfer")
TRAINING = (*ARMS, STANDINS, *AXES)
STEPS = 25  # timed of each kind of model


def runs_of(notebook: str) -> list[Run]:
    """Every model that this notebook trains at laptop scale."""
    p = params.load(notebook, "laptop")
    if notebook == STANDINS:
        return [standins.run_of(p, style, seed) for style in p["styles"] for seed in range(p["seeds"])]
    if notebook in AXES:
        arms = (*p["arms"], *p.get("arms_moe", ()))
        return [axes_arms.run_of(p, arm, seed) for arm in arms for seed in range(p["seeds"])]
    kinds = [make for task in p["tasks"] for make in experiment.kinds(p, task).values()]
    return [make(seed) for make in kinds for seed in range(p["seeds"])]


def runs() -> list[Run]:
    """Every model that the laptop notebooks train, once."""
    return list(dict.fromkeys(run for name in TRAINING for run in runs_of(name)))


def lacking(root: Path) -> dict[str, int]:
    """The notebooks some of whose models the run store at `root` lacks, and how many those are."""
    store = Store(root)
    missing = {n: sum(store.find(key(run.spec())) is None for run in runs_of(n)) for n in TRAINING}
    return {name: count for name, count in missing.items() if count}


def step_seconds(run: Run) -> float:
    """Seconds of one training step on one thread, the mean over some at their own batches and loop counts."""
    learner, r0, taken = training.One(run), run.config().loops, []
    for step, batch in enumerate(islice(training.batches_from(run, 0), STEPS + 5)):
        loops = loop_count(step, run.recipe, r0, run.seed)
        taken.append(seconds(lambda b=batch, n=loops, s=step: learner.update([b], [n], s)))
    return float(np.mean(taken[5:]))


def cold_row() -> dict:
    """Training every laptop model on all cores of this machine, from some steps of each kind. The last one to end leaves
    cores idle for a moment, which is not counted, nor are readings and figures."""
    kinds: dict[Run, int] = {}
    for run in runs():
        kinds[own] = kinds.get(own := replace(run, seed=0), 0) + 1
    total = sum(step_seconds(run) * run.recipe.steps * n for run, n in kinds.items())
    cores = engine.cores()
    name = f"training all {sum(kinds.values())} laptop models on {cores} cores, from {STEPS} steps of each kind"
    return row(name, total / cores / 60, "min", "the clock", at_most=100)
