"""Seeds trained at once: each ends where it ends alone, with the files it leaves alone, also after kills and divergence."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch._dynamo.backends.debugging import aot_eager

from lib import axes_arms, engine, experiment, experts, fused, looped, muon, params, standins, store, together, training
from lib.boundary import never
from lib.mixture import Mixture
from lib.paths import ROOT
from lib.tasks import Task
from lib.together import Stack, activations, clip, group_size, groups, reason
from lib.training import One, Recipe, batches_from, loop_count, make_run, read_checkpoint
from tests.models import EXPERTS, VARIANTS

SMALL = {"d_model": 16, "n_heads": 2, "d_ff": 24, "loops": 3}
SANDWICH = {"prelude": 1, "core": 1, "coda": 1}
HL = {"core": 2, "loops": 4}
SAMPLED = {"loop_sampling": "poisson_lognormal"}
MIXED = Mixture((Task("circuit", 3, 2), Task("hops", 5, 1), Task("paragg", 2, 1, circuit_width=3)))
# name -> (model, recipe, task): what each of them could get wrong
CASES = {
    "boundary never": ({}, {}),
    "boundary every step, its own norm": ({"boundary": 1, "shared_norm": False}, {}),
    "Ouro": (VARIANTS["Ouro"], {"loss": "exit_weighted", "exit_entropy": 0.05}),
    "Huginn": (SANDWICH | VARIANTS["Huginn"] | {"state_std": 0.5}, SAMPLED | {"fresh_state": True}),
    "axes paper, noise": (SANDWICH | VARIANTS["axes paper"], {"fresh_state": True}),
    "noise without injection": ({"state_init": "noise"}, {}),
    "the hash": (SANDWICH | VARIANTS["axes paper"], {}),
    "from tokens, two layers": (VARIANTS["from tokens"] | {"core": 2, "boundary": 2}, {}),
    "shared states": (HL | VARIANTS["shared states"], {}),
    "split states": (HL | VARIANTS["split states"], {"fresh_state": True}),
    "unrolled": (VARIANTS["unrolled, injected"] | {"loops": 3}, {}),
    "truncated": ({"loops": 4, "core": 2, "boundary": 1}, {"backprop": 2}),
    "grouped queries, raw": (VARIANTS["grouped queries"] | {"readout": "raw"}, {}),
    "sampled, every second step": ({"boundary": 2}, SAMPLED),
    "mixture": (SANDWICH | {"boundary": 1}, {}, MIXED),
}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def runs_of(model=None, recipe=None, task=None, seeds=3, **changed):
    how = {"steps": 20, "batch_size": 8, "lr": 2.0e-3, "warmup": 5, "weight_decay": 0.1, "clip": 0.5} | (recipe or {}) | changed
    return [make_run(task or Task("circuit", 3, 2), Recipe(**how), seed, **(SMALL | (model or {}))) for seed in range(seeds)]


def double(monkeypatch):
    """Every model is made in float64 from here on."""

    def build(config, seed):
        return looped.build(config, seed).double()

    for module in (together, training):
        monkeypatch.setattr(module, "build", build)


def side_by_side(runs, stack=None, steps=None):
    """Losses (steps, S) of a group and of its seeds alone, and the largest difference of their weights at the end."""
    stack, alone = stack or Stack(runs), [One(run) for run in runs]
    feeds, found = [batches_from(run, 0) for run in runs], ([], [])
    for step in range(steps or runs[0].recipe.steps):
        batches = [next(feed) for feed in feeds]
        loops = [loop_count(step, run.recipe, run.config().loops, run.seed) for run in runs]
        found[0].append([loss for (loss,) in stack.update(batches, loops, step)])
        found[1].append([one.update([batch], [n], step)[0][0] for one, batch, n in zip(alone, batches, loops, strict=True)])
    apart = [
        float((p - q).detach().abs().max())
        for s, one in enumerate(alone)
        for p, q in zip(stack.model(s).parameters(), one.own.parameters(), strict=True)
    ]
    return np.array(found[0]), np.array(found[1]), max(apart)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", CASES)
def test_a_group_takes_the_steps_of_its_seeds(name, monkeypatch):
    double(monkeypatch)
    runs = runs_of(*CASES[name])
    together_, alone, apart = side_by_side(runs)
    np.testing.assert_allclose(together_, alone, rtol=0, atol=1e-9)
    assert apart < 1e-9 and len(np.unique(alone[0])) == 3
    if "sampled" in name:
        assert len({loop_count(0, run.recipe, 3, run.seed) for run in runs}) > 1, "seeds have loop counts of their own"


def test_in_single_precision_too():
    together_, alone, apart = side_by_side(runs_of(*CASES["Ouro"]))
    np.testing.assert_allclose(together_, alone, rtol=0, atol=1e-5)
    assert apart < 1e-4


def test_the_hand_written_layers_are_left_out_and_only_there():
    runs = runs_of(steps=1)
    with mock.patch.object(fused, "block", side_effect=fused.block) as used:
        Stack(runs).update([next(batches_from(run, 0)) for run in runs], [3] * 3, 0)
        assert not used.called
        One(runs[0]).update([next(batches_from(runs[0], 0))], [3], 0)
        assert used.called


@given(st.integers(0, 2**31), st.sampled_from([1e-3, 1.0, 1e3]))
@settings(deadline=None, max_examples=20)
def test_each_seed_is_clipped_by_its_own_norm(seed, largest):
    generator = torch.Generator().manual_seed(seed)
    shapes, sizes = ((4, 3), (5,), (2, 2, 2)), torch.tensor([0.01, 1.0, 100.0])
    grads = [torch.randn(3, *shape, generator=generator) * sizes.view(3, *[1] * len(shape)) for shape in shapes]
    stacked = [torch.nn.Parameter(torch.zeros_like(g)) for g in grads] + [torch.nn.Parameter(torch.zeros(3, 1))]
    for p, g in zip(stacked, grads, strict=False):
        p.grad = g.clone()
    clip(stacked, largest)
    for s in range(3):
        own = [torch.nn.Parameter(torch.zeros_like(g[s])) for g in grads]
        for p, g in zip(own, grads, strict=True):
            p.grad = g[s].clone()
        torch.nn.utils.clip_grad_norm_(own, largest)
        for p, q in zip(stacked, own, strict=False):
            torch.testing.assert_close(p.grad[s], q.grad)


@pytest.mark.parametrize("shape", [(12, 5), (5, 12), (8, 8)])
def test_stacked_matrices_move_as_under_torchs_muon(shape):
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(3, *shape, generator=generator)
    stacked, alone = torch.nn.Parameter(start.clone()), [torch.nn.Parameter(m.clone()) for m in start]
    ours, theirs = muon.Muon([stacked], lr=0.1, weight_decay=0.1), torch.optim.Muon(alone, lr=0.1, weight_decay=0.1)
    for _ in range(4):
        stacked.grad = torch.randn(3, *shape, generator=generator) * torch.tensor([0.01, 1.0, 100.0])[:, None, None]
        for p, g in zip(alone, stacked.grad, strict=True):
            p.grad = g.clone()
        ours.step(), theirs.step()
    moved = torch.stack([p.detach() for p in alone]) - start
    assert float((stacked.detach() - start - moved).norm() / moved.norm()) < 1e-2
    one, other = ours.state_dict()["param_groups"][0], theirs.state_dict()["param_groups"][0]
    assert one | {"params": 0} == other | {"params": 0}, "a checkpoint of one is read by the other"
    torch.testing.assert_close(ours.state[stacked]["momentum_buffer"][1], theirs.state[alone[1]]["momentum_buffer"])


def test_orthogonalised_is_newton_and_schulzs_quintic():
    matrices = torch.randn(3, 7, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    a, b, c = how = 3.4445, -4.7750, 2.0315
    found = muon.orthogonalised(matrices, how, 5, 1e-7, torch.float64)
    for matrix, own in zip(matrices, found, strict=True):
        u, s, v = torch.linalg.svd(matrix / matrix.norm(), full_matrices=False)
        for _ in range(5):
            s = a * s + b * s**3 + c * s**5
        torch.testing.assert_close(own, u * s @ v, rtol=1e-9, atol=1e-9)
        assert 0.3 < s.min() and s.max() < 1.6


def test_muon_in_a_group():
    together_, alone, apart = side_by_side(runs_of(optimizer="muon", lr=0.02, batch_size=4))
    np.testing.assert_allclose(together_, alone, rtol=1e-2)
    assert apart < 1e-2 and not np.allclose(alone[0], alone[-1], rtol=2e-2)


def close(a, b, exact=False, apart=1e-4):
    """Whether two finished folders hold the same weights, snapshots and losses, the weights at most `apart` apart."""
    files = sorted(path.name for path in a.iterdir())
    assert files == sorted(path.name for path in b.iterdir())
    assert json.loads((a / "config.json").read_text()) == json.loads((b / "config.json").read_text())
    for file in (name for name in files if name.endswith(".safetensors")):
        one, other = (load_file(folder / file) for folder in (a, b))
        assert one.keys() == other.keys()
        for k in one:
            torch.testing.assert_close(one[k], other[k], rtol=0, atol=0 if exact else apart)
    losses = [np.load(folder / "losses.npy") for folder in (a, b)]
    np.testing.assert_allclose(*losses, rtol=0, atol=0 if exact else 1e-4)
    one, other = (json.loads((folder / "training.json").read_text()) for folder in (a, b))
    assert one.keys() == other.keys() and (one["diverged"], one["steps"]) == (other["diverged"], other["steps"])
    return True


def test_a_group_leaves_what_its_seeds_leave(tmp_path):
    runs, told = runs_of({"tie_word_embeddings": True}, SAMPLED, snapshots=(4, 9), steps=12), []
    made = together.trained(runs, tmp_path / "group", lambda *counts: told.append(counts))
    assert told[0] == (0, 36) and told[-1] == (36, 36) and told == sorted(told)
    for run, folder in zip(runs, made, strict=True):
        assert close(folder, training.trained(run, tmp_path / "alone"))
        model = training.load(run, tmp_path / "group", 4)
        assert not model.training and model.lm_head.weight is model.embed_tokens.weight
    assert len({(folder / "model.safetensors").read_bytes() for folder in made}) == 3
    with mock.patch.object(training, "follow", side_effect=AssertionError):
        assert together.trained(runs[::-1], tmp_path / "group") == made[::-1]
        assert training.trained(runs[1], tmp_path / "group") == made[1]
    seconds = [json.loads((folder / "training.json").read_text())["seconds"] for folder in made]
    assert len(set(seconds)) == 1 and 0 < seconds[0], "a share of the group's"
    with pytest.raises(ValueError, match="differ in more than the seed"):
        together.trained([runs[0], *runs_of(lr=1.0e-3)], tmp_path)


class Killed(Exception):
    pass


def killed_at(step):
    """A report that stops a training as a kill would once `step` steps (of all its seeds) are done."""

    def report(done, total):
        if done == step:
            raise Killed

    return report


@pytest.mark.parametrize("recipe", [{"snapshots": (4, 9)}, {"optimizer": "muon", "lr": 0.02}, SAMPLED])
def test_a_group_that_was_killed_ends_bitwise_as_one_that_was_not(recipe, tmp_path):
    runs = runs_of(recipe=recipe, steps=12)
    unbroken = together.trained(runs, tmp_path / "unbroken")
    for step in (5, 8):
        with pytest.raises(Killed):
            together.trained(runs, tmp_path / "killed", killed_at(3 * step), checkpoint_seconds=-1)
    for one, other in zip(unbroken, together.trained(runs, tmp_path / "killed"), strict=True):
        assert close(one, other, exact=True)
        said = (other / "train.log").read_text()
        assert "resumed from step 5 of 12" in said and "resumed from step 8 of 12" in said
        assert not list(other.glob("checkpoint*"))


def shapes(value):
    """A checkpoint's structure: its keys, and the shapes and types of its tensors."""
    if isinstance(value, dict):
        return {k: shapes(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [shapes(v) for v in value]
    return (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else type(value)


@pytest.mark.parametrize(("optimizer", "apart"), [("adamw", 1e-5), ("muon", 1e-3)])  # Muon rounds its updates to bfloat16
def test_a_group_and_a_single_seed_go_on_from_each_others_checkpoints(optimizer, apart, tmp_path):
    runs = runs_of(steps=12, optimizer=optimizer)
    names = [store.key(run.spec()) for run in runs]
    with pytest.raises(Killed):
        together.trained(runs, tmp_path / "group", killed_at(18), checkpoint_seconds=-1)
    for run in runs:
        with pytest.raises(Killed):
            training.trained(run, tmp_path / "singles", killed_at(6), checkpoint_seconds=-1)
    files = [tmp_path / folder / f"{name}.partial" / "checkpoint.pt" for folder in ("group", "singles") for name in names]
    found = [shapes(read_checkpoint(file, "cpu")) for file in files]
    assert all(one == found[-1] for one in found)
    assert max(file.stat().st_size for file in files) < 1.1 * min(file.stat().st_size for file in files), "its own slice alone"
    alone = [training.trained(run, tmp_path / "alone") for run in runs]
    # a single seed from the group's, then the group from the singles'
    assert close(training.trained(runs[1], tmp_path / "group"), alone[1], apart=apart)
    assert "resumed from step 6 of 12" in (tmp_path / "group" / names[1] / "train.log").read_text()
    with mock.patch.object(together, "Stack", side_effect=Stack) as made:
        for folder, one in zip(together.trained(runs, tmp_path / "singles"), alone, strict=True):
            assert close(folder, one, apart=apart) and "resumed from step 6 of 12" in (folder / "train.log").read_text()
    assert [len(call.args[0]) for call in made.call_args_list] == [3]


def test_seeds_that_stand_at_different_steps_make_groups_of_their_own(tmp_path):
    runs = runs_of(steps=12, seeds=4)
    training.trained(runs[3], tmp_path / "store")
    with pytest.raises(Killed):
        training.trained(runs[1], tmp_path / "store", killed_at(6), checkpoint_seconds=-1)
    with mock.patch.object(together, "Stack", side_effect=Stack) as made:
        found = together.trained(runs, tmp_path / "store")
    assert [[run.seed for run in call.args[0]] for call in made.call_args_list] == [[0, 2], [1]]
    assert all(close(folder, training.trained(run, tmp_path / "alone")) for run, folder in zip(runs, found, strict=True))


def test_a_seed_that_diverges_leaves_its_group_as_it_was(tmp_path, monkeypatch):
    struck, before = [], {}

    class Struck(Stack):
        def update(self, batches, loops, step):
            if step == 5 and not struck:
                struck.append(step)
                with torch.no_grad():
                    self.parameters["lm_head.weight"][1] = 3.0e38
                before.update({name: p[1].detach().clone() for name, p in self.parameters.items()})
            return super().update(batches, loops, step)

    runs = runs_of(steps=12, snapshots=(8,))
    monkeypatch.setattr(together, "Stack", Struck)
    made = together.trained(runs, tmp_path / "group")
    done = json.loads((made[1] / "training.json").read_text())
    assert done["diverged"] and done["steps"] == 5 and not (made[1] / "snapshot_8.safetensors").exists()
    losses, kept = np.load(made[1] / "losses.npy"), load_file(made[1] / "model.safetensors")
    assert np.isfinite(losses[:5]).all() and not np.isfinite(losses[5:]).any()
    assert all(torch.equal(kept[name], before[name]) for name in kept), "the step that diverged moved nothing"
    assert "diverged: the loss at step 5 is" in (made[1] / "train.log").read_text()
    for s in (0, 2):
        assert close(made[s], training.trained(runs[s], tmp_path / "alone"))


def test_a_group_in_which_every_seed_diverges_ends(tmp_path):
    runs = runs_of(lr=1.0e30, clip=1.0e30)
    for run, folder in zip(runs, together.trained(runs, tmp_path / "group"), strict=True):
        done = json.loads((folder / "training.json").read_text())
        alone = json.loads((training.trained(run, tmp_path / "alone") / "training.json").read_text())
        assert done["diverged"] and alone["diverged"] and 0 < done["steps"] < 20


@pytest.mark.parametrize(
    "model, recipe, why",
    [
        (EXPERTS, {}, "expert"),
        ({}, SAMPLED | {"backprop": 2}, "gradients"),
        ({"exit_gate": True}, SAMPLED | {"loss": "exit_weighted"}, "exit gate"),
        ({"boundary": 1, "shared_norm": False}, SAMPLED, "without a gradient"),
        (HL | VARIANTS["shared states"], SAMPLED, "without a gradient"),
    ],
)
def test_what_cannot_be_grouped_is_trained_one_after_another(model, recipe, why, tmp_path):
    runs = runs_of(model, recipe, steps=6, seeds=2)
    assert why in reason(runs[0]) and group_size(runs[0], 2**40) == 1 and groups(runs, 2**40) == [[run] for run in runs]
    if why in ("expert", "gradients"):
        for run, folder in zip(runs, together.trained(runs, tmp_path / "group"), strict=True):
            assert close(folder, training.trained(run, tmp_path / "alone"), exact=True)
            assert (folder / "balance.npy").exists() == (why == "expert")


def test_every_other_case_can_be_grouped():
    assert not any(reason(runs_of(*case)[0]) for case in CASES.values())


WANT = """
import sys, time
from pathlib import Path
from lib.store import Store

def build(folders):
    with open(Path(sys.argv[1]).with_name("calls.txt"), "a") as calls:
        calls.write("".join(folders))
    time.sleep(0.5)
    for name, folder in folders.items():
        (folder / "result.json").write_text(name)

names = list(sys.argv[2])
print(*[folder.name for folder in Store(sys.argv[1]).make_all(names, [{}] * len(names), build)])
"""


def test_processes_that_want_some_of_the_same_runs_make_each_once(tmp_path):
    wanted = ["abc", "cba", "bd", "db"]
    commands = [[sys.executable, "-c", WANT, str(tmp_path / "runs"), names] for names in wanted]
    processes = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for command in commands]
    told = [process.communicate(timeout=60)[0].split() for process in processes]
    assert told == [list(names) for names in wanted], "in the order asked for"
    assert sorted((tmp_path / "calls.txt").read_text()) == list("abcd")
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == list("abcd")


def test_runs_made_together_are_made_where_they_are_missing_and_kept_when_building_fails(tmp_path):
    runs, seen = store.Store(tmp_path), []
    runs.make("b", {"name": "b"}, lambda folder: (folder / "result.json").write_text("{}"))

    def fail(folders):
        seen.append(sorted(folders))
        for folder in folders.values():
            (folder / "checkpoint.pt").write_text("step 3")
        raise KeyboardInterrupt

    def build(folders):
        seen.append(sorted(folders))
        for folder in folders.values():
            (folder / "result.json").write_text((folder / "checkpoint.pt").read_text())

    specs = [{"name": name} for name in "abca"]
    with pytest.raises(KeyboardInterrupt):
        runs.make_all(list("abca"), specs, fail)
    assert runs.health()["partial"] == 2 and not list(tmp_path.glob("*.lock"))
    made = runs.make_all(list("abca"), specs, build)
    assert [folder.name for folder in made] == list("abca") and seen == [["a", "c"]] * 2
    assert json.loads((made[2] / "spec.json").read_text()) == {"name": "c"}
    assert (made[0] / "result.json").read_text() == "step 3" and not (made[0] / "checkpoint.pt").exists()
    assert runs.make_all(list("abca"), specs, fail) == made


def test_more_memory_takes_more_seeds_and_a_larger_step_takes_fewer():
    rooms = (0, 2**10, 2**25, 2**30)
    found = [group_size(runs_of()[0], free) for free in rooms]
    assert found == sorted(found) and found[0] == found[1] == 1 < found[2] < found[3]
    for larger in (runs_of(batch_size=32), runs_of({"core": 3}), runs_of({"d_ff": 512}), runs_of({}, SAMPLED)):
        assert group_size(larger[0], rooms[3]) < found[3]


@pytest.mark.parametrize("name", ["boundary never", "Ouro", "axes paper, noise", "sampled, every second step", "mixture"])
def test_a_seeds_bytes_are_those_its_pass_keeps(name):
    runs, kept = runs_of(*CASES[name]), {}
    stack, most = Stack(runs), max(loop_count(step, run.recipe, 3, run.seed) for run in runs[:1] for step in range(20))
    feeds = [batches_from(run, 0) for run in runs]
    batches = max(([next(feed) for feed in feeds] for _ in range(3)), key=lambda some: some[0].ids.size)

    def keep(tensor):
        kept[id(tensor.untyped_storage())] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        stack.update(batches, [most] * 3, 0)
    own = {id(p.untyped_storage()) for p in stack.parameters.values()}
    counted = sum(held.nbytes() for number, held in kept.items() if number not in own) / 3
    assert counted == pytest.approx(activations(runs[0]), rel=0.05)


def test_groups_hold_every_run_once_by_all_but_the_seed():
    arm, other = runs_of(seeds=7), runs_of({"boundary": 1}, seeds=2)
    each = group_size(arm[0], 2**40) and together.PER_PARAMETER * training.build(arm[0].config(), 0).num_parameters()
    room = int(3.5 * (each + activations(arm[0])) / together.FREE)
    found = groups([*arm, *other, *arm], room)
    assert [[run.seed for run in part] for part in found] == [[0, 1, 2], [3, 4], [5, 6], [0, 1]]
    assert found[-1] == other and groups(arm, 2**40) == [arm] and groups([], 0) == []
    assert [len(part) for part in groups(arm, 0)] == [1] * 7
    assert groups(arm) == [arm], "what is free is measured"


def test_compiled_is_the_same(monkeypatch):
    double(monkeypatch)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return aot_eager(graph, inputs)  # which needs no compiler

    monkeypatch.setattr(together, "COMPILED", {"backend": backend})
    runs = runs_of({"boundary": 1, "loops": 2, "state_init": "noise"}, fresh_state=True)
    together_, alone, apart = side_by_side(runs, Stack(runs, compiled=True), steps=4)
    np.testing.assert_allclose(together_, alone, rtol=0, atol=1e-9)
    assert apart < 1e-9 and len(graphs) == 1
    assert not Stack(runs).compiled, "on a CPU it is not"


def test_where_compiling_fails_the_plain_program_is_used(monkeypatch):
    def broken(function, **how):
        def fail(*given):
            raise RuntimeError("no compiler here\nat all")

        return fail

    runs = runs_of(steps=2)
    monkeypatch.setattr(torch, "compile", broken)
    batches = [next(batches_from(run, 0)) for run in runs]
    stack = Stack(runs, compiled=True)
    with pytest.raises(RuntimeError, match="no compiler here"):
        stack.update(batches, [3] * 3, 0)
    stack.may_fail = True  # as where nobody asked for it
    with pytest.warns(UserWarning, match="without compiling, which failed: no compiler here$"):
        stack.update(batches, [3] * 3, 0)
    assert np.isfinite(stack.update(batches, [3] * 3, 1)).all()


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("name", ["boundary never", "Ouro", "Huginn"])
def test_bfloat16_is_near_float32_together_and_alone(name):
    full = side_by_side(runs_of(*CASES[name]), steps=8)[1]
    model, recipe, *_ = CASES[name]
    runs = runs_of(model, recipe, precision="bfloat16")
    together_, alone, _ = side_by_side(runs, steps=8)
    for found in (together_, alone):
        assert np.isfinite(found).all() and (found != full).all()
        np.testing.assert_allclose(found, full, rtol=0.03)
    assert {p.dtype for p in Stack(runs).parameters.values()} == {torch.float32}


@pytest.mark.parametrize("width", [8, 7])
def test_experts_in_bfloat16(width):
    found = []
    for precision in ("float32", "bfloat16"):
        run = runs_of(EXPERTS | {"d_expert": width}, precision=precision, steps=3, balance=0.01)[0]
        one, feed = One(run), batches_from(run, 0)
        with mock.patch.object(experts, "grouped", side_effect=experts.grouped) as products:
            found.append([one.update([next(feed)], [3], step) for step in range(3)])
        assert {call.args[0].dtype for call in products.call_args_list} == {getattr(torch, precision)}
    np.testing.assert_allclose(*found, rtol=0.03)
    assert not np.array_equal(*found)


def test_precision_is_part_of_the_key_unless_it_is_the_one_there_was():
    plain, half = runs_of()[0], runs_of(precision="bfloat16")[0]
    assert "precision" not in plain.spec()["recipe"] and half.spec()["recipe"]["precision"] == "bfloat16"
    with pytest.raises(ValueError, match="precision is 'float16': it must be one of float32, bfloat16"):
        runs_of(precision="float16")


def test_batches_made_in_the_background_are_the_same(monkeypatch):
    monkeypatch.setattr(training, "BATCHES_AT_ONCE", 3)
    run = runs_of(steps=11)[0]
    with ThreadPoolExecutor(1) as pool:
        for start in (0, 4, 10):
            plain, ahead = list(batches_from(run, start)), list(batches_from(run, start, pool))
            assert len(plain) == len(ahead) == 11 - start
            assert all(np.array_equal(a.ids, b.ids) for a, b in zip(plain, ahead, strict=True))


def jobs_of(runs, root):
    return [experiment.Job(run, ((never, 2),), 8, root) for run in runs]


def test_a_gpus_seeds_are_trained_ahead_in_groups_and_one_worker_does_the_rest(tmp_path, monkeypatch):
    jobs = jobs_of([*runs_of(steps=4), *runs_of({"boundary": 1}, steps=4)], tmp_path)
    training.trained(jobs[0].run, tmp_path)
    assert not together.ahead(jobs, "nothing") and len(list(tmp_path.iterdir())) == 1, "a CPU's are not"
    monkeypatch.setattr(together, "_on_gpu", lambda run: True)
    asked = []

    def one_worker(function, jobs, find, workers, title):
        asked.append(workers)
        return [function(job) for job in jobs]

    monkeypatch.setattr(engine, "map_missing", one_worker)
    with (
        mock.patch.object(together, "Stack", side_effect=Stack) as made,
        mock.patch.object(training, "train", side_effect=AssertionError),
    ):
        found = experiment.make(jobs, workers=5, title="arm")
    assert sorted(len(call.args[0]) for call in made.call_args_list) == [2, 3] and asked == [1]
    assert [folders["model"].name for folders in found] == [store.key(job.run.spec()) for job in jobs]
    with mock.patch.object(together, "groups", return_value=[]) as wanted:
        assert together.ahead(jobs) and wanted.call_args.args == ([],), "what is stored is not trained again"
    monkeypatch.setenv("LOOPED_ENGINE", "ray")
    assert not together.ahead(jobs), "a cluster has GPUs of its own"


def test_a_group_that_does_not_fit_is_halved(tmp_path, monkeypatch):
    sizes = []

    class Large(Stack):
        def __init__(self, runs, compiled=None):
            sizes.append(len(runs))
            if len(runs) > limit:
                raise torch.OutOfMemoryError
            super().__init__(runs, compiled)

    jobs = jobs_of(runs_of(steps=2, seeds=5), tmp_path)
    monkeypatch.setattr(together, "_on_gpu", lambda run: True)
    monkeypatch.setattr(together, "Stack", Large)
    limit = 0
    with pytest.raises(torch.OutOfMemoryError):
        together.ahead(jobs)
    assert sizes[:2] == [5, 3] or sizes[:2] == [5, 2]
    sizes.clear()
    limit = 2
    assert together.ahead(jobs) and sorted(sizes) == [1, 2, 2, 3, 5]
    assert all(store.Store(tmp_path).find(store.key(job.run.spec())) for job in jobs)


@pytest.mark.parametrize(("device", "precision"), [("cpu", "float32"), ("cuda", "bfloat16"), ("cuda:1", "bfloat16")])
def test_notebooks_train_in_half_precision_on_a_gpu_alone(device, precision):
    def at(notebook):
        return params.load(notebook, "smoke") | {"device": device}

    runs = [experiment.arm_run(at("4_3_scratch_training"), "circuit", "no_norm", 0)]
    runs += [standins.run_of(at("4_1_asymmetry"), style, 0) for style in ("ouro-1", "huginn")]
    runs += [axes_arms.run_of(at("dense_axes"), "full", 0)]
    assert {run.recipe.precision for run in runs} == {precision}
