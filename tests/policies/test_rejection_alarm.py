from __future__ import annotations

import pickle
import warnings
from typing import Any

import numpy as np
import pytest

from policies import (
    AdaptiveGrow,
    CapacityPolicy,
    Drop,
    RejectionAlarm,
    RetryDropless,
    RunawayRouterWarning,
    SkipNonFinite,
    StepRunner,
)
from tests.policies.toy import SPEC, batches, by_hand, same_bits, state_of_every_kind, step

RETRY = RetryDropless(1.0)
# Windows of five steps with 2, 4 and 3 overflows.
DEMANDS = (9, 3, 4, 5, 1, 6, 7, 8, 9, 2, 5, 1, 5, 5, 3)


def alarms(policy: CapacityPolicy, *demands: int, lag: int = 1, **kwargs: Any) -> tuple[StepRunner, list[Any]]:
    """The runner after these steps, and the warnings that it gave."""
    runner = StepRunner(step, policy, SPEC, lag=lag, **kwargs)
    with warnings.catch_warnings(record=True, action="always", category=RunawayRouterWarning) as caught:
        list(runner.run(state_of_every_kind(), batches(*demands)))
    return runner, [warning.message for warning in caught]


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_it_warns_once_a_window_with_figures(lag: int) -> None:
    runner, told = alarms(RejectionAlarm(RETRY, rejections=3, window=5), *DEMANDS, lag=lag)
    assert [(w.rejections, w.since, w.step, w.demand, w.slots, w.factor) for w in told] == [
        (3, 5, 7, 8, 4, 2.0),
        (3, 10, 13, 5, 4, 1.25),
    ]
    assert same_bits(runner.state, by_hand(None, *DEMANDS)[0])  # it only tells


def test_without_it_all_is_silent() -> None:
    runner, told = alarms(RETRY, *DEMANDS)
    assert (told, runner.policy_state.rejections) == ([], 9)
    _, told = alarms(RejectionAlarm(RETRY, rejections=5, window=5), *DEMANDS)
    assert told == []


def test_the_attempts_of_one_step_count_each() -> None:
    """Two layers, the second of which is seen in full only in the retry."""
    policy = RejectionAlarm(AdaptiveGrow(1.0), rejections=2, window=1)
    state, told = policy.init(SPEC), []
    from policies import Report

    for attempt, demand in enumerate((6, 10)):
        report = Report(3, attempt, demand, policy.capacity(state), accepted=False)
        with warnings.catch_warnings(record=True, action="always") as caught:
            state = policy.update(state, report)
        told.append([str(warning.message) for warning in caught])
    assert told[0] == []
    assert len(told[1]) == 1 and "2 attempts were rejected in the steps 3 to 3; the last one sent 10" in told[1][0]


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_raised_it_leaves_the_state_before_the_step(lag: int) -> None:
    runner, seen = StepRunner(step, RejectionAlarm(RETRY, 3, 5, action="raise"), SPEC, lag=lag), []
    with pytest.raises(RunawayRouterWarning, match="3 attempts were rejected in the steps 5 to 7.*a factor of 2.0"):
        seen.extend(report.step for report in runner.run(state_of_every_kind(), batches(*DEMANDS)))
    assert same_bits(runner.state, by_hand(None, *DEMANDS[:7])[0])
    assert runner.policy_state.rejections == 4
    # It can go on: here without the batch.
    list(runner.run(runner.state, batches(*DEMANDS)[9:10]))


def test_a_window_goes_on_after_a_restart() -> None:
    policy = RejectionAlarm(RETRY, rejections=3, window=5)
    first, told = alarms(policy, *DEMANDS[:7])
    assert told == []
    _, told = alarms(policy, *DEMANDS[7:9], policy_state=first.policy_state.to_json(), first_step=7)
    assert [(w.since, w.step) for w in told] == [(5, 7)]
    _, told = alarms(policy, *DEMANDS[7:9], first_step=7)
    assert told == [], "the saved count was not needed"


@pytest.mark.parametrize(
    "policy",
    [
        RejectionAlarm(SkipNonFinite(RETRY, ("loss",)), rejections=3, window=5),
        SkipNonFinite(RejectionAlarm(RETRY, rejections=3, window=5), ("loss",)),
    ],
)
def test_a_skipped_step_opens_a_window_too(policy: CapacityPolicy) -> None:
    """Step 5, the first of its window, is skipped; carried over, the two rejections before it would give the alarm."""
    runner, data = StepRunner(step, policy, SPEC), batches(9, 9, 1, 1, 1, 1, 9, 1, 1, 1)
    data[5]["x"] *= np.float32(np.nan)
    reports = list(runner.run(state_of_every_kind(), data))  # a warning would be an error here
    assert [report.step for report in reports if report.skipped] == [5]
    assert (runner.policy_state.recent, runner.policy_state.rejections) == (1, 3)


def test_the_alarm_can_be_pickled() -> None:
    alarm = RunawayRouterWarning(3, 5, 7, 8, 4, 2.0)
    copy = pickle.loads(pickle.dumps(alarm))
    assert (str(copy), copy.factor) == (str(alarm), 2.0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rejections": 0}, r"RejectionAlarm.rejections must be an integer of at least 1, got 0"),
        ({"window": 2.5}, r"RejectionAlarm.window must be an integer of at least 1, got 2.5"),
        ({"action": "stop"}, r"RejectionAlarm.action must be one of \('warn', 'raise'\), got 'stop'"),
    ],
)
def test_bad_numbers_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RejectionAlarm(Drop(1.0), **given)
