//! `list`: the entries of a directory, or of the whole tree below it, in batches.

use super::alive;
use super::node;
use super::paths::Paths;
use super::walk::{Step, Walk};
use crate::op::{map, text_or_bin, OpError, OpIo, Req};
use rmpv::Value;
use rustix::fs::FileType;
use std::os::unix::ffi::OsStrExt;

const BATCH: usize = 256;
/// Bytes of paths in one batch; with the fixed part of each entry it stays far below the frame limit.
const BATCH_BYTES: usize = 256 << 10;

/// Collects values and sends them as events `{key: [...]}` before they outgrow a frame.
pub struct Batch<'a> {
    key: &'a str,
    values: Vec<Value>,
    bytes: usize,
}

impl<'a> Batch<'a> {
    pub fn new(key: &'a str) -> Self {
        Self { key, values: Vec::new(), bytes: 0 }
    }

    /// Adds a value with about `bytes` bytes of text in it.
    pub fn push(&mut self, value: Value, bytes: usize, io: &mut dyn OpIo) -> Result<(), OpError> {
        if self.bytes + bytes > BATCH_BYTES {
            self.flush(io)?;
        }
        self.values.push(value);
        self.bytes += bytes;
        if self.values.len() >= BATCH {
            self.flush(io)?;
        }
        Ok(())
    }

    pub fn flush(&mut self, io: &mut dyn OpIo) -> Result<(), OpError> {
        self.bytes = 0;
        if self.values.is_empty() {
            return Ok(());
        }
        io.event(map([(self.key, Value::Array(std::mem::take(&mut self.values)))]))
    }

    /// Entries that were not sent yet.
    pub fn rest(self) -> Vec<Value> {
        self.values
    }
}

pub fn list(req: &Req, io: &mut dyn OpIo) -> Result<Value, OpError> {
    let path = req.path("path")?;
    let recursive = req.opt_bool("recursive", false)?;
    let depth = if recursive { req.opt_u64("depth")?.unwrap_or(u64::MAX) } else { req.opt_u64("depth")?.unwrap_or(1) };
    let since = req.opt_f64("since")?;
    let changed_since = req.opt_f64("changed_since")?;
    let limit = req.opt_u64("limit")?.unwrap_or(u64::MAX);
    let files_only = req.opt_bool("files_only", false)?;
    let follow = req.opt_bool("follow", false)?;

    let root = node::open_root(&path, follow, Paths::of(req)?)?;
    let root_path = node::trimmed(path.as_os_str().as_bytes());
    let mut walk = Walk::new(root).map_err(|error| error.at(path.display()))?;
    let mut batch = Batch::new("entries");
    let (mut count, mut truncated) = (0u64, false);
    loop {
        match walk.step()? {
            Step::Done => break,
            Step::Leave => continue,
            Step::Entry => alive(io)?,
        }
        // An entry that vanished since its directory was read is no error.
        let Ok(stat) = walk.stat() else { continue };
        let kind = node::kind(&stat);
        let wanted = since.is_none_or(|since| node::mtime(&stat) >= since)
            && changed_since.is_none_or(|since| node::ctime(&stat) >= since)
            && !(files_only && kind == FileType::Directory);
        if wanted {
            let full = node::join(root_path, walk.path());
            if count >= limit || full.len() > BATCH_BYTES {
                truncated = true;
                if count >= limit {
                    break;
                }
                continue;
            }
            count += 1;
            let target = if kind == FileType::Symlink { node::read_link(walk.dir()?, walk.name()).ok() } else { None };
            let bytes = full.len() + walk.name().len() + target.as_ref().map_or(0, Vec::len);
            let mut entry = node::describe(&stat, walk.name(), target.as_deref());
            entry.push((Value::from("path"), text_or_bin(&full)));
            batch.push(Value::Map(entry), bytes, io)?;
        }
        if kind == FileType::Directory && (walk.depth() as u64) < depth {
            skip_lost(walk.descend())?;
        }
    }
    batch.flush(io)?;
    Ok(map([("count", Value::from(count)), ("truncated", Value::from(truncated))]))
}

/// A directory that vanished, was swapped for something else, or may not be read is passed over by a walk.
pub fn skip_lost(descended: Result<(), OpError>) -> Result<bool, OpError> {
    match descended {
        Ok(()) => Ok(true),
        Err(error)
            if matches!(error.errno, Some(libc::ENOENT | libc::ENOTDIR | libc::ELOOP | libc::EACCES | libc::EPERM)) =>
        {
            Ok(false)
        }
        Err(error) => Err(error),
    }
}
