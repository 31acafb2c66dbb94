"""A capacity for each layer of a real model, whose layers are unequally balanced."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from moe_blocks import Capacity, MoEBlock, Router
from policies import AdaptiveGrow, CapacityPolicy, Drop, StaticFactor, StepReport, StepRunner

LAYERS, E, K, D, TOKENS = 3, 8, 2, 16, 64


class Model(nn.Module):
    """Unrolled residual layers, each with a capacity of its own."""

    @nn.compact
    def __call__(self, x: Any, capacity: Capacity) -> Any:
        demands = []
        for i in range(LAYERS):
            moe = MoEBlock(E, K, 8, router=Router(norm_topk_prob=True), capacity_scope="expert", name=f"moe_{i}")
            out = moe(nn.LayerNorm(use_scale=False, use_bias=False)(x), capacity=capacity.layer(i))
            x += out.output
            demands.append(out.total_recv_tokens)
        return x, demands


def train(policy: CapacityPolicy, steps: int = 5) -> tuple[list[StepReport], list[float]]:
    model, rng = Model(), np.random.default_rng(0)
    draws = [jnp.asarray(rng.normal(size=(1, TOKENS, D)), jnp.float32) for _ in range(steps)]
    batches = [x.at[..., 0].set(3.0) for x in draws]  # what all tokens have in common
    x = batches[0]
    params = nn.unbox(model.init(jax.random.key(0), x, Capacity(None)))["params"]
    # The last layer's router wants two experts for all tokens, the others ignore what all tokens have in common.
    for i in range(LAYERS):
        kernel = params[f"moe_{i}"]["gate"]["kernel"].at[0].set(0)
        params[f"moe_{i}"]["gate"]["kernel"] = kernel.at[0, :K].set(4.0) if i == LAYERS - 1 else kernel

    def step(params: Any, batch: Any, *, capacity: Capacity) -> Any:
        def loss_fn(params: Any) -> Any:
            out, demands = model.apply({"params": params}, batch, capacity)
            return jnp.square(out - jnp.roll(batch, 1, axis=1)).mean(), demands

        (loss, demands), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), demands, {"loss": loss}

    spec = MoEBlock(E, K, 8, capacity_scope="expert").capacity_spec(x.shape)
    runner = StepRunner(step, policy, spec)
    reports = list(runner.run(params, batches))
    return reports, [float(report.metrics["loss"]) for report in reports]


def slots(reports: list[StepReport]) -> int:
    """Over all layers of the steps that counted."""
    return sum(report.capacity.layer(i).slots or TOKENS for report in reports for i in range(LAYERS))


def test_it_saves_slots_and_changes_no_step() -> None:
    _, want = train(StaticFactor(None))
    (whole, losses), (each, losses_each) = (
        train(AdaptiveGrow(1.0, growth=1.5, per_layer=per_layer)) for per_layer in (False, True)
    )
    np.testing.assert_allclose(losses, want, rtol=1e-6)
    np.testing.assert_allclose(losses_each, want, rtol=1e-6)
    assert max(report.attempts for report in each) >= 2
    _, dropped = train(Drop(1.0))  # the control: without the retries the steps are others
    assert max(abs(np.array(dropped) / want - 1)) > 1e-3
    assert slots(each) < 0.75 * slots(whole)
    last = each[-1]
    assert len(last.by_layer) == LAYERS and last.by_layer[2] > 1.5 * max(last.by_layer[:2])
