"""The committed micro-model is right, and is the folder an ordinary user would download."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from deltaserve.commands.load.recall import DocumentShape
from tools.recall.evaluate import Exam, grade
from tools.recall.rows import CHAT_ANSWER_LEN
from tools.recall.tokenizer import build_tokenizer, names

FOLDER = Path(__file__).resolve().parents[2] / "models" / "recall-micro"


@pytest.fixture(scope="module")
def model() -> Any:
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


def exam_id(exam: Exam) -> str:
    return str(exam)


@pytest.mark.parametrize(
    "exam",
    [
        Exam(DocumentShape(8), num_documents=4, num_turns=3),
        Exam(DocumentShape(64), num_documents=4),
        Exam(DocumentShape(64, 64), num_documents=4),
        Exam(DocumentShape(96), num_documents=4),
        Exam(DocumentShape(64, 32), num_documents=2, num_turns=4),
        Exam(DocumentShape(32, 16), num_documents=2, num_turns=2, answer_len=CHAT_ANSWER_LEN, chat=True),
    ],
    ids=exam_id,
)
def test_every_answer_is_right(model: Any, exam: Exam) -> None:
    score = grade(model, exam, seed=2)
    assert (score.tokens_right, score.answers_right) == (score.tokens, score.answers)


def test_damaged_keys_give_wrong_answers() -> None:
    """The score measures the KV: with all keys of the second layer equal, no fact is found."""
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight.zero_()
    score = grade(model, Exam(DocumentShape(64), num_documents=2), seed=2)
    assert score.answers_right == 0
    assert score.tokens_right < score.tokens / 4


def test_a_question_can_be_typed_into_a_chat(model: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    words = names()[10:22]
    facts = [f"{a} {b};" for a, b in zip(words, words[1:] + words[:1], strict=True)]
    message = {"role": "user", "content": f"Facts: {' '.join(facts[5:] + facts[:5])}\n? {words[2]}"}
    prompt = tokenizer.apply_chat_template([message], add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        answer = model.generate(**prompt, max_new_tokens=30)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "".join(" " + word for word in words[2:11]) + "<|im_end|>"


def test_the_folder_is_small_and_says_how_good_it_is() -> None:
    files = {file.name: file for file in FOLDER.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= set(files)
    assert {"generation_config.json", "chat_template.jinja", "recall.json"} <= set(files)
    assert sum(file.stat().st_size for file in files.values()) <= 4 * 2**20
    report = json.loads(files["recall.json"].read_text())
    assert report["scores"]["64 facts"]["tokens_right"] == report["scores"]["64 facts"]["tokens"]


def test_its_tokenizer_is_the_one_the_builder_makes() -> None:
    saved, built = AutoTokenizer.from_pretrained(FOLDER), build_tokenizer(saved_len())
    assert saved.get_vocab() == built.get_vocab()
    assert saved.chat_template.strip() == built.chat_template.strip()


def saved_len() -> int:
    return int(json.loads((FOLDER / "tokenizer_config.json").read_text())["model_max_length"])
