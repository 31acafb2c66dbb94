from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import routings
from benchmarks.layer import QUICK_SHAPES, main
from benchmarks.peers import report, rounds
from benchmarks.peers.compiled import BOTH, FORWARD, Compiled
from benchmarks.peers.ours import capped, dropless
from benchmarks.peers.problem import (
    Problem,
    Shape,
    chosen,
    differences,
    draw,
    first_come,
    keep_all,
    keep_by_position,
    keep_per_sequence,
    per_sequence_slots,
    solve,
)
from benchmarks.peers.protocol import Peer, PeerError

SHAPE = Shape(tokens=24, width=12, expert_width=10, experts=6, k=2)
# Relative to the largest entry. The inputs are O(1) and the sums short: a few units in the last place.
TOLERANCE = 2e-6


# --- routings


@pytest.mark.parametrize(("experts", "k"), [(8, 2), (64, 6), (5, 3)])
def test_balanced_gives_each_sequence_equal_loads(experts: int, k: int) -> None:
    ids = routings.choose(routings.balanced(np.random.default_rng(0), 3, 64, experts, k), k)
    for sequence in ids:
        loads = np.bincount(sequence.ravel(), minlength=experts)
        assert loads.max() - loads.min() <= (64 * k % experts > 0)
    assert (np.diff(np.sort(ids, -1)) > 0).all()  # distinct


def test_zipf_falls_by_rank() -> None:
    [ids] = routings.choose(routings.zipf(np.random.default_rng(0), 1, 8000, 16, 1), 1)[None]
    loads = np.sort(np.bincount(ids.ravel(), minlength=16))[::-1]
    expected = 1 / np.arange(1, 17)
    np.testing.assert_allclose(loads / loads.sum(), expected / expected.sum(), atol=0.02)  # 3 sigma is 0.017


def test_trained_is_unequal_and_repeats_itself() -> None:
    def drawn(name: str) -> np.ndarray:
        return routings.choose(routings.ROUTINGS[name](np.random.default_rng(0), 2, 1024, 32, 4), 4)

    assert 1.3 < routings.imbalance(drawn("trained"), 32) < 4 < routings.imbalance(drawn("zipf"), 32)
    assert routings.repetition(drawn("trained")) > 2 * routings.repetition(drawn("balanced"))
    assert routings.repetition(drawn("balanced")) == pytest.approx(4 / 32, abs=0.02)  # what chance gives


@pytest.mark.parametrize("routing", list(routings.ROUTINGS))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_inputs_make_the_router_choose(routing: str, dtype: str) -> None:
    problem = draw(SHAPE, routing=routing, dtype=dtype, seed=3)
    logits = routings.ROUTINGS[routing](np.random.default_rng(3), *SHAPE.input_shape[:2], SHAPE.experts, SHAPE.k)
    np.testing.assert_array_equal(chosen(problem), routings.choose(logits, SHAPE.k))
    ordered = np.sort(problem.x @ problem.params["gate"], -1)
    gap = ordered[..., -SHAPE.k] - ordered[..., -SHAPE.k - 1]
    assert gap.min() > 0.8 * routings.MARGIN  # far from where rounding decides


def test_a_narrow_layer_cannot_hold_the_routing() -> None:
    with pytest.raises(ValueError, match="width must be at least the number of experts, 6, got 4"):
        draw(Shape(8, 4, 4, 6, 2))


# --- the oracle


@pytest.mark.parametrize("routing", list(routings.ROUTINGS))
def test_the_oracle_agrees_with_the_block(routing: str) -> None:
    problem = draw(SHAPE, routing=routing)
    found = differences(dropless(problem).results(), solve(problem, keep_all(chosen(problem))))
    assert set(found) == {"output", "x", "gate", "wi_0", "wi_1", "wo"}
    assert max(found.values()) < TOLERANCE


@pytest.mark.parametrize("scope", ["expert", "rank"])
def test_the_oracle_drops_what_the_block_drops(scope: str) -> None:
    contestant = capped(draw(SHAPE, routing="zipf"), 0.5, scope)
    assert rounds.check([contestant])[contestant.name]["gradients"] < TOLERANCE
    assert 0 < rounds.check([contestant])[contestant.name]["dropped"] <= 0.6
    contestant.keep = keep_all  # the same comparison does see a drop that the oracle does not make
    assert rounds.check([contestant])[contestant.name]["output"] > 0.1


def test_the_gradients_are_those_of_central_differences() -> None:
    """The oracle is what all are held to, so it is held to its own output."""
    shape = Shape(6, 5, 4, 4, 2)
    problem, rng = draw(shape), np.random.default_rng(1)
    kept = keep_by_position(3, per_expert=True)(chosen(problem))
    solved = solve(problem, kept)

    def value(name: str, step: np.ndarray) -> float:
        moved = {"x": problem.x, **problem.params}
        moved[name] = moved[name].astype(np.float64) + step
        x = moved.pop("x")
        return float(
            (solve(Problem(shape, "float32", moved, x, problem.cotangent), kept)["output"] * problem.cotangent).sum()
        )

    for name in ("x", "gate", "wi_0", "wi_1", "wo"):
        step = 1e-5 * rng.normal(size=solved[name].shape)
        slope = (value(name, step) - value(name, -step)) / 2
        assert slope == pytest.approx(float((solved[name] * step).sum()), rel=1e-6), name


def test_who_finds_a_slot() -> None:
    ids = np.array([[[0, 1], [0, 2]], [[0, 2], [1, 0]]])  # [sequence, position, choice]
    kept = keep_by_position(2, per_expert=True)(ids)
    assert kept.tolist() == [[[True, True], [False, True]], [[True, True], [True, False]]]
    kept = keep_by_position(5, per_expert=False)(ids)
    assert kept.tolist() == [[[True, True], [True, False]], [[True, True], [False, False]]]
    kept = keep_per_sequence(1)(ids)
    assert kept.tolist() == [[[True, True], [False, True]], [[True, True], [True, False]]]
    assert first_come(np.array([3, 3, 3]), 3).all()
    assert per_sequence_slots(Shape(4096, 512, 256, 64, 6), 1.25) == 120


# --- rounds and tables


def timed(name: str, seconds: float, calls: list[str]) -> Any:
    def time(mode: str) -> float:
        calls.append(f"{name} {mode}")
        return seconds

    return SimpleNamespace(name=name, time=time)


def test_contestants_take_turns_and_slow_ones_fewer() -> None:
    calls: list[str] = []
    found = rounds.measure([timed("limit", 1, calls), timed("slow", 25, calls)], rounds=4, modes=["m"])
    assert found == {"limit": {"m": [1, 1, 1, 1]}, "slow": {"m": [25, None, None, 25]}}
    assert calls[4:] == ["limit m", "slow m", "limit m", "limit m", "slow m", "limit m"]
    assert rounds.ratios(found["slow"]["m"], found["limit"]["m"]) == [25, 25]


def figures(dropless: float, full: float) -> dict[str, Any]:
    def row(seconds: float) -> dict[str, Any]:
        return {"base": "limit", "seconds": {mode: [seconds] * 3 for mode in (FORWARD, BOTH)}, "check": None}

    rows = {"limit": row(1), report.OURS: row(dropless), report.AGAIN: row(dropless), report.FULL: row(full)}
    return {
        "title": "A",
        "shape": "A",
        "rounds": 3,
        "versions": {},
        "skipped": {"torch": "how to get it"},
        "rows": rows,
    }


@pytest.mark.parametrize(("dropless", "full", "missed"), [(1.1, 1.1, 0), (1.13, 1.13, 1), (1.2, 1.2, 2), (1.1, 1.2, 1)])
def test_a_missed_target_is_told(dropless: float, full: float, missed: int) -> None:
    text = report.race(figures(dropless, full), {"dtype": "float32", "quick": False})
    assert text.count("MISSED") == missed
    assert text.count(": met") == 3 - missed
    assert "torch: skipped, how to get it" in text


def test_a_shape_for_an_accelerator_has_no_target_of_a_cpu() -> None:
    text = report.race(figures(9, 1) | {"shape": "rank"}, {"dtype": "bfloat16", "quick": False})
    assert "over the limit" not in text and "the noise" in text


def test_the_bound_on_memory_is_told() -> None:
    def row(temp: int) -> dict[str, Any]:
        used = {"temp_bytes": temp, "largest_bytes": 1, "flops": 1.0}
        shape = {"tokens": 10, "width": 5, "expert_width": 7, "experts": 2, "k": 2}
        return {"shape": shape, "itemsize": 4, "layer": used, "limit": used | {"temp_bytes": 1000}}

    text = report.memory({"title": "A", "rows": [row(1700), row(1701)]}, {})
    assert [line.split()[6] for line in text.splitlines()[-2:]] == ["met", "MISSED"]  # 1.3 * 1000 + 10 * 2 * 5 * 4


# --- peers in processes of their own


def test_a_peer_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="No such file or directory"):
        Peer(str(tmp_path / "python"), "benchmarks.peers.hugging_face")
    with pytest.raises(PeerError, match="ended with code 1: .*No module named"):
        Peer(sys.executable, "benchmarks.peers.nobody")


# --- the command


@pytest.mark.timeout(600)  # many programs to compile
def test_the_quick_run_holds_everyone_to_the_oracle(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "figures.json"
    words = ["--quick", "--shapes", "A", "--rounds", "1", "--tables", "race,memory", "--json", str(file)]
    monkeypatch.setattr("benchmarks.layer.FACTORS", {"expert": (1.0, 0.5), "rank": (0.5,)})
    monkeypatch.setattr("benchmarks.layer.QUICK_EXPERTS", (4,))
    monkeypatch.setattr("benchmarks.layer.QUICK_TOKENS", (8,))
    assert main([*words, "--torch-python", str(tmp_path / "python")]) == 0
    out, found = capsys.readouterr().out, json.loads(file.read_text())
    [race], [memory] = found["tables"]["race"], found["tables"]["memory"]
    for name, row in race["rows"].items():
        assert row["check"]["output"] < TOLERANCE, name
        assert row["check"]["gradients"] < TOLERANCE, name
        assert (row["check"]["dropped"] > 0) is name.endswith(" 0.5"), name
        assert re.search(rf"^{re.escape(name)}  .* 1  ", out, re.MULTILINE), name
    assert {"limit", report.OURS, "moe_blocks ragged_dot", "gshard 1.25"} < set(race["rows"])
    [told] = [line for line in out.splitlines() if line.startswith("hugging_face: skipped")]
    assert "No such file or directory; to install it: python -m venv DIR && DIR/bin/pip install torch" in told
    assert len(memory["rows"]) == 4
    assert all(row["layer"]["temp_bytes"] > 0 for row in memory["rows"])


def test_a_contestant_returns_the_gradients_of_its_cotangent() -> None:
    shape = QUICK_SHAPES["A"]
    problem = draw(shape)
    doubled = Problem(shape, problem.dtype, problem.params, problem.x, 2 * problem.cotangent)
    once, twice = (
        Compiled("x", lambda params, x: x * params["wi_0"].sum(), p, leaves=["wi_0"]).results()
        for p in (problem, doubled)
    )
    np.testing.assert_array_equal(twice["x"], 2 * once["x"])
    np.testing.assert_array_equal(once["x"], once["x"].flat[0] / problem.cotangent.flat[0] * problem.cotangent)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tables", "race,pace"], r"\['pace'\] is not among race, skew, scaling, memory"),
        (["--peers", "nobody"], r"\['nobody'\] is not among ragged_dot, gshard"),
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["--dtype", "float16"], "invalid choice: 'float16'"),
        (["--json", "gone/figures.json"], "json must be a file in a folder that is there"),
    ],
)
def test_bad_arguments_are_told(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert re.search(rf"benchmarks.layer: error: .*{message}", capsys.readouterr().err)
