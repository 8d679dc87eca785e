"""The axes paper's comparisons, one arm minus another, with the direction the paper reports for each group of tasks.

Directions are read off the paper's benchmark points (params/claims.yaml and the paper's text): "+" and "-" where every
benchmark named for the group moved by more than a point that way, "mixed" where they did not, "" where nothing is reported.
"""

from typing import NamedTuple

import pandas as pd

from lib.rules import difference_cell
from lib.rules_dense_axes import MEAN, by_group, competent_groups, group_values, with_mean


class Contrast(NamedTuple):
    """First arm minus second; paper: group -> direction."""

    axis: str
    label: str
    arms: tuple[str, str]
    paper: dict[str, str]


def _paper(context: str, quantitative: str, knowledge: str, constrained: str, mean: str) -> dict[str, str]:
    names = ("context", "quantitative", "knowledge", "constrained", MEAN)
    return dict(zip(names, (context, quantitative, knowledge, constrained, mean), strict=True))


CONTRASTS = (
    Contrast("Q1 envelope", "sandwich - full stack", ("sandwich", "full"), _paper("+", "+", "mixed", "mixed", "")),
    Contrast(
        "Q2 injection",
        "prelude write - none, sandwich",
        ("sandwich_injected", "sandwich"),
        _paper("+", "-", "+", "+", ""),
    ),
    Contrast(
        "Q2 injection", "token write - none, full stack", ("full_injected", "full"), _paper("mixed", "mixed", "+", "+", "")
    ),
    Contrast(
        "Q2 injection",
        "sandwich - full stack, both injected",
        ("sandwich_injected", "full_injected"),
        _paper("", "", "mixed", "", "+"),
    ),
    Contrast("Q3 states", "noise - input", ("noise", "sandwich_injected"), _paper("mixed", "mixed", "mixed", "-", "")),
    Contrast("Q3 states", "shared H/L - input", ("shared_hl", "sandwich_injected"), _paper("", "-", "", "", "mixed")),
    Contrast("Q3 states", "split H/L - input", ("split_hl", "sandwich_injected"), _paper("", "", "", "", "")),
    Contrast("Q3 states", "split H/L x2 - input", ("split_hl_x2", "sandwich_injected"), _paper("", "", "", "", "")),
    Contrast("whole design", "Huginn - Ouro", ("noise", "full"), _paper("+", "+", "+", "+", "+")),
    Contrast("whole design", "feed-forward - Huginn", ("feedforward", "noise"), _paper("", "", "", "", "+")),
)


def effects(scores: pd.DataFrame, floors: pd.DataFrame, contrasts=CONTRASTS) -> pd.DataFrame:
    """Every comparison whose arms are there, in every group and over them, at each share of training.

    Columns axis, label, group, share, value, low, high, n, competent (at the end: one of the two arms has learned the group),
    paper. The mean is over competent groups, or over all where none is. Tables as in `rules_dense_axes`.
    """
    rows = []
    for contrast in contrasts:
        if not set(contrast.arms) <= set(scores["arm"]):
            continue
        groups = by_group(scores.loc[scores["arm"].isin(contrast.arms), "task"])
        able = competent_groups([group_values(scores, arm, groups, share=1.0) for arm in contrast.arms], groups, floors)
        for share in sorted(scores["share"].unique()):
            both = [with_mean(group_values(scores, arm, groups, share=share), able) for arm in contrast.arms]
            for group in both[0]:
                cell = difference_cell(both[0][group], both[1][group], "")
                row = {"axis": contrast.axis, "label": contrast.label, "group": group, "share": share}
                row |= {key: cell[key] for key in ("value", "low", "high", "n")}
                rows.append(row | {"competent": group in able or group == MEAN, "paper": contrast.paper[group]})
    return pd.DataFrame(rows)


GAPS = (
    Contrast("dense", "feed-forward - Huginn", ("feedforward", "noise"), _paper("", "", "", "", "+")),
    Contrast("with experts", "feed-forward - Huginn", ("feedforward_moe", "huginn_moe"), _paper("", "", "", "", "+")),
)


def in_groups(frame: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """A table of accuracies by task as one by group of tasks: columns `by`, group, value."""
    of = {task: group for group, tasks in by_group(frame["task"]).items() for task in tasks}
    named = frame.assign(group=frame["task"].map(of))
    return named.groupby([*by, "group"], sort=False, as_index=False)["value"].mean()
