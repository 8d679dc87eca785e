"""The key-value cache of a looped model: one slot for every layer and loop step, in transformers' own cache class.

A loop step attends only to keys of the same loop step, so a stack of L layers run K times fills L K slots.
Shapes: B batch, G key and value heads, T tokens, S tokens seen, E channels a head.
"""

import torch
from transformers import DynamicCache

from lib.boundary import Boundary


class LoopedCache(DynamicCache):
    """Keys and values of earlier tokens, (B, G, S, E) a slot, filled with one loop count and boundary throughout."""

    def __init__(self):
        super().__init__()
        self.made_with = None

    def hold(self, loops: int, boundary: Boundary) -> None:
        """Raises ValueError when earlier tokens were run with another loop count or boundary: their slots would not fit."""
        if self.made_with is not None and self.get_seq_length() and self.made_with != (loops, boundary):
            before, period = self.made_with
            raise ValueError(
                f"the cache was filled with {before} loops and the boundary norm {period}, and is asked for {loops} loops and "
                f"the boundary norm {boundary}: start with a new cache"
            )
        self.made_with = loops, boundary


class SharedPrefix:
    """A filled cache of one row that every row of a batch continues: nothing is added to it.

    Takes a cache's place in a pass: `update` gives each layer the prefix's keys before its own.
    """

    def __init__(self, filled: LoopedCache):
        self.filled = filled

    def get_seq_length(self) -> int:
        """Tokens of the prefix."""
        return self.filled.get_seq_length()

    def update(self, keys: torch.Tensor, values: torch.Tensor, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """keys, values: (B, G, T, E) -> (B, G, S, E), the prefix's first."""
        held = self.filled.layers[slot]
        before = (part.expand(len(keys), -1, -1, -1) for part in (held.keys, held.values))
        return tuple(torch.cat((prefix, own), dim=2) for prefix, own in zip(before, (keys, values), strict=True))


def slot(config, part: str, i: int, t: int = 0) -> int:
    """The slot of the i-th layer that a part executes, in the core at loop step t.

    Slots are in the order prelude, coda, then the core's loop steps one after the other. Where there is neither prelude nor
    coda this is Ouro's t * L + i. Huginn's own numbers are these with the coda's counted from the end.
    """
    before = {"prelude": 0, "coda": config.prelude, "core": config.prelude + config.coda + t * config.step_layers}
    return before[part] + i
