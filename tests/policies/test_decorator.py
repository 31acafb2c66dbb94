from __future__ import annotations

import dataclasses
import inspect

import jax.numpy as jnp
import pytest

from policies import CapacityPolicy, Decorator, Drop, RetryDropless
from policies.config import names, register
from tests.policies import toy


def test_it_hands_on_every_method_of_a_policy() -> None:
    """One that it did not hand on would be the base class's, not the inner policy's."""
    methods = {name for name, _ in inspect.getmembers(CapacityPolicy, inspect.isfunction) if not name.startswith("_")}
    assert {"init", "valid", "skip", "accept"} <= methods
    assert methods <= set(vars(Decorator))


def test_it_decides_as_the_inner_policy() -> None:
    inner = RetryDropless(1.0)
    policy = Decorator(Decorator(inner))
    state = policy.init(toy.SPEC)
    assert state == inner.init(toy.SPEC)
    assert policy.capacities(state) == inner.capacities(state)
    assert policy.resume(toy.SPEC, state.to_json()) == state
    assert policy.valid({}) is True
    for demand in (4, 5):
        verdict = policy.accept(jnp.array([demand], jnp.int32), policy.capacity(state))
        assert bool(verdict) == (demand == 4)


@pytest.mark.parametrize("inner", [None, 1.25, "drop", {"factor": 1.0}, Drop])
def test_what_is_no_policy_is_refused(inner: object) -> None:
    with pytest.raises(ValueError, match=r"Decorator.inner must be a policy, in a config a mapping with its name"):
        Decorator(inner)  # type: ignore[arg-type]


def test_a_decorator_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from policies import config, from_config, to_config

    monkeypatch.setattr(config, "_REGISTRY", dict(config._REGISTRY))

    @register("mine")
    @dataclasses.dataclass(frozen=True)
    class Mine(Decorator):
        number: int = 3

    assert "mine" in names()
    policy = from_config({"name": "mine", "inner": {"name": "drop", "factor": 1.0}})
    assert policy == Mine(Drop(1.0))
    assert to_config(policy) == {"name": "mine", "inner": {"name": "drop", "factor": 1.0}, "number": 3}
