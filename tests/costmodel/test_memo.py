"""A value is made once per key, and an error is not stored."""

import pytest

from meshwright.costmodel.memo import Memo


def test_a_value_is_made_once_per_key() -> None:
    memo, asked = Memo[int, str](), list[int]()
    for key in (1, 2, 1):
        assert memo.of(key, lambda key=key: asked.append(key) or f"{key}") == f"{key}"  # type: ignore[misc]
    assert asked == [1, 2] and memo == {1: "1", 2: "2"}


def test_an_error_is_raised_alone_and_asked_for_again() -> None:
    memo = Memo[int, int]()

    def broken() -> int:
        raise ValueError

    with pytest.raises(ValueError) as raised:
        memo.of(1, broken)
    assert raised.value.__context__ is None and not memo
    assert memo.of(1, lambda: 7) == 7
