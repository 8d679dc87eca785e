"""Trains one small run into the store named on the command line: what a test kills and starts again."""

import sys
from pathlib import Path

import torch

from lib.tasks import Task
from lib.training import Recipe, make_run, trained

RUN = make_run(
    Task("circuit", 3, 2),
    Recipe(400, 16, 2.0e-3, warmup=10, loop_sampling="poisson_lognormal"),
    3,
    d_model=16,
    n_heads=2,
    d_ff=24,
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    trained(RUN, Path(sys.argv[1]), checkpoint_seconds=0.2)
