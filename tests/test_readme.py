"""The README's snippet runs as it stands, and shows what the README says of it."""

from __future__ import annotations

import re
from pathlib import Path

import jax

README = Path(__file__).parents[1] / "README.md"


def test_the_snippet_trains_and_retries() -> None:
    [snippet] = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    seen: list[tuple] = []
    names = {"print": lambda *row: seen.append(row), "__name__": "snippet"}
    with jax.numpy_dtype_promotion("standard"):  # optax's adam mixes a float and an int32 count
        exec(snippet, names)
    assert [row[0] for row in seen] == list(range(20))
    assert seen[-1][1] < seen[0][1]
    overflowed = [row for row in seen if row[4]]
    assert overflowed and all(row[2].slots is None and row[3] == 2 for row in overflowed)
    assert names["state"]["params"]
