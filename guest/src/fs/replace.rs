//! Replacing a file as a whole: a temporary sibling that is renamed over its target, or disappears.

use super::paths::Paths;
use super::{node, Owner};
use crate::op::OpError;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, RenameFlags, Stat, Uid};
use rustix::io::Errno;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

const MAX_LINKS: usize = 40;
const PREFIX: &str = ".atoll-";
const SUFFIX: &str = ".tmp";

/// Whether a name is one that only this module makes.
pub fn is_temporary(name: &[u8]) -> bool {
    name.starts_with(PREFIX.as_bytes()) && name.ends_with(SUFFIX.as_bytes())
}

/// A name no one else uses at the moment.
pub fn temporary_name() -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let nanos = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_nanos());
    format!("{PREFIX}{:x}-{:x}-{count:x}{SUFFIX}", std::process::id(), nanos as u64)
}

/// A path taken apart into an open directory and the name in it.
pub struct Place {
    pub dir: OwnedFd,
    pub name: Vec<u8>,
    /// The entry that is there now, the link itself if it is one.
    pub stat: Option<Stat>,
}

impl Place {
    /// The place of `path`. With `follow`, links in the last component are followed, also to where nothing is yet.
    pub fn of(path: &Path, follow: bool, paths: Paths) -> Result<Self, OpError> {
        let follow = paths.follow(follow);
        let mut base: Option<OwnedFd> = None;
        let mut rest = path.as_os_str().as_bytes().to_vec();
        for _ in 0..=MAX_LINKS {
            let (parent, name) = split(&rest)?;
            let dir = match &base {
                Some(fd) => node::open(fd, parent, OFlags::RDONLY | OFlags::DIRECTORY, 0)?,
                None => paths.directory(parent)?,
            };
            let stat = match node::lstat(&dir, name) {
                Ok(stat) => Some(stat),
                Err(Errno::NOENT) => None,
                Err(errno) => return Err(errno.into()),
            };
            let is_link = stat.as_ref().is_some_and(|stat| node::kind(stat) == FileType::Symlink);
            if !(follow && is_link) {
                return Ok(Self { name: name.to_vec(), dir, stat });
            }
            rest = node::read_link(&dir, name)?;
            base = Some(dir);
        }
        Err(Errno::LOOP.into())
    }

    pub fn kind(&self) -> Option<FileType> {
        self.stat.as_ref().map(node::kind)
    }
}

/// Parent and last component. What ends in `/`, `.` or `..` can only be a directory.
fn split(path: &[u8]) -> Result<(&[u8], &[u8]), OpError> {
    let (parent, name) = match path.iter().rposition(|b| *b == b'/') {
        Some(0) => (b"/".as_slice(), path.get(1..).unwrap_or_default()),
        Some(at) => (path.get(..at).unwrap_or_default(), path.get(at + 1..).unwrap_or_default()),
        None => (b".".as_slice(), path),
    };
    match name {
        b"" | b"." | b".." => Err(Errno::ISDIR.into()),
        _ => Ok((parent, name)),
    }
}

/// A file under construction. Dropped before `commit`, it leaves nothing.
pub struct Temporary<'a> {
    dir: BorrowedFd<'a>,
    name: String,
    fd: OwnedFd,
    done: bool,
}

impl<'a> Temporary<'a> {
    pub fn create(dir: BorrowedFd<'a>) -> Result<Self, Errno> {
        for _ in 0..16 {
            let name = temporary_name();
            let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
            match node::open(dir, name.as_bytes(), flags, 0o600) {
                Ok(fd) => return Ok(Self { dir, name, fd, done: false }),
                Err(Errno::EXIST) => continue,
                Err(errno) => return Err(errno),
            }
        }
        Err(Errno::EXIST)
    }

    pub fn fd(&self) -> &OwnedFd {
        &self.fd
    }

    /// Takes on the mode and the owner it is to have: the wanted one, else that of the file it stands in for. An owner
    /// nobody asked for and that cannot be given is left as it is.
    pub fn dress(&self, mode: u32, wanted: &Owner, old: Option<&Stat>) -> Result<(), OpError> {
        if let Some(old) = old {
            match set_owner(self.fd.as_fd(), Some(old.st_uid), Some(old.st_gid)) {
                Ok(()) | Err(Errno::PERM | Errno::INVAL) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        if wanted.is_set() {
            set_owner(self.fd.as_fd(), wanted.uid, wanted.gid)?;
        }
        rustix::fs::fchmod(&self.fd, Mode::from_raw_mode(mode))?;
        Ok(())
    }

    /// Puts the file in its place. With `fresh` an existing name is an error and stays.
    pub fn commit(mut self, dir: BorrowedFd<'_>, name: &[u8], fresh: bool) -> Result<(), Errno> {
        if fresh {
            rename_fresh(self.dir, self.name.as_bytes(), dir, name)?;
        } else {
            rustix::fs::renameat(self.dir, self.name.as_str(), dir, name)?;
        }
        self.done = true;
        Ok(())
    }
}

impl Drop for Temporary<'_> {
    fn drop(&mut self) {
        if !self.done {
            // Nothing better can be done about a temporary that will not go.
            let _ = rustix::fs::unlinkat(self.dir, self.name.as_str(), AtFlags::empty());
        }
    }
}

/// rename that never replaces. Without renameat2 a hard link does the same for everything but directories.
pub fn rename_fresh(from: BorrowedFd<'_>, old: &[u8], to: BorrowedFd<'_>, new: &[u8]) -> Result<(), Errno> {
    match rustix::fs::renameat_with(from, old, to, new, RenameFlags::NOREPLACE) {
        Err(Errno::NOSYS | Errno::INVAL | Errno::NOTSUP) => {}
        other => return other,
    }
    let stat = node::lstat(from, old)?;
    if node::lstat(to, new).is_ok() {
        return Err(Errno::EXIST);
    }
    if node::kind(&stat) == FileType::Directory {
        // EINVAL may also have meant "into itself"; plain rename says so again.
        return rustix::fs::renameat(from, old, to, new);
    }
    match rustix::fs::linkat(from, old, to, new, AtFlags::empty()) {
        Ok(()) => rustix::fs::unlinkat(from, old, AtFlags::empty()),
        Err(Errno::EXIST) => Err(Errno::EXIST),
        Err(Errno::XDEV) => Err(Errno::XDEV),
        Err(_) => rustix::fs::renameat(from, old, to, new),
    }
}

pub fn set_owner(fd: BorrowedFd<'_>, uid: Option<u32>, gid: Option<u32>) -> Result<(), Errno> {
    rustix::fs::fchown(fd, uid.map(Uid::from_raw), gid.map(Gid::from_raw))
}

/// Writes all of `data` at the descriptor's position.
pub fn write_all(fd: impl AsFd, mut data: &[u8]) -> Result<(), Errno> {
    let fd = fd.as_fd();
    while !data.is_empty() {
        let wrote = node::retry(|| rustix::io::write(fd, data))?;
        if wrote == 0 {
            return Err(Errno::IO);
        }
        data = data.get(wrote..).unwrap_or_default();
    }
    Ok(())
}
