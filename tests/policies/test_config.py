from __future__ import annotations

import dataclasses
import json

import pytest

import policies
from policies import config


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "_REGISTRY", dict(config._REGISTRY))


@pytest.mark.parametrize(
    ("given", "policy"),
    [
        ({"name": "static_factor", "factor": 1.25}, policies.StaticFactor(1.25)),
        ({"name": "static_factor", "factor": None}, policies.StaticFactor(None)),
        ({"name": "drop", "factor": 2}, policies.Drop(2)),
        ({"name": "retry_dropless", "factor": 0.125}, policies.RetryDropless(0.125, scope="step")),
        ({"name": "adaptive_grow"}, policies.AdaptiveGrow()),
        (
            {"name": "adaptive_grow", "initial_factor": 0.5, "growth": 1.5, "patience": 3, "on_overflow": "drop"},
            policies.AdaptiveGrow(0.5, 1.5, 3, "drop"),
        ),
        ({"name": "skip_non_finite", "inner": {"name": "drop", "factor": 1}}, policies.SkipNonFinite(policies.Drop(1))),
        (
            {
                "name": "rejection_alarm",
                "inner": {
                    "name": "skip_non_finite",
                    "inner": {"name": "retry_dropless", "factor": 1.25, "scope": "step"},
                    "watch": ("loss",),
                    "max_consecutive": 3,
                },
                "rejections": 5,
                "window": 10,
                "action": "raise",
            },
            policies.RejectionAlarm(
                policies.SkipNonFinite(policies.RetryDropless(1.25), ("loss",), 3),
                rejections=5,
                window=10,
                action="raise",
            ),
        ),
    ],
)
def test_round_trip(given: dict, policy: policies.CapacityPolicy) -> None:
    assert policies.from_config(given) == policy
    full = policies.to_config(policy)
    assert set(given) <= set(full) and policies.to_config(policies.from_config(full)) == full
    assert policies.from_config(json.loads(json.dumps(full))) == policy
    assert hash(policies.from_config(full)) == hash(policy)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"factor": 1.0}, r'needs a "name", one of \(.static_factor.*rejection_alarm.\); got \{.factor'),
        ({"name": "retry", "factor": 1.0}, r"one of \(.static_factor.*got .*.name.: .retry."),
        ({"name": ["drop"]}, r'needs a "name", one of'),
        ("drop", r'needs a "name", one of .* got .drop.'),
        (None, r'needs a "name"'),
        (
            {"name": "drop", "factr": 1.0},
            r"'drop' takes the keys \('factor',\); unknown \['factr'\], missing \['factor'\]",
        ),
        (
            {"name": "adaptive_grow", "factor": 1},
            r"keys \('initial_factor', .*'programs'\); unknown \['factor'\], missing",
        ),
        ({"name": "drop"}, r"unknown \[\], missing \['factor'\]"),
        ({"name": "drop", "factor": 0}, r"Drop.factor must be a finite number above 0, got 0"),
        ({"name": "skip_non_finite"}, r"unknown \[\], missing \['inner'\]"),
        (
            {"name": "skip_non_finite", "inner": "drop"},
            r"SkipNonFinite.inner must be a policy, in a config a mapping .* got 'drop'",
        ),
        (
            {"name": "skip_non_finite", "inner": {"name": "drop", "factor": -1}},
            r"^skip_non_finite.inner: Drop.factor must be .* got -1",
        ),
        (
            {"name": "rejection_alarm", "inner": {"name": "skip_non_finite", "inner": {"name": "dorp"}}},
            r"^rejection_alarm.inner: skip_non_finite.inner: a policy config needs .* got \{'name': 'dorp'\}",
        ),
    ],
)
def test_a_bad_config_is_told_what_is_valid(given: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        policies.from_config(given)  # type: ignore[arg-type]


def test_register_a_policy_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("policies.config._REGISTRY", dict(policies.config._REGISTRY))

    @policies.register("mine")
    @dataclasses.dataclass(frozen=True)
    class Mine(policies.Drop):
        options: tuple = dataclasses.field(default_factory=tuple)

    policy = policies.from_config({"name": "mine", "factor": 1.0})
    assert policy == Mine(1.0)
    assert policies.to_config(policy) == {"name": "mine", "factor": 1.0, "options": ()}
    assert policies.names()[-1] == "mine"
    assert policies.register("mine")(Mine) is Mine  # a module that is imported twice does no harm


def test_register_refuses() -> None:
    with pytest.raises(ValueError, match=r"'drop' is taken by .*Drop.*choose another"):
        policies.register("drop")(policies.StaticFactor)

    class NotFrozen(policies.CapacityPolicy):
        pass

    with pytest.raises(ValueError, match=r"register\('x'\) needs .*dataclass\(frozen=True\).*NotFrozen"):
        policies.register("x")(NotFrozen)
    with pytest.raises(ValueError, match=r"NotFrozen is not registered; do so with policies.register"):
        policies.to_config(_unregistered())
    with pytest.raises(ValueError, match=r"NotFrozen is not registered"):
        policies.to_config(policies.SkipNonFinite(_unregistered()))


def _unregistered() -> policies.CapacityPolicy:
    @dataclasses.dataclass(frozen=True)
    class NotFrozen(policies.Drop):
        pass

    return NotFrozen(1.0)
