"""Contestants in turn: rounds of one run each, and what they come to.

A machine is now slow and now fast, so times are compared within a round only: a ratio is the median over the rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from benchmarks.peers.compiled import MODES
from benchmarks.peers.problem import Arrays, Keep, Problem, chosen, differences, solve

SLOW = 8  # times the first contestant's time; what is slower does not run in every round


class Contestant(Protocol):
    """A layer that can be timed and checked; see `Compiled`."""

    name: str
    problem: Problem
    keep: Keep

    def time(self, mode: str) -> float: ...

    def results(self) -> Arrays: ...


Seconds = dict[str, list[float | None]]


class Spread(NamedTuple):
    """Median and quartiles of some rounds.

    Example:
      >>> spread([3.0, 1.0, 2.0])
      Spread(median=2.0, lower=1.5, upper=2.5, rounds=3)
    """

    median: float
    lower: float
    upper: float
    rounds: int


def spread(values: Sequence[float]) -> Spread:
    """Median, quartiles and number of the values, of which there is at least one."""
    lower, median, upper = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
    return Spread(median, lower, upper, len(values))


def measure(contestants: Sequence[Contestant], *, rounds: int, modes: Sequence[str] = MODES) -> dict[str, Seconds]:
    """Times all of them in turn, in an order that rotates.

    Args:
      contestants: the first is the one that others are compared to.
      rounds: number of turns. A contestant that takes `SLOW` times as long as the first has a turn in every second
        round, and so on; but always in the first round.
      modes: what to time.

    Returns:
      By contestant and mode the seconds of every round, None where it had no turn.
    """
    for c in contestants:
        for mode in modes:
            c.time(mode)
    pace = {c.name: c.time(modes[-1]) for c in contestants}
    every = {name: max(1, round(own / (SLOW * pace[contestants[0].name]))) for name, own in pace.items()}
    seconds: dict[str, Seconds] = {c.name: {mode: [] for mode in modes} for c in contestants}
    for number in range(rounds):
        start = number % len(contestants)
        for c in (*contestants[start:], *contestants[:start]):
            for mode in modes:
                seconds[c.name][mode].append(c.time(mode) if number % every[c.name] == 0 else None)
    return seconds


def ratios(times: Sequence[float | None], base: Sequence[float | None]) -> list[float]:
    """Time over the base's time, in the rounds that have both."""
    return [own / other for own, other in zip(times, base, strict=True) if own is not None and other is not None]


def check(contestants: Sequence[Contestant]) -> dict[str, dict[str, Any]]:
    """Holds each to the oracle of its problem, with the same assignments dropped.

    Returns:
      By contestant: ``"output"`` and ``"gradients"``, the largest difference relative to the largest entry, of all
      gradients the worst, and ``"dropped"``, the share of the assignments that the contestant dropped.
    """
    found = {}
    solved: tuple[Problem, np.ndarray] | None = None  # only the last one: an answer is as large as all weights twice
    for c in contestants:
        kept = c.keep(chosen(c.problem))
        if solved is None or solved[0] is not c.problem or not np.array_equal(solved[1], kept):
            solved, want = (c.problem, kept), solve(c.problem, kept)
        by_array = differences(c.results(), want)
        output = by_array.pop("output")
        found[c.name] = {"output": output, "gradients": max(by_array.values()), "dropped": 1 - float(kept.mean())}
    return found
