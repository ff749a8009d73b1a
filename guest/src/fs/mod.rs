//! File operations of the guest protocol; each is a blocking function run on its own thread.
//!
//! Nothing here recurses: the threads have small stacks, and trees inside a sandbox may be of any depth.

mod copy;
mod du;
pub mod glob;
mod grep;
mod list;
mod mkdir;
mod moving;
pub mod node;
mod owner;
pub mod paths;
mod read;
mod remove;
pub mod replace;
mod sed;
mod select;
mod stat;
pub mod tar_format;
mod tar_in;
mod tar_out;
mod tar_source;
pub mod walk;
mod watch;
mod write;

use crate::op::{OpError, OpFn, OpIo, Req};

/// The operation of that name, if it is one of ours.
pub fn lookup(op: &str) -> Option<OpFn> {
    Some(match op {
        "read" => read::read,
        "write" => write::write,
        "list" => list::list,
        "stat" => stat::stat,
        "mkdir" => mkdir::mkdir,
        "symlink" => mkdir::symlink,
        "remove" => remove::remove,
        "move" => moving::rename,
        "copy" => copy::copy,
        "chmod" => owner::chmod,
        "watch" => watch::watch,
        "grep" => grep::grep,
        "sed" => sed::sed,
        "tar_out" => tar_out::tar_out,
        "tar_in" => tar_in::tar_in,
        "du" => du::du,
        _ => return None,
    })
}

/// The ids a request wants a file to have.
#[derive(Clone, Copy, Debug, Default)]
pub struct Owner {
    pub uid: Option<u32>,
    pub gid: Option<u32>,
}

impl Owner {
    pub fn is_set(&self) -> bool {
        self.uid.is_some() || self.gid.is_some()
    }
}

/// A numeric user or group id of a request. The highest number means "none" to the kernel, so it is no id.
fn owner_id(req: &Req, key: &str) -> Result<Option<u32>, OpError> {
    match req.opt_u64(key)? {
        None => Ok(None),
        Some(id) if id < u64::from(u32::MAX) => Ok(Some(id as u32)),
        Some(_) => Err(OpError::invalid(format!("`{key}` is not an id"))),
    }
}

/// The permission bits of a request.
fn mode(req: &Req) -> Result<Option<u32>, OpError> {
    match req.opt_u64("mode")? {
        None => Ok(None),
        Some(mode) if mode <= 0o7777 => Ok(Some(mode as u32)),
        Some(_) => Err(OpError::invalid("`mode` must be between 0 and 0o7777")),
    }
}

/// Ends an operation that nobody waits for any more; called in every loop.
fn alive(io: &dyn OpIo) -> Result<(), OpError> {
    if io.cancelled() {
        Err(OpError::cancelled())
    } else {
        Ok(())
    }
}

/// Runs what needs more stack than the threads of operations have.
fn on_large_stack<T: Send>(work: impl FnOnce() -> T + Send) -> Result<T, OpError> {
    const STACK: usize = 8 << 20;
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().stack_size(STACK).spawn_scoped(scope, work)?;
        thread.join().map_err(|_| OpError::new("internal", "a part of the operation failed"))
    })
}
