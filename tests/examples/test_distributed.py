"""Several processes on this machine as one run: the same training, the same decisions, and an end without a hang."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from examples.train_lm import distributed
from examples.train_lm.__main__ import main
from examples.train_lm.config import CONFIGS
from examples.train_lm.distributed import Processes, parse
from examples.train_lm.mesh import make_mesh
from tests.examples import tiny, worker

ROOT = Path(__file__).parents[2]
DEVICES = 8
LIMIT = 150.0  # seconds for all processes of a run, on a machine that is busy with other tests
HEARTBEAT = 10
TRAIN = [*tiny.ARGV, "--config", str(CONFIGS / "drop.yaml"), "policy.factor=0.125"]


class Run:
    """The processes of one scenario of the worker, on loopback."""

    def __init__(self, folder: Path, scenario: str, processes: int, *options: str) -> None:
        folder.mkdir()
        self.outputs = [folder / f"{i}.log" for i in range(processes)]
        environment = {
            **os.environ,
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES // processes}",
            "JAX_PLATFORMS": "cpu",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        command = [sys.executable, "-m", "tests.examples.worker", scenario, str(folder), str(processes - 1), *options]
        command += [f"coordinator=127.0.0.1:{free_port()}", f"num_processes={processes}"]
        self.processes = []
        for i, output in enumerate(self.outputs):
            with output.open("w") as log:
                self.processes.append(
                    subprocess.Popen([*command, f"process_id={i}"], cwd=ROOT, env=environment, stdout=log, stderr=log)
                )

    def codes(self, which: slice = slice(None)) -> list[int]:
        """The exit codes of the processes, which end within the limit."""
        until = time.monotonic() + LIMIT
        try:
            return [process.wait(max(until - time.monotonic(), 0)) for process in self.processes[which]]
        except subprocess.TimeoutExpired:
            pytest.fail(f"not done after {LIMIT} s\n{self.told()}")

    def told(self) -> str:
        """What all processes have said."""
        return "\n".join(f"--- process {i}\n{log.read_text()[-5000:]}" for i, log in enumerate(self.outputs))

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def free_port() -> int:
    """A port that was free a moment ago; the system hands it out again only after all others."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def started(*args: Any) -> Iterator[Run]:
    run = Run(*args)
    try:
        yield run
    finally:
        run.close()


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    mesh = make_mesh(experts=8, expert_parallel=4)
    with jax.set_mesh(mesh):
        training, found = worker.train(mesh)
        return found | {"evaluation": worker.evaluate(training, mesh)}


def test_only_one_half_of_the_rows_overflows(alone: dict[str, Any]) -> None:
    """The positive control of the test below: by themselves, the processes would not agree."""
    mesh = make_mesh(experts=8, expert_parallel=4)
    [crowded, *_] = worker.CROWDED
    demands = []
    with jax.set_mesh(mesh):
        params, slots = worker.init(mesh), worker.runner().policy_state.slots
        for half in np.split(worker.rows_of(crowded), 2):
            both = np.concatenate([half, half])
            demands.append(int(jax.jit(worker.BLOCK.apply)(params, both).total_recv_tokens.max()))
    assert demands[0] <= slots < demands[1]
    assert alone["attempts"] == [2 if step in worker.CROWDED else 1 for step in range(worker.STEPS)]


@pytest.mark.parametrize(("scenario", "processes"), [("states", 2), ("agree", 4)])
def test_processes_agree(tmp_path: Path, alone: dict[str, Any], scenario: str, processes: int) -> None:
    """Only the rows of some processes overflow, the last process is late, one is asked to stop.

    The two also evaluate shorter batches, of which the second one has no rows at all.
    """
    with started(tmp_path / "run", scenario, processes) as run:
        assert run.codes() == [0] * processes, run.told()
    found = [pickle.loads((tmp_path / "run" / str(i)).read_bytes()) for i in range(processes)]
    for one in found:
        for key in ("attempts", "demands"):
            assert one[key] == alone[key], key
        for key in {"losses", "evaluation"} & one.keys():
            assert one[key] == found[0][key], key
            # Float32 sums over processes have another order.
            assert one[key] == pytest.approx(alone[key], rel=1e-5), key
        assert one["stopped"] == found[0]["stopped"] > worker.FAULT
        for name, leaf in one["state"].items():
            here = ~np.isnan(leaf)
            assert here.any(), name
            np.testing.assert_allclose(leaf[here], alone["state"][name][here], rtol=1e-4, atol=1e-6, err_msg=name)
            other = found[0]["state"][name]
            both = here & ~np.isnan(other)
            np.testing.assert_array_equal(leaf[both], other[both], name)
            if "gate" in name or processes == 2:  # whole in every process
                assert both.all(), name


def test_the_number_of_processes_does_not_change_the_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TRAIN, f"out={tmp_path / 'alone'}"]) == 0
    [validation] = re.findall("validation loss +(.*)", capsys.readouterr().out)
    with started(tmp_path / "run", "train", 2, *TRAIN) as run:
        assert run.codes() == [0, 0], run.told()
    logs = [(tmp_path / folder / "steps.jsonl").read_text() for folder in ("alone", "run/0")]
    one, two = ([json.loads(line) for line in log.splitlines()] for log in logs)
    assert len(one) == len(two) == tiny.STEPS
    for key in ("loss", "grad_norm", "demand", "dropped"):
        assert [record[key] for record in two] == pytest.approx([record[key] for record in one], rel=1e-4), key
    assert one[0]["dropped"] > 0
    first, second = (log.read_text() for log in run.outputs)
    assert re.findall("validation loss +(.*)", first) == [validation]
    for said in ("devices   8 of cpu", "compiling", "step/s", "validation loss"):
        assert said in first
        assert said not in second
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"0", "0.log", "1.log"}
    assert (tmp_path / "run/0/run.png").exists()


def test_when_one_process_is_lost_the_others_end_with_an_error(tmp_path: Path) -> None:
    """Killed, frozen, and failed on its own; the limit is the check that nothing hangs."""
    with contextlib.ExitStack() as stack:
        runs = {
            fault: stack.enter_context(started(tmp_path / fault, fault, 2, f"heartbeat_seconds={HEARTBEAT}"))
            for fault in worker.FAULTS
        }
        for fault, run in runs.items():
            [survivor] = run.codes(slice(0, 1))
            assert survivor not in (0, -signal.SIGKILL), (fault, run.told())
            assert f"step {worker.FAULT - 2}\n" in run.outputs[0].read_text(), (fault, run.told())
        assert runs["killed"].codes()[1] == -signal.SIGKILL
        assert runs["frozen"].processes[1].poll() is None  # it hangs, so the heartbeat alone ended the other one
        assert runs["failed"].codes()[1] not in (0, -signal.SIGKILL)
        assert "the data is gone" in runs["failed"].told()


def test_alone_there_is_nothing_to_connect_to() -> None:
    Processes().connect()
    distributed.wait_for_all()
    assert not jax.distributed.is_initialized()


def test_options_on_processes_leave_the_others_alone() -> None:
    words = ["--coordinator", "host:1", "--num-processes", "2", "process_id=1", "--steps", "3", "policy.factor=1e-1"]
    processes, rest = parse(words)
    assert processes == Processes(coordinator="host:1", num_processes=2, process_id=1)
    assert rest == ["steps=3", "policy.factor=1e-1"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["distributed=yes"], "distributed must be 'auto' or 'none', got 'yes'"),
        (["num_processes=2"], r"go together, got {'num_processes': 2}; add \['coordinator', 'process_id'\]"),
        (["coordinator=host", "num_processes=2", "process_id=0"], "coordinator must be HOST:PORT .* got 'host'"),
        (["coordinator=host:1", "num_processes=two", "process_id=0"], "num_processes must be an integer"),
        (["coordinator=host:1", "num_processes=2", "process_id=2"], "process_id must be below num_processes=2, got 2"),
        (["heartbeat_seconds=0"], "heartbeat_seconds must be an integer of at least 1, got 0"),
    ],
)
def test_wrong_options_are_named(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(words)


def test_a_cluster_that_jax_does_not_find(monkeypatch: pytest.MonkeyPatch) -> None:
    def initialize(*_: Any, **__: Any) -> None:
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    with pytest.raises(ValueError, match="distributed='auto' found no other processes .* give coordinator"):
        Processes(distributed="auto").connect()
