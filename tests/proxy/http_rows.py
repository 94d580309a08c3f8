"""What RFC 9112, RFC 9110 and RFC 8259 ask of a server that passes requests on to another one: a row for each rule."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable

HALF_CLOSE, AWAIT_100 = "the client ends its side", "the client waits for 100 Continue"
BODY_LIMIT = 64 << 10  # of both servers
NOTHING = 0  # a status: the connection ends without an answer


@dataclass
class Row:
    """`sent` gets one of the statuses of `answers`, for each request in it; the engine behind has `got` where the first answer is of the engine, and nothing otherwise."""

    section: str
    what: str
    sent: bytes | list[bytes | str]
    answers: list[set[int]]
    got: list[tuple[bytes, bytes, bytes | None]] = field(default_factory=list)
    kept: bool | None = None  # the connection serves another request; None: both are right
    reply: bytes | None = None  # of the engine; None: 200 with {}
    check: Callable[[Any], object] | None = None  # more of an outcome that has to be true
    may_repeat: bool = False  # the engine may get it twice: its connection may have met its end while it was idle

    @property
    def pieces(self) -> list[bytes | str]:
        return [self.sent] if isinstance(self.sent, bytes) else self.sent

    @property
    def half_closes(self) -> bool:
        return HALF_CLOSE in self.pieces


ANY = (b"GET", b"/v1/any", b"")
LATE = (b"GET", b"/v1/late", b"")  # an engine may see it after its row, whose client has gone
POSTED = (b"POST", b"/v1/any", b"hello")
GET, POST = b"GET /v1/any HTTP/1.1\r\nHost: a\r\n", b"POST /v1/any HTTP/1.1\r\nHost: a\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
LAST = b"0\r\n\r\n"
HELLO = b"5\r\nhello\r\n"
BAD, OK, EITHER = {400}, {200}, {200, 400}
LARGE = b"x" * (3 * BODY_LIMIT)


def header(line: bytes) -> bytes:
    return GET + line + b"\r\n\r\n"


def length(value: bytes, more: bytes = b"") -> bytes:
    return POST + b"Content-Length: " + value + b"\r\n" + more + b"\r\nhello"


def coding(value: bytes, more: bytes = b"") -> bytes:
    return POST + b"Transfer-Encoding: " + value + b"\r\n" + more + b"\r\n" + HELLO + LAST


def chunks(text: bytes) -> bytes:
    return CHUNKED + text


def has(name: bytes, value: bytes | None) -> Callable[[Any], bool]:
    """The engine has got this value of a header; None: has not got the header."""
    return lambda outcome: not outcome.heads or outcome.heads[0].get(name) == value


def target(text: bytes, answers: set[int], got: bytes | None = None) -> Row:
    return Row("9112 3.2", "target " + repr(text[:40]), b"GET " + text + b" HTTP/1.1\r\nHost: a\r\n\r\n", [answers], [(b"GET", got or text, b"")])


SYNTAX = [
    Row("9112 2.2", "an empty line before a request", b"\r\n" + GET + b"\r\n", [OK], [ANY], True),
    Row("9112 2.2", "lines that end in LF alone", GET.replace(b"\r\n", b"\n") + b"\n", [EITHER], [ANY]),
    Row("9112 2.2", "CR alone in a value", header(b"X: a\rY: b"), [EITHER], [ANY], check=has(b"y", None)),
    Row("9112 2.2", "CR alone instead of an end of line", b"GET /v1/any HTTP/1.1\rHost: a\r\n\r\n", [BAD], kept=False),
    Row("9112 2.2", "a blank before the first header", b"GET /v1/any HTTP/1.1\r\n X: a\r\nHost: a\r\n\r\n", [EITHER], [ANY], check=has(b"x", None)),
    Row("9112 3", "two blanks in the request line", b"GET  /v1/any HTTP/1.1\r\nHost: a\r\n\r\n", [EITHER], [ANY]),
    Row("9112 3", "a blank behind the version", b"GET /v1/any HTTP/1.1 \r\nHost: a\r\n\r\n", [EITHER], [ANY]),
    Row("9112 3", "a tab in the request line", b"GET\t/v1/any HTTP/1.1\r\nHost: a\r\n\r\n", [EITHER], [ANY]),
    Row("9112 3", "a blank in the target", b"GET /v1/any x HTTP/1.1\r\nHost: a\r\n\r\n", [BAD]),
    Row("9112 3", "no version", b"GET /v1/any\r\n\r\n", [{400, 505, NOTHING}], kept=False),
    Row("9112 3", "a request line of garbage", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n\r\n", [BAD], kept=False),
    Row("9112 3.1", "a method that no token is", b"G@T /v1/any HTTP/1.1\r\nHost: a\r\n\r\n", [{400, 405, 501}]),
    Row("9110 9.1", "a method in small letters is another one", b"get /v1/any HTTP/1.1\r\nHost: a\r\n\r\n", [{200, 400, 405, 501}], [(b"get", b"/v1/any", b"")]),
    Row("9110 9.1", "a method that is not known", b"FOO /v1/any HTTP/1.1\r\nHost: a\r\n\r\n", [{200, 400, 405, 501}], [(b"FOO", b"/v1/any", b"")]),
    Row("9112 3", "a method without end", b"A" * 20_000 + b" /v1/any HTTP/1.1\r\nHost: a\r\n\r\n", [{400, 414, 431, 501}], kept=False),
    Row("9110 9.3.6", "CONNECT", b"CONNECT a:80 HTTP/1.1\r\nHost: a:80\r\n\r\n", [{400, 405, 501}]),
    Row("9110 9.3.8", "TRACE", b"TRACE /v1/any HTTP/1.1\r\nHost: a\r\nCookie: a\r\n\r\n", [{405, 501}]),
    Row("9112 3", "a target without end", b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", [{414}], kept=False),
    Row("9110 5.4", "headers without end", GET + b"X: " + b"a" * 80_000 + b"\r\n\r\n", [{400, 431}], kept=False),
    Row("9110 5.4", "more headers than fit", GET + b"X: a\r\n" * 20_000 + b"\r\n", [{400, 431}], kept=False),
    target(b"/v1/any?a=%2F&b=c/../d", OK),
    target(b"http://other/v1/any?a", OK, b"/v1/any?a"),
    target(b"HTTP://a:80/v1/any", OK, b"/v1/any"),
    target(b"http:///v1/any", BAD),
    target(b"ftp://a/v1/any", {400, 404, 421}),
    target(b"*", {400, 404}),
    target(b"v1/any", {400, 404}),
    target(b"/v1/any#x", {400, 404}),
    target(b"/v1/\xff", {200, 400}),
    target(b"/v1/a\x01", {400, 404}),
    target(b"/v1/a\x00b", {400, NOTHING}),
    target(b"/v1/%00", {200, 400}),
    target(b"/v1/%zz", {200, 400}),
    Row("9110 9.3.7", "OPTIONS of the server itself", b"OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n", [{200, 204, 400, 404, 405, 501}], [(b"OPTIONS", b"*", b"")]),
    Row("9110 9.3.7", "OPTIONS", b"OPTIONS /v1/any HTTP/1.1\r\nHost: a\r\n\r\n", [OK], [(b"OPTIONS", b"/v1/any", b"")], True),
    Row("9112 2.3", "HTTP/1.2", GET.replace(b"1.1", b"1.2") + b"\r\n", [{200, 505}], [ANY]),
    Row("9112 2.3", "HTTP/2.0", GET.replace(b"1.1", b"2.0") + b"\r\n", [{400, 505}], kept=False),
    Row("9112 2.3", "HTTP/0.9 with its name", GET.replace(b"1.1", b"0.9") + b"\r\n", [{400, 505}], kept=False),
    Row("9112 2.3", "HTTP/1.10", GET.replace(b"1.1", b"1.10") + b"\r\n", [BAD], kept=False),
    Row("9112 2.3", "http/1.1", GET.replace(b"HTTP", b"http") + b"\r\n", [BAD], kept=False),
    Row("9112 2.3", "HTTP/1.", GET.replace(b"1.1", b"1.") + b"\r\n", [BAD], kept=False),
    Row("9112 3.2", "no Host", b"GET /v1/any HTTP/1.1\r\n\r\n", [BAD]),
    Row("9112 3.2", "two Hosts", header(b"Host: b"), [BAD]),
    Row("9112 3.2", "two equal Hosts", header(b"Host: a"), [BAD]),
    Row("9112 3.2", "a Host that is none", b"GET /v1/any HTTP/1.1\r\nHost: a/b\r\n\r\n", [BAD]),
    Row("9112 3.2", "a Host with a blank", b"GET /v1/any HTTP/1.1\r\nHost: a b\r\n\r\n", [BAD]),
    Row("9112 3.2", "a list of Hosts", b"GET /v1/any HTTP/1.1\r\nHost: a, b\r\n\r\n", [BAD]),
    Row("9112 3.2", "a Host with a user", b"GET /v1/any HTTP/1.1\r\nHost: u@a\r\n\r\n", [EITHER], [ANY]),
    Row("9112 3.2", "an address of IPv6", b"GET /v1/any HTTP/1.1\r\nHost: [::1]:8080\r\n\r\n", [OK], [ANY]),
    Row("9112 3.2", "a port that is none", b"GET /v1/any HTTP/1.1\r\nHost: a:b\r\n\r\n", [EITHER], [ANY]),
    Row("9112 3.2", "an empty Host", b"GET /v1/any HTTP/1.1\r\nHost:\r\n\r\n", [EITHER], [ANY]),
    Row("9112 3.2", "no Host in HTTP/1.0", b"GET /v1/any HTTP/1.0\r\n\r\n", [OK], [ANY], False),
    Row("9112 5.1", "a blank before the colon", header(b"X : a"), [BAD]),
    Row("9112 5.1", "a tab before the colon", header(b"X\t: a"), [BAD]),
    Row("9112 5.1", "no blank behind the colon", header(b"X:a"), [OK], [ANY], True, check=has(b"x", b"a")),
    Row("9112 5.1", "blanks around a value", header(b"X: \t a b \t"), [OK], [ANY], True, check=has(b"x", b"a b")),
    Row("9110 5.5", "bytes above 127 in a value", header(b"X: a\xff\xc3"), [OK], [ANY], True, check=has(b"x", b"a\xff\xc3")),
    Row("9110 5.5", "a tab in a value", header(b"X: a\tb"), [OK], [ANY], True, check=has(b"x", b"a\tb")),
    Row("9110 5.5", "an empty value", header(b"X:"), [OK], [ANY], True),
    Row("9110 5.5", "NUL in a value", header(b"X: a\0b"), [{200, 400, NOTHING}], [ANY], check=has(b"x", None)),
    Row("9110 5.5", "another control character in a value", header(b"X: a\x01b"), [EITHER], [ANY]),
    Row("9110 5.1", "NUL in a name", header(b"X\0Y: a"), [{200, 400, NOTHING}], [ANY], check=has(b"x", None)),
    Row("9110 5.1", "a name that no token is", header(b"X(: a"), [EITHER], [ANY], check=has(b"x(", None)),
    Row("9110 5.1", "a blank in a name", header(b"X Y: a"), [EITHER], [ANY], check=has(b"x y", None)),
    Row("9110 5.1", "an empty name", header(b": a"), [EITHER], [ANY]),
    Row("9112 5", "a line without a colon", header(b"X"), [EITHER], [ANY]),
    Row("9112 5.2", "a value in two lines", header(b"X: a\r\n b"), [EITHER], [ANY], check=lambda outcome: not outcome.heads or b"\n" not in outcome.heads[0].get(b"x", b"")),
    Row("9112 5.2", "a length in two lines", POST + b"Content-Length:\r\n 5\r\n\r\nhello", [EITHER], [POSTED]),
    Row("9110 5.3", "a header twice", header(b"X: a\r\nX: b"), [OK], [ANY], True, check=has(b"x", b"a, b")),
    Row("9110 7.6.1", "a header of the connection", header(b"Connection: x-hop\r\nX-Hop: a"), [OK], [ANY], True, check=has(b"x-hop", None)),
    Row("9110 7.6.1", "in the second of two lists", header(b"Connection: keep-alive\r\nConnection: a ,, X-Hop\r\nX-Hop: a"), [OK], [ANY], True, check=has(b"x-hop", None)),
    Row("9110 7.6.1", "the length as a header of the connection", POST + b"Connection: content-length\r\nContent-Length: 5\r\n\r\nhello", [EITHER], [POSTED]),
    Row("9110 7.6.1", "headers of this hop", header(b"Keep-Alive: timeout=5\r\nProxy-Connection: keep-alive\r\nTE: trailers\r\nTrailer: x"), [OK], [ANY], True, check=lambda outcome: not outcome.heads or not {b"keep-alive", b"proxy-connection", b"te", b"trailer"} & set(outcome.heads[0])),
    Row("9110 7.8", "an upgrade that is not served", header(b"Connection: Upgrade\r\nUpgrade: websocket"), [OK], [ANY], check=has(b"upgrade", None)),
    Row("9110 7.6.3", "Via", header(b"Via: 1.0 before"), [OK], [ANY], True, check=lambda outcome: not outcome.heads or outcome.heads[0].get(b"via", b"").startswith(b"1.0 before, 1.1 ")),
]

FRAMING = [
    Row("9112 6.2", "a length", length(b"5"), [OK], [POSTED], True),
    Row("9112 6.2", "a length of 0", POST + b"Content-Length: 0\r\n\r\n", [OK], [(b"POST", b"/v1/any", b"")], True),
    Row("9112 6.3", "neither length nor coding", POST + b"\r\n", [{200, 411}], [(b"POST", b"/v1/any", b"")], True),
    Row("9110 9.3.1", "GET with a body", b"GET /v1/any HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhello", [EITHER], [(b"GET", b"/v1/any", b"hello")]),
    Row("9110 8.6", "leading zeros", length(b"0000000000000000000000005"), [EITHER], [POSTED]),
    Row("9112 6.2", "blanks around the length", length(b" \t5 \t"), [OK], [POSTED], True),
    Row("9112 6.3", "a length twice", length(b"5", b"Content-Length: 5\r\n"), [EITHER], [POSTED]),
    Row("9112 6.3", "a length twice in a list", length(b"5, 5"), [EITHER], [POSTED]),
    Row("9112 6.3", "two lengths", length(b"5", b"Content-Length: 0\r\n"), [BAD], kept=False),
    Row("9112 6.3", "two lengths in a list", length(b"5, 6"), [BAD], kept=False),
    *(Row("9112 6.3", "length " + repr(value), length(value), [BAD], kept=False) for value in (b"", b"+5", b"-5", b"0x5", b"5 5", b"5,", b",5", b"5.0", b"5;", b"five", b"5\x0b", "\u0665".encode())),
    *(Row("9112 6.3", "length " + repr(value), length(value), [{400, 413}], kept=False) for value in (b"18446744073709551621", b"9223372036854775808", b"9" * 40)),
    Row("9112 6.1", "length and coding", coding(b"chunked", b"Content-Length: 5\r\n"), [EITHER], [POSTED], False),
    Row("9112 6.1", "length and coding, the length first", POST + b"Content-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n" + LAST + b"G", [EITHER], [(b"POST", b"/v1/any", b"")], False),
    Row("9112 7", "CHUNKED", coding(b"CHUNKED"), [OK], [POSTED], True),
    Row("9112 6.1", "gzip, chunked", coding(b"gzip, chunked"), [{400, 501}], kept=False),
    Row("9112 6.3", "chunked, gzip", coding(b"chunked, gzip"), [{400, 501}], kept=False),
    Row("9112 6.1", "chunked, chunked", coding(b"chunked, chunked"), [{400, 501}], kept=False),
    Row("9112 6.1", "chunked in two lines", coding(b"chunked", b"Transfer-Encoding: chunked\r\n"), [{400, 501}], kept=False),
    Row("9112 6.1", "identity", length(b"5", b"Transfer-Encoding: identity\r\n"), [{400, 501}], kept=False),
    Row("9112 6.1", "chunked, then another line of identity", coding(b"chunked", b"Transfer-Encoding: identity\r\n"), [{400, 501}], kept=False),
    *(Row("9112 6.1", "coding " + repr(value), coding(value), [{400, 501}], kept=False) for value in (b"xchunked", b"chunked;a=b", b'"chunked"', b"\x0bchunked", b"chunked\x00", b"chunked chunked", b"")),
    Row("9110 5.6.1", "an empty element before chunked", coding(b", chunked"), [{200, 400, 501}], [POSTED]),
    Row("9112 5.1", "a blank between Transfer-Encoding and its colon", POST + b"Transfer-Encoding : chunked\r\n\r\n" + LAST, [BAD], kept=False),
    Row("9112 6.1", "a coding in HTTP/1.0", coding(b"chunked").replace(b"HTTP/1.1", b"HTTP/1.0"), [EITHER], [POSTED], False),
    Row("9112 6.1", "a coding in HTTP/1.0 that would keep the connection", coding(b"chunked", b"Connection: keep-alive\r\nContent-Length: 5\r\n").replace(b"HTTP/1.1", b"HTTP/1.0"), [EITHER], [POSTED], False),
    Row("9112 7.1", "chunks", chunks(b"2\r\nhe\r\n003\r\nllo\r\n000\r\n\r\n"), [OK], [POSTED], True),
    Row("9112 7.1", "hexadecimal sizes of both cases", chunks(b"a\r\n0123456789\r\nA\r\n0123456789\r\n" + LAST), [OK], [(b"POST", b"/v1/any", b"0123456789" * 2)], True),
    Row("9112 7.1", "a size with many zeros", chunks(b"0" * 30 + HELLO + LAST), [EITHER], [POSTED]),
    Row("9112 7.1.1", "extensions", chunks(b'5;a;b=c;d="e;\xff f"\r\nhello\r\n0;x\r\n\r\n'), [OK], [POSTED], True),
    Row("9112 7.1.1", "a blank before an extension", chunks(b"5 ; a = b\r\nhello\r\n" + LAST), [EITHER], [POSTED]),
    Row("9112 7.1.1", "LF in an extension", chunks(b"5;a\nhello\r\n" + LAST), [BAD], kept=False),
    Row("9112 7.1.1", "CR in an extension", chunks(b"5;a\rb\r\nhello\r\n" + LAST), [BAD], kept=False),
    Row("9112 7.1.1", "an extension without end", chunks(b"5;" + b"a" * 200_000 + b"\r\nhello\r\n" + LAST), [{400, 413, 431}], kept=False),
    *(Row("9112 7.1", "size " + repr(size), chunks(size + b"\r\nhello\r\n" + LAST), [BAD], kept=False) for size in (b"", b"+5", b"-5", b"0x5", b" 5", b"5 5", b"g", b"5,", b"10000000000000005", b"f" * 40)),
    Row("9112 7.1", "a size of 63 bits", chunks(b"7fffffffffffffff\r\nhello\r\n" + LAST), [{400, 413}], kept=False),
    Row("9112 7.1", "LF alone behind a size", chunks(b"5\nhello\r\n" + LAST), [BAD], kept=False),
    Row("9112 7.1", "LF alone behind data", chunks(b"5\r\nhello\n" + LAST), [BAD], kept=False),
    Row("9112 7.1", "more data than the size", chunks(b"5\r\nhello!\r\n" + LAST), [BAD], kept=False),
    Row("9112 7.1", "less data than the size", chunks(b"6\r\nhello\r\n" + LAST), [BAD], kept=False),
    Row("9112 7.1", "no data behind the last chunk's CR", chunks(b"0\r\n\rX"), [BAD], kept=False),
    Row("9112 7.1.2", "trailers, which are no headers", chunks(HELLO + b"0\r\nX: a\r\nContent-Length: 9\r\nTransfer-Encoding: gzip\r\n\r\n"), [OK], [POSTED], True, check=has(b"x", None)),
    Row("9112 7.1.2", "trailers that are none", chunks(HELLO + b"0\r\nX : a\r\n\r\n"), [EITHER], [POSTED]),
    Row("9112 7.1.2", "trailers without end", chunks(HELLO + b"0\r\n" + b"X: a\r\n" * 40_000 + b"\r\n"), [{400, 413, 431}], kept=False),
    Row("9112 8", "a body cut short", [length(b"6"), HALF_CLOSE], [{400, NOTHING}]),
    Row("9112 8", "chunks without the last", [chunks(HELLO), HALF_CLOSE], [{400, NOTHING}]),
    Row("9112 8", "chunks without the last line", [chunks(HELLO + b"0\r\n"), HALF_CLOSE], [{400, NOTHING}]),
    Row("9112 8", "headers cut short", [POST, HALF_CLOSE], [{400, NOTHING}]),
    Row("9112 11.2", "a request behind a body of length 0 and chunks", POST + b"Content-Length: 0\r\nTransfer-Encoding: chunked\r\n\r\n" + LAST + b"GET /v1/smuggled HTTP/1.1\r\nHost: a\r\n\r\n", [EITHER], [(b"POST", b"/v1/any", b"")]),
    Row("9112 11.2", "a request inside of a body", POST + b"Content-Length: 44\r\n\r\nGET /v1/smuggled HTTP/1.1\r\nHost: smuggled\r\n\r", [OK], [(b"POST", b"/v1/any", b"GET /v1/smuggled HTTP/1.1\r\nHost: smuggled\r\n\r")]),
    Row("9112 11.2", "a length that another name resembles", POST + b"Content_Length: 5\r\nTransfer_Encoding: chunked\r\n\r\n", [EITHER], [(b"POST", b"/v1/any", b"")]),
]

CONNECTIONS = [
    Row("9112 9.3.2", "three requests at once", GET + b"\r\n" + length(b"5") + GET + b"\r\n", [OK, OK, OK], [ANY, POSTED, ANY], True),
    Row("9112 9.3", "HTTP/1.1 keeps", GET + b"\r\n", [OK], [ANY], True),
    Row("9112 9.6", "close", header(b"Connection: close"), [OK], [ANY], False, check=lambda outcome: outcome.answers[0].get(b"connection").lower() == b"close"),
    Row("9112 9.6", "Close among others", header(b"Connection: a, Close"), [OK], [ANY], False),
    Row("9112 9.6", "close in the second of two lists", header(b"Connection: keep-alive\r\nConnection: close"), [OK], [ANY], False),
    Row("9112 9.6", "nothing is served behind close", header(b"Connection: close") + GET + b"\r\n", [OK], [ANY], False),
    Row("9112 9.3", "HTTP/1.0 ends", GET.replace(b"1.1", b"1.0") + b"\r\n", [OK], [ANY], False),
    Row("9112 9.3", "HTTP/1.0 with keep-alive", GET.replace(b"1.1", b"1.0") + b"Connection: Keep-Alive\r\n\r\n", [OK], [ANY], check=lambda outcome: not outcome.kept or outcome.answers[0].get(b"connection").lower() == b"keep-alive"),
    Row("9112 9.6", "a client that ends its side", [GET.replace(b"any", b"late") + b"\r\n", HALF_CLOSE], [{200, 400, 499, NOTHING}], [LATE], check=lambda outcome: True),
    Row("9112 9.6", "a client that ends its side behind a question for the server itself", [b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n", HALF_CLOSE], [OK]),
    Row("9112 9.6", "a body beyond the limit, which is read no more", [POST + b"Content-Length: %d\r\n\r\n" % len(LARGE) + LARGE[:100], LARGE, LARGE], [{413}], kept=False),
    Row("9112 9.6", "chunks beyond the limit", [CHUNKED + b"20000\r\n" + b"x" * 0x20000 + b"\r\n", b"20000\r\n" + b"x" * 0x20000 + b"\r\n"], [{413}], kept=False),
    Row("9110 10.1.1", "100-continue", [POST + b"Expect: 100-continue\r\nContent-Length: 5\r\n\r\n", AWAIT_100, b"hello"], [OK], [POSTED], True, check=lambda outcome: outcome.interim == [100]),
    Row("9110 10.1.1", "100-Continue, and chunks", [POST + b"Expect: 100-Continue\r\nTransfer-Encoding: chunked\r\n\r\n", AWAIT_100, HELLO + LAST], [OK], [POSTED], True),
    Row("9110 10.1.1", "100-continue with a body that has come", POST + b"Expect: 100-continue\r\nContent-Length: 5\r\n\r\nhello", [OK], [POSTED], True),
    Row("9110 10.1.1", "100-continue without a body", header(b"Expect: 100-continue"), [OK], [ANY], True),
    Row("9110 10.1.1", "100-continue in HTTP/1.0", POST.replace(b"1.1", b"1.0") + b"Expect: 100-continue\r\nContent-Length: 5\r\n\r\nhello", [OK], [POSTED], False, check=lambda outcome: outcome.interim == []),
    Row("9110 10.1.1", "another expectation", header(b"Expect: more"), [{200, 417}], [ANY]),
    Row("9110 10.1.1", "100-continue of a body beyond the limit", [POST + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(LARGE)], [{413}], kept=False),
    Row("9110 10.1.1", "it does not reach the engine", [POST + b"Expect: 100-continue\r\nContent-Length: 5\r\n\r\n", AWAIT_100, b"hello"], [OK], [POSTED], True, check=has(b"expect", None)),
]


def reply(status: bytes, headers: bytes = b"", body: bytes = b"", more: bytes = b"HTTP/1.1 ") -> bytes:
    return more + status + b"\r\n" + headers + b"\r\n" + body


def answered(what: str, section: str, text: bytes, answers: set[int], check: Callable[[Any], object] | None = None, method: bytes = b"GET", kept: bool | None = None, may_repeat: bool = False) -> Row:
    return Row(section, what, method + b" /v1/any HTTP/1.1\r\nHost: a\r\n\r\n", [answers], [(method, b"/v1/any", b"")], kept, text, check, may_repeat)


def whole(body: bytes) -> Callable[[Any], bool]:
    return lambda outcome: outcome.answers[0].complete and outcome.answers[0].body == body


def broken(outcome: Any) -> bool:
    """An error, or an answer that is seen to be cut short."""
    return outcome.answers[0].status >= 500 or not outcome.answers[0].complete


def lacks(*names: bytes) -> Callable[[Any], bool]:
    return lambda outcome: all(outcome.answers[0].get(name) is None for name in names)


ANSWERS = [
    answered("a length", "9112 6.3", reply(b"200 OK", b"Content-Length: 5\r\n", b"hello"), OK, whole(b"hello"), kept=True),
    answered("chunks", "9112 6.3", reply(b"200 OK", b"Transfer-Encoding: chunked\r\n", HELLO + LAST), OK, whole(b"hello"), kept=True),
    answered("chunks with extensions and trailers", "9112 7.1", reply(b"200 OK", b"Transfer-Encoding: chunked\r\nTrailer: X\r\n", b"5;a=b\r\nhello\r\n0\r\nX: a\r\n\r\n"), OK, whole(b"hello"), kept=True),
    answered("the end of the connection", "9112 6.3", reply(b"200 OK", b"Connection: close\r\n", b"hello"), OK, whole(b"hello"), kept=True),
    answered("HTTP/1.0", "9112 6.3", reply(b"200 OK", b"", b"hello", b"HTTP/1.0 "), OK, whole(b"hello"), kept=True),
    answered("length and coding", "9112 6.3", reply(b"200 OK", b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n", HELLO + LAST), {200, 502}, lambda outcome: outcome.answers[0].status == 502 or whole(b"hello")(outcome), kept=True),
    answered("two lengths", "9112 6.3", reply(b"200 OK", b"Content-Length: 5\r\nContent-Length: 3\r\n", b"hello"), {502}, kept=True),
    answered("two lengths in a list", "9112 6.3", reply(b"200 OK", b"Content-Length: 5, 3\r\n", b"hello"), {502}, kept=True),
    answered("a length that is none", "9112 6.3", reply(b"200 OK", b"Content-Length: x\r\n", b"hello"), {502}, kept=True),
    answered("a length beyond 64 bits", "9112 6.3", reply(b"200 OK", b"Content-Length: 99999999999999999999999\r\n", b"hello"), {200, 502}, broken),
    answered("less than the length", "9112 8", reply(b"200 OK", b"Content-Length: 6\r\nConnection: close\r\n", b"hello"), {200, 502}, broken),
    answered("events, and less than the length", "9112 6.3", reply(b"200 OK", b"Content-Type: text/event-stream\r\nContent-Length: 20\r\nConnection: close\r\n", b"data: x\n\n"), OK, lambda outcome: not outcome.answers[0].complete and outcome.answers[0].body == b"data: x\n\n"),
    answered("more than the length", "9112 6.3", reply(b"200 OK", b"Content-Length: 5\r\n", b"helloHTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nsmuggled!"), {200, 502}, lambda outcome: outcome.answers[0].status == 502 or whole(b"hello")(outcome), kept=True),
    answered("chunks cut short", "9112 8", reply(b"200 OK", b"Transfer-Encoding: chunked\r\nConnection: close\r\n", HELLO), {200, 502}, broken),
    answered("a chunk's size that is none", "9112 7.1", reply(b"200 OK", b"Transfer-Encoding: chunked\r\nConnection: close\r\n", b"x\r\nhello\r\n" + LAST), {200, 502}, broken),
    answered("a chunk's size beyond 64 bits", "9112 7.1", reply(b"200 OK", b"Transfer-Encoding: chunked\r\nConnection: close\r\n", b"10000000000000005\r\nhello\r\n" + LAST), {200, 502}, broken),
    answered("a coding that is not known", "9112 6.1", reply(b"200 OK", b"Transfer-Encoding: x, chunked\r\nConnection: close\r\n", HELLO + LAST), {200, 502}, broken),
    answered("no status line", "9112 4", b"hello\r\n\r\n", {502}, kept=True),
    answered("nothing", "9112 8", b"", {502}, kept=True, may_repeat=True),
    answered("a status of two digits", "9110 15", reply(b"20 OK", b"Content-Length: 2\r\n", b"{}"), {502}, kept=True),
    answered("a status above 599", "9110 15", reply(b"999 x", b"Content-Length: 2\r\n", b"{}"), {502, 999}),
    answered("a status of four digits", "9112 4", reply(b"2000 OK", b"Content-Length: 2\r\n", b"{}"), {502}, kept=True),
    answered("a major version of its own", "9112 2.3", reply(b"200 OK", b"Content-Length: 2\r\n", b"{}", b"HTTP/9.1 "), {502}, kept=True),
    answered("no reason", "9112 4", reply(b"200 ", b"Content-Length: 2\r\n", b"{}"), OK, whole(b"{}"), kept=True),
    answered("204", "9110 8.6", reply(b"204 No Content", b"X: a\r\n"), {204}, lacks(b"content-length", b"transfer-encoding"), kept=True),
    answered("304", "9110 15.4.5", reply(b"304 Not Modified", b'ETag: "a"\r\n'), {304}, lambda outcome: lacks(b"content-length", b"transfer-encoding")(outcome) and outcome.answers[0].get(b"etag") == b'"a"', kept=True),
    answered("304 with the length of what there is", "9110 8.6", reply(b"304 Not Modified", b"Content-Length: 99\r\n"), {304}, lambda outcome: outcome.answers[0].get(b"content-length") in (None, b"99"), kept=True),
    answered("HEAD", "9110 9.3.2", reply(b"200 OK", b"Content-Length: 99\r\nX: a\r\n"), OK, lambda outcome: outcome.answers[0].get(b"content-length") in (None, b"99") and outcome.answers[0].get(b"x") == b"a", b"HEAD", True),
    answered("HEAD of chunks", "9110 9.3.2", reply(b"200 OK", b"Transfer-Encoding: chunked\r\n"), OK, lacks(b"content-length"), b"HEAD", True),
    answered("103", "9110 15.2", reply(b"103 Early Hints", b"Link: <a>\r\n") + reply(b"200 OK", b"Content-Length: 5\r\n", b"hello"), OK, lambda outcome: whole(b"hello")(outcome) and lacks(b"link")(outcome), kept=True),
    answered("100 that nobody has asked for", "9110 15.2", reply(b"100 Continue") + reply(b"200 OK", b"Content-Length: 5\r\n", b"hello"), OK, whole(b"hello"), kept=True),
    answered("101 that nobody has asked for", "9110 15.2.2", reply(b"101 Switching Protocols", b"Connection: upgrade\r\nUpgrade: x\r\n", b"hello"), {502}, kept=True),
    answered("headers of the connection", "9110 7.6.1", reply(b"200 OK", b"Connection: x-hop\r\nX-Hop: a\r\nKeep-Alive: timeout=1\r\nContent-Length: 2\r\n", b"{}"), OK, lacks(b"x-hop", b"keep-alive"), kept=True),
    answered("headers of the connection in a second list", "9110 7.6.1", reply(b"200 OK", b"Connection: keep-alive\r\nConnection: x-hop\r\nX-Hop: a\r\nContent-Length: 2\r\n", b"{}"), OK, lacks(b"x-hop"), kept=True),
    answered("Date", "9110 6.6.1", reply(b"200 OK", b"Content-Length: 2\r\n", b"{}"), OK, lambda outcome: b" GMT" in outcome.answers[0].get(b"date"), kept=True),
    answered("a Date of the engine", "9110 6.6.1", reply(b"200 OK", b"Date: Tue, 15 Nov 1994 08:12:31 GMT\r\nContent-Length: 2\r\n", b"{}"), OK, lambda outcome: outcome.answers[0].get(b"date").count(b"GMT") == 1, kept=True),
    answered("a header twice", "9110 5.3", reply(b"200 OK", b"Set-Cookie: a\r\nSet-Cookie: b\r\nContent-Length: 2\r\n", b"{}"), OK, lambda outcome: outcome.answers[0].get(b"set-cookie") == b"a, b", kept=True),
    answered("a value in two lines", "9112 5.2", reply(b"200 OK", b"X: a\r\n b\r\nContent-Length: 2\r\n", b"{}"), {200, 502}, kept=True),
    answered("a blank before the colon", "9112 5.1", reply(b"200 OK", b"X : a\r\nContent-Length: 2\r\n", b"{}"), {200, 502}, kept=True),
    answered("NUL in a value", "9110 5.5", reply(b"200 OK", b"X: a\0b\r\nContent-Length: 2\r\n", b"{}"), {200, 502}, lacks(b"x"), kept=True),
    answered("CR alone in a value", "9112 2.2", reply(b"200 OK", b"X: a\rY: b\r\nContent-Length: 2\r\n", b"{}"), {200, 502}, lambda outcome: b"\r" not in (outcome.answers[0].get(b"x") or b""), kept=True),
]


def completion(value: bytes) -> bytes:
    return b'{"prompt":"a","x":' + value + b',"y":1}'


def posted(what: str, section: str, body: bytes, answers: set[int], kept: bytes | None = None) -> Row:
    """`kept`: a part of the body that the engine gets byte for byte; its number of the same value would not do."""
    sent = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    return Row("8259 " + section, what, sent, [answers], [(b"POST", b"/v1/completions", None)], True, check=lambda outcome: not outcome.got or (kept or body[1:-1]) in outcome.got[0][2])


def value(text: bytes, section: str, is_json: bool = True) -> Row:
    return posted(repr(text[:40]), section, completion(text), OK if is_json else BAD, b'"x":' + text)


JSON = [
    *(value(text, "6") for text in (b"0", b"-0", b"-0.0", b"1E400", b"1e-400", b"1.0000000000000000000000000000001", b"12345678901234567890123456789012345678901234567890", b"1e+05", b"0.10", b"-1.5E-07", b"9007199254740993", b"1" * 5000)),
    *(value(text, "6", False) for text in (b"01", b"-", b"+1", b".5", b"1.", b"1e", b"1e+", b"0x1", b"NaN", b"Infinity", b"-Infinity", b"1_0", "\u0661".encode())),
    *(value(b'"' + text + b'"', "7") for text in (b"", rb'\"\\\/\b\f\n\r\t', rb"\u0000", rb"\u00e9\uD83D\uDE00", rb"\ud800", rb"\udc00\ud800", "\u00e9\U0001f600\u2028\uffff\ufeff".encode(), b"\x7f")),
    *(value(b'"' + text + b'"', "7", False) for text in (b"\t", b"\n", b"\0", rb"\x41", rb"\u12", rb"\u123g", rb"\U00000041", b"\\")),
    *(value(b'"' + text + b'"', "8.1", False) for text in (b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe2\x82", b"\x80")),
    *(value(text, "3") for text in (b"true", b"null", b"[ ]", b"{ }", b"[[],{},[{}]]")),
    *(value(text, "3", False) for text in (b"True", b"nul", b"'a'", b"undefined", b"", b"/**/1")),
    *(value(text, "5", False) for text in (b"[1,]", b"[,1]", b"[1 2]", b"[1", b"[1}", b'{"a":1,}', b'{"a"}', b"{a:1}", b'{1:1}', b'{"a":1 "b":2}', b'{"a"::1}')),
    value(b"[" * 100 + b"]" * 100, "9"),
    value(b"[" * 1000 + b"]" * 1000, "9", False),
    value(b'{"a":1,"a":2,"":3,"\\u0061":4}', "4"),
    posted("a member twice that the proxy does not read", "4", b'{"prompt":"a","x":1,"x":2}', OK),
    *(posted("twice: " + name, "4", b'{"prompt":"a","%s":%s,"%s":%s}' % (name.encode(), text, name.encode(), text), BAD) for name, text in (("stream", b"true"), ("kv_transfer_params", b"{}"), ("max_tokens", b"1"), ("model", b'"a"'))),
    posted("twice, with escapes", "7", b'{"prompt":"a","stream":true,"str\\u0065am":true}', BAD),
    posted("blanks of all kinds", "2", b' \t\r\n{ \t"prompt"\r: \n"a" , "x":\t[ 1 , 2 ] \n} \r\n', OK, b'"x":\t[ 1 , 2 ]'),
    posted("blanks of other kinds", "2", b'{"prompt":"a",\x0b"x":1}', BAD),
    posted("blanks of Unicode", "2", '{"prompt":"a",\u00a0"x":1}'.encode(), BAD),
    posted("a byte order mark", "8.1", b'\xef\xbb\xbf{"prompt":"a"}', BAD),
    posted("UTF-16", "8.1", '{"prompt":"a"}'.encode("utf-16-le"), BAD),
    posted("something behind the value", "2", b'{"prompt":"a"}{}', BAD),
    posted("NUL behind the value", "2", b'{"prompt":"a"}\0', BAD),
    posted("two values", "2", b'{"prompt":"a"} 1', BAD),
    posted("comments", "2", b'{"prompt":"a"/* */}', BAD),
    posted("no object", "2", b'["prompt"]', BAD),
    posted("nothing", "2", b"", BAD),
    posted("a long string", "7", b'{"prompt":"a","x":"' + b"\\u00e9" * 8000 + b'"}', OK),
    posted("a prompt with escapes", "7", rb'{"prompt":"\ud83d\ude00 \u0000 \/","stop":["\n"],"seed":1e2}', OK),
]
