"""What a slow client finds: everything, in order, merged."""

import asyncio
from collections.abc import Callable, Coroutine

import pytest

from deltaserve.control.front.client import OutputDelta
from deltaserve.core.errors import FailReason, RequestFailed
from deltaserve.core.sampling import TokenLogprobs
from deltaserve.core.wire.messages import FinishReason, Usage
from deltaserve.process.front.room_stream import Stream

USAGE = Usage(prompt_len=1, output_len=3)


def in_loop(test: Callable[[], Coroutine[None, None, None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(test())

    return run


@in_loop
async def test_what_waits_is_merged_in_order() -> None:
    stream = Stream()
    stream.put(OutputDelta(prompt_logprobs=(TokenLogprobs(-1.0),)))
    stream.put(OutputDelta(tokens=(1, 2), logprobs=(TokenLogprobs(-2.0), TokenLogprobs(-3.0))))
    stream.put(OutputDelta(tokens=(3,), logprobs=(TokenLogprobs(-4.0),)))
    stream.put(OutputDelta(finish=FinishReason.STOP, usage=USAGE))
    assert await stream.take() == OutputDelta(
        tokens=(1, 2, 3),
        logprobs=(TokenLogprobs(-2.0), TokenLogprobs(-3.0), TokenLogprobs(-4.0)),
        prompt_logprobs=(TokenLogprobs(-1.0),),
        finish=FinishReason.STOP,
        usage=USAGE,
    )


@in_loop
async def test_nothing_is_handed_out_twice() -> None:
    stream = Stream()
    stream.put(OutputDelta(tokens=(1,)))
    assert (await stream.take()).tokens == (1,)
    waiting = asyncio.create_task(stream.take())
    await asyncio.sleep(0)
    assert not waiting.done()
    stream.put(OutputDelta(tokens=(2,)))
    assert (await waiting).tokens == (2,)


@in_loop
async def test_what_came_before_a_failure_is_handed_out_first() -> None:
    stream = Stream()
    stream.put(OutputDelta(tokens=(1,)))
    stream.fail(RequestFailed(FailReason.PEER_LOST, "gone"))
    assert (await stream.take()).tokens == (1,)
    for _ in range(2):
        with pytest.raises(RequestFailed, match="gone"):
            await stream.take()
