"""The committed verdicts are what the committed tables say, and a number altered anywhere between them is noticed."""

import hashlib
import json
import shutil
import subprocess

import pandas as pd
import pytest

from lib import claims, paths, rules_scratch, verify

LAPTOP = paths.ROOT / "outputs/laptop"
SOUND = set()  # digests of notebooks' folders that were found sound, so that each is judged once


@pytest.fixture(autouse=True)
def _once(monkeypatch):
    """An unaltered notebook is judged again once in all tests."""
    judge = verify.of_notebook

    def once(folder):
        files = [*sorted(folder.glob("*.csv")), folder / "result.json"]
        content = [claims.rules_hash(), *(f"{f.name} {hashlib.sha256(f.read_bytes()).hexdigest()}" for f in files)]
        if (key := "\n".join(content)) in SOUND:
            return []
        if not (found := judge(folder)):
            SOUND.add(key)
        return found

    monkeypatch.setattr(verify, "of_notebook", once)


@pytest.fixture
def laptop(tmp_path, monkeypatch):
    """A copy of the laptop results, tables and result.json alone, that LOOPED_OUTPUTS points to."""
    outputs = tmp_path / "outputs"
    heavy = shutil.ignore_patterns("*.png", "*.ipynb", "report")
    shutil.copytree(LAPTOP, outputs / "laptop", ignore=heavy)
    shutil.copy(paths.ROOT / "outputs/bench.json", outputs)
    monkeypatch.setenv("LOOPED_OUTPUTS", str(outputs))
    return outputs / "laptop"


def alter(file, column, add, **where):
    """Add to the first number of a table's column where the other columns are as said."""
    frame = pd.read_csv(file, dtype=str, keep_default_na=False)
    chosen = frame.index[(frame[list(where)] == pd.Series(where)).all(axis=1)]
    frame.loc[chosen[0], column] = str(float(frame.loc[chosen[0], column]) + add)
    frame.to_csv(file, index=False)


def told(capsys, scale="laptop"):
    """The exit code of verify and what it said on stderr."""
    code = verify.run(scale)
    return code, capsys.readouterr().err


# ---- what is committed -----------------------------------------------------------------------------------


def test_the_committed_verdicts_are_what_the_committed_tables_say(capsys, monkeypatch):
    monkeypatch.delenv("LOOPED_OUTPUTS", raising=False)
    assert verify.run("laptop") == 0
    said = capsys.readouterr()
    assert not said.err and "outputs/laptop: every verdict is what the tables say." in said.out
    assert "4_1_asymmetry: the intervals of accuracies and of asymmetry are checked against result.json alone." in said.out


def test_every_notebook_that_judges_has_its_check_and_its_tables():
    judging = {f.parent.name for f in LAPTOP.glob("*/result.json") if json.loads(f.read_text(encoding="utf-8"))["verdicts"]}
    assert judging == set(verify.NOTEBOOKS) == set(verify.KEPT)
    for name in judging:
        optional = {table for _, table in [verify.RECORDED.get(name, ("", None))] if table}
        assert {f.name for f in (LAPTOP / name).glob("*.csv")} - optional == {f"{t}.csv" for t in verify.KEPT[name].split()}


def test_the_bootstraps_are_the_same_every_time():
    folder = LAPTOP / "4_4_refit"
    tables = verify.Tables(folder, json.loads((folder / "result.json").read_text(encoding="utf-8")))
    one, other = (claims.as_result(verify.NOTEBOOKS["4_4_refit"](tables)) for _ in range(2))
    assert one == other


def test_another_scale_or_an_empty_folder_is_refused(tmp_path, monkeypatch, capsys):
    with pytest.raises(ValueError, match="scale is 'huge': it must be one of smoke, laptop"):
        verify.run("huge")
    monkeypatch.setenv("LOOPED_OUTPUTS", str(tmp_path))
    code, said = told(capsys)
    assert code == 1 and "laptop holds no results." in said


# ---- what is altered -------------------------------------------------------------------------------------

ALTERED = [
    ("4_1_asymmetry", "costs", "low", {"K": "4", "task": "circuit"}, "removal_costs_at_budget: low"),
    ("4_1_asymmetry", "accuracy", "value", {"arm": "removed", "K": "32"}, "removal_costs_at_budget"),
    ("4_1_asymmetry", "identity", "bitwise", {"task": "hops"}, "identity_at_one_loop: verdict is 'replicated'"),
    ("4_2_readout_collapse", "readings", "value", {"metric": "norm_ratio", "arm": "removed", "K": "32"}, "state_norm_bounded"),
    ("4_2_readout_collapse", "readings", "value", {"metric": "entropy_bits", "arm": "removed"}, "two_stage_collapse: value"),
    ("4_2_readout_collapse", "probe", "probe", {"task": "circuit"}, "answer_not_linear: value"),
    (
        "4_3_scratch_training",
        "accuracy",
        "value",
        {"task": "circuit", "d_star": "all", "K": "32"},
        "no_norm_extrapolates_better",
    ),
    ("4_4_refit", "refits", "value", {"part": "head", "steps": "300"}, "head_plateaus: low"),
    (
        "4_5_overshoot",
        "accuracy",
        "value",
        {"arm": "1x4", "task": "circuit", "d_star": "all", "K": "8"},
        "absolute_K_confounds",
    ),
    ("4_5_overshoot", "flops", "value", {"arm": "2x2"}, "matched_overshoot_is_equal_compute: verdict is 'replicated'"),
    ("beyond_damping", "steps", "value", {"metric": "relative", "task": "circuit", "K": "32"}, "damping"),
    ("beyond_readout_axis", "accuracy", "value", {"d_star": "all", "K": "32", "readout": "raw"}, "readout_axis: low"),
    ("dense_axes", "scores", "value", {"arm": "sandwich", "task": "arithmetic", "share": "1"}, "q1_order: low"),
    ("moe_transfer", "interventions", "value", {"arm": "huginn_moe", "route": "first"}, "moe_iteration_experts"),
    ("moe_transfer", "balance", "value", {"arm": "full_moe"}, "moe_balance_order: high"),
]


@pytest.mark.parametrize(
    ("notebook", "table", "column", "where", "sentence"), ALTERED, ids=lambda v: v if type(v) is str else ""
)
def test_one_altered_number_is_noticed(laptop, capsys, notebook, table, column, where, sentence):
    file = laptop / notebook / f"{table}.csv"
    if column == "bitwise":
        file.write_text(file.read_text(encoding="utf-8").replace("True", "False", 1), encoding="utf-8")
    else:
        alter(file, column, 0.02, **where)
    code, said = told(capsys)
    assert code == 1
    assert any(sentence in line and f"laptop/{notebook}" in line for line in said.splitlines()), said


def test_every_judging_notebook_is_altered_above():
    assert {notebook for notebook, *_ in ALTERED} == set(verify.NOTEBOOKS)


@pytest.mark.parametrize(("notebook", "table"), [("4_4_refit", "refits"), ("moe_transfer", "holdings")])
def test_a_missing_table_is_noticed(laptop, capsys, notebook, table):
    (laptop / notebook / f"{table}.csv").unlink()
    code, said = told(capsys)
    assert code == 1 and f"laptop/{notebook}/{table}.csv is missing" in said


def test_a_table_that_cannot_be_read_is_one_sentence(laptop, capsys):
    for text in ("", "task,direction\n", "task,direction,part,steps,seed,value\ncircuit,added,head,0,0,x\n"):
        (laptop / "4_4_refit/refits.csv").write_text(text, encoding="utf-8")
        code, said = told(capsys)
        assert code == 1 and said.count("\n") == 1 and "laptop/4_4_refit cannot be judged again" in said
        assert "head_plateaus" in said


def test_an_altered_verdict_is_noticed_wherever_it_stands(laptop, capsys):
    file = laptop / "claims.csv"
    file.write_text(
        file.read_text(encoding="utf-8").replace("asymmetry,4.1,order,replicated", "asymmetry,4.1,order,inconclusive")
    )
    code, said = told(capsys)
    assert code == 1 and said.count("\n") == 1
    assert "asymmetry: verdict is 'inconclusive' in" in said and "laptop/claims.csv and 'replicated' by the results." in said
    file = laptop / "4_4_refit/result.json"
    result = json.loads(file.read_text(encoding="utf-8"))
    result["verdicts"][-1]["verdict"] = "replicated"
    file.write_text(json.dumps(result))
    code, said = told(capsys)
    assert f"head_plateaus: verdict is 'replicated' in {file} and 'not_replicated' by its tables." in said
    assert "head_plateaus: verdict is 'not_replicated' in" in said, "nor does claims.csv agree with it"


def test_altered_points_and_a_missing_claims_table_are_noticed(laptop, capsys):
    alter(laptop / "claims_points.csv", "value", 1, id="damping")
    (laptop / "claims.csv").unlink()
    code, said = told(capsys)
    assert code == 1 and "damping: value is" in said and "laptop/claims.csv is missing." in said


def test_an_altered_readme_is_noticed(laptop, tmp_path):
    file = tmp_path / "README.md"
    text = (paths.ROOT / "README.md").read_text(encoding="utf-8")
    file.write_text(text, encoding="utf-8")
    assert verify.of_readme(file) == []
    row = next(line for line in text.splitlines() if line.startswith("| `no_norm_extrapolates_better`"))
    file.write_text(text.replace(row, row.replace("| replicated |", "| not_replicated |")), encoding="utf-8")
    lacks, has = verify.of_readme(file)
    assert "README.md lacks, of the results: | `no_norm_extrapolates_better`" in lacks and "| not_replicated |" in has
    file.write_text("nothing", encoding="utf-8")
    assert "has no part between" in verify.of_readme(file)[0]


def test_a_report_is_held_against_the_results_where_there_is_one(laptop):
    assert verify.of_report(laptop) == []
    file = laptop / "report/claims.json"
    file.parent.mkdir()
    rows = json.loads(claims.collect(laptop)[0].to_json(orient="records"))
    file.write_text(json.dumps(rows))
    assert verify.of_report(laptop) == []
    rows[-1]["verdict"], rows[-1]["low"] = "replicated", 0.5
    file.write_text(json.dumps(rows[1:] + [{"id": "other"}]))
    said = "\n".join(verify.of_report(laptop))
    assert "readout_axis: verdict is 'replicated' in" in said and "readout_axis: low is 0.5 in" in said
    assert "other stands in" in said and f"{rows[0]['id']} is missing in" in said
    file.write_text("{")
    assert "cannot be held against the results" in verify.of_report(laptop)[0]


def test_other_rules_are_noticed_and_judge_anew(laptop, tmp_path, monkeypatch):
    file, text = tmp_path / "claims.yaml", claims.CLAIMS.read_text(encoding="utf-8")
    assert "2.021" in text
    file.write_text(text.replace("bound: 2.021", "bound: 200.1"), encoding="utf-8")
    monkeypatch.setattr(claims, "CLAIMS", file)
    said = "\n".join(verify.of_notebook(laptop / "4_2_readout_collapse"))
    assert "4_2_readout_collapse/result.json was judged by rules" in said and claims.rules_hash() in said
    assert "state_norm_bounded: verdict is 'not_replicated' in" in said and "'replicated' by its tables" in said
    assert any("state_norm_bounded: paper is" in line for line in verify.of_claims(laptop))


def test_a_rule_that_judges_otherwise_is_noticed(laptop, monkeypatch):
    SOUND.clear()
    monkeypatch.setattr(rules_scratch, "ENOUGH", 9)
    said = "\n".join(verify.of_notebook(laptop / "4_3_scratch_training"))
    assert "no_norm_extrapolates_better: verdict is 'replicated' in" in said and "'same_direction' by its tables" in said


def test_a_result_that_judges_what_nothing_can_check_is_noticed(laptop):
    SOUND.clear()
    (laptop / "4_4_refit").rename(laptop / "4_6_other")
    assert "lib/verify.py does not know how" in verify.of_notebook(laptop / "4_6_other")[0]
    (laptop / "4_6_other/result.json").write_text("[]")
    assert "cannot be read as a result" in verify.of_notebook(laptop / "4_6_other")[0]


@pytest.mark.parametrize(
    ("old", "new", "agree"),
    [
        (0.0744921, 0.0744954, True),
        (0.0744921, 0.0745954, False),
        (None, float("nan"), True),
        ("", None, True),
        (None, 0.0, False),
        (8, 8, True),
        (8, 9, False),
        ("gap +0.27 [0.10, 0.50]", "gap +0.27 [0.10, 0.51]", True),
        ("gap +0.27 [0.10, 0.50]", "gap +0.27 [0.10, 0.52]", False),
        ("gap -0.00", "gap +0.00", True),
        ("8 of 17 pairs", "9 of 17 pairs", False),
        ("1.6e-04 here", "1.7e-04 here", True),
        ("1.6e-04 here", "1.8e-04 here", False),
        ("replicated", "inconclusive", False),
    ],
)
def test_values_agree_to_the_digits_that_are_kept(old, new, agree):
    assert verify.same(old, new) is agree and verify.same(new, old) is agree


def test_p_values_agree_but_for_ties():
    assert verify.same_p(0.699, 0.667) and verify.same_p(None, None)
    assert not verify.same_p(0.699, 0.6) and not verify.same_p(0.051, 0.049) and not verify.same_p(None, 0.5)


# ---- what a run moved ------------------------------------------------------------------------------------


def frame(**verdicts):
    """Claims by id as (verdict, ours, n, low, high)."""
    columns = ["id", "verdict", "ours", "n", "low", "high"]
    return pd.DataFrame([(id, *row) for id, row in verdicts.items()], columns=columns)


def test_moved_tells_verdicts_with_their_numbers_and_counts_the_rest():
    before = frame(
        a=("inconclusive", "gap +0.10", 8, -0.1, 0.3),
        b=("replicated", "x", 8, 0.1, 0.2),
        c=("replicated", "0.5", 8, None, None),
    )
    assert verify.moved(before, before) == []
    after = frame(
        a=("replicated", "gap +0.20", 8, 0.1, 0.3), b=("replicated", "x", 8, 0.15, 0.2), c=("replicated", "0.5", 8, None, None)
    )
    assert verify.moved(before, after) == [
        "a moved from inconclusive (ours gap +0.10, interval -0.1 to 0.3) to replicated (ours gap +0.20, interval 0.1 to 0.3).",
        "1 claim keeps its verdict with other numbers.",
    ]
    rounded = before.assign(low=[-0.1000001, 0.1000001, None])
    assert verify.moved(before, rounded) == [], "rounding moves nothing"
    more = verify.moved(before.iloc[1:], frame(d=("out_of_reach", None, 0, None, None)))
    assert more == [
        "b is no claim any more, and was replicated.",
        "c is no claim any more, and was replicated.",
        "d is new: out_of_reach, ours -.",
    ]


def test_moved_reads_what_collect_gives_and_what_was_committed(laptop):
    assert verify.moved(pd.read_csv(LAPTOP / "claims.csv"), claims.collect(laptop)[0]) == []


@pytest.fixture
def committed(tmp_path, monkeypatch):
    """A repository whose last commit has one verdict, and whose outputs folder has another."""
    text = (LAPTOP / "claims.csv").read_text(encoding="utf-8")
    file = tmp_path / "outputs/laptop/claims.csv"
    file.parent.mkdir(parents=True)
    file.write_text(text, encoding="utf-8")
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    for words in (["init", "-q"], ["add", "-A"], [*who, "commit", "-qm", "results"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True, capture_output=True)
    file.write_text(text.replace("asymmetry,4.1,order,replicated", "asymmetry,4.1,order,inconclusive"), encoding="utf-8")
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    monkeypatch.delenv("LOOPED_OUTPUTS", raising=False)
    return tmp_path


def verdict(claims_frame):
    return claims_frame.set_index("id").loc["asymmetry", "verdict"]


def test_the_committed_claims_come_from_git(committed):
    assert verdict(verify.committed("laptop")) == "replicated"
    assert verify.committed("overnight") is None


def test_without_git_the_claims_are_those_of_the_outputs_folder(committed, monkeypatch):
    monkeypatch.setenv("PATH", str(committed / "nowhere"))
    assert verdict(verify.committed("laptop")) == "inconclusive"
    (committed / "outputs/laptop/claims.csv").write_text("", encoding="utf-8")
    assert verify.committed("laptop") is None
    (committed / "outputs/laptop/claims.csv").unlink()
    assert verify.committed("laptop") is None
