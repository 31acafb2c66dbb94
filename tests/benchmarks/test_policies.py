from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

from benchmarks import race, table
from benchmarks.policies import QUICK, main
from moe_blocks import Capacity, CapacitySpec
from policies import RetryDropless, StepRunner

ROOT = Path(__file__).parents[2]
STEPS = int(QUICK["steps"])


class Quick(NamedTuple):
    code: int
    out: str
    figures: dict[str, Any]


@pytest.mark.timeout(600)  # many programs to compile
def test_the_quick_run_shows_what_the_experiment_shows(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """One run for all checks: it compiles a dozen programs."""
    file = tmp_path / "figures.json"
    code = main(["--quick", "--json", str(file), "--data", str(ROOT / "LICENSE")])
    quick = Quick(code, capsys.readouterr().out, json.loads(file.read_text()))
    check_the_table(quick)
    check_what_the_policies_did(quick)
    check_a_retry_equals_dropless_and_a_drop_does_not(quick)


def check_the_table(quick: Quick) -> None:
    """Every variant and column is there."""
    assert quick.code == 0
    assert list(quick.figures["variants"]) == list(race.VARIANTS)
    for name, row in quick.figures["variants"].items():
        [line] = [line for line in quick.out.splitlines() if line.startswith(f"{name}  ")]
        cells = re.split(r" {2,}", line)
        assert len(cells) == len(table.COLUMNS) + 1
        assert cells[1:3] == [f"{row['final_loss']:.3f}", f"{row['validation_loss']:.3f}"]
        assert "-" not in cells[3:5]  # both speeds were measured
    assert [row["tokens_per_second"] for row in quick.figures["published"].values()][::3] == [631.26, 949.74]
    assert "AI-Hypercomputer/maxtext#5080" in quick.out


def check_what_the_policies_did(quick: Quick) -> None:
    rows = quick.figures["variants"]
    assert {name: len(row["losses"]) for name, row in rows.items()} == dict.fromkeys(rows, STEPS)
    assert {name: row["final_factor"] for name, row in rows.items() if name.startswith("factor")} == {
        "factor 2, drop": 2, "factor 2, retry": 2, "factor 2, layer retry": 2,
        "factor 0.125, drop": 0.125, "factor 0.125, retry": 0.125, "factor 0.125, layer retry": 0.125,
    }  # fmt: skip
    assert rows["adaptive from 0.125"]["final_factor"] > 0.125
    assert rows["factor 0.125, retry"]["retries"] == STEPS
    layer = rows["factor 0.125, layer retry"]
    assert (layer["overflows"], layer["retries"], layer["executables"]) == (STEPS, 0, 1)
    assert 1 <= rows["adaptive from 0.125"]["retries"] <= 5  # at most one for each rung above the first
    assert rows["factor 0.125, drop"]["overflows"] == STEPS
    for name, row in rows.items():
        assert (row["dropped"] > 0) is ("drop" in name.split(", ")), name
        assert row["executables"] <= (2 if "retry" in name else 6 if "adaptive" in name else 1), name


def check_a_retry_equals_dropless_and_a_drop_does_not(quick: Quick) -> None:
    found = quick.figures["same_state"]
    worst = {name: max(entry["loss"] for entry in entries) for name, entries in found.items()}
    assert worst["factor 2, retry"] <= 1e-6
    assert worst["factor 0.125, retry"] <= 1e-6
    assert worst["factor 0.125, layer retry"] <= 1e-6
    assert worst["factor 0.125, drop"] > 1e-3  # the same comparison does see a difference where there is one
    rows = quick.figures["variants"]
    # Eight steps one after the other: their roundings add up.
    for name in ("factor 2, retry", "factor 0.125, retry", "factor 0.125, layer retry", "adaptive from 0.125"):
        assert rows[name]["losses"] == pytest.approx(rows["dropless"]["losses"], rel=1e-5)
    assert rows["factor 0.125, drop"]["validation_loss"] > rows["dropless"]["validation_loss"] + 0.02


SPEC = CapacitySpec(tokens_per_rank=4, num_experts=4, num_experts_per_tok=1, ep_size=4, multiple_of=1)


def toy_step(state: jax.Array, batch: jax.Array, *, capacity: Capacity) -> tuple[jax.Array, jax.Array, dict[str, Any]]:
    return state + batch.sum(), batch.max(keepdims=True), {}


@pytest.mark.parametrize(("demand", "rounds"), [(3, 5), (9, 0)])
def test_rounds_with_a_retry_are_no_measure_of_the_overhead(demand: int, rounds: int) -> None:
    policy = RetryDropless(factor=1.0)
    found = race.measure_overhead(
        toy_step,
        {"armed": StepRunner(toy_step, policy, SPEC)},
        jnp.int32(0),
        [jnp.array([1, demand], jnp.int32)] * 2,
        capacity=policy.capacity(policy.init(SPEC)),
        rounds=5,
    )
    expected = {"wall": rounds, "cpu": rounds} if rounds else {}
    assert {name: {clock: o.rounds for clock, o in by.items()} for name, by in found.items()} == {
        "armed": expected,
        "control": {"wall": 5, "cpu": 5},
    }


@pytest.mark.parametrize(
    ("median", "speed", "loss", "missed"),
    [(0.005, 0.98, 1e-7, 0), (0.02, 0.98, 1e-7, 1), (0.005, 0.9, 1e-7, 1), (0.005, 0.98, 1e-5, 1)],
)
def test_a_missed_target_is_told(median: float, speed: float, loss: float, missed: int) -> None:
    overhead = race.Overhead(median, (median, median), 9)._asdict()
    figures = {
        "variants": {
            "dropless": {"validation_loss": 1.0},
            "factor 0.125, drop": {"validation_loss": 1.5},
            "adaptive from 0.125": {"throughput_last_half": speed},
        },
        "same_state": {"factor 2, retry": [{"loss": 0.0, "grad_norm": 0.0}, {"loss": loss, "grad_norm": 0.0}]},
        "overhead": {"armed": {"wall": overhead}, "control": {"wall": overhead}},
    }
    lines = "\n".join(table.claims(figures))
    assert lines.count("MISSED") == missed
    assert lines.count(": met") == 3 - missed
    assert "worse than dropless by +0.500" in lines


def test_the_median_leaves_out_blocks_that_compiled() -> None:
    baseline = SimpleNamespace(seconds=[None, 2.0, 4.0, 8.0])
    variant = SimpleNamespace(seconds=[1.0, 1.0, 2.0, None])
    assert race.relative_throughput(variant, baseline) == 2.0  # type: ignore[arg-type]
    slower = SimpleNamespace(seconds=[1.0, 1.0, 8.0, 16.0])
    assert race.relative_throughput(slower, baseline, last_half=True) == 0.5  # type: ignore[arg-type]
    assert race.relative_throughput(SimpleNamespace(seconds=[None] * 4), baseline) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "0"], "steps must be an integer of at least 1, got 0"),
        (["--policy.factor", "2"], r"the benchmark chooses \['policy'\] itself"),
        (["--json", "gone/figures.json"], "json must be a file in a folder that is there"),
        (["quick"], "'quick' is not an option"),
        (["batch_size=9"], "gives 9 sequences at once, which the 8 devices cannot share"),
    ],
)
def test_bad_arguments_are_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--data", str(ROOT / "LICENSE")]) == 2
    assert re.fullmatch(rf"benchmarks.policies: error: .*{message}.*\n", capsys.readouterr().err)
