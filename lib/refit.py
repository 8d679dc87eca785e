"""Refitting the readout, or the last layer with it, over a loop that was changed and frozen (contract paper, section 4.4).

Two parts may move: "head", the unembedding and the readout's norm; "layer", the last layer of the core with the head. That
layer is applied at every loop step, so refitting it refits a part of the loop; the rest stays frozen. Where the boundary uses
the readout's norm it keeps a frozen copy, so that refitting the readout does not change the loop.
Shapes: B batch, A answers, D d_model, V vocabulary.
"""

import copy
import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
import torch.nn.functional as F
from torch import nn

from lib import BEHAVIOUR, store
from lib.boundary import Boundary
from lib.evaluation import read
from lib.looped import LoopedModel, at_positions
from lib.tasks import evaluation_set, training_batches
from lib.training import OTHER_LAYOUT, Run, load, log, read_checkpoint, save_checkpoint

PARTS = ("head", "layer")
CLIP = 1.0  # largest gradient norm, as in training


@dataclass(frozen=True)
class Refit:
    """How a part is refitted: the counts of steps after which it is read, a constant rate, and its fixed training set, the
    first `batches` batches of the model's own training. Raises ValueError naming the key when a value is impossible."""

    part: str
    steps: tuple[int, ...]
    lr: float
    batches: int
    batch_size: int

    def __post_init__(self):
        if self.part not in PARTS:
            raise ValueError(f"part is {self.part!r}: it must be one of {', '.join(PARTS)}")
        if not self.steps or list(self.steps) != sorted(set(self.steps)) or self.steps[0] < 1:
            raise ValueError(f"steps is {list(self.steps)}: it must be whole numbers from 1 up, in rising order")
        if self.lr <= 0 or self.batches < 1 or self.batch_size < 1:
            raise ValueError("lr must be above 0, batches and batch_size at least 1")


def frozen(model: LoopedModel) -> LoopedModel:
    """A copy that trains nothing, whose boundary has a norm of its own: a copy of the readout's where they shared one."""
    model = copy.deepcopy(model).requires_grad_(False)
    if model.boundary_norm is None:
        model.boundary_norm, model.config.shared_norm = copy.deepcopy(model.norm), False
    return model


def free(model: LoopedModel, part: str) -> list[nn.Parameter]:
    """The parameters of a part, which may move from here on. Raises ValueError where the last layer is the whole loop."""
    if part == "layer" and len(model.core) < 2:
        raise ValueError("core is 1: with a single looped layer the last layer is the whole loop, so it must be at least 2")
    modules = [model.norm, model.lm_head, *([model.core[-1]] if part == "layer" else [])]
    return [p.requires_grad_() for module in modules for p in module.parameters()]


@torch.no_grad()
def states(model: LoopedModel, batches: list, boundary: Boundary) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What the head reads of every batch, once and for all: (raw states after r0 loops (B, A, D), labels (B, A)).

    Raises ValueError for a model with a coda, whose layers would have to move with the head.
    """
    if model.coda:
        raise ValueError(f"coda is {len(model.coda)}: refitting a head behind a coda is not built, so it must be 0")
    found = []
    for batch in batches:
        ids, positions, labels = _tensors(model, batch)
        *_, last = model.trajectory(ids, boundary=boundary)
        found.append((at_positions(last, positions), labels))
    return found


def refitted(
    model: LoopedModel, batches: list, boundary: Boundary, refit: Refit, folder: Path | None = None, report=None
) -> Iterator[tuple[int, LoopedModel]]:
    """Yield (steps, model) at 0 and at each of refit.steps: the model's copy, run with `boundary`, its part refitted so far.

    The batches are gone round in order. A checkpoint is left in `folder` at every count, and resumed from: earlier counts
    are then not yielded again. report(done, total) is called as it goes.
    """
    trained, last = model, refit.steps[-1]
    model, parameters, optimizer = _fresh(trained, refit)
    known = states(model, batches, boundary) if refit.part == "head" else None
    checkpoint, start = folder and folder / "checkpoint.pt", 0
    if saved := checkpoint and read_checkpoint(checkpoint, str(model.device)):
        try:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            start = saved["step"]
            log(folder, f"resumed from step {start} of {last}")
        except OTHER_LAYOUT:
            log(folder, "the checkpoint is of another layout and is not read")
            model, parameters, optimizer = _fresh(trained, refit)
    if not start:
        yield 0, model
    for step in range(start, last):
        if known:
            z, labels = known[step % len(known)]
            logits = model.readout(z)
        else:
            ids, positions, labels = _tensors(model, batches[step % len(batches)])
            logits = model(ids, boundary=boundary, answer_positions=positions).logits
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        if report:
            report(step + 1, last)
        if step + 1 in refit.steps:
            yield step + 1, model
            if checkpoint:  # only now: what was yielded has been read
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
                save_checkpoint(state, checkpoint)


def _fresh(model: LoopedModel, refit: Refit) -> tuple[LoopedModel, list[nn.Parameter], torch.optim.Optimizer]:
    """A copy of which only the refit's part may move, that part's parameters, and their optimiser."""
    model = frozen(model)
    parameters = free(model, refit.part)
    return model, parameters, torch.optim.AdamW(parameters, lr=refit.lr, weight_decay=0.0, fused=True)


def _tensors(model: LoopedModel, batch) -> tuple[torch.Tensor, ...]:
    """ids (B, T, F), answer positions (A,) and labels (B, A) where the model is."""
    return tuple(torch.as_tensor(v, device=model.device) for v in (batch.ids, batch.answer_positions, batch.labels))


@dataclass(frozen=True)
class Job:
    """One refit of one trained model run with a changed boundary, read on n test instances at every depth at K = r0."""

    run: Run
    boundary: Boundary
    refit: Refit
    n: int
    root: Path

    def spec(self) -> dict:
        """The key material of this refit in the run store."""
        spec = {"kind": "refit", "train": store.key(self.run.spec()), "boundary": self.boundary.period, "n": self.n}
        return spec | {"refit": dataclasses.asdict(self.refit), "torch": torch.__version__, "behaviour": BEHAVIOUR}


def refit_and_read(job: Job, report=None) -> Path:
    """The store's folder with one refit's readings.json (steps, d_star, value: accuracy), made now if it is not there yet."""

    def build(folder: Path):
        model = load(job.run, job.root)
        task, r0 = job.run.task, model.config.loops
        tests = {d: evaluation_set(task, d, job.n) for d in range(1, task.max_depth + 1)}
        batches = training_batches(task, job.refit.batch_size, range(job.refit.batches), job.run.seed)
        kept = folder / "readings.json"
        rows = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else []
        for steps, at in refitted(model, batches, job.boundary, job.refit, folder, report):
            rows = [row for row in rows if row["steps"] < steps]  # a kill may fall between a reading and its checkpoint
            finite = all(p.isfinite().all() for p in at.parameters())
            for d, instances in tests.items():
                found = read(at, instances, r0, job.boundary)
                accuracy = float((found.prediction[-1] == found.answer).mean()) if finite else None
                rows.append({"steps": steps, "d_star": d, "value": accuracy})
            store.write_atomic(kept, json.dumps(rows))

    spec = job.spec()
    return store.Store(job.root).make(store.key(spec), spec, build)


def stored(job: Job) -> Path | None:
    """What `refit_and_read` returns, if the store has it."""
    return store.Store(job.root).find(store.key(job.spec()))


def readings(folder: Path) -> pd.DataFrame:
    """A refit's accuracy at K = r0, the mean over depths, NaN where it diverged: columns steps, value."""
    rows = pd.DataFrame(json.loads((folder / "readings.json").read_text(encoding="utf-8"))).astype({"value": float})
    return rows.groupby("steps", as_index=False)["value"].mean()
