"""The dependency arrow, ``policies -> moe_blocks.capacity``, and strategies that nobody asks for their class."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("moe_blocks", "policies")
# What one file may import beyond its package's own: an optional dependency.
OPTIONAL = {"checkpoints.py": {"orbax.checkpoint"}}
STRATEGIES = {"CapacityPolicy", "Router"}  # and all that derive from them


def sources(package: str) -> dict[Path, ast.Module]:
    """The parsed files of a package; never none."""
    trees = {path: ast.parse(path.read_text(), str(path)) for path in sorted((ROOT / package).rglob("*.py"))}
    assert trees, f"no sources in {ROOT / package}"
    return trees


def imports(tree: ast.Module, package: str) -> Iterator[str]:
    """Absolute names of all modules that a file of ``package`` imports, wherever the statement stands.

    ``from a import b`` yields ``a.b``: the file cannot tell whether ``b`` is a module.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(filter(None, (package if node.level else "", node.module)))
            yield from (f"{base}.{alias.name}" for alias in node.names)


def within(name: str, allowed: set[str]) -> bool:
    """Whether a dotted name is one of ``allowed`` or lies inside one."""
    return any(name == module or name.startswith(f"{module}.") for module in allowed)


def foreign(tree: ast.Module, package: str, allowed: set[str]) -> list[str]:
    """Imports that are neither the standard library's nor allowed."""
    return [name for name in imports(tree, package) if not within(name, allowed | sys.stdlib_module_names)]


def descendants(trees: list[ast.Module], roots: set[str]) -> set[str]:
    """``roots`` and the names of all classes that derive from them, directly or not."""
    bases = {
        node.name: {ast.unparse(base).rpartition(".")[2] for base in node.bases}
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    found = set(roots)
    while more := {name for name, parents in bases.items() if parents & found} - found:
        found |= more
    return found


def class_checks(tree: ast.Module, classes: set[str]) -> list[int]:
    """Lines that ask a value whether it is of one of ``classes``: isinstance, ``type(x) is C``, a class pattern."""

    def named(*nodes: ast.AST) -> bool:
        inner = [part for node in nodes for part in ast.walk(node)]
        return any(getattr(part, "id", getattr(part, "attr", None)) in classes for part in inner)

    lines = []
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name("isinstance"), args=[_, kind]) if named(kind):
                lines.append(node.lineno)
            case ast.Compare(left=ast.Call(func=ast.Name("type"))) if named(*node.comparators):
                lines.append(node.lineno)
            case ast.MatchClass() if named(node.cls):
                lines.append(node.cls.lineno)
    return lines


@pytest.mark.parametrize(
    ("package", "allowed"),
    [
        ("policies", {"policies", "moe_blocks.capacity", "jax", "jaxtyping", "numpy"}),
        ("moe_blocks", {"moe_blocks", "flax", "jax", "jaxtyping", "ml_dtypes", "numpy"}),
    ],
)
def test_imports_follow_the_arrow(package: str, allowed: set[str]) -> None:
    found = {
        path.name: names
        for path, tree in sources(package).items()
        if (names := foreign(tree, package, allowed | OPTIONAL.get(path.name, set())))
    }
    assert not found


def test_nothing_but_the_user_imports_the_checkpointer() -> None:
    """Its dependency is optional, so the packages work without it."""
    names = [name for package in PACKAGES for tree in sources(package).values() for name in imports(tree, package)]
    assert not [name for name in names if within(name, {"policies.checkpoints"})]
    assert "policies.runner.StepRunner" in names


def test_capacity_is_importable_without_jax() -> None:
    tree = sources("moe_blocks")[ROOT / "moe_blocks" / "capacity.py"]
    assert not foreign(tree, "moe_blocks", {"ml_dtypes", "numpy"})


def test_no_class_check_on_a_strategy() -> None:
    trees = {path: tree for package in PACKAGES for path, tree in sources(package).items()}
    strategies = descendants(list(trees.values()), STRATEGIES)
    assert strategies > STRATEGIES, "no policy derives from CapacityPolicy: the search looks for the wrong names"
    found = {path.name: lines for path, tree in trees.items() if (lines := class_checks(tree, strategies))}
    assert not found


def test_the_checks_find_what_they_look_for() -> None:
    bad = ast.parse(
        "import jax.numpy as jnp, flax.linen\n"
        "from .runner import StepRunner\n"
        "from moe_blocks import MoEBlock\n"
        "def f():\n"
        "    import optax\n"
        "class Mine(base.CapacityPolicy): pass\n"
        "class Yours(Mine): pass\n"
        "isinstance(x, int), isinstance(p, (int, policies.Yours)), type(p) is Mine, issubclass(p, Mine)\n"
        "match p:\n"
        "    case Mine(): pass\n"
    )
    assert foreign(bad, "policies", {"policies", "jax", "moe_blocks.capacity"}) == [
        "flax.linen",
        "moe_blocks.MoEBlock",
        "optax",
    ]
    assert descendants([bad], STRATEGIES) == {*STRATEGIES, "Mine", "Yours"}
    assert class_checks(bad, {"Mine", "Yours"}) == [8, 8, 10]
