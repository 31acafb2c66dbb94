"""Gradient accumulation: one optimiser step over several micro-batches, and one verdict for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from moe_blocks.capacity import positive_int
from policies.base import Demand
from policies.commit import unpack


def accumulate(
    micro_step: Callable[[Any], tuple[Any, Any, Any]], batch: PyTree[Array], *, num_micro_batches: int
) -> tuple[PyTree[Array], Demand, PyTree[Array]]:
    """Runs a micro-step over the parts of a batch and combines what it returns.

    Gradients and float metrics become the mean over micro-batches, counts (integer metrics, such as an
    expert load) the sum, and the demand the elementwise maximum: the receive buffers are used once per
    micro-batch. So an auxiliary loss weighs as much as in one large batch, and if one micro-batch
    overflows, the whole optimiser step does.

    Args:
      micro_step: ``micro_step(micro_batch) -> (grads, total_recv_tokens, metrics)``. Traced once.
      batch: arrays with the same number of rows in front. Micro-batch m gets the rows m, m + M, m + 2M, ...,
        so that an array whose rows are spread over ranks is split on every rank, without communication.
      num_micro_batches: M; must divide the number of rows.

    Returns:
      ``(grads, total_recv_tokens, metrics)`` with the structure, shapes and dtypes of one micro-step's.
      Sums are kept in at least float32.

    Raises:
      ValueError: if M does not divide the rows, or an output is neither float nor integer.

    Example:
      >>> def micro_step(x):
      ...     return x.mean(), jnp.array([x.size]), {"count": jnp.array(x.size)}
      >>> grads, demand, metrics = accumulate(micro_step, jnp.arange(6.0), num_micro_batches=2)
      >>> float(grads), demand.tolist(), int(metrics["count"])
      (2.5, [3], 6)
    """
    parts = positive_int("num_micro_batches", num_micro_batches)
    micro_batches = jax.tree_util.tree_map_with_path(lambda path, rows: _split(path, rows, parts), batch)
    like = jax.eval_shape(lambda all_: micro_step(jax.tree.map(lambda rows: rows[0], all_)), micro_batches)
    grads, demand, metrics = unpack(like, "micro_step must return (grads, total_recv_tokens, metrics)")
    jax.tree_util.tree_map_with_path(_check_number, like)

    def body(total: Any, micro_batch: Any) -> tuple[Any, None]:
        grads, demand, metrics = micro_step(micro_batch)
        sums, peak = total
        return (jax.tree.map(_add, sums, (grads, metrics)), jax.tree.map(jnp.maximum, peak, demand)), None

    zeros = (jax.tree.map(_zero, (grads, metrics)), jax.tree.map(_zero, demand))
    (sums, peak), _ = jax.lax.scan(body, zeros, micro_batches)
    grads, metrics = jax.tree.map(lambda total, one: _mean(total, one, parts), sums, (grads, metrics))
    return grads, peak, metrics


def _split(path: Any, rows: Array, parts: int) -> Array:
    """[B, ...] to [M, B/M, ...], micro-batch m holding the rows m::M."""
    if rows.ndim == 0 or rows.shape[0] % parts:
        raise ValueError(
            f"batch{jax.tree_util.keystr(path)} of shape {rows.shape} cannot be split into num_micro_batches={parts}; "
            "its first axis must be a multiple of it"
        )
    return jnp.moveaxis(rows.reshape(rows.shape[0] // parts, parts, *rows.shape[1:]), 1, 0)


def _check_number(path: Any, leaf: jax.ShapeDtypeStruct) -> None:
    if not (jnp.issubdtype(leaf.dtype, jnp.floating) or jnp.issubdtype(leaf.dtype, jnp.integer)):
        raise ValueError(
            f"micro_step returned {leaf.dtype} at {jax.tree_util.keystr(path)}, which has neither a mean nor a sum; "
            "return floats to be averaged or integers to be summed"
        )


def _wide(dtype: Any) -> Any:
    narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return jnp.float32 if narrow else dtype


def _zero(leaf: jax.ShapeDtypeStruct) -> Array:
    return jnp.zeros(leaf.shape, _wide(leaf.dtype), device=leaf.sharding)


def _add(total: Array, one: Array) -> Array:
    return total + jnp.asarray(one, total.dtype)


def _mean(total: Array, one: jax.ShapeDtypeStruct, parts: int) -> Array:
    return (total / parts).astype(one.dtype) if jnp.issubdtype(one.dtype, jnp.floating) else total
