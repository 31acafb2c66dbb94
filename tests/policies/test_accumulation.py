from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from policies import accumulate


def micro_step_of(w: jax.Array) -> Any:
    """A task loss, an auxiliary loss of weight 0.01 on the mean activation, a load and a demand."""

    def micro_step(batch: Any) -> Any:
        def loss(w: jax.Array) -> Any:
            hidden = jnp.tanh(batch["x"] @ w)
            aux = 0.01 * jnp.square(hidden.mean(axis=0)).sum()
            return jnp.square(hidden - batch["y"]).mean() + aux, aux

        (value, aux), grad = jax.value_and_grad(loss, has_aux=True)(w)
        load = jnp.sum(batch["x"] > 0, axis=0, dtype=jnp.int32)
        return {"w": grad}, [load.max(keepdims=True), load], {"loss": value, "aux": aux, "load": load}

    return micro_step


@pytest.fixture
def w() -> jax.Array:
    return jax.random.normal(jax.random.key(0), (4, 3))


def draw(rows: int) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(1))
    return {"x": jax.random.normal(keys[0], (rows, 4)), "y": jax.random.normal(keys[1], (rows, 3))}


def test_loss_5_identical_micro_batches_weigh_as_one(w: jax.Array) -> None:
    one = draw(6)
    four = jax.tree.map(lambda x: jnp.repeat(x, 4, axis=0), one)  # micro-batch m takes the rows m::4
    grads, demand, metrics = micro_step_of(w)(one)
    got_grads, got_demand, got_metrics = accumulate(micro_step_of(w), four, num_micro_batches=4)
    np.testing.assert_allclose(got_grads["w"], grads["w"], rtol=1e-5)
    for name in ("loss", "aux"):
        np.testing.assert_allclose(got_metrics[name], metrics[name], rtol=1e-5)
    assert got_metrics["load"].tolist() == (4 * metrics["load"]).tolist()
    assert [d.tolist() for d in got_demand] == [d.tolist() for d in demand]


def test_means_sums_and_maxima_over_different_micro_batches(w: jax.Array) -> None:
    batch = draw(12)
    parts = [micro_step_of(w)(jax.tree.map(lambda x, m=m: x[m::3], batch)) for m in range(3)]
    grads, demand, metrics = jax.jit(lambda b: accumulate(micro_step_of(w), b, num_micro_batches=3))(batch)
    np.testing.assert_allclose(grads["w"], np.mean([part[0]["w"] for part in parts], axis=0), rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"], np.mean([part[2]["loss"] for part in parts]), rtol=1e-5)
    assert metrics["load"].tolist() == sum(part[2]["load"] for part in parts).tolist()
    assert demand[1].tolist() == np.max([part[1][1] for part in parts], axis=0).tolist()
    assert demand[1].tolist() != parts[0][1][1].tolist(), "one micro-batch has every maximum: the test shows nothing"


def test_layout_is_that_of_one_micro_step(w: jax.Array) -> None:
    micro_step, batch = micro_step_of(w), draw(4)
    one = jax.eval_shape(micro_step, batch)
    assert jax.eval_shape(lambda b: accumulate(micro_step, b, num_micro_batches=2), batch) == one
    assert jax.eval_shape(lambda b: accumulate(micro_step, b, num_micro_batches=1), batch) == one


def test_low_precision_gradients_are_summed_in_float32() -> None:
    """In bfloat16 the sum of 512 ones would stop at 256."""

    def micro_step(x: jax.Array) -> Any:
        return x.sum(), jnp.array([1]), ()

    grads, _, _ = accumulate(micro_step, jnp.ones(512, jnp.bfloat16), num_micro_batches=512)
    assert (float(grads), grads.dtype) == (1.0, jnp.bfloat16)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_rows_spread_over_ranks_are_split_where_they_are(kind: AxisType) -> None:
    mesh = Mesh(np.array(jax.devices()), ("data",), axis_types=(kind,))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    x = jax.device_put(np.arange(32, dtype=np.float32), sharding)

    def micro_step(x: jax.Array) -> Any:
        return jnp.square(x), (x > 3).astype(jnp.int32), ()

    with jax.set_mesh(mesh):
        program = jax.jit(lambda x: accumulate(micro_step, x, num_micro_batches=2)).lower(x).compile()
        grads, demand, _ = program(x)
    halves = np.arange(32).reshape(16, 2)
    np.testing.assert_array_equal(grads, np.square(halves).mean(axis=1))
    np.testing.assert_array_equal(demand, (halves > 3).any(axis=1))
    assert grads.sharding.is_equivalent_to(sharding, 1)
    assert not re.search(r"all-gather|all-to-all|collective-permute|all-reduce", program.as_text())


@pytest.mark.parametrize(
    ("rows", "parts", "message"),
    [
        (
            6,
            4,
            r"batch\['x'\] of shape \(6, 4\) cannot be split into num_micro_batches=4; its first axis must be a mult",
        ),
        (6, 0, "num_micro_batches must be an integer of at least 1, got 0"),
        (6, 2.0, "num_micro_batches must be an integer of at least 1, got 2.0"),
    ],
)
def test_refuses_a_split_that_does_not_fit(w: jax.Array, rows: int, parts: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        accumulate(micro_step_of(w), draw(rows), num_micro_batches=parts)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ((jnp.ones(2), jnp.array([1])), r"micro_step must return .*got a tuple of 2"),
        (
            (jnp.ones(2), jnp.array([1]), {"done": jnp.array(True)}),
            r"micro_step returned bool at \[2\]\['done'\], which has",
        ),
    ],
)
def test_refuses_outputs_that_do_not_add_up(outputs: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        accumulate(lambda x: outputs, jnp.ones(4), num_micro_batches=2)
