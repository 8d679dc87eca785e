"""A local text corpus for pretraining: documents, tokenised and packed into rows of one length, in a folder read by rows.

A folder holds corpus.json (what it is), tokenizer/, and train.bin and validation.bin, (N, T) token ids as little-endian uint16
or uint32. Each document stands between a start and an end token, which `segments` reads off again. Shapes: N rows, B batch,
T tokens.
"""

import ast
import bisect
import hashlib
import json
import math
import platform
import shutil
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from lib import leftovers
from lib.checkpoint import read_json

NAME = "corpus.json"
START, END, PAD = "<|start|>", "<|end|>", "<|pad|>"
BYTES = 256 + 3  # the smallest vocabulary: bytes and the three above
BUFFER = 512  # documents among which the best fit is looked for
SPLITS = ("train", "validation")
HELD_OUT = 10  # one document in so many is for validation
LICENCE = "PSF-2.0, the licence of Python and its documentation"


@dataclass(frozen=True)
class Corpus:
    """A corpus that is there. `rows` maps its file; nothing is read before it is asked for."""

    folder: Path
    about: dict

    def rows(self, split: str = "train") -> np.ndarray:
        """(N, T) token ids."""
        return np.memmap(self.folder / f"{split}.bin", dtype=self.about["dtype"], mode="r").reshape(-1, self.length)

    @property
    def length(self) -> int:
        """T, tokens a row."""
        return self.about["length"]

    @property
    def vocab_size(self) -> int:
        """Tokens that a model needs."""
        return self.about["vocab_size"]

    @property
    def start(self) -> int:
        """The token that a document begins with."""
        return self.about["start"]

    @property
    def pad(self) -> int:
        """The token behind a row's last document."""
        return self.about["pad"]

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer it was made with."""
        return PreTrainedTokenizerFast.from_pretrained(self.folder / "tokenizer", local_files_only=True)

    def token_bytes(self) -> np.ndarray:
        """Bytes of text that each token stands for, (V,); 0 for the three that are no text."""
        return np.array(self.about["token_bytes"])


def python_texts() -> Iterator[str]:
    """Prose that comes with every Python: the language reference's topics, then each library module's docstrings, by name."""
    from pydoc_data.topics import topics

    yield from (topics[name] for name in sorted(topics))
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = "\n\n".join(_docstrings(ast.parse(file.read_bytes())))
        if text:
            yield f"{file.stem}\n\n{text}"


def _docstrings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if found := ast.get_docstring(node):
                yield found


def file_texts(files: Iterable[Path]) -> Iterator[str]:
    """Documents of files: a .txt is one, a .jsonl one a line under the key text. Raises ValueError naming file and line."""
    for file in files:
        if file.suffix == ".txt":
            yield file.read_text(encoding="utf-8")
        elif file.suffix == ".jsonl":
            with open(file, encoding="utf-8") as lines:
                for number, line in enumerate(lines, 1):
                    yield _text(file, number, line)
        else:
            raise ValueError(f"{file}: its name must end in .txt, one document, or .jsonl, one a line under the key text")


def _text(file: Path, number: int, line: str) -> str:
    try:
        found = json.loads(line)["text"]
    except (ValueError, KeyError, TypeError):
        found = None
    if not isinstance(found, str):
        raise ValueError(f"{file}, line {number}: it must be a JSON object with a text under the key text")
    return found


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of `vocabulary` tokens learned from texts; at 259 bytes alone. Raises ValueError for fewer."""
    if vocabulary < BYTES:
        raise ValueError(f"vocabulary is {vocabulary}: it must be at least {BYTES}, the bytes and three special tokens")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[START, END, PAD], initial_alphabet=sorted(alphabet), show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=START, eos_token=END, pad_token=PAD, padding_side="left")


def pack(documents: Iterable[list[int]], length: int, pad: int, buffer: int = BUFFER) -> Iterator[list[int]]:
    """Rows of `length` tokens: long documents in pieces, each row filled by the longest piece that still fits among the next
    `buffer` ones (the axes paper's best fit), the rest of a row with `pad`."""
    pieces = (doc[i : i + length] for doc in documents for i in range(0, len(doc), length))
    waiting: list[tuple[int, int, list[int]]] = []  # by length; of one length the first comes last
    order = count(0, -1)

    def refill() -> None:
        for piece in islice(pieces, buffer - len(waiting)):
            bisect.insort(waiting, (len(piece), next(order), piece))

    refill()
    while waiting:
        row: list[int] = []
        while fits := bisect.bisect(waiting, (length - len(row), math.inf)):
            row += waiting.pop(fits - 1)[2]
            refill()
        yield row + [pad] * (length - len(row))


def build(
    folder: Path,
    texts: Callable[[], Iterable[str]],
    vocabulary: int,
    length: int,
    source: str,
    tokenizer: PreTrainedTokenizerFast | None = None,
) -> Corpus:
    """Tokenise and pack texts into `folder`, which appears whole or not at all. One document in ten is held out, by its hash.

    texts: gives all documents each time it is called. tokenizer: one that has a start, an end and a padding token; by default a
    BPE of `vocabulary` tokens is learned from the training documents. Raises ValueError when a split has no document, or the
    tokenizer lacks such a token.
    """
    if length < 2:
        raise ValueError(f"length is {length}: it must be at least 2 tokens a row")
    tokenizer = tokenizer or train_tokenizer((text for text in texts() if _split(text) == "train"), vocabulary)
    marks = {"start": tokenizer.bos_token_id, "end": tokenizer.eos_token_id, "pad": tokenizer.pad_token_id}
    if missing := [name for name, token in marks.items() if token is None]:
        raise ValueError(f"the tokenizer has no {missing[0]} token: it must have bos_token, eos_token and pad_token")
    staging = folder.with_name(f".{folder.name}.{leftovers.owner()}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    dtype, counts, digest = "<u2" if len(tokenizer) <= 2**16 else "<u4", {}, hashlib.sha256()
    for split in SPLITS:
        seen = {"documents": 0, "bytes": 0, "rows": 0}
        with open(staging / f"{split}.bin", "wb") as file:
            for row in pack(_encoded(texts(), split, tokenizer, marks, seen), length, marks["pad"]):
                data = np.array(row, dtype=dtype).tobytes()
                digest.update(data)
                file.write(data)
                seen["rows"] += 1
        if not seen["rows"]:
            shutil.rmtree(staging)
            raise ValueError(f"{source} has no document for {split}: give more of them")
        counts[split] = seen
    tokenizer.save_pretrained(staging / "tokenizer")
    about = {"source": source, "sha256": digest.hexdigest(), "length": length, "vocab_size": len(tokenizer), "dtype": dtype}
    about |= {**marks, "splits": counts, "token_bytes": _token_bytes(tokenizer, set(marks.values()))}
    (staging / NAME).write_text(json.dumps(about) + "\n", encoding="utf-8")
    try:
        staging.rename(folder)
    except OSError:  # another process was first
        shutil.rmtree(staging)
    return load(folder)


def _split(text: str) -> str:
    return SPLITS[hashlib.sha256(text.encode()).digest()[0] % HELD_OUT == 0]


def _encoded(texts: Iterable[str], split: str, tokenizer, marks: dict, seen: dict) -> Iterator[list[int]]:
    """The documents of a split as ids; they and their bytes are counted in `seen`."""
    for text in texts:
        if _split(text) == split:
            seen["documents"] += 1
            seen["bytes"] += len(text.encode())
            yield [marks["start"], *tokenizer.encode(text, add_special_tokens=False), marks["end"]]


def _token_bytes(tokenizer: PreTrainedTokenizerFast, marks: set[int]) -> list[int]:
    """A byte-level token is written with one letter a byte."""
    return [
        0 if token in marks else len(text) for token, text in enumerate(tokenizer.convert_ids_to_tokens(range(len(tokenizer))))
    ]


def load(folder: Path) -> Corpus:
    """A corpus that `build` made. Raises ValueError when it is not there or incomplete."""
    about = read_json(folder / NAME)
    for name in (*(f"{split}.bin" for split in SPLITS), "tokenizer/tokenizer.json"):
        if not (folder / name).is_file():
            raise ValueError(f"{folder / name} is missing: make the corpus again")
    return Corpus(folder, about)


def python_corpus(folder: Path, vocabulary: int, length: int) -> Corpus:
    """The corpus of `python_texts` below `folder`, made where it is not there: this Python, vocabulary and length name it."""
    own = folder / f"python-{platform.python_version()}-{vocabulary}-{length}"
    if (own / NAME).is_file():
        return load(own)
    source = f"documentation and docstrings of Python {platform.python_version()} ({LICENCE})"
    texts = list(python_texts())
    return build(own, lambda: texts, vocabulary, length, source)


def segments(ids: torch.Tensor, start: int) -> torch.Tensor:
    """The number of each token's document in its row. (B, T) -> (B, T)."""
    return (ids == start).cumsum(1)


def labels(ids: torch.Tensor, start: int, pad: int) -> torch.Tensor:
    """What is predicted at each position but the last: the next token, -100 where it begins another document or is padding.

    (B, T) -> (B, T - 1).
    """
    following = ids[:, 1:]
    return following.masked_fill((following == start) | (following == pad), -100)


def unigram_entropy(corpus: Corpus) -> float:
    """Nats a predicted token: the loss, on the validation rows, of the training rows' token frequencies (one added to each)."""
    counts = {}
    for split in SPLITS:
        ids = torch.from_numpy(corpus.rows(split).astype(np.int64))
        found = labels(ids, corpus.start, corpus.pad)
        counts[split] = torch.bincount(found[found >= 0], minlength=corpus.vocab_size).double()
    p = (counts["train"] + 1) / (counts["train"] + 1).sum()
    return float(-(counts["validation"] * p.log()).sum() / counts["validation"].sum())
