"""The pilots that fix a scale's learning rates: the same grid for every kind of model, seeds that are never reported.

A pilot looks only at intact models at K = r0, and in section 4.3 at whether loops matter at all (the no-norm arm at K = 1). Its
table is kept in params/<notebook>/pilot_<scale>.csv, and the choice it led to in the scale's parameter file.
"""

import pandas as pd

from lib import axes_arms, experiment, group_scores, pair_jobs, params, paths, standins
from lib.boundary import Boundary
from lib.experiment import Job
from lib.store import write_atomic
from lib.task_groups import GROUPS

RATES = (2.0e-3, 4.0e-3, 8.0e-3)
SEEDS = (1000, 1001)  # reported runs count from 0
FIRST, STAND_INS = "4_3_scratch_training", "4_1_asymmetry"
AXES = {"dense_axes": "arms", "moe_transfer": "arms_moe"}  # the arms that each trains; one seed, since there are many
# what each notebook trains beyond section 4.3's models, whose pilot stands for them in the others
OWN = {
    FIRST: lambda arm, readout, p: True,
    "4_4_refit": lambda arm, readout, p: True,
    "4_5_overshoot": lambda arm, readout, p: arm != next(iter(experiment.splits(p))),
    "beyond_readout_axis": lambda arm, readout, p: readout == "raw",
}


def stand_ins(scale: str) -> pd.DataFrame:
    """Train every (style, rate, seed) of section 4.1's stand-ins; returns and keeps its table: style, lr, seed, and the intact
    accuracy at K = r0 on each task."""
    p, cells, jobs = params.load(STAND_INS, scale), [], []
    for style in p["styles"]:
        for lr in RATES:
            for seed in SEEDS:
                made = standins.run_of(p, style, seed, lr)
                cells.append({"style": style, "lr": lr, "seed": seed})
                config = made.config()
                jobs.append(pair_jobs.Job(made, (config.boundary,), config.loops, p["n_test"], paths.runs()))
    rows = []
    for cell, job, folders in zip(cells, jobs, pair_jobs.make(jobs, title="pilot"), strict=True):
        found = {task: pair_jobs.readings_in(folders[task, job.periods[0]]) for task in p["tasks"]}
        rows.append(cell | {task: (r.prediction[-1] == r.answer).mean() for task, r in found.items()})
    frame = pd.DataFrame(rows)
    _keep(frame, STAND_INS, scale)
    return frame


def axes(scale: str, notebook: str) -> pd.DataFrame:
    """Train every (arm, rate) of an axes notebook at the first pilot seed; returns and keeps its table: arm, lr, seed, the
    accuracy at the end of training on each task, and `mean`, over groups."""
    p, cells, jobs = params.load(notebook, scale), [], []
    for arm in p[AXES[notebook]]:
        for lr in RATES:
            cells.append({"arm": arm, "lr": lr, "seed": SEEDS[0]})
            jobs.append(group_scores.Job(axes_arms.run_of(p, arm, SEEDS[0], lr), p["n_test"], paths.runs()))
    made = group_scores.make(jobs, p["workers"] or None, title="pilot")
    scores = group_scores.collect(cells, made)
    scores = scores[scores["share"] == 1.0].drop(columns="share")
    frame = scores.pivot(index=list(cells[0]), columns="task", values="value")
    frame["mean"] = sum(frame[list(tasks)].mean(axis=1) for tasks in GROUPS.values()) / len(GROUPS)
    frame = frame.reindex(pd.MultiIndex.from_frame(pd.DataFrame(cells))).reset_index()
    _keep(frame, notebook, scale)
    return frame


def run(scale: str, notebook: str = FIRST) -> pd.DataFrame:
    """Train every (task, kind, rate, seed) of the grid; returns and keeps its table: task, arm, readout, lr, seed, accuracy_r0,
    accuracy_1. Raises ValueError for a notebook that trains no models of its own.
    """
    if notebook in AXES:
        return axes(scale, notebook)
    if notebook == STAND_INS:
        return stand_ins(scale)
    if notebook not in OWN:
        raise ValueError(f"{notebook} has no pilot: it must be one of {', '.join((STAND_INS, *OWN, *AXES))}.")
    p, cells, jobs = params.load(notebook, scale), [], []
    for task in p["tasks"]:
        for lr in RATES:
            for (arm, readout), make in experiment.kinds(p | _all_rates(p, lr), task).items():
                if OWN[notebook](arm, readout, p):
                    cells += [{"task": task, "arm": arm, "readout": readout, "lr": lr, "seed": seed} for seed in SEEDS]
                    runs = [make(seed) for seed in SEEDS]
                    boundary, r0 = Boundary(runs[0].config().boundary), runs[0].config().loops
                    jobs += [Job(run, ((boundary, r0),), p["n_test"], paths.runs()) for run in runs]
    rows = []
    for cell, job, made in zip(cells, jobs, experiment.make(jobs, title="pilot"), strict=True):
        table = experiment.table(made["sweeps"][0], job.run.task)
        accuracy = table[(table["metric"] == "accuracy") & (table["d_star"] == "all")].set_index("K")["value"]
        # all a pilot may see away from r0
        at_one = accuracy[1] if notebook == FIRST and cell["arm"] == "no_norm" else None
        rows.append(cell | {"accuracy_r0": accuracy[job.run.config().loops], "accuracy_1": at_one})
    frame = pd.DataFrame(rows)
    _keep(frame, notebook, scale)
    return frame


def _keep(frame: pd.DataFrame, notebook: str, scale: str) -> None:
    """Write a pilot's table beside the parameters it led to."""
    write_atomic(paths.params() / notebook / f"pilot_{scale}.csv", frame.to_csv(index=False, float_format="%.6g"))


def _all_rates(p: dict, lr: float) -> dict:
    """The parameters that are peak rates of training, all at lr."""
    rates = {key: value for key, value in p.items() if "_lr" in key and key != "refit_lr"}
    return {key: [lr] * len(value) if isinstance(value, list) else lr for key, value in rates.items()}
