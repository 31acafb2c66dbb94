"""A contestant in this process: a pure layer, compiled by jax."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks.peers.problem import Arrays, Keep, Problem, Shape, keep_all

FORWARD, BOTH = MODES = ("forward", "forward+backward")
LEAVES = ("gate", "wi_0", "wi_1", "wo")
Params = Mapping[str, jax.Array]
Layer = Callable[[Params, jax.Array], jax.Array]


def programs(layer: Layer) -> dict[str, Callable]:
    """What is timed, by mode: functions of the parameters, the input and the cotangent of the output.

    The cotangent comes from outside, so no loss and none of its special cases (a gradient that is all ones) is timed.
    """

    def forward(params: Params, x: jax.Array, cotangent: jax.Array) -> jax.Array:
        return layer(params, x)

    def both(params: Params, x: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, tuple[Params, jax.Array]]:
        output, pullback = jax.vjp(layer, params, x)
        return output, pullback(cotangent)

    return {FORWARD: forward, BOTH: both}


class Compiled:
    """A layer compiled for one problem.

    Attributes:
      name: of the contestant.
      problem: whose oracle it is held to.
      keep: which assignments it serves.
      programs: compiled, by mode.
    """

    def __init__(
        self,
        name: str,
        layer: Layer,
        problem: Problem,
        *,
        keep: Keep = keep_all,
        leaves: Sequence[str] = LEAVES,
        modes: Sequence[str] = MODES,
    ) -> None:
        self.name, self.problem, self.keep = name, problem, keep
        params, x, cotangent = problem.on_device
        self._arguments = {leaf: params[leaf] for leaf in leaves}, x, cotangent
        every = programs(layer)
        self.programs = {mode: jax.jit(every[mode]).lower(*self._arguments).compile() for mode in modes}

    @property
    def temp_bytes(self) -> int:
        """Temporary memory that the largest program asks for."""
        memories = [program.memory_analysis() for program in self.programs.values()]
        return max(memory.temp_size_in_bytes for memory in memories if memory is not None)

    def time(self, mode: str) -> float:
        """Seconds of one run."""
        started = time.perf_counter()
        jax.block_until_ready(self.programs[mode](*self._arguments))
        return time.perf_counter() - started

    def results(self) -> Arrays:
        """Output and gradients, by the names of `problem.solve`."""
        output, (grads, d_x) = self.programs[BOTH](*self._arguments)
        return jax.tree.map(as_float32, {"output": output, "x": d_x} | dict(grads))


def as_float32(array: Any) -> np.ndarray:
    return np.asarray(array).astype(np.float32)


def footprint(layer: Layer, shape: Shape, dtype: str, leaves: Sequence[str] = LEAVES) -> dict[str, float]:
    """What XLA says of forward and backward: temporary bytes, the bytes of its largest array, and FLOPs.

    XLA counts the FLOPs of a loop's body once, however often the loop runs.
    """
    batch = jax.ShapeDtypeStruct(shape.input_shape, dtype)
    params = {leaf: jax.ShapeDtypeStruct(shape.param_shapes[leaf], dtype) for leaf in leaves}
    program = jax.jit(programs(layer)[BOTH]).lower(params, batch, batch).compile()
    memory, text, cost = program.memory_analysis(), program.as_text(), program.cost_analysis()
    assert memory is not None and text is not None and cost is not None
    return {
        "temp_bytes": memory.temp_size_in_bytes,
        "largest_bytes": largest_array(text),
        "flops": cost["flops"],
    }


def largest_array(hlo: str) -> int:
    """Bytes of the largest array that a compiled program speaks of.

    Example:
      >>> largest_array("%a = f32[4,8]{1,0} add(bf16[100]{0} %b, pred[] %c)")
      200
    """
    sizes = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "f64": 8}
    arrays = re.findall(rf"\b({'|'.join(sizes)})\[([\d,]*)\]", hlo)
    return max(sizes[kind] * math.prod(int(n) for n in dims.split(",") if n) for kind, dims in arrays)
