"""Expert-parallel dispatch and combine over one mesh axis: `ep_prepare`, `ep_dispatch`, `ep_combine`.

Call them inside ``jax.shard_map``, where each device sees its own tokens. With ``axis_name=None`` the same
functions serve one device. Nothing is global: slots, drop order and experts are arguments, so a process may
change them from one call to the next.

Symbols: ``ep`` ranks on the axis, ``T`` tokens of this rank (``[..., S]``, ``S`` the position), ``E`` experts of
which ``E/ep`` live here, ``k`` choices, ``M`` rows of this rank's buffers, ``D`` width.

The transport is ``all_gather``: each rank receives the tokens of its group, takes the rows of its experts, and the
partial sums go back by a reduce-scatter. It runs on every platform.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from moe_blocks.capacity import CapacitySpec, positive_int
from moe_blocks.dispatch import DROP_ORDERS, Layout, admit, combine_rows, gather_rows, make_layout
from moe_blocks.losses import expert_load
from moe_blocks.routing import valid_assignments


@functools.partial(jax.tree_util.register_dataclass, data_fields=("layout", "kept"), meta_fields=("axis_name",))
@dataclasses.dataclass(frozen=True)
class Handle:
    """What `ep_prepare` found out, for `ep_dispatch` and `ep_combine` of the same tokens.

    Attributes:
      layout: where the assignments of this rank's experts lie.
      kept: bool ``[..., k]``, which assignments of this rank's tokens some rank keeps.
      axis_name: mesh axis, static.
    """

    layout: Layout
    kept: Bool[Array, "*tokens k"]
    axis_name: str | None = None


class Rows(NamedTuple):
    """The rows that one rank received, grouped by expert; empty rows are zero with weight zero.

    Attributes:
      tokens: ``[M, D]``, in the dtype of the tokens.
      weights: float32 ``[M]``, combine weights. `ep_combine` applies them.
    """

    tokens: Float[Array, "M D"]
    weights: Float[Array, " M"]


class Admission(NamedTuple):
    """The drop decision of a whole group, equal on all its ranks.

    Attributes:
      experts: int32 ``[ep, T, k]``, the global expert of each kept assignment, E for the others.
      kept: bool ``[..., k]``, the decision for this rank's tokens.
      total_recv_tokens: int32 ``[buffers of this rank]``, demand in assignments before any drop.
    """

    experts: Int[Array, "ep T k"]
    kept: Bool[Array, "*tokens k"]
    total_recv_tokens: Int[Array, " buffers"]


def _axis_size(axis_name: str | None) -> int:
    return 1 if axis_name is None else jax.lax.axis_size(axis_name)


def _axis_index(axis_name: str | None) -> int | Array:
    return 0 if axis_name is None else jax.lax.axis_index(axis_name)


def _gather(x: Array, axis_name: str | None) -> Array:
    """``[ep, *x.shape]``: x of every rank of the group. The transpose is a reduce-scatter."""
    return x[None] if axis_name is None else jax.lax.all_gather(x, axis_name)


def _scatter_sum(x: Array, axis_name: str | None) -> Array:
    """Sums ``[ep, ...]`` over the group and returns this rank's entry. The transpose is an all-gather."""
    return x[0] if axis_name is None else jax.lax.psum_scatter(x, axis_name)


def ep_admit(
    indices: Int[Array, "*tokens k"],
    weights: Float[Array, "*tokens k"],
    token_mask: Bool[Array, "*tokens"] | None = None,
    *,
    num_experts: int,
    slots: int | None = None,
    scope: str = "rank",
    drop_order: str = "position",
    axis_name: str | None = None,
) -> Admission:
    """Counts the demand on every buffer of the group and decides which assignments are kept.

    The first half of `ep_prepare`, which see for the arguments. Use it alone when the tokens are then
    processed in chunks: the decision is that of the whole batch.
    """
    ep = _axis_size(axis_name)
    k = indices.shape[-1]
    spec = CapacitySpec(indices.size // k, num_experts, k, ep, scope)
    if slots is not None:
        positive_int("slots", slots)
    if drop_order not in DROP_ORDERS:
        raise ValueError(f"drop_order must be one of {sorted(DROP_ORDERS)}, got {drop_order!r}")
    valid = valid_assignments(indices, token_mask)
    experts = _gather(jnp.where(valid, indices, num_experts).astype(jnp.int32), axis_name)
    # A buffer takes consecutive experts: those of a rank, or one. Invalid assignments get the id past the last.
    experts_per_buffer = spec.experts_per_rank // spec.buffers_per_rank
    num_buffers = num_experts // experts_per_buffer
    buffers = experts // experts_per_buffer
    demand = expert_load(buffers, num_experts=num_buffers)
    rank = _axis_index(axis_name)
    total = jax.lax.dynamic_slice_in_dim(demand, rank * spec.buffers_per_rank, spec.buffers_per_rank)
    kept = experts < num_experts
    if slots is not None and slots < spec.dropless:
        group_shape = (ep, -1, indices.shape[-2], k)  # rank, leading index, position, choice
        kept = admit(
            buffers.reshape(group_shape),
            _gather(weights, axis_name).reshape(group_shape),
            num_buffers=num_buffers,
            slots=slots,
            drop_order=drop_order,
        ).reshape(kept.shape)
    experts = jnp.where(kept, experts, num_experts).reshape(ep, -1, k)
    return Admission(experts, jax.lax.dynamic_index_in_dim(kept, rank, keepdims=False), total)


def ep_layout(
    experts: Int[Array, "ep T k"], *, num_experts: int, num_rows: int, axis_name: str | None = None
) -> Layout:
    """Lays out the kept assignments of this rank's experts. The second half of `ep_prepare`.

    Args:
      experts: int32 ``[ep, T, k]``, global experts, E for none (``Admission.experts``).
      num_experts: E.
      num_rows: M, rows of this rank's buffers; no fewer than its kept assignments.
      axis_name: mesh axis that shares the experts.
    """
    here = num_experts // _axis_size(axis_name)
    local = experts - _axis_index(axis_name) * here
    local = jnp.where((local >= 0) & (local < here), local, here)
    return make_layout(local.reshape(-1, experts.shape[-1]), num_groups=here, num_rows=num_rows)


def ep_prepare(
    indices: Int[Array, "*tokens k"],
    weights: Float[Array, "*tokens k"],
    token_mask: Bool[Array, "*tokens"] | None = None,
    *,
    num_experts: int,
    slots: int | None = None,
    scope: str = "rank",
    drop_order: str = "position",
    axis_name: str | None = None,
) -> tuple[Int[Array, " E_local"], Int[Array, " buffers"], Handle]:
    """Plans the exchange of one batch: who receives what, what is dropped, where it lies.

    Args:
      indices: int32 ``[..., S, k]``, global expert ids of this rank's tokens, distinct within a token.
      weights: float32 ``[..., S, k]``, router weights; they decide ``drop_order="weight"``.
      token_mask: bool ``[..., S]``, True = real token.
      num_experts: E, over all ranks; a multiple of the axis size.
      slots: rows of one receive buffer, static. None: dropless.
      scope: ``"rank"``: one buffer per rank. ``"expert"``: one per expert.
      drop_order: ``"position"`` or ``"weight"`` (`dispatch.admit`).
      axis_name: mesh axis that shares the experts; None: one device holds them all.

    Returns:
      ``(token_counts, total_recv_tokens, handle)``. token_counts: int32 ``[E/ep]``, rows that each expert of this
      rank receives, after drops: the group sizes for its experts. total_recv_tokens: int32 ``[1]`` (scope
      ``"rank"``) or ``[E/ep]`` (``"expert"``), demand on each buffer of this rank before any drop; overflow is
      ``total_recv_tokens > slots``.

    Raises:
      ValueError: for sizes that do not fit together, an unknown scope or drop order.

    Example:
      >>> indices, weights = jnp.array([[0], [2], [2]]), jnp.ones((3, 1))
      >>> counts, total, _ = ep_prepare(indices, weights, num_experts=4, slots=1, scope="expert")
      >>> counts.tolist(), total.tolist()
      ([1, 0, 1, 0], [1, 0, 2, 0])

    References:
      The names are those of NVIDIA/TransformerEngine (transformer_engine/jax/ep.py), with alignment 1;
      total_recv_tokens is defined in NVIDIA/TransformerEngine#3277.
    """
    k = indices.shape[-1]
    admission = ep_admit(
        indices,
        weights,
        token_mask,
        num_experts=num_experts,
        slots=slots,
        scope=scope,
        drop_order=drop_order,
        axis_name=axis_name,
    )
    spec = CapacitySpec(indices.size // k, num_experts, k, _axis_size(axis_name), scope)
    layout = ep_layout(admission.experts, num_experts=num_experts, num_rows=spec.rows(slots), axis_name=axis_name)
    return layout.group_sizes, admission.total_recv_tokens, Handle(layout, admission.kept, axis_name)


def ep_collect(
    handle: Handle, tokens: Float[Array, "*tokens D"], weights: Float[Array, "*tokens k"]
) -> tuple[Float[Array, "N D"], Float[Array, " M"]]:
    """The transport half of `ep_dispatch`: the tokens among which this rank's rows are, and the rows' weights.

    Returns:
      ``(tokens [N, D], weights [M])``; row i is token ``handle.layout.token[i]``.
    """
    width = tokens.shape[-1]
    everyone = _gather(tokens.reshape(-1, width), handle.axis_name).reshape(-1, width)
    group_weights = _gather(jnp.asarray(weights), handle.axis_name).ravel()
    return everyone, group_weights.at[handle.layout.assignment].get(mode="fill", fill_value=0)


def ep_return(handle: Handle, sums: Float[Array, "N D"]) -> Float[Array, "*tokens D"]:
    """The transport half of `ep_combine`: adds up what each token got on every rank, and sends it home.

    Args:
      handle: from `ep_prepare`.
      sums: float32 ``[N, D]``, this rank's part for each of the tokens of `ep_collect`.
    """
    mine = _scatter_sum(sums.reshape(_axis_size(handle.axis_name), -1, sums.shape[-1]), handle.axis_name)
    return mine.reshape(*handle.kept.shape[:-1], -1)


def ep_dispatch(handle: Handle, tokens: Float[Array, "*tokens D"], weights: Float[Array, "*tokens k"]) -> Rows:
    """Sends each kept assignment to the rank of its expert.

    Args:
      handle: from `ep_prepare` on the same tokens.
      tokens: ``[..., D]``, this rank's tokens. A masked token must be finite (zero), as its gradient is exactly zero.
      weights: float32 ``[..., k]``, router weights.

    Returns:
      ``Rows``. Gradients are exact: a token gets the sum over its rows, a weight that of its own row.
    """
    everyone, row_weights = ep_collect(handle, tokens, weights)
    return Rows(gather_rows(everyone, handle.layout), row_weights)


def ep_combine(handle: Handle, rows: Rows) -> Float[Array, "*tokens D"]:
    """Returns each token the weighted sum of its experts' outputs.

    ``out[t] = sum over kept choices of weight * row``. The product and the sum are float32, then cast to the
    dtype of the rows. A dropped assignment adds exactly zero, and the survivors are not renormalised.

    Args:
      handle: from `ep_prepare`.
      rows: expert outputs in the rows of `ep_dispatch`, with its weights: ``rows._replace(tokens=outputs)``.

    Returns:
      ``[..., D]``, in the dtype of the rows.
    """
    return ep_return(handle, combine_rows(*rows, handle.layout)).astype(rows.tokens.dtype)
