"""Special tokens in every form that JSON allows: as transformers takes them, or refused in one line.

Taken beyond transformers are objects without `__type` in tokenizer_config.json, and named tokens in either file: what
they mean is plain. Refused beyond it are objects without content, of which transformers makes an empty token.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers

from deltaserve.core.errors import ConfigError
from deltaserve.server.text.text_codec import TextCodec
from deltaserve.server.text.text_files import read_folder

CONFIG, MAP = "tokenizer_config.json", "special_tokens_map.json"
ROLES = ("bos_token", "eos_token", "pad_token", "cls_token", "mask_token")
LISTS = ("additional_special_tokens", "extra_special_tokens")
NEW, OWN = "<x>", "<think>"
"""A token that tokenizer.json lacks, and one that it has."""
TEXTS = ("a <x> b", "aX<x>b", "a <think> b", "a<think>b", "<X>")


def typed(content: object, **flags: object) -> dict[str, object]:
    plain = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    return {"__type": "AddedToken", "content": content, **plain, **flags}


FLAGS = ("lstrip", "rstrip", "normalized", "single_word")
GOOD = [NEW, OWN, typed(NEW), typed(OWN), *(typed(token, **{flag: True}) for token in (NEW, OWN) for flag in FLAGS)]
BAD = [
    5,
    1.5,
    True,
    [NEW],
    typed(5),
    *(typed(NEW, **{flag: odd}) for flag in FLAGS for odd in ("x", 1, None)),
]
NO_CONTENT: list[Any] = [{}, typed(None), {"content": None}, {"lstrip": True}]


def cases(values: list[Any]) -> list[tuple[str, dict[str, Any]]]:
    """Each value in each place."""
    forms: list[dict[str, Any]] = []
    for value in values:
        forms += [{role: value} for role in ROLES]
        forms += [{name: form} for name in LISTS for form in ([value], {"k_token": value})]
    return [(file, form) for file in (CONFIG, MAP) for form in forms]


@pytest.fixture
def folder(model_folder: Path, tmp_path: Path) -> Path:
    """A copy of the model folder."""
    return Path(shutil.copytree(model_folder, tmp_path / "model"))


def edit(folder: Path, file: str, changes: dict[str, Any]) -> None:
    path = folder / file
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | changes))


def theirs(folder: Path) -> tuple[list[list[int]], dict[str, str]] | None:
    """Ids of TEXTS, and tokens by name; None: refused."""
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        return [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS], dict(tokenizer.special_tokens_map)
    except (TypeError, ValueError, AttributeError):
        return None


def ours(folder: Path) -> tuple[list[list[int]], dict[str, str]]:
    files = read_folder(folder)
    ids = [files.tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]
    return ids, dict(files.special_names)


@pytest.mark.parametrize(("file", "changes"), cases(GOOD), ids=str)
def test_tokens_are_taken_as_transformers_takes_them(folder: Path, file: str, changes: dict[str, Any]) -> None:
    edit(folder, file, changes)
    expected = theirs(folder)
    is_beyond = file == MAP and isinstance(changes.get(LISTS[0]), dict)
    assert (expected is None) == is_beyond
    if expected is None:
        edit(folder, MAP, {LISTS[0]: None, LISTS[1]: changes[LISTS[0]]})
        expected = theirs(folder)
        edit(folder, MAP, {**changes, LISTS[1]: None})
    assert ours(folder) == expected


@pytest.mark.parametrize("file", [CONFIG, MAP])
@pytest.mark.parametrize("role", [*ROLES, "image_token"])
def test_a_named_token_that_the_tokenizer_lacks_is_told(
    folder: Path, file: str, role: str, caplog: pytest.LogCaptureFixture
) -> None:
    read_folder(folder)
    assert not caplog.records
    edit(folder, CONFIG, {role: None})
    edit(folder, file, {role: NEW})
    added = read_folder(folder).tokenizer.token_to_id(NEW)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"tokenizer.json lacks {role} '<x>' as {added}: added so, as by transformers")


@pytest.mark.parametrize(("file", "changes"), [*cases(BAD), *cases(NO_CONTENT)], ids=str)
def test_what_is_no_token_is_refused(folder: Path, file: str, changes: dict[str, Any]) -> None:
    edit(folder, file, changes)
    with pytest.raises(ConfigError) as caught:
        TextCodec.load(folder)
    message = str(caught.value)
    assert message.startswith(f"{file}: {next(iter(changes))}")
    assert "expected " in message
    assert "\n" not in message


@pytest.mark.parametrize(("file", "changes"), cases(BAD), ids=str)
def test_transformers_refuses_it_too(folder: Path, file: str, changes: dict[str, Any]) -> None:
    edit(folder, file, changes)
    assert theirs(folder) is None


@pytest.mark.parametrize("value", [{"content": NEW}, {"content": NEW, "lstrip": True}])
@pytest.mark.parametrize("name", [*ROLES, *LISTS])
def test_an_object_needs_no_type(folder: Path, name: str, value: dict[str, Any]) -> None:
    edit(folder, CONFIG, {name: [value] if name in LISTS else value})
    found = ours(folder)
    edit(folder, CONFIG, {name: [{**typed(NEW), **value}] if name in LISTS else {**typed(NEW), **value}})
    assert found == ours(folder) == theirs(folder)


NULLS: list[tuple[str, dict[str, Any]]] = [(CONFIG, {name: None}) for name in (*ROLES, *LISTS)]
NOTHING: tuple[object, ...] = ([], {})
EMPTY: list[tuple[str, dict[str, Any]]] = [(CONFIG, {name: form}) for name in LISTS for form in NOTHING]
ASIDE: list[tuple[str, dict[str, Any]]] = [
    (CONFIG, {"image_token": value, "add_bos_token": True}) for value in (NEW, typed(NEW), None, 5, True, [NEW])
]


@pytest.mark.parametrize(("file", "changes"), [*NULLS, *EMPTY, *ASIDE], ids=str)
def test_nothing_and_names_of_no_role(folder: Path, file: str, changes: dict[str, Any]) -> None:
    edit(folder, file, changes)
    assert ours(folder) == theirs(folder)


@pytest.mark.parametrize("name", [*ROLES, *LISTS])
def test_null_in_the_older_file_takes_nothing_away(folder: Path, name: str) -> None:
    """For transformers it takes away what tokenizer_config.json names: an end of answers would be lost."""
    whole = ours(folder)
    edit(folder, MAP, {name: None})
    assert ours(folder) == whole


@pytest.mark.parametrize("named", [OWN, typed(OWN)])
@pytest.mark.parametrize("flag", FLAGS)
def test_a_role_takes_nothing_from_a_token_that_is_there(folder: Path, named: object, flag: str) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    for token in tokenizer["added_tokens"]:
        token[flag] = token[flag] or token["content"] == OWN
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    edit(folder, CONFIG, {"bos_token": named})
    assert ours(folder) == theirs(folder)


@pytest.mark.parametrize("flag", [*FLAGS, "special"])
@pytest.mark.parametrize("value", ["true", 1, None, []])
def test_a_flag_of_a_listed_token_is_a_truth_value(folder: Path, flag: str, value: object) -> None:
    edit(folder, CONFIG, {"added_tokens_decoder": {"266": {"content": NEW, flag: value}}})
    assert theirs(folder) is None
    with pytest.raises(ConfigError, match=rf"added_tokens_decoder: 266: {flag} is .*, expected true or false"):
        TextCodec.load(folder)
