"""Changes to a request's body that leave every other byte as it came: the model's name, and asking for usage.

Re-encoding would change more than was asked for: integers above 2^53, the order of keys, duplicates in fields that
routing does not read, white space that a signature may cover.
"""

from __future__ import annotations

import msgspec

from llmgw.openai.layout import Field, Layout, layout

_ASKED = b'"stream_options":{"include_usage":true}'


def rewrite(
    body: bytes | bytearray, *, model: str | None = None, ask_usage: bool = False, found: Layout | None = None
) -> bytes:
    """*body* with the top-level ``model`` (added if absent) and/or ``stream_options.include_usage: true``.

    *found* is the body's layout where it is known already (`Peek.layout`). Raises `Malformed` if the body is not one
    JSON object, which `peek` has ruled out.
    """
    place = layout(body) if found is None else found
    cuts: list[tuple[int, int, bytes]] = []  # replace body[start:end]
    added: list[bytes] = []
    if model is not None:
        name = msgspec.json.encode(model)
        fields = place.all("model")
        cuts += [(field.value, field.end, name) for field in fields]
        if not fields:
            added.append(b'"model":' + name)
    if ask_usage:
        options = place.all("stream_options")
        cuts += [cut for field in options for cut in _asking(body, field)]
        if not options:
            added.append(_ASKED)
    if added:
        comma = b"," if place.fields else b""
        cuts.append((place.close, place.close, comma + b",".join(added)))
    parts = []
    at = 0
    for start, end, text in sorted(cuts):
        parts += [body[at:start], text]
        at = end
    return b"".join([*parts, body[at:]])


def rewrite_form(body: bytes | bytearray, place: tuple[int, int], model: str) -> bytes:
    """A form with another model's name at *place* (`Peek.model_at`)."""
    start, end = place
    return b"".join((body[:start], model.encode("utf-8", "replace"), body[end:]))


def _asking(body: bytes | bytearray, options: Field) -> list[tuple[int, int, bytes]]:
    """The cuts that make *options* (an object, or null) ask for usage."""
    value = body[options.value : options.end]
    if not value.startswith(b"{"):
        return [(options.value, options.end, b'{"include_usage":true}')]
    inside = layout(value)
    asked = inside.all("include_usage")
    if asked:
        return [(options.value + field.value, options.value + field.end, b"true") for field in asked]
    end = options.value + inside.close
    return [(end, end, (b"," if inside.fields else b"") + b'"include_usage":true')]
