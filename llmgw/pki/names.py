"""What a certificate of ours says about its holder, and which characters a node's name may have."""

from __future__ import annotations

import re

import attrs
from cryptography import x509
from cryptography.x509.oid import NameOID

NODES_HOST = "nodes.llmgw.internal"
"""Host part of every node's URI, and the only one that the nodes' authority may sign. Never resolved."""

NODE_ID = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,61}[a-z0-9])?")
"""A host name in lower case, ≤ 63 characters: it stands in certificates, paths, labels and log lines."""


def valid_node_id(text: str) -> bool:
    return NODE_ID.fullmatch(text) is not None and ".." not in text


def node_uri(node: str) -> str:
    return f"llmgw://{NODES_HOST}/{node}"


@attrs.frozen
class Holder:
    """Who a verified certificate was issued to.

    *name*: the common name. *node*: the node id where the certificate is a node's, else "". *serial*: lower-case hex.
    *expires*: seconds since 1970.
    """

    name: str
    node: str
    serial: str
    expires: float


def serial_text(certificate: x509.Certificate) -> str:
    return f"{certificate.serial_number:x}"


def holder_of(certificate: x509.Certificate) -> Holder | None:
    """The holder of a certificate whose chain was already verified; None if no leaf of ours looks like this.

    OpenSSL lets a certificate with CA:TRUE pass as a leaf, so that is refused here; a common name and a URI that
    disagree are refused too.
    """
    try:
        if certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca:
            return None
    except x509.ExtensionNotFound:
        return None
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    if len(names) != 1:
        return None
    name = str(names[0].value)
    try:
        alternative = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = alternative.get_values_for_type(x509.UniformResourceIdentifier)
    except x509.ExtensionNotFound:
        uris = []
    node = ""
    if uris:
        if uris != [node_uri(name)] or not valid_node_id(name):
            return None
        node = name
    return Holder(name, node, serial_text(certificate), certificate.not_valid_after_utc.timestamp())
