"""XLA's own grouped product: a native kernel on TPU; on CPU and GPU XLA expands it to E dense products."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array

from moe_blocks.grouped_matmul.base import OVER_ROWS, Implementation


def mask_tail(rows: Array, group_sizes: Array) -> Array:
    """Zeros past the last group. XLA's product does not promise them, and NaN times zero is NaN."""
    filled = jnp.arange(rows.shape[0], dtype=jnp.int32) < group_sizes.sum()
    return jnp.where(filled[:, None], rows, 0)


# The products accumulate in float32 and are rounded once, to the dtype of the operands: asking for float32 results
# (preferred_element_type) changes no bit, and makes TPU write rows that are twice as large.
# XLA cannot batch the next two; under vmap they run one after the other.
@jax.custom_batching.sequential_vmap
def _product(lhs: Array, rhs: Array, group_sizes: Array) -> Array:
    return mask_tail(jax.lax.ragged_dot(mask_tail(lhs, group_sizes), rhs, group_sizes), group_sizes)


@jax.custom_batching.sequential_vmap
def _outer(lhs: Array, cotangent: Array, group_sizes: Array) -> Array:
    masked = mask_tail(lhs, group_sizes), mask_tail(cotangent, group_sizes)
    return jax.lax.ragged_dot_general(*masked, group_sizes, OVER_ROWS)


RAGGED_DOT = Implementation(_product, _outer)
