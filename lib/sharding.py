"""One model on several processes: sharded parameters (FSDP2), first weights that do not depend on their number, and checkpoints
that any number of them can read.

Everything here is torch's own: fully_shard, DTensor, distributed checkpoints.
"""

import copy
import shutil
import warnings
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from lib.experts import Experts
from lib.layers import Block
from lib.looped import LoopedModel

ENDS = ("embed_tokens", "lm_head")
CUT = 3.0  # standard deviations at which a truncated normal is cut


def recompute(module: nn.Module) -> None:
    """Let every layer keep its input alone and run again in the backward pass. Before sharding."""
    apply_activation_checkpointing(module, check_fn=lambda part: isinstance(part, Block))


def shard(module: nn.Module, device: torch.device, precision: str) -> None:
    """Shard every layer, and what is in none, over all processes; in bfloat16 they are gathered and multiplied in that type,
    while weights, gradients and their sums stay in float32."""
    mesh = dist.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),))
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    policy = {"mesh": mesh} | ({"mp_policy": half} if precision == "bfloat16" else {})
    for part in module.modules():
        if isinstance(part, Block):
            fully_shard(part, **policy)
    fully_shard(module, **policy)


@torch.no_grad()
def initialise(model: LoopedModel, seed: int, std: float | None = None) -> None:
    """First weights, the same whatever the device, the number of processes and the sharding: each module's from a generator of
    its own. One module is in memory at a time, whole, on the CPU.

    std: of matrices, drawn from a normal cut at three of them, embedding and head from one of d_model ** -0.5 (axes paper);
    None: as `build` draws them.
    """
    with torch.device("meta"):
        twin = LoopedModel(model.config)
    held = {name.replace("_checkpoint_wrapped_module.", ""): p for name, p in model.named_parameters()}
    done: list[str] = []
    for name, module in twin.named_modules():
        if any(name.startswith(f"{outer}.") for outer in done) or not [*module.parameters(recurse=False)]:
            continue
        done.append(name)
        if model.config.tie_word_embeddings and name == "lm_head":
            continue
        module = copy.deepcopy(module).to_empty(device="cpu")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            module.apply(twin._init_weights)  # what is inside first, as when a model is built
            if std is not None and name != "injection":
                for inner, part in module.named_modules(prefix=name):
                    _truncate(part, model.config.d_model**-0.5 if inner in ENDS else std)
        for key, value in module.named_parameters(prefix=name):
            _fill(held[key], value)
        del module


def _truncate(module: nn.Module, std: float) -> None:
    for value in module.parameters(recurse=False):
        if value.dim() >= 2 and isinstance(module, nn.Linear | nn.Embedding | Experts):
            nn.init.trunc_normal_(value, std=std, a=-CUT * std, b=CUT * std)


def _fill(parameter: torch.Tensor, value: torch.Tensor) -> None:
    value = value.detach().to(parameter.device)
    if isinstance(parameter, DTensor):
        value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(value)


def save(folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer, beside: dict[str, str]) -> None:
    """Write a checkpoint that appears whole or not at all; every process calls it. beside: texts of further files by name."""
    staging = folder.with_name(f".{folder.name}.partial")
    first = not dist.is_initialized() or dist.get_rank() == 0
    if first:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
    _wait()
    weights, moments = get_state_dict(module, optimizer)
    with warnings.catch_warnings():  # of one process alone, which is meant
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=staging, no_dist=not dist.is_initialized())
    _wait()
    if first:
        for name, text in beside.items():
            (staging / name).write_text(text, encoding="utf-8")
        staging.rename(folder)
    _wait()


def restore(folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Read a checkpoint into a model and its optimiser, whatever number of processes wrote it."""
    weights, moments = get_state_dict(module, optimizer)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder, no_dist=not dist.is_initialized())
    set_state_dict(module, optimizer, model_state_dict=weights, optim_state_dict=moments)


def whole(module: nn.Module) -> dict[str, torch.Tensor]:
    """All weights, unsharded, on the CPU of the first process; every process calls it. The others get nothing."""
    return get_model_state_dict(module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def _wait() -> None:
    if dist.is_initialized():
        dist.barrier()
