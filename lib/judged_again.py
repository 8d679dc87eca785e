"""The claims judged again from a notebook's committed tables, without a model.

A notebook's csv files are read back into the frames that its rules take. The rules of sections 4.1 and 4.2 ask for every
instance, which no table holds. There accuracies, counts, p-values and gates are made again, and an interval that no table holds
is the one that result.json records: `RECORDED` says which.
"""

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd

from lib import (
    at_hand,
    experiment,
    pair_jobs,
    pairs,
    rules_asymmetry,
    rules_beyond,
    rules_collapse,
    rules_dense_axes,
    rules_moe,
    rules_overshoot,
    rules_refit,
    rules_scratch,
    standins,
    stats,
)
from lib.claims import Judgement, point
from lib.evaluation import Readings
from lib.pairs import EVERY, NEVER, PEAK_AT, Pair
from lib.tasks import evaluation_set

METRICS = {"accuracy": "accuracy", rules_collapse.ENTROPY: "entropy_bits", rules_collapse.GAP: "logit_gap"}
METRICS |= {rules_collapse.MODAL: "modal_share"}  # as the rules name them -> as the tables do


class Tables:
    """The tables of one notebook's folder, each read once it is asked for; FileNotFoundError where it is not there."""

    def __init__(self, folder: Path, result: dict):
        self.folder, self.result, self.params = folder, result, result["params"]

    def __call__(self, name: str) -> pd.DataFrame:
        """The table, depths as text."""
        return pd.read_csv(self.folder / f"{name}.csv", dtype={"d_star": str})

    def has(self, name: str) -> bool:
        """Whether the notebook wrote that table."""
        return (self.folder / f"{name}.csv").exists()

    def whole(self) -> pd.DataFrame:
        """The accuracies over all depths."""
        frame = self("accuracy")
        return frame[frame["d_star"] == "all"]


def _scratch(t: Tables) -> list[Judgement]:
    read = (t.whole(), t("state_norm"), t("swapped"), t("floors"))
    return rules_scratch.judge(*read, t.params["r0"], t.params["scale"])


def _refit(t: Tables) -> list[Judgement]:
    return rules_refit.judge(t("refits"), t("intact"), t("floors"), t.params["r0"], t.params["scale"])


def _overshoot(t: Tables) -> list[Judgement]:
    return rules_overshoot.judge(t.whole(), experiment.splits(t.params), t("flops"), t("floors"), t.params["scale"])


def _damping(t: Tables) -> list[Judgement]:
    rescaled = t("rescaled")
    accuracy = rescaled[rescaled["run"] == "own length"]
    return rules_beyond.judge_damping(experiment.metric(t("steps"), "relative"), accuracy, t("floors"), t.params["r0"])


def _readout_axis(t: Tables) -> list[Judgement]:
    return rules_beyond.judge_readout_axis(t.whole(), t("floors"), t.params["r0"])


def _dense(t: Tables) -> list[Judgement]:
    return rules_dense_axes.judge_dense(t("scores"), t("floors"), _layers(t), t.params["scale"])


def _moe(t: Tables) -> list[Judgement]:
    return rules_moe.judge_moe(t("scores"), t("floors"), t("balance"), t("interventions"), t.params["scale"])


def _layers(t: Tables) -> pd.DataFrame:
    """The counts of `shapes_match`: a table where there is one, else as they are recorded in its points."""
    if t.has("counts"):
        return t("counts")
    rows = {}
    for cell in t.result["points"]:
        if cell["id"] == "shapes_match":
            name, _, key = cell["arm"].partition(", layers ")
            rows.setdefault(name, {"name": name})[key] = int(cell["value"])
    return pd.DataFrame(list(rows.values()), columns=["name", "stored", "executed"])


def _asymmetry(t: Tables) -> list[Judgement]:
    accuracy, costs, placement = t("accuracy"), t("costs"), t("placement")
    placement["calls"] = placement["calls"].map(ast.literal_eval)
    found, beside, known = _pairs(t, accuracy, costs), costs.set_index(["model", "task", "K"]), _recorded(t)

    def loss(claim_id: str, pair: Pair, K: int) -> dict:
        ends = beside.loc[pair.model, pair.task, K][["low", "high"]]
        arm = f"{pair.model}: intact - {rules_asymmetry.CHANGE[pair.family]}"
        value = rules_asymmetry.differences(pair, K).mean()
        return point(claim_id, task=pair.task, arm=arm, K=K, value=value, n=pair.cluster.size, **ends)

    def of_arm(claim_id: str, pair: Pair, period: int, K: int) -> dict:
        arm = f"{pair.model}: {pairs.arm_name(pair, period)}"
        ends = known(claim_id, pair.task, arm, K)
        return point(claim_id, task=pair.task, arm=arm, K=K, value=pair.accuracy(period)[K - 1], n=pair.cluster.size, **ends)

    def nested(first, second) -> stats.Interval:
        removed, added = (np.mean([d.mean() for model in family for d, _ in model]) for family in (first, second))
        ends = known("asymmetry", None, "loss by removal - loss by addition", None)
        return stats.Interval(removed - added, *ends.values(), min(len(first), len(second)))

    drawn = SimpleNamespace(mcnemar=stats.mcnemar, holm=stats.holm, nested_bootstrap=nested)
    with _instead(rules_asymmetry, loss=loss, accuracy=of_arm, stats=drawn):
        judged = rules_asymmetry.judge(found, t("identity"), placement, t.params["scale"], True)
    return at_hand.noted(judged, t("training"))


def _collapse(t: Tables) -> list[Judgement]:
    readings, probe = t("readings"), t("probe").set_index(["model", "task"])
    found, known = _pairs(t, readings[readings["metric"] == "accuracy"]), _recorded(t)
    values = readings.set_index(["model", "task", "arm", "metric", "K"])["value"].to_dict()

    def cell(claim_id: str, pair: Pair, arm: str, K: int, value: float, ends=None) -> dict:
        arm = f"{pair.model}, {arm}"
        ends = known(claim_id, pair.task, arm, K) if ends is None else ends
        return point(claim_id, task=pair.task, arm=arm, K=K, value=value, n=pair.cluster.size, **ends)

    def mean_cells(claim_id: str, pair: Pair, period: int, metric: str, loops: list[int]) -> list[dict]:
        name = f"{rules_collapse.Boundary(period) if period else 'removed'}: {metric.replace('_', ' ')}"
        own = (pair.model, pair.task, pairs.arm_name(pair, period), METRICS[metric])
        return [cell(claim_id, pair, name, K, values[*own, K]) if (*own, K) in values else None for K in loops]

    def norm_ratios(claim_id: str, pair: Pair) -> list[dict]:
        arm = pairs.arm_name(pair, pair.changed)
        own = (pair.model, pair.task, arm, "norm_ratio")
        return [cell(claim_id, pair, f"{arm}: norm ratio", K, values[*own, K]) for K in PEAK_AT if K <= pair.loops]

    def probe_cells(claim_id: str, pair: Pair, _) -> list[dict]:
        row, name = probe.loc[(pair.model, pair.task)], "removed: probe {}".format
        excess = cell(claim_id, pair, name("excess"), pair.r0, row["probe"] - row["floor"], row[["low", "high"]])
        each = {"accuracy": row["probe"], "floor": row["floor"]}
        return [excess, *(cell(claim_id, pair, name(of), pair.r0, value) for of, value in each.items())]

    def two_stages(claim: dict, _) -> Judgement:  # compares draws of every K, of which nothing is kept
        points = [_entropy(at, values) for at in t.result["points"] if at["id"] == claim["id"]]
        told = next(v for v in t.result["verdicts"] if v["id"] == claim["id"])
        return Judgement(**told | {"reason": told["reason"].removeprefix("on stand-ins; ")}, points=points)

    made = {"mean_cells": mean_cells, "norm_ratios": norm_ratios, "probe_cells": probe_cells, "two_stage_collapse": two_stages}
    with _instead(rules_collapse, **made):
        judged = rules_collapse.judge(found, [], t.params["scale"], True)
    noted = {j.id: j for j in at_hand.noted(judged, t("training"))}
    return [j if j.id == "two_stage_collapse" else noted[j.id] for j in judged]  # that one has its note already


def _entropy(cell: dict, values: dict) -> dict:
    """A recorded cell of two_stage_collapse with its value from the tables, where they hold its entropy at its K."""
    model, _, arm = cell["arm"].partition(", removed: ")
    at = {"entropy": (cell["K"],), f"entropy at K - at {PEAK_AT[0]}": (cell["K"], PEAK_AT[0])}
    at |= {f"entropy at K - at {PEAK_AT[-1]}": (cell["K"], PEAK_AT[-1])}
    read = [values.get((model, cell["task"], "removed", "entropy_bits", K)) for K in at.get(arm, (None,))]
    return cell if None in read else cell | {"value": read[0] - sum(read[1:])}


def _pairs(t: Tables, accuracy: pd.DataFrame, costs: pd.DataFrame | None = None) -> list[Pair]:
    """Pairs that read what the tables say: as many right answers in each arm at every K, and as many that one arm alone has.

    Which instances those are no table says, nor what the other arms predicted. Raises ValueError where two tables disagree.
    """
    p, found = t.params, []
    sets = {task.family: _test_set(task, p["n_test"]) for task in standins.mixture(p).tasks}
    alone = {} if costs is None else costs.set_index(["model", "task", "K"])[["intact_only", "changed_only"]].T.to_dict("list")
    for (model, family, task), rows in accuracy.groupby(["model", "family", "task"], sort=False):
        floor, cluster, d_star, answer = sets[task]
        right = {arm: np.zeros((rows["K"].max(), len(answer)), bool) for arm in rows["arm"].unique()}
        counts = {(row.arm, row.K): round(row.value * len(answer)) for row in rows.itertuples()}
        for (arm, K), n in counts.items():
            right[arm][K - 1, :n] = True
            if arm != "intact" and (model, task, K) in alone:
                intact_only, changed_only = alone[model, task, K]
                if counts["intact", K] - intact_only != n - changed_only:
                    raise ValueError(f"costs.csv and accuracy.csv disagree on {model}, {task}, K {K}")
                right[arm][K - 1, n - changed_only : n] = False
                right[arm][K - 1, counts["intact", K] : counts["intact", K] + changed_only] = True
        trained = EVERY if family == "ouro" else NEVER
        periods = {"intact": trained, "removed": NEVER, "added": EVERY}
        read = {
            periods.get(arm) if arm in periods else int(arm.split()[1]): _readings(own, answer) for arm, own in right.items()
        }
        found.append(Pair(model, family, task, p["r0"], trained, floor, (), cluster, d_star, read))
    return found


def _test_set(task, n: int) -> tuple:
    """The floor, clusters, depths and answers of a task's test instances, which its parameters fix."""
    answers = [evaluation_set(task, d, n).answer for d in range(1, task.max_depth + 1)]
    return *pair_jobs.about(task, n), np.concatenate(answers)


def _readings(right: np.ndarray, answer: np.ndarray) -> Readings:
    unread = np.full(right.shape, np.nan)
    return Readings(np.where(right, answer, -1), unread, unread, unread, answer)


def _recorded(t: Tables) -> Callable[..., dict]:
    """Looks up the interval of a cell in result.json; ValueError where there is none."""
    ends = {(c["id"], c["task"], c["arm"], c["K"]): {k: c[k] for k in ("low", "high")} for c in t.result["points"]}

    def known(*cell) -> dict:
        if cell not in ends:
            raise ValueError(f"result.json has no cell {', '.join(str(part) for part in cell if part is not None)}")
        return ends[cell]

    return known


@contextmanager
def _instead(module, **stand_ins) -> Iterator[None]:
    """A module with other functions in place of its own, so that its rules take what is recorded."""
    own = {name: getattr(module, name) for name in stand_ins}
    try:
        vars(module).update(stand_ins)
        yield
    finally:
        vars(module).update(own)


NOTEBOOKS: dict[str, Callable[[Tables], list[Judgement]]] = {
    "4_1_asymmetry": _asymmetry,
    "4_2_readout_collapse": _collapse,
    "4_3_scratch_training": _scratch,
    "4_4_refit": _refit,
    "4_5_overshoot": _overshoot,
    "beyond_damping": _damping,
    "beyond_readout_axis": _readout_axis,
    "dense_axes": _dense,
    "moe_transfer": _moe,
}
KEPT = {  # the tables that each of them writes
    "4_1_asymmetry": "accuracy costs identity placement training",
    "4_2_readout_collapse": "dose norm_ratio probe readings training",
    "4_3_scratch_training": "accuracy floors readout state_norm swapped training",
    "4_4_refit": "floors fractions intact refits seed_fractions training",
    "4_5_overshoot": "accuracy floors flops training",
    "beyond_damping": "correlations effect floors models rescaled steps update_sizes",
    "beyond_readout_axis": "accuracy cost floors state_norm training",
    "dense_axes": "effects floors scores training",
    "moe_transfer": "balance curves entropy floors gaps holdings interventions load overlap scores training",
}
RECORDED = {  # what is checked against result.json alone, unless there is this table
    "4_1_asymmetry": ("the intervals of accuracies and of asymmetry", None),
    "4_2_readout_collapse": ("all intervals but the probe's, and the verdict of two_stage_collapse", None),
    "dense_axes": ("the layer counts of shapes_match", "counts.csv"),
}
