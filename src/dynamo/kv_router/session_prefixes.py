"""SessionPrefixes: what each session has been told so far, in blocks (`--enable-session-prefix-index`).

Caches forget what they must make room for; a session goes on all the same. Here its prompts stay known, whether or not
somebody still holds them: a prompt that goes on where another one ended takes its place, one that differs from all
before it, a branch or another agent, stands beside them. Routing does not use it; `GET /routing/sessions` shows it.

Bounded: the session that was quiet longest is forgotten, by their number and by all their blocks together.
"""

from collections import OrderedDict

SESSIONS_MAX = 16_384
"""Upstream's bound."""
BRANCHES_MAX = 16
"""Of one session; the one that was used longest ago gives way."""
BYTES_MAX = 64 << 20
"""Eight bytes a block: 8 M blocks."""


class SessionPrefixes:
    """Sessions and the longest prompts of each."""

    def __init__(self, sessions_max: int = SESSIONS_MAX, bytes_max: int = BYTES_MAX) -> None:
        self._sessions_max = sessions_max
        self._bytes_max = bytes_max
        self._sessions: OrderedDict[str, list[bytes]] = OrderedDict()
        """Packed tokens hashes of prompts; of sessions and of each one's prompts the last used is the last."""
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def blocks(self) -> int:
        """Of all prompts together."""
        return self._bytes // 8

    def note(self, session: str, blocks: bytes) -> None:
        """A session had a prompt with these blocks."""
        known = self._sessions.setdefault(session, [])
        self._sessions.move_to_end(session)
        kept = [one for one in known if not blocks.startswith(one)]
        longer = next((one for one in kept if one.startswith(blocks)), None)
        if longer is not None:  # Nothing new: it is used again.
            kept.remove(longer)
            blocks = longer
        kept.append(blocks)
        del kept[:-BRANCHES_MAX]
        self._bytes += sum(map(len, kept)) - sum(map(len, known))
        known[:] = kept
        while len(self._sessions) > self._sessions_max or (self._bytes > self._bytes_max and len(self._sessions) > 1):
            self.end(next(iter(self._sessions)))

    def end(self, session: str) -> None:
        """The session is over."""
        self._bytes -= sum(map(len, self._sessions.pop(session, ())))

    def of(self, session: str) -> list[bytes]:
        """A session's prompts, the last used first; none of an unknown one."""
        return self._sessions.get(session, [])[::-1]

    def names(self) -> list[str]:
        """The sessions, the last used first."""
        return list(reversed(self._sessions))

    def validate(self) -> None:
        """Raises `AssertionError` where the parts disagree."""
        assert self._bytes == sum(len(one) for known in self._sessions.values() for one in known), "miscounted"
        assert len(self._sessions) <= self._sessions_max, "too many sessions"
        for known in self._sessions.values():
            assert known, "a session without a prompt"
            assert len(known) <= BRANCHES_MAX, "too many branches"
            for one in known:
                assert not any(other is not one and other.startswith(one) for other in known), "one says another"
