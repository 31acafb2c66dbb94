from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from policies import snapshot
from tests.policies import toy


def checksum(leaf: Any) -> int:
    return snapshot.checksums({"leaf": leaf})["leaf"]


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn", "int4", "int8", "uint32", "int32", "bool", "complex64"]
)
def test_a_flipped_bit_or_a_swap_changes_the_checksum(dtype: str) -> None:
    values = np.arange(16).reshape(4, 4).astype(jnp.dtype(dtype)) if dtype != "bool" else np.tri(4, dtype=bool)
    want = checksum(values)
    assert checksum(values[::-1].copy()) != want  # experts in another order
    raw = values.view(np.uint8)
    for place in range(values.nbytes):
        for bit in range({"int4": 4, "bool": 1}.get(dtype, 8)):
            raw.reshape(-1)[place] ^= 1 << bit
            assert checksum(values) != want, (place, bit)
            raw.reshape(-1)[place] ^= 1 << bit
    assert checksum(values) == want


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_the_checksum_does_not_depend_on_the_mesh(kind: AxisType) -> None:
    mesh = jax.make_mesh((2, 4), ("data", "expert"), axis_types=(kind,) * 2)
    values = np.random.default_rng(0).normal(size=(8, 8, 3)).astype(ml_dtypes.bfloat16)
    want = checksum(values)
    for spec in (P(), P("expert"), P(("data", "expert")), P("data", "expert"), P(None, "expert")):
        assert checksum(jax.device_put(values, NamedSharding(mesh, spec))) == want


def test_every_kind_of_leaf_has_one() -> None:
    leaves = snapshot.named(toy.state_of_every_kind())
    assert snapshot.checksums(leaves).keys() == leaves.keys()
    assert checksum(jax.random.key(0)) != checksum(jax.random.key(1))


def test_the_leaves_that_do_not_fit_are_named() -> None:
    saved = snapshot.describe(snapshot.named(toy.state_of_every_kind()))
    snapshot.check_fits(saved, dict(reversed(saved.items())))
    wanted = {**saved, "state['bias']": "float32[8]", "state['new']": "int32[]"}
    with pytest.raises(
        snapshot.MismatchError,
        match=r"2 of 12 leaves differ: state\['bias'\] was saved as float32\[4\], the state has float32\[8\]; "
        r"state\['new'\] was saved as nothing, the state has int32\[\]$",
    ):
        snapshot.check_fits(saved, wanted)
    with pytest.raises(snapshot.MismatchError, match="and 8 more"):
        snapshot.check_fits({}, saved)


def test_the_mesh_is_that_of_the_leaves() -> None:
    mesh = jax.make_mesh((2, 4), ("data", "expert"))
    leaf = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(mesh, P("expert")))
    assert snapshot.mesh_of({"step": np.int32(0), "w": leaf}) == {"data": 2, "expert": 4}
    assert snapshot.mesh_of({"step": np.int32(0)}) == {}
