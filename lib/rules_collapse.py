"""The rules of the contract paper's section 4.2: the readout collapses, the scale of the state does not.

One function per claim, named after its id; the rule's text is in params/claims.yaml. A pair (`pairs.Pair`) is a model and a
task. The claims are about the removed arm, boundary period 0, of pairs trained with the norm, family "ouro". Intervals are
cluster bootstraps over skeletons; what is compared within a pair shares the drawn skeletons. A claim is as good as the worst
of its competent pairs; the others keep their cells, and pairs without the readings that a rule needs are left out and
counted. The rules' last loop count is 32, or K_max where that is lower. Cells are the dicts of `claims.point`.
"""

import re
from collections import Counter
from dataclasses import replace

import numpy as np

from lib import claims
from lib.boundary import Boundary
from lib.claims import Judgement, point
from lib.pairs import EVERY, NEVER, PEAK_AT, Pair
from lib.probe import Probe
from lib.rules import ROUNDING, above, below, cell_text, first

DOSES = (EVERY, 2, 3, 4, 8, NEVER)
OVERSHOOTS = (1, 2, 4)
LAST, CHANCE, LEAST_FALL, THRESHOLD = 32, 0.05, 0.05, 0.8
ENTROPY, GAP, MODAL = "readout_entropy_bits", "top1_minus_top2_logit", "modal_share"


def resampled(values, cluster, seed: int = 0, resamples: int = 10_000) -> tuple[np.ndarray, np.ndarray]:
    """Means (M,) of values (M, N) and their draws (M, resamples), whole clusters drawn with replacement; cluster (N,).

    A row's draws are those of `stats.cluster_bootstrap`, and all rows share the drawn clusters. One cluster gives draws of
    NaN. Raises ValueError unless values and cluster are of equally many instances, one or more.
    """
    values, (_, index, sizes) = np.asarray(values, float), np.unique(cluster, return_inverse=True, return_counts=True)
    if not index.size == values.shape[1] > 0:
        raise ValueError(f"values are of {values.shape[1]} instances, cluster of {index.size}: must be equal and above 0")
    draws = np.full((len(values), resamples), np.nan)
    sums, rng = np.stack([np.bincount(index.ravel(), weights=row) for row in values], axis=1), np.random.default_rng(seed)
    for start in range(0, resamples if sizes.size > 1 else 0, 1000):  # bounds the memory at many clusters
        drawn = rng.integers(sizes.size, size=(min(1000, resamples - start), sizes.size))
        places = drawn + sizes.size * np.arange(len(drawn))[:, None]
        times = np.bincount(places.ravel(), minlength=places.size).reshape(places.shape).astype(float)
        with np.errstate(invalid="ignore"):  # a norm that overflowed
            draws[:, start : start + len(drawn)] = (times @ sums / (times @ sizes)[:, None]).T
    return values.mean(axis=1), draws


def measures(pair: Pair, period: int) -> dict[str, np.ndarray]:
    """By metric, what it is the mean of over instances, each (K_max, N) floats; a K's modal token is its most frequent one, of
    equally frequent ones the smallest id. Raises KeyError without the period's readings."""
    found = pair.readings[period]
    modal = [row == np.bincount(row).argmax() for row in found.prediction]
    rows = {"accuracy": pair.right(period), ENTROPY: found.entropy, GAP: found.gap, MODAL: modal}
    return {metric: np.asarray(values, float) for metric, values in rows.items()}


def _cell(claim_id, pair, arm: str, K, value, draws, n=None) -> dict:
    """The cell of a value and its draws; what is not finite is None."""
    low, high = np.percentile(draws, [2.5, 97.5]) if np.isfinite(draws).all() else (None, None)
    ends = {"value": value if np.isfinite(value) else None, "low": low, "high": high}
    return point(claim_id, task=pair.task, arm=f"{pair.model}, {arm}", K=K, n=n or pair.cluster.size, **ends)


def mean_cells(claim_id: str, pair: Pair, period: int, metric: str, loops: list[int]) -> list[dict | None]:
    """The cell of a metric's mean at each loop count; None beyond K_max or without the period's readings."""
    if not (at := [K for K in loops if period in pair.readings and K <= pair.loops]):
        return [None for _ in loops]
    found = resampled(measures(pair, period)[metric][np.array(at) - 1], pair.cluster)
    arm = f"{Boundary(period) if period else 'removed'}: {metric.replace('_', ' ')}"
    cells = {K: _cell(claim_id, pair, arm, K, *of) for K, *of in zip(at, *found, strict=True)}
    return [cells.get(K) for K in loops]


def norm_ratios(claim_id: str, pair: Pair) -> list[dict]:
    """A cell per K in {1, 2, 4, .. 32}: mean raw-state norm of the changed arm over that at K = 1, a ratio of means."""
    at, arm = [K for K in PEAK_AT if K <= pair.loops], "added" if pair.changed else "removed"
    means, draws = resampled(pair.readings[pair.changed].norm[np.array(at) - 1], pair.cluster)
    return [_cell(claim_id, pair, f"{arm}: norm ratio", *of) for of in zip(at, means / means[0], draws / draws[0], strict=True)]


def _span(values, form: str = ".2f") -> str:
    ends = [format(end(values), form) for end in (min, max)]
    return " to ".join(dict.fromkeys(ends))


def _largest(cells: list[dict]) -> tuple[dict, str]:
    """The cell of the largest value, and its text; one that is not finite is larger than any."""
    cell = max(cells, key=lambda cell: np.inf if cell["value"] is None else cell["value"])
    return cell, "infinite" if cell["value"] is None else cell_text(cell).removeprefix("+")


def _deciding(found: list[tuple]) -> list[tuple]:
    """The entries (pair, ..) of competent pairs, or all of them where no pair is competent."""
    return [entry for entry in found if entry[0].competent] or found


def _worst(id: str, found: list[tuple], ours: str, notes=(), head=None, of="pairs", needs="") -> Judgement:
    """The worst of the verdicts that competent pairs have, n counting the pairs behind it; found: (pair, verdict, cells).
    out_of_reach where no competent pair has the readings, not_competent where no pair is competent."""
    able = [(pair, verdict) for pair, verdict, _ in found if pair.competent]
    known = [(pair, verdict) for pair, verdict in able if verdict != "out_of_reach"]
    verdict = claims.worst([v for _, v in known]) if known else "out_of_reach" if able else "not_competent"
    every, competent, n = (len({(pair.model, pair.task) for pair, *_ in entries}) for entries in (found, able, known))
    tally, failed = Counter(v for _, v in able), [f"{pair.model} on {pair.task}" for pair, *_ in found if not pair.competent]
    told = [f"{competent} of {every} pairs competent"]
    told[0] += f", all but {' and '.join(dict.fromkeys(failed))}" if able and failed else ""
    told += [f"{of}: " + ", ".join(f"{tally[v]} {v}".replace("_", " ") for v in claims.VERDICTS if tally[v])] if able else []
    told += [needs] if len(known) < len(able) else []
    low, high = (head["low"], head["high"]) if head else (None, None)
    return Judgement(id, verdict, ours, n, low, high, "; ".join([*told, *notes]), [c for *_, cells in found for c in cells])


def state_norm_bounded(claim: dict, pairs: list[Pair], added: list[Pair]) -> Judgement:
    """Every ratio of the removed arm's norm to that at K = 1 lies below the bound, which no ratio does that is not finite.
    Those of `added`, pairs trained without the norm, are told and decide nothing."""
    id, bound, found = claim["id"], claim["bound"], []
    for pair in pairs:
        for cell in norm_ratios(id, pair):
            over = cell["value"] is None or above(cell, bound)
            found.append((pair, first(not_replicated=over, replicated=below(cell, bound)), [cell]))
    head, most = _largest([cell for *_, [cell] in _deciding(found)])
    notes = [f"removed accuracy at the last K {_span([pair.accuracy(NEVER)[-1] for pair, *_ in _deciding(found)])}"]
    if beside := [cell for pair in added if pair.changed in pair.readings for cell in norm_ratios(id, pair)]:
        notes += [f"Huginn-like states are bounded by their block's own output norm: ratio at most {_largest(beside)[1]}"]
    judged = _worst(id, found, f"ratio at most {most} at K = {head['K']}", notes, head, of="cells")
    return replace(judged, points=judged.points + beside)


def stages(claim_id: str, pair: Pair) -> tuple[str, list[bool], list[dict]]:
    """A pair's verdict on the two stages, whether (a), (b) and (c) hold, and the cells: five contrasts, entropy at each K.

    K* has the removed arm's highest mean entropy; that it was chosen on the same instances is not in the intervals.
    (a) the paired intervals of entropy at K* minus that at either end lie above 0; with K* at an end none does.
    (b) those of the logit gap and of the share of each K's own modal token, last K minus K*, lie above 0.
    (c) is the rule's. All three: replicated; (a) and (b): same_direction. Else not_replicated where an interval excludes the
    claim: entropy at an end lies above that at every K between (no peak inside); or (a) holds and an interval of (b) lies below
    0 (the head commits less after the peak); or the last modal token is an answer and the interval of the in-alphabet share
    lies above 0.5 (the head does not leave the format). Else inconclusive.
    """
    last, own = min(pair.loops, LAST), measures(pair, NEVER)
    entropy, gap, modal = (own[metric][:last] for metric in (ENTROPY, GAP, MODAL))
    inside = np.isin(pair.readings[NEVER].prediction[last - 1], pair.alphabet)
    peak = int(entropy.mean(axis=1).argmax())
    means, draws = resampled([*entropy, gap[-1] - gap[peak], modal[-1] - modal[peak], inside], pair.cluster)

    def cell(arm, K, row, minus=None):
        less = (0, 0) if minus is None else (means[minus], draws[minus])
        return _cell(claim_id, pair, f"removed: {arm}", K, means[row] - less[0], draws[row] - less[1])

    rise, fall = (cell(f"entropy at K - at {end + 1}", peak + 1, peak, end) for end in (0, last - 1))
    wider, firmer = (cell(f"{what} at K - at {peak + 1}", last, at - 3) for at, what in enumerate(("logit gap", "modal share")))
    share, answers = cell("in-alphabet share", last, -1), bool(inside[modal[-1] > 0].all())
    a, b = (all(above(contrast, 0) for contrast in part) for part in ((rise, fall), (wider, firmer)))
    c = not answers and share["value"] < 0.5
    between = draws[1 : last - 1]
    over = [np.percentile(draws[end] - between, 2.5, axis=1) > ROUNDING for end in (0, last - 1) if len(between)]
    excluded = any(at.all() for at in over) or a and (below(wider, 0) or below(firmer, 0)) or answers and above(share, 0.5)
    verdict = first(replicated=a and b and c, same_direction=a and b, not_replicated=excluded)
    return verdict, [a, b, c], [rise, fall, wider, firmer, share, *(cell("entropy", K + 1, K) for K in range(last))]


def two_stage_collapse(claim: dict, pairs: list[Pair]) -> Judgement:
    """Entropy peaks inside (a), then the head commits (b) to a token that is no answer (c): `stages` of every pair."""
    found = [(pair, *stages(claim["id"], pair)) for pair in pairs]
    shown, short = _deciding(found), {pair.loops for pair, *_ in _deciding(found) if pair.loops < LAST}
    bits = [[cells[at]["value"] for at in (5, 4 + cells[0]["K"], -1)] for *_, cells in shown]
    held = zip("abc", np.sum([held for _, _, held, _ in shown], axis=0), strict=True)
    notes = [", ".join(f"({part}) held for {n}" for part, n in held) + f" of {len(shown)} pairs"]
    notes += [f"K_max = {_span(short, 'd')} stands for the rule's {LAST}"] if short else []
    one, top, last = (_span(values, ".1f") for values in np.array(bits, float).T)
    ours = f"entropy {one} bits at 1, {top} at K* = {_span([c[0]['K'] for *_, c in shown], 'd')}, {last} at the last K"
    return _worst(claim["id"], [(pair, verdict, cells) for pair, verdict, _, cells in found], ours, notes)


def probe_cells(claim_id: str, pair: Pair, probes: list[Probe]) -> list[dict]:
    """The cells of accuracy minus floor, of accuracy and of floor of the pair's probe at K = r0; none without such a probe."""
    probe = next((p for p in probes if (p.model, p.task, p.K) == (pair.model, pair.task, pair.r0)), None)
    if probe is None:
        return []
    right, floor = (np.asarray(values, float) for values in (probe.right, probe.floor_right))
    found = zip(("excess", "accuracy", "floor"), *resampled([right - floor, right, floor], probe.cluster), strict=True)
    return [_cell(claim_id, pair, f"removed: probe {arm}", probe.K, *of, right.size) for arm, *of in found]


def answer_not_linear(claim: dict, pairs: list[Pair], probes: list[Probe]) -> Judgement:
    """At the trained loop count the probe's accuracy exceeds its floor by less than 0.05."""
    id, found = claim["id"], []
    for pair in pairs:
        cells = probe_cells(id, pair, probes)
        verdict = first(replicated=below(cells[0], CHANCE), not_replicated=above(cells[0], CHANCE)) if cells else "out_of_reach"
        found.append((pair, verdict, cells))
    read = [entry for entry in found if entry[-1]]
    head, most = _largest([cells[0] for *_, cells in _deciding(read)]) if read else (None, "")
    ours = f"probe - floor at most {most} at K = {head['K']}" if head else ""
    return _worst(id, found, ours, head=head, needs="out of reach without a probe of the removed arm at K = r0")


def dose_is_a_threshold(claim: dict, pairs: list[Pair]) -> Judgement:
    """At 4 r0 two adjacent periods hold at least 80 % of the fall in accuracy from a norm at every step to none."""
    id, found, falls = claim["id"], [], []
    for pair in pairs:
        rows = [mean_cells(id, pair, k, "accuracy", [times * pair.r0 for times in OVERSHOOTS]) for k in DOSES]
        verdict, cells = "out_of_reach", [cell for row in rows for cell in row if cell]
        if all(row[-1] for row in rows):
            steps = -np.diff([row[-1]["value"] for row in rows])
            whole, i = steps.sum(), steps.argmax()
            sharp = steps[i] >= THRESHOLD * whole - ROUNDING
            verdict = first(inconclusive=whole < LEAST_FALL - ROUNDING, replicated=sharp, not_replicated=True)
            falls.append((pair, whole, steps[i], f"{DOSES[i]} to {DOSES[i + 1] or 'never'}"))
        found.append((pair, verdict, cells))
    shown = _deciding(falls)
    clear = [(step / whole, where) for _, whole, step, where in shown if whole >= LEAST_FALL - ROUNDING]
    ours = f"whole fall {_span([whole for _, whole, *_ in shown])}" if shown else ""
    ours += f", largest step {_span([part for part, _ in clear])} of it" if clear else ""
    steps = Counter(where for _, where in clear).items()
    notes = ["largest step from k = " + ", ".join(f"{where} in {n}" for where, n in steps)] if steps else []
    for K in sorted({pair.r0 * times for pair in pairs for times in OVERSHOOTS}):
        same = [str(k) for k in DOSES if k >= K]  # these fire at no boundary before the readout
        notes += [f"k = {', '.join(same)} and never are the same arm at K = {K}"] if same else []
    return _worst(id, found, ours, notes, needs="out of reach without k = 1, 2, 3, 4, 8 and never at K = 4 r0")


def _numbers(claim: dict, pair: Pair, probes: list[Probe]) -> list[dict | None]:
    """A cell for each number of a reported value, in its order; "4 or sparser" is the first of 4, 8 and never at hand."""
    id, metric = claim["id"], claim["metric"]
    if id == "linear_probe_at_chance":
        return probe_cells(id, pair, probes)[1:] or [None, None]
    if id == "dose_values":
        periods = (EVERY, 2, next(k for k in (4, 8, NEVER) if k in pair.readings))
        return [mean_cells(id, pair, k, m, [pair.r0])[0] for k in periods for m in metric]
    loops = [int(re.search(r"\d+", str(K)).group()) for K in np.atleast_1d(claim["K"])]
    return mean_cells(id, pair, NEVER, metric, loops)


def value(claim: dict, pairs: list[Pair], probes: list[Probe], scale: str, stand_ins: bool) -> Judgement:
    """A reported number against that of its model on circuit, Ouro-2.6B where it names none.

    On stand-ins ours is the mean over the pairs of the deepest kind, the name before the comma. The gate does not apply; n
    counts the competent pairs among them. A number that was not read is None.
    """
    named = re.search(r"Ouro-[\d.]+B", claim.get("model") or "Ouro-2.6B").group()
    on = [(pair.model.partition(",")[0], pair) for pair in pairs if pair.task == "circuit"]
    depths = sorted({kind for kind, _ in on}, key=lambda kind: [int(d) for d in re.findall(r"\d+", kind)])
    kind = (depths or ["a pair"])[-1] if stand_ins else named
    chosen = [pair for of, pair in on if of == kind]
    if not chosen:
        return Judgement(claim["id"], "out_of_reach", "", 0, reason=f"needs {kind} on circuit")
    cells = [_numbers(claim, pair, probes) for pair in chosen]
    read = [[cell["value"] for cell in column if cell and cell["value"] is not None] for column in zip(*cells, strict=True)]
    ours = np.array([np.mean(of) if of else None for of in read], dtype=object).reshape(np.shape(claim["value"])).tolist()
    n, at_paper = sum(pair.competent for pair in chosen), scale == "paper" and not stand_ins
    notes = [] if stand_ins or at_paper else ["takes scale paper"]
    notes += [f"{kind} on circuit: {n} of {len(chosen)} pairs competent"]
    notes += ["not every number was read"] if min(map(len, read)) < len(chosen) else []
    judged = claims.judge_value(claim, ours, at_paper, n, "; ".join(notes))
    return replace(judged, points=[cell for row in cells for cell in row if cell])


def judge(pairs: list[Pair], probes: list[Probe], scale: str, stand_ins: bool) -> list[Judgement]:
    """All claims of section 4.2, in the order of claims.yaml; out_of_reach without a pair of family "ouro".

    probes are of the removed arm's states. With stand_ins the models were trained here, and each reason says so; the reported
    values are judged on released weights at scale "paper" alone.
    """
    ouro, others = ([pair for pair in pairs if (pair.family == "ouro") == own] for own in (True, False))
    rules = {
        "state_norm_bounded": lambda claim: state_norm_bounded(claim, ouro, others),
        "two_stage_collapse": lambda claim: two_stage_collapse(claim, ouro),
        "answer_not_linear": lambda claim: answer_not_linear(claim, ouro, probes),
        "dose_is_a_threshold": lambda claim: dose_is_a_threshold(claim, ouro),
    }
    found, said = [], ["on stand-ins"] if stand_ins else []
    for claim in (claim for claim in claims.load().values() if claim["section"] == "4.2"):
        j = Judgement(claim["id"], "out_of_reach", "", 0, reason="no pair of a model trained with the norm at hand")
        if ouro:
            j = value(claim, ouro, probes, scale, stand_ins) if claim["kind"] == "value" else rules[claim["id"]](claim)
        found.append(replace(j, reason="; ".join([*said, j.reason])))
    return found
