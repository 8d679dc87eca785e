"""Every verdict of every rule of section 4.1, on made-up pairs."""

import json
import math

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binom

from lib import claims
from lib.claims import worst
from lib.evaluation import Readings
from lib.instruments import BOUNDARY, LAYER, OUTSIDE, UNUSED
from lib.pairs import EVERY, NEVER, Pair
from lib.rules_asymmetry import asymmetry, costs, judge, removal_reaches_zero

SECTION = [id for id, claim in claims.load().items() if claim["section"] == "4.1"]
VALUES = [id for id in SECTION if claims.load()[id]["kind"] == "value"]
EXACT = ["identity_at_one_loop", "norm_placement_by_call_count"]
REMOVAL = ["removal_costs_at_budget", "removal_costs_beyond_budget", "removal_reaches_zero"]
ORDERS = [*REMOVAL, "damage_in_either_direction", "asymmetry"]
N, WRONG = 80, 99
# right first answers: a lower accuracy's are among a higher's, and 4 neighbours here are of 4 skeletons
ORDER = np.random.default_rng(0).permutation(N)


def rows(accuracy, loops):
    """(loops, N) bool: a number for every K, {K: number, None: all others}, or the instances that are right."""
    if isinstance(accuracy, np.ndarray):
        return np.tile(accuracy, (loops, 1))
    at = accuracy if isinstance(accuracy, dict) else {None: accuracy}
    found = np.zeros((loops, N), dtype=bool)
    for K in range(1, loops + 1):
        found[K - 1, ORDER[: round(at.get(K, at.get(None)) * N)]] = True
    return found


def pair(model="ouro-1, seed 0", task="circuit", intact=0.9, changed=0.1, r0=4, loops=32, floor=0.5, cluster=None):
    """A pair with these accuracies; its family is that of its name."""
    family = "huginn" if model.lower().startswith("huginn") else "ouro"
    trained = EVERY if family == "ouro" else NEVER
    answer = np.arange(N) % 2
    blank = np.zeros((loops, N))

    def readings(accuracy):
        return Readings(np.where(rows(accuracy, loops), answer, WRONG), blank, blank, blank, answer)

    return Pair(
        model=model,
        family=family,
        task=task,
        r0=r0,
        trained=trained,
        floor=floor,
        alphabet=(0, 1),
        cluster=np.arange(N) // 4 if cluster is None else cluster,
        d_star=np.ones(N, dtype=int),
        readings={trained: readings(intact), EVERY + NEVER - trained: readings(changed)},
    )


def right(*instances):
    """All right but these."""
    found = np.ones(N, dtype=bool)
    found[list(instances)] = False
    return found


APART = right(0, 8, 20, 40, 60)  # 5 wrong, each in another skeleton: interval above 0, p = 1/16
SCATTERED = right(0)  # 1 wrong: the interval reaches 0


def all_pairs():
    """Two models of two depths, two of the other family, two tasks; huginn loses less."""
    ouro = [pair(f"ouro-{d}, seed {s}", task) for d in (1, 2) for s in (0, 1) for task in ("circuit", "hops")]
    return ouro + [pair(f"huginn-1, seed {s}", task, changed=0.6) for s in (0, 1) for task in ("circuit", "hops")]


PLACED = pd.DataFrame(
    [("ouro-1, seed 0", "ouro", "norm", (2, 4), BOUNDARY), ("huginn-1, seed 0", "huginn", "norm", (1, 1), OUTSIDE)],
    columns=["model", "family", "norm", "calls", "acts"],
)


def equal(pairs, apart=()):
    made = [(p.model, p.task, (p.model, p.task) not in apart) for p in pairs]
    return pd.DataFrame(made, columns=["model", "task", "bitwise"])


def judged(*pairs, apart=(), placement=PLACED, scale="laptop", stand_ins=True):
    return {j.id: j for j in judge(list(pairs), equal(pairs, apart), placement, scale, stand_ins)}


def cells(judgement, ending=" - removed"):
    return [p for p in judgement.points if p["arm"].endswith(ending)]


# ---- all claims


def test_every_claim_is_answered_once_and_in_order():
    pairs = all_pairs()
    found = judge(pairs, equal(pairs), PLACED, "laptop", True)
    assert [j.id for j in found] == SECTION == [id for id in claims.load() if id in SECTION]
    assert len(SECTION) == 12 and set(SECTION) == {*EXACT, *VALUES, *ORDERS}
    for j in found:
        assert j.verdict == ("out_of_reach" if j.id in VALUES else "replicated"), j
        assert j.ours and len(j.ours) <= 120 and j.points and j.n
        assert j.reason.startswith("on stand-ins") and j.reason.count("on stand-ins") == 1
        assert all(p["id"] == j.id and list(p) == claims.POINTS for p in j.points)
    json.dumps(claims.as_result(found), allow_nan=False)
    assert [j.n for j in found if j.id in ORDERS] == [8, 8, 8, 4, 12]


def test_on_released_weights_nothing_says_stand_ins():
    found = judged(pair("Ouro-2.6B"), pair("Huginn-3.5B", changed=0.6), stand_ins=False)
    assert not any("stand-ins" in j.reason for j in found.values())
    assert found["removal_costs_at_budget"].reason.startswith("1 of 1 pairs competent; cells: 1 replicated; Holm p")


def test_no_pair_and_no_model_at_hand():
    found = judged(placement=PLACED.iloc[:0], stand_ins=False)
    assert list(found) == SECTION and {j.verdict for j in found.values()} == {"out_of_reach"}
    assert all(j.reason and j.n == 0 for j in found.values())


def test_a_missing_family():
    ouro, huginn = pair(), pair("huginn-1, seed 0", changed=0.6)
    without, only = judged(ouro), judged(huginn)
    assert without["removal_costs_at_budget"].verdict == "replicated"
    for id in ("damage_in_either_direction", "asymmetry"):
        assert without[id].verdict == "out_of_reach"
        assert without[id].reason == "on stand-ins; no pair of a model trained without the norm at hand"
    assert only["damage_in_either_direction"].verdict == "replicated"
    for id in (*REMOVAL, *VALUES, "asymmetry"):
        assert only[id].verdict == "out_of_reach"
        assert only[id].reason == "on stand-ins; no pair of a model trained with the norm at hand"


@pytest.mark.parametrize(
    ("made", "identity", "match"),
    [
        ([pair()], equal([]), "one row for each pair"),
        ([pair()], equal([pair(), pair("ouro-2, seed 0")]), "one row for each pair"),
        ([pair(), pair()], equal([pair(), pair()]), "one row for each pair"),
        ([pair(r0=8, loops=6)], equal([pair()]), "to K = 8 at least"),
    ],
)
def test_inputs_that_do_not_agree_are_refused(made, identity, match):
    with pytest.raises(ValueError, match=match):
        judge(made, identity, PLACED, "laptop", True)


def test_a_pair_that_contradicts_itself_is_refused():
    one = pair()
    wrong = Pair(**{**vars(one), "family": "huginn"})
    with pytest.raises(ValueError, match="is of family huginn, trained with boundary period 1"):
        judged(wrong)
    for other in ({}, {NEVER: pair(loops=8).readings[NEVER]}):
        lacking = Pair(**{**vars(one), "readings": {EVERY: one.readings[EVERY], **other}})
        with pytest.raises(ValueError, match="both arms read equally far"):
            judged(lacking)
    with pytest.raises(ValueError, match="placement has family retro; known are ouro and huginn"):
        judged(one, placement=PLACED.assign(family="retro"))


# ---- exact claims


def test_identity_counts_its_pairs_and_discards_the_others():
    pairs = all_pairs()
    gone = [("ouro-2, seed 1", "hops"), ("huginn-1, seed 0", "circuit")]
    found = judged(*pairs, apart=gone)
    first = found["identity_at_one_loop"]
    assert (first.verdict, first.n, first.ours) == ("not_replicated", 12, "10 of 12 pairs bitwise equal")
    assert first.reason == "on stand-ins; arms differ: ouro-2, seed 1 on hops and huginn-1, seed 0 on circuit"
    assert sum(p["value"] for p in first.points) == 10 and {p["K"] for p in first.points} == {1}
    for id in (*REMOVAL, *VALUES):
        assert found[id].reason.endswith("; discarded, arms differ at K = 1: ouro-2, seed 1 on hops")
        assert not any(p["arm"].startswith("ouro-2, seed 1") and p["task"] == "hops" for p in found[id].points)
    assert [found[id].n for id in ORDERS] == [7, 7, 7, 3, 10]
    assert found["damage_in_either_direction"].reason.endswith("at K = 1: huginn-1, seed 0 on circuit")
    assert found["asymmetry"].reason.endswith("ouro-2, seed 1 on hops and huginn-1, seed 0 on circuit")
    assert "discarded" not in found["norm_placement_by_call_count"].reason
    assert judged(*pairs)["identity_at_one_loop"].ours == "12 of 12 pairs bitwise equal"


def test_a_family_that_is_discarded_whole_is_not_at_hand():
    found = judged(pair(changed=0.95), pair("huginn-1, seed 0"), apart=[("ouro-1, seed 0", "circuit")])
    for id in (*REMOVAL, "asymmetry"):
        assert found[id].verdict == "out_of_reach"
        assert found[id].reason.endswith("at hand; discarded, arms differ at K = 1: ouro-1, seed 0 on circuit")


def test_a_discarded_pair_does_not_decide():
    bad = pair("ouro-2, seed 0", intact=0.8, changed=0.9)
    assert judged(pair(), bad)["removal_costs_at_budget"].verdict == "not_replicated"
    apart = [("ouro-2, seed 0", "circuit")]
    assert judged(pair(), bad, apart=apart)["removal_costs_at_budget"].verdict == "replicated"


def placed(*rows):
    names = [(f"{family}-{i}", family, "norm", calls, acts) for i, (family, calls, acts) in enumerate(rows)]
    return pd.DataFrame(names, columns=PLACED.columns)


OURO, HUGINN = ("ouro", (2, 4), BOUNDARY), ("huginn", (1, 1), OUTSIDE)


@pytest.mark.parametrize(
    ("rows", "verdict", "said"),
    [
        ([OURO, HUGINN], "replicated", ""),
        ([OURO], "inconclusive", "needs a model trained without the norm"),
        ([HUGINN], "inconclusive", "needs a model trained with the norm"),
        ([OURO, HUGINN, ("ouro", (2, 4), LAYER)], "not_replicated", "ouro-2: norm has 2 to 4 calls inside a looped layer"),
        ([OURO, HUGINN, ("ouro", (2, 2), BOUNDARY)], "not_replicated", "ouro-2: norm has 2 to 2 calls"),
        (
            [OURO, HUGINN, ("huginn", (2, 4), BOUNDARY)],
            "not_replicated",
            "huginn-2: norm has 2 to 4 calls at the loop boundary",
        ),
        ([OURO, HUGINN, ("huginn", (1, 2), OUTSIDE)], "not_replicated", "huginn-2"),
        ([OURO, HUGINN, ("huginn", (0, 0), UNUSED)], "not_replicated", "huginn-2: norm has 0 to 0 calls unused"),
    ],
)
def test_norm_placement(rows, verdict, said):
    found = judged(pair(), placement=placed(*rows))["norm_placement_by_call_count"]
    assert (found.verdict, found.n) == (verdict, len(rows))
    assert said in found.reason and ("huginn-2" in found.reason or "ouro-2" in found.reason) == (len(rows) == 3)
    if verdict == "replicated":
        assert found.ours == "ouro 2 to 4 calls at the loop boundary; huginn 1 to 1 calls outside the loop"
        assert [p["value"] for p in found.points] == [2, 0]


# ---- costs at and beyond the budget


@pytest.mark.parametrize(
    ("intact", "changed", "verdict"),
    [
        (0.9, 0.1, "replicated"),
        (right(), APART, "same_direction"),
        (right(), SCATTERED, "inconclusive"),
        (0.9, 0.9, "inconclusive"),
        (0.7, 0.9, "not_replicated"),
        (0.2, 0.0, "not_competent"),  # below 0.30
        (0.54, 0.0, "not_competent"),  # 0.04 above the floor
    ],
)
def test_the_verdict_of_a_cell(intact, changed, verdict):
    made = [pair(intact=intact, changed=changed)]
    for j, count in ((costs("at", made), 1), (costs("beyond", made, (2, 4, 8)), 3)):
        # in three cells the same p is three times as large
        assert j.verdict == verdict and f"cells: {count} {verdict.replace('_', ' ')}" in j.reason
        shown = cells(j)
        assert [p["K"] for p in shown] == ([4] if count == 1 else [8, 16, 32])
        for p in shown:
            assert (p["task"], p["arm"], p["n"]) == ("circuit", "ouro-1, seed 0: intact - removed", N)
            own, other = rows(intact, 1).mean(), rows(changed, 1).mean()
            assert p["value"] == pytest.approx(own - other)
            assert (p["p_raw"] is None) == (p["p_holm"] is None) == (verdict == "not_competent")
        assert (j.low, j.high) == (shown[0]["low"], shown[0]["high"])
        assert j.n == (verdict != "not_competent")
    assert "0 of 1 pairs competent; failed the gate" in j.reason or j.n


def test_the_interval_is_that_of_a_plain_bootstrap():
    sizes = np.repeat(np.arange(16), [1, 9] * 8)  # unequal skeletons
    own, other = np.random.default_rng(1).random((2, N)) < [[0.9], [0.5]]
    found = judged(pair(intact=own, changed=other, cluster=sizes))["removal_costs_at_budget"]
    gap = own.astype(int) - other
    members = [gap[sizes == c] for c in range(16)]
    rng, draws = np.random.default_rng(0), []
    for _ in range(10_000):
        draws.append(np.concatenate([members[i] for i in rng.integers(16, size=16)]).mean())
    assert (found.low, found.high) == pytest.approx(tuple(np.percentile(draws, [2.5, 97.5])))
    (cell,) = cells(found)
    b, c = (own & ~other).sum(), (other & ~own).sum()
    assert c > 0 and cell["p_raw"] == pytest.approx(min(1, 2 * binom.cdf(min(b, c), b + c, 0.5)))


def test_holm_runs_over_every_competent_cell_of_a_claim():
    def lost(*counts):  # instances lost at K = 4, 8, 16, 32
        return {None: 0.9} | {K: 0.9 - count / N for K, count in zip((4, 8, 16, 32), counts, strict=True)}

    made = [
        pair("ouro-1, seed 0", "circuit", changed=lost(7, 8, 7, 1)),
        pair("ouro-1, seed 0", "hops", changed=lost(9, 0, 20, 6)),
        pair("ouro-2, seed 0", "hops", intact=0.1, changed=0.0),  # fails the gate: not of the family
        pair("huginn-1, seed 0", "circuit", changed=lost(10, 0, 0, 0)),
    ]
    found = judged(*made)
    for id, counts in (("removal_costs_at_budget", [7, 9]), ("removal_costs_beyond_budget", [8, 7, 1, 0, 20, 6])):
        shown = [p for p in cells(found[id]) if p["p_raw"] is not None]
        raw = [min(1, 2 * 0.5**count) for count in counts]
        ranked, adjusted, above = sorted(range(len(raw)), key=raw.__getitem__), [0.0] * len(raw), 0.0
        for rank, i in enumerate(ranked):
            above = adjusted[i] = min(1, max(above, (len(raw) - rank) * raw[i]))
        assert [p["p_raw"] for p in shown] == pytest.approx(raw)
        assert [p["p_holm"] for p in shown] == pytest.approx(adjusted)
        assert len(cells(found[id])) == len(raw) * 3 // 2
        assert f"Holm p < 0.05 in {sum(p < 0.05 for p in adjusted)} of {len(raw)}" in found[id].reason
    (added,) = cells(found["damage_in_either_direction"], " - added")
    assert added["p_holm"] == added["p_raw"] == 0.5**9


def test_holm_can_turn_a_cell_into_a_direction():
    alone = judged(pair(intact=0.9, changed=0.9 - 7 / N))  # p = 1/64
    assert alone["removal_costs_at_budget"].verdict == "replicated"
    four = [pair(f"ouro-1, seed {s}", intact=0.9, changed=0.9 - 7 / N) for s in range(4)]
    assert judged(*four)["removal_costs_at_budget"].verdict == "same_direction"


GRADES = {
    "replicated": (0.9, 0.1),
    "same_direction": (right(), APART),
    "inconclusive": (0.9, 0.9),
    "not_replicated": (0.7, 0.9),
    "not_competent": (0.2, 0.3),
}


@pytest.mark.parametrize("first", GRADES)
@pytest.mark.parametrize("second", GRADES)
def test_a_claim_is_as_good_as_its_worst_competent_cell(first, second):
    made = [pair(f"ouro-1, seed {s}", intact=i, changed=c) for s, (i, c) in enumerate((GRADES[first], GRADES[second]))]
    found = costs("removal_costs_at_budget", made)
    order = ["not_replicated", "inconclusive", "same_direction", "replicated", "not_competent"]
    assert found.verdict == min((first, second), key=order.index) == worst([first, second])
    assert found.ours.startswith(f"worst: ouro-1, seed {int(order.index(second) < order.index(first))}, circuit: ")
    assert found.n == 2 - (first, second).count("not_competent")


def test_ours_and_the_reason_tell_the_worst_cell_and_the_counts():
    made = [
        pair("ouro-1, seed 0", "circuit"),
        pair("ouro-1, seed 1", "circuit", intact=0.9, changed={None: 0.1, 4: 0.85, 16: 0.9}),
        pair("ouro-1, seed 2", "circuit", intact=0.9, changed={None: 0.1, 16: 0.875}),
        pair("ouro-1, seed 3", "circuit", intact=0.5),
        pair("ouro-1, seed 0", "hops", intact=0.2),
        pair("ouro-1, seed 1", "hops", intact=0.2),
    ]
    found = judged(*made)
    budget, beyond = found["removal_costs_at_budget"], found["removal_costs_beyond_budget"]
    assert budget.verdict == "same_direction"
    assert budget.ours.startswith("worst: ouro-1, seed 1, circuit: +0.05 [0.01, 0.1")
    assert budget.ours.endswith("]; 3 of 3 pairs above 0")
    gate = "3 of 6 pairs competent; failed the gate on circuit: ouro-1, seed 3; failed the gate on hops: every pair"
    assert budget.reason == (
        f"on stand-ins; {gate}; cells: 2 replicated, 1 same direction, 3 not competent; Holm p < 0.05 in 2 of 3"
    )
    assert beyond.verdict == "inconclusive"
    assert beyond.ours == "worst: ouro-1, seed 1, circuit, K 16: +0.00 [0.00, 0.00]; 7 of 9 cells above 0"
    assert beyond.reason.startswith(f"on stand-ins; {gate}; cells: 7 replicated, 2 inconclusive, 9 not competent; Holm p")
    assert beyond.reason.endswith("r0 = 4: K = 8, 16, 32") and beyond.n == 3


def test_no_competent_pair_keeps_its_numbers():
    found = judged(pair(intact=0.2, changed=0.1), pair("huginn-1, seed 0", intact=0.2, changed=0.1))
    for id in ORDERS:
        assert (found[id].verdict, found[id].n) == ("not_competent", 0)
        assert found[id].points and "failed the gate on circuit: every pair" in found[id].reason
    assert found["removal_costs_at_budget"].ours.startswith("worst: ouro-1, seed 0, circuit: +0.10 [")
    assert found["removal_costs_at_budget"].ours.endswith("; no pair competent")


def test_loop_counts_beyond_those_read():
    short = pair("ouro-2, seed 0", r0=8, loops=16, changed={None: 0.9, 8: 0.1, 16: 0.1})
    none = pair("ouro-3, seed 0", r0=4, loops=7)
    found = judged(pair(), short, none)["removal_costs_beyond_budget"]
    assert (found.verdict, found.n) == ("replicated", 2)
    assert [(p["arm"][:6], p["K"]) for p in found.points] == [("ouro-1", 8), ("ouro-1", 16), ("ouro-1", 32), ("ouro-2", 16)]
    assert found.reason.endswith(
        "r0 = 4: K = 8, 16, 32; r0 = 8: K = 16, 32, 64; "
        "out of reach: K = 8, 16, 32 of ouro-3, seed 0 on circuit, read up to 7; "
        "not read: K = 32, 64 of ouro-2, seed 0 on circuit, read up to 16"
    )
    alone = judged(none)
    assert alone["removal_costs_at_budget"].verdict == "replicated"
    assert (alone["removal_costs_beyond_budget"].verdict, alone["removal_costs_beyond_budget"].n) == ("out_of_reach", 0)
    assert "out of reach: K = 8, 16, 32 of ouro-3" in alone["removal_costs_beyond_budget"].reason
    # a pair that fails the gate does not stand for one that was not read
    weak = judged(none, pair(intact=0.2))["removal_costs_beyond_budget"]
    assert weak.verdict == "out_of_reach" and len(weak.points) == 3


def test_one_skeleton_has_no_interval():
    found = judged(pair(cluster=np.zeros(N)), pair("huginn-1, seed 0", cluster=np.zeros(N)))
    for id in ORDERS:
        assert found[id].verdict == "inconclusive" and found[id].low is None


# ---- below the floor


@pytest.mark.parametrize(
    ("changed", "verdict"),
    [
        ({None: 0.9, 4: 0.0}, "replicated"),
        ({None: 0.9, 4: 0.3}, "replicated"),
        ({None: 0.0, 4: 0.5}, "inconclusive"),
        ({None: 0.0, 4: 0.75}, "not_replicated"),
    ],
)
def test_removal_reaches_zero(changed, verdict):
    found = removal_reaches_zero("removal_reaches_zero", [pair(changed=changed)])
    assert (found.verdict, found.n) == (verdict, 1)
    (cell,) = cells(found, ": removed")
    assert (cell["K"], cell["value"], cell["p_raw"]) == (4, pytest.approx(changed[4]), None)
    assert [p["value"] for p in cells(found, ": floor")] == [0.5]
    assert found.ours.startswith(f"worst: ouro-1, seed 0, circuit: {changed[4]:.2f} [")
    assert found.ours.endswith(f", floor 0.50; {int(verdict == 'replicated')} of 1 pairs below")


def test_removal_reaches_zero_names_the_pair_farthest_above_its_floor():
    made = [pair("ouro-1, seed 0", changed=0.75)]  # 0.25 above
    made += [pair(f"ouro-1, seed {s}", "hops", changed=c, floor=0.1) for s, c in ((1, 0.45), (2, 0.3))]
    made += [pair("ouro-1, seed 3", changed=0.0), pair("ouro-1, seed 4", intact=0.2, changed=0.9)]
    found = judged(*made)["removal_reaches_zero"]
    assert (found.verdict, found.n) == ("not_replicated", 4)
    assert found.ours.startswith("worst: ouro-1, seed 1, hops: 0.45 [")
    assert found.ours.endswith("floor 0.10; 1 of 4 pairs below")


# ---- the other direction


@pytest.mark.parametrize(
    ("intact", "changed", "verdict"),
    [
        (0.9, 0.7, "replicated"),
        (right(), APART, "replicated"),  # the rule asks for the interval alone
        (right(), SCATTERED, "inconclusive"),
        (0.7, 0.9, "not_replicated"),
        (0.2, 0.1, "not_competent"),
    ],
)
def test_damage_in_either_direction(intact, changed, verdict):
    found = judged(pair("huginn-1, seed 0", intact=intact, changed=changed))["damage_in_either_direction"]
    assert found.verdict == verdict
    (cell,) = cells(found, "huginn-1, seed 0: intact - added")
    assert cell["K"] == 4 and cell["value"] == pytest.approx(rows(intact, 1).mean() - rows(changed, 1).mean())
    assert (cell["p_holm"] is None) == (verdict == "not_competent")


# ---- asymmetry


@pytest.mark.parametrize(
    ("removed", "added", "verdict"), [(0.1, 0.6, "replicated"), (0.6, 0.1, "not_replicated"), (0.5, 0.5, "inconclusive")]
)
def test_asymmetry(removed, added, verdict):
    ouro = [pair(f"ouro-1, seed {s}", changed={None: 0.9, 4: removed}) for s in range(3)]
    huginn = [pair(f"huginn-1, seed {s}", changed={None: 0.9, 2: added}, r0=2) for s in range(4)]  # each at its own r0
    weak = [pair("ouro-1, seed 0", "hops", intact=0.2, changed=0.9)]  # fails the gate: does not count
    found = asymmetry("asymmetry", [*ouro, *weak], huginn)
    assert (found.verdict, found.n) == (verdict, 7)
    head = found.points[0]
    assert head["value"] == pytest.approx(added - removed) and head["n"] == 3
    assert (found.low, found.high) == (head["low"], head["high"])
    assert found.ours.endswith(f"]: {0.9 - removed:.2f} by removal, {0.9 - added:.2f} by addition")
    assert [p["K"] for p in found.points] == [None, 4, 4, 4, 4, 2, 2, 2, 2]
    assert [p["value"] for p in cells(found, " - added")] == pytest.approx([0.9 - added] * 4)
    assert all(p["p_raw"] is None for p in found.points)
    assert "models of the smaller family: n = 3, below 8" in found.reason and "skeletons alone" not in found.reason


def test_asymmetry_weighs_pairs_equally():
    made = [pair("ouro-1, seed 0", task, changed=0.1) for task in ("circuit", "hops", "paragg")]
    found = judged(*made, pair("ouro-2, seed 0", changed=0.5), pair("huginn-1, seed 0", changed=0.8))["asymmetry"]
    assert found.points[0]["value"] == pytest.approx((3 * 0.8 + 0.4) / 4 - 0.1)
    assert "one model trained without the norm: it varies over skeletons alone" in found.reason
    assert "one model trained with the norm" not in found.reason


def test_asymmetry_without_a_competent_family():
    strong, weak = pair("huginn-1, seed 0", changed=0.6), pair(intact=0.2)
    found = judged(strong, weak)["asymmetry"]
    assert found.verdict == "not_competent" and len(found.points) == 2
    assert found.reason.startswith("on stand-ins; no competent pair trained with the norm; 1 of 2 pairs competent")
    none = judged(weak)["asymmetry"]
    assert none.verdict == "out_of_reach" and "trained without the norm" in none.reason


# ---- reported values


def released(**other):
    """The paper's numbers, by model and task."""
    big = {
        "intact": {None: 0.6, 1: 0.530, 4: 0.642, 32: 0.583},
        "changed": {None: 0.0, 1: 0.530, 2: 0.500, 3: 0.058},
    } | other
    answers = {1: 0.16, None: 0.1}
    return [
        pair("Ouro-2.6B", **big),
        pair("Ouro-2.6B", "hops", intact=answers, changed=0.0, floor=0.072),
        pair("Ouro-1.4B", intact=0.6, changed={None: 0.0, 2: 0.09}),
        pair("Huginn-3.5B", intact=0.7, changed=0.6),
    ]


def test_the_papers_numbers_replicate_on_released_weights():
    found = judged(*released(), scale="paper", stand_ins=False)
    for id in ("ouro26_asis", "ouro26_removed", "ouro14_removed", "hops_removed_r8"):
        assert (found[id].verdict, found[id].n) == ("replicated", 1), found[id]
    assert found["ouro26_asis"].ours == "0.525, 0.637, 0.588"  # of 80 instances
    assert [(p["arm"], p["K"]) for p in found["ouro14_removed"].points] == [
        ("Ouro-1.4B: removed", K) for K in (2, 3, 4, 8, 16, 32)
    ]
    assert all(p["low"] <= p["value"] <= p["high"] for p in found["ouro26_removed"].points)
    # the gate does not apply to a value, and is said
    assert "0 of 1 pairs competent; failed the gate on hops: every pair" in found["hops_removed_r8"].reason
    peak = found["hops_asis_peak"]
    assert peak.ours == "0.163, 0.500" and peak.verdict == "not_replicated"  # two answers, each half of the time
    assert peak.reason.startswith("majority_floor: 0.500 against 0.072")
    assert [(p["K"], p["value"], p["low"]) for p in peak.points] == [(1, pytest.approx(13 / N), None), (None, 0.5, None)]


def test_a_peak_and_its_majority_floor_within_tolerance():
    answer = np.concatenate([np.arange(26) % 26, np.arange(26), np.arange(26), [3, 3]])
    hops = released()[1]
    found = {
        period: Readings(np.where(r.prediction == r.answer, answer, WRONG), r.entropy, r.gap, r.norm, answer)
        for period, r in hops.readings.items()
    }
    peak = judged(Pair(**{**vars(hops), "readings": found}), scale="paper", stand_ins=False)["hops_asis_peak"]
    assert peak.verdict == "replicated" and peak.ours == "0.163, 0.062"  # 5 of 80


@pytest.mark.parametrize(("at_4", "verdict"), [(0.6, "replicated"), (0.7, "not_replicated"), (0.5, "not_replicated")])
def test_a_value_outside_its_tolerance_is_named(at_4, verdict):
    found = judged(*released(intact={None: 0.6, 1: 0.53, 4: at_4, 32: 0.583}), scale="paper", stand_ins=False)["ouro26_asis"]
    assert found.verdict == verdict and (verdict == "replicated" or found.reason.startswith(f"K=4: {at_4:.3f} against 0.642"))


def test_released_values_that_were_not_measured():
    pairs = released()
    found = judged(*pairs[2:], scale="paper", stand_ins=False)
    assert (found["ouro26_asis"].verdict, found["ouro26_asis"].reason) == ("out_of_reach", "needs Ouro-2.6B on circuit")
    assert found["hops_removed_r8"].reason == "needs Ouro-2.6B on hops" and found["ouro14_removed"].verdict == "replicated"
    short = judged(pair("Ouro-1.4B", intact=0.6, changed={None: 0, 2: 0.09}, loops=8), scale="paper", stand_ins=False)
    assert short["ouro14_removed"].verdict == "inconclusive"
    assert short["ouro14_removed"].reason.startswith("not measured: K=16, K=32")
    away = judged(*pairs, stand_ins=False)["ouro26_asis"]
    assert away.verdict == "out_of_reach" and away.ours == "0.525, 0.637, 0.588" and "takes scale paper" in away.reason


@pytest.mark.parametrize("scale", ["laptop", "paper"])
def test_stand_ins_show_the_mean_of_their_kind(scale):
    made = [pair(f"ouro-{d}, seed {s}", changed=0.1 * s + 0.05 * d, loops=16) for d in (2, 10) for s in (0, 1)]
    made += [pair("ouro-10, seed 0", "hops", changed=0.3, loops=16), pair("huginn-20, seed 0", loops=16)]
    found = judged(*made, scale=scale)
    for id in VALUES:
        assert found[id].verdict == "out_of_reach"
        assert found[id].reason.startswith("on stand-ins; takes the published weights; ")
    assert found["ouro26_asis"].ours == "0.900, 0.900, -"  # K = 32 is beyond the 16 read
    assert found["ouro26_removed"].ours == "0.550, 0.550, 0.550, 0.550, 0.550, 0.550, -"  # the deepest kind
    assert found["ouro14_removed"].ours == "0.150, 0.150, 0.150, 0.150, 0.150, -"  # the shallowest
    assert "; the mean of 2 pairs of ouro-10; 2 of 2 pairs competent" in found["ouro26_asis"].reason
    assert found["hops_removed_r8"].ours == "0.300" and found["hops_removed_r8"].n == 1
    assert found["hops_asis_peak"].ours == "0.900, 0.500"
    assert len(found["ouro26_removed"].points) == 12
    none = judged(*(p for p in made if p.task == "circuit"))["hops_removed_r8"]
    assert (none.verdict, none.reason) == ("out_of_reach", "on stand-ins; needs ouro-10 on hops")
    assert not math.isnan(found["ouro26_asis"].points[0]["value"])
