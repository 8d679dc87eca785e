"""Every verdict of every rule of the dense comparisons, on made-up tables."""

import json

import numpy as np
import pandas as pd
import pytest

from lib import claims, rules_dense_axes, stats
from lib.rules_dense_axes import (
    MEAN,
    by_group,
    compare,
    judge_dense,
    mean_above,
    over,
    q1_order,
    q2_order,
    q3_order,
    shapes_match,
    task_deltas,
)
from lib.task_groups import GROUPS

NAN = float("nan")
TASKS = [task for tasks in GROUPS.values() for task in tasks]
FLOORS = pd.DataFrame({"task": TASKS, "value": 0.1})
COUNTS = pd.DataFrame(
    [("full", 5, 18), ("sandwich", 5, 18), ("paper full", 28, 112), ("paper sandwich", 28, 112)],
    columns=["name", "stored", "executed"],
)
VALUES = ("q1_envelope", "q2_injection", "q3_states")
# context, quantitative, knowledge, constrained of each arm: the picture that the claims describe
LEVELS = {
    "full": (0.50, 0.50, 0.60, 0.50),
    "full_injected": (0.52, 0.49, 0.60, 0.51),
    "sandwich": (0.60, 0.60, 0.60, 0.50),
    "sandwich_injected": (0.70, 0.55, 0.60, 0.55),
    "noise": (0.75, 0.50, 0.59, 0.55),
    "shared_hl": (0.72, 0.40, 0.62, 0.57),
}
UNTAUGHT = 0.12  # of no competence: below 0.30, and the floor is 0.1


def jitter(*key, seeds=8, scale=0.01):
    """Noise of mean 0, so that arms of one level have a difference of 0."""
    values = np.random.default_rng([sum(map(ord, part)) for part in key]).normal(0, scale, seeds)
    return values - values.mean()


def scores(levels=LEVELS, seeds=8, diverged=(), scale=0.01, tasks=TASKS):
    """The long table; levels: arm -> a level per group, or task -> level or values; diverged lists (arm, seed)."""
    rows = []
    for arm, of in levels.items():
        if not isinstance(of, dict):
            of = {task: level for tasks, level in zip(GROUPS.values(), of, strict=True) for task in tasks}
        for task in tasks:
            values = np.broadcast_to(
                of[task] + (jitter(arm, task, seeds=seeds, scale=scale) if np.ndim(of[task]) == 0 else 0), seeds
            )
            for seed, value in enumerate(values):
                value = NAN if (arm, seed) in diverged else value
                # earlier shares and tasks of no group must not be read
                rows += [(arm, task, seed, 0.5, -9.0), (arm, task, seed, 1.0, value), (arm, "paragg", seed, 1.0, 9.0)]
    return pd.DataFrame(rows, columns=["arm", "task", "seed", "share", "value"])


def against(pair, *deltas, base=(0.5,) * 4, **keys):
    """A table in which the first arm is ahead of the second by these, group by group."""
    return scores({pair[0]: tuple(b + d for b, d in zip(base, deltas, strict=True)), pair[1]: base}, **keys)


def judged(table=None, scale="laptop", counts=COUNTS, floors=FLOORS):
    return {j.id: j for j in judge_dense(scores() if table is None else table, floors, counts, scale)}


def of(j, arm):
    return {cell["task"]: cell for cell in j.points if cell["arm"] == arm}


ENVELOPE, WRITE = ("sandwich", "full"), ("sandwich_injected", "sandwich")


@pytest.mark.parametrize("scale", ["smoke", "laptop", "paper"])
def test_the_claims_picture_is_replicated_and_benchmark_numbers_are_out_of_reach(scale):
    found, rules = judged(scale=scale), claims.load()
    section = [id for id, claim in rules.items() if claim["paper"] == "axes" and claim["section"] in ("Q1", "Q2", "Q3")]
    assert list(found) == section and len(section) == 9
    for id, j in found.items():
        assert j.verdict == ("out_of_reach" if id in VALUES else "replicated"), j
        assert 0 < len(j.ours) < 80 and j.n == (2 if id == "shapes_match" else 8)
        assert {p["id"] for p in j.points} == {id} and all(list(p) == claims.POINTS for p in j.points)
        places = [(p["task"], p["arm"]) for p in j.points]
        assert len(set(places)) == len(places)
    for id in VALUES:
        assert found[id].reason.startswith("takes pretraining runs of 730M to 8B parameters, or their published checkpoints")
        assert f"judged as {rules[id]['see']}" in found[id].reason and found[id].reason.endswith(f"scale {scale}")
    json.dumps(claims.as_result(found.values()), allow_nan=False)


def test_every_rule_shows_all_groups_their_mean_and_the_arms():
    pairs = {
        "q1_order": [ENVELOPE],
        "q2_order": [WRITE],
        "q2_middle_beats_full": [("sandwich_injected", "full_injected")],
        "q3_order": [("noise", "sandwich_injected"), ("shared_hl", "sandwich_injected")],
        "dense_huginn_beats_ouro": [("noise", "full")],
    }
    for id, j in judged().items():
        for pair in pairs.get(id, ()):
            cells, first, second = of(j, " - ".join(pair)), of(j, pair[0]), of(j, pair[1])
            assert list(cells) == list(first) == list(second) == [*GROUPS, MEAN]
            for group, at in zip(GROUPS, range(4), strict=True):
                assert first[group]["value"] == pytest.approx(LEVELS[pair[0]][at])
                assert cells[group]["value"] == pytest.approx(LEVELS[pair[0]][at] - LEVELS[pair[1]][at], abs=1e-9)
                assert cells[group]["p_raw"] is not None and first[group]["p_raw"] is None
            assert cells[MEAN]["value"] == pytest.approx(np.mean(LEVELS[pair[0]]) - np.mean(LEVELS[pair[1]]))
        arms = {arm for pair in pairs.get(id, ()) for arm in (*pair, " - ".join(pair))}
        assert id not in pairs or {p["arm"] for p in j.points} == arms


def test_cells_against_their_definitions():
    table = scores(
        {"noise": (0.55, 0.5, 0.6, 0.5), "shared_hl": (0.52, 0.5, 0.6, 0.5), "sandwich_injected": (0.5,) * 4}, scale=0.1
    )
    at = table[(table["share"] == 1) & table["task"].isin(TASKS)].pivot(index=["arm", "seed"], columns="task", values="value")
    groups = pd.DataFrame({group: at[list(tasks)].mean(axis=1) for group, tasks in GROUPS.items()})
    groups[MEAN] = groups.mean(axis=1)
    contrasts = compare("x", table, FLOORS, ("noise", "sandwich_injected"), ("shared_hl", "sandwich_injected"))
    cells = []
    for contrast in contrasts:
        state = contrast.name.removesuffix(" - sandwich_injected")
        for group in groups:
            x, y = (groups.loc[arm, group] for arm in (state, "sandwich_injected"))
            cell, whole = contrast.cells[group], stats.bootstrap_difference(x, y)
            assert (cell["value"], cell["low"], cell["high"]) == pytest.approx(whole[:3]) and cell["n"] == 8
            assert cell["p_raw"] == pytest.approx(stats.mann_whitney(x, y)[1])
            assert cell["delta"] == pytest.approx(np.sign(x.to_numpy()[:, None] - y.to_numpy()).mean())
            cells.append(cell)
    # step down by hand over both states' cells
    raw, adjusted, running = [cell["p_raw"] for cell in cells], {}, 0.0
    for rank, i in enumerate(sorted(range(10), key=raw.__getitem__)):
        running = max(running, min(1, (10 - rank) * raw[i]))
        adjusted[i] = running
    assert [cell["p_holm"] for cell in cells] == pytest.approx([adjusted[i] for i in range(10)])


def test_groups_weigh_equally_and_so_do_the_tasks_of_one():
    level = {"arithmetic": 0.5, "knowledge": 0.5, "constrained": 0.5}
    table = scores({"sandwich": level | {"hops": 0.9, "circuit": 0.4}, "full": level | {"hops": 0.5, "circuit": 0.5}})
    cells = of(q1_order(table, FLOORS), "sandwich - full")
    assert cells["context"]["value"] == pytest.approx(0.15) and cells[MEAN]["value"] == pytest.approx(0.15 / 4)


def test_the_order_of_rows_and_the_seeds_numbers_change_nothing():
    table = scores(scale=0.05)
    mixed = table.sample(frac=1, random_state=0).reset_index(drop=True)
    floors, counts = FLOORS[::-1], COUNTS[::-1]
    assert judged(mixed, floors=floors, counts=counts) == judged(table)
    assert judged(table.assign(seed=table["seed"] + 100)) == judged(table)


# ---- competence


@pytest.mark.parametrize(
    ("level", "floor", "able"),
    [(0.31, 0.1, True), (0.29, 0.1, False), (0.6, 0.56, False), (0.6, 0.54, True)],
)
def test_a_group_is_competent_by_its_better_arm(level, floor, able):
    floors = FLOORS.assign(value=floor)
    for pair in (ENVELOPE, ENVELOPE[::-1]):
        table = scores({pair[0]: (level,) * 4, pair[1]: (0.05,) * 4})
        (contrast,) = compare("x", table, floors, ENVELOPE)
        assert contrast.able == (list(GROUPS) if able else [])


def test_a_groups_floor_is_the_mean_of_its_tasks_and_must_be_there():
    table = scores({"sandwich": (0.4,) * 4, "full": (0.4,) * 4})
    for circuit, able in ((0.55, True), (0.65, False)):  # with hops' 0.1: 0.325 and 0.375
        floors = FLOORS.assign(value=[circuit if task == "circuit" else 0.1 for task in TASKS])
        assert ("context" in compare("x", table, floors, ENVELOPE)[0].able) == able
    with pytest.raises(ValueError, match="floors has no value for task circuit"):
        q1_order(table, FLOORS[FLOORS["task"] != "circuit"])


def test_competence_is_judged_at_the_end_and_over_all_seeds():
    # 0.36 on the seeds that trained: with two of eight at 0 it is 0.27
    table = scores({"sandwich": (0.36,) * 4, "full": (0.2,) * 4}, diverged=[("sandwich", 0), ("sandwich", 1)])
    assert q1_order(table, FLOORS).verdict == "not_competent"
    early = table.assign(value=table["value"].mask(table["share"] < 1, 0.9))
    assert q1_order(early, FLOORS).verdict == "not_competent"


def test_incompetent_arms_are_shown_and_not_judged():
    found = judged(scores({arm: (UNTAUGHT,) * 4 for arm in LEVELS}))
    for id, j in found.items():
        expected = "out_of_reach" if id in VALUES else "replicated" if id == "shapes_match" else "not_competent"
        assert j.verdict == expected and j.points and j.ours, j
    assert "not competent and left out: context, quantitative, knowledge, constrained" in found["q1_order"].reason


def test_the_mean_is_over_competent_groups_and_says_so():
    pair = ("noise", "full")
    table = against(pair, 0.1, 0.1, -0.1, 0.0, base=(0.5, UNTAUGHT, UNTAUGHT, 0.5))
    found = mean_above("dense_huginn_beats_ouro", table, FLOORS, pair)
    assert of(found, "noise - full")[MEAN]["value"] == pytest.approx(0.05) and found.verdict == "replicated"
    assert found.reason == "not competent and left out: quantitative, knowledge, the mean is over context, constrained"
    assert found.ours.startswith("mean over groups +0.05 [0.0")


# ---- q1_order


@pytest.mark.parametrize(
    ("deltas", "verdict"),
    [
        ((0.1, 0.1, 0.0, 0.0), "replicated"),
        ((0.1, 0.1, -0.1, -0.1), "replicated"),
        # one of the others rises: not consistently
        ((0.1, 0.1, 0.1, 0.0), "replicated"),
        ((0.1, 0.1, 0.0, 0.1), "replicated"),
        # both rise: there is an effect, and not on multi-step reasoning alone
        ((0.1, 0.1, 0.1, 0.1), "same_direction"),
        # one of the multi-step groups stays
        ((0.1, 0.0, 0.0, 0.0), "inconclusive"),
        ((0.0, 0.1, 0.0, 0.0), "inconclusive"),
        ((0.1, 0.0, 0.1, 0.1), "inconclusive"),
        # or falls
        ((-0.1, 0.1, 0.0, 0.0), "not_replicated"),
        ((0.1, -0.1, 0.0, 0.0), "not_replicated"),
        ((0.0, -0.1, 0.1, 0.1), "not_replicated"),
    ],
)
def test_q1_order(deltas, verdict):
    found = q1_order(against(ENVELOPE, *deltas), FLOORS)
    assert found.verdict == verdict, found
    weakest = min("context", "quantitative", key=lambda group: of(found, "sandwich - full")[group]["low"])
    cell = of(found, "sandwich - full")[weakest]
    assert (found.low, found.high) == (cell["low"], cell["high"])
    assert found.ours.startswith(f"context {deltas[0]:+.2f} [") and f"quantitative {deltas[1]:+.2f} [" in found.ours
    assert ("the effect is not confined" in found.reason) == (min(deltas[2:]) > 0)


@pytest.mark.parametrize(
    ("unfit", "deltas", "verdict"),
    [
        # the multi-step group that is left decides
        ("quantitative", (0.1, -0.1, 0.0, 0.0), "replicated"),
        ("quantitative", (-0.1, 0.1, 0.0, 0.0), "not_replicated"),
        ("context", (-0.1, 0.1, 0.0, 0.0), "replicated"),
        ("context", (0.1, 0.0, 0.0, 0.0), "inconclusive"),
        # the condition is about what is left of it, and holds where nothing is
        ("knowledge", (0.1, 0.1, 0.0, 0.1), "same_direction"),
        ("knowledge", (0.1, 0.1, 0.1, 0.0), "replicated"),
        ("knowledge constrained", (0.1, 0.1, 0.1, 0.1), "replicated"),
        # the condition alone shows no effect
        ("context quantitative", (0.1, 0.1, 0.0, 0.0), "inconclusive"),
        ("context quantitative", (0.1, 0.1, 0.1, 0.1), "inconclusive"),
        ("context quantitative knowledge constrained", (0.1, 0.1, 0.0, 0.0), "not_competent"),
    ],
)
def test_q1_order_without_some_groups(unfit, deltas, verdict):
    base = tuple(UNTAUGHT if group in unfit.split() else 0.5 for group in GROUPS)
    found = q1_order(against(ENVELOPE, *deltas, base=base), FLOORS)
    assert found.verdict == verdict, found
    assert f"not competent and left out: {', '.join(unfit.split())}" in found.reason
    assert ("the effect on context and quantitative cannot be seen" in found.reason) == unfit.startswith("context quantitative")


# ---- q2_order


@pytest.mark.parametrize(
    ("deltas", "verdict"),
    [
        ((0.1, -0.1, 0.0, 0.0), "replicated"),
        ((0.1, 0.0, 0.1, 0.1), "replicated"),
        ((0.1, 0.1, 0.0, 0.0), "same_direction"),
        ((0.0, -0.1, 0.1, 0.1), "inconclusive"),
        ((0.0, 0.1, 0.0, 0.0), "inconclusive"),
        ((-0.1, -0.1, 0.0, 0.0), "not_replicated"),
        ((-0.1, 0.1, 0.0, 0.0), "not_replicated"),
    ],
)
def test_q2_order(deltas, verdict):
    found = q2_order(against(WRITE, *deltas), FLOORS)
    assert found.verdict == verdict, found
    cell = of(found, "sandwich_injected - sandwich")["context"]
    assert (found.low, found.high) == (cell["low"], cell["high"])
    assert f"quantitative {of(found, 'sandwich_injected - sandwich')['quantitative']['value']:+.2f} [" in found.reason


@pytest.mark.parametrize(
    ("unfit", "deltas", "verdict"),
    [
        ("quantitative", (0.1, 0.1, 0.0, 0.0), "replicated"),
        ("quantitative", (-0.1, 0.1, 0.0, 0.0), "not_replicated"),
        ("context", (0.1, -0.1, 0.0, 0.0), "inconclusive"),
        ("context", (0.1, 0.1, 0.0, 0.0), "inconclusive"),
        ("context quantitative", (0.1, -0.1, 0.0, 0.0), "not_competent"),
        ("knowledge constrained", (0.1, -0.1, 0.0, 0.0), "replicated"),
    ],
)
def test_q2_order_without_some_groups(unfit, deltas, verdict):
    base = tuple(UNTAUGHT if group in unfit.split() else 0.5 for group in GROUPS)
    found = q2_order(against(WRITE, *deltas, base=base), FLOORS)
    assert found.verdict == verdict, found
    assert f"not competent and left out: {', '.join(unfit.split())}" in found.reason


# ---- a mean over groups


@pytest.mark.parametrize(
    ("id", "pair"),
    [
        ("q2_middle_beats_full", ("sandwich_injected", "full_injected")),
        ("dense_huginn_beats_ouro", ("noise", "full")),
    ],
)
@pytest.mark.parametrize(
    ("deltas", "verdict"),
    [
        ((0.1, 0.1, 0.1, 0.1), "replicated"),
        ((0.3, -0.1, -0.05, 0.0), "replicated"),
        ((0.1, -0.1, 0.1, -0.1), "inconclusive"),
        ((-0.3, 0.1, 0.05, 0.0), "not_replicated"),
    ],
)
def test_mean_above(id, pair, deltas, verdict):
    found = mean_above(id, against(pair, *deltas), FLOORS, pair)
    assert found.verdict == verdict, found
    assert found.ours.startswith(f"mean over groups {sum(deltas) / 4:+.2f}"[:-1])
    cell = of(found, " - ".join(pair))[MEAN]
    assert (found.low, found.high) == (cell["low"], cell["high"])


# ---- q3_order


def states(noise, shared, base=(0.5,) * 4, **keys):
    levels = {
        name: tuple(b + d for b, d in zip(base, deltas, strict=True))
        for name, deltas in (("noise", noise), ("shared_hl", shared))
    }
    return scores(levels | {"sandwich_injected": base}, **keys)


NONE, ALL = (0.0, 0.0, 0.0, 0.0), (0.1, 0.1, 0.1, 0.1)


@pytest.mark.parametrize(
    ("noise", "shared", "verdict"),
    [
        (NONE, NONE, "replicated"),
        ((0.1, -0.1, 0.05, -0.1), (-0.1, -0.1, -0.1, -0.1), "replicated"),
        # one state is ahead everywhere
        (ALL, NONE, "not_replicated"),
        (NONE, ALL, "not_replicated"),
        (ALL, ALL, "not_replicated"),
        # or in the mean
        ((0.3, 0.0, 0.0, -0.05), NONE, "not_replicated"),
        (NONE, (0.3, 0.0, 0.0, -0.05), "not_replicated"),
    ],
)
def test_q3_order(noise, shared, verdict):
    found = q3_order(states(noise, shared), FLOORS)
    assert found.verdict == verdict, found
    assert found.ours.startswith(f"means: noise {np.mean(noise):+.2f}"[:-1])
    ahead = max(("noise", "shared_hl"), key=lambda s: of(found, f"{s} - sandwich_injected")[MEAN]["value"])
    cell = of(found, f"{ahead} - sandwich_injected")[MEAN]
    assert (found.low, found.high) == (cell["low"], cell["high"])


def test_q3_order_says_how_wide_the_intervals_are():
    narrow, wide = (q3_order(states((0.1, 0, 0, -0.1), NONE, scale=scale), FLOORS) for scale in (0.002, 0.2))
    assert narrow.verdict == wide.verdict == "replicated"
    assert (
        "noise: above 0 on context of 4 groups, the mean's interval reaches +0.00 and is 0.00 wide, the groups' at most 0.0"
        in narrow.reason
    )
    cells = of(wide, "shared_hl - sandwich_injected")
    mean, widths = cells.pop(MEAN), [cell["high"] - cell["low"] for cell in cells.values()]
    told = f"reaches {mean['high']:+.2f} and is {mean['high'] - mean['low']:.2f} wide, the groups' at most {max(widths):.2f}"
    assert f"shared_hl: above 0 on none of 4 groups, the mean's interval {told}" in wide.reason and max(widths) > 0.2


@pytest.mark.parametrize(
    ("noise", "verdict"),
    [
        # of the groups left one is not above 0, though all four would not be either
        ((0.1, 0.0, -0.1, -0.1), "not_replicated"),
        ((0.0, 0.1, 0.1, 0.1), "replicated"),
    ],
)
def test_q3_order_is_about_competent_groups(noise, verdict):
    base = (0.5, UNTAUGHT, UNTAUGHT, UNTAUGHT)
    found = q3_order(states(noise, NONE, base=base), FLOORS)
    assert found.verdict == verdict, found
    assert "noise: not competent and left out: quantitative, knowledge, constrained, the mean is over context" in found.reason


def test_every_group_ahead_is_a_benefit_whatever_the_mean(monkeypatch):
    def unclear(*args):
        return [c._replace(cells=c.cells | {MEAN: c.cells[MEAN] | {"low": -0.1}}) for c in compare(*args)]

    monkeypatch.setattr(rules_dense_axes, "compare", unclear)
    assert q3_order(states(NONE, ALL), FLOORS).verdict == "not_replicated"
    assert q3_order(states(NONE, (0.1, 0.1, 0.1, 0.0)), FLOORS).verdict == "replicated"


def test_a_state_that_learned_nothing_drops_out():
    # the arm they are held against has not learned either: only noise has a competent group
    base = (UNTAUGHT,) * 4
    lost = q3_order(states((0.5, 0.0, 0.0, 0.0), NONE, base=base), FLOORS)
    assert lost.verdict == "not_replicated" and "shared_hl: not competent and left out" in lost.reason
    assert (lost.low, lost.high) == tuple(of(lost, "noise - sandwich_injected")[MEAN][end] for end in ("low", "high"))
    assert q3_order(states(NONE, NONE, base=base), FLOORS).verdict == "not_competent"


# ---- shapes_match


@pytest.mark.parametrize(
    ("name", "stored", "executed", "verdict"),
    [
        ("full", 5, 18, "replicated"),
        ("full", 6, 18, "not_replicated"),
        ("sandwich", 5, 20, "not_replicated"),
        ("paper full", 28, 111, "not_replicated"),
        ("paper sandwich", 27, 112, "not_replicated"),
    ],
)
def test_shapes_match(name, stored, executed, verdict):
    counts = COUNTS.assign(
        **{key: COUNTS[key].mask(COUNTS["name"] == name, n) for key, n in (("stored", stored), ("executed", executed))}
    )
    found = shapes_match(counts)
    assert found.verdict == verdict and found.n == 2 and len(found.points) == 8
    assert (name in found.reason) == (verdict != "replicated")
    assert verdict != "replicated" or found.ours == "stored 5, executed 18, stored 28, executed 112"


def test_the_papers_shapes_have_the_papers_numbers():
    paper = COUNTS["name"].str.startswith("paper")
    assert shapes_match(COUNTS.assign(stored=COUNTS["stored"].mask(paper, 30))).verdict == "not_replicated"
    assert shapes_match(COUNTS.assign(executed=COUNTS["executed"].mask(~paper, 30))).verdict == "replicated"


def test_shapes_need_both_of_a_pair():
    found = shapes_match(COUNTS[:2])
    assert found.verdict == "replicated" and found.n == 1 and found.reason == "not counted: paper full and paper sandwich"
    assert shapes_match(COUNTS[:0]).verdict == "out_of_reach"
    with pytest.raises(ValueError, match="one row each for paper full and paper sandwich"):
        shapes_match(COUNTS[:3])
    with pytest.raises(ValueError, match="one row each for full and sandwich"):
        shapes_match(pd.concat([COUNTS, COUNTS[:1]]))


# ---- values


def test_values_show_the_tasks_in_points():
    found = judged()
    assert found["q1_envelope"].ours.startswith("hops +10.0, circuit +10.0, arithmetic +10.0, knowledge ")
    assert found["q2_injection"].ours.startswith("hops +10.0, circuit +10.0, arithmetic -5.0, ")
    assert found["q3_states"].ours == "noise 2 up and 1 down of 5; shared_hl 4 up and 1 down of 5"
    assert [p["task"] for p in found["q2_injection"].points] == TASKS
    only = task_deltas(claims.load()["q1_envelope"], scores(tasks=["circuit"]), ENVELOPE, "laptop")
    assert only.ours == "circuit +10.0"


# ---- few seeds, diverged seeds, what was not run

RULES = ("q1_order", "q2_order", "q2_middle_beats_full", "q3_order", "dense_huginn_beats_ouro")


@pytest.mark.parametrize("seeds", [1, 4, 5, 8])
def test_few_seeds_decide_nothing_and_some_are_said_to_be_few(seeds):
    flipped = {arm: tuple(1 - level for level in levels) for arm, levels in LEVELS.items()}
    both = {arm: (0.5,) * 4 for arm in LEVELS} | {arm: (0.6,) * 4 for arm in ("sandwich", "noise", "shared_hl")}
    both["sandwich_injected"] = (0.7,) * 4
    for levels, expected in ((LEVELS, {"replicated"}), (flipped, {"not_replicated"}), (both, {"same_direction"})):
        found = judged(scores(levels, seeds=seeds, scale=0.002))
        for id in RULES:
            if seeds < 5:
                assert found[id].verdict == "inconclusive", found[id]
                assert f"n = {seeds} an arm, below 5: intervals of so few decide nothing" in found[id].reason
            else:
                assert (f"n = {seeds} an arm, below 8: intervals alone decide" in found[id].reason) == (seeds < 8)
                assert found[id].n == seeds
        verdicts = {found[id].verdict for id in RULES}
        assert seeds < 5 or expected <= verdicts, verdicts
    untaught = judged(scores({arm: (UNTAUGHT,) * 4 for arm in LEVELS}, seeds=seeds))
    assert {untaught[id].verdict for id in RULES} == {"not_competent"}
    json.dumps(claims.as_result(found.values()), allow_nan=False)


def test_the_smallest_arm_counts():
    table = scores()
    found = q1_order(table[(table["arm"] != "full") | (table["seed"] < 4)], FLOORS)
    assert found.verdict == "inconclusive" and found.n == 4


def test_a_diverged_seed_ranks_last_counts_as_zero_and_is_named():
    found = judged(scores(diverged=[("noise", 3), ("noise", 5)]))
    j = found["dense_huginn_beats_ouro"]
    assert "2 of noise diverged" in j.reason and "diverged" not in found["q1_order"].reason + found["q2_injection"].reason
    values = 0.75 + np.mean([jitter("noise", task) for task in GROUPS["context"]], axis=0)
    x, y = np.where(np.isin(np.arange(8), (3, 5)), 0, values), 0.5 + np.zeros(8)
    cell = of(j, "noise - full")["context"]
    assert cell["value"] == pytest.approx(x.mean() - y.mean()) and cell["delta"] == pytest.approx(0.5)
    assert cell["n"] == 8 and of(j, "noise")[MEAN]["value"] == pytest.approx(0.75 * np.mean(LEVELS["noise"]), abs=0.01)
    assert "2 of noise diverged" in found["q3_states"].reason and "2 of noise diverged" in found["q3_order"].reason
    # two zeros leave the mean open, and a diverged seed is no tie with one at 0
    assert j.verdict == "inconclusive"
    tied = scores({"sandwich": dict.fromkeys(TASKS, np.zeros(8)), "full": (0.5,) * 4}, diverged=[("full", i) for i in range(8)])
    assert of(q1_order(tied, FLOORS), "sandwich - full")["context"]["delta"] == 1


def test_an_arm_that_always_diverged_leaves_a_table():
    found = judged(scores(diverged=[("sandwich", seed) for seed in range(8)]))
    assert found["q1_order"].verdict == "not_replicated"
    assert found["q2_order"].verdict == "same_direction"
    json.dumps(claims.as_result(found.values()), allow_nan=False)


def test_a_seed_that_diverged_on_one_task_counts_as_zero_there():
    a, b = (pd.Series(values, index=[0, 1, 2]) for values in ([0.5, NAN, NAN], [0.7, 0.8, NAN]))
    assert over([a, b]).tolist()[:2] == pytest.approx([0.6, 0.4]) and np.isnan(over([a, b])[2])
    with pytest.raises(ValueError, match=r"seeds \[0, 1, 2\] and another \[0, 1\]"):
        over([a, b[:2]])


def test_what_was_not_run_is_out_of_reach():
    found = judged(scores(tasks=["hops", "arithmetic"]))
    assert found["q1_order"].verdict == "out_of_reach"
    assert found["q1_order"].reason == "needs runs of a task of knowledge and a task of constrained"
    assert found["q2_order"].verdict == "replicated" and "not run: knowledge, constrained" in found["q2_order"].reason
    assert list(of(found["q3_order"], "noise - sandwich_injected")) == ["context", "quantitative", MEAN]
    assert found["q2_injection"].ours == "hops +10.0, arithmetic -5.0"
    lacking = judged(scores({arm: LEVELS[arm] for arm in LEVELS if arm != "noise"}))
    for id, j in lacking.items():
        gone = id in ("q3_states", "q3_order", "dense_huginn_beats_ouro")
        assert j.verdict == ("out_of_reach" if gone or id in VALUES else "replicated"), j
        assert ("needs runs of noise" in j.reason) == gone
    assert lacking["q3_states"].ours == "-"


def test_what_is_missing_from_one_arm_alone_is_an_error():
    table = scores()
    sandwich, hops = table["arm"] == "sandwich", table["task"] == "hops"
    with pytest.raises(ValueError, match="no rows with arm sandwich, task hops, share 1.0"):
        judged(table[~(sandwich & hops)])
    with pytest.raises(ValueError, match="one task has seeds"):
        judged(table[~(sandwich & hops & (table["seed"] == 2))])
    with pytest.raises(ValueError, match="no rows with arm sandwich, task hops, share 1.0"):
        judged(table[~(sandwich & (table["share"] == 1))])
    with pytest.raises(ValueError, match="no task was run with all of sandwich, full"):
        compare("x", table[table["task"] == "paragg"], FLOORS, ENVELOPE)


def test_groups_of_tasks():
    assert by_group(["knowledge", "circuit", "paragg"]) == {"context": ["circuit"], "knowledge": ["knowledge"]}
    assert by_group(TASKS) == {group: list(tasks) for group, tasks in GROUPS.items()}
