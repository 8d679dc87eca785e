"""Every verdict of every rule of section 4.3, on made-up tables."""

import json

import numpy as np
import pandas as pd
import pytest
from scipy.stats import mannwhitneyu

from lib import claims
from lib.rules_scratch import (
    ARMS,
    TASKS,
    agreement_not_sufficient,
    fall,
    grid,
    hops_indistinguishable_at_r0,
    judge,
    no_norm_extrapolates_better,
    no_norm_never_worse,
    norm_growth_reversal,
    norm_peaks_at_trained_depth,
)

NAN = float("nan")
K4 = (1, 2, 4, 8, 16, 32)
FLOORS = pd.DataFrame({"task": ["circuit", "circuit", "hops"], "d_star": ["1", "2", "1"], "value": [0.4, 0.5, 0.1]})
# the paper's picture: without the norm it holds, with it the accuracy peaks at the trained depth
CURVES = {
    ("circuit", "no_norm"): (0.79, 0.93, 0.98, 0.97, 0.96, 0.93),
    ("circuit", "with_norm"): (0.49, 0.80, 0.96, 0.77, 0.62, 0.58),
    ("hops", "no_norm"): (0.97, 0.97, 0.98, 0.98, 0.97, 0.96),
    ("hops", "with_norm"): (0.55, 0.80, 0.97, 0.94, 0.90, 0.80),
}


def jitter(*key, seeds=8, scale=0.004):
    return np.random.default_rng([sum(map(ord, str(part))) for part in key]).normal(0, scale, seeds)


def accuracy(curves=None, seeds=8, counts=K4, diverged=(), scale=0.004):
    """The long table; diverged lists (task, arm, seed)."""
    rows = []
    for (task, arm), means in (CURVES | (curves or {})).items():
        noise = jitter(task, arm, seeds=seeds, scale=scale)
        for K, mean in zip(counts, means, strict=True):
            for seed in range(seeds):
                value = NAN if (task, arm, seed) in diverged else mean + noise[seed]
                # per-depth rows must not be read
                rows += [(task, arm, seed, K, "all", 4, value), (task, arm, seed, K, "1", 4, -9.0)]
    return pd.DataFrame(rows, columns=["task", "arm", "seed", "K", "d_star", "width", "value"])


def state_norm(no_norm=4.8, with_norm=1.4, seeds=8, scale=0.05, lost=(), r0=4):
    """Raw state norms at 1 and 8 r0; lost lists (arm, seed)."""
    rows = []
    for arm, grows in (("no_norm", no_norm), ("with_norm", with_norm)):
        for seed, noise in enumerate(jitter(arm, "norm", seeds=seeds, scale=scale)):
            end = NAN if (arm, seed) in lost else 366.0 * (grows + noise)
            rows += [(arm, "circuit", seed, 1, 366.0), (arm, "circuit", seed, 8 * r0, end)]
    return pd.DataFrame(rows, columns=["arm", "task", "seed", "K", "value"])


def swapped(no_norm=0.5, with_norm=0.6, seeds=8, scale=0.004):
    rows = [
        ("circuit", arm, seed, K, value + noise)
        for arm, value in (("no_norm", no_norm), ("with_norm", with_norm))
        for seed, noise in enumerate(jitter(arm, "swap", seeds=seeds, scale=scale))
        for K in (4, 32)
    ]
    return pd.DataFrame(rows, columns=["task", "arm", "seed", "K", "value"])


def judged(acc=None, norms=None, swap=None, floors=FLOORS, scale="laptop"):
    acc = accuracy() if acc is None else acc
    norms, swap = state_norm() if norms is None else norms, swapped() if swap is None else swap
    return {j.id: j for j in judge(acc, norms, swap, floors, 4, scale)}


def curve(task, arm, *means):
    return {(task, arm): means}


LOST = {(task, arm): (0.2,) * 6 for task in TASKS for arm in ARMS}


def test_the_papers_picture_replicates_every_order():
    found = judged()
    rules = claims.load()
    of_section = [id for id, claim in rules.items() if claim["section"] == "4.3"]
    assert sorted(found) == sorted(of_section) and len(of_section) == 13
    for id, j in found.items():
        wanted = "out_of_reach" if rules[id]["kind"] == "value" else "replicated"
        assert j.verdict == wanted, (id, j)
        assert j.ours and j.n == 8 and j.points
        assert {p["id"] for p in j.points} == {id} and all(list(p) == claims.POINTS for p in j.points)
    json.dumps(claims.as_result(found.values()), allow_nan=False)
    assert found["no_norm_extrapolates_better"].ours.startswith("32: +0.35 [0.3")
    assert found["no_norm_extrapolates_better"].ours.endswith("; delta 1.00")
    assert found["norm_peaks_at_trained_depth"].reason == "of K = 1, 2, 4, 8, 16, 32 the mean is highest at 4"
    assert found["norm_growth_reversal"].ours.startswith("growth 4.")


def test_incompetent_models_are_shown_and_not_judged():
    for j in judged(accuracy(LOST)).values():
        if j.verdict != "out_of_reach":
            assert j.verdict == "not_competent" and j.points and j.ours


def test_the_gate_asks_for_thirty_percent():
    for level, verdict in ((0.28, "not_competent"), (0.32, "replicated")):
        flat = {("hops", arm): (level,) * 6 for arm in ARMS}
        assert hops_indistinguishable_at_r0(accuracy(flat), FLOORS, 4).verdict == verdict


def test_the_gate_asks_for_five_points_over_the_mean_floor():
    # the floor of circuit is 0.45, the mean over its depths
    for level, verdict in ((0.49, "not_competent"), (0.51, "inconclusive")):
        flat = {("circuit", arm): (level,) * 6 for arm in ARMS}
        assert no_norm_extrapolates_better(accuracy(flat), FLOORS, 4).verdict == verdict
    with pytest.raises(ValueError, match="floors has no value for task hops"):
        hops_indistinguishable_at_r0(accuracy(), FLOORS[FLOORS["task"] == "circuit"], 4)


def test_one_competent_arm_carries_a_contrast():
    table = accuracy(curve("circuit", "with_norm", *[0.2] * 6))
    assert no_norm_extrapolates_better(table, FLOORS, 4).verdict == "replicated"
    # while a claim about that arm alone has no competent cell
    assert norm_peaks_at_trained_depth(table, FLOORS, 4).verdict == "not_competent"
    found = agreement_not_sufficient(table, swapped(), FLOORS, 4)
    assert found.verdict == "inconclusive"
    assert "with_norm is not competent" in found.reason


# ---- no_norm_never_worse


@pytest.mark.parametrize(
    ("curves", "verdict"),
    [
        # equal arms: no loss, and the interval stays inside -0.02
        (curve("hops", "with_norm", *CURVES["hops", "no_norm"]), "replicated"),
        # clearly below in a single cell
        (curve("circuit", "no_norm", 0.79, 0.93, 0.98, 0.97, 0.96, 0.50), "not_replicated"),
        # hops is incompetent, so its loss does not decide
        ({("hops", "no_norm"): (0.05,) * 6, ("hops", "with_norm"): (0.14,) * 6}, "replicated"),
    ],
)
def test_never_worse(curves, verdict):
    assert no_norm_never_worse(accuracy(curves), FLOORS, 4).verdict == verdict


def test_never_worse_is_inconclusive_when_an_interval_reaches_below():
    wide = accuracy(curve("hops", "with_norm", *CURVES["hops", "no_norm"]), scale=0.08)
    found = no_norm_never_worse(wide, FLOORS, 4)
    assert found.verdict == "inconclusive" and found.low < -0.02
    assert found.ours.startswith("lowest, hops ")


def test_never_worse_family_is_every_loop_count_of_both_tasks():
    table = accuracy(scale=0.15)
    cells = [p for p in no_norm_never_worse(table, FLOORS, 4).points if p["p_raw"] is not None]
    assert [(p["task"], p["K"]) for p in cells] == [(task, K) for task in TASKS for K in K4]
    every = table[table["d_star"] == "all"]
    raw = []
    for p in cells:
        here = every[(every["task"] == p["task"]) & (every["K"] == p["K"])]
        x, y = (here[here["arm"] == arm]["value"] for arm in ARMS)
        known = mannwhitneyu(x, y, method="exact")
        raw.append(known.pvalue)
        assert p["p_raw"] == pytest.approx(known.pvalue)
        assert p["delta"] == pytest.approx(2 * known.statistic / 64 - 1)
        assert p["value"] == pytest.approx(x.mean() - y.mean()) and p["n"] == 8
    # step down by hand: twelve tests
    adjusted, running = {}, 0.0
    for rank, i in enumerate(sorted(range(12), key=raw.__getitem__)):
        running = max(running, min(1, (12 - rank) * raw[i]))
        adjusted[i] = running
    assert [p["p_holm"] for p in cells] == pytest.approx([adjusted[i] for i in range(12)])


# ---- no_norm_extrapolates_better


@pytest.mark.parametrize(
    ("curves", "scale", "verdict"),
    [
        # ahead everywhere, one cell alone significant by raw p
        (curve("circuit", "no_norm", 0.79, 0.93, 0.98, 0.78, 0.63, 0.70), 0.05, "same_direction"),
        # behind in one cell by more than the noise
        (curve("circuit", "no_norm", 0.79, 0.93, 0.98, 0.97, 0.96, 0.50), 0.004, "not_replicated"),
        # apart by less than the noise
        (curve("circuit", "no_norm", *CURVES["circuit", "with_norm"]), 0.1, "inconclusive"),
    ],
)
def test_extrapolates_better(curves, scale, verdict):
    found = no_norm_extrapolates_better(accuracy(curves, scale=scale), FLOORS, 4)
    assert found.verdict == verdict, found
    assert [p["K"] for p in found.points if p["p_raw"] is not None] == [8, 16, 32]


@pytest.mark.parametrize(("seeds", "verdict"), [(4, "same_direction"), (7, "same_direction"), (3, "inconclusive")])
def test_few_seeds_never_replicate_by_rank_test(seeds, verdict):
    found = judged(accuracy(seeds=seeds), state_norm(seeds=seeds), swapped(seeds=seeds))
    better = found["no_norm_extrapolates_better"]
    assert better.verdict == verdict and better.n == seeds
    assert f"n = {seeds} an arm, below 8" in better.reason
    assert found["no_norm_never_worse"].verdict == "inconclusive"
    assert found["norm_growth_reversal"].verdict == "same_direction"
    # these are judged on intervals alone
    assert found["norm_peaks_at_trained_depth"].verdict == "replicated"
    assert "below 8" in found["norm_peaks_at_trained_depth"].reason


def test_one_seed_is_inconclusive():
    found = judged(accuracy(seeds=1), state_norm(seeds=1), swapped(seeds=1))
    orders = {id: j.verdict for id, j in found.items() if j.verdict != "out_of_reach"}
    assert set(orders.values()) == {"inconclusive"} and len(orders) == 6
    json.dumps(claims.as_result(found.values()), allow_nan=False)


# ---- norm_peaks_at_trained_depth


@pytest.mark.parametrize(
    ("means", "scale", "verdict", "peak"),
    [
        ((0.5, 0.8, 0.96, 0.96, 0.7, 0.6), 0.004, "replicated", 4),  # a shared peak
        ((0.5, 0.8, 0.90, 0.95, 0.7, 0.6), 0.004, "same_direction", 8),
        ((0.5, 0.8, 0.90, 0.92, 0.93, 0.95), 0.004, "not_replicated", 32),
        ((0.96,) * 6, 0.004, "inconclusive", 4),  # no fall at all
    ],
)
def test_norm_peaks(means, scale, verdict, peak):
    table = accuracy(curve("circuit", "with_norm", *means), scale=scale)
    found = norm_peaks_at_trained_depth(table, FLOORS, 4)
    assert found.verdict == verdict, found
    assert f"highest at {peak}" in found.reason


def test_falls_are_taken_seed_by_seed():
    # seeds far apart, each falling by 0.3: the paired interval is narrow
    table = accuracy(curve("circuit", "with_norm", 0.4, 0.6, 0.7, 0.6, 0.5, 0.4), scale=0.2)
    cell = fall("x", table, "with_norm", 4, 32)
    assert (cell["value"], cell["low"], cell["high"]) == pytest.approx((0.3, 0.3, 0.3))


# ---- hops_indistinguishable_at_r0


@pytest.mark.parametrize(
    ("at_r0", "scale", "verdict"),
    [
        (0.97, 0.004, "replicated"),
        (0.90, 0.004, "not_replicated"),  # the whole interval beyond 0.05
        (0.93, 0.04, "inconclusive"),  # across 0.05
    ],
)
def test_hops_indistinguishable(at_r0, scale, verdict):
    curves = curve("hops", "with_norm", 0.55, 0.8, at_r0, 0.94, 0.9, 0.8)
    found = hops_indistinguishable_at_r0(accuracy(curves, scale=scale), FLOORS, 4)
    assert found.verdict == verdict, found
    tested = [p for p in found.points if p["p_raw"] is not None]
    assert len(tested) == 1 and tested[0]["p_raw"] == tested[0]["p_holm"]


# ---- norm_growth_reversal


@pytest.mark.parametrize(
    ("norms", "at_end", "scale", "verdict"),
    [
        # the growth's intervals overlap though its difference is above 0
        (state_norm(2.0, 1.6, scale=0.3), 0.93, 0.004, "same_direction"),
        # grows less without the norm
        (state_norm(1.4, 4.8), 0.93, 0.004, "not_replicated"),
        # grows more, and loses
        (state_norm(), 0.50, 0.004, "not_replicated"),
        # grows more, accuracy level
        (state_norm(), 0.58, 0.1, "inconclusive"),
        # grows alike, accuracy higher
        (state_norm(1.4, 1.4, scale=0.3), 0.93, 0.004, "inconclusive"),
    ],
)
def test_norm_growth_reversal(norms, at_end, scale, verdict):
    curves = curve("circuit", "no_norm", 0.79, 0.93, 0.98, 0.97, 0.96, at_end)
    found = norm_growth_reversal(accuracy(curves, scale=scale), norms, FLOORS, 4)
    assert found.verdict == verdict, found


# ---- agreement_not_sufficient


@pytest.mark.parametrize(
    ("at_end", "swap", "verdict"),
    [
        (0.58, swapped(0.98, 0.60), "replicated"),  # one arm paying is enough
        (0.94, swapped(), "same_direction"),  # a fall, but not of 0.05
        (0.96, swapped(), "not_replicated"),  # no fall
        (0.58, swapped(1.0, 1.0), "not_replicated"),  # both arms gain by the swap
        (0.58, swapped(0.98, 0.96, scale=0.2), "inconclusive"),
    ],
)
def test_agreement_not_sufficient(at_end, swap, verdict):
    curves = curve("circuit", "with_norm", 0.49, 0.8, 0.96, 0.77, 0.62, at_end)
    found = agreement_not_sufficient(accuracy(curves), swap, FLOORS, 4)
    assert found.verdict == verdict, found
    assert found.ours.count("[") == 3


def test_swapped_models_must_be_the_same_models():
    with pytest.raises(ValueError, match="the same models have seeds"):
        agreement_not_sufficient(accuracy(), swapped(seeds=7), FLOORS, 4)


# ---- diverged seeds, values, other trained depths


def test_a_diverged_seed_ranks_last_counts_as_zero_and_is_named():
    table = accuracy(diverged=[("circuit", "no_norm", 3)])
    found = judged(table, state_norm(lost=[("no_norm", 3)]))
    better = found["no_norm_extrapolates_better"]
    (cell,) = [p for p in better.points if p["K"] == 32 and p["p_raw"] is not None]
    assert cell["delta"] == pytest.approx(1 - 2 * 8 / 64)  # it loses all its eight pairs
    assert cell["value"] < 0.93 * 7 / 8 - 0.58 + 0.02 and cell["n"] == 8
    assert "1 of no_norm diverged on circuit" in better.reason
    assert "diverged" not in found["hops_indistinguishable_at_r0"].reason
    (none,) = [p for p in found["state_norm_growth"].points if p["arm"] == "no_norm, growth"]
    assert none["n"] == 7 and none["value"] == pytest.approx(4.8, abs=0.1)


def test_an_arm_that_always_diverged_leaves_a_table():
    all_lost = [("circuit", "no_norm", seed) for seed in range(8)]
    norms = state_norm(lost=[("no_norm", seed) for seed in range(8)])
    found = judged(accuracy(diverged=all_lost), norms, scale="paper")
    assert found["no_norm_extrapolates_better"].verdict == "not_replicated"
    assert found["norm_growth_reversal"].verdict == "not_replicated"
    assert found["norm_growth_reversal"].ours.startswith("growth - against 1.")
    assert found["state_norm_growth"].verdict == "inconclusive"
    assert "not measured: no_norm" in found["state_norm_growth"].reason


def test_values_are_judged_at_the_papers_scale_alone():
    paper = {
        ("circuit", "no_norm"): (0.790, 0.95, 0.999, 0.997, 0.981, 0.932),
        ("circuit", "with_norm"): (0.492, 0.80, 0.963, 0.772, 0.618, 0.584),
        ("hops", "no_norm"): (0.979, 0.99, 0.999, 0.999, 0.99, 0.98),
        ("hops", "with_norm"): (0.556, 0.80, 0.988, 0.946, 0.90, 0.80),
    }
    table, norms, swap = accuracy(paper, seeds=16), state_norm(4.84, 1.45, seeds=16), swapped(seeds=16)
    found = judged(table, norms, swap, scale="paper")
    for id in ("scratch_circuit_none", "scratch_circuit_norm", "scratch_hops", "state_norm_growth"):
        assert found[id].verdict == "replicated" and found[id].n == 16, found[id]
    # these arms never overlap, the paper's do
    assert found["scratch_circuit_delta"].verdict == "not_replicated"
    assert found["scratch_circuit_delta"].ours == "1.000"
    assert found["scratch_circuit_p"].reason.startswith("K=1: 3.3e-09 against 2.2e-07")
    elsewhere = judged(table, norms, swap, scale="overnight")["scratch_circuit_p"]
    assert elsewhere.verdict == "out_of_reach" and "no_norm_extrapolates_better" in elsewhere.reason
    assert elsewhere.ours == "3.3e-09, 3.3e-09, (3.3e-09, 3.3e-09, 3.3e-09)"


def test_a_task_that_was_not_run_is_out_of_reach():
    table = accuracy()
    found = judged(table[table["task"] == "circuit"])
    assert found["hops_indistinguishable_at_r0"].verdict == "out_of_reach"
    assert found["no_norm_never_worse"].reason == "needs runs on circuit and hops"
    assert found["no_norm_extrapolates_better"].verdict == "replicated"


def test_absent_rows_are_named():
    table = accuracy()
    with pytest.raises(ValueError, match="no rows with task circuit, arm with_norm, K 16"):
        no_norm_never_worse(table[~((table["arm"] == "with_norm") & (table["K"] == 16))], FLOORS, 4)


def test_other_trained_depths():
    assert grid(4) == list(K4)
    assert grid(2) == [1, 2, 4, 8, 16]
    assert grid(3) == [1, 2, 3, 4, 6, 8, 12, 16, 24]
    curves = {key: (means[0], means[2], *means[3:]) for key, means in CURVES.items()}
    swap = swapped().replace({"K": {4: 2, 32: 16}})
    found = {j.id: j for j in judge(accuracy(curves, counts=(1, 2, 4, 8, 16)), state_norm(r0=2), swap, FLOORS, 2, "paper")}
    assert found["norm_peaks_at_trained_depth"].verdict == "replicated"
    assert found["scratch_circuit_none"].verdict == "out_of_reach"  # the paper's models have r0 = 4
    assert "K beyond 1 scaled by 2 / 4" in found["scratch_circuit_none"].reason


def test_a_mean_that_disagrees_with_delta_is_said():
    table = accuracy(scale=0.0)
    lost = (table["arm"] == "no_norm") & (table["task"] == "circuit") & (table["seed"] == 0)
    table.loc[lost, "value"] = NAN
    near = (table["arm"] == "with_norm") & (table["task"] == "circuit")
    table.loc[near, "value"] = 0.9  # seven of eight are ahead of it, the mean with a 0 is not
    table.loc[(table["arm"] == "no_norm") & (table["task"] == "circuit") & ~lost, "value"] = 0.99
    found = no_norm_extrapolates_better(table, FLOORS, 4)
    assert "delta and the mean difference disagree in sign at circuit 8, circuit 16, circuit 32" in found.reason


def test_a_swap_that_helps_beyond_the_budget_is_said_and_does_not_decide():
    swap = swapped()
    swap.loc[(swap["arm"] == "with_norm") & (swap["K"] == 32), "value"] = 0.95
    found = judged(swap=swap)["agreement_not_sufficient"]
    assert found.verdict == "replicated" and "at 32 the other boundary helps with_norm: -0.3" in found.reason
    beyond = [p for p in found.points if p["K"] == 32 and "swapped" in p["arm"]]
    assert len(beyond) == 2 and all(p["low"] is not None for p in beyond)
    swap.loc[(swap["arm"] == "with_norm") & (swap["K"] == 32), "value"] = 0.3
    assert "helps" not in judged(swap=swap)["agreement_not_sufficient"].reason
