"""Six looped classes that the installed transformers ships: which setting is their loop count, and each tiny and random.

Each reads its setting in `forward`, so it can be changed on a model that is already built. The library has more: ESMFold
recycles, and Zamba loops as modules of their own that share weights, as many as its configuration says.
"""

from collections.abc import Callable

import torch
from torch import nn
from transformers import (
    AlbertConfig,
    AlbertModel,
    DoryConfig,
    DoryForCausalLM,
    FunnelConfig,
    FunnelModel,
    HrmTextConfig,
    HrmTextForCausalLM,
    PerceiverConfig,
    PerceiverModel,
)
from transformers.models.inkling2_loop.modeling_inkling2_loop import Inkling2LoopForCausalLM, Inkling2LoopTextConfig

# model_type -> the configuration value that is the loop count
SETTINGS = {
    "albert": "num_hidden_layers",
    "dory": "n_recurrent_loops",
    "funnel": "block_repeats",  # one number for each of its blocks
    "hrm_text": "H_cycles",
    "inkling2_loop_text": "loop_num_passes",
    "perceiver": "num_blocks",
}
VOCABULARY = 50


def _albert():
    small = {"embedding_size": 8, "hidden_size": 16, "intermediate_size": 32, "num_hidden_groups": 1, "num_attention_heads": 2}
    return AlbertModel(AlbertConfig(vocab_size=VOCABULARY, num_hidden_layers=2, max_position_embeddings=32, **small))


def _dory():
    small = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    layers = {"num_hidden_layers": 4, "n_input_layers": 1, "n_output_layers": 1, "n_recurrent_loops": 2}
    return DoryForCausalLM(DoryConfig(vocab_size=VOCABULARY, sliding_window=16, **small, **layers))


def _funnel():
    small = {"d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 32}
    layers = {"block_sizes": [1, 2], "block_repeats": [2, 2], "num_decoder_layers": 1}
    return FunnelModel(FunnelConfig(vocab_size=VOCABULARY, **small, **layers))


def _hrm():
    small = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "head_dim": 8, "num_hidden_layers": 2}
    # its cache would be sized by the cycles it was built with
    return HrmTextForCausalLM(HrmTextConfig(vocab_size=VOCABULARY, H_cycles=2, L_cycles=2, use_cache=False, **small))


def _inkling():
    small = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "moe_intermediate_size": 8}
    small |= {"swa_num_attention_heads": 2, "swa_num_key_value_heads": 1, "swa_head_dim": 8, "sliding_window_size": 8}
    small |= {"d_rel": 4, "rel_extent": 8, "n_routed_experts": 2, "num_experts_per_tok": 1, "loop_gate_rank": 4}
    kinds = ["hybrid_sliding", "hybrid_sliding", "hybrid", "hybrid_sliding"]
    layers = {"num_hidden_layers": 4, "layer_types": kinds, "n_layers_per_attn_res_block": 1, "eos_token_id": 2}
    layers |= {"loop_layer_index_start": 1, "loop_layer_index_end": 3, "loop_num_passes": 2}
    vocabulary = {"vocab_size": VOCABULARY, "unpadded_vocab_size": VOCABULARY}
    return Inkling2LoopForCausalLM(Inkling2LoopTextConfig(**vocabulary, **small, **layers))


def _perceiver():
    small = {"num_latents": 4, "d_latents": 16, "d_model": 12, "num_self_attention_heads": 2, "num_cross_attention_heads": 2}
    return PerceiverModel(PerceiverConfig(num_blocks=2, num_self_attends_per_block=2, **small))


CLASSES: dict[str, Callable[[], nn.Module]] = {
    "ALBERT": _albert,
    "Dory": _dory,
    "Funnel": _funnel,
    "HRM-Text": _hrm,
    "Inkling 2 Loop": _inkling,
    "Perceiver": _perceiver,
}


def tiny(name: str, seed: int = 0) -> nn.Module:
    """One of CLASSES, small, random and in eval mode; the global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return CLASSES[name]().eval()


def set_loops(model: nn.Module, loops: int) -> None:
    """Set the loop count of a class in SETTINGS. Raises ValueError for another class, or when loops is below 1."""
    setting = SETTINGS.get(model.config.model_type)
    if setting is None:
        raise ValueError(f"the loop setting of model_type {model.config.model_type!r} is not known: {', '.join(SETTINGS)} are")
    if loops < 1:
        raise ValueError(f"loops is {loops}: it must be at least 1")
    now = getattr(model.config, setting)
    setattr(model.config, setting, [loops] * len(now) if isinstance(now, list) else loops)


def run(model: nn.Module, loops: int) -> None:
    """One forward pass of a model that `tiny` built, on eight tokens, at a loop count."""
    set_loops(model, loops)
    if model.config.model_type == "perceiver":
        model(inputs=torch.linspace(-1, 1, 8 * model.config.d_model).view(1, 8, -1))
    else:
        model(input_ids=torch.arange(5, 13)[None])
