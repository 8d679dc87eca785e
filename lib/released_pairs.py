"""Pairs of sections 4.1 and 4.2 from published checkpoints: text prompts, both arms, an entry of the run store a stratum.

The few-shot text that all prompts of a task share is run once. A checkpoint is known by its configuration and by the first and
last bytes of its files, so a stored reading is found again wherever the checkpoint lies.
Shapes: N instances, K loop counts, D d_model.
"""

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from lib import BEHAVIOUR, prompts, released
from lib.boundary import Boundary
from lib.evaluation import Readings, joined, prefix_of, read
from lib.looped import LoopedModel
from lib.pair_jobs import about, readings_in, same_at_one_loop, states_at
from lib.pairs import NEVER, Pair
from lib.probe import Probe, probe
from lib.progress import Bar
from lib.store import Store, key, write_array
from lib.tasks import Task

NAMES = {"huginn-0125": "Huginn-3.5B"}  # as the contract paper calls it; the others are called by their folder
ENDS = 2**20  # bytes of a file's head and end that are hashed
SHORTEST = 16  # shared tokens from which on running them once is worth it


@dataclass(frozen=True)
class Job:
    """One checkpoint and what is wanted of it: readings at K = 1..loops of n instances at every depth of every task under each
    boundary period, and with probed the states at K = r0 with the norm at no boundary."""

    source: str
    tasks: tuple[Task, ...]
    periods: tuple[int, ...]
    loops: int
    n: int
    shots: int
    dtype: str
    device: str
    batch_size: int
    root: Path
    probed: bool = False

    @property
    def name(self) -> str:
        """What the model is called in tables."""
        own = Path(self.source).name
        return NAMES.get(own, own)


def fingerprint(folder: Path) -> str:
    """16 hex digits that tell checkpoints apart: config.json, and each weights file's name, size, first and last MiB."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with open(path, "rb") as f:
            digest.update(f.read(ENDS))
            f.seek(max(0, size - ENDS))
            digest.update(f.read())
    return digest.hexdigest()[:16]


class Reader:
    """A checkpoint that is loaded when the first entry is missing, and not before."""

    def __init__(self, job: Job):
        self.job, self.folder = job, released.find(job.source)[0]
        self.print, self.words = fingerprint(self.folder), released.tokenizer(job.source)
        self.store, self.model = Store(job.root), None
        self.shared: tuple | None = None  # the last shared tokens that were run, with their key

    def loaded(self) -> LoopedModel:
        """The model."""
        if self.model is None:
            self.model = released.load(self.job.source, self.job.dtype, self.job.device)
        return self.model

    def prompts_of(self, task: Task, d: int) -> prompts.Prompts:
        """The prompts of one stratum."""
        return prompts.few_shot(task, d, self.job.n, self.words, self.job.shots)

    def entry(self, kind: str, task: Task, d: int, build, **what) -> Path:
        """The store's folder of one entry, made by build(folder) where it is missing."""
        spec = {"kind": kind, "checkpoint": self.print, "task": dataclasses.asdict(task), "d_star": d, "n": self.job.n}
        where = "cpu" if self.job.device == "cpu" else torch.cuda.get_device_name(self.job.device)
        spec |= {"shots": self.job.shots, "dtype": self.job.dtype, "device": where, "behaviour": BEHAVIOUR}
        spec |= what | {"torch": torch.__version__}
        return self.store.make(key(spec), spec, build)

    def readings(self, task: Task, d: int, period: int) -> Path:
        """One stratum's readings under one boundary."""

        def build(folder: Path):
            np.savez(folder / "depth_1.npz", **dataclasses.asdict(self.read(self.prompts_of(task, d), Boundary(period))))

        return self.entry("prompted", task, d, build, boundary=period, loops=self.job.loops)

    def read(self, made: prompts.Prompts, boundary: Boundary) -> Readings:
        """A sweep of prompts, in the instances' own order, the shared tokens run once."""
        model, first = self.loaded(), made.groups[0].ids[0]
        shared, key = None, (boundary, *first[: min(made.prefix, len(first) - 1)])
        if made.prefix >= SHORTEST:
            if self.shared is None or self.shared[0] != key:
                self.shared = None  # its memory first
                self.shared = key, prefix_of(model, torch.as_tensor(key[1:], device=model.device), self.job.loops, boundary)
            shared = self.shared[1]
        parts = [read(model, group, self.job.loops, boundary, self.job.batch_size, shared) for group in made.groups]
        columns = vars(joined(parts))
        return Readings(**{name: column[..., made.order] for name, column in columns.items()})

    def same_at_one_loop(self, task: Task) -> bool:
        """Whether the logits of every arm are bitwise the same at one loop on a task."""

        def build(folder: Path):
            same = same_at_one_loop(self.loaded(), self.prompts_of(task, 1).groups[0], self.job.periods)
            (folder / "same.json").write_text(json.dumps(same))

        return json.loads((self.entry("one loop", task, 1, build, periods=list(self.job.periods)) / "same.json").read_text())

    def states(self, task: Task, d: int) -> Path:
        """One stratum's states at K = r0 with the norm at no boundary."""

        def build(folder: Path):
            made, model = self.prompts_of(task, d), self.loaded()
            how = (model.config.loops, Boundary(NEVER), self.job.batch_size)
            write_array(folder / "states.npy", np.concatenate([states_at(model, g, *how) for g in made.groups])[made.order])

        return self.entry("prompted states", task, d, build, boundary=NEVER)


def pairs(job: Job) -> tuple[list[Pair], list[Probe], dict[str, bool]]:
    """The checkpoint's pairs, probes where wanted, and by task whether every arm is bitwise the same at one loop.

    Shows a bar with an estimate; what is in the store is only looked up. Raises ValueError as `released.load` and
    `prompts.few_shot` do.
    """
    reader, found, probes = Reader(job), [], []
    config = released.plan_of(reader.folder).config
    todo = [(task, what, d) for task in job.tasks for what in (*job.periods, *["states"] * job.probed)
            for d in range(1, task.max_depth + 1)]  # fmt: skip
    folders, states = {}, {}
    for task, what, d in Bar(todo, desc=job.name, disable=None):
        if what == "states":
            states[task.family, d] = np.load(reader.states(task, d) / "states.npy")
        else:
            folders[task.family, d, what] = reader.readings(task, d, what)
    same = {task.family: reader.same_at_one_loop(task) for task in job.tasks}
    for task in job.tasks:
        depths = range(1, task.max_depth + 1)
        floor, cluster, d_star = about(task, job.n)
        readings = {k: joined([readings_in(folders[task.family, d, k]) for d in depths]) for k in job.periods}
        pair = Pair(
            model=job.name,
            family="ouro" if config.boundary else "huginn",
            task=task.family,
            r0=config.loops,
            trained=config.boundary,
            floor=floor,
            alphabet=reader.prompts_of(task, 1).alphabet,
            cluster=cluster,
            d_star=d_star,
            readings=readings,
        )
        found.append(pair)
        if job.probed:
            at = np.concatenate([states[task.family, d] for d in depths])
            answer = readings[config.boundary].answer
            probes.append(Probe(job.name, task.family, config.loops, *probe(at, answer, cluster), cluster))
    return found, probes, same
