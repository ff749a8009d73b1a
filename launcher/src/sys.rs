//! Small safe faces of the plain system calls used all over.

use crate::failure::{Failure, Result};
use std::ffi::{CStr, CString};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

pub fn c(text: &str) -> Result<CString> {
    CString::new(text).map_err(|_| Failure::new("order", format!("NUL in {text:?}")))
}

pub fn check(result: libc::c_long, step: &'static str, about: impl std::fmt::Display) -> Result<i32> {
    if result < 0 {
        return Err(Failure::last(step, about));
    }
    Ok(result as i32)
}

/// A descriptor that a system call has just returned.
pub fn owned(result: libc::c_long, step: &'static str, about: impl std::fmt::Display) -> Result<OwnedFd> {
    let fd = check(result, step, about)?;
    // SAFETY: fresh from the kernel, owned by nobody else.
    lift(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Keep low numbers free: they get fixed meanings just before exec.
pub fn lift(fd: OwnedFd) -> Result<OwnedFd> {
    if fd.as_raw_fd() >= 16 {
        return Ok(fd);
    }
    // SAFETY: plain fcntl on a descriptor we own.
    let high = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_DUPFD_CLOEXEC, 16) };
    check(high.into(), "descriptors", "F_DUPFD")?;
    // SAFETY: fresh duplicate.
    Ok(unsafe { OwnedFd::from_raw_fd(high) })
}

/// dup2 without close-on-exec.
pub fn place(fd: RawFd, at: RawFd) -> Result<()> {
    // SAFETY: plain dup2.
    check(unsafe { libc::dup2(fd, at) }.into(), "descriptors", "dup2").map(|_| ())
}

pub fn close_from(first: RawFd) -> Result<()> {
    // SAFETY: the caller uses no descriptor from `first` on any more.
    let done = unsafe { libc::syscall(libc::SYS_close_range, first as u32, u32::MAX, 0u32) };
    check(done, "descriptors", "close_range").map(|_| ())
}

pub fn close_between(first: RawFd, last: RawFd) -> Result<()> {
    if last < first {
        return Ok(());
    }
    // SAFETY: the caller uses none of these any more.
    let done = unsafe { libc::syscall(libc::SYS_close_range, first as u32, last as u32, 0u32) };
    check(done, "descriptors", "close_range").map(|_| ())
}

/// Die with the daemon, also as the engine: nobody is left half made with no one to know of it. The engine's own children see
/// their pipe close, and what has reached the sandbox's control group is found there.
/// (Entering the control group ourselves would cost a grace period of the kernel, 10 ms and more.)
pub fn die_with_parent() -> Result<()> {
    // SAFETY: no pointers.
    let done = unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0) };
    check(done.into(), "process", "PR_SET_PDEATHSIG").map(|_| ())
}

/// Our own session, no signal from a terminal reaches us; files get the modes we name.
pub fn detach_from_terminal() {
    // SAFETY: no pointers.
    unsafe {
        libc::setsid();
        libc::umask(0o022);
    }
}

pub fn pipe(step: &'static str) -> Result<(std::fs::File, std::fs::File)> {
    let mut ends = [0i32; 2];
    // SAFETY: ends has room for two descriptors, which are then owned here.
    unsafe {
        check(libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC).into(), step, "pipe")?;
        Ok((std::fs::File::from_raw_fd(ends[0]), std::fs::File::from_raw_fd(ends[1])))
    }
}

pub fn open_path(at: RawFd, path: &CStr, flags: i32, step: &'static str) -> Result<OwnedFd> {
    // SAFETY: path is NUL-terminated.
    let fd = unsafe { libc::openat(at, path.as_ptr(), flags | libc::O_CLOEXEC, 0o644) };
    owned(fd.into(), step, path.to_string_lossy())
}

/// Make a directory if it is not there; true when it was made.
pub fn mkdir(at: RawFd, name: &CStr, mode: u32, step: &'static str) -> Result<bool> {
    // SAFETY: name is NUL-terminated.
    if unsafe { libc::mkdirat(at, name.as_ptr(), mode) } == 0 {
        return Ok(true);
    }
    let failure = Failure::last(step, name.to_string_lossy());
    if failure.errno() == Some(libc::EEXIST) {
        return Ok(false);
    }
    Err(failure)
}

pub fn chown(at: RawFd, name: &CStr, id: u32, step: &'static str) -> Result<()> {
    let flags = libc::AT_SYMLINK_NOFOLLOW | libc::AT_EMPTY_PATH;
    // SAFETY: name is NUL-terminated.
    check(unsafe { libc::fchownat(at, name.as_ptr(), id, id, flags) }.into(), step, name.to_string_lossy()).map(|_| ())
}

/// Type and permissions of what a descriptor names.
pub fn mode(fd: &OwnedFd) -> Result<u32> {
    // SAFETY: stat is plain data.
    unsafe {
        let mut stat: libc::stat = std::mem::zeroed();
        let done = libc::fstatat(fd.as_raw_fd(), c"".as_ptr(), &mut stat, libc::AT_EMPTY_PATH);
        check(done.into(), "mount", "fstat")?;
        Ok(stat.st_mode)
    }
}

/// Look up files as another user would. The kernel drops the capabilities that would overrule permissions meanwhile.
pub fn as_user<T>(uid: u32, gid: u32, look: impl FnOnce() -> Result<T>) -> Result<T> {
    // SAFETY: plain calls on this single-threaded process; the groups are restored before anything else is done.
    unsafe {
        let mut groups = [0; 256];
        let count = check(libc::getgroups(256, groups.as_mut_ptr()).into(), "bind", "getgroups")?;
        check(libc::setgroups(1, &gid).into(), "bind", "setgroups")?;
        libc::setfsgid(gid);
        libc::setfsuid(uid);
        let found = if libc::setfsuid(u32::MAX) as u32 == uid {
            look()
        } else {
            Err(Failure::new("bind", format!("cannot act as user {uid}")))
        };
        libc::setfsuid(libc::geteuid());
        libc::setfsgid(libc::getegid());
        check(libc::setgroups(count as usize, groups.as_ptr()).into(), "bind", "setgroups")?;
        found
    }
}

/// Major and minor number of a character device; None for anything else.
pub fn device(fd: &OwnedFd) -> Result<Option<(u32, u32)>> {
    // SAFETY: stat is plain data.
    let found = unsafe {
        let mut stat: libc::stat = std::mem::zeroed();
        let done = libc::fstatat(fd.as_raw_fd(), c"".as_ptr(), &mut stat, libc::AT_EMPTY_PATH);
        check(done.into(), "mount", "fstat")?;
        stat
    };
    let is_one = found.st_mode & libc::S_IFMT == libc::S_IFCHR;
    Ok(is_one.then(|| (libc::major(found.st_rdev), libc::minor(found.st_rdev))))
}

/// Returns the status of a path, a link at its end followed; None if nothing is there.
pub fn file_kind(path: &CStr) -> Result<Option<u32>> {
    // SAFETY: path is NUL-terminated; stat is plain data.
    unsafe {
        let mut stat: libc::stat = std::mem::zeroed();
        if libc::stat(path.as_ptr(), &mut stat) == 0 {
            return Ok(Some(stat.st_mode & libc::S_IFMT));
        }
    }
    let failure = Failure::last("mount", path.to_string_lossy());
    match failure.errno() {
        Some(libc::ENOENT | libc::ENOTDIR) => Ok(None),
        _ => Err(failure),
    }
}

pub const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// fork(2) with flags of clone3(2): 0 in the child.
pub fn clone(flags: u64, signal: i32, group: Option<RawFd>) -> Result<i32> {
    let mut args = [0u64; 11]; // struct clone_args: flags, pidfd, child_tid, parent_tid, exit_signal, ... , cgroup at the end
    args[0] = flags;
    args[4] = signal as u64;
    args[10] = group.map_or(0, |fd| fd as u64);
    // SAFETY: this process has one thread, and the child goes on in a copy of its memory.
    let pid = unsafe { libc::syscall(libc::SYS_clone3, args.as_ptr(), std::mem::size_of_val(&args)) };
    check(pid, "process", "clone3")
}

/// Collect a child: its exit code, or 128 and the signal.
pub fn wait(child: i32) -> i32 {
    let mut status = 0;
    // SAFETY: status is ours.
    while unsafe { libc::waitpid(child, &mut status, 0) } < 0 {
        if std::io::Error::last_os_error().raw_os_error() != Some(libc::EINTR) {
            return 1;
        }
    }
    code(status)
}

pub fn code(status: i32) -> i32 {
    if libc::WIFSIGNALED(status) {
        return 128 + libc::WTERMSIG(status);
    }
    libc::WEXITSTATUS(status)
}

/// Whether a child is no longer alive. It is not collected.
pub fn has_ended(child: i32) -> bool {
    // SAFETY: siginfo is plain data.
    unsafe {
        let mut info: libc::siginfo_t = std::mem::zeroed();
        let flags = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
        libc::waitid(libc::P_PID, child as u32, &mut info, flags) != 0 || info.si_pid() != 0
    }
}

pub fn own_session() -> Result<()> {
    // SAFETY: no pointers.
    check(unsafe { libc::setsid() }.into(), "process", "setsid").map(|_| ())
}

pub fn set_host_name(name: &str) -> Result<()> {
    // SAFETY: the length is that of the text.
    check(unsafe { libc::sethostname(name.as_ptr().cast(), name.len()) }.into(), "process", "sethostname").map(|_| ())
}

pub fn write_all(fd: &OwnedFd, text: &[u8], step: &'static str) -> Result<()> {
    // SAFETY: the buffer is as long as said.
    let written = unsafe { libc::write(fd.as_raw_fd(), text.as_ptr().cast(), text.len()) };
    if written as usize == text.len() {
        return Ok(());
    }
    Err(Failure::last(step, "write"))
}

pub fn strings(list: &[String]) -> Result<Vec<CString>> {
    list.iter().map(|text| c(text)).collect()
}

pub fn exec(argv: &[CString], env: &[CString]) -> std::io::Error {
    let Some(program) = argv.first() else { return std::io::Error::from_raw_os_error(libc::EINVAL) };
    let pointers = |list: &[CString]| list.iter().map(|s| s.as_ptr()).chain([std::ptr::null()]).collect::<Vec<_>>();
    let (args, vars) = (pointers(argv), pointers(env));
    // SAFETY: both arrays end in NULL and live until the call returns.
    unsafe { libc::execve(program.as_ptr(), args.as_ptr(), vars.as_ptr()) };
    std::io::Error::last_os_error()
}
