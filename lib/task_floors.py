"""What answers score without the skill: the no-skill floor of a stratum, shortcut by shortcut.

`task` is a `lib.tasks.Task`, `instances` a `lib.tasks.Instances` of it (N instances of width w at depth d*).
Source: the contract paper's "Methodology, Tasks".
"""

from typing import Any

import numpy as np

from lib.task_draws import (
    evaluate,
    flat_gates,
    leaf_words,
    random_gates,
    random_leaves,
    sensitive,
    stream_keys,
    values_of,
)
from lib.task_encoding import OPERATORS

COMPLETIONS = 5  # a stream apart from those of `lib.tasks`


def floors(task: Any, instances: Any) -> dict[str, float]:
    """Accuracy on these instances of chance, the best constant answer and each shortcut of the family.

    hops: a random symbol of the context, the start, its predecessor, the target of the first and of the last
    pair. circuit: `upper_layers`, the best predictor that sees operators and wiring of layers 2..d* and the
    answer gate, but no leaf and no gate of layer 1 (d* = 1: the best constant). paragg: `one_member`, a
    member's answer or its negation.
    """
    answer, raw = instances.answer, instances.raw
    counts = np.bincount(answer, minlength=len(task.alphabet))
    out = {"chance": 1 / len(task.alphabet), "constant": float(counts.max() / len(answer))}
    if task.family == "hops":
        before = raw["sources"][raw["targets"] == raw["start"][:, None]]
        guesses = {"start": raw["start"], "predecessor": before}
        guesses |= {"first_pair_target": raw["targets"][:, 0], "last_pair_target": raw["targets"][:, -1]}
        shares = {name: float((guess == answer).mean()) for name, guess in guesses.items()}
        return out | {"context_symbol": 1 / task.width} | shares
    if task.family == "circuit":
        upper = out["constant"] if instances.d_star == 1 else _upper_layers(task, instances)
        return out | {"upper_layers": upper}
    top = values_of(evaluate(leaf_words(raw["leaves"].reshape(-1, task.circuit_width, 1)), flat_gates(raw))[:, -1, :, 0])
    own = np.take_along_axis(top.reshape(*raw["gate"].shape, -1), raw["gate"][:, :, None], axis=2)[:, :, 0]
    agrees = ((own == answer[:, None]) & raw["subset"]).sum(axis=1) / raw["subset"].sum(axis=1)
    return out | {"one_member": float(max(agrees.mean(), 1 - agrees.mean()))}


def constant(answer: np.ndarray, choices: int) -> float:
    """What the best constant answer scores, or chance among `choices` where that is more. answer: (N,)."""
    counts = np.unique(answer, return_counts=True)[1]
    return max(1 / choices, float(counts.max() / counts.sum()))


def floor(task: Any, instances: Any) -> float:
    """The no-skill accuracy of a stratum: the largest of `floors`."""
    return max(floors(task, instances).values())


def operator_mix(instances: Any) -> dict[str, float]:
    """Share of each operator among all gates of these instances (circuit, paragg); ValueError for hops."""
    if "ops" not in instances.raw:
        raise ValueError("family must be circuit or paragg for an operator mix, not hops")
    counts = np.bincount(instances.raw["ops"].reshape(-1), minlength=len(OPERATORS))
    return dict(zip(OPERATORS, (counts / counts.sum()).tolist(), strict=True))


def _upper_layers(task: Any, instances: Any, completions: int = 1024) -> float:
    """Posterior of the answer given the upper layers, from random layers 0 and 1 under the same guarantee.

    The likelier answer is chosen on one half of the completions and scored on the other, and vice versa, so
    that noise does not raise the estimate. Answers need no weights: operators are closed under negation.
    Siblings are balanced over one skeleton, which this predictor could only lose by: the value is an upper
    estimate.
    """
    w, raw = task.width, instances.raw
    names = ("ops", "in1", "in2")
    seen = np.concatenate([raw[k][:, 1:].reshape(len(raw["gate"]), -1) for k in names] + [raw["gate"][:, None]], axis=1)
    _, first, row = np.unique(seen, axis=0, return_index=True, return_inverse=True)
    scores = np.empty(len(first))
    for i, at in enumerate(first):
        key = stream_keys((COMPLETIONS, w, instances.d_star), [i])
        layer = {k: v[0] for k, v in random_gates(key, completions, 1, w).items()}
        upper = {k: np.broadcast_to(raw[k][at, 1:], (completions, *raw[k][at, 1:].shape)) for k in names}
        gates = {k: np.concatenate([layer[k], upper[k]], axis=1) for k in names}
        words = evaluate(leaf_words(random_leaves(key, completions, w, 1)[0]), gates)[:, -1, raw["gate"][at], 0]
        counts = np.stack([1 - values_of(words), values_of(words)]) * sensitive(words)
        counts = counts.reshape(2, 2, -1).sum(axis=2)  # (answer, half)
        score = [counts[counts[:, k].argmax(), 1 - k] / max(1, counts[:, 1 - k].sum()) for k in (0, 1)]
        scores[i] = np.mean(score) if counts.sum(axis=0).all() else 0.5
    return float(scores[row.reshape(-1)].mean())
