"""The figures of ``benchmarks.policies`` as text for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.output import aligned

# DeepSeek-V3 671B on 256 TPU chips, AI-Hypercomputer/maxtext#5080: loss at step 86, tokens per second and device.
PUBLISHED = {
    "dropless": {"loss": 3.473, "tokens_per_second": 631.26},
    "factor 2, drop": {"loss": 3.481, "tokens_per_second": 653.55},
    "factor 2, retry": {"loss": 3.468, "tokens_per_second": 653.84},
    "factor 0.125, drop": {"loss": 5.271, "tokens_per_second": 949.74},
    "factor 0.125, retry": {"loss": 3.477, "tokens_per_second": 391.64},
}
COLUMNS = (
    ("final", "loss"),
    ("valid.", "loss"),
    ("rel.", "speed"),
    ("last", "half"),
    ("", "retries"),
    ("over-", "flows"),
    ("", "dropped"),
    ("final", "factor"),
    ("prog-", "rams"),
    ("MaxText", "loss"),
    ("MaxText", "rel. speed"),
)
SAME, ARMED, ADAPTIVE = 1e-6, 0.01, 0.97  # what the comparison is meant to show


def render(figures: Mapping[str, Any]) -> str:
    """The whole report: conditions, table, and what it shows."""
    where, config = figures["environment"], figures["config"]
    conditions = ", ".join(f"{name} {value}" for name, value in config.items())
    versions = ", ".join(f"{name} {where[name]}" for name in ("python", "jax", "flax"))
    mesh = " x ".join(f"{axis}={size}" for axis, size in where["mesh"].items())
    return "\n".join(
        (
            f"{conditions}",
            f"{where['devices']} ({mesh}), {where['cores']} cores, {versions}, {where['date']}, "
            f"{figures['seconds']:.0f} s",
            "",
            *_table(figures["variants"]),
            "",
            "Losses in nats per byte: training, mean of the last quarter of the steps; validation, dropless. "
            f"The unigram entropy is {figures['unigram_loss']:.3f}.",
            "Speed relative to dropless: median over blocks of steps, over the whole run and over its last half. "
            f"Here dropless is a factor of {figures['dropless_factor']:.4g}.",
            "MaxText: DeepSeek-V3 671B on 256 TPU chips, AI-Hypercomputer/maxtext#5080. There a smaller buffer also "
            "saves time.",
            "",
            *claims(figures),
        )
    )


def claims(figures: Mapping[str, Any]) -> list[str]:
    """What the comparison is meant to show, each with what it did show."""
    variants, lines = figures["variants"], []
    for name, found in figures["same_state"].items():
        loss, grad = (max(entry[key] for entry in found) for key in ("loss", "grad_norm"))
        wanted = f"target {SAME:g}: {_met(loss <= SAME)}" if "retry" in name else "the drop must differ"
        lines.append(
            f"{name}: at the same state as dropless, in {len(found)} steps, the loss differs by at most {loss:.1e} "
            f"({wanted}), the gradient norm by {grad:.1e}"
        )
    drop, base = (variants[name]["validation_loss"] for name in ("factor 0.125, drop", "dropless"))
    lines.append(f"drop at factor 0.125 is worse than dropless by {drop - base:+.3f} nats per byte of validation text")
    whats = {"armed": "retry armed at factor 2", "control": "the same plain loop again (no difference but noise)"}
    clocks = {"wall": "time per step", "cpu": "processor time"}
    for name, by_clock in figures["overhead"].items():
        for clock, found in by_clock.items():
            lower, upper = found["quartiles"]
            wanted = f"; target {ARMED:.0%}: {_met(found['median'] <= ARMED)}" if name == "armed" else ""
            lines.append(
                f"{whats[name]} against a plain donated jit loop: {found['median']:+.2%} {clocks[clock]} (quartiles "
                f"{lower:+.2%} to {upper:+.2%}, {found['rounds']} rounds{wanted})"
            )
    speed = variants["adaptive from 0.125"]["throughput_last_half"]
    if speed is not None:
        met = _met(speed >= ADAPTIVE)
        lines.append(f"adaptive grow over its last half: {speed:.3f} x dropless speed (target {ADAPTIVE}: {met})")
    return lines


def _table(variants: Mapping[str, Mapping[str, Any]]) -> list[str]:
    body = [_row(name, row) for name, row in variants.items()]
    heads = [["", *(column[i] for column in COLUMNS)] for i in (0, 1)]
    return aligned(heads, body)


def _row(name: str, row: Mapping[str, Any]) -> list[str]:
    published = PUBLISHED.get(name)
    return [
        name,
        f"{row['final_loss']:.3f}",
        f"{row['validation_loss']:.3f}",
        _ratio(row["throughput"]),
        _ratio(row["throughput_last_half"]),
        f"{row['retries']}",
        f"{row['overflows']}",
        f"{row['dropped']:.1%}",
        f"{row['final_factor']:.4g}",
        f"{row['executables']}",
        "-" if published is None else f"{published['loss']:.3f}",
        "-"
        if published is None
        else f"{published['tokens_per_second'] / PUBLISHED['dropless']['tokens_per_second']:.3f}",
    ]


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _met(holds: bool) -> str:
    return "met" if holds else "MISSED"
