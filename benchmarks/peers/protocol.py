"""How a peer in a process of its own is told what to do: one line of JSON each way, arrays in ``.npz`` files.

    {"do": "load", "problem": FILE, "dtype": NAME, "k": 2}   the peer builds its layers
    {"do": "check", "layer": NAME, "results": FILE}          it writes output and gradients
    {"do": "time", "layer": NAME, "mode": MODE}              it runs the layer once and answers with the seconds

Every answer is an object; one with the key ``error`` says what went wrong. The end of the input ends the process. The
peer's own Python needs numpy and nothing else for this module.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

ROOT = Path(__file__).parents[2]


class Layer(Protocol):
    """A layer on a problem, in the peer's process."""

    def time(self, mode: str) -> float:
        """Seconds of one run of ``"forward"`` or ``"forward+backward"``."""

    def results(self) -> dict[str, np.ndarray]:
        """Output and gradients as float32, by the names of the parameters, ``"x"`` and ``"output"``."""


# Arrays of the problem, name of the dtype, k -> the layers by name.
Build = Callable[[Mapping[str, np.ndarray], str, int], Mapping[str, Layer]]


def save(file: str | Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays by name."""
    np.savez(file, allow_pickle=False, **dict(arrays))


def serve(build: Build, versions: Mapping[str, str]) -> None:
    """Answers until the input ends. Whatever the peer prints goes to the standard error."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    layers: Mapping[str, Layer] = {}
    print(json.dumps({"versions": versions}), file=answers)
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer: dict[str, Any] = {}
            if order["do"] == "load":
                with np.load(order["problem"]) as arrays:
                    layers = build(dict(arrays), order["dtype"], order["k"])
                answer["layers"] = list(layers)
            elif order["do"] == "check":
                save(order["results"], layers[order["layer"]].results())
            else:
                answer["seconds"] = layers[order["layer"]].time(order["mode"])
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
        print(json.dumps(answer), file=answers)


class PeerError(RuntimeError):
    """A peer that does not start, or cannot do what it was told."""


class Peer:
    """A peer's process, seen from here.

    Attributes:
      versions: of the peer's packages.

    Raises:
      PeerError: if it does not start, with the last line that it wrote.
    """

    def __init__(self, python: str, module: str) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115, it stays open as long as the process
        try:
            self._process = subprocess.Popen(
                [python, "-m", module],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                bufsize=1,
            )
        except OSError as error:
            self._errors.close()
            raise PeerError(f"{python}: {error.strerror}") from None
        try:
            self.versions: dict[str, str] = self._answer()["versions"]
        except PeerError:
            self.close()
            raise

    def ask(self, **order: Any) -> dict[str, Any]:
        """Sends an order; returns the answer.

        Raises:
          PeerError: if the answer is an error, or the process has ended.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended; the missing answer tells
            print(json.dumps(order), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._errors.seek(0)
            lines = self._errors.read().strip().splitlines() or ["no message"]
            raise PeerError(f"ended with code {self._process.returncode}: {lines[-1]}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer

    def close(self) -> None:
        """Ends the process."""
        if not self._errors.closed:
            self._process.communicate()
            self._errors.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
