from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_blocks.losses import expert_load, load_balancing_loss, router_z_loss, update_expert_bias
from moe_blocks.routing import Router, route

ln = math.log


@functools.partial(jax.jit, static_argnums=1)
def balance(logits: Any, k: int, mask: Any = None) -> jax.Array:
    routing = route(jnp.asarray(logits, jnp.float32), Router(), num_experts_per_tok=k)
    return load_balancing_loss(routing.scores, routing.indices, token_mask=mask)


z_loss = jax.jit(router_z_loss)
count = jax.jit(expert_load, static_argnames="num_experts")
moved_bias = jax.jit(update_expert_bias, static_argnames="rate")


# --- load balancing


def test_loss_1_padding_is_not_averaged() -> None:
    logits = jnp.array([[ln(3), 0], [0, ln(3)], [0, ln(9)], [0, ln(9)]])
    mask = jnp.array([True, True, False, False])
    assert balance(logits, 1, mask) == pytest.approx(1.0, abs=1e-6)
    assert balance(logits, 1) == pytest.approx(1.2, abs=1e-6)  # what it would be
    assert z_loss(logits, token_mask=mask) == pytest.approx(ln(4) ** 2, rel=1e-6)

    for loss in (lambda x, m: balance(x, 1, m), lambda x, m: z_loss(x, token_mask=m)):
        both = jax.jit(jax.value_and_grad(loss))
        (value, slope), (short_value, short_slope) = both(logits, mask), both(logits[:2], None)
        assert value == pytest.approx(float(short_value), rel=1e-6)
        np.testing.assert_allclose(slope[:2], short_slope, atol=1e-7)
        assert not np.asarray(slope[2:]).any()


def test_loss_1_padding_may_hold_nan() -> None:
    logits = jnp.array([[ln(3), 0], [0, ln(3)], [jnp.nan, jnp.inf]])
    mask = jnp.array([True, True, False])
    for loss in (lambda x, m: balance(x, 1, m), lambda x, m: z_loss(x, token_mask=m)):
        assert np.isfinite(loss(logits, mask))
        assert not np.isfinite(loss(logits, None))  # the mask is what keeps it out
    slope = np.asarray(jax.jit(jax.grad(lambda x: router_z_loss(x, token_mask=mask)))(logits))
    assert np.isfinite(slope).all() and slope[:2].all() and not slope[2].any()


@pytest.mark.parametrize("k", [1, 2, 4])
def test_loss_3_uniform_scores_give_one_for_every_k(k: int) -> None:
    """V14: whichever experts the ties choose."""
    assert balance(np.zeros((8, 4)), k) == pytest.approx(1.0, abs=1e-6)


def test_loss_3_one_over_k() -> None:
    assert balance([[ln(4), ln(3), ln(2), 0.0]] * 8, 2) == pytest.approx(1.4, abs=1e-6)


def test_loss_7_the_loss_of_the_whole_batch() -> None:
    shards = np.array([[[ln(3), 0.0]] * 4, [[0.0, ln(3)]] * 4])
    assert balance(shards, 1) == balance(shards.reshape(8, 2), 1) == pytest.approx(1.0, abs=1e-6)
    assert np.mean([balance(shard, 1) for shard in shards]) == pytest.approx(1.5, abs=1e-6)


def test_the_counts_carry_no_gradient_and_the_scores_do() -> None:
    """dL/dlogits by hand for two experts, all tokens on expert 0: L = 2 P_0, so dL/dx_0 = 2 p (1 - p) / T."""
    slope = jax.grad(lambda x: balance(x, 1))(jnp.array([[ln(3), 0.0]] * 4))
    np.testing.assert_allclose(slope, [[2 * 0.75 * 0.25 / 4, -2 * 0.75 * 0.25 / 4]] * 4, rtol=1e-5)


def test_no_token_at_all() -> None:
    nothing, mask, indices = jnp.full((2, 3, 4), jnp.nan), jnp.zeros((2, 3), bool), jnp.zeros((2, 3, 1), jnp.int32)
    losses = (
        lambda scores: load_balancing_loss(scores, indices, token_mask=mask),
        lambda logits: router_z_loss(logits, token_mask=mask),
    )
    for loss in losses:
        value, slope = jax.jit(jax.value_and_grad(loss))(nothing)
        assert value == 0 and not np.asarray(slope).any()


# --- z


def test_loss_10_from_raw_logits_and_stable() -> None:
    assert z_loss(jnp.zeros((1, 2))) == pytest.approx(0.48045, abs=1e-5)
    assert z_loss(jnp.full((1, 2), 1000.0)) == pytest.approx(1001386.8, rel=1e-4)
    probabilities = jax.nn.softmax(jnp.zeros((1, 2)))
    assert z_loss(probabilities) == pytest.approx(1.4236, abs=1e-3)  # the wrong input
    low = z_loss(jnp.full((1, 2), 1000.0, jnp.bfloat16))
    assert low.dtype == jnp.float32 and low == pytest.approx(1001386.8, rel=1e-4)


def test_loss_10_pushes_logsumexp_to_zero() -> None:
    assert (np.asarray(jax.grad(z_loss)(jnp.array([[1.0, 2.0]]))) > 0).all()
    assert (np.asarray(jax.grad(z_loss)(jnp.array([[-4.0, -3.0]]))) < 0).all()
    at_zero = jax.grad(z_loss)(jnp.full((1, 2), -ln(2)))
    np.testing.assert_allclose(at_zero, [[0, 0]], atol=1e-6)


@pytest.mark.parametrize("loss", [lambda x: balance(x, 1), z_loss])
def test_float32_scalars(loss: Any) -> None:
    value = loss(jnp.zeros((2, 3, 4)))
    assert value.shape == () and value.dtype == jnp.float32


# --- counts


@given(st.lists(st.permutations(range(5)), min_size=6, max_size=6), st.lists(st.booleans(), min_size=6, max_size=6))
def test_expert_load_counts(chosen: list[list[int]], mask: list[bool]) -> None:
    indices = np.array(chosen)[:, :2].reshape(2, 3, 2)
    wanted = np.bincount(indices.reshape(6, 2)[np.array(mask)].ravel(), minlength=5)
    load = count(indices, num_experts=5, token_mask=np.array(mask).reshape(2, 3))
    assert load.dtype == jnp.int32
    assert load.tolist() == wanted.tolist()
    assert load.sum() == 2 * sum(mask)


def test_expert_load_leaves_out_what_has_no_expert() -> None:
    assert expert_load(jnp.array([[0, 3], [2, 3]]), num_experts=3).tolist() == [1, 0, 1]


# --- the bias rule


def test_rout_7_down_for_the_crowded_up_for_the_idle() -> None:
    bias = jnp.array([0.5, -0.5])
    assert np.asarray(update_expert_bias(bias, jnp.array([6, 2]), rate=0.0)).tobytes() == np.asarray(bias).tobytes()
    moved = update_expert_bias(bias, jnp.array([6, 2]), rate=0.001)
    np.testing.assert_allclose(moved, [0.499, -0.499], rtol=1e-6)
    assert moved.dtype == jnp.float32


@given(st.lists(st.integers(0, 2**27), min_size=7, max_size=7))
def test_the_sign_is_exact(load: list[int]) -> None:
    """No mean in floating point decides it: sign(sum(c) - E * c_i) in unbounded integers."""
    moved = moved_bias(np.zeros(7, np.float32), np.array(load, np.int32), rate=1.0)
    assert moved.tolist() == [float(np.sign(sum(load) - 7 * count)) for count in load]


def test_a_mean_in_float32_would_be_wrong() -> None:
    load = jnp.array([2**24 + 1, 2**24 + 1, 2**24 + 1, 2**24 + 2], jnp.int32)
    assert update_expert_bias(jnp.zeros(4), load, rate=1.0).tolist() == [1, 1, 1, -1]
    floats = load.astype(jnp.float32)
    assert jnp.sign(floats.mean() - floats).tolist() != [1, 1, 1, -1]


def test_counts_of_micro_batches_add_up() -> None:
    parts = jnp.array([[6, 0, 0], [0, 4, 2]])
    once = update_expert_bias(jnp.zeros(3), parts.sum(0), rate=0.5)
    assert once.tolist() == [-0.5, 0.0, 0.5]
    twice = update_expert_bias(update_expert_bias(jnp.zeros(3), parts[0], rate=0.5), parts[1], rate=0.5)
    assert twice.tolist() != once.tolist()  # moving at every micro-batch is another rule
