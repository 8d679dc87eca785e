"""What a maintainer asks first: versions, machine, store health, notebook pairs in sync, results older than the code."""

import json
import platform
import shutil
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jupytext
import torch

from lib import BEHAVIOUR, claims, paths, released
from lib.engine import cores
from lib.results import PACKAGES, hardware
from lib.store import SPEC, Store


def report() -> tuple[list[str], bool]:
    """The report's lines, and whether nothing needs a hand."""
    machine = hardware()
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    lines = [
        "versions    " + ", ".join([f"python {platform.python_version()}", *(f"{p} {version(p)}" for p in PACKAGES)]),
        f"machine     {machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB, "
        f"GPU: {', '.join(gpus) or 'none'}",
    ]
    lines.append(f"engines     local with {cores()} processes at once; {_ray()}")
    health = Store(paths.runs()).health()
    disk = shutil.disk_usage(paths.ROOT).free / 2**30
    lines.append(
        f"store       {health['finished']} runs{other_behaviour()}, {health['partial']} unfinished, "
        f"{health['corrupt']} corrupt, {health['bytes'] / 2**20:.1f} MiB; {disk:.0f} GiB of disk free"
    )
    known = [entry for entry in released.catalogue() if entry.plan]
    lines.append(f"models      {sum(released.present(e.id) is not None for e in known)} of {len(known)} loadable ones are here")
    unpaired, old = out_of_sync(), stale()
    lines.append(f"pairs       {'; '.join(unpaired) or 'every .py and .ipynb agree'}")
    lines.append(f"behaviour   version {BEHAVIOUR}; {'; '.join(map(told, old)) or 'no result is older'}")
    lines.append(f"rules       {claims.rules_hash()}, {len(claims.load())} claims")
    return lines, not (unpaired or old or health["corrupt"])


def _ray() -> str:
    with suppress(PackageNotFoundError):
        return f"ray {version('ray')}"
    return "ray is not installed (make cluster)"


def out_of_sync(folder: Path | None = None) -> list[str]:
    """Sentences on notebooks whose .py and .ipynb differ in cells, source or tags, or that lack their pair."""
    folder = folder or paths.notebooks()
    found = []
    for stem in sorted({p.stem for p in folder.iterdir() if p.suffix in (".py", ".ipynb") and p.stem != "conftest"}):
        pair = [folder / f"{stem}{suffix}" for suffix in (".py", ".ipynb")]
        if missing := [p.name for p in pair if not p.exists()]:
            found.append(f"{missing[0]} is missing")
        elif _cells(pair[0]) != _cells(pair[1]):
            found.append(f"{stem}.ipynb is not {stem}.py: run `jupytext --to ipynb --update notebooks/{stem}.py`, then execute")
    return found


def _cells(path: Path) -> list[tuple]:
    return [(c.cell_type, c.source, c.metadata.get("tags", [])) for c in jupytext.read(path).cells]


def other_behaviour() -> str:
    """How many of the store's runs another behaviour version than the code's made, in brackets; nothing where none."""
    found = 0
    for file in paths.runs().glob(f"*/{SPEC}"):
        with suppress(OSError, ValueError, AttributeError):  # the store's health counts what cannot be read
            found += "." not in file.parent.name and json.loads(file.read_bytes()).get("behaviour") != BEHAVIOUR
    return f" ({found} of another behaviour version, kept and never read)" if found else ""


def stale() -> list[tuple[str, str, int]]:
    """(scale, notebook, behaviour version) of every result.json older than the code's behaviour version.

    A result that cannot be read counts as version -1.
    """
    found = []
    for file in sorted(paths.outputs().glob("*/*/result.json")):
        try:
            behaviour = int(json.loads(file.read_text(encoding="utf-8"))["behaviour"])
        except (ValueError, KeyError, TypeError):
            behaviour = -1
        if behaviour < BEHAVIOUR:
            found.append((file.parts[-3], file.parts[-2], behaviour))
    return found


def told(entry: tuple[str, str, int]) -> str:
    """One stale result as a sentence."""
    scale, notebook, behaviour = entry
    if behaviour < 0:
        return f"{scale}/{notebook}/result.json cannot be read: run the notebook again"
    return f"{scale}/{notebook} was made by behaviour version {behaviour}: run it again"
