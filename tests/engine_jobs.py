"""Jobs for the engine's tests: in a module of their own, since a worker must be able to import them."""

import os
import signal
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
