"""Which media may be downloaded: URLs, addresses and contents. The client writes the URL; the download runs inside.

A URL that a client chose is a way to make this host speak to hosts that the client cannot reach (cloud metadata, admin
ports, neighbours). So: two schemes, few ports, an optional list of host names, and the *address that is dialled* must
be a public one, at every hop, whatever name led to it. Addresses that wrap another (IPv4-mapped, NAT64, 6to4) are
judged by what they wrap.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

from llmgw.pipeline.wire import refuse

SCHEMES = {"http": 80, "https": 443}
PORTS = (80, 443, 8080, 8443)
"""Where web servers listen. Other ports speak other protocols, some of which take an HTTP request for commands."""

MAX_URL = 8192
MAX_REDIRECTS = 5

INLINE_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")

_PRIVATE = tuple(map(ipaddress.ip_network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")))
_BLOCKED = tuple(
    map(
        ipaddress.ip_network,
        (
            "0.0.0.0/8",  # this host
            "100.64.0.0/10",  # carrier-grade NAT
            "127.0.0.0/8",
            "169.254.0.0/16",  # link-local, cloud metadata
            "192.0.0.0/24",  # protocol assignments
            "192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24",  # documentation
            "192.88.99.0/24",  # 6to4 relays
            "198.18.0.0/15",  # benchmarks
            "224.0.0.0/4",  # multicast
            "240.0.0.0/4",  # reserved, broadcast
            "::/128", "::1/128",
            "64:ff9b:1::/48",  # local NAT64: what it wraps is the network's own business
            "100::/64",  # discard
            "2001::/23",  # protocol assignments, Teredo among them
            "2001:db8::/32", "3fff::/20",  # documentation
            "5f00::/16",  # segment routing
            "fc00::/7",  # unique local: never, also where private networks are allowed
            "fe80::/10", "fec0::/10",
            "ff00::/8",
        ),
    )
)  # fmt: skip
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_COMPATIBLE = ipaddress.IPv6Network("::/96")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def unwrap(address: Address) -> Address:
    """The IPv4 address that *address* stands for, or itself."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address.sixtofour is not None:
            return address.sixtofour
        if address in _NAT64 or (address in _COMPATIBLE and int(address) > 1):
            return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def may_dial(text: str, *, allow_private: bool = False, also: Collection[Network] = ()) -> bool:
    """Whether a download may connect to the literal address *text*. *also*: networks that an operator opened."""
    try:
        address = unwrap(ipaddress.ip_address(text.split("%", 1)[0]))
    except ValueError:
        return False
    if any(address in network for network in also):
        return True
    if any(address in network for network in _PRIVATE):
        return allow_private
    return not any(address in network for network in _BLOCKED)


def check_url(url: str, domains: Collection[str] = (), ports: Collection[int] = PORTS) -> tuple[str, str, int]:
    """(scheme, host, port) of a URL that may be tried. Raises Refused(bad_field) naming what is wrong with it."""
    if len(url) > MAX_URL:
        raise _no(f"a media URL is longer than {MAX_URL} characters")
    if any(ord(char) <= 0x20 or ord(char) == 0x7F for char in url) or "\\" in url:
        raise _no("a media URL holds a space, a control character or a backslash")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise _no(f"a media URL cannot be read: {error}") from None
    if parts.scheme not in SCHEMES:
        raise _no(f"media URLs must be http, https or data; this one is {parts.scheme or 'without a scheme'!r}")
    if parts.username is not None or parts.password is not None:
        raise _no("a media URL holds a user name or password")
    host = (parts.hostname or "").rstrip(".")
    if not host:
        raise _no("a media URL names no host")
    port = SCHEMES[parts.scheme] if port is None else port
    if port not in ports:
        raise _no(f"media may be fetched from ports {', '.join(map(str, ports))}; this URL names {port}")
    if domains and host not in {domain.lower().rstrip(".") for domain in domains}:
        raise _no("the host of a media URL is not among the allowed domains")
    return parts.scheme, host, port


def data_uri_type(uri: str) -> str:
    """Content type of a ``data:`` URI (its first characters are enough). Raises Refused(bad_field).

    The payload is not looked at: the engine decodes it.
    """
    head, comma, _ = uri.removeprefix("data:").partition(",")
    kind, *parameters = (part.strip() for part in head.split(";"))
    if not comma:
        raise _no("a data URI has no comma")
    if "base64" not in (parameter.lower() for parameter in parameters):
        raise _no("a data URI is not base64")
    if kind.lower() not in INLINE_TYPES:
        raise _no(f"a data URI has type {kind[:40]!r}; known: {', '.join(INLINE_TYPES)}")
    return kind.lower()


_MAGIC = (
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
    (b"BM", "image/bmp"),
    (b"II*\0", "image/tiff"),
    (b"MM\0*", "image/tiff"),
)


def sniff(data: bytes) -> str | None:
    """The image type that *data* begins like; None: no image that engines read. A server's own word is not asked for."""
    for magic, kind in _MAGIC:
        if data.startswith(magic):
            return kind
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return "image/avif" if data[4:12] in (b"ftypavif", b"ftypavis") else None


def _no(message: str) -> Exception:
    return refuse("bad_field", message, "messages")
