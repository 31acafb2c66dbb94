"""Rows sorted by group, cut into blocks that lie in one group each: how the portable kernels find equal shapes.

Group sizes are known at run time only, and a compiled product has one shape. So each group is cut into as few blocks
as possible, whose sizes come from a short static ladder. The number of blocks is dynamic: an empty slot or an empty
group costs nothing.

Symbols: ``M`` rows, ``E`` groups, ``B`` rows of a block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int, Shaped

PyTree = Any

# A product needs about 256 rows to run at full speed, and a row of padding costs as much as a real one. The steps are
# wide where groups are so small that reading the matrix is the cost.
LADDER = (8, 32, 64, 128, 192, 256, 320, 384, 448, 512)


def block_sizes(num_rows: int) -> tuple[int, ...]:
    """The sizes of `LADDER` that are smaller than ``num_rows``, and ``num_rows`` itself if it is on or below it."""
    largest = min(num_rows, LADDER[-1])
    return (*(size for size in LADDER if size < largest), largest)


@dataclasses.dataclass(frozen=True)
class Block:
    """Consecutive rows of one group, seen through a window of a static size.

    Attributes:
      group: int32 scalar.
      size: B, static.
      origin: int32 scalar, first row of the window. The window may reach over the ends of the block.
      inside: bool ``[B]``, which rows of the window belong to the block.
    """

    group: Int[Array, ""]
    size: int
    origin: Int[Array, ""]
    inside: Bool[Array, " B"]

    def read(self, rows: Shaped[Array, "M ..."], fill: float = 0) -> Shaped[Array, "B ..."]:
        """The rows of the block; ``fill`` where the window reaches over its ends."""
        return jnp.where(self._inside(rows), jax.lax.dynamic_slice_in_dim(rows, self.origin, self.size), fill)

    def write(self, rows: Shaped[Array, "M ..."], values: Shaped[Array, "B ..."]) -> Shaped[Array, "M ..."]:
        """Replaces the rows of the block, and leaves the rest of the window as it is."""
        before = jax.lax.dynamic_slice_in_dim(rows, self.origin, self.size)
        values = jnp.where(self._inside(rows), values, before)
        return jax.lax.dynamic_update_slice_in_dim(rows, values, self.origin, 0)

    def _inside(self, rows: Array) -> Array:
        return self.inside.reshape(-1, *(1,) * (rows.ndim - 1))


def as_bits(x: Shaped[Array, "M ..."]) -> Shaped[Array, "M ..."]:
    """The bits of floats as unsigned integers: what a buffer of rows is best made of.

    Before jax 0.12 XLA's CPU backend computes with 16-bit floats by way of float32. For an update in place it then
    converts the whole buffer there and back, for each block. Integers it leaves alone.
    """
    return jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")


def as_floats(bits: Shaped[Array, "M ..."], dtype: DTypeLike) -> Shaped[Array, "M ..."]:
    """The inverse of `as_bits`."""
    return jax.lax.bitcast_convert_type(bits, dtype)


class _Plan(NamedTuple):
    """The blocks in the order of their rows. ``step`` is the place of a block's size on the ladder."""

    group: Int[Array, " blocks"]
    start: Int[Array, " blocks"]
    end: Int[Array, " blocks"]
    step: Int[Array, " blocks"]
    total: Int[Array, ""]


def _plan(group_sizes: Int[Array, " E"], sizes: tuple[int, ...], num_rows: int) -> _Plan:
    """Cuts each group into equal blocks of a size on the ladder, and a last one."""
    ladder = jnp.array(sizes, jnp.int32)
    parts = jnp.maximum(-(-group_sizes // sizes[-1]), 1)
    size = ladder[jnp.searchsorted(ladder, -(-group_sizes // parts), method="compare_all")]
    count = -(-group_sizes // size)  # may be fewer than the parts, whose size was rounded up
    ends, row_ends = jnp.cumsum(count), jnp.cumsum(group_sizes)
    # The rest of the places stay empty: no group has more blocks than its rows need at the largest size.
    serial = jnp.arange(group_sizes.shape[0] + num_rows // sizes[-1], dtype=jnp.int32)
    group = jnp.searchsorted(ends, serial, side="right", method="compare_all").astype(jnp.int32)
    start = (row_ends - group_sizes)[group] + (serial - (ends - count)[group]) * size[group]
    end = jnp.minimum(start + size[group], row_ends[group])
    return _Plan(group, start, end, jnp.searchsorted(ladder, end - start, method="compare_all"), ends[-1])


def for_each_block(
    body: Callable[[Block, PyTree], PyTree], init: PyTree, group_sizes: Int[Array, " E"], num_rows: int
) -> PyTree:
    """Folds ``body(block, carry) -> carry`` over the blocks of all groups, in the order of their rows.

    Args:
      body: pure; traced once for each block size.
      init: the first carry. Arrays in it are updated in place.
      group_sizes: int32 ``[E]``, rows of each group; their sum is at most ``num_rows``.
      num_rows: M, static.

    Returns:
      The last carry.
    """
    if num_rows == 0:
        return init
    sizes = block_sizes(num_rows)
    plan = _plan(group_sizes.astype(jnp.int32), sizes, num_rows)

    def at_size(i: int) -> Callable[[Array, PyTree], PyTree]:
        def visit(at: Array, carry: PyTree) -> PyTree:
            start, end = plan.start[at], plan.end[at]
            origin = jnp.minimum(start, num_rows - sizes[i])
            index = origin + jnp.arange(sizes[i], dtype=jnp.int32)
            return body(Block(plan.group[at], sizes[i], origin, (index >= start) & (index < end)), carry)

        return visit

    def visit(at: Array, carry: PyTree) -> PyTree:
        # For each size a loop of one iteration or none. A conditional would be plainer, but before jax 0.12 XLA copies
        # its carry, and updates that of a loop in place. All depends on the loop's own variable, or XLA would move it
        # out of the loop.
        for i in range(len(sizes)):
            carry = jax.lax.fori_loop(at, at + (plan.step[at] == i).astype(jnp.int32), at_size(i), carry)
        return carry

    return jax.lax.fori_loop(jnp.int32(0), plan.total, visit, init)
