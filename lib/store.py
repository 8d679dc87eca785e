"""The run store: one folder per run, named by what determines the run, read only when its checksums hold.

<root>/<key>/             a finished run: what was built, spec.json and MANIFEST.json
<root>/<key>.partial/     a run being made; survives a kill, and holds the checkpoints it resumes from
<root>/<key>.new/         a run being published, for a moment
<root>/<key>.corrupt-<n>/ a run whose checksums failed: kept to look at, never read
<root>/<key>.lock         held while a run is made; the kernel lets go of it when its holder dies
<root>/log.txt            what was found corrupt, and when
"""

import errno
import fcntl
import hashlib
import io
import json
import math
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from lib import leftovers

MANIFEST = "MANIFEST.json"
SPEC = "spec.json"
GOES_ON = "the same command goes on where this one stopped"
TEMPORARY = ".*.tmp"  # as `write_atomic` names what it has not finished
SPACE = "free some space"
FULL = {  # what an error's text says of a file that cannot grow -> what to do
    os.strerror(errno.ENOSPC): SPACE,
    os.strerror(errno.EDQUOT): SPACE,
    os.strerror(errno.EFBIG): "lift the limit on the size of files",
}


class StoreError(RuntimeError):
    """The store's folder cannot be read or written; the message is one sentence that names it."""


def key(spec: dict) -> str:
    """The name of a run: 20 hex digits of the SHA-256 of its spec as canonical JSON.

    The order of a dictionary's keys and list against tuple make no difference; 1 and 1.0 do. Raises
    ValueError where the spec holds NaN, an infinity, or anything that is no JSON value.
    """
    text = json.dumps(_plain(spec, "spec"), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def _plain(value, where: str):
    if isinstance(value, dict):
        for name in value:
            if not isinstance(name, str):
                raise ValueError(f"{where} has the key {name!r}, and a run's keys must be text.")
        return {name: _plain(item, f"{where}.{name}") for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where} is {float(value)}, and a run cannot be named by a number that is not finite.")
    if value is None or isinstance(value, str | int | float):
        return value
    raise ValueError(f"{where} is a {type(value).__name__}, and a run is named by plain JSON values only.")


def write_atomic(path: str | os.PathLike, data: bytes | str) -> None:
    """Writes a whole file or nothing: a reader sees the old content or the new, also after a kill.

    Text is written as UTF-8. Raises OSError, and then leaves the old file and no temporary one.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{leftovers.owner()}-{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_array(path: str | os.PathLike, array: np.ndarray) -> None:
    """Writes an array as .npy, whole or not at all. Raises OSError."""
    buffer = io.BytesIO()  # into a file, numpy loses an array's end on a full disk without a word
    np.save(buffer, array)
    write_atomic(path, buffer.getvalue())


def disk_full(error: Exception) -> bool:
    """Whether an error says that a disk, or what one may take of it, is full."""
    return any(text in str(error) for text in FULL)  # not its number: shutil's and safetensors' errors have none


def cannot_write(error: Exception) -> str:
    """Why a folder cannot be written, and what to do about it: the end of a sentence."""
    for text, remedy in FULL.items():
        if text in str(error):
            return f"({text}): {remedy}, and {GOES_ON}."
    return f"({getattr(error, 'strerror', None) or error}): make it writable, or set LOOPED_OUTPUTS to another folder."


@dataclass(frozen=True)
class Store:
    """The runs below one folder, which is made when the first run is. Processes may share it."""

    root: Path

    def __post_init__(self):
        object.__setattr__(self, "root", Path(self.root))

    def find(self, key: str) -> Path | None:
        """The folder of a finished run, or None where there is none that may be read.

        A run whose checksums fail is set aside and noted in log.txt. Raises StoreError where the folder
        cannot be read, or a corrupt run in it cannot be set aside.
        """
        with self._sentence():
            if _intact(self.root / key):
                return self.root / key
            if not os.path.lexists(self.root / key):
                return None
            # only under the lock: another process may have put a good run in its place by now
            lock = _acquire(self._lock(key), wait=False)
            if lock is None:
                return None
            try:
                return self._find_locked(key)
            finally:
                _release(self._lock(key), lock)

    def make(self, key: str, spec: dict, build: Callable[[Path], object]) -> Path:
        """The folder of a finished run, made first where it is missing or corrupt.

        build(folder) leaves the run's files in the folder it is given; files named checkpoint* serve to
        resume and are not kept. When it raises or is killed the folder stays, and the next call gets it as it
        was. A second process that asks for the same run waits for the first. Raises StoreError where the
        store cannot be written or its disk is full, and whatever else build raises.
        """
        return self.make_all([key], [spec], lambda partials: build(partials[key]))[0]

    def make_all(self, keys: Sequence[str], specs: Sequence[dict], build: Callable[[dict[str, Path]], object]) -> list[Path]:
        """`make` of several runs that are made together: build({key: folder}) is called once, for those that are missing."""
        wanted = dict(zip(keys, specs, strict=True))
        partial = {key: self.root / f"{key}.partial" for key in wanted}
        found = {key: self.find(key) for key in wanted if not partial[key].exists()}
        missing = [key for key in wanted if not found.get(key)]
        with ExitStack() as held:
            with self._sentence():
                for key in sorted(missing):  # in one order, so that no two processes wait for each other
                    self.root.mkdir(parents=True, exist_ok=True)
                    held.callback(_release, self._lock(key), _acquire(self._lock(key)))
                found |= {key: self._find_locked(key) for key in missing}
                for key in missing:
                    if found[key]:
                        shutil.rmtree(partial[key], ignore_errors=True)  # left by a kill just after the publishing
                        continue
                    partial[key].mkdir(exist_ok=True)
                    for left in partial[key].glob(TEMPORARY):  # by a kill in the middle of a write
                        left.unlink()
            if lacking := {key: partial[key] for key in missing if not found[key]}:
                with self._sentence(kinds=()):
                    build(lacking)
                with self._sentence():
                    found |= {key: self._publish(key, wanted[key], folder) for key, folder in lacking.items()}
        return [found[key] for key in keys]

    def health(self) -> dict:
        """What the store holds: finished, partial and corrupt (counts of runs), bytes; reads all of it."""
        count = {"finished": 0, "partial": 0, "corrupt": 0, "bytes": 0}
        with self._sentence():
            for path in sorted(self.root.iterdir()) if self.root.exists() else ():
                if path.name.endswith(".partial"):
                    count["partial"] += 1
                elif ".corrupt-" in path.name:
                    count["corrupt"] += 1
                elif path.is_dir() and "." not in path.name:
                    count["finished" if _intact(path) else "corrupt"] += 1
            for folder, _, names in os.walk(self.root):  # which passes over a folder that another process has just removed
                for name in names:
                    with suppress(FileNotFoundError):
                        count["bytes"] += os.stat(os.path.join(folder, name)).st_size
        return count

    def busy(self) -> bool:
        """Whether some process is making a run here."""
        for path in self.root.glob("*.lock"):
            if (lock := _acquire(path, wait=False)) is None:
                return True
            _release(path, lock)
        return False

    def _lock(self, key: str) -> Path:
        return self.root / f"{key}.lock"

    def _find_locked(self, key: str) -> Path | None:
        folder = self.root / key
        if _intact(folder):
            return folder
        if os.path.lexists(folder):
            n = 1
            while os.path.lexists(aside := self.root / f"{key}.corrupt-{n}"):
                n += 1
            folder.rename(aside)
            with open(self.root / "log.txt", "a", encoding="utf-8") as log:
                now = datetime.now(UTC).isoformat(timespec="seconds")
                log.write(f"{now} run {key} failed its checksums: set aside as {aside.name}, to be made again\n")
        return None

    def _publish(self, key: str, spec: dict, partial: Path) -> Path:
        folder, new = self.root / key, self.root / f"{key}.new"
        if new.exists():
            shutil.rmtree(new)
        # copied, not moved: a kill in the middle leaves the partial run whole
        left_out = shutil.ignore_patterns("checkpoint*", TEMPORARY)
        try:
            shutil.copytree(partial, new, copy_function=shutil.copy, ignore=left_out)
            write_atomic(new / SPEC, json.dumps(_plain(spec, "spec"), sort_keys=True, indent=1) + "\n")
            files = {
                str(path.relative_to(new)): {"sha256": _sha256(path), "bytes": path.stat().st_size}
                for path in sorted(new.rglob("*"))
                if path.is_file() and path != new / MANIFEST
            }
            write_atomic(new / MANIFEST, json.dumps(files, sort_keys=True, indent=1) + "\n")
            for path in [*new.rglob("*"), new]:
                _fsync(path)
            new.rename(folder)
        except OSError:
            shutil.rmtree(new, ignore_errors=True)  # a full disk can use the space
            raise
        _fsync(self.root)
        shutil.rmtree(partial, ignore_errors=True)
        return folder

    @contextmanager
    def _sentence(self, kinds: tuple = (OSError,)) -> Iterator[None]:
        """Makes one sentence of these errors, and of whatever else a full disk raises."""
        try:
            yield
        except StoreError:
            raise
        except Exception as error:
            if isinstance(error, kinds) or disk_full(error):
                raise StoreError(f"The run store {self.root} cannot be used {cannot_write(error)}") from error
            raise


def _intact(folder: Path) -> bool:
    try:
        files = json.loads((folder / MANIFEST).read_bytes())
        return SPEC in files and all(
            (folder / name).stat().st_size == entry["bytes"] and _sha256(folder / name) == entry["sha256"]
            for name, entry in files.items()
        )
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return False
    except (ValueError, TypeError, KeyError, AttributeError):  # the manifest itself is damaged
        return False


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _acquire(path: Path, wait: bool = True) -> int | None:
    """A handle that holds the lock file's lock, or None where another has it and wait is false."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            # the holder before may have removed the file: then this lock is on a file that has no name
            if os.path.samestat(os.fstat(handle), os.stat(path)):
                return handle
        except FileNotFoundError:
            pass
        except BlockingIOError:
            os.close(handle)
            return None
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _release(path: Path, handle: int) -> None:
    try:
        path.unlink(missing_ok=True)  # while still held, so that no one else holds it by this name
    finally:
        os.close(handle)
