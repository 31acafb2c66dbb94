"""`MoEBlock` against the oracle: outputs, losses, demand, drops and every gradient leaf, on every mesh.

A shape costs a compilation, so shapes come from a table; routings, loads, masks and values are drawn.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from moe_blocks import MoEBlock, Router
from tests.moe_blocks import support
from tests.moe_blocks.oracle import Oracle
from tests.moe_blocks.support import LAYOUTS, MORE_LAYOUTS, Layout, assert_close, assert_leaves_close

# A sum of a hundred float32 products is good to some 1e-6 of its norm; 2e-7 is what comes out for most draws.
FLOAT32 = 1e-5
# A value passes up to eight roundings to bfloat16 (relative 2**-8 each) between x and a gradient: three products in
# each direction, the activation and the sum over experts. 5 * 2**-8 is the worst of 150 draws, a wrong expert gives 1.
BFLOAT16 = 8 * 2**-8
# Where the choice of experts or of losers hangs on less than this, float32 may decide otherwise than float64.
DECISIVE = 1e-5


class Sizes(NamedTuple):
    shape: tuple[int, ...]
    E: int = 8
    k: int = 2
    D: int = 12
    F: int = 6


class Buffers(NamedTuple):
    slots: int | None = None
    scope: str = "rank"
    drop_order: str = "position"


DROPLESS = Buffers()
MESHED = Sizes((8, 3))


@st.composite
def inputs(draw: st.DrawFn, sizes: Sizes, **params: bool) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray, Any]:
    """Parameters, x with NaN under the mask, the mask and a cotangent.

    One channel of x is constant, so that a row of the gate is a bias: it decides which experts are crowded or empty.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    params = support.draw_params(int(rng.integers(2**32)), E=sizes.E, D=sizes.D, F=sizes.F, **params)
    favour = st.lists(st.sampled_from([-3.0, 0.0, 3.0]), min_size=sizes.E, max_size=sizes.E)
    params["gate"][0] = draw(favour)
    x = support.bf16_exact(rng.normal(size=(*sizes.shape, sizes.D)))
    x[..., 0] = 1
    share = draw(st.sampled_from([0.0, 0.3, 0.9]))
    mask = rng.random(sizes.shape) >= share
    if draw(st.booleans()):
        mask[0] = False  # a rank that has no token at all
    x[~mask] = np.nan
    return params, x, mask, support.bf16_exact(rng.normal(size=x.shape))


def check(
    block: MoEBlock,
    drawn: tuple[dict[str, np.ndarray], np.ndarray, np.ndarray, Any],
    buffers: Buffers,
    layout: Layout | None,
    *,
    tolerance: float = FLOAT32,
    dtype: Any = jnp.float32,
) -> int:
    """Asserts that the block does as the oracle does; returns how many assignments were dropped."""
    params, x, mask, d_output = drawn
    block = block.clone(capacity_scope=buffers.scope, drop_order=buffers.drop_order, **support.axes(layout))
    router = {
        name: getattr(block.router, name)
        for name in ("score_function", "use_pre_softmax", "norm_topk_prob", "scaling_factor")
    }
    oracle = Oracle(
        block.num_experts,
        block.num_experts_per_tok,
        **buffers._asdict(),
        places=support.places(layout),
        activation=block.activation,
        aux_loss_coeff=block.aux_loss_coeff,
        z_loss_coeff=block.z_loss_coeff,
        **router,
    )
    want = oracle(params, x, mask)
    assume(want.margin > DECISIVE)
    got = support.run(
        block,
        params,
        jnp.asarray(x, dtype),
        mask,
        capacity=buffers.slots,
        d_output=d_output,
        d_aux_loss=1.75,
        layout=layout,
    )
    assert got.output.dtype == dtype and got.aux_loss.dtype == np.float32 and got.total_recv_tokens.dtype == np.int32
    assert got.total_recv_tokens.tolist() == want.total_recv_tokens.tolist()
    dropped = int((mask[..., None] & ~want.kept).sum())
    assert got.metrics["dropped"] == dropped
    assert_close(got.output, want.output, tolerance, "output")
    assert_close(got.aux_loss, want.aux_loss, FLOAT32, "aux_loss")
    assert_leaves_close(got.grads, oracle.grads(params, x, d_output, 1.75, mask), tolerance)
    assert not got.output[~mask].any() and not got.grads["x"][~mask].any()
    assert not got.output[~want.kept.any(-1)].any(), "a token that lost every choice contributes exact zeros"
    return dropped


PLAIN = MoEBlock(MESHED.E, MESHED.k, MESHED.F, use_bias=True, aux_loss_coeff=0.3, z_loss_coeff=0.1)


@pytest.mark.parametrize("mesh", [*LAYOUTS, "2x4 auto", "data only", "with a bystander"])
@given(drawn=inputs(MESHED, use_bias=True))
def test_dropless_on_every_mesh(mesh: str, drawn: Any) -> None:
    """EP-1, POL-4: one set of numbers whatever the mesh, expert gradients included."""
    assert check(PLAIN, drawn, DROPLESS, (LAYOUTS | MORE_LAYOUTS)[mesh]) == 0


BY_POSITION, BY_WEIGHT = Buffers(5), Buffers(2, "expert", "weight")


@pytest.mark.parametrize(
    ("mesh", "buffers"),
    [
        *((mesh, BY_POSITION) for mesh in [*LAYOUTS, "expert first"]),
        *((mesh, BY_WEIGHT) for mesh in ("none", "2x4", "8")),
    ],
)
def test_capped_on_every_mesh(mesh: str, buffers: Buffers) -> None:
    dropped = []

    @given(drawn=inputs(MESHED, use_bias=True))
    def every(drawn: Any) -> None:
        dropped.append(check(PLAIN, drawn, buffers, (LAYOUTS | MORE_LAYOUTS)[mesh]))

    every()
    assert max(dropped) > 0, "no draw overflowed"


@pytest.mark.parametrize(
    "buffers", [Buffers(6, "rank", "weight"), Buffers(2, "expert")], ids=["rank by weight", "expert by position"]
)
@pytest.mark.parametrize("mesh", ["none", "2x4"])
@settings(max_examples=40)
@given(data=st.data())
def test_any_choice_of_experts_and_any_ties(mesh: str, buffers: Buffers, data: st.DataObject) -> None:
    """Routings that no gate would give: weights of few values, so that ties decide, and negative and zero ones."""
    sizes, layout = Sizes((8, 3), E=4, k=2), LAYOUTS[mesh]
    pairs = [(a, b) for a in range(sizes.E) for b in range(sizes.E) if a != b]
    crowd = data.draw(st.lists(st.sampled_from(pairs), min_size=1, max_size=len(pairs)))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    ids = np.array(crowd)[rng.integers(len(crowd), size=sizes.shape)]
    weights = rng.choice([-0.5, 0.0, 0.25, 0.5], size=ids.shape)
    mask = rng.random(sizes.shape) < data.draw(st.sampled_from([0.5, 1.0]))
    params = support.draw_params(7, E=sizes.E, D=sizes.D, F=sizes.F, gate=False)
    x = support.force(support.bf16_exact(rng.normal(size=(*sizes.shape, sizes.D))), ids, weights)
    d_output = rng.normal(size=x.shape).astype(np.float32)

    block = support.Forced(sizes.E, sizes.k, sizes.F, capacity_scope=buffers.scope, drop_order=buffers.drop_order)
    got = support.run(
        block.clone(**support.axes(layout)), params, x, mask, capacity=buffers.slots, d_output=d_output, layout=layout
    )
    oracle = Oracle(sizes.E, sizes.k, **buffers._asdict(), places=support.places(layout))
    want = oracle(params, x, mask, choice=(ids, weights))
    grads = oracle.grads(params, x, d_output, mask=mask, choice=(ids, weights))
    grads["x"][..., 2:4] += grads.pop("weights")
    assert_close(got.output, want.output, FLOAT32, "output")
    assert_leaves_close(got.grads, grads, FLOAT32)
    assert got.total_recv_tokens.tolist() == want.total_recv_tokens.tolist()
    assert got.metrics["dropped"] == (mask[..., None] & ~want.kept).sum()


class Other(NamedTuple):
    """One more shape, router and expert, each pair once."""

    sizes: Sizes
    block: dict[str, Any]
    buffers: Buffers = DROPLESS
    mesh: str = "none"


OTHERS = {
    "one token": Other(Sizes((1,), E=8, k=2), {"router": Router(norm_topk_prob=True, scaling_factor=2.5)}),
    "fewer tokens than experts": Other(
        Sizes((2, 2), E=9, k=3),
        {"router": Router(score_function="sigmoid", norm_topk_prob=True), "activation": "tanh"},
        Buffers(1, "expert"),
    ),
    "every expert": Other(
        Sizes((2, 3), E=3, k=3),
        {"router": Router(use_pre_softmax=False), "gated": False},
        Buffers(4, "expert", "weight"),
    ),
    "one expert": Other(Sizes((5,), E=1, k=1), {"activation": "relu"}, Buffers(3)),
    "one axis of tokens on a mesh": Other(Sizes((24,), E=4, k=3), {"z_loss_coeff": 0.1}, Buffers(9), "4"),
    "three axes of tokens on a mesh": Other(
        Sizes((4, 2, 3), E=4, k=2), {"router": Router(score_function="sigmoid")}, Buffers(7), "4"
    ),
    "one token on each rank": Other(Sizes((8, 1), E=8, k=8), {"gated": False}, Buffers(5, "rank", "weight"), "8"),
    "ragged_dot": Other(Sizes((8, 3), E=8, k=2), {"implementation": "ragged_dot"}, Buffers(5), "2x4"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_shapes_routers_and_experts(name: str) -> None:
    sizes, config, buffers, mesh = OTHERS[name]
    block = MoEBlock(sizes.E, sizes.k, sizes.F, aux_loss_coeff=0.2, **config)
    dropped = []

    @given(drawn=inputs(sizes, gated=config.get("gated", True)))
    def every(drawn: Any) -> None:
        dropped.append(check(block, drawn, buffers, LAYOUTS[mesh]))

    every()
    assert (max(dropped) > 0) == (buffers.slots is not None)


@given(drawn=inputs(MESHED, use_bias=True))
def test_bfloat16(drawn: Any) -> None:
    """ROUT-4: float32 parameters and router, so the same experts and losers as in float64; experts in bfloat16."""
    block = PLAIN.clone(dtype=jnp.bfloat16)
    check(block, drawn, Buffers(5), LAYOUTS["2x4"], tolerance=BFLOAT16, dtype=jnp.bfloat16)


def test_the_comparison_can_fail() -> None:
    """Each net has something to catch: a swapped sign of one leaf, a wrong drop order, a forgotten rank."""
    want = {"wo": np.arange(1.0, 5.0), "gate": np.ones(3)}
    assert_leaves_close(want, want, FLOAT32)
    with pytest.raises(AssertionError, match="gate: relative error"):
        assert_leaves_close(want | {"gate": np.array([1, 1, 1 + 1e-4])}, want, FLOAT32)
    with pytest.raises(AssertionError, match="should vanish"):
        assert_close(np.full(2, 1e-30), np.zeros(2), FLOAT32, "wo")

    @settings(max_examples=1, derandomize=True)
    @given(drawn=inputs(MESHED, use_bias=True))
    def wrong(drawn: Any) -> None:
        oracle = Oracle(MESHED.E, MESHED.k, slots=2)
        params, x, mask, _ = drawn
        results = [
            dataclasses.replace(oracle, **change)(params, x, mask)
            for change in ({}, {"drop_order": "weight"}, {"places": support.places(LAYOUTS["4"])}, {"slots": 3})
        ]
        norms = [np.linalg.norm(result.output - results[0].output) for result in results]
        assert norms[0] == 0 and min(norms[1:]) > 0.1

    wrong()
