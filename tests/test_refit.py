"""What a refit may move, what it must leave alone bit for bit, and that it resumes."""

import copy
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lib import refit
from lib.boundary import every, never
from lib.config import LoopedConfig
from lib.evaluation import read
from lib.looped import build
from lib.refit import PARTS, Job, Refit, free, frozen, readings, refit_and_read, refitted, states
from lib.tasks import Task, evaluation_set, training_batches
from lib.training import Recipe, load, make_run, update

TASK = Task("circuit", 3, 1)
BATCHES = training_batches(TASK, 8, range(4), 0)
BOUNDARIES = [never, every(1), every(2)]


def model(seed=0, core=2, **values):
    config = LoopedConfig(vocab_size=TASK.vocab_size, d_model=16, n_heads=2, d_ff=24, core=core, loops=3, **values)
    return build(config, seed).eval()


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def parameters(m):
    return {name: p.detach().clone() for name, p in m.named_parameters()}


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(PARTS), st.sampled_from(BOUNDARIES), st.integers(0, 5))
def test_zero_steps_change_nothing_bitwise(part, boundary, seed):
    original = model(seed)
    before = copy.deepcopy(original.state_dict())
    steps, at = next(refitted(original, BATCHES, boundary, Refit(part, (3,), 1e-2, 4, 8)))
    assert steps == 0 and same(before, original.state_dict())
    ids = torch.as_tensor(BATCHES[0].ids)
    assert torch.equal(at(ids, boundary=boundary).logits, original(ids, boundary=boundary).logits)


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(BOUNDARIES), st.integers(0, 5), st.booleans(), st.integers(2, 3))
def test_the_head_leaves_the_loop_and_the_boundary_norm_and_the_layer_all_but_itself(boundary, seed, shared, core):
    original = model(seed, core, shared_norm=shared)
    first = parameters(frozen(original))
    for part in PARTS:
        *_, (steps, at) = refitted(original, BATCHES, boundary, Refit(part, (1, 5), 1e-2, 4, 8))
        moved = {name for name, p in parameters(at).items() if not torch.equal(p, first[name])}
        head = {"norm.weight", "lm_head.weight"}
        last = {name for name in first if name.startswith(f"core.{core - 1}.")}
        assert steps == 5 and moved == (head if part == "head" else head | last)
        own = original.norm if shared else original.boundary_norm
        assert torch.equal(at.boundary_norm.weight, own.weight)
    assert same(parameters(frozen(original)), first), "the original stays as it was"


def test_the_changed_loop_itself_is_that_of_the_untouched_model():
    original = model()
    _, (_, at) = refitted(original, BATCHES, every(1), Refit("head", (4,), 1e-1, 4, 8))
    ids = torch.as_tensor(BATCHES[0].ids)
    for here, there in zip(original.trajectory(ids, 5, every(1)), at.trajectory(ids, 5, every(1)), strict=True):
        assert torch.equal(here, there)


def test_kept_states_refit_the_head_as_whole_passes_would():
    how, boundary = Refit("head", (6,), 1e-2, 4, 8), every(1)
    *_, (_, quick) = refitted(model(), BATCHES, boundary, how)
    slow = frozen(model())
    moving = free(slow, "head")
    optimizer = torch.optim.AdamW(moving, lr=how.lr, weight_decay=0.0)
    for step in range(6):
        batch = BATCHES[step % 4]
        ids, positions, labels = (torch.as_tensor(v) for v in (batch.ids, batch.answer_positions, batch.labels))
        loss = torch.nn.functional.cross_entropy(
            slow(ids, boundary=boundary, answer_positions=positions).logits.flatten(0, 1), labels.flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(moving, refit.CLIP)
        optimizer.step()
    for name, p in slow.named_parameters():
        torch.testing.assert_close(dict(quick.named_parameters())[name], p, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("part", PARTS)
def test_a_refit_lowers_the_loss_it_is_given(part):
    def loss(m):
        recipe = Recipe(1, 8, 1e-12)
        return np.mean([update(copy.deepcopy(m).requires_grad_(), [], b, recipe, 3, 0.0) for b in BATCHES])

    # the boundary is the configuration's own in `update`
    original = model(boundary=1)
    *_, (_, at) = refitted(original, BATCHES, every(1), Refit(part, (60,), 1e-2, 4, 8))
    assert loss(at) < 0.8 * loss(original)


def test_what_cannot_be_refitted_says_why():
    with pytest.raises(ValueError, match="core is 1.*at least 2"):
        free(model(core=1), "layer")
    with pytest.raises(ValueError, match="coda is 1.*must be 0"):
        states(model(coda=1), BATCHES, never)
    for wrong in (dict(part="tail"), dict(steps=(3, 1)), dict(steps=()), dict(steps=(0, 1)), dict(lr=0.0), dict(batches=0)):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Refit(**{"part": "head", "steps": (1,), "lr": 1e-3, "batches": 1, "batch_size": 8} | wrong)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    run = make_run(TASK, Recipe(20, 8, 4e-3, warmup=2), 0, d_model=16, n_heads=2, d_ff=24, core=2, loops=3)
    return Job(run, every(1), Refit("layer", (1, 2, 6), 1e-2, 4, 8), 16, tmp_path_factory.mktemp("runs"))


def test_readings_are_the_refitted_models_accuracies_and_a_stored_refit_is_not_made_again(job, monkeypatch):
    folder = refit_and_read(job)
    found = readings(folder)
    assert list(found["steps"]) == [0, 1, 2, 6]
    original = load(job.run, job.root)
    batches = training_batches(TASK, 8, range(4), 0)
    *_, (_, at) = refitted(original, batches, every(1), job.refit)
    test = read(at, evaluation_set(TASK, 1, 16), 3, every(1))
    assert found["value"].iloc[-1] == (test.prediction[-1] == test.answer).mean()
    monkeypatch.setattr(refit, "refitted", None)
    assert refit_and_read(job) == folder


def test_a_killed_refit_goes_on_from_its_last_count_and_ends_the_same(job, tmp_path, monkeypatch):
    whole = json.loads((refit_and_read(job) / "readings.json").read_text())

    class Killed(Exception):
        pass

    def cut(*args):
        for steps, at in refitted(*args):
            if steps == 6:
                raise Killed
            yield steps, at

    again = Job(job.run, job.boundary, job.refit, job.n, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(refit, "refitted", cut)
        with pytest.raises(Killed):
            refit_and_read(again)
    folder = refit_and_read(again)
    assert json.loads((folder / "readings.json").read_text()) == whole
    assert "resumed from step 2 of 6" in (folder / "train.log").read_text()


def test_a_refit_that_diverges_reads_as_missing(job, tmp_path):
    wild = Job(job.run, job.boundary, Refit("layer", (3,), 1e30, 4, 8), job.n, tmp_path)
    found = readings(refit_and_read(wild))
    assert found["value"].notna().tolist() == [True, False]
