"""Accuracy by task at the trained loop count, at each snapshot of a training; and, with experts, what the routers chose.

Every measurement is an entry of the run store. Shapes: N instances, B rows, T tokens, F fields, A answers, V vocabulary.
"""

import functools
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from lib import BEHAVIOUR, axes_arms, engine, experts, together
from lib.evaluation import batches
from lib.experts import Routes
from lib.looped import LoopedModel
from lib.mixture import Mixture
from lib.store import Store, key
from lib.task_constrained import accepts, written
from lib.tasks import Instances
from lib.training import Run, load, trained

DRAWS = 4  # states from noise that a model is read from, and averaged over
UNSEEN = 2**32  # state seed of the first of them: training has those of its steps
ROUTES = ("own", "first", "random")  # own experts; step 1's again at every later step; others at random, the control
BATCH = 512
ROUTING = ("load", "overlap", "entropy", "balance")  # tables of what the routers chose


@dataclass(frozen=True)
class Job:
    """One trained arm and what is measured of it on n test instances at every depth of every task. forced: what the routers
    are made to choose beside their own choice, of `ROUTES`, at the end of training."""

    run: Run
    n: int
    root: Path
    forced: tuple[str, ...] = ()

    def spec(self, what: str) -> dict:
        """The key material of one measurement: "scores", a forced route, or "routing"."""
        spec = {"kind": "group scores", "train": key(self.run.spec()), "n": self.n, "what": what, "draws": [UNSEEN, DRAWS]}
        return spec | {"torch": torch.__version__, "behaviour": BEHAVIOUR}

    def wanted(self) -> dict[str, dict]:
        """Every measurement: its name -> its spec."""
        routed = ["routing"] if self.run.config().feed_forward == "experts" else []
        return {name: self.spec(name) for name in ["scores", *self.forced, *routed]}


def sets(mixture: Mixture, n: int) -> dict[tuple[str, int], Instances]:
    """The test instances of every task and depth, {(task, d*): n instances}, in the mixture's ids."""
    return {(task.family, d): mixture.evaluation_set(task.family, d, n) for task in mixture.tasks for d in task.depths}


def floors(mixture: Mixture, n: int) -> pd.DataFrame:
    """The no-skill accuracy of every task, mean over its depths: columns task, value."""
    rows = [{"task": task, "value": mixture.floor(task, some)} for (task, _), some in sets(mixture, n).items()]
    return pd.DataFrame(rows).groupby("task", sort=False, as_index=False)["value"].mean()


@torch.no_grad()
def accuracy(model: LoopedModel, mixture: Mixture, task: str, instances: Instances, draw: int = 0, route: str = "own") -> float:
    """Share of right answers at the trained loop count; of constrained, share of greedily written strings the checker accepts.

    draw: number of the state from noise; route: of `ROUTES`.
    """
    if task == "constrained":
        first, own = mixture.first_id(task), mixture.task(task)
        text = written(_Reader(model, draw, route), own, instances, first, BATCH)
        return float(accepts(own, instances.raw["constraints"], text).mean())
    right = 0
    for ids, at, answer in batches(model, instances, BATCH):
        logits = _Reader(model, draw, route)(ids, answer_positions=at).logits
        right += int((logits[:, 0].argmax(-1) == answer).sum())
    return right / len(instances.answer)


@dataclass(frozen=True)
class _Reader:
    """A model read from one state seed with one route, which takes a new record at every pass."""

    model: LoopedModel
    draw: int
    route: str

    @property
    def device(self):
        return self.model.device

    def __call__(self, ids: torch.Tensor, **how):
        routes = None if self.route == "own" else Routes(self.route, self.draw)
        return self.model(ids, state_seed=UNSEEN + self.draw, routes=routes, **how)


def table(model: LoopedModel, mixture: Mixture, n: int, route: str = "own") -> pd.DataFrame:
    """Accuracy of every task and depth: columns task, d_star, value, a state from noise averaged over its draws."""
    draws = range(DRAWS if model.config.state_init == "noise" else 1)
    rows = []
    for (task, d), some in sets(mixture, n).items():
        value = np.mean([accuracy(model, mixture, task, some, draw, route) for draw in draws])
        rows.append({"task": task, "d_star": d, "value": value})
    return pd.DataFrame(rows)


@torch.no_grad()
def routing(model: LoopedModel, mixture: Mixture, n: int) -> dict[str, pd.DataFrame]:
    """What the routers chose on the test instances, mean over tasks and depths with equal weight: `ROUTING` -> a table.

    load: time, expert, share; overlap: module, time, other, value; entropy: module, time, load_bits, token_bits; balance:
    module, time, value. A module is a layer in the order of first execution, time how often it was executed before. load and
    overlap are of the looped layers, and empty where there are none.
    """
    found = {name: [] for name in ROUTING}
    for some in sets(mixture, n).values():
        routes = Routes()
        ids = torch.as_tensor(some.ids[:BATCH], device=model.device)
        model(ids, state_seed=UNSEEN, routes=routes, logits_to_keep=1)
        values = routes.balances().tolist()
        made = [{"module": e.module, "time": e.time, "value": v} for e, v in zip(routes.executions, values, strict=True)]
        found["load"].append(experts.mean_load(routes))
        found["overlap"].append(experts.overlap(routes))
        found["entropy"].append(experts.entropy(routes))
        found["balance"].append(pd.DataFrame(made))
    values = ("share", "value", "load_bits", "token_bits")

    def mean(parts):
        frame = pd.concat(parts)
        by = [c for c in frame.columns if c not in values]
        return frame.groupby(by, as_index=False)[[c for c in frame.columns if c in values]].mean()

    return {name: mean(parts) for name, parts in found.items()}


def train_and_score(job: Job, report=None) -> dict[str, Path]:
    """Train the job's run and make its measurements unless the store has them: {"model": folder, measurement: folder}."""
    found = {"model": trained(job.run, job.root, report)}
    store = Store(job.root)
    for what, spec in job.wanted().items():
        found[what] = store.make(key(spec), spec, functools.partial(_measure, job, what))
    return found


def _measure(job: Job, what: str, folder: Path) -> None:
    mixture, diverged = job.run.task, training_of(trained(job.run, job.root))["diverged"]
    if diverged:  # its scores are NaN wherever it is read
        (folder / "diverged").touch()
        return
    if what == "routing":
        for name, frame in routing(load(job.run, job.root), mixture, job.n).items():
            frame.to_csv(folder / f"{name}.csv", index=False)
        return
    steps = axes_arms.snapshots(job.run.recipe.steps) if what == "scores" else {}
    parts = []
    for step, share in [*steps.items(), (None, 1.0)]:
        model = load(job.run, job.root, step)
        route = "own" if what == "scores" else what
        parts.append(table(model, mixture, job.n, route).assign(share=share))
    pd.concat(parts).to_csv(folder / "scores.csv", index=False)


def training_of(folder: Path) -> dict:
    """What a training reached: diverged, steps, first_loss, final_loss (nats), seconds."""
    return json.loads((folder / "training.json").read_text(encoding="utf-8"))


def stored(job: Job) -> dict[str, Path] | None:
    """What `train_and_score` returns, if the store has all of it."""
    store = Store(job.root)
    found = {"model": store.find(key(job.run.spec()))}
    found |= {what: store.find(key(spec)) for what, spec in job.wanted().items()}
    return found if all(found.values()) else None


def make(jobs: list[Job], workers: int | None = None, title: str = "") -> list[dict]:
    """`train_and_score` of every job, in worker processes; jobs that the store holds whole are only looked up.

    On a GPU all seeds of an arm are trained first, at once."""
    workers = 1 if together.ahead(jobs, title) else workers
    return engine.map_missing(train_and_score, jobs, stored, workers, title)


def collect(cells: list[dict], made: list[dict], what: str = "scores") -> pd.DataFrame:
    """The scores of finished jobs, a dict of columns for each: the cell's columns, task, share, value, the mean over depths; a
    diverged seed's values are NaN. what: "scores", or a forced route."""
    parts = []
    for cell, folders in zip(cells, made, strict=True):
        if (file := folders[what] / "scores.csv").exists():
            parts.append(
                pd.read_csv(file).groupby(["task", "share"], sort=False, as_index=False)["value"].mean().assign(**cell)
            )
    if not parts:
        raise ValueError("every training diverged")
    known = parts[0][["task", "share"]]
    for cell, folders in zip(cells, made, strict=True):
        if not (folders[what] / "scores.csv").exists():
            parts.append(known.assign(value=np.nan, **cell))
    return pd.concat(parts, ignore_index=True)[[*cells[0], "task", "share", "value"]]


def trainings(cells: list[dict], made: list[dict]) -> pd.DataFrame:
    """What each training reached: the cell's columns, diverged, steps, first_loss, final_loss (nats), seconds (of one core)."""
    return pd.DataFrame([cell | training_of(folders["model"]) for cell, folders in zip(cells, made, strict=True)])


def routing_of(cells: list[dict], made: list[dict], name: str) -> pd.DataFrame:
    """One of the `ROUTING` tables of every model with experts that did not diverge, with its cell's columns first."""
    parts = []
    for cell, folders in zip(cells, made, strict=True):
        if "routing" in folders and (file := folders["routing"] / f"{name}.csv").exists():
            frame = pd.read_csv(file)
            parts.append(frame.assign(**cell)[[*cell, *frame.columns]])
    return pd.concat([part for part in parts if len(part)] or parts, ignore_index=True)  # an empty one has no types


def balance_ends(cells: list[dict], made: list[dict]) -> pd.DataFrame:
    """The load-balancing loss of every model with experts at the end of training, on the test instances, mean over executions:
    the cell's columns, value; NaN for a diverged one."""
    rows = []
    for cell, folders in zip(cells, made, strict=True):
        if "routing" in folders:
            file = folders["routing"] / "balance.csv"
            rows.append(cell | {"value": pd.read_csv(file)["value"].mean() if file.exists() else np.nan})
    return pd.DataFrame(rows)


def balance_curves(cells: list[dict], made: list[dict], bins: int = 30) -> pd.DataFrame:
    """The load-balancing loss while models with experts trained, median of each of `bins` spans of steps: the cell's columns,
    step (the span's middle), value."""
    parts = []
    for cell, folders in zip(cells, made, strict=True):
        if (file := folders["model"] / "balance.npy").exists():
            values = np.load(file)
            spans = [span for span in np.array_split(np.arange(len(values)), bins) if len(span)]
            rows = [{"step": float(span.mean()) + 1, "value": float(pd.Series(values[span]).median())} for span in spans]
            parts.append(pd.DataFrame(rows).assign(**cell)[[*cell, "step", "value"]])
    return pd.concat(parts, ignore_index=True)
