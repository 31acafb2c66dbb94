from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_blocks.dispatch import make_layout
from moe_blocks.experts import add_bias, as_activation, feed_forward, feed_forward_tokens, promote
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


# --- from tokens to tokens, fused and in its parts


@functools.partial(jax.jit, static_argnames=("activation", "implementation"))
def tokens_and_gradients(
    tokens: Any, weights: Any, params: Any, cotangent: Any, layout: Any, activation: Any, implementation: str | None
) -> Any:
    def apply(*args: Any) -> Any:
        return feed_forward_tokens(
            args[0], args[1], layout, args[2], activation=activation, implementation=implementation
        )

    out, pullback = jax.vjp(apply, tokens, weights, params)
    return out, *pullback(cotangent)


def tokens_by_hand(tokens: Any, weights: Any, params: Any, cotangent: Any, layout: Any, activation: str) -> Any:
    """Row by row in float64, through the oracle's expert."""
    tokens, weights, cotangent = (np.asarray(x, np.float64) for x in (tokens, weights, cotangent))
    oracle, total = Oracle(E, 1, activation=activation), int(layout.group_sizes.sum())
    out, d_tokens, d_weights = np.zeros(tokens.shape), np.zeros(tokens.shape), np.zeros(weights.shape)
    grads = {name: np.zeros(value.shape) for name, value in params.items()}
    for row, e in enumerate(np.repeat(np.arange(E), layout.group_sizes)):
        token = int(layout.token[row])
        y = oracle.expert(params, e, tokens[token])
        out[token] += weights[row] * y
        d_weights[row] = cotangent[token] @ y
        d_tokens[token] += oracle.expert_backward(params, grads, e, tokens[token], weights[row] * cotangent[token])
    assert total == np.count_nonzero(np.asarray(layout.token) < len(tokens))
    return out, d_tokens, d_weights, grads


def draw_tokens(seed: int, *, gated: bool = True, use_bias: bool = True) -> Any:
    """Tokens with up to three rows each; some of the buffer's rows and some experts stay empty."""
    rng = np.random.default_rng(seed)
    N, k = 12, 3
    groups = np.argsort(rng.random((N, E)) + np.linspace(0, rng.random(), E), axis=1)[:, :k].astype(np.int32)
    groups = np.where(rng.random((N, k)) < 0.7, groups, E)
    layout = make_layout(jnp.array(groups), num_groups=E, num_rows=N * k)
    params = support.draw_params(seed, E=E, D=D, F=F, gated=gated, use_bias=use_bias, gate=False)
    tokens, cotangent = rng.normal(size=(2, N, D)).astype(np.float32)
    filled = np.arange(N * k) < int(layout.group_sizes.sum())
    weights = np.where(filled, rng.random(N * k), 0).astype(np.float32)
    return tokens, weights, params, cotangent, jax.tree.map(np.asarray, layout)


@pytest.mark.parametrize("implementation", [None, "ragged_dot"])
@pytest.mark.parametrize(("gated", "activation"), [(True, "silu"), (False, "tanh")])
@given(seed=st.integers(0, 2**32 - 1))
def test_tokens_against_the_oracle(implementation: str | None, gated: bool, activation: str, seed: int) -> None:
    args = draw_tokens(seed, gated=gated)
    got = tokens_and_gradients(*args, as_activation(activation), implementation)
    out, d_tokens, d_weights, grads = tokens_by_hand(*args, activation)
    assert got[0].dtype == jnp.float32
    assert_close(got[0], out, 1e-6)
    assert_close(got[1], d_tokens, 2e-6)
    assert_close(got[2], d_weights, 2e-6)
    assert_leaves_close(got[3], grads, 2e-6)


def test_the_fused_pass_is_what_runs_on_cpu() -> None:
    """Its mark is that nothing of width D has a line for each row."""
    N, k = 400, 3
    groups = jax.ShapeDtypeStruct((N, k), jnp.int32)
    layout = jax.eval_shape(functools.partial(make_layout, num_groups=E, num_rows=N * k), groups)
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((N, D), (N * k,))]
    params = {"wi_0": jax.ShapeDtypeStruct((E, D, F), jnp.float32), "wo": jax.ShapeDtypeStruct((E, F, D), jnp.float32)}

    def jaxpr(implementation: str | None) -> str:
        apply = functools.partial(feed_forward_tokens, implementation=implementation)
        return str(jax.make_jaxpr(apply)(*args, layout, params))

    assert f"[{N * k},{D}]" not in jaxpr(None) and f"[{N * k},{D}]" in jaxpr("ragged_dot")


def test_tokens_in_bfloat16() -> None:
    """Sums over a token's experts are float32; the parts and the whole round alike."""
    *args, layout = draw_tokens(1)
    tokens, weights, params, cotangent = args
    cast = [jax.tree.map(lambda x: support.bf16_exact(x), x) for x in (tokens, params, cotangent)]
    low = [jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), x) for x in cast[:2]]
    want = tokens_by_hand(cast[0], weights, cast[1], cast[2], layout, "silu")
    for implementation in (None, "ragged_dot"):
        got = tokens_and_gradients(low[0], weights, low[1], cast[2], layout, jax.nn.silu, implementation)
        assert [x.dtype for x in got[:3]] == [jnp.float32, jnp.bfloat16, jnp.float32]
        for value, wanted in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert_close(np.asarray(value, np.float32), wanted, 4 * 2**-8)


def test_nan_stays_with_its_token_and_its_experts() -> None:
    """Rows of one block do not see each other, nor do the windows of two blocks."""
    tokens, weights, params, cotangent, layout = draw_tokens(2)
    clean = tokens_and_gradients(tokens, weights, params, cotangent, layout, jax.nn.silu, None)
    tokens = tokens.copy()
    tokens[3] = np.nan
    dirty = tokens_and_gradients(tokens, weights, params, cotangent, layout, jax.nn.silu, None)
    experts = np.repeat(np.arange(E), layout.group_sizes)[layout.token[: layout.group_sizes.sum()] == 3]
    assert 0 < len(experts) < E
    for out, wanted in zip(dirty[:2], clean[:2], strict=True):
        assert np.isnan(np.asarray(out)).any(1).nonzero()[0].tolist() == [3]
        assert support.same_bits(np.delete(np.asarray(out), 3, 0), np.delete(np.asarray(wanted), 3, 0))
    for name, grad in dirty[3].items():
        assert set(np.isnan(np.asarray(grad)).reshape(E, -1).any(1).nonzero()[0]) <= set(experts), name


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
