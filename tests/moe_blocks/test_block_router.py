"""What a `MoEBlock` makes of masks and of its router: bias, jitter, losses, metrics."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_blocks import MoEBlock, MoEOutput, Router
from tests.moe_blocks import support
from tests.moe_blocks.layer import BLOCK, KEY, D, E, F, X, apply, variables_of
from tests.moe_blocks.support import LAYOUTS, MORE_LAYOUTS, assert_close, on, same_bits

# --- masks


def test_a_masked_token_may_hold_anything() -> None:
    """LOSS-1: NaN, infinity or the largest number; and without the mask NaN does spread, through losses and drops."""
    block = BLOCK.clone(aux_loss_coeff=0.1, z_loss_coeff=0.1)
    params = support.flat(variables_of(block)["params"])
    mask = np.ones(X.shape[:-1], bool)
    mask[1, 1:] = mask[5] = False
    results = []
    for poison in (0.0, np.nan, np.inf, np.finfo(np.float32).max):
        x = np.where(mask[..., None], X, np.float32(poison))
        results.append(support.run(block, params, x, mask, capacity=20, d_output=X, d_aux_loss=1.0))
    for other in results[1:]:
        for a, b in zip(jax.tree.leaves(other), jax.tree.leaves(results[0]), strict=True):
            assert same_bits(a, b)
    assert results[0].metrics["dropped"] > 0
    naked = support.run(block, params, np.where(mask[..., None], X, np.nan), None, capacity=20, d_aux_loss=1.0)
    assert np.isnan(naked.aux_loss) and np.isnan(naked.grads["gate"]).any()


def test_masked_rows_are_as_good_as_absent() -> None:
    block = BLOCK.clone(aux_loss_coeff=0.1, z_loss_coeff=0.1)
    params = support.flat(variables_of(block)["params"])
    mask = np.ones(X.shape[:-1], bool)
    mask[:, 2] = False
    got = support.run(block, params, X, mask, capacity=20, d_output=X, d_aux_loss=1.0)
    want = support.run(block, params, X[:, :2], None, capacity=20, d_output=X[:, :2], d_aux_loss=1.0)
    assert_close(got.output[:, :2], want.output, 1e-6)
    assert_close(got.aux_loss, want.aux_loss, 1e-6)
    assert got.total_recv_tokens.tolist() == want.total_recv_tokens.tolist() == [32]
    for name, grad in want.grads.items():
        assert_close(got.grads[name][:, :2] if name == "x" else got.grads[name], grad, 2e-6, name)


def test_no_real_token_at_all() -> None:
    layout = LAYOUTS["2x4"]
    block = BLOCK.clone(aux_loss_coeff=0.1, z_loss_coeff=0.1, use_bias=True, **support.axes(layout))
    params = support.flat(variables_of(block)["params"])
    got = support.run(
        block, params, X * np.nan, np.zeros(X.shape[:-1], bool), capacity=4, d_output=X, d_aux_loss=1.0,
        layout=layout,
    )  # fmt: skip
    assert all(not leaf.any() for leaf in jax.tree.leaves(got))


# --- router


def test_rout_4_router_is_float32_in_a_bfloat16_block() -> None:
    gate = np.zeros((D, 2), np.float32)
    gate[0] = [1.0, 1.001]
    params = support.draw_params(0, E=2, D=D, F=F) | {"gate": gate}
    block = MoEBlock(2, 1, F, dtype=jnp.bfloat16)
    x = jnp.eye(1, D, dtype=jnp.bfloat16)
    got = support.run(block, params, x)
    assert got.metrics["load"].tolist() == [0, 1]
    assert got.output.dtype == jnp.bfloat16 and got.grads["gate"].dtype == np.float32
    low = support.run(block, params | {"gate": gate.astype(jnp.bfloat16).astype(np.float32)}, x)
    assert low.metrics["load"].tolist() == [1, 0]  # what a router in bfloat16 would do


def test_rout_11_jitter_does_not_reach_the_experts() -> None:
    """k = E and a zero gate: noise changes nothing, unless the experts saw it."""
    block = MoEBlock(2, 2, F, router=Router(jitter=0.5))
    params = support.draw_params(0, E=2, D=D, F=F)
    zero = {"params": support.unflat(params | {"gate": np.zeros((D, 2), np.float32)})}
    clean = apply(block, zero, X)
    noisy = apply(block, zero, X, rngs={"jitter": KEY}, deterministic=False)
    assert same_bits(clean.output, noisy.output)
    variables = {"params": support.unflat(params)}
    noisy = apply(block, variables, X, rngs={"jitter": KEY}, deterministic=False)
    assert not same_bits(apply(block, variables, X).output, noisy.output)
    again = apply(block, variables, X, rngs={"jitter": KEY}, deterministic=False)
    other = apply(block, variables, X, rngs={"jitter": jax.random.key(1)}, deterministic=False)
    assert same_bits(noisy.output, again.output) and not same_bits(noisy.output, other.output)
    with pytest.raises(Exception, match="jitter"):
        apply(block, variables, X, deterministic=False)


BIASED = MoEBlock(2, 1, F, router=Router(score_function="sigmoid", expert_bias=True, bias_update_rate=0.001))


def biased(bias: Any, x: Any = X, mask: Any = None, mutable: Any = ("moe_state",), block: MoEBlock = BIASED) -> Any:
    params = support.draw_params(0, E=2, D=D, F=F) | {"gate": np.eye(D, 2, dtype=np.float32)}
    variables = {"params": support.unflat(params), "moe_state": {"expert_bias": jnp.array(bias, jnp.float32)}}
    return apply(block, variables, x, mask, mutable=mutable)


def test_rout_7_the_bias_moves_once_and_only_when_mutable() -> None:
    x = np.zeros((8, D), np.float32)
    x[:6, 0], x[6:, 1] = 5, 5  # counts 6 and 2
    _, state = biased([0.0, 0.0], x)
    np.testing.assert_allclose(state["moe_state"]["expert_bias"], [-0.001, 0.001], rtol=1e-6)
    result = biased([0.0, 0.0], x, mutable=())
    assert type(result) is MoEOutput  # nothing came back to be changed
    _, metrics_only = biased([0.0, 0.0], x, mutable=("moe_metrics",))
    assert metrics_only.keys() == {"moe_metrics"}
    mask = np.arange(8) >= 4  # counts 2 and 2
    _, state = biased([0.0, 0.0], x, mask)
    assert state["moe_state"]["expert_bias"].tolist() == [0, 0]


def test_the_bias_counts_what_was_asked_for_and_not_what_was_kept() -> None:
    x = np.zeros((8, D), np.float32)
    x[:6, 0], x[6:, 1] = 5, 5
    capped = BIASED.clone(capacity=1, capacity_scope="expert")
    layout = LAYOUTS["2x4"]
    assert layout
    with on(layout):
        _, state = biased([0.0, 0.0], x, block=capped.clone(batch_axes=layout.axes["batch_axes"]))
    np.testing.assert_allclose(state["moe_state"]["expert_bias"], [-0.001, 0.001], rtol=1e-6)


def test_the_bias_has_no_gradient_and_no_parameter() -> None:
    x = X.reshape(-1, D)
    variables = {"params": support.unflat(support.draw_params(0, E=2, D=D, F=F))}

    def loss(bias: Any) -> Any:
        out = BIASED.apply(variables | {"moe_state": {"expert_bias": bias}}, x)
        return (out.output * x).sum()

    assert jax.jit(jax.grad(loss))(jnp.array([0.1, -0.1])).tolist() == [0, 0]
    assert "expert_bias" not in str(jax.tree.structure(variables_of(BIASED)["params"]))
    assert variables_of(BIASED)["moe_state"]["expert_bias"].tolist() == [0, 0], "init does not move it"


# --- losses


def test_loss_10_and_v14_coefficients() -> None:
    """A zero gate: uniform scores, so the balance loss is its coefficient; logsumexp is ln E."""
    params = support.draw_params(0, E=E, D=D, F=F) | {"gate": np.zeros((D, E), np.float32)}
    for a, z in ((0.01, 0.0), (0.0, 0.001)):
        got = apply(BLOCK.clone(aux_loss_coeff=a, z_loss_coeff=z), {"params": support.unflat(params)}, X)
        assert got.aux_loss == pytest.approx(a + z * math.log(E) ** 2, rel=1e-5)


@pytest.mark.parametrize("mesh", ["none", "2x4", "8", "data only"])
def test_loss_7_one_loss_for_every_mesh(mesh: str) -> None:
    """Half of the batch wants expert 0, the other half expert 1: 1 for the whole, 1.5 for a mean over shards."""
    layout = (LAYOUTS | MORE_LAYOUTS)[mesh]
    x = np.zeros((8, 1, D), np.float32)
    x[:4, :, 0] = x[4:, :, 1] = math.log(3)
    E = 8
    params = support.draw_params(0, E=E, D=D, F=F)
    params["gate"] = np.full((D, E), -100.0, np.float32) * (np.arange(E) > 1)  # only two experts count
    params["gate"][:2, :2] = np.eye(2)
    x[..., 2] = 1
    params["gate"][:2, 2:] = 0
    params["gate"][2, 2:], params["gate"][3:] = -100, 0
    block = MoEBlock(E, 1, F, aux_loss_coeff=2 / E, **support.axes(layout))
    with on(layout):
        got = apply(block, {"params": support.unflat(params)}, x)
    assert got.aux_loss == pytest.approx(1.0, abs=1e-6)
    assert got.aux_loss.shape == () and got.aux_loss.dtype == np.float32


def test_loss_14_the_penalty_is_beside_the_output() -> None:
    """Evaluation reads the output alone, which no coefficient changes."""
    variables = variables_of(BLOCK)
    plain = apply(BLOCK, variables, X)
    heavy = apply(BLOCK.clone(aux_loss_coeff=1.0, z_loss_coeff=1.0), variables, X)
    assert same_bits(plain.output, heavy.output) and heavy.aux_loss > 0.5


@pytest.mark.parametrize("mesh", ["2x4", "2x4 auto"])
def test_loss_16_scalar_cotangents_on_a_mesh(mesh: str) -> None:
    layout = (LAYOUTS | MORE_LAYOUTS)[mesh]
    assert layout
    block = BLOCK.clone(aux_loss_coeff=0.1, **layout.axes)

    def loss(variables: Any, task: float) -> Any:
        out = block.apply(variables, X)
        return task * (out.output**2).sum() + out.aux_loss

    with on(layout):
        for task in (0.0, 1.0):
            value, grads = jax.jit(jax.value_and_grad(loss))(variables_of(BLOCK), task)
            assert value.shape == () and np.asarray(grads["params"]["gate"]["kernel"]).any()
            assert np.asarray(grads["params"]["wo"]).any() == bool(task)


# --- metrics


def test_metrics_only_on_demand() -> None:
    variables = variables_of(BLOCK)
    out, collected = apply(BLOCK, variables, X, capacity=20, mutable=("moe_metrics",))
    metrics = collected["moe_metrics"]
    assert metrics.keys() == {"load", "dropped", "dropped_weight", "entropy", "max_violation"}
    assert metrics["load"].sum() == 48 and metrics["dropped"] == 28
    assert 0 < metrics["dropped_weight"] < 1 and 0 < metrics["entropy"] <= math.log(E)
    plain = apply(BLOCK, variables, X, capacity=20)
    assert all(same_bits(a, b) for a, b in zip(plain, out, strict=True))


def test_metrics_cost_nothing_when_nobody_asks() -> None:
    """The program without them has neither the logarithm of the entropy nor its operations."""

    def program(mutable: Any) -> str:
        return str(jax.make_jaxpr(lambda v: BLOCK.apply(v, X, mutable=mutable))(variables_of(BLOCK)))

    assert " log " in program(["moe_metrics"]) and " log " not in program(False)
    assert len(program(False)) < len(program(["moe_metrics"]))


def test_metrics_do_not_pile_up() -> None:
    """Sown twice, the new value stands; a tuple that grows would change the structure from step to step."""

    def sow(variables: Any) -> Any:
        return jax.eval_shape(lambda v: BLOCK.apply(v, X, mutable=["moe_metrics"])[1], variables)

    first = sow(variables_of(BLOCK))
    assert sow(variables_of(BLOCK) | first) == first
