"""The notebooks: each runs from top to bottom, says the same as its text file, and carries no stale output.

What they claim they assert themselves, so running them is the test.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import jupytext
import nbformat
import pytest
from ipykernel.kernelspec import write_kernel_spec
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode

import moe_blocks

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
COLAB = "https://colab.research.google.com/github/moe-blocks/moe-blocks/blob/main/notebooks"
DEVICES = "--xla_force_host_platform_device_count=8"
STARTS_JAX = r"^\s*(import|from) (jax|flax|optax|moe_blocks|policies)\b"
MAX_LINES = 25  # of a code cell: what a reader can take in at once
CELL_SECONDS = 120  # a guard against a cell that hangs; none takes a tenth of it on an idle machine

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path: Path) -> NotebookNode:
    return nbformat.read(path, as_version=4)


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    """Never none."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert cells
    return cells


def first(pattern: str, cells: list[NotebookNode]) -> int:
    """Number of the first code cell that matches."""
    return next(number for number, cell in enumerate(cells) if re.search(pattern, cell.source, re.MULTILINE))


def execute(notebook: NotebookNode, folder: Path) -> None:
    """Runs a notebook in ``folder`` on this interpreter, whatever kernels the machine has installed."""
    specs = folder / "kernels"
    write_kernel_spec(specs / "this")
    manager = AsyncKernelManager(
        kernel_name="this", kernel_spec_manager=KernelSpecManager(kernel_dirs=[str(specs)], ensure_native_kernel=False)
    )
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
        # Compiling is most of the time, so what one run compiled is kept for the next, as in conftest.py.
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    del env["XLA_FLAGS"]  # the notebook has to ask for its devices itself
    client = NotebookClient(notebook, km=manager, timeout=CELL_SECONDS, resources={"metadata": {"path": str(folder)}})
    client.execute(env=env, cleanup_kc=True)  # a manager that the client did not make itself would be left running


def test_the_notebooks_are_found() -> None:
    assert [path.name for path in NOTEBOOKS] == ["01_quickstart.ipynb", "02_policies.ipynb"]


@every_notebook
def test_runs_from_top_to_bottom(path: Path, tmp_path: Path) -> None:
    notebook = read(path)
    execute(notebook, tmp_path)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs), "no figure was drawn"
    assert not [output.text for output in outputs if output.get("name") == "stderr"], "a reader would see warnings"
    assert [entry.name for entry in tmp_path.iterdir()] == ["kernels"], "it wrote files"


def test_a_failing_cell_fails_the_run(tmp_path: Path) -> None:
    """The positive control of the test above."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("assert 1 + 1 == 3, 'not so'")])
    with pytest.raises(CellExecutionError, match="not so"):
        execute(notebook, tmp_path)


@every_notebook
def test_text_file_is_in_sync(path: Path) -> None:
    text = jupytext.read(path.with_suffix(".py"))
    pairs = [[(cell.cell_type, cell.source) for cell in notebook.cells] for notebook in (read(path), text)]
    assert pairs[0] == pairs[1], "run `make notebooks`"


@every_notebook
def test_stores_no_output(path: Path) -> None:
    notebook = read(path)
    for cell in code_cells(notebook):
        assert (cell.outputs, cell.execution_count) == ([], None)
        assert "execution" not in cell.metadata  # time stamps
    assert set(notebook.metadata) <= {"jupytext", "kernelspec", "language_info"}


@every_notebook
def test_opens_with_its_badge(path: Path) -> None:
    badge, title = read(path).cells[0].source.split("\n\n")[:2]
    assert badge.endswith(f"({COLAB}/{path.name})")
    assert title.startswith("# ")


@every_notebook
def test_asks_for_the_devices_before_jax_starts(path: Path) -> None:
    cells = code_cells(read(path))
    assert first(DEVICES, cells) < first(STARTS_JAX, cells)


@every_notebook
def test_installs_the_package_only_where_it_is_missing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []

    def install(command: list[str], *, check: bool) -> None:
        commands.append(command)
        monkeypatch.setitem(sys.modules, "moe_blocks", moe_blocks)

    monkeypatch.setattr(subprocess, "run", install)
    cells = code_cells(read(path))
    code = cells[first(r"except ImportError", cells)].source
    exec(code, {})
    assert not commands
    monkeypatch.setitem(sys.modules, "moe_blocks", None)  # makes its import fail
    exec(code, {})
    assert [command[:4] for command in commands] == [[sys.executable, "-m", "pip", "install"]]
    assert "moe-blocks[train] @ git+" in commands[0][-1]


@every_notebook
def test_cells_are_short_and_hyperparameters_are_forms(path: Path) -> None:
    cells = code_cells(read(path))
    assert max(len(cell.source.splitlines()) for cell in cells) <= MAX_LINES
    forms = next(cell for cell in cells if "@param" in cell.source)
    assert all(re.fullmatch(r"[A-Z_]+ = [\d.]+  # @param \{type:\"\w+\"\}", line) for line in forms.source.splitlines())
