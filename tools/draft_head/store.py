"""Chats in files, a number in each, so that writing them may stop and go on; several processes write at once.

What is in a file follows from the recipe and the file's number alone.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from deltaserve.core.errors import ConfigError
from deltaserve.model.fingerprint import model_fingerprint
from deltaserve.server.text.text_codec import TextCodec
from tools.draft_head.chats import AnswerWriter, Chat, ChatForm, ChatLimits, Chatter
from tools.draft_head.prompts import Prompt
from tools.draft_head.target import read_layers, trainable_spec

_RECIPE, _PROMPTS, _MODEL = "recipe.json", "prompts.json", "model"


@dataclass(frozen=True, slots=True)
class ChatRecipe:
    """What chats depend on, beside the model."""

    seed: int = 0
    num_rows: int = 32
    """Chats that are written together."""
    chats_per_file: int = 96
    sampled_share: float = 0.2
    turn_len: int = 72
    answer_len: int = 160
    left_out: tuple[str, ...] = ()
    """Turns that no user may write: questions of a benchmark."""
    prompts: str | None = None
    """Hash of the prompts that are answered, where they are given; then no user's turn is written."""

    @property
    def limits(self) -> ChatLimits:
        return ChatLimits(self.turn_len, self.answer_len)


def told_apart(turn: str) -> str:
    """Equal for turns that differ in case, spaces and marks alone."""
    return "".join(character for character in turn.lower() if character.isalnum())


def write_chats(
    folder: Path,
    model: Path,
    recipe: ChatRecipe,
    num_tokens: int,
    num_processes: int,
    tell: Callable[[str], None],
    prompts: Sequence[Prompt] = (),
) -> list[Path]:
    """Files with as many tokens of answers, those that are there already included; `tell` is told of each. The model
    answers each prompt once, and where none is given it writes users' turns itself.

    Raises ConfigError for a model that cannot write chats, and where the folder's are of another model or recipe.
    """
    read_layers(trainable_spec(model))
    if not prompts:
        ChatForm.of(TextCodec.load(model), model.name)
    folder.mkdir(parents=True, exist_ok=True)
    if prompts:
        text = json.dumps(prompts)
        recipe = replace(recipe, prompts=hashlib.sha256(text.encode()).hexdigest())
    _check_recipe(folder, model, recipe)
    if prompts:
        (folder / _PROMPTS).write_text(text)
    found = _written(folder, num_tokens)
    if found:
        tell(f"chats: {len(found)} files are there, {sum(found.values()):,} of {num_tokens:,} tokens of answers")
    all_numbers = range(-(-len(prompts) // recipe.chats_per_file)) if prompts else count()
    numbers, lock = (number for number in all_numbers if number not in found), Lock()

    def work(writer: _Writer) -> None:
        while True:
            with lock:
                number = next(numbers, None) if sum(found.values()) < num_tokens else None
                if number is None:
                    return
            num_written = writer.write(number)
            with lock:
                found[number] = num_written
                tell(f"chats: file {number}, {sum(found.values()):,} of {num_tokens:,} tokens of answers")

    with ExitStack() as stack:
        num_writers = num_processes if sum(found.values()) < num_tokens else 0
        writers = [stack.enter_context(_Writer(folder, model)) for _ in range(num_writers)]
        pool = stack.enter_context(ThreadPoolExecutor(num_processes))
        for done in [pool.submit(work, writer) for writer in writers]:
            done.result()
    return [chat_file(folder, number) for number in sorted(found)]


def _written(folder: Path, num_tokens: int) -> dict[int, int]:
    """Number of a file |-> its tokens of answers, as many as are wanted."""
    found: dict[int, int] = {}
    for path in sorted(folder.glob(chat_file(folder, 0).name.replace("0000", "*"))):
        if sum(found.values()) < num_tokens:
            found[int(path.stem.rpartition("-")[2])] = sum(chat.num_answer_tokens for chat in _unpacked(path))
    return found


class _Writer:
    """A process that writes files (writer.py), as a context."""

    def __init__(self, folder: Path, model: Path) -> None:
        command = [sys.executable, "-m", "tools.draft_head.writer", str(folder), str(model)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """What is in the works goes on to its end."""
        self._process.communicate()

    def write(self, number: int) -> int:
        """Tokens of answers in the file of that number, once it is there."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process that writes chats ended at file {number}: see above")
        return int(answer)


def _read_recipe(folder: Path) -> ChatRecipe:
    values = json.loads((folder / _RECIPE).read_text())
    return ChatRecipe(**{name: value for name, value in values.items() if name != _MODEL})


def read_chats(files: Sequence[Path]) -> list[Chat]:
    """Raises ConfigError for a file that is none of these."""
    return [chat for file in files for chat in _unpacked(file)]


def unrepeated(chats: Iterable[Chat]) -> list[Chat]:
    """The first chat for each turn of the user: files are written without sight of each other."""
    first: dict[tuple[int, ...], Chat] = {}
    for chat in chats:
        first.setdefault(chat.tokens[: chat.first + 1], chat)
    return list(first.values())


def _check_recipe(folder: Path, model: Path, recipe: ChatRecipe) -> None:
    wanted = json.dumps({_MODEL: model_fingerprint(model)} | asdict(recipe), indent=1) + "\n"
    path = folder / _RECIPE
    if not path.exists():
        path.write_text(wanted)
    elif json.loads(path.read_text()) != json.loads(wanted):
        raise ConfigError(f"{folder}: holds chats of another model or recipe ({_RECIPE}): take an empty folder")


def chat_file(folder: Path, number: int) -> Path:
    return folder / f"chats-{number:04d}.safetensors"


def file_writer(folder: Path, model: Path) -> Callable[[int], int]:
    """Writes the file of a number by the folder's recipe; returns its tokens of answers."""
    recipe = _read_recipe(folder)
    chats = _answering(folder, model, recipe) if recipe.prompts else _chatting(model, recipe)

    def write(number: int) -> int:
        seed = int.from_bytes(hashlib.sha256(f"{recipe.seed} {number}".encode()).digest()[:4], "big")
        path = chat_file(folder, number)
        partial = path.with_suffix(f".{os.getpid()}")
        save_file(_packed(chats(number, seed)), partial)
        partial.rename(path)
        return sum(chat.num_answer_tokens for chat in _unpacked(path))

    return write


def _chatting(model: Path, recipe: ChatRecipe) -> Callable[[int, int], Iterable[Chat]]:
    """Chats by a file's number and its seed."""
    chatter = Chatter(model, recipe.num_rows, recipe.limits, recipe.sampled_share)

    def chats(number: int, seed: int) -> Iterable[Chat]:
        seen = set(map(told_apart, recipe.left_out))

        def is_new(turn: str) -> bool:
            before = len(seen)
            seen.add(told_apart(turn))
            return len(seen) > before

        return chatter.chats(recipe.chats_per_file, seed, is_new)

    return chats


def _answering(folder: Path, model: Path, recipe: ChatRecipe) -> Callable[[int, int], Iterable[Chat]]:
    """The same; a file has its own of the prompts."""
    prompts: list[Prompt] = json.loads((folder / _PROMPTS).read_text())
    longest = max(map(len, prompts)) + recipe.answer_len + 1
    writer = AnswerWriter(model, recipe.num_rows, longest, recipe.answer_len, recipe.sampled_share)

    def chats(number: int, seed: int) -> Iterable[Chat]:
        first = number * recipe.chats_per_file
        return writer.answers(prompts[first : first + recipe.chats_per_file], seed)

    return chats


def _packed(chats: Iterable[Chat]) -> dict[str, Tensor]:
    kept = list(chats)
    return {
        "lens": torch.tensor([len(chat.tokens) for chat in kept], dtype=torch.int32),
        "firsts": torch.tensor([chat.first for chat in kept], dtype=torch.int32),
        "tokens": torch.tensor([token for chat in kept for token in chat.tokens], dtype=torch.int32),
        "read": torch.cat([chat.read for chat in kept]),
        "normed": torch.cat([chat.normed for chat in kept]),
    }


def _unpacked(file: Path) -> list[Chat]:
    try:
        held = load_file(file)
        lens, firsts = held["lens"].tolist(), held["firsts"].tolist()
        tokens = torch.split(held["tokens"], lens)
        read = torch.split(held["read"], [n - 1 for n in lens])
        normed = torch.split(held["normed"], [n - 1 - first for n, first in zip(lens, firsts, strict=True)])
    except (OSError, KeyError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"{file.name}: no chats in it: {error}") from None
    parts = zip(tokens, firsts, read, normed, strict=True)
    return [Chat(tuple(text.tolist()), first, of_read, of_normed) for text, first, of_read, of_normed in parts]
