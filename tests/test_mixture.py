"""Several tasks in one vocabulary: the same data as each task alone, shifted, in turn."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lib import tasks
from lib.mixture import Mixture, training_batches
from lib.tasks import IGNORE, Task

TASKS = (Task("circuit", 4, 2), Task("hops", 6, 2), Task("paragg", 2, 1, circuit_width=2))
MIXTURE = Mixture(TASKS)


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


def test_mistakes_are_one_sentence():
    with pytest.raises(ValueError, match="each once"):
        Mixture((TASKS[0], TASKS[0]))
    with pytest.raises(ValueError, match="none: there must be one or more"):
        Mixture(())
    with pytest.raises(ValueError, match="family is 'chess': it must be one of circuit, hops, paragg"):
        MIXTURE.alphabet("chess")
