"""The scaffolding: what is pinned, what is declared, what make does, and what no file may say."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib

import pytest
import yaml
from packaging.requirements import Requirement

from lib.paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RUNTIME = PROJECT["dependencies"]
EXTRAS = [line for extra in PROJECT.get("optional-dependencies", {}).values() for line in extra]
TEST = PROJECT["optional-dependencies"]["test"]
TARGETS = (
    "help",
    "replicate",
    "lab",
    "report",
    "verify",
    "audit",
    "test",
    "bench",
    "cluster",
    "benchmark-tools",
    "browser-tools",
    "extras",
    "lock",
    "clean-env",
)
IMPORT_NAMES = {"websocket": "websocket-client", "yaml": "pyyaml", "sklearn": "scikit-learn", "vl_convert": "vl-convert-python"}
# called by name or through another package: transformers' Trainer runs on accelerate
TOOLS = {"accelerate", "jupyterlab", "ipykernel", "jupytext", "papermill", "nbconvert"}


def name_of(requirement):
    return re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-").replace(".", "-")


def lock_lines(name="requirements.lock"):
    lines = (ROOT / name).read_text().splitlines()
    return [line for line in lines if not line.startswith("#")]


def python_files(*folders):
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def test_every_line_of_the_lock_is_a_plain_pin():
    for line in lock_lines():
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line), line
    names = [name_of(line) for line in lock_lines()]
    assert len(names) == len(set(names))
    assert not {"pip", PROJECT["name"]} & set(names)


def test_every_declared_package_is_in_the_lock_within_its_bounds():
    pins = {name_of(line): line.split("==")[1] for line in lock_lines()}
    assert pins["torch"] == "2.13.0"
    for line in RUNTIME + TEST:
        assert Requirement(line).specifier.contains(pins[name_of(line)]), line


@pytest.mark.parametrize("extra", ["cluster", "benchmark", "browser"])
def test_an_extras_lock_adds_what_it_names_and_touches_nothing(extra):
    lines = lock_lines(f"requirements-{extra}.lock")
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line) for line in lines)
    pins = {name_of(line): line.split("==")[1] for line in lines}
    assert len(pins) == len(lines) and not set(pins) & {name_of(line) for line in lock_lines()}
    for wanted in PROJECT["optional-dependencies"][extra]:
        assert Requirement(wanted).specifier.contains(pins[name_of(wanted)])


def test_environment_yml_leaves_the_pins_to_the_lock():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert environment["name"] == "looped"
    assert environment["channels"] == ["conda-forge"]
    assert environment["dependencies"] == ["python=3.11", "pip", {"pip": ["-r requirements.lock", "-e ."]}]
    assert PROJECT["requires-python"] == ">=3.11,<3.12"
    assert sys.version_info[:2] == (3, 11)


def imported_packages(*folders):
    found = {}
    for path in python_files(*folders):
        for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            else:
                continue
            for name in names:
                top = name.split(".")[0]
                if top not in sys.stdlib_module_names | {"lib", "tests"}:
                    found.setdefault(IMPORT_NAMES.get(top, top.replace("_", "-")), path.relative_to(ROOT))
    return found


def test_what_is_imported_is_declared_and_the_other_way_round():
    runtime, every = {name_of(r) for r in RUNTIME}, {name_of(r) for r in RUNTIME + EXTRAS}
    product, all_files = imported_packages("lib", "notebooks"), imported_packages("lib", "notebooks", "tests")
    undeclared = {name: str(path) for name, path in all_files.items() if name not in every}
    assert not undeclared, f"imported but not declared in pyproject.toml: {undeclared}"
    unused = runtime - set(product) - TOOLS
    assert not unused, f"declared in pyproject.toml but never imported: {sorted(unused)}"


def test_every_public_name_of_lib_says_what_it_is():
    silent = []
    for path in python_files("lib"):
        tree = ast.parse(path.read_text(), filename=str(path))
        if not ast.get_docstring(tree):
            silent.append(path.name)
        scopes = [tree] + [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name[0] != "_"]
        for scope in scopes:
            for node in scope.body:
                public = isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
                if public and not ast.get_docstring(node):
                    silent.append(f"{path.name}:{node.lineno} {node.name}")
    assert not silent, f"without a docstring: {silent}"


def make(folder, *arguments, **environment):
    if not shutil.which("make"):
        pytest.skip("make is not installed")
    # an outer make must not speak to this one
    outer = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(
        ["make", *arguments],
        cwd=folder,
        env=outer | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_make_help_is_the_default_and_lists_every_target():
    told = make(ROOT).stdout
    assert told == make(ROOT, "help").stdout
    assert tuple(line.split()[1] for line in told.splitlines()) == TARGETS
    assert all(len(line.split()) > 3 for line in told.splitlines())


def test_make_passes_scale_and_names_on():
    told = make(ROOT, "--dry-run", "replicate", "SCALE=smoke", "ONLY=a b").stdout
    assert told.splitlines()[-1] == ".venv/bin/python -m lib run --scale smoke --only a b"
    assert make(ROOT, "--dry-run", "replicate").stdout.rstrip().endswith("lib run --scale laptop")


@pytest.fixture
def bare(tmp_path):
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "requirements.lock").write_text("no-such-package-xyz==0\n")
    return tmp_path


def test_a_failed_install_leaves_no_environment(bare):
    done = make(bare, "replicate", f"PYTHON={sys.executable}", PIP_NO_INDEX="1")
    assert done.returncode != 0
    assert "no-such-package-xyz" in done.stderr and "could not be made" in done.stderr
    assert not (bare / ".venv").exists()


def test_another_python_is_refused_in_a_sentence(bare):
    done = make(bare, "replicate", "PYTHON=false")
    assert done.returncode != 0
    assert "Python 3.11 is needed and false is not it" in done.stderr
    assert not (bare / ".venv").exists()


def test_an_environment_is_made_again_when_the_lock_changed_or_an_install_was_killed(bare):
    stamp = bare / ".venv" / ".installed"
    assert "-m venv .venv" in make(bare, "--dry-run", "replicate").stdout
    stamp.parent.mkdir()
    assert "-m venv .venv" in make(bare, "--dry-run", "replicate").stdout
    stamp.touch()
    assert "-m venv .venv" not in make(bare, "--dry-run", "replicate").stdout
    later = stamp.stat().st_mtime + 10
    os.utime(bare / "requirements.lock", (later, later))
    assert "-m venv .venv" in make(bare, "--dry-run", "replicate").stdout


@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize("no_skips", ["", "1"])
@pytest.mark.parametrize("how", ["pytest.skip('no such thing')", "pass"])
def test_a_skipped_test_fails_where_none_may_be_skipped(tmp_path, how, no_skips, workers):
    (tmp_path / "test_one.py").write_text(f"import pytest\n\ndef test_one():\n    {how}\n\ndef test_two():\n    pass\n")
    (tmp_path / "test_all.py").write_text(f"import pytest\n\n{how.replace(')', ', allow_module_level=True)')}\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-c", os.devnull, f"--rootdir={tmp_path}", "-rs"]
    command += ["-n", workers, "--dist", "loadfile"]
    env = os.environ | {"LOOPED_NO_SKIPS": no_skips}
    done = subprocess.run([*command, tmp_path], cwd=ROOT, env=env, capture_output=True, text=True)
    skips = how != "pass"
    failed = bool(skips and no_skips)
    assert done.returncode == int(failed), done.stdout
    assert ("no such thing" in done.stdout) == skips
    for where in ("test_one.py::test_one: ", "test_all.py: "):
        assert (f"{where}Skipped: no such thing" in done.stdout) == failed


def test_no_file_names_a_package_registry_or_a_place_of_one_machine():
    if not shutil.which("git"):
        pytest.skip("git is not installed")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this is no git checkout")
    # spelled so that this file does not match itself
    registry = re.compile(r"https?://[^\s\"')>]*(py[p]i\b|python[h]osted|/simpl[e]\b|registr[y]\.|pkg[s]\.)")
    place = re.compile(r"(?<![\w.:/-])/(wor[k]|hom[e]|roo[t]|User[s])/\w")
    found = []
    for name in filter(None, listed.stdout.split("\0")):
        try:
            text = (ROOT / name).read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError):
            continue
        for pattern in (registry, place):
            if match := pattern.search(text):
                found.append(f"{name}: {match[0]}")
    assert not found, found


def test_the_checks_before_a_commit_use_the_ruff_that_is_pinned():
    hooks = {
        repo["repo"].rpartition("/")[2]: repo
        for repo in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    }
    pins = {name_of(line): line.split("==")[1] for line in lock_lines()}
    assert hooks["ruff-pre-commit"]["rev"] == f"v{pins['ruff']}"
    assert {"check-yaml", "check-added-large-files"} <= {hook["id"] for hook in hooks["pre-commit-hooks"]["hooks"]}


def test_the_workflow_runs_the_whole_check_and_nothing_else():
    (job,) = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == ['sudo env "PATH=$PATH" bash .ci/run']
    version = next(step["with"]["python-version"] for step in job["steps"] if "setup-python" in step.get("uses", ""))
    assert PROJECT["requires-python"].startswith(f">={version}")


def test_the_citation_is_of_this_version_and_licence():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (cited["version"], cited["license"]) == (PROJECT["version"], PROJECT["license"])
