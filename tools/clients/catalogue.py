"""Which clients there are, what is installed for each, and what they talk to."""

from dataclasses import dataclass
from enum import Enum, auto
from typing import assert_never


class Runtime(Enum):
    """What runs a client's checks."""

    PYTHON = auto()
    """with_NAME.py, by the Python of its environment."""
    NODE = auto()
    """with_NAME.mjs, in a folder with its packages."""
    SYSTEM = auto()
    """with_NAME.py by this Python, and a program of the system that is not installed here."""


class Served(Enum):
    """A model that a server has; the value is its name."""

    LANGUAGE = "smollm2"
    """SmolLM2-135M of the extra `demo`, with a template that shows tools."""
    RECALL = "recall-micro"
    """A folder with a tokenizer, as load generators want one, and with answers that are known."""


@dataclass(frozen=True, slots=True)
class Client:
    """One row of the table."""

    packages: tuple[str, ...]
    """The first one's version is shown."""
    runtime: Runtime = Runtime.PYTHON
    model: Served = Served.LANGUAGE
    is_router: bool = False
    """It is put in front of a prefill and a decode worker with --http, and must answer as the server does."""
    starts_servers: bool = False
    """Its checks start servers of their own: they are told this Python."""
    bare: tuple[str, ...] = ()
    """Installed without what they ask for; if there are any, their version is shown."""

    @property
    def shown(self) -> tuple[str, ...]:
        """The packages whose versions are told."""
        match self.runtime:
            case Runtime.PYTHON:
                return ((*self.bare, *self.packages)[0].partition("[")[0],)
            case Runtime.NODE:
                return self.packages[:3]
            case Runtime.SYSTEM:
                return ()
            case _:
                assert_never(self.runtime)


CLIENTS = {
    "openai": Client(("openai", "pydantic")),
    "anthropic": Client(("anthropic",)),
    "litellm": Client(("litellm",)),
    "langchain-openai": Client(("langchain-openai",)),
    "langchain-anthropic": Client(("langchain-anthropic",)),
    "openai-agents": Client(("openai-agents",)),
    "pydantic-ai": Client(("pydantic-ai-slim[openai]",)),
    "instructor": Client(("instructor",)),
    "node": Client(("openai", "@anthropic-ai/sdk", "ai", "@ai-sdk/openai", "@ai-sdk/anthropic", "zod"), Runtime.NODE),
    "chromium": Client((), Runtime.SYSTEM),
    "guidellm": Client(("guidellm",), model=Served.RECALL),
    "lm-eval": Client(("lm-eval[api]", "transformers"), model=Served.RECALL),
    "sglang": Client(
        (
            *("torch", "triton", "numpy", "transformers", "datasets", "pillow", "sentencepiece", "gguf"),
            *("aiohttp", "requests", "tqdm", "pybase64", "orjson", "msgspec", "pyzmq", "psutil", "starlette"),
            *("IPython", "apache-tvm-ffi", "compressed-tensors"),
        ),
        model=Served.RECALL,
        bare=("sglang",),
    ),
    "sglang-router": Client(("sglang-router",), model=Served.RECALL, is_router=True),
    "smg": Client(("smg",), model=Served.RECALL, is_router=True),
    "dynamo": Client(
        (
            *("ai-dynamo-runtime", "aiohttp", "kubernetes<33", "msgspec", "prometheus-client", "pyzmq", "redis<9"),
            *("tqdm", "transformers", "zstandard", "httpx", "psutil"),
        ),
        model=Served.RECALL,
        starts_servers=True,
        bare=("ai-dynamo",),
    ),
}
"""By name."""
