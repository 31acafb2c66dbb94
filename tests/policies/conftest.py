from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from moe_blocks.capacity import Capacity
from policies.programs import Programs


@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """The slots of every program that is run, in order."""
    log: list[int | None] = []
    get = Programs.get

    def logged(self: Programs, capacity: Capacity, batch: Any) -> Callable[..., Any]:
        program = get(self, capacity, batch)

        def call(*args: Any) -> Any:
            log.append(capacity.slots)
            return program(*args)

        return call

    monkeypatch.setattr(Programs, "get", logged)
    return log
