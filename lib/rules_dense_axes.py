"""The rules of the axes paper's dense comparisons: envelope, injection and states, one axis changed at a time.

One function per claim or shape of claim; the rule's text is in params/claims.yaml. Tables are long:
scores      arm, task, seed, share (of training), value: accuracy at the arm's trained loop count, mean over depths and draws
floors      task, value: the no-skill accuracy
counts      name, stored, executed: layers of `full` and `sandwich` as used here, of `paper full` and `paper sandwich`
A diverged seed's value is NaN: it ranks last and counts as 0. Claims are about groups of tasks at the end of training. A
contrast is one arm minus another, models trained separately, over seeds; its cells are the groups and their mean. A group is
competent in a contrast when one of its arms has learned it; the others drop out of the verdict and of the mean over groups.
Intervals decide, with fewer than LEAST seeds an arm nothing does. Cells are the dicts of `claims.point`, the group as task.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pandas as pd

from lib import claims
from lib.claims import Judgement, point
from lib.rules import ENOUGH, ROUNDING, above, below, by_seed, cell_text, difference_cell, first, judged, mean_cell, tested
from lib.task_groups import GROUPS

FINAL = 1.0  # the share of training that is judged
LEAST = 5  # seeds an arm: an interval of fewer decides nothing
MEAN = "mean over groups"
MULTI_STEP, OTHERS = ("context", "quantitative"), ("knowledge", "constrained")
SHAPES = (("full", "sandwich"), ("paper full", "paper sandwich"))
PAPER_SHAPE = {"stored": 28, "executed": 112}
Q3 = (("noise", "sandwich_injected"), ("shared_hl", "sandwich_injected"))


class Contrast(NamedTuple):
    """First arm minus second: accuracy by seed of each arm and the cells, by group and for MEAN; the competent groups."""

    name: str
    values: list[dict[str, pd.Series]]
    cells: dict[str, dict]
    means: list[dict]
    able: list[str]


def over(parts: list[pd.Series]) -> pd.Series:
    """Mean of several accuracies by seed, a diverged one being 0 in it; NaN, a diverged seed, where all of them are.

    Raises ValueError where they do not hold the same seeds.
    """
    for part in parts:
        if not part.index.equals(parts[0].index):
            raise ValueError(f"one task has seeds {list(parts[0].index)} and another {list(part.index)}")
    table = pd.concat(parts, axis=1)
    return table.fillna(0).mean(axis=1).where(table.notna().any(axis=1))


def by_group(tasks) -> dict[str, list[str]]:
    """Each group with those of its tasks that are among these; groups without any are left out."""
    found = {group: [task for task in members if task in set(tasks)] for group, members in GROUPS.items()}
    return {group: members for group, members in found.items() if members}


def group_values(table: pd.DataFrame, arm: str, groups: dict[str, list[str]], **keys) -> dict[str, pd.Series]:
    """An arm's accuracy by seed in each group: the mean over its tasks. ValueError where one was not run."""
    return {name: over([by_seed(table, arm=arm, task=task, **keys) for task in tasks]) for name, tasks in groups.items()}


def with_mean(values: dict[str, pd.Series], able: list[str]) -> dict[str, pd.Series]:
    """The groups' values and MEAN, over the competent ones, or over all where none is."""
    return values | {MEAN: over([values[group] for group in able or values])}


def competent_groups(arms: list[dict[str, pd.Series]], groups: dict[str, list[str]], floors: pd.DataFrame) -> list[str]:
    """The groups in which an arm's mean reaches 0.30 and exceeds the floor, the mean of its tasks', by over 0.05."""
    able = []
    for group, tasks in groups.items():
        each = [floors.loc[floors["task"] == task, "value"].mean() for task in tasks]
        if np.isnan(each).any():
            raise ValueError(f"floors has no value for task {tasks[int(np.isnan(each).argmax())]}")
        best = max(values[group].fillna(0).mean() for values in arms)
        able += [group] if best >= 0.30 and best - np.mean(each) > 0.05 else []
    return able


def compare(claim_id: str, scores, floors, *pairs: tuple[str, str], jointly: bool = False) -> list[Contrast]:
    """The contrast of each pair of arms at the end of training, with Holm over the cells of all of them.

    jointly keeps to the tasks that every pair has run and to the groups that are competent in each. Raises ValueError where
    an arm lacks a task or seed, and where no task is left.
    """
    ran = [set(scores.loc[scores["arm"].isin(pair), "task"]) for pair in pairs]
    groups = [by_group(set.intersection(*ran) if jointly else tasks) for tasks in ran]
    if not all(groups):
        raise ValueError(f"no task was run with all of {', '.join(dict.fromkeys(arm for pair in pairs for arm in pair))}")
    values = [[group_values(scores, arm, own, share=FINAL) for arm in pair] for pair, own in zip(pairs, groups, strict=True)]
    able = [competent_groups(both, own, floors) for both, own in zip(values, groups, strict=True)]
    able = [[group for group in able[0] if all(group in own for own in able)]] * len(able) if jointly else able
    values = [[with_mean(each, own) for each in both] for both, own in zip(values, able, strict=True)]
    places = [(pair, both, group) for pair, both in zip(pairs, values, strict=True) for group in both[0]]
    keys = [{"task": group, "arm": " - ".join(pair)} for pair, _, group in places]
    cells = tested(claim_id, [[each[group] for each in both] for _, both, group in places], keys)
    found = []
    for pair, both, own in zip(pairs, values, able, strict=True):
        name = " - ".join(pair)
        means = [
            mean_cell(each[group], claim_id, task=group, arm=arm)
            for group in both[0]
            for arm, each in zip(pair, both, strict=True)
        ]
        found.append(Contrast(name, both, {cell["task"]: cell for cell in cells if cell["arm"] == name}, means, own))
    return found


def ends(cell: dict) -> str:
    """A cell's value and interval, without delta."""
    return cell_text(cell | {"delta": None})


def left_out(able: list[str], at_hand, name: str = "") -> list[str]:
    """What is said of the groups, of those at hand, that do not decide, and of those that are not at hand."""
    groups, label = [group for group in at_hand if group != MEAN], f"{name}: " if name else ""
    out, not_run = ([g for g in of if g not in among] for of, among in ((groups, able), (GROUPS, groups)))
    kept = f", the mean is over {', '.join(able)}" if able else ""
    notes = [f"{label}not competent and left out: {', '.join(out)}{kept}"] if out else []
    return notes + ([f"{label}not run: {', '.join(not_run)}"] if not_run else [])


def decided(verdict: str, ours: str, head: dict, points: list[dict], notes=()) -> Judgement:
    """The judgement by intervals: inconclusive below LEAST seeds an arm, and said to rest on few below ENOUGH."""
    n = min(cell["n"] for cell in points)
    said = [f"n = {n} an arm, below {ENOUGH}: intervals alone decide, and of so few they are too narrow"]
    if n < LEAST:
        verdict = verdict if verdict == "not_competent" else "inconclusive"
        said = [f"n = {n} an arm, below {LEAST}: intervals of so few decide nothing"]
    shown = [cell for i, cell in enumerate(points) if cell not in points[:i]]  # two contrasts may share an arm
    return judged(verdict, ours, head, shown, [*notes, *(said if n < ENOUGH else [])], enough=0)


def _points(*contrasts: Contrast) -> list[dict]:
    return [cell for c in contrasts for cell in c.cells.values()] + [cell for c in contrasts for cell in c.means]


def effect_unless(contrast: Contrast, effect: tuple[str, ...], unless: tuple[str, ...]) -> Judgement:
    """The verdict on an effect claimed of some groups that the others, together, are not to show too.

    The cells are the groups of `effect` and, as one condition, those of `unless`; what is not competent drops out.
    not_replicated: an effect's interval lies below 0. inconclusive: one covers 0, or none of these groups is competent, as
    the condition alone shows no effect. same_direction: every effect's interval lies above 0 and so does every one of
    `unless`: the effect is there and not confined. replicated: above 0 in every effect, not in all of `unless`.
    not_competent: no group that the rule names is.
    """
    own, others = ([contrast.cells[group] for group in groups if group in contrast.able] for groups in (effect, unless))
    too = bool(others) and all(above(cell, 0) for cell in others)
    verdict = first(
        not_competent=not own and not others,
        not_replicated=any(below(cell, 0) for cell in own),
        inconclusive=not own or not all(above(cell, 0) for cell in own),
        same_direction=too,
        replicated=True,
    )
    notes = [] if own else [f"the effect on {' and '.join(effect)} cannot be seen"]
    notes += [f"{' and '.join(cell['task'] for cell in others)} above 0 too: the effect is not confined"] if too else []
    notes += [f"{group} {ends(contrast.cells[group])}" for group in unless]
    shown = own or [contrast.cells[group] for group in effect]
    ours = ", ".join(f"{cell['task']} {ends(cell)}" for cell in shown)
    head = min(shown, key=lambda cell: cell["value"] if cell["low"] is None else cell["low"])
    return decided(verdict, ours, head, _points(contrast), [*notes, *left_out(contrast.able, contrast.cells)])


def q1_order(scores, floors) -> Judgement:
    """sandwich - full: above 0 on context and on quantitative, and not on both of knowledge and constrained.

    Both of these above 0 is same_direction: the envelope's effect is there, but not on multi-step reasoning alone.
    """
    (contrast,) = compare("q1_order", scores, floors, ("sandwich", "full"))
    return effect_unless(contrast, MULTI_STEP, OTHERS)


def q2_order(scores, floors) -> Judgement:
    """sandwich_injected - sandwich: above 0 on context and not above 0 on quantitative.

    Above 0 on both is same_direction: injection helps where claimed; that it can hurt is not shown.
    """
    (contrast,) = compare("q2_order", scores, floors, ("sandwich_injected", "sandwich"))
    return effect_unless(contrast, ("context",), ("quantitative",))


def mean_above(id: str, scores, floors, pair: tuple[str, str]) -> Judgement:
    """q2_middle_beats_full, dense_huginn_beats_ouro, moe_huginn_beats_ouro: the mean over competent groups above 0.

    not_replicated below 0, else inconclusive; there is no more to the rule that could leave same_direction.
    """
    (contrast,) = compare(id, scores, floors, pair)
    cell = contrast.cells[MEAN]
    verdict = first(not_competent=not contrast.able, replicated=above(cell, 0), not_replicated=below(cell, 0))
    ours = f"{MEAN} {cell_text(cell)}"
    return decided(verdict, ours, cell, _points(contrast), left_out(contrast.able, contrast.cells))


def q3_order(scores, floors) -> Judgement:
    """noise and shared_hl, each minus sandwich_injected: not every group above 0, and the mean over groups not above 0.

    A claim that there is no consistent benefit: a state is replicated when both hold and not_replicated when one does not,
    worst of the two; a state without a competent group drops out. As intervals may cover 0 for want of seeds, the reason
    tells how far the mean's reaches and how wide it is.
    """
    id, verdicts, notes = "q3_order", [], []
    contrasts = compare(id, scores, floors, *Q3)
    for contrast, (state, _) in zip(contrasts, Q3, strict=True):
        own, mean = [contrast.cells[group] for group in contrast.able], contrast.cells[MEAN]
        ahead = [cell["task"] for cell in own if above(cell, 0)]
        benefit = len(ahead) == len(own) or above(mean, 0)
        verdicts.append(first(not_competent=not own, not_replicated=benefit, replicated=True))
        notes.append(f"{state}: above 0 on {' and '.join(ahead) or 'none'} of {len(own)} groups")
        if mean["low"] is not None:
            widest = max(cell["high"] - cell["low"] for cell in own or [mean])
            notes[-1] += f", the mean's interval reaches {mean['high']:+.2f} and is {mean['high'] - mean['low']:.2f} wide"
            notes[-1] += f", the groups' at most {widest:.2f}"
        notes += left_out(contrast.able, contrast.cells, state)
    means = [contrast.cells[MEAN] for contrast in contrasts]
    ours = "means: " + ", ".join(f"{state} {ends(cell)}" for (state, _), cell in zip(Q3, means, strict=True))
    deciding = [cell for cell, contrast in zip(means, contrasts, strict=True) if contrast.able] or means
    head = max(deciding, key=lambda cell: cell["value"])  # the one nearest to a benefit
    return decided(claims.worst(verdicts), ours, head, _points(*contrasts), notes)


def shapes_match(counts: pd.DataFrame) -> Judgement:
    """full and sandwich store as many layers and execute as many, and the paper's own store 28 and execute 112.

    Of the pairs that are counted; ValueError where one name of a pair is missing or stands twice.
    """
    id, told, wrong, points = "shapes_match", [], [], []
    pairs = [pair for pair in SHAPES if counts["name"].isin(pair).any()]
    for pair in pairs:
        rows = [counts[counts["name"] == name] for name in pair]
        if any(len(row) != 1 for row in rows):
            raise ValueError(f"counts needs one row each for {' and '.join(pair)}")
        for key, paper in PAPER_SHAPE.items():
            found = [int(row[key].item()) for row in rows]
            points += [point(id, arm=f"{name}, layers {key}", value=n) for name, n in zip(pair, found, strict=True)]
            told.append(f"{key} {' and '.join(map(str, dict.fromkeys(found)))}")
            expected = paper if pair == SHAPES[1] else found[0]
            wrong += [f"{' and '.join(pair)}: {key} {found[0]} and {found[1]}"] if set(found) != {expected} else []
    missing = [f"not counted: {' and '.join(pair)}" for pair in SHAPES if pair not in pairs]
    verdict = first(out_of_reach=not pairs, not_replicated=bool(wrong), replicated=True)
    return Judgement(id, verdict, ", ".join(told), len(pairs), reason="; ".join([*wrong, *missing]), points=points)


def reported(
    claim: dict, ours: str, points: list[dict], scale: str, unit: str = "points of accuracy over our tasks"
) -> Judgement:
    """A reported benchmark number: out_of_reach at every scale, ours beside it and its cells kept."""
    n = min(cell["n"] for cell in points)
    return replace(claims.judge_value(claim, None, False, n, f"ours: {unit}, scale {scale}"), ours=ours, points=points)


def task_cells(claim_id: str, scores, pair: tuple[str, str]) -> list[dict]:
    """A cell per task of the groups: first arm minus second at the end of training, untested."""
    tasks = [task for own in by_group(scores.loc[scores["arm"].isin(pair), "task"]).values() for task in own]
    both = [[by_seed(scores, arm=arm, task=task, share=FINAL) for arm in pair] for task in tasks]
    return [
        difference_cell(*pair_of, claim_id, task=task, arm=" - ".join(pair)) for task, pair_of in zip(tasks, both, strict=True)
    ]


def task_deltas(claim: dict, scores, pair: tuple[str, str], scale: str) -> Judgement:
    """q1_envelope, q2_injection, moe_deltas: the difference on each task, in points."""
    cells = task_cells(claim["id"], scores, pair)
    return reported(claim, ", ".join(f"{cell['task']} {100 * cell['value']:+.1f}" for cell in cells), cells, scale)


def q3_states(claim: dict, scores, scale: str) -> Judgement:
    """Tasks that a state raises and lowers by more than a point."""
    told, points = [], []
    for pair in Q3:
        cells = task_cells(claim["id"], scores, pair)
        up, down = (sum(sign * cell["value"] > 0.01 + ROUNDING for cell in cells) for sign in (1, -1))
        told.append(f"{pair[0]} {up} up and {down} down of {len(cells)}")
        points += cells
    return reported(claim, "; ".join(told), points, scale, "tasks changed by more than a point")


def judge_each(todo: dict[str, tuple]) -> list[Judgement]:
    """The judgement of every claim, todo being id -> (rule, its main table, arms and groups it needs, rule's arguments).

    A reported value's rule gets its claim first. A claim whose arms or groups were not run is out_of_reach; seeds that
    diverged are named in each reason.
    """
    rules, found = claims.load(), []
    for id, (rule, table, arms, groups, args) in todo.items():
        claim, own = rules[id], table[table["arm"].isin(arms)]
        lacking = [arm for arm in arms if arm not in set(own["arm"])]
        lacking = lacking or [f"a task of {group}" for group in groups if group not in by_group(own["task"])]
        needs = f"needs runs of {' and '.join(lacking)}" if lacking else ""
        if claim["kind"] == "value":
            j = claims.judge_value(claim, None, False, 0, needs) if lacking else rule(claim, *args)
        else:
            j = Judgement(id, "out_of_reach", "", 0, reason=needs) if lacking else rule(*args)
        lost = own[own["value"].isna() & own.get("share", pd.Series(FINAL, own.index)).eq(FINAL)]
        notes = [f"{seeds.nunique()} of {arm} diverged" for arm, seeds in lost.groupby("arm")["seed"]]
        found.append(replace(j, reason="; ".join(filter(None, (j.reason, *notes)))))
    return found


def judge_dense(scores, floors, counts, scale: str) -> list[Judgement]:
    """All claims of the dense comparisons from the tables above, in the order of claims.yaml.

    A claim whose arms or groups were not run is out_of_reach, and so are the reported values at every scale: they are of
    benchmarks. Raises ValueError where an arm lacks a task or seed that it is compared on.
    """
    envelope, write = ("sandwich", "full"), ("sandwich_injected", "sandwich")
    middle, huginn = ("sandwich_injected", "full_injected"), ("noise", "full")
    states = tuple(dict.fromkeys(arm for pair in Q3 for arm in pair))
    common = (scores, floors)
    todo = {
        "q1_envelope": (task_deltas, scores, envelope, (), (scores, envelope, scale)),
        "q1_order": (q1_order, scores, envelope, GROUPS, common),
        "q2_injection": (task_deltas, scores, write, (), (scores, write, scale)),
        "q2_order": (q2_order, scores, write, MULTI_STEP, common),
        "q2_middle_beats_full": (mean_above, scores, middle, (), ("q2_middle_beats_full", *common, middle)),
        "q3_states": (q3_states, scores, states, (), (scores, scale)),
        "q3_order": (q3_order, scores, states, (), common),
        "dense_huginn_beats_ouro": (mean_above, scores, huginn, (), ("dense_huginn_beats_ouro", *common, huginn)),
    }
    return [shapes_match(counts), *judge_each(todo)]
