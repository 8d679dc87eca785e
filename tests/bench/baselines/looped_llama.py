"""A looped stack of transformers' own Llama decoder layers, trained one seed after another in plain eager mode.

It is the same model as the laptop arm without the boundary norm: pre-norm layers, rotary positions, gated feed-forward, the
same widths, initialisation, optimiser, schedule and batches. Shapes: B batch, T tokens, F fields, A answers, D d_model.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding


class LoopedLlama(nn.Module):
    """Embeddings, `layers` decoder layers applied `loops` times, a norm and a head."""

    def __init__(self, vocab_size: int, d_model: int, n_heads: int, d_ff: int, layers: int, loops: int):
        super().__init__()
        config = LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=d_model,
            intermediate_size=d_ff,
            num_attention_heads=n_heads,
            num_key_value_heads=n_heads,
            num_hidden_layers=layers,
            attn_implementation="sdpa",
        )
        self.loops = loops
        self.embed = nn.Embedding(vocab_size, d_model)
        self.layers = nn.ModuleList(LlamaDecoderLayer(config, i) for i in range(layers))
        self.rotary = LlamaRotaryEmbedding(config)
        self.norm = LlamaRMSNorm(d_model, eps=config.rms_norm_eps)
        self.head = nn.Linear(d_model, vocab_size, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
        nn.init.normal_(self.embed.weight, std=1.0)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, loops: int | None = None) -> torch.Tensor:
        """ids (B, T, F), positions (A,) or (B, A) -> logits (B, A, V)."""
        x = self.embed(ids).sum(dim=2)
        places = torch.arange(x.shape[1])[None]
        turns = self.rotary(x, places)
        for _ in range(loops or self.loops):
            for layer in self.layers:
                x = layer(x, position_embeddings=turns, position_ids=places)
        x = x[:, positions] if positions.dim() == 1 else x.gather(1, positions[..., None].expand(-1, -1, x.shape[-1]))
        return self.head(self.norm(x))


def train(model: LoopedLlama, batches, steps: int, lr: float, warmup: int, clip: float) -> None:
    """AdamW with a linear warm-up and a cosine to zero. batches: an iterator of batches as `lib.tasks` makes them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda s: (s + 1) / warmup if s < warmup else 0.5 * (1 + math.cos(math.pi * (s - warmup) / (steps - warmup))),
    )
    for _, batch in zip(range(steps), batches, strict=False):
        logits = model(torch.as_tensor(batch.ids), torch.as_tensor(batch.answer_positions))
        loss = F.cross_entropy(logits.flatten(0, 1), torch.as_tensor(batch.labels).flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        schedule.step()


@torch.no_grad()
def accuracy(model: LoopedLlama, instances) -> float:
    """The share of instances (`lib.tasks`) whose answer is right at the trained loop count."""
    logits = model(torch.as_tensor(instances.ids), torch.as_tensor(instances.answer_position[:, None]))
    return float(np.mean(logits[:, 0].argmax(-1).numpy() == instances.answer))
