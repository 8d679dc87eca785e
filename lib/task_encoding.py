"""Symbolic instances of the tasks as token ids: one token a gate, a pair, a query or a circuit.

A token has several fields (ids); the model sums their embeddings. Source: the contract paper's "Methodology,
Tasks".

Shapes: N instances, C circuits an instance, w gates a layer (or symbols in the map), D layers, T tokens, F
fields, Q queries.
"""

from typing import Any

import numpy as np

OPERATORS = ("AND", "OR", "XOR", "NAND", "NOR", "XNOR")
SYMBOLS = tuple("abcdefghijklmnopqrstuvwxyz")


def token_groups(task: Any) -> dict[str, tuple[str, ...]]:
    """Token names of a task by role, in id order, the possible answers first.

    `task` is a `lib.tasks.Task`; names are unique over all roles, so their concatenation is the vocabulary.
    """
    if task.family == "hops":
        hops = tuple(f"hop {d}" for d in range(1, task.max_depth + 1))
        roles = {role: tuple(f"{role} {s}" for s in SYMBOLS) for role in ("src", "tgt", "start")}
        return {"answer": SYMBOLS, "hop": hops, **roles}
    gates = task.width if task.family == "circuit" else task.circuit_width
    groups = {
        "answer": ("0", "1"),
        "leaf": ("leaf0", "leaf1"),
        "op": OPERATORS,
        "none": ("none",),
        "own": tuple(f"own {d}.{s}" for d in range(task.max_depth + 1) for s in range(gates)),
        "in": tuple(f"in {d}.{s}" for d in range(task.max_depth) for s in range(gates)),
    }
    if task.family == "paragg":
        groups["circuit"] = tuple(f"circuit {c}" for c in range(task.width))
        groups["flag"] = ("nonmember", "member")
        groups["parity"] = ("parity",)
    return groups


def token_offsets(task: Any) -> dict[str, int]:
    """The id of the first token of each role of `token_groups`."""
    groups = token_groups(task)
    sizes = np.cumsum([0, *map(len, groups.values())])
    return dict(zip(groups, sizes.tolist(), strict=False))


def encode_circuits(task: Any, raw: dict[str, np.ndarray]) -> np.ndarray:
    """Gates as tokens (leaf value or operator, own name, two inputs[, circuit]), layer 0 first.

    Returns (N, C, w * (D+1), F) int64. `raw` holds leaves (N, C, w) in {0, 1}, and ops, in1, in2 (N, C, D,
    w): the operator and the slots read in the layer below.
    """
    first = token_offsets(task)
    n, circuits, depth, w = raw["ops"].shape
    ids = np.full((n, circuits, depth + 1, w, task.fields), first["none"], dtype=np.int64)
    below = first["in"] + w * np.arange(depth)[:, None]
    ids[:, :, 0, :, 0] = first["leaf"] + raw["leaves"]
    ids[:, :, 1:, :, 0] = first["op"] + raw["ops"]
    ids[..., 1] = first["own"] + np.arange((depth + 1) * w).reshape(depth + 1, w)
    ids[:, :, 1:, :, 2] = below + raw["in1"]
    ids[:, :, 1:, :, 3] = below + raw["in2"]
    if task.family == "paragg":
        ids[..., 4] = first["circuit"] + np.arange(circuits)[:, None, None]
    return ids.reshape(n, circuits, (depth + 1) * w, task.fields)


def encode_aggregate(task: Any, raw: dict[str, np.ndarray]) -> np.ndarray:
    """The circuits in turn, a token a circuit (member or not, its answer gate), the parity token.

    Returns (N, T, F) int64. `raw` as for `encode_circuits`, with gate (N, C), the slot of each answer gate,
    and subset (N, C) bool.
    """
    first = token_offsets(task)
    n, circuits, depth, w = raw["ops"].shape
    gates = encode_circuits(task, raw).reshape(n, -1, task.fields)
    tail = np.full((n, circuits + 1, task.fields), first["none"], dtype=np.int64)
    tail[:, :-1, 0] = first["flag"] + raw["subset"]
    tail[:, :-1, 1] = first["own"] + depth * w + raw["gate"]
    tail[:, :-1, 4] = first["circuit"] + np.arange(circuits)
    tail[:, -1, 0] = first["parity"]
    return np.concatenate([gates, tail], axis=1)


def encode_hops(task: Any, sources: np.ndarray, targets: np.ndarray, hops: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Pairs (source, target) as stated, then queries (hop count, start); (N, w + Q, 2) int64.

    `sources`, `targets` (N, w) and `starts` (N, Q) are symbols 0..25, `hops` (N, Q) counts from 1.
    """
    first = token_offsets(task)
    pairs = np.stack([first["src"] + sources, first["tgt"] + targets], axis=2)
    queries = np.stack([first["hop"] + hops - 1, first["start"] + starts], axis=2)
    return np.concatenate([pairs, queries], axis=1).astype(np.int64)
