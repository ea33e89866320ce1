"""What may be downloaded: addresses, URLs, contents."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.errors import Refused
from llmgw.pipeline.media import check_url, data_uri_type, may_dial, sniff


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0", "127.0.0.1", "127.8.8.8", "169.254.169.254", "100.64.0.1", "10.0.0.1", "172.31.0.1", "192.168.1.1",
        "224.0.0.1", "255.255.255.255", "240.0.0.1", "198.18.0.1", "192.0.2.1", "192.0.0.170",
        "::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "fd12::1", "ff02::1", "2001:db8::1", "2001::1", "fec0::1", "100::1",
        "::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::127.0.0.1", "64:ff9b::10.0.0.1", "64:ff9b:1::1",
        "2002:7f00:1::", "2002:a00:1::1", "::127.0.0.1", "not an address", "",
    ],
)  # fmt: skip
def test_blocked(address: str) -> None:
    assert not may_dial(address)


@pytest.mark.parametrize("address", ["1.1.1.1", "93.184.216.34", "2606:4700::1", "64:ff9b::1.1.1.1", "::ffff:8.8.8.8"])
def test_public(address: str) -> None:
    assert may_dial(address)


@pytest.mark.parametrize("address", ["10.1.2.3", "172.16.0.1", "192.168.0.1", "::ffff:10.0.0.1"])
def test_private_networks_by_switch(address: str) -> None:
    assert may_dial(address, allow_private=True)


@pytest.mark.parametrize("address", ["127.0.0.1", "169.254.169.254", "100.64.0.1", "fd00::1", "::1"])
def test_the_switch_opens_nothing_else(address: str) -> None:
    assert not may_dial(address, allow_private=True)


@given(st.ip_addresses(v=4))
def test_wrapping_an_address_hides_nothing(address: ipaddress.IPv4Address) -> None:
    plain = may_dial(str(address))
    number = int(address)
    assert may_dial(f"::ffff:{address}") == plain
    assert may_dial(f"64:ff9b::{number >> 16:x}:{number & 0xFFFF:x}") == plain
    assert may_dial(f"2002:{number >> 16:x}:{number & 0xFFFF:x}::1") == plain


def test_a_network_that_the_operator_opened() -> None:
    assert may_dial("127.0.0.1", also=[ipaddress.ip_network("127.0.0.0/8")])


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd", "ftp://a.example/x", "gopher://a.example/", "//a.example/x", "a.example/x", "HTTP:/x", "http://",
        "http://a.example:22/", "http://a.example:99999/", "http://user@a.example/", "http://a.example/\r\nX: y",
        "http://a.example\\@b.example/", "http://[::1/", "http://a.example/ x", "http://" + "a" * 9000,
    ],
)  # fmt: skip
def test_refused_urls(url: str) -> None:
    with pytest.raises(Refused) as caught:
        check_url(url)
    assert caught.value.refusal.reason == "bad_field"


def test_url_parts() -> None:
    assert check_url("HTTPS://A.Example./x?y#z") == ("https", "a.example", 443)
    assert check_url("http://[2606:4700::1]:8080/x") == ("http", "2606:4700::1", 8080)


def test_domains_are_exact_whatever_the_case() -> None:
    assert check_url("http://img.example/x", ["IMG.Example"])[1] == "img.example"
    for host in ("a.img.example", "img.example.evil", "evilimg.example"):
        with pytest.raises(Refused, match="allowed domains"):
            check_url(f"http://{host}/x", ["img.example"])


@pytest.mark.parametrize(
    ("uri", "kind"),
    [
        ("data:image/jpeg;base64,QQ==", "image/jpeg"),
        ("data: IMAGE/PNG ; Base64 ,QQ==", "image/png"),
        ("data:image/webp;charset=x;base64,", "image/webp"),
    ],
)
def test_data_uri(uri: str, kind: str) -> None:
    assert data_uri_type(uri) == kind


@pytest.mark.parametrize(
    "uri",
    ["data:image/png;base64", "data:image/png,QQ==", "data:;base64,QQ==", "data:image/svg+xml;base64,QQ==", "data:,x"],
)
def test_refused_data_uris(uri: str) -> None:
    with pytest.raises(Refused):
        data_uri_type(uri)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"\xff\xd8\xff\xe0", "image/jpeg"),
        (b"\x89PNG\r\n\x1a\n...", "image/png"),
        (b"GIF89a", "image/gif"),
        (b"RIFF\0\0\0\0WEBPVP8 ", "image/webp"),
        (b"\0\0\0 ftypavif", "image/avif"),
        (b"<svg xmlns=", None),
        (b"<html>", None),
        (b"RIFF\0\0\0\0WAVE", None),
        (b"", None),
    ],
)
def test_sniffed_type(data: bytes, kind: str | None) -> None:
    assert sniff(data) == kind
