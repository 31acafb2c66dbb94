"""The Mixtral and Qwen3-MoE blocks of Hugging Face ``transformers`` (5 or newer) on torch, for `protocol`.

Each with the implementations of the experts that ``transformers`` has for a CPU: eager, a loop over the experts, and
``grouped_mm``, torch's grouped product.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np
import torch  # type: ignore[import-not-found, unused-ignore]
import transformers  # type: ignore[import-not-found, unused-ignore]
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock  # type: ignore[import-not-found, unused-ignore]
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock  # type: ignore[import-not-found, unused-ignore]

from benchmarks.peers.protocol import serve

IMPLEMENTATIONS = ("eager", "grouped_mm")


def mixtral(width: int, expert_width: int, experts: int, k: int) -> torch.nn.Module:
    """Mixtral's block: softmax over all experts, the k largest scores divided by their sum."""
    return MixtralSparseMoeBlock(
        transformers.MixtralConfig(
            hidden_size=width, intermediate_size=expert_width, num_local_experts=experts, num_experts_per_tok=k
        )
    )


def qwen3(width: int, expert_width: int, experts: int, k: int) -> torch.nn.Module:
    """Qwen3's block, told to divide likewise."""
    return Qwen3MoeSparseMoeBlock(
        transformers.Qwen3MoeConfig(
            hidden_size=width,
            moe_intermediate_size=expert_width,
            num_experts=experts,
            num_experts_per_tok=k,
            norm_topk_prob=True,
        )
    )


BLOCKS = {"mixtral": mixtral, "qwen3": qwen3}


class Torch:
    """One block on a problem."""

    def __init__(self, block: torch.nn.Module, implementation: str, arrays: Mapping[str, np.ndarray], dtype: str):
        self._dtype = getattr(torch, dtype)
        self._block = block.to(self._dtype)
        block.experts.config._experts_implementation = implementation
        self._gate, self._inward, self._outward = (
            block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj
        )  # fmt: skip
        with torch.no_grad():
            self._gate.copy_(torch.tensor(arrays["gate"].T))
            both = np.concatenate([arrays["wi_0"], arrays["wi_1"]], axis=-1)
            self._inward.copy_(torch.tensor(both.swapaxes(1, 2)))
            self._outward.copy_(torch.tensor(arrays["wo"].swapaxes(1, 2)))
        self._x = torch.tensor(arrays["x"], dtype=self._dtype, requires_grad=True)
        self._cotangent = torch.tensor(arrays["cotangent"], dtype=self._dtype)

    def time(self, mode: str) -> float:
        """Seconds of one run. Gradients are not accumulated: each run writes new ones, as a jax program does."""
        self._block.zero_grad(set_to_none=True)
        self._x.grad = None
        with torch.set_grad_enabled(mode != "forward"):
            started = time.perf_counter()
            self._output = self._block(self._x)
            if mode != "forward":
                self._output.backward(self._cotangent)
            return time.perf_counter() - started

    def results(self) -> dict[str, np.ndarray]:
        self.time("forward+backward")
        wi_0, wi_1 = np.split(_numpy(self._inward.grad).swapaxes(1, 2), 2, axis=-1)
        return {
            "output": _numpy(self._output),
            "x": _numpy(self._x.grad),
            "gate": _numpy(self._gate.grad).T,
            "wi_0": wi_0,
            "wi_1": wi_1,
            "wo": _numpy(self._outward.grad).swapaxes(1, 2),
        }


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().float().numpy()


def build(arrays: Mapping[str, np.ndarray], dtype: str, k: int) -> dict[str, Torch]:
    """Every block with every implementation."""
    experts, width, expert_width = arrays["wi_0"].shape
    return {
        f"{name} {implementation}": Torch(make(width, expert_width, experts, k), implementation, arrays, dtype)
        for name, make in BLOCKS.items()
        for implementation in IMPLEMENTATIONS
    }


if __name__ == "__main__":
    torch.manual_seed(0)
    serve(build, {"torch": torch.__version__, "transformers": transformers.__version__})
