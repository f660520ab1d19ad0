"""The micro-model that calls tools is right, and nothing but what stands in its context makes it so."""

import json
import re
from collections import Counter
from random import Random
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from deltaserve.server.text.answers.answer_choice import name_of
from deltaserve.server.text.text_codec import TextCodec
from tests.tools_model import TOOLS_MODEL, model_and_rows
from tools.calling.conversations import NOTED, UNKNOWN, Conversation, Message, Shape, Tool, draw_conversation
from tools.calling.evaluate import Kind, drawn, grade, kind_of, right_answers
from tools.calling.rows import Rows
from tools.calling.tokenizer import build_tokenizer
from tools.calling.words import ARGUMENTS, FUNCTIONS, NUMBERS, TOPICS, WORDS
from tools.recall.rows import UNLABELLED
from tools.train_tools import STAGES

TOKENIZER: Any = build_tokenizer(max_len=8192)
ROWS = Rows(TOKENIZER)
FACT = re.compile(r"([a-z]+):([a-z0-9]+);")
CONVERSATIONS = drawn(seed=2, count=60)


def test_answers_are_right() -> None:
    """19 of 20 of them, of each kind 9 of 10."""
    scores = grade(*model_and_rows(), CONVERSATIONS)
    assert min(score.answers for score in scores.values()) >= 5
    assert all(score.right >= 0.9 * score.answers for score in scores.values()), scores
    assert sum(s.right for s in scores.values()) >= 0.95 * sum(s.answers for s in scores.values()), scores


def test_a_score_in_one_pass_is_what_greedy_decoding_says() -> None:
    model, rows = model_and_rows()
    for conversation in CONVERSATIONS[:6]:
        tokens = rows.tokens(conversation)
        for answer, is_right in zip(rows.answers(tokens), right_answers(model, rows, conversation), strict=True):
            prompt = torch.tensor([tokens[: answer.start]])
            with torch.inference_mode():
                said = model.generate(prompt, max_new_tokens=len(answer), do_sample=False)[0, answer.start :]
            assert (said.tolist() == tokens[answer.start : answer.stop]) is is_right


def test_damaged_keys_give_wrong_answers() -> None:
    """The score measures the KV: with all keys of the last layer equal, no tool is found."""
    model = AutoModelForCausalLM.from_pretrained(TOOLS_MODEL, dtype=torch.float32).eval()
    with torch.no_grad():
        model.model.layers[-1].self_attn.k_proj.weight.zero_()
    scores = grade(model, ROWS, CONVERSATIONS[:20])
    assert scores[Kind.CALL].right == 0
    assert scores[Kind.RESULT].right < scores[Kind.RESULT].answers / 4


def test_the_folder_is_small_and_says_how_good_it_is() -> None:
    assert sum(file.stat().st_size for file in TOOLS_MODEL.iterdir()) <= 4 * 2**20
    scores = json.loads((TOOLS_MODEL / "tools.json").read_text())["scores"]
    assert sum(score["right"] for score in scores.values()) >= 0.97 * sum(score["answers"] for score in scores.values())


def test_its_tokenizer_is_the_one_the_builder_makes() -> None:
    saved = AutoTokenizer.from_pretrained(TOOLS_MODEL)
    assert saved.get_vocab() == TOKENIZER.get_vocab()
    assert saved.chat_template.strip() == TOKENIZER.chat_template.strip()


def test_the_server_knows_its_format() -> None:
    codec = TextCodec.load(TOOLS_MODEL)
    assert (name_of(codec.answers.calls), codec.shows_tools) == ("hermes", True)


def test_each_word_is_a_token() -> None:
    words = (*(topic + ":" for topic in TOPICS), *FUNCTIONS, *sum(ARGUMENTS.values(), ()), *WORDS, *NUMBERS)
    assert len(set(words)) == len(words)
    assert [len(TOKENIZER.encode(word, add_special_tokens=False)) for word in words] == [1] * len(words)


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: str(stage.shape))
def test_rows_ask_for_every_answer_and_nothing_else(stage: Any) -> None:
    batch = ROWS.batch(Random(1), stage)
    right = batch.labels[:, :-1] != UNLABELLED
    assert torch.equal(batch.tokens[:, 1:][right], batch.labels[:, :-1][right])
    rng = Random(1)
    for line, labels in zip(batch.tokens, batch.labels, strict=True):
        conversation = draw_conversation(rng, stage.shape)
        asked = TOKENIZER.decode(line[1:][labels[:-1] != UNLABELLED])
        assert asked.count("<|im_end|>") == len(list(conversation.steps()))
        for message in (conversation.messages[at] for at in conversation.steps()):
            assert message["content"] in asked
            assert all(call["function"]["arguments"] in asked for call in message.get("tool_calls", ()))


def test_each_prompt_of_a_conversation_is_the_beginning_of_the_next() -> None:
    """So what a cache keeps of one turn serves the next, and what the model was taught is what a server asks it."""
    for conversation in CONVERSATIONS[:20]:
        tokens = ROWS.tokens(conversation)
        for at, answer in zip(conversation.steps(), ROWS.answers(tokens), strict=True):
            before = Conversation(conversation.tools, conversation.messages[:at])
            assert [*ROWS.tokens(before), *tokens[answer.start - 3 : answer.start]] == tokens[: answer.start]


def test_what_is_right_follows_from_the_conversation() -> None:
    """Found in the text of the conversation, not as it was drawn."""
    kinds = Counter[Kind]()
    for conversation in drawn(seed=3, count=40, shape=Shape(num_facts=4)):
        tools = {tool.topic: tool for tool in conversation.tools}
        for at in conversation.steps():
            kinds[kind_of(conversation, at)] += 1
            before, message = conversation.messages[:at], conversation.messages[at]
            told = dict(FACT.findall(" ".join(one["content"] for one in before if one["role"] in ("system", "user"))))
            asked = before[-1]["content"]
            topic, _, named = asked.removeprefix("?").replace(" with ", "").partition(":")
            if before[-1]["role"] == "tool":
                assert message["content"] == f"It is {asked}."
            elif asked.startswith("Note "):
                assert message["content"] == NOTED
            elif topic in tools:
                assert_called(message, tools[topic], dict(pair.split(" ") for pair in named.split(" and ")))
            else:
                assert message["content"] == f"{topic}:{told.get(topic, UNKNOWN)}"
    assert all(kinds[kind] >= 5 for kind in Kind)


def assert_called(message: Message, tool: Tool, values: dict[str, str]) -> None:
    (call,) = message["tool_calls"]
    arguments = json.loads(call["function"]["arguments"])
    assert (message["content"], call["function"]["name"]) == (f"{tool.topic}:{tool.name}", tool.name)
    assert {name: str(value) for name, value in arguments.items()} == values
    assert list(arguments) == list(tool.arguments)
    assert all(isinstance(arguments[name], int) is (kind == "integer") for name, kind in tool.arguments.items())
