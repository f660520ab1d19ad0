"""A vocabulary that divides over no ranks: answers of prefill and decode are those of transformers, with and without a
draft head; no id that fills up a share is ever sampled, guessed or told.
"""

from pathlib import Path

import pytest

from deltaserve.control.transfer.staging import StagingMode
from deltaserve.core.ids import Role
from tests.cells import cells
from tests.compute.executor.world import random_tokens
from tests.fixtures.families import FAMILIES
from tests.fixtures.tiny_models import (
    DRAFTED,
    EAGLE3_HEAD,
    EAGLE3_MODEL,
    VARIANTS,
    Variant,
    write_eagle3,
    write_variant,
)
from tests.product.in_process import DECODE, Product, Setup

VOCAB = 341
"""11 * 31. That of the EAGLE-3 head is 155."""
BOTH = (Role.PREFILL, Role.DECODE)
QUICK = {("llama", 2, 4), ("gemma3_text", 4, 2), ("deepseek_v3", 2, 1), ("qwen3_next", 1, 2)}


def odd(variant: Variant, folder: Path) -> Path:
    changed = Variant(
        variant.build,
        {**variant.changes, "vocab_size": VOCAB},
        fused_experts=variant.fused_experts,
        centred_norms=variant.centred_norms,
        mtp=variant.mtp,
    )
    return write_variant(changed, folder)


@pytest.mark.parametrize(
    ("family", "prefill_ranks", "decode_ranks"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in ((f, p, d) for f in FAMILIES for p, d in ((1, 2), (2, 1), (2, 2), (2, 4), (4, 2)))
    ],
)
def test_answers_are_those_of_transformers(tmp_path: Path, family: str, prefill_ranks: int, decode_ranks: int) -> None:
    product = Product(odd(VARIANTS[family], tmp_path / family), prefill_ranks, decode_ranks, staging=StagingMode.ON)
    (cold,) = product.serve(random_tokens(60, 1), max_tokens=12)
    again, other = product.serve(random_tokens(60, 1), random_tokens(33, 2), max_tokens=12)
    assert again.tokens == cold.tokens
    assert max(*cold.tokens, *other.tokens) < VOCAB
    assert product.worker(DECODE).count("writes_failed") == 0
    product.close()


@pytest.mark.parametrize(
    ("name", "prefill_ranks", "decode_ranks"),
    cells(
        ((name, *ranks) for name in ("deepseek_v3_mtp", "qwen3_5_mtp", EAGLE3_HEAD) for ranks in ((1, 2), (2, 4))),
        lambda name, prefill_ranks, _: prefill_ranks == 2 and name != EAGLE3_HEAD,
    ),
)
def test_answers_with_a_draft_head(tmp_path: Path, name: str, prefill_ranks: int, decode_ranks: int) -> None:
    if name == EAGLE3_HEAD:
        write_eagle3(tmp_path, VOCAB, 155)
        folder, setup = tmp_path / EAGLE3_MODEL, Setup(drafting=BOTH, draft_folder=tmp_path / EAGLE3_HEAD)
    else:
        folder, setup = odd(DRAFTED[name], tmp_path / name), Setup(drafting=BOTH)
    product = Product(folder, prefill_ranks, decode_ranks, staging=StagingMode.ON, setup=setup)
    answers = product.serve(random_tokens(70, 1), random_tokens(21, 4), max_tokens=16)
    assert sum(answer.num_accepted for answer in answers) > 0.1 * sum(answer.num_rounds for answer in answers)
    product.close()
