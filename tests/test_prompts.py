"""Few-shot prompts against a parser that sees only the text and the brute force of the task tests.

Source: the contract paper's "Methodology, Tasks".
"""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from lib import task_draws
from lib.prompts import INSTRUCTIONS, answer_text, few_shot, question_text
from lib.task_encoding import OPERATORS, SYMBOLS
from lib.tasks import SIBLINGS, Task, evaluation_set
from tests import checkpoints
from tests.test_tasks import (
    chain,
    check_gates,
    circuit_key,
    decode_circuit,
    decode_paragg,
    label,
    map_key,
    names,
    node,
    parity,
    value,
)

CIRCUIT, HOPS, PARAGG = Task("circuit", 4, 3), Task("hops", 9, 3), Task("paragg", 3, 2)
TASKS = (CIRCUIT, HOPS, PARAGG, Task("circuit", 2, 2), Task("circuit", 3, 1), Task("hops", 26, 12), Task("paragg", 2, 2, 3))
# two digits in a slot, and more layers than letters
WIDE = (Task("circuit", 12, 2), Task("circuit", 3, 21), Task("paragg", 7, 3, 3))
STRATA = [(task, d) for task in TASKS for d in range(1, task.max_depth + 1)]
EACH = pytest.mark.parametrize("task", (CIRCUIT, HOPS, PARAGG), ids=label)
START, END = "<|im_start|>", "<|im_end|>"


def wrapped(bpe, **tokens):
    bpe.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|endoftext|>", **tokens)


def trained(**tokens):
    """A byte-level BPE as in tests/checkpoints.py, trained on the letters and words of the prompts."""
    letters = [f"{x} -> {x}, {x}; = {x}1" for x in SYMBOLS]
    words = [" = True, = False; AND OR\nAnswer: True\n\nAnswer: False\n\n", *INSTRUCTIONS.values()]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=800, special_tokens=checkpoints.SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(sorted(letters + words * 5), trainer)
    return wrapped(bpe, **tokens)


def merging(*texts, last=()):
    """A BPE of bytes that merges these texts, each from the left, then the pair `last`, with no border between words."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words, pair = ([split.pre_tokenize_str(text)[0][0] for text in some] for some in (texts, last))
    merges = dict.fromkeys((word[:i], word[i]) for word in words for i in range(1, len(word)))
    merges |= {tuple(pair): None} if pair else {}
    tokens = dict.fromkeys([*checkpoints.SPECIAL, *sorted(split.alphabet()), *map("".join, merges)])
    bpe = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, list(merges)))
    bpe.pre_tokenizer = split
    return wrapped(bpe)


TOKENIZER = trained()


# The parser: text to the decoded forms of tests/test_tasks.py


def read_circuit(text):
    """'b1 = True, ..; c1 = b1 AND b2, ..' as (leaves {node: bool}, gates {node: (operator, node, node)}, {name: node})."""
    leaves, gates, where = {}, {}, {}
    for layer, stated in enumerate(text.split("; ")):
        for slot, (name, what) in enumerate(part.split(" = ") for part in stated.split(", ")):
            assert re.fullmatch(r"([b-df-hj-np-tv-xz])\1*[1-9][0-9]?", name) and name not in where
            if layer == 0:
                leaves[0, slot] = {"True": True, "False": False}[what]
            else:
                first, op, second = what.split(" ")
                assert op in OPERATORS
                gates[layer, slot] = (op, where[first], where[second])
            where[name] = (layer, slot)
    return leaves, gates, where


def read(task, text):
    """An example's text as (content, what is asked, the answer's text or '')."""
    *lines, last = text.split("\n")
    answer = re.fullmatch(r"Answer:( \w+)?", last)[1] or ""
    if task.family == "hops":
        stated, asked = lines
        pairs = [re.fullmatch(r"([a-z]) -> ([a-z])", pair).groups() for pair in stated.removeprefix("Map: ").split(", ")]
        start, hops, plural = re.fullmatch(r"From start ([a-z]), (\d+) hop(s?)\.", asked).groups()
        assert (plural == "s") == (hops != "1")
        return pairs, (start, int(hops)), answer
    *stated, asked = lines
    numbers = [re.fullmatch(r"Circuit ?(\d*): (.*)", line).groups() for line in stated]
    circuits = [read_circuit(circuit) for _, circuit in numbers]
    every_name = [name for *_, where in circuits for name in where]
    assert len(set(every_name)) == len(every_name)
    content = [circuit[:2] for circuit in circuits]
    if task.family == "circuit":
        assert [number for number, _ in numbers] == [""]
        return content, circuits[0][2][re.fullmatch(r"What is (\w+)\?", asked)[1]], answer
    assert [number for number, _ in numbers] == [str(c + 1) for c in range(len(circuits))]
    members = re.fullmatch(r"Subset: (.*)\. Is the number of True gates odd\?", asked)[1].split(", ")
    parts = [re.fullmatch(r"(\w+) of circuit (\d+)", member).groups() for member in members]
    subset = {int(c) - 1: circuits[int(c) - 1][2][name] for name, c in parts}
    assert len(subset) == len(parts)
    return content, subset, answer


def solve(task, content, asked):
    """The answer's text, by brute force."""
    if task.family == "hops":
        return " " + chain(dict(content), *asked)[-1]
    if task.family == "circuit":
        return f" {value(asked, *content[0])}"
    ends = [(c in asked, asked.get(c)) for c in range(len(content))]
    return " True" if parity(content, ends) else " False"


def depth_of(task, content, asked):
    return asked[1] if task.family == "hops" else max(layer for layer, _ in content[0][1])


def in_test_split(task, content, asked):
    key = map_key(dict(content)) if task.family == "hops" else circuit_key(content, depth_of(task, content, asked))
    return bool(task_draws.is_test(key))


def decoded(task, ids, position):
    """A symbolic instance as `read` gives it."""
    tokens = names(task, ids)
    if task.family == "hops":
        pairs = [(a.removeprefix("src "), b.removeprefix("tgt ")) for a, b in tokens[:-1]]
        return pairs, (tokens[-1][1].removeprefix("start "), int(tokens[-1][0].removeprefix("hop ")))
    if task.family == "circuit":
        return [decode_circuit(tokens)], node(tokens[position][1])
    content, ends = decode_paragg(tokens)
    return content, {c: end for c, (member, end) in enumerate(ends) if member}


def texts_of(made, tokenizer=TOKENIZER):
    """The prompts as text and the answers as text, in the instances' order."""
    pairs = [tokenizer.batch_decode(rows) for g in made.groups for rows in (g.ids, g.answer[:, None])]
    texts, answers = (np.array(sum(pairs[i::2], []), dtype=object)[made.order] for i in (0, 1))
    return texts.tolist(), answers.tolist()


def examples_of(task, made):
    """The solved examples of a prompt, each read."""
    _, *solved, _ = texts_of(made)[0][0].split("\n\n")
    return [read(task, text) for text in solved]


# One question


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(STRATA), st.integers(0, 2000))
def test_a_question_says_its_instance_and_nothing_else(stratum, first_seed):
    task, d = stratum
    check_questions(task, d, evaluation_set(task, d, 6, first_seed))


@pytest.mark.parametrize("task", WIDE, ids=label)
def test_wide_and_deep_instances_are_said_too(task):
    check_questions(task, task.max_depth, evaluation_set(task, task.max_depth, 4))


def check_questions(task, d, made):
    for row, answer in enumerate(made.answer):
        text = question_text(task, made, row)
        content, asked, stated = read(task, text)
        assert (content, asked) == decoded(task, made.ids[row], made.answer_position[row]) and stated == ""
        assert solve(task, content, asked) == answer_text(task, answer)
        assert depth_of(task, content, asked) == d and in_test_split(task, content, asked)
        if task.family != "hops":
            ends = [asked] if task.family == "circuit" else list(asked.values())
            assert all(layer == d for layer, _ in ends)
            for leaves, gates in content:
                check_gates(leaves, gates, task.width if task.family == "circuit" else task.circuit_width, d)


# The prompts


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(STRATA), st.integers(1, 9), st.integers(0, 5), st.integers(0, 500))
def test_prompts_are_solved_examples_and_one_open_question(stratum, n, shots, first_seed):
    task, d = stratum
    made, plain = few_shot(task, d, n, TOKENIZER, shots, first_seed), evaluation_set(task, d, n, first_seed)
    texts, answers = texts_of(made)
    assert len(texts) == n
    for row, (text, answer) in enumerate(zip(texts, answers, strict=True)):
        instruction, *solved, question = text.split("\n\n")
        assert instruction == INSTRUCTIONS[task.family] and "\n" not in instruction and len(solved) == shots
        for example in solved:
            content, asked, stated = read(task, example)
            assert stated == solve(task, content, asked) != ""
            assert not in_test_split(task, content, asked)
        assert question == question_text(task, plain, row) and question.endswith("\nAnswer:")
        content, asked, stated = read(task, question)
        assert stated == "" and solve(task, content, asked) == answer


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(STRATA), st.integers(1, 12), st.integers(0, 3))
def test_groups_hold_one_length_each_and_order_restores_the_instances(stratum, n, shots):
    task, d = stratum
    made, plain = few_shot(task, d, n, TOKENIZER, shots), evaluation_set(task, d, n)
    lengths = [g.ids.shape[1] for g in made.groups]
    assert lengths == sorted(set(lengths)) and made.order.dtype == np.int64
    assert sorted(made.order) == list(range(n))
    for g in made.groups:
        assert g.ids.dtype == g.answer.dtype == g.answer_position.dtype == np.int64
        assert (g.answer_position == g.ids.shape[1] - 1).all() and g.answer.shape == g.answer_position.shape == g.key.shape
        assert (g.d_star, g.width) == (d, task.width)

    def restored(part):
        return np.concatenate([part(g) for g in made.groups])[made.order]

    assert restored(lambda g: g.key).tolist() == plain.key.tolist()
    assert restored(lambda g: g.skeleton).tolist() == plain.skeleton.tolist()
    assert restored(lambda g: g.answer).tolist() == [made.alphabet[answer] for answer in plain.answer]
    for name, values in plain.raw.items():
        np.testing.assert_array_equal(restored(lambda g, name=name: g.raw[name]), values)


def test_some_prompts_differ_in_length():
    assert len(few_shot(CIRCUIT, 3, 16, TOKENIZER, 2).groups) > 1


@EACH
@pytest.mark.parametrize("shots", (0, 3))
def test_the_prefix_is_the_instruction_and_the_examples(task, shots):
    made = few_shot(task, 2, 12, TOKENIZER, shots)
    heads = {tuple(row) for g in made.groups for row in g.ids[:, : made.prefix].tolist()}
    assert len(heads) == 1 and made.prefix < min(g.ids.shape[1] for g in made.groups)
    assert TOKENIZER.decode(*heads).rstrip("\n") == texts_of(made)[0][0].rpartition("\n\n")[0]


def test_the_prefix_ends_before_a_token_that_reaches_into_the_question():
    tokenizer = merging(" True", " False", " True\n\n", " False\n\n")
    made = few_shot(CIRCUIT, 1, 4, tokenizer, 3)
    (head,) = {tuple(row) for g in made.groups for row in g.ids[:, : made.prefix].tolist()}
    assert tokenizer.decode(head).endswith("\nAnswer:")  # the last example's answer is in one token with what follows


@EACH
def test_examples_are_the_same_for_every_depth_and_seed(task):
    heads = set()
    for d, first_seed in ((1, 0), (2, 0), (2, 400)):
        made = few_shot(task, d, 3, TOKENIZER, 4, first_seed)
        heads.add(tuple(made.groups[0].ids[0, : made.prefix].tolist()))
    assert len(heads) == 1


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(TASKS), st.integers(0, 12))
def test_examples_cycle_over_depths_and_are_balanced(task, shots):
    if task.width == 2:
        shots = min(shots, 2)
    examples = examples_of(task, few_shot(task, 1, 2, TOKENIZER, shots))
    assert [depth_of(task, *example[:2]) for example in examples] == [i % task.max_depth + 1 for i in range(shots)]
    if task.family != "hops":
        answers = [stated for *_, stated in examples]
        assert abs(answers.count(" True") - answers.count(" False")) == shots % 2


@pytest.mark.parametrize("task", (CIRCUIT, PARAGG, Task("circuit", 4, 1), Task("circuit", 4, 4)), ids=label)
def test_each_depth_of_the_examples_has_both_answers(task):
    examples = examples_of(task, few_shot(task, 1, 2, TOKENIZER, 2 * task.max_depth))
    seen = {(depth_of(task, *example[:2]), example[2]) for example in examples}
    assert len(seen) == 2 * task.max_depth


@EACH
def test_no_two_examples_share_a_skeleton(task):
    examples = examples_of(task, few_shot(task, 1, 2, TOKENIZER, 6 * task.max_depth))
    if task.family == "hops":
        shapes = {tuple(sorted(pairs)) for pairs, *_ in examples}
    else:
        shapes = {str([gates for _, gates in content]) for content, *_ in examples}
    assert len(shapes) == len(examples) == 6 * task.max_depth > SIBLINGS


def test_prompts_are_the_same_every_time():
    first, second = (few_shot(PARAGG, 2, 8, trained(), 4) for _ in range(2))
    assert (first.prefix, first.alphabet) == (second.prefix, second.alphabet)
    for a, b in zip(first.groups, second.groups, strict=True):
        np.testing.assert_array_equal(a.ids, b.ids)
        np.testing.assert_array_equal(a.answer, b.answer)


# The tokenizer


@EACH
def test_the_alphabet_decodes_to_the_answers(task):
    made = few_shot(task, 1, 4, TOKENIZER, 2)
    expected = [f" {s}" for s in SYMBOLS] if task.family == "hops" else [" False", " True"]
    assert [TOKENIZER.decode([token]) for token in made.alphabet] == expected


@EACH
def test_a_special_token_stands_in_front_once_and_none_behind(task):
    plain, special = few_shot(task, 2, 6, TOKENIZER, 3), trained(bos_token=START)
    start, end = special.convert_tokens_to_ids([START, END])
    special.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{START} $A {END}", special_tokens=[(START, start), (END, end)]
    )
    assert special("a")["input_ids"] == [start, *TOKENIZER("a")["input_ids"], end]
    made = few_shot(task, 2, 6, special, 3)
    assert made.alphabet == plain.alphabet and made.prefix == plain.prefix + 1
    for a, b in zip(made.groups, plain.groups, strict=True):
        assert a.ids.tolist() == [[start, *row] for row in b.ids.tolist()]
        np.testing.assert_array_equal(a.answer_position, b.answer_position + 1)


def refused(task, answer):
    text = f"{task.family} answer '{answer}' must be a single token of this tokenizer, unlike any other answer's"
    return pytest.raises(ValueError, match=f"^{re.escape(text)}$")


def test_an_answer_of_two_tokens_is_refused(tmp_path):
    checkpoints.tokenizer(tmp_path)
    small = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert len(small(" False")["input_ids"]) > 1
    for task in (CIRCUIT, PARAGG):
        with refused(task, " False"):
            few_shot(task, 1, 4, small, 2)
    with refused(CIRCUIT, " True"):
        few_shot(CIRCUIT, 1, 4, merging(" False"), 2)
    with refused(HOPS, " z"):
        few_shot(HOPS, 1, 4, merging(*(f" {s}" for s in SYMBOLS[:-1])), 0)


def test_an_answer_that_merges_with_the_prompt_is_refused():
    tokenizer = merging(": ", " True", " False")
    assert len(tokenizer(" False")["input_ids"]) == 1
    with refused(CIRCUIT, " False"):
        few_shot(CIRCUIT, 1, 4, tokenizer, 0)


def test_an_answer_that_merges_with_one_prompt_of_many_is_refused():
    end = "c2?\nAnswer:"
    tokenizer = merging(" True", " False", end, last=(end, " True"))
    texts = [question_text(CIRCUIT, evaluation_set(CIRCUIT, 1, 8), row) for row in range(8)]
    assert not texts[0].endswith(end) and any(text.endswith(end) for text in texts)
    with refused(CIRCUIT, " True"):
        few_shot(CIRCUIT, 1, 8, tokenizer, 0)


def test_answers_of_one_token_are_refused():
    words = Tokenizer(models.WordLevel({"?": 0, "Answer": 1, ":": 2, **{s: 3 + i for i, s in enumerate(SYMBOLS[:-2])}}, "?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    with refused(HOPS, " z"):
        few_shot(HOPS, 1, 4, PreTrainedTokenizerFast(tokenizer_object=words), 0)


def test_impossible_shots_are_refused_in_a_sentence():
    with pytest.raises(ValueError, match="^shots must be at least 0, not -1$"):
        few_shot(CIRCUIT, 1, 4, TOKENIZER, -1)
    with pytest.raises(ValueError, match="^shots must be lower than 40, there are too few train instances: n must be at most"):
        few_shot(Task("circuit", 2, 1), 1, 4, TOKENIZER, 40)
