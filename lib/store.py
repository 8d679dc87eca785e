"""The run store: one folder per run, named by what determines the run, read only when its checksums hold.

<root>/<key>/             a finished run: what was built, spec.json and MANIFEST.json
<root>/<key>.partial/     a run being made; survives a kill, and holds the checkpoints it resumes from
<root>/<key>.new/         a run being published, for a moment
<root>/<key>.corrupt-<n>/ a run whose checksums failed: kept to look at, never read
<root>/<key>.lock         held while a run is made; the kernel lets go of it when its holder dies
<root>/log.txt            what was found corrupt, and when
"""

import fcntl
import hashlib
import json
import math
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

MANIFEST = "MANIFEST.json"
SPEC = "spec.json"


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
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


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
        store cannot be written, and whatever build raises.
        """
        partial = self.root / f"{key}.partial"
        if not partial.exists() and (found := self.find(key)):
            return found
        with self._sentence():
            self.root.mkdir(parents=True, exist_ok=True)
            lock = _acquire(self._lock(key))
        try:
            with self._sentence():
                if found := self._find_locked(key):
                    shutil.rmtree(partial, ignore_errors=True)  # left by a kill just after the publishing
                    return found
                partial.mkdir(exist_ok=True)
            build(partial)
            with self._sentence():
                return self._publish(key, spec, partial)
        finally:
            _release(self._lock(key), lock)

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
            for path in self.root.rglob("*"):
                with suppress(FileNotFoundError):  # another process may be at work here
                    count["bytes"] += path.stat().st_size if path.is_file() else 0
        return count

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
        left_out = shutil.ignore_patterns("checkpoint*", ".*.tmp")
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
        _fsync(self.root)
        shutil.rmtree(partial, ignore_errors=True)
        return folder

    @contextmanager
    def _sentence(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreError(
                f"The run store {self.root} cannot be used ({error.strerror or error}): make it writable, "
                "or set LOOPED_OUTPUTS to another folder."
            ) from error


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
