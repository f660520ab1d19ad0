"""Lines of the deployment page, as checks of recipes take them: what the page no longer says is an error."""

import pytest

from tools.clients.page_lines import block_with, here, line_with, lines_with


def test_lines_are_words_without_comments_and_joined() -> None:
    serve, worker, frontend = lines_with("NVIDIA Dynamo", "--base-url")
    assert serve == ["deltaserve", "serve", "MODEL", "--page-size", "16"]
    assert worker[:2] == ["deltaserve", "dynamo"] and frontend[:3] == ["python", "-m", "dynamo.frontend"]
    assert line_with("SGLang's P/D mode", "--pd-disaggregation")[-2:] == ["--decode", "http://127.0.0.1:30002"]


def test_a_section_ends_where_the_next_begins() -> None:
    with pytest.raises(ValueError, match=r"deploy\.md: 0 of '--pd-disaggregation' below 'Behind another router'"):
        block_with("Behind another router", "--pd-disaggregation")


@pytest.mark.parametrize(("words", "number"), [(("helm",), 0), (("deltaserve", "MODEL"), 2)])
def test_there_must_be_one_line(words: tuple[str, ...], number: int) -> None:
    with pytest.raises(ValueError, match=rf"deploy\.md: {number} of '{' '.join(words)}'"):
        line_with("NVIDIA Dynamo", *words)


def test_what_is_other_here_is_put_in_at_once() -> None:
    line = ["serve", "MODEL", "--port", "8998", '{"at": "tcp://127.0.0.1:8999"}']
    found = here(line, {"MODEL": "/models/8998", "8998": 8999, "8999": 5})
    assert found == ["serve", "/models/8998", "--port", "8999", '{"at": "tcp://127.0.0.1:5"}']
    assert here(line, {}) == line
    with pytest.raises(ValueError, match=r"does not have 30001$"):
        here(line, {"MODEL": "x", "30001": 1})
