"""What a short training of every family ends in, to many digits: the guard of the behaviour version.

`python -m tests.golden_behaviour` writes tests/golden/behaviour.json anew. Do that only together with a raised BEHAVIOUR.
"""

import hashlib
import json
from pathlib import Path

import torch

from lib import BEHAVIOUR, refit
from lib.boundary import every, never
from lib.evaluation import read
from lib.looped import build
from lib.tasks import Task, evaluation_set, training_batches
from lib.training import Recipe, learning_rate, make_run, optimizers, update
from lib.updates import accuracy_at_scale, moves
from tests.models import EXPERTS

FILE = Path(__file__).parent / "golden" / "behaviour.json"
TASKS = {"circuit": Task("circuit", 4, 2), "hops": Task("hops", 6, 2), "paragg": Task("paragg", 2, 1)}
SHAPES = {
    "pre_norm, never": {"core": 1, "boundary": never.period},
    "pre_norm, every step": {"core": 1, "boundary": every(1).period},
    "sandwich, envelope, noise": {
        "prelude": 1,
        "core": 1,
        "coda": 1,
        "block": "sandwich",
        "state_init": "noise",
        "boundary": 2,
    },
    "split states": {
        "core": 2,
        "state": "split",
        "h_cycles": 1,
        "l_cycles": 2,
        "repeats": 2,
        "injection": "diagonal",
        "state_init": "noise",
        "boundary": 1,
    },
    "experts, unrolled": EXPERTS | {"core": 1, "coda": 1, "unrolled": True, "injection": "diagonal"},
}


def adamw(task: Task, shape: dict) -> dict[str, float]:
    """The loss of the 20th float64 AdamW step and two sums over the weights after it."""
    recipe = Recipe(20, 8, 3.0e-3, warmup=5, weight_decay=0.1)
    run = make_run(task, recipe, 7, d_model=16, n_heads=2, d_ff=24, loops=3, **shape)
    model = build(run.config(), run.seed).double()
    opts = optimizers(model, recipe)
    for step, batch in enumerate(training_batches(task, 8, range(20), run.seed)):
        loss = update(model, opts, batch, recipe, 3, learning_rate(step, recipe))
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    weights = torch.cos(torch.arange(len(flat), dtype=torch.float64))
    return {"loss": loss, "square_sum": float((flat**2).sum()), "projection": float(flat @ weights)}


def muon() -> list[float]:
    """One Muon update of a fixed matrix from a fixed gradient: its first eight entries."""
    recipe = Recipe(20, 8, 0.02, optimizer="muon")
    model = build(make_run(TASKS["circuit"], recipe, 7, d_model=16, n_heads=2, d_ff=24).config(), 7)
    for i, p in enumerate(model.parameters()):
        p.grad = torch.sin(torch.arange(p.numel()).float() * (i + 1)).view(p.shape)
        torch.nn.init.zeros_(p)  # what is left is the update itself
    for opt in optimizers(model, recipe):
        opt.step()
    return model.core[0].attention.qkv.weight.detach().flatten()[:8].tolist()


def readings() -> dict[str, float]:
    """Sums of what a sweep of an untrained float64 model reads: stored sweeps are valid while these stand."""
    run = make_run(TASKS["circuit"], Recipe(1, 8, 1.0), 7, d_model=16, n_heads=2, d_ff=24)
    found = read(build(run.config(), 7).double(), evaluation_set(run.task, 2, 16), 6, every(2))
    return {name: float(getattr(found, name).sum()) for name in ("prediction", "entropy", "gap", "norm")}


def refits() -> dict[str, float]:
    """The square sum of the refitted weights after 10 float64 steps of each part: stored refits are valid while these stand."""
    run = make_run(TASKS["circuit"], Recipe(1, 8, 1.0), 7, d_model=16, n_heads=2, d_ff=24, core=2, loops=3)
    model, batches = build(run.config(), 7).double(), training_batches(run.task, 8, range(4), 7)
    found = {}
    for part in refit.PARTS:
        *_, (_, last) = refit.refitted(model, batches, every(1), refit.Refit(part, (10,), 3.0e-3, 4, 8))
        found[part] = float(sum((p.detach() ** 2).sum() for p in last.parameters() if p.requires_grad))
    return found


def state_moves() -> dict[str, float]:
    """Sums of what `updates` measures, with lengths set from step 3 on: stored measurements are valid while these stand."""
    run = make_run(TASKS["hops"], Recipe(1, 8, 1.0), 7, d_model=16, n_heads=2, d_ff=24)
    how = (build(run.config(), 7).double(), evaluation_set(run.task, 2, 16), 5, every(2), (3.0,) * 5, 2)
    return {name: float(v.sum()) for name, v in moves(*how).items()} | {"accuracy": float(accuracy_at_scale(*how).sum())}


def data(task: Task) -> str:
    """A digest of the family's training batches and test instances, which are whole numbers and must never move."""
    digest = hashlib.sha256()
    for batch in training_batches(task, 8, range(3), 7):
        digest.update(batch.ids.tobytes() + batch.labels.tobytes())
    for d in range(1, task.max_depth + 1):
        found = evaluation_set(task, d, 8)
        digest.update(found.ids.tobytes() + found.answer.tobytes() + found.skeleton.tobytes())
    return digest.hexdigest()[:16]


def compute() -> dict:
    """Everything that is guarded, with the behaviour version it belongs to."""
    return {
        "behaviour": BEHAVIOUR,
        "data": {name: data(task) for name, task in TASKS.items()},
        "adamw": {f"{name}, {shape}": adamw(task, SHAPES[shape]) for name, task in TASKS.items() for shape in SHAPES},
        "muon": muon(),
        "readings": readings(),
        "refits": refits(),
        "moves": state_moves(),
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(compute(), indent=1) + "\n", encoding="utf-8")
