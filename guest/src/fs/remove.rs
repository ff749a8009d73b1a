//! `remove`: a file, an empty directory or a whole tree; links are removed, never followed.

use super::alive;
use super::node;
use super::paths::Paths;
use super::replace::Place;
use super::walk::{names, Descent, Names};
use crate::op::{map, OpError, OpIo, Req};
use rmpv::Value;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{AtFlags, FileType};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

pub fn remove(req: &Req, io: &mut dyn OpIo) -> Result<Value, OpError> {
    let path = req.path("path")?;
    let recursive = req.opt_bool("recursive", false)?;
    let missing_ok = req.opt_bool("missing_ok", false)?;
    match remove_path(&path, recursive, Paths::of(req)?, io) {
        Ok(count) => Ok(map([("removed", Value::from(count))])),
        Err(error) if missing_ok && error.errno == Some(libc::ENOENT) => Ok(map([("removed", Value::from(0))])),
        Err(error) => Err(error.at(path.display())),
    }
}

fn remove_path(path: &Path, recursive: bool, paths: Paths, io: &dyn OpIo) -> Result<u64, OpError> {
    let trimmed = Path::new(OsStr::from_bytes(node::trimmed(path.as_os_str().as_bytes())));
    let place = Place::of(trimmed, false, paths).map_err(|error| match error.errno {
        Some(libc::EISDIR) => OpError::invalid("`/`, `.` and `..` cannot be removed"),
        _ => error,
    })?;
    remove_at(place.dir.as_fd(), &place.name, recursive, io)
}

/// Removes `name` in `dir`, and with `recursive` all below it.
pub fn remove_at(dir: BorrowedFd<'_>, name: &[u8], recursive: bool, io: &dyn OpIo) -> Result<u64, OpError> {
    let stat = node::lstat(dir, name)?;
    if node::kind(&stat) != FileType::Directory {
        rustix::fs::unlinkat(dir, name, AtFlags::empty())?;
        return Ok(1);
    }
    match rustix::fs::unlinkat(dir, name, AtFlags::REMOVEDIR) {
        Ok(()) => return Ok(1),
        Err(Errno::NOTEMPTY | Errno::EXIST) if recursive => {}
        Err(Errno::EXIST) => return Err(Errno::NOTEMPTY.into()),
        // A mount point cannot go, but is emptied like the rest.
        Err(Errno::BUSY) if recursive => {}
        Err(errno) => return Err(errno.into()),
    }
    let root = node::open_directory(dir, name)?;
    let mut tree = Tree { open: Descent::default(), levels: Vec::new(), removed: 0, first_error: None };
    tree.enter(root, io)?;
    tree.run(io)?;
    tree.finish(dir, name)
}

struct Level {
    /// Subdirectories that could not be removed at once.
    directories: Names,
    next: usize,
}

struct Tree {
    open: Descent,
    levels: Vec<Level>,
    removed: u64,
    /// Like `rm`, go on with the rest and report what failed first.
    first_error: Option<OpError>,
}

impl Tree {
    fn note(&mut self, errno: Errno) {
        if errno != Errno::NOENT && self.first_error.is_none() {
            self.first_error = Some(errno.into());
        }
    }

    /// Empties a directory of all but its full subdirectories.
    fn enter(&mut self, fd: OwnedFd, io: &dyn OpIo) -> Result<(), OpError> {
        let mut directories = Names::default();
        let all = names(fd.as_fd(), false)?;
        for at in 0..all.len() {
            alive(io)?;
            let Some((name, kind)) = all.get(at) else { break };
            let gone = if kind == FileType::Directory {
                Err(Errno::ISDIR)
            } else {
                rustix::fs::unlinkat(&fd, name, AtFlags::empty())
            };
            let gone = match gone {
                // EPERM is how some file systems say "a directory".
                Err(Errno::ISDIR | Errno::PERM) => {
                    rustix::fs::unlinkat(&fd, name, AtFlags::REMOVEDIR).or_else(|errno| {
                        // Not a directory after all: what unlink said first stands.
                        if errno == Errno::NOTDIR {
                            rustix::fs::unlinkat(&fd, name, AtFlags::empty())
                        } else {
                            Err(errno)
                        }
                    })
                }
                other => other,
            };
            match gone {
                Ok(()) => self.removed += 1,
                Err(Errno::NOTEMPTY | Errno::EXIST | Errno::BUSY) => directories.push(name, FileType::Directory)?,
                Err(errno) => self.note(errno),
            }
        }
        self.open.push(fd)?;
        self.levels.push(Level { directories, next: 0 });
        Ok(())
    }

    fn run(&mut self, io: &dyn OpIo) -> Result<(), OpError> {
        loop {
            alive(io)?;
            let depth = self.levels.len();
            let Some(level) = self.levels.last_mut() else { return Ok(()) };
            let Some((name, _)) = level.directories.get(level.next) else {
                if depth == 1 {
                    return Ok(());
                }
                self.leave()?;
                continue;
            };
            match node::open_directory(self.open.top()?, name) {
                Ok(child) => self.enter(child, io)?,
                Err(errno) => {
                    level.next += 1;
                    self.note(errno);
                }
            }
        }
    }

    /// Goes back up from an emptied directory and removes it.
    fn leave(&mut self) -> Result<(), OpError> {
        self.levels.pop();
        self.open.pop()?;
        let Some(parent) = self.levels.last_mut() else { return Ok(()) };
        let Some((name, _)) = parent.directories.get(parent.next) else { return Ok(()) };
        let gone = rustix::fs::unlinkat(self.open.top()?, name, AtFlags::REMOVEDIR);
        parent.next += 1;
        match gone {
            Ok(()) => self.removed += 1,
            Err(errno) => self.note(errno),
        }
        Ok(())
    }

    fn finish(mut self, dir: BorrowedFd<'_>, name: &[u8]) -> Result<u64, OpError> {
        self.open = Descent::default();
        match rustix::fs::unlinkat(dir, name, AtFlags::REMOVEDIR) {
            Ok(()) => self.removed += 1,
            Err(errno) => self.note(errno),
        }
        self.first_error.map_or(Ok(self.removed), Err)
    }
}
