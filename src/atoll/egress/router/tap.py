"""A link for a virtual machine: a tap device, made in the sandbox's namespace and moved by the router to its own.

Whoever holds the descriptor sends and receives packets; the device goes when the last holder does.
"""

import fcntl
import os
import struct
from typing import Final

from atoll.egress.router.netlink import inside_net
from atoll.errors import Unsupported

TAP_IFNAME: Final = "vm0"  # until the router takes it
PREFIX: Final = "att"  # of its name there; those of other links go on in hexadecimal digits
_TUNSETIFF: Final = 0x400454CA
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000


def open_tap(net: int) -> int:
    """Return a descriptor of a new device in that network namespace. For a thread that may change its namespace for a moment."""
    with inside_net(net):  # the device belongs to the namespace in which its descriptor was opened
        try:
            device = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            why = f"a virtual machine's network needs /dev/net/tun: {error.strerror}"
            raise Unsupported(why, hint="modprobe tun, or use --no-network") from error
        try:
            flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR
            fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", TAP_IFNAME.encode(), flags))
        except BaseException:
            os.close(device)
            raise
    return device
