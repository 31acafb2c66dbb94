"""The oracle against central differences and numbers worked out by hand: what judges the layer is judged first."""

from __future__ import annotations

import numpy as np
import pytest

from tests.moe_blocks import support
from tests.moe_blocks.oracle import Oracle, places

E, D, F = 4, 5, 3

ORACLES = {
    "plain": Oracle(E, 2, aux_loss_coeff=0.3, z_loss_coeff=0.2),
    "normalised": Oracle(E, 2, norm_topk_prob=True, scaling_factor=2.5, aux_loss_coeff=0.3, activation="tanh"),
    "top-k first": Oracle(E, 3, use_pre_softmax=False, z_loss_coeff=0.2),
    "sigmoid, capped": Oracle(E, 2, score_function="sigmoid", norm_topk_prob=True, aux_loss_coeff=0.3, slots=2),
    "by weight on a mesh": Oracle(E, 2, slots=2, scope="expert", drop_order="weight", places=places(1, 2)),
}


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("name", ORACLES)
def test_gradients_are_the_central_differences(name: str, gated: bool) -> None:
    oracle, rng = ORACLES[name], np.random.default_rng(3)
    params = support.draw_params(1, E=E, D=D, F=F, gated=gated, use_bias=True)
    params = {key: value.astype(np.float64) for key, value in params.items()}
    x, mask = rng.normal(size=(2, 3, D)), np.array([[True, True, False], [True, True, True]])
    d_output, d_aux_loss = rng.normal(size=x.shape), 0.7
    assert oracle(params, x, mask).margin > 1e-3

    def objective(values: dict[str, np.ndarray]) -> float:
        result = oracle({key: values[key] for key in params}, values["x"], mask)
        return float((result.output * d_output).sum() + result.aux_loss * d_aux_loss)

    def central_differences(name: str, step: float = 1e-5) -> np.ndarray:
        slopes = np.zeros(point[name].shape)
        for place in np.ndindex(slopes.shape):
            high, low = ({key: value.copy() for key, value in point.items()} for _ in range(2))
            high[name][place] += step
            low[name][place] -= step
            slopes[place] = (objective(high) - objective(low)) / (2 * step)
        return slopes

    point = {**params, "x": x}
    grads = oracle.grads(params, x, d_output, d_aux_loss, mask)
    assert grads.keys() == point.keys()
    for key in ("x", "gate", "wo", *(["wi_1_bias"] if gated else ["wi_0"])):
        np.testing.assert_allclose(grads[key], central_differences(key), atol=1e-8, rtol=1e-7)


def test_weights_gradient_of_a_given_choice() -> None:
    """One token, one expert: d(weight * f)/d(weight) is f itself, and nothing when the assignment is dropped."""
    params = support.draw_params(0, E=2, D=D, F=F, gate=False)
    x = np.ones((1, 3, D))
    choice = (np.zeros((1, 3, 1), int), np.full((1, 3, 1), 0.5))
    oracle = Oracle(2, 1, slots=2)
    grads = oracle.grads(params, x, np.ones_like(x), choice=choice)
    value = oracle.expert(params, 0, x[0, 0]).sum()
    np.testing.assert_allclose(grads["weights"].ravel(), [value, value, 0])
    assert not grads["wo"][1].any()


def test_who_gets_a_slot_by_hand() -> None:
    """Two ranks of 2 sequences x 2 positions, all to expert 0, which has three slots.

    By position: rank 0 and rank 1 at (position 0, leading 0), then rank 0 at (position 0, leading 1).
    """
    ids = np.zeros((4, 2, 1), int)
    mask = np.ones((4, 2), bool)
    oracle = Oracle(2, 1, slots=3, places=places(1, 2))
    kept, total, _ = oracle.admit(ids, np.ones(ids.shape), mask)
    assert kept[..., 0].tolist() == [[True, False], [True, False], [True, False], [False, False]]
    assert total.tolist() == [8, 0]

    weights = np.arange(8.0).reshape(4, 2, 1)
    kept, _, _ = Oracle(2, 1, slots=3, drop_order="weight", places=places(1, 2)).admit(ids, weights, mask)
    assert kept[..., 0].ravel().tolist() == [False] * 5 + [True] * 3
