"""Shapes, dtypes and signatures of the three public functions, and what they refuse."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from moe_blocks import Handle, ep_combine, ep_dispatch, ep_prepare
from tests.moe_blocks.support import on
from tests.moe_blocks.test_expert_parallel import MESHES, exchanged, mapped


def test_shapes_and_dtypes() -> None:
    ids = np.zeros((8, 3, 2), int) + np.arange(2)
    counts, total, kept, rows, out = exchanged("2x4", ids, E=8, slots=5)
    assert (counts.shape, counts.dtype) == ((16,), np.int32)
    assert (total.shape, total.dtype) == ((8,), np.int32)
    assert (kept.shape, kept.dtype) == (ids.shape, np.bool_)
    assert (rows.tokens.shape, rows.weights.shape, rows.weights.dtype) == ((40, 2), (40,), np.float32)
    assert out.shape == (8, 3, 2)
    assert exchanged("2x4", ids, E=8, slots=2, scope="expert")[1].shape == (16,)


def test_buffers_hold_the_slots_and_no_more() -> None:
    ids = np.array([[0, 1], [1, 2], [2, 3]])
    for slots, scope, num_rows in ((None, "rank", 6), (4, "rank", 4), (100, "rank", 6), (1, "expert", 4)):
        rows = exchanged("none", ids, E=4, slots=slots, scope=scope)[3]
        assert rows.tokens.shape[0] == num_rows


def test_dtypes_of_rows_are_those_of_the_tokens() -> None:
    """The sum is float32: 256 + 1 + 1 in bfloat16 would stay 256."""
    ids, weights = jnp.array([[0, 1, 2]]), jnp.ones((1, 3))
    _, _, handle = ep_prepare(ids, weights, num_experts=3)
    rows = ep_dispatch(handle, jnp.ones((1, 1), jnp.bfloat16), weights)
    assert (rows.tokens.dtype, rows.weights.dtype) == (jnp.bfloat16, jnp.float32)
    out = ep_combine(handle, rows._replace(tokens=jnp.array([[256], [1], [1]], jnp.bfloat16)))
    assert out.dtype == jnp.bfloat16 and float(out[0, 0]) == 258
    assert jnp.bfloat16(256) + jnp.bfloat16(1) + jnp.bfloat16(1) == 256


def test_a_handle_goes_through_jit() -> None:
    ids, weights = jnp.array([[0], [1]]), jnp.ones((2, 1))
    _, _, handle = jax.jit(functools.partial(ep_prepare, num_experts=2))(ids, weights)
    assert isinstance(handle, Handle)
    rows = jax.jit(ep_dispatch)(handle, jnp.array([[1.0], [2.0]]), weights)
    assert jax.jit(ep_combine)(handle, rows).tolist() == [[1.0], [2.0]]


def test_signatures() -> None:
    assert list(inspect.signature(ep_prepare).parameters) == [
        *("indices", "weights", "token_mask", "num_experts", "slots", "scope", "drop_order", "axis_name", "collective")
    ]
    assert list(inspect.signature(ep_dispatch).parameters) == ["handle", "tokens", "weights"]
    assert list(inspect.signature(ep_combine).parameters) == ["handle", "rows"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"drop_order": "random"}, r"drop_order must be one of \['position', 'weight'\], got 'random'"),
        ({"scope": "node"}, r"scope must be one of \('rank', 'expert'\), got 'node'"),
        ({"num_experts": 1}, r"num_experts_per_tok must be at most num_experts=1, got 2"),
        ({"slots": 0}, r"slots must be an integer of at least 1, got 0"),
        ({"slots": 1.25}, r"slots must be an integer of at least 1, got 1\.25"),
    ],
)
def test_wrong_arguments(change: dict[str, Any], message: str) -> None:
    ids = jnp.array([[0, 1]])
    with pytest.raises(ValueError, match=message):
        ep_prepare(ids, jnp.ones((1, 2)), **({"num_experts": 4} | change))


def test_erg_1_experts_that_the_axis_cannot_divide() -> None:
    message = r"num_experts=6 must be a multiple of ep_size=4, the size of the expert axis"
    with pytest.raises(ValueError, match=message), on(MESHES["4"]):
        prepare = functools.partial(ep_prepare, num_experts=6, axis_name="expert")
        by_expert = P("expert")
        mapped(prepare, by_expert, by_expert, out_specs=by_expert)(jnp.zeros((4, 1), jnp.int32), jnp.ones((4, 1)))
