"""The commands on one model: models, audit, export, benchmark, and for a new one corpus, pretrain and scaling."""

import argparse
import json
import os
from pathlib import Path

from lib import paths


def add(commands) -> None:
    """Add these commands' parsers."""
    models = commands.add_parser("models", help="checkpoints that can be loaded; with one named, check it without loading it")
    models.add_argument("model", nargs="?", metavar="MODEL", help="a hub id or a folder")
    models.set_defaults(command=print_models)

    audit = commands.add_parser("audit", help="one model's loop contract, as a one-page report")
    audit.add_argument("model", metavar="MODEL", help="a hub id that was downloaded, or a folder")
    audit.add_argument("--loops", default="1,2,4,8,16,32", help="loop counts that are shown; all up to the largest are read")
    audit.add_argument("--tasks", default="circuit,hops,paragg", help="task families, for a model that reads text")
    audit.add_argument("--dtype", default="", help="bfloat16, float16, float32 or float64; the checkpoint's own by default")
    audit.add_argument("--device", default="cpu", help="cpu or cuda")
    audit.add_argument("--batch-size", type=int, default=32, help="rows at once")
    audit.add_argument("--n", type=int, default=32, help="instances at each depth of each task")
    audit.add_argument("--boundary", type=int, default=-1, help="the intact arm's: 0 never, k every k-th step; as trained")
    audit.set_defaults(command=audit_model)

    export = commands.add_parser("export", help="write a model to a new folder, in the axes paper's layout or ours")
    export.add_argument("model", metavar="MODEL", help="a hub id that was downloaded, or a folder")
    export.add_argument("folder", metavar="FOLDER", help="the new folder")
    export.add_argument("--layout", default="axes", help="axes (the default), in bfloat16, or ours, in the model's own type")
    export.add_argument("--id", metavar="NAME", help="the checkpoint's name in the axes layout; the folder's by default")
    export.set_defaults(command=export_model)

    bench = commands.add_parser("benchmark", help="lm-eval's tasks on one model, at several loop counts")
    bench.add_argument("model", metavar="MODEL", help="a hub id that was downloaded, or a folder")
    named = "lm-eval's names with commas between; axes_paper: that paper's list, axes_paper:gsm8k: one of it"
    bench.add_argument("--tasks", required=True, help=named)
    bench.add_argument("--loops", default="", help="loop counts with commas between; the trained one by default")
    bench.add_argument("--shots", type=int, help="examples in a prompt; the task's or the list's own by default")
    bench.add_argument("--limit", type=int, help="items of each task, the first so many; all by default")
    bench.add_argument("--batch-size", type=int, default=8, help="rows at once")
    bench.add_argument("--dtype", default="", help="bfloat16, float16, float32 or float64; the checkpoint's own by default")
    bench.add_argument("--device", default="cpu", help="cpu or cuda")
    bench.add_argument("--boundary", type=int, default=-1, help="0 never, k every k-th step; as trained by default")
    bench.add_argument("--include-path", nargs="+", metavar="FOLDER", help="folders with yaml files of tasks of your own")
    bench.add_argument("--max-length", type=int, help="tokens of a prompt, the last ones; the list's own or 4096 by default")
    bench.add_argument("--add-bos", action=argparse.BooleanOptionalAction, help="begin texts with the beginning-of-text token")
    bench.add_argument("--run-code", action="store_true", help="allow tasks that run the code that the model writes")
    bench.set_defaults(command=benchmark_model)

    corpus = commands.add_parser("corpus", help="tokenise and pack text files into a corpus for pretraining")
    corpus.add_argument("folder", metavar="FOLDER", help="the corpus, which is made")
    corpus.add_argument(
        "texts", nargs="+", metavar="TEXT", help=".txt files, one document each, or .jsonl, one a line under text"
    )
    corpus.add_argument("--vocabulary", type=int, default=8192, help="tokens of the BPE that is learned; 259: bytes alone")
    corpus.add_argument("--tokenizer", metavar="MODEL", help="a checkpoint whose tokenizer is taken instead")
    corpus.add_argument("--length", type=int, default=1024, help="tokens a row")
    corpus.set_defaults(command=make_corpus)

    pretrain = commands.add_parser("pretrain", help="train a model on text; under torchrun, on several GPUs or machines")
    pretrain.add_argument("recipe", metavar="RECIPE", help="a file such as params/pretrain/tiny.yaml")
    pretrain.add_argument("--out", metavar="FOLDER", help="its run, which goes on where it stopped; outputs/pretrain/<recipe>")
    pretrain.add_argument("--device", default="cpu", help="cpu or cuda")
    pretrain.add_argument("--engine", help="of several processes: ddp or fsdp; the recipe's by default")
    pretrain.add_argument("--seed", type=int, help="in place of the recipe's")
    pretrain.set_defaults(command=pretrain_model)

    scaling = commands.add_parser("scaling", help="FLOP, memory and GPU hours of pretraining each published recipe")
    scaling.add_argument("--gpu", default="H100", help="H100, H200 or A100")
    scaling.add_argument("--measure", action="store_true", help="train a small model for a moment and say its rate")
    scaling.add_argument("--device", default="cpu", help="of --measure: cpu or cuda")
    scaling.set_defaults(command=print_scaling)


def print_models(args) -> int:
    """Print what can be loaded, or hold one checkpoint's files against its configuration and print what it is."""
    from lib import released

    print("\n".join(released.table() if args.model is None else released.inspect(args.model)))
    return 0


def audit_model(args) -> int:
    """Estimate, read and report one model; prints the verdict and where the report is."""
    from lib import audit, cost, params, released, runner

    if not args.model.strip():
        raise ValueError("no model is named: give a hub id or a folder, as in make audit MODEL=ByteDance/Ouro-1.4B")
    folder = Path(args.model).expanduser()
    values = params.load("audit", "smoke") | {
        "model": str(folder.resolve()) if folder.is_dir() else args.model,
        "at_loops": _numbers("loops", args.loops),
        "tasks": args.tasks.split(","),
        "precision": args.dtype,
        **{key: getattr(args, key) for key in ("device", "batch_size", "n", "boundary")},
    }
    asked = audit.subject(values)
    takes = audit.estimate(asked)
    cost.require_memory(takes, asked.device)
    rate = cost.rate(asked.device, released.DTYPES[asked.dtype])
    print(f"{asked.name}: {takes.sentence(rate)}; what the run store holds is not read again.", flush=True)
    done = runner.execute("audit", values, "audit", asked.name)
    found = json.loads((done.parent / "report.json").read_text(encoding="utf-8"))
    print(*found["notes"], found["verdict"], sep="\n")
    print(*(f"  {near(done.parent / name)}" for name in ("report.html", "report.json", "notebook.ipynb")), sep="\n")
    return 0


def export_model(args) -> int:
    """Write a model and its tokenizer to a new folder in another layout; prints where it is."""
    import torch

    from lib import export_axes, released

    if args.layout not in ("axes", "ours"):
        raise ValueError(f"layout is {args.layout!r}: it must be axes or ours")
    folder = Path(args.folder).expanduser().absolute()
    export_axes.require_new(folder)
    plan, tokenizer = released.plan_of(released.find(args.model)[0]), released.tokenizer(args.model)
    if args.layout == "axes":
        export_axes.plan_of(plan.config)  # what it has no way to say is told before the weights are read
        wide = torch.promote_types(released.run_dtype(None, plan), torch.float32)  # a gain read in bf16 loses digits of its 1
        export_axes.export(released.load(args.model, dtype=wide), tokenizer, folder, args.id or folder.name)
    else:
        model = released.load(args.model)
        with export_axes.staged(folder) as inside:
            model.save_pretrained(inside)
            tokenizer.save_pretrained(inside)
    whose = "our own" if args.layout == "ours" else "the axes paper's"
    print(f"{near(folder)} holds {args.model} in {whose} layout")
    return 0


def benchmark_model(args) -> int:
    """Run lm-eval's tasks on one model at each loop count; prints the scores and where they are."""
    from lib import benchmark

    names = ("shots", "limit", "batch_size", "dtype", "device", "boundary", "max_length", "include_path", "add_bos", "run_code")
    loops = _numbers("loops", args.loops) if args.loops else None
    folder = benchmark.run(args.model, args.tasks.split(","), loops, **{name: getattr(args, name) for name in names})
    print(benchmark.table(folder))
    print(*(f"  {near(folder / name)}" for name in ("results.csv", "results.json", "accuracy.png")), sep="\n")
    return 0


def print_scaling(args) -> int:
    """Print what pretraining takes, recipe by recipe, and with --measure how fast this machine trains."""
    from lib import cost_training

    print("\n".join(cost_training.table(args.gpu)))
    if args.measure:
        print(cost_training.measured_rate(device=args.device).sentence())
    return 0


def make_corpus(args) -> int:
    """Make a corpus of text files and say what it is."""
    from lib import corpus, released

    folder, files = Path(args.folder).expanduser(), [Path(name).expanduser() for name in args.texts]
    if missing := [file for file in files if not file.is_file()]:
        raise ValueError(f"{missing[0]} is no file: give .txt or .jsonl files")
    if folder.exists():
        raise ValueError(f"{folder} is there already: give the name of a new folder")
    own = released.tokenizer(args.tokenizer) if args.tokenizer else None
    names = ", ".join(file.name for file in files)
    made = corpus.build(folder, lambda: corpus.file_texts(files), args.vocabulary, args.length, names, own)
    for split, n in made.about["splits"].items():
        print(f"{split:<11} {n['documents']:,} documents, {n['bytes']:,} bytes, {n['rows']:,} rows of {made.length} tokens")
    print(f"{near(folder.resolve())}: {made.vocab_size:,} tokens; name it in a recipe as data.folder")
    return 0


def pretrain_model(args) -> int:
    """Train a recipe's model, or go on where it stopped; prints where it is and its bits a byte."""
    from lib import pretrain, pretrain_recipe

    path = Path(args.recipe)
    recipe = pretrain_recipe.read(
        path, **{key: getattr(args, key) for key in ("engine", "seed") if getattr(args, key) is not None}
    )
    out = Path(args.out).expanduser().resolve() if args.out else paths.outputs() / "pretrain" / path.stem
    model = pretrain.run(recipe, out, args.device)
    if os.environ.get("RANK", "0") == "0":
        last = pretrain.log_of(out)[-1]
        said = f"{last['eval_bits_per_byte']:.3f} bits a byte, {last['eval_loss']:.3f} nats a token"
        print(f"step {last['step']:,} of {recipe.last_step:,}: {said} on text that was held out")
        print(f"{near(model)} is the model, {near(out / pretrain.LOG)} its course")
    return 0


def _numbers(name: str, text: str) -> list[int]:
    """Whole numbers with commas between. Raises ValueError naming the option."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{name} is {text!r}: it must be whole numbers with commas between, such as 1,2,4,8") from None


def near(path: Path) -> Path:
    """A path as seen from the working directory, where it lies below it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
