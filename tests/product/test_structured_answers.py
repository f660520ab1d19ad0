"""Answers by drawn JSON schemas: valid, and the same however they are computed.

    pytest tests/product/test_structured_answers.py              # some tens of schemas
    pytest -m slow tests/product/test_structured_answers.py      # 1,000

A model without sense draws at temperature 1. Each schema is asked for twice, with seeds of its own, all at once. One
undisturbed worker says what is right. Front, engines and executors are those of the product; the world between them is
the simulator's.
"""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from deltaserve.core.ids import Role
from deltaserve.core.rounding import Rounding
from deltaserve.core.sampling import SamplingParams
from deltaserve.server.structured_output import json_grammar
from deltaserve.sim.process import Answer
from tests.compute.executor.world import random_tokens
from tests.fixtures.tiny_models import EAGLE3_HEAD, EAGLE3_MODEL
from tests.fixtures.tiny_tokenizer import EOS_ID
from tests.product.in_process import DECODE, UNIFIED, Pages, Product, Setup, member_name
from tools.drawn_schemas import drawn_schema

MAX_TOKENS = 220
SEEDS = (1, 2)
PLAIN = Setup(rounding=Rounding.OF_POSITION, context_len=320, max_running=16, num_contexts=16)
QUICK, ALL, AT_ONCE = 16, 1000, 50
LEAP_SECOND = re.compile(r"(\d\d:\d\d):60")
"""Allowed in any minute by llguidance, as by the grammar of RFC 3339, and by the validator where there may be one."""


def asked(product: Product, schemas: Mapping[int, Mapping[str, object]]) -> list[Answer]:
    answers = []
    for number, schema in schemas.items():
        grammar = json_grammar(dict(schema), "schema", "")
        prompt = random_tokens(20 + number % 30, number)
        for seed in SEEDS:
            params = SamplingParams(max_tokens=MAX_TOKENS, seed=seed, stop_token_ids=(EOS_ID,), grammar=grammar)
            answers.append(product.ask(prompt, params))
    return answers


@dataclass(frozen=True)
class Reference:
    """What is right."""

    schemas: Mapping[int, Mapping[str, object]]
    tokens: Sequence[tuple[int, ...]]

    def check(self, answers: Sequence[Answer]) -> None:
        assert [answer.error for answer in answers] == [None] * len(self.tokens)
        assert [tuple(answer.tokens) for answer in answers] == list(self.tokens)


def reference(folder: Path, numbers: range) -> Reference:
    """From one worker that does nothing else; every answer of it that came to its end is valid."""
    schemas = {number: drawn_schema(number) for number in numbers}
    product = Product(folder, 1, 1, setup=replaced(is_unified=True))
    answers = asked(product, schemas)
    product.run_until(answers)
    of_answers = [schema for schema in schemas.values() for _ in SEEDS]
    num_ended = 0
    for schema, answer in zip(of_answers, answers, strict=True):
        assert answer.error is None, (schema, answer.error)
        if answer.finish == "stop":
            assert answer.tokens[-1] == EOS_ID
            value = json.loads(LEAP_SECOND.sub(r"\1:59", bytes(answer.tokens[:-1]).decode()))
            jsonschema_rs.Draft202012Validator(schema, validate_formats=True).validate(value)
            num_ended += 1
    assert num_ended >= 0.9 * len(answers), "a model without sense ends nearly all of them"
    product.close()
    return Reference(schemas, [tuple(answer.tokens) for answer in answers])


def replaced(**changes: Any) -> Setup:
    return dataclasses.replace(PLAIN, **changes)


BATCHES = [
    range(QUICK),
    *(pytest.param(range(first, first + AT_ONCE), marks=pytest.mark.slow) for first in range(0, ALL, AT_ONCE)),
]


@pytest.fixture(scope="module", params=BATCHES, ids=lambda numbers: f"{numbers.start}-{numbers.stop}")
def right(request: pytest.FixtureRequest, tiny_models: Path) -> Reference:
    return reference(tiny_models / "llama", request.param)


@pytest.fixture
def folder(tiny_models: Path) -> Path:
    return tiny_models / "llama"


def test_prefill_draws_the_first_token_and_decode_the_others(right: Reference, folder: Path) -> None:
    product = Product(folder, 1, 1, setup=PLAIN)
    answers = asked(product, right.schemas)
    product.run_until(answers)
    right.check(answers)
    product.close()


def test_rows_that_give_their_memory_back(right: Reference, folder: Path) -> None:
    product = Product(folder, 1, 1, Pages(4), setup=replaced(num_contexts=1))
    answers = asked(product, right.schemas)
    product.run_until(answers)
    right.check(answers)
    assert product.worker(DECODE).instance.parts.scheduler.running.num_retractions
    product.close()


@pytest.mark.parametrize("is_unified", [True, False])
def test_guesses_at_the_next_tokens(right: Reference, folder: Path, is_unified: bool) -> None:
    roles = (Role.UNIFIED, Role.DECODE)
    product = Product(folder, 1, 1, setup=replaced(is_unified=is_unified, drafting=roles, guesses="NGRAM"))
    answers = asked(product, right.schemas)
    product.run_until(answers)
    right.check(answers)
    totals = product.worker(UNIFIED if is_unified else DECODE).instance.parts.scheduler.steps.speculation.totals
    assert 0 < totals.num_right < totals.num_verified
    product.close()


def test_a_decode_worker_that_is_killed_in_the_middle(right: Reference, folder: Path) -> None:
    """Its requests go on at the other one, behind what their clients have."""
    product = Product(folder, 1, 1, setup=replaced(num_decode=2))
    answers = asked(product, right.schemas)
    product.kill_in_the_middle(member_name(0))
    product.run_until(answers)
    right.check(answers)
    product.close()


@pytest.fixture(scope="module", params=BATCHES, ids=lambda numbers: f"{numbers.start}-{numbers.stop}")
def right_of_head(request: pytest.FixtureRequest, tiny_models: Path) -> Reference:
    return reference(tiny_models / EAGLE3_MODEL, request.param)


def test_guesses_of_a_draft_head(right_of_head: Reference, tiny_models: Path) -> None:
    """Those that the grammar refuses are not verified; how many were right changes nothing."""
    roles = (Role.PREFILL, Role.DECODE)
    setup = replaced(drafting=roles, draft_folder=tiny_models / EAGLE3_HEAD)
    product = Product(tiny_models / EAGLE3_MODEL, 1, 1, setup=setup)
    answers = asked(product, right_of_head.schemas)
    product.run_until(answers)
    right_of_head.check(answers)
    totals = product.worker(DECODE).instance.parts.scheduler.steps.speculation.totals
    assert 0 < totals.num_right < totals.num_verified
    product.close()
