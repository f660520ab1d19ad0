"""A prompt in the pages of who writes it and of who reads it: the one place where one side is counted in the other.

A ticket counts the reader's pages: its coverage, cursors, announcements and checksums. What a chunk fills are whole
pages of the reader, up to the prompt's end:

    reader   |  0  |  1  |  2  |  3  |  4  |       first, end, num_pages
    writer   |    0    |    1    |    2    |       sources(first, end)
             [ tokens computed )                   num_closed(tokens)
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PromptPages:
    """A prompt of `num_tokens` tokens, in pages of `writer_size` and of `reader_size` tokens."""

    num_tokens: int
    writer_size: int
    """Tokens per page of the writer."""
    reader_size: int

    @property
    def num_pages(self) -> int:
        """Pages of the reader that the whole prompt takes."""
        return -(-self.num_tokens // self.reader_size)

    def num_closed(self, num_computed: int) -> int:
        """Pages of the reader that the first tokens of the prompt fill."""
        return num_computed // self.reader_size

    def sources(self, first: int, end: int) -> range:
        """Pages of the writer that hold the prompt's tokens in the reader's pages [first, end)."""
        start = first * self.reader_size // self.writer_size
        num_tokens = min(end * self.reader_size, self.num_tokens)
        return range(start, max(start, -(-num_tokens // self.writer_size)) if first < end else start)

    @property
    def end(self) -> int:
        """The last token that is sent lies before this one: a page of the writer goes out as it is, beyond the prompt's
        end too."""
        return -(-self.num_tokens // self.writer_size) * self.writer_size


def tokens_before(end: int, first: int, num_pages: int, page_size: int) -> list[int]:
    """Tokens before token `end`, in each page from index `first` on."""
    return [max(0, min(page_size, end - page * page_size)) for page in range(first, first + num_pages)]
