"""The devices of a run: real ones where there are any, else eight that the CPU simulates."""

from __future__ import annotations

import os

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int, Shaped

AXES = ("data", "expert")
FLAG = "--xla_force_host_platform_device_count"
SIMULATED = 8


def simulate_devices() -> None:
    """Makes the CPU count as eight devices; call it before jax starts.

    Real devices are not affected: jax prefers them to the CPU. A number that the caller has chosen stays.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if FLAG not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {FLAG}={SIMULATED}".strip()


def make_mesh(*, experts: int, expert_parallel: int) -> Mesh:
    """All devices as a mesh of data x expert.

    The expert axis is the largest divisor of the number of devices that also divides the experts and is at most
    ``expert_parallel``.
    """
    devices = len(jax.devices())
    fitting = (n for n in range(1, expert_parallel + 1) if devices % n == 0 and experts % n == 0)
    ep_size = max(fitting)
    return jax.make_mesh((devices // ep_size, ep_size), AXES, axis_types=(AxisType.Auto,) * 2)


def by_row(mesh: Mesh) -> NamedSharding:
    """The sharding of a batch: its rows over all devices."""
    return NamedSharding(mesh, P(AXES))


def own_rows(mesh: Mesh, rows: int) -> Int[np.ndarray, " own"]:
    """The rows of a batch that the devices of this process hold, in order: all of them where it is alone."""
    parts = by_row(mesh).addressable_devices_indices_map((rows,)).values()
    return np.unique(np.concatenate([np.arange(rows)[part] for part in parts]))


def spread(own: Shaped[np.ndarray, "own ..."], mesh: Mesh, rows: int) -> Shaped[Array, "rows ..."]:
    """The batch of all processes, from the `own_rows` of each."""
    return jax.make_array_from_process_local_data(by_row(mesh), own, (rows, *own.shape[1:]))
