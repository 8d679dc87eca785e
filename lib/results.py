"""A notebook's results on disk: staged while it runs, moved into place in one go when its last cell is reached.

outputs/<scale>/<notebook>/{result.json, *.csv, *.png, notebook.ipynb}
"""

import json
import os
import platform
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path

import altair as alt
import numpy as np
import pandas as pd

from lib import BEHAVIOUR, claims, engine, leftovers, paths
from lib.picture import Picture
from lib.store import cannot_write, write_atomic

PACKAGES = ("torch", "transformers", "numpy", "scipy", "pandas", "altair")


@dataclass(frozen=True)
class Results:
    """Where one notebook puts what it finds. Nothing it wrote before is touched until `finish`."""

    notebook: str
    scale: str
    staging: Path
    started: float = field(default_factory=time.monotonic)

    def table(self, frame: pd.DataFrame, name: str) -> pd.DataFrame:
        """Keep a table as <name>.csv with 6 significant digits; returns it."""
        with _sentence(self.staging.parent):
            frame.to_csv(self.staging / f"{name}.csv", index=False, float_format="%.6g")
        return frame

    def chart(self, chart: alt.TopLevelMixin, name: str) -> Picture:
        """Keep a chart as <name>.png; returns its picture, so that the cell shows it."""
        picture = Picture(chart)
        with _sentence(self.staging.parent):
            (self.staging / f"{name}.png").write_bytes(picture.png(1.5))
        return picture

    def finish(self, params: dict, judgements: list[claims.Judgement], figures: dict, training_seconds: float = 0.0) -> Path:
        """Write result.json and move everything into outputs/<scale>/<notebook>/. The last thing a notebook does.

        `figures` are the numbers the verdicts came from; `training_seconds` the core-seconds its models took when they were
        trained, which a warm run did not spend again.
        """
        result = {
            "notebook": self.notebook,
            "scale": self.scale,
            "params": params,
            "seconds": round(time.monotonic() - self.started, 1),
            "training_core_seconds": round(training_seconds, 1),
            "date": date.today().isoformat(),
            "versions": {"python": platform.python_version()} | {name: version(name) for name in PACKAGES},
            "hardware": hardware(),
            "behaviour": BEHAVIOUR,
            "figures": figures,
        } | claims.as_result(judgements)
        text = json.dumps(_short(result), indent=1, sort_keys=True, allow_nan=False)
        final = paths.outputs() / self.scale / self.notebook
        with _sentence(self.staging.parent):
            write_atomic(self.staging / "result.json", text + "\n")
            final.mkdir(parents=True, exist_ok=True)
            # its verdicts last, so that a kill in between leaves none of tables that are not there
            new = sorted((path.name for path in self.staging.iterdir()), key=lambda name: name == "result.json")
            with _uninterrupted():
                for name in new:
                    os.replace(self.staging / name, final / name)
                for path in final.iterdir():
                    if path.name not in new and path.suffix in (".csv", ".png"):
                        path.unlink(missing_ok=True)
                self.staging.rmdir()
        return final


def begin(notebook: str, scale: str) -> Results:
    """Open a notebook's results at a scale. Raises OSError, one sentence, when the outputs folder cannot be written."""
    folder = paths.outputs() / scale
    claims.hold()
    with _sentence(folder):
        folder.mkdir(parents=True, exist_ok=True)
        leftovers.sweep()
        staging = folder / f".staging-{notebook}-{leftovers.owner()}"
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
    return Results(notebook, scale, staging)


@contextmanager
def _sentence(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(f"{folder} cannot be written {cannot_write(error)}") from None


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ignores the interrupt that ends a cell: whoever stops a notebook at its very end gets whole results, new or old."""
    main = threading.current_thread() is threading.main_thread()  # no other is ever interrupted
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if main else None
    try:
        yield
    finally:
        if main:
            signal.signal(signal.SIGINT, before)


def hardware() -> dict:
    """Processor, cores this process may use, and memory in GiB."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        name = next(
            (line.split(":")[1].strip() for line in info.read_text().splitlines() if "model name" in line),
            name,
        )
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {"processor": name, "cores": engine.cores(), "memory_gib": round(gib), "system": platform.system()}


def _short(value):
    """Numbers to 6 significant digits, NaN to None, so that a diff is readable and the JSON valid."""
    if isinstance(value, dict):
        return {str(k): _short(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_short(v) for v in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return float(f"{value:.6g}") if np.isfinite(value) else None
    return value
