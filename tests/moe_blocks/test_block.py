"""The contract of `MoEBlock`: form, capacity, errors.

That its numbers are right is for `test_block_oracle.py`.
"""

from __future__ import annotations

import inspect
import math
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moe_blocks
from moe_blocks import Capacity, MoEBlock, MoEOutput, Router
from moe_blocks.experts import feed_forward
from tests.moe_blocks import support
from tests.moe_blocks.layer import BLOCK, KEY, D, E, F, K, X, apply, flatten, shapes, variables_of
from tests.moe_blocks.oracle import Oracle
from tests.moe_blocks.support import LAYOUTS, MORE_LAYOUTS, Forced, assert_close, on, same_bits

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
        "fsdp_axis": None,
        "tensor_axis": None,
        "collective": None,
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
    with on(LAYOUTS["2x4"]), pytest.raises(ValueError, match=r"num_experts=6 must be a multiple of ep_size=4"):
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
