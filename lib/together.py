"""All seeds of an arm trained at once: their models as one batched program, which is what a GPU wants of small models.

The parameters of S models are stacked and one model's pass is mapped over the stack (`torch.vmap`), so there is one definition
of the model. Every seed keeps the data, the start, the loop counts, the clipping and the files that it has when trained alone.

Shapes: S seeds, B batch, T tokens, F fields, A answers, D d_model.
"""

import dataclasses
import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.func import functional_call, stack_module_state
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.utils import logging

from lib import cost, engine, noise, objectives, training
from lib.looped import LoopedModel, build
from lib.progress import Progress
from lib.store import Store, key
from lib.tasks import Batch
from lib.training import Recipe, Run, learning_rate, loop_count

COMPILED = {"mode": "reduce-overhead"}  # one CUDA graph of the whole pass, one of its gradients
SHAPES = 64  # batches of so many shapes, at most, are compiled for one group
FREE = 0.7  # share of the free memory that a group may fill by the count, which leaves out what lives for a moment
PER_PARAMETER = 16  # bytes: the weight, its gradient and AdamW's two means in float32


def reason(run: Run) -> str | None:
    """Why seeds of this run have to be trained one after another, or None where they can be trained together."""
    config, recipe = run.config(), run.recipe
    if config.feed_forward == "experts":
        return "which rows an expert takes depends on the data"
    if recipe.loop_sampling == "fixed" or config.loops == 1:
        return None
    # from here on each seed has its own loop count
    if recipe.backprop:
        return "gradients flow through the last loop steps, which are other steps for other seeds"
    if recipe.loss != "last" or config.exit_threshold < 1:
        return "the exit gate looks at all loop steps, and seeds have different ones"
    if config.state != "single" or not config.shared_norm:
        return "a seed of few loop steps leaves some weights without a gradient, which an optimiser passes over"
    return None


class Stack:
    """The models of S runs that differ in the seed alone, and their optimisers, as one: what `training.follow` moves along.

    compiled: whether the loss and its gradients are (None: on CUDA, with loop counts that stay, and only if that works).
    """

    def __init__(self, runs: list[Run], compiled: bool | None = None):
        self.recipe, self.device = runs[0].recipe, torch.device(runs[0].device)
        models = [build(run.config(), run.seed).to(self.device) for run in runs]
        self.parameters, _ = stack_module_state(models)  # (S, ...) by name
        self.template = models[0]
        self.objective = _Objective(self.template, self.recipe)
        self.opts = training.optimizers(self.template, self.recipe, self.parameters)
        self.may_fail = compiled is None
        self.compiled = self.device.type == "cuda" and self.recipe.loop_sampling == "fixed" if compiled is None else compiled
        if self.compiled:
            torch.compiler.reset()  # another group's graphs keep their memory
            self.program = torch.compile(self.losses, fullgraph=True, dynamic=False, **COMPILED)

    def restore(self, saved: list[dict]) -> None:
        """Go on from the checkpoints of its seeds, which `training.checkpoint` writes."""
        with torch.no_grad():
            for name, p in self.parameters.items():
                p.copy_(torch.stack([own["model"][name] for own in saved]))
        for opt, *states in zip(self.opts, *(own["optimizers"] for own in saved), strict=True):
            opt.load_state_dict(_each(lambda *values: torch.stack(values), *states))

    def update(self, batches: list[Batch], loops: list[int], step: int) -> list[tuple[float, ...]]:
        """One optimiser step of every seed on its batch at its loop count; returns [(loss,)]. A loss that is not finite moves
        no seed."""
        ids, labels = (self._at_hand(np.stack([getattr(b, name) for b in batches])) for name in ("ids", "labels"))
        # a task's answers stand at the same positions in every batch
        given = ids, self._at_hand(batches[0].answer_positions), labels, self._at_hand(np.array(loops))
        given += max(loops), len(set(loops)) == 1, start(self.template, self.recipe, ids.shape[1], ids.shape[2], step)
        try:
            losses = self._backward(*given)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if not (self.compiled and self.may_fail):
                raise
            why = (str(error) or type(error).__name__).splitlines()[0]
            warnings.warn(f"trained without compiling, which failed: {why}", stacklevel=2)
            self.compiled = False
            losses = self._backward(*given)
        if all(map(math.isfinite, losses)):
            training.set_rates(self.opts, self.recipe, learning_rate(step, self.recipe))
            clip(list(self.parameters.values()), self.recipe.clip)
            for opt in self.opts:
                opt.step()
        return [(loss,) for loss in losses]

    def _at_hand(self, values: np.ndarray) -> torch.Tensor:
        return torch.as_tensor(values, device=self.device)

    def _backward(self, *given) -> list[float]:
        """Every seed's loss; its gradients are left at the parameters where all losses are finite."""
        for opt in self.opts:
            opt.zero_grad(set_to_none=True)  # a graph's gradients are its own memory, which it is about to use again
        with torch._dynamo.config.patch(recompile_limit=SHAPES) if self.compiled else nullcontext():
            losses = (self.program if self.compiled else self.losses)(self.parameters, *given)
            values = losses.tolist()
            if all(map(math.isfinite, values)):
                losses.sum().backward()
        return values

    def losses(self, parameters, ids, positions, labels, counts, most: int, same: bool, state) -> torch.Tensor:
        """Every seed's loss, (S,). parameters: (S, ...) by name, ids (S, B, T, F), positions (A,), labels (S, B, A).

        counts: (S,) loop counts, `most` the largest, same: whether they are all the largest. state: see `start`.
        """

        def of_one(parameters, ids, labels, count):
            how = settings(self.recipe, state) | ({} if same else {"read": count})
            named = {f"model.{name}": p for name, p in parameters.items()}
            return functional_call(self.objective, named, (ids, positions, labels, most), how)

        # on a CPU torch maps no other kind of attention over a stack
        attention = sdpa_kernel(SDPBackend.MATH) if self.device.type == "cpu" else nullcontext()
        with training.precision(self.recipe, self.device), attention:
            return torch.vmap(of_one)(parameters, ids, labels, counts)

    def model(self, s: int) -> LoopedModel:
        """The model of its s-th seed as it stands, until it is asked again."""
        with torch.no_grad():
            for name, p in self.template.named_parameters():
                p.copy_(self.parameters[name][s])
        return self.template

    def optimizer_states(self, s: int) -> list[dict]:
        """The states of that seed's optimisers, as `training.optimizers` would have them."""
        return [_each(lambda value: value[s].clone(), opt.state_dict()) for opt in self.opts]

    def keep(self, which: list[int]) -> None:
        """Go on without the other seeds."""
        states = [_each(lambda value: value[which], opt.state_dict()) for opt in self.opts]
        self.parameters = {name: nn.Parameter(p.detach()[which]) for name, p in self.parameters.items()}
        self.opts = training.optimizers(self.template, self.recipe, self.parameters)
        for opt, state in zip(self.opts, states, strict=True):
            opt.load_state_dict(state)


class _Objective(nn.Module):
    """A model's loss as a module, whose parameters `functional_call` replaces."""

    def __init__(self, model: LoopedModel, recipe: Recipe):
        super().__init__()
        self.model, self.recipe = model, recipe

    def forward(self, ids, positions, labels, loops, **how):
        return objectives.loss(self.model, ids, positions, labels, loops, self.recipe, **how)


def _each(function: Callable, *states: dict) -> dict:
    """An optimiser's state with function(values) in the place of its tensors, but for their count of steps, a number."""
    first = states[0]
    made = {
        i: {k: function(*(s["state"][i][k] for s in states)) if k != "step" else v for k, v in own.items()}
        for i, own in first["state"].items()
    }
    return {"state": made, "param_groups": first["param_groups"]}


def settings(recipe: Recipe, state: torch.Tensor | None) -> dict:
    """What a training pass takes beside its batch and loop count, the same for all seeds."""
    how = {} if state is None else {"initial_state": state}
    how |= {"backprop": recipe.backprop} if recipe.backprop else {}
    return how | ({"mean": objectives.masked_mean} if recipe.loss == "exit_weighted" else {})


def start(model: LoopedModel, recipe: Recipe, B: int, T: int, step: int) -> torch.Tensor | None:
    """The state from noise that a training step starts from, the same for all seeds, (B, T, D), or None where there is none.

    It is drawn by numpy, which can be neither mapped nor compiled.
    """
    config, weight = model.config, model.embed_tokens.weight
    if config.state_init != "noise":
        return None
    seed = step + 1 if recipe.fresh_state else None
    xi = noise.state_noise(torch.arange(T, device=weight.device)[None], config.d_model, config.state_noise, seed)
    state = model.init_state(weight.new_empty(B, T, config.d_model), xi)
    return state[..., -config.d_model :].contiguous()  # of H/L states the low one


def clip(parameters: list[torch.Tensor], largest: float) -> None:
    """Scale each seed's gradients to a norm of at most `largest` over all its parameters, (S, ...), as torch's
    clip_grad_norm_ does for one model."""
    grads = [p.grad for p in parameters if p.grad is not None]
    norms = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g.flatten(1), dim=1) for g in grads]), dim=0)
    factors = (largest / (norms + 1e-6)).clamp(max=1)
    for g in grads:
        g.mul_(factors.view(-1, *[1] * (g.dim() - 1)))


def activations(run: Run) -> int:
    """Bytes that a seed's forward pass keeps for its gradients at the largest loop count and batch, nothing being computed.

    Counted in float32, and with all attention weights, which a GPU does not keep.
    """
    config, recipe = run.config(), run.recipe
    batches = training.batches_from(run, 0)
    batch = max((next(batches) for _ in range(min(recipe.steps, training.BATCHES_AT_ONCE))), key=lambda b: b.ids.size)
    loops = max(loop_count(step, recipe, config.loops, run.seed) for step in range(recipe.steps))
    kept = {}  # storages, each counted once

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept[id(storage)] = storage
        return tensor

    with torch.device("meta"):
        model = LoopedModel(config)
        ids, positions, labels = (
            torch.empty(v.shape, dtype=torch.long) for v in (batch.ids, batch.answer_positions, batch.labels)
        )
        state = torch.empty(*ids.shape[:2], config.d_model) if config.state_init == "noise" else None
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            _ = objectives.loss(model, ids, positions, labels, loops, recipe, **settings(recipe, state))
    weights = {id(p.untyped_storage()) for p in model.parameters()}
    return sum(storage.nbytes() for number, storage in kept.items() if number not in weights)


def group_size(run: Run, free: int) -> int:
    """How many seeds of a run are trained at once in so many free bytes, at least 1."""
    if reason(run):
        return 1
    return max(1, int(FREE * free / (PER_PARAMETER * cost.parameters(run.config()) + activations(run))))


def groups(runs: list[Run], free: int | None = None) -> list[list[Run]]:
    """The runs, each once, by all but the seed, in parts of even size that fit in the free bytes (None: measured)."""
    alike: dict[Run, list[Run]] = {}
    for run in dict.fromkeys(runs):
        alike.setdefault(dataclasses.replace(run, seed=0), []).append(run)
    found = []
    for own in alike.values():
        room = cost.free_memory(own[0].device) if free is None else free
        size = group_size(own[0], room) if room is not None else len(own)
        parts = np.array_split(np.arange(len(own)), math.ceil(len(own) / size))
        found += [[own[i] for i in part] for part in parts]
    return found


def trained(
    runs: list[Run], root: Path, report=None, checkpoint_seconds: float = 10.0, compiled: bool | None = None
) -> list[Path]:
    """The runs' folders in the store at `root`; those that are not there yet are trained at once now (see `training.train`).

    The runs differ in the seed alone. Seeds that were stopped at different steps are trained in as many groups, and seeds that
    cannot be grouped (see `reason`) one after another. report(done, total) counts the steps of all that is trained.
    checkpoint_seconds: for each seed of a group, whose checkpoints take as much longer. compiled: see `Stack`.

    On one machine with one thread, a group that was stopped ends bitwise as one that was not; a seed's end in a group is that
    of the seed alone but for rounding. Raises ValueError when the runs differ in anything else.
    """
    if any(dataclasses.replace(run, seed=runs[0].seed) != runs[0] for run in runs):
        raise ValueError("the runs differ in more than the seed: to be trained together they must not")
    logging.disable_progress_bar()  # transformers' own, a line for every model written
    specs, steps = [run.spec() for run in runs], runs[0].recipe.steps
    named = {key(spec): run for run, spec in zip(runs, specs, strict=True)}

    def build(partials: dict[str, Path]) -> None:
        trails = [training.begin(named[name], folder) for name, folder in partials.items()]
        parts = [[trail for trail in trails if trail.step == step] for step in sorted({trail.step for trail in trails})]
        if reason(runs[0]):
            parts = [[trail] for trail in trails]
        total, before = steps * len(trails), 0

        def told(before, size):
            return report and (lambda done, _: report(before + size * done, total))

        for part in parts:
            own = [trail.run for trail in part]
            learner = training.One(own[0]) if reason(runs[0]) else Stack(own, compiled)
            training.follow(part, learner, told(before, len(part)), checkpoint_seconds * len(part))
            before += steps * len(part)

    return Store(root).make_all([key(spec) for spec in specs], specs, build)


def ahead(jobs: list, title: str = "") -> bool:
    """Train in groups what the store lacks of the runs of jobs, if they are on a GPU of this machine; whether they are.

    jobs: whatever has a run and the store's root. Where it is True one worker is right for what is left: processes on one GPU
    wait for each other. A group that does not fit in memory is halved.
    """
    if not any(_on_gpu(job.run) for job in jobs) or engine.chosen()[0] != "local":
        return False
    root = jobs[0].root
    left = groups([job.run for job in jobs if Store(root).find(key(job.run.spec())) is None])[::-1]
    progress = Progress(len(left), title)
    try:
        while left:
            group, number = left.pop(), len(left)

            def report(done, total, number=number):
                progress.report(number, done, total)
                progress.show()

            try:
                trained(group, root, report)
                progress.end(number)
            except torch.OutOfMemoryError:
                if len(group) == 1:
                    raise
                progress.runs += 1
                left += [group[: len(group) // 2], group[len(group) // 2 :]]  # each goes on from its checkpoints
    finally:
        progress.show(last=True)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # for the worker
    return True


def _on_gpu(run: Run) -> bool:
    return torch.device(run.device).type == "cuda"
