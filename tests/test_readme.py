"""The README's snippets run as they stand, and show what the README says of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import pytest

from policies import config

README = Path(__file__).parents[1] / "README.md"


@pytest.fixture(scope="module")
def snippets() -> tuple[dict[str, Any], list[tuple]]:
    """The names that all snippets, run one after the other, leave; and the rows that they print."""
    rows: list[tuple] = []
    names: dict[str, Any] = {"print": lambda *row: rows.append(row), "__name__": "snippet"}
    with pytest.MonkeyPatch.context() as patch, jax.numpy_dtype_promotion("standard"):  # optax's adam mixes dtypes
        patch.setattr("policies.config._REGISTRY", dict(config._REGISTRY))  # one of them registers a policy
        for snippet in re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL):
            exec(compile(snippet, str(README), "exec", dont_inherit=True), names)
    return names, rows


def test_the_first_one_trains_and_retries(snippets: tuple[dict[str, Any], list[tuple]]) -> None:
    names, rows = snippets
    assert [row[0] for row in rows] == list(range(20))
    assert rows[-1][1] < rows[0][1]
    overflowed = [row for row in rows if row[4]]
    assert overflowed and all(row[2].slots is None and row[3] == 2 for row in overflowed)
    assert names["state"]["params"]


def test_on_a_mesh_the_experts_are_sharded(snippets: tuple[dict[str, Any], list[tuple]]) -> None:
    names, _ = snippets
    assert names["output"].shape == names["x"].shape
    assert names["total_recv_tokens"].shape == (8,)
    assert names["variables"]["params"]["wi_0"].sharding.spec[0] == "expert"
    assert names["spec"].ep_size == 4


def test_the_policy_is_dropless_first_and_retries_later(snippets: tuple[dict[str, Any], list[tuple]]) -> None:
    from policies import Report

    policy = snippets[0]["policy"]
    state = policy.init(snippets[0]["spec"])
    seen = []
    for step in range(12):
        capacity = policy.capacity(state)
        seen.append(capacity.slots)
        state = policy.update(state, Report(step, 0, 1, capacity, accepted=True))
    assert seen[:10] == [None] * 10
    assert seen[10] is not None and seen[10] == seen[11]
    rejected = policy.update(state, Report(12, 0, 10**6, policy.capacity(state), accepted=False))
    assert policy.capacity(rejected).slots is None
