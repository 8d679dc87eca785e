"""The rules of the contract paper's section 4.3: models trained from scratch with and without the norm.

One function per claim, named after its id; the rule's text is in params/claims.yaml. Tables are long:
accuracy    task, arm (no_norm | with_norm), seed, K (1..8 r0), d_star ("all" or a depth), width, value
state_norm  arm, task, seed, K, value: mean L2 norm of the raw state at the answer position
swapped     task, arm, seed, K (r0 and 8 r0), value: accuracy of that arm run with the other's boundary
floors      task, d_star, value: the no-skill accuracy
A diverged seed's value is NaN. A difference is no_norm minus with_norm; a fall is accuracy at r0 minus
accuracy at another K of the same models. Cells are the dicts of `claims.point`.
"""

from dataclasses import replace

import numpy as np
import pandas as pd

from lib import claims, stats
from lib.claims import Judgement, point

ARMS = ("no_norm", "with_norm")
TASKS = ("circuit", "hops")
CONTRAST = "no_norm - with_norm"
ENOUGH = 8  # seeds an arm with which the exact test of these families can reject
ROUNDING = 1e-9  # a mean of equal accuracies may miss them by a rounding error


def grid(r0: int) -> list[int]:
    """The loop counts of the rules: 1, 2, r0 x {1, 2, 4, 8} and the powers of two up to 8 r0."""
    return sorted({2**i for i in range((8 * r0).bit_length())} | {r0, 2 * r0, 4 * r0, 8 * r0})


def by_seed(table: pd.DataFrame, **keys) -> pd.Series:
    """Values by seed, over all d* (and the mean over widths); ValueError when there are none."""
    keys = keys | {"d_star": "all"} if "d_star" in table else keys
    chosen = np.logical_and.reduce([(table[column] == wanted).to_numpy() for column, wanted in keys.items()])
    if not chosen.any():
        raise ValueError(f"no rows with {', '.join(f'{k} {v}' for k, v in keys.items())}")
    values = pd.Series(table["value"].to_numpy()[chosen], index=table["seed"].to_numpy()[chosen])
    return values.groupby(level=0).mean(skipna=False)


def _above(cell: dict, bound: float) -> bool:
    return cell["low"] is not None and cell["low"] > bound + ROUNDING


def _below(cell: dict, bound: float) -> bool:
    return cell["high"] is not None and cell["high"] < bound - ROUNDING


def contrasts(claim_id: str, accuracy: pd.DataFrame, places: list[tuple[str, int]]) -> list[dict]:
    """A cell per (task, K): difference of the arms' means, exact p raw and Holm over all places, delta."""
    pairs = [[by_seed(accuracy, task=t, arm=arm, K=K) for arm in ARMS] for t, K in places]
    raw = [stats.mann_whitney(*pair)[1] for pair in pairs]
    tests = [{"p_raw": p, "p_holm": q} for p, q in zip(raw, stats.holm(raw), strict=True)]
    return [
        _difference(*pair, claim_id, task=t, arm=CONTRAST, K=K, delta=stats.cliffs_delta(*pair), **test)
        for (t, K), pair, test in zip(places, pairs, tests, strict=True)
    ]


def means(claim_id: str, accuracy: pd.DataFrame, places: list[tuple[str, int]], arms=ARMS) -> list[dict]:
    """A cell per (task, K) and arm: its mean accuracy over seeds."""
    keys = [{"task": task, "arm": arm, "K": K} for task, K in places for arm in arms]
    return [_mean(by_seed(accuracy, **key), claim_id, **key) for key in keys]


def _mean(values: pd.Series, claim_id: str, **keys) -> dict:
    found = stats.bootstrap_mean(values)._asdict() if len(values) else {"n": 0}
    return point(claim_id, **keys, **found)


def _difference(x: pd.Series, y: pd.Series, claim_id: str, **keys) -> dict:
    found = stats.bootstrap_difference(x, y)._asdict() if len(x) and len(y) else {"n": 0}
    return point(claim_id, **keys, **found)


def paired(claim_id: str, own: pd.Series, other: pd.Series, **keys) -> dict:
    """The cell of own minus other, by seed of the same models; a diverged seed is 0 in both."""
    if not own.index.equals(other.index):
        raise ValueError(f"the same models have seeds {list(own.index)} once and {list(other.index)} once")
    return _mean(own.fillna(0) - other.fillna(0), claim_id, task="circuit", **keys)


def fall(claim_id: str, accuracy: pd.DataFrame, arm: str, r0: int, K: int) -> dict:
    """The cell of an arm's fall on circuit from r0 to K."""
    values = (by_seed(accuracy, task="circuit", arm=arm, K=k) for k in (r0, K))
    return paired(claim_id, *values, arm=f"{arm}, r0 - K", K=K)


def competent(accuracy: pd.DataFrame, floors: pd.DataFrame, task: str, at: list[int], arms=ARMS) -> bool:
    """Whether an arm's mean at one of the loop counts reaches 0.30 and exceeds the floor by over 0.05."""
    floor = floors.loc[floors["task"] == task, "value"].mean()  # over the depths
    if np.isnan(floor):
        raise ValueError(f"floors has no value for task {task}")
    found = [by_seed(accuracy, task=task, arm=a, K=K).fillna(0).mean() for a in arms for K in at]
    return max(found) >= 0.30 and max(found) - floor > 0.05


def _first(**conditions: bool) -> str:
    """The first verdict whose condition holds; a verdict that none fixes is inconclusive."""
    return next((verdict for verdict, holds in conditions.items() if holds), "inconclusive")


def _cell_text(cell: dict) -> str:
    ends = "" if cell["low"] is None else f" [{cell['low']:.2f}, {cell['high']:.2f}]"
    delta = "" if cell["delta"] is None else f"; delta {cell['delta']:.2f}"
    return f"{cell['value']:+.2f}{ends}{delta}"


def _judged(verdict: str, ours: str, head: dict, points: list[dict], notes=()) -> Judgement:
    n = min(cell["n"] for cell in [c for c in points if c["p_raw"] is not None] or points)
    few = f"n = {n} an arm, below {ENOUGH}: never counts as replicated by a rank test" if n < ENOUGH else ""
    # seeds that diverged can pull a mean below the other arm's while most seeds are ahead
    split = [f"{c['task']} {c['K']}" for c in points if c["delta"] and c["value"] and c["delta"] * c["value"] < 0]
    apart = f"delta and the mean difference disagree in sign at {', '.join(split)}" if split else ""
    reason = "; ".join(filter(None, (*notes, few, apart)))
    return Judgement(head["id"], verdict, ours, n, head["low"], head["high"], reason, points)


def no_norm_never_worse(accuracy, floors, r0) -> Judgement:
    """Over the grid on both tasks no significant loss without the norm and every interval above -0.02."""
    places = [(task, K) for task in TASKS for K in grid(r0)]
    cells = contrasts("no_norm_never_worse", accuracy, places)
    able = [task for task in TASKS if competent(accuracy, floors, task, [r0])]
    deciding = [cell for cell in cells if cell["task"] in able]
    low = min(deciding or cells, key=lambda cell: cell["value"] if cell["low"] is None else cell["low"])
    verdict = _first(
        not_competent=not deciding,
        not_replicated=any(cell["p_holm"] < 0.05 and cell["delta"] < 0 for cell in deciding),
        # with too few seeds that no cell rejects says nothing
        replicated=all(_above(cell, -0.02) and cell["n"] >= ENOUGH for cell in deciding),
    )
    ours = f"lowest, {low['task']} {low['K']}: {_cell_text(low)}"
    notes = [f"{task} is not competent and does not decide" for task in TASKS if task not in able]
    wide = [f"{c['task']} {c['K']}" for c in deciding if not _above(c, -0.02)]
    notes += [f"the interval does not stay above -0.02 at {', '.join(wide)}"] if wide else []
    return _judged(verdict, ours, low, cells + means(low["id"], accuracy, places), notes)


def no_norm_extrapolates_better(accuracy, floors, r0) -> Judgement:
    """Beyond the budget on circuit: delta above 0 and Holm p below 0.05 in every cell."""
    places = [("circuit", factor * r0) for factor in (2, 4, 8)]
    cells = contrasts("no_norm_extrapolates_better", accuracy, places)
    ahead = all(cell["delta"] > 0 for cell in cells)
    verdict = _first(
        not_competent=not competent(accuracy, floors, "circuit", [r0]),
        replicated=ahead and all(cell["p_holm"] < 0.05 and cell["n"] >= ENOUGH for cell in cells),
        not_replicated=any(_below(cell, 0) for cell in cells),
        same_direction=ahead and any(cell["p_raw"] < 0.05 for cell in cells),  # raw p, as the rule has it
    )
    points = cells + means("no_norm_extrapolates_better", accuracy, places)
    return _judged(verdict, f"{8 * r0}: {_cell_text(cells[-1])}", cells[-1], points)


def norm_peaks_at_trained_depth(accuracy, floors, r0) -> Judgement:
    """On circuit the normalised arm is best at r0 and falls to K = 1 and to 8 r0; gate: its own peak."""
    id, arm, counts = "norm_peaks_at_trained_depth", ["with_norm"], grid(r0)
    cells = means(id, accuracy, [("circuit", K) for K in counts], arm)
    falls = [fall(id, accuracy, "with_norm", r0, K) for K in (1, 8 * r0)]
    peak = max(cells, key=lambda cell: (round(cell["value"], 9), cell["K"] == r0))["K"]  # r0 wins a tie
    falling = all(_above(cell, 0) for cell in falls)
    verdict = _first(
        not_competent=not competent(accuracy, floors, "circuit", counts, arm),
        not_replicated=any(_below(cell, 0) for cell in falls),
        replicated=falling and peak == r0,
        same_direction=falling,
    )
    ours = "; ".join(f"to {cell['K']}: {_cell_text(cell)}" for cell in falls)
    return _judged(
        verdict,
        f"falls {ours}",
        falls[1],
        falls + cells,
        [f"of K = {', '.join(map(str, counts))} the mean is highest at {peak}"],
    )


def hops_indistinguishable_at_r0(accuracy, floors, r0) -> Judgement:
    """On hops the difference at r0 has its interval inside +-0.05; not_replicated wholly outside it."""
    (cell,) = contrasts("hops_indistinguishable_at_r0", accuracy, [("hops", r0)])
    verdict = _first(
        not_competent=not competent(accuracy, floors, "hops", [r0]),
        not_replicated=_above(cell, 0.05) or _below(cell, -0.05),
        replicated=_above(cell, -0.05) and _below(cell, 0.05),
    )
    points = [cell, *means(cell["id"], accuracy, [("hops", r0)])]
    return _judged(verdict, f"{r0}: {_cell_text(cell)}", cell, points, [f"p = {cell['p_raw']:.2g}"])


def growth(claim_id: str, state_norm: pd.DataFrame, r0: int) -> tuple[list[pd.Series], list[dict]]:
    """By arm on circuit, state norm at 8 r0 over that at 1: by seed (none if it diverged), and as cells."""
    at = [[by_seed(state_norm, task="circuit", arm=arm, K=K) for K in (1, 8 * r0)] for arm in ARMS]
    ratios = [(last / first).replace([np.inf, -np.inf], np.nan).dropna() for first, last in at]
    keys = [{"task": "circuit", "arm": f"{arm}, growth", "K": 8 * r0} for arm in ARMS]
    return ratios, [_mean(ratio, claim_id, **key) for ratio, key in zip(ratios, keys, strict=True)]


def norm_growth_reversal(accuracy, state_norm, floors, r0) -> Judgement:
    """On circuit the state grows more without the norm, intervals apart, and accuracy at 8 r0 is higher."""
    id, last = "norm_growth_reversal", 8 * r0
    grown, (none, norm) = growth(id, state_norm, r0)
    gap = _difference(*grown, id, task="circuit", arm=f"{CONTRAST}, growth", K=last)
    (cell,) = contrasts(id, accuracy, [("circuit", last)])
    apart = norm["high"] is not None and _above(none, norm["high"])
    higher = cell["delta"] > 0 and cell["p_holm"] < 0.05 and cell["n"] >= ENOUGH
    verdict = _first(
        not_competent=not competent(accuracy, floors, "circuit", [r0]),
        replicated=apart and higher,
        not_replicated=_below(gap, 0) or _below(cell, 0),
        same_direction=_above(gap, 0) and _above(cell, 0),
    )
    ours = f"growth {claims.render(none['value'])} against {claims.render(norm['value'])}"
    points = [cell, none, norm, gap, *means(id, accuracy, [("circuit", last)])]
    return _judged(verdict, f"{ours}; {last}: {_cell_text(cell)}", cell, points, [f"p = {cell['p_raw']:.2g}"])


def agreement_not_sufficient(accuracy, swapped, floors, r0) -> Judgement:
    """On circuit the other arm's boundary costs accuracy at r0, and with_norm as trained falls over 0.05."""
    id, last = "agreement_not_sufficient", 8 * r0
    costs, beyond = ([_swap(id, accuracy, swapped, arm, K) for arm in ARMS] for K in (r0, last))
    fallen = fall(id, accuracy, "with_norm", r0, last)
    able = [arm for arm in ARMS if competent(accuracy, floors, "circuit", grid(r0), [arm])]
    deciding = [cost for cost, arm in zip(costs, ARMS, strict=True) if arm in able]
    norm = "with_norm" in able
    necessary = norm and any(_above(cost, 0) for cost in deciding)
    verdict = _first(
        not_competent=not able,
        replicated=necessary and _above(fallen, 0.05),
        same_direction=necessary and _above(fallen, 0),
        not_replicated=all(_below(cost, 0) for cost in deciding) or (norm and _below(fallen, 0.05)),
    )
    ours = "; ".join(f"swap costs {arm} {_cell_text(cost)}" for arm, cost in zip(ARMS, costs, strict=True))
    ours += f"; with_norm falls {_cell_text(fallen)}"
    notes = [f"{arm} is not competent and does not decide" for arm in ARMS if arm not in able]
    # agreement at r0 may turn into its opposite beyond it; the rule does not ask, a reader will
    swaps = zip(ARMS, beyond, strict=True)
    notes += [f"at {last} the other boundary helps {arm}: {_cell_text(c)}" for arm, c in swaps if _below(c, 0)]
    return _judged(verdict, ours, fallen, [*costs, fallen, *beyond, *means(id, accuracy, [("circuit", r0)])], notes)


def _swap(claim_id: str, accuracy, swapped, arm: str, K: int) -> dict:
    """The cell of an arm's accuracy under its own boundary minus that under the other's, on circuit at K."""
    both = (by_seed(table, task="circuit", arm=arm, K=K) for table in (accuracy, swapped))
    return paired(claim_id, *both, arm=f"{arm}, own - swapped boundary", K=K)


def _value(claim: dict, ours, points: list[dict], r0: int, at_paper: bool) -> Judgement:
    n, scaled = min(cell["n"] for cell in points), "" if r0 == 4 else f"K beyond 1 scaled by {r0} / 4"
    return replace(claims.judge_value(claim, ours, at_paper and r0 == 4, n, scaled), points=points)


def accuracy_curve(claim: dict, accuracy, r0, at_paper) -> Judgement:
    """scratch_circuit_none, scratch_circuit_norm, scratch_hops: mean accuracy at the claim's K, by arm."""
    # the paper's r0 is 4: its K is read at the same multiple of ours, one loop staying one
    places = [(claim["task"], 1 if K == 1 else K * r0 // 4) for K in claim["K"]]
    arms = [claim["arm"]] if "arm" in claim else ARMS
    cells = means(claim["id"], accuracy, places, arms)
    ours = {arm: [cell["value"] for cell in cells if cell["arm"] == arm] for arm in arms}
    return _value(claim, ours[claim["arm"]] if "arm" in claim else ours, cells, r0, at_paper)


def exact_p(claim: dict, accuracy, r0, at_paper) -> Judgement:
    """scratch_circuit_p (K = 1, r0, every count beyond) and scratch_hops_p_at_r0: raw exact p."""
    counts = [1, r0, 2 * r0, 4 * r0, 8 * r0] if claim["task"] == "circuit" else [r0]
    cells = contrasts(claim["id"], accuracy, [(claim["task"], K) for K in counts])
    first, *others = [cell["p_raw"] for cell in cells]
    return _value(claim, [first, others[0], others[1:]] if others else first, cells, r0, at_paper)


def scratch_circuit_delta(claim: dict, accuracy, r0, at_paper) -> Judgement:
    """Largest Cliff's delta on circuit beyond r0."""
    cells = contrasts("scratch_circuit_delta", accuracy, [("circuit", factor * r0) for factor in (2, 4, 8)])
    return _value(claim, max(cell["delta"] for cell in cells), cells, r0, at_paper)


def state_norm_growth(claim: dict, state_norm, r0, at_paper) -> Judgement:
    """Mean over seeds of the state norm at 8 r0 over that at K = 1, both arms, on circuit."""
    _, cells = growth("state_norm_growth", state_norm, r0)
    return _value(claim, {a: c["value"] for a, c in zip(ARMS, cells, strict=True)}, cells, r0, at_paper)


def judge(accuracy, state_norm, swapped, floors, r0: int, scale: str) -> list[Judgement]:
    """All claims of section 4.3 from the tables above, seeds that diverged named in each reason.

    r0 is the trained loop count; the reported values are judged at scale "paper" alone. A claim on a
    task that was not run is out_of_reach. Raises ValueError on an absent arm, loop count or seed.
    """
    rules, common, value = claims.load(), (accuracy, floors, r0), (accuracy, r0, scale == "paper")
    circuit, hops = TASKS[:1], TASKS[1:]
    todo = {
        "scratch_circuit_none": (circuit, accuracy_curve, value),
        "scratch_circuit_norm": (circuit, accuracy_curve, value),
        "scratch_circuit_p": (circuit, exact_p, value),
        "scratch_circuit_delta": (circuit, scratch_circuit_delta, value),
        "scratch_hops": (hops, accuracy_curve, value),
        "scratch_hops_p_at_r0": (hops, exact_p, value),
        "no_norm_never_worse": (TASKS, no_norm_never_worse, common),
        "no_norm_extrapolates_better": (circuit, no_norm_extrapolates_better, common),
        "norm_peaks_at_trained_depth": (circuit, norm_peaks_at_trained_depth, common),
        "hops_indistinguishable_at_r0": (hops, hops_indistinguishable_at_r0, common),
        "state_norm_growth": (circuit, state_norm_growth, (state_norm, *value[1:])),
        "norm_growth_reversal": (circuit, norm_growth_reversal, (accuracy, state_norm, floors, r0)),
        "agreement_not_sufficient": (circuit, agreement_not_sufficient, (accuracy, swapped, floors, r0)),
    }
    found, diverged = [], accuracy[accuracy["value"].isna()]
    for id, (tasks, rule, tables) in todo.items():
        if set(tasks) <= set(accuracy["task"]):
            judged = rule(rules[id], *tables) if rules[id]["kind"] == "value" else rule(*tables)
        else:
            judged = Judgement(id, "out_of_reach", "", 0, reason=f"needs runs on {' and '.join(tasks)}")
        lost = diverged[diverged["task"].isin(tasks)].groupby(["arm", "task"])["seed"].nunique()
        notes = [f"{n} of {arm} diverged on {task}" for (arm, task), n in lost.items()]
        found.append(replace(judged, reason="; ".join(filter(None, (judged.reason, *notes)))))
    return found
