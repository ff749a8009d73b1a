"""The host side of the guest protocol (docs/guest-protocol.md)."""

from atoll.guest.client import Download, GuestClient
from atoll.guest.process import Exit, Process
from atoll.guest.refusals import ConnectionLost, ProgramNotStarted

__all__ = ["ConnectionLost", "Download", "Exit", "GuestClient", "Process", "ProgramNotStarted"]
