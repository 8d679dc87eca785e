"""`python -m tests.bench [SECTION ...]`: measure, print, and write outputs/bench.json, from which README.md's table is made.

A section that is named alone replaces its own rows and leaves the others as they were measured.
"""

import json
import sys
from collections.abc import Callable

import torch

from lib import paths
from lib.results import hardware
from lib.store import write_atomic
from tests.bench import commands, experts, laptop, loading, readings, together, training

FAMILIES = ("circuit", "hops")
SECTIONS: dict[str, Callable[[], list[dict]]] = {
    "step": lambda: [row for family in FAMILIES for row in training.step_rows(family)],
    "arm": lambda: [training.arm_row(family) for family in FAMILIES],
    "sweep": readings.sweep_rows,
    "batches": lambda: [readings.batch_row(family) for family in FAMILIES],
    "refit": lambda: [readings.refit_row()],
    "statistics": lambda: [readings.rank_test_row()],
    "experts": experts.rows,
    "seeds": together.seeds_rows,
    "loading": loading.rows,
    "import": commands.import_rows,
    "cold": lambda: [laptop.cold_row()],
    "warm": commands.warm_rows,
}


def main(names: list[str]) -> int:
    """Measure the sections, all of them where none is named; returns the exit code."""
    if unknown := [name for name in names if name not in SECTIONS]:
        print(f"error: {unknown[0]} is no section: it must be one of {', '.join(SECTIONS)}", file=sys.stderr)
        return 1
    torch.set_num_threads(1)
    file = paths.outputs() / "bench.json"
    known = json.loads(file.read_text(encoding="utf-8")).get("sections", {}) if file.exists() else {}
    machine = hardware()
    units = "AVX-512" if torch.backends.cpu.get_cpu_capability() == "AVX512" else "without AVX-512"
    where = f"{machine['processor']}, {machine['cores']} cores, {units}"
    for name in names or SECTIONS:
        if not (rows := SECTIONS[name]()):
            continue
        for r in rows:
            print(f"{r['name']:<58} {told(r)}", flush=True)
        known[name] = {"machine": where, "rows": rows}
        file.parent.mkdir(parents=True, exist_ok=True)
        ordered = {name: known[name] for name in SECTIONS if name in known}
        write_atomic(file, json.dumps({"sections": ordered}, indent=1, default=float) + "\n")
    return 0


def told(r: dict) -> str:
    """A row as text."""
    spread = f"{r['median']:8.4g} [{r['low']:.3g}, {r['high']:.3g}] {r['unit']}, against {r['against']}"
    aims = [f"{word} {r[key]:g}" for word, key in (("at least", "at_least"), ("at most", "at_most")) if r[key] is not None]
    return spread + (f" (aim: {' '.join(aims)})" if aims else "") + (f"; {r['note']}" if r["note"] else "")


if __name__ == "__main__":  # worker processes import this file
    sys.exit(main(sys.argv[1:]))
