"""SessionPrefixes: the prompts of each session so far, in blocks (`--enable-session-prefix-index`).

Caches evict blocks while a session continues. Its prompts are kept here, cached or not: a prompt that continues an earlier one
replaces it; a prompt that differs from all earlier ones (a branch, another agent) is kept in addition. Routing does not use
this index; `GET /routing/sessions` shows it.

Bounded by the number of sessions and by the total number of blocks: the least recently used session is dropped.
"""

from collections import OrderedDict

SESSIONS_MAX = 16_384
"""Upstream's bound."""
BRANCHES_MAX = 16
"""Per session; the least recently used branch is dropped."""
BYTES_MAX = 64 << 20
"""Eight bytes per block: 8 M blocks."""


class SessionPrefixes:
    """Sessions and the longest prompts of each."""

    def __init__(self, sessions_max: int = SESSIONS_MAX, bytes_max: int = BYTES_MAX) -> None:
        self._sessions_max = sessions_max
        self._bytes_max = bytes_max
        self._sessions: OrderedDict[str, list[bytes]] = OrderedDict()
        """Packed token hashes of prompts; sessions, and the prompts of each, in order of last use."""
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def blocks(self) -> int:
        """Return the number of blocks of all prompts."""
        return self._bytes // 8

    def note(self, session: str, blocks: bytes) -> None:
        """Record a prompt of a session."""
        known = self._sessions.setdefault(session, [])
        self._sessions.move_to_end(session)
        kept = [one for one in known if not blocks.startswith(one)]
        longer = next((one for one in kept if one.startswith(blocks)), None)
        if longer is not None:  # Nothing new: mark it as used.
            kept.remove(longer)
            blocks = longer
        kept.append(blocks)
        del kept[:-BRANCHES_MAX]
        self._bytes += sum(map(len, kept)) - sum(map(len, known))
        known[:] = kept
        while len(self._sessions) > self._sessions_max or (self._bytes > self._bytes_max and len(self._sessions) > 1):
            self.end(next(iter(self._sessions)))

    def end(self, session: str) -> None:
        """Remove a session."""
        self._bytes -= sum(map(len, self._sessions.pop(session, ())))

    def of(self, session: str) -> list[bytes]:
        """Return a session's prompts, last used first; none for an unknown session."""
        return self._sessions.get(session, [])[::-1]

    def names(self) -> list[str]:
        """Return the sessions, last used first."""
        return list(reversed(self._sessions))

    def validate(self) -> None:
        """Raise `AssertionError` if the parts disagree."""
        assert self._bytes == sum(len(one) for known in self._sessions.values() for one in known), "miscounted"
        assert len(self._sessions) <= self._sessions_max, "too many sessions"
        for known in self._sessions.values():
            assert known, "a session without a prompt"
            assert len(known) <= BRANCHES_MAX, "too many branches"
            for one in known:
                assert not any(other is not one and other.startswith(one) for other in known), (
                    "a prompt contains another"
                )
