"""The reading guide as a lesson, and what every notebook opens with: a figure, its words, and the way to the glossary."""

import math
import re

import jupytext
import pytest

from lib import paths, runner

NAMES = (*runner.NOTEBOOKS, *runner.ALONE)
CELLS = jupytext.read(paths.notebooks() / "00_reading_guide.py").cells
CODE = [cell.source for cell in CELLS if cell.cell_type == "code"]
TEXT = "\n".join(cell.source for cell in CELLS if cell.cell_type == "markdown")
TERMS = (
    *("state", "loop-step", "loops-K", "prelude", "core", "coda", "envelope", "injection", "trajectory", "boundary"),
    *("boundary-norm", "readout", "expert", "router", "trained-budget", "overshoot", "contract", "alphabet"),
    *("format-collapse", "arm", "seed", "pair", "stand-in", "floor", "competence-gate", "cliffs-delta", "holm", "verdict"),
)


def first_cell(name):
    return jupytext.read(paths.notebooks() / f"{name}.py").cells[0].source


def check(name):
    """One of the guide's check functions, taken from its cell."""
    (source,) = [cell for cell in CODE if cell.startswith(f"def {name}(")]
    scope = {"math": math, "V": 32}
    exec(source, scope)
    return scope[name]


def test_no_code_cell_of_the_guide_is_longer_than_15_lines():
    assert not [cell.splitlines()[0] for cell in CODE if len(cell.splitlines()) > 15]


def test_the_model_by_hand_takes_20_lines():
    cells = [cell for cell in CODE if cell.startswith(("class Loop(", "def states("))]
    lines = [line for cell in cells for line in cell.splitlines() if line.strip() and '"""' not in line]
    assert len(cells) == 2 and len(lines) <= 20


@pytest.mark.parametrize(
    "name, right, wrong",
    [
        ("check_reach", [3], [0, 2, 4, 12]),
        ("check_overshoot", [8, 8.0], [1, 2, 4, 16, 32, 64]),
        ("check_entropy", [5, 5.0], [0, 1, 2, 16, 32]),
    ],
)
def test_an_exercise_tells_right_from_wrong_and_hints(name, right, wrong):
    told = check(name)
    assert told(None).startswith("Not answered yet")
    assert all(told(answer).startswith("Right: ") for answer in right)
    hints = [told(answer) for answer in wrong]
    assert all(hint.startswith("Not yet: ") for hint in hints) and len(set(hints)) > 1


def test_the_exercises_stand_unanswered_and_their_cells_call_the_checks():
    asked = [cell for cell in CODE if re.search(r"^print\(check_\w+\(", cell, re.M)]
    assert len(asked) == TEXT.count("**Exercise ") == 3
    for cell in asked:
        exec(cell.replace("print", "assert "), {name: check(name) for name in re.findall(r"check_\w+", cell)})
        assert " = None  # your answer" in cell.splitlines()[0]


def test_the_glossary_has_every_term_once_and_no_other():
    glossary = TEXT.split("## Glossary\n")[1]
    anchors = re.findall(r'<a id="([\w-]+)"></a>\*\*', glossary)
    assert len(anchors) == len(set(anchors)) and set(TERMS) <= set(anchors)
    assert TEXT.count("<a id=") == len(anchors), "an anchor stands right before its term"


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_opens_with_a_figure_its_words_and_the_glossary(name):
    first = first_cell(name)
    ((words, target),) = re.findall(r"!\[([^\]]+)\]\(([^)\s]+)\)", first)
    assert target.startswith("../outputs/laptop/") and (paths.notebooks() / target).resolve().is_file()
    assert len(words.split()) >= 12, "words for those who do not see it"
    title, shown, caption = first.split("\n\n")[:3]
    assert title.startswith("# ") and shown.startswith("![")
    assert caption.startswith("*Laptop run: ") and "(00_reading_guide.ipynb#Glossary)" in caption
    assert not re.search(r"\d", re.sub(r"\[[^\]]*\]\([^)]*\)", "", caption)), "a number here would go stale"


def test_every_link_of_a_notebook_leads_somewhere():
    for name in NAMES:
        for cell in jupytext.read(paths.notebooks() / f"{name}.py").cells:
            if cell.cell_type != "markdown":
                continue
            for match in runner.LINK.finditer(cell.source):
                assert (paths.notebooks() / match["target"]).exists(), f"{name}: {match[0]}"
                if (match["anchor"] or "#Glossary") != "#Glossary":
                    assert f'<a id="{match["anchor"][1:]}">' in TEXT, f"{name}: {match[0]}"
