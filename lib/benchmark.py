"""Any looped model on lm-eval's tasks at several loop counts: accuracy against loop count in one command."""

import difflib
import io
import json
import logging
import math
import os
import time
from importlib.metadata import version
from pathlib import Path

import altair as alt
import pandas as pd
import torch

from lib import audit, benchmark_suite, paths, plots, released, store
from lib.benchmark_model import LONGEST, LoopedLM, beginning
from lib.benchmark_suite import Asked
from lib.boundary import Boundary


def run(
    source: str,
    tasks: list[str],
    loops: list[int] | None = None,
    shots: int | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    dtype: str = "",
    device: str = "cpu",
    boundary: int = -1,
    include_path: list[str] | None = None,
    max_length: int | None = None,
    add_bos: bool | None = None,
    run_code: bool = False,
) -> Path:
    """Run tasks at each loop count; the folder with results.csv, results.json and accuracy.png, kept up to date.

    source: as `released.load` takes it; tasks: names of lm-eval's or of lists in params/benchmark, whose own shots and caps
    hold where shots and max_length are None; loops: by default the trained count; limit: items of a task, all by default;
    boundary: -1 as trained, 0 never, k every k-th step; include_path: folders with tasks of one's own; run_code: allow tasks
    that run what the model writes. Raises ValueError, one sentence, before the model is loaded, for what cannot be done.
    """
    for name, value in {"batch_size": batch_size, "limit": limit, "max_length": max_length}.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}: it must be at least 1")
    if shots is not None and shots < 0:
        raise ValueError(f"shots is {shots}: it must be 0 or more")
    if boundary < -1:
        raise ValueError(f"boundary is {boundary}: it must be -1 (as trained), 0 (never) or a number of steps")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda', and torch finds no GPU on this machine: it must be cpu")
    plan = released.plan_of(released.find(source)[0])
    loops = sorted(set(loops or [plan.config.loops]))
    if min(loops) < 1:
        raise ValueError(f"loops is {min(loops)}: it must be at least 1")
    if plan.config.unrolled and loops[-1] > plan.config.loops:
        raise ValueError(f"loops is {loops[-1]}: it must be at most {plan.config.loops}, which an unrolled core has layers for")
    released.run_dtype(dtype or None, plan)
    import lm_eval  # behind lib.benchmark_model, which says whether it may download

    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # what goes wrong is told by exceptions
    asked = benchmark_suite.expand(tasks)
    manager, made = prepared(asked, include_path or [], run_code)
    model, tokenizer = released.load(source, dtype=dtype or None, device=device), released.tokenizer(source)
    period = plan.config.boundary if boundary == -1 else boundary
    own = {"boundary": Boundary(period), "batch_size": batch_size, "add_bos": add_bos, "family": plan.family}
    folder = paths.outputs() / "benchmark" / audit.name_of(source)
    said = {
        "model": source,
        "family": plan.family,
        "trained_loops": plan.config.loops,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": device,
        "boundary": period,
        "begins_with": beginning(model, tokenizer, add_bos, plan.family),
        "limit": limit,
        "lm_eval": version("lm_eval"),
        "torch": torch.__version__,
        "tasks": {},
    }
    frames = []
    for one in asked:
        entry, begun = one.entry, time.monotonic()
        cap = max_length or (entry.max_prompt if entry else LONGEST)
        k_shots = shots if shots is not None or entry is None else entry.shots
        new = {"max_gen_toks": entry.max_new} if entry and entry.max_new else None
        for K in loops:
            done = lm_eval.simple_evaluate(
                LoopedLM(model, tokenizer, loops=K, max_length=cap, **own),
                tasks=made[one.name],
                num_fewshot=k_shots,
                limit=limit,
                gen_kwargs=new,
                task_manager=manager,
                bootstrap_iters=1000,
                log_samples=False,
                confirm_run_unsafe_code=run_code,
            )
            frames.append(rows_of(done, one, K))
            protocol = entry.model_dump(exclude_none=True) if entry else {}
            seconds = round(time.monotonic() - begun, 1)
            said["tasks"][one.name] = protocol | {"max_prompt": cap, "versions": done["versions"], "seconds": seconds}
            _write(folder, pd.concat(frames, ignore_index=True), said)
        _draw(folder, pd.concat(frames, ignore_index=True), said)
    return folder


def prepared(asked: list[Asked], include_path: list[str], run_code: bool) -> tuple[object, dict[str, list]]:
    """lm-eval's manager, and its tasks by the names asked for, their data sets read.

    Raises ValueError naming every task that is unknown, whose data set is not at hand, or that would run code.
    """
    from lm_eval.tasks import TaskManager  # see `run`

    for folder in include_path:
        if not Path(folder).is_dir():
            raise ValueError(f"include_path is {folder}: it must be a folder that holds the yaml files of tasks")
    if not run_code:
        _refuse_code([one.name for one in asked if one.entry and one.entry.runs_code])
    else:
        os.environ.setdefault("HF_ALLOW_CODE_EVAL", "1")  # what code_eval asks for
    known, names = None, {one.task for one in asked}
    if include_path:
        known = TaskManager(include_path=include_path, include_defaults=False)
    if known is None or not names <= set(known.all_tasks):  # lm-eval's own take half a minute to list
        known = TaskManager(include_path=include_path or None)
    if unknown := sorted(names - set(known.all_tasks)):
        near = difflib.get_close_matches(unknown[0], known.all_tasks, n=3)
        right = f"perhaps {' or '.join(near)}" if near else "a name of lm-eval's, or one of a yaml file in --include-path"
        raise ValueError(f"tasks has {unknown[0]}, which is no task: it must be another name, {right}")
    made, missing = {}, []
    for one in asked:
        try:
            loaded = known.load([one.task])
        except ImportError as error:
            said = " ".join(str(error).split()).split(". ")[0]
            raise ValueError(f"task {one.name} needs a package that is not installed ({said})") from error
        except (OSError, ValueError) as error:  # datasets raises many kinds of both
            if not isinstance(error, OSError) and "cache" not in str(error):
                raise ValueError(f"task {one.name} cannot be read: {' '.join(str(error).split())}") from error
            missing.append(f"{one.name} ({' '.join(str(error).split())[:120]})")
            continue
        if not run_code:
            _refuse_code([one.name] if any(getattr(task, "UNSAFE_CODE", False) for task in loaded["tasks"].values()) else [])
        group = loaded["groups"].get(one.task)
        made[one.name] = [group] if group else list(loaded["tasks"].values())
    if missing:
        right = "call once with HF_HUB_OFFLINE=0 HF_DATASETS_OFFLINE=0 to download them, or leave these tasks out"
        raise ValueError(f"what these tasks need is not on this machine: {'; '.join(missing)}: {right}")
    return known, made


def _refuse_code(names: list[str]) -> None:
    if names:
        raise ValueError(
            f"{', '.join(names)} would run code that the model writes: add --run-code to allow that, or name other tasks"
        )


def rows_of(done: dict, asked: Asked, loops: int) -> pd.DataFrame:
    """The scores of one evaluation as rows: task, metric, loops, value, stderr, n, shots, reported.

    A group's parts are rows too. reported: the protocol's metric, or the first one, of what was asked for.
    """
    rows, sizes = [], {name: counts["effective"] for name, counts in done["n-samples"].items()}
    for task, scores in (done["results"] | done.get("groups", {})).items():
        parts = [part for part in _leaves(task, done["group_subtasks"]) if part in sizes]
        n = sizes.get(task, sum(sizes[part] for part in parts))
        for key, value in scores.items():
            metric, comma, kept = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = scores.get(f"{metric}_stderr,{kept}")
            error = error if isinstance(error, int | float) else math.nan
            name = metric if kept == "none" else key
            shots = done["n-shot"].get(task, done["n-shot"].get(next(iter(parts), task)))
            rows.append((task, name, loops, value, error, n, shots))
    frame = pd.DataFrame(rows, columns=["task", "metric", "loops", "value", "stderr", "n", "shots"])
    whole = frame["task"] == asked.task if (frame["task"] == asked.task).any() else frame["task"] != ""
    first = frame.groupby("task")["metric"].transform("first") if asked.entry is None else asked.entry.metric
    # one task may be asked for under two protocols
    return frame.assign(reported=whole & (frame["metric"] == first), task=frame["task"].replace(asked.task, asked.name))


def _leaves(task: str, parts: dict[str, list[str]]) -> list[str]:
    """A task, or all that a group holds at any depth."""
    return [leaf for part in parts[task] for leaf in _leaves(part, parts)] if task in parts else [task]


def _write(folder: Path, frame: pd.DataFrame, said: dict) -> None:
    """Write results.csv and results.json, each whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    store.write_atomic(folder / "results.csv", frame.drop(columns="reported").to_csv(index=False))
    plain = json.loads(frame.to_json(orient="records", double_precision=15))
    store.write_atomic(folder / "results.json", json.dumps(said | {"results": plain}, indent=1))


def _draw(folder: Path, frame: pd.DataFrame, said: dict) -> None:
    """Write accuracy.png, whole or not at all."""
    picture = io.BytesIO()
    figure(frame[frame["reported"]], said["trained_loops"], folder.name).save(picture, format="png", scale_factor=2)
    store.write_atomic(folder / "accuracy.png", picture.getvalue())


def figure(frame: pd.DataFrame, trained: int, title: str = "") -> alt.TopLevelMixin:
    """A score against the loop count (log2), one panel a task: value, 95 % interval, the trained count dashed.

    frame: task, metric, loops, value, stderr.
    """
    frame = frame.assign(K=frame["loops"], low=frame["value"] - 1.96 * frame["stderr"])
    frame = frame.assign(high=frame["value"] + 1.96 * frame["stderr"])
    counts = sorted(set(frame["K"]) | {trained})
    span = alt.Scale(type="log", base=2, domain=[0.85 * counts[0], 1.18 * counts[-1]], nice=False)
    x = alt.X("K:Q", title="loop count K", scale=span, axis=alt.Axis(values=counts, labelOverlap=True))
    mark = pd.DataFrame({"K": [trained], "text": [f"trained, K = {trained}"]})
    panels = []
    for (task, metric), own in frame.groupby(["task", "metric"], sort=False):
        bounded = own["value"].between(0, 1).all() and "perplexity" not in metric
        scale = alt.Scale(domain=[0, 1.1], nice=False) if bounded else alt.Scale(zero=False)
        own = own.assign(low=own["low"].clip(0), high=own["high"].clip(upper=1)) if bounded else own
        y, base = alt.Y("value:Q", title=metric, scale=scale), alt.Chart(own)
        layers = [
            alt.Chart(mark).mark_rule(strokeDash=[5, 4], color="#444").encode(x=x),
            alt.Chart(mark)
            .mark_text(align="left", dx=4, baseline="top", color="#444", fontSize=plots.FONT - 2)
            .encode(x=x, y=alt.value(2), text="text:N"),
            base.mark_line(strokeWidth=2, color=plots.COLOURS[0]).encode(x=x, y=y),
            base.transform_filter("isValid(datum.low)")
            .mark_rule(strokeWidth=2, color=plots.COLOURS[0])
            .encode(x=x, y=alt.Y("low:Q", title=metric, scale=scale), y2="high:Q"),
            base.mark_point(size=55, filled=True, opacity=1, color=plots.COLOURS[0]).encode(x=x, y=y),
        ]
        panels.append(alt.layer(*layers).properties(width=250, height=190, title=task))
    chart = alt.concat(*panels, columns=3).properties(title=title)
    return (
        chart.configure_axis(labelFontSize=plots.FONT - 1, titleFontSize=plots.FONT, titleFontWeight="normal", gridOpacity=0.4)
        .configure_title(fontSize=plots.FONT + 1, anchor="start")
        .configure_view(strokeOpacity=0.3)
    )


def table(folder: Path) -> str:
    """The reported scores in results.json, a line a task, a column a loop count."""
    said = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    frame = pd.DataFrame(said["results"])
    frame = frame[frame["reported"]]
    errors = ["" if pd.isna(error) else f" ± {error:.4f}" for error in frame["stderr"]]
    frame = frame.assign(cell=[f"{value:.4f}{error}" for value, error in zip(frame["value"], errors, strict=True)])
    wide = frame.pivot(index=["task", "metric", "n", "shots"], columns="loops", values="cell")
    return wide.rename(columns=lambda K: f"K = {K}").rename_axis(columns=None).reset_index().to_string(index=False)
