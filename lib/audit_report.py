"""The contract report: an audit's facts as one HTML page that needs nothing beside it, and as json.

Every inserted text is escaped; pictures are inlined.
"""

import base64
import json
import math
import platform
import time
from dataclasses import dataclass
from datetime import date
from html import escape
from importlib.metadata import version
from pathlib import Path
from string import Template

import altair as alt
import pandas as pd

from lib import BEHAVIOUR, at_hand, plots
from lib.audit import DOSED, DOSES, TOKENS, Subject
from lib.audit_facts import KEYS, dose_name, judged
from lib.audit_readings import Measured
from lib.pairs import arm_name, table
from lib.results import PACKAGES, hardware
from lib.store import write_atomic


@dataclass(frozen=True)
class Figure:
    """A chart, the sentence under it, and the numbers behind it."""

    chart: alt.TopLevelMixin
    caption: str
    data: pd.DataFrame


def figures(s: Subject, read: Measured) -> dict[str, Figure]:
    """The report's figures by file name: norm_placement, then value, dose, entropy and update_size, or swept for a foreign
    class. Panels stand below each other, so that a page of any width shows them."""
    norms = read.norms.assign(model=s.name)
    gains = (
        "Calls that each normalisation gains with a further loop step, by place; the number of modules stands beside a mark."
    )
    found = {"norm_placement": Figure(plots.placements(norms, at_hand.COUNTS), gains, norms)}
    if not read.pairs:
        long = read.swept.melt("K", var_name="metric", value_name="value").dropna().assign(arm="as saved")
        long["metric"] = long["metric"].replace("state_norm", "norm")
        named = {"norm": "L2 norm of the last hidden state", "change": "change from the smaller count"}
        named = {metric: title for metric, title in named.items() if metric in set(long["metric"])}
        said = "The last hidden state over the model's own loop setting; dashed is the setting it was saved with."
        return found | {"swept": Figure(plots.steps(long, named, s.r0, columns=1), said, read.swept)}
    pairs, measure = judged(read.pairs)
    shown = read.pairs if measure == "accuracy" else pairs
    arms = [arm_name(pairs[0], period) for period in (s.trained, pairs[0].changed)]
    read_off = table(shown)
    counts = [K for K in s.at_loops if K <= s.loops]

    def drawn(frame: pd.DataFrame, y: str, **how) -> alt.TopLevelMixin:
        return plots.against_loops(frame, y, s.r0, points_at=counts, columns=1, **how)

    def of(metric: str) -> pd.DataFrame:
        return read_off[(read_off["metric"] == metric) & read_off["arm"].isin(arms)]

    floors = pd.DataFrame([{"task": pair.task, "value": pair.floor} for pair in shown])
    chart = drawn(of("accuracy"), measure, floors=floors if measure == "accuracy" else None)
    said = f"{measure.capitalize()} against the loop count, intact and norm {arms[1]}; dashed is the trained loop count."
    found["value"] = Figure(chart, said, of("accuracy"))
    dosed = _dosed(s, shown, read_off)
    order = [dose_name(k) for k in sorted(s.periods, key=lambda k: k or math.inf)]
    said = f"{measure.capitalize()} with the boundary norm after every k-th step. Doses of K and sparser are the same arm."
    found["dose"] = Figure(plots.doses(dosed, order, y=measure, columns=1), said, dosed)
    said = f"Entropy of the readout over the whole vocabulary; a uniform one has {math.log2(s.config.vocab_size):.1f} bits."
    found["entropy"] = Figure(drawn(of("entropy_bits"), "readout entropy (bits)", top=None), said, of("entropy_bits"))
    moved = read.updates.dropna().assign(arm=lambda f: f["period"].map(lambda k: arm_name(pairs[0], k)), seed=0)
    said = "How far a loop step moves the raw state, relative to its length before: a loop that settles falls towards 0."
    found["update_size"] = Figure(drawn(moved, "relative change in a step", log_y=True), said, moved)
    return found


def _dosed(s: Subject, shown, read_off: pd.DataFrame) -> pd.DataFrame:
    """The rows of the dose figure: style, task, dose, at, K, value, at r0, 2 r0 and 4 r0."""
    names = {arm_name(shown[0], period): dose_name(period) for period in (*DOSES, s.trained)}
    at = {K: f"K = {K}" for K in (m * s.r0 for m in (1, 2, DOSED)) if K <= s.loops}
    rows = read_off[(read_off["metric"] == "accuracy") & read_off["K"].isin(at)]
    return rows.assign(dose=rows["arm"].map(names), at=rows["K"].map(at))


def write(folder: Path, facts: dict, drawn: dict[str, Figure], made: dict[str, str]) -> None:
    """Write report.json and report.html; the figures' pictures are in the folder already, as <name>.png.

    made: how it was made, such as its command and versions, as name -> text.
    """
    text = json.dumps(_plain(facts | {"made": made, "keys": KEYS}), indent=1, allow_nan=False)
    write_atomic(folder / "report.json", text + "\n")
    pictures = {name: (folder / f"{name}.png").read_bytes() for name in drawn}
    write_atomic(folder / "report.html", page(facts, {k: f.caption for k, f in drawn.items()}, pictures, made))


def made(p: dict, s: Subject, started: float) -> dict[str, str]:
    """How a report was made: its command, versions, machine, date and seconds since `started`, a monotonic time."""
    words = ["python -m lib audit", s.source, "--loops", ",".join(map(str, s.at_loops)), "--tasks", ",".join(p["tasks"])]
    words += ["--dtype", s.dtype, "--device", s.device, "--batch-size", str(s.batch_size), "--n", str(p["n"])]
    machine = hardware()
    return {
        "command": " ".join([*words, "--boundary", str(p["boundary"])]),
        "versions": ", ".join([f"python {platform.python_version()}", *(f"{name} {version(name)}" for name in PACKAGES)]),
        "behaviour version": str(BEHAVIOUR),
        "machine": f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB, {machine['system']}",
        "date": date.today().isoformat(),
        "seconds": f"{time.monotonic() - started:.0f}, without what the run store held already",
    }


def _plain(value):
    """A value as JSON takes it: numpy's numbers as Python's, to 6 digits, and NaN as null."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def page(facts: dict, captions: dict[str, str], pictures: dict[str, bytes], made: dict[str, str]) -> str:
    """The report as one HTML page: verdict, facts, tables, figures, notes, how it was made."""
    parts = [f"<h2>Facts</h2>{_rows([(label, value) for label, value in _facts(facts)])}"]
    for title, key, columns in TABLES:
        if facts.get(key):
            parts.append(f"<h2>{escape(title)}</h2>{_table(facts[key], columns)}")
    shown = "".join(
        f'<figure><img src="data:image/png;base64,{base64.b64encode(pictures[name]).decode()}" alt="{escape(said)}">'
        f"<figcaption>{escape(said)}</figcaption></figure>"
        for name, said in captions.items()
    )
    parts.append(f'<h2>Figures</h2><div class="figures">{shown}</div>')
    if facts["notes"]:
        parts.append(f"<h2>Notes</h2><ul>{''.join(f'<li>{escape(note)}</li>' for note in facts['notes'])}</ul>")
    parts.append(f"<h2>How it was made</h2>{_rows(made.items())}")
    values = {"title": f"Loop contract of {facts['model']}", "verdict": facts["verdict"]}
    escaped = {key: escape(value) for key, value in values.items()}
    return PAGE.substitute(escaped, body="\n".join(parts))


TABLES = (  # title, key of the facts, column -> its heading
    ("By task", "by_task", {"task": "task", "n": "n", "floor": "no-skill floor", "competent": "passes the gate",
     "accuracy_r0": "accuracy at r0", "peak_accuracy": "peak", "peak_loops": "at K", "changed_r0": "changed, at r0",
     "changed_last": "changed, at the largest K"}),
    ("What the change costs: intact minus changed", "costs", {"task": "task", "K": "K", "value": "cost", "low": "low",
     "high": "high", "intact_only": "right intact only", "changed_only": "right changed only", "p": "McNemar p",
     "p_holm": "Holm p"}),
    ("How the changed arm's readout fails", "readout", {"task": "task", "K": "K", "value": "measure", "entropy_bits": "bits",
     "logit_gap": "logit gap", "modal_share": "modal share", "modal_token": "modal token", "modal_text": "reads",
     "in_alphabet_share": "in alphabet", "kind": "kind"}),
    ("Sweep over the model's own loop setting", "swept", {"K": "K", "state_norm": "norm of the last hidden state",
     "change": "change from the next smaller K"}),
)  # fmt: skip


def _facts(f: dict) -> list[tuple[str, str]]:
    """The rows of the facts table that the report has."""
    layers = f"{f['norms_at_boundary']} at the loop boundary, {f['norms_in_layers']} inside looped layers"
    rows = [
        ("model", f"{f['model']}, {f['family']}, {f['parameters']:,} parameters, {f['dtype']} on {f['device']}"),
        ("where the norms sit", f"{layers}, {f['norms_outside']} outside the loop"),
        ("trained loop count r0", f"{f['r0']}"),
    ]
    if "measure" not in f:
        return [*rows, ("read on", f"{f['read_on']}, {f['n']} rows")]
    last = f["largest_loops"]
    ends = [f"{f[k]} [{_span(f[k + '_interval'])}]" for k in ("usable_from", "usable_to")]
    more = " or more" if f["usable_to"] == last else ""
    moved = {arm: f"{f[f'update_{arm}_r0']:.2g} in step {f['r0']}, {f[f'update_{arm}_last']:.2g} in step {last}"
             for arm in ("intact", "changed")}  # fmt: skip
    same = "yes, bit for bit" if f["equal_at_one_loop"] else "no"
    tasks = f"{f['read_on']}{'' if f['tasks'] == [TOKENS] else ': ' + ', '.join(f['tasks'])}, {f['n']} instances"
    cost = f"{f['cost_r0']:.2f} [{_span(f['cost_r0_interval'])}], Holm p {f['cost_r0_p']:.2g}"
    return rows + [
        ("boundary of the intact arm", f["boundary"]),
        ("arms equal at one loop", same),
        ("read on", tasks),
        ("measure", f"{f['measure']}, {f['value_r0']:.2f} at r0"),
        ("usable loop counts", f"from {ends[0]} to {ends[1]}{more}"),
        ("peak", f"{f['peak_value']:.2f} at K = {f['peak_loops']}"),
        (f"norm {f['change']}, cost at r0", cost),
        (f"readout with the norm {f['change']}", f"at K = {last} on {f['failure_task']}: {f['failure']}"),
        ("change of the state, intact", moved["intact"]),
        (f"change of the state, {f['change']}", moved["changed"]),
    ]  # fmt: skip


def _span(interval) -> str:
    return ", ".join(_cell(end) for end in interval)


def _cell(value) -> str:
    """A table's cell as text."""
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return "" if not math.isfinite(value) else f"{value:.2f}" if abs(value) >= 0.1 or not value else f"{value:.2g}"
    return "" if value is None else str(value)


def _rows(rows) -> str:
    body = "".join(f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>' for name, value in rows)
    return f'<table class="facts">{body}</table>'


def _table(rows: list[dict], columns: dict[str, str]) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in columns.values())
    body = "".join(f"<tr>{''.join(f'<td>{escape(_cell(row[key]))}</td>' for key in columns)}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; margin: 0; }
main { max-width: 72rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0.5rem 0; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 1.6rem 0 0.5rem; }
.verdict { font-size: 1.15rem; border-left: 4px solid #0072b2; padding: 0.4rem 0.8rem; background: #f2f7fb; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: 0.25rem 0.8rem 0.25rem 0; border-bottom: 1px solid #ddd; }
.facts th { font-weight: normal; color: #444; width: 14rem; }
.facts td { overflow-wrap: anywhere; }
.figures { columns: 2 26rem; column-gap: 1.5rem; }
figure { margin: 0 0 1.5rem; break-inside: avoid; }
img { max-width: 100%; height: auto; }
figcaption { color: #444; font-size: 0.9rem; }
@media (max-width: 600px) {
  .facts th, .facts td { display: block; width: auto; border: 0; padding: 0; }
  .facts td { margin-bottom: 0.5rem; border-bottom: 1px solid #ddd; padding-bottom: 0.3rem; }
}
</style>
</head>
<body>
<main>
<h1>$title</h1>
<p class="verdict">$verdict</p>
$body
</main>
</body>
</html>
""")
