"""Weights on this node: where they lie, whether they are whole, what they weigh.

Synchronous and slow (disks): call it in a thread. Headers are read, not tensors; checksums are a call of their own.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs
import msgspec

from llmgw.agent import gguf
from llmgw.agent.account import Account
from llmgw.placement.inventory import Weights

HEADER_LIMIT = 100_000_000  # bytes of a safetensors header, by its format
CONFIG_LIMIT = 1 << 20  # bytes of config.json taken along
LFS = b"version https://git-lfs"
CHUNK = 8 << 20  # bytes read at once for a checksum
SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
DUPLICATES = re.compile(r"(^|/)(original/|consolidated[^/]*$)")

Problems = list[tuple[str, str]]
"""(row id, what is wrong)"""


def locate(ref: str, folders: Sequence[str]) -> Path | None:
    """Where *ref* (path, folder name, or repository id) lies on this node."""
    if ref.startswith("/"):
        return Path(ref) if os.path.lexists(ref) else None
    cached = "models--" + ref.replace("/", "--")
    for folder in map(Path, folders):
        for candidate in (folder / ref, folder / ref.rpartition("/")[2]):
            if ".." not in Path(ref).parts and os.path.lexists(candidate):
                return candidate
        for hub in (folder / cached, folder / "hub" / cached):  # Hugging Face's cache
            try:
                revision = (hub / "refs" / "main").read_text().strip()
            except OSError:
                continue
            if (hub / "snapshots" / revision).is_dir():
                return hub / "snapshots" / revision
    return None


def inspect(ref: str, folders: Sequence[str], user: Account) -> tuple[Weights, Problems]:
    """What there is of *ref*. Never raises for what is on the disk."""
    path = locate(ref, folders)
    if path is None:
        where = ref if ref.startswith("/") else f"{ref} in {', '.join(folders)}"
        problem = f"weights not found: {where}"
        return Weights(ref=ref, problem=problem), [("WGT-1", problem)]
    problems: Problems = []
    try:
        weights = _inspect(ref, path, user, problems)
    except OSError as error:
        problems.append(("WGT-1", f"{error.filename or path}: {error.strerror}"))
        weights = Weights(ref=ref, path=str(path))
    return msgspec.structs.replace(weights, problem=problems[0][1] if problems else ""), problems


def _inspect(ref: str, path: Path, user: Account, problems: Problems) -> Weights:
    if path.is_symlink() and not path.exists():
        problems.append(("WGT-1", f"{path} → dangling link to {os.readlink(path)}"))
        return Weights(ref=ref)
    if path.is_dir():
        files = [
            p for p in sorted(path.rglob("*")) if not p.is_dir() and not DUPLICATES.search(str(p.relative_to(path)))
        ]
    else:
        files = [path]
    for file in files:
        if file.is_symlink() and not file.exists():
            problems.append(("WGT-1", f"{file} → dangling link to {os.readlink(file)}"))
        elif not user.reads(file):
            problems.append(("WGT-1", f"{file} cannot be read by the engines' user (uid {user.uid})"))
        elif file.name.endswith(".incomplete"):
            problems.append(("WGT-5", f"{file} is half downloaded"))
    present = [f for f in files if f.exists()]
    tensors = [f for f in present if f.suffix == ".safetensors"]
    if tensors or (path / "model.safetensors.index.json").exists():
        return _safetensors(ref, path, tensors, problems)
    ggufs = [f for f in present if f.suffix == ".gguf"]
    if ggufs:
        return _gguf(ref, path, ggufs, problems)
    size = sum(f.stat().st_size for f in present)
    if not any(f.suffix in (".bin", ".pt", ".pth") for f in present):
        problems.append(("WGT-1", f"{path} holds no weights (*.safetensors, *.gguf)"))
    return Weights(ref=ref, path=str(path), format="other", bytes=size, digest=_digest(path, present))


def _safetensors(ref: str, path: Path, files: list[Path], problems: Problems) -> Weights:
    folder = path if path.is_dir() else path.parent
    index_path = folder / "model.safetensors.index.json"
    wanted: set[str] = set()
    total: int | None = None
    if path.is_dir() and index_path.exists():
        index = _json(index_path, problems, "WGT-2")
        wanted = {str(v) for v in (index.get("weight_map") or {}).values()}
        declared = (index.get("metadata") or {}).get("total_size")
        total = declared if isinstance(declared, int) else None
        if wanted:
            files = [f for f in files if str(f.relative_to(folder)) in wanted]
    found, headers = 0, []
    for file in files:
        header, size, problem = safetensors_header(file)
        headers.append(header)
        found += size
        if problem:
            problems.append(("WGT-3", f"{file}: {problem}"))
    missing = sorted(wanted - {str(f.relative_to(folder)) for f in files})
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        text = f"{len(wanted) - len(missing)} of {len(wanted)} shards present (missing {missing[0]}{more})"
        problems.append(("WGT-2", text))
    elif total is not None and found != total and not any(row == "WGT-3" for row, _ in problems):
        problems.append(("WGT-2", f"tensors sum to {found} bytes, the index says {total}"))
    config_path = folder / "config.json"
    config = ""
    if path.is_dir():
        if config_path.exists():
            _json(config_path, problems, "WGT-6")
            config = config_path.read_text(errors="replace")[:CONFIG_LIMIT]
        else:
            problems.append(("WGT-6", f"{config_path} is missing"))
        if not any(
            (folder / n).exists()
            for n in ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json", "tekken.json")
        ):
            problems.append(("WGT-6", f"{folder} has no tokenizer (tokenizer.json, tokenizer.model)"))
    return Weights(
        ref=ref,
        path=str(path),
        format="safetensors",
        bytes=found,
        bytes_total=total,
        largest_file=max((f.stat().st_size for f in files), default=None),
        digest=_digest(path, files, headers),
        config=config,
    )


def safetensors_header(file: Path) -> tuple[bytes, int, str]:
    """(digest of the header, bytes of tensors, what is wrong)."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        first = stream.read(len(LFS))
        if first.startswith(LFS):
            return b"", 0, "is a git-lfs pointer, not the weights"
        if len(first) < 8:
            return b"", 0, f"truncated, {size} bytes"
        length = struct.unpack("<Q", first[:8])[0]
        if length > HEADER_LIMIT:
            return b"", 0, "no safetensors header: it is not such a file, or damaged"
        stream.seek(8)
        text = stream.read(length)
    try:
        header = msgspec.json.decode(text, type=dict[str, Any])
        ends = [int(v["data_offsets"][1]) for k, v in header.items() if k != "__metadata__"]
    except (msgspec.DecodeError, KeyError, TypeError, ValueError, IndexError):
        problem = f"truncated, {size} bytes" if len(text) < length else "damaged header"
        return b"", 0, problem
    end = 8 + length + max(ends, default=0)
    digest = hashlib.sha256(text).digest()
    if end != size:
        return digest, max(size - 8 - length, 0), f"{'truncated' if size < end else 'too long'}, {size} of {end} bytes"
    return digest, max(ends, default=0), ""


def _gguf(ref: str, path: Path, files: list[Path], problems: Problems) -> Weights:
    split = SPLIT.search(str(files[0]))
    if path.is_dir() and len(files) > 1 and (split is None or len({SPLIT.sub("", str(f)) for f in files}) > 1):
        names = ", ".join(f.name for f in files[:4])
        problems.append(("WGT-4", f"{path} holds several GGUF models ({names}): name the file in the catalogue"))
        return Weights(ref=ref, path=str(path), format="gguf")
    if not path.is_dir() and split is not None:
        files = sorted(path.parent.glob(SPLIT.sub("-*-of-" + split[2] + ".gguf", path.name)))
    if split is not None:
        numbers = {int(m[1]) for f in files if (m := SPLIT.search(str(f)))}
        missing = sorted(set(range(1, int(split[2]) + 1)) - numbers)
        if missing:
            problems.append(("WGT-4", f"part {missing[0]} of {int(split[2])} is missing"))
    meta: dict[str, Any] = {}
    total = 0
    for file in files:
        try:
            header = gguf.read(file)
        except ValueError as error:
            with file.open("rb") as stream:
                pointer = stream.read(len(LFS)) == LFS
            problems.append(("WGT-4", f"{file}: {'it is a git-lfs pointer, not the weights' if pointer else error}"))
            continue
        meta = meta or header.meta
        total += header.tensor_bytes
        if header.problem:
            problems.append(("WGT-4", f"{file}: GGUF {header.problem}"))
    return Weights(
        ref=ref,
        path=str(files[0]),
        format="gguf",
        bytes=total,
        bytes_total=total or None,
        largest_file=max(f.stat().st_size for f in files),
        digest=_digest(path, files),
        config=json.dumps(meta)[:CONFIG_LIMIT] if meta else "",
    )


def _json(path: Path, problems: Problems, row: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except msgspec.DecodeError as error:
        problems.append((row, f"{path} is not JSON: {error}"))
        return {}


def _digest(path: Path, files: Iterable[Path], headers: Iterable[bytes] = ()) -> str:
    """Names the set of files: names, sizes, safetensors headers. Equal on two nodes = the same weights, not hashed."""
    base = path if path.is_dir() else path.parent
    text = "\n".join(f"{f.relative_to(base)} {f.stat().st_size}" for f in files).encode()
    return hashlib.sha256(text + b"".join(headers)).hexdigest()[:32]


Key = tuple[int, int, int, int]  # device, inode, size, mtime in ns


@attrs.define
class Checksums:
    """Checks files against the checksums that are written down; each file once, until it changes."""

    done: dict[Key, str] = attrs.field(factory=dict)

    def verify(self, where: str) -> Problems:
        """Reads every file that has a known checksum: minutes for large models."""
        path = Path(where)
        base = path if path.is_dir() else path.parent
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        listed = _sums(base)
        problems: Problems = []
        for file in files:
            wanted = listed.get(str(file.relative_to(base))) or _blob(file)
            if wanted and self.sha256(file) != wanted:
                problems.append(("WGT-5", f"{file}: sha256 mismatch"))
        return problems

    def sha256(self, file: Path) -> str:
        stat = file.stat()
        key = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)
        if key not in self.done:
            with file.open("rb") as stream:
                digest = hashlib.sha256()
                while chunk := stream.read(CHUNK):
                    digest.update(chunk)
            self.done[key] = digest.hexdigest()
        return self.done[key]


def _sums(folder: Path) -> dict[str, str]:
    try:
        lines = (folder / "SHA256SUMS").read_text().splitlines()
    except OSError:
        return {}
    return {m[2]: m[1].lower() for line in lines if (m := re.match(r"([0-9a-fA-F]{64}) [ *](.+)", line))}


def _blob(file: Path) -> str:
    """Hugging Face's cache names large files by their sha256."""
    name = os.path.basename(os.path.realpath(file))
    return name if file.is_symlink() and re.fullmatch(r"[0-9a-f]{64}", name) else ""
