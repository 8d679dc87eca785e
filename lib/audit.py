"""What an audit is of: one looped model, what it can be read on, and what that will take. Nothing is loaded here.

A checkpoint with a tokenizer reads few-shot prompts; a model of the run store reads its own symbolic tasks; any other reads
random tokens, where an answer is right when it is the intact arm's at the trained loop count. Looped classes of transformers'
own are in `audit_foreign`, the readings in `audit_readings`, what they say in `audit_facts`.
"""

import functools
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from lib import BEHAVIOUR, checkpoint, cost, families, paths, prompts, released, standins, tasks
from lib.boundary import Boundary
from lib.config import LoopedConfig
from lib.cost import Cost
from lib.looped import build
from lib.mixture import Mixture, restored
from lib.pairs import NEVER
from lib.store import SPEC, Store, key
from lib.tasks import FAMILIES, Task
from lib.training import keyed

DOSES = (1, 2, 3, 4, 8, NEVER)  # the norm after every k-th step
DOSED = 4  # times r0, the largest loop count at which doses are compared
PROMPTS, SYMBOLS, TOKENS, FOREIGN = "few-shot prompts", "its own tasks", "random tokens", "random input"
LENGTH = 32  # tokens of a random row


@dataclass(frozen=True)
class Random:
    """Rows of random tokens, in the place of a task: no answer is known."""

    vocab_size: int
    length: int = LENGTH
    family: str = TOKENS
    max_depth: int = 1
    seed: int = 0


@dataclass(frozen=True)
class Subject:
    """The model that is audited and what it is read on; nothing is loaded yet. A foreign class has no config."""

    source: str  # a hub id or a folder
    folder: Path
    name: str  # of its folder of results
    family: str
    config: LoopedConfig | None
    parameters: int
    r0: int  # the trained loop count
    trained: int  # boundary period of the intact arm
    read_on: str  # PROMPTS, SYMBOLS, TOKENS or FOREIGN
    tasks: tuple[Task | Random, ...]
    mixture: Mixture | None  # whose vocabulary the tasks share
    loops: int  # K_max
    at_loops: tuple[int, ...]  # that are shown
    n: int  # instances at each depth of each task
    shots: int
    dtype: str
    device: str
    batch_size: int
    shapes: tuple[tuple[int, int, int], ...]  # (prompts, tokens, tokens shared before them) of every stratum
    notes: tuple[str, ...]  # sentences on what could not be done as asked

    @property
    def periods(self) -> tuple[int, ...]:
        """Every boundary that is read, the intact arm's first."""
        return tuple(dict.fromkeys((self.trained, *DOSES)))

    @property
    def changed(self) -> int:
        """The other arm's boundary: never where the intact arm has the norm, else every step."""
        return NEVER if self.trained else 1

    def loops_of(self, period: int) -> int:
        """The largest loop count read under a boundary: K_max for the two arms, and what the dose needs for those between."""
        return self.loops if period in (self.trained, self.changed) else min(self.loops, DOSED * self.r0)


def subject(p: dict) -> Subject:
    """What the notebook's parameters ask for, held against the checkpoint's files. Raises ValueError, one sentence, for a
    value that is impossible and for a model that is absent, unknown, incomplete or damaged."""
    _require(p)
    source = p["model"] or str(untrained())
    folder = released.find(source)[0]
    where = folder / "config.json"
    values = checkpoint.read_json(where)
    kind = "axes" if isinstance(values.get("model"), dict) else values.get("model_type")
    at_loops = tuple(sorted(set(p["at_loops"])))
    common = {"source": source, "folder": folder, "name": name_of(p["model"] or "untrained"), "at_loops": at_loops}
    common |= {key: p[key] for key in ("shots", "device", "batch_size")}
    if kind not in families.FAMILIES:
        from lib import audit_foreign  # here, since it imports what the audit of other models never needs

        return audit_foreign.subject(p, common, values)
    plan = families.plan(values, str(where))
    checkpoint.check(folder, plan)
    if plan.config.unrolled:
        raise ValueError(
            f"{where} is an unrolled model's, whose steps each have layers of their own: it must be a looped one's"
        )
    config, dtype = plan.config, str(released.run_dtype(p["precision"] or None, plan)).removeprefix("torch.")
    own = _own_tasks(folder, config)
    read_on, mixture, chosen, notes = (SYMBOLS, *own, []) if own else (PROMPTS, None, *_text_tasks(p, source))
    if not chosen:
        read_on, chosen = TOKENS, (Random(config.vocab_size),)
        notes.append("Random tokens are read: answers are compared with the intact arm's at the trained loop count.")
    if p["boundary"] not in (-1, config.boundary):
        asked, was = Boundary(p["boundary"]), Boundary(config.boundary)
        notes.append(f"The intact arm has the boundary norm {asked}, as asked; the model was trained with it {was}.")
    n, shapes = _fitted(p, source, read_on, chosen, notes)
    return Subject(
        **common,
        family=plan.family,
        config=config,
        parameters=plan.parameters,
        r0=config.loops,
        trained=config.boundary if p["boundary"] < 0 else p["boundary"],
        read_on=read_on,
        tasks=tuple(chosen),
        mixture=mixture,
        loops=max(*at_loops, config.loops),
        n=n,
        dtype=dtype,
        shapes=shapes,
        notes=tuple(notes),
    )


def _require(p: dict) -> None:
    """Raises ValueError naming the first value that is impossible."""
    if not p["at_loops"] or min(p["at_loops"]) < 1:
        raise ValueError(f"loops are {p['at_loops']}: they must be one or more whole numbers of at least 1")
    if unknown := [task for task in p["tasks"] if task not in FAMILIES]:
        raise ValueError(f"tasks has {unknown[0]!r}: each must be one of {', '.join(FAMILIES)}")
    for name in ("n", "batch_size"):
        if p[name] < 1:
            raise ValueError(f"{name} is {p[name]}: it must be at least 1")
    if p["boundary"] < -1:
        raise ValueError(f"boundary is {p['boundary']}: it must be -1 (as trained), 0 (never) or a number of steps")
    if p["device"] not in ("cpu", "cuda") or (p["device"] == "cuda" and not torch.cuda.is_available()):
        raise ValueError(f"device is {p['device']!r}: it must be cpu, or cuda where torch finds a GPU")


def name_of(source: str) -> str:
    """A model's name in outputs/audit: the last part of its hub id or folder, in letters that any file system takes."""
    last = Path(source).expanduser().resolve().name if Path(source).expanduser().is_dir() else source.split("/")[-1]
    return re.sub(r"[^\w.-]+", "-", last).strip(".-") or "model"


def untrained() -> Path:
    """A small model in Ouro's style that was never trained, in the run store: what the notebook shows without a model."""
    config = LoopedConfig(vocab_size=64, core=2, boundary=1, block="sandwich", exit_gate=True)
    spec = {"kind": "untrained", "model": keyed({k: getattr(config, k) for k in LoopedConfig.__annotations__}), "seed": 0}
    spec |= {"torch": torch.__version__, "behaviour": BEHAVIOUR}
    return Store(paths.runs()).make(key(spec), spec, lambda folder: build(config, 0).save_pretrained(folder))


def _own_tasks(folder: Path, config: LoopedConfig) -> tuple[Mixture, tuple[Task, ...]] | None:
    """The mixture that a model of the run store was trained on, by its spec.json, and those of its tasks that an audit reads,
    circuit, hops and paragg; None where that is none."""
    if not (folder / SPEC).is_file():
        return None
    stored = checkpoint.read_json(folder / SPEC).get("task")
    if not isinstance(stored, dict):
        return None
    try:
        mixture = restored(stored)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{folder / SPEC}: its task cannot be made again ({error})") from error
    if mixture.vocab_size != config.vocab_size:
        raise ValueError(f"{folder}: spec.json means {mixture.vocab_size} tokens and config.json {config.vocab_size}")
    return mixture, tuple(task for task in mixture.tasks if isinstance(task, Task))


def _text_tasks(p: dict, source: str) -> tuple[tuple[Task, ...], list[str]]:
    """The tasks asked for whose answers are single tokens of the checkpoint's tokenizer, and why the others are not."""
    try:
        words = released.tokenizer(source)
    except ValueError as error:
        return (), [f"No text can be read: {error}."]
    chosen, notes = [], []
    for task in standins.mixture(p).tasks:
        try:
            prompts.few_shot(task, 1, 2, words, p["shots"])
            chosen.append(task)
        except ValueError as error:
            notes.append(f"The task {task.family} is left out: {error}.")
    return tuple(chosen), notes


def _fitted(p: dict, source: str, read_on: str, chosen, notes: list[str]) -> tuple[int, tuple[tuple[int, int, int], ...]]:
    """The instances a depth that every stratum has, and the shapes of all strata; a smaller number adds a note."""
    if read_on == TOKENS:
        return p["n"], ((p["n"], LENGTH, 0),)
    strata = [(task, d) for task in chosen for d in range(1, task.max_depth + 1)]
    n = min(p["n"], *(tasks.stratum_size(task, d) // 10 for task, d in strata))
    if n < p["n"]:
        notes.append(f"{n} instances a depth are read, not {p['n']}: the smallest stratum has too few for more.")
    if read_on == SYMBOLS:
        return n, tuple((n, task.n_tokens(d), 0) for task, d in strata)
    words, shapes = released.tokenizer(source), []
    for task, d in strata:
        made = prompts.few_shot(task, d, n, words, p["shots"])
        shapes.append((n, max(group.ids.shape[1] for group in made.groups) - made.prefix, made.prefix))
    return n, tuple(shapes)


def estimate(s: Subject) -> Cost:
    """What reading the subject takes when the store holds none of it yet."""
    each = torch.empty((), dtype=released.DTYPES[s.dtype]).element_size()
    if s.config is None:
        rows, length, _ = s.shapes[0]
        return Cost(s.parameters * each, 0, 0, 2.0 * s.parameters * rows * length * sum(s.at_loops))
    swept = [(shape, s.loops_of(period)) for shape in s.shapes for period in s.periods]
    found = [cost.estimate(s.config, *shape, loops, 1, each, s.batch_size) for shape, loops in swept]
    return functools.reduce(Cost.plus, found)
