"""HTML of a report's page: markdown, tables, links and pictures as they must be in a site that stands alone."""

import re
import shutil
from html import escape, unescape
from pathlib import Path

from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath

from lib import paths

COPIED_BYTES = 200_000  # a larger file of the repository is named and not copied


def markdown(text: str) -> str:
    """Markdown with HTML left in it, as HTML."""
    return MarkdownWithMath(renderer=IPythonRenderer(escape=False, exclude_anchor_links=True)).render(text)


def mended(html: str, site: Path, scale: str, names: tuple[str, ...], ids: set[str] | None = None) -> str:
    """Prose as a page shows it: headings that can be linked to, formulas in words, links that lead somewhere in the site.

    ids: those that the page has so far, to which its own are added.
    """
    ids = set() if ids is None else ids
    ids.update(re.findall(r'\sid="([^"]+)"', html))
    heading = re.compile(r"<(h[2-6])>(.*?)</\1>", re.S)
    html = heading.sub(lambda m: f'<{m[1]} id="{anchor(plain(m[2]), ids)}">{m[2]}</{m[1]}>', html)
    html = re.sub(r"\$\$(.+?)\$\$", lambda m: f'<span class="display">{formula(unescape(m[1]))}</span>', html, flags=re.S)
    html = re.sub(r"\$([^$\n]+)\$", lambda m: formula(unescape(m[1])), html)
    link = re.compile(r'<a href="([^"]*)"[^>]*>(.*?)</a>', re.S)
    return tabled(link.sub(lambda m: _linked(unescape(m[1]), m[2], site, scale, names), html))


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


def tabled(html: str) -> str:
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


def last_heading(html: str) -> str:
    """The words of the last heading below the first, or nothing."""
    found = re.findall(r"<h[2-6][^>]*>(.*?)</h[2-6]>", html, re.S)
    return re.sub(r"^\d+\.\s+", "", plain(found[-1])) if found else ""


def plain(html: str) -> str:
    """The words of HTML."""
    return unescape(re.sub(r"<[^>]+>", "", html)).strip()


def anchor(words: str, ids: set[str]) -> str:
    """A heading's id as Jupyter makes it, which notebooks link to; a second of the same words gets a number."""
    first = name = re.sub(r"\s+", "-", words).replace('"', "") or "part"
    n = 1
    while name in ids:
        n += 1
        name = f"{first}-{n}"
    ids.add(name)
    return escape(name)


def settled(html: str, site: Path, scale: str, pages: dict) -> str:
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
    width, height = png_size((site / where).read_bytes())
    picture = f'<img src="{escape(where)}" width="{width}" height="{height}" alt="{alt}">'
    return f'<span class="scroll picture" data-label="picture">{picture}</span>'


def words_of_pictures(notebook) -> dict[tuple[str, str], str]:
    """What a notebook's prose says of pictures, by (notebook, figure)."""
    link = re.compile(r"!\[([^\]]*)\]\([^)]*outputs/[^/)]+/([^/)]+)/([^/)]+)\.png\)")
    prose = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    return {(of, name): re.sub(r"\s+", " ", words) for words, of, name in link.findall(prose)}


def png_size(content: bytes) -> tuple[int, int]:
    """Width and height from a PNG's header."""
    return int.from_bytes(content[16:20], "big"), int.from_bytes(content[20:24], "big")
