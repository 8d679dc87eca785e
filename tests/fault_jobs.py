"""What test_faults runs in processes of its own: small trainings, and the faults that the environment asks of them.

FAULT is "<what> <point>", and code that comes by a point calls `at`. What: fill (the disk at DISK), hold (until the file HOLD,
which is made here, is gone), meet (until two processes are here, in the folder HOLD).
`python -m tests.fault_jobs <function> <argument> ...` calls one of the last functions here.
"""

import os
import resource
import sys
import time
from functools import partial
from pathlib import Path

STEPS, SEEDS, CHECKED = 24, 3, 10  # of each training; how many there are; the step at which the middle one passes "step"
SHAPE = {"d_model": 16, "n_heads": 2, "d_ff": 24, "loops": 2}
# what `make` trains in a store of that name, other than SHAPE
MODELS = {"experts": {"feed_forward": "experts", "n_experts": 5, "experts_per_token": 2, "d_expert": 8}}


def run(seed, steps=STEPS, **model):
    """One of the trainings."""
    from lib.tasks import Task
    from lib.training import Recipe, make_run

    return make_run(Task("circuit", 3, 2), Recipe(steps, 8, 2.0e-3, warmup=4), seed, **SHAPE | model)


def train(spec, report):
    """Train one run into the store below LOOPED_OUTPUTS, a checkpoint a step; returns its folder."""
    from lib import paths
    from lib.training import trained

    seed, steps = spec
    at("start")

    def told(done, total):
        report(done, total)
        if (seed, done) == (1, CHECKED):
            at("step")

    return trained(run(seed, steps), paths.runs(), told, checkpoint_seconds=-1)


def drawn():
    """Whether the notebook has its picture, which takes seconds."""
    return "DRAW" in os.environ


def stored(spec):
    """The folder of a run that the store has, else None."""
    from lib import paths, store

    return store.Store(paths.runs()).find(os.environ["KEYS"].split()[spec[0]])


def at(point):
    """A point at which the fault may be."""
    what, _, where = os.environ.get("FAULT", "").partition(" ")
    if where == point:
        {"fill": fill, "nearly": nearly, "hold": hold, "meet": meet}[what]()


def limit(size):
    """Forbid this process and those above it to write larger files, in the place of a disk, where none can be made."""
    for process in (os.getpid(), *parents()):
        resource.prlimit(process, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def free():
    """Give the disk its space back."""
    if "FULL" in os.environ:
        limit(resource.RLIM_INFINITY)
    else:
        Path(os.environ["DISK"], "filler").unlink()


def nearly():
    """Fill the disk but for two small files, or one of their size."""
    fill(leave=8192)


def fill(leave=0):
    """Fill the disk but for some bytes."""
    if "FULL" in os.environ:
        return limit(leave)
    filler = Path(os.environ["DISK"], "filler")
    with open(filler, "ab", buffering=0) as file:
        for size in (2**16, 2**10, 1):
            try:
                while file.write(b"x" * size) == size:
                    pass
            except OSError:
                continue
    os.truncate(filler, filler.stat().st_size - leave)


def parents():
    """The processes above this one, up to the command that the test started."""
    process = os.getpid()
    while not {"lib", "tests.fault_jobs"} & set(Path(f"/proc/{process}/cmdline").read_text().split("\0")):
        process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
        yield process


def hold():
    """Wait here until the file named by HOLD is gone."""
    held = Path(os.environ["HOLD"])
    held.write_text(str(os.getpid()))
    while held.exists():
        time.sleep(0.02)


def meet():
    """Wait here for another process, once."""
    folder = Path(os.environ["HOLD"])
    folder.mkdir(exist_ok=True)
    (folder / str(os.getpid())).touch()
    end = time.monotonic() + 120
    while len(list(folder.iterdir())) < 2:
        assert time.monotonic() < end, "the other one never came"
        time.sleep(0.02)


def make(*roots):
    """Make the middle training in the store at every root; where faults are asked for, once with each. Prints what each fault
    made of it, and ends with exit code 1 after the last."""
    import torch
    from transformers.utils import logging

    from lib import training
    from lib.config import LoopedConfig
    from lib.store import Store, StoreError, key

    torch.set_num_threads(1)
    logging.disable_progress_bar()

    def told(done, total):
        if done in (CHECKED, total):
            at("step" if done == CHECKED else "end")

    def build(folder, one):
        training.train(one, folder, told, checkpoint_seconds=-1)
        at("publish")

    faults = os.environ.get("FAULT", "").split(", ")
    for root in roots:
        one = run(1, **MODELS.get(Path(root).name, {}))
        for fault in faults:
            os.environ["FAULT"] = fault
            try:
                Store(root).make(key(one.spec()), one.spec(), partial(build, one=one))
            except StoreError as error:
                print(error, file=sys.stderr)
                if fault == faults[-1]:
                    sys.exit(1)
                free()
                continue
            model = training.load(one, Path(root))
            assert all(getattr(model.config, k) == getattr(one.config(), k) for k in LoopedConfig.__annotations__)


def full():
    """Make a run of an array that is a little larger than what the disk still has, and keep a table where there is no space."""
    import numpy as np
    import pandas as pd

    from lib import paths, results
    from lib.store import Store, StoreError, write_array

    def build(folder):
        fill(leave=4096)
        write_array(folder / "array.npy", np.arange(1000, dtype=np.float32))  # 4128 bytes
        free()  # it may be too late

    out = results.begin("a", "smoke")
    try:
        Store(paths.runs()).make("a", {}, build)
    except StoreError as error:
        print(error, file=sys.stderr)
    fill()
    try:
        out.table(pd.DataFrame({"x": range(1000)}), "x")
    except OSError as error:
        print(error, file=sys.stderr)


def store_line():
    """What doctor says of the store."""
    from lib import doctor

    print(next(line for line in doctor.report()[0] if line.startswith("store")), file=sys.stderr)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
