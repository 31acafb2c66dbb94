from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from policies import AdaptiveGrow, programs
from policies.programs import Programs, signature
from policies.transaction import Carry
from tests.policies import toy

POLICY = AdaptiveGrow(1.0)
CAPACITIES = POLICY.capacities(POLICY.init(toy.SPEC))


def step(state: Any, batch: Any, *, capacity: Any) -> Any:
    return state + batch.sum(), batch, {"slots": jnp.int32(capacity.slots or 0)}


def ready() -> Programs:
    return Programs(step, POLICY, CAPACITIES).serving(jnp.int32(0), jnp.array([1]))


def slots_of(program: Any, batch: Any) -> int:
    return int(program(Carry(jnp.array(True), jnp.int32(0)), batch)[2]["slots"])


def test_one_program_per_capacity_and_batch_shape() -> None:
    cache, batch = ready(), jnp.array([1])
    first = cache.get(CAPACITIES[0], batch)
    assert cache.get(CAPACITIES[0], np.array([2], np.int32)) is first
    assert cache.get(CAPACITIES[1], batch) is not first
    assert cache.get(CAPACITIES[0], jnp.array([1, 2])) is not first
    assert len(cache) == 3


def test_programs_are_kept_for_an_equal_state_and_not_for_another() -> None:
    cache, batch = ready(), jnp.array([1])
    assert cache.serving(jnp.int32(5), batch) is cache
    assert cache.serving(np.int32(5), batch) is cache
    assert cache.serving(jnp.float32(5), batch) is not cache
    assert cache.serving({"w": jnp.int32(5)}, batch) is not cache


def test_signature_tells_structure_shape_and_dtype() -> None:
    one = np.zeros(3, np.float32)
    assert signature({"x": one}) == signature({"x": jnp.ones(3)})
    others = ({"y": one}, {"x": one[:2]}, {"x": one.astype(np.int32)}, one, {"x": one, "z": one})
    assert len({signature(tree) for tree in others} | {signature({"x": one})}) == len(others) + 1


def test_build_ahead_compiles_every_rung_in_the_background() -> None:
    cache, batch = ready(), jnp.array([1])
    cache.get(CAPACITIES[0], batch)
    cache.build_ahead(CAPACITIES, batch)
    assert len(cache) == 4
    assert [slots_of(cache.get(capacity, batch), batch) for capacity in CAPACITIES] == [4, 8, 16, 0]
    assert len(cache) == 4
    [thread] = [thread for thread in threading.enumerate() if thread.name == "build-ahead"] or [None]
    assert thread is None or thread.daemon


def test_a_needed_rung_does_not_wait_for_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the background is busy with the first of two, the second is compiled where it is needed."""
    busy, go_on = threading.Event(), threading.Event()

    class Slow:
        def __init__(self, lowered: Any) -> None:
            self.lowered = lowered

        def compile(self) -> Any:
            if threading.current_thread().name == "build-ahead":
                busy.set()
                assert go_on.wait(60)
            return self.lowered.compile()

    lower = Programs._lower
    monkeypatch.setattr(Programs, "_lower", lambda *args: Slow(lower(*args)))
    cache, batch = ready(), jnp.array([1])
    cache.build_ahead(CAPACITIES[1:3], batch)
    assert busy.wait(60)
    assert slots_of(cache.get(CAPACITIES[2], batch), batch) == 16
    go_on.set()
    assert slots_of(cache.get(CAPACITIES[1], batch), batch) == 8  # this one was waited for
    assert len(cache) == 2


def test_an_error_in_the_background_comes_up_where_the_program_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def compile(self) -> Any:
            raise MemoryError("too large")

    cache, batch = ready(), jnp.array([1])
    with monkeypatch.context() as patch:
        patch.setattr(Programs, "_lower", lambda *args: Broken())
        cache.build_ahead(CAPACITIES[-1:], batch)
        with pytest.raises(MemoryError, match="too large"):
            cache.get(CAPACITIES[-1], batch)
    assert slots_of(cache.get(CAPACITIES[0], batch), batch) == 4


def test_a_failed_compile_is_not_counted() -> None:
    cache = Programs(lambda state, batch, capacity: state, POLICY, CAPACITIES).serving(jnp.int32(0), jnp.array([1]))
    for _ in range(2):
        with pytest.raises(ValueError, match="step must return"):
            cache.get(CAPACITIES[0], jnp.array([1]))
    assert len(cache) == 0


def test_giving_up_waits_only_for_the_program_in_the_works() -> None:
    script = """
import jax, jax.numpy as jnp
from policies import AdaptiveGrow, StepRunner
from moe_blocks.capacity import CapacitySpec

def step(state, batch, *, capacity):
    for i in range(40):  # long enough to be compiling at exit
        state = jnp.sin(state @ state + i)
    return state, batch, {}

spec = CapacitySpec(tokens_per_rank=4, num_experts=64, num_experts_per_tok=1, ep_size=64, multiple_of=1)
runner = StepRunner(step, AdaptiveGrow(1.0, growth=1.3), spec)
runner.compile(jnp.ones((8, 8)), jnp.array([1]))
print(runner.executables)
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stderr) == (0, "")
    assert int(result.stdout) > 10


def test_give_up_clears_what_waits() -> None:
    jobs = programs.collections.deque([("future", "lowered")])
    thread = threading.Thread(target=lambda: None)
    thread.start()
    programs._give_up(jobs, thread)
    assert not jobs
    assert not thread.is_alive()
    assert jax.devices()  # the backend lives on
