"""Routings as router logits: one with equal loads, one by Zipf's law, one as a trained router makes them.

A layer cannot be told whom to choose, least of all a peer's. So `embed` makes the router's kernel orthonormal and
writes the logits into the inputs: every layer that computes ``x @ gate`` then comes to the same choice by itself.

Symbols: ``B`` sequences of ``S`` tokens, ``E`` experts, ``k`` of them for each token, ``D`` width.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.random import Generator

# How far the last chosen logit lies above the first one that is not chosen: wide enough for bfloat16.
MARGIN = 0.5
VOCABULARY, PERSISTENCE = 2000, 0.9


def balanced(rng: Generator, sequences: int, tokens: int, experts: int, k: int) -> np.ndarray:
    """Logits ``[B, S, E]`` that give every expert ``S * k / E`` tokens of each sequence, rounded up or down."""
    turn = np.arange(tokens * k).reshape(tokens, k) % experts
    ids = np.stack([rng.permutation(experts)[turn[rng.permutation(tokens)]] for _ in range(sequences)])
    logits = rng.normal(size=(sequences, tokens, experts)) / 4
    np.put_along_axis(logits, ids, np.take_along_axis(logits, ids, -1) + 4, -1)
    return logits


def zipf(rng: Generator, sequences: int, tokens: int, experts: int, k: int) -> np.ndarray:
    """Logits ``[B, S, E]`` of independent tokens that want the expert of rank r with a probability of about 1/r.

    Gumbel noise on log-probabilities draws without replacement, so no expert gets more than every token.
    """
    log_probability = -np.log(rng.permutation(experts) + 1.0)
    return log_probability + rng.gumbel(size=(sequences, tokens, experts))


def trained(rng: Generator, sequences: int, tokens: int, experts: int, k: int) -> np.ndarray:
    """Logits ``[B, S, E]`` with what routers of trained language models show.

    A word mostly goes to the same experts wherever it stands, and a few words make up much of a text; neighbours share
    a context, so the same experts come again from token to token; and the loads stay unequal, within a small multiple
    of the mean. The logits are the sum of a term for each of these.

    References:
      Mixtral, arXiv 2401.04088, section 5 and table 5 (repeated choices); OpenMoE, arXiv 2402.01739, section 4
      (choices by token id).
    """
    frequency = 1 / np.arange(1.0, VOCABULARY + 1)
    words = rng.choice(VOCABULARY, size=(sequences, tokens), p=frequency / frequency.sum())
    by_word = rng.normal(size=(VOCABULARY, experts))[words]
    context = np.empty((sequences, tokens, experts))
    state = rng.normal(size=(sequences, experts))
    for position in range(tokens):
        news = math.sqrt(1 - PERSISTENCE**2) * rng.normal(size=state.shape)
        context[:, position] = state = PERSISTENCE * state + news
    return by_word + context + rng.normal(size=experts) / 4


ROUTINGS: dict[str, Callable[[Generator, int, int, int, int], np.ndarray]] = {
    "balanced": balanced,
    "zipf": zipf,
    "trained": trained,
}


def choose(logits: np.ndarray, k: int) -> np.ndarray:
    """The ids ``[B, S, k]`` of the largest logits, best first."""
    return np.argsort(-logits, axis=-1, kind="stable")[..., :k]


def separate(logits: np.ndarray, k: int) -> np.ndarray:
    """Lifts the k largest logits by `MARGIN`, so that rounding does not change who is chosen.

    Example:
      >>> separate(np.array([1.0, 0.9, 1.1, 0.0]), 2).tolist()
      [1.5, 0.9, 1.6, 0.0]
    """
    ids = choose(logits, k)
    lifted = logits.copy()
    np.put_along_axis(lifted, ids, np.take_along_axis(logits, ids, -1) + MARGIN, -1)
    return lifted


def embed(rng: Generator, logits: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and a router kernel whose product is the logits.

    Args:
      rng: for what the logits leave open.
      logits: ``[B, S, E]``.
      width: D, at least E.

    Returns:
      Both float32: ``x`` ``[B, S, D]``, noise of unit variance outside the kernel's span, and ``gate`` ``[D, E]`` with
      orthonormal columns.

    Raises:
      ValueError: if the width is too small to hold one direction for each expert.
    """
    experts = logits.shape[-1]
    if width < experts:
        raise ValueError(f"width must be at least the number of experts, {experts}, got {width}; make the layer wider")
    gate = np.linalg.qr(rng.normal(size=(width, experts)))[0].astype(np.float32)
    noise = rng.standard_normal((*logits.shape[:-1], width), np.float32)
    return noise + (logits.astype(np.float32) - noise @ gate) @ gate.T, gate


def imbalance(ids: np.ndarray, experts: int) -> float:
    """The largest load over the mean one; 1 is balanced.

    Example:
      >>> imbalance(np.array([[0, 1], [0, 2]]), 4)
      2.0
    """
    return float(np.bincount(ids.ravel(), minlength=experts).max() * experts / ids.size)


def repetition(ids: np.ndarray) -> float:
    """The share of a token's experts that the token before it in ``[B, S, k]`` chose too."""
    again = ids[:, 1:, :, None] == ids[:, :-1, None, :]
    return float(again.any(-1).mean())
