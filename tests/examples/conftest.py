from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(scope="module", autouse=True)
def relaxed() -> Iterator[None]:
    """What an example's user has: jax with its own promotion rules, which optax needs. And quick compilation."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        jax.config.update("jax_disable_most_optimizations", True)
        yield
        jax.config.update("jax_disable_most_optimizations", False)
