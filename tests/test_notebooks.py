"""The notebooks: paired, executed, compared by nbval, and stopped cleanly when a cell raises."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jupytext
import nbformat
import nbval.plugin
import pytest

from lib import cli, doctor, paths, runner
from tests.conftest import environment

NOTEBOOKS = sorted(paths.notebooks().glob("*.ipynb"))


def code_cells(path):
    return [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]


def test_every_notebook_runs_in_the_replication_and_has_its_pair():
    assert [p.stem for p in NOTEBOOKS] == sorted((*runner.NOTEBOOKS, *runner.ALONE))
    assert doctor.out_of_sync() == []


def test_a_pair_out_of_sync_is_named(tmp_path):
    for suffix in (".py", ".ipynb"):
        shutil.copy(NOTEBOOKS[0].with_suffix(suffix), tmp_path)
    assert doctor.out_of_sync(tmp_path) == []
    source = tmp_path / NOTEBOOKS[0].with_suffix(".py").name
    source.write_text(source.read_text(encoding="utf-8").replace("instance: int = 0", "instance: int = 1"), encoding="utf-8")
    assert NOTEBOOKS[0].stem in doctor.out_of_sync(tmp_path)[0]
    source.unlink()
    assert "missing" in doctor.out_of_sync(tmp_path)[0]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_is_fully_executed_and_plain(path):
    notebook = nbformat.read(path, as_version=4)
    cells = code_cells(path)
    assert [c.execution_count for c in cells] == list(range(1, len(cells) + 1)), "run top to bottom, every code cell"
    assert not [o for c in cells for o in c.outputs if o.output_type == "error"]
    assert (notebook.metadata.kernelspec.name, notebook.metadata.kernelspec.display_name) == ("python3", "Python 3")
    assert "papermill" not in notebook.metadata
    assert sum("parameters" in c.metadata.get("tags", []) for c in cells) == 1
    first = notebook.cells[0].source
    assert "smoke" in first
    assert path.stem in runner.ALONE or f"../outputs/laptop/{path.stem}/notebook.ipynb" in first
    compared = [c for c in cells if c.outputs and "nbval-ignore-output" not in c.metadata.get("tags", [])]
    text = [o for c in compared for o in c.outputs if "text" in o or "text/plain" in o.get("data", {})]
    assert text, "nbval would compare nothing"


def test_every_sanitizer_rule_is_one_that_nbval_reads():
    text = (paths.notebooks() / "sanitize.cfg").read_text(encoding="utf-8")
    assert len(nbval.plugin.get_sanitize_patterns(text)) == text.count("\nregex:") > 0


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project of one notebook, whose second code cell runs `statement`."""
    for name in ("notebooks", "params/tiny"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.setenv("LOOPED_OUTPUTS", str(tmp_path / "outputs"))
    monkeypatch.setattr(paths, "notebooks", lambda: tmp_path / "notebooks")
    monkeypatch.setattr(paths, "params", lambda: tmp_path / "params")
    monkeypatch.setattr(runner, "NOTEBOOKS", ("tiny",))
    (tmp_path / "params/tiny/smoke.yaml").write_text('scale: "smoke"\n')

    def write(statement):
        kernel = "#     display_name: Python 3\n#     language: python\n#     name: python3\n"
        source = (
            f"# ---\n# jupyter:\n#   kernelspec:\n{kernel}# ---\n"
            '# %% tags=["parameters"]\nscale: str = "smoke"\n# %%\nfrom lib import results\n'
            f'out = results.begin("tiny", scale)\n{statement}\n# %%\nout.finish({{}}, [], {{}})\n'
        )
        (tmp_path / "notebooks/tiny.py").write_text(source)
        nbformat.write(jupytext.reads(source, "py:percent"), tmp_path / "notebooks/tiny.ipynb")
        return tmp_path / "outputs"

    return write


def test_a_cell_that_raises_names_itself_and_touches_nothing(project, capsys):
    outputs = project("(out.staging / 'kept.csv').write_text('first')")
    assert cli.main(["run", "--scale", "smoke"]) == 0
    before = {p: p.read_bytes() for p in outputs.rglob("*") if p.is_file()}
    assert (outputs / "smoke/tiny/kept.csv") in before and (outputs / "smoke/tiny/notebook.ipynb") in before
    capsys.readouterr()
    project("(out.staging / 'kept.csv').write_text('second'); raise ZeroDivisionError('by hand')")
    assert cli.main(["run", "--scale", "smoke"]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert "notebooks/tiny.py" in said and "code cell 2" in said and "by hand" in said and "failed/smoke-tiny.ipynb" in said
    assert {p: p.read_bytes() for p in before} == before, "earlier outputs stand"
    assert (outputs / "failed/smoke-tiny.ipynb").exists()


def test_a_kernel_that_dies_is_told_like_a_cell_that_raises(project, capsys):
    outputs = project("import os; os._exit(1)")
    assert cli.main(["run", "--scale", "smoke"]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert "notebooks/tiny.py" in said and "code cell 2" in said and "DeadKernelError" in said
    assert (outputs / "failed/smoke-tiny.ipynb").exists() and not list((outputs / "failed").glob(".*"))


def test_fresh_sets_the_store_aside_and_loses_nothing(project, capsys):
    outputs = project("print('hello')")
    (outputs / "runs" / "kept").mkdir(parents=True)
    assert cli.main(["run", "--scale", "smoke", "--fresh"]) == 0
    assert [p.name for p in outputs.glob("runs-*/*")] == ["kept"] and not (outputs / "runs").exists()


def test_what_runs_is_checked_and_made_from_the_py(project, tmp_path):
    outputs = project("print('as the .py says')")
    (tmp_path / "notebooks/tiny.ipynb").unlink()
    stale = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("other: int = 1", metadata={"tags": ["parameters"]})])
    nbformat.write(stale, tmp_path / "notebooks/tiny.ipynb")
    assert cli.main(["run", "--scale", "smoke"]) == 0
    assert "as the .py says" in (outputs / "smoke/tiny/notebook.ipynb").read_text(encoding="utf-8")


def test_an_executed_copy_s_links_hold_where_it_lies():
    source = paths.notebooks() / "4_1_asymmetry.py"
    for scale, name in (("laptop", "4_1_asymmetry"), ("smoke", "4_1_asymmetry"), ("audit", "my-model")):
        notebook = runner.relinked(jupytext.read(source), scale, name)
        found = [m for c in notebook.cells if c.cell_type == "markdown" for m in runner.LINK.finditer(c.source)]
        assert len(found) >= 3
        folder = paths.ROOT / "outputs" / scale / name
        for match in found:
            assert Path(os.path.normpath(folder / match["target"])).exists(), match[0]
    assert "](accuracy.png)" in runner.relinked(jupytext.read(source), "laptop", "4_1_asymmetry").cells[0].source


@pytest.mark.parametrize(
    "link, moved",
    [
        ("[a](b.ipynb)", "[a](../../../notebooks/b.ipynb)"),
        ("[a](b.ipynb#Glossary)", "[a](../../../notebooks/b.ipynb#Glossary)"),
        ("![a](../outputs/smoke/tiny/a.png)", "![a](a.png)"),
        ("[a](../outputs/laptop/tiny/notebook.ipynb)", "[a](../../laptop/tiny/notebook.ipynb)"),
        *((link, link) for link in ("[a](https://b.c/d)", "[a](#there)", "[a](/b)", "[a](mailto:b@c)", "a (b) [c]")),
    ],
)
def test_a_link_is_moved_only_where_it_is_relative(link, moved):
    cells = [nbformat.v4.new_markdown_cell(link), nbformat.v4.new_code_cell(link)]
    notebook = runner.relinked(nbformat.v4.new_notebook(cells=cells), "smoke", "tiny")
    assert [c.source for c in notebook.cells] == [moved, link]


@pytest.mark.parametrize("scale", ["laptop", "smoke"])
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_an_executed_copy_s_links_can_be_turned_back(path, scale):
    def cells(*steps):
        notebook = jupytext.read(path.with_suffix(".py"))
        for step in steps:
            notebook = step(notebook, scale, path.stem)
        return [cell.source for cell in notebook.cells]

    assert cells(runner.relinked) != cells()
    assert cells(runner.relinked, runner.as_written) == cells() == cells(runner.as_written)


WILD = {"circuit_lr_no_norm": 1.0e30}  # a rate at which every seed diverges
SHORT = {"seeds": 2, "n_test": 16, "circuit_steps": 40, "hops_steps": 40}
DIVERGING = {  # the others read models as 4.3 does
    "4_3_scratch_training": WILD | {"seeds": 1},
    "4_4_refit": WILD | {"refit_steps_head": [3, 30], "refit_steps_layer": [3], "refit_batches": 2},
    "beyond_damping": WILD | {"tasks": ["circuit"]},
    "dense_axes": {"arms": ["full", "sandwich"], "lr": [1.0e30, 4.0e-3], "steps": 30},
    "moe_transfer": {"lr_moe": [4.0e-3, 1.0e30, 4.0e-3], "steps": 30},
}


RUN_EACH = """
import json, sys
from contextlib import ExitStack
from lib import kernels, runner
kernels.preload()
asked = json.loads(sys.argv[1])
with ExitStack() as stack:
    waiting = [stack.enter_context(kernels.waiting()) for _ in asked]  # before any thread
    for name, kernel in zip(asked, waiting, strict=True):
        try:
            runner.execute(name, asked[name], "smoke", name, kernel=kernel)
        except runner.NotebookError as error:
            print(name, error, file=sys.stderr)
"""


@pytest.fixture(scope="module")
def diverged(tmp_path_factory):
    """(outputs folder, what went wrong) of the notebooks that train, when every seed of an arm diverges."""
    outputs = tmp_path_factory.mktemp("diverged")
    asked = json.dumps({name: SHORT | values for name, values in DIVERGING.items()})
    command = [sys.executable, "-c", RUN_EACH, asked]
    done = subprocess.run(command, cwd=paths.ROOT, env=environment(outputs), capture_output=True, text=True, check=False)
    return outputs, done.stderr


@pytest.mark.parametrize("notebook", DIVERGING)
def test_a_notebook_runs_through_when_every_seed_of_an_arm_diverges(diverged, notebook):
    outputs, wrong = diverged
    written = outputs / f"smoke/{notebook}/result.json"
    assert written.exists(), wrong[-3000:]
    result = json.loads(written.read_text(encoding="utf-8"))
    assert result["figures"]["diverged"] == result["params"]["seeds"], "one arm, all of its seeds"
    assert "diverged" in json.dumps(result["verdicts"])


def test_a_finished_run_leaves_no_trace_of_when_it_ran(project):
    outputs = project("print('hello')")
    assert cli.main(["run", "--scale", "smoke"]) == 0
    text = (outputs / "smoke/tiny/notebook.ipynb").read_text(encoding="utf-8")
    cells = [c for c in json.loads(text)["cells"] if c["cell_type"] == "code"]
    assert all(c["execution_count"] for c in cells) and "hello" in text
    assert "iopub" not in text and "papermill" not in json.loads(text)["metadata"]
    assert not list(outputs.glob("progress*")) and not list((outputs / "smoke").glob(".staging*"))
