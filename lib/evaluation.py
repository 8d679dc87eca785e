"""The one-pass sweep over loop counts, and what is read off a readout.

A sweep over K = 1..K_max is ONE trajectory of K_max steps with a readout at each K, logits at the answer positions alone.
Shapes: N instances, B rows of a batch, A answers, D d_model, V vocabulary, K loop counts.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch

from lib.boundary import Boundary
from lib.looped import LoopedModel, at_positions
from lib.tasks import Instances


@torch.no_grad()
def sweep(
    model: LoopedModel,
    ids: torch.Tensor,
    answer_positions: torch.Tensor,
    max_loops: int,
    boundary: Boundary | None = None,
    **state,
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield (K, logits (B, A, V), raw states (B, A, D)) at the answer positions for K = 1..max_loops of one trajectory.

    Bitwise equal to `forward(loops=K)` of the same batch at the same positions (eager, one thread, same initial state, which
    `initial_state=` or `state_seed=` give). Raises ValueError when max_loops is below 1.
    """
    context = model.context(ids)
    for K, z in enumerate(model.trajectory(ids, max_loops, boundary, context=context, **state), start=1):
        yield K, model.readout(z, answer_positions, context), at_positions(z, answer_positions)


@dataclass(frozen=True)
class Readings:
    """What one sweep read at every loop count K = 1..K_max (first axis) and instance (second axis), shapes (K, N)."""

    prediction: np.ndarray  # arg-max token over the full vocabulary
    entropy: np.ndarray  # bits, over the full vocabulary
    gap: np.ndarray  # top-1 minus top-2 logit
    norm: np.ndarray  # L2 norm of the raw state at the answer position
    answer: np.ndarray  # (N,) gold token


def read(
    model: LoopedModel,
    instances: Instances,
    max_loops: int,
    boundary: Boundary | None = None,
    batch_size: int = 256,
) -> Readings:
    """Sweep N instances of a stratum, `batch_size` rows at a time; every array of the Readings is (max_loops, N).

    Measures as in the contract paper, "Metrics and statistics". Raises ValueError when max_loops is below 1.
    """
    parts = []
    for i in range(0, len(instances.answer), batch_size):
        rows = slice(i, i + batch_size)
        ids = torch.as_tensor(instances.ids[rows], device=model.device)
        positions = torch.as_tensor(instances.answer_position[rows, None], device=model.device)
        steps = [_reading(logits[:, 0], z[:, 0]) for _, logits, z in sweep(model, ids, positions, max_loops, boundary)]
        parts.append([np.stack(column) for column in zip(*steps, strict=True)])
    return Readings(*(np.concatenate(column, axis=1) for column in zip(*parts, strict=True)), instances.answer)


def _reading(logits: torch.Tensor, z: torch.Tensor) -> tuple[np.ndarray, ...]:
    """Prediction, entropy (bits), top-2 gap and state norm of logits (B, V) and raw states (B, D): four arrays (B,)."""
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
