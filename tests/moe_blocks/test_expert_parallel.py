"""The three public functions inside ``shard_map``: hand-made tables, gradients, and a process that changes everything.

Experts are tagged where it helps: expert e multiplies its rows by ``tags[e]``.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from moe_blocks import Rows, ep_combine, ep_dispatch, ep_prepare
from moe_blocks.mesh import place
from tests.moe_blocks.oracle import Oracle
from tests.moe_blocks.support import LAYOUTS, MORE_LAYOUTS, Layout, on, places

SMALL: dict[str, Layout | None] = {"2": Layout({"expert": 2}), "2x2": Layout({"data": 2, "expert": 2})}
MESHES = LAYOUTS | MORE_LAYOUTS | SMALL


@functools.cache
def compiled(mesh: str, E: int, slots: int | None, scope: str, drop_order: str) -> Any:
    layout = MESHES[mesh]
    axis_name = None if layout is None else layout.axes["expert_axis"]

    def layer(ids: Any, weights: Any, mask: Any, tokens: Any, tags: Any) -> Any:
        counts, total, handle = ep_prepare(
            ids, weights, mask, num_experts=E, slots=slots, scope=scope, drop_order=drop_order, axis_name=axis_name
        )
        rows = ep_dispatch(handle, tokens, weights)
        tag = jnp.repeat(tags, counts, total_repeat_length=rows.tokens.shape[0])
        # What experts make of empty rows is their affair: here NaN.
        filled = jnp.arange(rows.tokens.shape[0]) < counts.sum()
        outputs = jnp.where(filled[:, None], rows.tokens * tag[:, None], jnp.nan)
        out = ep_combine(handle, rows._replace(tokens=jax.lax.stop_gradient(outputs * 0) + outputs))
        return counts, total, handle.kept, rows, out

    if layout is None:
        return jax.jit(layer)
    by_token = P(layout.axes["batch_axes"])
    return mapped(layer, by_token, by_token, by_token, by_token, P(axis_name), out_specs=by_token)


def mapped(function: Any, *in_specs: P, out_specs: P) -> Any:
    """``function`` on each device of the current mesh."""

    def laid_out(*args: Any) -> Any:
        inner = jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        return inner(*(place(arg, spec) for arg, spec in zip(args, in_specs, strict=True)))

    return jax.jit(laid_out)


def exchanged(
    mesh: str,
    ids: Any,
    *,
    E: int,
    weights: Any = None,
    mask: Any = None,
    tokens: Any = None,
    tags: Any = None,
    slots: int | None = None,
    scope: str = "rank",
    drop_order: str = "position",
) -> Any:
    """(token_counts, total_recv_tokens, kept, rows, output) of all devices, in their order."""
    ids = np.asarray(ids, np.int32)
    weights = np.ones(ids.shape, np.float32) if weights is None else np.asarray(weights, np.float32)
    mask = np.ones(ids.shape[:-1], bool) if mask is None else np.asarray(mask)
    tokens = np.ones((*ids.shape[:-1], 2), np.float32) if tokens is None else np.asarray(tokens, np.float32)
    tags = np.ones(E, np.float32) if tags is None else np.asarray(tags, np.float32)
    with on(MESHES[mesh]):
        result = compiled(mesh, E, slots, scope, drop_order)(ids, weights, mask, tokens, tags)
        return jax.tree.map(np.asarray, result)


# --- hand-made tables


@pytest.mark.parametrize(
    ("choice", "counts"),
    [
        (lambda t: [(2 * t) % 4, (2 * t + 1) % 4], [[2, 2]] * 4),  # V1
        (lambda t: [0, 1 + t % 3], [[4, 2], [1, 1], [4, 1], [2, 1]]),  # V2
        (lambda t: sorted([t % 4, (t + 1) % 4]), [[2, 2]] * 4),  # V3
    ],
)
def test_v1_v2_v3_counts(choice: Any, counts: list[list[int]]) -> None:
    got, total, *_ = exchanged("2x2", [choice(t) for t in range(8)], E=4)
    assert got.reshape(4, 2).tolist() == counts
    assert total.tolist() == [sum(c) for c in counts]


V4 = [[0, 1 + t % 3] for t in range(96)]


def test_v4_overflow_and_exactly_full() -> None:
    """32 slots; ranks 0 and 2 are asked for 64, ranks 1 and 3 for exactly 32.

    Three positions bring rank 0 eight assignments, six for expert 0 and two for expert 1, so twelve positions fill it:
    24 and 8. In buffer order expert 1 would have lost all of its 16.
    """
    counts, total, kept, *_ = exchanged("2x2", V4, E=4, slots=32)
    assert total.tolist() == [64, 32, 64, 32]
    assert counts.reshape(4, 2).tolist() == [[24, 8], [16, 16], [24, 8], [16, 16]]
    kept = kept.reshape(4, 24, 2)  # each sender
    assert (kept == kept[0]).all(), "a sender lost more than another"
    assert kept[0, :12].all() and not kept[0, 12:, 0].any()
    assert kept[0, 12:, 1].tolist() == [t % 3 != 0 for t in range(12)]
    dropless, total, kept, *_ = exchanged("2x2", V4, E=4)
    assert dropless.reshape(4, 2).tolist() == [[48, 16], [16, 16], [48, 16], [16, 16]]
    assert total.tolist() == [64, 32, 64, 32] and kept.all()


def test_v5_first_positions_keep_their_slots() -> None:
    """Four slots, expert 0 <- T0, T4, expert 1 <- T1, T2, T3, T5: T4 and T5 lose, not expert 1's last ones."""
    ids = [[0], [1], [1], [1], [0], [1]]
    counts, total, kept, *_ = exchanged("none", ids, E=2, slots=4)
    assert (counts.tolist(), total.tolist()) == ([1, 3], [6])
    assert kept.ravel().tolist() == [True] * 4 + [False] * 2
    counts, total, kept, *_ = exchanged("none", ids, E=2, slots=2, scope="expert")
    assert (counts.tolist(), total.tolist()) == ([2, 2], [2, 4])
    assert kept.ravel().tolist() == [True, True, True, False, True, False]


@pytest.mark.parametrize("mesh", ["none", "2x2", "expert first"])
def test_v6_identity_experts(mesh: str) -> None:
    rng = np.random.default_rng(0)
    ids = np.array([rng.permutation(4)[:2] for _ in range(16)])
    tokens = rng.normal(size=(16, 3)).astype(np.float32)
    half = np.full(ids.shape, 0.5)
    *_, out = exchanged(mesh, ids, E=4, weights=half, tokens=tokens)
    np.testing.assert_array_equal(out, tokens)

    def energy(tokens: Any) -> Any:
        layer = compiled(mesh, 4, None, "rank", "position")
        out = layer(ids, jnp.full(ids.shape, 0.5), np.ones(16, bool), tokens, jnp.ones(4))[-1]
        return 0.5 * (out**2).sum()

    with on(MESHES[mesh]):
        np.testing.assert_array_equal(jax.grad(energy)(tokens), tokens)


BY_TOKEN = P(("data", "expert"))


def test_v7_dispatch_gradient() -> None:
    """Each token has k rows, so the gradient of half the squared norm of all rows is k times the token."""
    tokens = np.random.default_rng(0).normal(size=(96, 3)).astype(np.float32)

    def rows(tokens: Any, ids: Any) -> Any:
        weights = jnp.ones(ids.shape)
        _, _, handle = ep_prepare(ids, weights, num_experts=4, axis_name="expert")
        return ep_dispatch(handle, tokens, weights).tokens

    with on(MESHES["2x2"]):
        layer = mapped(rows, BY_TOKEN, BY_TOKEN, out_specs=BY_TOKEN)
        slope = jax.grad(lambda x: 0.5 * (layer(x, jnp.array(V4)) ** 2).sum())(tokens)
    np.testing.assert_array_equal(slope, 2 * tokens)


def test_v8_combine_gradient() -> None:
    """Filled slots get c / k, empty ones exactly zero."""

    def combined(values: Any, ids: Any) -> Any:
        half = jnp.full(ids.shape, 0.5)
        _, _, handle = ep_prepare(ids, half, num_experts=4, slots=40, axis_name="expert")
        weights = ep_dispatch(handle, jnp.zeros((*ids.shape[:-1], 1)), half).weights
        return ep_combine(handle, Rows(values, weights))

    c = 3.0
    ids = np.array([[t % 4, (t + 1) % 4] for t in range(64)], np.int32)
    with on(MESHES["2x2"]):
        layer = mapped(combined, BY_TOKEN, BY_TOKEN, out_specs=BY_TOKEN)
        values = jnp.full((4 * 40, 2), c)
        np.testing.assert_array_equal(layer(values, ids), np.full((64, 2), c))
        slope = jax.grad(lambda v: 0.5 * (layer(v, ids) ** 2).sum())(values)
    wanted = np.zeros((4, 40, 2))
    wanted[:, :32] = c / 2
    np.testing.assert_array_equal(slope, wanted.reshape(160, 2))


def test_v15_weight_gradient() -> None:
    """loss = sum(received weight * (slot + 1)): the gradient of a weight is its slot plus one, exactly."""
    ids = np.array([[t % 4, (t + 1 + t // 4 % 3) % 4] for t in range(16)], np.int32)

    def weights_received(weights: Any, ids: Any) -> Any:
        _, _, handle = ep_prepare(ids, weights, num_experts=4, axis_name="expert")
        return ep_dispatch(handle, jnp.zeros((*ids.shape[:-1], 1)), weights).weights

    with on(MESHES["2x2"]):
        layer = mapped(weights_received, BY_TOKEN, BY_TOKEN, out_specs=BY_TOKEN)
        weights = jnp.ones(ids.shape)
        slots = 16  # 4 tokens * 2 ranks * min(2, 2)
        numbers = np.tile(np.arange(1, slots + 1, dtype=np.float32), 4)
        slope = np.asarray(jax.grad(lambda w: (layer(w, ids) * numbers).sum())(weights))
    wanted = np.zeros(ids.shape)
    for group, rank in itertools.product(range(2), range(2)):
        mine = [(ids[t, j], t, j) for t in range(8 * group, 8 * group + 8) for j in range(2) if ids[t, j] // 2 == rank]
        for slot, (_, t, j) in enumerate(sorted(mine)):
            wanted[t, j] = slot + 1
    np.testing.assert_array_equal(slope, wanted)


def test_v11_closed_form() -> None:
    """Two linear layers with a forced routing are one matrix for each token; so are their gradients."""
    rng = np.random.default_rng(0)
    T, D, E, k = 8, 6, 4, 2
    kernels = rng.normal(size=(2, E, D, D)) / np.sqrt(D)
    tokens = rng.normal(size=(T, D))
    ids = np.array([[[(t * k + j + layer) % E for j in range(k)] for t in range(T)] for layer in range(2)], np.int32)
    matrix = np.stack([np.eye(D)] * T)
    for layer in range(2):
        matrix = np.stack([m @ kernels[layer][ids[layer, t]].mean(0) for t, m in enumerate(matrix)])
    wanted = np.einsum("td,tdf->tf", tokens, matrix)

    def model(tokens: Any, kernels: Any, ids: Any) -> Any:
        for layer in range(2):
            half = jnp.full((*tokens.shape[:-1], k), 0.5)
            counts, _, handle = ep_prepare(ids[layer], half, num_experts=E, axis_name="expert")
            rows = ep_dispatch(handle, tokens, half)
            mine = jnp.repeat(kernels[layer], counts, axis=0, total_repeat_length=rows.tokens.shape[0])
            tokens = ep_combine(handle, rows._replace(tokens=jnp.einsum("md,mdf->mf", rows.tokens, mine)))
        return tokens

    with on(MESHES["2x2"]):
        network = mapped(model, BY_TOKEN, P(None, "expert"), P(None, ("data", "expert")), out_specs=BY_TOKEN)
        out, pullback = jax.vjp(lambda x: network(x, jnp.float32(kernels), ids), jnp.float32(tokens))
        [slope] = pullback(out)
        again = network(jnp.float32(tokens), jnp.float32(kernels), ids)
    np.testing.assert_allclose(out, wanted, atol=2e-6)
    np.testing.assert_allclose(slope, np.einsum("tf,tdf->td", wanted, matrix), atol=5e-6)
    np.testing.assert_array_equal(out, again)


# --- cases


@pytest.mark.parametrize("mesh", ["none", "4", "8"])
def test_ep_4_global_and_local_ids(mesh: str) -> None:
    tags, weight = np.arange(8) + 1.0, 0.75
    for ids in (np.arange(8).reshape(8, 1), np.full((8, 1), 7)):
        *_, out = exchanged(mesh, ids, E=8, weights=np.full(ids.shape, weight), tags=tags)
        np.testing.assert_allclose(out[:, 0], (ids[:, 0] + 1) * weight, rtol=1e-6)


@pytest.mark.parametrize("mesh", ["none", "4"])
def test_ep_5_a_rank_without_assignments_and_one_without_tokens(mesh: str) -> None:
    ids = np.zeros((8, 1), int)
    mask = np.ones(8, bool)
    mask[2:4] = False  # all that rank 1 holds
    tokens = np.arange(16.0).reshape(8, 2)
    counts, total, _, _, out = exchanged(mesh, ids, E=4, mask=mask, tokens=np.where(mask[:, None], tokens, 0))
    assert counts.tolist() == [6, 0, 0, 0]
    assert total.sum() == 6
    np.testing.assert_array_equal(out, np.where(mask[:, None], tokens, 0))

    def loss(tags: Any) -> Any:
        layer = compiled(mesh, 4, None, "rank", "position")
        return layer(ids, jnp.ones(ids.shape), mask, jnp.float32(tokens * mask[:, None]), tags)[-1].sum()

    with on(MESHES[mesh]):
        slope = jax.grad(loss)(jnp.ones(4))
    assert slope.tolist() == [tokens[mask].sum(), 0, 0, 0]


def test_ep_11_every_sender_loses_alike() -> None:
    """Four senders with two assignments each for expert 0, four slots: each sender loses its second."""
    counts, total, kept, *_ = exchanged("4", np.zeros((8, 1), int), E=4, slots=4)
    assert (counts.tolist(), total.tolist()) == ([4, 0, 0, 0], [8, 0, 0, 0])
    assert kept.reshape(4, 2).tolist() == [[True, False]] * 4


def test_the_highest_expert_does_not_lose_first() -> None:
    """All experts of one rank are wanted alike; the buffer takes half: each expert keeps half of its own."""
    ids = np.array([[t % 4] for t in range(16)])
    counts, *_ = exchanged("none", ids, E=4, slots=8)
    assert counts.tolist() == [2, 2, 2, 2]
    weights = np.linspace(1, 0.1, 16).reshape(16, 1)[::-1]
    counts, _, kept, *_ = exchanged("none", ids, E=4, slots=8, weights=weights, drop_order="weight")
    assert counts.tolist() == [2, 2, 2, 2]
    assert kept.ravel().tolist() == [False] * 8 + [True] * 8


@pytest.mark.parametrize(("k", "received"), [(2, [16, 0]), (3, [16, 8])])
def test_pol_4_demand_of_each_rank(k: int, received: list[int]) -> None:
    counts, total, kept, *_ = exchanged("2", np.broadcast_to(np.arange(k), (8, k)), E=4)
    assert total.tolist() == received == counts.reshape(2, 2).sum(1).tolist()
    assert kept.all()


@pytest.mark.parametrize("shape", [(6,), (2, 3)])
def test_disp_4_positions_are_counted_over_tokens(shape: tuple[int, ...]) -> None:
    """All to expert 0, two slots: the first two tokens, or the first of each sequence."""
    _, total, kept, *_ = exchanged("none", np.zeros((*shape, 1), int), E=2, slots=2)
    assert total.tolist() == [6]
    wanted = np.zeros(shape, bool)
    wanted[..., : 2 // (len(shape))] = True
    assert kept[..., 0].tolist() == wanted.tolist()


def test_masked_tokens_take_no_slot() -> None:
    mask = np.array([False, False, True, True, True, True])
    counts, total, kept, rows, _ = exchanged("none", np.zeros((6, 1), int), E=2, slots=3, mask=mask)
    assert (counts.tolist(), total.tolist()) == ([3, 0], [4])
    assert kept.ravel().tolist() == [False, False, True, True, True, False]
    assert rows.weights.tolist() == [1, 1, 1]


# --- one process, one step after another


CHANGES = [
    ("none", 4, 3, "rank", "position"),
    ("2x4", 8, 5, "rank", "weight"),
    ("8", 8, 2, "expert", "position"),
    ("expert first", 8, 5, "rank", "position"),
    ("2x4", 4, 3, "expert", "weight"),
    ("with a bystander", 4, 9, "rank", "weight"),
]


def test_everything_changes_from_one_call_to_the_next() -> None:
    """Slots, scope, drop order, experts and mesh, back and forth, without a teardown in between."""
    overflowed = 0
    for turn, (mesh, E, slots, scope, drop_order) in enumerate([*CHANGES, *CHANGES[::-1]]):
        rng = np.random.default_rng(turn)
        shape = (8, 3)
        ids = np.argsort(rng.random((*shape, E)) + np.linspace(0, 0.7, E), axis=-1)[..., :2]
        weights = rng.choice([0.25, 0.5, 1.0], size=ids.shape)
        mask = rng.random(shape) < 0.8
        tokens, tags = np.where(mask[..., None], rng.normal(size=(*shape, 2)), 0), rng.normal(size=E)
        oracle = Oracle(E, 2, slots, scope, drop_order, places=places(MESHES[mesh]))
        want_kept, want_total, _ = oracle.admit(ids, weights, mask)
        _, total, kept, _, out = exchanged(
            mesh, ids, E=E, weights=weights, mask=mask, tokens=tokens, tags=tags, slots=slots, scope=scope,
            drop_order=drop_order,
        )  # fmt: skip
        np.testing.assert_array_equal(kept, want_kept)
        assert total.tolist() == want_total.tolist()
        np.testing.assert_allclose(
            out, ((weights * want_kept * tags[ids]).sum(-1, keepdims=True)) * tokens, atol=1e-6, rtol=1e-5
        )
        overflowed += bool(slots and (want_total > slots).any())
    assert overflowed >= 8
    assert compiled.cache_info().currsize >= len(CHANGES)
