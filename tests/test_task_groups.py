"""The groups of task families: each family in one, and the mixture of all of them from a notebook's parameters."""

import dataclasses

import pytest

from lib.mixture import training_batches
from lib.task_groups import GROUPS, STANDS_FOR, TURNS, make

P = {
    "hops_width": 8,
    "hops_depth": 3,
    "circuit_width": 5,
    "circuit_depth": 2,
    "modulus": 13,
    "arithmetic_depth": 3,
    "subjects": 12,
    "relations": 4,
    "objects": 10,
    "letters": 5,
    "length": 3,
    "constraints": 2,
}
FAMILIES = ("hops", "circuit", "arithmetic", "knowledge", "constrained")


def test_every_family_of_the_mixture_is_in_one_group_and_every_group_says_what_it_stands_for():
    assert tuple(family for families in GROUPS.values() for family in families) == FAMILIES
    assert tuple(task.family for task in make(P).tasks) == FAMILIES
    assert STANDS_FOR.keys() == GROUPS.keys()
    for group, benchmark in (
        ("context", "BBH-CoT"),
        ("context", "DROP"),
        ("quantitative", "GSM8K"),
        ("quantitative", "MATH500"),
        ("knowledge", "MMLU"),
        ("knowledge", "TriviaQA"),
        ("knowledge", "ARC-C"),
        ("knowledge", "HellaSwag"),
        ("constrained", "HumanEval+"),
        ("constrained", "MBPP+"),
    ):
        assert benchmark in STANDS_FOR[group] and " has no " in STANDS_FOR[group]


def test_every_parameter_reaches_its_task():
    values = {f"{task['family']}.{key}": value for task in dataclasses.asdict(make(P))["tasks"] for key, value in task.items()}
    names = {"modulus": "arithmetic.modulus", "arithmetic_depth": "arithmetic.max_depth"}
    names |= {f"{family}_depth": f"{family}.max_depth" for family in ("hops", "circuit")}
    names |= {f"{family}_width": f"{family}.width" for family in ("hops", "circuit")}
    names |= {key: f"knowledge.{key}" for key in ("subjects", "relations", "objects")}
    names |= {key: f"constrained.{key}" for key in ("letters", "length", "constraints")}
    assert names.keys() == P.keys() and {key: values[names[key]] for key in P} == P


def test_an_impossible_parameter_is_named():
    with pytest.raises(ValueError, match="modulus must be a prime in 5..97, not 12"):
        make(P | {"modulus": 12})


def test_every_family_trains_and_is_read_at_its_depths():
    mixture = make(P)
    batches = training_batches(mixture, 4, range(10), 0)
    for step, batch in enumerate(batches):
        task = mixture.task(TURNS[step % len(TURNS)])
        low, high = mixture.first_id(task.family), mixture.first_id(task.family) + task.vocab_size
        assert batch.ids.shape[0] == 4 and batch.ids.shape[2] == task.fields and (batch.labels >= 0).any()
        assert ((batch.ids >= low) & (batch.ids < high)).all()
    for task in mixture.tasks:
        for d in task.depths:
            made = mixture.evaluation_set(task.family, d, 8)
            assert made.d_star == d and len(made.ids) == 8 and 0 < mixture.floor(task.family, made) < 1
