"""Seeded draws of random circuits and maps, their evaluation and their hashes.

A draw is a hash of a row's own key, a purpose and a counter, so that no row depends on the others made with
it. Source: the contract paper's "Methodology, Tasks".

Shapes: N instances (or rows), w gates a layer or symbols in a map, D layers, C circuits an instance, L
candidate leaf assignments evaluated at once, G groups of S siblings, Q queries.
"""

import math
from collections.abc import Callable, Iterable

import numpy as np

from lib.task_encoding import OPERATORS, SYMBOLS

ATTEMPTS = 4096  # redraws before a stratum is called empty

# what a draw is for: two purposes never share a hash
GATES, LEAVES, ANSWERS, SUBSET, PICKS, NAMES, CYCLE, REST, STARTS, ORDER, HOPS, SPLIT = range(12)

_GAMMA, _M1, _M2 = (np.uint64(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_TOP = np.uint64(1 << 63)
# AND = a & b, OR = (a ^ b) ^ (a & b), XOR = a ^ b; the last three operators negate the first three
_XOR_PART, _AND_PART, _NEGATE = (
    np.array(bits, dtype=np.int64).astype(np.uint64) for bits in ([0, -1, -1] * 2, [-1, -1, 0] * 2, [0] * 3 + [-1] * 3)
)

Arrays = dict[str, np.ndarray]


# Counter-based randomness: splitmix64 started from a hashed key


def mix(x: np.ndarray) -> np.ndarray:
    """splitmix64's output for state x, an array of uint64."""
    x = x + _GAMMA
    x ^= x >> np.uint64(30)
    x *= _M1
    x ^= x >> np.uint64(27)
    x *= _M2
    x ^= x >> np.uint64(31)
    return x


def stream_keys(parts: Iterable[int], numbers: Iterable[int]) -> np.ndarray:
    """A key for each of `numbers`, (len(numbers),) uint64, in the stream that the integers `parts` name."""
    key = np.zeros(1, dtype=np.uint64)
    for part in parts:
        key = mix(key ^ np.uint64(part))
    return mix(key ^ np.asarray(numbers, dtype=np.int64).astype(np.uint64))


def draw_bits(keys: np.ndarray, purpose: int, *shape: int) -> np.ndarray:
    """Hashed bits, (len(keys), *shape) uint64, that depend on a row's own key alone."""
    counter = np.arange(math.prod(shape), dtype=np.uint64) * _GAMMA
    start = mix(keys ^ mix(np.array([purpose], dtype=np.uint64)))
    return mix(start[:, None] + counter).reshape(len(keys), *shape)


def below(bits: np.ndarray, n) -> np.ndarray:
    """Hashed bits as integers in 0..n-1 (0 where n = 0), int64; n may be an array that broadcasts."""
    return (((bits >> np.uint64(32)) * np.asarray(n).astype(np.uint64)) >> np.uint64(32)).astype(np.int64)


def redraw(keys: np.ndarray, draw: Callable[..., tuple[np.ndarray, Arrays]], *rows: np.ndarray) -> Arrays:
    """The first accepted draw of each row; draw(keys, *rows) gives accepted (N,) bool and arrays (N, ...).

    Raises ValueError when a row has none in ATTEMPTS draws.
    """
    todo, out = np.arange(len(keys)), {}
    for attempt in range(ATTEMPTS):
        accepted, made = draw(mix(keys[todo] + np.uint64(attempt)), *(values[todo] for values in rows))
        out = out or made
        for name, values in made.items():
            out[name][todo[accepted]] = values[accepted]
        todo = todo[~accepted]
        if len(todo) == 0:
            return out
    raise ValueError(f"d_star must be lower, or width greater, for an instance to turn up in {ATTEMPTS} draws")


def is_test(key: np.ndarray) -> np.ndarray:
    """Whether instances of these keys belong to the test split, an eighth of the hash space."""
    return key >> np.uint64(61) == 0


# Circuits. A node's word holds its value in bit 0 and, in bit s + 1, its value after leaf s is flipped


def gates_of(code: np.ndarray, w: int) -> Arrays:
    """Integers in 0..gate_kinds(w)-1 as ops, in1 < in2: an operator and an unordered pair of slots each."""
    first, second = np.triu_indices(w, 1)
    pair, op = np.divmod(code, len(OPERATORS))
    return {"ops": op, "in1": first[pair], "in2": second[pair]}


def gate_kinds(w: int) -> int:
    """How many gates can read a layer of w."""
    return math.comb(w, 2) * len(OPERATORS)


def random_gates(keys: np.ndarray, *shape: int) -> Arrays:
    """Uniform ops, in1, in2 (N, *shape); the last axis is a layer of w gates."""
    return gates_of(below(draw_bits(keys, GATES, *shape), gate_kinds(shape[-1])), shape[-1])


def random_leaves(keys: np.ndarray, *shape: int) -> np.ndarray:
    """Uniform leaves (N, *shape) in {0, 1}, int64."""
    return (draw_bits(keys, LEAVES, *shape) >> np.uint64(63)).astype(np.int64)


def leaf_words(leaves: np.ndarray) -> np.ndarray:
    """Leaves (N, w, L) in {0, 1} as uint64 words: every bit the value, but bit s + 1 of leaf s flipped."""
    flip = np.uint64(1) << np.arange(1, leaves.shape[1] + 1, dtype=np.uint64)
    return (-leaves.astype(np.int64)).astype(np.uint64) ^ flip[:, None]


def evaluate(words: np.ndarray, gates: Arrays) -> np.ndarray:
    """Words of the lowest layer (N, w, L) and gates (N, D, w) to words of every layer (N, D+1, w, L)."""
    depth = gates["ops"].shape[1]
    out = np.empty((len(words), depth + 1, *words.shape[1:]), dtype=np.uint64)
    out[:, 0], rows = words, np.arange(len(words))[:, None]
    for d in range(depth):
        op = gates["ops"][:, d, :, None]
        a, b = out[rows, d, gates["in1"][:, d]], out[rows, d, gates["in2"][:, d]]
        out[:, d + 1] = (_XOR_PART[op] & (a ^ b)) ^ (_AND_PART[op] & a & b) ^ _NEGATE[op]
    return out


def values_of(words: np.ndarray) -> np.ndarray:
    """The unflipped values in words, int64 in {0, 1}."""
    return (words & np.uint64(1)).astype(np.int64)


def sensitive(words: np.ndarray) -> np.ndarray:
    """Whether some single leaf flip changes a node; bool, the shape of words."""
    # a gate that a flip changes has a changed input, and so on down to the leaf: a path of changed gates
    return words != (-values_of(words)).astype(np.uint64)


def chain_hashes(start: np.ndarray, gates: Arrays) -> np.ndarray:
    """Hash of start (N, L) and gates of layers 1..d (N, D, w), for every d: (N, D, L) uint64."""
    w = gates["ops"].shape[2]
    code = ((gates["ops"] * w + gates["in1"]) * w + gates["in2"]) * w + np.arange(w)
    layers = mix(code.astype(np.uint64)).sum(axis=2, dtype=np.uint64)
    out = np.empty((*layers.shape, start.shape[1]), dtype=np.uint64)
    for d in range(layers.shape[1]):
        start = mix(start ^ layers[:, d, None])
        out[:, d] = start
    return out


def leaf_hashes(leaves: np.ndarray) -> np.ndarray:
    """Leaves (N, w, L) as hashes (N, L)."""
    slots = np.arange(leaves.shape[1], dtype=np.uint64)[:, None]
    return mix((leaves.astype(np.uint64) << slots).sum(axis=1, dtype=np.uint64))


def combine(hashes: np.ndarray) -> np.ndarray:
    """Hashes (N, C, ...) of the circuits of an instance as one (N, ...); of one circuit, its own."""
    if hashes.shape[1] == 1:
        return hashes[:, 0]
    place = np.arange(hashes.shape[1], dtype=np.uint64).reshape(-1, *[1] * (hashes.ndim - 2))
    return mix(mix(hashes + place).sum(axis=1, dtype=np.uint64))


def flat_gates(gates: Arrays) -> Arrays:
    """Gates (N, C, D, w) as (N * C, D, w)."""
    return {name: gates[name].reshape(-1, *gates[name].shape[2:]) for name in ("ops", "in1", "in2")}


def circuit_keys(leaves: np.ndarray, ops: np.ndarray, in1: np.ndarray, in2: np.ndarray) -> np.ndarray:
    """Split-deciding key of every prefix, (N, D) uint64: column d-1 covers the leaves and layers 1..d.

    leaves (N, C, w) in {0, 1}; ops, in1, in2 (N, C, D, w), in1 < in2. An evaluation instance's key is its
    last column.
    """
    n, circuits, depth, w = ops.shape
    start = leaf_hashes(leaves.reshape(-1, w, 1))
    chains = chain_hashes(start, flat_gates({"ops": ops, "in1": in1, "in2": in2}))
    return combine(chains.reshape(n, circuits, depth))


def changes(leaves: np.ndarray, gates: Arrays) -> np.ndarray:
    """Whether some leaf changes some gate of the last layer: leaves (N, w), gates (N, D, w) to (N,) bool."""
    return sensitive(evaluate(leaf_words(leaves[:, :, None]), gates)[:, -1]).any(axis=(1, 2))


def random_subset(keys: np.ndarray, circuits: int) -> np.ndarray:
    """A uniform subset of at least 2 of the circuits (all of one), (N, C) bool."""
    if circuits == 1:
        return np.ones((len(keys), 1), dtype=bool)

    def draw(keys):
        subset = draw_bits(keys, SUBSET, circuits) >> np.uint64(63) == 1
        return subset.sum(axis=1) >= 2, {"subset": subset}

    return redraw(keys, draw)["subset"]


def repeated(values: np.ndarray) -> np.ndarray:
    """Which entries of (N, L) equal an earlier one of their row."""
    order = np.argsort(values, axis=1, kind="stable")
    ordered = np.take_along_axis(values, order, axis=1)
    again = np.zeros(values.shape, dtype=bool)
    np.put_along_axis(again, order[:, 1:], ordered[:, 1:] == ordered[:, :-1], axis=1)
    return again


def sibling_circuits(
    keys: np.ndarray, parity: np.ndarray, test: np.ndarray, circuits: int, depth: int, w: int, tries: int = 64
) -> Arrays:
    """Groups of siblings: shared ops, in1, in2 (G, C, D, w), subset (G, C); own leaves (G, S, C, w) and gate.

    gate (G, S, C) is the slot of each answer. Every answer gate changes with some leaf, the parity of a
    sibling's answers over the subset is parity (G, S), every key is of the test split where test (G,) and of
    the train split elsewhere, and no two siblings share a key.
    """
    rank = np.arange(parity.shape[1]) >> 1  # siblings alternate in parity

    def draw(keys, parity, test):
        shape = (len(keys), circuits, tries)
        gates = random_gates(keys, circuits, depth, w)
        subset = random_subset(keys, circuits)
        leaves = random_leaves(keys, circuits, w, tries)
        gate = below(draw_bits(keys, ANSWERS, circuits, tries), w)
        flat_leaves = leaves.reshape(-1, w, tries)
        top = evaluate(leaf_words(flat_leaves), flat_gates(gates))[:, -1]
        words = np.take_along_axis(top, gate.reshape(-1, 1, tries), axis=1).reshape(shape)
        hashes = chain_hashes(leaf_hashes(flat_leaves), flat_gates(gates))[:, -1].reshape(shape)
        good = sensitive(words)
        # a candidate instance is a try of one circuit, or a random combination of the good tries of several
        pick = np.broadcast_to(np.arange(tries), shape)
        if circuits > 1:
            drawn = below(draw_bits(keys, PICKS, circuits, tries), good.sum(axis=2, keepdims=True))
            pick = np.take_along_axis(np.argsort(~good, axis=2, kind="stable"), drawn, axis=2)
        answers = np.take_along_axis(values_of(words), pick, axis=2) & subset[:, :, None]
        key = combine(np.take_along_axis(hashes, pick, axis=2))
        ok = np.take_along_axis(good, pick, axis=2).all(axis=1) & (is_test(key) == test[:, None])
        ok &= ~repeated(np.where(ok, key, ~np.uint64(0)))
        # the k-th sibling of a parity takes the k-th candidate of that parity
        suits = ok[:, None] & (answers.sum(axis=1)[:, None] & 1 == parity[:, :, None])
        chosen = suits & (np.cumsum(suits, axis=2) == rank[:, None] + 1)
        where = np.take_along_axis(pick[:, None], chosen.argmax(axis=2)[:, :, None, None], axis=3)
        own = {
            "leaves": np.take_along_axis(leaves[:, None], where[..., None], axis=4)[..., 0],
            "gate": np.take_along_axis(gate[:, None], where, axis=3)[..., 0],
        }
        return chosen.any(axis=2).all(axis=1), {**gates, "subset": subset, **own}

    return redraw(keys, draw, parity, test)


# Hops. A map is a permutation of places 0..w-1, each place holding a symbol


def random_map(keys: np.ndarray, w: int, shortest: int | np.ndarray) -> Arrays:
    """symbols, target, cycle (N, w): the symbol, the target place and the cycle length of each place.

    Place 0 lies on a cycle of uniform length in shortest..w, which is a uniform permutation given a cycle
    that long; shortest is a number, or (N,).
    """
    places = np.arange(w)
    length = (shortest + below(draw_bits(keys, CYCLE), w - shortest + 1))[:, None]
    # places of the cycle sort first, in order; the others are permuted among themselves
    late = draw_bits(keys, REST, w) | _TOP
    rest = np.argsort(np.where(places < length, places.astype(np.uint64), late), axis=1)
    target = np.where(places < length, (places + 1) % length, rest)
    cycle, at = np.zeros(target.shape, dtype=np.int64), target
    for steps in range(1, w + 1):
        cycle[(at == places) & (cycle == 0)] = steps
        at = np.take_along_axis(target, at, axis=1)
    symbols = np.argsort(draw_bits(keys, NAMES, len(SYMBOLS)), axis=1)[:, :w]
    return {"symbols": symbols, "target": target, "cycle": cycle}


def map_keys(sources: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Split-deciding key (N,) uint64 of maps with these pairs (N, w) of symbols 0..25, in whatever order."""
    code = (sources * len(SYMBOLS) + targets).astype(np.uint64)
    return mix(mix(code).sum(axis=1, dtype=np.uint64))


def key_of_map(made: Arrays) -> np.ndarray:
    """`map_keys` of a `random_map`."""
    return map_keys(made["symbols"], np.take_along_axis(made["symbols"], made["target"], axis=1))


def shuffled_first(bits: np.ndarray, qualifies: np.ndarray) -> np.ndarray:
    """Places (N, w) in random order, those that qualify (N, w) first."""
    return np.argsort(np.where(qualifies, bits >> np.uint64(1), bits | _TOP), axis=1)


def follow(target: np.ndarray, start: np.ndarray, depth: int) -> np.ndarray:
    """Places (N, Q) after 0..depth hops from start (N, Q): (depth + 1, N, Q)."""
    out = [start]
    for _ in range(depth):
        out.append(np.take_along_axis(target, out[-1], axis=1))
    return np.stack(out)


def state_pairs(keys: np.ndarray, made: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """The pairs of a map as symbols (N, w), (N, w), in random order."""
    order = np.argsort(draw_bits(keys, ORDER, made["target"].shape[1]), axis=1)
    places = order, np.take_along_axis(made["target"], order, axis=1)
    return tuple(np.take_along_axis(made["symbols"], at, axis=1) for at in places)
