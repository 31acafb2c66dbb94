"""Meshes: where arrays lie, and a Linen method as a pure function that may enter ``shard_map``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
from flax import struct
from flax.core import lift
from flax.linen.transforms import lift_direct_transform
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

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


def axis_sizes(axes: tuple[str, ...]) -> dict[str, int]:
    """Sizes of the named axes of the current mesh.

    Raises:
      ValueError: if the current mesh lacks one of them.
    """
    mesh = jax.sharding.get_abstract_mesh()
    missing = [axis for axis in axes if axis not in mesh.axis_names]
    if missing:
        raise ValueError(
            f"batch_axes={axes} names {missing}, which the current mesh does not have (its axes: "
            f"{mesh.axis_names}); enter the mesh with `with jax.set_mesh(mesh):` or change batch_axes"
        )
    return {axis: mesh.shape[axis] for axis in axes}


def _is_explicit() -> bool:
    return AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types


def check_token_axes(x: jax.Array, batch_axes: tuple[str, ...]) -> None:
    """Raises a ``ValueError`` if the type of ``x`` says that it is sharded and ``batch_axes`` is empty.

    Only Explicit axes are part of a type. Sharded tokens need buffers of their own on each device.
    """
    spec = jax.typeof(x).sharding.spec
    if not batch_axes and any(axis is not None for axis in spec):
        raise ValueError(f"x is sharded as {spec} but batch_axes=(); name the mesh axes of its leading axis there")


# Under jit, also when called eagerly: an array outside of any mesh takes no constraint otherwise.
_constrain = jax.jit(jax.lax.with_sharding_constraint, static_argnums=1)


def place(tree: PyTree, specs: PyTree) -> PyTree:
    """Lays arrays out over the current mesh, whose axes may be of type Auto or Explicit.

    ``specs`` is a prefix of ``tree`` with ``PartitionSpec`` leaves.
    """
    put = jax.sharding.reshard if _is_explicit() else _constrain
    return jax.tree.map(
        lambda spec, subtree: jax.tree.map(lambda leaf: put(leaf, spec), subtree),
        specs,
        tree,
        is_leaf=lambda node: isinstance(node, P),
    )


def place_like(x: jax.Array, like: jax.Array) -> jax.Array:
    """Gives ``x`` the sharding that the type of ``like`` states. Only Explicit axes state one."""
    return place(x, jax.typeof(like).sharding.spec) if _is_explicit() else x


def call_with_pure(
    module: nn.Module, method: Callable[..., Any], body: Callable[[Callable[..., Any], PyTree], Any]
) -> Any:
    """Returns ``body(apply, variables)`` where ``apply(variables, *args)`` is ``method`` as a pure function.

    Linen forbids to call a bound method inside a jax transformation that Linen does not know. ``apply`` may enter
    any of them, ``shard_map`` with sliced variables included: a parameter takes the shape that ``method`` asks for
    there. Variables are read-only and free of partitioning metadata.

    Args:
      module: a bound module, all of whose variables that ``method`` reads exist.
      method: called as ``method(module, *args)``.
      body: a pure function.
    """

    def lifted(inner: Callable[..., Any], scope: Any) -> Any:
        def packed(scope_fn: Any, repack_fn: Any, variables: PyTree, rngs: PyTree) -> tuple[Any, tuple[()]]:
            def apply(variables: PyTree, *args: Any) -> Any:
                return inner(scope_fn(variables, rngs), *args)

            return body(apply, nn.meta.unbox(variables)), ()

        return lift.pack(packed, (True,), (), (True,), name="pure")(scope)

    return lift_direct_transform(lifted, (method,), module, multi_scope=False)
