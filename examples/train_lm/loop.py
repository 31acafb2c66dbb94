"""The training loop: batches in, one record per accepted step out, with progress, checkpoints and a clean stop."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import jax
from jax.sharding import Mesh
from tqdm import tqdm

from examples.train_lm import data
from examples.train_lm.distributed import wait_for_all
from examples.train_lm.mesh import own_rows, spread
from examples.train_lm.resume import cut_log, identity
from examples.train_lm.stop import stop_on_signal
from examples.train_lm.train import Training, TrainState
from policies import CapacityOverflowError, EvalRunner, StepReport, StepRunner, from_config
from policies.checkpoints import Checkpointer, Restored


class Record(NamedTuple):
    """One accepted step.

    Attributes:
      step: its number.
      loss: on its batch, in nats per byte, without the router losses.
      aux_loss: the router losses.
      grad_norm: before clipping.
      demand: the largest on a receive buffer, in assignments, of the accepted attempt.
      slots: of one receive buffer at the first attempt: what the policy chose.
      final_slots: of one receive buffer at the accepted attempt.
      overflow: whether the first attempt overflowed.
      retries: attempts before the accepted one.
      dropped: the share of assignments that were not served.
      seconds: since the previous record.
      skipped: whether the step left no trace, since its numbers were not finite.
    """

    step: int
    loss: float
    aux_loss: float
    grad_norm: float
    demand: int
    slots: int
    final_slots: int
    overflow: bool
    retries: int
    dropped: float
    seconds: float
    skipped: bool = False


class Result(NamedTuple):
    """What a run came to.

    Attributes:
      records: one per accepted step, those of earlier runs that it went on from included.
      validation_loss: in nats per byte; None if the run ended early.
      executables: programs compiled.
      compile_seconds: before the first step.
      stopped: the signal that asked for it.
      error: what stopped a run whose policy, or whose data, could not go on.
      saved: steps in the newest checkpoint.
    """

    records: list[Record]
    validation_loss: float | None
    executables: int
    compile_seconds: float
    stopped: signal.Signals | None
    error: CapacityOverflowError | OSError | None
    saved: int


def run(
    training: Training,
    text: data.Text,
    mesh: Mesh,
    path: Path,
    checkpoints: Checkpointer | None = None,
    start: Restored | None = None,
) -> Result:
    """Trains, then evaluates, with the mesh in context.

    Args:
      training: what to train.
      text: to train and to validate on.
      mesh: devices.
      path: of the file that gets every record, as a line of JSON.
      checkpoints: where the run is saved; at the end it always is.
      start: what to go on from.

    Every process of a run calls it, and runs the same steps; the first one shows the progress and keeps the log.

    Raises:
      CheckpointError: if a checkpoint cannot be written.
    """
    config, window = training.config, training.config.seq_len + 1
    own, first = own_rows(mesh, config.batch_size), jax.process_index() == 0

    def batch(step: int) -> jax.Array:
        rows = data.batch(text.train, seed=config.seed, step=step, rows=config.batch_size, window=window, part=own)
        return spread(rows, mesh, config.batch_size)

    done, policy_state = (0, None) if start is None else (start.step, start.policy_state)
    runner = StepRunner(
        training.step,
        from_config(config.policy),
        training.spec,
        lag=config.lag,
        policy_state=policy_state,
        first_step=done,
    )
    error: CapacityOverflowError | OSError | None = None
    records = [Record(**entry) for entry in cut_log(path, done)] if first else []
    file = path if first else Path(os.devnull)
    with stop_on_signal() as stop, file.open("a", buffering=1, encoding="utf-8") as lines:
        if first:
            print("compiling ...", file=sys.stderr)
        started = time.perf_counter()
        state = training.init(mesh) if start is None else start.state
        runner.compile(state, batch(0))
        wait_for_all()
        compile_seconds = time.perf_counter() - started

        interval = 0.1 if sys.stderr.isatty() else 10.0  # a log file wants few lines
        bar = tqdm(
            total=config.steps,
            initial=done,
            unit="step",
            mininterval=interval,
            dynamic_ncols=True,
            disable=not first,
        )
        with bar:
            last = time.perf_counter()

            def log(reports: Iterable[StepReport]) -> None:
                nonlocal last
                for report in reports:
                    now = time.perf_counter()
                    records.append(record(training, report, now - last))
                    last = now
                    lines.write(json.dumps(records[-1]._asdict()) + "\n")
                    bar.set_postfix_str(progress(training, records), refresh=False)
                    bar.update()

            def save(checkpoints: Checkpointer) -> None:
                log(runner.drain())
                if first:
                    os.fsync(lines.fileno())  # a checkpoint never knows of a step that the log does not
                checkpoints.save(runner, data={"next_batch": runner.submitted}, config=identity(config, text))

            runner.start(state)
            try:
                for step in range(done, config.steps):
                    if stop.before_next_step():
                        break
                    log(runner.submit(batch(step)))
                    if checkpoints is not None and checkpoints.due(runner.submitted):
                        save(checkpoints)
                log(runner.drain())
            except (CapacityOverflowError, OSError) as stopper:
                error = stopper
                log(runner.drain())  # steps that were done before it
            if checkpoints is not None and runner.submitted:
                save(checkpoints)
                checkpoints.wait()
        early = stop.agreed or error is not None
        evaluator = EvalRunner(training.eval_step)
        validation_loss = None if early else evaluate(evaluator, training, text, mesh, runner.state)
        saved = 0 if checkpoints is None else max(checkpoints.steps, default=0)
        return Result(records, validation_loss, runner.executables, compile_seconds, stop.signal, error, saved)


def record(training: Training, report: StepReport, seconds: float) -> Record:
    """What a report says, on the host. The step has finished, so this waits for nothing."""
    metrics = jax.device_get(report.metrics)
    config, dropless = training.config, training.spec.dropless
    first = report.rejected[0].capacity if report.rejected else report.capacity
    assignments = config.layers * config.batch_size * config.seq_len * config.experts_per_tok
    return Record(
        step=report.step,
        loss=float(metrics["loss"]),
        aux_loss=float(metrics["aux_loss"]),
        grad_norm=float(metrics["grad_norm"]),
        demand=report.demand,
        slots=first.slots or dropless,
        final_slots=report.capacity.slots or dropless,
        overflow=report.overflow,
        retries=len(report.rejected),
        dropped=int(metrics["dropped"]) / assignments,
        seconds=seconds,
        skipped=report.skipped,
    )


def progress(training: Training, records: list[Record]) -> str:
    """The end of the progress line."""
    recent = records[-10:]
    return (
        f"loss {records[-1].loss:.3f}, {tokens_per_second(training, recent):,.0f} tokens/s, "
        f"factor {training.spec.factor(records[-1].slots):.4g}, overflows {sum(r.overflow for r in records)}, "
        f"retries {sum(r.retries for r in records)}"
    )


def tokens_per_second(training: Training, records: list[Record]) -> float:
    """Tokens of accepted steps over the time they took, retries included."""
    tokens = len(records) * training.config.batch_size * training.config.seq_len
    return tokens / sum(record.seconds for record in records)


def evaluate(evaluator: EvalRunner, training: Training, text: data.Text, mesh: Mesh, state: TrainState) -> float:
    """The mean loss on the validation text, in nats per byte, at the evaluator's capacity: dropless."""
    config = training.config
    own, window = own_rows(mesh, config.rows), config.seq_len + 1
    batches = data.validation_batches(
        text.validation, batches=config.eval_batches, rows=config.rows, window=window, part=own
    )
    reports = evaluator.run(state, (spread(rows, mesh, config.rows) for rows in batches))
    losses = [float(report.metrics["loss"]) for report in reports]
    return sum(losses) / len(losses)
