"""Models written in the axes paper's layout: every published recipe there and back bitwise, and what has no place in it."""

import hashlib
import json
import re

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from lib import checkpoint, export_axes, families, family_axes, manifest, paths, released
from lib.config import LoopedConfig
from lib.export_axes import export, meaning, packed, plan_of, rounded, section_of
from tests import checkpoints
from tests.fixtures import FOLDER
from tests.models import EXPERTS, VARIANTS, small, tokens

SMALL = {"model_dim": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "rope_head_dim": 8, "ffn_hidden_dim": 40}
SMALL |= {"huginn_prelude_layers": 1, "huginn_recurrent_layers": 2, "huginn_coda_layers": 1}
SMALL |= {"num_experts": 5, "expert_inter_dim": 8}
WRITES = {"dense_prelude_input_layers": "1,3,5", "dense_prelude_source_layer": 0, "num_layers": 8}
FIXTURES = sorted(FOLDER.glob("xllm-*"))


def tiny(section: dict) -> dict:
    """A published recipe's `model` section with fewer and narrower layers of the same kinds."""
    layers = {"num_layers": 4 if section["num_layers"] == 28 else 6}
    written = WRITES if "dense_prelude_input_layers" in section else {}
    experts = SMALL if section["num_experts"] else SMALL | {"num_experts": 0}
    return section | {key: value for key, value in experts.items() if key in section} | layers | written


def recipes() -> dict[str, dict]:
    """The catalogue's distinct `model` sections, tiny, each by the name of its first checkpoint."""
    group, found = yaml.safe_load((paths.params() / "models.yaml").read_text())["axes"], {}
    for id, own in group["checkpoints"].items():
        section = group["config"] | (own or {})
        if section not in found.values():
            found[id.split("P1-")[-1]] = section
    return {name: tiny(section) for name, section in found.items()}


RECIPES = recipes()


def words(size: int) -> PreTrainedTokenizerFast:
    """A tokenizer of so many words."""
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({f"w{i}": i for i in range(size)}, "w0")))


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bpe")
    checkpoints.tokenizer(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def model_of(section: dict, vocab_size: int, seed: int = 0):
    """(a model with random gains and injections, its configuration) of a published section."""
    c = families.plan({"model": section | {"vocab_size": vocab_size}}, "config.json").config
    return small(seed, **{key: getattr(c, key) for key in LoopedConfig.__annotations__}), c


def once(x: torch.Tensor) -> torch.Tensor:
    """Numbers rounded to 8 significant bits, half to even, in float64: what bf16 holds of them."""
    mantissa, exponent = np.frexp(x.double().numpy())
    return torch.from_numpy(np.ldexp(np.rint(mantissa * 256) / 256, exponent))


def expected(model, dtype=torch.float32) -> dict[str, torch.Tensor]:
    """Each parameter as it should come back: rounded once, of a gain what it has above 1."""
    return {
        name: 1 + once(p.double() - 1).to(dtype) if "norm" in name else once(p).to(dtype)
        for name, p in model.named_parameters()
    }


def same(model, values: dict[str, torch.Tensor]) -> None:
    held = dict(model.named_parameters())
    assert held.keys() == values.keys()
    assert all(p.dtype == values[name].dtype and torch.equal(p, values[name]) for name, p in held.items())


def tensors(folder) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def weights(folder) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.glob("*.safetensors"))}


def test_the_seventeen_recipes_are_there():
    assert len(RECIPES) == 17 and {"dense-d28-336b", "moe-ff112-prelude-injection-336b"} <= RECIPES.keys()


@pytest.mark.parametrize("name", RECIPES)
def test_every_published_recipe_comes_back_bitwise(name, bpe, tmp_path):
    model, c = model_of(RECIPES[name], len(bpe))
    folder = export(model, bpe, tmp_path / "out", f"IFM/{name}")
    manifest.verify(folder)
    back = released.load(folder, dtype=torch.float32)
    assert meaning(back.config) == meaning(c)
    same(back, expected(model))
    twin = small(1, **{key: getattr(c, key) for key in LoopedConfig.__annotations__})
    twin.load_state_dict(expected(model))
    ids = tokens(2, 9, vocab=len(bpe))
    assert torch.equal(back(ids).logits, twin(ids).logits)
    assert not torch.equal(back(ids).logits, model(ids).logits), "rounding shows"
    again = export(back, released.tokenizer(folder), tmp_path / "again", f"IFM/{name}")
    assert weights(again) == weights(folder)
    narrow = released.load(folder)
    assert narrow.dtype is torch.bfloat16
    same(narrow, expected(model, torch.bfloat16))
    assert released.tokenizer(folder)(checkpoints.TEXT)["input_ids"] == bpe(checkpoints.TEXT)["input_ids"]


@pytest.mark.parametrize("name", RECIPES)
def test_the_section_is_the_published_one(name):
    section = section_of(families.plan({"model": RECIPES[name]}, "config.json").config)
    assert {key: section.get(key) for key in RECIPES[name]} == RECIPES[name]
    assert json.loads(json.dumps(section)) == section
    needed = family_axes.FIXED | (family_axes.ROUTING if section["num_experts"] else {})
    assert needed.keys() <= section.keys(), "whatever the published code takes for a missing key"


@pytest.mark.parametrize("entry", [e for e in released.catalogue() if e.id.startswith("IFM/")], ids=lambda e: e.id)
def test_full_size_recipes_have_the_same_tensors(entry):
    assert plan_of(entry.plan.config).pieces == entry.plan.pieces


@pytest.mark.parametrize("folder", FIXTURES, ids=lambda folder: folder.name)
def test_a_stored_artifact_comes_out_as_it_went_in(folder, tmp_path):
    model = released.load(folder / "artifact", dtype=torch.float32)
    out = export(model, words(model.config.vocab_size), tmp_path / "out", "tiny")
    mine, theirs = tensors(out), tensors(folder / "artifact")
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in theirs)
    stored = json.loads((folder / "artifact" / "config.json").read_text())["model"]
    section = json.loads((out / "config.json").read_text())["model"]
    both = section.keys() & stored.keys() - {"loop_end_layers"}  # null is the last one
    assert {key: section[key] for key in both} == {key: stored[key] for key in both} and len(both) > 20
    index = checkpoint.INDEX
    assert json.loads((out / index).read_text()) == json.loads((folder / "artifact" / index).read_text())


def test_files_and_what_they_say(bpe, tmp_path):
    model, _ = model_of(RECIPES["dense-huginn-336b"], len(bpe))
    out = export(model, bpe, tmp_path / "deep" / "er" / "out", "mine")
    config, index, listed = (
        json.loads((out / name).read_text()) for name in ("config.json", checkpoint.INDEX, "artifact_manifest.json")
    )
    assert config.keys() == {"model", "tokenizer"} and config["tokenizer"] == {"path": "tokenizer", "type": "huggingface"}
    assert index["metadata"]["total_size"] == sum(2 * t.numel() for t in tensors(out).values()) == 2 * model.num_parameters()
    assert listed["config_projection"] == "model_tokenizer_only" and listed["source"] == {"checkpoint_id": "mine"}
    assert listed["model"]["tensor_count"] == len(index["weight_map"]) == len(tensors(out))
    with safe_open(out / "model-00001-of-00001.safetensors", "pt") as f:
        assert f.metadata() == {"format": "xllm"}
    assert all(t.dtype is torch.bfloat16 for t in tensors(out).values())
    assert [path.name for path in out.parent.iterdir()] == ["out"], "nothing is left beside it"


def test_many_shards_hold_the_same(bpe, tmp_path):
    model, _ = model_of(RECIPES["moe-huginn-336b"], len(bpe))
    one, many = (export(model, bpe, tmp_path / str(most), "mine", most) for most in (2**30, 8000))
    manifest.verify(many)
    place, held = json.loads((many / checkpoint.INDEX).read_text())["weight_map"], tensors(many)
    files = sorted(set(place.values()))
    assert len(files) > 3 and files[-1] == f"model-{len(files):05d}-of-{len(files):05d}.safetensors"
    assert list(place) == sorted(place) and list(place.values()) == sorted(place.values()), "packed in the names' order"
    for file in files:
        sizes = [2 * held[name].numel() for name in place if place[name] == file]
        assert sum(sizes) <= 8000 or len(sizes) == 1
    whole = tensors(one)
    assert whole.keys() == held.keys() and all(torch.equal(whole[name], held[name]) for name in whole)
    same(released.load(many, dtype="float32"), expected(model))


@given(sizes=st.lists(st.integers(1, 20), max_size=12), most=st.integers(1, 40))
def test_packing_is_greedy_and_keeps_the_order(sizes, most):
    named = {f"{i:02d}": size for i, size in enumerate(sizes)}
    shards = packed(named, most)
    assert [name for names in shards for name in names] == list(named)
    for names, after in zip(shards, [*shards[1:], None], strict=False):
        filled = sum(named[name] for name in names)
        assert filled <= most or len(names) == 1
        assert after is None or filled + named[after[0]] > most


@given(bits=st.integers(0, 2**16), low=st.sampled_from((0, 1, -1, 2**28, -(2**28), 3)), seed=st.integers(0, 9))
def test_float64_is_rounded_once(bits, low, seed):
    tie = torch.tensor(1 + (2 * (bits % 128) + 1) / 256, dtype=torch.float64)  # half way between two bf16 numbers
    noise = torch.randn(9, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 2.0**seed
    x = torch.cat(((tie + low * 2.0**-52)[None], (-tie + low * 2.0**-50)[None], noise))
    assert torch.equal(rounded(x).double(), once(x))
    assert torch.equal(rounded(x.float()).double(), once(x.float()))


def test_float64_and_bf16_models_and_far_gains_are_rounded_once(tmp_path):
    values = {"rope": "interleaved", "injection": "diagonal", "n_heads": 2}
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        model = small(envelope="sandwich", **values).to(dtype)
        for name, p in model.named_parameters():
            if "norm" in name:
                p.mul_(torch.logspace(-6, 3, p.numel(), dtype=dtype))  # 1 may be lost in them, or all but it
        folder = export(model, words(23), tmp_path / str(dtype), "mine")
        stored, held = tensors(folder), dict(model.named_parameters())
        for piece in plan_of(model.config).pieces:
            rows = held[piece.target][piece.row : piece.row + piece.shape[0]]
            assert torch.equal(stored[piece.source].double(), once(rows.double() - piece.add)), piece
        assert all(p.dtype is dtype for p in model.parameters()), "the model is as it was"


# --- what has no place in the layout --------------------------------------------------------------------------------------

AXES = {"rope": "interleaved"}
TOKENS = {"injection": "diagonal", "injection_source": "tokens"}
NOISE = {"state_init": "noise", "state_noise": "hash", "state_std": 0.25}
HL = {"state": "shared", "h_cycles": 2, "l_cycles": 1}
REFUSED = {
    "boundary": ({"boundary": 1}, "boundary is 1: .* must be 0"),
    "two norms": ({"shared_norm": False}, "shared_norm is False: .* must be True"),
    "sandwich norms": ({"block": "sandwich"}, "block is 'sandwich': .* must be 'pre_norm'"),
    "sum norms": ({"block": "sandwich_sum"}, "block is 'sandwich_sum': .* must be 'pre_norm'"),
    "raw readout": ({"readout": "raw"}, "readout is 'raw': .* must be 'normalised'"),
    "norm, coda, norm": ({"readout_order": "norm_coda_norm"}, "readout_order is 'norm_coda_norm': .* must be 'coda_norm'"),
    "adapter": ({"injection": "concat"}, "injection is 'concat': .* must be 'diagonal'"),
    "biases": ({"qk_bias": True}, "qk_bias is True: .* must be False"),
    "gate": ({"exit_gate": True}, "exit_gate is True: .* must be False"),
    "early exits": ({"exit_threshold": 0.5}, "exit_threshold is 0.5: .* must be 1.0"),
    "halves": ({"rope": "half"}, "rope is 'half': .* must be 'interleaved'"),
    "tied": ({"tie_word_embeddings": True}, "tie_word_embeddings is True: .* must be False"),
    "scaled": ({"embedding_scale": 4.0}, "embedding_scale is 4.0: .* must be 1.0"),
    "wide noise": (NOISE | {"state_std": 1.0}, "state_std is 1.0: .* must be 0.25"),
    "other noise": (NOISE | {"state_noise": "normal"}, "state_noise is 'normal': .* must be 'hash'"),
    "tokens into a noise state": (
        {
            "state_init": "noise",
            "state_noise": "hash",
            "state_std": 0.25,
            "injection": "diagonal",
            "injection_source": "tokens",
        },
        "injection_source is 'tokens': .* must be 'prelude'",
    ),
    "tokens into two states": (
        HL | TOKENS,
        "injection_source is 'tokens': .* must be 'prelude'",
    ),
    "repeats of one state": ({"repeats": 2}, "repeats is 2: .* must be 1"),
    "repeats of shared layers": (HL | {"repeats": 2}, "repeats is 2: .* must be 1"),
    "unrolled, nothing written": ({"unrolled": True}, "unrolled is True: .* must be False"),
    "unrolled, no prelude": ({"unrolled": True, "injection": "diagonal", "prelude": 0}, "prelude is 0: .* must be 1"),
    "unrolled, one step": ({"unrolled": True, "injection": "diagonal", "loops": 1}, "core is 2: .* must be 3"),
    "unrolled, tokens": (
        {"unrolled": True} | TOKENS,
        "injection_source is 'tokens': .* must be 'prelude'",
    ),
    "unrolled from zeros": (
        {"unrolled": True, "injection": "diagonal", "state_init": "zeros"},
        "state_init is 'zeros': .* must be 'input'",
    ),
}


@pytest.mark.parametrize("values, said", REFUSED.values(), ids=REFUSED)
def test_what_the_layout_has_no_way_to_say_is_one_sentence(values, said, tmp_path):
    model = small(envelope="sandwich", **(AXES | values))
    with pytest.raises(ValueError, match=f"^{said}, beside the rest of this configuration$"):
        export(model, words(23), tmp_path / "out", "mine")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("state_init", ["input", "zeros"])
@pytest.mark.parametrize("source", ["prelude", "tokens"])
def test_without_a_prelude_both_sources_are_one(source, state_init, tmp_path):
    model = small(**AXES, injection="diagonal", injection_source=source, state_init=state_init)
    back = released.load(export(model, words(23), tmp_path / "out", "mine"), dtype="float32")
    model.load_state_dict(expected(model))
    assert torch.equal(back(tokens()).logits, model(tokens()).logits)


def test_another_tokenizer_no_name_and_a_folder_that_is_there_are_refused(tmp_path):
    model, name = small(**AXES), tmp_path / "out"
    with pytest.raises(ValueError, match="^vocab_size is 23: it must be 24, the tokens of the tokenizer$"):
        export(model, words(24), name, "mine")
    with pytest.raises(ValueError, match="^checkpoint_id is empty"):
        export(model, words(23), name, "")
    assert not list(tmp_path.iterdir())
    name.mkdir()
    for path in (name, tmp_path / "link"):
        if path != name:
            path.symlink_to(tmp_path / "nowhere")
        with pytest.raises(ValueError, match=f"^{path} is there already: it must be a new folder$"):
            export(model, words(23), path, "mine")
    assert not list(name.iterdir())


def test_weights_that_are_not_the_configurations_or_not_finite_are_refused(tmp_path):
    model = small(**AXES)
    model.extra = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="^the model holds [0-9]+ numbers: it must hold [0-9]+, those"):
        export(model, words(23), tmp_path / "out", "mine")
    for value in (float("nan"), float("inf"), 3.4e38, 1e300):  # the last two become infinite
        model = small(**AXES).double()
        model.core[1].attention.qkv.weight[-1, 3] = value
        with pytest.raises(ValueError, match="^core.1.attention.qkv.weight is not finite everywhere: every weight must"):
            export(model, words(23), tmp_path / "out", "mine")
    assert not list(tmp_path.iterdir()), "and nothing is left"


def test_a_kill_leaves_no_half_export(tmp_path, monkeypatch):
    seen = []

    def interrupt(*_, **__):
        seen.extend(path.name for path in tmp_path.iterdir())
        raise KeyboardInterrupt

    monkeypatch.setattr(export_axes, "_write_manifest", interrupt)
    with pytest.raises(KeyboardInterrupt):
        export(small(**AXES), words(23), tmp_path / "out", "mine")
    assert len(seen) == 1 and re.fullmatch(r"\.out\..+\.tmp", seen[0]) and not list(tmp_path.iterdir())


def test_a_tokenizer_without_a_tokenizer_json_is_refused(tmp_path, monkeypatch):
    slow = words(23)
    monkeypatch.setattr(slow, "save_pretrained", lambda folder: folder.mkdir())
    with pytest.raises(ValueError, match="it must be one that is saved as tokenizer.json"):
        export(small(**AXES), slow, tmp_path / "out", "mine")


def mostly(usual, *others):
    """The usual value, or now and then another."""
    return st.sampled_from((*[usual] * 20, *others))


CONFIGS = st.fixed_dictionaries(
    {
        "prelude": st.integers(0, 2),
        "core": st.integers(1, 4),
        "coda": st.integers(0, 2),
        "loops": st.integers(1, 4),
        "n_heads": st.sampled_from((1, 2, 4)),
        "n_kv_heads": st.sampled_from((None, 1)),
        "head_dim": st.sampled_from((None, 6)),
        "unrolled": st.sampled_from((False, False, True)),
        "block": mostly("pre_norm", "sandwich", "sandwich_sum"),
        "experts": st.booleans(),
        "injection": st.sampled_from(("none", *["diagonal"] * 3)) | mostly("diagonal", "concat"),
        "injection_source": mostly("prelude", "tokens"),
        "injection_bias": mostly(False, True),
        "state": st.sampled_from(("single", "single", "shared", "split")),
        "h_cycles": st.integers(1, 2),
        "l_cycles": st.integers(1, 2),
        "repeats": mostly(1, 2),
        "state_init": st.sampled_from(("input", "zeros", "noise")),
        "state_std": mostly(0.25, 1.0),
        "state_noise": mostly("hash", "normal", "truncated"),
        "boundary": mostly(0, 1),
        "shared_norm": mostly(True, False),
        "readout": mostly("normalised", "raw"),
        "exit_gate": mostly(False, True),
        "rope": mostly("interleaved", "half"),
        "rope_theta": st.floats(1, 1e7),
        "norm_eps": st.sampled_from((1e-6, 1e-5, 0.1)),
        "embedding_std": st.sampled_from((1.0, 0.02)),
        "embedding_scale": mostly(1.0, 2.0),
        "tie_word_embeddings": mostly(False, True),
    }
)


def possible(values: dict) -> dict:
    """The values made ones that a configuration can have."""
    values = values | (EXPERTS if values.pop("experts") else {})
    if values["state"] == "single":
        return values | {"h_cycles": 0, "l_cycles": 0}
    even = {"core": 2 * values["core"]} if values["state"] == "split" else {}
    loops = {"loops": values["h_cycles"] * (values["l_cycles"] + 1)}
    return values | even | loops | {"unrolled": False, "exit_gate": False}


@settings(max_examples=60, deadline=None)
@given(values=CONFIGS.map(possible), seed=st.integers(0, 99))
def test_any_model_comes_back_or_is_refused_with_a_key(values, seed, tmp_path_factory):
    model, folder = small(seed, **values), tmp_path_factory.mktemp("any") / "out"
    with torch.no_grad():
        try:
            export(model, words(23), folder, "mine")
        except ValueError as error:
            key = re.fullmatch(r"(\w+) is .+: in the axes paper's layout it must be .+", str(error))[1]
            assert key in values.keys() | {"feed_forward"} and not folder.exists()
            return
        manifest.verify(folder)
        back = released.load(folder, dtype="float32")
        assert meaning(back.config) == meaning(model.config)
        rounded_once = expected(model)
        model.load_state_dict(rounded_once)
        assert torch.equal(back(tokens()).logits, model(tokens()).logits)


# --- this project's own layout --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_our_own_layout_comes_back_bitwise(name, tmp_path):
    model, folder = small(envelope="sandwich", **VARIANTS[name]), tmp_path / "ours"
    with export_axes.staged(folder) as inside:
        model.save_pretrained(inside)
        words(23).save_pretrained(inside)
    back = released.load(folder)
    held, found = model.state_dict(), back.state_dict()
    assert held.keys() == found.keys() and all(torch.equal(held[key], found[key]) for key in held)
    assert {key: getattr(back.config, key) for key in LoopedConfig.__annotations__} == {
        key: getattr(model.config, key) for key in LoopedConfig.__annotations__
    }
    assert torch.equal(back(tokens()).logits, model(tokens()).logits)
    assert released.tokenizer(folder).convert_tokens_to_ids(["w3", "w22"]) == [3, 22]
