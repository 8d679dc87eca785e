"""Several tasks in one vocabulary, so that tokens outside a task's alphabet are alive in a model trained on all of them.

The tasks' vocabularies stand one after the other. A batch holds one task; the tasks take turns.
Shapes: N instances, B rows, T tokens, F fields, A answers.
"""

from dataclasses import dataclass, replace

import numpy as np

from lib.task_arithmetic import Arithmetic
from lib.task_constrained import Constrained
from lib.task_knowledge import Knowledge
from lib.tasks import IGNORE, Batch, Instances, Task

AnyTask = Task | Arithmetic | Knowledge | Constrained
OF_FAMILY = {"arithmetic": Arithmetic, "knowledge": Knowledge, "constrained": Constrained}  # every other is a `Task`


@dataclass(frozen=True)
class Mixture:
    """Tasks of different families in the order of their ids. turns: families in the order of batches, over and over, each at
    least once; empty: every task once. Raises ValueError when there is no task, one repeats, or the turns are not of them."""

    tasks: tuple[AnyTask, ...]
    turns: tuple[str, ...] = ()

    def __post_init__(self):
        families = [task.family for task in self.tasks]
        if not families or len(set(families)) < len(families):
            raise ValueError(f"tasks are {', '.join(families) or 'none'}: there must be one or more, each once")
        if self.turns and set(self.turns) != set(families):
            raise ValueError(f"turns are {', '.join(self.turns)}: they must hold each of {', '.join(families)} and no other")

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """Token names in id order, each behind its family's name."""
        return tuple(f"{task.family} {name}" for task in self.tasks for name in task.vocabulary)

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return sum(task.vocab_size for task in self.tasks)

    def task(self, family: str) -> AnyTask:
        """The task of a family. Raises ValueError when the mixture has none."""
        found = [task for task in self.tasks if task.family == family]
        if not found:
            raise ValueError(f"family is {family!r}: it must be one of {', '.join(task.family for task in self.tasks)}")
        return found[0]

    def first_id(self, family: str) -> int:
        """The id of a family's first token."""
        before = self.tasks[: self.tasks.index(self.task(family))]
        return sum(task.vocab_size for task in before)

    def alphabet(self, family: str) -> tuple[int, ...]:
        """Token ids of a family's possible answers."""
        return tuple(self.first_id(family) + token for token in self.task(family).alphabet)

    def evaluation_set(self, family: str, d_star: int, n: int, **which) -> Instances:
        """The evaluation set of a family's task, in the mixture's ids; an answer of -1, none, stays."""
        task, first = self.task(family), self.first_id(family)
        return _shifted(task.evaluation_set(d_star, n, **which), first)

    def floor(self, family: str, instances: Instances) -> float:
        """The no-skill accuracy of a family's instances, which are in the mixture's ids."""
        task, own = self.task(family), _shifted(instances, -self.first_id(family))
        return task.floor(own)


def restored(stored: dict) -> Mixture:
    """The mixture, or a single task as one, from its stored values, a run's key material. Raises ValueError or TypeError when
    they make none."""
    made = []
    for values in stored.get("tasks", [stored]):
        values = dict(values)
        kind = OF_FAMILY.get(values.get("family"), Task)
        if kind is not Task:
            del values["family"]
        made.append(kind(**values))
    return Mixture(tuple(made), tuple(stored.get("turns", ())))


def training_batches(mixture: Mixture, batch_size: int, steps: range, seed: int) -> list[Batch]:
    """The batches of these steps: step i takes turn i mod n of n turns, and a task's batches come in their order, so that each
    is a function of the arguments and i alone."""
    order = mixture.turns or tuple(task.family for task in mixture.tasks)
    n, found = len(order), {}
    for task in mixture.tasks:
        places = [turn for turn, family in enumerate(order) if family == task.family]
        own = {step: step // n * len(places) + places.index(step % n) for step in steps if step % n in places}
        if own:
            numbers, first = range(min(own.values()), max(own.values()) + 1), mixture.first_id(task.family)
            for step, batch in zip(own, task.training_batches(batch_size, numbers, seed), strict=True):
                labels = np.where(batch.labels == IGNORE, IGNORE, batch.labels + first)
                found[step] = replace(batch, ids=batch.ids + first, labels=labels)
    return [found[step] for step in steps]


def _shifted(instances: Instances, by: int) -> Instances:
    """Instances in ids that begin elsewhere."""
    answer = np.where(instances.answer < 0, instances.answer, instances.answer + by)
    return replace(instances, ids=instances.ids + by, answer=answer)
