"""The arms of the axes paper: its topologies, its published checkpoints, and one axis changed at a time."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lib import released
from lib.axes_arms import ARMS, WITH_EXPERTS, config_of, envelopes, model_of, rate_of, run_of, snapshots
from lib.config import LoopedConfig
from lib.looped import build
from lib.store import key

EVERY = (*ARMS, *WITH_EXPERTS)
TASKS = {
    "hops_width": 5,
    "hops_depth": 2,
    "circuit_width": 3,
    "circuit_depth": 2,
    "modulus": 7,
    "arithmetic_depth": 2,
    "subjects": 8,
    "relations": 2,
    "objects": 6,
    "letters": 3,
    "length": 3,
    "constraints": 2,
}
P = TASKS | {
    "arms": list(ARMS),
    "lr": [1.0e-3 * (i + 1) for i in range(len(ARMS))],
    "arms_moe": list(WITH_EXPERTS),
    "lr_moe": [2.0e-2, 3.0e-2, 4.0e-2],
    "n_experts": 5,
    "experts_per_token": 2,
    "d_expert": 4,
    "balance": 2.0e-3,
    "prelude": 1,
    "recurrent": 2,
    "coda": 1,
    "updates": 5,
    "h_cycles": 1,
    "l_cycles": 4,
    "d_model": 8,
    "n_heads": 2,
    "d_ff": 12,
    "steps": 40,
    "batch_size": 4,
    "optimizer": "adamw",
    "warmup": 3,
    "weight_decay": 0.1,
    "device": "cpu",
}
# the paper's 730M models
PAPER = P | {"prelude": 8, "recurrent": 12, "coda": 8, "updates": 8, "h_cycles": 2, "l_cycles": 3}

# the paper's topologies: layers stored, layers executed, injections, their source, where the state starts, and its kind
TABLE = {
    "full": (28, 112, 0, None, "input", "single"),
    "full_injected": (28, 112, 4, "tokens", "input", "single"),
    "sandwich": (28, 112, 0, None, "input", "single"),
    "sandwich_injected": (28, 112, 8, "prelude", "input", "single"),
    "noise": (28, 112, 8, "prelude", "noise", "single"),
    "shared_hl": (28, 112, 8, "prelude", "noise", "shared"),
    "split_hl": (28, 64, 8, "prelude", "noise", "split"),
    "split_hl_x2": (28, 112, 8, "prelude", "noise", "split"),
    "feedforward": (112, 112, 0, None, "input", "single"),
    "feedforward_injected": (112, 112, 8, "prelude", "input", "single"),
    "feedforward_stored": (28, 28, 0, None, "input", "single"),
}


def config(p, arm) -> LoopedConfig:
    return LoopedConfig(**model_of(p, arm))


@pytest.mark.parametrize("arm", ARMS)
def test_layers_and_injections_are_executed_as_the_papers_table_has_them(arm):
    stored, executed, writes, source, start, state = TABLE[arm]
    model, runs = build(config(PAPER, arm), 0), {"layers": 0, "writes": 0}

    def count(what):
        return lambda *_: runs.update({what: runs[what] + 1})

    layers = [*model.prelude, *model.core, *model.coda]
    for layer in layers:
        layer.register_forward_hook(count("layers"))
    if model.injection is not None:
        model.injection.register_forward_hook(count("writes"))
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3]]))
    assert (len(layers), runs["layers"], runs["writes"]) == (stored, executed, writes)
    c = model.config
    assert (c.stored_layers, c.executed_layers) == (stored, executed)
    assert (c.injection, c.injection_source) == ("diagonal" if writes else "none", source or "prelude")
    assert (c.state_init, c.state, c.boundary, c.readout) == (start, state, 0, "normalised")


def test_states_start_from_noise_of_variance_one_over_the_width_drawn_anew_in_training():
    for arm in EVERY:
        run = run_of(P, arm, 0)
        noisy = arm in ("noise", "shared_hl", "split_hl", "split_hl_x2", "huginn_moe")
        assert (run.config().state_init == "noise") == noisy == run.recipe.fresh_state
        assert run.config().state_std == (8**-0.5 if noisy else 1.0) and run.config().state_noise == "normal"


def test_cycles_and_repeats():
    found = {arm: config(PAPER, arm) for arm in ARMS}
    cycles = {arm: (c.h_cycles, c.l_cycles, c.repeats, c.unrolled) for arm, c in found.items()}
    assert cycles == dict.fromkeys(ARMS, (0, 0, 1, False)) | {
        "shared_hl": (2, 3, 1, False),
        "split_hl": (2, 3, 1, False),
        "split_hl_x2": (2, 3, 2, False),
        "feedforward_injected": (0, 0, 1, True),
    }


# what an arm's configuration and a checkpoint's must have in common
COMMON = (
    *("prelude", "core", "coda", "loops", "unrolled", "block", "injection", "injection_source", "injection_bias", "state"),
    *("h_cycles", "l_cycles", "repeats", "state_init", "boundary", "readout", "readout_order"),
)
ROUTED = ("feed_forward", "n_experts", "experts_per_token", "d_expert")
PUBLISHED = {
    "full": "dense-ouro-336b",
    "full_injected": "dense-ouro-raw-injection-336b",
    "sandwich": "dense-middle-336b",
    "sandwich_injected": "dense-middle-prelude-injection-336b",
    "noise": "dense-huginn-336b",
    "shared_hl": "dense-shared-hl-336b",
    "split_hl": "dense-split-hl-336b",
    "split_hl_x2": "dense-split-hl-x2-336b",
    "feedforward": "dense-d112-336b",
    "feedforward_stored": "dense-d28-336b",
    "feedforward_injected": "moe-ff112-prelude-injection-336b",  # the only one of its topology
    "full_moe": "moe-ouro-500b",
    "huginn_moe": "moe-huginn-500b",
    "feedforward_moe": "moe-ff112-500b",
}


def test_at_the_papers_shapes_every_arm_is_its_published_checkpoint():
    published = {e.id.removeprefix("IFM/LoopedLM-P1-"): e.plan.config for e in released.catalogue() if e.plan}
    assert PUBLISHED.keys() == set(EVERY)
    paper = PAPER | {"d_model": 1536, "n_heads": 24, "n_experts": 25, "experts_per_token": 2, "d_expert": 2432}
    for arm, name in PUBLISHED.items():
        ours, theirs = config(paper, arm), published[name]
        for axis in COMMON + (ROUTED if arm in WITH_EXPERTS else ()):
            assert getattr(ours, axis) == getattr(theirs, axis), (arm, axis)
        assert (ours.stored_layers, ours.executed_layers) == (theirs.stored_layers, theirs.executed_layers)
        if ours.state_init == "noise":
            assert ours.state_std == theirs.state_std == 1536**-0.5


@st.composite
def matching(draw):
    """Shapes that the full stack can match: (recurrent) (updates - 1) is a multiple of the layers stored."""
    P, R, C, m = (draw(st.integers(low, high)) for low, high in ((0, 4), (1, 4), (0, 4), (0, 3)))
    return P, R, C, 1 + m * (P + R + C)


def shaped(P_, R, C, U, **more):
    return P | {"prelude": P_, "recurrent": R, "coda": C, "updates": U} | more


@given(matching())
@settings(max_examples=60, deadline=None)
def test_arms_store_and_execute_equal_layers(shape):
    P_, R, C, U = shape
    stored, executed = P_ + R + C, P_ + U * R + C
    equal = ("full", "full_injected", "sandwich", "sandwich_injected", "noise", *WITH_EXPERTS)
    expected = dict.fromkeys(equal, (stored, executed))
    expected |= dict.fromkeys(("feedforward", "feedforward_injected", "feedforward_moe"), (executed, executed))
    expected["feedforward_stored"] = (stored, stored)
    for arm, layers in expected.items():
        c = config(shaped(*shape), arm)
        assert (c.stored_layers, c.executed_layers) == layers, arm
    full, sandwich = (config(shaped(*shape), arm) for arm in ("full", "sandwich"))
    assert (full.prelude, full.core, full.coda, full.loops) == (0, stored, 0, executed // stored)
    assert (sandwich.prelude, sandwich.core, sandwich.coda, sandwich.loops) == (P_, R, C, U)


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.data())
@settings(max_examples=60, deadline=None)
def test_high_and_low_states_execute_the_same_unless_split_once(half, high, low, data):
    R, U = 2 * half, high * (low + 1)
    outside = R * (U - 2)  # so that the full stack loops twice
    P_ = data.draw(st.integers(0, outside))
    p = shaped(P_, R, outside - P_, U, h_cycles=high, l_cycles=low)
    found = {arm: config(p, arm) for arm in ("sandwich", "shared_hl", "split_hl", "split_hl_x2")}
    assert len({c.stored_layers for c in found.values()}) == 1
    executed = {arm: c.executed_layers for arm, c in found.items()}
    assert executed["shared_hl"] == executed["split_hl_x2"] == executed["sandwich"] == outside + U * R
    assert executed["split_hl"] == outside + U * half
    assert all(c.loops == U for c in found.values())


@given(*(st.integers(low, 6) for low in (0, 1, 0, 1)))
@settings(max_examples=60, deadline=None)
def test_updates_that_the_full_stack_cannot_match_are_refused(P_, R, C, U):
    stored, executed = P_ + R + C, P_ + U * R + C
    if executed % stored == 0:
        envelopes(shaped(P_, R, C, U))
        return
    with pytest.raises(ValueError, match=f"^updates is {U}: the sandwich executes {executed} layers.* the {stored} it stores"):
        envelopes(shaped(P_, R, C, U))


@pytest.mark.parametrize("arm, base", WITH_EXPERTS.items())
def test_an_arm_with_experts_is_its_dense_arm_but_for_the_feed_forward(arm, base):
    ours, dense = run_of(P, arm, 3), run_of(P, base, 3)
    experts = {"feed_forward": "experts", "n_experts": 5, "experts_per_token": 2, "d_expert": 4}
    assert dict(ours.model) == dict(dense.model) | experts and dense.config().feed_forward == "dense"
    recipe = dataclasses.replace(ours.recipe, lr=dense.recipe.lr, balance=0.0)
    assert recipe == dense.recipe and (ours.recipe.balance, dense.recipe.balance) == (2.0e-3, 0.0)
    assert (ours.task, ours.seed, ours.device) == (dense.task, dense.seed, dense.device)


def test_every_arm_has_its_own_rate_and_one_recipe():
    runs = {arm: run_of(P, arm, 7) for arm in EVERY}
    rates = dict(zip(EVERY, P["lr"] + P["lr_moe"], strict=True))
    assert {arm: run.recipe.lr for arm, run in runs.items()} == rates == {arm: rate_of(P, arm) for arm in EVERY}
    assert {run_of(P, arm, 7, lr=0.5).recipe.lr for arm in EVERY} == {0.5}
    for arm, run in runs.items():
        r = run.recipe
        assert (r.steps, r.batch_size, r.optimizer, r.warmup, r.weight_decay) == (40, 4, "adamw", 3, 0.1)
        assert (r.loss, r.backprop, r.loop_sampling, r.snapshots, run.seed) == ("last", 0, "fixed", (10, 20), 7)
        assert run.task == runs["full"].task and run.config().to_dict() == config_of(P, arm).to_dict()
    assert len({key(run.spec()) for run in runs.values()}) == len(EVERY), "no two arms are one run"


def test_models_are_read_after_a_quarter_half_and_all_of_the_steps():
    assert snapshots(1500) == {375: 0.25, 750: 0.5} and snapshots(3) == {1: 0.25, 2: 0.5}
    assert run_of(P | {"steps": 1500}, "noise", 0).recipe.snapshots == (375, 750)


@pytest.mark.parametrize(
    "change, arm, said",
    [
        ({}, "half", "arm is 'half': it must be one of full, full_injected, .*feedforward_moe"),
        ({"updates": 4}, "full", "updates is 4: the sandwich executes 10 layers, which must be a multiple of the 4 it stores"),
        ({"l_cycles": 2}, "shared_hl", r"updates is 5: it must be h_cycles \* \(l_cycles \+ 1\), 3, since h_cycles is 1"),
        ({"recurrent": 1, "updates": 4, "l_cycles": 3}, "split_hl", "recurrent is 1 with arm 'split_hl': it must be even"),
        ({"lr": [1.0e-3]}, "noise", "lr has 1 rates: it must have one for each of full, full_injected"),
        ({"lr_moe": [1.0e-3] * 4}, "full_moe", "lr_moe has 4 rates: it must have one for each of full_moe, huginn_moe, feed"),
        ({"experts_per_token": 6}, "full_moe", "experts_per_token is 6: it must be at most n_experts, 5"),
        ({"d_expert": 0}, "huginn_moe", "d_expert is 0"),
        ({"optimizer": "muon"}, "feedforward_moe", "optimizer is 'muon' with feed_forward 'experts': it must be adamw"),
        ({"d_model": 10}, "sandwich", "d_model is 10 with n_heads 2"),
        ({"modulus": 9}, "full", "modulus must be a prime in 5..97, not 9"),
    ],
)
def test_a_bad_value_is_named(change, arm, said):
    with pytest.raises(ValueError, match=said):
        run_of(P | change, arm, 0)


def test_an_arm_that_needs_cycles_says_so_where_there_are_none():
    without = {name: value for name, value in P.items() if name not in ("h_cycles", "l_cycles")}
    with pytest.raises(ValueError, match="arm is 'shared_hl': it takes h_cycles and l_cycles"):
        run_of(without, "shared_hl", 0)
    assert run_of(without, "noise", 0) == run_of(P, "noise", 0)
