"""How everything here is measured: the two of a pair in turn, medians of their ratios, and one line of the table each."""

import time

import numpy as np


def seconds(function) -> float:
    """Wall seconds of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def paired(a, b, rounds: int, warm: int = 2) -> np.ndarray:
    """Ratios seconds(a) / seconds(b), the two called in turn; shape (rounds,). Both are warmed up first."""
    for _ in range(warm):
        a(), b()
    return np.array([seconds(a) / seconds(b) for _ in range(rounds)])


def row(
    name: str,
    values,
    unit: str,
    against: str,
    at_least: float | None = None,
    at_most: float | None = None,
    why: str = "",
    note: str = "",
) -> dict:
    """One line of the table: the median and the middle half of the rounds, and the aim, if there is one.

    why: what stands in the way, shown where the aim is missed. note: shown in any case.
    """
    low, median, high = np.quantile(np.atleast_1d(values), [0.25, 0.5, 0.75])
    line = {"name": name, "median": median, "low": low, "high": high, "rounds": np.size(values), "unit": unit}
    line |= {"against": against, "at_least": at_least, "at_most": at_most, "note": note}
    missed = (at_least is not None and median < at_least) or (at_most is not None and median > at_most)
    return line | {"why": why if missed else ""}
