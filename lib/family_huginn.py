"""tomg-group-umd's Huginn-0125: its configuration, in both spellings, and its tensors' names."""

from lib.checkpoint_plan import Piece, Plan, Reader, layer_pieces
from lib.config import LoopedConfig

LAYER = {
    "qkv": "attn.Wqkv.weight",
    "qk_bias": "attn.qk_bias",
    "o": "attn.proj.weight",
    "gate_up": "mlp.fc.weight",
    "down": "mlp.proj.weight",
    "attention_norm": "norm_1.weight",
    "attention_sum_norm": "norm_2.weight",
    "feed_forward_norm": "norm_3.weight",
    "feed_forward_sum_norm": "norm_4.weight",
}
FIXED = {
    "injection_type": "linear",
    "qk_bias": True,
    "norm_class_name": "RMSNorm_llama",
    "block_class_name": "SandwichBlock",
    "mlp_class_name": "GatedMLP",
    "nonlin_name": "SiLU",
    "architecture_class_name": "RecurrentGPT",
    "test_time_noise": 0,
}
STATES = {"like-init": "noise", "zero": "zeros"}
END_OF_TURN = 65508  # <|end_turn|> in the vocabulary of 65,536, which the published configuration leaves out


def plan(read: Reader) -> Plan:
    """Huginn-0125: prelude, core and coda, the state concatenated with the prelude's output, a noise state, norms on sums."""
    for key, value in FIXED.items():
        read.only(key, value, default=value)
    state = read.word("state_init", default="like-init")
    if state not in STATES:
        raise read.refuse("state_init", state, " or ".join(map(repr, STATES)))
    D, H = read.whole("n_embd", "hidden_size"), read.whole("n_heads", "num_attention_heads")
    if (kv := read.whole("num_key_value_heads", default=H)) != H:
        raise read.refuse("num_key_value_heads", kv, f"{H}, as many as n_heads")
    if (width := read.whole("head_dim", default=D // H)) * H != D:
        raise read.refuse("head_dim", width, f"n_embd / n_heads, {D // H}")
    tied, V = read.flag("tie_embeddings", "tie_word_embeddings", default=True), read.whole("padded_vocab_size", "vocab_size")
    P, C, Q = (read.whole(f"n_layers_in_{part}") for part in ("prelude", "recurrent_block", "coda"))
    if (layers := read.whole("n_layers", "num_hidden_layers", default=P + C + Q)) != P + C + Q:
        raise read.refuse("n_layers", layers, f"{P + C + Q}, the layers of prelude, recurrent block and coda")
    c = LoopedConfig(
        vocab_size=V,
        d_model=D,
        n_heads=H,
        qk_bias=True,
        d_ff=read.whole("intermediate_size"),
        prelude=P,
        core=C,
        coda=Q,
        loops=read.whole("mean_recurrence", default=32),
        block="sandwich_sum",
        injection="concat",
        injection_bias=read.flag("bias", default=False),
        state_init=STATES[state],
        state_noise="truncated",
        state_std=0.4**0.5,
        readout_order="norm_coda_norm",
        rope="interleaved",
        rope_theta=read.number("rope_base", default=50000.0),
        norm_eps=read.number("norm_eps", default=1.0e-6),
        embedding_scale=D**0.5,
        tie_word_embeddings=tied,
    )
    stacks = {"prelude": ("prelude", c.prelude), "core_block": ("core", c.core), "coda": ("coda", c.coda)}
    pieces = [Piece("transformer.wte.weight", (c.vocab_size, D), "embed_tokens.weight")]
    for stack, (part, n) in stacks.items():
        pieces += [p for i in range(n) for p in layer_pieces(LAYER, c, f"transformer.{stack}.{i}", f"{part}.{i}")]
    pieces += [
        Piece("transformer.adapter.weight", (D, 2 * D), "injection.adapter.weight"),
        *([Piece("transformer.adapter.bias", (D,), "injection.adapter.bias")] if c.injection_bias else []),
        Piece("transformer.ln_f.weight", (D,), "norm.weight"),
    ]
    head = Piece("lm_head.weight", (c.vocab_size, D), "lm_head.weight")
    stop = {*read.tokens("eos_token_id", V), END_OF_TURN}
    return Plan(
        "Huginn",
        c,
        tuple(pieces if tied else [*pieces, head]),
        spare=frozenset({"freqs_cis", "transformer.freqs_cis"}),  # the rotation's table, made anew
        twins=((head.source, pieces[0].source),) if tied else (),
        stop=tuple(sorted(t for t in stop if t < c.vocab_size)),
        pad=read.token("pad_token_id", V),
        start=read.token("bos_token_id", V),
        dtype=read.dtype("bfloat16"),
    )
