"""What a compiled layer sends over the mesh: tokens, their choices and weights, nothing as wide as the experts."""

from __future__ import annotations

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from moe_blocks import MoEBlock, Routing

E, WIDTH = 16, 24
CONFIG = {
    "num_experts": E,
    "num_experts_per_tok": 2,
    "intermediate_size": 8,
    "aux_loss_coeff": 0.01,
    "expert_axis": "expert",
    "batch_axes": ("data", "expert"),
}


class TopK(MoEBlock):
    """The same choice by ``jax.lax.top_k``, which XLA does not split."""

    def route(self, x: jax.Array, token_mask: jax.Array | None) -> Routing:
        routing = super().route(x, token_mask)
        return routing._replace(indices=jax.lax.top_k(jax.lax.stop_gradient(routing.scores), 2)[1])


def collectives(block: MoEBlock, axis_type: AxisType) -> list[tuple[str, tuple[int, ...]]]:
    """Name and result shape of every collective of the forward and backward pass on a 2 x 4 mesh."""
    mesh = jax.make_mesh((2, 4), ("data", "expert"), axis_types=(axis_type,) * 2)
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones((8, 4, WIDTH)), NamedSharding(mesh, P(("data", "expert"))))
        variables = nn.meta.unbox(jax.jit(block.init)(jax.random.key(0), x))

        def loss(variables: dict, x: jax.Array) -> jax.Array:
            output, aux_loss, _ = block.apply(variables, x, capacity=8)
            return output.sum() + aux_loss

        text = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(variables, x).compile().as_text()
    found = re.findall(r"= \w+\[([\d,]*)\]\S* (all-gather|all-reduce|reduce-scatter|all-to-all)\(", text)
    return [(name, tuple(int(n) for n in shape.split(",") if n)) for shape, name in found]


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_routing_needs_no_exchange_of_logits(axis_type: AxisType) -> None:
    gathered = [shape for name, shape in collectives(MoEBlock(**CONFIG), axis_type) if name == "all-gather"]
    assert gathered, "the dispatch gathers the tokens; does the pattern still match the compiled text?"
    assert not [shape for shape in gathered if shape[-1] == E]


def test_a_router_that_gathers_logits_is_seen() -> None:
    gathered = [shape for name, shape in collectives(TopK(**CONFIG), AxisType.Auto) if name == "all-gather"]
    assert [shape for shape in gathered if shape[-1] == E]
