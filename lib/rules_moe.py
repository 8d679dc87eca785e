"""The rules of the axes paper's mixture-of-experts comparisons: who wins, how routing is balanced, what iterations choose.

One function per claim, named after its id; the rule's text is in params/claims.yaml. Groups, competence and intervals are
those of `rules_dense_axes`, and so are the tables scores (arms of BALANCED, and for the gap their dense counterparts) and
floors. Two more are long:
balance         arm, seed, value: load-balancing loss at the end of training, mean over executions; 1 = uniform, less is better
interventions   arm, task, seed, route (own | first | random), value: accuracy of the same trained models with the experts that
                each iteration chooses, with the first iteration's again, and with others at random
A diverged seed's value is NaN. Its accuracy counts as 0; it has no balance, as 0 would be better than uniform, and is left out
there and counted.
"""

import numpy as np
import pandas as pd

from lib import stats
from lib.claims import Judgement, point, worst
from lib.rules import above, below, by_seed, cell_text, first, mean_cell, paired, tested
from lib.rules_dense_axes import (
    MEAN,
    by_group,
    compare,
    competent_groups,
    decided,
    ends,
    group_values,
    judge_each,
    left_out,
    mean_above,
    reported,
    task_cells,
    task_deltas,
    with_mean,
)

BALANCED = ("huginn_moe", "feedforward_moe", "full_moe")  # the best balanced first, as claimed
HUGINN_OURO = ("huginn_moe", "full_moe")
GAPS = (("feedforward", "noise"), ("feedforward_moe", "huginn_moe"))
LOSS = "balance loss"
REUSED, CONTROL = "own - first", "own - random"


def sound(balance) -> dict[str, pd.Series]:
    """Balance loss by seed of each arm, without the seeds that diverged."""
    return {arm: by_seed(balance, arm=arm).replace([np.inf, -np.inf], np.nan).dropna() for arm in BALANCED}


def moe_balance_order(balance) -> Judgement:
    """Balance loss of huginn_moe below feedforward_moe below full_moe: both differences have intervals on that side.

    same_direction when huginn_moe lies below full_moe, wherever feed-forward lies, as the rule has it; else not_replicated
    when an interval lies on the other side. Competence is of no account: the loss is about routing.
    """
    id, values = "moe_balance_order", sound(balance)
    means = [mean_cell(values[arm], id, task=LOSS, arm=arm) for arm in BALANCED]
    if gone := [arm for arm in BALANCED if values[arm].empty]:
        return Judgement(id, "inconclusive", "", 0, reason=f"no sound seed of {' and '.join(gone)}", points=means)
    best, middle, last = BALANCED
    pairs = [(middle, best), (last, middle), (last, best)]  # what is claimed to be worse minus the better
    keys = [{"task": LOSS, "arm": " - ".join(pair)} for pair in pairs]
    cells = tested(id, [[values[arm] for arm in pair] for pair in pairs], keys)
    *steps, whole = cells
    verdict = first(
        replicated=all(above(cell, 0) for cell in steps),
        same_direction=above(whole, 0),
        not_replicated=any(below(cell, 0) for cell in cells),
    )
    ours = ", ".join(f"{arm.removesuffix('_moe')} {cell['value']:.3f}" for arm, cell in zip(BALANCED, means, strict=True))
    return decided(verdict, ours, whole, cells + means, [f"{cell['arm']} {ends(cell)}" for cell in cells])


def routed(claim_id: str, interventions, floors, arm: str) -> tuple[dict, list[dict], list[str]]:
    """An arm's cells by (REUSED or CONTROL, group or MEAN), its means by route, and the groups competent on its own routes."""
    groups = by_group(interventions.loc[interventions["arm"] == arm, "task"])
    own, first_again, random = (group_values(interventions, arm, groups, route=r) for r in ("own", "first", "random"))
    able = competent_groups([own], groups, floors)
    own, first_again, random = (with_mean(values, able) for values in (own, first_again, random))
    cells = {
        (name, group): paired(claim_id, own[group], other[group], task=group, arm=f"{arm}, {name}")
        for name, other in ((REUSED, first_again), (CONTROL, random))
        for group in own
    }
    means = [
        mean_cell(values[group], claim_id, task=group, arm=f"{arm}, {route}")
        for route, values in (("own", own), ("first", first_again), ("random", random))
        for group in values
    ]
    return cells, means, able


def moe_iteration_experts(interventions, floors) -> Judgement:
    """Of huginn_moe, own minus the first iteration's experts: above 0 on every group that is competent on its own routes.

    The same models, so paired by seed: the worst of the competent groups, not_replicated below 0 and inconclusive where 0 is
    covered. Own minus random experts and, where it was run, full_moe are shown beside it and do not decide.
    """
    id, arm = "moe_iteration_experts", "huginn_moe"
    cells, means, able = routed(id, interventions, floors, arm)
    points = [*cells.values(), *means]
    if "full_moe" in set(interventions["arm"]):
        others, other_means, _ = routed(id, interventions, floors, "full_moe")
        points += [*others.values(), *other_means]
    deciding = [cells[REUSED, group] for group in able]
    each = [first(replicated=above(cell, 0), not_replicated=below(cell, 0)) for cell in deciding]
    head = min(deciding or [cells[REUSED, MEAN]], key=lambda cell: cell["value"] if cell["low"] is None else cell["low"])
    ours = f"least, {head['task']}: {ends(head)}; random {ends(cells[CONTROL, head['task']])}"
    notes = [f"above 0 on {each.count('replicated')} of {len(each)} groups"] if each else []
    notes += left_out(able, [group for name, group in cells if name == REUSED])
    return decided(worst(each) if each else "not_competent", ours, head, points, notes)


def moe_narrows_gap(scores, floors) -> Judgement:
    """The gap of the looped arm to feed-forward, dense minus with experts, on the mean over groups: above 0.

    Over the groups that are competent in both gaps, as a gap between arms that have not learned a group is none.
    not_replicated below 0, else inconclusive.
    """
    id, names = "moe_narrows_gap", [" - ".join(pair) for pair in GAPS]
    dense, moe = compare(id, scores, floors, *GAPS, jointly=True)
    arm = " - ".join(f"({name})" for name in names)
    four = {group: [[each[group] for each in c.values] for c in (dense, moe)] for group in dense.cells}
    cells = {g: point(id, task=g, arm=arm, **stats.bootstrap_interaction(*both)._asdict()) for g, both in four.items()}
    head, gap = cells[MEAN], dense.cells[MEAN]
    verdict = first(not_competent=not dense.able, replicated=above(head, 0), not_replicated=below(head, 0))
    notes = [f"{kind} gap {cell_text(c.cells[MEAN])}" for kind, c in (("dense", dense), ("MoE", moe))]
    notes += [] if above(gap, 0) else ["the dense gap is not above 0: there may be none to narrow"]
    notes += left_out(dense.able, four)
    points = [*cells.values(), *dense.cells.values(), *moe.cells.values(), *dense.means, *moe.means]
    return decided(verdict, f"{MEAN}: gap narrower by {ends(head)}", head, points, notes)


def moe_wins(claim: dict, scores, scale: str) -> Judgement:
    """Tasks on which huginn_moe has the higher mean."""
    cells = task_cells(claim["id"], scores, HUGINN_OURO)
    won = sum(cell["value"] > 0 for cell in cells)
    return reported(claim, f"Huginn's on {won} of {len(cells)} tasks", cells, scale, "tasks won")


def moe_balance(claim: dict, balance, scale: str) -> Judgement:
    """Mean balance loss of each arm over its sound seeds."""
    cells = [mean_cell(values, claim["id"], task=LOSS, arm=arm) for arm, values in sound(balance).items()]
    ours = "; ".join(f"{cell['arm'].removesuffix('_moe')} {cell['value']:.3f}" for cell in cells if cell["value"] is not None)
    return reported(claim, ours, cells, scale, "the same loss of small models")


def moe_vs_feedforward(claim: dict, scores, floors, scale: str) -> Judgement:
    """The gap to feed-forward, dense and with experts, on the mean over groups, in points."""
    cells = [c.cells[MEAN] for c in compare(claim["id"], scores, floors, *GAPS, jointly=True)]
    ours = "; ".join(f"{kind} {100 * cell['value']:+.1f}" for kind, cell in zip(("dense", "moe"), cells, strict=True))
    return reported(claim, ours, cells, scale, "points of accuracy, mean over groups")


def judge_moe(scores, floors, balance, interventions, scale: str) -> list[Judgement]:
    """All claims of the mixture-of-experts comparisons from the tables above, in the order of claims.yaml.

    A claim whose arms were not run is out_of_reach, those on the gap also without the dense runs, and so are the reported
    values at every scale. Raises ValueError where an arm lacks a task, seed or route that it is compared on.
    """
    four = tuple(arm for pair in GAPS for arm in pair)
    todo = {
        "moe_wins": (moe_wins, scores, HUGINN_OURO, (), (scores, scale)),
        "moe_deltas": (task_deltas, scores, HUGINN_OURO, (), (scores, HUGINN_OURO, scale)),
        "moe_huginn_beats_ouro": (mean_above, scores, HUGINN_OURO, (), ("moe_huginn_beats_ouro", scores, floors, HUGINN_OURO)),
        "moe_balance": (moe_balance, balance, BALANCED, (), (balance, scale)),
        "moe_balance_order": (moe_balance_order, balance, BALANCED, (), (balance,)),
        "moe_iteration_experts": (moe_iteration_experts, interventions, ("huginn_moe",), (), (interventions, floors)),
        "moe_narrows_gap": (moe_narrows_gap, scores, four, (), (scores, floors)),
        "moe_vs_feedforward": (moe_vs_feedforward, scores, four, (), (scores, floors, scale)),
    }
    return judge_each(todo)
