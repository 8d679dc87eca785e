"""All seeds of an arm trained at once against one after another, on whatever device is at hand.

On a GPU also what it comes to: seeds an hour, and the share of the rate of large matrix products in the same precision.
Shapes: S seeds.
"""

import dataclasses
from unittest import mock

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from lib import cost, experiment, fused, params, together, training
from lib.training import One, Run, batches_from
from tests.bench.measure import paired, row, seconds

NOTEBOOK, FAMILY = "4_3_scratch_training", "circuit"
SEEDS, STEPS, ROUNDS = 4, 3, 12  # steps in one timed call
SIDE = 8192  # rows and columns of the product that stands for what the device can do


def runs_on(device: str, precision: str) -> list[Run]:
    """Seeds of the arm without the boundary norm: the paper's on a GPU, as many as fit up to all of them, else the laptop's."""
    p = params.load(NOTEBOOK, "laptop" if device == "cpu" else "paper") | {"device": device}
    runs = [experiment.arm_run(p, FAMILY, "no_norm", seed) for seed in range(SEEDS if device == "cpu" else p["seeds"])]
    return together.groups([dataclasses.replace(r, recipe=dataclasses.replace(r.recipe, precision=precision)) for r in runs])[0]


def steps_of(learner, runs: list[Run]):
    """A call that takes a few steps of every seed, each time on the same batch, and waits for them."""
    batches, loops = [next(batches_from(run, 0)) for run in runs], [run.config().loops for run in runs]

    def some():
        for _ in range(STEPS):
            learner.update(batches, loops, 0)
        if runs[0].device != "cpu":
            torch.cuda.synchronize()

    return some


def seeds_rows() -> list[dict]:
    """A group's step against its seeds' own, all by torch's operations; on a GPU in either precision, with what it comes to."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = []
    for precision in training.PRECISIONS if device == "cuda" else training.PRECISIONS[:1]:
        runs = runs_on(device, precision)
        group, alone = steps_of(together.Stack(runs), runs), [steps_of(One(run), [run]) for run in runs]
        where = f"{len(runs)} seeds of a {FAMILY} arm on a {device}, {precision}"

        def one_after_another(alone=alone):
            for some in alone:
                some()

        with mock.patch.object(fused, "suits", lambda *_: False):
            ratios = paired(one_after_another, group, ROUNDS)
            rows.append(row(f"{where}, one after another", ratios, "times", "all at once"))
            if device == "cuda":
                with FlopCounterMode(display=False) as counted:
                    alone[0]()
                spent = np.array([seconds(group) for _ in range(ROUNDS)])
                rate = cost.rate(device, getattr(torch, precision), 2.0, SIDE)
                hours = spent / STEPS * runs[0].recipe.steps / 3600
                share = 100 * len(runs) * counted.get_total_flops() / spent / rate
                rows.append(row(f"{where}, all at once", len(runs) / hours, "seeds an hour", "the clock"))
                rows.append(row(f"{where}, arithmetic", share, "%", "the rate of large matrix products"))
    return rows
