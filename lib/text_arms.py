"""The axes paper's envelope contrast (Q1) on text: two arms of params/pretrain/tiny.yaml's size, equal in stored and executed
layers, trained for a number of steps and read as bits a byte. An appendix: nothing is judged by it.
"""

from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch

from lib import BEHAVIOUR, engine, paths, pretrain, pretrain_recipe
from lib.pretrain_recipe import Recipe
from lib.store import Store, key

ARMS = {  # 4 layers stored, 16 executed, no injection
    "full": {"prelude": 0, "core": 4, "coda": 0, "loops": 4, "injection": "none"},
    "sandwich": {"prelude": 1, "core": 2, "coda": 1, "loops": 7, "injection": "none"},
}
READINGS, ROWS = 6, 48  # evaluations in the course of a run, and rows of held-out text in each, fewer where steps are few


@dataclass(frozen=True)
class Job:
    """One arm's recipe, and the run store."""

    recipe: Recipe
    root: Path

    def spec(self) -> dict:
        """The run's key material."""
        about = {"corpus": pretrain.corpus_of(self.recipe).about["sha256"]}
        return about | {"kind": "text", "recipe": self.recipe.model_dump(), "torch": torch.__version__, "behaviour": BEHAVIOUR}


def recipe_of(arm: str, steps: int, seed: int) -> Recipe:
    """An arm's recipe: that of tiny.yaml with another envelope and number of steps."""
    path = paths.params() / "pretrain" / "tiny.yaml"
    base = pretrain_recipe.read(path)
    every = max(1, steps // READINGS)
    course = {
        "steps": steps,
        "checkpoint_every": every,
        "warmup": min(base.warmup, steps // 4),
        "evaluate_every": every,
        "evaluate_rows": min(ROWS, 4 * steps),
    }
    return pretrain_recipe.read(path, model=base.model | ARMS[arm], seed=seed, log_every=every, **course)


def trained(job: Job, report=None) -> Path:
    """The store's folder with the run's log, made now if it is not there yet."""

    def build(folder: Path):
        pretrain.run(job.recipe, folder / "checkpoint", report=report)  # a name that the store does not keep
        (folder / pretrain.LOG).write_bytes((folder / "checkpoint" / pretrain.LOG).read_bytes())

    spec = job.spec()
    return Store(job.root).make(key(spec), spec, build)


def stored(job: Job) -> Path | None:
    """What `trained` returns, if the store has it."""
    return Store(job.root).find(key(job.spec()))


def curves(steps: int, seeds: int, workers: int | None = None) -> pd.DataFrame:
    """Bits a byte of held-out text in the course of training: columns arm, seed, step, tokens, bits_per_byte."""
    cells = [(arm, seed) for arm in ARMS for seed in range(seeds)]
    jobs = [Job(recipe_of(arm, steps, seed), paths.runs()) for arm, seed in cells]
    pretrain.corpus_of(jobs[0].recipe)  # once, before workers ask for it
    rows = []
    for (arm, seed), folder in zip(cells, engine.map_missing(trained, jobs, stored, workers, "text"), strict=True):
        for line in pretrain.log_of(folder):
            if "eval_bits_per_byte" in line:
                found = {"step": line["step"], "tokens": line["tokens"], "bits_per_byte": line["eval_bits_per_byte"]}
                rows.append({"arm": arm, "seed": seed, **found})
    return pd.DataFrame(rows)
