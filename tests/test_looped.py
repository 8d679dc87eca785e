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
from lib.looped import LoopedModel, at_positions, build, state_noise
from tests.models import ENVELOPES, small, tokens

BOUNDARIES = (never, every(1), every(2), every(3))


@pytest.fixture(autouse=True)
def one_thread():
    """The bitwise promises hold for one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- an independent reference: numpy in float64, written from the papers' equations ---------------------------------------


def rms(x, gain, eps=1e-6):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * gain


def reference_block(x, w, prefix, n_heads, theta, sandwich):
    T, D = x.shape
    E = D // n_heads
    y = rms(x, w[f"{prefix}.attention_norm.weight"])
    q, k, v = np.split(y @ w[f"{prefix}.attention.qkv.weight"].T, 3, axis=1)
    angle = np.arange(T)[:, None] * theta ** (-2 * np.arange(E // 2) / E)
    out = np.zeros((T, D))
    for h in range(n_heads):
        part = slice(h * E, (h + 1) * E)

        def turn(u):
            a, b = u[:, : E // 2], u[:, E // 2 :]
            return np.concatenate([a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)], 1)

        scores = turn(q[:, part]) @ turn(k[:, part]).T / np.sqrt(E)
        scores[np.triu_indices(T, 1)] = -np.inf
        p = np.exp(scores - scores.max(1, keepdims=True))
        out[:, part] = p / p.sum(1, keepdims=True) @ v[:, part]
    branch = out @ w[f"{prefix}.attention.o.weight"].T
    x = x + (rms(branch, w[f"{prefix}.attention_branch_norm.weight"]) if sandwich else branch)
    y = rms(x, w[f"{prefix}.feed_forward_norm.weight"])
    gate, up = np.split(y @ w[f"{prefix}.feed_forward.gate_up.weight"].T, 2, axis=1)
    hidden = gate / (1 + np.exp(-gate)) * up
    branch = hidden @ w[f"{prefix}.feed_forward.down.weight"].T
    return x + (rms(branch, w[f"{prefix}.feed_forward_branch_norm.weight"]) if sandwich else branch)


def reference(model, ids, loops, period, z0=None):
    """Logits and raw states of one row, from the definitions alone."""
    c = model.config
    w = {k: v.double().numpy() for k, v in model.state_dict().items()}

    def stack(x, part, n):
        for i in range(n):
            x = reference_block(x, w, f"{part}.{i}", c.n_heads, c.rope_theta, c.block == "sandwich")
        return x

    e = w["embed_tokens.weight"][ids]
    e = stack(e.sum(1) if ids.ndim == 2 else e, "prelude", c.prelude)
    z = {"input": e, "zeros": np.zeros_like(e)}.get(c.state_init) if z0 is None else z0
    between = w["norm.weight"] if c.shared_norm else w["boundary_norm.weight"]
    states = []
    for t in range(loops):
        if t and period and t % period == 0:
            z = rms(z, between)
        z = stack(z, "core", c.core)
        states.append(z)
    normed = c.readout == "normalised"
    if normed and c.readout_order == "norm_coda_norm":
        z = rms(z, w["norm.weight"])
    z = stack(z, "coda", c.coda)
    return (rms(z, w["norm.weight"]) if normed else z) @ w["lm_head.weight"].T, states


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
        expected, raw = reference(model, ids[row].numpy(), 5, boundary.period)
        np.testing.assert_allclose(logits[row].detach().numpy(), expected, atol=1e-10)
        for ours, theirs in zip(states, raw, strict=True):
            np.testing.assert_allclose(ours[row].detach().numpy(), theirs, atol=1e-10)


@pytest.mark.parametrize("values", [{"readout": "raw"}, {"readout_order": "norm_coda_norm"}, {"state_init": "zeros"}], ids=str)
@pytest.mark.parametrize("fields", [None, 3])
def test_other_axis_values_equal_the_reference(values, fields):
    model = small(envelope="sandwich", **values).double()
    ids = tokens(2, 6, fields=fields)
    expected, _ = reference(model, ids[0].numpy(), 3, 1)
    np.testing.assert_allclose(model(ids, loops=3, boundary=every(1)).logits[0].detach().numpy(), expected, atol=1e-10)


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
    "values", [{}, {"shared_norm": False, "block": "sandwich", "boundary": 2, "state_init": "noise"}], ids=str
)
def test_the_round_trip_to_disk_is_bitwise(tmp_path, values):
    model = small(envelope="sandwich", **values)
    model.save_pretrained(tmp_path)
    for back in (LoopedModel.from_pretrained(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path)):
        assert type(back) is LoopedModel
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
    whole = state_noise(positions, 6, seed)
    assert torch.equal(whole, state_noise(positions.expand(3, -1), 6, seed)[2:]), "another batch row"
    tail = state_noise(positions[:, start:], 6, seed) if start < length else whole[:, :0]
    assert torch.equal(whole[:, start:], tail if start < length else whole[:, start:]), "another length"
    assert not torch.equal(whole, state_noise(positions, 6, seed + 1))


def test_noise_is_standard_normal():
    sample = state_noise(torch.arange(4000)[None], 16, seed=7)
    assert abs(sample.mean()) < 0.02 and abs(sample.std() - 1) < 0.02


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


@pytest.mark.parametrize(
    "values, said",
    [
        ({"loops": 0}, "loops is 0"),
        ({"core": 0}, "core is 0"),
        ({"d_model": 30, "n_heads": 4}, "d_model is 30"),
        ({"boundary": -1}, "boundary is -1"),
        ({"block": "post_norm"}, "pre_norm, sandwich"),
        ({"injection": "concat"}, "injection is 'concat'"),
        ({"readout_order": "norm_coda_norm"}, "coda"),
        ({"norm_eps": 0.0}, "norm_eps"),
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
