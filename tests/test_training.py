"""Training: resumed bit for bit after kills, diverged seeds marked, the schedule and the draws as documented."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from lib import paths, store
from lib.looped import build
from lib.tasks import Task
from lib.training import (
    BEFORE,
    Recipe,
    learning_rate,
    loop_count,
    make_run,
    optimizers,
    read_checkpoint,
    save_checkpoint,
    train,
    trained,
)
from tests.train_command import RUN

SMALL = {"d_model": 16, "n_heads": 2, "d_ff": 24}


def run(**changed):
    recipe = Recipe(**{"steps": 30, "batch_size": 8, "lr": 2.0e-3, "warmup": 5} | changed)
    return make_run(Task("circuit", 3, 2), recipe, 0, **SMALL)


def test_two_kills_then_bitwise_the_unbroken_weights(tmp_path):
    unbroken, killed = tmp_path / "unbroken", tmp_path / "killed"
    command = [sys.executable, "-m", "tests.train_command"]
    subprocess.run([*command, str(unbroken)], cwd=paths.ROOT, check=True)
    name = store.key(RUN.spec())
    log = killed / f"{name}.partial" / "train.log"
    for kill in (1, 2):
        process = subprocess.Popen([*command, str(killed)], cwd=paths.ROOT)
        deadline = time.monotonic() + 180
        # wait for a checkpoint of this very process, not of the one before
        while (
            len(re.findall("(?m) (?:started|resumed)[^\n]*\n[^\n]* checkpoint", log.read_text() if log.exists() else "")) < kill
        ):
            assert process.poll() is None and time.monotonic() < deadline, "it ended before it could be killed"
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert not (killed / name).exists()
    subprocess.run([*command, str(killed)], cwd=paths.ROOT, check=True)
    resumed = [int(n) for n in re.findall(r"resumed from step (\d+)", (killed / name / "train.log").read_text())]
    assert len(resumed) == 2 and 0 < resumed[0] < resumed[1] < 400
    a, b = (load_file(root / name / "model.safetensors") for root in (unbroken, killed))
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    assert np.array_equal(*(np.load(root / name / "losses.npy") for root in (unbroken, killed)))
    assert not list((killed / name).glob("checkpoint*"))


def test_a_loss_that_is_not_finite_marks_the_seed_diverged(tmp_path):
    folder = trained(run(lr=1.0e30, clip=1.0e30), tmp_path)
    done = json.loads((folder / "training.json").read_text())
    assert done["diverged"] and done["steps"] < 30
    assert "diverged" in (folder / "train.log").read_text()


@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b[:-9] + bytes([b[-9] ^ 1]) + b[-8:], lambda b: b""])
def test_a_damaged_checkpoint_is_not_read(tmp_path, damage):
    save_checkpoint({"step": 3, "weights": torch.arange(50.0)}, tmp_path / "checkpoint.pt")
    assert read_checkpoint(tmp_path / "checkpoint.pt", "cpu")["step"] == 3
    data = (tmp_path / "checkpoint.pt").read_bytes()
    (tmp_path / "checkpoint.pt").write_bytes(damage(data))
    train(run(), tmp_path)
    said = (tmp_path / "train.log").read_text()
    assert "damaged" in said and "started" in said and "resumed" not in said


def test_the_loss_falls_and_a_second_call_trains_nothing(tmp_path):
    folder = trained(run(steps=150), tmp_path)
    losses = np.load(folder / "losses.npy")
    assert losses[-20:].mean() < losses[:20].mean() and not json.loads((folder / "training.json").read_text())["diverged"]
    before = (folder / "train.log").read_text()
    assert trained(run(steps=150), tmp_path) == folder and (folder / "train.log").read_text() == before


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_every_parameter_has_one_optimiser_and_blocks_matrices_decay(optimizer):
    model = build(run().config(), 0)
    opts = optimizers(model, Recipe(10, 8, 1.0e-3, optimizer=optimizer, weight_decay=0.1))
    held = [p for opt in opts for group in opt.param_groups for p in group["params"]]
    assert sorted(map(id, held)) == sorted(map(id, model.parameters()))
    decayed = {id(p) for opt in opts for g in opt.param_groups if g["weight_decay"] for p in g["params"]}
    names = {name for name, p in model.named_parameters() if id(p) in decayed}
    assert names == {n for n, p in model.named_parameters() if n.startswith("core") and p.dim() == 2}


@given(st.integers(0, 400), st.integers(0, 100), st.integers(101, 400))
@settings(deadline=None)
def test_the_schedule_warms_up_then_falls_to_zero(step, warmup, steps):
    recipe = Recipe(steps, 8, 1.0, warmup=warmup)
    value = learning_rate(min(step, steps), recipe)
    assert 0 <= value <= 1
    if step < warmup:
        assert value == pytest.approx((step + 1) / warmup)
    assert learning_rate(steps, recipe) == pytest.approx(0, abs=1e-12)
    assert learning_rate(warmup, recipe) == pytest.approx(1)


def test_sampled_loop_counts_have_mean_r0_and_fixed_ones_are_r0():
    sampled = Recipe(10, 8, 1.0e-3, loop_sampling="poisson_lognormal")
    counts = [loop_count(step, sampled, 6, seed=1) for step in range(4000)]
    assert min(counts) >= 1 and np.mean(counts) == pytest.approx(6, abs=0.2) and len(set(counts)) > 5
    assert counts == [loop_count(step, sampled, 6, seed=1) for step in range(4000)]
    assert {loop_count(step, Recipe(10, 8, 1.0e-3), 6, 0) for step in range(9)} == {6}


def test_options_that_came_later_leave_earlier_keys_alone():
    spec = make_run(Task("circuit", 4, 2), Recipe(20, 8, 3e-3), 7, d_model=16, n_heads=2, d_ff=24, loops=3, core=1).spec()
    assert store.key(spec | {"torch": "x", "behaviour": 2}) == "4155b16abdd9f988418b"


def test_a_run_is_keyed_by_what_determines_it():
    keys = [store.key(r.spec()) for r in (run(), run(steps=31), run(lr=1.0e-3), run(optimizer="muon"))]
    other = [make_run(run().task, run().recipe, 1, **SMALL), make_run(run().task, run().recipe, 0, **SMALL, boundary=1)]
    keys += [store.key(r.spec()) for r in other]
    assert len(set(keys)) == len(keys)
    stated = make_run(run().task, run().recipe, 0, **SMALL, boundary=0, block="pre_norm")
    assert store.key(stated.spec()) == keys[0], "a default that is stated is no other run"


def test_an_option_added_later_keeps_the_keys_of_earlier_runs(monkeypatch):
    whole, name = run().spec(), store.key(run().spec())
    assert {"loops", "d_model", "boundary"} <= whole["model"].keys() and "warmup" in whole["recipe"], "defaults are stated"
    monkeypatch.setitem(BEFORE, "clip", 1.0)
    assert "clip" not in run().spec()["recipe"] and store.key(run().spec()) != name
    assert run(clip=2.0).spec()["recipe"]["clip"] == 2.0


@pytest.mark.parametrize(
    "values, said",
    [
        ({"steps": 0}, "steps is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"lr": -1.0}, "lr is -1.0"),
        ({"lr": math.nan}, "lr is nan"),
        ({"optimizer": "sgd"}, "adamw, muon"),
        ({"loop_sampling": "uniform"}, "fixed, poisson_lognormal"),
        ({"warmup": -1}, "warmup is -1"),
    ],
)
def test_an_impossible_recipe_is_one_sentence(values, said):
    with pytest.raises(ValueError, match=said):
        Recipe(**{"steps": 10, "batch_size": 8, "lr": 1.0e-3} | values)
