"""Kernels that were forked: like fresh ones to a notebook, and gone with the process that asked for them."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lib import engine
from lib.paths import ROOT
from tests.conftest import wait_for

pytestmark = pytest.mark.skipif(not engine.forkable(), reason="kernels are forked on Linux, where no NVIDIA driver is")

CELL = """
import json, os, signal, sys, torch, lib.paths
import numpy as np
from lib import engine
path = [*sys.path]
sys.path.append(str(lib.paths.ROOT))
from tests.engine_jobs import square
print(json.dumps({
    "lib": [name for name in before if name.partition(".")[0] == "lib"],
    "path": path, "folder": os.getcwd(), "name": __name__, "root": str(lib.paths.ROOT),
    "environment": {k: v for k, v in os.environ.items() if k not in ("JPY_PARENT_PID", "JPY_SESSION_NAME")},
    "threads": torch.get_num_threads(), "random": [torch.rand(1).item(), np.random.rand()],
    "session": os.getsid(0) == os.getpid(),
    "signals": [str(signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)],
    "torch_at_the_start": "torch" in before, "workers": engine.map_local(square, [2, 3], 2),
}))
"""
SCRIPT = f"""
import json, os, signal, sys
import nbformat
from nbclient import NotebookClient
from lib import kernels, runner
signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a child of abreast
kernels.preload()
def output(**options):
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_code_cell(cell) for cell in ("import sys; before = list(sys.modules)", {CELL!r})]
    how = dict(extra_arguments=runner.QUIET_KERNEL, shutdown_kernel=runner.AT_ONCE)
    NotebookClient(notebook, kernel_name="python3", timeout=300, **how, **options).execute(cwd=sys.argv[1])
    said = [output.text for output in notebook.cells[1].outputs if output.name == "stdout"]
    return json.loads("".join(said))
with kernels.Waiting() as waiting, kernels.Waiting() as other:
    os.environ["SET_LATER"] = "yes"
    found = [output(kernel_manager_class=kernels.manager(kernel)) for kernel in (waiting, other)]
    found += [output(), waiting.process.exitcode]
json.dump(found, sys.stdout)
"""


def script(text, *arguments):
    return subprocess.Popen([sys.executable, "-c", text, *map(str, arguments)], cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_a_notebook_sees_no_difference_but_in_what_is_imported_already(tmp_path):
    told, _ = script(SCRIPT, tmp_path).communicate(timeout=300)
    forked, other, fresh, left = json.loads(told)
    assert [found.pop("torch_at_the_start") for found in (forked, other, fresh)] == [True, True, False]
    drawn = [found.pop("random") for found in (forked, other, fresh)]
    assert len({d[0] for d in drawn}) == len({d[1] for d in drawn}) == 3, "nothing is seeded"
    assert forked == other == fresh
    assert forked["folder"] == str(tmp_path) and forked["environment"]["SET_LATER"] == "yes"
    assert forked["workers"] == [4, 9] and forked["lib"] == []
    assert left == -signal.SIGKILL, "nothing waits for it"


HOLDING = """
import sys, time
import nbformat
from nbclient import NotebookClient
from pathlib import Path
from lib import kernels
cell = f"import os, time, pathlib; pathlib.Path({sys.argv[1]!r}).write_text(str(os.getpid())); time.sleep(60)"
with kernels.Waiting() as waiting:
    if sys.argv[2] == "unused":
        Path(sys.argv[1]).write_text(str(waiting.process.pid))
        time.sleep(60)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])
    try:
        NotebookClient(notebook, kernel_manager_class=kernels.manager(waiting)).execute()
    except Exception as error:
        print(type(error).__name__)
"""


@pytest.mark.parametrize("use", ["unused", "used"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_no_kernel_outlives_the_process_that_waits_for_it(tmp_path, use, number):
    parent = script(HOLDING, tmp_path / "began", use)
    kernel = begun(tmp_path / "began")
    parent.send_signal(number)
    parent.communicate(timeout=60)
    wait_for(lambda: not alive(kernel))


def test_a_kernel_that_is_killed_is_a_dead_one(tmp_path):
    parent = script(HOLDING, tmp_path / "began", "used")
    os.kill(begun(tmp_path / "began"), signal.SIGKILL)
    told, _ = parent.communicate(timeout=60)
    assert told.strip() == "DeadKernelError" and parent.returncode == 0


def begun(file):
    wait_for(lambda: file.exists() and file.read_text(), 120)
    return int(file.read_text())


def alive(pid):
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"
