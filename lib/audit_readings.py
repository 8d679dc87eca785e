"""Reading the subject of an audit: both arms at K = 1..K_max and the doses between, each reading an entry of the run store.

A killed audit goes on where it stopped, and a finished one is only looked up. Shapes: N instances, T tokens, K loop counts.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from lib import BEHAVIOUR, at_hand, paths, released, released_pairs
from lib.audit import PROMPTS, Random, Subject
from lib.boundary import Boundary
from lib.evaluation import Prefix, prefix_of, read, sweep
from lib.looped import LoopedModel
from lib.pair_jobs import about, readings_in, same_at_one_loop
from lib.pairs import Pair
from lib.progress import Bar
from lib.store import Store, key, write_array
from lib.tasks import Instances, Task

SMALL = 5_000_000  # parameters under which several threads cost more than they give
MOVED = 16  # instances of the deepest stratum whose update sizes are read


@dataclass(frozen=True)
class Measured:
    """pairs: one a task; same: whether its arms are bitwise equal at one loop, by task; norms: as `instruments.norms`;
    updates: columns task, arm period, K, value; text: what a token id reads as, None without a tokenizer; swept: a foreign
    class's table K, state_norm, change."""

    pairs: list[Pair]
    same: dict[str, bool]
    norms: pd.DataFrame
    updates: pd.DataFrame
    text: Callable[[int], str] | None = None
    swept: pd.DataFrame | None = None


@contextmanager
def threads(s: Subject) -> Iterator[None]:
    """One thread for a small model, whose matrices are not worth sharing: on a busy machine the others are waited for."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if s.parameters < SMALL else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure(s: Subject) -> Measured:
    """Read the subject, as far as the store does not hold it."""
    with threads(s):
        if s.config is None:
            from lib import audit_foreign  # here, since it imports what the audit of other models never needs

            return audit_foreign.measure(s)
        pairs, same, moves, text = (_prompted if s.read_on == PROMPTS else _given)(s)
    rows = [(task, period, K + 1, v) for (task, period), moved in moves.items() for K, v in enumerate(moved)]
    updates = pd.DataFrame(rows, columns=["task", "period", "K", "value"])
    return Measured(pairs, same, at_hand.norms_of(s.name, s.family, s.config), updates, text)


def _prompted(s: Subject):
    """Pairs, identity and update sizes of a checkpoint that reads text, and its tokenizer's decoding."""
    how = (s.n, s.shots, s.dtype, s.device, s.batch_size, paths.runs())
    arms = (s.trained, s.changed)
    between = tuple(period for period in s.periods if period not in arms)
    pairs, _, _ = released_pairs.pairs(released_pairs.Job(s.source, s.tasks, arms, s.loops, *how))
    short, _, _ = released_pairs.pairs(released_pairs.Job(s.source, s.tasks, between, s.loops_of(between[0]), *how))
    reader, moves = released_pairs.Reader(released_pairs.Job(s.source, s.tasks, s.periods, s.loops, *how)), {}
    same = {task.family: reader.same_at_one_loop(task) for task in s.tasks}
    for task in s.tasks:
        for period in (s.trained, s.changed):

            def make(folder: Path, task=task, period=period):
                made, model = reader.prompts_of(task, task.max_depth), reader.loaded()
                group = made.groups[0]
                before = torch.as_tensor(group.ids[0, : min(made.prefix, group.ids.shape[1] - 1)], device=model.device)
                prefix = prefix_of(model, before, s.loops, Boundary(period)) if len(before) else None
                write_array(folder / "moves.npy", step_sizes(model, group, s.loops, Boundary(period), prefix))

            entry = reader.entry("prompted moves", task, task.max_depth, make, boundary=period, loops=s.loops, rows=MOVED)
            moves[task.family, period] = np.load(entry / "moves.npy")
    own = {"model": s.name, "trained": s.trained}
    both = zip(pairs, short, strict=True)
    named = [dataclasses.replace(pair, **own, readings=pair.readings | more.readings) for pair, more in both]
    return named, same, moves, lambda token: reader.words.decode([token])


def _given(s: Subject):
    """Pairs, identity and update sizes of a model that reads symbolic instances or random tokens."""
    reader, pairs, same, moves = _Reader(s), [], {}, {}
    for task in Bar(s.tasks, desc=s.name, disable=None):
        sets = strata(s, task)
        found = {period: readings_in(reader.readings(task, period, sets)) for period in s.periods}
        if isinstance(task, Random):
            right = found[s.trained].prediction[s.r0 - 1]
            found = {period: dataclasses.replace(one, answer=right) for period, one in found.items()}
            floor, cluster, d_star = 0.0, sets[0].skeleton, np.ones(s.n, dtype=np.int64)
            alphabet = tuple(range(task.vocab_size))
        else:
            floor, cluster, d_star = about(task, s.n)
            alphabet = s.mixture.alphabet(task.family)
        pair = Pair(
            model=s.name,
            family="ouro" if s.trained else "huginn",
            task=task.family,
            r0=s.r0,
            trained=s.trained,
            floor=floor,
            alphabet=alphabet,
            cluster=cluster,
            d_star=d_star,
            readings=found,
        )
        pairs.append(pair)
        same[task.family] = reader.same(task, sets[-1])
        moves |= {(task.family, period): reader.moves(task, period, sets[-1]) for period in (s.trained, s.changed)}
    return pairs, same, moves, None


def strata(s: Subject, task: Task | Random) -> list[Instances]:
    """The instances of every depth, in the model's own ids."""
    if not isinstance(task, Random):
        return [s.mixture.evaluation_set(task.family, d, s.n) for d in range(1, task.max_depth + 1)]
    ids = np.random.default_rng(task.seed).integers(task.vocab_size, size=(s.n, task.length))
    row = np.arange(s.n, dtype=np.uint64)
    last = np.full(s.n, task.length - 1)
    return [Instances(ids, last, np.zeros(s.n, dtype=np.int64), 1, task.length, key=row, skeleton=row, raw={})]


class _Reader:
    """A model that is loaded when the first entry is missing, and not before."""

    def __init__(self, s: Subject):
        self.s, self.print, self.store = s, released_pairs.fingerprint(s.folder), Store(paths.runs())
        self.model: LoopedModel | None = None

    def loaded(self) -> LoopedModel:
        self.model = self.model or released.load(self.s.folder, self.s.dtype, self.s.device)
        return self.model

    def entry(self, task: Task | Random, build: Callable[[Path], None], **what) -> Path:
        where = "cpu" if self.s.device == "cpu" else torch.cuda.get_device_name(self.s.device)
        spec = {"kind": "audited", "checkpoint": self.print, "task": dataclasses.asdict(task), "n": self.s.n}
        spec |= {"dtype": self.s.dtype, "device": where, "torch": torch.__version__, "behaviour": BEHAVIOUR} | what
        return self.store.make(key(spec), spec, build)

    def readings(self, task: Task | Random, period: int, sets: list[Instances]) -> Path:
        def make(folder: Path):
            for d, some in enumerate(sets, start=1):
                found = read(self.loaded(), some, self.s.loops_of(period), Boundary(period), self.s.batch_size)
                np.savez(folder / f"depth_{d}.npz", **dataclasses.asdict(found))

        return self.entry(task, make, what="readings", boundary=period, loops=self.s.loops_of(period))

    def same(self, task: Task | Random, some: Instances) -> bool:
        def make(folder: Path):
            (folder / "same.json").write_text(json.dumps(same_at_one_loop(self.loaded(), some, self.s.periods)))

        return json.loads((self.entry(task, make, what="one loop", periods=list(self.s.periods)) / "same.json").read_text())

    def moves(self, task: Task | Random, period: int, some: Instances) -> np.ndarray:
        def make(folder: Path):
            write_array(folder / "moves.npy", step_sizes(self.loaded(), some, self.s.loops, Boundary(period)))

        return np.load(self.entry(task, make, what="moves", boundary=period, loops=self.s.loops, rows=MOVED) / "moves.npy")


def step_sizes(
    model: LoopedModel, instances: Instances, loops: int, boundary: Boundary, prefix: Prefix | None = None, rows: int = MOVED
) -> np.ndarray:
    """How far each step moves the raw state at the answer position, ||z_K - z_(K-1)|| / ||z_(K-1)||, the mean over the first
    rows: (loops,), NaN at K = 1. prefix: the first tokens that all rows share, run before."""
    skip = prefix.tokens if prefix else 0
    ids = torch.as_tensor(instances.ids[:rows, skip:], device=model.device)
    at = torch.as_tensor(instances.answer_position[:rows, None] - skip, device=model.device)
    found, before = [], None
    for _, _, z in sweep(model, ids, at, loops, boundary, prefix):
        now = z[:, 0].float()
        found.append(np.nan if before is None else float(((now - before).norm(dim=-1) / before.norm(dim=-1)).mean()))
        before = now
    return np.array(found)
