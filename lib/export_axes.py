"""Writing a model in the axes paper's released layout: the inverse of `family_axes`, whose names are the only ones there are.

A configuration becomes a published `model` section, that section is read back as any checkpoint's is, and what comes back
otherwise is what the layout has no way to say. Memory: the model and one shard.
"""

import hashlib
import json
import math
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerBase

from lib import family_axes, leftovers, manifest
from lib.checkpoint import INDEX
from lib.checkpoint_plan import Piece, Plan, Reader
from lib.config import LoopedConfig
from lib.looped import LoopedModel

SHARD = 5 * 2**30  # bytes of one file at most, as published, unless one tensor is larger
BYTES = 2  # of a bf16 number
INSIDE = "tokenizer"  # the tokenizer's folder
STATES = {ours: theirs for theirs, ours in family_axes.STATES.items()}
HIERARCHIES = {ours: theirs for theirs, ours in family_axes.HIERARCHIES.items()}


def export(
    model: LoopedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
    checkpoint_id: str,
    shard_bytes: int = SHARD,
) -> Path:
    """Write a checkpoint as the axes paper releases them, each weight rounded once to bf16; returns its folder.

    Gains are stored without their 1. The folder appears when it is complete. Raises ValueError, one sentence, when it is there
    already, for a configuration that the layout has no way to say, another model's tokenizer, and weights that are not finite.
    """
    folder, plan = Path(folder), plan_of(model.config)
    if not checkpoint_id:
        raise ValueError("checkpoint_id is empty: it must name the checkpoint")
    if len(tokenizer) != (size := model.config.vocab_size):
        raise ValueError(f"vocab_size is {size}: it must be {len(tokenizer)}, the tokens of the tokenizer")
    if (held := sum(p.numel() for p in model.parameters())) != plan.parameters:
        raise ValueError(f"the model holds {held} numbers: it must hold {plan.parameters}, those of its configuration")
    with staged(folder) as inside:
        tokenizer.save_pretrained(inside / INSIDE)
        if not (inside / INSIDE / "tokenizer.json").is_file():
            raise ValueError(f"the tokenizer is a {type(tokenizer).__name__}: it must be one that is saved as tokenizer.json")
        config = {"model": section_of(model.config), "tokenizer": {"path": INSIDE, "type": "huggingface"}}
        _write_json(inside / "config.json", config)
        files = _write_weights(inside, model, plan, shard_bytes)
        _write_manifest(inside, checkpoint_id, tensors=len(plan.pieces), shards=files)
    return folder


def require_new(folder: Path) -> None:
    """Raises ValueError when a path is taken, if only by an empty folder or a link to nothing."""
    if os.path.lexists(folder):
        raise ValueError(f"{folder} is there already: it must be a new folder")


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """An empty folder that takes the name of `folder` when the block ends, and is removed when it raises.

    A kill leaves the unfinished one, .NAME.*.tmp, and no `folder`. Raises ValueError when `folder` is there already.
    """
    require_new(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.with_name(f".{folder.name}.{leftovers.owner()}-{secrets.token_hex(4)}.tmp")
    unfinished.mkdir()
    try:
        yield unfinished
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def plan_of(config: LoopedConfig) -> Plan:
    """The plan of a configuration in the axes paper's layout. Raises ValueError naming the first key that it cannot say."""
    plan = family_axes.plan(Reader({"model": section_of(config)}, "config.json"))
    own, back = meaning(config), meaning(plan.config)
    for key, value in own.items():
        if value != back.get(key, value):
            right = f"it must be {back[key]!r}, beside the rest of this configuration"
            raise ValueError(f"{key} is {value!r}: in the axes paper's layout {right}")
    return plan


def meaning(c: LoopedConfig) -> dict:
    """The values of a configuration that matter to what a model computes, in one spelling."""
    values = {key: getattr(c, key) for key in LoopedConfig.__annotations__}
    values |= {"n_kv_heads": c.kv_heads, "head_dim": c.head_width}
    unused = {"embedding_std"}  # where training starts
    if c.state_init != "noise":
        unused |= {"state_noise", "state_std"}
    if c.injection != "concat":
        unused |= {"injection_bias"}
    if c.injection == "none" or not c.prelude:  # without a prelude its output is the tokens
        unused |= {"injection_source"}
    return {key: value for key, value in values.items() if key not in unused}


def section_of(c: LoopedConfig) -> dict:
    """The published `model` section that is nearest to a configuration; what it lacks is left out."""
    section = {
        "vocab_size": c.vocab_size,
        "model_dim": c.d_model,
        "num_heads": c.n_heads,
        "num_kv_heads": c.kv_heads,
        "head_dim": c.head_width,
        "rope_head_dim": c.head_width,
        "ffn_hidden_dim": c.d_ff,
        "loop_times": c.loops,
        "rope_base": c.rope_theta,
        "rmsnorm_eps": c.norm_eps,
        "num_experts": c.n_experts,
        "loop_input_injection": "none",
    }
    section |= {key: allowed[0] for key, (allowed, _) in family_axes.FIXED.items()}
    if c.n_experts:
        section |= {"num_activated_experts": c.experts_per_token, "expert_inter_dim": c.d_expert}
        section |= {key: allowed[0] for key, (allowed, _) in family_axes.ROUTING.items()}
    injected = "none" if c.injection == "none" else "diagonal"
    if c.unrolled and injected != "none":
        return section | _written(c)
    from_tokens = not c.prelude or (injected != "none" and c.injection_source == "tokens")
    section["num_layers"] = c.prelude + c.core + c.coda
    if c.state == "single" and c.state_init == "input" and from_tokens:
        span = {"loop_start_layer": c.prelude, "loop_end_layers": c.prelude + c.core}
        return section | span | {"arch": "transformer", "loop_input_injection": injected}
    return section | {
        "arch": "huginn",
        "huginn_prelude_layers": c.prelude,
        "huginn_recurrent_layers": c.core,
        "huginn_coda_layers": c.coda,
        "huginn_state_init": STATES[c.state_init],
        "huginn_input_injection": injected,
        **_states(c),
    }


def _states(c: LoopedConfig) -> dict:
    """Of H/L states, where there are two."""
    states = {"huginn_hierarchical_state": HIERARCHIES[c.state]}
    if c.state != "single":
        states |= {"huginn_hierarchical_h_cycles": c.h_cycles, "huginn_hierarchical_l_cycles": c.l_cycles}
    return states | ({"huginn_split_module_repeats": c.repeats} if c.state == "split" else {})


def _written(c: LoopedConfig) -> dict:
    """Of an unrolled core: layers 0 .. num_layers - 1 in their order, and those before which the prelude is written."""
    first = max(1, c.prelude)  # the published code writes the output of a layer
    return {
        "arch": "transformer",
        "num_layers": first + c.core * c.loops + c.coda,
        "loop_times": 1,
        "dense_prelude_input_injection": "diagonal",
        "dense_prelude_input_layers": ",".join(str(first + t * c.core) for t in range(c.loops)),
        "dense_prelude_source_layer": first - 1,
    }


def _write_weights(folder: Path, model: LoopedModel, plan: Plan, shard_bytes: int) -> int:
    """Write shards and index; returns the number of shards. Raises ValueError for weights that are not finite."""
    parameters, pieces = dict(model.named_parameters()), {piece.source: piece for piece in plan.pieces}
    sizes = {name: BYTES * math.prod(pieces[name].shape) for name in sorted(pieces)}
    place, shards = {}, packed(sizes, shard_bytes)
    for i, names in enumerate(shards, start=1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: stored(parameters[pieces[name].target], pieces[name]) for name in names}
        save_file(tensors, folder / file, metadata={"format": "xllm"})
        del tensors  # before the next shard's
        place |= dict.fromkeys(names, file)
    _write_json(folder / INDEX, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": place})
    return len(shards)


def packed(sizes: dict[str, int], most: int) -> list[list[str]]:
    """Names in their order, packed one after the other into as many as fit in `most` bytes; a larger one is alone."""
    shards, filled = [], 0
    for name, size in sizes.items():
        if not shards or filled + size > most:
            shards, filled = [*shards, []], 0
        shards[-1].append(name)
        filled += size
    return shards


@torch.no_grad()
def stored(parameter: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The tensor of a piece as a checkpoint stores it, in bf16. Raises ValueError when it is not finite there."""
    rows = parameter.flatten(0, 1) if parameter.dim() > len(piece.shape) else parameter
    rows = rows[piece.row : piece.row + piece.shape[0]].cpu()
    found = rounded(rows.double() - piece.add if piece.add else rows)
    if not all(map(math.isfinite, found.aminmax())):  # which takes no memory
        raise ValueError(f"{piece.target} is not finite everywhere: every weight must be a number that bfloat16 can hold")
    return found


def rounded(x: torch.Tensor) -> torch.Tensor:
    """A copy in bf16, rounded once: float64 goes there by way of float32, where it must not become a tie that it is none."""
    if x.dtype == torch.float64:
        near = x.float()
        tied = (near.view(torch.int32) & 0xFFFF == 0x8000) & (near != x)  # half way between two bf16 numbers
        beside = torch.nextafter(near, torch.where(near < x, math.inf, -math.inf).float())
        x = torch.where(tied, beside, near)
    return x.to(torch.bfloat16, copy=True)


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_manifest(folder: Path, checkpoint_id: str, tensors: int, shards: int) -> None:
    """Write the manifest of the files that are in a folder, as `manifest.verify` reads it."""
    content = manifest.HEAD | {
        "config_projection": "model_tokenizer_only",
        "model": {
            "name": checkpoint_id,
            "dtype": "bfloat16",
            "index": INDEX,
            "tensor_count": tensors,
            "shards": shards,
        },
        "source": {"checkpoint_id": checkpoint_id},
        "files": [_record(folder, path) for path in sorted(folder.rglob("*")) if path.is_file()],
    }
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    _write_json(folder / manifest.NAME, content | {"manifest_sha256": hashlib.sha256(text.encode()).hexdigest()})


def _record(folder: Path, path: Path) -> dict:
    with open(path, "rb") as f:
        digest = hashlib.file_digest(f, "sha256").hexdigest()
    return {"path": path.relative_to(folder).as_posix(), "sha256": digest, "size_bytes": path.stat().st_size}
