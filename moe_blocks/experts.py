"""The expert feed-forward on grouped rows: pure functions.

Symbols: ``M`` rows, ``D`` model width, ``F`` expert width, ``E`` experts held here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from moe_blocks.grouped_matmul import grouped_matmul

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

    def affine(name: str, x: Array) -> Array:
        out = grouped_matmul(x, params[name], group_sizes, implementation)
        bias = params.get(f"{name}_bias")
        return out if bias is None else add_bias(out, bias, group_sizes)

    hidden = activation(affine("wi_0", rows))
    if "wi_1" in params:
        hidden = hidden * affine("wi_1", rows)
    return affine("wo", hidden)
