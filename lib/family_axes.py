"""The axes paper's checkpoints, IFM/LoopedLM-P1-*: their `model` section and their tensors' names."""

from lib.checkpoint_plan import Piece, Plan, Reader, layer_pieces
from lib.config import LoopedConfig

NAME = "axes paper"
LAYER = {
    "q": "attention.wq.weight",
    "k": "attention.wk.weight",
    "v": "attention.wv.weight",
    "o": "attention.wo.weight",
    "gate": "nffn.fc1.weight",
    "up": "nffn.fc3.weight",
    "down": "nffn.fc2.weight",
    "attention_norm": "attention.norm.weight",
    "feed_forward_norm": "nffn.norm.weight",
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
    "dense_prelude_input_injection": (("none",), "none"),
    "residual_func": (("base", "add"), "base"),
    "huginn_depth_control": ((False,), False),
}
INJECTIONS = ("none", "diagonal")
STATES = {"normal": "noise", "input": "input", "zero": "zeros"}


def plan(read: Reader) -> Plan:
    """The axes paper's checkpoints: pre-norm layers, no boundary norm, a diagonal injection where there is one."""
    read = Reader(read.values["model"], f"{read.where}, model")
    if experts := read.whole("num_experts", default=0, least=0):
        raise read.refuse("num_experts", experts, "0, since the axis feed_forward has no 'experts' yet")
    hierarchy = read.word("huginn_hierarchical_state", default="none")
    if hierarchy != "none" and read.get("arch") == "huginn":
        raise read.refuse("huginn_hierarchical_state", hierarchy, f"'none', since the axis state has no {hierarchy!r} yet")
    for key, (allowed, missing) in FIXED.items():
        read.only(key, *allowed, default=missing)
    c = LoopedConfig(**_values(read))
    if (turned := read.whole("rope_head_dim", default=c.head_width, least=0)) != c.head_width:
        raise read.refuse("rope_head_dim", turned, f"head_dim, {c.head_width}")
    D = c.d_model
    targets = [(part, i) for part, n in (("prelude", c.prelude), ("core", c.core), ("coda", c.coda)) for i in range(n)]
    pieces = [Piece("embed.weight", (c.vocab_size, D), "embed_tokens.weight")]
    for layer, (part, i) in enumerate(targets):
        pieces += layer_pieces(LAYER, c, f"layers.{layer}", f"{part}.{i}", add=1.0)
    if c.injection == "diagonal":
        module = "input_injection" if read.get("arch") == "huginn" else "loop_input_injection_module"
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
        return values
    if arch != "huginn":
        raise read.refuse("arch", arch, "'transformer' or 'huginn'")
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
    return values
