"""The micro-model over unequal ranks, checksums on: every token of every answer about shared documents is right.

More documents than either side has pages for: they are evicted and moved again, in part or whole, all the time. Four
ranks have its two KV heads twice.
"""

from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest

from tests.e2e.questions import NUM_FACTS, RECALL_MODEL, ask_about
from tests.e2e.server import Answer, serving

PAGE = 16
DOCUMENT_LEN = 3 * NUM_FACTS
NUM_DOCUMENTS, NUM_QUESTIONS, ANSWER_LEN = 10, 8, 24
NUM_PAGES = 100
"""Pages of a worker; the documents take 120."""
NUM_KV_HEADS = 2
"""KV heads of the model. A rank that has all that another one has writes whole pages: nothing to gather."""
EVICTED = "deltaserve_pages_evicted_total"
SIDES = ((1, 2), (2, 1), (2, 4))
QUICK = (1, 2, "on")


def launches() -> list[object]:
    return [
        pytest.param(
            *sides,
            staging,
            marks=() if (*sides, staging) == QUICK else pytest.mark.slow,
            id=f"P{sides[0]}-D{sides[1]}-{'staged' if staging == 'on' else 'direct'}",
        )
        for sides, staging in product(SIDES, ("off", "on"))
    ]


@pytest.mark.parametrize(("prefill", "decode", "staging"), launches())
def test_every_answer_is_right(folder: Path, prefill: int, decode: int, staging: str) -> None:
    flags = ["--prefill-tp-size", str(prefill), "--decode-tp-size", str(decode), "--staging", staging]
    flags += ["--page-size", str(PAGE), "--num-pages", str(NUM_PAGES), "--chunked-prefill-size", str(2 * PAGE)]
    asked = ask_about(NUM_DOCUMENTS, NUM_QUESTIONS, ANSWER_LEN, seed=1)
    with serving(folder, RECALL_MODEL, *flags) as server, ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda one: server.complete(one.prompt, ANSWER_LEN), asked))
        wrong = [at for at, (one, answer) in enumerate(zip(asked, answers, strict=True)) if answer.tokens != one.answer]
        assert not wrong
        hits = [decode_hit(answer) for answer in answers]
        assert sum(hit == 0 for hit in hits) >= NUM_DOCUMENTS
        assert DOCUMENT_LEN in hits
        server.wait_quiet()
        for metrics in server.metrics().values():
            assert sum(value for name, value in metrics.items() if name.startswith(EVICTED)) > 0
        if staging == "on":
            (log,) = server.folder.glob("deltaserve-*/prefill-0.log")
            assert ("go through staging memory" in log.read_text()) is (decode <= NUM_KV_HEADS)


def decode_hit(answer: Answer) -> int:
    return int(answer.timings["decode_cached_tokens"])
