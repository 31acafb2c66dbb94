from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from moe_blocks.dispatch import DROP_ORDERS, admit, combine_rows, gather_rows, make_layout
from tests.moe_blocks.support import same_bits

# Ranks, leading indices, positions, choices.
SHAPE = (2, 2, 3, 2)
NUM_BUFFERS = 3

admitted = jax.jit(admit, static_argnames=("num_buffers", "slots", "drop_order"))
laid_out = jax.jit(make_layout, static_argnames=("num_groups", "num_rows"))


def admit_by_hand(buffers: np.ndarray, weights: np.ndarray, slots: int, drop_order: str) -> np.ndarray:
    """The definition: an assignment is kept if fewer than ``slots`` others of its buffer are served before it."""
    kept = np.zeros(buffers.shape, bool)

    def turn(place: tuple[int, ...]) -> tuple[float, ...]:
        rank, lead, position, choice = place
        by_weight = (-weights[place],) if drop_order == "weight" else ()
        return (*by_weight, position, lead, choice, rank)

    for place in np.ndindex(buffers.shape):
        rivals = [other for other in np.ndindex(buffers.shape) if buffers[other] == buffers[place]]
        kept[place] = buffers[place] < NUM_BUFFERS and sum(turn(other) < turn(place) for other in rivals) < slots
    return kept


@pytest.mark.parametrize("drop_order", sorted(DROP_ORDERS))
@given(
    hnp.arrays(np.int32, SHAPE, elements=st.integers(0, NUM_BUFFERS)),
    hnp.arrays(np.float32, SHAPE, elements=st.sampled_from([-1.0, -0.0, 0.0, 0.5, 1.0])),
    st.sampled_from([1, 2, 5]),
)
def test_admit_is_its_definition(drop_order: str, buffers: np.ndarray, weights: np.ndarray, slots: int) -> None:
    kept = admitted(buffers, weights, num_buffers=NUM_BUFFERS, slots=slots, drop_order=drop_order)
    np.testing.assert_array_equal(kept, admit_by_hand(buffers, weights, slots, drop_order))


def served(buffers: Any, slots: int, weights: Any = None, drop_order: str = "position", num_buffers: int = 1) -> Any:
    buffers = jnp.asarray(buffers, jnp.int32)
    weights = jnp.ones(buffers.shape) if weights is None else jnp.asarray(weights, jnp.float32)
    return np.asarray(admit(buffers, weights, num_buffers=num_buffers, slots=slots, drop_order=drop_order)).tolist()


def test_late_positions_lose_on_all_sequences_and_ranks_alike() -> None:
    """Two ranks, two sequences, three positions, one buffer: 4 assignments at each position."""
    everything = np.zeros((2, 2, 3, 1), int)
    assert served(everything, 8) == [[[[True], [True], [False]]] * 2] * 2
    # Inside a position: leading index, then rank.
    assert served(everything, 6) == [[[[True], [True], [False]], [[True], [False], [False]]]] * 2
    assert served(everything, 1) == [
        [[[True], [False], [False]], [[False]] * 3],
        [[[False]] * 3] * 2,
    ]


def test_choices_come_before_ranks_and_after_positions() -> None:
    assert served(np.zeros((2, 1, 2, 2), int), 3) == [
        [[[True, True], [False, False]]],
        [[[True, False], [False, False]]],
    ]


def test_disp_10_first_choices_do_not_come_first() -> None:
    """Token-major order: t0, t1 keep expert 0, though t2 wants it first."""
    chosen = np.array([[1, 0], [1, 0], [0, 2]]).reshape(1, 1, 3, 2)
    kept = served(chosen, 2, num_buffers=3)
    assert kept == [[[[True, True], [True, True], [False, True]]]]


def test_weight_order_and_its_ties() -> None:
    weights = np.array([0.5, 0.9, 0.5, 0.1]).reshape(1, 1, 4, 1)
    assert served(np.zeros((1, 1, 4, 1), int), 2, weights, "weight") == [[[[True], [True], [False], [False]]]]
    assert served(np.zeros((1, 1, 4, 1), int), 3, weights, "weight") == [[[[True], [True], [True], [False]]]]


def test_neither_a_high_expert_nor_a_high_rank_loses_first() -> None:
    """Renaming the experts or the ranks renames the kept assignments, and changes nothing else."""
    rng = np.random.default_rng(0)
    buffers = rng.integers(0, 3, size=(2, 2, 8, 2))
    kept = np.array(served(buffers, 5, num_buffers=3))
    renamed = np.array(served(2 - buffers, 5, num_buffers=3))
    np.testing.assert_array_equal(kept, renamed)
    swapped = np.array(served(buffers[::-1], 5, num_buffers=3))[::-1]
    # Only the last tie in a buffer may fall to the other rank.
    assert (kept != swapped).sum() <= 2 * 3
    for e in range(3):
        assert (kept & (buffers == e)).sum() == 5


@pytest.mark.parametrize("drop_order", sorted(DROP_ORDERS))
def test_no_gradient_and_no_nan_from_the_decision(drop_order: str) -> None:
    def kept_weight(weights: jax.Array) -> jax.Array:
        kept = admit(jnp.zeros((1, 1, 4, 1), jnp.int32), weights, num_buffers=1, slots=2, drop_order=drop_order)
        return jnp.where(kept, weights, 0).sum()

    slope = jax.grad(kept_weight)(jnp.array([0.1, 0.2, 0.3, 0.4]).reshape(1, 1, 4, 1))
    assert np.asarray(slope).ravel().tolist() == ([0, 0, 1, 1] if drop_order == "weight" else [1, 1, 0, 0])


# --- layout

N, K, GROUPS = 6, 3, 4


def draw_groups(draw: st.DrawFn) -> np.ndarray:
    """Distinct groups for each token; ``GROUPS`` stands for none and may repeat."""
    rows = []
    for _ in range(N):
        row = np.array(draw(st.permutations(range(GROUPS)))[:K])
        row[np.array(draw(st.lists(st.booleans(), min_size=K, max_size=K)))] = GROUPS
        rows.append(row)
    return np.array(rows, np.int32)


groups_of_tokens = st.composite(draw_groups)()


@given(groups_of_tokens, st.sampled_from([N * K, 12]))
def test_layout_is_a_stable_sort(groups: np.ndarray, num_rows: int) -> None:
    total = int((groups < GROUPS).sum())
    if total > num_rows:
        groups = groups.copy()
        groups[num_rows // K :] = GROUPS
        total = int((groups < GROUPS).sum())
    layout = jax.tree.map(np.asarray, laid_out(groups, num_groups=GROUPS, num_rows=num_rows))
    wanted = sorted((g, a) for a, g in enumerate(groups.ravel()) if g < GROUPS)
    assert layout.assignment.tolist() == [a for _, a in wanted] + [N * K] * (num_rows - total)
    assert layout.token.tolist() == [a // K for _, a in wanted] + [N] * (num_rows - total)
    assert layout.group_sizes.tolist() == np.bincount(groups.ravel(), minlength=GROUPS + 1)[:GROUPS].tolist()
    for token, rows in enumerate(layout.rows):
        mine = [row for row, (_, a) in enumerate(wanted) if a // K == token]
        assert rows.tolist() == mine + [num_rows] * (len(rows) - len(mine))
    assert {x.dtype for x in layout} == {np.dtype(np.int32)}


def test_a_token_has_no_more_rows_than_groups() -> None:
    layout = make_layout(jnp.array([[0, 1, 2, 2], [1, 2, 2, 0]]), num_groups=2, num_rows=4)
    assert layout.rows.tolist() == [[0, 2], [1, 3]]


def test_more_rows_than_assignments() -> None:
    with pytest.raises(ValueError, match=r"num_rows must be at most the number of assignments, 2, got 3"):
        make_layout(jnp.array([[0], [1]]), num_groups=1, num_rows=3)


# --- row movements


@given(groups_of_tokens, st.integers(0, 2**32 - 1))
def test_gather_and_combine_are_products_with_one_matrix(groups: np.ndarray, seed: int) -> None:
    """Values and all gradients. Small integers make every sum exact."""
    num_rows, rng = N * K, np.random.default_rng(seed)
    layout = laid_out(groups, num_groups=GROUPS, num_rows=num_rows)
    matrix = np.zeros((num_rows, N), np.float32)
    for row, token in enumerate(np.asarray(layout.token)):
        if token < N:
            matrix[row, token] = 1
    tokens = rng.integers(-9, 9, size=(N, 2)).astype(np.float32)
    rows = rng.integers(-9, 9, size=(num_rows, 2)).astype(np.float32)
    weights = rng.integers(-9, 9, size=(num_rows, 1)).astype(np.float32)
    gathered, gathered_back, combined, d_rows, d_weights = movements(tokens, rows, weights[:, 0], layout)
    np.testing.assert_array_equal(gathered, matrix @ tokens)
    np.testing.assert_array_equal(gathered_back, matrix.T @ rows)
    np.testing.assert_array_equal(combined, matrix.T @ (weights * rows))
    np.testing.assert_array_equal(d_rows, weights * (matrix @ tokens))
    np.testing.assert_array_equal(d_weights, (rows * (matrix @ tokens)).sum(-1))


@jax.jit
def movements(tokens: Any, rows: Any, weights: Any, layout: Any) -> Any:
    gathered, gather_back = jax.vjp(lambda tokens: gather_rows(tokens, layout), tokens)
    combined, combine_back = jax.vjp(lambda *args: combine_rows(*args, layout), rows, weights)
    return gathered, *gather_back(rows), combined, *combine_back(tokens)


def test_disp_3_a_token_without_rows_gets_zero_and_not_its_neighbour() -> None:
    """An index past the end is clamped by default: the dropped token would receive the last row."""
    layout = make_layout(jnp.array([[0], [1], [0]]), num_groups=1, num_rows=2)
    values = jnp.array([[1.0], [2.0]])
    assert combine_rows(values, jnp.ones(2), layout).tolist() == [[1.0], [0.0], [2.0]]
    assert values[layout.rows[:, 0]].tolist() == [[1.0], [2.0], [2.0]]


def test_nan_in_empty_rows_stays_there() -> None:
    layout = make_layout(jnp.array([[0], [1], [0]]), num_groups=1, num_rows=3)
    values, weights = jnp.array([[1.0], [2.0], [jnp.nan]]), jnp.array([1.0, 1.0, 0.0])
    combined, back = jax.vjp(lambda *args: combine_rows(*args, layout), values, weights)
    assert combined.tolist() == [[1.0], [0.0], [2.0]]
    d_values, d_weights = back(jnp.array([[3.0], [jnp.nan], [5.0]]))
    assert d_values.tolist() == [[3.0], [5.0], [0.0]] and d_weights.tolist() == [3.0, 10.0, 0.0]


def test_second_order_gradients_exist() -> None:
    layout = make_layout(jnp.array([[0, 1], [1, 0]]), num_groups=2, num_rows=4)

    def energy(tokens: jax.Array) -> jax.Array:
        return (gather_rows(tokens, layout) ** 3).sum()

    hessian = jax.jacrev(jax.grad(energy))(jnp.array([[2.0], [3.0]])).reshape(2, 2)
    assert hessian.tolist() == [[24.0, 0.0], [0.0, 36.0]]


def test_disp_11_no_atomic_additions() -> None:
    """Sums are gathers in a fixed order. A scatter that adds may change its order between runs on an accelerator."""

    def both(tokens: jax.Array, groups: jax.Array) -> jax.Array:
        layout = make_layout(groups, num_groups=4, num_rows=12)
        return (combine_rows(gather_rows(tokens, layout) ** 2, jnp.ones(12), layout) ** 2).sum()

    jaxpr = str(jax.make_jaxpr(jax.grad(both))(jnp.ones((6, 2)), jnp.zeros((6, 2), jnp.int32)))
    assert "gather[" in jaxpr and "scatter-add" not in jaxpr
    naive = str(jax.make_jaxpr(jax.grad(lambda x: (x[jnp.array([0, 0])] ** 2).sum()))(jnp.ones(3)))
    assert "scatter-add" in naive or "scatter_add" in naive  # what it would look like


def test_no_one_hot_of_tokens_experts_and_slots() -> None:
    """The largest intermediate has an entry for each assignment, or one for each row; none for each pair of them."""
    T, k, E, slots = 64, 2, 32, 48

    def plan(groups: jax.Array, weights: jax.Array) -> Any:
        kept = admit(groups.reshape(1, 1, T, k), weights, num_buffers=E, slots=slots, drop_order="weight")
        return make_layout(jnp.where(kept.reshape(T, k), groups, E), num_groups=E, num_rows=T * k)

    closed = jax.make_jaxpr(plan)(jnp.zeros((T, k), jnp.int32), jnp.zeros((1, 1, T, k)))
    sizes = [math.prod(v.aval.shape) for eqn in all_equations(closed.jaxpr) for v in eqn.outvars]
    assert T * k <= max(sizes) <= 8 * T * k < T * E * slots


def all_equations(jaxpr: Any) -> Any:
    for eqn in jaxpr.eqns:
        yield eqn
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda v: hasattr(v, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from all_equations(inner)


@jax.jit
def there_and_back(tokens: Any, groups: Any, scale: Any) -> Any:
    """Sums each token times the factor of each of its groups; the value and a gradient."""

    def out(tokens: Any) -> Any:
        layout = make_layout(groups, num_groups=GROUPS, num_rows=N * K)
        factor = jnp.repeat(scale, layout.group_sizes, axis=0, total_repeat_length=N * K)
        return combine_rows(gather_rows(tokens, layout), factor[:, 0], layout)

    value, back = jax.vjp(out, tokens)
    return value, *back(jnp.sin(value))


@given(st.integers(0, 2**32 - 1))
def test_permuting_tokens_permutes_results_exactly(seed: int) -> None:
    """DISP-6: with three terms in each sum, to the bit."""
    rng = np.random.default_rng(seed)
    groups = np.array([rng.permutation(GROUPS)[:K] for _ in range(N)], np.int32)
    tokens, scale = rng.normal(size=(N, 2)).astype(np.float32), rng.normal(size=(GROUPS, 1)).astype(np.float32)
    order = rng.permutation(N)
    results = there_and_back(tokens, groups, scale), there_and_back(tokens[order], groups[order], scale)
    for plain, permuted in zip(*results, strict=True):
        assert same_bits(np.asarray(plain)[order], permuted)
