"""Expert-parallel dispatch and combine over one mesh axis: `ep_prepare`, `ep_dispatch`, `ep_combine`.

Call them inside ``jax.shard_map``, where each device sees its own tokens. With ``axis_name=None`` the same
functions serve one device. Nothing is global: slots, drop order and experts are arguments, so a process may
change them from one call to the next.

Symbols: ``ep`` ranks on the axis, ``T`` tokens of this rank (``[..., S]``, ``S`` the position), ``E`` experts of
which ``E/ep`` live here, ``k`` choices, ``M`` rows of this rank's buffers, ``D`` width.

How rows travel is the affair of a `transport.Transport`, chosen by the name of its collective.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from moe_blocks.capacity import CapacitySpec, positive_int
from moe_blocks.dispatch import DROP_ORDERS, Layout, admit, combine_rows, gather_rows, make_layout, served_before
from moe_blocks.losses import expert_load
from moe_blocks.mesh import AxisName, axis_index, axis_size
from moe_blocks.routing import valid_assignments
from moe_blocks.transport import Transport, plan_transport


@functools.partial(jax.tree_util.register_dataclass, data_fields=("layout", "kept", "transport"), meta_fields=())
@dataclasses.dataclass(frozen=True)
class Handle:
    """What `ep_prepare` found out, for `ep_dispatch` and `ep_combine` of the same tokens.

    Attributes:
      layout: where the assignments of this rank's experts lie.
      kept: bool ``[..., k]``, which assignments of this rank's tokens some rank keeps.
      transport: how rows get here and back.
    """

    layout: Layout
    kept: Bool[Array, "*tokens k"]
    transport: Transport


class Rows(NamedTuple):
    """The rows that one rank received, grouped by expert; empty rows are zero with weight zero.

    Attributes:
      tokens: ``[M, D]``, in the dtype of the tokens.
      weights: float32 ``[M]``, combine weights. `ep_combine` applies them.
    """

    tokens: Float[Array, "M D"]
    weights: Float[Array, " M"]


class Admission(NamedTuple):
    """The drop decision of the whole group, for the tokens of this rank.

    Attributes:
      experts: int32 ``[T, k]``, the global expert of each kept assignment, E for the others.
      kept: bool ``[..., k]``.
      total_recv_tokens: int32 ``[buffers of this rank]``, demand in assignments before any drop.
    """

    experts: Int[Array, "T k"]
    kept: Bool[Array, "*tokens k"]
    total_recv_tokens: Int[Array, " buffers"]


def _buffers(experts: Int[Array, "*tokens k"], spec: CapacitySpec) -> tuple[Int[Array, "*tokens k"], int]:
    """The buffer of each assignment, and their number, which is the buffer of those without an expert.

    A buffer takes consecutive experts: those of a rank, or one.
    """
    experts_per_buffer = spec.experts_per_rank // spec.buffers_per_rank
    return experts // experts_per_buffer, spec.num_experts // experts_per_buffer


def ep_admit(
    indices: Int[Array, "*tokens k"],
    weights: Float[Array, "*tokens k"],
    token_mask: Bool[Array, "*tokens"] | None = None,
    *,
    num_experts: int,
    slots: int | None = None,
    scope: str = "rank",
    drop_order: str = "position",
    axis_name: AxisName = None,
) -> Admission:
    """Counts the demand on every buffer of the group and decides which assignments are kept.

    The first half of `ep_prepare`, which see for the arguments. Use it alone when the tokens are then
    processed in chunks: the decision is that of the whole batch.
    """
    ep = axis_size(axis_name)
    k = indices.shape[-1]
    spec = CapacitySpec(indices.size // k, num_experts, k, ep, scope)
    if slots is not None:
        positive_int("slots", slots)
    if drop_order not in DROP_ORDERS:
        raise ValueError(f"drop_order must be one of {sorted(DROP_ORDERS)}, got {drop_order!r}")
    kept = valid = valid_assignments(indices, token_mask)
    experts = jnp.where(valid, indices, num_experts).astype(jnp.int32)
    buffers, num_buffers = _buffers(experts, spec)
    demand = expert_load(buffers, num_experts=num_buffers)
    rank = axis_index(axis_name)
    if axis_name is not None:
        demand = jax.lax.psum(demand, axis_name)
    total = jax.lax.dynamic_slice_in_dim(demand, rank * spec.buffers_per_rank, spec.buffers_per_rank)
    if slots is not None and slots < spec.dropless:
        group_shape = (ep, -1, indices.shape[-2], k)  # rank, leading index, position, choice
        everyone = tuple(
            (x[None] if axis_name is None else jax.lax.all_gather(x, axis_name)).reshape(group_shape)
            for x in (buffers, jax.lax.stop_gradient(weights))
        )

        def decide() -> Array:
            admitted = admit(*everyone, num_buffers=num_buffers, slots=slots, drop_order=drop_order)
            return valid & jax.lax.dynamic_index_in_dim(admitted, rank, keepdims=False).reshape(valid.shape)

        # To sort the assignments of a whole group is expensive, and most often nothing overflows.
        kept = jax.lax.cond((demand > slots).any(), decide, lambda: valid)
    return Admission(jnp.where(kept, experts, num_experts).reshape(-1, k), kept, total)


def ep_turns(
    experts: Int[Array, "T k"], *, spec: CapacitySpec, slots: int, further: int, axis_name: AxisName = None
) -> tuple[Int[Array, "T k"], Int[Array, ""]]:
    """Deals out the assignments to turns such that no buffer gets more of them in one than it can hold.

    Args:
      experts: int32 ``[T, k]``, global experts of this rank's assignments, E for none.
      spec: sizes of the layer.
      slots: rows of one buffer in the first turn.
      further: likewise, in each further one.
      axis_name: mesh axis that shares the experts.

    Returns:
      ``(turn [T, k], turns)``: the turn of each assignment, from 0, and the number that the fullest buffer of the group
      needs, at least 1. What fits takes one turn, which is told without sorting.
    """
    buffers, num_buffers = _buffers(experts.ravel(), spec)
    counts = expert_load(buffers[:, None], num_experts=num_buffers)
    everyone = counts[None] if axis_name is None else jax.lax.all_gather(counts, axis_name)

    def turn_of(ahead: Array) -> Array:
        return jnp.maximum(-(-(ahead + 1 - slots) // further), 0)

    # Served rank by rank: in the end everything is, so the order is nobody's loss.
    on_earlier_ranks = (jnp.cumsum(everyone, axis=0) - everyone)[axis_index(axis_name)]

    def dealt() -> Array:
        ahead = on_earlier_ranks.at[buffers].get(mode="fill", fill_value=0)
        return turn_of(ahead + served_before(buffers, num_buffers=num_buffers))

    turns = 1 + turn_of(everyone.sum(0).max() - 1)
    turn = jax.lax.cond(turns > 1, dealt, lambda: jnp.zeros_like(buffers))
    return turn.reshape(experts.shape), turns


def ep_plan(
    experts: Int[Array, "T k"],
    kept: Bool[Array, "*tokens k"],
    *,
    num_experts: int,
    num_rows: int,
    axis_name: AxisName = None,
    collective: str | None = None,
) -> Handle:
    """Plans the exchange of the kept assignments. The second half of `ep_prepare`.

    Args:
      experts: int32 ``[T, k]``, global experts, E for none (``Admission.experts``).
      kept: bool ``[..., k]`` (``Admission.kept``).
      num_experts: E.
      num_rows: M, rows of this rank's buffers; no fewer than its kept assignments.
      axis_name: mesh axis that shares the experts.
      collective: see `ep_prepare`.
    """
    transport = plan_transport(
        experts, num_experts=num_experts, num_rows=num_rows, axis_name=axis_name, collective=collective
    )
    here = num_experts // axis_size(axis_name)
    # Counted from one on the way, since a row that nobody sent is zero.
    received = transport.collect_choices(jnp.where(experts < num_experts, experts + 1, 0)) - 1
    local = received - axis_index(axis_name) * here
    local = jnp.where((received >= 0) & (local >= 0) & (local < here), local, here)
    return Handle(make_layout(local, num_groups=here, num_rows=num_rows), kept, transport)


def ep_prepare(
    indices: Int[Array, "*tokens k"],
    weights: Float[Array, "*tokens k"],
    token_mask: Bool[Array, "*tokens"] | None = None,
    *,
    num_experts: int,
    slots: int | None = None,
    scope: str = "rank",
    drop_order: str = "position",
    axis_name: AxisName = None,
    collective: str | None = None,
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
      axis_name: mesh axis that shares the experts, or several of them; None: one device holds them all.
      collective: ``"all_gather"`` or ``"ragged_all_to_all"`` (`transport`); None: the best for the platform.

    Returns:
      ``(token_counts, total_recv_tokens, handle)``. token_counts: int32 ``[E/ep]``, rows that each expert of this
      rank receives, after drops: the group sizes for its experts. total_recv_tokens: int32 ``[1]`` (scope
      ``"rank"``) or ``[E/ep]`` (``"expert"``), demand on each buffer of this rank before any drop; overflow is
      ``total_recv_tokens > slots``.

    Raises:
      ValueError: for sizes that do not fit together, an unknown scope, drop order or collective.

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
    spec = CapacitySpec(indices.size // k, num_experts, k, axis_size(axis_name), scope)
    handle = ep_plan(
        admission.experts,
        admission.kept,
        num_experts=num_experts,
        num_rows=spec.rows(slots),
        axis_name=axis_name,
        collective=collective,
    )
    return handle.layout.group_sizes, admission.total_recv_tokens, handle


def ep_collect(
    handle: Handle, tokens: Float[Array, "*tokens D"], weights: Float[Array, "*tokens k"]
) -> tuple[Float[Array, "N D"], Float[Array, " M"]]:
    """The transport half of `ep_dispatch`: the tokens among which this rank's rows are, and the rows' weights.

    Returns:
      ``(tokens [N, D], weights [M])``; row i is token ``handle.layout.token[i]``.
    """
    received = handle.transport.collect(tokens.reshape(-1, tokens.shape[-1]))
    received_weights = handle.transport.collect_choices(jnp.asarray(weights).reshape(-1, weights.shape[-1])).ravel()
    return received, received_weights.at[handle.layout.assignment].get(mode="fill", fill_value=0)


def ep_return(handle: Handle, sums: Float[Array, "N D"], dtype: DTypeLike) -> Float[Array, "*tokens D"]:
    """The transport half of `ep_combine`: sends home what each token got on every rank, and adds it up.

    Args:
      handle: from `ep_prepare`.
      sums: float32 ``[N, D]``, this rank's part for each of the tokens of `ep_collect`.
      dtype: in which they may travel.

    Returns:
      float32 ``[..., D]``.
    """
    mine = handle.transport.give_back(sums, dtype)
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
    dtype = rows.tokens.dtype
    return ep_return(handle, combine_rows(*rows, handle.layout), dtype).astype(dtype)
