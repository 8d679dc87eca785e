"""Runs many jobs on this machine: single-threaded worker processes that are fed one job after the other.

A job is function(spec, report), and its result does not depend on how many workers there are. What a job
makes belongs in the run store, so that nothing finished is lost when another job fails. An engine for a
cluster would be a second function beside map_local, with the same arguments and the cluster's address.
"""

import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection

from lib.progress import SHOW_EVERY, Progress

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
ATTEMPTS = 2  # a job whose process died is tried once more: the machine may have been short of memory
REPORT_EVERY = 0.1  # seconds


class EngineError(RuntimeError):
    """Some jobs failed. The message is one sentence; failures maps a job's index to its whole story."""

    def __init__(self, message: str, failures: dict[int, str]):
        super().__init__(message)
        self.failures = failures


def cores() -> int:
    """The number of processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def map_local(
    function: Callable,
    specs: Sequence,
    workers: int | None = None,
    title: str = "",
    on_result: Callable[[int, object], None] | None = None,
) -> list:
    """The results of function(spec, report) for every spec, in order, by `workers` processes (else cores()).

    The function must be importable by name. It calls report(done, total, note="") with its count of steps:
    once before its first step, so that resumed work is left out of the estimate, then as often as it likes.
    on_result(index, result) is called here as each job ends. One overall progress bar goes to stderr, or to
    the file named by LOOPED_PROGRESS as JSON. Raises EngineError once all jobs have ended, if some failed.
    """
    specs = list(specs)
    if getattr(function, "__module__", None) == "__main__":
        raise EngineError(f"{function.__name__} must live in a module that a worker can import.", {})
    progress = Progress(len(specs), title)
    queue, attempts = deque(range(len(specs))), [0] * len(specs)
    results, failures = {}, {}
    crew = [None] * min(workers or cores(), len(specs))
    try:
        while queue or any(crew):
            for slot, worker in enumerate(crew):
                if queue and (worker is None or worker.job is None):
                    crew[slot] = worker = worker or _Worker.start()
                    worker.job = queue.popleft()
                    attempts[worker.job] += 1
                    with suppress(OSError):  # it died while idle: seen below
                        worker.pipe.send_bytes(pickle.dumps((function, specs[worker.job])))
                elif worker and worker.job is None:
                    worker.stop()
                    crew[slot] = None
            busy = [worker for worker in crew if worker]
            connection.wait([w.pipe for w in busy] + [w.process.sentinel for w in busy], timeout=SHOW_EVERY)
            for slot, worker in enumerate(crew):
                for kind, *content in worker.messages() if worker else ():
                    if kind == "progress":
                        progress.report(worker.job, *content)
                        continue
                    progress.end(worker.job)
                    if kind == "failed":
                        failures[worker.job] = content
                    else:
                        results[worker.job] = content[0]
                        if on_result:
                            on_result(worker.job, content[0])
                    worker.job = None
                if worker and worker.dead:
                    if worker.job is not None and attempts[worker.job] < ATTEMPTS:
                        queue.appendleft(worker.job)
                    elif worker.job is not None:
                        story = f"its process died {ATTEMPTS} times, last by {_end_of(worker.process)}"
                        failures[worker.job] = (story, story)
                        progress.end(worker.job)
                    worker.stop()
                    crew[slot] = None
            progress.show()
    finally:
        for worker in crew:
            if worker:
                worker.kill()
        progress.show(last=True)
    if failures:
        told = "; ".join(f"job {i}: {failures[i][0]}" for i in sorted(failures))
        raise EngineError(f"{len(failures)} of {len(specs)} jobs failed ({told}).", {i: f[1] for i, f in failures.items()})
    return [results[i] for i in range(len(specs))]


def map_missing(function: Callable, specs: Sequence, find: Callable, workers: int | None = None, title: str = "") -> list:
    """`map_local`, but a spec whose result find(spec) already has is only looked up: when all are, no process starts."""
    made = [find(spec) for spec in specs]
    missing = [i for i, found in enumerate(made) if found is None]
    for i, result in zip(missing, map_local(function, [specs[i] for i in missing], workers, title), strict=True):
        made[i] = result
    return made


@dataclass
class _Worker:
    process: multiprocessing.Process
    pipe: connection.Connection
    job: int | None = None
    dead: bool = False

    @classmethod
    def start(cls) -> "_Worker":
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, os.getpid()), daemon=True)
        with _environment(ONE_THREAD):  # inherited, so that it stands before anything is imported there
            process.start()
        theirs.close()
        return cls(process, ours)

    def messages(self) -> Iterator[tuple]:
        """What has arrived; dead is set once the process has ended and everything it said is read."""
        ended = not self.process.is_alive()
        try:
            while self.pipe.poll():
                yield pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            ended = True
        self.dead = ended

    def stop(self) -> None:
        self.pipe.close()
        self.process.join(timeout=1)
        self.kill()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _end_of(process: multiprocessing.Process) -> str:
    process.join(timeout=1)
    code = process.exitcode
    return f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit status {code}"


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _serve(pipe: connection.Connection, parent: int) -> None:
    """The worker: does jobs until the pipe closes or the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers itself
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
    import torch  # only here: the parent need not pay for it

    torch.set_num_threads(1)
    while True:
        try:
            job = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        try:
            function, spec = pickle.loads(job)
            torch.manual_seed(0)  # a job's result must not depend on the jobs before it
            answer = pickle.dumps(("done", function(spec, _Reporter(pipe))))
        except BaseException as error:
            text = (str(error).strip() or "no message").splitlines()[0]
            answer = pickle.dumps(("failed", f"{type(error).__name__}: {text}", traceback.format_exc()))
        try:
            pipe.send_bytes(answer)
        except OSError:
            return


def _leave_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


class _Reporter:
    def __init__(self, pipe: connection.Connection):
        self.pipe, self.last = pipe, -REPORT_EVERY

    def __call__(self, done: float, total: float, note: str = "") -> None:
        now = time.monotonic()
        if done >= total or now - self.last >= REPORT_EVERY:
            self.last = now
            self.pipe.send_bytes(pickle.dumps(("progress", done, total, note)))
