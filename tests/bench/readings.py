"""What follows training: sweeps, refits, the making of batches, and the exact rank test."""

import numpy as np
import torch

from lib import experiment, looped, params, refit, stats
from lib.boundary import every
from lib.evaluation import sweep
from lib.tasks import training_batches
from lib.training import optimizers, update
from tests.bench.baselines.forwards import forwards
from tests.bench.measure import paired, row, seconds
from tests.bench.training import run_of


def sweep_rows() -> list[dict]:
    """A sweep over K = 1..8 r0 against one forward of as many loops, and against a forward for every K."""
    run = run_of("circuit")
    model, last = looped.build(run.config(), 0).eval(), 8 * run.config().loops
    test = experiment.strata(run.task, 256)[run.task.max_depth]
    ids, positions = torch.as_tensor(test.ids), torch.as_tensor(test.answer_position[:, None])

    def forward():
        with torch.no_grad():
            model(ids, loops=last, boundary=every(1), answer_positions=positions)

    def swept():
        for _ in sweep(model, ids, positions, last, every(1)):
            pass

    once = paired(swept, forward, 15)
    each = paired(lambda: forwards(model, ids, positions, last, every(1)), swept, 7, warm=1)
    return [
        row(f"a sweep over K = 1..{last}", once, "times", f"one forward of {last} loops", at_most=1.2),
        row(f"a forward for each K = 1..{last}", each, "times", "one sweep", at_least=10),
    ]


def batch_row(family: str) -> dict:
    """Making a training batch against the training step that uses it."""
    run = run_of(family)
    model = looped.build(run.config(), 0)
    opts, size, ahead = optimizers(model, run.recipe), run.recipe.batch_size, 32
    batch = training_batches(run.task, size, range(1), 0)[0]

    def make():
        training_batches(run.task, size, range(ahead), 0)

    def step():
        update(model, opts, batch, run.recipe, run.config().loops, 1.0)

    share = 100 * paired(make, step, 20) / ahead
    return row(f"making a {family} batch", share, "% of a step", "a laptop training step", at_most=5)


def refit_row() -> dict:
    """Refitting the head for 300 steps, its states included, against the whole training of the model."""
    p = params.load("4_4_refit", "laptop")
    run = experiment.arm_run(p, "circuit", "no_norm", 0)
    model, some = looped.build(run.config(), 0), 20
    opts = optimizers(model, run.recipe)
    batches = training_batches(run.task, p["batch_size"], range(p["refit_batches"]), 0)
    how = refit.Refit("head", (300,), p["refit_lr"], p["refit_batches"], p["batch_size"])

    def refitted():
        *_, _ = refit.refitted(model, batches, every(1), how)

    def train():
        for batch in batches[:some]:
            update(model, opts, batch, run.recipe, p["r0"], 0.01)

    share = 100 * paired(refitted, train, 7, warm=1) * some / run.recipe.steps
    return row("refitting a head, 300 steps", share, "% of a training", "the model's own training", at_most=5)


def rank_test_row() -> dict:
    """The exact rank test at the paper's 16 seeds against 16, with ties."""
    rng = np.random.default_rng(0)
    x, y = (rng.integers(0, 20, 16) / 20 for _ in range(2))
    taken = np.array([seconds(lambda: stats.mann_whitney(x, y)) for _ in range(20)])
    return row("the exact rank test, 16 seeds against 16", 1000 * taken, "ms", "the clock", at_most=100)
