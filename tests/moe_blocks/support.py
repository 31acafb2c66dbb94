"""What the tests of the layer share: meshes, one compiled value-and-gradient, comparisons."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from moe_blocks import Capacity, MoEBlock, Routing
from tests.moe_blocks import oracle


class Layout(NamedTuple):
    """A mesh and how a block is to be told about it."""

    shape: Mapping[str, int]
    explicit: bool = True
    batch_axes: tuple[str, ...] = ()

    @property
    def axes(self) -> dict[str, Any]:
        """Arguments of `MoEBlock`."""
        return {
            "batch_axes": self.batch_axes or tuple(self.shape),
            "expert_axis": "expert" if "expert" in self.shape else None,
        }

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """The same for `oracle.Oracle`."""
        names = self.axes["batch_axes"]
        return oracle.places(
            self.shape.get("data", 1),
            self.shape.get("expert", 1),
            expert_first=names.index("expert") < names.index("data") if {"data", "expert"} <= set(names) else False,
        )

    @property
    def mesh(self) -> Mesh:
        return make_mesh(tuple(self.shape.items()), self.explicit)


@functools.cache
def make_mesh(shape: tuple[tuple[str, int], ...], explicit: bool) -> Mesh:
    names, sizes = zip(*shape, strict=True)
    kind = AxisType.Explicit if explicit else AxisType.Auto
    return jax.make_mesh(sizes, names, axis_types=(kind,) * len(names))


# The meshes that the layer is promised to agree on; None: no mesh at all.
LAYOUTS: dict[str, Layout | None] = {
    "none": None,
    "1": Layout({"expert": 1}),
    "4": Layout({"expert": 4}, explicit=False),
    "2x4": Layout({"data": 2, "expert": 4}),
    "8": Layout({"expert": 8}),
}
MORE_LAYOUTS: dict[str, Layout | None] = {
    "2x4 auto": Layout({"data": 2, "expert": 4}, explicit=False),
    "expert first": Layout({"data": 2, "expert": 4}, batch_axes=("expert", "data")),
    "data only": Layout({"data": 4}),
    "with a bystander": Layout({"data": 2, "model": 2, "expert": 2}, batch_axes=("data", "expert")),
}


def axes(layout: Layout | None) -> dict[str, Any]:
    return {} if layout is None else layout.axes


def places(layout: Layout | None) -> tuple[tuple[int, int], ...]:
    return oracle.places() if layout is None else layout.places


@contextlib.contextmanager
def on(layout: Layout | None) -> Iterator[None]:
    with contextlib.nullcontext() if layout is None else jax.set_mesh(layout.mesh):
        yield


class Forced(MoEBlock):
    """A layer with any routing: ``8 * x[..., :k]`` holds the expert ids, ``x[..., k:2k]`` the weights."""

    def route(self, x: jax.Array, token_mask: jax.Array | None) -> Routing:
        k = self.num_experts_per_tok
        indices = jnp.round(8 * x[..., :k].astype(jnp.float32)).astype(jnp.int32)
        nothing = jnp.zeros((*x.shape[:-1], self.num_experts), jnp.float32)
        return Routing(indices, x[..., k : 2 * k].astype(jnp.float32), nothing + 1 / self.num_experts, nothing)


def force(x: np.ndarray, ids: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Writes a routing into x, for `Forced`."""
    x, k = np.array(x), ids.shape[-1]
    x[..., :k], x[..., k : 2 * k] = ids / 8, weights
    return x


def flat(params: Any) -> dict[str, Any]:
    """A block's parameters by the names of the oracle."""
    params = nn.meta.unbox(params)
    return {"gate": params["gate"]["kernel"]} | _rest(params) if "gate" in params else _rest(params)


def _rest(params: Any) -> dict[str, Any]:
    return {name: value for name, value in params.items() if name != "gate"}


def unflat(params: Mapping[str, Any]) -> dict[str, Any]:
    return ({"gate": {"kernel": params["gate"]}} if "gate" in params else {}) | _rest(params)


def draw_params(
    seed: int, *, E: int, D: int, F: int, gated: bool = True, use_bias: bool = False, gate: bool = True
) -> dict[str, np.ndarray]:
    """float32 parameters that are exact in bfloat16 too, each of about unit gain."""
    rng = np.random.default_rng(seed)
    shapes = {"wi_0": (E, D, F), "wi_1": (E, D, F), "wo": (E, F, D)}
    if not gated:
        del shapes["wi_1"]
    params = {name: rng.normal(size=s) / np.sqrt(s[1]) for name, s in shapes.items()}
    if use_bias:
        params |= {f"{name}_bias": rng.normal(size=(E, s[2])) for name, s in shapes.items()}
    if gate:
        params["gate"] = rng.normal(size=(D, E)) / np.sqrt(D)
    return {name: bf16_exact(value) for name, value in params.items()}


def bf16_exact(x: np.ndarray) -> np.ndarray:
    return np.asarray(x).astype(jnp.bfloat16).astype(np.float32)


class Ran(NamedTuple):
    output: np.ndarray
    aux_loss: np.ndarray
    total_recv_tokens: np.ndarray
    metrics: dict[str, np.ndarray]
    grads: dict[str, np.ndarray]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run(
    block: MoEBlock, capacity: Capacity, variables: Any, x: Any, mask: Any, d_output: Any, d_aux_loss: Any
) -> tuple[Any, Any]:
    state = {name: value for name, value in variables.items() if name != "params"}

    def apply(params: Any, x: Any) -> Any:
        out, collected = block.apply(
            {"params": params} | state, x, capacity=capacity, token_mask=mask, mutable=["moe_metrics"]
        )
        return (out.output, out.aux_loss), (out, collected)

    _, pullback, (out, collected) = jax.vjp(apply, variables["params"], x, has_aux=True)
    return (out, collected["moe_metrics"]), pullback((d_output, d_aux_loss))


def run(
    block: MoEBlock,
    params: Mapping[str, np.ndarray],
    x: Any,
    mask: Any = None,
    *,
    capacity: int | Capacity | None = None,
    d_output: Any = None,
    d_aux_loss: float = 0.0,
    layout: Layout | None = None,
    state: Any = None,
) -> Ran:
    """The layer's results, metrics and gradients as NumPy; compiled once for each block, capacity, mesh and shape."""
    capacity = capacity if isinstance(capacity, Capacity) else Capacity(capacity)
    d_output = jnp.zeros_like(x) if d_output is None else jnp.asarray(d_output, jnp.asarray(x).dtype)
    variables = {"params": unflat(params)} | ({} if state is None else {"moe_state": state})
    with on(layout):
        result = _run(block, capacity, variables, x, mask, d_output, jnp.float32(d_aux_loss))
        (out, metrics), (d_params, d_x) = jax.tree.map(np.asarray, result)
    return Ran(*out, metrics, flat(d_params) | {"x": d_x})


# The gradient of the gate passes the difference d - p @ d, which may cancel to nothing. Its error is then one of the
# terms, which are of order one here, and not of what is left of them.
FLOOR = {"gate": 0.1}


def assert_close(got: Any, want: Any, tolerance: float, what: str = "") -> None:
    """Relative norm and cosine; what is zero must be zero exactly."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, what
    assert np.isfinite(got).all(), what
    scale = np.linalg.norm(want)
    if scale == 0:
        assert not got.any(), f"{what}: should vanish, norm {np.linalg.norm(got)}"
        return
    error = np.linalg.norm(got - want) / (scale + FLOOR.get(what, 0))
    assert error <= tolerance, f"{what}: relative error {error:.2e} exceeds {tolerance:.2e}"
    cosine = (got * want).sum() / (np.linalg.norm(got) * scale)
    assert cosine >= 1 - tolerance, f"{what}: cosine {cosine}"


def assert_leaves_close(got: Mapping[str, Any], want: Mapping[str, Any], tolerance: float) -> None:
    assert got.keys() == want.keys()
    for name in want:
        assert_close(got[name], want[name], tolerance, name)


def same_bits(left: Any, right: Any) -> bool:
    left, right = np.asarray(left), np.asarray(right)
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
