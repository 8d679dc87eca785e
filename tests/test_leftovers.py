"""Files of processes that are gone go, those of living ones stay, and another machine's stay for a month."""

import os
import subprocess
import sys
import time

import pytest

from lib import leftovers, paths, results

NAMES = "smoke/.staging-a_b-{}", "progress-{}.json", "smoke/a_b/.claims.csv.{}-0123abcd.tmp", "failed/.smoke-a_b-{}.ipynb"


@pytest.fixture
def outputs(tmp_path, monkeypatch):
    monkeypatch.setenv("LOOPED_OUTPUTS", str(tmp_path))
    return tmp_path


def of_the_dead():
    """The owner's name of a process of this machine that is gone."""
    code = "from lib import leftovers; print(leftovers.owner(), end='')"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=paths.ROOT).stdout


def put(outputs, owner):
    files = [outputs / name.format(owner) for name in NAMES]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("half")
    return files


@pytest.mark.parametrize("machine", ["node-1.cluster", "17", "a_b.c"])
def test_of_this_machine_what_the_dead_left_goes_and_what_the_living_write_stays(outputs, monkeypatch, machine):
    dead_process = of_the_dead().rpartition(".")[2]
    monkeypatch.setattr("socket.gethostname", lambda: machine)
    living = leftovers.owner()
    dead = put(outputs, living.removesuffix(str(os.getpid())) + dead_process)
    kept = [*put(outputs, living), *put(outputs, "not an owner")]
    leftovers.sweep()
    assert not any(file.exists() for file in dead) and all(file.exists() for file in kept)


def test_of_another_machine_only_what_is_a_month_old_goes(outputs, monkeypatch):
    here = of_the_dead()
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    files = put(outputs, here)
    leftovers.sweep()
    assert all(file.exists() for file in files), "its number says nothing about a process there"
    for age, there in ((29, True), (31, False)):
        for file in files:
            os.utime(file, (time.time() - age * 24 * 3600,) * 2)
        leftovers.sweep()
        assert [file.exists() for file in files] == [there] * len(files)


def test_staged_results_are_named_so_that_they_are_swept(outputs):
    out = results.begin("4_4_refit", "smoke")
    name = out.staging.name
    assert name.endswith(leftovers.owner())
    left = out.staging.with_name(name.replace(leftovers.owner(), of_the_dead()))
    left.mkdir()
    (left / "table.csv").write_text("half")
    leftovers.sweep()
    assert out.staging.exists() and not left.exists()
