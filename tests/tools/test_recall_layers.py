"""A recall model with layers that add nothing says what it said before; the file of questions is as promised."""

import json
from pathlib import Path

import pytest
import torch

from deltaserve.commands.load.recall import ASK
from tests.compute.executor.world import reference_logprobs
from tools.recall.layers import with_layers
from tools.recall.prompts import main, question_prompts

FOLDER = Path(__file__).resolve().parents[2] / "models" / "recall-micro"


def test_more_layers_compute_the_same(tmp_path: Path) -> None:
    (prompt,) = question_prompts(1, seed=3)
    deep = with_layers(FOLDER, tmp_path / "deep", 6)
    assert json.loads((deep / "config.json").read_text())["num_hidden_layers"] == 6
    assert torch.equal(reference_logprobs(deep, list(prompt)), reference_logprobs(FOLDER, list(prompt)))
    with pytest.raises(ValueError, match="7 layers: expected a multiple of the model's 2"):
        with_layers(FOLDER, tmp_path / "odd", 7)


def test_questions_are_asked_about_their_own_documents(tmp_path: Path) -> None:
    main(tmp_path / "file", 40, 1)
    prompts = [json.loads(line)["prompt"] for line in (tmp_path / "file").read_text().splitlines()]
    assert prompts == [list(prompt) for prompt in question_prompts(40, 1)]
    assert all(ask == ASK and start in facts for *facts, ask, start in prompts)
    assert len({len(prompt) for prompt in prompts}) > 20
