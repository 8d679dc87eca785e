"""The command line: a whole smoke replication, its results on disk, and mistakes as one sentence with a non-zero exit."""

import json
import re
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

from lib import BEHAVIOUR, claims, cli, doctor, paths, readme, store
from tests.conftest import environment


def command(outputs, *words):
    """Run `python -m lib` with results in `outputs`."""
    return subprocess.run(
        [sys.executable, "-m", "lib", *words],
        cwd=paths.ROOT,
        env=environment(outputs),
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_smoke_replication_ends_with_verdicts_and_executed_notebooks(smoke):
    outputs, done = smoke
    assert "no_norm_extrapolates_better" in done.stdout and "99_verdicts/notebook.ipynb" in done.stdout
    table = pd.read_csv(outputs / "smoke/claims.csv")
    assert list(table["id"]) == list(claims.load()) and list(table.columns) == claims.COLUMNS
    assert set(table["verdict"]) <= set(claims.VERDICTS)
    assert "not built yet" not in set(table["reason"]), "every claim is judged"
    judges = {"4.1": "4_1_asymmetry", "4.2": "4_2_readout_collapse", "4.3": "4_3_scratch_training", "4.4": "4_4_refit"}
    judges |= {"4.5": "4_5_overshoot"} | dict.fromkeys(("Q1", "Q2", "Q3"), "dense_axes") | {"MoE": "moe_transfer"}
    rest = table[table["section"] == "beyond"]
    assert set(rest["notebook"]) == {"beyond_damping", "beyond_readout_axis"}
    assert (table.drop(rest.index)["notebook"] == table.drop(rest.index)["section"].astype(str).map(judges)).all()
    points = pd.read_csv(outputs / "smoke/claims_points.csv")
    assert list(points.columns) == claims.POINTS and set(points["id"]) == set(table.loc[table["n"] > 0, "id"])
    for name in table["notebook"].unique():
        folder = outputs / "smoke" / name
        assert {p.suffix for p in folder.iterdir()} == {".csv", ".png", ".json", ".ipynb"}
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        for key in ("params", "seconds", "versions", "hardware", "behaviour", "rules_hash", "figures", "verdicts"):
            assert result[key], (name, key)
        assert result["behaviour"] == BEHAVIOUR and result["rules_hash"] == claims.rules_hash()


def test_the_long_tables_hold_every_seed_loop_count_and_depth(smoke):
    folder = smoke[0] / "smoke/4_3_scratch_training"
    p = json.loads((folder / "result.json").read_text(encoding="utf-8"))["params"]
    accuracy = pd.read_csv(folder / "accuracy.csv")
    for task in p["tasks"]:
        depths = {"all", *(str(d) for d in range(1, p[f"{task}_depth"] + 1))}
        part = accuracy[accuracy["task"] == task]
        assert set(part["d_star"].astype(str)) == depths
        assert len(part) == 2 * p["seeds"] * 8 * p["r0"] * len(depths)
    each = accuracy[accuracy["d_star"] != "all"].groupby(["task", "arm", "seed", "K"])["value"].mean()
    both = accuracy[accuracy["d_star"] == "all"].set_index(["task", "arm", "seed", "K"])["value"]
    np.testing.assert_allclose(each.sort_index(), both.sort_index(), atol=1e-5)


def test_a_second_run_trains_nothing_and_says_the_same(smoke):
    outputs, _ = smoke
    before = store.Store(outputs / "runs").health()
    verdicts = (outputs / "smoke/claims.csv").read_bytes()
    logs = {p: p.read_bytes() for p in (outputs / "runs").rglob("train.log")}
    # one that trains, and the one whose measurements hang on other models' measurements
    done = command(outputs, "run", "--scale", "smoke", "--only", "4_3_scratch_training", "beyond_damping")
    assert done.returncode == 0 and store.Store(outputs / "runs").health() == before
    assert {p: p.read_bytes() for p in logs} == logs and (outputs / "smoke/claims.csv").read_bytes() == verdicts


def test_claims_prints_a_table_or_json(smoke):
    done = command(smoke[0], "claims", "--scale", "smoke")
    assert done.returncode == 0 and len(done.stdout.splitlines()) == len(claims.load()) + 1
    rows = json.loads(command(smoke[0], "claims", "--scale", "smoke", "--json").stdout)
    assert [row["id"] for row in rows] == list(claims.load())


def test_doctor_is_content_with_this_checkout_and_names_a_corrupt_run(smoke):
    done = command(smoke[0], "doctor")
    assert done.returncode == 0, done.stdout
    for word in ("torch 2.13.0", "cores", "runs", "every .py and .ipynb agree", "no result is older"):
        assert word in done.stdout
    weights = next((smoke[0] / "runs").glob("*/model.safetensors"))
    good = weights.read_bytes()
    try:
        weights.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        done = command(smoke[0], "doctor")
        assert done.returncode == 1 and "1 corrupt" in done.stdout
    finally:
        weights.write_bytes(good)


def test_a_result_older_than_the_behaviour_version_is_named(tmp_path, monkeypatch):
    folder = tmp_path / "laptop/4_3_scratch_training"
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps({"behaviour": BEHAVIOUR - 1}))
    monkeypatch.setenv("LOOPED_OUTPUTS", str(tmp_path))
    assert doctor.stale() == [("laptop", "4_3_scratch_training", BEHAVIOUR - 1)]
    assert "laptop/4_3_scratch_training was made by behaviour version" in "\n".join(doctor.report()[0])
    assert not doctor.report()[1]
    assert "**Stale:** laptop/4_3_scratch_training" in readme.claims_table()


def test_a_result_that_cannot_be_read_is_named_too(tmp_path, monkeypatch):
    for name, text in (("a", '{"behav'), ("b", "[]")):
        (tmp_path / "laptop" / name).mkdir(parents=True)
        (tmp_path / "laptop" / name / "result.json").write_text(text)
    monkeypatch.setenv("LOOPED_OUTPUTS", str(tmp_path))
    lines, healthy = doctor.report()
    assert not healthy and all(f"laptop/{n}/result.json cannot be read" in "\n".join(lines) for n in "ab")


def test_a_relative_outputs_folder_means_the_same_in_every_process(tmp_path):
    env = environment("here")
    command = [sys.executable, "-m", "lib", "run", "--scale", "smoke", "--only", "99_verdicts"]
    subprocess.run(command, cwd=tmp_path, env=env, check=True, capture_output=True)
    found = sorted(p.name for p in (tmp_path / "here/smoke/99_verdicts").iterdir())
    assert {"notebook.ipynb", "result.json"} <= set(found) and not (paths.notebooks() / "here").exists()


def test_readme_says_what_the_results_say(tmp_path, monkeypatch):
    text = (paths.ROOT / "README.md").read_text(encoding="utf-8")
    rendered = [readme.render(text)]
    # whoever has just replicated has results of their own in outputs/: then the committed ones count
    committed = subprocess.run(["git", "archive", "HEAD", "outputs"], cwd=paths.ROOT, capture_output=True, check=False)
    if committed.returncode == 0:
        subprocess.run(["tar", "-x", "-C", str(tmp_path)], input=committed.stdout, check=True)
        monkeypatch.setenv("LOOPED_OUTPUTS", str(tmp_path / "outputs"))
        rendered.append(readme.render(text))
    assert text in rendered, "run `python -m lib readme`"
    outside = re.sub(r"<!-- (\w+) -->.*?<!-- /\1 -->", "", text, flags=re.DOTALL)
    numbers = set(re.findall(r"\d+(?:\.\d+)?", outside))
    names = {
        "00",
        "4",
        "1",
        "2",
        "3",
        "5",
        "99",
        "3.11",
        "4.1",
        "4.2",
        "4.3",
        "4.4",
        "4.5",
        "2.0",
    }  # notebooks, sections, Python, the licence
    names |= {"1.4", "16", "8", "20"}  # the example of released weights
    names |= {"6379", "0"}  # Ray's port; what its switch is set to
    assert numbers <= names, "a measured number in the README stands between markers"


@pytest.mark.parametrize(
    "words, said",
    [
        (["run", "--scale", "huge"], "scale is 'huge': it must be one of smoke, laptop, overnight, paper"),
        (["run", "--scale", "smoke", "--only", "4_9"], "4_9 is not a notebook: it must be one of 00_reading_guide"),
        (["run", "--scale", "smoke", "--engine", "slurm"], "the engine is 'slurm': it must be one of local, ray."),
        (
            ["run", "--scale", "smoke", "--address", "head:6379"],
            "--address is head:6379, and only --engine ray has an address.",
        ),
        (["claims", "--scale", "huge"], "scale is 'huge'"),
    ],
)
def test_a_mistake_is_one_sentence_and_a_non_zero_exit(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.setenv("LOOPED_OUTPUTS", str(tmp_path))
    assert cli.main(words) == 1
    printed = capsys.readouterr().err
    assert said in printed and len(printed.strip().splitlines()) == 1 and not list(tmp_path.iterdir())


def test_an_outputs_folder_that_cannot_be_written_is_one_sentence(monkeypatch, capsys):
    monkeypatch.setenv("LOOPED_OUTPUTS", "/proc/outputs")  # refuses even root
    assert cli.main(["run", "--scale", "smoke", "--only", "99_verdicts"]) == 1
    printed = capsys.readouterr().err.strip().splitlines()
    assert len(printed) == 1 and "/proc/outputs cannot be written" in printed[0] and "LOOPED_OUTPUTS" in printed[0]
