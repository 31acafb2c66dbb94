"""Chunks and turns: every way through small buffers gives what one pass through large ones gives."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_blocks import MoEBlock
from moe_blocks.capacity import Capacity, CapacitySpec
from moe_blocks.expert_parallel import ep_turns
from moe_blocks.passes import in_chunks, in_turns
from tests.moe_blocks import support, test_exchange
from tests.moe_blocks.support import assert_close, same_bits
from tests.moe_blocks.test_exchange import D, E, K, draw, run

T = 7


def one_pass(variables: Any, tokens: Any, weights: Any, experts: Any) -> Any:
    """Expert e scales by its entry; also an integer variable, which has no gradient."""
    scale = variables["scale"].at[experts].get(mode="fill", fill_value=0) * variables["times"].astype(jnp.float32)
    return (weights * scale).sum(-1, keepdims=True) * tokens


def problem(seed: int = 0) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    variables = {"scale": jnp.asarray(rng.normal(size=E), jnp.float32), "times": jnp.int32(3)}
    tokens, weights = jnp.asarray(rng.normal(size=(T, D))), jnp.asarray(rng.random((T, K)))
    experts = jnp.asarray(rng.integers(0, E + 1, size=(T, K)), jnp.int32)
    return variables, tokens, weights, experts


@pytest.mark.parametrize("turns", [1, 2, 5])
def test_turns_add_up(turns: int) -> None:
    variables, tokens, weights, experts = problem()
    turn = jnp.asarray(np.random.default_rng(1).integers(0, turns, size=experts.shape), jnp.int32)

    def loss(scale: Any, tokens: Any, weights: Any, served: Any) -> Any:
        return jnp.sin(served(variables | {"scale": scale}, tokens, weights, experts)).sum()

    def turned(*args: Any) -> Any:
        return in_turns(one_pass, one_pass, *args, turn, jnp.int32(turns), num_experts=E)

    arguments = variables["scale"], tokens, weights
    want = jax.value_and_grad(loss, (0, 1, 2))(*arguments, one_pass)
    got = jax.jit(jax.value_and_grad(lambda *args: loss(*args, turned), (0, 1, 2)))(*arguments)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_close(a, b, 1e-6)
    if turns > 1:  # control: every turn counts
        short = in_turns(one_pass, one_pass, *problem(), turn, jnp.int32(turns - 1), num_experts=E)
        assert np.abs(short - one_pass(*problem())).max() > 0.1


@pytest.mark.parametrize("chunks", [1, 2, 3, 7])
def test_chunks_add_up(chunks: int) -> None:
    got = in_chunks(one_pass, *problem(), chunks=chunks, num_experts=E)
    assert_close(got, one_pass(*problem()), 1e-6)


# --- turns that fit the buffers


def test_a_turn_holds_no_more_than_the_slots() -> None:
    experts = jnp.array([[0, 1], [0, 2], [0, 1], [0, 4], [4, 4]])  # 4: none
    spec = CapacitySpec(5, 4, 2, scope="expert")
    turn, turns = ep_turns(experts, spec=spec, slots=3, further=2)
    assert turn.ravel()[:7].tolist() == [0, 0, 0, 0, 0, 0, 1] and turns == 2
    assert ep_turns(experts, spec=spec, slots=4, further=2)[1] == 1
    turn, turns = ep_turns(experts, spec=CapacitySpec(5, 4, 2), slots=3, further=2)
    assert turn.ravel()[:7].tolist() == [0, 0, 0, 1, 1, 2, 2] and turns == 3
    turn, turns = ep_turns(jnp.full((5, 2), 4), spec=spec, slots=3, further=2)
    assert turns == 1 and not turn.any()


# --- the layer: recompute is dropless


CASES = [("none", 20, "rank"), ("none", 3, "expert"), ("2x4", 4, "rank"), ("2x4", 1, "expert"), ("8", 3, "rank")]


@pytest.mark.parametrize(("mesh", "slots", "scope"), CASES)
def test_recompute_is_dropless(mesh: str, slots: int, scope: str) -> None:
    """To the bit: the numbers are such that all sums are exact. The control drops, and is another result."""
    batch = draw()
    want, want_grads = run(batch, mesh, gradients=True)
    total = run(batch, mesh, slots, scope=scope)[1]
    assert -(-total.max() // slots) >= 2, "there would be only one turn"
    got, grads = run(batch, mesh, Capacity(slots, on_overflow="recompute"), scope=scope, gradients=True)
    assert same_bits(got[0], want[0]) and same_bits(got[2], want[2]) and same_bits(got[1], total)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(want_grads), strict=True):
        assert_close(a, b, 1e-6)
    assert not same_bits(run(batch, mesh, slots, scope=scope)[0], want[0])


def test_recompute_with_room_is_the_capped_pass() -> None:
    batch = draw()
    most = int(run(batch, "2x4")[1].max())
    got, want = (run(batch, "2x4", Capacity(most, on_overflow=what), gradients=True) for what in ("recompute", "drop"))
    assert all(map(same_bits, jax.tree.leaves(got), jax.tree.leaves(want)))


def test_the_memory_of_recompute() -> None:
    """That of the capped pass and one more array of all tokens, however many turns there will be."""
    capped, turned, dropless = (
        test_exchange.temp_bytes(capacity)
        for capacity in (Capacity(1024), Capacity(1024, on_overflow="recompute"), Capacity(None))
    )
    assert turned - capped < 1.1 * 4096 * 32 * 4 < dropless - turned


def test_recompute_has_no_chunks() -> None:
    with pytest.raises(ValueError, match=r'Capacity.chunks must be 1 with on_overflow="recompute", got 2'):
        Capacity(8, chunks=2, on_overflow="recompute")


# --- under the transformations that models use


class Stack(nn.Module):
    """Three residual layers, scanned and rematerialised."""

    axes: Any

    @nn.compact
    def __call__(self, x: Any, mask: Any, capacity: Capacity) -> Any:
        lifted = nn.remat(Residual, static_argnums=(3,))
        layers = nn.scan(
            lifted, {"params": 0}, split_rngs={"params": True}, in_axes=(nn.broadcast, nn.broadcast), length=3
        )
        return layers(self.axes, name="layers")(x, mask, capacity)


class Residual(nn.Module):
    axes: Any

    @nn.compact
    def __call__(self, x: Any, mask: Any, capacity: Capacity) -> Any:
        out = MoEBlock(8, 2, 16, **self.axes)(x, capacity=capacity, token_mask=mask)
        return x + out.output, out.total_recv_tokens


def test_scanned_and_rematerialised_on_a_mesh() -> None:
    """Masked tokens hold NaN, tokens travel by the ragged collective, and every layer overflows."""
    rng = np.random.default_rng(0)
    x, mask = jnp.asarray(rng.normal(size=(8, 6, 8)), jnp.float32), jnp.asarray(rng.random((8, 6)) < 0.8)
    x = jnp.where(mask[..., None], x, jnp.nan)
    params = Stack({}).init(jax.random.key(0), x, mask, Capacity(None))

    def trained(layout: Any, capacity: Capacity, **axes: Any) -> Any:
        def loss(params: Any, x: Any) -> Any:
            out, demand = Stack(support.axes(layout) | axes).apply(params, x, mask, capacity)
            return jnp.square(jnp.where(mask[..., None], out, 0).astype(jnp.float32)).sum(), demand

        with support.on(layout):
            result = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(params, x)
            return jax.tree.map(np.asarray, result)

    want = trained(None, Capacity(None))
    capacity = Capacity(3, on_overflow="recompute")
    (loss, demand), grads = trained(support.LAYOUTS["2x4"], capacity, collective="ragged_all_to_all")
    assert (demand.max(-1) > 3).all()
    assert_close(loss, want[0][0], 3e-6)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(want[1]), strict=True):
        assert_close(a, b, 3e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-6), (jnp.bfloat16, 1e-2)])
def test_mapped_over_a_batch(dtype: Any, tolerance: float) -> None:
    block, x = MoEBlock(8, 2, 16), jnp.asarray(np.random.default_rng(1).normal(size=(4, 6, 8)), dtype)
    variables = block.init(jax.random.key(0), x)

    def energy(x: Any, capacity: Capacity) -> Any:
        out = jax.vmap(lambda x: block.apply(variables, x, capacity=capacity).output)(x)
        return jnp.square(out.astype(jnp.float32)).sum()

    want, got = (jax.grad(energy)(x, capacity) for capacity in (Capacity(None), Capacity(2, on_overflow="recompute")))
    assert_close(got, want, tolerance)
