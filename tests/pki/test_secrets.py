"""Tokens and keys as text; secrets as files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.errors import ConfigError
from llmgw.pki import files, keys, tokens
from llmgw.pki.files import read_file, write_atomic
from llmgw.pki.secret import load_pepper, make_pepper


def test_a_token_survives_its_text() -> None:
    token = tokens.new_token(bytes(range(32)))
    text = token.text()
    assert len(text) == 96
    assert tokens.parse_token(f"  {text}\n") == token
    assert tokens.new_token(bytes(32)).secret != token.secret


@pytest.mark.parametrize("change", [lambda t: "", lambda t: t[:-1], lambda t: t.upper(), lambda t: "x" + t[1:]])
def test_a_token_that_is_none(change: object) -> None:
    text = tokens.new_token(bytes(32)).text()
    with pytest.raises(ConfigError, match=r"it looks like lgwj1\.ID\.SECRET\.PIN, 96 characters") as caught:
        tokens.parse_token(change(text))  # type: ignore[operator]
    assert text.split(".")[2] not in str(caught.value)


def test_a_key_survives_its_text() -> None:
    key = keys.new_key()
    assert len(key.id) == 8
    assert len(key.secret) == 40
    assert keys.parse_key(key.text()) == key
    assert key.secret not in repr(key)


@given(at=st.integers(0, 61), letter=st.sampled_from(keys.ALPHABET))
def test_a_mistyped_key_is_none(at: int, letter: str) -> None:
    text = keys.ApiKey("abcd1234", "k" * 40).text()
    typed = text[:at] + letter + text[at + 1 :]
    assert (keys.parse_key(typed) is None) == (typed != text)


@given(st.text())
def test_any_text_is_a_key_or_none(text: str) -> None:
    assert keys.parse_key(text) is None


def test_pepper(tmp_path: Path) -> None:
    pepper = make_pepper(tmp_path / "pepper")
    assert load_pepper(tmp_path / "pepper") == pepper
    digest = pepper.digest("secret")
    assert pepper.matches("secret", digest)
    assert not pepper.matches("Secret", digest)
    assert make_pepper(tmp_path / "other").digest("secret") != digest
    (tmp_path / "pepper").write_bytes(b"short")
    with pytest.raises(ConfigError, match="pepper has 5 bytes instead of 32"):
        load_pepper(tmp_path / "pepper")


def test_written_whole_and_private_whatever_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o000)
    try:
        write_atomic(tmp_path / "key", b"1")
        write_atomic(tmp_path / "key", b"2")
    finally:
        os.umask(old)
    assert (tmp_path / "key").read_bytes() == b"2"
    assert os.stat(tmp_path / "key").st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["key"]


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_atomic(tmp_path / "key", b"old")

    def broken(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="No space"):
        write_atomic(tmp_path / "key", b"new")
    assert (tmp_path / "key").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["key"]


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(b"theirs")
    os.symlink(tmp_path / "elsewhere", tmp_path / "key")
    write_atomic(tmp_path / "key", b"mine")
    assert (tmp_path / "elsewhere").read_bytes() == b"theirs"
    assert not (tmp_path / "key").is_symlink()


@pytest.mark.parametrize(
    ("data", "mode", "text"),
    [
        (None, 0o600, "key is missing: no such file"),
        (b"", 0o600, "key is empty; restore it from a backup"),
        (bytes(files.MAX_FILE + 1), 0o600, "is this the right file"),
        (b"x", 0o640, r"can be read by others \(mode 0640\); run: chmod 600"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, data: bytes | None, mode: int, text: str) -> None:
    path = tmp_path / "key"
    if data is not None:
        path.write_bytes(data)
        path.chmod(mode)
    with pytest.raises(ConfigError, match=text):
        read_file(path, "key", secret=True)
