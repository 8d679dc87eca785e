"""What training minimises: the last loop step's loss, or every step's, weighted by the exit gate as in Ouro.

Shapes: B batch, T tokens, F fields, A answers, V vocabulary, K loop steps.
"""

import torch
import torch.nn.functional as F

from lib import exits

LOSSES = ("last", "exit_weighted")
TINY = 1e-9  # under the logarithm of a probability


def last(model, ids: torch.Tensor, positions: torch.Tensor, labels: torch.Tensor, loops: int, **how) -> torch.Tensor:
    """Mean cross entropy (nats) of the last step's readout. ids (B, T, F), positions (A,), labels (B, A); how: of `forward`."""
    logits = model(ids, loops=loops, answer_positions=positions, **how).logits
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def exit_weighted(
    model, ids: torch.Tensor, positions: torch.Tensor, labels: torch.Tensor, loops: int, entropy: float = 0.0, **how
) -> torch.Tensor:
    """Ouro's: each step's cross entropy (nats) weighted by the probability of leaving there, less `entropy` times the entropy
    of those probabilities, at every answer. Shapes as in `last`. Raises ValueError when the model has no exit gate."""
    context = model.context(ids, routes=how.pop("routes", None))
    states = list(model.trajectory(ids, loops, context=context, **how))
    losses, at = [], [z[:, positions] for z in states]
    for z in states:
        logits = model.readout(z, positions, context)
        losses.append(F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape))
    p = exits.distribution(exits.gate_logits(model, at))  # (B, A, K)
    spread = -(p * (p + TINY).log()).sum(-1)
    each = (p * torch.stack(losses, dim=-1)).sum(-1) - entropy * spread
    counted = labels != -100
    return each[counted].mean()


def loss(model, ids, positions, labels, loops: int, recipe, routes=None, **how) -> torch.Tensor:
    """The recipe's loss. `how`: what the trajectory takes beside the loop count. routes: an empty `experts.Routes` that records
    what routers choose; their load-balancing loss is added at the recipe's weight."""
    if recipe.loss == "last":
        found = last(model, ids, positions, labels, loops, routes=routes, **how)
    else:
        found = exit_weighted(model, ids, positions, labels, loops, recipe.exit_entropy, routes=routes, **how)
    return found if routes is None else found + recipe.balance * routes.balance()
