"""The task generators against a plain brute force that sees only the token ids and the vocabulary.

Source: the contract paper's "Methodology, Tasks".
"""

import math
from collections import Counter
from itertools import combinations, permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lib import task_draws
from lib.tasks import (
    FAMILIES,
    IGNORE,
    SIBLINGS,
    Task,
    evaluation_set,
    floor,
    floors,
    instances,
    operator_mix,
    stratum_size,
    training_batches,
)

TASKS = (
    Task("circuit", 2, 2),
    Task("circuit", 4, 2),
    Task("circuit", 5, 3),
    Task("hops", 6, 2),
    Task("hops", 26, 3),
    Task("paragg", 3, 2),
    Task("paragg", 4, 2, circuit_width=3),
)
STRATA = [(task, d) for task in TASKS for d in range(1, task.max_depth + 1)]
BINARY = [(task, d) for task, d in STRATA if task.family != "hops"]

OPERATOR = {
    "AND": lambda a, b: a and b,
    "OR": lambda a, b: a or b,
    "XOR": lambda a, b: a != b,
    "NAND": lambda a, b: not (a and b),
    "NOR": lambda a, b: not (a or b),
    "XNOR": lambda a, b: a == b,
}


def label(value):
    return "/".join(map(str, (value.family, value.width, value.max_depth))) if isinstance(value, Task) else None


# The brute force: names to a symbolic problem, evaluated by recursion


def names(task, ids):
    """One sequence (T, F) as tuples of token names."""
    vocabulary = task.vocabulary
    return [tuple(vocabulary[i] for i in token) for token in ids.tolist()]


def node(name):
    """'own 2.1' or 'in 2.1' as (2, 1)."""
    layer, slot = name.split(" ")[1].split(".")
    return int(layer), int(slot)


def decode_circuit(tokens):
    """Gate tokens as (leaves {node: bool}, gates {node: (operator, node, node)})."""
    leaves, gates = {}, {}
    for what, own, first, second, *_ in tokens:
        if what.startswith("leaf"):
            assert (first, second) == ("none", "none") and node(own)[0] == 0
            leaves[node(own)] = what == "leaf1"
        else:
            gates[node(own)] = (what, node(first), node(second))
    return leaves, gates


def value(at, leaves, gates):
    if at in leaves:
        return leaves[at]
    op, first, second = gates[at]
    return bool(OPERATOR[op](value(first, leaves, gates), value(second, leaves, gates)))


def changed_path(answer, leaves, gates):
    """Whether some leaf's flip changes the answer and every gate on some path from that leaf to it."""

    def reaches(at, leaf, changed):
        if at == leaf:
            return True
        return at in gates and changed(at) and any(reaches(below, leaf, changed) for below in gates[at][1:])

    for leaf in leaves:
        flipped = leaves | {leaf: not leaves[leaf]}
        if reaches(answer, leaf, lambda at, f=flipped: value(at, leaves, gates) != value(at, f, gates)):
            return True
    return False


def decode_paragg(tokens):
    """Tokens as ([(leaves, gates)] by circuit, [(member, answer node)] by circuit)."""
    assert tokens[-1] == ("parity", "none", "none", "none", "none")
    circuits, ends = {}, {}
    for token in tokens[:-1]:
        if token[0] in ("member", "nonmember"):
            assert token[2:4] == ("none", "none")
            ends[token[4]] = (token[0] == "member", node(token[1]))
        else:
            circuits.setdefault(token[4], []).append(token)
    order = [f"circuit {c}" for c in range(len(circuits))]
    assert list(circuits) == list(ends) == order
    return [decode_circuit(circuits[c]) for c in order], [ends[c] for c in order]


def parity(circuits, ends):
    return sum(value(end, *circuit) for circuit, (member, end) in zip(circuits, ends, strict=True) if member) % 2


def decode_map(tokens):
    """Pair tokens as {source: target}."""
    pairs = [(source.removeprefix("src "), target.removeprefix("tgt ")) for source, target in tokens]
    assert all(len(s) == len(t) == 1 for s, t in pairs)
    return dict(pairs)


def chain(pointers, start, hops):
    out = [start]
    for _ in range(hops):
        out.append(pointers[out[-1]])
    return out


def cycle_length(pointers, start):
    at, length = pointers[start], 1
    while at != start:
        at, length = pointers[at], length + 1
    return length


def check_gates(leaves, gates, width, depth):
    assert set(leaves) == {(0, s) for s in range(width)}
    assert set(gates) == {(d, s) for d in range(1, depth + 1) for s in range(width)}
    for (layer, _), (_, first, second) in gates.items():
        assert first[0] == second[0] == layer - 1 and first < second


def circuit_key(circuits, depth):
    """The library's key of decoded circuits cut after `depth` layers."""
    width = len(circuits[0][0])
    op_names = list(OPERATOR)

    def grid(part):
        return np.array([[[part(g[d, s]) for s in range(width)] for d in range(1, depth + 1)] for _, g in circuits])

    leaves = np.array([[int(lv[0, s]) for s in range(width)] for lv, _ in circuits])
    parts = (grid(lambda g: op_names.index(g[0])), grid(lambda g: g[1][1]), grid(lambda g: g[2][1]))
    return task_draws.circuit_keys(leaves[None], *(part[None] for part in parts))[0, -1]


def map_key(pointers):
    codes = np.array([[ord(c) - ord("a") for c in pair] for pair in pointers.items()])
    return task_draws.map_keys(codes[None, :, 0], codes[None, :, 1])[0]


def check_instance(task, d, ids, position, answer):
    """One evaluation instance: the answer, the exact depth, the place of the answer."""
    tokens = names(task, ids)
    assert len(tokens) == task.n_tokens(d) and answer in task.alphabet
    if task.family == "circuit":
        leaves, gates = decode_circuit(tokens)
        check_gates(leaves, gates, task.width, d)
        at = node(tokens[position][1])
        assert at[0] == d
        assert task.vocabulary[answer] == str(int(value(at, leaves, gates)))
        assert changed_path(at, leaves, gates)
    elif task.family == "paragg":
        circuits, ends = decode_paragg(tokens)
        assert position == len(tokens) - 1 and len(circuits) == task.width
        assert sum(member for member, _ in ends) >= 2
        for circuit, (_, end) in zip(circuits, ends, strict=True):
            check_gates(*circuit, task.circuit_width, d)
            assert end[0] == d and changed_path(end, *circuit)
        assert task.vocabulary[answer] == str(parity(circuits, ends))
    else:
        pointers = decode_map(tokens[:-1])
        hop, start = tokens[-1][0], tokens[-1][1].removeprefix("start ")
        assert hop == f"hop {d}" and position == task.width
        assert len(pointers) == task.width and set(pointers) == set(pointers.values())
        visited = chain(pointers, start, d)
        assert task.vocabulary[answer] == visited[-1]
        assert len(set(visited)) == d + 1 and cycle_length(pointers, start) >= 2 * d + 1


def same(a, b, rows=slice(None)):
    """Equal bytes of two Instances, b at some rows."""
    for name in ("ids", "answer_position", "answer", "key", "skeleton"):
        assert getattr(a, name).dtype == getattr(b, name).dtype
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name)[rows])
    for name in a.raw:
        np.testing.assert_array_equal(a.raw[name], b.raw[name][rows])


# Evaluation instances


@pytest.mark.parametrize(("task", "d"), STRATA, ids=label)
def test_instances_against_brute_force(task, d):
    made = instances(task, d, range(40))
    assert made.ids.shape == (40, task.n_tokens(d), task.fields) and made.ids.dtype == np.int64
    for row in zip(made.ids, made.answer_position.tolist(), made.answer.tolist(), strict=True):
        check_instance(task, d, *row)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_seed_gives_a_correct_instance_whatever_its_company(data):
    family = data.draw(st.sampled_from(FAMILIES))
    depth = data.draw(st.integers(1, 3))
    if family == "hops":
        task = Task(family, data.draw(st.integers(max(4, 2 * depth + 1), 26)), depth)
    elif family == "circuit":
        task = Task(family, data.draw(st.integers(2, 7)), depth)
    else:
        task = Task(family, data.draw(st.integers(2, 3)), depth, data.draw(st.integers(2, 4)))
    d = data.draw(st.integers(1, depth))
    seeds = data.draw(st.lists(st.integers(0, 2**40), min_size=1, max_size=4, unique=True))
    made = instances(task, d, seeds)
    same(instances(task, d, seeds[-1:]), made, slice(-1, None))
    check_instance(task, d, made.ids[0], made.answer_position[0], made.answer[0])
    if family != "hops":
        np.testing.assert_array_equal(made.answer, np.array(seeds) & 1)


@pytest.mark.parametrize(("task", "d"), STRATA, ids=label)
def test_instances_do_not_depend_on_batch_or_order(task, d):
    made, order = instances(task, d, range(24)), [17, 3, 22, 0]
    same(instances(task, d, range(24)), made)
    same(instances(task, d, order), made, order)
    same(instances(task, d, [5]), made, [5])


def test_max_depth_does_not_change_an_instance():
    a, b = instances(Task("circuit", 4, 1), 1, range(8)), instances(Task("circuit", 4, 3), 1, range(8))
    np.testing.assert_array_equal(a.key, b.key)
    assert [names(Task("circuit", 4, 1), ids) for ids in a.ids] == [names(Task("circuit", 4, 3), ids) for ids in b.ids]


@pytest.mark.parametrize("n", (2, 50, 64))
@pytest.mark.parametrize(("task", "d"), [(t, d) for t, d in BINARY if stratum_size(t, d) > 640], ids=label)
def test_binary_answers_are_balanced(task, d, n):
    for first_seed in (0, 7):
        assert evaluation_set(task, d, n, first_seed).answer.sum() == n // 2
    assert instances(task, d, range(n)).answer.sum() == n // 2


@pytest.mark.parametrize(("task", "d"), [s for s in STRATA if stratum_size(*s) > 640], ids=label)
def test_evaluation_sets_are_distinct_and_of_their_split(task, d):
    test, train = (evaluation_set(task, d, 64, split=split) for split in ("test", "train"))
    assert (test.key >> np.uint64(61) == 0).all() and not (train.key >> np.uint64(61) == 0).any()
    for made in (test, train):
        assert len(made.answer) == 64 and len(np.unique(made.ids.reshape(64, -1), axis=0)) == 64
        if task.family == "hops":
            np.testing.assert_array_equal(made.key, [map_key(decode_map(names(task, i)[:-1])) for i in made.ids])
            np.testing.assert_array_equal(made.key, made.skeleton)
        else:
            assert len(np.unique(made.key)) == 64
            np.testing.assert_array_equal(made.key, [decoded_key(task, ids, d) for ids in made.ids])


def decoded_key(task, ids, depth):
    tokens = names(task, ids)
    return circuit_key(decode_paragg(tokens)[0] if task.family == "paragg" else [decode_circuit(tokens)], depth)


def test_an_evaluation_set_is_the_first_of_its_split_in_seed_order():
    task = Task("circuit", 4, 2)
    made = instances(task, 2, range(800))
    is_test = np.flatnonzero(made.key >> np.uint64(61) == 0)
    assert 40 < len(is_test) < 200
    same(evaluation_set(task, 2, 16), made, is_test[:16])
    same(evaluation_set(task, 2, 16, first_seed=int(is_test[16])), made, is_test[16:32])


@pytest.mark.parametrize(("task", "d"), [(Task("circuit", 4, 2), 1), (Task("hops", 6, 2), 2), (TASKS[5], 2)], ids=label)
def test_four_instances_share_a_skeleton(task, d):
    made = evaluation_set(task, d, 64)
    assert (np.unique(made.skeleton, return_counts=True)[1] == SIBLINGS).all()
    for skeleton in np.unique(made.skeleton):
        of = [names(task, made.ids[i]) for i in np.flatnonzero(made.skeleton == skeleton)]
        if task.family == "hops":
            assert len({frozenset(decode_map(t[:-1]).items()) for t in of}) == 1
        elif task.family == "circuit":
            assert len({frozenset(decode_circuit(t)[1].items()) for t in of}) == 1
        else:
            gates = {tuple(frozenset(g.items()) for _, g in decode_paragg(t)[0]) for t in of}
            assert len(gates) == 1 and len({tuple(m for m, _ in decode_paragg(t)[1]) for t in of}) == 1


def test_hops_draws_cycles_and_starts_uniformly():
    task = Task("hops", 6, 1)
    made = instances(task, 1, range(0, 4 * 1500, 4))  # one of each skeleton
    lengths = np.zeros(7)
    for ids in made.ids:
        tokens = names(task, ids)
        lengths[cycle_length(decode_map(tokens[:-1]), tokens[-1][1].removeprefix("start "))] += 1
    # the cycle of a fixed element of a uniform permutation is uniform: 375 of each of 3, 4, 5, 6
    assert lengths[:3].sum() == 0 and np.abs(lengths[3:] - 375).max() < 5 * math.sqrt(375 * 0.75)
    symbols = np.bincount(made.answer, minlength=26)
    assert np.abs(symbols - 1500 / 26).max() < 5 * math.sqrt(1500 / 26)


def test_stratum_size_against_enumeration():
    def circuits(width, depth):
        nodes = [(d, s) for d in range(1, depth + 1) for s in range(width)]
        kinds = list(product(OPERATOR, combinations(range(width), 2)))
        for bits in product((False, True), repeat=width):
            leaves = {(0, s): bit for s, bit in enumerate(bits)}
            for choice in product(kinds, repeat=len(nodes)):
                below = zip(nodes, choice, strict=True)
                yield leaves, {(d, s): (op, (d - 1, a), (d - 1, b)) for (d, s), (op, (a, b)) in below}

    for width, depth in ((2, 1), (2, 2)):
        exact = sum(any(changed_path((depth, s), *c) for s in range(width)) for c in circuits(width, depth))
        assert stratum_size(Task("circuit", width, depth), depth) == exact
        assert stratum_size(Task("paragg", 3, depth, circuit_width=width), depth) == exact**3
    for width, d in ((4, 1), (5, 2), (6, 1)):
        maps = sum(
            any(cycle_length(dict(enumerate(p)), s) >= 2 * d + 1 for s in range(width)) for p in permutations(range(width))
        )
        assert stratum_size(Task("hops", width, d), d) == maps * math.comb(26, width)


# Training batches


def training_rows(task, steps=range(3), batch_size=16, seed=5):
    for batch in training_batches(task, batch_size, steps, seed):
        for ids, labels, depths in zip(batch.ids, batch.labels.tolist(), batch.d_star.tolist(), strict=True):
            yield (
                names(task, ids),
                dict(zip(batch.answer_positions.tolist(), zip(labels, depths, strict=True), strict=True)),
            )


@pytest.mark.parametrize("task", [t for t in TASKS if t.family != "hops"], ids=label)
def test_circuit_labels(task):
    masked = learned = 0
    for tokens, answers in training_rows(task):
        if task.family == "paragg":
            circuits, ends = decode_paragg(tokens)
            assert len(circuits) == task.width and sum(member for member, _ in ends) >= 2
            assert all(changed_path(end, *c) for c, (_, end) in zip(circuits, ends, strict=True))
            assert all(end[0] == task.max_depth for _, end in ends)
            gates = task.width * task.circuit_width * (task.max_depth + 1)
        else:
            circuits, gates = [decode_circuit(tokens)], len(tokens)
        held_out = {d: circuit_key(circuits, d) >> np.uint64(61) == 0 for d in range(1, task.max_depth + 1)}
        expected = {}
        for position, (what, own, *rest) in enumerate(tokens[:gates]):
            if what.startswith("leaf"):
                continue
            circuit = circuits[int(rest[2].removeprefix("circuit ")) if task.family == "paragg" else 0]
            at = node(own)
            learn = changed_path(at, *circuit) and not held_out[at[0]]
            expected[position] = (int(value(at, *circuit)), at[0]) if learn else (IGNORE, 0)
        if task.family == "paragg":
            learn = not held_out[task.max_depth]
            expected[len(tokens) - 1] = (parity(circuits, ends), task.max_depth) if learn else (IGNORE, 0)
        assert answers == expected
        masked += any(held_out.values())
        learned += not all(held_out.values())
    assert masked and learned  # both happened, so both were tested


@pytest.mark.parametrize("task", [t for t in TASKS if t.family == "hops"], ids=label)
def test_hops_labels(task):
    asked = set()
    for tokens, answers in training_rows(task):
        pointers = decode_map(tokens[: task.width])
        assert set(pointers) == set(pointers.values()) and len(pointers) == task.width
        assert map_key(pointers) >> np.uint64(61) != 0
        assert list(answers) == list(range(task.width, task.width + task.queries))
        for position, (answer, depth) in answers.items():
            hop, start = tokens[position][0], tokens[position][1].removeprefix("start ")
            assert hop == f"hop {depth}"
            visited = chain(pointers, start, depth)
            assert task.vocabulary[answer] == visited[-1]
            assert len(set(visited)) == depth + 1 and cycle_length(pointers, start) >= 2 * depth + 1
            asked.add(depth)
    assert asked == set(range(1, task.max_depth + 1))


def test_hops_training_has_the_mix_of_the_test_strata():
    task = Task("hops", 6, 2)
    trained = {1: Counter(), 2: Counter()}
    for tokens, answers in training_rows(task, range(60)):
        pointers, first = decode_map(tokens[: task.width]), min(answers)
        depth = answers[first][1]
        trained[depth][cycle_length(pointers, tokens[first][1].removeprefix("start "))] += 1
    total = sum(sum(counts.values()) for counts in trained.values())
    for depth, counts in trained.items():
        assert abs(sum(counts.values()) / total - 0.5) < 0.05, "depths are as frequent as the strata are large"
        made = evaluation_set(task, depth, 1200)
        tested = Counter()
        for row in range(1200):
            s, t = (dict(enumerate(made.raw[name][row].tolist())) for name in ("sources", "targets"))
            tested[cycle_length({s[i]: t[i] for i in s}, int(made.raw["start"][row]))] += 1
        assert set(tested) == set(counts)
        for length in tested:
            assert abs(counts[length] / sum(counts.values()) - tested[length] / 1200) < 0.06


def test_no_scored_instance_is_trained_on():
    task = Task("circuit", 2, 1)  # so small that every circuit turns up in training
    scored = {tuple(map(tuple, ids.tolist())): key for ids, key in zip(*held_out_circuits(task), strict=True)}
    learned, seen = set(), set()
    for batch in training_batches(task, 256, range(8), 0):
        for ids, labels in zip(batch.ids, batch.labels, strict=True):
            seen.add(tuple(map(tuple, ids.tolist())))
            if (labels != IGNORE).any():
                learned.add(tuple(map(tuple, ids.tolist())))
    assert len(scored) >= 5 and set(scored) <= seen and not set(scored) & learned


def held_out_circuits(task):
    made = instances(task, 1, range(2000))
    rows = made.key >> np.uint64(61) == 0
    return made.ids[rows], made.key[rows]


@pytest.mark.parametrize("task", TASKS, ids=label)
def test_a_training_batch_is_the_same_alone_or_in_a_range(task):
    together = training_batches(task, 8, range(3, 9), seed=2)
    alone = training_batches(task, 8, range(7, 8), seed=2)[0]
    for name in ("ids", "answer_positions", "labels", "d_star"):
        assert getattr(together[4], name).tobytes() == getattr(alone, name).tobytes()
        assert getattr(alone, name).dtype == np.int64
    other = training_batches(task, 8, range(7, 8), seed=3)[0]
    assert (other.ids != alone.ids).any() and (together[3].ids != alone.ids).any()
    assert len({ids.tobytes() for batch in together for ids in batch.ids}) > 40
    assert training_batches(task, 8, range(4, 4), seed=2) == []


# Floors


def test_hops_floors_against_plain_counts():
    task = Task("hops", 6, 2)
    made = evaluation_set(task, 2, 200)
    hits = {"start": 0, "predecessor": 0, "first_pair_target": 0, "last_pair_target": 0}
    answers = []
    for ids, answer in zip(made.ids, made.answer, strict=True):
        tokens = names(task, ids)
        pointers, start = decode_map(tokens[:-1]), tokens[-1][1].removeprefix("start ")
        gold = task.vocabulary[answer]
        answers.append(gold)
        hits["start"] += start == gold
        hits["predecessor"] += next(s for s, t in pointers.items() if t == start) == gold
        hits["first_pair_target"] += tokens[0][1] == f"tgt {gold}"
        hits["last_pair_target"] += tokens[-2][1] == f"tgt {gold}"
    expected = {name: count / 200 for name, count in hits.items()}
    expected |= {
        "chance": 1 / 26,
        "context_symbol": 1 / 6,
        "constant": max(map(answers.count, answers)) / 200,
    }
    assert floors(task, made) == pytest.approx(expected)
    assert floor(task, made) == max(floors(task, made).values()) and expected["first_pair_target"] > 0


def test_paragg_floor_against_plain_counts():
    task = Task("paragg", 3, 2)
    made = evaluation_set(task, 2, 60)
    shares = []
    for ids, answer in zip(made.ids, made.answer, strict=True):
        own = [value(end, *c) for c, (member, end) in zip(*decode_paragg(names(task, ids)), strict=True) if member]
        shares.append(sum(v == bool(answer) for v in own) / len(own))
    share = sum(shares) / len(shares)
    expected = {"chance": 0.5, "constant": 0.5, "one_member": max(share, 1 - share)}
    assert floors(task, made) == pytest.approx(expected)


def test_circuit_floor_at_depth_1_is_the_best_constant():
    task = Task("circuit", 4, 2)
    made = instances(task, 1, [0, 2, 4, 5])
    assert floors(task, made) == {"chance": 0.5, "constant": 0.75, "upper_layers": 0.75}


def posterior(width, gates, answer):
    """Share of the likelier answer over every layer 1 and every leaf assignment that keep the guarantee."""
    counts = [0, 0]
    kinds = list(product(OPERATOR, combinations(range(width), 2)))
    inputs = sorted({slot for _, slot in gates[answer][1:]})  # the answer at d* = 2 sees no other gate of layer 1
    for bits in product((False, True), repeat=width):
        leaves = {(0, s): bit for s, bit in enumerate(bits)}
        for choice in product(kinds, repeat=len(inputs)):
            layer = {(1, s): (op, (0, a), (0, b)) for s, (op, (a, b)) in zip(inputs, choice, strict=True)}
            circuit = {**layer, answer: gates[answer]}
            counts[value(answer, leaves, circuit)] += changed_path(answer, leaves, circuit)
    return max(counts) / sum(counts)


@pytest.mark.parametrize("width", (2, 3))
def test_upper_layer_floor_against_enumeration(width):
    task = Task("circuit", width, 2)
    made = instances(task, 2, range(200))
    exact = {}
    for ids, position in zip(made.ids, made.answer_position, strict=True):
        tokens = names(task, ids)
        at, gates = node(tokens[position][1]), decode_circuit(tokens)[1]
        exact.setdefault(gates[at][0], []).append((gates, at))
    # by symmetry of the slots the posterior depends on the operator alone
    expected = sum(len(of) * posterior(width, *of[0]) for of in exact.values()) / 200
    assert 0.53 < expected < 0.8
    assert floors(task, made)["upper_layers"] == pytest.approx(expected, abs=0.015)


def test_operator_mix_counts_every_gate():
    task = Task("circuit", 4, 2)
    made = evaluation_set(task, 2, 64)
    used = [op for ids in made.ids for op, *_ in decode_circuit(names(task, ids))[1].values()]
    assert operator_mix(made) == pytest.approx({op: used.count(op) / len(used) for op in OPERATOR})
    with pytest.raises(ValueError, match="circuit or paragg"):
        operator_mix(evaluation_set(Task("hops", 6, 2), 1, 4))


# The vocabulary, and what is refused


@pytest.mark.parametrize("task", TASKS, ids=label)
def test_vocabulary(task):
    assert len(set(task.vocabulary)) == task.vocab_size
    answers = tuple("abcdefghijklmnopqrstuvwxyz") if task.family == "hops" else ("0", "1")
    assert tuple(task.vocabulary[i] for i in task.alphabet) == answers
    batch = training_batches(task, 64, range(1), 0)[0]
    assert batch.ids.shape[2] == task.fields and 0 <= batch.ids.min() and batch.ids.max() < task.vocab_size
    assert not np.isin(batch.ids, task.alphabet).any()  # no answer token in the question


CIRCUIT, HOPS = Task("circuit", 2, 1), Task("hops", 6, 2)
REFUSED = {
    "family must be one of circuit, hops, paragg, not 'maze'": lambda: Task("maze", 4, 2),
    "width must be in 2..63 for circuit, not 1": lambda: Task("circuit", 1, 2),
    "width must be in 2..63 for paragg, not 1": lambda: Task("paragg", 1, 2),
    "width must be in 5..26 for hops with max_depth=2, not 4": lambda: Task("hops", 4, 2),
    "width must be in 4..26 for hops with max_depth=1, not 3": lambda: Task("hops", 3, 1),
    "width must be in 5..26 for hops with max_depth=2, not 27": lambda: Task("hops", 27, 2),
    "max_depth must be in 1..12 for hops, not 13": lambda: Task("hops", 26, 13),
    "max_depth must be at least 1, not 0": lambda: Task("circuit", 4, 0),
    "circuit_width must be in 2..63, not 1": lambda: Task("paragg", 4, 2, circuit_width=1),
    "queries must be at least 1, not 0": lambda: Task("hops", 6, 2, queries=0),
    "d_star must be in 1..2 (max_depth), not 0": lambda: instances(HOPS, 0, range(4)),
    "d_star must be in 1..2 (max_depth), not 3": lambda: evaluation_set(HOPS, 3, 4),
    "seeds must be one or more integers of at least 0": lambda: instances(HOPS, 1, [-1]),
    "split must be one of train, test, not 'dev'": lambda: evaluation_set(HOPS, 1, 4, split="dev"),
    "n must be at least 1 and first_seed 0, not 0 and 0": lambda: evaluation_set(HOPS, 1, 0),
    "batch_size must be at least 1, not 0": lambda: training_batches(HOPS, 0, range(1), 0),
    "seed must be at least 0, not -1": lambda: training_batches(HOPS, 4, range(1), -1),
    "steps must be at least 0, not -2": lambda: training_batches(HOPS, 4, range(-2, 1), 0),
}


@pytest.mark.parametrize("message", REFUSED)
def test_impossible_requests_get_one_sentence(message):
    with pytest.raises(ValueError) as error:
        REFUSED[message]()
    assert str(error.value) == message


def test_a_stratum_too_small_is_refused():
    size = stratum_size(CIRCUIT, 1)
    with pytest.raises(ValueError, match=rf"^n must be at most {size // 10}, a tenth of the {size} instances of circuit"):
        evaluation_set(CIRCUIT, 1, size // 10 + 1)
    assert len(evaluation_set(CIRCUIT, 1, 4).answer) == 4
