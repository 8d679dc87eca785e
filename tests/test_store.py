"""The run store: names, checksums, kills, and two processes that want the same run."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.paths import ROOT
from lib.store import Store, StoreError, key, write_atomic

SPEC = {
    "model": {"width": 64, "layers": (1, 2)},
    "lr": 1e-3,
    "seed": 0,
    "task": "hops",
    "norm": None,
    "on": True,
}
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5)


def small(folder):
    (folder / "result.json").write_text('{"accuracy": 0.5}')
    (folder / "tables").mkdir(exist_ok=True)
    (folder / "tables" / "curve.csv").write_text("K,value\n1,0.5\n")


def never(folder):
    raise AssertionError("this run is in the store already")


def test_key_is_stable():
    assert key(SPEC) == "3a4acc3c3f7ea27eb4fb"
    assert key(dict(reversed(SPEC.items()))) == key(SPEC)
    assert key(json.loads(json.dumps(SPEC))) == key(SPEC)


@settings(deadline=None)
@given(st.dictionaries(st.text(max_size=5), SCALARS, min_size=1), SCALARS, st.data())
def test_key_differs_on_any_change(spec, value, data):
    name = data.draw(st.sampled_from(sorted(spec)))
    assert (key({**spec, name: value}) == key(spec)) == (json.dumps(value) == json.dumps(spec[name]))
    assert key({k: v for k, v in spec.items() if k != name}) != key(spec)
    assert key({"inner": spec}) != key(spec)
    assert key({"inner": [spec, value]}) != key({"inner": [value, spec]}) or json.dumps(value) == json.dumps(spec)


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        ({"lr": float("nan")}, "spec.lr is nan"),
        ({"a": [1, float("inf")]}, r"spec.a\[1\] is inf"),
        ({"a": {"b": {1, 2}}}, "spec.a.b is a set"),
        ({"a": {1: 2}}, "spec.a has the key 1"),
    ],
)
def test_key_refuses_what_is_no_json(bad, sentence):
    with pytest.raises(ValueError, match=sentence):
        key(bad)


def test_a_run_is_made_once_and_found(tmp_path):
    store, name = Store(tmp_path / "runs"), key(SPEC)
    assert store.find(name) is None
    folder = store.make(name, SPEC, small)
    assert folder == store.root / name == store.find(name) == store.make(name, SPEC, never)
    assert key(json.loads((folder / "spec.json").read_text())) == name
    assert sorted(json.loads((folder / "MANIFEST.json").read_text())) == [
        "result.json",
        "spec.json",
        "tables/curve.csv",
    ]
    assert [path.name for path in store.root.iterdir()] == [name]


def test_checkpoints_serve_to_resume_and_are_not_kept(tmp_path):
    store = Store(tmp_path)

    def build(folder):
        checkpoint = folder / "checkpoint.pt"
        if not checkpoint.exists():
            checkpoint.write_text("step 3")
            raise KeyboardInterrupt
        small(folder)
        (folder / "log.txt").write_text(f"resumed from {checkpoint.read_text()}")
        (folder / ".result.json.1-ab.tmp").write_text("left by a kill in the middle of a write")

    with pytest.raises(KeyboardInterrupt):
        store.make("a", SPEC, build)
    assert store.find("a") is None
    assert store.health()["partial"] == 1
    folder = store.make("a", SPEC, build)
    assert (folder / "log.txt").read_text() == "resumed from step 3"
    assert sorted(p.name for p in folder.iterdir()) == [
        "MANIFEST.json",
        "log.txt",
        "result.json",
        "spec.json",
        "tables",
    ]
    assert store.health()["partial"] == 0


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("file", ["result.json", "tables/curve.csv", "spec.json", "MANIFEST.json"])
@pytest.mark.parametrize("damage", [flip, cut, os.remove])
def test_a_damaged_run_is_never_read_and_made_again(tmp_path, file, damage):
    store = Store(tmp_path)
    folder = store.make("a", SPEC, small)
    if (file, damage) == ("MANIFEST.json", cut):
        damage(folder / file)  # the last byte is a line end
    damage(folder / file)
    assert store.health()["corrupt"] == 1
    assert store.find("a") is None
    assert not folder.exists()
    assert "run a failed its checksums: set aside as a.corrupt-1" in (tmp_path / "log.txt").read_text()
    assert (store.make("a", SPEC, small) / "result.json").exists()
    assert {k: v for k, v in store.health().items() if k != "bytes"} == {
        "finished": 1,
        "partial": 0,
        "corrupt": 1,
    }


def test_every_flipped_bit_of_the_manifest_is_noticed(tmp_path):
    store = Store(tmp_path)
    manifest = store.make("a", SPEC, small) / "MANIFEST.json"
    good = manifest.read_bytes()
    for at in range(0, len(good), 7):
        bad = bytearray(good)
        bad[at] ^= 1 << (at % 8)
        manifest.write_bytes(bad)
        try:
            same = json.loads(bad) == json.loads(good)
        except ValueError:
            same = False
        assert (store.find("a") is not None) == same
        if not same:
            store.make("a", SPEC, small)


def test_a_half_written_run_is_never_read(tmp_path):
    store = Store(tmp_path)
    for name in ("a", "a.new", "a.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_text('{"accuracy": ')
    assert store.find("a") is None
    assert (store.make("a", SPEC, small) / "result.json").read_text() == '{"accuracy": 0.5}'
    assert not (tmp_path / "a.new").exists()


def test_health(tmp_path):
    store = Store(tmp_path / "runs")
    assert store.health() == {"finished": 0, "partial": 0, "corrupt": 0, "bytes": 0}
    folder = store.make("a", SPEC, small)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert store.health() == {"finished": 1, "partial": 0, "corrupt": 0, "bytes": size}


BUILD = """
import sys, time
from pathlib import Path
from lib.store import Store

def build(folder):
    with open(Path(sys.argv[1]).with_name("calls.txt"), "a") as calls:
        calls.write("x")
    (folder / "checkpoint.pt").write_text("step 3")
    (folder / "result.json").write_text("{}")
    time.sleep(float(sys.argv[2]))

print(Store(sys.argv[1]).make("a", {}, build))
"""


def start(root, seconds):
    command = [sys.executable, "-c", BUILD, str(root), str(seconds)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def wait_for(path):
    end = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < end, f"{path} never came"
        time.sleep(0.02)


def test_a_killed_build_leaves_a_resumable_run_and_no_lock(tmp_path):
    store = Store(tmp_path / "runs")
    process = start(store.root, 60)
    wait_for(store.root / "a.partial" / "result.json")
    assert store.find("a") is None
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert store.find("a") is None
    assert (store.root / "a.partial" / "checkpoint.pt").read_text() == "step 3"
    seen = []
    store.make("a", {}, lambda folder: seen.extend(sorted(path.name for path in folder.iterdir())))
    assert seen == ["checkpoint.pt", "result.json"]
    assert [path.name for path in store.root.iterdir()] == ["a"]


def test_processes_that_want_one_run_compute_it_once(tmp_path):
    processes = [start(tmp_path / "runs", 1) for _ in range(3)]
    assert {process.communicate(timeout=60)[0].strip() for process in processes} == {str(tmp_path / "runs" / "a")}
    assert (tmp_path / "calls.txt").read_text() == "x"
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["a"]


def test_a_store_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    for root in ("/proc/runs", tmp_path / "file"):  # even root may not write there
        with pytest.raises(StoreError, match=rf"^The run store {root} cannot be used \([^.]*\): .*\.$"):
            Store(root).make("a", SPEC, small)
    assert Store("/proc/runs").find("a") is None


def test_what_build_raises_is_not_blamed_on_the_store(tmp_path):
    with pytest.raises(FileNotFoundError):
        Store(tmp_path).make("a", SPEC, lambda folder: (folder / "no" / "such").write_text(""))


def test_write_atomic(tmp_path):
    write_atomic(tmp_path / "a.txt", "naïve\n")
    write_atomic(tmp_path / "a.txt", b"\x00\xff")
    assert (tmp_path / "a.txt").read_bytes() == b"\x00\xff"
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError):
        write_atomic(tmp_path / "folder", "a folder cannot be replaced by a file")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "folder"]
