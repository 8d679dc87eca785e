"""The statistics of the replication: exact rank tests over seeds, bootstraps, McNemar, Holm.

Seeds may be NaN: a diverged seed. It ranks below every number and counts as accuracy 0 in a mean.
"""

from math import comb
from typing import NamedTuple

import numpy as np
from scipy import stats


class Interval(NamedTuple):
    """An estimate with its 95 % percentile interval and the number of units behind it."""

    value: float
    low: float
    high: float
    n: int


def _group(values, name: str) -> np.ndarray:
    array = np.asarray(values, dtype=float).ravel()
    if array.size == 0:
        raise ValueError(f"group {name} is empty: at least one value is needed")
    return array


def _doubled_u(x: np.ndarray, y: np.ndarray) -> tuple[int, np.ndarray]:
    """Twice U of x (an integer, ties included) and the doubled midranks of x followed by y.

    Values tie when they differ by less than 1e-12 of the largest: equal accuracies are sums in different orders.
    """
    both = np.concatenate([x, y])
    largest = np.abs(both[np.isfinite(both)]).max(initial=0.0)
    both = np.round(both / largest, 12) if largest else both
    # a diverged seed ranks last; -inf and NaN tie
    midranks = stats.rankdata(np.where(np.isnan(both), -np.inf, both), method="average")
    doubled = np.rint(2 * midranks).astype(int)
    return int(doubled[: x.size].sum()) - x.size * (x.size + 1), doubled


def mann_whitney(x, y) -> tuple[float, float]:
    """Exact two-sided Mann-Whitney test on midranks; x (m,), y (n,), NaN = diverged, ranks last.

    Returns (U, p): U counts pairs with x > y plus half the ties, and
    p = P(|U - mn/2| >= observed) over all C(m+n, m) relabelings of the pooled values, so it stays
    exact with ties (Lehmann, Nonparametrics, 1975, sections 1.2 and 1.4). The test of the contract
    paper's section 4.3. Raises ValueError on an empty group.
    """
    x, y = _group(x, "x"), _group(y, "y")
    doubled_u, ranks = _doubled_u(x, y)
    m, total = min(x.size, y.size), x.size + y.size
    size = int(np.sort(ranks)[-m:].sum()) + 1
    # counts[k, s] = subsets of k pooled values whose doubled ranks sum to s. No count exceeds
    # C(total, m) as m <= total / 2, so int64 is exact below 2**63 and Python integers take over above.
    counts = np.zeros((m + 1, size), dtype=np.int64 if comb(total, m) < 2**63 else object)
    counts[0, 0] = 1
    for rank in ranks:
        taken = counts[:-1, : size - rank].copy()
        counts[1:, rank:] += taken
    # |2U - mn| is the same for either group, so the smaller one may be relabeled
    distance = np.abs(np.arange(size) - m * (m + 1) - x.size * y.size)
    extreme = counts[m, distance >= abs(doubled_u - x.size * y.size)].sum()
    return doubled_u / 2, int(extreme) / comb(total, m)


def cliffs_delta(x, y) -> float:
    """Cliff's delta, P(x > y) - P(x < y) over all pairs, in [-1, 1]; NaN ranks below every number.

    x (m,), y (n,). Cliff, Psychological Bulletin 114 (1993). Raises ValueError on an empty group.
    """
    x, y = _group(x, "x"), _group(y, "y")
    pairs = x.size * y.size
    return (_doubled_u(x, y)[0] - pairs) / pairs


def holm(p) -> np.ndarray:
    """Holm's step-down adjusted p-values of one family, p (k,) -> (k,), in the order given.

    Monotone in p and capped at 1. Holm, Scandinavian Journal of Statistics 6 (1979).
    Raises ValueError when a p-value is NaN or outside [0, 1].
    """
    p = np.asarray(p, dtype=float).ravel()
    if not ((p >= 0) & (p <= 1)).all():
        raise ValueError("every p-value must lie in [0, 1]")
    order = np.argsort(p, kind="stable")
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(np.maximum.accumulate(p[order] * np.arange(p.size, 0, -1)), 1)
    return adjusted


def _resampled_means(sums: np.ndarray, rng: np.random.Generator, resamples: int, sizes: np.ndarray | None = None) -> np.ndarray:
    """Means (resamples,) over units drawn with replacement, each of `sizes` values (else one) that add to `sums`."""
    chunks = []
    for start in range(0, resamples, 1000):  # bounds the memory at many units
        drawn = rng.integers(sums.size, size=(min(1000, resamples - start), sums.size))
        chunks.append(sums[drawn].sum(axis=1) / (sums.size if sizes is None else sizes[drawn].sum(axis=1)))
    return np.concatenate(chunks)


def _percentiles(draws: np.ndarray) -> tuple[float, float]:
    low, high = np.percentile(draws, [2.5, 97.5])
    return float(low), float(high)


def bootstrap_mean(x, seed: int = 0, resamples: int = 10_000) -> Interval:
    """Mean of x (n,) over seeds with a 95 % percentile bootstrap interval; NaN counts as 0.

    One value gives low = high = nan. Efron and Tibshirani, An Introduction to the Bootstrap (1993),
    chapter 13. Raises ValueError on an empty x.
    """
    x = np.nan_to_num(_group(x, "x"), nan=0.0)
    if x.size == 1:
        return Interval(float(x[0]), np.nan, np.nan, 1)
    draws = _resampled_means(x, np.random.default_rng(seed), resamples)
    return Interval(float(x.mean()), *_percentiles(draws), x.size)


def bootstrap_difference(x, y, seed: int = 0, resamples: int = 10_000) -> Interval:
    """Mean of x (m,) minus mean of y (k,), independent groups, with a 95 % percentile interval.

    NaN counts as 0; n is the smaller group's size; a group of one gives low = high = nan.
    Efron and Tibshirani (1993), chapters 8 and 13. Raises ValueError on an empty group.
    """
    x, y = (np.nan_to_num(_group(v, name), nan=0.0) for v, name in ((x, "x"), (y, "y")))
    value, n = float(x.mean() - y.mean()), min(x.size, y.size)
    if n == 1:
        return Interval(value, np.nan, np.nan, 1)
    rng = np.random.default_rng(seed)
    of_x, of_y = (_resampled_means(v, rng, resamples) for v in (x, y))
    return Interval(value, *_percentiles(of_x - of_y), n)


def bootstrap_ratio(numerator, denominator, seed: int = 0, resamples: int = 10_000) -> Interval:
    """Mean of numerator (n,) over mean of denominator (n,), paired by seed, with a 95 % percentile interval.

    Each resample draws seeds for both at once; nothing is clipped. A resample whose denominator is 0
    counts as infinite with the numerator's sign, and then the ends are resamples themselves, the next
    one outward; 0 over 0 is nan and left out. The interval means little where the denominator may be
    0: the caller checks. One seed gives low = high = nan. Efron and Tibshirani (1993), chapter 13.
    Raises ValueError on empty, unequal or not finite input.
    """
    numerator = _group(numerator, "numerator")
    denominator = _group(denominator, "denominator") + 0.0  # no -0.0: it would turn the sign
    if numerator.size != denominator.size:
        raise ValueError(f"numerator has {numerator.size} values, denominator {denominator.size}")
    if not (np.isfinite(numerator).all() and np.isfinite(denominator).all()):
        raise ValueError("numerator and denominator must be finite: a NaN has no place in a ratio of means")
    with np.errstate(divide="ignore", invalid="ignore"):
        value, n = float(numerator.mean() / denominator.mean()), numerator.size
        if n == 1:
            return Interval(value, np.nan, np.nan, 1)
        draws = _resampled_means(numerator, np.random.default_rng(seed), resamples, denominator)
    draws = draws[~np.isnan(draws)]
    if not draws.size:
        return Interval(value, np.nan, np.nan, n)
    if np.isfinite(draws).all():
        return Interval(value, *_percentiles(draws), n)
    # between a number and infinity there is nothing to interpolate
    low, high = (float(np.percentile(draws, q, method=m)) for q, m in ((2.5, "lower"), (97.5, "higher")))
    return Interval(value, low, high, n)


def _spearman(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Spearman's correlation of each row, x and y (rows, n) -> (rows,); NaN where a row has no variance."""
    x, y = (ranks - ranks.mean(axis=1, keepdims=True) for ranks in (stats.rankdata(x, axis=1), stats.rankdata(y, axis=1)))
    scale = np.sqrt((x**2).sum(axis=1) * (y**2).sum(axis=1))  # exactly 0 without variance, midranks being halves
    return np.clip((x * y).sum(axis=1) / np.where(scale > 0, scale, np.nan), -1, 1)


def rank_correlation(x, y, group, seed: int = 0, resamples: int = 10_000) -> Interval:
    """Spearman's rank correlation of x (n,) and y (n,) with a 95 % percentile bootstrap interval.

    Units are drawn with replacement within each group, group (n,), so that every resample has the design; one
    without variance is left out. No interval (low = high = nan) with fewer than 3 units, where it is 1 or -1 by
    construction, or with a group of one; no value without variance.
    Davison and Hinkley, Bootstrap Methods and their Application (1997), section 3.2 on stratified resampling.
    Raises ValueError on empty, unequal or NaN input.
    """
    x, y, group = np.asarray(x, dtype=float).ravel(), np.asarray(y, dtype=float).ravel(), np.asarray(group).ravel()
    if not x.size == y.size == group.size > 0:
        raise ValueError(f"x has {x.size} values, y {y.size}, group {group.size}: equal numbers above 0 are needed")
    if np.isnan(x).any() or np.isnan(y).any():
        raise ValueError("x or y has a NaN: leave diverged models out")
    (value,) = _spearman(x[None], y[None])
    members = [np.flatnonzero(group == name) for name in np.unique(group)]
    if x.size < 3 or np.isnan(value) or min(map(len, members)) == 1:
        return Interval(float(value), np.nan, np.nan, x.size)
    rng = np.random.default_rng(seed)
    drawn = np.concatenate([units[rng.integers(units.size, size=(resamples, units.size))] for units in members], axis=1)
    low, high = np.nanpercentile(_spearman(x[drawn], y[drawn]), [2.5, 97.5])
    return Interval(float(value), float(low), float(high), x.size)


def bootstrap_interaction(first_pair, second_pair, seed: int = 0, resamples: int = 10_000) -> Interval:
    """Difference of means of the first pair minus that of the second, with a 95 % percentile bootstrap interval.

    The four groups (n_i,) are resampled independently; NaN counts as 0; n is the smallest group's size; a group
    of one gives low = high = nan. Raises ValueError on an empty group.
    """
    groups = [np.nan_to_num(_group(values, str(i)), nan=0.0) for i, values in enumerate((*first_pair, *second_pair), 1)]
    n = min(values.size for values in groups)
    signs, rng = (1, -1, -1, 1), np.random.default_rng(seed)
    value = float(sum(sign * values.mean() for sign, values in zip(signs, groups, strict=True)))
    if n == 1:
        return Interval(value, np.nan, np.nan, 1)
    draws = [_resampled_means(values, rng, resamples) for values in groups]
    return Interval(value, *_percentiles(sum(s * d for s, d in zip(signs, draws, strict=True))), n)


def mcnemar(b: int, c: int) -> float:
    """Exact two-sided McNemar p of the discordant counts b and c; 1 when there are none.

    The binomial test of b out of b + c at 1/2 (McNemar, Psychometrika 12, 1947).
    Raises ValueError on a negative count.
    """
    if b < 0 or c < 0:
        raise ValueError(f"discordant counts must not be negative, got {b} and {c}")
    return 1.0 if b + c == 0 else float(stats.binomtest(int(b), int(b + c), 0.5).pvalue)


def _cluster_sums(difference, cluster) -> tuple[np.ndarray, np.ndarray]:
    """Sum and size of every cluster of difference (N,), each (C,); ValueError on empty, unequal or NaN input."""
    difference, labels = _group(difference, "difference"), np.asarray(cluster).ravel()
    if labels.size != difference.size:
        raise ValueError(f"difference has {difference.size} values, cluster {labels.size}")
    if np.isnan(difference).any():
        raise ValueError("difference has a NaN: every instance needs a value")
    _, index, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    return np.bincount(index.ravel(), weights=difference), sizes


def cluster_bootstrap(difference, cluster, seed: int = 0, resamples: int = 10_000) -> Interval:
    """Mean of difference (N,) with a 95 % percentile interval, whole clusters drawn with replacement.

    cluster (N,) labels each value's cluster; n is N. One cluster gives low = high = nan.
    Davison and Hinkley, Bootstrap Methods and their Application (1997), section 3.8.
    Raises ValueError on empty, unequal or NaN input.
    """
    sums, sizes = _cluster_sums(difference, cluster)
    value, n = float(sums.sum() / sizes.sum()), int(sizes.sum())
    if sizes.size == 1:
        return Interval(value, np.nan, np.nan, n)
    draws = _resampled_means(sums, np.random.default_rng(seed), resamples, sizes)
    return Interval(value, *_percentiles(draws), n)


def nested_bootstrap(first, second, seed: int = 0, resamples: int = 10_000) -> Interval:
    """Mean of the first family minus mean of the second, over their pairs, with a 95 % percentile interval.

    A family is a list of models, a model a list of pairs, a pair (difference (N,), cluster (N,)). Each resample draws models
    with replacement within a family and, for every model drawn, whole clusters within each of its pairs; pairs weigh
    equally. n is the smaller family's number of models. A family of one model varies over clusters alone; one of a single
    cluster in every pair does not vary at all and gives low = high = nan.
    Davison and Hinkley, Bootstrap Methods and their Application (1997), section 3.8.
    Raises ValueError on a family without models, a model without pairs, and a pair that is empty, unequal or NaN.
    """
    rng, means, draws, fixed = np.random.default_rng(seed), [], [], False
    for name, family in (("first", first), ("second", second)):
        if not len(family) or not all(map(len, family)):
            raise ValueError(f"the {name} family needs a model, and each model a pair")
        models = [[_cluster_sums(*pair) for pair in model] for model in family]
        means.append(np.mean([sums.sum() / sizes.sum() for model in models for sums, sizes in model]))
        fixed |= len(models) == 1 and all(sizes.size == 1 for _, sizes in models[0])
        drawn = rng.integers(len(models), size=(resamples, len(models)))
        totals, counts = np.zeros(drawn.shape), np.array([len(model) for model in models])
        for i, model in enumerate(models):
            at = drawn == i  # a model drawn twice in a resample gets its clusters drawn twice
            for sums, sizes in model if at.any() else ():
                totals[at] += _resampled_means(sums, rng, int(at.sum()), sizes)
        draws.append(totals.sum(axis=1) / counts[drawn].sum(axis=1))
    ends = (np.nan, np.nan) if fixed else _percentiles(draws[0] - draws[1])
    return Interval(float(means[0] - means[1]), *ends, min(len(first), len(second)))
