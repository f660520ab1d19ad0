"""instructor: answers as pydantic models, over tools and over JSON schemas."""

from typing import Any

import instructor
import openai
from pydantic import BaseModel, Field

from tools.clients.harness import SENTENCE, Server, require, run


class City(BaseModel):
    """What is to be made."""

    city: str = Field(max_length=20)


def _made(server: Server, mode: Any) -> None:
    raw = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    client: Any = instructor.from_openai(raw, mode=mode)
    messages = [{"role": "user", "content": SENTENCE}]
    city = client.chat.completions.create(
        model=server.model, messages=messages, response_model=City, max_retries=0, max_tokens=200
    )
    require(isinstance(city, City), city)


def response_model_by_tools(server: Server) -> None:
    _made(server, instructor.Mode.TOOLS)


def response_model_by_json_schema(server: Server) -> None:
    _made(server, instructor.Mode.JSON_SCHEMA)


if __name__ == "__main__":
    run([response_model_by_tools, response_model_by_json_schema])
