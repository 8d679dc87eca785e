"""A pretraining recipe: params/pretrain/<name>.yaml as a checked value.

A file may name a `base` beside it, whose values it overrides key by key. Its `model` is either values of LoopedConfig or a
checkpoint of the catalogue, whose configuration is taken.
"""

import json
from pathlib import Path
from typing import Annotated, Literal

import yaml
from huggingface_hub.errors import StrictDataclassError
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lib import objectives, paths, released, training
from lib.config import LoopedConfig

ENGINES = ("auto", "ddp", "fsdp")
COUNT, ZERO_UP = Annotated[int, Field(ge=1)], Annotated[int, Field(ge=0)]
POSITIVE = Annotated[float, Field(gt=0, allow_inf_nan=False)]
SHARE = Annotated[float, Field(ge=0, le=1)]
WEIGHT = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Strict(BaseModel):
    """Unknown keys and values of another type are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Data(Strict):
    """Which rows: a corpus folder, or, without one, the text that comes with Python, tokenised into `vocabulary` tokens."""

    folder: str = ""
    vocabulary: Annotated[int, Field(ge=259)] = 2048  # 259: bytes alone
    length: Annotated[int, Field(ge=2)] = 256  # tokens a row


class Recipe(Strict):
    """How a model is pretrained. A row is a sequence of the corpus's length; a step takes `rows` of them, over all devices."""

    model: dict | str
    data: Data = Data()
    steps: COUNT  # over which the learning rate runs its course
    stop: ZERO_UP = 0  # the step to end after; 0: steps
    rows: COUNT
    rows_per_device: COUNT  # at once; gradients of the others are accumulated
    seed: ZERO_UP = 0
    lr: POSITIVE  # peak
    warmup: ZERO_UP = 0  # steps
    lr_start: SHARE = 0.0  # share of the peak that the warm-up starts from
    lr_end: SHARE = 0.0  # and that the cosine ends at
    betas: Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)] = [0.9, 0.95]
    eps: POSITIVE = 1e-8
    weight_decay: WEIGHT = 0.1
    decay: Literal["all", "matrices"] = "matrices"  # all: every parameter, norms and embeddings too
    clip: POSITIVE = 1.0  # largest gradient norm
    init: Literal["fan_in", "truncated_normal"] = "fan_in"  # of matrices: the model's own, or of init_std, cut at three
    init_std: POSITIVE = 0.02
    loop_sampling: Literal[training.LOOP_SAMPLING] = "fixed"  # poisson_lognormal: Huginn's, with mean r0
    backprop: ZERO_UP = 0  # loop steps that gradients flow through, the last ones; 0: all
    fresh_state: bool = False  # a noise state drawn anew for every row; else the configuration's own
    loss: Literal[objectives.LOSSES] = "last"  # exit_weighted: every loop step's, weighted by the exit gate (Ouro's)
    exit_entropy: WEIGHT = 0.0
    balance: WEIGHT = 0.0  # weight of the routers' load-balancing loss
    precision: Literal[training.PRECISIONS] = "float32"
    recompute: bool = False  # layers' activations are made again in the backward pass
    engine: Literal[ENGINES] = "auto"  # of several processes: fsdp shards the model, ddp copies it; auto: fsdp on GPUs
    log_every: COUNT = 10
    evaluate_every: ZERO_UP = 0  # 0: at the end alone
    evaluate_rows: COUNT = 64
    checkpoint_every: COUNT = 500
    keep: COUNT = 2  # checkpoints

    @property
    def last_step(self) -> int:
        """The step that training ends after."""
        return self.stop or self.steps

    def config(self, vocab_size: int) -> LoopedConfig:
        """The model's configuration. Raises ValueError, one sentence, when it is impossible, alone or with the rest, or its
        vocabulary is not the corpus's."""
        if isinstance(self.model, str):
            config = _catalogued(self.model)
        else:
            try:
                config = LoopedConfig(**({"vocab_size": vocab_size} | self.model))
            except (StrictDataclassError, TypeError) as error:
                raise ValueError(f"model: {' '.join(str(error).split())}") from error
            if unknown := sorted(set(self.model) - set(LoopedConfig.__annotations__)):
                raise ValueError(f"model.{unknown[0]} is no key of a model's configuration")
        if config.vocab_size < vocab_size:
            raise ValueError(
                f"model.vocab_size is {config.vocab_size}: it must be at least {vocab_size}, as the corpus has tokens"
            )
        if self.loss == "exit_weighted" and not config.exit_gate:
            raise ValueError("loss is 'exit_weighted': model.exit_gate must be true, since the gate weighs the steps")
        if self.balance and config.feed_forward == "dense":
            raise ValueError(f"balance is {self.balance}: it must be 0 where model.feed_forward is 'dense'")
        if self.loop_sampling != "fixed" and (config.unrolled or config.state != "single"):
            raise ValueError("loop_sampling is 'poisson_lognormal': it must be 'fixed' for an unrolled core or H/L states")
        if self.fresh_state and config.state_init != "noise":
            raise ValueError(f"fresh_state is true: it must be false where model.state_init is {config.state_init!r}")
        return config


def _catalogued(name: str) -> LoopedConfig:
    for entry in released.catalogue():
        if name == entry.id and entry.plan:
            return entry.plan.config
    raise ValueError(f"model is {name!r}: it must be a checkpoint that `python -m lib models` lists, or values of a model")


def names() -> list[str]:
    """The recipes of params/pretrain, bases that only others build on left out."""
    return sorted(path.stem for path in (paths.params() / "pretrain").glob("*.yaml") if "model" in _values(path))


def read(path: Path, **changed) -> Recipe:
    """A recipe file, with values of the command line in place of its own. Raises ValueError naming the file, the key and what
    would be right."""
    try:
        return Recipe(**(_values(path) | changed))
    except ValidationError as error:
        first = error.errors()[0]
        key, given = ".".join(map(str, first["loc"])), first["input"]
        if first["type"] == "missing":
            raise ValueError(f"{path}: {key} is missing") from None
        if first["type"] == "extra_forbidden":
            raise ValueError(f"{path}: {key} is no key of a recipe: they are {', '.join(Recipe.model_fields)}") from None
        raise ValueError(f"{path}: {key} is {given!r}: {first['msg'][0].lower()}{first['msg'][1:]}") from None


def _values(path: Path, seen: tuple[Path, ...] = ()) -> dict:
    if path in seen:
        raise ValueError(f"{path}: base names a file that is built on it")
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError:
        beside = sorted(p.stem for p in (paths.params() / "pretrain").glob("*.yaml"))
        raise ValueError(f"{path} is not there: params/pretrain/ holds {', '.join(beside)}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict) or not isinstance(found.get("base", ""), str):
        raise ValueError(f"{path} must hold keys and values, base among them the name of a file beside it")
    base = found.pop("base", None)
    return (_values(path.with_name(base), (*seen, path)) if base else {}) | found


def same(recipe: Recipe, folder: Path) -> bool | None:
    """Whether a folder's run is of this recipe in all that determines its numbers; None where there is none."""
    file = folder / "recipe.json"
    if not file.is_file():
        return None
    free = {"stop", "log_every", "evaluate_every", "evaluate_rows", "checkpoint_every", "keep", "engine", "rows_per_device"}
    kept = json.loads(file.read_text(encoding="utf-8"))
    return recipe.model_dump(exclude=free) == {key: value for key, value in kept.items() if key not in free}
