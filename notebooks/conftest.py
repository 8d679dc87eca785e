"""What nbval leaves out of its comparison: pictures and markup that differ from machine to machine, and progress."""

SKIP = (
    "text/html",
    "stderr",
    "image/svg+xml",
    "application/vnd.vegalite.v6.json",
    "application/vnd.vegalite.v5+json",
)


def pytest_collectstart(collector):
    """Called by pytest for every file; only notebooks compare outputs."""
    if collector.fspath and collector.fspath.ext == ".ipynb":
        collector.skip_compare += SKIP
