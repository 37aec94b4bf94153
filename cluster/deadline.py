"""Every wait has a deadline and a name."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


class Late(RuntimeError):
    """Something did not answer in time."""


async def within(seconds: float, what: str, awaitable: Awaitable[T]) -> T:
    """Wait for `awaitable`, at most `seconds`. Raises Late naming `what`."""
    scope = asyncio.timeout(seconds)
    try:
        async with scope:
            return await awaitable
    except TimeoutError:
        if not scope.expired():
            raise  # a TimeoutError of the awaited thing itself
        raise Late(f"{what}: no answer within {seconds:g} s") from None
