"""The one-pass sweep over loop counts, and what is read off a readout.

A sweep over K = 1..K_max is ONE trajectory of K_max steps with a readout at each K, logits at the answer positions alone.
Shapes: N instances, B rows of a batch, A answers, D d_model, Z channels of the state (D, or 2 D with H/L states), V
vocabulary, K loop counts.
"""

import copy
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch

from lib.boundary import Boundary
from lib.cache import LoopedCache, SharedPrefix
from lib.looped import LoopedModel, at_positions
from lib.tasks import Instances


@dataclass(frozen=True)
class Prefix:
    """Tokens that every row begins with, run once: what the loop's layers, and at each K the coda's, keep of them."""

    loop: SharedPrefix
    coda: dict[int, SharedPrefix]  # by loop count; empty without a coda
    tokens: int


@torch.no_grad()
def prefix_of(model: LoopedModel, ids: torch.Tensor, max_loops: int, boundary: Boundary | None = None) -> Prefix:
    """Run the shared first tokens, ids (S,), once, for sweeps of up to max_loops steps under one boundary."""
    loop, coda = LoopedCache(), {}
    context = model.context(ids[None], cache=loop)
    for K, z in enumerate(model.trajectory(ids[None], max_loops, boundary, context=context), start=1):
        if model.coda:
            after = copy.copy(context)
            after.cache = filled = LoopedCache()
            model.readout(z, torch.tensor([len(ids) - 1], device=ids.device), after)
            coda[K] = SharedPrefix(filled)
    return Prefix(SharedPrefix(loop), coda, len(ids))


@torch.no_grad()
def sweep(
    model: LoopedModel,
    ids: torch.Tensor,
    answer_positions: torch.Tensor,
    max_loops: int,
    boundary: Boundary | None = None,
    prefix: Prefix | None = None,
    **state,
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield (K, logits (B, A, V), raw states (B, A, Z)) at the answer positions for K = 1..max_loops of one trajectory.

    Bitwise equal to `forward(loops=K)` of the same batch at the same positions (eager, one thread, same initial state, which
    `initial_state=` or `state_seed=` give). With a prefix of the same boundary, ids and positions are those behind it.
    Raises ValueError when max_loops is below 1.
    """
    context = model.context(ids, cache=prefix and prefix.loop)
    for K, z in enumerate(model.trajectory(ids, max_loops, boundary, context=context, **state), start=1):
        after = context
        if prefix and model.coda:
            after = copy.copy(context)
            after.cache = prefix.coda[K]
        yield K, model.readout(z, answer_positions, after), at_positions(z, answer_positions)


@dataclass(frozen=True)
class Readings:
    """What one sweep read at every loop count K = 1..K_max (first axis) and instance (second axis), shapes (K, N)."""

    prediction: np.ndarray  # arg-max token over the full vocabulary
    entropy: np.ndarray  # bits, over the full vocabulary
    gap: np.ndarray  # top-1 minus top-2 logit
    norm: np.ndarray  # L2 norm of the raw state at the answer position, of both H/L states together
    answer: np.ndarray  # (N,) gold token


def read(
    model: LoopedModel,
    instances: Instances,
    max_loops: int,
    boundary: Boundary | None = None,
    batch_size: int = 256,
    prefix: Prefix | None = None,
) -> Readings:
    """Sweep N instances of a stratum, `batch_size` rows at a time; every array of the Readings is (max_loops, N).

    Measures as in the contract paper, "Metrics and statistics". prefix: the first tokens that all of them share, run before.
    Raises ValueError when max_loops is below 1.
    """
    parts, skip = [], prefix.tokens if prefix else 0
    for i in range(0, len(instances.answer), batch_size):
        rows = slice(i, i + batch_size)
        ids = torch.as_tensor(instances.ids[rows, skip:], device=model.device)
        positions = torch.as_tensor(instances.answer_position[rows, None] - skip, device=model.device)
        swept = sweep(model, ids, positions, max_loops, boundary, prefix)
        steps = [_reading(logits[:, 0], z[:, 0]) for _, logits, z in swept]
        parts.append([np.stack(column) for column in zip(*steps, strict=True)])
    return Readings(*(np.concatenate(column, axis=1) for column in zip(*parts, strict=True)), instances.answer)


def batches(model: LoopedModel, instances: Instances, batch_size: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield ids (B, T, F), answer positions (B, 1) and answers (B,) of the instances, in order."""
    for i in range(0, len(instances.answer), batch_size):
        rows = slice(i, i + batch_size)
        arrays = instances.ids[rows], instances.answer_position[rows, None], instances.answer[rows]
        yield tuple(torch.as_tensor(a, device=model.device) for a in arrays)


def joined(parts: list[Readings]) -> Readings:
    """Readings of several sets of instances as one, in their order, arrays (K, N)."""
    names = [field.name for field in dataclasses.fields(Readings)]
    return Readings(**{name: np.concatenate([getattr(part, name) for part in parts], axis=-1) for name in names})


def _reading(logits: torch.Tensor, z: torch.Tensor) -> tuple[np.ndarray, ...]:
    """Prediction, entropy (bits), top-2 gap and state norm of logits (B, V) and raw states (B, Z): four arrays (B,)."""
    logits = logits.float()
    log_p = logits.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1) / np.log(2)
    top = logits.topk(2, dim=-1).values
    values = (logits.argmax(-1), entropy, top[:, 0] - top[:, 1], z.float().norm(dim=-1))
    return tuple(v.cpu().numpy() for v in values)


def mutual_information(prediction: np.ndarray, answer: np.ndarray) -> float:
    """Mutual information of prediction and gold in bits, Miller-Madow corrected by occupied cells, not clipped.

    prediction, answer: (N,) tokens. Contract paper, "Metrics and statistics".
    """

    def entropy(*columns):
        _, counts = np.unique(np.stack(columns, axis=1), axis=0, return_counts=True)
        p = counts / counts.sum()
        return -(p * np.log2(p)).sum() + (len(counts) - 1) / (2 * counts.sum() * np.log(2))

    return float(entropy(prediction) + entropy(answer) - entropy(prediction, answer))


def summary(readings: Readings, alphabet: tuple[int, ...]) -> pd.DataFrame:
    """One row a loop count: accuracy, state_norm, entropy_bits, logit_gap, modal_share, modal_token, in_alphabet_share,
    mutual_information_bits (contract paper, "Metrics and statistics"). Columns K and these."""
    rows = []
    for k, prediction in enumerate(readings.prediction):
        tokens, counts = np.unique(prediction, return_counts=True)
        rows.append(
            {
                "K": k + 1,
                "accuracy": (prediction == readings.answer).mean(),
                "state_norm": readings.norm[k].mean(),
                "entropy_bits": readings.entropy[k].mean(),
                "logit_gap": readings.gap[k].mean(),
                "modal_share": counts.max() / counts.sum(),
                "modal_token": int(tokens[counts.argmax()]),
                "in_alphabet_share": np.isin(prediction, alphabet).mean(),
                "mutual_information_bits": mutual_information(prediction, readings.answer),
            }
        )
    return pd.DataFrame(rows)
