"""SkipNonFinite: a step whose loss or gradients are not finite leaves no trace, and its batch is left out."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from moe_blocks.capacity import positive_int
from policies.base import PolicyState, Report, Verdict
from policies.decorator import Decorator


class NonFiniteError(RuntimeError):
    """More steps in a row than may be skipped were not finite. None of them was applied.

    Attributes:
      step: number of the last one.
      since: number of the first one.
      watch: names of the metrics that were watched.
    """

    def __init__(self, step: int, since: int, watch: tuple[str, ...]) -> None:
        super().__init__(step, since, watch)
        self.step, self.since, self.watch = step, since, watch

    def __str__(self) -> str:
        return (
            f"{' or '.join(self.watch)} is not finite in step {self.since} and ever since, to step {self.step}: "
            f"{self.step - self.since + 1} in a row. None of them was applied and the training state is the one before "
            f"step {self.since}. Go back to an earlier checkpoint, lower the learning rate, or clip the gradients; if "
            "the batches are to blame, mend them, or raise SkipNonFinite.max_consecutive"
        )


@dataclasses.dataclass(frozen=True)
class SkipNonFinite(Decorator):
    """The inner policy, and a step whose watched metrics are not all finite is skipped.

    It is decided inside the compiled step together with the inner policy's verdict. A skipped step is the identity on
    every leaf of the training state, step counter and random keys included, and its batch is not tried again, since it
    would come out the same: the training is that of a run that never saw the batch. Its ``StepReport`` says
    ``skipped``. An overflow is judged first: the attempt that holds the demand decides.

    What is watched are scalars among the step's metrics and not the new state. They are a few comparisons, equal on
    every device already, so no reduction is added, and they are known before the optimiser runs, so the state is still
    overwritten in place. The new state is known only at the end of the step: to look through it first would cost a
    pass over it and the memory for both the old and the new one. A finite loss can have gradients that are not, so
    watch a norm of these too. It needs all gradients at once before the optimiser runs, as clipping by it does.

    Attributes:
      inner: the policy that decides on capacities.
      watch: names in the step's ``metrics``, of floating-point scalars.
      max_consecutive: how many steps in a row may be skipped; one more is a ``NonFiniteError``. 0: none may.

    Raises:
      ValueError: if ``inner`` is no policy, ``watch`` no list of names, or ``max_consecutive`` no integer from 0 on.

    Example:
      >>> from policies import RetryDropless
      >>> policy = SkipNonFinite(RetryDropless(1.25))
      >>> bool(policy.valid({"loss": jnp.float32(2.5), "grad_norm": jnp.float32(jnp.nan)}))
      False

    References:
      optax/transforms/_conditionality.py, ``apply_if_finite``, which looks at all updates and, past its limit, applies
      what is not finite.
    """

    watch: tuple[str, ...] = ("loss", "grad_norm")
    max_consecutive: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        names = () if isinstance(self.watch, str) else tuple(self.watch)
        if not names or not all(isinstance(name, str) for name in names):
            raise ValueError(
                f"SkipNonFinite.watch must be a list of names of metrics, such as ['loss'], got {self.watch!r}"
            )
        object.__setattr__(self, "watch", names)  # a config has a list, which cannot be hashed
        positive_int("SkipNonFinite.max_consecutive", self.max_consecutive, minimum=0)

    def valid(self, metrics: Any) -> Verdict:
        """Whether all that is watched is finite.

        Raises:
          ValueError: if the metrics lack a name, or hold something else than a floating-point scalar there.
        """
        finite = (jnp.isfinite(self._watched(metrics, name)) for name in self.watch)
        return functools.reduce(operator.and_, finite, super().valid(metrics))

    def _watched(self, metrics: Any, name: str) -> jax.Array:
        known = tuple(metrics) if isinstance(metrics, Mapping) else f"a {type(metrics).__name__}"
        if not isinstance(metrics, Mapping) or name not in metrics:
            raise ValueError(
                f"SkipNonFinite.watch names the metric {name!r}, but the step's metrics are {known}; return a mapping "
                "with this name from the step, or give the names of yours as watch"
            )
        value = jnp.asarray(metrics[name])
        if value.shape or not jnp.issubdtype(value.dtype, jnp.inexact):
            raise ValueError(
                f"SkipNonFinite.watch names the metric {name!r}, which must be a floating-point scalar, got "
                f"{value.dtype}{list(value.shape)}; return its mean or norm over all devices"
            )
        return value

    def update(self, state: PolicyState, report: Report) -> PolicyState:
        """The inner policy's; an accepted step ends a row of skipped ones."""
        return super().update(state, report)._replace(skips=0 if report.accepted else state.skips)

    def skip(self, state: PolicyState, report: Report) -> PolicyState:
        """Counts the skipped step.

        Raises:
          NonFiniteError: if it is one more in a row than may be.
        """
        if state.skips >= self.max_consecutive:
            raise NonFiniteError(report.step, report.step - int(state.skips), self.watch)
        return super().skip(state, report)._replace(skips=state.skips + 1)
