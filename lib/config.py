"""The configuration of the one looped model: a frozen point in the design space, every family a value of its axes.

    z_0 = init(e, noise);  z_{t+1} = R(W(z_t, e));  logits = readout(C(z_T));  e = P(x_0)      (axes paper, eqs. 1-5)

One loop step is one update of the state. With H/L states the updates take turns: l_cycles of the low one, then one of the
high one, h_cycles times.
"""

import math

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, PreTrainedConfig

# axis -> its values; the model reads nothing else
AXES = {
    # a second norm: on each branch before it is added (sandwich: Ouro) or on the sum (sandwich_sum: Huginn)
    "block": ("pre_norm", "sandwich", "sandwich_sum"),
    "injection": ("none", "concat", "diagonal"),  # concat: Huginn's adapter; diagonal: the axes paper's
    "injection_source": ("prelude", "tokens"),  # what is injected: the prelude's output or the token embeddings
    "state_init": ("input", "zeros", "noise"),
    "state_noise": ("normal", "truncated", "hash"),  # truncated at 3 sd: Huginn; hash: the axes paper's at evaluation
    "state": ("single", "shared", "split"),  # H/L: both updated by the whole core, or each by its own half of it
    "readout": ("normalised", "raw"),
    "readout_order": ("coda_norm", "norm_coda_norm"),  # norm_coda_norm: Huginn's, the same norm before and after the coda
    "feed_forward": ("dense", "experts"),
    "rope": ("half", "interleaved"),  # channels turned in pairs (i, i + E / 2) or (2 i, 2 i + 1)
}


@strict
class LoopedConfig(PreTrainedConfig):
    """One point of the design space.

    Envelope: `prelude`, `core`, `coda` count layers; (0, N, 0) is Ouro's full stack, (P, N, C) Huginn's sandwich. `loops` is
    the trained budget r0. `boundary` is the period k of the loop-boundary norm: 0 never, 1 every step, k every k-th step
    (contract paper, "The axis"). `shared_norm`: boundary and readout use one module, as in Ouro; False gives two.

    Raises ValueError, one sentence naming the key and what would be right, when a value is impossible, and huggingface_hub's
    StrictDataclassError when it is of another type.
    """

    model_type = "looped"
    attribute_map = {"hidden_size": "d_model", "num_attention_heads": "n_heads", "intermediate_size": "d_ff"}

    vocab_size: int = 32
    d_model: int = 64  # D, channels of the state
    n_heads: int = 4
    n_kv_heads: int | None = None  # heads of keys and values, each shared by n_heads / n_kv_heads query heads; None: n_heads
    head_dim: int | None = None  # channels a head; None: d_model / n_heads
    qk_bias: bool = False  # a bias on queries and keys, before they are rotated (Huginn)
    d_ff: int = 128  # width of the gated feed-forward
    prelude: int = 0
    core: int = 1
    coda: int = 0
    loops: int = 4
    unrolled: bool = False  # the core's layers are each loop step's own: a feed-forward model with the loop's injections
    block: str = "pre_norm"
    feed_forward: str = "dense"
    n_experts: int = 0  # of each layer, where feed_forward is experts
    experts_per_token: int = 0  # experts that a token goes through
    d_expert: int = 0  # width of one expert
    injection: str = "none"
    injection_source: str = "prelude"
    injection_bias: bool = False  # of the concat adapter
    state: str = "single"
    h_cycles: int = 0  # of H/L states: updates of the high state in `loops`
    l_cycles: int = 0  # updates of the low state before each of them
    repeats: int = 1  # times an update runs its layers, one after the other, behind one injection
    state_init: str = "input"
    state_std: float = 1.0  # standard deviation of a noise state
    state_noise: str = "normal"
    boundary: int = 0
    shared_norm: bool = True
    readout: str = "normalised"
    readout_order: str = "coda_norm"
    exit_gate: bool = False  # Ouro's: a probability of leaving after each loop step, read off the normalised state
    exit_threshold: float = 1.0  # leave at the first loop step whose cumulative probability reaches it; 1: never early
    rope: str = "half"
    rope_theta: float = 10000.0
    norm_eps: float = 1.0e-6
    embedding_std: float = 1.0  # initial standard deviation of an embedding entry; matrices start at fan_in ** -0.5
    embedding_scale: float = 1.0  # factor on token embeddings
    tie_word_embeddings: bool = False  # head and embedding are one matrix

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        for axis, built in AXES.items():
            if (value := getattr(self, axis)) not in built:
                raise ValueError(f"{axis} is {value!r}: it must be one of {', '.join(built)}")
        for key in ("vocab_size", "d_model", "n_heads", "d_ff", "core", "loops", "repeats"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} is {getattr(self, key)}: it must be at least 1")
        for key in ("prelude", "coda", "boundary"):
            if getattr(self, key) < 0:
                raise ValueError(f"{key} is {getattr(self, key)}: it must be 0 or more")
        for key in ("norm_eps", "rope_theta", "embedding_std", "embedding_scale", "exit_threshold"):
            if not (getattr(self, key) > 0 and math.isfinite(getattr(self, key))):
                raise ValueError(f"{key} is {getattr(self, key)}: it must be a positive number")
        if self.head_dim is None and self.d_model % (2 * self.n_heads):
            raise ValueError(
                f"d_model is {self.d_model} with n_heads {self.n_heads}: d_model must be a multiple of 2 * n_heads, "
                "since each head's channels are rotated in pairs"
            )
        if self.head_dim is not None and (self.head_dim < 2 or self.head_dim % 2):
            raise ValueError(f"head_dim is {self.head_dim}: it must be an even number, since channels are rotated in pairs")
        if self.n_kv_heads is not None and (self.n_kv_heads < 1 or self.n_heads % self.n_kv_heads):
            raise ValueError(f"n_kv_heads is {self.n_kv_heads} with n_heads {self.n_heads}: it must divide n_heads")
        if self.readout_order == "norm_coda_norm" and not self.coda:
            raise ValueError("readout_order is 'norm_coda_norm' with coda 0: it needs at least one coda layer")
        self._require_experts()
        self._require_states()

    def _require_experts(self):
        keys, dense = ("n_experts", "experts_per_token", "d_expert"), self.feed_forward == "dense"
        for key in keys:
            if dense and getattr(self, key):
                raise ValueError(f"{key} is {getattr(self, key)} with feed_forward 'dense': it must be 0")
            if not dense and getattr(self, key) < 1:
                raise ValueError(f"{key} is {getattr(self, key)} with feed_forward 'experts': it must be at least 1")
        if self.experts_per_token > self.n_experts:
            raise ValueError(f"experts_per_token is {self.experts_per_token}: it must be at most n_experts, {self.n_experts}")

    def _require_states(self):
        for key in ("h_cycles", "l_cycles"):
            if self.state == "single" and getattr(self, key):
                raise ValueError(f"{key} is {getattr(self, key)} with state 'single': it must be 0")
            if self.state != "single" and getattr(self, key) < 1:
                raise ValueError(f"{key} is {getattr(self, key)} with state {self.state!r}: it must be at least 1")
        if self.state == "single":
            return
        if self.loops != (updates := self.h_cycles * (self.l_cycles + 1)):
            cycles = f"h_cycles is {self.h_cycles} and l_cycles {self.l_cycles}"
            raise ValueError(f"loops is {self.loops}: it must be h_cycles * (l_cycles + 1), {updates}, since {cycles}")
        if self.state == "split" and self.core % 2:
            raise ValueError(f"core is {self.core} with state 'split': it must be even, a half for each state")
        if self.exit_gate:
            raise ValueError(f"exit_gate is true with state {self.state!r}: it must be false, since the gate reads one state")
        if self.unrolled:
            raise ValueError(
                f"unrolled is true with state {self.state!r}: it must be false, since H/L states share their layers"
            )

    @property
    def stored_layers(self) -> int:
        """Layers the model holds."""
        return self.prelude + self.core * (self.loops if self.unrolled else 1) + self.coda

    @property
    def step_layers(self) -> int:
        """Layers that one loop step executes."""
        return self.core * self.repeats // (2 if self.state == "split" else 1)

    @property
    def executed_layers(self) -> int:
        """Layers that one token passes at the trained loop count."""
        return self.prelude + self.loops * self.step_layers + self.coda

    def updates_low(self, t: int) -> bool:
        """Whether loop step t, from 0, updates the low one of H/L states."""
        return self.state != "single" and t % (self.l_cycles + 1) < self.l_cycles

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.n_kv_heads or self.n_heads

    @property
    def head_width(self) -> int:
        """Channels a head, E."""
        return self.head_dim or self.d_model // self.n_heads


AutoConfig.register("looped", LoopedConfig)
