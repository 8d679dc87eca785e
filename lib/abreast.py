"""Runs several notebooks side by side, each by a process of its own, so that none leaves a core idle while it draws figures.

They share the cores: whoever starts a worker takes one of as many slots as there are cores (`engine.slot`).
"""

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import connection
from pathlib import Path

from lib import engine, kernels, runner, stopping

MOST = 4  # at once: a kernel takes some 600 MB
LAST = ("99_verdicts",)  # reads what the others have found


def run(names: Sequence[str], scale: str, finished: Callable[[str, Path], None]) -> None:
    """`runner.run` of every notebook, started in order; finished(name, path) is called here as each ends.

    One after the other on one core, or where one is asked for. Raises NotebookError when one fails: the others are stopped.
    """
    first, last = ([name for name in names if (name in LAST) == late] for late in (False, True))
    if min(engine.cores(), len(first)) > 1:
        kernels.preload()
        with tempfile.TemporaryDirectory(prefix="looped-slots-") as slots, engine.environment({engine.SLOTS: slots}):
            for group in (first, last):
                _together(group, scale, finished, min(engine.cores(), MOST))
    else:
        for name in (*first, *last):
            finished(name, runner.run(name, scale))


def _together(names: Sequence[str], scale: str, finished: Callable, most: int) -> None:
    # a fork has imported everything already; elsewhere than on Linux it is not safe
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    waiting, running = list(names), {}
    try:
        while waiting or running:
            while waiting and len(running) < most:
                line = min(set(range(most)) - {line for _, _, line in running.values()})
                ours, theirs = context.Pipe(duplex=False)
                child = context.Process(target=_one, args=(waiting[0], scale, line, theirs))
                child.start()
                theirs.close()
                running[ours] = waiting.pop(0), child, line
            for pipe in connection.wait(list(running)):
                name, child, _ = running.pop(pipe)
                with suppress(EOFError):  # it was killed
                    path, error = pipe.recv()
                    child.join()
                    if error:
                        raise runner.NotebookError(error)
                    finished(name, path)
                    continue
                child.join()
                raise runner.NotebookError(f"notebooks/{name}.py at scale {scale}: its process was killed; {runner.GOES_ON}")
    finally:
        for _, child, _ in running.values():
            child.terminate()
        for _, child, _ in running.values():
            child.join()


def _one(name: str, scale: str, line: int, pipe: connection.Connection) -> None:
    """In a child: run one notebook and say how it ended. line: of the terminal, for its progress bar."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its children itself
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    waiting = kernels.waiting(pipe)  # before any thread
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    try:
        with stopping.stoppable(), waiting as kernel:
            pipe.send((runner.run(name, scale, line, kernel), None))
    except KeyboardInterrupt:
        os._exit(1)  # the parent knows
    except (ValueError, RuntimeError, OSError) as error:
        pipe.send((None, str(error)))


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)
