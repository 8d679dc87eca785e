"""Modular arithmetic against plain Python that sees only the token ids and the vocabulary."""

import dataclasses
import math
from collections import Counter
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lib import task_draws
from lib.task_arithmetic import Arithmetic
from lib.tasks import IGNORE, SIBLINGS

TASKS = (Arithmetic(5, 2), Arithmetic(7, 3), Arithmetic(), Arithmetic(97, 2))
STRATA = [(task, d) for task in TASKS for d in task.depths]
FEW = {(5, 2), (7, 2), (7, 3), (11, 2)}  # strata in which too few skeletons have four starts in the test split


def label(value):
    return f"{value.modulus}-{value.max_depth}" if isinstance(value, Arithmetic) else None


def some(task, d):
    return min(200, task.stratum_size(d) // 10)


def decode(task, ids):
    """One sequence (T, 1) as (start, [(operation, operand)]), from the names of its tokens."""
    (first, start), *steps = (task.vocabulary[i].split() for i in ids[:, 0].tolist())
    assert first == "start" and ids.shape[1] == 1
    return int(start), [(what, int(by)) for what, by in steps]


def running(task, start, steps):
    """The value after each step."""
    out, value = [], start
    for what, by in steps:
        value = {"add": value + by, "subtract": value - by, "times": value * by}[what] % task.modulus
        out.append(value)
    return out


def legal_steps(task):
    """Every step that is a bijection and not the identity."""
    m, found = task.modulus, []
    for step in product(("add", "subtract", "times"), range(m)):
        image = [running(task, v, [step])[0] for v in range(m)]
        if len(set(image)) == m and image != list(range(m)):
            found.append(step)
    return found


def prefix_key(task, start, steps):
    """The split-deciding hash, step after step."""
    legal, key = legal_steps(task), task_draws.stream_keys((11, 2, task.modulus), [0]) ^ np.uint64(start)
    key = task_draws.mix(key)
    for step in steps:
        key = task_draws.mix(key ^ np.uint64(legal.index(step)))
    return key[0]


@pytest.mark.parametrize(("task", "d"), STRATA, ids=label)
def test_an_evaluation_set_against_plain_python(task, d):
    n = some(task, d)
    made, legal = task.evaluation_set(d, n), set(legal_steps(task))
    assert made.ids.shape == (n, d + 1, task.fields) and made.ids.dtype == np.int64
    assert (made.d_star, made.width) == (d, task.modulus) and (made.answer_position == d).all()
    assert len(np.unique(made.ids.reshape(n, -1), axis=0)) == n == len(np.unique(made.key))
    for i, ids in enumerate(made.ids):
        start, steps = decode(task, ids)
        assert set(steps) <= legal and made.answer[i] in task.alphabet
        assert task.vocabulary[made.answer[i]] == str(running(task, start, steps)[-1])
        assert made.key[i] == prefix_key(task, start, steps) and made.key[i] >> np.uint64(61) == 0
        raw = zip(made.raw["ops"][i], made.raw["operands"][i], strict=True)
        assert (start, steps) == (made.raw["start"][i], [(("add", "subtract", "times")[op], by) for op, by in raw])


@pytest.mark.parametrize(("task", "d"), STRATA, ids=label)
def test_siblings_share_their_steps_and_no_others_do(task, d):
    made = task.evaluation_set(d, some(task, d) // 4 * 4)
    of = {}
    for skeleton, ids in zip(made.skeleton.tolist(), made.ids, strict=True):
        start, steps = decode(task, ids)
        of.setdefault(skeleton, []).append((start, tuple(steps)))
    assert len({steps for members in of.values() for _, steps in members}) == len(of)
    for members in of.values():
        assert len({start for start, _ in members}) == len(members) and len({steps for _, steps in members}) == 1
        assert len(members) == SIBLINGS or (task.modulus, d) in FEW
    if (task.modulus, d) not in FEW:
        assert (made.skeleton.reshape(-1, SIBLINGS) == made.skeleton[::SIBLINGS, None]).all()


@pytest.mark.parametrize(("task", "d"), STRATA, ids=label)
def test_a_smaller_evaluation_set_is_the_beginning_of_a_greater(task, d):
    few, many = task.evaluation_set(d, 13), task.evaluation_set(d, some(task, d))
    np.testing.assert_array_equal(few.ids, many.ids[:13])
    np.testing.assert_array_equal(few.key, many.key[:13])


def test_max_depth_does_not_change_an_instance():
    np.testing.assert_array_equal(Arithmetic(11, 2).evaluation_set(2, 40).ids, Arithmetic(11, 5).evaluation_set(2, 40).ids)


@given(st.sampled_from((5, 7, 11, 13)), st.integers(2, 5), st.integers(0, 2**40), st.integers(0, 1000))
@settings(max_examples=25, deadline=None)
def test_training_against_plain_python(modulus, depth, seed, step):
    task = Arithmetic(modulus, depth)
    (batch,) = task.training_batches(6, range(step, step + 1), seed)
    assert batch.ids.shape == (6, depth + 1, 1) and batch.answer_positions.tolist() == list(range(1, depth + 1))
    assert batch.ids.dtype == batch.answer_positions.dtype == batch.labels.dtype == batch.d_star.dtype == np.int64
    for ids, labels, depths in zip(batch.ids, batch.labels.tolist(), batch.d_star.tolist(), strict=True):
        start, steps = decode(task, ids)
        for d, value in enumerate(running(task, start, steps), start=1):
            held_out = d > 1 and prefix_key(task, start, steps[:d]) >> np.uint64(61) == 0
            assert (labels[d - 1], depths[d - 1]) == ((IGNORE, 0) if held_out else (value, d))


@pytest.mark.parametrize("task", TASKS[:3], ids=label)
def test_training_never_learns_a_test_instance(task):
    test = {tuple(ids.reshape(-1)) for d in task.depths for ids in task.evaluation_set(d, some(task, d)).ids}
    met, learnt = set(), set()
    for batch in task.training_batches(64, range(200), 0):
        for d in task.depths:
            prefixes = batch.ids[:, : d + 1].reshape(len(batch.ids), -1)
            met |= {tuple(row) for row in prefixes.tolist()}
            learnt |= {tuple(row) for row in prefixes[batch.labels[:, d - 1] != IGNORE].tolist()}
    assert not test & learnt
    assert test & met  # so that the mask is what keeps them apart


def test_training_draws_starts_and_steps_uniformly_and_holds_out_an_eighth():
    task = Arithmetic(7, 3)
    batches = task.training_batches(100, range(60), 3)
    starts, steps = Counter(), Counter()
    for batch in batches:
        for ids in batch.ids:
            start, taken = decode(task, ids)
            starts[start] += 1
            steps.update(taken)
    assert len(starts) == 7 and set(steps) == set(legal_steps(task)) and task.kinds == len(steps) == 17
    for counts, share in ((starts, 1 / 7), (steps, 1 / 17)):
        total = sum(counts.values())
        assert max(abs(c - total * share) for c in counts.values()) < 5 * math.sqrt(total * share * (1 - share))
    masked = np.concatenate([batch.labels for batch in batches]) == IGNORE
    assert not masked[:, 0].any() and np.abs(masked[:, 1:].mean(axis=0) - 1 / 8).max() < 0.03


@given(st.integers(0, 40), st.integers(1, 9), st.integers(1, 5), st.integers(0, 5))
@settings(max_examples=20, deadline=None)
def test_a_batch_depends_on_its_step_alone(start, count, size, seed):
    task = Arithmetic(7, 3)
    found = task.training_batches(size, range(start, start + count), seed)
    assert len(found) == count
    (last,) = task.training_batches(size, range(start + count - 1, start + count), seed)
    for name in ("ids", "answer_positions", "labels", "d_star"):
        np.testing.assert_array_equal(getattr(found[-1], name), getattr(last, name))


def test_batches_differ_by_step_seed_and_row():
    task = Arithmetic()
    rows = [row for seed in (0, 1) for batch in task.training_batches(8, range(4), seed) for row in batch.ids]
    assert len({row.tobytes() for row in rows}) == len(rows)


def test_the_size_of_a_stratum_against_enumeration():
    task = Arithmetic(5, 3)
    assert task.kinds == len(legal_steps(task)) == 11
    for d in task.depths:
        assert task.stratum_size(d) == sum(1 for _ in product(range(5), product(legal_steps(task), repeat=d)))


@pytest.mark.parametrize(("task", "d"), STRATA, ids=label)
def test_the_floor_is_the_best_constant_or_chance(task, d):
    made = task.evaluation_set(d, some(task, d))
    best = max(sum(answer == guess for answer in made.answer.tolist()) / len(made.answer) for guess in task.alphabet)
    assert task.floor(made) == pytest.approx(max(best, 1 / task.modulus))
    even = dataclasses.replace(made, answer=np.arange(task.modulus)[:-1])
    assert task.floor(even) == pytest.approx(1 / (task.modulus - 1))


def test_the_vocabulary_has_the_answers_first_and_every_id_is_used():
    for task in TASKS:
        assert task.vocab_size == len(set(task.vocabulary)) == 2 * task.modulus + task.kinds
        assert [task.vocabulary[a] for a in task.alphabet] == [str(v) for v in range(task.modulus)]
        assert dataclasses.asdict(task) == {"family": "arithmetic", "modulus": task.modulus, "max_depth": task.max_depth}
    task = TASKS[1]
    used = {int(i) for batch in task.training_batches(64, range(8), 0) for i in np.unique(batch.ids)}
    assert used == set(range(task.modulus, task.vocab_size))


@pytest.mark.parametrize("modulus", [-3, 0, 1, 2, 3, 4, 6, 9, 25, 49, 91, 98, 101])
def test_a_modulus_that_is_no_prime_in_range_is_refused(modulus):
    with pytest.raises(ValueError, match=f"modulus must be a prime in 5..97, not {modulus}"):
        Arithmetic(modulus)


def test_mistakes_name_the_key():
    task = Arithmetic(7, 3)
    for depth in (1, 0):
        with pytest.raises(ValueError, match=f"max_depth must be at least 2, not {depth}"):
            Arithmetic(7, depth)
    for d in (0, 1, 4):
        with pytest.raises(ValueError, match=f"d_star must be in 2..3 \\(max_depth\\), not {d}"):
            task.evaluation_set(d, 10)
    most = 7 * 17**2 // 10
    for n in (0, most + 1):
        with pytest.raises(ValueError, match=f"n must be in 1..{most}, a tenth of the instances at d_star=2, not {n}"):
            task.evaluation_set(2, n)
    assert len(task.evaluation_set(2, most).answer) == most
    with pytest.raises(ValueError, match="batch_size must be at least 1, not 0"):
        task.training_batches(0, range(1), 0)
    with pytest.raises(ValueError, match="seed must be at least 0, not -1"):
        task.training_batches(1, range(1), -1)
    with pytest.raises(ValueError, match="steps must be at least 0, not -2"):
        task.training_batches(1, range(-2, 1), 0)
    assert task.training_batches(1, range(0), 0) == []


def test_too_few_skeletons_for_the_siblings_asked_for_is_one_sentence():
    with pytest.raises(ValueError, match="n must be lower than .*: the test split of arithmetic with modulus=11, d_star=3"):
        Arithmetic().evaluation_set(3, 4400)
