from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from moe_blocks.mesh import as_axes, axis_sizes, place, place_like
from tests.moe_blocks.support import LAYOUTS, MORE_LAYOUTS, on

EXPLICIT, AUTO = LAYOUTS["2x4"], MORE_LAYOUTS["2x4 auto"]


def test_as_axes() -> None:
    assert [as_axes(name) for name in (None, "expert", ("pod", "expert"))] == [(), ("expert",), ("pod", "expert")]


def test_axis_sizes() -> None:
    with on(EXPLICIT):
        assert axis_sizes(("expert", "data")) == {"expert": 4, "data": 2}
    assert axis_sizes(()) == {}


def test_axis_sizes_without_the_mesh() -> None:
    message = r"batch_axes=\('data',\) names \['data'\], which the current mesh does not have \(its axes: \(\)\)"
    with pytest.raises(ValueError, match=message):
        axis_sizes(("data",))
    with on(LAYOUTS["4"]), pytest.raises(ValueError, match=r"names \['model'\], .* \(its axes: \('expert',\)\)"):
        axis_sizes(("expert", "model"))


@pytest.mark.parametrize("layout", [EXPLICIT, AUTO], ids=["explicit", "auto"])
@pytest.mark.parametrize("jitted", [False, True])
def test_place(layout: Any, jitted: bool) -> None:
    tree = {"a": np.arange(8.0, dtype=np.float32), "b": {"c": np.ones((4, 2), np.float32), "none": None}}

    def layed_out(tree: Any) -> Any:
        return place(tree, {"a": P("data"), "b": P("expert")})

    with on(layout):
        out = (jax.jit(layed_out) if jitted else layed_out)(tree)
        slope = jax.grad(lambda x: (place(x, P("data")) ** 2).sum())(jnp.ones(2))
    assert out["a"].sharding.is_equivalent_to(NamedSharding(layout.mesh, P("data")), 1)
    assert out["b"]["c"].sharding.is_equivalent_to(NamedSharding(layout.mesh, P("expert")), 2)
    jax.tree.map(np.testing.assert_array_equal, out, tree)
    assert slope.tolist() == [2, 2]


def test_place_like() -> None:
    with on(EXPLICIT):
        like = place(jnp.ones((4, 8)), P(None, "expert"))
        out = place_like(place(jnp.zeros((4, 8)), P("data")), like)
        assert jax.typeof(out).sharding.spec == P(None, "expert")
    assert place_like(jnp.zeros(3), jnp.ones(3)).tolist() == [0, 0, 0]
