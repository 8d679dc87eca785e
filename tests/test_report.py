"""The report: its parts on a small made-up outputs folder, and the committed one in a real browser, with no network.

The browser is Debian's chromium, driven by playwright; accessibility is checked by axe-core.
"""

import base64
import json
import re
import shutil
import struct
import zlib
from contextlib import contextmanager
from html.parser import HTMLParser
from urllib.parse import unquote

import nbformat
import pandas as pd
import pytest

from lib import claims, report, report_charts, report_html, report_pages
from lib.paths import ROOT

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
RULES = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"], "resultTypes": ["violations"], "preload": False}
WIDTHS = (1280, 390)
EXPLORED = "4_2_readout_collapse"
BYTES = 15e6


# ---- a made-up outputs folder ----------------------------------------------------------------------------------------------


def png(width=4, height=3):
    """A grey picture."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    lines = zlib.compress(b"".join(b"\0" + b"\x80" * width for _ in range(height)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", lines) + chunk(b"IEND", b"")


TABLE = """<style scoped>.dataframe {}</style><table border="1" class="dataframe"><thead><tr style="x"><th></th><th>a</th></tr>
<tr><th>name</th><th></th></tr></thead><tbody><tr><th>one</th><td>1</td></tr></tbody></table>"""
SPEC = {"data": {"values": [{"a": 1}]}, "mark": "point", "encoding": {"x": {"field": "a", "type": "quantitative"}}}
PROSE = """# A <b>made-up</b> page

See [the claims](../params/claims.yaml), [the other](../outputs/smoke/second/notebook.ipynb), [itself](first.ipynb#Next-part),
[nothing](../nowhere.txt), [outside](https://example.org/a?b=1&c=2). Here $r_0 = 4$ and $\\hat z_t = \\mathrm{norm}(z_t)$.

![Words of
a picture](../outputs/smoke/second/one.png) ![gone](../outputs/smoke/second/none.png) [no such part](second.ipynb#No-part)

## Next part

### Twice

### Twice
"""


def made_up(outputs, row=None):
    """Two notebooks and a table of claims at the smoke scale."""
    v4 = nbformat.v4
    for name in ("first", "second"):
        folder = outputs / "smoke" / name
        folder.mkdir(parents=True)
        picture = base64.b64encode(png()).decode()
        shown = [
            v4.new_output("execute_result", {"image/png": picture, "text/plain": "alt.Chart(...)"}),
            v4.new_output("execute_result", {"application/vnd.vegalite.v6+json": SPEC, "image/png": picture}),
            v4.new_output("display_data", {"text/html": TABLE, "text/plain": "a"}),
            v4.new_output("stream", name="stdout", text="1 < 2\n"),
        ]
        code = v4.new_code_cell('out.chart(plots.one("x"), "one")', outputs=shown[:1])
        rest = v4.new_code_cell('out.chart(two, f"of_{task}")\nx < 1  # <i>', outputs=shown[1:])
        notebook = v4.new_notebook(cells=[v4.new_markdown_cell(PROSE), code, rest])
        (folder / "notebook.ipynb").write_text(nbformat.writes(notebook))
        (folder / "of_hops.png").write_bytes(png())
        (folder / "numbers.csv").write_text("a\n1\n")
        result = {"notebook": name, "params": {"r0": 4}, "date": "2026-01-01", "figures": {"models": 2}}
        (folder / "result.json").write_text(json.dumps(result | {"training_core_seconds": 90}))
    rows = [dict.fromkeys(claims.COLUMNS) | {"id": "asymmetry", "section": "4.1", "kind": "order", "verdict": "replicated"}]
    rows[0] |= {"paper": "holds", "ours": "much", "n": 3, "low": 0.1, "high": 0.2, "rule": "a > b", "notebook": "first"}
    rows += [rows[0] | {"id": "q1_order", "section": "Q1", "verdict": "out_of_reach", "n": None, "low": None} | (row or {})]
    pd.DataFrame(rows, columns=claims.COLUMNS).to_csv(outputs / "smoke" / "claims.csv", index=False)


@pytest.fixture
def small(tmp_path, monkeypatch):
    """The report of a made-up folder, in which one claim's words would be HTML."""
    monkeypatch.setenv("LOOPED_OUTPUTS", str(tmp_path))
    monkeypatch.setattr(report, "_vega", lambda: "/* a bundle */")
    made_up(tmp_path, {"ours": '<script>alert("x")</script> & more', "reason": "a <b> b"})
    return report.build("smoke", ("first", "second")).parent


def test_a_report_is_made_of_an_outputs_folder_and_its_links_resolve(small, tmp_path):
    names = {path.relative_to(small).as_posix() for path in small.rglob("*") if path.is_file()}
    wanted = {"index.html", "first.html", "second.html", "claims.json", "style.css", "site.js", "vega.js", "data/claims.yaml"}
    wanted |= {f"{kind}/{n}/{f}" for n in ("first", "second") for kind, f in (("figures", "one.png"), ("data", "numbers.csv"))}
    assert wanted <= names and "figures/first/of_hops.png" in names
    assert dangling(small) == []
    page = (small / "first.html").read_text()
    assert 'href="second.html"' in page and 'href="first.html#Next-part"' in page and "nowhere" not in page
    assert 'href="https://example.org/a?b=1&amp;c=2"' in page
    assert (small / "figures/first/one.png").read_bytes() == png()
    assert (
        '<img src="figures/second/one.png" width="4" height="3" alt="Words of a picture">' in page and "<em>gone</em>" in page
    )
    assert 'alt="Figure 1. Words of a picture"' in (small / "second.html").read_text(), (
        "a figure's own words are used on its page"
    )
    assert "No-part" not in page and 'id="Twice-2"' in page
    assert not list((tmp_path / "smoke").glob(".staging*")), "nothing half-made is left"
    assert "decide nothing" in page


def test_a_claims_text_is_escaped_wherever_it_is_shown(small):
    for path in small.glob("*.html"):
        assert "alert(" not in path.read_text().replace("&lt;script&gt;alert(&#34;x&#34;)&lt;/script&gt;", ""), path
    index = (small / "index.html").read_text()
    assert "&lt;script&gt;" in index and "a &lt;b&gt; b" in index
    first = (small / "first.html").read_text()
    assert "1 &lt; 2" in first and "<i>" not in re.sub(r'<span class="formula">.*?</span>', "", first)


def test_the_rows_are_those_of_claims_csv(small, tmp_path):
    found = json.loads((small / "claims.json").read_text())
    frame = pd.read_csv(tmp_path / "smoke" / "claims.csv", dtype=str, keep_default_na=False)
    assert [list(row) for row in found] == [claims.COLUMNS] * len(frame)
    for row, kept in zip(found, frame.to_dict("records"), strict=True):
        assert {key for key, value in row.items() if value is None} == {key for key, text in kept.items() if text == ""}
        assert all(
            float(kept[k]) == row[k] if k in ("n", "low", "high") else kept[k] == row[k] for k in row if row[k] is not None
        )


def test_a_notebook_that_is_missing_is_named_with_what_to_run(tmp_path, monkeypatch):
    monkeypatch.setenv("LOOPED_OUTPUTS", str(tmp_path))
    with pytest.raises(
        ValueError, match=r"first/notebook.ipynb is not there: run `python -m lib run --scale smoke --only first`"
    ):
        report.build("smoke", ("first",))
    made_up(tmp_path)
    (tmp_path / "smoke" / "claims.csv").unlink()
    with pytest.raises(ValueError, match="claims.csv is not there: run `python -m lib run --scale smoke`"):
        report.build("smoke", ("first",))
    with pytest.raises(ValueError, match="scale is 'tiny'"):
        report.build("tiny")


def test_a_failed_build_leaves_the_report_before_it(small, monkeypatch):
    before = (small / "index.html").read_bytes()
    monkeypatch.setattr(report, "_vega", lambda: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="report cannot be written"):
        report.build("smoke", ("first", "second"))
    assert (small / "index.html").read_bytes() == before and not list(small.parent.glob(".staging*"))


def test_tables_say_what_their_headers_head():
    html = report_html.tabled(TABLE)
    assert "style" not in html and "border" not in html and html.count("<tr") == 2
    assert re.findall(r'<th scope="(\w+)">(.*?)</th>', html) == [("col", "name"), ("col", "a"), ("row", "one")]


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ('out.chart(plots.one(f("a"), "b"), "c")', ["c"]),
        ('for t in tasks:\n    display(out.chart(\n        x,\n        f"of_{t}",\n    ))', ["of_hops", "of_rings"]),
        ('display(out.chart(x, "_and_".join(y)))', ["a_and_b"]),
        ("x = 1", ["figure_1"]),
        ("%time x", ["figure_1"]),
    ],
)
def test_a_figure_has_the_name_that_its_cell_gives_it(tmp_path, source, names):
    for name in ("a_and_b", "of_hops", "of_rings", "c", "other"):
        (tmp_path / f"{name}.png").touch()
    figures = {}
    for name in names:
        assert report_pages._figure_name(source, tmp_path, figures) == name
        figures[name] = None


@pytest.mark.parametrize(
    ("tex", "words"),
    [
        ("r_0 = 4", "<i>r</i><sub>0</sub> = 4"),
        (r"\hat z_t", "<i>z\u0302</i><sub><i>t</i></sub>"),
        (r"\mathrm{norm}(z)\ \text{if } t < 1", "norm(<i>z</i>) if  <i>t</i> &lt; 1"),
    ],
)
def test_a_formula_is_put_in_words(tex, words):
    assert report_html.formula(tex) == f'<span class="formula">{words}</span>'


def test_a_formula_of_other_commands_stays_as_it_is_written():
    assert report_html.formula(r"\frac{a}{b}") == r"<code>\frac{a}{b}</code>"


def test_the_citation_is_read_where_there_is_one(tmp_path):
    assert "Looped language models, replicated" in report.citation(tmp_path)["text"]
    authors = "authors: [{given-names: Ada, family-names: Byron}]\n"
    (tmp_path / "CITATION.cff").write_text(
        f"title: A title\n{authors}version: 2.0\ndate-released: 2026-05-01\nurl: https://a.org\n"
    )
    said = report.citation(tmp_path)
    assert said["text"] == "Ada Byron. A title. version 2.0. 2026. https://a.org."
    assert "author = {Ada Byron}" in said["bibtex"] and "year = {2026}" in said["bibtex"]


def test_every_claim_with_a_figure_is_a_claim():
    assert set(report.SHOWN_IN) <= set(claims.load())


def test_an_explorer_holds_every_reading_once():
    frame = pd.DataFrame(
        [
            {"group": g, "arm": a, "seed": s, "K": K, "accuracy": K / 8, "state_norm": 10.0 * K}
            for g in ("one", "two")
            for a in ("no_norm", "with_norm")
            for s in (0, 1)
            for K in (1, 2, 4)
        ]
    )
    spec = report_charts.explorer(frame, {"accuracy": "accuracy", "state_norm": "norm"}, "task", r0=2)
    assert len(spec["data"]["values"]) == len(frame) and len(spec["concat"]) == 2
    binds = {p["name"]: p["bind"]["input"] for p in spec["params"]}
    assert binds == {"place": "range", "chosen": "select", "arm0": "checkbox", "arm1": "checkbox"}
    slider = spec["params"][0]
    assert (slider["bind"]["min"], slider["bind"]["max"], slider["value"]) == (0, 2, 1)
    scales = [panel["vconcat"][0]["layer"][1]["encoding"]["y"]["scale"] for panel in spec["concat"]]
    assert scales[0]["domain"] == [0, 1.02] and scales[1]["type"] == "log"


def test_no_readings_give_no_chart(tmp_path):
    assert report_charts.charts("4_1_asymmetry", tmp_path) == [] == report_charts.charts("99_verdicts", tmp_path)
    (tmp_path / "accuracy.csv").write_text("\n")
    assert report_charts.charts("4_5_overshoot", tmp_path) == []


# ---- the committed results -------------------------------------------------------------------------------------------------


class Links(HTMLParser):
    """The ids of a page, and what it points to."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.targets, self.levels, self.pictures = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.ids += [attrs["id"]] if "id" in attrs else []
        self.targets += [attrs[key] for key in ("href", "src") if key in attrs]
        self.levels += [int(tag[1])] if re.fullmatch(r"h\d", tag) else []
        self.pictures += [attrs] if tag == "img" else []


def dangling(site):
    """Links of the site's pages that lead nowhere in it."""
    pages = {path.name: Links(path.read_text()) for path in site.glob("*.html")}
    lost = []
    for name, page in pages.items():
        for target in page.targets:
            if re.match(r"https?:|mailto:|data:", target):
                continue
            file, _, anchor = unquote(target).partition("#")
            there = (site / (file or name)).resolve()
            if not (there.is_file() and there.is_relative_to(site.resolve())):
                lost.append((name, target))
            elif anchor and anchor not in pages[file or name].ids:
                lost.append((name, target))
    return lost


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The laptop report, built in a folder of its own that links to the committed results."""
    outputs = tmp_path_factory.mktemp("outputs")
    (outputs / "laptop").mkdir()
    for path in (ROOT / "outputs" / "laptop").iterdir():
        if path.name != "report" and not path.name.startswith("."):
            (outputs / "laptop" / path.name).symlink_to(path)
    (outputs / "bench.json").symlink_to(ROOT / "outputs" / "bench.json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOOPED_OUTPUTS", str(outputs))
        return report.build("laptop").parent


def test_the_committed_report_is_whole_and_small(site):
    assert sum(path.stat().st_size for path in site.rglob("*") if path.is_file()) < BYTES
    assert dangling(site) == []
    kept = report.rows(ROOT / "outputs" / "laptop")
    assert json.loads((site / "claims.json").read_text()) == kept and len(kept) == len(claims.load())
    index = (site / "index.html").read_text()
    assert all(f'id="claim-{row["id"]}"' in index for row in kept)
    every = [path for path in site.glob("*.html") if path.name != "index.html"]
    assert len(every) == len(list((ROOT / "outputs" / "laptop").glob("*/notebook.ipynb")))


def test_pages_have_headings_in_order_and_pictures_with_words(site):
    for path in site.glob("*.html"):
        text = path.read_text()
        page = Links(text)
        assert len(page.ids) == len(set(page.ids)), path.name
        assert page.levels[0] == 1 and page.levels.count(1) == 1, path.name
        assert all(b - a <= 1 for a, b in zip(page.levels, page.levels[1:], strict=False)), path.name
        assert all(picture["alt"] and picture["width"] for picture in page.pictures), path.name
        assert '<html lang="en">' in text and "<th>" not in text
        prose = re.sub(r"<(script|pre|code).*?</\1>", "", text, flags=re.S)
        assert "$" not in prose and "\\" not in prose, f"a formula is left in {path.name}"


def test_every_claim_finds_the_figure_that_shows_it(site):
    lost = []
    for row in report.rows(ROOT / "outputs" / "laptop"):
        figure = report.SHOWN_IN.get(row["id"])
        if figure and f'id="figure-{figure}"' not in (site / f"{row['notebook']}.html").read_text():
            lost.append((row["id"], figure))
    assert not lost


# ---- in a browser ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    """One headless chromium for the module."""
    if not CHROMIUM:
        pytest.skip("chromium is not installed: `apt-get install chromium`")
    reason = "playwright is not installed: `make browser-tools` installs it"
    sync_api = pytest.importorskip("playwright.sync_api", reason=reason)
    pytest.importorskip("axe_playwright_python", reason=reason)
    with sync_api.sync_playwright() as driver:
        yield driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)


@contextmanager
def opened(browser, path, width=1280, fragment="", **how):
    """A page of the site with its charts drawn; fails on a console error or a request that leaves the disk."""
    context = browser.new_context(viewport={"width": width, "height": 900}, reduced_motion="reduce", **how)
    page, wrong = context.new_page(), []
    page.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda asked: None if asked.url.startswith(("file:", "data:")) else wrong.append(asked.url))
    page.on("requestfailed", lambda asked: wrong.append(f"failed: {asked.url}"))
    page.goto(path.as_uri() + fragment)
    if how.get("java_script_enabled", True):
        page.wait_for_function("[...document.querySelectorAll('.chart')].every((box) => box.dataset.drawn)", timeout=30_000)
    yield page
    context.close()
    assert not wrong, (path.name, wrong)


def pages_of(site):
    return sorted(site.glob("*.html"))


def widths_of(page):
    return page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")


def test_every_page_loads_draws_and_is_accessible(browser, site):
    from axe_playwright_python.sync_playwright import Axe

    drawn = set()
    for path in pages_of(site):
        with opened(browser, path) as page:
            boxes = page.query_selector_all(".chart")
            for box in boxes:
                assert box.get_attribute("data-drawn") == "yes", path.name
                assert len(box.query_selector_all("svg path")) > 50, path.name
                assert not box.query_selector(".fallback").is_visible()
            drawn |= {path.stem} if boxes else set()
            width, there = widths_of(page)
            assert width <= there, f"{path.name} scrolls sideways"
            assert page.evaluate("[...document.images].every((i) => i.complete && i.naturalWidth > 0)"), path.name
            # what folds looks the same everywhere: some of each kind is unfolded, and all code on one page
            some = ":is(.code, .about *)" if path.stem == EXPLORED else ":is(.code:nth-of-type(-n+2), tr:nth-child(-n+4) *)"
            page.evaluate(f"document.querySelectorAll('details{some}').forEach((d) => {{ d.open = true; }})")
            # a chart's inside is hidden from readers, its box says what it is; the rows of a table are alike
            found = Axe().run(page, context={"exclude": [[".chart svg"], ["tr:nth-child(n+9)"]]}, options=RULES)
            found = found.response["violations"]
            assert not found, (path.name, [(v["id"], [n["target"] for n in v["nodes"]][:3]) for v in found])
    assert drawn == set(report_charts.EXPLORERS)


def test_no_page_scrolls_sideways_on_a_phone(browser, site):
    for path in pages_of(site):
        with opened(browser, path, WIDTHS[1]) as page:
            width, there = widths_of(page)
            assert width <= there, path.name
            loose = "[...document.querySelectorAll('.chart')].every((box) => box.scrollWidth <= box.clientWidth + 1)"
            assert page.evaluate(loose), f"a chart of {path.name} is wider than its box"


def test_filters_choose_rows_and_stand_in_the_address(browser, site):
    rows = report.rows(ROOT / "outputs" / "laptop")
    visible = "document.querySelectorAll('#table tbody tr:not([hidden])').length"
    with opened(browser, site / "index.html") as page:
        assert page.evaluate(visible) == len(rows)
        page.select_option("select[name=verdict]", "replicated")
        wanted = sum(row["verdict"] == "replicated" for row in rows)
        assert 0 < page.evaluate(visible) == wanted < len(rows)
        assert page.inner_text("#shown") == f"{wanted} of {len(rows)} claims"
        page.select_option("select[name=section]", "4.3")
        both = sum(row["verdict"] == "replicated" and row["section"] == "4.3" for row in rows)
        assert page.evaluate(visible) == both and page.url.endswith("#section=4.3&verdict=replicated")
        assert f"replicated ({both})" in page.inner_text("select[name=verdict]")
        page.click("button[type=reset]")
        page.wait_for_function(f"{visible} === {len(rows)}")
        assert "#" not in page.url
        page.focus("select[name=source]")
        page.keyboard.press("ArrowDown")
        assert 0 < page.evaluate(visible) < len(rows), "a filter works by keyboard"
    with opened(browser, site / "index.html", fragment="#verdict=not_replicated") as page:
        assert page.evaluate(visible) == sum(row["verdict"] == "not_replicated" for row in rows)
        why = page.locator("#table tr:not([hidden]) details").first
        assert not why.locator("p").first.is_visible()
        why.locator("summary").press("Enter")
        assert why.locator("p").first.is_visible()


def test_the_slider_and_the_switches_change_the_chart(browser, site):
    with opened(browser, site / f"{EXPLORED}.html") as page:
        page.locator(".chart svg .mark-symbol path").nth(3).hover(force=True)
        page.wait_for_selector("#vg-tooltip-element.visible")
        assert "seed" in page.inner_text("#vg-tooltip-element")
        marks = lambda: page.inner_html(".chart svg")  # noqa: E731
        before = marks()
        page.focus("input[name=place]")
        page.keyboard.press("ArrowRight")
        page.wait_for_function("document.querySelector('.chart output').textContent === '8'")
        assert page.get_attribute("input[name=place]", "aria-valuetext") == "K = 8"
        assert "at K = 8" in page.text_content(".chart svg") and marks() != before
        before, points = marks(), page.locator(".chart svg path").count()
        page.focus("input[name=arm0]")
        page.keyboard.press("Space")
        page.wait_for_function(f"document.querySelectorAll('.chart svg path').length < {points}")
        before = marks()
        page.select_option("select[name=chosen]", index=1)
        page.wait_for_function("(old) => document.querySelector('.chart svg').innerHTML !== old", arg=before)


def tabbed(page, most=120):
    """What the tab key reaches from the page's start: (name, whether its focus is seen)."""
    told = """() => { const e = document.activeElement, s = getComputedStyle(e);
        return [e.name || (e.tagName === "SUMMARY" ? "summary " + e.parentElement.className : e.className),
                parseFloat(s.outlineWidth) >= 2 && s.outlineStyle !== "none" && e.getBoundingClientRect().width > 0]; }"""
    found = {}
    for _ in range(most):
        page.keyboard.press("Tab")
        name, seen = page.evaluate(told)
        found[name] = found.get(name, True) and seen
    return found


def test_the_keyboard_reaches_filters_sliders_and_code_and_sees_where_it_is(browser, site):
    with opened(browser, site / "index.html") as page:
        reached = tabbed(page, 40)
        assert {"skip", "source", "section", "verdict", "summary why"} <= set(reached) and all(reached.values()), reached
    with opened(browser, site / f"{EXPLORED}.html") as page:
        reached = tabbed(page, 75)
        wanted = {"skip", "place", "chosen", "arm0", "arm1", "summary code"}
        assert wanted <= set(reached) and all(reached.values()), reached


def test_without_scripts_the_tables_and_pictures_are_there(browser, site):
    with opened(browser, site / "index.html", java_script_enabled=False) as page:
        assert page.locator("#table tbody tr:visible").count() == len(claims.load())
        assert not page.is_visible("#filters")
    with opened(browser, site / f"{EXPLORED}.html", java_script_enabled=False) as page:
        assert page.locator("figure img:visible").count() == len(list((ROOT / "outputs/laptop" / EXPLORED).glob("*.png")))
        assert page.is_visible(".chart .fallback") and not page.locator(".chart svg").count()


def test_a_chart_kept_in_a_notebook_is_drawn_from_its_specification(browser, tmp_path, monkeypatch):
    monkeypatch.setenv("LOOPED_OUTPUTS", str(tmp_path))
    made_up(tmp_path)
    index = report.build("smoke", ("first", "second"))
    with opened(browser, index.with_name("first.html")) as page:
        assert page.locator(".chart[data-drawn=yes] svg path").count() > 0 and not page.is_visible(".chart img")
    (index.parent / "vega.js").write_text("")
    context = browser.new_context()
    page = context.new_page()
    page.goto(index.with_name("first.html").as_uri())
    assert page.is_visible(".chart img"), "a picture stands in where the charts' script does not run"
    context.close()
