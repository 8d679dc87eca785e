"""Where things are, found from the repository root so that every working directory will do."""

import os
from pathlib import Path

SCALES = ("smoke", "laptop", "overnight", "paper", "released_cpu")  # params/<notebook>/<scale>.yaml, outputs/<scale>/
ROOT = Path(__file__).resolve().parents[1]


def outputs() -> Path:
    """The folder of all results: LOOPED_OUTPUTS where that is set, else outputs/ of the repository."""
    named = os.environ.get("LOOPED_OUTPUTS")
    return Path(named).expanduser().resolve() if named else ROOT / "outputs"


def runs() -> Path:
    """The folder of the run store."""
    return outputs() / "runs"


def params() -> Path:
    """The folder of the parameter files and the claims."""
    return ROOT / "params"


def notebooks() -> Path:
    """The folder of the notebooks."""
    return ROOT / "notebooks"
