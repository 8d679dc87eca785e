"""Readout measures against plain re-computation."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.boundary import every, never
from lib.evaluation import mutual_information, prefix_of, read, summary, sweep
from lib.tasks import Task, evaluation_set
from tests.models import CASES, small, tokens

TASK = Task("circuit", 4, 2)


def readings(n=40, loops=6, boundary=never, batch_size=16):
    model = small(vocab_size=TASK.vocab_size)
    return model, evaluation_set(TASK, 2, n), read(model, evaluation_set(TASK, 2, n), loops, boundary, batch_size)


def test_readings_equal_one_instance_at_a_time():
    model, instances, found = readings(boundary=every(1))
    for i in (0, 17, 39):
        for K in (1, 4, 6):
            ids = torch.as_tensor(instances.ids[i : i + 1])
            *_, z = model.trajectory(ids, K, every(1))
            z = z[0, instances.answer_position[i]]
            logits = model(ids, loops=K, boundary=every(1)).logits[0, instances.answer_position[i]].detach().double()
            p = logits.softmax(0)
            order = logits.sort(descending=True).values
            assert found.prediction[K - 1, i] == int(logits.argmax())
            assert found.entropy[K - 1, i] == pytest.approx(float(-(p * p.log2()).sum()), abs=1e-4)
            assert found.gap[K - 1, i] == pytest.approx(float(order[0] - order[1]), abs=1e-4)
            assert found.norm[K - 1, i] == pytest.approx(float((z.detach().double() ** 2).sum() ** 0.5), abs=1e-4)


def test_summary_counts_what_it_says():
    _, instances, found = readings()
    table = summary(found, TASK.alphabet)
    assert list(table["K"]) == [1, 2, 3, 4, 5, 6]
    row, predicted = table.iloc[3], found.prediction[3].tolist()
    assert row["accuracy"] == np.mean([p == a for p, a in zip(predicted, instances.answer, strict=True)])
    token, count = Counter(predicted).most_common(1)[0]
    assert row["modal_share"] == count / 40 and (row["modal_token"] == token or count == predicted.count(row["modal_token"]))
    assert row["in_alphabet_share"] == sum(p in TASK.alphabet for p in predicted) / 40
    assert row["entropy_bits"] == pytest.approx(found.entropy[3].mean())


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=60))
@settings(deadline=None)
def test_mutual_information_against_the_textbook_sum(pairs):
    prediction, answer = (np.array(column) for column in zip(*pairs, strict=True))
    n, joint = len(pairs), Counter(pairs)
    left, right = Counter(prediction.tolist()), Counter(answer.tolist())
    plain = sum(c / n * math.log2(c * n / (left[a] * right[b])) for (a, b), c in joint.items())
    correction = (len(left) + len(right) - len(joint) - 1) / (2 * n * math.log(2))
    assert mutual_information(prediction, answer) == pytest.approx(plain + correction, abs=1e-9)


def test_mutual_information_may_be_negative():
    assert mutual_information(np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1])) < 0, "not clipped"


@pytest.mark.parametrize("envelope, values", CASES.values(), ids=CASES)
def test_a_shared_prefix_run_once_changes_nothing(envelope, values):
    model, ids, at = small(envelope=envelope, **values).double(), tokens(4, 9), torch.tensor([2, 8])
    ids[:, :5] = ids[0, :5]
    for boundary in (never, every(2)):
        prefix = prefix_of(model, ids[0, :2], 5, boundary)
        behind = sweep(model, ids[:, 2:], at - 2, 5, boundary, prefix)
        for (K, whole, states), (same, logits, z) in zip(sweep(model, ids, at, 5, boundary), behind, strict=True):
            assert K == same
            torch.testing.assert_close(logits, whole, atol=1e-10, rtol=0)
            torch.testing.assert_close(z, states, atol=1e-10, rtol=0)
    assert prefix.loop.get_seq_length() == 2, "rows leave nothing behind"
