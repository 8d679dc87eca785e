"""Whether an answer can still be read off a state by a linear map, where the model's own head no longer can.

Contract paper, section 4.2. Shapes: N instances, D d_model.
"""

from dataclasses import dataclass

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GroupKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

FOLDS = 5
PENALTY = 1.0  # inverse strength of the ridge, on standardised channels


@dataclass(frozen=True)
class Probe:
    """What a probe of one pair's state read: each instance while its skeleton was held out."""

    model: str
    task: str
    K: int  # the loop count whose state was probed
    right: np.ndarray  # (N,) bool, the probe's answer
    floor_right: np.ndarray  # (N,) bool, the most frequent answer of the same training folds
    cluster: np.ndarray  # (N,) skeletons


def probe(states: np.ndarray, answer: np.ndarray, cluster: np.ndarray, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(right, floor_right), each (N,) bool. states (N, D), answer (N,) tokens, cluster (N,) skeletons.

    Multinomial logistic regression on standardised channels, five folds of whole skeletons. Its floor is the most frequent
    answer of the same training folds. Raises ValueError with fewer skeletons than folds.
    """
    if len(np.unique(cluster)) < FOLDS:
        raise ValueError(f"there are {len(np.unique(cluster))} skeletons: a probe of {FOLDS} folds needs as many")
    right, floor_right = np.zeros(len(answer), dtype=bool), np.zeros(len(answer), dtype=bool)
    folds = GroupKFold(n_splits=FOLDS, shuffle=True, random_state=seed)
    for train, held_out in folds.split(states, answer, cluster):
        tokens, counts = np.unique(answer[train], return_counts=True)
        floor_right[held_out] = answer[held_out] == tokens[counts.argmax()]
        if len(tokens) == 1:
            right[held_out] = floor_right[held_out]
            continue
        fitted = make_pipeline(StandardScaler(), LogisticRegression(C=PENALTY, max_iter=2000)).fit(states[train], answer[train])
        right[held_out] = fitted.predict(states[held_out]) == answer[held_out]
    return right, floor_right
