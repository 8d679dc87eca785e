"""Loading a checkpoint of 2 GiB: how far memory rises, and how long it takes, also against torch.load.

`python -m tests.bench.loading FOLDER DTYPE HOW` is one measurement in a process of its own and prints it as JSON.
"""

import json
import math
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from lib import families, paths, released
from tests.bench.baselines import pickled
from tests.bench.measure import row

CONFIG = {
    "model_type": "ouro",
    "vocab_size": 49152,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 17,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "total_ut_steps": 4,
}
SHARD = 500 * 2**20  # bytes
PICKLE = "weights.pt"


def write(folder: Path, dtype: torch.dtype) -> None:
    """A synthetic Ouro of 2 GiB in bf16 (1.07e9 parameters), in shards, every number the same."""
    shards: list[dict] = [{}]
    size = 0
    for piece in families.plan(CONFIG, "config.json").pieces:
        own = math.prod(piece.shape) * dtype.itemsize
        if size and size + own > SHARD:
            shards.append({})
            size = 0
        shards[-1][piece.source] = piece.shape
        size += own
    place = {}
    for i, own in enumerate(shards, start=1):
        name = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file({k: torch.full(shape, 0.01, dtype=dtype) for k, shape in own.items()}, folder / name)
        place |= dict.fromkeys(own, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": place}))
    (folder / "config.json").write_text(json.dumps(CONFIG))


def anonymous() -> int:
    """Bytes of this process's memory that are no pages of a mapped file."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def measure(folder: Path, dtype: torch.dtype, how: str) -> dict:
    """Seconds, and the peak's rise over the weights' own bytes: `released.load` (load), whole files read and converted (whole),
    or torch.load into a model that was initialised (pickled)."""
    before, peak, done = anonymous(), 0, threading.Event()

    def watch():
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    if how == "load":
        weights = list(released.load(folder, dtype=dtype).parameters())
    elif how == "pickled":
        weights = list(pickled.load(families.plan(CONFIG, "config.json").config, folder / PICKLE, dtype).parameters())
    else:
        weights = [t.to(dtype, copy=True) for f in sorted(folder.glob("*.safetensors")) for t in load_file(f).values()]
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    total = sum(w.nbytes for w in weights)
    return {"seconds": seconds, "rise": (max(peak, anonymous()) - before) / total, "bytes": total}


def measured(folder: Path, dtype: str, how: str) -> dict:
    """`measure` in a process of its own."""
    command = [sys.executable, "-m", "tests.bench.loading", str(folder), dtype, how]
    return json.loads(subprocess.run(command, cwd=paths.ROOT, check=True, capture_output=True, text=True).stdout)


def rounds(stored: torch.dtype, n: int, other: str) -> list[tuple[dict, dict]]:
    """(ours, the other way) measured n times at bf16, the two ways in turn."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, stored)
        if other == "pickled":
            pickled.save(released.load(folder, dtype=stored), folder / PICKLE)
        measured(folder, "bfloat16", "load"), measured(folder, "bfloat16", other)  # in the page cache from here on
        return [(measured(folder, "bfloat16", "load"), measured(folder, "bfloat16", other)) for _ in range(n)]


def rows() -> list[dict]:
    """Loading 2 GiB of bf16 weights, from bf16 and from float32 files: peak memory and time."""
    made = []
    for stored in (torch.bfloat16, torch.float32):
        pairs = rounds(stored, 5, "whole")
        rises, ratios = [ours["rise"] for ours, _ in pairs], [ours["seconds"] / whole["seconds"] for ours, whole in pairs]
        name = f"loading 2 GiB, stored as {str(stored).removeprefix('torch.')}"
        made.append(row(f"{name}: peak memory", rises, "times", "the weights in the run's type", at_most=1.15))
        made.append(row(f"{name}: time", ratios, "times", "reading the files whole", at_most=2))
    pairs = rounds(torch.bfloat16, 3, "pickled")
    for what, key in (("peak memory", "rise"), ("time", "seconds")):
        ratios = [other[key] / ours[key] for ours, other in pairs]
        made.append(row(f"torch.load of 2 GiB into a model: {what}", ratios, "times", "ours", at_least=1))
    return made


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(measure(Path(sys.argv[1]), getattr(torch, sys.argv[2]), sys.argv[3])))
