"""`python -m tests.bench`: measure, print, and write outputs/bench.json, from which README.md's table is made."""

import json
import time
from unittest import mock

import numpy as np
import torch

from lib import engine, experiment, fused, looped, params, paths, refit, stats
from lib.boundary import every
from lib.evaluation import sweep
from lib.results import hardware
from lib.store import write_atomic
from lib.tasks import training_batches
from lib.training import optimizers, update
from tests.bench import experts, loading


def seconds(function) -> float:
    """Wall seconds of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def paired(a, b, rounds: int, warm: int = 2) -> np.ndarray:
    """Ratios seconds(a) / seconds(b), the two called in turn; shape (rounds,). Both are warmed up first."""
    for _ in range(warm):
        a(), b()
    return np.array([seconds(a) / seconds(b) for _ in range(rounds)])


def row(name: str, values: np.ndarray, unit: str, against: str, aim: str) -> dict:
    """One line of the table: the median and the middle half of the rounds."""
    low, median, high = np.quantile(values, [0.25, 0.5, 0.75])
    return dict(name=name, median=median, low=low, high=high, rounds=len(values), unit=unit, against=against, aim=aim)


def sweep_rows(p: dict) -> list[dict]:
    """A sweep over K = 1..8 r0 against one forward of as many loops, and against a forward for every K."""
    run = experiment.arm_run(p, "circuit", "with_norm", 0)
    model, last = looped.build(run.config(), 0).eval(), 8 * p["r0"]
    test = experiment.strata(run.task, 256)[run.task.max_depth]
    ids, positions = torch.as_tensor(test.ids), torch.as_tensor(test.answer_position[:, None])

    def forward(K):
        with torch.no_grad():
            model(ids, loops=K, boundary=every(1), answer_positions=positions)

    def swept():
        for _ in sweep(model, ids, positions, last, every(1)):
            pass

    once = paired(swept, lambda: forward(last), 15)
    all_of_them = paired(lambda: [forward(K) for K in range(1, last + 1)], swept, 5, warm=1)
    return [
        row(f"sweep over K = 1..{last}", once, "times", f"one forward of {last} loops", "at most 1.2"),
        row(f"{last} forwards", all_of_them, "times", f"one sweep over K = 1..{last}", "at least 10"),
    ]


def batch_row(p: dict, family: str) -> dict:
    """Making a training batch against the training step that uses it."""
    run = experiment.arm_run(p, family, "no_norm", 0)
    model = looped.build(run.config(), 0)
    opts, size, ahead = optimizers(model, run.recipe), run.recipe.batch_size, 32
    batch = training_batches(run.task, size, range(1), 0)[0]

    def make():
        training_batches(run.task, size, range(ahead), 0)

    def step():
        update(model, opts, batch, run.recipe, p["r0"], 1.0)

    share = 100 * paired(make, step, 20) / ahead
    return row(f"making a {family} batch", share, "% of a step", "a laptop training step", "under 5")


def training_row(p: dict, family: str) -> dict:
    """A training step by torch's own operations, one after the other, against the step as it is (`lib.fused`)."""
    run = experiment.arm_run(p, family, "no_norm", 0)
    batch = training_batches(run.task, run.recipe.batch_size, range(1), 0)[0]

    def step_of():
        model = looped.build(run.config(), 0)
        opts = optimizers(model, run.recipe)
        return lambda: update(model, opts, batch, run.recipe, p["r0"], 0.01)

    quick, plain = step_of(), step_of()

    def plainly():
        with mock.patch.object(fused, "suits", lambda *_: False):
            plain()

    ratios = paired(plainly, quick, 60, warm=5)
    return row(f"{family} training step, plain", ratios, "times", "the step as it is", "above 1")


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
    return row("refitting a head, 300 steps", share, "% of a training", "the model's own training", "under 5")


def rank_test_row() -> dict:
    """The exact rank test at the paper's 16 seeds against 16, with ties."""
    rng = np.random.default_rng(0)
    x, y = (rng.integers(0, 20, 16) / 20 for _ in range(2))
    taken = np.array([seconds(lambda: stats.mann_whitney(x, y)) for _ in range(20)])
    return row("exact rank test, 16 against 16", 1000 * taken, "ms", "the clock", "under 100")


def loading_rows() -> list[dict]:
    """Loading 2 GiB of bf16 weights, from bf16 and from float32 files: peak memory and time."""
    rows = []
    for stored in (torch.bfloat16, torch.float32):
        rises, ratios = loading.rounds(stored, 5)
        name = f"loading 2 GiB, stored as {str(stored).removeprefix('torch.')}"
        rows.append(row(f"{name}: peak memory", np.array(rises), "times", "the weights in the run's type", "under 1.15"))
        rows.append(row(f"{name}: time", np.array(ratios), "times", "reading the files whole", "under 2"))
    return rows


def expert_rows() -> list[dict]:
    """The mixture of experts against a loop over them and against its matrix products alone, on one thread and on all."""
    grouped, loop, products = experts.contenders()
    rows = []
    for threads in sorted({1, engine.cores()}):
        torch.set_num_threads(threads)
        on = f", {threads} threads" if threads > 1 else ""
        slower, share = paired(loop, grouped, 40), paired(grouped, products, 40)
        rows.append(row(f"one expert after the other{on}", slower, "times", "the grouped experts", "at least 1.5"))
        rows.append(row(f"the grouped experts{on}", share, "times", "their products at a large one's rate", "at most 2"))
    torch.set_num_threads(1)
    return rows


def main() -> None:
    """Measure everything on one thread."""
    torch.set_num_threads(1)
    p = params.load("4_3_scratch_training", "laptop")
    families = ("circuit", "hops")
    rows = [*(training_row(p, family) for family in families), *sweep_rows(p)]
    rows += [*(batch_row(p, family) for family in families), refit_row(), rank_test_row(), *loading_rows()]
    rows += expert_rows()
    machine = hardware()
    units = "AVX-512" if torch.backends.cpu.get_cpu_capability() == "AVX512" else "without AVX-512"
    result = {"machine": f"{machine['processor']}, {machine['cores']} cores, {units}, one thread", "rows": rows}
    for r in rows:
        spread = f"{r['median']:8.3g} [{r['low']:.3g}, {r['high']:.3g}] {r['unit']}"
        print(f"{r['name']:<46} {spread}, against {r['against']} (aim: {r['aim']})")
    paths.outputs().mkdir(parents=True, exist_ok=True)
    text = json.dumps(result, indent=1, default=float)
    write_atomic(paths.outputs() / "bench.json", text + "\n")


main()
