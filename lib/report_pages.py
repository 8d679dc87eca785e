"""One executed notebook as a page of the report: prose, code, figures, interactive charts and tables."""

import ast
import base64
import json
import re
import shutil
from html import unescape
from pathlib import Path

import nbformat
from nbconvert.filters import Highlight2HTML

from lib import report_charts, report_html, runner

LESSONS = ("00_reading_guide",)  # whose code is read with the prose, and so unfolded


def page(site: Path, folder: Path, result: dict, scale: str, names: tuple[str, ...]) -> dict:
    """What a notebook's page shows: title, blocks in order, figures by name, contents, and where it comes from."""
    notebook = runner.as_written(nbformat.read(folder / "notebook.ipynb", as_version=4), scale, folder.name)
    r0 = result.get("params", {}).get("r0")
    drawn = report_charts.charts(folder.name, folder, r0 if folder.name != "4_5_overshoot" and isinstance(r0, int) else None)
    blocks, figures, heading, waiting, ids = [], {}, "", list(drawn), {"content", "table-of-data"}
    for number, cell in enumerate(notebook.cells, 1):
        if cell.cell_type == "markdown":
            html = report_html.mended(report_html.markdown(cell.source), site, scale, names, ids)
            heading = report_html.last_heading(html) or heading
            blocks.append({"kind": "prose", "html": html})
        if cell.cell_type != "code":
            continue
        blocks.append(_code(cell, number))
        for output in cell.outputs:
            for block in _outputs(output, cell, heading, folder, site, figures):
                if block["kind"] == "figure":
                    ready = [chart for chart in waiting if chart.before == block["name"]]
                    blocks += [_interactive(chart, ids) for chart in ready]
                    waiting = [chart for chart in waiting if chart not in ready]
                blocks.append(block)
    blocks += [_interactive(chart, ids) for chart in waiting]  # their figure is not there
    whole = "".join(block["html"] for block in blocks if block["kind"] == "prose")
    title = re.search(r"<h1[^>]*>(.*?)</h1>", whole, re.S)
    parts = re.findall(r'<h2 id="([^"]+)">(.*?)</h2>', whole, re.S)
    return {
        "name": folder.name,
        "title": report_html.plain(title[1]) if title else short_name(folder.name),
        "titled": bool(title),
        "lesson": folder.name in LESSONS,
        "blocks": blocks,
        "figures": figures,
        "ids": ids | {f"figure-{name}" for name in figures},
        "said": report_html.words_of_pictures(notebook),
        "contents": [(unescape(i), report_html.plain(words)) for i, words in parts],
        "drawn": any(block.get("spec") for block in blocks),
        "files": _tables(site, folder),
        "made": _made(result),
    }


def _made(result: dict) -> dict:
    machine = result.get("hardware", {})
    return {
        "date": result.get("date", ""),
        "models": result.get("figures", {}).get("models", 0),
        "minutes": round(result.get("training_core_seconds", 0) / 60),
        "machine": f"{machine.get('processor', 'unknown')}, {machine.get('cores', '?')} cores",
    }


def _tables(site: Path, folder: Path) -> list[str]:
    """Copy a notebook's tables into the site; returns their names."""
    names = sorted(path.name for path in folder.glob("*.csv"))
    for name in names:
        (site / "data" / folder.name).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / name, site / "data" / folder.name / name)
    return names


def _code(cell, number: int) -> dict:
    tags = cell.metadata.get("tags", [])
    words = "Parameters of this run" if "injected-parameters" in tags else "Parameters" if "parameters" in tags else "Code"
    return {"kind": "code", "html": Highlight2HTML()(cell.source), "words": words, "number": number}


def _outputs(output, cell, heading: str, folder: Path, site: Path, figures: dict) -> list[dict]:
    """An output as blocks. A chart kept as Vega-Lite is drawn from that, with its PNG where scripts do not run."""
    if output.output_type == "stream":
        return [{"kind": "text", "text": output.text, "wrapped": True}] if output.name == "stdout" else []
    if output.output_type == "error":
        return [{"kind": "text", "text": f"{output.ename}: {output.evalue}"}]
    data = output.data
    spec = next((data[key] for key in data if key.startswith("application/vnd.vegalite")), None)
    spec = json.loads(spec) if isinstance(spec, str) else spec
    if "image/png" in data or spec:
        name = _figure_name(cell.source, folder, figures)
        named = name.replace("_", " ")
        caption = f"{heading} ({named})" if heading else named
        block = {"kind": "figure", "name": name, "number": len(figures) + 1, "caption": caption, "spec": spec}
        if "image/png" in data:
            content = base64.b64decode(data["image/png"])
            path = site / "figures" / folder.name / f"{name}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            block |= {"src": f"figures/{folder.name}/{name}.png", "size": report_html.png_size(content)}
        figures[name] = block
        return [block]
    if "text/html" in data:
        return [{"kind": "table", "html": report_html.tabled(data["text/html"])}]
    if "text/markdown" in data:
        return [{"kind": "prose", "html": report_html.tabled(report_html.markdown(data["text/markdown"]))}]
    return [{"kind": "text", "text": data["text/plain"]}] if "text/plain" in data else []


def _figure_name(source: str, folder: Path, figures: dict) -> str:
    """The name under which a cell keeps its next chart: as written, or for one made of values the first file that fits."""
    for pattern in _chart_names(source):
        found = sorted(path.stem for path in folder.glob("*.png") if re.fullmatch(pattern, path.stem))
        found = found or [re.sub(r"\\(.)", r"\1", pattern)] * (".+" not in pattern)
        if left := [name for name in found if name not in figures]:
            return left[0]
    return f"figure_{len(figures) + 1}"


def _chart_names(source: str) -> list[str]:
    """Patterns of the names in a cell's calls of `out.chart`, in order: any value in a name fits anything."""
    try:
        calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call) and len(node.args) == 2]
    except SyntaxError:  # a notebook's own commands
        return []
    calls = [node for node in calls if isinstance(node.func, ast.Attribute) and node.func.attr == "chart"]
    return [_pattern(node.args[1]) for node in sorted(calls, key=lambda node: (node.lineno, node.col_offset))]


def _pattern(name: ast.expr) -> str:
    if isinstance(name, ast.Constant):
        return re.escape(str(name.value))
    if isinstance(name, ast.JoinedStr):
        return "".join(_pattern(part) for part in name.values)
    if isinstance(name, ast.Call) and isinstance(name.func, ast.Attribute) and name.func.attr == "join":
        return f".+{_pattern(name.func.value)}.+"
    return ".+"


def _interactive(chart: report_charts.Chart, ids: set[str]) -> dict:
    said = {"title": chart.title, "said": chart.said, "shows": chart.shows, "r0": chart.r0}
    return {"kind": "chart", "spec": chart.spec, "id": report_html.anchor(chart.title, ids)} | said


def short_name(notebook: str) -> str:
    """A notebook's name for people: its section, or its words."""
    number, _, words = notebook.partition("_")
    if re.fullmatch(r"\d", number):
        section, _, words = words.partition("_")
        return f"{number}.{section} {words.replace('_', ' ')}"
    return (words if number.isdigit() else notebook).replace("_", " ")
