from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from lib import cost, cost_training, fused, objectives, released
from lib.cost_training import Memory, budget, counts, flop_per_token, memory
from lib.layers import Block
from tests.models import CASES, EXPERTS, small, tokens

ROWS, LENGTH = 2, 12
# of the axes paper's recipes: resident and activated parameters, as published
PUBLISHED = {
    ("dense-d28", "dense-ouro", "dense-middle"): (1_496_667_648, 1_496_667_648),
    ("dense-d112",): (3_676_915_200, 3_676_915_200),
    ("dense-huginn", "dense-shared-hl", "dense-split-hl", "dense-split-hl-x2"): (1_499_030_016, 1_499_030_016),
    ("dense-ouro-raw-injection", "dense-middle-prelude-injection"): (1_499_030_016, 1_499_030_016),
    ("moe-ouro", "moe-middle"): (8_780_889_600, 1_563_803_136),
    ("moe-huginn", "moe-shared-hl", "moe-middle-input-injection"): (8_783_251_968, 1_566_165_504),
    ("moe-ff112",): (32_813_803_008, 3_945_457_152),
}


def loss_of(model, ids, every_step_read=False, **how):
    """The loss of all positions: of the last step's readout, or of every step's, as Ouro's objective has it."""
    if not every_step_read:
        return F.cross_entropy(model(ids, **how).logits.flatten(0, 1), ids.flatten())
    how.setdefault("loops", model.config.loops)
    if model.config.exit_gate:
        return objectives.exit_weighted(model, ids, torch.arange(ids.shape[1]), ids, **how)
    context = model.context(ids)
    states = model.trajectory(ids, context=context, **how)
    return sum(F.cross_entropy(model.readout(z, None, context).flatten(0, 1), ids.flatten()) for z in states)


class Nowhere(nullcontext):
    """In place of the counter's record of modules, which fails where gradients are off for a while."""

    parents = {"Global"}


def counted(model, length=LENGTH, **how):
    """FLOP a token that torch counts, forward and backward, of the layers' plain operations."""
    ids, forward, backward = tokens(ROWS, length), *(FlopCounterMode(display=False) for _ in range(2))
    forward.mod_tracker = backward.mod_tracker = Nowhere()
    with mock.patch.object(fused, "suits", lambda *_: False), sdpa_kernel(SDPBackend.MATH):
        with forward:
            loss = loss_of(model, ids, **how)
        with backward:
            loss.backward()
    return forward.get_total_flops() / ids.numel(), backward.get_total_flops() / ids.numel()


def made(envelope, values):
    """A model whose products of experts torch counts: not in float32, where they are one fused operation."""
    model = small(envelope=envelope, **values)
    return model.double() if "n_experts" in values else model


@pytest.mark.parametrize("name", CASES)
def test_forward_and_backward_are_what_torch_counts(name):
    model = made(*CASES[name])
    found = flop_per_token(model.config, LENGTH)
    assert (found.forward, found.backward) == counted(model)
    assert found.again == 0 and found.total == found.forward + found.backward


@pytest.mark.parametrize("backprop", [1, 3, 9])
@pytest.mark.parametrize(
    "envelope, values",
    [
        ("full_stack", {"boundary": 1}),
        ("sandwich", {}),
        ("sandwich", {"injection": "concat", "state_init": "noise"}),
        ("sandwich", {"injection": "diagonal", "injection_source": "tokens"}),
        ("sandwich", {"injection": "diagonal", "state": "split", "h_cycles": 2, "l_cycles": 1, "loops": 4}),
        ("sandwich", {"injection": "diagonal", **EXPERTS}),
    ],
)
def test_truncated_backpropagation(envelope, values, backprop):
    model = made(envelope, values)
    found = flop_per_token(model.config, LENGTH, backprop=backprop)
    assert (found.forward, found.backward) == counted(model, backprop=backprop)
    whole = flop_per_token(model.config, LENGTH)
    assert found.forward == whole.forward and (found.backward < whole.backward) == (backprop < 4)


def test_a_low_state_that_no_one_reads_goes_back_all_the_same():
    values = {"state": "shared", "h_cycles": 2, "l_cycles": 2, "loops": 6, "injection": "diagonal"}
    model = small(envelope="sandwich", **values)
    found = flop_per_token(model.config, LENGTH, loops=5)
    assert (found.forward, found.backward) == counted(model, loops=5)


@pytest.mark.parametrize(
    "envelope, values",
    [("full_stack", {"block": "sandwich", "boundary": 1, "exit_gate": True}), ("sandwich", {"injection": "concat"})],
)
def test_a_readout_at_every_step(envelope, values):
    model = small(envelope=envelope, **values)
    found = flop_per_token(model.config, LENGTH, every_step_read=True)
    assert (found.forward, found.backward) == counted(model, every_step_read=True)
    assert found.forward - flop_per_token(model.config, LENGTH).forward >= 3 * 2 * 16 * 23
    found = flop_per_token(model.config, LENGTH, backprop=2, every_step_read=True)
    assert (found.forward, found.backward) == counted(model, backprop=2, every_step_read=True)


def test_recomputation_is_one_more_forward_of_the_layers():
    model = small(envelope="sandwich", injection="concat")
    for block in [m for m in model.modules() if isinstance(m, Block)]:
        block.forward = partial(checkpoint, block.plain, use_reentrant=False)
    with set_checkpoint_early_stop(False):  # which leaves out a layer's last product
        forward, backward = counted(model)
    found = flop_per_token(model.config, LENGTH, recompute=True)
    assert (found.forward, found.backward + found.again) == (forward, backward)


def test_the_masked_half():
    c = small(loops=3).config
    whole, half = (flop_per_token(c, 99, masked=masked) for masked in (True, False))
    assert whole.forward - half.forward == 3 * 2 * 4 * 49 * 16 and whole.backward - half.backward == 2 * 3 * 2 * 4 * 49 * 16


def kept(model, ids, compute):
    """Bytes of distinct storages that are kept for the backward pass of `compute`, parameters and ids left out."""
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), ids)}
    seen = {}

    def pack(t):
        seen.setdefault(t.untyped_storage().data_ptr(), t)  # held, so that no storage's place is taken by another
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        compute()
    return sum(t.untyped_storage().nbytes() for place, t in seen.items() if place not in known)


@pytest.mark.parametrize(
    "values, backprop",
    [
        ({}, None),
        ({"block": "sandwich", "boundary": 1}, None),
        ({"block": "sandwich_sum", "injection": "concat", "readout_order": "norm_coda_norm", "qk_bias": True}, None),
        ({"injection": "diagonal", "state_init": "noise", "n_kv_heads": 1}, None),
        ({"injection": "diagonal", "state_init": "noise"}, 2),
        ({"injection": "diagonal", "state": "shared", "h_cycles": 2, "l_cycles": 1}, None),
        ({"injection": "diagonal", "feed_forward": "experts", "n_experts": 4, "experts_per_token": 2, "d_expert": 32}, None),
    ],
)
def test_activations_are_what_torch_keeps(values, backprop):
    model = small(envelope="sandwich", **{"d_model": 64, "n_heads": 4, "d_ff": 96} | values)
    ids = tokens(ROWS, 80)
    before = kept(model, ids, lambda: model(ids, backprop=backprop))
    after = kept(model, ids, lambda: loss_of(model, ids, backprop=backprop))
    found = memory(model.config, 80, ROWS, backprop=backprop, precision="float32", fused_norms=False)
    assert found.activations == pytest.approx(before, rel=0.05)
    # log-probabilities are kept; logits and their gradient come and go
    assert after - before == pytest.approx(found.logits / 3, rel=0.05)


def test_every_readout_keeps_its_log_probabilities():
    model = small(envelope="sandwich", d_model=64, n_heads=4, d_ff=96, vocab_size=256)
    ids = tokens(ROWS, 80)
    found = memory(model.config, 80, ROWS, every_step_read=True, precision="float32", fused_norms=False)
    logs = 4 * 4 * ids.numel() * 256
    assert found.logits == logs + 8 * ids.numel() * 256
    assert found.activations + logs == pytest.approx(kept(model, ids, lambda: loss_of(model, ids, True)), rel=0.05)


def test_recomputed_layers_keep_their_inputs():
    model = small(envelope="sandwich", d_model=64, n_heads=4, d_ff=96)
    whole = memory(model.config, 80, ROWS, precision="float32", fused_norms=False)
    found = memory(model.config, 80, ROWS, precision="float32", fused_norms=False, recompute=True)
    for block in [m for m in model.modules() if isinstance(m, Block)]:
        block.forward = partial(checkpoint, block.plain, use_reentrant=False)
    ids = tokens(ROWS, 80)
    before = kept(model, ids, lambda: model(ids))
    layer = (whole.activations - found.activations) / (model.config.executed_layers - 1)  # less its input
    assert found.activations - layer == pytest.approx(before, rel=0.15)
    assert before < found.activations < whole.activations / 4


def test_weights_gradients_and_moments_are_an_optimizers():
    model = small(envelope="sandwich", injection="diagonal", **EXPERTS)
    opt = torch.optim.AdamW(model.parameters())
    loss_of(model, tokens()).backward()
    opt.step()
    found = memory(model.config, 7)
    assert found.weights == sum(p.nbytes for p in model.parameters())
    assert found.gradients == sum(p.grad.nbytes for p in model.parameters())
    assert found.moments == sum(t.nbytes for s in opt.state.values() for t in (s["exp_avg"], s["exp_avg_sq"]))
    assert found.total == sum(vars(found).values()) and "moments" in found.sentence()


def test_shards_divide_what_is_held_and_not_what_is_made():
    c = small(envelope="sandwich", injection="concat").config
    one, four = memory(c, 64, 2), memory(c, 64, 2, shards=4)
    assert four == one.over(4) and four.weights == -(-one.weights // 4) and four.moments == -(-one.moments // 4)
    assert (four.activations, four.logits, four.gathered) == (one.activations, one.logits, one.gathered)
    deferred = memory(c, 64, 2, shards=4, deferred=True)
    assert deferred.total - four.total == deferred.gathered - four.gathered == one.gradients
    twice = memory(c, 64, 4)
    assert twice.activations == 2 * one.activations and twice.weights == one.weights
    assert memory(c, 64, 2, precision="float32").activations < 2 * one.activations  # log-sums are float32 in both


@pytest.mark.parametrize("every", [False, True])
def test_more_of_anything_costs_more(every):
    c = small(envelope="sandwich", injection="diagonal").config
    for a, b in pairwise(range(1, 7)):
        fewer, more = (flop_per_token(c, 32, loops=k, every_step_read=every) for k in (a, b))
        assert fewer.forward < more.forward and fewer.backward < more.backward
        assert memory(c, 32, loops=a, every_step_read=every).total < memory(c, 32, loops=b, every_step_read=every).total
        assert flop_per_token(c, 32, backprop=a).backward <= flop_per_token(c, 32, backprop=b).backward
        assert memory(c, 32, loops=6, backprop=a).activations < memory(c, 32, loops=6, backprop=b).activations
        assert flop_per_token(c, a).total < flop_per_token(c, b).total


def test_a_budget():
    c = small().config
    found = budget(c, 10**9, length=64)
    flop = flop_per_token(c, 64, masked=False).total
    assert found.flop == 10**9 * flop and found.hours == pytest.approx(10**9 * flop / 989e12 / 0.4 / 3600)
    assert found.gpus == 1 and found.days(8) == pytest.approx(found.hours / 192)
    assert budget(c, 10**9, 64, "A100", 0.2).hours == pytest.approx(found.hours * 989 / 312 * 2)
    with mock.patch.dict(cost_training.GPUS, {"tiny": (1e9, 150_000)}):
        split = budget(c, 10, 64, "tiny")
        limit = 0.9 * 150_000
        assert split.gpus > 1 and split.memory.total <= limit < memory(c, 64, recompute=True, shards=split.gpus // 2).total
        assert "tiny hours" in split.sentence() and f"{split.gpus} x tiny hold it" in split.sentence()
        with pytest.raises(ValueError, match="are not split over GPUs and tiny has"):
            budget(c, 10, 640, "tiny")


@pytest.mark.parametrize(
    "call, said",
    [
        (lambda c: flop_per_token(c, 8, loops=0), "loops is 0: it must be at least 1"),
        (lambda c: flop_per_token(c, 8, backprop=0), "backprop is 0: it must be at least 1"),
        (lambda c: memory(c, 8, precision="int8"), "precision is 'int8': it must be one of float32, bfloat16, float16"),
        (lambda c: budget(c, 8, gpu="B1"), "gpu is 'B1': it must be one of H100, H200, A100"),
        (lambda c: budget(c, 8, mfu=1.5), "mfu is 1.5: it must be above 0 and at most 1"),
    ],
)
def test_what_is_refused(call, said):
    with pytest.raises(ValueError, match=said):
        call(small().config)


@pytest.fixture(scope="module")
def cells():
    return cost_training.rows()


def test_published_counts(cells):
    shown = {row[0]: row[2:4] for row in cells}
    for recipes, published in PUBLISHED.items():
        for recipe in recipes:
            assert shown[recipe] == tuple(f"{n / 1e9:.3f}B" for n in published)
    plans = {e.id.removeprefix(cost_training.AXES): e.plan.config for e in released.catalogue()}
    for recipes, published in PUBLISHED.items():
        for recipe in recipes:
            assert counts(plans[f"{recipe}-336b"])[:2] == published


@pytest.mark.parametrize("name", CASES)
def test_counts_are_those_of_the_model(name):
    envelope, values = CASES[name]
    c = small(envelope=envelope, **values, shared_norm=False).config
    assert counts(c) == (cost.parameters(c), cost.activated(c), cost.applied(c))


def test_every_recipe_and_budget_is_in_the_table(cells):
    axes = [e.id for e in released.catalogue() if e.id.startswith(cost_training.AXES)]
    stated = [row for row in cells if row[1] != "-"]
    assert len(stated) == len(axes) == 25 and len({row[0] for row in stated}) == 17
    assert [row[0] for row in cells[25:]] == ["Ouro-1.4B", "Ouro-2.6B", "huginn-0125"]
    assert all(row[6] == row[9] == row[10] == "-" for row in cells[25:])
    hours = {row[:2]: float(row[9].replace(",", "")) for row in stated}
    # 500B tokens are 1.49 times 336B; equal executions cost the same, and H/L halves less
    assert hours["dense-d112", "500.0B"] / hours["dense-d112", "335.5B"] == pytest.approx(119_210 / 80_000, rel=1e-3)
    assert hours["dense-ouro", "335.5B"] == hours["dense-d112", "335.5B"] == hours["dense-middle", "335.5B"]
    assert hours["dense-split-hl", "335.5B"] < hours["dense-split-hl-x2", "335.5B"] == hours["dense-huginn", "335.5B"]
    with mock.patch.object(cost_training, "rows", lambda gpu: cells):
        lines, text = cost_training.table(), cost_training.markdown()
    assert len({len(line) for line in lines[:29]}) == 1 and lines[-1] == text.splitlines()[-1] == cost_training.assumptions()
    assert "40%" in lines[-1] and "989 TFLOP/s" in lines[-1] and "H100 hours" in lines[0]
    assert len(text.splitlines()) == 2 + 28 + 2 and all(line.count("|") == 12 for line in text.splitlines()[:30])


def test_six_flop_a_parameter_where_attention_is_small():
    """The usual rule for a dense model: 6 FLOP a token and applied weight, embeddings left out."""
    c = small(d_model=64, n_heads=4, d_ff=256, loops=1).config
    weights = cost.parameters(c) - c.vocab_size * c.d_model
    assert flop_per_token(c, 1).total == pytest.approx(6 * weights, rel=0.02)


def test_a_measured_rate():
    found = cost_training.measured_rate(small(envelope="sandwich").config, length=16, rows=2, seconds=0.05)
    assert found.tokens > 0 and 0 < found.share < 2
    assert found.flop == pytest.approx(found.tokens * flop_per_token(small(envelope="sandwich").config, 16, masked=False).total)
    assert "tokens/s of a training step" in found.sentence() and found.machine in found.sentence()


def test_memory_in_words():
    said = Memory(2**30, 0, 2**20, 0, 512, 0).sentence()
    assert said == "weights 1 GiB, gradients 0 B, moments 1 MiB, gathered 0 B, activations 512 B, logits 0 B"
