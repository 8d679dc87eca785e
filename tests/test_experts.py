"""The mixture of experts against one token after the other and a dense sum; its record, interventions, loss and measures."""

import math
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from lib import experts
from lib.experts import Experts, Routes, balance, entropy, load, mean_load, mix, overlap, top

# E, k, D, F, (B, T)
CASES = {
    "ordinary": (5, 2, 8, 12, (2, 6)),
    "one expert a token": (4, 1, 8, 4, (1, 9)),
    "every expert for every token": (3, 3, 4, 8, (2, 3)),
    "one token": (5, 2, 8, 4, (1, 1)),
    "most experts without a token": (25, 2, 8, 4, (1, 3)),
    "no token": (3, 2, 8, 4, (1, 0)),
    "odd widths": (4, 2, 5, 3, (2, 4)),
    "one expert": (1, 1, 4, 4, (1, 5)),
}
NAMES = ("router.weight", "gate", "up", "down")


def layer(case="ordinary", dtype=torch.float64, seed=0):
    """(Experts, its input) with random weights; "one expert for all" has a router that sends every token to expert 1 first."""
    E, k, D, width, shape = CASES["ordinary" if case == "one expert for all" else case]
    module = Experts(SimpleNamespace(d_model=D, d_expert=width, n_experts=E, experts_per_token=k)).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2)
        x = torch.randn(*shape, D, generator=generator, dtype=torch.float64)
        if case == "one expert for all":
            module.top_k = 1
            x, module.router.weight.data = x.abs(), -module.router.weight.abs()
            module.router.weight[1] = 1.0
    return module.to(dtype), x.to(dtype).requires_grad_()


def matrices(module):
    """Router, gate, up, down."""
    return [module.router.weight, module.gate, module.up, module.down]


def by_token(module, x, ids=None):
    """(output, ids, weights) in float64, token by token and expert by expert; ids (N, k) are used where given."""
    router, gate, up, down = (p.detach().double().numpy() for p in matrices(module))
    flat, given = x.detach().double().numpy().reshape(-1, x.shape[-1]), ids
    out, all_ids, all_weights = np.zeros_like(flat), [], []
    for n, token in enumerate(flat):
        scores = [1 / (1 + math.exp(-row @ token)) for row in router]
        own = sorted(range(len(scores)), key=lambda i: -scores[i])[: module.top_k] if given is None else given[n].tolist()
        own = sorted(own, key=lambda i: -scores[i])
        weights = [scores[i] / sum(scores[j] for j in own) for i in own]
        for i, weight in zip(own, weights, strict=True):
            a = gate[i] @ token
            out[n] += weight * (down[i] @ (a / (1 + np.exp(-a)) * (up[i] @ token)))
        all_ids.append(own), all_weights.append(weights)
    return torch.tensor(out).view(x.shape), torch.tensor(all_ids), torch.tensor(all_weights, dtype=torch.float64)


def dense(x, router, gate, up, down, k):
    """Every expert on every token, weighted by zero where it was not chosen; differentiated by torch."""
    flat = x.reshape(-1, x.shape[-1])
    scores = (flat @ router.T).sigmoid()
    kept = torch.zeros_like(scores).scatter(1, scores.topk(k).indices, 1.0) * scores
    hidden = F.silu(torch.einsum("nd,efd->nef", flat, gate)) * torch.einsum("nd,efd->nef", flat, up)
    return torch.einsum("ne,nef,edf->nd", kept / kept.sum(-1, keepdim=True), hidden, down).view(x.shape)


def weighed(y):
    """A scalar whose gradient differs from entry to entry."""
    return (y * torch.arange(y.numel(), dtype=y.dtype).cos().view(y.shape)).sum()


every_case = pytest.mark.parametrize("case", [*CASES, "one expert for all"])


@every_case
def test_the_output_is_that_of_one_token_after_the_other(case):
    module, x = layer(case)
    y = module(x)
    assert y.shape == x.shape and y.dtype == x.dtype
    torch.testing.assert_close(y, by_token(module, x)[0], rtol=1e-12, atol=1e-13)


@every_case
def test_gradients_of_input_router_and_all_matrices_are_those_of_the_dense_sum(case):
    module, x = layer(case)
    wanted = torch.autograd.grad(weighed(dense(x, *matrices(module), module.top_k)), [x, *matrices(module)])
    found = torch.autograd.grad(weighed(module(x)), [x, *matrices(module)])
    for name, a, b in zip(["x", *NAMES], found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")
    if case == "ordinary":
        assert all(t.abs().max() > 1e-3 for t in found)  # the router's too: the weights carry a gradient
    if case == "one expert for all":
        assert all((t[[0, 2, 3, 4]] == 0).all() and (t[1] != 0).any() for t in found[2:])  # nothing for the other experts


@pytest.mark.parametrize("case", ["one expert a token", "every expert for every token", "odd widths", "one token"])
def test_numerical_gradients(case):
    module, x = layer(case)

    def compute(x, *parameters):
        return torch.func.functional_call(module, dict(zip(NAMES, parameters, strict=True)), x)

    assert torch.autograd.gradcheck(compute, (x, *matrices(module)))


@every_case
def test_single_precision_is_near_double_in_output_and_gradients(case):
    found = []
    for dtype in (torch.float64, torch.float32):
        module, x = layer(case, dtype)
        y = module(x)
        found.append([y, *torch.autograd.grad(weighed(y), [x, *matrices(module)])])
    for exact, single in zip(*found, strict=True):
        assert single.dtype == torch.float32
        torch.testing.assert_close(single.double(), exact, rtol=1e-5, atol=1e-5)


def test_all_products_of_the_experts_are_grouped_ones_in_single_precision():
    for case, times in (("ordinary", 9), ("odd widths", 0)):
        module, x = layer(case, torch.float32)
        with mock.patch.object(F, "grouped_mm", wraps=F.grouped_mm) as product:
            weighed(module(x)).backward()
        assert product.call_count == times


@pytest.mark.parametrize("ends", [(3, 3, 8), (0, 8, 8), (0, 0, 0), (8, 8, 8), (1, 2, 8)])
def test_grouped_products_leave_out_empty_groups_and_keep_to_their_rows(ends):
    M = ends[-1]
    a, b, c = torch.randn(M, 4), torch.randn(3, 4, 8), torch.randn(M, 8)
    offsets = torch.tensor(ends, dtype=torch.int32)
    groups = list(zip((0, *ends[:-1]), ends, strict=True))
    for dtype in (torch.float32, torch.float64):
        _ = [torch.full((3, 4, 8), math.nan, dtype=dtype) for _ in range(4)]  # what fresh memory may hold
        del _
        forward = experts.grouped(a.to(dtype), b.to(dtype), offsets)
        torch.testing.assert_close(forward.float(), torch.cat([a[s:e] @ own for (s, e), own in zip(groups, b, strict=True)]))
        outer = experts.grouped(a.to(dtype).t(), c.to(dtype), offsets)
        torch.testing.assert_close(outer.float(), torch.stack([a[s:e].t() @ c[s:e] for s, e in groups]))


def test_unaligned_memory_is_no_obstacle():
    module, x = layer("ordinary", torch.float32)
    wanted = module(x)
    storage = torch.empty(module.gate.numel() + 1)
    module.gate.data = storage[1:].view_as(module.gate).copy_(module.gate.data)
    torch.testing.assert_close(module(x), wanted)


def test_half_precision_routes_by_logits_rounded_once_and_scores_in_single():
    module, x = layer("ordinary", torch.bfloat16)
    routes = Routes()
    y = module(x, routes)
    execution = routes.executions[0]
    assert y.dtype == execution.weights.dtype == torch.bfloat16
    wanted = F.linear(x.flatten(0, 1), module.router.weight).float().sigmoid()
    torch.testing.assert_close(execution.scores, wanted, rtol=0, atol=0)
    torch.testing.assert_close(y.double(), by_token(module, x, execution.ids)[0], rtol=0.05, atol=0.05)
    weighed(y).backward()
    assert all(p.grad.dtype == torch.bfloat16 and p.grad.isfinite().all() for p in module.parameters())


def test_frozen_matrices_get_no_gradient_and_a_kept_graph_gives_the_same_twice():
    module, x = layer()
    module.up.requires_grad_(False)
    loss = weighed(module(x))
    first = torch.autograd.grad(loss, [x, module.gate, module.router.weight], retain_graph=True)
    second = torch.autograd.grad(loss, [x, module.gate, module.router.weight])
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    weighed(module(x)).backward()
    assert module.up.grad is None and module.down.grad is not None


@pytest.mark.parametrize("frozen, times", [((), 9), (("up",), 8), (("gate", "down"), 7), (("gate", "up", "down"), 6)])
def test_a_frozen_matrix_costs_no_product(frozen, times):
    module, x = layer()
    for name in frozen:
        getattr(module, name).requires_grad_(False)
    with mock.patch.object(experts, "grouped", wraps=experts.grouped) as product:
        weighed(module(x)).backward()
    assert product.call_count == times


def test_training_starts_at_fan_in():
    torch.manual_seed(0)
    module = Experts(SimpleNamespace(d_model=64, d_expert=16, n_experts=10, experts_per_token=2))
    for stack, fan_in in ((module.gate, 64), (module.up, 64), (module.down, 16)):
        assert stack.std().item() == pytest.approx(fan_in**-0.5, rel=0.05) and abs(stack.mean().item()) < 0.02


@settings(max_examples=25, deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from(list(CASES)), st.integers(0, 5))
def test_order_of_tokens_and_names_of_experts_change_nothing(random, case, seed):
    module, x = layer(case, seed=seed)
    y, flat = module(x), x.flatten(0, 1)
    order = torch.tensor(random.sample(range(len(flat)), len(flat)), dtype=torch.long)
    torch.testing.assert_close(module(flat[order][None])[0], y.flatten(0, 1)[order], rtol=1e-12, atol=1e-13)
    names = torch.tensor(random.sample(range(len(module.gate)), len(module.gate)))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(parameter[names].clone())
    torch.testing.assert_close(module(x), y, rtol=1e-12, atol=1e-13)


# what is recorded, and the interventions


def passes(reuse="none", seed=0, times=3, case="ordinary"):
    """A pass over two modules, the first of them `times` times on changing states: (routes, modules, inputs, outputs)."""
    repeated, x = layer(case, seed=1)
    once, _ = layer(case, seed=2)
    generator = torch.Generator().manual_seed(3)
    states = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for _ in range(times)]
    routes = Routes(reuse, seed)
    modules, inputs = [once, *[repeated] * times], [x, *states]
    return routes, modules, inputs, [m(z, routes) for m, z in zip(modules, inputs, strict=True)]


def test_the_record_names_module_time_scores_experts_and_weights():
    routes, modules, inputs, outputs = passes()
    assert [(e.module, e.time, e.shape) for e in routes.executions] == [
        (n, t, (2, 6)) for n, t in ((0, 0), (1, 0), (1, 1), (1, 2))
    ]
    for e, module, x, y in zip(routes.executions, modules, inputs, outputs, strict=True):
        out, ids, weights = by_token(module, x)
        assert torch.equal(e.ids, ids)
        torch.testing.assert_close(e.weights, weights)
        torch.testing.assert_close(e.scores, module.router(x.flatten(0, 1)).sigmoid())
        assert torch.equal(y, module(x))  # a record changes nothing
        torch.testing.assert_close(y, out)


def test_reuse_of_the_first_experts_is_what_a_loop_makes_of_it():
    routes, modules, inputs, outputs = passes("first")
    plain = passes()[3]
    assert torch.equal(outputs[0], plain[0]) and torch.equal(outputs[1], plain[1])  # the first execution is untouched
    first = by_token(modules[1], inputs[1])[1]
    for e, module, x, y, own in zip(routes.executions[2:], modules[2:], inputs[2:], outputs[2:], plain[2:], strict=True):
        out, ids, weights = by_token(module, x, first)
        assert torch.equal(e.ids.sort(-1).values, first.sort(-1).values) and torch.equal(e.ids, ids)
        assert (e.scores.gather(1, e.ids).diff(dim=-1) <= 0).all()
        torch.testing.assert_close(e.weights, weights)
        torch.testing.assert_close(y, out)
        assert not torch.allclose(y, own)
    assert not torch.equal(routes.executions[1].weights, routes.executions[2].weights)  # its own scores at these experts


def test_every_module_has_first_experts_of_its_own():
    (one, x), (other, y) = layer(seed=1), layer(seed=2)
    routes = Routes("first")
    for module, state in ((one, x), (other, y), (one, -x), (other, -y)):
        module(state, routes)
    for module, state, e in ((one, x, routes.executions[2]), (other, y, routes.executions[3])):
        assert torch.equal(e.ids.sort(-1).values, by_token(module, state)[1].sort(-1).values)


def test_random_experts_are_distinct_uniform_and_drawn_by_seed_and_number_alone():
    routes, modules, inputs, outputs = passes("random")
    assert torch.equal(outputs[0], passes()[3][0]) and torch.equal(outputs[1], passes()[3][1])
    assert torch.equal(torch.stack(passes("random")[3]), torch.stack(outputs))
    torch.manual_seed(5)
    assert torch.equal(torch.stack(passes("random")[3]), torch.stack(outputs))
    drawn = [frozenset(map(tuple, e.ids.sort(-1).values.tolist())) for e in routes.executions]
    assert not torch.equal(passes("random", 1)[0].executions[2].ids, routes.executions[2].ids) and drawn[2] != drawn[3]
    for e, module, x, y in zip(routes.executions[2:], modules[2:], inputs[2:], outputs[2:], strict=True):
        assert all(len(set(row)) == len(row) for row in e.ids.tolist())
        out, ids, weights = by_token(module, x, e.ids)
        assert torch.equal(e.ids, ids) and not torch.equal(e.ids.sort(-1).values, by_token(module, x)[1].sort(-1).values)
        torch.testing.assert_close(e.weights, weights)
        torch.testing.assert_close(y, out)
    module, _ = layer()
    many = Routes("random", 7)
    module(torch.randn(1, 20_000, 8, dtype=torch.float64), many)
    module(torch.ones(1, 20_000, 8, dtype=torch.float64), many)  # equal states
    assert load(many).query("time == 1")["share"].to_numpy() == pytest.approx(np.full(5, 1 / 5), abs=0.01)
    assert overlap(many)["value"].item() == pytest.approx(2 / 5, abs=0.01)


def test_seed_and_number_are_not_interchangeable():
    (a, *_), (b, *_) = passes("random", 2, times=4), passes("random", 3, times=4)
    assert not torch.equal(a.executions[3].ids.sort(-1).values, b.executions[2].ids.sort(-1).values)
    assert not torch.equal(a.executions[4].ids.sort(-1).values, b.executions[3].ids.sort(-1).values)


def test_gradients_pass_through_reused_experts():
    routes, modules, inputs, outputs = passes("first", times=2)
    weighed(outputs[-1]).backward()
    assert all(p.grad.abs().max() > 0 for p in modules[-1].parameters())


def test_wrong_use_is_named():
    with pytest.raises(ValueError, match="reuse is 'last': it must be one of none, first, random"):
        Routes("last")
    module, x = layer()
    routes = Routes("first")
    module(x, routes)
    with pytest.raises(ValueError, match="reuse is 'first' with 6 tokens after 12: "):
        module(x[:1], routes)


# the load-balancing loss


def loss_by_loops(scores, ids):
    """E sum_i f_i P_i."""
    (N, E), k, scores = scores.shape, ids.shape[1], scores.detach()
    total = 0.0
    for i in range(E):
        P = sum(float(s[i]) / float(s.sum()) for s in scores) / N
        total += sum(row.tolist().count(i) for row in ids) / (N * k) * P
    return E * total


def test_balance_is_one_where_load_or_scores_are_uniform():
    ids = torch.tensor([[0, 1], [2, 3], [1, 0], [3, 2]])
    assert balance(torch.full((4, 4), 0.5, dtype=torch.float64), ids).item() == 1.0
    assert balance(torch.full((4, 4), 0.25, dtype=torch.float64), torch.zeros_like(ids)).item() == 1.0  # uniform scores
    assert balance(torch.rand(4, 4, dtype=torch.float64), ids).item() == pytest.approx(1.0, abs=1e-15)  # uniform load
    collapsed = torch.tensor([[1.0, 1.0, 0.0, 0.0]] * 4)
    assert balance(collapsed, torch.tensor([[0, 1]] * 4)).item() == 2.0  # E / k, the most there is


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 9), st.integers(1, 6), st.integers(0, 100), st.data())
def test_balance_is_its_formula(N, E, seed, data):
    k = data.draw(st.integers(1, E))
    scores = torch.rand(N, E, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.01
    for ids in (top(scores, k), top(-scores, k)):
        assert balance(scores, ids).item() == pytest.approx(loss_by_loops(scores, ids), rel=1e-12)


def test_balance_has_the_gradient_of_P_alone():
    module, x = layer()
    routes = Routes()
    module(x, routes)
    e = routes.executions[0]
    (found,) = torch.autograd.grad(routes.balance(), module.router.weight)
    scores = (x.detach().flatten(0, 1) @ module.router.weight.T).sigmoid()
    f = torch.tensor([(e.ids == i).sum() / e.ids.numel() for i in range(5)], dtype=torch.float64)
    P = (scores / scores.sum(-1, keepdim=True)).mean(0)
    (wanted,) = torch.autograd.grad(5 * (f * P).sum(), module.router.weight)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-9)
    assert found.abs().max() > 0


def test_balances_are_one_an_execution_and_their_mean_trains_every_router():
    routes, modules, *_ = passes()
    values = routes.balances()
    wanted = [loss_by_loops(e.scores, e.ids) for e in routes.executions]
    torch.testing.assert_close(values, torch.tensor(wanted, dtype=values.dtype), rtol=1e-6, atol=0)
    assert routes.balance().item() == pytest.approx(np.mean(wanted))
    routes.balance().backward()
    for module in modules:
        assert module.router.weight.grad.abs().max() > 0 and module.gate.grad is None


# measures


def test_load_is_counted_and_its_mean_is_over_the_modules_of_the_loop():
    routes, *_ = passes()
    other, x = layer(seed=9)
    other(x, routes), other(-x, routes)
    frame = load(routes)
    assert list(frame.columns) == ["module", "time", "expert", "share"] and len(frame) == 6 * 5
    for row in frame.itertuples():
        (e,) = (e for e in routes.executions if (e.module, e.time) == (row.module, row.time))
        assert row.share == pytest.approx(sum(i == row.expert for ids in e.ids.tolist() for i in ids) / 24)
    mean = mean_load(routes)
    for row in mean.itertuples():
        own = [r.share for r in frame.itertuples() if r.module != 0 and (r.time, r.expert) == (row.time, row.expert)]
        assert len(own) == (2 if row.time < 2 else 1) and row.share == pytest.approx(np.mean(own))
    assert len(mean) == 15 and mean.groupby("time")["share"].sum().to_numpy() == pytest.approx(np.ones(3))


def test_overlap_counts_the_experts_two_times_share():
    routes, *_ = passes()
    own = [e.ids.tolist() for e in routes.executions if e.module == 1]
    frame = overlap(routes)
    assert list(zip(frame["module"], frame["time"], frame["other"], strict=True)) == [(1, 0, 1), (1, 0, 2), (1, 1, 2)]
    for row in frame.itertuples():
        shared = [len(set(a) & set(b)) / 2 for a, b in zip(own[row.time], own[row.other], strict=True)]
        assert row.value == pytest.approx(np.mean(shared))
    assert 0 < frame["value"].min() < 1
    assert (overlap(passes("first")[0])["value"] == 1).all()


def test_entropy_in_bits_of_the_load_and_of_a_tokens_scores():
    routes, *_ = passes()
    frame = entropy(routes)
    assert list(zip(frame["module"], frame["time"], strict=True)) == [(0, 0), (1, 0), (1, 1), (1, 2)]
    for row, e in zip(frame.itertuples(), routes.executions, strict=True):
        p = [(e.ids.numpy() == i).mean() for i in range(5)]
        assert row.load_bits == pytest.approx(-sum(v * math.log2(v) for v in p if v > 0), rel=1e-5)
        normalised = [s / s.sum() for s in e.scores.detach().numpy()]
        assert row.token_bits == pytest.approx(np.mean([-(s * np.log2(s)).sum() for s in normalised]))
    module, x = layer()
    with torch.no_grad():
        module.router.weight.zero_()
    flat = Routes()
    module(x, flat)
    assert entropy(flat)["token_bits"].item() == pytest.approx(math.log2(5))
    assert entropy(flat)["load_bits"].item() == pytest.approx(1)  # of equal scores always the same two are taken


def test_measures_of_a_pass_without_repetition_are_empty():
    routes, *_ = passes(times=1)
    assert overlap(routes).empty and mean_load(routes).empty and len(load(routes)) == 10 and len(entropy(routes)) == 2


def test_weights_are_scores_over_the_sum_of_the_chosen():
    scores = torch.tensor([[0.2, 0.6, 0.4]], dtype=torch.float64)
    assert top(scores, 2).tolist() == [[1, 2]]
    torch.testing.assert_close(mix(scores, torch.tensor([[1, 2]])), torch.tensor([[0.6, 0.4]], dtype=torch.float64))
