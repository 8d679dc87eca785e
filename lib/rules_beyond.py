"""The rules of the two questions the contract paper leaves open.

One function per claim, named after its id; the rule's text is in params/claims.yaml. Tables are long:
updates     task, arm (no_norm | with_norm), seed, K, value: relative update ||R(u) - u|| / ||u|| of loop step K,
            the mean over instances
accuracy    task, arm, seed, K, d_star ("all" or a depth), value; readout_axis also reads readout (normalised | raw)
floors      task, d_star, value: the no-skill accuracy
A diverged seed's value is NaN. Its accuracy counts as 0 in a mean; it has no update and no rank, as an update of 0
would be a perfectly settled state. Cells are the dicts of `claims.point`.
"""

import numpy as np
import pandas as pd

from lib import stats
from lib.claims import Judgement, point
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
    first,
    judged,
    mean_cell,
    means,
)

READOUTS = ("normalised", "raw")
TRAINED = 0.95  # an arm whose mean at r0 is lower has not learned the task


def update_and_loss(updates: pd.DataFrame, accuracy: pd.DataFrame, r0: int, task: str = "circuit") -> pd.DataFrame:
    """A row per model on a task: arm, seed, update at 8 r0, and accuracy lost from r0 to 8 r0; NaN if it diverged.

    Raises ValueError where the tables do not hold the same seeds.
    """
    rows = []
    for arm in ARMS:
        moved = by_seed(updates, task=task, arm=arm, K=8 * r0).replace([np.inf, -np.inf], np.nan)
        own, beyond = (by_seed(accuracy, task=task, arm=arm, K=K) for K in (r0, 8 * r0))
        if not (moved.index.equals(own.index) and own.index.equals(beyond.index)):
            raise ValueError(f"updates of {arm} are of seeds {list(moved.index)}, accuracy of {list(own.index)}")
        rows.append(pd.DataFrame({"arm": arm, "seed": moved.index, "update": moved, "lost": own - beyond}))
    return pd.concat(rows, ignore_index=True)


def _correlation_cell(models: pd.DataFrame, arms, **keys) -> dict:
    """The cell of update against accuracy lost over the arms' models, empty when an arm has none."""
    chosen = models[models["arm"].isin(arms)]
    full = set(chosen["arm"]) == set(arms)
    found = stats.rank_correlation(chosen["update"], chosen["lost"], chosen["arm"])._asdict() if full else {"n": len(chosen)}
    return point("damping", task="circuit", **keys, **found)


def _text(cell: dict) -> str:
    return "-" if cell["value"] is None else cell_text(cell)


def damping(updates, accuracy, floors, r0) -> Judgement:
    """At 8 r0 the norm keeps the update larger, intervals apart, and a larger update goes with more accuracy lost.

    `ours` gives the update with the norm against without it.
    """
    id, last = "damping", 8 * r0
    models = update_and_loss(updates, accuracy, r0)
    at = {"task": "circuit", "K": last}
    none, norm = (models.loc[models["arm"] == arm, "update"].dropna() for arm in ARMS)
    gap = difference_cell(norm, none, id, arm=f"{' - '.join(reversed(ARMS))}, update", **at)
    none, norm = (mean_cell(v, id, arm=f"{arm}, update", **at) for arm, v in zip(ARMS, (none, norm), strict=True))
    sound = models.dropna()
    pooled = _correlation_cell(sound, ARMS, arm="both arms, rank correlation", K=last)
    within = [_correlation_cell(sound, [arm], arm=f"{arm}, rank correlation", K=last) for arm in ARMS]
    positive = pooled["value"] is not None and pooled["value"] > 0
    apart = none["high"] is not None and above(norm, none["high"])
    verdict = first(
        not_competent=not competent(accuracy, floors, "circuit", [r0]),
        replicated=apart and above(pooled, 0),
        not_replicated=below(pooled, 0) or (none["low"] is not None and below(norm, none["low"])),
        same_direction=(above(gap, 0) and above(pooled, 0)) or (apart and positive),
    )
    sizes = " against ".join("-" if c["value"] is None else f"{c['value']:.2g}" for c in (norm, none))
    notes = [f"rank correlation within {arm} {_text(c)}" for arm, c in zip(ARMS, within, strict=True)]
    supports = above if positive else below
    if pooled["value"] is not None and not any(supports(cell, 0) for cell in within):
        side = "above" if positive else "below"
        notes.append(f"neither arm's interval lies {side} 0: the pooled correlation can come from the arms' difference alone")
    missing = models[models.isna().any(axis=1)].groupby("arm")["seed"].nunique()
    notes += [f"{n} of {arm} diverged, left out of the correlation" for arm, n in missing.items()]
    fewest = min(cell["n"] for cell in within)
    notes += [f"{fewest} sound models in an arm, below {ENOUGH}: bootstrap intervals are too narrow"] if fewest < ENOUGH else []
    ours = f"update at {last}: {sizes}; rank correlation {_text(pooled)}"
    return judged(verdict, ours, pooled, [none, norm, gap, pooled, *within], notes, enough=0)


def readout_axis(accuracy, floors, r0) -> Judgement:
    """On circuit at 8 r0 the gap of the arms differs by less than 0.05 between the readouts; 8 seeds decide."""
    id, last = "readout_axis", 8 * r0
    table = accuracy.assign(arm=accuracy["arm"] + ", " + accuracy["readout"] + " readout")
    pairs = [[f"{arm}, {readout} readout" for arm in ARMS] for readout in READOUTS]
    arms = [arm for pair in pairs for arm in pair]
    values = [[by_seed(table, task="circuit", arm=arm, K=last) for arm in pair] for pair in pairs]
    named = {"task": "circuit", "arm": f"{' - '.join(ARMS)}, {' - '.join(READOUTS)} readout", "K": last}
    cell = point(id, **named, **stats.bootstrap_interaction(*values)._asdict())
    simple = [contrasts(id, table, [("circuit", last)], pair)[0] for pair in pairs]
    for one, readout, p in zip(simple, READOUTS, stats.holm([one["p_raw"] for one in simple]), strict=True):
        one |= {"arm": f"{' - '.join(ARMS)}, {readout} readout", "p_holm": float(p)}
    at_r0, beyond = (means(id, table, [("circuit", K)], arms) for K in (r0, last))
    inside = above(cell, -0.05) and below(cell, 0.05)
    enough = cell["n"] >= ENOUGH
    verdict = first(
        not_competent=not competent(table, floors, "circuit", [r0], arms),
        replicated=enough and inside,
        not_replicated=enough and not inside and (above(cell, 0) or below(cell, 0)),
    )
    notes = [] if enough else [f"n = {cell['n']} a group, below the {ENOUGH} seeds the rule asks for: not decided"]
    notes += [f"the norm costs {cell_text(c)} with {readout} readout" for readout, c in zip(READOUTS, simple, strict=True)]
    weak = [f"{c['arm']} ({c['value']:.2f})" for c in at_r0 if c["value"] < TRAINED]
    untrained = f"mean at {r0} below {TRAINED} of {', '.join(weak)}: undertrained arms make the interaction hard to read"
    notes += [untrained] if weak else []
    missing = table[table["value"].isna() & (table["task"] == "circuit")].groupby("arm")["seed"].nunique()
    notes += [f"{n} of {arm} diverged" for arm, n in missing.items()]
    return judged(verdict, f"interaction at {last}: {cell_text(cell)}", cell, [cell, *simple, *beyond, *at_r0], notes, enough=0)


def judge_damping(updates, accuracy, floors, r0: int) -> list[Judgement]:
    """The claim damping; out_of_reach when circuit was not run. Raises ValueError on an absent arm, K or seed."""
    if "circuit" in set(updates["task"]) & set(accuracy["task"]):
        return [damping(updates, accuracy, floors, r0)]
    return [Judgement("damping", "out_of_reach", "", 0, reason="needs runs on circuit and the updates of their steps")]


def judge_readout_axis(accuracy, floors, r0: int) -> list[Judgement]:
    """The claim readout_axis; out_of_reach when circuit was not run. Raises ValueError on an absent arm, K or readout."""
    if "circuit" in set(accuracy["task"]):
        return [readout_axis(accuracy, floors, r0)]
    return [Judgement("readout_axis", "out_of_reach", "", 0, reason="needs runs on circuit with both readouts")]
