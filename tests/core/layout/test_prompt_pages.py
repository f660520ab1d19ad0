"""A prompt in pages of two sizes, against counting its tokens one by one."""

from hypothesis import given
from hypothesis import strategies as st

from deltaserve.core.layout.prompt_pages import PromptPages, tokens_before

sizes = st.integers(1, 12)
prompts = st.builds(PromptPages, st.integers(1, 100), sizes, sizes)


@given(prompts)
def test_every_token_is_in_a_page_of_the_reader(prompt: PromptPages) -> None:
    assert prompt.num_pages == len({token // prompt.reader_size for token in range(prompt.num_tokens)})


@given(prompts, st.data())
def test_sources_are_the_writers_pages_of_the_same_tokens(prompt: PromptPages, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, prompt.num_pages))
    end = data.draw(st.integers(first, prompt.num_pages))
    tokens = [t for t in range(prompt.num_tokens) if first <= t // prompt.reader_size < end]
    assert list(prompt.sources(first, end)) == sorted({token // prompt.writer_size for token in tokens})


@given(prompts, st.data())
def test_a_closed_page_of_the_reader_is_computed_to_its_end(prompt: PromptPages, data: st.DataObject) -> None:
    num_computed = data.draw(st.integers(0, prompt.num_tokens))
    num_closed = prompt.num_closed(num_computed)
    assert num_closed * prompt.reader_size <= num_computed < (num_closed + 1) * prompt.reader_size


@given(prompts)
def test_chunks_one_after_the_other_are_the_whole_prompt(prompt: PromptPages) -> None:
    """Cut at pages of the writer, as it computes: no page of the reader is sent twice, none left out."""
    cursor, sent = 0, list[int]()
    for num_computed in range(0, prompt.num_tokens, prompt.writer_size):
        end = prompt.num_closed(num_computed)
        sent += range(cursor, end)
        cursor = end
    assert [*sent, *range(cursor, prompt.num_pages)] == list(range(prompt.num_pages))


@given(prompts)
def test_what_is_sent_ends_with_a_page_of_the_writer(prompt: PromptPages) -> None:
    written = tokens_before(prompt.end, 0, prompt.num_pages, prompt.reader_size)
    sent = {token for page in prompt.sources(0, prompt.num_pages) for token in _tokens(page, prompt.writer_size)}
    for page, num_tokens in enumerate(written):
        assert num_tokens == len(sent.intersection(_tokens(page, prompt.reader_size)))
    assert sum(written) >= prompt.num_tokens


def _tokens(page: int, size: int) -> range:
    return range(page * size, (page + 1) * size)
