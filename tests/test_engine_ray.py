"""Jobs on a Ray cluster: everything that local worker processes do, and what only a cluster can lose.

One cluster on this machine serves the module; what tests run in this process shares one connection, so that workers stay warm.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from lib import BEHAVIOUR, engine, engine_ray, experiment, paths, store
from lib.boundary import never
from lib.engine import EngineError, map_local
from lib.engine_ray import map_ray
from lib.experiment import Job
from lib.training import trained
from tests import engine_jobs as jobs
from tests.conftest import environment

with engine.environment(engine_ray.QUIET):
    ray = pytest.importorskip("ray", reason="ray is not installed: `make cluster` installs it")

NOTEBOOK = "4_3_scratch_training"
GUARD = """
import os, signal, subprocess, sys, time
parent, command = os.getppid(), subprocess.Popen(sys.argv[1:])
while os.getppid() == parent and command.poll() is None:
    time.sleep(0.5)
os.killpg(0, signal.SIGKILL)
"""  # a cluster must not outlive a test session that is killed


@pytest.fixture(scope="module")
def cluster():
    """The address of a cluster of two cores and a GPU that is not there, in a folder of its own."""
    folder = Path(tempfile.mkdtemp(prefix="ray-"))  # short: sockets lie in it
    command = [sys.executable, "-c", GUARD, sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
    command += ["--port=0", "--num-cpus=2", "--num-gpus=1", "--object-store-memory=80000000", "--include-dashboard=false"]
    command += ["--include-log-monitor=false", "--disable-usage-stats", f"--temp-dir={folder}"]
    # by default workers give way to every other process of the machine, and some are started that no job can use
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    env |= {"RAY_worker_niceness": "0", "RAY_prestart_worker_first_driver": "0"}
    with open(folder / "start.log", "w") as log:
        head = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    address = folder / "ray_current_cluster"
    try:
        wait(lambda: head.poll() is not None or (address.exists() and address.read_text()), 180)
        assert head.poll() is None, (folder / "start.log").read_text()
        yield address.read_text()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(head.pid, signal.SIGKILL)
        head.wait()
        wait(lambda: not named_by_a_process(folder))  # workers end a moment later, and would make it again
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def joined(cluster, tmp_path_factory):
    """This process is connected to the cluster; the outputs folder of all tests here."""
    handler = signal.getsignal(signal.SIGTERM)
    with engine_ray.connected(cluster):
        assert signal.getsignal(signal.SIGTERM) == handler
        yield tmp_path_factory.mktemp("outputs")
        assert ray.is_initialized(), "a connection that was there before is kept"
    assert not ray.is_initialized()


@pytest.fixture
def connection(cluster, joined, monkeypatch):
    """The test's engine is the cluster, over the one connection."""
    for name, value in {"LOOPED_OUTPUTS": str(joined), "LOOPED_ENGINE": "ray", "LOOPED_RAY_ADDRESS": cluster}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(autouse=True)
def progress_file(tmp_path, monkeypatch):
    monkeypatch.setenv("LOOPED_PROGRESS", str(tmp_path / "progress.json"))
    return tmp_path / "progress.json"


def test_results_come_in_order_and_as_they_end(connection, progress_file, tmp_path):
    seen, left = {}, paths.runs() / ".shared-of-a-driver-that-was-killed"
    left.parent.mkdir()
    left.touch()
    os.utime(left, (0, 0))
    specs = [(number, str(tmp_path / "second")) for number in (0, 1)]
    assert map_ray(jobs.waits, specs, title="two", on_result=seen.__setitem__) == [0, 1]
    assert list(seen.items()) == [(1, 1), (0, 0)]
    assert not list(paths.runs().iterdir())
    told = json.loads(progress_file.read_text())
    assert told.pop("seconds") > 0
    assert told == {"title": "two", "done": 3, "total": 3, "finished": 2, "runs": 2, "note": "job 0", "eta": 0.0}
    assert map_ray(jobs.waits, [], address="nowhere:1") == []


def test_results_are_bitwise_those_of_local_processes(connection, monkeypatch):
    monkeypatch.setattr(engine, "map_local", None)
    there, here = engine.map_jobs(jobs.descend, [0, 1, 2]), map_local(jobs.descend, [0, 1, 2], workers=1)
    assert [bits for bits, _ in there] == [bits for bits, _ in here]
    assert not {where[0] for _, where in there} & {os.getpid(), *(where[0] for _, where in here)}
    assert {where[1:] for _, where in there} == {("1", 1)}


def test_a_training_leaves_the_same_bytes_and_is_then_only_looked_up(connection, tmp_path, monkeypatch):
    def made(root):
        wanted = [Job(jobs.tiny(seed, 40), ((never, 3),), 16, root) for seed in range(3)]
        return experiment.make(wanted, None if root.name == "there" else 1)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "map_local", None)
        there = made(tmp_path / "there")
        patch.setattr(engine_ray, "connected", None)
        assert made(tmp_path / "there") == there
    monkeypatch.setenv("LOOPED_ENGINE", "local")
    for a, b in zip(there, made(tmp_path / "here"), strict=True):
        assert a["model"] == tmp_path / "there" / b["model"].name
        for file in ("model.safetensors", "losses.npy"):
            assert (a["model"] / file).read_bytes() == (b["model"] / file).read_bytes()
        found = [experiment.readings_in(folders["sweeps"][0], 2) for folders in (a, b)]
        assert all(np.array_equal(getattr(found[0], f), getattr(found[1], f)) for f in ("prediction", "entropy", "norm"))


def test_a_failing_job_lets_the_others_finish(connection):
    seen = {}
    with pytest.raises(EngineError) as caught:
        map_ray(jobs.odd_fails, [0, 1, 2, 3, 4], on_result=seen.__setitem__)
    told = str(caught.value)
    # word for word what the local engine says
    assert told.startswith("3 of 5 jobs failed (job 1: ValueError: 1 is odd; job 3: ValueError: 3 is odd; job 4: ")
    assert "pickle" in told.lower() and told.endswith(").")
    assert seen == {0: 0, 2: 2}
    assert sorted(caught.value.failures) == [1, 3, 4]
    assert "odd_fails" in caught.value.failures[1]


def test_no_more_jobs_at_once_than_workers(connection, tmp_path):
    def later(index, result):
        time.sleep(1)
        (tmp_path / "first").touch()

    # the second is sent only once the first has been dealt with
    assert map_ray(jobs.sees, [str(tmp_path / "first")] * 2, workers=1, on_result=later) == [False, True]


def test_a_killed_worker_is_tried_once_more_and_goes_on_where_it_was(connection, tmp_path, capfd):
    def spec(seed, root, **how):
        return {"seed": seed, "steps": 30, "root": str(tmp_path / root), "pids": str(tmp_path)} | how

    seen = {}
    with pytest.raises(EngineError, match=r"^1 of 2 jobs failed \(job 1: its process died 2 times, last by .* on [\w.-]+\)\.$"):
        specs = [spec(seed, "there", kill_at=12, kills=kills) for seed, kills in ((0, 1), (1, 2))]
        map_ray(jobs.train, specs, workers=1, on_result=seen.__setitem__)
    assert list(seen) == [0] and capfd.readouterr() == ("", "")
    assert len(set((tmp_path / "0").read_text().split())) == 2
    lines = [line.split(" ", 2)[2] for line in (seen[0] / "train.log").read_text().splitlines()]
    # every step once, and the only second start is the one after the kill
    assert [line for line in lines if "checkpoint" not in line] == [
        "started: 30 steps",
        "resumed from step 12 of 30",
        "finished",
    ]
    assert [int(line.split()[-1]) for line in lines if line.startswith("checkpoint at")] == list(range(1, 31))
    assert same_weights(unbroken(0, 30, tmp_path / "here"), seen[0])


def test_a_killed_driver_loses_nothing_that_was_finished(connection, tmp_path):
    def specs(pause):
        how = {"root": str(tmp_path / "there"), "pids": str(tmp_path), "pause": pause}
        return [{"seed": seed, "steps": steps} | how for seed, steps in enumerate((5, 60, 60))]

    code = "import json, sys; from lib.engine import map_jobs; from tests.engine_jobs import train; "
    code += "map_jobs(train, json.load(sys.stdin))"
    with subprocess.Popen([sys.executable, "-c", code], cwd=paths.ROOT, stdin=subprocess.PIPE, text=True) as driver:
        json.dump(specs(0.2), driver.stdin)
        driver.stdin.close()
        names = [store.key(jobs.tiny(s["seed"], s["steps"]).spec()) for s in specs(0)]
        logs = [tmp_path / "there" / f"{name}.partial" / "train.log" for name in names]
        finished = tmp_path / "there" / names[0] / "train.log"
        wait(lambda: finished.exists() and logs[1].exists() and "checkpoint at step 3" in logs[1].read_text())
        driver.kill()
    workers = [int(pid) for seed in range(2) for pid in (tmp_path / f"{seed}").read_text().split()]
    wait(lambda: not any(map(alive, workers)))  # nobody is left who trains
    before = finished.read_text(), finished.stat().st_mtime_ns
    made = engine.map_jobs(jobs.train, specs(0), workers=1)
    assert (finished.read_text(), finished.stat().st_mtime_ns) == before
    for spec, folder in zip(specs(0), made, strict=True):
        assert (folder / "train.log").read_text().count("started: ") == 1
        assert same_weights(folder, unbroken(spec["seed"], spec["steps"], tmp_path / "here"))
    assert "resumed from step" in (made[1] / "train.log").read_text()


def test_a_gpu_is_shared_as_asked(connection, monkeypatch):
    assert engine.map_jobs(jobs.devices, [0], gpus=0.5) == ["0"]
    monkeypatch.setattr(engine_ray, "PATIENCE", 1.0)
    with pytest.raises(EngineError, match="^the cluster has had no GPU for a job in 1 seconds.$"):
        engine.map_jobs(jobs.devices, [0], gpus=2.0)


def test_a_node_with_other_versions_or_another_folder_says_so(connection, tmp_path, monkeypatch):
    @contextmanager
    def unshared():
        yield str(tmp_path / "elsewhere" / ".shared")

    monkeypatch.setattr(engine_ray, "_versions", lambda: {"behaviour version": BEHAVIOUR, "torch": "0"})
    monkeypatch.setattr(engine_ray, "_shared_file", unshared)
    said = r"[\w.-]+ has torch 2[\w.+]* and not 0 and does not see .*elsewhere: every node needs the same clone, "
    with pytest.raises(EngineError, match=rf"^1 of 1 jobs failed \(job 0: {said}"):
        map_ray(jobs.square, [1])


def test_a_function_of_the_main_module_is_refused(monkeypatch):
    monkeypatch.setattr(jobs.square, "__module__", "__main__")
    with pytest.raises(EngineError, match="square must live in a module"):
        map_ray(jobs.square, [1], address="nowhere:1")


def test_a_cluster_that_is_not_there_is_one_sentence(monkeypatch, tmp_path):
    def absent(**how):
        raise ConnectionError("Could not find any running Ray instance.")

    monkeypatch.setenv("LOOPED_OUTPUTS", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", absent)
    with pytest.raises(EngineError, match="^no Ray cluster runs on this machine: start one with `ray start --head`, or "):
        map_ray(jobs.square, [1])
    for address in ("ray://head:10001", "localhost"):
        with pytest.raises(EngineError, match=f"^the cluster's address is '{address}': it must be auto, or host:port of "):
            map_ray(jobs.square, [1], address=address)


def run(outputs, *words):
    command = [sys.executable, "-m", "lib", "run", "--scale", "smoke", "--only", NOTEBOOK, *words]
    return subprocess.run(command, cwd=paths.ROOT, env=environment(outputs), capture_output=True, text=True, check=False)


def test_a_wrong_address_ends_the_command_at_once(tmp_path):
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        before = time.monotonic()
        done = run(tmp_path / "outputs", "--engine", "ray", "--address", address)
    assert time.monotonic() - before < 60  # Python's imports, on a busy machine; ray itself would wait for minutes
    assert done.returncode == 1 and not (tmp_path / "outputs").exists()
    assert re.fullmatch(rf"error: no Ray cluster answers at {address} \(.*\): start one with .*\.\n", done.stderr)


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """Results of the notebook by the local engine."""
    outputs = tmp_path_factory.mktemp("local")
    assert run(outputs, "--engine", "local").returncode == 0
    return outputs


def test_a_notebook_says_the_same_on_a_cluster(cluster, local, tmp_path):
    done = run(tmp_path, "--engine", "ray", "--address", cluster)
    assert done.returncode == 0, done.stderr[-3000:]
    for name in ("accuracy.csv", "state_norm.csv"):
        there, here = (outputs / "smoke" / NOTEBOOK / name for outputs in (tmp_path, local))
        assert there.read_bytes() == here.read_bytes()


def unbroken(seed, steps, root):
    """The folder of `jobs.tiny`, trained here as a worker trains: with one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return trained(jobs.tiny(seed, steps), root)
    finally:
        torch.set_num_threads(threads)


def same_weights(*folders):
    a, b = ((folder / "model.safetensors").read_bytes() for folder in folders)
    return a == b


def named_by_a_process(folder):
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if os.fsencode(folder) in file.read_bytes():
                return True
    return False


def wait(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
