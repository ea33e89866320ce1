"""KV events: both encodings, gaps, restarts and lies."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.kvcache import events
from llmgw.kvcache.events import END, Cleared, ExactIndex, Feed, Malformed, Removed, Stored, decode

IDS = list(range(500, 564))


def pack(*found: Any) -> bytes:
    return msgspec.msgpack.encode([1.5, list(found), 0])


def stored(hashes: list[Any], parent: Any, ids: list[int], size: int = 16, **more: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": ids,
        "block_size": size,
        **more,
    }


def feed() -> tuple[ExactIndex, Feed]:
    index = ExactIndex()
    return index, Feed(index, "e")


@pytest.mark.parametrize(
    "event",
    [
        ["BlockStored", [1, 2], None, IDS[:32], 16, None],
        ["BlockStored", [1, 2], None, IDS[:32], 16, None, "GPU", None, [None, None]],
        stored(
            [1, 2],
            None,
            IDS[:32],
            lora_id=None,
            medium="GPU",
            lora_name=None,
            extra_keys=[None, None],
            group_idx=0,
            later="x",
        ),
        stored(
            [b"\1" * 24 + bytes(7) + b"\1", b"\2" * 24 + bytes(7) + b"\2"],
            None,
            IDS[:32],
            kv_cache_spec_kind="full_attention",
        ),
    ],
    ids=["tagged", "tagged-long", "map", "digests"],
)
def test_both_encodings_say_the_same(event: Any) -> None:
    (found,) = decode(pack(event))

    assert isinstance(found, Stored)
    assert (found.hashes, found.parent, found.block_size, found.lora, found.extra) == ((1, 2), None, 16, "", ())


def test_removed_and_cleared_in_both_encodings() -> None:
    assert decode(pack(["BlockRemoved", [3]], ["AllBlocksCleared"])) == (Removed((3,)), Cleared())
    maps = pack({"type": "BlockRemoved", "block_hashes": [3], "medium": "GPU"}, {"type": "AllBlocksCleared"})
    assert decode(maps) == (Removed((3,)), Cleared())


@pytest.mark.parametrize(
    "event",
    [
        stored([1], None, IDS[:16], medium="CPU"),
        stored([1], None, IDS[:16], group_idx=1),
        stored([1], None, IDS[:16], kv_cache_spec_kind="sliding_window"),
        {"type": "BlockRemoved", "block_hashes": [1], "medium": "DISK"},
        {"type": "SomethingLater", "block_hashes": 7},
        ["SomethingLater"],
    ],
)
def test_other_tiers_groups_and_kinds_are_left_out(event: Any) -> None:
    assert decode(pack(event)) == ()


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode("x"),
        msgspec.msgpack.encode([1.0, 7]),
        pack(7),
        pack(stored([1], None, IDS[:15])),
        pack(stored([1], None, [*IDS[:15], -1])),
        pack({**stored([1], None, []), "token_ids": [*IDS[:15], "x"]}),
        pack(stored([1], None, [*IDS[:15], 1 << 32])),
        pack(stored([1], None, IDS[:16], size=0)),
        pack(stored([1], None, IDS[:16], size=1 << 40)),
        pack(stored([b"short"], None, IDS[:16])),
        pack(stored(["x"], None, IDS[:16])),
        pack(stored([1], "x", IDS[:16])),
        pack({"type": "BlockRemoved", "block_hashes": 5}),
        b"\x91" * 100_000,
        b"\0" * (events.PAYLOAD + 1),
    ],
    ids=range(17),
)
def test_what_breaks_a_limit_is_refused(payload: bytes) -> None:
    with pytest.raises(Malformed):
        decode(payload)


@given(st.binary(max_size=200))
def test_any_bytes_are_events_or_malformed(payload: bytes) -> None:
    try:
        decode(payload)
    except Malformed:
        pass


def test_a_prompt_is_found_by_its_tokens() -> None:
    index, live = feed()
    live.message(0, pack(stored([71, 72], None, IDS[:32])))
    live.message(1, pack(stored([73], 72, IDS[32:48])))

    assert index.match(IDS) == {"e": 48}
    assert index.match([*IDS[:16], 1, *IDS[17:]]) == {"e": 16}
    assert index.match(IDS, lora="sql") == {}
    live.message(2, pack({"type": "BlockRemoved", "block_hashes": [72]}))
    assert index.match(IDS) == {"e": 16}


def test_adapters_and_media_are_apart() -> None:
    index, live = feed()
    live.message(
        0, pack(stored([1], None, IDS[:16], lora_name="sql"), stored([2], None, IDS[:16], extra_keys=[["image", 3]]))
    )

    assert index.match(IDS) == {}
    assert index.match(IDS, "sql") == {"e": 16}


def test_two_engine_hashes_of_one_text_go_one_by_one() -> None:
    index, live = feed()
    live.message(0, pack(stored([1], None, IDS[:16]), stored([2], None, IDS[:16]), stored([2], None, IDS[:16])))
    live.message(1, pack(["BlockRemoved", [1]]))
    assert index.match(IDS) == {"e": 16}
    live.message(2, pack(["BlockRemoved", [2]]))

    assert index.match(IDS) == {}
    assert index.blocks("e") == 0


def test_a_gap_is_not_trusted_until_the_replay_has_closed_it() -> None:
    index, live = feed()
    live.message(0, pack(stored([1], None, IDS[:16])))
    live.message(3, pack(stored([4], 3, IDS[48:64])))

    assert (live.state, live.replay_from, index.match(IDS)) == ("resync", 1, {})
    live.replayed(1, pack(stored([2], 1, IDS[16:32])))
    live.message(4, pack(["BlockRemoved", [4]]))
    live.replayed(2, pack(stored([3], 2, IDS[32:48])))
    live.replayed(3, pack(stored([4], 3, IDS[48:64])))
    live.replayed(END, b"")
    assert (live.state, live.replay_from, index.match(IDS)) == ("live", None, {"e": 48})
    live.message(5, pack(stored([4], 3, IDS[48:64])))
    assert index.match(IDS) == {"e": 64}


def test_a_live_message_that_the_replay_brought_already_is_no_restart() -> None:
    index, live = feed()
    live.message(0, pack(stored([1], None, IDS[:16])))
    live.message(2, pack())
    for seq in (1, 2, 3):
        live.replayed(seq, pack())
    live.replayed(END, b"")
    live.message(3, pack())

    assert (live.state, index.match(IDS)) == ("live", {"e": 16})


@pytest.mark.parametrize("answer", ["none", "too late"])
def test_a_gap_that_no_replay_closes_forgets_all(answer: str) -> None:
    index, live = feed()
    live.message(0, pack(stored([1], None, IDS[:16])))
    live.message(5, pack(stored([9], None, IDS[16:32])))
    if answer == "none":
        live.no_replay()
    else:
        live.replayed(4, pack())
        live.replayed(END, b"")

    assert index.match(IDS) == {}
    assert index.match(IDS[16:]) == {"e": 16}


@pytest.mark.parametrize("seq", [0, 1, 7])
def test_a_publisher_that_counts_anew_was_restarted(seq: int) -> None:
    index, live = feed()
    for number in range(9):
        live.message(number, pack(stored([number + 1], number or None, IDS[:16])))
    live.message(seq, pack())

    assert index.blocks("e") == 0
    assert (live.state, live.replay_from) == (("live", None) if seq < 2 else ("resync", 0))


def test_who_joins_late_asks_for_the_beginning() -> None:
    index, live = feed()
    live.message(40, pack(stored([3], 2, IDS[32:48])))
    assert (live.state, live.replay_from, index.trusted) == ("resync", 0, set())
    live.no_replay()

    assert (live.state, index.match(IDS)) == ("live", {})


def test_a_lost_connection_is_not_trusted_and_costs_nothing_if_nothing_was_missed() -> None:
    index, live = feed()
    live.message(0, pack(stored([1], None, IDS[:16])))
    live.disconnected()
    assert index.match(IDS) == {}
    live.message(1, pack())

    assert index.match(IDS) == {"e": 16}


def test_a_malformed_message_forgets_all() -> None:
    index, live = feed()
    live.message(0, pack(stored([1], None, IDS[:16])))
    live.message(1, b"\xc1")
    live.message(2, pack(stored([5], None, IDS[:16])))

    assert (live.malformed, index.match(IDS)) == (1, {"e": 16})


def test_what_waits_for_a_replay_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "KEPT", 4)
    index, live = feed()
    live.message(0, pack(stored([1], None, IDS[:16])))
    for seq in range(2, 9):
        live.message(seq, pack(stored([seq], None, IDS[16:32])))

    assert (live.state, index.match(IDS), index.match(IDS[16:])) == ("live", {}, {"e": 16})


def test_an_endpoint_that_is_gone_leaves_nothing() -> None:
    index, live = feed()
    live.message(0, pack(stored([1], None, IDS[:16])))
    index.forget("e")

    assert (index.match(IDS), index.trusted, index.block_size) == ({}, set(), {})


@given(st.integers(0, 2**32), st.integers(1, 60))
def test_any_losses_never_leave_a_wrong_belief(seed: int, count: int) -> None:
    """A real engine's cache beside the index: what the index says is held, is held."""
    rng = random.Random(seed)
    index, live = feed()
    cache: dict[int, tuple[int, ...]] = {}
    log: list[bytes] = []
    for seq in range(count):
        found: list[Any] = []
        if cache and rng.random() < 0.4:
            gone = rng.choice(list(cache))
            del cache[gone]
            found.append(["BlockRemoved", [gone]])
        parent = rng.choice([None, *cache])
        ids = (*(cache[parent] if parent is not None else ()), *(rng.randrange(3) for _ in range(2)))
        engine = 1 + hash(ids) % (1 << 60)
        if engine not in cache and len(ids) <= 8:
            cache[engine] = ids
            found.append(stored([engine], parent, list(ids[-2:]), 2))
        log.append(pack(*found))
        if rng.random() < 0.8:
            live.message(seq, log[-1])
        if live.replay_from is not None and rng.random() < 0.5:
            oldest = rng.choice([live.replay_from, max(0, seq - 5)])
            live.replay_from = None
            for number in range(oldest, len(log)):
                live.replayed(number, log[number])
            live.replayed(END, b"") if rng.random() < 0.8 else live.no_replay()
        if live.state == "live" and live._last == seq:
            for ids in {tuple(rng.randrange(3) for _ in range(8)) for _ in range(20)} | set(cache.values()):
                depth = index.match(ids).get("e", 0)
                for end in range(2, depth + 1, 2):
                    assert ids[:end] in cache.values()
