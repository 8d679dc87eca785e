"""Lists of benchmark tasks with a protocol of their own: params/benchmark/<name>.yaml, checked before anything runs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lib import paths

COUNT = Annotated[int, Field(ge=1)]
WORD = Annotated[str, Field(min_length=1)]


class Entry(BaseModel):
    """One task of a list: lm-eval's name, and the protocol's shots, reported metric and caps in tokens."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    task: WORD  # as lm-eval calls it
    shots: Annotated[int, Field(ge=0)]
    metric: WORD  # as lm-eval calls it, behind a comma the filter: exact_match,flexible-extract
    max_prompt: COUNT  # longer prompts keep their last tokens
    max_new: COUNT | None = None  # tokens generated at most; none where choices are scored
    items: COUNT  # that the protocol has
    runs_code: bool = False  # what the model writes is run
    differs: Annotated[list[WORD], Field(min_length=1)] | None = None  # how lm-eval's task is not the protocol's


class _Suite(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    source: WORD
    tasks: Annotated[dict[WORD, Entry], Field(min_length=1)]


@dataclass(frozen=True)
class Asked:
    """One task that is asked for: the name it has in results, lm-eval's name, and its protocol where it has one."""

    name: str
    task: str
    entry: Entry | None = None


def folder() -> Path:
    """Where the lists are."""
    return paths.params() / "benchmark"


def load(path: Path) -> dict[str, Entry]:
    """A list's entries by the protocol's names, in its order. Raises ValueError naming the file and the key."""
    name = path.relative_to(paths.ROOT) if path.is_relative_to(paths.ROOT) else path
    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{name} is not valid YAML: {str(error).splitlines()[0]}") from None
    try:
        return _Suite.model_validate(given).tasks
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "the file"
        if first["type"] == "extra_forbidden":
            known = Entry if "tasks" in first["loc"] else _Suite
            raise ValueError(f"{name}: {key} is no key of it: it must be one of {', '.join(known.model_fields)}") from None
        if first["type"] == "missing":
            raise ValueError(f"{name}: {key} is missing") from None
        said = first["msg"]
        raise ValueError(f"{name}: {key} is {first['input']!r}: {said[0].lower()}{said[1:]}") from None


def expand(names: list[str]) -> list[Asked]:
    """What names ask for: `axes_paper` its whole list, `axes_paper:gsm8k` one task of it, any other name lm-eval's task.

    Raises ValueError for a name that is empty or asked for twice, and for a task that a list has not.
    """
    lists, asked = {file.stem: file for file in sorted(folder().glob("*.yaml"))}, []
    for name in names:
        suite, colon, one = name.partition(":")
        if suite not in lists:
            asked.append(Asked(name, name))
            continue
        entries = load(lists[suite])
        if colon and one not in entries:
            raise ValueError(f"{suite} has no task {one!r}: it must be one of {', '.join(entries)}")
        asked += [Asked(f"{suite}:{key}", entries[key].task, entries[key]) for key in ([one] if colon else entries)]
    for i, one in enumerate(asked):
        if not one.name:
            raise ValueError("tasks has an empty name: it must be names with commas between, such as arc_challenge,axes_paper")
        if one in asked[:i]:
            raise ValueError(f"tasks has {one.name} twice: each may stand once")
    return asked
