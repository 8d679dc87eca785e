"""The audit of a looped class that transformers ships and this project has no loader for: hooks, and its own loop setting.

The model without its heads is loaded from a local folder; no remote code runs and only safetensors are read. Its boundary
cannot be changed, so there is one arm. Shapes: B rows, T tokens, D channels.
"""

import json
import math
from pathlib import Path

import pandas as pd
import torch
from transformers import AutoConfig, AutoModel
from transformers.utils import logging

from lib import BEHAVIOUR, at_hand, checkpoint, families, foreign, instruments, paths, released, released_pairs
from lib.audit import FOREIGN, LENGTH, Subject
from lib.audit_readings import Measured
from lib.store import Store, key

SEED = 0  # of the random input
HEADS = ("pooler",)  # parts that a checkpoint may lack, since the last hidden state does not pass through them


def subject(p: dict, common: dict, values: dict) -> Subject:
    """What is audited of a foreign class; common: the values every subject has, values: its config.json.

    Raises ValueError naming a model_type whose loop setting is not known, and for damaged weights.
    """
    folder, kind = common["folder"], values.get("model_type")
    if kind not in foreign.SETTINGS:
        raise ValueError(
            f"{folder / 'config.json'}: model_type is {kind!r}, which cannot be audited: it must be "
            f"{', '.join(k for k in families.FAMILIES if k != 'axes')} or the axes paper's layout, or of transformers' own "
            f"looped classes {', '.join(foreign.SETTINGS)}"
        )
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    setting = getattr(config, foreign.SETTINGS[kind])
    r0 = max(setting) if isinstance(setting, list) else setting
    dtype = p["precision"] or str(values.get("dtype") or values.get("torch_dtype") or "float32")
    if dtype not in released.DTYPES:
        raise ValueError(f"dtype is {dtype!r}: it must be one of {', '.join(released.DTYPES)}")
    return Subject(
        **common,
        family=kind,
        config=None,
        parameters=_parameters(folder),
        r0=r0,
        trained=0,
        read_on=FOREIGN,
        tasks=(),
        mixture=None,
        loops=max(*common["at_loops"], r0),
        n=p["n"],
        dtype=dtype,
        shapes=((p["n"], LENGTH, 0),),
        notes=("Only its norms are counted and its own loop setting is swept: boundary interventions need a loader.",),
    )


def _parameters(folder: Path) -> int:
    """Numbers stored in a folder's safetensors. Raises ValueError when a file is missing, damaged or a pickle."""
    total = 0
    for name in checkpoint.shards(folder):
        with checkpoint.open_shard(folder / name) as f:
            total += sum(math.prod(f.get_slice(tensor).get_shape()) for tensor in f.keys())
    return total


def measure(s: Subject) -> Measured:
    """Its norms at two loop counts, and the sweep over its loop setting; read from the run store where that holds them."""
    counts = sorted({*s.at_loops, s.r0})
    where = "cpu" if s.device == "cpu" else torch.cuda.get_device_name(s.device)
    spec = {"kind": "audited foreign", "checkpoint": released_pairs.fingerprint(s.folder), "loops": counts, "n": s.n}
    spec |= {"counts": list(at_hand.COUNTS), "dtype": s.dtype, "device": where}
    spec |= {"torch": torch.__version__, "behaviour": BEHAVIOUR}

    def build(folder: Path):
        model = load(s)
        given = random_input(model, s.n)
        one = {name: value[:1] for name, value in given.items()}
        norms = instruments.norms(model, at_hand.COUNTS, lambda m, loops: hidden(m, one, loops))
        found = {"norms": norms.to_dict("records"), "swept": sweep(model, given, counts, s.batch_size)}
        (folder / "found.json").write_text(json.dumps(found))

    found = json.loads((Store(paths.runs()).make(key(spec), spec, build) / "found.json").read_text())
    norms = pd.DataFrame(found["norms"]).assign(model=s.name, family=s.family)
    norms["calls"] = norms["calls"].map(tuple)
    return Measured([], {}, norms, pd.DataFrame(), None, pd.DataFrame(found["swept"]).astype({"change": float}))


def load(s: Subject) -> torch.nn.Module:
    """The model without its heads. Raises ValueError when the checkpoint lacks weights of it."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    how = {"local_files_only": True, "use_safetensors": True, "trust_remote_code": False, "output_loading_info": True}
    model, info = AutoModel.from_pretrained(s.folder, dtype=released.DTYPES[s.dtype], **how)
    lacking = [name for name in sorted(info["missing_keys"]) if not name.startswith(HEADS)]
    if lacking or info["mismatched_keys"]:
        odd = [*lacking, *(name for name, *_ in info["mismatched_keys"])]
        raise ValueError(f"{s.folder} lacks {odd[0]}, or has it in another shape: its config.json means a {s.family}")
    model.config.use_cache = False  # a cache may be sized by the loop count the model was built with
    return model.eval().to(s.device)


def random_input(model: torch.nn.Module, rows: int) -> dict[str, torch.Tensor]:
    """The model's input: random tokens (B, T), or for a Perceiver normal noise (B, T, D), from a fixed seed."""
    generator, config = torch.Generator().manual_seed(SEED), model.config
    if config.model_type == "perceiver":
        made = torch.randn(rows, LENGTH, config.d_model, generator=generator)
        return {"inputs": made.to(model.device, model.dtype)}
    length = min(LENGTH, getattr(config, "max_position_embeddings", None) or LENGTH)
    return {"input_ids": torch.randint(config.vocab_size, (rows, length), generator=generator).to(model.device)}


@torch.no_grad()
def hidden(model: torch.nn.Module, given: dict[str, torch.Tensor], loops: int) -> torch.Tensor:
    """The last hidden state at a loop count, (B, T, D)."""
    foreign.set_loops(model, loops)
    return model(**given).last_hidden_state


def sweep(model: torch.nn.Module, given: dict[str, torch.Tensor], counts: list[int], batch_size: int) -> list[dict]:
    """A row a loop count: K, state_norm, the mean L2 norm of a token's last hidden state; change, the mean over tokens of its
    distance from that at the next smaller count, over the latter's norm (None at the first)."""
    rows, first = [], next(iter(given.values()))
    parts = {K: [] for K in counts}
    for i in range(0, len(first), batch_size):
        some = {name: value[i : i + batch_size] for name, value in given.items()}
        before = None
        for K in counts:
            now = hidden(model, some, K).float()
            change = None if before is None else (now - before).norm(dim=-1) / before.norm(dim=-1)
            parts[K].append((now.norm(dim=-1).mean(dim=-1).cpu(), None if change is None else change.mean(dim=-1).cpu()))
            before = now
    for K, found in parts.items():
        change = None if found[0][1] is None else float(torch.cat([c for _, c in found]).mean())
        rows.append({"K": K, "state_norm": float(torch.cat([norm for norm, _ in found]).mean()), "change": change})
    return rows
