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

from lib import objectives, paths, store
from lib.experts import Routes
from lib.looped import build
from lib.tasks import Task, training_batches
from lib.training import (
    BEFORE,
    Recipe,
    learning_rate,
    load,
    loop_count,
    make_run,
    optimizers,
    read_checkpoint,
    save_checkpoint,
    train,
    trained,
)
from tests.models import EXPERTS
from tests.train_command import RUN

SMALL = {"d_model": 16, "n_heads": 2, "d_ff": 24}


def run(model=SMALL, **changed):
    recipe = Recipe(**{"steps": 30, "batch_size": 8, "lr": 2.0e-3, "warmup": 5} | changed)
    return make_run(Task("circuit", 3, 2), recipe, 0, **model)


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


def killed_after(run, folder, step):
    """Train into a folder, stopped as a kill would just before the update after `step`, with a checkpoint at every step."""

    class Killed(Exception):
        pass

    def report(done, total):
        if done == step:
            raise Killed

    folder.mkdir()
    with pytest.raises(Killed):
        train(run, folder, report, checkpoint_seconds=-1)


VARIED = {
    "experts": SMALL | EXPERTS | {"loops": 2},
    "H/L states": SMALL | {"state": "split", "core": 2, "h_cycles": 1, "l_cycles": 1, "loops": 2, "injection": "diagonal"},
    "unrolled": SMALL | {"unrolled": True, "loops": 2, "injection": "diagonal", "prelude": 1},
    "tied": SMALL | {"tie_word_embeddings": True, "loops": 2},
}


@pytest.mark.parametrize("name", VARIED)
def test_a_killed_run_leaves_bitwise_the_same_weights_snapshots_and_balances(name, tmp_path):
    routed = name == "experts"
    one = run(VARIED[name], steps=12, snapshots=(4, 9), balance=0.01 if routed else 0.0)
    unbroken, killed = tmp_path / "unbroken", tmp_path / "killed"
    unbroken.mkdir()
    train(one, unbroken)
    killed_after(one, killed, 6)
    train(one, killed)
    assert "resumed from step 6 of 12" in (killed / "train.log").read_text()
    files = ["model.safetensors", "snapshot_4.safetensors", "snapshot_9.safetensors"]
    for file in files:
        a, b = (load_file(folder / file) for folder in (unbroken, killed))
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a), file
    arrays = ["losses.npy", "balance.npy"] if routed else ["losses.npy"]
    for file in arrays:
        assert np.array_equal(*(np.load(folder / file) for folder in (unbroken, killed))), file
    assert (killed / "balance.npy").exists() == routed
    # at a step, the weights of a run that is stopped there
    killed_after(one, tmp_path / "short", 4)
    stopped, kept = read_checkpoint(tmp_path / "short" / "checkpoint.pt", "cpu")["model"], load_file(unbroken / files[1])
    assert stopped.keys() == kept.keys() and all(torch.equal(stopped[k], kept[k]) for k in kept)


def test_a_snapshot_is_loaded_by_its_step(tmp_path):
    for name, model in VARIED.items():
        one = run(model, steps=6, snapshots=(2, 4))
        folder = trained(one, tmp_path)
        early, late, last = (load(one, tmp_path, step) for step in (2, 4, None))
        assert not early.training
        for found, file in ((early, "snapshot_2"), (late, "snapshot_4"), (last, "model")):
            kept, own = load_file(folder / f"{file}.safetensors"), found.state_dict()
            assert all(torch.equal(own[k], kept[k]) for k in kept), (name, file)
        assert not torch.equal(early.core[0].attention.o.weight, late.core[0].attention.o.weight)
        assert (early.lm_head.weight is early.embed_tokens.weight) == (name == "tied")
    with pytest.raises(ValueError, match=r"step is 3: it must be one of the recipe's snapshots, \(2, 4\)"):
        load(one, tmp_path, 3)
    lost = run(steps=6, snapshots=(4,), lr=1.0e30, clip=1.0e30)
    with pytest.raises(ValueError, match="snapshot_4.safetensors is missing: the run diverged before step 4"):
        load(lost, tmp_path, 4)


def test_the_balance_that_is_kept_is_the_batches_own_and_its_weight_counts(tmp_path):
    found = {}
    for weight in (0.0, 1.0):
        one = run(SMALL | EXPERTS | {"loops": 3}, steps=60, balance=weight)
        found[weight] = np.load(trained(one, tmp_path) / "balance.npy")
    assert found[0.0].shape == (60,) and found[0.0][0] == found[1.0][0] and np.isfinite(found[1.0]).all()
    assert found[1.0][-10:].mean() < found[0.0][-10:].mean(), "the loss evens the experts' load out"
    batch, routes = training_batches(one.task, 8, range(1), one.seed)[0], Routes()
    model = build(one.config(), one.seed)
    loss = objectives.loss(
        model, *(torch.as_tensor(v) for v in (batch.ids, batch.answer_positions, batch.labels)), 3, one.recipe, routes
    )
    assert len(routes.executions) == 3 and routes.balance().item() == pytest.approx(float(found[0.0][0]), abs=1e-6)
    plain = objectives.last(model, *(torch.as_tensor(v) for v in (batch.ids, batch.answer_positions, batch.labels)), 3)
    assert loss.item() == pytest.approx(plain.item() + routes.balance().item(), abs=1e-5)


@pytest.mark.parametrize(
    "model, recipe, said",
    [
        (EXPERTS, {"optimizer": "muon"}, "optimizer is 'muon' with feed_forward 'experts': it must be adamw"),
        ({}, {"balance": 0.1}, "balance is 0.1 with feed_forward 'dense': it must be 0"),
        (
            {"unrolled": True},
            {"loop_sampling": "poisson_lognormal"},
            "loop_sampling is 'poisson_lognormal' with an unrolled core",
        ),
    ],
)
def test_a_recipe_that_does_not_fit_the_model_is_one_sentence(model, recipe, said):
    with pytest.raises(ValueError, match=said):
        run(SMALL | model, **recipe)


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


@pytest.mark.parametrize("optimizer, values", [("adamw", {}), ("muon", {}), ("adamw", EXPERTS)])
def test_every_parameter_has_one_optimiser_and_blocks_matrices_decay(optimizer, values):
    model = build(run(SMALL | values).config(), 0)
    opts = optimizers(model, Recipe(10, 8, 1.0e-3, optimizer=optimizer, weight_decay=0.1))
    held = [p for opt in opts for group in opt.param_groups for p in group["params"]]
    assert sorted(map(id, held)) == sorted(map(id, model.parameters()))
    decayed = {id(p) for opt in opts for g in opt.param_groups if g["weight_decay"] for p in g["params"]}
    names = {name for name, p in model.named_parameters() if id(p) in decayed}
    assert names == {n for n, p in model.named_parameters() if n.startswith("core") and p.dim() > 1}


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
    keys += [store.key(run(model, steps=30).spec()) for model in VARIED.values()]
    keys += [store.key(run(VARIED["experts"], **values).spec()) for values in ({"balance": 0.1}, {"snapshots": (3,)})]
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
        ({"balance": -0.1}, "balance -0.1: all must be 0 or more"),
        ({"snapshots": (0,)}, r"snapshots is \(0,\): each must be a step above 0 and below steps, 10"),
        ({"snapshots": (3, 10)}, r"snapshots is \(3, 10\): each must be a step above 0 and below steps, 10"),
    ],
)
def test_an_impossible_recipe_is_one_sentence(values, said):
    with pytest.raises(ValueError, match=said):
        Recipe(**{"steps": 10, "batch_size": 8, "lr": 1.0e-3} | values)
