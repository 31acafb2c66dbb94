"""StepRunner fed batch by batch, and what it refuses before anything is lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from moe_blocks.capacity import Capacity
from policies import Drop, RetryDropless, StepRunner
from tests.policies import toy
from tests.policies.toy import SPEC, batches, by_hand, same_bits, state_of_every_kind, step


def test_submit_and_drain() -> None:
    runner = StepRunner(step, RetryDropless(1.0), SPEC, lag=1)
    runner.start(state_of_every_kind())
    told = [[report.step for report in runner.submit(batch)] for batch in batches(1, 9, 2)]
    assert told == [[], [0], [1]]
    assert [report.step for report in runner.drain()] == [2]
    assert runner.drain() == []
    assert same_bits(runner.state, by_hand(None, 1, 9, 2)[0])


def test_the_state_before_the_first_batch_is_the_given_one() -> None:
    runner = StepRunner(step, Drop(1.0), SPEC)
    state = state_of_every_kind()
    assert list(runner.run(state, [])) == []
    assert runner.state is state


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lag": -1}, "lag must be an integer of at least 0, got -1"),
        ({"lag": 0.5}, "lag must be an integer of at least 0, got 0.5"),
        ({"first_step": -3}, "first_step must be an integer of at least 0, got -3"),
    ],
)
def test_refuses(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StepRunner(step, Drop(1.0), SPEC, **fields)


def test_refuses_to_go_on_without_a_state() -> None:
    with pytest.raises(ValueError, match=r"no training state yet; call run\(state, batches\), or start\(state\) first"):
        StepRunner(step, Drop(1.0), SPEC).submit(batches(1)[0])


def test_refuses_a_state_that_is_used_up() -> None:
    state = state_of_every_kind()
    runner = StepRunner(step, Drop(1.0), SPEC)
    list(runner.run(state, batches(1)))
    with pytest.raises(ValueError, match=r"state\['bias'\]|state\['empty'\]|state\['ema'\] was donated.*runner.state"):
        list(runner.run(state, batches(1)))


def test_a_bad_step_is_told_before_anything_runs(dispatched: list[int | None]) -> None:
    def bad(state: Any, batch: Any, *, capacity: Capacity) -> Any:
        return state | {"step": 1.5}, batch["demand"][None], {}

    for policy in (RetryDropless(1.0), Drop(1.0)):
        runner, state = StepRunner(bad, policy, SPEC), state_of_every_kind()
        message = r"step turned state\['step'\] from int32\[\] into float32\[\]"
        with pytest.raises(ValueError, match=message):
            runner.compile(state, batches(1)[0])
        with pytest.raises(ValueError, match=message):
            list(runner.run(state, batches(1)))
        assert not state["params"]["w"].is_deleted()
    assert not dispatched


def test_a_batch_that_does_not_suit_the_step_is_left_out() -> None:
    runner = StepRunner(step, RetryDropless(1.0), SPEC)
    first, second, third = batches(1, 9, 2)
    with pytest.raises(ValueError, match="Incompatible shapes"):
        list(runner.run(state_of_every_kind(), [first, {**second, "x": second["x"][:5]}, third]))
    assert [report.step for report in runner.drain()] == [0]
    assert same_bits(runner.state, by_hand(None, 1)[0])
    assert [report.step for report in runner.run(runner.state, [second, third])] == [1, 2]
    assert same_bits(runner.state, by_hand(None, 1, 9, 2)[0])


def test_batches_may_be_an_iterator_that_is_read_no_further_than_needed() -> None:
    def stream() -> Iterator[Any]:
        for number, batch in enumerate(toy.batches(1, 2, 3, 4)):
            pulled.append(number)
            yield batch

    pulled: list[int] = []
    reports = StepRunner(step, Drop(1.0), SPEC, lag=1).run(state_of_every_kind(), stream())
    next(reports)
    assert pulled == [0, 1]


def test_submitted_counts_what_is_in_flight() -> None:
    runner = StepRunner(step, RetryDropless(1.0), SPEC, lag=5, first_step=3)
    runner.start(state_of_every_kind())
    for batch in batches(9, 1):  # the first one will be rejected
        runner.submit(batch)
    assert runner.submitted == 5
    assert [report.step for report in runner.drain()] == [3, 4]
    assert runner.submitted == 5
