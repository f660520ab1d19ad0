"""The recall tokenizer loses nothing, and its ids are those of the recall task."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaserve.commands.load.recall import FIRST_NAME, NUM_NAMES
from tools.recall.tokenizer import ASSISTANT_ID, BOS_ID, IM_END_ID, IM_START_ID, USER_ID, build_tokenizer, names

TOKENIZER: Any = build_tokenizer(max_len=8192)


def encode(text: str) -> list[int]:
    return [int(token) for token in TOKENIZER.encode(text, add_special_tokens=False)]


@given(
    st.text()
    | st.lists(st.sampled_from([*(" " + name for name in names()), "<|im_end|>", "user", " ", "é"])).map("".join)
)
def test_decoding_gives_the_text_back(text: str) -> None:
    assert TOKENIZER.decode(encode(text)) == text


def test_ids_are_bytes_then_specials_roles_and_names() -> None:
    assert encode("a?;\n") == [97, 63, 59, 10]
    assert encode("<|bos|><|im_start|><|im_end|>") == [BOS_ID, IM_START_ID, IM_END_ID]
    assert encode("userassistant") == [USER_ID, ASSISTANT_ID]
    assert [encode(" " + name) for name in names()] == [[FIRST_NAME + index] for index in range(NUM_NAMES)]
    assert len(TOKENIZER) == FIRST_NAME + NUM_NAMES


def test_facts_can_be_typed() -> None:
    first, second = names()[:2]
    assert encode(f"Facts: {first} {second};? {first}") == [*b"Facts:", FIRST_NAME, FIRST_NAME + 1, *b";?", FIRST_NAME]


def test_names_are_distinct_words() -> None:
    assert len(set(names())) == NUM_NAMES
    assert {len(name) for name in names()} == {4}


@pytest.mark.parametrize("prompted", [False, True])
def test_chat_template(prompted: bool) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    text = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompted)
    opening = "<|im_start|>assistant\n" if prompted else ""
    assert text == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n" + opening
