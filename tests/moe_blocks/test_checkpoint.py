"""A sharded layer through Orbax and back on meshes of other sizes, within one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from moe_blocks import MoEBlock
from tests.moe_blocks import support
from tests.moe_blocks.support import Layout, on

E, D, F = 4, 4, 3


def layout(ep: int) -> Layout:
    return Layout({"expert": ep})


def shardings(tree: Any, ep: int) -> Any:
    """Experts over the axis, everything else on every device."""

    def place(leaf: Any) -> NamedSharding:
        return NamedSharding(layout(ep).mesh, P("expert") if leaf.ndim == 3 else P())

    return jax.tree.map(place, tree)


def state() -> Any:
    """Expert e holds e + 1 in its weights and its Adam moments; the gate tells where each number lies."""

    def filled(shape: tuple[int, ...], scale: float) -> np.ndarray:
        return np.broadcast_to(scale * (np.arange(E, dtype=np.float32) + 1).reshape(E, 1, 1), shape)

    shapes = {"wi_0": (E, D, F), "wi_1": (E, D, F), "wo": (E, F, D)}
    gate = {"kernel": np.arange(D * E, dtype=np.float32).reshape(D, E)}
    trees = [{name: filled(shape, s) for name, shape in shapes.items()} | {"gate": gate} for s in (1, 10, 100)]
    return dict(zip(("params", "mu", "nu"), trees, strict=True))


@pytest.mark.parametrize("saved_at", [2, 4])
def test_ckpt_1_ckpt_4_restore_at_another_size(saved_at: int, tmp_path: Path) -> None:
    plain = state()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", jax.device_put(plain, shardings(plain, saved_at)))
        checkpointer.wait_until_finished()
        sizes = jax.tree.map(lambda leaf: leaf.shape, checkpointer.metadata(tmp_path / "state").item_metadata.tree)
        assert sizes["params"]["wi_0"] == (E, D, F), "all experts are in the file"
        for ep in (1, 2, 4):
            target = jax.tree.map(
                lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
                plain,
                shardings(plain, ep),
            )
            restored = checkpointer.restore(tmp_path / "state", target)
            jax.tree.map(np.testing.assert_array_equal, restored, plain)
            for leaf, wanted in zip(jax.tree.leaves(restored), jax.tree.leaves(shardings(plain, ep)), strict=True):
                assert leaf.sharding == wanted
            for rank, shard in enumerate(restored["params"]["wo"].addressable_shards):
                first = rank * E // ep
                assert np.unique(shard.data).tolist() == [float(e + 1) for e in range(first, first + E // ep)]


def test_ckpt_1_a_layer_computes_the_same_after_a_restore(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(4, 3, D)).astype(np.float32)
    params = support.unflat(support.draw_params(0, E=E, D=D, F=F))
    want = MoEBlock(E, 2, F).apply({"params": params}, x)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "params", jax.device_put(params, shardings(params, 4)))
        checkpointer.wait_until_finished()
        target = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            params,
            shardings(params, 2),
        )
        restored = checkpointer.restore(tmp_path / "params", target)
    with on(layout(2)):
        got = jax.jit(MoEBlock(E, 2, F, **layout(2).axes).apply)({"params": restored}, x)
    support.assert_close(got.output, want.output, 1e-6)
    assert jnp.sum(got.total_recv_tokens) == 24
