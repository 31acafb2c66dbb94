"""The limit: the matrix products of a layer and nothing else, as one dense expert on all T * k rows."""

from __future__ import annotations

import jax

from benchmarks.peers.compiled import MODES, Compiled, Params
from benchmarks.peers.problem import Shape, draw

LEAVES = ("wi_0", "wi_1", "wo")


def expert(params: Params, x: jax.Array) -> jax.Array:
    """``(silu(x wi_0) * (x wi_1)) wo`` with the parameters of the one expert."""
    wi_0, wi_1, wo = (params[name][0] for name in LEAVES)
    rows = x.reshape(-1, x.shape[-1])
    return ((jax.nn.silu(rows @ wi_0) * (rows @ wi_1)) @ wo).reshape(x.shape)


def limit(shape: Shape, dtype: str, modes: tuple[str, ...] = MODES) -> Compiled:
    """The limit of a layer of this shape; its own oracle is that of a layer with one expert."""
    return Compiled("limit", expert, draw(shape.dense, dtype=dtype), leaves=LEAVES, modes=modes)
