"""Tokamax's grouped kernels for GPU, where XLA would expand `ragged_dot` (marin-community/marin#5394)."""

from __future__ import annotations

import importlib
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from moe_blocks.grouped_matmul.base import OVER_ROWS, Implementation
from moe_blocks.grouped_matmul.ragged_dot import mask_tail

KERNELS = ("mosaic", "triton")  # without "xla", which would be the expansion again


def _kernel(name: str, *operands: Array | jax.lax.RaggedDotDimensionNumbers) -> Array:
    """Calls a function of tokamax.

    Raises:
      NotImplementedError: if tokamax is not installed, or has no kernel for these operands on this device.
    """
    try:
        tokamax: Any = importlib.import_module("tokamax")
    except ImportError as error:
        raise NotImplementedError("tokamax is not installed; pip install 'moe-blocks[gpu]'") from error
    try:
        return getattr(tokamax, name)(*operands, preferred_element_type=jnp.float32, implementation=KERNELS)
    except ExceptionGroup as group:
        raise NotImplementedError("; ".join(map(str, group.exceptions))) from group


@jax.custom_batching.sequential_vmap
def _product(lhs: Array, rhs: Array, group_sizes: Array) -> Array:
    out = _kernel("ragged_dot", mask_tail(lhs, group_sizes), rhs, group_sizes)
    return mask_tail(out, group_sizes).astype(lhs.dtype)


@jax.custom_batching.sequential_vmap
def _outer(lhs: Array, cotangent: Array, group_sizes: Array) -> Array:
    masked = mask_tail(lhs, group_sizes), mask_tail(cotangent, group_sizes)
    out = _kernel("ragged_dot_general", *masked, group_sizes, OVER_ROWS)
    # A kernel need not write the matrix of a group without rows.
    return jnp.where((group_sizes > 0)[:, None, None], out, 0).astype(lhs.dtype)


TOKAMAX = Implementation(_product, _outer)
