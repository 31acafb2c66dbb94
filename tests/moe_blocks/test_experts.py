from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_blocks.experts import add_bias, as_activation, feed_forward, promote
from tests.moe_blocks import support
from tests.moe_blocks.oracle import Oracle
from tests.moe_blocks.support import assert_close, assert_leaves_close

E, D, F, M = 4, 5, 3, 16


def value_and_grads(rows: Any, sizes: Any, params: Any, cotangent: Any, **kwargs: Any) -> Any:
    def apply(rows: Any, sizes: Any, params: Any, cotangent: Any) -> Any:
        out, pullback = jax.vjp(lambda rows, params: feed_forward(rows, sizes, params, **kwargs), rows, params)
        return out, *pullback(cotangent)

    key = tuple(sorted((name, value) for name, value in kwargs.items())), tuple(sorted(params))
    return COMPILED.setdefault(key, jax.jit(apply))(rows, sizes, params, cotangent)


COMPILED: dict[Any, Any] = {}


def by_hand(rows: Any, sizes: Any, params: Any, cotangent: Any, activation: str) -> Any:
    oracle = Oracle(E, 1, activation=activation)
    rows, cotangent = np.asarray(rows, np.float64), np.asarray(cotangent, np.float64)
    grads = {name: np.zeros(value.shape) for name, value in params.items()}
    out, d_rows = np.zeros(cotangent.shape), np.zeros(rows.shape)
    for row, e in enumerate(np.repeat(np.arange(E), sizes)):
        out[row] = oracle.expert(params, e, rows[row])
        d_rows[row] = oracle.expert_backward(params, grads, e, rows[row], cotangent[row])
    return out, d_rows, grads


@pytest.mark.parametrize(
    ("implementation", "gated", "activation"),
    [(None, True, "silu"), ("ragged_dot", True, "silu"), (None, False, "tanh")],
)
@given(cuts=st.lists(st.integers(0, M), min_size=E, max_size=E), seed=st.integers(0, 2**32 - 1))
def test_values_and_gradients(
    implementation: str | None, gated: bool, activation: str, cuts: list[int], seed: int
) -> None:
    sizes = np.diff(sorted(cuts), prepend=0)
    rng = np.random.default_rng(seed)
    params = support.draw_params(seed, E=E, D=D, F=F, gated=gated, use_bias=True, gate=False)
    rows, cotangent = rng.normal(size=(2, M, D)).astype(np.float32)
    rows[sizes.sum() :] = 0
    activate = as_activation(activation)
    got = value_and_grads(rows, sizes, params, cotangent, activation=activate, implementation=implementation)
    out, d_rows, grads = by_hand(rows, sizes, params, cotangent, activation)
    assert_close(got[0], out, 1e-6)
    assert_close(got[1], d_rows, 2e-6)
    assert_leaves_close(got[2], grads, 2e-6)


@pytest.mark.parametrize("sizes", [[8, 0, 8, 0], [0, 0, 0, 16], [16, 0, 0, 0]])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_exp_1_experts_without_tokens(sizes: list[int], dtype: Any) -> None:
    """D=64, H=32: zero gradients for the empty ones, those of the oracle for the others; a step stays finite."""
    rng = np.random.default_rng(0)
    params = support.draw_params(0, E=4, D=64, F=32, gate=False)
    rows, cotangent = (support.bf16_exact(rng.normal(size=(16, 64))) for _ in range(2))
    cast = jax.tree.map(lambda x: jnp.asarray(x, dtype), (rows, params, cotangent))
    _, _, got = value_and_grads(cast[0], jnp.array(sizes), cast[1], cast[2], activation=jax.nn.silu)
    _, _, want = by_hand(rows, sizes, params, cotangent, "silu")
    for name, grad in got.items():
        assert grad.dtype == dtype
        assert_close(grad, want[name], 1e-6 if dtype == jnp.float32 else 4 * 2**-8, name)
        for e in range(4):
            assert np.asarray(grad[e], np.float32).any() == (sizes[e] > 0)
        assert np.isfinite(np.asarray(cast[1][name] - 0.1 * grad, np.float32)).all()


def test_exp_3_the_weight_is_on_the_output() -> None:
    """One token, weights 0.8 and 0.2: 0.8 f0(x) + 0.2 f1(x), not f0(0.8 x) + f1(0.2 x)."""
    params = support.draw_params(0, E=2, D=5, F=3, gate=False)
    x = np.random.default_rng(0).normal(size=(1, 5)).astype(np.float32)
    block = support.Forced(2, 2, 3)
    forced = support.force(x, np.array([[0, 1]]), np.array([[0.8, 0.2]]))
    got = support.run(block, params, forced).output
    oracle = Oracle(2, 2)
    f = [oracle.expert(params, e, forced[0]) for e in range(2)]
    inside = oracle.expert(params, 0, 0.8 * forced[0]) + oracle.expert(params, 1, 0.2 * forced[0])
    assert_close(got[0], 0.8 * f[0] + 0.2 * f[1], 1e-6)
    assert np.linalg.norm(got[0] - inside) > 1e-2


def test_rows_past_the_last_group_are_zero_in_spite_of_biases() -> None:
    params = jax.tree.map(jnp.asarray, support.draw_params(0, E=2, D=3, F=4, use_bias=True, gate=False))
    out = feed_forward(jnp.zeros((6, 3)), jnp.array([1, 2]), params)
    assert np.asarray(out[:3]).all() and not np.asarray(out[3:]).any()


def test_add_bias() -> None:
    bias = jnp.array([[1.0], [2.0], [3.0]])
    assert add_bias(jnp.zeros((5, 1)), bias, jnp.array([2, 0, 1])).ravel().tolist() == [1, 1, 3, 0, 0]
    slope = jax.grad(lambda b: add_bias(jnp.zeros((5, 1)), b, jnp.array([2, 0, 1])).sum())(bias)
    assert slope.ravel().tolist() == [2, 0, 1]


@pytest.mark.parametrize(
    ("rows", "params", "dtype", "wanted"),
    [
        *((a, b, None, jnp.float32) for a, b in itertools.permutations((jnp.float32, jnp.bfloat16))),
        (jnp.bfloat16, jnp.bfloat16, None, jnp.bfloat16),
        (jnp.float32, jnp.float32, jnp.bfloat16, jnp.bfloat16),
    ],
)
def test_promote(rows: Any, params: Any, dtype: Any, wanted: Any) -> None:
    out, cast = promote(jnp.ones((1, 2), rows), {"wo": jnp.ones((1, 2), params)}, dtype=dtype)
    assert out.dtype == cast["wo"].dtype == wanted


def test_activations() -> None:
    assert as_activation("silu") is jax.nn.silu and as_activation("relu") is jax.nn.relu
    assert as_activation(jnp.tanh) is jnp.tanh
    for wrong in ("swishh", "", None, 3):
        with pytest.raises(ValueError, match=rf"activation must be a callable or .* jax\.nn, got {wrong!r}"):
            as_activation(wrong)  # type: ignore[arg-type]
