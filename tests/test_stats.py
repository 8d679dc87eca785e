"""The statistics against their definitions, worked examples and known theory."""

import itertools
import math
import random
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from lib.stats import (
    bootstrap_difference,
    bootstrap_mean,
    bootstrap_ratio,
    cliffs_delta,
    cluster_bootstrap,
    holm,
    mann_whitney,
    mcnemar,
    nested_bootstrap,
)

NAN = float("nan")
# few levels, so that ties abound; NaN is one of them
values = st.sampled_from([NAN, 0.0, 0.25, 0.5, 1.0])
groups = st.lists(values, min_size=1, max_size=12)


def score(a, b):
    """1 when a ranks above b, 1/2 when they tie; NaN below every number."""
    a, b = (-math.inf if math.isnan(v) else v for v in (a, b))
    return Fraction(1) if a > b else Fraction(1, 2) if a == b else Fraction(0)


def by_enumeration(x, y):
    """U and p by listing every relabeling."""
    pooled, m, n = [*x, *y], len(x), len(y)
    # doubled, so that the sums below are of small integers and exact
    beats = [[int(2 * score(a, b)) for b in pooled] for a in pooled]
    everyone = range(m + n)

    def doubled_u(chosen):
        rest = set(everyone).difference(chosen)
        return sum(beats[i][j] for i in chosen for j in rest)

    observed = doubled_u(range(m))
    relabelings = list(itertools.combinations(everyone, m))
    extreme = sum(abs(doubled_u(c) - m * n) >= abs(observed - m * n) for c in relabelings)
    return Fraction(observed, 2), Fraction(extreme, len(relabelings))


@pytest.mark.parametrize("m", range(1, 8))
@pytest.mark.parametrize("n", range(1, 8))
def test_mann_whitney_equals_enumeration_at_every_size(m, n):
    rng = random.Random(100 * m + n)
    for alphabet in ([0.0, 1.0], [NAN, 0.0, 0.5, 1.0], list(range(m + n))):
        x, y = ([float(rng.choice(alphabet)) for _ in range(size)] for size in (m, n))
        u, p = by_enumeration(x, y)
        assert mann_whitney(x, y) == (float(u), float(p))


@settings(max_examples=60, deadline=None)
@given(st.lists(values, min_size=1, max_size=5), st.lists(values, min_size=1, max_size=5))
def test_mann_whitney_equals_enumeration_with_ties(x, y):
    u, p = by_enumeration(x, y)
    assert mann_whitney(x, y) == (float(u), float(p))


@pytest.mark.parametrize(("m", "n"), [(3, 5), (8, 8), (6, 11), (16, 16)])
def test_mann_whitney_equals_scipy_without_ties(m, n):
    rng = np.random.default_rng(m * n)
    for shift in (0.0, 0.7, 2.0):
        x, y = rng.normal(shift, 1, m), rng.normal(0, 1, n)
        u, p = mann_whitney(x, y)
        known = scipy_stats.mannwhitneyu(x, y, method="exact")
        assert u == known.statistic
        assert p == pytest.approx(known.pvalue, rel=1e-12)


def test_the_papers_delta_has_the_papers_p():
    # 17 of 256 pairs lost: one seed below all 16, one below a single seed
    y = list(range(16))
    x = [-1, 14.5, *range(20, 34)]
    assert cliffs_delta(x, y) == pytest.approx(0.867, abs=5e-4)
    assert mann_whitney(x, y)[1] == pytest.approx(4.0e-6, rel=0.02)


def test_mann_whitney_beyond_int64_is_exact():
    # complete separation has exactly two extreme relabelings, whatever the size
    for size in (30, 40):
        assert mann_whitney(range(size), range(-size, 0))[1] == 2 / math.comb(2 * size, size)


def test_mann_whitney_all_equal_is_one():
    assert mann_whitney([0.5] * 16, [0.5] * 16) == (128.0, 1.0)


@settings(max_examples=100, deadline=None)
@given(groups, groups)
def test_rank_test_is_symmetric_and_bounded(x, y):
    (u, p), (v, q) = mann_whitney(x, y), mann_whitney(y, x)
    assert u + v == len(x) * len(y)
    assert p == q and 0 < p <= 1
    assert cliffs_delta(x, y) == -cliffs_delta(y, x)
    assert cliffs_delta(x, y) == pytest.approx(float(2 * sum(score(a, b) for a in x for b in y)) / (len(x) * len(y)) - 1)


@settings(max_examples=50, deadline=None)
@given(groups, groups)
def test_rank_test_sees_ranks_only(x, y):
    assert mann_whitney(np.exp(x), np.exp(y)) == mann_whitney(x, y)


@given(
    st.lists(st.integers(0, 4), min_size=2, max_size=12),
    st.integers(1, 11),
    st.sampled_from([1e-9, 1.0, 1e9]),
    st.randoms(use_true_random=False),
)
def test_equal_values_summed_in_another_order_tie(levels, split, scale, rng):
    levels = [(1 + level) / 7 for level in levels]
    nudged = [scale * level * (1 + rng.choice([-3e-16, 0.0, 3e-16])) for level in levels]
    split = min(split, len(levels) - 1)
    assert mann_whitney(nudged[:split], nudged[split:]) == mann_whitney(levels[:split], levels[split:])
    assert cliffs_delta(nudged[:split], nudged[split:]) == cliffs_delta(levels[:split], levels[split:])


def test_a_difference_of_a_billionth_still_ranks():
    assert mann_whitney([0.25 + 1e-9, 0.5 + 1e-9], [0.25, 0.5])[0] == 3


def test_infinite_values_rank_at_the_ends():
    assert mann_whitney([math.inf, 0.0], [1.0, -math.inf])[0] == 3
    assert mann_whitney([math.inf, math.inf], [math.inf, NAN])[0] == 3


def test_a_diverged_seed_ranks_below_every_number():
    assert mann_whitney([NAN], [-5.0])[0] == 0
    assert mann_whitney([NAN], [NAN])[0] == 0.5
    assert cliffs_delta([NAN, NAN], [0.0, -1.0]) == -1
    assert mann_whitney([NAN, 1.0, 2.0], [0.0, 0.5]) == mann_whitney([-9.0, 1.0, 2.0], [0.0, 0.5])


@pytest.mark.parametrize("function", [mann_whitney, cliffs_delta, bootstrap_difference])
def test_empty_groups_are_refused(function):
    with pytest.raises(ValueError, match="group y is empty"):
        function([1.0], [])
    with pytest.raises(ValueError, match="group x is empty"):
        function([], [1.0])


def test_holm_by_hand():
    # 0.01*4, 0.02*3 raised to it, 0.03*2 held at 0.06, 0.5
    assert holm([0.5, 0.01, 0.03, 0.02]) == pytest.approx([0.5, 0.04, 0.06, 0.06])
    assert holm([0.9, 0.8]) == pytest.approx([1.0, 1.0])
    assert holm([]).shape == (0,)
    with pytest.raises(ValueError, match="p-value"):
        holm([0.1, NAN])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_equals_the_definition(p):
    """Adjusted p_i is the largest (k - rank) * p over all tests up to i, at most 1."""
    ordered = sorted(p)
    adjusted = holm(p)
    for value, mine in zip(p, adjusted, strict=True):
        upto = [min(1, (len(p) - j) * q) for j, q in enumerate(ordered) if q <= value]
        assert mine == pytest.approx(max(upto))
        assert value <= mine <= 1


def test_bootstrap_mean_equals_a_plain_loop():
    x, seed = [0.2, 0.9, 0.4, NAN, 0.7], 3
    rng = np.random.default_rng(seed)
    filled = [0.0 if math.isnan(v) else v for v in x]
    draws = [sum(filled[i] for i in rng.integers(5, size=5)) / 5 for _ in range(2000)]
    got = bootstrap_mean(x, seed=seed, resamples=2000)
    assert got.value == pytest.approx(sum(filled) / 5) and got.n == 5
    assert (got.low, got.high) == pytest.approx(tuple(np.percentile(draws, [2.5, 97.5])))


def test_bootstraps_agree_with_normal_theory():
    rng = np.random.default_rng(0)
    x, y = rng.normal(1, 1, 400), rng.normal(0, 2, 300)
    one, two = bootstrap_mean(x), bootstrap_difference(x, y)
    se, both = x.std() / 20, math.hypot(x.std() / 20, y.std() / math.sqrt(300))
    assert (one.low, one.high) == pytest.approx((x.mean() - 1.96 * se, x.mean() + 1.96 * se), abs=0.1 * se)
    gap = x.mean() - y.mean()
    assert two.value == pytest.approx(gap) and two.n == 300
    assert (two.low, two.high) == pytest.approx((gap - 1.96 * both, gap + 1.96 * both), abs=0.1 * both)


def test_bootstrap_covers():
    rng = np.random.default_rng(1)
    hits = 0
    for seed in range(200):
        got = bootstrap_difference(rng.normal(0.5, 1, 30), rng.normal(0, 1, 30), seed=seed, resamples=500)
        hits += got.low <= 0.5 <= got.high
    assert 0.89 <= hits / 200 <= 0.99


@settings(max_examples=40, deadline=None)
@given(st.lists(values, min_size=2, max_size=12), st.lists(values, min_size=2, max_size=12))
def test_bootstrap_invariants(x, y):
    mean = bootstrap_mean(x, resamples=200)
    filled = np.nan_to_num(x)
    assert filled.min() - 1e-12 <= mean.low <= mean.high <= filled.max() + 1e-12
    assert mean == bootstrap_mean(x, resamples=200) == bootstrap_mean(filled, resamples=200)
    gap = bootstrap_difference(x, y, resamples=200)
    moved = bootstrap_difference(filled + 1, y, resamples=200)
    assert tuple(moved)[:3] == pytest.approx(tuple(v + 1 for v in gap[:3]))


def test_one_seed_has_no_interval():
    for got in (bootstrap_mean([0.4]), bootstrap_difference([0.4, 0.5], [0.1]), bootstrap_ratio([0.4], [0.1])):
        assert got.n == 1 and math.isnan(got.low) and math.isnan(got.high)
    assert bootstrap_mean([NAN]).value == 0


def test_bootstrap_ratio_equals_a_plain_loop():
    gain, lost, seed = [0.1, -0.2, 0.4, 0.0, 0.3], [0.3, 0.1, 0.35, 0.5, 0.2], 3
    rng = np.random.default_rng(seed)
    draws = []
    for _ in range(2500):
        drawn = rng.integers(5, size=5)  # the same seeds in both
        draws.append(sum(gain[i] for i in drawn) / sum(lost[i] for i in drawn))
    got = bootstrap_ratio(gain, lost, seed=seed, resamples=2500)
    assert got.value == pytest.approx(sum(gain) / sum(lost)) and got.n == 5
    assert (got.low, got.high) == pytest.approx(tuple(np.percentile(draws, [2.5, 97.5])))


def test_bootstrap_ratio_agrees_with_the_delta_method():
    rng = np.random.default_rng(6)
    lost = rng.normal(1, 0.3, 500)
    gain = 0.4 * lost + rng.normal(0, 0.2, 500)
    got = bootstrap_ratio(gain, lost)
    # joint draws: the spread that both share cancels
    se = (gain - got.value * lost).std() / lost.mean() / math.sqrt(500)
    assert (got.low, got.high) == pytest.approx((got.value - 1.96 * se, got.value + 1.96 * se), abs=0.1 * se)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-1, 1), st.floats(0.01, 1)), min_size=2, max_size=12),
    st.sampled_from([-3.0, 0.001, 7.0]),
)
def test_bootstrap_ratio_invariants(pairs, factor):
    gain, lost = map(np.array, zip(*pairs, strict=True))
    got = bootstrap_ratio(gain, lost, resamples=200)
    assert got == bootstrap_ratio(gain, lost, resamples=200)
    by_pair = gain / lost  # a ratio of means is a weighted mean of the ratios
    assert by_pair.min() - 1e-9 <= got.low <= got.high <= by_pair.max() + 1e-9
    near = {"rel": 1e-9, "abs": 1e-9}
    assert tuple(bootstrap_ratio(factor * gain, factor * lost, resamples=200)) == pytest.approx(tuple(got), **near)
    more = bootstrap_ratio(gain + factor * lost, lost, resamples=200)
    assert tuple(more)[:3] == pytest.approx(tuple(v + factor for v in got[:3]), **near)
    assert tuple(bootstrap_ratio(factor * lost, lost))[:3] == pytest.approx((factor,) * 3)


def test_bootstrap_ratio_is_not_clipped_and_survives_a_zero_denominator():
    over, under = bootstrap_ratio([0.4, 0.5], [0.2, 0.3]), bootstrap_ratio([-0.4, -0.5], [0.2, 0.3])
    assert over.low > 1 and under.high < 0
    with np.errstate(all="raise"):  # a quarter of the resamples is each of 1 / 0 and 1 / 1
        got = bootstrap_ratio([1.0, 1.0], [0.0, 1.0])
        assert got == (2.0, 1.0, math.inf, 2)
        assert bootstrap_ratio([-1.0, -1.0], [-0.0, 1.0]) == (-2.0, -math.inf, -1.0, 2)
        assert bootstrap_ratio([1.0, -1.0], [0.0, 0.0])[1:] == (-math.inf, math.inf, 2)
        assert bootstrap_ratio([0.0, 0.6], [0.0, 0.2])[:3] == pytest.approx((3, 3, 3))  # 0 over 0 says nothing
        none = bootstrap_ratio([0.0, 0.0], [0.0, 0.0])
    assert all(map(math.isnan, none[:3])) and none.n == 2


def test_bootstrap_ratio_refuses_bad_input():
    with pytest.raises(ValueError, match="numerator is empty"):
        bootstrap_ratio([], [])
    with pytest.raises(ValueError, match="denominator is empty"):
        bootstrap_ratio([1.0], [])
    with pytest.raises(ValueError, match="numerator has 1 values, denominator 2"):
        bootstrap_ratio([1.0], [1.0, 2.0])
    for bad in (NAN, math.inf):
        with pytest.raises(ValueError, match="finite"):
            bootstrap_ratio([1.0, 0.0], [1.0, bad])
        with pytest.raises(ValueError, match="finite"):
            bootstrap_ratio([1.0, bad], [1.0, 1.0])


def test_mcnemar_equals_enumeration():
    for b, c in itertools.product(range(7), repeat=2):
        n = b + c
        tail = [k for k in range(n + 1) if abs(2 * k - n) >= abs(b - c)]
        assert mcnemar(b, c) == pytest.approx(sum(math.comb(n, k) for k in tail) / 2**n)
    assert mcnemar(0, 0) == 1
    with pytest.raises(ValueError, match="negative"):
        mcnemar(-1, 2)


def test_singleton_clusters_are_the_ordinary_bootstrap():
    x = np.random.default_rng(2).normal(0.3, 1, 200)
    ours, plain = cluster_bootstrap(x, np.arange(200), seed=1), bootstrap_mean(x, seed=2)
    assert tuple(ours) == pytest.approx(tuple(plain), abs=0.02)


def test_clusters_widen_the_interval():
    rng = np.random.default_rng(3)
    cluster = np.repeat(np.arange(100), 4)
    x = rng.normal(0, 1, 100)[cluster]  # four copies each: 100 values' worth of evidence
    ours, naive = cluster_bootstrap(x, cluster), bootstrap_mean(x)
    assert (ours.high - ours.low) / (naive.high - naive.low) == pytest.approx(2, rel=0.1)
    assert ours.n == 400 and ours.value == pytest.approx(x.mean())


def test_unequal_clusters_equal_a_plain_loop():
    x, names = np.array([1.0, 0.0, 0.0, -1.0, 1.0]), np.array(["b", "a", "a", "c", "b"])
    members = [x[names == name] for name in ("a", "b", "c")]
    rng = np.random.default_rng(5)
    draws = [np.concatenate([members[i] for i in rng.integers(3, size=3)]).mean() for _ in range(1500)]
    got = cluster_bootstrap(x, names, seed=5, resamples=1500)
    assert (got.low, got.high) == pytest.approx(tuple(np.percentile(draws, [2.5, 97.5])))


def test_cluster_bootstrap_refuses_bad_input():
    with pytest.raises(ValueError, match="2 values, cluster 1"):
        cluster_bootstrap([0.0, 1.0], [0])
    with pytest.raises(ValueError, match="NaN"):
        cluster_bootstrap([0.0, NAN], [0, 1])
    assert math.isnan(cluster_bootstrap([0.0, 1.0], [7, 7]).low)


def family(rng, pairs, shift, instances=24):
    """A model for each of `pairs`, with so many pairs of unequal clusters around its own mean."""
    models = []
    for count in pairs:
        own = shift + rng.normal(0, 0.3)
        cluster = [rng.integers(6, size=instances) for _ in range(count)]
        models.append([(own + rng.normal(0, 1, 6)[c] + rng.normal(0, 0.5, instances), c) for c in cluster])
    return models


def nested_draws(models, rng, resamples):
    """The mean of a family by the definition, one resample at a time."""
    members = [[[d[c == name] for name in np.unique(c)] for d, c in model] for model in models]
    draws = []
    for _ in range(resamples):
        means = []
        for i in rng.integers(len(models), size=len(models)):
            for clusters in members[i]:
                means.append(np.concatenate([clusters[j] for j in rng.integers(len(clusters), size=len(clusters))]).mean())
        draws.append(np.mean(means))
    return np.array(draws)


@pytest.mark.parametrize("pairs", [((3, 1, 2), (2, 2)), ((2,), (1, 1, 3, 1))])
def test_nested_bootstrap_has_the_distribution_of_a_plain_loop(pairs):
    rng = np.random.default_rng(7)
    models = [family(rng, counts, shift) for counts, shift in zip(pairs, (1.0, 0.4), strict=True)]
    draws = np.subtract(*(nested_draws(m, rng, 4000) for m in models))
    got = [nested_bootstrap(*models, seed=seed, resamples=4000) for seed in range(5)]
    point = np.subtract(*(np.mean([d.mean() for model in m for d, _ in model]) for m in models))
    assert {g.value for g in got} == {got[0].value} and got[0].value == pytest.approx(point)
    assert got[0].n == min(map(len, pairs)) and len({g.low for g in got}) == 5
    # a percentile of 4000 normal draws has a standard error of 0.042 deviations, a median of 0.02
    near = draws.std() * 4 * 0.042
    for end, q in (("low", 2.5), ("high", 97.5)):
        assert np.mean([getattr(g, end) for g in got]) == pytest.approx(np.percentile(draws, q), abs=near)


def test_nested_bootstrap_agrees_with_theory():
    rng = np.random.default_rng(8)
    models, clusters = 40, 50
    means = rng.normal(0.5, 0.2, (2, models, 1))
    values = means + rng.normal(0, 1, (2, models, clusters))
    first, second = ([[(row, np.arange(clusters))] for row in of] for of in values)
    got = nested_bootstrap(first, second)
    # the spread of the models, and that of the clusters within each anew
    variance = sum(of.mean(axis=1).var() / models + of.var(axis=1).mean() / clusters / models for of in values)
    gap, half = values[0].mean() - values[1].mean(), 1.96 * math.sqrt(variance)
    assert tuple(got)[:3] == pytest.approx((gap, gap - half, gap + half), abs=0.1 * half)
    assert got.n == models


def test_nested_bootstrap_of_known_answers():
    cluster = np.repeat(np.arange(10), 4)
    flat = [[(np.full(40, 0.75), cluster)], [(np.full(40, 0.75), cluster)]]
    assert nested_bootstrap(flat, [[(np.zeros(40), cluster)]]) == (0.75, 0.75, 0.75, 1)
    # without spread inside a model only the models vary
    levels = [0.1, 0.5, 0.2, 0.9]
    got = nested_bootstrap([[(np.full(40, x), cluster)] for x in levels], flat, resamples=4000)
    assert tuple(got)[:3] == pytest.approx(tuple(bootstrap_difference(levels, [0.75, 0.75]))[:3], abs=0.03)
    # one model in each family: clusters alone vary, as in a cluster bootstrap
    x = np.random.default_rng(9).normal(0.3, 1, 40)
    alone, known = nested_bootstrap([[(x, cluster)]], [[(np.zeros(40), cluster)]]), cluster_bootstrap(x, cluster)
    assert tuple(alone) == pytest.approx((known.value, known.low, known.high, 1), abs=0.02)
    # pairs weigh equally whatever their size and their model
    uneven = [[(np.ones(40), cluster), (np.ones(8), cluster[:8])], [(np.zeros(40), cluster)]]
    assert nested_bootstrap(uneven, flat).value == pytest.approx(2 / 3 - 0.75)


def test_nested_bootstrap_repeats_itself_and_changes_sign():
    rng = np.random.default_rng(10)
    one, two = family(rng, (2, 1), 1.0), family(rng, (1, 1, 1), 0.0)
    got, back = nested_bootstrap(one, two), nested_bootstrap(two, one)
    assert got == nested_bootstrap(one, two) and nested_bootstrap(one, two, resamples=1).value == got.value
    assert tuple(got)[:3] == pytest.approx((-back.value, -back.high, -back.low), abs=0.05)


def test_nested_bootstrap_without_spread_and_bad_input():
    cluster = np.repeat(np.arange(10), 4)
    sound, single = [[(np.arange(40.0), cluster)]], [[(np.arange(40.0), np.zeros(40))]]
    for got in (nested_bootstrap(single, sound), nested_bootstrap(sound, single)):
        assert got.value == 0 and math.isnan(got.low) and math.isnan(got.high)
    assert not math.isnan(nested_bootstrap(single * 2, sound).low)
    with pytest.raises(ValueError, match="first family needs a model"):
        nested_bootstrap([], sound)
    with pytest.raises(ValueError, match="second family needs a model, and each model a pair"):
        nested_bootstrap(sound, [*sound, []])
    with pytest.raises(ValueError, match="2 values, cluster 1"):
        nested_bootstrap(sound, [[([0.0, 1.0], [0])]])
    with pytest.raises(ValueError, match="NaN"):
        nested_bootstrap([[([0.0, NAN], [0, 1])]], sound)
