# %% [markdown]
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/moe-blocks/moe-blocks/blob/main/notebooks/01_quickstart.ipynb)
#
# # Quickstart: a Mixture-of-Experts block inside your own Flax model
#
# You have trained a dense Flax model and never a Mixture-of-Experts (MoE). Here you learn
#
# - how to replace a feed-forward layer by `MoEBlock`, and what its three outputs are;
# - how the experts spread over devices without changing the result;
# - what *capacity* is, and what happens to a token that finds no room;
# - how to mask padding, read the layer's metrics, and bring your own router in ten lines.
#
# It runs in under a minute on a laptop's CPU, on eight devices that JAX simulates. No accelerator is needed.
# What a cell claims, it asserts, for the numbers that stand here: change them and see what holds.

# %%
import os

# JAX reads these when it starts, so they come before everything else.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

# %%
try:
    import moe_blocks
except ImportError:  # on Colab, for example
    import subprocess
    import sys

    package = "moe-blocks[train] @ git+https://github.com/moe-blocks/moe-blocks"
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", package], check=True)
    import moe_blocks

# %%
import argparse
import inspect
import subprocess
import tarfile
import typing

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

from moe_blocks import MoEBlock

assert jax.device_count() == 8
print(jax.device_count(), "devices")

# %%
WIDTH = 32  # @param {type:"integer"}
NUM_EXPERTS = 8  # @param {type:"integer"}
EXPERTS_PER_TOKEN = 2  # @param {type:"integer"}
EXPERT_WIDTH = 64  # @param {type:"integer"}
BALANCE = 0.05  # @param {type:"number"}
BATCH = 16  # @param {type:"integer"}
LENGTH = 64  # @param {type:"integer"}
STEPS = 100  # @param {type:"integer"}
LEARNING_RATE = 0.01  # @param {type:"number"}

# %% [markdown]
# ## A text to learn
#
# Python ships with megabytes of text: its own source code. We train on some modules and validate on another, byte by
# byte. The yardstick is the loss of a guesser who knows only how frequent each byte is, the *unigram* loss.

# %%
VOCABULARY = 128  # ASCII


def read(*modules):
    """The source of some modules as one array of bytes."""
    source = "".join(inspect.getsource(module) for module in modules)
    return np.frombuffer(source.encode("ascii", "replace"), np.uint8).astype(np.int32)


def windows(text, starts):
    """One row of LENGTH + 1 bytes for each start: inputs and, shifted by one, targets."""
    return text[starts[:, None] + np.arange(LENGTH + 1)]


train_text, valid_text = read(argparse, subprocess, typing), read(tarfile)
valid_batch = windows(valid_text, np.arange(BATCH) * 4000)

frequency = np.bincount(train_text, minlength=VOCABULARY) + 1
unigram_loss = -np.log(frequency / frequency.sum())[valid_batch[:, 1:]].mean()
print(f"{len(train_text):,} bytes to learn from; unigram loss {unigram_loss:.2f} nats per byte")

# %% [markdown]
# ## The dense model you know
#
# An embedding, a causal convolution that lets each byte see the three before it, a feed-forward layer, and a head. The
# feed-forward layer is where most parameters of a large model are, and where most of its time goes. Here it is
# as wide as two of the experts that we are about to use, so that both models do the same work per byte.


# %%
class DenseModel(nn.Module):
    @nn.compact
    def __call__(self, text):
        x = nn.Embed(VOCABULARY, WIDTH)(text)
        x = x + nn.Conv(WIDTH, kernel_size=(4,), padding="CAUSAL")(nn.LayerNorm()(x))
        h = nn.LayerNorm()(x)
        h = nn.silu(nn.Dense(EXPERTS_PER_TOKEN * EXPERT_WIDTH * 3 // 2)(h))
        x = x + nn.Dense(WIDTH)(h)
        return nn.Dense(VOCABULARY)(nn.LayerNorm()(x))


# %% [markdown]
# ## The same model with experts
#
# An MoE layer has many feed-forward networks, the *experts*, and a small *router* that picks a few of them for each
# token. The parameters grow with the number of experts, the work per token does not.
#
# `MoEBlock` takes `[..., WIDTH]` and returns three things:
#
# | output | shape | meaning |
# |---|---|---|
# | `output` | that of the input | the weighted sum of what the chosen experts made of the token |
# | `aux_loss` | scalar | add it to your loss: it asks the router to use all experts alike |
# | `total_recv_tokens` | `[buffers]` | how many (token, expert) pairs each device was sent; more on this below |
#
# The block is a field of the model, so that we can swap it later. The residual connection around it stays.


# %%
class MoEModel(nn.Module):
    moe: MoEBlock

    @nn.compact
    def __call__(self, text, *, capacity=None, token_mask=None):
        x = nn.Embed(VOCABULARY, WIDTH)(text)
        x = x + nn.Conv(WIDTH, kernel_size=(4,), padding="CAUSAL")(nn.LayerNorm()(x))
        h = nn.LayerNorm()(x)
        self.sow("intermediates", "moe_input", h)  # only to look at it later
        output, aux_loss, total_recv_tokens = self.moe(h, capacity=capacity, token_mask=token_mask)
        return nn.Dense(VOCABULARY)(nn.LayerNorm()(x + output)), aux_loss, total_recv_tokens


SIZES = {"num_experts": NUM_EXPERTS, "num_experts_per_tok": EXPERTS_PER_TOKEN, "intermediate_size": EXPERT_WIDTH}
block = MoEBlock(**SIZES, aux_loss_coeff=BALANCE)
dense_model, moe_model = DenseModel(), MoEModel(block)

# %% [markdown]
# ## Training
#
# Nothing is new here but one term: the loss is the cross-entropy *plus* `aux_loss`.


# %%
def cross_entropy(logits, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


def dense_loss(params, batch):
    loss = cross_entropy(dense_model.apply({"params": params}, batch[:, :-1]), batch)
    return loss, loss


def moe_loss(params, batch):
    logits, aux_loss, _ = moe_model.apply({"params": params}, batch[:, :-1])
    loss = cross_entropy(logits, batch)
    return loss + aux_loss, loss  # what is minimised, what is reported


# %%
def train(model, loss_fn):
    params = jax.jit(model.init)(jax.random.key(0), valid_batch[:, :-1])["params"]
    optimizer = optax.adam(LEARNING_RATE)
    state = params, optimizer.init(params)

    @jax.jit
    def step(state, batch):
        params, optimizer_state = state
        (_, loss), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, batch)
        updates, optimizer_state = optimizer.update(grads, optimizer_state)
        return (optax.apply_updates(params, updates), optimizer_state), loss

    rng, losses = np.random.default_rng(0), []
    for _ in range(STEPS):
        starts = rng.integers(0, len(train_text) - LENGTH, BATCH)
        state, loss = step(state, windows(train_text, starts))
        losses.append(loss)
    return state[0], np.array(losses)


dense_params, dense_losses = train(dense_model, dense_loss)
params, moe_losses = train(moe_model, moe_loss)

# %%
fig, ax = plt.subplots(figsize=(7, 3.2), layout="constrained")
ax.plot(dense_losses, label="dense")
ax.plot(moe_losses, label=f"MoE, {EXPERTS_PER_TOKEN} of {NUM_EXPERTS} experts per byte")
ax.axhline(unigram_loss, color="gray", linestyle="--", label="unigram")
ax.set(xlabel="step", ylabel="training loss (nats per byte)", title="At equal work per byte, the experts learn more")
ax.legend()
plt.show()

valid_loss = float(moe_loss(params, valid_batch)[1])
ends = {"dense": dense_losses[-20:].mean(), "MoE": moe_losses[-20:].mean()}
print("mean training loss of the last 20 steps:", {name: f"{loss:.2f}" for name, loss in ends.items()})
print(f"validation loss of the MoE {valid_loss:.2f}, unigram {unigram_loss:.2f}")
assert ends["MoE"] < ends["dense"]
assert valid_loss < unigram_loss - 0.3

# %% [markdown]
# ## The three outputs, one by one
#
# We call the trained block alone, on the input that it has inside the model.
#
# - `output` has the shape and dtype of the input.
# - `aux_loss` is near its coefficient when the router uses the experts alike, and grows up to `NUM_EXPERTS / k` times
#   that when it sends everything to the same `k` of them.
# - `total_recv_tokens` counts *assignments*: pairs of a token and an expert that it chose. Here one device holds all
#   the experts, so there is one number, and it is every token times two.

# %%
moe_params = {"params": params["moe"]}
apply = jax.jit(block.apply, static_argnames="capacity")
_, sown = moe_model.apply({"params": params}, valid_batch[:, :-1], mutable=["intermediates"])
x = sown["intermediates"]["moe_input"][0]

output, aux_loss, total_recv_tokens = apply(moe_params, x)
print("input", x.shape, "output", output.shape)
print(f"aux_loss {float(aux_loss):.4f}, coefficient {BALANCE}")
print("total_recv_tokens", total_recv_tokens.tolist(), "=", BATCH, "*", LENGTH, "tokens *", EXPERTS_PER_TOKEN)

assert output.shape == x.shape and output.dtype == x.dtype
assert 0.9 * BALANCE < float(aux_loss) < NUM_EXPERTS / EXPERTS_PER_TOKEN * BALANCE
assert total_recv_tokens.tolist() == [BATCH * LENGTH * EXPERTS_PER_TOKEN]

# %% [markdown]
# ## Experts on many devices
#
# A large model's experts do not fit on one device, so each device holds some of them: *expert parallelism*. Each
# device also holds a part of the batch, and sends its tokens to wherever their experts are.
#
# Two fields say so: `expert_axis`, the mesh axis that shares the experts, and `batch_axes`, the axes that share the
# tokens. The parameters are the same as before, and so is the result.

# %%
mesh = jax.sharding.Mesh(jax.devices(), ("expert",))
ON_MESH = {"expert_axis": "expert", "batch_axes": ("expert",)}
parallel = MoEBlock(**SIZES, **ON_MESH, aux_loss_coeff=BALANCE)
apply_parallel = jax.jit(parallel.apply, static_argnames="capacity")

with jax.set_mesh(mesh):
    spread, spread_loss, demand = jax.device_get(apply_parallel(moe_params, x))

difference = np.abs(spread - output).max() / np.abs(output).max()
print(f"largest difference to one device: {difference:.1e} of the largest output")
print("total_recv_tokens", demand.tolist())
assert difference < 1e-5
np.testing.assert_allclose(spread_loss, aux_loss, rtol=1e-5)
assert demand.sum() == total_recv_tokens[0]  # no assignment was lost, they only lie elsewhere

# %% [markdown]
# ## Capacity: room for what arrives
#
# `total_recv_tokens` has eight numbers now, one for each device, and they differ: some experts are more popular than
# others. The trouble is that an accelerator's program needs fixed shapes. Each device must reserve a *receive buffer*
# before it knows how much will arrive. Two sizes are natural:
#
# - *balanced*: just enough if every device is sent the same. Small and fast, but the router is never that even.
# - *dropless*: enough for any routing. Always right, but mostly empty.
#
# A *capacity factor* is a multiple of the balanced size. `capacity_spec` knows all of them, in *slots*: rows of the
# buffer, one for each assignment.

# %%
with jax.set_mesh(mesh):
    spec = parallel.capacity_spec(x.shape)
print(spec.describe(1.0, width=WIDTH, dtype="float32"), "\n")
for factor in (0.5, 1.0, 2.0, None):
    slots = spec.slots(factor)
    lost = np.maximum(demand - slots, 0).sum()
    print(f"factor {factor!s:>4}: {slots:4} slots, {lost:4} of {demand.sum()} assignments would find no room")

assert spec.balanced == demand.mean()
assert spec.slots(1.0) < demand.max() <= spec.slots(None) == spec.dropless

# %%
fig, ax = plt.subplots(figsize=(7, 3.2), layout="constrained")
ax.bar(range(len(demand)), demand)
for factor, name in ((0.5, "factor 0.5"), (1.0, "factor 1, balanced"), (2.0, "factor 2"), (None, "dropless")):
    ax.axhline(spec.slots(factor), color="tab:red", linestyle="--")
    ax.text(len(demand) - 0.3, spec.slots(factor), f" {name}", color="tab:red", va="center")
ax.set(xlabel="device", ylabel="assignments", title="Demand (bars) is uneven: the balanced size does not hold it")
ax.set_xlim(-0.6, len(demand) - 0.4)
plt.show()

# %% [markdown]
# ## What a drop does
#
# Give the block a capacity, and what does not fit is *dropped*: it adds nothing to the output. A token that loses
# one of its two experts keeps the other one's share. A token that loses both gets exactly zero, and only the
# residual connection carries it on. No error is raised. But `total_recv_tokens` still says what was asked for, so
# you can see it: a device overflowed if and only if its demand exceeds the slots.
#
# With the default `drop_order="position"`, later positions lose first, in all sequences alike.

# %%
slots = spec.slots(0.5)
with jax.set_mesh(mesh):
    capped, _, capped_demand = jax.device_get(apply_parallel(moe_params, x, capacity=slots))

zeroed = (capped == 0).all(-1)  # [batch, position]: lost every expert
changed = np.abs(capped - spread).max(-1) > 1e-5 * np.abs(spread).max()  # lost at least one
print(f"{slots} slots: {changed.mean():.0%} of the tokens lost an expert or both, {zeroed.mean():.0%} both")

np.testing.assert_array_equal(capped_demand, demand)  # counted before any drop
half = LENGTH // 2
assert changed[:, :half].mean() < changed[:, half:].mean()
assert zeroed.any() and changed[zeroed].all() and not changed.all()

# %%
fig, ax = plt.subplots(figsize=(7, 3.2), layout="constrained")
image = ax.imshow(changed.astype(int) + zeroed, aspect="auto", cmap=plt.get_cmap("OrRd", 3), vmin=-0.5, vmax=2.5)
bar = fig.colorbar(image, ticks=[0, 1, 2])
bar.ax.set_yticklabels(["kept both", "lost one expert", "lost both"])
ax.set(xlabel="position", ylabel="sequence", title="Half of the balanced size: later positions lose first")
plt.show()

# %% [markdown]
# Does it matter? The model, which never saw a drop in training, gets worse at once:


# %%
@jax.jit(static_argnames="capacity")
def parallel_loss(params, batch, capacity=None):
    logits, _, _ = MoEModel(parallel).apply({"params": params}, batch[:, :-1], capacity=capacity)
    return cross_entropy(logits, batch)


with jax.set_mesh(mesh):
    dropless_loss, capped_loss = (float(parallel_loss(params, valid_batch, capacity=c)) for c in (None, slots))
print(f"validation loss: {dropless_loss:.3f} dropless, {capped_loss:.3f} with {slots} slots")
np.testing.assert_allclose(dropless_loss, valid_loss, rtol=1e-5)
assert capped_loss > dropless_loss + 0.01

# %% [markdown]
# ## Padding
#
# Sequences rarely have the same length. `token_mask` is True for real tokens. Padding takes no slot, is in no count
# and no loss, and cannot touch a real token, whatever it holds. Here it holds NaN.

# %%
real = np.arange(LENGTH) < np.array([LENGTH, LENGTH // 2] * (BATCH // 2))[:, None]  # every other sequence is short
poisoned = jnp.where(real[..., None], x, jnp.nan)
masked, masked_loss, masked_total = jax.device_get(apply(moe_params, poisoned, token_mask=real))

print(f"{real.sum()} real tokens, total_recv_tokens {masked_total.tolist()}")
assert masked_total.tolist() == [real.sum() * EXPERTS_PER_TOKEN]
np.testing.assert_allclose(masked[real], output[real], rtol=1e-5, atol=1e-6)  # as without a mask
assert (masked[~real] == 0).all() and np.isfinite(masked_loss)

# %% [markdown]
# ## What the layer did
#
# More figures are in the collection `moe_metrics`. They are computed only if you ask for it with `mutable`: the load of
# each expert, the dropped assignments and the share of router weight they carried, the entropy of the router's scores,
# and how far the most popular expert is above the mean (`max_violation`).

# %%
with_metrics = jax.jit(lambda variables, x: parallel.apply(variables, x, capacity=slots, mutable=["moe_metrics"]))
with jax.set_mesh(mesh):
    _, collected = with_metrics(moe_params, x)
metrics = jax.device_get(collected["moe_metrics"])
for name, value in metrics.items():
    print(f"{name:15}", value if value.ndim else f"{value:.4g}")

assert metrics["dropped"] == np.maximum(demand - slots, 0).sum()
assert metrics["load"].tolist() == demand.tolist()  # one expert for each device here
np.testing.assert_allclose(metrics["max_violation"], demand.max() / spec.balanced - 1, rtol=1e-5)

# %% [markdown]
# ## Your own router
#
# Override `route` to choose the experts, or `experts` to change what they compute. Capacity, masks, expert
# parallelism and metrics keep working. This router compares directions only: a token goes to the experts whose
# centroids point its way.


# %%
class CosineMoE(MoEBlock):
    def route(self, x, token_mask):
        centroids = self.param("centroids", nn.initializers.normal(1.0), (x.shape[-1], self.num_experts))
        directions = x / jnp.linalg.norm(x, axis=-1, keepdims=True).clip(1e-6)
        logits = 10 * directions @ (centroids / jnp.linalg.norm(centroids, axis=0))
        return moe_blocks.route(logits, self.router, num_experts_per_tok=self.num_experts_per_tok)


mine, mine_parallel = CosineMoE(**SIZES), CosineMoE(**SIZES, **ON_MESH)
variables = jax.jit(mine.init)(jax.random.key(1), x)
alone = jax.device_get(jax.jit(mine.apply)(variables, x).output)
with jax.set_mesh(mesh):
    together = jax.device_get(jax.jit(mine_parallel.apply)(variables, x))

print("parameters:", {name: value.shape for name, value in nn.meta.unbox(variables)["params"].items()})
print("total_recv_tokens", together.total_recv_tokens.tolist())
assert "gate" not in variables["params"]  # the built-in router is gone
np.testing.assert_allclose(together.output, alone, rtol=1e-4, atol=1e-5 * np.abs(alone).max())

# %% [markdown]
# ## What to try next
#
# - Which size should the buffers have, and what to do when they overflow? That is what *capacity policies* decide:
#   [02_policies](https://colab.research.google.com/github/moe-blocks/moe-blocks/blob/main/notebooks/02_policies.ipynb).
# - Set `drop_order="weight"` in the section on drops: the smallest router weights lose first, wherever they stand.
# - Set `BALANCE = 0.001` and train again. How uneven does the demand become?
# - Give the block another `router=`, such as `moe_blocks.Router(score_function="sigmoid", norm_topk_prob=True)`.
# - Use a mesh with a data axis too: `batch_axes=("data", "expert")` on two by four devices.
