"""The table of facts and its questions against plain Python that sees only the token ids and the vocabulary."""

import dataclasses
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.task_knowledge import Knowledge

TASKS = (Knowledge(), Knowledge(5, 3, 4, 6), Knowledge(1, 1, 2, 1), Knowledge(40, 1, 200, 2))


def facts(task, ids, answers):
    """Tokens (T, 2) and the ids of their answers (T,) as {(subject, relation): object}, from names."""
    found = {}
    for (subject, relation), answer in zip(ids.tolist(), answers.tolist(), strict=True):
        asked = task.vocabulary[subject], task.vocabulary[relation]
        assert [name.split(" ")[0] for name in asked] == ["subject", "relation"]
        place = tuple(int(name.split(" ")[1]) for name in asked)
        value = int(task.vocabulary[answer].removeprefix("object "))
        assert found.setdefault(place, value) == value
    return found


@pytest.mark.parametrize("task", TASKS, ids=str)
def test_every_sequence_reads_one_table(task):
    known = {}
    for batch in task.training_batches(32, range(6), 0):
        assert batch.ids.shape == (32, task.queries, task.fields) and batch.ids.dtype == np.int64
        assert batch.answer_positions.tolist() == list(range(task.queries)) and (batch.d_star == 1).all()
        assert batch.labels.shape == batch.d_star.shape == (32, task.queries)
        for ids, labels in zip(batch.ids, batch.labels, strict=True):
            for place, value in facts(task, ids, labels).items():
                assert known.setdefault(place, value) == value
    n = task.subjects * task.relations
    made = task.evaluation_set(1, n)
    asked = facts(task, made.ids[:, 0], made.answer)
    assert len(asked) == n and known.items() <= asked.items()
    assert all(task.table[place] == value for place, value in asked.items())


@given(st.integers(1, 20), st.integers(1, 5), st.integers(2, 30), st.data())
@settings(max_examples=30, deadline=None)
def test_an_evaluation_set_asks_distinct_facts_and_begins_every_greater_one(subjects, relations, objects, data):
    task = Knowledge(subjects, relations, objects)
    n = data.draw(st.integers(1, subjects * relations))
    made, whole = task.evaluation_set(1, n), task.evaluation_set(1, subjects * relations)
    assert made.ids.shape == (n, 1, 2) and (made.answer_position == 0).all() and made.d_star == 1
    assert len(facts(task, made.ids[:, 0], made.answer)) == n == len(np.unique(made.key))
    assert (made.skeleton == made.key).all() and set(made.answer) <= set(task.alphabet)
    for name in ("ids", "answer", "key"):
        np.testing.assert_array_equal(getattr(made, name), getattr(whole, name)[:n])
    assert (made.raw["subject"] * relations + made.raw["relation"] < subjects * relations).all()
    assert [task.table[s, r] for s, r in zip(made.raw["subject"], made.raw["relation"], strict=True)] == made.answer.tolist()


def test_the_first_facts_are_a_fair_sample_of_the_table():
    task = Knowledge(200, 10, 4)
    made = task.evaluation_set(1, 500)
    for values, kinds in ((made.answer, 4), (made.raw["relation"], 10), (made.raw["subject"] // 20, 10)):
        counts = np.bincount(values, minlength=kinds)
        assert np.abs(counts - 500 / kinds).max() < 5 * math.sqrt(500 / kinds)


def test_objects_are_uniform_and_the_table_depends_on_its_sizes_alone():
    table = Knowledge(300, 20, 16).table
    counts = np.bincount(table.reshape(-1), minlength=16)
    assert len(counts) == 16 and ((counts - 375) ** 2 / 375).sum() < 45  # 15 degrees of freedom: p = 1e-4
    np.testing.assert_array_equal(table, Knowledge(300, 20, 16, queries=3).table)
    for sizes in ((301, 20, 16), (300, 21, 16), (300, 20, 17)):
        assert (Knowledge(*sizes).table[:300, :20] == table).mean() < 0.1


def test_questions_are_uniform_over_the_facts():
    task = Knowledge(5, 3, 4, 6)
    asked = Counter()
    for batch in task.training_batches(100, range(25), 2):
        asked.update(map(tuple, batch.ids.reshape(-1, 2).tolist()))
    assert len(asked) == 15 and sum((c - 1000) ** 2 / 1000 for c in asked.values()) < 45
    # positions of one sequence are independent: a fact repeats at the next one in a fifteenth of the rows
    ids = np.concatenate([batch.ids for batch in task.training_batches(100, range(25), 2)])
    assert abs((ids[:, 1:] == ids[:, :-1]).all(axis=2).mean() - 1 / 15) < 0.015


@given(st.integers(0, 40), st.integers(1, 9), st.integers(1, 5), st.integers(0, 5))
@settings(max_examples=20, deadline=None)
def test_a_batch_depends_on_its_step_alone(start, count, size, seed):
    task = TASKS[1]
    found = task.training_batches(size, range(start, start + count), seed)
    assert len(found) == count
    (last,) = task.training_batches(size, range(start + count - 1, start + count), seed)
    for name in ("ids", "answer_positions", "labels", "d_star"):
        np.testing.assert_array_equal(getattr(found[-1], name), getattr(last, name))


def test_batches_differ_by_step_seed_and_row():
    rows = [row for seed in (0, 1) for batch in Knowledge().training_batches(8, range(4), seed) for row in batch.ids]
    assert len({row.tobytes() for row in rows}) == len(rows)


@pytest.mark.parametrize("task", TASKS, ids=str)
def test_the_floor_is_the_best_constant_or_chance(task):
    for n in {1, task.subjects * task.relations}:
        made = task.evaluation_set(1, n)
        assert task.floor(made) == pytest.approx(max(1 / task.objects, max(Counter(made.answer.tolist()).values()) / n))


def test_the_floor_is_never_below_chance():
    task = Knowledge(2, 2, 2)
    made = dataclasses.replace(task.evaluation_set(1, 3), answer=np.array([0, 1, 7]))
    assert task.floor(made) == 0.5


def test_the_vocabulary_has_the_answers_first():
    for task in TASKS:
        assert task.vocab_size == len(set(task.vocabulary)) == task.objects + task.subjects + task.relations
        assert [task.vocabulary[a] for a in task.alphabet] == [f"object {i}" for i in range(task.objects)]
        assert task.depths == (1,) and next(iter(dataclasses.asdict(task).items())) == ("family", "knowledge")


@pytest.mark.parametrize(
    ("name", "value", "least"), [("subjects", 0, 1), ("relations", 0, 1), ("objects", 1, 2), ("queries", 0, 1)]
)
def test_impossible_sizes_name_the_key(name, value, least):
    with pytest.raises(ValueError, match=f"{name} must be at least {least}, not {value}"):
        Knowledge(**{name: value})


def test_mistakes_name_the_key():
    task = TASKS[1]
    with pytest.raises(ValueError, match="d_star must be 1 for knowledge, not 2"):
        task.evaluation_set(2, 3)
    for n in (0, 16):
        with pytest.raises(ValueError, match=f"n must be in 1..15, the number of facts, not {n}"):
            task.evaluation_set(1, n)
    with pytest.raises(ValueError, match="batch_size must be at least 1, not 0"):
        task.training_batches(0, range(1), 0)
