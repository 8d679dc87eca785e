"""Leaving the loop early, token by token: Ouro's exit gate, its distribution and its threshold.

All loop steps are computed; only which one is read changes. Probabilities are formed in float32 at least: rounded to bf16, a
cumulative probability reaches 1 before the last step. Shapes: B batch, T tokens, D d_model, V vocabulary, K loop steps.
"""

import torch


def gate_logits(model, states: list[torch.Tensor]) -> torch.Tensor:
    """The gate's logits of a LoopedModel on the normalised states. states: K raw states (B, T, D) -> (B, T, K).

    Raises ValueError when the model has no exit gate.
    """
    if model.exit_gate is None:
        raise ValueError("this model has no exit gate: its configuration would need exit_gate true")
    return torch.cat([model.exit_gate(model.norm(z)) for z in states], dim=-1)


def distribution(gates: torch.Tensor) -> torch.Tensor:
    """The probability of leaving after each step, the last taking what remains. gates: (B, T, K) -> (B, T, K).

    p_t = lambda_t prod_{s < t} (1 - lambda_s), lambda = sigmoid(gate).
    """
    leave = gates.to(torch.promote_types(gates.dtype, torch.float32)).sigmoid()
    stay = (1 - leave).cumprod(-1)
    before = torch.cat((torch.ones_like(stay[..., :1]), stay[..., :-1]), dim=-1)
    return torch.cat(((leave * before)[..., :-1], before[..., -1:]), dim=-1)


def steps(p: torch.Tensor, threshold: float) -> torch.Tensor:
    """The first step, from 0, whose cumulative probability reaches the threshold, else the last. p: (B, T, K) -> (B, T).

    A threshold of 1 or more is the last step, whatever the rounding.
    """
    K = p.shape[-1]
    if threshold >= 1:
        return torch.full(p.shape[:-1], K - 1, device=p.device)
    return (p.cumsum(-1) < threshold).sum(-1).clamp(max=K - 1)


def at_steps(states: list[torch.Tensor], step: torch.Tensor) -> torch.Tensor:
    """Each token's raw state at its own step. states: K of (B, T, D), step: (B, T) -> (B, T, D)."""
    return torch.stack(states).gather(0, step[None, :, :, None].expand(1, -1, -1, states[0].shape[-1]))[0]


def weighted_logits(model, states: list[torch.Tensor]) -> torch.Tensor:
    """Logits of every step, averaged with the exit distribution, of rows without padding. states: K raw states (B, T, D) ->
    (B, T, V)."""
    p = distribution(gate_logits(model, states))
    return sum(p[..., k, None].to(z.dtype) * model.readout(z) for k, z in enumerate(states))
