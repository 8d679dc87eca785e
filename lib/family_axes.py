"""The axes paper's checkpoints, IFM/LoopedLM-P1-*: their `model` section and their tensors' names."""

from lib.checkpoint_plan import Piece, Plan, Reader, layer_pieces
from lib.config import LoopedConfig

NAME = "axes paper"
ATTENTION = {
    "q": "attention.wq.weight",
    "k": "attention.wk.weight",
    "v": "attention.wv.weight",
    "o": "attention.wo.weight",
    "attention_norm": "attention.norm.weight",
}
DENSE = {
    "gate": "nffn.fc1.weight",
    "up": "nffn.fc3.weight",
    "down": "nffn.fc2.weight",
    "feed_forward_norm": "nffn.norm.weight",
}
EXPERTS = {
    "router": "moe.router.weight",
    "experts_gate": "moe.experts.weight1",
    "experts_up": "moe.experts.weight3",
    "experts_down": "moe.experts.weight2",
    "feed_forward_norm": "moe.norm.weight",
}
# key -> the values the model has, and what a missing key means in the published code
FIXED = {
    "apply_rmsnorm": ((True,), False),
    "norm_affine": ((True,), True),
    "layernorm_num_groups": ((1,), 1),
    "swiglu": ((True,), False),
    "attn_act_func": (("softmax",), "softmax"),
    "apply_attn_gate": ((False,), False),
    "qknorm": ((False,), False),
    "scale_emb": ((False,), False),
    "output_size": ((-1,), -1),
    "num_shared_experts": ((0,), 0),
    "num_values": ((0,), 0),
    "residual_func": (("base", "add"), "base"),
    "huginn_depth_control": ((False,), False),
}
INJECTIONS = ("none", "diagonal")
STATES = {"normal": "noise", "input": "input", "zero": "zeros"}
HIERARCHIES = {"none": "single", "shared_hl": "shared", "split_hl": "split"}
# of routing, where there are experts
ROUTING = {
    "moe_router_score_func": (("sigmoid",), "sigmoid"),
    "moe_router_scaling_factor": ((None,), None),
    "moe_router_bias": ((False,), False),
    "num_dense_layers": ((None, 0), None),
}


def plan(read: Reader) -> Plan:
    """The axes paper's checkpoints: pre-norm layers, no boundary norm, a diagonal injection where there is one."""
    read = Reader(read.values["model"], f"{read.where}, model")
    routed = read.whole("num_experts", default=0, least=0) > 0
    for key, (allowed, missing) in (FIXED | (ROUTING if routed else {})).items():
        read.only(key, *allowed, default=missing)
    c = LoopedConfig(**_values(read))
    if (turned := read.whole("rope_head_dim", default=c.head_width, least=0)) != c.head_width:
        raise read.refuse("rope_head_dim", turned, f"head_dim, {c.head_width}")
    D = c.d_model
    core = c.stored_layers - c.prelude - c.coda
    targets = [(part, i) for part, n in (("prelude", c.prelude), ("core", core), ("coda", c.coda)) for i in range(n)]
    pieces = [Piece("embed.weight", (c.vocab_size, D), "embed_tokens.weight")]
    for layer, (part, i) in enumerate(targets):
        pieces += layer_pieces(ATTENTION | (EXPERTS if routed else DENSE), c, f"layers.{layer}", f"{part}.{i}", add=1.0)
    if c.injection == "diagonal":
        module = _module(read, c)
        pieces += [
            Piece(f"{module}.input_adapter.weight", (D, D), "injection.adapter.weight"),
            Piece(f"{module}.A_log", (D,), "injection.A_log"),
            Piece(f"{module}.dt_bias", (D,), "injection.dt_bias"),
        ]
    pieces += [
        Piece("output.final_norm.weight", (D,), "norm.weight", add=1.0),
        Piece("output.output.weight", (c.vocab_size, D), "lm_head.weight"),
    ]
    return Plan(NAME, c, tuple(pieces), dtype="bfloat16")


def _module(read: Reader, c: LoopedConfig) -> str:
    """The injection module's name."""
    if c.unrolled:
        return "dense_prelude_input_injection_module"
    return "input_injection" if read.get("arch") == "huginn" else "loop_input_injection_module"


def _injection(read: Reader, key: str, missing: str) -> str:
    if (value := read.word(key, default=missing)) not in INJECTIONS:
        raise read.refuse(key, value, " or ".join(map(repr, INJECTIONS)))
    return value


def _values(read: Reader) -> dict:
    """LoopedConfig values of the axes paper's `model` section; a missing key means what it means in the published code."""
    layers, D, H = read.whole("num_layers"), read.whole("model_dim"), read.whole("num_heads")
    values = {
        "vocab_size": read.whole("vocab_size"),
        "d_model": D,
        "n_heads": H,
        "n_kv_heads": read.whole("num_kv_heads", default=H),
        "head_dim": read.whole("head_dim", default=D // H),
        "d_ff": read.whole("ffn_hidden_dim"),
        **_experts(read),
        "loops": read.whole("loop_times", default=1),
        "rope": "interleaved",
        "rope_theta": read.number("rope_base", default=100000.0),
        "norm_eps": read.number("rmsnorm_eps", default=1.0e-6),
    }
    arch = read.get("arch", default="transformer")
    if arch == "transformer":
        start = read.whole("loop_start_layer", default=0, least=0)
        end = read.whole("loop_end_layers", default=layers)
        if not 0 <= start < end <= layers:
            raise read.refuse("loop_end_layers", end, f"above loop_start_layer, {start}, and at most num_layers, {layers}")
        values |= {"prelude": start, "core": end - start, "coda": layers - end}
        if (injection := _injection(read, "loop_input_injection", "none")) != "none":
            values |= {"injection": injection, "injection_source": "tokens"}
        return values | _written(read, values, layers)
    if arch != "huginn":
        raise read.refuse("arch", arch, "'transformer' or 'huginn'")
    read.only("dense_prelude_input_injection", "none", default="none")
    prelude, coda = (read.whole(f"huginn_{part}_layers", default=1, least=0) for part in ("prelude", "coda"))
    core = read.whole("huginn_recurrent_layers", default=layers - prelude - coda)
    if prelude + core + coda != layers:
        raise read.refuse("num_layers", layers, f"{prelude + core + coda}, the layers of prelude, recurrent block and coda")
    start = read.word("huginn_state_init", default="zero")
    if start not in STATES:
        raise read.refuse("huginn_state_init", start, " or ".join(map(repr, STATES)))
    values |= {"prelude": prelude, "core": core, "coda": coda, "state_init": STATES[start]}
    values |= {"injection": _injection(read, "huginn_input_injection", "diagonal")}
    if start == "normal":
        values |= {"state_noise": "hash", "state_std": D**-0.5}
    return values | _states(read, values)


def _experts(read: Reader) -> dict:
    """Of the experts, where there are any."""
    if not (n := read.whole("num_experts", default=0, least=0)):
        return {}
    chosen = read.whole("num_activated_experts")
    if chosen > n:
        raise read.refuse("num_activated_experts", chosen, f"at most num_experts, {n}")
    return {"feed_forward": "experts", "n_experts": n, "experts_per_token": chosen, "d_expert": read.whole("expert_inter_dim")}


def _states(read: Reader, values: dict) -> dict:
    """Of H/L states, where there are two. Raises ValueError when the cycles do not make the loop count."""
    name = read.word("huginn_hierarchical_state", default="none")
    if name not in HIERARCHIES:
        raise read.refuse("huginn_hierarchical_state", name, " or ".join(map(repr, HIERARCHIES)))
    if (state := HIERARCHIES[name]) == "single":
        return {}
    high, low = (read.whole(f"huginn_hierarchical_{part}_cycles", default=n) for part, n in (("h", 2), ("l", 3)))
    if high * (low + 1) != values["loops"]:
        updates = f"{high * (low + 1)}, the updates of {high} H cycles of {low} L updates and one H update"
        raise read.refuse("loop_times", values["loops"], updates)
    if state == "split" and values["core"] % 2:
        raise read.refuse("huginn_recurrent_layers", values["core"], "even, a half for each state")
    repeats = read.whole("huginn_split_module_repeats", default=1) if state == "split" else 1
    return {"state": state, "h_cycles": high, "l_cycles": low, "repeats": repeats}


def _written(read: Reader, values: dict, layers: int) -> dict:
    """Of a feed-forward model that writes an early layer's output into later ones: an unrolled sandwich.

    Raises ValueError when the writes are not evenly spaced from behind the source layer on.
    """
    if (injection := _injection(read, "dense_prelude_input_injection", "none")) == "none":
        return {}
    if values["loops"] != 1 or values.get("injection"):
        raise read.refuse("dense_prelude_input_injection", injection, "'none' in a model that is looped or injected otherwise")
    text, source = read.word("dense_prelude_input_layers", default=""), read.get("dense_prelude_source_layer", default=-1)
    try:
        places = [int(part) for part in text.split(",")]
    except ValueError:
        raise read.refuse("dense_prelude_input_layers", text, "layer numbers with commas between them") from None
    core = places[1] - places[0] if len(places) > 1 else layers - places[0]
    end = places[0] + core * len(places)
    if core < 1 or source != places[0] - 1 or places != list(range(places[0], end, core)) or end > layers:
        right = "evenly spaced layers, the first behind dense_prelude_source_layer"
        raise read.refuse("dense_prelude_input_layers", text, right)
    parts = {"prelude": places[0], "core": core, "loops": len(places), "coda": layers - end}
    return parts | {"unrolled": True, "injection": injection, "injection_source": "prelude"}
