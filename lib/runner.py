"""Runs a notebook at a scale: checked parameters in, an executed notebook out, nothing earlier touched when a cell fails."""

import json
import os
import posixpath
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jupytext
import nbformat
import papermill
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from nbconvert.preprocessors import CellExecutionError, ExecutePreprocessor
from papermill.exceptions import PapermillExecutionError
from tqdm import tqdm

from lib import engine, kernels, leftovers, params, paths
from lib.store import GOES_ON, cannot_write, disk_full, write_atomic

NOTEBOOKS = (  # in the order they run
    "00_reading_guide",
    "4_1_asymmetry",
    "4_2_readout_collapse",
    "4_3_scratch_training",
    "4_4_refit",
    "4_5_overshoot",
    "beyond_damping",
    "beyond_readout_axis",
    "dense_axes",
    "moe_transfer",
    "99_verdicts",
)
ALONE = ("audit",)  # run for one model at a time, by `python -m lib audit`
# a cell's error is told by other ways: what a kernel and its loop log is about their own end
QUIET_KERNEL = [
    "--IPKernelApp.log_level=50",
    "--IPKernelApp.exec_lines=__import__('logging').getLogger('asyncio').setLevel(50)",
]
AT_ONCE = "immediate"  # else a kernel that had workers waits seconds for the process that made them, which only it can reap
CELL_SECONDS = 7 * 24 * 3600  # a cell may train for days at the paper's scale, but not for ever
LINK = re.compile(r"\]\((?![\w+.-]+:|/|#)(?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")  # a relative one of a text cell
# a link that holds in notebooks/ alone: another notebook beside this one, or a folder beside notebooks/
NEVER_TURNED = re.compile(rf"(?!notebook\.ipynb)[^/]+\.ipynb|\.\./(?!\.\./|(?:{'|'.join((*NOTEBOOKS, *ALONE))})/).*")
QUIET_EVERY = 30.0  # seconds between progress lines where there is no terminal


class NotebookError(RuntimeError):
    """A notebook did not run through; one sentence naming the notebook and the cell."""


def run(notebook: str, scale: str, line: int = 0, kernel: kernels.Waiting | None = None) -> Path:
    """Execute a notebook at a scale; returns outputs/<scale>/<notebook>/notebook.ipynb.

    line: of the terminal, for its bar; kernel: the process that becomes the notebook's kernel, by default a new one. Raises
    ParamsError before anything runs when the parameters are wrong, else as `execute` does.
    """
    return execute(notebook, params.load(notebook, scale), scale, notebook, line, kernel)


def execute(notebook: str, values: dict, scale: str, name: str, line: int = 0, kernel: kernels.Waiting | None = None) -> Path:
    """Execute a notebook with these parameters in a process of its own; returns outputs/<scale>/<name>/notebook.ipynb.

    Raises NotebookError when a cell raises: then the executed copy is in outputs/failed/ and earlier results stand.
    """
    outputs = paths.outputs()
    final = outputs / scale / name / "notebook.ipynb"
    failed = outputs / "failed" / f"{scale}-{name}.ipynb"
    working = failed.with_name(f".{failed.stem}-{leftovers.owner()}.ipynb")
    try:
        failed.parent.mkdir(parents=True, exist_ok=True)
        # the .py is the source: what runs is made from it, whatever the .ipynb beside it says
        nbformat.write(jupytext.read(paths.notebooks() / f"{notebook}.py"), working)
    except OSError as error:
        working.unlink(missing_ok=True)
        raise NotebookError(f"{outputs} cannot be written {cannot_write(error)}") from None
    progress = outputs / f"progress-{leftovers.owner()}.json"
    try:
        with _temporary(), _Watch(f"{name} ({scale})", progress, line):
            papermill.execute_notebook(
                str(working),
                str(working),
                parameters=values,
                cwd=str(paths.notebooks()),
                kernel_name="python3",
                progress_bar=False,
                execution_timeout=CELL_SECONDS,
                extra_arguments=QUIET_KERNEL,
                shutdown_kernel=AT_ONCE,
                **({"kernel_manager_class": kernels.manager(kernel)} if kernel else {}),
            )
        executed = nbformat.read(working, as_version=4)
        final.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(final, nbformat.writes(relinked(scrub(executed), scale, name)) + "\n")
    except (PapermillExecutionError, DeadKernelError, CellTimeoutError) as error:
        working.replace(failed)
        raise NotebookError(_failure(notebook, scale, failed, _told(error))) from None
    except OSError as error:
        if not disk_full(error):
            raise
        raise NotebookError(f"{outputs} cannot be written {cannot_write(error)}") from None
    finally:  # also when it is stopped
        working.unlink(missing_ok=True)
        leftovers.sweep()
    failed.unlink(missing_ok=True)
    return final


@contextmanager
def _temporary() -> Iterator[None]:
    """A folder for what a kernel and its workers would leave behind, since a kernel is killed at its end."""
    with (
        tempfile.TemporaryDirectory(prefix="looped-kernel-", ignore_cleanup_errors=True) as folder,
        engine.environment({engine.TEMPORARY: folder}),
    ):
        yield


def _told(error: Exception) -> str:
    """What an error says, and of a process that was killed what to do."""
    if isinstance(error, PapermillExecutionError):
        return f"{error.ename}: {error.evalue}"
    if isinstance(error, DeadKernelError):
        return f"DeadKernelError: its process was killed, or memory ran out; finished runs are kept, and {GOES_ON}"
    return f"{type(error).__name__}: {error}"


def _failure(notebook: str, scale: str, failed: Path, told: str) -> str:
    """What went wrong as a sentence: notebook, code cell counted from 1, the error, and where to look."""
    added = {"papermill-error-cell-tag", "injected-parameters"}  # by papermill: no cells of the notebook's own
    cells = [c for c in nbformat.read(failed, as_version=4).cells if c.cell_type == "code"]
    cells = [c for c in cells if not added & set(c.metadata.get("tags", []))]
    raised = (i for i, c in enumerate(cells, 1) if any(o.output_type == "error" for o in c.outputs))
    started = [i for i, c in enumerate(cells, 1) if c.execution_count is not None]  # the last one, where a kernel died
    bad = next(raised, None) or max(started, default=1)
    said = re.sub(r"\x1b\[[0-9;]*m", "", told).strip().splitlines()[0].rstrip(".")
    return f"notebooks/{notebook}.py at scale {scale}: code cell {bad} failed with {said} (executed copy: {failed})."


def refresh(notebook: str) -> Path:
    """Make notebooks/<notebook>.ipynb from its .py, keeping cell ids, then execute it at its defaults, the smoke scale.

    Two steps, since jupytext in one step writes the old outputs. Raises NotebookError when a cell raises; the .ipynb then has
    its new source and no outputs.
    """
    source, pair = (paths.notebooks() / f"{notebook}{suffix}" for suffix in (".py", ".ipynb"))
    subprocess.run(["jupytext", "--quiet", "--to", "ipynb", "--update", str(source)], check=True, env=_path_with_tools())
    made = nbformat.read(pair, as_version=4)
    with _temporary(), _Watch(f"{notebook} (smoke)", paths.outputs() / f"progress-{leftovers.owner()}.json"):
        try:
            client = ExecutePreprocessor(
                timeout=CELL_SECONDS, kernel_name="python3", extra_arguments=QUIET_KERNEL, shutdown_kernel=AT_ONCE
            )
            client.preprocess(made, {"metadata": {"path": str(paths.notebooks())}})
        except (CellExecutionError, DeadKernelError, CellTimeoutError) as error:
            raise NotebookError(f"notebooks/{notebook}.py: a cell failed with {str(error).strip().splitlines()[-1]}.") from None
    write_atomic(pair, nbformat.writes(scrub(made)) + "\n")
    return pair


def _path_with_tools() -> dict[str, str]:
    """The environment in which this Python's own command-line tools are found first."""
    return os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}


def relinked(notebook: nbformat.NotebookNode, scale: str, name: str) -> nbformat.NotebookNode:
    """Turn the text cells' relative links, written to hold in notebooks/, into those that hold in outputs/<scale>/<name>/.

    A notebook of the replication is linked as it stands in notebooks/, whatever was executed. Addresses, absolute paths and
    anchors of the same page stay.
    """
    return _relinked(notebook, "notebooks", f"outputs/{scale}/{name}")


def as_written(notebook: nbformat.NotebookNode, scale: str, name: str) -> nbformat.NotebookNode:
    """The inverse of `relinked`: an executed copy's links as they stand in notebooks/. Those that were never turned stay."""
    return _relinked(notebook, f"outputs/{scale}/{name}", "notebooks", NEVER_TURNED)


def _relinked(notebook: nbformat.NotebookNode, old: str, new: str, but: re.Pattern | None = None) -> nbformat.NotebookNode:
    def moved(match: re.Match) -> str:
        target, anchor = match["target"], match["anchor"] or ""
        if but and but.fullmatch(target):
            return match[0]
        return f"]({posixpath.relpath(posixpath.join(old, target), new)}{anchor})"

    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = LINK.sub(moved, cell.source)
    return notebook


def scrub(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Take out what changes at every run (papermill's record, times, stderr); outputs and execution counts stay."""
    notebook.metadata.pop("papermill", None)
    notebook.metadata.get("language_info", {}).pop("version", None)
    for cell in notebook.cells:
        for key in ("papermill", "execution"):
            cell.metadata.pop(key, None)
        if cell.cell_type == "code":
            cell.outputs = [o for o in cell.outputs if o.get("name") != "stderr"]
    return notebook


class _Watch(threading.Thread):
    """Shows the progress file that the notebook's engine writes: a bar on a terminal, a line now and then elsewhere."""

    def __init__(self, title: str, file: Path, line: int = 0):
        super().__init__(daemon=True)
        self.title, self.file, self.line, self.over = title, file, line, threading.Event()
        self.terminal = sys.stderr.isatty()

    def __enter__(self):
        self.before = os.environ.get("LOOPED_PROGRESS")
        os.environ["LOOPED_PROGRESS"] = str(self.file)  # inherited by the kernel
        self.started = time.monotonic()
        self.start()

    def __exit__(self, *_):
        self.over.set()
        self.join()
        self.file.unlink(missing_ok=True)
        del os.environ["LOOPED_PROGRESS"]
        if self.before is not None:
            os.environ["LOOPED_PROGRESS"] = self.before
        print(f"{self.title}: {time.monotonic() - self.started:.0f} s", file=sys.stderr)

    def run(self):
        bar = tqdm(
            desc=self.title,
            total=1,
            position=self.line,
            leave=not self.line,
            bar_format="{desc} {percentage:3.0f}%|{bar}| {postfix}",
            disable=not self.terminal,
        )
        said = 0.0
        while not self.over.wait(0.5):
            try:
                state = json.loads(self.file.read_text())
            except (OSError, ValueError):
                continue
            line = f"{state['finished']}/{state['runs']} runs, {_clock(state['seconds'])} so far, {_clock(state['eta'])} left"
            bar.total, bar.n = max(state["total"], 1), state["done"]
            bar.set_postfix_str(line)
            if not self.terminal and time.monotonic() - said > QUIET_EVERY:
                said = time.monotonic()
                print(
                    f"{self.title} {state['done'] / max(state['total'], 1):4.0%}  {line}",
                    file=sys.stderr,
                    flush=True,
                )
        bar.close()


def _clock(seconds: float | None) -> str:
    return "?" if seconds is None else f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
