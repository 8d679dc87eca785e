"""Muon for stacks of matrices, since torch's own takes one matrix at a time.

Source: torch.optim.Muon, whose arithmetic, defaults and state these are, each matrix of a stack by itself. Shapes: S matrices
in a stack, O outputs, D inputs of a matrix.
"""

import math

import torch


def orthogonalised(
    matrices: torch.Tensor,
    coefficients: tuple[float, float, float],
    steps: int,
    eps: float,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Each matrix with its singular values brought near 1, by a Newton-Schulz iteration in `dtype`. (S, O, D) -> the same."""
    a, b, c = coefficients
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = (matrices.mT if tall else matrices).to(dtype)
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon on parameters (S, O, D). Its state and its groups are torch's, stacked."""

    def __init__(self, params, lr: float, weight_decay: float):
        one = torch.nn.Parameter(torch.empty(1, 1))
        super().__init__(params, torch.optim.Muon([one], lr=lr, weight_decay=weight_decay).defaults)

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """One step along every parameter's gradient. closure: none is taken."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(p.grad)
                momentum = state["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
                update = p.grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
                update = orthogonalised(update, group["ns_coefficients"], group["ns_steps"], group["eps"])
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * math.sqrt(max(1, p.shape[-2] / p.shape[-1])))
