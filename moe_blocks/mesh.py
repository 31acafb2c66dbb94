"""The mesh in context: its axes, its devices, and where arrays lie on it."""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Shaped

PyTree = Any
AxisName = str | tuple[str, ...] | None  # one mesh axis, several as one, or none


def as_axes(axis_name: AxisName) -> tuple[str, ...]:
    """The mesh axes that a name stands for."""
    return () if axis_name is None else (axis_name,) if isinstance(axis_name, str) else axis_name


def axis_size(axis_name: AxisName) -> int:
    """Inside ``shard_map``: the ranks of a group; 1 without an axis."""
    return 1 if axis_name is None else jax.lax.axis_size(axis_name)


def axis_index(axis_name: AxisName) -> int | Array:
    """Inside ``shard_map``: the place of this rank in its group; 0 without an axis."""
    return 0 if axis_name is None else jax.lax.axis_index(axis_name)


def platform() -> str:
    """Where the computation will run: on the mesh in context, which may be one that is only compiled for."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def axis_sizes(axes: tuple[str, ...], argument: str = "batch_axes") -> dict[str, int]:
    """Sizes of the named axes of the current mesh, in this order.

    Args:
      axes: their names.
      argument: where they were given, for the message.

    Raises:
      ValueError: if the current mesh lacks one of them.
    """
    mesh = jax.sharding.get_abstract_mesh()
    missing = [axis for axis in axes if axis not in mesh.axis_names]
    if missing:
        raise ValueError(
            f"{argument}={axes} names {missing}, which the current mesh does not have (its axes: "
            f"{mesh.axis_names}); enter the mesh with `with jax.set_mesh(mesh):` or change {argument}"
        )
    return {axis: mesh.shape[axis] for axis in axes}


def check_axes(
    batch_axes: tuple[str, ...], *, expert_axis: AxisName, fsdp_axis: AxisName, tensor_axis: AxisName
) -> None:
    """Raises a ``ValueError`` if the axes of a layer do not fit together. It needs no mesh."""
    if not isinstance(batch_axes, tuple) or len(set(batch_axes)) != len(batch_axes):
        raise ValueError(f"batch_axes must be a tuple of distinct axis names, got {batch_axes!r}")
    of_kernels = {"expert_axis": expert_axis, "fsdp_axis": fsdp_axis, "tensor_axis": tensor_axis}
    for argument, axis_name in of_kernels.items():
        if axis_name is not None and not as_axes(axis_name):
            raise ValueError(f"{argument} must be None, a mesh axis or several, got {axis_name!r}")
    if not set(as_axes(expert_axis)) <= set(batch_axes):
        raise ValueError(
            f"batch_axes must include expert_axis={expert_axis!r}, got {batch_axes!r}; tokens are sharded over the "
            "expert axis too"
        )
    if not batch_axes and (as_axes(fsdp_axis) or as_axes(tensor_axis)):
        raise ValueError(
            f"fsdp_axis={fsdp_axis!r} and tensor_axis={tensor_axis!r} need batch_axes, the mesh axes that shard the "
            "tokens, got ()"
        )
    if shared := set(as_axes(tensor_axis)) & set(batch_axes):
        raise ValueError(
            f"tensor_axis={tensor_axis!r} must not be among batch_axes, got {sorted(shared)} in both; the tokens are "
            "copied over it"
        )
    for (one, axes), (other, others) in itertools.combinations(of_kernels.items(), 2):
        if shared := set(as_axes(axes)) & set(as_axes(others)):
            raise ValueError(f"{one} and {other} must not share a mesh axis, got {sorted(shared)} in both")


def check_divides(what: str, size: int, argument: str, axis_name: AxisName) -> None:
    """Raises a ``ValueError`` unless the ranks of an axis of the current mesh can share ``size`` entries equally."""
    sizes = axis_sizes(as_axes(axis_name), argument)
    if size % math.prod(sizes.values()):
        raise ValueError(f"{what}={size} must be a multiple of the ranks of {argument}, {sizes}; change one of them")


def pad_leading(
    x: Shaped[Array, "B ..."], token_mask: Bool[Array, "B ..."] | None, multiple: int
) -> tuple[Shaped[Array, "P ..."], Bool[Array, "P ..."] | None]:
    """Pads the leading axis with masked zeros to a multiple, if it is none."""
    padding = -x.shape[0] % multiple
    if not padding:
        return x, token_mask
    mask = jnp.ones(x.shape[:-1], bool) if token_mask is None else token_mask
    padded = (jnp.pad(array, [(0, padding)] + [(0, 0)] * (array.ndim - 1)) for array in (x, mask))
    return next(padded), next(padded)


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
