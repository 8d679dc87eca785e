"""From a notebook's flat parameters to the arms trained from scratch, and to what a sweep reads off each of them.

Contract paper, section 4.3: two arms that differ in whether the state is normalised at the end of every loop step; section
4.5: splits of one total of executed layers into loops and layers.
"""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from lib import BEHAVIOUR, engine, together
from lib.boundary import Boundary, every, never
from lib.evaluation import Readings, read, summary
from lib.looped import LoopedModel, build
from lib.store import Store, key
from lib.tasks import Instances, Task, evaluation_set, floor
from lib.training import Recipe, Run, load, make_run, precision_on, trained

ARMS = {"no_norm": never, "with_norm": every(1)}


def other(arm: str) -> Boundary:
    """The boundary of the arm that `arm` is compared with."""
    return ARMS["with_norm" if arm == "no_norm" else "no_norm"]


def task_of(p: dict, family: str) -> Task:
    """The task of one family at the notebook's parameters. Raises ValueError when the task is impossible."""
    return Task(family, p[f"{family}_width"], p[f"{family}_depth"])


def run_of(p: dict, family: str, lr: float, seed: int, **model) -> Run:
    """A run at the notebook's parameters and this peak rate; `model` holds what differs from them. Raises ValueError naming
    a bad value."""
    recipe = Recipe(
        steps=p[f"{family}_steps"],
        batch_size=p["batch_size"],
        lr=lr,
        optimizer=p["optimizer"],
        warmup=p["warmup"],
        weight_decay=p["weight_decay"],
        precision=precision_on(p["device"]),
        loop_sampling=p["loop_sampling"],
    )
    shape = {k: p[k] for k in ("d_model", "n_heads", "d_ff", "core")} | {"loops": p["r0"]}
    return make_run(task_of(p, family), recipe, seed, device=p["device"], **(shape | model))


def arm_run(p: dict, family: str, arm: str, seed: int, readout: str = "normalised") -> Run:
    """The run of one arm and seed. Raises ValueError naming an unknown arm or a bad value."""
    if arm not in ARMS:
        raise ValueError(f"arm is {arm!r}: it must be one of {', '.join(ARMS)}")
    rate = f"{family}_lr_{arm}" + ("" if readout == "normalised" else f"_{readout}")
    return run_of(p, family, p[rate], seed, boundary=ARMS[arm].period, readout=readout)


def untrained(run: Run) -> LoopedModel:
    """The run's model as it starts, before any training."""
    return build(run.config(), run.seed)


def splits(p: dict) -> dict[str, int]:
    """One total of r0 x core executed layers split three ways (contract paper, section 4.5): name -> its trained loop count,
    the most looped first and the stack last. Raises ValueError when r0 cannot be halved."""
    if p["r0"] < 4 or p["r0"] % 2:
        raise ValueError(f"r0 is {p['r0']}: it must be even and at least 4, so that it can be halved")
    counts = (p["r0"], p["r0"] // 2, 1)
    return {f"{loops}x{p['r0'] * p['core'] // loops}": loops for loops in counts}


def split_run(p: dict, family: str, split: str, seed: int) -> Run:
    """The run of one split and seed, without the boundary norm. Raises ValueError naming a bad value."""
    names, rates = list(splits(p)), p[f"{family}_lr"]
    if len(rates) != len(names):
        raise ValueError(f"{family}_lr has {len(rates)} rates: it must have one for each of {', '.join(names)}")
    loops, layers = map(int, split.split("x"))
    return run_of(p, family, rates[names.index(split)], seed, loops=loops, core=layers, boundary=never.period)


def kinds(p: dict, family: str) -> dict[tuple[str, str], Callable[[int], Run]]:
    """Every kind of model the parameters describe, as (arm or split, readout) -> the run of a seed."""
    if f"{family}_lr" in p:
        return {(split, "normalised"): partial(split_run, p, family, split) for split in splits(p)}
    readouts = ("normalised", "raw") if f"{family}_lr_no_norm_raw" in p else ("normalised",)
    return {(arm, r): partial(arm_run, p, family, arm, readout=r) for r in readouts for arm in ARMS}


@dataclass(frozen=True)
class Job:
    """One trained arm and the sweeps wanted of it: (boundary, K_max) pairs over n test instances at every depth."""

    run: Run
    sweeps: tuple[tuple[Boundary, int], ...]
    n: int
    root: Path


def train_and_sweep(job: Job, report=None) -> dict:
    """Train the job's run and make its sweeps unless the store has them. Returns {"model": folder, "sweeps": [folders]}."""
    model = trained(job.run, job.root, report)
    return {"model": model, "sweeps": [swept(job, boundary, loops) for boundary, loops in job.sweeps]}


def make(jobs: list[Job], workers: int | None = None, title: str = "") -> list[dict]:
    """`train_and_sweep` of every job, in worker processes; jobs that the store holds whole are only looked up.

    On a GPU all seeds of an arm are trained first, at once."""
    workers = 1 if together.ahead(jobs, title) else workers
    return engine.map_missing(train_and_sweep, jobs, stored, workers, title)


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


def swept(job: Job, boundary: Boundary, loops: int) -> Path:
    """The store's folder with one sweep's readings, one file a depth: made now if it is not there yet."""
    spec = sweep_spec(job, boundary, loops)

    def build(folder: Path):
        model = load(job.run, job.root)
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


def collect(cells: list[dict], jobs: list[Job], made: list[dict]) -> tuple[pd.DataFrame, ...]:
    """Long tables of finished jobs, `cells` being their columns (task, arm, seed, ...): one a sweep of a job, then training.

    Sweeps: the cell's columns, K, d_star, width, metric, value; a diverged seed's values are NaN. Training: the cell's columns,
    diverged, steps, first_loss, final_loss (nats), seconds (of one core).
    """
    sweeps, training = [[] for _ in jobs[0].sweeps], []
    for cell, job, folders in zip(cells, jobs, made, strict=True):
        done = json.loads((folders["model"] / "training.json").read_text(encoding="utf-8"))
        training.append(cell | done)
        for into, folder in zip(sweeps, folders["sweeps"], strict=True):
            frame = table(folder, job.run.task).assign(**cell, width=job.run.task.width)
            into.append(frame.assign(value=np.nan) if done["diverged"] else frame)
    columns = [*cells[0], "K", "d_star", "width", "metric", "value"]
    return *(pd.concat(parts)[columns] for parts in sweeps), pd.DataFrame(training)


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
