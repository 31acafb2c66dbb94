# %% [markdown]
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/moe-blocks/moe-blocks/blob/main/notebooks/02_policies.ipynb)
#
# # Capacity policies: what to do when a buffer overflows
#
# [01_quickstart](https://colab.research.google.com/github/moe-blocks/moe-blocks/blob/main/notebooks/01_quickstart.ipynb)
# showed that a small receive buffer silently drops tokens. Here you learn
#
# - how a *policy* picks the size of the buffers, and chooses what follows an overflow, by one line of config;
# - how `StepRunner` runs your training step under any of them;
# - that `retry_dropless` trains like a run without any limit, at a small buffer's size;
# - that `drop` does not, that `static_factor` stops, and that `adaptive_grow` finds the size by itself.
#
# It runs in about a minute on a laptop's CPU, on eight devices that JAX simulates. No accelerator is needed.
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
import typing

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

from policies import CapacityOverflowError, StepRunner, from_config

assert jax.device_count() == 8
mesh = jax.sharding.Mesh(jax.devices(), ("expert",))
print(mesh)

# %%
WIDTH = 32  # @param {type:"integer"}
NUM_EXPERTS = 8  # @param {type:"integer"}
EXPERTS_PER_TOKEN = 2  # @param {type:"integer"}
EXPERT_WIDTH = 64  # @param {type:"integer"}
BALANCE = 0.05  # @param {type:"number"}
BATCH = 16  # @param {type:"integer"}
LENGTH = 32  # @param {type:"integer"}
STEPS = 40  # @param {type:"integer"}
LEARNING_RATE = 0.01  # @param {type:"number"}

# %% [markdown]
# ## The text and the model
#
# As in the first notebook: the source of some of Python's own modules, byte by byte, and a small model with one MoE
# layer. There is one expert on each of the eight devices, so the popular expert's device is the one that overflows.
# Every run below sees the same batches in the same order.

# %%
source = "".join(inspect.getsource(module) for module in (argparse, subprocess, typing))
text = np.frombuffer(source.encode("ascii", "replace"), np.uint8).astype(np.int32)
starts = np.random.default_rng(0).integers(0, len(text) - LENGTH, (STEPS, BATCH, 1))
batches = list(text[starts + np.arange(LENGTH + 1)])  # each [BATCH, LENGTH + 1]

block = moe_blocks.MoEBlock(
    num_experts=NUM_EXPERTS,
    num_experts_per_tok=EXPERTS_PER_TOKEN,
    intermediate_size=EXPERT_WIDTH,
    gated=False,  # two matrices for each expert instead of three: it compiles faster
    aux_loss_coeff=BALANCE,
    expert_axis="expert",
    batch_axes=("expert",),
)


# %%
class Model(nn.Module):
    moe: moe_blocks.MoEBlock

    @nn.compact
    def __call__(self, text, *, capacity=None):
        x = nn.Embed(128, WIDTH)(text)
        x = x + nn.Conv(WIDTH, kernel_size=(4,), padding="CAUSAL")(nn.LayerNorm()(x))
        output, aux_loss, total_recv_tokens = self.moe(nn.LayerNorm()(x), capacity=capacity)
        return nn.Dense(128)(nn.LayerNorm()(x + output)), aux_loss, total_recv_tokens


model, optimizer = Model(block), optax.adam(LEARNING_RATE)
with jax.set_mesh(mesh):
    spec = block.capacity_spec((BATCH, LENGTH, WIDTH))
    params = jax.jit(model.init)(jax.random.key(0), batches[0][:, :-1])["params"]
start = jax.device_get({"params": params, "optimizer": optimizer.init(params)})  # every run starts from this
print(
    f"a receive buffer: {spec.balanced} slots balanced, {spec.dropless} dropless (factor {spec.factor(spec.dropless)})"
)

# %% [markdown]
# ## The training step
#
# A step under a policy is an ordinary pure function with one more argument and one more result:
#
# - `capacity`, which the policy chose, goes to the MoE layers;
# - `total_recv_tokens`, the demand that they report, comes back. With several layers, return a list or a dict of them.


# %%
def step(state, batch, *, capacity):
    def loss_fn(params):
        logits, aux_loss, total_recv_tokens = model.apply({"params": params}, batch[:, :-1], capacity=capacity)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()
        return loss + aux_loss, (loss, total_recv_tokens)

    grads, (loss, total_recv_tokens) = jax.grad(loss_fn, has_aux=True)(state["params"])
    updates, optimizer_state = optimizer.update(grads, state["optimizer"])
    new_state = {"params": optax.apply_updates(state["params"], updates), "optimizer": optimizer_state}
    slots = spec.dropless if capacity.slots is None else capacity.slots
    dropped = jnp.maximum(total_recv_tokens - slots, 0).sum()
    return new_state, total_recv_tokens, {"loss": loss, "dropped": dropped}


# %% [markdown]
# ## The loop
#
# `StepRunner` compiles the step, once for each capacity that is needed, and runs it. You get one report for each step
# that counts. What the policy is, the loop does not know: it comes from a config, as your YAML file would hold it.


# %%
def train(config):
    """Trains from the start under the policy that the config describes."""
    with jax.set_mesh(mesh):
        runner = StepRunner(step, from_config(config), spec)
        reports = list(runner.run(start, batches))
    first = [(*report.rejected, report)[0].capacity for report in reports]
    return {
        "loss": np.array([report.metrics["loss"] for report in reports]),
        "dropped": np.array([report.metrics["dropped"] for report in reports]),
        "demand": np.array([report.demand for report in reports]),
        "retries": np.array([report.attempts - 1 for report in reports]),
        "slots": np.array([capacity.slots or spec.dropless for capacity in first]),  # of the first attempt
        "chunks": max(report.capacity.chunks for report in reports),
        "programs": runner.executables,
    }


# %% [markdown]
# ## The reference: no limit
#
# A factor of `None` is dropless: room for any routing, four times the balanced size here. This is the mathematics
# that we want. How much of that room does the router use?

# %%
runs = {"dropless": train({"name": "static_factor", "factor": None})}
dropless = runs["dropless"]
assert not dropless["dropped"].any() and not dropless["retries"].any()


# %%
def plot_demand(ax, run):
    ax.plot(run["demand"], label="demand of the fullest device")
    ax.axhline(spec.balanced, color="gray", linestyle=":", label="balanced")
    ax.axhline(spec.dropless, color="gray", linestyle="--", label="dropless")
    ax.set(xlabel="step", ylabel="assignments", ylim=(0, spec.dropless * 1.4))


fig, ax = plt.subplots(figsize=(7, 3.2), layout="constrained")
plot_demand(ax, dropless)
ax.set_title("Demand is above balanced at every step, and below dropless")
ax.legend(loc="upper right", ncols=3)
plt.show()

print(f"demand from {dropless['demand'].min()} to {dropless['demand'].max()}")
assert (dropless["demand"] > spec.balanced).all() and (dropless["demand"] < spec.dropless).all()

# %% [markdown]
# The router learns while the balancing loss pulls it back, so the demand wanders. No single size between the two lines
# is right for the whole run, and you cannot know the peak beforehand.
#
# ## Policy 1, `static_factor`: stop
#
# The simplest reaction to an overflow is an error. It says which factor would have fitted, and the training state is
# the one before the step: a step that does not count changes nothing.

# %%
losses = []
with jax.set_mesh(mesh):
    runner = StepRunner(step, from_config({"name": "static_factor", "factor": 2.0}), spec)
    try:
        for report in runner.run(start, batches):
            losses.append(report.metrics["loss"])
    except CapacityOverflowError as error:
        overflow = error
        print(error)

print(f"\n{len(losses)} steps were applied; step {overflow.step} needs factor {overflow.factor}, that is")
print(f"{spec.slots(overflow.factor)} slots for {overflow.demand} assignments")
assert overflow.step == len(losses) < STEPS
assert spec.slots(2.0) == overflow.slots < overflow.demand <= spec.slots(overflow.factor)

# %% [markdown]
# Is the state really that of the steps before? Train again on their batches alone, and compare every number:

# %%
left_by_the_error = jax.device_get(runner.state)
with jax.set_mesh(mesh):
    for _ in runner.run(start, batches[: overflow.step]):
        pass
jax.tree.map(np.testing.assert_array_equal, jax.device_get(runner.state), left_by_the_error)
np.testing.assert_allclose(losses, dropless["loss"][: overflow.step], rtol=1e-6)
print("equal to the bit; raise the factor and go on from runner.state")

# %% [markdown]
# ## Policy 2, `drop`: go on
#
# Every step counts, and what finds no room is lost. This is what most systems do. Dropless and `drop` have the
# same seed and see the same batches:

# %%
runs["drop"] = train({"name": "drop", "factor": 0.25})
drop = runs["drop"]
assignments = STEPS * BATCH * LENGTH * EXPERTS_PER_TOKEN

fig, ax = plt.subplots(figsize=(7, 3.2), layout="constrained")
ax.plot(drop["loss"] - dropless["loss"])
ax.axhline(0, color="gray", linestyle="--")
ax.set(xlabel="step", ylabel="loss above dropless (nats)", title="drop at factor 0.25 learns less")
plt.show()

excess = (drop["loss"] - dropless["loss"])[-10:].mean()
share = drop["dropped"].sum() / assignments
print(f"{share:.0%} of the assignments were dropped; at the end the loss is {excess:.3f} higher")
assert share > 0.5
assert excess > 0.02

# %% [markdown]
# ## Policy 3, `retry_dropless`: run it again
#
# A small buffer for every step, and when one overflows, the same batch again without a limit. The rejected attempt
# leaves no trace in the parameters, the optimizer or the metrics; it is only counted, in `report.attempts`. The second
# attempt works through the tokens in chunks, so it needs no larger buffer. After it, the small buffer is back.

# %%
runs["retry_dropless"] = train({"name": "retry_dropless", "factor": 2.0})
retry = runs["retry_dropless"]


def plot_slots(ax, run):
    plot_demand(ax, run)
    ax.step(range(STEPS), run["slots"], where="mid", color="tab:green", label="slots of the first attempt")
    again = np.flatnonzero(run["retries"])
    ax.plot(again, run["demand"][again], "o", color="tab:red", label="ran again")
    ax.legend(loc="upper right", ncols=3, fontsize="small")


fig, ax = plt.subplots(figsize=(7, 3.2), layout="constrained")
plot_slots(ax, retry)
ax.set_title("retry_dropless at factor 2: what does not fit runs again")
plt.show()

assert ((retry["demand"] > spec.slots(2.0)) == (retry["retries"] == 1)).all()
assert 1 <= retry["retries"].sum() < STEPS
assert retry["chunks"] == 2  # dropless is twice as much as factor 2, so it ran in two halves

# %% [markdown]
# The point of it: at each step the loss is that of the dropless run. Only the order in which numbers are added
# differs, in the last digit of a float32.

# %%
fig, ax = plt.subplots(figsize=(7, 3.2), layout="constrained")
ax.plot(dropless["loss"], linewidth=5, color="lightgray", label="dropless")
ax.plot(retry["loss"], label="retry_dropless")
ax.plot(drop["loss"], linestyle=":", label="drop")
ax.set(xlabel="step", ylabel="loss (nats per byte)", title="retry_dropless trains like dropless, step by step")
ax.legend()
plt.show()

difference = np.abs(retry["loss"] / dropless["loss"] - 1).max()
print(f"{retry['retries'].sum()} of {STEPS} steps ran twice; the losses differ by {difference:.0e} at most (relative)")
np.testing.assert_allclose(retry["loss"], dropless["loss"], rtol=1e-6)
assert not retry["dropped"].any()

# %% [markdown]
# ## Policy 4, `adaptive_grow`: learn the size
#
# If overflows are frequent, running twice gets expensive. `adaptive_grow` also runs the step again, but on the rung
# of a *ladder* of sizes that the demand needs, and stays there. It shrinks only after `patience` steps (100 by default)
# that a smaller rung would have served. You need not know the right factor beforehand.

# %%
runs["adaptive_grow"] = train({"name": "adaptive_grow", "initial_factor": 1.0, "growth": 1.5})
grow = runs["adaptive_grow"]

fig, ax = plt.subplots(figsize=(7, 3.2), layout="constrained")
plot_slots(ax, grow)
ax.set_title("adaptive_grow from the balanced size: a few steps run again, then none")
plt.show()

print("slots:", sorted(set(grow["slots"].tolist())), "retries at steps", np.flatnonzero(grow["retries"]).tolist())
assert grow["slots"][-1] > grow["slots"][0] == spec.slots(1.0)
assert grow["retries"].sum() >= 1 and grow["retries"][STEPS // 2 :].sum() == 0
np.testing.assert_allclose(grow["loss"], dropless["loss"], rtol=1e-6)  # and nothing was lost on the way

# %% [markdown]
# ## Retries, side by side
#
# `retry_dropless` pays again whenever the router is uneven, `adaptive_grow` pays while it learns.

# %%
fig, ax = plt.subplots(figsize=(7, 3.2), layout="constrained")
for name in ("retry_dropless", "adaptive_grow"):
    ax.step(range(STEPS), runs[name]["retries"].cumsum(), where="post", label=name)
ax.yaxis.get_major_locator().set_params(integer=True)
ax.set(xlabel="step", ylabel="retries so far", title="adaptive_grow runs fewer steps again, on a larger buffer")
ax.legend()
plt.show()

assert grow["retries"].sum() < retry["retries"].sum()
assert grow["slots"][-1] > retry["slots"][-1]

# %% [markdown]
# ## All of them
#
# The run of `static_factor` at factor 2 stopped early and is not in the table. The buffer is that of the last step, as
# a multiple of the balanced size; a program is compiled once for each capacity that a run needs.

# %%
print(f"{'policy':16}{'loss':>8}{'dropped':>9}{'retries':>9}{'buffer':>8}{'programs':>10}")
for name, run in runs.items():
    loss, lost = run["loss"][-10:].mean(), run["dropped"].sum() / assignments
    buffer = spec.factor(run["slots"][-1])
    print(f"{name:16}{loss:8.4f}{lost:9.1%}{run['retries'].sum():9}{buffer:8.3g}{run['programs']:10}")

assert [name for name, run in runs.items() if run["dropped"].any()] == ["drop"]

# %% [markdown]
# Which one, then?
#
# | you want | policy |
# |---|---|
# | to be told when the size is wrong | `static_factor` |
# | speed above all, and drops are fine | `drop` |
# | dropless training in a small buffer, and overflows are rare | `retry_dropless` |
# | dropless training, and you do not know the size | `adaptive_grow` |
#
# ## What to try next
#
# - Set `BALANCE = 0.01`: the router is less even. What do `retry_dropless` and `adaptive_grow` do then?
# - Give `adaptive_grow` `"patience": 5`, and it follows the demand down again.
# - Write a policy of your own: subclass `policies.CapacityPolicy` as a frozen dataclass, and make it known with
#   `policies.register("my_name")`.
# - Save `runner.policy_state.to_json()` beside your checkpoint, and hand it to the next `StepRunner` as `policy_state`.
# - Train a real language model under each policy: `make train` in the
#   [repository](https://github.com/moe-blocks/moe-blocks).
