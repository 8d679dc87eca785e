"""Where a model's normalisations act, found by counting calls at two loop counts: no model's code is read or changed.

Contract paper, "The axis: loop-boundary normalization". Hooks see modules: a norm written as a plain function is not seen, nor
is a loop whose passes are modules of their own that share weights.
"""

from collections import Counter
from collections.abc import Callable, Sequence

import pandas as pd
import torch
from torch import nn

BOUNDARY, LAYER, OUTSIDE, UNUSED = "at the loop boundary", "inside a looped layer", "outside the loop", "unused"


@torch.no_grad()
def module_calls(model: nn.Module, loop_counts: Sequence[int], run: Callable) -> dict[str, tuple[int, ...]]:
    """{module name: its calls during one forward pass at each of the loop counts}, for every module of any model.

    `run(model, loops)` performs the pass.
    """
    found = []
    for loops in loop_counts:
        calls = Counter()
        hooks = [
            module.register_forward_hook(lambda *_, c=calls, n=name: c.update([n])) for name, module in model.named_modules()
        ]
        try:
            run(model, loops)
        finally:
            for hook in hooks:
                hook.remove()
        found.append(calls)
    return {name: tuple(calls[name] for calls in found) for name, _ in model.named_modules()}


def norms(model: nn.Module, loop_counts: Sequence[int], run: Callable) -> pd.DataFrame:
    """One row a normalisation module: norm (its name), kind (its class), calls (at each loop count), acts, within.

    A module is a norm when its class name contains "norm", it has no modules inside and is no embedding. acts: outside the
    loop when it is called as often at every loop count; else it grows with the loop count, and is inside a looped layer when a
    module around it (`within`) grows too, and at the loop boundary when none does. A growing module that holds growing layers
    in a list only strings them together and is no layer: a norm beside that list is at the boundary (layers held by name are
    not known from the parts of a layer). One module that stands in two places has one name and is judged by it. Raises
    ValueError unless the loop counts are two or more and increase.
    """
    if len(loop_counts) < 2 or list(loop_counts) != sorted(set(loop_counts)) or loop_counts[0] < 1:
        raise ValueError(f"loop_counts are {list(loop_counts)}: they must be two or more and increase from at least 1")
    calls = module_calls(model, loop_counts, run)
    modules = dict(model.named_modules())
    is_norm = {name: _is_norm(m) for name, m in modules.items()}
    growing = {name for name, n in calls.items() if n[-1] > n[0]}
    layers = {name for name in growing if not is_norm[name] and not _strings(name, modules[name], growing, is_norm)}
    rows = []
    for name in filter(is_norm.get, modules):
        within = next((outer for outer in _around(name) if outer in layers), None)
        acts = UNUSED if not any(calls[name]) else OUTSIDE if name not in growing else LAYER if within else BOUNDARY
        rows.append((name, type(modules[name]).__name__, calls[name], acts, within if acts == LAYER else None))
    return pd.DataFrame(rows, columns=["norm", "kind", "calls", "acts", "within"])


def _is_norm(module: nn.Module) -> bool:
    inner = next(module.children(), None)
    return "norm" in type(module).__name__.lower() and inner is None and not isinstance(module, nn.Embedding)


def _around(name: str) -> list[str]:
    """The names of the modules around a module, the outermost first."""
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def _strings(name: str, module: nn.Module, growing: set[str], is_norm: dict[str, bool]) -> bool:
    """Whether a module holds a list of growing modules with growing norms in them: it strings layers together."""

    def looped(prefix):
        return any(norm and inner in growing and inner.startswith(prefix + ".") for inner, norm in is_norm.items())

    def held(prefix, outer):
        for child, inner in outer.named_children():
            path = f"{prefix}.{child}"
            if isinstance(inner, nn.ModuleList | nn.ModuleDict | nn.Sequential):
                yield from held(path, inner)
            elif isinstance(outer, nn.ModuleList | nn.ModuleDict | nn.Sequential):
                yield path

    return any(path in growing and looped(path) for path in held(name, module))
