"""Subclasses of `MoEBlock`, and the transformations that a model puts around a block."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import moe_blocks
from moe_blocks import Capacity, MoEBlock, Router, Routing
from tests.moe_blocks import support
from tests.moe_blocks.layer import BLOCK, KEY, D, E, F, K, X, apply, variables_of
from tests.moe_blocks.oracle import Oracle
from tests.moe_blocks.support import LAYOUTS, MORE_LAYOUTS, Forced, assert_close, on

# --- subclasses


class Hashed(MoEBlock):
    """A router without logits: the expert follows the position. And it declares a parameter and a submodule."""

    def route(self, x: Any, token_mask: Any) -> Routing:
        scale = self.param("route_scale", nn.initializers.ones_init(), ())
        gain = nn.Dense(1, use_bias=False, name="route_gain")(x.astype(jnp.float32))
        position = jnp.arange(x.shape[-2], dtype=jnp.int32)[:, None]
        choice = jnp.arange(self.num_experts_per_tok, dtype=jnp.int32)[None]
        indices = jnp.broadcast_to((position + choice) % self.num_experts, (*x.shape[:-1], self.num_experts_per_tok))
        weights = scale * jax.nn.sigmoid(gain) * jnp.ones(indices.shape, jnp.float32)
        uniform = jnp.full((*x.shape[:-1], self.num_experts), 1 / self.num_experts)
        return Routing(indices, weights, uniform, jnp.zeros_like(uniform))


class Shared(Hashed):
    """Experts of one matrix each, times a matrix that all share, and a scale declared by hand."""

    def experts(self, rows: Any, group_sizes: Any) -> Any:
        here = group_sizes.shape[0]
        own = self.expert_param("own", nn.initializers.lecun_normal(), here, (rows.shape[-1],) * 2, ("embed", "embed"))
        scale = self.param("scale", nn.initializers.normal(1.0), (here, 1))
        out = moe_blocks.grouped_matmul(rows, own.astype(rows.dtype), group_sizes)
        tag = jnp.repeat(scale, group_sizes, axis=0, total_repeat_length=rows.shape[0]).astype(rows.dtype)
        return nn.Dense(rows.shape[-1], use_bias=False, dtype=rows.dtype, name="shared")(out) * tag


@functools.cache
def subclass_variables() -> Any:
    return jax.tree.map(np.asarray, nn.meta.unbox(jax.jit(Shared(8, 2, F).init)(KEY, X)))


def shared_by_hand(variables: Any, x: Any, slots: int | None, places: Any) -> np.ndarray:
    params = jax.tree.map(lambda a: np.asarray(a, np.float64), variables["params"])
    ids = np.broadcast_to((np.arange(x.shape[-2])[:, None] + np.arange(2)) % 8, (*x.shape[:-1], 2))
    gain = 1 / (1 + np.exp(-(x @ params["route_gain"]["kernel"])))
    weights = np.broadcast_to(params["route_scale"] * gain, ids.shape)
    kept, _, _ = Oracle(8, 2, slots, places=places).admit(ids, weights, np.ones(x.shape[:-1], bool))
    out = np.zeros(x.shape)
    for place in np.argwhere(kept):
        *token, _ = place = tuple(place)
        token, e = tuple(token), ids[place]
        out[token] += weights[place] * (x[token] @ params["own"][e] @ params["shared"]["kernel"]) * params["scale"][e]
    return out


@pytest.mark.parametrize(
    ("mesh", "capacity"),
    [
        ("none", Capacity(3, chunks=2)),
        ("2x4", Capacity(None)),
        ("2x4", Capacity(3, chunks=2)),
        ("8", Capacity(3)),
    ],
)
def test_a_subclass_keeps_every_capacity_feature(mesh: str, capacity: Capacity) -> None:
    layout, variables = LAYOUTS[mesh], subclass_variables()
    block = Shared(8, 2, F, **support.axes(layout))
    with on(layout):
        out, collected = apply(block, variables, X, capacity=capacity, mutable=("moe_metrics",))
    want = shared_by_hand(variables, X, capacity.slots, support.places(layout))
    assert_close(out.output, want, 2e-6)
    assert (collected["moe_metrics"]["dropped"] > 0) == (capacity.slots is not None)
    assert out.total_recv_tokens.sum() == 48


def test_a_subclass_in_bfloat16_scan_and_remat() -> None:
    """All at once: overridden router and experts, capped, bf16, on a mesh, rematerialised inside a scan."""
    layout = LAYOUTS["2x4"]

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x: Any, _: Any) -> Any:
            block = Shared(8, 2, F, capacity=3, **support.axes(layout), name="moe")
            out, aux_loss, total = block(x)
            return x + out, (aux_loss, total)

    stack = nn.scan(nn.remat(Layer), variable_axes={"params": 0}, split_rngs={"params": True}, length=2)()
    x = jnp.asarray(X, jnp.bfloat16)

    def loss(variables: Any, x: Any) -> Any:
        out, (_, total) = stack.apply(variables, x, None)
        return (out.astype(jnp.float32) ** 2).mean(), (out, total)

    with on(layout):
        variables = nn.meta.unbox(jax.jit(lambda: stack.init(KEY, x, None))())
        (_, (out, total)), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(variables, x)
    variables, grads = jax.tree.map(np.asarray, (variables, grads))
    assert out.dtype == jnp.bfloat16 and total.shape == (2, len(support.places(layout)))
    want = np.asarray(x, np.float64)
    for layer in range(2):
        params = jax.tree.map(lambda leaf, layer=layer: leaf[layer], variables["params"]["moe"])
        want = want + shared_by_hand({"params": params}, want, 3, support.places(layout))
    assert_close(out, want, 8 * 2**-8)
    for leaf in jax.tree.leaves(grads):
        assert np.isfinite(leaf).all() and all(layer.any() for layer in leaf)


# --- transformations


class Once(nn.Module):
    """A residual layer, in the form that ``nn.scan`` wants."""

    block: MoEBlock

    @nn.compact
    def __call__(self, x: Any) -> Any:
        out, aux_loss, total = self.block(x)
        return x, (aux_loss, total, out)  # the input goes on unchanged: all layers see the same


STACK = MoEBlock(E, K, F, aux_loss_coeff=0.01, gated=False)


def stacked(kind: str) -> Any:
    """Three layers with equal inputs: (variables, x) -> (aux_loss [3], total [3, 1], outputs [3, ...])."""
    layer = nn.remat(Once) if "remat" in kind else Once
    if "scan" in kind:
        scanned = nn.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)(STACK)
        return lambda params, x: scanned.apply({"params": jax.tree.map(lambda p: jnp.stack([p] * 3), params)}, x)[1]

    def loop(params: Any, x: Any) -> Any:
        outs = [layer(STACK).apply({"params": params}, x)[1] for _ in range(3)]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *outs)

    return loop


def test_loss_12_loop_scan_and_remat_agree() -> None:
    """Three layers with equal weights and inputs: three times the loss and the demand, and one gradient."""
    params = {"block": variables_of(STACK)["params"]}

    def objective(params: Any, kind: str) -> Any:
        aux_loss, total, out = stacked(kind)(params, X)
        return aux_loss.sum() + (out * jnp.stack([X] * 3)).sum(), (aux_loss, total)

    one = apply(STACK, variables_of(STACK), X)
    results = {
        kind: jax.jit(jax.value_and_grad(objective, has_aux=True), static_argnums=1)(params, kind)
        for kind in ("loop", "remat", "scan", "scan remat")
    }
    (value, _), grads = results["loop"]
    assert np.asarray(grads["block"]["gate"]["kernel"]).any()
    for (other, (aux_loss, total)), other_grads in results.values():
        np.testing.assert_allclose(aux_loss, [float(one.aux_loss)] * 3, rtol=1e-6)
        assert total.tolist() == [[48]] * 3
        assert other == pytest.approx(float(value), rel=1e-6)
        for a, b in zip(jax.tree.leaves(other_grads), jax.tree.leaves(grads), strict=True):
            assert_close(a, b, 2e-6)
    # LOSS-2: statistics are those of each layer; opposite preferences do not cancel.
    assert float(one.aux_loss) > 0.01


@pytest.mark.parametrize("kind", ["plain", "remat", "scan", "scan remat"])
def test_state_and_metrics_in_a_stack(kind: str) -> None:
    """The bias moves once in a training step, though rematerialisation runs the layer twice; never in evaluation."""
    block = MoEBlock(E, K, F, router=Router(expert_bias=True, bias_update_rate=0.5), capacity=20)
    layer = nn.remat(Once) if "remat" in kind else Once
    axes = {"params": 0, "moe_state": 0, "moe_metrics": 0}
    module = nn.scan(layer, axes, split_rngs={"params": True}, length=2)(block) if "scan" in kind else layer(block)
    variables = nn.meta.unbox(jax.jit(module.init)(KEY, X))
    assert variables.keys() == {"params", "moe_state"}
    before = np.asarray(variables["moe_state"]["block"]["expert_bias"])
    assert not before.any()

    def loss(params: Any) -> Any:
        state = {"moe_state": variables["moe_state"]}
        (_, (_, _, out)), new = module.apply({"params": params} | state, X, mutable=["moe_state", "moe_metrics"])
        return (out**2).sum(), new

    grads, new = jax.jit(jax.grad(loss, has_aux=True))(variables["params"])
    after, metrics = np.asarray(new["moe_state"]["block"]["expert_bias"]), new["moe_metrics"]["block"]
    load = np.asarray(metrics["load"], np.float64)
    np.testing.assert_allclose(after, 0.5 * np.sign(load.mean(-1, keepdims=True) - load))
    assert after.any() and metrics["dropped"].tolist() == ([28, 28] if "scan" in kind else 28)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))
    _, unchanged = jax.eval_shape(lambda: module.apply(variables, X, mutable=["moe_metrics"]))
    assert unchanged.keys() == {"moe_metrics"}


def test_vmap_over_a_batch_axis() -> None:
    """Each example has its own buffer then, so the drops are those of single calls."""
    variables = variables_of(BLOCK)

    def loss(x: Any) -> Any:
        out = BLOCK.apply(variables, x, capacity=4)
        return (out.output**2).sum(), out

    slope, out = jax.jit(jax.vmap(jax.grad(loss, has_aux=True)))(X)
    assert out.total_recv_tokens.tolist() == [[6]] * 8
    for i, x in enumerate(X):
        want = apply(BLOCK, variables, x, capacity=4)
        assert_close(out.output[i], want.output, 1e-6)
    assert np.isfinite(slope).all() and slope.any()
    assert not np.asarray(out.output)[:, 2].any(), "the third token of each lost both choices"


def test_nn_vmap_of_experts_ensembles() -> None:
    """Parameters stacked over a new axis: an ensemble of layers on one input."""
    ensemble = nn.vmap(MoEBlock, {"params": 0}, {"params": True}, in_axes=None, axis_size=3)(E, K, F)
    form = jax.eval_shape(ensemble.init, KEY, X)
    assert form["params"]["wo"].value.shape == (3, E, F, D)
    singles = [{"params": support.unflat(support.draw_params(i, E=E, D=D, F=F))} for i in range(3)]
    out = jax.jit(ensemble.apply)(jax.tree.map(lambda *leaves: np.stack(leaves), *singles), X)
    for i, single in enumerate(singles):
        assert_close(out.output[i], apply(BLOCK, single, X).output, 1e-6)


class SetUp(nn.Module):
    """Layers made in ``setup`` and called twice: shared parameters."""

    def setup(self) -> None:
        self.first = BLOCK.clone(parent=None)
        self.second = MoEBlock(E, K, F, capacity=20)

    def __call__(self, x: Any) -> Any:
        return self.second(self.first(x).output + self.first(x).output)


def test_setup() -> None:
    assert jax.eval_shape(SetUp().init, KEY, X)["params"].keys() == {"first", "second"}
    parts = [{"params": support.unflat(support.draw_params(i, E=E, D=D, F=F))} for i in range(2)]
    variables = {"params": {"first": parts[0]["params"], "second": parts[1]["params"]}}
    out = jax.jit(SetUp().apply)(variables, X)
    inner = apply(BLOCK, parts[0], X).output
    assert_close(out.output, apply(MoEBlock(E, K, F, capacity=20), parts[1], inner + inner).output, 1e-6)


def test_train_a_step_through_nnx() -> None:
    block = BLOCK.clone(aux_loss_coeff=0.01, router=Router(expert_bias=True))
    model = nnx.bridge.lazy_init(nnx.bridge.ToNNX(block, rngs=nnx.Rngs(0)), X)

    @nnx.jit
    def step(model: Any) -> Any:
        def loss(model: Any) -> Any:
            out = model(X)
            return ((out.output - X) ** 2).mean() + out.aux_loss

        value, grads = nnx.value_and_grad(loss)(model)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), grads)
        nnx.update(model, params)
        return value

    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    values = [float(step(model)) for _ in range(3)]
    after = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    assert before.keys() == {"gate", "wi_0", "wi_1", "wo"}
    assert values[0] > values[1] > values[2]
    assert all((np.asarray(a) != b).any() for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True))


@pytest.mark.parametrize("mesh", ["2x4", "2x4 auto"])
def test_sharded_parameters_and_tokens_keep_their_places(mesh: str) -> None:
    """Parameters over the expert axis, tokens over the batch axes: outputs and gradients lie as their inputs do."""
    layout = (LAYOUTS | MORE_LAYOUTS)[mesh]
    assert layout
    block = BLOCK.clone(**layout.axes)
    specs = {"wi_0": P("expert"), "wi_1": P("expert"), "wo": P("expert"), "gate": {"kernel": P()}}
    with on(layout):
        params = jax.tree.map(
            lambda spec, p: jax.device_put(p, NamedSharding(layout.mesh, spec)), specs, variables_of(BLOCK)["params"],
            is_leaf=lambda node: isinstance(node, P),
        )  # fmt: skip
        x = jax.device_put(X, NamedSharding(layout.mesh, P(("data", "expert"))))

        def loss(params: Any, x: Any) -> Any:
            out = block.apply({"params": params}, x, capacity=5)
            return (out.output**2).sum(), out

        (_, out), (grads, d_x) = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(params, x)
    assert out.output.sharding.is_equivalent_to(x.sharding, 3)
    assert d_x.sharding.is_equivalent_to(x.sharding, 3)
    for name in ("wi_0", "wi_1", "wo"):
        assert grads[name].sharding.is_equivalent_to(params[name].sharding, 3)
        assert np.asarray(grads[name]).any()


def test_a_tensor_sharded_input_keeps_its_sharding() -> None:
    layout = LAYOUTS["2x4"]
    assert layout
    block = MoEBlock(E, K, F, batch_axes=("data",))
    variables = variables_of(MoEBlock(E, K, F).clone())
    x = np.concatenate([X, X[..., :2]], -1)  # eight channels for four devices
    variables = {"params": support.unflat(support.draw_params(0, E=E, D=8, F=F))}
    with on(layout):
        put = jax.device_put(x, NamedSharding(layout.mesh, P("data", None, "expert")))
        out = apply(block, variables, put).output
        assert out.sharding.is_equivalent_to(put.sharding, 3)
    assert_close(out, apply(MoEBlock(E, K, F), variables, x).output, 1e-6)


def test_blocks_of_every_kind_in_one_process() -> None:
    """Slots, drop order, scope, experts and mesh change from one call to the next, and back."""
    rng = np.random.default_rng(0)
    steps = [("none", E, 9, "rank", "position"), ("2x4", 8, 3, "rank", "weight"), ("4", E, 2, "expert", "position")]
    for mesh, num_experts, slots, scope, drop_order in steps + steps[::-1]:
        layout = LAYOUTS[mesh]
        ids = np.argsort(rng.random((8, 3, num_experts)) + np.linspace(0, 0.6, num_experts), axis=-1)[..., :K]
        weights = rng.choice([0.25, 0.5, 1.0], size=ids.shape)
        params = support.draw_params(1, E=num_experts, D=D, F=F, gate=False)
        x = support.force(X, ids, weights)
        block = Forced(num_experts, K, F, capacity_scope=scope, drop_order=drop_order, **support.axes(layout))
        with on(layout):
            out = apply(block, {"params": params}, x, capacity=slots)
        oracle = Oracle(num_experts, K, slots, scope, drop_order, places=support.places(layout))
        want = oracle(params, x, choice=(ids, weights))
        assert_close(out.output, want.output, 1e-6)
        assert out.total_recv_tokens.tolist() == want.total_recv_tokens.tolist()
        assert not want.kept.all()


def test_ep_7_the_norm_of_sharded_gradients_is_global() -> None:
    """Squared norms of 20 and 100 on two ranks: sqrt(120) everywhere, and replicated values stay equal."""
    layout = support.Layout({"expert": 2})
    grads = {"wo": np.sqrt(np.array([[10.0, 10.0], [50.0, 50.0]], np.float32)), "gate": np.zeros(3, np.float32)}
    with on(layout):
        placed = {
            "wo": jax.device_put(grads["wo"], NamedSharding(layout.mesh, P("expert"))),
            "gate": jax.device_put(grads["gate"], NamedSharding(layout.mesh, P())),
        }
        norm = jax.jit(lambda g: jnp.sqrt(sum((leaf**2).sum() for leaf in jax.tree.leaves(g))))(placed)
    assert [float(shard.data) for shard in norm.addressable_shards] == pytest.approx([10.9545] * 2, abs=1e-4)
