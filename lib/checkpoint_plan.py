"""What a published checkpoint means for the one model: its configuration, and where each of its tensors goes.

Only names, positions and spellings differ between families; no arithmetic is done but adding the 1 that the axes paper's gains
are stored without. Shapes: V vocabulary, D d_model, H query heads, G key and value heads, E channels a head, F feed-forward
width.
"""

import math
from dataclasses import dataclass

from lib.config import LoopedConfig


@dataclass(frozen=True)
class Piece:
    """One stored tensor and the rows of one of the model's parameters that it fills."""

    source: str
    shape: tuple[int, ...]  # as stored
    target: str
    row: int = 0  # the parameter's first row that it fills
    add: float = 0.0  # added to every entry


@dataclass(frozen=True)
class Plan:
    """What a checkpoint's configuration means: the model, and where each of its tensors goes."""

    family: str
    config: LoopedConfig
    pieces: tuple[Piece, ...]
    spare: frozenset[str] = frozenset()  # may be stored and is not needed
    twins: tuple[tuple[str, str], ...] = ()  # (may be stored, must then equal this)
    stop: tuple[int, ...] = ()  # tokens that end a text
    pad: int | None = None
    start: int | None = None
    dtype: str = "float32"  # that the checkpoint asks to be run in

    @property
    def parameters(self) -> int:
        """Parameters the model holds, a tied matrix counted once."""
        return sum(math.prod(piece.shape) for piece in self.pieces)


class Reader:
    """A published configuration, read with errors that name its file and key."""

    def __init__(self, values: dict, where: str):
        self.values, self.where = values, where

    def refuse(self, key: str, value, right: str) -> ValueError:
        """The error that says what would be right."""
        return ValueError(f"{self.where}: {key} is {value!r}: it must be {right}")

    def get(self, *keys: str, default=None):
        """The first of several spellings that is there and not null, else the default."""
        return next((self.values[key] for key in keys if self.values.get(key) is not None), default)

    def whole(self, *keys: str, default: int | None = None) -> int:
        """A whole number. Raises ValueError when it is missing without a default, or no whole number."""
        value = self.get(*keys, default=default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.refuse(keys[0], value, "a whole number")
        return value

    def only(self, key: str, *allowed, default) -> None:
        """Refuses values that would compute something else than the model does."""
        if (value := self.values.get(key, default)) not in allowed:
            raise self.refuse(key, value, " or ".join(map(repr, allowed)))


def layer_pieces(names: dict[str, str], c: LoopedConfig, source: str, target: str, add: float = 0.0) -> list[Piece]:
    """Pieces of one layer. names: {part: the family's name for it}."""
    H, G, E, D, F = c.n_heads, c.kv_heads, c.head_width, c.d_model, c.d_ff
    qkv, gate_up = "attention.qkv.weight", "feed_forward.gate_up.weight"
    known = {
        "q": (qkv, 0, (H * E, D)),
        "k": (qkv, H * E, (G * E, D)),
        "v": (qkv, (H + G) * E, (G * E, D)),
        "qkv": (qkv, 0, ((H + 2 * G) * E, D)),
        "qk_bias": ("attention.qk_bias", 0, (2, 1, H, E)),
        "o": ("attention.o.weight", 0, (D, H * E)),
        "gate": (gate_up, 0, (F, D)),
        "up": (gate_up, F, (F, D)),
        "gate_up": (gate_up, 0, (2 * F, D)),
        "down": ("feed_forward.down.weight", 0, (D, F)),
    }
    pieces = []
    for part, name in names.items():
        to, row, shape = known.get(part, (f"{part}.weight", 0, (D,)))
        pieces.append(Piece(f"{source}.{name}", shape, f"{target}.{to}", row, add if part not in known else 0.0))
    return pieces


def ids(value) -> tuple[int, ...]:
    """Token ids of a configuration, which may be one, several or none."""
    return () if value is None else tuple(value) if isinstance(value, list) else (value,)
