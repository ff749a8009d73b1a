"""The numbers of the system calls that a filter may name, per architecture, for filters that the agent installs itself.

A number in the text is that of the name after it; the names that follow count on.
"""

import platform
from functools import cache

from atoll.errors import Unsupported

_X86_64 = """
0 read write open close stat fstat lstat poll lseek mmap mprotect munmap brk rt_sigaction rt_sigprocmask
rt_sigreturn ioctl pread64 pwrite64 readv writev access pipe select sched_yield mremap msync mincore madvise shmget
shmat shmctl dup dup2 pause nanosleep getitimer alarm setitimer getpid sendfile socket connect accept sendto
recvfrom sendmsg recvmsg shutdown bind listen getsockname getpeername socketpair setsockopt getsockopt clone fork
vfork execve exit wait4 kill uname semget semop semctl shmdt msgget msgsnd msgrcv msgctl fcntl flock fsync fdatasync
truncate ftruncate getdents getcwd chdir fchdir rename mkdir rmdir creat link unlink symlink readlink chmod fchmod
chown fchown lchown umask gettimeofday getrlimit getrusage sysinfo times ptrace getuid 104 getgid setuid setgid
geteuid getegid setpgid getppid getpgrp setsid setreuid setregid getgroups setgroups setresuid getresuid setresgid
getresgid getpgid setfsuid setfsgid getsid capget capset rt_sigpending rt_sigtimedwait rt_sigqueueinfo rt_sigsuspend
sigaltstack utime mknod 135 personality 137 statfs fstatfs 140 getpriority setpriority sched_setparam sched_getparam
sched_setscheduler sched_getscheduler sched_get_priority_max sched_get_priority_min sched_rr_get_interval mlock
munlock mlockall munlockall 157 prctl arch_prctl 160 setrlimit chroot sync 186 gettid readahead setxattr lsetxattr
fsetxattr getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr removexattr lremovexattr fremovexattr tkill
time futex sched_setaffinity sched_getaffinity set_thread_area io_setup io_destroy io_getevents io_submit io_cancel
get_thread_area 213 epoll_create epoll_ctl_old epoll_wait_old remap_file_pages getdents64 set_tid_address
restart_syscall semtimedop fadvise64 timer_create timer_settime timer_gettime timer_getoverrun timer_delete 228
clock_gettime clock_getres clock_nanosleep exit_group epoll_wait epoll_ctl tgkill utimes 237 mbind set_mempolicy
get_mempolicy mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr 247 waitid 251 ioprio_set
ioprio_get inotify_init inotify_add_watch inotify_rm_watch migrate_pages openat mkdirat mknodat fchownat futimesat
newfstatat unlinkat renameat linkat symlinkat readlinkat fchmodat faccessat pselect6 ppoll 273 set_robust_list
get_robust_list splice tee sync_file_range vmsplice move_pages utimensat epoll_pwait signalfd timerfd_create eventfd
fallocate timerfd_settime timerfd_gettime accept4 signalfd4 eventfd2 epoll_create1 dup3 pipe2 inotify_init1 preadv
pwritev rt_tgsigqueueinfo 299 recvmmsg 302 prlimit64 name_to_handle_at 306 syncfs sendmmsg 309 getcpu
process_vm_readv process_vm_writev 314 sched_setattr sched_getattr renameat2 seccomp getrandom memfd_create 322
execveat 324 membarrier mlock2 copy_file_range preadv2 pwritev2 pkey_mprotect pkey_alloc pkey_free statx
io_pgetevents rseq 424 pidfd_send_signal 434 pidfd_open clone3 close_range openat2 pidfd_getfd faccessat2
process_madvise epoll_pwait2 444 landlock_create_ruleset landlock_add_rule landlock_restrict_self 448
process_mrelease futex_waitv set_mempolicy_home_node cachestat fchmodat2 map_shadow_stack futex_wake futex_wait
futex_requeue statmount listmount 462 mseal setxattrat getxattrat listxattrat removexattrat
"""
_AARCH64 = """
0 io_setup io_destroy io_submit io_cancel io_getevents setxattr lsetxattr fsetxattr getxattr lgetxattr fgetxattr
listxattr llistxattr flistxattr removexattr lremovexattr fremovexattr getcwd 19 eventfd2 epoll_create1 epoll_ctl
epoll_pwait dup dup3 fcntl inotify_init1 inotify_add_watch inotify_rm_watch ioctl ioprio_set ioprio_get flock
mknodat mkdirat unlinkat symlinkat linkat renameat 43 statfs fstatfs truncate ftruncate fallocate faccessat chdir
fchdir chroot fchmod fchmodat fchownat fchown openat close 59 pipe2 61 getdents64 lseek read write readv writev
pread64 pwrite64 preadv pwritev sendfile pselect6 ppoll signalfd4 vmsplice splice tee readlinkat newfstatat fstat
sync fsync fdatasync sync_file_range timerfd_create timerfd_settime timerfd_gettime utimensat 90 capget capset
personality exit exit_group waitid set_tid_address 98 futex set_robust_list get_robust_list nanosleep getitimer
setitimer 107 timer_create timer_gettime timer_getoverrun timer_settime timer_delete 113 clock_gettime clock_getres
clock_nanosleep 117 ptrace sched_setparam sched_setscheduler sched_getscheduler sched_getparam sched_setaffinity
sched_getaffinity sched_yield sched_get_priority_max sched_get_priority_min sched_rr_get_interval restart_syscall
kill tkill tgkill sigaltstack rt_sigsuspend rt_sigaction rt_sigprocmask rt_sigpending rt_sigtimedwait
rt_sigqueueinfo rt_sigreturn setpriority getpriority 143 setregid setgid setreuid setuid setresuid getresuid
setresgid getresgid setfsuid setfsgid times setpgid getpgid getsid setsid getgroups setgroups uname 163 getrlimit
setrlimit getrusage umask prctl getcpu gettimeofday 172 getpid getppid getuid geteuid getgid getegid gettid sysinfo
mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr msgget msgctl msgrcv msgsnd semget semctl
semtimedop semop shmget shmctl shmat shmdt socket socketpair bind listen accept connect getsockname getpeername
sendto recvfrom setsockopt getsockopt shutdown sendmsg recvmsg readahead brk munmap mremap 220 clone execve mmap
fadvise64 226 mprotect msync mlock munlock mlockall munlockall mincore madvise remap_file_pages mbind get_mempolicy
set_mempolicy migrate_pages move_pages rt_tgsigqueueinfo 242 accept4 recvmmsg 260 wait4 prlimit64 264
name_to_handle_at 267 syncfs 269 sendmmsg process_vm_readv process_vm_writev 274 sched_setattr sched_getattr
renameat2 seccomp getrandom memfd_create 281 execveat 283 membarrier mlock2 copy_file_range preadv2 pwritev2
pkey_mprotect pkey_alloc pkey_free statx io_pgetevents rseq 424 pidfd_send_signal 434 pidfd_open clone3 close_range
openat2 pidfd_getfd faccessat2 process_madvise epoll_pwait2 444 landlock_create_ruleset landlock_add_rule
landlock_restrict_self 448 process_mrelease futex_waitv set_mempolicy_home_node cachestat fchmodat2 map_shadow_stack
futex_wake futex_wait futex_requeue statmount listmount 462 mseal setxattrat getxattrat listxattrat removexattrat
"""
AUDIT_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_TABLES = {"x86_64": _X86_64, "aarch64": _AARCH64}


def machine_name() -> str:
    machine = platform.machine()
    if machine not in _TABLES:
        raise Unsupported(f"no system call numbers for {machine}")
    return machine


@cache
def numbers(machine: str = "") -> dict[str, int]:
    """By name; a name this architecture does not have is not in it."""
    found, number = {}, 0
    for word in _TABLES[machine or machine_name()].split():
        if word.isdigit():
            number = int(word)
        else:
            found[word] = number
            number += 1
    return found
