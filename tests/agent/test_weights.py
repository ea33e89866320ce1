"""Weights that are whole, and the ways in which they are not."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from pathlib import Path

import pytest

from llmgw.agent.account import Account, account
from llmgw.agent.weights import Checksums, inspect, locate

ME = account("")


def safetensors(path: Path, size: int = 64, name: str = "w") -> None:
    header = json.dumps({name: {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(size))


def gguf(path: Path, tensor: int = 64, present: int | None = None) -> None:
    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    body = b"GGUF" + struct.pack("<IQQ", 3, 1, 3)
    body += text("general.architecture") + struct.pack("<I", 8) + text("llama")
    body += text("llama.block_count") + struct.pack("<II", 4, 2)
    body += text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 2000) + text("x") * 2000
    body += text("blk.0.w") + struct.pack("<IQIQ", 1, tensor, 24, 0)
    body += bytes(-len(body) % 32)
    path.write_bytes(body + bytes(tensor if present is None else present))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "llama"
    folder.mkdir()
    shards = {f"l{n}": f"model-0000{n}-of-00002.safetensors" for n in (1, 2)}
    for name, file in shards.items():
        safetensors(folder / file, name=name)
    index = {"metadata": {"total_size": 128}, "weight_map": shards}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (folder / "tokenizer.json").write_text("{}")
    return folder


def rows(folder: Path, user: Account = ME) -> dict[str, str]:
    return dict(reversed(inspect(str(folder), (), user)[1]))


def test_a_whole_model(model: Path) -> None:
    weights, problems = inspect("llama", (str(model.parent),), ME)
    assert problems == []
    assert (weights.path, weights.format, weights.bytes, weights.bytes_total) == (str(model), "safetensors", 128, 128)
    assert weights.problem == ""
    assert "LlamaForCausalLM" in weights.config
    again, _ = inspect(str(model), (), ME)
    assert again.digest == weights.digest


def test_duplicates_do_not_count(model: Path) -> None:
    safetensors(model / "consolidated.safetensors", 512)
    assert inspect(str(model), (), ME)[0].bytes == 128


def test_a_missing_shard(model: Path) -> None:
    (model / "model-00002-of-00002.safetensors").unlink()
    assert rows(model) == {"WGT-2": "1 of 2 shards present (missing model-00002-of-00002.safetensors)"}


def test_a_truncated_shard(model: Path) -> None:
    file = model / "model-00002-of-00002.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    assert "truncated" in rows(model)["WGT-3"]


def test_a_lfs_pointer(model: Path) -> None:
    (model / "model-00002-of-00002.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
    )
    assert rows(model)["WGT-3"].endswith("is a git-lfs pointer, not the weights")


@pytest.mark.parametrize("data", [b"", b"abc", b"\xff" * 64, struct.pack("<Q", 4) + b"nope"])
def test_what_is_no_safetensors_file(model: Path, data: bytes) -> None:
    (model / "model-00001-of-00002.safetensors").write_bytes(data)
    assert "WGT-3" in rows(model)


def test_a_dangling_link(model: Path) -> None:
    file = model / "model-00002-of-00002.safetensors"
    file.unlink()
    file.symlink_to("../blobs/none")
    assert "dangling link to ../blobs/none" in rows(model)["WGT-1"]


def test_a_file_that_the_engines_user_cannot_read(model: Path) -> None:
    (model / "tokenizer.json").chmod(0o600)
    nobody = Account("nobody", 65534, 65534, frozenset({65534}), "/")
    assert "cannot be read by the engines' user (uid 65534)" in rows(model, nobody)["WGT-1"]


def test_small_files_belong_to_it(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    assert "no tokenizer" in rows(model)["WGT-6"]
    (model / "config.json").write_text("{")
    assert any("not JSON" in text for _, text in inspect(str(model), (), ME)[1])


def test_half_downloaded(model: Path) -> None:
    (model / "x.incomplete").write_text("")
    assert "half downloaded" in rows(model)["WGT-5"]


def test_absent(tmp_path: Path) -> None:
    weights, problems = inspect("meta/llama", (str(tmp_path),), ME)
    assert problems == [("WGT-1", f"weights not found: meta/llama in {tmp_path}")]
    assert weights.path == ""
    (tmp_path / "empty").mkdir()
    assert "holds no weights" in rows(tmp_path / "empty")["WGT-1"]


def test_gguf(tmp_path: Path) -> None:
    gguf(tmp_path / "m.gguf")
    weights, problems = inspect("m.gguf", (str(tmp_path),), ME)
    assert problems == []
    assert (weights.format, weights.bytes, weights.path) == ("gguf", 64, str(tmp_path / "m.gguf"))
    assert json.loads(weights.config) == {"general.architecture": "llama", "llama.block_count": 2}


@pytest.mark.parametrize(("present", "words"), [(10, "truncated at tensor blk.0.w")])
def test_short_gguf(tmp_path: Path, present: int, words: str) -> None:
    gguf(tmp_path / "m.gguf", present=present)
    assert words in rows(tmp_path / "m.gguf")["WGT-4"]
    (tmp_path / "n.gguf").write_bytes(b"GGUF\x03")
    assert "ends inside its header" in rows(tmp_path / "n.gguf")["WGT-4"]
    (tmp_path / "o.gguf").write_bytes(b"PK\x03\x04" + bytes(100))
    assert "does not begin with GGUF" in rows(tmp_path / "o.gguf")["WGT-4"]


def test_split_gguf(tmp_path: Path) -> None:
    gguf(tmp_path / "m-00001-of-00002.gguf")
    assert rows(tmp_path / "m-00001-of-00002.gguf") == {"WGT-4": "part 2 of 2 is missing"}
    gguf(tmp_path / "m-00002-of-00002.gguf")
    weights, problems = inspect(str(tmp_path), (), ME)
    assert problems == []
    assert (weights.bytes, weights.path) == (128, str(tmp_path / "m-00001-of-00002.gguf"))


def test_a_folder_of_several_models_is_no_model(tmp_path: Path) -> None:
    gguf(tmp_path / "a.gguf")
    gguf(tmp_path / "b.gguf")
    assert "several GGUF models" in rows(tmp_path)["WGT-4"]


def test_huggingface_cache(tmp_path: Path, model: Path) -> None:
    hub = tmp_path / "models--meta--llama"
    (hub / "refs").mkdir(parents=True)
    (hub / "refs" / "main").write_text("abc")
    (hub / "snapshots").mkdir()
    model.rename(hub / "snapshots" / "abc")
    assert locate("meta/llama", (str(tmp_path),)) == hub / "snapshots" / "abc"


def test_a_reference_does_not_leave_its_folder(tmp_path: Path, model: Path) -> None:
    (tmp_path / "inner").mkdir()
    assert locate("../llama", (str(tmp_path / "inner"),)) is None


def test_checksums(model: Path) -> None:
    file = model / "model-00001-of-00002.safetensors"
    good = hashlib.sha256(file.read_bytes()).hexdigest()
    (model / "SHA256SUMS").write_text(f"{good}  {file.name}\n")
    sums = Checksums()
    assert sums.verify(str(model)) == []
    blob = model.parent / ("0" * 64)
    (model / "model-00002-of-00002.safetensors").rename(blob)
    (model / "model-00002-of-00002.safetensors").symlink_to(blob)
    assert [row for row, _ in sums.verify(str(model))] == ["WGT-5"]
