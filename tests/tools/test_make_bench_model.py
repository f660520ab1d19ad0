"""A benchmark model loads as any checkpoint does."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.make_bench_model import main


@pytest.mark.parametrize(
    ("flags", "said"),
    [((), "46.2 M parameters, 16384 tokens"), (("--kind", "hybrid"), "21.6 M parameters, 16384 tokens")],
)
def test_it_loads_and_generates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], said: str
) -> None:
    torch.set_num_threads(1)
    main([str(tmp_path), *flags])
    assert said in capsys.readouterr().out
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.dtype == torch.bfloat16
    text = "ban storo; é 你\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    prompt = torch.tensor([tokenizer.encode(text)])
    assert model.generate(prompt, max_new_tokens=3, min_new_tokens=3).shape == (1, prompt.shape[1] + 3)
