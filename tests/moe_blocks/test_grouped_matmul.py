"""Every behaviour of `grouped_matmul`, once for each implementation; a new one joins by its name in IMPLEMENTATIONS."""

from __future__ import annotations

import functools
import itertools
import sys
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_blocks.grouped_matmul import IMPLEMENTATIONS, grouped_matmul, serve
from moe_blocks.grouped_matmul.base import Implementation
from tests.moe_blocks.support import assert_close

# M rows, K inner, N outer, E groups. More groups than rows; one group; rows beyond one block and no multiple of it.
SHAPES = [(40, 3, 5, 4), (3, 4, 2, 7), (150, 2, 3, 1), (1, 1, 1, 1)]
FLOAT32 = 2e-6
# Inputs are exact in bfloat16 and sums are float32, so the only rounding is that of the result, 2**-8 at most.
BFLOAT16 = 2**-8


def serves(implementation: str) -> bool:
    """Whether it can serve on this machine; the kernels of an accelerator cannot on a CPU."""
    try:
        grouped_matmul(jnp.ones((2, 3)), jnp.ones((1, 3, 4)), jnp.array([2]), implementation)
    except NotImplementedError:
        return False
    return True


each_implementation = pytest.mark.parametrize("implementation", [name for name in IMPLEMENTATIONS if serves(name)])


@functools.partial(jax.jit, static_argnames="implementation")
def value_and_grads(lhs: Any, rhs: Any, sizes: Any, cotangent: Any, implementation: str) -> Any:
    out, pullback = jax.vjp(lambda lhs, rhs: grouped_matmul(lhs, rhs, sizes, implementation), lhs, rhs)
    return out, *pullback(cotangent)


def by_hand(lhs: np.ndarray, rhs: np.ndarray, sizes: Any, cotangent: np.ndarray) -> tuple[np.ndarray, ...]:
    out, d_lhs, d_rhs = np.zeros(cotangent.shape), np.zeros(lhs.shape), np.zeros(rhs.shape)
    start = 0
    for e, size in enumerate(sizes):
        rows = slice(start, start + size)
        out[rows] = lhs[rows] @ rhs[e]
        d_lhs[rows] = cotangent[rows] @ rhs[e].T
        d_rhs[e] = lhs[rows].T @ cotangent[rows]
        start += size
    return out, d_lhs, d_rhs


def arrays(shape: tuple[int, int, int, int], seed: int) -> tuple[np.ndarray, ...]:
    """Normal numbers, exact in bfloat16."""
    M, K, N, E = shape
    rng = np.random.default_rng(seed)
    sizes = ((M, K), (E, K, N), (M, N))
    return tuple(rng.normal(size=s).astype(jnp.bfloat16).astype(np.float32) for s in sizes)


def check(lhs: np.ndarray, rhs: np.ndarray, sizes: Any, cotangent: np.ndarray, implementation: str, dtype: Any) -> None:
    wanted = by_hand(lhs.astype(np.float64), rhs.astype(np.float64), sizes, cotangent.astype(np.float64))
    filled = sum(sizes)
    lhs, cotangent = lhs.copy(), cotangent.copy()
    lhs[filled:] = cotangent[filled:] = np.nan
    args = [jnp.asarray(x, dtype) for x in (lhs, rhs, cotangent)]
    got = value_and_grads(*args[:2], jnp.array(sizes, jnp.int32), args[2], implementation)
    for name, value, want in zip(("out", "d_lhs", "d_rhs"), got, wanted, strict=True):
        assert value.dtype == dtype
        assert_close(value, want, FLOAT32 if dtype == jnp.float32 else BFLOAT16, name)
    assert not np.asarray(got[0][filled:], np.float32).any() and not np.asarray(got[1][filled:], np.float32).any()
    for e, size in enumerate(sizes):
        assert size or not np.asarray(got[2][e], np.float32).any()


@each_implementation
@pytest.mark.parametrize("shape", SHAPES)
@given(data=st.data())
def test_values_and_gradients(shape: tuple[int, int, int, int], implementation: str, data: st.DataObject) -> None:
    """Ragged sizes, empty groups among them, and rows past the end that hold NaN on both sides."""
    M, _, _, E = shape
    cuts = sorted(data.draw(st.lists(st.integers(0, M), min_size=E, max_size=E)))
    sizes = [high - low for low, high in itertools.pairwise([0, *cuts])]
    order = data.draw(st.permutations(range(E)))
    check_in = [sizes[i] for i in order]
    lhs, rhs, cotangent = arrays(shape, data.draw(st.integers(0, 2**32 - 1)))
    check(lhs, rhs, check_in, cotangent, implementation, jnp.float32)


@each_implementation
@given(data=st.data())
def test_bfloat16(implementation: str, data: st.DataObject) -> None:
    shape = M, _, _, E = SHAPES[0]
    cuts = sorted(data.draw(st.lists(st.integers(0, M), min_size=E, max_size=E)))
    sizes = [high - low for low, high in itertools.pairwise([0, *cuts])]
    lhs, rhs, cotangent = arrays(shape, data.draw(st.integers(0, 2**32 - 1)))
    check(lhs, rhs, sizes, cotangent, implementation, jnp.bfloat16)


@each_implementation
def test_all_patterns_of_empty_groups(implementation: str) -> None:
    E, rows = 8, 5
    lhs, rhs, cotangent = arrays((E * rows, 3, 2, E), 0)
    for pattern in itertools.product([0, 1], repeat=E):
        sizes = [rows * p if i % 2 else (rows - 2) * p for i, p in enumerate(pattern)]
        check(lhs, rhs, sizes, cotangent, implementation, jnp.float32)


@each_implementation
@pytest.mark.parametrize("sizes", [[8, 0, 8, 0], [0, 0, 0, 16], [16, 0, 0, 0], [0, 0, 0, 0]])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_exp_1_experts_without_rows(implementation: str, sizes: list[int], dtype: Any) -> None:
    check(*_exp_1(sizes), implementation, dtype)


def _exp_1(sizes: list[int]) -> tuple[Any, ...]:
    lhs, rhs, cotangent = arrays((16, 64, 32, 4), 1)
    return lhs, rhs, sizes, cotangent


@each_implementation
def test_a_long_sum_is_float32(implementation: str) -> None:
    """4096 ones in bfloat16: a bfloat16 accumulator would stick at 256. The weight gradient sums over rows likewise."""
    lhs, rhs = jnp.ones((4096, 8), jnp.bfloat16), jnp.ones((1, 8, 8), jnp.bfloat16)
    _, _, d_rhs = value_and_grads(lhs, rhs, jnp.array([4096]), jnp.ones((4096, 8), jnp.bfloat16), implementation)
    assert np.unique(np.asarray(d_rhs, np.float32)).tolist() == [4096.0]
    out, *_ = value_and_grads(lhs.T, rhs.repeat(512, 1), jnp.array([8]), jnp.ones((8, 8), jnp.bfloat16), implementation)
    assert np.unique(np.asarray(out, np.float32)).tolist() == [4096.0]


@each_implementation
def test_no_rows(implementation: str) -> None:
    lhs, rhs, sizes = jnp.zeros((0, 3)), jnp.ones((2, 3, 4)), jnp.zeros(2, jnp.int32)
    out, d_lhs, d_rhs = value_and_grads(lhs, rhs, sizes, jnp.zeros((0, 4)), implementation)
    assert (out.shape, d_lhs.shape) == ((0, 4), (0, 3))
    assert not np.asarray(d_rhs).any() and d_rhs.shape == rhs.shape


@each_implementation
def test_under_vmap_scan_and_remat(implementation: str) -> None:
    lhs, rhs, cotangent = arrays((12, 3, 3, 2), 2)
    sizes = jnp.array([[5, 7], [12, 0], [0, 3]], jnp.int32)

    def loss(lhs: Any, rhs: Any, sizes: Any) -> Any:
        return (grouped_matmul(lhs, rhs, sizes, implementation) * cotangent).sum()

    stacked = (jnp.broadcast_to(x, (3, *x.shape)) for x in (lhs, rhs))
    slope = jax.jit(jax.vmap(jax.grad(jax.checkpoint(loss), argnums=(0, 1))))(*stacked, sizes)
    for i, size in enumerate(sizes.tolist()):
        _, d_lhs, d_rhs = by_hand(lhs, rhs, size, cotangent)
        np.testing.assert_allclose(slope[0][i], d_lhs, atol=1e-5)
        np.testing.assert_allclose(slope[1][i], d_rhs, atol=1e-5)

    def layer(carry: Any, size: Any) -> tuple[Any, None]:
        return grouped_matmul(carry, rhs, size, implementation), None

    out, _ = jax.jit(lambda x: jax.lax.scan(layer, x, sizes))(lhs)
    wanted = functools.reduce(lambda x, size: by_hand(x, rhs, size, cotangent)[0], sizes.tolist(), lhs)
    np.testing.assert_allclose(out, wanted, atol=1e-5)


@each_implementation
def test_under_vmap_with_shared_weights(implementation: str) -> None:
    """A batch of inputs and one set of weights, which is how a layer is mapped."""
    _, rhs, _ = arrays((12, 3, 3, 2), 2)
    lhs = np.random.default_rng(0).normal(size=(3, 12, 3)).astype(np.float32)
    sizes = jnp.array([[5, 7], [12, 0], [0, 3]], jnp.int32)
    jitted = jax.jit(functools.partial(grouped_matmul, implementation=implementation))
    mapped = jax.vmap(jitted, (0, None, 0))(lhs, rhs, sizes)
    for out, rows, size in zip(mapped, lhs, sizes.tolist(), strict=True):
        np.testing.assert_allclose(out, by_hand(rows, rhs, size, np.zeros((12, 3)))[0], atol=1e-5)


@each_implementation
def test_rows_do_not_see_each_other(implementation: str) -> None:
    """A NaN in one group stays in its rows and in its own weight gradient."""
    lhs, rhs, cotangent = arrays((40, 3, 5, 4), 3)
    lhs[12] = np.nan
    out, _, d_rhs = value_and_grads(lhs, rhs, jnp.array([10, 5, 15, 10]), cotangent, implementation)
    assert np.isnan(np.asarray(out)).any(1).nonzero()[0].tolist() == [12]
    assert np.isnan(np.asarray(d_rhs)).any((1, 2)).nonzero()[0].tolist() == [1]


# --- not E times the work


def cost_of(E: int, implementation: str | None) -> tuple[int, int, float]:
    """Temporary bytes, bytes of the weights' gradient, and operations that XLA counts."""
    M, K = 2048, 64

    def loss(lhs: Any, rhs: Any, sizes: Any) -> Any:
        return (grouped_matmul(lhs, rhs, sizes, implementation) ** 2).sum()

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((M, K), (E, K, K))]
    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*shapes, jax.ShapeDtypeStruct((E,), jnp.int32)).compile()
    return compiled.memory_analysis().temp_size_in_bytes, E * K * K * 4, compiled.cost_analysis()["flops"]


def test_exp_6_memory_and_work_do_not_grow_with_experts() -> None:
    """The default on this platform. XLA counts a loop's body once, and the body is one block of rows."""
    (few_temp, _, few_flops), (many_temp, many_weights, many_flops) = cost_of(8, None), cost_of(64, None)
    assert (many_temp - 2 * many_weights) / few_temp < 2
    assert many_flops / few_flops < 2
    # The control: what an expansion to E dense products looks like in the same figures.
    (*_, few_flops), (*_, many_flops) = cost_of(8, "ragged_dot"), cost_of(64, "ragged_dot")
    assert many_flops / few_flops > 4, "ragged_dot no longer expands on CPU: it could be the default here"


# --- choosing and refusing


def refuse(*_: Any) -> Any:
    raise NotImplementedError("needs another chip")


def test_the_chooser_goes_on_after_a_refusal_and_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    refuses = Implementation(refuse, refuse)
    lhs, rhs, sizes = jnp.ones((2, 3)), jnp.ones((1, 3, 4)), jnp.array([2])
    monkeypatch.setitem(IMPLEMENTATIONS, "blocked", refuses)
    with pytest.warns(UserWarning, match=r"run on 'ragged_dot', which is slower here \(blocked: needs another chip\)"):
        assert grouped_matmul(lhs, rhs, sizes).tolist() == [[3.0] * 4] * 2
    grouped_matmul(lhs, rhs, sizes)  # a second warning would be an error
    with pytest.raises(NotImplementedError, match=r"no implementation .* can serve: blocked: needs another chip$"):
        grouped_matmul(lhs, rhs, sizes, "blocked")
    monkeypatch.setitem(IMPLEMENTATIONS, "ragged_dot", refuses)
    with pytest.raises(NotImplementedError, match=r"blocked: needs another chip; ragged_dot: needs another chip"):
        grouped_matmul(lhs, rhs, sizes)


def test_on_gpu_tokamax_is_asked_first_and_its_absence_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """None in sys.modules is what makes an import fail."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setitem(sys.modules, "tokamax", None)
    lhs, rhs, sizes = jnp.ones((2, 3)), jnp.ones((1, 3, 4)), jnp.array([2])
    with pytest.warns(
        UserWarning, match=r"run on 'blocked'.*tokamax is not installed; pip install 'moe-blocks\[gpu\]'"
    ):
        jaxpr = jax.make_jaxpr(grouped_matmul)(lhs, rhs, sizes)
    assert "ragged_dot" not in str(jaxpr)


def test_the_mesh_in_context_decides_and_not_the_machine_that_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ahead of time a CPU compiles for a TPU: XLA's native product is what belongs there."""
    mesh = SimpleNamespace(abstract_device=SimpleNamespace(platform="tpu"))
    with monkeypatch.context() as patched:
        patched.setattr(jax.sharding, "get_abstract_mesh", lambda: mesh)
        name = serve(None, lambda name: name)
    assert name == "ragged_dot" and serve(None, lambda name: name) == "blocked"


def test_tokamax_is_called_as_it_wants_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in with its signatures, which computes by XLA. It leaves NaN where a kernel need not write."""
    calls = []

    def dirty(out: Any, unwritten: Any) -> Any:
        return jnp.where(unwritten, jnp.nan, out)

    def ragged_dot(lhs: Any, rhs: Any, group_sizes: Any, *, preferred_element_type: Any, implementation: Any) -> Any:
        calls.append(implementation)
        out = jax.lax.ragged_dot(lhs, rhs, group_sizes, preferred_element_type=preferred_element_type)
        return dirty(out, (jnp.arange(lhs.shape[0]) >= group_sizes.sum())[:, None])

    def ragged_dot_general(
        lhs: Any, rhs: Any, group_sizes: Any, ragged_dot_dimension_numbers: Any, *, preferred_element_type: Any,
        implementation: Any,
    ) -> Any:  # fmt: skip
        calls.append(implementation)
        out = jax.lax.ragged_dot_general(
            lhs, rhs, group_sizes, ragged_dot_dimension_numbers, preferred_element_type=preferred_element_type
        )
        return dirty(out, (group_sizes == 0)[:, None, None])

    stand_in = SimpleNamespace(ragged_dot=ragged_dot, ragged_dot_general=ragged_dot_general)
    monkeypatch.setitem(sys.modules, "tokamax", stand_in)
    lhs, rhs, cotangent = arrays(SHAPES[0], 5)
    check(lhs, rhs, [10, 0, 15, 10], cotangent, "tokamax", jnp.float32)
    assert calls == [("mosaic", "triton")] * 3
    jax.clear_caches()  # of what was traced with the stand-in


def test_tokamax_without_a_kernel_cannot_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_kernel(*_: Any, **__: Any) -> Any:
        raise ExceptionGroup(
            "all implementations failed", [NotImplementedError("sm75"), NotImplementedError("float64")]
        )

    monkeypatch.setitem(sys.modules, "tokamax", SimpleNamespace(ragged_dot=no_kernel))
    with pytest.raises(NotImplementedError, match="tokamax: sm75; float64"):
        grouped_matmul(jnp.ones((2, 3)), jnp.ones((1, 3, 4)), jnp.array([2]), "tokamax")


def test_the_default_on_cpu_is_not_ragged_dot() -> None:
    lhs, rhs, sizes = jnp.ones((2, 3)), jnp.ones((1, 3, 4)), jnp.array([2])
    assert "ragged_dot" not in str(jax.make_jaxpr(grouped_matmul)(lhs, rhs, sizes))
    named = jax.make_jaxpr(functools.partial(grouped_matmul, implementation="ragged_dot"))(lhs, rhs, sizes)
    assert "ragged_dot" in str(named)


@pytest.mark.parametrize(
    ("lhs", "rhs", "sizes", "message"),
    [
        ((4,), (2, 3, 5), (2,), r"needs lhs \[M, K\], rhs \[E, K, N\] and group_sizes \[E\], got \(4,\)"),
        ((4, 3), (3, 5), (2,), r"got \(4, 3\), \(3, 5\) and \(2,\)"),
        ((4, 2), (2, 3, 5), (2,), r"got \(4, 2\), \(2, 3, 5\) and \(2,\)"),
        ((4, 3), (2, 3, 5), (3,), r"got \(4, 3\), \(2, 3, 5\) and \(3,\)"),
    ],
)
def test_wrong_shapes(lhs: Any, rhs: Any, sizes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grouped_matmul(jnp.ones(lhs), jnp.ones(rhs), jnp.ones(sizes, jnp.int32))


def test_wrong_dtypes() -> None:
    with pytest.raises(ValueError, match=r"lhs and rhs must have one dtype, got bfloat16 and float32; cast one"):
        grouped_matmul(jnp.ones((2, 3), jnp.bfloat16), jnp.ones((1, 3, 4)), jnp.array([2]))


def test_unknown_implementation() -> None:
    message = r"implementation must be None .* or one of \['blocked', 'ragged_dot', 'tokamax'\], got 'fast'"
    with pytest.raises(ValueError, match=message):
        grouped_matmul(jnp.ones((2, 3)), jnp.ones((1, 3, 4)), jnp.array([2]), "fast")
