"""Small checkpoints in the published layouts, random, with a real BPE tokenizer: what a downloaded folder looks like."""

import hashlib
import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from lib import families

TEXT = [
    "A looped model applies one stack of layers again and again, and depth becomes a number.",
    "Which gate is one, and which is zero? Follow the pointer from a to q, then from q to z.",
    "The state is normalised at the boundary of the loop, or it is not; the readout was trained on one of the two.",
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

OURO = {
    "architectures": ["OuroForCausalLM"],
    "model_type": "ouro",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "total_ut_steps": 3,
    "early_exit_threshold": 1.0,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "torch_dtype": "bfloat16",
}
HUGINN = {
    "model_type": "huginn_raven",
    "architectures": ["RavenForCausalLM"],
    "n_embd": 24,
    "n_heads": 2,
    "intermediate_size": 40,
    "n_layers": 8,
    "n_layers_in_prelude": 2,
    "n_layers_in_recurrent_block": 4,
    "n_layers_in_coda": 2,
    "mean_recurrence": 3,
    "block_size": 64,
    "bias": False,
    "qk_bias": True,
    "tie_embeddings": True,
    "injection_type": "linear",
    "state_init": "like-init",
    "rope_base": 50000,
    "norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 0,
    "pad_token_id": 2,
    "torch_dtype": "float32",
}
AXES = {
    "arch": "huginn",
    "num_layers": 4,
    "loop_times": 3,
    "model_dim": 32,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "rope_head_dim": 8,
    "ffn_hidden_dim": 40,
    "rope_base": 1000000,
    "rmsnorm_eps": 1e-6,
    "apply_rmsnorm": True,
    "swiglu": True,
    "num_experts": 0,
    "huginn_prelude_layers": 1,
    "huginn_recurrent_layers": 2,
    "huginn_coda_layers": 1,
    "huginn_state_init": "normal",
    "huginn_input_injection": "diagonal",
    "huginn_hierarchical_state": "none",
}
SHARED = AXES | {
    "loop_times": 6,
    "huginn_hierarchical_state": "shared_hl",
    "huginn_hierarchical_h_cycles": 2,
    "huginn_hierarchical_l_cycles": 2,
}
SPLIT = SHARED | {"num_layers": 6, "huginn_recurrent_layers": 4, "huginn_hierarchical_state": "split_hl"}
EXPERTS = {
    "num_experts": 5,
    "num_activated_experts": 2,
    "expert_inter_dim": 8,
    "moe_router_score_func": "sigmoid",
    "moe_router_scaling_factor": None,
    "moe_router_bias": False,
    "num_dense_layers": None,
}
RAW = AXES | {"arch": "transformer", "loop_input_injection": "diagonal", "loop_start_layer": 0, "loop_end_layers": None}
# a feed-forward model that writes the first layer's output into three later ones
WRITTEN = (
    RAW
    | EXPERTS
    | {
        "num_layers": 8,
        "loop_times": 1,
        "loop_input_injection": "none",
        "dense_prelude_input_injection": "diagonal",
        "dense_prelude_input_layers": "1,3,5",
        "dense_prelude_source_layer": 0,
    }
)


def tokenizer(folder: Path) -> int:
    """A byte-level BPE trained on three sentences, saved in a folder; returns its size."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet))
    PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=SPECIAL[0]).save_pretrained(folder)
    return bpe.get_vocab_size()


def tensors(config: dict, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random tensors with the names and shapes of a configuration."""
    generator = torch.Generator().manual_seed(seed)

    def draw(name, shape):
        if "norm" in name or name.endswith("ln_f.weight"):
            gain = 0.2 * torch.randn(shape, generator=generator)
            return gain if "model" in config else 1 + gain
        return torch.randn(shape, generator=generator) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.3)

    return {p.source: draw(p.source, p.shape) for p in families.plan(config, "config.json").pieces}


def write(folder: Path, config: dict, stored: dict[str, torch.Tensor], shards: int = 1) -> Path:
    """A checkpoint as the hub holds it, in one file, or in several with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    native = "model" in config
    if native:
        stored = {name: t.bfloat16() for name, t in stored.items()}
    if shards == 1 and not native:
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = sorted(stored)
    size, place = math.ceil(len(names) / shards), {}
    for i in range(shards):
        own = names[i * size : (i + 1) * size]
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        save_file({name: stored[name] for name in own}, folder / file, metadata={"format": "xllm" if native else "pt"})
        place |= dict.fromkeys(own, file)
    total = sum(t.numel() * t.element_size() for t in stored.values())
    index = {"metadata": {"total_size": total}, "weight_map": place}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def manifest(folder: Path, **changes) -> None:
    """Write the axes paper's artifact_manifest.json for the files that are in a folder."""
    files = []
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.name != "artifact_manifest.json"):
        content = path.read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        files.append({"path": path.relative_to(folder).as_posix(), "sha256": digest, "size_bytes": len(content)})
    place = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    model = {"name": "tiny", "dtype": "bfloat16", "index": "model.safetensors.index.json"}
    content = {
        "schema_version": 1,
        "release": "paper-part1",
        "format": "xllm-native-bf16-safetensors",
        "config_projection": "model_tokenizer_only",
        "model": model | {"tensor_count": len(place), "shards": len(set(place.values()))},
        "source": {"checkpoint_id": "tiny"},
        "files": files,
    } | changes
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    content["manifest_sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (folder / "artifact_manifest.json").write_text(json.dumps(content, indent=2))


def ouro(folder: Path, shards: int = 1, **values) -> Path:
    """Ouro as on the hub, grouped queries, with its tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    config = OURO | {"vocab_size": tokenizer(folder)} | values
    return write(folder, config, tensors(config), shards)


def huginn(folder: Path, shards: int = 1, **values) -> Path:
    """Huginn as on the hub: 2/4/2 layers, the head stored again, and the rotation's table."""
    folder.mkdir(parents=True, exist_ok=True)
    size = tokenizer(folder)
    config = HUGINN | {"vocab_size": size, "padded_vocab_size": size} | values
    stored = tensors(config)
    stored["lm_head.weight"] = stored["transformer.wte.weight"].clone()
    stored["freqs_cis"] = torch.zeros(1, config["block_size"], 1, 6, 2)
    return write(folder, config, stored, shards)


def axes(folder: Path, shards: int = 2, base=AXES, **values) -> Path:
    """A checkpoint in the axes paper's released layout, its manifest included."""
    folder.mkdir(parents=True, exist_ok=True)
    model = base | {"vocab_size": tokenizer(folder / "tokenizer")} | values
    config = {"model": model, "tokenizer": {"path": "tokenizer", "type": "huggingface"}}
    write(folder, config, tensors(config), shards)
    manifest(folder)
    return folder
