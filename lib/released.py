"""Published checkpoints as the one model: find a hub id or a folder, say what it is, load it.

No remote code runs and only safetensors are read. What can be loaded is listed in params/models.yaml.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from transformers import GenerationConfig, PreTrainedTokenizerFast

from lib import checkpoint, cost, families, family_axes, manifest, paths
from lib.boundary import Boundary
from lib.checkpoint_plan import DTYPES as DTYPE_NAMES
from lib.checkpoint_plan import Plan
from lib.config import LoopedConfig
from lib.looped import LoopedModel

DTYPES = {name: getattr(torch, name) for name in DTYPE_NAMES}


@dataclass(frozen=True)
class Entry:
    """One checkpoint of the catalogue: its hub id, and its plan, or the sentence that says why it cannot be loaded."""

    id: str
    plan: Plan | None
    missing: str = ""


def catalogue() -> list[Entry]:
    """Every checkpoint of params/models.yaml, in its order."""
    file = paths.params() / "models.yaml"
    entries = []
    for group in yaml.safe_load(file.read_text(encoding="utf-8")).values():
        for id, own in group["checkpoints"].items():
            base, section = group["config"], group.get("section")
            config = {section: base | (own or {})} if section else base | (own or {})
            try:
                entries.append(Entry(id, families.plan(config, f"{file.name}, {id}")))
            except ValueError as error:
                entries.append(Entry(id, None, str(error).split(id, 1)[1].split(": ", 1)[1]))
    return entries


def find(source: str | Path, revision: str | None = None) -> tuple[Path, bool]:
    """The folder of a checkpoint, and whether it is the hub's own cache: a folder, or a hub id that was downloaded.

    A hub id is looked for in models/<hub id> and in the hub's cache; nothing is downloaded. Raises ValueError with the
    command that downloads it, or naming the folder that is not there.
    """
    name = str(source)
    path = Path(source).expanduser()
    if name and path.is_dir():
        return path, False
    if path.is_file():
        if path.name.endswith(checkpoint.PICKLES):
            raise ValueError(f"{path} is a pickle, {checkpoint.RISK}")
        raise ValueError(f"{path} is a file: give the folder that holds config.json and the weights")
    if name.count("/") != 1 or name.startswith((".", "/", "~")) or name.endswith("/"):
        raise ValueError(f"{name or 'an empty name'} is neither a folder nor a hub id such as ByteDance/Ouro-1.4B")
    if revision is None and (beside := paths.ROOT / "models" / name).is_dir():
        return beside, False
    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True)), True
    except (LocalEntryNotFoundError, HFValidationError) as error:
        raise ValueError(f"{name} is not on this machine: get it with `{command(name)}`, then call again") from error


def command(id: str) -> str:
    """The command that downloads a checkpoint to where `find` looks."""
    if not id.startswith("IFM/"):
        return f"hf download {id}"
    folder = paths.ROOT / "models" / id  # a layout that allows no links, such as the hub's cache has
    return f"hf download {id} --local-dir {folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder}"


def plan_of(folder: Path) -> Plan:
    """What the config.json of a folder means. Raises ValueError, one sentence, when that cannot be loaded."""
    return families.plan(checkpoint.read_json(folder / "config.json"), str(folder / "config.json"))


def run_dtype(wanted: torch.dtype | str | None, plan: Plan) -> torch.dtype:
    """The type to run in: the one asked for, else the checkpoint's own. Raises ValueError for one that is no float type."""
    name = plan.dtype if wanted is None else str(wanted).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"dtype is {name!r}: it must be one of {', '.join(DTYPES)}")
    return DTYPES[name]


def load(
    source: str | Path,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str = "cpu",
    revision: str | None = None,
) -> LoopedModel:
    """A published checkpoint, or a model saved by this project, ready to be read.

    source: a folder or a hub id; dtype: the checkpoint's own by default. Its generation settings carry the family's stop and
    padding tokens. Peak memory is the weights in `dtype` and a slice. Raises ValueError, one sentence, for every way in which
    a checkpoint can be absent, unknown, incomplete, damaged or unsafe, and for a GPU that is not there.
    """
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {str(device)!r}, and torch finds no GPU on this machine: it must be cpu")
    folder, cached = find(source, revision)
    plan = plan_of(folder)
    _verified(folder, plan, cached)  # before memory is taken
    with torch.device("meta"):
        model = LoopedModel(plan.config).to(run_dtype(dtype, plan))
    model.to_empty(device=device)
    model.tie_weights()
    checkpoint.fill(model, plan, folder)
    if plan.family == "looped" and (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    else:
        stop = list(plan.stop) or None
        model.generation_config = GenerationConfig(bos_token_id=plan.start, eos_token_id=stop, pad_token_id=plan.pad)
    return model.eval()


def tokenizer(source: str | Path, revision: str | None = None) -> PreTrainedTokenizerFast:
    """The tokenizer beside a checkpoint, padding on the left with the family's padding token.

    Raises ValueError when there is none, or when it has tokens that the model has not.
    """
    folder, cached = find(source, revision)
    plan = plan_of(folder)
    inside = folder
    if plan.family == family_axes.NAME:
        manifest.verify(folder, cached)
        inside = folder / checkpoint.read_json(folder / "config.json")["tokenizer"]["path"]
    if not (inside / "tokenizer.json").is_file():
        raise ValueError(f"{inside / 'tokenizer.json'} is missing: the checkpoint's tokenizer must lie beside it")
    takes = ["input_ids", "attention_mask"]  # what the model takes
    try:
        found = PreTrainedTokenizerFast.from_pretrained(
            inside, local_files_only=True, padding_side="left", model_input_names=takes
        )
    except Exception as error:  # whatever a broken file makes its reader raise
        raise ValueError(f"{inside / 'tokenizer.json'} cannot be read ({type(error).__name__}): get it again") from error
    if len(found) > plan.config.vocab_size:
        raise ValueError(
            f"{inside / 'tokenizer.json'} has {len(found)} tokens and the model {plan.config.vocab_size}: it is another model's"
        )
    if found.pad_token is None:
        pad = plan.pad if plan.pad is not None else found.eos_token_id
        found.pad_token = found.convert_ids_to_tokens(pad if pad is not None else 0)
    return found


def inspect(source: str | Path, revision: str | None = None) -> list[str]:
    """Lines that say what a checkpoint is, after all its files were held against its configuration; nothing is loaded.

    Raises ValueError as `load` does.
    """
    folder, cached = find(source, revision)
    plan = plan_of(folder)
    _verified(folder, plan, cached)
    c, n = plan.config, plan.parameters
    names = [key for key in LoopedConfig.__annotations__ if getattr(c, key) != getattr(LoopedConfig(), key)]
    return [
        f"folder      {folder}",
        f"family      {plan.family}",
        f"layers      {_layers(c)}",
        f"parameters  {n:,}" + (f", of which one token uses {cost.activated(c):,}" if c.n_experts else ""),
        f"memory      {memory(n, 2)} in bfloat16, {memory(n, 4)} in float32; it asks for {plan.dtype}",
        f"boundary    the norm acts at the loop boundary: {Boundary(c.boundary)}",
        f"stop        tokens {', '.join(map(str, plan.stop)) or 'none'}; padding {plan.pad}",
        f"values      {', '.join(f'{key}={getattr(c, key)}' for key in names)}",
    ]


def _layers(c: LoopedConfig) -> str:
    """The layers of a configuration in words."""
    if c.unrolled:
        said = f"{c.prelude}, then {c.loops} times {c.core} of their own, an unrolled loop, then {c.coda}"
    else:
        said = f"{c.prelude} before the loop, {c.core} looped {c.loops} times, {c.coda} after it"
    if c.state != "single":
        whose = "both states by all looped layers" if c.state == "shared" else "H by the first half of them, L by the second"
        said += f"; H/L states, {c.h_cycles} times {c.l_cycles} L updates and one H update, {whose}"
    said += f"; an update runs its layers {c.repeats} times" if c.repeats > 1 else ""
    return said + (f"; in each {c.n_experts} experts, {c.experts_per_token} a token" if c.n_experts else "")


def _verified(folder: Path, plan: Plan, cached: bool) -> None:
    if plan.family == family_axes.NAME:
        manifest.verify(folder, cached)
    checkpoint.check(folder, plan)


def present(id: str) -> Path | None:
    """The folder of a checkpoint whose files are all on this machine, or None."""
    try:
        folder = find(id)[0]
        checkpoint.shards(folder)
        return folder if (folder / "config.json").is_file() else None
    except ValueError:
        return None


def memory(parameters: int, bytes_each: int) -> str:
    """The weights' memory in words."""
    size = parameters * bytes_each
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 / 100 else f"{size / 2**20:.2f} MiB"


def table() -> list[str]:
    """Lines of what can be loaded: family, hub id, parameters, memory in bf16 and fp32, and where it is on this machine."""
    lines = [
        f"{'checkpoint':<52} {'family':<10} {'loops':>5} {'parameters':>14} {'bfloat16':>10} {'float32':>10}  on this machine"
    ]
    waiting = []
    for entry in catalogue():
        if entry.plan is None:
            waiting.append(f"{entry.id:<52} {entry.missing}")
            continue
        plan, n = entry.plan, entry.plan.parameters
        where = present(entry.id)
        lines.append(
            f"{entry.id:<52} {plan.family:<10} {plan.config.loops:>5} {n:>14,} {memory(n, 2):>10} {memory(n, 4):>10}  "
            f"{where if where else 'no'}"
        )
    lines += ["", "Listed too, and not loadable:", *waiting] if waiting else []
    return [*lines, "", f"To get one: `{command('ByteDance/Ouro-1.4B')}`; of the axes paper's: `{command('IFM/NAME')}`."]
