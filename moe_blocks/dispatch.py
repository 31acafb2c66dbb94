"""Which assignment goes to which slot, and the row movements that follow: pure, free of collectives.

Symbols: ``R`` ranks of the expert-parallel group (1 without one), ``L`` leading (sequence) indices of a rank,
``S`` token positions, ``k`` choices, ``N = R * L * S`` tokens of the group, ``M`` rows of the buffer of one rank,
``G`` groups (experts of one rank), ``D`` width.

Two decisions, made apart: `admit` says which assignments a full buffer keeps, `make_layout` where the kept ones
go. Both sort integers; no ``[T, E, C]`` mask exists.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

# Sort keys ahead of the position, ascending. Within equal keys the earlier position wins.
DROP_ORDERS: dict[str, Callable[[Array], tuple[Array, ...]]] = {
    "position": lambda weights: (),
    "weight": lambda weights: (-weights,),
}


def admit(
    buffers: Int[Array, "R L S k"],
    weights: Float[Array, "R L S k"],
    *,
    num_buffers: int,
    slots: int,
    drop_order: str = "position",
) -> Bool[Array, "R L S k"]:
    """Decides which assignments a buffer of ``slots`` rows keeps.

    ``"position"``: the assignments are served by position ``S`` first, then leading index, then choice, then
    rank, so all sequences and all ranks lose alike, and late positions lose first. ``"weight"``: by falling
    router weight, ties by position.

    Args:
      buffers: int32 ``[R, L, S, k]``, the buffer that each assignment goes to; ``num_buffers`` for none.
      weights: float32 ``[R, L, S, k]``, router weights.
      num_buffers: number of buffers.
      slots: rows of each buffer.
      drop_order: ``"position"`` or ``"weight"``.

    Returns:
      bool ``[R, L, S, k]``, True = kept.

    Example:
      >>> to_one_buffer = jnp.zeros((1, 1, 4, 1), jnp.int32)
      >>> admit(to_one_buffer, jnp.ones((1, 1, 4, 1)), num_buffers=1, slots=3).ravel().tolist()
      [True, True, True, False]
    """
    served_first = (2, 1, 3, 0)  # position, leading index, choice, rank
    shape = tuple(buffers.shape[axis] for axis in served_first)
    flat = buffers.transpose(served_first).ravel()
    keys = DROP_ORDERS[drop_order](jax.lax.stop_gradient(weights).transpose(served_first).ravel())
    kept = (served_before(flat, keys, num_buffers=num_buffers) < slots) & (flat < num_buffers)
    return kept.reshape(shape).transpose((3, 1, 0, 2))


def served_before(
    buffers: Int[Array, " A"], keys: tuple[Shaped[Array, " A"], ...] = (), *, num_buffers: int
) -> Int[Array, " A"]:
    """How many assignments of the same buffer are served before each: those of smaller keys, and earlier ones.

    Args:
      buffers: int32 ``[A]``; ``num_buffers`` for none, whose count means nothing.
      keys: sort keys, ascending.
      num_buffers: number of buffers.

    Example:
      >>> served_before(jnp.array([1, 0, 1, 1]), num_buffers=2).tolist()
      [0, 0, 1, 2]
    """
    serial = jnp.arange(buffers.size, dtype=jnp.int32)
    ordered, *_, origin = jax.lax.sort((buffers, *keys, serial), num_keys=1 + len(keys), is_stable=True)
    start = jnp.searchsorted(ordered, jnp.arange(num_buffers + 1, dtype=ordered.dtype)).astype(jnp.int32)
    return jnp.zeros_like(serial).at[origin].set(serial - start[ordered], unique_indices=True)


class Layout(NamedTuple):
    """Where the assignments of one rank's buffer lie. Rows of one group are contiguous, groups ascending.

    Attributes:
      token: int32 ``[M]``, the token in each row; N for an empty row.
      assignment: int32 ``[M]``, the assignment ``token * k + choice`` in each row; N * k for an empty row.
      rows: int32 ``[N, m]``, the rows of each token, ascending, M for none. For experts ``m = min(k, G)`` suffices,
        since those of a token are distinct.
      group_sizes: int32 ``[G]``, rows of each group.
    """

    token: Int[Array, " M"]
    assignment: Int[Array, " M"]
    rows: Int[Array, "N m"]
    group_sizes: Int[Array, " G"]


def make_layout(
    groups: Int[Array, "N k"], *, num_groups: int, num_rows: int, rows_per_token: int | None = None
) -> Layout:
    """Sorts assignments by group, stable in the token order.

    Args:
      groups: int32 ``[N, k]``, the group of each assignment, ``num_groups`` for none. At most ``num_rows`` of
        them have one.
      num_groups: G.
      num_rows: M, at most ``N * k``.
      rows_per_token: m, the most rows that a token has; None: ``min(k, G)``, as its groups are distinct.

    Returns:
      A ``Layout``.

    Raises:
      ValueError: if there are fewer assignments than rows.

    Example:
      >>> layout = make_layout(jnp.array([[1], [0], [2], [1]]), num_groups=2, num_rows=4)
      >>> layout.token.tolist(), layout.group_sizes.tolist()
      ([1, 0, 3, 4], [1, 2])
    """
    num_tokens, k = groups.shape
    total = num_tokens * k
    if num_rows > total:
        raise ValueError(f"num_rows must be at most the number of assignments, {total}, got {num_rows}")
    ordered, order = jax.lax.sort_key_val(groups.ravel(), jnp.arange(total, dtype=jnp.int32), is_stable=True)
    bounds = jnp.searchsorted(ordered, jnp.arange(num_groups + 1, dtype=ordered.dtype)).astype(jnp.int32)
    filled = jnp.arange(num_rows, dtype=jnp.int32) < bounds[-1]
    assignment = jnp.where(filled, order[:num_rows], total)
    row = jnp.full((total + 1,), num_rows, jnp.int32)
    # Empty rows all write to the spare last entry, which is cut off.
    row = row.at[assignment].set(jnp.where(filled, jnp.arange(num_rows, dtype=jnp.int32), num_rows))
    most = min(k, num_groups) if rows_per_token is None else rows_per_token
    rows = jnp.sort(row[:total].reshape(num_tokens, k), axis=-1)[:, :most]
    return Layout(assignment // k, assignment, rows, jnp.diff(bounds))


def take_rows(values: Shaped[Array, "X ..."], index: Int[Array, " Y"]) -> Shaped[Array, "Y ..."]:
    """``values[index]``, zero where the index lies past the end."""
    return jnp.asarray(values).at[index].get(mode="fill", fill_value=0)


def _sum(terms: Iterator[Array]) -> Array:
    """In the order of the terms, so the same bits on every run."""
    return functools.reduce(jnp.add, terms)


@jax.custom_vjp
def gather_rows(tokens: Float[Array, "N D"], layout: Layout) -> Float[Array, "M D"]:
    """Copies each token to its rows; empty rows are zero. The VJP is a gather too: each token sums its rows."""
    return take_rows(tokens, layout.token)


gather_rows.defvjp(
    lambda tokens, layout: (take_rows(tokens, layout.token), layout),
    lambda layout, cotangent: (_sum(take_rows(cotangent, rows) for rows in layout.rows.T), None),
)


@jax.custom_vjp
def combine_rows(values: Float[Array, "M D"], weights: Float[Array, " M"], layout: Layout) -> Float[Array, "N D"]:
    """Sums the rows of each token with their weights, in float32; a token without rows gets exact zeros.

    The VJP has no scatter of width D: the gradient of the rows is a gather, that of the weights a product of each
    token's cotangent with its rows.
    """
    return _combine_rows(values, weights, layout)


def _combine_rows(values: Array, weights: Array, layout: Layout) -> Array:
    # Product by product, so that no array of weighted rows exists.
    return _sum(
        take_rows(values, rows).astype(jnp.float32) * take_rows(weights, rows)[:, None] for rows in layout.rows.T
    )


def _combine_rows_bwd(residuals: tuple[Array, Array, Layout], cotangent: Array) -> tuple[Array, Array, None]:
    values, weights, layout = residuals
    d_values = (take_rows(cotangent, layout.token) * weights[:, None]).astype(values.dtype)
    d_by_token = jnp.stack(
        [(cotangent * take_rows(values, rows).astype(jnp.float32)).sum(-1) for rows in layout.rows.T]
    )
    d_weights = jnp.zeros_like(weights).at[layout.rows.T].set(d_by_token, mode="drop", unique_indices=True)
    return d_values, d_weights, None


combine_rows.defvjp(lambda *args: (_combine_rows(*args), args), _combine_rows_bwd)
