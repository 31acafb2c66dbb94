"""A decoder-only language model on bytes, whose feed-forward layers are Mixtures of Experts."""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from moe_blocks import Capacity, MoEBlock

VOCABULARY = 256  # bytes


class LMOutput(NamedTuple):
    """What the model returns.

    Attributes:
      logits: float32 ``[rows, tokens, 256]``, for the next byte.
      aux_loss: float32 scalar, the router losses of all layers.
      total_recv_tokens: int32 ``[layers, buffers]``, the demand on every receive buffer.
    """

    logits: Float[Array, "rows tokens 256"]
    aux_loss: Float[Array, ""]
    total_recv_tokens: Int[Array, "layers buffers"]


def rotate(x: Float[Array, "rows tokens heads dim"]) -> Float[Array, "rows tokens heads dim"]:
    """Rotary positions: turns channel pair ``(i, i + dim/2)`` at position ``p`` by the angle ``p * 10000**(-2i/dim)``.

    References:
      RoFormer, arXiv 2104.09864.
    """
    half = x.shape[-1] // 2
    frequencies = 10_000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * frequencies[None]
    cos, sin = (f(angles)[None, :, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    left, right = x[..., :half], x[..., half:]
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1)


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    heads: int

    @nn.compact
    def __call__(self, x: Float[Array, "rows tokens D"]) -> Float[Array, "rows tokens D"]:
        shape = (self.heads, x.shape[-1] // self.heads)
        query, key, value = (nn.DenseGeneral(shape, use_bias=False, name=name)(x) for name in ("query", "key", "value"))
        mixed = jax.nn.dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
        return nn.DenseGeneral(x.shape[-1], axis=(-2, -1), use_bias=False, name="out")(mixed)


class Layer(nn.Module):
    """Attention, then experts, each on the normalised residual."""

    heads: int
    moe: dict[str, Any]

    @nn.compact
    def __call__(self, x: Float[Array, "rows tokens D"], capacity: Capacity) -> tuple[Array, tuple[Array, Array]]:
        x += Attention(self.heads, name="attention")(nn.RMSNorm(name="attention_norm")(x))
        block = MoEBlock(**self.moe, name="moe")
        output, aux_loss, total_recv_tokens = block(nn.RMSNorm(name="moe_norm")(x), capacity=capacity)
        return x + output, (aux_loss, total_recv_tokens)


class LanguageModel(nn.Module):
    """Predicts each next byte of a text.

    Attributes:
      layers: number of decoder layers.
      width: D.
      heads: of the attention.
      moe: the arguments of every layer's `MoEBlock`.
    """

    layers: int
    width: int
    heads: int
    moe: dict[str, Any]

    @nn.compact
    def __call__(self, text: UInt8[Array, "rows tokens"], *, capacity: Capacity) -> LMOutput:
        """Reads the text up to each position; ``capacity`` is that of every MoE layer."""
        embed = nn.Embed(VOCABULARY, self.width, name="embed")
        # One layer is traced and compiled, whatever their number; the third output of each arrives stacked.
        layers = nn.scan(
            Layer,
            variable_axes={"params": 0, "moe_state": 0, "moe_metrics": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=self.layers,
        )(self.heads, self.moe, name="layers")
        x, (aux_losses, total_recv_tokens) = layers(embed(text.astype(jnp.int32)), capacity)
        logits = embed.attend(nn.RMSNorm(name="norm")(x)).astype(jnp.float32)
        return LMOutput(logits, aux_losses.sum(), total_recv_tokens)
