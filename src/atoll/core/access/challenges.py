"""A number that only a person at a terminal can read: what stands between a program of the same user and more power.

The daemon writes it on the controlling terminal of the calling process and wants it back from a process on that same
terminal. A program that drives a terminal of its own can still pretend to be a person; SECURITY.md says so.
"""

import secrets
import time

from atoll import errors
from atoll.core.access import terminal_presence as presence

ANSWER_TIME = 120.0
ATTEMPTS = 3
MAX_OPEN = 256

Place = tuple[frozenset[int], str]  # the login sessions a caller can act as, and its terminal


class Challenges:
    """Open questions, each for one subject at one terminal."""

    def __init__(self) -> None:
        self._open: dict[str, _Question] = {}

    def ask(self, subject: str, text: str, place: Place) -> None:
        """Show `text` and a number on the caller's terminal; a newer question for the same subject replaces this one."""
        now = time.monotonic()
        self._open = {key: one for key, one in self._open.items() if one.until > now}
        if len(self._open) >= MAX_OPEN:
            raise errors.Exhausted("too many questions are open at terminals")
        question = self._open[subject] = _Question(place)
        try:
            presence.show(place[1], f"\r\natoll: {text}\r\n\r\nType {question.code} to confirm: ")
        except OSError as error:
            raise errors.PermissionDenied(f"your terminal cannot be written to: {error.strerror}") from None

    def check(self, subject: str, answer: str | None, place: Place, hint: str) -> None:
        """PermissionDenied unless this is what was shown, there and for this. A right answer counts once."""
        question = self._open.get(subject)
        if answer is None or question is None or question.until < time.monotonic():
            raise errors.PermissionDenied(
                "a person has to confirm this at a terminal", hint=hint, details={"challenge": True}
            )
        question.left -= 1
        right = secrets.compare_digest(answer.strip().encode("utf-8", "replace"), question.code.encode())
        if right or question.left <= 0 or question.place != place:
            del self._open[subject]
        if not right or question.place != place:
            raise errors.PermissionDenied("that is not what was shown")


class _Question:
    def __init__(self, place: Place) -> None:
        self.code = f"{secrets.randbelow(10**6):06d}"
        self.place = place
        self.until = time.monotonic() + ANSWER_TIME
        self.left = ATTEMPTS


def place_of_caller(needs: str, hint: str) -> Place:
    """Where the calling process sits; PermissionDenied when that is no terminal."""
    pid = presence.PEER_PID.get()
    device = presence.terminal(pid) if pid else None
    if device is None:
        raise errors.PermissionDenied(f"{needs} needs a person at a terminal", hint=hint)
    return presence.sessions(pid), device
