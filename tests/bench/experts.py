"""The mixture of experts, forward and backward: the layer, one expert after the other, and its matrix products alone.

Shapes: as in `lib.experts`.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from lib.experts import Experts, mix, top

CONFIG = SimpleNamespace(d_model=256, d_expert=384, n_experts=25, experts_per_token=2)
TOKENS, SIDE = 2048, 1024  # SIDE: rows and columns of the large product


def one_by_one(layer: Experts, x: torch.Tensor) -> torch.Tensor:
    """The layer as it is often written: each expert gathers its tokens, computes and adds to the sum. x: (N, D) -> (N, D)."""
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


def contenders() -> tuple:
    """(layer, loop, products): forward and backward of the layer with all gradients, the same one expert after the other, and
    large matrix products of as many operations as all products of the experts. None of them takes or returns anything."""
    torch.manual_seed(0)
    layer = Experts(CONFIG)
    nn.init.normal_(layer.router.weight, std=CONFIG.d_model**-0.5)
    x, grad = torch.randn(TOKENS, CONFIG.d_model, requires_grad=True), torch.randn(TOKENS, CONFIG.d_model)
    torch.testing.assert_close(layer(x[None])[0], one_by_one(layer, x), rtol=1e-4, atol=1e-4)

    def clear():
        layer.zero_grad()
        x.grad = None

    def grouped():
        clear()
        layer(x[None]).backward(grad[None])

    def loop():
        clear()
        one_by_one(layer, x).backward(grad)

    # three products, each with two more backwards, of 2 M D F operations; the large ones have 2 SIDE^2 rows
    operations = 9 * 2 * TOKENS * layer.top_k * CONFIG.d_model * CONFIG.d_expert
    a, b = torch.randn(round(operations / (2 * SIDE**2)), SIDE), torch.randn(SIDE, SIDE)
    return grouped, loop, lambda: torch.mm(a, b)
