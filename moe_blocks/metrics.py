"""Load and drop figures of one MoE layer: pure, padding excluded."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from moe_blocks.losses import expert_load
from moe_blocks.routing import Routing, valid_assignments


def max_violation(load: Int[Array, " E"]) -> Float[Array, ""]:
    """``max_i c_i / mean(c) - 1``: 0 when balanced, ``E/k - 1`` at worst; 0 without tokens.

    References:
      MaxVio, arXiv 2408.15664, eq. 4.
    """
    counts = load.astype(jnp.float32)
    return jnp.where(counts.sum() > 0, counts.max() / jnp.maximum(counts.mean(), 1e-9) - 1, 0)


def layer_metrics(
    routing: Routing, kept: Bool[Array, "*tokens k"], token_mask: Bool[Array, "*tokens"] | None
) -> dict[str, Array]:
    """Summarises one layer.

    Args:
      routing: of the layer.
      kept: bool ``[..., k]``, assignments that were served.
      token_mask: bool ``[...]``, True = real token.

    Returns:
      ``load``: int32 ``[E]``, assignments to each expert before any drop. ``dropped``: int32, assignments that
      were not served. ``dropped_weight``: float32, the share of all router weight that they carried.
      ``entropy``: float32, mean entropy of the router scores, in nats. ``max_violation``: float32.
    """
    valid = valid_assignments(routing.indices, token_mask)
    lost = valid & ~kept
    load = expert_load(routing.indices, num_experts=routing.scores.shape[-1], token_mask=token_mask)
    scores = jnp.where(valid[..., :1], routing.scores, 0)
    # x log x is 0 at 0; log of a masked or vanished score never enters.
    entropies = -jnp.where(scores > 0, scores * jnp.log(jnp.where(scores > 0, scores, 1)), 0).sum(-1)
    total_weight = jnp.where(valid, routing.weights, 0).sum()
    return {
        "load": load,
        "dropped": lost.sum(dtype=jnp.int32),
        "dropped_weight": jnp.where(lost, routing.weights, 0).sum() / jnp.maximum(total_weight, 1e-9),
        "entropy": entropies.sum() / jnp.maximum(valid[..., 0].sum(), 1).astype(jnp.float32),
        "max_violation": max_violation(load),
    }
