"""`MoEBlock`: parameters and wiring of one Mixture-of-Experts layer. The arithmetic lives in pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from moe_blocks.capacity import SCOPES, Capacity, CapacitySpec, as_capacity, positive_int
from moe_blocks.dispatch import DROP_ORDERS, Layout, combine_rows, gather_rows
from moe_blocks.exchange import exchange, variable_specs
from moe_blocks.experts import (
    Activation,
    as_activation,
    feed_forward,
    feed_forward_axes,
    feed_forward_tokens,
    promote,
)
from moe_blocks.grouped_matmul import check_implementation
from moe_blocks.linen import call_with_pure, with_axes
from moe_blocks.losses import expert_load, router_loss, update_expert_bias
from moe_blocks.mesh import (
    AxisName,
    as_axes,
    axis_index,
    axis_size,
    axis_sizes,
    check_axes,
    check_divides,
    check_token_axes,
    pad_leading,
    place,
    place_like,
)
from moe_blocks.metrics import layer_metrics
from moe_blocks.routing import Router, Routing, check_routing, jitter, route
from moe_blocks.transport import check_collective

Initializer = Callable[..., Array]
PyTree = Any


class MoEOutput(NamedTuple):
    """What a `MoEBlock` returns; it unpacks as a 3-tuple.

    Attributes:
      output: shape and dtype of ``x``.
      aux_loss: float32 scalar, the weighted router losses; exactly 0 when every coefficient is 0.
      total_recv_tokens: int32 ``[num_buffers]``, demand on each receive buffer of the mesh in assignments, before
        any drop. One buffer per rank, or per rank and expert with ``capacity_scope="expert"``.
    """

    output: Float[Array, "*tokens D"]
    aux_loss: Float[Array, ""]
    total_recv_tokens: Int[Array, " buffers"]


class MoEBlock(nn.Module):
    """A Mixture-of-Experts feed-forward layer whose receive buffers are sized from outside.

    ``out[t] = sum over the k chosen experts e of weight[t, e] * expert_e(x[t])``. Structure, shapes and dtypes of
    the result do not depend on capacity, coefficients or mode.

    To change the router or the experts, override `route` or `experts`; capacity, expert parallelism and
    metrics keep working.

    Attributes:
      num_experts: E.
      num_experts_per_tok: k, at most E.
      intermediate_size: F, width of one expert.
      router: how logits become experts and weights.
      activation: name of a function in ``jax.nn``, or a callable.
      gated: ``act(x wi_0) * (x wi_1)`` instead of ``act(x wi_0)``.
      use_bias: add biases to the experts' products.
      aux_loss_coeff: weight of the load-balancing loss; uniform routing gives exactly this value.
      z_loss_coeff: weight of the router z-loss.
      capacity: a `Capacity`, or a number of slots. None: dropless.
      capacity_scope: ``"rank"``: one receive buffer per rank. ``"expert"``: one per expert.
      drop_order: ``"position"``: later positions lose first, alike on all sequences and ranks. ``"weight"``: the
        smallest router weights do.
      expert_axis: mesh axis that shares the experts, or a tuple of axes; None: no expert parallelism.
      batch_axes: mesh axes that shard the leading axis of x, ``expert_axis`` included.
      fsdp_axis: mesh axis, or axes, that shard the width D of the kernels: they are gathered for the forward pass and
        again for the backward pass, and their gradients are reduce-scattered.
      tensor_axis: mesh axis, or axes, that shard the width F: each rank computes a part of every expert. Tokens are
        copied over it. Experts of your own (`experts`) are not split by either: they see their kernels whole.
      collective: how tokens reach their experts, ``"all_gather"`` or ``"ragged_all_to_all"`` (`transport`); None: the
        best for the platform.
      implementation: of `grouped_matmul`; None: the best for the platform.
      dtype: compute dtype of the experts; None: that of x and the parameters. The router is always float32.
      param_dtype: storage dtype.
      kernel_init: called once for each expert with its own key, on the shape of one expert.
      bias_init: likewise.
      expert_axis_name, embed_axis_name, mlp_axis_name: logical axis names of the kernels' partitioning metadata.

    Example:
      >>> block = MoEBlock(num_experts=4, num_experts_per_tok=2, intermediate_size=16, aux_loss_coeff=0.01)
      >>> x = jnp.ones((2, 3, 8))
      >>> variables = block.init(jax.random.key(0), x)
      >>> output, aux_loss, total_recv_tokens = block.apply(variables, x, capacity=8)
      >>> output.shape, total_recv_tokens.tolist()
      ((2, 3, 8), [12])
    """

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    router: Router = Router()
    activation: str | Activation = "silu"
    gated: bool = True
    use_bias: bool = False
    aux_loss_coeff: float = 0.0
    z_loss_coeff: float = 0.0
    capacity: Capacity | int | None = None
    capacity_scope: str = "rank"
    drop_order: str = "position"
    expert_axis: AxisName = None
    batch_axes: tuple[str, ...] = ()
    fsdp_axis: AxisName = None
    tensor_axis: AxisName = None
    collective: str | None = None
    implementation: str | None = None
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Initializer = nn.initializers.lecun_normal()
    bias_init: Initializer = nn.initializers.zeros_init()
    expert_axis_name: str = "expert"
    embed_axis_name: str = "embed"
    mlp_axis_name: str = "mlp"

    def __post_init__(self) -> None:
        """Validates the configuration.

        Raises:
          ValueError: naming the field, its value and the remedy.
        """
        CapacitySpec(1, self.num_experts, self.num_experts_per_tok)  # checks both and their relation
        positive_int("intermediate_size", self.intermediate_size)
        as_activation(self.activation)
        as_capacity(self.capacity)
        check_implementation(self.implementation)
        check_collective(self.collective)
        for name in ("aux_loss_coeff", "z_loss_coeff"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ValueError(f"{name} must be finite and at least 0, got {getattr(self, name)!r}")
        for name, valid in (("capacity_scope", SCOPES), ("drop_order", tuple(DROP_ORDERS))):
            if getattr(self, name) not in valid:
                raise ValueError(f"{name} must be one of {valid}, got {getattr(self, name)!r}")
        check_axes(
            self.batch_axes, expert_axis=self.expert_axis, fsdp_axis=self.fsdp_axis, tensor_axis=self.tensor_axis
        )
        super().__post_init__()

    def capacity_spec(self, shape: tuple[int, ...]) -> CapacitySpec:
        """Sizes of this layer for inputs of ``shape`` ``[..., D]`` on the current mesh: what a policy starts from.

        The mesh need not divide the leading axis: the last ranks then hold padding, or nothing else.

        Raises:
          ValueError: if the mesh lacks an axis, or cannot divide the experts.
        """
        sizes = axis_sizes(self.batch_axes)
        if len(shape) < 2 or 0 in shape:
            raise ValueError(f"x must have the shape [..., tokens, D] with no empty axis, got {shape}")
        return CapacitySpec(
            tokens_per_rank=-(-shape[0] // math.prod(sizes.values())) * math.prod(shape[1:-1]),
            num_experts=self.num_experts,
            num_experts_per_tok=self.num_experts_per_tok,
            ep_size=math.prod(sizes[axis] for axis in as_axes(self.expert_axis)),
            scope=self.capacity_scope,
        )

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "*tokens D"],
        *,
        capacity: Capacity | int | None = None,
        token_mask: Bool[Array, "*tokens"] | None = None,
        deterministic: bool = True,
    ) -> MoEOutput:
        """Applies the layer.

        Args:
          x: ``[..., D]`` with at least one leading axis; the last of them (axis -2) is the token position. With
            ``batch_axes`` the first is sharded over them.
          capacity: overrides the attribute when given; static under ``jit``. ``Capacity(slots=None)`` is dropless.
            Under ``nn.remat`` close over it, or pass it by position to a layer around the block, static there.
          token_mask: bool ``[...]``, True = real token. A masked token takes no slot, is in no count and no loss, gets
            output and gradient 0, and cannot change another token even if it holds NaN.
          deterministic: False applies the router's jitter, which needs the rng stream ``"jitter"``.

        Returns:
          A `MoEOutput`. Further figures are sown into the collection ``moe_metrics`` if it is mutable.

        Raises:
          ValueError: if the shapes, the mask, the capacity or the mesh do not fit; before anything is traced.
        """
        spec = self.capacity_spec(x.shape)
        capacity = as_capacity(self.capacity if capacity is None else capacity)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"x must be floating point, got {x.dtype}; embed or cast it first")
        if token_mask is not None and (token_mask.shape != x.shape[:-1] or token_mask.dtype != jnp.bool_):
            raise ValueError(
                f"token_mask must be bool {x.shape[:-1]} with True for real tokens, got {token_mask.dtype} "
                f"{token_mask.shape}"
            )
        check_token_axes(x, self.batch_axes)
        tokens, token_mask = pad_leading(x, token_mask, math.prod(axis_sizes(self.batch_axes).values()))
        if self.batch_axes:
            tokens, token_mask = place((tokens, token_mask), P(self.batch_axes))
        if token_mask is not None:
            tokens = jnp.where(token_mask[..., None], tokens, 0)  # on the way in, or NaN * 0 would come back out

        noisy = self.router.jitter > 0 and not deterministic
        routing = self.route(
            jitter(self.make_rng("jitter"), tokens, self.router.jitter) if noisy else tokens, token_mask
        )
        check_routing(
            routing, tokens.shape[:-1], num_experts=self.num_experts, num_experts_per_tok=self.num_experts_per_tok
        )
        if self.is_initializing():  # declare the parameters of all experts; below each rank sees its own
            self.experts(jnp.zeros((1, x.shape[-1]), x.dtype), jnp.zeros((self.num_experts,), jnp.int32))
        kernel_specs = self._kernel_specs(x.shape[-1])
        output, total_recv_tokens, kept = call_with_pure(
            self,
            lambda block, *rows: block._serve(*rows),
            lambda experts, variables, rngs: exchange(
                lambda inputs, *rows: experts(*inputs, *rows),
                (variables, rngs),
                tokens,
                routing.indices,
                routing.weights,
                token_mask,
                spec=spec,
                capacity=capacity,
                drop_order=self.drop_order,
                expert_axis=self.expert_axis,
                batch_axes=self.batch_axes,
                specs=(
                    variable_specs(variables, self.num_experts, self.expert_axis, kernel_specs),
                    jax.tree.map(lambda _: P(), rngs),
                ),
                fsdp_axis=self.fsdp_axis,
                tensor_axis=None if self._has_own_experts else self.tensor_axis,
                collective=self.collective,
            ),
        )
        if self.is_mutable_collection("moe_metrics") and not self.is_initializing():
            for name, value in layer_metrics(routing, kept, token_mask).items():
                self.sow("moe_metrics", name, value, init_fn=lambda: None, reduce_fn=lambda _, new: new)
        output = place_like(output, x)[: x.shape[0]]
        aux_loss = router_loss(routing, token_mask, aux_loss_coeff=self.aux_loss_coeff, z_loss_coeff=self.z_loss_coeff)
        return MoEOutput(output, aux_loss, total_recv_tokens)

    def route(self, x: Float[Array, "*tokens D"], token_mask: Bool[Array, "*tokens"] | None) -> Routing:
        """Chooses the experts of each token. Override it to bring your own router.

        It sees the tokens of the whole mesh and may declare parameters and submodules. The field ``router``, and with
        it the expert bias, belongs to this method; jitter is applied before it.

        Args:
          x: ``[..., D]``, the router's input; masked tokens hold zeros.
          token_mask: bool ``[...]``, True = real token, or None.

        Returns:
          A `Routing` whose indices are distinct for each token and lie in 0..E-1: that is not checked, and an index out
          of range is served by nobody. A router without logits returns zero logits and uniform scores.
        """
        gate = nn.Dense(
            self.num_experts,
            use_bias=False,
            dtype=jnp.float32,
            param_dtype=self.param_dtype,
            precision=jax.lax.Precision.HIGHEST,  # the default is bfloat16 passes on TPU and TF32 on GPU
            kernel_init=with_axes(self.kernel_init, (self.embed_axis_name, None)),
            name="gate",
        )
        logits = gate(x)
        if not self.router.expert_bias:
            return route(logits, self.router, num_experts_per_tok=self.num_experts_per_tok)
        bias = self.variable("moe_state", "expert_bias", jnp.zeros, (self.num_experts,), jnp.float32)
        routing = route(logits, self.router, num_experts_per_tok=self.num_experts_per_tok, expert_bias=bias.value)
        if self.is_mutable_collection("moe_state") and not self.is_initializing():
            load = expert_load(routing.indices, num_experts=self.num_experts, token_mask=token_mask)
            bias.value = update_expert_bias(bias.value, load, rate=self.router.bias_update_rate)
        return routing

    def experts(self, rows: Float[Array, "M D"], group_sizes: Int[Array, " E_local"]) -> Float[Array, "M D"]:
        """Applies the experts to the rows they received. Override it to bring your own experts.

        It runs on one rank, on the rows of that rank's experts, once for each chunk or turn. Declare parameters with
        `expert_param`, or with ``self.param`` and the leading axis ``group_sizes.shape[0]``: such a parameter is
        split over the ranks. A parameter that all experts share must not lead with an axis of E entries. Parameters
        come in their storage dtype; `promote` casts them and the rows to the compute dtype::

            def experts(self, rows, group_sizes):
                shape = (rows.shape[-1], rows.shape[-1])
                kernel = self.expert_param("kernel", self.kernel_init, group_sizes.shape[0], shape, (None, None))
                rows, params = promote(rows, {"kernel": kernel}, dtype=self.dtype)
                return grouped_matmul(rows, params["kernel"], group_sizes)

        Args:
          rows: ``[M, D]``, sorted by expert; rows past ``sum(group_sizes)`` are zero.
          group_sizes: int32 ``[E/ep]``, rows of each expert of this rank; may hold zeros.

        Returns:
          ``[M, D]``; rows past the last group are ignored.
        """
        params = self._expert_params(group_sizes.shape[0], rows.shape[-1], self.intermediate_size)
        rows, params = promote(rows, params, dtype=self.dtype)
        return feed_forward(
            rows,
            group_sizes,
            params,
            activation=as_activation(self.activation),
            implementation=self.implementation,
        )

    def _serve(self, tokens: Float[Array, "N D"], weights: Float[Array, " M"], layout: Layout) -> Float[Array, "N D"]:
        """Sends each token to the experts of its rows: by `experts`, or fused as long as nobody has overridden that."""
        if self._has_own_experts:
            rows = self.experts(gather_rows(tokens, layout), layout.group_sizes)
            return combine_rows(rows, weights, layout)
        part = self.intermediate_size // axis_size(self.tensor_axis)
        params = self._expert_params(layout.group_sizes.shape[0], tokens.shape[-1], part)
        if self.use_bias:  # the parts are added up, so one of them brings it
            params["wo_bias"] = jnp.where(axis_index(self.tensor_axis) == 0, params["wo_bias"], 0)
        tokens, params = promote(tokens, params, dtype=self.dtype)
        return feed_forward_tokens(
            tokens,
            weights,
            layout,
            params,
            activation=as_activation(self.activation),
            implementation=self.implementation,
        )

    @property
    def _has_own_experts(self) -> bool:
        return type(self).experts is not MoEBlock.experts

    def _expert_params(self, num_experts: int, width: int, intermediate_size: int) -> dict[str, Array]:
        """Declares the parameters of the default experts, or of a part of them."""
        names = {"embed": self.embed_axis_name, "mlp": self.mlp_axis_name}
        axes = feed_forward_axes(gated=self.gated, use_bias=self.use_bias)
        sizes = {"embed": width, "mlp": intermediate_size}
        return {
            name: self.expert_param(
                name,
                self.bias_init if len(roles) == 1 else self.kernel_init,
                num_experts,
                tuple(sizes[role] for role in roles),
                tuple(names[role] for role in roles),
            )
            for name, roles in axes.items()
        }

    def _kernel_specs(self, width: int) -> dict[str, P]:
        """How the parameters of the default experts lie on the mesh; own ones are split by expert only."""
        if self._has_own_experts:
            return {}
        check_divides("the width of x", width, "fsdp_axis", self.fsdp_axis)
        check_divides("intermediate_size", self.intermediate_size, "tensor_axis", self.tensor_axis)
        mesh_axes = {"embed": self.fsdp_axis, "mlp": self.tensor_axis}
        axes = feed_forward_axes(gated=self.gated, use_bias=self.use_bias)
        return {name: P(self.expert_axis, *(mesh_axes[role] for role in roles)) for name, roles in axes.items()}

    def expert_param(
        self,
        name: str,
        init: Initializer,
        num_experts: int,
        shape: tuple[int, ...],
        axis_names: tuple[str | None, ...],
    ) -> Array:
        """Declares one parameter for each expert, ``[num_experts, *shape]``.

        ``init`` is called for each expert with its own key on ``shape``, so the fan-in is that of one expert.

        Args:
          name: of the parameter.
          init: ``(key, shape, dtype) -> array``.
          num_experts: ``group_sizes.shape[0]`` inside `experts`.
          shape: of one expert's parameter.
          axis_names: logical names of the axes of ``shape``.
        """

        def init_each(key: Array) -> Array:
            keys = jax.random.split(key, num_experts)
            return jax.vmap(lambda one: init(one, shape, self.param_dtype))(keys)

        return self.param(name, with_axes(init_each, (self.expert_axis_name, *axis_names)))
