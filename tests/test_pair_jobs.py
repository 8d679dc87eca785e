"""Pairs of stand-ins and of released checkpoints: what is read is what the models say, instance by instance, and once."""

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from lib import at_hand, claims, pair_jobs, params, paths, prompts, released, released_pairs, standins, tasks
from lib.boundary import Boundary
from lib.pairs import EVERY, NEVER, arm_name, table
from lib.params import STYLES
from lib.training import loop_count
from tests import checkpoints
from tests.conftest import environment
from tests.test_prompts import TOKENIZER

PERIODS = (EVERY, NEVER, 2)


@pytest.fixture(scope="module")
def p():
    return params.load("4_1_asymmetry", "smoke") | {"steps": 12, "warmup": 2, "n_test": 24, "loops": 8, "seeds": 1}


@pytest.fixture(scope="module")
def made(p, tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    cells = [{"style": style, "seed": 0} for style in p["styles"]]
    jobs = [pair_jobs.Job(standins.run_of(p, **cell), PERIODS, 8, 24, root, probed=True) for cell in cells]
    return cells, jobs, [pair_jobs.train_and_read(job) for job in jobs]


def test_styles_are_the_families_and_the_parameters_know_them(p):
    assert tuple(standins.STYLES) == STYLES
    for style, (family, _) in standins.STYLES.items():
        run = standins.run_of(p | {"styles": list(STYLES), "lr": [1e-3] * 3}, style, 0)
        c, recipe = run.config(), run.recipe
        assert (c.boundary == 1) == (family == "ouro") == (recipe.loss == "exit_weighted") == c.exit_gate
        assert (c.injection == "concat") == (family == "huginn") == recipe.fresh_state == bool(recipe.backprop)
        counts = [loop_count(i, recipe, 4, 0) for i in range(4000)]
        assert abs(np.mean(counts) - 4) < 0.15 and (len(set(counts)) > 5) == (family == "huginn")


def test_readings_are_what_the_model_says(p, made):
    cells, jobs, folders = made
    pairs, probes, training = pair_jobs.pairs(*made)
    assert len(pairs) == len(probes) == len(cells) * len(p["tasks"]) and not training["diverged"].any()
    for pair in pairs:
        job = jobs[[c["style"] for c in cells].index(pair.model.split(",")[0])]
        model = pair_jobs.load(job.run, job.root)
        sets = pair_jobs.sets(job.run.task, pair.task, 24)
        ids = [torch.as_tensor(s.ids) for s in sets]
        for period in PERIODS:
            for K in (1, 4, 8):
                said = [model(x, loops=K, boundary=Boundary(period)).logits for x in ids]
                at = [logits[torch.arange(len(s.answer)), s.answer_position] for logits, s in zip(said, sets, strict=True)]
                right = torch.cat(at).argmax(-1).numpy() == np.concatenate([s.answer for s in sets])
                assert (pair.right(period)[K - 1] == right).all()
        own = [
            tasks.floor(job.run.task.task(pair.task), tasks.evaluation_set(job.run.task.task(pair.task), s.d_star, 24))
            for s in sets
        ]
        assert pair.floor == pytest.approx(np.mean(own))
        assert pair.alphabet == job.run.task.alphabet(pair.task) and pair.r0 == 4
        assert len(pair.cluster) == len(pair.d_star) == pair.right(NEVER).shape[1] == 24 * len(sets)
        same = pair_jobs.same_at_one_loop(model, sets[0], PERIODS)
        assert same and pair.changed == (NEVER if pair.family == "ouro" else EVERY)


def test_states_to_probe_are_those_of_the_removed_norm(made):
    cells, jobs, folders = made
    job, found = jobs[0], folders[0]
    model = pair_jobs.load(job.run, job.root)
    task = job.run.task.tasks[0].family
    instances = pair_jobs.sets(job.run.task, task, 24)[0]
    *_, z = model.trajectory(torch.as_tensor(instances.ids), 4, Boundary(NEVER))
    expected = z[torch.arange(24), instances.answer_position].detach().numpy()
    np.testing.assert_allclose(np.load(found[task, "states"] / "states.npy")[:24], expected, atol=1e-6)


def test_a_second_call_reads_nothing(made, monkeypatch):
    _, jobs, folders = made
    monkeypatch.setattr(pair_jobs, "load", lambda *_: pytest.fail("a model was loaded again"))
    assert [pair_jobs.train_and_read(job) for job in jobs] == [pair_jobs.stored(job) for job in jobs] == folders
    monkeypatch.undo()
    more = dataclasses.replace(jobs[0], periods=(*PERIODS, 3))
    assert pair_jobs.stored(more) is None
    assert {k: v for k, v in pair_jobs.train_and_read(more).items() if k[1] != 3} == folders[0]


def test_the_long_table_names_arms_styles_and_seeds(made):
    pairs, _, _ = pair_jobs.pairs(*made)
    frame = table(pairs)
    assert set(frame["style"]) == {c["style"] for c in made[0]} and set(frame["seed"]) == {0}
    assert {arm_name(pairs[0], k) for k in PERIODS} == {"intact", "removed", "every 2"}
    one = pairs[0]
    rows = frame[(frame["model"] == one.model) & (frame["task"] == one.task) & (frame["arm"] == "removed")]
    accuracy = rows[rows["metric"] == "accuracy"].set_index("K")["value"]
    np.testing.assert_allclose(accuracy, one.accuracy(NEVER))
    ratio = rows[rows["metric"] == "norm_ratio"].set_index("K")["value"]
    norm = one.readings[NEVER].norm.mean(axis=1)
    np.testing.assert_allclose(ratio, norm / norm[0])


# --- released checkpoints -------------------------------------------------------------------------------------------------

MAKERS = {"Ouro, sharded": lambda folder: checkpoints.ouro(folder, shards=2), "Huginn": checkpoints.huginn}


@pytest.fixture(params=MAKERS, ids=MAKERS)
def checkpoint(request, tmp_path, monkeypatch):
    """A small checkpoint in a real layout whose tokenizer has the answers as single tokens."""
    monkeypatch.setattr(checkpoints, "tokenizer", lambda folder: saved(TOKENIZER, folder))
    return MAKERS[request.param](tmp_path / "model")


def saved(tokenizer, folder):
    tokenizer.save_pretrained(folder)
    return len(tokenizer)


def job_of(folder, root, **values):
    how = {"periods": (EVERY, NEVER), "loops": 3, "n": 6, "shots": 2, "dtype": "float64", "device": "cpu", "batch_size": 4}
    some = (tasks.Task("circuit", 3, 2), tasks.Task("hops", 5, 1))
    return released_pairs.Job(str(folder), some, **(how | values), root=root)


def test_prompts_are_read_in_the_instances_order_with_the_shared_text_run_once(checkpoint, tmp_path):
    job = job_of(checkpoint, tmp_path / "runs")
    pairs, _, same = released_pairs.pairs(job)
    model, words = released.load(checkpoint, dtype="float64"), released.tokenizer(checkpoint)
    assert same == {"circuit": True, "hops": True} and [pair.task for pair in pairs] == ["circuit", "hops"]
    pair, task = pairs[0], job.tasks[0]
    position = 0
    for d in (1, 2):
        whole = prompts.few_shot(task, d, 6, words, 2)
        rows = [row for group in whole.groups for row in group.ids]
        gold = np.concatenate([g.answer for g in whole.groups])[whole.order]
        for i in range(6):
            ids = torch.as_tensor(rows[whole.order[i]])[None]
            for period in (EVERY, NEVER):
                with torch.no_grad():
                    logits = model(ids, loops=3, boundary=Boundary(period)).logits[0, -1]
                top = logits.topk(2).values
                if top[0] - top[1] > 1e-3:
                    assert pair.readings[period].prediction[2, position] == logits.argmax()
                assert pair.readings[period].gap[2, position] == pytest.approx(float(top[0] - top[1]), abs=1e-4)
            assert pair.readings[NEVER].answer[position] == gold[i]
            position += 1
    assert pair.family == ("ouro" if model.config.boundary else "huginn") and pair.r0 == model.config.loops


def test_a_stored_checkpoint_is_not_loaded_again(checkpoint, tmp_path, monkeypatch):
    job = job_of(checkpoint, tmp_path / "runs", probed=True, n=24)
    first = released_pairs.pairs(job)
    monkeypatch.setattr(released, "load", lambda *_, **__: pytest.fail("the checkpoint was loaded again"))
    again = released_pairs.pairs(job)
    for a, b in zip(first[0], again[0], strict=True):
        assert all((a.right(k) == b.right(k)).all() for k in (EVERY, NEVER))
    assert len(first[1]) == len(again[1]) == 2 and first[2] == again[2]
    with pytest.raises(pytest.fail.Exception, match="loaded again"):
        released_pairs.pairs(dataclasses.replace(job, loops=2))


def test_fingerprints_tell_checkpoints_apart(tmp_path):
    a, b = checkpoints.ouro(tmp_path / "a"), checkpoints.ouro(tmp_path / "b", total_ut_steps=5)
    assert released_pairs.fingerprint(a) == released_pairs.fingerprint(a) != released_pairs.fingerprint(b)
    before = released_pairs.fingerprint(a)
    content = bytearray((a / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (a / "model.safetensors").write_bytes(content)
    assert released_pairs.fingerprint(a) != before


def test_released_parameters_end_in_pairs_and_norms(checkpoint, p, tmp_path, monkeypatch):
    monkeypatch.setenv("LOOPED_OUTPUTS", str(tmp_path))
    values = p | {
        "models": [str(checkpoint)],
        "n_test": 8,
        "shots": 2,
        "loops": 3,
        "tasks": ["circuit"],
        "styles": [],
        "lr": [],
    }
    hand = at_hand.of(values, doses=(1, 2, NEVER))
    family = hand.pairs[0].family
    assert not hand.stand_ins and hand.training.empty and hand.identity["bitwise"].all()
    assert set(hand.pairs[0].readings) == ({1, 0, 2} if family == "ouro" else {1, 0})
    final = hand.norms[hand.norms["norm"] == "norm"].iloc[0]
    assert final["acts"] == ("at the loop boundary" if family == "ouro" else "outside the loop")


def test_absent_models_are_named_before_anything_is_loaded(p):
    with pytest.raises(ValueError, match="hf download ByteDance/Ouro-2.6B"):
        at_hand.of(p | {"models": ["ByteDance/Ouro-2.6B"]})


@pytest.mark.parametrize("notebook", ["4_1_asymmetry", "4_2_readout_collapse"])
def test_a_notebook_runs_on_checkpoints_in_the_released_layouts(notebook, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "tokenizer", lambda folder: saved(TOKENIZER, folder))
    models = [str(make(tmp_path / name)) for name, make in (("ouro", checkpoints.ouro), ("huginn", checkpoints.huginn))]
    values = {"models": models, "n_test": 24, "shots": 2, "loops": 16, "batch_size": 32, "dtype": "float32"}
    source = paths.notebooks() / f"{notebook}.ipynb"
    command = [sys.executable, "-m", "papermill", str(source), str(tmp_path / "out.ipynb"), "-y", json.dumps(values)]
    one_thread = {"OMP_NUM_THREADS": "1"}  # more of them only wait for each other on models this small
    done = subprocess.run(command, env=environment(tmp_path) | one_thread, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads((tmp_path / f"smoke/{notebook}/result.json").read_text(encoding="utf-8"))
    assert result["figures"]["models"] == 2 and result["figures"]["pairs"] == 4
    section = notebook[:3].replace("_", ".")
    assert [v["id"] for v in result["verdicts"]] == [k for k, c in claims.load().items() if c["section"] == section]
    assert "stand-ins" not in json.dumps(result["verdicts"])
