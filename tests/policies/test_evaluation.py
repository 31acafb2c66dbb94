from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_blocks.capacity import Capacity
from policies import EvalRunner
from tests.policies import toy

STATE = {"w": jnp.arange(toy.ROWS, dtype=jnp.float32)}


def step(state: Any, batch: Any, *, capacity: Capacity) -> Any:
    kept = jnp.arange(toy.ROWS) < (toy.ROWS if capacity.slots is None else capacity.slots)
    rows = (jnp.arange(toy.ROWS) < batch["demand"]) & kept
    return jnp.asarray(batch["demand"], jnp.int32)[None], {
        "sum": jnp.sum(jnp.where(rows, batch["x"] * state["w"], 0.0))
    }


def expected(batch: Any, slots: int) -> float:
    kept = min(int(batch["demand"]), slots)
    return float((batch["x"] * np.arange(toy.ROWS, dtype=np.float32))[:kept].sum())


@pytest.mark.parametrize("lag", [0, 1, 5])
def test_dropless_unless_told_otherwise(lag: int) -> None:
    data = toy.batches(4, 9, 32)
    reports = list(EvalRunner(step, lag=lag).run(STATE, data))
    assert [(r.step, r.demand, r.overflow, r.capacity) for r in reports] == [
        (number, demand, False, Capacity(None)) for number, demand in enumerate((4, 9, 32))
    ]
    assert [float(r.metrics["sum"]) for r in reports] == [expected(batch, 32) for batch in data]


def test_a_capped_evaluation_tells_its_overflows() -> None:
    data = toy.batches(4, 9)
    reports = list(EvalRunner(step, capacity=Capacity(8)).run(STATE, data))
    assert [r.overflow for r in reports] == [False, True]
    assert [float(r.metrics["sum"]) for r in reports] == [expected(batch, 8) for batch in data]
    assert expected(data[1], 8) != expected(data[1], 32), "the drop changes nothing: the test shows nothing"


def test_the_state_is_not_donated_and_reads_come_late(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, reads = [], []

    def batches() -> Any:
        for number, batch in enumerate(toy.batches(1, 2, 3, 4)):
            sent.append(number)
            yield batch

    device_get = jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda x: (reads.append(len(sent)), device_get(x))[1])
    assert len(list(EvalRunner(step, lag=2).run(STATE, batches()))) == 4
    assert reads == [3, 4, 4, 4]  # the first read comes after the third batch was sent
    assert not STATE["w"].is_deleted()


def test_train_1_a_shorter_last_batch() -> None:
    def count(state: Any, batch: Any, *, capacity: Capacity) -> Any:
        return batch, {"rows": batch.size}

    reports = list(EvalRunner(count).run((), [jnp.array([1, 2]), jnp.array([7])]))
    assert [(r.demand, int(r.metrics["rows"])) for r in reports] == [(2, 2), (7, 1)]


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ((1, 2, 3), r"evaluation step must return \(total_recv_tokens, metrics\), got a tuple of 3"),
        ({}, r"evaluation step must return .*, got a dict"),
        (({}, {}), "total_recv_tokens holds no array"),
    ],
)
def test_refuses_other_outputs(outputs: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(EvalRunner(lambda state, batch, capacity: outputs).run(STATE, toy.batches(1)))


def test_refuses_a_negative_lag() -> None:
    with pytest.raises(ValueError, match="lag must be an integer of at least 0, got -1"):
        EvalRunner(step, lag=-1)
