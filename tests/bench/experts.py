"""The mixture of experts, forward and backward: the layer, one expert after the other, and its matrix products alone.

Shapes: as in `lib.experts`.
"""

from types import SimpleNamespace

import torch
from torch import nn

from lib import engine
from lib.experts import Experts
from tests.bench.baselines.expert_loop import one_by_one
from tests.bench.measure import paired, row

CONFIG = SimpleNamespace(d_model=256, d_expert=384, n_experts=25, experts_per_token=2)
TOKENS, SIDE = 2048, 1024  # SIDE: rows and columns of the large product


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


def rows() -> list[dict]:
    """The layer against a loop over its experts and against its matrix products alone, on one thread and on all."""
    grouped, loop, products = contenders()
    made = []
    faults = "large results are written to fresh pages, while the loop's stay in the cache from product to product"
    for threads in sorted({1, engine.cores()}):
        torch.set_num_threads(threads)
        on = f", {threads} threads" if threads > 1 else ""
        slower, share = paired(loop, grouped, 40), paired(grouped, products, 40)
        made.append(row(f"one expert after the other{on}", slower, "times", "the grouped experts", at_least=1.5, why=faults))
        limit = "their products at a large one's rate"
        made.append(row(f"the grouped experts{on}", share, "times", limit, at_most=2, why=faults))
    torch.set_num_threads(1)
    return made
