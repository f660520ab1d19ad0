"""Hypothesis profiles: `ci` is bounded and repeatable (the default), `full` searches. Tiny models."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.fixtures.cached import built_once

settings.register_profile(
    "ci",
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("full", max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ci")

_FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture(scope="session")
def tiny_models(request: pytest.FixtureRequest) -> Path:
    """A folder with one model folder per variant of fixtures/tiny_models.py (`llama`, `qwen3`, ...)."""
    cache = request.config.rootpath / ".pytest_cache" / "tiny_models"
    cache.mkdir(parents=True, exist_ok=True)
    sources = [_FIXTURES / "tiny_models.py", _FIXTURES / "tiny_tokenizer.py"]
    return built_once(cache, "tests.fixtures.tiny_models", sources)
