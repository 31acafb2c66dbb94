from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from moe_blocks.linen import LogicalAxes, call_with_pure, with_axes
from tests.moe_blocks.support import LAYOUTS, on

# --- logical names of axes


class Layer(nn.Module):
    """A carry and one named parameter."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        init = with_axes(nn.initializers.ones_init(), ("embed", None))
        return x * self.param("scale", init, (3, 1)).sum()


def names(variables: Any) -> Any:
    return variables["params"]["scale"].names


def test_names_and_value() -> None:
    variables = Layer().init(jax.random.key(0), jnp.ones(()))
    assert isinstance(variables["params"]["scale"], nn.LogicallyPartitioned)
    assert names(variables) == ("embed", None)
    assert nn.get_partition_spec(variables)["params"]["scale"] == P("embed", None)
    assert Layer().apply(variables, jnp.ones(())) == 3


@pytest.mark.parametrize(("metadata", "first"), [({}, None), ({nn.PARTITION_NAME: "layers"}, "layers")])
def test_scan_and_vmap_with_and_without_a_name(metadata: dict[str, str], first: str | None) -> None:
    lifted = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "metadata_params": metadata}
    scanned = nn.scan(nn.remat(ScanLayer), length=4, **lifted)()
    variables = scanned.init(jax.random.key(0), jnp.ones(()))
    box = variables["params"]["layer"]["scale"]
    assert box.names == (first, "embed", None) and box.value.shape == (4, 3, 1)
    out, _ = scanned.apply(variables, jnp.ones(()))
    assert out == 3**4

    mapped = nn.vmap(Layer, **lifted)()
    variables = mapped.init(jax.random.key(0), jnp.ones(5))
    assert names(variables) == (first, "embed", None)
    assert mapped.apply(variables, jnp.arange(5.0)).tolist() == [0, 3, 6, 9, 12]


class ScanLayer(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return Layer(name="layer")(x), None


def test_flaxs_own_box_is_why() -> None:
    class Plain(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            init = nn.with_logical_partitioning(nn.initializers.ones_init(), ("embed", None))
            return x * self.param("scale", init, (3, 1)).sum()

    mapped = nn.vmap(Plain, {"params": 0}, {"params": True})()
    with pytest.raises(Exception, match="partition"):
        mapped.init(jax.random.key(0), jnp.ones(5))


def test_to_nnx_and_back() -> None:
    box = LogicalAxes(jnp.ones((3, 1)), ("embed", None))
    back = LogicalAxes.from_nnx_metadata(box.to_nnx_metadata())
    assert isinstance(back, LogicalAxes) and back.names == box.names and back.value is box.value

    model = nnx.bridge.lazy_init(nnx.bridge.ToNNX(Layer(), rngs=nnx.Rngs(0)), jnp.ones(()))
    assert model(jnp.ones(())) == 3
    assert dict(model.scale.get_metadata())["logical_axes"] == ("embed", None)
    with on(LAYOUTS["2x4"]):  # and no mesh axis of that name is asked for
        assert model(jnp.ones(())) == 3


# --- a method as a pure function


class Doubler(nn.Module):
    """``twice`` has a parameter, whose leading axis follows its input."""

    def twice(self, x: Any) -> Any:
        return 2 * x * self.param("scale", with_axes(nn.initializers.ones_init(), ("rows",)), (x.shape[0],))

    @nn.compact
    def __call__(self, x: Any) -> Any:
        if self.is_initializing():
            self.twice(x)

        def body(apply: Any, variables: Any, rngs: Any) -> Any:
            def on_each(variables: Any, x: Any) -> Any:
                return apply(variables, rngs, x)

            rows = jax.tree.map(lambda leaf: leaf[:, None], variables)
            return jax.vmap(on_each)(rows, x[:, None]).ravel()

        return call_with_pure(self, lambda module, x: module.twice(x), body)


def test_call_with_pure() -> None:
    """A bound method inside ``jax.vmap``, which Linen forbids by itself, on sliced parameters."""
    x = jnp.arange(3.0)
    variables = Doubler().init(jax.random.key(0), x)
    assert jax.tree.map(jnp.shape, nn.meta.unbox(variables)) == {"params": {"scale": (3,)}}
    scaled = {"params": {"scale": jnp.array([1.0, 10.0, 100.0])}}
    assert Doubler().apply(scaled, x).tolist() == [0, 20, 400]
    slope = jax.grad(lambda v: Doubler().apply(v, x).sum())(scaled)
    assert slope["params"]["scale"].tolist() == [0, 2, 4]
    with pytest.raises(Exception, match="scale"):
        Doubler().apply({"params": {}}, x)
