"""The contract of `MoEBlock`: form, modes, masks, state, metrics, subclasses, transformations, errors.

That its numbers are right is for `test_block_oracle.py`.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
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
from moe_blocks import Capacity, MoEBlock, MoEOutput, Router, Routing
from moe_blocks.experts import feed_forward
from tests.moe_blocks import support
from tests.moe_blocks.oracle import Oracle
from tests.moe_blocks.support import LAYOUTS, MORE_LAYOUTS, Forced, assert_close, on, same_bits

E, K, D, F = 4, 2, 6, 5
BLOCK = MoEBlock(E, K, F)
X = support.bf16_exact(np.random.default_rng(0).normal(size=(8, 3, D)))
KEY = jax.random.key(0)


@functools.partial(jax.jit, static_argnums=0, static_argnames=("capacity", "mutable", "deterministic"))
def apply(
    block: Any, variables: Any, x: Any, mask: Any = None, *, capacity: Any = None, mutable: Any = (), rngs: Any = None,
    deterministic: bool = True,
) -> Any:  # fmt: skip
    mutable = list(mutable) or False
    return block.apply(
        variables, x, capacity=capacity, token_mask=mask, mutable=mutable, rngs=rngs, deterministic=deterministic
    )


@functools.cache
def variables_of(block: MoEBlock) -> Any:
    """Initial values, without the boxes; a mesh changes none of them."""
    plain = block.clone(expert_axis=None, batch_axes=())
    return jax.tree.map(np.asarray, nn.meta.unbox(jax.jit(plain.init)(KEY, X)))


# --- form


def test_the_output_unpacks_as_three() -> None:
    result = apply(BLOCK, variables_of(BLOCK), X)
    output, aux_loss, total_recv_tokens = result
    assert MoEOutput._fields == ("output", "aux_loss", "total_recv_tokens") and type(result) is MoEOutput
    assert (output.shape, output.dtype) == (X.shape, X.dtype)
    assert (aux_loss.shape, aux_loss.dtype, float(aux_loss)) == ((), jnp.float32, 0.0)
    assert (total_recv_tokens.shape, total_recv_tokens.dtype) == ((1,), jnp.int32)
    assert total_recv_tokens.tolist() == [24 * K]


def form(block: MoEBlock, x: Any = X, layout: Any = None, **kwargs: Any) -> Any:
    with on(layout):
        mode = {"rngs": {"jitter": KEY}} | kwargs
        return jax.eval_shape(lambda v, x: block.apply(v, x, **mode), variables_of(BLOCK) | STATE, jnp.asarray(x))


STATE = {"moe_state": {"expert_bias": np.zeros(E, np.float32)}}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_the_form_depends_on_nothing_but_x(dtype: Any) -> None:
    """Not on capacity, coefficients, mode, router or compute dtype; on a mesh only in the number of buffers."""
    x = jnp.asarray(X, dtype)
    want = MoEOutput(
        jax.ShapeDtypeStruct(X.shape, dtype),
        jax.ShapeDtypeStruct((), jnp.float32),
        jax.ShapeDtypeStruct((1,), jnp.int32),
    )
    for block in (
        BLOCK,
        BLOCK.clone(aux_loss_coeff=0.1, z_loss_coeff=0.1, dtype=jnp.bfloat16),
        BLOCK.clone(router=Router(jitter=0.1, expert_bias=True), drop_order="weight"),
        BLOCK.clone(dtype=jnp.float32, capacity=5),
    ):
        for capacity in (None, 3, Capacity(3, chunks=2), Capacity(None, chunks=3)):
            for deterministic in (True, False):
                assert form(block, x, capacity=capacity, deterministic=deterministic) == want


@pytest.mark.parametrize(("scope", "per_rank"), [("rank", 1), ("expert", E // 4)])
def test_one_demand_for_each_buffer_of_the_mesh(scope: str, per_rank: int) -> None:
    layout = LAYOUTS["2x4"]
    assert layout
    output, aux_loss, total = form(BLOCK.clone(capacity_scope=scope, **layout.axes), layout=layout)
    assert (output.shape, aux_loss.shape, total.shape) == (X.shape, (), (8 * per_rank,))
    assert form(BLOCK.clone(capacity_scope="expert")).total_recv_tokens.shape == (E,)


def test_numpy_arrays_will_do() -> None:
    """Given from outside, eagerly, and closed over by a program that is compiled and differentiated."""
    variables = BLOCK.init(KEY, X)
    eager = BLOCK.apply(variables, X, token_mask=np.ones(X.shape[:-1], bool))

    @jax.jit
    def closed_over(variables: Any) -> Any:
        out = BLOCK.apply(variables, X)
        return (out.output**2).sum(), out

    slope, compiled = jax.grad(closed_over, has_aux=True)(variables)
    assert_close(eager.output, compiled.output, 1e-6)
    assert all(np.asarray(leaf).any() for leaf in jax.tree.leaves(slope))


@pytest.mark.parametrize("shape", [(5, D), (2, 3, D), (2, 2, 3, D), (1, D), (1, 1, 1, 1, D)])
def test_disp_5_any_number_of_axes(shape: tuple[int, ...]) -> None:
    x = X.reshape(-1, D)[: math.prod(shape[:-1])].reshape(shape)
    got = apply(BLOCK, variables_of(BLOCK), x)
    flat = apply(BLOCK, variables_of(BLOCK), x.reshape(-1, D))
    assert got.output.shape == shape
    assert same_bits(np.asarray(got.output).reshape(-1, D), flat.output)


def test_disp_5_tokens_do_not_see_each_other() -> None:
    variables = variables_of(BLOCK)
    whole = np.asarray(apply(BLOCK, variables, X).output)
    one = jax.jit(jax.vmap(lambda x: BLOCK.apply(variables, x[None]).output[0]))(X.reshape(-1, D))
    assert_close(one, whole.reshape(-1, D), 1e-6)


def test_parameters() -> None:
    """Names, shapes, dtypes, logical axes; the same for every capacity, coefficient, mesh and mode."""

    def tree(block: MoEBlock, layout: Any = None, **kwargs: Any) -> Any:
        with on(layout):
            return jax.eval_shape(lambda: block.init(KEY, X, **kwargs))

    full = tree(BLOCK.clone(use_bias=True, router=Router(expert_bias=True)))
    described = {
        path: (leaf.value.shape, leaf.value.dtype.name, leaf.names)
        for path, leaf in ((path, leaf) for path, leaf in flatten(full["params"]))
    }
    assert described == {
        "gate/kernel": ((D, E), "float32", ("embed", None)),
        "wi_0": ((E, D, F), "float32", ("expert", "embed", "mlp")),
        "wi_1": ((E, D, F), "float32", ("expert", "embed", "mlp")),
        "wo": ((E, F, D), "float32", ("expert", "mlp", "embed")),
        "wi_0_bias": ((E, F), "float32", ("expert", "mlp")),
        "wi_1_bias": ((E, F), "float32", ("expert", "mlp")),
        "wo_bias": ((E, D), "float32", ("expert", "embed")),
    }
    assert jax.tree.map(lambda x: (x.shape, x.dtype.name), full["moe_state"]) == {"expert_bias": ((E,), "float32")}

    plain = tree(BLOCK)
    assert {path for path, _ in flatten(plain["params"])} == {"gate/kernel", "wi_0", "wi_1", "wo"}
    assert plain.keys() == {"params"}, "neither metrics nor state from init"
    for other in (
        tree(BLOCK, capacity=3),
        tree(BLOCK.clone(capacity=Capacity(3, chunks=2), aux_loss_coeff=0.1, dtype=jnp.bfloat16)),
        tree(BLOCK, deterministic=False),
        tree(BLOCK.clone(**LAYOUTS["2x4"].axes), LAYOUTS["2x4"]),  # type: ignore[union-attr]
    ):
        assert jax.tree.structure(other) == jax.tree.structure(plain)
        assert shapes(other) == shapes(plain)
    assert {path for path, _ in flatten(tree(BLOCK.clone(gated=False))["params"])} == {"gate/kernel", "wi_0", "wo"}
    low = tree(BLOCK.clone(param_dtype=jnp.bfloat16))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(low)} == {"bfloat16"}
    named = BLOCK.clone(expert_axis_name="e", embed_axis_name="d", mlp_axis_name="f")
    assert dict(flatten(tree(named)["params"]))["wi_0"].names == ("e", "d", "f")


def shapes(tree: Any) -> Any:
    return [(leaf.shape, leaf.dtype.name) for leaf in jax.tree.leaves(tree)]


def flatten(tree: Any) -> list[tuple[str, Any]]:
    is_box = lambda leaf: isinstance(leaf, nn.LogicallyPartitioned)  # noqa: E731
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_box)
    return [("/".join(str(key.key) for key in path), leaf) for path, leaf in leaves]


@pytest.mark.parametrize("mesh", ["none", "2x4"])
def test_init_2_experts_and_layers_start_apart(mesh: str) -> None:
    layout = LAYOUTS[mesh]
    block = MoEBlock(8, K, 16, **support.axes(layout))
    with on(layout):
        params = nn.meta.unbox(jax.jit(block.init)(KEY, X))["params"]
    for name in ("wi_0", "wi_1", "wo"):
        kernels = np.asarray(params[name])
        gaps = [np.abs(kernels[a] - kernels[b]).max() for a in range(8) for b in range(a)]
        assert min(gaps) > 0.01
    assert np.abs(np.asarray(params["wi_0"]) - np.asarray(params["wi_1"])).max() > 0.01
    alone = variables_of(MoEBlock(8, K, 16))["params"]
    assert all(same_bits(a, b) for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(alone), strict=True))


def test_fan_in_is_that_of_one_expert() -> None:
    """LeCun's variance is 1 / fan-in: with the expert axis counted it would be E times smaller."""
    block = MoEBlock(8, 1, 256)
    params = nn.meta.unbox(jax.jit(block.init)(KEY, jnp.ones((1, 64))))["params"]
    for name, fan_in in (("wi_0", 64), ("wi_1", 64), ("wo", 256)):
        assert np.asarray(params[name]).var() == pytest.approx(1 / fan_in, rel=0.05)


def test_signatures() -> None:
    assert str(inspect.signature(MoEBlock.__call__).replace(return_annotation=inspect.Signature.empty)) == (
        "(self, x: \"Float[Array, '*tokens D']\", *, capacity: 'Capacity | int | None' = None, "
        "token_mask: \"Bool[Array, '*tokens'] | None\" = None, deterministic: 'bool' = True)"
    )
    assert list(inspect.signature(MoEBlock.route).parameters) == ["self", "x", "token_mask"]
    assert list(inspect.signature(MoEBlock.experts).parameters) == ["self", "rows", "group_sizes"]
    fields = {
        name: parameter.default
        for name, parameter in inspect.signature(MoEBlock).parameters.items()
        if name not in ("kernel_init", "bias_init", "parent", "name")
    }
    empty = inspect.Parameter.empty
    assert fields == {
        "num_experts": empty,
        "num_experts_per_tok": empty,
        "intermediate_size": empty,
        "router": Router(),
        "activation": "silu",
        "gated": True,
        "use_bias": False,
        "aux_loss_coeff": 0.0,
        "z_loss_coeff": 0.0,
        "capacity": None,
        "capacity_scope": "rank",
        "drop_order": "position",
        "expert_axis": None,
        "batch_axes": (),
        "implementation": None,
        "dtype": None,
        "param_dtype": jnp.float32,
        "expert_axis_name": "expert",
        "embed_axis_name": "embed",
        "mlp_axis_name": "mlp",
    }


def test_public_names() -> None:
    assert {
        *("Capacity", "CapacitySpec", "MoEBlock", "MoEOutput", "Router", "Routing", "route", "grouped_matmul"),
        *("ep_prepare", "ep_dispatch", "ep_combine", "load_balancing_loss", "router_z_loss", "update_expert_bias"),
    } <= set(dir(moe_blocks))


# --- capacity


def test_the_call_wins_over_the_attribute() -> None:
    params = support.draw_params(0, E=E, D=D, F=F, gate=False)
    x = support.force(X[0], np.tile([0, 1], (3, 1)), np.ones((3, 2)))
    forced = Forced(E, K, F)
    variables = {"params": params}
    dropless = apply(forced, variables, x).output
    capped = apply(forced, variables, x, capacity=2).output
    assert np.asarray(dropless).any(-1).tolist() == [True] * 3
    assert np.asarray(capped).any(-1).tolist() == [True, False, False]
    small = forced.clone(capacity=2)
    assert same_bits(apply(small, variables, x).output, capped)
    assert same_bits(apply(small, variables, x, capacity=Capacity(None)).output, dropless)
    assert same_bits(apply(forced.clone(capacity=Capacity(6)), variables, x, capacity=2).output, capped)
    for result in (apply(small, variables, x), apply(small, variables, x, capacity=100)):
        assert result.total_recv_tokens.tolist() == [6], "demand before drops"


@pytest.mark.parametrize("slots", [1, 2])
def test_disp_3_a_dropped_row_is_zero(slots: int) -> None:
    """Five tokens, all to expert 0, with C slots: C rows as the oracle has them, the others exactly zero."""
    params = support.draw_params(0, E=E, D=D, F=F)
    params["gate"] = np.eye(D, E, dtype=np.float32)
    x = X.reshape(-1, D)[:5].copy()
    x[:, :E] = [1, 0, 0, 0]
    block, oracle = MoEBlock(E, 1, F, capacity_scope="expert"), Oracle(E, 1, slots, "expert")
    got = support.run(block, params, x, capacity=slots, d_output=np.ones_like(x))
    want = oracle(params, x)
    assert_close(got.output, want.output, 1e-6)
    assert got.output.any(-1).tolist() == [t < slots for t in range(5)] == got.grads["x"].any(-1).tolist()
    assert got.metrics["dropped"] == 5 - slots
    assert got.total_recv_tokens.tolist() == [5, 0, 0, 0]
    assert_close(got.grads["x"], oracle.grads(params, x, np.ones_like(x))["x"], 1e-5)


@pytest.mark.parametrize("norm", [False, True])
def test_survivors_are_not_renormalised(norm: bool) -> None:
    """Tagged experts: with one of two choices dropped, the other keeps its weight."""
    block = MoEBlock(2, 2, F, router=Router(norm_topk_prob=norm), capacity_scope="expert", drop_order="weight")
    params = support.draw_params(0, E=2, D=D, F=F)
    params["gate"] = np.eye(D, 2, dtype=np.float32)
    x = X.reshape(-1, D)[:2].copy()
    x[:, :2] = [[0, math.log(3)], [0, math.log(9)]]  # expert 1 by weight: token 1, expert 0: token 0
    oracle = Oracle(2, 2)
    output = support.run(block, params, x, capacity=1).output
    assert_close(output[0], 0.25 * oracle.expert(params, 0, x[0].astype(float)), 1e-6)
    assert_close(output[1], 0.9 * oracle.expert(params, 1, x[1].astype(float)), 1e-6)


def test_the_spec_of_a_layer() -> None:
    spec = BLOCK.capacity_spec((8, 3, D))
    assert (spec.tokens_per_rank, spec.num_experts, spec.num_experts_per_tok, spec.ep_size) == (24, E, K, 1)
    for mesh, tokens, ep in (("2x4", 3, 4), ("4", 6, 4), ("data only", 6, 1), ("with a bystander", 6, 2)):
        layout = (LAYOUTS | MORE_LAYOUTS)[mesh]
        with on(layout):
            spec = BLOCK.clone(capacity_scope="expert", **support.axes(layout)).capacity_spec((8, 3, D))
        assert (spec.tokens_per_rank, spec.ep_size, spec.scope) == (tokens, ep, "expert")


# --- masks


def test_a_masked_token_may_hold_anything() -> None:
    """LOSS-1: NaN, infinity or the largest number; and without the mask NaN does spread, through losses and drops."""
    block = BLOCK.clone(aux_loss_coeff=0.1, z_loss_coeff=0.1)
    params = support.flat(variables_of(block)["params"])
    mask = np.ones(X.shape[:-1], bool)
    mask[1, 1:] = mask[5] = False
    results = []
    for poison in (0.0, np.nan, np.inf, np.finfo(np.float32).max):
        x = np.where(mask[..., None], X, np.float32(poison))
        results.append(support.run(block, params, x, mask, capacity=20, d_output=X, d_aux_loss=1.0))
    for other in results[1:]:
        for a, b in zip(jax.tree.leaves(other), jax.tree.leaves(results[0]), strict=True):
            assert same_bits(a, b)
    assert results[0].metrics["dropped"] > 0
    naked = support.run(block, params, np.where(mask[..., None], X, np.nan), None, capacity=20, d_aux_loss=1.0)
    assert np.isnan(naked.aux_loss) and np.isnan(naked.grads["gate"]).any()


def test_masked_rows_are_as_good_as_absent() -> None:
    block = BLOCK.clone(aux_loss_coeff=0.1, z_loss_coeff=0.1)
    params = support.flat(variables_of(block)["params"])
    mask = np.ones(X.shape[:-1], bool)
    mask[:, 2] = False
    got = support.run(block, params, X, mask, capacity=20, d_output=X, d_aux_loss=1.0)
    want = support.run(block, params, X[:, :2], None, capacity=20, d_output=X[:, :2], d_aux_loss=1.0)
    assert_close(got.output[:, :2], want.output, 1e-6)
    assert_close(got.aux_loss, want.aux_loss, 1e-6)
    assert got.total_recv_tokens.tolist() == want.total_recv_tokens.tolist() == [32]
    for name, grad in want.grads.items():
        assert_close(got.grads[name][:, :2] if name == "x" else got.grads[name], grad, 2e-6, name)


def test_no_real_token_at_all() -> None:
    layout = LAYOUTS["2x4"]
    block = BLOCK.clone(aux_loss_coeff=0.1, z_loss_coeff=0.1, use_bias=True, **support.axes(layout))
    params = support.flat(variables_of(block)["params"])
    got = support.run(
        block, params, X * np.nan, np.zeros(X.shape[:-1], bool), capacity=4, d_output=X, d_aux_loss=1.0,
        layout=layout,
    )  # fmt: skip
    assert all(not leaf.any() for leaf in jax.tree.leaves(got))


# --- router


def test_rout_4_router_is_float32_in_a_bfloat16_block() -> None:
    gate = np.zeros((D, 2), np.float32)
    gate[0] = [1.0, 1.001]
    params = support.draw_params(0, E=2, D=D, F=F) | {"gate": gate}
    block = MoEBlock(2, 1, F, dtype=jnp.bfloat16)
    x = jnp.eye(1, D, dtype=jnp.bfloat16)
    got = support.run(block, params, x)
    assert got.metrics["load"].tolist() == [0, 1]
    assert got.output.dtype == jnp.bfloat16 and got.grads["gate"].dtype == np.float32
    low = support.run(block, params | {"gate": gate.astype(jnp.bfloat16).astype(np.float32)}, x)
    assert low.metrics["load"].tolist() == [1, 0]  # what a router in bfloat16 would do


def test_rout_11_jitter_does_not_reach_the_experts() -> None:
    """k = E and a zero gate: noise changes nothing, unless the experts saw it."""
    block = MoEBlock(2, 2, F, router=Router(jitter=0.5))
    params = support.draw_params(0, E=2, D=D, F=F)
    zero = {"params": support.unflat(params | {"gate": np.zeros((D, 2), np.float32)})}
    clean = apply(block, zero, X)
    noisy = apply(block, zero, X, rngs={"jitter": KEY}, deterministic=False)
    assert same_bits(clean.output, noisy.output)
    variables = {"params": support.unflat(params)}
    noisy = apply(block, variables, X, rngs={"jitter": KEY}, deterministic=False)
    assert not same_bits(apply(block, variables, X).output, noisy.output)
    again = apply(block, variables, X, rngs={"jitter": KEY}, deterministic=False)
    other = apply(block, variables, X, rngs={"jitter": jax.random.key(1)}, deterministic=False)
    assert same_bits(noisy.output, again.output) and not same_bits(noisy.output, other.output)
    with pytest.raises(Exception, match="jitter"):
        apply(block, variables, X, deterministic=False)


BIASED = MoEBlock(2, 1, F, router=Router(score_function="sigmoid", expert_bias=True, bias_update_rate=0.001))


def biased(bias: Any, x: Any = X, mask: Any = None, mutable: Any = ("moe_state",), block: MoEBlock = BIASED) -> Any:
    params = support.draw_params(0, E=2, D=D, F=F) | {"gate": np.eye(D, 2, dtype=np.float32)}
    variables = {"params": support.unflat(params), "moe_state": {"expert_bias": jnp.array(bias, jnp.float32)}}
    return apply(block, variables, x, mask, mutable=mutable)


def test_rout_7_the_bias_moves_once_and_only_when_mutable() -> None:
    x = np.zeros((8, D), np.float32)
    x[:6, 0], x[6:, 1] = 5, 5  # counts 6 and 2
    _, state = biased([0.0, 0.0], x)
    np.testing.assert_allclose(state["moe_state"]["expert_bias"], [-0.001, 0.001], rtol=1e-6)
    result = biased([0.0, 0.0], x, mutable=())
    assert type(result) is MoEOutput  # nothing came back to be changed
    _, metrics_only = biased([0.0, 0.0], x, mutable=("moe_metrics",))
    assert metrics_only.keys() == {"moe_metrics"}
    mask = np.arange(8) >= 4  # counts 2 and 2
    _, state = biased([0.0, 0.0], x, mask)
    assert state["moe_state"]["expert_bias"].tolist() == [0, 0]


def test_the_bias_counts_what_was_asked_for_and_not_what_was_kept() -> None:
    x = np.zeros((8, D), np.float32)
    x[:6, 0], x[6:, 1] = 5, 5
    capped = BIASED.clone(capacity=1, capacity_scope="expert")
    layout = LAYOUTS["2x4"]
    assert layout
    with on(layout):
        _, state = biased([0.0, 0.0], x, block=capped.clone(batch_axes=layout.axes["batch_axes"]))
    np.testing.assert_allclose(state["moe_state"]["expert_bias"], [-0.001, 0.001], rtol=1e-6)


def test_the_bias_has_no_gradient_and_no_parameter() -> None:
    x = X.reshape(-1, D)
    variables = {"params": support.unflat(support.draw_params(0, E=2, D=D, F=F))}

    def loss(bias: Any) -> Any:
        out = BIASED.apply(variables | {"moe_state": {"expert_bias": bias}}, x)
        return (out.output * x).sum()

    assert jax.jit(jax.grad(loss))(jnp.array([0.1, -0.1])).tolist() == [0, 0]
    assert "expert_bias" not in str(jax.tree.structure(variables_of(BIASED)["params"]))
    assert variables_of(BIASED)["moe_state"]["expert_bias"].tolist() == [0, 0], "init does not move it"


# --- losses


def test_loss_10_and_v14_coefficients() -> None:
    """A zero gate: uniform scores, so the balance loss is its coefficient; logsumexp is ln E."""
    params = support.draw_params(0, E=E, D=D, F=F) | {"gate": np.zeros((D, E), np.float32)}
    for a, z in ((0.01, 0.0), (0.0, 0.001)):
        got = apply(BLOCK.clone(aux_loss_coeff=a, z_loss_coeff=z), {"params": support.unflat(params)}, X)
        assert got.aux_loss == pytest.approx(a + z * math.log(E) ** 2, rel=1e-5)


@pytest.mark.parametrize("mesh", ["none", "2x4", "8", "data only"])
def test_loss_7_one_loss_for_every_mesh(mesh: str) -> None:
    """Half of the batch wants expert 0, the other half expert 1: 1 for the whole, 1.5 for a mean over shards."""
    layout = (LAYOUTS | MORE_LAYOUTS)[mesh]
    x = np.zeros((8, 1, D), np.float32)
    x[:4, :, 0] = x[4:, :, 1] = math.log(3)
    E = 8
    params = support.draw_params(0, E=E, D=D, F=F)
    params["gate"] = np.full((D, E), -100.0, np.float32) * (np.arange(E) > 1)  # only two experts count
    params["gate"][:2, :2] = np.eye(2)
    x[..., 2] = 1
    params["gate"][:2, 2:] = 0
    params["gate"][2, 2:], params["gate"][3:] = -100, 0
    block = MoEBlock(E, 1, F, aux_loss_coeff=2 / E, **support.axes(layout))
    with on(layout):
        got = apply(block, {"params": support.unflat(params)}, x)
    assert got.aux_loss == pytest.approx(1.0, abs=1e-6)
    assert got.aux_loss.shape == () and got.aux_loss.dtype == np.float32


def test_loss_14_the_penalty_is_beside_the_output() -> None:
    """Evaluation reads the output alone, which no coefficient changes."""
    variables = variables_of(BLOCK)
    plain = apply(BLOCK, variables, X)
    heavy = apply(BLOCK.clone(aux_loss_coeff=1.0, z_loss_coeff=1.0), variables, X)
    assert same_bits(plain.output, heavy.output) and heavy.aux_loss > 0.5


@pytest.mark.parametrize("mesh", ["2x4", "2x4 auto"])
def test_loss_16_scalar_cotangents_on_a_mesh(mesh: str) -> None:
    layout = (LAYOUTS | MORE_LAYOUTS)[mesh]
    assert layout
    block = BLOCK.clone(aux_loss_coeff=0.1, **layout.axes)

    def loss(variables: Any, task: float) -> Any:
        out = block.apply(variables, X)
        return task * (out.output**2).sum() + out.aux_loss

    with on(layout):
        for task in (0.0, 1.0):
            value, grads = jax.jit(jax.value_and_grad(loss))(variables_of(BLOCK), task)
            assert value.shape == () and np.asarray(grads["params"]["gate"]["kernel"]).any()
            assert np.asarray(grads["params"]["wo"]).any() == bool(task)


# --- metrics


def test_metrics_only_on_demand() -> None:
    variables = variables_of(BLOCK)
    out, collected = apply(BLOCK, variables, X, capacity=20, mutable=("moe_metrics",))
    metrics = collected["moe_metrics"]
    assert metrics.keys() == {"load", "dropped", "dropped_weight", "entropy", "max_violation"}
    assert metrics["load"].sum() == 48 and metrics["dropped"] == 28
    assert 0 < metrics["dropped_weight"] < 1 and 0 < metrics["entropy"] <= math.log(E)
    plain = apply(BLOCK, variables, X, capacity=20)
    assert all(same_bits(a, b) for a, b in zip(plain, out, strict=True))


def test_metrics_cost_nothing_when_nobody_asks() -> None:
    """The program without them has neither the logarithm of the entropy nor its operations."""

    def program(mutable: Any) -> str:
        return str(jax.make_jaxpr(lambda v: BLOCK.apply(v, X, mutable=mutable))(variables_of(BLOCK)))

    assert " log " in program(["moe_metrics"]) and " log " not in program(False)
    assert len(program(False)) < len(program(["moe_metrics"]))


def test_metrics_do_not_pile_up() -> None:
    """Sown twice, the new value stands; a tuple that grows would change the structure from step to step."""

    def sow(variables: Any) -> Any:
        return jax.eval_shape(lambda v: BLOCK.apply(v, X, mutable=["moe_metrics"])[1], variables)

    first = sow(variables_of(BLOCK))
    assert sow(variables_of(BLOCK) | first) == first


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


# --- errors, all before anything runs

FIELD_ERRORS = [
    ({"num_experts_per_tok": 5}, r"num_experts_per_tok must be at most num_experts=4, got 5"),
    ({"num_experts_per_tok": 0}, r"num_experts_per_tok must be an integer of at least 1, got 0"),
    ({"num_experts": 0}, r"num_experts must be an integer of at least 1, got 0"),
    ({"num_experts": 4.0}, r"num_experts must be an integer of at least 1, got 4\.0"),
    ({"intermediate_size": 0}, r"intermediate_size must be an integer of at least 1, got 0"),
    ({"activation": "swishh"}, r"activation must be .* jax\.nn, got 'swishh'"),
    ({"capacity": 0}, r"Capacity\.slots must be an integer of at least 1, got 0"),
    ({"capacity": 1.25}, r"got 1\.25\. Slots are rows .* for a factor call CapacitySpec\.slots"),
    ({"implementation": "fast"}, r"implementation must be None .* got 'fast'"),
    ({"aux_loss_coeff": -1.0}, r"aux_loss_coeff must be finite and at least 0, got -1\.0"),
    ({"z_loss_coeff": math.nan}, r"z_loss_coeff must be finite and at least 0, got nan"),
    ({"capacity_scope": "node"}, r"capacity_scope must be one of \('rank', 'expert'\), got 'node'"),
    ({"drop_order": "random"}, r"drop_order must be one of \('position', 'weight'\), got 'random'"),
    ({"batch_axes": "data"}, r"batch_axes must be a tuple of distinct axis names, got 'data'"),
    ({"batch_axes": ("a", "a")}, r"batch_axes must be a tuple of distinct axis names, got \('a', 'a'\)"),
    ({"expert_axis": "ep"}, r"batch_axes must include expert_axis='ep', got \(\)"),
]


@pytest.mark.parametrize(("change", "message"), FIELD_ERRORS)
def test_erg_1_wrong_fields(change: dict[str, Any], message: str) -> None:
    good = {"num_experts": E, "num_experts_per_tok": K, "intermediate_size": F}
    with pytest.raises(ValueError, match=message):
        MoEBlock(**(good | change))


@pytest.mark.parametrize(
    ("x", "kwargs", "message"),
    [
        (np.ones((3, D), np.int32), {}, r"x must be floating point, got int32; embed or cast it first"),
        (np.ones(D, np.float32), {}, r"x must have the shape \[\.\.\., tokens, D\] with no empty axis, got \(6,\)"),
        (np.ones((0, D), np.float32), {}, r"with no empty axis, got \(0, 6\)"),
        (X, {"token_mask": np.ones((8, 2), bool)}, r"token_mask must be bool \(8, 3\) .* got bool \(8, 2\)"),
        (X, {"token_mask": np.ones((8, 3), np.float32)}, r"True for real tokens, got float32 \(8, 3\)"),
        (X, {"capacity": 0}, r"Capacity\.slots must be an integer of at least 1, got 0"),
        (X, {"capacity": -1}, r"Capacity\.slots must be an integer of at least 1, got -1"),
        (X, {"capacity": math.nan}, r"Capacity\.slots must be an integer of at least 1, got nan"),
    ],
)
def test_wrong_calls(x: Any, kwargs: Any, message: str) -> None:
    for call in (lambda: BLOCK.apply(variables_of(BLOCK), x, **kwargs), lambda: BLOCK.init(KEY, x, **kwargs)):
        with pytest.raises(ValueError, match=message):
            call()


def test_capacity_is_static() -> None:
    with pytest.raises(ValueError, match=r"Capacity\.slots must be an integer of at least 1, got .*[Tt]race"):
        jax.jit(lambda c: BLOCK.apply(variables_of(BLOCK), X, capacity=c))(3)


def test_wrong_meshes() -> None:
    block = BLOCK.clone(batch_axes=("data", "expert"), expert_axis="expert")
    message = (
        r"batch_axes=\('data', 'expert'\) names \['data', 'expert'\], which the current mesh does not have .*set_mesh"
    )
    with pytest.raises(ValueError, match=message):
        block.apply(variables_of(BLOCK), X)
    with on(LAYOUTS["2x4"]):
        message = r"the leading axis of x, 6, must be a multiple of 8, the devices of batch_axes=.*; pad the batch"
        with pytest.raises(ValueError, match=message):
            block.apply(variables_of(BLOCK), X[:6])
        with pytest.raises(ValueError, match=r"num_experts=6 must be a multiple of ep_size=4"):
            block.clone(num_experts=6).init(KEY, X)


def test_a_router_is_checked_where_it_is_made() -> None:
    with pytest.raises(ValueError, match=re.escape("Router.score_function")):
        BLOCK.clone(router=Router(score_function="no"))


def test_feed_forward_is_what_the_block_runs() -> None:
    """One expert of one token: the block is the pure function, weighted."""
    block = MoEBlock(1, 1, F)
    params = variables_of(block)["params"]
    x = jnp.asarray(X.reshape(-1, D))
    kernels = {name: jnp.asarray(params[name]) for name in ("wi_0", "wi_1", "wo")}
    assert_close(apply(block, {"params": params}, x).output, feed_forward(x, jnp.array([24]), kernels), 1e-6)
