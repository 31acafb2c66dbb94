"""Grouped matrix product: one function, several implementations.

Rows ``[start_e, start_e + group_sizes[e])`` of the left side meet matrix ``e`` of the right side. Symbols: ``M``
rows, ``K`` inner, ``N`` outer width, ``E`` groups, ``B`` rows of a block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

MAX_BLOCK = 128  # rows; larger blocks waste work on small groups, smaller ones do not fill the matrix unit


def _block_rows(num_rows: int, num_groups: int) -> int:
    """A power of two near the mean group, at least 8 and at most `MAX_BLOCK`, never more than there are rows."""
    mean = -(-num_rows // num_groups)
    return min(num_rows, MAX_BLOCK, max(8, 1 << (mean - 1).bit_length()))


def _for_each_block(
    body: Callable[[Array, Array, Array, Array], Array],
    init: Array,
    group_sizes: Int[Array, " E"],
    block: int,
) -> Array:
    """Folds ``body(carry, group, start, end)`` over blocks of rows that each lie in one group.

    The blocks of a group start at its first row. The number of iterations is that of the filled blocks, found at
    run time, so empty slots cost nothing.
    """
    blocks = -(-group_sizes // block)
    last_block = jnp.cumsum(blocks)
    row_end = jnp.cumsum(group_sizes)

    def step(i: Array, carry: Array) -> Array:
        group = jnp.searchsorted(last_block, i, side="right").astype(jnp.int32)
        start = row_end[group] - group_sizes[group] + (i - last_block[group] + blocks[group]) * block
        return body(carry, group, start, jnp.minimum(row_end[group], start + block))

    return jax.lax.fori_loop(jnp.int32(0), last_block[-1], step, init)


def _tile(x: Array, start: Array, end: Array, block: int) -> tuple[Array, Array, Array]:
    """A window of ``block`` rows that covers ``[start, end)``: the rows, the window's start, the mask of the range."""
    origin = jnp.minimum(start, x.shape[0] - block)
    index = origin + jnp.arange(block, dtype=jnp.int32)
    inside = ((index >= start) & (index < end))[:, None]
    return jax.lax.dynamic_slice_in_dim(x, origin, block), origin, inside


def _blocked_product(lhs: Array, rhs: Array, group_sizes: Array) -> Array:
    block = _block_rows(lhs.shape[0], rhs.shape[0])

    def body(out: Array, group: Array, start: Array, end: Array) -> Array:
        rows, origin, inside = _tile(lhs, start, end, block)
        product = jnp.dot(rows, rhs[group], preferred_element_type=jnp.float32).astype(out.dtype)
        before = jax.lax.dynamic_slice_in_dim(out, origin, block)
        return jax.lax.dynamic_update_slice_in_dim(out, jnp.where(inside, product, before), origin, 0)

    out = jnp.zeros((lhs.shape[0], rhs.shape[2]), lhs.dtype)
    return _for_each_block(body, out, group_sizes, block)


def _blocked_outer(lhs: Array, cotangent: Array, group_sizes: Array) -> Array:
    """``out[e] = lhs_e^T @ cotangent_e``, accumulated in float32."""
    block = _block_rows(lhs.shape[0], group_sizes.shape[0])

    def body(out: Array, group: Array, start: Array, end: Array) -> Array:
        left, _, inside = _tile(lhs, start, end, block)
        right, _, _ = _tile(cotangent, start, end, block)
        left, right = jnp.where(inside, left, 0), jnp.where(inside, right, 0)
        return out.at[group].add(jnp.dot(left.T, right, preferred_element_type=jnp.float32))

    out = jnp.zeros((group_sizes.shape[0], lhs.shape[1], cotangent.shape[1]), jnp.float32)
    return _for_each_block(body, out, group_sizes, block).astype(lhs.dtype)


def _mask(rows: Array, group_sizes: Array) -> Array:
    """Zeros past the last group. XLA's product does not promise them, and NaN times zero is NaN."""
    filled = jnp.arange(rows.shape[0], dtype=jnp.int32) < group_sizes.sum()
    return jnp.where(filled[:, None], rows, 0)


# XLA cannot batch the next two; under vmap they run one after the other.
@jax.custom_batching.sequential_vmap
def _ragged_product(lhs: Array, rhs: Array, group_sizes: Array) -> Array:
    out = jax.lax.ragged_dot(_mask(lhs, group_sizes), rhs, group_sizes, preferred_element_type=jnp.float32)
    return _mask(out, group_sizes).astype(lhs.dtype)


@jax.custom_batching.sequential_vmap
def _ragged_outer(lhs: Array, cotangent: Array, group_sizes: Array) -> Array:
    over_rows = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=(0,), rhs_group_dimensions=()
    )
    masked = _mask(lhs, group_sizes), _mask(cotangent, group_sizes)
    out = jax.lax.ragged_dot_general(*masked, group_sizes, over_rows, preferred_element_type=jnp.float32)
    return out.astype(lhs.dtype)


class Implementation(NamedTuple):
    """A grouped product, and the product over rows that the gradient of the matrices is.

    Attributes:
      product: ``(lhs [M, K], rhs [E, K, N], group_sizes [E]) -> [M, N]``, zero past the last group, whatever lhs
        holds there.
      outer: ``(lhs [M, K], cotangent [M, N], group_sizes [E]) -> [E, K, N]``, ``lhs_e^T @ cotangent_e`` for each
        group, exactly zero for an empty one; what lies past the last group does not matter.
    """

    product: Callable[[Array, Array, Array], Array]
    outer: Callable[[Array, Array, Array], Array]


IMPLEMENTATIONS = {
    "blocked": Implementation(_blocked_product, _blocked_outer),
    "ragged_dot": Implementation(_ragged_product, _ragged_outer),
}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(implementation: Implementation, lhs: Array, rhs: Array, group_sizes: Array) -> Array:
    return implementation.product(lhs, rhs, group_sizes)


def _grouped_fwd(implementation: Implementation, *operands: Array) -> tuple[Array, tuple[Array, ...]]:
    return implementation.product(*operands), operands


def _grouped_bwd(
    implementation: Implementation, operands: tuple[Array, ...], cotangent: Array
) -> tuple[Array, Array, None]:
    lhs, rhs, group_sizes = operands
    d_lhs = implementation.product(cotangent, rhs.swapaxes(1, 2), group_sizes)
    return d_lhs, implementation.outer(lhs, cotangent, group_sizes), None


_grouped.defvjp(_grouped_fwd, _grouped_bwd)

# Tried in this order. On CPU and GPU XLA expands `ragged_dot` to E dense products (marin-community/marin#5394).
PREFERRED = {"tpu": ("ragged_dot", "blocked")}
PREFERRED_ELSEWHERE = ("blocked", "ragged_dot")


def check_implementation(implementation: str | None) -> None:
    """Raises ``ValueError`` unless ``implementation`` is None or a known name."""
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation must be None (best for the platform) or one of {sorted(IMPLEMENTATIONS)}, "
            f"got {implementation!r}"
        )


def grouped_matmul(
    lhs: Float[Array, "M K"],
    rhs: Float[Array, "E K N"],
    group_sizes: Int[Array, " E"],
    implementation: str | None = None,
) -> Float[Array, "M N"]:
    """Multiplies each group of rows by its own matrix.

    ``out[i] = lhs[i] @ rhs[e]`` for row i of group e. Products accumulate in float32. Rows past
    ``sum(group_sizes)`` are zero, in value and in gradient, whatever they hold.

    Args:
      lhs: ``[M, K]``, rows sorted by group.
      rhs: ``[E, K, N]``, of the same dtype.
      group_sizes: int32 ``[E]``, rows of each group; zeros allowed; their sum at most M.
      implementation: ``"blocked"``: dense products over blocks of rows, on any platform. ``"ragged_dot"``: XLA's
        own. None: the best for the platform.

    Returns:
      ``[M, N]`` in the dtype of lhs.

    Raises:
      ValueError: if shapes or dtypes do not match, or the name is unknown.
      NotImplementedError: if no implementation can serve; the reasons are listed.

    Example:
      >>> lhs, rhs = jnp.ones((3, 2)), jnp.stack([jnp.ones((2, 2)), 5 * jnp.ones((2, 2))])
      >>> grouped_matmul(lhs, rhs, jnp.array([1, 1], jnp.int32)).tolist()
      [[2.0, 2.0], [10.0, 10.0], [0.0, 0.0]]
    """
    check_implementation(implementation)
    lhs, rhs, group_sizes = jnp.asarray(lhs), jnp.asarray(rhs), jnp.asarray(group_sizes)
    if lhs.ndim != 2 or rhs.ndim != 3 or lhs.shape[1] != rhs.shape[1] or group_sizes.shape != rhs.shape[:1]:
        raise ValueError(
            "grouped_matmul needs lhs [M, K], rhs [E, K, N] and group_sizes [E], got "
            f"{lhs.shape}, {rhs.shape} and {group_sizes.shape}"
        )
    if lhs.dtype != rhs.dtype:
        raise ValueError(f"lhs and rhs must have one dtype, got {lhs.dtype} and {rhs.dtype}; cast one of them")
    preferred = PREFERRED.get(jax.default_backend(), PREFERRED_ELSEWHERE)
    reasons = []
    for name in preferred if implementation is None else (implementation,):
        try:
            return _grouped(IMPLEMENTATIONS[name], lhs, rhs, group_sizes)
        except NotImplementedError as reason:
            reasons.append(f"{name}: {reason}")
    raise NotImplementedError("no implementation of grouped_matmul can serve: " + "; ".join(reasons))
