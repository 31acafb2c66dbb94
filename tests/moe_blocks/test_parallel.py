"""The layer on meshes of every kind gives what it gives on one device, leaf by leaf."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from moe_blocks import Capacity, MoEBlock
from tests.moe_blocks import support
from tests.moe_blocks.support import Layout, assert_leaves_close, same_bits

E, K, D, F, SHAPE = 8, 3, 8, 12, (8, 6)


class Axes(NamedTuple):
    """A mesh, and what each of its axes is for."""

    mesh: dict[str, int]
    batch: tuple[str, ...]
    expert: Any = None
    fsdp: Any = None
    tensor: Any = None
    collective: str | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """Of a block."""
        return {
            "batch_axes": self.batch,
            "expert_axis": self.expert,
            "fsdp_axis": self.fsdp,
            "tensor_axis": self.tensor,
            "collective": self.collective,
        }

    @property
    def layout(self) -> Layout:
        return Layout(self.mesh)


MESHES = {
    "expert": Axes({"expert": 8}, ("expert",), "expert", collective="ragged_all_to_all"),
    "data, expert": Axes({"data": 2, "expert": 4}, ("data", "expert"), "expert", collective="ragged_all_to_all"),
    "data, fsdp, expert": Axes({"data": 2, "fsdp": 2, "expert": 2}, ("data", "fsdp", "expert"), "expert", "fsdp"),
    "fsdp, expert, tensor": Axes(
        {"fsdp": 2, "expert": 2, "tensor": 2}, ("fsdp", "expert"), "expert", "fsdp", "tensor", "ragged_all_to_all"
    ),
    "data, fsdp, tensor": Axes({"data": 2, "fsdp": 2, "tensor": 2}, ("data", "fsdp"), None, "fsdp", "tensor"),
    "two expert axes": Axes({"pod": 2, "expert": 2, "tensor": 2}, ("pod", "expert"), ("pod", "expert"), None, "tensor"),
    "two axes each": Axes(
        {"a": 2, "b": 2, "expert": 2}, ("a", "b", "expert"), ("expert",), ("a", "b"), collective="ragged_all_to_all"
    ),
    "kernels over all": Axes(
        {"data": 1, "fsdp": 2, "expert": 2, "tensor": 2}, ("data", "expert"), "expert", "fsdp", "tensor"
    ),
}
BLOCK = MoEBlock(E, K, F, use_bias=True, aux_loss_coeff=0.1, z_loss_coeff=0.01)


@functools.cache
def draw(seed: int = 0) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    params = support.draw_params(seed, E=E, D=D, F=F, use_bias=True)
    x, d_output = rng.normal(size=(2, *SHAPE, D)).astype(np.float32)
    return params, x, rng.random(SHAPE) < 0.8, d_output


def run(block: MoEBlock, layout: Layout | None, capacity: Any = None, rows: int = SHAPE[0]) -> support.Ran:
    params, x, mask, d_output = draw()
    return support.run(
        block, params, x[:rows], mask[:rows], capacity=capacity, d_output=d_output[:rows], d_aux_loss=1.0, layout=layout
    )


@pytest.mark.parametrize("name", MESHES)
def test_output_and_every_gradient(name: str) -> None:
    axes = MESHES[name]
    want, got = run(BLOCK, None), run(BLOCK.clone(**axes.fields), axes.layout)
    assert_leaves_close(
        {"output": got.output, "aux_loss": got.aux_loss} | got.grads,
        {"output": want.output, "aux_loss": want.aux_loss} | want.grads,
        2e-6,
    )
    assert got.total_recv_tokens.sum() == want.total_recv_tokens.sum() == K * draw()[2].sum()


@pytest.mark.parametrize("name", ["data, expert", "fsdp, expert, tensor", "two axes each"])
@pytest.mark.parametrize("capacity", [Capacity(8), Capacity(8, chunks=3)])
def test_what_overflows_is_dropped_alike(name: str, capacity: Capacity) -> None:
    """The decision and the result depend on batch and expert axes only: not on the collective, and not on the rest."""
    axes = MESHES[name]
    ranks = {axis: axes.mesh[axis] for axis in axes.batch}
    plain = Axes(ranks, axes.batch, axes.expert, collective="all_gather")
    want = run(BLOCK.clone(**plain.fields), plain.layout, capacity)
    got = run(BLOCK.clone(**axes.fields), axes.layout, capacity)
    assert same_bits(got.total_recv_tokens, want.total_recv_tokens) and (want.total_recv_tokens > 8).any()
    assert {k: v.tolist() for k, v in got.metrics.items()} == {k: v.tolist() for k, v in want.metrics.items()}
    assert_leaves_close({"output": got.output} | got.grads, {"output": want.output} | want.grads, 2e-6)


@pytest.mark.parametrize("rows", [1, 3, 5])
@pytest.mark.parametrize("name", ["data, expert", "fsdp, expert, tensor"])
def test_a_batch_that_the_mesh_cannot_divide(name: str, rows: int) -> None:
    """A decode step: some ranks have fewer tokens than others, some none."""
    axes = MESHES[name]
    want, got = run(BLOCK, None, rows=rows), run(BLOCK.clone(**axes.fields), axes.layout, rows=rows)
    assert got.output.shape == (rows, *SHAPE[1:], D)
    assert_leaves_close({"output": got.output} | got.grads, {"output": want.output} | want.grads, 2e-6)
    assert got.total_recv_tokens.sum() == K * draw()[2][:rows].sum()


def test_own_experts_see_whole_kernels() -> None:
    axes = MESHES["fsdp, expert, tensor"]
    fields = {name: getattr(BLOCK, name) for name in ("num_experts", "num_experts_per_tok", "intermediate_size")}

    class Whole(MoEBlock):
        def experts(self, rows: Any, group_sizes: Any) -> Any:
            kernel = self.expert_param("mix", self.kernel_init, group_sizes.shape[0], (D, D), ("embed", "mlp"))
            norm = jnp.linalg.norm(kernel, axis=(1, 2))
            group = jnp.repeat(norm, group_sizes, total_repeat_length=rows.shape[0])
            return rows * group[:, None]

    _, x, mask, d_output = draw()
    params = {"gate": draw()[0]["gate"], "mix": np.random.default_rng(1).normal(size=(E, D, D)).astype(np.float32)}
    want, got = (
        support.run(Whole(**fields, **more), params, x, mask, d_output=d_output, layout=layout)
        for more, layout in (({}, None), (axes.fields, axes.layout))
    )
    assert_leaves_close({"output": got.output} | got.grads, {"output": want.output} | want.grads, 2e-6)


# --- what is sharded stays sharded


def lowered(axes: Axes, block: MoEBlock) -> Any:
    """Forward and backward on kernels that are stored as the axes say."""
    mesh = jax.make_mesh(
        tuple(axes.mesh.values()), tuple(axes.mesh), axis_types=(AxisType.Auto,) * len(axes.mesh)
    )  # fmt: skip
    params = {
        "wi_0": ((E, D, F), P(axes.expert, axes.fsdp, axes.tensor)),
        "wi_1": ((E, D, F), P(axes.expert, axes.fsdp, axes.tensor)),
        "wo": ((E, F, D), P(axes.expert, axes.tensor, axes.fsdp)),
        "gate": ((D, E), P()),
    }
    arguments = {name: stored(mesh, shape, spec) for name, (shape, spec) in params.items()}
    x = stored(mesh, (*SHAPE, D), P(axes.batch))

    def loss(params: Any, x: Any) -> Any:
        return jnp.sum(jnp.square(block.apply({"params": support.unflat(params)}, x).output))

    with jax.set_mesh(mesh):
        out = {name: argument.sharding for name, argument in arguments.items()}
        return jax.jit(jax.grad(loss), out_shardings=out).lower(arguments, x)


def stored(mesh: Mesh, shape: tuple[int, ...], spec: P) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))


def test_kernels_are_gathered_twice_and_their_gradients_scattered() -> None:
    """Over the fsdp axis: three kernels forward, three again backward, three reduce-scatters; and nothing whole.

    The second gathers are seen before XLA's CPU backend, which ignores that they are there to save memory.
    """
    axes = Axes({"fsdp": 8}, ("fsdp",), None, "fsdp")
    program = lowered(axes, MoEBlock(E, K, F, **axes.fields))
    assert program.as_text().count("stablehlo.all_gather") == 6
    lines = program.compile().as_text().splitlines()
    assert sum(" reduce-scatter(" in line for line in lines) == 3
    whole = f"f32[{E},{D},{F}]", f"f32[{E},{F},{D}]"
    reduced = [line for line in lines if " all-reduce(" in line and any(shape in line for shape in whole)]
    assert not reduced, "a whole gradient was summed everywhere"


# --- bad axes


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tensor_axis": "t"}, r"tensor_axis='t' need batch_axes, the mesh axes that shard the tokens, got \(\)"),
        ({"batch_axes": ("a",), "tensor_axis": "a"}, r"tensor_axis='a' must not be among batch_axes, got \['a'\]"),
        (
            {"batch_axes": ("a", "b"), "expert_axis": "b", "fsdp_axis": ("a", "b")},
            r"expert_axis and fsdp_axis must not share a mesh axis, got \['b'\] in both",
        ),
        ({"batch_axes": ("a",), "expert_axis": ()}, r"expert_axis must be None, a mesh axis or several, got \(\)"),
        ({"batch_axes": ("a",), "expert_axis": ("a", "b")}, r"batch_axes must include expert_axis=\('a', 'b'\), got"),
    ],
)
def test_axes_that_do_not_fit_together(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MoEBlock(E, K, F, **fields)


def test_sizes_that_the_axes_cannot_divide() -> None:
    axes = Axes({"data": 2, "fsdp": 4}, ("data",), None, "fsdp")
    x = jnp.ones((2, 3, 6))
    with support.on(axes.layout), pytest.raises(ValueError, match=r"width of x=6 must be a multiple of .* fsdp_axis"):
        MoEBlock(E, K, F, **axes.fields).init(jax.random.key(0), x)
    axes = Axes({"data": 2, "tensor": 4}, ("data",), None, None, "tensor")
    with support.on(axes.layout), pytest.raises(ValueError, match=r"intermediate_size=6 must be .* tensor_axis"):
        MoEBlock(E, K, 6, **axes.fields).init(jax.random.key(0), x)
    with support.on(axes.layout), pytest.raises(ValueError, match=r"fsdp_axis=\('model',\) names \['model'\], which"):
        MoEBlock(E, K, F, batch_axes=("data",), fsdp_axis="model").init(jax.random.key(0), x)
