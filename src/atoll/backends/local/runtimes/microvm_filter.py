"""The system calls that QEMU may make once it is started; every other is refused with EPERM.

It starts no program, opens no socket but Unix ones and netlink, and changes nobody's rights. Its own filter (`-sandbox on`) comes on top
of this one and takes away `execve` too, which it needs once, to be started.
"""

import socket

from atoll.backends.local.kernel import filters

_CALLS = """
access arch_prctl brk clock_getres clock_gettime clock_nanosleep close close_range connect dup dup2 dup3 epoll_create1 epoll_ctl
epoll_pwait epoll_pwait2 epoll_wait eventfd2 execve exit exit_group faccessat faccessat2 fadvise64 fallocate fcntl fdatasync flock fstat
fstatfs fsync ftruncate futex getcwd getdents64 getegid geteuid getgid getpeername getpid getppid getrandom getresgid getresuid
getrlimit getrusage getsockname getsockopt gettid gettimeofday getuid ioctl kill lseek lstat madvise membarrier memfd_create mincore mlock
mmap mprotect mremap msync munlock munmap nanosleep newfstatat open openat pipe2 poll ppoll prctl pread64 preadv preadv2 prlimit64
pselect6 pwrite64 pwritev pwritev2 read readlink readlinkat readv recvfrom recvmsg restart_syscall rseq rt_sigaction rt_sigpending
rt_sigprocmask rt_sigqueueinfo rt_sigreturn rt_sigsuspend rt_sigtimedwait sched_getaffinity sched_get_priority_max sched_get_priority_min
sched_getparam sched_getscheduler sched_yield seccomp select sendmsg sendto set_robust_list set_tid_address setsockopt shutdown
sigaltstack signalfd4 stat statfs statx sysinfo tgkill timer_create timer_delete timer_gettime timer_settime timerfd_create
timerfd_gettime timerfd_settime umask uname unlink unlinkat write writev
"""


def program() -> bytes:
    """Return the filter as the kernel takes it."""
    return filters.allowing(_CALLS.split(), (socket.AF_UNIX, socket.AF_NETLINK))
