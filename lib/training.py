"""Training one looped model on one task: a pure function of its run, resumable bit for bit.

Contract paper, section 4.3: arms differ in the boundary alone. `follow` is the course of every training, of one seed or of many
at once (`together`). Shapes: S seeds, B batch, T tokens, F fields, A answers, V vocabulary.
"""

import dataclasses
import hashlib
import io
import json
import math
import pickle
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import nullcontext
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
from lib.muon import Muon
from lib.tasks import Batch, Task, training_batches

OPTIMIZERS = ("adamw", "muon")
LOOP_SAMPLING = ("fixed", "poisson_lognormal")
PRECISIONS = ("float32", "bfloat16")
BATCHES_AT_ONCE = 32  # made together: one vectorised call; batch i never depends on it
# what a checkpoint with a sound checksum that other code wrote may raise
OTHER_LAYOUT = (pickle.UnpicklingError, EOFError, RuntimeError, KeyError, ValueError, TypeError, AttributeError)


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
    precision: str = "float32"  # bfloat16: of matrix products, by autocast; weights, their sums and the loss stay in float32

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
        choices = {"optimizer": OPTIMIZERS, "loop_sampling": LOOP_SAMPLING, "loss": objectives.LOSSES, "precision": PRECISIONS}
        for key, allowed in choices.items():
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
    "precision": "float32",
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


def optimizers(
    model: LoopedModel, recipe: Recipe, stacked: dict[str, torch.Tensor] | None = None
) -> list[torch.optim.Optimizer]:
    """The recipe's optimisers over all parameters, one for AdamW, Muon's first of two; decay touches only the blocks'
    matrices. Muon: torch's, on matrices (out, in).

    stacked: parameters of S such models by name, (S, ...), to be optimised in place of the model's own.
    """
    parts = ((name, getattr(model, name)) for name in ("prelude", "core", "coda"))
    chosen = [f"{part}.{name}" for part, module in parts for name, p in module.named_parameters() if p.dim() >= 2]
    values = dict(model.named_parameters()) if stacked is None else stacked
    blocks, rest = [values[name] for name in chosen], [p for name, p in values.items() if name not in chosen]
    if recipe.optimizer == "muon":
        muon = torch.optim.Muon if stacked is None else Muon
        return [
            muon(blocks, lr=recipe.lr, weight_decay=recipe.weight_decay),
            torch.optim.AdamW(rest, lr=recipe.lr_other, weight_decay=0.0, fused=True),
        ]
    groups = [{"params": blocks, "weight_decay": recipe.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    return [torch.optim.AdamW(groups, lr=recipe.lr, fused=True)]


def set_rates(opts: list[torch.optim.Optimizer], recipe: Recipe, factor: float) -> None:
    """Put the optimisers at `factor` of their peak rates."""
    for opt, peak in zip(opts, (recipe.lr, recipe.lr_other), strict=False):
        for group in opt.param_groups:
            group["lr"] = peak * factor


def precision_on(device: str) -> str:
    """The precision that notebooks train in: bfloat16 on a GPU, whose matrix units want it, float32 on a CPU."""
    return PRECISIONS[torch.device(device).type == "cuda"]


def precision(recipe: Recipe, device: torch.device) -> torch.autocast:
    """The context in which a forward pass has the recipe's precision."""
    return torch.autocast(device.type, torch.bfloat16, enabled=recipe.precision == "bfloat16")


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
    with precision(recipe, device):
        loss = objectives.loss(model, ids, positions, labels, loops, recipe, routes, **how)
    if not math.isfinite(value := loss.item()):
        return value
    set_rates(opts, recipe, factor)
    for opt in opts:
        opt.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
    for opt in opts:
        opt.step()
    return value


class One:
    """One seed's model and optimisers: what `follow` moves along. `together.Stack` is that of many seeds."""

    def __init__(self, run: Run):
        self.run, self.routed = run, run.config().feed_forward == "experts"
        self.own = build(run.config(), run.seed).to(run.device)
        self.opts = optimizers(self.own, run.recipe)

    def restore(self, saved: list[dict]) -> None:
        """Go on from the checkpoints of its seeds."""
        self.own.load_state_dict(saved[0]["model"])
        for opt, state in zip(self.opts, saved[0]["optimizers"], strict=True):
            opt.load_state_dict(state)

    def update(self, batches: list[Batch], loops: list[int], step: int) -> list[tuple[float, ...]]:
        """One optimiser step of every seed on its batch at its loop count; returns what its curves take, the loss first. A
        loss that is not finite moves no seed."""
        recipe, routes = self.run.recipe, Routes() if self.routed else None
        loss = update(self.own, self.opts, batches[0], recipe, loops[0], learning_rate(step, recipe), step, routes)
        return [(loss, routes.balance().item()) if self.routed else (loss,)]

    def model(self, s: int) -> LoopedModel:
        """The model of its s-th seed as it stands, until it is asked again."""
        return self.own

    def optimizer_states(self, s: int) -> list[dict]:
        """The states of that seed's optimisers, as `optimizers` would have them."""
        return [opt.state_dict() for opt in self.opts]

    def keep(self, which: list[int]) -> None:
        """Go on without the other seeds."""


@dataclass(eq=False)
class Trail:
    """What the training of a run has left in its folder so far: curves of its steps, NaN from `step` on, the steps done, the
    seconds they took, and the checkpoint to go on from."""

    run: Run
    folder: Path
    curves: dict[str, np.ndarray]
    step: int = 0
    seconds: float = 0.0
    saved: dict | None = None


def begin(run: Run, folder: Path) -> Trail:
    """Where the training of a run in `folder` stands: at its checkpoint, if there is a sound one, as the log then says."""
    steps = run.recipe.steps
    names = ("losses", "balance") if run.config().feed_forward == "experts" else ("losses",)
    if saved := read_checkpoint(folder / "checkpoint.pt", run.device):
        try:
            One(dataclasses.replace(run, device="cpu")).restore([saved])  # only to see that it fits
            trail = Trail(run, folder, _curves(names, steps), saved["step"], saved["seconds"], saved)
            for name, curve in trail.curves.items():
                curve[: trail.step] = saved[name].cpu().numpy()
            log(folder, f"resumed from step {trail.step} of {steps}")
            return trail
        except OTHER_LAYOUT:
            log(folder, "the checkpoint is of another layout and is not read")
    log(folder, f"started: {steps} steps")
    return Trail(run, folder, _curves(names, steps))


def _curves(names: tuple[str, ...], steps: int) -> dict[str, np.ndarray]:
    return {name: np.full(steps, np.nan, dtype=np.float32) for name in names}


def checkpoint(trail: Trail, model: LoopedModel, optimizer_states: list[dict]) -> None:
    """Write all that a later process needs to go on from here."""
    state = {"model": model.state_dict(), "optimizers": optimizer_states, "step": trail.step, "seconds": trail.seconds}
    state |= {name: torch.from_numpy(curve[: trail.step].copy()) for name, curve in trail.curves.items()}
    save_checkpoint(state, trail.folder / "checkpoint.pt")
    log(trail.folder, f"checkpoint at step {trail.step}")


def finish(trail: Trail, model: LoopedModel) -> None:
    """Leave the trained model and what its training reached; a loss or a weight that is not finite marks it diverged."""
    losses, folder = trail.curves["losses"], trail.folder
    finite = losses[np.isfinite(losses)].tolist()
    if diverged := len(finite) < trail.step:
        log(folder, f"diverged: the loss at step {trail.step - 1} is {losses[trail.step - 1]}")
    elif diverged := not all(p.isfinite().all() for p in model.parameters()):
        log(folder, "diverged: the last step left weights that are not finite")
    model.save_pretrained(folder)
    for name, curve in trail.curves.items():
        store.write_array(folder / f"{name}.npy", curve)
    summary = {"diverged": diverged, "steps": len(finite), "seconds": trail.seconds}
    summary |= {"first_loss": finite[0], "final_loss": sum(finite[-50:]) / len(finite[-50:])} if finite else {}
    store.write_atomic(folder / "training.json", json.dumps(summary, indent=1))
    log(folder, "finished")


def batches_from(run: Run, start: int, pool: Executor | None = None) -> Iterator[Batch]:
    """The run's training batches from step `start` on, some made at a time; with a pool, while those before are used."""
    recipe, made = run.recipe, deque()
    make = mixture.training_batches if isinstance(run.task, Mixture) else training_batches
    for first in range(start, recipe.steps, BATCHES_AT_ONCE):
        steps = range(first, min(first + BATCHES_AT_ONCE, recipe.steps))
        if pool is None:
            yield from make(run.task, recipe.batch_size, steps, run.seed)
            continue
        made.append(pool.submit(make, run.task, recipe.batch_size, steps, run.seed))
        if len(made) > 1:
            yield from made.popleft().result()
    for rest in made:
        yield from rest.result()


def follow(trails: list[Trail], learner, report=None, checkpoint_seconds: float = 10.0) -> None:
    """Train runs that differ in the seed alone from the step they all stand at to the end, and finish their folders.

    learner: a `One`, or what does as it does with a seed for each trail. A seed whose loss is not finite is finished as it was
    before that step, and the others go on. A seed's seconds are its share of the time. report(done, total) is called as it
    goes.
    """
    run, step = trails[0].run, trails[0].step
    recipe, r0 = run.recipe, run.config().loops
    if step:
        learner.restore([trail.saved for trail in trails])
        for trail in trails:
            trail.saved = None
    if report:
        report(step, recipe.steps)
    clock = saved_at = time.monotonic()
    on_cuda = torch.device(run.device).type == "cuda"  # which leaves this processor idle
    with ThreadPoolExecutor(1) if on_cuda else nullcontext() as pool:
        feeds = [batches_from(trail.run, step, pool) for trail in trails]
        batches = []
        while step < recipe.steps:
            batches = batches or [next(feed) for feed in feeds]
            values = learner.update(batches, [loop_count(step, recipe, r0, trail.run.seed) for trail in trails], step)
            now = time.monotonic()
            for trail, own in zip(trails, values, strict=True):
                trail.step, trail.seconds = step + 1, trail.seconds + (now - clock) / len(trails)
                for curve, value in zip(trail.curves.values(), own, strict=True):
                    curve[step] = value
            clock = now
            if lost := [s for s, (loss, *_) in enumerate(values) if not math.isfinite(loss)]:
                for s in lost:
                    finish(trails[s], learner.model(s))
                going = [s for s in range(len(trails)) if s not in lost]
                if not going:
                    return
                learner.keep(going)
                trails, feeds, batches = ([some[s] for s in going] for some in (trails, feeds, batches))
                continue  # no seed has moved: the others take this step again
            step, batches = step + 1, []
            if step in recipe.snapshots:
                for s, trail in enumerate(trails):
                    weights = learner.model(s).state_dict()
                    weights = {name: tensor.clone() for name, tensor in weights.items()}  # tied ones may share no memory
                    store.write_atomic(snapshot(trail.folder, step), safetensors.torch.save(weights))
            if time.monotonic() - saved_at > checkpoint_seconds:
                for s, trail in enumerate(trails):
                    checkpoint(trail, learner.model(s), learner.optimizer_states(s))
                saved_at = time.monotonic()
            if report:
                report(step, recipe.steps)
    for s, trail in enumerate(trails):
        finish(trail, learner.model(s))


def train(run: Run, folder: Path, report=None, checkpoint_seconds: float = 10.0) -> None:
    """Train `run`, leaving model.safetensors, config.json, losses.npy, training.json and train.log in `folder`; with experts
    balance.npy, their load-balancing loss at every step; and the recipe's snapshots, snapshot_<step>.safetensors.

    A checkpoint there (left by a killed process) is resumed; the result is bitwise that of an unbroken run on one machine
    with one thread. A loss that is not finite ends the run and marks it diverged. report(done, total) is called as it goes.
    A checkpoint that cannot be written ends the training and leaves the one before: what comes at its end takes more space.
    """
    follow([begin(run, folder)], One(run), report, checkpoint_seconds)


def save_checkpoint(state: dict, path: Path) -> None:
    """Write a checkpoint behind its SHA-256: a kill leaves the old one or the new one, never half."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    store.write_atomic(path, hashlib.sha256(buffer.getbuffer()).digest() + buffer.getvalue())


def read_checkpoint(path: Path, device: str) -> dict | None:
    """The state in a checkpoint, or None where there is none or it cannot be read, as the run's log then says."""
    if not path.exists():
        return None
    digest, content = (data := path.read_bytes())[:32], data[32:]
    if hashlib.sha256(content).digest() != digest:
        log(path.parent, "the checkpoint is damaged and is not read")
        return None
    try:
        return dict(torch.load(io.BytesIO(content), weights_only=True, map_location=device))
    except OTHER_LAYOUT:
        log(path.parent, "the checkpoint is of another layout and is not read")
        return None


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
