"""Signals that ask a run to stop: Ctrl-C, and the SIGTERM that a machine sends before it is taken away."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def stop_on_signal() -> Iterator[list[signal.Signals]]:
    """A list that the first signal is put into. A second Ctrl-C interrupts as usual."""
    asked: list[signal.Signals] = []
    previous = {number: signal.getsignal(number) for number in SIGNALS}

    def ask(number: int, _: object) -> None:
        asked.append(signal.Signals(number))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        print("\nstopping after the steps in flight; Ctrl-C again quits at once", file=sys.stderr)

    for number in SIGNALS:
        signal.signal(number, ask)
    try:
        yield asked
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
