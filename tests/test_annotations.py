"""The shapes and types in the signatures are true: the examples in the docstrings run with each call checked.

Not so the other tests, which also call with wrong values on purpose and expect the packages' own messages.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# PEP 484: an int is good where a float is asked for.
CHECKER = "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"


def run_examples(*packages: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs the docstrings' examples of ``packages`` in a process of its own, with their signatures checked."""
    # The hook is installed before pytest starts, which then warns that it came late to jaxtyping.
    options = ["-q", "--doctest-modules", "-W", "ignore::pytest.PytestAssertRewriteWarning", *packages]
    code = f"""
import sys, jaxtyping, pytest
jaxtyping.install_import_hook({packages}, {CHECKER!r})
sys.exit(pytest.main({options}))
"""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=240)


def test_examples_keep_to_the_annotations() -> None:
    result = run_examples("moe_blocks", "policies", cwd=ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_false_annotation_is_found(tmp_path: Path) -> None:
    (tmp_path / "wrong").mkdir()
    (tmp_path / "wrong" / "__init__.py").write_text(
        "import numpy as np\n"
        "from jaxtyping import Float\n"
        'def total(x: Float[np.ndarray, " width"]):\n'
        '    """>>> print(total(np.ones((2, 3))))\n    6.0\n    """\n'
        "    return x.sum()\n"
    )
    result = run_examples("wrong", cwd=tmp_path)
    assert result.returncode == 1
    assert "TypeCheckError" in result.stdout
