"""Every verdict of every rule of section 4.5, on made-up tables."""

import json
from itertools import combinations

import numpy as np
import pandas as pd
import pytest
from scipy.stats import mannwhitneyu

from lib import claims, stats
from lib.rules import by_seed
from lib.rules_overshoot import (
    TASKS,
    able,
    absolute_K_confounds,
    equal_K_gap,
    judge,
    loop_advantage_at_matched_overshoot,
    matched_contrasts,
    matched_overshoot_is_equal_compute,
    reduction,
)

NAN = float("nan")
SPLITS = {"4x1": 4, "2x2": 2, "1x4": 1}
MOST, MIDDLE, STACK = SPLITS
K4 = (1, 2, 4, 8, 16, 32)
FLOORS = pd.DataFrame({"task": ["circuit", "circuit", "hops"], "d_star": ["1", "2", "1"], "value": [0.4, 0.5, 0.1]})
# on circuit the seeds of every split spread so far that no test rejects
SPREAD = 0.1 * np.array([-1, -0.6, -0.2, 0.2, 0.6, 1])
# the paper's numbers, by the loop count: the seeds on hops are such that delta and p are the paper's too
CURVES = {
    ("circuit", MOST): (0.6, 0.8, 0.99, 0.97, 0.94, 0.907 + SPREAD),
    ("circuit", MIDDLE): (0.7, 0.98, 0.96, 0.94, 0.918 + SPREAD, 0.838 + SPREAD),
    ("circuit", STACK): (0.96, 0.93, 0.88, 0.828 + SPREAD, 0.7, 0.490 + SPREAD),
    ("hops", MOST): (0.6, 0.8, 0.99, 0.98, 0.97, np.array([0.991, 0.992, 0.993, 0.994, 0.989, 0.783])),
    ("hops", MIDDLE): (0.6, 0.9, 0.9, 0.8, np.array([0.995, 0.901, 0.902, 0.9, 0.35, 0.35]), 0.6),
    ("hops", STACK): (0.9, 0.9, 0.8, np.array([0.9, 0.901, 0.902, 0.903, 0.41, 0.406]), 0.5, np.array([0.6] * 4 + [0.1] * 2)),
}


def accuracy(curves=None, seeds=6, diverged=(), splits=None, counts=K4):
    """The long table; curves change (task, arm, K) to a number or one a seed; diverged lists (task, arm, seed)."""
    names, rows = dict(zip(SPLITS, splits or SPLITS, strict=True)), []
    for (task, arm), means in CURVES.items():
        for K, mean in zip(counts, means, strict=True):
            values = np.broadcast_to((curves or {}).get((task, arm, K), mean), 6)
            for seed in range(seeds):
                value = NAN if (task, arm, seed) in diverged else values[seed]
                # per-depth rows must not be read
                rows += [(task, names[arm], seed, K, "all", value), (task, names[arm], seed, K, "1", -9.0)]
    return pd.DataFrame(rows, columns=["task", "arm", "seed", "K", "d_star", "value"])


def flops(splits=SPLITS, each=123_456_789):
    rows = [(arm, r0 * overshoot, overshoot * each) for arm, r0 in splits.items() for overshoot in (1, 2, 4, 8)]
    one = pd.DataFrame(rows, columns=["arm", "K", "value"])
    return pd.concat([one.assign(task="circuit"), one.assign(task="hops", value=2 * one["value"])], ignore_index=True)


def judged(table=None, splits=SPLITS, counted=None, scale="laptop"):
    table, counted = accuracy() if table is None else table, flops(splits) if counted is None else counted
    return {j.id: j for j in judge(table, splits, counted, FLOORS, scale)}


def confounds(curves=None, **keys):
    return absolute_K_confounds(accuracy(curves, **keys), SPLITS, FLOORS)


def advantage(curves=None, **keys):
    return loop_advantage_at_matched_overshoot(accuracy(curves, **keys), SPLITS, FLOORS)


def unfit(task):
    return {(task, arm, K): 0.05 for arm in SPLITS for K in K4}


def test_the_papers_numbers_give_the_papers_verdicts():
    found, rules = judged(scale="paper"), claims.load()
    of_section = [id for id, claim in rules.items() if claim["section"] == "4.5"]
    assert sorted(found) == sorted(of_section) and len(of_section) == 7
    for id, j in found.items():
        assert j.verdict == "replicated", j
        assert j.ours and j.n == (4 if rules[id]["kind"] == "exact" else 6)
        assert {p["id"] for p in j.points} == {id} and all(list(p) == claims.POINTS for p in j.points)
        places = [(p["task"], p["arm"], p["K"]) for p in j.points]
        assert len(set(places)) == len(places)
    json.dumps(claims.as_result(found.values()), allow_nan=False)
    assert found["overshoot_equal_K"].ours == "4x1 0.907; 2x2 0.838; 1x4 0.490"
    assert found["overshoot_matched_circuit"].ours == "4x1 0.907; 2x2 0.918; 1x4 0.828"
    assert found["overshoot_matched_hops"].ours == "4x1 0.957; 2x2 0.733; 1x4 0.737"
    assert found["overshoot_matched_hops_tests"].ours == "2x2 0.500, -; 1x4 0.778, 0.026"
    assert found["absolute_K_confounds"].ours.startswith("32: +0.42 [0.3")
    assert found["absolute_K_confounds"].ours.endswith("; delta 1.00; reduced by +0.34 [0.34, 0.34]")
    assert found["loop_advantage_at_matched_overshoot"].ours.startswith(
        "hops reduced by +0.30 [0.30, 0.31]; circuit +0.08 [-0.0"
    )


@pytest.mark.parametrize("scale", ["smoke", "laptop"])
def test_values_are_judged_at_the_papers_scale_alone(scale):
    for id, j in judged(scale=scale).items():
        value = claims.load()[id]["kind"] == "value"
        assert j.verdict == ("out_of_reach" if value else "replicated"), j
        assert not value or j.ours and j.points and f"judged as {claims.load()[id]['see']}" in j.reason


@pytest.mark.parametrize(
    ("id", "place"),
    [
        ("overshoot_equal_K", ("circuit", MIDDLE, 32)),
        ("overshoot_matched_circuit", ("circuit", STACK, 8)),
        ("overshoot_matched_hops", ("hops", MIDDLE, 16)),
        ("overshoot_matched_hops_tests", ("hops", STACK, 8)),
    ],
)
def test_other_values_do_not_replicate(id, place):
    assert judged(accuracy({place: 0.3}), scale="paper")[id].verdict == "not_replicated"


def test_points_hold_every_split_at_equal_K_and_at_overshoot_8():
    def of(j, task):
        return {(p["arm"], p["K"]): p["value"] for p in j.points if p["task"] == task and p["arm"] in SPLITS}

    found = judged()
    places = {(MOST, 32), (MIDDLE, 32), (STACK, 32), (MIDDLE, 16), (STACK, 8)}
    assert set(of(found["absolute_K_confounds"], "circuit")) == places
    for task in TASKS:
        cells = of(found["loop_advantage_at_matched_overshoot"], task)
        assert set(cells) == places
        assert all(cells[arm, K] == pytest.approx(np.mean(CURVES[task, arm][K4.index(K)])) for arm, K in places)


# ---- contrasts, gap and reduction against their definitions


def exact(x, y):
    """The p over all relabelings and delta, by counting."""
    pooled = np.concatenate([x, y])

    def distance(own):
        rest = [i for i in range(len(pooled)) if i not in own]
        return abs(np.sign(pooled[list(own)][:, None] - pooled[rest]).sum())

    seen = distance(tuple(range(len(x))))
    every = [distance(chosen) >= seen for chosen in combinations(range(len(pooled)), len(x))]
    return np.mean(every), np.sign(x[:, None] - y).mean()


def test_contrasts_compare_each_at_its_own_loop_count():
    cells = matched_contrasts("x", accuracy(), SPLITS)
    arms = [f"{MOST} - {MIDDLE}, overshoot 8", f"{MOST} - {STACK}, overshoot 8"]
    assert [(c["task"], c["arm"], c["K"]) for c in cells] == [(task, arm, None) for task in TASKS for arm in arms]
    for cell, (task, arm, i) in zip(cells, [(t, a, i) for t in TASKS for a, i in ((MIDDLE, 4), (STACK, 3))], strict=True):
        x, y = (np.broadcast_to(v, 6) for v in (CURVES[task, MOST][5], CURVES[task, arm][i]))
        assert (cell["p_raw"], cell["delta"]) == pytest.approx(exact(x, y))
        assert cell["value"] == pytest.approx(x.mean() - y.mean()) and cell["n"] == 6
        if len(set([*x, *y])) == 12:
            assert cell["p_raw"] == pytest.approx(mannwhitneyu(x, y, method="exact").pvalue)
    # step down by hand: the four tests of both tasks
    adjusted, running, raw = {}, 0.0, [c["p_raw"] for c in cells]
    for rank, i in enumerate(sorted(range(4), key=raw.__getitem__)):
        running = max(running, min(1, (4 - rank) * raw[i]))
        adjusted[i] = running
    assert [c["p_holm"] for c in cells] == pytest.approx([adjusted[i] for i in range(4)])


@pytest.mark.parametrize("task", TASKS)
def test_the_reduction_is_the_difference_of_the_gaps(task):
    noise = np.random.default_rng(0).normal(0, 0.1, (3, 6))
    table = accuracy({(task, MOST, 32): 0.9 + noise[0], (task, STACK, 8): 0.8 + noise[1], (task, STACK, 32): 0.5 + noise[2]})
    gap, less = equal_K_gap("x", table, SPLITS, task), reduction("x", table, SPLITS, task)
    _, at_8 = matched_contrasts("x", table, SPLITS, [task])
    assert gap["value"] == pytest.approx(np.mean(0.9 + noise[0]) - np.mean(0.5 + noise[2]))
    assert at_8["value"] == pytest.approx(np.mean(0.9 + noise[0]) - np.mean(0.8 + noise[1]))
    assert less["value"] == pytest.approx(gap["value"] - at_8["value"])
    # the interval by seed: every resample's mean by hand
    own, fell = np.random.default_rng(1), 0.3 + noise[1] - noise[2]
    draws = [fell[own.integers(6, size=6)].mean() for _ in range(20_000)]
    assert (less["low"], less["high"]) == pytest.approx(np.percentile(draws, [2.5, 97.5]), abs=0.005)
    assert gap["p_raw"] is None and gap["K"] == less["K"] == 32
    whole = stats.bootstrap_difference(*(by_seed(table, task=task, arm=arm, K=32) for arm in (MOST, STACK)))
    assert (gap["low"], gap["high"]) == (whole.low, whole.high)


def test_the_reduction_is_paired_by_seed():
    # seeds far apart, each falling by 0.3: the interval is narrow
    apart = 3 * SPREAD
    less = reduction("x", accuracy({("hops", STACK, 8): 0.7 + apart, ("hops", STACK, 32): 0.4 + apart}), SPLITS, "hops")
    assert (less["value"], less["low"], less["high"]) == pytest.approx((0.3, 0.3, 0.3))


# ---- competence


def test_a_split_is_competent_at_its_own_loop_count():
    for arm, r0 in SPLITS.items():
        for K in K4:  # one good loop count of one split is enough where it was trained, and nowhere else
            assert able(accuracy(unfit("hops") | {("hops", arm, K): 0.9}), SPLITS, FLOORS, "hops") == (K == r0)
    # the floor of circuit is 0.45, the mean over its depths
    for level, fit in ((0.49, False), (0.51, True)):
        assert able(accuracy(unfit("circuit") | {("circuit", STACK, 1): level}), SPLITS, FLOORS, "circuit") == fit
    for level, fit in ((0.29, False), (0.31, True)):
        assert able(accuracy(unfit("hops") | {("hops", MOST, 4): level}), SPLITS, FLOORS, "hops") == fit
    with pytest.raises(ValueError, match="floors has no value for task hops"):
        able(accuracy(), SPLITS, FLOORS[FLOORS["task"] == "circuit"], "hops")


def test_incompetent_splits_are_shown_and_not_judged():
    found = judged(accuracy(unfit("circuit") | unfit("hops")))
    for id in ("absolute_K_confounds", "loop_advantage_at_matched_overshoot"):
        assert found[id].verdict == "not_competent" and found[id].points and found[id].ours
    assert found["matched_overshoot_is_equal_compute"].verdict == "replicated"


@pytest.mark.parametrize("task", TASKS)
def test_one_incompetent_task_leaves_the_advantage_open(task):
    found = advantage(unfit(task))
    assert found.verdict == "inconclusive"
    assert f"{task} is not competent: the claim needs both tasks" in found.reason
    assert {p["task"] for p in found.points} == set(TASKS)


# ---- matched_overshoot_is_equal_compute


def test_equal_compute():
    found = matched_overshoot_is_equal_compute(SPLITS, flops())
    assert found.verdict == "replicated" and found.n == 4
    assert found.ours == "equal at overshoot 1, 2, 4, 8 (MFLOP a sequence at 8: circuit 988, hops 1.98e+03)"
    values = {(p["task"], p["arm"], p["K"]): p["value"] for p in found.points}
    assert values["circuit", MIDDLE, 8] == 4 * 123_456_789 == values["hops", MIDDLE, 8] / 2
    assert len(found.points) == 24


def test_one_flop_more_is_unequal():
    counted = flops()
    counted.loc[(counted["task"] == "circuit") & (counted["arm"] == STACK) & (counted["K"] == 8), "value"] += 1
    found = matched_overshoot_is_equal_compute(SPLITS, counted)
    assert found.verdict == "not_replicated" and found.ours == "unequal at overshoot circuit 8"
    assert found.reason == "circuit 8: 4x1 987654312, 2x2 987654312, 1x4 987654313"
    assert judged(counted=counted)[found.id].verdict == "not_replicated"


def test_absent_and_contradictory_counts_are_named():
    counted = flops()
    at = (counted["arm"] == MIDDLE) & (counted["K"] == 4)
    with pytest.raises(ValueError, match="one value for circuit, arm 2x2, K 4; it has 0"):
        matched_overshoot_is_equal_compute(SPLITS, counted[~at])
    with pytest.raises(ValueError, match="one value for circuit, arm 2x2, K 4; it has 2"):
        matched_overshoot_is_equal_compute(SPLITS, pd.concat([counted, counted[at].assign(value=7)]))


# ---- absolute_K_confounds


@pytest.mark.parametrize(
    ("curves", "verdict"),
    [
        ({}, "replicated"),
        # a gap that overshoot 8 reduces for some seeds alone
        ({("circuit", STACK, 32): 0.80 + SPREAD[::-1]}, "same_direction"),
        # a gap as large at overshoot 8
        ({("circuit", STACK, 8): 0.49 + SPREAD}, "inconclusive"),
        # a gap that is larger at overshoot 8
        ({("circuit", STACK, 8): 0.30}, "not_replicated"),
        # the stack is ahead at equal K
        ({("circuit", MOST, 32): 0.20}, "not_replicated"),
        # no clear gap at equal K
        ({("circuit", MOST, 32): 0.51 + SPREAD}, "inconclusive"),
    ],
)
def test_absolute_K_confounds(curves, verdict):
    found = confounds(curves)
    assert found.verdict == verdict, found
    gap, less = found.points[:2]
    assert (found.low, found.high) == (gap["low"], gap["high"])
    if verdict == "same_direction":
        assert gap["low"] > 0 and less["value"] > 0 > less["low"]


# ---- loop_advantage_at_matched_overshoot


# p = 0.04 in favour of the most looped, and a mean difference that one seed of each leaves open
REJECTS = {("circuit", MOST, 32): [0.81] * 5 + [0.5], ("circuit", STACK, 8): [0.80] * 5 + [0.49]}


@pytest.mark.parametrize(
    ("curves", "verdict"),
    [
        ({}, "replicated"),
        # looping is still ahead on circuit
        ({("circuit", STACK, 8): 0.6}, "not_replicated"),
        # the gap on hops is larger than at equal K
        ({("hops", STACK, 32): 0.95}, "not_replicated"),
        # the stack is ahead on circuit
        ({("circuit", STACK, 8): 1.1}, "same_direction"),
        # both: the stack ahead on circuit, and a larger gap on hops
        ({("circuit", STACK, 8): 1.1, ("hops", STACK, 32): 0.95}, "not_replicated"),
        # no clear reduction on hops
        ({("hops", STACK, 32): 0.737 + 3 * SPREAD}, "inconclusive"),
        ({("circuit", STACK, 8): 1.1, ("hops", STACK, 32): 0.737 + 3 * SPREAD}, "inconclusive"),
        (REJECTS, "inconclusive"),
    ],
)
def test_loop_advantage(curves, verdict):
    found = advantage(curves)
    assert found.verdict == verdict, found
    (less,) = [p for p in found.points if p["arm"] == "1x4, overshoot 8 - K"]
    assert (found.low, found.high) == (less["low"], less["high"]) and less["task"] == "hops"
    assert len([p for p in found.points if p["p_raw"] is not None]) == 4


def test_the_reason_says_how_close_circuit_is_and_what_is_left_on_hops():
    wide = advantage().reason
    assert wide.startswith("circuit p = 0.24, Holm 0.51; hops p = 0.026, Holm 0.1; ")
    assert "on circuit the interval does not lie inside +-0.05" in wide
    assert "on hops the gap left is +0.22 [0.0" in wide and wide.endswith("delta 0.78: not gone")
    close = advantage({("circuit", MOST, 32): 0.9 + SPREAD / 5, ("circuit", STACK, 8): 0.9 + SPREAD / 5})
    assert close.verdict == "replicated" and "on circuit the interval lies inside +-0.05" in close.reason
    assert advantage({("hops", STACK, 8): 0.957 + SPREAD}).reason.endswith("perhaps gone")
    assert advantage({("hops", STACK, 8): 1.1}).reason.endswith("gone, the stack is ahead")


@pytest.mark.parametrize(
    ("seeds", "verdict"), [(1, "inconclusive"), (2, "inconclusive"), (5, "inconclusive"), (6, "replicated")]
)
def test_too_few_seeds_say_nothing_by_a_p_above_5_percent(seeds, verdict):
    found = advantage(seeds=seeds)
    assert found.verdict == verdict and found.n == seeds
    assert (f"n = {seeds} an arm, below 6: never counts as replicated" in found.reason) == (seeds < 6)
    assert advantage({("circuit", STACK, 8): 1.1}, seeds=seeds).verdict == ("same_direction" if seeds == 6 else "inconclusive")


def test_two_seeds_still_judge_what_rests_on_intervals():
    found = judged(accuracy(seeds=2))
    assert found["absolute_K_confounds"].verdict == "replicated" and "below 6" in found["absolute_K_confounds"].reason
    assert advantage({("hops", STACK, 32): 0.95}, seeds=2).verdict == "not_replicated"
    assert confounds(seeds=1).verdict == "inconclusive"
    json.dumps(claims.as_result(judged(accuracy(seeds=1)).values()), allow_nan=False)


# ---- diverged seeds, missing tasks, other splits


def test_a_diverged_seed_ranks_last_counts_as_zero_and_is_named():
    found = judged(accuracy(diverged=[("circuit", STACK, 2)]), scale="paper")
    confounded = found["absolute_K_confounds"]
    gap, less, _, at_8 = confounded.points[:4]
    assert confounded.verdict == "replicated" and "1 of 1x4 diverged on circuit" in confounded.reason
    lost = (0.490 + SPREAD)[2]
    assert gap["value"] == pytest.approx(0.907 - 0.490 + lost / 6) and gap["delta"] == 1
    assert less["value"] == pytest.approx(0.338 * 5 / 6) and less["n"] == 6  # a 0 falls by nothing
    x, y = 0.907 + SPREAD, 0.828 + SPREAD
    assert at_8["delta"] == pytest.approx(exact(x, np.where(np.arange(6) == 2, -9, y))[1])
    for id in ("overshoot_equal_K", "overshoot_matched_circuit", "loop_advantage_at_matched_overshoot"):
        assert "1 of 1x4 diverged on circuit" in found[id].reason
    assert "diverged" not in found["overshoot_matched_hops"].reason + found["matched_overshoot_is_equal_compute"].reason
    assert found["overshoot_equal_K"].verdict == "not_replicated"


def test_a_split_that_always_diverged_leaves_a_table():
    found = judged(accuracy(diverged=[("circuit", MOST, seed) for seed in range(6)]), scale="paper")
    assert found["absolute_K_confounds"].verdict == "not_replicated"
    assert found["loop_advantage_at_matched_overshoot"].verdict == "same_direction"  # the stack is ahead
    json.dumps(claims.as_result(found.values()), allow_nan=False)


def test_a_task_that_was_not_run_is_out_of_reach():
    table = accuracy()
    found = judged(table[table["task"] == "circuit"], scale="paper")
    needs = {"overshoot_matched_hops": "hops", "overshoot_matched_hops_tests": "hops"}
    needs["loop_advantage_at_matched_overshoot"] = "circuit and hops"
    for id, j in found.items():
        assert j.verdict == ("out_of_reach" if id in needs else "replicated"), j
        assert id not in needs or j.reason == f"needs runs on {needs[id]}"


def test_absent_rows_are_named():
    table = accuracy()
    with pytest.raises(ValueError, match="no rows with task circuit, arm 1x4, K 8"):
        judged(table[~((table["arm"] == STACK) & (table["K"] == 8))])
    at = (table["arm"] == STACK) & (table["K"] == 8) & (table["seed"] == 0)
    with pytest.raises(ValueError, match="the same models have seeds"):
        reduction("x", table[~at], SPLITS, "circuit")


def test_the_splits_run_from_the_most_looped_to_the_stack():
    for splits in ({"1x4": 1, "2x2": 2, "4x1": 4}, {"4x1": 4, "1x4": 1}, {"4x1": 4, "a": 2, "b": 2}):
        with pytest.raises(ValueError, match="splits must be three of falling r0"):
            judged(splits=splits)


def test_another_trained_loop_count():
    splits = {"8x1": 8, "4x2": 4, "2x4": 2}
    found = judged(accuracy(splits=splits, counts=(2, 4, 8, 16, 32, 64)), splits, scale="paper")
    for id, j in found.items():
        value = claims.load()[id]["kind"] == "value"
        assert j.verdict == ("out_of_reach" if value else "replicated"), j
        assert not value or "the most looped split has r0 = 8, the paper's 4" in j.reason
    assert found["overshoot_matched_circuit"].ours == "8x1 0.907; 4x2 0.918; 2x4 0.828"
    assert found["absolute_K_confounds"].ours.startswith("64: +0.42")
