"""What Dynamo asks for becomes a body of /v1/completions, and events become its chunks: no Dynamo is needed here."""

from typing import Any

import pytest

from deltaserve.commands.dynamo.translation import (
    BrokenStream,
    Chunks,
    Fault,
    Json,
    NotSupported,
    ServerFacts,
    body_of,
    error_text,
    fault_of,
)

FACTS = ServerFacts("recall", "/models/recall", context_len=100)


def asked(**groups: Any) -> Json:
    """As version 1.6.1 of Dynamo sends it: every field of each group is there, null where nothing is asked for."""
    stopping = {"max_tokens": None, "stop": None, "stop_token_ids": None, "stop_token_ids_visible": None}
    stopping |= {"stop_token_ids_hidden": None, "min_tokens": None, "ignore_eos": None, "max_thinking_tokens": None}
    sampling = dict.fromkeys(("n", "best_of", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed"))
    sampling |= dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "use_beam_search", "length_penalty"))
    sampling |= dict.fromkeys(("include_stop_str_in_output", "guided_decoding"))
    output = dict.fromkeys(("logprobs", "prompt_logprobs", "skip_special_tokens", "formatted_prompt"))
    request = {"model": "recall", "token_ids": [1, 2, 3], "annotations": [], "routing": {}, "mdc_sum": "00"}
    request |= {"stop_conditions": stopping, "sampling_options": sampling, "output_options": output}
    for name, fields in groups.items():
        given = request.get(name)
        request[name] = {**given, **fields} if isinstance(given, dict) else fields
    return request


BARE = {
    "model": "recall",
    "prompt": [1, 2, 3],
    "stream": True,
    "stream_options": {"include_usage": True},
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
}


def test_nothing_asked_for_is_an_answer_as_long_as_the_context_allows() -> None:
    assert body_of(asked(), FACTS) == {**BARE, "max_tokens": 97}


def test_a_prompt_that_fills_the_context_is_the_server_s_to_refuse() -> None:
    assert body_of({**asked(), "token_ids": [7] * 100}, FACTS)["max_tokens"] == 1


def test_sampling_and_stopping_keep_their_names() -> None:
    sampling = {"temperature": 0.0, "top_p": 0.5, "top_k": 4, "min_p": 0.1, "seed": 5, "presence_penalty": 0.25}
    sampling |= {"frequency_penalty": 0.5, "repetition_penalty": 1.5, "include_stop_str_in_output": True}
    stopping = {"max_tokens": 8, "min_tokens": 0, "stop": ["x"], "ignore_eos": True}
    output = {"logprobs": 0, "skip_special_tokens": False}
    body = body_of(asked(sampling_options=sampling, stop_conditions=stopping, output_options=output), FACTS)
    assert body == {**BARE, **sampling, **stopping, **output}


def test_ends_of_all_kinds_stop_an_answer() -> None:
    stopping = {"stop_token_ids": [9], "stop_token_ids_visible": [4], "stop_token_ids_hidden": [2, 9], "max_tokens": 1}
    assert body_of(asked(stop_conditions=stopping), FACTS)["stop_token_ids"] == [2, 4, 9]


@pytest.mark.parametrize(
    "grammar", [{"json": {"type": "object"}}, {"regex": "a+", "whitespace_pattern": " "}, {"choice": ["a", "b"]}]
)
def test_grammars_are_passed_on(grammar: Json) -> None:
    told = {**grammar, "backend": "xgrammar", "grammar": None}
    body = body_of(asked(sampling_options={"guided_decoding": told}), FACTS)
    assert body["structured_outputs"] == grammar


def test_a_salt_keeps_caches_apart() -> None:
    assert body_of(asked(routing={"cache_salt": "tenant", "priority": 3}), FACTS)["cache_salt"] == "tenant"


@pytest.mark.parametrize("priority", [3, 0, -2])
def test_a_priority_is_passed_on(priority: int) -> None:
    assert body_of(asked(routing={"priority": priority, "strict_priority": 1}), FACTS)["priority"] == priority
    assert "priority" not in body_of(asked(routing={"priority": None}), FACTS)


@pytest.mark.parametrize(
    ("group", "fields", "name"),
    [
        ("sampling_options", {"n": 2}, "n"),
        ("sampling_options", {"best_of": 3}, "best_of"),
        ("sampling_options", {"use_beam_search": True}, "use_beam_search"),
        ("sampling_options", {"length_penalty": 0.5}, "length_penalty"),
        ("sampling_options", {"of_a_later_version": 1}, "of_a_later_version"),
        ("sampling_options", {"guided_decoding": {"structural_tag": "{}"}}, "structural_tag"),
        ("stop_conditions", {"max_thinking_tokens": 5}, "max_thinking_tokens"),
        ("output_options", {"prompt_logprobs": 1}, "prompt_logprobs"),
        ("multi_modal_data", {"image_url": ["x"]}, "multi_modal_data"),
        ("prefill_result", {"disaggregated_params": {"a": 1}}, "prefill_result"),
    ],
)
def test_what_a_server_cannot_do_is_refused_by_name(group: str, fields: Json, name: str) -> None:
    with pytest.raises(NotSupported, match=f"^{name} is not supported"):
        body_of(asked(**{group: fields}), FACTS)


def test_values_that_ask_for_nothing_are_taken() -> None:
    neutral = {"n": 1, "best_of": 1, "length_penalty": 1.0, "use_beam_search": False}
    assert body_of(asked(sampling_options=neutral), FACTS) == {**BARE, "max_tokens": 97}


USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5, "prompt_tokens_details": {"cached_tokens": 1}}


def choice(tokens: list[int], finish: str | None = None, **more: object) -> Json:
    return {"choices": [{"index": 0, "text": "x", "token_ids": tokens, "finish_reason": finish, **more}], "usage": None}


def chunks_of(events: list[Json], *, tells_alternatives: bool = False) -> tuple[list[Json], Chunks]:
    chunks = Chunks(tells_alternatives=tells_alternatives)
    return [chunk for event in events for chunk in chunks.of(event)], chunks


def test_the_end_waits_for_the_counts() -> None:
    events = [choice([5]), choice([]), choice([6], "length"), {"choices": [], "usage": USAGE}]
    told, chunks = chunks_of(events)
    assert told == [
        {"token_ids": [5], "index": 0},
        {"token_ids": [6], "index": 0, "finish_reason": "length", "completion_usage": USAGE},
    ]
    assert chunks.is_over


def test_a_stream_without_its_counts_is_not_over() -> None:
    told, chunks = chunks_of([choice([5]), choice([], "stop")])
    assert told == [{"token_ids": [5], "index": 0}]
    assert not chunks.is_over


def test_logprobs_stand_beside_their_tokens() -> None:
    told = {
        "tokens": ["token_id:5", "token_id:6"],
        "token_logprobs": [-1.5, -0.25],
        "top_logprobs": [{"token_id:5": -1.5, "token_id:9": -0.5}, {"token_id:6": -0.25}],
    }
    (chunk,), _ = chunks_of([choice([5, 6], logprobs=told)], tells_alternatives=True)
    assert chunk["log_probs"] == [-1.5, -0.25]
    assert [[(one["rank"], one["token_id"], one["logprob"]) for one in top] for top in chunk["top_logprobs"]] == [
        [(1, 9, -0.5), (2, 5, -1.5)],
        [(1, 6, -0.25)],
    ]
    (chunk,), _ = chunks_of([choice([5, 6], logprobs=told)])
    assert "top_logprobs" not in chunk


def test_an_error_in_the_stream_has_the_server_s_words() -> None:
    with pytest.raises(BrokenStream, match="a worker failed"):
        chunks_of([choice([5]), {"error": {"message": "a worker failed", "type": "server_error"}}])


def test_statuses_mean_to_dynamo_what_they_mean_here() -> None:
    faults = {status: fault_of(status) for status in (400, 404, 401, 429, 500, 502, 503, 504)}
    assert faults == {
        400: Fault.INVALID,
        404: Fault.INVALID,
        401: Fault.FAILED,
        429: Fault.BUSY,
        500: Fault.FAILED,
        502: Fault.AWAY,
        503: Fault.AWAY,
        504: Fault.LATE,
    }


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({"error": {"message": "too long"}}, "too long"),
        ({"error": "too long"}, "too long"),
        (None, "the server answered HTTP 418"),
        ([1], "the server answered HTTP 418"),
    ],
)
def test_an_error_is_told_in_the_server_s_words(content: object, text: str) -> None:
    assert error_text(418, content) == text
