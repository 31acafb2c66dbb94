"""What no layer can do without: its matrix products, as one dense expert on all T * k rows, and its kernels."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from benchmarks.peers.compiled import MODES, Compiled, Params
from benchmarks.peers.problem import Problem, Shape, draw

LEAVES = ("wi_0", "wi_1", "wo")
KERNELS = "kernels "  # before the name of the layer whose kernels they are


def expert(params: Params, x: jax.Array) -> jax.Array:
    """``(silu(x wi_0) * (x wi_1)) wo`` with the parameters of the one expert."""
    wi_0, wi_1, wo = (params[name][0] for name in LEAVES)
    rows = x.reshape(-1, x.shape[-1])
    return ((jax.nn.silu(rows @ wi_0) * (rows @ wi_1)) @ wo).reshape(x.shape)


def limit(shape: Shape, dtype: str, modes: tuple[str, ...] = MODES) -> Compiled:
    """The limit of a layer of this shape; its own oracle is that of a layer with one expert."""
    return Compiled("limit", expert, draw(shape.dense, dtype=dtype), leaves=LEAVES, modes=modes)


def touch(params: Params, x: jax.Array) -> jax.Array:
    """Reads every kernel; its gradient reads them again and writes one of the same size."""
    squares = [jnp.square(params[name].astype(jnp.float32)).sum() for name in LEAVES]
    return x + jnp.stack(squares).sum().astype(x.dtype)


def kernels(problem: Problem, name: str) -> Compiled:
    """The memory traffic of the kernels of a layer, which grows with their number. It is held to no oracle."""
    return Compiled(KERNELS + name, touch, problem, leaves=LEAVES)
