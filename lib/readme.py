"""README.md's generated parts: every number in it stands between two markers and comes from outputs/."""

import json

import pandas as pd

from lib import claims, doctor, paths
from lib.paths import SCALES


def render(text: str) -> str:
    """README.md's text with each part between `<!-- name -->` and `<!-- /name -->` made anew.

    Raises ValueError when a part's markers are missing.
    """
    for name, make in {"claims": claims_table, "facts": facts, "bench": bench}.items():
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
    """The benchmark's ratios, from outputs/bench.json."""
    file = paths.outputs() / "bench.json"
    if not file.exists():
        return "Not measured yet: `make bench` writes it."
    data = json.loads(file.read_text(encoding="utf-8"))
    lines = ["| measured | median | against | aim |", "|---|---|---|---|"]
    lines += [f"| {r['name']} | {r['median']:.3g} {r['unit']} | {r['against']} | {r['aim']} |" for r in data["rows"]]
    return "\n".join([*lines, "", f"Measured on {data['machine']}."])
