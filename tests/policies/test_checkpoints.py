"""Checkpointer: what is saved, when, and that the run goes on from it to the bit."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from policies import AdaptiveGrow, CapacityPolicy, Drop, PolicyState, RetryDropless, StaticFactor, StepRunner
from policies.base import CapacityOverflowError
from policies.checkpoints import Checkpointer, CheckpointError, Restored
from policies.snapshot import MismatchError
from tests.policies.toy import SPEC, batches, by_hand, same_bits, state_of_every_kind, step

DEMANDS = (1, 9, 2, 9, 9, 3, 1, 5)
RETRY = RetryDropless(1.0)


def runner_of(policy: CapacityPolicy, saved: Restored | None = None, *, lag: int = 1) -> StepRunner:
    """A runner that has taken over the state, to be given its batches one by one."""
    known = {} if saved is None else {"policy_state": saved.policy_state, "first_step": saved.step}
    runner = StepRunner(step, policy, SPEC, lag=lag, **known)
    runner.start(state_of_every_kind() if saved is None else saved.state)
    return runner


def feed(runner: StepRunner, to: int) -> StepRunner:
    for batch in batches(*DEMANDS)[runner.submitted : to]:
        runner.submit(batch)
    return runner


def restore(folder: Path, policy: CapacityPolicy = RETRY, **config: Any) -> Restored | None:
    with Checkpointer(folder, every=1) as checkpoints:
        return checkpoints.restore(state_of_every_kind(), policy, SPEC, config=config or None)


def add(state: Any, batch: Any, *, capacity: Any) -> Any:
    return state + 1, batch, {}


ONE = np.array([1], np.int32)


def numbers(count: int) -> np.ndarray:
    """Numbers that do not compress, so that they have a file of their own."""
    return np.random.default_rng(0).normal(size=count).astype(np.float32)


def adder(start: np.ndarray) -> StepRunner:
    runner = StepRunner(add, Drop(1.0), SPEC, lag=0)
    runner.start(jnp.array(start))
    runner.submit(ONE)
    return runner


E, WIDTH = 4, 512


def experts() -> dict[str, np.ndarray]:
    """CKPT-1: expert e holds e + 1, and its Adam moments ten times that; beside it a number of no axis."""
    each = np.broadcast_to(np.arange(1, E + 1, dtype=np.float32)[:, None], (E, WIDTH))
    return {"wo": each, "mu": 10 * each, "step": np.int32(7)}


def spread(ep: int) -> dict[str, jax.ShapeDtypeStruct]:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:ep]), ("expert",), axis_types=(AxisType.Auto,))
    where = {name: NamedSharding(mesh, P("expert") if np.ndim(leaf) else P()) for name, leaf in experts().items()}
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where[name]) for name, x in experts().items()}


@pytest.mark.parametrize(("saved_at", "restored_at"), [(2, 1), (2, 2), (2, 4), (4, 1), (4, 2)])
def test_ckpt_1_ckpt_4_another_mesh(tmp_path: Path, saved_at: int, restored_at: int) -> None:
    def same(state: Any, batch: Any, *, capacity: Any) -> Any:
        return state, batch, {}

    with Checkpointer(tmp_path, every=1) as checkpoints:
        runner = StepRunner(same, RETRY, SPEC)
        runner.start({name: jax.device_put(leaf, spread(saved_at)[name].sharding) for name, leaf in experts().items()})
        runner.submit(ONE)
        checkpoints.save(runner)
    with Checkpointer(tmp_path, every=1) as checkpoints:
        saved = checkpoints.restore(spread(restored_at), RETRY, SPEC)
    assert saved is not None
    assert same_bits(saved.state, experts())
    assert [leaf.sharding for leaf in jax.tree.leaves(saved.state)] == [
        leaf.sharding for leaf in jax.tree.leaves(spread(restored_at))
    ]
    for rank, shard in enumerate(saved.state["wo"].addressable_shards):
        first = rank * E // restored_at
        assert np.unique(shard.data).tolist() == [float(e + 1) for e in range(first, first + E // restored_at)]
    changed = (f"mesh.expert: {saved_at} -> {restored_at}",)
    assert saved.changes == (() if saved_at == restored_at else changed)


@pytest.fixture
def saved_at_4_and_6(tmp_path: Path) -> Path:
    with Checkpointer(tmp_path, every=2) as checkpoints:
        runner = runner_of(RETRY)
        for done in (4, 6):
            checkpoints.save(feed(runner, done), data={"next": done}, config={"seed": 0})
    return tmp_path


@pytest.mark.parametrize("policy", [RETRY, AdaptiveGrow(1.0), Drop(1.0)], ids=lambda policy: type(policy).__name__)
@pytest.mark.parametrize("lag", [0, 3])
def test_a_run_goes_on_as_if_it_had_not_stopped(tmp_path: Path, policy: CapacityPolicy, lag: int) -> None:
    whole = feed(runner_of(policy), len(DEMANDS))
    with Checkpointer(tmp_path, every=1) as checkpoints:
        assert checkpoints.restore(state_of_every_kind(), policy, SPEC) is None
        runner = runner_of(policy, lag=lag)
        for done in (2, 5):  # step 1 overflows, steps 3 and 4 do
            feed(runner, done)
            checkpoints.save(runner, data={"next": done})
        feed(runner, 7)  # lost
    saved = restore(tmp_path, policy)
    assert saved is not None
    assert (saved.step, saved.data, saved.changes) == (5, {"next": 5}, ())
    going_on = feed(runner_of(policy, saved, lag=lag), len(DEMANDS))
    assert same_bits(going_on.state, whole.state)
    assert going_on.policy_state == whole.policy_state
    assert going_on.policy_state.overflows > 0, "no step overflowed: the policy state told nothing"


@pytest.mark.parametrize("wrong", [{"step": 4}, {"policy_state": RETRY.init(SPEC)}])
def test_a_wrong_restart_shows(saved_at_4_and_6: Path, wrong: dict[str, Any]) -> None:
    """Positive control of the test above."""
    saved, whole = restore(saved_at_4_and_6), feed(runner_of(RETRY), len(DEMANDS))
    assert saved is not None
    going_on = feed(runner_of(RETRY, saved._replace(**wrong)), len(DEMANDS))
    assert not (same_bits(going_on.state, whole.state) and going_on.policy_state == whole.policy_state)


def test_a_save_settles_the_steps_in_flight(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, every=1) as checkpoints:
        runner = feed(runner_of(RETRY, lag=5), 2)  # the second one will be rejected, and nobody knows yet
        assert runner.policy_state.overflows == 0
        checkpoints.save(runner)
        assert [report.attempts for report in runner.drain()] == [1, 2]  # none is lost to the log
    saved = restore(tmp_path)
    assert saved is not None
    assert same_bits(saved.state, by_hand(None, *DEMANDS[:2])[0])
    assert (saved.step, saved.policy_state.rejections) == (2, 1)


def test_a_step_that_stops_the_run_is_not_saved(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, every=1) as checkpoints:
        runner = feed(runner_of(StaticFactor(1.0), lag=5), 2)
        with pytest.raises(CapacityOverflowError):
            checkpoints.save(runner)
        assert checkpoints.steps == ()
        checkpoints.save(runner)  # the step before it counts
        checkpoints.wait()
        assert checkpoints.steps == (1,)


def test_the_training_goes_on_while_it_writes(tmp_path: Path) -> None:
    """What is written are the values of the step that was saved, though the steps behind it donate their state."""
    start = numbers(1 << 21)  # 8 MB take a while
    with Checkpointer(tmp_path, every=1) as checkpoints:
        runner = adder(start)
        checkpoints.save(runner)
        assert checkpoints._manager.is_saving_in_progress()
        for _ in range(3):
            runner.submit(ONE)
        checkpoints.wait()
        saved = checkpoints.restore(start, Drop(1.0), SPEC)
        assert saved is not None
        assert same_bits(saved.state, start + np.float32(1))
        assert not same_bits(saved.state, runner.state)
        before = runner.state
        runner.submit(ONE)
        assert before.is_deleted(), "the steps donate nothing: there was no danger"


def test_when_a_checkpoint_is_due_and_how_many_are_kept(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, every=2, keep=2) as checkpoints:
        runner, taken = runner_of(RETRY), []
        for batch in batches(*DEMANDS):
            runner.submit(batch)
            if checkpoints.due(runner.submitted):
                checkpoints.save(runner)
                taken.append(runner.submitted)
                assert not checkpoints.due(runner.submitted)
            checkpoints.save(runner) if runner.submitted in taken else None  # does nothing
        checkpoints.wait()
        assert taken == [2, 4, 6, 8]
        assert checkpoints.steps == (6, 8)


def test_a_restart_from_zero_must_not_overwrite(saved_at_4_and_6: Path) -> None:
    with Checkpointer(saved_at_4_and_6, every=1) as checkpoints:
        runner = feed(runner_of(RETRY), 1)
        with pytest.raises(
            CheckpointError, match=r"holds checkpoints of \(4, 6\) steps, which a run from step 0 would"
        ):
            checkpoints.save(runner)
        assert checkpoints.steps == (4, 6)


def data_file(checkpoint: Path) -> Path:
    """The largest file of the state; it holds the numbers."""
    return max((checkpoint / "state").glob("**/d/*"), key=lambda path: path.stat().st_size)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def rewrite(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "a bit": lambda checkpoint: flip(data_file(checkpoint)),
    "cut": lambda checkpoint: data_file(checkpoint).write_bytes(data_file(checkpoint).read_bytes()[:100]),
    "no data": lambda checkpoint: data_file(checkpoint).unlink(),
    "no record": lambda checkpoint: (checkpoint / "run" / "metadata").unlink(),
    "another record": lambda checkpoint: rewrite(checkpoint / "run" / "metadata", '"slots": 4', '"slots": 5'),
    "empty": lambda checkpoint: checkpoint.rename(checkpoint.parent / "moved") and checkpoint.mkdir(),
}
# Orbax leaves coroutines of a failed read behind.
damaged = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@damaged
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_falls_back_to_the_one_before(
    saved_at_4_and_6: Path, damage: Callable[[Path], Any]
) -> None:
    damage(saved_at_4_and_6 / "6")
    with Checkpointer(saved_at_4_and_6, every=2) as checkpoints:
        with pytest.warns(RuntimeWarning, match="could not read the newest checkpoint of .*: after 6 steps: .*after 4"):
            saved = checkpoints.restore(state_of_every_kind(), RETRY, SPEC)
        assert saved is not None
        assert (saved.step, saved.data) == (4, {"next": 4})
        assert same_bits(saved.state, by_hand(None, *DEMANDS[:4])[0])
        assert list(saved_at_4_and_6.glob("unreadable-6-*/6"))
        checkpoints.save(feed(runner_of(RETRY, saved), 6))  # the same steps, done again
    again = restore(saved_at_4_and_6)
    assert again is not None
    assert same_bits(again.state, by_hand(None, *DEMANDS[:6])[0])


@pytest.mark.parametrize("checked", [True, False])
def test_only_the_checksum_sees_a_flipped_bit_in_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checked: bool
) -> None:
    start = numbers(1 << 12)
    with Checkpointer(tmp_path, every=1) as checkpoints:
        checkpoints.save(adder(start))
        checkpoints.wait()
        flip(data_file(tmp_path / "1"))
        if checked:
            with pytest.raises(CheckpointError, match="none of .* after 1 steps: state changed after it was written"):
                checkpoints.restore(start, Drop(1.0), SPEC)
        else:
            monkeypatch.setattr("policies.snapshot.checksums", lambda _: record["checksums"])
            record = json.loads((tmp_path / "1" / "run" / "metadata").read_text())["record"]
            saved = checkpoints.restore(start, Drop(1.0), SPEC)
            assert saved is not None
            assert not same_bits(saved.state, start + np.float32(1)), "the flip hit no number"


@damaged
def test_checkpoints_of_which_none_can_be_read_are_an_error(saved_at_4_and_6: Path) -> None:
    for step_done in ("4", "6"):
        data_file(saved_at_4_and_6 / step_done).unlink()
    with pytest.raises(CheckpointError, match="none of the checkpoints in .* can be read: after 6 steps: .*; after 4"):
        restore(saved_at_4_and_6)
    assert {path.name for path in saved_at_4_and_6.iterdir()} == {"4", "6"}  # nothing was moved


def test_a_half_written_checkpoint_is_none(saved_at_4_and_6: Path) -> None:
    """What a kill during a save leaves: everything, but for the last renaming."""
    left = saved_at_4_and_6 / "6.orbax-checkpoint-tmp"
    (saved_at_4_and_6 / "6").rename(left)
    saved = restore(saved_at_4_and_6)
    assert saved is not None
    assert saved.step == 4
    with Checkpointer(saved_at_4_and_6, every=1) as checkpoints:
        saved = checkpoints.restore(state_of_every_kind(), RETRY, SPEC)
        checkpoints.save(feed(runner_of(RETRY, saved), 6))
    assert {path.name for path in saved_at_4_and_6.iterdir()} == {"4", "6"}


@pytest.fixture
def no_room() -> Iterator[Callable[[int], None]]:
    """Sets the size in bytes that no file may exceed: the write fails as on a full disk, with another error number."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_told_and_what_was_there_stays(tmp_path: Path, no_room: Callable[[int], None]) -> None:
    start = numbers(1 << 18)  # 1 MB
    with Checkpointer(tmp_path, every=1, keep=1) as checkpoints:
        runner = adder(start)
        checkpoints.save(runner)
        checkpoints.wait()
        runner.submit(ONE)
        no_room(100_000)
        checkpoints.save(runner)
        with pytest.raises(CheckpointError, match=r"could not be written to .*: .*File too large.* after \(1,\) steps"):
            checkpoints.wait()
        no_room(resource.RLIM_INFINITY)
        saved = checkpoints.restore(start, Drop(1.0), SPEC)
        assert saved is not None
        assert saved.step == 1
        assert same_bits(saved.state, start + np.float32(1))
        checkpoints.save(runner)  # now there is room
        checkpoints.wait()
        assert checkpoints.steps == (2,)


def test_what_changed_is_told(saved_at_4_and_6: Path) -> None:
    saved = restore(saved_at_4_and_6, AdaptiveGrow(2.0), seed=1, steps=9)
    assert saved is not None
    assert saved.changes == (
        "config.seed: 0 -> 1",
        "ladder: [4, 32] -> [8, 16, 32]",
        "config.steps: nothing -> 9",
    )
    assert str(saved) == "resumed after 6 steps\n  changed: " + "\n  changed: ".join(saved.changes)
    assert saved.policy_state == PolicyState((8, 16, 32), 4, 8, overflows=3, rejections=3)


def test_a_state_of_other_sizes_is_refused(saved_at_4_and_6: Path) -> None:
    target = {**state_of_every_kind(), "bias": np.zeros(8, np.float32)}
    with (
        Checkpointer(saved_at_4_and_6, every=1) as checkpoints,
        pytest.raises(
            MismatchError, match=r"/6 does not fit: 1 of 11 leaves differ: state\['bias'\] was saved as float32\[4\]"
        ),
    ):
        checkpoints.restore(target, RETRY, SPEC)


@pytest.mark.parametrize("given", ["data", "config"])
def test_what_is_no_json_is_refused(tmp_path: Path, given: str) -> None:
    with Checkpointer(tmp_path, every=1) as checkpoints:
        with pytest.raises(ValueError, match=f"{given} must be a JSON value, got"):
            checkpoints.save(feed(runner_of(RETRY), 1), **{given: jax.numpy})
        assert checkpoints.steps == ()


@pytest.mark.parametrize("numbers", [{"every": 0}, {"every": 1, "keep": 0}, {"every": 1.5}])
def test_a_wrong_number_is_named(tmp_path: Path, numbers: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="(every|keep) must be an integer of at least 1, got"):
        Checkpointer(tmp_path / "new", **numbers)
    assert not (tmp_path / "new").exists()
