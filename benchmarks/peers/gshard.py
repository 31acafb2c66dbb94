"""One-hot dispatch as in GShard: masks of ``[S, E, C]`` for each sequence, moved and applied by einsum.

Symbols: ``B`` sequences of ``S`` tokens, ``D`` width, ``E`` experts, ``k`` per token, ``C`` slots of an expert for one
sequence.

References:
  GShard, arXiv 2006.16668, algorithm 1. Its groups are sequences here; tokens are served in order, as MaxText does,
  and not all first choices before the second ones.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from benchmarks.peers.compiled import MODES, Compiled, Layer, Params
from benchmarks.peers.problem import Problem, keep_per_sequence, per_sequence_slots


def layer(k: int, slots: int) -> Layer:
    """The layer with k choices and a fixed number of slots."""

    def apply(params: Params, x: jax.Array) -> jax.Array:
        logits = jnp.einsum("bsd,de->bse", x.astype(jnp.float32), params["gate"].astype(jnp.float32))
        chosen, ids = jax.lax.top_k(logits, k)
        weights = jax.nn.softmax(chosen)
        experts = jax.nn.one_hot(ids, logits.shape[-1], dtype=jnp.float32)  # [B, S, k, E]
        # A token chooses an expert once at most, so the choices of one token do not wait for each other.
        wanted = experts.sum(2)
        slot = (jnp.cumsum(wanted, axis=1) - wanted).astype(jnp.int32)
        weight = jnp.einsum("bske,bsk->bse", experts, weights)
        # Past the last slot the one-hot is all zeros: dropped.
        dispatch = (jax.nn.one_hot(slot, slots) * wanted[..., None]).astype(x.dtype)  # [B, S, E, C]
        combine = dispatch * weight[..., None].astype(x.dtype)
        rows = jnp.einsum("bsec,bsd->ebcd", dispatch, x)
        inner = jax.nn.silu(jnp.einsum("ebcd,edf->ebcf", rows, params["wi_0"]))
        inner = inner * jnp.einsum("ebcd,edf->ebcf", rows, params["wi_1"])
        return jnp.einsum("bsec,ebcd->bsd", combine, jnp.einsum("ebcf,efd->ebcd", inner, params["wo"]))

    return apply


def gshard(problem: Problem, factor: float = 1.25, modes: tuple[str, ...] = MODES) -> Compiled:
    """The contestant at a capacity factor."""
    slots = per_sequence_slots(problem.shape, factor)
    apply = layer(problem.shape.k, slots)
    return Compiled(f"gshard {factor:g}", apply, problem, keep=keep_per_sequence(slots), modes=modes)
