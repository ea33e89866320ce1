"""HTTP/1.1 as bytes: heads through llhttp, what llhttp does not refuse, and where a chunked body ends.

llhttp (httptools) sees heads only, one parser a message. It refuses by itself: Content-Length with Transfer-Encoding,
two Content-Lengths, signs and overflows in them, bare LF or CR, folded and malformed fields, chunked that is not last.
Refused here: a missing, second or malformed Host, too many bytes or fields, a second value of a field that we read,
Transfer-Encoding on HTTP/1.0 or other than exactly ``chunked``, absolute-form, ``//``, ``..``, encoded ``/ \\ .`` in the
path, Upgrade and CONNECT, versions other than 1.0 and 1.1.

llhttp reports no consumed length, so bodies are counted here: `Chunked` for both directions.
"""

from __future__ import annotations

import re
from typing import ClassVar

import httptools

TRAILER_BYTES = 8 << 10
"""Of all trailer fields of a message; they are checked and dropped. Engines send none."""

EXTENSION_BYTES = 4 << 10
"""Of all chunk extensions of a message together; real ones do not exist, a flood of them is an attack."""

_HOST = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~!$&'()*+,;=-]*)(?::\d{0,5})?")
_PATH = re.compile(rb"/(?:[A-Za-z0-9._~!$&'()*+,;=:@/-]|%[0-9A-Fa-f]{2})*")
_QUERY = re.compile(rb"[\x21\x22\x24-\x7e]*")
_PATH_BAD = re.compile(rb"//|/\.{1,2}(?:/|$)|%(?:2[EeFf]|5[Cc]|00)")
_BARE_LF = re.compile(rb"(?<!\r)\n")
_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(;[\t\x20-\x7e\x80-\xff]*)?")
_TRAILER_LINE = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t\x20-\x7e\x80-\xff]*")
_TOKEN_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")

READ_ONCE = frozenset(
    (
        b"host", b"content-length", b"transfer-encoding", b"content-type", b"content-encoding", b"expect",
        b"authorization", b"x-api-key", b"x-request-id", b"x-session-id", b"x-llmgw-band", b"x-llmgw-profile",
        b"x-llmgw-explain",
    )
)  # fmt: skip
"""Request fields that we read: a second one of the same name could mean two things to two readers."""

INTERNAL = frozenset((b"epp-profile", b"prefer", b"x-gateway-destination-endpoint"))
"""Read, and passed on, on internal listeners only."""

TO_ENGINE = frozenset(
    (
        b"content-type", b"accept", b"accept-language", b"user-agent", b"traceparent", b"tracestate",
        b"anthropic-version", b"anthropic-beta",
    )
)  # fmt: skip
"""All that travels to an engine, beside what a listener's `forward_headers` adds."""

HOP_BY_HOP = frozenset(
    (
        b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
        b"trailer", b"transfer-encoding", b"upgrade",
    )
)  # fmt: skip


class _Names:
    """What each spelling of a field's name means to us, learned once: lower(), two look-ups and a set cost more."""

    __slots__ = ("_known", "_tables")

    MOST = 1024  # spellings remembered; more are looked up afresh

    def __init__(self, **tables: frozenset[bytes]) -> None:
        self._tables = tables
        self._known: dict[bytes, tuple[bytes, frozenset[str]]] = {}

    def __call__(self, name: bytes) -> tuple[bytes, frozenset[str]]:
        """Its lower form, and the names of the tables that hold it."""
        found = self._known.get(name)
        if found is None:
            lower = name.lower()
            found = (lower, frozenset(key for key, names in self._tables.items() if lower in names))
            if len(self._known) < self.MOST:
                self._known[name] = found
        return found


class Malformed(Exception):
    """The bytes are not acceptable HTTP. *reason* is a code of llmgw.reasons (requests) or the word for logs."""

    def __init__(self, message: str, reason: str = "bad_http") -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason


class _Sink:
    """What llhttp calls while it reads one head."""

    __slots__ = ("fields", "url")

    def __init__(self) -> None:
        self.url = b""
        self.fields: list[tuple[bytes, bytes]] = []

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.fields.append((name, value))


class RequestHead:
    """One request's head. *length*: of the body in bytes, -1 = chunked. *values*: the fields of READ_ONCE, by lower name."""

    __slots__ = (
        "after", "before", "fields", "forward", "http10", "keep_alive", "length", "method", "path", "query",
        "values",
    )  # fmt: skip

    before: bytes  # its bytes up to the value of Content-Length, and …
    after: bytes  # … behind it; both empty where there is none
    method: str
    path: str
    query: str | None  # where the target had one, of visible ASCII; not looked into
    http10: bool
    keep_alive: bool
    length: int
    values: dict[bytes, bytes]
    forward: bytes  # header lines for the engine, CRLF at the end of each
    fields: list[tuple[bytes, bytes]]  # all as they came, where the reader keeps them; else empty

    def text(self, name: bytes) -> str:
        """A field's value as text, "" where it is missing; bytes that are not ASCII are escaped."""
        value = self.values.get(name)
        return value.decode("ascii", "backslashreplace") if value else ""

    def again(self, data: bytes) -> bool:
        """Is *data* this head with another Content-Length, or the same? If so this is that head now.

        The heads that a client sends on one connection mostly differ in nothing else; reading one costs ten times this.
        """
        before, after = self.before, self.after
        if not before or not data.startswith(before) or not data.endswith(after):
            return False
        digits = data[len(before) : -len(after)]
        if not digits.isdigit() or len(digits) > 15:
            return False
        self.length = int(digits)
        return True


class RequestReader:
    """Reads heads of requests. *forward*: lower names of the fields that travel to engines. *keep*: all fields, too.
    *internal*: the fields by which a pipeline steers its legs are read."""

    __slots__ = ("_field_count", "_hosts", "_keep", "_names", "_paths")

    MOST = 256  # good hosts and paths remembered: a server has one name or two and a dozen routes

    def __init__(
        self, *, field_count: int, forward: frozenset[bytes] = TO_ENGINE, keep: bool = False, internal: bool = False
    ) -> None:
        self._field_count = field_count
        read = READ_ONCE
        if internal:
            read |= INTERNAL
            forward |= INTERNAL
        self._keep = keep
        self._names = _Names(read=read, forward=forward, upgrade=frozenset((b"upgrade",)))
        self._hosts: set[bytes] = set()
        self._paths: dict[bytes, tuple[str, str | None]] = {}

    def __call__(self, data: bytes) -> RequestHead:
        """*data*: exactly one head, its empty line included. Raises Malformed."""
        sink = _Sink()
        parser = httptools.HttpRequestParser(sink)
        try:
            parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            raise Malformed("Upgrade and CONNECT are not served here") from None
        except httptools.HttpParserError as error:
            raise Malformed(f"not a valid HTTP/1.1 request: {error}") from None
        version = parser.get_http_version()
        if version not in ("1.1", "1.0"):
            raise Malformed(f"HTTP/{version} is not spoken here, only 1.1 and 1.0")
        if len(sink.fields) > self._field_count:
            raise Malformed(f"more than {self._field_count} header fields", "headers_too_large")
        head = RequestHead()
        head.fields = sink.fields if self._keep else []
        head.values = values = {}
        head.before = head.after = b""
        lines = b""
        for name, value in sink.fields:
            lower, kinds = self._names(name)
            if kinds:
                if "read" in kinds:
                    if lower in values:
                        raise Malformed(f"header {lower.decode()} occurs twice")
                    values[lower] = value
                if "forward" in kinds:
                    lines += lower + b": " + value + b"\r\n"
                if "upgrade" in kinds:
                    raise Malformed("Upgrade is not served here")
        head.forward = lines
        head.method = parser.get_method().decode("ascii")
        head.http10 = http10 = version == "1.0"
        head.keep_alive = not http10 and parser.should_keep_alive()
        target = self._paths.get(sink.url)
        if target is None:
            target = self._target(sink.url)
        head.path, head.query = target
        host = values.get(b"host")
        if host is None:
            if not http10:
                raise Malformed("no Host header")
        elif host not in self._hosts:
            if _HOST.fullmatch(host) is None:
                raise Malformed("malformed Host header")
            if len(self._hosts) < self.MOST:
                self._hosts.add(host)
        coding = values.get(b"transfer-encoding")
        if coding is not None:
            if http10:
                raise Malformed("Transfer-Encoding on HTTP/1.0")
            if coding.lower() != b"chunked":
                raise Malformed("Transfer-Encoding other than exactly 'chunked'")
            head.length = -1
        else:
            length = values.get(b"content-length")
            head.length = 0
            if length is not None:
                head.length = int(length)  # llhttp let digits through only
                at = data.lower().find(b"\r\ncontent-length:") + 17
                at = data.find(length, at)
                head.before, head.after = data[:at], data[at + len(length) :]
        return head

    def _target(self, url: bytes) -> tuple[str, str | None]:
        path, asked, query = url.partition(b"?")
        if not path.startswith(b"/"):
            raise Malformed("the request target must start with '/' (origin-form)")
        if _PATH.fullmatch(path) is None or _PATH_BAD.search(path) is not None:
            raise Malformed(
                "the path holds '//', a dot segment, an encoded slash or dot, or a character that must be encoded"
            )
        if _QUERY.fullmatch(query) is None:
            raise Malformed("the query holds a character that must be encoded")
        target = (path.decode("ascii"), query.decode("ascii") if asked else None)
        if len(self._paths) < self.MOST:
            self._paths[url] = target
        return target


def incomplete_head_problem(data: bytes | bytearray) -> str:
    """Why *data*, which holds no empty line yet, can never become a head; "" if it still can."""
    return "a line ends with LF alone" if _BARE_LF.search(data) is not None else ""


def request_id(value: bytes | None) -> str:
    """The client's x-request-id if it is well-formed (1–128 of ``A-Za-z0-9._:/+=-``), else ""."""
    return value.decode("ascii") if value and _TOKEN_ID.fullmatch(value) is not None else ""


class ResponseHead:
    """One response's head. *length*: of the body, -1 = chunked, -2 = until the connection closes."""

    __slots__ = ("content_type", "keep_alive", "length", "lines", "retry_after", "status")

    status: int
    length: int
    keep_alive: bool
    content_type: bytes
    retry_after: float | None
    lines: bytes  # status line and end-to-end fields as received; no framing fields, no empty line


_ANSWER_NAMES = _Names(
    dropped=HOP_BY_HOP | {b"x-request-id"},  # the engine's id has our suffix; the client gets its own back
    used=frozenset((b"content-length", b"transfer-encoding", b"connection", b"content-type", b"retry-after")),
)

_ANSWERS: dict[bytes, ResponseHead] = {}
_ANSWERS_MOST = 256
"""Heads of streams are the same bytes for a second or more: each is read once. Dropped all at once when full."""


def parse_response(data: bytes) -> ResponseHead:
    """*data*: exactly one head, its empty line included. Raises Malformed. The result is shared: not to be changed."""
    head = _ANSWERS.get(data)
    if head is None:
        head = _parse_response(data)
        if len(_ANSWERS) >= _ANSWERS_MOST:
            _ANSWERS.clear()
        _ANSWERS[data] = head
    return head


def _parse_response(data: bytes) -> ResponseHead:
    sink = _Sink()
    parser = httptools.HttpResponseParser(sink)
    try:
        parser.feed_data(data)
    except httptools.HttpParserUpgrade:
        raise Malformed("the engine switches protocols (101)") from None
    except httptools.HttpParserError as error:
        raise Malformed(f"not a valid HTTP/1.1 response: {error}") from None
    version = parser.get_http_version()
    if version not in ("1.1", "1.0"):
        raise Malformed(f"the engine answers with HTTP/{version}")
    head = ResponseHead()
    head.status = parser.get_status_code()
    head.content_type = b""
    head.retry_after = None
    head.length = -2
    if head.status < 100 or head.status > 599:
        raise Malformed(f"status {head.status}")
    lines = data[: data.index(b"\r\n") + 2]
    if lines.startswith(b"HTTP/1.0"):
        lines = b"HTTP/1.1" + lines[8:]
    named: set[bytes] = set()  # by Connection: hop-by-hop, too
    for name, value in sink.fields:
        if _ANSWER_NAMES(name)[0] == b"connection":
            named.update(part.strip().lower() for part in value.split(b","))
    for name, value in sink.fields:
        lower, kinds = _ANSWER_NAMES(name)
        if "used" in kinds:
            if lower == b"content-length":
                head.length = int(value)
                continue
            if lower == b"transfer-encoding":
                if value.lower() != b"chunked" or version == "1.0":
                    raise Malformed("Transfer-Encoding other than exactly 'chunked'")
                head.length = -1
                continue
            if lower == b"content-type":
                head.content_type = value.lower()
            elif lower == b"retry-after" and value.isdigit() and len(value) < 7:
                head.retry_after = float(value)
        if "dropped" not in kinds and lower not in named:
            lines += name + b": " + value + b"\r\n"
    head.lines = lines
    head.keep_alive = parser.should_keep_alive() and head.length != -2
    if head.status in (204, 304):
        head.length = 0
        head.keep_alive = parser.should_keep_alive()
    return head


class Chunked:
    """Incremental reader of one chunked body. Strict: what llhttp would refuse in a size line is refused here too.

    size → data → crlf → size … → (size 0) trailer → done. *boundary*: the bytes so far end between two chunks.
    """

    __slots__ = ("_extra", "_left", "_line", "_sizes", "_state", "end", "last", "trailers")

    SIZE, DATA, CRLF, TRAILER, DONE = range(5)

    _MOST = 4096  # entries of each of the two, shared by all readers; further ones are worked out every time
    _KNOWN: ClassVar[dict[bytes, int]] = {}  # size lines seen lately: a look-up costs a third of int(x, 16)
    _STEPS: ClassVar[dict[bytes, int]] = {}  # a whole chunk's length by its first five bytes, size line included

    def __init__(self) -> None:
        self._state = self.SIZE
        self._left = 0
        self._line = b""  # of a line that is not complete yet
        self._extra = 0
        self.trailers = 0  # bytes of trailer fields seen
        self.last = -1  # offset in the slice last fed, just behind the last-chunk line; -1 = not in that slice
        self.end = 0  # offset in the slice last fed, just behind the message

    @property
    def done(self) -> bool:
        return self._state == self.DONE

    @property
    def boundary(self) -> bool:
        return self._state == self.SIZE and not self._line

    @property
    def in_trailer(self) -> bool:
        return self._state >= self.TRAILER

    def skim(self, data: bytes, start: int, n: int) -> tuple[int, int]:
        """Where the whole chunks between *start* and *n* end that each end with a blank line, and how many they are.

        For a reader of server-sent events who may leave the framing in: between events a size line is a field without
        a name. Only to be asked at a `boundary`; changes nothing. A third of what `feed` costs.
        """
        step, i, count = self._STEPS.get, start, 0
        last = 0
        while i < n:
            last = step(data[i : i + 5], 0)
            if not last:
                break
            i += last
            count += 1
        if i > n:
            i -= last
            count -= 1
        if data.count(b"\n\n\r\n", start, i) != count:
            return start, 0
        return i, count

    def begins(self, data: bytes) -> bool:
        """Is *data*, at a boundary, the beginning of one chunk of a size known well, and not all of it?"""
        return self.boundary and len(data) < self._STEPS.get(data[:5], 0) <= EXTENSION_BYTES

    @property
    def missing(self) -> int:
        """Bytes until the chunk that is being read is whole; 0 at a boundary or where that is not known."""
        return self._left + 2 if self._state == self.DATA else 0

    def feed(self, data: bytes) -> bytes:
        """The payload in *data*; sets *end* and *last*. Raises Malformed. Not to be called once done."""
        carried = len(self._line)
        if carried:
            data = self._line + data
            self._line = b""
        self.last = -1
        parts: list[bytes] = []
        state, i, n = self._state, 0, len(data)
        known = self._KNOWN
        while True:
            if state == self.SIZE:
                j = data.find(b"\r\n", i)
                if j < 0:
                    self._partial(data[i:], EXTENSION_BYTES, size=True)
                    i = n
                    break
                line = data[i:j]
                size = known.get(line)
                if size is None:
                    size = self._size(line)
                i = j + 2
                if size == 0:
                    state = self.TRAILER
                    self.last = i - carried
                    continue
                e = i + size
                if e + 2 <= n:  # the whole chunk is here: the common case
                    if data[e : e + 2] != b"\r\n":
                        raise Malformed("no CRLF behind a chunk")
                    parts.append(data[i:e])
                    if 2 <= len(line) <= 3 and len(self._STEPS) < self._MOST:
                        self._STEPS[data[i - len(line) - 2 : i - len(line) + 3]] = e + 2 - i + len(line) + 2
                    i = e + 2
                    if i == n:
                        break
                    continue
                self._left = size
                state = self.DATA
            elif state == self.DATA:
                taken = data[i : i + self._left]
                if taken:
                    parts.append(taken)
                i += len(taken)
                self._left -= len(taken)
                if self._left:
                    break
                state = self.CRLF
            elif state == self.CRLF:
                if n - i < 2:
                    if data[i:] not in (b"", b"\r"):
                        raise Malformed("no CRLF behind a chunk")
                    self._line = data[i:]
                    i = n
                    break
                if data[i : i + 2] != b"\r\n":
                    raise Malformed("no CRLF behind a chunk")
                i += 2
                state = self.SIZE
                if i == n:
                    break
            else:
                j = data.find(b"\r\n", i)
                if j < 0:
                    self._partial(data[i:], TRAILER_BYTES - self.trailers, size=False)
                    i = n
                    break
                line = data[i:j]
                i = j + 2
                if not line:
                    state = self.DONE
                    break
                self.trailers += len(line) + 2
                if self.trailers > TRAILER_BYTES or _TRAILER_LINE.fullmatch(line) is None:
                    raise Malformed("trailer fields too long or malformed")
        self._state = state
        self.end = i - carried
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _partial(self, line: bytes, limit: int, *, size: bool) -> None:
        if len(line) > limit + 20 or b"\n" in line or b"\r" in line[:-1]:
            raise Malformed("a chunk's size line or a trailer line is too long or malformed")
        if size and line and line[:1] not in b"0123456789abcdefABCDEF":
            raise Malformed("a chunk's size is not a hexadecimal number")
        self._line = line

    def _size(self, line: bytes) -> int:
        found = _SIZE_LINE.fullmatch(line)
        if found is None:
            raise Malformed("a chunk's size is not a hexadecimal number")
        size = int(found[1], 16)
        if found[2]:
            self._extra += len(found[2])
            if self._extra > EXTENSION_BYTES:
                raise Malformed("chunk extensions are too long")
        elif len(self._KNOWN) < self._MOST:
            self._KNOWN[line] = size
        return size
