"""The training step and the evaluation step: pure functions of a state and a batch."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree, UInt8

from examples.train_lm.config import Config
from examples.train_lm.mesh import AXES
from examples.train_lm.model import LanguageModel, LMOutput
from moe_blocks import Capacity, CapacitySpec, MoEBlock, Router, update_expert_bias
from policies import accumulate

# Logical axes of the parameters that are spread over the mesh; all others are whole on every device.
SHARDED = (("expert", "expert"),)


class TrainState(NamedTuple):
    """All that a training step changes.

    Attributes:
      step: int32 scalar, optimiser steps done.
      params: of the model.
      moe_state: the expert bias of every layer, where there is one; not trained by gradient.
      opt_state: of the optimiser.
    """

    step: Int[Array, ""]
    params: PyTree
    moe_state: PyTree
    opt_state: PyTree


@dataclasses.dataclass(frozen=True)
class Training:
    """A model and its optimiser, with the functions that train and evaluate it.

    Attributes:
      config: of the run.
      model: the language model.
      optimizer: of its parameters.
      spec: sizes of its MoE layers on the mesh.
    """

    config: Config
    model: LanguageModel
    optimizer: optax.GradientTransformation
    spec: CapacitySpec

    @classmethod
    def of(cls, config: Config) -> Training:
        """Builds it for the mesh in context.

        Raises:
          ValueError: if the mesh cannot divide the batch, or the numbers of the model do not fit together.
        """
        moe: dict[str, Any] = {
            "num_experts": config.experts,
            "num_experts_per_tok": config.experts_per_tok,
            "intermediate_size": config.expert_width,
            "router": Router(expert_bias=config.expert_bias_rate > 0),
            "aux_loss_coeff": config.aux_loss_coeff,
            "expert_axis": "expert",
            "batch_axes": AXES,
        }
        devices = jax.sharding.get_abstract_mesh().size
        if config.rows % devices:
            raise ValueError(
                f"batch_size={config.batch_size} in micro_batches={config.micro_batches} gives {config.rows} sequences "
                f"at once, which the {devices} devices cannot share; make batch_size a multiple of "
                f"{devices * config.micro_batches}"
            )
        spec = MoEBlock(**moe).capacity_spec((config.rows, config.seq_len, config.width))
        rate = optax.warmup_cosine_decay_schedule(
            0.0, config.learning_rate, config.warmup_steps, max(config.steps, config.warmup_steps + 1)
        )
        optimizer = optax.chain(
            optax.clip_by_global_norm(config.clip_norm),
            optax.adamw(rate, b2=0.95, weight_decay=config.weight_decay, mask=_are_matrices),
        )
        return cls(config, LanguageModel(config.layers, config.width, config.heads, moe), optimizer, spec)

    def abstract(self, mesh: Mesh) -> TrainState:
        """Shapes, dtypes and places: experts, and what the optimiser keeps of them, over the expert axis."""
        boxed = jax.eval_shape(self._boxed, jax.random.key(0))
        shardings = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, SHARDED)
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            nn.unbox(boxed),
            shardings,
        )

    def init(self, mesh: Mesh) -> TrainState:
        """The state before the first step."""
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract(mesh))
        make = jax.jit(lambda key: nn.unbox(self._boxed(key)), out_shardings=shardings)
        return make(jax.random.key(self.config.seed))

    def _boxed(self, key: PRNGKeyArray) -> TrainState:
        """The first state, the parameters with the names of their axes."""
        text = jnp.zeros((self.config.rows, self.config.seq_len), jnp.uint8)
        variables = self.model.init(key, text, capacity=Capacity(slots=None))
        params = variables["params"]
        return TrainState(jnp.zeros((), jnp.int32), params, variables.get("moe_state", {}), self.optimizer.init(params))

    def step(
        self, state: TrainState, batch: UInt8[Array, "rows window"], *, capacity: Capacity
    ) -> tuple[TrainState, Int[Array, "layers buffers"], dict[str, Array]]:
        """One optimiser step.

        Args:
          state: before it.
          batch: uint8 ``[batch_size, seq_len + 1]``.
          capacity: of the MoE layers; static.

        Returns:
          ``(new_state, total_recv_tokens, metrics)``. Metrics: ``loss``, nats per byte without the ``aux_loss``
          beside it; ``grad_norm``; ``dropped``, int32, assignments of all layers that were not served.
        """

        def objective(params: PyTree, text: Array) -> tuple[Array, tuple[Array, dict[str, Array]]]:
            variables = {"params": params, "moe_state": state.moe_state}
            out, seen = self.model.apply(variables, text[:, :-1], capacity=capacity, mutable="moe_metrics")
            loss = next_byte_loss(out.logits, text[:, 1:])
            moe = seen["moe_metrics"]["layers"]["moe"]
            metrics = {"loss": loss, "aux_loss": out.aux_loss, "dropped": moe["dropped"].sum(), "load": moe["load"]}
            return loss + out.aux_loss, (out.total_recv_tokens, metrics)

        def micro_step(text: Array) -> tuple[PyTree, Array, dict[str, Array]]:
            grads, (total_recv_tokens, metrics) = jax.grad(objective, has_aux=True)(state.params, text)
            return grads, total_recv_tokens, metrics

        grads, total_recv_tokens, metrics = accumulate(micro_step, batch, num_micro_batches=self.config.micro_batches)
        load = metrics.pop("load")
        updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        # Once per optimiser step, by the counts of all micro-batches before any drop.
        move = jax.vmap(lambda bias, load: update_expert_bias(bias, load, rate=self.config.expert_bias_rate))
        moe_state = jax.tree.map(lambda bias: move(bias, load), state.moe_state)
        metrics["grad_norm"] = optax.tree.norm(grads)
        return TrainState(state.step + 1, params, moe_state, opt_state), total_recv_tokens, metrics

    def eval_step(
        self, state: TrainState, batch: UInt8[Array, "rows window"], *, capacity: Capacity
    ) -> tuple[Int[Array, "layers buffers"], dict[str, Array]]:
        """The loss on a batch, in nats per byte. No router loss is in it: what counts is the prediction."""
        variables = {"params": state.params, "moe_state": state.moe_state}
        out = cast(LMOutput, self.model.apply(variables, batch[:, :-1], capacity=capacity))
        return out.total_recv_tokens, {"loss": next_byte_loss(out.logits, batch[:, 1:])}


def next_byte_loss(logits: Float[Array, "rows tokens 256"], text: UInt8[Array, "rows tokens"]) -> Float[Array, ""]:
    """Mean cross-entropy of the bytes that come next, in nats per byte."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, text.astype(jnp.int32)).mean()


def _are_matrices(params: PyTree) -> PyTree:
    """What the weight decay acts on: norm scales, one vector per layer, are left alone."""
    return jax.tree_util.tree_map_with_path(lambda path, _: "norm" not in jax.tree_util.keystr(path), params)
