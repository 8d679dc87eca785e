"""What killed processes leave in the outputs folder: names that hold the machine and number of a process that is gone.

A folder can be shared between machines, and only its own machine can tell whether a process is gone: what another machine
left goes after a month. The run store is no part of it: what is unfinished there is resumed.
"""

import os
import re
import shutil
import socket
import time
from contextlib import suppress
from pathlib import Path

from lib import paths

KEPT = 30 * 24 * 3600  # seconds for which what another machine left is kept
OWNER = r"(?P<machine>\w+)\.(?P<process>\d+)"
NAMES = [
    re.compile(pattern.replace("OWNER", OWNER))
    for pattern in (r"\.staging-.+-OWNER", r"progress-OWNER\.json", r"\..+\.OWNER-[0-9a-f]{8}\.tmp", r"\..+-OWNER\.ipynb")
]


def owner() -> str:
    """This process among all that may share a folder, for the name of a file that it alone writes."""
    return f"{_machine()}.{os.getpid()}"


def sweep() -> None:
    """Remove the staged results, progress files, half-written files and working copies of processes that are gone."""
    outputs = paths.outputs()
    folders = [outputs, *(path for path in outputs.glob("*/") if not path.name.startswith("runs"))]
    folders += [path for folder in folders[1:] for path in folder.glob("*/")]
    for folder in folders:
        with suppress(OSError):  # another process sweeps too
            for path in (*folder.glob(".*"), *folder.glob("progress-*")):
                named = next(filter(None, (pattern.fullmatch(path.name) for pattern in NAMES)), None)
                if named and _left(path, named["machine"], int(named["process"])):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _machine() -> str:
    return re.sub(r"\W", "_", socket.gethostname())


def _left(path: Path, machine: str, process: int) -> bool:
    if machine != _machine():
        return time.time() - path.stat().st_mtime > KEPT
    try:
        os.kill(process, 0)
    except OSError as error:
        return isinstance(error, ProcessLookupError)  # another user's is there
    return False
