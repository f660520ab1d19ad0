"""benchmarks/bench_host.py: the worker that it measures serves what the load says."""

import pytest

from benchmarks.bench_host import Load, Sections, measure

THREADS = {"loop", "step", "step-ends", "transfer", "zmq"}


@pytest.mark.parametrize("num_rows", [1, 3])
def test_steady_steps_decode_every_row(num_rows: int) -> None:
    figures = measure(Load(num_rows, is_steady=True, num_steps=40), "nothing").figures()
    assert figures.rows_per_step == num_rows
    assert figures.threads_ms.keys() >= THREADS
    assert sum(figures.threads_ms.values()) == pytest.approx(figures.cpu_ms)


def test_replaced_rows_compute_prompts_between() -> None:
    sections = Sections()
    worker = measure(Load(4, is_steady=False, num_steps=40), "nothing", sections)
    assert worker.figures().rows_per_step > 4
    assert {"plan", "commit", "turn", "launch", "encode + send"} <= worker.sections_us().keys()
