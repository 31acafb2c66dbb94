"""All or nothing: the new state of a step, or the old one, chosen leaf by leaf inside the compiled step.

The choice ``where(commit, new, old)`` could follow the step. But then a new leaf that the rest of the step
still reads (Adam's moments, by the parameter update) has two readers, the compiler computes it twice, and
the old leaf must be copied before it can be overwritten: on CPU a copy of most of the state, in memory and
in time. So the choice is made right where a leaf is computed, and the rest of the step reads the chosen
value. It is the same value in a step that is committed, and of a step that is not nothing is kept.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.core import DropVar, Jaxpr, JaxprEqn, Literal, Var
from jaxtyping import PyTree

from policies.base import Verdict

# step(state, batch, *, capacity) -> (new_state, total_recv_tokens, metrics)
Step: TypeAlias = Callable[..., tuple[Any, Any, Any]]
STEP = "step must return (new_state, total_recv_tokens, metrics)"


def run_and_commit(
    step: Callable[[Any, Any], tuple[Any, Any, Any]], decide: Callable[[Any], Verdict], state: Any, batch: Any
) -> tuple[Any, Any, Any, Verdict]:
    """Evaluates a step and keeps its new state only if its evidence, such as its demand, is accepted.

    Args:
      step: pure, ``step(state, batch) -> (new_state, evidence, metrics)``; traced once.
      decide: whether to commit. The evidence, any pytree of arrays, is evaluated before all else in the step, then
        this is called. If it returns Python True, the step is evaluated as it is.
      state: any pytree of arrays.
      batch: any pytree of arrays.

    Returns:
      ``(state, evidence, metrics, commit)``. Unless the step was committed, metrics that are computed from the new
      state are of the old one instead.

    Raises:
      ValueError: if the step does not return its three values, or changes the structure, a shape or a dtype
        of the state.

    Example:
      >>> def step(state, batch):
      ...     return {"sum": state["sum"] + batch}, batch, {}
      >>> def small(demand):
      ...     return demand < 4
      >>> run_and_commit(step, small, {"sum": jnp.array(1)}, jnp.array(3))[0]["sum"].item()
      4
      >>> run_and_commit(step, small, {"sum": jnp.array(1)}, jnp.array(5))[0]["sum"].item()
      1
    """
    traced, shapes = jax.make_jaxpr(step, return_shape=True)(state, batch)
    new_state, evidence, metrics = unpack(shapes, STEP)
    check_same_layout(jax.eval_shape(lambda old: old, state), new_state)
    program: Jaxpr = traced.jaxpr
    old, inputs = jax.tree.leaves(state), jax.tree.leaves((state, batch))
    ends = len(old), len(old) + len(jax.tree.leaves(evidence))
    new, judged, told = program.outvars[: ends[0]], program.outvars[ends[0] : ends[1]], program.outvars[ends[1] :]
    values = dict(zip([*program.constvars, *program.invars], [*traced.consts, *inputs], strict=True))

    def read(atoms: list[Any]) -> list[Any]:
        return [atom.val if isinstance(atom, Literal) else values[atom] for atom in atoms]

    def choose(value: Any, before: Any) -> Any:
        return value if commit is True else jnp.where(commit, value, before)

    first, rest = _split(program, judged)
    for equation in first:
        values |= _evaluate(program, equation, values)
    evidence = jax.tree.unflatten(jax.tree.structure(evidence), read(judged))
    commit = decide(evidence)

    # A leaf that is known by now, or stands in several places, is chosen at the end.
    uses = collections.Counter(map(id, new))
    early = {
        atom: before
        for atom, before in zip(new, old, strict=True)
        if isinstance(atom, Var) and atom not in values and uses[id(atom)] == 1
    }
    for equation in rest:
        computed = _evaluate(program, equation, values)
        values |= {var: choose(value, early[var]) if var in early else value for var, value in computed.items()}
    leaves = [
        value if isinstance(atom, Var) and atom in early else choose(value, before)
        for atom, value, before in zip(new, read(new), old, strict=True)
    ]
    state = jax.tree.unflatten(jax.tree.structure(new_state), leaves)
    return state, evidence, jax.tree.unflatten(jax.tree.structure(metrics), read(told)), commit


def _split(program: Jaxpr, wanted: list[Any]) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
    """The equations that ``wanted`` is computed from, and all others. Side effects keep their order."""
    needed = {atom for atom in wanted if isinstance(atom, Var)}
    first: list[JaxprEqn] = []
    rest: list[JaxprEqn] = []
    for equation in reversed(program.eqns):
        if needed & {*equation.outvars} or (first and equation.effects):
            needed |= {atom for atom in equation.invars if isinstance(atom, Var)}
            first.append(equation)
        else:
            rest.append(equation)
    return first[::-1], rest[::-1]


def _evaluate(program: Jaxpr, equation: JaxprEqn, values: dict[Var, Any]) -> dict[Var, Any]:
    """What one equation of a traced program computes. Its named scopes and source lines are kept."""
    inputs = list(dict.fromkeys(atom for atom in equation.invars if isinstance(atom, Var)))
    outputs = [variable for variable in equation.outvars if not isinstance(variable, DropVar)]
    alone = program.replace(constvars=[], invars=inputs, outvars=outputs, eqns=[equation], effects=equation.effects)
    return dict(zip(outputs, jax.core.eval_jaxpr(alone, (), *(values[v] for v in inputs)), strict=True))


def unpack(outputs: Any, wanted: str) -> tuple[Any, ...]:
    """What a step returned, if it is a tuple as ``wanted`` spells it; else a ``ValueError`` that says so."""
    if not isinstance(outputs, tuple) or len(outputs) != wanted.count(",") + 1:
        found = f"a tuple of {len(outputs)}" if isinstance(outputs, tuple) else f"a {type(outputs).__name__}"
        raise ValueError(f"{wanted}, got {found}")
    return outputs


def check_same_layout(old: PyTree, new: PyTree) -> None:
    """Raises a ``ValueError`` that names the first leaf whose path, shape or dtype differs."""
    before, after = (_paths(tree) for tree in (old, new))
    for path in sorted(before.keys() ^ after.keys()):
        which = "lost" if path in before else "added"
        raise ValueError(f"step {which} the leaf state{path}; new_state must have the tree structure of state")
    for path, leaf in before.items():
        if (was := _describe(leaf)) != (now := _describe(after[path])):
            raise ValueError(
                f"step turned state{path} from {was} into {now}; new_state must keep the shapes and dtypes of state, "
                "cast it back with astype"
            )
    structures = jax.tree.structure(old), jax.tree.structure(new)
    if structures[0] != structures[1]:  # type: ignore[operator]  # equal paths, but a list for a tuple
        raise ValueError("step turned the tree structure of state from {} into {}; keep it".format(*structures))


def _paths(tree: PyTree) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _describe(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"
