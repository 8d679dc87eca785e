"""Parameter files: complete, flat, and checked against the notebook's own parameters cell before anything runs."""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import ConfigDict, Field, ValidationError, create_model

from lib import paths
from lib.paths import SCALES

TYPES = {
    "int": int,
    "float": float,
    "str": str,
    "bool": bool,
    "list[int]": list[int],
    "list[str]": list[str],
    "list[float]": list[float],
}
POSITIVE = Annotated[float, Field(gt=0, allow_inf_nan=False)]
ZERO_UP = Annotated[float, Field(ge=0, allow_inf_nan=False)]
COUNT = Annotated[int, Field(ge=1)]
HELD = "LOOPED_PARAMS"  # environment variable: values that were read before, as JSON
FAMILIES = ("circuit", "hops")  # that a notebook of its own arms trains on
ALL_FAMILIES = (*FAMILIES, "paragg")
STYLES = ("ouro-1", "ouro-2", "huginn")  # those of `standins`
ARMS = (  # those of `axes_arms`
    *("full", "full_injected", "sandwich", "sandwich_injected", "noise", "shared_hl", "split_hl", "split_hl_x2"),
    *("feedforward", "feedforward_injected", "feedforward_stored"),
)
ARMS_MOE = ("full_moe", "huginn_moe", "feedforward_moe")

# what a value may be, by the name it has in every notebook; a name that is not here has only its type
VALUES = {
    "scale": Literal[SCALES],
    "tasks": Annotated[list[Literal[ALL_FAMILIES]], Field(min_length=1)],
    "styles": Annotated[list[Literal[STYLES]], Field(min_length=1)],
    "arms": Annotated[list[Literal[ARMS]], Field(min_length=1)],
    "arms_moe": Annotated[list[Literal[ARMS_MOE]], Field(min_length=1)],
    "lr_moe": list[POSITIVE],
    "balance": ZERO_UP,
    **dict.fromkeys(("prelude", "coda"), Annotated[int, Field(ge=0)]),
    **dict.fromkeys(("recurrent", "updates", "h_cycles", "l_cycles"), COUNT),
    "arithmetic_depth": Annotated[int, Field(ge=2)],
    **dict.fromkeys(("subjects", "relations", "objects", "letters", "length", "constraints"), COUNT),
    **dict.fromkeys(("modulus", "n_experts", "experts_per_token", "d_expert"), COUNT),
    "dtype": Literal["bfloat16", "float16", "float32", "float64"],
    "shots": Annotated[int, Field(ge=0)],
    "backprop": Annotated[int, Field(ge=0)],
    "exit_entropy": ZERO_UP,
    "lr": list[POSITIVE],
    "device": Literal["cpu", "cuda"],
    "instance": Annotated[int, Field(ge=0)],
    "optimizer": Literal["adamw", "muon"],
    "loop_sampling": Literal["fixed", "poisson_lognormal"],
    "workers": Annotated[int, Field(ge=0)],
    "weight_decay": ZERO_UP,
    "warmup": Annotated[int, Field(ge=0)],
    **dict.fromkeys(("r0", "seeds", "n_test", "d_model", "n_heads", "d_ff", "core", "batch_size"), COUNT),
    **dict.fromkeys(("circuit_steps", "hops_steps", "circuit_depth", "hops_depth"), COUNT),
    **dict.fromkeys(("loops", "steps", "paragg_depth", "text_steps", "text_seeds"), COUNT),
    **dict.fromkeys(("circuit_width", "hops_width", "paragg_width", "paragg_circuit_width"), Annotated[int, Field(ge=2)]),
    **dict.fromkeys((f"{t}_lr_{a}{r}" for t in FAMILIES for a in ("no_norm", "with_norm") for r in ("", "_raw")), POSITIVE),
    **dict.fromkeys((f"{t}_lr" for t in FAMILIES), list[POSITIVE]),
    "refit_lr": POSITIVE,
    "refit_batches": COUNT,
    **dict.fromkeys(("refit_steps_head", "refit_steps_layer"), Annotated[list[COUNT], Field(min_length=1)]),
}


class ParamsError(ValueError):
    """A parameter file is not what its notebook takes; one sentence naming the file, the key and what would be right."""


def notebook_parameters(source: Path) -> dict[str, dict]:
    """The parameters cell of a notebook's .py, which is what runs: {name: {"type": text, "default": text}}."""
    import jupytext  # only here: a notebook need not pay for them
    import papermill

    with tempfile.NamedTemporaryFile(suffix=".ipynb") as file:
        jupytext.write(jupytext.read(source), file.name)
        found = papermill.inspect_notebook(file.name)
    return {k: {"type": v["inferred_type_name"], "default": v["default"]} for k, v in found.items()}


def path_of(notebook: str, scale: str) -> Path:
    """The parameter file of a notebook at a scale. Raises ParamsError when the scale is unknown or the file is absent."""
    if scale not in SCALES:
        raise ParamsError(f"scale is {scale!r}: it must be one of {', '.join(SCALES)}.")
    path = paths.params() / notebook / f"{scale}.yaml"
    if not path.exists():
        have = sorted(p.stem for p in path.parent.glob("*.yaml"))
        raise ParamsError(f"{notebook} has no {scale} scale: params/{notebook}/ holds {', '.join(have) or 'nothing'}.")
    return path


@contextmanager
def held(loaded: dict[str, dict]) -> Iterator[None]:
    """Within it `load` returns these values, by notebook, at their scale, here and in every process that is started, whatever
    becomes of the files."""
    os.environ[HELD] = json.dumps(loaded)
    try:
        yield
    finally:
        del os.environ[HELD]


def changed(loaded: dict[str, dict], scale: str) -> list[str]:
    """The files of these values, by notebook, that say something else by now."""
    files = {notebook: f"params/{notebook}/{scale}.yaml" for notebook in loaded}
    return [file for notebook, file in files.items() if _now(paths.params() / notebook / f"{scale}.yaml") != loaded[notebook]]


def _now(path: Path) -> dict | None:
    try:
        return _given(path)
    except (OSError, ParamsError):
        return None


def load(notebook: str, scale: str) -> dict:
    """The checked parameters of a notebook at a scale. Raises ParamsError, see there."""
    known = json.loads(os.environ.get(HELD, "{}")).get(notebook)
    if known and known["scale"] == scale:
        return known
    path = path_of(notebook, scale)
    values = check(path, notebook_parameters(paths.notebooks() / f"{notebook}.py"))
    if values["scale"] != scale:
        raise ParamsError(f"{_name(path)}: scale is {values['scale']!r}: it must be the file's own, {scale}.")
    return values


def of(namespace: dict) -> dict:
    """The parameters of a running notebook: the annotated names of its parameters cell at their present values.

    namespace: the notebook's globals(). Raises ParamsError naming the first value that is impossible.
    """
    given = {name: namespace[name] for name in namespace["__annotations__"]}
    types = {
        name: {"type": str(kind).removeprefix("<class '").removesuffix("'>")}
        for name, kind in namespace["__annotations__"].items()
    }
    values = _checked("the parameters cell", given, types)
    require_device(values)
    return values


def require_device(values: dict) -> None:
    """Raises ParamsError when the parameters ask for a GPU and torch finds none."""
    if values.get("device") != "cuda":
        return
    import torch  # see _possible

    if not torch.cuda.is_available():
        raise ParamsError(
            f"device is 'cuda' at scale {values['scale']}, and torch finds no GPU on this machine: it must be cpu."
        )


def check(path: Path, schema: dict[str, dict]) -> dict:
    """Read a parameter file and check it against a notebook's parameters: names, types, then values.

    Raises ParamsError for text that is no YAML, and for an unknown, missing, mistyped or impossible value.
    """
    return _checked(_name(path), _given(path), schema)


def _given(path: Path) -> dict:
    name = _name(path)
    try:
        given = yaml.load(path.read_text(encoding="utf-8"), Loader=_Once)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ParamsError(f"{name} is not valid YAML: {str(error).splitlines()[0]}.") from None
    if not isinstance(given, dict) or not all(isinstance(key, str) for key in given):
        raise ParamsError(f"{name} must be lines of `key: value`, one a parameter.")
    return given


def _name(path: Path) -> str:
    return str(path.relative_to(paths.ROOT) if path.is_relative_to(paths.ROOT) else path)


class _Once(yaml.SafeLoader):
    """YAML in which a key may stand only once; PyYAML alone takes the last one without a word."""

    def construct_mapping(self, node, deep=False):
        keys = [self.construct_object(key) for key, _ in node.value]
        if twice := [key for i, key in enumerate(keys) if key in keys[:i]]:
            raise yaml.YAMLError(f"{twice[0]} stands twice")
        return super().construct_mapping(node, deep)


def _checked(name: str, given: dict, schema: dict[str, dict]) -> dict:
    """The values, if every name, type and value is right; `name` is what the sentence calls their source."""
    fields = {key: (VALUES.get(key, TYPES.get(entry["type"], object)), ...) for key, entry in schema.items()}
    model = create_model("Parameters", __config__=ConfigDict(extra="forbid", strict=True), **fields)
    try:
        values = model(**given).model_dump()
    except ValidationError as error:
        raise ParamsError(f"{name}: {_sentence(error.errors()[0], given, schema)}.") from None
    if {"r0", "tasks"} <= values.keys():
        _possible(name, values)
    if "arms" in values:
        _axes(name, values)
    return values


def _possible(name: str, values: dict) -> None:
    """Values that are right one by one must together make models, tasks and test sets (arms trained from scratch)."""
    from lib import experiment  # here, since torch takes seconds to import and most notebooks' parameters need none of it
    from lib.tasks import stratum_size

    if len(set(values["tasks"])) < len(values["tasks"]):
        raise ParamsError(f"{name}: tasks is {values['tasks']}: each may stand once.")
    if "styles" in values:
        return _stand_ins(name, values)
    if unknown := set(values["tasks"]) - set(FAMILIES):
        raise ParamsError(f"{name}: tasks has {unknown.pop()}: this notebook's must be of {', '.join(FAMILIES)}.")
    for task in values["tasks"]:
        try:
            for make in experiment.kinds(values, task).values():
                run = make(0)
            for d in range(1, run.task.max_depth + 1):
                if (size := stratum_size(run.task, d)) < 10 * values["n_test"]:
                    most = size // 10
                    raise ValueError(f"n_test is {values['n_test']}: depth {d} has {size} instances, so at most {most}")
            if "refit_lr" in values:
                _refits(values)
        except ValueError as error:
            raise ParamsError(f"{name}, {task}: {error}.") from None
        if values["warmup"] >= values[f"{task}_steps"]:
            raise ParamsError(
                f"{name}: warmup is {values['warmup']}: it must be below {task}_steps, {values[f'{task}_steps']}."
            )


def _stand_ins(name: str, values: dict) -> None:
    """Raises ParamsError when the values cannot make the stand-ins, their tasks and test sets."""
    from lib import standins  # see _possible
    from lib.tasks import stratum_size

    if len(set(values["styles"])) < len(values["styles"]):
        raise ParamsError(f"{name}: styles is {values['styles']}: each may stand once.")
    try:
        for style in values["styles"]:
            run = standins.run_of(values, style, 0)
        for task in run.task.tasks:
            for d in range(1, task.max_depth + 1):
                if (size := stratum_size(task, d)) < 10 * values["n_test"]:
                    most = f"so at most {size // 10}"
                    raise ValueError(f"n_test is {values['n_test']}: {task.family} of depth {d} has {size} instances, {most}")
        if values["warmup"] >= values["steps"]:
            raise ValueError(f"warmup is {values['warmup']}: it must be below steps, {values['steps']}")
        if values["loops"] < values["r0"]:
            raise ValueError(f"loops is {values['loops']}: it must be at least r0, {values['r0']}")
    except ValueError as error:
        raise ParamsError(f"{name}: {error}.") from None


def _axes(name: str, values: dict) -> None:
    """Raises ParamsError when the values cannot make the axes paper's arms, their tasks and test sets."""
    from lib import axes_arms, group_scores  # see _possible

    try:
        for key in ("arms", "arms_moe"):
            if len(set(values.get(key, ()))) < len(values.get(key, ())):
                raise ValueError(f"{key} is {values[key]}: each may stand once")
            for arm in values.get(key, ()):
                run = axes_arms.run_of(values, arm, 0)
        for arm in values.get("arms_moe", ()):
            if (base := axes_arms.WITH_EXPERTS[arm]) not in values["arms"]:
                raise ValueError(f"arms is {values['arms']}: it must hold {base}, which {arm} of arms_moe is held against")
        try:
            group_scores.sets(run.task, values["n_test"])
        except ValueError as error:
            raise ValueError(f"n_test is {values['n_test']}: {error}") from None
        if values["warmup"] >= values["steps"]:
            raise ValueError(f"warmup is {values['warmup']}: it must be below steps, {values['steps']}")
    except ValueError as error:
        raise ParamsError(f"{name}: {error}.") from None


def _refits(values: dict) -> None:
    """Raises ValueError when the refits that the values describe are impossible."""
    from lib.refit import PARTS, Refit  # see _possible

    for part in PARTS:
        Refit(part, tuple(values[f"refit_steps_{part}"]), values["refit_lr"], values["refit_batches"], values["batch_size"])
    if values["core"] < 2:
        raise ValueError("core is 1: the last of several looped layers is refitted, so it must be at least 2")


def _sentence(error: dict, given: dict, schema: dict) -> str:
    """One pydantic error as a sentence that names the key, its value and what would be right."""
    key, kind, value = error["loc"][0], error["type"], error.get("input")
    if kind == "missing":
        return f"{key} is missing: the notebook takes {', '.join(schema)}"
    if kind == "extra_forbidden":
        return f"{key} is not a parameter of the notebook, which takes {', '.join(schema)}"
    if kind == "float_type" and isinstance(value, str):
        try:
            return f"{key} is the text {value!r}: write {_decimal(value)}, with a decimal point"
        except ValueError:
            pass
    if kind == "literal_error":
        return f"{key} is {value!r}: it must be {error['ctx']['expected']}"
    return f"{key} is {value!r}: {error['msg'][0].lower()}{error['msg'][1:]} (the notebook's type is {schema[key]['type']})"


def _decimal(text: str) -> str:
    """A number's text as YAML 1.1 reads a float: 1e-3 -> 1.0e-3. Raises ValueError when it is no number."""
    mantissa, _, exponent = f"{float(text):e}".partition("e")
    return f"{float(mantissa)}e{int(exponent):+d}"
