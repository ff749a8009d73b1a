"""Check who may write files that decide something: settings, connections."""

from __future__ import annotations

import os
import stat


def writable_by_others(status: os.stat_result) -> bool:
    """Whether somebody but a file's owner may write it.

    A group that has only the owner in it counts as the owner: Debian makes one for each user, whose umask is 002 then.
    """
    if status.st_mode & stat.S_IWOTH:
        return True
    return bool(status.st_mode & stat.S_IWGRP) and not _is_private_group(status.st_gid, status.st_uid)


def _is_private_group(gid: int, uid: int) -> bool:
    """Whether a group has no member but this user, named like it, as a member or by anybody's account."""
    import grp
    import pwd

    try:
        user, group = pwd.getpwuid(uid), grp.getgrgid(gid)
    except KeyError:
        return False
    if user.pw_gid != gid or user.pw_name != group.gr_name or set(group.gr_mem) - {user.pw_name}:
        return False
    return all(other.pw_gid != gid or other.pw_uid == uid for other in pwd.getpwall())
