"""Accuracy by task, forced routes and routing tables against plain loops, and the store that keeps them."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from lib import axes_arms, experts, group_scores, params, paths, pilot, task_groups
from lib.experts import Routes
from lib.group_scores import (
    DRAWS,
    ROUTES,
    ROUTING,
    UNSEEN,
    Job,
    accuracy,
    collect,
    floors,
    routing,
    routing_of,
    sets,
    stored,
    table,
)
from lib.looped import build
from lib.store import key
from lib.task_constrained import letter_tokens
from lib.training import load
from tests.test_axes_arms import P
from tests.test_task_constrained import LETTERS, names, obeys

N = 12
SMALL = P | {"steps": 12, "batch_size": 8, "warmup": 2, "d_model": 16, "d_ff": 24, "n_experts": 4, "d_expert": 8}
SMALL |= {"lr": [2.0e-2] * len(P["lr"]), "lr_moe": [2.0e-2] * 3, "prelude": 1, "recurrent": 1, "coda": 1, "updates": 4}
MIXTURE = task_groups.make(SMALL)
FAMILIES = [task.family for task in MIXTURE.tasks]
CELLS = [
    {"arm": "noise", "seed": 0},
    {"arm": "sandwich", "seed": 0},
    {"arm": "sandwich", "seed": 1},  # diverges
    {"arm": "huginn_moe", "seed": 0},
    {"arm": "feedforward_moe", "seed": 0},
]


def job(root, arm, seed, n=N):
    lr = 1.0e30 if (arm, seed) == ("sandwich", 1) else None
    return Job(axes_arms.run_of(SMALL, arm, seed, lr), n, root, ROUTES[1:] if arm.endswith("_moe") else ())


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Jobs of CELLS, made by two worker processes."""
    root = tmp_path_factory.mktemp("groups")
    jobs = [job(root, **cell) for cell in CELLS]
    return jobs, group_scores.make(jobs, workers=2, title="groups")


def model_of(arm, seed=0):
    """An untrained model of an arm."""
    return build(axes_arms.config_of(SMALL, arm), seed).eval()


# ---- accuracy


def predictions(model, instances, seed=0):
    """The likeliest token at each instance's answer position, one instance at a time, from all logits."""
    found = []
    for ids, at in zip(instances.ids, instances.answer_position, strict=True):
        with torch.no_grad():
            logits = model(torch.as_tensor(ids)[None], state_seed=UNSEEN + seed).logits
        found.append(int(logits[0, at].argmax()))
    return np.array(found)


@pytest.mark.parametrize("arm", ["sandwich_injected", "noise"])
@pytest.mark.parametrize("task", ["hops", "circuit", "arithmetic", "knowledge"])
def test_accuracy_is_that_of_a_plain_loop(arm, task, monkeypatch):
    monkeypatch.setattr(group_scores, "BATCH", 5)
    model, some = model_of(arm), MIXTURE.evaluation_set(task, MIXTURE.task(task).depths[-1], N)
    for seed in (0, 3):
        said = predictions(model, some, seed)
        for right in (0, 7, N):
            answer = np.where(np.arange(N) < right, said, (said + 1) % MIXTURE.vocab_size)
            assert accuracy(model, MIXTURE, task, dataclasses.replace(some, answer=answer), seed) == right / N


def test_a_string_is_right_when_the_checker_accepts_what_is_written():
    task, first = MIXTURE.task("constrained"), MIXTURE.first_id("constrained")
    some = MIXTURE.evaluation_set("constrained", task.constraints, 20)
    seen = []

    class Says:
        """Writes one text, whatever it is asked."""

        device = torch.device("cpu")

        def __init__(self, text):
            self.text = text

        def __call__(self, ids, state_seed, routes, answer_positions):
            seen.append((ids.shape[1], state_seed, routes, answer_positions.tolist()))
            logits = torch.zeros(len(ids), 1, MIXTURE.vocab_size)
            logits[..., first + self.text[ids.shape[1] - task.constraints]] = 1.0
            return SimpleNamespace(logits=logits)

    found = []
    for text in ("aab", "bca", "ccc"):
        letters = [LETTERS.index(a) for a in text]
        expected = [all(obeys(token, text) for token in names(task, ids - first)) for ids in some.ids]
        found.append(accuracy(Says(letters), MIXTURE, "constrained", some, 2))
        assert found[-1] == np.mean(expected)
    assert len(set(found)) > 1 and 0 < max(found) < 1
    C = task.constraints
    assert seen[: task.length] == [(C + place, UNSEEN + 2, None, [C + place - 1]) for place in range(task.length)]
    assert accuracy(Says([task.letters] * 3), MIXTURE, "constrained", some) == 0, "a token that is no letter"


def test_a_model_writes_letter_by_letter(monkeypatch):
    """A model of letters alone, against a greedy loop that makes the whole sequence anew."""
    monkeypatch.setattr(group_scores, "BATCH", 7)
    task, first, model = MIXTURE.task("constrained"), MIXTURE.first_id("constrained"), model_of("noise", 1)
    some = MIXTURE.evaluation_set("constrained", task.constraints, 20)
    with torch.no_grad():  # the head knows letters, so that strings are obeyed now and then
        others = [i for i in range(MIXTURE.vocab_size) if not first <= i < first + task.letters]
        model.lm_head.weight[others] = 0
        model.lm_head.weight[first : first + task.letters] *= 30
    right = 0
    for prompt in some.ids:
        ids, text = prompt, ""
        for place in range(task.length):
            with torch.no_grad():
                token = int(model(torch.as_tensor(ids)[None], state_seed=UNSEEN + 1).logits[0, -1].argmax()) - first
            text += LETTERS[token] if 0 <= token < task.letters else "?"
            told = letter_tokens(task, np.array([max(token if token < task.letters else 0, 0)]), place) + first
            ids = np.concatenate([ids, told])
        right += "?" not in text and all(obeys(token, text) for token in names(task, prompt - first))
    assert accuracy(model, MIXTURE, "constrained", some, 1) == right / 20 and 0 < right < 20


class Asked:
    """Answers by its state seed and remembers how it was asked."""

    device = torch.device("cpu")

    def __init__(self, state_init="input"):
        self.config, self.asked = SimpleNamespace(state_init=state_init), []

    def __call__(self, ids, state_seed, routes, answer_positions):
        self.asked.append((state_seed, routes))
        generator = torch.Generator().manual_seed(state_seed + 10)
        shape = (len(ids), 1, MIXTURE.vocab_size)
        return SimpleNamespace(logits=torch.rand(shape, generator=generator))


def test_a_state_from_noise_is_read_as_the_mean_of_its_draws(monkeypatch):
    def by_draw(model, mixture, task, instances, draw, route):
        return len(task) + instances.d_star + {0: 0.0, 1: 0.1, 2: 0.3, 3: 0.8}[draw]

    monkeypatch.setattr(group_scores, "accuracy", by_draw)
    for start, added in (("noise", 0.3), ("input", 0.0), ("zeros", 0.0)):
        found = table(Asked(start), MIXTURE, N)
        places = [(task, d) for task in FAMILIES for d in MIXTURE.task(task).depths]
        assert list(found.columns) == ["task", "d_star", "value"]
        assert list(zip(found["task"], found["d_star"], strict=True)) == places == list(sets(MIXTURE, N))
        np.testing.assert_allclose(found["value"], [len(task) + d + added for task, d in places])


def test_every_draw_is_a_state_seed_and_every_route_a_new_record_of_its_own():
    model = Asked("noise")
    table(model, MIXTURE, N)
    assert {seed for seed, _ in model.asked} == {UNSEEN + draw for draw in range(DRAWS)}
    assert all(routes is None for _, routes in model.asked)
    for route in ROUTES[1:]:
        model = Asked("noise")
        table(model, MIXTURE, N, route)
        assert all((routes.reuse, routes.seed) == (route, seed - UNSEEN) for seed, routes in model.asked)
        assert len({id(routes) for _, routes in model.asked}) == len(model.asked) > 4 * DRAWS


def test_floors_are_the_mixtures_over_depths():
    found = floors(MIXTURE, N)
    assert list(found["task"]) == FAMILIES
    for task, value in found.itertuples(index=False):
        depths = MIXTURE.task(task).depths
        expected = [MIXTURE.floor(task, MIXTURE.evaluation_set(task, d, N)) for d in depths]
        assert value == pytest.approx(np.mean(expected)) and 0 < value < 1


# ---- forced routes


def test_forced_routes_change_what_is_executed_again_and_nothing_else():
    some = torch.as_tensor(MIXTURE.evaluation_set("hops", 2, N).ids)
    with torch.no_grad():
        for arm, again in (("huginn_moe", True), ("full_moe", True), ("feedforward_moe", False)):
            model = model_of(arm)
            own, first, random = (model(some, state_seed=UNSEEN, routes=Routes(r)).logits for r in ("none", "first", "random"))
            assert torch.equal(own, first) != again and torch.equal(own, random) != again, arm


def test_an_untied_feed_forward_is_read_the_same_by_every_route(finished):
    jobs, made = finished
    own, first, random = (pd.read_csv(made[4][what] / "scores.csv") for what in ("scores", *ROUTES[1:]))
    end = own[own["share"] == 1.0].reset_index(drop=True)
    assert first.equals(end) and random.equals(end)


# ---- what routers chose


@pytest.mark.parametrize("arm", ["huginn_moe", "full_moe", "feedforward_moe"])
def test_routing_tables(arm):
    model = model_of(arm)
    found, E = routing(model, MIXTURE, N), SMALL["n_experts"]
    assert tuple(found) == ROUTING
    executed = {  # (module, time) in the order of execution
        "huginn_moe": [(0, 0), *((1, t) for t in range(4)), (2, 0)],
        "full_moe": [(m, t) for m in range(3) for t in range(2)],
        "feedforward_moe": [(m, 0) for m in range(6)],
    }[arm]
    again = sorted({m for m, t in executed if t})
    times = 1 + max(t for _, t in executed) if again else 0
    columns = {
        "load": ["time", "expert", "share"],
        "overlap": ["module", "time", "other", "value"],
        "entropy": ["module", "time", "load_bits", "token_bits"],
        "balance": ["module", "time", "value"],
    }
    assert {name: list(frame.columns) for name, frame in found.items()} == columns
    load, overlap, entropy, balance = found.values()
    assert len(load) == times * E and len(overlap) == len(again) * times * (times - 1) // 2
    np.testing.assert_allclose(load.groupby("time")["share"].sum(), 1.0)
    assert sorted(overlap["module"].unique()) == again and overlap["value"].between(0, 1).all()
    assert (overlap["time"] < overlap["other"]).all()
    for frame in (entropy, balance):
        assert list(zip(frame["module"], frame["time"], strict=True)) == sorted(executed)
    assert (entropy[["load_bits", "token_bits"]] <= 2 + 1e-6).all(axis=None) and (entropy["token_bits"] > 0).all()


def test_routing_is_averaged_over_tasks_and_depths_with_equal_weight():
    model, parts, loads = model_of("huginn_moe"), [], []
    for some in sets(MIXTURE, N).values():
        routes = Routes()
        with torch.no_grad():
            model(torch.as_tensor(some.ids), state_seed=UNSEEN, routes=routes)
        parts.append([experts.balance(e.scores, e.ids).item() for e in routes.executions])
        loads.append([np.bincount(e.ids.flatten(), minlength=4) / e.ids.numel() for e in routes.executions if e.module == 1])
    found = routing(model, MIXTURE, N)
    np.testing.assert_allclose(found["balance"]["value"], np.mean(parts, axis=0), rtol=1e-5)
    np.testing.assert_allclose(found["load"]["share"].to_numpy().reshape(4, 4), np.mean(loads, axis=0), rtol=1e-5)


def test_collected_routing_has_its_models_columns_first_and_numbers_stay_numbers(finished):
    _, made = finished
    for name in ROUTING:
        found = routing_of(CELLS, made, name)
        assert list(found.columns[:2]) == ["arm", "seed"]
        assert all(pd.api.types.is_numeric_dtype(found[name]) for name in found.columns[1:])
        only = ["huginn_moe"] if name in ("load", "overlap") else ["huginn_moe", "feedforward_moe"]
        assert list(found["arm"].unique()) == only
        saved = pd.read_csv(made[3]["routing"] / f"{name}.csv")
        pd.testing.assert_frame_equal(found[found["arm"] == "huginn_moe"][saved.columns], saved, check_dtype=False)


def test_balance_curves_are_medians_of_spans_of_steps(tmp_path):
    values = np.arange(60.0)
    values[7] = 1e6  # an outlier in its span
    folders = []
    for name, some in (("a", values), ("b", np.array([1.0, 3.0, np.nan])), ("dense", None)):
        folder = tmp_path / name
        folder.mkdir()
        if some is not None:
            np.save(folder / "balance.npy", some.astype(np.float32))
        folders.append({"model": folder})
    cells = [{"arm": name, "seed": 0} for name in ("a", "b", "dense")]
    found = group_scores.balance_curves(cells, folders, bins=20)
    assert list(found.columns) == ["arm", "seed", "step", "value"] and set(found["arm"]) == {"a", "b"}
    a, b = (found[found["arm"] == arm] for arm in "ab")
    np.testing.assert_allclose(a["step"], np.arange(2, 62, 3))
    expected = np.arange(1.0, 60, 3)
    expected[2] = 8.0  # of 6, 8 and the outlier
    np.testing.assert_allclose(a["value"], expected)
    assert list(b["step"]) == [1, 2, 3] and list(b["value"])[:2] == [1, 3] and np.isnan(list(b["value"])[2])


def test_balance_is_recorded_at_every_step_of_a_training(finished):
    curves = group_scores.balance_curves(CELLS, finished[1])
    assert list(curves["arm"].unique()) == ["huginn_moe", "feedforward_moe"]
    assert list(curves[curves["arm"] == "huginn_moe"]["step"]) == list(range(1, 13)) and (curves["value"] > 0.5).all()


# ---- jobs and their store


def test_each_share_of_training_is_read_with_its_own_weights(finished):
    jobs, made = finished
    for at in (0, 1):
        saved = pd.read_csv(made[at]["scores"] / "scores.csv")
        assert list(saved.columns) == ["task", "d_star", "value", "share"] and list(saved["share"].unique()) == [0.25, 0.5, 1.0]
        values = []
        for step, share in ((3, 0.25), (6, 0.5), (None, 1.0)):
            read = table(load(jobs[at].run, jobs[at].root, step), MIXTURE, N)
            own = saved[saved["share"] == share].reset_index(drop=True)
            pd.testing.assert_frame_equal(own.drop(columns="share"), read)
            values.append(tuple(read["value"]))
        assert len(set(values)) > 1, "weights in mid-training differ from those at the end"


def test_what_is_measured_hangs_on_the_kind_of_model(finished):
    jobs, made = finished
    dense, routed = ["model", "scores"], ["model", "scores", "first", "random", "routing"]
    assert [list(folders) for folders in made] == [dense] * 3 + [routed] * 2
    first = pd.read_csv(made[3]["first"] / "scores.csv")
    model = load(jobs[3].run, jobs[3].root)
    pd.testing.assert_frame_equal(first.drop(columns="share"), table(model, MIXTURE, N, "first"))
    assert set(first["share"]) == {1.0}
    assert {p.name for p in made[3]["routing"].iterdir()} >= {f"{name}.csv" for name in ROUTING}
    keys = [key(spec) for one in jobs for spec in one.wanted().values()]
    assert len(set(keys)) == len(keys)
    more = dataclasses.replace(jobs[0], n=N + 1)
    assert key(more.spec("scores")) != key(jobs[0].spec("scores"))


def test_entries_are_found_again_and_nothing_is_trained_or_measured_twice(finished, monkeypatch):
    jobs, made = finished
    calls = []
    for place in ("lib.group_scores._measure", "lib.group_scores.table", "lib.training.train", "lib.engine._Worker.start"):
        monkeypatch.setattr(place, lambda *a, place=place, **k: calls.append(place))
    assert [stored(one) for one in jobs] == made
    assert [group_scores.train_and_score(one) for one in jobs] == made
    assert group_scores.make(jobs) == made
    assert not calls
    assert stored(dataclasses.replace(jobs[0], n=N + 1)) is None
    assert stored(dataclasses.replace(jobs[1], forced=("first",))) is None


def test_another_number_of_instances_is_read_off_the_same_training(finished, monkeypatch):
    jobs, made = finished
    monkeypatch.setattr("lib.training.train", None)  # to call it would raise
    again = group_scores.train_and_score(dataclasses.replace(jobs[1], n=N - 2))
    assert again["model"] == made[1]["model"] and again["scores"] != made[1]["scores"]


def test_scores_are_means_over_depths_and_a_diverged_seed_has_none(finished):
    _, made = finished
    found = collect(CELLS, made)
    assert list(found.columns) == ["arm", "seed", "task", "share", "value"] and len(found) == len(CELLS) * 5 * 3
    lost = (found["arm"] == "sandwich") & (found["seed"] == 1)
    assert found.loc[lost, "value"].isna().all() and found.loc[~lost, "value"].between(0, 1).all()
    saved = pd.read_csv(made[0]["scores"] / "scores.csv")
    for task, share in ((task, share) for task in FAMILIES for share in (0.25, 1.0)):
        at = (found["arm"] == "noise") & (found["task"] == task) & (found["share"] == share)
        depths = saved.loc[(saved["task"] == task) & (saved["share"] == share), "value"]
        assert found.loc[at, "value"].item() == pytest.approx(depths.mean()) and len(depths) == len(MIXTURE.task(task).depths)
    forced = collect(CELLS[3:], made[3:], "random")
    assert len(forced) == 2 * 5 and set(forced["share"]) == {1.0}


def test_a_diverged_model_with_experts_has_no_routing(finished, tmp_path):
    lost = Job(axes_arms.run_of(SMALL, "huginn_moe", 1, 1.0e30), N, tmp_path, ROUTES[1:])
    made = [finished[1][3], group_scores.train_and_score(lost)]
    cells = [CELLS[3], {"arm": "huginn_moe", "seed": 1}]
    for what in ("scores", *ROUTES[1:]):
        found = collect(cells, made, what)
        assert found[found["seed"] == 1]["value"].isna().all() and found[found["seed"] == 0]["value"].notna().all()
    assert set(routing_of(cells, made, "balance")["seed"]) == {0}
    ends = group_scores.balance_ends([CELLS[0], *cells], [finished[1][0], *made])  # a dense one has none
    expected = pd.read_csv(made[0]["routing"] / "balance.csv")["value"].mean()
    assert list(ends.columns) == ["arm", "seed", "value"] and list(ends["seed"]) == [0, 1]
    np.testing.assert_allclose(ends["value"], [expected, np.nan])
    with pytest.raises(ValueError, match="every training diverged"):
        collect(cells[1:], made[1:])


def test_what_training_reached(finished):
    jobs, made = finished
    found = group_scores.trainings(CELLS, made)
    assert list(found["diverged"]) == [False, False, True, False, False] and (found["steps"][[0, 1, 3, 4]] == 12).all()
    assert {"arm", "seed", "diverged", "steps", "first_loss", "final_loss", "seconds"} == set(found.columns)
    assert group_scores.training_of(made[0]["model"]) == json.loads((made[0]["model"] / "training.json").read_text())


def test_the_pilot_keeps_a_table_of_every_arm_and_rate_over_groups(tmp_path, monkeypatch):
    arms = ["sandwich", "feedforward"]
    monkeypatch.setattr(pilot, "RATES", (2.0e-2, 1.0e30))
    monkeypatch.setattr(params, "load", lambda *_: SMALL | {"arms": arms, "lr": [1.0e-9] * 2, "n_test": N, "workers": 0})
    for name in ("runs", "params"):
        monkeypatch.setattr(paths, name, lambda name=name: tmp_path / name)
    monkeypatch.setattr(group_scores, "make", lambda jobs, *_, **__: [group_scores.train_and_score(one) for one in jobs])
    (tmp_path / "params/dense_axes").mkdir(parents=True)
    found = pilot.run("laptop", "dense_axes")
    assert list(found.columns) == ["arm", "lr", "seed", *sorted(FAMILIES), "mean"]
    assert list(zip(found["arm"], found["lr"], strict=True)) == [(arm, lr) for arm in arms for lr in pilot.RATES]
    assert set(found["seed"]) == {pilot.SEEDS[0]} and pilot.SEEDS[0] > 100, "a seed that is never reported"
    lost = found["lr"] == 1.0e30
    assert found.loc[lost, [*FAMILIES, "mean"]].isna().all(axis=None) and found.loc[~lost].notna().all(axis=None)
    kept = pd.read_csv(tmp_path / "params/dense_axes/pilot_laptop.csv")
    groups = [found[list(tasks)].mean(axis=1) for tasks in task_groups.GROUPS.values()]
    np.testing.assert_allclose(found.loc[~lost, "mean"], np.mean(groups, axis=0)[~lost])
    pd.testing.assert_frame_equal(kept, found.rename_axis(columns=None), rtol=1e-5)
    with pytest.raises(
        ValueError, match="99_verdicts has no pilot: it must be one of 4_1_asymmetry, .*dense_axes, moe_transfer"
    ):
        pilot.run("laptop", "99_verdicts")
