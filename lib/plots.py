"""The figures: Altair charts that read without colour vision, with seeds, intervals and units in sight.

Every chart shows as a PNG in the cell, drawn by vl-convert, so that a notebook looks the same on any page that renders it.
"""

import altair as alt
import pandas as pd

from lib import stats

LABELS = {
    "no_norm": "no boundary norm",
    "with_norm": "boundary norm every step",
    "layer": "last layer and head",
    "head": "head alone",
}
# Okabe and Ito's blue, vermillion, green, purple and sky blue, in this order; a name without a label is its own
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9")
SHAPES = ("circle", "triangle-up", "square", "diamond", "triangle-down")
FONT = 13


def setup() -> None:
    """Make every chart a PNG drawn by vl-convert. A notebook calls it once."""
    alt.renderers.enable("png", scale_factor=1)


STYLE = alt.Config(
    axis=alt.AxisConfig(labelFontSize=FONT - 1, titleFontSize=FONT, titleFontWeight="normal", gridOpacity=0.4),
    legend=alt.LegendConfig(labelFontSize=FONT - 1, titleFontSize=FONT, orient="top", title=None, labelLimit=400),
    header=alt.HeaderConfig(labelFontSize=FONT, titleFontSize=FONT),
    title=alt.TitleConfig(fontSize=FONT + 1, anchor="start", subtitleFontSize=FONT - 1),
    view=alt.ViewConfig(strokeOpacity=0.3),
)


def _style(chart: alt.TopLevelMixin) -> alt.TopLevelMixin:
    chart.config = STYLE  # altair's own configure_axis and the like each copy the whole chart
    return chart


def _labelled(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with a column label, the arm's in words."""
    return frame.assign(label=frame["arm"].map(lambda arm: LABELS.get(arm, arm)))


def _arms(frame: pd.DataFrame) -> tuple[alt.Color, alt.Shape]:
    """Colour and shape of the arms present, by label: those with a label of ours at their fixed place, others as they come."""
    present, known = list(dict.fromkeys(frame["arm"])), list(LABELS)
    places = {arm: i for i, arm in enumerate(known) if arm in present} or {arm: i for i, arm in enumerate(present)}
    names = [LABELS.get(arm, arm) for arm in places]
    colour = alt.Color("label:N", scale=alt.Scale(domain=names, range=[COLOURS[i] for i in places.values()]), title=None)
    colour = colour.legend(symbolOpacity=1, symbolStrokeWidth=2)
    shape = alt.Shape("label:N", scale=alt.Scale(domain=names, range=[SHAPES[i] for i in places.values()]), title=None)
    return colour, shape


def _loops(counts: list[int], title: str) -> alt.X:
    """The loop count's axis: K doubles, so it is a log2 axis, a little wider than the counts."""
    scale = alt.Scale(type="log", base=2, domain=[0.85 * counts[0], 1.18 * counts[-1]], nice=False)
    return alt.X("K:Q", title=title, scale=scale, axis=alt.Axis(values=counts))


def means(frame: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Seed means of `value` with their 95 % bootstrap interval: columns `by`, value, low, high, n."""
    rows = []
    for keys, group in frame.groupby(by, sort=False):
        rows.append(dict(zip(by, keys, strict=True)) | stats.bootstrap_mean(group["value"])._asdict())
    return pd.DataFrame(rows)


def against_loops(
    frame: pd.DataFrame,
    y: str | dict[str, str],
    r0: int | dict[str, int],
    panel: str = "task",
    floors: pd.DataFrame | None = None,
    points_at: list[int] | None = None,
    log_y: bool = False,
    title: str = "",
    width: int = 330,
    columns: int | None = None,
    top: float | None = 1.1,
) -> alt.TopLevelMixin:
    """A measure against the loop count K (log2), one panel a value of `panel`: mean, interval, seed points, r0, floor.

    y: the measure's name and unit, and r0, or one of them for each panel; columns: panels in a row (default: all); top: end of
    a linear axis from 0, None for the data's own. A diverged seed (NaN) counts as accuracy 0 and has no place on a log
    axis. frame: arm, seed, K, value and `panel`; floors: `panel`, value. Seed points stand at `points_at` (default: powers of
    two).
    """
    counts = points_at or [2**i for i in range(12) if 2**i <= frame["K"].max()]
    frame = _labelled(frame)
    frame = frame.dropna(subset="value") if log_y else frame.fillna({"value": 0})
    mean = means(frame, [panel, "arm", "label", "K"])
    colour, shape = _arms(frame)
    x = _loops(counts, "loop count K")
    scale = alt.Scale(type="log") if log_y else alt.Scale(domain=[0, top], nice=False) if top else alt.Scale(zero=True)
    panels = []
    for name in frame[panel].unique():
        named = y[name] if isinstance(y, dict) else y
        budget = r0[name] if isinstance(r0, dict) else r0
        value = alt.Y("value:Q", title=named, scale=scale)
        m, f = mean[mean[panel] == name], frame[(frame[panel] == name) & frame["K"].isin(counts)]
        # seeds side by side, so that equal values do not hide each other
        offset = f["seed"].rank(method="dense") - (f["seed"].nunique() + 1) / 2
        f = f.assign(K=f["K"] * 2 ** (offset * 0.03))
        layers = [
            alt.Chart(m)
            .mark_area(opacity=0.2)
            .encode(x=x, y=alt.Y("low:Q", title=named, scale=scale), y2="high:Q", color=colour),
            alt.Chart(m).mark_line(strokeWidth=2).encode(x=x, y=value, color=colour),
            alt.Chart(f).mark_point(size=28, opacity=0.7).encode(x=x, y=value, color=colour, shape=shape),
            _mark(pd.DataFrame({"K": [budget], "text": [f"trained, K = {budget}"]}), "x"),
        ]
        if floors is not None:
            floor = floors.loc[floors[panel] == name, "value"].mean()
            layers.append(_mark(pd.DataFrame({"value": [floor], "text": [f"no-skill floor {floor:.2f}"]}), "y", counts[-1]))
        height = 260 if columns is None else 190
        panels.append(alt.layer(*layers, width=width, height=height, title=str(name)))
    return _style(alt.concat(*panels, columns=columns, title=title) if columns else alt.hconcat(*panels, title=title))


def _mark(frame: pd.DataFrame, axis: str, right: float | None = None, column: str = "K") -> alt.Chart:
    """A dashed line with its words: upright at a loop count (axis x), or level at a value (axis y) and ending at `right`, a
    value of the chart's x column."""
    at = alt.X("K:Q") if axis == "x" else alt.Y("value:Q")
    rule = alt.Chart(frame).mark_rule(strokeDash=[5, 4], color="#444").encode(at)
    if axis == "x":
        text = alt.Chart(frame).mark_text(align="left", dx=4, dy=4, baseline="top", color="#444", fontSize=FONT - 2)
        return rule + text.encode(x="K:Q", y=alt.value(-2), text="text:N")
    frame = frame.assign(**{column: right})
    text = alt.Chart(frame).mark_text(align="right", dy=-7, color="#444", fontSize=FONT - 2)
    return rule + text.encode(x=f"{column}:Q", y="value:Q", text="text:N")


def swap(frame: pd.DataFrame, title: str = "") -> alt.TopLevelMixin:
    """Accuracy of each trained arm under its own and the other arm's boundary: seeds, mean and interval, a panel a (task, K).

    frame: task, K, arm (as trained), run ("own boundary", "other boundary"), seed, value.
    """
    frame = _labelled(frame).fillna({"value": 0})
    frame["line"] = frame["arm"] + frame["seed"].astype(str)
    colour, shape = _arms(frame)
    x = alt.X("run:N", title=None, sort=["own boundary", "other boundary"], axis=alt.Axis(labelAngle=0))
    scale = alt.Scale(domain=[0, 1.1], nice=False)
    y = alt.Y("value:Q", title="accuracy", scale=scale)
    panels = []
    for (task, K), part in frame.groupby(["task", "K"], sort=False):
        base = alt.Chart(part).encode(x=x, y=y, color=colour, detail="line:N")
        mean = alt.Chart(means(part, ["arm", "label", "run"])).encode(x=x, color=colour, xOffset=alt.XOffset("arm:N"))
        bars = mean.mark_rule(strokeWidth=3).encode(y=alt.Y("low:Q", title="accuracy", scale=scale), y2="high:Q")
        ticks = mean.mark_tick(thickness=3, size=16).encode(y=y)
        chart = base.mark_line(opacity=0.25) + base.mark_point(size=40, opacity=0.6).encode(shape=shape) + bars + ticks
        panels.append(chart.properties(width=190, height=220, title=f"{task}, K = {K}"))
    return _style(alt.hconcat(*panels, title=title))


def steps(
    frame: pd.DataFrame, measures: dict[str, str], r0: int, title: str = "", columns: int | None = None
) -> alt.TopLevelMixin:
    """One trajectory, a panel a measure, a line an arm. frame: arm, K, metric, value; measures: metric -> title; columns: in a
    row, all by default."""
    frame = _labelled(frame)
    colour, shape = _arms(frame)
    counts = [2**i for i in range(12) if 2**i <= frame["K"].max()]
    panels = []
    for metric, name in measures.items():
        x = _loops(counts, "loop step")
        scale = alt.Scale(type="log") if metric == "norm" else alt.Scale(zero=True)
        y = alt.Y("value:Q", title=name, scale=scale)
        base = alt.Chart(frame[frame["metric"] == metric]).encode(x=x, y=y, color=colour)
        lines = base.mark_line() + base.mark_point(size=30, filled=True).encode(shape=shape)
        panels.append((lines + _mark(pd.DataFrame({"K": [r0], "text": [""]}), "x")).properties(width=250, height=220))
    return _style(alt.concat(*panels, columns=columns, title=title) if columns else alt.hconcat(*panels, title=title))


def recovery(
    frame: pd.DataFrame, seeds: pd.DataFrame, reported: pd.DataFrame, title: str = "crosses: reported by the paper"
) -> alt.TopLevelMixin:
    """Recovered fraction against refit steps (log), a panel a value of `panel`, a line a part: interval, seeds, paper's points.

    frame: panel, arm (head, layer), steps, value, low, high; seeds: panel, arm, steps, seed, value; reported: panel, arm, steps
    and value. 1 is the accuracy before the loop was changed, 0 that of the changed loop.
    """
    frame, seeds, reported = (_labelled(part) for part in (frame, seeds, reported))
    colour, shape = _arms(frame)
    ticks = sorted(frame["steps"].unique())
    scale = alt.Scale(type="log", domain=[0.8 * ticks[0], 1.25 * max(ticks[-1], reported["steps"].max())], nice=False)
    x = alt.X("steps:Q", title="refit steps", scale=scale, axis=alt.Axis(values=ticks, labelOverlap=False))
    panels = []
    for name in frame["panel"].unique():
        m, f, paper = (part[part["panel"] == name] for part in (frame, seeds, reported))
        m = m.dropna(subset="value")
        ends = [*m["low"], *m["high"], *f["value"], *paper["value"], 0, 1]
        height = alt.Scale(domain=[min(ends) - 0.05, max(ends) + 0.1], nice=False)
        named = "recovered fraction of the loss"
        y = alt.Y("value:Q", title=named, scale=height)
        base = alt.Chart(m).encode(x=x, color=colour)
        offset = f["seed"].rank(method="dense") - (f["seed"].nunique() + 1) / 2
        points = alt.Chart(f.assign(steps=f["steps"] * 1.05**offset)).mark_point(size=24, opacity=0.6)
        layers = [
            base.mark_area(opacity=0.2).encode(y=alt.Y("low:Q", title=named, scale=height), y2="high:Q"),
            base.mark_line(strokeWidth=2).encode(y=y),
            points.encode(x=x, y=y, color=colour, shape=shape),
            alt.Chart(paper).mark_point(size=110, shape="cross", filled=True, stroke="black").encode(x=x, y=y, color=colour),
            _mark(pd.DataFrame({"value": [1.0], "text": ["as before the change"]}), "y", ticks[-1], "steps"),
            _mark(pd.DataFrame({"value": [0.0], "text": [""]}), "y", ticks[-1], "steps"),
        ]
        panels.append(alt.layer(*layers, width=330, height=260, title=str(name)))
    return _style(alt.hconcat(*panels).resolve_scale(y="independent").properties(title=title))


def overshoot(frame: pd.DataFrame, r0s: dict[str, int], flops: float, floor: float, title: str = "") -> alt.TopLevelMixin:
    """Accuracy against the absolute loop count, and beside it against overshoot K / r0 with the compute it takes (log2 both).

    frame: arm (a split), seed, K, value; r0s: split -> trained loop count; flops: counted block FLOPs of a sequence at
    overshoot 1, the same for every split.
    """
    frame = _labelled(frame).fillna({"value": 0})
    frame["overshoot"] = frame["K"] / frame["arm"].map(r0s)
    colour, shape = _arms(frame)
    height = alt.Scale(domain=[0, 1.1], nice=False)
    y = alt.Y("value:Q", title="accuracy", scale=height)
    panels = []
    for column, name in (("K", "absolute loop count K"), ("overshoot", ["overshoot K / r0", "block MFLOP a sequence"])):
        largest = 8 if column == "overshoot" else frame["K"].max()
        smallest = 1 / max(r0s.values()) if column == "overshoot" else 1
        part = frame[(frame[column] <= largest) & (frame[column] >= smallest)]
        ticks = [2.0**i for i in range(-6, 12) if smallest <= 2.0**i <= largest]
        axis = alt.Axis(values=ticks, labelOverlap=False)
        if column == "overshoot":
            cost = f"format(datum.value * {flops / 1e6}, '.3~r')"
            axis = alt.Axis(values=ticks, labelOverlap=False, labelExpr=f"[format(datum.value, '~r') + '×', {cost}]")
        scale = alt.Scale(type="log", base=2, domain=[0.85 * smallest, 1.18 * largest], nice=False)
        x = alt.X(f"{column}:Q", title=name, scale=scale, axis=axis)
        mean = means(part, ["arm", "label", column])
        seen = part[part[column].isin(ticks)]
        offset = seen["seed"].rank(method="dense") - (seen["seed"].nunique() + 1) / 2
        seen = seen.assign(**{column: seen[column] * 2 ** (offset * 0.03)})
        trained = pd.DataFrame({"arm": list(r0s), column: [r if column == "K" else 1.0 for r in r0s.values()]})
        layers = [
            alt.Chart(mean)
            .mark_area(opacity=0.2)
            .encode(x=x, y=alt.Y("low:Q", title="accuracy", scale=height), y2="high:Q", color=colour),
            alt.Chart(mean).mark_line(strokeWidth=2).encode(x=x, y=y, color=colour),
            alt.Chart(seen).mark_point(size=28, opacity=0.7).encode(x=x, y=y, color=colour, shape=shape),
            alt.Chart(_labelled(trained)).mark_rule(strokeDash=[5, 4]).encode(x=x, color=colour),
            _mark(pd.DataFrame({"value": [floor], "text": [f"no-skill floor {floor:.2f}"]}), "y", largest, column),
        ]
        panels.append(alt.layer(*layers, width=360, height=260))
    return _style(alt.hconcat(*panels, title=title))


def cost_of_norm(frame: pd.DataFrame, r0: int, title: str = "") -> alt.TopLevelMixin:
    """No norm minus norm in accuracy against the loop count (log2), a line a readout.

    frame: task, readout, K, value, low, high.
    """
    frame = _labelled(frame.assign(arm=frame["readout"] + " readout"))
    colour, shape = _arms(frame)
    counts = [2**i for i in range(12) if 2**i <= frame["K"].max()]
    x, named = _loops(counts, "loop count K"), "accuracy, no norm - norm"
    panels = []
    for task in frame["task"].unique():
        base = alt.Chart(frame[frame["task"] == task]).encode(x=x, color=colour)
        layers = [
            base.mark_area(opacity=0.2).encode(y=alt.Y("low:Q", title=named), y2="high:Q"),
            base.mark_line(strokeWidth=2).encode(y=alt.Y("value:Q", title=named)),
            base.transform_filter(alt.FieldOneOfPredicate("K", counts))
            .mark_point(size=40, filled=True)
            .encode(y="value:Q", shape=shape),
            _mark(pd.DataFrame({"K": [r0], "text": [f"trained, K = {r0}"]}), "x"),
            _mark(pd.DataFrame({"value": [0.0], "text": [""]}), "y", counts[-1]),
        ]
        panels.append(alt.layer(*layers, width=420, height=260, title=task))
    return _style(alt.hconcat(*panels, title=title))


def scatter(frame: pd.DataFrame, x: str, y: str, log_x: bool = True, title: str = "") -> alt.TopLevelMixin:
    """One point a model, a panel a task. frame: task, arm, x, value."""
    frame = _labelled(frame)
    colour, shape = _arms(frame)
    panels = []
    for task in frame["task"].unique():
        scale = alt.Scale(type="log", nice=False, padding=20) if log_x else alt.Scale(nice=True, zero=False)
        base = alt.Chart(frame[frame["task"] == task]).mark_point(size=60, filled=True, opacity=0.8)
        axis = alt.Axis(tickCount=5, labelOverlap="greedy")
        axes = {"x": alt.X("x:Q", title=x, scale=scale, axis=axis), "y": alt.Y("value:Q", title=y)}
        panels.append(base.encode(**axes, color=colour, shape=shape).properties(width=330, height=260, title=task))
    return _style(alt.hconcat(*panels, title=title))


def verdict_counts(frame: pd.DataFrame) -> alt.TopLevelMixin:
    """Bars of claims a section, split by verdict; claims not built yet are their own kind. frame: claims.csv's columns."""
    kinds = {
        "replicated": "#009E73",
        "same_direction": "#56B4E9",
        "inconclusive": "#F0E442",
        "not_replicated": "#D55E00",
        "not_competent": "#CC79A7",
        "out_of_reach": "#999999",
        "not built yet": "#DDDDDD",
    }
    shown = frame.assign(kind=frame["verdict"].where(frame["reason"] != "not built yet", "not built yet"))
    counts = shown.groupby(["section", "kind"], as_index=False).size()
    names = [k for k in kinds if k in set(counts["kind"])]
    counts["order"] = counts["kind"].map(list(kinds).index)
    colour = alt.Color("kind:N", scale=alt.Scale(domain=names, range=[kinds[k] for k in names]), title=None)
    y = alt.Y("section:N", title="section", sort=list(dict.fromkeys(frame["section"])))
    x = alt.X("size:Q", title="claims")
    bars = alt.Chart(counts).encode(x=x, y=y, color=colour, order="order:Q").mark_bar(stroke="white")
    return _style(bars.properties(width=520, height=260))


def placements(frame: pd.DataFrame, counts: tuple[int, int], title: str = "") -> alt.TopLevelMixin:
    """Where the normalisations of several models act, one panel a model: the calls that a norm gains with each further loop
    step, by place, with the number of norm modules. frame: one row a norm, columns model, calls (at `counts`), acts.
    """
    frame = frame[frame["calls"].map(any)]
    gained = frame["calls"].map(lambda calls: (calls[-1] - calls[0]) / (counts[-1] - counts[0]))
    spots = frame.assign(gained=gained).groupby(["model", "gained", "acts"], sort=False).size().reset_index(name="modules")
    order = ["outside the loop", "inside a looped layer", "at the loop boundary"]
    most = int(spots["gained"].max()) + 1
    x = alt.X("gained:Q", scale=alt.Scale(domain=[-0.3, most]), axis=alt.Axis(values=list(range(most))))
    y = alt.Y("acts:N", sort=order, scale=alt.Scale(domain=order), title=None, axis=alt.Axis(labelLimit=200))
    colour = alt.Color("acts:N", scale=alt.Scale(domain=order, range=list(COLOURS[:3])), legend=None)
    shape = alt.Shape("acts:N", scale=alt.Scale(domain=order, range=list(SHAPES[:3])), legend=None)
    panels, across = [], 4
    for i, (model, own) in enumerate(spots.groupby("model", sort=False)):
        named = x.title("calls gained a loop step")
        rows = y if i % across == 0 else y.axis(alt.Axis(labels=False, ticks=False))
        dots = alt.Chart(own).mark_point(filled=True, size=110, opacity=1).encode(named, rows, colour, shape)
        names = alt.Chart(own).mark_text(dx=11, align="left", fontSize=FONT - 1).encode(named, rows, text="modules:Q")
        panels.append((dots + names).properties(width=150, height=90, title=model))
    return _style(alt.concat(*panels, columns=across, title=title))


def forest(frame: pd.DataFrame, x: str, title: str = "") -> alt.TopLevelMixin:
    """A value with its interval for every model, one panel a task; hollow where the pair fails the competence gate.

    frame: model, family, task, value, low, high, competent. x: the value's name and unit.
    """
    families = list(dict.fromkeys(frame["family"]))
    colour = alt.Color("family:N", scale=alt.Scale(domain=families, range=list(COLOURS[: len(families)])), title=None)
    ends = [min(-0.05, frame[["low", "value"]].min().min()), max(0.05, frame[["high", "value"]].max().max())]
    axis = alt.X("value:Q", title=x, scale=alt.Scale(domain=ends))
    panels = []
    for i, (task, own) in enumerate(frame.groupby("task", sort=False)):
        y = alt.Y("model:N", sort=list(dict.fromkeys(frame["model"])), title=None)
        y = y if i == 0 else y.axis(alt.Axis(labels=False, ticks=False))
        base = alt.Chart(own).encode(y=y, color=colour)
        spans = base.mark_rule(strokeWidth=2).encode(x=alt.X("low:Q", title=x, scale=alt.Scale(domain=ends)), x2="high:Q")
        parts = {True: {"filled": True}, False: {"filled": False, "fill": "white"}}
        marks = (alt.Chart(own[own["competent"] == yes]).mark_point(size=70, opacity=1, **how) for yes, how in parts.items())
        dots = alt.layer(*(mark.encode(y=y, x=axis, color=colour) for mark in marks))
        zero = alt.Chart(pd.DataFrame({"value": [0.0]})).mark_rule(color="#444", strokeDash=[5, 4]).encode(x="value:Q")
        panels.append((zero + spans + dots).properties(width=230, height=26 * own["model"].nunique() + 10, title=task))
    return _style(alt.hconcat(*panels, title=title))


def doses(
    frame: pd.DataFrame, order: list[str], title: str = "", y: str = "accuracy", columns: int | None = None
) -> alt.TopLevelMixin:
    """A measure against how often the boundary norm fires, a line a loop count, a panel a (style, task).

    frame: style, seed, task, dose (a name in `order`, the densest first), at (the loop count in words), value; y: the measure;
    columns: panels in a row (default: the tasks).
    """
    counts = list(dict.fromkeys(frame.sort_values("K")["at"]))
    colour = alt.Color("at:N", scale=alt.Scale(domain=counts, range=list(COLOURS[: len(counts)])), title=None)
    shape = alt.Shape("at:N", scale=alt.Scale(domain=counts, range=list(SHAPES[: len(counts)])), title=None)
    x = alt.X("dose:O", sort=order, title="norm after every k-th step, k", axis=alt.Axis(labelAngle=0))
    named, panels = alt.Y("value:Q", title=y, scale=alt.Scale(domain=[0, 1.1], nice=False)), []
    for (style, task), own in frame.groupby(["style", "task"], sort=False):
        mean = means(own, ["dose", "at"])
        base = alt.Chart(mean)
        layers = [
            base.mark_line(strokeWidth=2).encode(x=x, y=named, color=colour),
            base.mark_rule(strokeWidth=2).encode(x=x, y=alt.Y("low:Q", title=y), y2="high:Q", color=colour),
            alt.Chart(own).mark_point(size=28, opacity=0.7).encode(x=x, y=named, color=colour, shape=shape),
        ]
        panels.append(alt.layer(*layers, width=230, height=190, title=f"{style}, {task}"))
    return _style(alt.concat(*panels, columns=columns or frame["task"].nunique(), title=title))


def _groups(frame: pd.DataFrame) -> tuple[list[str], alt.Color, alt.Shape]:
    """The groups of tasks in order, and a colour and shape for each."""
    names = list(dict.fromkeys(frame["group"]))
    colour = alt.Color("group:N", scale=alt.Scale(domain=names, range=list(COLOURS[: len(names)])), title=None)
    colour = colour.legend(symbolOpacity=1)
    return names, colour, alt.Shape("group:N", scale=alt.Scale(domain=names, range=list(SHAPES[: len(names)])), title=None)


def _ends(frame: pd.DataFrame, least: float = 0.05) -> list[float]:
    """An axis that holds every value, interval and zero."""
    low, high = min(-least, frame[["low", "value"]].min().min()), max(least, frame[["high", "value"]].max().max())
    return [low - 0.04 * (high - low), high + 0.04 * (high - low)]


def effects(frame: pd.DataFrame, title: str = "", columns: int = 2) -> alt.TopLevelMixin:
    """Differences between arms by group of tasks, a panel a comparison: value, 95 % interval, and the paper's direction beside.

    frame: axis, label, group, value, low, high, competent (hollow where not), paper ("+", "-", "mixed" or "").
    """
    names, colour, shape = _groups(frame)
    ends, y = _ends(frame), alt.Y("group:N", sort=names, title=None, axis=alt.Axis(labelLimit=180))
    scale = alt.Scale(domain=[ends[0], ends[1] + 0.16 * (ends[1] - ends[0])], nice=False)
    x = alt.X("value:Q", title="difference in accuracy", scale=scale)
    panels = []
    for i, ((axis, label), own) in enumerate(frame.groupby(["axis", "label"], sort=False)):
        rows = y if i % columns == 0 else y.axis(alt.Axis(labels=False, ticks=False))
        colours = {"y": rows, "color": colour.legend(None)}
        spans = alt.Chart(own).mark_rule(strokeWidth=2).encode(x=alt.X("low:Q", scale=scale), x2="high:Q", **colours)
        parts = {True: {"filled": True}, False: {"filled": False, "fill": "white"}}
        dots = [
            alt.Chart(own[own["competent"] == yes])
            .mark_point(size=80, opacity=1, **how)
            .encode(x=x, shape=shape.legend(None), **colours)
            for yes, how in parts.items()
        ]
        zero = alt.Chart(pd.DataFrame({"value": [0.0]})).mark_rule(color="#444", strokeDash=[5, 4]).encode(x="value:Q")
        said = alt.Chart(own.assign(at=scale.domain[1])).mark_text(align="right", fontSize=FONT, color="#333")
        said = said.encode(x="at:Q", y=rows, text="paper:N")
        named = alt.TitleParams(f"{axis}: {label}", subtitle="right: the paper")
        panels.append(alt.layer(zero, spans, *dots, said, width=330, height=28 * len(names) + 10, title=named))
    return _style(alt.concat(*panels, columns=columns, title=title))


def gaps(frame: pd.DataFrame, title: str = "", columns: int = 3) -> alt.TopLevelMixin:
    """Differences between arms against the share of training (log2), a panel a comparison, a line a group of tasks.

    frame: axis, label, group, share, value, low, high.
    """
    _, colour, shape = _groups(frame)
    shares, scale = sorted(frame["share"].unique()), alt.Scale(domain=_ends(frame), nice=False)
    span = alt.Scale(type="log", base=2, domain=[0.85 * shares[0], 1.18 * shares[-1]], nice=False)
    x = alt.X("share:Q", title="share of training steps", scale=span, axis=alt.Axis(values=shares, format=".0%"))
    panels = []
    for (axis, label), own in frame.groupby(["axis", "label"], sort=False):
        base = alt.Chart(own).encode(x=x, color=colour)
        named = alt.Y("value:Q", title="difference in accuracy", scale=scale)
        layers = [
            alt.Chart(pd.DataFrame({"value": [0.0]})).mark_rule(color="#444", strokeDash=[5, 4]).encode(y="value:Q"),
            base.mark_area(opacity=0.12).encode(y=alt.Y("low:Q", scale=scale, title="difference in accuracy"), y2="high:Q"),
            base.mark_line(strokeWidth=2).encode(y=named),
            base.mark_point(size=55, filled=True, opacity=1).encode(y=named, shape=shape),
        ]
        panels.append(alt.layer(*layers, width=235, height=190, title=alt.TitleParams(label, subtitle=axis)))
    return _style(alt.concat(*panels, columns=columns, title=title))


def arms_by_task(frame: pd.DataFrame, floors: pd.DataFrame, title: str = "", columns: int = 3) -> alt.TopLevelMixin:
    """Accuracy of every arm, a panel a task: seeds, mean, and the no-skill floor (dashed). frame: arm, seed, task, value;
    floors: task, value."""
    arms, panels = list(dict.fromkeys(frame["arm"])), []
    floor = floors.set_index("task")["value"]
    for i, (task, own) in enumerate(frame.groupby("task", sort=False)):
        y = alt.Y("arm:N", sort=arms, title=None, axis=alt.Axis(labelLimit=180))
        y = y if i % columns == 0 else y.axis(alt.Axis(labels=False, ticks=False))
        x = alt.X("value:Q", title="accuracy", scale=alt.Scale(domain=[0, 1.02], nice=False))
        seeds = alt.Chart(own).mark_point(size=35, opacity=0.6, color=COLOURS[0]).encode(x=x, y=y)
        mean = own.groupby("arm", as_index=False, sort=False)["value"].mean()
        ticks = alt.Chart(mean).mark_tick(thickness=3, size=18, color=COLOURS[1]).encode(x=x, y=y)
        level = alt.Chart(pd.DataFrame({"value": [floor[task]]})).mark_rule(color="#444", strokeDash=[5, 4]).encode(x="value:Q")
        panels.append((level + seeds + ticks).properties(width=215, height=24 * len(arms) + 10, title=task))
    return _style(alt.concat(*panels, columns=columns, title=title))


def by_arm(frame: pd.DataFrame, x: str, title: str = "") -> alt.TopLevelMixin:
    """A measure of every arm: seeds, mean and 95 % interval. frame: arm, seed, value; x: the measure's name and unit."""
    y = alt.Y("arm:N", sort=list(dict.fromkeys(frame["arm"])), title=None, axis=alt.Axis(labelLimit=180))
    scale = alt.Scale(zero=False, padding=15)
    mean = alt.Chart(means(frame, ["arm"])).encode(y=y)
    layers = [
        alt.Chart(frame)
        .mark_point(size=35, opacity=0.6, color=COLOURS[0])
        .encode(x=alt.X("value:Q", title=x, scale=scale, axis=alt.Axis(tickCount=6)), y=y),
        mean.mark_rule(strokeWidth=3, color=COLOURS[1]).encode(x=alt.X("low:Q", scale=scale), x2="high:Q"),
        mean.mark_tick(thickness=3, size=18, color=COLOURS[1]).encode(x="value:Q"),
    ]
    return _style(alt.layer(*layers, width=480, height=34 * frame["arm"].nunique() + 10, title=title))


def routes(frame: pd.DataFrame, order: list[str], title: str = "") -> alt.TopLevelMixin:
    """Accuracy by choice of experts, a panel an arm and group: seeds, mean and 95 % interval. frame: arm, group, route, seed,
    value; order: of the routes."""
    x = alt.X("route:N", sort=order, title="experts", axis=alt.Axis(labelAngle=0))
    scale = alt.Scale(domain=[0, 1.02], nice=False)
    colour = alt.Color("route:N", scale=alt.Scale(domain=order, range=list(COLOURS[: len(order)])), legend=None)
    rows = []
    for arm, of_arm in frame.groupby("arm", sort=False):
        panels = []
        for i, (group, own) in enumerate(of_arm.groupby("group", sort=False)):
            y = alt.Y("value:Q", title="accuracy" if i == 0 else None, scale=scale)
            mean = alt.Chart(means(own, ["route"])).encode(x=x, color=colour)
            layers = [
                alt.Chart(own).mark_point(size=35, opacity=0.5).encode(x=x, y=y, color=colour),
                mean.mark_rule(strokeWidth=3).encode(y=alt.Y("low:Q", scale=scale), y2="high:Q"),
                mean.mark_tick(thickness=3, size=20).encode(y="value:Q"),
            ]
            panels.append(alt.layer(*layers, width=175, height=170, title=alt.TitleParams(group, subtitle=arm)))
        rows.append(alt.hconcat(*panels))
    return _style(alt.vconcat(*rows, title=title))


def balance(frame: pd.DataFrame, title: str = "") -> alt.TopLevelMixin:
    """Load-balancing loss while training, a line an arm: median over seeds and their range; dashed at 1, uniform. frame: arm,
    seed, step, value."""
    some = frame.groupby(["arm", "step"], sort=False)["value"].agg(["median", "min", "max"]).reset_index()
    colour, shape = _arms(_labelled(some))
    base = alt.Chart(_labelled(some)).encode(x=alt.X("step:Q", title="training step"), color=colour)
    named, scale = "balance loss, 1 = uniform", alt.Scale(zero=False)
    layers = [
        alt.Chart(pd.DataFrame({"value": [1.0]})).mark_rule(color="#444", strokeDash=[5, 4]).encode(y="value:Q"),
        base.mark_area(opacity=0.2).encode(y=alt.Y("min:Q", title=named, scale=scale), y2="max:Q"),
        base.mark_line(strokeWidth=2).encode(y=alt.Y("median:Q", title=named, scale=scale)),
        base.mark_point(size=30, filled=True, opacity=1).encode(y=alt.Y("median:Q", title=named, scale=scale), shape=shape),
    ]
    return _style(alt.layer(*layers, width=620, height=280, title=title))


def loads(load: pd.DataFrame, overlap: pd.DataFrame, chance: float, title: str = "") -> alt.TopLevelMixin:
    """Which experts each loop step uses, and how many of a token's experts two loop steps share, a row an arm.

    load: arm, time, expert, share (of selections); overlap: arm, time, other, value; loop steps count from 0 in both and from 1
    in the figure. chance: the overlap of independent choices.
    """
    load = load.assign(step=load["time"] + 1, expert=load["expert"] + 1)
    pairs = overlap.assign(step=overlap["time"] + 1, later=overlap["other"] + 1)
    shades = alt.Color("share:Q", title="share of selections", scale=alt.Scale(scheme="viridis", domainMin=0))
    common = alt.Color("value:Q", title="experts in common", scale=alt.Scale(scheme="viridis", domain=[0, 1]))
    rows = []
    for arm, own in load.groupby("arm", sort=False):
        used = (
            alt.Chart(own)
            .mark_rect()
            .encode(
                x=alt.X("expert:O", title="expert", axis=alt.Axis(labelAngle=0)),
                y=alt.Y("step:O", title="loop step"),
                color=shades.legend(alt.Legend(orient="right", gradientLength=90)),
            )
        )
        shared = pairs[pairs["arm"] == arm]
        cells = alt.Chart(shared).encode(
            x=alt.X("step:O", title="loop step", axis=alt.Axis(labelAngle=0)), y=alt.Y("later:O", title="later loop step")
        )
        squares = cells.mark_rect().encode(color=common.legend(alt.Legend(orient="right", gradientLength=90)))
        # dark squares take light numbers
        light = alt.condition(alt.datum.value > 0.6, alt.value("black"), alt.value("white"))
        numbers = cells.mark_text(fontSize=FONT).encode(text=alt.Text("value:Q", format=".2f"), color=light)
        left = used.properties(width=300, height=110, title=alt.TitleParams("load", subtitle=arm))
        named = alt.TitleParams("overlap", subtitle=f"{arm}; independent: {chance:.2f}")
        rows.append(
            alt.hconcat(left, (squares + numbers).properties(width=180, height=110, title=named)).resolve_scale(
                color="independent"
            )
        )
    return _style(alt.vconcat(*rows, title=title))


def bits_by_step(frame: pd.DataFrame, title: str = "") -> alt.TopLevelMixin:
    """Bits a byte of held-out text against the tokens trained on, a line a seed. frame: arm, seed, tokens, bits_per_byte."""
    frame = _labelled(frame)
    colour, shape = _arms(frame)
    x = alt.X("tokens:Q", title="tokens trained on", axis=alt.Axis(format="~s"), scale=alt.Scale(zero=False))
    y = alt.Y("bits_per_byte:Q", title="bits a byte, held out", scale=alt.Scale(zero=False))
    base = alt.Chart(frame).encode(
        x=x, y=y, color=colour, detail="seed:N", tooltip=["label", "seed", "tokens", "bits_per_byte"]
    )
    lines, points = base.mark_line(strokeWidth=2), base.mark_point(size=55, filled=True, opacity=1).encode(shape=shape)
    return _style((lines + points).properties(width=420, height=260, title=title))
