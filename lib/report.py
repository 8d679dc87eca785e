"""The report: a static site of a scale's committed results, which opens from a file and asks no network for anything.

outputs/<scale>/report/: index.html, a page a notebook, claims.json, and what they load. It is made from executed notebooks,
tables and result.json files alone; nothing is run.
"""

import ast
import base64
import json
import re
import shutil
from html import escape, unescape
from pathlib import Path

import nbformat
import pandas as pd
import yaml
from nbconvert import HTMLExporter
from nbconvert.filters import Highlight2HTML
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath

from lib import claims, leftovers, paths, readme, report_charts, runner
from lib.store import cannot_write

TEMPLATES = Path(__file__).parent / "report_templates"
STATIC = ("style.css", "site.js")
COPIED_BYTES = 200_000  # a larger file of the repository is named and not copied
LESSONS = ("00_reading_guide",)  # whose code is read with the prose, and so unfolded
PAPERS = {"contract": "the contract paper", "axes": "the axes paper", "ours": "beyond the papers"}
VERDICT_SIGNS = {
    "replicated": "✓",
    "same_direction": "↗",
    "not_replicated": "✗",
    "inconclusive": "?",
    "not_competent": "–",
    "out_of_reach": "…",
}
# the figure of its notebook that shows a claim best; one without stays with its page
FIGURES = {
    "norm_placement": "norm_placement_by_call_count",
    "accuracy": "identity_at_one_loop removal_costs_beyond_budget removal_reaches_zero ouro26_asis ouro26_removed "
    "ouro14_removed hops_removed_r8 hops_asis_peak moe_vs_feedforward",
    "cost_at_r0": "removal_costs_at_budget damage_in_either_direction asymmetry",
    "norm_ratio": "state_norm_bounded",
    "entropy": "two_stage_collapse entropy_path",
    "logit_gap": "logit_gap_path",
    "modal_share": "modal_share_r32",
    "probe": "answer_not_linear linear_probe_at_chance",
    "dose": "dose_is_a_threshold dose_values",
    "accuracy_against_loops": "no_norm_never_worse no_norm_extrapolates_better norm_peaks_at_trained_depth scratch_hops "
    "hops_indistinguishable_at_r0 scratch_circuit_none scratch_circuit_norm scratch_circuit_p scratch_circuit_delta "
    "scratch_hops_p_at_r0",
    "state_norm": "norm_growth_reversal state_norm_growth",
    "swapped_boundary": "agreement_not_sufficient",
    "recovered_fraction": "layer_beats_head head_plateaus refit_head refit_head_plateau refit_layer refit_layer_hops",
    "overshoot_circuit": "overshoot_equal_K overshoot_matched_circuit absolute_K_confounds loop_advantage_at_matched_overshoot",
    "overshoot_hops": "overshoot_matched_hops overshoot_matched_hops_tests",
    "effects": "q1_envelope q1_order q2_injection q2_order q2_middle_beats_full q3_states q3_order dense_huginn_beats_ouro",
    "gap": "moe_wins moe_deltas moe_huginn_beats_ouro moe_narrows_gap",
    "balance_end": "moe_balance moe_balance_order",
    "interventions": "moe_iteration_experts",
    "update_against_loss": "damping",
    "cost_of_the_norm": "readout_axis",
}
SHOWN_IN = {id: figure for figure, ids in FIGURES.items() for id in ids.split()}


def build(scale: str, notebooks: tuple[str, ...] | None = None) -> Path:
    """Make a scale's report anew; returns its index.html. notebooks: those that it has, by default all that the scale has.

    Raises ValueError, one sentence naming what to run, where a result is missing, and OSError where it cannot be written.
    """
    if scale not in paths.SCALES:
        raise ValueError(f"scale is {scale!r}: it must be one of {', '.join(paths.SCALES)}.")
    folder = paths.outputs() / scale
    names = notebooks or _expected(scale)
    _require(folder, scale, names)
    staging, final = folder / f".staging-report-{leftovers.owner()}", folder / "report"
    try:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        _write(staging, folder, scale, names)
        shutil.rmtree(final, ignore_errors=True)
        staging.rename(final)
    except OSError as error:
        raise OSError(f"{final} cannot be written {cannot_write(error)}") from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return final / "index.html"


def rows(folder: Path) -> list[dict]:
    """The rows of a scale's claims.csv, in its order and with its columns; what is empty there is None."""
    frame = pd.read_csv(folder / "claims.csv", dtype={"section": str}, keep_default_na=False, na_values={"low": "", "high": ""})
    frame["n"] = pd.to_numeric(frame["n"]).astype("Int64")
    found = json.loads(frame.to_json(orient="records", double_precision=15))
    return [{key: None if value == "" else value for key, value in row.items()} for row in found]


def _expected(scale: str) -> tuple[str, ...]:
    from lib.runner import NOTEBOOKS  # slow to import

    return tuple(n for n in NOTEBOOKS if scale != "released_cpu" or (paths.params() / n / f"{scale}.yaml").exists())


def _require(folder: Path, scale: str, names: tuple[str, ...]) -> None:
    for name in names:
        for file in ("notebook.ipynb", "result.json"):
            if not (folder / name / file).exists():
                said = f"run `python -m lib run --scale {scale} --only {name}` first"
                raise ValueError(f"{folder / name / file} is not there: {said}.")
    if not (folder / "claims.csv").exists():
        raise ValueError(f"{folder / 'claims.csv'} is not there: run `python -m lib run --scale {scale}` first.")


def _write(site: Path, folder: Path, scale: str, names: tuple[str, ...]) -> None:
    """The whole site into an empty folder."""
    table = rows(folder)
    results = {name: json.loads((folder / name / "result.json").read_text(encoding="utf-8")) for name in names}
    pages = {name: _page(site, folder / name, results[name], scale, names) for name in names}
    said = {key: words for page in pages.values() for key, words in page["said"].items()}
    for name, page in pages.items():
        for block in page["blocks"]:
            if block["kind"] == "prose":
                block["html"] = _settled(block["html"], site, scale, pages)
        for figure, block in page["figures"].items():
            block["alt"] = said.get((name, figure), block["caption"])
    stated = claims.load()
    listed = [_claim(row, stated.get(row["id"], {}), pages) for row in table]
    env = _environment()
    nav = [(name, short_name(name)) for name in names]
    shared = {"scale": scale, "nav": nav, "signs": VERDICT_SIGNS, "short": short_name}
    for i, (name, page) in enumerate(pages.items()):
        beside = {"before": names[i - 1] if i else None, "after": names[i + 1] if i + 1 < len(names) else None}
        own = [row for row in listed if row["notebook"] == name]
        text = env.get_template("notebook.html.j2").render(page=page, claims=own, **beside, **shared)
        _put(site / f"{name}.html", text)
    bench = _mended(_markdown(readme.bench()), site, scale, names)
    counts = pd.Series([row["verdict"] for row in table], dtype=str).value_counts().to_dict()
    index = {"claims": listed, "pages": pages, "bench": bench, "cite": citation(), "sentence": sentence(counts, scale)}
    index |= {"choices": _choices(listed), "counts": {v: counts[v] for v in claims.VERDICTS if v in counts}}
    _put(site / "index.html", env.get_template("index.html.j2").render(**index, **shared))
    _put(site / "claims.json", json.dumps(table, indent=1, ensure_ascii=False) + "\n")
    for name in STATIC:
        shutil.copyfile(TEMPLATES / name, site / name)
    if any(page["drawn"] for page in pages.values()):
        _put(site / "vega.js", _vega())


def _put(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _vega() -> str:
    """Vega, Vega-Lite and their embedding as one script, for the whole site."""
    import vl_convert

    return vl_convert.javascript_bundle()


def _environment():
    """nbconvert's template environment over our templates, in which every inserted text is escaped."""
    exporter = HTMLExporter(template_name="base", extra_template_paths=[str(TEMPLATES)])
    return exporter.environment.overlay(autoescape=True, trim_blocks=True, lstrip_blocks=True)


def sentence(counts: dict[str, int], scale: str) -> str:
    """What was found, in one sentence. counts: claims by verdict."""
    judged = sum(n for verdict, n in counts.items() if verdict in claims.VERDICTS[:4])
    words = {
        "replicated": "hold here",
        "same_direction": "point the same way only",
        "not_replicated": "do not hold",
        "inconclusive": "stay open",
    }
    parts = [f"{counts[verdict]} {said}" for verdict, said in words.items() if counts.get(verdict)]
    found = f": {', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else f": {parts[0]}" if parts else ""
    total = sum(counts.values())
    papers = f"Of {total} numbers and statements of two papers on looped language models"
    return f"{papers}, {judged} can be judged at the {scale} scale{found}."


def short_name(notebook: str) -> str:
    """A notebook's name for people: its section, or its words."""
    number, _, words = notebook.partition("_")
    if re.fullmatch(r"\d", number):
        section, _, words = words.partition("_")
        return f"{number}.{section} {words.replace('_', ' ')}"
    return (words if number.isdigit() else notebook).replace("_", " ")


def citation(root: Path | None = None) -> dict[str, str]:
    """How to cite: a sentence and a BibTeX entry, from CITATION.cff where the repository has one, else from its name."""
    file = (root or paths.ROOT) / "CITATION.cff"
    said = yaml.safe_load(file.read_text(encoding="utf-8")) if file.exists() else {}
    title = said.get("title") or "Looped language models, replicated"
    people = [_person(author) for author in said.get("authors", [])]
    year, url = str(said.get("date-released", ""))[:4], said.get("url") or said.get("repository-code") or ""
    version = f"version {said.get('version', '0.1.0')}"
    text = ". ".join(filter(None, (", ".join(people), title, version, year, url))) + "."
    fields = {"title": f"{{{title}}}", "author": " and ".join(people), "year": year, "url": url, "note": version}
    lines = [f"  {key} = {{{value}}}" for key, value in fields.items() if value]
    return {"text": text, "bibtex": "@software{looped_replication,\n" + ",\n".join(lines) + "\n}"}


def _person(author: dict) -> str:
    return " ".join(filter(None, (author.get("given-names"), author.get("family-names") or author.get("name"))))


def _choices(listed: list[dict]) -> dict[str, list[tuple[str, str, int]]]:
    """The filters: for each key (value, words, rows)."""
    found = {}
    for key, worded in (("source", "paper_name"), ("section", "section"), ("verdict", "verdict_name")):
        pairs = dict.fromkeys((row[key], row[worded]) for row in listed)
        found[key] = [(value, words, sum(row[key] == value for row in listed)) for value, words in pairs]
    order = list(claims.VERDICTS)
    found["verdict"].sort(key=lambda choice: order.index(choice[0]) if choice[0] in order else len(order))
    return found


def _claim(row: dict, stated: dict, pages: dict) -> dict:
    """A row with what the pages show of it: the statement, its paper, the interval, and where to look."""
    page = pages.get(row["notebook"])
    figure = SHOWN_IN.get(row["id"])
    source = "ours" if row["section"] == "beyond" else str(stated.get("paper") or "ours")
    span = f"[{row['low']:.2f}, {row['high']:.2f}]" if None not in (row["low"], row["high"]) else ""
    return row | {
        "statement": claims._short(stated) if not stated.get("statement") else stated["statement"],
        "source": source,
        "paper_name": PAPERS.get(source, source),
        "verdict_name": row["verdict"].replace("_", " "),
        "interval": "" if span in (row["ours"] or "") else span,
        "page": f"{row['notebook']}.html" if page else "",
        "figure": figure if page and figure in page["figures"] else "",
    }


# ---- one notebook ----------------------------------------------------------------------------------------------------------


def _page(site: Path, folder: Path, result: dict, scale: str, names: tuple[str, ...]) -> dict:
    """What a notebook's page shows: title, blocks in order, figures by name, contents, and where it comes from."""
    notebook = runner.as_written(nbformat.read(folder / "notebook.ipynb", as_version=4), scale, folder.name)
    r0 = result.get("params", {}).get("r0")
    drawn = report_charts.charts(folder.name, folder, r0 if folder.name != "4_5_overshoot" and isinstance(r0, int) else None)
    blocks, figures, heading, waiting, ids = [], {}, "", list(drawn), {"content", "table-of-data"}
    for number, cell in enumerate(notebook.cells, 1):
        if cell.cell_type == "markdown":
            html = _mended(_markdown(cell.source), site, scale, names, ids)
            heading = _last_heading(html) or heading
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
    return {
        "name": folder.name,
        "title": _plain(title[1]) if title else short_name(folder.name),
        "titled": bool(title),
        "lesson": folder.name in LESSONS,
        "blocks": blocks,
        "figures": figures,
        "ids": ids | {f"figure-{name}" for name in figures},
        "said": _words_of_pictures(notebook),
        "contents": [(unescape(i), _plain(words)) for i, words in re.findall(r'<h2 id="([^"]+)">(.*?)</h2>', whole, re.S)],
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
            block |= {"src": f"figures/{folder.name}/{name}.png", "size": _png_size(content)}
        figures[name] = block
        return [block]
    if "text/html" in data:
        return [{"kind": "table", "html": _tabled(data["text/html"])}]
    if "text/markdown" in data:
        return [{"kind": "prose", "html": _tabled(_markdown(data["text/markdown"]))}]
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


def _png_size(content: bytes) -> tuple[int, int]:
    """Width and height from a PNG's header."""
    return int.from_bytes(content[16:20], "big"), int.from_bytes(content[20:24], "big")


def _interactive(chart: report_charts.Chart, ids: set[str]) -> dict:
    said = {"title": chart.title, "said": chart.said, "shows": chart.shows, "r0": chart.r0}
    return {"kind": "chart", "spec": chart.spec, "id": _anchor(chart.title, ids)} | said


# ---- HTML ------------------------------------------------------------------------------------------------------------------


def _markdown(text: str) -> str:
    return MarkdownWithMath(renderer=IPythonRenderer(escape=False, exclude_anchor_links=True)).render(text)


def _mended(html: str, site: Path, scale: str, names: tuple[str, ...], ids: set[str] | None = None) -> str:
    """Prose as a page shows it: headings that can be linked to, formulas in words, links that lead somewhere in the site.

    ids: those that the page has so far, to which its own are added.
    """
    ids = set() if ids is None else ids
    ids.update(re.findall(r'\sid="([^"]+)"', html))
    heading = re.compile(r"<(h[2-6])>(.*?)</\1>", re.S)
    html = heading.sub(lambda m: f'<{m[1]} id="{_anchor(_plain(m[2]), ids)}">{m[2]}</{m[1]}>', html)
    html = re.sub(r"\$\$(.+?)\$\$", lambda m: f'<span class="display">{formula(unescape(m[1]))}</span>', html, flags=re.S)
    html = re.sub(r"\$([^$\n]+)\$", lambda m: formula(unescape(m[1])), html)
    link = re.compile(r'<a href="([^"]*)"[^>]*>(.*?)</a>', re.S)
    return _tabled(link.sub(lambda m: _linked(unescape(m[1]), m[2], site, scale, names), html))


def _linked(target: str, words: str, site: Path, scale: str, names: tuple[str, ...]) -> str:
    """A link made to fit the site: a notebook's page, a copy of a small file, or the words alone."""
    if re.match(r"https?://|#|mailto:", target):
        return f'<a href="{escape(target)}">{words}</a>'
    path, _, anchor = target.partition("#")
    notebook = re.fullmatch(r"(?:.*/)?outputs/[^/]+/([^/]+)/notebook\.ipynb|(?:.*/)?([^/]+)\.ipynb", path)
    name = notebook and (notebook[1] or notebook[2])
    if name in names:
        return f'<a href="{name}.html{"#" + anchor if anchor else ""}">{words}</a>'
    file = (paths.notebooks() / path).resolve()
    inside = file.is_relative_to(paths.ROOT) and file.is_file() and file.stat().st_size <= COPIED_BYTES
    if not inside or name:
        return words
    (site / "data").mkdir(exist_ok=True)
    shutil.copyfile(file, site / "data" / file.name)
    return f'<a href="data/{escape(file.name)}">{words}</a>'


def _tabled(html: str) -> str:
    """Tables without their own looks, in a box that scrolls, with headers that say what they head."""
    html = re.sub(r"<style.*?</style>|<script.*?</script>", "", html, flags=re.S)

    def one(match: re.Match) -> str:
        text = re.sub(r'\s(style|border|class)="[^"]*"', "", match[0])
        head, closing, body = text.partition("</thead>")
        head = _one_header(head)
        head, body = (re.sub(r"<th>(?:&nbsp;|\s)*</th>", "<td></td>", part) for part in (head, body))
        scoped = head.replace("<th>", '<th scope="col">') + closing + body.replace("<th>", '<th scope="row">')
        return f'<div class="scroll" data-label="table">{scoped}</div>'

    return re.sub(r"<table.*?</table>", one, html, flags=re.S)


def _one_header(head: str) -> str:
    """pandas' two header rows, the names of columns and those of the index, as one."""
    lines = [re.findall(r"<th>(.*?)</th>", row, re.S) for row in re.findall(r"<tr.*?</tr>", head, re.S)]
    if len(lines) != 2 or len(lines[0]) != len(lines[1]) or "span=" in head:
        return head
    names = [" / ".join(filter(None, (below.strip(), above.strip()))) for above, below in zip(*lines, strict=True)]
    return "<table><thead><tr>" + "".join(f"<th>{name}</th>" for name in names) + "</tr>"


def formula(tex: str) -> str:
    """A formula of the few commands that the notebooks use, as HTML; one with others stays as it is written."""
    text = re.sub(r"\\hat ?\{?(\w)\}?", lambda m: m[1] + "\u0302", tex.strip())
    upright, kept = re.compile(r"\\(?:text|mathrm)\{([^}]*)\}"), []
    text = upright.sub(lambda m: kept.append(m[1]) or f"\x00{len(kept) - 1}\x00", text)
    text = text.replace("\\qquad", "\u2003").replace("\\ ", " ").replace("\\,", "\u2009")
    if "\\" in text:
        return f"<code>{escape(tex)}</code>"
    text = re.sub(r"_\{([^}]*)\}|_(\w)", lambda m: f"<sub>{m[1] or m[2]}</sub>", escape(text))
    text = re.sub(r"(?<![<\w/&])([A-Za-z]\u0302?)(?![\w>])", r"<i>\1</i>", text)
    text = re.sub("\x00(\\d+)\x00", lambda m: escape(kept[int(m[1])]), text)
    return f'<span class="formula">{text}</span>'


def _last_heading(html: str) -> str:
    found = re.findall(r"<h[2-6][^>]*>(.*?)</h[2-6]>", html, re.S)
    return re.sub(r"^\d+\.\s+", "", _plain(found[-1])) if found else ""


def _plain(html: str) -> str:
    return unescape(re.sub(r"<[^>]+>", "", html)).strip()


def _anchor(words: str, ids: set[str]) -> str:
    """A heading's id as Jupyter makes it, which notebooks link to; a second of the same words gets a number."""
    first = name = re.sub(r"\s+", "-", words).replace('"', "") or "part"
    n = 1
    while name in ids:
        n += 1
        name = f"{first}-{n}"
    ids.add(name)
    return escape(name)


def _settled(html: str, site: Path, scale: str, pages: dict) -> str:
    """Prose once all pages are known: pictures of other results in place, and no anchor that its page lacks."""

    def anchored(match: re.Match) -> str:
        page, anchor = match[1], unescape(match[2])
        return match[0] if page not in pages or anchor in pages[page]["ids"] else f'href="{page}.html"'

    html = re.sub(r'href="([^"#/:]+)\.html#([^"]*)"', anchored, html)
    return re.sub(
        r'<img src="([^"]*)" alt="([^"]*)"[^>]*>',
        lambda m: _pictured(unescape(m[1]), re.sub(r"\s+", " ", m[2]), site, scale),
        html,
    )


def _pictured(target: str, alt: str, site: Path, scale: str) -> str:
    """A picture in prose, of this scale's page or copied from another's results; its words where it is not there."""
    found = re.fullmatch(r"(?:.*/)?outputs/([^/]+)/([^/]+)/([^/]+\.png)", target)
    if target.startswith("data:"):
        return f'<img src="{target}" alt="{alt}">'
    if not found:
        return f"<em>{alt}</em>"
    of_scale, notebook, name = found.groups()
    where = f"figures/{notebook}/{name}" if of_scale == scale else f"figures/{of_scale}-{notebook}-{name}"
    sources = [folder / of_scale / notebook / name for folder in (paths.outputs(), paths.ROOT / "outputs")]
    source = next((path for path in sources if path.is_file()), None)
    if not (site / where).is_file():
        if source is None:
            return f"<em>{alt}</em>"
        (site / where).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, site / where)
    width, height = _png_size((site / where).read_bytes())
    picture = f'<img src="{escape(where)}" width="{width}" height="{height}" alt="{alt}">'
    return f'<span class="scroll picture" data-label="picture">{picture}</span>'


def _words_of_pictures(notebook) -> dict[tuple[str, str], str]:
    """What a notebook's prose says of pictures, by (notebook, figure)."""
    link = re.compile(r"!\[([^\]]*)\]\([^)]*outputs/[^/)]+/([^/)]+)/([^/)]+)\.png\)")
    prose = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    return {(of, name): re.sub(r"\s+", " ", words) for words, of, name in link.findall(prose)}
