"""lm-eval on looped models: scores by brute force, alone and in padded batches, at each loop count, and what is refused."""

import json
import re

import pandas as pd
import pytest
import torch
import yaml

from lib import benchmark_suite, paths, released
from lib.boundary import every, never
from tests import checkpoints
from tests.models import small

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed: `make benchmark-tools` installs it")
datasets = pytest.importorskip("datasets", reason="datasets, which lm-eval reads its data with, is not installed")

from lm_eval import evaluator  # noqa: E402
from lm_eval.api.instance import Instance  # noqa: E402

from lib import benchmark, benchmark_model  # noqa: E402
from lib.benchmark_model import LoopedLM  # noqa: E402

TASKS = paths.ROOT / "tests/benchmark_tasks"
LONG = " Follow the pointer from a to q, then from q to z." * 4
PAIRS = [
    ("Which gate is one?", " A"),
    ("Which gate is one?", " B"),
    ("Which gate is one?", " the first of the two"),
    ("A looped model applies one stack of layers again" + LONG, " and again, and depth becomes a number."),
    ("The", " state"),
    ("The state is ", "normalised"),
    (LONG, " zero"),
    ("", "A looped model"),
    ("depth", ""),
]
PROMPTS = ["Which gate is one?", "The", LONG, "A looped model applies one stack of layers again and", ""]


def own(folder):
    """A model of this project, saved, with a tokenizer beside it."""
    folder.mkdir()
    size = checkpoints.tokenizer(folder)
    model = small(envelope="sandwich", vocab_size=size, injection="concat", state_init="noise", boundary=2)
    model.generation_config.eos_token_id = 0
    model.save_pretrained(folder)
    return folder


MAKERS = {
    "own": own,
    "Ouro": checkpoints.ouro,
    "Huginn": checkpoints.huginn,
    "axes, hash state, experts": lambda folder: checkpoints.axes(folder, base=checkpoints.AXES | checkpoints.EXPERTS),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A checkpoint folder by the name of its kind."""
    root = tmp_path_factory.mktemp("models")
    return {name: make(root / re.sub(r"\W+", "-", name)) for name, make in MAKERS.items()}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Results and cached data sets go to the test's folder; tasks name their data from the repository root."""
    monkeypatch.chdir(paths.ROOT)
    monkeypatch.setenv("LOOPED_OUTPUTS", str(tmp_path / "outputs"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(evaluator, "add_env_info", lambda results: None)  # seconds of looking at the machine


def requests(kind, arguments):
    return [Instance(kind, {}, a, i, ("t", i, 1)) for i, a in enumerate(arguments)]


def language_model(folder, dtype="float64", **how):
    return LoopedLM(released.load(folder, dtype=dtype), released.tokenizer(folder), **how)


def by_hand(lm, context, continuation):
    """The definition: the whole text in one row without padding, every logit formed, log_softmax read at each token."""
    text = context + continuation
    ids, before = (lm.tokenizer(part, add_special_tokens=False)["input_ids"] for part in (text, context.rstrip()))
    if not before:
        first = lm.model.generation_config.bos_token_id
        first = lm.stops[0] if first is None else first
        ids, before = [first, *ids], [first]
    with torch.no_grad():
        logits = lm.model(torch.tensor([ids]), loops=lm.loops, boundary=lm.boundary).logits[0].double()
    told = [logits[i - 1].log_softmax(0) for i in range(len(before), len(ids))]
    score = sum(float(p[ids[i]]) for i, p in enumerate(told, start=len(before)))
    return score, all(int(p.argmax()) == ids[i] for i, p in enumerate(told, start=len(before)))


@pytest.mark.parametrize("name", MAKERS)
def test_likelihoods_are_those_of_one_plain_row_whatever_the_batch(folders, name):
    for dtype, close in (("float64", 1e-10), ("float32", 1e-4)):
        lm = language_model(folders[name], dtype, loops=2, boundary=every(1))
        found = {}
        for size in (1, 8):
            lm.batch_size = size
            found[size] = lm.loglikelihood(requests("loglikelihood", PAIRS))
        expected = [by_hand(lm, *pair) for pair in PAIRS]
        for got in found.values():
            assert [score for score, _ in got] == pytest.approx([score for score, _ in expected], abs=close)
            assert [greedy for _, greedy in got] == [greedy for _, greedy in expected]
        assert found[8][-1] == (0.0, True), "nothing follows"


@pytest.mark.parametrize("name", MAKERS)
def test_generation_writes_the_same_alone_in_a_batch_and_by_hand(folders, name):
    lm = language_model(folders[name], loops=3, boundary=never)
    asked = requests("generate_until", [(prompt, {"until": ["\n\n"], "max_gen_toks": 7}) for prompt in PROMPTS])
    alone, together = [], []
    for size, found in ((1, alone), (8, together)):
        lm.batch_size = size
        found += lm.generate_until(asked)
    expected = []
    for prompt in PROMPTS:
        ids = start = lm.tokenizer(prompt, add_special_tokens=False)["input_ids"] or lm.first
        while len(ids) < len(start) + 7:
            with torch.no_grad():
                ids = [*ids, int(lm.model(torch.tensor([ids]), loops=3, boundary=never).logits[0, -1].argmax())]
            if ids[-1] in lm.stops:
                ids = ids[:-1]
                break
        expected.append(lm.tokenizer.decode(ids[len(start) :], skip_special_tokens=True))
    assert alone == together == expected and len(set(expected)) > 1


def test_the_loop_count_and_the_boundary_change_scores(folders):
    model, tokenizer = released.load(folders["own"], "float64"), released.tokenizer(folders["own"])
    asked = requests("loglikelihood", PAIRS[:3])
    seen = set()
    for loops in (1, 2, 4):
        for boundary in (never, every(1)):
            lm = LoopedLM(model, tokenizer, loops, boundary)
            got = [score for score, _ in lm.loglikelihood(asked)]
            assert got == pytest.approx([by_hand(lm, *pair)[0] for pair in PAIRS[:3]], abs=1e-10)
            seen.add(round(got[0], 9))
    assert len(seen) == 5, "at one loop every boundary is the same"
    as_trained = LoopedLM(model, tokenizer)
    assert (as_trained.loops, as_trained.boundary) == (4, every(2))


def test_what_is_longer_than_the_cap_keeps_its_last_tokens(folders):
    lm = language_model(folders["Huginn"], max_length=9)
    context, answer = lm.pair(LONG, " zero")
    ids = [*context, *answer]
    with torch.no_grad():
        logits = lm.model(torch.tensor([ids[:-1][-9:]]), loops=lm.loops).logits[0].log_softmax(-1)
    expected = sum(float(logits[i, token]) for i, token in zip(range(9 - len(answer), 9), answer, strict=True))
    (score, _), whole = lm.loglikelihood(requests("", [(LONG, " zero")]))[0], by_hand(lm, LONG, " zero")[0]
    assert score == pytest.approx(expected, abs=1e-10) and abs(score - whole) > 1e-6
    how = {"until": [], "max_gen_toks": 4}
    kept = lm.tokenizer.decode(context[-9:])
    assert lm.tokens(kept) == context[-9:]
    assert lm.generate_until(requests("", [(LONG, how)])) == lm.generate_until(requests("", [(kept, how)]))
    with pytest.raises(ValueError, match=r"max_length is 9: it must be at least \d+, the tokens of an answer"):
        lm.loglikelihood(requests("", [("a", LONG)]))


@pytest.mark.parametrize("cap", [5, 9, 4096])
def test_a_whole_text_is_scored_once_a_token_behind_all_that_fits(folders, cap):
    lm = language_model(folders["Ouro"], max_length=cap)
    texts = [LONG, "The state", ""]
    got = lm.loglikelihood_rolling(requests("", [(text,) for text in texts]))
    for text, score in zip(texts, got, strict=True):
        ids = [*lm.first, *lm.tokens(text)]
        expected = 0.0
        for begin in range(1, len(ids), cap):
            end = min(begin + cap, len(ids))
            with torch.no_grad():
                logits = lm.model(torch.tensor([ids[max(0, end - 1 - cap) : end - 1]])).logits[0].log_softmax(-1)
            expected += sum(float(logits[i - end, ids[i]]) for i in range(begin, end))
        assert score == pytest.approx(expected, abs=1e-10)


def test_generation_ends_at_a_string_a_special_token_or_the_end_of_text(folders):
    lm = language_model(folders["own"])

    def write(until, tokens=12):
        return lm.generate_until(requests("", [("The state", {"until": until, "max_gen_toks": tokens})]))[0]

    lm.stops, long = [], write([])
    ids = lm.tokens(long)
    assert len(ids) > 6
    half = long[len(long) // 2 : len(long) // 2 + 2]
    assert write(half) == write([half, "never written"]) == long[: long.index(half)]
    made, plain = [], lm.model.generate
    lm.model.generate = lambda *a, **k: made.append(plain(*a, **k)) or made[-1]
    write([half])
    write([])
    before = len(lm.tokens("The state"))
    assert made[0].shape[1] < made[1].shape[1] == before + 12, "it stops there"
    tokens = made[1][0, before:].tolist()
    k = next(i for i, token in enumerate(tokens) if token != tokens[0])
    lm.stops = [tokens[k]]
    assert write([]) == lm.tokenizer.decode(tokens[:k]), "the end of text is cut off"
    lm.stops, lm.tokenizer.get_added_vocab = [], lambda: {"<|stop|>": tokens[k]}
    assert write(["<|stop|>"]) == lm.tokenizer.decode(tokens[:k])
    with pytest.raises(ValueError, match="generation_kwargs has length_penalty: it must be one of until, max_gen_toks"):
        lm.generate_until(requests("", [("a", {"length_penalty": 2})]))


def test_the_beginning_of_text_is_what_tokenizer_family_or_caller_say(folders):
    model, tokenizer = released.load(folders["own"]), released.tokenizer(folders["own"])
    assert benchmark_model.beginning(model, tokenizer, None) == []
    with pytest.raises(ValueError, match="add_bos is true, and neither model nor tokenizer has a token"):
        benchmark_model.beginning(model, tokenizer, True)
    tokenizer.bos_token = checkpoints.SPECIAL[1]
    for add, family, expected in ((None, "", []), (True, "", [1]), (None, "axes paper", [1]), (False, "axes paper", [])):
        lm = LoopedLM(model, tokenizer, add_bos=add, family=family)
        assert lm.start == expected and lm.context("a") == [*expected, *lm.tokens("a")]
        assert lm.context("") == [1], "there is always a token to begin with"
        assert lm.pair("a", " b") == ([*expected, *lm.tokens("a")], lm.tokens(" b"))
    lm = LoopedLM(model, tokenizer, add_bos=True)
    assert lm.context("<|im_start|>a") == lm.context("a"), "never twice"


def test_one_command_scores_tasks_at_each_loop_count(folders, tmp_path, capfd):
    folder = benchmark.run(str(folders["own"]), ["tiny_choice", "tiny_ending", "tiny_writing", "tiny_text"], [1, 2], limit=4,
                           dtype="float64", include_path=[str(TASKS)])  # fmt: skip
    assert folder == tmp_path / "outputs/benchmark/own"
    assert "1 loops, likelihoods" in capfd.readouterr().err
    frame = pd.read_csv(folder / "results.csv")
    assert list(frame.columns) == ["task", "metric", "loops", "value", "stderr", "n", "shots"]
    of_writing = frame[frame["task"] == "tiny_writing"].iloc[0]
    assert (of_writing["metric"], of_writing["n"], of_writing["shots"]) == ("exact_match,first", 3, 2)
    told = json.loads((folder / "results.json").read_text())
    assert told["trained_loops"] == 4 and told["boundary"] == 2 and told["begins_with"] == []
    assert (folder / "accuracy.png").stat().st_size > 5000
    assert {path.name for path in folder.iterdir()} == {"results.csv", "results.json", "accuracy.png"}
    items = json.loads((TASKS / "choice.json").read_text())[:4]
    endings = json.loads((TASKS / "ending.json").read_text())
    for loops in (1, 2):
        lm = language_model(folders["own"], loops=loops)
        picked = []
        for item in items:
            scores = [by_hand(lm, f"{item['question']}\nAnswer:", f" {choice}")[0] for choice in item["choices"]]
            picked.append(max(range(len(scores)), key=scores.__getitem__) == item["gold"])
        mean = sum(by_hand(lm, e["text"], f" {e['ending']}")[0] for e in endings) / len(endings)
        got = frame[frame["loops"] == loops].set_index(["task", "metric"])["value"]
        assert got["tiny_choice", "acc"] == sum(picked) / 4
        assert got["tiny_ending", "perplexity"] == pytest.approx(float(torch.tensor(-mean).exp()), rel=1e-5)
    assert frame.groupby("task")["value"].nunique()["tiny_ending"] > 1
    shown = benchmark.table(folder)
    assert "K = 2" in shown and "tiny_text" in shown and "acc_norm" not in shown, "one measure a task"


def test_a_group_has_one_score_and_a_tag_those_of_its_tasks(folders):
    folder = benchmark.run(str(folders["own"]), ["tiny_group", "tiny_tag"], [1], include_path=[str(TASKS)])
    rows = pd.DataFrame(json.loads((folder / "results.json").read_text())["results"])
    assert list(rows[rows["reported"]]["task"]) == ["tiny_group", "tiny_choice", "tiny_ending"]
    of_parts = rows[(rows["metric"] == "acc") & (rows["task"] != "tiny_group")].drop_duplicates("task")
    whole = rows[rows["task"] == "tiny_group"].iloc[0]
    assert (whole["metric"], whole["n"], whole["shots"]) == ("acc", of_parts["n"].sum(), 0) and whole["n"] == 9
    assert whole["value"] == pytest.approx((of_parts["value"] * of_parts["n"]).sum() / 9)


def test_a_model_whose_answers_are_known_is_always_right(folders, tmp_path):
    lm = language_model(folders["Ouro"], loops=2)
    settings, questions = {"until": ["\n"], "max_gen_toks": 6}, ["Which gate is one?", "depth", "The state is zero" + LONG]
    written = lm.generate_until(requests("", [(f"Q: {q}\nA:", settings) for q in questions]))
    docs = [{"question": q, "answer": a} for q, a in zip(questions, written, strict=True)]
    (tmp_path / "own.json").write_text(json.dumps(docs))
    task = yaml.safe_load((TASKS / "writing.yaml").read_text()) | {"task": "tiny_own", "num_fewshot": 0, "filter_list": None}
    task["dataset_kwargs"] = {"data_files": {"train": str(tmp_path / "own.json"), "test": str(tmp_path / "own.json")}}
    task["generation_kwargs"] = settings
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(task))
    known = [{"question": q, "answer": first_token(lm, f"Q: {q}\nA:")} for q in map("From {} to q.".format, "abcdefgh")]
    known = [doc for doc in known if doc["answer"]]
    assert len(known) > 2
    (tmp_path / "known.json").write_text(json.dumps(known))
    del task["generation_kwargs"]
    task |= {"task": "tiny_known", "output_type": "loglikelihood", "metric_list": [{"metric": "acc"}]}
    task["dataset_kwargs"] = {"data_files": {"train": str(tmp_path / "known.json"), "test": str(tmp_path / "known.json")}}
    (tmp_path / "known.yaml").write_text(yaml.safe_dump(task))
    how = {"dtype": "float64", "include_path": [str(tmp_path)]}
    folder = benchmark.run(str(folders["Ouro"]), ["tiny_own", "tiny_known"], [2, 5], **how)
    value = pd.read_csv(folder / "results.csv").set_index(["task", "metric", "loops"])["value"]
    for task, metric in (("tiny_own", "exact_match"), ("tiny_known", "acc")):
        assert value[task, metric, 2] == 1.0 and value[task, metric, 5] < 1.0


def first_token(lm, prompt):
    """The text of the token that a plain pass makes likeliest, where that text alone is that token; else nothing."""
    ids = lm.tokens(prompt)
    with torch.no_grad():
        token = int(lm.model(torch.tensor([ids]), loops=lm.loops).logits[0, -1].argmax())
    text = lm.tokenizer.decode([token])
    return text if lm.tokens(prompt + text) == [*ids, token] else ""


def test_a_list_has_its_own_shots_cap_and_measure(folders, tmp_path, monkeypatch):
    entry = {"task": "tiny_writing", "shots": 1, "metric": "exact_match,first", "max_prompt": 16, "max_new": 2, "items": 3}
    both = {"short": entry, "choice": {"task": "tiny_choice", "shots": 0, "metric": "acc_norm", "max_prompt": 30, "items": 5}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"source": "a test", "tasks": both}))
    monkeypatch.setattr(benchmark_suite, "folder", lambda: tmp_path)
    made, plain = [], LoopedLM.written
    monkeypatch.setattr(LoopedLM, "written", lambda lm, rows, how: made.append((rows, how)) or plain(lm, rows, how))
    folder = benchmark.run(str(folders["own"]), ["mine"], [2], include_path=[str(TASKS)])
    (rows, how), *_ = made
    assert max(map(len, rows)) == 16 and how["max_gen_toks"] == 2 and how["until"] == ["\n", "Q:"]
    told = json.loads((folder / "results.json").read_text())
    assert {(r["task"], r["metric"], r["shots"]) for r in told["results"] if r["reported"]} == {
        ("mine:short", "exact_match,first", 1),
        ("mine:choice", "acc_norm", 0),
    }
    assert [one.name for one in benchmark_suite.expand(["mine:choice"])] == ["mine:choice"]


def test_the_axes_papers_protocol_names_tasks_that_lm_eval_has():
    entries = benchmark_suite.load(paths.params() / "benchmark/axes_paper.yaml")
    assert len(entries) == 11 and entries["gsm8k"].shots == 8 and entries["human_eval_plus"].runs_code
    root = paths.Path(lm_eval.__path__[0]) / "tasks"
    where = ("arc", "hellaswag", "mmlu/default", "mmlu_pro", "bbh/cot_fewshot", "triviaqa", "drop", "gsm8k", "minerva_math")
    files = [file for name in (*where, "humaneval", "mbpp") for file in (root / name).glob("*.yaml")]
    named = set(re.findall(r"^(?:task|group): (\S+)$", "\n".join(file.read_text() for file in files), re.M))
    assert {entry.task for entry in entries.values()} <= named
    text = "\n".join(file.read_text() for file in [*files, *root.glob("mmlu_pro/*_yaml"), *root.glob("bbh/*/_*yaml")])
    for entry in entries.values():
        measure = re.split(",|@", entry.metric)
        assert all(word in text for word in measure if word != "1"), entry.metric


@pytest.mark.parametrize(
    "change, said",
    [
        ({"shots": -1}, "tasks.gsm8k.shots is -1: input should be greater than or equal to 0"),
        ({"shots": "8"}, "tasks.gsm8k.shots is '8': input should be a valid integer"),
        ({"max_prompts": 3}, "tasks.gsm8k.max_prompts is no key of it: it must be one of task, shots, metric"),
        ({"metric": None}, "tasks.gsm8k.metric is None: input should be a valid string"),
        ({"task": ""}, "tasks.gsm8k.task is '': string should have at least 1 character"),
    ],
)
def test_a_mistake_in_a_list_is_named(tmp_path, change, said):
    right = yaml.safe_load((paths.params() / "benchmark/axes_paper.yaml").read_text())
    right["tasks"]["gsm8k"] |= change
    (tmp_path / "list.yaml").write_text(yaml.safe_dump(right))
    with pytest.raises(ValueError, match=re.escape(f"list.yaml: {said}")):
        benchmark_suite.load(tmp_path / "list.yaml")


def test_what_is_wrong_with_a_list_or_its_names_is_one_sentence(tmp_path):
    (tmp_path / "a.yaml").write_text("tasks: [")
    (tmp_path / "b.yaml").write_text("source: x")
    for name, said in (("a.yaml", "is not valid YAML"), ("b.yaml", "tasks is missing")):
        with pytest.raises(ValueError, match=rf"{name}:? {said}"):
            benchmark_suite.load(tmp_path / name)
    for names, said in (
        (["axes_paper:nope"], "axes_paper has no task 'nope': it must be one of arc_challenge, hellaswag"),
        (["a", "a"], "tasks has a twice"),
        (["axes_paper", "axes_paper:math"], "tasks has axes_paper:math twice"),
        (["a", ""], "tasks has an empty name"),
    ):
        with pytest.raises(ValueError, match=said):
            benchmark_suite.expand(names)


def test_what_cannot_be_run_is_refused_before_the_model_is_loaded(folders, tmp_path, monkeypatch):
    monkeypatch.setattr(released, "load", None)
    absent = {"task": "tiny_absent", "dataset_path": "nobody/nothing", "test_split": "test", "output_type": "loglikelihood"}
    (tmp_path / "absent.yaml").write_text(yaml.safe_dump(absent | {"doc_to_text": "", "doc_to_target": ""}))
    code = yaml.safe_load((TASKS / "ending.yaml").read_text()) | {"task": "tiny_code", "unsafe_code": True}
    (tmp_path / "code.yaml").write_text(yaml.safe_dump(code))

    def refused(said, tasks=("tiny_choice",), **how):
        with pytest.raises(ValueError, match=said) as caught:
            benchmark.run(str(folders["own"]), list(tasks), **({"include_path": [str(TASKS), str(tmp_path)]} | how))
        assert "\n" not in str(caught.value)

    refused("loops is 0: it must be at least 1", loops=[4, 0])
    refused("limit is 0: it must be at least 1", limit=0)
    refused("shots is -1: it must be 0 or more", shots=-1)
    refused("boundary is -2: it must be -1", boundary=-2)
    refused("dtype is 'int8': it must be one of", dtype="int8")
    refused("include_path is nowhere: it must be a folder", include_path=["nowhere"])
    refused(r"what these tasks need is not on this machine: tiny_absent \(.*HF_HUB_OFFLINE=0", ["tiny_choice", "tiny_absent"])
    refused("tiny_code would run code that the model writes: add --run-code", ["tiny_code"])
    refused("axes_paper:human_eval_plus, axes_paper:mbpp_plus would run code", ["axes_paper"])
    with monkeypatch.context() as patch:
        patch.setattr(lm_eval.tasks.TaskManager.__init__, "__kwdefaults__", None)
        own_only = lm_eval.tasks.TaskManager
        patch.setattr(
            lm_eval.tasks, "TaskManager", lambda include_path, include_defaults=False: own_only(None, include_path, False)
        )
        refused("tasks has tiny_choise, which is no task: it must be another name, perhaps tiny_choice", ["tiny_choise"])
    with pytest.raises(ValueError, match="neither a folder nor a hub id"):
        benchmark.run("nowhere", ["tiny_choice"])


def test_a_batch_is_smaller_where_its_logits_would_be_too_many(monkeypatch):
    monkeypatch.setattr(benchmark_model, "LOGITS", 100)
    lengths, answers = [5, 9, 7, 3, 3], [1, 4, 1, 1, 1]
    parts = list(benchmark_model.batches(lengths, answers, 3, 20))
    assert parts == [[1], [2, 0, 3], [4]], "longest first, and one row is always run"
