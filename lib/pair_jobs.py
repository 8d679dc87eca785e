"""Making the pairs of sections 4.1 and 4.2: a model is trained or loaded, then read on each task under each boundary.

Every reading is an entry of the run store of its own, so that a further boundary reads only what is missing.
Shapes: N instances, K loop counts, D d_model.
"""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from lib import BEHAVIOUR, engine, standins, together
from lib.boundary import Boundary
from lib.evaluation import Readings, joined, read
from lib.looped import LoopedModel, at_positions
from lib.mixture import Mixture
from lib.pairs import NEVER, Pair
from lib.probe import Probe, probe
from lib.store import Store, key, write_array
from lib.tasks import Instances, Task, evaluation_set, floor
from lib.training import Run, load, trained


@dataclass(frozen=True)
class Job:
    """One stand-in and what is wanted of it: readings at K = 1..loops under each boundary period, and states to probe at K = r0
    with the norm at no boundary. n instances at every depth of every task."""

    run: Run
    periods: tuple[int, ...]
    loops: int
    n: int
    root: Path
    probed: bool = False

    def spec(self, kind: str, family: str, **what) -> dict:
        """The key material of one entry of the store."""
        spec = {"kind": kind, "train": key(self.run.spec()), "family": family, "n": self.n}
        return spec | what | {"torch": torch.__version__, "behaviour": BEHAVIOUR}

    def wanted(self) -> dict[tuple, dict]:
        """Every entry: (family, period), or (family, "states") -> its spec."""
        found = {}
        for task in self.run.task.tasks:
            for period in self.periods:
                found[task.family, period] = self.spec("pair", task.family, boundary=period, loops=self.loops)
            if self.probed:
                loops = self.run.config().loops
                found[task.family, "states"] = self.spec("states", task.family, boundary=NEVER, loops=loops)
        return found


def sets(mixture: Mixture, family: str, n: int) -> list[Instances]:
    """The test instances of every depth of a family."""
    return [mixture.evaluation_set(family, d, n) for d in range(1, mixture.task(family).max_depth + 1)]


def train_and_read(job: Job, report=None) -> dict:
    """Train the job's run and make its entries unless the store has them: {"model": folder, (family, what): folder}."""
    found = {"model": trained(job.run, job.root, report)}
    store, model = Store(job.root), None
    for (family, what), spec in job.wanted().items():
        if not (folder := store.find(key(spec))):
            model = model or load(job.run, job.root)
            make = _states if what == "states" else _readings
            folder = store.make(key(spec), spec, make(model, sets(job.run.task, family, job.n), spec))
        found[family, what] = folder
    return found


def _readings(model: LoopedModel, instances: list[Instances], spec: dict) -> Callable[[Path], None]:
    def build(folder: Path):
        for i, some in enumerate(instances, start=1):
            found = read(model, some, spec["loops"], Boundary(spec["boundary"]))
            np.savez(folder / f"depth_{i}.npz", **dataclasses.asdict(found))

    return build


def _states(model: LoopedModel, instances: list[Instances], spec: dict) -> Callable[[Path], None]:
    def build(folder: Path):
        parts = [states_at(model, some, spec["loops"], Boundary(spec["boundary"])) for some in instances]
        write_array(folder / "states.npy", np.concatenate(parts))

    return build


@torch.no_grad()
def states_at(model: LoopedModel, instances: Instances, K: int, boundary: Boundary, batch_size: int = 256) -> np.ndarray:
    """Raw states after K steps at the answer position, (N, D) float32."""
    parts = []
    for i in range(0, len(instances.answer), batch_size):
        ids, at = (
            torch.as_tensor(v[i : i + batch_size], device=model.device) for v in (instances.ids, instances.answer_position)
        )
        *_, z = model.trajectory(ids, K, boundary)
        parts.append(at_positions(z, at[:, None])[:, 0].float().cpu().numpy())
    return np.concatenate(parts)


def stored(job: Job) -> dict | None:
    """What `train_and_read` returns, if the store has all of it."""
    store = Store(job.root)
    found = {"model": store.find(key(job.run.spec()))}
    found |= {entry: store.find(key(spec)) for entry, spec in job.wanted().items()}
    return found if all(found.values()) else None


def make(jobs: list[Job], workers: int | None = None, title: str = "") -> list[dict]:
    """`train_and_read` of every job, in worker processes; jobs that the store holds whole are only looked up.

    On a GPU all seeds of an arm are trained first, at once."""
    workers = 1 if together.ahead(jobs, title) else workers
    return engine.map_missing(train_and_read, jobs, stored, workers, title)


def readings_in(folder: Path) -> Readings:
    """An entry's readings, all depths one after the other, arrays (K, N)."""
    parts = []
    for file in sorted(folder.glob("depth_*.npz"), key=lambda path: int(path.stem.split("_")[1])):
        with np.load(file) as content:
            parts.append(Readings(**content))
    return joined(parts)


def pairs(cells: list[dict], jobs: list[Job], made: list[dict]) -> tuple[list[Pair], list[Probe], pd.DataFrame]:
    """Pairs of finished jobs, probes of those that were probed, and a training table.

    cells: a dict with style and seed for each job. A model whose training diverged makes no pairs and stands in the table.
    """
    found, probes, training, known = [], [], [], {}
    for cell, job, folders in zip(cells, jobs, made, strict=True):
        done = json.loads((folders["model"] / "training.json").read_text(encoding="utf-8"))
        training.append(cell | done)
        if done["diverged"]:
            continue
        config, name = job.run.config(), f"{cell['style']}, seed {cell['seed']}"
        for task in job.run.task.tasks:
            if (task, job.n) not in known:
                known[task, job.n] = about(task, job.n)
            where, cluster, d_star = known[task, job.n]
            pair = Pair(
                model=name,
                family=standins.STYLES[cell["style"]][0],
                task=task.family,
                r0=config.loops,
                trained=config.boundary,
                floor=where,
                alphabet=job.run.task.alphabet(task.family),
                cluster=cluster,
                d_star=d_star,
                readings={period: readings_in(folders[task.family, period]) for period in job.periods},
            )
            found.append(pair)
            if job.probed:
                states = np.load(folders[task.family, "states"] / "states.npy")
                answer = pair.readings[pair.trained].answer
                probes.append(Probe(name, task.family, config.loops, *probe(states, answer, cluster), cluster))
    return found, probes, pd.DataFrame(training)


def about(task: Task, n: int) -> tuple[float, np.ndarray, np.ndarray]:
    """(floor, clusters (N,), depths (N,)) of a task's n test instances a depth; a skeleton of another depth is another
    cluster."""
    own = [evaluation_set(task, d, n) for d in range(1, task.max_depth + 1)]
    clusters = np.concatenate([some.skeleton ^ np.uint64(some.d_star) for some in own])
    depths = np.concatenate([np.full(len(some.answer), some.d_star) for some in own])
    return float(np.mean([floor(task, some) for some in own])), clusters, depths


@torch.no_grad()
def same_at_one_loop(model: LoopedModel, instances: Instances, periods: tuple[int, ...]) -> bool:
    """Whether the logits at one loop are bitwise the same under every boundary period, on the first 64 instances."""
    ids, at = (torch.as_tensor(v[:64], device=model.device) for v in (instances.ids, instances.answer_position))
    logits = [model(ids, loops=1, boundary=Boundary(k), answer_positions=at[:, None]).logits for k in periods]
    return all(torch.equal(logits[0], other) for other in logits[1:])
