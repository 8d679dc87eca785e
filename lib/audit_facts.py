"""What an audit's readings say: the facts of the contract report, each by a rule that stands here.

A pair is a model and a task. Pairs that pass the competence gate are judged by accuracy; where none does, and on random tokens,
an answer is right when it is the intact arm's at the trained loop count (agreement). Judged pairs are pooled, instance by
instance. Shapes: N instances, K loop counts, C clusters.
"""

import dataclasses
import math

import numpy as np
import pandas as pd

from lib import instruments, stats
from lib.audit import DOSED, DOSES, TOKENS, Subject
from lib.audit_readings import Measured
from lib.boundary import Boundary
from lib.evaluation import joined, summary
from lib.pairs import Pair, arm_name

MARGIN = 0.05  # below the value at r0 that still counts as usable, and as a readout that holds
MULTIPLES = (1, 2, 4, 8)  # of r0, where the change is priced
RESAMPLES = 2000  # of clusters, for the ends of the usable range

KEYS = {
    "model": "the model's name",
    "family": "its family, or transformers' model_type",
    "parameters": "numbers it holds, a tied matrix counted once",
    "dtype": "the type it is run in",
    "device": "where it is run",
    "read_on": "few-shot prompts, its own tasks, random tokens, or random input",
    "tasks": "names of the tasks",
    "n": "instances judged, all tasks together",
    "norms_at_boundary": "norm modules that act at the loop boundary",
    "norms_in_layers": "norm modules inside a looped layer",
    "norms_outside": "norm modules whose calls do not grow with the loop count",
    "boundary": "when the intact arm normalises its state between loop steps",
    "r0": "the trained loop count",
    "largest_loops": "the largest loop count read",
    "equal_at_one_loop": "whether every arm's logits are bitwise the same at one loop",
    "measure": "accuracy where a task is done above its floor, else agreement with the intact arm at r0",
    "value_r0": "that measure, intact, at r0",
    "usable_from": "smallest loop count of the usable range",
    "usable_to": "largest loop count of the usable range",
    "usable_from_interval": "its 95 % interval over clusters",
    "usable_to_interval": "its 95 % interval over clusters",
    "peak_loops": "the loop count of the highest value, the smallest at a tie",
    "peak_value": "the measure there",
    "change": "what the other arm does: removed or added",
    "cost_r0": "intact minus changed at r0",
    "cost_r0_interval": "its 95 % cluster-bootstrap interval",
    "cost_r0_p": "its exact McNemar p, Holm-adjusted over the costs listed",
    "costs": "rows: task (or all), K, value, low, high, n, intact_only, changed_only, p, p_holm",
    "doses": "rows: task, k (norm after every k-th step, or never), K, value",
    "by_task": "rows: task, floor, competent, accuracy_r0, peak_loops, peak_accuracy, changed_r0, changed_last",
    "readout": "rows: task, K, and what the changed arm's readout does, with its kind and a sentence",
    "failure": "the sentence at the largest loop count of the task with the lowest value there",
    "failure_kind": "its kind",
    "failure_task": "its task",
    "update_intact_r0": "relative change of the raw state in step r0, intact",
    "update_intact_last": "the same in the largest step",
    "update_changed_r0": "the same, changed arm",
    "update_changed_last": "the same in the largest step, changed arm",
    "swept": "foreign classes: rows K, state_norm, change (of the last hidden state against the next smaller K)",
    "verdict": "the sentence that sums it up",
    "notes": "what could not be done as asked",
}


def agreeing(pair: Pair) -> Pair:
    """The pair with an answer counted right where it is the intact arm's at K = r0; its floor is then 0."""
    own = pair.readings[pair.trained].prediction[pair.r0 - 1]
    readings = {period: dataclasses.replace(found, answer=own) for period, found in pair.readings.items()}
    return dataclasses.replace(pair, floor=0.0, readings=readings)


def judged(pairs: list[Pair]) -> tuple[list[Pair], str]:
    """The pairs that count, and the measure: the competent ones by accuracy, else all by agreement."""
    if pairs and pairs[0].task == TOKENS:
        return pairs, "agreement"
    competent = [pair for pair in pairs if pair.competent]
    return (competent, "accuracy") if competent else ([agreeing(pair) for pair in pairs], "agreement")


def pooled(pairs: list[Pair]) -> Pair:
    """Several pairs of one model as one, all their instances together; no cluster is shared between tasks."""
    labels, offset = [], 0
    for pair in pairs:
        _, own = np.unique(pair.cluster, return_inverse=True)
        labels.append(own + offset)
        offset += own.max() + 1
    readings = {period: joined([pair.readings[period] for pair in pairs]) for period in pairs[0].readings}
    task = pairs[0].task if len(pairs) == 1 else "all"
    return dataclasses.replace(pairs[0], task=task, cluster=np.concatenate(labels), readings=readings)


def usable(value: np.ndarray, r0: int, margin: float = MARGIN) -> tuple[int, int]:
    """The largest contiguous range of loop counts around r0 in which value (K,) is at most `margin` below its value at r0."""
    fine = value >= value[r0 - 1] - margin - 1e-9
    low, high = r0, r0
    while low > 1 and fine[low - 2]:
        low -= 1
    while high < len(value) and fine[high]:
        high += 1
    return low, high


def usable_interval(right: np.ndarray, cluster: np.ndarray, r0: int, resamples: int = RESAMPLES) -> tuple[list, list]:
    """95 % percentile intervals of the usable range's two ends, whole clusters drawn with replacement; right (K, N) bool.
    One cluster gives NaN."""
    _, place, sizes = np.unique(cluster, return_inverse=True, return_counts=True)
    if len(sizes) == 1:
        return [math.nan] * 2, [math.nan] * 2
    sums = np.stack([np.bincount(place, weights=row) for row in right])  # (K, C)
    rng, ends = np.random.default_rng(0), []
    for _ in range(resamples):
        drawn = rng.integers(len(sizes), size=len(sizes))
        ends.append(usable(sums[:, drawn].sum(axis=1) / sizes[drawn].sum(), r0))
    low, high = np.percentile(np.array(ends), [2.5, 97.5], axis=0, method="nearest").T.tolist()
    return low, high


def costs(pairs: list[Pair]) -> pd.DataFrame:
    """Intact minus changed at r0 and its MULTIPLES as far as they were read: columns task, K, value, low, high, n, intact_only,
    changed_only, p (exact McNemar), p_holm (over all rows)."""
    rows = []
    for pair in pairs:
        for K in (m * pair.r0 for m in MULTIPLES if m * pair.r0 <= pair.loops):
            intact, changed = (pair.right(period)[K - 1].astype(float) for period in (pair.trained, pair.changed))
            only = int((intact > changed).sum()), int((intact < changed).sum())
            row = {"task": pair.task, "K": K} | stats.cluster_bootstrap(intact - changed, pair.cluster)._asdict()
            rows.append(row | {"intact_only": only[0], "changed_only": only[1], "p": stats.mcnemar(*only)})
    frame = pd.DataFrame(rows)
    return frame.assign(p_holm=stats.holm(frame["p"]))


def dose_name(period: int) -> str:
    """A boundary as a dose."""
    return str(period) if period else "never"


def doses(pairs: list[Pair]) -> pd.DataFrame:
    """The measure with the norm after every k-th step at r0, 2 r0 and 4 r0 as far as read: columns task, k, K, value."""
    rows = []
    for pair in pairs:
        for K in (m * pair.r0 for m in MULTIPLES if m <= DOSED and m * pair.r0 <= pair.loops):
            rows += [(pair.task, dose_name(k), K, float(pair.accuracy(k)[K - 1])) for k in DOSES]
    return pd.DataFrame(rows, columns=["task", "k", "K", "value"])


def failure(row: dict, loss: float, vocab_size: int, text: str = "") -> tuple[str, str]:
    """How a readout fails, as a kind and a sentence; the first of these that holds:

    holds: it lost at most MARGIN against the intact arm at r0. one token: at least 0.9 of the inputs get the same token.
    undecided: the mean entropy is at least half that of a uniform readout. off the alphabet: under half of its answers are
    possible answers of the task (never where there is no task). wrong answers: else.
    row: of `evaluation.summary`; in_alphabet_share NaN without a task. text: what the modal token reads as.
    """
    bits, most = row["entropy_bits"], math.log2(vocab_size)
    share = row["in_alphabet_share"]
    token = f"token {row['modal_token']}" + (f" ({text!r})" if text else "")
    if loss <= MARGIN:
        return "holds", f"The readout holds: it loses {loss:.2f} against the intact arm."
    if row["modal_share"] >= 0.9:
        inside = "" if math.isnan(share) else ", inside the alphabet" if share >= 0.5 else ", outside the alphabet"
        said = f"It gives one token, {token}{inside}, to {row['modal_share']:.0%} of the inputs"
        return "one token", f"{said}, at {bits:.1f} of {most:.1f} bits."
    if bits >= most / 2:
        said = f"It spreads over the vocabulary: {bits:.1f} of {most:.1f} bits"
        return "undecided", f"{said}, and its commonest token takes {row['modal_share']:.0%} of the inputs."
    if share < 0.5:
        return "off the alphabet", f"It leaves the task's alphabet: only {share:.0%} of its answers are possible ones."
    return (
        "wrong answers",
        f"It decides ({bits:.1f} of {most:.1f} bits) and errs: it loses {loss:.2f} against the intact arm.",
    )


def readout(s: Subject, pairs: list[Pair], text=None) -> pd.DataFrame:
    """What the changed arm's readout does at r0 and at the largest loop count: columns task, K, value (the measure), kind,
    said, and those of `evaluation.summary`, with modal_text."""
    rows = []
    for pair in pairs:
        frame = summary(pair.readings[pair.changed], pair.alphabet).set_index("K", drop=False)
        best = pair.accuracy(pair.trained)[pair.r0 - 1]
        for K in sorted({pair.r0, pair.loops}):
            row = frame.loc[K].to_dict() | {"K": K, "modal_token": int(frame.loc[K, "modal_token"])}
            if pair.task == TOKENS:
                row["in_alphabet_share"] = math.nan
            named = text(row["modal_token"]) if text else ""
            kind, said = failure(row, float(best - row["accuracy"]), s.config.vocab_size, named)
            row |= {
                "task": pair.task,
                "value": row.pop("accuracy"),
                "modal_text": repr(named) if text else "",
                "kind": kind,
                "said": said,
            }
            rows.append(row)
    return pd.DataFrame(rows)


def facts(s: Subject, read: Measured) -> dict:
    """The report's facts, keys as in KEYS; an audit leaves out those it has no number for."""
    acts = read.norms["acts"].value_counts()
    found = {
        "model": s.name,
        "family": s.family,
        "parameters": s.parameters,
        "dtype": s.dtype,
        "device": s.device,
        "read_on": s.read_on,
        "norms_at_boundary": int(acts.get(instruments.BOUNDARY, 0)),
        "norms_in_layers": int(acts.get(instruments.LAYER, 0)),
        "norms_outside": int(acts.get(instruments.OUTSIDE, 0)),
        "r0": s.r0,
        "largest_loops": s.loops,
        "notes": list(s.notes),
    }
    if not read.pairs:
        return found | {"n": s.n, "swept": read.swept.to_dict("records"), "verdict": _of_a_foreign_class(found, read.swept)}
    pairs, measure = judged(read.pairs)
    whole = pooled(pairs)
    priced = costs([whole, *pairs] if len(pairs) > 1 else pairs)
    first = priced.iloc[0]
    value = whole.accuracy(whole.trained)
    ends = usable(value, s.r0)
    intervals = usable_interval(whole.right(whole.trained), whole.cluster, s.r0)
    said = readout(s, pairs, read.text)
    worst = said.loc[said.loc[said["K"] == s.loops, "value"].idxmin()]
    unfit = [pair.task for pair in read.pairs if not pair.competent]
    judge = "is not judged" if measure == "accuracy" else "is judged by agreement with the intact arm at r0"
    found["notes"] += [f"The task {task} does not pass the competence gate and {judge}." for task in unfit]
    found |= {
        "tasks": [pair.task for pair in pairs],
        "n": len(whole.cluster),
        "boundary": str(Boundary(s.trained)),
        "equal_at_one_loop": all(read.same.values()),
        "measure": measure,
        "value_r0": float(value[s.r0 - 1]),
        "usable_from": ends[0],
        "usable_to": ends[1],
        "usable_from_interval": intervals[0],
        "usable_to_interval": intervals[1],
        "peak_loops": int(value.argmax()) + 1,
        "peak_value": float(value.max()),
        "change": arm_name(whole, whole.changed),
        "cost_r0": first["value"],
        "cost_r0_interval": [first["low"], first["high"]],
        "cost_r0_p": first["p_holm"],
        "costs": priced.to_dict("records"),
        "doses": doses(pairs).to_dict("records"),
        "by_task": [_task(pair) for pair in read.pairs if pair.task != TOKENS],
        "readout": said.to_dict("records"),
        "failure": worst["said"],
        "failure_kind": worst["kind"],
        "failure_task": worst["task"],
    }
    moved = read.updates.groupby(["period", "K"])["value"].mean()
    for name, period in (("intact", whole.trained), ("changed", whole.changed)):
        found |= {f"update_{name}_{at}": float(moved[period, K]) for at, K in (("r0", s.r0), ("last", s.loops))}
    return found | {"verdict": verdict(found)}


def _place(found: dict) -> str:
    """Where the norm sits, in words."""
    n = found["norms_at_boundary"]
    return f"{n or 'No'} norm{'s' if n > 1 else ''} act{'' if n > 1 else 's'} at the loop boundary"


def _of_a_foreign_class(found: dict, swept: pd.DataFrame) -> str:
    """The verdict where no boundary can be changed."""
    said = _place(found)
    if len(swept) > 1:
        before, last = swept["K"].iloc[-2], swept.iloc[-1]
        said += f"; from {before:.0f} to {last['K']:.0f} loops its last hidden state changes by {last['change']:.2g}"
    return f"{said}; boundary interventions need a loader."


def _task(pair: Pair) -> dict:
    """One task's accuracy, whatever the gate says."""
    intact, changed = pair.accuracy(pair.trained), pair.accuracy(pair.changed)
    return {
        "task": pair.task,
        "n": len(pair.cluster),
        "floor": pair.floor,
        "competent": pair.competent,
        "accuracy_r0": float(intact[pair.r0 - 1]),
        "peak_loops": int(intact.argmax()) + 1,
        "peak_accuracy": float(intact.max()),
        "changed_r0": float(changed[pair.r0 - 1]),
        "changed_last": float(changed[-1]),
    }


def verdict(found: dict) -> str:
    """One sentence on the change at r0. It counts when the interval leaves 0 out and the Holm-adjusted McNemar p is below 0.05:
    then a cost makes the boundary, as trained, a part of the model's contract. Agreement alone cannot tell worse from other."""
    value, (low, high) = found["cost_r0"], found["cost_r0_interval"]
    removed = found["change"] == "removed"
    if found["r0"] == 1:
        return "The model is trained for one loop step, where a boundary norm cannot act: nothing to remove or add at r0."
    counts = found["cost_r0_p"] < 0.05 and (low > 0 or high < 0)
    alone = "Removing the boundary norm" if removed else "Adding a boundary norm"
    if found["measure"] == "agreement":
        if not counts:
            return f"{alone} changes no measurable share of the answers at r0 ({value:.2f} [{low:.2f}, {high:.2f}])."
        share = f"{value:.2f} [{low:.2f}, {high:.2f}]"
        return f"{alone} changes {share} of the answers at r0; whether for the worse, no task here can tell."
    if not counts:
        return f"{alone} costs nothing measurable at r0 ({value:.2f} [{low:.2f}, {high:.2f}])."
    doing = "removing it" if removed else "adding one"
    if value > 0:
        what = "The boundary norm" if removed else "A loop boundary without a norm"
        return f"{what} is part of this model's contract: {doing} costs {value:.2f} [{low:.2f}, {high:.2f}] at r0."
    what = "The boundary norm costs this model accuracy" if removed else "A boundary norm helps this model"
    return f"{what}: {doing} gains {-value:.2f} [{-high:.2f}, {-low:.2f}] at r0."
