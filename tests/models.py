"""Small models and inputs that several tests share."""

import torch

from lib.config import LoopedConfig
from lib.looped import LoopedModel, build

ENVELOPES = {"full_stack": (0, 2, 0), "sandwich": (1, 2, 1)}

EXPERTS = {"feed_forward": "experts", "n_experts": 5, "experts_per_token": 2, "d_expert": 8}

# name -> configuration values beside the defaults: every value of every axis is in one of them
VARIANTS = {
    "raw readout": {"readout": "raw"},
    "norm, coda, norm": {"readout_order": "norm_coda_norm"},
    "zeros": {"state_init": "zeros", "injection": "concat", "injection_bias": True},
    "grouped queries": {"n_heads": 4, "n_kv_heads": 2, "head_dim": 6, "rope": "interleaved"},
    "axes paper": {"injection": "diagonal", "rope": "interleaved", "state_init": "noise", "state_noise": "hash"},
    "from tokens": {"injection": "diagonal", "injection_source": "tokens", "rope_theta": 100.0},
    "Ouro": {"block": "sandwich", "boundary": 1, "exit_gate": True},
    "Huginn": {
        "block": "sandwich_sum",
        "injection": "concat",
        "qk_bias": True,
        "rope": "interleaved",
        "readout_order": "norm_coda_norm",
        "state_init": "noise",
        "state_noise": "truncated",
        "embedding_scale": 4.0,
        "tie_word_embeddings": True,
    },
    "shared states": {"state": "shared", "h_cycles": 2, "l_cycles": 1, "injection": "diagonal"},
    "split states": {
        "state": "split",
        "h_cycles": 2,
        "l_cycles": 1,
        "repeats": 2,
        "injection": "concat",
        "state_init": "noise",
    },
    "unrolled": {"unrolled": True, "loops": 5},
    "unrolled, injected": {"unrolled": True, "loops": 5, "injection": "diagonal", "block": "sandwich"},
    "experts": EXPERTS,
    "shared states, experts": {
        "state": "shared",
        "h_cycles": 2,
        "l_cycles": 1,
        "injection": "diagonal",
        "feed_forward": "experts",
        "n_experts": 4,
        "experts_per_token": 3,
        "d_expert": 5,
    },
}

# every variant in both envelopes, as far as there is one
CASES = {f"{envelope}, {name}": (envelope, values) for envelope in ENVELOPES for name, values in VARIANTS.items()}
CASES = {k: v for k, v in CASES.items() if v[0] == "sandwich" or "readout_order" not in v[1]}


def small(seed: int = 0, envelope: str = "full_stack", **values) -> LoopedModel:
    """A model of 16 channels with random norm gains, biases and injections, so that one in the wrong place shows."""
    prelude, core, coda = ENVELOPES[envelope]
    layers = {"prelude": prelude, "core": core, "coda": coda}
    config = LoopedConfig(**{"vocab_size": 23, "d_model": 16, "n_heads": 2, "d_ff": 24} | layers | values)
    model = build(config, seed).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.3 * torch.randn(parameter.shape, generator=generator))
            elif "bias" in name or "injection" in name:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def tokens(batch: int = 3, length: int = 7, vocab: int = 23, fields: int | None = None, seed: int = 0) -> torch.Tensor:
    """Random ids, (batch, length) or (batch, length, fields)."""
    shape = (batch, length) if fields is None else (batch, length, fields)
    return torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(seed))
