"""What a capacity policy is: a frozen dataclass of config numbers, with explicit state in and out.

A policy decides three things: how large the receive buffers of the next step are, whether a finished
step counts, and what follows an overflow. All of it runs on the host in plain integers, with no clock
and no randomness, so that every host decides alike; only ``accept`` and ``valid`` are traced into the step.

The whole protocol, by hand::

    state = policy.init(spec)
    for step, batch in enumerate(batches):
        attempt, accepted = 0, False
        while not accepted:
            capacity = policy.capacity(state)
            candidate, total_recv_tokens, metrics = train_step(train_state, batch, capacity=capacity)
            accepted = bool(policy.accept(total_recv_tokens, capacity))
            demand = int(peak_demand(total_recv_tokens))
            state = policy.update(state, Report(step, attempt, demand, capacity, accepted))
            attempt += 1
        train_state = candidate

A step that is accepted but whose numbers are not ``valid`` is skipped: ``skip`` takes the place of ``update``, the
candidate is dropped, and the batch is not tried again.
"""

from __future__ import annotations

import abc
import json
import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, PyTree

from moe_blocks.capacity import Capacity, CapacitySpec
from policies import ladder as rungs

# What a step returns: any pytree of the layers' int32 [num_buffers], in assignments before any drop.
Demand: TypeAlias = PyTree[Int32[Array, "..."]]
Verdict: TypeAlias = bool | Bool[Array, ""]


class Report(NamedTuple):
    """One finished attempt at a step, in host integers.

    Attributes:
      step: number of the step that was attempted.
      attempt: 0 for the first attempt at the step, then 1, 2, ...
      demand: largest entry of ``total_recv_tokens`` over layers and ranks, in assignments.
      capacity: what the attempt was compiled for.
      accepted: whether the step counts. If not, the training state is the one before it.
      by_layer: largest entry over ranks of each layer, in the order of the step's ``total_recv_tokens``; () where only
        the largest of all is known.
    """

    step: int
    attempt: int
    demand: int
    capacity: Capacity
    accepted: bool
    by_layer: tuple[int, ...] = ()

    @property
    def demands(self) -> tuple[int, ...]:
        """The demand of each layer, or that of all as if they were one."""
        return self.by_layer or (self.demand,)

    @property
    def overflow(self) -> bool:
        """Whether some buffer was too small for what the router sent it."""
        return any(self.capacity.layer(i).overflows(demand) for i, demand in enumerate(self.demands))


class PolicyState(NamedTuple):
    """What a policy remembers: integers only, saved beside the training state.

    A pytree of Python ints. Orbax and other checkpointers may hand the leaves back as NumPy ints or
    0-d arrays; every function here takes those as well.

    Attributes:
      ladder: slots of every rung, increasing; the last one is dropless.
      balanced: slots that a balanced router needs, to tell slots as a factor.
      slots: the rung of the next step, of the layer with the largest where they differ.
      quiet: consecutive accepted steps that the next lower rung would have served; with a rung for each layer, steps
        since the last change or overflow.
      overflows: attempts so far whose demand exceeded their capacity.
      rejections: attempts so far that were rejected.
      skips: consecutive steps up to the last one that were skipped.
      recent: attempts that were rejected in the present window of `RejectionAlarm`.
      profile: the rung of each layer in the next step; () where all have the same.
      profiles: every profile that was used so far.
      seen: the largest demand of each layer in the steps that ``quiet`` counts.

    Example:
      >>> state = PolicyState(ladder=(4, 8, 16), balanced=4, slots=8)
      >>> PolicyState.from_json(state.to_json()) == state
      True
      >>> state.factor
      2.0
    """

    ladder: tuple[int, ...]
    balanced: int
    slots: int
    quiet: int = 0
    overflows: int = 0
    rejections: int = 0
    skips: int = 0
    recent: int = 0
    profile: tuple[int, ...] = ()
    profiles: tuple[tuple[int, ...], ...] = ()
    seen: tuple[int, ...] = ()

    @property
    def factor(self) -> float:
        """The next step's slots as a multiple of the balanced size."""
        return int(self.slots) / int(self.balanced)

    def plain(self) -> PolicyState:
        """The same state with Python ints for leaves, in tuples."""
        return PolicyState(*map(_plain, self))

    def to_json(self) -> str:
        """Text that ``from_json`` reads back."""
        return json.dumps(self.plain()._asdict())

    @classmethod
    def from_json(cls, text: str) -> PolicyState:
        """Reads what ``to_json`` wrote.

        Raises:
          ValueError: if the text is not a JSON object with this class's fields.
        """
        return cls.of(text)

    @classmethod
    def of(cls, saved: PolicyState | Mapping[str, Any] | str) -> PolicyState:
        """A state from itself, from its fields as a checkpointer restores them, or from the text of ``to_json``.

        Counters may be missing, as in a state saved before there were such: they start from 0.

        Raises:
          ValueError: if it is none of them, has an unknown field, or lacks one that is not a counter.
        """
        fields = json.loads(saved) if isinstance(saved, str) else saved
        fields = fields._asdict() if isinstance(fields, cls) else fields
        required = set(cls._fields) - set(cls._field_defaults)
        if not isinstance(fields, Mapping) or not required <= set(fields) <= set(cls._fields):
            raise ValueError(f"a PolicyState needs an object with the fields {cls._fields}, got {saved}")
        return cls(**fields).plain()


def _plain(value: Any) -> Any:
    return tuple(map(_plain, value)) if isinstance(value, list | tuple) else int(value)


class CapacityOverflowError(RuntimeError):
    """A step overflowed and its policy has no larger capacity to offer. The step was not applied.

    Attributes:
      step: number of the step.
      demand: assignments that the fullest buffer was sent.
      slots: assignments that it could hold.
      factor: the smallest factor that would have fitted, to four decimals.
    """

    def __init__(self, step: int, demand: int, slots: int, factor: float) -> None:
        super().__init__(step, demand, slots, factor)
        self.step, self.demand, self.slots, self.factor = step, demand, slots, factor

    @classmethod
    def of(cls, state: PolicyState, report: Report) -> CapacityOverflowError:
        """The error for a rejected attempt."""
        held = (report.capacity.layer(i).slots or int(state.ladder[-1]) for i in range(len(report.demands)))
        demand, slots = max(zip(report.demands, held, strict=True), key=lambda pair: Fraction(*pair))
        factor = math.ceil(Fraction(demand * 10_000, int(state.balanced))) / 10_000
        return cls(report.step, demand, slots, factor)

    def __str__(self) -> str:
        return (
            f"step {self.step} sent {self.demand} assignments to a receive buffer of {self.slots} slots; the step was "
            f"not applied and the training state is the one before it. A factor of {self.factor} would have held "
            f"them: raise the factor, or choose the policy retry_dropless or adaptive_grow, which run such a step again"
        )


class CapacityPolicy(abc.ABC):
    """How large the receive buffers are, whether a step counts, and what follows an overflow.

    Subclass it as a frozen dataclass of config numbers, define the three abstract methods, and make it
    known to ``from_config`` with ``register``. Laws that every policy keeps:

    - the capacity is always one of ``capacities(state)``, whose number is bounded;
    - after a rejection the next capacity is strictly larger, or ``update`` raises;
    - a dropless attempt is never rejected, so a retry always ends;
    - ``update`` and ``skip`` depend on their arguments alone;
    - a report measured at another capacity than the current one never shrinks it nor earns any credit.

    `StepRunner` checks the first two at every step. The state is a `PolicyState` for every policy; a policy that
    counts something of its own counts it in ``quiet``. What may be put around any policy is a `Decorator`.
    """

    @abc.abstractmethod
    def ladder(self, spec: CapacitySpec) -> tuple[int, ...]:
        """Slots of every rung, strictly increasing; the last one is ``spec.dropless``."""

    @abc.abstractmethod
    def accept(self, total_recv_tokens: Demand, capacity: Capacity) -> Verdict:
        """Whether a step with this demand counts. Traced into the compiled step.

        Args:
          total_recv_tokens: any pytree of ``<int32>[...]`` demands, in assignments before any drop.
          capacity: what the step was compiled for.

        Returns:
          Python True if it always counts: it then costs nothing. Else a ``<bool>[]``, reduced over every
          layer and rank, so that all hosts take the same branch.
        """

    @abc.abstractmethod
    def update(self, state: PolicyState, report: Report) -> PolicyState:
        """The state after one more finished attempt.

        Raises:
          CapacityOverflowError: if the attempt was rejected and there is nothing larger to try.
        """

    def valid(self, metrics: Any) -> Verdict:
        """Whether the numbers of an accepted step may enter the training state. Traced into the compiled step.

        Args:
          metrics: what the step returned as such.

        Returns:
          Python True, as here, if they always may: it then costs nothing. Else a ``<bool>[]`` that is the same on all
          hosts.
        """
        return True

    def skip(self, state: PolicyState, report: Report) -> PolicyState:
        """The state after an attempt whose demand was accepted and whose numbers were not valid.

        To the policy a first attempt that is skipped never was, since its demand may be nonsense too; a retry that is
        skipped ends like any other.
        """
        return self.update(state, report) if report.attempt else state

    def init(self, spec: CapacitySpec) -> PolicyState:
        """The state before the first step: on the first rung.

        Raises:
          ValueError: if ``ladder`` does not increase, or does not end with the dropless size.
        """
        ladder = self.ladder(spec)
        if list(ladder) != sorted({*ladder, spec.dropless}) or ladder[-1] != spec.dropless:
            raise ValueError(
                f"{type(self).__name__}.ladder must return strictly increasing slots that end with "
                f"spec.dropless={spec.dropless}, got {ladder}"
            )
        return PolicyState(ladder, spec.balanced, slots=ladder[0])

    def resume(self, spec: CapacitySpec, saved: PolicyState | Mapping[str, Any] | str) -> PolicyState:
        """The state to go on with after a restart, whose config or mesh may have changed since.

        ``saved`` may also be the text of ``to_json``, or the mapping of fields that a checkpointer restores. On the
        same ladder it is the saved state. On another one the counters stay, the first rung stays
        the first rung, and a grown capacity becomes the smallest rung that holds as many slots.
        """
        fresh, saved = self.init(spec), PolicyState.of(saved)
        if saved.ladder == fresh.ladder:
            return saved._replace(balanced=fresh.balanced)
        grown = saved.slots > saved.ladder[0]
        slots = rungs.fitting(fresh.ladder, saved.slots) if grown else fresh.slots
        profile = tuple(rungs.fitting(fresh.ladder, slots) for slots in saved.profile)
        saved = saved._replace(ladder=fresh.ladder, balanced=fresh.balanced, slots=slots, quiet=0)
        return saved._replace(profile=profile, profiles=(), seen=())

    def capacity(self, state: PolicyState) -> Capacity:
        """What the next step is compiled for."""
        return rungs.rung(state.ladder, state.slots)

    def capacities(self, state: PolicyState) -> tuple[Capacity, ...]:
        """Every capacity that the policy may ever ask for, smallest first and the dropless one last.

        One that holds a capacity for each layer knows here those that it has asked for so far.
        """
        return tuple(self.capacity(state._replace(slots=slots)) for slots in state.ladder)


def count(state: PolicyState, report: Report) -> PolicyState:
    """Adds one attempt to the counters, which every policy keeps alike."""
    return state._replace(
        overflows=state.overflows + report.overflow, rejections=state.rejections + (not report.accepted)
    )


def checked_update(policy: CapacityPolicy, state: PolicyState, report: Report, *, skipped: bool = False) -> PolicyState:
    """``update`` or ``skip``, and a word with a policy that breaks the laws on which the number of retries rests.

    Raises:
      RuntimeError: if the next capacity is not one of ``capacities``, or not larger after a rejection.
    """
    name, after = type(policy).__name__, (policy.skip if skipped else policy.update)(state, report)
    capacity, valid = policy.capacity(after), policy.capacities(after)
    if capacity not in valid:
        raise RuntimeError(f"{name}.update chose {capacity}, which is none of its capacities {valid}")
    if not report.accepted and not _larger(capacity, report.capacity, len(report.demands)):
        raise RuntimeError(
            f"{name}.update answered the rejection of {report.capacity} at step {report.step} with {capacity}, so the "
            "step would be tried for ever; return a state with a larger rung of state.ladder"
        )
    return after


def _larger(capacity: Capacity, than: Capacity, layers: int) -> bool:
    """Whether some layer has more slots, and none has fewer."""
    new, old = (
        [math.inf if (slots := c.layer(i).slots) is None else slots for i in range(layers)] for c in (capacity, than)
    )
    return new != old and all(after >= before for after, before in zip(new, old, strict=True))


def fits(total_recv_tokens: Demand, capacity: Capacity) -> Verdict:
    """Whether no buffer overflowed: Python True where none can. Exactly full fits."""
    demands = jax.eval_shape(layer_demands, total_recv_tokens).shape[0]
    slots = [capacity.layer(i).slots for i in range(demands)]
    if slots.count(None) == demands:
        return True
    room = jnp.array([jnp.iinfo(jnp.int32).max if held is None else held for held in slots], jnp.int32)
    return (layer_demands(total_recv_tokens) <= room).all()


def peak_demand(total_recv_tokens: Demand) -> Int32[Array, ""]:
    """The largest demand on any receive buffer, over all layers and ranks; see `layer_demands`.

    Example:
      >>> int(peak_demand({"layer_0": jnp.array([3, 9]), "layer_1": jnp.array([[4, 2], [1, 7]])}))
      9
    """
    return layer_demands(total_recv_tokens).max()


def layer_demands(total_recv_tokens: Demand) -> Int32[Array, " layers"]:
    """The largest demand on any receive buffer of each layer, over its ranks.

    Layers whose buffers lie alike are reduced together: a step over a mesh has one all-reduce for all of them.

    Args:
      total_recv_tokens: any pytree of ``<int32>[..., num_buffers]``, in assignments; scanned layers may
        be stacked in front, and a scalar is taken as it is. The order is that of ``jax.tree.leaves``: a list keeps its
        own, a mapping is sorted by its keys.

    Returns:
      ``<int32>[layers]``.

    Raises:
      ValueError: if there is no demand at all, or a leaf is empty or not int32. Such a step could
        never be seen to overflow.

    Example:
      >>> layer_demands([jnp.array([3, 9]), jnp.array([[4, 2], [1, 7]])]).tolist()
      [9, 4, 7]
    """
    leaves = [(jax.tree_util.keystr(path), x) for path, x in jax.tree_util.tree_leaves_with_path(total_recv_tokens)]
    if not leaves:
        raise ValueError(
            "total_recv_tokens holds no array, so an overflow would go unseen; return the total_recv_tokens of every "
            f"MoE layer from the step, got {total_recv_tokens!r}"
        )
    groups: dict[Any, list[Array]] = {}
    places: dict[Any, list[int]] = {}
    count = 0
    for path, leaf in leaves:
        array = jnp.asarray(leaf)
        if array.dtype != jnp.int32 or not array.size:
            raise ValueError(
                f"total_recv_tokens{path} must be a non-empty int32 array of demands in assignments, got "
                f"{array.dtype}{list(array.shape)}; return the third output of every MoE layer unchanged"
            )
        rows = array.reshape(-1, *array.shape[-1:] or (1,)) if array.ndim != 2 else array
        kind = jax.typeof(rows[0])  # equal shapes and shardings are reduced together
        groups.setdefault(kind, []).append(rows)
        places.setdefault(kind, []).extend(range(count, count + rows.shape[0]))
        count += rows.shape[0]
    demands = [jnp.concatenate(rows).max(axis=1) for rows in groups.values()]
    if len(demands) == 1:
        return demands[0]
    order = [place for group in places.values() for place in group]
    return jnp.concatenate(demands)[jnp.argsort(jnp.array(order, jnp.int32))]
