//! The first process of a pid namespace around an engine that leaves several processes behind: when it ends, all of them do,
//! also where there is no control group to find them by. It has no rights, holds no descriptor, and only waits. An engine that stays
//! is waited for itself.

use crate::failure::{Failure, Result};
use crate::{machine, sys};
use std::io::{Read, Write};
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

const STEP: &str = "keeper";
/// Where the engine says which process is to be waited for, below the stage.
const PID_FILE: &str = "state/pid";

/// Start the engine under a keeper and wait until it has done its work: its exit status. If that is a good one the keeper is
/// announced in `file`, and lives on only then.
pub fn start(engine: impl FnOnce() -> Result<()>, stays: bool, file: &OwnedFd) -> Result<i32> {
    let (mut ours, theirs) = UnixStream::pair().map_err(|e| Failure::new(STEP, e.to_string()))?;
    // SAFETY: this process has one thread, so a child may do as it likes.
    let keeper = unsafe {
        sys::check(libc::unshare(libc::CLONE_NEWPID).into(), STEP, "unshare(pid)")?;
        sys::check(libc::fork().into(), STEP, "fork")?
    };
    if keeper == 0 {
        drop(ours);
        std::process::exit(keep(engine, stays, theirs));
    }
    drop(theirs);
    let mut report = [0u8; 4];
    if ours.read_exact(&mut report).is_err() {
        return Ok(1); // it ended without a word, and everything with it
    }
    let status = i32::from_ne_bytes(report);
    if status == 0 {
        announce(keeper, file)?;
        let _ = ours.write_all(&[1]);
        let _ = ours.read(&mut report); // closed by the keeper once it no longer dies with us
    }
    Ok(status)
}

fn keep(engine: impl FnOnce() -> Result<()>, stays: bool, launcher: UnixStream) -> i32 {
    if sys::die_with_parent().is_err() {
        return 1;
    }
    // SAFETY: static strings. Best effort: where it is refused, the engine sees the numbers of the namespace above.
    unsafe { libc::mount(c"proc".as_ptr(), c"/proc".as_ptr(), c"proc".as_ptr(), 0, std::ptr::null()) };
    // SAFETY: one thread.
    let started = unsafe { libc::fork() };
    if started == 0 {
        if let Err(failure) = engine() {
            eprintln!("{}", failure.to_json());
        }
        return 127;
    }
    let Ok(mut launcher) = only(launcher) else { return 1 };
    let (status, kept) = match (started, stays) {
        (..0, _) => (1, None),
        (_, true) => (0, Some(started)),
        (_, false) => (wait_for(started), None),
    };
    machine::widen();
    let named = || std::fs::read_to_string(PID_FILE).ok().and_then(|text| text.trim().parse().ok());
    let kept = kept.or_else(named);
    let known = launcher.write_all(&status.to_ne_bytes()).and_then(|()| launcher.read_exact(&mut [0u8; 1]));
    let (Ok(()), Some(kept)) = (known, kept) else { return 1 };
    // From here on the sandbox lives without the launcher.
    // SAFETY: no pointers.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, 0, 0, 0, 0) };
    give_up_rights();
    drop(launcher);
    wait_for(kept)
}

/// Hold nothing but this, as descriptor 0.
fn only(stream: UnixStream) -> Result<UnixStream> {
    sys::place(stream.into_raw_fd(), 0)?;
    sys::close_from(1)?;
    // SAFETY: just put there, and owned by nobody else.
    Ok(unsafe { UnixStream::from_raw_fd(0) })
}

/// Collect children until that one has ended: its exit code, or 128 and the signal.
fn wait_for(pid: i32) -> i32 {
    loop {
        let mut status = 0;
        // SAFETY: status is ours.
        let ended = unsafe { libc::waitpid(-1, &mut status, 0) };
        if ended < 0 && std::io::Error::last_os_error().raw_os_error() != Some(libc::EINTR) {
            return 1;
        }
        if ended == pid {
            return sys::code(status);
        }
    }
}

fn give_up_rights() {
    const VERSION_3: u32 = 0x2008_0522;
    let (head, none): ([u32; 2], [u32; 6]) = ([VERSION_3, 0], [0; 6]);
    // SAFETY: the layout is the kernel's for version 3.
    unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0);
        libc::syscall(libc::SYS_capset, head.as_ptr(), none.as_ptr());
    }
}

/// Say out here who the keeper is.
fn announce(keeper: i32, file: &OwnedFd) -> Result<()> {
    sys::write_all(file, keeper.to_string().as_bytes(), STEP)
}
