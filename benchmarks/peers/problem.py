"""The layer that all compute: its sizes, its numbers, and the right answer in float64.

Symbols: ``B`` sequences of ``S`` tokens, ``T = B * S``, ``D`` width, ``F`` width of one expert, ``E`` experts, ``k``
experts per token.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from benchmarks.routings import ROUTINGS, choose, embed, separate

SEQUENCE = 1024  # tokens; a shorter batch is one sequence
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
Arrays = dict[str, np.ndarray]
# Which assignments a layer keeps, [B, S, k], of the chosen ids [B, S, k].
Keep = Callable[[np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of one layer and its batch.

    Example:
      >>> Shape(tokens=4096, width=512, expert_width=1024, experts=8, k=2).sequences
      4
    """

    tokens: int
    width: int
    expert_width: int
    experts: int
    k: int

    @property
    def sequences(self) -> int:
        """B."""
        return max(1, self.tokens // SEQUENCE)

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """``(B, S, D)``."""
        return self.sequences, self.tokens // self.sequences, self.width

    @property
    def param_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of ``gate``, ``wi_0``, ``wi_1`` and ``wo``."""
        inward = (self.experts, self.width, self.expert_width)
        outward = (self.experts, self.expert_width, self.width)
        return {"gate": (self.width, self.experts), "wi_0": inward, "wi_1": inward, "wo": outward}

    @property
    def rows(self) -> int:
        """Assignments, T * k."""
        return self.tokens * self.k

    @property
    def dense(self) -> Shape:
        """One expert on as many rows: the same products without a choice."""
        return Shape(self.rows, self.width, self.expert_width, experts=1, k=1)

    def __str__(self) -> str:
        return f"T={self.tokens} D={self.width} F={self.expert_width} E={self.experts} k={self.k}"


@dataclasses.dataclass(frozen=True)
class Problem:
    """Weights, inputs and the cotangent of the output.

    Attributes:
      shape: the sizes.
      dtype: the name that all arrays are exact in.
      params: ``gate`` ``[D, E]``, ``wi_0`` and ``wi_1`` ``[E, D, F]``, ``wo`` ``[E, F, D]``; float32.
      x: ``[B, S, D]``.
      cotangent: ``[B, S, D]``.
    """

    shape: Shape
    dtype: str
    params: Arrays
    x: np.ndarray
    cotangent: np.ndarray

    @functools.cached_property
    def on_device(self) -> tuple[dict[str, jax.Array], jax.Array, jax.Array]:
        """Parameters, input and cotangent in ``dtype``, shared by all contestants."""
        return jax.tree.map(lambda array: jnp.asarray(array, self.dtype), (self.params, self.x, self.cotangent))


def draw(shape: Shape, *, routing: str = "balanced", dtype: str = "float32", seed: int = 0) -> Problem:
    """A problem whose router chooses by one of `ROUTINGS`; every array but the router's has about unit gain."""
    rng = np.random.default_rng(seed)
    sequences, tokens, width = shape.input_shape
    logits = ROUTINGS[routing](rng, sequences, tokens, shape.experts, shape.k)
    x, gate = embed(rng, separate(logits, shape.k), width)

    def exact(array: np.ndarray) -> np.ndarray:
        return array.astype(DTYPES[dtype]).astype(np.float32)

    params = {"gate": exact(gate)}
    for name, size in shape.param_shapes.items():
        if name not in params:
            params[name] = exact(rng.standard_normal(size, np.float32) / np.float32(math.sqrt(size[1])))
    return Problem(shape, dtype, params, exact(x), exact(rng.standard_normal(x.shape, np.float32)))


def keep_all(ids: np.ndarray) -> np.ndarray:
    """A dropless layer's choice."""
    return np.ones(ids.shape, bool)


def first_come(buffers: np.ndarray, slots: int) -> np.ndarray:
    """Which of the assignments, in this order, find a free slot in their buffer.

    Example:
      >>> first_come(np.array([0, 1, 0, 0]), 2).tolist()
      [True, True, True, False]
    """
    order = np.argsort(buffers, kind="stable")
    ordered = buffers[order]
    ahead = np.arange(buffers.size) - np.searchsorted(ordered, ordered)
    kept = np.empty(buffers.shape, bool)
    kept[order] = ahead < slots
    return kept


def keep_by_position(slots: int, *, per_expert: bool) -> Keep:
    """As `moe_blocks` on one device: earlier positions first, then sequences, then choices."""

    def keep(ids: np.ndarray) -> np.ndarray:
        turns = ids.transpose(1, 0, 2)
        buffers = turns if per_expert else np.zeros_like(turns)
        return first_come(buffers.ravel(), slots).reshape(turns.shape).transpose(1, 0, 2)

    return keep


def keep_per_sequence(slots: int) -> Keep:
    """As the dense dispatch of MaxText: each sequence has buffers of its own, and serves token by token."""

    def keep(ids: np.ndarray) -> np.ndarray:
        return np.stack([first_come(one.ravel(), slots).reshape(one.shape) for one in ids])

    return keep


def per_sequence_slots(shape: Shape, factor: float) -> int:
    """Slots of an expert for one sequence, as MaxText counts them."""
    return max(1, int(math.ceil(shape.input_shape[1] * shape.k / shape.experts) * factor))


def chosen(problem: Problem) -> np.ndarray:
    """The ids ``[B, S, k]`` that the router chooses."""
    return choose(problem.x.astype(np.float64) @ problem.params["gate"].astype(np.float64), problem.shape.k)


def solve(problem: Problem, kept: np.ndarray) -> Arrays:
    """Output and gradients in float64, expert by expert.

    Args:
      problem: with softmax scores, whose k largest are divided by their sum.
      kept: bool ``[B, S, k]``; the assignments that count.

    Returns:
      ``output``, and the gradients ``x``, ``gate``, ``wi_0``, ``wi_1``, ``wo`` of ``(output * cotangent).sum()``.
    """
    shape = problem.shape
    p = {name: value.astype(np.float64) for name, value in problem.params.items()}
    x, cotangent = (a.astype(np.float64).reshape(shape.tokens, -1) for a in (problem.x, problem.cotangent))
    logits = x @ p["gate"]
    ids, kept = choose(logits, shape.k), kept.reshape(shape.tokens, shape.k)
    weights = np.exp(np.take_along_axis(logits, ids, -1) - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)

    out = {"output": np.zeros_like(x), "x": np.zeros_like(x)} | {name: np.zeros_like(a) for name, a in p.items()}
    d_weights = np.zeros_like(weights)
    for e in range(shape.experts):
        token, choice = np.nonzero((ids == e) & kept)
        rows, weight = x[token], weights[token, choice, None]
        before, side = rows @ p["wi_0"][e], rows @ p["wi_1"][e]
        sigmoid = 1 / (1 + np.exp(-before))
        hidden = before * sigmoid * side
        value = hidden @ p["wo"][e]
        out["output"][token] += weight * value  # the experts of a token are distinct, so no token comes twice
        d_weights[token, choice] = (value * cotangent[token]).sum(-1)
        d_value = weight * cotangent[token]
        d_hidden = d_value @ p["wo"][e].T
        d_before = d_hidden * side * sigmoid * (1 + before * (1 - sigmoid))
        d_side = d_hidden * before * sigmoid
        out["wo"][e] = hidden.T @ d_value
        out["wi_0"][e], out["wi_1"][e] = rows.T @ d_before, rows.T @ d_side
        out["x"][token] += d_before @ p["wi_0"][e].T + d_side @ p["wi_1"][e].T
    d_logits = np.zeros_like(logits)
    centred = d_weights - (weights * d_weights).sum(-1, keepdims=True)
    np.put_along_axis(d_logits, ids, weights * centred, -1)
    out["gate"] = x.T @ d_logits
    out["x"] += d_logits @ p["gate"].T
    return out | {name: out[name].reshape(problem.x.shape) for name in ("output", "x")}


def differences(got: Mapping[str, np.ndarray], want: Mapping[str, np.ndarray]) -> dict[str, float]:
    """The largest difference of each array, relative to the largest entry that it should have.

    Raises:
      ValueError: if an array has another shape than it should have.
    """
    for name, array in got.items():
        if array.shape != want[name].shape:
            raise ValueError(f"{name} must have the shape {want[name].shape}, got {array.shape}")
    return {name: float(np.abs(array - want[name]).max() / np.abs(want[name]).max()) for name, array in got.items()}
