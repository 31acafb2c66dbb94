"""How the tokens of a rank reach the ranks of their experts, and how what comes back is added up.

A *transport* is planned once for a batch and then moves any number of arrays the same way. There are two, with one
contract:

  ``"all_gather"``         every rank receives the tokens of all ranks of its group. Runs everywhere.
  ``"ragged_all_to_all"``  a rank receives one row for each assignment to its experts. Native on TPU and GPU, emulated
                           elsewhere.

The second one could send a token once to a rank where several of its experts live. That saves a tenth of the traffic
where 8 of 256 experts are chosen at random and 32 ranks hold them, but then the rows of a token must be added up on the
rank: as many gathers of width D as a token may have rows there, nearly all of them of nothing.

Symbols: ``ep`` ranks of the group, ``T`` tokens of this rank, ``k`` choices, ``E`` experts of which ``E/ep`` live
here, ``S`` rows sent, ``N`` rows received, ``c`` choices that a received row stands for, ``D`` width.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from moe_blocks.dispatch import Layout, combine_rows, gather_rows, make_layout, take_rows
from moe_blocks.mesh import AxisName, axis_index, axis_size, platform


@runtime_checkable
class Transport(Protocol):
    """Moves rows between the ranks of a group; a pytree."""

    def collect(self, x: Shaped[Array, "T W"]) -> Shaped[Array, "N W"]:
        """The rows that this rank receives, by source rank, then token; zeros past the last. Differentiable."""
        ...

    def collect_choices(self, x: Shaped[Array, "T k"]) -> Shaped[Array, "N c"]:
        """What belongs to the choices that the received rows stand for. Differentiable."""
        ...

    def give_back(self, sums: Float[Array, "N D"], dtype: DTypeLike) -> Float[Array, "T D"]:
        """Each token's sum over its rows, in float32; rows past the last are ignored.

        They may travel in ``dtype``.
        """
        ...


@functools.partial(jax.tree_util.register_dataclass, data_fields=(), meta_fields=("axis_name",))
@dataclasses.dataclass(frozen=True)
class AllGather:
    """Every rank receives all tokens; the partial sums go home by a reduce-scatter.

    Attributes:
      axis_name: mesh axis, static. None: one rank, which keeps everything.
    """

    axis_name: AxisName

    def collect(self, x: Shaped[Array, "T W"]) -> Shaped[Array, "N W"]:
        """See `Transport`. ``N = ep * T``."""
        return x if self.axis_name is None else jax.lax.all_gather(x, self.axis_name, tiled=True)

    def collect_choices(self, x: Shaped[Array, "T k"]) -> Shaped[Array, "N c"]:
        """See `Transport`. ``c = k``: a row stands for all choices of its token."""
        return self.collect(x)

    def give_back(self, sums: Float[Array, "N D"], dtype: DTypeLike) -> Float[Array, "T D"]:
        """See `Transport`. They travel in float32, since they are added up on their way."""
        sums = sums.astype(jnp.float32)
        return sums if self.axis_name is None else jax.lax.psum_scatter(sums, self.axis_name, tiled=True)


class RaggedOffsets(NamedTuple):
    """What one rank tells a ragged all-to-all, entry by entry for each peer; all int32 ``[ep]``.

    Attributes:
      input_offsets: first row for the peer in this rank's operand.
      send_sizes: rows for it.
      output_offsets: first row of this rank in the peer's output.
      recv_sizes: rows that this rank gets from the peer.
    """

    input_offsets: Int[Array, " ep"]
    send_sizes: Int[Array, " ep"]
    output_offsets: Int[Array, " ep"]
    recv_sizes: Int[Array, " ep"]


def ragged_offsets(sizes: Int[Array, "ep ep"], rank: int | Int[Array, ""]) -> RaggedOffsets:
    """The offsets of a rank when operands are sorted by receiver and outputs by sender, both without gaps.

    The way back is that of the transposed sizes.

    Args:
      sizes: int32 ``[ep, ep]``, entry ``[s, r]`` the rows that rank s sends to rank r; the same on all ranks.
      rank: this one.

    Example:
      >>> there = ragged_offsets(jnp.array([[1, 2], [3, 0]], jnp.int32), 0)
      >>> there.input_offsets.tolist(), there.output_offsets.tolist(), there.recv_sizes.tolist()
      ([0, 1], [0, 0], [1, 3])
    """
    sizes = jnp.asarray(sizes)
    in_operand = jnp.cumsum(sizes, axis=1) - sizes
    in_output = jnp.cumsum(sizes, axis=0) - sizes
    return RaggedOffsets(in_operand[rank], sizes[rank], in_output[rank], sizes[:, rank])


def emulate_ragged_all_to_all(
    operand: Shaped[Array, "S W"], output: Shaped[Array, "N W"], *offsets: Int[Array, " ep"], axis_name: AxisName
) -> Shaped[Array, "N W"]:
    """`jax.lax.ragged_all_to_all` for platforms that lack it, from the same four arrays; it gathers all operands.

    References:
      The semantics are those of XLA's RaggedAllToAll. Its CPU backend has none (jax-ml/jax#34755).
    """
    told = RaggedOffsets(*offsets)
    rank = axis_index(axis_name)
    # What every sender says of this rank: where its rows begin in the sender's operand, and in this output.
    start, size, to = (
        jax.lax.all_gather(x, axis_name)[:, rank] for x in (told.input_offsets, told.send_sizes, told.output_offsets)
    )
    past = jnp.arange(output.shape[0], dtype=jnp.int32)[None] - to[:, None]  # [ep, N], the row within the sender's part
    sent = (past >= 0) & (past < size[:, None])
    sender = jnp.argmax(sent, axis=0)
    row = start[sender] + jnp.take_along_axis(past, sender[None], axis=0)[0]
    everyone = jax.lax.all_gather(operand, axis_name)
    received = everyone.at[sender, row].get(mode="clip")
    return jnp.where(sent.any(0)[:, None], received, output)


# XLA has the collective for these.
RAGGED_ALL_TO_ALL = {"tpu": jax.lax.ragged_all_to_all, "gpu": jax.lax.ragged_all_to_all}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _travel(
    num_sent: int, num_received: int, axis_name: AxisName, rows: Shaped[Array, "S W"], sizes: Int[Array, "ep ep"]
) -> Shaped[Array, "N W"]:
    """Sends rows that are sorted by receiver; what nobody sent is zero. The gradient travels back the same way."""
    output = jnp.zeros((num_received, *rows.shape[1:]), rows.dtype)
    send = RAGGED_ALL_TO_ALL.get(platform(), emulate_ragged_all_to_all)
    return send(rows, output, *ragged_offsets(sizes, axis_index(axis_name)), axis_name=axis_name)


def _travel_bwd(
    num_sent: int, num_received: int, axis_name: AxisName, sizes: Array, cotangent: Array
) -> tuple[Array, None]:
    return _travel(num_received, num_sent, axis_name, cotangent, sizes.T), None


_travel.defvjp(lambda *args: (_travel(*args), args[-1]), _travel_bwd)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("sent", "sizes"), meta_fields=("num_received", "axis_name")
)
@dataclasses.dataclass(frozen=True)
class RaggedAllToAll:
    """Each rank receives one row for each assignment to its experts; the results go home one by one, to be added up.

    Attributes:
      sent: where the assignments of this rank lie among the rows that it sends, one group for each receiver.
      sizes: int32 ``[ep, ep]``, rows from each rank to each.
      num_received: N, static.
      axis_name: mesh axis, static.
    """

    sent: Layout
    sizes: Int[Array, "ep ep"]
    num_received: int
    axis_name: AxisName

    @classmethod
    def plan(
        cls, experts: Int[Array, "T k"], *, num_experts: int, num_rows: int, axis_name: AxisName
    ) -> RaggedAllToAll:
        """Sorts the assignments by the ranks of their experts; see `plan_transport`."""
        ep, (num_tokens, k) = axis_size(axis_name), experts.shape
        sent = make_layout(experts // (num_experts // ep), num_groups=ep, num_rows=num_tokens * k, rows_per_token=k)
        return cls(sent, jax.lax.all_gather(sent.group_sizes, axis_name), num_rows, axis_name)

    def collect(self, x: Shaped[Array, "T W"]) -> Shaped[Array, "N W"]:
        """See `Transport`. N is the number of rows of the buffers."""
        return self._send(gather_rows(x, self.sent))

    def collect_choices(self, x: Shaped[Array, "T k"]) -> Shaped[Array, "N c"]:
        """See `Transport`. ``c = 1``."""
        return self._send(take_rows(x.reshape(-1, 1), self.sent.assignment))

    def give_back(self, sums: Float[Array, "N D"], dtype: DTypeLike) -> Float[Array, "T D"]:
        """See `Transport`."""
        num_sent = self.sent.token.shape[0]
        rows = _travel(self.num_received, num_sent, self.axis_name, sums.astype(dtype), self.sizes.T)
        return combine_rows(rows, jnp.ones(num_sent, jnp.float32), self.sent)

    def _send(self, rows: Shaped[Array, "S W"]) -> Shaped[Array, "N W"]:
        return _travel(rows.shape[0], self.num_received, self.axis_name, rows, self.sizes)


COLLECTIVES = ("all_gather", "ragged_all_to_all")
# Compiled for a TPU, all_gather needs buffers for the tokens of every rank whatever the capacity. Where the ragged
# collective is emulated it costs an all-gather of what it sends, so all_gather is the better one.
PREFERRED = {"tpu": "ragged_all_to_all", "gpu": "ragged_all_to_all"}


def check_collective(collective: str | None) -> None:
    """Raises ``ValueError`` unless ``collective`` is None or a known name."""
    if collective is not None and collective not in COLLECTIVES:
        raise ValueError(f"collective must be None (best for the platform) or one of {COLLECTIVES}, got {collective!r}")


def plan_transport(
    experts: Int[Array, "T k"],
    *,
    num_experts: int,
    num_rows: int,
    axis_name: AxisName = None,
    collective: str | None = None,
) -> Transport:
    """Plans how the tokens of this rank reach their experts.

    Args:
      experts: int32 ``[T, k]``, global experts of the kept assignments, E for none.
      num_experts: E, a multiple of the axis size.
      num_rows: rows of this rank's buffers; no rank keeps more assignments.
      axis_name: mesh axis (or axes) that share the experts; None: one device has them all, and nothing moves.
      collective: a name of ``COLLECTIVES``; None: the best for the platform.

    Raises:
      ValueError: if the name is unknown.
    """
    check_collective(collective)
    collective = PREFERRED.get(platform(), "all_gather") if collective is None else collective
    if axis_name is None or collective == "all_gather":
        return AllGather(axis_name)
    return RaggedAllToAll.plan(experts, num_experts=num_experts, num_rows=num_rows, axis_name=axis_name)
