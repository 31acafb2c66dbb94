"""What Flax Linen lacks here: logical axes that ask nothing, and a method as a pure function for ``shard_map``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
from flax import struct
from flax.core import lift
from flax.linen.transforms import lift_direct_transform

PyTree = Any


@struct.dataclass
class LogicalAxes(nn.LogicallyPartitioned):
    """Logical axis names of a parameter that ask nothing of the caller.

    Flax's own box wants ``metadata_params={nn.PARTITION_NAME: ...}`` from every ``nn.scan`` and ``nn.vmap``, and a mesh
    from ``nnx.bridge.ToNNX``. With this one the axis of a transformation stays unnamed, so unsharded, unless it is
    named, and nnx variables carry the names as plain metadata.
    """

    def add_axis(self, index: int, params: dict[Any, Any]) -> Any:
        """Adds the axis of a transformation."""
        return super().add_axis(index, {nn.PARTITION_NAME: None, **params})

    def remove_axis(self, index: int, params: dict[Any, Any]) -> Any:
        """Removes it again."""
        return super().remove_axis(index, {nn.PARTITION_NAME: None, **params})

    def to_nnx_metadata(self) -> dict[str, Any]:
        """The metadata of the nnx variable that replaces this box."""
        return {"value": self.value, "logical_axes": self.names}

    @classmethod
    def from_nnx_metadata(cls, metadata: dict[str, Any]) -> LogicalAxes:
        """The inverse of `to_nnx_metadata`."""
        return cls(metadata["value"], metadata["logical_axes"])


def with_axes(init: Callable[..., jax.Array], names: tuple[str | None, ...]) -> Callable[..., Any]:
    """An initialiser whose parameters carry the logical axis ``names``."""
    return lambda *args: LogicalAxes(init(*args), names)


def call_with_pure(
    module: nn.Module, method: Callable[..., Any], body: Callable[[Callable[..., Any], PyTree, PyTree], Any]
) -> Any:
    """Returns ``body(apply, variables, rngs)``; ``apply(variables, rngs, *args)`` is ``method`` as a pure function.

    Linen forbids to call a bound method inside a jax transformation that Linen does not know. ``apply`` closes over
    nothing and may enter any of them, ``shard_map`` with sliced variables included: a parameter takes the shape that
    ``method`` asks for there. Variables are read-only and free of partitioning metadata.

    Args:
      module: a bound module, all of whose variables that ``method`` reads exist.
      method: called as ``method(module, *args)``.
      body: a pure function.
    """

    def lifted(inner: Callable[..., Any], scope: Any) -> Any:
        def packed(scope_fn: Any, repack_fn: Any, variables: PyTree, rngs: PyTree) -> tuple[Any, tuple[()]]:
            def apply(variables: PyTree, rngs: PyTree, *args: Any) -> Any:
                return inner(scope_fn(variables, rngs), *args)

            return body(apply, nn.meta.unbox(variables), rngs), ()

        return lift.pack(packed, (True,), (), (True,), name="pure")(scope)

    return lift_direct_transform(lifted, (method,), module, multi_scope=False)
