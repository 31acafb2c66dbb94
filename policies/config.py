"""Policies by name: the config of a run chooses one and gives its numbers.

A config is a mapping of the name and the fields of the dataclass, as YAML or JSON hold it. The field of a policy that
is itself a policy, as of a `Decorator`, is again a config.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from policies.adaptive_grow import AdaptiveGrow
from policies.base import CapacityPolicy
from policies.drop import Drop
from policies.rejection_alarm import RejectionAlarm
from policies.retry_dropless import RetryDropless
from policies.skip_non_finite import SkipNonFinite
from policies.static_factor import StaticFactor

PolicyClass = TypeVar("PolicyClass", bound=type[CapacityPolicy])

_REGISTRY: dict[str, type[CapacityPolicy]] = {
    "static_factor": StaticFactor,
    "drop": Drop,
    "retry_dropless": RetryDropless,
    "adaptive_grow": AdaptiveGrow,
    "skip_non_finite": SkipNonFinite,
    "rejection_alarm": RejectionAlarm,
}


def names() -> tuple[str, ...]:
    """The names that ``from_config`` knows."""
    return tuple(_REGISTRY)


def register(name: str) -> Callable[[PolicyClass], PolicyClass]:
    """Makes a policy of one's own known to ``from_config``; used as a decorator.

    Args:
      name: its name in configs.

    Returns:
      A decorator that returns the class unchanged.

    Raises:
      ValueError: if another class has that name, or the class is not a frozen dataclass policy.

    Example::

        @register("tolerant")
        @dataclasses.dataclass(frozen=True)
        class Tolerant(CapacityPolicy):
            factor: float = 1.0
            ...

        from_config({"name": "tolerant", "factor": 2.0})
    """

    def add(cls: PolicyClass) -> PolicyClass:
        if not getattr(getattr(cls, "__dataclass_params__", None), "frozen", False):
            raise ValueError(
                f"register({name!r}) needs a subclass of CapacityPolicy that is decorated with "
                f"@dataclasses.dataclass(frozen=True), got {cls!r}"
            )
        if _REGISTRY.setdefault(name, cls) is not cls:
            raise ValueError(f"the policy name {name!r} is taken by {_REGISTRY[name]!r}; choose another")
        return cls

    return add


def from_config(config: Mapping[str, Any]) -> CapacityPolicy:
    """Builds the policy that a config describes.

    Args:
      config: ``"name"`` and the fields of that policy; fields with defaults may be left out.

    Raises:
      ValueError: if the name or a key is unknown, or one is missing; the message lists the valid ones.
        If a number is out of range, the message names it.

    Example:
      >>> from_config({"name": "retry_dropless", "factor": 1.25})
      RetryDropless(factor=1.25, scope='step')
      >>> from_config({"name": "rejection_alarm", "inner": {"name": "drop", "factor": 2.0}}).inner
      Drop(factor=2.0)
    """
    if not isinstance(config, Mapping) or config.get("name") not in names():
        raise ValueError(f'a policy config needs a "name", one of {names()}; got {config!r}')
    cls = _REGISTRY[config["name"]]
    given = {key: value for key, value in config.items() if key != "name"}
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    required = [key for key, field in fields.items() if field.default is field.default_factory is dataclasses.MISSING]
    unknown = [key for key in given if key not in fields]
    missing = [key for key in required if key not in given]
    if unknown or missing:
        raise ValueError(
            f"the policy {config['name']!r} takes the keys {tuple(fields)}; unknown {unknown}, missing {missing}"
        )
    return cls(**{key: _read(f"{config['name']}.{key}", value) for key, value in given.items()})


def _read(name: str, value: Any) -> Any:
    """The value of one field: a mapping is the config of a policy."""
    if not isinstance(value, Mapping):
        return value
    try:
        return from_config(value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def to_config(policy: CapacityPolicy) -> dict[str, Any]:
    """The config that ``from_config`` builds this policy from.

    Raises:
      ValueError: if the class of the policy is not registered.

    Example:
      >>> to_config(Drop(factor=2.0))
      {'name': 'drop', 'factor': 2.0}
    """
    name = next((name for name, cls in _REGISTRY.items() if cls is type(policy)), None)
    if name is None:
        raise ValueError(f"{type(policy).__name__} is not registered; do so with policies.register(name)")
    keys = [field.name for field in dataclasses.fields(policy)]  # type: ignore[arg-type]
    return {"name": name, **{key: _write(getattr(policy, key)) for key in keys}}


def _write(value: Any) -> Any:
    """The inverse of ``_read``."""
    return to_config(value) if dataclasses.is_dataclass(value) else value  # type: ignore[arg-type]
