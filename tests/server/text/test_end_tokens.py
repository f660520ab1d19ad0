"""What ends an answer: end token x where it is named x kind of file."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import gguf
import pytest
from tokenizers import AddedToken, Tokenizer

from deltaserve.server.text.text_codec import TextCodec
from tests.fixtures.harmony import TEMPLATE as HARMONY_TEMPLATE
from tests.fixtures.text_folder import CONFIG
from tests.fixtures.tiny_gguf import Vocabulary, byte_vocabulary, write_text_only
from tests.fixtures.tiny_tokenizer import byte_level

BOS, EOS, TURN_END = "<s>", "<over>", "<|turn_end|>"


def _turns(user: str, assistant: str) -> str:
    """A template of turns; `$` stands for what was said."""
    before, after = assistant.split("$")
    first, second = user.split("$")
    return (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        f"{{{{ {before!r} + m.content + {after!r} }}}}{{% else %}}{{{{ {first!r} + m.content + {second!r} }}}}"
        "{% endif %}{% endfor %}"
        f"{{% if add_generation_prompt %}}{before}{{% endif %}}"
    )


TEMPLATES: Mapping[str, tuple[tuple[str, ...], str, set[str]]] = {
    "ChatML": (
        ("<|im_start|>", "<|im_end|>"),
        _turns("<|im_start|>user\\n$<|im_end|>\\n", "<|im_start|>assistant\\n$<|im_end|>\\n").replace("\\\\n", "\\n"),
        {"<|im_end|>"},
    ),
    "Llama 3": (
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        _turns(
            "<|start_header_id|>user<|end_header_id|>$<|eot_id|>",
            "<|start_header_id|>assistant<|end_header_id|>$<|eot_id|>",
        ),
        {"<|eot_id|>"},
    ),
    "Gemma": (
        ("<start_of_turn>", "<end_of_turn>"),
        _turns("<start_of_turn>user $<end_of_turn>", "<start_of_turn>model $<end_of_turn>"),
        {"<end_of_turn>"},
    ),
    "Phi": (("<|user|>", "<|assistant|>", "<|end|>"), _turns("<|user|>$<|end|>", "<|assistant|>$<|end|>"), {"<|end|>"}),
    "GLM: the next turn begins": (("<|user|>", "<|assistant|>"), _turns("<|user|>$", "<|assistant|>$"), {"<|user|>"}),
    "Llama 2: eos": ((), _turns("[INST] $ [/INST]", "$ <over><s>"), {EOS}),
    "the next chat begins": ((), _turns("[INST] $ [/INST]", "$<s>"), set()),
    "words, no control token": ((), _turns("USER: $ ", "ASSISTANT: $ END "), set()),
    "a template that shows no answer": (("<|end|>",), "{{ messages[0].content }}<|end|>", set()),
    "a message of reasoning ends alike": (
        ("<|begin|>", "<|end|>"),
        "{% for m in messages %}{% if m.reasoning_content %}{{ '<|begin|>think' + m.reasoning_content + '<|end|>' }}"
        "{% endif %}{{ '<|begin|>' + m.role + (m.content or '') + '<|end|>' }}{% endfor %}",
        set(),
    ),
    "reasoning ends in a way of its own": (
        ("<|begin|>", "<|thought|>", "<|end|>"),
        "{% for m in messages %}{{ '<|begin|>' + m.role }}"
        "{% if m.reasoning_content %}{{ m.reasoning_content }}<|thought|>{% endif %}"
        "{{ (m.content or '') + '<|end|>' }}{% endfor %}",
        {"<|end|>"},
    ),
    "gpt-oss: an end of a message is none": (
        ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"),
        HARMONY_TEMPLATE,
        {"<|return|>", "<|call|>"},
    ),
}


def write_folder(folder: Path, tokenizer: Tokenizer, files: Mapping[str, object]) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    bare = {name: value for name, value in CONFIG.items() if name != "eos_token_id"} | {"vocab_size": 300}
    for name, content in ({"config.json": {}} | dict(files)).items():
        values = bare | content if name == "config.json" and isinstance(content, dict) else content
        (folder / name).write_text(values if isinstance(values, str) else json.dumps(values))
    return folder


def as_folder(folder: Path, specials: Sequence[str], template: str) -> Path:
    named = {"chat_template.jinja": template, "tokenizer_config.json": {"bos_token": BOS}}
    return write_folder(folder, byte_level(specials), named)


def as_gguf(kind: gguf.TokenType) -> Callable[[Path, Sequence[str], str], Path]:
    """A file whose vocabulary calls the tokens this."""

    def write(folder: Path, specials: Sequence[str], template: str) -> Path:
        bytes_only = byte_vocabulary()
        kinds = (*bytes_only.kinds[:256], *[int(kind)] * len(specials))
        vocabulary = Vocabulary((*bytes_only.tokens[:256], *specials), kinds, extra={"bos_token_id": 256})
        return write_text_only(folder / "m.gguf", vocabulary, lambda writer: writer.add_chat_template(template))

    return write


FILES: Mapping[str, Callable[[Path, Sequence[str], str], Path]] = {
    "folder": as_folder,
    "GGUF": as_gguf(gguf.TokenType.CONTROL),
    "GGUF, tokens of the user": as_gguf(gguf.TokenType.USER_DEFINED),
}


@pytest.mark.parametrize("files", FILES)
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_token_behind_the_templates_own_answers_ends_an_answer(name: str, files: str, tmp_path: Path) -> None:
    specials, template, wanted = TEMPLATES[name]
    tokens = [BOS, EOS, *specials]
    codec = TextCodec.load(FILES[files](tmp_path, tokens, template))
    if template == HARMONY_TEMPLATE:
        if files.endswith("user"):
            wanted = set()  # none of them is a control token, so no answer is taken to come in channels
    elif files.startswith("GGUF"):
        wanted = wanted | {"<|end|>"} & set(specials)  # known by its name there, whatever the template shows
    assert {tokens[token - 256] for token in codec.eos_ids} == wanted


NAMED: Mapping[str, Mapping[str, object]] = {
    "config.json": {"config.json": {"eos_token_id": 257}},
    "config.json, a list": {"config.json": {"eos_token_id": [257]}},
    "generation_config.json": {"generation_config.json": {"eos_token_id": 257}},
    "generation_config.json, a list": {"generation_config.json": {"eos_token_id": [257]}},
    "tokenizer_config.json": {"tokenizer_config.json": {"eos_token": EOS}},
    "tokenizer_config.json, an added token": {
        "tokenizer_config.json": {"eos_token": {"content": EOS, "special": True}}
    },
}


@pytest.mark.parametrize("name", NAMED)
def test_a_token_that_any_file_calls_the_end_is_one(name: str, tmp_path: Path) -> None:
    codec = TextCodec.load(write_folder(tmp_path, byte_level([BOS, EOS]), NAMED[name]))
    assert codec.eos_ids == (257,)


@pytest.mark.parametrize(("token", "is_end"), [(TURN_END, True), ("END", False)])
def test_an_added_token_that_is_not_called_special_is_an_end_unless_it_is_a_word(
    token: str, is_end: bool, tmp_path: Path
) -> None:
    tokenizer = byte_level([BOS, EOS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
    template = _turns("USER: $", f"ASSISTANT: ${token}")
    codec = TextCodec.load(write_folder(tmp_path, tokenizer, {"chat_template.jinja": template}))
    assert codec.eos_ids == ((258,) if is_end else ())
