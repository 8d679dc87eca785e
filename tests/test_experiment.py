"""From parameters to tables: what is collected is what was trained and swept, also when a seed diverges."""

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from lib import experiment, params, plots, rules_scratch
from lib.experiment import ARMS, Job
from lib.training import trained

SMALL = {"circuit_steps": 25, "hops_steps": 25, "warmup": 5, "n_test": 16, "d_model": 16, "n_heads": 2, "d_ff": 24, "r0": 2}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Cells, jobs and finished jobs of both tasks, two seeds an arm; the no-norm arm on circuit diverges."""
    p = params.load("4_3_scratch_training", "smoke") | SMALL
    cells = [dict(task=task, arm=arm, seed=seed) for task in ("circuit", "hops") for arm in ARMS for seed in range(2)]
    jobs = []
    for cell in cells:
        task, arm, seed = cell.values()
        rates = {"circuit_lr_no_norm": 1.0e30} if (task, arm) == ("circuit", "no_norm") else {}
        run = experiment.arm_run(p | rates, task, arm, seed)
        jobs.append(Job(run, ((ARMS[arm], 16), (experiment.other(arm), 16)), 16, tmp_path_factory.getbasetemp() / "runs"))
    return cells, jobs, experiment.make(jobs)


def test_a_diverged_seed_is_marked_counted_judged_and_drawn(finished, tmp_path):
    own, swapped, training = experiment.collect(*finished)
    lost = (training["task"] == "circuit") & (training["arm"] == "no_norm")
    assert training.loc[lost, "diverged"].all() and not training.loc[~lost, "diverged"].any()
    accuracy = experiment.metric(own, "accuracy")
    gone = (accuracy["task"] == "circuit") & (accuracy["arm"] == "no_norm")
    assert accuracy.loc[gone, "value"].isna().all() and accuracy.loc[~gone, "value"].notna().all()
    assert experiment.one_loop_differences(finished[2]) == 0
    floors = experiment.floor_table([job.run.task for job in finished[1][::4]], 16)
    state_norm, other = (experiment.metric(t[t["d_star"] == "all"], m) for t, m in ((own, "state_norm"), (swapped, "accuracy")))
    whole = accuracy[accuracy["d_star"] == "all"]
    judged = rules_scratch.judge(whole, state_norm, other[other["K"].isin([2, 16])], floors, 2, "smoke")
    assert "2 of no_norm diverged on circuit" in next(j.reason for j in judged if j.id == "no_norm_extrapolates_better")
    for name, frame, log_y in (("a", whole, False), ("b", state_norm, True)):
        plots.against_loops(frame, "y", 2, floors=None if log_y else floors, log_y=log_y).save(tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").stat().st_size > 5000


def test_tables_hold_what_the_readings_say(finished):
    cells, jobs, made = finished
    own, swapped, _ = experiment.collect(*finished)
    at = cells.index(dict(task="hops", arm="with_norm", seed=1))
    for frame, folder in zip((own, swapped), made[at]["sweeps"], strict=True):
        readings = experiment.readings_in(folder, 1)
        part = frame[
            (frame["task"] == "hops") & (frame["arm"] == "with_norm") & (frame["seed"] == 1) & (frame["d_star"] == "1")
        ]
        found = part[part["metric"] == "accuracy"].sort_values("K")["value"].to_numpy()
        np.testing.assert_allclose(found, (readings.prediction == readings.answer).mean(axis=1))
        assert readings.prediction.shape == (16, 16) and list(part["width"].unique()) == [jobs[at].run.task.width]
    assert not np.array_equal(*(experiment.readings_in(f, 1).entropy[1:] for f in made[at]["sweeps"])), "two boundaries"


def test_the_mean_over_depths_weighs_every_depth_alike(finished):
    own, _, _ = experiment.collect(*finished)
    accuracy = experiment.metric(own[(own["task"] == "circuit") & (own["arm"] == "with_norm")], "accuracy")
    depths = accuracy[accuracy["d_star"] != "all"].groupby(["seed", "K"])["value"].mean()
    pd.testing.assert_series_equal(
        depths, accuracy[accuracy["d_star"] == "all"].set_index(["seed", "K"])["value"], check_index=False
    )


def test_a_worker_process_trains_bitwise_what_this_process_trains(finished, tmp_path):
    job, made = finished[1][-1], finished[2][-1]
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        folder = trained(job.run, tmp_path)
    finally:
        torch.set_num_threads(before)
    here, there = (load_file(f / "model.safetensors") for f in (folder, made["model"]))
    assert folder != made["model"] and here.keys() == there.keys() and all(torch.equal(here[k], there[k]) for k in here)
