"""A maintainer's change is noticed: trained numbers do not move while the behaviour version stands."""

import json

import numpy as np
import pytest

from lib import BEHAVIOUR, experiment, params, paths
from lib.experiment import ARMS, Job
from tests import golden_behaviour

GOLDEN = json.loads(golden_behaviour.FILE.read_text(encoding="utf-8"))
ASK = "raise BEHAVIOUR in lib/__init__.py, run `python -m tests.golden_behaviour`, and retrain what is published"


def test_the_golden_values_belong_to_this_behaviour_version():
    assert GOLDEN["behaviour"] == BEHAVIOUR, ASK


@pytest.mark.parametrize("name", GOLDEN["data"])
def test_tasks_make_the_same_data(name):
    assert golden_behaviour.data(golden_behaviour.TASKS[name]) == GOLDEN["data"][name], ASK


@pytest.mark.parametrize("name", GOLDEN["adamw"])
def test_twenty_float64_steps_end_where_they_did(name):
    task, shape = name.split(", ", 1)
    found = golden_behaviour.adamw(golden_behaviour.TASKS[task], golden_behaviour.SHAPES[shape])
    for key, value in GOLDEN["adamw"][name].items():
        assert found[key] == pytest.approx(value, abs=1e-9), f"{key}: {ASK}"


def test_one_muon_update_ends_where_it_did():
    np.testing.assert_allclose(golden_behaviour.muon(), GOLDEN["muon"], rtol=1e-2, err_msg=ASK)


def test_a_sweep_reads_what_it_did():
    assert golden_behaviour.readings() == pytest.approx(GOLDEN["readings"], rel=1e-6), ASK


@pytest.mark.parametrize("what", ["refits", "moves"])
def test_refits_and_measured_moves_end_where_they_did(what):
    found = {"refits": golden_behaviour.refits, "moves": golden_behaviour.state_moves}[what]()
    # moves are read in single precision
    assert found == pytest.approx(GOLDEN[what], rel=1e-9 if what == "refits" else 1e-4), ASK


def test_a_smoke_seed_of_each_circuit_arm_trains_into_its_committed_range(tmp_path):
    ranges = json.loads((golden_behaviour.FILE.parent / "smoke_ranges.json").read_text(encoding="utf-8"))
    p = params.load("4_3_scratch_training", "smoke")
    jobs = [Job(experiment.arm_run(p, "circuit", arm, 0), ((ARMS[arm], p["r0"]),), p["n_test"], tmp_path) for arm in ARMS]
    for arm, job, made in zip(ARMS, jobs, experiment.make(jobs), strict=True):
        table = experiment.table(made["sweeps"][0], job.run.task)
        found = table[(table["metric"] == "accuracy") & (table["d_star"] == "all") & (table["K"] == p["r0"])]["value"].item()
        low, high = ranges[arm]
        assert low <= found <= high, f"{arm}: accuracy {found:.3f} at K = r0 is outside {low}..{high}; {ASK}"
    assert not paths.runs().is_relative_to(tmp_path)
