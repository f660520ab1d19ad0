"""A server of the demo, with small pools: `python -m deltaserve.commands.demo.server MODEL PORT on`"""

import sys
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path

from msgspec.structs import replace

from deltaserve.core.errors import ConfigError, one_line
from deltaserve.core.ids import Role
from deltaserve.launch.serve import run_adjusted
from deltaserve.process.children.exits import Exit
from deltaserve.process.children.interrupts import clean_up_first
from deltaserve.process.children.terminal import say
from deltaserve.process.worker.worker_spec import WorkerSpec
from deltaserve.settings.config import (
    DisaggregationSettings,
    MemorySettings,
    ModelSettings,
    NetworkSettings,
    SchedulingSettings,
    Settings,
)

DECODE = "decode-0"
PAGE_SIZE = 16
PREFILL_PAGES = 1024
DECODE_PAGES = 256
"""Decode's pool, small on purpose: six private copies of a document of 600 tokens fill it."""
_CONTEXT_LEN = 2048
_RESERVED_TOKENS = 32
_HEARTBEAT_S = 0.1


class Variant(Enum):
    """What a server of the demo does. Prefill keeps and shares pages between requests in all of them."""

    OFF = "off"
    """Decode keeps no page after a request, and prefill computes every prompt."""
    ON = "on"
    """Decode keeps and shares pages, too. What the table compares with the first is what moves."""
    WEIGHED = "weighed"
    """And decode computes a prompt itself where that is sooner, which is the default of `deltaserve serve`."""


def demo_settings(model: Path, port: int, variant: Variant) -> Settings:
    """What `deltaserve serve MODEL --device cpu ...` would be given."""
    return Settings(
        model=ModelSettings(model_path=str(model), device="cpu", context_length=_CONTEXT_LEN),
        memory=MemorySettings(page_size=PAGE_SIZE, num_pages=PREFILL_PAGES),
        scheduling=SchedulingSettings(num_reserved_decode_tokens=_RESERVED_TOKENS),
        disaggregation=DisaggregationSettings(conditional_prefill="auto" if variant is Variant.WEIGHED else "off"),
        network=NetworkSettings(port=port),
    )


def adjusted(variant: Variant) -> Callable[[WorkerSpec], WorkerSpec]:
    """Decode alone gets the small pool and the cache in question; it tells its load often, for the table."""

    def adjust(spec: WorkerSpec) -> WorkerSpec:
        if spec.role is not Role.DECODE:
            return spec
        sched = replace(spec.options.sched, radix_cache=variant is not Variant.OFF)
        options = replace(spec.options, sched=sched, heartbeat_s=_HEARTBEAT_S)
        return replace(spec, num_pages=(DECODE_PAGES,), options=options)

    return adjust


def main(argv: Sequence[str]) -> int:
    """Serve until told to end; the exit code."""
    model, port, variant = argv[0], int(argv[1]), Variant(argv[2])
    clean_up_first()
    try:
        return run_adjusted(demo_settings(Path(model), port, variant), adjusted(variant))
    except ConfigError as error:
        say(one_line(error))
        return int(Exit.CONFIG)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
