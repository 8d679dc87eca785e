"""The report's interactive charts: readings against the loop count, with a slider for K and a switch for each arm.

A chart is a Vega-Lite specification as a plain dict, made from a notebook's committed tables. Its inputs are HTML's own, so a
keyboard reaches them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from lib.plots import COLOURS, SHAPES

SIGNS = {"circle": "●", "triangle-up": "▲", "square": "■", "diamond": "◆", "triangle-down": "▼"}
LABELS = {"no_norm": "no norm", "with_norm": "norm every step"}  # short, for a phone
GREY = "#444"
WIDTH = 235  # of a panel, so that one fits a phone
SPACING = 28
LABEL = 115  # pixels for an arm's name, at most
TITLES = {
    "accuracy": "accuracy",
    "in_alphabet_share": "share inside the alphabet",
    "modal_share": "share of the modal token",
    "entropy_bits": "readout entropy (bits)",
    "logit_gap": "top-1 minus top-2 logit",
    "norm_ratio": "raw-state norm / at K = 1",
    "state_norm": "raw-state norm",
    "relative": "relative update",
    "raw_to_raw": "step between raw states",
}
SHARES, LOGARITHMIC = ("accuracy", "in_alphabet_share", "modal_share"), ("norm_ratio", "state_norm", "relative", "raw_to_raw")
READOUT = ["accuracy", "in_alphabet_share", "modal_share", "entropy_bits", "logit_gap"]


@dataclass(frozen=True)
class Chart:
    """An interactive chart: specification, heading and words, what it shows, and the notebook's figure after it."""

    spec: dict
    title: str
    said: str
    shows: str
    before: str
    r0: int | None = None


def charts(notebook: str, folder: Path, r0: int | None = None) -> list[Chart]:
    """A notebook's interactive charts from its tables in `folder`; none where it has no readings against the loop count.

    r0: the loop count of training, marked where it is given. A table that is missing or empty gives no chart.
    """
    if notebook not in EXPLORERS:
        return []
    made = EXPLORERS[notebook]
    try:
        frame = made.read(folder)
    except (FileNotFoundError, pd.errors.EmptyDataError):
        return []
    if frame.empty:
        return []
    fields = {field: title for field, title in made.fields.items() if field in frame and frame[field].notna().any()}
    spec = explorer(frame, fields, made.choose, r0)
    said = (
        "Above, every seed against the loop count K; below, every seed at the K of the slider. "
        "Lines are means over seeds, bands their range."
    )
    return [Chart(spec, made.title, said, _joined(fields.values()), made.before, r0)]


def explorer(frame: pd.DataFrame, fields: dict[str, str], choose: str, r0: int | None = None) -> dict:
    """Readings against K, a panel a field, with the seeds at one K below, which a slider chooses.

    frame: choose, group (a value of that choice), arm, seed, K (powers of two) and the fields; fields: column to title.
    """
    counts, arms = sorted(frame["K"].unique().tolist()), list(dict.fromkeys(frame["arm"]))
    groups, columns = list(dict.fromkeys(frame["group"])), ["group", "arm", "seed", "K", *fields]
    style = {_label(arm): (COLOURS[i % len(COLOURS)], SHAPES[i % len(SHAPES)]) for i, arm in enumerate(arms)}
    rows = frame[columns].assign(arm=frame["arm"].map(_label)).to_dict("records")
    slider = {"input": "range", "min": int(math.log2(counts[0])), "max": int(math.log2(counts[-1])), "step": 1}
    params = [{"name": "place", "value": int(math.log2(r0 or counts[0])), "bind": slider | {"name": "loop count K"}}]
    if len(groups) > 1:
        params.append({"name": "chosen", "value": groups[0], "bind": {"input": "select", "options": groups, "name": choose}})
    for i, (name, (_, shape)) in enumerate(style.items()):
        bind = {"input": "checkbox", "name": f"{SIGNS[shape]} {name}"}
        params.append({"name": f"arm{i}", "value": True, "bind": bind})
    shown = " || ".join(f"(datum.arm === {name!r} && arm{i})" for i, name in enumerate(style))
    filters = [{"filter": "datum.group === chosen"}] if len(groups) > 1 else []
    panels = [_panel(frame, field, title, style, counts, r0) for field, title in fields.items()]
    beside = round(max(45, min(LABEL, 6.6 * max(map(len, style))) + 14)) + SPACING  # a panel's axis and distance to the next
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "data": {"values": [{k: _short(v) for k, v in row.items() if v == v} for row in rows]},
        "params": params,
        "transform": [*filters, {"filter": shown}],
        "concat": panels,
        "columns": 3,
        "spacing": SPACING,
        "background": "transparent",
        "config": {
            "aria": False,  # the chart is one picture with one description; its numbers are in the tables
            "axis": {"labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal", "gridOpacity": 0.4},
            "title": {"fontSize": 13, "anchor": "start", "fontWeight": 600},
            "view": {"strokeOpacity": 0.3},
        },
        "usermeta": {"beside": beside, "colours": {f"arm{i}": colour for i, (colour, _) in enumerate(style.values())}},
    }


def _panel(frame: pd.DataFrame, field: str, title: str, style: dict, counts: list[int], r0: int | None) -> dict:
    """One field: lines over seeds against K, and below them the seeds at the slider's K."""
    low, high = frame[field].min(), frame[field].max()
    log = field in LOGARITHMIC and low > 0
    share = field in SHARES or (0 <= low and high <= 1 and not log)
    ends = [0.9 * low, 1.1 * high] if log else [0, 1.02] if share else [min(0, low), 1.05 * high]
    scale = {"domain": [float(f"{end:.4g}") for end in ends], "nice": False} | ({"type": "log"} if log else {})
    names = list(style)
    colour = {"field": "arm", "legend": None, "scale": {"domain": names, "range": [c for c, _ in style.values()]}}
    shape = {"field": "arm", "legend": None, "scale": {"domain": names, "range": [s for _, s in style.values()]}}
    span = {"type": "log", "base": 2, "domain": [0.85 * counts[0], 1.18 * counts[-1]], "nice": False}
    x = {"field": "K", "type": "quantitative", "title": "loop count K", "scale": span, "axis": {"values": counts}}
    y = {"field": field, "type": "quantitative", "title": None, "scale": scale, "axis": {"tickCount": 5}}
    near = [{"field": name, "type": "nominal"} for name in ("arm", "seed", "K")]
    near += [{"field": field, "type": "quantitative", "format": ".4g", "title": title}]
    seeds = {"type": "point", "size": 26, "opacity": 0.75, "filled": False, "strokeWidth": 1.5}
    here = {"mark": {"type": "rule", "color": GREY, "strokeWidth": 2}, "data": {"values": [{}]}}
    here["encoding"] = {"x": {"field": "K", "type": "quantitative", "scale": span}}
    here["transform"] = [{"calculate": "pow(2, place)", "as": "K"}]
    layers = [
        {"mark": {"type": "area", "opacity": 0.14}, "encoding": {"x": x, "color": colour, **_range(y, field)}},
        {"mark": {"type": "line", "strokeWidth": 2}, "encoding": {"x": x, "y": y | {"aggregate": "mean"}, "color": colour}},
        {"mark": seeds, "encoding": {"x": x, "y": y, "color": colour, "shape": shape, "tooltip": near}},
        here,
    ]
    if r0:
        dashed = {"type": "rule", "color": GREY, "strokeDash": [5, 4]}
        layers.append({"mark": dashed, "data": {"values": [{"K": r0}]}, "encoding": {"x": here["encoding"]["x"]}})
    labels = {"labelLimit": LABEL, "labelPadding": 9, "ticks": False, "domain": False}
    rows = {"field": "arm", "type": "nominal", "sort": names, "title": None, "axis": labels}
    across = y | {"axis": {"tickCount": 4}}
    mean = {"type": "tick", "thickness": 3, "size": 16, "opacity": 0.9}
    at = [
        {"mark": seeds | {"size": 36}, "encoding": {"x": across, "y": rows, "color": colour, "shape": shape, "tooltip": near}},
        {"mark": mean, "encoding": {"x": across | {"aggregate": "mean"}, "y": rows, "color": colour}},
    ]
    below = {"text": {"expr": "'at K = ' + pow(2, place)"}, "fontSize": 12, "fontWeight": "normal"}
    strip = {"width": WIDTH, "height": {"step": 22}, "title": below, "layer": at}
    strip["transform"] = [{"filter": "datum.K === pow(2, place)"}]
    lines = {"width": WIDTH, "height": 150, "title": title, "layer": layers}
    return {"vconcat": [lines, strip], "spacing": 12}


def _range(y: dict, field: str) -> dict:
    return {"y": y | {"aggregate": "min"}, "y2": {"field": field, "aggregate": "max"}}


def _joined(words) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def _label(arm: str) -> str:
    return LABELS.get(arm, arm)


def _short(value):
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _powers(frame: pd.DataFrame) -> pd.DataFrame:
    return frame[frame["K"].map(lambda K: K & (K - 1) == 0)]


def _wide(frame: pd.DataFrame, group: pd.Series, field: str) -> pd.DataFrame:
    """Readings in rows made one row a seed and K, a column each value of `field`; groups and arms in their first order."""
    frame = _powers(frame.assign(group=group))
    keys = ["group", "arm", "seed", "K"]
    order = frame[["group", "arm"]].drop_duplicates()
    wide = frame.pivot_table(index=keys, columns=field, values="value", sort=False).reset_index()
    return order.merge(wide, on=["group", "arm"], how="left")


def _read(folder: Path, name: str) -> pd.DataFrame:
    return pd.read_csv(folder / f"{name}.csv")


def _asymmetry(folder: Path) -> pd.DataFrame:
    read = _read(folder, "accuracy")
    return _wide(read, read["style"], "task")


def _collapse(folder: Path) -> pd.DataFrame:
    read = _read(folder, "readings")
    read = read[read["arm"].isin(["intact", "removed", "added", "every 2", "every 4"])]
    return _wide(read, read["style"] + ", " + read["task"], "metric")


def _scratch(folder: Path) -> pd.DataFrame:
    read = _read(folder, "readout")
    read = read[(read["d_star"].astype(str) == "all") & read["metric"].isin([*READOUT, "state_norm"])]
    return _wide(read, read["task"], "metric")


def _depth(read: pd.DataFrame) -> pd.Series:
    return read["d_star"].astype(str).map(lambda d: "all depths" if d == "all" else f"depth {d}")


def _overshoot(folder: Path) -> pd.DataFrame:
    read = _read(folder, "accuracy").sort_values("d_star", key=lambda d: d.astype(str) != "all", kind="stable")
    return _wide(read, _depth(read), "task")


def _readout_axis(folder: Path) -> pd.DataFrame:
    norm, read = _read(folder, "state_norm").assign(metric="state_norm"), _read(folder, "accuracy").assign(metric="accuracy")
    both = pd.concat([read, norm[norm["d_star"].astype(str) == "all"]])
    both = both[both["d_star"].astype(str) == "all"]
    return _wide(
        both.assign(arm=both["arm"].map({"no_norm": "no norm", "with_norm": "norm"}) + ", " + both["readout"]),
        both["task"],
        "metric",
    )


def _damping(folder: Path) -> pd.DataFrame:
    read = _read(folder, "steps")
    return _wide(read, read["task"], "metric")


@dataclass(frozen=True)
class _Explorer:
    read: Callable[[Path], pd.DataFrame]
    fields: dict[str, str]
    choose: str
    title: str
    before: str


def _titled(*names: str) -> dict[str, str]:
    return {name: TITLES[name] for name in names}


TASKS = {"circuit": "accuracy, circuit", "hops": "accuracy, hops", "paragg": "accuracy, paragg"}
EXPLORERS = {
    "4_1_asymmetry": _Explorer(_asymmetry, TASKS, "style", "Explore: accuracy at any loop count", "accuracy"),
    "4_2_readout_collapse": _Explorer(
        _collapse,
        _titled(*READOUT, "norm_ratio"),
        "style and task",
        "Explore: the readout and the state's scale at any loop count",
        "norm_ratio",
    ),
    "4_3_scratch_training": _Explorer(
        _scratch,
        _titled(*READOUT, "state_norm"),
        "task",
        "Explore: accuracy, readout and state at any loop count",
        "accuracy_against_loops",
    ),
    "4_5_overshoot": _Explorer(_overshoot, TASKS, "instances", "Explore: three splits at any loop count", "overshoot_circuit"),
    "beyond_damping": _Explorer(
        _damping,
        _titled("accuracy", "relative", "raw_to_raw"),
        "task",
        "Explore: updates at any loop count",
        "relative_update",
    ),
    "beyond_readout_axis": _Explorer(
        _readout_axis,
        _titled("accuracy", "state_norm"),
        "task",
        "Explore: both norms at any loop count",
        "accuracy_against_loops",
    ),
}
