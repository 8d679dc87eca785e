"""The figures draw, also where a seed diverged or a fraction is undefined, and say what their axes are."""

import json

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
