//! `du`: what a tree takes up, each inode counted once, on its own file system only.

use super::alive;
use super::list::skip_lost;
use super::node::{self, Id};
use super::walk::{Step, Walk};
use crate::op::{map, OpError, OpIo, Req};
use rmpv::Value;
use rustix::fs::{AtFlags, FileType, OFlags, Stat, CWD};
use std::collections::HashSet;
use std::os::unix::ffi::OsStrExt;

/// Inodes with several names that are remembered; beyond it they may be counted more than once.
const REMEMBERED: usize = 1 << 20;

#[derive(Default)]
struct Total {
    bytes: u64,
    inodes: u64,
    seen: HashSet<Id>,
}

impl Total {
    fn add(&mut self, stat: &Stat) {
        let several = stat.st_nlink > 1 && node::kind(stat) != FileType::Directory;
        if several && self.seen.len() < REMEMBERED && !self.seen.insert(Id::of(stat)) {
            return;
        }
        self.inodes += 1;
        self.bytes += (stat.st_blocks.max(0) as u64).saturating_mul(512);
    }
}

pub fn du(req: &Req, io: &mut dyn OpIo) -> Result<Value, OpError> {
    let path = req.path("path")?;
    let bytes = path.as_os_str().as_bytes();
    let stat =
        rustix::fs::statat(CWD, bytes, AtFlags::empty()).map_err(|errno| OpError::from(errno).at(path.display()))?;
    let mut total = Total::default();
    total.add(&stat);
    if node::kind(&stat) == FileType::Directory {
        let root = node::open(CWD, bytes, OFlags::RDONLY | OFlags::DIRECTORY, 0)?;
        let mut walk = Walk::unsorted(root)?;
        loop {
            match walk.step()? {
                Step::Done => break,
                Step::Leave => continue,
                Step::Entry => alive(io)?,
            }
            let Ok(entry) = walk.stat() else { continue };
            let is_directory = node::kind(&entry) == FileType::Directory;
            // Only directories tell the file system reliably: overlayfs gives files the device of their layer.
            if is_directory && entry.st_dev != stat.st_dev {
                continue;
            }
            total.add(&entry);
            if is_directory {
                skip_lost(walk.descend())?;
            }
        }
    }
    Ok(map([("bytes", Value::from(total.bytes)), ("inodes", Value::from(total.inodes))]))
}
