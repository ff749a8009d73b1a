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

/// Our own session, no signal from a terminal reaches us; files get the modes we name.
pub fn detach_from_terminal() {
    // SAFETY: no pointers.
    unsafe {
        libc::setsid();
        libc::umask(0o022);
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

pub fn exec(argv: &[CString], env: &[CString]) -> std::io::Error {
    let Some(program) = argv.first() else { return std::io::Error::from_raw_os_error(libc::EINVAL) };
    let pointers = |list: &[CString]| list.iter().map(|s| s.as_ptr()).chain([std::ptr::null()]).collect::<Vec<_>>();
    let (args, vars) = (pointers(argv), pointers(env));
    // SAFETY: both arrays end in NULL and live until the call returns.
    unsafe { libc::execve(program.as_ptr(), args.as_ptr(), vars.as_ptr()) };
    std::io::Error::last_os_error()
}
