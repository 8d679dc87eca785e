"""Several tasks in one vocabulary: the same data as each task alone, shifted, in turn."""

import dataclasses
import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lib import tasks
from lib.mixture import Mixture, restored, training_batches
from lib.task_arithmetic import Arithmetic
from lib.task_constrained import Constrained
from lib.task_knowledge import Knowledge
from lib.tasks import IGNORE, Task
from lib.training import keyed

TASKS = (Task("circuit", 4, 2), Task("hops", 6, 2), Task("paragg", 2, 1, circuit_width=2))
MIXTURE = Mixture(TASKS)
NEW = (TASKS[1], Arithmetic(7, 2), Constrained(3, 3, 2), Knowledge(6, 2, 5, 3), TASKS[0])
BOTH = Mixture(NEW)


def batch_of(task, size, step, seed):
    """A task's own batch."""
    make = task.training_batches if task in NEW[1:4] else lambda *a: tasks.training_batches(task, *a)
    return make(size, range(step, step + 1), seed)[0]


def set_of(task, d, n):
    """A task's own evaluation set."""
    return task.evaluation_set(d, n) if task in NEW[1:4] else tasks.evaluation_set(task, d, n)


def test_vocabularies_stand_one_after_the_other():
    assert MIXTURE.vocab_size == len(MIXTURE.vocabulary) == sum(t.vocab_size for t in TASKS) == len(set(MIXTURE.vocabulary))
    for task in TASKS:
        first = MIXTURE.first_id(task.family)
        own = MIXTURE.vocabulary[first : first + task.vocab_size]
        assert own == tuple(f"{task.family} {name}" for name in task.vocabulary)
        assert [MIXTURE.vocabulary[t] for t in MIXTURE.alphabet(task.family)] == list(own[: len(task.alphabet)])


@pytest.mark.parametrize("task", TASKS, ids=lambda t: t.family)
def test_an_evaluation_set_is_the_tasks_own_shifted(task):
    for d in range(1, task.max_depth + 1):
        ours, own = MIXTURE.evaluation_set(task.family, d, 20), tasks.evaluation_set(task, d, 20)
        first = MIXTURE.first_id(task.family)
        assert (ours.ids == own.ids + first).all() and (ours.answer == own.answer + first).all()
        assert (ours.skeleton == own.skeleton).all() and (ours.answer_position == own.answer_position).all()
        assert MIXTURE.floor(task.family, ours) == tasks.floor(task, own)


@given(st.integers(0, 20), st.integers(1, 12), st.integers(0, 5))
@settings(max_examples=15, deadline=None)
def test_a_batch_depends_on_its_step_alone_and_tasks_take_turns(start, count, seed):
    found = training_batches(MIXTURE, 4, range(start, start + count), seed)
    assert len(found) == count
    for step, batch in enumerate(found, start=start):
        task = TASKS[step % 3]
        first = MIXTURE.first_id(task.family)
        own = tasks.training_batches(task, 4, range(step // 3, step // 3 + 1), seed)[0]
        assert (batch.ids == own.ids + first).all() and (batch.answer_positions == own.answer_positions).all()
        assert (batch.labels == np.where(own.labels == IGNORE, IGNORE, own.labels + first)).all()


def test_depths_are_those_with_an_evaluation_set():
    assert [task.depths for task in NEW] == [(1, 2), (2,), (2,), (1,), (1, 2)]


@pytest.mark.parametrize("task", NEW, ids=lambda t: t.family)
def test_every_kind_of_task_is_its_own_shifted(task):
    first = BOTH.first_id(task.family)
    assert [BOTH.vocabulary[t] for t in BOTH.alphabet(task.family)] == [
        f"{task.family} {task.vocabulary[t]}" for t in task.alphabet
    ]
    for d in task.depths:
        ours, own = BOTH.evaluation_set(task.family, d, 12), set_of(task, d, 12)
        assert (ours.ids == own.ids + first).all() and (ours.key == own.key).all()
        if task.family == "constrained":
            assert (ours.answer == -1).all()  # none, whatever the ids
        else:
            assert (ours.answer == own.answer + first).all() and np.isin(ours.answer, BOTH.alphabet(task.family)).all()
        floor = task.floor(own) if task in NEW[1:4] else tasks.floor(task, own)
        assert BOTH.floor(task.family, ours) == floor > 0


@given(st.integers(0, 20), st.integers(1, 12), st.integers(0, 5))
@settings(max_examples=15, deadline=None)
def test_every_kind_of_task_takes_its_turn(start, count, seed):
    found = training_batches(BOTH, 4, range(start, start + count), seed)
    assert len(found) == count
    for step, batch in enumerate(found, start=start):
        task = NEW[step % 5]
        first, own = BOTH.first_id(task.family), batch_of(task, 4, step // 5, seed)
        assert (batch.ids == own.ids + first).all() and (batch.answer_positions == own.answer_positions).all()
        assert (batch.labels == np.where(own.labels == IGNORE, IGNORE, own.labels + first)).all()
        assert (batch.d_star == own.d_star).all()


@given(st.integers(0, 30), st.integers(1, 15), st.lists(st.sampled_from(BOTH.tasks), max_size=4), st.integers(0, 3))
@settings(max_examples=20, deadline=None)
def test_turns_name_the_task_of_every_batch_and_each_takes_its_own_in_order(start, count, more, seed):
    order = [task.family for task in (*more, *BOTH.tasks)]
    turned, met = Mixture(BOTH.tasks, tuple(order)), Counter()
    found = dict(enumerate(training_batches(turned, 3, range(start, start + count), seed), start=start))
    assert len(found) == count
    for step in range(start + count):
        family = order[step % len(order)]
        if step in found:
            own, first = batch_of(BOTH.task(family), 3, met[family], seed), BOTH.first_id(family)
            assert (found[step].ids == own.ids + first).all()
        met[family] += 1


def test_a_mixture_is_key_material_that_tells_its_tasks_apart():
    plain = {"family": "hops", "width": 6, "max_depth": 2, "circuit_width": 4, "queries": 8}
    assert keyed(dataclasses.asdict(Mixture(TASKS[1:2]))) == {"tasks": (plain,)}  # as of the runs that there are
    turned = Mixture(TASKS[1:2], (TASKS[1].family,))
    assert keyed(dataclasses.asdict(turned)) != keyed(dataclasses.asdict(Mixture(TASKS[1:2])))
    stated = json.loads(json.dumps(dataclasses.asdict(BOTH)))["tasks"]
    assert [task["family"] for task in stated] == ["hops", "arithmetic", "constrained", "knowledge", "circuit"]
    assert stated[1] == {"family": "arithmetic", "modulus": 7, "max_depth": 2}


def test_mistakes_are_one_sentence():
    with pytest.raises(ValueError, match="each once"):
        Mixture((TASKS[0], TASKS[0]))
    with pytest.raises(ValueError, match="turns are hops: they must hold each of"):
        Mixture(BOTH.tasks, ("hops",))
    with pytest.raises(ValueError, match="turns are .*, paragg: they must hold each of .* and no other"):
        Mixture(NEW[1:2], ("arithmetic", "paragg"))
    with pytest.raises(ValueError, match="none: there must be one or more"):
        Mixture(())
    with pytest.raises(ValueError, match="family is 'chess': it must be one of circuit, hops, paragg"):
        MIXTURE.alphabet("chess")


@pytest.mark.parametrize("mixture", [BOTH, MIXTURE, Mixture(BOTH.tasks, (*(t.family for t in BOTH.tasks), "arithmetic"))])
def test_a_mixture_is_made_again_from_its_key_material(mixture):
    assert restored(json.loads(json.dumps(keyed(dataclasses.asdict(mixture))))) == mixture
    alone = json.loads(json.dumps(keyed(dataclasses.asdict(mixture.tasks[0]))))
    assert restored(alone) == Mixture(mixture.tasks[:1])
    with pytest.raises((TypeError, ValueError)):
        restored({"family": "arithmetic", "width": 3})
