from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(scope="module", autouse=True)
def release_programs() -> Iterator[None]:
    """The programs of one file are of no use to the next, and together they take gigabytes."""
    yield
    jax.clear_caches()
