"""Parameter files: every committed one fits its notebook, and every kind of mistake is one sentence."""

import itertools

import pytest
import torch
import yaml

from lib import axes_arms, experiment, params, paths, standins, store, task_groups
from lib.looped import LoopedModel

OTHERS = ("pretrain", "benchmark")  # whose files are no notebook's
FILES = sorted(path for path in paths.params().glob("*/*.yaml") if path.parent.name not in OTHERS)
NOTEBOOK = "4_3_scratch_training"
SCHEMA = params.notebook_parameters(paths.notebooks() / f"{NOTEBOOK}.py")
GOOD = yaml.safe_load((paths.params() / NOTEBOOK / "smoke.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_every_file_fits_its_notebook_and_names_its_own_scale(path):
    assert params.load(path.parent.name, path.stem)["scale"] == path.stem


@pytest.mark.parametrize("notebook", sorted({p.parent.name for p in FILES}))
def test_smoke_is_the_notebooks_defaults(notebook):
    schema = params.notebook_parameters(paths.notebooks() / f"{notebook}.py")
    assert params.load(notebook, "smoke") == {k: yaml.safe_load(v["default"]) for k, v in schema.items()}


TRAINING = [path for path in FILES if "core" in params.load(path.parent.name, path.stem)]


@pytest.mark.parametrize("path", TRAINING, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_every_scale_makes_possible_runs(path):
    p = params.load(path.parent.name, path.stem)
    for task in p["tasks"]:
        for make in experiment.kinds(p, task).values():
            config = make(0).config()
            assert config.loops * config.core == p["r0"] * p["core"]


@pytest.mark.parametrize("scale", paths.SCALES)
def test_the_collapse_is_read_off_the_asymmetrys_models(scale):
    p = params.load("4_1_asymmetry", scale)
    assert params.load("4_2_readout_collapse", scale) == p
    for style in p["styles"]:
        run = standins.run_of(p, style, 0)
        assert run.config().loops == p["r0"] and [t.family for t in run.task.tasks] == p["tasks"]


@pytest.mark.parametrize("scale", ["smoke", "laptop", "overnight", "paper"])
def test_nothing_is_trained_twice(scale):
    """The models that other notebooks share with section 4.3 have the same runs, so that the store serves them."""
    known = params.load(NOTEBOOK, scale)
    damping, readout, over = (params.load(n, scale) for n in ("beyond_damping", "beyond_readout_axis", "4_5_overshoot"))

    def key(run):
        return run.config().to_dict(), run.recipe, run.task, run.seed

    assert damping == known
    for task, arm in itertools.product(known["tasks"], experiment.ARMS):
        run = experiment.arm_run(known, task, arm, 0)
        if task in readout["tasks"]:
            assert key(experiment.arm_run(readout, task, arm, 0)) == key(run)
            assert key(experiment.arm_run(readout, task, arm, 0, "raw")) != key(run)
        if arm == "no_norm" and scale != "smoke":  # there shorter runs are cheaper than shared ones
            assert key(experiment.split_run(over, task, next(iter(experiment.splits(over))), 0)) == key(run)
    if known["device"] == "cpu":
        assert (
            experiment.arm_run(readout, "circuit", "no_norm", 0).spec()
            == experiment.arm_run(known, "circuit", "no_norm", 0).spec()
        )


AXES = ("dense_axes", "moe_transfer")
BOTH = [scale for scale in paths.SCALES if all((paths.params() / name / f"{scale}.yaml").exists() for name in AXES)]


@pytest.mark.parametrize("scale", BOTH)
def test_the_dense_counterparts_of_experts_are_those_of_the_dense_notebook(scale):
    dense, moe = (params.load(name, scale) for name in AXES)
    assert set(moe["arms"]) <= set(dense["arms"]) and moe["seeds"] <= dense["seeds"]
    assert task_groups.make(moe) == task_groups.make(dense)
    for arm in moe["arms"]:
        own, known = (axes_arms.run_of(p | {"device": "cpu"}, arm, 0) for p in (moe, dense))
        assert own == known and store.key(own.spec()) == store.key(known.spec()), arm


AXES_FILES = [path for path in FILES if path.parent.name in AXES]


@pytest.mark.parametrize("path", AXES_FILES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_the_axes_notebooks_make_arms_of_equal_layers_from_one_grid_of_rates(path):
    p = params.load(path.parent.name, path.stem)
    found = {arm: axes_arms.config_of(p, arm) for arm in [*p["arms"], *p.get("arms_moe", ())]}
    looped = {arm: c for arm, c in found.items() if not arm.startswith("feedforward")}
    assert len({c.stored_layers for c in looped.values()}) == 1
    assert len({c.executed_layers for arm, c in found.items() if arm not in ("split_hl", "feedforward_stored")}) == 1
    assert all(axes_arms.rate_of(p, arm) > 0 for arm in found)


def test_the_paper_scale_of_the_axes_has_the_papers_shape():
    for path in (path for path in AXES_FILES if path.stem == "paper"):
        p = params.load(path.parent.name, "paper")
        assert tuple(p[key] for key in ("prelude", "recurrent", "coda", "updates")) == (8, 12, 8, 8)


def test_the_arms_of_parameter_files_are_those_that_there_are():
    assert params.ARMS == tuple(axes_arms.ARMS) and params.ARMS_MOE == tuple(axes_arms.WITH_EXPERTS)


def test_split_states_and_the_other_controls_can_be_asked_for(tmp_path):
    arms = ["full", "sandwich", "split_hl", "split_hl_x2", "feedforward_injected", "feedforward_stored"]
    values = params.load("dense_axes", "laptop") | {"scale": "overnight", "arms": arms, "lr": [1.0e-3] * len(arms)}
    path = tmp_path / "overnight.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    p = params.check(path, params.notebook_parameters(paths.notebooks() / "dense_axes.py"))
    split, twice = (axes_arms.config_of(p, arm) for arm in ("split_hl", "split_hl_x2"))
    assert (split.state, split.repeats, twice.repeats) == ("split", 1, 2)
    assert split.stored_layers == twice.stored_layers and split.executed_layers < twice.executed_layers


def test_splits_share_one_total_and_odd_budgets_are_refused():
    p = params.load("4_5_overshoot", "paper")
    assert experiment.splits(p) == {"4x6": 4, "2x12": 2, "1x24": 1}
    for r0 in (1, 2, 5):
        with pytest.raises(ValueError, match=f"r0 is {r0}: it must be even and at least 4"):
            experiment.splits(p | {"r0": r0})


@pytest.mark.parametrize(
    "notebook, change, parts",
    [
        ("4_4_refit", {"core": 1}, ["core is 1", "at least 2"]),
        ("4_4_refit", {"refit_steps_head": [10, 3]}, ["steps is [10, 3]", "rising"]),
        ("4_4_refit", {"refit_steps_layer": []}, ["refit_steps_layer"]),
        ("4_4_refit", {"refit_lr": 0.0}, ["refit_lr", "greater than 0"]),
        ("4_5_overshoot", {"r0": 3}, ["r0 is 3", "even"]),
        ("4_5_overshoot", {"circuit_lr": [1.0e-3]}, ["circuit_lr has 1 rates", "4x1, 2x2, 1x4"]),
        ("4_5_overshoot", {"hops_lr": [1.0e-3, 1.0e-3, -1.0]}, ["hops_lr", "greater than 0"]),
        ("4_1_asymmetry", {"styles": ["ouro-1", "ouro-1"]}, ["styles is", "each may stand once"]),
        ("4_1_asymmetry", {"styles": ["ouro-9"]}, ["styles", "'ouro-9'", "ouro-1"]),
        ("4_1_asymmetry", {"lr": [1.0e-3]}, ["lr has 1 rates", "ouro-1, huginn"]),
        ("4_1_asymmetry", {"n_test": 100_000}, ["n_test is 100000", "so at most"]),
        ("4_1_asymmetry", {"loops": 2}, ["loops is 2", "at least r0, 4"]),
        ("4_1_asymmetry", {"warmup": 300}, ["warmup is 300", "below steps, 300"]),
        ("4_2_readout_collapse", {"dtype": "int8"}, ["dtype is 'int8'", "bfloat16"]),
        ("4_3_scratch_training", {"tasks": ["paragg"]}, ["tasks has paragg", "circuit, hops"]),
        ("beyond_readout_axis", {"circuit_lr_no_norm_raw": "fast"}, ["circuit_lr_no_norm_raw", "'fast'", "float"]),
        ("dense_axes", {"updates": 3}, ["updates is 3", "executes 5 layers", "the 3 it stores"]),
        ("dense_axes", {"updates": 0}, ["updates is 0"]),
        ("dense_axes", {"recurrent": 0}, ["recurrent is 0"]),
        ("dense_axes", {"h_cycles": 2}, ["updates is 4", "h_cycles * (l_cycles + 1), 8", "h_cycles is 2 and l_cycles 3"]),
        ("dense_axes", {"l_cycles": 1}, ["updates is 4", "2, since h_cycles is 1 and l_cycles 1"]),
        ("dense_axes", {"arms": ["full", "split_hl"], "lr": [1.0e-3] * 2}, ["recurrent is 1", "split_hl", "even"]),
        ("dense_axes", {"lr": [1.0e-3]}, ["lr has 1 rates", "full, full_injected, sandwich"]),
        ("dense_axes", {"lr": [1.0e-3] * 6 + [0.0]}, ["lr", "greater than 0"]),
        ("dense_axes", {"arms": ["full", "half"]}, ["arms", "'half'", "'full'", "'feedforward_stored'"]),
        ("dense_axes", {"arms": ["full_moe"]}, ["arms", "'full_moe'"]),
        ("dense_axes", {"arms": []}, ["arms is []"]),
        ("dense_axes", {"arms": ["full", "full"], "lr": [1.0e-3] * 2}, ["arms is ['full', 'full']", "each may stand once"]),
        ("dense_axes", {"modulus": 8}, ["modulus must be a prime in 5..97, not 8"]),
        ("dense_axes", {"arithmetic_depth": 1}, ["arithmetic_depth is 1", "2"]),
        ("dense_axes", {"objects": 1}, ["objects must be at least 2"]),
        ("dense_axes", {"letters": 40}, ["letters must be in 2..26"]),
        ("dense_axes", {"constraints": 1000}, ["constraints must be in 1.."]),
        ("dense_axes", {"hops_width": 4}, ["width must be in 5..26 for hops"]),
        ("dense_axes", {"n_test": 400}, ["n_test is 400: n must be"]),
        ("dense_axes", {"warmup": 60}, ["warmup is 60", "below steps, 60"]),
        ("dense_axes", {"d_model": 30}, ["d_model is 30", "n_heads"]),
        ("dense_axes", {"n_experts": 4}, ["n_experts is not a parameter"]),
        ("moe_transfer", {"experts_per_token": 5}, ["experts_per_token is 5", "at most n_experts, 4"]),
        ("moe_transfer", {"n_experts": 0}, ["n_experts is 0", "1"]),
        ("moe_transfer", {"d_expert": 0}, ["d_expert is 0", "1"]),
        ("moe_transfer", {"balance": -1.0}, ["balance is -1.0", "0"]),
        ("moe_transfer", {"lr": [1.0e-3]}, ["lr has 1 rates", "full, noise, feedforward"]),
        ("moe_transfer", {"lr_moe": [1.0e-3]}, ["lr_moe has 1 rates", "full_moe, huginn_moe, feedforward_moe"]),
        ("moe_transfer", {"arms_moe": ["full_moe"] * 2, "lr_moe": [1.0e-3] * 2}, ["arms_moe is", "each may stand once"]),
        ("moe_transfer", {"arms_moe": ["noise"], "lr_moe": [1.0e-3]}, ["arms_moe", "'noise'", "'huginn_moe'"]),
        (
            "moe_transfer",
            {"arms": ["full", "feedforward"], "lr": [1.0e-3] * 2},
            ["arms is ['full', 'feedforward']", "it must hold noise", "huginn_moe"],
        ),
        ("moe_transfer", {"arms": ["shared_hl"], "lr": [1.0e-3]}, ["arm is 'shared_hl'", "h_cycles and l_cycles"]),
        ("moe_transfer", {"optimizer": "muon"}, ["optimizer is 'muon'", "'experts'", "adamw"]),
    ],
)
def test_a_mistake_in_the_other_notebooks_files_is_one_sentence(tmp_path, notebook, change, parts):
    schema = params.notebook_parameters(paths.notebooks() / f"{notebook}.py")
    path = tmp_path / "smoke.yaml"
    path.write_text(yaml.safe_dump(params.load(notebook, "smoke") | change), encoding="utf-8")
    with pytest.raises(params.ParamsError) as caught:
        params.check(path, schema)
    said = str(caught.value)
    assert "\n" not in said and "smoke.yaml" in said and all(part in said for part in parts), said


def test_the_paper_scale_has_the_papers_size():
    p = params.load(NOTEBOOK, "paper")
    run = experiment.arm_run(p, "circuit", "no_norm", 0)
    with torch.device("meta"):
        size = sum(w.numel() for w in LoopedModel(run.config()).parameters())
    assert 18.5e6 < size < 19.6e6 and p["core"] == 6 and p["r0"] == 4 and p["seeds"] == 16
    assert p["tasks"] == ["circuit", "hops"]


def refused(tmp_path, text) -> str:
    path = tmp_path / "laptop.yaml"
    path.write_text(text if isinstance(text, str) else yaml.safe_dump(text), encoding="utf-8")
    with pytest.raises(params.ParamsError) as caught:
        params.check(path, SCHEMA)
    said = str(caught.value)
    assert "\n" not in said and "laptop.yaml" in said
    return said


def without(key):
    return {k: v for k, v in GOOD.items() if k != key}


@pytest.mark.parametrize(
    "text, parts",
    [
        (GOOD | {"learning_rate": 1.0}, ["learning_rate", "not a parameter", "circuit_lr_no_norm"]),
        (without("r0"), ["r0 is missing"]),
        (GOOD | {"r0": "four"}, ["r0", "'four'", "int"]),
        (GOOD | {"r0": 2.5}, ["r0", "2.5", "int"]),
        (GOOD | {"r0": 0}, ["r0 is 0", "1"]),
        (GOOD | {"seeds": 0}, ["seeds is 0"]),
        (GOOD | {"seeds": True}, ["seeds is True", "int"]),
        (GOOD | {"tasks": ["circuit", "sudoku"]}, ["tasks", "'sudoku'", "'circuit', 'hops' or 'paragg'"]),
        (GOOD | {"tasks": []}, ["tasks is []"]),
        (GOOD | {"scale": "huge"}, ["scale is 'huge'", "smoke", "laptop"]),
        (GOOD | {"optimizer": "sgd"}, ["optimizer", "adamw"]),
        (GOOD | {"hops_lr_no_norm": -1.0}, ["hops_lr_no_norm", "greater than 0"]),
        (GOOD | {"d_model": 30}, ["d_model is 30", "n_heads"]),
        (GOOD | {"hops_width": 4, "hops_depth": 2}, ["width must be in 5..26"]),
        (GOOD | {"circuit_width": 1}, ["circuit_width is 1"]),
        (GOOD | {"circuit_depth": 0}, ["circuit_depth is 0"]),
        ("r0: [1, 2", ["not valid YAML"]),
        ("just words", ["one a parameter"]),
        ("4: 5", ["one a parameter"]),
        ("r0: 4\nr0: 5", ["r0 stands twice"]),
        (GOOD | {"circuit_lr_with_norm": float("inf")}, ["circuit_lr_with_norm", "finite"]),
        (GOOD | {"weight_decay": float("nan")}, ["weight_decay", "finite"]),
        (GOOD | {"warmup": 10_000}, ["warmup is 10000", "circuit_steps"]),
        (GOOD | {"tasks": ["circuit", "circuit"]}, ["tasks", "once"]),
        (GOOD | {"circuit_width": 2, "circuit_depth": 1}, ["circuit", "n_test is", "at most"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_mistake_is_one_sentence_with_file_key_and_what_is_right(tmp_path, text, parts):
    said = refused(tmp_path, text)
    assert all(part in said for part in parts), said


def test_a_file_that_is_no_text_or_names_another_scale_is_told(tmp_path, monkeypatch):
    folder = tmp_path / NOTEBOOK
    folder.mkdir()
    monkeypatch.setattr(paths, "params", lambda: tmp_path)
    (folder / "laptop.yaml").write_bytes(b"scale: \xff\xfe")
    with pytest.raises(params.ParamsError, match="laptop.yaml is not valid YAML"):
        params.load(NOTEBOOK, "laptop")
    (folder / "laptop.yaml").write_text(yaml.safe_dump(GOOD))
    with pytest.raises(params.ParamsError, match="scale is 'smoke': it must be the file's own, laptop"):
        params.load(NOTEBOOK, "laptop")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_told():
    values = params.load(NOTEBOOK, "paper")
    with pytest.raises(params.ParamsError, match="device is 'cuda' at scale paper, and torch finds no GPU"):
        params.require_device(values)
    params.require_device(GOOD)


def test_a_number_that_yaml_reads_as_text_is_told_how_to_be_written(tmp_path):
    text = "\n".join(f"{k}: {v}" for k, v in GOOD.items()).replace("hops_lr_no_norm: 0.008", "hops_lr_no_norm: 1e-3")
    assert "1e-3" in text
    said = refused(tmp_path, text)
    assert "hops_lr_no_norm is the text '1e-3'" in said and "1.0e-3" in said


def test_an_unknown_scale_and_arm_are_one_sentence():
    with pytest.raises(params.ParamsError, match="scale is 'huge': it must be one of smoke, laptop, overnight, paper"):
        params.load(NOTEBOOK, "huge")
    with pytest.raises(params.ParamsError, match="nowhere has no laptop scale: params/nowhere/ holds nothing"):
        params.load("nowhere", "laptop")
    with pytest.raises(ValueError, match="arm is 'half_norm': it must be one of no_norm, with_norm"):
        experiment.arm_run(GOOD, "circuit", "half_norm", 0)


def test_a_notebooks_own_values_are_checked_too():
    kinds = {"scale": str, "r0": int, "circuit_lr_no_norm": float}
    good = {"__annotations__": kinds, "scale": "smoke", "r0": 4, "circuit_lr_no_norm": 1.0e-3, "other": object()}
    assert params.of(good) == {"scale": "smoke", "r0": 4, "circuit_lr_no_norm": 1.0e-3}
    for key, value in (("r0", 0), ("r0", "4"), ("scale", "big"), ("circuit_lr_no_norm", "1e-3")):
        with pytest.raises(params.ParamsError, match=f"the parameters cell: {key}"):
            params.of(good | {key: value})
