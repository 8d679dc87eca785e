"""Checkpoints in every published layout: they load and generate, and everything that can be wrong with one is a sentence."""

import json
import math
import pickle
import re
import shutil

import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from lib import checkpoint, cli, cost, families, paths, released
from lib.looped import LoopedModel
from tests import checkpoints
from tests.models import small, tokens

LAYOUTS = {
    "Ouro": checkpoints.ouro,
    "Ouro, sharded": lambda folder: checkpoints.ouro(folder, shards=3),
    "Ouro, transformers 5": lambda folder: checkpoints.ouro(
        folder,
        rope_theta=None,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        torch_dtype=None,
        dtype="bfloat16",
    ),
    "Ouro, wide heads": lambda folder: checkpoints.ouro(folder, head_dim=12),
    "Ouro, tied": lambda folder: checkpoints.ouro(folder, tie_word_embeddings=True),
    "Huginn": checkpoints.huginn,
    "Huginn, sharded": lambda folder: checkpoints.huginn(folder, shards=4),
    "Huginn, other spellings": lambda folder: checkpoints.huginn(
        folder, n_heads=None, num_attention_heads=2, n_embd=None, hidden_size=24, dtype="float32", torch_dtype=None
    ),
    "Huginn, biased adapter": lambda folder: checkpoints.huginn(folder, bias=True),
    "axes, Huginn": checkpoints.axes,
    "axes, middle": lambda folder: checkpoints.axes(folder, huginn_input_injection="none", huginn_state_init="input"),
    "axes, raw injection": lambda folder: checkpoints.axes(folder, base=checkpoints.RAW),
    "axes, feed-forward": lambda folder: checkpoints.axes(
        folder, 1, checkpoints.RAW, loop_times=1, loop_input_injection="none"
    ),
    "axes, shared states": lambda folder: checkpoints.axes(folder, base=checkpoints.SHARED),
    "axes, split states twice": lambda folder: checkpoints.axes(folder, base=checkpoints.SPLIT, huginn_split_module_repeats=2),
    "axes, experts": lambda folder: checkpoints.axes(folder, base=checkpoints.AXES | checkpoints.EXPERTS),
    "axes, looped experts": lambda folder: checkpoints.axes(folder, base=checkpoints.RAW | checkpoints.EXPERTS),
    "axes, unrolled experts": lambda folder: checkpoints.axes(folder, base=checkpoints.WRITTEN),
}
PROMPTS = ["Which gate is one?", "The state", "Follow the pointer from a to q, then from q to z. A looped model"]


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
def test_a_checkpoint_loads_and_generates_alike_cached_alone_and_padded(make, tmp_path):
    folder = make(tmp_path / "model")
    model, tokenizer = released.load(folder, dtype="float64"), released.tokenizer(folder)
    assert tokenizer.decode(tokenizer("a looped model")["input_ids"]) == "a looped model"
    how = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": tokenizer.pad_token_id, "eos_token_id": None}
    alone = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        cached, plain = (model.generate(ids, use_cache=use, **how)[0, ids.shape[1] :] for use in (True, False))
        assert torch.equal(cached, plain)
        alone.append(cached)
    assert len({tuple(row.tolist()) for row in alone}) > 1, "the prompt must matter"
    for side in ("left", "right"):
        tokenizer.padding_side = side
        batch = tokenizer(PROMPTS, return_tensors="pt", padding=True)
        assert not batch["attention_mask"].all()
        for use in (True, False):
            out = model.generate(**batch, use_cache=use, **how)
            assert torch.equal(out[:, batch["input_ids"].shape[1] :], torch.stack(alone)), (side, use)


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
def test_every_stored_number_arrives_where_its_part_is(make, tmp_path):
    folder = make(tmp_path / "model")
    plan, model = released.plan_of(folder), released.load(folder, dtype="float32")
    stored = {}
    for file in folder.glob("*.safetensors"):
        stored |= load_file(file)
    filled = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for piece in plan.pieces:
        values = stored[piece.source].float() + piece.add
        count, got = filled[piece.target], model.get_parameter(piece.target)
        if len(piece.shape) != got.dim():  # Huginn's biases, and experts one after the other
            assert piece.row == 0
            count, got = count.view(piece.shape), got.view(piece.shape)
        span = slice(piece.row, piece.row + piece.shape[0])
        count[span] += 1
        got = got[span]
        assert torch.equal(got, values), piece
    assert all((count == 1).all() for count in filled.values()), "every number is filled once"
    assert plan.parameters == model.num_parameters()


def test_precisions_devices_and_stop_tokens(tmp_path):
    folder = checkpoints.ouro(tmp_path / "model")
    assert released.load(folder).dtype is torch.bfloat16, "the checkpoint's own"
    for name, dtype in released.DTYPES.items():
        assert released.load(folder, dtype=name).dtype is released.load(folder, dtype=dtype).dtype is dtype
    model = released.load(folder, device="cpu")
    assert model.generation_config.eos_token_id == [0, 2] and model.generation_config.pad_token_id == 0
    assert not model.training and all(p.device.type == "cpu" for p in model.parameters())
    with pytest.raises(ValueError, match="dtype is 'int8': it must be one of bfloat16"):
        released.load(folder, dtype=torch.int8)
    huginn = released.load(checkpoints.huginn(tmp_path / "huginn"))
    assert huginn.generation_config.eos_token_id == [0] and huginn.generation_config.pad_token_id == 2
    assert huginn.lm_head.weight is huginn.embed_tokens.weight


def test_huginns_end_of_turn_is_added_where_the_vocabulary_has_it():
    plan = families.plan(checkpoints.HUGINN | {"vocab_size": 65536, "padded_vocab_size": 65536, "eos_token_id": 65505}, "x")
    assert plan.stop == (65505, 65508)


def test_a_model_of_ours_loads_as_well(tmp_path):
    for name, values in {"plain": {}, "tied": {"tie_word_embeddings": True, "injection": "concat", "boundary": 1}}.items():
        model = small(envelope="sandwich", **values)
        model.save_pretrained(tmp_path / name)
        loaded = released.load(tmp_path / name)
        assert torch.equal(loaded(tokens()).logits, model(tokens()).logits)
    assert LoopedModel.from_pretrained(tmp_path / "tied").config.boundary == 1


def test_a_loaded_model_saves_and_loads_again_bitwise(tmp_path):
    model = released.load(checkpoints.huginn(tmp_path / "hub"), dtype="float32")
    model.save_pretrained(tmp_path / "ours")
    for again in (LoopedModel.from_pretrained(tmp_path / "ours").eval(), released.load(tmp_path / "ours")):
        assert torch.equal(again(tokens()).logits, model(tokens()).logits)
        assert again.generation_config.pad_token_id == 2 and again.generation_config.eos_token_id == [0]


# --- the real shapes ------------------------------------------------------------------------------------------------------

PUBLISHED = {
    "ByteDance/Ouro-1.4B": 1_434_652_673,
    "ByteDance/Ouro-2.6B-Thinking": 2_667_974_657,
    "tomg-group-umd/huginn-0125": 3_564_976_800,
    "IFM/LoopedLM-P1-dense-d28-336b": 1_496_667_648,
    "IFM/LoopedLM-P1-dense-d112-336b": 3_676_915_200,
    "IFM/LoopedLM-P1-dense-ouro-336b": 1_496_667_648,
    "IFM/LoopedLM-P1-dense-middle-336b": 1_496_667_648,
    "IFM/LoopedLM-P1-dense-huginn-500b": 1_499_030_016,
    "IFM/LoopedLM-P1-dense-ouro-raw-injection-336b": 1_499_030_016,
    "IFM/LoopedLM-P1-dense-middle-prelude-injection-336b": 1_499_030_016,
    "IFM/LoopedLM-P1-dense-shared-hl-336b": 1_499_030_016,
    "IFM/LoopedLM-P1-dense-split-hl-336b": 1_499_030_016,
    "IFM/LoopedLM-P1-dense-split-hl-x2-336b": 1_499_030_016,
    "IFM/LoopedLM-P1-moe-ouro-500b": 8_780_889_600,
    "IFM/LoopedLM-P1-moe-middle-336b": 8_780_889_600,
    "IFM/LoopedLM-P1-moe-middle-input-injection-500b": 8_783_251_968,
    "IFM/LoopedLM-P1-moe-huginn-500b": 8_783_251_968,
    "IFM/LoopedLM-P1-moe-shared-hl-336b": 8_783_251_968,
    "IFM/LoopedLM-P1-moe-ff112-336b": 32_813_803_008,
    "IFM/LoopedLM-P1-moe-ff112-prelude-injection-336b": 32_813_803_008 + 1536 * 1538,  # the injection's
}
# parameters that one token uses; layers and injections that it executes, of 112 at most
ACTIVE = {
    "dense-huginn-336b": (1_499_030_016, 112, 8),
    "dense-split-hl-336b": (1_499_030_016, 64, 8),
    "dense-split-hl-x2-336b": (1_499_030_016, 112, 8),
    "dense-ouro-raw-injection-336b": (1_499_030_016, 112, 4),
    "moe-ouro-500b": (1_563_803_136, 112, 0),
    "moe-middle-500b": (1_563_803_136, 112, 0),
    "moe-huginn-500b": (1_566_165_504, 112, 8),
    "moe-shared-hl-500b": (1_566_165_504, 112, 8),
    "moe-ff112-500b": (3_945_457_152, 112, 0),
    "moe-ff112-prelude-injection-336b": (3_945_457_152 + 1536 * 1538, 112, 8),
}


@pytest.mark.parametrize("id", PUBLISHED)
def test_parameters_on_the_meta_device_are_the_published_ones(id):
    plan = next(entry.plan for entry in released.catalogue() if entry.id == id)
    with torch.device("meta"):
        model = LoopedModel(plan.config)
    assert model.num_parameters() == plan.parameters == cost.parameters(plan.config) == PUBLISHED[id]


@pytest.mark.parametrize("name", ACTIVE)
def test_active_and_executed_are_the_published_ones(name):
    c = next(entry.plan.config for entry in released.catalogue() if entry.id == f"IFM/LoopedLM-P1-{name}")
    active, executed, writes = ACTIVE[name]
    assert cost.activated(c) == active and c.executed_layers == executed
    # outside the layers: embedding, head, the last norm
    d, outside = 1536, 2 * 250_624 * 1536 + 1536
    layer = 2 * d * d + 2 * d * 384 + 2 * d + (d * 25 + 2 * 3 * d * 2432 if c.n_experts else 3 * d * 4352)
    assert cost.applied(c) == outside + executed * layer + writes * d * (d + 2)
    assert writes == (c.loops if c.injection != "none" else 0)


def test_the_published_recipes_are_the_points_of_the_design_space_they_should_be():
    of = {entry.id.split("P1-")[-1]: entry.plan.config for entry in released.catalogue()}
    c = of["moe-ff112-prelude-injection-336b"]
    assert (c.prelude, c.core, c.loops, c.coda, c.stored_layers) == (8, 12, 8, 8, 112) and c.unrolled
    assert (c.injection, c.injection_source, c.state_init) == ("diagonal", "prelude", "input")
    c = of["dense-split-hl-x2-336b"]
    assert (c.state, c.h_cycles, c.l_cycles, c.repeats, c.step_layers) == ("split", 2, 3, 2, 12)
    assert [c.updates_low(t) for t in range(8)] == 2 * [True, True, True, False]
    assert of["dense-split-hl-336b"].repeats == 1 and of["moe-shared-hl-500b"].state == "shared"
    c = of["moe-ouro-336b"]
    assert (c.prelude, c.core, c.coda, c.loops, c.injection, c.boundary) == (0, 28, 0, 4, "none", 0)
    assert (c.feed_forward, c.n_experts, c.experts_per_token, c.d_expert) == ("experts", 25, 2, 2432)


def test_tensor_counts_and_bytes_are_the_published_ones():
    plans = {entry.id: entry.plan for entry in released.catalogue()}
    assert len(plans["IFM/LoopedLM-P1-dense-d28-336b"].pieces) == 255
    assert len(plans["IFM/LoopedLM-P1-dense-d112-336b"].pieces) == 1011
    assert len(plans["IFM/LoopedLM-P1-dense-huginn-336b"].pieces) == 258
    for name, count in (("shared-hl", 258), ("split-hl", 258), ("split-hl-x2", 258)):
        assert len(plans[f"IFM/LoopedLM-P1-dense-{name}-336b"].pieces) == count
    for name, count in (("ouro", 283), ("middle", 283), ("huginn", 286), ("shared-hl", 286), ("ff112", 1123)):
        assert len(plans[f"IFM/LoopedLM-P1-moe-{name}-500b"].pieces) == count
    huginn = plans["tomg-group-umd/huginn-0125"]
    table = 4096 * 48 * 2
    stored = huginn.parameters + math.prod(huginn.pieces[0].shape) + table
    assert 4 * stored == 15_645_600_384 and len(huginn.pieces) + 2 == 77


def test_the_catalogue_has_every_released_checkpoint_once():
    ids = [entry.id for entry in released.catalogue()]
    assert len(ids) == len(set(ids)) == 30
    listed = yaml.safe_load((paths.params() / "models.yaml").read_text())
    assert ids == [id for group in listed.values() for id in group["checkpoints"]]
    assert not {entry.id: entry.missing for entry in released.catalogue() if entry.plan is None}


# --- everything that can be wrong -------------------------------------------------------------------------------------------


def edit(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def restore(folder, change):
    """Write the weights of a one-file checkpoint again, changed."""
    stored = load_file(folder / "model.safetensors")
    change(stored)
    save_file(stored, folder / "model.safetensors")


def cut(path, keep=0.7):
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])


def pickled(path):
    with open(path, "wb") as f:
        pickle.dump({"weight": [1]}, f)


def only_a_pickle(folder):
    torch.save({"x": torch.ones(1)}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def relisted(change):
    """A change to an axes checkpoint's folder, with a manifest that fits it."""
    return lambda folder: (change(folder), checkpoints.manifest(folder))


def configured(**values):
    """A change to the model section of an axes checkpoint's config.json."""
    return relisted(lambda folder: edit(folder / CONFIG, lambda c: c["model"].update(values)))


CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
SHARD = "model-00002-of-00002.safetensors"
Q, GATE = "model.layers.0.self_attn.q_proj.weight", "model.early_exit_gate.weight"
WHOLE = {
    "no config": (lambda f: (f / CONFIG).unlink(), "config.json is missing"),
    "no JSON": (lambda f: cut(f / CONFIG), "config.json is no JSON"),
    "unknown family": (lambda f: edit(f / CONFIG, lambda c: c.update(model_type="gpt2")), "model_type is 'gpt2'.*ouro, huginn"),
    "no family": (lambda f: edit(f / CONFIG, lambda c: c.pop("model_type")), "model_type is None"),
    "no size": (lambda f: edit(f / CONFIG, lambda c: c.pop("hidden_size")), "hidden_size is None: it must be a whole number"),
    "bad heads": (lambda f: edit(f / CONFIG, lambda c: c.update(num_key_value_heads=3)), "num_key_value_heads is 3: .*divisor"),
    "no loops": (lambda f: edit(f / CONFIG, lambda c: c.update(total_ut_steps=0)), "total_ut_steps is 0: .*at least 1"),
    "no heads": (lambda f: edit(f / CONFIG, lambda c: c.update(num_attention_heads=0)), "num_attention_heads is 0"),
    "tied in words": (lambda f: edit(f / CONFIG, lambda c: c.update(tie_word_embeddings="false")), "must be true or false"),
    "family a list": (lambda f: edit(f / CONFIG, lambda c: c.update(model_type=[])), r"model_type is \[\]"),
    "type of type": (lambda f: edit(f / CONFIG, lambda c: c.update(torch_dtype={})), r"dtype is \{\}: it must be a text"),
    "rope a word": (lambda f: edit(f / CONFIG, lambda c: c.update(rope_scaling="x")), "rope_parameters is 'x'"),
    "layer types": (lambda f: edit(f / CONFIG, lambda c: c.update(layer_types="full_attention")), "layer_types is 'full"),
    "deep JSON": (lambda f: (f / CONFIG).write_text("[" * 100_000), "config.json is no JSON"),
    "scaled rope": (
        lambda f: edit(f / CONFIG, lambda c: c.update(rope_scaling={"rope_type": "yarn", "factor": 2.0})),
        "rope_parameters is .*'yarn'",
    ),
    "another rope": (
        lambda f: edit(f / CONFIG, lambda c: c.update(rope_scaling={"rope_type": "linear"})),
        "rope_type is 'linear': it must be 'default'",
    ),
    "sliding": (lambda f: edit(f / CONFIG, lambda c: c.update(use_sliding_window=True)), "use_sliding_window is True"),
    "early exit": (lambda f: edit(f / CONFIG, lambda c: c.update(early_exit_step=1)), "early_exit_step is 1"),
    "no weights": (lambda f: (f / SINGLE).unlink(), "has no weights"),
    "truncated": (lambda f: cut(f / SINGLE), "model.safetensors is cut short or damaged"),
    "truncated header": (lambda f: cut(f / SINGLE, 0.001), "model.safetensors is cut short or damaged"),
    "empty file": (lambda f: (f / SINGLE).write_bytes(b""), "model.safetensors is cut short or damaged"),
    "pickle": (only_a_pickle, "pytorch_model.bin is a pickle.*only safetensors are read"),
    "pickle in disguise": (lambda f: pickled(f / SINGLE), "model.safetensors is a pickle.*only safetensors are read"),
    "zip in disguise": (lambda f: torch.save({}, f / SINGLE), "model.safetensors is a pickle.*only safetensors are read"),
    "wrong shape": (
        lambda f: restore(f, lambda s: s.update({Q: torch.zeros(8, 32)})),
        rf"{Q} is \(8, 32\): it must be \(32, 32\)",
    ),
    "missing tensor": (lambda f: restore(f, lambda s: s.pop(GATE)), rf"lacks tensors, {GATE}"),
    "many missing": (lambda f: restore(f, lambda s: [s.pop(k) for k in list(s)[:9]]), r"lacks tensors, .* and 4 more"),
    "extra tensor": (lambda f: restore(f, lambda s: s.update(stray=torch.zeros(2))), "has unknown tensors, stray"),
    "whole numbers": (lambda f: restore(f, lambda s: s.update({Q: torch.zeros(32, 32, dtype=torch.int32)})), "is I32"),
    "shard alone": (lambda f: (f / SINGLE).rename(f / SHARD), "neither model.safetensors nor model.safetensors.index.json"),
}
SHARDED = {
    "missing shard": (lambda f: (f / SHARD).unlink(), f"names {SHARD}, which is not there"),
    "truncated shard": (lambda f: cut(f / SHARD), f"{SHARD} is cut short or damaged"),
    "index elsewhere": (
        lambda f: edit(f / INDEX, lambda c: c["weight_map"].update({Q: "../model.safetensors"})),
        "it must be a file of that folder",
    ),
    "index disagrees": (lambda f: edit(f / INDEX, lambda c: c["weight_map"].pop(Q)), f"{Q} are in one of the two"),
    "no map": (lambda f: (f / INDEX).write_text("{}"), "weight_map must name"),
    "no index": (lambda f: (f / INDEX).write_text("]"), "is no JSON"),
}
MANIFEST = "artifact_manifest.json"
ROUTED = {"num_experts": 4, "num_activated_experts": 2, "expert_inter_dim": 8}
NATIVE = {
    "no manifest": (lambda f: (f / MANIFEST).unlink(), f"{MANIFEST} is missing"),
    "altered manifest": (lambda f: edit(f / MANIFEST, lambda c: c["source"].update(checkpoint_id="other")), "manifest_sha256"),
    "altered hash": (lambda f: edit(f / MANIFEST, lambda c: c.update(manifest_sha256="0" * 64)), "manifest_sha256"),
    "another release": (lambda f: checkpoints.manifest(f, release="paper-part2"), "release is 'paper-part2'"),
    "no source": (lambda f: checkpoints.manifest(f, source={}), "source.checkpoint_id"),
    "card": (lambda f: checkpoints.manifest(f, source={"checkpoint_id": "x", "model_card_sha256": "0"}), "README.md must"),
    "one licence": (relisted(lambda f: (f / "LICENSE").write_text("x")), "LICENSE and NOTICE"),
    "altered file": (lambda f: (f / CONFIG).write_text((f / CONFIG).read_text().replace("3", "4")), "config.json has not the"),
    "longer file": (lambda f: (f / CONFIG).write_text((f / CONFIG).read_text() + " "), "config.json has not the size"),
    "truncated shard": (lambda f: cut(f / SHARD), f"{SHARD} has not the size"),
    "truncated and listed": (relisted(lambda f: cut(f / SHARD)), f"{SHARD} is cut short or damaged"),
    "missing shard": (lambda f: (f / SHARD).unlink(), f"{SHARD} is listed in {MANIFEST} and is not there"),
    "unlisted file": (lambda f: (f / "extra.txt").write_text("x"), "extra.txt is not listed"),
    "file outside": (
        lambda f: ((f / "extra.txt").write_text("x"), checkpoints.manifest(f)),
        "'extra.txt' outside of the layout",
    ),
    "link": (lambda f: ((f / SHARD).rename(f.parent / "x"), (f / SHARD).symlink_to(f.parent / "x")), f"{SHARD} is a link"),
    "wrong count": (
        lambda f: checkpoints.manifest(
            f, model={"dtype": "bfloat16", "index": INDEX, "tensor_count": 1, "shards": 2, "name": "x"}
        ),
        "model.tensor_count tensors, 1",
    ),
    "float32": (
        relisted(lambda f: save_file({k: t.float() for k, t in load_file(f / SHARD).items()}, f / SHARD)),
        "every tensor must be BF16",
    ),
    "config keys": (
        lambda f: (edit(f / CONFIG, lambda c: c.update(more=1)), checkpoints.manifest(f)),
        "model and tokenizer alone",
    ),
    "tokenizer elsewhere": (
        relisted(lambda f: edit(f / CONFIG, lambda c: c["tokenizer"].update(path="../x"))),
        "tokenizer.path must lie inside tokenizer/",
    ),
    "gate": (configured(apply_attn_gate=True), "model: apply_attn_gate is True: it must be False"),
    "layers do not add up": (configured(num_layers=9), "num_layers is 9: it must be 4"),
    "experts without a number a token": (
        configured(num_experts=25),
        "num_activated_experts is None: it must be a whole number, at least 1",
    ),
    "experts without a width": (
        configured(num_experts=25, num_activated_experts=2),
        "expert_inter_dim is None: it must be a whole number, at least 1",
    ),
    "more experts a token than there are": (
        configured(num_experts=4, num_activated_experts=5, expert_inter_dim=8),
        "num_activated_experts is 5: it must be at most num_experts, 4",
    ),
    "a number of experts in words": (
        configured(num_experts="25"),
        "num_experts is '25': it must be a whole number, at least 0",
    ),
    "another router": (configured(**ROUTED, moe_router_score_func="softmax"), "score_func is 'softmax': it must be 'sigmoid'"),
    "a scaled router": (configured(**ROUTED, moe_router_scaling_factor=2.5), "scaling_factor is 2.5: it must be None"),
    "a biased router": (configured(**ROUTED, moe_router_bias=True), "moe_router_bias is True: it must be False"),
    "first layers dense": (configured(**ROUTED, num_dense_layers=1), "num_dense_layers is 1: it must be None or 0"),
    "shared experts": (configured(num_shared_experts=1), "num_shared_experts is 1: it must be 0"),
    "an unknown state": (
        configured(huginn_hierarchical_state="triple"),
        "huginn_hierarchical_state is 'triple': it must be 'none' or 'shared_hl' or 'split_hl'",
    ),
    "cycles that do not match": (
        configured(huginn_hierarchical_state="shared_hl", huginn_hierarchical_h_cycles=2, huginn_hierarchical_l_cycles=3),
        "loop_times is 3: it must be 8, the updates of 2 H cycles of 3 L updates and one H update",
    ),
    "cycles left out": (configured(huginn_hierarchical_state="shared_hl"), "loop_times is 3: it must be 8"),
    "no L cycles": (
        configured(huginn_hierarchical_state="shared_hl", huginn_hierarchical_l_cycles=0),
        "huginn_hierarchical_l_cycles is 0: it must be a whole number, at least 1",
    ),
    "an odd split": (
        configured(
            huginn_hierarchical_state="split_hl",
            huginn_hierarchical_h_cycles=1,
            huginn_hierarchical_l_cycles=2,
            huginn_recurrent_layers=1,
            huginn_coda_layers=2,
        ),
        "huginn_recurrent_layers is 1: it must be even, a half for each state",
    ),
    "no repeats": (
        configured(
            huginn_hierarchical_state="split_hl",
            huginn_hierarchical_h_cycles=1,
            huginn_hierarchical_l_cycles=2,
            huginn_split_module_repeats=0,
        ),
        "huginn_split_module_repeats is 0: it must be a whole number, at least 1",
    ),
    "a write into a loop": (
        configured(dense_prelude_input_injection="diagonal"),
        "dense_prelude_input_injection is 'diagonal': it must be 'none'",
    ),
    "another injection": (
        configured(huginn_input_injection="concat"),
        "huginn_input_injection is 'concat': it must be 'none' or",
    ),
    "LayerNorm": (configured(apply_rmsnorm=None), "apply_rmsnorm is None: it must be True"),
    "partial rotation": (configured(rope_head_dim=4), "rope_head_dim is 4: it must be head_dim, 8"),
    "quoted number": (configured(rope_base="1e6"), "rope_base is '1e6': it must be a positive number"),
    "linked folder": (
        lambda f: (f.rename(f.parent / "real"), f.symlink_to(f.parent / "real")),
        "is a link: it must be the folder",
    ),
    "another size": (
        relisted(lambda f: edit(f / INDEX, lambda c: c["metadata"].update(total_size=0))),
        "metadata.total_size must be a whole number above 0",
    ),
    "another projection": (lambda f: checkpoints.manifest(f, config_projection="all"), "must be 'model_tokenizer_only'"),
    "another tokenizer": (
        relisted(lambda f: edit(f / CONFIG, lambda c: c["tokenizer"].update(type="llama3"))),
        "tokenizer.type must be 'huggingface'",
    ),
    "tokenizer not there": (
        relisted(lambda f: edit(f / CONFIG, lambda c: c["tokenizer"].update(path="tokenizer/none"))),
        "tokenizer.path is 'tokenizer/none', which is not there",
    ),
    "unreferenced shard": (
        relisted(lambda f: shutil.copy(f / SHARD, f / "model-00003-of-00003.safetensors")),
        "its files must be the 2 listed",
    ),
    "half a character": (lambda f: edit(f / MANIFEST, lambda c: c.update(note="\ud800")), "holds a value that has no place"),
}
SPACED = "it must be evenly spaced layers, the first behind dense_prelude_source_layer"
UNROLLED = {
    "unevenly spaced": (configured(dense_prelude_input_layers="1,3,6"), f"dense_prelude_input_layers is '1,3,6': {SPACED}"),
    "in another order": (configured(dense_prelude_input_layers="3,1"), f"dense_prelude_input_layers is '3,1': {SPACED}"),
    "beyond the last layer": (configured(dense_prelude_input_layers="1,4,7"), f"is '1,4,7': {SPACED}"),
    "no place": (configured(dense_prelude_input_layers=""), "dense_prelude_input_layers is '': it must be layer numbers"),
    "places in words": (configured(dense_prelude_input_layers="one"), "is 'one': it must be layer numbers with commas between"),
    "places in a list": (
        configured(dense_prelude_input_layers=[1, 3]),
        r"dense_prelude_input_layers is \[1, 3\]: it must be a text",
    ),
    "another source": (configured(dense_prelude_source_layer=2), f"dense_prelude_input_layers is '1,3,5': {SPACED}"),
    "another write": (configured(dense_prelude_input_injection="concat"), "is 'concat': it must be 'none' or 'diagonal'"),
    "looped as well": (configured(loop_times=2), "dense_prelude_input_injection is 'diagonal': it must be 'none' in a model"),
    "injected as well": (
        configured(loop_input_injection="diagonal"),
        "dense_prelude_input_injection is 'diagonal': it must be",
    ),
}
HUGINNS = {
    "two heads": (
        lambda f: restore(f, lambda s: s["lm_head.weight"].view(-1)[:1].add_(1)),
        "lm_head.weight differs from transformer.wte.weight",
    ),
    "injection": (lambda f: edit(f / CONFIG, lambda c: c.update(injection_type="add")), "injection_type is 'add'"),
    "state": (lambda f: edit(f / CONFIG, lambda c: c.update(state_init="unit")), "state_init is 'unit'.*'like-init' or 'zero'"),
    "noise": (lambda f: edit(f / CONFIG, lambda c: c.update(test_time_noise=0.1)), "test_time_noise is 0.1: it must be 0"),
    "width": (lambda f: edit(f / CONFIG, lambda c: c.update(head_dim=10)), "head_dim is 10: it must be n_embd / n_heads, 12"),
    "layers": (lambda f: edit(f / CONFIG, lambda c: c.update(n_layers=9)), "n_layers is 9: it must be 8"),
    "tied in words": (lambda f: edit(f / CONFIG, lambda c: c.update(tie_embeddings="no")), "'no': it must be true or false"),
    "no heads": (
        lambda f: edit(f / CONFIG, lambda c: c.update(n_heads=0)),
        "n_heads is 0: it must be a whole number, at least 1",
    ),
    "pad beyond": (lambda f: edit(f / CONFIG, lambda c: c.update(pad_token_id=500)), "pad_token_id is 500: .*token ids below"),
}
WRONG = {
    f"{layout}: {name}": (make, *case)
    for layout, make, cases in (
        ("Ouro", checkpoints.ouro, WHOLE),
        ("Ouro, sharded", lambda folder: checkpoints.ouro(folder, shards=2), SHARDED),
        ("axes", checkpoints.axes, NATIVE),
        ("axes, unrolled", lambda folder: checkpoints.axes(folder, base=checkpoints.WRITTEN), UNROLLED),
        ("Huginn", checkpoints.huginn, HUGINNS),
    )
    for name, case in cases.items()
}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """Each layout made once: (maker) -> its folder."""
    made = {}

    def of(make):
        if make not in made:
            made[make] = make(tmp_path_factory.mktemp("pristine") / "model")
        return made[make]

    return of


@pytest.mark.parametrize("make, spoil, said", WRONG.values(), ids=WRONG)
def test_each_thing_that_can_be_wrong_is_one_sentence(make, spoil, said, pristine, tmp_path, capsys):
    folder = tmp_path / "model"
    shutil.copytree(pristine(make), folder)
    spoil(folder)
    with pytest.raises(ValueError, match=said) as caught:
        released.load(folder)
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)
    if "differs" not in said:  # seen when the numbers are read
        assert cli.main(["models", str(folder)]) == 1
        told = capsys.readouterr()
        assert told.err.startswith("error: ") and len(told.err.strip().splitlines()) == 1 and not told.out


@pytest.fixture
def offline(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_an_absent_hub_id_is_a_sentence_with_its_command(offline, capsys):
    assert cli.main(["models", "ByteDance/Ouro-1.4B"]) == 1
    assert "`hf download ByteDance/Ouro-1.4B`" in capsys.readouterr().err
    with pytest.raises(
        ValueError, match="`hf download IFM/LoopedLM-P1-dense-d28-336b --local-dir models/IFM/LoopedLM-P1-dense"
    ):
        released.load("IFM/LoopedLM-P1-dense-d28-336b")
    for bad in ("no-such-folder", "./a/b", "/a/b", "a/b/c", ""):
        with pytest.raises(ValueError, match="neither a folder nor a hub id"):
            released.load(bad)
    with pytest.raises(ValueError, match="is not on this machine"):
        released.load("some one/odd name")


def test_a_path_to_a_file_says_what_to_give(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"x")
    (tmp_path / "a.txt").write_bytes(b"x")
    with pytest.raises(ValueError, match="a.bin is a pickle"):
        released.load(tmp_path / "a.bin")
    with pytest.raises(ValueError, match="a.txt is a file: give the folder"):
        released.load(tmp_path / "a.txt")


def in_hub_cache(cache, id, folder):
    """Lay a checkpoint out as the hub's cache does: blobs, and a snapshot of links to them."""
    root = cache / f"models--{id.replace('/', '--')}"
    snapshot = root / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    for path in (p for p in folder.rglob("*") if p.is_file()):
        blob, link = root / "blobs" / str(abs(hash(path.name))), snapshot / path.relative_to(folder)
        blob.parent.mkdir(parents=True, exist_ok=True)
        link.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, blob)
        link.symlink_to(blob)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(snapshot.name)
    return snapshot


@pytest.mark.parametrize(
    "id, make", [("ByteDance/Ouro-1.4B", checkpoints.ouro), ("IFM/LoopedLM-P1-dense-huginn-336b", checkpoints.axes)]
)
def test_a_hub_id_is_read_from_the_hubs_cache(id, make, offline, tmp_path, capsys):
    snapshot = in_hub_cache(offline, id, make(tmp_path / "model"))
    logits = released.load(id, dtype="float32")(tokens()).logits
    assert torch.equal(logits, released.load(tmp_path / "model", dtype="float32")(tokens()).logits)
    assert cli.main(["models"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if "/" in line}
    assert lines[id].endswith(str(snapshot)) and lines["tomg-group-umd/huginn-0125"].endswith("  no")
    if "IFM" in id:
        with pytest.raises(ValueError, match="is a link"):
            released.load(snapshot)


def test_the_table_names_size_memory_and_what_is_missing(offline, capsys):
    assert cli.main(["models"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"ByteDance/Ouro-1.4B +Ouro +4 +1,434,652,673 +2.67 GiB +5.34 GiB +no", out)
    assert re.search(r"moe-ff112-prelude-injection-336b +axes paper +8 32,816,165,376 +61.12 GiB +122.25 GiB +no", out)
    assert "not loadable" not in out and "\n\n\n" not in out
    assert "`hf download ByteDance/Ouro-1.4B`" in out


def test_an_entry_that_cannot_be_loaded_is_listed_with_its_reason(offline, monkeypatch, tmp_path):
    text = (paths.params() / "models.yaml").read_text()
    monkeypatch.setattr(paths, "params", lambda: tmp_path)
    (tmp_path / "models.yaml").write_text(text.replace("huginn_split_module_repeats: 2", "huginn_split_module_repeats: 0"))
    *_, blank, heading, reason, end, command = released.table()
    assert (blank, heading, end) == ("", "Listed too, and not loadable:", "") and command.startswith("To get one: ")
    assert re.fullmatch(r"IFM/LoopedLM-P1-dense-split-hl-x2-336b +huginn_split_module_repeats is 0: .* at least 1", reason)


def test_inspection_says_what_a_checkpoint_is(tmp_path, capsys):
    assert cli.main(["models", str(checkpoints.huginn(tmp_path / "model"))]) == 0
    out = capsys.readouterr().out
    assert "2 before the loop, 4 looped 3 times, 2 after it" in out and "injection=concat" in out


@pytest.mark.parametrize(
    "base, values, said",
    [
        (checkpoints.SHARED, {}, "6 times, 1 after it; H/L states, 2 times 2 L updates and one H update, both states by all"),
        (
            checkpoints.SPLIT,
            {"huginn_split_module_repeats": 2},
            "4 looped 6 times, 1 after it; H/L states, 2 times 2 L updates and one H update, H by the first half of them, L by "
            "the second; an update runs its layers 2 times\n",
        ),
        (checkpoints.AXES | checkpoints.EXPERTS, {}, "2 looped 3 times, 1 after it; in each 5 experts, 2 a token\n"),
        (checkpoints.WRITTEN, {}, "1, then 3 times 2 of their own, an unrolled loop, then 1; in each 5 experts, 2 a token\n"),
    ],
)
def test_inspection_says_what_states_experts_and_unrolled_cores_there_are(base, values, said, tmp_path, capsys):
    folder = checkpoints.axes(tmp_path / "model", base=base, **values)
    assert cli.main(["models", str(folder)]) == 0
    out = capsys.readouterr().out
    assert said in out
    plan = released.plan_of(folder)
    active = f"{plan.parameters:,}, of which one token uses {cost.activated(plan.config):,}\n"
    assert (active in out) == ("experts" in said)


def test_a_tokenizer_that_is_missing_or_anothers_is_refused(tmp_path):
    folder = checkpoints.ouro(tmp_path / "model")
    edit(folder / CONFIG, lambda c: c.update(vocab_size=20))
    with pytest.raises(ValueError, match="it is another model's"):
        released.tokenizer(folder)
    for content in ("{}", "{"):
        (folder / "tokenizer.json").write_text(content)
        with pytest.raises(ValueError, match="tokenizer.json cannot be read"):
            released.tokenizer(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="tokenizer.json is missing"):
        released.tokenizer(folder)


def test_the_tokenizer_pads_on_the_left_and_gives_what_the_model_takes(tmp_path):
    batch = released.tokenizer(checkpoints.ouro(tmp_path / "model"))(PROMPTS, padding=True)
    assert set(batch) == {"input_ids", "attention_mask"}
    assert all(row[-1] == 1 for row in batch["attention_mask"]) and any(row[0] == 0 for row in batch["attention_mask"])


def test_files_that_a_download_leaves_are_no_part_of_the_layout(tmp_path):
    folder = checkpoints.axes(tmp_path / "model")
    (folder / ".gitattributes").write_text("x")
    (folder / ".cache" / "huggingface").mkdir(parents=True)
    (folder / ".cache" / "huggingface" / "x.lock").write_text("x")
    assert released.load(folder).config.core == 2


def test_a_gpu_that_is_not_there_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device is 'cuda', and torch finds no GPU"):
        released.load(checkpoints.ouro(tmp_path / "model"), device="cuda")


def test_a_missing_key_means_what_the_published_code_means():
    model = {k: v for k, v in checkpoints.AXES.items() if not k.startswith("huginn_") and k not in ("rope_base", "head_dim")}
    c = families.plan({"model": model | {"vocab_size": 9}}, "x").config
    assert (c.prelude, c.core, c.coda) == (1, 2, 1) and c.state_init == "zeros" and c.injection == "diagonal"
    assert c.rope_theta == 100000.0 and c.head_dim == 8


def test_a_snapshot_without_weights_is_not_here(offline, tmp_path):
    folder = checkpoints.ouro(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    in_hub_cache(offline, "ByteDance/Ouro-1.4B", folder)
    assert released.present("ByteDance/Ouro-1.4B") is None


def test_slices_cover_every_row_once_and_stay_small(monkeypatch):
    for rows, width in ((1, 4), (7, 2**23), (100_000, 6144), (3, 2**40)):
        spans = list(checkpoint.slices(rows, width))
        assert [a for a, _ in spans[1:]] == [b for _, b in spans[:-1]] and (spans[0][0], spans[-1][1]) == (0, rows)
        assert all((b - a) * width <= checkpoint.SLICE or b - a == 1 for a, b in spans)


def test_a_tensor_of_many_slices_arrives_whole(tmp_path, monkeypatch):
    whole = released.load(checkpoints.huginn(tmp_path / "model"), dtype="float32").state_dict()
    monkeypatch.setattr(checkpoint, "SLICE", 200)
    sliced = released.load(tmp_path / "model", dtype="float32").state_dict()
    assert all(torch.equal(whole[name], sliced[name]) for name in whole)


def test_nothing_but_safetensors_is_opened(tmp_path, monkeypatch):
    folder = checkpoints.ouro(tmp_path / "model")
    torch.save({}, folder / "pytorch_model.bin")
    (folder / "modeling_ouro.py").write_text("raise SystemExit('remote code ran')")
    edit(folder / CONFIG, lambda c: c.update(auto_map={"AutoModelForCausalLM": "modeling_ouro.OuroForCausalLM"}))
    opened = []
    monkeypatch.setattr(checkpoint, "safe_open", lambda path, **k: opened.append(path.name) or safe_open(path, **k))
    released.load(folder)
    assert set(opened) == {"model.safetensors"}
