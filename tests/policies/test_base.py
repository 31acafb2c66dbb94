from __future__ import annotations

import json
import pickle
import re

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import example, given
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from moe_blocks.capacity import Capacity, CapacitySpec, LayerCapacities
from policies import AdaptiveGrow, CapacityOverflowError, CapacityPolicy, PolicyState, Report, StaticFactor, peak_demand
from tests.policies.toy import SPEC

STATE = PolicyState((4, 8, 16), balanced=4, slots=8, quiet=3, overflows=5, rejections=4, skips=2, recent=1)
LAYERED = STATE._replace(profile=(4, 8), profiles=((4, 8), (8, 8)), seen=(3, 7))


def test_report_overflows_beyond_exactly_full() -> None:
    assert [Report(0, 0, demand, Capacity(8), True).overflow for demand in (7, 8, 9)] == [False, False, True]
    assert not Report(0, 0, 10**9, Capacity(None), True).overflow


def test_report_of_layers_with_different_capacities() -> None:
    capacity = LayerCapacities.of((Capacity(4), Capacity(8)))
    assert not Report(0, 0, 8, capacity, True, by_layer=(4, 8)).overflow
    assert Report(0, 0, 5, capacity, True, by_layer=(5, 5)).overflow
    error = CapacityOverflowError.of(STATE, Report(0, 0, 9, capacity, False, by_layer=(7, 9)))
    assert (error.demand, error.slots, error.factor) == (7, 4, 1.75)  # the layer that lacks most


# --- PolicyState


def test_state_is_a_pytree_of_ints() -> None:
    leaves, structure = jax.tree.flatten(STATE)
    assert leaves == [4, 8, 16, 4, 8, 3, 5, 4, 2, 1]
    assert jax.tree.unflatten(structure, leaves) == STATE
    through_jit = jax.jit(lambda state: state)(STATE)
    assert through_jit.plain() == STATE
    assert all(type(leaf) is int for leaf in jax.tree.leaves(through_jit.plain()))


def test_state_through_json() -> None:
    assert PolicyState.from_json(STATE.to_json()) == STATE
    assert PolicyState.from_json(LAYERED.to_json()) == LAYERED
    arrays = jax.tree.map(np.asarray, STATE)
    assert json.loads(arrays.to_json()) == json.loads(STATE.to_json())


def test_a_state_saved_before_there_were_all_counters() -> None:
    text = '{"ladder": [4, 8, 16], "balanced": 4, "slots": 8, "quiet": 3, "overflows": 5, "rejections": 4}'
    assert PolicyState.from_json(text) == STATE._replace(skips=0, recent=0)
    assert AdaptiveGrow(1.0).resume(SPEC, json.loads(text)).rejections == 4


@pytest.mark.parametrize("text", ["[1]", '{"slots": 3}', STATE.to_json().replace("quiet", "quite")])
def test_state_from_other_json(text: str) -> None:
    with pytest.raises(
        ValueError, match=r"needs an object with the fields \('ladder', 'balanced', 'slots'.*got " + re.escape(text)
    ):
        PolicyState.from_json(text)


def test_state_through_orbax(tmp_path) -> None:
    tree = {"policy": STATE, "train": jnp.arange(3.0)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "checkpoint", tree)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "checkpoint", tree)
    assert restored["policy"].plain() == STATE
    policy = AdaptiveGrow(1.0)
    assert policy.resume(SPEC, restored["policy"]).overflows == 5


# --- resume


def test_resume_on_the_same_ladder_is_the_saved_state() -> None:
    policy = AdaptiveGrow(1.0)
    saved = policy.init(SPEC)._replace(slots=16, quiet=7, overflows=2, rejections=2)
    assert policy.resume(SPEC, saved) == saved
    assert policy.resume(SPEC, jax.tree.map(np.asarray, saved)) == saved


@pytest.mark.parametrize(
    ("policy", "slots", "resumed"),
    [
        (AdaptiveGrow(1.5), 16, 24),  # ladder 6, 12, 24, 32: the smallest rung that holds as many
        (AdaptiveGrow(0.5, growth=3.0), 16, 18),  # ladder 2, 6, 18, 32
        (AdaptiveGrow(0.5, growth=3.0), 4, 2),  # never grown: the new config's first rung
        (StaticFactor(2.0), 4, 8),
        (StaticFactor(0.5), 4, 2),
    ],
)
def test_resume_on_another_ladder(policy: CapacityPolicy, slots: int, resumed: int) -> None:
    saved = AdaptiveGrow(1.0).init(SPEC)._replace(slots=slots, quiet=9, overflows=2, rejections=1)
    state = policy.resume(SPEC, saved)
    assert state.slots == resumed
    assert (state.ladder, state.quiet, state.overflows, state.rejections) == (policy.ladder(SPEC), 0, 2, 1)


# --- CapacityOverflowError


@example(247, 25, 1)  # 4.94 exactly, and in floats a little more
@given(st.integers(1, 4000), st.integers(1, 64), st.sampled_from([1, 8]))
def test_the_error_tells_a_factor_that_fits(demand: int, tokens: int, multiple: int) -> None:
    spec = CapacitySpec(tokens, 8, 2, 4, multiple_of=multiple)
    state = StaticFactor(0.01).init(spec)
    error = CapacityOverflowError.of(state, Report(3, 0, demand, Capacity(state.slots), False))
    assert spec.slots(error.factor) >= min(demand, spec.dropless)
    assert (error.factor - 1e-4) * spec.balanced < demand  # and hardly more than that


def test_the_error_says_what_to_do_and_can_be_pickled() -> None:
    error = CapacityOverflowError.of(StaticFactor(1.0).init(SPEC), Report(12, 0, 9, Capacity(4), False))
    assert isinstance(error, RuntimeError)
    assert (error.step, error.demand, error.slots, error.factor) == (12, 9, 4, 2.25)
    assert re.search(
        r"step 12 sent 9 assignments to a receive buffer of 4 slots.*not applied.*factor of 2.25 .*retry_dropless",
        str(error),
    )
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.factor) == (str(error), 2.25)


# --- peak_demand


@pytest.mark.parametrize(
    "tree",
    [
        jnp.int32(9),
        jnp.array([9]),
        jnp.array([[1, 2], [9, 3]]),
        (jnp.array([1, 9]), jnp.array([2, 3])),
        {"a": jnp.array([1, 2]), "b": [jnp.array([9]), jnp.int32(3)], "c": jnp.zeros((2, 3, 2), jnp.int32)},
        np.array([3, 9], np.int32),
    ],
)
def test_peak_demand(tree: object) -> None:
    peak = peak_demand(tree)
    assert (int(peak), peak.shape, peak.dtype) == (9, (), jnp.int32)
    assert int(jax.jit(peak_demand)(tree)) == 9
    assert int(peak_demand(peak)) == 9


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({}, r"total_recv_tokens holds no array, so an overflow would go unseen; return.*got \{\}"),
        (None, r"holds no array"),
        ({"l": jnp.ones(2)}, r"total_recv_tokens\['l'\] must be a non-empty int32 array.*got float32\[2\]"),
        ({"l": jnp.array([True])}, r"total_recv_tokens\['l'\].*got bool\[1\]"),
        ([jnp.array([1], jnp.uint8)], r"total_recv_tokens\[0\].*got uint8\[1\]"),
        ([jnp.zeros((2, 0), jnp.int32)], r"total_recv_tokens\[0\].*got int32\[2, 0\]"),
    ],
)
def test_peak_demand_refuses_what_could_hide_an_overflow(tree: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        peak_demand(tree)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("layers", [1, 2, 8])
def test_pol_12_one_reduction_however_many_layers(kind: AxisType, stacked: bool, layers: int) -> None:
    mesh = Mesh(np.array(jax.devices()), ("expert",), axis_types=(kind,))

    def put(array: np.ndarray, *axes: str | None) -> jax.Array:
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*axes)))

    counts = np.arange(8 * layers, dtype=np.int32).reshape(layers, 8)
    tree = put(counts, None, "expert") if stacked else [put(row, "expert") for row in counts]
    with jax.set_mesh(mesh):
        reductions = [equation.params.get("axes") for equation in jax.make_jaxpr(peak_demand)(tree).eqns]
        # Over the ranks, for all layers at once, and over the layers, which is local.
        assert [axes for axes in reductions if axes] == [(1,), (0,)]
        compiled = jax.jit(peak_demand).lower(tree).compile()
        assert int(compiled(tree)) == 8 * layers - 1
    assert len(re.findall(r"all-reduce(?:-start)?\(", compiled.as_text())) == 1
    assert not re.search(r"all-gather|all-to-all|collective-permute", compiled.as_text())
