"""Notebooks side by side: all of them run, the last one last, and no child outlives a failure, a stop or its parent."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lib import abreast, engine, runner
from lib.paths import ROOT
from lib.runner import NotebookError
from tests.conftest import wait_for


@pytest.fixture
def notebooks(tmp_path, monkeypatch):
    """Stands in for the runner: a name says what becomes of it. Returns the folder where each leaves its marks."""

    def run(name, scale, line=0, kernel=None):
        (tmp_path / f"{name}.began").write_text(f"{os.getpid()} {line} {os.environ.get(engine.SLOTS, '')}")
        try:
            if name.startswith("fails"):
                raise NotebookError(f"{name} at {scale} failed")
            if name.startswith("dies"):
                os.kill(os.getpid(), signal.SIGKILL)
            if name.startswith("lingers"):
                time.sleep(60)
            time.sleep(0.2)
        finally:
            (tmp_path / f"{name}.ended").touch()
        return tmp_path / name

    monkeypatch.setattr(runner, "run", run)
    monkeypatch.setattr(engine, "cores", lambda: 2)
    return tmp_path


def began(folder, name):
    pid, line, *slots = (folder / f"{name}.began").read_text().split()
    return int(pid), int(line), slots


def test_all_are_run_in_processes_that_share_the_cores_and_the_verdicts_come_last(notebooks):
    told = []
    abreast.run(["a", "b", "c", "99_verdicts"], "smoke", lambda name, path: told.append((name, path)))
    assert sorted(told[:-1]) == [(name, notebooks / name) for name in "abc"]
    assert told[-1] == ("99_verdicts", notebooks / "99_verdicts")
    pids, lines, slots = zip(*(began(notebooks, name) for name in "abc"), strict=True)
    assert len({*pids, os.getpid()}) == 4 and set(lines) == {0, 1}
    assert len({*map(tuple, slots)}) == 1 and slots[0] and not Path(*slots[0]).exists()
    assert began(notebooks, "99_verdicts")[1:] == (0, list(slots[0])) and engine.SLOTS not in os.environ


def test_one_notebook_or_one_core_takes_no_process(notebooks, monkeypatch):
    abreast.run(["a", "99_verdicts"], "smoke", lambda *_: None)
    monkeypatch.setattr(engine, "cores", lambda: 1)
    abreast.run(["b", "c"], "smoke", lambda *_: None)
    assert {began(notebooks, name)[0] for name in "abc"} == {os.getpid()}


@pytest.mark.parametrize(("bad", "said"), [("fails", "fails at smoke failed"), ("dies", "its process was killed; the same")])
def test_a_failure_ends_the_others_and_starts_no_more(notebooks, bad, said):
    told, start = [], time.monotonic()
    with pytest.raises(NotebookError, match=said):
        abreast.run(["lingers", "a", bad, "later", "99_verdicts"], "smoke", lambda name, _: told.append(name))
    assert time.monotonic() - start < 30 and told == ["a"]
    assert (notebooks / "lingers.ended").exists(), "it could tidy up"
    assert not list(notebooks.glob("later.*")) and not list(notebooks.glob("99*"))
    with pytest.raises(ProcessLookupError):
        os.kill(began(notebooks, "lingers")[0], 0)


PARENT = """
import os, signal, sys, time
from pathlib import Path
from lib import abreast, engine, runner, stopping
def run(name, scale, line=0, kernel=None):
    own = Path(sys.argv[1]) / name
    own.with_suffix(".began").write_text(str(os.getpid()))
    try:
        time.sleep(60)
    finally:
        own.with_suffix(".ended").touch()
runner.run, engine.cores = run, lambda: 2
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background job ignores
try:
    with stopping.stoppable():
        abreast.run(["a", "b"], "smoke", print)
except KeyboardInterrupt as stop:
    sys.exit(stop.number)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_no_child_outlives_a_parent_that_is_stopped(tmp_path, number):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], cwd=ROOT)
    try:
        wait_for(lambda: len(list(tmp_path.glob("*.began"))) == 2)
        children = [int(path.read_text()) for path in tmp_path.glob("*.began")]
        parent.send_signal(number)
        assert parent.wait(timeout=20) == (-number if number == signal.SIGKILL else number)
        wait_for(lambda: len(list(tmp_path.glob("*.ended"))) == 2)
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children))
    finally:
        parent.kill()
