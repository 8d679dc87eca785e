"""The report: a static site of a scale's committed results, which opens from a file and asks no network for anything.

outputs/<scale>/report/: index.html, a page a notebook, claims.json, and what they load. It is made from executed notebooks,
tables and result.json files alone; nothing is run.
"""

import json
import shutil
from pathlib import Path

import pandas as pd
import yaml
from nbconvert import HTMLExporter

from lib import claims, leftovers, paths, readme, report_html, report_pages
from lib.store import cannot_write

TEMPLATES = Path(__file__).parent / "report_templates"
STATIC = ("style.css", "site.js")
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
    pages = {name: report_pages.page(site, folder / name, results[name], scale, names) for name in names}
    said = {key: words for page in pages.values() for key, words in page["said"].items()}
    for name, page in pages.items():
        for block in page["blocks"]:
            if block["kind"] == "prose":
                block["html"] = report_html.settled(block["html"], site, scale, pages)
        for figure, block in page["figures"].items():
            block["alt"] = said.get((name, figure), block["caption"])
    stated = claims.load()
    listed = [_claim(row, stated.get(row["id"], {}), pages) for row in table]
    env = _environment()
    nav = [(name, report_pages.short_name(name)) for name in names]
    shared = {"scale": scale, "nav": nav, "signs": VERDICT_SIGNS, "short": report_pages.short_name}
    for i, (name, page) in enumerate(pages.items()):
        beside = {"before": names[i - 1] if i else None, "after": names[i + 1] if i + 1 < len(names) else None}
        own = [row for row in listed if row["notebook"] == name]
        text = env.get_template("notebook.html.j2").render(page=page, claims=own, **beside, **shared)
        _put(site / f"{name}.html", text)
    bench = report_html.mended(report_html.markdown(readme.bench()), site, scale, names)
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
        "replicated": "replicated",
        "same_direction": "in direction alone",
        "not_replicated": "not replicated",
        "inconclusive": "still open",
    }
    parts = [f"{counts[verdict]} {said}" for verdict, said in words.items() if counts.get(verdict)]
    found = f": {', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else f": {parts[0]}" if parts else ""
    total = sum(counts.values())
    papers = f"Of {total} numbers and statements of two papers on looped language models"
    return f"{papers}, {judged} can be judged at the {scale} scale{found}."


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
