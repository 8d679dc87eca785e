"""Notebook kernels that are forks of a process which holds what notebooks import: that takes most of a fresh kernel's start.

Running a notebook takes threads, and a process with threads is not forked safely. So a fork is made first, waits, and becomes
the kernel once it is told the command (`Waiting`); nbclient starts its kernel through `manager`.
"""

import gc
import importlib
import multiprocessing
import os
import signal
import sys
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from jupyter_client import AsyncKernelManager
from jupyter_client.provisioning import LocalProvisioner

from lib import engine, stopping

# nothing of lib: a notebook may find another checkout's
PRELOADED = (*engine.PRELOADED, "altair", "vl_convert", "ipykernel.kernelapp", "pydantic", "yaml", "sklearn.linear_model")
MODULE = "ipykernel_launcher"  # what a kernel's command runs


def preload() -> None:
    """Import what notebooks import, for the forks to come, where kernels are forked."""
    for name in PRELOADED if engine.forkable() else ():
        importlib.import_module(name)


class Waiting:
    """A fork of this process that becomes a kernel once it is told how, and goes when the block ends.

    others: pipes of this process of which the fork keeps no end.
    """

    def __init__(self, *others: Connection):
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_become_kernel, args=(theirs, (self.pipe, *others)))
        self.process.start()
        theirs.close()

    def __enter__(self) -> "Waiting":
        return self

    def __exit__(self, *_) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.join()

    def start(self, command: list[str], folder: str, variables: dict[str, str]) -> None:
        """Become the kernel that this command would start in that folder and environment."""
        self.pipe.send((command[command.index(MODULE) + 1 :], folder, variables))


def waiting(*others: Connection) -> AbstractContextManager[Waiting | None]:
    """A process that waits to become a kernel, or none where kernels are not forked; others as for `Waiting`."""
    return Waiting(*others) if engine.forkable() else nullcontext()


class _Subprocess:
    """A process of multiprocessing as what jupyter_client asks of a subprocess.Popen."""

    stdin = stdout = stderr = None

    def __init__(self, process: BaseProcess):
        self.pid, self.terminate, self.kill = process.pid, process.terminate, process.kill
        self.process = process

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self) -> int | None:
        self.process.join()
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


class _Provisioner(LocalProvisioner):
    """Takes a waiting process where its base class starts a new one."""

    waiting: Waiting

    async def launch_kernel(self, cmd: list[str], **kwargs) -> dict:
        self.cwd = str(kwargs.get("cwd") or os.getcwd())
        parent = os.getpid()  # with which the kernel goes; ipykernel has read the variable when it was imported
        self.waiting.start(
            [*cmd, f"--IPKernelApp.parent_handle={parent}"], self.cwd, kwargs["env"] | {"JPY_PARENT_PID": str(parent)}
        )
        self.process = _Subprocess(self.waiting.process)
        self.pid = self.pgid = self.process.pid
        return self.connection_info


def manager(kernel: Waiting) -> type[AsyncKernelManager]:
    """The class of a kernel manager whose kernel is this waiting process."""

    class Manager(AsyncKernelManager):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.provisioner = _Provisioner(kernel_spec=self.kernel_spec, parent=self)
            self.provisioner.waiting = kernel

    return Manager


def _become_kernel(pipe: Connection, others: tuple[Connection, ...]) -> None:
    # here, where they are imported already
    import numpy as np
    import torch
    from ipykernel import kernelapp

    os.setsid()  # as jupyter_client does: what interrupts a terminal is for its parent alone
    for number in stopping.SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    for other in others:
        other.close()
    try:
        arguments, folder, variables = pipe.recv()
    except EOFError:
        return
    pipe.close()
    if sys.path[0] in ("", os.getcwd()):  # for a kernel that is its notebook's folder
        del sys.path[0]
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    for name in [name for name in sys.modules if name.partition(".")[0] == "lib"]:
        del sys.modules[name]
    torch.seed()  # from entropy, as in a fresh process: else all forks draw the same
    np.random.seed()
    sys.argv = [MODULE, *arguments]
    gc.freeze()  # what is imported stays: no collection need look through it
    kernelapp.launch_new_instance()
