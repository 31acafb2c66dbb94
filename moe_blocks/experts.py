"""The expert feed-forward on grouped rows: pure functions.

Symbols: ``M`` rows, ``D`` model width, ``F`` expert width, ``E`` experts held here, ``B`` rows of a block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped, UInt

from moe_blocks.dispatch import Layout, combine_rows, gather_rows, take_rows
from moe_blocks.grouped_matmul import grouped_matmul, serve
from moe_blocks.grouped_matmul.blocked import add_outer
from moe_blocks.row_blocks import Block, as_bits, as_floats, for_each_block

Activation = Callable[[Array], Array]


def as_activation(activation: str | Activation) -> Activation:
    """Returns the function that a name of ``jax.nn`` stands for; a callable stands for itself.

    Raises:
      ValueError: if ``jax.nn`` has no such function.
    """
    function = getattr(jax.nn, activation, None) if isinstance(activation, str) else activation
    if not callable(function):
        raise ValueError(f"activation must be a callable or the name of a function in jax.nn, got {activation!r}")
    return function


def add_bias(
    rows: Float[Array, "M F"], bias: Float[Array, "E F"], group_sizes: Int[Array, " E"]
) -> Float[Array, "M F"]:
    """Adds to each row the bias of its group; rows past the last group get none."""
    group = jnp.searchsorted(jnp.cumsum(group_sizes), jnp.arange(rows.shape[0]), side="right")
    return rows + jnp.asarray(bias).at[group].get(mode="fill", fill_value=0)


def promote(
    rows: Float[Array, "M D"], params: Mapping[str, Array], *, dtype: DTypeLike | None
) -> tuple[Float[Array, "M D"], dict[str, Array]]:
    """Casts rows and parameters to ``dtype``, or to the common type of all of them when it is None."""
    with jax.numpy_dtype_promotion("standard"):
        dtype = jnp.result_type(rows, *params.values()) if dtype is None else dtype
    return rows.astype(dtype), {name: param.astype(dtype) for name, param in params.items()}


def _of(params: Shaped[Array, "E ..."], expert: Int[Array, ""]) -> Array:
    return jax.lax.dynamic_index_in_dim(params, expert, keepdims=False)


class Linear(NamedTuple):
    """One linear map for each expert.

    Attributes:
      kernel: ``[E, K, N]``.
      bias: ``[E, N]``, or None.
    """

    kernel: Float[Array, "E K N"]
    bias: Float[Array, "E N"] | None

    def rows(self, x: Float[Array, "M K"], group_sizes: Int[Array, " E"], implementation: str) -> Float[Array, "M N"]:
        """Applies to each group of rows the map of its expert."""
        out = grouped_matmul(x, self.kernel, group_sizes, implementation)
        return out if self.bias is None else add_bias(out, self.bias, group_sizes)

    def block(self, x: Float[Array, "B K"], expert: Int[Array, ""]) -> Float[Array, "B N"]:
        """Applies the map of one expert."""
        out = jnp.dot(x, _of(self.kernel, expert), preferred_element_type=jnp.float32).astype(x.dtype)
        return out if self.bias is None else out + _of(self.bias, expert)[None]

    def pull_back(self, cotangent: Float[Array, "B N"], expert: Int[Array, ""]) -> Float[Array, "B K"]:
        """The gradient of `block` with respect to ``x``, in float32."""
        return jnp.dot(cotangent, _of(self.kernel, expert).T, preferred_element_type=jnp.float32)

    def add_gradient(self, x: Float[Array, "B K"], cotangent: Float[Array, "B N"], expert: Int[Array, ""]) -> Linear:
        """Adds the gradient of `block` with respect to the parameters to this one, which is float32."""
        kernel = add_outer(self.kernel, expert, x, cotangent)
        if self.bias is None:
            return Linear(kernel, None)
        return Linear(kernel, self.bias.at[expert].add(cotangent.astype(jnp.float32).sum(0)))


class Network(NamedTuple):
    """The parameters of a feed-forward network for each expert.

    Attributes:
      inward: ``D -> F``; their outputs are the arguments of the hidden function.
      outward: ``F -> D``.
    """

    inward: tuple[Linear, ...]
    outward: Linear


Hidden = Callable[..., Array]  # pre-activations [B, F], one for each inward map, to the hidden units [B, F]


def _in_products(
    implementation: str, hidden: Hidden, rows: Array, group_sizes: Int[Array, " E"], network: Network
) -> Float[Array, "M D"]:
    """The feed-forward as one grouped product for each linear map."""
    pre = (linear.rows(rows, group_sizes, implementation) for linear in network.inward)
    return network.outward.rows(hidden(*pre), group_sizes, implementation)


def _add_rows(total: Float[Array, "N D"], token: Int[Array, " B"], rows: Float[Array, "B D"]) -> Float[Array, "N D"]:
    """Adds rows to the tokens of one block, which are distinct; N is no token."""
    return total.at[token].add(rows.astype(total.dtype), mode="drop", unique_indices=True)


def _forward(
    hidden: Hidden, tokens: Array, weights: Array, token: Array, group_sizes: Array, network: Network, *, keep: bool
) -> tuple[Float[Array, "N D"], tuple[UInt[Array, "M F"], ...]]:
    num_tokens, num_rows = tokens.shape[0], token.shape[0]

    def body(block: Block, carry: tuple[Array, tuple[Array, ...]]) -> tuple[Array, tuple[Array, ...]]:
        total, kept = carry
        source = block.read(token, fill=num_tokens)
        x = take_rows(tokens, source)
        pre = tuple(linear.block(x, block.group) for linear in network.inward)
        if keep:
            kept = tuple(block.write(bits, as_bits(values)) for bits, values in zip(kept, pre, strict=True))
        out = network.outward.block(hidden(*pre), block.group).astype(jnp.float32)
        return _add_rows(total, source, out * block.read(weights)[:, None]), kept

    widths = [linear.kernel.shape[2] for linear in network.inward] if keep else []
    kept = tuple(as_bits(jnp.zeros((num_rows, width), tokens.dtype)) for width in widths)
    return for_each_block(body, (jnp.zeros(tokens.shape, jnp.float32), kept), group_sizes, num_rows)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_blocks(
    hidden: Hidden, tokens: Array, weights: Array, token: Array, group_sizes: Array, network: Network
) -> Float[Array, "N D"]:
    """Gather, feed-forward and weighted sum in one pass over blocks of rows; no array of all rows of width D exists.

    ``out[t] = sum of weights[i] * network(tokens[t]) over the rows i with token[i] == t``, in float32 and in the order
    of the rows.
    """
    return _forward(hidden, tokens, weights, token, group_sizes, network, keep=False)[0]


def _in_blocks_fwd(hidden: Hidden, *args: Any) -> tuple[Array, tuple[Any, ...]]:
    """Also keeps the pre-activations, all that the gradient needs beside the arguments."""
    out, kept = _forward(hidden, *args, keep=True)
    return out, (*args, kept)


def _in_blocks_bwd(hidden: Hidden, residuals: tuple[Any, ...], cotangent: Array) -> tuple[Any, ...]:
    tokens, weights, token, group_sizes, network, kept = residuals
    num_tokens, num_rows = tokens.shape[0], token.shape[0]

    def body(block: Block, carry: tuple[Array, Array, Network]) -> tuple[Array, Array, Network]:
        d_tokens, d_weights, d_network = carry
        source, weight = block.read(token, fill=num_tokens), block.read(weights)[:, None]
        x = take_rows(tokens, source)
        d_sum = take_rows(cotangent, source)
        units, pull_back = jax.vjp(hidden, *(as_floats(block.read(bits), tokens.dtype) for bits in kept))
        # The weight scales what comes back from the last map: its gradient is then found without that map's output.
        d_out = d_sum.astype(tokens.dtype)
        d_units = network.outward.pull_back(d_out, block.group)
        d_weight = (d_units * units.astype(jnp.float32)).sum(-1)
        if network.outward.bias is not None:
            d_weight += (d_sum * _of(network.outward.bias, block.group)[None].astype(jnp.float32)).sum(-1)
        d_pre = pull_back((d_units * weight).astype(tokens.dtype))
        pairs = tuple(zip(network.inward, d_network.inward, d_pre, strict=True))
        d_x = functools.reduce(jnp.add, (linear.pull_back(d, block.group) for linear, _, d in pairs))
        d_inward = tuple(total.add_gradient(x, d, block.group) for _, total, d in pairs)
        d_outward = d_network.outward.add_gradient(units, (d_sum * weight).astype(tokens.dtype), block.group)
        return (
            _add_rows(d_tokens, source, d_x),
            block.write(d_weights, d_weight),
            Network(d_inward, d_outward),
        )

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), (tokens, weights, network))
    gradients = for_each_block(body, zeros, group_sizes, num_rows)
    d_tokens, d_weights, d_network = jax.tree.map(
        lambda x, like: x.astype(like.dtype), gradients, (tokens, weights, network)
    )
    return d_tokens, d_weights, None, None, d_network


_in_blocks.defvjp(_in_blocks_fwd, _in_blocks_bwd)

# By implementation: the whole way of a token through its experts, where that is faster than its parts.
FUSED = {"blocked": _in_blocks}


def feed_forward_axes(*, gated: bool, use_bias: bool) -> dict[str, tuple[str, ...]]:
    """The parameters of one expert: what each axis of them means, ``"embed"`` (D) or ``"mlp"`` (F).

    Example:
      >>> feed_forward_axes(gated=False, use_bias=True)
      {'wi_0': ('embed', 'mlp'), 'wi_0_bias': ('mlp',), 'wo': ('mlp', 'embed'), 'wo_bias': ('embed',)}
    """
    kernels = {"wi_0": ("embed", "mlp"), "wi_1": ("embed", "mlp"), "wo": ("mlp", "embed")}
    if not gated:
        del kernels["wi_1"]
    axes: dict[str, tuple[str, ...]] = {}
    for name, roles in kernels.items():
        axes[name] = roles
        if use_bias:
            axes[f"{name}_bias"] = roles[1:]
    return axes


def _network(params: Mapping[str, Array]) -> Network:
    linear = {
        name: Linear(params[name], params.get(f"{name}_bias")) for name in ("wi_0", "wi_1", "wo") if name in params
    }
    outward = linear.pop("wo")
    return Network(tuple(linear.values()), outward)


def _hidden(activation: Activation) -> Hidden:
    """``act(gate)``, or gated, ``act(gate) * up``."""
    return lambda gate, *up: functools.reduce(jnp.multiply, up, activation(gate))


def feed_forward(
    rows: Float[Array, "M D"],
    group_sizes: Int[Array, " E"],
    params: Mapping[str, Array],
    *,
    activation: Activation = jax.nn.silu,
    implementation: str | None = None,
) -> Float[Array, "M D"]:
    """Applies to each group of rows its own feed-forward network.

    ``act(x wi_0) wo``, or gated, when there is a ``wi_1``: ``(act(x wi_0) * (x wi_1)) wo``.

    Args:
      rows: ``[M, D]``, sorted by expert.
      group_sizes: int32 ``[E]``, rows of each expert.
      params: ``wi_0`` and optionally ``wi_1`` ``[E, D, F]``, ``wo`` ``[E, F, D]``, and for each of them an optional
        ``<name>_bias`` ``[E, F]`` or ``[E, D]``; in the dtype of rows.
      activation: elementwise function.
      implementation: of `grouped_matmul`.

    Returns:
      ``[M, D]`` in the dtype of rows. Rows past the last group are zero.

    Example:
      >>> params = {"wi_0": jnp.ones((1, 3, 4)), "wo": jnp.ones((1, 4, 3))}
      >>> feed_forward(jnp.ones((2, 3)), jnp.array([1]), params, activation=jax.nn.relu).tolist()
      [[12.0, 12.0, 12.0], [0.0, 0.0, 0.0]]

    References:
      Gated units: arXiv 2002.05202, eq. 6.
    """
    return serve(
        implementation,
        lambda name: _in_products(name, _hidden(activation), rows, group_sizes, _network(params)),
    )


def feed_forward_tokens(
    tokens: Float[Array, "N D"],
    weights: Float[Array, " M"],
    layout: Layout,
    params: Mapping[str, Array],
    *,
    activation: Activation = jax.nn.silu,
    implementation: str | None = None,
) -> Float[Array, "N D"]:
    """Sends each token through its experts' feed-forward networks and sums what comes back.

    ``combine_rows(feed_forward(gather_rows(tokens, layout), ...), weights, layout)``, in one pass where that is faster.

    Args:
      tokens: ``[N, D]``.
      weights: float32 ``[M]``, combine weight of each row.
      layout: which token lies in which row.
      params: see `feed_forward`.
      activation: elementwise function.
      implementation: of `grouped_matmul`.

    Returns:
      float32 ``[N, D]``; exact zeros for a token without rows.

    References:
      A product that gathers its rows itself: ScatterMoE, arXiv 2403.08245.
    """
    network, hidden = _network(params), _hidden(activation)

    def call(name: str) -> Array:
        if name in FUSED:
            return FUSED[name](hidden, tokens, weights, layout.token, layout.group_sizes, network)
        rows = _in_products(name, hidden, gather_rows(tokens, layout), layout.group_sizes, network)
        return combine_rows(rows, weights, layout)

    return serve(implementation, call)
