"""What ends an answer: the tokens that any file of the model, its template or its format of answers says do so."""

from collections.abc import Iterable

from tokenizers import Tokenizer

from deltaserve.server.text.answers.answer_choice import answer_ends
from deltaserve.server.text.conversation import shaped
from deltaserve.server.text.template import ChatTemplate
from deltaserve.server.text.template_needs import TemplateError
from deltaserve.server.text.text_files import TextFiles

_ANSWER, _REASONING, _CALLED = "qavuzo", "remiko", "gerafu"
_CALL = {"id": "call_0", "type": "function", "function": {"name": _CALLED, "arguments": {"a": 1}}}


def end_ids(named: Iterable[int], files: TextFiles, template: ChatTemplate | None) -> set[int]:
    """Every id that ends an answer. `named`: those that the model's configurations call an end of sequence."""
    ids = {*named, *_ids_of(files, "eos_token")}
    ends = answer_ends(control_ids(files.tokenizer), template)
    if ends is not None:
        # What follows an earlier answer in a chat ends one message; its answer may have several.
        return ids | ends
    if template is None:
        return ids
    return ids | (_turn_ends(template, files.tokenizer) - _ids_of(files, "bos_token"))


def control_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Control tokens of a tokenizer |-> their ids."""
    return {each.content: token for token, each in tokenizer.get_added_tokens_decoder().items() if each.special}


def _chat(template: ChatTemplate, **answer: object) -> str:
    asked = {"role": "user", "content": "hello"}
    told = {"role": "tool", "content": "more", "tool_call_id": "call_0"} if "tool_calls" in answer else asked
    try:
        return template.render(shaped([asked, {"role": "assistant", **answer}, told], template.needs), {}).text
    except TemplateError:
        return ""


def _turn_ends(template: ChatTemplate, tokenizer: Tokenizer) -> set[int]:
    """The token right behind the answer, if there is one, which the model has learnt to write there.

    Some vocabularies do not call theirs special: an added token that is no word counts as well. One that also stands
    between reasoning and what follows it ends a message, and an answer may have several.
    """
    added = {each.content: token for token, each in tokenizer.get_added_tokens_decoder().items()}
    _, found, rest = _chat(template, content=_ANSWER).rpartition(_ANSWER)
    rest = rest.lstrip()
    matching = [text for text in added if found and rest.startswith(text) and not text.isalnum()]
    if not matching:
        return set()
    end = max(matching, key=len)
    reasoned = _chat(template, content=_ANSWER, reasoning_content=_REASONING)
    called = _chat(template, content=None, reasoning_content=_REASONING, tool_calls=[_CALL])
    between = _between(reasoned, _ANSWER) + _between(called, _CALLED)
    return set() if end in between else {added[end]}


def _between(chat: str, after: str) -> str:
    """What stands between reasoning and what comes after it."""
    text, found, _ = chat.partition(_REASONING)[2].partition(after)
    return text if found else ""


def _ids_of(files: TextFiles, name: str) -> set[int]:
    """The id of a token that the tokenizer's files name."""
    found = files.tokenizer.token_to_id(files.special_names[name]) if name in files.special_names else None
    return set() if found is None else {found}
