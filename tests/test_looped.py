"""The model: its four verbs against a plain re-implementation, its bitwise promises, and the round trip to disk."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from lib.boundary import Boundary, every, never
from lib.config import AXES, LoopedConfig
from lib.evaluation import sweep
from lib.experts import Routes
from lib.looped import ALIGNMENT, LoopedModel, at_positions, build
from lib.noise import state_noise
from tests import reference
from tests.models import ENVELOPES, EXPERTS, VARIANTS, small, tokens

BOUNDARIES = (never, every(1), every(2), every(3))


@pytest.fixture(autouse=True)
def one_thread():
    """The bitwise promises hold for one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("envelope", ENVELOPES)
@pytest.mark.parametrize("block", AXES["block"])
@pytest.mark.parametrize("boundary", BOUNDARIES, ids=str)
@pytest.mark.parametrize("shared_norm", [True, False])
def test_forward_and_states_equal_the_reference(envelope, block, boundary, shared_norm):
    model = small(envelope=envelope, block=block, shared_norm=shared_norm).double()
    ids = tokens(2, 6)
    states = list(model.trajectory(ids, 5, boundary))
    logits = model(ids, loops=5, boundary=boundary).logits
    assert len(states) == 5
    for row in range(2):
        expected, raw = reference.forward(model, ids[row].numpy(), 5, boundary.period)
        np.testing.assert_allclose(logits[row].detach().numpy(), expected, atol=1e-10)
        for ours, theirs in zip(states, raw, strict=True):
            np.testing.assert_allclose(ours[row].detach().numpy(), theirs, atol=1e-10)


@pytest.mark.parametrize("values", [v for v in VARIANTS.values() if v.get("state_init") != "noise"], ids=str)
@pytest.mark.parametrize("fields", [None, 3])
def test_other_axis_values_equal_the_reference(values, fields):
    model = small(envelope="sandwich", **values).double()
    ids = tokens(2, 6, fields=fields)
    for boundary in (never, every(1)):
        expected, _ = reference.forward(model, ids[0].numpy(), 3, boundary.period)
        np.testing.assert_allclose(model(ids, loops=3, boundary=boundary).logits[0].detach().numpy(), expected, atol=1e-10)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_point_of_the_design_space_equals_the_reference(data):
    axes = {axis: data.draw(st.sampled_from(AXES[axis]), label=axis) for axis in AXES if axis != "readout_order"}
    axes |= {"n_kv_heads": data.draw(st.sampled_from([None, 1, 2, 4])), "head_dim": data.draw(st.sampled_from([None, 2, 6]))}
    axes |= {key: data.draw(st.booleans(), label=key) for key in ("qk_bias", "injection_bias", "shared_norm")}
    axes |= {"repeats": data.draw(st.integers(1, 2), label="repeats")}
    if axes["feed_forward"] == "experts":
        n = data.draw(st.integers(1, 5), label="n_experts")
        axes |= {"n_experts": n, "experts_per_token": data.draw(st.integers(1, n), label="experts_per_token"), "d_expert": 5}
    if axes["state"] == "single":
        axes |= {"unrolled": data.draw(st.booleans(), label="unrolled")}
        loops = 3
    else:
        cycles = data.draw(st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2)]), label="h_cycles, l_cycles")
        axes |= {"h_cycles": cycles[0], "l_cycles": cycles[1]}
        loops = cycles[0] * (cycles[1] + 1)
    envelope = data.draw(st.sampled_from(sorted(ENVELOPES)))
    model = small(envelope=envelope, **{"n_heads": 4, "loops": loops} | axes).double()
    ids, period = tokens(2, 6), data.draw(st.integers(0, 2))
    z0 = (
        torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0)).double()
        if model.config.state_init == "noise"
        else None
    )
    got = model(ids, boundary=Boundary(period), initial_state=z0).logits[1].detach().numpy()
    expected, raw = reference.forward(model, ids[1].numpy(), loops, period, z0=None if z0 is None else z0[1].numpy())
    np.testing.assert_allclose(got, expected, atol=1e-9)
    for ours, theirs in zip(model.trajectory(ids, None, Boundary(period), z0), raw, strict=True):
        np.testing.assert_allclose(ours[1].detach().numpy(), theirs, atol=1e-9)


def test_segments_see_only_themselves():
    model, ids = small(envelope="sandwich").double(), tokens(2, 8)
    segments = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2], [0] * 8])
    got = model(ids, loops=3, segments=segments).logits.detach().numpy()
    for row in range(2):
        expected, _ = reference.forward(model, ids[row].numpy(), 3, 0, segments=segments[row].numpy())
        np.testing.assert_allclose(got[row], expected, atol=1e-10)


def test_a_tied_head_is_the_embedding(tmp_path):
    model = small(tie_word_embeddings=True)
    assert model.lm_head.weight is model.embed_tokens.weight
    assert model.num_parameters() == small().num_parameters() - model.embed_tokens.weight.numel()
    model.save_pretrained(tmp_path)
    back = LoopedModel.from_pretrained(tmp_path).eval()
    assert back.lm_head.weight is back.embed_tokens.weight
    assert torch.equal(back(tokens()).logits, model(tokens()).logits)


# --- H/L states, unrolled cores, experts ------------------------------------------------------------------------------------

HL = {"state": "split", "h_cycles": 2, "l_cycles": 2, "loops": 6, "injection": "diagonal", "repeats": 2}


@torch.no_grad()
def test_split_states_take_turns_each_with_its_own_half():
    model, ids = small(**HL).double(), tokens(2, 6)
    e = high = model.embed(ids)
    z0 = low = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(1)).double()
    context = model.context(ids)

    def update(z, layer):
        x = model.injection(model.norm(z), e) if t and t % 2 == 0 else model.injection(z, e)
        for _ in range(2):
            x = layer(x, context)
        return x

    for t, state in enumerate(model.trajectory(ids, 7, every(2), z0)):
        if t in (2, 5):
            high = update(high + low, model.core[0])
        else:
            low = update(high + low, model.core[1])
        torch.testing.assert_close(state, torch.cat((high, low), dim=-1), atol=1e-12, rtol=0)
    torch.testing.assert_close(model.readout(state), model.lm_head(model.norm(high)), atol=1e-12, rtol=0)


@torch.no_grad()
def test_the_boundary_normalises_the_sum_of_the_states():
    model, ids = small(**HL | {"state": "shared"}).double(), tokens(2, 6)
    e, z = model.embed(ids), torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(1)).double()
    total = model.norm(z[..., :16] + z[..., 16:])
    instead = torch.cat((total, torch.zeros_like(total)), dim=-1)
    for t, part in ((1, slice(16, None)), (2, slice(0, 16))):
        after = model.step(z, e, t, every(1))
        torch.testing.assert_close(after[..., part], model.step(instead, e, t, never)[..., part], atol=1e-12, rtol=0)
        other = slice(0, 16) if t == 1 else slice(16, None)
        assert torch.equal(after[..., other], z[..., other]), "the other state stays as it is"


def test_of_two_states_the_low_one_starts_and_the_high_one_is_read():
    model, ids = small(envelope="sandwich", **HL | {"state_init": "noise"}).double(), tokens(2, 6)
    e, z0 = model.embed(ids), torch.ones(2, 6, 16).double()
    assert torch.equal(model.init_state(e, z0), torch.cat((e, z0 * model.config.state_std), dim=-1))
    with pytest.raises(ValueError, match=r"initial_state is \(2, 6, 32\): it must be \(2, 6, 16\)"):
        model(ids, initial_state=torch.ones(2, 6, 32).double())
    a, b = (list(model.trajectory(ids, 6, initial_state=z))[-1] for z in (z0, 2 * z0))
    assert not torch.equal(a, b)
    assert torch.equal(model.readout(a), model.readout(torch.cat((a[..., :16], b[..., 16:]), dim=-1)))


@pytest.mark.parametrize("values", [{}, {"injection": "diagonal", "boundary": 1}], ids=str)
def test_an_unrolled_core_with_equal_layers_is_the_loop(values):
    looped, model, ids = small(loops=3, **values), small(loops=3, unrolled=True, **values), tokens()
    weights = looped.state_dict()
    for name in model.state_dict():
        if name.startswith("core."):
            _, i, rest = name.split(".", 2)
            weights[name] = looped.state_dict()[f"core.{int(i) % 2}.{rest}"]
    model.load_state_dict(weights)
    assert len(model.core) == 6
    for K in (1, 2, 3):
        assert torch.equal(model(ids, loops=K).logits, looped(ids, loops=K).logits)
    with torch.no_grad():
        model.core[4].attention.o.weight.mul_(2)  # of the third step alone
    assert torch.equal(model(ids, loops=2).logits, looped(ids, loops=2).logits)
    assert not torch.equal(model(ids).logits, looped(ids).logits)


def test_more_loops_than_an_unrolled_core_has_are_refused():
    model, ids, at = small(loops=3, unrolled=True), tokens(), torch.tensor([2])
    calls = (
        lambda: model(ids, loops=4),
        lambda: next(model.trajectory(ids, 4)),
        lambda: next(sweep(model, ids, at, 4)),
        lambda: model.generate(ids, loops=4, max_new_tokens=1, pad_token_id=0),
        lambda: model.step(model.embed(ids), model.embed(ids), 3, never),
    )
    for call in calls:
        with pytest.raises(ValueError, match="loops is 4: it must be at most 3, the steps an unrolled core has layers for"):
            call()


def test_experts_start_at_the_spread_of_their_fan_in_and_depend_on_the_seed():
    values = EXPERTS | {"n_experts": 8, "d_expert": 48, "d_model": 64}
    one, again, other = (build(LoopedConfig(**values), seed).core[0].feed_forward for seed in (0, 0, 1))
    assert torch.equal(one.down, again.down) and not torch.equal(one.down, other.down)
    for stack, fan_in in ((one.gate, 64), (one.up, 64), (one.down, 48), (one.router.weight, 64)):
        assert stack.std().item() == pytest.approx(fan_in**-0.5, rel=0.05)


def test_a_tokens_experts_are_its_own_alone_in_a_batch_and_behind_padding():
    model, ids, pad = (
        small(envelope="sandwich", **VARIANTS["experts"]).double(),
        tokens(3, 6),
        torch.zeros(3, 2, dtype=torch.long),
    )
    together, alone, padded = Routes(), Routes(), Routes()
    model(ids, routes=together)
    model(ids[1:2], routes=alone)
    mask = torch.cat([pad, torch.ones_like(ids)], dim=1)
    model(torch.cat([pad, ids], dim=1), attention_mask=mask, routes=padded)
    assert len(together.executions) == model.config.executed_layers
    for a, b, c in zip(together.executions, alone.executions, padded.executions, strict=True):
        own, shifted = a.ids.view(3, 6, 2), c.ids.view(3, 8, 2)[:, 2:]
        assert torch.equal(own[1], b.ids) and torch.equal(own, shifted)
        torch.testing.assert_close(a.weights.view(3, 6, 2), c.weights.view(3, 8, 2)[:, 2:], atol=1e-12, rtol=0)
    assert len({tuple(row.tolist()) for e in together.executions for row in e.ids}) > 5, "tokens go to different experts"


# --- the bitwise promises -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("envelope", ENVELOPES)
@pytest.mark.parametrize("state_init", AXES["state_init"])
@pytest.mark.parametrize("readout", AXES["readout"])
def test_at_one_loop_every_boundary_is_bitwise_the_same(envelope, state_init, readout):
    model, ids = small(envelope=envelope, state_init=state_init, readout=readout), tokens()
    first, *rest = (model(ids, loops=1, boundary=b).logits for b in BOUNDARIES)
    assert all(torch.equal(first, other) for other in rest)
    two = [model(ids, loops=2, boundary=b).logits for b in (never, every(1))]
    # a state of zeros stays zero while nothing is injected
    assert torch.equal(*two) == (state_init == "zeros"), "the boundaries must differ from two loops on"


@pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS)
def test_every_axis_value_keeps_the_bitwise_promises(values):
    model, ids, at = small(envelope="sandwich", **values), tokens(4, 9), torch.tensor([2, 8])
    first, *rest = (model(ids, loops=1, boundary=b).logits for b in BOUNDARIES)
    assert all(torch.equal(first, other) for other in rest)
    for K, logits, _ in sweep(model, ids, at, 5, every(1)):
        assert torch.equal(logits, model(ids, loops=K, boundary=every(1), answer_positions=at).logits), K


@pytest.mark.parametrize("envelope", ENVELOPES)
@pytest.mark.parametrize("boundary", BOUNDARIES, ids=str)
@pytest.mark.parametrize("state_init", AXES["state_init"])
@pytest.mark.parametrize("shared", [True, False])
def test_a_sweep_reads_bitwise_what_forward_reads(envelope, boundary, state_init, shared):
    model, ids = small(envelope=envelope, state_init=state_init), tokens(4, 9, fields=2)
    positions = torch.tensor([2, 5]) if shared else torch.tensor([[1, 8], [0, 3], [7, 2], [5, 5]])
    seen = []
    for K, logits, states in sweep(model, ids, positions, 9, boundary, state_seed=5):
        alone = model(ids, loops=K, boundary=boundary, answer_positions=positions, state_seed=5).logits
        assert torch.equal(logits, alone), K
        *_, z = model.trajectory(ids, K, boundary, state_seed=5)
        assert torch.equal(states, at_positions(z, positions)), K
        seen.append(K)
    assert seen == list(range(1, 10))


def test_initial_state_is_taken_as_given():
    model, ids = small(state_init="noise"), tokens()
    z0 = torch.randn(3, 7, 16, generator=torch.Generator().manual_seed(1))
    a, b = (model(ids, loops=3, initial_state=z).logits for z in (z0, z0.clone()))
    assert torch.equal(a, b)
    assert not torch.equal(a, model(ids, loops=3, initial_state=2 * z0).logits)
    for K, logits, _ in sweep(model, ids, torch.tensor([6]), 3, never, initial_state=z0):
        assert torch.equal(logits, model(ids, loops=K, initial_state=z0, answer_positions=torch.tensor([6])).logits)


@pytest.mark.parametrize(
    "values",
    [{}, {"shared_norm": False, "block": "sandwich", "boundary": 2, "state_init": "noise"}]
    + [v for v in VARIANTS.values() if v.keys() & {"state", "unrolled", "feed_forward"}],
    ids=str,
)
def test_the_round_trip_to_disk_is_bitwise(tmp_path, values):
    model = small(envelope="sandwich", **values)
    model.save_pretrained(tmp_path)
    for back in (LoopedModel.from_pretrained(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path)):
        assert type(back) is LoopedModel
        assert not any(p.data_ptr() % ALIGNMENT for p in back.parameters()), "else some processors' sums differ"
        weights, loaded = model.state_dict(), back.state_dict()
        assert weights.keys() == loaded.keys() and all(torch.equal(weights[k], loaded[k]) for k in weights)
        assert torch.equal(model(tokens()).logits, back.eval()(tokens()).logits)
    ours = {k: getattr(model.config, k) for k in LoopedConfig.__annotations__}
    assert ours == {k: getattr(AutoConfig.from_pretrained(tmp_path), k) for k in LoopedConfig.__annotations__}
    assert not list(tmp_path.glob("*.bin")), "only safetensors"


def test_build_depends_on_config_and_seed_alone():
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    a, b, c = (build(LoopedConfig(), seed) for seed in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(a.lm_head.weight, b.lm_head.weight) and not torch.equal(a.lm_head.weight, c.lm_head.weight)


# --- noise, padding, defaults -------------------------------------------------------------------------------------------


@given(st.integers(0, 2**31), st.integers(1, 40), st.integers(1, 9))
@settings(max_examples=25, deadline=None)
def test_noise_depends_on_seed_and_position_alone(seed, length, start):
    positions = torch.arange(length)[None]
    whole = state_noise(positions, 6, seed=seed)
    assert torch.equal(whole, state_noise(positions.expand(3, -1), 6, seed=seed)[2:]), "another batch row"
    tail = state_noise(positions[:, start:], 6, seed=seed) if start < length else whole[:, :0]
    assert torch.equal(whole[:, start:], tail if start < length else whole[:, start:]), "another length"
    assert not torch.equal(whole, state_noise(positions, 6, seed=seed + 1))


@pytest.mark.parametrize("kind, sd", [("normal", 1), ("truncated", 0.98658), ("hash", 1)])
def test_noise_has_its_distribution(kind, sd):
    sample = state_noise(torch.arange(4000)[None], 16, kind, seed=None if kind == "hash" else 7)
    assert abs(sample.mean()) < 0.02 and abs(sample.std() - sd) < 0.02
    assert (sample.abs().max() <= 3) == (kind == "truncated")


def test_the_hashed_state_takes_rows_and_a_seed_makes_it_a_draw():
    positions = torch.arange(5)[None]
    by_row = state_noise(positions, 8, "hash", rows=torch.tensor([0, 1]))
    assert torch.equal(by_row[:1], state_noise(positions, 8, "hash")) and not torch.equal(by_row[0], by_row[1])
    assert torch.equal(state_noise(positions, 8, "hash", seed=3), state_noise(positions, 8, "normal", seed=3))
    model, ids = small(state_init="noise", state_noise="hash"), tokens(2, 5)
    rows = model(ids, state_rows=torch.tensor([0, 1])).logits
    assert torch.equal(rows[0], model(ids).logits[0]) and not torch.equal(rows[1], model(ids).logits[1])
    assert not torch.equal(model(ids).logits, model(ids, state_seed=0).logits)


@pytest.mark.parametrize("state_init", AXES["state_init"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing_at_real_tokens(state_init, side):
    model, ids = small(envelope="sandwich", state_init=state_init).double(), tokens(1, 6)
    pad = torch.zeros(1, 3, dtype=torch.long)
    padded = torch.cat([pad, ids] if side == "left" else [ids, pad], dim=1)
    mask = torch.cat([pad, torch.ones_like(ids)] if side == "left" else [torch.ones_like(ids), pad], dim=1)
    both = torch.cat([padded, tokens(1, 9, seed=4)]), torch.cat([mask, torch.ones(1, 9, dtype=torch.long)])
    alone = model(ids, loops=4, boundary=every(1)).logits[0]
    together = model(both[0], attention_mask=both[1], loops=4, boundary=every(1)).logits[0]
    torch.testing.assert_close(together[3:] if side == "left" else together[:6], alone, atol=1e-10, rtol=0)


def test_defaults_are_the_trained_loop_count_and_boundary():
    model, ids = small(loops=3, boundary=2), tokens()
    assert torch.equal(model(ids).logits, model(ids, loops=3, boundary=every(2)).logits)
    assert not torch.equal(model(ids).logits, model(ids, loops=3, boundary=never).logits)


def test_loss_is_next_token_or_aligned_at_answer_positions():
    model, ids = small(), tokens()
    logits = model(ids).logits
    plain = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(model(ids, labels=ids).loss, plain)
    positions, labels = torch.tensor([2, 4]), torch.tensor([[1, -100], [2, 3], [-100, 5]])
    aligned = torch.nn.functional.cross_entropy(logits[:, positions].flatten(0, 1), labels.flatten())
    torch.testing.assert_close(model(ids, labels=labels, answer_positions=positions).loss, aligned)


# --- impossible requests ------------------------------------------------------------------------------------------------


SHARED = {"state": "shared", "h_cycles": 2, "l_cycles": 3, "loops": 8}


@pytest.mark.parametrize(
    "values, said",
    [
        ({"loops": 0}, "loops is 0"),
        ({"core": 0}, "core is 0"),
        ({"d_model": 30, "n_heads": 4}, "d_model is 30"),
        ({"boundary": -1}, "boundary is -1"),
        ({"block": "post_norm"}, "pre_norm, sandwich"),
        ({"injection": "gated"}, "none, concat, diagonal"),
        ({"state": "shared_hl"}, "state is 'shared_hl'"),
        ({"n_heads": 4, "n_kv_heads": 3}, "n_kv_heads is 3"),
        ({"head_dim": 5}, "head_dim is 5"),
        ({"exit_threshold": 0.0}, "exit_threshold"),
        ({"readout_order": "norm_coda_norm"}, "coda"),
        ({"norm_eps": 0.0}, "norm_eps"),
        ({"feed_forward": "mixture"}, "feed_forward is 'mixture': it must be one of dense, experts"),
        ({"n_experts": 4}, "n_experts is 4 with feed_forward 'dense': it must be 0"),
        ({"experts_per_token": 2}, "experts_per_token is 2 with feed_forward 'dense': it must be 0"),
        ({"d_expert": 8}, "d_expert is 8 with feed_forward 'dense': it must be 0"),
        (EXPERTS | {"n_experts": 0}, "n_experts is 0 with feed_forward 'experts': it must be at least 1"),
        (EXPERTS | {"experts_per_token": 0}, "experts_per_token is 0 with feed_forward 'experts': it must be at least 1"),
        (EXPERTS | {"d_expert": 0}, "d_expert is 0 with feed_forward 'experts': it must be at least 1"),
        (EXPERTS | {"n_experts": 4, "experts_per_token": 5}, "experts_per_token is 5: it must be at most n_experts, 4"),
        ({"h_cycles": 2}, "h_cycles is 2 with state 'single': it must be 0"),
        ({"l_cycles": 2}, "l_cycles is 2 with state 'single': it must be 0"),
        (SHARED | {"h_cycles": 0}, "h_cycles is 0 with state 'shared': it must be at least 1"),
        (SHARED | {"l_cycles": 0}, "l_cycles is 0 with state 'shared': it must be at least 1"),
        (SHARED | {"loops": 6}, r"loops is 6: it must be h_cycles \* \(l_cycles \+ 1\), 8, since h_cycles is 2 and l_cycles 3"),
        (SHARED | {"state": "split", "core": 3}, "core is 3 with state 'split': it must be even"),
        (SHARED | {"exit_gate": True}, "exit_gate is true with state 'shared': it must be false"),
        (SHARED | {"unrolled": True}, "unrolled is true with state 'shared': it must be false"),
        ({"repeats": 0}, "repeats is 0: it must be at least 1"),
    ],
)
def test_an_impossible_configuration_is_one_sentence(values, said):
    with pytest.raises(ValueError, match=said) as caught:
        LoopedConfig(**values)
    assert "\n" not in str(caught.value)


def test_loops_below_one_and_bad_boundaries_are_refused():
    with pytest.raises(ValueError, match="loops is 0"):
        small()(tokens(), loops=0)
    for bad in (0, -1, 1.5):
        with pytest.raises(ValueError, match="1 or more"):
            every(bad)
    with pytest.raises(ValueError, match="period"):
        Boundary(-2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        never.period = 1
