"""The layers a looped model is made of: attention, gated feed-forward, and the two residual blocks built so far.

Shapes: B batch, T tokens, D d_model, H heads, E = D / H channels a head.
"""

import torch
import torch.nn.functional as F
from torch import nn

from lib import fused


class Context:
    """What every layer of one pass shares: rotary tables and the attention mask.

    cos, sin: (B or 1, 1, T, E / 2); mask: (B, 1, T, T) bool, True where a query may look, or None for plain causal.
    """

    def __init__(self, positions: torch.Tensor, mask: torch.Tensor | None, config, dtype: torch.dtype):
        half = config.d_model // config.n_heads // 2
        wide = torch.promote_types(dtype, torch.float32)  # angles are never formed in half precision
        frequency = config.rope_theta ** (-torch.arange(half, device=positions.device, dtype=wide) / half)
        angle = positions[:, None, :, None].to(wide) * frequency
        self.positions, self.mask = positions, mask
        self.cos, self.sin = angle.cos().to(dtype), angle.sin().to(dtype)
        self.turns, self.folded = None, {}  # made by `fused` where it is used


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding in the half-split form. x: (..., B, H, T, E) -> the same."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    """Causal multi-head attention with rotary positions and no biases. (B, T, D) -> (B, T, D)."""

    def __init__(self, config):
        super().__init__()
        self.n_heads = config.n_heads
        self.qkv = nn.Linear(config.d_model, 3 * config.d_model, bias=False)  # rows: queries, keys, values
        self.o = nn.Linear(config.d_model, config.d_model, bias=False)

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        """x: (B, T, D) -> (B, T, D)."""
        B, T, D = x.shape
        qkv = self.qkv(x).view(B, T, 3, self.n_heads, -1).permute(2, 0, 3, 1, 4)  # (3, B, H, T, E)
        (q, k), v = rotate(qkv[:2], context.cos, context.sin), qkv[2]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=context.mask, is_causal=context.mask is None)
        return self.o(y.transpose(1, 2).reshape(B, T, D))


class FeedForward(nn.Module):
    """SwiGLU feed-forward: down(silu(gate x) * up x). (B, T, D) -> (B, T, D)."""

    def __init__(self, config):
        super().__init__()
        self.gate_up = nn.Linear(config.d_model, 2 * config.d_ff, bias=False)  # rows: gate, up
        self.down = nn.Linear(config.d_ff, config.d_model, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B, T, D) -> (B, T, D)."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """One residual layer. pre_norm: x + f(norm x); sandwich (Ouro): x + norm(f(norm x)), for attention, then feed-forward."""

    def __init__(self, config):
        super().__init__()
        self.attention, self.feed_forward = Attention(config), FeedForward(config)
        self.attention_norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.feed_forward_norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        branch = (lambda: nn.RMSNorm(config.d_model, eps=config.norm_eps)) if config.block == "sandwich" else nn.Identity
        self.attention_branch_norm, self.feed_forward_branch_norm = branch(), branch()

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        """x: (B, T, D) -> (B, T, D)."""
        if fused.suits(x, context) and fused.untouched(self):
            return fused.block(x, self, context)
        return self.plain(x, context)

    def plain(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        """The same by torch's own operations, one after the other."""
        x = x + self.attention_branch_norm(self.attention(self.attention_norm(x), context))
        return x + self.feed_forward_branch_norm(self.feed_forward(self.feed_forward_norm(x)))
