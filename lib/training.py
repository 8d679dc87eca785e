"""Training one looped model on one task: a pure function of its run, resumable bit for bit.

Contract paper, section 4.3: arms differ in the boundary alone. Shapes: B batch, T tokens, F fields, A answers, V vocabulary.
"""

import dataclasses
import hashlib
import io
import json
import math
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from transformers.utils import logging

from lib import BEHAVIOUR, mixture, objectives, store
from lib.config import LoopedConfig
from lib.experts import Routes
from lib.looped import LoopedModel, build
from lib.mixture import Mixture
from lib.tasks import Task, training_batches

OPTIMIZERS = ("adamw", "muon")
LOOP_SAMPLING = ("fixed", "poisson_lognormal")
BATCHES_AT_ONCE = 32  # made together: one vectorised call; batch i never depends on it


@dataclass(frozen=True)
class Recipe:
    """How a model is trained. Raises ValueError naming the key when a value is impossible."""

    steps: int
    batch_size: int
    lr: float  # peak; warm-up is linear, decay a cosine to zero
    optimizer: str = "adamw"  # muon: torch's Muon for the blocks' matrices, AdamW at lr_other for the rest
    lr_other: float = 3.0e-3
    warmup: int = 100  # steps
    weight_decay: float = 0.0  # on the blocks' matrices
    clip: float = 1.0  # largest gradient norm
    loop_sampling: str = "fixed"  # poisson_lognormal: 1 + Poisson(LogNormal), mean r0 (Huginn's)
    backprop: int = 0  # loop steps that gradients flow through, the last ones (Huginn's truncation); 0: all
    fresh_state: bool = False  # a noise state drawn anew at every step; else the one of state seed 0
    loss: str = "last"  # exit_weighted: every loop step's, weighted by the exit gate (Ouro's)
    exit_entropy: float = 0.0  # weight of the exit distribution's entropy in that loss
    balance: float = 0.0  # weight of the routers' load-balancing loss, where there are experts
    snapshots: tuple[int, ...] = ()  # steps after which the weights are kept beside the last ones

    def __post_init__(self):
        for key in ("steps", "batch_size"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} is {getattr(self, key)}: it must be at least 1")
        for key in ("lr", "lr_other", "clip"):
            if not (math.isfinite(getattr(self, key)) and getattr(self, key) > 0):
                raise ValueError(f"{key} is {getattr(self, key)}: it must be a positive number")
        if self.warmup < 0 or self.weight_decay < 0:
            raise ValueError(f"warmup is {self.warmup} and weight_decay {self.weight_decay}: both must be 0 or more")
        if self.backprop < 0 or self.exit_entropy < 0 or self.balance < 0:
            own = f"backprop is {self.backprop}, exit_entropy {self.exit_entropy} and balance {self.balance}"
            raise ValueError(f"{own}: all must be 0 or more")
        if not all(0 < step < self.steps for step in self.snapshots):
            raise ValueError(f"snapshots is {self.snapshots}: each must be a step above 0 and below steps, {self.steps}")
        for key, allowed in (("optimizer", OPTIMIZERS), ("loop_sampling", LOOP_SAMPLING), ("loss", objectives.LOSSES)):
            if getattr(self, key) not in allowed:
                raise ValueError(f"{key} is {getattr(self, key)!r}: it must be one of {', '.join(allowed)}")


@dataclass(frozen=True)
class Run:
    """Everything that determines one trained model. `model` holds LoopedConfig values; the vocabulary comes from the task, or
    the mixture of tasks."""

    task: Task | Mixture
    model: tuple[tuple[str, object], ...]
    recipe: Recipe
    seed: int
    device: str = "cpu"

    def config(self) -> LoopedConfig:
        """The model's configuration."""
        return LoopedConfig(**{**dict(self.model), "vocab_size": self.task.vocab_size})

    def spec(self) -> dict:
        """The run's key material: every value that determines it, stated whether or not it is a default."""
        config = self.config()
        where = {} if self.device == "cpu" else {"device": torch.cuda.get_device_name(self.device)}
        return where | {
            "kind": "train",
            "task": keyed(dataclasses.asdict(self.task)),
            "model": keyed({k: getattr(config, k) for k in LoopedConfig.__annotations__}),
            "recipe": keyed(dataclasses.asdict(self.recipe)),
            "seed": self.seed,
            "torch": torch.__version__,
            "behaviour": BEHAVIOUR,
        }


# An option added later goes here with the value that earlier runs had: at that value it is left out of the key, so that
# they stay valid. Never change an entry.
BEFORE = {
    "n_kv_heads": None,
    "head_dim": None,
    "qk_bias": False,
    "injection_source": "prelude",
    "injection_bias": False,
    "state_noise": "normal",
    "exit_gate": False,
    "exit_threshold": 1.0,
    "rope": "half",
    "embedding_scale": 1.0,
    "tie_word_embeddings": False,
    "backprop": 0,
    "fresh_state": False,
    "loss": "last",
    "exit_entropy": 0.0,
    "turns": (),
    "balance": 0.0,
    "snapshots": (),
    "unrolled": False,
    "n_experts": 0,
    "experts_per_token": 0,
    "d_expert": 0,
    "h_cycles": 0,
    "l_cycles": 0,
    "repeats": 1,
}


def keyed(values: dict) -> dict:
    """Values for a run's key, without options that did not exist yet and are at the value of that time."""
    return {k: v for k, v in values.items() if not (k in BEFORE and v == BEFORE[k])}


def make_run(task: Task | Mixture, recipe: Recipe, seed: int, device: str = "cpu", **model) -> Run:
    """A run from keyword values of the model's configuration. Raises ValueError when the configuration is impossible, alone or
    with the recipe."""
    run = Run(task, tuple(sorted(model.items())), recipe, seed, device)
    config = run.config()
    if recipe.optimizer == "muon" and config.feed_forward == "experts":
        raise ValueError("optimizer is 'muon' with feed_forward 'experts': it must be adamw, since Muon takes no stacks")
    if recipe.balance and config.feed_forward == "dense":
        raise ValueError(f"balance is {recipe.balance} with feed_forward 'dense': it must be 0, since nothing is routed")
    if recipe.loop_sampling != "fixed" and config.unrolled:
        raise ValueError(f"loop_sampling is {recipe.loop_sampling!r} with an unrolled core: it must be fixed")
    return run


def learning_rate(step: int, recipe: Recipe) -> float:
    """The schedule's factor on the peak rate at `step`: linear warm-up, then a cosine to zero."""
    if step < recipe.warmup:
        return (step + 1) / recipe.warmup
    span = max(1, recipe.steps - recipe.warmup)
    return 0.5 * (1 + math.cos(math.pi * (step - recipe.warmup) / span))


def loop_count(step: int, recipe: Recipe, r0: int, seed: int) -> int:
    """Loops of training step `step`: r0, or drawn around it. A function of its arguments alone."""
    if recipe.loop_sampling == "fixed" or r0 == 1:
        return r0
    rng = np.random.Generator(np.random.Philox(key=[seed, step]))
    return 1 + int(rng.poisson(rng.lognormal(math.log(r0 - 1) - 0.125, 0.5)))  # sigma 0.5: mean r0 - 1


def optimizers(model: LoopedModel, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """The recipe's optimisers over all parameters, one for AdamW, Muon's first of two; decay touches only the blocks'
    matrices. Muon: torch's, on matrices (out, in)."""
    blocks = [p for part in (model.prelude, model.core, model.coda) for p in part.parameters() if p.dim() >= 2]
    chosen = {id(p) for p in blocks}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    if recipe.optimizer == "muon":
        return [
            torch.optim.Muon(blocks, lr=recipe.lr, weight_decay=recipe.weight_decay),
            torch.optim.AdamW(rest, lr=recipe.lr_other, weight_decay=0.0, fused=True),
        ]
    groups = [{"params": blocks, "weight_decay": recipe.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    return [torch.optim.AdamW(groups, lr=recipe.lr, fused=True)]


def update(
    model: LoopedModel,
    opts: list,
    batch,
    recipe: Recipe,
    loops: int,
    factor: float,
    step: int = 0,
    routes: Routes | None = None,
) -> float:
    """One optimiser step on one batch at `factor` of the peak rate; returns the loss at the answers, in nats.

    batch.ids (B, T, F), batch.labels (B, A) at batch.answer_positions (A,). A loss that is not finite changes nothing. step
    numbers the draw of a fresh noise state. routes: empty, filled with what routers chose.
    """
    device = model.device
    ids = torch.as_tensor(batch.ids, device=device)
    positions, labels = (torch.as_tensor(v, device=device) for v in (batch.answer_positions, batch.labels))
    how = {"state_seed": step + 1} if recipe.fresh_state else {}  # a reading takes seed 0
    how |= {"backprop": recipe.backprop} if recipe.backprop else {}
    loss = objectives.loss(model, ids, positions, labels, loops, recipe, routes, **how)
    if not math.isfinite(value := loss.item()):
        return value
    for opt, peak in zip(opts, (recipe.lr, recipe.lr_other), strict=False):
        for group in opt.param_groups:
            group["lr"] = peak * factor
        opt.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
    for opt in opts:
        opt.step()
    return value


def train(run: Run, folder: Path, report=None, checkpoint_seconds: float = 10.0) -> None:
    """Train `run`, leaving model.safetensors, config.json, losses.npy, training.json and train.log in `folder`; with experts
    balance.npy, their load-balancing loss at every step; and the recipe's snapshots, snapshot_<step>.safetensors.

    A checkpoint there (left by a killed process) is resumed; the result is bitwise that of an unbroken run on one machine
    with one thread. A loss that is not finite ends the run and marks it diverged. report(done, total) is called as it goes.
    """
    recipe, config = run.recipe, run.config()
    model = build(config, run.seed).to(run.device)
    opts = optimizers(model, recipe)
    losses, balance = (np.full(recipe.steps, np.nan, dtype=np.float32) for _ in range(2))
    routed = config.feed_forward == "experts"
    start, before, diverged, checkpoint = 0, 0.0, False, folder / "checkpoint.pt"
    if saved := read_checkpoint(checkpoint, run.device):
        model.load_state_dict(saved["model"])
        for opt, state in zip(opts, saved["optimizers"], strict=True):
            opt.load_state_dict(state)
        start = saved["step"]
        losses[:start], before = saved["losses"].cpu().numpy(), saved["seconds"]
        if routed:
            balance[:start] = saved["balance"].cpu().numpy()
        log(folder, f"resumed from step {start} of {recipe.steps}")
    else:
        log(folder, f"started: {recipe.steps} steps")
    if report:
        report(start, recipe.steps)
    started = saved_at = time.monotonic()
    batches = []
    for step in range(start, recipe.steps):
        if not batches:
            ahead = range(step, min(step + BATCHES_AT_ONCE, recipe.steps))
            make = mixture.training_batches if isinstance(run.task, Mixture) else training_batches
            batches = make(run.task, recipe.batch_size, ahead, run.seed)[::-1]
        loops = loop_count(step, recipe, config.loops, run.seed)
        routes = Routes() if routed else None
        losses[step] = update(model, opts, batches.pop(), recipe, loops, learning_rate(step, recipe), step, routes)
        if routed:
            balance[step] = routes.balance().item()
        if diverged := not math.isfinite(losses[step]):
            log(folder, f"diverged: the loss at step {step} is {losses[step]}")
            break
        if step + 1 in recipe.snapshots:
            weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}  # tied ones may share no memory
            store.write_atomic(snapshot(folder, step + 1), safetensors.torch.save(weights))
        if time.monotonic() - saved_at > checkpoint_seconds:
            state = {
                "model": model.state_dict(),
                "optimizers": [o.state_dict() for o in opts],
                "step": step + 1,
            }
            state |= {
                "losses": torch.from_numpy(losses[: step + 1].copy()),
                "seconds": before + time.monotonic() - started,
            }
            if routed:
                state["balance"] = torch.from_numpy(balance[: step + 1].copy())
            save_checkpoint(state, checkpoint)
            log(folder, f"checkpoint at step {step + 1}")
            saved_at = time.monotonic()
        if report:
            report(step + 1, recipe.steps)
    if not diverged and not all(p.isfinite().all() for p in model.parameters()):
        diverged = True
        log(folder, "diverged: the last step left weights that are not finite")
    model.save_pretrained(folder)
    np.save(folder / "losses.npy", losses)
    if routed:
        np.save(folder / "balance.npy", balance)
    finite = losses[np.isfinite(losses)].tolist()
    summary = {"diverged": diverged, "steps": len(finite), "seconds": before + time.monotonic() - started}
    summary |= {"first_loss": finite[0], "final_loss": sum(finite[-50:]) / len(finite[-50:])} if finite else {}
    store.write_atomic(folder / "training.json", json.dumps(summary, indent=1))
    log(folder, "finished")


def save_checkpoint(state: dict, path: Path) -> None:
    """Write a checkpoint behind its SHA-256: a kill leaves the old one or the new one, never half."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    store.write_atomic(path, hashlib.sha256(buffer.getbuffer()).digest() + buffer.getvalue())


def read_checkpoint(path: Path, device: str) -> dict | None:
    """The state in a checkpoint, or None where there is none or its checksum fails, which the run's log then says."""
    if not path.exists():
        return None
    digest, content = (data := path.read_bytes())[:32], data[32:]
    if hashlib.sha256(content).digest() != digest:
        log(path.parent, "the checkpoint is damaged and is not read")
        return None
    return torch.load(io.BytesIO(content), weights_only=True, map_location=device)


def log(folder: Path, line: str) -> None:
    """Append one dated line to the run's train.log."""
    with open(folder / "train.log", "a", encoding="utf-8") as f:
        f.write(f"{datetime.now():%Y-%m-%d %H:%M:%S} {line}\n")


def trained(run: Run, root: Path, report=None, checkpoint_seconds: float = 10.0) -> Path:
    """The run's folder in the store at `root`, trained now (see `train`) if it is not there yet."""
    logging.disable_progress_bar()  # transformers' own, a line for every model written or read
    spec = run.spec()
    return store.Store(root).make(store.key(spec), spec, lambda folder: train(run, folder, report, checkpoint_seconds))


def load(run: Run, root: Path, step: int | None = None) -> LoopedModel:
    """The run's trained model, ready to be read, from the store at `root`; trained now if it is not there yet.

    step: one of the recipe's snapshots instead of the end. Raises ValueError for a step that has none.
    """
    folder = trained(run, root)
    model = LoopedModel.from_pretrained(folder).eval()
    if step is not None:
        if step not in run.recipe.snapshots:
            raise ValueError(f"step is {step}: it must be one of the recipe's snapshots, {run.recipe.snapshots}")
        if not snapshot(folder, step).is_file():
            raise ValueError(f"{snapshot(folder, step)} is missing: the run diverged before step {step}")
        model.load_state_dict(safetensors.torch.load_file(snapshot(folder, step)))
    return model.to(run.device)


def snapshot(folder: Path, step: int) -> Path:
    """The file of the weights that were kept after `step` steps."""
    return folder / f"snapshot_{step}.safetensors"
