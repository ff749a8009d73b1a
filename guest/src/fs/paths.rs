//! How the paths of a request are taken: as the kernel resolves them, or exactly.
//!
//! A rule for paths is judged before the operation, so a program inside could put a link into the path in between. A
//! request that was judged says `exact`: its paths hold no links, and one that is there by now is refused. The walk
//! ends with an open directory, and all that follows goes by its descriptor.

use super::node;
use crate::op::{OpError, Req};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{FileType, OFlags, CWD};
use rustix::io::Errno;

#[derive(Clone, Copy)]
pub struct Paths {
    exact: bool,
}

/// A name, and the directory it is looked up in.
pub struct Spot {
    dir: Option<OwnedFd>,
    pub name: Vec<u8>,
}

impl Spot {
    pub fn dir(&self) -> BorrowedFd<'_> {
        self.dir.as_ref().map_or(CWD, AsFd::as_fd)
    }
}

impl Paths {
    pub fn of(req: &Req) -> Result<Self, OpError> {
        Ok(Self { exact: req.opt_bool("exact", false)? })
    }

    /// Whether a link in the last place is followed, where the operation would.
    pub fn follow(self, wanted: bool) -> bool {
        wanted && !self.exact
    }

    /// Opens a directory that the path of the request leads to, or leads through.
    pub fn directory(self, path: &[u8]) -> Result<OwnedFd, OpError> {
        if self.exact {
            let end = walk(path)?;
            return Ok(node::open(&end, b".", OFlags::RDONLY | OFlags::DIRECTORY, 0)?);
        }
        Ok(node::open(CWD, path, OFlags::RDONLY | OFlags::DIRECTORY, 0)?)
    }

    /// The path as system calls take it. An exact one is a single name in a directory that is open.
    pub fn spot(self, path: &[u8]) -> Result<Spot, OpError> {
        match path.iter().rposition(|b| *b == b'/') {
            Some(at) if self.exact && path.len() > 1 => {
                let (parent, name) = (path.get(..at).unwrap_or_default(), path.get(at + 1..).unwrap_or_default());
                Ok(Spot { dir: Some(walk(parent)?), name: name.to_vec() })
            }
            _ => Ok(Spot { dir: None, name: path.to_vec() }),
        }
    }
}

/// Opens a directory one component at a time. O_DIRECTORY is left out: with it gVisor follows a link in spite of O_NOFOLLOW.
fn walk(path: &[u8]) -> Result<OwnedFd, OpError> {
    let mut here = node::open(CWD, b"/", OFlags::PATH | OFlags::DIRECTORY, 0)?;
    for part in path.split(|b| *b == b'/').filter(|part| !part.is_empty()) {
        if matches!(part, b"." | b"..") {
            return Err(OpError::invalid("an exact path has no `.` and no `..`"));
        }
        let next = node::open(&here, part, OFlags::PATH | OFlags::NOFOLLOW, 0)?;
        match node::kind(&rustix::fs::fstat(&next)?) {
            FileType::Directory => here = next,
            FileType::Symlink => return Err(became_a_link()),
            _ => return Err(Errno::NOTDIR.into()),
        }
    }
    Ok(here)
}

pub fn became_a_link() -> OpError {
    OpError::new("busy", "a link was put into the path while its rule was judged")
}
