"""Where the loop-boundary norm sits: the value an intervention passes in. `instruments` finds it in a model.

Contract paper, "The axis: loop-boundary normalization". A boundary is a value, never a patched forward.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Boundary:
    """When the state is normalised between loop steps: after every `period`-th step; 0 means never."""

    period: int = 0

    def __post_init__(self):
        if isinstance(self.period, bool) or not isinstance(self.period, int) or self.period < 0:
            raise ValueError(f"boundary period is {self.period!r}: it must be 0 (never) or a whole number of steps, 1 or more")

    def fires_before(self, t: int) -> bool:
        """Whether step `t` (counted from 0) finds its input normalised, i.e. the norm fires after step t - 1."""
        return bool(self.period and t >= 1 and t % self.period == 0)

    def __str__(self):
        return "never" if not self.period else "every step" if self.period == 1 else f"every {self.period} steps"


never = Boundary(0)


def every(k: int) -> Boundary:
    """The boundary that normalises after every k-th step. Raises ValueError for k below 1."""
    if not isinstance(k, int) or k < 1:
        raise ValueError(f"every(k) was given k = {k!r}: k must be a whole number of steps, 1 or more")
    return Boundary(k)
