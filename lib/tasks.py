"""Three synthetic task families with an exact depth per instance: circuit, hops, paragg.

Every draw is a hash of (family, depth, width, seed, attempt, counter), so an instance does not depend on the
batch it is made in. Source: the contract paper's "Methodology, Tasks".

Shapes: N instances, w width, D max depth (d* the depth of one instance), T tokens, F fields, A answers of a
training sequence, B rows of a batch, G groups of instances that share a skeleton, C circuits an instance (1,
or w in paragg).
"""

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product

import numpy as np

import lib.task_draws as draws
from lib.task_encoding import SYMBOLS, encode_aggregate, encode_circuits, encode_hops, token_groups
from lib.task_floors import floor, floors, operator_mix

__all__ = [
    "FAMILIES",
    "IGNORE",
    "SPLITS",
    "Batch",
    "Instances",
    "Task",
    "batches_of",
    "evaluation_set",
    "first_distinct",
    "floor",
    "floors",
    "instances",
    "operator_mix",
    "stratum_size",
    "training_batches",
]

FAMILIES = ("circuit", "hops", "paragg")
SPLITS = ("train", "test")
IGNORE = -100  # label of a position without an answer to learn
SIBLINGS = 4  # consecutive evaluation seeds that share a skeleton

_EVALUATION, _TRAINING, _COUNT = 1, 2, 3  # streams that never share a draw
_SYMBOLIC = ("leaves", "ops", "in1", "in2")


@dataclass(frozen=True)
class Task:
    """A family at one width, depths 1..max_depth. Raises ValueError for impossible values.

    `width` counts gates a layer (circuit), symbols in the map (hops) or circuits (paragg); `circuit_width` is
    read by paragg only, `queries` (a training sequence carries) by hops only.
    """

    family: str
    width: int
    max_depth: int
    circuit_width: int = 4
    queries: int = 8

    def __post_init__(self):
        _require(self.family in FAMILIES, f"family must be one of {', '.join(FAMILIES)}, not {self.family!r}")
        hops = self.family == "hops"
        _require(self.max_depth >= 1, f"max_depth must be at least 1, not {self.max_depth}")
        _require(not hops or self.max_depth <= 12, f"max_depth must be in 1..12 for hops, not {self.max_depth}")
        # a circuit is evaluated in 64-bit words: one bit for the value, one for each leaf's flip
        low, high = (max(4, 2 * self.max_depth + 1), len(SYMBOLS)) if hops else (2, 63)
        where = f"hops with max_depth={self.max_depth}" if hops else self.family
        _require(low <= self.width <= high, f"width must be in {low}..{high} for {where}, not {self.width}")
        _require(2 <= self.circuit_width <= 63, f"circuit_width must be in 2..63, not {self.circuit_width}")
        _require(self.queries >= 1, f"queries must be at least 1, not {self.queries}")

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """Token names in id order, the possible answers first."""
        return sum(token_groups(self).values(), ())

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return len(self.vocabulary)

    @property
    def fields(self) -> int:
        """F, the token ids that make one position."""
        return {"circuit": 4, "hops": 2, "paragg": 5}[self.family]

    @property
    def alphabet(self) -> tuple[int, ...]:
        """Token ids of the possible answers."""
        return tuple(range(len(token_groups(self)["answer"])))

    @property
    def depths(self) -> tuple[int, ...]:
        """The depths that evaluation sets have."""
        return tuple(range(1, self.max_depth + 1))

    def training_batches(self, batch_size: int, steps: range, seed: int) -> "list[Batch]":
        """See `training_batches`."""
        return training_batches(self, batch_size, steps, seed)

    def evaluation_set(self, d_star: int, n: int, **which) -> "Instances":
        """See `evaluation_set`."""
        return evaluation_set(self, d_star, n, **which)

    def floor(self, instances: "Instances") -> float:
        """See `floor`."""
        return floor(self, instances)

    def n_tokens(self, d_star: int) -> int:
        """T of an evaluation sequence at depth d_star; raises ValueError outside 1..max_depth."""
        _require_depth(self, d_star)
        if self.family == "hops":
            return self.width + 1
        circuits, w = _shape(self)
        return circuits * w * (d_star + 1) + (circuits + 1 if self.family == "paragg" else 0)


@dataclass(frozen=True)
class Instances:
    """N evaluation instances of one (d*, w) stratum.

    ids (N, T, F) int64; answer_position (N,) and answer (N,) int64, a token id; key (N,) uint64, the hash of
    the canonical form (wiring, operators and leaves, or the map) that decides the split; skeleton (N,)
    uint64, the hash of wiring and operators (circuit), of these and the subset (paragg), or of the map
    (hops).
    raw is the symbolic instance. circuit: leaves (N, w), ops, in1, in2 (N, d*, w), gate (N,), the answer's
    slot in layer d*; paragg: the same with an axis of w circuits after N, and subset (N, w) bool. hops:
    sources, targets (N, w) in the order stated and start (N,), as symbols 0..25.
    """

    ids: np.ndarray
    answer_position: np.ndarray
    answer: np.ndarray
    d_star: int
    width: int
    key: np.ndarray
    skeleton: np.ndarray
    raw: draws.Arrays


@dataclass(frozen=True)
class Batch:
    """A training batch: ids (B, T, F), answer_positions (A,), labels (B, A) and d_star (B, A), all int64.

    A label is a token id, or -100 where there is no answer to learn; d_star, the depth of each answer, is 0
    there.
    """

    ids: np.ndarray
    answer_positions: np.ndarray
    labels: np.ndarray
    d_star: np.ndarray


def instances(task: Task, d_star: int, seeds: Iterable[int]) -> Instances:
    """One instance a seed, of either split: a function of (family, d*, width, seed) alone.

    Seeds 4 i .. 4 i + 3 share a skeleton, so that an evaluation set has clusters (not in circuit strata of
    fewer than 4 leaves or a million skeletons: too few instances of one skeleton are in one split). The
    answer of a binary family is seed & 1. A circuit is redrawn until some single leaf changes its answer
    gate; a map has a uniform start whose cycle is 2 d* + 1 symbols or more.
    Raises ValueError for a d_star outside 1..max_depth, no or negative seeds, or where no instance turns up.
    """
    _require_depth(task, d_star)
    seeds = np.asarray(list(seeds), dtype=np.int64)
    _require(len(seeds) > 0 and seeds.min() >= 0, "seeds must be one or more integers of at least 0")
    groups, row = np.unique(seeds // _siblings(task, d_star), return_inverse=True)
    make = _hops_instances if task.family == "hops" else _circuit_instances
    return make(task, d_star, seeds, groups, row)


def evaluation_set(task: Task, d_star: int, n: int, first_seed: int = 0, split: str = "test") -> Instances:
    """The first n distinct instances of a split in seed order: no key twice (hops: no token sequence twice).

    Binary families have n / 2 of each answer where n is even (one more 0 where odd).
    Raises ValueError for an unknown split, n < 1, first_seed < 0, or a stratum of fewer than 10 n instances.
    """
    _require_depth(task, d_star)
    _require(split in SPLITS, f"split must be one of {', '.join(SPLITS)}, not {split!r}")
    _require(n >= 1 and first_seed >= 0, f"n must be at least 1 and first_seed 0, not {n} and {first_seed}")
    where, size = f"{task.family} with d_star={d_star}, width={task.width}", stratum_size(task, d_star)
    _require(size >= 10 * n, f"n must be at most {size // 10}, a tenth of the {size} instances of {where}, not {n}")
    quotas = [(task.alphabet, n)] if task.family == "hops" else [((0,), n - n // 2), ((1,), n // 2)]
    asked = n + SIBLINGS
    while asked <= 64 * (n + SIBLINGS):
        made = instances(task, d_star, _split_seeds(task, d_star, asked, first_seed, split))
        identity = made.ids.reshape(len(made.ids), -1) if task.family == "hops" else made.key[:, None]
        first = np.sort(np.unique(identity, axis=0, return_index=True)[1])
        kept = [first[np.isin(made.answer[first], answers)][:quota] for answers, quota in quotas]
        rows = np.sort(np.concatenate(kept))
        if len(rows) == n:
            return _take(made, rows)
        asked += asked // 2
    raise ValueError(f"n must be lower than {n}: the {split} split of {where} has too few distinct instances")


@functools.lru_cache(maxsize=64)
def stratum_size(task: Task, d_star: int) -> int:
    """Number of distinct canonical forms in a stratum that hold an instance.

    hops: exact (maps with a cycle of at least 2 d* + 1). circuit: leaves, operators and wirings with a gate
    of layer d* that some single leaf changes, exact by enumeration where there are at most 200,000 to look
    at, otherwise a low estimate: all of them times their share of 4,096 random ones less four standard
    errors.
    paragg: the count of one circuit to the power w (the subset is not counted).
    """
    _require_depth(task, d_star)
    if task.family == "hops":
        return math.comb(len(SYMBOLS), task.width) * _maps_with_cycle(task.width, 2 * d_star + 1)
    circuits, w = _shape(task)
    kinds = draws.gate_kinds(w)
    total = 2**w * kinds ** (w * d_star)
    if total <= 200_000:
        code, leaf = np.divmod(np.arange(total), 2**w)
        leaves = np.array(list(product(range(2), repeat=w)))[leaf]
        codes = code[:, None] // kinds ** np.arange(w * d_star) % kinds
        return int(draws.changes(leaves, draws.gates_of(codes.reshape(total, d_star, w), w)).sum()) ** circuits
    keys = _keys(_COUNT, task, d_star, range(4096))
    share = draws.changes(draws.random_leaves(keys, w), draws.random_gates(keys, d_star, w)).mean()
    low = max(0.0, share - 4 * math.sqrt(share * (1 - share) / len(keys)))
    return (total * int(low * 2**30) >> 30) ** circuits


def training_batches(task: Task, batch_size: int, steps: range, seed: int) -> list[Batch]:
    """The batches of these steps; batch i is a function of (task, batch_size, seed, i) alone.

    circuit: D layers, an answer at every gate of layers 1..D at its own layer's depth. hops: w pairs and
    `queries` queries of one hop count, uniform in 1..D, starts uniform over symbols on a long enough cycle; the map
    is of the train split and drawn as a test map of that depth is. paragg: w circuits of D layers with an answer at every
    gate as in circuit, and the parity at depth D; some single leaf changes each answer gate. The label of a
    gate that no single leaf changes is -100, and so is every label of a layer whose prefix (leaves and layers
    1..d, of all circuits) is of the test split.
    Raises ValueError for a batch size below 1, or a negative step or seed.
    """
    make = functools.partial(_hops_training if task.family == "hops" else _circuit_training, task)
    return batches_of(make, _parts(_TRAINING, task, task.max_depth), batch_size, steps, seed)


def batches_of(
    make: Callable[[np.ndarray], tuple[np.ndarray, ...]], stream: Iterable[int], batch_size: int, steps: range, seed: int
) -> list[Batch]:
    """The batches of these steps in the stream that integers name; each row is made from a key of its own.

    make(keys (R,)) gives ids (R, T, F), answer_positions (A,), labels (R, A) and depths that broadcast to the labels.
    Raises ValueError for a batch size below 1, or a negative step or seed.
    """
    _require(batch_size >= 1, f"batch_size must be at least 1, not {batch_size}")
    _require(seed >= 0, f"seed must be at least 0, not {seed}")
    _require(min(steps, default=0) >= 0, f"steps must be at least 0, not {min(steps, default=0)}")
    if len(steps) == 0:
        return []
    keys = draws.stream_keys(stream, [seed]) ^ np.asarray(steps, dtype=np.int64).astype(np.uint64)
    keys = draws.mix(draws.mix(keys)[:, None] ^ np.arange(batch_size, dtype=np.uint64)).reshape(-1)
    ids, positions, labels, depths = make(keys)
    depths = np.where(labels == IGNORE, 0, depths)
    rows = (slice(i, i + batch_size) for i in range(0, len(keys), batch_size))
    return [Batch(ids[r], positions, labels[r], depths[r]) for r in rows]


def first_distinct(make: Callable[[np.ndarray], tuple[np.ndarray, draws.Arrays]], n: int, where: str) -> draws.Arrays:
    """The first n draws that repeat none before them; make(numbers (M,)) gives identities (M,) and arrays (M, ...).

    Raises ValueError, naming n and `where`, when about 16 n draws hold fewer.
    """
    asked = n + n // 4 + 4
    while asked <= 20 * n + 400:
        identity, made = make(np.arange(asked))
        rows = np.sort(np.unique(identity, return_index=True)[1])[:n]
        if len(rows) == n:
            return {name: values[rows] for name, values in made.items()}
        asked *= 2
    raise ValueError(f"n must be lower than {n}: {where} has too few distinct instances")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _require_depth(task: Task, d_star: int) -> None:
    _require(1 <= d_star <= task.max_depth, f"d_star must be in 1..{task.max_depth} (max_depth), not {d_star}")


def _shape(task: Task) -> tuple[int, int]:
    """(circuits an instance, gates a layer)."""
    return (1, task.width) if task.family == "circuit" else (task.width, task.circuit_width)


def _siblings(task: Task, d_star: int) -> int:
    """How many consecutive seeds share a skeleton."""
    circuits, w = _shape(task)
    skeletons = draws.gate_kinds(w) ** (circuits * w * d_star)
    # one of few leaves has too few instances in one split; of few skeletons, too few have enough
    shared = task.family == "hops" or (circuits * w >= 4 and skeletons >= 10**6)
    return SIBLINGS if shared else 1


def _keys(stream: int, task: Task, d_star: int, numbers: Iterable[int]) -> np.ndarray:
    """A key for each of `numbers`, (len,) uint64, from the stream, family, depth and width."""
    return draws.stream_keys(_parts(stream, task, d_star), numbers)


def _parts(stream: int, task: Task, d_star: int) -> tuple[int, ...]:
    """The integers that name a stream of the task."""
    inner = task.circuit_width if task.family == "paragg" else 0
    return stream, FAMILIES.index(task.family), d_star, task.width, inner


def _drawn_for_test(task: Task, d_star: int, groups: np.ndarray) -> np.ndarray:
    """Whether a group (G,) is drawn for the test split: redrawn until its keys agree."""
    return draws.is_test(draws.draw_bits(_keys(_EVALUATION, task, d_star, groups), draws.SPLIT, 1)[:, 0])


def _split_seeds(task: Task, d_star: int, count: int, first_seed: int, split: str) -> np.ndarray:
    """The first `count` seeds from first_seed on whose group is drawn for a split."""
    seeds = np.arange(first_seed, first_seed + 16 * count + 1024)
    while True:
        kept = seeds[_drawn_for_test(task, d_star, seeds // _siblings(task, d_star)) == (split == "test")]
        if len(kept) >= count:
            return kept[:count]
        seeds = np.arange(first_seed, first_seed + 2 * len(seeds))


def _take(made: Instances, rows: np.ndarray) -> Instances:
    parts = {name: getattr(made, name)[rows] for name in ("ids", "answer_position", "answer", "key", "skeleton")}
    raw = {name: values[rows] for name, values in made.raw.items()}
    return Instances(**parts, d_star=made.d_star, width=made.width, raw=raw)


def _maps_with_cycle(w: int, shortest: int) -> int:
    """Permutations of w symbols that have a cycle of at least `shortest`."""
    without = [1]
    for n in range(1, w + 1):
        lengths = range(1, min(shortest - 1, n) + 1)  # of the cycle that holds the first symbol
        without.append(sum(without[n - k] * math.perm(n - 1, k - 1) for k in lengths))
    return math.factorial(w) - without[w]


def _hops_instances(task: Task, d: int, seeds: np.ndarray, groups: np.ndarray, row: np.ndarray) -> Instances:
    def draw(keys, test):
        made = draws.random_map(keys, task.width, 2 * d + 1)
        return draws.is_test(draws.key_of_map(made)) == test, made

    keys = _keys(_EVALUATION, task, d, groups)
    made = draws.redraw(keys, draw, _drawn_for_test(task, d, groups))
    qualifies = made["cycle"] >= 2 * d + 1
    starts = draws.shuffled_first(draws.draw_bits(keys, draws.STARTS, task.width), qualifies)
    # siblings have different starts, as far as there are enough
    place = starts[row, seeds % SIBLINGS % qualifies.sum(axis=1)[row]][:, None]
    key = draws.key_of_map(made)[row]
    made = {name: values[row] for name, values in made.items()}
    sources, targets = draws.state_pairs(_keys(_EVALUATION, task, d, seeds), made)
    end = draws.follow(made["target"], place, d)[-1]
    start, answer = (np.take_along_axis(made["symbols"], places, axis=1) for places in (place, end))
    ids = encode_hops(task, sources, targets, np.full(start.shape, d), start)
    raw = {"sources": sources, "targets": targets, "start": start[:, 0]}
    position = np.full(len(ids), task.width)
    return Instances(ids, position, answer[:, 0], d, task.width, key, key.copy(), raw)


def _circuit_instances(task: Task, d: int, seeds: np.ndarray, groups: np.ndarray, row: np.ndarray) -> Instances:
    circuits, w = _shape(task)
    siblings = _siblings(task, d)
    parts, step = [], max(1, 2**15 // (circuits * w * (d + 1)))  # bounds memory
    for some in (groups[i : i + step] for i in range(0, len(groups), step)):
        parity = (some[:, None] * siblings + np.arange(siblings)) & 1
        keys = _keys(_EVALUATION, task, d, some)
        parts.append(draws.sibling_circuits(keys, parity, _drawn_for_test(task, d, some), circuits, d, w))
    made = {name: np.concatenate([part[name] for part in parts])[row] for name in parts[0]}
    made |= {name: made[name][np.arange(len(row)), seeds % siblings] for name in ("leaves", "gate")}
    key = draws.circuit_keys(*(made[name] for name in _SYMBOLIC))[:, -1]
    skeleton = draws.circuit_keys(np.zeros_like(made["leaves"]), *(made[name] for name in _SYMBOLIC[1:]))[:, -1]
    if task.family == "circuit":
        ids, position = encode_circuits(task, made)[:, 0], d * w + made["gate"][:, 0]
        raw = {name: made[name][:, 0] for name in (*_SYMBOLIC, "gate")}
        return Instances(ids, position, seeds & 1, d, task.width, key, skeleton, raw)
    skeleton = draws.mix(skeleton ^ draws.leaf_hashes(made["subset"][:, :, None])[:, 0])
    position = np.full(len(row), task.n_tokens(d) - 1)
    return Instances(encode_aggregate(task, made), position, seeds & 1, d, task.width, key, skeleton, made)


def _hops_training(task: Task, keys: np.ndarray) -> tuple[np.ndarray, ...]:
    w, queries = task.width, task.queries
    # one depth a sequence, so that maps, starts and depths have the mix of the test strata
    depth = 1 + draws.below(draws.draw_bits(keys, draws.HOPS), task.max_depth)

    def draw(keys, depth):
        made = draws.random_map(keys, w, 2 * depth + 1)
        return ~draws.is_test(draws.key_of_map(made)), made

    made = draws.redraw(keys, draw, depth)
    qualifies = made["cycle"] >= 2 * depth[:, None] + 1
    first = np.argsort(~qualifies, axis=1, kind="stable")
    rank = draws.below(draws.draw_bits(keys, draws.STARTS, queries), qualifies.sum(axis=1, keepdims=True))
    place, hops = np.take_along_axis(first, rank, axis=1), np.repeat(depth[:, None], queries, axis=1)
    end = np.take_along_axis(draws.follow(made["target"], place, task.max_depth), hops[None], axis=0)[0]
    sources, targets = draws.state_pairs(keys, made)
    start, labels = (np.take_along_axis(made["symbols"], places, axis=1) for places in (place, end))
    return encode_hops(task, sources, targets, hops, start), w + np.arange(queries), labels, hops


def _circuit_training(task: Task, keys: np.ndarray) -> tuple[np.ndarray, ...]:
    (circuits, w), depth, n = _shape(task), task.max_depth, len(keys)

    def draw(keys):
        gates, leaves = draws.random_gates(keys, depth, w), draws.random_leaves(keys, w)
        words = draws.evaluate(draws.leaf_words(leaves[:, :, None]), gates)[:, 1:, :, 0]
        gate = draws.below(draws.draw_bits(keys, draws.ANSWERS, 1)[:, 0], w)
        accepted = draws.sensitive(words[np.arange(len(keys)), -1, gate]) | (task.family == "circuit")
        return accepted, {**gates, "leaves": leaves, "words": words, "gate": gate}

    each = draws.mix(keys[:, None] ^ draws.mix(np.arange(circuits, dtype=np.uint64))).reshape(-1)
    made = {k: v.reshape(n, circuits, *v.shape[1:]) for k, v in draws.redraw(each, draw).items()}
    held_out = draws.is_test(draws.circuit_keys(*(made[name] for name in _SYMBOLIC)))
    learn = draws.sensitive(made["words"]) & ~held_out[:, None, :, None]
    values = draws.values_of(made["words"])
    labels = np.where(learn, values, IGNORE).reshape(n, -1)
    positions = np.arange(circuits * (depth + 1) * w).reshape(circuits, depth + 1, w)[:, 1:].reshape(-1)
    depths = np.tile(np.repeat(np.arange(1, depth + 1), w), circuits)
    if task.family == "circuit":
        return encode_circuits(task, made)[:, 0], positions, labels, depths
    made["subset"] = draws.random_subset(keys, circuits)
    answers = np.take_along_axis(values[:, :, -1], made["gate"][:, :, None], axis=2)[:, :, 0]
    parity = np.where(held_out[:, -1], IGNORE, (answers & made["subset"]).sum(axis=1) & 1)
    positions = np.append(positions, task.n_tokens(depth) - 1)
    return (
        encode_aggregate(task, made),
        positions,
        np.column_stack([labels, parity]),
        np.append(depths, depth),
    )
