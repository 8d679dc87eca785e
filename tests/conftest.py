"""One smoke replication serves every test that looks at results: it is made once a session, in a folder of its own."""

import os
import subprocess
import sys

import pytest

from lib import paths


@pytest.fixture(scope="session")
def smoke(tmp_path_factory):
    """(outputs folder, finished process) of `python -m lib run --scale smoke` from nothing."""
    outputs = tmp_path_factory.mktemp("outputs")
    command = [sys.executable, "-m", "lib", "run", "--scale", "smoke"]
    done = subprocess.run(command, cwd=paths.ROOT, env=environment(outputs), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return outputs, done


def environment(outputs) -> dict[str, str]:
    """This process's environment with results going to `outputs`."""
    return os.environ | {"LOOPED_OUTPUTS": str(outputs)}
