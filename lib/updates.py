"""How far a loop step moves the state, and what happens when the state's scale alone is changed.

The contract paper leaves this reading untested ("Norm growth may damp the loop"): as a state that nothing normalises grows,
each application of the core moves it by a smaller relative amount. Here u is a step's actual input, after any boundary norm.
Shapes: N instances, B rows of a batch, A answers, D d_model, V vocabulary, K loop counts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from lib import BEHAVIOUR
from lib.boundary import Boundary, never
from lib.evaluation import batches
from lib.looped import LoopedModel, at_positions
from lib.store import Store, key
from lib.tasks import Instances, evaluation_set
from lib.training import Run, load

MEASURES = ("relative", "raw_to_raw", "angle", "to_final", "angle_to_final", "length")


def states(
    model: LoopedModel,
    ids: torch.Tensor,
    max_loops: int,
    boundary: Boundary,
    norms: Sequence[float] | None = None,
    start: int = 0,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (u, z) of steps 1..max_loops: the step's input after any boundary norm, and the raw state it makes, (B, T, D).

    norms: the L2 norm that every token's u is set to, without turning it, one a step, from step `start` + 1 on; before that,
    and without norms, this is `model.trajectory`. Raises ValueError for H/L states, which have no one input and output.
    """
    if model.config.state != "single":
        raise ValueError(
            f"state is {model.config.state!r}: it must be 'single', since a step of H/L states moves one by their sum"
        )
    context = model.context(ids)
    e = model.embed(ids, context)
    z = model.init_state(e)
    if model.config.injection_source == "tokens":
        e = model.tokens(ids)
    for t in range(max_loops):
        u = model.normalise(z) if boundary.fires_before(t) else z
        if norms is not None and t >= start:
            u = u * (norms[t] / u.norm(dim=-1, keepdim=True))
        z = model.step(u, e, t, never, context)
        yield u, z


@torch.no_grad()
def moves(
    model: LoopedModel,
    instances: Instances,
    max_loops: int,
    boundary: Boundary,
    norms: Sequence[float] | None = None,
    start: int = 0,
    batch_size: int = 256,
) -> dict[str, np.ndarray]:
    """How each step moves the state at the answer position: MEASURES -> (max_loops, N). norms and start as in `states`.

    relative ||z - u|| / ||u||; raw_to_raw ||z - z'|| / ||z'|| with z' the raw state before (the initial one at step 1); angle
    between u and z in degrees; to_final ||z - z_last|| / ||z_last|| and angle_to_final; length, ||u|| averaged over all tokens.
    """
    parts = []
    for ids, positions, _ in batches(model, instances, batch_size):
        steps, length = [], []
        for u, z in states(model, ids, max_loops, boundary, norms, start):
            steps.append([at_positions(v, positions)[:, 0].float() for v in (u, z)])
            length.append(u.float().norm(dim=-1).mean(dim=-1))
        u, z = (torch.stack(column) for column in zip(*steps, strict=True))  # (K, B, D)
        before = torch.cat((u[:1], z[:-1]))
        found = {
            "relative": (z - u).norm(dim=-1) / u.norm(dim=-1),
            "raw_to_raw": (z - before).norm(dim=-1) / before.norm(dim=-1),
            "angle": _angle(u, z),
            "to_final": (z - z[-1]).norm(dim=-1) / z[-1].norm(dim=-1),
            "angle_to_final": _angle(z, z[-1].expand_as(z)),
            "length": torch.stack(length),
        }
        parts.append({name: value.cpu().numpy() for name, value in found.items()})
    return {name: np.concatenate([part[name] for part in parts], axis=1) for name in MEASURES}


@torch.no_grad()
def accuracy_at_scale(
    model: LoopedModel,
    instances: Instances,
    max_loops: int,
    boundary: Boundary,
    norms: Sequence[float] | None,
    start: int,
    batch_size: int = 256,
) -> np.ndarray:
    """Accuracy at K = 1..max_loops, (max_loops,), where every step's input from step `start` + 1 on has the given norm."""
    right = np.zeros(max_loops)
    for ids, positions, answer in batches(model, instances, batch_size):
        for t, (_, z) in enumerate(states(model, ids, max_loops, boundary, norms, start)):
            right[t] += int((model.readout(z, positions)[:, 0].argmax(-1) == answer).sum())
    return right / len(instances.answer)


def _angle(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Degrees between vectors (..., D)."""
    # from both unit vectors' distance, since the cosine of a small angle is 1 in single precision
    a, b = (v / v.norm(dim=-1, keepdim=True) for v in (a, b))
    return torch.rad2deg(2 * torch.atan2((a - b).norm(dim=-1), (a + b).norm(dim=-1)))


@dataclass(frozen=True)
class Job:
    """One model's moves and accuracy; with `norms`, one a step, where steps' inputs from `start` + 1 on have those norms."""

    run: Run
    boundary: Boundary
    loops: int
    n: int
    root: Path
    norms: tuple[float, ...] | None = None
    start: int = 0

    def spec(self) -> dict:
        """The key material of this measurement in the run store."""
        spec = {k: v for k, v in asdict(self).items() if k not in ("run", "root", "boundary")}
        spec |= {"kind": "moves", "train": key(self.run.spec())}
        return spec | {"boundary": self.boundary.period, "torch": torch.__version__, "behaviour": BEHAVIOUR}


def measured(job: Job, report=None) -> Path:
    """The store's folder with one measurement, an .npz a depth (`moves` and accuracy): made now if it is not there yet."""

    def build(folder: Path):
        model = load(job.run, job.root)
        for d in range(1, job.run.task.max_depth + 1):
            instances = evaluation_set(job.run.task, d, job.n)
            how = (model, instances, job.loops, job.boundary, job.norms, job.start)
            found = {name: values.mean(axis=1) for name, values in moves(*how).items()}
            np.savez(folder / f"depth_{d}.npz", accuracy=accuracy_at_scale(*how), **found)

    spec = job.spec()
    return Store(job.root).make(key(spec), spec, build)


def stored(job: Job) -> Path | None:
    """What `measured` returns, if the store has it."""
    return Store(job.root).find(key(job.spec()))


def series(folder: Path) -> dict[str, np.ndarray]:
    """A measurement's means over instances and depths: name -> (loops,)."""
    files = [np.load(path) for path in sorted(folder.glob("depth_*.npz"))]
    return {name: np.mean([file[name] for file in files], axis=0) for name in files[0].files}
