"""Every verdict of every rule of section 4.4, on made-up tables."""

import json
import math

import numpy as np
import pandas as pd
import pytest

from lib import claims
from lib.rules_refit import by_seed_fractions, head_plateaus, judge, layer_beats_head, loss, recovered, step_counts

NAN = float("nan")
FLOORS = pd.DataFrame({"task": ["circuit", "circuit", "hops"], "d_star": ["1", "2", "1"], "value": [0.4, 0.5, 0.1]})
STEPS = (30, 300, 3000)
# (intact, changed) and the recovered fraction by part and steps: the paper's numbers where it gives them
LOOPS = {("circuit", "added"): (0.994, 0.639), ("circuit", "removed"): (0.96, 0.40), ("hops", "added"): (0.98, 0.60)}
FRACTIONS = {
    ("circuit", "added", "head"): (0.25, (0.756 - 0.639) / (0.994 - 0.639), 0.35),
    ("circuit", "added", "layer"): (0.43, 0.80, 1.00),
    ("circuit", "removed", "head"): (0.10, 0.15, 0.20),
    ("circuit", "removed", "layer"): (0.50, 0.70, 0.90),
    ("hops", "added", "head"): (0.20, 0.31, 0.33),
    ("hops", "added", "layer"): (0.98, 0.99, 1.00),
}


def jitter(*key, seeds=8, scale=0.004):
    return np.random.default_rng([sum(map(ord, str(part))) for part in key]).normal(0, scale, seeds)


def tables(loops=None, fractions=None, seeds=8, scale=0.004, steps=STEPS, diverged=()):
    """The refits and intact tables; diverged lists (task, direction, seed)."""
    loops, rows, own = LOOPS | (loops or {}), [], []
    noise = {place: jitter(*place, seeds=seeds, scale=scale) for place in loops}
    for (task, direction), (intact, _) in loops.items():
        for seed in range(seeds):
            lost = (task, direction, seed) in diverged
            own.append((task, direction, seed, NAN if lost else intact + noise[task, direction][seed]))
    for (task, direction, part), found in (FRACTIONS | (fractions or {})).items():
        intact, changed = loops[task, direction]
        for count, fraction in zip((0, *steps), (0, *found), strict=True):
            here = jitter(task, direction, part * bool(count), count, seeds=seeds, scale=scale)
            for seed in range(seeds):
                lost = (task, direction, seed) in diverged
                value = changed + fraction * (intact - changed) + noise[task, direction][seed] + here[seed]
                rows.append((task, direction, part, count, seed, NAN if lost else value))
    refits = pd.DataFrame(rows, columns=["task", "direction", "part", "steps", "seed", "value"])
    return refits, pd.DataFrame(own, columns=["task", "direction", "seed", "value"])


def judged(made=None, scale="laptop", floors=FLOORS):
    return {j.id: j for j in judge(*(made or tables()), floors, 4, scale)}


def head(*fractions):
    return {("circuit", "added", "head"): fractions}


def layer(*fractions):
    return {("circuit", "added", "layer"): fractions}


def cell(judgement, arm, task="circuit"):
    (found,) = [p for p in judgement.points if p["arm"] == arm and p["task"] == task]
    return found


ORDERS = ("layer_beats_head", "head_plateaus")
VALUES = ("refit_head", "refit_head_plateau", "refit_layer", "refit_layer_hops")


def test_the_papers_numbers_replicate_every_claim():
    rules = claims.load()
    found = judged(tables(seeds=16), scale="paper")
    assert sorted(found) == sorted(id for id, claim in rules.items() if claim["section"] == "4.4")
    for j in found.values():
        assert j.verdict == "replicated", j
        assert j.n == 16 and j.ours and {p["id"] for p in j.points} == {j.id}
        assert all(list(p) == claims.POINTS and p["K"] == 4 for p in j.points)
    json.dumps(claims.as_result(found.values()), allow_nan=False)
    gap = found["layer_beats_head"]
    assert gap.reason.startswith("at 3000 steps; norm removed, 3000 steps: layer 0.9")
    assert gap.ours.startswith("layer 1.0") and "gap +0.6" in gap.ours and gap.low > 0.6
    assert found["head_plateaus"].reason == "from 300 to 3000 steps"
    assert found["refit_head"].ours.startswith("circuit 0.3")


def test_values_are_out_of_reach_away_from_the_papers_scale():
    found = judged(scale="overnight")
    for id in VALUES:
        assert found[id].verdict == "out_of_reach" and found[id].points and found[id].ours
        assert "16 seeds an arm" in found[id].reason
    assert {found[id].verdict for id in ORDERS} == {"replicated"}
    assert "layer_beats_head" in found["refit_layer"].reason


def test_a_value_off_the_papers_is_named():
    found = judged(tables(fractions=layer(0.43, 0.60, 0.70)), scale="paper")["refit_layer"]
    assert found.verdict == "not_replicated" and found.reason.startswith("steps=3000: 0.7")
    assert found.reason.endswith("against 1.000")


# ---- the recovered fraction


def test_recovered_is_the_ratio_of_means_drawn_jointly():
    refits, intact = tables(scale=0.05)
    here = refits[(refits["task"] == "circuit") & (refits["direction"] == "added")]
    got = recovered(refits, intact, "circuit", "added", "head", 300, "x", 4)
    own = intact[(intact["task"] == "circuit") & (intact["direction"] == "added")]["value"].to_numpy()
    changed = here[(here["part"] == "layer") & (here["steps"] == 0)]["value"].to_numpy()
    after = here[(here["part"] == "head") & (here["steps"] == 300)]["value"].to_numpy()
    rng, draws = np.random.default_rng(0), []
    for _ in range(10_000):
        s = rng.integers(8, size=8)
        draws.append((after[s].mean() - changed[s].mean()) / (own[s].mean() - changed[s].mean()))
    assert got["value"] == pytest.approx((after.mean() - changed.mean()) / (own.mean() - changed.mean()))
    assert (got["low"], got["high"]) == pytest.approx(tuple(np.percentile(draws, [2.5, 97.5])), abs=0.01)
    assert (got["id"], got["task"], got["arm"], got["K"], got["n"]) == ("x", "circuit", "added, head, 300 steps", 4, 8)
    cost = loss(refits, intact, "circuit", "added")
    assert cost["value"] == pytest.approx(np.mean(own - changed)) and cost["low"] < cost["value"] < cost["high"]


def test_row_order_does_not_matter():
    refits, intact = tables(scale=0.05)
    mixed = refits.sample(frac=1, random_state=1), intact.sample(frac=1, random_state=2)
    assert judged(mixed) == judged((refits, intact))


def test_fractions_are_not_clipped():
    made = tables(fractions=head(-0.2, -0.3, -0.4) | layer(1.1, 1.2, 1.3))
    assert recovered(*made, "circuit", "added", "layer", 3000)["low"] > 1.2
    assert recovered(*made, "circuit", "added", "head", 3000)["high"] < -0.3
    found = judged(made)
    assert found["layer_beats_head"].verdict == "replicated" and found["layer_beats_head"].low > 1.5
    each, left = by_seed_fractions(*made, "circuit", "added", "layer", 3000)
    assert left == 0 and len(each) == 8 and (each > 1.2).all()


def test_by_seed_fractions_leave_out_seeds_that_lost_little():
    refits, intact = tables(scale=0.0)
    own = (intact["task"] == "circuit") & (intact["direction"] == "added")
    intact.loc[own & (intact["seed"] == 2), "value"] = 0.639 + 0.04  # loses 0.04
    intact.loc[own & (intact["seed"] == 5), "value"] = 0.639 + 0.05
    each, left = by_seed_fractions(refits, intact, "circuit", "added", "head", 3000)
    assert left == 1 and list(each.index) == [0, 1, 3, 4, 5, 6, 7]
    assert each[0] == pytest.approx(0.35) and each[5] == pytest.approx(0.35 * 0.355 / 0.05)


@pytest.mark.parametrize(
    ("changed", "scale", "seeds", "defined"),
    [
        (0.94, 0.0, 8, True),  # loses 0.054
        (0.95, 0.0, 8, False),  # loses 0.044, its interval far from 0
        (0.75, 0.5, 3, False),  # loses enough on average, by an interval that covers 0
        (0.639, 0.004, 1, False),  # a single seed has no interval
    ],
)
def test_a_fraction_needs_a_clear_loss(changed, scale, seeds, defined):
    made = tables({("circuit", "added"): (0.994, changed)}, seeds=seeds, scale=scale)
    got = recovered(*made, "circuit", "added", "head", 300)
    assert (got["value"] is not None) == defined and got["n"] == seeds
    assert (got["low"] is None) == (got["high"] is None) == (not defined)
    found = judged(made, scale="paper")
    for id in ORDERS:
        assert (found[id].verdict == "inconclusive") != defined, found[id]
        assert ("the changed loop loses only" in found[id].reason) != defined
    if not defined:
        assert found["layer_beats_head"].ours == "layer undefined, head undefined; gap undefined"
        assert found["refit_head_plateau"].verdict == "inconclusive"
        assert found["refit_head_plateau"].reason.startswith(
            "not measured: refit_head_plateau; circuit: the changed loop loses"
        )
        json.dumps(claims.as_result(found.values()), allow_nan=False)


def test_a_small_loss_is_given_with_its_interval():
    found = judged(tables({("circuit", "added"): (0.994, 0.97)}))["layer_beats_head"]
    assert found.reason.startswith("at 3000 steps; the changed loop loses only 0.02 [0.02, 0.03]; norm removed")
    alone = judged(tables(seeds=1))["head_plateaus"]
    assert "(no interval over one seed); n = 1, below 8" in alone.reason and alone.n == 1


# ---- layer_beats_head


@pytest.mark.parametrize(
    ("fractions", "scale", "verdict"),
    [
        (layer(0.4, 0.8, 0.97), 0.004, "replicated"),
        (layer(0.4, 0.8, 0.93), 0.05, "replicated"),  # the interval reaches 0.95
        (layer(0.4, 0.8, 0.80), 0.004, "same_direction"),  # ahead, not all of it
        (layer(0.1, 0.1, 0.10), 0.004, "not_replicated"),  # the head recovers more
        (layer(0.3, 0.3, 0.98) | head(0.3, 0.9, 0.96), 0.15, "inconclusive"),
    ],
)
def test_layer_beats_head(fractions, scale, verdict):
    refits, intact = tables(fractions=fractions, scale=scale)
    found = layer_beats_head(refits, intact, FLOORS, 4)
    assert found.verdict == verdict, found
    gap = cell(found, "added, layer - head, 3000 steps")
    assert (found.low, found.high) == (gap["low"], gap["high"])
    # a ratio over one common loss: the gap of the fractions
    parts = [cell(found, f"added, {part}, 3000 steps")["value"] for part in ("layer", "head")]
    assert gap["value"] == pytest.approx(parts[0] - parts[1])


def test_the_largest_step_count_that_both_parts_ran():
    refits, intact = tables(fractions=layer(0.4, 0.97, NAN))
    stopped = refits[~((refits["part"] == "layer") & (refits["steps"] == 3000))]
    found = judged((stopped, intact), scale="paper")
    assert found["layer_beats_head"].reason.startswith("at 300 steps; norm removed, 300 steps: ")
    assert found["layer_beats_head"].verdict == "replicated"
    assert "added, layer - head, 300 steps" in [p["arm"] for p in found["layer_beats_head"].points]
    assert found["head_plateaus"].reason == "from 300 to 3000 steps"
    assert step_counts(stopped, "circuit", "added", "layer") == [30, 300]
    # the value that was not run
    assert found["refit_layer"].verdict == "inconclusive"
    assert found["refit_layer"].reason == "not measured: steps=3000; layer not refitted for 3000 steps on circuit"


def test_no_shared_step_count_is_out_of_reach():
    refits, intact = tables()
    apart = refits[(refits["steps"] == 0) | ((refits["part"] == "head") == (refits["steps"] == 30))]
    found = judged((apart, intact))
    assert found["layer_beats_head"].verdict == "out_of_reach" and "same number of steps" in found["layer_beats_head"].reason
    assert found["head_plateaus"].verdict == "out_of_reach"


def test_the_removed_direction_is_reported_and_decides_nothing():
    worse = {("circuit", "removed", "layer"): (0.0, 0.0, 0.0), ("circuit", "removed", "head"): (0.5, 0.7, 0.9)}
    found = judged(tables(fractions=worse))["layer_beats_head"]
    assert found.verdict == "replicated" and ", head 0.9" in found.reason
    assert cell(found, "removed, head, 3000 steps")["value"] == pytest.approx(0.9, abs=0.02)
    small = judged(tables({("circuit", "removed"): (0.96, 0.95)}))["layer_beats_head"]
    assert small.verdict == "replicated"
    assert "norm removed, 3000 steps: the changed loop loses only 0.01 [" in small.reason
    refits, intact = tables()
    only = (refits[refits["direction"] == "added"], intact[intact["direction"] == "added"])
    alone = judged(only)["layer_beats_head"]
    assert alone.verdict == "replicated" and alone.reason.endswith("the norm-removed direction was not run")
    fewer = (
        refits[(refits["direction"] == "added") | (refits["seed"] < 5)],
        intact[(intact["direction"] == "added") | (intact["seed"] < 5)],
    )
    assert judged(fewer)["layer_beats_head"].n == 8  # that of the direction that decides


# ---- head_plateaus


@pytest.mark.parametrize(
    ("fractions", "scale", "verdict"),
    [
        (head(0.2, 0.33, 0.35), 0.004, "replicated"),
        (head(0.2, 0.33, 0.20), 0.004, "replicated"),  # falling is no gain
        (head(0.2, 0.33, 0.60), 0.004, "not_replicated"),
        (head(0.2, 0.33, 0.40), 0.1, "inconclusive"),
        (head(0.2, 0.33, 0.39), 0.0, "not_replicated"),  # 0.06, without noise
        (head(0.2, 0.33, 0.33), 0.2, "inconclusive"),  # the interval passes 0.10
    ],
)
def test_head_plateaus(fractions, scale, verdict):
    found = head_plateaus(*tables(fractions=fractions, scale=scale), FLOORS, 4)
    assert found.verdict == verdict, found
    gain = cell(found, "added, head, 3000 - 300 steps")
    ends = [cell(found, f"added, head, {steps} steps")["value"] for steps in (300, 3000)]
    assert gain["value"] == pytest.approx(ends[1] - ends[0]) and found.low == gain["low"]


@pytest.mark.parametrize(
    ("steps", "used"),
    [
        ((30, 300, 3000), "from 300 to 3000 steps"),
        ((10, 100, 400), "from 10 to 100 steps"),
        ((20, 100, 200), "from 20 to 200 steps"),
        ((100, 200, 400), None),
    ],
)
def test_the_two_largest_decades(steps, used):
    found = head_plateaus(*tables(steps=steps), FLOORS, 4)
    assert found.reason == (used or "needs head refits on circuit at two step counts ten times apart")
    assert (found.verdict == "out_of_reach") == (used is None)


# ---- gates, diverged seeds, absent rows


def test_incompetent_models_are_shown_and_not_judged():
    for intact, verdict in ((0.49, "not_competent"), (0.51, "replicated")):  # the floor of circuit is 0.45, over its depths
        found = judged(tables({("circuit", "added"): (intact, 0.2)}))
        for id in ORDERS:
            assert found[id].verdict == verdict and found[id].points and found[id].ours
    low = FLOORS.assign(value=0.1)
    for intact, verdict in ((0.28, "not_competent"), (0.32, "replicated")):
        found = judged(tables({("circuit", "added"): (intact, 0.05)}), floors=low)
        assert {found[id].verdict for id in ORDERS} == {verdict}
    # the gate comes first, and the arm trained with the norm has no say in it
    assert judged(tables({("circuit", "added"): (0.2, 0.2)}))["head_plateaus"].verdict == "not_competent"
    assert judged(tables({("circuit", "removed"): (0.2, 0.1)}))["layer_beats_head"].verdict == "replicated"


def test_a_diverged_model_loses_and_gains_nothing_and_is_named():
    refits, intact = tables(scale=0.0, diverged=[("circuit", "added", 3)])
    got = recovered(refits, intact, "circuit", "added", "head", 3000)
    assert got["value"] == pytest.approx(0.35) and got["n"] == 8
    assert loss(refits, intact, "circuit", "added")["value"] == pytest.approx(0.355 * 7 / 8)
    each, left = by_seed_fractions(refits, intact, "circuit", "added", "head", 3000)
    assert left == 1 and 3 not in each.index
    found = judged((refits, intact))
    assert found["head_plateaus"].verdict == "replicated"
    for id in (*ORDERS, "refit_head"):
        assert found[id].reason.endswith("the model of seed 3 diverged on circuit, added"), found[id]
    assert "diverged" not in found["refit_layer_hops"].reason
    # whatever a diverged model is said to score after a refit
    filled = refits.fillna({"value": 0.9})
    assert recovered(filled, intact, "circuit", "added", "head", 3000) == got


def test_a_refit_that_diverged_counts_as_zero_and_is_named():
    refits, intact = tables(scale=0.0)
    gone = (refits["direction"] == "added") & (refits["part"] == "head") & (refits["steps"] == 3000) & (refits["seed"] == 1)
    refits.loc[gone & (refits["task"] == "circuit"), "value"] = NAN
    got = recovered(refits, intact, "circuit", "added", "head", 3000)
    assert got["value"] == pytest.approx((7 * 0.35 - 0.639 / 0.355) / 8)
    assert judged((refits, intact))["head_plateaus"].reason.endswith("a refit of seed 1 diverged on circuit, added")


def test_all_models_diverged():
    found = judged(tables(diverged=[("circuit", "added", seed) for seed in range(8)]), scale="paper")
    assert {found[id].verdict for id in ORDERS} == {"not_competent"}
    assert found["refit_layer"].verdict == "inconclusive" and found["refit_layer"].ours == "-, -"
    json.dumps(claims.as_result(found.values()), allow_nan=False)


def test_a_task_that_was_not_run_is_out_of_reach():
    refits, intact = tables()
    found = judged((refits[refits["task"] == "circuit"], intact[intact["task"] == "circuit"]), scale="paper")
    assert found["refit_layer_hops"].verdict == "out_of_reach" and found["refit_layer_hops"].reason == "needs runs on hops"
    assert found["refit_head"].verdict == "inconclusive" and found["refit_head"].ours.endswith("; hops -")
    assert found["refit_head"].reason == "not measured: hops; head not refitted for 300 steps on hops"
    assert found["layer_beats_head"].verdict == "replicated"
    found = judged((refits[refits["task"] == "hops"], intact[intact["task"] == "hops"]))
    assert [j.id for j in found.values() if j.reason == "needs runs on circuit"] == [
        "refit_head_plateau",
        "refit_layer",
        *ORDERS,
    ]
    # the claims are about the norm added
    found = judged((refits[refits["direction"] == "removed"], intact[intact["direction"] == "removed"]))
    assert {j.verdict for j in found.values()} == {"out_of_reach"}
    assert found["refit_head"].reason == "needs runs on circuit and hops"


def test_tables_that_do_not_agree_are_refused():
    refits, intact = tables()
    with pytest.raises(ValueError, match="the same models have seeds .* changed"):
        judged((refits, intact[intact["seed"] < 7]))
    some = refits[~((refits["steps"] == 300) & (refits["seed"] == 7))]
    with pytest.raises(ValueError, match="the same models have seeds .* refitted"):
        judged((some, intact))
    with pytest.raises(ValueError, match="no rows with task circuit, direction added, steps 0"):
        judged((refits[refits["steps"] > 0], intact))
    other = refits.copy()
    other.loc[(other["steps"] == 0) & (other["part"] == "head"), "value"] += 0.1
    with pytest.raises(ValueError, match="the same for both parts"):
        judged((other, intact))
    assert not math.isnan(loss(refits, intact, "hops", "added")["value"])
