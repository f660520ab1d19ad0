"""The API's own description is true: requests made from it, right and wrong, get answers that it foretells."""

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from deltaserve.server.app import PUBLIC, create_app
from deltaserve.server.openapi import document
from deltaserve.server.settings import ServerSettings
from deltaserve.server.text.text_codec import TextCodec
from tests.server.conftest import MODEL
from tests.server.oracle import OracleEngine

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
]


LIMITS = settings(max_examples=10, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
MODES = [
    (route.path.replace(":path", ""), route.method, mode)
    for route in PUBLIC
    for mode in (GenerationMode if route.body else [GenerationMode.POSITIVE])  # else there is nothing to do wrong
]


@pytest.mark.parametrize(("path", "method", "mode"), MODES, ids=[f"{path}-{mode.value}" for path, _, mode in MODES])
def test_answers_are_as_described(codec: TextCodec, path: str, method: str, mode: GenerationMode) -> None:
    app = create_app(OracleEngine(), codec, ServerSettings(MODEL, allowed_hosts=("testserver",)))
    operation = schemathesis.openapi.from_asgi("/openapi.json", app)[path][method]

    @LIMITS
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        case.call_and_validate(checks=CHECKS)

    check()


def test_every_public_route_is_described(codec: TextCodec) -> None:
    app = create_app(OracleEngine(), codec, ServerSettings(MODEL))
    others = {"/metrics", "/flush_cache", "/reset_prefix_cache", "/", "/docs"}
    served = {route.path.replace(":path", "") for route in app.routes}  # type: ignore[attr-defined]
    described = document(PUBLIC)["paths"]
    assert isinstance(described, dict)
    assert {path for path in served if path not in others and not path.startswith("/admin/")} == described.keys()
