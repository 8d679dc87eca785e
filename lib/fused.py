"""The layers' arithmetic for short sequences on a CPU: three functions whose backward passes are written out.

They compute what `layers` computes, in fewer passes over memory: a norm's gain is folded into the matrix behind it once a
pass (not once a loop step), the rotation is one complex product, and attention over a handful of tokens is two batched
products. Used where `suits` says so; `make bench` has the gain.

What did not pay at this size: a compiled step, which gains more but compiles each shape for longer than it saves on a model of
a thousand steps, and needs a compiler; bf16 products on a chip without units for them; oneDNN's linear; a larger malloc arena;
the last loop step at the answer positions alone, which would break the sweep's equality with a forward pass.

Shapes: B batch, T tokens, D d_model, H heads, E channels a head, O outputs of a matrix.
"""

import math

import torch
from torch import nn
from torch.autograd.function import once_differentiable

LONGEST = 64  # tokens; beyond it the (T, T) weights that attention keeps outgrow what it saves


def suits(x: torch.Tensor, context) -> bool:
    """Whether a pass over x (B, T, D) may use these functions: short rows without padding, in full precision, on a CPU, and
    not under autocast, which would choose another precision for each product."""
    full = x.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled("cpu")
    return full and x.device.type == "cpu" and x.shape[1] <= LONGEST and context.mask is None and context.cache is None


def untouched(layer) -> bool:
    """Whether the modules that `block` passes over are ones it knows, and as they were built: not replaced, and with no hook
    that would wait in vain (`instruments.module_calls` counts by hooks)."""
    attention = layer.attention
    if attention.qk_bias is not None or attention.kv_heads != attention.n_heads:
        return False
    linears, norms, passed = [attention.qkv], [layer.attention_norm], [attention]
    if dense(layer):
        linears.append(layer.feed_forward.gate_up)
        norms.append(layer.feed_forward_norm)
        passed.append(layer.feed_forward)
    stock = all(type(m) is nn.Linear for m in linears) and all(type(m) is nn.RMSNorm for m in norms)
    passed += linears + norms
    return stock and not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in passed)


def dense(layer) -> bool:
    """Whether the layer's feed-forward is the one that `block` computes; another runs as it is."""
    return hasattr(layer.feed_forward, "gate_up")


class NormLinear(torch.autograd.Function):
    """x / rms(x), then a matrix. x (B, T, D), matrix (O, D) with the norm's gain in it -> (B, T, O)."""

    @staticmethod
    def forward(ctx, x, matrix, eps):
        """Keeps x / rms(x), not x."""
        flat = x.reshape(-1, x.shape[-1])
        scale = torch.linalg.vector_norm(flat, dim=-1, keepdim=True).square_().div_(flat.shape[-1]).add_(eps).rsqrt_()
        normed = flat * scale
        ctx.save_for_backward(normed, scale, matrix)
        return torch.mm(normed, matrix.t()).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        """Gradients of the forward's arguments."""
        normed, scale, matrix = ctx.saved_tensors
        flat = grad.reshape(-1, grad.shape[-1])
        back = torch.mm(flat, matrix)
        along = (back * normed).sum(-1, keepdim=True).div_(-normed.shape[-1])  # no gradient flows along x itself
        back = back.addcmul_(normed, along).mul_(scale)
        of_matrix = torch.mm(flat.t(), normed) if ctx.needs_input_grad[1] else None  # none of a frozen layer
        return back.view(*grad.shape[:-1], -1), of_matrix, None


class Attend(torch.autograd.Function):
    """Causal attention with rotary positions. qkv (B, T, 3 H E), its query and key channels in pairs -> (B, T, H E).

    turns: (T, 2, H, E / 2) complex rotations of queries (with the 1 / sqrt(E) of the scores in them) and keys; causal:
    (T, T), minus infinity above the diagonal.
    """

    @staticmethod
    def forward(ctx, qkv, turns, causal):
        """Keeps rotated queries and keys, values and attention weights."""
        (B, T, width), H = qkv.shape, turns.shape[2]
        parts = qkv.new_empty(3, B, H, T, width // (3 * H))
        _turn(_by_token(parts), qkv.view(B, T, 3, H, -1), turns)
        q, k, v = parts.flatten(1, 2)  # (B H, T, E)
        weights = torch.baddbmm(causal, q, k.transpose(1, 2)).softmax(-1)
        ctx.save_for_backward(parts, weights, turns)
        return torch.bmm(weights, v).view(B, H, T, -1).transpose(1, 2).reshape(B, T, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        """Gradients of the forward's arguments."""
        parts, weights, turns = ctx.saved_tensors
        _, B, H, T, E = parts.shape
        q, k, v = parts.flatten(1, 2)
        grad = grad.view(B, T, H, E).transpose(1, 2).reshape(B * H, T, E)
        back = torch.empty_like(parts)
        of_q, of_k, of_v = back.flatten(1, 2)
        torch.bmm(weights.transpose(1, 2), grad, out=of_v)
        of_scores = torch._softmax_backward_data(torch.bmm(grad, v.transpose(1, 2)), weights, -1, weights.dtype)
        torch.bmm(of_scores, k, out=of_q)
        torch.bmm(of_scores.transpose(1, 2), q, out=of_k)
        out = grad.new_empty(B, T, 3, H, E)
        _turn(out, _by_token(back), turns.conj().resolve_conj())
        return out.view(B, T, -1), None, None


def _by_token(parts: torch.Tensor) -> torch.Tensor:
    """(3, B, H, T, E) seen as (B, T, 3, H, E)."""
    return parts.permute(1, 3, 0, 2, 4)


def _turn(out: torch.Tensor, x: torch.Tensor, turns: torch.Tensor) -> None:
    """Queries and keys of x (B, T, 3, H, E) rotated, values as they are, into out of the same shape."""
    pairs = (torch.view_as_complex(t[:, :, :2].unflatten(-1, (-1, 2))) for t in (x, out))
    torch.mul(next(pairs), turns, out=next(pairs))
    out[:, :, 2].copy_(x[:, :, 2])


class SwiGLU(torch.autograd.Function):
    """silu(gate) * up. x (B, T, 2 F), gate then up -> (B, T, F)."""

    @staticmethod
    def forward(ctx, x):
        """Keeps the sigmoid, whose exponential is the dear part."""
        gate, up = x.chunk(2, dim=-1)
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        ctx.save_for_backward(x, sigmoid, silu)
        return silu * up

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        """Gradients of the forward's arguments."""
        x, sigmoid, silu = ctx.saved_tensors
        out = torch.empty_like(x)
        of_gate, of_up = out.chunk(2, dim=-1)
        torch.mul(grad, silu, out=of_up)
        slope = torch.addcmul(silu, silu, sigmoid, value=-1).add_(sigmoid)
        torch.mul(slope.mul_(grad), x.chunk(2, dim=-1)[1], out=of_gate)
        return out


def prepare(context, attention) -> None:
    """Put what every layer of the pass shares on its context: turns, causal and the order of paired channels."""
    (T, half), n_heads, E = context.cos.shape[-2:], attention.n_heads, attention.head_width
    turns = torch.complex(context.cos[0, 0], context.sin[0, 0])[:, None, None]
    turns = torch.cat((turns * E**-0.5, turns), dim=1)
    context.turns = turns.expand(T, 2, n_heads, half).contiguous()
    context.causal = torch.full((T, T), -math.inf, dtype=context.cos.dtype).triu(1)
    # where channel i turns with channel i + E / 2, they stand side by side here, which changes no score
    width = n_heads * E
    as_is = torch.arange(width)
    pairs = as_is if attention.interleaved else as_is.view(n_heads, 2, half).transpose(1, 2).flatten()
    context.order = torch.cat((pairs, width + pairs, 2 * width + as_is))


def folded(layer, context) -> tuple[torch.Tensor, ...]:
    """The layer's first matrices with the gains of their norms in them, made once a pass: the loop comes by again.

    A context that is used once more, after the weights have changed or with gradients wanted, gets them afresh.
    """
    sources = [(layer.attention.qkv, layer.attention_norm)]
    if dense(layer):
        sources.append((layer.feed_forward.gate_up, layer.feed_forward_norm))
    state = torch.is_grad_enabled(), *(source.weight._version for pair in sources for source in pair)
    known, *matrices = context.folded.get(layer, (None,))
    if known != state:
        qkv, *rest = (linear.weight * norm.weight for linear, norm in sources)
        matrices = qkv[context.order], *rest
        context.folded[layer] = state, *matrices
    return tuple(matrices)


def block(x: torch.Tensor, layer, context) -> torch.Tensor:
    """One `layers.Block` on x (B, T, D) -> (B, T, D)."""
    attention = layer.attention
    if context.turns is None:
        prepare(context, attention)
    qkv, *gate_up = folded(layer, context)
    seen = Attend.apply(NormLinear.apply(x, qkv, layer.attention_norm.eps), context.turns, context.causal)
    x = layer.attention_sum_norm(x + layer.attention_branch_norm(attention.o(seen)))
    if not gate_up:
        return layer.fed(x, context)
    hidden = SwiGLU.apply(NormLinear.apply(x, *gate_up, layer.feed_forward_norm.eps))
    return layer.feed_forward_sum_norm(x + layer.feed_forward_branch_norm(layer.feed_forward.down(hidden)))
