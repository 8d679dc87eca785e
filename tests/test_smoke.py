"""One smoke replication from nothing, by the command line, and all that is said of its results."""

import json
import shutil
import subprocess
import sys

import nbformat
import numpy as np
import pandas as pd
import pytest

from lib import BEHAVIOUR, claims, params, paths, store
from tests.conftest import environment
from tests.test_notebooks import NOTEBOOKS, code_cells


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


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """(outputs folder, finished process) of `python -m lib run --scale smoke` from nothing."""
    outputs = tmp_path_factory.mktemp("outputs")
    done = command(outputs, "run", "--scale", "smoke")
    assert done.returncode == 0, done.stderr[-3000:]
    return outputs, done


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


def validate(folder, outputs):
    """Run nbval on a folder of notebooks; returns the finished process."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--nbval", "--nbval-kernel-name=python3"]
    command += ["--nbval-cell-timeout=300", "--nbval-sanitize-with", str(folder / "sanitize.cfg"), str(folder)]
    return subprocess.run(command, cwd=folder, env=environment(outputs), capture_output=True, text=True, check=False)


def test_nbval_passes_with_every_code_cell_executed(smoke):
    done = validate(paths.notebooks(), smoke[0])
    assert done.returncode == 0, done.stdout[-4000:]
    assert f"{sum(len(code_cells(p)) for p in NOTEBOOKS)} passed" in done.stdout


def test_nbval_fails_when_one_value_of_a_stored_table_is_altered(smoke, tmp_path):
    for name in ("conftest.py", "sanitize.cfg", "4_3_scratch_training.ipynb"):
        shutil.copy(paths.notebooks() / name, tmp_path)
    path = tmp_path / "4_3_scratch_training.ipynb"
    notebook = nbformat.read(path, as_version=4)
    table = next(
        o
        for c in notebook.cells
        if c.cell_type == "code"
        for o in c.outputs
        if "commonest answer" in o.get("data", {}).get("text/plain", "")
    )
    old = table["data"]["text/plain"]
    assert old.count("0.500") == 2
    table["data"]["text/plain"] = old.replace("0.500", "0.501", 1)
    nbformat.write(notebook, path)
    done = validate(tmp_path, smoke[0])
    assert done.returncode == 1 and "1 failed" in done.stdout, done.stdout[-3000:]


def test_plain_papermill_runs_from_any_directory(smoke, tmp_path):
    source = paths.notebooks() / "99_verdicts.ipynb"
    command = [sys.executable, "-m", "papermill", str(source), "out.ipynb", "-f", str(params.path_of("99_verdicts", "smoke"))]
    subprocess.run(command, cwd=tmp_path, env=environment(smoke[0]), capture_output=True, check=True)
    assert all(c.execution_count for c in code_cells(tmp_path / "out.ipynb"))
