"""Instrumentation finds where a norm acts, on our models, on transformers' looped classes and on ones made up here."""

import pytest
import torch
from torch import nn

from lib import at_hand, foreign, instruments
from lib.boundary import every, never
from lib.instruments import BOUNDARY, LAYER, OUTSIDE, UNUSED
from tests.models import VARIANTS, small, tokens


def found(model, boundary=None, counts=(2, 6), **values):
    frame = instruments.norms(model, counts, lambda m, loops: m(tokens(1), loops=loops, boundary=boundary))
    return frame.set_index("norm")


def test_a_shared_norm_is_at_the_boundary_only_where_the_boundary_fires():
    rows = [found(small(), b).loc["norm"] for b in (never, every(1), every(2))]
    assert [row.calls for row in rows] == [(1, 1), (2, 6), (1, 3)]
    assert [row.acts for row in rows] == [OUTSIDE, BOUNDARY, BOUNDARY]


def test_two_modules_are_told_apart_and_layers_from_both():
    frame = found(small(shared_norm=False, envelope="sandwich"), every(1))
    assert frame.loc["norm"].calls == (1, 1) and frame.loc["boundary_norm"].calls == (1, 5)
    assert frame.loc["boundary_norm"].acts == BOUNDARY
    assert frame.loc["coda.0.attention_norm"].acts == OUTSIDE
    assert frame.loc["core.1.attention_norm"].acts == LAYER and frame.loc["core.1.attention_norm"].within == "core.1"
    assert found(small(shared_norm=False), never).loc["boundary_norm"].acts == UNUSED


def test_the_two_families_differ_as_the_paper_says():
    ouro, huginn = (found(small(envelope=e, **VARIANTS[v])) for e, v in (("full_stack", "Ouro"), ("sandwich", "Huginn")))
    assert ouro.loc["norm"].acts == BOUNDARY and ouro.loc["norm"].calls == (2, 6)
    assert huginn.loc["norm"].acts == OUTSIDE and huginn.loc["norm"].calls == (2, 2)
    assert set(huginn.loc[huginn.index.str.startswith("core")].acts) == {LAYER}
    assert set(huginn.loc[huginn.index.str.startswith("prelude")].acts) == {OUTSIDE}


@pytest.mark.parametrize("name", ["shared states", "split states", "experts", "shared states, experts"])
@pytest.mark.parametrize("meta", [False, True])
def test_states_and_experts_change_nothing_about_where_norms_act(name, meta):
    model = small(envelope="sandwich", **VARIANTS[name])
    if meta:
        frame = at_hand.norms_of("a", "b", model.config).set_index("norm")
        # H/L with l_cycles 1: of 2 steps one, of 5 steps two update the high state, by the first half where they split
        calls, never_fires = {"shared": (2, 5), "split": (1 * 2, 2 * 2), "single": (2, 5)}[model.config.state], OUTSIDE
        assert frame.loc["norm"].calls == (1, 1) and frame.loc["norm"].acts == never_fires
    else:
        frame = found(model, every(1), counts=(2, 5))
        calls = {"shared": (2, 5), "split": (1 * 2, 2 * 2), "single": (2, 5)}[model.config.state]
        assert frame.loc["norm"].calls == (2, 5) and frame.loc["norm"].acts == BOUNDARY
    row = frame.loc["core.0.feed_forward_norm"]
    assert row.calls == calls and row.acts == LAYER and row.within == "core.0"
    assert frame.loc["prelude.0.attention_norm"].acts == frame.loc["coda.0.feed_forward_norm"].acts == OUTSIDE


# class -> (norms at the boundary, how many inside looped layers, how many outside); read off each class's forward
EXPECTED = {
    "ALBERT": (set(), 2, 1),
    "Dory": ({"model.norm"}, 16, 16),
    "Funnel": (set(), 6, 3),
    "HRM-Text": ({"model.L_module.final_norm", "model.H_module.final_norm"}, 8, 0),
    "Inkling 2 Loop": (set(), 21, 12),
    "Perceiver": (set(), 4, 3),
}


@pytest.mark.parametrize("name", foreign.CLASSES)
def test_looped_classes_that_transformers_ships(name):
    frame = instruments.norms(foreign.tiny(name), (2, 5), foreign.run)
    boundary, layers, outside = EXPECTED[name]
    assert set(frame[frame.acts == BOUNDARY].norm) == boundary
    assert (frame.acts == LAYER).sum() == layers and (frame.acts == OUTSIDE).sum() == outside
    assert frame[frame.acts == LAYER].within.notna().all()
    deeper = instruments.norms(foreign.tiny(name), (1, 3, 4), foreign.run)
    inside = [BOUNDARY, LAYER]
    assert set(deeper[deeper.acts.isin(inside)].norm) == set(frame[frame.acts.isin(inside)].norm)


def test_the_loop_setting_is_the_one_of_the_class():
    for name in foreign.CLASSES:
        model = foreign.tiny(name)
        calls = instruments.module_calls(model, (1, 4), foreign.run)
        assert any(b > a for a, b in calls.values()), name
        with pytest.raises(ValueError, match="at least 1"):
            foreign.set_loops(model, 0)
    with pytest.raises(ValueError, match="'looped' is not known: albert"):
        foreign.set_loops(small(), 2)


def test_a_foreign_model_is_built_alike_and_leaves_the_generator_alone():
    before = torch.random.get_rng_state()
    a, b = (foreign.tiny("ALBERT").state_dict() for _ in range(2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(a[k], b[k]) for k in a)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x):
        return x + self.mix(self.norm(x))


class Stack(nn.Module):
    """Layers and a norm behind them, called once a loop step."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.ModuleList([Layer()]), nn.ModuleList([Layer(), Layer()])])
        self.last = nn.LayerNorm(4)

    def forward(self, x):
        for group in self.blocks:
            for layer in group:
                x = layer(x)
        return self.last(x)


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.normed = nn.Embedding(3, 4)  # no norm, whatever it is called
        self.before, self.body, self.final_ln, self.spare = Layer(), Stack(), nn.LayerNorm(4), nn.LayerNorm(4)

    def forward(self, x, r):
        x = self.before(x)
        for _ in range(r):
            x = self.body(x)
        return self.final_ln(x)


def test_a_norm_beside_the_layers_of_a_looped_stack_is_at_the_boundary():
    frame = instruments.norms(Whole(), (1, 5), lambda m, r: m(torch.ones(1, 4), r)).set_index("norm")
    assert frame.acts.to_dict() == {
        "before.norm": OUTSIDE,
        "body.blocks.0.0.norm": LAYER,
        "body.blocks.1.0.norm": LAYER,
        "body.blocks.1.1.norm": LAYER,
        "body.last": BOUNDARY,
        "final_ln": OUTSIDE,
        "spare": UNUSED,
    }
    assert frame.loc["body.blocks.1.0.norm"].within == "body.blocks.1.0"


class PreNorm(nn.Module):
    """A wrapper whose name says norm."""

    def __init__(self):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x, r):
        for _ in range(r):
            x = x + self.inner(self.norm(x))
        return x


def test_a_wrapper_is_no_norm():
    frame = instruments.norms(nn.Sequential(), (1, 2), lambda m, r: None)
    assert frame.empty
    frame = instruments.norms(PreNorm(), (1, 5), lambda m, r: m(torch.ones(1, 4), r))
    assert list(frame.norm) == ["norm"] and frame.acts[0] == BOUNDARY


def test_hooks_are_gone_afterwards_also_when_the_run_raises():
    model = small()
    with pytest.raises(ZeroDivisionError):
        instruments.norms(model, (1, 2), lambda m, loops: 1 / 0)
    found(model, every(1))
    assert not any(m._forward_hooks for m in model.modules())


@pytest.mark.parametrize("counts", [(2,), (5, 2), (2, 2), (0, 2), ()])
def test_loop_counts_must_differ_and_increase(counts):
    with pytest.raises(ValueError, match="increase from at least 1"):
        instruments.norms(small(), counts, lambda m, loops: None)
