"""Instrumentation finds where a norm acts, on our models and on one it has never seen."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lib.boundary import Boundary, every, never, norm_calls, placement
from tests.models import small, tokens


def calls(model, boundary):
    return norm_calls(model, (2, 6), lambda m, loops: m(tokens(1), loops=loops, boundary=boundary))


@given(st.integers(0, 5), st.integers(0, 40))
def test_a_boundary_fires_before_steps_that_follow_each_kth(period, t):
    assert Boundary(period).fires_before(t) == (period > 0 and t in range(period, 41, period))


def test_shared_norm_is_inside_the_loop_only_where_the_boundary_fires():
    found = {str(b): calls(small(), b)["norm"] for b in (never, every(1), every(2))}
    assert found == {"never": (1, 1), "every step": (2, 6), "every 2 steps": (1, 3)}
    assert [placement(c) for c in found.values()] == ["readout path", "inside the loop", "inside the loop"]


def test_two_modules_are_told_apart():
    found = calls(small(shared_norm=False, envelope="sandwich"), every(1))
    assert found["norm"] == (1, 1) and found["boundary_norm"] == (1, 5)
    assert placement(found["coda.0.attention_norm"]) == "readout path"
    assert placement(found["core.0.attention_norm"]) == "inside the loop"
    assert placement(calls(small(shared_norm=False), never)["boundary_norm"]) == "unused"


def test_hooks_are_gone_afterwards_also_when_the_run_raises():
    model = small()
    try:
        norm_calls(model, (1,), lambda m, loops: 1 / 0)
    except ZeroDivisionError:
        pass
    calls(model, every(1))
    assert not any(m._forward_hooks for m in model.modules())


def test_a_foreign_model_is_instrumented():
    class Foreign(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.inner, self.final_ln = nn.Linear(4, 4), nn.LayerNorm(4), nn.LayerNorm(4)

        def forward(self, x, r):
            for _ in range(r):
                x = self.inner(self.layer(x))
            return self.final_ln(x)

    found = norm_calls(Foreign(), (1, 5), lambda m, r: m(torch.ones(1, 4), r))
    assert found == {"inner": (1, 5), "final_ln": (1, 1)}
