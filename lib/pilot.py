"""The pilot that fixes a scale's learning rates: the same grid for every arm, seeds that are never reported.

It looks only at intact arms at K = r0, and at whether loops matter at all (the no-norm arm at K = 1). Its table is kept in
params/4_3_scratch_training/pilot_<scale>.csv, and the choice it led to in the scale's parameter file.
"""

import pandas as pd

from lib import experiment, params, paths
from lib.experiment import ARMS, Job

NOTEBOOK = "4_3_scratch_training"
RATES = (2.0e-3, 4.0e-3, 8.0e-3)
SEEDS = (1000, 1001)  # reported runs count from 0


def run(scale: str) -> pd.DataFrame:
    """Train every (task, arm, rate, seed) of the grid; returns and keeps task, arm, lr, seed, accuracy_r0, accuracy_1."""
    p = params.load(NOTEBOOK, scale)
    cells = [(task, arm, lr, seed) for task in p["tasks"] for arm in ARMS for lr in RATES for seed in SEEDS]
    jobs = []
    for task, arm, lr, seed in cells:
        chosen = experiment.arm_run(p | {f"{task}_lr_{arm}": lr}, task, arm, seed)
        jobs.append(Job(chosen, ((ARMS[arm], p["r0"]),), p["n_test"], paths.runs()))
    rows = []
    for (task, arm, lr, seed), job, made in zip(cells, jobs, experiment.make(jobs, title="pilot"), strict=True):
        table = experiment.table(made["sweeps"][0], job.run.task)
        accuracy = table[(table["metric"] == "accuracy") & (table["d_star"] == "all")].set_index("K")["value"]
        first = accuracy[1] if arm == "no_norm" else None  # all a pilot may see away from r0
        rows.append(dict(task=task, arm=arm, lr=lr, seed=seed, accuracy_r0=accuracy[p["r0"]], accuracy_1=first))
    frame = pd.DataFrame(rows)
    frame.to_csv(paths.params() / NOTEBOOK / f"pilot_{scale}.csv", index=False, float_format="%.6g")
    return frame
