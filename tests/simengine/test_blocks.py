"""The block pool against a model that keeps lists and counts them anew each time."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.simengine.blocks import BlockPool, block_key


class Brute:
    """The rules as sentences: every question is answered by looking at everything."""

    def __init__(self, usable: int, keep: int) -> None:
        self.usable, self.keep = usable, keep
        self.refs: dict[int, int] = {}  # block: references, 0 included once it was ever used
        self.keys: dict[int, int] = {}  # block: key
        self.freed: list[int] = []  # blocks with a key and no reference, oldest first
        self.evicted: list[int] = []

    def free(self) -> int:
        return self.usable - sum(1 for refs in self.refs.values() if refs)

    def find(self, keys: list[int]) -> list[int]:
        found = []
        for key in keys:
            blocks = [block for block, its in self.keys.items() if its == key]
            if not blocks:
                break
            found += blocks
        return found

    def take(self, blocks: list[int], shared: list[int]) -> None:
        for block in shared:
            self.refs[block] += 1
            if block in self.freed:
                self.freed.remove(block)
        fresh = blocks[len(shared) :]
        blank = [b for b in range(1, self.usable + 1) if not self.refs.get(b) and b not in self.freed]
        assert len(set(fresh)) == len(fresh)
        for position, block in enumerate(fresh):
            if position < len(blank):
                assert block in blank
            else:  # only then, and the oldest first
                oldest = self.freed.pop(0)
                assert block == oldest
                self.evicted.append(self.keys.pop(oldest))
            self.refs[block] = 1

    def publish(self, block: int, key: int) -> bool:
        if self.keep == 0 or key in self.keys.values():
            return False
        if block in self.keys:
            self.evicted.append(self.keys[block])
        self.keys[block] = key
        return True

    def give_back(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.refs[block] -= 1
            if not self.refs[block] and block in self.keys:
                self.freed.append(block)
        while len(self.freed) > self.keep:
            self.evicted.append(self.keys.pop(self.freed.pop(0)))


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(0, 5), st.lists(st.integers(1, 9), max_size=4)),
        st.tuples(st.just("publish"), st.integers(0, 50), st.integers(1, 9)),
        st.tuples(st.just("back"), st.integers(0, 50), st.none()),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(usable=st.integers(1, 10), keep=st.one_of(st.none(), st.integers(0, 4)), steps=STEPS)
def test_the_pool_keeps_the_rules(usable: int, keep: int | None, steps: list[tuple[str, int, object]]) -> None:
    pool = BlockPool(usable + 1, keep)
    pool.log = []
    model = Brute(usable, usable if keep is None else keep)
    held: list[list[int]] = []
    for what, number, more in steps:
        if what == "take":
            assert isinstance(more, list)
            shared = pool.find(more, 3)
            assert shared == model.find(more)[:3]
            if len(set(shared)) < len(shared):
                continue  # a chain never repeats a key
            revived = sum(1 for block in shared if not model.refs[block])
            blocks = pool.take(number, shared)
            assert (blocks is None) == (number > model.free() - revived)
            if blocks is not None:
                model.take(blocks, shared)
                held.append(blocks)
        elif what == "publish" and held and held[number % len(held)]:
            assert isinstance(more, int)
            blocks = held[number % len(held)]
            block = blocks[number % len(blocks)]
            assert pool.publish(block, more) == model.publish(block, more)
        elif what == "back" and held:
            blocks = held.pop(number % len(held))
            pool.give_back(blocks)
            model.give_back(blocks)
        assert pool.free == model.free()
        assert pool.used + pool.free == pool.usable == usable
        assert pool.findable == len(model.keys)
        assert pool.log == model.evicted
    for blocks in held:
        pool.give_back(blocks)
    assert pool.used == 0
    assert pool.usage() == 0.0
    pool.clear()
    assert pool.findable == 0
    assert pool.free == usable


@given(tokens=st.lists(st.integers(0, 2**32 - 1), min_size=8, max_size=40), at=st.integers(0, 39))
def test_a_key_depends_on_all_before_it_and_on_nothing_after(tokens: list[int], at: int) -> None:
    def chain(given: list[int]) -> list[int]:
        parent, keys = 0, []
        for start in range(0, len(given) - 3, 4):
            parent = block_key(parent, given[start : start + 4])
            keys.append(parent)
        return keys

    at %= len(tokens)
    changed = [*tokens[:at], tokens[at] ^ 1, *tokens[at + 1 :]]
    before, after = chain(tokens), chain(changed)

    assert before[: at // 4] == after[: at // 4]
    assert all(a != b for a, b in zip(before[at // 4 :], after[at // 4 :], strict=True))


def test_what_else_a_block_depends_on_changes_its_key() -> None:
    plain = block_key(0, [1, 2, 3, 4])

    keys = {
        plain,
        block_key(0, [1, 2, 3, 4], ("salt",)),
        block_key(0, [1, 2, 3, 4], ("lora",)),
        block_key(7, [1, 2, 3, 4]),
    }

    assert len(keys) == 4
    assert all(0 < key < 2**64 for key in keys)
