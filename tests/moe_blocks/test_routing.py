from __future__ import annotations

import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from moe_blocks.routing import Router, jitter, route, take_experts, valid_assignments
from tests.moe_blocks.oracle import Oracle

ln = math.log
ROUTERS = {
    "softmax": Router(),
    "normalised": Router(norm_topk_prob=True),
    "top-k first": Router(use_pre_softmax=False),
    "top-k first, scaled": Router(use_pre_softmax=False, scaling_factor=2.5),
    "sigmoid": Router(score_function="sigmoid"),
    "sigmoid, normalised, scaled": Router(score_function="sigmoid", norm_topk_prob=True, scaling_factor=2.5),
}


def routed(logits: Any, k: int, router: Router = ROUTERS["softmax"], **kwargs: Any) -> Any:
    return compiled_route(jnp.asarray(logits, jnp.float32), router, num_experts_per_tok=k, **kwargs)


compiled_route = jax.jit(route, static_argnums=1, static_argnames="num_experts_per_tok")


@functools.partial(jax.jit, static_argnames=("k", "router"))
def routed_and_back(logits: Any, d_weights: Any, d_scores: Any, *, k: int, router: Router) -> Any:
    routing, pullback = jax.vjp(lambda x: tuple(routed(x, k, router)), logits)
    no_int = np.zeros(routing[0].shape, jax.dtypes.float0)
    return routing, *pullback((no_int, d_weights, d_scores, jnp.zeros_like(logits)))


def oracle_of(router: Router, E: int, k: int, **kwargs: Any) -> Oracle:
    names = ("score_function", "use_pre_softmax", "norm_topk_prob", "scaling_factor")
    return Oracle(E, k, **{name: getattr(router, name) for name in names}, **kwargs)


# --- cases


def test_rout_2_order_of_softmax_and_top_k() -> None:
    logits = [[ln(4), ln(3), ln(2), 0.0]]
    np.testing.assert_allclose(routed(logits, 2).weights, [[0.4, 0.3]], rtol=1e-6)
    for name in ("normalised", "top-k first"):
        np.testing.assert_allclose(routed(logits, 2, ROUTERS[name]).weights, [[4 / 7, 3 / 7]], rtol=1e-6)
    np.testing.assert_allclose(routed(logits, 2).scores, [[0.4, 0.3, 0.2, 0.1]], rtol=1e-6)


def test_rout_3_one_expert_per_token_keeps_its_axis() -> None:
    logits = [[ln(3), 0.0], [0.0, ln(3)], [ln(9), 0.0]]
    plain, normalised = routed(logits, 1), routed(logits, 1, ROUTERS["normalised"])
    assert plain.indices.tolist() == normalised.indices.tolist() == [[0], [1], [0]]
    np.testing.assert_allclose(plain.weights, [[0.75], [0.75], [0.9]], rtol=1e-6)
    assert normalised.weights.tolist() == [[1.0], [1.0], [1.0]]
    sigmoid = routed(logits, 1, Router(score_function="sigmoid", norm_topk_prob=True))
    assert sigmoid.weights.tolist() == [[1.0], [1.0], [1.0]]


def test_rout_4_arithmetic_is_float32() -> None:
    """1.001 rounds to 1 in bfloat16: a router in bfloat16 would take expert 0."""
    assert jnp.bfloat16(1.001) == jnp.bfloat16(1.0)
    routing = routed([[1.0, 1.001]], 1)
    assert routing.indices.tolist() == [[1]]
    assert [x.dtype for x in routing] == [jnp.int32, jnp.float32, jnp.float32, jnp.float32]
    low = route(jnp.array([[1.0, 2.0]], jnp.bfloat16), Router(), num_experts_per_tok=1)
    assert [x.dtype for x in low] == [jnp.int32, jnp.float32, jnp.float32, jnp.float32]


def test_rout_6_bias_selects_and_does_not_weigh() -> None:
    router = Router(score_function="sigmoid", expert_bias=True)
    logits, bias = jnp.array([[0.405465, 0.0, -0.405465]]), jnp.array([0.0, 0.0, 0.3])

    def weight(logits: jax.Array, bias: jax.Array) -> jax.Array:
        return route(logits, router, num_experts_per_tok=1, expert_bias=bias).weights.sum()

    routing = routed(logits, 1, router, expert_bias=bias)
    assert routing.indices.tolist() == [[2]]
    assert routing.weights[0, 0] == pytest.approx(0.4, abs=1e-6)
    assert routed(logits, 1, router).indices.tolist() == [[0]]
    assert jax.grad(weight, argnums=1)(logits, bias).tolist() == [0, 0, 0]
    np.testing.assert_allclose(jax.grad(weight)(logits, bias), [[0, 0, 0.24]], atol=1e-6)
    np.testing.assert_allclose(routing.scores.sum(), 1, rtol=1e-6)
    np.testing.assert_allclose(routing.scores, routed(logits, 1, router).scores)  # free of the bias


def test_rout_14_all_logits_negative() -> None:
    routing = routed([[-9.0, -7.0, -8.0, -6.0, -10.0]], 2)
    assert routing.indices.tolist() == [[3, 1]]
    assert routing.weights[0, 0] / routing.weights[0, 1] == pytest.approx(math.e, rel=1e-6)


def test_v12_scaling_and_strong_bias() -> None:
    """A bias of 0.1 * (E - 1 - e) on equal scores takes the lowest ids, whose weights stay equal."""
    router = Router(score_function="sigmoid", norm_topk_prob=True, scaling_factor=1.2, expert_bias=True)
    routing = routed(np.zeros((3, 6)), 3, router, expert_bias=jnp.arange(6.0)[::-1] * 0.1)
    assert routing.indices.tolist() == [[0, 1, 2]] * 3
    np.testing.assert_allclose(routing.weights, np.full((3, 3), 0.4), rtol=1e-6)


# --- against the oracle


@pytest.mark.parametrize("name", ROUTERS)
@given(data=st.data())
def test_values_and_gradients(name: str, data: st.DataObject) -> None:
    k, E = data.draw(st.sampled_from([(1, 3), (2, 5), (3, 3)]))
    elements = st.floats(-8, 8, width=32).map(lambda x: round(x, 3))
    logits = data.draw(hnp.arrays(np.float32, (4, E), elements=elements))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    d_weights, d_scores = rng.normal(size=(4, k)).astype(np.float32), rng.normal(size=(4, E)).astype(np.float32)
    oracle = oracle_of(ROUTERS[name], E, k)
    wide = logits.astype(np.float64)
    chosen = [oracle.choose(row) for row in wide]
    assume(min(margin for _, _, margin in chosen) > 1e-5)

    (indices, weights, scores, raw), d_logits = routed_and_back(logits, d_weights, d_scores, k=k, router=ROUTERS[name])
    assert indices.tolist() == [ids.tolist() for ids, _, _ in chosen]
    np.testing.assert_allclose(weights, [w for _, w, _ in chosen], rtol=5e-6)
    np.testing.assert_allclose(scores, [oracle.shares(row) for row in wide], rtol=5e-6)
    np.testing.assert_allclose(scores.sum(-1), 1, rtol=1e-6)
    np.testing.assert_array_equal(raw, logits)

    wanted = [
        oracle.choose_backward(row, ids, dw) + oracle.shares_backward(row, ds)
        for row, (ids, _, _), dw, ds in zip(wide, chosen, d_weights, d_scores, strict=True)
    ]
    np.testing.assert_allclose(d_logits, wanted, atol=5e-6)


def test_a_plain_sum_proves_nothing() -> None:
    """The weights of a normalised router sum to one, so only a random cotangent sees a missing gradient."""
    logits = jnp.array([[0.3, -0.2, 0.9]])

    def total(logits: jax.Array, cotangent: list[float]) -> jax.Array:
        return (routed(logits, 2, ROUTERS["normalised"]).weights * jnp.array([cotangent])).sum()

    assert np.abs(jax.grad(total)(logits, [1.0, 1.0])).max() < 1e-7
    assert np.abs(jax.grad(total)(logits, [1.0, -2.0])).max() > 0.1


@given(
    hnp.arrays(np.float32, (2, 3, 6), elements=st.sampled_from([-1.0, -0.0, 0.0, 2.0])),
    st.integers(1, 6),
    st.sampled_from(sorted(ROUTERS)),
)
def test_experts_are_distinct_and_ties_go_to_the_lower_id(logits: np.ndarray, k: int, name: str) -> None:
    indices = np.asarray(routed(logits, k, ROUTERS[name]).indices)
    assert indices.shape == (2, 3, k)
    np.testing.assert_array_equal(indices, np.argsort(-logits, axis=-1, kind="stable")[..., :k])


def test_extreme_logits_stay_finite() -> None:
    logits = np.array([[1e4, -1e4, 0.0]], np.float32)
    for router in ROUTERS.values():
        routing, slope = routed_and_back(
            logits, np.ones((1, 2), np.float32), np.ones((1, 3), np.float32), k=2, router=router
        )
        assert all(np.isfinite(x).all() for x in (*routing, slope))


# --- the smaller functions


def test_take_experts_is_a_gather() -> None:
    values = np.random.default_rng(0).normal(size=(2, 3, 5)).astype(np.float32)
    indices = np.array([[[0, 4], [1, 2], [3, 0]], [[2, 1], [4, 3], [0, 1]]])
    np.testing.assert_array_equal(take_experts(values, indices), np.take_along_axis(values, indices, -1))
    slope = jax.grad(lambda v: (take_experts(v, indices) * jnp.array([1.0, 2.0]).reshape(1, 1, 2)).sum())(values)
    wanted = np.zeros_like(values)
    np.put_along_axis(wanted, indices, np.broadcast_to(np.float32([1, 2]), indices.shape), -1)
    np.testing.assert_array_equal(slope, wanted)


def test_valid_assignments() -> None:
    indices = jnp.zeros((2, 2, 3), jnp.int32)
    assert np.asarray(valid_assignments(indices, None)).all()
    mask = jnp.array([[True, False], [False, True]])
    assert np.asarray(valid_assignments(indices, mask)).tolist() == [[[m] * 3 for m in row] for row in mask.tolist()]


def test_jitter_is_a_factor_in_its_range() -> None:
    x = jnp.full((1000,), 2.0)
    y = np.asarray(jitter(jax.random.key(0), x, 0.25)) / 2
    assert 0.75 <= y.min() < 0.76 and 1.24 < y.max() <= 1.25
    assert jitter(jax.random.key(0), x.astype(jnp.bfloat16), 0.25).dtype == jnp.float32, "the router's precision"


# --- errors

ERRORS = [
    ({"score_function": "tanh"}, r"Router\.score_function must be one of \['sigmoid', 'softmax'\], got 'tanh'"),
    (
        {"score_function": "sigmoid", "use_pre_softmax": False},
        r"Router\.use_pre_softmax=False needs score_function='softmax', got 'sigmoid'; leave use_pre_softmax=True",
    ),
    ({"use_pre_softmax": False, "expert_bias": True}, r"Router\.expert_bias=True needs use_pre_softmax=True"),
    *(
        (
            {"scaling_factor": value},
            rf"Router\.scaling_factor must be finite and above 0, got {re.escape(repr(value))}",
        )
        for value in (0.0, -1.0, math.nan, math.inf)
    ),
    *(
        ({"bias_update_rate": value}, rf"Router\.bias_update_rate must be finite and at least 0, got {value!r}")
        for value in (-1e-3, math.nan)
    ),
    *(({"jitter": value}, rf"Router\.jitter must be in \[0, 1\), got {value!r}") for value in (-0.1, 1.0, math.nan)),
]


@pytest.mark.parametrize(("fields", "message"), ERRORS)
def test_wrong_routers(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Router(**fields)


@pytest.mark.parametrize("k", [0, 5, -1])
def test_erg_1_wrong_number_of_experts(k: int) -> None:
    with pytest.raises(ValueError, match=rf"num_experts_per_tok must be in 1\.\.num_experts=4, got {k}"):
        routed(np.zeros((1, 4)), k)


def test_a_router_is_a_static_argument() -> None:
    assert hash(Router()) == hash(Router()) and Router() != Router(jitter=0.1)
