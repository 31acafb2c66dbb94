"""A policy of one's own that breaks the laws is told so: without the check its retries would never end."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import pytest

from moe_blocks.capacity import Capacity, CapacitySpec
from policies import CapacityPolicy, PolicyState, Report, RetryDropless, StepRunner
from policies.base import checked_update, fits

SPEC = CapacitySpec(tokens_per_rank=4, num_experts=4, num_experts_per_tok=1, ep_size=4, multiple_of=1)


@dataclasses.dataclass(frozen=True)
class Broken(CapacityPolicy):
    """Two rungs, and after each attempt the slots that ``after`` says."""

    after: int
    rungs: tuple[int, ...] = (4, 16)

    def ladder(self, spec: CapacitySpec) -> tuple[int, ...]:
        return self.rungs

    def accept(self, total_recv_tokens, capacity: Capacity):
        return fits(total_recv_tokens, capacity)

    def update(self, state: PolicyState, report: Report) -> PolicyState:
        return state._replace(slots=self.after)


def step(state, batch, *, capacity):
    return state + batch.sum(), batch.max(keepdims=True), {}


def test_a_policy_that_does_not_grow_is_stopped_and_the_state_is_kept() -> None:
    runner = StepRunner(step, Broken(after=4), SPEC, lag=0)
    with pytest.raises(RuntimeError, match=r"Broken.update answered the rejection of .*slots=4.* tried for ever"):
        list(runner.run(jnp.int32(0), [jnp.array([1, 2]), jnp.array([3, 9]), jnp.array([1, 1])]))
    assert int(runner.state) == 3
    # Without the check it would ask for the capacity that has just failed, again and again.
    policy, state = Broken(after=4), Broken(after=4).init(SPEC)
    report = Report(1, 0, 9, policy.capacity(state), accepted=False)
    assert policy.capacity(policy.update(state, report)) == report.capacity


def test_a_capacity_off_the_ladder_is_refused() -> None:
    runner = StepRunner(step, Broken(after=7), SPEC)
    with pytest.raises(RuntimeError, match=r"Broken.update chose .*slots=7.* none of its capacities"):
        list(runner.run(jnp.int32(0), [jnp.array([1, 2])] * 3))


@pytest.mark.parametrize("ladder", [(4, 8), (16, 4), (4, 4, 16), (4, 16, 32), ()])
def test_a_ladder_that_does_not_end_dropless_is_refused(ladder: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"Broken.ladder must return strictly increasing slots .*spec.dropless=16"):
        Broken(after=4, rungs=ladder).init(SPEC)


def test_a_lawful_update_passes_unchanged() -> None:
    policy, state = RetryDropless(1.0), RetryDropless(1.0).init(SPEC)
    report = Report(0, 0, 9, policy.capacity(state), accepted=False)
    assert checked_update(policy, state, report) == policy.update(state, report)


def test_a_state_is_read_from_json_and_from_its_fields() -> None:
    policy, saved = RetryDropless(1.0), RetryDropless(1.0).init(SPEC)._replace(overflows=3, rejections=2)
    for form in (saved, saved.to_json(), saved._asdict()):
        assert StepRunner(step, policy, SPEC, policy_state=form).policy_state == saved
    with pytest.raises(ValueError, match=r"a PolicyState needs an object with the fields .*got \{'slots': 4\}"):
        StepRunner(step, policy, SPEC, policy_state={"slots": 4})
