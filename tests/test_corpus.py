"""Corpora: packing and tokenising against brute force, text that comes back, and folders that are whole or not there."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lib import corpus
from tests.texts import TEXTS

LENGTH = 24


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return corpus.build(tmp_path_factory.mktemp("corpora") / "small", lambda: TEXTS, 280, LENGTH, "words")


def pack_slowly(documents, length, pad, buffer):
    """The same by its words: at each place the longest of the first `buffer` waiting pieces that fits, of those the first."""
    queue = [doc[i : i + length] for doc in documents for i in range(0, len(doc), length)]
    rows = []
    while queue:
        row = []
        while True:
            fits = [piece for piece in queue[:buffer] if len(piece) <= length - len(row)]
            if not fits:
                break
            best = next(piece for piece in fits if len(piece) == max(map(len, fits)))
            row += best
            queue.pop(next(i for i, piece in enumerate(queue) if piece is best))
        rows.append(row + [pad] * (length - len(row)))
    return rows


@given(st.lists(st.integers(1, 40), max_size=60), st.integers(2, 16), st.integers(1, 8))
def test_packing_is_the_best_fit_and_loses_nothing(lengths, length, buffer):
    numbers = iter(range(1, 10**6))
    documents = [[next(numbers) for _ in range(n)] for n in lengths]
    rows = list(corpus.pack(documents, length, 0, buffer))
    assert rows == pack_slowly(documents, length, 0, buffer)
    assert all(len(row) == length for row in rows)
    assert sorted(t for row in rows for t in row if t) == [t for doc in documents for t in doc]


def documents_of(rows, found):
    """Each document's ids, taken apart again where none was cut."""
    for row in rows.astype(int).tolist():
        inside = [t for t in row if t != found.pad]
        starts = [i for i, t in enumerate(inside) if t == found.start]
        yield from (inside[a:b] for a, b in zip(starts, [*starts[1:], len(inside)], strict=True))


def test_every_document_comes_back_and_one_in_ten_is_held_out(tmp_path):
    wide = corpus.build(tmp_path / "wide", lambda: TEXTS, 280, 400, "words")
    own = wide.tokenizer()
    back = {split: [own.decode(ids[1:-1]) for ids in documents_of(wide.rows(split), wide)] for split in corpus.SPLITS}
    assert sorted(back["train"] + back["validation"]) == sorted(TEXTS)
    assert 0 < len(back["validation"]) < len(TEXTS) / 4
    for split, texts in back.items():
        about = wide.about["splits"][split]
        assert (about["documents"], about["bytes"]) == (len(texts), sum(len(t.encode()) for t in texts))


def test_a_token_stands_for_as_many_bytes_as_its_text_has(made):
    own, size = made.tokenizer(), made.token_bytes()
    for text in [*TEXTS[:10], "ünïcode \N{GREEK SMALL LETTER ALPHA} \N{GRINNING FACE}\n\t"]:
        assert size[own.encode(text, add_special_tokens=False)].sum() == len(text.encode())
    assert size[[made.start, made.about["end"], made.pad]].tolist() == [0, 0, 0]


def test_bytes_alone_are_a_vocabulary(tmp_path):
    found = corpus.build(tmp_path / "bytes", lambda: TEXTS, corpus.BYTES, LENGTH, "words")
    assert found.vocab_size == corpus.BYTES and set(found.token_bytes()) == {0, 1}


def test_segments_and_labels_by_hand():
    ids = torch.tensor([[7, 8, 0, 5, 6, 1, 0, 9, 1, 2, 2]])  # 0 starts, 1 ends, 2 pads
    assert corpus.segments(ids, 0).tolist() == [[0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2]]
    assert corpus.labels(ids, 0, 2).tolist() == [[8, -100, 5, 6, 1, -100, 9, 1, -100, -100]]


def test_the_unigram_entropy_is_that_of_the_counts(made):
    seen = {split: [] for split in corpus.SPLITS}
    for split in corpus.SPLITS:
        for row in made.rows(split).astype(int).tolist():
            seen[split] += [t for t in row[1:] if t not in (made.start, made.pad)]
    counts = np.bincount(seen["train"], minlength=made.vocab_size) + 1
    expected = np.mean([-np.log(counts[t] / counts.sum()) for t in seen["validation"]])
    assert corpus.unigram_entropy(made) == pytest.approx(expected, rel=1e-12)


def test_pythons_own_text_is_prose_and_the_same_again(tmp_path):
    texts = list(corpus.python_texts())
    assert texts == list(corpus.python_texts()) and sum(map(len, texts)) > 10**6
    assert any("assignment" in text for text in texts)


def test_files_of_text_are_read_and_named_when_wrong(tmp_path):
    (tmp_path / "a.txt").write_text("one document")
    (tmp_path / "b.jsonl").write_text('{"text": "second"}\n{"text": "third", "more": 1}\n')
    assert list(corpus.file_texts([tmp_path / "a.txt", tmp_path / "b.jsonl"])) == ["one document", "second", "third"]
    for line in ("no json", '{"other": 1}', '["text"]', '{"text": 3}'):
        (tmp_path / "b.jsonl").write_text('{"text": "second"}\n' + line)
        with pytest.raises(ValueError, match=r"b.jsonl, line 2: it must be a JSON object with a text under the key text"):
            list(corpus.file_texts([tmp_path / "b.jsonl"]))
    with pytest.raises(ValueError, match=r"c.csv: its name must end in .txt"):
        list(corpus.file_texts([tmp_path / "c.csv"]))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"vocabulary": 100}, "vocabulary is 100: it must be at least 259"),
        ({"length": 1}, "length is 1: it must be at least 2"),
        ({"texts": lambda: ["only one"]}, "words has no document for"),
    ],
)
def test_what_cannot_be_made_is_said_and_leaves_nothing(tmp_path, change, said):
    values = {"texts": lambda: TEXTS, "vocabulary": 280, "length": LENGTH, "source": "words"} | change
    with pytest.raises(ValueError, match=said):
        corpus.build(tmp_path / "made", **values)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_lacks_a_file_is_named(made, tmp_path):
    with pytest.raises(ValueError, match="corpus.json is missing"):
        corpus.load(tmp_path)
    (tmp_path / corpus.NAME).write_text(json.dumps(made.about))
    with pytest.raises(ValueError, match="train.bin is missing: make the corpus again"):
        corpus.load(tmp_path)
