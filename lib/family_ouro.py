"""ByteDance's Ouro: its configuration, in both spellings, and its tensors' names."""

from lib.checkpoint_plan import Piece, Plan, Reader, layer_pieces
from lib.config import LoopedConfig

LAYER = {
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "attention_norm": "input_layernorm.weight",
    "attention_branch_norm": "input_layernorm_2.weight",
    "feed_forward_norm": "post_attention_layernorm.weight",
    "feed_forward_branch_norm": "post_attention_layernorm_2.weight",
}


def plan(read: Reader) -> Plan:
    """ByteDance's Ouro: a full stack, the norm at every loop boundary, an exit gate."""
    for key, allowed in {"hidden_act": ("silu",), "use_sliding_window": (False, None), "attention_bias": (False, None)}.items():
        read.only(key, *allowed, default=allowed[0])
    if (early := read.get("early_exit_step")) is not None:
        raise read.refuse("early_exit_step", early, "null (give loops= to the model instead)")
    if (kinds := read.get("layer_types")) is not None and set(map(str, kinds)) != {"full_attention"}:
        raise read.refuse("layer_types", kinds, "a list of 'full_attention'")
    D, H, V = read.whole("hidden_size"), read.whole("num_attention_heads"), read.whole("vocab_size")
    if H % (kv := read.whole("num_key_value_heads", default=H)):
        raise read.refuse("num_key_value_heads", kv, f"a divisor of num_attention_heads, {H}")
    c = LoopedConfig(
        vocab_size=V,
        d_model=D,
        n_heads=H,
        n_kv_heads=kv,
        head_dim=read.whole("head_dim", default=D // H),
        d_ff=read.whole("intermediate_size"),
        core=read.whole("num_hidden_layers"),
        loops=read.whole("total_ut_steps", default=4),
        block="sandwich",
        boundary=1,
        exit_gate=True,
        exit_threshold=read.number("early_exit_threshold", default=1.0),
        rope_theta=_theta(read),
        norm_eps=read.number("rms_norm_eps", default=1.0e-6),
        tie_word_embeddings=read.flag("tie_word_embeddings", default=False),
    )
    pieces = [
        Piece("model.embed_tokens.weight", (c.vocab_size, D), "embed_tokens.weight"),
        *(p for i in range(c.core) for p in layer_pieces(LAYER, c, f"model.layers.{i}", f"core.{i}")),
        Piece("model.norm.weight", (D,), "norm.weight"),
        Piece("model.early_exit_gate.weight", (1, D), "exit_gate.weight"),
        Piece("model.early_exit_gate.bias", (1,), "exit_gate.bias"),
    ]
    head = Piece("lm_head.weight", (c.vocab_size, D), "lm_head.weight")
    return Plan(
        "Ouro",
        c,
        tuple(pieces if c.tie_word_embeddings else [*pieces, head]),
        twins=((head.source, pieces[0].source),) if c.tie_word_embeddings else (),
        # the published configuration knows <|endoftext|> alone, while a turn ends with <|im_end|>, token 2
        stop=tuple(sorted({*read.tokens("eos_token_id", V, default=0), 2})),
        pad=read.token("pad_token_id", V, default=0),
        start=read.token("bos_token_id", V),
        dtype=read.dtype("bfloat16"),
    )


def _theta(read: Reader) -> float:
    """The base of the rotation, in transformers 5's spelling (rope_parameters) or 4's. Raises ValueError for a scaled one."""
    rope = read.get("rope_parameters", "rope_scaling", default={})
    if not isinstance(rope, dict) or set(rope) - {"rope_type", "type", "rope_theta"}:
        raise read.refuse("rope_parameters", rope, "rope_type 'default' and rope_theta alone")
    if (kind := rope.get("rope_type") or rope.get("type") or "default") != "default":
        raise read.refuse("rope_type", kind, "'default'")
    if read.get("partial_rotary_factor", default=1) != 1:
        raise read.refuse("partial_rotary_factor", read.get("partial_rotary_factor"), "1 or absent")
    return Reader(read.values | rope, read.where).number("rope_theta", default=10000.0)
