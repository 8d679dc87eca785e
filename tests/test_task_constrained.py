"""Writing under constraints against plain Python that reads the names of the tokens, and a scripted model that writes."""

import dataclasses
from collections import Counter
from itertools import combinations, permutations, product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lib import task_constrained
from lib.task_constrained import Constrained, accepts, kinds, letter_tokens, set_keys, strings, written

TASKS = (Constrained(), Constrained(3, 3, 2), Constrained(6, 3, 1), Constrained(2, 7, 3), Constrained(5, 5, 5))
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def label(value):
    return f"{value.letters}-{value.length}-{value.constraints}" if isinstance(value, Constrained) else None


# The naive checker: names of tokens to a rule, strings as text


def names(task, ids):
    """Tokens (T, 3) as tuples of names."""
    return [tuple(task.vocabulary[i] for i in token) for token in ids.tolist()]


def obeys(token, text):
    """Whether a string obeys the constraint that a token's names state."""
    what, x, y = token
    x = x.removeprefix("first ")
    if what == "at":
        return text[int(y.removeprefix("place "))] == x
    if what == "absent":
        return y == "none" and x not in text
    if what == "exactly":
        return text.count(x) == int(y.removeprefix("count "))
    if what == "before":
        y = y.removeprefix("second ")
        return x in text and y in text and text.index(x) < text.index(y)
    assert token == ("differ", "none", "none")
    return all(a != b for a, b in zip(text, text[1:], strict=False))


def every_token(task):
    """Every constraint there is, in names."""
    letters, found = LETTERS[: task.letters], [("differ", "none", "none")]
    found += [("at", f"first {a}", f"place {i}") for a in letters for i in range(task.length)]
    found += [("absent", f"first {a}", "none") for a in letters]
    found += [("exactly", f"first {a}", f"count {k}") for a in letters for k in range(1, task.length)]
    return found + [("before", f"first {a}", f"second {b}") for a, b in permutations(letters, 2)]


def every_text(task):
    return ["".join(text) for text in product(LETTERS[: task.letters], repeat=task.length)]


def obeying(task, tokens):
    return [text for text in every_text(task) if all(obeys(token, text) for token in tokens)]


def text_of(letters):
    return "".join(LETTERS[i] for i in letters)


def tokens_of(task, constraints):
    return names(task, task_constrained.constraint_tokens(task, np.array([constraints]))[0])


@pytest.mark.parametrize("task", TASKS, ids=label)
def test_every_constraint_is_there_once_and_is_judged_as_a_naive_checker_does(task):
    n, texts, all_strings = len(kinds(task)), every_text(task), strings(task.letters, task.length)
    assert [text_of(row) for row in all_strings] == texts
    single = Constrained(task.letters, task.length, 1)
    tokens = [tokens_of(single, [k])[0] for k in range(n)]
    assert Counter(tokens) == Counter(every_token(task))
    table = np.unpackbits(task_constrained._table(task.letters, task.length).view(np.uint8), axis=1, bitorder="little")
    assert not table[:, len(texts) :].any()
    for k, token in enumerate(tokens):
        naive = [obeys(token, text) for text in texts]
        assert accepts(single, np.full((len(texts), 1), k), all_strings).tolist() == naive
        assert table[k, : len(texts)].astype(bool).tolist() == naive


@given(st.sampled_from(TASKS), st.data())
@settings(max_examples=60, deadline=None)
def test_the_checker_wants_every_constraint_obeyed(task, data):
    constraints = data.draw(st.lists(st.integers(0, len(kinds(task)) - 1), min_size=1, max_size=4, unique=True))
    text = data.draw(st.lists(st.integers(0, task.letters - 1), min_size=task.length, max_size=task.length))
    naive = all(obeys(token, text_of(text)) for token in tokens_of(task, constraints))
    assert accepts(task, np.array([constraints]), np.array([text])).tolist() == [naive]
    for bad in (-1, task.letters):
        broken = [*text]
        broken[data.draw(st.integers(0, task.length - 1))] = bad
        assert not accepts(task, np.array([constraints]), np.array([broken]))[0]


@pytest.mark.parametrize("task", TASKS[:4], ids=label)
def test_an_evaluation_set_against_plain_python(task):
    n = {1: 4, 2: 20, 3: 40}[task.constraints]
    made = task.evaluation_set(task.constraints, n)
    assert made.ids.shape == (n, task.constraints, task.fields) and made.ids.dtype == np.int64
    assert (made.answer == -1).all() and (made.answer_position == task.constraints - 1).all()
    assert (made.skeleton == made.key).all() and made.width == task.letters and task.depths == (made.d_star,)
    sets, shares = set(), []
    for ids, constraints, key in zip(made.ids, made.raw["constraints"], made.key, strict=True):
        tokens = names(task, ids)
        assert tokens == tokens_of(task, constraints) and len(set(tokens)) == task.constraints
        assert key == set_keys(task, constraints[None, ::-1])[0] and key >> np.uint64(61) == 0
        found = obeying(task, tokens)
        assert len(found) >= 2
        sets.add(frozenset(tokens))
        shares.append(len(found) / task.letters**task.length)
    assert len(sets) == n
    assert task.floor(made) == pytest.approx(sum(shares) / n)


def test_a_smaller_evaluation_set_is_the_beginning_of_a_greater():
    few, many = (TASKS[0].evaluation_set(3, n) for n in (13, 90))
    np.testing.assert_array_equal(few.ids, many.ids[:13])


def test_the_split_does_not_depend_on_the_order_and_tells_sets_apart():
    task = TASKS[1]
    keys = {}
    for pair in combinations(range(len(kinds(task))), 2):
        (key,), (other,) = set_keys(task, np.array([pair])), set_keys(task, np.array([pair[::-1]]))
        assert key == other
        keys[int(key)] = pair
    assert len(keys) == len(kinds(task)) * (len(kinds(task)) - 1) // 2


@given(st.sampled_from(TASKS), st.integers(0, 2**40), st.integers(0, 1000))
@settings(max_examples=15, deadline=None)
def test_training_against_plain_python(task, seed, step):
    (batch,) = task.training_batches(4, range(step, step + 1), seed)
    C, L = task.constraints, task.length
    assert batch.ids.shape == (4, C + L - 1, 3) and batch.labels.shape == batch.d_star.shape == (4, L)
    assert batch.answer_positions.tolist() == list(range(C - 1, C + L - 1)) and (batch.d_star == C).all()
    assert batch.ids.dtype == batch.labels.dtype == batch.d_star.dtype == np.int64
    for ids, labels in zip(batch.ids, batch.labels, strict=True):
        tokens, text = names(task, ids), text_of(labels)
        assert set(labels) <= set(task.alphabet) and len(set(tokens[:C])) == C
        found = obeying(task, tokens[:C])
        assert len(found) >= 2 and text in found
        assert tokens[C:] == [(a, f"place {i}", "none") for i, a in enumerate(text[:-1])]


def prompts(task, batches):
    return [frozenset(map(tuple, ids[: task.constraints].tolist())) for batch in batches for ids in batch.ids]


def test_a_test_set_of_constraints_never_occurs_in_training():
    task = TASKS[1]
    possible = len(list(combinations(range(len(kinds(task))), 2)))
    test = {frozenset(map(tuple, ids.tolist())) for ids in task.evaluation_set(2, 25).ids}
    seen = Counter(prompts(task, task.training_batches(64, range(100), 0)))
    assert not test & set(seen) and possible / 2 < len(seen) < possible  # nearly all others do


def test_types_are_equally_likely_and_orders_vary():
    task = Constrained(6, 4, 1)
    first = [names(task, ids)[0] for batch in task.training_batches(64, range(40), 1) for ids in batch.ids]
    types = Counter(what for what, _, _ in first)
    # differ is one constraint and of one split; before, of which there are thirty, is not thirty times as likely
    assert set(types) <= set(task_constrained.TYPES) and len(types) >= 4
    common = [types[what] for what in ("at", "absent", "exactly", "before")]
    assert min(common) > 0.5 * max(common)
    task = TASKS[1]
    orders = {tuple(map(tuple, ids[:2].tolist())) for batch in task.training_batches(64, range(40), 1) for ids in batch.ids}
    assert sum(order[::-1] in orders for order in orders) > 0.8 * len(orders)


def test_strings_are_uniform_over_those_that_obey():
    task = Constrained(3, 3, 1)
    drawn = {}
    for batch in task.training_batches(100, range(120), 0):
        for ids, labels in zip(batch.ids, batch.labels, strict=True):
            drawn.setdefault(names(task, ids)[0], Counter())[text_of(labels)] += 1
    statistic = degrees = 0
    for token, counts in drawn.items():
        found = obeying(task, [token])
        assert set(counts) <= set(found)
        expected = sum(counts.values()) / len(found)
        statistic += sum((counts[text] - expected) ** 2 / expected for text in found)
        degrees += len(found) - 1
    assert len(drawn) >= 12 and abs(statistic - degrees) < 4.5 * (2 * degrees) ** 0.5


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=3), st.data())
@settings(max_examples=60, deadline=None)
def test_the_nth_bit_against_a_plain_list(words, data):
    places = [64 * w + b for w, word in enumerate(words) for b in range(64) if word >> b & 1]
    if places:
        rank = data.draw(st.integers(0, len(places) - 1))
        found = task_constrained._nth_bit(np.array([words], dtype=np.uint64), np.array([rank]))
        assert found.tolist() == [places[rank]]


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
    rows = [row for seed in (0, 1) for batch in TASKS[4].training_batches(8, range(4), seed) for row in batch.ids]
    assert len({row.tobytes() for row in rows}) == len(rows)


def test_the_vocabulary_has_the_letters_first_and_every_id_is_used():
    for task in TASKS:
        assert task.vocab_size == len(set(task.vocabulary))
        assert [task.vocabulary[a] for a in task.alphabet] == list(LETTERS[: task.letters])
        assert next(iter(dataclasses.asdict(task).items())) == ("family", "constrained")
    task = TASKS[1]
    used = {int(i) for batch in task.training_batches(64, range(16), 0) for i in np.unique(batch.ids)}
    assert used == set(range(task.vocab_size))


# Writing


class Scripted:
    """Writes script (N, L) of token ids, batch_size rows after the other, and keeps what it was asked."""

    device = torch.device("cpu")

    def __init__(self, task, script, vocab_size, batch_size=256):
        self.task, self.script, self.vocab_size, self.batch_size, self.asked = task, script, vocab_size, batch_size, []

    def __call__(self, ids, answer_positions, **how):
        assert not torch.is_grad_enabled() and answer_positions.tolist() == [ids.shape[1] - 1]
        row = len(self.asked) // self.task.length * self.batch_size
        tokens = self.script[row : row + len(ids), ids.shape[1] - self.task.constraints]
        self.asked.append((ids.numpy().copy(), how))
        return SimpleNamespace(logits=torch.nn.functional.one_hot(torch.as_tensor(tokens), self.vocab_size)[:, None].float())


@pytest.mark.parametrize("first_id", (0, 17))
@pytest.mark.parametrize("batch_size", (2, 256))
def test_a_model_writes_greedily_and_is_shown_what_it_wrote(first_id, batch_size):
    task = TASKS[1]
    own = task.evaluation_set(2, 5)
    shifted = dataclasses.replace(own, ids=own.ids + first_id)
    texts = np.array([[0, 1, 2], [2, 2, 0], [1, 0, 1], [2, 1, 0], [0, 0, 0]])
    model = Scripted(task, texts + first_id, first_id + task.vocab_size + 3, batch_size)
    found = written(model, task, shifted, first_id=first_id, batch_size=batch_size, loops=4)
    assert found.tolist() == texts.tolist() and found.dtype == np.int64
    assert all(how == {"loops": 4} for _, how in model.asked)
    assert len(model.asked) == task.length * -(-5 // batch_size)
    rows = min(5, batch_size)
    for place in range(task.length):
        shown = model.asked[place][0] - first_id
        assert (shown[:, :2] == own.ids[:rows]).all()
        for row in range(rows):
            told = [(LETTERS[a], f"place {i}", "none") for i, a in enumerate(texts[row, :place])]
            assert names(task, shown[row, 2:]) == told


def test_what_a_right_model_writes_is_accepted_and_what_is_no_letter_is_not():
    task = TASKS[0]
    made, first_id = task.evaluation_set(3, 12), 9
    shifted = dataclasses.replace(made, ids=made.ids + first_id)
    index = {text: i for i, text in enumerate(every_text(task))}
    right = strings(6, 4)[[index[obeying(task, names(task, ids))[-1]] for ids in made.ids]]
    model = Scripted(task, right + first_id, 200)
    assert accepts(task, made.raw["constraints"], written(model, task, shifted, first_id)).all()
    for token in (0, first_id - 1, first_id + task.letters, 199):  # of another family, no letter, of a later family
        script = right + first_id
        script[:, 1] = token
        model = Scripted(task, script, 200)
        found = written(model, task, shifted, first_id)
        assert (found[:, 1] == -1).all() and (found[:, [0, 2, 3]] == right[:, [0, 2, 3]]).all()
        assert not accepts(task, made.raw["constraints"], found).any()
        assert (model.asked[2][0][:, 4] == letter_tokens(task, np.zeros(12, dtype=np.int64), 1) + first_id).all()


def test_prompts_in_other_ids_are_refused():
    task = TASKS[0]
    made = task.evaluation_set(3, 4)
    with pytest.raises(ValueError, match="first_id is 40: the ids, "):
        written(None, task, made, first_id=40)
    with pytest.raises(ValueError, match="first_id is 0: the ids, "):
        written(None, task, dataclasses.replace(made, ids=made.ids + 40))


def test_mistakes_name_the_key():
    for letters in (1, 27):
        with pytest.raises(ValueError, match=f"letters must be in 2..26, not {letters}"):
            Constrained(letters)
    for letters, length in ((6, 1), (6, 7), (26, 4)):
        with pytest.raises(ValueError, match=f"length must be at least 2, with at most 50000 .*, not {length}"):
            Constrained(letters, length)
    for constraints in (0, 80):
        with pytest.raises(ValueError, match=f"constraints must be in 1..79, not {constraints}"):
            Constrained(6, 4, constraints)
    with pytest.raises(ValueError, match="d_star must be 3 \\(constraints\\), not 2"):
        TASKS[0].evaluation_set(2, 4)
    with pytest.raises(ValueError, match="n must be at least 1, not 0"):
        TASKS[0].evaluation_set(3, 0)
    with pytest.raises(ValueError, match="n must be lower than 30: the test split of Constrained"):
        TASKS[2].evaluation_set(1, 30)
    with pytest.raises(ValueError, match="letters must be more than 2, or constraints not 9, for an instance of the train"):
        Constrained(2, 2, 9).training_batches(1, range(1), 0)
    with pytest.raises(ValueError, match="batch_size must be at least 1, not 0"):
        TASKS[0].training_batches(0, range(1), 0)
