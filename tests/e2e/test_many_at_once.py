"""Many clients at once, on a model whose every token can be checked."""

import json
from argparse import ArgumentParser
from pathlib import Path

import pytest

from deltaserve.bench.command import add_arguments, run
from tests.e2e.server import ROOT, serving

MODEL = ROOT / "models" / "recall-micro"


@pytest.mark.parametrize("count", [128, 256])
def test_every_answer_is_right_and_nothing_is_held(folder: Path, count: int) -> None:
    """All are sent at once; 32 run at a time, the others wait."""
    with serving(folder, MODEL) as server:
        parser = ArgumentParser("bench")
        add_arguments(parser)
        load = ["--num-documents", "8", "--conversations-per-document", str(count // 8), "--num-turns", "1"]
        out = folder / "report.json"
        options = ["--workload", "recall", *load, "--max-concurrency", str(count), "--output-file", str(out)]
        assert run(parser.parse_args(["--base-url", server.base_url, *options])) == 0
        summary = json.loads(out.read_text())["summary"]
        assert (summary["num_completed"], summary["num_failed"]) == (count, 0)
        assert summary["peak_concurrency"] == count
        assert summary["tokens_right"] == summary["tokens_expected"] > 0
        server.wait_quiet()
