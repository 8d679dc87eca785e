"""Faults from outside: full disks, signals, kills, files that change in mid-run, old stores, clocks that are set back.

Each in processes of its own, on a copy of the project with small notebooks in the place of two of its own. After each fault the
same command completes, and what it leaves is bitwise what an undisturbed run leaves.
"""

import fcntl
import hashlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from lib import BEHAVIOUR, claims, leftovers, store, training
from lib.paths import ROOT
from lib.store import GOES_ON
from tests import fault_jobs
from tests.conftest import environment

STOPPED = f"Stopped. Finished runs are kept; {GOES_ON}."
SIGNALS, IGNORED, DEFAULT = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM), signal.SIG_IGN, signal.SIG_DFL
NAME, SECOND = "4_3_scratch_training", "4_4_refit"
HEAD = "# ---\n# jupyter:\n#   kernelspec:\n#     display_name: Python 3\n#     language: python\n#     name: python3\n# ---\n"
NOTEBOOK = f"""{HEAD}
# %% tags=["parameters"]
scale: str = "smoke"
steps: int = {fault_jobs.STEPS}
# %%
from lib import claims, engine, params, results  # first: it makes altair's import quicker
from tests import fault_jobs

import altair as alt
import numpy as np
import pandas as pd

p = params.of(globals())
out = results.begin("{NAME}", scale)
# %%
specs = [(seed, steps) for seed in range(fault_jobs.SEEDS)]
made = engine.map_missing(fault_jobs.train, specs, fault_jobs.stored, 1, "tiny")
frame = pd.DataFrame({{f"seed_{{seed}}": np.load(folder / "losses.npy") for seed, folder in enumerate(made)}})
print(frame.iloc[-1].tolist())
# %%
fault_jobs.at("table")
out.table(pd.concat([frame] * 500), "losses");
# %%
fault_jobs.at("chart")
if fault_jobs.drawn():
    out.chart(alt.Chart(frame.reset_index()).mark_point().encode(x="index", y="seed_0"), "losses")
# %%
judgements = [claims.Judgement("no_norm_never_worse", "inconclusive", claims.load()["no_norm_never_worse"]["rule"], 3)]
fault_jobs.at("judged")
out.finish(p, judgements, {{"models": len(made)}})
fault_jobs.at("end")
"""
SIDE = f"""{HEAD}
# %% tags=["parameters"]
scale: str = "smoke"
steps: int = 1
# %%
from lib import params, results

p = params.of(globals())
assert p == params.load("{SECOND}", scale)
results.begin("{SECOND}", scale).finish(p, [], {{}})
"""


class Project:
    """A copy of this project with two small notebooks, and the commands on it."""

    def __init__(self, root):
        self.root = root
        shutil.copytree(ROOT / "lib", root / "lib")
        (root / "notebooks").mkdir()
        for name, text, steps in ((NAME, NOTEBOOK, fault_jobs.STEPS), (SECOND, SIDE, 1)):
            (root / "notebooks" / f"{name}.py").write_text(text)
            (root / "params" / name).mkdir(parents=True)
            self.params(name).write_text(f'scale: "smoke"\nsteps: {steps}\n')
        for name in ("claims.yaml", "models.yaml"):
            shutil.copy(ROOT / "params" / name, root / "params")

    def params(self, name):
        return self.root / "params" / name / "smoke.yaml"

    def start(self, outputs, *words, only=(NAME,), more=(), prefix=(), paths=(), ignored=None, cores=None, **environment):
        """Start `python -m lib run`, or another module where words name one."""

        def prepare():
            for number in SIGNALS:
                signal.signal(number, IGNORED if number == ignored else DEFAULT)
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])

        words = words or ("lib", "run", "--scale", "smoke", *more, "--only", *only)
        values = {"LOOPED_OUTPUTS": str(outputs), "KEYS": " ".join(map(key, range(fault_jobs.SEEDS)))}
        values["PYTHONPATH"] = os.pathsep.join(map(str, [*paths, self.root, ROOT]))
        return subprocess.Popen(
            [*prefix, sys.executable, "-m", *map(str, words)],
            cwd=self.root,
            env=os.environ | values | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=prepare,
        )

    def run(self, outputs, *words, **how):
        """Run it to its end: the exit code and the lines on stderr."""
        return ended(self.start(outputs, *words, **how))


def ended(process):
    _, said = process.communicate(timeout=240)
    assert "Traceback" not in said, said
    return process.returncode, said.strip().splitlines()


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    return Project(tmp_path_factory.mktemp("copied") / "project")


@pytest.fixture(scope="module")
def undisturbed(project, tmp_path_factory):
    """The outputs of a run that nothing disturbs."""
    outputs, temporary = tmp_path_factory.mktemp("undisturbed") / "outputs", tmp_path_factory.mktemp("temporary")
    code, said = project.run(outputs, DRAW="1", TMPDIR=str(temporary))
    assert code == 0, said
    assert not list(temporary.iterdir()), "neither its kernel nor its workers leave anything"
    return outputs


def key(seed):
    return store.key(fault_jobs.run(seed).spec())


def files(outputs):
    """Every file below `outputs` but for the run store, and every folder that is hidden."""
    paths = {str(path.relative_to(outputs)): path for path in sorted(outputs.rglob("*"))}
    found = {name: path for name, path in paths.items() if path.is_file() or path.name.startswith(".")}
    return {name: path.is_file() and path.read_bytes() for name, path in found.items() if not name.startswith("runs")}


def outcome(outputs, drawn=False):
    """What a run must leave bit for bit: all of it but for dates and seconds, and in the store the trained models. Pictures,
    which take seconds, only where they were drawn."""
    found = {name: content for name, content in files(outputs).items() if drawn or not name.endswith(".png")}
    for name in [name for name in found if name.endswith("result.json")]:
        varying = ("date", "seconds", "training_core_seconds")
        found[name] = {k: v for k, v in json.loads(found[name]).items() if k not in varying}
    for name in [name for name in found if name.endswith("notebook.ipynb")]:
        found[name] = [(c.get("outputs"), c["source"]) for c in json.loads(found[name])["cells"]]
    for seed in range(fault_jobs.SEEDS):
        folder = outputs / "runs" / key(seed)
        assert store.Store(outputs / "runs").find(folder.name) == folder
        found |= {(seed, name): (folder / name).read_bytes() for name in ("model.safetensors", "losses.npy", "config.json")}
    return found


def starts(folder):
    """How often a training began from nothing, and how often it was resumed, by its log."""
    text = (folder / "train.log").read_text()
    return text.count(" started: "), text.count(" resumed from step ")


def all_starts(outputs):
    return [starts(outputs / "runs" / key(seed)) for seed in range(fault_jobs.SEEDS)]


def earlier(undisturbed, outputs, missing=()):
    """A copy in which some trainings are still to be made, and whose table, picture and notebook are other ones: the earlier
    results, which are returned."""
    shutil.copytree(undisturbed, outputs)
    for seed in missing:
        shutil.rmtree(outputs / "runs" / key(seed))
    for name in ("losses.csv", "losses.png", "notebook.ipynb"):
        (outputs / "smoke" / NAME / name).write_text("earlier")
    return files(outputs)


def wait_for(condition, seconds=120):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
    return found


def held(process, file):
    """Waits until a job waits at its point; the processes below by then."""
    wait_for(lambda: file.exists() or process.poll() is not None)
    assert process.poll() is None, ended(process)
    return children(process.pid)


def children(process):
    """The processes below one, by number: their command lines."""
    parent, lines = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            lines[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue  # it has just ended
    found, above = {}, [process]
    while above:
        last = above.pop()
        below = {n: line for n, line in lines.items() if parent[n] == last}
        above += below
        found |= below
    return found


def alive(processes):
    """Those that still run; a zombie that nobody has waited for does not."""
    found = []
    for process in processes:
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z":
            found.append(process)
    return found


def gone(processes):
    wait_for(lambda: not alive(processes), seconds=10)
    return True


# ---- a disk that is full ------------------------------------------------------------------------------------------------


class Disk:
    """A small disk: a tmpfs mounted here, or in a namespace of its own, or where neither may be, a limit on files instead."""

    WAYS = ("mount", "namespace", "limit")

    def __init__(self, folder, ways=WAYS):
        self.folder, self.seen, self.prefix, self.remove = folder, folder, [], lambda: None
        self.environment, self.full, self.remedy = {"DISK": str(folder)}, os.strerror(28), "free some space"
        folder.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)]
        if "mount" in ways and not subprocess.run(mount, capture_output=True).returncode:
            self.remove = lambda: subprocess.run(["umount", "--lazy", str(folder)], check=True)
        elif "namespace" in ways and (holder := self.namespace(mount)):
            self.seen = Path(f"/proc/{holder.pid}/root{folder}")
            self.prefix = ["nsenter", "-t", str(holder.pid), "-U", "-m", "--preserve-credentials"]
            self.remove = lambda: [holder.kill(), holder.communicate()]
        else:
            self.environment["FULL"], self.full = "limit", os.strerror(27)
            self.remedy = "lift the limit on the size of files"

    def namespace(self, mount):
        command = ["unshare", "-Urm", "sh", "-c", f"{' '.join(mount)} && echo mounted && exec sleep 900"]
        try:
            holder = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        except FileNotFoundError:
            return None
        if holder.stdout.readline().strip() == "mounted":
            return holder
        holder.communicate()
        return None

    def free(self):
        (self.seen / "filler").unlink(missing_ok=True)


@pytest.fixture
def disk(tmp_path):
    made = Disk(tmp_path / "disk", os.environ.get("FAULT_DISK", " ".join(Disk.WAYS)).split())
    yield made
    made.remove()


def test_a_training_whose_disk_is_full_ends_with_a_sentence_and_goes_on_once_there_is_space(disk, project, undisturbed):
    root, name = disk.folder / "runs", key(1)
    seen = disk.seen / "runs"
    sentence = f"The run store {root} cannot be used ({disk.full}): {disk.remedy}, and {GOES_ON}."

    def train(fault):
        return project.run(disk.folder, "tests.fault_jobs", "make", root, prefix=disk.prefix, FAULT=fault, **disk.environment)

    def left():
        return [str(path.relative_to(seen)) for path in sorted(seen.rglob("*"))]

    partial = f"{name}.partial"
    assert train("fill step") == (1, [sentence])
    assert left() == [partial, f"{partial}/checkpoint.pt", f"{partial}/train.log"]
    assert training.read_checkpoint(seen / partial / "checkpoint.pt", "cpu")["step"] == fault_jobs.CHECKED
    disk.free()
    (seen / partial / ".checkpoint.pt.1-0123abcd.tmp").touch()  # left by a kill
    # where the weights are written, and where the finished run is published
    assert train("nearly end, fill publish") == (1, [sentence] * 2)
    assert [path.name for path in seen.iterdir()] == [partial] and not [*(seen / partial).glob(".*")]
    assert training.read_checkpoint(seen / partial / "checkpoint.pt", "cpu")["step"] == fault_jobs.STEPS
    disk.free()
    assert train("") == (0, [])
    assert store.Store(seen).find(name) == seen / name and starts(seen / name) == (1, 3)
    for file in ("model.safetensors", "losses.npy"):
        assert (seen / name / file).read_bytes() == (undisturbed / "runs" / name / file).read_bytes()


def test_a_run_whose_outputs_do_not_fit_leaves_the_earlier_ones(disk, project, undisturbed):
    outputs, seen = disk.folder / "outputs", disk.seen / "outputs"
    before = earlier(undisturbed, seen)
    for point in ("table", "chart", "end"):  # a table, a picture, the executed notebook
        how = disk.environment | {"FAULT": f"fill {point}", "DRAW": "1"}
        code, said = project.run(outputs, prefix=disk.prefix, **how)
        assert code == 1 and said[-1].startswith("error: ")
        assert f"cannot be written ({disk.full}): {disk.remedy}, and {GOES_ON}" in said[-1]
        disk.free()
        left = files(seen)
        left.pop(f"failed/smoke-{NAME}.ipynb", None)
        assert left.keys() == before.keys()
        changed = {name for name in left if left[name] != before[name]}
        assert not changed if point != "end" else f"smoke/{NAME}/notebook.ipynb" not in changed
    code, said = project.run(outputs, prefix=disk.prefix, DRAW="1")
    assert code == 0 and outcome(seen, drawn=True) == outcome(undisturbed, drawn=True)


def test_an_array_and_a_table_that_do_not_fit_are_told_and_are_no_results(disk, project):
    """Of an array numpy itself would write a file that lacks its end, and say nothing."""
    code, said = project.run(disk.folder, "tests.fault_jobs", "full", prefix=disk.prefix, **disk.environment)
    remedy = f"({disk.full}): {disk.remedy}, and {GOES_ON}."
    assert said == [
        f"The run store {disk.folder}/runs cannot be used {remedy}",
        f"{disk.folder}/smoke cannot be written {remedy}",
    ]
    assert code == 0 and not (disk.seen / "runs/a").exists() and not (disk.seen / "smoke/a").exists()


# ---- signals and kills --------------------------------------------------------------------------------------------------


def test_a_run_that_is_stopped_and_one_whose_kernel_is_killed_leave_nothing_behind_and_go_on(project, undisturbed, tmp_path):
    outputs, file = tmp_path / "outputs", tmp_path / "held"
    before = earlier(undisturbed, outputs, missing=(1, 2))
    process = project.start(outputs, FAULT="hold step", HOLD=str(file))
    below = held(process, file)
    assert any("ipykernel" in line for line in below.values()) and any("forkserver" in line for line in below.values())
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)  # as `timeout` does, which signals the process and then its group
    code, said = ended(process)
    assert (code, said[-1]) == (128 + signal.SIGTERM, STOPPED) and not [line for line in said if "rror" in line]
    assert gone(below) and files(outputs) == before
    file.unlink()

    process = project.start(outputs, FAULT="hold step", HOLD=str(file))
    below = held(process, file)
    os.kill(next(n for n, line in below.items() if "ipykernel" in line), signal.SIGKILL)
    code, said = ended(process)
    assert code == 1 and said[-1].startswith(f"error: notebooks/{NAME}.py at scale smoke: code cell 3 failed with DeadKernel")
    assert "killed" in said[-1] and GOES_ON in said[-1]
    assert gone(below)
    left = files(outputs)
    assert left.pop(f"failed/smoke-{NAME}.ipynb") and left == before
    file.unlink()

    code, said = project.run(outputs)
    assert code == 0, said
    assert outcome(outputs) == outcome(undisturbed) and all_starts(outputs) == [(1, 0), (1, 2), (1, 0)]


def test_an_interrupt_ends_a_run_that_ignores_the_end_of_its_terminal(project, undisturbed, tmp_path):
    outputs, file = tmp_path / "outputs", tmp_path / "held"
    before = earlier(undisturbed, outputs)
    how = {"only": (NAME, SECOND), "ignored": signal.SIGHUP}  # side by side, where there are two cores; as under nohup
    process = project.start(outputs, **how, FAULT="hold table", HOLD=str(file))
    below = held(process, file)
    process.send_signal(signal.SIGHUP)
    time.sleep(1)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    code, said = ended(process)
    assert (code, said[-1]) == (128 + signal.SIGINT, STOPPED)
    assert gone(below)
    assert {name: content for name, content in files(outputs).items() if SECOND not in name} == before


def test_the_end_of_its_terminal_ends_a_run_that_is_only_starting_and_has_removed_what_a_killed_one_left(
    project, undisturbed, tmp_path
):
    outputs = tmp_path / "outputs"
    before = earlier(undisturbed, outputs)
    process, below = starting(project, outputs)
    process.kill()
    process.communicate()
    assert gone(below)
    owner = leftovers.owner().removesuffix(str(os.getpid())) + str(process.pid)
    # what it leaves when it is killed later
    (outputs / f"smoke/.staging-{NAME}-{owner}").mkdir()
    for name in (f"progress-{owner}.json", f".progress-{owner}.json.{owner}-0123abcd.tmp"):
        (outputs / name).touch()
    assert len(files(outputs)) == len(before) + 4, "its working copy, and these"
    mine = outputs / f"smoke/.claims.csv.{leftovers.owner()}-0123abcd.tmp"  # of a process that is not gone
    mine.touch()

    process, below = starting(project, outputs)
    process.send_signal(signal.SIGHUP)
    code, said = ended(process)
    assert (code, said[-1]) == (128 + signal.SIGHUP, STOPPED)
    mine.unlink()
    assert gone(below) and files(outputs) == before


def starting(project, outputs):
    """A run whose kernel has just been started, and the processes below it."""
    process = project.start(outputs)
    return process, wait_for(lambda: {n: line for n, line in children(process.pid).items() if "ipykernel" in line})


FINISH = """
import os, signal
from lib import results

out, move = results.begin("a", "smoke"), os.replace
for name in ("one", "two"):
    (out.staging / f"{name}.csv").write_text("new")

def interrupted(source, target):
    move(source, target)
    if target.parent.name == "a":
        print(target.name)
        os.kill(os.getpid(), signal.SIGINT)

os.replace = interrupted
out.finish({}, [], {})
"""


def test_results_are_moved_all_together(tmp_path):
    old = tmp_path / "smoke/a"
    old.mkdir(parents=True)
    for name in ("one.csv", "two.csv", "three.csv"):
        (old / name).write_text("old")
    command = [sys.executable, "-c", FINISH]
    done = subprocess.run(command, cwd=ROOT, env=environment(tmp_path), check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "result.json", "no verdicts of tables that are not there"
    assert {path.name: path.read_text() for path in old.glob("*.csv")} == {"one.csv": "new", "two.csv": "new"}
    assert json.loads((old / "result.json").read_text())["notebook"] == "a"


# ---- two processes, and files that change -------------------------------------------------------------------------------


def test_two_runs_of_one_notebook_at_once_train_every_model_once(project, undisturbed, tmp_path):
    outputs, meeting = tmp_path / "outputs", tmp_path / "meeting"
    processes = [project.start(outputs, FAULT="meet start", HOLD=str(meeting)) for _ in range(2)]
    said = [process.communicate(timeout=240) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    assert said[0][0] == said[1][0], "the same verdicts"
    assert outcome(outputs) == outcome(undisturbed)
    assert all_starts(outputs) == [(1, 0)] * fault_jobs.SEEDS
    assert sorted(path.name for path in (outputs / "runs").iterdir()) == sorted(map(key, range(fault_jobs.SEEDS)))


def test_values_and_rules_are_those_read_at_the_start_and_a_change_is_told(undisturbed, tmp_path):
    project, outputs, file = Project(tmp_path / "project"), tmp_path / "outputs", tmp_path / "held"
    earlier(undisturbed, outputs)
    process = project.start(outputs, only=(NAME, SECOND), cores=1, FAULT="hold judged", HOLD=str(file))
    held(process, file)
    project.params(NAME).write_text("steps: [")
    project.params(SECOND).write_text('scale: "smoke"\nsteps: 2\n')
    rules = project.root / "params/claims.yaml"
    old = claims.rules_hash(rules)
    rules.write_text(rules.read_text().replace("no cell with Holm p < 0.05 and delta < 0", "no cell below 0", 1))
    new = claims.rules_hash(rules)
    file.unlink()
    code, said = ended(process)
    assert code == 0 and new != old, said
    result, side = (json.loads((outputs / "smoke" / name / "result.json").read_text()) for name in (NAME, SECOND))
    assert side["params"] == {"scale": "smoke", "steps": 1} and side["rules_hash"] == new
    assert result["rules_hash"] == old and "no cell with Holm" in result["verdicts"][0]["ours"]
    assert f"judged by rules {old}, now {new}" in (outputs / "smoke/claims.csv").read_text()
    changed = " and ".join(f"params/{name}/smoke.yaml" for name in (NAME, SECOND))
    assert said[-2:] == [
        f"{changed} changed during this run, whose results are of the values read at its start: run it again for the new ones.",
        f"params/claims.yaml holds other rules now than those that judged 1 of 66 claims: run {NAME} again.",
    ]


# ---- a store that older code wrote --------------------------------------------------------------------------------------


def manifest(folder, change=lambda listed: listed):
    """Write a run's manifest anew, as older code would have left it."""
    listed = {
        path.name: {"sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "bytes": path.stat().st_size}
        for path in folder.iterdir()
        if path.name != store.MANIFEST
    }
    (folder / store.MANIFEST).write_text(json.dumps(change(listed)))


OLD = {
    "without manifest": lambda folder: (folder / store.MANIFEST).unlink(),
    "without spec": lambda folder: (folder / store.SPEC).unlink(),
    "spec unlisted": lambda folder: manifest(folder, lambda listed: {k: v for k, v in listed.items() if k != store.SPEC}),
    "file missing": lambda folder: (folder / "result.json").unlink(),
    "extra file": lambda folder: (folder / "notes.txt").write_text("by hand"),
}
MAKE = """
import sys
from pathlib import Path
from lib.store import Store

def build(folder):
    print(folder.stem)
    (folder / "result.json").write_text("new")

for name in sys.argv[3:]:
    Store(sys.argv[1]).make(name, {"behaviour": int(sys.argv[2])}, build)
"""


def test_runs_that_are_not_whole_are_made_again_and_nothing_old_is_deleted(project, tmp_path):
    root, before = tmp_path / "outputs/runs", {}

    def old(folder):
        (folder / "result.json").write_text("old")

    for name, damage in OLD.items():
        damage(folder := store.Store(root).make(name, {"behaviour": BEHAVIOUR}, old))
        before[name if name == "extra file" else f"{name}.corrupt-1"] = contents(folder)
    before["older"] = contents(store.Store(root).make("older", {"behaviour": BEHAVIOUR - 1}, old))
    command = [sys.executable, "-c", MAKE, root, str(BEHAVIOUR), *OLD]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [name for name in OLD if name != "extra file"]
    assert {name: contents(root / name) for name in before} == before
    code, said = project.run(tmp_path / "outputs", "tests.fault_jobs", "store_line")
    counts = f"{len(OLD) + 1} runs (1 of another behaviour version, kept and never read), 0 unfinished, 4 corrupt"
    assert code == 0 and counts in said[0]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def stopped(root, **model):
    """A training that was stopped: the folder of what is not finished, with its checkpoint."""
    folder = root / f"{store.key(fault_jobs.run(1, **model).spec())}.partial"
    folder.mkdir(parents=True)

    def report(done, total):
        if done > fault_jobs.CHECKED:
            raise KeyboardInterrupt

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.raises(KeyboardInterrupt):
        training.train(fault_jobs.run(1, **model), folder, report, checkpoint_seconds=-1)
    torch.set_num_threads(threads)
    return folder


def of_before(finished):
    """Make a finished run one of a time when the options that came later were not there: its spec has always left them out."""
    spec = json.loads((finished / store.SPEC).read_text())
    assert not training.BEFORE.keys() & {*spec["model"], *spec["recipe"], *spec["task"]}
    config = json.loads((finished / "config.json").read_text())
    assert training.BEFORE.keys() & config.keys()
    (finished / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k not in training.BEFORE}))
    manifest(finished)
    return contents(finished)


def without(key):
    return lambda state: {k: v for k, v in state.items() if k != key}


def other_shape(state):
    name = next(iter(state["model"]))
    return state | {"model": state["model"] | {name: torch.zeros(1)}}


LAYOUTS = {
    "experts": without("balance"),
    "seconds": without("seconds"),
    "step": without("step"),
    "model": lambda state: state | {"model": {}},
    "shape": other_shape,
    "optimizers": lambda state: state | {"optimizers": []},
    "list": lambda state: [1, 2],
    "tensor": lambda state: torch.zeros(3),
    "pickle": lambda state: b"no pickle at all",
    "as it is": lambda state: state,
}


def test_a_run_of_before_an_option_stays_valid_and_a_checkpoint_of_another_layout_is_not_read(project, undisturbed, tmp_path):
    for name, change in LAYOUTS.items():
        file = stopped(tmp_path / name, **fault_jobs.MODELS.get(name, {})) / "checkpoint.pt"
        content = change(training.read_checkpoint(file, "cpu"))
        if not isinstance(content, bytes):
            torch.save(content, buffer := io.BytesIO())
            content = buffer.getvalue()
        file.write_bytes(hashlib.sha256(content).digest() + content)
    whole, finished = undisturbed / "runs" / key(1), tmp_path / "finished" / key(1)
    shutil.copytree(whole, finished)
    before = of_before(finished)
    roots = [tmp_path / name for name in (*LAYOUTS, "finished")]
    assert project.run(tmp_path, "tests.fault_jobs", "make", *roots) == (0, [])
    assert contents(finished) == before and [path.name for path in finished.parent.iterdir()] == [finished.name]
    for name in LAYOUTS:
        (folder,) = (tmp_path / name).iterdir()
        said = "the checkpoint is of another layout and is not read" in (folder / "train.log").read_text()
        assert (said, starts(folder)) == ((False, (1, 1)) if name == "as it is" else (True, (2, 0))), name
        if name != "experts":
            for file in ("model.safetensors", "losses.npy"):
                assert (folder / file).read_bytes() == (whole / file).read_bytes(), name


# ---- a clock that is set back -------------------------------------------------------------------------------------------

CLOCK = '''
"""A clock that is set back by a day at first, and by an hour at every tenth look."""
import time

now, form, looks = time.time, time.strftime, 0


def back():
    global looks
    looks += 1
    return now() - 86400 - 3600 * (looks // 10)


time.time = back
time.strftime = lambda text, at=None: form(text, at or time.gmtime(0))
'''


@pytest.fixture
def clock(tmp_path):
    """A folder to be put on the path of processes whose clock is set back."""
    (tmp_path / "clock").mkdir()
    (tmp_path / "clock/sitecustomize.py").write_text(CLOCK)
    return tmp_path / "clock"


def test_a_training_goes_on_by_a_clock_that_was_set_back(project, undisturbed, clock, tmp_path):
    folder = stopped(tmp_path / "runs")
    for path in [*folder.iterdir(), folder]:
        os.utime(path, (2**32, 2**32))
    assert project.run(tmp_path, "tests.fault_jobs", "make", tmp_path / "runs", paths=[clock]) == (0, [])
    made = tmp_path / "runs" / key(1)
    assert starts(made) == (1, 1) and json.loads((made / "training.json").read_text())["seconds"] > 0
    for file in ("model.safetensors", "losses.npy"):
        assert (made / file).read_bytes() == (undisturbed / "runs" / key(1) / file).read_bytes()


def test_a_fresh_run_by_a_clock_that_was_set_back_sets_no_store_aside_over_another(project, undisturbed, clock, tmp_path):
    outputs = tmp_path / "outputs"
    shutil.copytree(undisturbed, outputs)
    (outputs / "runs-19700101-000000").mkdir()  # of the same second, by that clock
    with open(outputs / "runs/a.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, said = project.run(outputs, more=["--fresh"])
        assert code == 1 and f"another process is making a run in {outputs / 'runs'}: wait for its end" in said[-1]
    code, said = project.run(outputs, more=["--fresh"], paths=[clock])
    assert code == 0, said
    assert not list((outputs / "runs-19700101-000000").iterdir())
    aside = outputs / "runs-19700101-000000-2"
    assert f"the run store is set aside as {aside}" in said
    assert sorted(path.name for path in aside.iterdir()) == sorted(map(key, range(fault_jobs.SEEDS)))
    assert outcome(outputs) == outcome(undisturbed) and all_starts(outputs) == [(1, 0)] * fault_jobs.SEEDS
    for seed in range(fault_jobs.SEEDS):
        assert json.loads((outputs / "runs" / key(seed) / "training.json").read_text())["seconds"] > 0
    assert json.loads((outputs / f"smoke/{NAME}/result.json").read_text())["seconds"] > 0
    assert not re.search(r"-\d+( s|:)", "\n".join(said))


BAR = """
import time
from lib.progress import Progress

shown = Progress(1, "clock")
for done in range(40):
    shown.report(0, done, 40)
    shown.shown = -1
    shown.show()
"""


def test_a_bar_never_shows_less_than_no_time(clock):
    environment = {k: v for k, v in os.environ.items() if k != "LOOPED_PROGRESS"} | {"PYTHONPATH": str(clock)}
    done = subprocess.run([sys.executable, "-c", BAR], cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert re.search(r"\[00:0\d<00:0\d", done.stderr) and "-" not in done.stderr, done.stderr
