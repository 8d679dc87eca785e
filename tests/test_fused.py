"""The hand-written passes against torch's own operations: outputs, every gradient, and where they may not be used."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lib import fused
from lib.boundary import every, never
from lib.cache import LoopedCache
from lib.config import AXES, LoopedConfig
from lib.experts import Routes
from lib.fused import AttentionBranch, FeedForwardBranch
from lib.layers import Block, Context
from tests.models import EXPERTS, VARIANTS, small, tokens

RANDOM = torch.Generator().manual_seed(0)


def randn(*shape):
    return torch.randn(shape, generator=RANDOM, dtype=torch.float64, requires_grad=True)


def block_and_context(block="pre_norm", T=5, heads=2, width=16, **values):
    config = LoopedConfig(d_model=width, n_heads=heads, d_ff=12, block=block, **values)
    layer = Block(config).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=RANDOM, dtype=torch.float64) * 0.3 + (parameter.dim() == 1))
    return layer, lambda: Context(torch.arange(T)[None], None, config, torch.float64)


@pytest.mark.parametrize("residual", [True, False])
def test_each_branch_has_the_gradient_of_what_it_computes(residual):
    def feed_forward(x, gate_up, down):
        return FeedForwardBranch.apply(x, gate_up, down, 1e-3, residual)

    assert torch.autograd.gradcheck(feed_forward, (randn(2, 3, 4), randn(10, 4), randn(4, 5)))
    for rope in AXES["rope"]:
        layer, context = block_and_context(rope=rope)
        fused.prepare(shared := context(), layer.attention)

        def attention(x, qkv, o, shared=shared):
            return AttentionBranch.apply(x, qkv, o, shared.turns, shared.causal, 1e-3, residual)

        assert torch.autograd.gradcheck(attention, (randn(2, 5, 16), randn(48, 16), randn(16, 16)))


def test_a_frozen_matrix_gets_no_gradient_and_the_others_theirs():
    whole = [randn(2, 3, 4), randn(10, 4), randn(4, 5)]
    FeedForwardBranch.apply(*whole, 1e-3, True).square().sum().backward()
    for frozen in (1, 2):
        some = [t.detach().requires_grad_(i != frozen) for i, t in enumerate(whole)]
        FeedForwardBranch.apply(*some, 1e-3, True).square().sum().backward()
        for i, t in enumerate(some):
            assert t.grad is None if i == frozen else torch.equal(t.grad, whole[i].grad)


def test_scores_far_apart_are_no_overflow_and_what_is_hidden_weighs_nothing():
    seen = torch.ones(3, 3).tril()
    for size in (1.0, 1e4):
        scores = size * torch.tensor([[0.0, 9.0, 9.0], [-1.0, -1.0, 9.0], [1.0, -1.0, -2.0]]) + seen.log()
        found = fused.causal_softmax_(scores.clone(), seen)
        torch.testing.assert_close(found, scores.softmax(-1))
        assert (found[seen == 0] == 0).all()


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(AXES["block"]),
    st.sampled_from(AXES["rope"]),
    st.integers(1, 9),
    st.integers(1, 4),
    st.sampled_from([(1, None), (2, None), (4, None), (2, 6)]),
    st.sampled_from([{}, EXPERTS]),
)
def test_a_block_is_the_plain_block_in_outputs_and_all_gradients(kind, rope, T, B, heads, experts):
    layer, context = block_and_context(kind, T, heads[0], head_dim=heads[1], rope=rope, **experts)
    found = []
    for compute in (lambda x: layer.plain(x, context()), lambda x: fused.block(x, layer, context())):
        layer.zero_grad()
        x = torch.linspace(-2, 2, B * T * 16, dtype=torch.float64).sin().view(B, T, 16).requires_grad_()
        y = compute(x)
        (y * torch.arange(y.numel(), dtype=y.dtype).cos().view(y.shape)).sum().backward()
        found.append([y, x.grad, *(p.grad.clone() for p in layer.parameters())])
    assert fused.untouched(layer), "it is taken where nothing forbids it"
    for plain, quick in zip(*found, strict=True):
        torch.testing.assert_close(quick, plain, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("boundary", [never, every(1), every(2)])
@pytest.mark.parametrize(
    "name", [None, "shared states", "split states", "unrolled, injected", "experts", "shared states, experts"]
)
def test_a_model_reads_the_same_with_and_without(boundary, name, monkeypatch):
    model, ids = small(envelope="sandwich", **VARIANTS.get(name, {})).double(), tokens(4, 9)
    quick = model(ids, loops=5, boundary=boundary).logits
    monkeypatch.setattr(fused, "suits", lambda *_: False)
    torch.testing.assert_close(quick, model(ids, loops=5, boundary=boundary).logits, rtol=1e-10, atol=1e-12)


def test_a_context_that_is_used_again_has_neither_old_weights_nor_weights_without_gradients():
    model, ids = small().double(), tokens(2, 6)
    context = model.context(ids)
    with torch.no_grad():
        model.step(model.embed(ids), None, 0, never, context)
    model.step(model.embed(ids), None, 0, never, context).sum().backward()
    assert model.core[0].attention.qkv.weight.grad is not None
    with torch.no_grad():
        model.core[0].attention.qkv.weight.mul_(2)
        again, fresh = (model.step(model.embed(ids), None, 0, never, c) for c in (context, model.context(ids)))
    assert torch.equal(again, fresh)


def test_hooks_and_replaced_modules_are_not_passed_over():
    model, ids = small().double(), tokens(2, 6)
    looped, own = model, model(ids).logits
    layer = model.core[0]
    for values in ({}, EXPERTS):
        model = small(**values).double()
        for name, module in model.core[0].named_modules():
            seen = []
            with_hook = module.register_forward_hook(lambda *_, s=seen: s.append(1))
            model(ids, loops=3)
            with_hook.remove()
            assert len(seen) == 3, name

    class Adapted(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    adapted = Adapted(*reversed(layer.attention.qkv.weight.shape), bias=False, dtype=torch.float64)
    adapted.load_state_dict(layer.attention.qkv.state_dict())
    layer.attention.qkv = adapted
    assert not torch.allclose(looped(ids).logits, own)


def test_an_expert_layer_takes_the_fused_attention_and_runs_its_feed_forward_as_it_is(monkeypatch):
    model, ids, taken = small(core=1, **EXPERTS).double(), tokens(2, 6), []
    layer, attend = model.core[0], AttentionBranch.apply
    monkeypatch.setattr(AttentionBranch, "apply", lambda *a: taken.append(1) or attend(*a))
    model(ids, loops=3, routes=(routes := Routes()))
    assert len(taken) == 3 == len(routes.executions), "routers are recorded on this path too"
    layer.feed_forward.register_forward_hook(lambda *_: None)
    model(ids, loops=3)
    assert len(taken) == 6, "a hook on what is called anyway costs nothing"


def test_a_second_derivative_is_refused_not_wrong():
    x, gate_up, down = randn(2, 3, 4), randn(10, 4), randn(4, 5)
    branch = FeedForwardBranch.apply(x, gate_up, down, 1e-3, True)
    (first,) = torch.autograd.grad(branch.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_autocast_takes_the_plain_path_and_stays_finite():
    model, ids = small(), tokens(2, 6)
    with torch.autocast("cpu", torch.bfloat16):
        assert not fused.suits(torch.zeros(2, 6, 16), model.context(ids))
        assert model(ids).logits.isfinite().all()


def test_grouped_heads_biases_and_a_cache_take_the_plain_path():
    for values in ({"n_kv_heads": 1}, {"qk_bias": True}):
        assert not fused.untouched(small(**values).core[0]), values
    model = small()
    assert fused.untouched(model.core[0])
    assert not fused.suits(torch.zeros(2, 7, 16), model.context(tokens(2, 7), cache=LoopedCache()))


def test_padding_long_rows_and_half_precision_take_the_plain_path():
    model = small()
    assert fused.suits(torch.zeros(1, 64, 16), model.context(tokens(1, 64)))
    assert not fused.suits(torch.zeros(1, 65, 16), model.context(tokens(1, 65)))
    assert not fused.suits(torch.zeros(1, 7, 16, dtype=torch.bfloat16), model.context(tokens(1, 7)))
    padded = torch.ones(2, 7, dtype=torch.long)
    padded[0, 0] = 0
    assert not fused.suits(torch.zeros(2, 7, 16), model.context(tokens(2, 7), padded))
