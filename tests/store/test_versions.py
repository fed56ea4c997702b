"""Version vectors are a partial order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rca.store.versions import advance, concurrent, decode, dominates, encode, merge, same

vectors = st.dictionaries(st.sampled_from("abc"), st.integers(0, 3), max_size=3)


@given(vectors, vectors)
def test_exactly_one_of_the_four_holds(one: dict[str, int], other: dict[str, int]) -> None:
    held = [dominates(one, other), dominates(other, one), same(one, other), concurrent(one, other)]
    assert held.count(True) == 1


@given(vectors, st.sampled_from("abc"))
def test_an_update_dominates_what_it_was_made_from(vector: dict[str, int], writer: str) -> None:
    assert dominates(advance(vector, writer), vector)


@given(vectors)
def test_updates_made_side_by_side_conflict_and_their_merge_settles_it(vector: dict[str, int]) -> None:
    left, right = advance(vector, "here"), advance(vector, "there")
    assert concurrent(left, right)
    both = merge(left, right)
    assert dominates(both, left)
    assert dominates(both, right)


@given(vectors, vectors)
def test_text_is_equal_where_vectors_are(one: dict[str, int], other: dict[str, int]) -> None:
    assert (encode(one) == encode(other)) == same(one, other)
    assert same(decode(encode(one)), one)
