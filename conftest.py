"""What every test runs under: eight simulated CPU devices, and jax as strict as it can be.

Strict promotion makes a float32 that meets a bfloat16, and a vector that meets a matrix, an error instead of a silent
cast or broadcast. It stands in the root, not in ``tests``, since the examples in docstrings run under it too.
"""

from __future__ import annotations

import os
from pathlib import Path

# Before jax starts its backend. The last of two equal flags counts, so the caller's other flags stay.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ["JAX_PLATFORMS"] = "cpu"

import hypothesis
import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Compiling is most of the suite's time: LLVM need not polish programs that run once, XLA's own passes stay as they
# are, and what one run compiled is kept for the next.
jax.config.update("jax_disable_most_optimizations", True)
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parent / ".cache" / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# Each example may compile, so few and without a deadline. In CI hypothesis derandomizes by itself.
hypothesis.settings.register_profile("moe_blocks", max_examples=20, deadline=None)
hypothesis.settings.load_profile("moe_blocks")
