"""Multi-step modular arithmetic: a start value, then one operation a token on the running value, whose depth is their number.

Shapes: N instances, R rows of training, m modulus, d steps (d* in evaluation), D max depth, K kinds of step, G groups of s
instances that share a skeleton.
"""

import math
from dataclasses import dataclass, field

import numpy as np

import lib.task_draws as draws
from lib.task_floors import constant
from lib.tasks import IGNORE, SIBLINGS, Batch, Instances, batches_of, first_distinct

OPERATIONS = ("add", "subtract", "times")
SPLIT_SHARE = 1 / 8  # of all instances, see `task_draws.is_test`

_STREAM = 11
_EVALUATION, _TRAINING, _SPLIT = range(3)
_START, _STEPS = range(2)  # what a draw is for


@dataclass(frozen=True)
class Arithmetic:
    """Arithmetic modulo a prime, so that every step is a bijection. Raises ValueError for impossible values.

    Token 0 states the start value, token i an operation with its operand, one of K; the value after i steps is read there. No
    step leaves every value as it is: adding and subtracting take 1..m-1, times 2..m-1. Depth 1 is learnt, never scored: it
    has too few instances.
    """

    family: str = field(default="arithmetic", init=False)
    modulus: int = 11
    max_depth: int = 4

    def __post_init__(self):
        m = self.modulus
        if not 5 <= m <= 97 or any(m % k == 0 for k in range(2, math.isqrt(m) + 1)):
            raise ValueError(f"modulus must be a prime in 5..97, not {m}")
        if self.max_depth < 2:
            raise ValueError(f"max_depth must be at least 2, not {self.max_depth}")

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """Token names in id order, the possible answers first."""
        values, (ops, operands) = range(self.modulus), self._steps(np.arange(self.kinds))
        steps = (f"{OPERATIONS[op]} {by}" for op, by in zip(ops.tolist(), operands.tolist(), strict=True))
        return (*map(str, values), *(f"start {v}" for v in values), *steps)

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return len(self.vocabulary)

    @property
    def fields(self) -> int:
        """F, the token ids that make one position."""
        return 1

    @property
    def alphabet(self) -> tuple[int, ...]:
        """Token ids of the possible answers."""
        return tuple(range(self.modulus))

    @property
    def depths(self) -> tuple[int, ...]:
        """The depths that evaluation sets have."""
        return tuple(range(2, self.max_depth + 1))

    @property
    def kinds(self) -> int:
        """K, how many steps there are: operations with their operands."""
        return 3 * self.modulus - 4

    def stratum_size(self, d_star: int) -> int:
        """The number of instances at a depth, of both splits."""
        return self.modulus * self.kinds**d_star

    def training_batches(self, batch_size: int, steps: range, seed: int) -> list[Batch]:
        """The batches of these steps; batch i is a function of (task, batch_size, seed, i) alone.

        Every sequence has D steps, T = D + 1, and an answer at each. The label of a prefix (start and steps 1..d, d at least
        2) of the test split is -100. Raises ValueError for a batch size below 1, or a negative step or seed.
        """
        return batches_of(self._training, (_STREAM, _TRAINING, self.modulus, self.max_depth), batch_size, steps, seed)

    def evaluation_set(self, d_star: int, n: int) -> Instances:
        """The first n distinct instances of the test split, d* + 1 tokens each, read at the last.

        Four in a row share their steps, the skeleton, and differ in the start (one each where few skeletons have four starts
        in the split). key is the hash of start and steps. raw: start (N,), ops and operands (N, d*).
        Raises ValueError for a d_star outside 2..max_depth, an n outside 1..a tenth of the stratum, or too few instances.
        """
        if d_star not in self.depths:
            raise ValueError(f"d_star must be in 2..{self.max_depth} (max_depth), not {d_star}")
        most = self.stratum_size(d_star) // 10
        if not 1 <= n <= most:
            raise ValueError(f"n must be in 1..{most}, a tenth of the instances at d_star={d_star}, not {n}")
        siblings = self._siblings(d_star)

        def make(groups):
            keys = draws.stream_keys((_STREAM, _EVALUATION, self.modulus, d_star), groups)
            found = draws.redraw(keys, lambda keys: self._group(keys, d_star, siblings))
            key = self._keys(found["start"], found["code"][:, None])[..., -1]
            skeleton = self._keys(np.zeros(len(groups), dtype=np.int64), found["code"])[:, -1]
            return (key[:, 0] if siblings == 1 else skeleton), {**found, "key": key, "skeleton": skeleton}

        where = f"the test split of arithmetic with modulus={self.modulus}, d_star={d_star}"
        found = first_distinct(make, -(-n // siblings), where)
        code, skeleton = (np.repeat(found[name], siblings, axis=0)[:n] for name in ("code", "skeleton"))
        start, key = (found[name].reshape(-1)[:n] for name in ("start", "key"))
        ops, operands = self._steps(code)
        raw = {"start": start, "ops": ops, "operands": operands}
        position, answer = np.full(n, d_star), self._values(start, ops, operands)[:, -1]
        return Instances(self._encode(**raw), position, answer, d_star, self.modulus, key, skeleton, raw)

    def floor(self, instances: Instances) -> float:
        """The no-skill accuracy: that of the best constant answer, or of chance where that is more."""
        return constant(instances.answer, self.modulus)

    def _siblings(self, d_star: int) -> int:
        """s, how many instances of the test split share a skeleton."""
        m, q = self.modulus, SPLIT_SHARE
        # of the skeletons, those with enough starts in the split
        share = sum(math.comb(m, k) * q**k * (1 - q) ** (m - k) for k in range(SIBLINGS, m + 1))
        return SIBLINGS if share > 0.005 and share * self.kinds**d_star > 500 else 1

    def _group(self, keys: np.ndarray, d_star: int, siblings: int) -> tuple[np.ndarray, draws.Arrays]:
        """Whether a random skeleton has enough starts in the split (G,); its steps (G, d) and s of the starts (G, s)."""
        code = draws.below(draws.draw_bits(keys, _STEPS, d_star), self.kinds)
        starts = np.broadcast_to(np.arange(self.modulus), (len(keys), self.modulus))
        test = draws.is_test(self._keys(starts, code[:, None])[..., -1])
        order = draws.shuffled_first(draws.draw_bits(keys, _START, self.modulus), test)
        return test.sum(axis=1) >= siblings, {"code": code, "start": order[:, :siblings]}

    def _training(self, keys: np.ndarray) -> tuple[np.ndarray, ...]:
        start = draws.below(draws.draw_bits(keys, _START, 1)[:, 0], self.modulus)
        code = draws.below(draws.draw_bits(keys, _STEPS, self.max_depth), self.kinds)
        ops, operands = self._steps(code)
        depths = np.arange(1, self.max_depth + 1)
        held_out = draws.is_test(self._keys(start, code)) & (depths > 1)
        labels = np.where(held_out, IGNORE, self._values(start, ops, operands))
        return self._encode(start, ops, operands), depths, labels, depths

    def _steps(self, code: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Operations and operands of step numbers 0..K-1, in the shape of these."""
        ops = np.minimum(code // (self.modulus - 1), 2)
        return ops, code - ops * (self.modulus - 1) + np.where(ops == 2, 2, 1)

    def _values(self, start: np.ndarray, ops: np.ndarray, operands: np.ndarray) -> np.ndarray:
        """The running value after each step, (R, d)."""
        out, value = np.empty(ops.shape, dtype=np.int64), start
        for i, (op, by) in enumerate(zip(ops.T, operands.T, strict=True)):
            value = np.choose(op, (value + by, value - by, value * by)) % self.modulus
            out[:, i] = value
        return out

    def _keys(self, start: np.ndarray, code: np.ndarray) -> np.ndarray:
        """Split-deciding keys of every prefix of 1..d steps, (..., d) uint64: start (...), code (..., d), which broadcast."""
        key = draws.mix(draws.stream_keys((_STREAM, _SPLIT, self.modulus), [0]) ^ start.astype(np.uint64))
        out = []
        for step in np.moveaxis(code, -1, 0):
            out.append(key := draws.mix(key ^ step.astype(np.uint64)))
        return np.stack(out, axis=-1)

    def _encode(self, start: np.ndarray, ops: np.ndarray, operands: np.ndarray) -> np.ndarray:
        """Token ids (R, d + 1, 1)."""
        m = self.modulus
        step = ops * (m - 1) + operands - np.where(ops == 2, 2, 1)  # its number, see `_steps`
        return np.concatenate([m + start[:, None], 2 * m + step], axis=1)[:, :, None]
