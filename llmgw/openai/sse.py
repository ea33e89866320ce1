"""Meters: what is said about usage, tokens and errors in an answer, read while its bytes pass by unchanged.

`Meter` reads a stream of server-sent events, `JsonMeter` a plain JSON answer. Both take slices cut anywhere, hold a
bounded number of bytes, and come to the same result however the answer was sliced.

Most of a stream is one event again and again with another word in it. So the meter keeps the bytes around the word of
the last such event (*template*); an event that has the same bytes before and after, and between them neither a quote
nor a line end nor a trailing backslash, is one more event with one more token, and nothing else. Anything else is
looked at exactly: tokens by the names of the strings that hold generated text, usage and errors by parsing the event.

What a token is here: a non-empty string at one of the names that carry generated text in the answer's shape. Engines
send one such delta a token, or fewer (``--stream-interval``, multi-token words); so it is a count, not usage.
"""

from __future__ import annotations

import re

import msgspec
from msgspec import UNSET, Raw, UnsetType

from llmgw.openai.cut import CAP, EVENT, LAST, PART, Cutter, data_of
from llmgw.openai.errors import upstream_message
from llmgw.openai.routes import Shape
from llmgw.openai.usage import Reported, Usage

_NAMES: dict[Shape, tuple[bytes, ...]] = {
    "": (b'"content"', b'"reasoning"', b'"reasoning_content"', b'"arguments"', b'"text"'),
    "chat": (b'"content"', b'"reasoning"', b'"reasoning_content"', b'"arguments"'),
    "completions": (b'"text"',),
    "generate": (b'"request_id"',),  # token ids and no text: one a chunk
    "responses": (b'"delta"',),
    "messages": (b'"text"', b'"thinking"', b'"partial_json"'),
}
"""Names of the strings with generated text, by the shape of the answer; "" for all others."""

_WORD = re.compile(rb'[ \t]*:[ \t]*"(?!")')

_FINAL = frozenset({"message_stop", "response.completed", "response.incomplete", "response.failed"})
"""`type` of the event that ends a stream in the dialects without ``[DONE]``."""

_BOM = b"\xef\xbb\xbf"
_DATA_LINE = re.compile(rb"(?:\A(?:\xef\xbb\xbf)?|[\r\n])data:")


class _Holder(msgspec.Struct, gc=False):
    usage: Reported | None = None


class _Event(msgspec.Struct, gc=False):
    """The few fields of an event, whatever its dialect. Anthropic's and Responses' usage stands one level deeper."""

    usage: Reported | None = None
    message: _Holder | str | None = None
    response: _Holder | None = None
    type: str | None = None
    object: str | None = None
    error: Raw | UnsetType = UNSET


_decode = msgspec.json.Decoder(_Event).decode


class Meter:
    """Reads server-sent events. Attributes are up to date after every `feed`.

    *events*: events with data, ``[DONE]`` not counted. *done*: ``[DONE]`` or the dialect's final event was seen.
    *error*: an error came within the stream; *error_detail* says its type and code. *usage*: as the engine said, the
    last report wins.
    """

    __slots__ = (
        "_after",
        "_before",
        "_cap",
        "_counts",
        "_cutter",
        "_long",
        "_names",
        "_plain",
        "_word",
        "done",
        "error",
        "error_detail",
        "events",
        "usage",
    )

    def __init__(self, shape: Shape = "", cap: int = CAP) -> None:
        self._names = _NAMES.get(shape) or _NAMES[""]
        self._cap = cap
        self._cutter = Cutter(cap)
        self._counts: dict[bytes, int] = {}  # strings with generated text, by name
        self._plain = 0  # … those that the template found
        self._before = b""  # the template
        self._after = b""
        self._word = b""  # the name that the template's word stands at; b"" = no template yet
        self._long = False  # within an event above the cap
        self.events = 0
        self.usage: Usage | None = None
        self.done = False
        self.error = False
        self.error_detail = ""

    @property
    def tokens(self) -> int:
        """Non-empty deltas so far. Some vLLM releases send reasoning under both of its names: it counts once."""
        counts = dict(self._counts)
        if self._plain:
            counts[self._word] = counts.get(self._word, 0) + self._plain
        twice = min(counts.get(b'"reasoning"', 0), counts.get(b'"reasoning_content"', 0))
        return sum(counts.values()) - twice

    @property
    def at_boundary(self) -> bool:
        """Do the bytes so far end where an event may begin? True before the first byte."""
        return self._cutter.at_boundary

    def feed(self, data: bytes) -> None:
        """The next bytes of the body (without chunk framing), cut anywhere."""
        cutter = self._cutter
        if cutter.idle:
            if self._again(data):
                return
            if b"\r" not in data:
                data = self._whole(data)
        for piece, text in cutter.feed(data):
            if piece == EVENT:
                self._event(text)
            elif piece == PART and not self._long:
                self._long = True
                self._too_long(text)
            elif piece == LAST:
                self._long = False

    def alike_until(self, data: bytes, start: int) -> int:
        """Behind the last event in *data* that looks like the template's; *start* if there is none."""
        last = data.rfind(self._before, start) if self._word else -1
        return data.find(b"\n\n", last) + 4 if last >= 0 else start

    def feed_bulk(self, data: bytes, start: int, end: int, count: int) -> bool:
        """Take *count* events at once, if each is the template's with another word; else change nothing: False.

        ``data[start:end]``: at a boundary, exactly *count* pieces that each end with a blank line; between them may
        stand what has no quote (the size lines of HTTP chunks). Told by the bytes around the words and by the quotes
        of all: a handful of passes in C instead of a step an event.
        """
        before, after = self._before, self._after
        if (
            not self._cutter.idle
            or not self._word
            or data.count(before, start, end) != count
            or data.count(b'"', start, end) != count * (before.count(b'"') + after.count(b'"'))
            or data.find(b"\\", start, end) >= 0
            or data.find(before + b'"', start, end) >= 0  # a word that is empty is no token
        ):
            return False
        self.events += count
        self._plain += count
        return True

    def finish(self) -> None:
        """The body has ended: an event without its blank line counts, too."""
        left = self._cutter.finish()
        if left and not self._long:
            self._event(left)

    def _whole(self, data: bytes) -> bytes:
        """Handle the events that are whole in *data* (which has no CR); what remains is for the cutter."""
        at = 0
        while (end := data.find(b"\n\n", at) + 2) > 1 and data[at] != 0x0A:
            self._event(data[at:end])
            at = end
            if at == len(data):
                break
        return data[at:] if at else data

    def _again(self, event: bytes) -> bool:
        """Is it the template's event with another word? If so it is counted."""
        before = len(self._before)
        after = len(event) - len(self._after)
        if (
            before < after
            and self._word
            and event.startswith(self._before)
            and event.endswith(self._after)
            and event.find(b'"', before, after) < 0
            and event.find(b"\n", before, after) < 0
            and event.find(b"\r", before, after) < 0
            and event[after - 1] != 0x5C
        ):
            self.events += 1
            self._plain += 1
            return True
        return False

    def _event(self, event: bytes) -> None:
        if len(event) > self._cap and len(event.rstrip(b"\r\n")) > self._cap:
            self._too_long(event)
            return
        if self._again(event):
            return
        data = data_of(event.removeprefix(_BOM))
        if data is None:
            return
        if data == b"[DONE]":
            self.done = True
            return
        self.events += 1
        words = 0
        word, last = -1, b""
        for name in self._names:
            at = data.find(name)
            while at >= 0:
                found = _WORD.match(data, at + len(name))
                if found is not None:
                    self._counts[name] = self._counts.get(name, 0) + 1
                    words, word, last = words + 1, found.end(), name
                at = data.find(name, at + len(name))
        if b'"usage"' in data or b'"error"' in data or b'"type"' in data:
            self._parse(data)
        elif words == 1 and event.endswith(b"\n\n"):
            self._learn(event, len(data), word, last)

    def _learn(self, event: bytes, length: int, word: int, name: bytes) -> None:
        """Make *event* the template, if its *length* bytes of data are one line and its word has no escapes."""
        at = len(event) - 2 - length
        if not event.startswith(b"data:") or at not in (5, 6) or b"\r" in event:
            return
        start = at + word
        end = event.find(b'"', start)
        if event.find(b"\\", start, end) >= 0:
            return
        if self._plain:
            self._counts[self._word] = self._counts.get(self._word, 0) + self._plain
            self._plain = 0
        self._before, self._after, self._word = event[:start], event[end:], name

    def _parse(self, data: bytes) -> None:
        try:
            event = _decode(data)
        except (ValueError, RecursionError):
            return
        holder = event.message if isinstance(event.message, _Holder) else event.response
        for reported in (holder.usage if holder is not None else None, event.usage):
            if reported is not None:
                self.usage = reported.merged(self.usage)
        if event.type in _FINAL:
            self.done = True
        failed = (event.error is not UNSET and bytes(event.error) != b"null") or event.object == "error"
        if failed or event.type == "response.failed":
            self.error = True
            self.error_detail = upstream_message(data) or ""

    def _too_long(self, start: bytes) -> None:
        """An event above the cap counts if it has data; what it says is not read."""
        if _DATA_LINE.search(start, 0, self._cap):
            self.events += 1


HELD = 4 << 10
"""Bytes that `JsonMeter` holds while a usage object is incomplete; the longest in use have some 500."""

_USAGE = re.compile(rb'"usage"[ \t\r\n]*(?::[ \t\r\n]*(\{)?)?')
_BRACE = re.compile(rb"[{}]")
_report = msgspec.json.Decoder(Reported).decode


class JsonMeter:
    """Reads a plain JSON answer of any length without parsing it: finds the objects named ``usage``.

    ``"usage":`` with its quotes unescaped can only be a key, whatever the text around it says, since within a string
    the quotes would be escaped. The last object with counts wins. Same attributes as `Meter`; nothing can be put
    into the middle of JSON, so *at_boundary* is True only before the first byte.
    """

    __slots__ = ("_head", "_held", "at_boundary", "done", "error", "error_detail", "events", "tokens", "usage")

    def __init__(self) -> None:
        self._held = b""
        self._head: bytes | None = b""
        self.events = 0
        self.tokens = 0
        self.usage: Usage | None = None
        self.done = False
        self.error = False
        self.error_detail = ""
        self.at_boundary = True

    def feed(self, data: bytes) -> None:
        """The next bytes of the body, cut anywhere."""
        if not data:
            return
        self.at_boundary = False
        if self._head is not None:
            self._look(data)
        text = self._held + data if self._held else data
        at = 0
        while (at := text.find(b'"usage"', at)) >= 0:
            end = self._read(text, at)
            if end < 0 and len(text) - at <= HELD:
                self._held = text[max(0, at - 1) :]
                return
            at = max(end, at + 7)
        self._held = text[-7:]

    def _read(self, text: bytes, at: int) -> int:
        """Read what may be a usage object at *at*. Where to go on; -1 if its end has not come yet."""
        found = _USAGE.match(text, at, at + HELD)
        assert found is not None  # the caller found the name there
        if found.end() in (len(text), at + HELD):
            return -1
        if found.group(1) is None or text[at - 1 : at] == b"\\":
            return found.end()
        start = found.end() - 1
        end = text.find(b"}", start, at + HELD) + 1
        if not end or text.find(b"{", start + 1, end) >= 0:  # not a flat object, as it mostly is: count the braces
            end = self._closing(text, start, at + HELD)
        if end:
            try:
                self.usage = _report(text[start:end]).merged(self.usage)
            except (ValueError, RecursionError):
                pass
        return end or -1

    @staticmethod
    def _closing(text: bytes, start: int, stop: int) -> int:
        """Behind the brace that closes the one at *start*; 0 if it has not come."""
        depth = 0
        for bracket in _BRACE.finditer(text, start, stop):
            depth += 1 if bracket.group() == b"{" else -1
            if depth == 0:
                return bracket.end()
        return 0

    def finish(self) -> None:
        """The body has ended. It is whole as far as its last byte can tell."""
        self.done = self._held.rstrip().endswith(b"}")
        if self.error:
            self.error_detail = upstream_message(self._head or b"") or ""

    def _look(self, data: bytes) -> None:
        """Is the answer an error object? Its first bytes are kept for as long as it may be."""
        self._head = ((self._head or b"") + data[:HELD])[:HELD]
        start = self._head.lstrip()[:8]
        self.error = start == b'{"error"'
        if not b'{"error"'.startswith(start):
            self._head = None
