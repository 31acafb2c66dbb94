"""The wheel: what it holds, and that it works where the repository is not."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("moe_blocks", "policies")


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    """Runs the interpreter of the tests with ``command``; returns what it prints."""
    result = subprocess.run(
        [sys.executable, *command], cwd=cwd, env=os.environ | env, capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: setuptools builds inside the tree, and what an earlier build left there would go in too."""
    source = tmp_path_factory.mktemp("source") / "repo"
    shutil.copytree(
        ROOT, source, ignore=shutil.ignore_patterns(".*", "runs", "build", "dist", "*.egg-info", "__pycache__")
    )
    out = source.parent / "dist"
    run(
        "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", out, source, cwd=out.parent
    )
    (path,) = out.glob("*.whl")
    return path


def test_wheel_holds_the_two_typed_packages_and_nothing_else(wheel: Path) -> None:
    metadata = configparser.ConfigParser()
    metadata.read(ROOT / "setup.cfg")
    version = metadata["metadata"]["version"]
    assert wheel.name == f"moe_blocks-{version}-py3-none-any.whl"

    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for pattern in ("*.py", "py.typed")
        for path in (ROOT / package).rglob(pattern)
    }
    assert {f"{package}/py.typed" for package in PACKAGES} <= sources
    info = f"moe_blocks-{version}.dist-info/"
    assert {name for name in names if not name.startswith(info)} == sources
    assert f"{info}licenses/LICENSE" in names


def test_wheel_works_outside_the_repository(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    run("-m", "pip", "install", "--quiet", "--no-deps", "--target", site, wheel, cwd=tmp_path)
    code = (
        "import importlib.metadata, moe_blocks, policies\n"
        "spec = moe_blocks.CapacitySpec(tokens_per_rank=64, num_experts=8, num_experts_per_tok=2, ep_size=4)\n"
        "policy = policies.from_config({'name': 'retry_dropless', 'factor': 1.25})\n"
        "print(moe_blocks.__file__, policies.__file__, policy.capacity(policy.init(spec)).slots)\n"
    )
    assert run("-c", code, cwd=tmp_path, PYTHONPATH=str(site)).split() == [
        str(site / "moe_blocks" / "__init__.py"),
        str(site / "policies" / "__init__.py"),
        "160",
    ]
