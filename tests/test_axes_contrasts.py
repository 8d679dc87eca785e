"""The axes paper's comparisons on small tables by hand, and the directions that are printed beside them."""

import numpy as np
import pandas as pd
import pytest

from lib import claims, rules_dense_axes, rules_moe, stats
from lib.axes_arms import ARMS, WITH_EXPERTS
from lib.axes_contrasts import CONTRASTS, GAPS, effects, in_groups
from lib.rules_dense_axes import MEAN
from lib.task_groups import GROUPS

NAN = float("nan")
TASKS = [task for tasks in GROUPS.values() for task in tasks]
FLOORS = pd.DataFrame({"task": TASKS, "value": 0.1})
BENCHMARKS = {
    "context": ("BBH-CoT", "DROP"),
    "quantitative": ("GSM8K", "MATH500"),
    "knowledge": ("MMLU", "TriviaQA", "ARC-C", "HellaSwag"),
    "constrained": ("HumanEval+", "MBPP+"),
}
NAMED = {c.label: c for c in CONTRASTS}


def scores(levels, shares=(0.5, 1.0), seeds=3):
    """Accuracies of arms: levels[arm][task], one for each seed, at the end; a tenth of it at earlier shares."""
    rows = [
        (arm, seed, task, share, value * (1 if share == 1 else 0.1))
        for arm, of in levels.items()
        for task, values in of.items()
        for share in shares
        for seed, value in enumerate(np.broadcast_to(values, seeds))
    ]
    return pd.DataFrame(rows, columns=["arm", "seed", "task", "share", "value"])


LEVELS = {
    "sandwich": {"hops": (0.8, 0.6, 0.7), "circuit": (0.5, 0.5, 0.8), "arithmetic": 0.6, "knowledge": 0.12, "constrained": 0.5},
    "full": {"hops": (0.5, 0.4, 0.6), "circuit": (0.5, 0.6, 0.4), "arithmetic": 0.7, "knowledge": 0.11, "constrained": 0.12},
}


def row(frame, **keys):
    for name, value in keys.items():
        frame = frame[frame[name] == value]
    assert len(frame) == 1
    return frame.iloc[0]


def test_effects_by_hand():
    found = effects(scores(LEVELS), FLOORS)
    columns = ["axis", "label", "group", "share", "value", "low", "high", "n", "competent", "paper"]
    assert list(found.columns) == columns and len(found) == 2 * 5
    assert set(found["axis"]) == {"Q1 envelope"} and set(found["label"]) == {"sandwich - full stack"}
    assert list(found["group"]) == [*GROUPS, MEAN] * 2 and list(found["share"]) == [0.5] * 5 + [1.0] * 5
    end = found[found["share"] == 1.0]
    # context: (0.65, 0.55, 0.75) - (0.5, 0.5, 0.5)
    assert row(end, group="context")["value"] == pytest.approx(0.15)
    assert row(end, group="quantitative")["value"] == pytest.approx(-0.1)
    assert row(end, group="constrained")["value"] == pytest.approx(0.38)
    # nobody learned knowledge: it is out of the mean
    assert dict(zip(end["group"], end["competent"], strict=True)) == dict.fromkeys([*GROUPS, MEAN], True) | {"knowledge": False}
    assert row(end, group=MEAN)["value"] == pytest.approx((0.15 - 0.1 + 0.38) / 3)
    whole = stats.bootstrap_difference(pd.Series([0.65, 0.55, 0.75]), pd.Series([0.5, 0.5, 0.5]))
    context = row(end, group="context")
    assert (context["low"], context["high"]) == pytest.approx((whole.low, whole.high)) and whole.low < whole.high
    assert set(found["n"]) == {3}
    assert dict(zip(end["group"], end["paper"], strict=True)) == NAMED["sandwich - full stack"].paper


def test_earlier_shares_have_their_own_values_and_the_ends_competence():
    found = effects(scores(LEVELS, shares=(0.25, 1.0)), FLOORS)
    early, end = (found[found["share"] == share].reset_index(drop=True) for share in (0.25, 1.0))
    np.testing.assert_allclose(early["value"], end["value"] / 10)
    assert early["competent"].equals(end["competent"])  # though a tenth is no competence


def test_where_nobody_learned_anything_the_mean_is_over_all_groups():
    low = {arm: {task: np.asarray(values) / 10 for task, values in of.items()} for arm, of in LEVELS.items()}
    found = effects(scores(low, shares=(1.0,)), FLOORS)
    assert not found[found["group"] != MEAN]["competent"].any()
    assert row(found, group=MEAN)["value"] == pytest.approx(found[found["group"] != MEAN]["value"].mean())


def test_a_diverged_seed_counts_as_zero():
    table = scores(LEVELS, shares=(1.0,))
    table.loc[(table["arm"] == "full") & (table["seed"] == 1), "value"] = NAN
    found = row(effects(table, FLOORS), group="quantitative")
    assert found["value"] == pytest.approx(0.6 - (0.7 + 0 + 0.7) / 3) and found["n"] == 3


def test_comparisons_are_those_whose_arms_were_run_in_their_order():
    of = LEVELS["sandwich"]
    arms = ("noise", "full", "sandwich", "shared_hl", "sandwich_injected")
    found = effects(scores({arm: of for arm in arms}), FLOORS)
    labels = ["sandwich - full stack", "prelude write - none, sandwich", "noise - input", "shared H/L - input", "Huginn - Ouro"]
    assert list(found["label"].unique()) == labels and (found["value"] == 0).all()
    both = effects(scores({arm: of for arm in ("noise", "feedforward", "feedforward_moe", "huginn_moe")}), FLOORS, GAPS)
    assert list(both["axis"].unique()) == ["dense", "with experts"]
    assert effects(scores({"full": of}), FLOORS).empty


def test_each_comparison_has_the_competence_of_its_own_arms():
    of, untaught = LEVELS["full"], {task: 0.11 for task in TASKS}
    table = scores({"full": of, "sandwich": untaught, "sandwich_injected": untaught})
    found = effects(table, FLOORS)
    able = found[found["competent"] & (found["group"] != MEAN)].groupby("label")["group"].unique()
    assert {label: set(groups) for label, groups in able.items()} == {"sandwich - full stack": {"context", "quantitative"}}


def test_tasks_become_groups():
    frame = scores(LEVELS, shares=(1.0,)).drop(columns="share")
    found = in_groups(frame, ["arm", "seed"])
    assert list(found.columns) == ["arm", "seed", "group", "value"] and len(found) == 2 * 3 * 4
    assert row(found, arm="sandwich", seed=2, group="context")["value"] == pytest.approx((0.7 + 0.8) / 2)
    assert row(found, arm="full", seed=0, group="constrained")["value"] == 0.12
    assert set(in_groups(pd.concat([frame, frame.assign(task="paragg")]), ["arm", "seed"])["group"]) == set(GROUPS)


# ---- the paper's directions


def direction(values):
    """Of benchmark points, as the module says it."""
    return "+" if all(v > 1 for v in values) else "-" if all(v < -1 for v in values) else "mixed"


def named(points):
    """Group -> direction, of the groups that benchmarks are reported for."""
    found = {group: [points[b] for b in benchmarks if b in points] for group, benchmarks in BENCHMARKS.items()}
    return {group: direction(values) for group, values in found.items() if values}


def test_directions_are_those_of_the_claims_numbers():
    rules = claims.load()
    for label, points in (
        ("sandwich - full stack", rules["q1_envelope"]["value"]),
        ("prelude write - none, sandwich", rules["q2_injection"]["value"]),
        ("shared H/L - input", {"MATH500": rules["q3_states"]["value"]["shared_hl"]["MATH500"]}),
    ):
        said = named(points)
        assert said and {group: NAMED[label].paper[group] for group in said} == said, label
    # q2: benchmarks of each sign, so that a swapped pair would show
    assert named(rules["q2_injection"]["value"]) == {"context": "+", "quantitative": "-", "knowledge": "+", "constrained": "+"}
    assert rules["dense_huginn_beats_ouro"]["value"] == {"wins": 10, "of": 10}
    assert set(NAMED["Huginn - Ouro"].paper.values()) == {"+"}
    assert rules["q2_middle_beats_full"]["value"]["wins"] > 5
    assert NAMED["sandwich - full stack, both injected"].paper[MEAN] == "+"


def test_comparisons_are_of_known_arms_and_those_that_the_rules_judge():
    for contrast in (*CONTRASTS, *GAPS):
        assert set(contrast.arms) <= set(ARMS) | set(WITH_EXPERTS)
        assert list(contrast.paper) == [*GROUPS, MEAN] and set(contrast.paper.values()) <= {"+", "-", "mixed", ""}
    pairs = {c.arms for c in CONTRASTS}
    judged = {
        ("sandwich", "full"),
        ("sandwich_injected", "sandwich"),
        ("sandwich_injected", "full_injected"),
        ("noise", "full"),
    }
    assert judged | set(rules_dense_axes.Q3) <= pairs and len(pairs) == len(CONTRASTS)
    assert tuple(c.arms for c in GAPS) == rules_moe.GAPS and NAMED["feed-forward - Huginn"].arms == rules_moe.GAPS[0]
