"""What killed processes leave in the outputs folder: names that hold the number of a process that is gone.

The run store is no part of it: what is unfinished there is resumed.
"""

import os
import re
import shutil
from contextlib import suppress

from lib import paths

NAMES = re.compile(r"\.staging-.+-(\d+)|progress-(\d+)\.json|\..+\.(\d+)-[0-9a-f]{8}\.tmp|\..+-(\d+)\.ipynb")


def sweep() -> None:
    """Remove the staged results, progress files, half-written files and working copies of processes that are gone."""
    outputs = paths.outputs()
    folders = [outputs, *(path for path in outputs.glob("*/") if not path.name.startswith("runs"))]
    folders += [path for folder in folders[1:] for path in folder.glob("*/")]
    for folder in folders:
        with suppress(OSError):  # another process sweeps too
            for path in (*folder.glob(".*"), *folder.glob("progress-*")):
                if (named := NAMES.fullmatch(path.name)) and _gone(int(named[named.lastindex])):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _gone(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError as error:
        return isinstance(error, ProcessLookupError)  # another user's is there
    return False
