"""The configuration of the one looped model: a frozen point in the design space, every family a value of its axes.

    z_0 = init(e, noise);  z_{t+1} = R(W(z_t, e));  logits = readout(C(z_T));  e = P(x_0)      (axes paper, eqs. 1-5)

Values that later families need (concat and diagonal injection, Huginn's sum-norm block, H/L states, experts) have their
axis here already; asking for one that is not built is an error that lists the values that are.
"""

import math

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, PreTrainedConfig

# axis -> the values built so far; the model reads nothing else
AXES = {
    "block": ("pre_norm", "sandwich"),  # sandwich: Ouro's, a second norm on each branch before it is added
    "injection": ("none",),
    "state_init": ("input", "zeros", "noise"),
    "state": ("single",),
    "readout": ("normalised", "raw"),
    "readout_order": (
        "coda_norm",
        "norm_coda_norm",
    ),  # norm_coda_norm: Huginn's, the same norm before and after the coda
    "feed_forward": ("dense",),
}


@strict
class LoopedConfig(PreTrainedConfig):
    """One point of the design space.

    Envelope: `prelude`, `core`, `coda` count layers; (0, N, 0) is Ouro's full stack, (P, N, C) Huginn's sandwich. `loops` is
    the trained budget r0. `boundary` is the period k of the loop-boundary norm: 0 never, 1 every step, k every k-th step
    (contract paper, "The axis"). `shared_norm`: boundary and readout use one module, as in Ouro; False gives two.

    Raises ValueError, one sentence naming the key and what would be right, when a value is impossible.
    """

    model_type = "looped"
    attribute_map = {"hidden_size": "d_model", "num_attention_heads": "n_heads", "intermediate_size": "d_ff"}

    vocab_size: int = 32
    d_model: int = 64  # D, channels of the state
    n_heads: int = 4
    d_ff: int = 128  # width of the gated feed-forward
    prelude: int = 0
    core: int = 1
    coda: int = 0
    loops: int = 4
    block: str = "pre_norm"
    feed_forward: str = "dense"
    injection: str = "none"
    state: str = "single"
    state_init: str = "input"
    state_std: float = 1.0  # standard deviation of a noise state
    boundary: int = 0
    shared_norm: bool = True
    readout: str = "normalised"
    readout_order: str = "coda_norm"
    rope_theta: float = 10000.0
    norm_eps: float = 1.0e-6
    embedding_std: float = 1.0  # initial standard deviation of an embedding entry; matrices start at fan_in ** -0.5

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        for axis, built in AXES.items():
            if (value := getattr(self, axis)) not in built:
                raise ValueError(f"{axis} is {value!r}: it must be one of {', '.join(built)}")
        for key in ("vocab_size", "d_model", "n_heads", "d_ff", "core", "loops"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} is {getattr(self, key)}: it must be at least 1")
        for key in ("prelude", "coda", "boundary"):
            if getattr(self, key) < 0:
                raise ValueError(f"{key} is {getattr(self, key)}: it must be 0 or more")
        for key in ("norm_eps", "rope_theta", "embedding_std"):
            if not (getattr(self, key) > 0 and math.isfinite(getattr(self, key))):
                raise ValueError(f"{key} is {getattr(self, key)}: it must be a positive number")
        if self.d_model % (2 * self.n_heads):
            raise ValueError(
                f"d_model is {self.d_model} with n_heads {self.n_heads}: d_model must be a multiple of 2 * n_heads, "
                "since each head's channels are rotated in pairs"
            )
        if self.readout_order == "norm_coda_norm" and not self.coda:
            raise ValueError("readout_order is 'norm_coda_norm' with coda 0: it needs at least one coda layer")


AutoConfig.register("looped", LoopedConfig)
