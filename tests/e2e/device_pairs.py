"""A pair of workers of a micro-model on any device, three turns of each conversation: every token of every answer, what
moved, what came back, what was read from the file under the cache.

The same checks hold on a CPU (test_device_pairs.py) and on a GPU (tests/gpu/test_pairs.py).
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from deltaserve.commands.load.recall import DocumentShape, RecallTraffic
from tests.e2e.server import ROOT, Answer, Server, serving, wait_until
from tests.recall_models import STATE_MODEL, known_conversations

MICRO_MODEL = ROOT / "models" / "recall-micro"
NUM_TURNS = 3
TRAFFIC = RecallTraffic(
    num_documents=8,
    conversations_per_document=1,
    num_turns=NUM_TURNS,
    answer_len=20,
    shape=DocumentShape(22, num_noise=11),
)
"""A conversation comes to 143 tokens: eight full pages of 16, or two of 64."""
PAGE = 16
FLAGS = ("--chunked-prefill-size", "64", "--context-length", "256", "--max-running-requests", "8")
FEW_PAGES = ("--page-size", str(PAGE), "--num-pages", "40")
"""Memory of four conversations: what a turn goes on from was evicted, and is in the file."""
_KIB = 1024
FILE = ("--cache-dir", "pages", "--cache-dir-mib", "64")
STATES = ("--max-mamba-cache-size", "32")
UNEQUAL = ("--prefill-page-size", "64", "--decode-page-size", str(PAGE), "--num-pages", "200", "--staging", "auto")


@contextmanager
def server_folder() -> Iterator[Path]:
    """A short path: sockets have names of at most 107 bytes."""
    with TemporaryDirectory(prefix="e2e-", ignore_cleanup_errors=True) as path:
        yield Path(path)


def check_evicted_turns(model: Path, device: str) -> None:
    """Conversations in turn, which evict each other. How often the file is read, and answers go back, follows from what
    that takes beside computing: the first time it is not known, and done."""
    flags = (*FLAGS, *FEW_PAGES, *FILE, *(STATES if model == STATE_MODEL else ()), "--device", device)
    with server_folder() as folder:
        (folder / "pages").mkdir()
        with serving(folder, model, *flags) as server:
            moved = set()
            for turn in _turns(server, model):
                moved |= {_page_kib(answer) for answer in turn}
                assert all((answer.timings["transferred_state_bytes"] > 0) is (model == STATE_MODEL) for answer in turn)
                _settled(server, "deltaserve_tier_pages_stored_total")
            assert len(moved) == 1
            assert _settled(server, "deltaserve_write_back_pages_total") > 0
            assert _settled(server, "deltaserve_tier_tokens_loaded_total") >= 4 * PAGE
            assert _settled(server, "deltaserve_tier_failures_total") == 0


def check_unequal_pages(device: str) -> None:
    """Pages of 64 tokens on prefill, of 16 on decode: cut anew in staging memory, on their way there and back."""
    with server_folder() as folder, serving(folder, MICRO_MODEL, *FLAGS, *UNEQUAL, "--device", device) as server:
        moved = set()
        for number, turn in enumerate(_turns(server, MICRO_MODEL)):
            moved |= {_page_kib(answer) for answer in turn}
            assert all((answer.timings["decode_cached_tokens"] > 0) is (number > 0) for answer in turn)
        assert len(moved) == 1
        assert _settled(server, "deltaserve_write_back_pages_total") > 0
        assert _settled(server, "deltaserve_staged_bytes_total") > 0
        assert _settled(server, "deltaserve_staging_fallbacks_total") == 0


def _turns(server: Server, model: Path) -> Iterator[list[Answer]]:
    """Answers to a turn of every conversation, all of them right."""
    conversations = known_conversations(model, TRAFFIC, seed=2)
    assert len(conversations) > TRAFFIC.num_documents // 2
    contexts: list[list[int]] = [[] for _ in conversations]
    for number in range(NUM_TURNS):
        answers = []
        for context, conversation in zip(contexts, conversations, strict=True):
            turn = conversation.turns[number]
            context += turn.tokens
            answers.append(server.complete(context, turn.output_len))
            assert tuple(answers[-1].tokens) == turn.expected, (number, answers[-1].timings)
            context += answers[-1].tokens
        yield answers


def _page_kib(answer: Answer) -> int:
    """KiB that were sent for each page that decode lacked: the record of the first token beside them is less."""
    timings = answer.timings
    num_pages = int(-(-answer.usage["prompt_tokens"] // PAGE) - timings["decode_cached_tokens"] // PAGE)
    num_bytes = int(timings["transferred_bytes"] - timings["transferred_state_bytes"])
    assert num_bytes > num_pages * _KIB > 0
    return num_bytes // num_pages // _KIB


def _settled(server: Server, name: str) -> float:
    """Sum over both workers, once two looks at reports made apart find the same."""
    server.wait_quiet()
    seen: Counter[float] = Counter()

    def stands_still() -> bool:
        server.wait_quiet()
        seen[value := _total(server, name)] += 1
        return seen[value] > 1

    wait_until(stands_still, f"{name} to stand still", server)
    return _total(server, name)


def _total(server: Server, name: str) -> float:
    return sum(values.get(name, 0.0) for values in server.metrics().values())
