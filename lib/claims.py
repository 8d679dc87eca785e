"""The papers' claims: reading the rules, judging reported numbers, and the verdict tables.

params/claims.yaml holds one entry for every number and statement that the replication answers for.
A notebook judges its entries; this module keeps the row of every entry, judged or not.
"""

import hashlib
import json
import math
import textwrap
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import pandas as pd
import yaml

from lib.store import write_atomic

CLAIMS = Path(__file__).parents[1] / "params" / "claims.yaml"
VERDICTS = ("replicated", "same_direction", "not_replicated", "inconclusive", "not_competent", "out_of_reach")
COLUMNS = "id section kind verdict paper ours n low high rule notebook reason".split()
POINTS = "id task arm K value low high n p_raw p_holm delta".split()
NOT_BUILT = "not built yet"
OTHER_RULES = "judged by rules"
SCALES = ("paper", "released_cpu", "overnight", "laptop")  # highest first; smoke never speaks for the replication
TAKES = {
    "released": "the published weights",
    "19M": "{seeds} seeds an arm of models from 19M parameters on a GPU",
    "pretrain": "pretraining runs of 730M to 8B parameters, or their published checkpoints",
}


@dataclass(frozen=True)
class Judgement:
    """One claim's verdict: `ours` is what was measured, n the units behind it, points the cells."""

    id: str
    verdict: str
    ours: str
    n: int
    low: float | None = None
    high: float | None = None
    reason: str = ""
    points: list[dict] = field(default_factory=list)

    def __post_init__(self):
        if self.verdict not in VERDICTS:
            raise ValueError(f"verdict of {self.id} is {self.verdict!r}; it must be one of {', '.join(VERDICTS)}")


_held: dict[Path, str] = {}


def hold(path=None) -> None:
    """Keep to the rules as they stand now until this process ends, so that all it judges and records is by the same ones."""
    path = Path(path or CLAIMS)
    _held[path] = path.read_text(encoding="utf-8")


def _read(path) -> dict:
    path = Path(path or CLAIMS)
    text = _held.get(path) or path.read_text(encoding="utf-8")
    try:
        content = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(content, dict) or not isinstance(content.get("claims"), list):
        raise ValueError(f"{path} has no list named claims")
    return content


def load(path=None) -> dict[str, dict]:
    """The entries of claims.yaml by id, in file order.

    Raises ValueError naming the file when an entry lacks an id or a kind, or an id stands twice.
    """
    entries = {}
    for number, entry in enumerate(_read(path)["claims"], 1):
        where = f"{path or CLAIMS}: claim {number}"
        if not isinstance(entry, dict) or not entry.get("id"):
            raise ValueError(f"{where} has no id")
        if entry.get("kind") not in ("exact", "order", "value"):
            raise ValueError(f"{where}, {entry['id']}, needs a kind: exact, order or value")
        if entry["id"] in entries:
            raise ValueError(f"{where} repeats the id {entry['id']}")
        entries[entry["id"]] = entry
    return entries


def rules_hash(path=None) -> str:
    """First 12 hex digits of the sha256 of the parsed rules as canonical JSON; comments do not matter."""
    return hashlib.sha256(json.dumps(_read(path), sort_keys=True).encode()).hexdigest()[:12]


def worst(verdicts) -> str:
    """The worst of the competent cells: not_replicated, inconclusive, same_direction, replicated.

    not_competent only when no cell is competent. Raises ValueError when empty or on another verdict.
    """
    order = ("not_replicated", "inconclusive", "same_direction", "replicated", "not_competent")
    found = sorted(set(verdicts), key=order.index) if set(verdicts) <= set(order) else []
    if not found:
        raise ValueError(f"the worst of {list(verdicts)} is undefined; cells are judged {', '.join(order)}")
    return found[0]


def _plain(value):
    """A missing value as None, a numpy scalar as Python's own."""
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and math.isnan(value) else value


def _join(*texts: str) -> str:
    return "; ".join(filter(None, texts))


def point(id: str, **cells) -> dict:
    """One cell behind a verdict, with every key of POINTS; missing and NaN values are None."""
    if unknown := set(cells) - set(POINTS):
        raise ValueError(f"a point has no {', '.join(sorted(unknown))}; its keys are {', '.join(POINTS)}")
    return {"id": id} | {key: _plain(cells.get(key)) for key in POINTS[1:]}


def as_result(judgements, path=None) -> dict:
    """The part of a notebook's result.json that `collect` reads: verdicts, points and rules_hash."""
    rows = [{key: _plain(v) for key, v in asdict(j).items()} for j in judgements]
    points = [cell for row in rows for cell in row.pop("points")]
    return {"verdicts": rows, "points": points, "rules_hash": rules_hash(path)}


def render(value) -> str:
    """A reported or measured value in a few characters; nested lists and dicts keep their shape."""
    if isinstance(value, dict):
        return "; ".join(f"{key} {render(v)}" for key, v in value.items())
    if isinstance(value, (list, tuple, np.ndarray)):
        return ", ".join(f"({render(v)})" if isinstance(v, (list, tuple)) else render(v) for v in value)
    value = _plain(value)
    if not isinstance(value, float):
        return "-" if value is None else str(value)
    return f"{value:.1e}" if 0 < abs(value) < 1e-3 else f"{value:.3f}" if abs(value) < 10 else f"{value:.4g}"


def _axis(claim: dict, paper: list) -> list[tuple[str, str | None]]:
    """(label, metric or None) of each element of a list: its metric, or its place on the claim's axis."""
    metric = claim.get("metric")
    if isinstance(metric, list) and len(metric) == len(paper) and not any(isinstance(v, list) for v in paper):
        return [(name, name) for name in metric]
    for key in ("K", "every", "steps"):
        if isinstance(claim.get(key), list) and len(claim[key]) == len(paper):
            return [(f"{key}={place}", None) for place in claim[key]]
    return [(f"entry {number}", None) for number in range(1, len(paper) + 1)]


def _entries(claim: dict, paper, ours, label: str = "", metric: str = ""):
    """Yields (label, metric, paper, ours) of every reported number; an unmeasured one has ours None."""
    if isinstance(paper, (dict, list)):
        same = type(ours) is type(paper) and len(ours) == len(paper)
        if ours is not None and not (same and (isinstance(paper, list) or set(ours) == set(paper))):
            raise ValueError(f"{claim['id']}: what was measured has not the shape of {render(paper)}")
        keyed = isinstance(paper, dict)
        names = [(str(key), None) for key in paper] if keyed else _axis(claim, paper)
        for key, (name, its_metric) in zip(paper if keyed else range(len(paper)), names, strict=True):
            inner = None if ours is None else ours[key]
            yield from _entries(claim, paper[key], inner, f"{label} {name}".strip(), its_metric or metric)
    elif paper is not None:  # null = not reported
        whole = claim.get("metric")
        yield label, metric or (whole if isinstance(whole, str) else ""), paper, ours


def _within(paper, ours: np.ndarray, slack: float | None) -> bool:
    """Whether ours lies in paper, a number or the text "low to high", widened by slack (None: 15 %)."""
    ends = [float(end) for end in str(paper).split(" to ")]
    under, over = (0.15 * abs(end) if slack is None else slack for end in (ends[0], ends[-1]))
    rounding = 1e-9 * max(map(abs, ends))
    return bool(np.all((ours >= ends[0] - under - rounding) & (ours <= ends[-1] + over + rounding)))


def judge_value(claim: dict, ours, at_paper_scale: bool, n: int, reason: str = "") -> Judgement:
    """Judges a reported number; `ours` has the shape of the claim's value, None where not measured.

    Away from the paper's scale: out_of_reach, with what it would take. At it: replicated when every
    number lies within 0.02 (released weights 0.05) on accuracies and their floors, 15 % relative on
    all else; not_replicated at the first that does not; inconclusive when one was not measured. A
    text "a to b" is a range, and ours may be one number or several. n counts seeds or instances.
    Raises ValueError on a claim of another kind or a measurement of another shape.
    """
    if claim["kind"] != "value":
        raise ValueError(f"{claim['id']} is of kind {claim['kind']}; only a value is judged by tolerance")
    entries = list(_entries(claim, claim["value"], ours))

    def judged(verdict, why):
        return Judgement(claim["id"], verdict, render(ours), n, reason=_join(why, reason))

    if not at_paper_scale:
        see = f"; the direction is judged as {claim['see']}" if claim.get("see") else ""
        takes = TAKES[claim["paper_scale"]].format(seeds=claim.get("seeds", 16))
        return judged("out_of_reach", f"takes {takes}{see}")
    slack = 0.05 if claim["paper_scale"] == "released" else 0.02
    missing = []
    for label, metric, paper, measured in entries:
        found = np.array([_plain(v) for v in np.atleast_1d(measured)], dtype=float)
        if np.isnan(found).any():
            missing.append(label or claim["id"])
        elif not _within(paper, found, slack if "accuracy" in metric or "floor" in metric else None):
            return judged("not_replicated", f"{label or 'value'}: {render(measured)} against {render(paper)}")
    verdict = "inconclusive" if missing else "replicated"
    return judged(verdict, f"not measured: {', '.join(missing)}" if missing else "")


def row(claim: dict, judgement: Judgement | None, notebook: str) -> dict:
    """One line of claims.csv, keys COLUMNS; without a judgement it is out_of_reach, not built yet."""
    every = dict.fromkeys(COLUMNS) | {"verdict": "out_of_reach", "ours": "", "reason": NOT_BUILT}
    every |= {"rule": "within tolerance at the paper's scale", "notebook": notebook}
    every |= asdict(judgement) if judgement else {}
    stated = f"below {claim['bound']}" if "bound" in claim else "holds"
    every |= claim | {"paper": render(claim["value"]) if claim.get("value") is not None else stated}
    return {column: _plain(every[column]) for column in COLUMNS}


def _result(file: Path, claims: dict, now: str) -> tuple[list[Judgement], list[dict]]:
    """The judgements and points of one result.json; ValueError naming the file when it cannot be read."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        verdicts = [Judgement(**verdict) for verdict in data.get("verdicts", [])]
        points = [point(**cell) for cell in data.get("points", [])]
        if unknown := [j.id for j in verdicts if j.id not in claims]:
            raise ValueError(f"it judges {unknown[0]}, which is no claim of the rules")
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} cannot be read as a result: {error}") from None
    if data.get("rules_hash") != now:
        stale = f"{OTHER_RULES} {data.get('rules_hash')}, now {now}"
        verdicts = [replace(j, reason=_join(j.reason, stale)) for j in verdicts]
    return verdicts, points


def collect(scale_folder, claims_path=None) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Reads <scale_folder>/<notebook>/result.json of every notebook.

    Returns one row for every claim, in the order of claims.yaml (columns COLUMNS), and all points
    (columns POINTS). A verdict given under other rules says so in its reason. Raises ValueError
    naming the file when it cannot be read, judges an unknown claim, or one judged elsewhere.
    """
    claims, now = load(claims_path), rules_hash(claims_path)
    judged, cells = {}, []
    for file in sorted(Path(scale_folder).glob("*/result.json")):
        verdicts, points = _result(file, claims, now)
        for j in verdicts:
            if j.id in judged:
                raise ValueError(f"{file} judges {j.id}, which {judged[j.id][1]} judges already")
            judged[j.id] = (j, file.parent.name)
        cells += points
    rows = [row(claim, *judged.get(id, (None, ""))) for id, claim in claims.items()]
    number = {"low": float, "high": float, "n": "Int64"}
    of_points = number | dict.fromkeys(("value", "p_raw", "p_holm", "delta"), float)
    frame = pd.DataFrame(rows, columns=COLUMNS, dtype=object).astype(number)
    return frame, pd.DataFrame(cells, columns=POINTS, dtype=object).astype(of_points)


def write(scale_folder) -> pd.DataFrame:
    """Writes claims.csv and claims_points.csv of a scale, whole or not at all; returns the claims' frame."""
    frame, points = collect(scale_folder)
    Path(scale_folder).mkdir(parents=True, exist_ok=True)
    for name, content in (("claims.csv", frame), ("claims_points.csv", points)):
        write_atomic(Path(scale_folder) / name, content.to_csv(index=False, float_format="%.6g"))
    return frame


def _text(value) -> str:
    return "" if pd.isna(value) else f"{value:g}" if isinstance(value, float) else str(value)


def table(frame: pd.DataFrame) -> str:
    """The verdict table as plain text, one claim a line of at most 140 columns."""
    widths = {"id": 35, "section": 7, "verdict": 14, "paper": 28, "ours": 41, "n": 5}
    lines = []
    for cells in [widths, *frame[list(widths)].map(_text).values.tolist()]:
        sized = zip(cells, widths.values(), strict=True)
        lines.append("  ".join((t if len(t) <= w else t[: w - 1] + "…").ljust(w) for t, w in sized).rstrip())
    return "\n".join(lines)


def _short(claim: dict) -> str:
    metric = claim.get("metric")
    named = " and ".join(metric) if isinstance(metric, list) else metric
    counts = f"K = {render(claim['K'])}" if claim.get("K") else None
    parts = filter(None, (named, claim.get("contrast"), claim.get("arm"), claim.get("task"), counts))
    said = claim.get("statement") or ", ".join(parts).replace("_", " ")
    return textwrap.shorten(said, 120, placeholder=" ...")


def markdown(frames: dict[str, pd.DataFrame], claims_path=None) -> str:
    """The README's table from the frames by scale: each claim at the highest scale that judged it, judged ones first.

    Smoke results never count. Claims that no scale has built follow in one line, by section.
    """
    judged, out_of_reach = [], []
    unbuilt: dict[str, list[str]] = {}
    by_scale = [(scale, frames[scale].set_index("id")) for scale in SCALES if scale in frames]
    for id, claim in load(claims_path).items():
        rows = [(scale, frame.loc[id]) for scale, frame in by_scale if id in frame.index]
        built = [(scale, r) for scale, r in rows if r["reason"] != NOT_BUILT]
        if not built:
            unbuilt.setdefault(str(claim["section"]), []).append(id)
            continue
        scale, r = next((b for b in built if b[1]["verdict"] != "out_of_reach"), built[0])
        link = f"[{r['notebook']}](outputs/{scale}/{r['notebook']}/notebook.ipynb)"
        cells = [f"`{id}` {_short(claim)}", *(r[c] for c in ("paper", "ours", "n", "verdict")), scale, link]
        line = "| " + " | ".join(_text(cell).replace("|", "\\|") for cell in cells) + " |"
        (out_of_reach if r["verdict"] == "out_of_reach" else judged).append(line)
    lines = ["| claim | paper | ours | n | verdict | scale | notebook |", "|---|---|---|---|---|---|---|"]
    lines += judged + out_of_reach
    if unbuilt:
        sections = "; ".join(f"{section}: {', '.join(ids)}" for section, ids in unbuilt.items())
        lines += ["", f"Not built yet: {sections}."]
    return "\n".join(lines) + "\n"
