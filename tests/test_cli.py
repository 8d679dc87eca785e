"""The command line: what it says of results, and mistakes as one sentence with a non-zero exit."""

import json
import re
import subprocess
import sys

import pytest

from lib import BEHAVIOUR, cli, doctor, paths, readme
from tests.conftest import environment


def test_a_result_older_than_the_behaviour_version_is_named(tmp_path, monkeypatch):
    folder = tmp_path / "laptop/4_3_scratch_training"
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps({"behaviour": BEHAVIOUR - 1}))
    monkeypatch.setenv("LOOPED_OUTPUTS", str(tmp_path))
    assert doctor.stale() == [("laptop", "4_3_scratch_training", BEHAVIOUR - 1)]
    assert "laptop/4_3_scratch_training was made by behaviour version" in "\n".join(doctor.report()[0])
    assert not doctor.report()[1]
    assert "**Stale:** laptop/4_3_scratch_training" in readme.claims_table()


def test_a_result_that_cannot_be_read_is_named_too(tmp_path, monkeypatch):
    for name, text in (("a", '{"behav'), ("b", "[]")):
        (tmp_path / "laptop" / name).mkdir(parents=True)
        (tmp_path / "laptop" / name / "result.json").write_text(text)
    monkeypatch.setenv("LOOPED_OUTPUTS", str(tmp_path))
    lines, healthy = doctor.report()
    assert not healthy and all(f"laptop/{n}/result.json cannot be read" in "\n".join(lines) for n in "ab")


def test_a_relative_outputs_folder_means_the_same_in_every_process(tmp_path):
    env = environment("here")
    command = [sys.executable, "-m", "lib", "run", "--scale", "smoke", "--only", "99_verdicts"]
    subprocess.run(command, cwd=tmp_path, env=env, check=True, capture_output=True)
    found = sorted(p.name for p in (tmp_path / "here/smoke/99_verdicts").iterdir())
    assert {"notebook.ipynb", "result.json"} <= set(found) and not (paths.notebooks() / "here").exists()


def test_readme_says_what_the_results_say(tmp_path, monkeypatch):
    text = (paths.ROOT / "README.md").read_text(encoding="utf-8")
    rendered = [readme.render(text)]
    # whoever has just replicated has results of their own in outputs/: then the committed ones count
    committed = subprocess.run(["git", "archive", "HEAD", "outputs"], cwd=paths.ROOT, capture_output=True, check=False)
    if committed.returncode == 0:
        subprocess.run(["tar", "-x", "-C", str(tmp_path)], input=committed.stdout, check=True)
        monkeypatch.setenv("LOOPED_OUTPUTS", str(tmp_path / "outputs"))
        rendered.append(readme.render(text))
    assert text in rendered, "run `python -m lib readme`"
    outside = re.sub(r"<!-- (\w+) -->.*?<!-- /\1 -->", "", text, flags=re.DOTALL)
    numbers = set(re.findall(r"\d+(?:\.\d+)?", outside))
    names = {
        "00",
        "4",
        "1",
        "2",
        "3",
        "5",
        "99",
        "3.11",
        "4.1",
        "4.2",
        "4.3",
        "4.4",
        "4.5",
        "2.0",
    }  # notebooks, sections, Python, the licence
    names |= {"1.4", "16", "8", "20"}  # the example of released weights
    names |= {"6379", "0"}  # Ray's port; what its switch is set to
    assert numbers <= names, "a measured number in the README stands between markers"


@pytest.mark.parametrize(
    "words, said",
    [
        (["run", "--scale", "huge"], "scale is 'huge': it must be one of smoke, laptop, overnight, paper"),
        (["run", "--scale", "smoke", "--only", "4_9"], "4_9 is not a notebook: it must be one of 00_reading_guide"),
        (["run", "--scale", "smoke", "--engine", "slurm"], "the engine is 'slurm': it must be one of local, ray."),
        (
            ["run", "--scale", "smoke", "--address", "head:6379"],
            "--address is head:6379, and only --engine ray has an address.",
        ),
        (["claims", "--scale", "huge"], "scale is 'huge'"),
    ],
)
def test_a_mistake_is_one_sentence_and_a_non_zero_exit(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.setenv("LOOPED_OUTPUTS", str(tmp_path))
    assert cli.main(words) == 1
    printed = capsys.readouterr().err
    assert said in printed and len(printed.strip().splitlines()) == 1 and not list(tmp_path.iterdir())


def test_an_outputs_folder_that_cannot_be_written_is_one_sentence(monkeypatch, capsys):
    monkeypatch.setenv("LOOPED_OUTPUTS", "/proc/outputs")  # refuses even root
    assert cli.main(["run", "--scale", "smoke", "--only", "99_verdicts"]) == 1
    printed = capsys.readouterr().err.strip().splitlines()
    assert len(printed) == 1 and "/proc/outputs cannot be written" in printed[0] and "LOOPED_OUTPUTS" in printed[0]
