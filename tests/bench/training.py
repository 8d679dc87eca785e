"""Training: one step, its share of what the processor can do, and a whole arm of seeds against what one would write instead.

The baseline is `baselines.looped_llama`: the same model, batches, optimiser and schedule in plain eager mode.
"""

import itertools
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from lib import engine, experiment, fused, looped, params, stats
from lib.evaluation import read
from lib.tasks import training_batches
from lib.training import Run, load, optimizers, trained, update
from tests.bench.baselines import looped_llama
from tests.bench.measure import paired, row, seconds

NOTEBOOK = "4_3_scratch_training"
SIDE = 1024  # rows and columns of the product that stands for what the processor can do
STEPS = 10  # in one timed call
AHEAD = 32  # batches made in one call


def run_of(family: str, seed: int = 0, **changed) -> Run:
    """One seed of the laptop arm without the boundary norm."""
    return experiment.arm_run(params.load(NOTEBOOK, "laptop") | changed, family, "no_norm", seed)


def llama(run: Run) -> looped_llama.LoopedLlama:
    """The baseline's model of the run's shape, initialised by its seed."""
    config = run.config()
    torch.manual_seed(run.seed)
    return looped_llama.LoopedLlama(config.vocab_size, config.d_model, config.n_heads, config.d_ff, config.core, config.loops)


def batches_of(run: Run):
    """The run's training batches, one after the other."""
    for start in itertools.count(step=AHEAD):
        yield from training_batches(run.task, run.recipe.batch_size, range(start, start + AHEAD), run.seed)


def steps_of(run: Run):
    """A call that takes a few training steps on one batch."""
    model = looped.build(run.config(), 0)
    opts, batch = optimizers(model, run.recipe), next(batches_of(run))

    def some():
        for _ in range(STEPS):
            update(model, opts, batch, run.recipe, run.config().loops, 0.01)

    return some


def step_rows(family: str) -> list[dict]:
    """A training step on one thread against the baseline's and against torch's own operations, and its share of the rate of
    matrix products."""
    run = run_of(family)
    ours, plain, model, batch = steps_of(run), steps_of(run), llama(run), next(batches_of(run))

    def baseline():
        looped_llama.train(model, itertools.repeat(batch), STEPS, 0.01 * run.recipe.lr, 1, run.recipe.clip)

    def plainly():
        with mock.patch.object(fused, "suits", lambda *_: False):
            plain()

    with mock.patch.object(fused, "suits", lambda *_: False), FlopCounterMode(display=False) as counted:
        plain()
    a, b = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE)
    against, slower = paired(baseline, ours, 20), paired(plainly, ours, 20)
    rates, share = [], []
    for _ in range(20):
        spent = seconds(ours)
        product = seconds(lambda: torch.mm(a, b))
        rates.append(STEPS * batch.ids.shape[0] * batch.ids.shape[1] / spent)
        share.append(100 * counted.get_total_flops() / spent * product / (2 * SIDE**3))
    return [
        row(f"a {family} training step of the looped Llama", against, "times", "ours, one thread each", at_least=1.0),
        row(f"a {family} training step by torch's own operations", slower, "times", "ours, one thread each", at_least=1.0),
        row(f"{family} training throughput a core", rates, "tokens/s", "the clock"),
        row(f"{family} training arithmetic a core", share, "%", "the rate of a large float32 matrix product"),
    ]


def train_and_score(spec: tuple[Run, str, int], report) -> float:
    """A job: train the run into the store at a folder; its accuracy at the trained loop count, the mean over depths."""
    run, root, n = spec
    trained(run, Path(root), report)
    model = load(run, Path(root))
    parts = [read(model, instances, run.config().loops) for instances in experiment.strata(run.task, n).values()]
    return float(np.mean([(found.prediction[-1] == found.answer).mean() for found in parts]))


def arm_row(family: str, seeds: int = 8, halves: int = 2) -> dict:
    """Seeds of a whole arm an hour, trained and read at the trained loop count, against the baseline's on the same cores.

    Ours: single-threaded worker processes; theirs: one seed after another with torch's threads, in a process that has
    everything imported. In turn, a part of the seeds each.
    """
    n, cores = params.load(NOTEBOOK, "laptop")["n_test"], engine.cores()
    ratios, scores = [], ([], [])
    for some in np.array_split(range(seeds), halves):
        runs = [run_of(family, int(seed)) for seed in some]

        def theirs(runs=runs):
            for run in runs:
                model, recipe = llama(run), run.recipe
                looped_llama.train(model, batches_of(run), recipe.steps, recipe.lr, recipe.warmup, recipe.clip)
                strata = experiment.strata(run.task, n).values()
                scores[0].append(np.mean([looped_llama.accuracy(model, instances) for instances in strata]))

        def ours(runs=runs):
            with tempfile.TemporaryDirectory() as root:
                specs = [(run, root, n) for run in runs]
                scores[1].extend(engine.map_local(train_and_score, specs, cores, f"bench, {family}"))

        torch.set_num_threads(cores)
        slow = seconds(theirs)
        torch.set_num_threads(1)
        ratios.append(slow / seconds(ours))
        hours = [len(runs) / spent * 3600 for spent in (slow, slow / ratios[-1])]
    _, p = stats.mann_whitney(*scores)
    told = f"{hours[1]:.0f} against {hours[0]:.0f} seeds an hour; accuracy {np.mean(scores[1]):.3f} against "
    told += f"{np.mean(scores[0]):.3f}, {seeds} seeds each, p = {p:.2f}"
    name = f"seeds of a {family} arm an hour on {cores} cores"
    why = (
        "a step of ours is faster by less than the aim takes for granted, torch's own threads already win the baseline part "
        "of what processes win us, and starting the workers takes part of a round this short"
    )
    return row(name, ratios, "times", "the looped Llama, one seed after another", at_least=2.0, why=why, note=told)
