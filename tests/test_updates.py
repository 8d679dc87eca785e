"""How a step moves the state, against the definition written out; and that changing the scale changes the scale alone."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.boundary import every, never
from lib.config import LoopedConfig
from lib.looped import build
from lib.tasks import Task, evaluation_set
from lib.training import Recipe, make_run
from lib.updates import MEASURES, Job, accuracy_at_scale, measured, moves, series, states, stored

TASK = Task("circuit", 3, 1)
INSTANCES = evaluation_set(TASK, 1, 12)
IDS = torch.as_tensor(INSTANCES.ids)


def model(seed=0, **values):
    return build(LoopedConfig(vocab_size=TASK.vocab_size, d_model=16, n_heads=2, d_ff=24, **values), seed).eval().double()


@settings(max_examples=15, deadline=None)
@given(st.sampled_from([never, every(1), every(2)]), st.integers(0, 3))
@torch.no_grad()
def test_moves_are_the_definition_written_out(boundary, seed):
    m, K = model(seed), 5
    found = moves(m, INSTANCES, K, boundary, batch_size=5)
    z = [m.embed(IDS), *m.trajectory(IDS, K, boundary)]
    rows = torch.arange(len(IDS))
    all_u = [m.norm(z[k]) if boundary.fires_before(k) else z[k] for k in range(K)]
    z = [state[rows, torch.as_tensor(INSTANCES.answer_position)] for state in z]
    for k in range(K):
        u = m.norm(z[k]) if boundary.fires_before(k) else z[k]
        expected = {
            "relative": (z[k + 1] - u).norm(dim=1) / u.norm(dim=1),
            "raw_to_raw": (z[k + 1] - z[k]).norm(dim=1) / z[k].norm(dim=1),
            "angle": torch.rad2deg(torch.acos(torch.cosine_similarity(u, z[k + 1]).clamp(-1, 1))),
            "to_final": (z[k + 1] - z[K]).norm(dim=1) / z[K].norm(dim=1),
            "angle_to_final": torch.rad2deg(torch.acos(torch.cosine_similarity(z[k + 1], z[K]).clamp(-1, 1))),
            "length": all_u[k].norm(dim=-1).mean(dim=1),
        }
        assert set(expected) == set(MEASURES)
        for name, value in expected.items():
            atol = 0.05 if "angle" in name else 1e-5  # the reference's acos is the coarse one near 0
            np.testing.assert_allclose(found[name][k], value.numpy(), rtol=1e-4, atol=atol, err_msg=name)


@pytest.mark.parametrize("boundary", [never, every(1)])
@torch.no_grad()
def test_without_lengths_it_is_the_models_trajectory_and_up_to_the_start_too(boundary):
    m = model()
    own = list(m.trajectory(IDS, 6, boundary))
    assert all(torch.equal(a, z) for a, (_, z) in zip(own, states(m, IDS, 6, boundary), strict=True))
    scaled = [z for _, z in states(m, IDS, 6, boundary, [3.0] * 6, start=4)]
    assert all(torch.equal(a, b) for a, b in zip(own[:4], scaled[:4], strict=True)) and not torch.equal(own[4], scaled[4])


@settings(max_examples=10, deadline=None)
@given(st.floats(0.1, 50), st.integers(0, 3))
@torch.no_grad()
def test_lengths_are_set_and_nothing_is_turned(length, start):
    m = model()
    before = None
    for t, (u, z) in enumerate(states(m, IDS, 5, never, [length] * 5, start)):
        if t >= start:
            torch.testing.assert_close(u.norm(dim=-1), torch.full(u.shape[:2], length, dtype=u.dtype))
            if before is not None:
                assert (torch.cosine_similarity(u, before, dim=-1) > 1 - 1e-9).all()
        before = z


@torch.no_grad()
def test_states_that_take_turns_are_refused_and_an_unrolled_core_is_its_trajectory():
    with pytest.raises(ValueError, match="state is 'shared': it must be 'single', since a step of H/L states moves one by"):
        moves(model(state="shared", h_cycles=2, l_cycles=1), INSTANCES, 4, never)
    m = model(unrolled=True, loops=4, injection="diagonal")
    own = list(m.trajectory(IDS, 4, every(1)))
    assert all(torch.equal(a, z) for a, (_, z) in zip(own, states(m, IDS, 4, every(1)), strict=True))
    with pytest.raises(ValueError, match="loops is 5: it must be at most 4"):
        moves(m, INSTANCES, 5, never)


@torch.no_grad()
def test_raw_length_before_a_boundary_norm_changes_nothing_but_what_epsilon_does():
    m = model()
    z = list(m.trajectory(IDS, 3, every(1)))[-1]
    e = m.embed(IDS)
    torch.testing.assert_close(m.step(z, e, 3, every(1)), m.step(7 * z, e, 3, every(1)), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_accuracy_at_a_scale_is_that_of_the_trajectory_written_out():
    m, K, norms, start = model(), 4, (2.0, 0.5, 30.0, 0.01), 2
    z = m.embed(IDS)
    rows, positions = torch.arange(len(IDS)), torch.as_tensor(INSTANCES.answer_position)
    expected = []
    for t in range(K):
        u = m.norm(z) if t >= 1 else z
        u = u / u.norm(dim=-1, keepdim=True) * norms[t] if t >= start else u
        z = u
        for layer in m.core:
            z = layer(z, m.context(IDS))
        expected.append((m.lm_head(m.norm(z[rows, positions])).argmax(-1).numpy() == INSTANCES.answer).mean())
    found = accuracy_at_scale(m, INSTANCES, K, every(1), norms, start, batch_size=5)
    np.testing.assert_allclose(found, expected)


@torch.no_grad()
def test_a_models_own_lengths_reproduce_it_and_accuracy_up_to_the_start_is_untouched():
    m, K = model(), 4
    one = type(INSTANCES)(**{k: (v[:1] if isinstance(v, np.ndarray) else v) for k, v in vars(INSTANCES).items()})
    ids = torch.as_tensor(one.ids[:, :1])  # of a single token, whose length is the average
    lengths = [float(u.norm(dim=-1)) for u, _ in states(m, ids, K, never)]
    own, scaled = ([z for _, z in states(m, ids, K, never, norms)] for norms in (None, lengths))
    for a, b in zip(own, scaled, strict=True):
        torch.testing.assert_close(a, b)
    plain = accuracy_at_scale(m, INSTANCES, K, never, None, 0)
    tiny = accuracy_at_scale(m, INSTANCES, K, never, (1e-6,) * K, 2)
    assert list(plain[:2]) == list(tiny[:2])


def test_a_measurement_is_kept_and_its_key_holds_what_determines_it(tmp_path):
    run = make_run(TASK, Recipe(5, 8, 4e-3, warmup=1), 0, d_model=16, n_heads=2, d_ff=24, loops=2)
    jobs = [Job(run, never, 4, 8, tmp_path), Job(run, never, 4, 8, tmp_path, (1.0,) * 4, 2), Job(run, every(1), 4, 8, tmp_path)]
    folders = [measured(job) for job in jobs]
    assert len(set(folders)) == 3 and measured(jobs[0]) == folders[0]
    assert set(series(folders[0])) == {"accuracy", *MEASURES} == set(series(folders[1]))
    assert all(len(v) == 4 for v in series(folders[0]).values())
    assert series(folders[1])["length"][2:].tolist() == pytest.approx([1.0, 1.0])
    assert stored(jobs[0]) == folders[0] and stored(Job(run, never, 5, 8, tmp_path)) is None
