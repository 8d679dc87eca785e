"""Whole commands by the clock: imports, and a laptop replication whose runs are all in the store."""

import subprocess
import sys
from pathlib import Path

from lib import axes_arms, experiment, params, paths, standins
from lib.store import Store, key
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


def missing(root: Path) -> int:
    """How many of the laptop models the run store lacks."""
    runs = []
    for name in ("4_3_scratch_training", "4_4_refit", "4_5_overshoot", "beyond_damping", "beyond_readout_axis"):
        p = params.load(name, "laptop")
        kinds = [make for task in p["tasks"] for make in experiment.kinds(p, task).values()]
        runs += [make(seed) for make in kinds for seed in range(p["seeds"])]
    p = params.load("4_1_asymmetry", "laptop")
    runs += [standins.run_of(p, style, seed) for style in p["styles"] for seed in range(p["seeds"])]
    for name in ("dense_axes", "moe_transfer"):
        p = params.load(name, "laptop")
        arms = (*p["arms"], *p.get("arms_moe", ()))
        runs += [axes_arms.run_of(p, arm, seed) for arm in arms for seed in range(p["seeds"])]
    store = Store(root)
    return len({key(run.spec()) for run in runs if store.find(key(run.spec())) is None})


def warm_rows(rounds: int = 2) -> list[dict]:
    """A laptop replication whose runs exist. None where some do not: making them takes an hour or two."""
    if lacking := missing(paths.runs()):
        print(f"warm replication: not measured, the run store lacks {lacking} models (make replicate makes them)")
        return []
    taken = [seconds(lambda: command("-m", "lib", "run", "--scale", "laptop")) for _ in range(rounds)]
    return [row("make replicate, every run in the store", taken, "s", "the clock", at_most=90)]
