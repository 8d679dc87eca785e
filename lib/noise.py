"""The noise a state starts from: a function of position (and seed) alone, so that cache, padding and batch cannot change it.

Shapes: B batch, T tokens, D d_model.
"""

import numpy as np
import torch
from scipy.special import ndtr, ndtri

CUT = 3.0  # standard deviations at which Huginn's normal is cut


def state_noise(
    positions: torch.Tensor,
    d_model: int,
    kind: str = "normal",
    seed: int | None = None,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Noise of unit scale. positions: (B, T) whole numbers counted from each row's first real token -> (B, T, D) float32.

    kind: normal, truncated at 3 standard deviations, or hash, the axes paper's evaluation state, which takes no seed; with a
    seed it is a normal instead, as in that paper's training. rows: (B,) row numbers for the hash. Without a seed: seed 0.
    """
    if kind == "hash" and seed is None:
        return hashed(positions, d_model, rows)
    wanted, where = torch.unique(positions.clamp(min=0), return_inverse=True)
    draws = [_draw(np.random.Generator(np.random.Philox(key=[seed or 0, int(p)])), d_model, kind) for p in wanted]
    return torch.as_tensor(np.stack(draws), dtype=torch.float32, device=positions.device)[where]


def _draw(rng: np.random.Generator, d_model: int, kind: str) -> np.ndarray:
    if kind == "truncated":
        return ndtri(rng.uniform(ndtr(-CUT), ndtr(CUT), d_model))
    return rng.standard_normal(d_model)


def hashed(positions: torch.Tensor, d_model: int, rows: torch.Tensor | None = None) -> torch.Tensor:
    """The axes paper's deterministic stand-in for a normal state at evaluation, of channel, position and batch row.

    positions: (B or 1, T), rows: (B,) or None for row 0 -> (B, T, D) float32. The operations and their order are those of the
    published evaluation, since the sine is amplified 43758 times: another sine gives another state.
    """
    channel = torch.arange(d_model, dtype=torch.float32, device=positions.device)
    rows = torch.zeros(1, device=positions.device) if rows is None else rows.to(positions.device)
    x = channel * 0.013579 + positions[..., None].float() * 0.021713
    x = x + rows.float().view(-1, 1, 1) * 0.037719
    x = 43758.5453123 * (x + 0.123457).sin()
    u = (x - x.floor()).clamp(1e-6, 1.0 - 1e-6)
    return (2 * u - 1).erfinv() * 2**0.5
