"""How a step is split: nothing lost, nothing twice, the same number of micro-batches for every rank."""

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from learner import batching
from tests.learner.setting import make_batch

UNITS = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=4), min_size=1, max_size=25)


@given(lengths=UNITS, budget=st.integers(1, 200), ranks=st.integers(1, 4), packing=st.booleans())
def test_every_unit_is_in_one_micro_batch_within_the_budget(
    lengths: list[list[int]], budget: int, ranks: int, packing: bool
) -> None:
    flat = torch.tensor([length for unit in lengths for length in unit])
    starts = torch.tensor([0, *map(len, lengths)]).cumsum(0).tolist()
    units = [list(range(start, end)) for start, end in itertools.pairwise(starts)]
    plan = batching.micro_batches(units, flat, budget=budget, ranks=ranks, packing=packing)
    assert len(plan) == ranks
    assert len({len(micro_batches) for micro_batches in plan}) == 1
    together = [rows for micro_batches in plan for rows in micro_batches]
    assert sorted(row for rows in together for row in rows) == list(range(len(flat)))
    for rows in together:
        inside = [unit for unit in units if set(unit) <= set(rows)]
        assert sum(map(len, inside)) == len(rows)
        if len(inside) > 1:
            size = [int(flat[row]) for row in rows]
            assert (sum(size) if packing else max(size) * len(size)) <= budget


def test_ranks_get_equal_shares_of_the_tokens() -> None:
    lengths = torch.tensor([100, 10, 90, 20, 80, 30, 70, 40, 60, 50] * 4)
    units = [[row] for row in range(40)]
    plan = batching.micro_batches(units, lengths, budget=300, ranks=2, packing=True)
    shares = [sum(int(lengths[row]) for rows in micro_batches for row in rows) for micro_batches in plan]
    assert sum(shares) == 2200
    assert abs(shares[0] - shares[1]) <= 110
    assert len(plan[0]) == 4  # 2200 tokens in 8 micro-batches of at most 300


def test_rows_of_similar_length_come_together() -> None:
    """Four rows of 10 and four of 100: padding them together would more than double the work."""
    plan = batching.micro_batches(
        [[row] for row in range(8)], torch.tensor([10, 100] * 4), budget=220, ranks=1, packing=False
    )
    assert all(len({row % 2 for row in rows}) == 1 for rows in plan[0] if rows)


def test_rows_without_advantage_are_left_out_unless_a_term_needs_them() -> None:
    batch = make_batch(groups=3, size=2)  # group 1 has no advantage
    batch.advantages[0] = 0
    rows = list(range(6))
    assert batching.units(batch, rows, whole_groups=False, keep_all=False) == [[1], [4], [5]]
    assert batching.units(batch, rows, whole_groups=True, keep_all=False) == [[0, 1], [4, 5]]
    assert batching.units(batch, rows, whole_groups=True, keep_all=True) == [[0, 1], [2, 3], [4, 5]]
    assert batching.units(batch, [2, 3, 4], whole_groups=False, keep_all=True) == [[2], [3], [4]]


def test_updates_keep_groups_whole_and_are_as_many_as_the_groups_allow() -> None:
    groups = torch.tensor([4, 4, 7, 7, 9])
    assert batching.updates(groups, 1) == [[0, 1, 2, 3, 4]]
    assert batching.updates(groups, 2) == [[0, 1, 2, 3], [4]]
    assert batching.updates(groups, 5) == [[0, 1], [2, 3], [4]]


def test_selected_rows_are_cut_to_the_longest() -> None:
    batch = make_batch()
    shortest = int(batch.lengths.argmin())
    part = batching.select(batch, [shortest], torch.device("cpu"))
    width = int(batch.lengths[shortest])
    assert part.tokens.tolist() == [batch.tokens[shortest, :width].tolist()]
    assert part.groups.tolist() == [int(batch.groups[shortest])]
    assert part.logp_old.shape == part.mask.shape == (1, width)


def test_an_empty_micro_batch_is_a_row_that_trains_nothing() -> None:
    part = batching.select(make_batch(), [], torch.device("cpu"))
    assert part.tokens.tolist() == [[0]]
    assert part.lengths.tolist() == [1]
    assert part.mask.tolist() == [[False]]
    assert part.advantages.tolist() == [[0.0]]
