"""What a published checkpoint means for the one model: its configuration, and where each of its tensors goes.

Only names, positions and spellings differ between families; no arithmetic is done but adding the 1 that the axes paper's gains
are stored without. Shapes: V vocabulary, D d_model, H query heads, G key and value heads, E channels a head, F feed-forward
width, N experts of width X.
"""

import math
from dataclasses import dataclass

from lib.config import LoopedConfig

DTYPES = ("bfloat16", "float16", "float32", "float64")


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

    def whole(self, *keys: str, default: int | None = None, least: int = 1) -> int:
        """A whole number from `least` up. Raises ValueError when it is missing without a default, or something else."""
        value = self.get(*keys, default=default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.refuse(keys[0], value, f"a whole number, at least {least}")
        return value

    def number(self, *keys: str, default: float) -> float:
        """A positive number. Raises ValueError for anything else."""
        value = self.get(*keys, default=default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.refuse(keys[0], value, "a positive number")
        return float(value)

    def flag(self, *keys: str, default: bool) -> bool:
        """True or false. Raises ValueError for anything else, a word in quotes included."""
        if not isinstance(value := self.get(*keys, default=default), bool):
            raise self.refuse(keys[0], value, "true or false")
        return value

    def word(self, *keys: str, default: str) -> str:
        """A text. Raises ValueError for anything else."""
        if not isinstance(value := self.get(*keys, default=default), str):
            raise self.refuse(keys[0], value, "a text")
        return value

    def tokens(self, key: str, vocabulary: int, default: int | None = None) -> tuple[int, ...]:
        """Token ids, of which there may be one, several or none. Raises ValueError for ids the vocabulary has not."""
        value = self.get(key, default=default)
        found = () if value is None else tuple(value) if isinstance(value, list) else (value,)
        if not all(isinstance(t, int) and not isinstance(t, bool) and 0 <= t < vocabulary for t in found):
            raise self.refuse(key, value, f"token ids below {vocabulary}")
        return found

    def token(self, key: str, vocabulary: int, default: int | None = None) -> int | None:
        """One token id or None."""
        return next(iter(self.tokens(key, vocabulary, default)), None)

    def dtype(self, default: str) -> str:
        """The type the checkpoint asks to be run in; "auto" leaves it to the default."""
        name = self.word("dtype", "torch_dtype", default=default).removeprefix("torch.")
        if name not in DTYPES:
            if name == "auto":
                return default
            raise self.refuse("dtype", name, f"one of {', '.join(DTYPES)}")
        return name

    def only(self, key: str, *allowed, default) -> None:
        """Refuses values that would compute something else than the model does."""
        if (value := self.values.get(key, default)) not in allowed:
            raise self.refuse(key, value, " or ".join(map(repr, allowed)))


def layer_pieces(names: dict[str, str], c: LoopedConfig, source: str, target: str, add: float = 0.0) -> list[Piece]:
    """Pieces of one layer. names: {part: the family's name for it}."""
    H, G, E, D, F = c.n_heads, c.kv_heads, c.head_width, c.d_model, c.d_ff
    N, X = c.n_experts, c.d_expert
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
        "router": ("feed_forward.router.weight", 0, (N, D)),
        "experts_gate": ("feed_forward.gate", 0, (N * X, D)),  # the experts' matrices one after the other
        "experts_up": ("feed_forward.up", 0, (N * X, D)),
        "experts_down": ("feed_forward.down", 0, (N * D, X)),
    }
    pieces = []
    for part, name in names.items():
        to, row, shape = known.get(part, (f"{part}.weight", 0, (D,)))
        pieces.append(Piece(f"{source}.{name}", shape, f"{target}.{to}", row, add if part not in known else 0.0))
    return pieces
