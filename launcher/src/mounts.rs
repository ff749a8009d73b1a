//! Mounts by descriptor: a path is looked up once and then never again, so nothing can be swapped underneath.

use crate::failure::{Failure, Result};
use crate::sys;
use std::ffi::CStr;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

const OPEN_TREE_CLONE: libc::c_uint = 1;
const MOVE_MOUNT_F_EMPTY_PATH: libc::c_uint = 0x4;
const MOVE_MOUNT_T_EMPTY_PATH: libc::c_uint = 0x40;
const ATTR_RDONLY: u64 = 0x1;
const ATTR_NOSUID: u64 = 0x2;
const ATTR_NODEV: u64 = 0x4;
const ATTR_NOEXEC: u64 = 0x8;
const ATTR_IDMAP: u64 = 0x0010_0000;

#[repr(C)]
struct MountAttr {
    set: u64,
    clear: u64,
    propagation: u64,
    user_ns: u64,
}

/// A detached copy of the mount at `path` (or at `at` itself when empty), without what is mounted below it.
pub fn clone_tree(at: RawFd, path: &CStr) -> Result<OwnedFd> {
    open_tree(at, path, 0)
}

/// The same, with what is mounted below it.
pub fn clone_trees(path: &CStr) -> Result<OwnedFd> {
    const AT_RECURSIVE: libc::c_uint = 0x8000;
    open_tree(libc::AT_FDCWD, path, AT_RECURSIVE)
}

fn open_tree(at: RawFd, path: &CStr, also: libc::c_uint) -> Result<OwnedFd> {
    let mut flags =
        OPEN_TREE_CLONE | libc::O_CLOEXEC as libc::c_uint | libc::AT_SYMLINK_NOFOLLOW as libc::c_uint | also;
    if path.is_empty() {
        flags |= libc::AT_EMPTY_PATH as libc::c_uint;
    }
    // SAFETY: path is NUL-terminated.
    let fd = unsafe { libc::syscall(libc::SYS_open_tree, at, path.as_ptr(), flags) };
    sys::owned(fd, "mount", format!("open_tree {}", path.to_string_lossy()))
}

/// Close a detached mount down: never devices or setuid, read-only if asked, ids shifted into the sandbox's range if given.
pub fn restrict(tree: &OwnedFd, read_only: bool, user_ns: Option<&OwnedFd>) -> Result<()> {
    let mut attr = MountAttr { set: ATTR_NOSUID | ATTR_NODEV, clear: 0, propagation: 0, user_ns: 0 };
    if read_only {
        attr.set |= ATTR_RDONLY;
    }
    if let Some(user_ns) = user_ns {
        attr.set |= ATTR_IDMAP;
        attr.user_ns = user_ns.as_raw_fd() as u64;
    }
    set_attributes(tree, &attr, if user_ns.is_some() { "idmap" } else { "mount" })
}

/// Close a detached mount down for good: it can be read and nothing else.
pub fn close_down(tree: &OwnedFd) -> Result<()> {
    let set = ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV | ATTR_NOEXEC;
    set_attributes(tree, &MountAttr { set, clear: 0, propagation: 0, user_ns: 0 }, "mount")
}

fn set_attributes(tree: &OwnedFd, attr: &MountAttr, step: &'static str) -> Result<()> {
    // SAFETY: attr is the kernel's struct mount_attr, its size given.
    let done = unsafe {
        let size = std::mem::size_of::<MountAttr>();
        libc::syscall(libc::SYS_mount_setattr, tree.as_raw_fd(), c"".as_ptr(), libc::AT_EMPTY_PATH, attr, size)
    };
    sys::check(done, step, "mount_setattr").map(|_| ())
}

pub fn attach(tree: &OwnedFd, on: RawFd) -> Result<()> {
    let flags = MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH;
    // SAFETY: two descriptors and two empty strings.
    let done = unsafe { libc::syscall(libc::SYS_move_mount, tree.as_raw_fd(), c"".as_ptr(), on, c"".as_ptr(), flags) };
    sys::check(done, "mount", "move_mount").map(|_| ())
}

/// A mount namespace of our own from which nothing flows back to the host's. What the host unmounts goes away here too:
/// otherwise this copy would keep a disk of the host's in use for as long as the sandbox lives.
pub fn own_namespace() -> Result<()> {
    // SAFETY: no pointers.
    sys::check(unsafe { libc::unshare(libc::CLONE_NEWNS) }.into(), "mount", "unshare(mount)")?;
    change(c"none", c"/", libc::MS_REC | libc::MS_SLAVE, "make slave")
}

/// Nothing that the host mounts from now on shows up in this tree.
pub fn seal(path: &CStr) -> Result<()> {
    change(c"none", path, libc::MS_REC | libc::MS_PRIVATE, "make private")
}

/// Nothing that is mounted here or elsewhere shows up at the other.
pub fn make_private() -> Result<()> {
    change(c"none", c"/", libc::MS_REC | libc::MS_PRIVATE, "make private")
}

/// A mount of a path on itself.
pub fn bind(path: &CStr, also: libc::c_ulong) -> Result<()> {
    change(path, path, libc::MS_BIND | also, "bind")
}

pub fn bind_from(source: &CStr, target: &CStr) -> Result<()> {
    change(source, target, libc::MS_BIND, "bind")
}

/// A mount that is there, with the flags it has, and read-only.
pub fn make_read_only(path: &CStr) -> Result<()> {
    const KEPT: libc::c_ulong = libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC;
    // SAFETY: path is NUL-terminated; statfs is plain data.
    let has = unsafe {
        let mut found: libc::statvfs = std::mem::zeroed();
        sys::check(libc::statvfs(path.as_ptr(), &mut found).into(), "mount", path.to_string_lossy())?;
        found.f_flag // the numbers of these three are those of mount(2)
    };
    change(path, path, libc::MS_BIND | libc::MS_REMOUNT | libc::MS_RDONLY | has & KEPT, "read-only")
}

/// mount(2) of what is mounted already.
fn change(source: &CStr, target: &CStr, flags: libc::c_ulong, about: &str) -> Result<()> {
    // SAFETY: both are NUL-terminated.
    let done = unsafe { libc::mount(source.as_ptr(), target.as_ptr(), std::ptr::null(), flags, std::ptr::null()) };
    sys::check(done.into(), "mount", format!("{about} {}", target.to_string_lossy())).map(|_| ())
}

pub fn mount(source: &CStr, target: &CStr, kind: &CStr, flags: libc::c_ulong, options: &CStr) -> Result<()> {
    mount_plain(source, target, kind, flags | libc::MS_NOSUID | libc::MS_NODEV, options)
}

/// With these flags and no other.
pub fn mount_plain(source: &CStr, target: &CStr, kind: &CStr, flags: libc::c_ulong, options: &CStr) -> Result<()> {
    // SAFETY: all strings are NUL-terminated.
    let done = unsafe { libc::mount(source.as_ptr(), target.as_ptr(), kind.as_ptr(), flags, options.as_ptr().cast()) };
    let about = format!("mount {} on {}", kind.to_string_lossy(), target.to_string_lossy());
    sys::check(done.into(), "mount", about).map(|_| ())
}

pub fn chdir(path: &CStr) -> Result<()> {
    // SAFETY: path is NUL-terminated.
    sys::check(unsafe { libc::chdir(path.as_ptr()) }.into(), "mount", path.to_string_lossy()).map(|_| ())
}

/// Look up a name beneath `root`; a symbolic link anywhere on the way is an error.
pub fn open_inside(root: RawFd, path: &CStr) -> Result<OwnedFd> {
    const RESOLVE_BENEATH: u64 = 0x08;
    resolve(root, path, RESOLVE_BENEATH, "mountpoint")
}

/// Look up an absolute path that has to be free of symbolic links: what was checked is what is opened.
pub fn open_plain(at: RawFd, path: &CStr, step: &'static str) -> Result<OwnedFd> {
    resolve(at, path, 0, step)
}

fn resolve(at: RawFd, path: &CStr, extra: u64, step: &'static str) -> Result<OwnedFd> {
    const RESOLVE_NO_MAGICLINKS: u64 = 0x02;
    const RESOLVE_NO_SYMLINKS: u64 = 0x04;
    #[repr(C)]
    struct OpenHow {
        flags: u64,
        mode: u64,
        resolve: u64,
    }
    let how = OpenHow {
        flags: (libc::O_PATH | libc::O_CLOEXEC) as u64,
        mode: 0,
        resolve: extra | RESOLVE_NO_MAGICLINKS | RESOLVE_NO_SYMLINKS,
    };
    for _ in 0..128 {
        // SAFETY: how is the kernel's struct open_how, its size given.
        let fd = unsafe { libc::syscall(libc::SYS_openat2, at, path.as_ptr(), &how, std::mem::size_of::<OpenHow>()) };
        if fd >= 0 {
            return sys::owned(fd, step, "openat2");
        }
        let failure = Failure::last(step, path.to_string_lossy());
        if failure.errno() != Some(libc::EAGAIN) {
            return Err(failure); // EAGAIN: a rename raced with the lookup, look again
        }
    }
    Err(Failure::new(step, format!("{} does not hold still", path.to_string_lossy())))
}
