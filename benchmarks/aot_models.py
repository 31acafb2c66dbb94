"""The programs that ``benchmarks.aot`` compiles: one MoE block, and a whole training step of several.

Nothing here holds a number: states and batches are shapes, dtypes and places on the mesh of a machine that need not be
there.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PyTree

from moe_blocks import Capacity, CapacitySpec, MoEBlock
from policies import RetryDropless
from policies.programs import Programs

AXES = ("data", "expert")
# Logical axes of the parameters that are spread over the mesh; all others are whole on every device.
SHARDED = (("expert", "expert"),)
ROLES = ("capped", "fallback")  # of the two programs of a retry
# What XLA must know of a GPU that is not there.
GPUS = {"h100": Path(__file__).with_name("h100.txtpb")}
# libtpu looks for the machine that it runs on, unless it is told of one, and keeps it to one process.
TPU_ENVIRONMENT = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
}


@dataclasses.dataclass(frozen=True)
class Model:
    """Sizes of a model.

    Attributes:
      width: D.
      expert_width: F.
      experts: E.
      experts_per_tok: k.
      tokens: on one device, one sequence.
      layers: of the training step.
      dtype: of activations and products.
      param_dtype: of parameters and optimiser.
      implementation: of the grouped product, named so that the tables tell it.
      collective: that takes tokens to their experts, likewise.
    """

    width: int = 1024
    expert_width: int = 2048
    experts: int = 32
    experts_per_tok: int = 4
    tokens: int = 4096
    layers: int = 2
    dtype: str = "bfloat16"
    param_dtype: str = "float32"
    implementation: str = "ragged_dot"
    collective: str = "ragged_all_to_all"

    def block(self, capacity: Capacity) -> MoEBlock:
        """One of its layers."""
        return MoEBlock(
            num_experts=self.experts,
            num_experts_per_tok=self.experts_per_tok,
            intermediate_size=self.expert_width,
            capacity=capacity,
            aux_loss_coeff=0.01,
            expert_axis="expert",
            batch_axes=AXES,
            implementation=self.implementation,
            collective=self.collective,
            dtype=jnp.dtype(self.dtype),
            param_dtype=jnp.dtype(self.param_dtype),
        )

    def spec(self, ep_size: int) -> CapacitySpec:
        """Sizes of a layer's buffers."""
        return CapacitySpec(self.tokens, self.experts, self.experts_per_tok, ep_size)

    def product_flops(self, rows: int) -> int:
        """Of one of the three products of gated experts on so many rows. Forward and backward have nine of them."""
        return 2 * rows * self.width * self.expert_width


class Layer(nn.Module):
    """Experts on the normalised residual."""

    block: Callable[[], MoEBlock]

    @nn.compact
    def __call__(self, x: Float[Array, "rows tokens D"], _: None) -> tuple[Array, tuple[Array, Array]]:
        out = self.block()(nn.RMSNorm(dtype=x.dtype)(x))
        return x + out.output, (out.aux_loss, out.total_recv_tokens)


class State(NamedTuple):
    """What a training step changes."""

    params: PyTree
    opt_state: PyTree


def stack(model: Model, capacity: Capacity) -> nn.Module:
    """The layers of a model, scanned, each computed again in the backward pass as large models do."""
    layers = nn.scan(nn.remat(Layer), variable_axes={"params": 0}, split_rngs={"params": True}, length=model.layers)
    return layers(partial(model.block, capacity))


OPTIMIZER = optax.adamw(1e-3)


def training_step(
    model: Model, state: State, batch: Float[Array, "rows tokens D"], *, capacity: Capacity
) -> tuple[State, Int[Array, "layers buffers"], dict[str, Array]]:
    """One step towards outputs of zero: what stands before and behind the layers of a real model is left out."""

    def objective(params: PyTree) -> tuple[Array, Array]:
        applied: Any = stack(model, capacity).apply({"params": params}, batch, None)
        out, (aux_losses, total_recv_tokens) = applied
        return jnp.square(out.astype(jnp.float32)).mean() + aux_losses.sum(), total_recv_tokens

    (loss, total_recv_tokens), grads = jax.value_and_grad(objective, has_aux=True)(state.params)
    updates, opt_state = OPTIMIZER.update(grads, state.opt_state, state.params)
    return State(optax.apply_updates(state.params, updates), opt_state), total_recv_tokens, {"loss": loss}


def forward_backward(
    model: Model, capacity: Capacity, variables: PyTree, x: Array, cotangent: Array
) -> tuple[Array, Array, PyTree, Array]:
    """One layer: output, demand, and the gradients of its parameters and its input."""

    def layer(variables: PyTree, x: Array) -> tuple[Array, Array]:
        out: Any = model.block(capacity).apply(variables, x)
        return out.output, out.total_recv_tokens

    output, pull_back, total_recv_tokens = jax.vjp(layer, variables, x, has_aux=True)
    return output, total_recv_tokens, *pull_back(cotangent)


def topology_mesh(name: str, *, experts: int, expert_parallel: int) -> Mesh:
    """The devices of a topology as a mesh of data x expert; no such machine is needed.

    Args:
      name: such as ``"v5p:2x2x1"`` for TPU, or ``"h100:8"`` for as many GPUs of one host.
      experts: E.
      expert_parallel: devices that share the experts, at most. The largest number that divides both is taken.

    Raises:
      ValueError: if no compiler knows the topology.
    """
    for key, value in TPU_ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    chip, _, size = name.partition(":")
    if chip in GPUS:
        asked: dict[str, Any] = {"platform": "cuda", "topology": f"1x1x{size}", "target_config": GPUS[chip].read_text()}
    else:
        asked = {"platform": "tpu", "topology_name": name}
    try:
        topology = topologies.get_topology_desc(**asked)
    except (jax.errors.JaxRuntimeError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            "topology must be one that a compiler knows, such as v5p:2x2x1 (libtpu) or h100:8 (jax's CUDA plugin); "
            f"got {name!r}: {reason}"
        ) from None
    devices = len(topology.devices)
    ep_size = max(n for n in range(1, expert_parallel + 1) if devices % n == 0 and experts % n == 0)
    return topologies.make_mesh(topology, (devices // ep_size, ep_size), AXES)


@dataclasses.dataclass(frozen=True)
class Case:
    """One program to compile.

    Attributes:
      part: ``"block"``, or ``"step"``, the training step.
      factor: of the capped buffers that it has, or in whose place it stands.
      role: ``"capped"``; ``"fallback"``, dropless in chunks; ``"layer"``, capped with further turns for what overflows;
        ``"dropless"``, in one piece. Of a step these are the programs of a runner; ``"plain"`` is the capped step under
        a bare jit, donated, and ``"kept"`` the same with the old state kept.
      capacity: what it is compiled for.
      compile: compiles it.
    """

    part: str
    factor: float
    role: str
    capacity: Capacity
    compile: Callable[[], jax.stages.Compiled]


def cases(model: Model, mesh: Mesh, factors: tuple[float, ...], parts: tuple[str, ...]) -> Iterator[Case]:
    """All programs of the parts, for the mesh in context."""
    rows = jax.ShapeDtypeStruct(
        (mesh.size, model.tokens, model.width), jnp.dtype(model.dtype), sharding=NamedSharding(mesh, P(AXES))
    )
    spec, dropless = model.spec(mesh.shape["expert"]), Capacity(slots=None)
    variables = _abstract(lambda x: model.block(dropless).init(jax.random.key(0), x), rows)

    def block(factor: float, role: str, capacity: Capacity) -> Case:
        layer = jax.jit(partial(forward_backward, model, capacity))
        return Case("block", factor, role, capacity, partial(_compile, layer, variables, rows, rows))

    for factor in factors:
        policy = RetryDropless(factor)
        capacities = policy.capacities(policy.init(spec))
        if "block" in parts:
            yield from (block(factor, role, capacity) for role, capacity in zip(ROLES, capacities, strict=False))
            yield block(factor, "layer", dataclasses.replace(capacities[0], on_overflow="recompute"))
        if "step" in parts:
            yield from _steps(model, factor, rows)
    if "block" in parts:
        yield block(spec.factor(spec.dropless), "dropless", dropless)


def _init(model: Model, x: Array) -> State:
    params = stack(model, Capacity(slots=None)).init(jax.random.key(0), x, None)["params"]
    return State(params, OPTIMIZER.init(params))


def _steps(model: Model, factor: float, batch: Any) -> Iterator[Case]:
    step, state = partial(training_step, model), _abstract(partial(_init, model), batch)
    mesh = batch.sharding.mesh
    for scope, roles in (("step", ROLES), ("layer", ("layer",))):
        policy = RetryDropless(factor, scope)
        capacities = policy.capacities(policy.init(model.spec(mesh.shape["expert"])))
        programs = Programs(step, policy, capacities, state, NamedSharding(mesh, P()))
        for role, capacity in zip(roles, capacities, strict=False):
            yield Case("step", factor, role, capacity, partial(programs.get, capacity, batch))
    capped = dataclasses.replace(capacity, on_overflow="drop")
    places = jax.tree.map(lambda leaf: leaf.sharding, state)
    bare = partial(jax.jit, partial(step, capacity=capped), out_shardings=(places, None, None))
    for role, jitted in (("plain", bare(donate_argnums=0)), ("kept", bare())):
        yield Case("step", factor, role, capped, partial(_compile, jitted, state, batch))


def _compile(jitted: Any, *args: Any) -> jax.stages.Compiled:
    return jitted.lower(*args).compile()


def _abstract(init: Callable[[Array], PyTree], x: Any) -> PyTree:
    """Shapes of what ``init`` returns, without boxes, where their logical axes put them on the mesh of ``x``."""
    boxed = jax.eval_shape(init, x)
    places = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), x.sharding.mesh, SHARDED)
    return jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), nn.unbox(boxed), places
    )
