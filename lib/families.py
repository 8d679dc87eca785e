"""Which family a config.json belongs to, and this project's own saved models as one of them."""

from collections.abc import Callable

import torch
from huggingface_hub.errors import StrictDataclassError

from lib import family_axes, family_huginn, family_ouro
from lib.checkpoint_plan import Piece, Plan, Reader
from lib.config import LoopedConfig
from lib.looped import LoopedModel


def plan(values: dict, where: str) -> Plan:
    """The plan of a published config.json, `where` naming the file in errors.

    Raises ValueError, one sentence, when the family is unknown or a value is one the model does not have.
    """
    kind = "axes" if isinstance(values.get("model"), dict) else values.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ValueError(f"{where}: model_type is {kind!r}: it must be one of {', '.join(k for k in FAMILIES if k != 'axes')}")
    try:
        return FAMILIES[kind](Reader(values, where))
    except (ValueError, TypeError, AttributeError, StrictDataclassError) as error:
        said = " ".join(str(error).split())
        raise ValueError(said if said.startswith(where) else f"{where}: {said}") from error


def looped(read: Reader) -> Plan:
    """A model of this project's own, as `save_pretrained` leaves it."""
    c = LoopedConfig(**{key: value for key, value in read.values.items() if key in LoopedConfig.__annotations__})
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in LoopedModel(c).named_parameters()}
    return Plan(
        "looped",
        c,
        tuple(Piece(name, shape, name) for name, shape in shapes.items()),
        twins=(("lm_head.weight", "embed_tokens.weight"),) if c.tie_word_embeddings else (),
        dtype=read.dtype("float32"),
    )


FAMILIES: dict[str, Callable[[Reader], Plan]] = {
    "ouro": family_ouro.plan,
    "huginn_raven": family_huginn.plan,
    "looped": looped,
    "axes": family_axes.plan,  # known by its `model` section, and without a model_type
}
