"""Several processes as one run: how they find each other, and wait for each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import yaml
from jax._src import distributed  # the barrier has no public name yet

from examples.train_lm.config import pairs
from moe_blocks.capacity import positive_int

BARRIER_SECONDS = 1800  # a process that dies ends it earlier


@dataclasses.dataclass(frozen=True)
class Processes:
    """The processes of a run; alone, unless told otherwise.

    Attributes:
      distributed: auto: jax finds the other processes by itself, on TPU pods, SLURM, Open MPI and Kubernetes. none: it
        does not.
      coordinator: HOST:PORT of process 0, where jax finds nothing by itself.
      num_processes: how many there are; beside coordinator.
      process_id: which one this is, from 0; beside coordinator.
      heartbeat_seconds: how long a process may be silent before it counts as dead and all others end with an error.

    Raises:
      ValueError: naming the key, its value and what it must be.

    Example:
      >>> Processes(coordinator="10.0.0.1:8476", num_processes=2, process_id=1).several
      True
      >>> Processes().several
      False
    """

    distributed: str = "none"
    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    heartbeat_seconds: int = 30

    def __post_init__(self) -> None:
        if self.distributed not in ("auto", "none"):
            raise ValueError(f"distributed must be 'auto' or 'none', got {self.distributed!r}")
        positive_int("heartbeat_seconds", self.heartbeat_seconds)
        told = {key: getattr(self, key) for key in ("coordinator", "num_processes", "process_id")}
        if missing := [key for key, value in told.items() if value is None]:
            if len(missing) < len(told):
                given = {key: value for key, value in told.items() if value is not None}
                raise ValueError(f"coordinator, num_processes and process_id go together, got {given}; add {missing}")
            return
        host, _, port = str(self.coordinator).rpartition(":")
        if not (host and port.isdecimal()):
            raise ValueError(f"coordinator must be HOST:PORT of process 0, got {self.coordinator!r}")
        count = positive_int("num_processes", self.num_processes)
        if positive_int("process_id", self.process_id, minimum=0) >= count:
            raise ValueError(
                f"process_id must be below num_processes={count}, got {self.process_id}; they count from 0"
            )

    @property
    def several(self) -> bool:
        """Whether there are others to connect to."""
        return self.distributed == "auto" or self.coordinator is not None

    def connect(self) -> None:
        """Waits for the other processes, and makes their devices those of one run; call it before jax starts.

        Raises:
          ValueError: if jax is to find the others by itself and does not.
        """
        if not self.several:
            return
        jax.config.update("jax_cpu_collectives_implementation", "gloo")  # on CPU; it concerns no other device
        try:
            jax.distributed.initialize(
                self.coordinator,
                self.num_processes,
                self.process_id,
                heartbeat_timeout_seconds=self.heartbeat_seconds,
                shutdown_timeout_seconds=self.heartbeat_seconds,  # of one that failed, for the others
            )
        except ValueError as error:
            raise ValueError(
                f"distributed='auto' found no other processes ({error}); give coordinator, num_processes and process_id"
            ) from None


def wait_for_all() -> None:
    """Waits until every process has come here; returns at once where there is only one.

    For what one process may do longer than another: on CPU a collective gives up after 30 s, and jax's persistent
    cache serves process 0 alone there; and at exit jax waits for the others as long as a heartbeat may take.
    """
    if client := distributed.global_state.client:
        client.wait_at_barrier("train_lm", BARRIER_SECONDS * 1000)


def parse(argv: Sequence[str]) -> tuple[Processes, list[str]]:
    """Takes the options on processes out of a command line.

    Returns:
      ``(processes, rest)``, the rest written ``key=value``.

    Raises:
      ValueError: if one of them is wrong.

    Example:
      >>> processes, rest = parse(["--distributed", "auto", "--steps", "20"])
      >>> processes.distributed, rest
      ('auto', ['steps=20'])
    """
    own = {field.name: field.type for field in dataclasses.fields(Processes)}
    told: dict[str, Any] = {}
    rest = []
    for key, text in pairs(list(argv)):
        if key in own:
            told[key] = text if "str" in str(own[key]) else yaml.safe_load(text)
        else:
            rest.append(f"{key}={text}")
    return Processes(**told), rest
