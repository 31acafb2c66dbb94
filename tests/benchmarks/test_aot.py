from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import jax
import pytest

from benchmarks import aot, aot_table
from benchmarks.aot_hlo import Product, Program, Traffic
from benchmarks.aot_models import Model

# In the compiler's own words, shortened: a scan of 3 chunks around a kernel, a fused reduce-scatter, dense products.
HLO = """HloModule jit_run, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[]{:T(128)} parameter(0)
  %b = f32[]{:T(128)} parameter(1)
  ROOT %sum = f32[]{:T(128)} add(%a, %b)
}

%all-reduce-scatter.1 (input: f32[4,16]) -> f32[16] {
  %input = f32[4,16]{1,0:T(8,128)S(1)} parameter(0)
  %all-reduce.9 = f32[4,16]{1,0:T(8,128)} all-reduce(%input), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  ROOT %dynamic-slice.7 = f32[16]{0} dynamic-slice(%all-reduce.9), dynamic_slice_sizes={1,16}
}

%body (p: (s32[], bf16[32,8], bf16[4,8,6], f32[4,16])) -> (s32[], bf16[32,8], bf16[4,8,6], f32[4,16]) {
  %p = (s32[]{:T(128)}, bf16[32,8]{1,0:T(8,128)(2,1)}, bf16[4,8,6]{2,1,0}, /*index=3*/f32[4,16]{1,0}) parameter(0)
  %x = bf16[32,8]{1,0:T(8,128)(2,1)} get-tuple-element(%p), index=1
  %w = bf16[4,8,6]{2,1,0} get-tuple-element(%p), index=2
  %v = f32[4,16]{1,0} get-tuple-element(%p), index=3
  %ragged-dot-none.2 = f32[32,6]{1,0} custom-call(%n, /*index=1*/%x, %w), target="tpu_custom_call"
  %ag-start = (bf16[32,8], bf16[128,8]) all-gather-start(%x), replica_groups=mesh['data'=2,'expert'=4] {'expert'}
  %ag-done = bf16[128,8]{1,0} all-gather-done(%ag-start)
  %rs = f32[16]{0} fusion(%v), kind=kCustom, calls=%all-reduce-scatter.1
  ROOT %out = (s32[], bf16[32,8], bf16[4,8,6], f32[4,16]) tuple(%i, %x, %w, %v)
}

%condition (p.1: (s32[], bf16[32,8], bf16[4,8,6], f32[4,16])) -> pred[] {
  %limit = s32[]{:T(128)} constant(3)
  %p.1 = (s32[]{:T(128)}, bf16[32,8]{1,0}, bf16[4,8,6]{2,1,0}, f32[4,16]{1,0}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%p.1), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i.1, %limit), direction=LT
}

ENTRY %main (x.1: bf16[32,8]) -> s32[] {
  %x.1 = bf16[32,8]{1,0} parameter(0)
  %c = bf16[32,6]{1,0} parameter(1)
  %peak = s32[]{:T(128)} parameter(2)
  %while.1 = (s32[], bf16[32,8], bf16[4,8,6], f32[4,16]) while(%t), condition=%condition, body=%body
  %router = f32[8,6]{1,0} convolution(%x.1, %c), dim_labels=fb_io->bf
  %l = bf16[4,8,32]{2,1,0} parameter(3)
  %r = bf16[4,32,6]{2,1,0} parameter(4)
  %each = bf16[4,8,6]{2,1,0} convolution(%l, %r), window={size=4 stride=3 lhs_dilate=4}, dim_labels=0bf_0io->0bf
  ROOT %verdict = s32[]{:T(128)} all-reduce(%peak), replica_groups=[1,8]<=[8], to_apply=%add
}
"""


def test_loops_and_fusions_are_followed() -> None:
    program = Program.parse(HLO)
    assert program.entry == "main"
    assert program.runs["body"] == program.runs["all-reduce-scatter.1"] == 3
    assert program.runs["main"] == 1


def test_products_are_those_of_the_kernels_and_dense_ones() -> None:
    dense = 2 * 32 * 8 * 6 + 2 * 4 * 32 * 8 * 6  # the router's, and one for each of four groups
    assert Program.parse(HLO).products() == [
        Product("dense", 2, dense),
        Product("ragged-dot-none", 3, 3 * 2 * 32 * 8 * 6),
    ]


def test_collectives_are_counted_and_weighed() -> None:
    found = {kind: traffic for kind, traffic in Program.parse(HLO).collectives(8).items() if traffic.written}
    assert found == {
        "all-gather": Traffic(1, 3, 3 * 3 * 32 * 8 * 2),  # three others' bf16 rows, three times
        "reduce-scatter": Traffic(1, 3, 3 * 3 * 16 * 4),
        "all-reduce": Traffic(1, 1, round(2 * 4 * 7 / 8)),
    }


def test_a_loop_of_unknown_length_counts_once() -> None:
    assert Program.parse(HLO.replace("constant(3)", "parameter(1)")).runs["body"] == 1


def test_ideal_flops_are_nine_products_on_every_row() -> None:
    """Against XLA's own count of the dense equivalent: one expert, forward and backward."""
    model = Model(width=8, expert_width=16)

    def expert(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return (((x @ gate) * (x @ up)) @ down).sum()

    def shape(*dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, "float32")

    lowered = jax.jit(jax.value_and_grad(expert, argnums=(0, 1, 2, 3))).lower(
        shape(64, 8), shape(8, 16), shape(8, 16), shape(16, 8)
    )
    elementwise = 64 * 16 * 4  # hidden units and their gradients, at most
    assert 0 <= lowered.cost_analysis()["flops"] - 9 * model.product_flops(64) <= elementwise + 64 * 8


def row(role: str, **values: Any) -> dict[str, Any]:
    reduces = {"all-reduce": {"written": values.pop("reduces", 1), "runs": 1, "bytes": 0}}
    sizes = dict.fromkeys(("argument", "output", "alias", "temp", "peak"), 2**30)
    base = {"part": "step", "factor": 1.25, "role": role, "slots": 8, "chunks": 2, "buffer_rows": 8, "seconds": 1.0}
    flops = {"ideal_flops": 100, "flops": 101, "flops_outside_kernels": 1}
    return base | sizes | flops | {"collectives": reduces, "products": [{"kernel": "gmm", "runs": 9}]} | values


def figures(*rows: dict[str, Any]) -> dict[str, Any]:
    return {
        "device_kind": "TPU",
        "mesh": {"data": 1, "expert": 4},
        "balanced": 8,
        "dropless": 32,
        "programs": list(rows),
    }


@pytest.mark.parametrize(
    ("changed", "missed"),
    [({}, 0), ({"peak": 2**30 + 2**21}, 1), ({"reduces": 3}, 1), ({"flops_outside_kernels": 30}, 1)],
)
def test_a_missed_target_is_told(changed: dict[str, Any], missed: int) -> None:
    found = figures(row("capped", **{"reduces": 2, **changed}), row("fallback", peak=2**20), row("plain"), row("kept"))
    lines = "\n".join(aot_table.claims(found))
    assert lines.count("MISSED") == missed
    assert lines.count(": met") == 4 - missed


def test_a_fallback_that_needs_more_is_told() -> None:
    lines = "\n".join(aot_table.claims(figures(row("capped"), row("fallback", peak=2**30 + 1))))
    assert "MISSED" in lines


def test_the_table_has_every_program_and_column() -> None:
    rows = (row("capped"), row("fallback"), {**row("plain"), "error": "needs 99.0G of 15.75G"})
    lines = aot_table.table("v5p:2x2x1", figures(*rows))
    assert lines[0] == "v5p:2x2x1, TPU (data=1 x expert=4), balanced 8 rows, dropless 32"
    assert " ".join(lines[5].split()) == "step, factor 1.25, retry armed 8 1024 1024 1024 1024 1024 0 1.01 0.0 1 0 1"
    assert lines[7].split()[-3:] == ["99.0G", "of", "15.75G"]
    assert lines[9:] == [f"{aot_table.label(r)}: 9 x gmm; 1 x all-reduce (0.0 MiB)" for r in rows[:2]]


def test_the_compilers_word_on_a_shortage_is_one_line() -> None:
    told = (
        "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
        "temporaries (126.88G) exceeds available HBM (95.73G).\nHLO module: jit_forward_backward."
    )
    assert aot.shortage(told) == "needs 126.88G of 95.73G"
    assert aot.shortage("INTERNAL: a\n  b") == "INTERNAL: a b"


def test_without_libtpu_one_line_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert aot.main([]) == 3
    assert capsys.readouterr().err == f"{aot.NO_LIBTPU}\n"
    assert "pip install 'moe-blocks[tpu]'" in aot.NO_LIBTPU


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--width", "0"], "width must be an integer of at least 1, got 0"),
        (["--factor", "0"], "factor must be a finite number above 0, got 0.0"),
        (["--json", "gone/figures.json"], "json must be a file in a folder that is there"),
        (["--part", "all"], "argument --part: invalid choice: 'all'"),
        (["--colour", "red"], "'--colour' is not an option"),
        (["--topology", "h100:no"], "topology must be one that a compiler knows, such as v5p:2x2x1 (libtpu)"),
    ],
)
def test_bad_arguments_are_one_line(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    assert aot.main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("benchmarks.aot: error: ")
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu, the TPU compiler, is not installed")
def test_a_small_block_compiles_for_a_tpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    sizes = {"width": 256, "expert-width": 256, "experts": 8, "experts-per-tok": 2, "tokens": 256}
    words = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    assert aot.main(["--topology", "v5e:2x2", "--part", "block", "--json", str(file), *words]) == 0
    [found] = json.loads(file.read_text())["topologies"].values()
    assert found["mesh"] == {"data": 1, "expert": 4}
    by_role = {row["role"]: row for row in found["programs"]}
    assert set(by_role) == {"capped", "fallback", "dropless"}
    kernels = {p["kernel"]: p["runs"] for p in by_role["capped"]["products"]}
    assert kernels["ragged-dot-none"] >= 6  # forward, and the gradients of the rows, whatever libtpu
    assert "block, factor 1.25" in capsys.readouterr().out
