from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_blocks.metrics import layer_metrics, max_violation
from moe_blocks.routing import Routing


def test_max_violation_by_hand() -> None:
    assert max_violation(jnp.array([4, 4, 4, 4])) == 0
    assert max_violation(jnp.array([8, 4, 4, 0])) == 1
    assert max_violation(jnp.array([16, 0, 0, 0])) == 3  # E / k - 1 with k = 1
    assert max_violation(jnp.array([0, 0, 0, 0])) == 0


@given(st.lists(st.integers(0, 1000), min_size=4, max_size=4))
def test_max_violation_is_its_definition(load: list[int]) -> None:
    wanted = max(load) / (sum(load) / 4) - 1 if any(load) else 0
    value = max_violation(jnp.array(load, jnp.int32))
    assert value.dtype == jnp.float32 and value == pytest.approx(wanted, abs=1e-5)


def routing() -> Routing:
    """Three tokens, three experts, two choices; the last token is padding and holds NaN."""
    scores = jnp.array([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0], [jnp.nan] * 3])
    weights = jnp.array([[0.5, 0.25], [1.0, 0.25], [jnp.nan, jnp.nan]])
    return Routing(jnp.array([[0, 1], [0, 2], [0, 0]]), weights, scores, scores)


def test_figures_by_hand() -> None:
    kept = jnp.array([[True, False], [True, True], [False, False]])
    metrics = layer_metrics(routing(), kept, jnp.array([True, True, False]))
    assert metrics["load"].tolist() == [2, 1, 1]
    assert (metrics["dropped"], metrics["dropped"].dtype) == (1, jnp.int32)
    assert metrics["dropped_weight"] == pytest.approx(0.25 / 2)
    assert metrics["entropy"] == pytest.approx((0.5 * math.log(2) + 0.5 * math.log(4)) / 2)
    assert metrics["max_violation"] == pytest.approx(2 / (4 / 3) - 1)
    assert all(np.isfinite(value).all() for value in metrics.values())


def test_the_mask_is_what_keeps_nan_out() -> None:
    unmasked = layer_metrics(routing(), jnp.ones((3, 2), bool), None)
    assert unmasked["load"].tolist() == [4, 1, 1]
    assert np.isnan(unmasked["dropped_weight"])


def test_all_masked_and_all_dropped() -> None:
    nothing = layer_metrics(routing(), jnp.zeros((3, 2), bool), jnp.zeros(3, bool))
    assert {name: np.asarray(value).sum() for name, value in nothing.items()} == dict.fromkeys(nothing, 0)
    lost = layer_metrics(routing(), jnp.zeros((3, 2), bool), jnp.array([True, True, False]))
    assert lost["dropped"] == 4 and lost["dropped_weight"] == 1


def test_names_shapes_and_dtypes() -> None:
    metrics = layer_metrics(routing(), jnp.ones((3, 2), bool), jnp.array([True, True, False]))
    assert {name: (value.shape, value.dtype.name) for name, value in metrics.items()} == {
        "load": ((3,), "int32"),
        "dropped": ((), "int32"),
        "dropped_weight": ((), "float32"),
        "entropy": ((), "float32"),
        "max_violation": ((), "float32"),
    }
