from __future__ import annotations

import json
from typing import Any

import pytest

from policies.changes import changes


@pytest.mark.parametrize(
    ("saved", "now", "told"),
    [
        ({}, {}, ()),
        ({"a": 1, "b": {"c": [1, 2]}}, {"b": {"c": (1, 2)}, "a": 1}, ()),  # JSON has no tuples and no order
        ({"a": {"b": {"c": 1}}}, {"a": {"b": {"c": 2}}}, ("a.b.c: 1 -> 2",)),
        ({"a": None}, {}, ("a: None -> nothing",)),
        ({}, {"a": None}, ("a: nothing -> None",)),
        ({"ladder": [4, 32]}, {"ladder": (8, 32)}, ("ladder: [4, 32] -> [8, 32]",)),
        ({"a": {"b": 1}}, {"a": 2}, ("a.b: 1 -> nothing", "a: nothing -> 2")),
    ],
)
def test_what_differs_is_told(saved: Any, now: Any, told: tuple[str, ...]) -> None:
    assert changes(json.loads(json.dumps(saved)), now) == told
