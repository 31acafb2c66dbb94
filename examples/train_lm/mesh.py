"""The devices of a run: real ones where there are any, else eight that the CPU simulates."""

from __future__ import annotations

import os

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

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
