"""Waits with a name and an end."""

import asyncio

import pytest

from cluster.deadline import Late, within
from tests.cluster.world import (
    run,
)


def test_a_deadline_names_what_was_waited_for_and_leaves_other_timeouts_alone() -> None:
    async def itself() -> None:
        raise TimeoutError("of the thing itself")

    async def main() -> None:
        assert await within(1, "an answer", asyncio.sleep(0, "yes")) == "yes"
        with pytest.raises(Late, match=r"an answer: no answer within 0\.01 s"):
            await within(0.01, "an answer", asyncio.sleep(9))
        with pytest.raises(TimeoutError, match="of the thing itself"):
            await within(1, "an answer", itself())
        waiting = asyncio.create_task(within(9, "an answer", asyncio.sleep(9)))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    run(main())
