"""What the benchmarks print alike: the conditions that figures depend on, and tables; and where JSON may go."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moe_blocks.capacity import positive_int


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


def rounds_command(
    name: str,
    doc: str | None,
    argv: Sequence[str] | None,
    *,
    rounds: tuple[int, int],
    minimum: int,
    measure: Callable[[bool, int], dict[str, Any]],
    render: Callable[[dict[str, Any]], str],
) -> int:
    """A command that takes --rounds, --quick and --json, and tells what it measured; returns its exit code.

    Args:
      name: of the module.
      doc: what --help prints.
      argv: of the command line; None: that of the process.
      rounds: by default, in full and when it is quick.
      minimum: of the rounds.
      measure: ``(quick, rounds)`` to plain numbers.
      render: these to text for people.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(words):
        print(doc)
        return 0
    parser = argparse.ArgumentParser(prog=name, add_help=False)
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(words)
    try:
        wanted = positive_int("rounds", rounds[args.quick] if args.rounds is None else args.rounds, minimum=minimum)
        check_json(args.json)
    except ValueError as error:
        parser.error(str(error))
    figures = measure(args.quick, wanted)
    print(render(figures))
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0
