"""OpenVINO GenAI's continuous batching behind the one route that the client asks. Runs in OpenVINO's environment.

    python openvino_server.py FOLDER --port PORT --dtype f32|bf16 --threads N [--max-running N] [--cache-gib N]

OpenVINO's own server is not on PyPI. `/v1/completions` takes token ids and streams greedy answers of exactly
`max_tokens` tokens, as ids. One thread steps the pipeline; requests enter, and tokens leave, between two steps.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import queue
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import openvino
import openvino_genai
from aiohttp import web


@dataclass(slots=True)
class Asked:
    """One request, from its arrival to its last token."""

    prompt: list[int]
    output_len: int
    tokens: asyncio.Queue[list[int] | None] = field(default_factory=asyncio.Queue)
    """What each step gave; None: that was all."""
    handle: Any = None


class Engine(threading.Thread):
    """The pipeline and its thread."""

    def __init__(self, pipeline: Any, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(daemon=True)
        self._pipeline, self._loop = pipeline, loop
        self._arrived: queue.Queue[Asked] = queue.Queue()
        self._numbers = itertools.count()
        self._running: list[Asked] = []

    def ask(self, asked: Asked) -> None:
        self._arrived.put(asked)

    def run(self) -> None:
        while True:
            self._admit()
            self._pipeline.step()
            self._running = [asked for asked in self._running if self._deliver(asked)]

    def _admit(self) -> None:
        """Waits where nothing runs."""
        if not self._running:
            self._add(self._arrived.get())
        with contextlib.suppress(queue.Empty):
            while True:
                self._add(self._arrived.get_nowait())

    def _add(self, asked: Asked) -> None:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = asked.output_len, True, False
        prompt = openvino.Tensor(np.array([asked.prompt], dtype=np.int64))
        asked.handle = self._pipeline.add_request(next(self._numbers), prompt, config)
        self._running.append(asked)

    def _deliver(self, asked: Asked) -> bool:
        """Whether it goes on."""
        if asked.handle.can_read():
            tokens = [int(token) for output in asked.handle.read().values() for token in output.generated_ids]
            self._loop.call_soon_threadsafe(asked.tokens.put_nowait, tokens)
        goes_on: bool = asked.handle.get_status() == openvino_genai.GenerationStatus.RUNNING
        if not goes_on:
            self._loop.call_soon_threadsafe(asked.tokens.put_nowait, None)
        return goes_on


class Api:
    """The routes."""

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline
        self._engine: Engine | None = None

    async def start(self, app: web.Application) -> AsyncIterator[None]:
        self._engine = Engine(self._pipeline, asyncio.get_running_loop())
        self._engine.start()
        yield

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        asked = Asked(body["prompt"], body["max_tokens"])
        assert self._engine is not None
        self._engine.ask(asked)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        num_tokens = 0
        while (tokens := await asked.tokens.get()) is not None:
            num_tokens += len(tokens)
            await answer.write(event({"choices": [{"index": 0, "text": "", "token_ids": tokens}]}))
        usage = {"prompt_tokens": len(asked.prompt), "completion_tokens": num_tokens}
        await answer.write(event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n")
        await answer.write_eof()
        return answer


def event(told: dict[str, object]) -> bytes:
    return b"data: " + json.dumps(told).encode() + b"\n\n"


async def healthy(request: web.Request) -> web.Response:
    return web.Response(text="ok")


async def models(request: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "m"}]})


def make_pipeline(folder: str, dtype: str, num_threads: int, max_running: int, cache_gib: int) -> Any:
    scheduling = openvino_genai.SchedulerConfig()
    scheduling.enable_prefix_caching, scheduling.dynamic_split_fuse = True, True
    scheduling.max_num_batched_tokens, scheduling.max_num_seqs = 512, max_running
    scheduling.cache_size = cache_gib
    properties = {"INFERENCE_NUM_THREADS": num_threads, "INFERENCE_PRECISION_HINT": dtype, "KV_CACHE_PRECISION": dtype}
    return openvino_genai.ContinuousBatchingPipeline(folder, scheduling, "CPU", properties)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--dtype", choices=("f32", "bf16"), required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--max-running", type=int, default=32)
    parser.add_argument("--cache-gib", type=int, default=2)
    args = parser.parse_args(argv)
    api = Api(make_pipeline(args.folder, args.dtype, args.threads, args.max_running, args.cache_gib))
    app = web.Application(client_max_size=1 << 26)
    app.cleanup_ctx.append(api.start)
    routes = [web.get("/health", healthy), web.get("/v1/models", models)]
    app.add_routes([*routes, web.post("/v1/completions", api.complete)])
    web.run_app(app, host="127.0.0.1", port=args.port, print=None)


if __name__ == "__main__":
    main()
