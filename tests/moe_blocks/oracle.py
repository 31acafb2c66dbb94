"""The layer once more, as slowly and plainly as possible: float64 NumPy, one token and one expert at a time.

It shares no line with `moe_blocks`. Drops are decided by walking through a sorted list of assignments with one counter
for each buffer; gradients are written by hand for one token and one expert, and `test_oracle.py` checks them against
central differences. Parameters are a flat dict: ``gate [D, E]``, ``wi_0``, ``wi_1 [E, D, F]``, ``wo [E, F, D]`` and
``<name>_bias``; leave out ``wi_1`` for a layer without a gate unit.

A mesh enters only through ``places``: the leading axis of x is cut into ``len(places)`` equal blocks, one for each
device, and ``places[block] = (group, rank)`` says which expert-parallel group the device belongs to and which share of
the experts it holds. Buffers exist once for each group.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

NORM_EPS = 1e-20
Params = dict[str, np.ndarray]
# The routing of a batch: expert ids [..., k] and combine weights [..., k].
Choice = tuple[np.ndarray, np.ndarray]


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def logsumexp(x: np.ndarray) -> float:
    return float(x.max() + np.log(np.exp(x - x.max()).sum()))


def gap(a: float, b: float) -> float:
    """How far two numbers are apart, relative to the larger; infinite for equal ones, whose order the ties decide."""
    return math.inf if a == b or math.isinf(a) or math.isinf(b) else abs(a - b) / max(abs(a), abs(b))


class Function(NamedTuple):
    value: Callable[[np.ndarray], np.ndarray]
    slope: Callable[[np.ndarray], np.ndarray]


ACTIVATIONS = {
    "silu": Function(lambda x: x * sigmoid(x), lambda x: sigmoid(x) * (1 + x * (1 - sigmoid(x)))),
    "relu": Function(lambda x: np.maximum(x, 0), lambda x: (x > 0).astype(float)),
    "tanh": Function(np.tanh, lambda x: 1 - np.tanh(x) ** 2),
    "identity": Function(lambda x: x, np.ones_like),
}


def places(data: int = 1, ep: int = 1, *, expert_first: bool = False) -> tuple[tuple[int, int], ...]:
    """Where the blocks of the leading axis lie on a mesh (data, expert), or on (expert, data)."""
    if expert_first:
        return tuple((group, rank) for rank in range(ep) for group in range(data))
    return tuple(itertools.product(range(data), range(ep)))


class Result(NamedTuple):
    """Attributes as those of `MoEOutput`, and:

    kept: bool [..., k].
    margin: the smallest relative difference on which a decision hung; below the precision of float32 the layer may
      decide otherwise.
    """

    output: np.ndarray
    aux_loss: float
    total_recv_tokens: np.ndarray
    kept: np.ndarray
    margin: float


@dataclasses.dataclass(frozen=True)
class Oracle:
    num_experts: int
    k: int
    slots: int | None = None
    scope: str = "rank"
    drop_order: str = "position"
    places: tuple[tuple[int, int], ...] = ((0, 0),)
    activation: str = "silu"
    score_function: str = "softmax"
    use_pre_softmax: bool = True
    norm_topk_prob: bool = False
    scaling_factor: float = 1.0
    aux_loss_coeff: float = 0.0
    z_loss_coeff: float = 0.0

    @property
    def ep(self) -> int:
        return 1 + max(rank for _, rank in self.places)

    # --- the router, for one token

    def scores(self, logits: np.ndarray) -> np.ndarray:
        return softmax(logits) if self.score_function == "softmax" else sigmoid(logits)

    def shares(self, logits: np.ndarray) -> np.ndarray:
        scores = self.scores(logits)
        return scores / (scores.sum() + NORM_EPS)

    def scores_backward(self, logits: np.ndarray, d_scores: np.ndarray) -> np.ndarray:
        s = self.scores(logits)
        return s * (d_scores - d_scores @ s) if self.score_function == "softmax" else d_scores * s * (1 - s)

    def shares_backward(self, logits: np.ndarray, d_shares: np.ndarray) -> np.ndarray:
        total = self.scores(logits).sum() + NORM_EPS
        return self.scores_backward(logits, (d_shares - d_shares @ self.shares(logits)) / total)

    def choose(self, logits: np.ndarray, bias: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray, float]:
        """Expert ids and weights, best first, ties to the lower id; and the margin."""
        preference = self.scores(logits) + (0 if bias is None else bias) if self.use_pre_softmax else logits
        order = sorted(range(len(logits)), key=lambda i: (-preference[i], i))
        ids = np.array(order[: self.k])
        gaps = [gap(preference[a], preference[b]) for a, b in itertools.pairwise(order[: self.k + 1])]
        weights = self.scores(logits)[ids] if self.use_pre_softmax else softmax(logits[ids])
        if self.norm_topk_prob:
            weights = weights / (weights.sum() + NORM_EPS)
        return ids, weights * self.scaling_factor, min(gaps, default=math.inf)

    def choose_backward(self, logits: np.ndarray, ids: np.ndarray, d_weights: np.ndarray) -> np.ndarray:
        d_weights = d_weights * self.scaling_factor
        chosen = self.scores(logits)[ids] if self.use_pre_softmax else softmax(logits[ids])
        if self.norm_topk_prob:
            total = chosen.sum() + NORM_EPS
            d_weights = (d_weights - d_weights @ chosen / total) / total
        d_logits = np.zeros_like(logits)
        if self.use_pre_softmax:
            d_logits[ids] = d_weights
            return self.scores_backward(logits, d_logits)
        d_logits[ids] = chosen * (d_weights - d_weights @ chosen)
        return d_logits

    # --- who gets a slot

    def admit(self, ids: np.ndarray, weights: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
        """Kept assignments [..., k], the demand on every buffer in the order of the devices, and the margin.

        Position is the index on the last token axis within a device's block; the other axes, flattened, give the
        leading index.
        """
        devices, here = len(self.places), self.num_experts // self.ep
        block_shape = (ids.shape[0] // devices, *ids.shape[1:])
        positions = block_shape[-2]
        flat_ids = ids.reshape(devices, -1, positions, self.k)
        flat_weights, flat_mask = weights.reshape(flat_ids.shape), mask.reshape(flat_ids.shape[:-1])
        kept = np.zeros(flat_ids.shape, bool)
        per_rank = 1 if self.scope == "rank" else here
        demand = np.zeros((devices, per_rank), np.int64)
        margin = math.inf
        for group in sorted({group for group, _ in self.places}):
            device = {rank: block for block, (g, rank) in enumerate(self.places) if g == group}
            queue = []
            for rank, block in device.items():
                for lead, position, choice in np.ndindex(*flat_ids.shape[1:]):
                    if flat_mask[block, lead, position]:
                        place = (block, lead, position, choice)
                        turn = (position, lead, choice, rank)
                        first = (-flat_weights[place],) if self.drop_order == "weight" else ()
                        queue.append((first + turn, place))
            taken = np.zeros((self.ep, per_rank), np.int64)
            last: dict[tuple[int, int], float] = {}
            for key, place in sorted(queue):
                rank, local = divmod(int(flat_ids[place]), here)
                buffer = (rank, local if self.scope == "expert" else 0)
                if self.slots is not None and self.drop_order == "weight":
                    margin = min(margin, gap(key[0], last.get(buffer, math.inf)))
                    last[buffer] = key[0]
                kept[place] = self.slots is None or taken[buffer] < self.slots
                taken[buffer] += 1
            for rank, block in device.items():
                demand[block] = taken[rank]
        return kept.reshape(ids.shape), demand.ravel(), margin

    # --- one expert on one token

    def expert(self, params: Params, e: int, x: np.ndarray) -> np.ndarray:
        hidden = self._hidden(params, e, x)[-1]
        return hidden @ params["wo"][e] + _bias(params, "wo", e)

    def _hidden(self, params: Params, e: int, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        before = x @ params["wi_0"][e] + _bias(params, "wi_0", e)
        side = x @ params["wi_1"][e] + _bias(params, "wi_1", e) if "wi_1" in params else np.ones_like(before)
        return before, side, ACTIVATIONS[self.activation].value(before) * side

    def expert_backward(self, params: Params, grads: Params, e: int, x: np.ndarray, d_out: np.ndarray) -> np.ndarray:
        """Adds to ``grads`` and returns the gradient of x."""
        activation = ACTIVATIONS[self.activation]
        before, side, hidden = self._hidden(params, e, x)

        def affine(name: str, inputs: np.ndarray, cotangent: np.ndarray) -> np.ndarray:
            grads[name][e] += np.outer(inputs, cotangent)
            if f"{name}_bias" in grads:
                grads[f"{name}_bias"][e] += cotangent
            return params[name][e] @ cotangent

        d_hidden = affine("wo", hidden, d_out)
        d_x = affine("wi_0", x, d_hidden * side * activation.slope(before))
        return d_x + affine("wi_1", x, d_hidden * activation.value(before)) if "wi_1" in params else d_x

    # --- the layer

    def _prepare(
        self, params: Params, x: np.ndarray, mask: np.ndarray | None, choice: Choice | None, bias: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, float]:
        mask = np.ones(x.shape[:-1], bool) if mask is None else np.asarray(mask)
        x = np.where(mask[..., None], np.asarray(x, np.float64), 0)
        margin = math.inf
        logits = x @ params["gate"] if "gate" in params else np.zeros((*mask.shape, self.num_experts))
        if choice is None:
            ids = np.zeros((*mask.shape, self.k), np.int64)
            weights = np.zeros(ids.shape)
            for token in np.argwhere(mask):
                token = tuple(token)
                ids[token], weights[token], token_margin = self.choose(logits[token], bias)
                margin = min(margin, token_margin)
        else:
            ids, weights = np.asarray(choice[0]), np.asarray(choice[1], np.float64)
        return mask, x, logits, ids, weights, margin

    def load(self, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        return np.bincount(ids[mask].ravel(), minlength=self.num_experts)

    def __call__(
        self,
        params: Params,
        x: np.ndarray,
        mask: np.ndarray | None = None,
        *,
        choice: Choice | None = None,
        bias: np.ndarray | None = None,
    ) -> Result:
        mask, x, logits, ids, weights, margin = self._prepare(params, x, mask, choice, bias)
        kept, demand, admit_margin = self.admit(ids, weights, mask)
        output = np.zeros(x.shape)
        for place in np.argwhere(kept):
            *token, _ = place = tuple(place)
            output[tuple(token)] += weights[place] * self.expert(params, ids[place], x[tuple(token)])
        tokens = [tuple(token) for token in np.argwhere(mask)]
        fraction = self.load(ids, mask) / max(self.k * len(tokens), 1)
        mean_share = sum((self.shares(logits[t]) for t in tokens), np.zeros(self.num_experts)) / max(len(tokens), 1)
        z_loss = sum(logsumexp(logits[t]) ** 2 for t in tokens) / max(len(tokens), 1)
        aux_loss = self.aux_loss_coeff * self.num_experts * fraction @ mean_share + self.z_loss_coeff * z_loss
        return Result(output, float(aux_loss), demand, kept, min(margin, admit_margin))

    def grads(
        self,
        params: Params,
        x: np.ndarray,
        d_output: np.ndarray,
        d_aux_loss: float = 0.0,
        mask: np.ndarray | None = None,
        *,
        choice: Choice | None = None,
        bias: np.ndarray | None = None,
    ) -> Params:
        """Gradients of ``(output * d_output).sum() + aux_loss * d_aux_loss`` by every parameter and by ``"x"``.

        With a given ``choice`` there is one more, ``"weights"``.
        """
        mask, x, logits, ids, weights, _ = self._prepare(params, x, mask, choice, bias)
        kept, _, _ = self.admit(ids, weights, mask)
        grads = {name: np.zeros(value.shape) for name, value in params.items()}
        d_x, d_weights = np.zeros(x.shape), np.zeros(weights.shape)
        for place in np.argwhere(kept):
            *token, _ = place = tuple(place)
            token, e = tuple(token), ids[place]
            d_weights[place] = d_output[token] @ self.expert(params, e, x[token])
            d_x[token] += self.expert_backward(params, grads, e, x[token], weights[place] * d_output[token])
        count = max(int(mask.sum()), 1)
        fraction = self.load(ids, mask) / (self.k * count)
        for token in (tuple(token) for token in np.argwhere(mask)):
            row = logits[token]
            d_row = self.shares_backward(row, self.aux_loss_coeff * self.num_experts * fraction * d_aux_loss / count)
            d_row += 2 * self.z_loss_coeff * logsumexp(row) * softmax(row) * d_aux_loss / count
            if choice is None:
                d_row += self.choose_backward(row, ids[token], d_weights[token])
            if "gate" in params:
                grads["gate"] += np.outer(x[token], d_row)
                d_x[token] += params["gate"] @ d_row
        extra = {} if choice is None else {"weights": d_weights}
        return grads | extra | {"x": d_x}


def _bias(params: Params, name: str, e: int) -> np.ndarray:
    return params[f"{name}_bias"][e] if f"{name}_bias" in params else np.zeros(params[name].shape[-1])
