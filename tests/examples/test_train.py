from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.train_lm import data
from examples.train_lm.config import build
from examples.train_lm.mesh import by_row, make_mesh
from examples.train_lm.model import rotate
from examples.train_lm.train import Training, TrainState
from moe_blocks import Capacity
from tests.examples import tiny

DROPLESS = Capacity(slots=None)


@pytest.fixture(scope="module")
def mesh() -> Iterator[jax.sharding.Mesh]:
    mesh = make_mesh(experts=8, expert_parallel=4)
    with jax.set_mesh(mesh):
        yield mesh


@pytest.fixture(scope="module")
def batch(mesh: jax.sharding.Mesh) -> jax.Array:
    text = data.load(tiny.TEXT, window=33).train
    return jax.device_put(data.batch(text, seed=0, step=0, rows=16, window=33), by_row(mesh))


def training(**overrides: str) -> Training:
    return Training.of(build({"policy": {"name": "drop", "factor": 2.0}}, {**tiny.OVERRIDES, **overrides}))


@pytest.fixture(scope="module")
def state(mesh: jax.sharding.Mesh) -> TrainState:
    return training().init(mesh)


def test_experts_are_spread_over_the_expert_axis(state: TrainState) -> None:
    """And so is what the optimiser keeps of them; everything else is whole on every device."""
    found = set()
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        name = jax.tree_util.keystr(path)
        expert = any(f"'{kernel}'" in name for kernel in ("wi_0", "wi_1", "wo"))
        shape = list(leaf.shape)
        if expert:
            shape[1] //= 4  # [layers, experts, ...]
            found.add(name.split(".")[1].split("[")[0])
        assert leaf.addressable_shards[0].data.shape == tuple(shape), name
    assert found == {"params", "opt_state"}


def test_the_evaluation_counts_no_router_loss(mesh: jax.sharding.Mesh, state: TrainState, batch: jax.Array) -> None:
    """LOSS-14: collapsed routing at coefficient 1 evaluates as at coefficient 0."""
    params = jax.tree.map(jnp.copy, state.params)
    gate = params["layers"]["moe"]["gate"]["kernel"]
    params["layers"]["moe"]["gate"]["kernel"] = jnp.zeros_like(gate)  # ties: all tokens to the first two experts
    collapsed = state._replace(params=params)
    losses, penalties = [], []
    for coefficient in ("0.0", "1.0"):
        made = training(aux_loss_coeff=coefficient)
        evaluate = jax.jit(partial(made.eval_step, capacity=DROPLESS))
        losses.append(float(evaluate(collapsed, batch)[1]["loss"]))
        forward = jax.jit(partial(made.model.apply, capacity=DROPLESS))
        penalties.append(float(forward({"params": params}, batch[:, :-1]).aux_loss))
    assert losses[0] == losses[1]
    assert penalties[0] == 0 < 1 < penalties[1]  # the coefficient is at work: a loss of at least one for each layer


def test_a_byte_is_predicted_from_those_before_it(state: TrainState, batch: jax.Array) -> None:
    forward = jax.jit(partial(training().model.apply, capacity=DROPLESS))
    text = batch[:, :-1]
    before = forward({"params": state.params}, text).logits
    after = forward({"params": state.params}, text.at[:, 20].add(1)).logits
    # 1e-5: a changed byte changes which rows are multiplied together, not what they are; float32 sums may differ.
    np.testing.assert_allclose(after[:, :20], before[:, :20], atol=1e-5)
    assert float(jnp.abs(after[:, 20:] - before[:, 20:]).max()) > 1e-2


def test_rotation_depends_on_the_distance_alone() -> None:
    query, key = np.random.default_rng(0).standard_normal((2, 8)).astype(np.float32)
    turned = [rotate(jnp.broadcast_to(x, (1, 16, 1, 8)))[0, :, 0] for x in (query, key)]
    scores = jnp.einsum("qd,kd->qk", *turned, precision="highest")
    np.testing.assert_allclose(scores[:-3, :-3], scores[3:, 3:], atol=1e-5)
    assert float(jnp.abs(scores[0] - scores[0, 0]).max()) > 1e-2
    np.testing.assert_allclose(jnp.linalg.norm(turned[0], axis=-1), np.linalg.norm(query), rtol=1e-6)


def test_micro_batches_change_nothing_but_the_memory(mesh: jax.sharding.Mesh, batch: jax.Array) -> None:
    """Without the router loss, which is not linear; and the expert bias moves once, by the counts of all of them."""
    outcomes = []
    for parts in ("1", "2"):
        made = training(batch_size="16", micro_batches=parts, aux_loss_coeff="0", expert_bias_rate="0.01")
        outcomes.append(jax.jit(partial(made.step, capacity=DROPLESS))(made.init(mesh), batch))
    (whole, _, metrics), (split, demand, split_metrics) = outcomes
    assert float(split_metrics["loss"]) == pytest.approx(float(metrics["loss"]), rel=1e-6)
    assert float(split_metrics["grad_norm"]) == pytest.approx(float(metrics["grad_norm"]), rel=1e-5)
    bias = [np.asarray(state.moe_state["layers"]["moe"]["expert_bias"]) for state in (whole, split)]
    np.testing.assert_array_equal(*bias)
    assert set(np.abs(bias[0]).ravel().tolist()) <= {0.0, float(np.float32(0.01))}
    assert bias[0].any()
    assert demand.shape == (2, 8)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"batch_size": "12"}, "gives 12 sequences at once, which the 8 devices cannot share; make .* a multiple of 8"),
        ({"batch_size": "24", "micro_batches": "2"}, "make batch_size a multiple of 16"),
        ({"experts_per_tok": "9"}, "num_experts_per_tok must be at most num_experts=8"),
    ],
)
def test_what_the_mesh_cannot_divide(mesh: jax.sharding.Mesh, overrides: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        training(**overrides)


@pytest.mark.parametrize(
    ("experts", "expert_parallel", "shape"), [(8, 4, (2, 4)), (8, 8, (1, 8)), (6, 4, (4, 2)), (3, 8, (8, 1))]
)
def test_the_mesh_is_what_devices_and_experts_allow(experts: int, expert_parallel: int, shape: tuple[int, int]) -> None:
    assert make_mesh(experts=experts, expert_parallel=expert_parallel).devices.shape == shape
