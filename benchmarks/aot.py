"""Compiles the MoE block and the training step for TPUs, on a machine that has none, and tells what they need.

Usage: python -m benchmarks.aot [--topology NAME] ... [--factor FLOAT] ... [--part block|step] ... [--json FILE]
         [--width D] [--expert-width F] [--experts E] [--experts-per-tok K] [--tokens T] [--layers N]
         [--dtype NAME] [--param-dtype NAME] [--expert-parallel N] [--implementation NAME] [--collective NAME]

Nothing is run, so there are no times but those of the compiler; bytes, FLOPs and collectives are of one device. For
each topology and factor it compiles, forward and backward:

  block, factor f       one layer with buffers of f times the balanced size
  block, fallback       the same layer dropless, in as many chunks as keep the buffers that small
  block, in turns       the same with buffers of factor f that are gone through as often as they overflow
  block, dropless       the same in one piece
  step, retry, ...      the two programs of a StepRunner under RetryDropless(f): capped, and its fallback
  step, in turns        the one program under RetryDropless(f, scope="layer")
  step, plain           the capped step under a bare jit, without a policy; its state donated, as the runner's is
  step, state kept      likewise, not donated: what a retry costs that keeps the old state

Topologies: v5e:2x2, v5p:2x2x1, v6e:2x2, tpu7x:2x2x1 (8 devices), ... v5p:8x8x4, which need libtpu: pip install
'moe-blocks[tpu]'; h100:8, which needs jax's CUDA plugin: pip install 'moe-blocks[gpu]'.

Exit codes: 0 done; 2 bad arguments; 3 no topology was given and libtpu is not installed.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks import aot_table
from benchmarks.aot_hlo import Program
from benchmarks.aot_models import Case, Model, cases, topology_mesh
from benchmarks.output import check_json, environment
from moe_blocks.capacity import positive_factor, positive_int

TOPOLOGIES = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")
PARTS = ("block", "step")
SIZES = ("width", "expert_width", "experts", "experts_per_tok", "tokens", "layers")
NO_LIBTPU = "benchmarks.aot: libtpu, the compiler for TPUs, is not installed; pip install 'moe-blocks[tpu]' brings it"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(words):
        print(__doc__)
        return 0
    try:
        options, unknown = _parser().parse_known_args(words)
        if unknown:
            raise ValueError(f"{unknown[0]!r} is not an option; see --help")
        if not options.topology and importlib.util.find_spec("libtpu") is None:
            print(NO_LIBTPU, file=sys.stderr)
            return 3
        model = Model(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Model)})
        for name in (*SIZES, "expert_parallel"):
            positive_int(name, getattr(options, name))
        for factor in options.factor or ():
            positive_factor("factor", factor)
        check_json(options.json)
        jax.config.update("jax_platforms", "cpu")  # with libtpu installed jax would look for a TPU
        meshes = {
            name: topology_mesh(name, experts=model.experts, expert_parallel=options.expert_parallel)
            for name in options.topology or TOPOLOGIES
        }
    except (ValueError, TypeError, argparse.ArgumentError) as error:
        print("benchmarks.aot: error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    figures: dict[str, Any] = {
        "environment": environment(*aot_table.PACKAGES),
        "model": dataclasses.asdict(model),
        "topologies": {},
    }
    print(aot_table.conditions(figures))
    for name, mesh in meshes.items():
        found = measure(model, mesh, tuple(options.factor or (1.25,)), tuple(options.part or PARTS))
        figures["topologies"][name] = found
        print("", *aot_table.table(name, found), "", *aot_table.claims(found), sep="\n", flush=True)
        if options.json is not None:  # after each, since the next may take long
            Path(options.json).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


def measure(
    model: Model, mesh: jax.sharding.Mesh, factors: tuple[float, ...], parts: tuple[str, ...]
) -> dict[str, Any]:
    """Compiles everything for one mesh; returns plain numbers."""
    spec = model.spec(mesh.shape["expert"])
    with jax.set_mesh(mesh):
        programs = [_compiled(model, mesh, case) for case in cases(model, mesh, factors, parts)]
    return {
        "device_kind": mesh.devices.flat[0].device_kind,
        "mesh": dict(mesh.shape),
        "balanced": spec.balanced,
        "dropless": spec.dropless,
        "programs": programs,
    }


def _compiled(model: Model, mesh: jax.sharding.Mesh, case: Case) -> dict[str, Any]:
    """The row of one program."""
    print(f"compiling {case.part}, factor {case.factor:g}, {case.role} ...", end="\r", file=sys.stderr, flush=True)
    spec = model.spec(mesh.shape["expert"])
    chunk = dataclasses.replace(spec, tokens_per_rank=-(-spec.tokens_per_rank // case.capacity.chunks))
    rows = min(spec.rows(case.capacity.slots), chunk.rows(None))
    layers = model.layers if case.part == "step" else 1
    row: dict[str, Any] = {
        "part": case.part,
        "factor": case.factor,
        "role": case.role,
        "slots": case.capacity.slots,
        "chunks": case.capacity.chunks,
        "buffer_rows": rows,
        "ideal_flops": 9 * layers * case.capacity.chunks * model.product_flops(rows),
    }
    started = time.perf_counter()
    try:
        compiled = case.compile()
    except jax.errors.JaxRuntimeError as error:
        return row | {"error": shortage(str(error)), "seconds": time.perf_counter() - started}
    row["seconds"] = time.perf_counter() - started
    return row | memory(compiled.memory_analysis()) | contents(compiled, mesh.size)


def memory(stats: Any) -> dict[str, int]:
    """Bytes of one device. The peak is that of everything which is live at once, arguments included."""
    sizes = {name: int(getattr(stats, f"{name}_size_in_bytes")) for name in ("argument", "output", "alias", "temp")}
    return sizes | {"peak": int(stats.peak_memory_in_bytes)}


def contents(compiled: jax.stages.Compiled, devices: int) -> dict[str, Any]:
    """Products, kernels and collectives."""
    program = Program.parse(compiled.as_text() or "")
    products = program.products()
    return {
        "flops": sum(product.flops for product in products),
        "flops_outside_kernels": sum(product.flops for product in products if product.kernel == "dense"),
        "flops_by_xla": float((compiled.cost_analysis() or {}).get("flops", 0.0)),
        "products": [product._asdict() for product in products],
        "collectives": {
            kind: traffic._asdict() for kind, traffic in program.collectives(devices).items() if traffic.written
        },
    }


def shortage(message: str) -> str:
    """What the compiler says about a program that it cannot build, above all for want of memory, in one line."""
    needs = re.search(r"\((\S+)\) exceeds available HBM \((\S+)\)", message)
    return f"needs {needs[1]} of {needs[2]}" if needs else " ".join(message.split())[:200]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("benchmarks.aot", add_help=False, exit_on_error=False, allow_abbrev=False)
    for name in SIZES:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(Model, name))
    for name in ("dtype", "param_dtype", "implementation", "collective"):
        parser.add_argument(f"--{name.replace('_', '-')}", default=getattr(Model, name))
    parser.add_argument("--expert-parallel", type=int, default=64)
    parser.add_argument("--topology", action="append")
    parser.add_argument("--factor", type=float, action="append")
    parser.add_argument("--part", choices=PARTS, action="append")
    parser.add_argument("--json")
    return parser


if __name__ == "__main__":
    sys.exit(main())
