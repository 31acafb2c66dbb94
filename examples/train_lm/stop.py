"""The end of a run before its last step: on Ctrl-C, and on the SIGTERM before a machine is taken away."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator

import jax
from jax.experimental import multihost_utils


class Stop:
    """The wish to end a run, and the step before which every process ends it.

    A process that is alone ends at once. Several agree through jax's coordination service, beside the training: no
    step waits for it. It also hears SIGTERM, the notice of SLURM, Kubernetes and TPU pods that a process is to end.

    Attributes:
      agreed: whether the run ends; the same in every process.

    Example:
      >>> stop = Stop()
      >>> stop.before_next_step(), stop.signal
      (False, None)
      >>> stop.ask(signal.SIGINT)
      >>> stop.before_next_step(), stop.signal.name
      (True, 'SIGINT')
    """

    def __init__(self) -> None:
        self.agreed = False
        self._asked: signal.Signals | None = None
        self._steps = 0

    @property
    def signal(self) -> signal.Signals | None:
        """What ended the run: the signal that this process got, else SIGTERM, which another one got."""
        return (self._asked or signal.SIGTERM) if self.agreed else None

    def ask(self, number: int) -> None:
        """Asks every process to stop, for the sake of a signal; returns at once."""
        self._asked = signal.Signals(number)
        if jax.distributed.is_initialized():
            signal.raise_signal(signal.SIGTERM)  # jax's service has the handler, and tells the others

    def before_next_step(self) -> bool:
        """Whether to stop now; every process asks once before each step."""
        alone = not jax.distributed.is_initialized()
        wanted = self._asked is not None if alone else multihost_utils.reached_preemption_sync_point(self._steps)
        self.agreed = self.agreed or wanted
        self._steps += 1
        return self.agreed


@contextlib.contextmanager
def stop_on_signal() -> Iterator[Stop]:
    """A wish to stop that the first Ctrl-C or SIGTERM makes. A second Ctrl-C interrupts as usual."""
    stop = Stop()
    heard = (signal.SIGINT,) if jax.distributed.is_initialized() else (signal.SIGINT, signal.SIGTERM)
    previous = {number: signal.getsignal(number) for number in heard}

    def ask(number: int, _: object) -> None:
        stop.ask(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        print("\nstopping after the steps in flight; Ctrl-C again quits at once", file=sys.stderr)

    for number in heard:
        signal.signal(number, ask)
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
