"""Whole commands by the clock: imports, and a laptop replication whose runs are all in the store."""

import subprocess
import sys

from lib import paths
from tests.bench.laptop import missing
from tests.bench.measure import row, seconds


def command(*words: str) -> None:
    """Run this Python with the words after it. Raises CalledProcessError, with what it said, when it fails."""
    done = subprocess.run([sys.executable, *words], cwd=paths.ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"python {' '.join(words)} failed: {done.stderr[-2000:]}")


def import_rows() -> list[dict]:
    """`import lib`, and the import of everything that trains."""
    rows = []
    for module in ("lib", "lib.training"):
        command("-c", f"import {module}")  # the files are in the page cache from here on
        taken = [seconds(lambda m=module: command("-c", f"import {m}")) for _ in range(7)]
        own = dict(at_most=2.5) if module == "lib" else {}
        rows.append(row(f"import {module}", taken, "s", "the clock", **own))
    libraries = "import torch, safetensors.torch; from transformers import PreTrainedModel, GenerationMixin"
    taken = [seconds(lambda: command("-c", libraries)) for _ in range(7)]
    return [*rows, row("import torch and transformers alone", taken, "s", "the clock")]


def warm_rows(rounds: int = 2) -> list[dict]:
    """A laptop replication whose runs exist. None where some do not: making them takes an hour or two."""
    if lacking := missing(paths.runs()):
        print(f"warm replication: not measured, the run store lacks {lacking} models (make replicate makes them)")
        return []
    taken = [seconds(lambda: command("-m", "lib", "run", "--scale", "laptop")) for _ in range(rounds)]
    return [row("make replicate, every run in the store", taken, "s", "the clock", at_most=90)]
