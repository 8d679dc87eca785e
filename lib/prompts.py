"""Few-shot text prompts of the three task families, for released models that read text.

A prompt is an instruction line, solved examples of the train split and one question of the test split; its answer is one token
of the model's tokenizer, read at the prompt's last token. Source: the contract paper's "Methodology, Tasks".

Shapes: N instances, N_g of them in a group, T tokens of a prompt (one T a group).
"""

import math
from collections import Counter
from dataclasses import dataclass, replace
from itertools import takewhile

import numpy as np
from transformers import PreTrainedTokenizerBase

from lib import tasks
from lib.task_encoding import OPERATORS, SYMBOLS
from lib.tasks import Instances, Task

INSTRUCTIONS = {
    "circuit": "Evaluate the logic circuit and say whether the gate asked for is True or False.",
    "hops": "Follow the arrows from the start for the given number of hops and say which letter is reached.",
    "paragg": "Evaluate the logic circuits and say True if the number of True gates in the subset is odd, False if it is even.",
}
LAYERS = "bcdfghjkmnpqrstvwxz"  # no vowel or y, so that no name reads as a word; no l, which reads as 1


@dataclass(frozen=True)
class Prompts:
    """N prompts of one (d*, w) stratum, grouped by length in tokens, shortest first.

    A group's ids (N_g, T), answer_position (N_g,), which is T - 1, and answer (N_g,) are token ids and places of the tokenizer,
    int64; its other fields are those of the symbolic instances. `np.concatenate([g.answer for g in groups])[order]` is in the
    order of `lib.tasks.evaluation_set`, and so is any other array over the instances.
    """

    groups: tuple[Instances, ...]
    order: np.ndarray  # (N,) int64
    alphabet: tuple[int, ...]  # token ids of the possible answers, in the order of the task's alphabet
    prefix: int  # how many first tokens all prompts share: the instruction and the examples


def few_shot(task: Task, d_star: int, n: int, tokenizer: PreTrainedTokenizerBase, shots: int, first_seed: int = 0) -> Prompts:
    """The n instances of `lib.tasks.evaluation_set(task, d_star, n, first_seed)` as prompts after `shots` solved examples.

    The examples are of the train split, at depths 1, 2, .. max_depth, 1, .. in turn, half of them with each answer in binary
    families (as near as can be where shots is odd); they depend on task and shots alone. Special tokens are those the tokenizer
    adds by its own default in front (such as one that begins a text); what it adds behind is dropped.
    Raises ValueError as `evaluation_set` does, for negative shots, for too few train instances for the shots, and for an answer
    that is not one token after a prompt, or shares its token with another answer.
    Source: contract paper, Methodology, Tasks.
    """
    made = tasks.evaluation_set(task, d_star, n, first_seed)
    head = "\n\n".join([INSTRUCTIONS[task.family], *_examples(task, shots)])
    texts = [f"{head}\n\n{question_text(task, made, row)}" for row in range(n)]
    rows = _encode(tokenizer, texts)
    alphabet = _alphabet(task, made.answer, tokenizer, texts, rows)
    length = np.array([len(ids) for ids in rows])
    parts = [np.flatnonzero(length == T) for T in np.unique(length)]
    groups = tuple(_group(made, part, rows, alphabet) for part in parts)
    return Prompts(groups, np.argsort(np.concatenate(parts)), alphabet, _shared([*_encode(tokenizer, [head]), *rows]))


def question_text(task: Task, made: Instances, row: int) -> str:
    """One instance, a row of `made`, as text that ends in `Answer:`.

    A gate's name is a letter for its layer and a number for its slot; letters run on over the circuits of an instance. Commas
    separate the gates of a layer, semicolons the layers, leaves first. Pairs of a map are in their stated order.
    """
    if task.family == "hops":
        start, hops = SYMBOLS[made.raw["start"][row]], "1 hop" if made.d_star == 1 else f"{made.d_star} hops"
        stated = zip(made.raw["sources"][row], made.raw["targets"][row], strict=True)
        pairs = ", ".join(f"{SYMBOLS[a]} -> {SYMBOLS[b]}" for a, b in stated)
        return f"Map: {pairs}\nFrom start {start}, {hops}.\nAnswer:"
    parts = [made.raw[name][row] for name in ("leaves", "ops", "in1", "in2", "gate")]
    if task.family == "circuit":
        circuit, asked = _circuit_text(*parts, first=0)
        return f"Circuit: {circuit}\nWhat is {asked}?\nAnswer:"
    letters = made.d_star + 1  # of one circuit
    texts = [_circuit_text(*part, first=letters * c) for c, part in enumerate(zip(*parts, strict=True))]
    lines = [f"Circuit {c}: {circuit}" for c, (circuit, _) in enumerate(texts, start=1)]
    members = ", ".join(f"{texts[c][1]} of circuit {c + 1}" for c in np.flatnonzero(made.raw["subset"][row]))
    return "\n".join([*lines, f"Subset: {members}. Is the number of True gates odd?", "Answer:"])


def answer_text(task: Task, answer: int) -> str:
    """A symbolic answer, an id of the task's alphabet, as the text that follows `Answer:`; paragg: True where odd."""
    return f" {SYMBOLS[answer]}" if task.family == "hops" else f" {bool(answer)}"


def _name(layer: int, slot: int) -> str:
    times, letter = divmod(layer, len(LAYERS))
    return f"{LAYERS[letter] * (times + 1)}{slot + 1}"


def _circuit_text(leaves, ops, in1, in2, gate, first: int) -> tuple[str, str]:
    """A circuit, leaves (w,) and gates (d*, w), and its answer gate's name; `first` is the number of its first letter."""
    layers = [", ".join(f"{_name(first, slot)} = {bool(leaf)}" for slot, leaf in enumerate(leaves))]
    for below, gates in enumerate(zip(ops, in1, in2, strict=True), start=first):
        parts = enumerate(zip(*gates, strict=True))
        layers.append(
            ", ".join(f"{_name(below + 1, s)} = {_name(below, a)} {OPERATORS[op]} {_name(below, b)}" for s, (op, a, b) in parts)
        )
    return "; ".join(layers), _name(first + len(ops), gate)


def _examples(task: Task, shots: int) -> list[str]:
    """The solved examples, as text."""
    if shots < 0:
        raise ValueError(f"shots must be at least 0, not {shots}")
    # each pair of examples holds both answers, and so do a depth's first two, whether max_depth is even or odd
    turn = math.lcm(2, task.max_depth)
    wanted = [(i + i // turn) & 1 for i in range(shots)]
    texts = [""] * shots
    for d in range(1, min(task.max_depth, shots) + 1):
        places = range(d - 1, shots, task.max_depth)
        made = _candidates(task, d, len(places), shots)
        free, used = list(range(len(made.answer))), Counter()
        for i in places:
            fits = [row for row in free if task.family == "hops" or made.answer[row] == wanted[i]]
            row = min(fits, key=lambda row: (used[made.skeleton[row]], row))
            free.remove(row)
            used[made.skeleton[row]] += 1
            texts[i] = question_text(task, made, row) + answer_text(task, made.answer[row])
    return texts


def _candidates(task: Task, d: int, count: int, shots: int) -> Instances:
    """Train instances of a depth, enough for `count` examples and, where the stratum is large, for as many skeletons."""
    least = count + count % 2
    asked = min(tasks.SIBLINGS * least, tasks.stratum_size(task, d) // 10)
    try:
        return tasks.evaluation_set(task, d, max(least, asked), split="train")
    except ValueError as error:
        raise ValueError(f"shots must be lower than {shots}, there are too few train instances: {error}") from error


def _encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    """Token ids of each text, without special tokens behind it."""
    made = tokenizer(texts, add_special_tokens=True, return_special_tokens_mask=True)
    ends = [len(mask) - mask[::-1].index(0) for mask in made["special_tokens_mask"]]
    return [ids[:end] for ids, end in zip(made["input_ids"], ends, strict=True)]


def _alphabet(
    task: Task, answers: np.ndarray, tokenizer: PreTrainedTokenizerBase, texts: list[str], rows: list[list[int]]
) -> tuple[int, ...]:
    """The token of each possible answer: all are tried behind the first prompt, and its own (N,) behind each other one."""
    tried = [(0, symbol) for symbol in task.alphabet] + list(enumerate(answers.tolist()))
    ended = _encode(tokenizer, [texts[row] + answer_text(task, symbol) for row, symbol in tried])
    token = {}
    for (row, symbol), ids in zip(tried, ended, strict=True):
        others = [token[other] for other in token if other != symbol]
        known = token.setdefault(symbol, ids[-1])
        if ids != [*rows[row], known] or known in others:
            text = answer_text(task, symbol)
            raise ValueError(
                f"{task.family} answer {text!r} must be a single token of this tokenizer, unlike any other answer's"
            )
    return tuple(token.values())


def _group(made: Instances, part: np.ndarray, rows: list[list[int]], alphabet: tuple[int, ...]) -> Instances:
    """The prompts of the instances `part`, whose rows have one length."""
    ids = np.array([rows[row] for row in part], dtype=np.int64)
    return replace(
        made,
        ids=ids,
        answer_position=np.full(len(part), ids.shape[1] - 1),
        answer=np.array(alphabet)[made.answer[part]],
        key=made.key[part],
        skeleton=made.skeleton[part],
        raw={name: values[part] for name, values in made.raw.items()},
    )


def _shared(rows: list[list[int]]) -> int:
    """How many first ids all rows share."""
    columns = zip(*rows, strict=False)
    return sum(1 for _ in takewhile(lambda ids: len(set(ids)) == 1, columns))
