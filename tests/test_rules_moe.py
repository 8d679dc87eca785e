"""Every verdict of every rule of the mixture-of-experts comparisons, on made-up tables."""

import json

import numpy as np
import pandas as pd
import pytest

from lib import claims, stats
from lib.rules_dense_axes import MEAN, mean_above
from lib.rules_moe import (
    BALANCED,
    GAPS,
    HUGINN_OURO,
    judge_moe,
    moe_balance_order,
    moe_iteration_experts,
    moe_narrows_gap,
)
from lib.task_groups import GROUPS
from tests.test_rules_dense_axes import FLOORS, NAN, TASKS, UNTAUGHT, jitter, of, scores

VALUES = ("moe_wins", "moe_deltas", "moe_balance", "moe_vs_feedforward")
RULES = ("moe_huginn_beats_ouro", "moe_balance_order", "moe_iteration_experts", "moe_narrows_gap")
# context, quantitative, knowledge, constrained: the picture that the claims describe
LEVELS = {
    "full_moe": (0.50, 0.50, 0.60, 0.50),
    "huginn_moe": (0.60, 0.60, 0.59, 0.60),
    "feedforward_moe": (0.62, 0.62, 0.61, 0.60),
    "noise": (0.50, 0.50, 0.50, 0.50),
    "feedforward": (0.60, 0.60, 0.60, 0.50),
}
LOSSES = {"huginn_moe": 1.571, "feedforward_moe": 1.652, "full_moe": 1.899}
NARROWED = f"({GAPS[0][0]} - {GAPS[0][1]}) - ({GAPS[1][0]} - {GAPS[1][1]})"
REUSED, CONTROL = "huginn_moe, own - first", "huginn_moe, own - random"


def balance(losses=LOSSES, seeds=8, diverged=(), scale=0.01):
    """The long table; losses: arm -> a level; diverged: (arm, seed) -> what stands in its place."""
    rows = []
    for arm, level in losses.items():
        for seed, noise in enumerate(jitter(arm, "loss", seeds=seeds, scale=scale)):
            rows.append((arm, seed, dict(diverged).get((arm, seed), level + noise)))
    return pd.DataFrame(rows, columns=["arm", "seed", "value"])


def interventions(
    reused=(0.1,) * 4, random=(0.2,) * 4, base=(0.6,) * 4, other=None, seeds=8, diverged=(), scale=0.01, apart=0.0
):
    """The long table: what a group loses by each route; seeds spread by `apart`. other: losses of full_moe, if it was run."""
    rows = []
    for arm, losses in (("huginn_moe", reused), ("full_moe", other)):
        for group, own, loss, control in zip(GROUPS, base, losses or (), random, strict=False):
            for task in GROUPS[group]:
                spread = jitter(arm, task, "apart", seeds=seeds, scale=apart)
                for route, lost in (("own", 0), ("first", loss), ("random", control)):
                    for seed, noise in enumerate(jitter(arm, task, route, seeds=seeds, scale=scale)):
                        value = NAN if (arm, seed) in diverged else own - lost + noise + spread[seed]
                        rows.append((arm, task, seed, route, value))
    return pd.DataFrame(rows, columns=["arm", "task", "seed", "route", "value"])


def judged(table=None, losses=None, routes=None, scale="laptop", floors=FLOORS):
    tables = scores(LEVELS) if table is None else table, floors
    routes = interventions() if routes is None else routes
    return {j.id: j for j in judge_moe(*tables, balance() if losses is None else losses, routes, scale)}


@pytest.mark.parametrize("scale", ["smoke", "laptop", "paper"])
def test_the_claims_picture_is_replicated_and_benchmark_numbers_are_out_of_reach(scale):
    found, rules = judged(scale=scale), claims.load()
    assert list(found) == [id for id, claim in rules.items() if claim["section"] == "MoE"] and len(found) == 8
    for id, j in found.items():
        assert j.verdict == ("out_of_reach" if id in VALUES else "replicated"), j
        assert 0 < len(j.ours) < 80 and j.n == 8
        assert {p["id"] for p in j.points} == {id} and all(list(p) == claims.POINTS for p in j.points)
        places = [(p["task"], p["arm"]) for p in j.points]
        assert len(set(places)) == len(places)
    for id in VALUES:
        assert found[id].reason.startswith("takes pretraining runs of 730M to 8B parameters, or their published checkpoints")
        assert f"judged as {rules[id]['see']}" in found[id].reason and found[id].reason.endswith(f"scale {scale}")
    json.dumps(claims.as_result(found.values()), allow_nan=False)


def test_values_are_shown_beside_the_papers():
    found = judged()
    assert found["moe_wins"].ours == "Huginn's on 4 of 5 tasks"
    assert found["moe_deltas"].ours == "hops +10.0, circuit +10.0, arithmetic +10.0, knowledge -1.0, constrained +10.0"
    assert found["moe_balance"].ours == "huginn 1.571; feedforward 1.652; full 1.899"
    assert found["moe_vs_feedforward"].ours == "dense +7.5; moe +1.5"


def test_the_order_of_rows_and_the_seeds_numbers_change_nothing():
    tables = [scores(LEVELS, scale=0.05), balance(scale=0.2), interventions(scale=0.05, other=(0.1,) * 4)]
    mixed = [table.sample(frac=1, random_state=1).reset_index(drop=True) for table in tables]
    assert judged(*mixed, floors=FLOORS[::-1]) == judged(*tables)
    assert judged(*(table.assign(seed=table["seed"] + 100) for table in tables)) == judged(*tables)


# ---- moe_huginn_beats_ouro


def beats(table):
    return mean_above("moe_huginn_beats_ouro", table, FLOORS, HUGINN_OURO)


@pytest.mark.parametrize(
    ("huginn", "verdict"),
    [
        ((0.6, 0.6, 0.5, 0.6), "replicated"),
        ((0.9, 0.4, 0.6, 0.4), "replicated"),
        ((0.6, 0.4, 0.7, 0.4), "inconclusive"),
        ((0.3, 0.6, 0.6, 0.5), "not_replicated"),
        ((UNTAUGHT,) * 4, "not_replicated"),
    ],
)
def test_huginn_beats_ouro(huginn, verdict):
    found = beats(scores(LEVELS | {"huginn_moe": huginn}))
    assert found.verdict == verdict, found
    cell = of(found, "huginn_moe - full_moe")[MEAN]
    assert (found.low, found.high) == (cell["low"], cell["high"])
    assert cell["value"] == pytest.approx(np.mean(huginn) - np.mean(LEVELS["full_moe"]))


def test_huginn_against_ouro_is_about_what_either_learned():
    low = {arm: (UNTAUGHT,) * 4 for arm in BALANCED}
    assert beats(scores(LEVELS | low)).verdict == "not_competent"
    part = {arm: (level[0], *low[arm][1:]) for arm, level in LEVELS.items() if arm in low}
    found = beats(scores(LEVELS | part))
    assert found.verdict == "replicated" and of(found, "huginn_moe - full_moe")[MEAN]["value"] == pytest.approx(0.1)
    assert "left out: quantitative, knowledge, constrained, the mean is over context" in found.reason


# ---- moe_balance_order


def ordered(huginn, feedforward, full, **keys):
    return moe_balance_order(balance(dict(zip(BALANCED, (huginn, feedforward, full), strict=True)), **keys))


@pytest.mark.parametrize(
    ("losses", "verdict"),
    [
        ((1.5, 1.6, 1.9), "replicated"),
        # Huginn's below Ouro's, wherever feed-forward lies
        ((1.5, 1.5, 1.9), "same_direction"),
        ((1.5, 1.9, 1.9), "same_direction"),
        ((1.6, 1.5, 1.9), "same_direction"),
        ((1.5, 2.0, 1.9), "same_direction"),
        # not below it, and an interval on the other side
        ((1.9, 1.6, 1.5), "not_replicated"),
        ((1.6, 1.6, 1.5), "not_replicated"),
        ((1.6, 1.5, 1.6), "not_replicated"),
        ((1.6, 1.7, 1.6), "not_replicated"),
        ((1.6, 1.6, 1.6), "inconclusive"),
    ],
)
def test_balance_order(losses, verdict):
    found = ordered(*losses)
    assert found.verdict == verdict, found
    assert found.ours == "huginn {:.3f}, feedforward {:.3f}, full {:.3f}".format(*losses)
    cells = {cell["arm"]: cell for cell in found.points}
    huginn, feedforward, full = losses
    steps = {"feedforward_moe - huginn_moe": feedforward - huginn, "full_moe - feedforward_moe": full - feedforward}
    for arm, value in (steps | {"full_moe - huginn_moe": full - huginn}).items():
        assert cells[arm]["value"] == pytest.approx(value, abs=1e-9) and cells[arm]["task"] == "balance loss"
        assert cells[arm]["p_holm"] >= cells[arm]["p_raw"] and arm in found.reason
    whole = cells["full_moe - huginn_moe"]
    assert (found.low, found.high) == (whole["low"], whole["high"])


def test_balance_cells_against_their_definitions():
    table = balance(scale=0.2)
    by_arm = {arm: table.loc[table["arm"] == arm, "value"].to_numpy() for arm in BALANCED}
    cells = {cell["arm"]: cell for cell in moe_balance_order(table).points}
    pairs = [("feedforward_moe", "huginn_moe"), ("full_moe", "feedforward_moe"), ("full_moe", "huginn_moe")]
    raw = [stats.mann_whitney(by_arm[x], by_arm[y])[1] for x, y in pairs]
    for (x, y), p, q in zip(pairs, raw, stats.holm(raw), strict=True):
        cell = cells[f"{x} - {y}"]
        assert (cell["value"], cell["low"], cell["high"]) == pytest.approx(stats.bootstrap_difference(by_arm[x], by_arm[y])[:3])
        assert (cell["p_raw"], cell["p_holm"]) == pytest.approx((p, q))


def test_a_diverged_seed_has_no_balance():
    # as 0 it would be the best of all
    for gone in (NAN, np.inf):
        found = ordered(1.9, 1.6, 1.5, diverged={("huginn_moe", i): gone for i in (0, 1, 2)})
        assert found.verdict == "not_replicated" and found.n == 5
        assert of(found, "huginn_moe")["balance loss"]["value"] > 1.8
    losses = balance(diverged={("full_moe", 1): NAN})
    found = judged(losses=losses)
    assert found["moe_balance_order"].verdict == "replicated" and "1 of full_moe diverged" in found["moe_balance_order"].reason
    assert found["moe_balance"].n == 7 and found["moe_balance"].ours.startswith("huginn 1.571; feedforward 1.652; full 1.")
    assert found["moe_balance_order"].n == 7 and "below 8: intervals alone decide" in found["moe_balance_order"].reason


def test_an_arm_without_a_sound_seed_leaves_the_balance_open():
    losses = balance(diverged={("full_moe", i): NAN for i in range(8)})
    found = judged(losses=losses)
    j = found["moe_balance_order"]
    assert j.verdict == "inconclusive" and j.reason == "no sound seed of full_moe; 8 of full_moe diverged"
    assert found["moe_balance"].ours == "huginn 1.571; feedforward 1.652"
    json.dumps(claims.as_result(found.values()), allow_nan=False)


# ---- moe_iteration_experts


@pytest.mark.parametrize(
    ("reused", "base", "verdict"),
    [
        ((0.1, 0.1, 0.1, 0.1), (0.6,) * 4, "replicated"),
        ((0.1, 0.1, 0.0, 0.1), (0.6,) * 4, "inconclusive"),
        ((0.1, 0.0, 0.1, -0.1), (0.6,) * 4, "not_replicated"),
        ((-0.1, 0.1, 0.1, 0.1), (0.6,) * 4, "not_replicated"),
        # what was not learned does not decide
        ((0.1, 0.1, 0.0, -0.1), (0.6, 0.6, UNTAUGHT, UNTAUGHT), "replicated"),
        ((0.0, 0.1, 0.1, 0.1), (UNTAUGHT, 0.6, 0.6, 0.6), "replicated"),
        ((0.1, 0.1, 0.1, 0.1), (UNTAUGHT,) * 4, "not_competent"),
        # nor what other experts would have been good for
        ((-0.4, 0.1, 0.1, 0.1), (UNTAUGHT, 0.6, 0.6, 0.6), "replicated"),
    ],
)
def test_iteration_experts(reused, base, verdict):
    found = moe_iteration_experts(interventions(reused, base=base), FLOORS)
    assert found.verdict == verdict, found
    able = [group for group, level in zip(GROUPS, base, strict=True) if level != UNTAUGHT]
    cells = of(found, REUSED)
    assert list(cells) == list(of(found, CONTROL)) == [*GROUPS, MEAN]
    for group, loss in zip(GROUPS, reused, strict=True):
        assert cells[group]["value"] == pytest.approx(loss, abs=1e-9)
        assert of(found, CONTROL)[group]["value"] == pytest.approx(0.2)
    head = min(able or [MEAN], key=lambda group: cells[group]["low"])
    assert (found.low, found.high) == (cells[head]["low"], cells[head]["high"])
    assert found.ours.startswith(f"least, {head}: ") and "; random +0.20 [" in found.ours
    kept = [loss for loss, group in zip(reused, GROUPS, strict=True) if group in able]
    assert cells[MEAN]["value"] == pytest.approx(np.mean(kept or reused))
    assert not able or f"above 0 on {sum(loss > 0 for loss in kept)} of {len(able)} groups" in found.reason


def test_the_control_and_the_full_stack_are_shown_and_do_not_decide():
    found = moe_iteration_experts(interventions(random=(-0.1,) * 4, other=(-0.1,) * 4), FLOORS)
    assert found.verdict == "replicated" and "full_moe" not in found.reason
    for arm, loss in (("huginn_moe", 0.1), ("full_moe", -0.1)):
        assert of(found, f"{arm}, own - first")["knowledge"]["value"] == pytest.approx(loss)
        assert of(found, f"{arm}, own - random")[MEAN]["value"] == pytest.approx(-0.1)
        assert of(found, f"{arm}, first")["context"]["value"] == pytest.approx(0.6 - loss)
        assert {f"{arm}, {route}" for route in ("own", "first", "random")} <= {p["arm"] for p in found.points}
    assert not any(p["arm"].startswith("full") for p in moe_iteration_experts(interventions(), FLOORS).points)


def test_routes_are_compared_on_the_same_models():
    found = moe_iteration_experts(interventions((0.02,) * 4, apart=0.1, scale=0.002), FLOORS)
    assert found.verdict == "replicated"
    cell = of(found, REUSED)["context"]
    assert cell["high"] - cell["low"] < 0.01 and cell["p_raw"] is None
    assert of(found, "huginn_moe, own")["context"]["high"] - of(found, "huginn_moe, own")["context"]["low"] > 0.05
    table = interventions()
    with pytest.raises(ValueError, match="the same models have seeds"):
        moe_iteration_experts(table[(table["route"] != "first") | (table["seed"] > 0)], FLOORS)
    with pytest.raises(ValueError, match="no rows with arm huginn_moe, task hops, route random"):
        moe_iteration_experts(table[table["route"] != "random"], FLOORS)


def test_a_diverged_model_loses_nothing_by_other_experts():
    found = judged(routes=interventions(diverged=[("huginn_moe", 2)]))["moe_iteration_experts"]
    assert found.verdict == "replicated" and "1 of huginn_moe diverged" in found.reason and found.n == 8
    assert of(found, REUSED)["knowledge"]["value"] == pytest.approx(0.1 * 7 / 8, abs=0.005)


# ---- moe_narrows_gap


def gaps(dense, moe, looped=(0.5,) * 4, looped_moe=None, **keys):
    """Feed-forward ahead of the looped arm by these, dense and with experts."""
    looped_moe = looped_moe or looped
    ahead = {"feedforward": (looped, dense), "feedforward_moe": (looped_moe, moe)}
    levels = {arm: tuple(level + gap for level, gap in zip(*of, strict=True)) for arm, of in ahead.items()}
    return scores(levels | {"noise": looped, "huginn_moe": looped_moe}, **keys)


@pytest.mark.parametrize(
    ("dense", "moe", "verdict"),
    [
        ((0.1,) * 4, (0.02,) * 4, "replicated"),
        ((0.1, 0.1, 0.0, 0.0), (0.0, 0.0, 0.02, 0.02), "replicated"),
        ((0.05,) * 4, (-0.05,) * 4, "replicated"),
        ((0.1,) * 4, (0.1,) * 4, "inconclusive"),
        ((0.1, 0.0, 0.1, 0.0), (0.0, 0.1, 0.0, 0.1), "inconclusive"),
        ((0.02,) * 4, (0.1,) * 4, "not_replicated"),
    ],
)
def test_narrows_gap(dense, moe, verdict):
    found = moe_narrows_gap(gaps(dense, moe), FLOORS)
    assert found.verdict == verdict, found
    cells = of(found, NARROWED)
    assert list(cells) == [*GROUPS, MEAN]
    for group, one, other in zip(GROUPS, dense, moe, strict=True):
        assert cells[group]["value"] == pytest.approx(one - other, abs=1e-9)
        assert of(found, "feedforward - noise")[group]["value"] == pytest.approx(one, abs=1e-9)
        assert of(found, "feedforward_moe - huginn_moe")[group]["value"] == pytest.approx(other, abs=1e-9)
    assert cells[MEAN]["value"] == pytest.approx(np.mean(dense) - np.mean(moe), abs=1e-9)
    assert (found.low, found.high) == (cells[MEAN]["low"], cells[MEAN]["high"])
    assert "there may be none to narrow" not in found.reason


def test_the_interaction_against_its_definition():
    table = gaps((0.1,) * 4, (0.05,) * 4, scale=0.1)
    at = table[(table["share"] == 1) & table["task"].isin(TASKS)].pivot(index=["arm", "seed"], columns="task", values="value")
    mean = sum(at[list(tasks)].mean(axis=1) for tasks in GROUPS.values()) / 4
    whole = stats.bootstrap_interaction(*([mean[arm] for arm in pair] for pair in GAPS))
    cell = of(moe_narrows_gap(table, FLOORS), NARROWED)[MEAN]
    assert (cell["value"], cell["low"], cell["high"]) == pytest.approx(whole[:3]) and cell["n"] == 8


def test_a_gap_that_is_none_is_said():
    found = moe_narrows_gap(gaps((0.0,) * 4, (-0.1,) * 4), FLOORS)
    assert found.verdict == "replicated" and "the dense gap is not above 0: there may be none to narrow" in found.reason


@pytest.mark.parametrize("side", ["dense", "moe"])
def test_a_group_counts_where_both_gaps_are_of_something_learned(side):
    low, fit = (UNTAUGHT, 0.5, 0.5, 0.5), (0.5,) * 4
    looped, looped_moe = (low, fit) if side == "dense" else (fit, low)
    found = moe_narrows_gap(gaps((0.0, 0.1, 0.1, 0.1), (0.0, 0.2, 0.2, 0.2), looped, looped_moe), FLOORS)
    assert found.verdict == "not_replicated"
    assert of(found, NARROWED)[MEAN]["value"] == pytest.approx(-0.1)
    assert "not competent and left out: context, the mean is over quantitative, knowledge, constrained" in found.reason
    # the groups that are competent on one side only leave none
    none = moe_narrows_gap(gaps((0.0,) * 4, (0.0,) * 4, (0.5, 0.5, UNTAUGHT, UNTAUGHT), (UNTAUGHT, UNTAUGHT, 0.5, 0.5)), FLOORS)
    assert none.verdict == "not_competent"


def test_the_gaps_are_compared_on_the_tasks_of_both():
    table = gaps((0.1, 0.1, 0.5, 0.5), (0.02,) * 4)
    short = table[~(table["arm"].str.endswith("_moe") & table["task"].isin(["circuit", "knowledge", "constrained"]))]
    found = moe_narrows_gap(short, FLOORS)
    assert found.verdict == "replicated" and "not run: knowledge, constrained" in found.reason
    assert of(found, NARROWED)[MEAN]["value"] == pytest.approx(0.08)


# ---- few seeds, diverged seeds, what was not run


@pytest.mark.parametrize("seeds", [1, 4, 5, 8])
def test_few_seeds_decide_nothing_and_some_are_said_to_be_few(seeds):
    good = judged(scores(LEVELS, seeds=seeds), balance(seeds=seeds), interventions(seeds=seeds))
    swapped = dict(zip(LEVELS, reversed(LEVELS.values()), strict=True)) | {
        "full_moe": (0.9,) * 4,
        "feedforward_moe": (0.9,) * 4,
    }
    bad = judged(
        scores(swapped, seeds=seeds),
        balance({"huginn_moe": 1.9, "feedforward_moe": 1.6, "full_moe": 1.5}, seeds=seeds),
        interventions((-0.1,) * 4, seeds=seeds),
    )
    near = moe_balance_order(balance({"huginn_moe": 1.6, "feedforward_moe": 1.5, "full_moe": 1.9}, seeds=seeds))
    for found, verdict in ((good, "replicated"), (bad, "not_replicated"), ({"moe_balance_order": near}, "same_direction")):
        for id in set(RULES) & set(found):
            assert found[id].verdict == (verdict if seeds >= 5 else "inconclusive"), found[id]
            assert (f"n = {seeds} an arm, below 5: intervals of so few decide nothing" in found[id].reason) == (seeds < 5)
            assert (f"n = {seeds} an arm, below 8: intervals alone decide" in found[id].reason) == (5 <= seeds < 8)
    json.dumps(claims.as_result(good.values()), allow_nan=False)


def test_diverged_seeds_count_as_zero_and_are_named():
    found = judged(scores(LEVELS, diverged=[("huginn_moe", 0), ("feedforward", 1)]))
    j = found["moe_huginn_beats_ouro"]
    assert j.reason.endswith("1 of huginn_moe diverged")
    assert of(j, "huginn_moe")["knowledge"]["value"] == pytest.approx(0.59 * 7 / 8, abs=0.005)
    assert "1 of feedforward diverged; 1 of huginn_moe diverged" in found["moe_narrows_gap"].reason
    assert "diverged" not in found["moe_balance_order"].reason + found["moe_iteration_experts"].reason


def test_what_was_not_run_is_out_of_reach():
    found = judged(scores({arm: LEVELS[arm] for arm in BALANCED}), balance().query("arm != 'full_moe'"), interventions()[:0])
    needs = {
        "moe_balance": "full_moe",
        "moe_balance_order": "full_moe",
        "moe_iteration_experts": "huginn_moe",
        "moe_narrows_gap": "feedforward and noise",
        "moe_vs_feedforward": "feedforward and noise",
    }
    for id, j in found.items():
        assert j.verdict == ("replicated" if id == "moe_huginn_beats_ouro" else "out_of_reach"), j
        assert f"needs runs of {needs[id]}" in j.reason if id in needs else "needs" not in j.reason
    some = judged(scores(LEVELS, tasks=["hops"]), routes=interventions().query("task == 'hops'"))
    for id in RULES[::3]:
        assert some[id].verdict == "replicated" and "not run: quantitative, knowledge, constrained" in some[id].reason
    assert some["moe_iteration_experts"].verdict == "replicated" and "not run" in some["moe_iteration_experts"].reason
    assert some["moe_wins"].ours == "Huginn's on 1 of 1 tasks"
