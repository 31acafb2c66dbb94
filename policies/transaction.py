"""The training step as a transaction: the part that is compiled.

A rejected step is the identity on every leaf of the training state, decided inside the compiled
program. The old state is therefore never needed again, and its buffers are donated as usual: the peak
memory is that of a step without retry. Steps that were dispatched behind a rejected one see the latch
``alive`` down and are identities as well, until the host arms it again.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Int32, PyTree

from moe_blocks.capacity import Capacity
from policies.base import CapacityPolicy, Demand, Verdict, layer_demands
from policies.commit import STEP, Step, run_and_commit, unpack


class Outcome(enum.IntEnum):
    """What became of a step. Only of one that was committed the state keeps anything."""

    REJECTED = 0  # it is run again, and what was dispatched behind it too
    COMMITTED = 1
    SKIPPED = 2  # only what was dispatched behind it is run again


class Carry(NamedTuple):
    """What one transaction hands to the next; donated.

    Attributes:
      alive: ``<bool>[]``, whether no step before this one waits to be run again.
      state: the user's training state.
    """

    alive: Any
    state: Any


def transaction(
    step: Step, policy: CapacityPolicy, capacity: Capacity, capacities: tuple[Capacity, ...]
) -> Callable[[Carry, Any], tuple[Carry, Int32[Array, " verdict"], Any]]:
    """Wraps a step so that it commits itself or leaves no trace.

    With ``commit = alive and accepted and valid``, every leaf of the new state is ``where(commit, new, old)``. A
    policy that cannot reject at any of its capacities, nor skip, gets the bare step: no latch and no choice.

    Args:
      step: pure, ``step(state, batch, *, capacity) -> (new_state, total_recv_tokens, metrics)``.
      policy: whose ``accept`` and ``valid`` decide.
      capacity: of this program.
      capacities: every one that the policy may ask for. If it may reject at one of them, the programs
        of all of them honour the latch.

    Returns:
      A pure function ``(carry, batch) -> (carry, verdict, metrics)``. The verdict ``<int32>[1 + layers]`` holds the
      `Outcome` and the peak demand of each layer, in assignments.

    Raises:
      ValueError: when traced, if the step does not return its three values, changes the structure,
        a shape or a dtype of the state, or returns no usable demand, or if the policy does not return one verdict.
    """

    def run(carry: Carry, batch: Any) -> tuple[Carry, Int32[Array, " verdict"], Any]:
        def judged(state: Any, batch: Any) -> tuple[Any, tuple[Demand, Verdict | None], Any]:
            new_state, demand, metrics = unpack(step(state, batch, capacity=capacity), STEP)
            valid = policy.valid(metrics)
            return new_state, (demand, None if valid is True else single(policy, "valid", valid)), metrics

        def accepts(demand: Demand) -> Verdict:
            return carry.alive & single(policy, "accept", policy.accept(demand, capacity))

        def decide(evidence: tuple[Demand, Verdict | None]) -> Verdict:
            demand, valid = evidence
            if valid is None:
                return not may_reject(policy, demand, capacities) or accepts(demand)
            return accepts(demand) & valid

        state, (demand, valid), metrics, commit = run_and_commit(judged, decide, carry.state, batch)
        alive, outcome = carry.alive if commit is True else commit, jnp.asarray(commit, jnp.int32)
        if valid is not None:
            outcome = jnp.where(accepts(demand) & ~valid, jnp.int32(Outcome.SKIPPED), outcome)
        return Carry(alive, state), jnp.concatenate([outcome[None], layer_demands(demand)]), metrics

    return run


def single(policy: CapacityPolicy, method: str, verdict: Verdict) -> Verdict:
    """The verdict, if it is one."""
    if shape := jnp.shape(verdict):
        raise ValueError(f"{policy}.{method} must return one verdict for all layers and ranks, got shape {shape}")
    return verdict


def may_reject(policy: CapacityPolicy, total_recv_tokens: Demand, capacities: tuple[Capacity, ...]) -> bool:
    """Whether the verdict at some capacity is anything but a Python True; computes nothing."""
    found: list[bool] = []

    def probe(demand: Demand) -> None:
        found.extend(policy.accept(demand, capacity) is not True for capacity in capacities)

    jax.eval_shape(probe, total_recv_tokens)
    return any(found)


def layout_of(state: PyTree, batch: PyTree) -> PyTree[jax.ShapeDtypeStruct]:
    """Shape, dtype and sharding that every leaf of the state keeps from one step to the next.

    A leaf that is spread over several devices stays as it is. If anything is on a mesh (a leaf, the
    batch, or the mesh in context), every other leaf is replicated over that mesh; this is where, for
    example, an optimiser's step counter goes that was created outside ``jit``.
    """
    home = replicated((state, batch))

    def keep(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise ValueError(
                f"state{jax.tree_util.keystr(path)} was donated to an earlier step: a runner consumes the state that "
                "it is given; go on from runner.state"
            )
        array, chosen = jax.typeof(leaf), _sharding(leaf)
        spread = chosen is not None and len(chosen.device_set) > 1
        sharding = chosen if spread or home is None else home
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(keep, state)


def replicated(tree: PyTree) -> NamedSharding | None:
    """Replication over the mesh that the leaves are on, else over the mesh in context, if there is one."""
    shardings = (_sharding(leaf) for leaf in jax.tree.leaves(tree))
    meshes = (s.mesh for s in shardings if isinstance(s, NamedSharding))
    mesh = next(meshes, jax.sharding.get_mesh())
    return None if mesh.empty else NamedSharding(mesh, PartitionSpec())


def _sharding(leaf: Any) -> Sharding | None:
    """Where an array was put on purpose; None for NumPy arrays and for arrays that just are on the default device."""
    return leaf.sharding if getattr(leaf, "committed", False) else None


def place(state: PyTree, wanted: PyTree[jax.ShapeDtypeStruct]) -> PyTree:
    """Puts the state where ``wanted`` says. Leaves that are there already are not copied.

    One array in two places of the tree (an EMA that starts as the parameters, a key beside its data)
    gets a copy, since a buffer can be donated only once.
    """
    seen: set[Hashable] = set()

    def put(leaf: Any, struct: jax.ShapeDtypeStruct) -> Array:
        array = jnp.asarray(leaf) if struct.sharding is None else _put(leaf, struct.sharding)
        buffers = _buffers(array)
        array = array if seen.isdisjoint(buffers) else array.copy()
        seen.update(buffers)
        return array

    return jax.tree.map(put, state, wanted)


def _put(leaf: Any, sharding: Sharding) -> Array:
    """``device_put``, also for what this process alone holds: other processes' devices take it from the host."""
    own = isinstance(leaf, jax.Array) and leaf.is_fully_addressable
    if not own or sharding.is_fully_addressable:
        return jax.device_put(leaf, sharding)
    if _is_key(leaf):
        return jax.random.wrap_key_data(_put(jax.random.key_data(leaf), sharding), impl=jax.random.key_impl(leaf))
    return jax.device_put(np.asarray(leaf), sharding)  # which also checks that all processes hold the same


def _is_key(array: Array) -> bool:
    return jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def _buffers(array: Array) -> set[Hashable]:
    """Where the array lies in memory: two Python arrays may share their buffers, after a ``device_put`` for example."""
    data = jax.random.key_data(array) if _is_key(array) else array
    try:
        return {(shard.device, shard.data.unsafe_buffer_pointer()) for shard in data.addressable_shards}
    except jax.errors.JaxRuntimeError:  # a backend that does not tell
        return {id(data)}
