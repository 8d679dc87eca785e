"""README.md's generated parts: every number in it stands between two markers and comes from outputs/."""

import json

import pandas as pd

from lib import claims, doctor, paths
from lib.paths import SCALES


def render(text: str) -> str:
    """README.md's text with each part between `<!-- name -->` and `<!-- /name -->` made anew.

    Raises ValueError when a part's markers are missing.
    """
    for name, make in {"claims": claims_table, "scaling": scaling, "facts": facts, "bench": bench}.items():
        before, opening, rest = text.partition(f"<!-- {name} -->\n")
        _, closing, after = rest.partition(f"<!-- /{name} -->")
        if not (opening and closing):
            raise ValueError(f"README.md has no part between <!-- {name} --> and <!-- /{name} -->.")
        text = before + opening + make().strip() + "\n" + closing + after
    return text


def claims_table() -> str:
    """The table of claims, and below it which of its results are older than the code."""
    folders = {s: paths.outputs() / s for s in SCALES if (paths.outputs() / s / "claims.csv").exists()}
    frames = {s: pd.read_csv(f / "claims.csv", keep_default_na=False, na_values={"n": [""]}) for s, f in folders.items()}
    table = claims.markdown(frames)
    old = [entry for entry in doctor.stale() if entry[0] in claims.SCALES]
    return table + "".join(f"\n**Stale:** {doctor.told(entry)}." for entry in old)


def scaling() -> str:
    """What pretraining each published recipe takes, from its configuration."""
    from lib import cost_training

    return cost_training.markdown()


def facts() -> str:
    """What the committed runs were and what they cost, one line a notebook."""
    lines = [
        "| notebook | scale | models | core-minutes of training | machine | date |",
        "|---|---|---|---|---|---|",
    ]
    for scale in claims.SCALES:
        for file in sorted((paths.outputs() / scale).glob("*/result.json")):
            r = json.loads(file.read_text(encoding="utf-8"))
            where = f"[{r['notebook']}](outputs/{scale}/{r['notebook']}/notebook.ipynb)"
            machine = f"{r['hardware']['processor']}, {r['hardware']['cores']} cores"
            cells = (
                where,
                scale,
                r["figures"].get("models", 0),
                f"{r['training_core_seconds'] / 60:.0f}",
                machine,
                r["date"],
            )
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def bench() -> str:
    """The benchmark's medians and aims, from outputs/bench.json; then by how much an aim was missed, and why."""
    file = paths.outputs() / "bench.json"
    sections = json.loads(file.read_text(encoding="utf-8")).get("sections") if file.exists() else None
    if not sections:
        return "Not measured yet: `make bench` writes it."
    lines, notes, machines = ["| measured | median | against | aim |", "|---|---|---|---|"], [], {}
    for name, section in sections.items():
        machines.setdefault(section["machine"], []).append(name)
        for r in section["rows"]:
            aim, share = aim_of(r)
            lines.append(f"| {r['name']} | {r['median']:.3g} {r['unit']} | {r['against']} | {aim} |")
            if share:
                notes.append(f"- Missed by {share:.0%}: {r['name']}. The reason: {r['why'] or 'not known'}.")
            if r["note"]:
                notes.append(f"- {r['name']}: {r['note']}.")
    where = [f"{machine} ({', '.join(names)})" if len(machines) > 1 else machine for machine, names in machines.items()]
    return "\n".join([*lines, "", *notes, *([""] if notes else []), f"Measured on {'; '.join(where)}."])


def aim_of(r: dict) -> tuple[str, float]:
    """A benchmark row's aim in words, and the share of the aim by which the median misses it, 0 where it does not."""
    if (aim := r["at_least"]) is not None:
        return f"at least {aim:g}", max(0.0, 1 - r["median"] / aim)
    if (aim := r["at_most"]) is not None:
        return f"at most {aim:g}", max(0.0, r["median"] / aim - 1)
    return "", 0.0
