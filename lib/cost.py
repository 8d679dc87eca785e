"""What reading a looped model will take, from its configuration alone: memory in bytes and arithmetic in FLOP.

A multiplication and an addition are 2 FLOP. Matrix products and attention are counted, norms and rotations are not: they are
small beside them at the widths of released models. Small models take longer than this says, since each operation has a fixed
price there.
"""

import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from lib.config import LoopedConfig
from lib.looped import LoopedModel


@dataclass(frozen=True)
class Cost:
    """Bytes of weights, of the shared prefix's keys and values, and of one batch's largest layer; and the FLOP of it all."""

    weights: int
    prefix: int
    activations: int
    flop: float

    @property
    def memory(self) -> int:
        """Bytes held at once, at most."""
        return self.weights + self.prefix + self.activations

    def plus(self, other: "Cost") -> "Cost":
        """This, then another task on the same model: memory is the larger of the two, arithmetic adds up."""
        larger = (max(getattr(self, k), getattr(other, k)) for k in ("weights", "prefix", "activations"))
        return Cost(*larger, self.flop + other.flop)

    def sentence(self, rate: float) -> str:
        """The cost in words, at a measured rate in FLOP/s."""
        parts = [f"weights {size(self.weights)}"]
        parts += [f"shared prefix {size(self.prefix)}"] if self.prefix else []
        parts += [f"activations {size(self.activations)}"] if self.activations else []
        return f"{', '.join(parts)}, {duration(self.flop / rate)} at the {rate / 1e9:.3g} GFLOP/s measured here"


def parameters(config: LoopedConfig) -> int:
    """How many numbers a model holds, a tied matrix counted once; nothing is allocated."""
    with torch.device("meta"):
        return sum(p.numel() for p in LoopedModel(config).parameters())


def activated(config: LoopedConfig) -> int:
    """Active parameters: those of a model that one token uses, of each layer's experts experts_per_token alone."""
    return parameters(config) - config.stored_layers * _idle(config)


def applied(config: LoopedConfig) -> int:
    """Applied (unrolled) parameters: those that one token passes at the trained loop count, each execution counted.

    Resident (`parameters`) is what a model holds, active (`activated`) what one token uses of it; applied are the active ones
    of layers and injection once an execution, and all else once.
    """
    with torch.device("meta"):
        model = LoopedModel(config)
    layer = sum(p.numel() for p in model.core[0].parameters()) - _idle(config)
    injection = injection_parameters(config)
    again = config.executed_layers - config.stored_layers
    return activated(config) + again * layer + (config.loops - 1) * injection


def injection_parameters(config: LoopedConfig) -> int:
    """Parameters of the injection module."""
    with torch.device("meta"):
        injection = LoopedModel(config).injection
    return sum(p.numel() for p in injection.parameters()) if injection else 0


def _idle(config: LoopedConfig) -> int:
    """Parameters of the experts of one layer that a token does not go through."""
    return (config.n_experts - config.experts_per_token) * 3 * config.d_model * config.d_expert


def executed_layers(config: LoopedConfig, loops: int) -> int:
    """Layers run in a sweep over K = 1..loops: the prelude once, the core at each step, the coda for each K that is read."""
    return config.prelude + loops * (config.step_layers + config.coda)


def estimate(
    config: LoopedConfig, prompts: int, tokens: int, prefix: int, loops: int, arms: int, bytes_each: int, batch_size: int
) -> Cost:
    """What `arms` sweeps over K = 1..loops take, of prompts of `tokens` tokens behind `prefix` shared ones, run once an arm.

    A token costs 2 FLOP a weight of each executed layer, and 4 S H E a layer for attention to the S tokens it is held against
    (those behind it too, which are masked). Logits are made at one position a prompt and K. bytes_each: of a number.
    """
    D, V = config.d_model, config.vocab_size
    F = config.d_ff if config.feed_forward == "dense" else config.experts_per_token * config.d_expert
    H, G, E = config.n_heads, config.kv_heads, config.head_width
    layers, seen = executed_layers(config, loops), prefix + tokens
    matrices = D * (H + 2 * G) * E + H * E * D + 3 * D * F + D * config.n_experts
    injection = {"none": 0, "concat": 2 * D * D, "diagonal": D * D}[config.injection]

    def run(count: int, seen: int) -> float:
        return count * (layers * (2 * matrices + 4 * seen * H * E) + loops * 2 * injection)

    head = 2 * D * V * loops
    flop = run(prompts * tokens, seen) + prompts * head
    flop += run(prefix, prefix) + (head if prefix and config.coda else 0)
    rows = min(batch_size, prompts)
    layer = tokens * (4 * D + (2 * H + 2 * G) * E + 3 * F) + 2 * seen * G * E + H * tokens * seen
    return Cost(
        weights=parameters(config) * bytes_each,
        prefix=2 * layers * prefix * G * E * bytes_each,
        # the readout works in single precision whatever the model's type
        activations=rows * max(layer * bytes_each, V * (bytes_each + 12)),
        flop=float(arms * flop),
    )


def rate(device: str, dtype: torch.dtype, seconds: float = 0.3, width: int = 1024) -> float:
    """FLOP/s of square matrix products, measured on this machine now for about `seconds`."""
    a = torch.randn(width, width, device=device).to(dtype)
    wait = torch.cuda.synchronize if torch.device(device).type == "cuda" else lambda: None
    a @ a
    wait()
    done, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        a @ a
        wait()
        done += 1
    return done * 2 * width**3 / (time.perf_counter() - start)


def free_memory(device: str) -> int | None:
    """Bytes that can still be taken on a device, or None where the system does not say."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    info = Path("/proc/meminfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def require_memory(cost: Cost, device: str, free: int | None = None) -> None:
    """Raises ValueError when the weights alone do not fit; free: bytes, measured now by default."""
    free = free_memory(device) if free is None else free
    if free is not None and cost.weights > free:
        raise ValueError(
            f"the weights take {size(cost.weights)} and {size(free)} of memory are free on {device}: "
            "choose a smaller type with --dtype bfloat16, a smaller model, or a larger machine"
        )


def size(number: int) -> str:
    """Bytes in words: the largest unit that leaves at least 1."""
    power = min(3, int(math.log(max(1, number), 1024)))
    return f"{number / 1024**power:.3g} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def duration(seconds: float) -> str:
    """Seconds in words."""
    if seconds < 60:
        return "under a minute"
    minutes = seconds / 60
    return f"about {minutes:.0f} minutes" if minutes < 120 else f"about {minutes / 60:.3g} hours"
