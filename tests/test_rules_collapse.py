"""Every verdict of every rule of section 4.2, on made-up pairs and probes."""

import json
from dataclasses import replace

import numpy as np
import pytest

from lib import claims, stats
from lib.evaluation import Readings, summary
from lib.pairs import Pair
from lib.probe import Probe
from lib.rules_collapse import (
    DOSES,
    answer_not_linear,
    dose_is_a_threshold,
    judge,
    mean_cells,
    measures,
    norm_ratios,
    resampled,
    stages,
    state_norm_bounded,
    two_stage_collapse,
)

RULES = {id: claim for id, claim in claims.load().items() if claim["section"] == "4.2"}
VALUES = [id for id, claim in RULES.items() if claim["kind"] == "value"]
ORDERS = [id for id in RULES if id not in VALUES]
OFF, CONSTANT = 90, 77  # tokens that are no answers
# the paper's removed arm, by K: (entropy, logit gap, modal token, modal share)
PATH = {1: (0.786, 2.0, 1, 0.6), 2: (12.470, 0.263, OFF, 0.1), 32: (5.672, 1.247, CONSTANT, 0.83)}
# the paper's doses, accuracy and entropy; beyond the trained loop count, where it gives none, k = 2 is as good as k = 1
PAPER = {1: (0.642, 0.95), 2: ([0.496] * 8 + [0.642] * 24, 3.51), 3: (0.02, 11.0), 4: (0.0, 12.11), 8: (0.0, 12.11)}


def rng(*key):
    return np.random.default_rng([sum(map(ord, str(part))) for part in key])


def clusters(n):
    return np.repeat(np.arange(n // 4), 4)


def noise(rows, n, scale, *key):
    """(rows, n), each row of mean 0, with a part that the instances of a skeleton share."""
    made = rng("noise", *key).normal(0, 1, (rows, n)) + rng("shared", *key).normal(0, 1, (rows, n // 4)).repeat(4, axis=1)
    return scale * (made - made.mean(axis=1, keepdims=True))


def says(token, share, n, *key):
    """n predictions, the share of them one token and every other a token of its own."""
    order = rng("says", *key).permutation(n)
    return np.where(order < round(share * n), token, 100 + order)


def filled(path, loops):
    """Values for K = 1..loops from those at some K: each holds until the next; numbers run linearly between."""
    at = sorted(path)
    columns = [np.interp(range(1, loops + 1), at, [path[K][i] for K in at]) for i in (0, 1, 3)]
    tokens = [path[max(K for K in at if K <= k)][2] for k in range(1, loops + 1)]
    return columns[0], columns[1], tokens, columns[2]


def removed(path=PATH, loops=32, norms=(1.0, 1.9), n=80, scale=0.05, key=0):
    """The removed arm's readings: a path of entropy, gap and modal token, and a norm that runs between two values."""
    entropy, gap, tokens, shares = filled(path, loops)
    prediction = np.stack([says(t, s, n, key, k) for k, (t, s) in enumerate(zip(tokens, shares, strict=True))])
    norm = np.linspace(*norms, loops)[:, None] * (1 + noise(1, n, 0.05, "norm", key))
    rows = [entropy[:, None] + noise(loops, n, scale, "entropy", key), gap[:, None] + noise(loops, n, scale, "gap", key)]
    return Readings(prediction, *rows, norm, np.tile([0, 1], n // 2))


def arm(accuracy, entropy=1.0, loops=32, n=80, key=0):
    """Readings of a given accuracy, one for all K or by K: the right ones are answers, the others are none."""
    accuracy, answer = np.broadcast_to(accuracy, 32)[:loops], np.tile([0, 1], n // 2)
    order = rng("arm", key).permutation(n)
    prediction = np.stack([np.where(order < round(a * n), answer, OFF) for a in accuracy])
    flat = np.full((loops, n), float(entropy))
    return Readings(prediction, flat, flat, flat, answer)


def pair(model="ouro-2, seed 0", task="circuit", doses=None, periods=DOSES, loops=32, n=80, r0=4, **how):
    """An ouro pair; doses are {period: (accuracy, entropy)}, the intact one among them."""
    doses = {k: v for k, v in (PAPER | (doses or {})).items() if k in periods}
    readings = {k: arm(a, e, loops, n, model + task) for k, (a, e) in doses.items()}
    readings |= {0: removed(loops=loops, n=n, key=model + task, **how)} if 0 in periods else {}
    return Pair(model, "ouro", task, r0, 1, 0.5, (0, 1), clusters(n), np.ones(n), readings)


def weak(*args, **keys):
    """A pair that fails the gate."""
    return pair(*args, doses={1: (0.52, 1.0)}, **keys)


def huginn(norms=(1.0, 1.1), periods=(0, 1)):
    readings = {k: removed(norms=norms) if k else arm(0.9) for k in periods}
    return Pair("huginn, seed 0", "huginn", "circuit", 4, 0, 0.5, (0, 1), clusters(80), np.ones(80), readings)


def probe(accuracy=0.556, floor=0.519, model="ouro-2, seed 0", task="circuit", K=4, n=80):
    order = rng("probe", model, task).permutation(n)
    return Probe(model, task, K, order < round(accuracy * n), order < round(floor * n), clusters(n))


def judged(pairs=None, probes=None, scale="laptop", stand_ins=True):
    pairs, probes = [pair()] if pairs is None else pairs, [probe(0.5, 0.5)] if probes is None else probes
    return {j.id: j for j in judge(pairs, probes, scale, stand_ins)}


def cell(judgement, name, K):
    (found,) = [p for p in judgement.points if p["arm"].endswith(name) and p["K"] == K]
    return found


def seeds(*made):
    """The pairs made, each of another seed."""
    return [replace(one, model=f"ouro-2, seed {i}") for i, one in enumerate(made)]


# ---- the whole


@pytest.fixture(scope="module")
def released():
    made = [pair("Ouro-2.6B", n=1000), pair("Ouro-1.4B", n=1000), weak("Ouro-2.6B", "hops", n=1000), huginn()]
    probes = [probe(0.556, 0.519, "Ouro-2.6B", n=1000), probe(0.53, 0.519, "Ouro-1.4B", n=1000)]
    return judged(made, probes, scale="paper", stand_ins=False)


def test_the_papers_numbers_replicate_every_claim(released):
    assert list(released) == list(RULES) and len(VALUES) == 5 and len(ORDERS) == 4
    for id, j in released.items():
        if id != "answer_not_linear":
            assert j.verdict == "replicated", j
        assert j.n == (2 if id in ORDERS else 1) and j.ours and len(j.ours) < 90
        assert {p["id"] for p in j.points} == {id} and all(list(p) == claims.POINTS for p in j.points)
        places = [(p["task"], p["arm"], p["K"]) for p in j.points]
        assert len(set(places)) == len(places)
        assert "stand-ins" not in j.reason
    json.dumps(claims.as_result(released.values()), allow_nan=False)
    assert released["entropy_path"].ours == "0.786, 12.47, 5.672"
    assert released["logit_gap_path"].ours == "0.263, 1.247"
    assert released["modal_share_r32"].ours == "0.830"
    assert released["linear_probe_at_chance"].ours == "0.556, 0.519"
    assert released["dose_values"].ours == "(0.642, 0.950), (0.496, 3.510), (0.000, 12.11)"
    assert released["state_norm_bounded"].ours.startswith("ratio at most 1.90 [1.90, 1.90] at K = 32")
    assert released["two_stage_collapse"].ours == "entropy 0.8 bits at 1, 12.5 at K* = 2, 5.7 at the last K"
    assert released["dose_is_a_threshold"].ours == "whole fall 0.64, largest step 0.97 of it"
    # an interval of 1000 instances reaches 0.05 in one of the two pairs
    assert released["answer_not_linear"].verdict == "inconclusive"
    assert "pairs: 1 replicated, 1 inconclusive" in released["answer_not_linear"].reason


def test_the_gate_is_told(released):
    for id in ORDERS:
        assert released[id].reason.startswith("2 of 3 pairs competent, all but Ouro-2.6B on hops; "), released[id]
    assert released["entropy_path"].reason == "Ouro-2.6B on circuit: 1 of 1 pairs competent"
    assert released["state_norm_bounded"].reason.endswith(
        "cells: 12 replicated; removed accuracy at the last K 0.00; "
        "Huginn-like states are bounded by their block's own output norm: ratio at most 1.10 [1.10, 1.10]"
    )


def test_stand_ins_say_so_once_and_speak_no_numbers_of_the_papers():
    for scale in ("laptop", "paper"):
        for id, j in judged(scale=scale).items():
            assert j.reason.startswith("on stand-ins; ") and j.reason.count("stand-ins") == 1
            assert j.verdict == ("out_of_reach" if id in VALUES else "replicated"), j
            assert id not in VALUES or j.ours and j.points and f"judged as {RULES[id]['see']}" in j.reason
    found = judged([pair("Ouro-2.6B")], scale="laptop", stand_ins=False)
    assert "takes scale paper" in found["entropy_path"].reason and found["entropy_path"].verdict == "out_of_reach"
    assert found["two_stage_collapse"].verdict == "replicated"


def test_without_a_pair_trained_with_the_norm():
    for pairs in ([], [huginn()]):
        found = judged(pairs, stand_ins=False)
        assert list(found) == list(RULES) and {j.verdict for j in found.values()} == {"out_of_reach"}
        assert {j.reason for j in found.values()} == {"no pair of a model trained with the norm at hand"}
        assert {j.reason for j in judged(pairs).values()} == {"on stand-ins; no pair of a model trained with the norm at hand"}


def test_no_competent_pair():
    found = judged([weak(), weak("ouro-1, seed 0")], [probe()])
    for id in ORDERS:
        assert found[id].verdict == "not_competent" and found[id].n == 0 and found[id].points and found[id].ours, found[id]
        assert "0 of 2 pairs competent" in found[id].reason
    assert found["entropy_path"].verdict == "out_of_reach" and found["entropy_path"].n == 0
    assert judged([weak()], [])["answer_not_linear"].verdict == "not_competent"
    # the shape of a pair that is not competent decides nothing, and its cells are kept
    bad = replace(weak(norms=(1, 9)), model="ouro-2, seed 1")
    one = judged([pair(), bad])["state_norm_bounded"]
    assert one.verdict == "replicated" and one.ours.startswith("ratio at most 1.90") and one.n == 1
    assert max(p["value"] for p in one.points) == pytest.approx(9)


# ---- intervals


def test_resampled_is_the_cluster_bootstrap_row_by_row():
    values, cluster = rng(1).normal(size=(3, 50)), rng(2).integers(0, 12, 50)  # clusters of unequal sizes, not in order
    means, draws = resampled(values, cluster)
    for row, mean, drawn in zip(values, means, draws, strict=True):
        expected = stats.cluster_bootstrap(row, cluster)
        assert (mean, *np.percentile(drawn, [2.5, 97.5])) == pytest.approx(expected[:3], abs=1e-12)
    joint = stats.cluster_bootstrap(values[0] - values[1], cluster)
    assert np.percentile(draws[0] - draws[1], [2.5, 97.5]) == pytest.approx(joint[1:3], abs=1e-12)


def test_resampled_refuses_and_abstains():
    with pytest.raises(ValueError, match="values are of 4 instances, cluster of 3"):
        resampled(np.ones((2, 4)), np.arange(3))
    with pytest.raises(ValueError, match="above 0"):
        resampled(np.ones((2, 0)), np.arange(0))
    means, draws = resampled(np.ones((2, 4)), np.zeros(4))
    assert means.tolist() == [1, 1] and draws.shape == (2, 10_000) and np.isnan(draws).all()
    alone = replace(pair(), cluster=np.zeros(80))
    found = {j.id: j for j in judge([alone], [replace(probe(0.5, 0.5), cluster=np.zeros(80))], "laptop", True)}
    for id in ("state_norm_bounded", "two_stage_collapse", "answer_not_linear"):
        assert found[id].verdict == "inconclusive" and found[id].low is None, found[id]
    json.dumps(claims.as_result(found.values()), allow_nan=False)


def brute(cluster, statistic, resamples=4000):
    """Percentiles of a statistic of instance indices, clusters drawn one draw at a time."""
    members, draw = [np.flatnonzero(cluster == c) for c in np.unique(cluster)], np.random.default_rng(5)
    drawn = [np.concatenate([members[c] for c in draw.integers(len(members), size=len(members))]) for _ in range(resamples)]
    return np.percentile([statistic(rows) for rows in drawn], [2.5, 97.5])


def test_intervals_against_a_plain_bootstrap():
    one = pair(scale=1.0)
    found = one.readings[0]
    norm = found.norm * (1 + noise(32, 80, 0.1, "wide"))
    one = replace(one, readings=one.readings | {0: replace(found, norm=norm)})
    ratio = norm_ratios("x", one)[-1]
    low, high = brute(one.cluster, lambda rows: norm[31, rows].mean() / norm[0, rows].mean())
    assert ratio["value"] == pytest.approx(norm[31].mean() / norm[0].mean())
    assert (ratio["low"], ratio["high"]) == pytest.approx((low, high), abs=0.005) and high - low > 0.05
    rise, fall, wider, firmer, share, *curve = stages("x", one)[2]
    last, peak = 31, rise["K"] - 1
    for cell_, x, y in ((rise, found.entropy[peak], found.entropy[0]), (fall, found.entropy[peak], found.entropy[last])):
        expected = stats.cluster_bootstrap(x - y, one.cluster)
        assert (cell_["value"], cell_["low"], cell_["high"]) == pytest.approx(expected[:3], abs=1e-9)
    expected = stats.cluster_bootstrap(found.gap[last] - found.gap[peak], one.cluster)
    assert (wider["low"], wider["high"]) == pytest.approx(expected[1:3], abs=1e-9)
    says_last, says_peak = (found.prediction[k] == summary(found, (0, 1))["modal_token"][k] for k in (last, peak))
    expected = stats.cluster_bootstrap(says_last.astype(int) - says_peak, one.cluster)
    assert (firmer["value"], firmer["low"], firmer["high"]) == pytest.approx(expected[:3], abs=1e-9)
    assert share["value"] == pytest.approx(summary(found, (0, 1))["in_alphabet_share"][last])
    assert [c["K"] for c in curve] == list(range(1, 33))
    assert [c["value"] for c in curve] == pytest.approx(found.entropy.mean(axis=1))


def test_measures_are_those_of_the_summary():
    one = pair()
    for period in DOSES:
        mine, table = measures(one, period), summary(one.readings[period], one.alphabet)
        columns = {"accuracy": "accuracy", "readout_entropy_bits": "entropy_bits", "modal_share": "modal_share"}
        for metric, column in (columns | {"top1_minus_top2_logit": "logit_gap"}).items():
            assert mine[metric].mean(axis=1) == pytest.approx(table[column])
    tie = Readings(np.array([[7, 7, 3, 3]]), *[np.ones((1, 4))] * 3, np.zeros(4))
    tied = measures(replace(one, readings={0: tie}), 0)["modal_share"]
    assert tied.tolist() == [[0, 0, 1, 1]] and summary(tie, ())["modal_token"][0] == 3


def test_mean_cells_beyond_the_readings_are_none():
    one = pair(loops=4, periods=(0, 1))
    first, none = mean_cells("x", one, 1, "accuracy", [4, 8])
    assert first["K"] == 4 and first["arm"] == "ouro-2, seed 0, every step: accuracy" and first["n"] == 80 and none is None
    assert mean_cells("x", one, 2, "accuracy", [1, 2]) == [None, None]
    assert mean_cells("x", one, 0, "modal_share", [1])[0]["arm"] == "ouro-2, seed 0, removed: modal share"


# ---- state_norm_bounded


@pytest.mark.parametrize(
    ("last", "spread", "verdict"),
    [
        (1.9, 0.0, "replicated"),
        (0.5, 0.0, "replicated"),  # a shrinking norm is bounded
        (2.2, 0.0, "not_replicated"),
        (2.021, 0.0, "inconclusive"),  # at the bound itself
        (2.0, 0.2, "inconclusive"),
        (2.05, 0.2, "inconclusive"),
        (np.inf, 0.0, "not_replicated"),
        (np.nan, 0.0, "not_replicated"),
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_state_norm_bounded(last, spread, verdict):
    one = pair()
    norm = np.ones((32, 80))
    norm[31] = last * (1 + noise(1, 80, spread, "last")[0])
    one = replace(one, readings=one.readings | {0: replace(one.readings[0], norm=norm)})
    found = state_norm_bounded(RULES["state_norm_bounded"], [one], [])
    assert found.verdict == verdict, found
    assert [p["K"] for p in found.points] == [1, 2, 4, 8, 16, 32]
    assert {p["arm"] for p in found.points} == {"ouro-2, seed 0, removed: norm ratio"}
    top = cell(found, "norm ratio", 32 if not last < 1 else 1)
    assert (found.low, found.high) == (top["low"], top["high"])
    assert ("infinite" in found.ours) == (not np.isfinite(last)) and "Huginn" not in found.reason
    json.dumps(claims.as_result([found]), allow_nan=False)


def test_every_cell_of_every_competent_pair_counts():
    made = seeds(pair(), pair(norms=(1, 4), loops=16), pair(norms=(1, 1.2)))
    found = state_norm_bounded(RULES["state_norm_bounded"], made, [huginn(), huginn(periods=(0,))])
    assert found.verdict == "not_replicated" and found.n == 3
    # of 16 loops, the norm passes the bound at K = 8 and 16
    assert "cells: 15 replicated, 2 not replicated" in found.reason and found.ours.endswith("at K = 16")
    added = [p for p in found.points if p["arm"] == "huginn, seed 0, added: norm ratio"]
    assert len(found.points) == 6 + 5 + 6 + 6 and len(added) == 6
    assert "output norm: ratio at most 1.10 [1.10, 1.10]" in found.reason
    # what is added to huginn's pairs decides nothing
    assert judged([pair(), huginn((1, 50))])["state_norm_bounded"].verdict == "replicated"


# ---- two_stage_collapse


def path(**changes):
    """The paper's path with other endings: K -> the four numbers."""
    return PATH | {int(K[1:]): values for K, values in changes.items()}


@pytest.mark.parametrize(
    ("of", "held", "verdict"),
    [
        (PATH, "abc", "replicated"),
        (path(k32=(5.672, 1.247, 1, 0.83)), "ab", "same_direction"),  # commits to an answer
        (path(k32=(5.672, 1.247, 1, 0.3)), "ab", "same_direction"),  # an answer's token, and few of them
        (path(k32=(15.0, 1.247, CONSTANT, 0.83)), "c", "not_replicated"),  # entropy rises to the end
        (path(k2=(0.5, 0.263, OFF, 0.1), k32=(0.4, 1.2, CONSTANT, 0.8)), "c", "not_replicated"),  # falls from the start
        (path(k32=(5.672, 0.1, CONSTANT, 0.83)), "ac", "not_replicated"),  # the gap narrows
        (path(k2=(12.47, 0.263, OFF, 0.9), k32=(5.672, 1.247, CONSTANT, 0.6)), "ac", "not_replicated"),  # the modal share falls
        (path(k2=(12.47, 1.247, OFF, 0.1)), "ac", "inconclusive"),  # the gap neither grows nor narrows
        (path(k2=(12.47, 1.247, OFF, 0.1), k32=(5.672, 1.247, 1, 0.83)), "a", "not_replicated"),  # and never leaves the format
        (path(k2=(12.47, 1.247, OFF, 0.1), k32=(5.672, 1.247, 1, 0.52)), "a", "inconclusive"),  # around half
    ],
)
def test_two_stage_collapse(of, held, verdict):
    one = pair(path=of, n=160)
    got, parts, cells = stages("x", one)
    assert (got, "".join(name for name, part in zip("abc", parts, strict=True) if part)) == (verdict, held), cells[:5]
    found = two_stage_collapse(RULES["two_stage_collapse"], [one])
    assert found.verdict == verdict and len(found.points) == 5 + 32 and found.n == 1
    told = ", ".join(f"({part}) held for {int(part in held)}" for part in "abc")
    assert f"; {told} of 1 pairs" in found.reason and "K_max" not in found.reason


def test_a_modal_token_outside_among_mostly_answers():
    """The largest group says one token that is no answer, and more than half spread over the answers."""
    for gap, verdict in ((0.263, "same_direction"), (1.247, "inconclusive")):
        one = pair(path=path(k2=(12.47, gap, OFF, 0.1)), n=160)
        prediction = one.readings[0].prediction.copy()
        prediction[31] = rng("mixed").permutation(np.repeat([CONSTANT, 0, 1], [58, 51, 51]))
        one = replace(one, readings=one.readings | {0: replace(one.readings[0], prediction=prediction)})
        got, held, cells = stages("x", one)
        assert got == verdict and held == [True, verdict == "same_direction", False]
        assert cells[4]["arm"].endswith("in-alphabet share") and cells[4]["low"] > 0.5


def test_a_peak_must_stand_clear_of_both_ends():
    for of in (path(k2=(5.70, 0.263, OFF, 0.1)), path(k1=(12.45, 2.0, 1, 0.6))):
        got, parts, _ = stages("x", pair(path=of, scale=3.0))
        assert got == "inconclusive" and not parts[0]
    # an end that is clear of some K between, and not of all, excludes no peak
    got, parts, cells = stages(
        "x", pair(path={1: PATH[1], 2: PATH[2], 3: (5, 0.3, OFF, 0.1), 32: (12.5, 1.2, CONSTANT, 0.8)}, scale=3.0)
    )
    assert cells[0]["K"] == 32 and got == "inconclusive"


def test_entropy_that_is_not_a_number_is_inconclusive():
    one = pair()
    entropy = one.readings[0].entropy.copy()
    entropy[20] = np.nan
    one = replace(one, readings=one.readings | {0: replace(one.readings[0], entropy=entropy)})
    found = two_stage_collapse(RULES["two_stage_collapse"], [one])
    assert found.verdict == "inconclusive" and cell(found, "removed: entropy", 21)["value"] is None


@pytest.mark.parametrize(
    ("loops", "verdict"), [(16, "replicated"), (3, "replicated"), (2, "inconclusive"), (1, "inconclusive")]
)
def test_fewer_loops_than_32(loops, verdict):
    of = {K: PATH[K] for K in (1, 2) if K < loops} | {loops: PATH[32]}
    found = two_stage_collapse(RULES["two_stage_collapse"], [pair(path=of, loops=loops)])
    assert found.verdict == verdict, found
    assert found.reason.endswith(f"; K_max = {loops} stands for the rule's 32")


def test_more_loops_than_32_are_not_read():
    one = pair(path=PATH | {33: (20.0, 0.0, 1, 1.0)}, loops=40, periods=(0,))
    found = stages("x", replace(one, trained=0))
    assert found[0] == "replicated" and len(found[2]) == 5 + 32 and found[2][2]["K"] == 32


def test_the_worst_pair_decides():
    rules, claim = {"same_direction": path(k32=(5.672, 1.247, 1, 0.83))}, RULES["two_stage_collapse"]
    rules |= {"inconclusive": path(k2=(12.47, 1.247, OFF, 0.1)), "not_replicated": path(k32=(15.0, 1.2, CONSTANT, 0.83))}
    made = [pair()]
    for verdict, of in rules.items():
        made = seeds(*made, pair(path=of, n=160))
        assert two_stage_collapse(claim, made).verdict == verdict
    found = two_stage_collapse(claim, made)
    assert "pairs: 1 replicated, 1 same direction, 1 not replicated, 1 inconclusive" in found.reason
    assert "(a) held for 3, (b) held for 2, (c) held for 3 of 4 pairs" in found.reason and found.n == 4
    assert found.ours == "entropy 0.8 bits at 1, 12.5 to 15.0 at K* = 2 to 32, 5.7 to 15.0 at the last K"


# ---- answer_not_linear


@pytest.mark.parametrize(
    ("accuracy", "floor", "n", "verdict"),
    [
        (0.50, 0.50, 80, "replicated"),
        (0.40, 0.50, 80, "replicated"),
        (0.80, 0.50, 80, "not_replicated"),
        (0.55, 0.50, 80, "inconclusive"),
    ],
)
def test_answer_not_linear(accuracy, floor, n, verdict):
    found = answer_not_linear(RULES["answer_not_linear"], [pair()], [probe(accuracy, floor, n=n)])
    assert found.verdict == verdict, found
    excess, *both = found.points
    one = probe(accuracy, floor, n=n)
    expected = stats.cluster_bootstrap(one.right.astype(int) - one.floor_right, one.cluster)
    assert (excess["value"], excess["low"], excess["high"], excess["n"]) == pytest.approx(tuple(expected))
    assert (found.low, found.high) == (excess["low"], excess["high"])
    assert [p["value"] for p in both] == pytest.approx([accuracy, floor]) and {p["K"] for p in found.points} == {4}


def test_probes_match_the_pair():
    claim, here = RULES["answer_not_linear"], pair()
    for other in ({"model": "ouro-1, seed 0"}, {"task": "hops"}, {"K": 8}):
        found = answer_not_linear(claim, [here], [probe(**other)])
        assert (found.verdict, found.n, found.ours, found.points) == ("out_of_reach", 0, "", [])
        assert found.reason == (
            "1 of 1 pairs competent; pairs: 1 out of reach; out of reach without a probe of the removed arm at K = r0"
        )
    # one pair's probe is missing, the worst of the others decides, and a pair that fails the gate has no say
    made = [*seeds(here, here, here), weak("ouro-9")]
    probes = [probe(0.5, 0.5, "ouro-2, seed 0"), probe(0.55, 0.5, "ouro-2, seed 2"), probe(0.9, 0.5, "ouro-9")]
    found = answer_not_linear(claim, made, probes)
    assert found.verdict == "inconclusive" and found.n == 2 and "1 replicated, 1 inconclusive, 1 out of reach" in found.reason
    assert found.ours.startswith("probe - floor at most 0.05 [") and len(found.points) == 9
    found = answer_not_linear(claim, made[-1:], probes)
    assert found.verdict == "not_competent" and found.reason == "0 of 1 pairs competent" and found.ours


# ---- dose_is_a_threshold


def dosed(*accuracies, never=0.0, **keys):
    """A pair with these accuracies at k = 1, 2, 3, 4, 8, and never."""
    one = pair(doses={k: (a, 1.0) for k, a in zip(DOSES, accuracies, strict=False)}, n=400, **keys)
    gone = arm(never, n=400, loops=one.loops, key=one.model + one.task)
    return replace(one, readings=one.readings | {0: replace(one.readings[0], prediction=gone.prediction)})


@pytest.mark.parametrize(
    ("accuracies", "never", "verdict", "told"),
    [
        ((0.7, 0.7, 0.1, 0.1, 0.1), 0.1, "replicated", "whole fall 0.60, largest step 1.00 of it"),
        ((0.7, 0.62, 0.14, 0.12, 0.10), 0.1, "replicated", "whole fall 0.60, largest step 0.80 of it"),  # exactly
        ((0.7, 0.61, 0.14, 0.12, 0.10), 0.1, "not_replicated", "whole fall 0.60, largest step 0.78 of it"),
        ((0.7, 0.58, 0.46, 0.34, 0.22), 0.1, "not_replicated", "whole fall 0.60, largest step 0.20 of it"),  # a gradient
        ((0.7, 0.7, 0.7, 0.7, 0.7), 0.1, "replicated", "whole fall 0.60, largest step 1.00 of it"),  # from 8 to never
        ((0.7, 0.9, 0.0, 0.1, 0.1), 0.1, "replicated", "whole fall 0.60, largest step 1.50 of it"),
        ((0.7, 0.1, 0.1, 0.1, 0.1), 0.65, "replicated", "whole fall 0.05, largest step 12.00 of it"),  # 0.05 is enough
        ((0.7, 0.7, 0.66, 0.66, 0.66), 0.66, "inconclusive", "whole fall 0.04"),
        ((0.7, 0.7, 0.7, 0.7, 0.7), 0.9, "inconclusive", "whole fall -0.20"),
    ],
)
def test_dose_is_a_threshold(accuracies, never, verdict, told):
    found = dose_is_a_threshold(RULES["dose_is_a_threshold"], [dosed(*accuracies, never=never)])
    assert (found.verdict, found.ours, found.n) == (verdict, told, 1), found
    assert ("largest step from k = " in found.reason) == (verdict != "inconclusive")
    assert found.reason.endswith("k = 4, 8 and never are the same arm at K = 4; k = 8 and never are the same arm at K = 8")


def test_the_doses_cells():
    one = dosed(0.7, 0.6, 0.5, 0.4, 0.3, never=0.1)
    found = dose_is_a_threshold(RULES["dose_is_a_threshold"], [one])
    arms = ["every step", "every 2 steps", "every 3 steps", "every 4 steps", "every 8 steps", "removed"]
    assert [(p["arm"], p["K"]) for p in found.points] == [
        (f"ouro-2, seed 0, {arm}: accuracy", K) for arm in arms for K in (4, 8, 16)
    ]
    assert [p["value"] for p in found.points if p["K"] == 16] == pytest.approx([0.7, 0.6, 0.5, 0.4, 0.3, 0.1])
    expected = stats.cluster_bootstrap(one.right(2)[15], one.cluster)
    assert cell(found, "every 2 steps: accuracy", 16)["low"] == pytest.approx(expected.low)
    assert "largest step from k = 8 to never in 1" in found.reason


def test_the_fall_is_read_at_four_times_r0():
    late = [0.7] * 7 + [0.1] * 25
    flat = [0.7] * 32
    for r0, verdict in ((1, "inconclusive"), (2, "replicated"), (8, "replicated")):
        one = dosed(flat, flat, late, late, late, never=late, r0=r0)
        found = dose_is_a_threshold(RULES["dose_is_a_threshold"], [one])
        assert found.verdict == verdict and {p["K"] for p in found.points} == {r0, 2 * r0, 4 * r0}
    assert found.reason.endswith("largest step from k = 2 to 3 in 1; k = 8 and never are the same arm at K = 8")
    same = dose_is_a_threshold(RULES["dose_is_a_threshold"], [dosed(0.7, 0.7, r0=1)]).reason
    assert "k = 1, 2, 3, 4, 8 and never are the same arm at K = 1; k = 2, 3, 4, 8 and never are the same arm at K = 2" in same


@pytest.mark.parametrize(("keys", "n_cells"), [({"periods": (0, 1, 2, 4, 8)}, 15), ({"loops": 15}, 12), ({"r0": 16}, 12)])
def test_doses_that_were_not_read(keys, n_cells):
    short, claim = pair(**keys), RULES["dose_is_a_threshold"]
    found = dose_is_a_threshold(claim, [short])
    assert (found.verdict, found.n, found.ours) == ("out_of_reach", 0, "") and len(found.points) == n_cells
    assert "pairs: 1 out of reach" in found.reason
    assert "out of reach without k = 1, 2, 3, 4, 8 and never at K = 4 r0" in found.reason
    found = dose_is_a_threshold(claim, seeds(short, dosed(0.7, 0.58, 0.46, 0.34, 0.22), dosed(0.7, 0.7)))
    assert found.verdict == "not_replicated" and found.n == 2
    assert "pairs: 1 replicated, 1 not replicated, 1 out of reach" in found.reason
    assert found.ours == "whole fall 0.70, largest step 0.31 to 0.97 of it"
    weakly = dose_is_a_threshold(claim, [weak(**keys)])
    assert weakly.verdict == "not_competent" and "out of reach" not in weakly.reason


# ---- the reported values


@pytest.mark.parametrize(
    ("id", "keys", "why"),
    [
        ("entropy_path", {"path": path(k32=(9.0, 1.247, CONSTANT, 0.83))}, "K=32: 9.000 against 5.672"),
        ("logit_gap_path", {"path": path(k2=(12.47, 0.5, OFF, 0.1))}, "K=inferred: 2: 0.500 against 0.263"),
        ("modal_share_r32", {"path": path(k32=(5.672, 1.247, CONSTANT, 0.6))}, "value: 0.600 against 0.830"),
        ("dose_values", {"doses": {4: (0.2, 12.11)}}, "every=4 or sparser accuracy: 0.200 against 0.000"),
        ("dose_values", {"doses": {2: (0.496, 9.0)}}, "every=2 readout_entropy_bits: 9.000 against 3.510"),
    ],
)
def test_values_off_the_papers_are_named(id, keys, why):
    found = judged([pair("Ouro-2.6B", **keys)], scale="paper", stand_ins=False)[id]
    assert found.verdict == "not_replicated" and found.reason.startswith(why), found


def test_values_that_were_not_read():
    short = pair("Ouro-2.6B", loops=16, periods=(0, 1))
    found = judged([short], [], scale="paper", stand_ins=False)
    for id in VALUES:
        assert found[id].reason.endswith("not every number was read"), found[id]
    assert found["modal_share_r32"].verdict == "inconclusive" and found["modal_share_r32"].ours == "-"
    assert found["linear_probe_at_chance"].verdict == "inconclusive" and found["linear_probe_at_chance"].ours == "-, -"
    assert found["dose_values"].ours.startswith("(0.637, 0.950), (-, -), (0.000, ")  # never, where 4 was not read
    assert [p["arm"] for p in found["dose_values"].points][-1] == "Ouro-2.6B, removed: readout entropy bits"
    sparser = judged([pair("Ouro-2.6B", periods=(0, 1, 2, 8))], scale="paper", stand_ins=False)["dose_values"]
    assert sparser.points[-1]["arm"] == "Ouro-2.6B, every 8 steps: readout entropy bits"


def test_values_are_the_models_own():
    others = [pair("Ouro-1.4B"), pair("Ouro-2.6B", "hops")]
    found = judged(others, scale="paper", stand_ins=False)
    assert {found[id].reason for id in VALUES} == {"needs Ouro-2.6B on circuit"}
    assert {found[id].verdict for id in VALUES} == {"out_of_reach"}
    both = [pair("Ouro-1.4B", path=path(k32=(9.0, 3.0, 1, 0.2))), pair("Ouro-2.6B")]
    assert judged(both, scale="paper", stand_ins=False)["entropy_path"].verdict == "replicated"
    # the gate does not apply to a reported number
    unfit = judged([weak("Ouro-2.6B")], scale="paper", stand_ins=False)["entropy_path"]
    assert unfit.verdict == "replicated" and unfit.n == 0 and unfit.reason.endswith("0 of 1 pairs competent")


def test_the_deepest_stand_ins_speak():
    deep = [pair("ouro-10, seed 0"), weak("ouro-10, seed 1", path=path(k32=(7.672, 1.247, CONSTANT, 0.43)))]
    made = [pair("ouro-2, seed 0", path=path(k32=(2.0, 9.0, OFF, 0.1))), *deep, pair("ouro-30, seed 0", "hops")]
    found = judged(made, [probe(0.5, 0.4, deep[0].model), probe(0.7, 0.6, deep[1].model)])
    assert found["entropy_path"].ours == "0.786, 12.47, 6.672"  # the mean of the two
    assert found["linear_probe_at_chance"].ours == "0.600, 0.500"
    for id in VALUES:
        assert found[id].n == 1 and found[id].reason.endswith("ouro-10 on circuit: 1 of 2 pairs competent")
    assert {p["arm"].split(", removed")[0] for p in found["entropy_path"].points} == {d.model for d in deep}
    none = judged([pair("ouro-2, seed 0", "hops")])["entropy_path"]
    assert none.verdict == "out_of_reach" and none.reason == "on stand-ins; needs a pair on circuit"


def test_judging_twice_is_the_same():
    assert judged() == judged()
