"""`moe_blocks.MoEBlock`: dropless, at a capacity, or with another implementation of the grouped product."""

from __future__ import annotations

import jax

from benchmarks.peers.compiled import MODES, Compiled, Layer, Params
from benchmarks.peers.problem import Problem, Shape, keep_by_position
from moe_blocks import Capacity, MoEBlock, Router


def block(shape: Shape, *, scope: str = "rank", implementation: str | None = None) -> MoEBlock:
    """The block of this shape, with the router that all contestants have."""
    return MoEBlock(
        shape.experts,
        shape.k,
        shape.expert_width,
        router=Router(norm_topk_prob=True),
        capacity_scope=scope,
        implementation=implementation,
    )


def layer(moe: MoEBlock, capacity: Capacity) -> Layer:
    """The block as a function of flat parameters."""

    def apply(params: Params, x: jax.Array) -> jax.Array:
        tree = {name: value for name, value in params.items() if name != "gate"}
        output, *_ = moe.apply({"params": tree | {"gate": {"kernel": params["gate"]}}}, x, capacity=capacity)
        return output

    return apply


def dropless(
    problem: Problem,
    name: str = "moe_blocks dropless",
    *,
    implementation: str | None = None,
    modes: tuple[str, ...] = MODES,
) -> Compiled:
    """The contestant that serves every assignment."""
    moe = block(problem.shape, implementation=implementation)
    return Compiled(name, layer(moe, Capacity(None)), problem, modes=modes)


def capped(problem: Problem, factor: float, scope: str, *, modes: tuple[str, ...] = MODES) -> Compiled:
    """The contestant with buffers of ``factor`` times the balanced size."""
    moe = block(problem.shape, scope=scope)
    slots = moe.capacity_spec(problem.shape.input_shape).slots(factor)
    keep = keep_by_position(slots, per_expert=scope == "expert")
    return Compiled(f"moe_blocks {scope} {factor:g}", layer(moe, Capacity(slots)), problem, keep=keep, modes=modes)
