"""The layers' arithmetic for short sequences on a CPU: a layer's two branches with their backward passes written out.

They compute what `layers` computes, in fewer passes over memory: a norm's gain is folded into the matrix behind it once a
pass (not once a loop step), the rotation is one complex product, attention over a handful of tokens is two batched
products, the sum is formed by the branch's last product, and what is quick to form again is not kept for the way back.
Used where `suits` says so; `make bench` has the gain.

What did not pay at this size: a compiled step, which gains more but compiles each shape for longer than it saves on a model of
a thousand steps, and needs a compiler; bf16 products on a chip without units for them; oneDNN's linear; a larger malloc arena;
the last loop step at the answer positions alone, which would break the sweep's equality with a forward pass.

Shapes: B batch, T tokens, N rows (B T), D d_model, H heads, E channels a head, F d_ff, O outputs of a matrix.
"""

import math

import torch
from torch import nn
from torch.autograd.function import once_differentiable

LONGEST = 64  # tokens; beyond it the (T, T) weights that attention keeps outgrow what it saves
LEAST = -80.0  # a score this far below the largest weighs less than a float32's last digit


def suits(x: torch.Tensor, context) -> bool:
    """Whether a pass over x (B, T, D) may use these functions: short rows without padding, in full precision, on a CPU, and
    not under autocast, which would choose another precision for each product, nor under vmap."""
    full = x.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled("cpu")
    full = full and not torch._C._are_functorch_transforms_active()
    return full and x.device.type == "cpu" and x.shape[1] <= LONGEST and context.mask is None and context.cache is None


def untouched(layer) -> bool:
    """Whether the modules that `block` passes over are ones it knows, and as they were built: not replaced, and with no hook
    that would wait in vain (`instruments.module_calls` counts by hooks)."""
    attention = layer.attention
    if attention.qk_bias is not None or attention.kv_heads != attention.n_heads:
        return False
    linears, norms, passed = [attention.qkv, attention.o], [layer.attention_norm], [attention]
    if dense(layer):
        linears += [layer.feed_forward.gate_up, layer.feed_forward.down]
        norms.append(layer.feed_forward_norm)
        passed.append(layer.feed_forward)
    stock = all(type(m) is nn.Linear for m in linears) and all(type(m) is nn.RMSNorm for m in norms)
    passed += linears + norms
    return stock and not any(hooked(m) for m in passed)


def hooked(module: nn.Module) -> bool:
    """Whether someone waits for the module to be called."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def unchanged(norm: nn.Module) -> bool:
    """Whether a branch goes to the sum as it is: then the sum is formed by the branch's last product."""
    return type(norm) is nn.Identity and not hooked(norm)


def dense(layer) -> bool:
    """Whether the layer's feed-forward is the one that `block` computes; another runs as it is."""
    return hasattr(layer.feed_forward, "gate_up")


class AttentionBranch(torch.autograd.Function):
    """Norm, queries, keys and values, rotation, causal attention, output matrix. x (B, T, D) -> (B, T, D).

    qkv (3 H E, D) with the norm's gain in it and its query and key channels in pairs; o (D, H E); turns: (T, 2, H, E / 2)
    complex rotations of queries (with the 1 / sqrt(E) of the scores in them) and keys; causal: (T, T), minus infinity above
    the diagonal; residual: x is added.
    """

    @staticmethod
    def forward(ctx, x, qkv, o, turns, causal, eps, residual):
        """Keeps x, rotated queries and keys, values, and attention weights; what is quick to form again is not kept, since
        memory that has left the cache is the dearest part."""
        (B, T, _), H = x.shape, turns.shape[2]
        flat = x.reshape(B * T, -1)
        scale = inverse_rms(flat, eps)
        made = torch.mm(flat * scale, qkv.t()).view(B, T, 3, H, -1)
        parts = made.new_empty(3, B, H, T, made.shape[-1])
        turn(by_token(parts), made, turns)
        q, k, v = parts.flatten(1, 2)  # (B H, T, E)
        weights = causal_softmax_(torch.baddbmm(causal, q, k.transpose(1, 2)), causal.exp())
        ctx.save_for_backward(flat, scale, parts, weights, qkv, o, turns)
        ctx.residual = residual
        seen = _by_row(torch.bmm(weights, v), B)
        return (torch.addmm(flat, seen, o.t()) if residual else torch.mm(seen, o.t())).view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        """Gradients of the forward's arguments."""
        flat, scale, parts, weights, qkv, o, turns = ctx.saved_tensors
        _, B, H, T, E = parts.shape
        q, k, v = parts.flatten(1, 2)
        out = grad.reshape(B * T, -1)
        of_o = torch.mm(out.t(), _by_row(torch.bmm(weights, v), B)) if ctx.needs_input_grad[2] else None
        of_seen = torch.mm(out, o).view(B, T, H, E).transpose(1, 2).reshape(B * H, T, E)
        back = torch.empty_like(parts)
        of_q, of_k, of_v = back.flatten(1, 2)
        torch.bmm(weights.transpose(1, 2), of_seen, out=of_v)
        of_weights = torch.bmm(of_seen, v.transpose(1, 2))
        of_scores = of_weights.sub_(row_sums(of_weights * weights)).mul_(weights)
        torch.bmm(of_scores, k, out=of_q)
        torch.bmm(of_scores.transpose(1, 2), q, out=of_k)
        of_made = grad.new_empty(B, T, 3, H, E)
        turn(of_made, by_token(back), turns.conj().resolve_conj())
        of_x, of_qkv = norm_linear_backward(of_made.view(B * T, -1), flat, scale, qkv, ctx.needs_input_grad[1])
        return (of_x.add_(out) if ctx.residual else of_x).view(grad.shape), of_qkv, of_o, None, None, None, None


class FeedForwardBranch(torch.autograd.Function):
    """Norm, gate and up matrices, silu(gate) * up, down matrix. x (B, T, D) -> (B, T, D).

    gate_up (2 F, D) with the norm's gain in it; down (D, F); residual: x is added.
    """

    @staticmethod
    def forward(ctx, x, gate_up, down, eps, residual):
        """Keeps x, gate and up."""
        flat = x.reshape(-1, x.shape[-1])
        scale = inverse_rms(flat, eps)
        both = torch.mm(flat * scale, gate_up.t())
        gate, up = both.chunk(2, dim=-1)
        hidden = torch.sigmoid(gate).mul_(gate).mul_(up)
        ctx.save_for_backward(flat, scale, both, gate_up, down)
        ctx.residual = residual
        return (torch.addmm(flat, hidden, down.t()) if residual else torch.mm(hidden, down.t())).view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        """Gradients of the forward's arguments."""
        flat, scale, both, gate_up, down = ctx.saved_tensors
        out = grad.reshape(flat.shape)
        gate, up = both.chunk(2, dim=-1)
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        of_down = torch.mm(out.t(), silu * up) if ctx.needs_input_grad[2] else None
        of_hidden = torch.mm(out, down)
        of_both = torch.empty_like(both)
        of_gate, of_up = of_both.chunk(2, dim=-1)
        torch.mul(of_hidden, silu, out=of_up)
        slope = torch.addcmul(silu, silu, sigmoid, value=-1).add_(sigmoid)
        torch.mul(slope.mul_(of_hidden), up, out=of_gate)
        of_x, of_gate_up = norm_linear_backward(of_both, flat, scale, gate_up, ctx.needs_input_grad[1])
        return (of_x.add_(out) if ctx.residual else of_x).view(grad.shape), of_gate_up, of_down, None, None


def inverse_rms(flat: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / sqrt(mean of squares + eps) of every row. flat (N, D) -> (N, 1)."""
    return torch.linalg.vector_norm(flat, dim=-1, keepdim=True).square_().div_(flat.shape[-1]).add_(eps).rsqrt_()


def norm_linear_backward(grad, flat, scale, matrix, wanted: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients of x and, where wanted, of the matrix, through matrix (x / rms(x)). grad (N, O), flat (N, D), scale (N, 1),
    matrix (O, D) -> (N, D), (O, D)."""
    normed, back = flat * scale, torch.mm(grad, matrix)
    along = row_sums(back * normed).div_(-normed.shape[-1])  # no gradient flows along x itself
    return back.addcmul_(normed, along).mul_(scale), torch.mm(grad.t(), normed) if wanted else None


def row_sums(x: torch.Tensor) -> torch.Tensor:
    """x (..., S) summed over its last dimension, kept, as a product with ones: torch's own sum is dear on short rows."""
    flat = x.reshape(-1, x.shape[-1])
    return torch.mv(flat, flat.new_ones(flat.shape[1])).view(*x.shape[:-1], 1)


def causal_softmax_(scores: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Softmax over the last dimension, in place, of scores that are minus infinity where `seen` (T, T) is 0 (and 1 elsewhere).

    torch's own leaves the vector units idle on rows this short, and an exponential that underflows takes ten times as long.
    """
    scores.sub_(scores.amax(-1, keepdim=True)).clamp_(min=LEAST).exp_().mul_(seen)
    return scores.div_(row_sums(scores))


def by_token(parts: torch.Tensor) -> torch.Tensor:
    """(3, B, H, T, E) seen as (B, T, 3, H, E)."""
    return parts.permute(1, 3, 0, 2, 4)


def _by_row(heads: torch.Tensor, B: int) -> torch.Tensor:
    """(B H, T, E) -> (B T, H E)."""
    return heads.unflatten(0, (B, -1)).transpose(1, 2).reshape(B * heads.shape[1], -1)


def turn(out: torch.Tensor, x: torch.Tensor, turns: torch.Tensor) -> None:
    """Queries and keys of x (B, T, 3, H, E) rotated, values as they are, into out of the same shape."""
    pairs = (torch.view_as_complex(t[:, :, :2].unflatten(-1, (-1, 2))) for t in (x, out))
    torch.mul(next(pairs), turns, out=next(pairs))
    out[:, :, 2].copy_(x[:, :, 2])


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
    whole = unchanged(layer.attention_branch_norm)
    norm, o = layer.attention_norm, attention.o.weight
    y = AttentionBranch.apply(x, qkv, o, context.turns, context.causal, norm.eps, whole)
    x = layer.attention_sum_norm(y if whole else x + layer.attention_branch_norm(y))
    if not gate_up:
        return layer.fed(x, context)
    whole = unchanged(layer.feed_forward_branch_norm)
    y = FeedForwardBranch.apply(x, *gate_up, layer.feed_forward.down.weight, layer.feed_forward_norm.eps, whole)
    return layer.feed_forward_sum_norm(y if whole else x + layer.feed_forward_branch_norm(y))
