//! Opening the working directory of a process, and refusing one that is reached through a magic link.

use std::collections::VecDeque;
use std::ffi::{CString, OsStr};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use crate::op::OpError;

const PROC_MAGIC: i64 = 0x9fa0;
const MOST_LINKS: usize = 40;
const RESOLVE_NO_MAGICLINKS: u64 = 0x02;

/// A descriptor of the directory `path`. /proc/*/fd, /proc/*/root and /proc/*/cwd lead to places that no path inside the
/// sandbox names, so a path through one of them is refused.
pub fn open_dir(path: &Path) -> Result<OwnedFd, OpError> {
    let fd = match open_no_magic(path) {
        Err(e) if matches!(e.raw_os_error(), Some(libc::ENOSYS | libc::EPERM | libc::EINVAL)) => walk(path),
        other => other,
    };
    fd.map_err(|e| match e.raw_os_error() {
        Some(libc::ELOOP) => OpError::invalid("the working directory goes through a magic link or too many links"),
        _ => OpError::from(e),
    })
    .map_err(|e| e.at(path.display()))
}

fn open_no_magic(path: &Path) -> io::Result<OwnedFd> {
    let name = c_name(path.as_os_str())?;
    let flags = (libc::O_PATH | libc::O_DIRECTORY | libc::O_CLOEXEC) as u64;
    let how = [flags, 0, RESOLVE_NO_MAGICLINKS];
    let fd = unsafe { libc::syscall(libc::SYS_openat2, libc::AT_FDCWD, name.as_ptr(), how.as_ptr(), 24usize) };
    own(fd as i32)
}

/// The same for kernels without openat2: one component at a time, links resolved by hand.
fn walk(path: &Path) -> io::Result<OwnedFd> {
    let mut here = open_at(libc::AT_FDCWD, OsStr::new("/"), libc::O_DIRECTORY)?;
    let mut todo: VecDeque<Vec<u8>> = parts(path.as_os_str().as_bytes());
    let mut links = 0;
    while let Some(part) = todo.pop_front() {
        let name = OsStr::from_bytes(&part);
        let next = open_at(here.as_raw_fd(), name, libc::O_NOFOLLOW)?;
        let Some(target) = link_target(&next)? else {
            here = next;
            continue;
        };
        links += 1;
        let magic = on_proc(&here) && !matches!(part.as_slice(), b"self" | b"thread-self" | b"mounts" | b"net");
        if magic || links > MOST_LINKS {
            return Err(io::Error::from_raw_os_error(libc::ELOOP));
        }
        if target.starts_with(b"/") {
            here = open_at(libc::AT_FDCWD, OsStr::new("/"), libc::O_DIRECTORY)?;
        }
        for piece in parts(&target).into_iter().rev() {
            todo.push_front(piece);
        }
    }
    open_at(here.as_raw_fd(), OsStr::new("."), libc::O_DIRECTORY)
}

fn parts(path: &[u8]) -> VecDeque<Vec<u8>> {
    path.split(|b| *b == b'/').filter(|p| !p.is_empty() && *p != b".").map(<[u8]>::to_vec).collect()
}

fn open_at(dir: i32, name: &OsStr, flags: i32) -> io::Result<OwnedFd> {
    let name = c_name(name)?;
    own(unsafe { libc::openat(dir, name.as_ptr(), libc::O_PATH | libc::O_CLOEXEC | flags) })
}

fn link_target(fd: &OwnedFd) -> io::Result<Option<Vec<u8>>> {
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    crate::sys::check(unsafe { libc::fstat(fd.as_raw_fd(), &raw mut stat) })?;
    if stat.st_mode & libc::S_IFMT != libc::S_IFLNK {
        return Ok(None);
    }
    let mut buf = vec![0u8; 4096];
    let got = unsafe { libc::readlinkat(fd.as_raw_fd(), c"".as_ptr(), buf.as_mut_ptr().cast(), buf.len()) };
    buf.truncate(usize::try_from(got).map_err(|_| io::Error::last_os_error())?);
    Ok(Some(buf))
}

fn on_proc(fd: &OwnedFd) -> bool {
    let mut info: libc::statfs = unsafe { std::mem::zeroed() };
    unsafe { libc::fstatfs(fd.as_raw_fd(), &raw mut info) == 0 && info.f_type as i64 == PROC_MAGIC }
}

fn c_name(name: &OsStr) -> io::Result<CString> {
    CString::new(name.as_bytes()).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))
}

fn own(fd: i32) -> io::Result<OwnedFd> {
    let fd = crate::sys::check(fd)?;
    // SAFETY: fresh from the kernel.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ways_of_opening_agree() {
        let tmp = tempfile::tempdir().unwrap();
        let at = |name: &str| tmp.path().join(name);
        std::fs::create_dir_all(at("a/b")).unwrap();
        std::fs::write(at("file"), b"").unwrap();
        std::os::unix::fs::symlink("a/b", at("link")).unwrap();
        std::os::unix::fs::symlink("/proc/self/root", at("magic")).unwrap();
        std::os::unix::fs::symlink("loop", at("loop")).unwrap();
        for (path, errno) in [
            (at("a/../a/b"), None),
            (at("link"), None),
            ("/proc/self/task".into(), None),
            (at("none"), Some(libc::ENOENT)),
            (at("file"), Some(libc::ENOTDIR)),
            (at("file/x"), Some(libc::ENOTDIR)),
            (at("magic"), Some(libc::ELOOP)),
            (at("magic/tmp"), Some(libc::ELOOP)),
            (at("loop"), Some(libc::ELOOP)),
            ("/proc/self/cwd".into(), Some(libc::ELOOP)),
            ("/proc/1/../self/root/tmp".into(), Some(libc::ELOOP)),
        ] {
            assert_eq!(walk(&path).err().and_then(|e| e.raw_os_error()), errno, "walk {path:?}");
            assert_eq!(open_no_magic(&path).err().and_then(|e| e.raw_os_error()), errno, "openat2 {path:?}");
        }
    }
}
