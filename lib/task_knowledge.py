"""Recall of a fixed random table of facts: a subject and a relation ask, and no sequence ever states the object.

Shapes: N instances, R rows of training, S subjects, P relations, Q queries of a training sequence.
"""

from dataclasses import dataclass, field

import numpy as np

import lib.task_draws as draws
from lib.task_floors import constant
from lib.tasks import Batch, Instances, batches_of

_STREAM = 12
_EVALUATION, _TRAINING, _TABLE = range(3)
_FACTS = 0  # what a draw is for


@dataclass(frozen=True)
class Knowledge:
    """A table of subjects x relations facts, each one of `objects`. Raises ValueError for impossible values.

    One token with two fields, subject and relation, asks; the object is read there. The table is a fixed hash of subject,
    relation and these three sizes. Facts are learnt from the labels alone and recalled from the weights: evaluation asks for
    facts of the training, so there is no split.
    """

    family: str = field(default="knowledge", init=False)
    subjects: int = 64
    relations: int = 8
    objects: int = 16
    queries: int = 8

    def __post_init__(self):
        for name, least in (("subjects", 1), ("relations", 1), ("objects", 2), ("queries", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """Token names in id order, the possible answers first."""
        sizes = {"object": self.objects, "subject": self.subjects, "relation": self.relations}
        return tuple(f"{role} {i}" for role, size in sizes.items() for i in range(size))

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.objects + self.subjects + self.relations

    @property
    def fields(self) -> int:
        """F, the token ids that make one position: a subject and a relation."""
        return 2

    @property
    def alphabet(self) -> tuple[int, ...]:
        """Token ids of the possible answers."""
        return tuple(range(self.objects))

    @property
    def depths(self) -> tuple[int, ...]:
        """The depths that evaluation sets have: one fact, one step."""
        return (1,)

    @property
    def table(self) -> np.ndarray:
        """The object of every fact, (S, P) int64."""
        keys = self._hashes(_TABLE, range(self.subjects * self.relations))
        return draws.below(keys, self.objects).reshape(self.subjects, self.relations)

    def training_batches(self, batch_size: int, steps: range, seed: int) -> list[Batch]:
        """The batches of these steps; batch i is a function of (task, batch_size, seed, i) alone.

        Q independent facts a sequence, uniform over the table, each labelled at its own token: T = Q.
        Raises ValueError for a batch size below 1, or a negative step or seed.
        """
        return batches_of(self._training, (_STREAM, _TRAINING, *self._sizes, self.queries), batch_size, steps, seed)

    def evaluation_set(self, d_star: int, n: int) -> Instances:
        """The first n distinct facts in a hashed order, one token each.

        key and skeleton are the fact's hash. raw: subject, relation (N,).
        Raises ValueError for a d_star other than 1 or an n outside 1..subjects * relations.
        """
        if d_star not in self.depths:
            raise ValueError(f"d_star must be 1 for knowledge, not {d_star}")
        facts = self.subjects * self.relations
        if not 1 <= n <= facts:
            raise ValueError(f"n must be in 1..{facts}, the number of facts, not {n}")
        keys = self._hashes(_EVALUATION, range(facts))
        fact = np.argsort(keys, kind="stable")[:n]
        subject, relation = np.divmod(fact, self.relations)
        ids, answer = self._encode(fact)[:, None], self.table.reshape(-1)[fact]
        raw = {"subject": subject, "relation": relation}
        return Instances(ids, np.zeros(n, dtype=np.int64), answer, 1, self.subjects, keys[fact], keys[fact], raw)

    def floor(self, instances: Instances) -> float:
        """The no-skill accuracy: that of the best constant answer, or of chance where that is more."""
        return constant(instances.answer, self.objects)

    @property
    def _sizes(self) -> tuple[int, ...]:
        return self.subjects, self.relations, self.objects

    def _hashes(self, stream: int, facts: range) -> np.ndarray:
        return draws.stream_keys((_STREAM, stream, *self._sizes), facts)

    def _training(self, keys: np.ndarray) -> tuple[np.ndarray, ...]:
        fact = draws.below(draws.draw_bits(keys, _FACTS, self.queries), self.subjects * self.relations)
        return self._encode(fact), np.arange(self.queries), self.table.reshape(-1)[fact], np.ones(1, dtype=np.int64)

    def _encode(self, fact: np.ndarray) -> np.ndarray:
        """Token ids (..., 2) of fact numbers (...)."""
        subject, relation = np.divmod(fact, self.relations)
        return np.stack([self.objects + subject, self.objects + self.subjects + relation], axis=-1)
