"""What all tests share: one smoke replication for those that look at results, and LOOPED_NO_SKIPS, under which none is skipped.

The replication is made once a session, in a folder of its own.
"""

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


SKIPPED = {}


def pytest_runtest_logreport(report):
    """Remember what was skipped, and why."""
    if report.skipped and not hasattr(report, "wasxfail"):
        SKIPPED[report.nodeid] = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)


pytest_collectreport = pytest_runtest_logreport  # a whole file


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session):
    """Where LOOPED_NO_SKIPS is set, a skipped test is a failure."""
    if SKIPPED and os.environ.get("LOOPED_NO_SKIPS"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter):
    """Say which tests made the session fail by being skipped."""
    if SKIPPED and os.environ.get("LOOPED_NO_SKIPS"):
        terminalreporter.section("skipped, and LOOPED_NO_SKIPS is set: this session fails", red=True)
        for name, why in SKIPPED.items():
            terminalreporter.line(f"{name}: {why}")


def environment(outputs) -> dict[str, str]:
    """This process's environment with results going to `outputs`."""
    return os.environ | {"LOOPED_OUTPUTS": str(outputs)}
