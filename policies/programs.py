"""The compiled transactions of a run: one per capacity and batch shape, some built ahead of need."""

from __future__ import annotations

import atexit
import collections
import threading
from collections.abc import Hashable, Iterable
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import PyTree

from moe_blocks.capacity import Capacity
from policies.base import CapacityPolicy
from policies.commit import Step
from policies.transaction import Carry, layout_of, replicated, transaction


class Programs:
    """Compiles transactions on demand or ahead, and keeps them.

    Which program runs never depends on how fast another one was compiled: one that is needed is waited for.

    Attributes:
      layout: shape, dtype and sharding of every leaf of the state, before a step and after it.
      home: where scalars live: replicated over the mesh, or None where there is no mesh.
    """

    def __init__(
        self,
        step: Step,
        policy: CapacityPolicy,
        capacities: tuple[Capacity, ...],
        layout: PyTree[jax.ShapeDtypeStruct] = None,
        home: NamedSharding | None = None,
    ) -> None:
        self.layout, self.home = layout, home
        self._step, self._policy, self._capacities = step, policy, capacities
        self._futures: dict[Hashable, Future[jax.stages.Compiled]] = {}

    def __len__(self) -> int:
        """Programs compiled or being compiled."""
        return len(self._futures)

    def serving(self, state: Any, batch: Any) -> Programs:
        """These programs if they are for such a state, else an empty set that is."""
        layout, home = layout_of(state, batch), replicated((state, batch))
        if home == self.home and jax.tree.flatten(layout) == jax.tree.flatten(self.layout):
            return self
        return Programs(self._step, self._policy, self._capacities, layout, home)

    def get(self, capacity: Capacity, batch: Any) -> jax.stages.Compiled:
        """The program for a capacity and a batch of this shape, compiled now if it is not under way."""
        key = (capacity, signature(batch))
        known = self._futures.get(key)
        if known is None or known.cancel():  # cancelled: it was still waiting for its turn in the background
            compiled = self._lower(capacity, batch).compile()
            known = self._futures[key] = Future()
            known.set_result(compiled)
        return known.result()

    def build_ahead(self, capacities: Iterable[Capacity], batch: Any) -> None:
        """Traces programs now and compiles them one after the other in the background.

        They are traced in the caller's thread since a mesh in context belongs to a thread.
        """
        jobs: Jobs = collections.deque()
        for capacity in capacities:
            key = (capacity, signature(batch))
            if key not in self._futures:
                lowered = self._lower(capacity, batch)
                self._futures[key] = Future()
                jobs.append((self._futures[key], lowered))
        if jobs:
            thread = threading.Thread(target=_compile_all, args=(jobs,), name="build-ahead", daemon=True)
            # The compiler cannot be stopped, and an interpreter that ends under it crashes. So at exit the
            # one program in the works is waited for and the others are given up.
            atexit.register(_give_up, jobs, thread)
            thread.start()

    def _lower(self, capacity: Capacity, batch: Any) -> jax.stages.Lowered:
        run = transaction(self._step, self._policy, capacity, self._capacities)
        carry = Carry(jax.ShapeDtypeStruct((), jnp.bool_, sharding=self.home), self.layout)
        # Outputs stay where the inputs are, so that their buffers are reused and nothing is moved.
        kept = jax.tree.map(lambda leaf: leaf.sharding, carry)
        return jax.jit(run, donate_argnums=0, out_shardings=(kept, self.home, None)).lower(carry, batch)


Jobs = collections.deque[tuple[Future[jax.stages.Compiled], jax.stages.Lowered]]


def _give_up(jobs: Jobs, thread: threading.Thread) -> None:
    jobs.clear()
    thread.join()


def _compile_all(jobs: Jobs) -> None:
    while True:
        try:
            future, lowered = jobs.popleft()
        except IndexError:  # done, or given up
            return
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(lowered.compile())
            except BaseException as error:
                future.set_exception(error)  # raised where the program is needed


def signature(batch: PyTree) -> Hashable:
    """Tells batches apart that need a program of their own: structure, shapes, dtypes, places on a mesh."""
    leaves, structure = jax.tree.flatten(batch)
    return structure, tuple((np.shape(leaf), jax.typeof(leaf).dtype, _on_mesh(leaf)) for leaf in leaves)


def _on_mesh(leaf: Any) -> NamedSharding | None:
    sharding = getattr(leaf, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None
