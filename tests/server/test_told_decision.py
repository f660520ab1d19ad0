"""What `timings` and the log line of a request tell is all that the rule went by: it can be gone through again."""

import json
from collections.abc import Mapping
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from deltaserve.control.engine.near import PromptPace, Weighing
from deltaserve.core.wire.messages import Usage
from deltaserve.server.usage import timings
from tests.control.engine.drawn_weighings import drawn_weighings

paces = st.floats(0.0, 50.0).map(lambda pace: round(pace, 3))
weighings = drawn_weighings(st.integers(0, 20_000), 64, st.builds(PromptPace, paces, paces, paces))


def decided(line: Mapping[str, Any]) -> str:
    """Who computes the prompt, by what a line tells besides its sums."""
    by_prefill = line["prefill_queue_tokens"] + line["prefill_lacking_tokens"] + line["handover_tokens"]
    if line["pullable_tokens"]:
        by_prefill = min(by_prefill, max(1, by_prefill - line["pullable_tokens"] + line["pull_tokens"]))
    is_loaded = line["load_tokens"] < line["filed_tokens"] * line["pace_alone"]
    computed = line["missing_tokens"] - line["filed_tokens"] * is_loaded
    load = line["load_tokens"] * is_loaded
    if line["cores"] == "shared":
        return "decode" if computed + load <= by_prefill else "prefill"
    is_alone = not line["decoding_rows"] and not line["backlog_tokens"]
    pace = line["pace_alone"] if is_alone else line["pace_beside"]
    by_decode = (line["backlog_tokens"] + computed) * (pace + line["decoding_rows"] * line["pace_of_row"])
    is_short = computed <= line["extend_limit_tokens"]
    return "decode" if is_short and int(by_decode) + load <= by_prefill else "prefill"


@given(weighings)
def test_the_decision_follows_from_what_is_told(weighing: Weighing) -> None:
    usage = Usage(prompt_len=30_000, output_len=1, weighed=weighing.weighed())
    line = json.loads(json.dumps(timings(0, usage)))
    assert line["computed_on"] == decided(line) == ("decode" if weighing.is_near else "prefill")


def test_what_was_pulled_is_told() -> None:
    usage = Usage(prompt_len=100, output_len=1, prefill_cached_len=80, prefill_pulled_len=64)
    assert timings(0, usage)["prefill_pulled_tokens"] == 64
