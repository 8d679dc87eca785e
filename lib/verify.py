"""The committed verdicts held against the committed tables: `python -m lib verify`, and which of them a run moved.

What the rules say of a notebook's tables (`judged_again`) is held against its result.json; that against claims.csv, README.md
and the report. Tables keep six significant digits, so numbers are compared to about five. Bootstraps draw from fixed seeds, so
nothing else differs.
"""

import json
import re
import subprocess
import sys
from decimal import Decimal
from io import StringIO
from pathlib import Path

import pandas as pd

from lib import claims, paths
from lib.judged_again import KEPT, NOTEBOOKS, RECORDED, Tables

CLOSE = 1e-5  # of a number, or of 1 where that is more: tables keep six digits, and differences of theirs fewer
P_CLOSE = 0.1  # of a p-value: accuracies that a rounding error set apart tie in a table, and the exact p moves with ties


def of_notebook(folder: Path) -> list[str]:
    """A sentence on every difference between a notebook's result.json and what its tables say under the present rules."""
    file, name = folder / "result.json", folder.name
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
        verdicts, points, judged_by = (result[key] for key in ("verdicts", "points", "rules_hash"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [f"{_near(file)} cannot be read as a result: {error!r}."]
    if not (verdicts or name in NOTEBOOKS):
        return []
    if name not in NOTEBOOKS:
        return [f"{_near(file)} judges {verdicts[0]['id']}, and lib/verify.py does not know how."]
    found = [] if judged_by == claims.rules_hash() else [_other_rules(file, judged_by)]
    missing = [f"{kept}.csv" for kept in KEPT[name].split() if not (folder / f"{kept}.csv").exists()]
    if missing:
        return [
            *found,
            *(f"{_near(folder / table)} is missing, so {_ids(verdicts)} cannot be judged again." for table in missing),
        ]
    if result["params"].get("models"):  # a released model's instances are not to be had without it
        return found
    try:
        made = claims.as_result(NOTEBOOKS[name](Tables(folder, result)))
    except (ValueError, KeyError, IndexError, OSError, TypeError) as error:
        told = error.args[0] if isinstance(error, ValueError) and error.args else repr(error)
        return [*found, f"The tables of {_near(folder)} cannot be judged again for {_ids(verdicts)}: {told}."]
    return found + _verdicts(file, verdicts, made["verdicts"]) + _points(file, points, made["points"])


def _other_rules(file: Path, judged_by: str) -> str:
    return f"{_near(file)} was judged by rules {judged_by}, and params/claims.yaml holds {claims.rules_hash()}."


def _ids(verdicts: list[dict]) -> str:
    return ", ".join(verdict["id"] for verdict in verdicts)


def _near(path: Path) -> str:
    return str(path.relative_to(paths.ROOT)) if path.is_relative_to(paths.ROOT) else str(path)


def _verdicts(file: Path, kept: list[dict], made: list[dict]) -> list[str]:
    by_id = {verdict["id"]: verdict for verdict in made}
    known = {verdict["id"] for verdict in kept}
    found = [
        f"{id} is judged by the tables of {_near(file.parent)} and not in {_near(file)}." for id in by_id if id not in known
    ]
    for old in kept:
        if (new := by_id.get(old["id"])) is None:
            found.append(f"{old['id']} is judged in {_near(file)} and not by its tables.")
            continue
        for column in old:
            if not same(old[column], new[column]):
                said = f"{column} is {_show(old[column])} in {_near(file)} and {_show(new[column])} by its tables"
                found.append(f"{old['id']}: {said}.")
    return found


def _points(file: Path, kept: list[dict], made: list[dict]) -> list[str]:
    """A sentence for every claim and column, on the first of its cells that differ."""
    found, apart = [], {}
    for id in dict.fromkeys(cell["id"] for cell in kept + made):
        old, new = ([cell for cell in cells if cell["id"] == id] for cells in (kept, made))
        if len(old) != len(new):
            found.append(f"{id}: {_near(file)} has {len(old)} points and its tables give {len(new)}.")
            continue
        for was, now in zip(old, new, strict=True):
            for column in was:
                close = same_p if column.startswith("p_") else same
                if not close(was[column], now[column]):
                    apart.setdefault((id, column), []).append((was, now))
    for (id, column), ((was, now), *others) in apart.items():
        place = ", ".join(str(was[key]) for key in ("task", "arm", "K") if was[key] is not None)
        said = f"{column} of {place} is {_show(was[column])} in {_near(file)} and {_show(now[column])} by its tables"
        found.append(f"{id}: {said}{f', as are {len(others)} more of its points' if others else ''}.")
    return found


def _show(value) -> str:
    return "nothing" if _absent(value) else f"{value:.6g}" if isinstance(value, float) else repr(value)


def _absent(value) -> bool:
    return value is None or value == "" or (not isinstance(value, str) and bool(pd.isna(value)))


def same(old, new) -> bool:
    """Whether two values of a verdict agree to the digits that tables keep; a text, to the last digit of each number in it."""
    if _absent(old) or _absent(new):
        return _absent(old) and _absent(new)
    if isinstance(old, str) or isinstance(new, str):
        return old == new or _same_text(str(old), str(new))
    return abs(old - new) <= CLOSE * max(1.0, abs(old))


def same_p(old, new) -> bool:
    """Whether two p-values agree but for ties: within a tenth, on the same side of 0.05."""
    if _absent(old) or _absent(new):
        return _absent(old) and _absent(new)
    return abs(old - new) <= P_CLOSE * max(old, new) and (old < 0.05) == (new < 0.05)


NUMBER = re.compile(r"([-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?)")


def _same_text(old: str, new: str) -> bool:
    old, new = NUMBER.split(old), NUMBER.split(new)
    return old[::2] == new[::2] and all(map(_same_number, old[1::2], new[1::2]))


def _same_number(old: str, new: str) -> bool:
    """Whether two numbers differ by one in the last decimal at most; whole numbers must be equal."""
    a, b = Decimal(old), Decimal(new)
    last = max(a.as_tuple().exponent, b.as_tuple().exponent)
    return a == b or (last < 0 and abs(a - b) <= Decimal(1).scaleb(last))


def of_claims(folder: Path) -> list[str]:
    """A sentence on every difference between claims.csv or claims_points.csv and what `claims.collect` makes of the results."""
    try:
        made = dict(zip(("claims.csv", "claims_points.csv"), claims.collect(folder), strict=True))
    except ValueError as error:
        return [f"{error}."]
    found = []
    for name, frame in made.items():
        file, text = folder / name, frame.to_csv(index=False, float_format="%.6g")
        if not file.exists():
            found.append(f"{_near(file)} is missing.")
        elif file.read_text(encoding="utf-8") != text:
            found += _rows(file, text) or [f"{_near(file)} is not written as the results are."]
    return found


def _rows(file: Path, text: str) -> list[str]:
    how = {"dtype": str, "keep_default_na": False}
    try:
        kept, made = pd.read_csv(file, **how), pd.read_csv(StringIO(text), **how)
    except ValueError as error:
        return [f"{_near(file)} cannot be read: {error}."]
    if list(kept.columns) != list(made.columns):
        return [f"{_near(file)} has columns {', '.join(kept)}, and should have {', '.join(made)}."]
    if list(kept["id"]) != list(made["id"]):
        return [f"{_near(file)} has {len(kept)} rows, and not the {len(made)} of the results in their order."]
    apart = (kept != made).to_numpy().nonzero()
    said = "{}: {} is {} in {} and {} by the results"
    return [
        said.format(kept["id"][i], kept.columns[j], _show(kept.iat[i, j]), _near(file), _show(made.iat[i, j])) + "."
        for i, j in zip(*apart, strict=True)
    ]


def of_readme(file: Path) -> list[str]:
    """A sentence on every line that README.md's generated parts lack or have too much."""
    from lib import readme

    old = file.read_text(encoding="utf-8")
    try:
        new = readme.render(old)
    except (ValueError, OSError, KeyError) as error:
        return [f"{_near(file)} cannot be held against the results: {error}"]
    if old == new:
        return []
    kept, made = old.splitlines(), new.splitlines()
    found = [f"{_near(file)} lacks, of the results: {line}" for line in made if line not in set(kept)]
    found += [f"{_near(file)} has, against the results: {line}" for line in kept if line not in set(made)]
    return found or [f"{_near(file)} has the results in another order."]


def of_report(folder: Path) -> list[str]:
    """A sentence on every difference between report/claims.json, where there is one, and the results."""
    file = folder / "report/claims.json"
    if not file.exists():
        return []
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))
        kept = {row["id"]: row for row in rows}
        made = json.loads(claims.collect(folder)[0].to_json(orient="records"))
    except (ValueError, KeyError, TypeError) as error:
        return [f"{_near(file)} cannot be held against the results: {error!r}."]
    found = [f"{id} stands in {_near(file)} and is no claim of the rules." for id in kept if id not in {r["id"] for r in made}]
    for row in made:
        if (old := kept.get(row["id"])) is None:
            found.append(f"{row['id']} is missing in {_near(file)}.")
            continue
        for column in set(row) & set(old):
            if not same(old[column], row[column]):
                said = f"{column} is {_show(old[column])} in {_near(file)} and {_show(row[column])} by the results"
                found.append(f"{row['id']}: {said}.")
    return found


def differences(folder: Path, readme: Path | None = None) -> list[str]:
    """All differences of a scale's folder, a sentence each; none where its verdicts are what its tables say."""
    results = sorted(folder.glob("*/result.json"))
    if not results:
        return [f"{_near(folder)} holds no results."]
    found = [said for file in results for said in of_notebook(file.parent)]
    return found + of_claims(folder) + of_report(folder) + (of_readme(readme) if readme else [])


def run(scale: str = "laptop") -> int:
    """Print what differs of a scale's results, on stderr, and what was checked; 1 where anything differs.

    README.md is of the repository's own outputs, and checked with these alone. Raises ValueError on an unknown scale.
    """
    if scale not in paths.SCALES:
        raise ValueError(f"scale is {scale!r}: it must be one of {', '.join(paths.SCALES)}.")
    folder = paths.outputs() / scale
    own = paths.outputs() == paths.ROOT / "outputs"
    found = differences(folder, paths.ROOT / "README.md" if own else None)
    for said in found:
        print(said, file=sys.stderr)
    for name, (what, table) in RECORDED.items():
        if (folder / name / "result.json").exists() and not (table and (folder / name / table).exists()):
            print(f"{name}: {what} are checked against result.json alone.")
    told = f"{len(found)} differences" if found else "every verdict is what the tables say"
    print(f"{_near(folder)}: {told}.")
    return 1 if found else 0


# ---- what a run moved ----------------------------------------------------------------------------------


def committed(scale: str) -> pd.DataFrame | None:
    """The claims of a scale as the last commit has them; else as they stand in the outputs folder; None where neither is."""
    show = ["git", "show", f"HEAD:outputs/{scale}/claims.csv"]
    try:
        done = subprocess.run(show, cwd=paths.ROOT, capture_output=True, text=True, check=True)
        return _read_claims(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError, KeyError):
        file = paths.outputs() / scale / "claims.csv"
    try:
        return _read_claims(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError):
        return None


def _read_claims(text: str) -> pd.DataFrame:
    return pd.read_csv(StringIO(text))[claims.COLUMNS]


def moved(before: pd.DataFrame, after: pd.DataFrame) -> list[str]:
    """A sentence on every verdict that is another one after, with its numbers, and one that counts the other changed numbers.

    Frames as `claims.collect` gives them; a claim that stands in one alone is told as such.
    """
    old, new = ({row["id"]: row for row in frame.to_dict("records")} for frame in (before, after))
    found = [f"{id} is no claim any more, and was {old[id]['verdict']}." for id in old if id not in new]
    changed = 0
    for id, row in new.items():
        if id not in old:
            found.append(f"{id} is new: {row['verdict']}, {_numbers(row)}.")
        elif row["verdict"] != old[id]["verdict"]:
            was = f"{old[id]['verdict']} ({_numbers(old[id])})"
            found.append(f"{id} moved from {was} to {row['verdict']} ({_numbers(row)}).")
        else:
            changed += not all(same(old[id][column], row[column]) for column in ("ours", "n", "low", "high"))
    if changed:
        found.append(
            f"{changed} {'claims keep their verdict' if changed > 1 else 'claim keeps its verdict'} with other numbers."
        )
    return found


def _numbers(row: dict) -> str:
    ends = "" if _absent(row["low"]) else f", interval {row['low']:.3g} to {row['high']:.3g}"
    return f"ours {'-' if _absent(row['ours']) else row['ours']}{ends}"
