"""Whole commands by the clock: imports, and a laptop replication whose runs are all in the store."""

import subprocess
import sys

from lib import paths
from lib.runner import NOTEBOOKS
from tests.bench.laptop import STANDINS, TRAINING, lacking
from tests.bench.measure import row, seconds

WHY_WARM = "probes, bootstraps over instances and figures are made anew each time, those of section 4.2 take longest"


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
    """A laptop replication whose runs exist, without the notebooks that would train: that takes an hour or two."""
    left_out = lacking(paths.runs())
    if STANDINS in left_out:
        left_out["4_2_readout_collapse"] = 0
    names = [name for name in NOTEBOOKS if name not in left_out]
    if not set(names) & set(TRAINING):
        print("warm replication: not measured, the run store has no notebook's models (make replicate makes them)")
        return []
    words = ("-m", "lib", "run", "--scale", "laptop", *(("--only", *names) if left_out else ()))
    taken = [seconds(lambda: command(*words)) for _ in range(rounds)]
    name, note = "make replicate, every run in the store", ""
    if left_out:
        name = f"make replicate of {len(names)} notebooks, every run in the store"
        note = f"without {' and '.join(left_out)}, of whose models the store lacked {sum(left_out.values())}"
    return [row(name, taken, "s", "the clock", at_most=90, why=WHY_WARM, note=note)]
