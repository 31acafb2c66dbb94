"""A router of one's own: what it may return, and what is said when it returns something else."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from moe_blocks import MoEBlock, Routing

E, K = 4, 2
X = jnp.ones((2, 3, 8))


class Alternating(MoEBlock):
    """No logits: a token's position chooses."""

    broken: Any = None

    def route(self, x: jax.Array, token_mask: jax.Array | None) -> Routing:
        position = jax.lax.broadcasted_iota(jnp.int32, (*x.shape[:-1], K), x.ndim - 2)
        choice = jax.lax.broadcasted_iota(jnp.int32, position.shape, position.ndim - 1)
        uniform = jnp.full((*x.shape[:-1], E), 1 / E)
        routing = Routing((position + choice) % E, jnp.full(position.shape, 0.5), uniform, jnp.zeros_like(uniform))
        return routing._replace(**(self.broken or {}))


def block(**fields: Any) -> Alternating:
    return Alternating(E, K, 16, aux_loss_coeff=0.5, **fields)


def test_a_router_without_logits() -> None:
    (out, aux_loss, total), _ = block().init_with_output(jax.random.key(0), X)
    assert out.shape == X.shape
    assert float(aux_loss) == pytest.approx(0.5, rel=1e-6)  # uniform scores give the coefficient
    assert total.tolist() == [2 * 3 * K]


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"indices": jnp.zeros((2, 3, K), jnp.uint32)}, r"route must return indices of int32\[2, 3, 2\], got .*uint32"),
        ({"weights": jnp.zeros((2, 3))}, r"route must return weights of float32\[2, 3, 2\], got \(\(2, 3\)"),
        ({"scores": None}, r"scores of float32\[2, 3, 4\], got None; a router without logits returns zero logits"),
        ({"logits": jnp.zeros((2, 3, E), jnp.bfloat16)}, r"logits of float32\[2, 3, 4\], got .*bfloat16"),
    ],
)
def test_what_does_not_fit_is_named(broken: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        block(broken=broken).init(jax.random.key(0), X)
