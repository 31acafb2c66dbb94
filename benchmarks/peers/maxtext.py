"""MaxText's ``RoutedMoE`` (maxtext 0.2.5) on jax, for `protocol`.

Three of its ways through the experts: one-hot dispatch that drops at a capacity factor, every expert on every token,
and ``jax.lax.ragged_dot`` on sorted rows. Its Pallas kernels run interpreted on a CPU, so they do not take part.
"""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import maxtext  # type: ignore[import-not-found, unused-ignore]
import numpy as np
from flax import nnx
from maxtext.configs import pyconfig  # type: ignore[import-not-found, unused-ignore]
from maxtext.layers import initializers, moe  # type: ignore[import-not-found, unused-ignore]
from maxtext.utils import maxtext_utils  # type: ignore[import-not-found, unused-ignore]

from benchmarks.peers.protocol import serve

WAYS: dict[str, dict[str, Any]] = {
    "maxtext dropping 1.25": {"sparse_matmul": False, "capacity_factor": 1.25},
    "maxtext dense": {"sparse_matmul": False, "capacity_factor": -1.0},
    "maxtext ragged_dot": {"sparse_matmul": True, "megablox": False},
}


class RoutedMoE:
    """One way on a problem."""

    def __init__(self, way: Mapping[str, Any], arrays: Mapping[str, np.ndarray], dtype: str, k: int) -> None:
        experts, width, expert_width = arrays["wi_0"].shape
        config = pyconfig.initialize(
            ["", str(Path(maxtext.__file__).parent / "configs" / "base.yml")],
            run_name="benchmark",
            enable_checkpointing=False,
            log_config=False,
            base_emb_dim=width,
            base_mlp_dim=expert_width,
            base_moe_mlp_dim=expert_width,
            num_experts=experts,
            num_experts_per_tok=k,
            per_device_batch_size=arrays["x"].shape[0],
            max_target_length=arrays["x"].shape[1],
            dtype=dtype,
            weight_dtype=dtype,
            float32_gate_logits=True,  # as the other contestants
            **way,
        )
        mesh = jax.sharding.Mesh(maxtext_utils.create_device_mesh(config), config.mesh_axes)
        model = moe.RoutedMoE(
            config=config,
            num_experts=experts,
            num_experts_per_tok=k,
            mesh=mesh,
            kernel_init=initializers.nd_dense_init(1.0, "fan_in", "truncated_normal"),
            kernel_axes=("embed", None),
            rngs=nnx.Rngs(0),
            intermediate_dim=expert_width,
            weight_dtype=config.weight_dtype,
            dtype=config.dtype,
        )
        graph, _, *rest = nnx.split(model, nnx.Param, ...)

        def layer(params: Mapping[str, jax.Array], x: jax.Array) -> jax.Array:
            state = {"gate": {"kernel": params["gate"]}} | {name: params[name] for name in ("wi_0", "wi_1", "wo")}
            output, _, _ = nnx.merge(graph, nnx.State(jax.tree.map(nnx.Param, state)), *rest)(x)
            return output

        def both(params: Mapping[str, jax.Array], x: jax.Array, cotangent: jax.Array) -> Any:
            output, pullback = jax.vjp(layer, params, x)
            return output, pullback(cotangent)

        def forward(params: Mapping[str, jax.Array], x: jax.Array, cotangent: jax.Array) -> jax.Array:
            return layer(params, x)

        given = {name: jnp.asarray(array, dtype) for name, array in arrays.items()}
        self._arguments = ({n: given[n] for n in ("gate", "wi_0", "wi_1", "wo")}, given["x"], given["cotangent"])
        self._mesh = mesh
        with mesh:
            self._programs = {
                mode: jax.jit(function).lower(*self._arguments).compile()
                for mode, function in (("forward", forward), ("forward+backward", both))
            }

    def time(self, mode: str) -> float:
        """Seconds of one run."""
        started = time.perf_counter()
        jax.block_until_ready(self._programs[mode](*self._arguments))
        return time.perf_counter() - started

    def results(self) -> dict[str, np.ndarray]:
        """Output and gradients."""
        output, (grads, d_x) = self._programs["forward+backward"](*self._arguments)
        arrays = {"output": output, "x": d_x} | dict(grads)
        return {name: np.asarray(array).astype(np.float32) for name, array in arrays.items()}


def build(arrays: Mapping[str, np.ndarray], dtype: str, k: int) -> dict[str, RoutedMoE]:
    """Every way."""
    return {name: RoutedMoE(way, arrays, dtype, k) for name, way in WAYS.items()}


if __name__ == "__main__":
    serve(build, {"maxtext": importlib.metadata.version("maxtext"), "with its own jax": jax.__version__})
