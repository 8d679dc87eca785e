"""The rules of the contract paper's section 4.5: looped against stacked depth at matched overshoot.

One function per claim or shape of claim; the rule's text is in params/claims.yaml. `splits` holds the r0 of the three splits
of one total of executed layers, the most looped first and the stack last; overshoot is K / r0. Tables are long:
accuracy    task, arm (a split), seed, K, d_star ("all" or a depth), value
flops       task, arm, K, value: counted block FLOPs of one sequence, K = r0 x OVERSHOOTS
floors      task, d_star, value: the no-skill accuracy
A diverged seed's value is NaN. A gap is most looped minus another split; the reduction of the gap to the stack from equal K
to overshoot 8 is the stack's own fall, as the most looped split is at the same K in both. Cells are as in `claims.point`.
"""

import itertools
from dataclasses import replace

from lib import claims, stats
from lib.claims import Judgement, point
from lib.rules import (
    ROUNDING,
    above,
    below,
    by_seed,
    cell_text,
    competent,
    difference_cell,
    first,
    judge_all,
    judged,
    mean_cell,
    means,
    paired,
)

TASKS = ("circuit", "hops")
OVERSHOOTS = (1, 2, 4, 8)
ENOUGH = 6  # seeds an arm of the section: fewer make a p above 0.05 say nothing


def able(accuracy, splits: dict[str, int], floors, task: str) -> bool:
    """Whether a split passes the competence gate at its own trained loop count; ValueError without a floor."""
    return any(competent(accuracy, floors, task, [r0], [arm]) for arm, r0 in splits.items())


def matched(claim_id: str, accuracy, splits: dict[str, int], task: str) -> list[dict]:
    """A cell per split: its mean accuracy at overshoot 8, each at its own K; ValueError where there is none."""
    keys = [{"task": task, "arm": arm, "K": 8 * r0} for arm, r0 in splits.items()]
    return [mean_cell(by_seed(accuracy, **key), claim_id, **key) for key in keys]


def matched_contrasts(claim_id: str, accuracy, splits: dict[str, int], tasks=TASKS) -> list[dict]:
    """A cell per task and split but the first: the gap at overshoot 8, exact p raw and Holm over all, delta.

    The arms stand at different K, so K is None. Raises ValueError where a split has no value.
    """
    (most, r0), *others = splits.items()
    places = [(task, arm, K) for task in tasks for arm, K in others]
    pairs = [
        (by_seed(accuracy, task=task, arm=most, K=8 * r0), by_seed(accuracy, task=task, arm=arm, K=8 * own))
        for task, arm, own in places
    ]
    raw = [stats.mann_whitney(*pair)[1] for pair in pairs]
    tests = [{"p_raw": p, "p_holm": q} for p, q in zip(raw, stats.holm(raw), strict=True)]
    return [
        difference_cell(*pair, claim_id, task=task, arm=f"{most} - {arm}, overshoot 8", delta=stats.cliffs_delta(*pair), **test)
        for (task, arm, _), pair, test in zip(places, pairs, tests, strict=True)
    ]


def equal_K_gap(claim_id: str, accuracy, splits: dict[str, int], task: str) -> dict:
    """The cell of the gap to the stack with both at K = 8 r0 of the most looped split, delta and no test."""
    most, stack, K = *_ends(splits), 8 * max(splits.values())
    pair = [by_seed(accuracy, task=task, arm=arm, K=K) for arm in (most, stack)]
    return difference_cell(*pair, claim_id, task=task, arm=f"{most} - {stack}", K=K, delta=stats.cliffs_delta(*pair))


def reduction(claim_id: str, accuracy, splits: dict[str, int], task: str) -> dict:
    """The cell of how much smaller that gap is at overshoot 8, paired by seed: the stack's fall between the two K."""
    (_, stack), K = _ends(splits), 8 * max(splits.values())
    values = [by_seed(accuracy, task=task, arm=stack, K=k) for k in (8 * splits[stack], K)]
    return paired(claim_id, *values, task=task, arm=f"{stack}, overshoot 8 - K", K=K)


def _ends(splits: dict[str, int]) -> tuple[str, str]:
    most, *_, stack = splits
    return most, stack


def _shown(claim_id: str, accuracy, splits: dict[str, int], task: str) -> list[dict]:
    """Mean cells of every split at equal K and at overshoot 8, which is one K for the most looped."""
    equal = means(claim_id, accuracy, [(task, 8 * max(splits.values()))], splits)
    return equal + matched(claim_id, accuracy, splits, task)[1:]


def absolute_K_confounds(accuracy, splits, floors) -> Judgement:
    """On circuit the gap to the stack at equal K, and its reduction at overshoot 8, have intervals above 0."""
    id = "absolute_K_confounds"
    gap, less = (measure(id, accuracy, splits, "circuit") for measure in (equal_K_gap, reduction))
    verdict = first(
        not_competent=not able(accuracy, splits, floors, "circuit"),
        replicated=above(gap, 0) and above(less, 0),
        not_replicated=below(gap, 0) or below(less, 0),
        same_direction=above(gap, 0) and less["value"] > ROUNDING,
    )
    points = [gap, less, *matched_contrasts(id, accuracy, splits, ["circuit"]), *_shown(id, accuracy, splits, "circuit")]
    ours = f"{gap['K']}: {cell_text(gap)}; reduced by {cell_text(less)}"
    return judged(verdict, ours, gap, points, enough=ENOUGH)


def loop_advantage_at_matched_overshoot(accuracy, splits, floors) -> Judgement:
    """At overshoot 8 no gap to the stack is detected on circuit, and on hops it is smaller than at equal K."""
    id, (_, stack) = "loop_advantage_at_matched_overshoot", _ends(splits)
    cells = matched_contrasts(id, accuracy, splits)
    circuit, hops = (cell for cell in cells if cell["arm"].endswith(f" - {stack}, overshoot 8"))
    gap, less = (measure(id, accuracy, splits, "hops") for measure in (equal_K_gap, reduction))
    fit = [task for task in TASKS if able(accuracy, splits, floors, task)]
    both, rejects = len(fit) == 2, circuit["p_raw"] <= 0.05
    smaller = both and above(less, 0) and min(circuit["n"], hops["n"]) >= ENOUGH
    verdict = first(
        not_competent=not fit,
        not_replicated=both and (rejects and above(circuit, 0) or below(less, 0)),
        replicated=smaller and not rejects,
        same_direction=smaller and below(circuit, 0),
    )
    inside = "lies" if above(circuit, -0.05) and below(circuit, 0.05) else "does not lie"
    tests = [f"{c['task']} p = {c['p_raw']:.2g}, Holm {c['p_holm']:.2g}" for c in (circuit, hops)]
    left = "not gone" if above(hops, 0) else "gone, the stack is ahead" if below(hops, 0) else "perhaps gone"
    notes = [f"{task} is not competent: the claim needs both tasks" for task in TASKS if task not in fit]
    notes += [*tests, f"on circuit the interval {inside} inside +-0.05", f"on hops the gap left is {cell_text(hops)}: {left}"]
    points = [*cells, gap, less, *(cell for task in TASKS for cell in _shown(id, accuracy, splits, task))]
    ours = f"hops reduced by {cell_text(less)}; circuit {cell_text(circuit)}"
    return judged(verdict, ours, less, points, notes, ENOUGH)


def matched_overshoot_is_equal_compute(splits, flops) -> Judgement:
    """Counted block FLOPs of all splits are equal at each equal overshoot; ValueError on an absent count."""
    id, points, unequal, largest = "matched_overshoot_is_equal_compute", [], {}, {}
    for task, overshoot in itertools.product(dict.fromkeys(flops["task"]), OVERSHOOTS):
        counts = {}
        for arm, r0 in splits.items():
            at = (flops["task"] == task) & (flops["arm"] == arm) & (flops["K"] == overshoot * r0)
            found = flops.loc[at, "value"].dropna().unique().tolist()
            if len(found) != 1:
                raise ValueError(f"flops needs one value for {task}, arm {arm}, K {overshoot * r0}; it has {len(found)}")
            counts[arm] = found[0]
            points.append(point(id, task=task, arm=arm, K=overshoot * r0, value=found[0]))
        largest[task] = max(counts.values())
        if len(set(counts.values())) > 1:
            unequal[f"{task} {overshoot}"] = counts
    which = f"{'unequal' if unequal else 'equal'} at overshoot {', '.join(map(str, unequal or OVERSHOOTS))}"
    most = ", ".join(f"{task} {value / 1e6:.3g}" for task, value in largest.items())
    ours = which if unequal else f"{which} (MFLOP a sequence at {OVERSHOOTS[-1]}: {most})"
    reason = "; ".join(f"{o}: " + ", ".join(f"{arm} {n}" for arm, n in counts.items()) for o, counts in unequal.items())
    reason = reason or "n counts the overshoots compared, for each task"
    return Judgement(id, "not_replicated" if unequal else "replicated", ours, len(OVERSHOOTS), reason=reason, points=points)


def _value(claim: dict, ours: dict, points: list[dict], splits, at_paper: bool) -> Judgement:
    n, r0 = min(cell["n"] for cell in points), max(splits.values())
    other = "" if r0 == 4 else f"the most looped split has r0 = {r0}, the paper's 4"
    found = claims.judge_value(claim, ours, at_paper and r0 == 4, n, other)
    mine = dict(zip(list(splits)[-len(ours) :], ours.values(), strict=True))  # the paper's keys name its own splits
    return replace(found, ours=claims.render(mine), points=points)


def split_means(claim: dict, accuracy, splits, at_paper) -> Judgement:
    """overshoot_equal_K, overshoot_matched_circuit, overshoot_matched_hops: mean accuracy of each split."""
    if "overshoot" in claim:
        cells = matched(claim["id"], accuracy, splits, claim["task"])
    else:
        cells = means(claim["id"], accuracy, [(claim["task"], 8 * max(splits.values()))], splits)
    ours = {paper: cell["value"] for paper, cell in zip(claim["value"], cells, strict=True)}  # by position
    return _value(claim, ours, cells, splits, at_paper)


def split_tests(claim: dict, accuracy, splits, at_paper) -> Judgement:
    """overshoot_matched_hops_tests: delta and raw exact p of the most looped against each other split.

    A p that the paper does not report stays out of `ours`; it is in the points.
    """
    cells = matched_contrasts(claim["id"], accuracy, splits, [claim["task"]])
    ours = {
        paper: [cell["delta"], None if told[1] is None else cell["p_raw"]]
        for (paper, told), cell in zip(claim["value"].items(), cells, strict=True)
    }
    return _value(claim, ours, cells, splits, at_paper)


def judge(accuracy, splits: dict[str, int], flops, floors, scale: str) -> list[Judgement]:
    """All claims of section 4.5 from the tables above, seeds that diverged named in each reason.

    The reported values are judged at scale "paper" alone. A claim on a task that was not run is
    out_of_reach. Raises ValueError on an absent arm, loop count or seed, and on other than three
    splits, the most looped first.
    """
    if len(splits) != 3 or list(splits.values()) != sorted(set(splits.values()), reverse=True):
        raise ValueError(f"splits must be three of falling r0, the stack last, got {splits}")
    common, value = (accuracy, splits, floors), (accuracy, splits, scale == "paper")
    circuit, hops = TASKS[:1], TASKS[1:]
    todo = {
        "overshoot_equal_K": (circuit, split_means, value),
        "overshoot_matched_circuit": (circuit, split_means, value),
        "overshoot_matched_hops": (hops, split_means, value),
        "overshoot_matched_hops_tests": (hops, split_tests, value),
        "matched_overshoot_is_equal_compute": ((), matched_overshoot_is_equal_compute, (splits, flops)),
        "absolute_K_confounds": (circuit, absolute_K_confounds, common),
        "loop_advantage_at_matched_overshoot": (TASKS, loop_advantage_at_matched_overshoot, common),
    }
    return judge_all(todo, accuracy)
