"""Lists of workers: what is an entry, what it is called, what is refused and how."""

import pytest

from deltaserve.core.ids import Role
from deltaserve.settings.worker_list import is_host, parse_worker, parse_workers


@pytest.mark.parametrize(
    ("text", "name", "url"),
    [
        ("prefill@10.0.0.1:8998", "prefill-10.0.0.1:8998", "tcp://10.0.0.1:8998"),
        ("decode@gpu-7.example.com:1", "decode-gpu-7.example.com:1", "tcp://gpu-7.example.com:1"),
        ("big_one=decode@gpu-7:65535", "big_one", "tcp://gpu-7:65535"),
        ("decode@10.0.0.1:08999", "decode-10.0.0.1:8999", "tcp://10.0.0.1:8999"),
        ("decode@pod-0.decode.svc.:1", "decode-pod-0.decode.svc.:1", "tcp://pod-0.decode.svc.:1"),
    ],
)
def test_an_entry_is_a_worker(text: str, name: str, url: str) -> None:
    entry = parse_worker(text)
    assert (entry.name, entry.url) == (name, url)
    assert entry.role is Role(text.partition("=")[2].partition("@")[0] or text.partition("@")[0])


def test_a_file_has_one_in_a_line() -> None:
    text = """
    # the first machine
    prefill@10.0.0.1:8998   # two cards
    d0=decode@10.0.0.1:8999, decode@10.0.0.2:8999,
    """
    assert [entry.name for entry in parse_workers(text)] == ["prefill-10.0.0.1:8998", "d0", "decode-10.0.0.2:8999"]
    assert parse_workers("# nobody\n") == ()


def test_a_service_is_a_worker_at_each_address() -> None:
    at = parse_worker("prefill@prefill.default.svc:8998").at("10.0.0.9")
    assert (at.name, at.url, at.role) == ("prefill-10.0.0.9:8998", "tcp://10.0.0.9:8998", Role.PREFILL)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("10.0.0.1:8998", "is no worker such as prefill@10.0.0.1:8998"),
        ("unified@10.0.0.1:8998", "is no worker"),
        ("prefill@10.0.0.1", "is no worker"),
        ("decode@a:\u0663", "is no worker"),
        ("decode@a..b:1", "is no worker"),
        ("decode@a-.b:1", "is no worker"),
        (f"decode@{'a' * 64}.b:1", "is no worker"),
        (f"decode@{'a.' * 126}bc:1", "is no worker"),
        ("prefill@10.0.0.1:0", "port must be from 1 to 65535"),
        ("prefill@10.0.0.1:65536", "port must be from 1 to 65535"),
        ("=prefill@10.0.0.1:8998", "is no worker"),
        ("a b=prefill@10.0.0.1:8998", "is no worker"),
        ("prefill@10.0.0.1:8998\ndecode@10.0.0.1:8998", "10.0.0.1:8998: listed twice"),
        ("a=prefill@h:1,a=decode@h:2", "a: listed twice"),
        ("<html>" + "x" * 10_000, "is no worker"),
    ],
)
def test_what_is_no_list_is_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        parse_workers(text)
    assert len(str(caught.value)) < 250


def test_a_host_has_the_length_that_name_servers_take() -> None:
    """The one rule for entries of lists and for `bootstrap_host`."""
    longest = "a." * 126 + "b"
    assert is_host(longest) and is_host("10.0.0.1") and is_host("pod-0.decode.svc.")
    assert not is_host(f"a.{longest}") and not is_host("a..b") and not is_host("")
