"""Who becomes a node, stays one, and stops being one: what the store remembers, and each decision about it.

    token:  made ──▶ used by one node with one key (the same key may ask again: replies get lost) ──▶ expired
    node:   joined ──renewed…──▶ revoked ──joined with a token made for it──▶ joined

`/pki/tokens/<id>` and `/pki/nodes/<node>`. A join is one transaction: token used, node written, serial noted. Decisions
are plain functions of rows and time; every refusal has a code of a closed set and a text that says what to do.
"""

from __future__ import annotations

import datetime
import hashlib
from typing import Literal, get_args

import attrs
import msgspec
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from llmgw.errors import ConfigError, LlmgwError, Problem
from llmgw.pki.ca import PublicKey, chain_pem, key_of_request, sign_node
from llmgw.pki.folder import Identity
from llmgw.pki.names import serial_text, valid_node_id
from llmgw.pki.tokens import LIFE, MAX_LIFE, JoinToken, new_token
from llmgw.stores.base import Compare, Delete, Entry, Put, Store, absent, unchanged

TOKENS = "/pki/tokens/"
NODES = "/pki/nodes/"
MAX_SKEW = 300.0  # seconds; certificates are backdated by as much
TRIES = 5  # of a transaction that others overtake
KEEP_TOKENS = 1_000  # rows; expired ones go when a new token is made

Code = Literal[
    "token_unknown",
    "token_expired",
    "token_used",
    "token_other_node",
    "token_other_key",
    "node_active",
    "node_unknown",
    "node_revoked",
    "bad_node_id",
    "bad_request",
    "clock",
    "busy",
]
CODES: tuple[str, ...] = get_args(Code)


class Denied(LlmgwError):
    """A join or renewal that is refused. The text is for the person at the node."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code


class TokenRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """*digest*: keyed hash of the secret. *node*: the only one that may use it, "" = any. Times: seconds since 1970."""

    digest: str
    pepper: str
    expires: float
    node: str = ""
    pool: str = ""
    used_at: float = 0.0
    used_by: str = ""
    used_key: str = ""  # SHA-256 of the public key that it was used with
    certificate: str = ""  # what it was answered with: the same asker gets the same answer


class Issued(msgspec.Struct, frozen=True):
    serial: str
    expires: float


class NodeRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """*issued*: certificates that have not expired. *denied*: those of them that are refused all the same."""

    joined_at: float
    pool: str = ""
    address: str = ""
    revoked_at: float = 0.0
    issued: tuple[Issued, ...] = ()
    denied: tuple[Issued, ...] = ()

    def refused(self, node: str) -> set[str]:
        """What a door must not let in: the node's name while it is revoked, and serials."""
        names = {certificate.serial for certificate in self.denied}
        return names | {node} if self.revoked_at else names


@attrs.frozen
class JoinRequest:
    """What a node sends. *clock*: its wall clock, seconds since 1970. *address*: where it was seen, for messages."""

    token_id: str
    secret: str = attrs.field(repr=False)
    node: str
    request: bytes
    clock: float
    address: str


def judge_join(
    ask: JoinRequest, row: TokenRow | None, node: NodeRow | None, identity: Identity, key: str, now: float
) -> TokenRow:
    """The row of a token that may be used for this, or was used for just this. Raises Denied."""
    named = f"join token {ask.token_id}"
    remedy = "make a new one on the server: llmgw ctl token create"
    if row is None or row.pepper != identity.pepper.id or not identity.pepper.matches(ask.secret, row.digest):
        raise Denied("token_unknown", f"{named} is not known to this server, or its secret is wrong; {remedy}")
    if row.node and row.node != ask.node:
        raise Denied("token_other_node", f"{named} was made for node {row.node}, and this is {ask.node}; {remedy}")
    if row.used_at:
        if row.used_by != ask.node:
            raise Denied(
                "token_used",
                f"{named} was used at {moment(row.used_at)} by node {row.used_by}, and works once; {remedy}",
            )
        if row.used_key != key:
            raise Denied(
                "token_other_key",
                f"{named} was used at {moment(row.used_at)} by this node with another key; if that was not you, "
                f"revoke the node: llmgw ctl node revoke {ask.node}; else {remedy}",
            )
    if now > row.expires:
        raise Denied("token_expired", f"{named} expired at {moment(row.expires)}; {remedy}")
    if row.used_at:
        return row
    if node is not None and not row.node and not node.revoked_at:
        raise Denied(
            "node_active",
            f"node id {ask.node} is already active from {node.address}; give this machine another name (--node), "
            f"or replace that one with a token made for it: llmgw ctl token create --node {ask.node}",
        )
    if node is not None and not row.node:
        raise Denied(
            "node_revoked",
            f"node {ask.node} was revoked at {moment(node.revoked_at)}; to let it in again make a token for it: "
            f"llmgw ctl token create --node {ask.node}",
        )
    return row


def check_clock(clock: float, now: float, whose: str = "this machine's") -> None:
    """Raise Denied if a node's *clock* and the server's *now* are too far apart for certificates to hold."""
    skew = clock - now
    if abs(skew) > MAX_SKEW:
        side = "ahead of" if skew > 0 else "behind"
        raise Denied(
            "clock",
            f"{whose} clock is {abs(skew):.0f} s {side} the server's ({moment(now)} there); "
            "set it, for instance with `timedatectl set-ntp true`, then try again",
        )


def moment(seconds: float) -> str:
    return f"{datetime.datetime.fromtimestamp(seconds, datetime.UTC):%Y-%m-%d %H:%M:%S} UTC"


async def create_token(
    store: Store, identity: Identity, now: float, *, node: str = "", pool: str = "", life: float = LIFE
) -> JoinToken:
    """A new token; the store keeps its hash only. Raises ConfigError for a bad *node* or *life*."""
    problems = []
    if node and not valid_node_id(node):
        problems.append(Problem(_bad_node(node)))
    if not 1 <= life <= MAX_LIFE:
        problems.append(Problem(f"a join token lives between 1 s and 24 h, not {life:.0f} s"))
    rows = await store.range(TOKENS)
    stale = [e for e in rows.entries if msgspec.json.decode(e.value, type=TokenRow).expires < now - MAX_LIFE]
    if len(rows.entries) - len(stale) >= KEEP_TOKENS:
        problems.append(Problem(f"{KEEP_TOKENS} join tokens are open; wait until some expire"))
    if problems:
        raise ConfigError(problems)
    for entry in stale:
        await store.txn([unchanged(entry)], [Delete(entry.key)])
    token = new_token(identity.pin)
    row = TokenRow(identity.pepper.digest(token.secret), identity.pepper.id, now + life, node, pool)
    await store.txn(success=[Put(TOKENS + token.id, msgspec.json.encode(row))])
    return token


async def join(store: Store, identity: Identity, ask: JoinRequest, now: float) -> bytes:
    """The certificate chain (PEM) for a node that shows a good token. Raises Denied."""
    if not valid_node_id(ask.node):
        raise Denied("bad_node_id", _bad_node(ask.node))
    key = _key(ask.request)
    for _ in range(TRIES):
        token, member = await store.get(TOKENS + ask.token_id), await store.get(NODES + ask.node)
        node = _node_row(member)
        row = judge_join(
            ask, msgspec.json.decode(token.value, type=TokenRow) if token else None, node, identity, _print(key), now
        )
        check_clock(ask.clock, now)
        if row.used_at:
            return row.certificate.encode()
        assert token is not None
        leaf = sign_node(identity.nodes, key, ask.node, now)
        chain = chain_pem([leaf, *identity.nodes.chain])
        denied = _alive((*node.denied, *node.issued), now) if node else ()  # a node that joins anew starts afresh
        fresh = NodeRow(now, row.pool, ask.address, 0.0, (_issued(leaf),), denied)
        used = msgspec.structs.replace(
            row, used_at=now, used_by=ask.node, used_key=_print(key), certificate=chain.decode()
        )
        done = await store.txn(
            [unchanged(token), _same(NODES + ask.node, member)],
            [Put(token.key, msgspec.json.encode(used)), Put(NODES + ask.node, msgspec.json.encode(fresh))],
        )
        if done.succeeded:
            return chain
    raise Denied("busy", "others are changing the same token or node; try again")


async def renew(store: Store, identity: Identity, node: str, serial: str, request: bytes, now: float) -> bytes:
    """A new certificate chain for a node that came with a valid one. Raises Denied."""
    key = _key(request)
    for _ in range(TRIES):
        member = await store.get(NODES + node)
        row = _node_row(member)
        if row is None:
            raise Denied("node_unknown", f"node {node} is not known to this server; join it: llmgw ctl token create")
        if row.refused(node) & {node, serial}:
            raise Denied(
                "node_revoked", f"node {node} was revoked; to let it in again: llmgw ctl token create --node {node}"
            )
        leaf = sign_node(identity.nodes, key, node, now)
        fresh = msgspec.structs.replace(
            row, issued=(*_alive(row.issued, now), _issued(leaf)), denied=_alive(row.denied, now)
        )
        done = await store.txn([_same(NODES + node, member)], [Put(NODES + node, msgspec.json.encode(fresh))])
        if done.succeeded:
            return chain_pem([leaf, *identity.nodes.chain])
    raise Denied("busy", "others are changing the same node; try again")


async def revoke(store: Store, node: str, now: float) -> None:
    """From here on no door lets *node* in, with any certificate that it has. Raises Denied(node_unknown)."""
    for _ in range(TRIES):
        member = await store.get(NODES + node)
        row = _node_row(member)
        if row is None:
            raise Denied("node_unknown", f"there is no node {node}; see: llmgw ctl nodes")
        fresh = msgspec.structs.replace(
            row, revoked_at=row.revoked_at or now, issued=(), denied=_alive((*row.denied, *row.issued), now)
        )
        done = await store.txn([_same(NODES + node, member)], [Put(NODES + node, msgspec.json.encode(fresh))])
        if done.succeeded:
            return
    raise Denied("busy", f"others are changing node {node}; try again")


def refused_of(entry: Entry) -> set[str]:
    """What the row under `NODES` in *entry* keeps out."""
    return msgspec.json.decode(entry.value, type=NodeRow).refused(entry.key.removeprefix(NODES))


def _node_row(entry: Entry | None) -> NodeRow | None:
    return None if entry is None else msgspec.json.decode(entry.value, type=NodeRow)


def _same(key: str, entry: Entry | None) -> Compare:
    return absent(key) if entry is None else unchanged(entry)


def _key(request: bytes) -> PublicKey:
    try:
        return key_of_request(request)
    except ValueError as error:
        raise Denied("bad_request", str(error)) from error


def _print(key: PublicKey) -> str:
    return hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def _issued(leaf: x509.Certificate) -> Issued:
    return Issued(serial_text(leaf), leaf.not_valid_after_utc.timestamp())


def _alive(certificates: tuple[Issued, ...], now: float) -> tuple[Issued, ...]:
    return tuple(c for c in certificates if c.expires > now)


def _bad_node(node: str) -> str:
    return f"node id {node[:80]!r} must be a host name in lower case: letters, digits, '-' and '.', at most 63"
