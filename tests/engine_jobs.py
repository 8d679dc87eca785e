"""Jobs for the engine's tests: in a module of their own, since a worker must be able to import them."""

import os
import signal
import sys
import time
from pathlib import Path


def square(spec, report):
    report(0, spec)
    for step in range(spec):
        report(step + 1, spec, note=f"step {step + 1}")
    return spec**2


def descend(spec, report):
    """A few gradient steps from global random numbers, to compare bit by bit; and what they ran in."""
    import torch

    weight = torch.randn(16, 16, requires_grad=True)
    for _ in range(5):
        loss = (torch.randn(64, 16) @ weight - spec).square().mean()
        (slope,) = torch.autograd.grad(loss, weight)
        weight = (weight - 0.1 * slope).detach().requires_grad_()
    where = os.getpid(), os.environ["OMP_NUM_THREADS"], torch.get_num_threads()
    return (weight.detach().numpy().tobytes(), loss.item()), where


def odd_fails(spec, report):
    if spec % 2:
        raise ValueError(f"{spec} is odd\nand a second line")
    return spec if spec != 4 else lambda: "a result that cannot travel"


def dies(spec, report):
    """Kills its own process the first `deaths` times, counted in a file."""
    with open(spec["file"], "a") as file:
        file.write("x")
    if Path(spec["file"]).stat().st_size <= spec["deaths"]:
        os.kill(os.getpid(), signal.SIGKILL)
    return spec["deaths"]


def lingers(spec, report):
    Path(spec).write_text(str(os.getpid()))
    time.sleep(60)


def tiny(seed, steps=30):
    """A run that trains in a moment."""
    from lib.tasks import Task
    from lib.training import Recipe, make_run

    return make_run(Task("circuit", 3, 2), Recipe(steps, 8, 2.0e-3, warmup=5), seed, d_model=16, n_heads=2, d_ff=24)


def train(spec, report):
    """Trains `tiny` in a store with a checkpoint at every step, `pause` seconds a step; leaves its process's id in `pids`.

    kills: how often it kills its own process at step `kill_at`.
    """
    from lib.training import trained

    own = Path(spec["pids"]) / f"{spec['seed']}"
    with open(own, "a") as file:
        file.write(f"{os.getpid()}\n")

    def told(done, total):
        report(done, total)
        time.sleep(spec.get("pause", 0))
        if done == spec.get("kill_at") and len(own.read_text().split()) <= spec["kills"]:
            os.kill(os.getpid(), signal.SIGKILL)

    return trained(tiny(spec["seed"], spec["steps"]), Path(spec["root"]), told, checkpoint_seconds=-1)


def variable(spec, report):
    """A variable of the environment, and where modules are looked for first."""
    return os.environ.get(spec), sys.path[0]


def devices(spec, report):
    """What Ray lets the job's process see of the GPUs."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def waits(spec, report):
    """Of jobs 0 and 1 the first ends a moment after the second, which must run beside it."""
    number, file = spec
    report(0, number + 1)
    if number:
        Path(file).touch()
    else:
        while not Path(file).exists():
            time.sleep(0.05)
        time.sleep(1)
    report(number + 1, number + 1, note=f"job {number}")
    return number


def sees(spec, report):
    """Whether a file is there already."""
    return Path(spec).exists()


def overlaps(spec, report):
    """The most processes that were at this job at once while it ran, each leaving a mark in a folder."""
    own, most = Path(spec) / str(os.getpid()), 0
    own.touch()
    for _ in range(40):
        most = max(most, len(list(Path(spec).iterdir())))
        time.sleep(0.05)
    own.unlink()
    return most
