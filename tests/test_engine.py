"""Jobs in worker processes: order, equality, failures, deaths, and the progress that is told."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from lib import cli
from lib.engine import EngineError, cores, map_jobs, map_local, map_missing
from lib.engine_ray import unreachable
from lib.paths import ROOT
from lib.progress import Progress
from tests import engine_jobs as jobs


@pytest.fixture(autouse=True)
def progress_file(tmp_path, monkeypatch):
    monkeypatch.setenv("LOOPED_PROGRESS", str(tmp_path / "progress.json"))
    return tmp_path / "progress.json"


def test_results_come_in_order_and_as_they_end(progress_file):
    seen = {}
    assert map_local(jobs.square, [3, 1, 2], workers=2, title="squares", on_result=seen.__setitem__) == [
        9,
        1,
        4,
    ]
    assert seen == {0: 9, 1: 1, 2: 4}
    told = json.loads(progress_file.read_text())
    assert told.pop("seconds") > 0
    assert told.pop("note").startswith("step ")
    assert told == {"title": "squares", "done": 6, "total": 6, "finished": 3, "runs": 3, "eta": 0.0}
    assert map_local(jobs.square, []) == []


def test_what_is_there_is_looked_up_and_the_rest_made_in_place(monkeypatch):
    known = {1: "one", 3: "three"}
    assert map_missing(jobs.square, [1, 2, 3], known.get) == ["one", 4, "three"]
    monkeypatch.setattr("lib.engine._Worker.start", None)
    assert map_missing(jobs.square, [3, 1], known.get) == ["three", "one"]


def test_parallel_equals_one_worker_bitwise():
    before = dict(os.environ)
    together, alone = (map_local(jobs.descend, [0, 1, 2], workers=n) for n in (2, 1))
    assert [bits for bits, _ in together] == [bits for bits, _ in alone]
    assert len({where[0] for _, where in alone} - {os.getpid()}) == 1
    assert {where[1:] for _, where in together + alone} == {("1", 1)}
    assert dict(os.environ) == before


def test_a_worker_has_the_environment_of_when_it_started(tmp_path, monkeypatch):
    monkeypatch.delenv("LOOPED_TOLD", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    assert map_local(jobs.variable, ["LOOPED_TOLD"]) == [(None, str(tmp_path))]
    monkeypatch.setenv("LOOPED_TOLD", "once")  # the process that workers fork from was started without it
    assert map_local(jobs.variable, ["LOOPED_TOLD"])[0][0] == "once"
    monkeypatch.delenv("LOOPED_TOLD")
    assert map_local(jobs.variable, ["LOOPED_TOLD"])[0][0] is None


def test_a_failing_job_lets_the_others_finish():
    seen = {}
    with pytest.raises(EngineError) as caught:
        map_local(jobs.odd_fails, [0, 1, 2, 3, 4], workers=1, on_result=seen.__setitem__)
    told = str(caught.value)
    assert told.startswith("3 of 5 jobs failed (job 1: ValueError: 1 is odd; job 3: ValueError: 3 is odd; job 4: ")
    assert "pickle" in told.lower() and told.endswith(").")
    assert seen == {0: 0, 2: 2}
    assert sorted(caught.value.failures) == [1, 3, 4]
    assert "odd_fails" in caught.value.failures[1]


def test_a_job_whose_process_dies_is_tried_once_more(tmp_path):
    specs = [{"file": str(tmp_path / str(n)), "deaths": n} for n in (1, 2)]
    seen = {}
    with pytest.raises(EngineError, match=r"^1 of 2 jobs failed \(job 1: .* died 2 times, last by signal SIGKILL"):
        map_local(jobs.dies, specs, workers=2, on_result=seen.__setitem__)
    assert seen == {0: 1}


def test_a_function_of_the_main_module_is_refused(monkeypatch):
    monkeypatch.setattr(jobs.square, "__module__", "__main__")
    with pytest.raises(EngineError, match="square must live in a module"):
        map_local(jobs.square, [1])


def test_the_environment_chooses_the_engine(monkeypatch, tmp_path):
    monkeypatch.setenv("LOOPED_ENGINE", "slurm")
    with pytest.raises(EngineError, match="^the engine is 'slurm': it must be one of local, ray.$"):
        map_jobs(jobs.square, [1])
    monkeypatch.setenv("LOOPED_ENGINE", "ray")
    monkeypatch.setenv("LOOPED_OUTPUTS", str(tmp_path))
    monkeypatch.setitem(sys.modules, "ray", None)  # as where it is not installed
    with pytest.raises(EngineError, match="^ray cannot be imported .*: `make cluster` installs it beside the rest.$"):
        map_jobs(jobs.square, [1])
    assert unreachable("auto").startswith("ray cannot be imported")
    monkeypatch.setenv("LOOPED_ENGINE", "")
    assert map_jobs(jobs.square, [2], gpus=0.5) == [4]  # this machine's jobs share its GPU as they can


def test_the_cluster_launches_in_the_readme_call_what_there_is():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"```bash\n(#!/bin/bash.*?)```", text, flags=re.DOTALL)
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    (manifest,) = (yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL))
    head, (more,) = (manifest["spec"]["rayClusterSpec"][part] for part in ("headGroupSpec", "workerGroupSpecs"))
    assert head["template"] == more["template"], "every node has the same image and the same folder"
    for said in (script.split(" -- \\\n")[1], manifest["spec"]["entrypoint"]):
        words = shlex.split(said)
        args = cli._parser().parse_args(words[words.index("lib") + 1 :])
        assert (args.scale, args.engine, args.address) == ("paper", "ray", "auto")


def test_jobs_on_a_gpu_share_it_by_the_number_of_workers(monkeypatch):
    asked = []
    monkeypatch.setattr("lib.engine.map_jobs", lambda *what, gpus: asked.append(gpus) or [0])
    for device, how in (("cpu", {}), ("cuda", {}), ("cuda", {"workers": 4}), ("cuda", {"gpus": 0.3})):
        map_missing(jobs.square, [SimpleNamespace(run=SimpleNamespace(device=device))], lambda spec: None, **how)
    assert asked == [0.0, 1.0, 0.25, 0.3]


def test_cores():
    assert 1 <= cores() <= os.cpu_count()


def test_progress_weighs_unequal_jobs(progress_file, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    progress = Progress(4, "mixed")
    progress.report(0, 90, 100)  # resumed at step 90
    now[0] += 10
    progress.report(0, 95, 100)
    progress.report(1, 0, 300, "loss 0.5")
    progress.end(2)  # without a word: counted as a mean job, and not as work done now
    progress.show()
    told = json.loads(progress_file.read_text())
    assert told == {
        "title": "mixed",
        "done": 95 + 200,
        "total": 100 + 300 + 200 + 200,
        "finished": 1,
        "runs": 4,
        "seconds": 10.0,
        "eta": (800 - 295) * 10 / 5,
        "note": "loss 0.5",
    }
    progress_file.unlink()
    now[0] += 0.4
    progress.show()
    assert not progress_file.exists()  # at most twice a second
    progress.show(last=True)
    assert progress_file.exists()


def test_progress_bar_goes_to_stderr(monkeypatch, capsys):
    monkeypatch.delenv("LOOPED_PROGRESS")
    progress = Progress(2, "squares")
    progress.report(0, 3, 4, "loss 0.5")
    progress.show(last=True)
    told = capsys.readouterr()
    assert told.out == ""
    assert "squares" in told.err and "38%" in told.err and "0/2 loss 0.5" in told.err


def test_workers_do_not_outlive_the_parent(tmp_path):
    files = {how: tmp_path / how.name for how in (signal.SIGKILL, signal.SIGINT)}
    code = "import sys, lib.engine, tests.engine_jobs as j; lib.engine.map_local(j.lingers, sys.argv[1:])"
    parents = {
        how: subprocess.Popen(
            [sys.executable, "-c", code, str(file)],
            cwd=ROOT,
            stderr=subprocess.DEVNULL,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
        )
        for how, file in files.items()
    }
    try:
        for how, parent in parents.items():
            _wait(lambda file=files[how]: file.exists() and file.read_text())
            parent.send_signal(how)
            parent.wait(timeout=60)
            _wait(lambda file=files[how]: not _alive(int(file.read_text())))
    finally:
        for parent in parents.values():
            parent.kill()


def _wait(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        # an orphan that nobody has waited for is dead too
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except ProcessLookupError:
        return False
    except FileNotFoundError:
        return not Path("/proc").exists()


def test_notebooks_side_by_side_share_the_cores(tmp_path, monkeypatch):
    slots, marks = tmp_path / "slots", tmp_path / "marks"
    slots.mkdir(), marks.mkdir()
    monkeypatch.setenv("LOOPED_SLOTS", str(slots))
    monkeypatch.setattr("lib.engine.cores", lambda: 1)
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(map_local, jobs.overlaps, [str(marks)] * 2, 2) for _ in range(2)]
    assert [done.result() for done in both] == [[1, 1]] * 2, "never more than one at work"
    monkeypatch.delenv("LOOPED_SLOTS")
    assert max(map_local(jobs.overlaps, [str(marks)] * 2, 2)) == 2, "the job would have noticed"
