"""Which endpoint made which stored answer (`/v1/responses`), so that who refers to it is sent there.

Bounded: the newest `MOST` ids, some 300 bytes each. Nothing of it survives a restart; the engines keep their answers
in memory, too.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

MOST = 65536


class Place(msgspec.Struct, frozen=True, gc=False):
    """*endpoint*: its id. *model*: as its request asked for it."""

    endpoint: str
    model: str


class Kept:
    """An answer belongs to the principal whose request made it; to others it does not exist."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._places: OrderedDict[tuple[str, str], Place] = OrderedDict()

    def __len__(self) -> int:
        return len(self._places)

    def keep(self, principal: str, answer: str, endpoint: str, model: str) -> None:
        self._places[principal, answer] = Place(endpoint, model)
        self._places.move_to_end((principal, answer))
        if len(self._places) > self._most:
            self._places.popitem(last=False)

    def find(self, principal: str, answer: str) -> Place | None:
        """Using it keeps it young."""
        found = self._places.get((principal, answer))
        if found is not None:
            self._places.move_to_end((principal, answer))
        return found
