"""Receive-buffer sizes: the only place where slots are computed, in exact integers.

Symbols: ``T`` tokens on one rank, ``E`` experts, ``k`` experts per token, ``ep`` expert-parallel
ranks, ``E/ep`` experts on one rank. A *slot* is one row of a receive buffer and holds one
*assignment*, a (token, chosen expert) pair.

This module imports neither jax nor flax, so a launcher or a job scheduler can size buffers too.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from fractions import Fraction

import ml_dtypes  # noqa: F401  (registers bfloat16 and the float8 types with numpy)
import numpy as np

SCOPES = ("rank", "expert")
ON_OVERFLOW = ("drop", "recompute")


def positive_int(name: str, value: object, *, minimum: int = 1) -> int:
    """Returns ``value`` as an int, or raises a ``ValueError`` that names the argument."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or value is True or value is False or number < minimum:
        raise ValueError(f"{name} must be an integer of at least {minimum}, got {value!r}")
    return number


def positive_factor(name: str, value: object) -> Fraction:
    """Returns a capacity factor as the exact decimal that the user wrote.

    ``1.1`` means eleven tenths, not the binary double nearest to it: ``10 * 1.1`` is then 11 slots
    and not 12 after rounding up.
    """
    try:
        factor = Fraction(str(value))
    except (ValueError, ZeroDivisionError):  # NaN, infinity, None
        factor = None
    if factor is None or factor <= 0 or isinstance(value, bool | str):
        raise ValueError(
            f"{name} must be a finite number above 0, got {value!r}; 1.0 is the balanced size, None is dropless"
        )
    return factor


def _readable(size: float) -> str:
    """Bytes in the largest binary unit that leaves a number of at least one."""
    units = ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.1f} {units[0]}"


@dataclasses.dataclass(frozen=True)
class Capacity:
    """What a step is compiled for: hashable, a static argument of ``jax.jit``.

    Attributes:
      slots: rows of one receive buffer, in assignments. None: dropless, no routing can overflow it.
      chunks: run dispatch, experts and combine over the tokens in this many sequential chunks. It
        bounds the memory of the buffers and never changes which assignments are kept.
      on_overflow: ``"drop"``: the assignments beyond ``slots`` contribute nothing. ``"recompute"``: a layer that
        overflows on any rank serves them in further turns, inside the compiled step, and drops nothing. There are as
        many as the fullest buffer needs, each with half as many rows, so it has no use for chunks.

    Raises:
      ValueError: if a field is out of range. A factor is not a number of slots.

    Example:
      >>> Capacity(slots=1280)
      Capacity(slots=1280, chunks=1, on_overflow='drop')
      >>> Capacity(slots=None).overflows(10**9)
      False
    """

    slots: int | None
    chunks: int = 1
    on_overflow: str = "drop"

    def __post_init__(self) -> None:
        if self.slots is not None:
            try:
                positive_int("Capacity.slots", self.slots)
            except ValueError as error:
                raise ValueError(
                    f"{error}. Slots are rows of the buffer: for a factor call CapacitySpec.slots(factor); under jit "
                    "or remat a capacity is a static argument (static_argnames, static_argnums), or closed over"
                ) from None
        positive_int("Capacity.chunks", self.chunks)
        if self.on_overflow not in ON_OVERFLOW:
            raise ValueError(f"Capacity.on_overflow must be one of {ON_OVERFLOW}, got {self.on_overflow!r}")
        if self.on_overflow == "recompute" and self.chunks > 1:
            raise ValueError(
                f'Capacity.chunks must be 1 with on_overflow="recompute", got {self.chunks}; its turns need no larger '
                "buffers than slots"
            )

    def overflows(self, demand: int) -> bool:
        """Whether a buffer that ``demand`` assignments want is too small. Exactly full fits."""
        return self.slots is not None and demand > self.slots

    def layer(self, index: int) -> Capacity:
        """The capacity of one layer: this one. A model that asks so may be given `LayerCapacities` as well."""
        return self


@dataclasses.dataclass(frozen=True)
class LayerCapacities(Capacity):
    """A capacity for each MoE layer of a model whose layers are not scanned; ``slots`` are those of the largest.

    Attributes:
      layers: in the order in which the step returns their ``total_recv_tokens``.

    Example:
      >>> capacity = LayerCapacities.of((Capacity(8), Capacity(16)))
      >>> capacity.slots, capacity.layer(0).slots
      (16, 8)
    """

    layers: tuple[Capacity, ...] = ()

    @classmethod
    def of(cls, layers: tuple[Capacity, ...]) -> LayerCapacities:
        """Those of the layers together."""
        slots = [capacity.slots for capacity in layers]
        return cls(None if None in slots else max(held for held in slots if held is not None), layers=layers)

    def layer(self, index: int) -> Capacity:
        """The capacity of one layer.

        Raises:
          ValueError: if there is no such layer.
        """
        if not 0 <= index < len(self.layers):
            raise ValueError(f"layer must be one of the {len(self.layers)} that have a capacity, from 0, got {index}")
        return self.layers[index]


def fallback(slots: int, dropless: int) -> Capacity:
    """Dropless, in as many chunks as keep the buffers no larger than those of ``slots``.

    Example:
      >>> fallback(160, 512)
      Capacity(slots=None, chunks=4, on_overflow='drop')
    """
    return Capacity(None, chunks=-(-dropless // slots))


def as_capacity(capacity: Capacity | int | None) -> Capacity:
    """A `Capacity` as it is, a number of slots as one that drops, None as dropless.

    Raises:
      ValueError: if it is none of them, such as a factor or a traced array.
    """
    return capacity if isinstance(capacity, Capacity) else Capacity(capacity)


@dataclasses.dataclass(frozen=True)
class CapacitySpec:
    """Static facts about one MoE layer on one mesh, and the buffer sizes that follow from them.

    With scope ``"rank"`` a buffer is what one rank receives for all its experts::

      balanced = T * k                    dropless = T * ep * min(k, E/ep)

    With scope ``"expert"`` it is what one expert receives from the ``G = T * ep`` tokens of the
    expert-parallel group, as in GShard and Switch::

      balanced = ceil(G * k / E)          dropless = G

    Attributes:
      tokens_per_rank: T, tokens that one rank holds, padding included.
      num_experts: E, over all ranks.
      num_experts_per_tok: k.
      ep_size: ranks that share the experts; must divide E.
      scope: ``"rank"`` or ``"expert"``.
      multiple_of: slots are rounded up to a multiple of this, for aligned matrix products.

    Raises:
      ValueError: if a field is out of range; the message names it.

    Example:
      >>> spec = CapacitySpec(tokens_per_rank=4096, num_experts=256, num_experts_per_tok=8, ep_size=64)
      >>> spec.balanced, spec.slots(1.25), spec.dropless
      (32768, 40960, 1048576)

    References:
      GShard, arXiv 2006.16668; Switch, arXiv 2101.03961, eq. 3. The worst case counts a token at
      most ``min(k, E/ep)`` times per rank, since its experts are distinct (NVIDIA/TransformerEngine#3116).
    """

    tokens_per_rank: int
    num_experts: int
    num_experts_per_tok: int
    ep_size: int = 1
    scope: str = "rank"
    multiple_of: int = 8

    def __post_init__(self) -> None:
        for name in ("tokens_per_rank", "num_experts", "num_experts_per_tok", "ep_size", "multiple_of"):
            positive_int(name, getattr(self, name))
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok must be at most num_experts={self.num_experts}, got "
                f"{self.num_experts_per_tok}; the experts of a token are distinct"
            )
        if self.num_experts % self.ep_size:
            raise ValueError(
                f"num_experts={self.num_experts} must be a multiple of ep_size={self.ep_size}, the size of the "
                "expert axis; change one of them"
            )
        if self.scope not in SCOPES:
            raise ValueError(f"scope must be one of {SCOPES}, got {self.scope!r}")

    @property
    def experts_per_rank(self) -> int:
        """E/ep."""
        return self.num_experts // self.ep_size

    @property
    def buffers_per_rank(self) -> int:
        """Receive buffers of one rank: 1 for scope ``"rank"``, E/ep for scope ``"expert"``."""
        return {"rank": 1, "expert": self.experts_per_rank}[self.scope]

    @property
    def balanced(self) -> int:
        """Slots of one buffer that a perfectly balanced router needs."""
        total = self.tokens_per_rank * self.num_experts_per_tok
        return -(-total // self.buffers_per_rank)

    @property
    def dropless(self) -> int:
        """Slots of one buffer that no routing can overflow."""
        group = self.tokens_per_rank * self.ep_size
        return group * min(self.num_experts_per_tok, self.experts_per_rank // self.buffers_per_rank)

    def slots(self, factor: float | None) -> int:
        """Slots of one buffer for a multiple of the balanced size.

        ``min(dropless, round_up(ceil(balanced * factor), multiple_of))``, never below 1.

        Args:
          factor: multiple of ``balanced``, above 0; read as the decimal it prints as. None: dropless.

        Returns:
          Slots, in assignments.

        Raises:
          ValueError: if the factor is zero, negative, NaN or infinite.
        """
        if factor is None:
            return self.dropless
        needed = math.ceil(self.balanced * positive_factor("factor", factor))
        return min(self.dropless, -(-needed // self.multiple_of) * self.multiple_of)

    def rows(self, slots: int | None) -> int:
        """Rows that one rank allocates for all its buffers of ``slots`` each (None: dropless)."""
        rank_bound = self.tokens_per_rank * self.ep_size * min(self.num_experts_per_tok, self.experts_per_rank)
        return rank_bound if slots is None else min(rank_bound, self.buffers_per_rank * slots)

    def factor(self, slots: int) -> float:
        """The multiple of the balanced size that ``slots`` amounts to."""
        return slots / self.balanced

    def describe(self, factor: float | None = 1.0, *, width: int | None = None, dtype: str = "bfloat16") -> str:
        """Tells a capacity in slots, in bytes, and in the units of other systems.

        Args:
          factor: multiple of the balanced size; None: dropless.
          width: D, the model width in elements; None tells no bytes.
          dtype: of the buffer, by its numpy name.

        Returns:
          Several lines of text. The bytes are those of one layer's receive buffer on one rank.

        Example:
          >>> print(CapacitySpec(64, 8, 2, ep_size=2).describe(1.25, width=512, dtype="float32"))
          CapacitySpec: T=64 per rank, E=8, k=2, ep=2, scope=rank
            slots per buffer     160 (balanced 128, dropless 256, factor 1.25)
            receive buffer       160 rows per rank, 320.0 KiB per layer at width 512, float32
            Megatron-LM          moe_expert_rank_capacity_factor=1.25 (per expert: moe_expert_capacity_factor=1.25)
            MaxText              ragged_buffer_factor=1.25
            TransformerEngine    recv_capacity_per_rank=160, recv_capacity_factor=1.25
            Switch, flaxformer   capacity_factor=2.5 (tokens per expert, without k)
            of the worst case    0.625

        References:
          The units are those of NVIDIA/Megatron-LM, AI-Hypercomputer/maxtext, NVIDIA/TransformerEngine and
          google/flaxformer; a per-rank factor equals the per-expert one with k, and Switch's counts tokens.
        """
        slots, rows = self.slots(factor), self.rows(self.slots(factor))
        unit = slots * self.buffers_per_rank / (self.tokens_per_rank * self.num_experts_per_tok)
        memory = ""
        if width is not None:
            size = rows * positive_int("width", width) * np.dtype(dtype).itemsize
            memory = f", {_readable(size)} per layer at width {width}, {dtype}"
        return "\n".join(
            (
                f"CapacitySpec: T={self.tokens_per_rank} per rank, E={self.num_experts}, "
                f"k={self.num_experts_per_tok}, ep={self.ep_size}, scope={self.scope}",
                f"  slots per buffer     {slots} (balanced {self.balanced}, dropless {self.dropless}, "
                f"factor {self.factor(slots):.4g})",
                f"  receive buffer       {rows} rows per rank{memory}",
                f"  Megatron-LM          moe_expert_rank_capacity_factor={unit:.4g} "
                f"(per expert: moe_expert_capacity_factor={unit:.4g})",
                f"  MaxText              ragged_buffer_factor={unit:.4g}",
                f"  TransformerEngine    recv_capacity_per_rank={rows}, recv_capacity_factor={unit:.4g}",
                f"  Switch, flaxformer   capacity_factor={unit * self.num_experts_per_tok:.4g} "
                "(tokens per expert, without k)",
                f"  of the worst case    {rows / self.rows(None):.4g}",
            )
        )

    def __str__(self) -> str:
        return self.describe()
