"""The axes paper's released layout: artifact_manifest.json lists every file with its size and SHA-256, and all must hold.

{config.json, model-NNNNN-of-NNNNN.safetensors, model.safetensors.index.json, artifact_manifest.json, tokenizer/...}, in a
released one also README.md, LICENSE and NOTICE. Weights are bf16.
"""

import hashlib
import json
import re
from pathlib import Path, PurePosixPath

from lib.checkpoint import INDEX, open_shard, read_json

NAME = "artifact_manifest.json"
FIXED = {"README.md", "config.json", INDEX, "LICENSE", "NOTICE"}
SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
HEAD = {"schema_version": 1, "release": "paper-part1", "format": "xllm-native-bf16-safetensors"}
DOWNLOADED = (".gitattributes", ".cache/huggingface/")  # left by `hf download --local-dir`


def verify(folder: Path, cached: bool = False) -> None:
    """Hold a folder against its manifest: its own hash, the set of files, each file's size and hash, index and config.

    cached: the folder is the hub's own cache, whose files are links to its blobs; elsewhere a link is refused. Raises
    ValueError, one sentence naming the file, for the first thing that does not hold.
    """
    path = folder / NAME
    manifest = read_json(path)
    bare = {key: value for key, value in manifest.items() if key != "manifest_sha256"}
    try:
        text = json.dumps(bare, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:  # NaN, or half a character
        raise ValueError(f"{path} holds a value that has no place in it ({error}): get it again") from error
    if manifest.get("manifest_sha256") != hashlib.sha256(text).hexdigest():
        raise ValueError(f"{path}: manifest_sha256 is not the hash of the rest: the manifest was altered; get it again")
    for key, value in HEAD.items():
        if manifest.get(key) != value:
            raise ValueError(f"{path}: {key} is {manifest.get(key)!r}: it must be {value!r}")
    source = manifest.get("source")
    if not isinstance(source, dict) or not isinstance(source.get("checkpoint_id"), str) or not source["checkpoint_id"]:
        raise ValueError(f"{path}: source.checkpoint_id must name the checkpoint")
    listed = _listed(path, manifest)
    if "model_card_sha256" in source and listed.get("README.md", {}).get("sha256") != source["model_card_sha256"]:
        raise ValueError(f"{path}: README.md must be listed with source.model_card_sha256")
    if ("LICENSE" in listed) != ("NOTICE" in listed):
        raise ValueError(f"{path}: LICENSE and NOTICE must be listed together or not at all")
    _files(folder, listed, cached)
    _contents(folder, manifest, listed)


def _listed(path: Path, manifest: dict) -> dict[str, dict]:
    """The manifest's records by file, each inside the layout."""
    records = manifest.get("files")
    if not isinstance(records, list) or not all(isinstance(r, dict) and isinstance(r.get("path"), str) for r in records):
        raise ValueError(f"{path}: files must list each file's path, sha256 and size_bytes")
    found: dict[str, dict] = {}
    for record in records:
        name = record["path"]
        parts = PurePosixPath(name).parts
        inside = str(PurePosixPath(name)) == name and not name.startswith("/") and ".." not in parts and "\\" not in name
        known = name in FIXED or SHARD.fullmatch(name) or (len(parts) > 1 and parts[0] == "tokenizer")
        if not inside or not known or name in found:
            why = "twice" if name in found else "outside of the layout"
            raise ValueError(f"{path}: files lists {name!r} {why}")
        found[name] = record
    return found


def _files(folder: Path, listed: dict[str, dict], cached: bool) -> None:
    """The files that are there are those listed, with their sizes and hashes, and none is a link."""
    if folder.is_symlink():
        raise ValueError(f"{folder} is a link: it must be the folder itself")
    there = set()
    blobs = folder.resolve().parents[1] / "blobs" if cached else None
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder).as_posix()
        if name == DOWNLOADED[0] or name.startswith(DOWNLOADED[1]):
            continue
        if file.is_symlink() and file.resolve().parent != blobs:
            raise ValueError(f"{file} is a link: every file must be a file; get it with `hf download --local-dir`")
        if file.is_file() and name != NAME:
            there.add(name)
    if extra := sorted(there - listed.keys()):
        raise ValueError(f"{folder / extra[0]} is not listed in {NAME}: take it away")
    if missing := sorted(listed.keys() - there):
        raise ValueError(f"{folder / missing[0]} is listed in {NAME} and is not there: get it again")
    for name, record in listed.items():
        if (folder / name).stat().st_size != record.get("size_bytes"):
            raise ValueError(f"{folder / name} has not the size that {NAME} gives it: get it again")
        with open(folder / name, "rb") as f:
            if hashlib.file_digest(f, "sha256").hexdigest() != record.get("sha256"):
                raise ValueError(f"{folder / name} has not the SHA-256 that {NAME} gives it: get it again")


def _contents(folder: Path, manifest: dict, listed: dict[str, dict]) -> None:
    """What index, config and shards say agrees with the manifest."""
    model = manifest.get("model")
    if not isinstance(model, dict) or model.get("dtype") != "bfloat16" or model.get("index") != INDEX:
        raise ValueError(f"{folder / NAME}: model must be of dtype bfloat16 with the index {INDEX}")
    index = read_json(folder / INDEX)
    place = index.get("weight_map")
    if not isinstance(place, dict) or not all(isinstance(name, str) for name in place.values()):
        raise ValueError(f"{folder / INDEX}: weight_map must name each tensor's file")
    if model.get("tensor_count") != len(place):
        raise ValueError(f"{folder / INDEX}: weight_map must name model.tensor_count tensors, {model.get('tensor_count')}")
    named, kept = set(place.values()), {name for name in listed if name.endswith(".safetensors")}
    if model.get("shards") != len(named) or named != kept:
        raise ValueError(
            f"{folder / INDEX}: its files must be the {model.get('shards')} listed in {NAME}, no more and no fewer"
        )
    total = index.get("metadata", {}).get("total_size") if isinstance(index.get("metadata"), dict) else None
    if not isinstance(total, int) or isinstance(total, bool) or total < 1:
        raise ValueError(f"{folder / INDEX}: metadata.total_size must be a whole number above 0")
    config = read_json(folder / "config.json")
    if "config_projection" in manifest:
        if manifest["config_projection"] != "model_tokenizer_only":
            raise ValueError(f"{folder / NAME}: config_projection must be 'model_tokenizer_only'")
        if set(config) != {"model", "tokenizer"}:
            raise ValueError(f"{folder / 'config.json'} must have the keys model and tokenizer alone")
    tokenizer = config.get("tokenizer")
    where = tokenizer.get("path") if isinstance(tokenizer, dict) else None
    if not isinstance(where, str) or PurePosixPath(where).parts[:1] != ("tokenizer",) or ".." in PurePosixPath(where).parts:
        raise ValueError(f"{folder / 'config.json'}: tokenizer.path must lie inside tokenizer/")
    if tokenizer.get("type", "huggingface") != "huggingface":
        raise ValueError(f"{folder / 'config.json'}: tokenizer.type must be 'huggingface'")
    if not (folder / where).exists() or not any(name.startswith("tokenizer/") for name in listed):
        raise ValueError(f"{folder / 'config.json'}: tokenizer.path is {where!r}, which is not there")
    for name in sorted(named):
        with open_shard(folder / name) as f:
            for tensor in f.keys():
                if (kind := f.get_slice(tensor).get_dtype()).startswith("F"):
                    raise ValueError(f"{folder / name}: {tensor} is {kind}: every tensor must be BF16")
