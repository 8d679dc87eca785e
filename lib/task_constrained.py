"""Writing under constraints: a short string that obeys all that the prompt states, judged by a checker.

Shapes: N instances, R rows of training, C constraints of an instance, L length of a string, S strings of that length, K
constraints there are, W 64-bit words that hold a bit a string, B rows of a batch, T tokens, V vocabulary.
"""

import functools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import lib.task_draws as draws
from lib.task_encoding import SYMBOLS
from lib.tasks import Batch, Instances, batches_of, first_distinct

TYPES = ("at", "absent", "exactly", "before", "differ")
MOST_STRINGS = 50_000  # all of them are looked at

_STREAM = 13
_EVALUATION, _TRAINING, _SPLIT = range(3)
_TYPE, _WHICH, _STRING = range(3)  # what a draw is for
_AT, _ABSENT, _EXACTLY, _BEFORE, _DIFFER = range(len(TYPES))


@dataclass(frozen=True)
class Constrained:
    """Strings of `length` of the first `letters` letters under `constraints` constraints. Raises ValueError for impossible
    values.

    A constraint is a token of three fields: at (letter, place), absent (letter), exactly (letter, count 1..length-1: how
    often it occurs), before (two letters: both occur, the first of the one before the first of the other), differ
    (neighbours do). At least two strings obey the constraints of an instance. The first letter is read at the last
    constraint's token, each other one at the token of the letter before it, which states letter and place.
    """

    family: str = field(default="constrained", init=False)
    letters: int = 6
    length: int = 4
    constraints: int = 3

    def __post_init__(self):
        if not 2 <= self.letters <= len(SYMBOLS):
            raise ValueError(f"letters must be in 2..{len(SYMBOLS)}, not {self.letters}")
        if self.length < 2 or self.letters**self.length > MOST_STRINGS:
            raise ValueError(f"length must be at least 2, with at most {MOST_STRINGS} letters**length, not {self.length}")
        if not 1 <= self.constraints <= len(kinds(self)):
            raise ValueError(f"constraints must be in 1..{len(kinds(self))}, not {self.constraints}")

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """Token names in id order, the possible answers first."""
        return sum(_token_groups(self).values(), ())

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return len(self.vocabulary)

    @property
    def fields(self) -> int:
        """F, the token ids that make one position: a type with up to two arguments, or a letter and its place."""
        return 3

    @property
    def alphabet(self) -> tuple[int, ...]:
        """Token ids of the possible answers."""
        return tuple(range(self.letters))

    @property
    def depths(self) -> tuple[int, ...]:
        """The depths that evaluation sets have: the number of constraints."""
        return (self.constraints,)

    def training_batches(self, batch_size: int, steps: range, seed: int) -> list[Batch]:
        """The batches of these steps; batch i is a function of (task, batch_size, seed, i) alone.

        A string that is uniform over those that obey the constraints follows them: T = C + L - 1, and each of its letters is
        labelled where it is read. No set of constraints of the test split occurs.
        Raises ValueError for a batch size below 1, a negative step or seed, or where no instance turns up.
        """
        return batches_of(self._training, (_STREAM, _TRAINING, *self._sizes), batch_size, steps, seed)

    def evaluation_set(self, d_star: int, n: int) -> Instances:
        """The first n instances of the test split with distinct sets of constraints: the prompts alone, ids (N, C, 3).

        answer is -1, since many strings are right; see `written` and `accepts`. key and skeleton are the hash of the set,
        whatever its order. raw: constraints (N, C), rows of `kinds`.
        Raises ValueError for a d_star other than `constraints`, n below 1, or too few instances.
        """
        if d_star not in self.depths:
            raise ValueError(f"d_star must be {self.constraints} (constraints), not {d_star}")
        if n < 1:
            raise ValueError(f"n must be at least 1, not {n}")

        def make(numbers):
            found = self._drawn(draws.stream_keys((_STREAM, _EVALUATION, *self._sizes), numbers), test=True)
            return found["key"], found

        found = first_distinct(make, n, f"the test split of {self}")
        position, answer = np.full(n, self.constraints - 1), np.full(n, -1)
        ids, raw = constraint_tokens(self, found["constraints"]), {"constraints": found["constraints"]}
        return Instances(ids, position, answer, d_star, self.letters, found["key"], found["key"].copy(), raw)

    def floor(self, instances: Instances) -> float:
        """The no-skill accuracy: the share of all strings that obey, averaged over the instances."""
        words = _obeying(self, instances.raw["constraints"])
        return float(np.bitwise_count(words).sum(axis=1).mean() / self.letters**self.length)

    @property
    def _sizes(self) -> tuple[int, ...]:
        return self.letters, self.length, self.constraints

    def _drawn(self, keys: np.ndarray, test: bool) -> draws.Arrays:
        """constraints (R, C) of one split that two strings or more obey, and the set's key (R,)."""
        of_type = [np.flatnonzero(kinds(self)[:, 0] == what) for what in range(len(TYPES))]
        first, size = np.array([(rows[0], len(rows)) for rows in of_type]).T

        def draw(keys):
            # types are equally likely, whatever the number of their arguments
            what = draws.below(draws.draw_bits(keys, _TYPE, self.constraints), len(TYPES))
            chosen = first[what] + draws.below(draws.draw_bits(keys, _WHICH, self.constraints), size[what])
            key, ordered = set_keys(self, chosen), np.sort(chosen, axis=1)
            good = (draws.is_test(key) == test) & (ordered[:, 1:] != ordered[:, :-1]).all(axis=1)
            good[good] = np.bitwise_count(_obeying(self, chosen[good])).sum(axis=1) >= 2
            return good, {"constraints": chosen, "key": key}

        try:
            return draws.redraw(keys, draw)
        except ValueError as error:
            raise ValueError(
                f"letters must be more than {self.letters}, or constraints not {self.constraints}, for an instance of the "
                f"{'test' if test else 'train'} split to turn up in {draws.ATTEMPTS} draws"
            ) from error

    def _training(self, keys: np.ndarray) -> tuple[np.ndarray, ...]:
        chosen = self._drawn(keys, test=False)["constraints"]
        words = _obeying(self, chosen)
        rank = draws.below(draws.draw_bits(keys, _STRING, 1)[:, 0], np.bitwise_count(words).sum(axis=1))
        labels = strings(self.letters, self.length)[_nth_bit(words, rank)]
        told = [letter_tokens(self, labels[:, place], place) for place in range(self.length - 1)]
        ids = np.concatenate([constraint_tokens(self, chosen), np.stack(told, axis=1)], axis=1)
        positions = np.arange(self.constraints - 1, self.constraints + self.length - 1)
        return ids, positions, labels, np.full(1, self.constraints)


def kinds(task: Constrained) -> np.ndarray:
    """Every constraint there is, (K, 3) int64: the number of its type, its letter and its argument (a place from 0, a count
    or a letter), 0 where it has none."""
    x, places, counts = range(task.letters), range(task.length), range(1, task.length)
    found = [(_AT, a, i) for a in x for i in places] + [(_ABSENT, a, 0) for a in x]
    found += [(_EXACTLY, a, k) for a in x for k in counts] + [(_BEFORE, a, b) for a in x for b in x if a != b]
    return np.array([*found, (_DIFFER, 0, 0)])


def accepts(task: Constrained, constraints: np.ndarray, strings: np.ndarray) -> np.ndarray:
    """Whether each string (N, L), of letters from 0, obeys its constraints (N, C), rows of `kinds`: (N,) bool.

    A string with a letter outside 0..letters-1 obeys none.
    """
    what, x, y = np.moveaxis(kinds(task)[constraints], 2, 0)
    here, other = (strings[:, None] == letter[:, :, None] for letter in (x, y))  # (N, C, L)
    rules = {
        _AT: (here & (np.arange(task.length) == y[:, :, None])).any(axis=2),
        _ABSENT: ~here.any(axis=2),
        _EXACTLY: here.sum(axis=2) == y,
        _BEFORE: here.any(axis=2) & other.any(axis=2) & (here.argmax(axis=2) < other.argmax(axis=2)),
        _DIFFER: (strings[:, 1:] != strings[:, :-1]).all(axis=1)[:, None],
    }
    obeyed = np.select([what == type_ for type_ in rules], list(rules.values()))
    return obeyed.all(axis=1) & ((strings >= 0) & (strings < task.letters)).all(axis=1)


def set_keys(task: Constrained, constraints: np.ndarray) -> np.ndarray:
    """Split-deciding key (N,) uint64 of sets of constraints (N, C), in whatever order."""
    each = draws.stream_keys((_STREAM, _SPLIT, task.letters, task.length), range(len(kinds(task))))
    return draws.mix(each[constraints].sum(axis=1, dtype=np.uint64))


def constraint_tokens(task: Constrained, constraints: np.ndarray) -> np.ndarray:
    """Token ids (N, C, 3) of constraints (N, C)."""
    first = _first_ids(task)
    what, x, y = np.moveaxis(kinds(task)[constraints], 2, 0)
    argument = {_AT: first["place"] + y, _EXACTLY: first["count"] + y - 1, _BEFORE: first["second"] + y}
    third = np.select([what == type_ for type_ in argument], list(argument.values()), first["none"])
    return np.stack([first["type"] + what, np.where(what == _DIFFER, first["none"], first["first"] + x), third], axis=2)


def letter_tokens(task: Constrained, letters: np.ndarray, place: int) -> np.ndarray:
    """Token ids (N, 3) of letters (N,), from 0, written at a place, from 0."""
    first = _first_ids(task)
    return np.stack([letters, np.full_like(letters, first["place"] + place), np.full_like(letters, first["none"])], axis=1)


@torch.no_grad()
def written(model: Any, task: Constrained, instances: Instances, first_id: int = 0, batch_size: int = 256, **how) -> np.ndarray:
    """The strings that a model writes greedily, (N, L) letters from 0; -1 where its likeliest token is no letter.

    instances are in the model's ids, in which first_id is the family's first. model(ids, answer_positions=(1,), **how).logits
    are (B, 1, V). After a token that is no letter the first letter is read. Raises ValueError for ids of another family.
    """
    low, high = int(instances.ids.min()), int(instances.ids.max())
    if low < first_id or high >= first_id + task.vocab_size:
        raise ValueError(f"first_id is {first_id}: the ids, {low}..{high}, must be in the {task.vocab_size} from it on")
    out = np.empty((len(instances.ids), task.length), dtype=np.int64)
    for i in range(0, len(out), batch_size):
        rows = slice(i, i + batch_size)
        ids = instances.ids[rows]
        for place in range(task.length):
            last = torch.tensor([ids.shape[1] - 1], device=model.device)
            logits = model(torch.as_tensor(ids, device=model.device), answer_positions=last, **how).logits
            token = logits[:, 0].argmax(dim=-1).cpu().numpy() - first_id
            out[rows, place] = np.where((token >= 0) & (token < task.letters), token, -1)
            told = letter_tokens(task, np.maximum(out[rows, place], 0), place) + first_id
            ids = np.concatenate([ids, told[:, None]], axis=1)
    return out


def strings(letters: int, length: int) -> np.ndarray:
    """All strings, (S, L) letters from 0, in alphabetical order."""
    return np.indices((letters,) * length).reshape(length, -1).T


@functools.lru_cache(maxsize=8)
def _table(letters: int, length: int) -> np.ndarray:
    """Which strings obey each of `kinds`, (K, W) uint64: bit s % 64 of word s // 64 is string s."""
    text, x = strings(letters, length), np.arange(letters)
    here = text[:, None, :] == x[:, None]  # (S, letters, L)
    count = here.sum(axis=2)
    first = np.where(count > 0, here.argmax(axis=2), length)
    one, two = np.nonzero(x[:, None] != x)
    obeyed = [
        here.reshape(len(text), -1),
        count == 0,
        (count[:, :, None] == np.arange(1, length)).reshape(len(text), -1),
        (first[:, one] < first[:, two]) & (count[:, two] > 0),
        (np.diff(text, axis=1) != 0).all(axis=1, keepdims=True),
    ]
    bits = np.packbits(np.concatenate(obeyed, axis=1).T, axis=1, bitorder="little")
    return np.ascontiguousarray(np.pad(bits, ((0, 0), (0, -bits.shape[1] % 8)))).view(np.uint64)


def _obeying(task: Constrained, constraints: np.ndarray) -> np.ndarray:
    """The strings that obey all of constraints (N, C), as bits (N, W)."""
    table = _table(task.letters, task.length)
    return functools.reduce(np.bitwise_and, (table[some] for some in constraints.T))


def _nth_bit(words: np.ndarray, rank: np.ndarray) -> np.ndarray:
    """The place of the bit that has `rank` (N,) set bits before it in words (N, W); rank is below their number."""
    ones, rows = np.bitwise_count(words).astype(np.int64), np.arange(len(words))
    upto = ones.cumsum(axis=1)
    at = (upto <= rank[:, None]).sum(axis=1)
    left = rank - upto[rows, at] + ones[rows, at]
    bits = np.unpackbits(words[rows, at][:, None].view(np.uint8), axis=1, bitorder="little")
    return 64 * at + (bits.cumsum(axis=1, dtype=np.int64) <= left[:, None]).sum(axis=1)


def _token_groups(task: Constrained) -> dict[str, tuple[str, ...]]:
    """Token names by role, in id order."""
    letters = SYMBOLS[: task.letters]
    return {
        "answer": letters,
        "type": TYPES,
        "none": ("none",),
        "first": tuple(f"first {a}" for a in letters),
        "second": tuple(f"second {a}" for a in letters),
        "place": tuple(f"place {i}" for i in range(task.length)),
        "count": tuple(f"count {k}" for k in range(1, task.length)),
    }


def _first_ids(task: Constrained) -> dict[str, int]:
    """The id of the first token of each role."""
    sizes = [len(names) for names in _token_groups(task).values()]
    return dict(zip(_token_groups(task), np.cumsum([0, *sizes]).tolist(), strict=False))
