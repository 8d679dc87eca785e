"""A checkpoint kept and read with torch.save and torch.load, and copied into a model that was initialised before."""

from pathlib import Path

import torch

from lib.looped import LoopedModel


def save(model: LoopedModel, path: Path) -> None:
    """The model's tensors in one file."""
    torch.save(model.state_dict(), path)


def load(config, path: Path, dtype: torch.dtype) -> LoopedModel:
    """The model with the file's tensors, in `dtype`."""
    model = LoopedModel(config).to(dtype)
    model.load_state_dict(torch.load(path, weights_only=True))
    return model
