"""One progress for many jobs of unequal cost: a bar for a person, or a small file for another process."""

import json
import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field

from tqdm import tqdm

from lib.store import write_atomic

SHOW_EVERY = 0.5  # seconds


class Bar(tqdm):
    """tqdm's bar by a clock that nobody sets back."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._time = time.monotonic
        self.start_t = self.last_print_t = self._time()


@dataclass
class Progress:
    """How far all jobs are together: a bar on stderr, or where LOOPED_PROGRESS names a file, that file.

    The file holds JSON: title, done and total (steps of all jobs, total partly estimated), finished and runs
    (jobs), seconds (since the start), eta (seconds left, null while unknown), note (the latest job's own).
    """

    runs: int
    title: str
    first: dict[int, float] = field(default_factory=dict)  # steps a job had when it first reported
    done: dict[int, float] = field(default_factory=dict)
    total: dict[int, float] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    note: str = ""
    shown: float = 0.0
    bar: Bar | None = None

    def __post_init__(self):
        self.file, self.start = os.environ.get("LOOPED_PROGRESS"), time.monotonic()
        if not self.file and self.runs:
            style = "{desc} {percentage:3.0f}%|{bar}| [{elapsed}<{remaining}{postfix}]"
            self.bar = Bar(total=1, desc=self.title, bar_format=style, file=sys.stderr)

    def report(self, job: int, done: float, total: float, note: str = "") -> None:
        """A job has done so many of its steps."""
        self.first.setdefault(job, done if done < total else 0)
        self.done[job], self.total[job], self.note = done, total, note

    def end(self, job: int) -> None:
        """A job has ended, well or not."""
        self.ended.add(job)

    def counts(self) -> tuple[float, float, float]:
        """Steps done, steps in all, and steps done since the start; a silent job counts as the mean job."""
        usual = sum(self.total.values()) / len(self.total) if self.total else 1
        done = fresh = total = 0.0
        for job in range(self.runs):
            size = self.total.get(job, usual)
            here = size if job in self.ended else self.done.get(job, 0)
            total, done = total + size, done + here
            # a job that ends without a word beside jobs that report was only looked up
            if job in self.total or not self.total:
                fresh += here - self.first.get(job, 0)
        return done, total, fresh

    def show(self, last: bool = False) -> None:
        """Draws the bar or writes the file, at most every SHOW_EVERY seconds but for the last time."""
        now = time.monotonic()
        if not self.runs or (not last and now - self.shown < SHOW_EVERY):
            return
        self.shown, seconds = now, now - self.start
        done, total, fresh = self.counts()
        if self.bar is not None:
            self.bar.n, self.bar.total, self.bar.initial = done, max(total, 1e-9), done - fresh
            self.bar.set_postfix_str(f"{len(self.ended)}/{self.runs} {self.note}".strip(), refresh=True)
            if last:
                self.bar.close()
        else:
            state = {"title": self.title, "done": round(done), "total": round(total), "note": self.note}
            state |= {"finished": len(self.ended), "runs": self.runs, "seconds": round(seconds, 1)}
            state["eta"] = round(seconds * (total - done) / fresh, 1) if fresh > 0 else None
            with suppress(OSError):  # a run is worth more than its progress
                write_atomic(self.file, json.dumps(state))
