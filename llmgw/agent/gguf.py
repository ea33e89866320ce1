"""The header of a GGUF file: metadata and where each tensor ends. Read-only, bounded, nothing of the tensors is read."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, BinaryIO

import attrs

HEADER_LIMIT = 256 << 20  # bytes; vocabularies of 256k tokens with merges are some 10 MB
ARRAY_KEPT = 1024  # elements; per-layer arrays are kept, vocabularies are not
DEPTH = 4  # arrays of arrays

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9

TYPES: dict[int, tuple[int, int]] = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 36), 10: (256, 84),
    11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292), 16: (256, 66), 17: (256, 74),
    18: (256, 98), 19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82), 23: (256, 136), 24: (1, 1), 25: (1, 2),
    26: (1, 4), 27: (1, 8), 28: (1, 8), 29: (256, 56), 30: (1, 2), 34: (256, 54), 35: (256, 66), 39: (32, 17),
}  # fmt: skip
"""ggml type → (elements, bytes) of a block."""


@attrs.frozen
class Header:
    meta: dict[str, Any]
    tensor_bytes: int
    problem: str = ""  # "truncated at tensor blk.61.ffn_down.weight"; "" = whole


class _Reader:
    def __init__(self, file: BinaryIO) -> None:
        self.file, self.read_bytes = file, 0

    def take(self, size: int) -> bytes:
        self.read_bytes += size
        if size < 0 or self.read_bytes > HEADER_LIMIT:
            raise ValueError("the header is larger than any real one")
        data = self.file.read(size)
        if len(data) != size:
            raise ValueError("it ends inside its header")
        return data

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def string(self) -> str:
        return self.take(self.number("<Q")).decode(errors="replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY or depth > DEPTH:
            raise ValueError(f"it has a value of unknown type {kind}")
        inner, count = self.number("<I"), self.number("<Q")
        if inner in _SCALARS and count > ARRAY_KEPT:
            self.take(struct.calcsize(_SCALARS[inner]) * count)
            return None
        kept = []
        for index in range(count):
            element = self.value(inner, depth + 1)
            if index < ARRAY_KEPT:
                kept.append(element)
        return kept if count <= ARRAY_KEPT else None


def read(path: Path) -> Header:
    """Raises ValueError with what is wrong with the header, OSError if the file cannot be read."""
    size = path.stat().st_size
    with path.open("rb") as file:
        reader = _Reader(file)
        if reader.take(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version = reader.number("<I")
        if version not in (2, 3):
            raise ValueError(f"GGUF version {version} is not known (2 and 3 are)")
        tensors, pairs = reader.number("<Q"), reader.number("<Q")
        meta: dict[str, Any] = {}
        for _ in range(pairs):
            key = reader.string()
            value = reader.value(reader.number("<I"))
            if value is not None:
                meta[key] = value
        ends: list[tuple[int, int, str]] = []
        total = 0
        for _ in range(tensors):
            name = reader.string()
            elements = 1
            for _ in range(reader.number("<I")):
                elements *= reader.number("<Q")
            kind, offset = reader.number("<I"), reader.number("<Q")
            block = TYPES.get(kind)
            length = 0 if block is None else elements // block[0] * block[1]
            total += length
            ends.append((offset + length, offset, name))
        alignment = int(meta.get("general.alignment", 32))
        start = -(-file.tell() // alignment) * alignment
    for end, _, name in sorted(ends):
        if start + end > size:
            return Header(meta, total, f"truncated at tensor {name}: {size} of {start + max(ends)[0]} bytes")
    return Header(meta, total)
