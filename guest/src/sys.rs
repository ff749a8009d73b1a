//! The few system calls the agent makes by hand, as small safe functions.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

pub type Result<T> = io::Result<T>;

pub fn check(value: i32) -> Result<i32> {
    if value < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(value)
    }
}

fn check_len(value: isize) -> Result<usize> {
    usize::try_from(value).map_err(|_| io::Error::last_os_error())
}

fn own(value: i32) -> Result<OwnedFd> {
    let fd = check(value)?;
    // SAFETY: a fresh descriptor that nobody else knows of.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// A close-on-exec pipe: (read end, write end).
pub fn pipe() -> Result<(OwnedFd, OwnedFd)> {
    let mut fds = [0; 2];
    check(unsafe { libc::pipe2(fds.as_mut_ptr(), libc::O_CLOEXEC) })?;
    Ok((own(fds[0])?, own(fds[1])?))
}

/// A pipe that is this user's: its processes can open it anew, as `/dev/stdout` or in `/proc`.
pub fn pipe_of(user: Option<u32>) -> Result<(OwnedFd, OwnedFd)> {
    let (read, write) = pipe()?;
    let Some(uid) = user else { return Ok((read, write)) };
    // SAFETY: numbers only.
    if unsafe { libc::fchown(write.as_raw_fd(), uid, u32::MAX) } == 0 {
        return Ok((read, write));
    }
    // gVisor's pipes stay with whoever made them. Only this thread changes, and the saved id brings it back.
    unsafe {
        let keep = libc::uid_t::MAX;
        if libc::syscall(libc::SYS_setresuid, keep, uid, keep) != 0 {
            return Ok((read, write)); // it works, and is root's
        }
        let made = pipe();
        if libc::syscall(libc::SYS_setresuid, keep, libc::getuid(), keep) != 0 {
            libc::abort(); // never as somebody else
        }
        made
    }
}

pub fn socketpair() -> Result<(OwnedFd, OwnedFd)> {
    let mut fds = [0; 2];
    check(unsafe { libc::socketpair(libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0, fds.as_mut_ptr()) })?;
    Ok((own(fds[0])?, own(fds[1])?))
}

/// A pair of sockets that keeps messages apart.
pub fn message_pair() -> Result<(OwnedFd, OwnedFd)> {
    let mut fds = [0; 2];
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    check(unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, fds.as_mut_ptr()) })?;
    Ok((own(fds[0])?, own(fds[1])?))
}

pub fn eventfd() -> Result<OwnedFd> {
    own(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) })
}

/// Makes an eventfd readable.
pub fn ring_bell(fd: RawFd) {
    let one: u64 = 1;
    unsafe { libc::write(fd, (&raw const one).cast(), 8) };
}

/// Takes back what `ring_bell` did.
pub fn hush_bell(fd: RawFd) {
    let mut count: u64 = 0;
    unsafe { libc::read(fd, (&raw mut count).cast(), 8) };
}

pub fn set_nonblocking(fd: RawFd) -> Result<()> {
    let flags = check(unsafe { libc::fcntl(fd, libc::F_GETFL) })?;
    check(unsafe { libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK) }).map(drop)
}

pub fn dup(fd: RawFd) -> Result<OwnedFd> {
    own(unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 3) })
}

pub fn open(path: &std::ffi::CStr, flags: i32) -> Result<OwnedFd> {
    own(unsafe { libc::open(path.as_ptr(), flags | libc::O_CLOEXEC) })
}

pub fn read(fd: RawFd, buf: &mut [u8]) -> Result<usize> {
    check_len(unsafe { libc::read(fd, buf.as_mut_ptr().cast(), buf.len()) })
}

pub fn write(fd: RawFd, buf: &[u8]) -> Result<usize> {
    check_len(unsafe { libc::write(fd, buf.as_ptr().cast(), buf.len()) })
}

pub fn readv2(fd: RawFd, first: &mut [u8], second: &mut [u8]) -> Result<usize> {
    if second.is_empty() {
        return read(fd, first);
    }
    let parts = [
        libc::iovec { iov_base: first.as_mut_ptr().cast(), iov_len: first.len() },
        libc::iovec { iov_base: second.as_mut_ptr().cast(), iov_len: second.len() },
    ];
    check_len(unsafe { libc::readv(fd, parts.as_ptr(), 2) })
}

/// Sends three pieces as one, without SIGPIPE.
pub fn send3(fd: RawFd, pieces: [&[u8]; 3]) -> Result<usize> {
    let mut parts = pieces.map(|p| libc::iovec { iov_base: p.as_ptr().cast_mut().cast(), iov_len: p.len() });
    // SAFETY: an all-zero msghdr is valid; the pieces outlive the call.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = parts.as_mut_ptr();
    message.msg_iovlen = 3;
    check_len(unsafe { libc::sendmsg(fd, &raw const message, libc::MSG_NOSIGNAL) })
}

pub fn send(fd: RawFd, buf: &[u8]) -> Result<usize> {
    check_len(unsafe { libc::send(fd, buf.as_ptr().cast(), buf.len(), libc::MSG_NOSIGNAL) })
}

/// Bytes that can be read at once.
pub fn readable_bytes(fd: RawFd) -> u64 {
    let mut count: libc::c_int = 0;
    match unsafe { libc::ioctl(fd, libc::FIONREAD, &raw mut count) } {
        0 => u64::try_from(count).unwrap_or(0),
        _ => 0,
    }
}

/// Whether the other end of a pipe has no holder left.
pub fn hung_up(fd: RawFd) -> bool {
    let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    unsafe { libc::poll(&raw mut poll, 1, 0) == 1 && poll.revents & (libc::POLLHUP | libc::POLLERR) != 0 }
}

/// Waits until something can be read, or the other end is gone, for so long.
pub fn await_input(fd: RawFd, millis: i32) {
    let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    unsafe { libc::poll(&raw mut poll, 1, millis) };
}

pub fn would_block(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EINTR))
}

pub fn accept(fd: RawFd) -> Result<OwnedFd> {
    own(unsafe {
        libc::accept4(fd, std::ptr::null_mut(), std::ptr::null_mut(), libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK)
    })
}

/// Gives a descriptor away to another thread of this process, over a pair of sockets that keeps messages apart.
pub fn hand_over(socket: RawFd, fd: OwnedFd) -> Result<()> {
    send(socket, &fd.as_raw_fd().to_ne_bytes())?;
    std::mem::forget(fd); // the other thread's now
    Ok(())
}

/// Takes a descriptor that another thread has given away by `hand_over`.
pub fn take_handed(socket: RawFd) -> Result<OwnedFd> {
    let mut number = [0; 4];
    match read(socket, &mut number)? {
        4 => own(RawFd::from_ne_bytes(number)),
        _ => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

pub fn kill(pid: i32, signal: i32) -> Result<()> {
    check(unsafe { libc::kill(pid, signal) }).map(drop)
}

/// Lets a child go on that asked to be traced by its parent (PTRACE_TRACEME) and has stopped at `signal`, as if nobody
/// traced it. SIGTRAP is not delivered: for a traced process it tells of an exec. A child that cannot be let go is killed,
/// so that nobody waits for it in vain.
pub fn untrace(pid: i32, signal: i32) {
    let deliver = if signal == libc::SIGTRAP { 0 } else { libc::c_long::from(signal) };
    let none = std::ptr::null_mut::<libc::c_void>();
    if unsafe { libc::ptrace(libc::PTRACE_DETACH, pid, none, deliver) } < 0 {
        let _ = kill(pid, libc::SIGKILL);
    }
}

/// Puts every signal to its default, so that no child inherits an ignored one. By the bare system call: the C library
/// hides two signals that whoever started us may have left ignored.
pub fn default_signals() {
    let action = [0u64; 4];
    for signal in 1..=64 {
        unsafe { libc::syscall(libc::SYS_rt_sigaction, signal, action.as_ptr(), std::ptr::null::<u64>(), 8usize) };
    }
}

/// Blocks every signal for this thread and those it starts, and gives a descriptor that tells of `which`.
pub fn signalfd(which: &[i32]) -> Result<OwnedFd> {
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut set);
        check(libc::sigprocmask(libc::SIG_SETMASK, &raw const set, std::ptr::null_mut()))?;
        libc::sigemptyset(&raw mut set);
        for signal in which {
            libc::sigaddset(&raw mut set, *signal);
        }
        own(libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK))
    }
}

/// Signal number and sender of the next pending signal. A sender of 0 is outside this pid namespace.
pub fn next_signal(fd: RawFd) -> Option<(i32, u32)> {
    let mut info: libc::signalfd_siginfo = unsafe { std::mem::zeroed() };
    let size = std::mem::size_of_val(&info);
    let got = unsafe { libc::read(fd, (&raw mut info).cast(), size) };
    (got == size as isize).then_some((info.ssi_signo as i32, info.ssi_pid))
}

/// Sets close-on-exec on every descriptor from 3 on.
pub fn cloexec_all() {
    const CLOSE_RANGE_CLOEXEC: u32 = 4;
    let done = unsafe { libc::syscall(libc::SYS_close_range, 3u32, u32::MAX, CLOSE_RANGE_CLOEXEC) };
    if done == 0 {
        return;
    }
    for fd in open_fds() {
        unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) };
    }
}

/// Closes every descriptor from 3 on but those of `keep`, which must be sorted.
pub fn close_all_but(keep: &[RawFd]) {
    let mut from = 3u32;
    let mut ranged = true;
    for fd in keep.iter().filter(|fd| **fd >= 3) {
        let fd = *fd as u32;
        if fd > from {
            ranged &= unsafe { libc::syscall(libc::SYS_close_range, from, fd - 1, 0u32) } == 0;
        }
        from = fd + 1;
    }
    ranged &= unsafe { libc::syscall(libc::SYS_close_range, from, u32::MAX, 0u32) } == 0;
    if ranged {
        return;
    }
    for fd in open_fds().into_iter().filter(|fd| !keep.contains(fd)) {
        unsafe { libc::close(fd) };
    }
}

/// Descriptors from 3 on that may be open, for kernels without close_range. /proc/self/fd can be closed to a process that is
/// not dumpable; then every number is tried.
fn open_fds() -> Vec<RawFd> {
    if let Ok(dir) = std::fs::read_dir("/proc/self/fd") {
        return dir.flatten().filter_map(|e| e.file_name().to_str()?.parse().ok()).filter(|fd| *fd >= 3).collect();
    }
    let (soft, _) = rlimit(libc::RLIMIT_NOFILE).unwrap_or((1024, 1024));
    (3..soft.clamp(64, 65_536) as RawFd).collect()
}

#[cfg(target_env = "gnu")]
type Resource = libc::__rlimit_resource_t;
#[cfg(not(target_env = "gnu"))]
type Resource = libc::c_int;

pub fn rlimit(resource: Resource) -> Result<(u64, u64)> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    check(unsafe { libc::getrlimit(resource, &raw mut limit) })?;
    Ok((limit.rlim_cur, limit.rlim_max))
}

pub fn set_rlimit(resource: Resource, soft: u64, hard: u64) -> Result<()> {
    let limit = libc::rlimit { rlim_cur: soft, rlim_max: hard };
    check(unsafe { libc::setrlimit(resource, &raw const limit) }).map(drop)
}

/// The number of a resource by the name the protocol uses.
pub fn resource_of(name: &str) -> Option<u32> {
    let resource = match name {
        "as" => libc::RLIMIT_AS,
        "core" => libc::RLIMIT_CORE,
        "cpu" => libc::RLIMIT_CPU,
        "data" => libc::RLIMIT_DATA,
        "fsize" => libc::RLIMIT_FSIZE,
        "locks" => libc::RLIMIT_LOCKS,
        "memlock" => libc::RLIMIT_MEMLOCK,
        "msgqueue" => libc::RLIMIT_MSGQUEUE,
        "nice" => libc::RLIMIT_NICE,
        "nofile" => libc::RLIMIT_NOFILE,
        "nproc" => libc::RLIMIT_NPROC,
        "rss" => libc::RLIMIT_RSS,
        "rtprio" => libc::RLIMIT_RTPRIO,
        "rttime" => libc::RLIMIT_RTTIME,
        "sigpending" => libc::RLIMIT_SIGPENDING,
        "stack" => libc::RLIMIT_STACK,
        _ => return None,
    };
    Some(resource)
}

/// Random bytes from the kernel.
pub fn random<const N: usize>() -> [u8; N] {
    let mut out = [0u8; N];
    unsafe { libc::getrandom(out.as_mut_ptr().cast(), N, 0) };
    out
}

/// An epoll instance that keeps no state: callers remember what they registered.
pub struct Poll {
    fd: OwnedFd,
}

impl Poll {
    pub fn new() -> Result<Self> {
        Ok(Self { fd: own(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })? })
    }

    /// Changes the interest in `fd` from `old` to `new` events; 0 means not registered at all, because a registered
    /// descriptor that hung up would wake the loop again and again.
    pub fn set(&self, fd: RawFd, token: u64, old: u32, new: u32) {
        if old == new {
            return;
        }
        let op = match (old, new) {
            (0, _) => libc::EPOLL_CTL_ADD,
            (_, 0) => libc::EPOLL_CTL_DEL,
            _ => libc::EPOLL_CTL_MOD,
        };
        let mut event = libc::epoll_event { events: new, u64: token };
        unsafe { libc::epoll_ctl(self.fd.as_raw_fd(), op, fd, &raw mut event) };
    }

    /// Waits and returns (token, events) pairs. `None` waits for ever.
    pub fn wait(&self, out: &mut Vec<(u64, u32)>, timeout: Option<std::time::Duration>) {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; 64];
        let millis = timeout.map_or(-1, |t| i32::try_from(t.as_micros().div_ceil(1000)).unwrap_or(i32::MAX));
        let count = unsafe { libc::epoll_wait(self.fd.as_raw_fd(), events.as_mut_ptr(), 64, millis) };
        out.clear();
        out.extend(events.iter().take(usize::try_from(count).unwrap_or(0)).map(|e| (e.u64, e.events)));
    }
}

pub const IN: u32 = libc::EPOLLIN as u32;
pub const OUT: u32 = libc::EPOLLOUT as u32;
