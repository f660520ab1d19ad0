"""Bytes no HTTP library would send, and the answer that must come back before the connection closes."""

from collections.abc import Iterator
from dataclasses import dataclass

from deltaserve.server.http_parser import MAX_EMPTY_LINES
from deltaserve.server.settings import HttpLimits
from tests.server.corpus import completion

BODY = completion({})
CHUNKED = ("Content-Type: application/json", "Transfer-Encoding: chunked")
_MALFORMED, _LARGE = (400, "invalid_request"), (431, "headers_too_large")


@dataclass(frozen=True, slots=True)
class RawCase:
    """Bytes on a fresh connection. A good request follows them: it must not be served."""

    name: str
    data: bytes
    status: int
    code: str
    is_for_key_owners: bool = False
    """Well formed as far as it came: where keys are in use, the missing one is told first."""


def request(*headers: str, body: bytes = b"", line: str = "POST /v1/completions HTTP/1.1") -> bytes:
    """A request head as written, and its body."""
    head = "\r\n".join([line, "Host: localhost", *headers])
    return head.encode("latin-1") + b"\r\n\r\n" + body


def post(body: bytes, *headers: str) -> bytes:
    """A right POST to /v1/completions."""
    return request("Content-Type: application/json", f"Content-Length: {len(body)}", *headers, body=body)


def parse(answer: bytes) -> tuple[int, dict[str, str], bytes]:
    """Status, headers in lower case, body."""
    head, _, body = answer.partition(b"\r\n\r\n")
    line, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, _, value in (text.partition(": ") for text in lines)}
    return int(line.split()[1]), headers, body


def _framing() -> Iterator[tuple[str, bytes]]:
    """Two ways to tell where the body ends, or none that can be trusted."""
    length = f"Content-Length: {len(BODY)}"
    yield "length_after_chunked", request(*CHUNKED, length, body=b"0\r\n\r\n")
    yield "length_before_chunked", request(length, *CHUNKED, body=b"0\r\n\r\n")
    yield "length_zero_and_chunked", request("Content-Length: 0", *CHUNKED, body=b"0\r\n\r\n")
    yield "two_lengths", request("Content-Length: 3", "Content-Length: 4", body=b"abcd")
    yield "length_list", request("Content-Length: 5, 6", body=b"hello")
    for value in ("-1", "+5", "0x5", "5_0", "5.0", "1e1", "five", "", " ", "5 5", "5;", "\xb2", "9" * 30):
        yield f"length_{value!r}", request(f"Content-Length: {value}", body=b"hello")
    for value in ("gzip, chunked", "xchunked", "chunked, chunked", "chunked, gzip", "identity", "chunked;x=1", "", "x"):
        yield f"encoding_{value!r}", request(f"Transfer-Encoding: {value}", body=b"0\r\n\r\n")
    yield "encoding_twice", request(*CHUNKED, "Transfer-Encoding: chunked", body=b"0\r\n\r\n")
    yield "encoding_hidden_twice", request(*CHUNKED, "Transfer-Encoding: identity", body=b"0\r\n\r\n")


def _chunks() -> Iterator[tuple[str, bytes]]:
    for name, body in {
        "size_zz": b"zz\r\nhello\r\n0\r\n\r\n",
        "size_empty": b"\r\nhello\r\n0\r\n\r\n",
        "size_negative": b"-5\r\nhello\r\n0\r\n\r\n",
        "size_plus": b"+5\r\nhello\r\n0\r\n\r\n",
        "size_0x": b"0x5\r\nhello\r\n0\r\n\r\n",
        "size_underscore": b"1_0\r\nhello\r\n0\r\n\r\n",
        "size_huge": b"f" * 40 + b"\r\nhello",
        "line_feed": b"5\nhello\n0\n\n",
        "line_feed_behind_an_extension": b"5;a\nhello\r\n0\r\n\r\n",
        "line_feed_of_the_last": b"5\r\nhello\r\n0\n\r\n",
        "line_feed_behind_data": b"5\r\nhello\n0\r\n\r\n",
        "line_feed_of_all_but_one": b"5\nhello\n0\n\r\n",
        "longer_than_said": b"2\r\nhello\r\n0\r\n\r\n",
        "shorter_than_said": b"6\r\nhello\r\n0\r\n\r\n",
        "no_line_end_after_data": b"5\r\nhello0\r\n\r\n",
        "bare_newline": b"5\rhello\r\n0\r\n\r\n",
        "bad_trailer": b"5\r\nhello\r\n0\r\nbad trailer\r\n\r\n",
    }.items():
        yield f"chunk_{name}", request(*CHUNKED, body=body)


def _announced() -> Iterator[tuple[str, bytes]]:
    """Chunks whose first line announces more than a body may have. Their data never comes."""
    most = HttpLimits().max_body_bytes
    yield "chunk_ends_at_2_64", request(*CHUNKED, body=b"f" * 16 + b"\r\n")
    yield "chunk_of_20_digits", request(*CHUNKED, body=b"F" * 20 + b"\r\nhello")
    yield "chunk_above_limit", request(*CHUNKED, body=b"%x\r\n" % (most + 1))
    yield "chunk_above_limit_with_extension", request(*CHUNKED, body=b"%020X;a=b\r\nhello" % (most + 1))
    yield "chunk_above_what_is_left", request(*CHUNKED, body=b"5\r\nhello\r\n%x\r\n" % (most - 4))
    many = b"4000\r\n" + bytes(0x4000) + b"\r\n"
    yield "chunk_above_what_is_left_of_many", request(*CHUNKED, body=many * 9 + b"%x\r\n" % (most - 9 * 0x4000 + 1))


def _framing_only() -> Iterator[tuple[str, bytes]]:
    """Bodies that are next to nothing but lines of chunks."""
    yield "chunks_of_one_byte", request(*CHUNKED, body=b"1\r\n \r\n" * 50_000)
    yield "extensions", request(*CHUNKED, body=(b"10;" + b"x" * 1000 + b"\r\n" + b" " * 16 + b"\r\n") * 200)


def _heads() -> Iterator[tuple[str, bytes]]:
    yield "space_before_colon", request("Content-Length : 5", body=b"hello")
    yield "tab_before_colon", request("Content-Length\t: 5", body=b"hello")
    yield "no_colon", request("X-A")
    yield "empty_name", request(": x")
    yield "obs_fold_first", b"GET /health HTTP/1.1\r\n Host: x\r\n\r\n"
    yield "newline_in_name", request("X-A\nB: 1")
    yield "bad_name", request("X@A: 1")
    yield "non_ascii_name", request("X-\xe4: 1")
    for name, char in {"null": "\x00", "return": "\r"}.items():
        yield f"{name}_in_value", request(f"X-A: a{char}b")
    yield "no_host", b"GET /health HTTP/1.1\r\n\r\n"
    yield "two_hosts", b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"


def _lines() -> Iterator[tuple[str, bytes]]:
    for line in (
        "GET /health HTTP/9.9", "GET /health HTTP/2.0", "GET /health HTTP/1.1x", "GET /health http/1.1",
        "GET /health", "GET", "GET  /health HTTP/1.1", "GET /a b HTTP/1.1", " GET /health HTTP/1.1",
        "G@T /health HTTP/1.1", "GET /health HTTP/1.1 x", "GET\t/health\tHTTP/1.1", "GET /\x01 HTTP/1.1",
        "GET /\xe4 HTTP/1.1", "/health HTTP/1.1", "PRI * HTTP/2.0",
    ):  # fmt: skip
        yield f"line_{line!r}", request(line=line)
    yield "tls", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
    yield "zeros", bytes(64)
    yield "socks", b"\x05\x01\x00"
    yield "worker_frame", b"dS\x01" + bytes(40)
    yield "ssh", b"SSH-2.0-OpenSSH_9.6\r\n"
    yield "redis", b"*1\r\n$4\r\nPING\r\n"


def _limits() -> Iterator[RawCase]:
    many = [f"X-{number}: 1" for number in range(101)]
    yield RawCase("headers_101", request(*many), *_LARGE)
    yield RawCase("headers_5000", request(*[f"X-{number}: 1" for number in range(5000)]), *_LARGE)
    yield RawCase("headers_of_nothing", request(*["a:"] * 7000), *_LARGE)
    yield RawCase("headers_of_nothing_in_a_trailer", request(*CHUNKED, body=b"0\r\n" + b"a:\r\n" * 7000), *_LARGE)
    yield RawCase("extension_endless", request(*CHUNKED, body=b"10;" + b"x" * 200_000), *_LARGE)
    yield RawCase("trailer_endless", request(*CHUNKED, body=b"2\r\n{}\r\n0\r\nx:" + b"y" * 200_000), *_LARGE)
    yield RawCase("folds", request("X-A: b", *[" "] * 7000), *_LARGE)
    yield RawCase("header_17_kib", request("X-A: " + "y" * 17_000), *_LARGE)
    yield RawCase("header_endless", b"GET /health HTTP/1.1\r\nX: " + b"y" * 200_000, *_LARGE)
    yield RawCase("header_name_endless", b"GET /health HTTP/1.1\r\n" + b"y" * 200_000, *_LARGE)
    yield RawCase("uri_9_kib", request(line=f"GET /{'y' * 9000} HTTP/1.1"), 414, "uri_too_long")
    yield RawCase("query_9_kib", request(line=f"GET /health?{'y' * 9000} HTTP/1.1"), 414, "uri_too_long")
    yield RawCase("line_endless", b"GET /" + b"y" * 200_000, *_LARGE)
    # The parser reads a version of one digit each: this one comes to the application.
    yield RawCase("http_0.9", request(line="GET /health HTTP/0.9"), 400, "invalid_request")


RAW_CASES = [
    *(RawCase(name, data, *_MALFORMED) for part in (_framing, _chunks, _heads, _lines) for name, data in part()),
    *_limits(),
    *(RawCase(name, data, *_MALFORMED, is_for_key_owners=True) for name, data in _framing_only()),
    *(RawCase(name, data, 413, "body_too_large", is_for_key_owners=True) for name, data in _announced()),
]


def _chunked(body: bytes, trailers: bytes = b"") -> bytes:
    return b"%x\r\n%s\r\n0\r\n%s\r\n" % (len(body), body, trailers)


def _get(path: str, *headers: str, method: str = "GET") -> bytes:
    return request(*headers, line=f"{method} {path} HTTP/1.1")


def _typed(kind: str) -> bytes:
    return request(f"Content-Type: {kind}", f"Content-Length: {len(BODY)}", body=BODY)


def _absolute(url: str) -> bytes:
    head = ("Content-Type: application/json", f"Content-Length: {len(BODY)}")
    return request(*head, body=BODY, line=f"POST {url} HTTP/1.1")


_OLD_HEAD = b"POST /v1/completions HTTP/1.0\r\nConnection: keep-alive\r\nContent-Type: application/json\r\n"

ODD_CASES: dict[str, tuple[bytes, tuple[int, ...]]] = {
    "pipelined": (post(BODY) * 3, (200, 200, 200)),
    "pipelined behind a stream": (post(completion({"stream": True})) + _get("/v1/models"), (200, 200)),
    "pipelined by the hundred": (_get("/health") * 200, (200,) * 200),
    "pipelined behind a refusal": (post(b"{") + post(BODY), (400, 200)),
    "a trailer": (request(*CHUNKED, body=_chunked(BODY, b"X-T: 1\r\n")), (200,)),
    "trailers that would frame": (
        request(*CHUNKED, body=_chunked(BODY, b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n")),
        (200,),
    ),
    "a chunk extension": (request(*CHUNKED, body=b'%x;a="b"\r\n%s\r\n0;c\r\n\r\n' % (len(BODY), BODY)), (200,)),
    "chunks of one byte": (
        request(*CHUNKED, body=b"".join(b"1\r\n%c\r\n" % char for char in BODY) + b"0\r\n\r\n"),
        (200,),
    ),
    "20,000 chunks of one byte": (request(*CHUNKED, body=b"1\r\n \r\n" * 20_000 + _chunked(BODY)), (200,)),
    "100,000 chunks of two bytes": (request(*CHUNKED, body=b"2\r\n  \r\n" * 100_000 + _chunked(BODY)), (200,)),
    "empty lines before a request": (b"\r\n" * MAX_EMPTY_LINES + post(BODY), (200,)),
    "line feeds before a request": (b"\n" * MAX_EMPTY_LINES + post(BODY), (200,)),
    "an empty line behind a body": ((post(BODY) + b"\r\n") * 3, (200, 200, 200)),
    "an empty line behind chunks": ((request(*CHUNKED, body=_chunked(BODY)) + b"\r\n") * 2, (200, 200)),
    "a head of lines that end in line feeds": (post(BODY).replace(b"\r\n", b"\n"), (200,)),
    "a whole URL": (_absolute("http://localhost/v1/completions"), (200,)),
    "a whole URL in capitals": (_absolute("HTTPS://LOCALHOST:1/v1/completions?x"), (200,)),
    "a whole URL without a path": (_get("http://localhost"), (307,)),
    "a whole URL of another host": (_absolute("http://evil.example/v1/completions"), (421,)),
    "a whole URL with a user": (_absolute("http://localhost@evil.example/v1/completions"), (421,)),
    "a whole URL without a host": (_absolute("http:///v1/completions"), (421,)),
    "a URL of another scheme": (_absolute("ftp://localhost/v1/completions"), (404,)),
    "options of all": (_get("*", method="OPTIONS"), (404,)),
    "options of one": (_get("/v1/completions", method="OPTIONS"), (405,)),
    "a tunnel": (_get("localhost:80", method="CONNECT"), (404,)),
    "a method in lower case": (_get("/health", method="get"), (405,)),
    "a method of 5,000 letters": (_get("/health", method="X" * 5000), (405,)),
    "an upgrade": (_get("/health", "Connection: Upgrade", "Upgrade: websocket"), (200,)),
    "an upgrade of a POST": (post(BODY, "Connection: Upgrade", "Upgrade: h2c"), (200,)),
    "HTTP/1.0": (_OLD_HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(BODY), BODY), (200,)),
    "HTTP/1.0 without a length": (_OLD_HEAD + b"\r\n", (400,)),
    "a value in Latin-1": (post(BODY, "X-A: \xff\xfe", "X-Request-Id: \xe4", "Authorization: Bearer \xff"), (200,)),
    "an empty host": (b"GET /v1/models HTTP/1.1\r\nHost:\r\n\r\n", (421,)),
    "half an address as host": (b"GET /v1/nothing HTTP/1.1\r\nHost: [::1\r\n\r\n", (421,)),
    "a path of percent signs": (_get("/%zz%ff%00%0d%0a"), (404,)),
    "a name that is no UTF-8": (_get("/v1/models/%ff"), (404,)),
    "type in capitals": (_typed("APPLICATION/JSON; Charset=UTF-8"), (200,)),
    "type with an empty parameter": (_typed("application/json;"), (200,)),
    "charset in quotes": (_typed('application/json;charset="utf-8"'), (200,)),
    "a parameter behind the charset": (_typed("application/json; charset=utf-8; v=1"), (200,)),
    "a parameter that looks like one": (_typed("application/json; x=charset=latin-1"), (200,)),
    "two charsets": (_typed("application/json; charset=utf-8; charset=latin-1"), (415,)),
    "a name twice": (post(b'{"model": "nope", ' + BODY[1:]), (200,)),
    "a deadline beyond any float": (post(BODY, "X-Deadline-Seconds: " + "9" * 400), (200,)),
}
"""Name |-> what HTTP allows and clients seldom send, and the status of each answer. The connection stays open, if it is
HTTP/1.1 and the host is right."""
