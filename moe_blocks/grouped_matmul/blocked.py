"""Dense products over blocks of rows: runs on any platform, and costs what the filled rows cost."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array

from moe_blocks.grouped_matmul.base import Implementation
from moe_blocks.row_blocks import Block, as_bits, as_floats, for_each_block


def add_outer(total: Array, group: Array, lhs: Array, cotangent: Array) -> Array:
    """Adds ``lhs^T @ cotangent`` to the entry of ``group`` in a float32 total."""
    return total.at[group].add(jnp.dot(lhs.T, cotangent, preferred_element_type=jnp.float32))


def _product(lhs: Array, rhs: Array, group_sizes: Array) -> Array:
    def body(block: Block, out: Array) -> Array:
        product = jnp.dot(block.read(lhs), rhs[block.group], preferred_element_type=jnp.float32)
        return block.write(out, as_bits(product.astype(lhs.dtype)))

    out = as_bits(jnp.zeros((lhs.shape[0], rhs.shape[2]), lhs.dtype))
    return as_floats(for_each_block(body, out, group_sizes, lhs.shape[0]), lhs.dtype)


def _outer(lhs: Array, cotangent: Array, group_sizes: Array) -> Array:
    def body(block: Block, total: Array) -> Array:
        return add_outer(total, block.group, block.read(lhs), block.read(cotangent))

    total = jnp.zeros((group_sizes.shape[0], lhs.shape[1], cotangent.shape[1]), jnp.float32)
    return for_each_block(body, total, group_sizes, lhs.shape[0]).astype(lhs.dtype)


BLOCKED = Implementation(_product, _outer)
