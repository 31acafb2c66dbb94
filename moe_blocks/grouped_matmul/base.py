"""What an implementation of the grouped matrix product consists of."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
from jaxtyping import Array

# The product over rows that the gradient of the matrices is, in the terms of `jax.lax.ragged_dot_general`.
OVER_ROWS = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=(0,), rhs_group_dimensions=()
)


class Implementation(NamedTuple):
    """A grouped product, and the product over rows that the gradient of the matrices is.

    Both accumulate in float32 and return the dtype of lhs. Either may raise ``NotImplementedError`` with the reason
    why it cannot serve.

    Attributes:
      product: ``(lhs [M, K], rhs [E, K, N], group_sizes [E]) -> [M, N]``, zero past the last group, whatever lhs
        holds there.
      outer: ``(lhs [M, K], cotangent [M, N], group_sizes [E]) -> [E, K, N]``, ``lhs_e^T @ cotangent_e`` for each
        group, exactly zero for an empty one; what lies past the last group does not matter.
    """

    product: Callable[[Array, Array, Array], Array]
    outer: Callable[[Array, Array, Array], Array]
