"""The audit: four kinds of model from the command line to the report, its rules on made-up numbers, its cost by counting."""

import json
import math
import re

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lib import (
    audit,
    audit_facts,
    audit_foreign,
    audit_readings,
    audit_report,
    cli,
    cost,
    foreign,
    params,
    prompts,
    released,
    tasks,
)
from lib.boundary import Boundary
from lib.config import LoopedConfig
from lib.evaluation import prefix_of, sweep
from lib.looped import LoopedModel
from lib.tasks import Task
from lib.training import Recipe, make_run, trained
from tests import checkpoints, test_prompts
from tests.fixtures import FOLDER
from tests.models import EXPERTS, VARIANTS, small, tokens

LOOPS = [1, 2, 4]
DEFAULTS = params.load("audit", "smoke")


def reads(make, folder):
    """A checkpoint whose tokenizer gives every answer as one token."""

    def words(inside):
        test_prompts.TOKENIZER.save_pretrained(inside)
        return len(test_prompts.TOKENIZER)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "tokenizer", words)
        return make(folder)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(outputs folder, {kind: its model's folder}), with LOOPED_OUTPUTS set to that folder."""
    root = tmp_path_factory.mktemp("audit")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOOPED_OUTPUTS", str(root / "outputs"))
        recipe = Recipe(steps=250, batch_size=32, lr=8e-3, warmup=20)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        run = make_run(Task("circuit", 3, 1), recipe, 0, boundary=1, d_model=32, n_heads=4, d_ff=64, loops=2)
        folders = {"task": trained(run, root / "outputs" / "runs"), "tokens": root / "bare", "foreign": root / "hrm"}
        torch.set_num_threads(threads)
        small(envelope="sandwich", injection="concat", loops=3).save_pretrained(folders["tokens"])
        foreign.tiny("HRM-Text").save_pretrained(folders["foreign"])
        folders["prompts"] = reads(checkpoints.ouro, root / "ouro")
        yield root / "outputs", folders


def audited(made, capsys, kind, *words):
    """Audit one of the models on the command line: (what it printed, its report, its folder of results)."""
    outputs, folders = made
    capsys.readouterr()
    assert cli.main(["audit", str(folders[kind]), "--loops", "1,2,4", *words]) == 0, capsys.readouterr().err
    folder = outputs / "audit" / folders[kind].name
    return capsys.readouterr().out, json.loads((folder / "report.json").read_text()), folder


def again(monkeypatch, folder, **changes):
    """The facts of a second call, in which nothing can be loaded."""

    def refuse(*_, **__):
        raise AssertionError("the store holds every reading")

    monkeypatch.setattr(released, "load", refuse)
    monkeypatch.setattr(audit_foreign, "load", refuse)
    subject = audit.subject(DEFAULTS | {"model": str(folder), "at_loops": LOOPS} | changes)
    return audit_report._plain(audit_facts.facts(subject, audit_readings.measure(subject)))


def same_facts(report, facts):
    assert {key: value for key, value in report.items() if key not in ("made", "keys")} == facts
    assert set(facts) <= set(report["keys"])


def whole(folder, printed, report):
    """What every report has: all its files, one page that needs nothing beside it, and its verdict on the screen."""
    assert {path.suffix for path in folder.iterdir()} == {".html", ".json", ".png", ".csv", ".ipynb"}
    page = (folder / "report.html").read_text()
    links = re.findall(r"(?:src|href)\s*=\s*[\"']?([^\"'\s>]*)", page)
    assert links and all(link.startswith("data:image/png;base64,") for link in links) and "<script" not in page
    assert "url(" not in page and "@import" not in page
    images = re.findall(r"<img [^>]*>", page)
    assert all(re.search(r'alt="[^"]{20,}"', image) for image in images) and len(images) == len(list(folder.glob("*.png")))
    assert page.count("<h1>") == 1 and report["verdict"] in printed and str(folder / "report.html") in printed
    assert "weights " in printed.splitlines()[0] and "GFLOP/s measured here" in printed.splitlines()[0]


@torch.no_grad()
def predicted(model, ids, positions, K, period):
    """Arg-max at the answer positions by one forward pass at K."""
    at = torch.as_tensor(positions)[:, None]
    return model(torch.as_tensor(ids), loops=K, boundary=Boundary(period), answer_positions=at).logits[:, 0].argmax(-1).numpy()


def test_a_model_trained_here_is_read_on_its_own_task(made, capsys, monkeypatch):
    printed, report, folder = audited(made, capsys, "task", "--n", "48")
    whole(folder, printed, report)
    model, some = LoopedModel.from_pretrained(made[1]["task"]).eval(), tasks.evaluation_set(Task("circuit", 3, 1), 1, 48)
    right = {k: [predicted(model, some.ids, some.answer_position, K, k) == some.answer for K in range(1, 5)] for k in (0, 1)}
    intact, removed = (np.array(right[k]) for k in (1, 0))
    assert report["measure"] == "accuracy" and report["r0"] == 2 and report["n"] == 48 and report["largest_loops"] == 4
    assert report["value_r0"] == pytest.approx(intact[1].mean(), abs=1e-5) and report["value_r0"] > 0.9, "it learnt its task"
    for row in report["costs"]:
        K = row["K"] - 1
        assert row["value"] == pytest.approx(intact[K].mean() - removed[K].mean(), abs=1e-5)
        assert row["intact_only"] == (intact[K] & ~removed[K]).sum() and row["changed_only"] == (removed[K] & ~intact[K]).sum()
        assert row["low"] <= row["value"] <= row["high"]
    assert [row["K"] for row in report["costs"]] == [2, 4]
    fine = [K for K in range(1, 5) if intact[K - 1].mean() >= intact[1].mean() - 0.05]
    assert report["usable_from"] in fine and report["usable_to"] in fine
    assert report["usable_from"] - 1 not in fine and (report["usable_to"] == 4 or report["usable_to"] + 1 not in fine)
    doses = {(row["k"], row["K"]): row["value"] for row in report["doses"]}
    assert doses["never", 4] == pytest.approx(removed[3].mean(), abs=1e-5) and doses["1", 4] == pytest.approx(intact[3].mean())
    assert report["norms_at_boundary"] == 1 and report["norms_in_layers"] == 2 and report["equal_at_one_loop"]
    assert np.array_equal(intact[0], removed[0])
    same_facts(report, again(monkeypatch, made[1]["task"], n=48))


def test_a_checkpoint_that_reads_text_gets_prompts(made, capsys, monkeypatch):
    words = ("--n", "8", "--dtype", "float32")
    printed, report, folder = audited(made, capsys, "prompts", "--tasks", "circuit", *words)
    whole(folder, printed, report)
    model = released.load(made[1]["prompts"], "float32")
    found = {1: [], 0: []}
    for d in (1, 2):
        made_text = prompts.few_shot(Task("circuit", 3, 2), d, 8, released.tokenizer(made[1]["prompts"]), DEFAULTS["shots"])
        for group in made_text.groups:
            for k in found:
                found[k].append([predicted(model, group.ids, group.answer_position, K, k) for K in (3, 4)])
    intact, removed = (np.concatenate(found[k], axis=1) for k in (1, 0))
    assert report["read_on"] == "few-shot prompts" and report["measure"] == "agreement", "a random model passes no gate"
    assert report["cost_r0"] == pytest.approx((intact[0] != removed[0]).mean(), abs=1e-5)
    last = report["readout"][-1]
    modal = np.bincount(removed[1])
    assert (
        last["K"] == 4 and last["modal_share"] == pytest.approx(modal.max() / 16) and modal[last["modal_token"]] == modal.max()
    )
    assert last["modal_text"] == repr(released.tokenizer(made[1]["prompts"]).decode([last["modal_token"]]))
    assert report["by_task"][0]["competent"] is False and "does not pass the competence gate" in report["notes"][0]
    same_facts(report, again(monkeypatch, made[1]["prompts"], n=8, tasks=["circuit"], precision="float32"))


def test_any_other_model_reads_random_tokens(made, capsys, monkeypatch):
    printed, report, folder = audited(made, capsys, "tokens", "--n", "12")
    whole(folder, printed, report)
    ids = np.random.default_rng(0).integers(23, size=(12, audit.LENGTH))
    model = LoopedModel.from_pretrained(made[1]["tokens"]).eval()
    last = np.full(12, audit.LENGTH - 1)
    own, added = (predicted(model, ids, last, 3, k) for k in (0, 1))
    assert report["measure"] == "agreement" and report["change"] == "added" and report["largest_loops"] == 4
    assert report["cost_r0"] == pytest.approx((own != added).mean(), abs=1e-5) and report["value_r0"] == 1
    assert report["readout"][-1]["in_alphabet_share"] is None and "tokenizer.json is missing" in report["notes"][0]
    with torch.no_grad():
        states = list(model.trajectory(torch.as_tensor(ids), 4))
    moved = ((states[3] - states[2])[:, -1].norm(dim=-1) / states[2][:, -1].norm(dim=-1)).mean()
    assert report["update_intact_last"] == pytest.approx(float(moved), rel=1e-4)
    same_facts(report, again(monkeypatch, made[1]["tokens"], n=12))


@pytest.mark.parametrize("recipe, measured", [("dense_shared_hl", 2), ("moe_huginn", 1)])
def test_published_states_and_experts_are_read(recipe, measured, made, monkeypatch):
    folder = FOLDER / f"xllm-{recipe}-tiny" / "artifact"
    subject = audit.subject(DEFAULTS | {"model": str(folder), "at_loops": LOOPS, "n": 8, "precision": "float32"})
    assert subject.read_on == audit.TOKENS and subject.r0 == 8
    read = audit_readings.measure(subject)
    facts = audit_facts.facts(subject, read)
    ids = np.random.default_rng(0).integers(128, size=(8, audit.LENGTH))
    model = released.load(folder, "float32")
    own, added = (predicted(model, ids, np.full(8, audit.LENGTH - 1), 8, k) for k in (0, 1))
    assert facts["cost_r0"] == pytest.approx((own != added).mean(), abs=1e-5) and facts["equal_at_one_loop"]
    c = model.config
    assert facts["norms_at_boundary"] == 0 and facts["norms_in_layers"] == 2 * c.core
    with torch.no_grad():
        z = list(model.trajectory(torch.as_tensor(ids), 8))
    assert z[-1].shape[-1] == measured * c.d_model
    moved = ((z[7] - z[6])[:, -1].norm(dim=-1) / z[6][:, -1].norm(dim=-1)).mean()
    assert facts["update_intact_last"] == pytest.approx(float(moved), rel=1e-4)


def test_a_class_without_a_loader_is_instrumented_and_swept(made, capsys, monkeypatch):
    printed, report, folder = audited(made, capsys, "foreign", "--n", "4")
    whole(folder, printed, report)
    model = foreign.tiny("HRM-Text")
    ids = torch.randint(foreign.VOCABULARY, (4, audit.LENGTH), generator=torch.Generator().manual_seed(0))
    hidden = {}
    for K in LOOPS:
        foreign.set_loops(model, K)
        with torch.no_grad():
            hidden[K] = model.model(ids, use_cache=False).last_hidden_state
    for row, before in zip(report["swept"], (None, 1, 2), strict=True):
        now = hidden[row["K"]]
        assert row["state_norm"] == pytest.approx(float(now.norm(dim=-1).mean()), rel=1e-4)
        if before:
            change = (now - hidden[before]).norm(dim=-1) / hidden[before].norm(dim=-1)
            assert row["change"] == pytest.approx(float(change.mean()), rel=1e-3)
    assert report["norms_at_boundary"] == 2 and report["r0"] == 2 and "need a loader" in report["verdict"]
    same_facts(report, again(monkeypatch, made[1]["foreign"], n=4))


def test_the_intact_arm_can_be_another_boundary(made):
    subject = audit.subject(DEFAULTS | {"model": str(made[1]["task"]), "at_loops": [1, 2, 4], "n": 16, "boundary": 3})
    read = audit_readings.measure(subject)
    facts = audit_facts.facts(subject, read)
    assert subject.periods[0] == 3 and facts["boundary"] == "every 3 steps" and facts["change"] == "removed"
    assert "trained with it every step" in facts["notes"][0]
    pair = read.pairs[0]
    assert all(np.array_equal(pair.readings[k].entropy[0], pair.readings[3].entropy[0]) for k in subject.periods)


def test_a_tokenizer_without_the_answers_and_too_many_instances_are_told(made, tmp_path):
    subject = audit.subject(DEFAULTS | {"model": str(checkpoints.ouro(tmp_path / "ouro")), "tasks": ["circuit"]})
    assert subject.read_on == audit.TOKENS and "must be a single token" in subject.notes[0]
    few = audit.subject(DEFAULTS | {"model": str(made[1]["task"]), "n": 10**6})
    assert few.n == tasks.stratum_size(Task("circuit", 3, 1), 1) // 10 and "too few for more" in few.notes[0]


@pytest.mark.parametrize(
    "model, words, said",
    [
        ("", [], "no model is named"),
        ("nowhere/at-all", [], "nowhere/at-all is not on this machine: get it with `hf download"),
        ("no/such/folder", [], "neither a folder nor a hub id"),
        ("llama", [], "model_type is 'llama', which cannot be audited: it must be ouro, huginn_raven, looped"),
        ("pickled", [], "only safetensors are read"),
        ("task", ["--loops", "0,1"], "loops are [0, 1]: they must be one or more whole numbers of at least 1"),
        ("task", ["--loops", "1,two"], "loops is '1,two': it must be whole numbers with commas between"),
        ("task", ["--tasks", "sudoku"], "tasks has 'sudoku': each must be one of circuit, hops, paragg"),
        ("task", ["--dtype", "int8"], "dtype is 'int8': it must be one of bfloat16"),
        ("foreign", ["--dtype", "int8"], "dtype is 'int8': it must be one of bfloat16"),
        ("task", ["--device", "tpu"], "device is 'tpu': it must be cpu, or cuda"),
        ("task", ["--n", "0"], "n is 0: it must be at least 1"),
        ("task", ["--batch-size", "0"], "batch_size is 0: it must be at least 1"),
        ("task", ["--boundary", "-2"], "boundary is -2"),
        ("full", [], "of memory are free on cpu"),
        ("unrolled", [], "is an unrolled model's, whose steps each have layers of their own: it must be a looped one's"),
    ],
)
def test_a_mistake_is_one_sentence_and_nothing_is_written(made, tmp_path, monkeypatch, capsys, model, words, said):
    for kind in ("llama", "albert"):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "config.json").write_text(json.dumps({"model_type": kind}))
    (tmp_path / "albert" / "pytorch_model.bin").write_bytes(b"PK")
    small(unrolled=True, loops=3).save_pretrained(tmp_path / "unrolled")
    folders = {
        "unrolled": tmp_path / "unrolled",
        "llama": tmp_path / "llama",
        "pickled": tmp_path / "albert",
        "full": made[1]["task"],
    } | made[1]
    if model == "full":
        monkeypatch.setattr(cost, "free_memory", lambda device: 1000)
    monkeypatch.setenv("LOOPED_OUTPUTS", str(tmp_path / "outputs"))
    assert cli.main(["audit", str(folders.get(model, model)), *words]) == 1
    printed = capsys.readouterr().err
    assert said in printed and len(printed.strip().splitlines()) == 1 and not (tmp_path / "outputs").exists()


def test_a_spec_that_is_not_the_models_is_refused(made, tmp_path):
    small(loops=3).save_pretrained(tmp_path)
    for task, said in (
        ({"family": "hops"}, "cannot be made again"),
        ({"family": "hops", "width": 6, "max_depth": 2}, "means 106 tokens"),
    ):
        (tmp_path / "spec.json").write_text(json.dumps({"task": task}))
        with pytest.raises(ValueError, match=said):
            audit.subject(DEFAULTS | {"model": str(tmp_path)})


# --- the rules, on made-up numbers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values, r0, expected",
    [
        ([0.5, 0.8, 0.9, 0.9, 0.86, 0.7], 3, (3, 5)),
        ([0.9, 0.9, 0.9], 2, (1, 3)),
        ([0.1, 0.9, 0.1, 0.9], 2, (2, 2)),  # contiguous: the second peak does not count
        ([0.85, 0.9, 0.99], 2, (1, 3)),  # better than at r0 is usable; 0.05 below still is
        ([0.849, 0.9], 2, (2, 2)),
        ([0.9], 1, (1, 1)),
    ],
)
def test_the_usable_range_is_contiguous_and_at_most_the_margin_below(values, r0, expected):
    assert audit_facts.usable(np.array(values), r0) == expected


def test_the_usable_range_has_an_interval_where_there_are_clusters():
    right = np.ones((3, 40), dtype=bool)
    right[2, :4] = False  # 0.9 at K = 3: outside in most resamples, inside where the bad cluster is missing
    low, high = audit_facts.usable_interval(right, np.repeat(np.arange(10), 4), 2)
    assert low == [1, 1] and high == [2, 3]
    assert all(math.isnan(end) for end in audit_facts.usable_interval(right, np.zeros(40), 2)[1])


@pytest.mark.parametrize(
    "bits, share, inside, loss, kind, words",
    [
        (5.0, 1.0, 0.0, 0.05, "holds", "holds"),
        (5.0, 0.95, 0.0, 0.5, "one token", "token 7 (' the'), outside the alphabet, to 95% of the inputs, at 5.0 of 8.0 bits"),
        (5.0, 0.9, 1.0, 0.5, "one token", "inside the alphabet"),
        (5.0, 0.9, math.nan, 0.5, "one token", "(' the'), to 90%"),
        (4.0, 0.5, 0.0, 0.5, "undecided", "4.0 of 8.0 bits"),
        (3.9, 0.5, 0.4, 0.5, "off the alphabet", "only 40%"),
        (3.9, 0.5, 0.5, 0.5, "wrong answers", "loses 0.50"),
        (3.9, 0.5, math.nan, 0.5, "wrong answers", "loses 0.50"),
    ],
)
def test_how_a_readout_fails(bits, share, inside, loss, kind, words):
    row = {"entropy_bits": bits, "modal_share": share, "modal_token": 7, "in_alphabet_share": inside}
    found, said = audit_facts.failure(row, loss, 256, " the")
    assert found == kind and words in said and said.endswith(".")


@pytest.mark.parametrize(
    "change, measure, value, p, r0, said",
    [
        ("removed", "accuracy", (0.42, 0.38, 0.46), 1e-9, 4, "this model's contract: removing it costs 0.42 [0.38, 0.46]"),
        ("removed", "accuracy", (0.0, -0.01, 0.01), 1.0, 4, "costs nothing measurable at r0 (0.00 [-0.01, 0.01])"),
        ("removed", "accuracy", (0.42, 0.38, 0.46), 0.06, 4, "costs nothing measurable"),
        ("removed", "accuracy", (-0.2, -0.3, -0.1), 1e-9, 4, "removing it gains 0.20 [0.10, 0.30]"),
        ("added", "accuracy", (0.2, 0.1, 0.3), 1e-9, 4, "A loop boundary without a norm is part of this"),
        ("added", "agreement", (0.2, 0.1, 0.3), 1e-9, 4, "Adding a boundary norm changes 0.20 [0.10, 0.30] of the answers"),
        ("removed", "agreement", (0.0, 0.0, 0.0), 1.0, 4, "changes no measurable share"),
        ("removed", "accuracy", (0.0, 0.0, 0.0), 1.0, 1, "trained for one loop step"),
    ],
)  # fmt: skip
def test_the_verdict(change, measure, value, p, r0, said):
    found = {"change": change, "measure": measure, "cost_r0": value[0], "cost_r0_interval": value[1:], "cost_r0_p": p, "r0": r0}
    assert said in audit_facts.verdict(found)


def test_the_page_escapes_what_it_shows():
    facts = {"model": "<b>&", "family": "looped", "parameters": 3, "dtype": "float32", "device": "cpu", "read_on": "x", "n": 2}
    facts |= {
        "norms_at_boundary": 1,
        "norms_in_layers": 0,
        "norms_outside": 0,
        "r0": 1,
        "notes": ["<script>"],
        "verdict": "$x <i>",
    }
    page = audit_report.page(facts, {"one": 'a "quoted" < caption'}, {"one": b"png"}, {"command": "<u>"})
    assert "<b>" not in page and "<script>" not in page and "<u>" not in page and "$x &lt;i&gt;" in page
    assert 'alt="a &quot;quoted&quot; &lt; caption"' in page


# --- cost -------------------------------------------------------------------------------------------------------------------


def test_a_hand_computed_estimate():
    config = LoopedConfig(vocab_size=10, d_model=4, n_heads=2, d_ff=8, prelude=1, core=2, coda=1, loops=3)
    found = cost.estimate(config, prompts=5, tokens=6, prefix=7, loops=3, arms=2, bytes_each=2, batch_size=5)
    layers = 1 + 3 * 2 + 3 * 1
    layer = 4 * 12 + 4 * 4 + 3 * 4 * 8  # queries, keys and values; output; gate, up and down
    assert found.weights == 2 * (10 * 4 + 4 * (layer + 2 * 4) + 4 + 4 * 10)
    assert found.prefix == 2 * layers * 7 * 2 * 2 * 2
    rows = 5 * 6 * layers * (2 * layer + 4 * 13 * 4) + 7 * layers * (2 * layer + 4 * 7 * 4)
    assert found.flop == 2 * (rows + 5 * 3 * 2 * 4 * 10 + 3 * 2 * 4 * 10)
    assert found.memory == found.weights + found.prefix + found.activations and found.activations > 0
    both = found.plus(cost.estimate(config, 5, 6, 0, 3, 2, 2, 5))
    assert both.weights == found.weights and both.prefix == found.prefix and both.flop > 1.5 * found.flop


def test_parameters_resident_active_and_applied_counted_by_hand():
    shape = {
        "vocab_size": 10,
        "d_model": 4,
        "n_heads": 2,
        "d_ff": 8,
        "prelude": 1,
        "core": 2,
        "coda": 1,
        "injection": "diagonal",
    }
    outside, injection, attention = 2 * 10 * 4 + 4, 4 * 4 + 2 * 4, 4 * 12 + 4 * 4 + 2 * 4
    dense, router, expert = attention + 3 * 4 * 8, 4 * 5, 3 * 4 * 3
    routed = EXPERTS | {"d_expert": 3}
    split = {"state": "split", "h_cycles": 2, "l_cycles": 1, "repeats": 3}
    for values, stored, executed, whole, used in (
        ({"loops": 3}, 4, 8, dense, dense),
        ({"loops": 3, "unrolled": True}, 8, 8, dense, dense),
        ({"loops": 4} | split, 4, 14, dense, dense),
        ({"loops": 4} | split | routed, 4, 14, attention + router + 5 * expert, attention + router + 2 * expert),
        ({"loops": 3, "unrolled": True} | routed, 8, 8, attention + router + 5 * expert, attention + router + 2 * expert),
    ):
        config = LoopedConfig(**shape | values)
        assert (config.stored_layers, config.executed_layers) == (stored, executed)
        assert cost.parameters(config) == outside + stored * whole + injection
        assert cost.activated(config) == outside + stored * used + injection
        assert cost.applied(config) == outside + executed * used + config.loops * injection
    tied = LoopedConfig(**shape | {"loops": 3, "injection": "none", "tie_word_embeddings": True})
    assert cost.applied(tied) == 10 * 4 + 4 + 8 * dense and cost.activated(tied) == 10 * 4 + 4 + 4 * dense


@pytest.mark.parametrize(
    "envelope, values",
    [
        ("full_stack", {"boundary": 1, "block": "sandwich"}),
        ("sandwich", {"injection": "concat", "block": "sandwich_sum", "readout_order": "norm_coda_norm"}),
        ("sandwich", {"injection": "diagonal"}),
        *(("sandwich", VARIANTS[name]) for name in ("shared states", "split states", "unrolled, injected", "experts")),
    ],
)
@pytest.mark.parametrize("shared", [0, 7])
def test_the_estimate_is_what_torch_counts(envelope, values, shared):
    model, at = small(envelope=envelope, n_kv_heads=1, **values), torch.tensor([8])
    if "n_experts" in values:
        model = model.double()  # whose products of experts torch counts
    prefix, each = None, model.embed_tokens.weight.element_size()
    # the one kernel whose products torch counts
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        if shared:
            prefix = prefix_of(model, tokens(1, shared)[0], 5)
        list(sweep(model, tokens(6, 9), at, 5, prefix=prefix))
    found = cost.estimate(model.config, 6, 9, shared, 5, 1, each, 6)
    assert found.flop == pytest.approx(counter.get_total_flops(), rel=0.1)
    assert found.weights == sum(p.nbytes for p in model.parameters())
    if shared:
        layers = [layer for cache in (prefix.loop, *prefix.coda.values()) for layer in cache.filled.layers]
        assert found.prefix == sum(layer.keys.nbytes + layer.values.nbytes for layer in layers if layer.keys is not None)


def test_costs_in_words():
    found = cost.Cost(int(2.7 * 2**30), int(3.6 * 2**30), 2**20, 41 * 60 * 310e9)
    memory = "weights 2.7 GiB, shared prefix 3.6 GiB, activations 1 MiB"
    assert found.sentence(310e9) == f"{memory}, about 41 minutes at the 310 GFLOP/s measured here"
    assert cost.duration(30) == "under a minute" and cost.duration(9000) == "about 2.5 hours" and cost.size(0) == "0 B"
    assert cost.rate("cpu", torch.float32, seconds=0.01, width=64) > 1e6
    assert cost.free_memory("cpu") > 2**20
