//! `stat`: what is under a path.

use super::node;
use crate::op::{map, OpError, OpIo, Req};
use rmpv::Value;
use rustix::fs::{AtFlags, FileType, CWD};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

pub fn stat(req: &Req, _io: &mut dyn OpIo) -> Result<Value, OpError> {
    let path = req.path("path")?;
    let follow = req.opt_bool("follow", false)?;
    Ok(map([("stat", describe_path(&path, follow)?)]))
}

/// The description of a path, of the link itself unless `follow`.
pub fn describe_path(path: &Path, follow: bool) -> Result<Value, OpError> {
    let bytes = node::trimmed(path.as_os_str().as_bytes());
    let flags = if follow { AtFlags::empty() } else { AtFlags::SYMLINK_NOFOLLOW };
    let stat = rustix::fs::statat(CWD, bytes, flags).map_err(|errno| OpError::from(errno).at(path.display()))?;
    let target = if node::kind(&stat) == FileType::Symlink { node::read_link(CWD, bytes).ok() } else { None };
    Ok(Value::Map(node::describe(&stat, node::name_of(path), target.as_deref())))
}
