"""A sweep over loop counts as one forward pass for each of them."""

import torch


@torch.no_grad()
def forwards(model, ids: torch.Tensor, positions: torch.Tensor, loops: int, boundary) -> list[torch.Tensor]:
    """Logits (B, A, V) at every K in 1..loops. ids (B, T, F), positions (B, A)."""
    return [model(ids, loops=K, boundary=boundary, answer_positions=positions).logits for K in range(1, loops + 1)]
