"""Pretraining: the loss against brute force, one process against two, copied and sharded, kills and resumption, and recipes.

Runs of several processes are started once for the module, by torchrun on gloo.
"""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml

from lib import cli, corpus, cost, exits, paths, pretrain, pretrain_recipe, released, sharding
from lib.config import LoopedConfig
from lib.looped import LoopedModel, build
from lib.pretrain_recipe import Recipe
from tests.pretrain_jobs import MODEL, RECIPE, recipe
from tests.texts import TEXTS

LENGTH = 24
OURO = {"d_model": 16, "n_heads": 2, "d_ff": 24, "core": 2, "loops": 3, "boundary": 1, "block": "sandwich", "exit_gate": True}
HUGINN = MODEL | {"injection": "concat", "state_init": "noise", "state_noise": "truncated", "block": "sandwich_sum", "loops": 6}
EXPERTS = MODEL | {"feed_forward": "experts", "n_experts": 5, "experts_per_token": 2, "d_expert": 8}
KINDS = {
    "tiny": {},
    "ouro": {"model": OURO, "loss": "exit_weighted", "exit_entropy": 0.1},
    "huginn": {"model": HUGINN, "loop_sampling": "poisson_lognormal", "backprop": 2, "fresh_state": True},
    "experts": {"model": EXPERTS, "balance": 0.01},
}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return corpus.build(tmp_path_factory.mktemp("corpora") / "small", lambda: TEXTS, 280, LENGTH, "words")


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def torchrun(out, *jobs, **more):
    """Start jobs, each (name, recipe), on two processes."""
    texts = [json.dumps({"name": name, "recipe": r.model_dump()}) for name, r in jobs]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "localhost:0", "-m", "tests.pretrain_jobs", str(out), *texts]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(paths.ROOT)} | more
    return subprocess.Popen(
        command,
        cwd=paths.ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.fixture(scope="module")
def two(small, tmp_path_factory):
    """The folder of runs on two processes, copied and sharded, of every kind."""
    out = tmp_path_factory.mktemp("two")
    jobs = [
        (f"{kind}-{engine}", recipe(small.folder, engine=engine, **values))
        for kind, values in KINDS.items()
        for engine in ("ddp", "fsdp")
    ]
    finished(torchrun(out, *jobs), out)
    return out


def finished(process, folder):
    """Wait for the end of what `torchrun` started; whatever happens, nothing is left of it."""
    try:
        said, _ = process.communicate(timeout=240)
        assert process.returncode == 0, said
    finally:
        killed(process, folder)


def killed(process, folder):
    """Kill it with all its workers, which are in sessions of their own."""
    process.kill()
    for worker in workers(folder):
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)
    process.communicate(timeout=30)


@pytest.fixture(scope="module")
def one(small, tmp_path_factory):
    """The folder of the same runs in this process."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("one")
    for kind, values in KINDS.items():
        pretrain.run(recipe(small.folder, **values), out / kind)
    return out


def course(folder, key):
    return [line[key] for line in pretrain.log_of(folder) if key in line]


def weights(folder):
    return (folder / "model" / "model.safetensors").read_bytes()


# ---- one step -----------------------------------------------------------------------------------------------------------


def documents(row, start, pad):
    """(first position, ids) of each document in a row, padding left out."""
    inside = [t for t in row if t != pad]
    starts = sorted({0, *(i for i, t in enumerate(inside) if t == start)})
    return [(a, inside[a:b]) for a, b in zip(starts, [*starts[1:], len(inside)], strict=True)]


@pytest.mark.parametrize("kind", ["tiny", "ouro"])
def test_the_loss_is_that_of_each_document_read_alone(small, kind):
    r = recipe(small.folder, **KINDS[kind])
    model = build(r.config(small.vocab_size), 0).double()
    ids = torch.from_numpy(small.rows()[:6].astype(np.int64))
    found = pretrain.Objective(model.requires_grad_(False), r, small.start, small.pad)(ids, 3)
    total = 0.0
    for row in ids.tolist():
        for _, doc in documents(row, small.start, small.pad):
            if len(doc) > 1:
                total += alone(model, torch.tensor([doc]), r)
    assert float(found) == pytest.approx(float(total), rel=1e-9)


def alone(model, doc, r):
    """The summed loss of one document, (1, T), written out."""
    if r.loss == "last":
        return F.cross_entropy(model(doc, loops=3).logits[0, :-1], doc[0, 1:], reduction="sum")
    total = 0.0
    states = list(model.trajectory(doc, 3))
    p = exits.distribution(exits.gate_logits(model, states))[0]  # (T, K)
    for t in range(doc.shape[1] - 1):
        losses = torch.stack([F.cross_entropy(model.readout(z)[0, t], doc[0, t + 1]) for z in states])
        entropy = -sum(float(q) * math.log(float(q) + 1e-9) for q in p[t])
        total = total + (p[t] * losses).sum() - r.exit_entropy * entropy
    return total


def test_the_noise_of_a_row_does_not_depend_on_the_rows_beside_it_and_is_cut_where_huginns_is():
    config = LoopedConfig(d_model=16, state_init="noise", state_noise="truncated", state_std=0.5)
    numbers = np.arange(40)
    drawn = pretrain.fresh_states(numbers, 50, config, 3, torch.device("cpu"))
    assert torch.equal(drawn[7:9], pretrain.fresh_states(numbers[7:9], 50, config, 3, torch.device("cpu")))
    assert not torch.equal(drawn[7], drawn[8]) and drawn.abs().max() <= 1.5
    assert drawn.mean().abs() < 0.01 and drawn.std() == pytest.approx(0.5 * 0.9866, abs=0.01)  # of a normal cut at 3


def test_a_pass_reads_every_row_once_and_each_pass_in_another_order(small):
    n = len(small.rows())
    first, second = (pretrain.rows_of(small, np.arange(i * n, (i + 1) * n), 5) for i in range(2))
    assert not np.array_equal(first, second)
    for rows in (first, second):
        assert sorted(map(tuple, rows.tolist())) == sorted(map(tuple, small.rows().tolist()))
    assert np.array_equal(pretrain.rows_of(small, np.array([n - 1, n, 2]), 5), np.stack([first[-1], second[0], first[2]]))


def test_the_rate_follows_the_axes_papers_formula():
    r = pretrain_recipe.read(paths.params() / "pretrain" / "dense_huginn.yaml")
    for step in (0, 1, 100, 199, 200, 201, 60_000, 80_000, 119_209, 119_210):
        if step < 200:
            expected = 1e-4 + step * (1 - 1e-4) / 200
        else:
            expected = 0.01 + 0.495 * (1 + math.cos(math.pi * (step - 200) / 119_010))
        assert pretrain.rate(step, r) == pytest.approx(expected, rel=1e-12)


def test_first_weights_are_of_the_width_asked_for():
    config = LoopedConfig(
        vocab_size=300,
        d_model=64,
        d_ff=96,
        prelude=1,
        injection="diagonal",
        feed_forward="experts",
        n_experts=4,
        experts_per_token=2,
        d_expert=32,
        tie_word_embeddings=False,
    )
    model = LoopedModel(config).requires_grad_(False)
    sharding.initialise(model, 1, 0.02)
    seen = 0
    for name, p in model.named_parameters():
        if p.dim() >= 2 and not name.startswith("injection"):
            std = 64**-0.5 if name in ("embed_tokens.weight", "lm_head.weight") else 0.02
            assert p.std() == pytest.approx(std * 0.9866, rel=5 * (2 * p.numel()) ** -0.5) and p.abs().max() <= 3 * std, name
            seen += 1
        elif name.endswith("norm.weight"):
            assert torch.equal(p, torch.ones_like(p))
    assert seen >= 10 and torch.equal(model.injection.adapter.weight, torch.eye(64))
    own = LoopedModel(config).requires_grad_(False)
    sharding.initialise(own, 1)
    built = dict(build(config, 0).named_parameters())
    for name, p in own.named_parameters():
        assert p.std() == pytest.approx(float(built[name].detach().std()), rel=0.25, abs=1e-9), name
    again, other = LoopedModel(config), LoopedModel(config)
    sharding.initialise(again, 1, 0.02)
    sharding.initialise(other, 2, 0.02)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert not torch.equal(model.lm_head.weight, other.lm_head.weight)


# ---- runs ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_falls(small, tmp_path, kind):
    r = recipe(small.folder, **KINDS[kind] | {"steps": 40, "checkpoint_every": 100, "rows_per_device": 8})
    pretrain.run(r, tmp_path / kind)
    losses = course(tmp_path / kind, "loss")
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.5
    assert course(tmp_path / kind, "eval_bits_per_byte")[0] < math.log2(280)


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_train_as_one_does(one, two, kind, engine):
    for key, bound in (("loss", 2e-5), ("grad_norm", 1e-4), ("eval_loss", 2e-5), ("learning_rate", 0)):
        a, b = course(one / kind, key), course(two / f"{kind}-{engine}", key)
        if kind == "experts" and key != "learning_rate":  # the balance loss is each process's own, not linear in its rows
            bound = 2e-3
        assert len(a) == len(b) > 0 and a == pytest.approx(b, rel=bound), key


@pytest.mark.parametrize("kind", KINDS)
def test_sharded_parameters_are_dtensors_of_which_each_process_holds_a_part(two, kind):
    sizes = []
    for rank in range(2):
        held = json.loads((two / f"{kind}-fsdp" / f"held-{rank}.json").read_text())
        assert {data for _, data, _, _ in held.values()} == {"DTensor"}
        sizes.append({name: (local, full) for name, (_, _, local, full) in held.items()})
        copied = json.loads((two / f"{kind}-ddp" / f"held-{rank}.json").read_text())
        assert all(data == "Tensor" and local == full for _, data, local, full in copied.values())
    for name, (local, full) in sizes[0].items():
        assert local + sizes[1][name][0] == full, name
    assert sum(n for n, _ in sizes[0].values()) < 0.6 * sum(n for _, n in sizes[0].values())


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_stops_and_goes_on_ends_bitwise_where_an_unbroken_one_ends(small, one, tmp_path, kind):
    pretrain.run(recipe(small.folder, **KINDS[kind], stop=4), tmp_path)
    assert weights(tmp_path) != weights(one / kind)
    pretrain.run(recipe(small.folder, **KINDS[kind]), tmp_path)
    assert weights(tmp_path) == weights(one / kind)
    assert course(tmp_path, "loss") == course(one / kind, "loss")


def test_a_checkpoint_of_two_processes_is_one_processs_to_go_on_from(small, one, two, tmp_path):
    shutil.copytree(two / "tiny-fsdp" / "checkpoint-0000004", tmp_path / "checkpoint-0000004")
    pretrain.run(recipe(small.folder), tmp_path)
    assert course(tmp_path, "loss") == pytest.approx(course(one / "tiny", "loss")[4:], rel=2e-5)


def test_a_run_of_two_processes_that_is_killed_goes_on_and_ends_bitwise_where_an_unbroken_one_ends(small, two, tmp_path):
    file, job = tmp_path / "held", ("tiny-fsdp", recipe(small.folder, engine="fsdp"))
    process = torchrun(tmp_path, job, HOLD=f"{file}:6")
    until = time.monotonic() + 120
    while not file.exists() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.1)
    there = file.exists()
    killed(process, tmp_path)
    assert there
    folder = tmp_path / "tiny-fsdp"
    assert [path.name for path in pretrain.checkpoints(folder)] == ["checkpoint-0000004"] and not (folder / "model").exists()
    (folder / ".checkpoint-0000008.partial").mkdir()  # as a kill in mid-write leaves it
    file.unlink()
    finished(torchrun(tmp_path, job), tmp_path)
    assert weights(folder) == weights(two / "tiny-fsdp")
    assert course(folder, "loss") == course(two / "tiny-fsdp", "loss")


def workers(folder):
    """Processes that torchrun started in a session of their own."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes().decode()
        except OSError:
            continue
        if str(folder) in line and "pretrain_jobs" in line:
            yield int(entry.name)


def test_making_activations_again_changes_nothing(small, one, tmp_path):
    pretrain.run(recipe(small.folder, recompute=True), tmp_path)
    assert course(tmp_path, "loss") == pytest.approx(course(one / "tiny", "loss"), rel=1e-6)


def test_bfloat16_trains_and_keeps_its_weights_in_float32(small, one, tmp_path):
    pretrain.run(recipe(small.folder, precision="bfloat16"), tmp_path)
    a, b = course(tmp_path, "loss"), course(one / "tiny", "loss")
    assert a != b and a == pytest.approx(b, rel=0.02)
    assert {p.dtype for p in released.load(tmp_path / "model").parameters()} == {torch.float32}


def test_the_finished_model_loads_with_its_tokenizer_and_gives_the_bits_that_the_log_has(small, one):
    folder = one / "tiny" / "model"
    model, own = released.load(folder), released.tokenizer(folder)
    nats = size = 0
    for row in small.rows("validation")[:5].astype(int).tolist():
        for _, doc in documents(row, small.start, small.pad):
            if len(doc) > 1:
                with torch.no_grad():
                    nats += float(
                        F.cross_entropy(model(torch.tensor([doc])).logits[0, :-1], torch.tensor(doc[1:]), reduction="sum")
                    )
                size += len(own.decode(doc[1:], skip_special_tokens=True).encode())
    assert course(one / "tiny", "eval_bits_per_byte")[0] == pytest.approx(nats / math.log(2) / size, rel=1e-4)
    out = model.generate(torch.tensor([own.encode("the loop", add_special_tokens=False)]), max_new_tokens=4, do_sample=False)
    assert out.shape[1] > 2


def test_finished_runs_end_at_once_and_another_recipe_is_refused(small, one, capsys):
    before = weights(one / "tiny")
    pretrain.run(recipe(small.folder), one / "tiny")
    assert weights(one / "tiny") == before and len(course(one / "tiny", "loss")) == 8
    with pytest.raises(ValueError, match="holds a run of another recipe: choose another folder with --out"):
        pretrain.run(recipe(small.folder, lr=0.02), one / "tiny")


def test_a_loss_that_is_no_number_ends_the_run_with_a_sentence(small, tmp_path):
    with pytest.raises(ValueError, match=r"^the loss is (nan|inf) at step \d: lower lr or clip"):
        pretrain.run(recipe(small.folder, lr=1e30, clip=1e30, warmup=0), tmp_path)


# ---- recipes and commands -----------------------------------------------------------------------------------------------

# the axes paper's 17: parameters held and used by a token, tensors apart (published)
PUBLISHED = {
    **dict.fromkeys(("dense_d28", "dense_ouro", "dense_middle"), (1_496_667_648,) * 2),
    "dense_d112": (3_676_915_200,) * 2,
    **dict.fromkeys(
        (
            *("dense_huginn", "dense_shared_hl", "dense_split_hl", "dense_split_hl_x2"),
            *("dense_ouro_raw_injection", "dense_middle_prelude_injection"),
        ),
        (1_499_030_016,) * 2,
    ),
    **dict.fromkeys(("moe_ouro", "moe_middle"), (8_780_889_600, 1_563_803_136)),
    **dict.fromkeys(("moe_huginn", "moe_shared_hl", "moe_middle_input_injection"), (8_783_251_968, 1_566_165_504)),
    "moe_ff112": (32_813_803_008, 3_945_457_152),
    "moe_ff112_prelude_injection": (32_816_165_376, 3_947_819_520),  # that and one injection, as in the dense pairs
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_axes_papers_recipes_have_the_published_counts_and_numbers(name):
    r = pretrain_recipe.read(paths.params() / "pretrain" / f"{name}.yaml")
    config = r.config(250_624)
    assert (cost.parameters(config), cost.activated(config)) == PUBLISHED[name]
    assert (r.steps, r.rows * r.data.length, r.betas, r.weight_decay, r.decay, r.clip) == (
        119_210,
        4_194_304,
        [0.9, 0.98],
        0.1,
        "all",
        1.0,
    )
    assert (r.lr, r.eps, r.seed, r.init, r.init_std) == (6e-4, 1e-8, 1, "truncated_normal", 0.02)
    assert r.last_step * r.rows * r.data.length in (335_544_320_000, 500_002_979_840)
    assert r.fresh_state is (config.state_init == "noise") and r.balance == (0.001 if config.n_experts else 0)


def test_seventeen_recipes_of_the_axes_paper_are_there_and_all_others_build():
    assert len(PUBLISHED) == 17
    assert set(pretrain_recipe.names()) - set(PUBLISHED) == {"tiny", "tiny_ouro", "tiny_huginn", "ouro", "huginn"}
    for name in pretrain_recipe.names():
        r = pretrain_recipe.read(paths.params() / "pretrain" / f"{name}.yaml")
        with torch.device("meta"):
            LoopedModel(r.config(2048))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"steps": None}, r"r.yaml: steps is None: input should be a valid integer"),
        ({"colour": 1}, r"r.yaml: colour is no key of a recipe: they are model, "),
        ({"lr": -1.0}, r"r.yaml: lr is -1.0: input should be greater than 0"),
        ({"data": {"length": 1}}, r"r.yaml: data.length is 1: "),
        ({"engine": "tpu"}, r"r.yaml: engine is 'tpu': input should be 'auto', 'ddp' or 'fsdp'"),
        ({"betas": [0.9]}, r"r.yaml: betas is \[0.9\]: "),
        ({"base": "none.yaml"}, r"none.yaml is not there: params/pretrain/ holds axes_paper, "),
        ({"base": "r.yaml"}, r"r.yaml: base names a file that is built on it"),
        ({"base": 3}, r"r.yaml must hold keys and values, base among them the name of a file beside it"),
    ],
)
def test_a_wrong_recipe_is_told_by_file_and_key(tmp_path, change, said):
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(RECIPE | change))
    with pytest.raises(ValueError, match=said):
        pretrain_recipe.read(tmp_path / "r.yaml")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": "nobody/nothing"}, "model is 'nobody/nothing': it must be a checkpoint that `python -m lib models` lists"),
        ({"model": {"colour": 1}}, "model.colour is no key of a model's configuration"),
        ({"model": {"core": 0}}, "core is 0: it must be at least 1"),
        ({"model": {"core": "two"}}, "model: .*core"),
        ({"model": MODEL | {"vocab_size": 100}}, "model.vocab_size is 100: it must be at least 280"),
        ({"loss": "exit_weighted"}, "loss is 'exit_weighted': model.exit_gate must be true"),
        ({"balance": 0.1}, "balance is 0.1: it must be 0 where model.feed_forward is 'dense'"),
        ({"fresh_state": True}, "fresh_state is true: it must be false where model.state_init is 'input'"),
        (
            {"loop_sampling": "poisson_lognormal", "model": MODEL | {"unrolled": True}},
            "it must be 'fixed' for an unrolled core",
        ),
        ({"rows": 7}, "rows is 7: it must be a multiple of rows_per_device, 2, times the processes, 1"),
        ({"data": {"folder": "nowhere"}}, "data.folder is 'nowhere', which is no corpus: `python -m lib corpus` makes one"),
    ],
)
def test_values_that_do_not_fit_together_are_told_before_anything_is_trained(small, tmp_path, change, said):
    with pytest.raises(ValueError, match=said):
        pretrain.run(recipe(small.folder, **change), tmp_path / "out")
    assert not list((tmp_path).rglob("checkpoint*"))


def test_a_device_that_is_not_there_is_told(small, tmp_path):
    with pytest.raises(ValueError, match="device is 'tpu': it must be cpu or cuda"):
        pretrain.run(recipe(small.folder), tmp_path / "out", "tpu")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="torch finds no GPU on this machine: it must be cpu"):
            pretrain.run(recipe(small.folder), tmp_path / "out", "cuda")


def test_the_commands_make_a_corpus_and_train_on_it(tmp_path, monkeypatch, capsys):
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    made = ["corpus", str(tmp_path / "made"), str(tmp_path / "texts.jsonl"), "--vocabulary", "280", "--length", str(LENGTH)]
    assert cli.main(made) == 0
    assert f"rows of {LENGTH} tokens" in capsys.readouterr().out
    assert cli.main(made) == 1
    assert "is there already: give the name of a new folder" in capsys.readouterr().err
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(RECIPE | {"data": {"folder": str(tmp_path / "made")}}))
    monkeypatch.setenv("LOOPED_OUTPUTS", str(tmp_path / "outputs"))
    assert cli.main(["pretrain", str(tmp_path / "r.yaml"), "--seed", "5"]) == 0
    said = capsys.readouterr().out
    assert "step 8 of 8: " in said and "bits a byte" in said
    out = tmp_path / "outputs" / "pretrain" / "r"
    assert Recipe(**json.loads((out / "recipe.json").read_text())).seed == 5 and (out / "model" / "config.json").exists()
    assert cli.main(["models", str(out / "model")]) == 0
