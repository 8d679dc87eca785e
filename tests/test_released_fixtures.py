"""Published families against golden tensors of their own code: states, logits, caches, padding, exits, generation."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from lib import exits, released
from lib.boundary import every
from lib.cache import LoopedCache, slot
from lib.experts import Routes
from lib.noise import hashed
from tests import checkpoints, reference
from tests.fixtures import FOLDER
from tests.models import tokens

CLOSE = {"atol": 5e-5, "rtol": 1e-4}  # the fixtures' own
OURO, HUGINN = (load_file(FOLDER / name / "expected.safetensors") for name in ("ouro-tiny", "huginn-tiny"))


@pytest.fixture(scope="module")
def ouro():
    return released.load(FOLDER / "ouro-tiny")


@pytest.fixture(scope="module")
def huginn():
    return released.load(FOLDER / "huginn-tiny")


def close(got, expected, **tolerance):
    torch.testing.assert_close(got, expected, **(CLOSE | tolerance))


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


# --- Ouro -----------------------------------------------------------------------------------------------------------------


def test_ouro_is_the_point_of_the_design_space_it_should_be(ouro):
    c = ouro.config
    assert (c.prelude, c.core, c.coda, c.loops, c.boundary, c.block) == (0, 3, 0, 4, 1, "sandwich")
    assert ouro.dtype is torch.float32 and not ouro.training


@pytest.mark.parametrize("T", [1, 2, 3, 4, 8])
def test_ouro_logits_at_every_loop_count(ouro, T):
    close(ouro(OURO["input_ids"], loops=T).logits, OURO[f"T{T}.logits"])


@pytest.mark.parametrize("T", [4, 8])
def test_ouro_states_raw_and_normalised(ouro, T):
    states = list(ouro.trajectory(OURO["input_ids"], T))
    for k, z in enumerate(states):
        close(z, OURO[f"T{T}.loop{k}.pre_norm"])
        close(ouro.norm(z), OURO[f"T{T}.loop{k}.post_norm"])


def test_ouro_layer_outputs(ouro):
    context = ouro.context(OURO["input_ids"])
    z = ouro.embed(OURO["input_ids"])
    for loop in range(2):
        z = ouro.normalise(z) if every(1).fires_before(loop) else z
        for i, block in enumerate(ouro.core):
            z = block(z, context)
            close(z, OURO[f"T4.loop{loop}.layer{i}.out"])


def test_ouro_cache(ouro):
    cache = LoopedCache()
    ouro(OURO["input_ids"], loops=4, cache=cache)
    for i, (keys, values, _) in enumerate(cache):
        close(keys, OURO["T4.cache_keys"][i])
        close(values, OURO["T4.cache_values"][i])
    assert len(cache) == len(OURO["T4.cache_keys"]) == 12


def test_ouro_padded_batches_and_rows_alone(ouro):
    for i, n in enumerate(OURO["lengths"].tolist()):
        alone = ouro(OURO["input_ids"][i : i + 1, :n]).logits[0]
        close(alone, OURO[f"T4.unpadded_row{i}_logits"])
        for side in ("left", "right"):
            mask = OURO[f"{side}_mask"]
            together = ouro(OURO[f"{side}_ids"], attention_mask=mask).logits[i][mask[i].bool()]
            close(together, OURO[f"T4.{side}_logits"][i][mask[i].bool()])
            close(together, alone)
    real = OURO["left_mask"].bool()
    close(ouro(OURO["left_ids"], attention_mask=OURO["left_mask"]).logits[real], OURO["T4.left_logits_posids"][real])


def test_ouro_exits(ouro):
    states = list(ouro.trajectory(OURO["input_ids"], 4))
    gates = exits.gate_logits(ouro, states)
    close(gates, OURO["T4.gate_logits"])
    p = exits.distribution(gates)
    close(p, OURO["T4.exit_pdf"])
    for threshold in (0.3, 0.6, 0.9):
        assert torch.equal(exits.steps(p, threshold), OURO[f"T4.exit_step_threshold_{threshold}"])
        close(ouro(OURO["input_ids"], exit_threshold=threshold).logits, OURO[f"T4.logits_threshold_{threshold}"])
    weighted = exits.weighted_logits(ouro, states)
    close(weighted, OURO["T4.logits_weighted"])
    ids = OURO["input_ids"]
    loss = torch.nn.functional.cross_entropy(weighted[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    close(loss[None], OURO["T4.loss_labels_eq_inputs"])
    close(ouro(ids, labels=ids).loss[None], OURO["T4.loss_last_loop"])


@pytest.mark.parametrize("use_cache", [True, False])
def test_ouro_greedy_tokens_alone_and_in_padded_batches(ouro, use_cache):
    expected = OURO["T4.greedy_tokens"]
    how = {"max_new_tokens": expected.shape[1], "do_sample": False, "use_cache": use_cache, "eos_token_id": None}
    for i, n in enumerate(OURO["lengths"].tolist()):
        row = OURO["input_ids"][i : i + 1, :n]
        assert torch.equal(ouro.generate(row, **how)[0, n:], expected[i])
    for side in ("left", "right"):
        ids, mask = OURO[f"{side}_ids"], OURO[f"{side}_mask"]
        together = ouro.generate(ids, attention_mask=mask, **how)
        assert torch.equal(together[:, : ids.shape[1]], ids), "the prompt comes back as it was given"
        assert torch.equal(together[:, ids.shape[1] :], expected), side


def test_ouro_stops_at_both_end_tokens_and_pads_with_zero(ouro):
    assert ouro.generation_config.eos_token_id == [0, 2] and ouro.generation_config.pad_token_id == 0


def test_ouro_in_bf16_reads_the_last_loop():
    model = released.load(FOLDER / "ouro-tiny", dtype=torch.bfloat16)
    assert model.dtype is torch.bfloat16
    logits = model(OURO["input_ids"]).logits.float()
    reference = OURO["T4.logits_bf16_last_loop_as_f32"]
    exact = OURO["T4.logits"]
    assert (logits - exact).square().mean() < 2 * (reference - exact).square().mean(), "no worse than the reference's bf16"


# --- Huginn ---------------------------------------------------------------------------------------------------------------

STARTS = ("given", "zero")


def start(which):
    return HUGINN["input_states"] if which == "given" else torch.zeros_like(HUGINN["input_states"])


def test_huginn_is_the_point_of_the_design_space_it_should_be(huginn):
    c = huginn.config
    assert (c.prelude, c.core, c.coda, c.loops, c.boundary, c.block) == (1, 2, 1, 4, 0, "sandwich_sum")
    assert huginn.lm_head.weight is huginn.embed_tokens.weight


@pytest.mark.parametrize("which", STARTS)
def test_huginn_states_latents_and_logits(huginn, which):
    ids = HUGINN["input_ids"]
    close(huginn.embed(ids), HUGINN["prelude_out"])
    for k, z in enumerate(huginn.trajectory(ids, 8, initial_state=start(which)), start=1):
        close(z, HUGINN[f"{which}.state{k}"])
        if k in (1, 2, 4, 8):
            close(huginn.norm(z), HUGINN[f"{which}.r{k}.latent"])
            close(huginn(ids, loops=k, initial_state=start(which)).logits, HUGINN[f"{which}.r{k}.logits"])


@pytest.mark.parametrize("which", STARTS)
def test_huginn_adapter_and_coda(huginn, which):
    ids = HUGINN["input_ids"]
    e = huginn.embed(ids)
    close(huginn.injection(start(which), e), HUGINN[f"{which}.adapter_out1"])
    *_, z = huginn.trajectory(ids, 8, initial_state=start(which))
    x = huginn.norm(z)
    for block in huginn.coda:
        x = block(x, huginn.context(ids))
    close(x, HUGINN[f"{which}.r8.coda_out"])
    close(huginn.norm(x), HUGINN[f"{which}.r8.head_in"])


def test_huginn_cache_and_loss(huginn):
    ids, cache, c = HUGINN["input_ids"], LoopedCache(), huginn.config
    logits = huginn(ids, loops=4, initial_state=start("given"), cache=cache).logits
    for row, theirs in enumerate(HUGINN["given.r4.cache_slots"].tolist()):
        if theirs < 0:
            ours = slot(c, "coda", -theirs - 1)
        elif theirs < c.prelude:
            ours = slot(c, "prelude", theirs)
        else:
            ours = slot(c, "core", (theirs - c.prelude) % c.core, (theirs - c.prelude) // c.core)
        close(cache.layers[ours].keys, HUGINN["given.r4.cache_keys"][row])
        close(cache.layers[ours].values, HUGINN["given.r4.cache_values"][row])
    assert len(cache) == len(HUGINN["given.r4.cache_slots"])
    close(
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())[None], HUGINN["given.r4.loss_labels_eq_inputs"]
    )


def test_huginn_greedy_tokens_from_zeros_grown_by_hand_and_with_a_cache(huginn):
    expected, n = HUGINN["zero.r4.greedy_tokens"], HUGINN["input_ids"].shape[1]
    ids, cache, part = HUGINN["input_ids"], LoopedCache(), HUGINN["input_ids"]
    for _ in range(expected.shape[1]):
        whole = huginn(ids, loops=4, initial_state=torch.zeros(*ids.shape, 48)).logits[:, -1]
        cached = huginn(part, loops=4, initial_state=torch.zeros(*part.shape, 48), cache=cache).logits[:, -1]
        close(cached, whole)
        part = whole.argmax(-1, keepdim=True)
        ids = torch.cat([ids, part], dim=1)
    assert torch.equal(ids[:, n:], expected)


def test_huginn_default_state_has_the_published_spread(huginn):
    z = huginn.init_state(torch.zeros(1, 4000, 48))
    assert abs(z.std() - 0.6243) < 0.005 and 1.85 < z.abs().max() <= 1.8975


def test_huginn_in_bf16(huginn):
    model = released.load(FOLDER / "huginn-tiny", dtype="bfloat16")
    state = start("given").bfloat16()
    logits = model(HUGINN["input_ids"], loops=4, initial_state=state).logits.float()
    reference, exact = HUGINN["given.r4.logits_bf16_as_f32"], HUGINN["given.r4.logits"]
    assert (logits - exact).square().mean() < 2 * (reference - exact).square().mean(), "no worse than the reference's bf16"


# --- the axes paper -------------------------------------------------------------------------------------------------------

BOS = 1
TIGHT = {"atol": 1e-5, "rtol": 1e-5}
STATES = {"atol": 3e-5, "rtol": 1e-5}  # the sums of states are larger; a float64 pass differs from the golden one by as much
AXES = sorted(FOLDER.glob("xllm-*"))  # a folder that is added is read by its README.json and golden tensors
COVERED = {
    *("input_ids", "input_ids_segments", "embed_out", "prelude_output", "initial_state", "first_update_input"),
    *("state_after_update", "logits", "logits_segments", "logits_reuse_update1_experts"),
    *("aux_per_execution", "router_indices_per_execution", "router_weights_per_execution"),
}


@pytest.fixture(scope="module", params=AXES, ids=lambda folder: folder.name)
def axes(request):
    """(model, golden tensors, README.json, the initial state as `forward` takes it) of one recipe."""
    golden = load_file(request.param / "golden.safetensors")
    model = released.load(request.param / "artifact", dtype=torch.float32)
    given = {"initial_state": golden["initial_state"]} if "initial_state" in golden else {}
    return model, golden, json.loads((request.param / "README.json").read_text()), given


def updates(model, ids, given):
    """What each update of the trained loop count made: of H/L states the one that it updated."""
    c = model.config
    for t, z in enumerate(model.trajectory(ids, **given)):
        yield z[..., -c.d_model :] if c.updates_low(t) else z[..., : c.d_model]


def test_the_recipes_are_there_and_every_golden_tensor_is_compared(axes):
    assert {"xllm-dense_huginn-tiny", "xllm-dense_ouro-tiny", "xllm-dense_shared_hl-tiny", "xllm-moe_huginn-tiny"} <= {
        folder.name for folder in AXES
    }
    _, golden, readme, _ = axes
    assert set(golden) <= COVERED and set(golden) - {"input_ids"} - set(readme["tensors"]) <= {"input_ids_segments"}


def test_axes_paper_states_and_logits(axes):
    model, golden, _, given = axes
    ids = golden["input_ids"]
    close(model.tokens(ids), golden["embed_out"], **TIGHT)
    close(model(ids, **given).logits, golden["logits"], **TIGHT)
    if "prelude_output" in golden:
        close(model.embed(ids), golden["prelude_output"], **TIGHT)
    if "first_update_input" in golden:
        start = golden["initial_state"] if given else golden.get("prelude_output", golden["embed_out"])
        expected = start if model.config.state == "single" else start + golden["prelude_output"]
        close(golden["first_update_input"], expected, **TIGHT)
    if "state_after_update" in golden:
        found = list(updates(model, ids, given))
        assert len(found) == len(golden["state_after_update"]) == model.config.loops
        for ours, theirs in zip(found, golden["state_after_update"], strict=True):
            close(ours, theirs, **STATES)


def test_axes_paper_initial_states(axes):
    model, golden, _, given = axes
    ids = golden["input_ids"]
    if model.config.state_init != "noise":
        close(model(ids).logits, golden["logits"], **TIGHT)
        return
    rows = torch.arange(len(ids))
    D = model.config.d_model
    start = model.init_state(model.embed(ids), hashed(torch.arange(ids.shape[1])[None], D, rows))
    close(start[..., -D:], golden["initial_state"], **TIGHT)
    close(model(ids, state_rows=rows).logits, golden["logits"], atol=1e-3, rtol=0)


def test_axes_paper_segments(axes):
    model, golden, _, given = axes
    documents = golden["input_ids_segments"]
    segments = (documents == BOS).cumsum(1)
    close(model(documents, segments=segments, **given).logits, golden["logits_segments"], **TIGHT)
    assert not torch.allclose(model(documents, **given).logits, golden["logits_segments"], atol=1e-2), "segments matter"


def test_axes_paper_execution_order(axes):
    model, golden, readme, given = axes
    order, hooks = [], []
    for i, block in enumerate([*model.prelude, *model.core, *model.coda]):
        hooks.append(block.register_forward_hook(lambda *_, i=i: order.append(i)))
    try:
        model(golden["input_ids"], **given)
    finally:
        for hook in hooks:
            hook.remove()
    assert order == readme["physical_layer_execution_order"] and len(order) == model.config.executed_layers


def test_axes_paper_routing(axes):
    model, golden, readme, given = axes
    if model.config.feed_forward == "dense":
        assert "aux_per_execution" not in golden
        return
    ids, routes = golden["input_ids"], Routes()
    close(model(ids, routes=routes, **given).logits, golden["logits"], **TIGHT)
    chosen, weights = golden["router_indices_per_execution"], golden["router_weights_per_execution"]
    assert len(routes.executions) == len(chosen) == model.config.executed_layers
    for found, their_ids, their_weights in zip(routes.executions, chosen, weights, strict=True):
        assert torch.equal(found.ids.view(their_ids.shape), their_ids.long())
        close(found.weights.view(their_weights.shape), their_weights, atol=1e-6, rtol=0)
    close(routes.balances(), golden["aux_per_execution"], atol=1e-6, rtol=0)
    mean = golden["aux_per_execution"].double().mean().item()
    assert routes.balance().item() == pytest.approx(mean, abs=1e-6)
    assert readme.get("mean_aux_over_executions", mean) == pytest.approx(mean, abs=1e-6)
    if "logits_reuse_update1_experts" in golden:
        forced = model(ids, routes=Routes("first"), **given).logits
        close(forced, golden["logits_reuse_update1_experts"], **TIGHT)
        assert not torch.allclose(forced, golden["logits"], atol=1e-2), "the intervention matters"


# recipe -> its tiny `model` section: every published topology
RECIPES = {
    "dense_ouro": (checkpoints.RAW, {"loop_input_injection": "none"}),
    "dense_ouro_raw_injection": (checkpoints.RAW, {}),
    "dense_middle": (checkpoints.AXES, {"huginn_input_injection": "none", "huginn_state_init": "input"}),
    "dense_huginn": (checkpoints.AXES, {}),
    "shared_hl": (checkpoints.SHARED, {}),
    "split_hl": (checkpoints.SPLIT, {}),
    "split_hl_x2": (checkpoints.SPLIT, {"huginn_split_module_repeats": 2}),
    "moe_ff112": (checkpoints.RAW | checkpoints.EXPERTS, {"loop_times": 1, "loop_input_injection": "none"}),
    "moe_ff112_prelude_injection": (checkpoints.WRITTEN, {}),
    "moe_ouro": (checkpoints.RAW | checkpoints.EXPERTS, {"loop_input_injection": "none"}),
    "moe_middle": (checkpoints.AXES | checkpoints.EXPERTS, {"huginn_input_injection": "none", "huginn_state_init": "input"}),
    "moe_huginn": (checkpoints.AXES | checkpoints.EXPERTS, {}),
    "moe_shared_hl": (checkpoints.SHARED | checkpoints.EXPERTS, {}),
}


@pytest.mark.parametrize("base, values", RECIPES.values(), ids=RECIPES)
def test_every_published_topology_against_its_stored_tensors(base, values, tmp_path):
    folder = checkpoints.axes(tmp_path / "model", base=base, **values)
    stored = {}
    for file in folder.glob("*.safetensors"):
        stored |= load_file(file)
    section = json.loads((folder / "config.json").read_text())["model"]
    model = released.load(folder, dtype=torch.float64)
    assert_transcribed(model, stored, section, tokens(2, 9, vocab=200))


@pytest.mark.parametrize("folder", AXES, ids=lambda folder: folder.name)
def test_the_transcription_agrees_with_the_golden_tensors(folder):
    golden, stored = (load_file(folder / f"{name}.safetensors") for name in ("golden", "model"))
    section = json.loads((folder / "config.json").read_text())["model"]
    z0 = golden["initial_state"].double().numpy() if "initial_state" in golden else [None] * 2
    for row in range(2):
        logits, states = reference.published(stored, section, golden["input_ids"][row].numpy(), z0[row])
        np.testing.assert_allclose(logits, golden["logits"][row], atol=1e-5)
        updated = golden.get("state_after_update", [])
        for ours, theirs in zip(states, updated, strict=True) if section["arch"] == "huginn" else ():
            np.testing.assert_allclose(ours, theirs[row], **STATES)


def assert_transcribed(model, stored, section, ids):
    c, routes = model.config, Routes()
    z0 = torch.randn(*ids.shape, c.d_model, generator=torch.Generator().manual_seed(0)).double()
    given = {"initial_state": z0} if c.state_init == "noise" else {}
    logits, found = model(ids, routes=routes, **given).logits, list(updates(model, ids, given))
    for row in range(len(ids)):
        record = []
        expected, states = reference.published(stored, section, ids[row].numpy(), z0[row].numpy(), record)
        np.testing.assert_allclose(logits[row], expected, atol=1e-9)
        if not c.unrolled:
            assert len(states) == len(found)
            for ours, theirs in zip(found, states, strict=True):
                np.testing.assert_allclose(ours[row], theirs, atol=1e-9)
        assert [e.ids.view(*ids.shape, -1)[row].tolist() for e in routes.executions] == record


def test_every_value_of_the_stored_fixture_arrives():
    folder = FOLDER / "xllm-dense_huginn-tiny"
    stored = load_file(folder / "model.safetensors")
    weights = released.load(folder / "artifact", dtype=torch.float32).state_dict()
    assert torch.equal(weights["prelude.1.attention_norm.weight"], 1 + stored["layers.1.attention.norm.weight"])
    assert torch.equal(weights["core.0.attention.qkv.weight"][32:40], stored["layers.2.attention.wk.weight"])
    assert torch.equal(weights["coda.1.feed_forward.gate_up.weight"][88:], stored["layers.7.nffn.fc3.weight"])
    assert sum(w.numel() for w in weights.values()) == sum(w.numel() for w in stored.values())


def test_every_expert_of_the_stored_fixture_arrives():
    folder = FOLDER / "xllm-moe_huginn-tiny"
    stored = load_file(folder / "model.safetensors")
    weights = released.load(folder / "artifact", dtype=torch.float32).state_dict()
    gate, up, down = (weights[f"core.1.feed_forward.{part}"] for part in ("gate", "up", "down"))
    for e in (0, 7, 24):
        assert torch.equal(gate[e], stored["layers.3.moe.experts.weight1"][e * 8 : (e + 1) * 8])
        assert torch.equal(up[e], stored["layers.3.moe.experts.weight3"][e * 8 : (e + 1) * 8])
        assert torch.equal(down[e], stored["layers.3.moe.experts.weight2"][e * 32 : (e + 1) * 32])
    assert torch.equal(weights["core.1.feed_forward.router.weight"], stored["layers.3.moe.router.weight"])
    assert torch.equal(weights["coda.0.feed_forward_norm.weight"], 1 + stored["layers.4.moe.norm.weight"])
    assert sum(w.numel() for w in weights.values()) == sum(w.numel() for w in stored.values())
