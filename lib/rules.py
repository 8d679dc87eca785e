"""What the rules of every section are made of: cells over seeds, gates, and a verdict with its reason.

Tables are long, with columns task, arm, seed, K, value and, where it applies, d_star ("all" or a depth). A diverged seed's
value is NaN: it ranks last and counts as 0. Cells are the dicts of `claims.point`.
"""

from dataclasses import replace

import numpy as np
import pandas as pd

from lib import claims, stats
from lib.claims import Judgement, point

ARMS = ("no_norm", "with_norm")
ENOUGH = 8  # seeds an arm with which the exact test of a section's families can reject
ROUNDING = 1e-9  # a mean of equal accuracies may miss them by a rounding error


def by_seed(table: pd.DataFrame, **keys) -> pd.Series:
    """Values by seed, over all d* (and the mean over widths); ValueError when there are none."""
    keys = keys | {"d_star": "all"} if "d_star" in table else keys
    chosen = np.logical_and.reduce([(table[column] == wanted).to_numpy() for column, wanted in keys.items()])
    if not chosen.any():
        raise ValueError(f"no rows with {', '.join(f'{k} {v}' for k, v in keys.items())}")
    values = pd.Series(table["value"].to_numpy()[chosen], index=table["seed"].to_numpy()[chosen])
    return values.groupby(level=0).mean(skipna=False)


def above(cell: dict, bound: float) -> bool:
    """Whether a cell's interval lies above the bound; a cell without one does not."""
    return cell["low"] is not None and cell["low"] > bound + ROUNDING


def below(cell: dict, bound: float) -> bool:
    """Whether a cell's interval lies below the bound; a cell without one does not."""
    return cell["high"] is not None and cell["high"] < bound - ROUNDING


def contrasts(claim_id: str, accuracy: pd.DataFrame, places: list[tuple[str, int]], arms=ARMS) -> list[dict]:
    """A cell per (task, K): first arm minus second, exact p raw and Holm over all places, delta.

    Raises ValueError where an arm has no value at a place.
    """
    pairs = [[by_seed(accuracy, task=t, arm=arm, K=K) for arm in arms] for t, K in places]
    return tested(claim_id, pairs, [{"task": t, "arm": " - ".join(arms), "K": K} for t, K in places])


def tested(claim_id: str, pairs: list, keys: list[dict]) -> list[dict]:
    """A cell per pair of arms, each by seed: first minus second, exact p raw and Holm over all pairs, delta."""
    raw = [stats.mann_whitney(*pair)[1] for pair in pairs]
    tests = [{"p_raw": p, "p_holm": q} for p, q in zip(raw, stats.holm(raw), strict=True)]
    return [
        difference_cell(*pair, claim_id, **key, delta=stats.cliffs_delta(*pair), **test)
        for pair, key, test in zip(pairs, keys, tests, strict=True)
    ]


def means(claim_id: str, accuracy: pd.DataFrame, places: list[tuple[str, int]], arms=ARMS) -> list[dict]:
    """A cell per (task, K) and arm: its mean accuracy over seeds."""
    keys = [{"task": task, "arm": arm, "K": K} for task, K in places for arm in arms]
    return [mean_cell(by_seed(accuracy, **key), claim_id, **key) for key in keys]


def mean_cell(values: pd.Series, claim_id: str, **keys) -> dict:
    """The cell of a mean over seeds, empty where there are none."""
    found = stats.bootstrap_mean(values)._asdict() if len(values) else {"n": 0}
    return point(claim_id, **keys, **found)


def difference_cell(x: pd.Series, y: pd.Series, claim_id: str, **keys) -> dict:
    """The cell of mean x minus mean y, models trained separately; empty where a side has none."""
    found = stats.bootstrap_difference(x, y)._asdict() if len(x) and len(y) else {"n": 0}
    return point(claim_id, **keys, **found)


def paired(claim_id: str, own: pd.Series, other: pd.Series, **keys) -> dict:
    """The cell of own minus other, by seed of the same models; a diverged seed is 0 in both."""
    if not own.index.equals(other.index):
        raise ValueError(f"the same models have seeds {list(own.index)} once and {list(other.index)} once")
    return mean_cell(own.fillna(0) - other.fillna(0), claim_id, **keys)


def fall(claim_id: str, accuracy: pd.DataFrame, arm: str, r0: int, K: int) -> dict:
    """The cell of an arm's fall on circuit from r0 to K."""
    values = (by_seed(accuracy, task="circuit", arm=arm, K=k) for k in (r0, K))
    return paired(claim_id, *values, task="circuit", arm=f"{arm}, r0 - K", K=K)


def competent(accuracy: pd.DataFrame, floors: pd.DataFrame, task: str, at: list[int], arms=ARMS) -> bool:
    """Whether an arm's mean at one of the loop counts reaches 0.30 and exceeds the floor by over 0.05."""
    floor = floors.loc[floors["task"] == task, "value"].mean()  # over the depths
    if np.isnan(floor):
        raise ValueError(f"floors has no value for task {task}")
    found = [by_seed(accuracy, task=task, arm=a, K=K).fillna(0).mean() for a in arms for K in at]
    return max(found) >= 0.30 and max(found) - floor > 0.05


def first(**conditions: bool) -> str:
    """The first verdict whose condition holds; a verdict that none fixes is inconclusive."""
    return next((verdict for verdict, holds in conditions.items() if holds), "inconclusive")


def cell_text(cell: dict) -> str:
    """A difference with its interval and delta in a few characters."""
    ends = "" if cell["low"] is None else f" [{cell['low']:.2f}, {cell['high']:.2f}]"
    delta = "" if cell["delta"] is None else f"; delta {cell['delta']:.2f}"
    return f"{cell['value']:+.2f}{ends}{delta}"


def few(n: int) -> list[str]:
    """What is said where intervals over fewer than 8 seeds decide."""
    return [f"n = {n}, below {ENOUGH}: bootstrap intervals of so few are too narrow"] if n < ENOUGH else []


def judged(verdict: str, ours: str, head: dict, points: list[dict], notes=(), enough: int = ENOUGH) -> Judgement:
    """The judgement whose interval is that of the cell `head`; n is the smallest of the tested cells.

    Fewer seeds than `enough` are said to be too few for the section's rank tests; 0 says nothing.
    """
    n = min(cell["n"] for cell in [c for c in points if c["p_raw"] is not None] or points)
    few = f"n = {n} an arm, below {enough}: never counts as replicated by a rank test" if n < enough else ""
    # seeds that diverged can pull a mean below the other arm's while most seeds are ahead
    split = [f"{c['task']} {c['K'] or c['arm']}" for c in points if c["delta"] and c["value"] and c["delta"] * c["value"] < 0]
    apart = f"delta and the mean difference disagree in sign at {', '.join(split)}" if split else ""
    reason = "; ".join(filter(None, (*notes, few, apart)))
    return Judgement(head["id"], verdict, ours, n, head["low"], head["high"], reason, points)


def judge_all(todo: dict[str, tuple], accuracy: pd.DataFrame) -> list[Judgement]:
    """The judgement of every claim, todo being id -> (tasks it needs, rule, the rule's arguments).

    A reported value's rule gets its claim first. A claim on a task that was not run is out_of_reach; seeds that diverged
    are named in each reason.
    """
    rules, found, diverged = claims.load(), [], accuracy[accuracy["value"].isna()]
    for id, (tasks, rule, tables) in todo.items():
        if set(tasks) <= set(accuracy["task"]):
            verdict = rule(rules[id], *tables) if rules[id]["kind"] == "value" else rule(*tables)
        else:
            verdict = Judgement(id, "out_of_reach", "", 0, reason=f"needs runs on {' and '.join(tasks)}")
        lost = diverged[diverged["task"].isin(tasks)].groupby(["arm", "task"])["seed"].nunique()
        notes = [f"{n} of {arm} diverged on {task}" for (arm, task), n in lost.items()]
        found.append(replace(verdict, reason="; ".join(filter(None, (verdict.reason, *notes)))))
    return found
