"""What training minimises: the last loop step's loss, or every step's, weighted by the exit gate as in Ouro.

Losses are formed in float32 at least. Shapes: B batch, T tokens, F fields, A answers, V vocabulary, K loop steps.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from lib import exits

LOSSES = ("last", "exit_weighted")
TINY = 1e-9  # under the logarithm of a probability


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, **how) -> torch.Tensor:
    """torch's, of logits (B, A, V) at labels (B, A)."""
    return F.cross_entropy(logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32)), labels.flatten(), **how)


def last(
    model, ids: torch.Tensor, positions: torch.Tensor, labels: torch.Tensor, loops: int, read: torch.Tensor | None = None, **how
) -> torch.Tensor:
    """Mean cross entropy (nats) of the last step's readout. ids (B, T, F), positions (A,), labels (B, A); how: of `forward`.

    read: the loop step to read in place of the last, a number from 1 in a tensor (); how is then what the trajectory takes.
    """
    if read is None:
        return cross_entropy(model(ids, loops=loops, answer_positions=positions, **how).logits, labels)
    context = model.context(ids, routes=how.pop("routes", None))
    states = torch.stack(list(model.trajectory(ids, loops, context=context, **how)))
    return cross_entropy(model.readout(states.index_select(0, read[None] - 1)[0], positions, context), labels)


def counted_mean(values: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """The mean of the values that are counted. Both (B, A)."""
    return values[counted].mean()


def masked_mean(values: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """`counted_mean` without a shape that depends on what is counted."""
    return torch.where(counted, values, 0).sum() / counted.sum()


def exit_weighted(
    model,
    ids: torch.Tensor,
    positions: torch.Tensor,
    labels: torch.Tensor,
    loops: int,
    entropy: float = 0.0,
    mean: Callable = counted_mean,
    **how,
) -> torch.Tensor:
    """Ouro's: each step's cross entropy (nats) weighted by the probability of leaving there, less `entropy` times the entropy
    of those probabilities, at every answer. Shapes as in `last`. Raises ValueError when the model has no exit gate."""
    context = model.context(ids, segments=how.pop("segments", None), routes=how.pop("routes", None))
    states = list(model.trajectory(ids, loops, context=context, **how))
    losses, at = [], [z[:, positions] for z in states]
    for z in states:
        losses.append(cross_entropy(model.readout(z, positions, context), labels, reduction="none").view(labels.shape))
    p = exits.distribution(exits.gate_logits(model, at))  # (B, A, K)
    spread = -(p * (p + TINY).log()).sum(-1)
    each = (p * torch.stack(losses, dim=-1)).sum(-1) - entropy * spread
    return mean(each, labels != -100)


def loss(model, ids, positions, labels, loops: int, recipe, routes=None, **how) -> torch.Tensor:
    """The recipe's loss. `how`: what `last` or `exit_weighted` takes beside the loop count. routes: an empty `experts.Routes`
    that records what routers choose; their load-balancing loss is added at the recipe's weight."""
    if recipe.loss == "last":
        found = last(model, ids, positions, labels, loops, routes=routes, **how)
    else:
        found = exit_weighted(model, ids, positions, labels, loops, recipe.exit_entropy, routes=routes, **how)
    return found if routes is None else found + recipe.balance * routes.balance()
