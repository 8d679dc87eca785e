"""Reading a folder of safetensors into a model, slice by slice, with an error for everything that can be wrong with it.

Memory: the model's parameters and one slice. The files are mapped, never read whole.
"""

import json
import math
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from lib.checkpoint_plan import Plan

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
SLICE = 2**24  # bytes converted at once
FLOATS = ("F32", "BF16", "F16", "F64")
RISK = "which can run code when it is read: only safetensors are read"
NAMED = 5  # tensors named in an error before the rest is counted


def read_json(path: Path) -> dict:
    """A JSON object. Raises ValueError naming the file when it is missing or is none."""
    if not path.is_file():
        raise ValueError(f"{path} is missing")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON ({error}): get it again") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} must be a JSON object")
    return found


def open_shard(path: Path):
    """A safetensors file, mapped. Raises ValueError when it is cut short, damaged, or no such file at all."""
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        with open(path, "rb") as f:
            start = f.read(2)
        if start[:1] == b"\x80" or start == b"PK":
            raise ValueError(f"{path} is a pickle, {RISK}") from error
        raise ValueError(f"{path} is cut short or damaged ({error}): get it again") from error


def shards(folder: Path) -> dict[str, set[str] | None]:
    """File names of the weights, each with the tensors its index gives it, or None where there is no index.

    Raises ValueError when there are none, an index names a missing shard, or only pickles are there.
    """
    if (folder / INDEX).is_file():
        found: dict[str, set[str] | None] = {}
        listed = read_json(folder / INDEX).get("weight_map")
        if not isinstance(listed, dict) or not listed:
            raise ValueError(f"{folder / INDEX}: weight_map must name each tensor's file")
        for tensor, name in listed.items():
            if not isinstance(name, str) or Path(name).name != name:
                raise ValueError(f"{folder / INDEX}: {tensor} is in {name!r}: it must be a file of that folder")
            found.setdefault(name, set()).add(tensor)
        if missing := sorted(name for name in found if not (folder / name).is_file()):
            raise ValueError(f"{folder / INDEX} names {missing[0]}, which is not there: get it, or the whole checkpoint, again")
        return found
    if (folder / SINGLE).is_file():
        return {SINGLE: None}
    files = [p.name for p in sorted(folder.iterdir())]
    if parts := [name for name in files if name.endswith(".safetensors")]:
        raise ValueError(f"{folder} has {parts[0]} but neither {SINGLE} nor {INDEX}: get the missing file")
    if pickles := [name for name in files if name.endswith(PICKLES)]:
        raise ValueError(f"{folder / pickles[0]} is a pickle, {RISK}")
    raise ValueError(f"{folder} has no weights: {SINGLE} or {INDEX} with its files must be there")


def _some(names) -> str:
    """Names for an error, the first few and a count."""
    names = sorted(names)
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")


def check(folder: Path, plan: Plan) -> dict[str, str]:
    """{tensor: its file} after every name, shape and type was held against the plan, before anything is loaded.

    Raises ValueError listing what is missing, unknown, misplaced or of another shape.
    """
    found: dict[str, str] = {}
    wanted = {piece.source: piece.shape for piece in plan.pieces}
    wanted |= {name: wanted[twin] for name, twin in plan.twins}
    for name, listed in shards(folder).items():
        with open_shard(folder / name) as f:
            held = set(f.keys())
            if listed is not None and held != listed:
                odd = _some(held ^ listed)
                raise ValueError(f"{folder / name} does not hold what {INDEX} says it does: {odd} are in one of the two only")
            found |= dict.fromkeys(held, name)
            for tensor in held & wanted.keys():
                stored = f.get_slice(tensor)
                if tuple(stored.get_shape()) != wanted[tensor]:
                    shapes = f"{tuple(stored.get_shape())}: it must be {wanted[tensor]}"
                    raise ValueError(f"{folder / name}: {tensor} is {shapes} by config.json")
                if stored.get_dtype() not in FLOATS:
                    raise ValueError(f"{folder / name}: {tensor} is {stored.get_dtype()}: it must be {' or '.join(FLOATS)}")
    needed = {piece.source for piece in plan.pieces}
    for what, names in (("lacks", needed - found.keys()), ("has unknown", found.keys() - wanted.keys() - plan.spare)):
        if names:
            raise ValueError(f"{folder} {what} tensors, {_some(names)}: its config.json ({plan.family}) names {len(needed)}")
    return found


def slices(rows: int, row_bytes: int):
    """Spans of rows that together are about SLICE bytes each."""
    step = max(1, SLICE // max(1, row_bytes))
    return ((a, min(a + step, rows)) for a in range(0, rows, step))


@torch.no_grad()
def fill(model, plan: Plan, folder: Path) -> None:
    """Copy every tensor to its place, converted to the model's type and device as it goes.

    Raises ValueError as `check` does, and when a stored copy of a tied matrix differs from it.
    """
    place, parameters = check(folder, plan), dict(model.named_parameters())
    if plan.parameters != (held := sum(p.numel() for p in parameters.values())):
        raise ValueError(f"{folder}: its config.json ({plan.family}) names {plan.parameters} numbers, and the model has {held}")
    total = sum(math.prod(piece.shape) for piece in plan.pieces)
    bar = tqdm(total=total, unit=" parameters", unit_scale=True, desc=f"loading {folder.name}", disable=None, delay=1)
    with bar:
        for piece in sorted(plan.pieces, key=lambda p: place[p.source]):
            # opened for each tensor anew: the pages of a file stay in memory for as long as it is open
            with open_shard(folder / place[piece.source]) as f:
                _copy(f, piece, parameters[piece.target], bar)
    for copy, original in plan.twins:
        if copy in place:
            _same(folder, place, copy, original)


def _copy(f, piece, parameter: torch.Tensor, bar) -> None:
    """One stored tensor into its rows. A tensor that is stored in more dimensions than its parameter has is flattened; one
    stored in fewer holds the parameter's first two as one."""
    stored = f.get_slice(piece.source)
    if len(piece.shape) > parameter.dim():
        parameter.copy_(stored[:].flatten())
        bar.update(parameter.numel())
        return
    if len(piece.shape) < parameter.dim():
        parameter = parameter.flatten(0, 1)
    for a, b in slices(piece.shape[0], 4 * math.prod(piece.shape[1:])):
        part = stored[a:b].to(parameter.dtype)
        parameter[piece.row + a : piece.row + b].copy_(part + piece.add if piece.add else part)
        bar.update(part.numel())


def _same(folder: Path, place: dict[str, str], copy: str, original: str) -> None:
    with open_shard(folder / place[copy]) as one, open_shard(folder / place[original]) as other:
        x, y = one.get_slice(copy), other.get_slice(original)
        rows, *rest = x.get_shape()
        if not all(torch.equal(x[a:b], y[a:b]) for a, b in slices(rows, 4 * math.prod(rest))):
            raise ValueError(f"{folder}: {copy} differs from {original}, while config.json ties them")
