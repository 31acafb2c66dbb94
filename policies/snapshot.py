"""A training state as named leaves: what each of them is, whether it fits another state, and a checksum of its bits.

Nothing here depends on how the leaves are spread over devices, so that what was saved on one mesh can be checked on
another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, SingleDeviceSharding
from jaxtyping import Array, PyTree, UInt32

Leaves = dict[str, Any]


class MismatchError(ValueError):
    """What was saved has other leaves than the state that is to be restored."""


def named(tree: PyTree) -> Leaves:
    """The leaves by their path.

    Example:
      >>> named({"w": 1, "moments": (2, 3)})
      {"state['moments'][0]": 2, "state['moments'][1]": 3, "state['w']": 1}
    """
    return {f"state{jax.tree_util.keystr(path)}": leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype and place of a leaf; the default device where it names none."""
    kind = leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)
    sharding = getattr(leaf, "sharding", None) or SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=sharding)


def describe(leaves: Leaves) -> dict[str, str]:
    """What each leaf is, in words.

    Example:
      >>> describe({"w": jnp.zeros((2, 3)), "key": jax.random.key(0)})
      {'w': 'float32[2, 3]', 'key': 'key<fry>[]'}
    """
    return {name: f"{kind.dtype}{list(kind.shape)}" for name, kind in ((n, abstract(x)) for n, x in leaves.items())}


def check_fits(saved: Mapping[str, str], wanted: Mapping[str, str]) -> None:
    """Refuses leaves that are not those which are wanted.

    Args:
      saved: the leaves in words, as ``describe`` puts them.
      wanted: likewise.

    Raises:
      MismatchError: naming the leaves that differ, the first few of them.

    Example:
      >>> check_fits({"w": "float32[2]"}, {"w": "float32[4]"})
      Traceback (most recent call last):
      policies.snapshot.MismatchError: 1 of 1 leaves differ: w was saved as float32[2], the state has float32[4]
    """
    names = [name for name in {**wanted, **saved} if saved.get(name) != wanted.get(name)]
    if names:
        told = [
            f"{name} was saved as {saved.get(name, 'nothing')}, the state has {wanted.get(name, 'nothing')}"
            for name in names[:3]
        ]
        more = [f"and {len(names) - 3} more"] if len(names) > 3 else []
        raise MismatchError(f"{len(names)} of {len(wanted)} leaves differ: {'; '.join([*told, *more])}")


def mesh_of(leaves: Leaves) -> dict[str, int]:
    """Names and sizes of the mesh axes that the leaves are on; none without a mesh."""
    shardings = (abstract(leaf).sharding for leaf in leaves.values())
    return next((dict(s.mesh.shape) for s in shardings if isinstance(s, NamedSharding)), {})


def checksums(leaves: Leaves) -> dict[str, int]:
    """A number for the bits of each leaf; one flipped bit always changes it.

    It is ``sum_i bits_i * (2 i + 1)`` modulo ``2**32`` over the words of at most 32 bits in a leaf: integer sums do not
    depend on their order, so neither on the mesh, and no odd factor is lost modulo a power of two.

    Example:
      >>> checksums({"a": jnp.array([1, 2, 3]), "b": jnp.array([1, 3, 2])})
      {'a': 22, 'b': 20}
    """
    sums = {name: _checksum(jnp.asarray(leaf)) for name, leaf in leaves.items()}
    return {name: int(number) for name, number in jax.device_get(sums).items()}


@jax.jit
def _checksum(leaf: Array) -> UInt32[Array, ""]:
    bits = _bits(leaf)
    position = jnp.zeros(bits.shape, jnp.uint32)
    for axis, size in enumerate(bits.shape):  # no reshape: it would gather what is sharded
        position = position * jnp.uint32(size % 2**32) + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
    return jnp.sum(bits * (2 * position + 1), dtype=jnp.uint32)


def _bits(leaf: Array) -> UInt32[Array, ...]:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        leaf = jnp.stack([leaf.real, leaf.imag], -1)
    if leaf.dtype == jnp.bool_:
        return leaf.astype(jnp.uint32)
    info = jnp.finfo if jnp.issubdtype(leaf.dtype, jnp.floating) else jnp.iinfo
    words = jnp.dtype(f"uint{min(info(leaf.dtype).bits, 32)}")
    return jax.lax.bitcast_convert_type(leaf, words).astype(jnp.uint32)
