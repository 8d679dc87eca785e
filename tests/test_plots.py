"""The figures draw, also where a seed diverged or a fraction is undefined, and say what their axes are."""

import json
from itertools import product

import numpy as np
import pandas as pd
import pytest

from lib import plots

NAN = float("nan")


def text_of(chart) -> str:
    return json.dumps(chart.to_dict())


def drawn(chart, tmp_path):
    chart.save(tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 5000


def test_recovery_shows_parts_seeds_and_what_the_paper_reports(tmp_path):
    rows = [("circuit, norm added", part, steps) for part in ("head", "layer") for steps in (3, 30, 300)]
    frame = pd.DataFrame(rows, columns=["panel", "arm", "steps"]).assign(value=0.4, low=0.2, high=1.3)
    frame = pd.concat([frame, frame.assign(panel="circuit, norm removed", value=NAN, low=NAN, high=NAN)])
    seeds = frame[["panel", "arm", "steps"]].iloc[:6].assign(seed=0, value=-0.4)
    paper = pd.DataFrame([("circuit, norm added", "head", 3000, 0.35)], columns=["panel", "arm", "steps", "value"])
    chart = plots.recovery(frame, seeds, paper)
    drawn(chart, tmp_path)
    told = text_of(chart)
    assert all(word in told for word in ("refit steps", "recovered fraction", "head alone", "last layer and head", "crosses"))


def test_overshoot_puts_equal_compute_above_equal_overshoot(tmp_path):
    r0s = {"4x1": 4, "2x2": 2, "1x4": 1}
    rows = [(arm, seed, K, NAN if seed else 0.5) for arm in r0s for seed in (0, 1) for K in range(1, 33)]
    chart = plots.overshoot(pd.DataFrame(rows, columns=["arm", "seed", "K", "value"]), r0s, 5.1e5, 0.5)
    drawn(chart, tmp_path)
    told = text_of(chart)
    assert "overshoot K / r0" in told and "absolute loop count K" in told and "MFLOP" in told and "0.51" in told
    left, right = chart.to_dict()["hconcat"]
    for panel, largest in ((left, 32), (right, 8)):
        name = panel["layer"][2]["data"]["name"]
        column = "K" if panel is left else "overshoot"
        shown = {round(row[column]) for row in chart.to_dict()["datasets"][name] if row[column] > 0.9}
        assert max(shown) == largest


@pytest.mark.parametrize("log_x", [True, False])
def test_scatter_and_cost_and_a_title_for_each_panel(tmp_path, log_x):
    frame = pd.DataFrame({"task": "circuit", "arm": ["no_norm", "with_norm"], "x": [0.02, 1.4], "value": [0.1, 0.5]})
    drawn(plots.scatter(frame, "relative update", "accuracy lost", log_x), tmp_path)
    K = np.arange(1, 33)
    parts = [
        pd.DataFrame({"task": "circuit", "readout": readout, "K": K, "value": 0.1, "low": 0.0, "high": 0.2})
        for readout in ("normalised", "raw")
    ]
    drawn(plots.cost_of_norm(pd.concat(parts), 4), tmp_path)
    steps = pd.DataFrame({"panel": "a", "arm": "no_norm", "seed": 0, "K": K, "value": 1.0})
    told = text_of(
        plots.against_loops(pd.concat([steps, steps.assign(panel="b")]), {"a": "metres", "b": "degrees"}, 4, "panel")
    )
    assert "metres" in told and "degrees" in told


def test_an_arm_keeps_its_colour_when_it_stands_alone():
    def colours(arms):
        colour, _ = plots._arms(pd.DataFrame({"arm": arms}))
        scale = colour.to_dict()["scale"]
        return dict(zip(scale["domain"], scale["range"], strict=True))

    both = colours(["with_norm", "no_norm"])
    assert both | colours(["with_norm"]) == both and len(set(both.values())) == 2


# ---- arms and groups of tasks

GROUPS = ["context", "quantitative", "knowledge", "constrained", "mean over groups"]
ARMS = ["full", "sandwich", "noise"]


def marks(chart, kind, filled=None) -> list[dict]:
    """The rows behind every mark of a kind, panel after panel."""
    made = chart.to_dict()
    found = []

    def walk(part):
        for name in ("concat", "hconcat", "vconcat", "layer"):
            for inner in part.get(name, ()):
                walk(inner)
        mark = part.get("mark", {})
        if mark.get("type") == kind and (filled is None or mark.get("filled") == filled):
            found.extend(made["datasets"][part["data"]["name"]])

    def handed_down(part, data=None):  # a chart of layers or panels may hold the data for all of them
        data = part.get("data", data)
        for name in ("concat", "hconcat", "vconcat", "layer"):
            for inner in part.get(name, ()):
                handed_down(inner, data)
        if "mark" in part:
            part["data"] = data

    handed_down(made)
    walk(made)
    return found


def effect_table(labels=("sandwich - full", "noise - input"), shares=(1.0,)):
    rows = [
        ("Q1", label, group, share, 0.1 * i - 0.2, 0.1 * i - 0.25, 0.1 * i - 0.12, group != "knowledge", paper)
        for label in labels
        for share in shares
        for i, (group, paper) in enumerate(zip(GROUPS, ("+", "-", "mixed", "", "+"), strict=True))
    ]
    columns = ["axis", "label", "group", "share", "value", "low", "high", "competent", "paper"]
    return pd.DataFrame(rows, columns=columns)


@pytest.mark.parametrize("labels", [("sandwich - full", "noise - input", "Huginn - Ouro"), ("sandwich - full",)])
def test_effects_show_every_group_of_every_comparison_hollow_where_not_learned(tmp_path, labels):
    frame = effect_table(labels)
    chart = plots.effects(frame, "the effects")
    drawn(chart, tmp_path)
    solid, hollow = (marks(chart, "point", filled) for filled in (True, False))
    assert [(row["label"], row["group"]) for row in hollow] == [(label, "knowledge") for label in labels]
    assert len(solid) == 4 * len(labels) and {row["group"] for row in solid} == set(GROUPS) - {"knowledge"}
    spans = [row for row in marks(chart, "rule") if "low" in row]
    assert len(spans) == 5 * len(labels)
    said = [row["paper"] for row in marks(chart, "text")]
    assert said == ["+", "-", "mixed", "", "+"] * len(labels)
    told = text_of(chart)
    assert all(word in told for word in ("difference in accuracy", "right: the paper", "the effects", *GROUPS))
    assert all(f"Q1: {label}" in told for label in labels)


def test_effects_fit_on_their_axis_with_room_for_what_the_paper_says(tmp_path):
    frame = effect_table().assign(low=-0.9, high=NAN)
    chart = plots.effects(frame)
    drawn(chart, tmp_path)
    domain = next(
        layer["encoding"]["x"]["scale"]["domain"]
        for panel in chart.to_dict()["concat"]
        for layer in panel["layer"]
        if layer["encoding"].get("x", {}).get("scale")
    )
    assert domain[0] <= -0.9 and domain[1] > frame["value"].max()
    learned = plots.effects(frame.assign(competent=True))
    drawn(learned, tmp_path)
    assert not marks(learned, "point", False) and len(marks(learned, "point", True)) == len(frame)
    assert plots._ends(pd.DataFrame({"low": [0.0], "value": [0.0], "high": [0.0]})) == pytest.approx([-0.054, 0.054])


@pytest.mark.parametrize("shares", [(0.25, 0.5, 1.0), (1.0,)])
def test_gaps_are_lines_over_the_shares_of_training(tmp_path, shares):
    frame = effect_table(shares=shares)
    chart = plots.gaps(frame, "the gaps")
    drawn(chart, tmp_path)
    points = {(row["label"], row["group"], row["share"]) for row in marks(chart, "point")}
    assert points == {(label, group, share) for label in frame["label"] for group in GROUPS for share in shares}
    told = text_of(chart)
    assert all(word in told for word in ("share of training steps", "difference in accuracy", "the gaps", *GROUPS))
    assert "noise - input" in told and "Q1" in told


@pytest.mark.parametrize("arms", [ARMS, ARMS[:1]])
def test_every_arm_stands_in_every_tasks_panel_with_its_floor(tmp_path, arms):
    tasks = ["hops", "arithmetic"]
    rows = [(arm, seed, task, NAN if seed == 1 else 0.4) for arm in arms for seed in range(3) for task in tasks]
    frame = pd.DataFrame(rows, columns=["arm", "seed", "task", "value"])
    floors = pd.DataFrame({"task": ["arithmetic", "hops", "other"], "value": [0.25, 0.125, 0.9]})
    chart = plots.arms_by_task(frame, floors, "accuracy of arms")
    drawn(chart, tmp_path)
    assert {(row["arm"], row["task"]) for row in marks(chart, "point")} == {(arm, task) for arm in arms for task in tasks}
    assert [row["arm"] for row in marks(chart, "tick")] == arms * 2
    assert [row["value"] for row in marks(chart, "rule")] == [0.125, 0.25], "each panel its own floor"
    assert [panel["title"] for panel in chart.to_dict()["concat"]] == tasks
    assert "accuracy of arms" in text_of(chart) and '"title": "accuracy"' in text_of(chart)


@pytest.mark.parametrize("arms", [ARMS, ARMS[:1]])
def test_a_measure_by_arm_has_seeds_mean_and_interval(tmp_path, arms):
    frame = pd.DataFrame([(arm, seed, 1.2 + 0.1 * seed) for arm in arms for seed in range(3)], columns=["arm", "seed", "value"])
    chart = plots.by_arm(frame, "balance loss, 1 = uniform", "ends")
    drawn(chart, tmp_path)
    assert len(marks(chart, "point")) == 3 * len(arms)
    assert [row["arm"] for row in marks(chart, "tick")] == arms == [row["arm"] for row in marks(chart, "rule")]
    assert all(row["value"] == pytest.approx(1.3) and row["low"] < 1.3 < row["high"] for row in marks(chart, "tick"))
    assert "balance loss, 1 = uniform" in text_of(chart)
    drawn(plots.by_arm(frame[frame["seed"] == 0], "one seed"), tmp_path)


@pytest.mark.parametrize("arms", [ARMS[:2], ARMS[:1]])
def test_routes_stand_in_order_for_every_arm_and_group(tmp_path, arms):
    order = ["own", "first", "random"]
    rows = [
        (arm, group, route, seed, NAN if seed == 2 else 0.3)
        for arm in arms
        for group in GROUPS[:4]
        for route in order
        for seed in range(3)
    ]
    chart = plots.routes(pd.DataFrame(rows, columns=["arm", "group", "route", "seed", "value"]), order, "other experts")
    drawn(chart, tmp_path)
    assert len(marks(chart, "tick")) == len(arms) * 4 * 3 and [row["route"] for row in marks(chart, "tick")[:3]] == order
    rows = chart.to_dict()["vconcat"]
    assert [[panel["title"] for panel in row["hconcat"]] for row in rows] == [
        [{"text": group, "subtitle": arm} for group in GROUPS[:4]] for arm in arms
    ]
    told = text_of(chart)
    assert '"sort": ["own", "first", "random"]' in told and '"title": "experts"' in told and '"title": "accuracy"' in told


@pytest.mark.parametrize("arms", [["huginn_moe", "full_moe"], ["full_moe"]])
def test_balance_is_a_line_an_arm_with_its_range(tmp_path, arms):
    rows = [(arm, seed, step, 1.5 + 0.2 * seed) for arm in arms for seed in range(3) for step in (1.0, 20.5, 40.0)]
    rows += [(arms[0], 3, 40.0, NAN)]
    chart = plots.balance(pd.DataFrame(rows, columns=["arm", "seed", "step", "value"]), "balance")
    drawn(chart, tmp_path)
    lines = marks(chart, "line")
    assert {(row["arm"], row["step"]) for row in lines} == {(arm, step) for arm in arms for step in (1.0, 20.5, 40.0)}
    assert all((row["median"], row["min"], row["max"]) == pytest.approx((1.7, 1.5, 1.9)) for row in lines)
    assert [row["value"] for row in marks(chart, "rule")] == [1.0]
    assert all(word in text_of(chart) for word in ("training step", "balance loss, 1 = uniform", *arms))


@pytest.mark.parametrize("arms", [["huginn_moe", "full_moe"], ["huginn_moe"]])
def test_loads_show_loop_steps_from_one_and_what_they_share(tmp_path, arms):
    load = pd.DataFrame(
        [(arm, time, expert, 0.25) for arm in arms for time in range(3) for expert in range(4)],
        columns=["arm", "time", "expert", "share"],
    )
    overlap = pd.DataFrame(
        [(arm, a, b, 0.9 if b == 1 else 0.4) for arm in arms for a, b in ((0, 1), (0, 2), (1, 2))],
        columns=["arm", "time", "other", "value"],
    )
    chart = plots.loads(load, overlap, 0.5, "experts in use")
    drawn(chart, tmp_path)
    squares = marks(chart, "rect")
    used, shared = ([row for row in squares if name in row] for name in ("share", "value"))
    assert len(used) == 12 * len(arms) and {(row["step"], row["expert"]) for row in used} == set(
        product((1, 2, 3), (1, 2, 3, 4))
    )
    pairs = {(row["arm"], row["step"], row["later"]) for row in shared}
    assert pairs == {(arm, *pair) for arm in arms for pair in ((1, 2), (1, 3), (2, 3))}
    assert len(marks(chart, "text")) == 3 * len(arms), "numbers on the squares"
    told = text_of(chart)
    words = ("loop step", "later loop step", "expert", "share of selections", "experts in common", "independent: 0.50")
    assert all(word in told for word in (*words, *arms))
