//! `read`: a regular file, or a part of it, as a stream.

use super::node;
use crate::op::{map, OpError, OpIo, Req};
use rmpv::Value;
use rustix::fd::OwnedFd;
use rustix::fs::{OFlags, CWD};
use std::os::unix::ffi::OsStrExt;

const CHUNK: usize = 256 << 10;
/// The most that is read of a file that says it has no size: procfs and sysfs do that, and some never end.
const UNSIZED_LIMIT: u64 = 8 << 20;

pub fn read(req: &Req, io: &mut dyn OpIo) -> Result<Value, OpError> {
    let path = req.path("path")?;
    let offset = req.opt_u64("offset")?.unwrap_or(0);
    let limit = req.opt_u64("limit")?.unwrap_or(u64::MAX);
    let nofollow = if req.opt_bool("nofollow", false)? { OFlags::NOFOLLOW } else { OFlags::empty() };

    let bytes = path.as_os_str().as_bytes();
    let opened = node::open_regular(CWD, bytes, OFlags::RDONLY | nofollow, 0);
    let (fd, stat) = opened.map_err(|error| error.at(path.display()))?;
    io.event(map([("file", Value::Map(node::describe(&stat, node::name_of(&path), None)))]))?;

    // The size at open is the end, so that a file somebody keeps writing to is still a finite answer.
    let size = stat.st_size.max(0) as u64;
    let end = if size == 0 { offset.saturating_add(UNSIZED_LIMIT) } else { size };
    let end = end.min(offset.saturating_add(limit));
    let sent = send_range(&fd, offset, end, io).map_err(|error| error.at(path.display()))?;
    Ok(map([("bytes", Value::from(sent))]))
}

fn send_range(fd: &OwnedFd, offset: u64, end: u64, io: &mut dyn OpIo) -> Result<u64, OpError> {
    let mut at = offset;
    let wanted = end.saturating_sub(offset).min(CHUNK as u64) as usize;
    let mut buffer = vec![0u8; wanted];
    while at < end {
        if io.cancelled() {
            return Err(OpError::cancelled());
        }
        let want = (end - at).min(buffer.len() as u64) as usize;
        let Some(space) = buffer.get_mut(..want) else { break };
        let got = node::retry(|| rustix::io::pread(fd, &mut *space, at))?;
        if got == 0 {
            break;
        }
        io.send(space.get(..got).unwrap_or_default())?;
        at += got as u64;
    }
    Ok(at - offset)
}
