"""What the benchmarks print alike: the conditions that figures depend on, and tables; and where JSON may go."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def environment(*packages: str) -> dict[str, Any]:
    """Date, machine, Python, and the versions of jax, flax and those of the packages that are installed."""
    installed = {found.name for found in importlib.metadata.distributions()}
    names = ("jax", "jaxlib", "flax", "numpy", *(name for name in packages if name in installed))
    return {
        "date": time.strftime("%Y-%m-%d"),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in names},
    }


def check_json(file: str | Path | None) -> None:
    """Raises ``ValueError`` if the file that figures are to be written to cannot be, before they are measured."""
    if file is not None and not Path(file).resolve().parent.is_dir():
        raise ValueError(f"json must be a file in a folder that is there, got {str(file)!r}")


def aligned(heads: Sequence[Sequence[str]], body: Sequence[Sequence[str]], *, names: int = 1) -> list[str]:
    r"""The lines of a table; all columns but the first ``names`` are numbers.

    Example:
      >>> print("\n".join(aligned([["", "ms"]], [["a", "1.5"], ["bc", "12.0"]])))
            ms
      --------
      a    1.5
      bc  12.0
    """
    widths = [max(map(len, column)) for column in zip(*heads, *body, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if i < names else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (*heads, *body)
    ]
    return [*lines[: len(heads)], "-" * max(map(len, lines)), *lines[len(heads) :]]
