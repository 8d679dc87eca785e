"""The layers a looped model is made of: attention, gated feed-forward, the three residual blocks, and input injection.

Shapes: B batch, T tokens, S tokens seen (T and those in the cache), D d_model, H query heads, G key and value heads, E channels
a head.
"""

import torch
import torch.nn.functional as F
from torch import nn

from lib import fused
from lib.experts import Experts


class Context:
    """What every layer of one pass shares: rotary tables, the attention mask and the cache.

    cos, sin: (B or 1, 1, T, E / 2); mask: (B or 1, 1, T, S) bool, True where a query may look, or None where every query may
    look at itself and all before it; cache: where keys and values of earlier tokens are, or None; routes: what routers chose
    and are made to choose (`experts.Routes`), or None.
    """

    def __init__(self, positions: torch.Tensor, mask: torch.Tensor | None, config, dtype: torch.dtype, cache=None, routes=None):
        half = config.head_width // 2
        wide = torch.promote_types(dtype, torch.float32)  # angles are never formed in half precision
        frequency = config.rope_theta ** (-torch.arange(half, device=positions.device, dtype=wide) / half)
        angle = positions[:, None, :, None].to(wide) * frequency
        self.positions, self.mask, self.cache, self.routes = positions, mask, cache, routes
        # the published models round the half-split form's tables and not the interleaved form's
        kept = dtype if config.rope == "half" else wide
        self.cos, self.sin = angle.cos().to(kept), angle.sin().to(kept)
        self.turns, self.folded = None, {}  # made by `fused` where it is used


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """Rotary position embedding. x: (..., B, H, T, E) -> the same. Pairs are (i, i + E / 2), or (2 i, 2 i + 1) interleaved."""
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    turned = a * cos - b * sin, b * cos + a * sin
    return (torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)).to(x.dtype)


class Attention(nn.Module):
    """Causal attention with rotary positions, G key and value heads for H query heads. (B, T, D) -> (B, T, D)."""

    def __init__(self, config):
        super().__init__()
        self.n_heads, self.kv_heads, self.head_width = config.n_heads, config.kv_heads, config.head_width
        self.interleaved = config.rope == "interleaved"
        turned = (self.n_heads + self.kv_heads) * self.head_width
        # rows: queries, keys, values
        self.qkv = nn.Linear(config.d_model, turned + self.kv_heads * self.head_width, bias=False)
        self.qk_bias = nn.Parameter(torch.zeros(turned)) if config.qk_bias else None
        self.o = nn.Linear(self.n_heads * self.head_width, config.d_model, bias=False)

    def forward(self, x: torch.Tensor, context: Context, slot: int | None = None) -> torch.Tensor:
        """x: (B, T, D) -> (B, T, D). slot: where the context's cache keeps this layer's keys and values of this loop step."""
        B, T, _ = x.shape
        H, G, E = self.n_heads, self.kv_heads, self.head_width
        qkv = self.qkv(x)
        if self.qk_bias is not None:
            qkv = torch.cat((qkv[..., : len(self.qk_bias)] + self.qk_bias, qkv[..., len(self.qk_bias) :]), dim=-1)
        if H == G:
            qkv = qkv.view(B, T, 3, H, E).permute(2, 0, 3, 1, 4)  # (3, B, H, T, E)
            (q, k), v = rotate(qkv[:2], context.cos, context.sin, self.interleaved), qkv[2]
        else:
            q, k, v = (part.unflatten(-1, (-1, E)).transpose(1, 2) for part in qkv.split([H * E, G * E, G * E], dim=-1))
            q, k = (rotate(part, context.cos, context.sin, self.interleaved) for part in (q, k))
        if context.cache is not None:
            k, v = context.cache.update(k, v, slot)
        causal = context.mask is None and q.shape[2] == k.shape[2]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=context.mask, is_causal=causal, enable_gqa=H != G)
        return self.o(y.transpose(1, 2).reshape(B, T, -1))


class FeedForward(nn.Module):
    """SwiGLU feed-forward: down(silu(gate x) * up x). (B, T, D) -> (B, T, D)."""

    def __init__(self, config):
        super().__init__()
        self.gate_up = nn.Linear(config.d_model, 2 * config.d_ff, bias=False)  # rows: gate, up
        self.down = nn.Linear(config.d_ff, config.d_model, bias=False)

    def forward(self, x: torch.Tensor, routes=None) -> torch.Tensor:
        """x: (B, T, D) -> (B, T, D). routes: none are taken here."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


FEED_FORWARDS = {"dense": FeedForward, "experts": Experts}


class Block(nn.Module):
    """One residual layer, for attention, then feed-forward: x + f(norm x) (pre_norm), x + norm(f(norm x)) (sandwich, Ouro) or
    norm(x + f(norm x)) (sandwich_sum, Huginn)."""

    def __init__(self, config):
        super().__init__()

        def norm(used=True):
            return nn.RMSNorm(config.d_model, eps=config.norm_eps) if used else nn.Identity()

        self.attention, self.feed_forward = Attention(config), FEED_FORWARDS[config.feed_forward](config)
        self.attention_norm, self.feed_forward_norm = norm(), norm()
        self.attention_branch_norm, self.feed_forward_branch_norm = (norm(config.block == "sandwich") for _ in range(2))
        self.attention_sum_norm, self.feed_forward_sum_norm = (norm(config.block == "sandwich_sum") for _ in range(2))

    def forward(self, x: torch.Tensor, context: Context, slot: int | None = None) -> torch.Tensor:
        """x: (B, T, D) -> (B, T, D). slot: see `Attention.forward`."""
        if fused.suits(x, context) and fused.untouched(self):
            return fused.block(x, self, context)
        return self.plain(x, context, slot)

    def plain(self, x: torch.Tensor, context: Context, slot: int | None = None) -> torch.Tensor:
        """The same by torch's own operations, one after the other."""
        x = self.attention_sum_norm(x + self.attention_branch_norm(self.attention(self.attention_norm(x), context, slot)))
        return self.fed(x, context)

    def fed(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        """The second half, from attention's sum on. (B, T, D) -> (B, T, D)."""
        y = self.feed_forward(self.feed_forward_norm(x), context.routes)
        return self.feed_forward_sum_norm(x + self.feed_forward_branch_norm(y))


class ConcatInjection(nn.Module):
    """Huginn's adapter: W [z, e], the state first. z, e: (B, T, D) -> (B, T, D)."""

    def __init__(self, config):
        super().__init__()
        self.adapter = nn.Linear(2 * config.d_model, config.d_model, bias=config.injection_bias)

    def forward(self, z: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
        """z, e: (B, T, D) -> (B, T, D)."""
        return self.adapter(torch.cat((z, e), dim=-1))


class DiagonalInjection(nn.Module):
    """The axes paper's: exp(-dt exp(A_log)) z + dt W e, channel by channel with dt = softplus(dt_bias). (B, T, D) -> same."""

    def __init__(self, config):
        super().__init__()
        self.adapter = nn.Linear(config.d_model, config.d_model, bias=False)
        self.A_log, self.dt_bias = (nn.Parameter(torch.empty(config.d_model)) for _ in range(2))

    def forward(self, z: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
        """z, e: (B, T, D) -> (B, T, D)."""
        dt = F.softplus(self.dt_bias)
        return z * torch.exp(-dt * self.A_log.exp()) + dt * self.adapter(e)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Where training starts: W the identity, dt = 1, a decay of 1 / e."""
        nn.init.eye_(self.adapter.weight)
        nn.init.zeros_(self.A_log)
        nn.init.constant_(self.dt_bias, torch.expm1(torch.ones((), dtype=torch.float64)).log().item())


INJECTIONS = {"concat": ConcatInjection, "diagonal": DiagonalInjection}
