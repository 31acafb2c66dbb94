"""StepRunner when its loop is left in the middle: nothing is applied twice, lost, or left unreported."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest

from moe_blocks.capacity import Capacity
from policies import Drop, RetryDropless, StepRunner
from policies.programs import Programs
from tests.policies.toy import SPEC, batches, by_hand, same_bits, state_of_every_kind, step


@pytest.fixture(autouse=True)
def ctrl_c_interrupts() -> Iterator[None]:
    """A shell starts what it puts in the background with SIGINT ignored, and the suite may run there."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def finish(runner: StepRunner, seen: list[int], demands: tuple[int, ...]) -> None:
    """Everything that was submitted was applied once, and every application was reported."""
    seen += [report.step for report in runner.drain()]
    assert same_bits(runner.state, by_hand(None, *demands[: len(seen)])[0])
    assert seen == list(range(len(seen)))
    # The rest of the data continues the training as if nothing had happened.
    seen += [report.step for report in runner.run(runner.state, batches(*demands)[len(seen) :])]
    assert same_bits(runner.state, by_hand(None, *demands)[0])
    assert seen == list(range(len(demands)))


@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_leaving_the_loop(lag: int, error: type[BaseException] | None) -> None:
    demands, seen = (1, 9, 2, 9, 9, 3, 1), []
    runner = StepRunner(step, RetryDropless(1.0), SPEC, lag=lag)
    with contextlib.suppress(KeyboardInterrupt):
        for report in runner.run(state_of_every_kind(), batches(*demands)):
            seen.append(report.step)
            if report.step == 2:
                if error:
                    raise error
                break
    assert len(seen) == 3
    finish(runner, seen, demands)


def test_reports_not_handed_out_come_with_the_next_run() -> None:
    runner = StepRunner(step, RetryDropless(1.0), SPEC, lag=2)
    data = batches(1, 2, 3, 4)
    for _ in runner.run(state_of_every_kind(), data[:3]):
        break
    state = runner.state  # settles two more steps
    assert [report.step for report in runner.run(state, data[3:])] == [1, 2, 3]


@pytest.mark.parametrize("at", [0, 1, 2, 3, 4])
def test_an_interrupt_while_waiting_for_a_verdict(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    demands, seen, reads = (1, 9, 2, 9, 3), [], []
    device_get = jax.device_get

    def interrupted(value: Any) -> Any:
        reads.append(value)
        if len(reads) == at + 1:
            raise KeyboardInterrupt
        return device_get(value)

    monkeypatch.setattr(jax, "device_get", interrupted)
    runner = StepRunner(step, RetryDropless(1.0), SPEC, lag=1)
    with pytest.raises(KeyboardInterrupt):
        seen.extend(report.step for report in runner.run(state_of_every_kind(), batches(*demands)))
    seen += [report.step for report in runner.drain()] if not seen else []
    finish(runner, seen, demands)


def interrupting(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Ctrl-C while a step is being dispatched: the call has consumed the old state, its result is not kept yet."""
    get, calls = Programs.get, []

    def patched(self: Programs, capacity: Capacity, batch: Any) -> Callable[..., Any]:
        program = get(self, capacity, batch)

        def call(*args: Any) -> Any:
            outputs = program(*args)
            calls.append(capacity)
            if len(calls) == at + 1:
                signal.raise_signal(signal.SIGINT)
            return outputs

        return call

    monkeypatch.setattr(Programs, "get", patched)


@pytest.mark.parametrize("at", [0, 2, 3])
def test_ctrl_c_during_a_dispatch_loses_nothing(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    demands, seen = (1, 9, 2, 9, 3), []
    interrupting(monkeypatch, at)
    runner, handler = StepRunner(step, RetryDropless(1.0), SPEC, lag=1), signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        for report in runner.run(state_of_every_kind(), batches(*demands)):
            seen.append(report.step)
    assert signal.getsignal(signal.SIGINT) is handler
    finish(runner, seen, demands)


def test_without_holding_ctrl_c_back_the_state_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupting(monkeypatch, at=2)
    monkeypatch.setattr("policies.runner._uninterrupted", contextlib.nullcontext)
    stepper = StepRunner(step, Drop(1.0), SPEC)
    with pytest.raises(KeyboardInterrupt):
        list(stepper.run(state_of_every_kind(), batches(1, 2, 3, 4)))
    with pytest.raises((ValueError, RuntimeError), match="deleted"):
        _ = stepper.state
