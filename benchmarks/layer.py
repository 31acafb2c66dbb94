"""Times one MoE layer, forward and backward, beside the machine's limit and other libraries' layers.

Usage: python -m benchmarks.layer [--tables NAME,...] [--shapes NAME,...] [--peers NAME,...] [--dtype NAME]
         [--rounds N] [--torch-python PATH] [--maxtext-python PATH] [--quick] [--json FILE]

All contestants compute the same layer (router, dispatch, gated experts, combine) on the same weights and inputs, in
turns of one run each, and each is held to an oracle in float64. The limit is one dense expert on as many rows. A
backward pass gives the gradients of the input and of every parameter for a fixed cotangent. Tables:

  race     every contestant, balanced routing
  skew     ours, with balanced, Zipf and trained-router-like routings
  scaling  ours, against the number of experts and of tokens
  memory   temporary bytes and FLOPs as XLA tells them, against tokens, experts and choices

Shapes: A (E=8, k=2, D=512, F=1024) and B (E=64, k=6, D=512, F=256), 4096 tokens; if asked for, rank (E=8, k=4, D=7168,
F=2048), the experts of one of 32 ranks of DeepSeek-V3, for an accelerator. --quick takes tiny ones, to see that all
works. Peers (race only): ragged_dot, gshard, and those that may be installed, hugging_face and maxtext.

Exit codes: 0 done; 2 bad arguments.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.output import check_json, environment
from benchmarks.peers import ours, report
from benchmarks.peers.compiled import BOTH, Compiled, footprint
from benchmarks.peers.gshard import gshard
from benchmarks.peers.limit import LEAVES, expert, kernels, limit
from benchmarks.peers.problem import DTYPES, Problem, Shape, chosen, draw
from benchmarks.peers.protocol import Peer, PeerError
from benchmarks.peers.remote import INSTALLS, Remote, load
from benchmarks.peers.rounds import Contestant, check, measure
from benchmarks.routings import ROUTINGS, imbalance
from moe_blocks import Capacity

SHAPES = {
    "A": Shape(4096, 512, 1024, 8, 2),
    "B": Shape(4096, 512, 256, 64, 6),
    "rank": Shape(4096, 7168, 2048, 8, 4),  # the experts of one of 32 ranks of DeepSeek-V3; for an accelerator
}
QUICK_SHAPES = {"A": Shape(32, 16, 24, 4, 2), "B": Shape(32, 16, 8, 8, 3), "rank": Shape(32, 32, 8, 8, 4)}
# Slots bought, in multiples of the balanced load. On one device a factor above 1 per rank is the dropless buffer.
FACTORS = {"expert": (2.0, 1.25, 1.0, 0.5), "rank": (1.0, 0.5)}
IN_PROCESS: dict[str, Callable[..., Compiled]] = {
    "ragged_dot": lambda problem: ours.dropless(problem, "moe_blocks ragged_dot", implementation="ragged_dot"),
    "gshard": gshard,
}
PEERS = (*IN_PROCESS, *INSTALLS)
# Numbers of experts and of tokens, at the sizes of a shape that are otherwise its own.
EXPERTS, QUICK_EXPERTS = (8, 16, 32, 64, 128, 256), (4, 8)
TOKENS, QUICK_TOKENS = (8, 512, 4096, 65536), (8, 64)
TALL, TALL_ROUNDS = 65536, 2
CHOICES, QUICK_CHOICES = (1, 2, 4, 8), (1, 2)
ROUNDS, QUICK_ROUNDS = 21, 2


@dataclasses.dataclass(frozen=True)
class Setup:
    """What the command line asked for.

    Attributes:
      shapes: by name.
      dtype: of weights and inputs.
      rounds: of every measurement.
      quick: whether sizes are tiny.
      peers: names from `PEERS`.
      pythons: the interpreter of each peer that has its own, or None.
    """

    shapes: dict[str, Shape]
    dtype: str
    rounds: int
    quick: bool
    peers: tuple[str, ...]
    pythons: dict[str, str | None]


def race(setup: Setup) -> Iterator[dict[str, Any]]:
    """Every contestant on balanced loads."""
    for name, shape in setup.shapes.items():
        problem = draw(shape, dtype=setup.dtype)
        with ExitStack() as stack:
            remote, versions, skipped = _start_peers(setup, problem, stack)
            others: list[Compiled] = []
            for peer in (peer for peer in setup.peers if peer in IN_PROCESS):
                other = IN_PROCESS[peer](problem)
                if other.temp_bytes > (free := free_bytes()):
                    needed = f"{other.temp_bytes / 2**30:.1f} GiB of temporary memory, {free / 2**30:.1f} GiB are free"
                    skipped[peer] = f"it needs {needed}"
                else:
                    others.append(other)
            contestants: list[Contestant] = [
                limit(shape, setup.dtype),
                ours.dropless(problem),
                ours.dropless(problem, "the same again"),  # tells what the machine makes of no difference
                *(ours.capped(problem, factor, scope) for scope, factors in FACTORS.items() for factor in factors),
                *others,
                *remote,
            ]
            found = _compare(contestants, rounds=setup.rounds)
        yield {"title": f"{name}: {shape}", "shape": name, "versions": versions, "skipped": skipped} | found


def _start_peers(
    setup: Setup, problem: Problem, stack: ExitStack
) -> tuple[list[Remote], dict[str, str], dict[str, str]]:
    """The contestants in processes of their own, the versions of their packages, and why others do not take part."""
    remote: list[Remote] = []
    versions: dict[str, str] = {}
    skipped: dict[str, str] = {}
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    for name in setup.peers:
        if name in IN_PROCESS:
            continue
        python, install = setup.pythons[name], INSTALLS[name]
        if python is None:
            skipped[name] = f"not installed: {install.remedy}"
            continue
        try:
            peer = stack.enter_context(Peer(python, install.module))
            layers = load(peer, install, problem, folder)
            for layer in layers:  # one that fails, or runs out of memory, ends the process of all its layers
                layer.time(BOTH)
            remote += layers
            versions |= peer.versions
        except PeerError as error:
            skipped[name] = f"{error}; to install it: {install.remedy}"
    return remote, versions, skipped


def free_bytes() -> int:
    """Memory of the machine that nobody uses."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def skew(setup: Setup) -> Iterator[dict[str, Any]]:
    """Ours under every routing, in the same rounds."""
    for name, shape in setup.shapes.items():
        contestants: list[Contestant] = [limit(shape, setup.dtype)]
        unequal = {}
        for routing in ROUTINGS:
            problem = draw(shape, routing=routing, dtype=setup.dtype)
            unequal[routing] = imbalance(chosen(problem), shape.experts)
            for contestant in (ours.dropless(problem), ours.capped(problem, 1.25, "expert")):
                contestant.name = f"{routing}: {contestant.name}"
                contestants.append(contestant)
        yield {"title": f"{name}: {shape}", "shape": name, "imbalance": unequal} | _compare(
            contestants, rounds=setup.rounds
        )


def scaling(setup: Setup) -> Iterator[dict[str, Any]]:
    """Ours dropless, against E in the same rounds, and against T with the limit of each T."""
    for name, shape in setup.shapes.items():
        floors, layers = [limit(shape, setup.dtype)], []
        for experts in QUICK_EXPERTS if setup.quick else EXPERTS:
            problem = draw(dataclasses.replace(shape, experts=experts), dtype=setup.dtype)
            floors.append(kernels(problem, f"E={experts}"))
            layers.append(ours.dropless(problem, f"E={experts}"))
        found = _compare(floors + layers, rounds=setup.rounds, checked=layers)
        yield {"title": f"{name}, by experts: {shape}", "shape": name} | found
        rows: dict[str, Any] = {}
        for tokens in QUICK_TOKENS if setup.quick else TOKENS:
            taller = dataclasses.replace(shape, tokens=tokens)
            pair = [limit(taller, setup.dtype), ours.dropless(draw(taller, dtype=setup.dtype), f"T={tokens}")]
            pair[0].name = f"limit T={tokens}"
            rounds = min(setup.rounds, TALL_ROUNDS) if tokens >= TALL else setup.rounds
            rows |= _compare(pair, rounds=rounds, checked=pair[1:])["rows"]
        yield {"title": f"{name}, by tokens: {shape}", "shape": name, "rounds": setup.rounds, "rows": rows}


def _compare(
    contestants: Sequence[Contestant], *, rounds: int, checked: Sequence[Contestant] | None = None
) -> dict[str, Any]:
    """Times all and checks all, or those told: the oracle of many rows takes much memory. The first is the limit."""
    found = check(contestants if checked is None else checked)
    seconds = measure(contestants, rounds=rounds)
    rows = {
        c.name: {
            "base": contestants[0].name,
            "assignments": c.problem.shape.rows,
            "seconds": seconds[c.name],
            "check": found.get(c.name),
        }
        for c in contestants
    }
    return {"rounds": rounds, "rows": rows}


def memory(setup: Setup) -> Iterator[dict[str, Any]]:
    """What XLA sets aside for forward and backward; nothing runs."""
    for name, shape in setup.shapes.items():
        varied = {
            "tokens": QUICK_TOKENS if setup.quick else TOKENS,
            "experts": QUICK_EXPERTS if setup.quick else EXPERTS,
            "k": QUICK_CHOICES if setup.quick else CHOICES,
        }
        rows = []
        for field, values in varied.items():
            for value in values:
                one = dataclasses.replace(shape, **{field: value})
                rows.append(
                    {"shape": dataclasses.asdict(one), "itemsize": DTYPES[setup.dtype].itemsize}
                    | {"layer": _ours_needs(one, setup.dtype), "limit": _limit_needs(one.dense, setup.dtype)}
                )
        yield {"title": f"{name}: {shape}", "shape": name, "rows": rows}


# The three series of a table meet, and the limit is the same for every number of experts.
@functools.cache
def _ours_needs(shape: Shape, dtype: str) -> dict[str, float]:
    return footprint(ours.layer(ours.block(shape), Capacity(None)), shape, dtype)


@functools.cache
def _limit_needs(shape: Shape, dtype: str) -> dict[str, float]:
    return footprint(expert, shape, dtype, LEAVES)


TABLES: dict[str, Callable[[Setup], Iterator[dict[str, Any]]]] = {
    "race": race,
    "skew": skew,
    "scaling": scaling,
    "memory": memory,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    try:
        tables, setup, out = parse(sys.argv[1:] if argv is None else argv)
    except SystemExit as stop:
        return int(stop.code or 0)
    figures: dict[str, Any] = {
        "environment": environment() | {"dtype": setup.dtype, "quick": setup.quick},
        "tables": {},
    }
    print(report.conditions(figures["environment"]))
    for name in tables:
        figures["tables"][name] = []
        for found in TABLES[name](setup):
            figures["tables"][name].append(found)
            print(f"\n{report.RENDER[name](found, figures['environment'])}", flush=True)
            if out is not None:  # after each table: a run takes long, and may end early
                out.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


def parse(argv: Sequence[str]) -> tuple[tuple[str, ...], Setup, Path | None]:
    """The tables to make, what they are to be made of, and the file for the figures."""
    parser = argparse.ArgumentParser(
        "benchmarks.layer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s ...",
    )
    parser.add_argument("--tables", type=_among(TABLES), default=("race",))
    parser.add_argument("--shapes", type=_among(SHAPES), default=("A", "B"))
    parser.add_argument("--peers", type=_among(PEERS), default=PEERS)
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float32")
    parser.add_argument("--rounds", type=int)
    for install in INSTALLS.values():
        parser.add_argument(install.option, metavar="PATH")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args(argv)
    rounds = given.rounds if given.rounds is not None else QUICK_ROUNDS if given.quick else ROUNDS
    if rounds < 1:
        parser.error(f"--rounds must be at least 1, got {rounds}")
    try:
        check_json(given.json)
    except ValueError as error:
        parser.error(str(error))
    shapes = QUICK_SHAPES if given.quick else SHAPES
    setup = Setup(
        shapes={name: shapes[name] for name in given.shapes},
        dtype=given.dtype,
        rounds=rounds,
        quick=given.quick,
        peers=given.peers,
        pythons={name: getattr(given, install.option[2:].replace("-", "_")) for name, install in INSTALLS.items()},
    )
    return given.tables, setup, given.json


def _among(known: Sequence[str] | dict[str, Any]) -> Callable[[str], tuple[str, ...]]:
    def split(text: str) -> tuple[str, ...]:
        names = tuple(name for name in text.split(",") if name)
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown} is not among {', '.join(known)}")
        return names

    return split


if __name__ == "__main__":
    sys.exit(main())
