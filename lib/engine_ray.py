"""Runs many jobs on a Ray cluster that is already there: the contract of `map_local`, on as many nodes as there are.

What a job makes goes through the run store, Ray carries specs and small results. So every node needs the same clone, the same
environment, and one shared folder for outputs (LOOPED_OUTPUTS) whose flock works between nodes; a worker that has other
versions or does not see the folder says so before it computes anything. On one machine's CPU results are bitwise `map_local`'s.
"""

import logging
import os
import pickle
import platform
import re
import secrets
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

from lib import BEHAVIOUR, paths
from lib.engine import ATTEMPTS, ONE_THREAD, EngineError, Reporter, attempt, environment, in_order, require_importable
from lib.progress import SHOW_EVERY, Progress

ANSWER = 5.0  # seconds in which a cluster's port must answer, and what jobs told is waited for when one has ended
LEFT = 30 * 24 * 3600.0  # seconds after which a driver's file is what a killed one left
WORD = 60.0  # seconds that a job's last word may take; the actor that takes it may just be starting
PATIENCE = 600.0  # seconds without a word after which a cluster that lacks what a job needs is given up
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS_SKIP_REGEX": "."}  # nothing is sent home, nothing printed


def map_ray(
    function: Callable,
    specs: Sequence,
    workers: int | None = None,
    title: str = "",
    on_result: Callable[[int, object], None] | None = None,
    address: str = "auto",
    gpus: float = 0.0,
) -> list:
    """`map_local` on the Ray cluster at `address`: a job takes one core and `gpus` of a GPU, and Ray says where it runs.

    workers: the most jobs at once; by default as many as the cluster takes. A job whose process or node is lost is tried once
    more. Raises EngineError too where ray is not installed, no cluster answers, or it lacks what a job needs.
    """
    specs = list(specs)
    require_importable(function)
    if not specs:
        return []
    jobs, queue, tries = [pickle.dumps((function, spec)) for spec in specs], deque(range(len(specs))), [0] * len(specs)
    flying, nodes, results, failures = {}, {}, {}, {}
    with _shared_file() as shared, connected(address) as ray:
        board = _Board.start(ray)
        work = ray.remote(_work).options(num_cpus=1, num_gpus=gpus, max_retries=0, runtime_env=_environment())
        progress, versions, heard = Progress(len(specs), title), _versions(), time.monotonic()
        try:
            while queue or flying:
                while queue and (not workers or len(flying) < workers):
                    i = queue.popleft()
                    tries[i] += 1
                    flying[work.remote(jobs[i], i, board.actor, versions, shared)] = i
                ended, _ = ray.wait(list(flying), timeout=SHOW_EVERY)
                for i, node, *report in (news := board.read(ANSWER if ended else SHOW_EVERY)):
                    nodes[i] = node
                    if report:
                        progress.report(i, *report)
                for ref in ended:
                    i = flying.pop(ref)
                    kind, *content = _answer(ray, ref)
                    if kind == "died" and tries[i] < ATTEMPTS:
                        queue.appendleft(i)
                        continue
                    progress.end(i)
                    if kind == "done":
                        results[i] = content[0]
                        if on_result:
                            on_result(i, content[0])
                    elif kind == "failed":
                        failures[i] = content
                    else:
                        story = f"its process died {ATTEMPTS} times, last by {content[0]} on {nodes.get(i, 'an unknown node')}"
                        failures[i] = (story, story)
                if news or ended:
                    heard = time.monotonic()
                elif time.monotonic() - heard > PATIENCE:
                    _require_resources(ray, {"CPU": 1, "GPU": gpus})
                    heard = time.monotonic()
                progress.show()
        finally:
            for ref in flying:
                ray.cancel(ref, force=True)
            progress.show(last=True)
    return in_order(results, failures, len(specs))


@contextmanager
def connected(address: str) -> Iterator[ModuleType]:
    """The ray module, connected to the cluster until the end of the block; a connection made before is used, and stays.

    Raises EngineError where ray is not installed, where no cluster answers, and where its versions are others.
    """
    with environment(QUIET):  # read when ray is imported, and when it connects
        try:
            import ray
        except ImportError as error:
            raise EngineError(f"ray cannot be imported ({error}): `make cluster` installs it beside the rest.", {}) from None
        if ours := not ray.is_initialized():
            handler = signal.getsignal(signal.SIGTERM)
            try:
                _join(ray, os.environ.get("RAY_ADDRESS") or address if address == "auto" else address)
            finally:
                with suppress(TypeError, ValueError):  # not Python's own, or not the main thread: as it is
                    signal.signal(signal.SIGTERM, handler)
    try:
        yield ray
    finally:
        if ours:
            ray.shutdown()  # the cluster stays


def unreachable(address: str) -> str | None:
    """Why jobs cannot run on the cluster at `address`, as a sentence, or None."""
    try:
        with connected(address):
            return None
    except EngineError as error:
        return str(error)


def _join(ray: ModuleType, address: str) -> None:
    advice = "start one with `ray start --head`, or name one with --address host:port"
    try:
        if address != "auto":
            if not (found := re.fullmatch(r"\[?([\w.:-]+?)\]?:(\d+)", address)):
                raise EngineError(f"the cluster's address is {address!r}: it must be auto, or host:port of its head node.", {})
            socket.create_connection(found.groups(), timeout=ANSWER).close()  # ray itself would wait for minutes
        ray.init(address=address, log_to_driver=False, logging_level=logging.CRITICAL)
    except OSError as error:
        where = "runs on this machine" if address == "auto" else f"answers at {address} ({error})"
        raise EngineError(f"no Ray cluster {where}: {advice}.", {}) from None
    except (ray.exceptions.RayError, RuntimeError, ValueError) as error:
        if isinstance(error, EngineError):
            raise
        raise EngineError(f"the Ray cluster at {address} cannot be used ({' '.join(str(error).split())}).", {}) from None


def _environment() -> dict:
    """What every worker's environment has, whatever its node was started with."""
    path = os.pathsep.join(filter(None, (str(paths.ROOT), os.environ.get("PYTHONPATH"))))
    return {"env_vars": ONE_THREAD | {"PYTHONPATH": path, "LOOPED_OUTPUTS": str(paths.outputs())}}


@contextmanager
def _shared_file() -> Iterator[str]:
    """A file that every node must see, in the run store's folder for as long as jobs run."""
    file = paths.runs() / f".shared-{secrets.token_hex(8)}"
    file.parent.mkdir(parents=True, exist_ok=True)
    for other in file.parent.glob(".shared-*"):
        with suppress(FileNotFoundError):
            if time.time() - other.stat().st_mtime > LEFT:
                other.unlink()
    try:
        file.touch()
        yield str(file)
    finally:
        file.unlink(missing_ok=True)


def _versions() -> dict[str, object]:
    return {"behaviour version": BEHAVIOUR, "torch": version("torch")}


def _answer(ray: ModuleType, ref) -> tuple:
    """How an attempt ended: ("done", result), ("failed", line, story) or ("died", by what)."""
    kinds = ray.exceptions
    try:
        return pickle.loads(ray.get(ref))
    except kinds.OutOfMemoryError:
        return "died", "a lack of memory"
    except (kinds.WorkerCrashedError, kinds.NodeDiedError, kinds.LocalRayletDiedError, kinds.ObjectLostError):
        return "died", "a signal, an exit or the loss of its node"
    except kinds.RayError as error:  # before the job began: that node has no module lib, say
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
        return "failed", f"{type(error).__name__}: {lines[-1]}", str(error)


def _require_resources(ray: ModuleType, needed: dict[str, float]) -> None:
    has = ray.cluster_resources()
    if short := [name for name, amount in needed.items() if has.get(name, 0) < amount]:
        raise EngineError(f"the cluster has had no {short[0]} for a job in {PATIENCE:.0f} seconds.", {})


class _Mailbox:
    """What jobs tell: (job, node), then (job, node, done, total, note) as often as they like."""

    def __init__(self):
        self.news = []

    def tell(self, *news) -> None:
        self.news.append(news)

    def read(self) -> list[tuple]:
        news, self.news = self.news, []
        return news


class _Board:
    """The driver's side of the actor that jobs tell their progress to. It may be lost or late: a run is worth more."""

    def __init__(self, ray: ModuleType, actor):
        self.ray, self.actor, self.asked = ray, actor, []

    @classmethod
    def start(cls, ray: ModuleType) -> "_Board":
        return cls(ray, ray.remote(_Mailbox).options(num_cpus=0, max_restarts=-1, runtime_env=_environment()).remote())

    def read(self, timeout: float) -> list[tuple]:
        self.asked.append(self.actor.read.remote())
        answered, self.asked = self.ray.wait(self.asked, num_returns=len(self.asked), timeout=timeout)
        news = []
        for ref in answered:
            with suppress(self.ray.exceptions.RayError):
                news += self.ray.get(ref)
        return news


def _work(job: bytes, index: int, mailbox, versions: dict, shared: str) -> bytes:
    """One attempt at a job, in a Ray worker."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a death like any other, and no failure of the job
    import ray
    import torch

    torch.set_num_threads(1)
    own, node = _versions(), platform.node()
    wrong = [f"has {what} {own[what]} and not {versions[what]}" for what in own if own[what] != versions[what]]
    if not Path(shared).exists():
        wrong.append(f"does not see {Path(shared).parent}")
    if wrong:
        needed = "every node needs the same clone, the same environment and one shared folder for outputs"
        line = f"{node} {' and '.join(wrong)}: {needed}"
        return pickle.dumps(("failed", line, line))
    last = [mailbox.tell.remote(index, node)]

    def send(*report) -> None:
        last[0] = mailbox.tell.remote(index, node, *report)

    answer = attempt(job, Reporter(send, SHOW_EVERY))
    ray.wait(last, timeout=WORD)  # a job's last word comes before its result
    return answer
