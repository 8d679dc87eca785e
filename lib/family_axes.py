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
FIXED = {
    "apply_rmsnorm": True,
    "norm_affine": True,
    "layernorm_num_groups": 1,
    "swiglu": True,
    "attn_act_func": "softmax",
    "apply_attn_gate": False,
    "qknorm": False,
    "scale_emb": False,
    "output_size": -1,
    "num_shared_experts": 0,
    "num_values": 0,
    "dense_prelude_input_injection": "none",
    "residual_func": "base",
    "huginn_depth_control": False,
}
STATES = {"normal": "noise", "input": "input", "zero": "zeros"}


def plan(read: Reader) -> Plan:
    """The axes paper's checkpoints: pre-norm layers, no boundary norm, a diagonal injection where there is one."""
    read = Reader(read.values["model"], f"{read.where}, model")
    experts = read.whole("num_experts", default=0)
    c = LoopedConfig(**_axes_values(read, experts))  # names the axis where a value is not built
    for key, value in FIXED.items():
        read.only(key, value, default=value)
    where = read.get("rope_head_dim", default=c.head_width)
    if where != c.head_width:
        raise read.refuse("rope_head_dim", where, f"head_dim, {c.head_width}")
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


def _axes_values(read: Reader, experts: int) -> dict:
    """LoopedConfig values of the axes paper's `model` section."""
    layers, D = read.whole("num_layers"), read.whole("model_dim")
    values = {
        "vocab_size": read.whole("vocab_size"),
        "d_model": D,
        "n_heads": read.whole("num_heads"),
        "n_kv_heads": read.whole("num_kv_heads", default=read.whole("num_heads")),
        "head_dim": read.whole("head_dim"),
        "d_ff": read.whole("ffn_hidden_dim"),
        "loops": read.whole("loop_times", default=1),
        "feed_forward": "experts" if experts else "dense",
        "rope": "interleaved",
        "rope_theta": float(read.get("rope_base", default=10000.0)),
        "norm_eps": float(read.get("rmsnorm_eps", default=1.0e-6)),
    }
    arch = read.get("arch", default="transformer")
    if arch == "transformer":
        start = read.whole("loop_start_layer", default=0)
        end = read.whole("loop_end_layers", default=layers)
        if not 0 <= start < end <= layers:
            raise read.refuse("loop_start_layer and loop_end_layers", (start, end), f"a span of the {layers} layers")
        values |= {"prelude": start, "core": end - start, "coda": layers - end}
        if (injection := read.get("loop_input_injection", default="none")) != "none":
            values |= {"injection": injection, "injection_source": "tokens"}
        return values
    if arch != "huginn":
        raise read.refuse("arch", arch, "'transformer' or 'huginn'")
    prelude, coda = (read.whole(f"huginn_{part}_layers") for part in ("prelude", "coda"))
    core = read.whole("huginn_recurrent_layers", default=layers - prelude - coda)
    if prelude + core + coda != layers:
        raise read.refuse("num_layers", layers, f"{prelude + core + coda}, the layers of prelude, recurrent block and coda")
    start = read.get("huginn_state_init", default="normal")
    if start not in STATES:
        raise read.refuse("huginn_state_init", start, " or ".join(map(repr, STATES)))
    hierarchy = read.get("huginn_hierarchical_state", default="none")
    values |= {"prelude": prelude, "core": core, "coda": coda, "state_init": STATES[start]}
    values |= {"injection": read.get("huginn_input_injection", default="none")}
    if start == "normal":
        values |= {"state_noise": "hash", "state_std": D**-0.5}
    return values | {"state": "single" if hierarchy == "none" else hierarchy}
