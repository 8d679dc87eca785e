"""Pretraining any point of the design space on text: transformers' Trainer on one process or several, sharded or not.

A step is a function of (recipe, step): which rows, how many loops and which initial noise do not depend on the number of
processes, and nothing draws from a global generator. Shapes: B batch, T tokens.
"""

import dataclasses
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import PrinterCallback, Trainer, TrainingArguments

from lib import corpus, objectives, paths, sharding, store, training
from lib.config import LoopedConfig
from lib.corpus import Corpus
from lib.experts import Routes
from lib.looped import LoopedModel
from lib.pretrain_recipe import Recipe, same

LOG = "log.jsonl"
MODEL = "model"
STATE = "trainer_state.json"  # transformers' name for it
SCHEDULE = "schedule.json"


class Objective(nn.Module):
    """The training loss as a module's forward pass, which is what several processes can share the work of."""

    def __init__(self, model: LoopedModel, recipe: Recipe, start: int, pad: int):
        super().__init__()
        self.model, self.recipe, self.start, self.pad = model, recipe, start, pad

    def forward(self, ids: torch.Tensor, loops: int, state: torch.Tensor | None = None) -> torch.Tensor:
        """The sum over predicted tokens of the recipe's loss, in nats. ids: (B, T); state: (B, T, D) initial noise."""
        targets = corpus.labels(ids, self.start, self.pad)
        positions = torch.arange(targets.shape[1], device=ids.device)
        how = {"segments": corpus.segments(ids, self.start)}
        if state is not None:
            how["initial_state"] = state
        if self.training and self.recipe.backprop:
            how["backprop"] = self.recipe.backprop
        if not self.training:
            return objectives.last(self.model, ids, positions, targets, loops, **how) * (targets != -100).sum()
        routes = Routes() if self.recipe.balance else None
        loss = objectives.loss(self.model, ids, positions, targets, loops, self.recipe, routes=routes, **how)
        return loss * (targets != -100).sum()


class Steps(IterableDataset):
    """This process's batches, from the step on that the trainer has come to."""

    def __init__(self, trainer: "Pretrainer"):
        self.trainer = trainer

    def __iter__(self) -> Iterator[dict]:
        t = self.trainer
        for step in range(t.state.global_step, t.recipe.last_step):
            numbers = np.arange(step * t.recipe.rows, (step + 1) * t.recipe.rows)
            ids = torch.from_numpy(rows_of(t.corpus, numbers, t.recipe.seed))
            predicted = int((corpus.labels(ids, t.corpus.start, t.corpus.pad) >= 0).sum())
            one = t.recipe.rows_per_device
            for i in range(t.args.process_index * one, t.recipe.rows, t.args.world_size * one):
                yield {"ids": ids[i : i + one], "numbers": numbers[i : i + one], "predicted": predicted, "step": step}


def rows_of(found: Corpus, numbers: np.ndarray, seed: int) -> np.ndarray:
    """Rows by their number in the course of training: every pass over the corpus in an order of its own. -> (B, T) int64."""
    rows = found.rows()
    passes, places = np.divmod(numbers, len(rows))
    order = {p: np.random.Generator(np.random.Philox(key=[seed, p])).permutation(len(rows)) for p in np.unique(passes)}
    return np.stack([rows[order[p][i]] for p, i in zip(passes, places, strict=True)]).astype(np.int64)


def fresh_states(numbers: np.ndarray, length: int, config: LoopedConfig, seed: int, device: torch.device) -> torch.Tensor:
    """Initial noise of rows by their number in the course of training, (B, T, D): normal, cut at three standard deviations
    where the configuration's noise is."""
    drawn = torch.empty(len(numbers), length, config.d_model, device=device)
    for row, number in zip(drawn, numbers.tolist(), strict=True):
        generator = torch.Generator(device).manual_seed((seed * 2**40 + number) % 2**63)
        if config.state_noise == "truncated":
            nn.init.trunc_normal_(row, a=-3.0, b=3.0, generator=generator)
        else:
            row.normal_(generator=generator)
    return drawn * config.state_std


class Pretrainer(Trainer):
    """transformers' Trainer with a recipe's batches, loss, schedule and optimiser, and checkpoints of `sharding`.

    Under several processes the model is copied (accelerate's DDP) or sharded (torch's FSDP2: accelerate would fall back to
    copies on a CPU without a word).
    """

    def __init__(self, recipe: Recipe, found: Corpus, out: Path, args: TrainingArguments, report: Callable | None = None):
        self.recipe, self.corpus, self.out, self.report = recipe, found, out, report
        config = recipe.config(found.vocab_size)
        with torch.device("meta"):
            self.inner = LoopedModel(config)
        objective = Objective(self.inner, recipe, found.start, found.pad)
        if recipe.recompute:
            sharding.recompute(objective)
        super().__init__(objective, args, train_dataset=Steps(self), eval_dataset=found.rows("validation"))
        several = self.args.world_size > 1
        engine = recipe.engine if recipe.engine != "auto" else "fsdp" if self.args.device.type == "cuda" else "ddp"
        self.sharded = several and engine == "fsdp"
        if self.sharded:
            sharding.shard(objective, self.args.device, recipe.precision)
            self.is_distributed_loading_by_transformers = True  # whose parameters it then leaves as they are
        objective.to_empty(device=self.args.device)
        self.inner.tie_weights()
        sharding.initialise(self.inner, recipe.seed, recipe.init_std if recipe.init == "truncated_normal" else None)
        self.started = time.perf_counter()
        self.remove_callback(PrinterCallback)  # the log has it

    def _move_model_to_device(self, model, device) -> None:
        """It has no memory yet."""

    def get_train_dataloader(self) -> DataLoader:
        """This process's batches."""
        return DataLoader(self.train_dataset, batch_size=None)

    def create_optimizer(self, model=None) -> torch.optim.Optimizer:
        """AdamW over all parameters."""
        if self.optimizer is None:
            r, parts = self.recipe, {True: [], False: []}
            for name, p in self.model.named_parameters():
                ends = "embed_tokens" in name or "lm_head" in name
                parts[r.decay == "all" or (p.dim() >= 2 and not ends)].append(p)
            groups = [{"params": parts[d], "weight_decay": r.weight_decay if d else 0.0} for d in parts if parts[d]]
            self.optimizer = torch.optim.AdamW(groups, lr=r.lr, betas=tuple(r.betas), eps=r.eps)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer=None):
        """The recipe's course of the learning rate."""
        if self.lr_scheduler is None:
            optimizer = self.optimizer if optimizer is None else optimizer
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, self.recipe))
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None) -> torch.Tensor:
        """This batch's part of the step's mean loss (nats a predicted token), times what the trainer divides by: the number of
        batches and of processes."""
        ids, config, r = inputs["ids"], self.inner.config, self.recipe
        state = None
        if r.fresh_state:
            state = fresh_states(inputs["numbers"], ids.shape[1], config, r.seed, ids.device)
        loops = training.loop_count(inputs["step"], r, config.loops, r.seed)
        parts = self.args.world_size * self.current_gradient_accumulation_steps
        return model(ids, loops, state) * parts / inputs["predicted"]

    def _defer_fsdp_gradient_reduction(self):
        """Gradients are split after every batch of a step: a whole one would be held on every device until its end."""
        return nullcontext()

    def evaluate(self, *_, **__) -> dict[str, float]:
        """Bits a byte and nats a token of validation rows, at the trained loop count; once a step."""
        for line in self.state.log_history:
            if "eval_loss" in line and line["step"] == self.state.global_step:
                return {key: value for key, value in line.items() if key.startswith("eval")}
        model = self.model_wrapped if self.sharded else self.model
        found = self.corpus
        rows = found.rows("validation")[: self.recipe.evaluate_rows]
        lengths, device = torch.from_numpy(found.token_bytes()), self.args.device
        total = torch.zeros(3, dtype=torch.float64)
        one, many, me = self.recipe.rows_per_device, self.args.world_size, self.args.process_index
        model.eval()
        for i in range(0, len(rows), one * many):  # every process the same number of times, some without rows of their own
            mine = rows[i + me * one : i + (me + 1) * one]
            ids = torch.from_numpy((mine if len(mine) else rows[:1]).astype(np.int64))
            with torch.no_grad(), self.compute_loss_context_manager():
                nats = float(model(ids.to(device), self.inner.config.loops))
            if len(mine):
                targets = corpus.labels(ids, found.start, found.pad)
                targets = targets[targets >= 0]
                total += torch.tensor([nats, len(targets), lengths[targets].sum()], dtype=torch.float64)
        if dist.is_initialized():
            total = total.to(device)
            dist.all_reduce(total)
        model.train()
        nats, tokens, size = total.tolist()
        found = {"eval_loss": nats / tokens, "eval_bits_per_byte": nats / math.log(2) / size}
        self.log(found)
        return found

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Append a line to log.jsonl. Raises ValueError when the loss is no number any more."""
        if not math.isfinite(logs.get("loss", 0.0)):
            raise ValueError(
                f"the loss is {logs['loss']} at step {self.state.global_step}: lower lr or clip, or start from an earlier "
                f"checkpoint of {self.out}"
            )
        line = {"step": self.state.global_step, "tokens": self.state.global_step * self.recipe.rows * self.corpus.length}
        line |= {**logs, "seconds": round(time.perf_counter() - self.started, 3)}
        self.state.log_history.append(line)
        if self.report:
            self.report(self.state.global_step, self.recipe.last_step, f"loss {logs['loss']:.3f}" if "loss" in logs else "")
        if self.args.process_index == 0 and "train_runtime" not in logs:
            with open(self.out / LOG, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        self.control = self.callback_handler.on_log(self.args, self.state, self.control, logs)

    def _save_checkpoint(self, model, trial) -> None:
        folder = self.out / f"checkpoint-{self.state.global_step:07d}"
        if not folder.is_dir():
            schedule = {key: value for key, value in self.lr_scheduler.state_dict().items() if key != "lr_lambdas"}
            beside = {STATE: json.dumps(dataclasses.asdict(self.state), indent=1), SCHEDULE: json.dumps(schedule)}
            sharding.save(folder, self.model, self.optimizer.optimizer, beside)
        if self.args.process_index == 0:
            for old in checkpoints(self.out)[: -self.recipe.keep]:
                shutil.rmtree(old, ignore_errors=True)

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None) -> None:
        """Weights come with the optimiser's state, when that exists."""

    def _load_optimizer_and_scheduler(self, checkpoint) -> None:
        if checkpoint is not None:
            sharding.restore(Path(checkpoint), self.model, self.optimizer.optimizer)
            schedule = json.loads((Path(checkpoint) / SCHEDULE).read_text(encoding="utf-8"))
            self.lr_scheduler.load_state_dict(schedule | {"lr_lambdas": [None] * len(schedule["base_lrs"])})

    def _load_rng_state(self, checkpoint) -> None:
        """There is none: nothing draws from a global generator."""


def _arguments(recipe: Recipe, out: Path, device: str, quiet: bool) -> TrainingArguments:
    """The trainer's own settings. Raises ValueError when the rows of a step cannot be shared out evenly."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    at_once = recipe.rows_per_device * processes
    if recipe.rows % at_once:
        right = f"rows_per_device, {recipe.rows_per_device}, times the processes, {processes}"
        raise ValueError(f"rows is {recipe.rows}: it must be a multiple of {right}")
    return TrainingArguments(
        output_dir=str(out),
        max_steps=recipe.last_step,
        per_device_train_batch_size=recipe.rows_per_device,
        gradient_accumulation_steps=recipe.rows // at_once,
        learning_rate=recipe.lr,
        max_grad_norm=recipe.clip,
        bf16=recipe.precision == "bfloat16",
        logging_steps=recipe.log_every,
        logging_nan_inf_filter=False,
        eval_strategy="steps" if recipe.evaluate_every else "no",
        eval_steps=recipe.evaluate_every or None,
        save_strategy="steps",
        save_steps=recipe.checkpoint_every,
        seed=recipe.seed,
        use_cpu=device == "cpu",
        ddp_backend="gloo" if device == "cpu" and processes > 1 else None,
        ddp_find_unused_parameters=bool(recipe.backprop),  # then a prelude may get no gradient
        average_tokens_across_devices=False,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        ignore_data_skip=True,
        report_to="none",
        disable_tqdm=quiet or None,
    )


def rate(step: int, recipe: Recipe) -> float:
    """The learning rate at `step` as a share of its peak: a line up, then a cosine down."""
    if step < recipe.warmup:
        return recipe.lr_start + step * (1 - recipe.lr_start) / recipe.warmup
    course = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    return recipe.lr_end + (1 - recipe.lr_end) / 2 * (1 + math.cos(math.pi * min(1.0, course)))


def checkpoints(out: Path) -> list[Path]:
    """The whole checkpoints of a folder, the earliest first."""
    return sorted(path for path in out.glob("checkpoint-*") if (path / STATE).is_file())


def run(recipe: Recipe, out: Path, device: str = "cpu", report: Callable | None = None) -> Path:
    """Pretrain into `out`, from its last checkpoint where it has one; returns the folder of the finished model. Every process
    of a `torchrun` calls it. report(step, steps, note): called as it goes on, in place of a progress bar.

    Raises ValueError when `out` holds another recipe's run, a device is missing, or a value does not fit the rest.
    """
    _require_device(device)
    if same(recipe, out) is False:
        raise ValueError(f"{out} holds a run of another recipe: choose another folder with --out")
    args = _arguments(recipe, out, device, report is not None)
    if device == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    with args.main_process_first(desc="corpus"):
        found = corpus_of(recipe)
    final = out / MODEL
    if args.process_index == 0:
        out.mkdir(parents=True, exist_ok=True)
        store.write_atomic(out / "recipe.json", recipe.model_dump_json(indent=1) + "\n")
        about = {key: value for key, value in found.about.items() if key != "token_bytes"}
        store.write_atomic(out / "corpus.json", json.dumps(about, indent=1) + "\n")
    there = checkpoints(out)
    start = int(there[-1].name.rpartition("-")[2]) if there else 0
    if start > recipe.last_step:
        raise ValueError(f"{there[-1]} is beyond step {recipe.last_step}, where the recipe ends: remove it, or raise stop")
    if args.process_index == 0:
        _forget(out / LOG, start)
    trainer = Pretrainer(recipe, found, out, args, report)
    trainer.train(resume_from_checkpoint=str(there[-1]) if there else None)
    trainer.evaluate()
    trainer._save_checkpoint(None, None)
    weights = sharding.whole(trainer.model)
    if args.process_index == 0:
        _export(trainer.inner.config, weights, found, final)
    if dist.is_initialized():
        dist.barrier()
    return final


def corpus_of(recipe: Recipe) -> Corpus:
    """The recipe's corpus: a folder, or Python's own text, made where it is not there."""
    data = recipe.data
    if not data.folder:
        return corpus.python_corpus(paths.outputs() / "corpora", data.vocabulary, data.length)
    folder = paths.ROOT / Path(data.folder).expanduser()
    if not (folder / corpus.NAME).is_file():
        raise ValueError(f"data.folder is {data.folder!r}, which is no corpus: `python -m lib corpus` makes one of text files")
    return corpus.load(folder)


def log_of(out: Path) -> list[dict]:
    """The lines of a run's log."""
    return [json.loads(line) for line in (out / LOG).read_text(encoding="utf-8").splitlines()]


def _forget(log: Path, start: int) -> None:
    """Take out what a run that was killed did beyond the checkpoint it goes on from, and the last line where it was cut."""
    if log.exists():
        kept = [line for line in log.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
        kept = [line for line in kept if json.loads(line)["step"] <= start]
        store.write_atomic(log, "".join(line + "\n" for line in kept))


def _require_device(device: str) -> None:
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device is {device!r}: it must be cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda', and torch finds no GPU on this machine: it must be cpu")
    if device == "cuda" and torch.cuda.device_count() > 1 and "WORLD_SIZE" not in os.environ:
        number = torch.cuda.device_count()
        raise ValueError(
            f"{number} GPUs are there: use all with `torchrun --nproc-per-node {number} -m lib pretrain ...`, or one with "
            "CUDA_VISIBLE_DEVICES=0"
        )


def _export(config: LoopedConfig, weights: dict[str, torch.Tensor], found: Corpus, folder: Path) -> None:
    """The model as safetensors with its tokenizer beside it, whole or not at all."""
    staging = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    with torch.device("meta"):
        model = LoopedModel(config)
    held = {name.removeprefix("model."): value for name, value in weights.items()}
    model.save_pretrained(staging, state_dict=held)
    found.tokenizer().save_pretrained(staging)
    shutil.rmtree(folder, ignore_errors=True)
    staging.rename(folder)
