"""Grouped matrix product: one function, several implementations.

Rows ``[start_e, start_e + group_sizes[e])`` of the left side meet matrix ``e`` of the right side. Symbols: ``M``
rows, ``K`` inner, ``N`` outer width, ``E`` groups.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_blocks.grouped_matmul.base import Implementation
from moe_blocks.grouped_matmul.blocked import BLOCKED
from moe_blocks.grouped_matmul.ragged_dot import RAGGED_DOT
from moe_blocks.grouped_matmul.tokamax import TOKAMAX
from moe_blocks.mesh import platform

Result = TypeVar("Result")

IMPLEMENTATIONS = {"blocked": BLOCKED, "ragged_dot": RAGGED_DOT, "tokamax": TOKAMAX}
# Tried in this order.
PREFERRED = {"tpu": ("ragged_dot", "blocked"), "gpu": ("tokamax", "blocked")}
PREFERRED_ELSEWHERE = ("blocked", "ragged_dot")


def check_implementation(implementation: str | None) -> None:
    """Raises ``ValueError`` unless ``implementation`` is None or a known name."""
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation must be None (best for the platform) or one of {sorted(IMPLEMENTATIONS)}, "
            f"got {implementation!r}"
        )


@functools.cache
def _say_once(text: str) -> None:
    warnings.warn(text, stacklevel=4)


def serve(implementation: str | None, call: Callable[[str], Result]) -> Result:
    """Returns ``call(name)`` of the best implementation that can serve.

    When it is not the first choice for the platform, a warning says why, once in a process.

    Args:
      implementation: a name, which alone is tried, or None for those that suit the platform.
      call: raises ``NotImplementedError``, with the reason, if the named implementation cannot serve.

    Raises:
      ValueError: if the name is unknown.
      NotImplementedError: if none can serve; the reasons are listed.
    """
    check_implementation(implementation)
    preferred = PREFERRED.get(platform(), PREFERRED_ELSEWHERE)
    reasons: list[str] = []
    for name in preferred if implementation is None else (implementation,):
        try:
            result = call(name)
        except NotImplementedError as reason:
            reasons.append(f"{name}: {reason}")
            continue
        if reasons:
            _say_once(f"the experts run on {name!r}, which is slower here ({'; '.join(reasons)})")
        return result
    raise NotImplementedError("no implementation of grouped_matmul can serve: " + "; ".join(reasons))


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
        own. ``"tokamax"``: kernels for GPU, when installed. None: the best for the platform.

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
    lhs, rhs, group_sizes = jnp.asarray(lhs), jnp.asarray(rhs), jnp.asarray(group_sizes)
    if lhs.ndim != 2 or rhs.ndim != 3 or lhs.shape[1] != rhs.shape[1] or group_sizes.shape != rhs.shape[:1]:
        raise ValueError(
            "grouped_matmul needs lhs [M, K], rhs [E, K, N] and group_sizes [E], got "
            f"{lhs.shape}, {rhs.shape} and {group_sizes.shape}"
        )
    if lhs.dtype != rhs.dtype:
        raise ValueError(f"lhs and rhs must have one dtype, got {lhs.dtype} and {rhs.dtype}; cast one of them")
    return serve(implementation, lambda name: _grouped(IMPLEMENTATIONS[name], lhs, rhs, group_sizes))
