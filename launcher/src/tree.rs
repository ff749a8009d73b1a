//! The sandbox's view of files, made by its own first process: the new root, the kernel's file systems in it, what is covered.

use crate::failure::{Failure, Result};
use crate::oci::{Mount, Oci};
use crate::{mounts, sys};
use std::ffi::{CStr, CString};
use std::os::fd::{AsRawFd, OwnedFd};

const STEP: &str = "tree";

/// The nodes of the host that a sandbox has, and what each must be.
const NODES: [(&CStr, u32, u32); 6] = [
    (c"/dev/null", 1, 3),
    (c"/dev/random", 1, 8),
    (c"/dev/full", 1, 7),
    (c"/dev/tty", 5, 0),
    (c"/dev/zero", 1, 5),
    (c"/dev/urandom", 1, 9),
];
const LINKS: [(&CStr, &CStr); 5] = [
    (c"/proc/self/fd", c"/dev/fd"),
    (c"/proc/self/fd/0", c"/dev/stdin"),
    (c"/proc/self/fd/1", c"/dev/stdout"),
    (c"/proc/self/fd/2", c"/dev/stderr"),
    (c"pts/ptmx", c"/dev/ptmx"),
];

/// Change to the new root, put the kernel's file systems there, and let go of the old one. The old one goes last: the kernel gives a
/// /proc or a /sys only to who sees one already.
pub fn make(config: &Oci) -> Result<()> {
    let nodes = NODES.iter().map(node).collect::<Result<Vec<_>>>()?;
    let (binds, mounts): (Vec<_>, Vec<_>) = config.mounts.iter().partition(|mount| mount.kind == "bind");
    let view = binds.iter().map(|bind| mounts::clone_trees(&sys::c(&bind.source)?)).collect::<Result<Vec<_>>>()?;
    let old = pivot(&config.root)?;
    for mount in mounts {
        mount_one(mount)?;
    }
    for (bind, tree) in binds.iter().zip(&view) {
        // The places are the kernel's own, in file systems that are seconds old: there is no link to be followed.
        let place = sys::open_path(libc::AT_FDCWD, &sys::c(&bind.target)?, libc::O_PATH | libc::O_NOFOLLOW, STEP)?;
        mounts::attach(tree, place.as_raw_fd())?;
    }
    for ((path, _, _), node) in NODES.iter().zip(&nodes) {
        let flags = libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL | libc::O_NOFOLLOW;
        let place = sys::open_path(libc::AT_FDCWD, path, flags, STEP)?;
        mounts::attach(node, place.as_raw_fd())?;
    }
    for (to, at) in LINKS {
        // SAFETY: both end in NUL.
        sys::check(unsafe { libc::symlink(to.as_ptr(), at.as_ptr()) }.into(), STEP, at.to_string_lossy())?;
    }
    // SAFETY: plain calls.
    unsafe {
        sys::check(libc::fchdir(old.as_raw_fd()).into(), STEP, "old root")?;
        sys::check(libc::umount2(c".".as_ptr(), libc::MNT_DETACH).into(), STEP, "letting go of the old root")?;
    }
    mounts::chdir(c"/")
}

/// Bound on itself, because what came with the namespace is locked in its place; then it is the root. Returns the old one, by
/// descriptor.
fn pivot(root: &str) -> Result<OwnedFd> {
    let root = sys::c(root)?;
    let old = sys::open_path(libc::AT_FDCWD, c"/", libc::O_PATH | libc::O_DIRECTORY, STEP)?;
    mounts::bind(&root, libc::MS_REC)?;
    mounts::chdir(&root)?;
    // SAFETY: both are ".", so that no directory is needed for the old root: it lies over the new one until it is detached.
    let done = unsafe { libc::syscall(libc::SYS_pivot_root, c".".as_ptr(), c".".as_ptr()) };
    sys::check(done, STEP, "pivot_root")?;
    Ok(old)
}

/// A detached mount of one node of the host's /dev, which really is that device.
fn node((path, major, minor): &(&CStr, u32, u32)) -> Result<OwnedFd> {
    let tree = mounts::clone_tree(libc::AT_FDCWD, path)?;
    if sys::device(&tree)? != Some((*major, *minor)) {
        return Err(Failure::new(STEP, format!("{} is not the device {major}:{minor}", path.to_string_lossy())));
    }
    Ok(tree)
}

fn mount_one(mount: &Mount) -> Result<()> {
    let target = sys::c(&mount.target)?;
    sys::mkdir(libc::AT_FDCWD, &target, 0o755, STEP)?;
    mounts::mount_plain(&sys::c(&mount.source)?, &target, &sys::c(&mount.kind)?, mount.flags, &sys::c(&mount.options)?)
}

/// Make paths of the kernel's file systems read-only, and hide others. What this kernel does not have needs no cover.
pub fn cover(config: &Oci) -> Result<()> {
    for path in &config.read_only {
        let path = sys::c(path)?;
        if sys::file_kind(&path)?.is_some() {
            mounts::bind(&path, libc::MS_REC)?;
            mounts::make_read_only(&path)?;
        }
    }
    let mut empty: Option<CString> = None; // one empty file system covers every directory: a bind costs less than a mount
    for path in &config.masked {
        let path = sys::c(path)?;
        match (sys::file_kind(&path)?, &empty) {
            (None, _) => {}
            (Some(libc::S_IFDIR), Some(first)) => mounts::bind_from(first, &path)?,
            (Some(libc::S_IFDIR), None) => {
                mounts::mount_plain(c"tmpfs", &path, c"tmpfs", libc::MS_RDONLY, c"")?;
                empty = Some(path);
            }
            (Some(_), _) => mounts::bind_from(c"/dev/null", &path)?,
        }
    }
    Ok(())
}

/// The directory to start in. It must be one of the sandbox's: a path that leads to the old root reads "(unreachable)".
pub fn enter_directory(path: &str) -> Result<()> {
    mounts::chdir(&sys::c(path)?)?;
    let mut name = [0u8; libc::PATH_MAX as usize];
    // SAFETY: the buffer is as long as said.
    let length = sys::check(unsafe { libc::syscall(libc::SYS_getcwd, name.as_mut_ptr(), name.len()) }, STEP, "getcwd")?;
    if length < 2 || name[0] != b'/' {
        return Err(Failure::new(STEP, format!("{path} is not inside the sandbox")));
    }
    Ok(())
}
