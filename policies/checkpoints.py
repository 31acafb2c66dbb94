"""Checkpointer: a run that is stopped anywhere goes on as if it had not been.

One checkpoint is one folder, ``<number of steps done>``, which Orbax writes under another name and renames when all of
it is there. It holds the training state and, in JSON beside it, all else that a run needs to go on: the policy's state,
the number of steps done, the data position, the config, and what the leaves are with their checksums.

Needs ``orbax-checkpoint``: ``pip install moe-blocks[checkpoint]``.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import types
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jaxtyping import PyTree

from moe_blocks.capacity import CapacitySpec, positive_int
from policies import snapshot
from policies.base import CapacityPolicy, PolicyState
from policies.changes import changes
from policies.runner import StepRunner


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read. Those that were complete before are as they were."""


class Restored(NamedTuple):
    """What a checkpoint holds, made ready to go on with.

    Attributes:
      state: the training state, in the places of the target.
      policy_state: for the policy and the sizes of now.
      step: steps done, so the number of the next step.
      data: the data position, as it was given to ``save``.
      changes: what differs from the run that saved it, one line each: config keys, mesh axes, the policy's ladder.
    """

    state: Any
    policy_state: PolicyState
    step: int
    data: Any
    changes: tuple[str, ...]

    def __str__(self) -> str:
        return "\n  ".join([f"resumed after {self.step} steps", *(f"changed: {line}" for line in self.changes)])


class Checkpointer:
    """Saves a `StepRunner`'s run at settled steps and restores it.

    A save waits for the steps in flight, so that a step that may still be rejected is never in it, and for a copy of
    the state to the host; the files are then written while the training goes on. A run killed at any moment loses the
    steps since the last complete checkpoint and nothing else. Where batches and random numbers follow from the number
    of the step, or from the saved data position, it does those again to the bit.

    Args:
      folder: of the checkpoints of one run; made if it is not there.
      every: steps from one checkpoint to the next, for ``due``.
      keep: newest checkpoints to keep; an older one is deleted when the next is complete.

    Raises:
      ValueError: if a number is not an integer of at least 1.

    Example:
      >>> from policies import RetryDropless
      >>> def step(state, batch, *, capacity):
      ...     return state + batch.sum(), batch.max(keepdims=True), {}
      >>> spec = CapacitySpec(tokens_per_rank=4, num_experts=4, num_experts_per_tok=1, ep_size=4, multiple_of=1)
      >>> def train(folder, steps):
      ...     policy, state, first, policy_state = RetryDropless(factor=1.0), jnp.int32(0), 0, None
      ...     with Checkpointer(folder, every=2) as checkpoints:
      ...         saved = checkpoints.restore(state, policy, spec, config={"steps": steps})
      ...         if saved is not None:
      ...             print(saved)
      ...             state, policy_state, first, *_ = saved
      ...         runner = StepRunner(step, policy, spec, policy_state=policy_state, first_step=first)
      ...         for report in runner.run(state, (jnp.array([1, n]) for n in range(first, steps))):
      ...             if checkpoints.due(runner.submitted):
      ...                 checkpoints.save(runner, config={"steps": steps})
      ...         return int(runner.state)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     train(folder, steps=5), train(folder, steps=7)
      resumed after 4 steps
        changed: config.steps: 5 -> 7
      (15, 28)
    """

    def __init__(self, folder: str | Path, *, every: int, keep: int = 3) -> None:
        self.folder = Path(folder).absolute()
        self._every = positive_int("every", every)
        kept = ocp.checkpoint_managers.LatestN(positive_int("keep", keep))
        # What a killed save left under its temporary name is removed.
        options = ocp.CheckpointManagerOptions(preservation_policy=kept, cleanup_tmp_directories=True)
        self._manager = ocp.CheckpointManager(self.folder, options=options)
        self._newest: int | None = None  # steps in the newest checkpoint that this run saved or restored

    @property
    def steps(self) -> tuple[int, ...]:
        """Number of steps done in each checkpoint there is, oldest first, readable or not."""
        return tuple(sorted(self._manager.all_steps()))

    def due(self, step: int) -> bool:
        """Whether a checkpoint belongs after this number of steps, and is not there yet."""
        return step > 0 and step % self._every == 0 and step != self._newest

    def save(self, runner: StepRunner, *, data: Any = None, config: Any = None) -> None:
        """Settles the steps in flight and saves; again after the same number of steps, it does nothing.

        Args:
          runner: whose training state, policy state and number of steps are saved.
          data: JSON-able, the position in the data: what ``Restored.data`` gives back.
          config: JSON-able, of the run; ``restore`` tells what has changed.

        Raises:
          CapacityOverflowError: from a step in flight; nothing is saved.
          CheckpointError: if this checkpoint or the one before it could not be written, or if the folder held
            checkpoints that nobody restored.
          ValueError: if ``data`` or ``config`` is not JSON-able; nothing is saved.
        """
        leaves = {name: jnp.asarray(leaf) for name, leaf in snapshot.named(runner.state).items()}
        step = runner.submitted
        if step == self._newest:
            return
        if self._newest is None and self.steps:
            raise CheckpointError(
                f"{self.folder} holds checkpoints of {self.steps} steps, which a run from step 0 would overwrite; "
                "go on from them with restore, or choose another folder"
            )
        stored = {name: leaf for name, leaf in leaves.items() if leaf.size}  # an array without numbers has no file
        record = {
            "step": step,
            "policy_state": runner.policy_state.plain()._asdict(),
            "data": _jsonable("data", data),
            "config": _jsonable("config", config),
            "mesh": snapshot.mesh_of(leaves),
            "leaves": snapshot.describe(leaves),
            "checksums": snapshot.checksums(stored),
        }
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(stored), run=ocp.args.JsonSave({"crc32": crc32(record), "record": record})
        )
        with self._telling(f"the checkpoint after {step} steps, or the one before it,"):
            self._manager.save(step, args=items, force=True)
        self._newest = step

    def restore(
        self, target: PyTree, policy: CapacityPolicy, spec: CapacitySpec, *, config: Any = None
    ) -> Restored | None:
        """The newest checkpoint that can be read, for the devices and the policy of now.

        One that cannot be read is told in a warning and moved aside within the folder, and the one before it is taken.

        Args:
          target: the state that is wanted, as arrays or as ``jax.ShapeDtypeStruct``; its shapes and dtypes must be
            those saved, its shardings may be any. Nothing of it is read but that.
          policy: to go on with; on another ladder than the saved one, ``policy.resume`` finds the rung.
          spec: of its MoE layers.
          config: of the run, to tell what has changed.

        Returns:
          None if there are no checkpoints.

        Raises:
          MismatchError: a ``ValueError``, if the saved state has other leaves than ``target``.
          CheckpointError: if there are checkpoints and none can be read.
        """
        wanted = {name: snapshot.abstract(leaf) for name, leaf in snapshot.named(target).items()}
        unreadable: dict[int, str] = {}
        for step in reversed(self.steps):
            try:
                record, leaves = self._read(step, wanted)
            except snapshot.MismatchError as error:
                raise snapshot.MismatchError(
                    f"the checkpoint {self.folder / str(step)} does not fit: {error}; restore with the sizes of the "
                    "run that saved it, or choose another folder"
                ) from None
            except Exception as error:  # whatever a damaged file leads to
                unreadable[step] = " ".join(str(error).split())[:200]
                continue
            self._set_aside(unreadable, step)
            self._newest = step
            saved = record["policy_state"]
            before = {"config": record["config"], "mesh": record["mesh"], "ladder": saved["ladder"]}
            now = {
                "config": record["config"] if config is None else config,
                "mesh": snapshot.mesh_of(wanted),
                "ladder": policy.init(spec).ladder,
            }
            structure = jax.tree.structure(target)
            return Restored(
                jax.tree.unflatten(structure, [leaves[name] for name in wanted]),
                policy.resume(spec, saved),
                step,
                record["data"],
                changes(before, now),
            )
        if unreadable:
            raise CheckpointError(f"none of the checkpoints in {self.folder} can be read: {_told(unreadable)}")
        return None

    def wait(self) -> None:
        """Waits until the last save is complete.

        Raises:
          CheckpointError: if it failed.
        """
        with self._telling("the last checkpoint"):
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits like ``wait`` and lets go of the folder."""
        with self._telling("the last checkpoint"):
            self._manager.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        self.close()

    def _read(self, step: int, wanted: dict[str, jax.ShapeDtypeStruct]) -> tuple[dict[str, Any], snapshot.Leaves]:
        """The record of a checkpoint and its leaves, both as they were saved, or an error."""
        item = self._manager.restore(step, args=ocp.args.Composite(run=ocp.args.JsonRestore())).run
        record: dict[str, Any] = item["record"]
        if crc32(record) != item["crc32"] or record["step"] != step:
            raise CheckpointError("its record changed after it was written")
        snapshot.check_fits(record["leaves"], snapshot.describe(wanted))
        stored = {name: leaf for name, leaf in wanted.items() if leaf.size}
        leaves = self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(stored))).state
        found = snapshot.checksums(leaves)
        if damaged := [name for name, number in record["checksums"].items() if found[name] != number]:
            raise CheckpointError(f"{', '.join(damaged)} changed after it was written")
        return record, {
            name: leaves[name] if name in leaves else jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)
            for name, leaf in wanted.items()
        }

    def _set_aside(self, unreadable: dict[int, str], taken: int) -> None:
        """Moves what cannot be read out of the way of the steps that will be done again."""
        if not unreadable:
            return
        warnings.warn(
            f"could not read the newest checkpoint of {self.folder}: {_told(unreadable)}. Going on from the one after "
            f"{taken} steps; the other is kept as unreadable-*",
            RuntimeWarning,
            stacklevel=3,
        )
        if jax.process_index() == 0:
            for step in unreadable:
                aside = tempfile.mkdtemp(prefix=f"unreadable-{step}-", dir=self.folder)
                (self.folder / str(step)).rename(Path(aside, str(step)))
        ocp.multihost.sync_global_processes("checkpoints: set aside")
        self._manager.reload()

    @contextlib.contextmanager
    def _telling(self, what: str) -> Iterator[None]:
        """Says what went wrong with the files, and what there still is."""
        try:
            yield
        except Exception as error:
            self._manager.reload()
            self._newest = max(self.steps, default=None)
            reason = " ".join(str(error).split())
            raise CheckpointError(
                f"{what} could not be written to {self.folder}: {reason}. The checkpoints after {self.steps} steps are "
                "complete; if the disk is full, make room, then start again"
            ) from error


def _jsonable(name: str, value: Any) -> Any:
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be a JSON value, got {value!r}: {error}") from None


def crc32(record: Any) -> int:
    """The checksum that stands beside a record."""
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())


def _told(unreadable: dict[int, str]) -> str:
    return "; ".join(f"after {step} steps: {reason}" for step, reason in unreadable.items())
