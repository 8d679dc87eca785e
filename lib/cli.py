"""The commands on the replication, which make calls too; `cli_models` has those on one model.

Errors are one sentence on stderr and exit code 1.
"""

import argparse
import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from lib import cli_models, paths, stopping
from lib.cli_models import near
from lib.paths import SCALES


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    parser = _parser()
    args, further = parser.parse_known_args(argv)
    if further and args.command is not open_lab:
        parser.error(f"unrecognized arguments: {' '.join(further)}")
    args.options = further
    for name in ("papermill", "asyncio"):  # what goes wrong is told by exceptions
        logging.getLogger(name).setLevel(logging.CRITICAL)
    if os.environ.get("LOOPED_OUTPUTS"):  # a kernel has another working directory
        os.environ["LOOPED_OUTPUTS"] = str(paths.outputs())
    try:
        with stopping.stoppable():
            return args.command(args)
    except KeyboardInterrupt as stop:
        print(
            "Stopped. Finished runs are kept; the same command goes on where this one stopped.",
            file=sys.stderr,
        )
        return 128 + getattr(stop, "number", signal.SIGINT)
    except (ValueError, RuntimeError, OSError) as error:
        if os.environ.get("LOOPED_TRACEBACK"):
            raise
        print(f"error: {_sentence(error)}", file=sys.stderr)
        return 1


def _sentence(error: Exception) -> str:
    from lib.store import cannot_write, disk_full

    if isinstance(error, OSError) and error.errno and disk_full(error):  # which names no file that failed in a write
        return f"{error.filename or paths.outputs()} cannot be written {cannot_write(error)}"
    return str(error)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lib", description="Replicate two papers on looped language models.")
    commands = parser.add_subparsers(required=True, metavar="command")

    run = commands.add_parser("run", help="run the notebooks at a scale and print the verdicts")
    run.add_argument("--scale", default="laptop", help=f"one of {', '.join(SCALES)}")
    run.add_argument("--only", nargs="+", metavar="NAME", help="these notebooks alone")
    run.add_argument("--engine", help="where jobs run: local (the default), or ray, a cluster that is there")
    run.add_argument("--address", help="the cluster's, host:port of its head; by default auto: a cluster on this machine")
    run.add_argument("--fresh", action="store_true", help="set the run store aside first and train everything again")
    run.set_defaults(command=run_notebooks)

    claims = commands.add_parser("claims", help="print the verdict table of a scale")
    claims.add_argument("--scale", default="laptop", help=f"one of {', '.join(SCALES)}")
    claims.add_argument("--json", action="store_true", help="as JSON, one object a claim")
    claims.set_defaults(command=print_claims)

    cli_models.add(commands)

    doctor = commands.add_parser("doctor", help="versions, machine, store health, pairs in sync, stale results")
    doctor.set_defaults(command=diagnose)

    report = commands.add_parser("report", help="a static site of a scale's results, to open in a browser")
    report.add_argument("--scale", default="laptop", help=f"one of {', '.join(SCALES)}")
    report.set_defaults(command=make_report)

    verify = commands.add_parser("verify", help="judge a scale's committed tables again and fail where a verdict differs")
    verify.add_argument("--scale", default="laptop", help=f"one of {', '.join(SCALES)}")
    verify.set_defaults(command=verify_outputs)

    lab = commands.add_parser("lab", help="open JupyterLab at the reading guide, with this environment's kernel")
    lab.add_argument(
        "options", nargs=argparse.REMAINDER, metavar="...", help="JupyterLab's own, such as --no-browser --port 8899"
    )
    lab.set_defaults(command=open_lab)

    refresh = commands.add_parser("refresh", help="make notebooks/*.ipynb from their .py and execute them at the smoke scale")
    refresh.add_argument("names", nargs="*", metavar="NAME", help="these notebooks alone")
    refresh.set_defaults(command=refresh_notebooks)

    readme = commands.add_parser("readme", help="write the generated parts of README.md")
    readme.add_argument("--check", action="store_true", help="change nothing; fail when README.md is not what it should be")
    readme.set_defaults(command=write_readme)

    pilot = commands.add_parser("pilot", help="the pilot that fixed a scale's learning rates, with seeds never reported")
    pilot.add_argument("--scale", default="laptop", help=f"one of {', '.join(SCALES)}")
    own = "whose models: one that trains its own, such as 4_1_asymmetry, 4_4_refit, dense_axes or moe_transfer"
    pilot.add_argument("--notebook", default="4_3_scratch_training", help=own)
    pilot.set_defaults(command=run_pilot)
    return parser


def run_notebooks(args) -> int:
    """Run notebooks in order, printing each one's verdicts as they come, then the whole table and where things are."""
    from lib import abreast, claims, engine, params, runner, store, verify

    only = _known(args.only, runner.NOTEBOOKS)
    chosen = [name for name in runner.NOTEBOOKS if not only or name in only]
    if args.scale == "released_cpu" and not only:  # which the sections on released weights alone have
        chosen = [name for name in chosen if (paths.params() / name / "released_cpu.yaml").exists()]
    # a mistake in the last notebook's file should not wait for the first one to run
    values = {name: params.load(name, args.scale) for name in chosen}
    for one in values.values():
        params.require_device(one)
    where = _engine(args)
    if args.fresh and paths.runs().exists():
        if store.Store(paths.runs()).busy():
            raise ValueError(f"another process is making a run in {paths.runs()}: wait for its end, or leave out --fresh.")
        print(f"the run store is set aside as {_set_aside(paths.runs())}", file=sys.stderr)
    folder, done = paths.outputs() / args.scale, {}

    def finished(name: str, path: Path) -> None:
        done[name], frame = path, claims.write(folder)
        if len(own := frame[frame["notebook"] == name]):
            print(f"\nVerdicts of {name}:\n{claims.table(own)}\n", flush=True)

    before = verify.committed(args.scale)
    with engine.environment(where), params.held(values):
        abreast.run(chosen, args.scale, finished)
    frame = claims.write(folder)
    built = frame[frame["reason"] != claims.NOT_BUILT]
    print(f"Verdicts at scale {args.scale} ({len(built)} of {len(frame)} claims built):\n{claims.table(built)}\n")
    print(
        "Executed notebooks:",
        *(f"  {near(done[name])}" for name in chosen),
        f"  {near(folder / 'claims.csv')}",
        sep="\n",
    )
    if changed := params.changed(values, args.scale):
        said = "during this run, whose results are of the values read at its start: run it again for the new ones."
        print(f"{' and '.join(changed)} changed {said}", file=sys.stderr)
    if before is not None:
        told = verify.moved(before, frame) or ["no verdict moved"]
        print("\nAgainst the committed verdicts:", *(f"  {said}" for said in told), sep="\n")
    _tell_other_rules(frame)
    return 0


def _engine(args) -> dict[str, str]:
    """The environment that tells notebooks their engine. Raises ValueError or EngineError where that cannot run jobs."""
    from lib import engine

    asked = {"LOOPED_ENGINE": args.engine, "LOOPED_RAY_ADDRESS": args.address}
    asked = {name: value for name, value in asked.items() if value}
    with engine.environment(asked):
        if args.address and engine.chosen()[0] != "ray":
            raise ValueError(f"--address is {args.address}, and only --engine ray has an address.")
        engine.require()
    return asked


def _tell_other_rules(frame) -> None:
    from lib import claims

    old = frame[frame["reason"].str.contains(claims.OTHER_RULES, na=False)]
    if len(old):
        said = f"params/claims.yaml holds other rules now than those that judged {len(old)} of {len(frame)} claims"
        print(f"{said}: run {', '.join(old['notebook'].unique())} again.", file=sys.stderr)


def _set_aside(folder: Path) -> Path:
    """Rename a folder by the present time; a clock that was set back may have given that name before."""
    name, n = f"{folder.name}-{time.strftime('%Y%m%d-%H%M%S')}", 1
    while os.path.lexists(aside := folder.with_name(name if n == 1 else f"{name}-{n}")):
        n += 1
    return folder.rename(aside)


def print_claims(args) -> int:
    """Print a scale's verdicts, collected from its result.json files."""
    from lib import claims

    if args.scale not in SCALES:
        raise ValueError(f"scale is {args.scale!r}: it must be one of {', '.join(SCALES)}.")
    frame, _ = claims.collect(paths.outputs() / args.scale)
    print(json.dumps(json.loads(frame.to_json(orient="records")), indent=1) if args.json else claims.table(frame))
    _tell_other_rules(frame)
    return 0


def diagnose(args) -> int:
    """Print what a maintainer asks first; exit code 1 when something needs a hand."""
    from lib import doctor

    lines, healthy = doctor.report()
    print("\n".join(lines))
    return 0 if healthy else 1


def make_report(args) -> int:
    """Make a scale's report and print where it is."""
    from lib import report

    print(near(report.build(args.scale)))
    return 0


def verify_outputs(args) -> int:
    """Judge a scale's tables again; exit code 1 where a verdict, README.md or the report says otherwise."""
    from lib import verify

    return verify.run(args.scale)


def open_lab(args) -> int:
    """Start JupyterLab at the reading guide and serve until it is stopped; returns its exit code."""
    guide = (paths.notebooks() / "00_reading_guide.ipynb").relative_to(paths.ROOT).as_posix()
    command = [sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={paths.ROOT}"]
    command += [f"--LabApp.default_url=/lab/tree/{guide}", *args.options]
    # kernels of this environment before those of the user
    return subprocess.run(command, env=os.environ | {"JUPYTER_PREFER_ENV_PATH": "1"}, check=False).returncode


def write_readme(args) -> int:
    """Write README.md's generated parts, or with --check say whether they are as they should be."""
    from lib import readme, store

    path = paths.ROOT / "README.md"
    old = path.read_text(encoding="utf-8")
    new = readme.render(old)
    if args.check and new != old:
        raise ValueError("README.md does not say what the results say: run `python -m lib readme`.")
    if not args.check:
        store.write_atomic(path, new)
    return 0


def refresh_notebooks(args) -> int:
    """Bring notebooks/ up to date with their sources."""
    from lib import runner

    every = (*runner.NOTEBOOKS, *runner.ALONE)
    for name in _known(args.names, every) or every:
        print(near(runner.refresh(name)))
    return 0


def _known(names: list[str] | None, every: tuple[str, ...]) -> list[str]:
    """The names, all of them among `every`. Raises ValueError naming the first that is not."""
    if unknown := sorted(set(names or ()) - set(every)):
        raise ValueError(f"{unknown[0]} is not a notebook: it must be one of {', '.join(every)}.")
    return list(names or ())


def run_pilot(args) -> int:
    """Run the pilot grid and print its table."""
    from lib import pilot

    print(pilot.run(args.scale, args.notebook).to_string(index=False))
    return 0
