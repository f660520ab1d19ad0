"""How bodies are read: a mistake is found once, not a hundred thousand times."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from pydantic import BaseModel

from deltaserve.server.dialects.chat import ChatBody
from deltaserve.server.dialects.completions import CompletionBody
from deltaserve.server.dialects.generate import GenerateBody, GenerateSampling
from deltaserve.server.info_routes import DetokenizeBody, TokenizeBody

BODIES = (ChatBody, CompletionBody, GenerateBody, GenerateSampling, TokenizeBody, DetokenizeBody)


def schemas(node: object, path: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every part of a pydantic core schema, and where it stands."""
    if isinstance(node, Mapping):
        yield path, node
        for key, inner in node.items():
            yield from schemas(inner, f"{path}.{key}")
    elif isinstance(node, list | tuple):
        for index, inner in enumerate(node):
            yield from schemas(inner, f"{path}.{index}")


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_no_list_or_mapping_collects_an_error_for_each_of_its_items(body: type[BaseModel]) -> None:
    found = dict(schemas(body.__pydantic_core_schema__))
    for path, part in found.items():
        if part.get("type") == "list" and _is_checked(part.get("items_schema")):
            assert part.get("fail_fast") is True, path
        if part.get("type") == "dict" and _is_checked(part.get("values_schema")):
            above = found[path.rpartition(".")[0]]
            assert above.get("type") == "function-before", f"{path}: its entries are not limited before they are read"


def _is_checked(schema: object) -> bool:
    return isinstance(schema, Mapping) and schema.get("type") != "any"
