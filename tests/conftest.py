"""What all tests share: the order of their files, and LOOPED_NO_SKIPS, under which none is skipped."""

import os
import time

# before numpy and torch come, hence not the engine's own: their threads would only wait for those of the other workers
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")

import pytest

LONGEST = ("test_smoke", "test_notebooks", "test_engine_ray", "test_faults", "test_pretrain", "test_audit")


def pytest_collection_modifyitems(items):
    """The files that take longest come first, so that no worker is left alone with one at the end."""
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))


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


def wait_for(happened, seconds=20.0):
    """Wait until happened() holds; fails after that many seconds."""
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)
