"""The rules, the judging of reported numbers, and the verdict tables."""

import json
import math
import re

import numpy as np
import pandas as pd
import pytest
import yaml

from lib import claims
from lib.claims import Judgement, as_result, judge_value, point, render, row, worst

# a changed rule must be noticed: whoever edits params/claims.yaml sets this anew and says why
RULES = "8209e096eda0"
NAN = float("nan")


@pytest.fixture
def rules():
    return claims.load()


@pytest.fixture
def rules_file(tmp_path):
    """Writes claims as a rules file and returns its path."""

    def put(*entries, head=""):
        path = tmp_path / "claims.yaml"
        path.write_text(head + yaml.safe_dump({"claims": list(entries)}))
        return path

    return put


def put_result(folder, notebook, judgements, **changed):
    path = folder / notebook / "result.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"seconds": 1.5} | as_result(judgements) | changed))
    return path


def judged(id, verdict="replicated", **rest):
    return Judgement(id, verdict, **({"ours": "+0.40 [0.30, 0.50]", "n": 8} | rest))


# ---- the rules ---------------------------------------------------------------------------------------


def test_the_rules_are_the_ones_fixed_before_the_runs(rules):
    assert claims.rules_hash() == RULES
    assert len(rules) == 66
    assert list(rules)[0] == "identity_at_one_loop" and list(rules)[-1] == "readout_axis"
    assert all(claim.get("rule") for claim in rules.values() if claim["kind"] != "value")
    assert all(claim["paper_scale"] in claims.TAKES for claim in rules.values())
    assert all(claim["see"] in rules for claim in rules.values() if claim.get("see"))


def test_comments_do_not_change_the_hash_and_rules_do(rules_file):
    entry = {"id": "a", "kind": "order", "rule": "x > 0"}
    first = claims.rules_hash(rules_file(entry))
    assert re.fullmatch("[0-9a-f]{12}", first)
    assert claims.rules_hash(rules_file(entry, head="# a remark\n")) == first
    assert claims.rules_hash(rules_file(entry | {"rule": "x > 1"})) != first


@pytest.mark.parametrize(
    ("entries", "sentence"),
    [
        ([{"kind": "order"}], "claim 1 has no id"),
        ([{"id": "a"}], "claim 1, a, needs a kind: exact, order or value"),
        ([{"id": "a", "kind": "guess"}], "needs a kind"),
        ([{"id": "a", "kind": "order"}] * 2, "claim 2 repeats the id a"),
    ],
)
def test_bad_rules_are_refused_in_a_sentence(rules_file, entries, sentence):
    with pytest.raises(ValueError, match=sentence):
        claims.load(rules_file(*entries))


def test_a_file_without_claims_is_refused(tmp_path):
    (tmp_path / "claims.yaml").write_text("claim: []\n")
    with pytest.raises(ValueError, match="no list named claims"):
        claims.load(tmp_path / "claims.yaml")


def test_worst():
    assert worst(["replicated", "replicated"]) == "replicated"
    assert worst(["replicated", "same_direction"]) == "same_direction"
    assert worst(["same_direction", "inconclusive", "replicated"]) == "inconclusive"
    assert worst(["inconclusive", "not_replicated"]) == "not_replicated"
    assert worst(["not_competent", "replicated"]) == "replicated"
    assert worst(["not_competent"]) == "not_competent"
    for undefined in ([], ["out_of_reach", "replicated"]):
        with pytest.raises(ValueError, match="undefined"):
            worst(undefined)


def test_an_unknown_verdict_is_refused():
    with pytest.raises(ValueError, match="verdict of a is 'true'"):
        Judgement("a", "true", "", 0)


def test_points_have_every_key_and_no_nan():
    cell = point("a", task="circuit", K=np.int64(4), value=np.float64(0.5), low=NAN)
    assert list(cell) == claims.POINTS
    assert cell["K"] == 4 and cell["value"] == 0.5 and cell["low"] is None and cell["arm"] is None
    json.dumps(cell, allow_nan=False)
    with pytest.raises(ValueError, match="a point has no seed"):
        point("a", seed=1)


# ---- reported numbers --------------------------------------------------------------------------------


def test_away_from_the_papers_scale_a_value_says_what_it_takes(rules):
    got = judge_value(rules["scratch_circuit_none"], [0.7, 0.9, 0.9, 0.9, 0.8], False, 8, "8 seeds")
    assert got.verdict == "out_of_reach" and got.n == 8
    assert got.ours == "0.700, 0.900, 0.900, 0.900, 0.800"
    assert got.reason == (
        "takes 16 seeds an arm of models from 19M parameters on a GPU; "
        "the direction is judged as no_norm_extrapolates_better; 8 seeds"
    )
    assert "published weights" in judge_value(rules["hops_asis_peak"], [0.2, 0.1], False, 3).reason


@pytest.mark.parametrize(
    ("id", "ours", "verdict", "names"),
    [
        # accuracies: 0.02 absolute for models trained here, the edge included
        ("scratch_circuit_none", [0.790, 0.979, 0.997, 0.981, 0.952], "replicated", ""),
        (
            "scratch_circuit_none",
            [0.790, 0.999, 0.997, 0.981, 0.9521],
            "not_replicated",
            "K=32: 0.952 against 0.932",
        ),
        # the first deviating entry is named
        ("scratch_circuit_none", [0.5, 0.999, 0.997, 0.981, 0.2], "not_replicated", "K=1: 0.500"),
        (
            "scratch_hops",
            {"no_norm": [0.979, 0.999, 0.999], "with_norm": [0.556, 0.988, 0.9]},
            "not_replicated",
            "with_norm K=8",
        ),
        (
            "scratch_hops",
            {"with_norm": [0.556, 0.988, 0.95], "no_norm": [0.979, 0.99, 1.0]},
            "replicated",
            "",
        ),
        # released weights: 0.05, also on floors
        ("ouro26_asis", [0.58, 0.60, 0.55], "replicated", ""),
        ("ouro26_asis", [0.53, 0.60, 0.52], "not_replicated", "K=32"),
        ("linear_probe_at_chance", [0.56, 0.48], "replicated", ""),
        ("linear_probe_at_chance", [0.56, 0.46], "not_replicated", "floor: 0.460"),
        # all else: 15 % relative
        ("scratch_circuit_delta", 0.867 * 1.15, "replicated", ""),
        ("scratch_circuit_delta", 0.867 * 0.84, "not_replicated", "value: 0.728 against 0.867"),
        ("moe_deltas", None, "inconclusive", "not measured: MMLU"),
        # a negative value's band has its ends in order
        (
            "q2_injection",
            {
                "BBH-CoT": 6.63,
                "HumanEval+": 5.49,
                "MBPP+": 4.23,
                "MMLU": 2.53,
                "DROP": 1.39,
                "MATH500": -4.0,
                "GSM8K": -2.2,
            },
            "replicated",
            "",
        ),
        # one metric absolute, the other relative, by entry
        ("dose_values", [[0.60, 1.0], [0.50, 3.9], [0.04, 11.0]], "replicated", ""),
        (
            "dose_values",
            [[0.60, 1.0], [0.50, 4.2], [0.04, 11.0]],
            "not_replicated",
            "every=2 readout_entropy_bits: 4.200 against 3.510",
        ),
        # a range, widened by 15 %, of one or several numbers
        ("scratch_circuit_p", [2.2e-7, 0.012, 1.0e-5], "replicated", ""),
        ("scratch_circuit_p", [2.2e-7, 0.012, [3.5e-6, 1.2e-5]], "replicated", ""),
        ("scratch_circuit_p", [2.2e-7, 0.012, [3.5e-6, 1.3e-5]], "not_replicated", "K=beyond"),
        ("scratch_circuit_p", [2.2e-7, 0.012, 3.3e-6], "not_replicated", "3.3e-06 against 4.0e-6 to 1.1e-5"),
        # not reported: not compared; not measured: said
        ("overshoot_matched_hops_tests", {"2x12": [0.5, 0.9], "1x24": [0.8, 0.026]}, "replicated", ""),
        (
            "overshoot_matched_hops_tests",
            {"2x12": [0.5, 0.9], "1x24": [0.8, NAN]},
            "inconclusive",
            "1x24 exact_p",
        ),
        (
            "overshoot_matched_hops_tests",
            {"2x12": None, "1x24": [0.1, None]},
            "not_replicated",
            "1x24 cliffs_delta",
        ),
    ],
)
def test_value_tolerances(rules, id, ours, verdict, names):
    got = judge_value(rules[id], ours, True, 16)
    assert (got.verdict, got.n) == (verdict, 16)
    assert names in got.reason and bool(names) == bool(got.reason)


def test_every_value_claim_agrees_with_itself(rules):
    """The paper's own numbers are replicated whatever their shape; a range is met at either end."""

    def own(value):
        if isinstance(value, dict):
            return {key: own(v) for key, v in value.items()}
        if isinstance(value, list):
            return [own(v) for v in value]
        return [float(end) for end in value.split(" to ")] if isinstance(value, str) else value

    values = [claim for claim in rules.values() if claim["kind"] == "value"]
    assert len(values) > 20
    for claim in values:
        assert judge_value(claim, own(claim["value"]), True, 1).verdict == "replicated", claim["id"]


def test_measurements_of_another_shape_or_kind_are_refused(rules):
    for ours in ([0.5], 0.5, {"no_norm": 1.0}):
        with pytest.raises(ValueError, match="scratch_circuit_none: what was measured has not the shape"):
            judge_value(rules["scratch_circuit_none"], ours, True, 1)
    with pytest.raises(ValueError, match="has not the shape"):
        judge_value(rules["state_norm_growth"], {"no_norm": 4.8, "norm": 1.4}, True, 1)
    with pytest.raises(ValueError, match="of kind order"):
        judge_value(rules["asymmetry"], 0.5, True, 1)


def test_render():
    assert render([0.0, 12.47, 2.2e-7, 1772.4, 8, None, NAN]) == "0.000, 12.47, 2.2e-07, 1772, 8, -, -"
    assert render({"a": [0.5, 1], "b": np.float64(2.0)}) == "a 0.500, 1; b 2.000"
    assert render([[0.642, 0.95], [0.5, 3.5]]) == "(0.642, 0.950), (0.500, 3.500)"


# ---- the tables --------------------------------------------------------------------------------------


def test_rows(rules):
    unbuilt = row(rules["asymmetry"], None, "")
    assert list(unbuilt) == claims.COLUMNS
    assert (unbuilt["verdict"], unbuilt["reason"], unbuilt["n"]) == ("out_of_reach", "not built yet", None)
    assert unbuilt["paper"] == "holds" and unbuilt["rule"] == rules["asymmetry"]["rule"]
    assert row(rules["state_norm_bounded"], None, "")["paper"] == "below 2.021"
    assert row(rules["state_norm_growth"], None, "")["paper"] == "no_norm 4.840; with_norm 1.450"
    full = row(rules["asymmetry"], judged("asymmetry", low=0.3, high=NAN, reason="r"), "4_1_asymmetry")
    assert (full["low"], full["high"], full["notebook"], full["reason"]) == (0.3, None, "4_1_asymmetry", "r")


def test_every_claim_has_its_row_built_or_not(tmp_path, rules):
    cells = [point("asymmetry", K=4, value=0.4, n=8, p_raw=1 / 3)]
    put_result(tmp_path, "4_1_asymmetry", [judged("asymmetry", points=cells, low=0.3, high=0.5)])
    put_result(tmp_path, "4_5_overshoot", [judged("absolute_K_confounds", "inconclusive")])
    (tmp_path / "99_verdicts").mkdir()
    (tmp_path / "99_verdicts" / "result.json").write_text('{"seconds": 1}')
    frame, points = claims.collect(tmp_path)
    assert list(frame["id"]) == list(rules) and list(frame.columns) == claims.COLUMNS
    by_id = frame.set_index("id")
    assert tuple(by_id.loc["asymmetry", ["verdict", "n", "low", "reason"]]) == ("replicated", 8, 0.3, "")
    assert by_id.loc["absolute_K_confounds", "notebook"] == "4_5_overshoot"
    assert (by_id["reason"] == "not built yet").sum() == len(rules) - 2
    assert list(points.columns) == claims.POINTS and len(points) == 1 and points["K"][0] == 4


def test_an_empty_scale_is_all_unbuilt(tmp_path):
    frame, points = claims.collect(tmp_path / "nothing")
    assert set(frame["reason"]) == {"not built yet"} and points.empty


def test_changed_rules_are_reported(tmp_path):
    put_result(tmp_path, "4_1_asymmetry", [judged("asymmetry", reason="8 seeds")], rules_hash="0123456789ab")
    frame, _ = claims.collect(tmp_path)
    reason = frame.set_index("id").loc["asymmetry", "reason"]
    assert reason == f"8 seeds; judged by rules 0123456789ab, now {RULES}"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"verdicts": [', "Expecting"),
        ("[]", "result"),
        ('{"verdicts": [{"id": "asymmetry"}]}', "verdict"),
        ('{"verdicts": [{"id": "asymmetry", "verdict": "yes", "ours": "", "n": 1}]}', "must be one of"),
        (
            '{"verdicts": [{"id": "nobody", "verdict": "replicated", "ours": "", "n": 1}]}',
            "nobody, which is no",
        ),
        ('{"points": [{"id": "asymmetry", "colour": 1}]}', "colour"),
    ],
)
def test_a_corrupt_result_is_named_in_one_sentence(tmp_path, text, why):
    (tmp_path / "4_1_asymmetry").mkdir()
    file = tmp_path / "4_1_asymmetry" / "result.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=why) as caught:
        claims.write(tmp_path)
    assert str(caught.value).startswith(f"{file} cannot be read as a result: ") and "\n" not in str(caught.value)
    assert not list(tmp_path.glob("*.csv"))


def test_a_claim_judged_twice_is_refused(tmp_path):
    for notebook in ("4_1_asymmetry", "audit"):
        put_result(tmp_path, notebook, [judged("asymmetry")])
    with pytest.raises(ValueError, match="audit.*which 4_1_asymmetry judges already"):
        claims.collect(tmp_path)


def test_write(tmp_path, rules):
    cells = [point("asymmetry", K=k, value=1 / 3, p_raw=1e-9 / 7) for k in (4, 32)] + [point("asymmetry")]
    put_result(tmp_path, "4_1_asymmetry", [judged("asymmetry", points=cells, low=1 / 3, high=0.5)])
    frame = claims.write(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["4_1_asymmetry", "claims.csv", "claims_points.csv"]
    read = pd.read_csv(tmp_path / "claims.csv").set_index("id")
    assert list(read.index) == list(frame["id"]) == list(rules)
    assert read.loc["asymmetry", "low"] == 0.333333 and read.loc["asymmetry", "n"] == 8
    text = (tmp_path / "claims_points.csv").read_text().splitlines()
    assert text[:2] == [",".join(claims.POINTS), "asymmetry,,,4,0.333333,,,,1.42857e-10,,"]
    assert claims.write(tmp_path).equals(frame)


def test_a_failed_write_leaves_the_earlier_table(tmp_path):
    claims.write(tmp_path)
    before = (tmp_path / "claims.csv").read_text()
    put_result(tmp_path, "4_1_asymmetry", []).write_text("{")
    with pytest.raises(ValueError, match="4_1_asymmetry"):
        claims.write(tmp_path)
    assert (tmp_path / "claims.csv").read_text() == before


def test_table(tmp_path, rules):
    long = judged("asymmetry", ours="x" * 80, low=0.3, high=0.5)
    put_result(tmp_path, "4_1_asymmetry", [long])
    claims.write(tmp_path)
    for frame in (claims.collect(tmp_path)[0], pd.read_csv(tmp_path / "claims.csv")):
        lines = claims.table(frame).splitlines()
        assert lines[0].split() == ["id", "section", "verdict", "paper", "ours", "n"]
        assert len(lines) == len(rules) + 1 and max(map(len, lines)) <= 140
        (line,) = [line for line in lines if line.startswith("asymmetry ")]
        assert line.split() == ["asymmetry", "4.1", "replicated", "holds", "x" * 40 + "…", "8"]
        assert all(id in text for id, text in zip(rules, lines[1:], strict=True))


def frames_of(tmp_path, **judgements):
    for scale, found in judgements.items():
        put_result(tmp_path / scale, "4_1_asymmetry", found)
    return {scale: claims.collect(tmp_path / scale)[0] for scale in judgements}


def test_markdown_takes_the_highest_scale_that_judged(tmp_path, rules):
    frames = frames_of(
        tmp_path,
        smoke=[judged("removal_reaches_zero", "not_replicated")],
        laptop=[
            judged("asymmetry", "inconclusive"),
            judged("ouro26_asis", "out_of_reach", ours="0.1, 0.2, 0.3"),
        ],
        paper=[
            judged("asymmetry", ours="a|b", low=math.nan),
            judged("removal_costs_at_budget", "out_of_reach"),
        ],
        overnight=[judged("removal_costs_at_budget", "same_direction")],
    )
    text = claims.markdown(frames)
    lines = text.splitlines()
    assert lines[0] == "| claim | paper | ours | n | verdict | scale | notebook |"
    rows = {re.match(r"\| `(\w+)`", line).group(1): line for line in lines[2:] if line.startswith("|")}
    assert list(rows) == ["removal_costs_at_budget", "asymmetry", "ouro26_asis"], "judged ones first"
    assert "| holds | a\\|b | 8 | replicated | paper | " in rows["asymmetry"]
    assert rules["asymmetry"]["statement"][:60] in rows["asymmetry"]
    link = "[4_1_asymmetry](outputs/overnight/4_1_asymmetry/notebook.ipynb)"
    assert f"| same_direction | overnight | {link} |" in rows["removal_costs_at_budget"]
    assert "| 0.530, 0.642, 0.583 | 0.1, 0.2, 0.3 | 8 | out_of_reach | laptop |" in rows["ouro26_asis"]
    # smoke does not count, and what nothing has built stands in one line by section
    assert lines[-1].startswith("Not built yet: 4.1: identity_at_one_loop, ")
    assert "removal_reaches_zero" in lines[-1] and "; beyond: damping, readout_axis." in lines[-1]
    assert lines[-1].count(",") + lines[-1].count(";") + 1 == len(rules) - len(rows)
    assert "smoke" not in text


def test_markdown_reads_the_written_tables_alike(tmp_path):
    frames = frames_of(tmp_path, laptop=[judged("asymmetry"), judged("moe_wins", "out_of_reach", ours="", n=0)])
    claims.write(tmp_path / "laptop")
    assert claims.markdown({"laptop": pd.read_csv(tmp_path / "laptop" / "claims.csv")}) == claims.markdown(frames)
