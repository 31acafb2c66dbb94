"""Dispatch, experts and combine as one pure function: chunks, ample buffers, and what does not change a bit."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_blocks.capacity import Capacity, CapacitySpec
from moe_blocks.exchange import exchange
from moe_blocks.experts import feed_forward_tokens
from tests.moe_blocks import support
from tests.moe_blocks.oracle import Oracle
from tests.moe_blocks.support import LAYOUTS, Layout, assert_close, assert_leaves_close, same_bits

E, K, D, F, SHAPE = 8, 2, 6, 4, (8, 5)
MESHES: dict[str, Layout | None] = LAYOUTS


def draw(seed: int = 0) -> dict[str, Any]:
    """A crowded batch: low experts are wanted more; a fifth of the tokens is padding.

    Small integers, and powers of two as weights: every sum is exact in float32, so two programs that compute the same
    agree to the bit, whatever order, vector width or contraction XLA picks for other numbers of rows.
    """
    rng = np.random.default_rng(seed)
    mask = rng.random(SHAPE) < 0.8
    shapes = {"wi_0": (E, D, F), "wi_1": (E, D, F), "wo": (E, F, D)}
    return {
        "params": {name: rng.integers(-2, 3, size=shape).astype(np.float32) for name, shape in shapes.items()},
        "tokens": (mask[..., None] * rng.integers(-3, 4, size=(*SHAPE, D))).astype(np.float32),
        "ids": np.argsort(rng.random((*SHAPE, E)) + np.linspace(0, 0.7, E), axis=-1)[..., :K].astype(np.int32),
        "weights": rng.choice(np.float32([0.25, 0.5, 1, 2]), (*SHAPE, K)),
        "mask": mask,
    }


def experts(params: Any, tokens: Any, weights: Any, layout: Any) -> Any:
    return feed_forward_tokens(tokens, weights, layout, params, activation=jax.nn.relu)


@functools.cache
def compiled(mesh: str, capacity: Capacity, scope: str, drop_order: str, gradients: bool) -> Any:
    layout = MESHES[mesh]
    ep = layout.shape["expert"] if layout else 1
    devices = len(layout.places) if layout else 1
    spec = CapacitySpec(int(np.prod(SHAPE)) // devices, E, K, ep, scope)

    def layer(params: Any, tokens: Any, ids: Any, weights: Any, mask: Any) -> Any:
        return exchange(
            experts, params, tokens, ids, weights, mask, spec=spec, capacity=capacity, drop_order=drop_order,
            **support.axes(layout),
        )  # fmt: skip

    def with_gradients(params: Any, tokens: Any, ids: Any, weights: Any, mask: Any) -> Any:
        def out(params: Any, tokens: Any, weights: Any) -> Any:
            output, *rest = layer(params, tokens, ids, weights, mask)
            return output, rest

        output, pullback, rest = jax.vjp(out, params, tokens, weights, has_aux=True)
        return (output, *rest), pullback(jnp.cos(7 * output))

    return jax.jit(with_gradients if gradients else layer)


def run(
    batch: Any, mesh: str = "none", capacity: Any = None, *, scope: str = "rank", drop_order: str = "position",
    gradients: bool = False,
) -> Any:  # fmt: skip
    capacity = capacity if isinstance(capacity, Capacity) else Capacity(capacity)
    function = compiled(mesh, capacity, scope, drop_order, gradients)
    with support.on(MESHES[mesh]):
        result = function(*(batch[name] for name in ("params", "tokens", "ids", "weights", "mask")))
        return jax.tree.map(np.asarray, result)


BUFFERS = [("none", None, "rank"), ("none", 20, "rank"), ("2x4", None, "rank"), ("2x4", 2, "expert")]


@pytest.mark.parametrize(("mesh", "slots", "scope"), BUFFERS)
def test_chunks_change_no_bit(mesh: str, slots: int | None, scope: str) -> None:
    """3 and 7 do not divide the 40 tokens, 2 not the five of a rank, which has no more than five chunks."""
    batch = draw()
    want = run(batch, mesh, slots, scope=scope)
    for chunks in (2, 3, 7) if mesh == "none" else (2, 7):
        got = run(batch, mesh, Capacity(slots, chunks=chunks), scope=scope)
        assert all(same_bits(a, b) for a, b in zip(got, want, strict=True)), chunks
    dropped = (batch["mask"][..., None] & ~want[2]).sum()
    assert (dropped > 0) == (slots is not None), "the drops are those of the whole batch, and there are some"


def test_more_chunks_than_tokens() -> None:
    batch = draw()
    want, got = run(batch, capacity=20), run(batch, capacity=Capacity(20, chunks=99))
    assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))


def test_chunks_of_real_numbers() -> None:
    """Another number of rows may be another matrix product for XLA, whose last bit may differ."""
    batch, rng = draw(), np.random.default_rng(0)
    batch["tokens"] = (batch["tokens"] * rng.normal(size=batch["tokens"].shape)).astype(np.float32)
    want = run(batch)
    for chunks in (3, 7):
        assert_close(run(batch, capacity=Capacity(None, chunks=chunks))[0], want[0], 1e-6)


@pytest.mark.parametrize(("mesh", "slots"), [("none", 20), ("2x4", 4)])
def test_gradients_in_chunks(mesh: str, slots: int) -> None:
    """A sum over tokens is now a sum over chunks, so close and not equal."""
    batch = draw(1)
    want, want_grads = run(batch, mesh, slots, drop_order="weight", gradients=True)
    got, got_grads = run(batch, mesh, Capacity(slots, chunks=3), drop_order="weight", gradients=True)
    assert same_bits(got[2], want[2]) and not want[2][batch["mask"]].all()
    for a, b in zip(jax.tree.leaves((got[0], got_grads)), jax.tree.leaves((want[0], want_grads)), strict=True):
        assert_close(a, b, 1e-6)


@pytest.mark.parametrize("mesh", ["none", "2x4"])
@pytest.mark.parametrize("drop_order", ["position", "weight"])
def test_pol_6_v16_an_ample_buffer_changes_no_bit(mesh: str, drop_order: str) -> None:
    """As many slots as the demand, and a few more; one fewer is the control."""
    batch = draw(2)
    want = run(batch, mesh)
    most = int(want[1].max())
    for slots in (most, most + 3) if drop_order == "position" else (most,):
        got = run(batch, mesh, slots, drop_order=drop_order)
        assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))
    short = run(batch, mesh, most - 1, drop_order=drop_order)
    assert same_bits(short[1], want[1])
    assert not same_bits(short[0], want[0]) and (want[2] & ~short[2]).sum() == (want[1] == most).sum()


def test_v16_gradients_with_an_ample_buffer() -> None:
    batch = draw(2)
    want, want_grads = run(batch, gradients=True)
    got, got_grads = run(batch, capacity=int(want[1].max()), gradients=True)
    assert same_bits(got[0], want[0])
    for a, b in zip(jax.tree.leaves(got_grads), jax.tree.leaves(want_grads), strict=True):
        assert_close(a, b, 1e-6)


def test_v16_permuting_tokens_permutes_outputs_exactly() -> None:
    batch, order = draw(3), np.random.default_rng(0).permutation(SHAPE[0] * SHAPE[1])

    def permuted(x: np.ndarray) -> np.ndarray:
        return x.reshape(-1, *x.shape[2:])[order].reshape(x.shape)

    moved = batch | {name: permuted(batch[name]) for name in ("tokens", "ids", "weights", "mask")}
    want, got = run(batch, gradients=True), run(moved, gradients=True)
    assert same_bits(permuted(want[0][0]), got[0][0])
    assert same_bits(permuted(want[1][1]), got[1][1])  # the gradient of the tokens
    assert same_bits(permuted(want[1][2]), got[1][2])
    assert_leaves_close(got[1][0], want[1][0], 1e-6)


@pytest.mark.parametrize("mesh", ["none", "2x4"])
@pytest.mark.parametrize(("scope", "slots"), [("rank", 5), ("expert", 2)])
def test_against_the_oracle_on_a_crowded_batch(mesh: str, scope: str, slots: int) -> None:
    batch = draw(4)
    oracle = Oracle(E, K, slots, scope, places=support.places(MESHES[mesh]), activation="relu")
    choice = batch["ids"], batch["weights"]
    want = oracle(batch["params"], batch["tokens"], batch["mask"], choice=choice)
    output, total, kept = run(batch, mesh, slots, scope=scope)
    assert_close(output, want.output, 1e-6)
    assert total.tolist() == want.total_recv_tokens.tolist() and (total > slots).any()
    np.testing.assert_array_equal(kept, want.kept)


def temp_bytes(capacity: Capacity) -> int:
    """Of forward and backward, with 4096 tokens whose buffer outweighs all else."""
    tokens, width = 4096, 32
    spec = CapacitySpec(tokens, 4, 2)
    params = {name: jnp.zeros((4, width, width)) for name in ("wi_0", "wi_1", "wo")}

    def loss(x: Any, ids: Any) -> Any:
        weights = jnp.ones(ids.shape, jnp.float32)
        return exchange(experts, params, x, ids, weights, None, spec=spec, capacity=capacity)[0].sum()

    shapes = jax.ShapeDtypeStruct((tokens, width), jnp.float32), jax.ShapeDtypeStruct((tokens, 2), jnp.int32)
    return jax.jit(jax.grad(loss)).lower(*shapes).compile().memory_analysis().temp_size_in_bytes


def test_chunks_bound_the_memory() -> None:
    """Eight chunks of a dropless pass hold an eighth of the rows, so they need less than half of the whole."""
    assert temp_bytes(Capacity(None, chunks=8)) < temp_bytes(Capacity(None)) / 2
