"""The end of a run: a table for the terminal and a figure."""

from __future__ import annotations

import itertools
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # draws to a file, needs no display

import matplotlib.pyplot as plt
import numpy as np

from examples.train_lm.loop import Result, tokens_per_second
from examples.train_lm.train import Training
from policies import from_config

LAST = 10  # steps that the final training loss is the mean of
BLUE, ORANGE, RED, GREY = "#2a6fbb", "#e08214", "#c0392b", "#777777"


def table(training: Training, result: Result, unigram: float) -> str:
    """The run in a few lines."""
    records, spec = result.records, training.spec
    rows = {
        "policy": repr(from_config(training.config.policy)),
        "steps": f"{len(records)} of {training.config.steps}",
        "compile time": f"{result.compile_seconds:.0f} s, {result.executables} programs",
    }
    if records:
        last = records[-LAST:]
        validation = "not evaluated" if result.validation_loss is None else f"{result.validation_loss:.3f} nats/byte"
        factor = spec.factor
        rows |= {
            "time": f"{sum(r.seconds for r in records):.0f} s",
            "throughput": f"{tokens_per_second(training, records):,.0f} tokens/s",
            "training loss": f"{np.mean([r.loss for r in last]):.3f} nats/byte, mean of the last {len(last)} steps",
            "validation loss": validation,
            "unigram entropy": f"{unigram:.3f} nats/byte, what byte frequencies alone reach",
            "demand": f"at most {factor(max(r.demand for r in records)):.2f} x balanced, "
            f"at the end {factor(records[-1].demand):.2f}",
            "capacity": f"at first {factor(records[0].slots):.4g} x balanced, at the end "
            f"{factor(records[-1].slots):.4g}; dropless is {factor(spec.dropless):.4g}",
            "overflows": f"{sum(r.overflow for r in records)} steps, the last one at step "
            f"{max((r.step for r in records if r.overflow), default='-')}",
            "retries": f"{sum(r.retries for r in records)}",
            "dropped": f"{np.mean([r.dropped for r in records]):.2%} of all assignments",
        }
    width = max(map(len, rows))
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows.items())


def figure(training: Training, result: Result, unigram: float, path: Path) -> None:
    """Draws loss, demand against capacity, and retries over steps."""
    records, factor = result.records, training.spec.factor
    steps = [record.step for record in records]
    fig, (top, middle, bottom) = plt.subplots(
        3, 1, figsize=(8, 8), sharex=True, height_ratios=(3, 3, 1.5), layout="constrained"
    )
    top.plot(steps, [record.loss for record in records], color=BLUE, label="training")
    top.axhline(unigram, color=GREY, linestyle="--", label=f"unigram entropy, {unigram:.2f}")
    if result.validation_loss is not None:
        label = f"validation, {result.validation_loss:.2f}"
        top.plot(steps[-1], result.validation_loss, "D", color=ORANGE, label=label, clip_on=False, zorder=3)
    top.set_ylabel("loss, nats per byte")
    top.set_title(repr(from_config(training.config.policy)))

    overflown = [record for record in records if record.overflow]
    middle.plot(steps, [factor(record.demand) for record in records], color=BLUE, label="demand, the fullest buffer")
    middle.step(steps, [factor(record.slots) for record in records], where="mid", color=ORANGE, label="capacity")
    middle.plot(
        [record.step for record in overflown],
        [factor(record.demand) for record in overflown],
        "o",
        color=RED,
        markersize=4,
        label=f"overflow ({len(overflown)} steps)",
    )
    middle.axhline(factor(training.spec.dropless), color=GREY, linestyle="--", label="dropless")
    middle.set_ylim(bottom=0)
    middle.set_ylabel("multiples of balanced")

    bottom.step(
        steps,
        list(itertools.accumulate(record.retries for record in records)),
        where="mid",
        color=RED,
        label="retries so far",
    )
    bottom.set_ylim(bottom=0)
    bottom.yaxis.get_major_locator().set_params(integer=True)
    bottom.set_ylabel("retries")
    bottom.set_xlabel("step")
    for axes in (top, middle, bottom):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize="small")
    fig.savefig(path, dpi=120)
    plt.close(fig)
