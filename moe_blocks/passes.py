"""How often a rank goes through its buffers: in chunks of its tokens, or in turns of its assignments.

Both keep the buffers small. The number of chunks is static, and each takes some of the tokens. The number of turns is
found at run time, and each takes all tokens but only as many of their assignments as fit; most often there is one.

Symbols: ``T`` tokens of this rank, ``k`` choices, ``D`` width, ``E`` experts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

PyTree = Any
# (variables, tokens [T, D], weights [T, k], experts [T, k], E for none) -> float32 [T, D]
OnePass = Callable[[PyTree, Array, Array, Array], Array]
# (what has a gradient, the rest, number of the turn) -> float32 [T, D]
Serve = Callable[[Any, Any, int | Array], Array]


def in_chunks(
    one_pass: OnePass,
    variables: PyTree,
    tokens: Float[Array, "T D"],
    weights: Float[Array, "T k"],
    experts: Int[Array, "T k"],
    *,
    chunks: int,
    num_experts: int,
) -> Float[Array, "T D"]:
    """Serves consecutive parts of the tokens one after the other.

    Args:
      one_pass: pure; called on ``ceil(T / chunks)`` tokens, the last of which may be padding without experts.
      variables: of the experts.
      tokens: ``[T, D]``.
      weights: float32 ``[T, k]``.
      experts: int32 ``[T, k]``, E for none.
      chunks: how many parts, at most T.
      num_experts: E.

    Returns:
      float32 ``[T, D]``.
    """
    size = -(-tokens.shape[0] // chunks)

    def split(x: Array, fill: int) -> Array:
        padded = jnp.pad(x, ((0, size * chunks - x.shape[0]), (0, 0)), constant_values=fill)
        return padded.reshape(chunks, size, x.shape[1])

    # Rematerialised, or the scan would keep every chunk's buffer for the backward pass.
    body = jax.checkpoint(functools.partial(one_pass, variables), prevent_cse=False)
    parts = split(tokens, 0), split(weights, 0), split(experts, num_experts)
    _, out = jax.lax.scan(lambda _, part: (None, body(*part)), None, parts)
    return out.reshape(size * chunks, -1)[: tokens.shape[0]]


def in_turns(
    first: OnePass,
    further: OnePass,
    variables: PyTree,
    tokens: Float[Array, "T D"],
    weights: Float[Array, "T k"],
    experts: Int[Array, "T k"],
    turn: Int[Array, "T k"],
    turns: Int[Array, ""],
    *,
    num_experts: int,
) -> Float[Array, "T D"]:
    """Serves the assignments turn by turn and adds up what each token gets.

    The first turn is differentiated as usual. Further ones, if there are any, keep nothing for the backward pass, which
    runs them again: memory does not grow with the number of turns, and none of this costs anything when there is one.

    Args:
      first: pure; called on all tokens, with the experts of the first turn.
      further: likewise, of each other turn.
      variables: of the experts.
      tokens: ``[T, D]``.
      weights: float32 ``[T, k]``.
      experts: int32 ``[T, k]``, E for none.
      turn: int32 ``[T, k]``, the turn of each assignment, from 0.
      turns: int32 scalar, how many there are, at least 1; equal on all ranks that communicate in a pass.
      num_experts: E.

    Returns:
      float32 ``[T, D]``.
    """
    leaves, structure = jax.tree.flatten(variables)
    trained = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves]
    parts = [[leaf for leaf, t in zip(leaves, trained, strict=True) if t is wanted] for wanted in (True, False)]

    def serving(one_pass: OnePass) -> Serve:
        def serve(args: tuple[Any, ...], fixed: tuple[Any, ...], number: int | Array) -> Array:
            """One turn, as a function of what has a gradient, and of the rest."""
            trained_leaves, tokens, weights = args
            fixed_leaves, experts, turn = fixed
            merged = (iter(trained_leaves), iter(fixed_leaves))
            whole = jax.tree.unflatten(structure, [next(merged[0] if t else merged[1]) for t in trained])
            return one_pass(whole, tokens, weights, jnp.where(turn == number, experts, num_experts))

        return serve

    args = parts[0], tokens, weights
    return _served(serving(first), serving(further), args, (parts[1], experts, turn), turns)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _served(first: Serve, further: Serve, args: Any, fixed: Any, turns: Int[Array, ""]) -> Float[Array, "T D"]:
    return _served_fwd(first, further, args, fixed, turns)[0]


def _served_fwd(first: Serve, further: Serve, args: Any, fixed: Any, turns: Array) -> tuple[Array, Any]:
    nothing = jax.tree.map(lambda out: jnp.zeros(out.shape, out.dtype), jax.eval_shape(first, args, fixed, 0))
    rest = jax.lax.fori_loop(1, turns, lambda i, out: out + further(args, fixed, i), nothing)
    # The first turn comes last, or what it keeps for the backward pass would lie beside the buffers of the others.
    args, rest = jax.lax.optimization_barrier((args, rest))
    out, pull_back = jax.vjp(lambda args: first(args, fixed, 0), args)
    return out + rest, (pull_back, args, fixed, turns)


def _served_bwd(first: Serve, further: Serve, residuals: Any, cotangent: Array) -> tuple[Any, None, None]:
    pull_back, args, fixed, turns = residuals

    def add_turn(i: Array, gradients: Any) -> Any:
        (more,) = jax.vjp(lambda args: further(args, fixed, i), args)[1](cotangent)
        return jax.tree.map(jnp.add, gradients, more)

    (gradients,) = pull_back(cotangent)
    return jax.lax.fori_loop(1, turns, add_turn, gradients), None, None


_served.defvjp(_served_fwd, _served_bwd)
