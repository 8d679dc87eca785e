"""Where the loop-boundary norm sits: the value an intervention passes in, and the instrumentation that finds it.

Contract paper, "The axis: loop-boundary normalization". A boundary is a value, never a patched forward.
"""

from collections import Counter
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Boundary:
    """When the state is normalised between loop steps: after every `period`-th step; 0 means never."""

    period: int = 0

    def __post_init__(self):
        if isinstance(self.period, bool) or not isinstance(self.period, int) or self.period < 0:
            raise ValueError(f"boundary period is {self.period!r}: it must be 0 (never) or a whole number of steps, 1 or more")

    def fires_before(self, t: int) -> bool:
        """Whether step `t` (counted from 0) finds its input normalised, i.e. the norm fires after step t - 1."""
        return bool(self.period and t >= 1 and t % self.period == 0)

    def __str__(self):
        return "never" if not self.period else "every step" if self.period == 1 else f"every {self.period} steps"


never = Boundary(0)


def every(k: int) -> Boundary:
    """The boundary that normalises after every k-th step. Raises ValueError for k below 1."""
    if not isinstance(k, int) or k < 1:
        raise ValueError(f"every(k) was given k = {k!r}: k must be a whole number of steps, 1 or more")
    return Boundary(k)


@torch.no_grad()
def norm_calls(model: nn.Module, loop_counts, run) -> dict[str, tuple[int, ...]]:
    """Calls of every normalisation module during one forward pass at each loop count.

    `run(model, loops)` performs the pass; a module counts as a norm when its class name contains "norm". Returns
    {module name: (calls at each of loop_counts)}. Works on any model, not only ours.
    """
    norms = {name: m for name, m in model.named_modules() if "norm" in type(m).__name__.lower()}
    found = []
    for loops in loop_counts:
        calls = Counter()
        hooks = [m.register_forward_hook(lambda *_, c=calls, n=name: c.update([n])) for name, m in norms.items()]
        try:
            run(model, loops)
        finally:
            for hook in hooks:
                hook.remove()
        found.append(calls)
    return {name: tuple(calls[name] for calls in found) for name in norms}


def placement(calls: tuple[int, ...]) -> str:
    """Where a norm acts, from its calls at growing loop counts (contract paper, "The axis").

    "inside the loop" when the count grows with the loop count, "readout path" when it is called equally often, "unused"
    when it is never called.
    """
    if not any(calls):
        return "unused"
    return "inside the loop" if calls[-1] > calls[0] else "readout path"
