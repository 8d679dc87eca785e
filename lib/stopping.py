"""Signals that ask a command to end: each unwinds it once, so that it leaves nothing behind."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
AGAIN = 10.0  # seconds in which a further signal changes nothing: whoever asks twice must not cut the ending short


class Stopped(KeyboardInterrupt):
    """A signal asked this process to end. A KeyboardInterrupt, since asyncio hands on no other kind."""

    def __init__(self, number: int):
        super().__init__()
        self.number = number


@contextmanager
def stoppable() -> Iterator[None]:
    """Within it the first of `SIGNALS` raises Stopped; one that whoever started this process ignores stays ignored.

    Once one has stopped it, all are ignored: a process that is asked twice says how it ended all the same.
    """
    asked = -AGAIN

    def stop(number, frame):
        nonlocal asked
        if time.monotonic() - asked >= AGAIN:
            asked = time.monotonic()
            raise Stopped(number)

    defaults = (signal.SIG_DFL, signal.default_int_handler)
    before = {number: signal.getsignal(number) for number in SIGNALS}
    before = {number: handler for number, handler in before.items() if handler in defaults}
    for number in before:
        signal.signal(number, stop)
    stopped = False
    try:
        yield
    except Stopped:
        stopped = True
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if stopped else handler)
