"""A mixture of experts as it is often written: each expert gathers its tokens, computes, and adds to the sum."""

import torch
import torch.nn.functional as F

from lib.experts import Experts, mix, top


def one_by_one(layer: Experts, x: torch.Tensor) -> torch.Tensor:
    """The layer's output with its own weights, one expert after the other. x: (N, D) -> (N, D)."""
    scores = layer.router(x).sigmoid()
    ids = top(scores, layer.top_k)
    weights, out = mix(scores, ids), torch.zeros_like(x)
    # unbound once, since the gradient of gate[i] would be a whole stack for every i
    for i, (gate, up, down) in enumerate(zip(layer.gate.unbind(), layer.up.unbind(), layer.down.unbind(), strict=True)):
        token, slot = torch.where(ids == i)
        rows = x.index_select(0, token)
        hidden = F.silu(F.linear(rows, gate)) * F.linear(rows, up)
        out.index_add_(0, token, F.linear(hidden, down) * weights[token, slot, None])
    return out
