from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_blocks.row_blocks import LADDER, Block, as_bits, as_floats, block_sizes, for_each_block

MOST = 24  # blocks that a test below can count
# What two of the tests below guard against was mended in the XLA of jax 0.12. The controls hold for the oldest jax.
NEEDED = jax.__version_info__[:2] == (0, 10)


@functools.partial(jax.jit, static_argnames="num_rows")
def visits(group_sizes: Any, num_rows: int) -> Any:
    """How often each row was visited and by which group, and (group, size, rows) of every block."""

    def body(block: Block, carry: Any) -> Any:
        times, owner, blocks, at = carry
        size = jnp.int32(block.size)
        entry = jnp.stack([block.group, size, block.inside.sum(dtype=jnp.int32)])
        return (
            block.write(times, block.read(times) + 1),
            block.write(owner, jnp.broadcast_to(block.group, block.size)),
            blocks.at[at].set(entry),
            at + 1,
        )

    rows = jnp.zeros(num_rows, jnp.int32)
    init = rows, rows - 1, jnp.zeros((MOST, 3), jnp.int32), jnp.int32(0)
    return for_each_block(body, init, group_sizes, num_rows)


@pytest.mark.parametrize("num_rows", [1, 7, 40, 700, 1300])
@given(data=st.data())
def test_every_row_once_in_order_and_little_padding(num_rows: int, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, num_rows), min_size=4, max_size=4)))
    sizes = np.diff(cuts, prepend=0)
    times, owner, blocks, count = jax.tree.map(np.asarray, visits(jnp.array(sizes, jnp.int32), num_rows))
    filled = sizes.sum()
    assert times[:filled].tolist() == [1] * filled and not times[filled:].any()
    assert owner[:filled].tolist() == np.repeat(np.arange(4), sizes).tolist() and (owner[filled:] == -1).all()
    blocks = blocks[:count]
    assert (np.diff(blocks[:, 0]) >= 0).all() and (blocks[:, 2] > 0).all()
    for group, size in enumerate(sizes):
        mine = blocks[blocks[:, 0] == group]
        assert mine[:, 2].sum() == size and len(mine) <= -(-size // LADDER[-1])
        # Only the last block of a group has padding, less than one step of the ladder.
        assert (mine[:-1, 1] == mine[:-1, 2]).all()
        if size:
            smaller = [step for step in block_sizes(num_rows) if step < mine[-1, 1]]
            assert mine[-1, 2] > max(smaller, default=0)


def test_block_sizes() -> None:
    assert block_sizes(1) == (1,) and block_sizes(8) == (8,) and block_sizes(9) == (8, 9)
    assert block_sizes(33) == (8, 32, 33)
    assert block_sizes(512) == block_sizes(10**6) == LADDER


def test_reading_and_writing_stay_inside() -> None:
    """A window that reaches over both ends of its block reads the filler there, and leaves there what was."""
    block = Block(jnp.int32(0), 4, jnp.int32(1), jnp.array([False, True, True, False]))
    rows = jnp.array([[10.0], [11.0], [jnp.nan], [13.0], [jnp.nan], [15.0]])
    assert np.isnan(block.read(rows)).ravel().tolist() == [False, True, False, False]
    assert block.read(rows.at[2].set(12.0), fill=-1).ravel().tolist() == [-1, 12, 13, -1]
    written = block.write(rows, jnp.full((4, 1), 7.0)).ravel()
    assert written[:4].tolist() == [10, 11, 7, 7] and np.isnan(written[4]) and written[5] == 15


def test_no_rows() -> None:
    assert for_each_block(lambda block, carry: carry + 1, 5, jnp.zeros(3, jnp.int32), 0) == 5


def test_the_carry_is_updated_in_place() -> None:
    """A copy of the rows for each block would cost more than the work."""
    M, width = 2048, 256

    def scale(rows: Any, sizes: Any) -> Any:
        return for_each_block(lambda block, rows: block.write(rows, block.read(rows) * 2), rows, sizes, M)

    def with_a_conditional(rows: Any, sizes: Any) -> Any:
        """The plainer way: as many branches as sizes."""

        def branch(size: int) -> Any:
            def body(i: Any, rows: Any) -> Any:
                block = Block(i, size, i * 8, jnp.arange(size, dtype=jnp.int32) < sizes[i])
                return block.write(rows, block.read(rows) * 2)

            return body

        branches = [branch(size) for size in block_sizes(M)]
        return jax.lax.fori_loop(0, 4, lambda i, rows: jax.lax.switch(sizes[i], branches, i, rows), rows)

    shapes = jax.ShapeDtypeStruct((M, width), jnp.float32), jax.ShapeDtypeStruct((4,), jnp.int32)
    temp = [
        jax.jit(f, donate_argnums=0).lower(*shapes).compile().memory_analysis().temp_size_in_bytes
        for f in (scale, with_a_conditional)
    ]
    assert temp[0] < M * width * 4 // 2
    if NEEDED:
        assert temp[1] >= M * width * 4, "XLA no longer copies the carry of a conditional: use one"


def test_bits_and_back() -> None:
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
        x = jnp.array([0.0, -1.5, jnp.inf, 3e-5], dtype)
        assert as_bits(x).dtype == f"uint{8 * x.dtype.itemsize}"
        np.testing.assert_array_equal(as_floats(as_bits(x), dtype), x)


def test_an_update_in_bfloat16_does_not_convert_the_buffer() -> None:
    M, width = 1030, 24

    def hlo(bits: bool) -> str:
        def fill(sizes: Any) -> Any:
            def body(block: Block, rows: Any) -> Any:
                values = jnp.broadcast_to(block.group.astype(jnp.bfloat16), (block.size, width))
                return block.write(rows, as_bits(values) if bits else values)

            rows = jnp.zeros((M, width), jnp.bfloat16)
            return for_each_block(body, as_bits(rows) if bits else rows, sizes, M)

        return jax.jit(fill).lower(jax.ShapeDtypeStruct((4,), jnp.int32)).compile().as_text()

    whole = f"f32[{M},{width}]"
    assert whole not in hlo(bits=True)
    if NEEDED:
        assert whole in hlo(bits=False), "XLA updates bfloat16 in place now: as_bits is no longer needed"
