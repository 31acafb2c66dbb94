"""Two transports with one contract, and an emulation that does what it is told."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax.sharding import PartitionSpec as P

from moe_blocks.transport import (
    COLLECTIVES,
    AllGather,
    RaggedAllToAll,
    emulate_ragged_all_to_all,
    plan_transport,
    ragged_offsets,
)
from tests.moe_blocks.support import LAYOUTS, assert_close, same_bits

EP, E, T, K, WIDTH = 4, 8, 5, 3, 2
MESH = LAYOUTS["4"]
BY_RANK = P("expert")


def on_ranks(function: Any) -> Any:
    """``function`` on each of the four ranks, its arguments and results cut along their leading axis."""
    return jax.jit(jax.shard_map(function, mesh=MESH.mesh, in_specs=BY_RANK, out_specs=BY_RANK, check_vma=False))


# --- offsets, and what a collective makes of them


def moved(operands: np.ndarray, outputs: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """By hand: each sender's rows, sorted by receiver, go to the receiver, sorted by sender."""
    outputs = outputs.copy()
    sent, received = np.zeros(len(sizes), int), np.zeros(len(sizes), int)
    for sender in range(len(sizes)):
        for receiver in range(len(sizes)):
            for _ in range(sizes[sender, receiver]):
                outputs[receiver, received[receiver]] = operands[sender, sent[sender]]
                sent[sender] += 1
                received[receiver] += 1
    return outputs


@functools.cache
def emulated(told: Any = lambda offsets: offsets) -> Any:
    def function(operand: Any, output: Any, sizes: Any) -> Any:
        offsets = told(ragged_offsets(sizes[0], jax.lax.axis_index("expert")))
        return emulate_ragged_all_to_all(operand[0], output[0], *offsets, axis_name="expert")[None]

    return on_ranks(function)


@given(hnp.arrays(np.int32, (EP, EP), elements=st.integers(0, 3)))
def test_offsets_and_emulation(sizes: np.ndarray) -> None:
    """Rows that nobody asked for are NaN, and rows that nobody wrote stay what they were."""
    sent, received = sizes.sum(1), sizes.sum(0)
    operands = np.full((EP, 3 * EP + 1, 1), np.nan, np.float32)
    for rank in range(EP):
        operands[rank, : sent[rank], 0] = 100 * rank + np.arange(sent[rank])
    outputs = np.full((EP, 3 * EP, 1), -1, np.float32)
    got = np.asarray(emulated()(operands, outputs, np.broadcast_to(sizes, (EP, EP, EP))))
    np.testing.assert_array_equal(got, moved(operands, outputs, sizes))
    assert all((got[rank, received[rank] :] == -1).all() for rank in range(EP))


def test_the_emulation_obeys_its_arguments() -> None:
    """Control: it reads the offsets and knows nothing else, so with one wrong entry the result is another."""
    sizes = np.full((EP, EP), 2, np.int32)
    operands = np.arange(EP * 8, dtype=np.float32).reshape(EP, 8, 1)
    outputs = np.zeros((EP, 8, 1), np.float32)
    want = moved(operands, outputs, sizes)
    wrong = [
        lambda offsets: offsets._replace(input_offsets=offsets.input_offsets + 1),
        lambda offsets: offsets._replace(send_sizes=offsets.send_sizes - 1),
        lambda offsets: offsets._replace(output_offsets=offsets.output_offsets + 1),
    ]
    everywhere = np.broadcast_to(sizes, (EP, EP, EP))
    assert same_bits(emulated()(operands, outputs, everywhere), want)
    for told in wrong:
        assert not same_bits(emulated(told)(operands, outputs, everywhere), want)


# --- what both transports do


@functools.cache
def trips(collective: str, num_rows: int) -> Any:
    """What each rank receives, how many rows of it are real, and what comes home from rows that hold NaN past them."""

    def function(experts: Any, x: Any, d_home: Any) -> Any:
        transport = plan_transport(experts, num_experts=E, num_rows=num_rows, axis_name="expert", collective=collective)

        def there_and_back(x: Any) -> Any:
            received = transport.collect(x)
            wanted = transport.collect_choices(jnp.where(experts < E, experts + 1, 0)) - 1
            rank = jax.lax.axis_index("expert")
            here = ((wanted >= 0) & (wanted // (E // EP) == rank)).sum(-1)
            used = here > 0
            # A rank that does not serve a token has nothing to send back, if it has received it at all.
            factor = ((1 + rank) * here).astype(jnp.float32)[:, None]
            sums = factor * jnp.where(used[:, None], received, 0)
            real = used if collective == "ragged_all_to_all" else jnp.ones_like(used)
            poisoned = jnp.where(real[:, None], sums, jnp.nan)
            return transport.give_back(jax.lax.stop_gradient(poisoned - sums) + sums, jnp.float32), (received, used)

        home, pull_back, (received, used) = jax.vjp(there_and_back, x, has_aux=True)
        return home, received, used, pull_back(d_home)[0]

    return on_ranks(function)


def draw(seed: int, chosen: float = 0.8) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    experts = np.argsort(rng.random((EP * T, E)), axis=-1)[:, :K]
    experts = np.where(rng.random(experts.shape) < chosen, experts, E).astype(np.int32)
    x, d_home = rng.normal(size=(2, EP * T, WIDTH)).astype(np.float32)
    return experts, x, d_home


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize(("seed", "chosen"), [(0, 0.8), (1, 0.3), (2, 0.0), (3, 1.0)])
def test_there_and_back(collective: str, seed: int, chosen: float) -> None:
    """Each token reaches each rank that has an expert of its own, in order, and the sums are added up at home."""
    experts, x, d_home = draw(seed, chosen)
    ranks = np.arange(EP)
    goes = ((experts // (E // EP))[:, :, None] == ranks).sum(1)  # [tokens, ranks], assignments
    rows = goes if collective == "ragged_all_to_all" else np.minimum(goes, 1)
    home, received, used, slope = trips(collective, T * EP * 2)(experts, x, d_home)
    received, used = np.reshape(received, (EP, -1, WIDTH)), np.reshape(used, (EP, -1))
    for rank in range(EP):
        assert same_bits(received[rank][used[rank]], np.repeat(x, rows[:, rank], axis=0))
    total = (goes * (1.0 + ranks)).sum(1, keepdims=True)
    assert_close(home, x * total, 1e-6)
    assert_close(slope, d_home * total, 1e-6)
    nowhere = ~goes.any(1)
    assert not np.asarray(home)[nowhere].any() and (nowhere.any() or chosen > 0.5)


def test_the_ragged_one_sends_a_row_for_each_assignment() -> None:
    """Two experts on each of two ranks are four rows, and the buffers are just large enough."""

    def plan(experts: Any) -> Any:
        transport = RaggedAllToAll.plan(experts, num_experts=E, num_rows=2, axis_name="expert")
        return transport.sizes[None], transport.collect(jnp.ones((2, 1))), transport.collect_choices(experts)

    experts = np.tile(np.int32([[0, 6, 1, 7], [8, 8, 8, 8]]), (EP, 1))
    experts[2:] = E  # only the first rank has tokens
    sizes, received, chosen = on_ranks(plan)(experts)
    assert sizes[0].tolist() == [[2, 0, 0, 2], [0] * 4, [0] * 4, [0] * 4]
    assert np.reshape(received, (EP, 2)).tolist() == [[1, 1], [0, 0], [0, 0], [1, 1]]
    assert np.reshape(chosen, (EP, 2)).tolist() == [[0, 1], [0, 0], [0, 0], [6, 7]]


def test_sums_are_added_in_float32() -> None:
    """256 + 1 + 1 in bfloat16 would stay 256; the parts travel as bfloat16."""

    def function(experts: Any, parts: Any) -> Any:
        transport = plan_transport(
            experts, num_experts=E, num_rows=8, axis_name="expert", collective="ragged_all_to_all"
        )
        return transport.give_back(jnp.broadcast_to(parts, (4, 1)), jnp.bfloat16)

    experts = np.full((EP, 3), E, np.int32)
    experts[0] = 0, 2, 4
    home = on_ranks(function)(experts, np.float32([[256], [1], [1], [0]]))
    assert home.dtype == jnp.float32 and home.ravel().tolist() == [258, 0, 0, 0]


# --- the choice


def test_the_default_follows_the_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    def kind(axis_name: str | None = "expert") -> type:
        found = []

        def function(experts: Any) -> Any:
            found.append(type(plan_transport(experts, num_experts=E, num_rows=8, axis_name=axis_name)))
            return experts

        jax.jit(jax.shard_map(function, mesh=MESH.mesh, in_specs=BY_RANK, out_specs=BY_RANK)).trace(experts)
        return found[-1]

    experts = draw(0)[0]
    assert kind() is AllGather
    for accelerator in ("tpu", "gpu"):
        monkeypatch.setattr("moe_blocks.transport.platform", lambda name=accelerator: name)
        assert kind() is RaggedAllToAll
        assert kind(None) is AllGather


def test_an_accelerator_gets_the_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lowered for a TPU: three of XLA's own there (experts, x and back), two for the gradient, and nothing gathered."""
    monkeypatch.setattr("moe_blocks.transport.platform", lambda: "tpu")
    trips.cache_clear()
    lowered = trips("ragged_all_to_all", 40).trace(*draw(0)).lower(lowering_platforms=("tpu",)).as_text()
    trips.cache_clear()
    assert lowered.count("@ragged_all_to_all") == 5
    gathered = [line for line in lowered.splitlines() if "stablehlo.all_gather" in line]
    assert len(gathered) == 1 and "tensor<4x4xi32>" in gathered[0]


@pytest.mark.parametrize("name", ["all_to_all", "", 3])
def test_unknown_collective(name: Any) -> None:
    message = r"collective must be None \(best for the platform\) or one of \('all_gather', 'ragged_all_to_all'\), got"
    with pytest.raises(ValueError, match=message):
        plan_transport(jnp.zeros((1, 1), jnp.int32), num_experts=1, num_rows=1, collective=name)


def test_on_one_device_nothing_moves() -> None:
    x = jnp.arange(6.0).reshape(3, 2)
    transport = plan_transport(jnp.zeros((3, 1), jnp.int32), num_experts=2, num_rows=3, collective="ragged_all_to_all")
    assert transport.collect(x) is x
    assert transport.give_back(x, jnp.bfloat16).tolist() == x.tolist()
