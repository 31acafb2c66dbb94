"""What differs between a run that was saved and the one that goes on with it, in words."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any


def changes(saved: Any, now: Any) -> tuple[str, ...]:
    """The entries of two JSON values that differ, one line each.

    Args:
      saved: as JSON gives it back.
      now: JSON-able; a tuple is a list.

    Returns:
      ``"key.of.an.entry: old -> new"``; ``nothing`` stands for an entry that is not there.

    Example:
      >>> changes({"steps": 10, "policy": {"factor": 1.25}}, {"steps": 20, "policy": {"factor": 1.25}, "seed": 0})
      ('steps: 10 -> 20', 'seed: nothing -> 0')
    """
    before, after = dict(_entries("", saved)), dict(_entries("", json.loads(json.dumps(now))))
    return tuple(
        f"{key}: {before.get(key, 'nothing')} -> {after.get(key, 'nothing')}"
        for key in {**before, **after}
        if before.get(key, _NOTHING) != after.get(key, _NOTHING)
    )


_NOTHING = object()  # no JSON value, null among them


def _entries(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _entries(f"{key}.{name}" if key else name, inner)
    else:
        yield key, value
