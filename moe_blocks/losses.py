"""Router losses and the expert-bias rule: pure functions, float32, padding excluded.

Each loss is the value before its coefficient. Called on the arrays of the whole batch (under ``jit`` on a mesh
these are global arrays), they are the global losses: their value does not depend on the mesh.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from moe_blocks.routing import Routing


def _mean_over_tokens(
    values: Float[Array, "*tokens E"], token_mask: Bool[Array, "*tokens"] | None
) -> Float[Array, " E"]:
    """Mean over the real tokens; zero when there is none."""
    values = values.astype(jnp.float32)
    axes = tuple(range(values.ndim - 1))
    if token_mask is None:
        return values.mean(axes)
    # `where` and not a product: a padding token may hold NaN.
    total = jnp.where(token_mask[..., None], values, 0).sum(axes)
    return total / jnp.maximum(token_mask.sum(dtype=jnp.int32), 1).astype(jnp.float32)


def expert_load(
    indices: Int[Array, "*tokens k"], *, num_experts: int, token_mask: Bool[Array, "*tokens"] | None = None
) -> Int[Array, " E"]:
    """Counts the assignments that each expert was asked to take, before any drop.

    Args:
      indices: int32 ``[..., k]`` chosen experts.
      num_experts: E.
      token_mask: bool ``[...]``, True = real token.

    Returns:
      int32 ``[E]``, in assignments; sums to k times the number of real tokens.

    Example:
      >>> expert_load(jnp.array([[0, 1], [1, 2]]), num_experts=4).tolist()
      [1, 2, 1, 0]
    """
    chosen = jax.nn.one_hot(indices, num_experts, dtype=bool)  # fused into the sum, never stored
    if token_mask is not None:
        chosen &= token_mask[..., None, None]
    return chosen.sum(tuple(range(chosen.ndim - 1)), dtype=jnp.int32)


def load_balancing_loss(
    scores: Float[Array, "*tokens E"],
    indices: Int[Array, "*tokens k"],
    *,
    token_mask: Bool[Array, "*tokens"] | None = None,
) -> Float[Array, ""]:
    """The load-balancing loss of top-k routing, one at uniform scores for every k.

    ``L = E * sum_i f_i P_i`` with ``f_i`` = (assignments to i before drops) / (k * tokens), which carries no
    gradient, and ``P_i`` = mean of ``scores[..., i]`` over the tokens.

    Args:
      scores: float32 ``[..., E]``, summing to one over the experts.
      indices: int32 ``[..., k]`` chosen experts, the real selection with bias and groups.
      token_mask: bool ``[...]``, True = real token.

    Returns:
      float32 scalar. Multiply by a coefficient (1e-2 in Switch).

    Example:
      >>> float(load_balancing_loss(jnp.full((8, 4), 0.25), jnp.zeros((8, 1), jnp.int32)))
      1.0

    References:
      Switch, arXiv 2101.03961, eq. 4-6, divided by k so that a coefficient means the same for every k.
      The scope is the whole batch: a mean of per-shard products is another loss (NVIDIA/Megatron-LM#1652).
    """
    num_experts, k = scores.shape[-1], indices.shape[-1]
    load = expert_load(indices, num_experts=num_experts, token_mask=token_mask).astype(jnp.float32)
    fraction = load / jnp.maximum(load.sum(), k)
    return num_experts * jnp.sum(fraction * _mean_over_tokens(scores, token_mask))


def router_z_loss(
    logits: Float[Array, "*tokens E"], *, token_mask: Bool[Array, "*tokens"] | None = None
) -> Float[Array, ""]:
    """Mean squared logsumexp of the raw router logits.

    ``L_z = (1/T) sum_t (log sum_i exp x[t, i])^2`` over the real tokens, in float32 with a stable logsumexp.

    Args:
      logits: ``[..., E]`` raw logits.
      token_mask: bool ``[...]``, True = real token.

    Returns:
      float32 scalar. Multiply by a coefficient (1e-3 in ST-MoE).

    Example:
      >>> round(float(router_z_loss(jnp.zeros((3, 2)))), 5)
      0.48045

    References:
      ST-MoE, arXiv 2202.08906, eq. 5.
    """
    if token_mask is not None:  # ahead of the logsumexp too, whose gradient would be NaN * 0
        logits = jnp.where(token_mask[..., None], logits, 0)
    z = jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1, keepdims=True)
    return _mean_over_tokens(jnp.square(z), token_mask)[0]


def router_loss(
    routing: Routing, token_mask: Bool[Array, "*tokens"] | None, *, aux_loss_coeff: float, z_loss_coeff: float
) -> Float[Array, ""]:
    """The weighted sum of `load_balancing_loss` and `router_z_loss`; exactly 0, at no cost, without coefficients."""
    loss = jnp.float32(0)
    if aux_loss_coeff:
        loss += aux_loss_coeff * load_balancing_loss(routing.scores, routing.indices, token_mask=token_mask)
    if z_loss_coeff:
        loss += z_loss_coeff * router_z_loss(routing.logits, token_mask=token_mask)
    return loss


def update_expert_bias(expert_bias: Float[Array, " E"], load: Int[Array, " E"], *, rate: float) -> Float[Array, " E"]:
    """Moves the selection bias one step towards a balanced load.

    ``b_i += rate * sign(mean(c) - c_i)``, with ``sign(0) = 0``. Call it once per optimiser step, with the counts
    of the whole global batch; with gradient accumulation, with their sum over the micro-batches.

    Args:
      expert_bias: float32 ``[E]``.
      load: int32 ``[E]``, assignments per expert before drops, of real tokens (``expert_load``).
      rate: step size u, 1e-3 in the paper.

    Returns:
      float32 ``[E]``.

    Example:
      >>> update_expert_bias(jnp.array([0.5, -0.5]), jnp.array([6, 2]), rate=0.001).tolist()
      [0.49900001287460327, -0.49900001287460327]

    References:
      Auxiliary-loss-free load balancing, arXiv 2408.15664, algorithm 1.
    """
    # c < mean iff c < ceil(mean), c > mean iff c > floor(mean): exact in int32, where E * c could overflow.
    num_experts, total = load.shape[0], load.sum()
    below = load < -(-total // num_experts)
    above = load > total // num_experts
    direction = below.astype(jnp.float32) - above.astype(jnp.float32)
    return expert_bias + jnp.float32(rate) * direction
