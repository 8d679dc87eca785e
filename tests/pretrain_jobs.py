"""Pretraining runs for tests, started under torchrun: `python -m tests.pretrain_jobs OUT JOB ...`, each JOB a JSON object of a
name and a recipe's values. What each process holds of the model is written to OUT/<name>/held-<rank>.json.

With HOLD in the environment a run waits before that step, having made the file that it names.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from lib import pretrain
from lib.pretrain_recipe import Recipe

MODEL = {"d_model": 16, "n_heads": 2, "d_ff": 24, "prelude": 1, "core": 1, "coda": 1, "loops": 3, "injection": "diagonal"}
RECIPE = {
    "model": MODEL | {"embedding_std": 0.1},
    "steps": 8,
    "rows": 8,
    "rows_per_device": 2,
    "seed": 3,
    "lr": 0.01,
    "warmup": 2,
    "log_every": 1,
    "evaluate_rows": 5,
    "checkpoint_every": 4,
}


def recipe(corpus: str, **values) -> Recipe:
    """A small recipe on a corpus."""
    return Recipe(**{**RECIPE, "data": {"folder": str(corpus)}, **values})


def held(trainer: pretrain.Pretrainer) -> dict:
    """What this process holds of each parameter, and of how much."""
    found = {}
    for name, p in trainer.model.named_parameters():
        local = p.to_local().numel() if isinstance(p, DTensor) else p.numel()
        found[name] = [type(p).__name__, type(p.data).__name__, local, p.numel()]
    return found


def watched(out: Path, plain: type[pretrain.Pretrainer]) -> type[pretrain.Pretrainer]:
    """A trainer that tells what it holds, and waits where it is told to."""

    class Watched(plain):
        def compute_loss(self, model, inputs, **how):
            file, _, step = os.environ.get("HOLD", "").rpartition(":")
            if file and inputs["step"] == int(step) and self.args.process_index == 0:
                Path(file).touch()
                while Path(file).exists():
                    time.sleep(0.05)
            return super().compute_loss(model, inputs, **how)

        def create_optimizer(self, model=None):
            (out / f"held-{self.args.process_index}.json").write_text(json.dumps(held(self)))
            return super().create_optimizer(model)

    return Watched


def main(out: str, *jobs: str) -> None:
    """Run each job, one after the other."""
    torch.set_num_threads(1)
    plain = pretrain.Pretrainer
    for job in map(json.loads, jobs):
        folder = Path(out) / job["name"]
        pretrain.Pretrainer = watched(folder, plain)
        pretrain.run(Recipe(**job["recipe"]), folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
