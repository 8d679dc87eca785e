"""Published families against golden tensors of their own code: states, logits, caches, padding, exits, generation."""

import json

import pytest
import torch
from safetensors.torch import load_file

from lib import exits, released
from lib.boundary import every
from lib.cache import LoopedCache, slot
from lib.noise import hashed
from tests.fixtures import FOLDER

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


@pytest.mark.parametrize("recipe", ["dense_huginn", "dense_ouro"])
def test_axes_paper_recipes(recipe):
    folder = FOLDER / f"xllm-{recipe}-tiny"
    golden = load_file(folder / "golden.safetensors")
    model = released.load(folder / "artifact", dtype=torch.float32)
    tight = {"atol": 1e-5, "rtol": 1e-5}
    ids = golden["input_ids"]
    given = {"initial_state": golden["initial_state"]} if "initial_state" in golden else {}
    close(model.tokens(ids), golden["embed_out"], **tight)
    close(model(ids, **given).logits, golden["logits"], **tight)
    if given:
        close(model.embed(ids), golden["prelude_output"], **tight)
        for k, z in enumerate(model.trajectory(ids, 8, **given)):
            close(z, golden["state_after_update"][k], **tight)
        rows = torch.arange(len(ids))
        close(model.init_state(model.embed(ids), _hash(model, ids, rows)), golden["initial_state"], **tight)
        close(model(ids, state_rows=rows).logits, golden["logits"], atol=1e-3, rtol=0)
    documents = golden["input_ids_segments"]
    segments = (documents == BOS).cumsum(1)
    close(model(documents, segments=segments, **given).logits, golden["logits_segments"], **tight)
    assert not torch.allclose(model(documents, **given).logits, golden["logits_segments"], atol=1e-2), "segments matter"
    order = json.loads((folder / "README.json").read_text())["physical_layer_execution_order"]
    c = model.config
    core = list(range(c.prelude, c.prelude + c.core)) * c.loops
    last = c.prelude + c.core + c.coda
    assert order == [*range(c.prelude), *core, *range(c.prelude + c.core, last)]


def _hash(model, ids, rows):
    return hashed(torch.arange(ids.shape[1])[None], model.config.d_model, rows)


def test_every_value_of_the_stored_fixture_arrives():
    folder = FOLDER / "xllm-dense_huginn-tiny"
    stored = load_file(folder / "model.safetensors")
    weights = released.load(folder / "artifact", dtype=torch.float32).state_dict()
    assert torch.equal(weights["prelude.1.attention_norm.weight"], 1 + stored["layers.1.attention.norm.weight"])
    assert torch.equal(weights["core.0.attention.qkv.weight"][32:40], stored["layers.2.attention.wk.weight"])
    assert torch.equal(weights["coda.1.feed_forward.gate_up.weight"][88:], stored["layers.7.nffn.fc3.weight"])
    assert sum(w.numel() for w in weights.values()) == sum(w.numel() for w in stored.values())
