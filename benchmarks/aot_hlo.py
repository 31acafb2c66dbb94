"""What a compiled program does, read from the text of its HLO: products, kernels, collectives.

XLA's own ``cost_analysis`` counts the body of a loop once. Here a loop of a known number of rounds counts as often as
it runs, so that scanned layers and chunks are told in full.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

BYTES = {"pred": 1, "bf16": 2} | {f"{kind}{bits}": max(1, bits // 8) for kind in "suf" for bits in (4, 8, 16, 32, 64)}
COLLECTIVES = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
)

_HEAD = re.compile(r"^(ENTRY )?%(\S+) \(.*\{$")
_INSTRUCTION = re.compile(r"^  (ROOT )?%(\S+) = (.*?) ([a-z][\w-]*)\(([^)]*)\)(.*)$")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|\w+_computations?)=(?:\{([^}]*)\}|%([^\s,]+))")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")


class Shape(NamedTuple):
    """One array.

    Attributes:
      dtype: by HLO's name.
      dims: its extents.
    """

    dtype: str
    dims: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Without padding; 0 for what is no number, such as a token."""
        return BYTES.get(self.dtype, 0) * math.prod(self.dims)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name: unique in the program.
      opcode: such as ``fusion``.
      shapes: of the result; several where it is a tuple.
      operands: names, or the literal of a constant.
      rest: attributes, as they are written.
      is_root: whether it is the result of its computation.
    """

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    rest: str
    is_root: bool

    @property
    def called(self) -> tuple[str, ...]:
        """Computations that it runs."""
        found = (name for many, one in _CALLED.findall(self.rest) for name in (one or many).split(","))
        return tuple(name.strip().lstrip("%") for name in found if name)

    def computation(self, role: str) -> str:
        """The computation in the role of ``body`` or ``condition``."""
        found = re.search(rf"\b{role}=%([^\s,]+)", self.rest)
        return "" if found is None else found[1]


class Traffic(NamedTuple):
    """What the collectives of one kind come to.

    Attributes:
      written: how often one stands in the program.
      runs: how often one runs in it.
      bytes: that a device receives, with rings.
    """

    written: int
    runs: int
    bytes: int


class Product(NamedTuple):
    """A matrix product.

    Attributes:
      kernel: name of the hand-written kernel that computes it, or ``"dense"``.
      runs: how often it runs.
      flops: of all runs; two for each multiplication and addition.
    """

    kernel: str
    runs: int
    flops: int


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program.

    Attributes:
      computations: the instructions of each by their names.
      entry: name of the one that the program is.
    """

    computations: dict[str, dict[str, Instruction]]
    entry: str

    @classmethod
    def parse(cls, text: str) -> Program:
        """Reads ``compiled.as_text()``."""
        computations: dict[str, dict[str, Instruction]] = {}
        entry, current = "", ""
        for line in text.splitlines():
            if head := _HEAD.match(line):
                current = head[2]
                computations[current] = {}
                entry = current if head[1] else entry
            elif found := _INSTRUCTION.match(line):
                root, name, result, opcode, operands, rest = found.groups()
                names = tuple(part.split("*/")[-1].strip().lstrip("%") for part in operands.split(","))
                shapes = tuple(_shapes(result))
                computations[current][name] = Instruction(name, opcode, shapes, names, rest, root is not None)
        return cls(computations, entry)

    @cached_property
    def runs(self) -> collections.Counter[str]:
        """How often each computation runs. Of a conditional every branch counts, of a loop at least one round."""
        runs: collections.Counter[str] = collections.Counter()

        def visit(name: str, times: int) -> None:
            runs[name] += times
            for instruction in self.computations.get(name, {}).values():
                if not instruction.opcode.endswith(("-done", "-update")):  # they name again what has started
                    rounds = self.rounds(instruction) if instruction.opcode == "while" else 1
                    for called in instruction.called:
                        visit(called, times * rounds)

        visit(self.entry, 1)
        return runs

    def rounds(self, loop: Instruction) -> int:
        """Rounds of a ``while`` that counts from 0 up to a constant; 1 where that cannot be told."""
        condition = self.computations.get(loop.computation("condition"), {})
        root = next((i for i in condition.values() if i.is_root and i.opcode == "compare"), None)
        limits = [condition[name] for name in (root.operands if root else ()) if name in condition]
        constants = [int(i.operands[0]) for i in limits if i.opcode == "constant"]
        return max(1, *constants) if root and "direction=LT" in root.rest and constants else 1

    def running(self) -> Iterator[tuple[str, Instruction, int]]:
        """Every instruction that runs: its computation, itself, how often."""
        for name, times in self.runs.items():
            for instruction in self.computations.get(name, {}).values():
                yield name, instruction, times

    def operand_shapes(self, computation: str, instruction: Instruction) -> list[Shape]:
        """Shapes of the operands, those of a tuple one after the other."""
        known = self.computations[computation]
        return [shape for name in instruction.operands if name in known for shape in known[name].shapes]

    def collectives(self, devices: int) -> dict[str, Traffic]:
        """What crosses the interconnect, by kind, on a mesh of so many devices."""
        total = dict.fromkeys(COLLECTIVES, Traffic(0, 0, 0))
        for computation, instruction, times in self.running():
            kind = instruction.opcode.removesuffix("-start")
            if kind not in total:
                continue
            if computation.startswith("all-reduce-scatter"):  # on TPU, a fusion of an all-reduce and a slice of it
                kind = "reduce-scatter"
            size = sum(shape.bytes for shape in self.operand_shapes(computation, instruction))
            received = round(size * _received(kind, _group_size(instruction.rest, devices)))
            written, runs, moved = total[kind]
            total[kind] = Traffic(written + 1, runs + times, moved + times * received)
        return total

    def products(self) -> list[Product]:
        """All matrix products, by kernel. A grouped product counts every row of its left side."""
        total: dict[str, Product] = {}
        for computation, instruction, times in self.running():
            shapes = self.operand_shapes(computation, instruction)
            flops = _flops(instruction, shapes)
            if flops:
                dense = instruction.opcode != "custom-call"
                name = "dense" if dense else re.sub(r"[.\d]+$", "", instruction.name)
                _, runs, before = total.get(name, Product(name, 0, 0))
                total[name] = Product(name, runs + times, before + times * flops)
        return sorted(total.values())


def _shapes(text: str) -> Iterator[Shape]:
    for dtype, dims in _ARRAY.findall(text):
        yield Shape(dtype, tuple(int(n) for n in dims.split(",") if n))


def _received(kind: str, group: int) -> float:
    """Bytes that a device receives for each byte of the operand, in a group of so many."""
    others = (group - 1) / group
    return {"all-gather": group - 1.0, "all-reduce": 2 * others, "collective-permute": 1.0}.get(kind, others)


def _group_size(rest: str, devices: int) -> int:
    """Devices that take part in one collective together."""
    if found := _MESH.search(rest):
        sizes = dict(re.findall(r"'([^']*)'=(\d+)", found[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'([^']*)'", found[2]))
    if found := re.search(r"replica_groups=\{\{([\d,]+)\}", rest):
        return len(found[1].split(","))
    if found := re.search(r"replica_groups=\[\d+,(\d+)\]", rest):
        return int(found[1])
    return devices


def _flops(instruction: Instruction, operands: list[Shape]) -> int:
    """Of one run; 0 if it is no matrix product."""
    if not instruction.shapes:
        return 0
    out = instruction.shapes[0].dims
    if instruction.opcode == "custom-call" and "tpu_custom_call" in instruction.rest:
        # [M, K] with [E, K, N] to [M, N], or [M, K] with [M, N] to [E, K, N].
        matrices = [s.dims for s in operands if "f" in s.dtype and len(s.dims) >= 2]
        return 2 * math.prod(matrices[0]) * out[-1] if len(matrices) >= 2 else 0
    if instruction.opcode == "dot":
        axes = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.rest)
        return 2 * math.prod(out) * math.prod(operands[0].dims[int(i)] for i in axes[1].split(",") if i) if axes else 0
    if instruction.opcode == "convolution":
        return 2 * math.prod(out) * _contracted(instruction, operands)
    return 0


def _contracted(convolution: Instruction, operands: list[Shape]) -> int:
    """Products that one output of a convolution sums up.

    On TPU every dense product is one. A batch axis then is a spatial one, dilated so that each place of the window but
    one falls on a hole; a second contracted axis is a window without holes.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", convolution.rest)
    if labels is None:
        return 0
    size = operands[1].dims[labels[2].index("i")]
    window = re.search(r"window=\{([^}]*)\}", convolution.rest)
    fields = dict(part.split("=") for part in window[1].split(" ")) if window else {}
    spans = [int(n) for n in fields.get("size", "").split("x") if n]
    holes = [int(n) for n in fields.get("lhs_dilate", "x".join("1" for _ in spans)).split("x") if n]
    return size * math.prod(max(1, span // hole) for span, hole in zip(spans, holes, strict=True))
