# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% tags=["parameters"]
scale: str = "smoke"  # names the outputs folder: smoke, laptop, overnight or paper
tasks: list[str] = ["circuit", "hops"]  # families to train on
seeds: int = 2  # models a split and task; seeds count from 0
r0: int = 4  # loop steps in training of the most looped split: even, at least 4
d_model: int = 32  # channels of the state
n_heads: int = 4  # attention heads
d_ff: int = 64  # width of the gated feed-forward
core: int = 1  # layers that the most looped split loops
circuit_width: int = 3  # gates a layer
circuit_depth: int = 1  # largest depth d*
circuit_steps: int = 350  # optimiser steps
circuit_lr: list[float] = [4.0e-3, 4.0e-3, 4.0e-3]  # peak learning rates, the most looped split first
hops_width: int = 4  # symbols in the map, of 26
hops_depth: int = 1  # largest number of hops d*
hops_steps: int = 300  # optimiser steps
hops_lr: list[float] = [8.0e-3, 8.0e-3, 8.0e-3]  # peak learning rates, the most looped split first
batch_size: int = 32  # sequences a step
optimizer: str = "adamw"  # adamw or muon
warmup: int = 30  # steps of linear warm-up, then a cosine to zero
weight_decay: float = 0.0  # on the blocks' matrices
loop_sampling: str = "fixed"  # fixed: r0 loops at every step; poisson_lognormal: drawn around r0
n_test: int = 64  # test instances at each depth
device: str = "cpu"  # cpu or cuda
workers: int = 0  # processes that train at once; 0: one a core
