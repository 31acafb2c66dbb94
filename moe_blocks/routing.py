"""Token-choice routing: pure functions on logits, and the frozen config that describes a router.

Symbols: ``E`` experts, ``k`` experts per token; ``...`` is any shape of tokens. Everything is float32.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

# Added to the sum of the selected scores before dividing, as DeepSeek-V3, Megatron-LM and TransformerEngine do.
NORM_EPS = 1e-20


class Routing(NamedTuple):
    """Which experts each token chose, and with which weight.

    Attributes:
      indices: int32 ``[..., k]``, distinct experts of each token, best first.
      weights: float32 ``[..., k]``, combine weights; the gradient of the router flows through them.
      scores: float32 ``[..., E]``, non-negative and summing to one over the experts: what the
        load-balancing loss averages. Free of bias, scaling and top-k.
      logits: float32 ``[..., E]``, raw logits: what the z-loss takes.
    """

    indices: Int[Array, "*tokens k"]
    weights: Float[Array, "*tokens k"]
    scores: Float[Array, "*tokens E"]
    logits: Float[Array, "*tokens E"]


def _sigmoid_shares(logits: Float[Array, "*tokens E"]) -> Float[Array, "*tokens E"]:
    scores = jax.nn.sigmoid(logits)
    return scores / (scores.sum(-1, keepdims=True) + NORM_EPS)


class ScoreFunction(NamedTuple):
    """One family of router scores.

    Attributes:
      scores: logits to selection scores and unnormalised combine weights.
      shares: logits to scores that sum to one over the experts, for the load-balancing loss.
      post_top_k: normaliser of the selected logits, for families that may select first; else None.
    """

    scores: Callable[[Array], Array]
    shares: Callable[[Array], Array]
    post_top_k: Callable[[Array], Array] | None


SCORE_FUNCTIONS = {
    "softmax": ScoreFunction(jax.nn.softmax, jax.nn.softmax, jax.nn.softmax),
    "sigmoid": ScoreFunction(jax.nn.sigmoid, _sigmoid_shares, None),
}


@dataclasses.dataclass(frozen=True)
class Router:
    """How logits become chosen experts and combine weights.

    Attributes:
      score_function: ``"softmax"`` or ``"sigmoid"``.
      use_pre_softmax: True: scores over all experts, then top-k (Switch, Qwen, DeepSeek). False: top-k of
        the logits, then a softmax over the k chosen ones (equal to True with ``norm_topk_prob``).
      norm_topk_prob: divide the k selected weights by their sum.
      scaling_factor: multiplies the weights, after the normalisation.
      expert_bias: add a learned-by-rule bias to the scores for *selection only*. It lives in the collection
        ``moe_state`` and moves by ``bias_update_rate`` once per step (arXiv 2408.15664).
      bias_update_rate: step of the sign rule, in units of the score.
      jitter: while training, multiply the router's input (not the experts') by ``U(1 - jitter, 1 + jitter)``.

    Raises:
      ValueError: for an unknown score function, a number out of range, or a combination without a meaning.

    Example:
      >>> mixtral = Router(norm_topk_prob=True)
      >>> deepseek_v3 = Router(score_function="sigmoid", norm_topk_prob=True, scaling_factor=2.5, expert_bias=True)
    """

    score_function: str = "softmax"
    use_pre_softmax: bool = True
    norm_topk_prob: bool = False
    scaling_factor: float = 1.0
    expert_bias: bool = False
    bias_update_rate: float = 1e-3
    jitter: float = 0.0

    def __post_init__(self) -> None:
        if self.score_function not in SCORE_FUNCTIONS:
            raise ValueError(
                f"Router.score_function must be one of {sorted(SCORE_FUNCTIONS)}, got {self.score_function!r}"
            )
        if not self.use_pre_softmax and SCORE_FUNCTIONS[self.score_function].post_top_k is None:
            raise ValueError(
                "Router.use_pre_softmax=False needs score_function='softmax', "
                f"got {self.score_function!r}; leave use_pre_softmax=True"
            )
        if not self.use_pre_softmax and self.expert_bias:
            raise ValueError(
                "Router.expert_bias=True needs use_pre_softmax=True: a bias is measured in units of the "
                "scores over all experts, and raw logits have none"
            )
        if not (math.isfinite(self.scaling_factor) and self.scaling_factor > 0):
            raise ValueError(f"Router.scaling_factor must be finite and above 0, got {self.scaling_factor!r}")
        if not (math.isfinite(self.bias_update_rate) and self.bias_update_rate >= 0):
            raise ValueError(f"Router.bias_update_rate must be finite and at least 0, got {self.bias_update_rate!r}")
        if not 0 <= self.jitter < 1:
            raise ValueError(f"Router.jitter must be in [0, 1), got {self.jitter!r}")


def take_experts(values: Float[Array, "*tokens E"], indices: Int[Array, "*tokens k"]) -> Float[Array, "*tokens k"]:
    """``values[..., indices]`` along the expert axis, as a masked sum.

    Exact, since one term of the sum is not zero. Unlike a gather it has no scatter as its gradient and
    needs no communication however the tokens are sharded; XLA fuses the comparison into the sum.
    """
    chosen = jax.nn.one_hot(indices, values.shape[-1], dtype=bool)
    return jnp.where(chosen, values[..., None, :], 0).sum(-1)


def top_k_indices(scores: Float[Array, "*tokens E"], k: int) -> Int[Array, "*tokens k"]:
    """The ids of the ``k`` largest scores, best first; of equal ones the lower id. Always ``k`` distinct ids.

    ``jax.lax.top_k`` gives the same, but XLA does not split it over a mesh: it first gathers the scores of all
    tokens on every device. These k passes of maximum and mask are split like any elementwise operation.
    """
    # Floats as integers of the same order, so that a mark below every float, -inf included, exists.
    scores = scores.astype(jnp.float32)
    scores = jnp.where(scores == 0, 0.0, scores)  # -0.0 too; XLA leaves out an addition of zero
    bits = jax.lax.bitcast_convert_type(scores, jnp.int32)
    keys = bits ^ ((bits >> 31) & jnp.int32(0x7FFFFFFF))
    ids = jax.lax.broadcasted_iota(jnp.int32, keys.shape, keys.ndim - 1)
    chosen = []
    for _ in range(k):
        best = keys == keys.max(-1, keepdims=True)
        chosen.append(jnp.where(best, ids, keys.shape[-1]).min(-1, keepdims=True))
        keys = jnp.where(ids == chosen[-1], jnp.iinfo(jnp.int32).min, keys)
    return jnp.concatenate(chosen, axis=-1)


def route(
    logits: Float[Array, "*tokens E"],
    router: Router,
    *,
    num_experts_per_tok: int,
    expert_bias: Float[Array, " E"] | None = None,
) -> Routing:
    """Chooses ``k`` experts for each token.

    With scores ``s`` (softmax or sigmoid of the logits) and a bias ``b``: the experts are the top k of
    ``s + b``, the weights are ``s`` of those experts, divided by their sum when ``norm_topk_prob``, times
    ``scaling_factor``. Ties go to the lower expert id.

    Args:
      logits: float32 ``[..., E]``.
      router: the config.
      num_experts_per_tok: k, at most E.
      expert_bias: float32 ``[E]``, added for selection only; gets no gradient.

    Returns:
      A ``Routing``.

    Raises:
      ValueError: if k is not in 1..E.

    Example:
      >>> logits = jnp.log(jnp.array([[4.0, 3.0, 2.0, 1.0]]))
      >>> routing = route(logits, Router(), num_experts_per_tok=2)
      >>> routing.indices.tolist(), [round(float(w), 4) for w in routing.weights[0]]
      ([[0, 1]], [0.4, 0.3])

    References:
      Switch, arXiv 2101.03961, eq. 2; Mixtral, arXiv 2401.04088, section 2.1; DeepSeek-V3, arXiv 2412.19437,
      eq. 12-16 (bias for selection only).
    """
    num_experts = logits.shape[-1]
    if not 1 <= num_experts_per_tok <= num_experts:
        raise ValueError(f"num_experts_per_tok must be in 1..num_experts={num_experts}, got {num_experts_per_tok}")
    logits = logits.astype(jnp.float32)
    family = SCORE_FUNCTIONS[router.score_function]
    scores = family.scores(logits)
    # The order of pre-softmax scores is that of the logits, but a bias is added to scores; sort what was asked for.
    preference = scores if expert_bias is None else scores + jnp.broadcast_to(expert_bias, scores.shape)
    if not router.use_pre_softmax:
        preference = logits
    indices = top_k_indices(jax.lax.stop_gradient(preference), num_experts_per_tok)
    if router.use_pre_softmax:
        weights = take_experts(scores, indices)
    else:
        assert family.post_top_k is not None  # refused by Router
        weights = family.post_top_k(take_experts(logits, indices))
    if router.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdims=True) + NORM_EPS)
    return Routing(indices, weights * router.scaling_factor, family.shares(logits), logits)


def check_routing(routing: Routing, tokens: tuple[int, ...], *, num_experts: int, num_experts_per_tok: int) -> None:
    """Raises a ``ValueError`` that names the field if a router of one's own returns another shape or dtype."""
    wanted = {
        "indices": ((*tokens, num_experts_per_tok), jnp.int32),
        "weights": ((*tokens, num_experts_per_tok), jnp.float32),
        "scores": ((*tokens, num_experts), jnp.float32),
        "logits": ((*tokens, num_experts), jnp.float32),
    }
    for name, (shape, dtype) in wanted.items():
        field = getattr(routing, name)
        got = None if field is None else (jnp.shape(field), jnp.result_type(field))
        if got != (shape, jnp.dtype(dtype)):
            raise ValueError(
                f"route must return {name} of {jnp.dtype(dtype).name}{list(shape)}, got {got}; a router without logits "
                "returns zero logits and uniform scores, 1 / num_experts"
            )


def jitter(key: PRNGKeyArray, x: Float[Array, "*tokens D"], eps: float) -> Float[Array, "*tokens D"]:
    """Multiplies ``x`` by uniform noise in ``[1 - eps, 1 + eps]``, drawn in float32.

    References:
      Switch, arXiv 2101.03961, appendix C (input jitter); applied to a copy, so that experts see clean tokens.
    """
    noise = jax.random.uniform(key, x.shape, jnp.float32, 1 - eps, 1 + eps)
    return x.astype(jnp.float32) * noise


def valid_assignments(
    indices: Int[Array, "*tokens k"], token_mask: Bool[Array, "*tokens"] | None
) -> Bool[Array, "*tokens k"]:
    """Which (token, choice) pairs exist: all of a real token, none of a padding token."""
    if token_mask is None:
        return jnp.ones(indices.shape, bool)
    return jnp.broadcast_to(token_mask[..., None], indices.shape)
