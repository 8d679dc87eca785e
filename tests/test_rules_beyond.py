"""Every verdict of the rules of the two open questions, on made-up tables."""

import json
import time

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import mannwhitneyu, spearmanr

from lib import claims
from lib.rules_beyond import (
    ARMS,
    READOUTS,
    damping,
    judge_damping,
    judge_readout_axis,
    readout_axis,
    update_and_loss,
)
from lib.stats import bootstrap_interaction, rank_correlation

NAN = float("nan")
FLOORS = pd.DataFrame({"task": ["circuit", "circuit"], "d_star": ["1", "2"], "value": [0.4, 0.5]})
GROUPS = np.repeat([0, 1], 8)


def noise(*key, seeds=8, scale=0.004):
    return np.random.default_rng([sum(map(ord, str(part))) for part in key]).normal(0, scale, seeds)


def centred(*key, seeds):
    """Noise of mean 0, and of deviation 1 with more than one seed."""
    values = noise(*key, seeds=seeds, scale=1)
    return (values - values.mean()) / (values.std() or 1)


def models(no_norm=(0.08, 0.03), with_norm=(0.41, 0.38), seeds=8, within=1.0, spread=0.01, lost=(), at_r0=0.97):
    """(updates, accuracy) of models with these (update, loss) an arm; inside an arm the loss follows the update
    when `within` is 1, opposes it at -1 and is unrelated at 0. lost lists (arm, seed)."""
    of_updates, of_accuracy = [], []
    for arm, (update, loss) in zip(ARMS, (no_norm, with_norm), strict=True):
        moved, other = (spread * centred(arm, what, seeds=seeds) for what in ("update", "loss"))
        apart = within * moved + (1 - abs(within)) * other
        for seed in range(seeds):
            gone = (arm, seed) in lost
            of_updates += [("circuit", arm, seed, K, NAN if gone else update + moved[seed] + 32 - K) for K in (4, 32)]
            for K, value in ((4, at_r0), (32, at_r0 - loss - apart[seed])):
                # per-depth rows must not be read
                of_accuracy += [("circuit", arm, seed, K, d, NAN if gone else v) for d, v in (("all", value), ("1", -9.0))]
    columns = ["task", "arm", "seed", "K"]
    return pd.DataFrame(of_updates, columns=[*columns, "value"]), pd.DataFrame(
        of_accuracy, columns=[*columns, "d_star", "value"]
    )


def damped(**picture):
    return damping(*models(**picture), FLOORS, 4)


def cells(judgement):
    return {(p["arm"], p["K"]): p for p in judgement.points}


# ---- rank_correlation

ranks = st.lists(st.tuples(st.integers(-5, 5), st.integers(-5, 5)), min_size=4, max_size=12)


@given(ranks)
def test_rank_correlation_is_spearmans(pairs):
    x, y = np.array(pairs, dtype=float).T
    found = rank_correlation(x, y, np.zeros(x.size), resamples=50)
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        assert np.isnan(found.value) and np.isnan(found.low) and np.isnan(found.high)
    else:
        assert found.value == pytest.approx(spearmanr(x, y).statistic, abs=1e-12)
        assert -1 <= found.low <= found.high <= 1 and found.n == x.size


@pytest.mark.parametrize("tied", [False, True])
def test_rank_correlation_interval_is_that_of_a_loop_over_the_same_draws(tied):
    x, y = np.random.default_rng(3).normal(size=(2, 16)) + [[0], [1]] * np.repeat([0, 1], 8)
    x, y = (x, y) if not tied else (x.round(), y.round())
    found = rank_correlation(x, y, GROUPS, seed=5, resamples=400)
    rng, draws = np.random.default_rng(5), []
    first, second = (rng.integers(8, size=(400, 8)) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        drawn = [*a, *(8 + b)]
        if np.ptp(x[drawn]) and np.ptp(y[drawn]):
            draws.append(spearmanr(x[drawn], y[drawn]).statistic)
    assert found[1:3] == pytest.approx(np.percentile(draws, [2.5, 97.5]), abs=1e-9)
    # and other draws give nearly the same
    assert rank_correlation(x, y, GROUPS)[1:3] == pytest.approx(found[1:3], abs=0.12)


def test_units_of_interleaved_groups_stay_in_their_group():
    # each group is constant in x: a resample that kept the design has both levels equally often
    x, y = np.tile([0.0, 1.0], 8), np.tile([0.0, 1.0], 8)
    found = rank_correlation(x, y, np.tile(["a", "b"], 8))
    assert found == pytest.approx((1, 1, 1, 16))


def test_rank_correlation_leaves_resamples_without_variance_out():
    x = [1.0, 2.0, 3.0]  # one of nine resamples is a single unit
    assert rank_correlation(x, x, [0, 0, 0]) == pytest.approx((1, 1, 1, 3))


@settings(max_examples=25)
@given(st.integers(0, 10_000))
def test_rank_correlation_reads_ranks_alone(seed):
    x, y = np.random.default_rng(seed).normal(size=(2, 16))
    found = rank_correlation(x, y, GROUPS, resamples=200)
    assert rank_correlation(np.exp(x), y**3 - 7, GROUPS, resamples=200) == found
    value, low, high, n = rank_correlation(-x, y, GROUPS, resamples=200)
    assert (-value, -high, -low, n) == pytest.approx(found, abs=1e-12)
    assert rank_correlation(y, x, GROUPS, resamples=200) == pytest.approx(found, abs=1e-12)


def test_rank_correlation_is_reproducible_and_quick():
    x, y = np.random.default_rng(0).normal(size=(2, 16))
    start = time.process_time()
    assert rank_correlation(x, y, GROUPS) == rank_correlation(x, y, GROUPS)
    assert time.process_time() - start < 3
    assert rank_correlation(x, y, GROUPS)[1:3] != rank_correlation(x, y, GROUPS, seed=1)[1:3]


@pytest.mark.parametrize("group", [[0, 0], [0, 1]])
def test_two_units_have_a_correlation_and_no_interval(group):
    value, low, high, n = rank_correlation([1, 2], [4, 3], group)
    assert value == pytest.approx(-1) and np.isnan(low) and np.isnan(high) and n == 2


def test_a_group_of_one_gives_no_interval():
    assert np.isnan(rank_correlation([1, 2, 3, 4], [1, 2, 3, 5], [0, 0, 0, 1]).low)


def test_rank_correlation_refuses_what_has_no_rank():
    for x, y, group, said in (
        ([], [], [], "equal numbers above 0"),
        ([1, 2], [1], [0, 0], "x has 2 values, y 1"),
        ([1, NAN], [1, 2], [0, 0], "leave diverged models out"),
    ):
        with pytest.raises(ValueError, match=said):
            rank_correlation(x, y, group)


# ---- damping


def test_the_interpretation_replicates():
    found = damped()
    assert found.verdict == "replicated" and found.n == 8
    assert found.ours.startswith("update at 32: 0.41 against 0.08; rank correlation +1.00 [1.00, 1.00]")
    assert "rank correlation within no_norm +1.00" in found.reason and "difference alone" not in found.reason
    by_place = cells(found)
    assert list(by_place) == [
        ("no_norm, update", 32),
        ("with_norm, update", 32),
        ("with_norm - no_norm, update", 32),
        ("both arms, rank correlation", 32),
        ("no_norm, rank correlation", 32),
        ("with_norm, rank correlation", 32),
    ]
    assert by_place["both arms, rank correlation", 32]["n"] == 16
    assert (found.low, found.high) == (1, 1)
    assert by_place["with_norm - no_norm, update", 32]["value"] == pytest.approx(0.33, abs=0.02)
    json.dumps(claims.as_result([found]), allow_nan=False)


@pytest.mark.parametrize(
    ("picture", "verdict"),
    [
        # the arms differ less than their spread, the correlation holds
        (dict(no_norm=(0.352, 0.322), spread=0.05), "same_direction"),
        # apart, and the loss follows the update but loosely
        (dict(no_norm=(0.08, 0.36), within=0.3, spread=0.05), "same_direction"),
        # the norm's update is the smaller one
        (dict(no_norm=(0.41, 0.38), with_norm=(0.08, 0.03)), "not_replicated"),
        # a larger update goes with less loss
        (dict(no_norm=(0.08, 0.38), with_norm=(0.41, 0.03)), "not_replicated"),
        # the arms agree in their updates
        (dict(no_norm=(0.4, 0.3), with_norm=(0.4, 0.3), within=0, spread=0.05), "inconclusive"),
        # no arm is competent at r0
        (dict(at_r0=0.46), "not_competent"),
    ],
)
def test_damping(picture, verdict):
    found = damped(**picture)
    assert found.verdict == verdict, found
    assert found.points and found.ours


def test_same_direction_has_either_half():
    overlap = cells(damped(no_norm=(0.352, 0.322), spread=0.05))
    none, norm, gap = (overlap[arm, 32] for arm in ("no_norm, update", "with_norm, update", "with_norm - no_norm, update"))
    assert norm["low"] <= none["high"] and gap["low"] > 0 and overlap["both arms, rank correlation", 32]["low"] > 0
    loose = cells(damped(no_norm=(0.08, 0.36), within=0.3, spread=0.05))
    pooled = loose["both arms, rank correlation", 32]
    assert pooled["low"] < 0 < pooled["value"] and loose["with_norm, update", 32]["low"] > 0.2


def test_apart_and_a_negative_correlation_without_interval_is_inconclusive():
    found = damped(no_norm=(0.08, 0.385), within=0, spread=0.05)
    pooled = cells(found)["both arms, rank correlation", 32]
    assert pooled["value"] < 0 < pooled["high"] and found.verdict == "inconclusive", found


def test_a_correlation_of_the_arms_difference_alone_is_said():
    found = damped(within=0)
    assert found.verdict == "replicated"
    assert (
        "neither arm's interval lies above 0: the pooled correlation can come from the arms' difference alone" in found.reason
    )
    for arm in ARMS:
        own = cells(found)[f"{arm}, rank correlation", 32]
        assert own["low"] < 0 < own["high"] and own["n"] == 8
        assert f"within {arm} {own['value']:+.2f} [{own['low']:.2f}, {own['high']:.2f}]" in found.reason
    # a correlation inside the arms that runs the other way does not support the pooled one
    assert "neither arm's interval lies above 0" in damped(within=-1).reason
    opposite = damped(no_norm=(0.08, 0.38), with_norm=(0.41, 0.03), within=1)
    assert opposite.verdict == "not_replicated" and "neither arm's interval lies below 0" in opposite.reason


def test_the_pooled_correlation_is_spearmans_over_all_models():
    tables = models(within=0, spread=0.1)
    rows = update_and_loss(*tables, 4)
    assert len(rows) == 16 and rows["update"].max() < 1  # at 32, not at 4
    pooled = cells(damping(*tables, FLOORS, 4))["both arms, rank correlation", 32]
    assert pooled["value"] == pytest.approx(spearmanr(rows["update"], rows["lost"]).statistic)


def test_diverged_models_are_left_out_and_counted():
    found = damped(lost=[("no_norm", 3), ("no_norm", 5)])
    by_place = cells(found)
    assert found.verdict == "replicated" and found.n == 6
    assert "2 of no_norm diverged, left out of the correlation" in found.reason and "of with_norm" not in found.reason
    assert by_place["both arms, rank correlation", 32]["n"] == 14
    assert by_place["no_norm, update", 32]["value"] == pytest.approx(0.08, abs=0.02)  # not pulled to 0
    # an infinite update or an accuracy of NaN is a diverged model too
    updates, accuracy = models()
    updates.loc[(updates["arm"] == "with_norm") & (updates["seed"] == 0), "value"] = np.inf
    accuracy.loc[(accuracy["arm"] == "with_norm") & (accuracy["seed"] == 1) & (accuracy["K"] == 32), "value"] = NAN
    found = damping(updates, accuracy, FLOORS, 4)
    assert "2 of with_norm diverged" in found.reason and cells(found)["with_norm, rank correlation", 32]["n"] == 6
    assert cells(found)["with_norm, update", 32]["n"] == 7


def test_an_arm_that_always_diverged_leaves_a_table():
    for arm in ARMS:
        found = damped(lost=[(arm, seed) for seed in range(8)])
        assert found.verdict == "inconclusive" and found.n == 0 and found.ours.endswith("rank correlation -")
        assert "- against 0.08" in found.ours or "0.41 against -" in found.ours
        json.dumps(claims.as_result([found]), allow_nan=False)


def test_two_seeds_are_judged_and_said_to_be_few():
    found = damped(seeds=2)
    assert "2 sound models in an arm, below 8: bootstrap intervals are too narrow" in found.reason and found.n == 2
    assert "neither arm's interval lies above 0" in found.reason  # two models have no interval
    assert cells(found)["no_norm, rank correlation", 32]["low"] is None
    assert cells(found)["both arms, rank correlation", 32]["n"] == 4
    one = damped(seeds=1)
    assert one.verdict == "inconclusive" and one.ours.startswith("update at 32: ")


def test_updates_and_accuracy_must_be_of_the_same_models():
    updates, accuracy = models()
    with pytest.raises(ValueError, match="updates of no_norm are of seeds"):
        damping(updates[updates["seed"] > 0], accuracy, FLOORS, 4)
    with pytest.raises(ValueError, match="no rows with task circuit, arm no_norm, K 32"):
        damping(updates[updates["K"] == 4], accuracy, FLOORS, 4)


# ---- readout_axis

HOLDS = {"normalised": (0.93, 0.58), "raw": (0.92, 0.57)}


def axis(means=None, seeds=8, scale=0.004, lost=(), at_r0=None):
    """Accuracy with column readout; means (no_norm, with_norm) at 32 by readout, at_r0 by (arm, readout)."""
    rows = []
    for readout, pair in (HOLDS | (means or {})).items():
        for arm, mean in zip(ARMS, pair, strict=True):
            jitter = noise(arm, readout, seeds=seeds, scale=scale)
            start = (at_r0 or {}).get((arm, readout), 0.98)
            for K, level in ((4, start), (32, mean)):
                for seed in range(seeds):
                    value = NAN if (arm, readout, seed) in lost else level + jitter[seed]
                    rows += [("circuit", arm, seed, K, d, readout, v) for d, v in (("all", value), ("1", -9.0))]
    return pd.DataFrame(rows, columns=["task", "arm", "seed", "K", "d_star", "readout", "value"])


def test_an_axis_that_does_not_matter_replicates():
    found = readout_axis(axis(), FLOORS, 4)
    assert found.verdict == "replicated" and found.n == 8, found
    assert found.ours.startswith("interaction at 32: ") and -0.05 < found.low < found.high < 0.05
    assert "undertrained" not in found.reason and "diverged" not in found.reason and "below" not in found.reason
    arms = [f"{arm}, {readout} readout" for readout in READOUTS for arm in ARMS]
    assert list(cells(found)) == [
        ("no_norm - with_norm, normalised - raw readout", 32),
        ("no_norm - with_norm, normalised readout", 32),
        ("no_norm - with_norm, raw readout", 32),
        *((arm, 32) for arm in arms),
        *((arm, 4) for arm in arms),
    ]
    assert cells(found)["with_norm, raw readout", 32]["value"] == pytest.approx(0.57, abs=0.01)
    json.dumps(claims.as_result([found]), allow_nan=False)


@pytest.mark.parametrize(
    ("means", "scale", "verdict"),
    [
        ({"raw": (0.92, 0.60)}, 0.004, "replicated"),  # excludes 0 inside 0.05
        ({"raw": (0.92, 0.80)}, 0.004, "not_replicated"),
        ({"raw": (0.92, 0.40)}, 0.004, "not_replicated"),
        ({"raw": (0.92, 0.62)}, 0.02, "not_replicated"),  # from inside to beyond 0.05, without 0
        ({}, 0.2, "inconclusive"),
    ],
)
def test_readout_axis(means, scale, verdict):
    found = readout_axis(axis(means, scale=scale), FLOORS, 4)
    assert found.verdict == verdict, found


def test_a_small_interaction_that_excludes_0_replicates():
    found = readout_axis(axis({"raw": (0.92, 0.60)}), FLOORS, 4)
    assert 0 < found.low < found.high < 0.05 and found.verdict == "replicated"


def test_an_incompetent_axis_is_shown_and_not_judged():
    low = {(arm, readout): 0.46 for arm in ARMS for readout in READOUTS}
    found = readout_axis(axis(at_r0=low), FLOORS, 4)
    assert found.verdict == "not_competent" and found.points and found.ours
    assert readout_axis(axis(at_r0=low | {("no_norm", "raw"): 0.9}), FLOORS, 4).verdict == "replicated"


def test_interaction_against_a_loop_over_the_same_draws():
    groups = [np.random.default_rng(i).normal(size=4 + i) for i in range(4)]
    found = bootstrap_interaction(groups[:2], groups[2:], seed=2, resamples=500)
    rng, draws = np.random.default_rng(2), []
    drawn = [rng.integers(g.size, size=(500, g.size)) for g in groups]
    for i in range(500):
        a, b, c, d = (sum(g[j] for j in index[i]) / g.size for g, index in zip(groups, drawn, strict=True))
        draws.append((a - b) - (c - d))
    assert found[1:3] == pytest.approx(np.percentile(draws, [2.5, 97.5]))
    a, b, c, d = (g.mean() for g in groups)
    assert found.value == pytest.approx(a - b - c + d) and found.n == 4
    value, low, high, _ = bootstrap_interaction(groups[2:], groups[:2])
    assert (-value, -high, -low) == pytest.approx(bootstrap_interaction(groups[:2], groups[2:])[:3], abs=0.15)


def test_interaction_of_single_seeds_and_of_none():
    assert bootstrap_interaction(([1], [2]), ([3], [5, 5]))[0] == pytest.approx(1)
    assert np.isnan(bootstrap_interaction(([1], [2, 2]), ([3, 3], [5, 5])).low)
    assert bootstrap_interaction(([1, NAN], [0, 0]), ([0, 0], [0, 0])).value == 0.5
    with pytest.raises(ValueError, match="group 2 is empty"):
        bootstrap_interaction(([1], []), ([3], [5]))


def test_simple_differences_have_exact_p_and_holm_over_the_two():
    table = axis({"raw": (0.60, 0.57)}, scale=0.05)
    by_place = cells(readout_axis(table, FLOORS, 4))
    here = table[(table["d_star"] == "all") & (table["K"] == 32)]
    raw = []
    for readout in READOUTS:
        x, y = (here[(here["arm"] == arm) & (here["readout"] == readout)]["value"] for arm in ARMS)
        known, cell = mannwhitneyu(x, y, method="exact"), by_place[f"no_norm - with_norm, {readout} readout", 32]
        raw.append(known.pvalue)
        assert cell["p_raw"] == pytest.approx(known.pvalue)
        assert cell["delta"] == pytest.approx(2 * known.statistic / 64 - 1)
    smaller, larger = sorted(raw)
    holm = {smaller: min(1, 2 * smaller), larger: min(1, max(2 * smaller, larger))}
    for readout, p in zip(READOUTS, raw, strict=True):
        assert by_place[f"no_norm - with_norm, {readout} readout", 32]["p_holm"] == pytest.approx(holm[p])


def test_undertrained_arms_are_named():
    found = readout_axis(axis(at_r0={("with_norm", "raw"): 0.91}), FLOORS, 4)
    assert "mean at 4 below 0.95 of with_norm, raw readout (0.91): undertrained" in found.reason
    assert found.verdict == "replicated"


def test_diverged_seeds_count_as_zero_and_are_counted():
    lost = [("with_norm", "raw", seed) for seed in (1, 4)]
    found = readout_axis(axis(lost=lost), FLOORS, 4)
    assert "2 of with_norm, raw readout diverged" in found.reason and "no_norm, raw readout diverged" not in found.reason
    by_place = cells(found)
    assert by_place["with_norm, raw readout", 32]["value"] == pytest.approx(0.57 * 6 / 8, abs=0.01)
    assert by_place["no_norm - with_norm, normalised - raw readout", 32]["value"] == pytest.approx(-0.1425, abs=0.01)


@pytest.mark.parametrize("seeds", [1, 2, 7])
@pytest.mark.parametrize("means", [{}, {"raw": (0.92, 0.2)}])
def test_fewer_than_eight_seeds_decide_nothing(seeds, means):
    found = readout_axis(axis(means, seeds=seeds), FLOORS, 4)
    assert found.verdict == "inconclusive" and found.n == seeds
    assert f"n = {seeds} a group, below the 8 seeds the rule asks for: not decided" in found.reason
    json.dumps(claims.as_result([found]), allow_nan=False)


# ---- judge


def test_judges_give_one_claim_each_of_the_rules():
    rules = claims.load()
    beyond = [id for id, claim in rules.items() if claim["section"] == "beyond"]
    found = judge_damping(*models(), FLOORS, 4) + judge_readout_axis(axis(), FLOORS, 4)
    assert [j.id for j in found] == beyond == ["damping", "readout_axis"]
    for j in found:
        assert {p["id"] for p in j.points} == {j.id} and all(list(p) == claims.POINTS for p in j.points)


def test_circuit_not_run_is_out_of_reach():
    updates, accuracy = models()
    elsewhere = accuracy.assign(task="hops")
    for found in (
        *judge_damping(updates, elsewhere, FLOORS, 4),
        *judge_damping(updates.assign(task="hops"), accuracy, FLOORS, 4),
    ):
        assert found.verdict == "out_of_reach" and found.reason.startswith("needs runs on circuit")
    (found,) = judge_readout_axis(axis().assign(task="hops"), FLOORS, 4)
    assert found.verdict == "out_of_reach" and found.reason == "needs runs on circuit with both readouts"


def test_an_absent_readout_is_named():
    table = axis()
    with pytest.raises(ValueError, match="no rows with task circuit, arm no_norm, raw readout, K 32"):
        judge_readout_axis(table[table["readout"] == "normalised"], FLOORS, 4)
