"""The rules of the contract paper's section 4.1: what removing or adding the loop-boundary norm costs.

One function per claim or shape of claim; the rule's text is in params/claims.yaml. A pair (`pairs.Pair`) is a model and a
task: trained with the norm (family "ouro"), which the change removes, or without ("huginn"), and it adds it. A cell is a pair
at one K, judged on instances as the arms are the same weights: accuracy with a cluster bootstrap over skeletons, differences
also with the exact McNemar p, Holm over a claim's competent cells. A claim is as good as the worst of these. Cells are the
dicts of `claims.point`.
"""

import re
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd

from lib import claims, stats
from lib.claims import Judgement, point
from lib.instruments import BOUNDARY, OUTSIDE
from lib.pairs import PEAK_AT, Pair
from lib.rules import above, below, cell_text, few, first

CHANGE = {"ouro": "removed", "huginn": "added"}
TRAINED = {"ouro": "with", "huginn": "without"}
BEYOND = (2, 4, 8)  # times the trained loop count


def differences(pair: Pair, K: int) -> np.ndarray:
    """Right intact minus right changed at K, (N,) of -1, 0 and 1."""
    return pair.right(pair.trained)[K - 1].astype(int) - pair.right(pair.changed)[K - 1]


def loss(claim_id: str, pair: Pair, K: int) -> dict:
    """The cell of intact minus changed accuracy at K, untested."""
    found = stats.cluster_bootstrap(differences(pair, K), pair.cluster)
    return point(claim_id, task=pair.task, arm=f"{pair.model}: intact - {CHANGE[pair.family]}", K=K, **found._asdict())


def accuracy(claim_id: str, pair: Pair, period: int, K: int) -> dict:
    """The cell of an arm's accuracy at K."""
    arm = "intact" if period == pair.trained else CHANGE[pair.family]
    found = stats.cluster_bootstrap(pair.right(period)[K - 1], pair.cluster)
    return point(claim_id, task=pair.task, arm=f"{pair.model}: {arm}", K=K, **found._asdict())


def _joined(notes) -> str:
    return "; ".join(filter(None, notes))


def _gate(pairs: list[Pair]) -> list[str]:
    """How many pairs are competent, and which are not, by task."""
    notes = [f"{sum(pair.competent for pair in pairs)} of {len(pairs)} pairs competent"]
    for task in dict.fromkeys(pair.task for pair in pairs):
        here = [pair for pair in pairs if pair.task == task]
        failed = [pair.model for pair in here if not pair.competent]
        which = "every pair" if len(failed) == len(here) else " and ".join(failed)
        notes += [f"failed the gate on {task}: {which}"] if failed else []
    return notes


def _worst_of(id: str, pairs, found, notes=(), floors=()) -> Judgement:
    """The judgement over cells, `found` being (pair, cell, verdict), of which those of competent pairs count.

    Each cell is to lie above 0 or, where the floors' cells are given, below its pair's floor.
    """
    able = [at for at in found if at[0].competent]
    n = len({(pair.model, pair.task) for pair, *_ in able})
    verdicts = [verdict if pair.competent else "not_competent" for pair, _, verdict in found]
    counts = [f"{verdicts.count(v)} {v.replace('_', ' ')}" for v in claims.VERDICTS if v in verdicts]
    reason = _joined([*_gate(pairs), f"cells: {', '.join(counts)}" if counts else "", *notes])
    points = [*(cell for _, cell, _ in found), *floors]
    if not found or (not able and any(pair.competent for pair in pairs)):
        return Judgement(id, "out_of_reach", "", 0, reason=reason, points=points)
    verdict = claims.worst(verdicts)
    deciding = [(pair, cell) for (pair, cell, _), v in zip(found, verdicts, strict=True) if v == verdict]
    pair, head = min(deciding, key=lambda at: at[0].floor - at[1]["value"] if floors else at[1]["value"])
    place = f"{pair.model}, {pair.task}" + ("" if head["K"] == pair.r0 else f", K {head['K']}")
    good = sum(v in ("replicated", "same_direction") for v in verdicts)
    told = f"{cell_text(head).lstrip('+')}, floor {pair.floor:.2f}" if floors else cell_text(head)
    side = f"{'pairs' if len(able) == n else 'cells'} {'below' if floors else 'above 0'}"
    ours = f"worst: {place}: {told}; " + (f"{good} of {len(able)} {side}" if able else "no pair competent")
    return Judgement(id, verdict, ours, n, head["low"], head["high"], reason, points)


def _reach(pairs: list[Pair], multiples) -> list[str]:
    """The K of each trained loop count, and those that lie beyond what was read of a pair."""
    notes = [f"r0 = {r0}: K = {', '.join(str(m * r0) for m in multiples)}" for r0 in sorted({pair.r0 for pair in pairs})]
    for r0, loops in sorted({(pair.r0, pair.loops) for pair in pairs}):
        beyond = [str(m * r0) for m in multiples if m * r0 > loops]
        models = " and ".join(f"{p.model} on {p.task}" for p in pairs if (p.r0, p.loops) == (r0, loops))
        kind = "out of reach" if len(beyond) == len(multiples) else "not read"
        notes += [f"{kind}: K = {', '.join(beyond)} of {models}, read up to {loops}"] if beyond else []
    return notes


def costs(id: str, pairs: list[Pair], multiples=(1,), needs_p: bool = True) -> Judgement:
    """removal_costs_at_budget, removal_costs_beyond_budget, damage_in_either_direction: the loss at multiples of r0.

    Without needs_p the interval alone decides. Multiples beyond a pair's loops are left out, and said.
    """
    cells = [(pair, loss(id, pair, m * pair.r0)) for pair in pairs for m in multiples if m * pair.r0 <= pair.loops]
    tested = [(cell, differences(pair, cell["K"])) for pair, cell in cells if pair.competent]
    raw = [stats.mcnemar((d > 0).sum(), (d < 0).sum()) for _, d in tested]
    for (cell, _), p, q in zip(tested, raw, stats.holm(raw), strict=True):
        cell |= {"p_raw": p, "p_holm": float(q)}

    def verdict(cell):
        clear = not needs_p or (cell["p_holm"] is not None and cell["p_holm"] < 0.05)
        return first(replicated=above(cell, 0) and clear, same_direction=above(cell, 0), not_replicated=below(cell, 0))

    found = [(pair, cell, verdict(cell)) for pair, cell in cells]
    notes = [f"Holm p < 0.05 in {sum(cell['p_holm'] < 0.05 for cell, _ in tested)} of {len(tested)}"] if tested else []
    notes += _reach(pairs, multiples) if len(multiples) > 1 else []
    return _worst_of(id, pairs, found, notes)


def removal_reaches_zero(id: str, pairs: list[Pair]) -> Judgement:
    """The changed accuracy at r0 lies below the floor."""
    cells = [(pair, accuracy(id, pair, pair.changed, pair.r0)) for pair in pairs]
    found = [(p, c, first(replicated=below(c, p.floor), not_replicated=above(c, p.floor))) for p, c in cells]
    floors = [point(id, task=p.task, arm=f"{p.model}: floor", value=float(p.floor)) for p in pairs]
    return _worst_of(id, pairs, found, floors=floors)


def asymmetry(id: str, ouro: list[Pair], huginn: list[Pair]) -> Judgement:
    """The mean loss by removal minus that by addition, each at its own r0, over competent pairs."""
    able = {name: [pair for pair in pairs if pair.competent] for name, pairs in zip(CHANGE, (ouro, huginn), strict=True)}
    cells, notes, n = [loss(id, p, p.r0) for p in (*ouro, *huginn)], _gate([*ouro, *huginn]), sum(map(len, able.values()))
    if lacking := [f"no competent pair trained {TRAINED[name]} the norm" for name, pairs in able.items() if not pairs]:
        return Judgement(id, "not_competent", "", n, reason=_joined([*lacking, *notes]), points=cells)
    by_model, means = [], []
    for name, pairs in able.items():
        lost = [(pair.model, differences(pair, pair.r0), pair.cluster) for pair in pairs]
        models = list(dict.fromkeys(model for model, *_ in lost))
        by_model.append([[(d, cluster) for m, d, cluster in lost if m == model] for model in models])
        means.append(float(np.mean([d.mean() for _, d, _ in lost])))
        notes += [f"one model trained {TRAINED[name]} the norm: it varies over skeletons alone"] if len(models) == 1 else []
    head = point(id, arm="loss by removal - loss by addition", **stats.nested_bootstrap(*by_model)._asdict())
    verdict = first(replicated=above(head, 0), not_replicated=below(head, 0))
    ours = f"{cell_text(head)}: {means[0]:.2f} by removal, {means[1]:.2f} by addition"
    notes += [f"models of the smaller family: {said}" for said in few(head["n"])]
    return Judgement(id, verdict, ours, n, head["low"], head["high"], _joined(notes), [head, *cells])


def identity_at_one_loop(id: str, identity: pd.DataFrame) -> Judgement:
    """The logits of every arm are bitwise equal at K = 1, in every pair."""
    if identity.empty:
        return Judgement(id, "out_of_reach", "", 0, reason="no pair at hand")
    rows = list(zip(identity["model"], identity["task"], identity["bitwise"].eq(True), strict=True))
    apart = [f"{model} on {task}" for model, task, same in rows if not same]
    points = [point(id, task=task, arm=f"{model}: arms bitwise equal", K=1, value=float(same)) for model, task, same in rows]
    ours = f"{len(rows) - len(apart)} of {len(rows)} pairs bitwise equal"
    reason = f"arms differ: {' and '.join(apart)}" if apart else ""
    return Judgement(id, "not_replicated" if apart else "replicated", ours, len(rows), reason=reason, points=points)


def norm_placement_by_call_count(id: str, placement: pd.DataFrame) -> Judgement:
    """The model-level norm's calls grow with the loop count where it was trained in the loop, and not elsewhere."""
    if placement.empty:
        return Judgement(id, "out_of_reach", "", 0, reason="no model at hand")
    shown, wrong, points = {family: [] for family in CHANGE}, [], []
    for model, family, norm, calls, acts in placement[["model", "family", "norm", "calls", "acts"]].itertuples(index=False):
        told = f"{' to '.join(map(str, calls))} calls {acts}"
        shown[family].append(told)
        at_boundary, outside = calls[-1] > calls[0] and acts == BOUNDARY, len(set(calls)) == 1 and acts == OUTSIDE
        wrong += [] if (at_boundary if family == "ouro" else outside) else [f"{model}: {norm} has {told}"]
        points.append(point(id, arm=f"{model}: {norm}, calls more at the larger loop count", value=float(calls[-1] - calls[0])))
    missing = [f"needs a model trained {TRAINED[family]} the norm" for family in CHANGE if not shown[family]]
    ours = "; ".join(f"{family} {' or '.join(dict.fromkeys(told))}" for family, told in shown.items() if told)
    verdict = first(inconclusive=bool(missing), not_replicated=bool(wrong), replicated=True)
    return Judgement(id, verdict, ours, len(placement), reason=_joined([*missing, *wrong]), points=points)


def _peak(claim_id: str, pair: Pair) -> list[dict]:
    """The intact peak over the gate's loop counts, without an interval as its K was chosen by it, and the majority floor."""
    answers, intact = pair.readings[pair.trained].answer, pair.accuracy(pair.trained)
    K = max((K for K in PEAK_AT if K <= pair.loops), key=lambda K: intact[K - 1])
    share = np.unique(answers, return_counts=True)[1].max() / len(answers)
    peak = point(claim_id, task=pair.task, arm=f"{pair.model}: intact, peak", K=K, value=intact[K - 1], n=len(answers))
    return [peak, peak | {"arm": f"{pair.model}: majority floor", "K": None, "value": float(share)}]


def value(claim: dict, pairs: list[Pair], scale: str, stand_ins: bool) -> Judgement:
    """A reported accuracy of an Ouro model, or its peak with the share of the most frequent answer.

    On stand-ins ours is the mean over one kind's pairs, the kind being the name before the comma: the deepest for
    Ouro-2.6B, the shallowest for Ouro-1.4B. The gate does not apply, and n counts pairs; a K that was not read is None.
    """
    id, at_paper = claim["id"], scale == "paper" and not stand_ins
    paper, task = (re.search(p, claim[k]).group() for p, k in ((r"Ouro-[\d.]+B", "model"), (r"circuit|hops", "task")))
    kinds = {pair.model.partition(",")[0] for pair in pairs}
    kinds = sorted(kinds, key=lambda kind: [int(digits) for digits in re.findall(r"\d+", kind)])
    kind = kinds[-1 if paper == "Ouro-2.6B" else 0] if stand_ins else paper
    chosen = [pair for pair in pairs if (pair.model.partition(",")[0], pair.task) == (kind, task)]
    if not chosen:
        return Judgement(id, "out_of_reach", "", 0, reason=f"needs {kind} on {task}")
    if isinstance(claim["metric"], list):
        points = [_peak(id, pair) for pair in chosen]
        ours = [float(np.mean([cell["value"] for cell in column])) for column in zip(*points, strict=True)]
    else:
        counts, last = np.atleast_1d(claim["K"]).tolist(), min(pair.loops for pair in chosen)
        arms = [(pair, pair.trained if claim["arm"] == "as_released" else pair.changed) for pair in chosen]
        points = [[accuracy(id, pair, period, K) for pair, period in arms] if K <= last else [] for K in counts]
        ours = [float(np.mean([cell["value"] for cell in cells])) if cells else None for cells in points]
        ours = ours if isinstance(claim["K"], list) else ours[0]
    notes = [f"the mean of {len(chosen)} pairs of {kind}" if stand_ins else "" if scale == "paper" else "takes scale paper"]
    found = claims.judge_value(claim, ours, at_paper, len(chosen), _joined([*notes, *_gate(chosen)]))
    return replace(found, points=[cell for cells in points for cell in cells])


def _check(pairs: list[Pair], identity: pd.DataFrame, placement: pd.DataFrame) -> None:
    rows = list(zip(identity["model"], identity["task"], strict=True))
    if sorted(rows) != sorted((pair.model, pair.task) for pair in pairs) or len(set(rows)) < len(rows):
        raise ValueError("identity needs one row for each pair, and no other")
    if unknown := set(placement["family"]) - set(CHANGE):
        raise ValueError(f"placement has family {' and '.join(sorted(unknown))}; known are {' and '.join(CHANGE)}")
    for pair in pairs:
        far = {len(pair.readings[p].prediction) if p in pair.readings else 0 for p in (pair.trained, pair.changed)}
        if pair.family not in CHANGE or (pair.family == "ouro") != bool(pair.trained):
            raise ValueError(f"{pair.model} is of family {pair.family}, trained with boundary period {pair.trained}")
        if len(far) > 1 or min(far) < pair.r0:
            raise ValueError(f"{pair.model} on {pair.task} needs both arms read equally far, to K = {pair.r0} at least")


def judge(pairs: list[Pair], identity: pd.DataFrame, placement: pd.DataFrame, scale: str, stand_ins: bool) -> list[Judgement]:
    """All claims of section 4.1, in the order of claims.yaml.

    identity    model, task, bitwise: whether the logits of every arm are bitwise equal at K = 1; a row a pair
    placement   model, family, norm, calls (at two loop counts), acts (a constant of `instruments`): each model's readout norm
    A pair that is not bitwise equal is left out of every other claim, and named. On stand_ins, small models trained here,
    each reason says so; reported values are judged on released weights at scale "paper" alone. Raises ValueError where
    identity does not match the pairs, or a pair contradicts its family or lacks an arm or its trained loop count.
    """
    _check(pairs, identity, placement)
    unequal = set(identity.loc[~identity["bitwise"].eq(True), ["model", "task"]].itertuples(index=False, name=None))
    of = {family: [p for p in pairs if p.family == family and (p.model, p.task) not in unequal] for family in CHANGE}
    rules = {  # the families whose pairs it is about, and the rule
        "identity_at_one_loop": ([], lambda id: identity_at_one_loop(id, identity)),
        "norm_placement_by_call_count": ([], lambda id: norm_placement_by_call_count(id, placement)),
        "removal_costs_at_budget": (["ouro"], costs),
        "removal_costs_beyond_budget": (["ouro"], partial(costs, multiples=BEYOND)),
        "removal_reaches_zero": (["ouro"], removal_reaches_zero),
        "damage_in_either_direction": (["huginn"], partial(costs, needs_p=False)),
        "asymmetry": (["ouro", "huginn"], asymmetry),
    }
    found = []
    for id, claim in ((id, claim) for id, claim in claims.load().items() if claim["section"] == "4.1"):
        families, rule = rules.get(id, (["ouro"], None))
        if absent := [f"trained {TRAINED[family]} the norm" for family in families if not of[family]]:
            j = Judgement(id, "out_of_reach", "", 0, reason=f"no pair of a model {' and '.join(absent)} at hand")
        else:
            j = rule(id, *(of[family] for family in families)) if rule else value(claim, of["ouro"], scale, stand_ins)
        lost = [f"{p.model} on {p.task}" for p in pairs if (p.model, p.task) in unequal and p.family in families]
        lost = f"discarded, arms differ at K = 1: {' and '.join(lost)}" if lost else ""
        found.append(replace(j, reason=_joined(["on stand-ins" if stand_ins else "", j.reason, lost])))
    return found
