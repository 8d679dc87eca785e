"""The rules of the contract paper's section 4.4: how much of the loss a refit behind the changed loop recovers.

One function per claim, named after its id; the rule's text is in params/claims.yaml. Tables are long:
refits      task, direction, part, steps, seed, value: accuracy of the changed loop after so many refit steps
intact      task, direction, seed, value: accuracy of the same models in their own loop
floors      task, d_star, value: the no-skill accuracy
Accuracies are means over depths at K = r0. direction is "added" (the norm, to the arm trained without it, the
paper's) or "removed" (from the arm trained with it); part is what is refitted, "head" or "layer" (the block's last
layer with the head); steps 0 is the changed loop before any refit, the same for both parts. A diverged model's value
is NaN: its seed counts as 0 in both loops. A recovered fraction is (refitted - changed) / (intact - changed), a ratio
of means over seeds, not clipped. Cells are the dicts of `claims.point`.
"""

from dataclasses import replace

import pandas as pd

from lib import claims, stats
from lib.claims import Judgement, point
from lib.rules import ROUNDING, above, below, by_seed, cell_text, competent, few, first, judged, mean_cell, paired

LOST = 0.05  # a changed loop that loses less leaves no fraction to recover
PARTS = ("layer", "head")


def _loops(refits, intact, task, direction) -> tuple[pd.Series, pd.Series]:
    """Accuracy by seed in the own loop and in the changed one, 0 in both for a diverged model."""
    own, changed = (by_seed(t, task=task, direction=direction, **k) for t, k in ((intact, {}), (refits, {"steps": 0})))
    if not own.index.equals(changed.index):
        raise ValueError(f"the same models have seeds {list(own.index)} intact and {list(changed.index)} changed")
    return own.fillna(0), changed.mask(own.isna(), 0).fillna(0)


def _refitted(refits, intact, task, direction, part, steps) -> pd.Series:
    """Accuracy by seed after a refit, 0 for a model or a refit that diverged."""
    found = by_seed(refits, task=task, direction=direction, part=part, steps=steps)
    own = by_seed(intact, task=task, direction=direction)
    if not own.index.equals(found.index):
        raise ValueError(f"the same models have seeds {list(own.index)} intact and {list(found.index)} refitted")
    return found.mask(own.isna(), 0).fillna(0)


def _fraction(claim_id, gain: pd.Series, lost: pd.Series, **keys) -> dict:
    """The cell of mean gain over mean loss; without a value where the loss is too small or unclear to divide by."""
    defined = _lossy(mean_cell(lost, claim_id, **keys))
    return point(claim_id, **keys, **(stats.bootstrap_ratio(gain, lost)._asdict() if defined else {"n": len(lost)}))


def _lossy(cell: dict) -> bool:
    """Whether a loss reaches 0.05 and its interval excludes 0."""
    return cell["value"] >= LOST - ROUNDING and above(cell, 0)


def _between(claim_id, refits, intact, r0, more: tuple, less: tuple, named: str) -> dict:
    """The cell of recovered fraction `more` minus `less`, each (part, steps), norm added, on circuit."""
    place = (refits, intact, "circuit", "added")
    own, changed = _loops(*place)
    gain = _refitted(*place, *more) - _refitted(*place, *less)
    return _fraction(claim_id, gain, own - changed, task="circuit", arm=f"added, {named} steps", K=r0)


def loss(refits, intact, task, direction, claim_id="", r0=None) -> dict:
    """The cell of intact minus changed accuracy, paired by seed.

    Raises ValueError on rows that are absent or seeds that differ between the tables.
    """
    loops = _loops(refits, intact, task, direction)
    return paired(claim_id, *loops, task=task, arm=f"{direction}, intact - changed", K=r0)


def recovered(refits, intact, task, direction, part, steps, claim_id="", r0=None) -> dict:
    """The cell of the recovered fraction, seeds drawn jointly in its interval.

    Value and interval are None where the mean loss is below 0.05 or its interval does not exclude 0.
    Raises ValueError on rows that are absent or seeds that differ between the tables.
    """
    own, changed = _loops(refits, intact, task, direction)
    gain = _refitted(refits, intact, task, direction, part, steps) - changed
    return _fraction(claim_id, gain, own - changed, task=task, arm=f"{direction}, {part}, {steps} steps", K=r0)


def by_seed_fractions(refits, intact, task, direction, part, steps) -> tuple[pd.Series, int]:
    """Recovered fraction of every seed that lost at least 0.05 itself, and the count of the others.

    Raises ValueError on rows that are absent or seeds that differ between the tables.
    """
    own, changed = _loops(refits, intact, task, direction)
    gain, lost = _refitted(refits, intact, task, direction, part, steps) - changed, own - changed
    enough = lost >= LOST - ROUNDING
    return (gain / lost)[enough], int((~enough).sum())


def step_counts(refits, task, direction, part) -> list[int]:
    """The step counts that a part was refitted for, ascending; empty where it was not."""
    chosen = (refits["task"] == task) & (refits["direction"] == direction) & (refits["part"] == part)
    return sorted(int(steps) for steps in set(refits.loc[chosen, "steps"]) if steps > 0)


def _shared(refits, direction) -> int | None:
    """The largest step count that both parts were refitted for on circuit."""
    counts = (step_counts(refits, "circuit", direction, part) for part in PARTS)
    return max(set.intersection(*map(set, counts)), default=None)


def _able(intact, floors, r0) -> bool:
    """Whether the arm trained without the norm passes the gate on circuit in its own loop."""
    return competent(intact.assign(arm=intact["direction"], K=r0), floors, "circuit", [r0], ["added"])


def _context(claim_id, refits, intact, task, direction, r0) -> list[dict]:
    """The loss, and the two accuracies that it is the difference of."""
    both = zip(("intact", "changed"), _loops(refits, intact, task, direction), strict=True)
    cells = [mean_cell(values, claim_id, task=task, arm=f"{direction}, {loop}", K=r0) for loop, values in both]
    return [loss(refits, intact, task, direction, claim_id, r0), *cells]


def _text(cell: dict, signed=False) -> str:
    """A fraction with its interval, in words where it is not defined."""
    return "undefined" if cell["value"] is None else cell_text(cell) if signed else cell_text(cell).lstrip("+")


def _small(lost: dict) -> list[str]:
    """Why no fraction is defined; nothing where it is."""
    why = " (no interval over one seed)" if lost["low"] is None else ""
    return [] if _lossy(lost) else [f"the changed loop loses only {cell_text(lost).lstrip('+')}{why}"]


def layer_beats_head(refits, intact, floors, r0) -> Judgement:
    """Norm added, circuit: at the largest shared step count the layer recovers more than the head, and all."""
    id, steps = "layer_beats_head", _shared(refits, "added")
    if steps is None:
        return Judgement(id, "out_of_reach", "", 0, reason="needs both refits run for the same number of steps on circuit")
    lost, *means = _context(id, refits, intact, "circuit", "added", r0)
    layer, head = (recovered(refits, intact, "circuit", "added", part, steps, id, r0) for part in PARTS)
    gap = _between(id, refits, intact, r0, ("layer", steps), ("head", steps), f"layer - head, {steps}")
    ahead = above(gap, 0)
    verdict = first(
        not_competent=not _able(intact, floors, r0),
        inconclusive=not _lossy(lost),
        replicated=ahead and layer["high"] >= 0.95 - ROUNDING,
        same_direction=ahead,
        not_replicated=below(gap, 0),
    )
    ours = f"layer {_text(layer)}, head {_text(head)}; gap {_text(gap, signed=True)}"
    said, beside = _removed(id, refits, intact, r0)
    found = judged(
        verdict,
        ours,
        gap,
        [gap, layer, head, lost, *means],
        [f"at {steps} steps", *_small(lost), *few(gap["n"]), said],
        enough=0,
    )
    return replace(found, points=found.points + beside)  # n is that of the direction that decides


def _removed(claim_id, refits, intact, r0) -> tuple[str, list[dict]]:
    """The norm-removed direction, which decides nothing: in words, and its cells."""
    steps = _shared(refits, "removed")
    if steps is None:
        return "the norm-removed direction was not run", []
    lost, *means = _context(claim_id, refits, intact, "circuit", "removed", r0)
    cells = [recovered(refits, intact, "circuit", "removed", part, steps, claim_id, r0) for part in PARTS]
    shown = ", ".join(f"{part} {_text(cell)}" for part, cell in zip(PARTS, cells, strict=True))
    said = "; ".join(_small(lost)) or f"{shown} of a loss of {_text(lost)}"
    return f"norm removed, {steps} steps: {said}", [*cells, lost, *means]


def head_plateaus(refits, intact, floors, r0) -> Judgement:
    """Norm added, circuit: ten times the steps add less than 0.05 to the head's recovered fraction."""
    id, counts = "head_plateaus", step_counts(refits, "circuit", "added", "head")
    last = max((steps for steps in counts if steps / 10 in counts), default=None)
    if last is None:
        return Judgement(id, "out_of_reach", "", 0, reason="needs head refits on circuit at two step counts ten times apart")
    lost, *means = _context(id, refits, intact, "circuit", "added", r0)
    cells = [recovered(refits, intact, "circuit", "added", "head", steps, id, r0) for steps in (last // 10, last)]
    gain = _between(id, refits, intact, r0, ("head", last), ("head", last // 10), f"head, {last} - {last // 10}")
    verdict = first(
        not_competent=not _able(intact, floors, r0),
        inconclusive=not _lossy(lost),
        replicated=gain["value"] is not None and gain["value"] < 0.05 and below(gain, 0.10),
        not_replicated=above(gain, 0.05),
    )
    ours = f"gain {_text(gain, signed=True)}, from {_text(cells[0])} to {_text(cells[1])}"
    notes = [f"from {last // 10} to {last} steps", *_small(lost), *few(gain["n"])]
    return judged(verdict, ours, gain, [gain, *cells, lost, *means], notes, enough=0)


def _value(claim: dict, refits, intact, run, r0, at_paper, part: str, steps: list[int]) -> Judgement:
    """Recovered fractions at the claim's tasks and steps, norm added; None where one was not run or is undefined."""
    ours, points, notes = {}, [], []
    tasks = list(claim["value"]) if isinstance(claim["value"], dict) else [claim["task"]]
    for task in tasks:
        counts = step_counts(refits, task, "added", part) if task in run else []
        found = [recovered(refits, intact, task, "added", part, s, claim["id"], r0) if s in counts else None for s in steps]
        ours[task] = [cell and cell["value"] for cell in found]
        points += [cell for cell in found if cell]
        notes += [f"{part} not refitted for {s} steps on {task}" for s in steps if s not in counts]
        if task in run:
            lost = _context(claim["id"], refits, intact, task, "added", r0)
            points, notes = points + lost, notes + [f"{task}: {why}" for why in _small(lost[0])]
    one = {task: values if isinstance(claim.get("steps"), list) else values[0] for task, values in ours.items()}
    shaped = one if isinstance(claim["value"], dict) else one[tasks[0]]
    n = min(cell["n"] for cell in points)
    return replace(claims.judge_value(claim, shaped, at_paper, n, "; ".join(notes)), points=points)


def judge(refits, intact, floors, r0: int, scale: str) -> list[Judgement]:
    """All claims of section 4.4 from the tables above, seeds that diverged named in each reason.

    r0 is the trained loop count; the reported values are judged at scale "paper" alone. A claim none of whose
    tasks was run is out_of_reach. Raises ValueError on seeds that differ between the tables, or when the changed
    loop before any refit is not the same for both parts.
    """
    before = refits[refits["steps"] == 0].groupby(["task", "direction", "seed"])["value"]
    if (before.nunique(dropna=False) > 1).any():
        raise ValueError("steps 0 is the changed loop before any refit: its value must be the same for both parts")
    added = [table[table["direction"] == "added"] for table in (refits, intact)]
    run, rules = set.intersection(*(set(table["task"]) for table in added)), claims.load()
    parts = {"refit_head": "head", "refit_head_plateau": "head", "refit_layer": "layer", "refit_layer_hops": "layer"}
    lost = pd.concat([intact.assign(what="the model"), refits.assign(what="a refit")])
    lost = lost[lost["value"].isna()].drop_duplicates(["task", "direction", "seed"])  # a lost model's refits are lost too
    found = []
    for id in (*parts, "layer_beats_head", "head_plateaus"):
        claim = rules[id]
        tasks = list(claim["value"]) if isinstance(claim.get("value"), dict) else [claim.get("task", "circuit")]
        if not run & set(tasks):
            verdict = Judgement(id, "out_of_reach", "", 0, reason=f"needs runs on {' and '.join(tasks)}")
        elif id in parts:
            steps = claim["steps"] if isinstance(claim["steps"], list) else [claim["steps"]]
            verdict = _value(claim, refits, intact, run, r0, scale == "paper", parts[id], steps)
        else:
            verdict = {"layer_beats_head": layer_beats_head, "head_plateaus": head_plateaus}[id](refits, intact, floors, r0)
        seeds = lost[lost["task"].isin(tasks)].groupby(["direction", "task", "what"])["seed"].unique()
        notes = [f"{what} of seed {', '.join(map(str, sorted(s)))} diverged on {t}, {d}" for (d, t, what), s in seeds.items()]
        found.append(replace(verdict, reason="; ".join(filter(None, (verdict.reason, *notes)))))
    return found
