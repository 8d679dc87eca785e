"""A model and a task, read under several loop boundaries: what sections 4.1 and 4.2 of the contract paper compare.

A pair's arms are the same weights, so they are compared instance by instance. Shapes: N instances, K loop counts.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from lib.evaluation import Readings, summary

PEAK_AT = (1, 2, 4, 8, 16, 32)  # where the competence gate looks
NEVER, EVERY = 0, 1  # boundary periods: the norm at no loop boundary, and at every one


@dataclass(frozen=True)
class Pair:
    """One model and one task. readings: {boundary period: Readings of shape (K_max, N)}, the trained one among them."""

    model: str  # its name, such as "ouro-2, seed 0"
    family: str  # ouro: trained with the norm at every loop boundary; huginn: without
    task: str
    r0: int  # the trained loop count, with sampled depth its mean
    trained: int  # the boundary's period in training
    floor: float  # no-skill accuracy, the mean over depths
    alphabet: tuple[int, ...]  # token ids of the possible answers
    cluster: np.ndarray  # (N,) the skeleton of each instance
    d_star: np.ndarray  # (N,) its depth
    readings: dict[int, Readings]

    @property
    def changed(self) -> int:
        """The period of the other arm: the norm removed where it was trained with, added where it was not."""
        return NEVER if self.trained else EVERY

    @property
    def loops(self) -> int:
        """K_max."""
        return len(self.readings[self.trained].prediction)

    def right(self, period: int) -> np.ndarray:
        """Whether each answer is right under a boundary, (K_max, N) bool."""
        found = self.readings[period]
        return found.prediction == found.answer

    def accuracy(self, period: int) -> np.ndarray:
        """Mean accuracy under a boundary at K = 1..K_max, (K_max,)."""
        return self.right(period).mean(axis=1)

    @property
    def competent(self) -> bool:
        """Whether the intact arm's peak reaches 0.30 and exceeds the floor by over 0.05."""
        peak = max(self.accuracy(self.trained)[K - 1] for K in PEAK_AT if K <= self.loops)
        return bool(peak >= 0.30 and peak - self.floor > 0.05)


def arm_name(pair: Pair, period: int) -> str:
    """An arm in words: intact, removed, added, or every k-th."""
    if period == pair.trained:
        return "intact"
    return {NEVER: "removed", EVERY: "added"}.get(period, f"every {period}")


def table(pairs: list[Pair]) -> pd.DataFrame:
    """A long table of what every arm read: model, style, seed, family, task, arm, K, metric, value.

    model "ouro-2, seed 0" gives style "ouro-2" and seed 0; a released model is its own style, seed 0. The metrics are those of
    `evaluation.summary`, and norm_ratio, the mean raw-state norm over its value at K = 1.
    """
    parts = []
    for pair in pairs:
        style, _, seed = pair.model.partition(", seed ")
        for period, readings in pair.readings.items():
            frame = summary(readings, pair.alphabet)
            frame["norm_ratio"] = frame["state_norm"] / frame["state_norm"].iloc[0]
            names = {"model": pair.model, "style": style, "seed": int(seed or 0), "family": pair.family, "task": pair.task}
            long = frame.drop(columns="modal_token").melt("K", var_name="metric", value_name="value")
            parts.append(long.assign(**names, arm=arm_name(pair, period)))
    return pd.concat(parts, ignore_index=True)[["model", "style", "seed", "family", "task", "arm", "K", "metric", "value"]]
