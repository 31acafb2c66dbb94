"""One MoE layer between router and residual: dispatch, experts, combine, on one device or on a mesh. Pure."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from moe_blocks.capacity import Capacity, CapacitySpec
from moe_blocks.dispatch import Layout
from moe_blocks.expert_parallel import Handle, ep_admit, ep_collect, ep_layout, ep_return
from moe_blocks.sharding import place

PyTree = Any
# (variables, tokens [N, D], row weights [M], layout) -> float32 [N, D]
Experts = Callable[[PyTree, Array, Array, Layout], Array]


def _split(x: Array, chunks: int, fill: float, axis: int = 0) -> Array:
    """Moves ``chunks`` consecutive parts of ``axis`` to a new leading axis, padding the last part."""
    size = -(-x.shape[axis] // chunks)
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, size * chunks - x.shape[axis])
    padded = jnp.pad(x, padding, constant_values=fill)
    return jnp.moveaxis(padded.reshape(*x.shape[:axis], chunks, size, *x.shape[axis + 1 :]), axis, 0)


def _exchange_on_rank(
    experts: Experts,
    capacity: Capacity,
    spec: CapacitySpec,
    drop_order: str,
    axis_name: str | None,
    variables: PyTree,
    tokens: Array,
    indices: Array,
    weights: Array,
    token_mask: Array | None,
) -> tuple[Array, Array, Array]:
    """`exchange` as one rank of the group sees it: its own tokens, its own experts."""
    admission = ep_admit(
        indices,
        weights,
        token_mask,
        num_experts=spec.num_experts,
        slots=capacity.slots,
        scope=spec.scope,
        drop_order=drop_order,
        axis_name=axis_name,
    )

    def one_pass(tokens: Array, weights: Array, kept: Array, chosen: Array, num_rows: int) -> Array:
        layout = ep_layout(chosen, num_experts=spec.num_experts, num_rows=num_rows, axis_name=axis_name)
        handle = Handle(layout, kept, axis_name)
        sums = experts(variables, *ep_collect(handle, tokens, weights), layout)
        return ep_return(handle, sums).astype(tokens.dtype)

    # The decision above was that of the whole batch, so chunks see the same drops and need no larger buffer.
    chunks = min(capacity.chunks, spec.tokens_per_rank)
    part = CapacitySpec(
        -(-spec.tokens_per_rank // chunks), spec.num_experts, spec.num_experts_per_tok, spec.ep_size, spec.scope
    )
    num_rows = min(spec.rows(capacity.slots), part.rows(None))
    if chunks == 1:
        out = one_pass(tokens, weights, admission.kept, admission.experts, num_rows)
        return out, admission.total_recv_tokens, admission.kept

    # Rematerialised, or the scan would keep every chunk's buffer for the backward pass.
    body = jax.checkpoint(functools.partial(one_pass, num_rows=num_rows), prevent_cse=False)
    flat = (tokens.reshape(-1, tokens.shape[-1]), *(x.reshape(-1, x.shape[-1]) for x in (weights, admission.kept)))
    parts = (
        *(_split(x, chunks, 0) for x in flat),
        _split(admission.experts, chunks, spec.num_experts, axis=1),
    )
    _, out = jax.lax.scan(lambda _, xs: (None, body(*xs)), None, parts)
    out = out.reshape(-1, out.shape[-1])[: spec.tokens_per_rank].reshape(tokens.shape[:-1] + out.shape[-1:])
    return out, admission.total_recv_tokens, admission.kept


def exchange(
    experts: Experts,
    variables: PyTree,
    tokens: Float[Array, "*tokens D"],
    indices: Int[Array, "*tokens k"],
    weights: Float[Array, "*tokens k"],
    token_mask: Bool[Array, "*tokens"] | None,
    *,
    spec: CapacitySpec,
    capacity: Capacity,
    drop_order: str = "position",
    expert_axis: str | None = None,
    batch_axes: tuple[str, ...] = (),
) -> tuple[Float[Array, "*tokens D"], Int[Array, " buffers"], Bool[Array, "*tokens k"]]:
    """Sends tokens to their experts and returns the weighted sum of what comes back.

    Args:
      experts: pure function ``(variables, tokens [N, D], weights [M], layout) -> [N, D]``: sends each token to the
        experts of its rows and returns the weighted sum of their outputs, in float32.
      variables: its variables. A leaf whose leading axis is E holds one entry for each expert and is sliced over
        ``expert_axis``; any other leaf is given whole to every rank.
      tokens: ``[..., D]``; masked tokens hold zeros.
      indices: int32 ``[..., k]``, chosen experts.
      weights: float32 ``[..., k]``, combine weights.
      token_mask: bool ``[...]``, True = real token, or None.
      spec: sizes of this layer on this mesh.
      capacity: rows of the buffers, and in how many chunks to run.
      drop_order: which assignments lose (`dispatch.admit`).
      expert_axis: mesh axis that shares the experts, or None.
      batch_axes: mesh axes that shard the leading axis of ``tokens``; () runs on one device.

    Returns:
      ``(output, total_recv_tokens, kept)``: output like tokens; int32 demand on every buffer of the mesh before any
      drop; bool ``[..., k]``, the assignments that were served.
    """
    rank_fn = functools.partial(_exchange_on_rank, experts, capacity, spec, drop_order, expert_axis)
    args = (variables, tokens, indices, weights, token_mask)
    if not batch_axes:
        return rank_fn(*args)
    by_token = P(batch_axes)
    by_expert = jax.tree.map(lambda leaf: P(expert_axis) if leaf.shape[:1] == (spec.num_experts,) else P(), variables)
    in_specs = (by_expert, by_token, by_token, by_token, by_token)
    # Under jit also when called eagerly, where shard_map would compile operation by operation.
    mapped = jax.jit(
        jax.shard_map(
            rank_fn,
            in_specs=in_specs,
            out_specs=(by_token, by_token, by_token),
            check_vma=False,  # experts are user code, whose loops need not annotate what varies
        )
    )
    return mapped(*(place(arg, specs) for arg, specs in zip(args, in_specs, strict=True)))
