"""The figures of ``benchmarks.aot`` as text for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.output import aligned

Figures = Mapping[str, Any]
MIB = 2**20
PACKAGES = ("optax", "libtpu", "jax-cuda12-plugin")  # whose versions matter beside those of jax and flax
COLUMNS = (
    ("buffer", "rows"),
    ("argu-", "ments"),
    ("", "output"),
    ("", "alias"),
    ("", "temp"),
    ("", "peak"),
    ("GFLOP", "experts"),
    ("x the", "ideal"),
    ("GFLOP", "outside"),
    ("all-", "reduces"),
    ("MiB", "moved"),
    ("seconds", "to compile"),
)
ROLES = {
    ("block", "capped"): "block, factor {factor:g}",
    ("block", "fallback"): "block, dropless in {chunks} chunks",
    ("block", "layer"): "block, factor {factor:g}, in turns",
    ("block", "dropless"): "block, dropless",
    ("step", "capped"): "step, factor {factor:g}, retry armed",
    ("step", "fallback"): "step, dropless in {chunks} chunks",
    ("step", "layer"): "step, factor {factor:g}, in turns",
    ("step", "plain"): "step, factor {factor:g}, plain",
    ("step", "kept"): "step, factor {factor:g}, state kept",
}
# What the figures are meant to show: peak over that of the plain donated step, and FLOPs outside the kernels as a share
# of the experts' (the router has some).
SAME_PEAK, OUTSIDE = 1.001, 0.05


def conditions(figures: Figures) -> str:
    """The lines that every table depends on."""
    where, model = figures["environment"], figures["model"]
    versions = ", ".join(f"{name} {where[name]}" for name in ("python", "jax", "flax", *PACKAGES) if name in where)
    return (
        f"D={model['width']}, F={model['expert_width']}, E={model['experts']}, k={model['experts_per_tok']}, "
        f"T={model['tokens']} on a device, {model['layers']} layers in a step, {model['dtype']} with parameters in "
        f"{model['param_dtype']}, {model['implementation']}, {model['collective']}\n"
        f"{where['date']}, compiled on {where['cores']} cores, {versions}"
    )


def table(name: str, found: Figures) -> list[str]:
    """One topology. Bytes in MiB; all of one device."""
    mesh = " x ".join(f"{axis}={size}" for axis, size in found["mesh"].items())
    body = [[label(row), *_cells(row)] for row in found["programs"]]
    heads = [["", *(column[i] for column in COLUMNS)] for i in (0, 1)]
    lines = aligned(heads, body)
    for at, row in enumerate(found["programs"], len(lines) - len(body)):
        lines[at] = "  ".join((lines[at], row["error"])) if "error" in row else lines[at]
    title = f"{name}, {found['device_kind']} ({mesh}), balanced {found['balanced']} rows, dropless {found['dropless']}"
    return [title, "", *lines, "", *details(found)]


def label(row: Figures) -> str:
    """What a program is called in the table."""
    return ROLES[row["part"], row["role"]].format(**row)


def _cells(row: Figures) -> list[str]:
    if "error" in row:
        return [f"{row['buffer_rows']}", *["-"] * (len(COLUMNS) - 2), f"{row['seconds']:.0f}"]
    inside = row["flops"] - row["flops_outside_kernels"]
    return [
        f"{row['buffer_rows']}",
        *(f"{row[name] / MIB:.0f}" for name in ("argument", "output", "alias", "temp", "peak")),
        f"{inside / 1e9:.0f}",
        f"{row['flops'] / row['ideal_flops']:.2f}",
        f"{row['flops_outside_kernels'] / 1e9:.1f}",
        f"{_written(row, 'all-reduce')}",
        f"{sum(traffic['bytes'] for traffic in row['collectives'].values()) / MIB:.0f}",
        f"{row['seconds']:.0f}",
    ]


def details(found: Figures) -> list[str]:
    """By which kernels the matrix products of each program run, and what it sends."""
    return [
        "; ".join((f"{label(row)}: {_products(row)}", *_traffic(row)))
        for row in found["programs"]
        if "error" not in row
    ]


def _products(row: Figures) -> str:
    return ", ".join(f"{product['runs']} x {product['kernel']}" for product in row["products"])


def _traffic(row: Figures) -> list[str]:
    return [
        f"{traffic['runs']} x {kind} ({traffic['bytes'] / MIB:.1f} MiB)" for kind, traffic in row["collectives"].items()
    ]


def claims(found: Figures) -> list[str]:
    """What the programs are meant to show, each with what they do show."""
    fitting = [row for row in found["programs"] if "error" not in row]
    lines = []
    if fitting:
        worst = max(fitting, key=lambda row: row["flops_outside_kernels"] / row["ideal_flops"])
        share = worst["flops_outside_kernels"] / worst["ideal_flops"]
        lines.append(
            f"grouped products run in native kernels: FLOPs outside of them are at most {share:.1%} of the experts' "
            f"(target {OUTSIDE:.0%}: {_met(share <= OUTSIDE)})"
        )
    by_role = {(row["part"], row["factor"], row["role"]): row for row in fitting}
    for (part, factor, role), row in by_role.items():
        if role != "capped":
            continue
        if plain := by_role.get((part, factor, "plain")):
            ratio, kept = row["peak"] / plain["peak"], by_role.get((part, factor, "kept"))
            beside = f"; with the state kept {kept['peak'] / plain['peak']:.3f}" if kept else ""
            lines.append(
                f"step, factor {factor:g}: peak with retry armed over that of the plain donated step {ratio:.4f} "
                f"(target {SAME_PEAK}: {_met(ratio <= SAME_PEAK)}){beside}"
            )
            verdicts = _written(row, "all-reduce") - _written(plain, "all-reduce")
            lines.append(
                f"step, factor {factor:g}: all-reduces for the verdict {verdicts} (target 1: {_met(verdicts == 1)})"
            )
        for other, what in (
            ("fallback", "of the fallback in {chunks} chunks"),
            ("layer", "with turns for an overflow"),
        ):
            if instead := by_role.get((part, factor, other)):
                ratio = instead["peak"] / row["peak"]
                lines.append(
                    f"{part}, factor {factor:g}: peak {what.format(**instead)} over the capped one {ratio:.3f}, "
                    f"temporaries {(instead['temp'] - row['temp']) / MIB:+.0f} MiB (target 1: {_met(ratio <= 1)})"
                )
    return lines


def _written(row: Figures, kind: str) -> int:
    return row["collectives"].get(kind, {"written": 0})["written"]


def _met(holds: bool) -> str:
    return "met" if holds else "MISSED"
