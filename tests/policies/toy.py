"""Tiny training steps for the tests: each batch brings its own demand, and a drop really changes the parameters."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moe_blocks.capacity import Capacity, CapacitySpec

ROWS = 32
# balanced 4, dropless 32: the geometric ladder from factor 1 is 4, 8, 16, 32.
SPEC = CapacitySpec(tokens_per_rank=4, num_experts=8, num_experts_per_tok=1, ep_size=8, multiple_of=1)


def state_of_every_kind(seed: int = 0) -> dict[str, Any]:
    """A training state with every kind of leaf that a library may put there."""
    key = jax.random.key(seed)
    params = {"w": jax.random.normal(key, (ROWS,)), "half": jnp.full((3,), 0.5, jnp.bfloat16)}
    return {
        "params": params,
        "optimiser": (jnp.zeros((ROWS,)), jnp.zeros((), jnp.int32)),
        "ema": params["w"],  # the same array twice: a buffer can be donated only once
        "step": 0,  # a Python int, weakly typed
        "bias": np.zeros(4, np.float32),
        "empty": jnp.zeros((0, 3)),
        "key": key,
        "raw_key": jax.random.key_data(key),
        "flags": jnp.array([True, False]),
    }


def step(state: dict[str, Any], batch: dict[str, Any], *, capacity: Capacity) -> tuple[Any, Any, Any]:
    """The first ``demand`` rows of the batch are real; those beyond the slots are dropped. Changes every leaf.

    Every product is exact (one factor is a power of two), so that two programs that contract a product and a sum
    differently agree to the bit.
    """
    slots = ROWS if capacity.slots is None else capacity.slots
    position = jnp.arange(ROWS)
    kept = (position < batch["demand"]) & (position < slots)
    moment, count = state["optimiser"]
    noise = jax.random.normal(jax.random.fold_in(state["key"], state["step"]), (ROWS,))
    grad = jnp.where(kept, batch["x"], 0.0) * jnp.cos(state["params"]["w"]) + 0.0625 * noise
    moment = 0.5 * moment + grad
    w = state["params"]["w"] - 0.125 * moment
    new_state = {
        "params": {"w": w, "half": state["params"]["half"] + jnp.bfloat16(0.25)},
        "optimiser": (moment, count + 1),
        "ema": 0.5 * state["ema"] + 0.5 * w,
        "step": state["step"] + 1,
        "bias": state["bias"] + jnp.sign(grad[:4]),
        "empty": state["empty"],
        "key": jax.random.fold_in(state["key"], 7),
        "raw_key": state["raw_key"] + jnp.uint32(1),
        "flags": ~state["flags"],
    }
    metrics = {"loss": jnp.sum(jnp.where(kept, batch["x"], 0.0) * w), "step": state["step"], "w": w}
    return new_state, {"moe": jnp.asarray(batch["demand"], jnp.int32)[None]}, metrics


def batches(*demands: int, seed: int = 0) -> list[dict[str, Any]]:
    """One batch per demand, as NumPy arrays."""
    rng = np.random.default_rng(seed)
    return [{"x": rng.choice(np.float32([-1, -0.5, 0.5, 1]), ROWS), "demand": np.int32(demand)} for demand in demands]


def by_hand(slots: int | None, *demands: int) -> tuple[Any, list[Any]]:
    """The same training in a plain loop at one capacity: what every retry must amount to."""
    plain = jax.jit(lambda state, batch: step(state, batch, capacity=Capacity(slots)))
    state, metrics = state_of_every_kind(), []
    for batch in batches(*demands):
        state, _, metric = plain(state, batch)
        metrics.append(metric)
    return state, metrics


def bits(tree: Any) -> list[Any]:
    """Every leaf as a NumPy array, to be compared bit for bit; typed keys as their data."""

    def host(leaf: Any) -> np.ndarray:
        is_key = jnp.issubdtype(jax.typeof(leaf).dtype, jax.dtypes.prng_key)
        return np.array(jax.random.key_data(leaf) if is_key else leaf)

    return [host(leaf) for leaf in jax.tree.leaves(tree)]


def same_bits(left: Any, right: Any) -> bool:
    """Whether two trees hold the same bytes, dtypes and shapes."""
    pairs = list(zip(bits(left), bits(right), strict=True))
    return all(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes() for a, b in pairs)
