"""The linear probe on made-up states: what it reads, what it must not, and its floor."""

import numpy as np
import pytest
from sklearn.model_selection import GroupKFold

from lib.probe import FOLDS, probe

CLUSTER = np.repeat(np.arange(40), 4)
ANSWER = np.tile([3, 7], 80)  # balanced within every skeleton


def noise(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def test_a_linearly_readable_state_is_read():
    answer = np.random.default_rng(1).integers(0, 5, 160)
    state = np.eye(5)[answer] @ noise(5, 12) + 0.05 * noise(160, 12, seed=1)
    right, floor_right = probe(state, answer, CLUSTER)
    assert right.shape == floor_right.shape == (160,) and right.dtype == floor_right.dtype == bool
    assert right.mean() > 0.98 and floor_right.mean() < 0.4


def test_the_scale_and_place_of_a_channel_do_not_matter():
    state = noise(160, 6) + np.where(ANSWER == 7, 1.0, 0.0)[:, None]
    scaled = state * 10.0 ** np.arange(-3, 3) + 100 * noise(6, seed=2)
    ours, theirs = (probe(states, ANSWER, CLUSTER)[0] for states in (state, scaled))
    assert ours.mean() > 0.75 and (ours == theirs).mean() > 0.98


def test_an_answer_that_is_no_linear_function_is_not_read():
    signs = np.random.default_rng(3).integers(0, 2, (400, 2))
    right, floor_right = probe(signs + 0.1 * noise(400, 2), signs[:, 0] ^ signs[:, 1], np.repeat(np.arange(100), 4))
    assert right.mean() < 0.6 and floor_right.mean() < 0.6


def test_noise_is_read_at_its_floor():
    # over several draws: one probe of 160 instances has a standard error of 0.04
    excess = []
    for seed in range(6):
        right, floor_right = probe(noise(160, 8, seed=seed), ANSWER, CLUSTER)
        assert floor_right.mean() == 0.5  # balanced within skeletons, so in every fold
        excess.append(right.mean() - 0.5)
    assert abs(np.mean(excess)) < 0.05


def test_whole_skeletons_are_held_out():
    # a code of the skeleton gives the answer away to whoever saw a sibling
    answer = np.random.default_rng(4).integers(0, 2, 40)[CLUSTER]
    state = np.eye(40)[CLUSTER]
    right, floor_right = probe(state, answer, CLUSTER)
    assert (right == floor_right).mean() > 0.9 and right.mean() < 0.75
    alone, _ = probe(state, answer, np.arange(160))
    assert alone.mean() > 0.95
    # one fold holds all of a skeleton, so its equal instances are all right or all wrong
    assert all(len(set(floor_right[CLUSTER == c])) == len(set(right[CLUSTER == c])) == 1 for c in range(40))


def test_the_floor_is_the_majority_of_the_training_folds():
    answer = np.where(np.random.default_rng(5).random(160) < 0.8, 3, 7)
    right, floor_right = probe(np.zeros((160, 4)), answer, CLUSTER)
    assert (floor_right == (answer == 3)).all()
    assert (right == floor_right).all()  # a state that says nothing is guessed at the floor
    # a majority of all instances that is none of the training folds' does not count
    answer = np.where(np.isin(CLUSTER, np.unique(CLUSTER)[::2]), 3, 7)
    expected = np.zeros(160, dtype=bool)
    for train, held_out in GroupKFold(FOLDS, shuffle=True, random_state=0).split(answer, answer, CLUSTER):
        counts = {token: (answer[train] == token).sum() for token in (3, 7)}
        expected[held_out] = answer[held_out] == max(counts, key=counts.get)  # of equal ones the smaller token
    assert (probe(np.zeros((160, 4)), answer, CLUSTER)[1] == expected).all()


def test_an_answer_of_one_token_is_its_floor():
    right, floor_right = probe(noise(160, 4), np.full(160, 3), CLUSTER)
    assert right.all() and floor_right.all()
    # one other instance: the folds trained without it know one token, and miss it
    answer = np.full(160, 3)
    answer[7] = 9
    right, floor_right = probe(noise(160, 4), answer, CLUSTER)
    assert not floor_right[7] and not right[7] and floor_right.sum() == 159


def test_too_few_skeletons_are_refused():
    with pytest.raises(ValueError, match="there are 4 skeletons: a probe of 5 folds needs as many"):
        probe(noise(16, 2), np.tile([0, 1], 8), np.repeat(np.arange(4), 4))
    right, _ = probe(noise(20, 2), np.tile([0, 1], 10), np.repeat(np.arange(5), 4))
    assert right.shape == (20,)


def test_the_same_seed_gives_the_same_folds():
    state, answer = noise(160, 8), np.random.default_rng(6).integers(0, 2, 160)
    first, again, other = (probe(state, answer, CLUSTER, seed) for seed in (0, 0, 1))
    assert (first[0] == again[0]).all() and (first[1] == again[1]).all()
    assert (first[0] != other[0]).any()
