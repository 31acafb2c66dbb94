"""One MoE layer between router and residual: dispatch, experts, combine, on one device or on a mesh. Pure."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from moe_blocks.capacity import Capacity, CapacitySpec
from moe_blocks.dispatch import Layout
from moe_blocks.expert_parallel import ep_admit, ep_collect, ep_plan, ep_return, ep_turns
from moe_blocks.mesh import AxisName, as_axes, place
from moe_blocks.passes import in_chunks, in_turns

PyTree = Any
# (variables, tokens [N, D], row weights [M], layout) -> float32 [N, D]
Experts = Callable[[PyTree, Array, Array, Layout], Array]


def variable_specs(
    variables: PyTree, num_experts: int, expert_axis: AxisName, params: Mapping[str, P] = MappingProxyType({})
) -> PyTree:
    """A ``PartitionSpec`` for each leaf.

    That of ``params`` for the parameters named there, else over ``expert_axis`` if the leading axis is E, else whole.
    """
    named = {f"['params']['{name}']": spec for name, spec in params.items()}

    def spec_of(path: Any, leaf: Array) -> P:
        split = P(expert_axis) if leaf.shape[:1] == (num_experts,) else P()
        return named.get(jax.tree_util.keystr(path[-2:]), split)

    return jax.tree_util.tree_map_with_path(spec_of, variables)


def _gather(variables: PyTree, specs: PyTree, fsdp_axis: AxisName) -> PyTree:
    """Puts together the leaves that are sharded over ``fsdp_axis``. The transpose is a reduce-scatter."""

    def whole(leaf: Array, spec: P) -> Array:
        for axis, name in enumerate(spec):
            if name is not None and as_axes(name) == as_axes(fsdp_axis):
                leaf = jax.lax.all_gather(leaf, name, axis=axis, tiled=True)
        return leaf

    return jax.tree.map(whole, variables, specs)


def _not_gathered_over(fsdp_axis: AxisName) -> Callable[..., bool]:
    """What to keep for the backward pass: all but whole kernels, which are gathered once more."""
    return lambda primitive, *_, **params: (
        not (primitive is jax.lax.all_gather_p and params["axis_name"] == as_axes(fsdp_axis))
    )


@dataclasses.dataclass(frozen=True)
class _Layer:
    """What is static about one layer; see `exchange`."""

    experts: Experts
    spec: CapacitySpec
    capacity: Capacity
    drop_order: str
    expert_axis: AxisName
    tensor_axis: AxisName
    collective: str | None

    def on_rank(
        self, variables: PyTree, tokens: Array, indices: Array, weights: Array, token_mask: Array | None
    ) -> tuple[Array, Array, Array]:
        """`exchange` as one rank sees it: its own tokens, its own experts."""
        spec, capacity = self.spec, self.capacity
        slots = spec.dropless if capacity.slots is None else capacity.slots
        recompute = capacity.on_overflow == "recompute" and slots < spec.dropless
        admission = ep_admit(
            indices,
            weights,
            token_mask,
            num_experts=spec.num_experts,
            slots=None if recompute else capacity.slots,
            scope=spec.scope,
            drop_order=self.drop_order,
            axis_name=self.expert_axis,
        )
        # The decision was that of the whole batch, so chunks see the same drops.
        chunks = min(capacity.chunks, spec.tokens_per_rank)
        part = dataclasses.replace(spec, tokens_per_rank=-(-spec.tokens_per_rank // chunks))
        one_pass = functools.partial(self.one_pass, min(spec.rows(capacity.slots), part.rows(None)))
        rows = tokens.reshape(-1, tokens.shape[-1]), weights.reshape(-1, weights.shape[-1]), admission.experts
        if recompute:
            # What overflows is mostly less than what does not, and the buffers of one more turn lie beside gradients.
            further = -(-slots // 2)
            turn, turns = ep_turns(
                admission.experts, spec=spec, slots=slots, further=further, axis_name=self.expert_axis
            )
            if axes := jax.sharding.get_abstract_mesh().manual_axes:
                turns = jax.lax.pmax(turns, axes)  # passes communicate, so all ranks must take as many
            passes = one_pass, functools.partial(self.one_pass, spec.rows(further))
            out = in_turns(*passes, variables, *rows, turn, turns, num_experts=spec.num_experts)
        elif chunks > 1:
            out = in_chunks(one_pass, variables, *rows, chunks=chunks, num_experts=spec.num_experts)
        else:
            out = one_pass(variables, *rows)
        return out.reshape(tokens.shape).astype(tokens.dtype), admission.total_recv_tokens, admission.kept

    def one_pass(self, num_rows: int, variables: PyTree, tokens: Array, weights: Array, chosen: Array) -> Array:
        """Dispatch, experts and combine with buffers of ``num_rows`` rows for all assignments that are given."""
        handle = ep_plan(
            chosen,
            chosen < self.spec.num_experts,
            num_experts=self.spec.num_experts,
            num_rows=num_rows,
            axis_name=self.expert_axis,
            collective=self.collective,
        )
        sums = self.experts(variables, *ep_collect(handle, tokens, weights), handle.layout)
        out = ep_return(handle, sums, tokens.dtype)
        return out if self.tensor_axis is None else jax.lax.psum(out, self.tensor_axis)


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
    expert_axis: AxisName = None,
    batch_axes: tuple[str, ...] = (),
    specs: PyTree = None,
    fsdp_axis: AxisName = None,
    tensor_axis: AxisName = None,
    collective: str | None = None,
) -> tuple[Float[Array, "*tokens D"], Int[Array, " buffers"], Bool[Array, "*tokens k"]]:
    """Sends tokens to their experts and returns the weighted sum of what comes back.

    Args:
      experts: pure function ``(variables, tokens [N, D], weights [M], layout) -> [N, D]``: sends each token to the
        experts of its rows and returns the weighted sum of their outputs, in float32.
      variables: its variables.
      tokens: ``[..., D]``; masked tokens hold zeros.
      indices: int32 ``[..., k]``, chosen experts.
      weights: float32 ``[..., k]``, combine weights.
      token_mask: bool ``[...]``, True = real token, or None.
      spec: sizes of this layer on this mesh.
      capacity: rows of the buffers, and what to do so that they suffice.
      drop_order: which assignments lose (`dispatch.admit`).
      expert_axis: mesh axis, or axes, that share the experts, or None.
      batch_axes: mesh axes that shard the leading axis of ``tokens``; () runs on one device.
      specs: how the variables lie on the mesh, a ``PartitionSpec`` for each leaf; None: `variable_specs`.
      fsdp_axis: mesh axis over which ``experts`` sees the variables whole all the same.
      tensor_axis: mesh axis over which the results of ``experts`` are parts that are added up.
      collective: how tokens travel (`transport`); None: the best for the platform.

    Returns:
      ``(output, total_recv_tokens, kept)``: output like tokens; int32 demand on every buffer of the mesh before any
      drop; bool ``[..., k]``, the assignments that were served.
    """
    layer = _Layer(experts, spec, capacity, drop_order, expert_axis, tensor_axis, collective)
    args = (variables, tokens, indices, weights, token_mask)
    if not batch_axes:
        return layer.on_rank(*args)
    specs = variable_specs(variables, spec.num_experts, expert_axis) if specs is None else specs

    def on_shards(variables: PyTree, *args: Any) -> tuple[Array, Array, Array]:
        return layer.on_rank(_gather(variables, specs, fsdp_axis), *args)

    if fsdp_axis is not None:
        on_shards = jax.checkpoint(on_shards, policy=_not_gathered_over(fsdp_axis))
    by_token = P(batch_axes)
    in_specs = (specs, by_token, by_token, by_token, by_token)
    # Under jit also when called eagerly, where shard_map would compile operation by operation.
    mapped = jax.jit(
        jax.shard_map(
            on_shards,
            in_specs=in_specs,
            out_specs=(by_token, by_token, by_token),
            check_vma=False,  # experts are user code, whose loops need not annotate what varies
        )
    )
    return mapped(*(place(arg, specs) for arg, specs in zip(args, in_specs, strict=True)))
