"""From a notebook's flat parameters to the arms trained from scratch, and to what a sweep reads off each of them.

Contract paper, section 4.3: two arms that differ in whether the state is normalised at the end of every loop step.
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from transformers.utils import logging

from lib import BEHAVIOUR, engine
from lib.boundary import Boundary, every, never
from lib.evaluation import Readings, read, summary
from lib.looped import LoopedModel
from lib.store import Store, key
from lib.tasks import Instances, Task, evaluation_set, floor
from lib.training import Recipe, Run, make_run, trained

ARMS = {"no_norm": never, "with_norm": every(1)}


def other(arm: str) -> Boundary:
    """The boundary of the arm that `arm` is compared with."""
    return ARMS["with_norm" if arm == "no_norm" else "no_norm"]


def task_of(p: dict, family: str) -> Task:
    """The task of one family at the notebook's parameters. Raises ValueError when the task is impossible."""
    return Task(family, p[f"{family}_width"], p[f"{family}_depth"])


def arm_run(p: dict, family: str, arm: str, seed: int) -> Run:
    """The run of one arm and seed at the notebook's parameters. Raises ValueError naming an unknown arm or a bad value."""
    if arm not in ARMS:
        raise ValueError(f"arm is {arm!r}: it must be one of {', '.join(ARMS)}")
    recipe = Recipe(
        steps=p[f"{family}_steps"],
        batch_size=p["batch_size"],
        lr=p[f"{family}_lr_{arm}"],
        optimizer=p["optimizer"],
        warmup=p["warmup"],
        weight_decay=p["weight_decay"],
        loop_sampling=p["loop_sampling"],
    )
    model = {k: p[k] for k in ("d_model", "n_heads", "d_ff", "core")}
    model |= {"loops": p["r0"], "boundary": ARMS[arm].period}
    return make_run(task_of(p, family), recipe, seed, device=p["device"], **model)


@dataclass(frozen=True)
class Job:
    """One trained arm and the sweeps wanted of it: (boundary, K_max) pairs over n test instances at every depth."""

    run: Run
    sweeps: tuple[tuple[Boundary, int], ...]
    n: int
    root: Path


def train_and_sweep(job: Job, report=None) -> dict:
    """Train the job's run and make its sweeps unless the store has them. Returns {"model": folder, "sweeps": [folders]}."""
    logging.disable_progress_bar()  # transformers' own, a line for every model loaded
    model = trained(job.run, job.root, report)
    return {"model": model, "sweeps": [swept(job, model, boundary, loops) for boundary, loops in job.sweeps]}


def make(jobs: list[Job], workers: int | None = None, title: str = "") -> list[dict]:
    """`train_and_sweep` of every job, in worker processes; jobs that the store holds whole are only looked up."""
    made = [stored(job) for job in jobs]
    missing = [i for i, found in enumerate(made) if found is None]
    for i, result in zip(missing, engine.map_local(train_and_sweep, [jobs[i] for i in missing], workers, title), strict=True):
        made[i] = result
    return made


def stored(job: Job) -> dict | None:
    """What `train_and_sweep` returns, if the store has all of it."""
    store = Store(job.root)
    model = store.find(key(job.run.spec()))
    sweeps = [model and store.find(key(sweep_spec(job, *sweep))) for sweep in job.sweeps]
    return {"model": model, "sweeps": sweeps} if model and all(sweeps) else None


def sweep_spec(job: Job, boundary: Boundary, loops: int) -> dict:
    """The key material of one of a job's sweeps."""
    spec = {"kind": "sweep", "train": key(job.run.spec()), "boundary": boundary.period, "loops": loops, "n": job.n}
    return spec | {"torch": torch.__version__, "behaviour": BEHAVIOUR}


def swept(job: Job, model_folder: Path, boundary: Boundary, loops: int) -> Path:
    """The store's folder with one sweep's readings, one file a depth: made now if it is not there yet."""
    spec = sweep_spec(job, boundary, loops)

    def build(folder: Path):
        model = LoopedModel.from_pretrained(model_folder).eval().to(job.run.device)
        for d_star in range(1, job.run.task.max_depth + 1):
            readings = read(model, evaluation_set(job.run.task, d_star, job.n), loops, boundary)
            np.savez(folder / f"depth_{d_star}.npz", **dataclasses.asdict(readings))

    return Store(job.root).make(key(spec), spec, build)


def readings_in(folder: Path, d_star: int) -> Readings:
    """The readings of one depth in a sweep's folder."""
    with np.load(folder / f"depth_{d_star}.npz") as file:
        return Readings(**file)


def table(folder: Path, task: Task) -> pd.DataFrame:
    """A sweep as a long table: K, d_star ("all" is the mean over depths), metric, value."""
    depths = range(1, task.max_depth + 1)
    parts = [summary(readings_in(folder, d), task.alphabet).assign(d_star=str(d)) for d in depths]
    per_depth = pd.concat(parts)
    metrics = [c for c in per_depth.columns if c not in ("K", "d_star", "modal_token")]
    every_depth = per_depth.groupby("K", as_index=False)[metrics].mean().assign(d_star="all")
    both = pd.concat([per_depth[["K", "d_star", *metrics]], every_depth])
    return both.melt(["K", "d_star"], var_name="metric", value_name="value")


def collect(cells, jobs: list[Job], made: list[dict]) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Three long tables of finished jobs, `cells` being their (task, arm, seed): own sweep, other sweep, training.

    Sweeps: task, arm, seed, K, d_star, width, metric, value; a diverged seed's values are NaN. Training: task, arm, seed,
    diverged, steps, first_loss, final_loss (nats), seconds (of one core).
    """
    own, swapped, training = [], [], []
    for (task, arm, seed), job, folders in zip(cells, jobs, made, strict=True):
        at = {"task": task, "arm": arm, "seed": seed}
        done = json.loads((folders["model"] / "training.json").read_text(encoding="utf-8"))
        training.append(at | done)
        for into, folder in zip((own, swapped), folders["sweeps"], strict=True):
            frame = table(folder, job.run.task).assign(**at, width=job.run.task.width)
            into.append(frame.assign(value=np.nan) if done["diverged"] else frame)
    columns = ["task", "arm", "seed", "K", "d_star", "width", "metric", "value"]
    return pd.concat(own)[columns], pd.concat(swapped)[columns], pd.DataFrame(training)


def metric(frame: pd.DataFrame, name: str) -> pd.DataFrame:
    """The rows of one metric of a long table, without the column that names it."""
    return frame[frame["metric"] == name].drop(columns="metric").reset_index(drop=True)


def one_loop_differences(made: list[dict]) -> int:
    """Readings that differ at K = 1 between the sweeps of one model under different boundaries: must be 0, bit for bit."""
    found = 0
    for folders in made:
        first, *rest = folders["sweeps"]
        for file in first.glob("depth_*.npz"):
            d = int(file.stem.split("_")[1])
            a = readings_in(first, d)
            for folder in rest:
                b = readings_in(folder, d)
                pairs = [(getattr(a, f)[0], getattr(b, f)[0]) for f in ("prediction", "entropy", "gap", "norm")]
                found += sum(int((x != y)[~(np.isnan(x) & np.isnan(y))].sum()) for x, y in pairs)
    return found


def strata(task: Task, n: int) -> dict[int, Instances]:
    """The test instances of every depth, {d*: n instances}."""
    return {d: evaluation_set(task, d, n) for d in range(1, task.max_depth + 1)}


def floor_table(tasks: list[Task], n: int) -> pd.DataFrame:
    """The no-skill floor of every stratum: columns task, d_star, value."""
    rows = [
        {"task": task.family, "d_star": str(d), "value": floor(task, instances)}
        for task in tasks
        for d, instances in strata(task, n).items()
    ]
    return pd.DataFrame(rows)
