"""The system calls a sandbox may make; every other is refused with EPERM.

Resolved here, for the native architecture alone: an engine compiles the profile at each start, and every further
architecture costs milliseconds. What is not in the list and why: anything that makes or joins namespaces or mounts
(also `clone` with such flags; `clone3`, whose flags a filter cannot see, says ENOSYS so that libc falls back),
modules, keys, bpf, perf, userfaultfd, io_uring, open_by_handle_at, swap, clocks, reboot. Sockets are Unix, IPv4, IPv6
and netlink only, so neither AF_VSOCK nor AF_PACKET nor AF_ALG. ptrace is allowed: debuggers are useful, the agent is
not dumpable and nobody holds CAP_SYS_PTRACE.
"""

import errno
import os
import platform
from functools import cache
from typing import NotRequired, TypedDict

from atoll.errors import Unsupported

_ARCHITECTURES = {"x86_64": "SCMP_ARCH_X86_64", "aarch64": "SCMP_ARCH_AARCH64"}

_FILES = """
access chdir chmod chown close close_range copy_file_range creat dup dup2 dup3 faccessat faccessat2 fadvise64
fallocate fchdir fchmod fchmodat fchmodat2 fchown fchownat fcntl fdatasync fgetxattr flistxattr flock fremovexattr
fsetxattr fstat fstatfs fsync ftruncate futimesat getcwd getdents getdents64 getxattr getxattrat inotify_add_watch
inotify_init inotify_init1 inotify_rm_watch lchown lgetxattr link linkat listxattr listxattrat llistxattr
lremovexattr lseek lsetxattr lstat mkdir mkdirat mknod mknodat name_to_handle_at newfstatat open openat openat2
pread64 preadv preadv2 pwrite64 pwritev pwritev2 read readahead readlink readlinkat readv removexattr removexattrat
rename renameat renameat2 rmdir sendfile setxattr setxattrat splice stat statfs statmount listmount statx symlink
symlinkat sync sync_file_range syncfs tee truncate umask unlink unlinkat utime utimensat utimes vmsplice write
writev cachestat chroot
"""
_MEMORY = """
brk get_mempolicy madvise map_shadow_stack mbind membarrier memfd_create migrate_pages mincore mlock mlock2 mlockall
mmap move_pages mprotect mremap mseal msync munlock munlockall munmap pkey_alloc pkey_free pkey_mprotect
process_madvise process_mrelease remap_file_pages set_mempolicy set_mempolicy_home_node
"""
_PROCESSES = """
arch_prctl capget capset execve execveat exit exit_group fork futex futex_requeue futex_wait futex_waitv futex_wake
get_robust_list get_thread_area getcpu getegid geteuid getgid getgroups getpgid getpgrp getpid getppid getpriority
getresgid getresuid getrlimit getrusage getsid gettid getuid ioprio_get ioprio_set kill landlock_add_rule
landlock_create_ruleset landlock_restrict_self pidfd_getfd pidfd_open pidfd_send_signal prctl prlimit64
process_vm_readv process_vm_writev ptrace restart_syscall rseq rt_sigaction rt_sigpending rt_sigprocmask
rt_sigqueueinfo rt_sigreturn rt_sigsuspend rt_sigtimedwait rt_tgsigqueueinfo sched_get_priority_max
sched_get_priority_min sched_getaffinity sched_getattr sched_getparam sched_getscheduler sched_rr_get_interval
sched_setaffinity sched_setattr sched_setparam sched_setscheduler sched_yield seccomp set_robust_list
set_thread_area set_tid_address setfsgid setfsuid setgid setgroups setpgid setpriority setregid setresgid setresuid
setreuid setrlimit setsid setuid sigaltstack sysinfo tgkill times tkill uname vfork wait4 waitid
"""
_WAITING = """
alarm clock_getres clock_gettime clock_nanosleep epoll_create epoll_create1 epoll_ctl epoll_ctl_old epoll_pwait
epoll_pwait2 epoll_wait epoll_wait_old eventfd eventfd2 getitimer getrandom gettimeofday io_cancel io_destroy
io_getevents io_pgetevents io_setup io_submit ioctl nanosleep pause pipe pipe2 poll ppoll pselect6 select setitimer
signalfd signalfd4 time timer_create timer_delete timer_getoverrun timer_gettime timer_settime timerfd_create
timerfd_gettime timerfd_settime
"""
_TALKING = """
accept accept4 bind connect getpeername getsockname getsockopt listen mq_getsetattr mq_notify mq_open
mq_timedreceive mq_timedsend mq_unlink msgctl msgget msgrcv msgsnd recvfrom recvmmsg recvmsg semctl semget semop
semtimedop sendmmsg sendmsg sendto setsockopt shmat shmctl shmdt shmget shutdown socketpair
"""

NAMESPACE_FLAGS = 0x7E02_0000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
SOCKET_FAMILIES = (1, 2, 10, 16)  # AF_UNIX, AF_INET, AF_INET6, AF_NETLINK
PERSONALITIES = (0x0, 0x8, 0x20000, 0x20008, 0x40000, 0xFFFF_FFFF)


# Calls that the stricter filters leave out: looking into other processes; then also old IPC, real-time priorities and locked memory.
_PEEKING = "ptrace process_vm_readv process_vm_writev pidfd_getfd"
_RARE = """
chroot msgctl msgget msgrcv msgsnd semctl semget semop semtimedop shmat shmctl shmdt shmget mlockall migrate_pages
move_pages process_madvise process_mrelease sched_setattr sched_setparam sched_setscheduler io_setup io_submit
"""
_WITHOUT = {"default": "", "moderate": "", "ai-agent": _PEEKING, "restrictive": _PEEKING + _RARE}


# Inside gVisor also attributes of a symbolic link: it says EBADF to them, and `ls -l` fails on that.
ABSENT = {"clone3": errno.ENOSYS}
ABSENT_INSIDE = {**ABSENT, "lgetxattr": errno.EOPNOTSUPP, "llistxattr": errno.EOPNOTSUPP}

# Where a directory of the host can be written, nothing in it may become a program that runs as its owner for whoever starts it.
# Every call that gives a mode, and where it does; one that opens gives one only when it makes a file. The mode that openat2 gives
# cannot be seen: it does not exist there.
SET_ID = 0o6000
CREATING = os.O_CREAT | 0o20_000_000  # the bit of O_TMPFILE that is its own
MODE_OF = {
    "chmod": 1,
    "fchmod": 1,
    "fchmodat": 2,
    "fchmodat2": 2,
    "creat": 1,
    "mkdir": 1,
    "mkdirat": 2,
    "mknod": 1,
    "mknodat": 2,
}
FLAGS_AND_MODE_OF = {"open": (1, 2), "openat": (2, 3)}


def allowed(name: str) -> set[str]:
    """The calls that a filter lets through whatever their arguments are."""
    if name not in _WITHOUT:
        raise Unsupported(f"no seccomp filter is called {name!r:.60}")
    every = set((_FILES + _MEMORY + _PROCESSES + _WAITING + _TALKING).split())
    return every - set(_WITHOUT[name].split())


class Argument(TypedDict):
    index: int
    value: int
    op: str
    valueTwo: NotRequired[int]


class Rule(TypedDict):
    names: list[str]
    action: str
    errnoRet: NotRequired[int]
    args: NotRequired[list[Argument]]


class Profile(TypedDict):
    """`linux.seccomp` of an OCI configuration."""

    defaultAction: str
    defaultErrnoRet: int
    architectures: list[str]
    syscalls: list[Rule]


@cache
def profile(name: str = "default") -> Profile:
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        raise Unsupported(f"no seccomp profile for {machine}")
    plain = sorted(allowed(name))
    absent: Rule = {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": errno.ENOSYS}
    return {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": errno.EPERM,
        "architectures": [_ARCHITECTURES[machine]],
        "syscalls": [
            {"names": plain, "action": "SCMP_ACT_ALLOW"},
            absent,
            # Allowing what is known rather than refusing what is not: the kernel looks at the low half of a register only, so
            # a comparison that refuses could be passed by with a high bit.
            _when("clone", [_argument(0, NAMESPACE_FLAGS, "SCMP_CMP_MASKED_EQ", 0)]),
            *[_when("socket", [_argument(0, family, "SCMP_CMP_EQ")]) for family in SOCKET_FAMILIES],
            *[_when("personality", [_argument(0, value, "SCMP_CMP_EQ")]) for value in PERSONALITIES],
        ],
    }


def _when(name: str, arguments: list[Argument]) -> Rule:
    return {"names": [name], "action": "SCMP_ACT_ALLOW", "args": arguments}


def _argument(index: int, value: int, comparison: str, masked: int | None = None) -> Argument:
    argument: Argument = {"index": index, "value": value, "op": comparison}
    return argument if masked is None else {**argument, "valueTwo": masked}
