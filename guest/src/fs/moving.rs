//! `move`: rename, and where rename cannot reach, copy and remove.

use super::copy::{copy_tree, place, Manner};
use super::node::{self, Id};
use super::paths::Paths;
use super::remove::remove_at;
use super::replace::{rename_fresh, temporary_name, Place};
use super::{mkdir, Owner};
use crate::op::{map, OpError, OpIo, Req};
use rmpv::Value;
use rustix::fd::AsFd;
use rustix::fs::{AtFlags, FileType, Stat};
use rustix::io::Errno;

pub fn rename(req: &Req, io: &mut dyn OpIo) -> Result<Value, OpError> {
    let (src, dst) = (req.path("src")?, req.path("dst")?);
    let paths = Paths::of(req)?;
    let overwrite = req.opt_bool("overwrite", false)?;
    let from = place(&src, false, paths).map_err(|error| error.at(src.display()))?;
    let stat = from.stat.ok_or_else(|| OpError::from(Errno::NOENT).at(src.display()))?;
    if req.opt_bool("parents", false)? {
        if let Some(parent) = dst.parent() {
            mkdir::ensure(parent, &Owner::default(), paths).map_err(|error| error.at(dst.display()))?;
        }
    }
    let to = place(&dst, false, paths).map_err(|error| error.at(dst.display()))?;
    move_place(&from, &stat, &to, overwrite, io).map_err(|error| error.at(dst.display()))?;
    Ok(map([]))
}

fn move_place(from: &Place, stat: &Stat, to: &Place, overwrite: bool, io: &dyn OpIo) -> Result<(), OpError> {
    if to.stat.is_some() && !overwrite {
        return Err(Errno::EXIST.into());
    }
    if to.stat.as_ref().is_some_and(|there| Id::of(there) == Id::of(stat)) {
        return drop_second_name(from, stat, to);
    }
    let moved = if overwrite {
        rustix::fs::renameat(&from.dir, &*from.name, &to.dir, &*to.name)
    } else {
        rename_fresh(from.dir.as_fd(), &from.name, to.dir.as_fd(), &to.name)
    };
    match moved {
        Err(Errno::XDEV) => across(from, to, overwrite, io),
        other => Ok(other?),
    }
}

/// Both names are one file already, and rename would leave them both.
fn drop_second_name(from: &Place, stat: &Stat, to: &Place) -> Result<(), OpError> {
    let same_directory = Id::of(&rustix::fs::fstat(&from.dir)?) == Id::of(&rustix::fs::fstat(&to.dir)?);
    if (same_directory && from.name == to.name) || node::kind(stat) == FileType::Directory {
        return Ok(());
    }
    Ok(rustix::fs::unlinkat(&from.dir, &*from.name, AtFlags::empty())?)
}

/// To another mount: the copy is made beside its place and appears there whole, then the original goes.
fn across(from: &Place, to: &Place, overwrite: bool, io: &dyn OpIo) -> Result<(), OpError> {
    let name = temporary_name();
    let manner = Manner { overwrite: false, keep_times: true };
    let finished = copy_tree(from, to.dir.as_fd(), name.as_bytes(), manner, io).and_then(|_| {
        Ok(if overwrite {
            rustix::fs::renameat(&to.dir, name.as_str(), &to.dir, &*to.name)
        } else {
            rename_fresh(to.dir.as_fd(), name.as_bytes(), to.dir.as_fd(), &to.name)
        }?)
    });
    if let Err(error) = finished {
        // Also when the move was cancelled, so the clean-up must not ask for that.
        let _ = remove_at(to.dir.as_fd(), name.as_bytes(), true, &Unstoppable);
        return Err(error);
    }
    remove_at(from.dir.as_fd(), &from.name, true, io)?;
    Ok(())
}

/// A stream for work that has to be finished although nobody waits for it.
struct Unstoppable;

impl OpIo for Unstoppable {
    fn event(&mut self, _value: Value) -> Result<(), OpError> {
        Ok(())
    }

    fn send(&mut self, _data: &[u8]) -> Result<(), OpError> {
        Ok(())
    }

    fn recv(&mut self) -> Result<Option<Vec<u8>>, OpError> {
        Ok(None)
    }

    fn cancelled(&self) -> bool {
        false
    }

    fn wake_fd(&self) -> std::os::fd::RawFd {
        -1
    }
}
