//! The place of an engine that is not trusted: the sandbox's tree is all it sees, it has no rights, and leaves no core behind.

use crate::failure::Result;
use crate::{mounts, rights, sys};

const STEP: &str = "jail";

/// The calling process, in the stage and root of the sandbox's namespaces, sees nothing but the tree from here on.
pub fn enter() -> Result<()> {
    rights::fresh_signals()?;
    rights::own_keyring()?;
    sys::die_with_parent()?;
    // SAFETY: no pointers.
    sys::check(unsafe { libc::unshare(libc::CLONE_NEWNS) }.into(), STEP, "unshare(mount)")?;
    mounts::make_private()?;
    mounts::bind(c"root", libc::MS_REC)?; // a mount of ours: one from outside these namespaces may not become the root
    mounts::chdir(c"root")?;
    // SAFETY: static strings. The old root lies on the new one, and is taken off.
    unsafe {
        sys::check(libc::syscall(libc::SYS_pivot_root, c".".as_ptr(), c".".as_ptr()), STEP, "pivot_root")?;
        sys::check(libc::umount2(c".".as_ptr(), libc::MNT_DETACH).into(), STEP, "umount")?;
    }
    mounts::chdir(c"/")?;
    // SAFETY: a number and plain data.
    unsafe {
        let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        sys::check(libc::setrlimit(libc::RLIMIT_CORE, &none).into(), STEP, "RLIMIT_CORE")?;
    }
    rights::give_up(0)
}
