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

from lib import claims
from lib.claims import Judgement
from lib.rules import (
    ARMS,
    ENOUGH,
    above,
    below,
    by_seed,
    cell_text,
    competent,
    contrasts,
    difference_cell,
    fall,
    first,
    judge_all,
    judged,
    mean_cell,
    means,
    paired,
)

TASKS = ("circuit", "hops")


def grid(r0: int) -> list[int]:
    """The loop counts of the rules: 1, 2, r0 x {1, 2, 4, 8} and the powers of two up to 8 r0."""
    return sorted({2**i for i in range((8 * r0).bit_length())} | {r0, 2 * r0, 4 * r0, 8 * r0})


def no_norm_never_worse(accuracy, floors, r0) -> Judgement:
    """Over the grid on both tasks no significant loss without the norm and every interval above -0.02."""
    places = [(task, K) for task in TASKS for K in grid(r0)]
    cells = contrasts("no_norm_never_worse", accuracy, places)
    able = [task for task in TASKS if competent(accuracy, floors, task, [r0])]
    deciding = [cell for cell in cells if cell["task"] in able]
    low = min(deciding or cells, key=lambda cell: cell["value"] if cell["low"] is None else cell["low"])
    verdict = first(
        not_competent=not deciding,
        not_replicated=any(cell["p_holm"] < 0.05 and cell["delta"] < 0 for cell in deciding),
        # with too few seeds that no cell rejects says nothing
        replicated=all(above(cell, -0.02) and cell["n"] >= ENOUGH for cell in deciding),
    )
    ours = f"lowest, {low['task']} {low['K']}: {cell_text(low)}"
    notes = [f"{task} is not competent and does not decide" for task in TASKS if task not in able]
    wide = [f"{c['task']} {c['K']}" for c in deciding if not above(c, -0.02)]
    notes += [f"the interval does not stay above -0.02 at {', '.join(wide)}"] if wide else []
    return judged(verdict, ours, low, cells + means(low["id"], accuracy, places), notes)


def no_norm_extrapolates_better(accuracy, floors, r0) -> Judgement:
    """Beyond the budget on circuit: delta above 0 and Holm p below 0.05 in every cell."""
    places = [("circuit", factor * r0) for factor in (2, 4, 8)]
    cells = contrasts("no_norm_extrapolates_better", accuracy, places)
    ahead = all(cell["delta"] > 0 for cell in cells)
    verdict = first(
        not_competent=not competent(accuracy, floors, "circuit", [r0]),
        replicated=ahead and all(cell["p_holm"] < 0.05 and cell["n"] >= ENOUGH for cell in cells),
        not_replicated=any(below(cell, 0) for cell in cells),
        same_direction=ahead and any(cell["p_raw"] < 0.05 for cell in cells),  # raw p, as the rule has it
    )
    points = cells + means("no_norm_extrapolates_better", accuracy, places)
    return judged(verdict, f"{8 * r0}: {cell_text(cells[-1])}", cells[-1], points)


def norm_peaks_at_trained_depth(accuracy, floors, r0) -> Judgement:
    """On circuit the normalised arm is best at r0 and falls to K = 1 and to 8 r0; gate: its own peak."""
    id, arm, counts = "norm_peaks_at_trained_depth", ["with_norm"], grid(r0)
    cells = means(id, accuracy, [("circuit", K) for K in counts], arm)
    falls = [fall(id, accuracy, "with_norm", r0, K) for K in (1, 8 * r0)]
    peak = max(cells, key=lambda cell: (round(cell["value"], 9), cell["K"] == r0))["K"]  # r0 wins a tie
    falling = all(above(cell, 0) for cell in falls)
    verdict = first(
        not_competent=not competent(accuracy, floors, "circuit", counts, arm),
        not_replicated=any(below(cell, 0) for cell in falls),
        replicated=falling and peak == r0,
        same_direction=falling,
    )
    ours = "; ".join(f"to {cell['K']}: {cell_text(cell)}" for cell in falls)
    return judged(
        verdict,
        f"falls {ours}",
        falls[1],
        falls + cells,
        [f"of K = {', '.join(map(str, counts))} the mean is highest at {peak}"],
    )


def hops_indistinguishable_at_r0(accuracy, floors, r0) -> Judgement:
    """On hops the difference at r0 has its interval inside +-0.05; not_replicated wholly outside it."""
    (cell,) = contrasts("hops_indistinguishable_at_r0", accuracy, [("hops", r0)])
    verdict = first(
        not_competent=not competent(accuracy, floors, "hops", [r0]),
        not_replicated=above(cell, 0.05) or below(cell, -0.05),
        replicated=above(cell, -0.05) and below(cell, 0.05),
    )
    points = [cell, *means(cell["id"], accuracy, [("hops", r0)])]
    return judged(verdict, f"{r0}: {cell_text(cell)}", cell, points, [f"p = {cell['p_raw']:.2g}"])


def growth(claim_id: str, state_norm: pd.DataFrame, r0: int) -> tuple[list[pd.Series], list[dict]]:
    """By arm on circuit, state norm at 8 r0 over that at 1: by seed (none if it diverged), and as cells."""
    at = [[by_seed(state_norm, task="circuit", arm=arm, K=K) for K in (1, 8 * r0)] for arm in ARMS]
    ratios = [(last / first).replace([np.inf, -np.inf], np.nan).dropna() for first, last in at]
    keys = [{"task": "circuit", "arm": f"{arm}, growth", "K": 8 * r0} for arm in ARMS]
    return ratios, [mean_cell(ratio, claim_id, **key) for ratio, key in zip(ratios, keys, strict=True)]


def norm_growth_reversal(accuracy, state_norm, floors, r0) -> Judgement:
    """On circuit the state grows more without the norm, intervals apart, and accuracy at 8 r0 is higher."""
    id, last = "norm_growth_reversal", 8 * r0
    grown, (none, norm) = growth(id, state_norm, r0)
    gap = difference_cell(*grown, id, task="circuit", arm=f"{' - '.join(ARMS)}, growth", K=last)
    (cell,) = contrasts(id, accuracy, [("circuit", last)])
    apart = norm["high"] is not None and above(none, norm["high"])
    higher = cell["delta"] > 0 and cell["p_holm"] < 0.05 and cell["n"] >= ENOUGH
    verdict = first(
        not_competent=not competent(accuracy, floors, "circuit", [r0]),
        replicated=apart and higher,
        not_replicated=below(gap, 0) or below(cell, 0),
        same_direction=above(gap, 0) and above(cell, 0),
    )
    ours = f"growth {claims.render(none['value'])} against {claims.render(norm['value'])}"
    points = [cell, none, norm, gap, *means(id, accuracy, [("circuit", last)])]
    return judged(verdict, f"{ours}; {last}: {cell_text(cell)}", cell, points, [f"p = {cell['p_raw']:.2g}"])


def agreement_not_sufficient(accuracy, swapped, floors, r0) -> Judgement:
    """On circuit the other arm's boundary costs accuracy at r0, and with_norm as trained falls over 0.05."""
    id, last = "agreement_not_sufficient", 8 * r0
    costs, beyond = ([_swap(id, accuracy, swapped, arm, K) for arm in ARMS] for K in (r0, last))
    fallen = fall(id, accuracy, "with_norm", r0, last)
    able = [arm for arm in ARMS if competent(accuracy, floors, "circuit", grid(r0), [arm])]
    deciding = [cost for cost, arm in zip(costs, ARMS, strict=True) if arm in able]
    norm = "with_norm" in able
    necessary = norm and any(above(cost, 0) for cost in deciding)
    verdict = first(
        not_competent=not able,
        replicated=necessary and above(fallen, 0.05),
        same_direction=necessary and above(fallen, 0),
        not_replicated=all(below(cost, 0) for cost in deciding) or (norm and below(fallen, 0.05)),
    )
    ours = "; ".join(f"swap costs {arm} {cell_text(cost)}" for arm, cost in zip(ARMS, costs, strict=True))
    ours += f"; with_norm falls {cell_text(fallen)}"
    notes = [f"{arm} is not competent and does not decide" for arm in ARMS if arm not in able]
    # agreement at r0 may turn into its opposite beyond it; the rule does not ask, a reader will
    swaps = zip(ARMS, beyond, strict=True)
    notes += [f"at {last} the other boundary helps {arm}: {cell_text(c)}" for arm, c in swaps if below(c, 0)]
    return judged(verdict, ours, fallen, [*costs, fallen, *beyond, *means(id, accuracy, [("circuit", r0)])], notes)


def _swap(claim_id: str, accuracy, swapped, arm: str, K: int) -> dict:
    """The cell of an arm's accuracy under its own boundary minus that under the other's, on circuit at K."""
    both = (by_seed(table, task="circuit", arm=arm, K=K) for table in (accuracy, swapped))
    return paired(claim_id, *both, task="circuit", arm=f"{arm}, own - swapped boundary", K=K)


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
    at_one, *others = [cell["p_raw"] for cell in cells]
    return _value(claim, [at_one, others[0], others[1:]] if others else at_one, cells, r0, at_paper)


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
    common, value = (accuracy, floors, r0), (accuracy, r0, scale == "paper")
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
    return judge_all(todo, accuracy)
