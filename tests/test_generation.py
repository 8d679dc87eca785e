"""Generation: with and without a cache, alone and in padded batches, through transformers' own `generate`."""

import logging

import pytest
import torch
from transformers import GenerationConfig

from lib import exits
from lib.boundary import every, never
from lib.cache import LoopedCache, slot
from lib.config import LoopedConfig
from lib.layers import Attention
from lib.looped import LoopedModel
from tests.models import CASES, ENVELOPES, VARIANTS, small, tokens

PAD = 0


def batch(rows, side):
    """Rows of ids padded on one side, and their mask."""
    T = max(map(len, rows))
    ids, mask = torch.full((len(rows), T), PAD), torch.zeros(len(rows), T, dtype=torch.long)
    for i, row in enumerate(rows):
        at = slice(T - len(row), T) if side == "left" else slice(0, len(row))
        ids[i, at], mask[i, at] = row, 1
    return ids, mask


def rows():
    return [tokens(1, n, seed=n)[0] for n in (3, 9, 6)]


@pytest.mark.parametrize("envelope, values", CASES.values(), ids=CASES)
@pytest.mark.parametrize("boundary", [never, every(1), every(2)], ids=str)
def test_a_cache_changes_nothing(envelope, values, boundary):
    model, ids = small(envelope=envelope, **values).double(), tokens(2, 8)
    whole = model(ids, loops=4, boundary=boundary).logits
    cache, parts = LoopedCache(), []
    for at in (slice(0, 3), slice(3, 4), slice(4, 8)):  # a prompt, one token, several tokens
        out = model(ids[:, at], loops=4, boundary=boundary, cache=cache)
        parts.append(out.logits)
        assert out.cache is cache
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-10, rtol=0)
    P, _, Q = ENVELOPES[envelope]
    assert len(cache) == P + Q + 4 * model.config.step_layers and {k.shape[2] for k, *_ in cache} == {8}


@pytest.mark.parametrize("envelope, values", CASES.values(), ids=CASES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_and_a_cache_change_nothing_at_real_tokens(envelope, values, side):
    model = small(envelope=envelope, **values).double()
    ids, mask = batch(rows(), side)
    more, cache = tokens(3, 2, seed=5), LoopedCache()
    first = model(ids, attention_mask=mask, loops=3, boundary=every(1), cache=cache).logits
    mask = torch.cat([mask, torch.ones(3, 2, dtype=torch.long)], dim=1)
    then = model(more, attention_mask=mask, loops=3, boundary=every(1), cache=cache).logits
    for i, row in enumerate(rows()):
        alone = model(torch.cat([row, more[i]])[None], loops=3, boundary=every(1)).logits[0]
        at = slice(-len(row), None) if side == "left" else slice(0, len(row))
        torch.testing.assert_close(torch.cat([first[i, at], then[i]]), alone, atol=1e-10, rtol=0)


@pytest.mark.parametrize("envelope, values", CASES.values(), ids=CASES)
def test_generate_gives_the_same_tokens_cached_padded_and_by_hand(envelope, values):
    model, prompts = small(envelope=envelope, **values), rows()
    by_hand = []
    for row in prompts:
        for _ in range(5):
            row = torch.cat([row, model(row[None], loops=3).logits[0, -1].argmax()[None]])
        by_hand.append(row[-5:])
    how = {"max_new_tokens": 5, "do_sample": False, "loops": 3, "eos_token_id": None, "pad_token_id": PAD}
    ids, mask = batch(prompts, "left")
    for use_cache in (True, False):
        for row, expected in zip(prompts, by_hand, strict=True):
            assert torch.equal(model.generate(row[None], use_cache=use_cache, **how)[0, -5:], expected)
        together = model.generate(ids, attention_mask=mask, use_cache=use_cache, **how)
        assert torch.equal(together[:, -5:], torch.stack(by_hand))


@pytest.mark.parametrize("name", ["shared states", "split states", "unrolled, injected", "shared states, experts"])
def test_a_cache_has_one_slot_for_every_layer_that_is_executed(name):
    model, ids, cache, seen = small(envelope="sandwich", **VARIANTS[name]), tokens(2, 6), LoopedCache(), []
    hooks = [m.register_forward_hook(lambda *_: seen.append(1)) for m in model.modules() if isinstance(m, Attention)]
    model(ids, cache=cache)
    assert len(cache) == len(seen) == model.config.executed_layers
    assert all(layer.is_initialized and layer.keys.shape[2] == 6 for layer in cache.layers)
    assert len({layer.keys.data_ptr() for layer in cache.layers}) == len(seen)
    assert len(hooks) == model.config.stored_layers


@pytest.mark.parametrize("name", ["split states", "unrolled", "experts"])
def test_a_model_that_was_saved_generates_without_a_word(name, tmp_path):
    said, handler = [], logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        small(envelope="sandwich", **VARIANTS[name]).save_pretrained(tmp_path)
        model = LoopedModel.from_pretrained(tmp_path).eval()
        model.generate(tokens(2, 6), max_new_tokens=3, do_sample=False, eos_token_id=None, pad_token_id=PAD)
    finally:
        logger.removeHandler(handler)
    assert not said


def test_generate_passes_interventions_on():
    model, ids = small(loops=3, boundary=1), tokens(2, 6)
    how = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": PAD}

    def by_hand(**values):
        row = ids
        for _ in range(6):
            row = torch.cat([row, model(row, **values).logits[:, -1:].argmax(-1)], dim=1)
        return row

    found = [model.generate(ids, **values, **how) for values in ({}, {"loops": 9}, {"boundary": never, "loops": 9})]
    for got, values in zip(found, ({}, {"loops": 9}, {"boundary": never, "loops": 9}), strict=True):
        assert torch.equal(got, by_hand(**values))
    assert not torch.equal(found[0], found[1]) and not torch.equal(found[1], found[2])


def test_a_filled_cache_refuses_another_loop_count_and_another_boundary():
    model, ids, cache = small(), tokens(2, 6), LoopedCache()
    model(ids, loops=3, cache=cache)
    for other in ({"loops": 4}, {"loops": 3, "boundary": every(1)}):
        with pytest.raises(ValueError, match="filled with 3 loops and the boundary norm never"):
            model(ids[:, :1], cache=cache, **other)
    assert model(ids[:, :1], loops=3, cache=cache).logits.shape == (2, 1, 23)


def test_padding_is_inferred_and_a_wrong_mask_or_cache_is_refused():
    model, prompts = small(), [row.clamp(min=1) for row in rows()]
    how = {"max_new_tokens": 4, "do_sample": False, "loops": 3, "eos_token_id": None, "pad_token_id": PAD}
    left, mask = batch(prompts, "left")
    expected = model.generate(left, attention_mask=mask, **how)[:, -4:]
    right, right_mask = batch(prompts, "right")
    for ids in (left, right):
        assert torch.equal(model.generate(ids, **how)[:, -4:], expected)
    settings = GenerationConfig(use_cache=False, **{k: v for k, v in how.items() if k != "loops"})
    assert torch.equal(model.generate(right, attention_mask=right_mask, generation_config=settings, loops=3)[:, -4:], expected)
    with pytest.raises(ValueError, match="attention_mask is .*as input_ids"):
        model.generate(right, attention_mask=right_mask[:, :-1], **how)
    with pytest.raises(ValueError, match="padded on the right and a cache is given"):
        model.generate(right, attention_mask=right_mask, cache=LoopedCache(), **how)
    with pytest.raises(ValueError, match="cache_implementation is 'static'"):
        model.generate(left, attention_mask=mask, cache_implementation="static", **how)


def test_a_cache_goes_on_where_it_was_left():
    model, ids, cache = small(envelope="sandwich"), tokens(2, 6), LoopedCache()
    how = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "pad_token_id": PAD}
    first = model.generate(ids, cache=cache, attention_mask=torch.ones_like(ids), **how)
    second = model.generate(first, cache=cache, attention_mask=torch.ones_like(first), **how)
    assert torch.equal(second, model.generate(ids, attention_mask=torch.ones_like(ids), **how | {"max_new_tokens": 6}))


def test_loops_and_boundary_of_another_kind_are_refused():
    for values, said in (
        ({"loops": 2.5}, "loops is 2.5"),
        ({"loops": True}, "loops is True"),
        ({"boundary": 1}, "boundary is 1"),
    ):
        with pytest.raises(ValueError, match=said):
            small()(tokens(), **values)


def test_beams_and_several_sequences_use_the_cache_rightly():
    model, ids = small(envelope="sandwich"), tokens(2, 6)
    how = {"max_new_tokens": 4, "num_beams": 3, "num_return_sequences": 2, "eos_token_id": None, "pad_token_id": PAD}
    cached, plain = (model.generate(ids, use_cache=use, do_sample=False, **how) for use in (True, False))
    assert torch.equal(cached, plain)


def test_slots_do_not_collide_and_are_ouros_without_prelude_and_coda():
    config = LoopedConfig(prelude=2, core=3, coda=2)
    parts = [("prelude", 2, 1), ("coda", 2, 1), ("core", 3, 5)]
    split = LoopedConfig(prelude=1, core=4, coda=2, loops=4, state="split", h_cycles=2, l_cycles=1, repeats=3)
    assert [slot(split, "core", i, t) for t in range(4) for i in range(6)] == list(range(3, 27))
    every_slot = [slot(config, part, i, t) for part, n, loops in parts for t in range(loops) for i in range(n)]
    assert sorted(every_slot) == list(range(2 + 2 + 3 * 5))
    assert slot(LoopedConfig(core=3), "core", 2, 4) == 4 * 3 + 2


def test_logits_of_the_last_tokens_alone():
    model, ids = small(envelope="sandwich").double(), tokens()
    torch.testing.assert_close(model(ids, logits_to_keep=2).logits, model(ids).logits[:, -2:], atol=1e-12, rtol=0)
    assert model(ids, logits_to_keep=99).logits.shape == model(ids).logits.shape


def test_shapes_that_do_not_fit_are_refused_in_a_sentence():
    model, ids = small(), tokens(2, 6)
    cases = [{"attention_mask": torch.ones(2, 5)}, {"segments": torch.ones(2, 7)}, {"initial_state": torch.zeros(2, 5, 16)}]
    for values in cases:
        with pytest.raises(ValueError, match=f"{next(iter(values))} is .*it must be"):
            model(ids, **values)


# --- the exit gate --------------------------------------------------------------------------------------------------------


def exit_model():
    model = small(block="sandwich", boundary=1, exit_gate=True)
    with torch.no_grad():
        model.exit_gate.bias.sub_(1)
    return model


def test_the_exit_distribution_is_that_of_leaving_step_by_step():
    gates = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0)).double()
    p, leave = exits.distribution(gates), gates.sigmoid()
    for k in range(5):
        stayed = torch.stack([1 - leave[..., s] for s in range(k)] or [torch.ones(2, 3)]).prod(0)
        torch.testing.assert_close(p[..., k], stayed * (leave[..., k] if k < 4 else 1), check_dtype=False)
    torch.testing.assert_close(p.sum(-1), torch.ones(2, 3), check_dtype=False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_threshold_of_one_is_the_last_step_in_every_dtype(dtype):
    gates = torch.full((1, 1, 4), 9.0, dtype=dtype)  # the cumulative probability rounds to 1 at once
    assert exits.steps(exits.distribution(gates), 1.0).item() == 3
    model = exit_model().to(dtype)
    with torch.no_grad():
        model.exit_gate.bias.fill_(9)
    assert torch.equal(model(tokens()).logits, model(tokens(), exit_threshold=2.0).logits)
    assert torch.equal(model(tokens(), exit_threshold=0.9).logits, model(tokens(), loops=1).logits)


def test_each_token_is_read_where_its_probability_crosses_the_threshold():
    model, ids = exit_model().double(), tokens()
    states = list(model.trajectory(ids, 4))
    gates = exits.gate_logits(model, states)
    assert gates.shape == (3, 7, 4)
    p, by_step = exits.distribution(gates), [model(ids, loops=k).logits for k in (1, 2, 3, 4)]
    seen = set()
    for threshold in (0.3, 0.6, 0.9):
        got = model(ids, exit_threshold=threshold).logits
        for b in range(3):
            for t in range(7):
                total, k = p[b, t, 0], 0
                while total < threshold and k < 3:
                    k += 1
                    total = total + p[b, t, k]
                seen.add(k)
                torch.testing.assert_close(got[b, t], by_step[k][b, t], atol=1e-10, rtol=0)
    assert seen == {0, 1, 2, 3}
    mixture = sum(p[..., k, None] * by_step[k] for k in range(4))
    torch.testing.assert_close(exits.weighted_logits(model, states), mixture, atol=1e-10, rtol=0)


def test_a_threshold_without_a_gate_is_refused():
    with pytest.raises(ValueError, match="no exit gate"):
        small()(tokens(), exit_threshold=0.5)
