"""Runs many jobs: by single-threaded worker processes on this machine, fed one job after the other, or on a cluster.

A job is function(spec, report), and its result does not depend on how many workers there are. What a job
makes belongs in the run store, so that nothing finished is lost when another job fails. The environment
chooses the engine (see `chosen`): `map_local` here, or `map_ray` of engine_ray, which keeps the same contract.
"""

import fcntl
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection

from lib.progress import SHOW_EVERY, Progress

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
ATTEMPTS = 2  # a job whose process died is tried once more: the machine may have been short of memory
REPORT_EVERY = 0.1  # seconds
ENGINES = ("local", "ray")
# what every worker imports: on Linux one process has done so once, and workers are its forks. Nothing of lib, which may
# be another checkout's where this process looks for it
PRELOADED = ["torch", "transformers.modeling_utils", "transformers.generation", "safetensors.torch", "scipy.stats", "pandas"]
TEMPORARY = "LOOPED_TEMPORARY"  # environment: a folder for what this process would leave behind if it were killed
SLOTS = "LOOPED_SLOTS"  # environment: a folder with a lock for each core, for notebooks that run side by side


class EngineError(RuntimeError):
    """Some jobs failed. The message is one sentence; failures maps a job's index to its whole story."""

    def __init__(self, message: str, failures: dict[int, str]):
        super().__init__(message)
        self.failures = failures


def cores() -> int:
    """The number of processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def forkable() -> bool:
    """Whether a fork of a process that holds torch can be trusted: on Linux, where none can have opened CUDA."""
    return sys.platform == "linux" and not os.path.exists("/proc/driver/nvidia")


def chosen() -> tuple[str, str]:
    """The engine and, for ray, its cluster's address: LOOPED_ENGINE (local by default) and LOOPED_RAY_ADDRESS ("auto" by
    default: what RAY_ADDRESS names, else a cluster on this machine). Raises EngineError for any other engine."""
    name = os.environ.get("LOOPED_ENGINE") or ENGINES[0]
    if name not in ENGINES:
        raise EngineError(f"the engine is {name!r}: it must be one of {', '.join(ENGINES)}.", {})
    return name, os.environ.get("LOOPED_RAY_ADDRESS") or "auto"


def require() -> None:
    """Raises EngineError where the chosen engine cannot run anything: ray is not installed, or no cluster answers."""
    name, address = chosen()
    if name == "ray":
        from lib import engine_ray

        # by a process of its own: ray leaves threads behind, and this one may yet be forked
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            if told := pool.submit(engine_ray.unreachable, address).result():
                raise EngineError(told, {})


def map_jobs(
    function: Callable,
    specs: Sequence,
    workers: int | None = None,
    title: str = "",
    on_result: Callable[[int, object], None] | None = None,
    gpus: float = 0.0,
) -> list:
    """`map_local`, or `map_ray` where that engine is chosen.

    gpus: what each job takes of a GPU on a cluster; that alone then limits how many run at once, and workers does not.
    """
    name, address = chosen()
    if name == "local":
        return map_local(function, specs, workers, title, on_result)
    from lib import engine_ray

    return engine_ray.map_ray(function, specs, None if gpus else workers, title, on_result, address, gpus)


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
    require_importable(function)
    progress = Progress(len(specs), title)
    queue, attempts = deque(range(len(specs))), [0] * len(specs)
    results, failures = {}, {}
    crew = [None] * min(workers or cores(), len(specs))
    try:
        while queue or any(crew):
            for slot, worker in enumerate(crew):
                if queue and (worker is None or worker.job is None):
                    worker = worker or _Worker.start()
                    if worker is None:  # others have all cores
                        break
                    crew[slot] = worker
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
    return in_order(results, failures, len(specs))


def map_missing(
    function: Callable,
    specs: Sequence,
    find: Callable,
    workers: int | None = None,
    title: str = "",
    gpus: float | None = None,
) -> list:
    """`map_jobs`, but a spec whose result find(spec) already has is only looked up: when all are, no process starts.

    gpus: by default what lets `workers` jobs (else one) share a GPU where a spec's run is on cuda, and else nothing.
    """
    made = [find(spec) for spec in specs]
    missing = [i for i, found in enumerate(made) if found is None]
    rest = [specs[i] for i in missing]
    if gpus is None:
        on_gpu = any(getattr(getattr(spec, "run", None), "device", "cpu").startswith("cuda") for spec in rest)
        gpus = 1 / (workers or 1) if on_gpu else 0.0
    for i, result in zip(missing, map_jobs(function, rest, workers, title, gpus=gpus), strict=True):
        made[i] = result
    return made


def require_importable(function: Callable) -> None:
    """Raises EngineError for a function that a worker could not find by its name."""
    if getattr(function, "__module__", None) == "__main__":
        raise EngineError(f"{function.__name__} must live in a module that a worker can import.", {})


def in_order(results: dict[int, object], failures: dict[int, tuple[str, str]], jobs: int) -> list:
    """The results of all jobs. Raises EngineError where some failed; a failure is (one line, its whole story)."""
    if failures:
        told = "; ".join(f"job {i}: {failures[i][0]}" for i in sorted(failures))
        raise EngineError(f"{len(failures)} of {jobs} jobs failed ({told}).", {i: f[1] for i, f in failures.items()})
    return [results[i] for i in range(jobs)]


def attempt(job: bytes, report: Callable) -> bytes:
    """Does one pickled (function, spec) in a worker; its pickled answer is ("done", result) or ("failed", line, story)."""
    import torch  # only here: the parent need not pay for it

    try:
        function, spec = pickle.loads(job)
        torch.manual_seed(0)  # a job's result must not depend on the jobs before it
        return pickle.dumps(("done", function(spec, report)))
    except BaseException as error:
        text = (str(error).strip() or "no message").splitlines()[0]
        return pickle.dumps(("failed", f"{type(error).__name__}: {text}", traceback.format_exc()))


class Reporter:
    """What a job reports its steps to: passes them on at most every `every` seconds, but for the last."""

    def __init__(self, send: Callable[[float, float, str], None], every: float = REPORT_EVERY):
        self.send, self.every, self.last = send, every, -every

    def __call__(self, done: float, total: float, note: str = "") -> None:
        now = time.monotonic()
        if done >= total or now - self.last >= self.every:
            self.last = now
            self.send(done, total, note)


@contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """These environment variables, until the end of the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@dataclass
class _Worker:
    process: multiprocessing.Process
    pipe: connection.Connection
    slot: int | None
    job: int | None = None
    dead: bool = False

    @classmethod
    def start(cls) -> "_Worker | None":
        """A new worker process, or None where other notebooks have taken all slots."""
        if (slot := _take_slot()) is False:
            return None
        context = _context()
        ours, theirs = context.Pipe()
        with environment(ONE_THREAD), _temporary():  # inherited, so that it stands before anything is imported there
            process = context.Process(target=_serve, args=(theirs, dict(os.environ)), daemon=True)
            process.start()
        theirs.close()
        return cls(process, ours, slot)

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
        if self.slot is not None:
            os.close(self.slot)
            self.slot = None


def _context() -> multiprocessing.context.BaseContext:
    """How workers start: as forks of a process that holds `PRELOADED`, or afresh where that may not be safe."""
    if not forkable():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


@contextmanager
def _temporary() -> Iterator[None]:
    """Within it new temporary files go where whoever started this process removes them; the server of forks has a socket."""
    before = tempfile.tempdir
    tempfile.tempdir = os.environ.get(TEMPORARY) or before
    try:
        yield
    finally:
        tempfile.tempdir = before


def _take_slot() -> int | bool | None:
    """A handle that holds one of the slots while it is open, False where none is free, None where there are none to share."""
    if not (folder := os.environ.get(SLOTS)):
        return None
    for i in range(cores()):
        handle = os.open(os.path.join(folder, str(i)), os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except BlockingIOError:
            os.close(handle)
    return False


def _end_of(process: multiprocessing.Process) -> str:
    process.join(timeout=1)
    code = process.exitcode
    return f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit status {code}"


def _serve(pipe: connection.Connection, variables: dict[str, str]) -> None:
    """The worker: does jobs until the pipe closes or the parent is gone. variables: the parent's environment as it is now."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers itself
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    os.environ.clear()
    os.environ.update(variables)
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            job = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        answer = attempt(job, Reporter(lambda *told: pipe.send_bytes(pickle.dumps(("progress", *told)))))
        try:
            pipe.send_bytes(answer)
        except OSError:
            return


def _leave_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)
