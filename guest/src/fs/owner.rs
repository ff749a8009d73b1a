//! `chmod`: mode and owner of a path, or of a whole tree without its links.

use super::list::skip_lost;
use super::node;
use super::paths::{became_a_link, Paths};
use super::walk::{Step, Walk};
use super::{alive, owner_id, Owner};
use crate::op::{map, OpError, OpIo, Req};
use rmpv::Value;
use rustix::fd::{AsFd, BorrowedFd};
use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Uid, CWD};
use rustix::io::Errno;
use std::os::unix::ffi::OsStrExt;

struct Change {
    mode: Option<u32>,
    owner: Owner,
    recursive: bool,
    follow: bool,
}

pub fn chmod(req: &Req, io: &mut dyn OpIo) -> Result<Value, OpError> {
    let path = req.path("path")?;
    let change = Change {
        mode: super::mode(req)?,
        owner: Owner { uid: owner_id(req, "uid")?, gid: owner_id(req, "gid")? },
        recursive: req.opt_bool("recursive", false)?,
        follow: req.opt_bool("follow", true)?,
    };
    if change.mode.is_none() && !change.owner.is_set() {
        return Err(OpError::invalid("one of `mode`, `uid` and `gid` is needed"));
    }
    let bytes = node::trimmed(path.as_os_str().as_bytes());
    let updated = run(bytes, Paths::of(req)?, &change, io).map_err(|error| error.at(path.display()))?;
    Ok(map([("updated", Value::from(updated))]))
}

fn run(path: &[u8], paths: Paths, change: &Change, io: &dyn OpIo) -> Result<u64, OpError> {
    let spot = paths.spot(path)?;
    let flags = if paths.follow(change.follow) { OFlags::empty() } else { OFlags::NOFOLLOW };
    let fd = node::open(spot.dir(), &spot.name, OFlags::PATH | flags, 0)?;
    let stat = rustix::fs::fstat(&fd)?;
    if change.follow && node::kind(&stat) == FileType::Symlink {
        return Err(became_a_link());
    }
    if node::kind(&stat) == FileType::RegularFile {
        node::guard(fd.as_fd(), &stat, true)?;
    }
    apply(fd.as_fd(), spot.dir(), &spot.name, node::kind(&stat), change)?;
    if !change.recursive || node::kind(&stat) != FileType::Directory {
        return Ok(1);
    }
    let root = node::open(&fd, b".", OFlags::RDONLY | OFlags::DIRECTORY, 0)?;
    below(Walk::unsorted(root)?, change, io)
}

fn below(mut walk: Walk, change: &Change, io: &dyn OpIo) -> Result<u64, OpError> {
    let mut updated = 1;
    loop {
        match walk.step()? {
            Step::Done => return Ok(updated),
            Step::Leave => continue,
            Step::Entry => alive(io)?,
        }
        if walk.kind() == FileType::Symlink {
            continue;
        }
        let fd = match node::open(walk.dir()?, walk.name(), OFlags::PATH | OFlags::NOFOLLOW, 0) {
            Err(Errno::NOENT) => continue,
            other => other?,
        };
        // The directory's word may be outdated: the descriptor is the truth.
        let kind = node::kind(&rustix::fs::fstat(&fd)?);
        if kind == FileType::Symlink {
            continue;
        }
        apply(fd.as_fd(), walk.dir()?, walk.name(), kind, change)?;
        updated += 1;
        if kind == FileType::Directory {
            skip_lost(walk.descend())?;
        }
    }
}

/// Changes the object behind an O_PATH descriptor. Owner first: changing it clears the set-id bits.
fn apply(fd: BorrowedFd<'_>, dir: BorrowedFd<'_>, name: &[u8], kind: FileType, change: &Change) -> Result<(), OpError> {
    if change.owner.is_set() {
        let (uid, gid) = (change.owner.uid.map(Uid::from_raw), change.owner.gid.map(Gid::from_raw));
        match rustix::fs::chownat(fd, "", uid, gid, AtFlags::EMPTY_PATH) {
            Err(Errno::NOENT | Errno::INVAL | Errno::NOSYS | Errno::BADF) => {
                rustix::fs::chownat(dir, name, uid, gid, AtFlags::SYMLINK_NOFOLLOW)?;
            }
            other => other?,
        }
    }
    let Some(mode) = change.mode.map(Mode::from_raw_mode) else { return Ok(()) };
    if kind == FileType::Symlink {
        // A link has no mode of its own on Linux.
        return if change.owner.is_set() { Ok(()) } else { Err(Errno::NOTSUP.into()) };
    }
    // fchmod refuses O_PATH descriptors; the name under /proc means the same object whatever the tree looks like now.
    match rustix::fs::chmodat(CWD, node::descriptor_path(fd).as_str(), mode, AtFlags::empty()) {
        Err(Errno::NOENT | Errno::LOOP | Errno::NOTSUP | Errno::BADF) => {}
        other => return Ok(other?),
    }
    let again = node::open(dir, name, OFlags::RDONLY | OFlags::NOFOLLOW, 0)?;
    Ok(rustix::fs::fchmod(&again, mode)?)
}
