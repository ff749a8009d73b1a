//! `mkdir` and `symlink`: making names.

use super::node;
use super::paths::Paths;
use super::replace::set_owner;
use super::{owner_id, Owner};
use crate::op::{map, OpError, OpIo, Req};
use rmpv::Value;
use rustix::fd::AsFd;
use rustix::fs::{AtFlags, FileType, Mode};
use rustix::io::Errno;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

const DEFAULT_MODE: u32 = 0o755;

pub fn mkdir(req: &Req, _io: &mut dyn OpIo) -> Result<Value, OpError> {
    let path = req.path("path")?;
    let paths = Paths::of(req)?;
    let parents = req.opt_bool("parents", false)?;
    let exist_ok = req.opt_bool("exist_ok", parents)?;
    let mode = super::mode(req)?.unwrap_or(DEFAULT_MODE);
    let owner = Owner { uid: owner_id(req, "uid")?, gid: owner_id(req, "gid")? };
    if parents {
        if let Some(parent) = path.parent() {
            ensure(parent, &owner, paths).map_err(|error| error.at(path.display()))?;
        }
    }
    let created = make(&path, mode, &owner, paths).map_err(|error| error.at(path.display()))?;
    if !created && !exist_ok {
        return Err(OpError::from(Errno::EXIST).at(path.display()));
    }
    Ok(map([("created", Value::from(created))]))
}

pub fn symlink(req: &Req, _io: &mut dyn OpIo) -> Result<Value, OpError> {
    let path = req.path("path")?;
    let target = req.bytes("target")?;
    if target.is_empty() || target.contains(&0) {
        return Err(OpError::invalid("`target` must not be empty or contain a NUL byte"));
    }
    let made = match Paths::of(req)?.spot(path.as_os_str().as_bytes()) {
        Ok(spot) => rustix::fs::symlinkat(target, spot.dir(), &*spot.name).map_err(OpError::from),
        Err(error) => Err(error),
    };
    made.map_err(|error| error.at(path.display()))?;
    Ok(map([]))
}

/// Makes one directory with exactly this mode. `false`: a directory is there already.
fn make(path: &Path, mode: u32, owner: &Owner, paths: Paths) -> Result<bool, OpError> {
    let spot = paths.spot(node::trimmed(path.as_os_str().as_bytes()))?;
    match rustix::fs::mkdirat(spot.dir(), &*spot.name, Mode::from_raw_mode(mode)) {
        Ok(()) => {}
        Err(Errno::EXIST) => {
            let there = rustix::fs::statat(spot.dir(), &*spot.name, AtFlags::empty());
            return match there {
                Ok(stat) if node::kind(&stat) == FileType::Directory => Ok(false),
                _ => Err(Errno::EXIST.into()),
            };
        }
        Err(errno) => return Err(errno.into()),
    }
    let fd = node::open_directory(spot.dir(), &spot.name)?;
    if owner.is_set() {
        set_owner(fd.as_fd(), owner.uid, owner.gid)?;
    }
    rustix::fs::fchmod(&fd, Mode::from_raw_mode(mode))?;
    Ok(true)
}

/// Makes a directory and all that lead to it. What exists is left alone, and may be a link to a directory.
pub fn ensure(path: &Path, owner: &Owner, paths: Paths) -> Result<(), OpError> {
    let mut missing = Vec::new();
    let mut at = path;
    loop {
        match make(at, DEFAULT_MODE, owner, paths) {
            Ok(_) => break,
            Err(error) if error.errno == Some(libc::ENOENT) => missing.push(at),
            // Something that is no directory is in the way.
            Err(error) if error.errno == Some(libc::EEXIST) => return Err(Errno::NOTDIR.into()),
            Err(error) => return Err(error),
        }
        match at.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => at = parent,
            _ => return Err(Errno::NOENT.into()),
        }
    }
    for path in missing.into_iter().rev() {
        make(path, DEFAULT_MODE, owner, paths)?;
    }
    Ok(())
}
