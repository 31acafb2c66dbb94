"""The small layer that the tests of `MoEBlock` share, and how they call it."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from moe_blocks import MoEBlock
from tests.moe_blocks import support

E, K, D, F = 4, 2, 6, 5
BLOCK = MoEBlock(E, K, F)
X = support.bf16_exact(np.random.default_rng(0).normal(size=(8, 3, D)))
KEY = jax.random.key(0)


@functools.partial(jax.jit, static_argnums=0, static_argnames=("capacity", "mutable", "deterministic"))
def apply(
    block: Any, variables: Any, x: Any, mask: Any = None, *, capacity: Any = None, mutable: Any = (), rngs: Any = None,
    deterministic: bool = True,
) -> Any:  # fmt: skip
    mutable = list(mutable) or False
    return block.apply(
        variables, x, capacity=capacity, token_mask=mask, mutable=mutable, rngs=rngs, deterministic=deterministic
    )


@functools.cache
def variables_of(block: MoEBlock) -> Any:
    """Initial values, without the boxes; a mesh changes none of them."""
    plain = block.clone(expert_axis=None, batch_axes=())
    return jax.tree.map(np.asarray, nn.meta.unbox(jax.jit(plain.init)(KEY, X)))


def shapes(tree: Any) -> Any:
    return [(leaf.shape, leaf.dtype.name) for leaf in jax.tree.leaves(tree)]


def flatten(tree: Any) -> list[tuple[str, Any]]:
    is_box = lambda leaf: isinstance(leaf, nn.LogicallyPartitioned)  # noqa: E731
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_box)
    return [("/".join(str(key.key) for key in path), leaf) for path, leaf in leaves]
