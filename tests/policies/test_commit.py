from __future__ import annotations

import functools
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from jax.experimental import io_callback

from moe_blocks.capacity import Capacity
from policies import RetryDropless
from policies.commit import check_same_layout, run_and_commit
from policies.transaction import Carry, layout_of, place, transaction
from tests.policies import toy

POLICY = RetryDropless(1.0)
CAPACITIES = POLICY.capacities(POLICY.init(toy.SPEC))
CAPPED = CAPACITIES[0]


def fresh() -> Any:
    state, [batch] = toy.state_of_every_kind(), toy.batches(5)
    return place(state, layout_of(state, batch))


def at_most_four(demand: Any) -> Any:
    return jax.tree.leaves(demand)[0].max() <= 4


def afterwards(step: Any, state: Any, batch: Any) -> Any:
    """The choice at its simplest: after the step."""
    new_state, demand, _ = step(state, batch)
    return jax.tree.map(functools.partial(jnp.where, at_most_four(demand)), new_state, state)


# --- the choice


def every_case(state: Any, batch: Any) -> Any:
    """Leaves that are known before the demand, unchanged, constant, equal to each other, the demand, and read again."""
    before = state["before"] * 2
    demand, other = jnp.max(batch), before.astype(jnp.int32)  # from here on, leaves are chosen early
    m = state["m"] + 1
    w = jnp.sin(state["w"]) - m
    shared = w * 2
    new_state = {
        "before": before,
        "unchanged": state["unchanged"],
        "constant": 7.0,
        "one": shared,
        "two": shared,
        "swapped": (state["swapped"][1], state["swapped"][0]),
        "demand": demand,
        "m": m,
        "w": w,
    }
    return new_state, (demand, other), {"w": w, "m": m, "known": batch, "constant": 3}


def case_state() -> Any:
    names = ("before", "unchanged", "constant", "one", "two", "m", "w")
    state: dict[str, Any] = {name: jnp.float32(number) for number, name in enumerate(names)}
    return state | {"swapped": (jnp.float32(1), jnp.float32(2)), "demand": jnp.int32(0)}


WRAPPED = {
    "plain": every_case,
    "jit": jax.jit(every_case),
    "remat": jax.checkpoint(every_case),
    "cond": lambda state, batch: jax.lax.cond(batch.sum() > 0, every_case, every_case, state, batch),
}


@pytest.mark.parametrize("form", WRAPPED)
@pytest.mark.parametrize("demand", [4, 5])
def test_it_is_the_choice_after_the_step(form: str, demand: int) -> None:
    step, state, batch = WRAPPED[form], case_state(), jnp.array([1, demand])
    chosen, sent, metrics, commit = jax.jit(lambda s, b: run_and_commit(step, at_most_four, s, b))(state, batch)
    expected_state, expected_demand, expected_metrics = jax.jit(step)(state, batch)
    assert toy.same_bits(chosen, afterwards(step, state, batch))
    assert toy.same_bits(chosen, expected_state if demand == 4 else state)
    assert toy.same_bits(sent[0], expected_demand[0])
    assert bool(commit) == (demand == 4)
    if demand == 4:
        assert toy.same_bits((sent, metrics), (expected_demand, expected_metrics))


@given(st.lists(st.sampled_from(["m", "v", "w"]), min_size=1, max_size=8), st.integers(3, 6), st.integers(0, 8))
def test_any_order_of_updates(order: list[str], demand: int, at: int) -> None:
    """Updates that read each other, in any order, with the demand known before, between or after them."""

    def step(state: Any, batch: Any) -> Any:
        state, sent = dict(state), None
        for number, name in enumerate(order):
            sent = batch + jnp.int32(0) if number == at else sent
            state[name] = 0.5 * state[name] + sum(state.values())
        return state, batch + jnp.int32(0) if sent is None else sent, {}

    state, batch = {name: jnp.float32(number) for number, name in enumerate("mvw")}, jnp.int32(demand)
    assert toy.same_bits(run_and_commit(step, at_most_four, state, batch)[0], afterwards(step, state, batch))


def test_true_evaluates_the_step_as_it_is() -> None:
    plain = jax.make_jaxpr(every_case)(case_state(), jnp.array([5]))
    bare = jax.make_jaxpr(lambda s, b: run_and_commit(every_case, lambda demand: True, s, b)[:3])(
        case_state(), jnp.array([5])
    )
    assert [str(equation.primitive) for equation in bare.eqns] == [str(equation.primitive) for equation in plain.eqns]


def test_later_parts_of_the_step_read_the_chosen_leaf() -> None:
    """Which is what spares the copies: nothing reads an old leaf after it was overwritten."""

    def step(state: Any, batch: Any) -> Any:
        demand = batch + jnp.int32(0)
        m = state["m"] + 1.0
        return {"m": m, "w": state["w"] * m}, demand, {}

    state = {"m": jnp.float32(1), "w": jnp.float32(1)}
    jaxpr = jax.make_jaxpr(lambda s, b: run_and_commit(step, at_most_four, s, b)[0])(state, jnp.int32(1))
    order = [str(equation.params.get("name", equation.primitive)) for equation in jaxpr.eqns]
    assert order[-4:] == ["add", "_where", "mul", "_where"]
    choice, product = jaxpr.eqns[-3:-1]
    assert choice.outvars[0] in product.invars


def test_what_decides_is_evaluated_first_wherever_it_stands() -> None:
    def step(state: Any, batch: Any) -> Any:
        m = state["m"] + 1.0
        w = state["w"] * m
        return {"m": m, "w": w}, jnp.floor(batch), {}

    def at_most_one(demand: Any) -> Any:
        return demand <= 1

    state = {"m": jnp.float32(1), "w": jnp.float32(1)}
    jaxpr = jax.make_jaxpr(lambda s, b: run_and_commit(step, at_most_one, s, b)[0])(state, jnp.float32(1))
    order = [str(equation.params.get("name", equation.primitive)) for equation in jaxpr.eqns]
    assert order == ["floor", "le", "add", "_where", "mul", "_where"]


def test_side_effects_keep_their_order() -> None:
    seen: list[str] = []

    def note(name: str) -> None:
        io_callback(lambda: seen.append(name), None, ordered=True)

    def step(state: Any, batch: Any) -> Any:
        note("before")
        state = state + 1.0
        demand = io_callback(lambda b: (seen.append("demand"), b)[1], batch, batch, ordered=True)
        note("after")
        return state, demand, {}

    jax.jit(lambda s, b: run_and_commit(step, at_most_four, s, b))(1.0, jnp.int32(2))[0].block_until_ready()
    jax.effects_barrier()
    assert seen == ["before", "demand", "after"]


def test_named_scopes_are_kept_for_the_profiler() -> None:
    def step(state: Any, batch: Any) -> Any:
        with jax.named_scope("outer"), jax.named_scope("inner"):
            return jnp.sin(state), batch, {}

    text = jax.jit(lambda s, b: run_and_commit(step, at_most_four, s, b)).lower(1.0, 2).compile().as_text()
    assert "outer/inner/sin" in text


def test_a_step_is_traced_once() -> None:
    calls = []

    def step(state: Any, batch: Any) -> Any:
        calls.append(batch)
        return state, batch, {}

    run_and_commit(step, at_most_four, jnp.ones(2), jnp.array([1]))
    assert len(calls) == 1


# --- what the step must return, told before anything is compiled


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s: s | {"step": jnp.float32(1)},
            r"step turned state\['step'\] from int32\[\] into float32\[\]; .* astype",
        ),
        (lambda s: s | {"bias": jnp.zeros(5)}, r"step turned state\['bias'\] from float32\[4\] into float32\[5\]"),
        (lambda s: s | {"raw_key": s["key"]}, r"state\['raw_key'\] from uint32\[2\] into key<fry>\[\]"),
        (
            lambda s: s | {"new": s["bias"]},
            r"step added the leaf state\['new'\]; new_state must have the tree structure",
        ),
        (lambda s: {k: v for k, v in s.items() if k != "ema"}, r"step lost the leaf state\['ema'\]"),
        (lambda s: s | {"optimiser": list(s["optimiser"])}, r"step turned the tree structure of state from .* into"),
    ],
)
def test_a_step_that_changes_the_layout_of_the_state(change: Any, message: str) -> None:
    def step(state: Any, batch: Any, *, capacity: Capacity) -> Any:
        new_state, demand, metrics = toy.step(state, batch, capacity=capacity)
        return change(new_state), demand, metrics

    with pytest.raises(ValueError, match=message):
        jax.jit(transaction(step, POLICY, CAPPED, CAPACITIES)).lower(Carry(True, fresh()), toy.batches(1)[0])


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (
            lambda s: (s, jnp.array([1])),
            r"step must return \(new_state, total_recv_tokens, metrics\), got a tuple of 2",
        ),
        (lambda s: s, r"step must return .*, got a dict"),
        (lambda s: [s, jnp.array([1]), {}], r"step must return .*, got a list"),
        (lambda s: (s, {}, {}), r"total_recv_tokens holds no array"),
        (lambda s: (s, s["bias"], {}), r"total_recv_tokens must be a non-empty int32 array.*got float32\[4\]"),
    ],
)
def test_a_step_that_returns_something_else(outputs: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        jax.jit(transaction(lambda s, b, capacity: outputs(s), POLICY, CAPPED, CAPACITIES)).lower(
            Carry(True, fresh()), ()
        )


def test_check_same_layout_accepts_equal_ones() -> None:
    check_same_layout(fresh(), fresh())
