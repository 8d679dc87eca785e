"""The models at hand for sections 4.1 and 4.2: released checkpoints where a notebook names them, else stand-ins."""

from dataclasses import dataclass, replace

import pandas as pd
import torch

from lib import instruments, pair_jobs, paths, released, released_pairs, standins
from lib.claims import Judgement
from lib.looped import LoopedModel
from lib.pairs import EVERY, NEVER, Pair
from lib.probe import Probe
from lib.training import load

COUNTS = (2, 5)  # loop counts at which calls are counted


@dataclass(frozen=True)
class AtHand:
    """What a notebook's parameters give: pairs, probes, the training table (empty for released models), whether each pair's
    arms are bitwise the same at one loop (columns model, task, bitwise), and every norm of every model (model, family, and
    the columns of `instruments.norms`)."""

    pairs: list[Pair]
    probes: list[Probe]
    training: pd.DataFrame
    identity: pd.DataFrame
    norms: pd.DataFrame
    stand_ins: bool


def of(p: dict, doses: tuple[int, ...] = (), probed: bool = False, title: str = "") -> AtHand:
    """Train or load, and read, what the parameters name: both arms of every model on every task, and for models trained with
    the boundary norm the further periods `doses` and the states to probe.

    Raises ValueError as training and `released.load` do.
    """
    return _released(p, doses, probed) if p["models"] else _stand_ins(p, doses, probed, title)


def _periods(family: str, doses: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dict.fromkeys((EVERY, NEVER, *(doses if family == "ouro" else ()))))


def _stand_ins(p: dict, doses: tuple[int, ...], probed: bool, title: str) -> AtHand:
    cells = [{"style": style, "seed": seed} for style in p["styles"] for seed in range(p["seeds"])]
    jobs = []
    for cell in cells:
        family = standins.STYLES[cell["style"]][0]
        run, root = standins.run_of(p, **cell), paths.runs()
        jobs.append(pair_jobs.Job(run, _periods(family, doses), p["loops"], p["n_test"], root, probed and family == "ouro"))
    made = pair_jobs.make(jobs, p["workers"] or None, title)
    pairs, probes, training = pair_jobs.pairs(cells, jobs, made)
    identity, kept = [], {pair.model for pair in pairs}  # a model that diverged has no pairs
    for cell, job in zip(cells, jobs, strict=True):
        if (name := f"{cell['style']}, seed {cell['seed']}") not in kept:
            continue
        model = load(job.run, job.root)
        for task in job.run.task.tasks:
            same = pair_jobs.same_at_one_loop(model, pair_jobs.sets(job.run.task, task.family, p["n_test"])[-1], job.periods)
            identity.append({"model": name, "task": task.family, "bitwise": same})
    norms = [norms_of(s, standins.STYLES[s][0], standins.run_of(p, s, 0).config()) for s in p["styles"]]
    return AtHand(pairs, probes, training, pd.DataFrame(identity), pd.concat(norms, ignore_index=True), True)


def _released(p: dict, doses: tuple[int, ...], probed: bool) -> AtHand:
    plans = {source: released.plan_of(released.find(source)[0]) for source in p["models"]}  # absent ones are named at once
    pairs, probes, identity, norms = [], [], [], []
    for source, plan in plans.items():
        family, tasks = "ouro" if plan.config.boundary else "huginn", standins.mixture(p).tasks
        how = (p["loops"], p["n_test"], p["shots"], p["dtype"], p["device"], p["batch_size"], paths.runs())
        job = released_pairs.Job(source, tasks, _periods(family, doses), *how, probed=probed and family == "ouro")
        own, read, same = released_pairs.pairs(job)
        pairs, probes = pairs + own, probes + read
        identity += [{"model": job.name, "task": task, "bitwise": bitwise} for task, bitwise in same.items()]
        norms.append(norms_of(job.name, family, plan.config))
    return AtHand(pairs, probes, pd.DataFrame(), pd.DataFrame(identity), pd.concat(norms, ignore_index=True), False)


def norms_of(name: str, family: str, config) -> pd.DataFrame:
    """Where the norms of a configuration act when it runs intact, counted on a model without memory (torch's meta device)."""
    with torch.device("meta"):
        model = LoopedModel(config).eval()
        ids, state = torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 4, config.d_model)
    found = instruments.norms(model, COUNTS, lambda m, loops: m(ids, loops=loops, initial_state=state))
    return found.assign(model=name, family=family)


def noted(judgements: list[Judgement], training: pd.DataFrame) -> list[Judgement]:
    """The judgements, each with the models whose training diverged named in its reason."""
    lost = training[training["diverged"]] if len(training) else training
    if not len(lost):
        return judgements
    note = f"diverged: {', '.join(f'{row.style}, seed {row.seed}' for row in lost.itertuples())}"
    return [replace(j, reason="; ".join(filter(None, (j.reason, note)))) for j in judgements]
