"""Contestants in processes of their own: which there are, how to get them, and how they take part."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.peers.problem import Arrays, Keep, Problem, Shape, keep_all, keep_per_sequence, per_sequence_slots
from benchmarks.peers.protocol import Peer, save


@dataclasses.dataclass(frozen=True)
class Install:
    """A peer that may be installed.

    Attributes:
      module: to run with the peer's Python.
      option: of the command, which names that Python.
      packages: to install for it.
      keep: which assignments a layer of the peer serves, by its name and the shape.
    """

    module: str
    option: str
    packages: str
    keep: Callable[[str, Shape], Keep]

    @property
    def remedy(self) -> str:
        """How to get it."""
        return f"python -m venv DIR && DIR/bin/pip install {self.packages}, then {self.option} DIR/bin/python"


def _maxtext_keep(layer: str, shape: Shape) -> Keep:
    *_, last = layer.split()
    return keep_per_sequence(per_sequence_slots(shape, float(last))) if "dropping" in layer else keep_all


# Python 3.12 or newer. MaxText names what it needs in extras for whole training set-ups; this is what its layer needs.
MAXTEXT = (
    "maxtext==0.2.5 jax flax absl-py aqtp cloud-accelerator-diagnostics datasets drjax etils grain huggingface-hub "
    "jinja2 jsonlines ml-goodput-measurement omegaconf optax orbax-checkpoint pathwaysutils pillow psutil pydantic "
    "qwix sentencepiece tabulate tensorboardx tokamax transformers"
)
INSTALLS = {
    "hugging_face": Install(
        "benchmarks.peers.hugging_face", "--torch-python", "torch transformers", lambda layer, shape: keep_all
    ),
    "maxtext": Install("benchmarks.peers.maxtext", "--maxtext-python", MAXTEXT, _maxtext_keep),
}


class Remote:
    """One layer of a peer's process on a problem that it has loaded.

    Attributes:
      name, problem, keep: as those of `Compiled`.
    """

    def __init__(self, peer: Peer, layer: str, problem: Problem, keep: Keep, folder: Path) -> None:
        self.name, self.problem, self.keep = layer, problem, keep
        self._peer, self._results = peer, folder / "results.npz"

    def time(self, mode: str) -> float:
        """Seconds of one run, by the peer's clock."""
        return float(self._peer.ask(do="time", layer=self.name, mode=mode)["seconds"])

    def results(self) -> Arrays:
        """Output and gradients, by the names of `problem.solve`."""
        self._peer.ask(do="check", layer=self.name, results=str(self._results))
        with np.load(self._results) as arrays:
            return dict(arrays)


def load(peer: Peer, install: Install, problem: Problem, folder: Path) -> list[Remote]:
    """Gives a peer the problem, and tells which contestants it has.

    Raises:
      PeerError: if it cannot load the problem.
    """
    file = folder / "problem.npz"
    save(file, {"x": problem.x, "cotangent": problem.cotangent} | problem.params)
    layers = peer.ask(do="load", problem=str(file), dtype=problem.dtype, k=problem.shape.k)["layers"]
    return [Remote(peer, layer, problem, install.keep(layer, problem.shape), folder) for layer in layers]
