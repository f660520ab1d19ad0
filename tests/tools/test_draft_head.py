"""A draft head is trained on what a tiny model writes: it learns, computes in training as in service, and serves."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deltaserve.compute.layers.rope import Rope
from deltaserve.core.errors import ConfigError
from deltaserve.core.ids import Role
from deltaserve.model.checkpoint_config import load_spec
from deltaserve.model.drafts.draft_algorithm import with_head
from deltaserve.server.text.text_codec import TextCodec
from tests.compute.executor.world import random_tokens, reference_logprobs
from tests.compute.layers.dense_heads import NUM_GUESSES, dense_drafted, dense_eagle3, model_hidden
from tests.fixtures.tiny_models import EAGLE3_MODEL
from tests.product.in_process import Pages, Product, Setup
from tools.draft_head.chats import ChatForm
from tools.draft_head.folder import head_shape
from tools.draft_head.head import TrainedHead
from tools.draft_head.prompts import read_prompts
from tools.draft_head.store import ChatRecipe, read_chats, told_apart, unrepeated, write_chats
from tools.draft_head.train import Exam, TrainRecipe
from tools.train_draft_head import main, make_head

NUM_TOKENS = 1500
DRAFT_VOCAB = 200
CHATS = ChatRecipe(seed=3, num_rows=16, chats_per_file=24, turn_len=120, answer_len=40)
LESSONS = TrainRecipe(seed=3, num_epochs=5, chats_per_step=4, peak_lr=5e-3, warmup_steps=5)


def silent(line: str) -> None:
    assert line


@pytest.fixture(scope="module")
def files(tiny_models: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("chats")
    return write_chats(folder, tiny_models / EAGLE3_MODEL, CHATS, NUM_TOKENS, 1, silent)


@pytest.fixture(scope="module")
def trained(
    tiny_models: Path, files: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, tuple[Exam, Exam]]:
    """The head's folder; how good it was before and after."""
    out = tmp_path_factory.mktemp("head")
    return out, make_head(out, tiny_models / EAGLE3_MODEL, files, LESSONS, DRAFT_VOCAB, silent)


def test_chats_are_the_model_s_own(tiny_models: Path, files: list[Path]) -> None:
    model = tiny_models / EAGLE3_MODEL
    codec = TextCodec.load(model)
    form = ChatForm.of(codec, model.name)
    chats = read_chats(files)
    assert sum(chat.num_answer_tokens for chat in chats) >= NUM_TOKENS
    for chat in chats[:4]:
        turn = chat.tokens[len(form.header) : chat.first + 1 - len(form.footer)]
        assert chat.tokens[: chat.first + 1] == (*form.header, *turn, *form.footer)
        assert 0 < len(turn) <= CHATS.turn_len
        hidden = model_hidden(model, chat.tokens[:-1])
        assert (torch.cat(hidden[1:4], -1) - chat.read).abs().max() <= 0.05  # bfloat16, of what enters layers 1 to 3
        assert (hidden[-1][chat.first :] - chat.normed).abs().max() <= 0.05
    assert len(unrepeated([*chats, *chats])) == len(unrepeated(chats))


def test_chats_go_on_where_they_stopped(tiny_models: Path, files: list[Path], tmp_path: Path) -> None:
    model, folder = tiny_models / EAGLE3_MODEL, files[0].parent
    before = {file: file.stat().st_mtime_ns for file in files}
    assert write_chats(folder, model, CHATS, NUM_TOKENS, 1, silent) == files
    assert {file: file.stat().st_mtime_ns for file in files} == before
    with pytest.raises(ConfigError, match="of another model or recipe"):
        write_chats(folder, model, replace(CHATS, seed=4), NUM_TOKENS, 1, silent)
    (again,) = write_chats(tmp_path, model, CHATS, 1, 1, silent)
    assert again.read_bytes() == files[0].read_bytes()


def test_given_prompts_are_answered_once_each(tiny_models: Path, tmp_path: Path) -> None:
    """Those of a file, in the forms that it may have; the answers are the model's own."""
    model = tiny_models / EAGLE3_MODEL
    lines = [
        {"prompt": random_tokens(19, 1)},
        {"prompt": "some text"},
        {"messages": [{"role": "user", "content": "a question"}]},
        {"prompt": random_tokens(19, 1)},
        {"prompt": random_tokens(40, 2)},
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    prompts = read_prompts(file, model, load_spec(model).vocab_size)
    assert [len(prompt) for prompt in prompts] == [19, *map(len, prompts[1:3]), 40]
    recipe = replace(CHATS, chats_per_file=3, sampled_share=0.0, answer_len=12)
    files = write_chats(tmp_path / "chats", model, recipe, NUM_TOKENS, 1, silent, prompts)
    chats = read_chats(files)
    assert len(files) == 2
    assert sorted(chat.tokens[: chat.first + 1] for chat in chats) == sorted(prompts)
    for chat in chats:
        drawn = reference_logprobs(model, list(chat.tokens[:-1]))[chat.first :].argmax(-1)
        assert tuple(drawn.tolist()) == chat.tokens[chat.first + 1 :]
    with pytest.raises(ConfigError, match="of another model or recipe"):
        write_chats(tmp_path / "chats", model, recipe, NUM_TOKENS, 1, silent, prompts[1:])


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "no prompts in it"),
        ('{"prompt": "fine"}\n{"prompt": ', "line 2: no prompt: Expecting value"),
        ('{"text": "x"}', "line 1: no prompt: 'prompt'"),
        ("[1, 2]", "line 1: no prompt"),
        ('{"prompt": [1, 100000]}', "line 1: expected tokens from 0 to"),
        ('{"prompt": []}', "line 1: expected tokens"),
        ('{"messages": [{"role": 1}]}', "line 1: no prompt"),
    ],
)
def test_files_that_hold_no_prompts(tiny_models: Path, tmp_path: Path, text: str, error: str) -> None:
    model, file = tiny_models / EAGLE3_MODEL, tmp_path / "prompts.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match=error):
        read_prompts(file, model, load_spec(model).vocab_size)


def test_turns_that_differ_in_marks_alone_are_one() -> None:
    assert told_apart("What is  it?") == told_apart("what is it") != told_apart("what was it")


def test_it_learns(trained: tuple[Path, tuple[Exam, Exam]]) -> None:
    _, (before, after) = trained
    assert after.accepted > before.accepted + 0.5
    assert after.right[0] > before.right[0] + 0.2


def test_training_computes_what_serving_does(tiny_models: Path, trained: tuple[Path, tuple[Exam, Exam]]) -> None:
    """Pass s at position j gives the guess that follows from s guesses."""
    path, (folder, _) = tiny_models / EAGLE3_MODEL, trained
    spec, prompt = load_spec(path), random_tokens(23, 5)
    logits, guesses = dense_drafted(dense_eagle3(path, folder), prompt)
    head = TrainedHead(head_shape(spec, DRAFT_VOCAB))
    head.load_state_dict({k: v.float() for k, v in load_file(folder / "model.safetensors").items() if "2" not in k})
    text = [*prompt, *guesses]
    embedding = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    cos, sin = Rope(spec.attention.rope, torch.device("cpu")).tables(torch.arange(len(text)), torch.float32)
    with torch.no_grad():
        read = torch.cat(model_hidden(path, text)[1:4], -1)
        states = head.states(embedding[text][None], read[None], (cos[:, 0], sin[:, 0]), 1 + NUM_GUESSES)
        found = [head.logits(state[0]) for state in states]
    assert (found[0][: len(prompt)] - logits[: len(prompt)]).abs().max() <= 2e-3
    for number in range(1, 1 + NUM_GUESSES):
        at = len(prompt) - 1 + number
        assert (found[number][at] - logits[at]).abs().max() <= 2e-3


def test_the_folder_serves(tiny_models: Path, trained: tuple[Path, tuple[Exam, Exam]]) -> None:
    """Answers are checked against transformers; many guesses are right, apart and on one worker."""
    path, (folder, _) = tiny_models / EAGLE3_MODEL, trained
    assert with_head(load_spec(path), path, "EAGLE", folder).draft is not None
    setup = Setup(drafting=(Role.PREFILL, Role.DECODE), draft_folder=folder)
    product = Product(path, 1, 1, Pages(16), setup=setup)
    answers = product.serve(random_tokens(40, 1), random_tokens(21, 2), max_tokens=32)
    product.close()
    assert sum(a.num_accepted for a in answers) > 0.3 * sum(a.num_rounds for a in answers)


def test_what_cannot_be_trained_is_said(tiny_models: Path, files: list[Path], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="attention layers alone"):
        main([str(tmp_path / "head"), "--model", str(tiny_models / "qwen3_next")])
    with pytest.raises(SystemExit, match="nothing: No such file"):
        main([str(tmp_path / "head"), "--model", str(tmp_path / "nothing")])
    with pytest.raises(ConfigError, match="--draft-vocab 999: the model has 272 tokens"):
        make_head(tmp_path, tiny_models / EAGLE3_MODEL, files, LESSONS, 999, silent)
