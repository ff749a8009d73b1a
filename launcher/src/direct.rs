//! An engine of our own: starts the agent from the same OCI configuration that runc gets, and knows nothing that is not in it.
//!
//! The steps, in this order, each with its place; whatever the configuration says beyond them is refused (`oci.rs`), never passed over:
//!  1. control groups, before anything of the sandbox runs: the launcher enters those of v1, the child is born into v2's (`groups.rs`)
//!  2. which devices may be opened: the devices group, or a program on the v2 group (`devices.rs`)
//!  3. user and network namespace made ahead are joined, supplementary groups dropped, uid and gid 0 there (`namespaces::join`)
//!  4. new pid, mount, ipc, uts and cgroup namespaces, which therefore belong to the sandbox's user namespace (`give_birth`)
//!  5. a session of its own; every mount private; the root bound on itself, pivot_root (`tree::pivot`)
//!  6. /proc, /dev, /dev/pts, /dev/shm, /dev/mqueue, /sys with the flags given; six device nodes of the host, checked, by bind;
//!     links; over files of /proc and /sys the sandbox's own view of its limits (`view.rs`), read-only since before the namespaces
//!     were made; then the old root is detached (`tree.rs`). Only after that are paths made read-only and masked
//!  7. host name; working directory looked at again, it must be inside (CVE-2024-21626)
//!  8. descriptors: boot message, log twice, the agent's socket; every other one closed (`hand_over`)
//!  9. signals as a fresh process has them, umask 022, a session keyring of its own, no_new_privs, bounding, ambient, inheritable,
//!     permitted and effective capabilities, the filter of system calls (`rights.rs`)
//! 10. exec of the agent, which the launcher has bound into the root read-only. No program of ours ever enters a sandbox that runs
//!     something already, so there is no /proc/N/exe of ours to be found there (CVE-2019-5736).

use crate::failure::{Failure, Result};
use crate::namespaces::{self, Spaces};
use crate::oci::Oci;
use crate::{devices, groups, mounts, order, rights, sys, tree};
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};

const STEP: &str = "direct";

/// All that a child needs.
pub struct Birth<'a> {
    pub config: &'a Oci,
    pub filter: &'a [libc::sock_filter],
    pub spaces: Spaces,
    pub fds: &'a [OwnedFd],
}

/// Start the sandbox and say who its first process is in `file`. Returns once the agent has been executed.
pub fn start(order: &order::Start, birth: &Birth, file: &OwnedFd) -> Result<()> {
    groups::check(&order.groups, &birth.config.cgroup)?;
    let unified = groups::enter(&order.groups)?;
    devices::restrict(&order.groups, unified.as_ref())?;
    let ((mut pid, pid_to), (mut told, tell)) = (sys::pipe(STEP)?, sys::pipe(STEP)?);
    let tell = File::from(sys::lift(tell.into())?);
    let into = unified.as_ref().map(AsRawFd::as_raw_fd);
    let first = sys::clone(if into.is_some() { sys::CLONE_INTO_CGROUP } else { 0 }, libc::SIGCHLD, into)?;
    if first == 0 {
        drop((pid, told));
        give_birth(birth, pid_to, tell);
    }
    drop((pid_to, tell));
    let (mut number, mut complaint) = ([0u8; 4], String::new());
    let known = pid.read_exact(&mut number);
    let heard = told.read_to_string(&mut complaint); // ends when the agent is executed, or nobody is left to say anything
    sys::wait(first);
    let pid = i32::from_ne_bytes(number);
    if known.is_err() || heard.is_err() || !complaint.is_empty() || sys::has_ended(pid) {
        let why = if complaint.is_empty() { "the sandbox died at birth".into() } else { complaint };
        return Err(Failure::new(STEP, why));
    }
    sys::write_all(file, pid.to_string().as_bytes(), STEP)
}

/// In a child that is in the control groups: become root of the sandbox, have its first process, say who that is, and end.
fn give_birth(birth: &Birth, mut pid_to: File, tell: File) -> ! {
    const SPACES: i32 =
        libc::CLONE_NEWPID | libc::CLONE_NEWNS | libc::CLONE_NEWIPC | libc::CLONE_NEWUTS | libc::CLONE_NEWCGROUP;
    let born = namespaces::join(&birth.spaces).and_then(|()| sys::clone((SPACES | libc::CLONE_PARENT) as u64, 0, None));
    let failure = match born {
        Ok(0) => match live(birth, &tell) {
            Err(failure) => failure,
            Ok(never) => match never {},
        },
        Ok(pid) => {
            let said = pid_to.write_all(&pid.to_ne_bytes());
            std::process::exit(i32::from(said.is_err()))
        }
        Err(failure) => failure,
    };
    complain(&failure, tell)
}

fn complain(failure: &Failure, mut tell: File) -> ! {
    let _ = tell.write_all(failure.to_string().as_bytes());
    std::process::exit(1)
}

enum Never {}

/// The first process of the sandbox, until it is the agent.
fn live(birth: &Birth, tell: &File) -> Result<Never> {
    let config = birth.config;
    sys::own_session()?;
    mounts::make_private()?;
    tree::make(config)?;
    sys::set_host_name(&config.hostname)?;
    tree::cover(config)?;
    let (argv, env) = (sys::strings(&config.args)?, sys::strings(&config.env)?);
    tree::enter_directory(&config.cwd)?;
    hand_over(birth.fds, tell.as_raw_fd())?;
    rights::fresh_signals()?;
    rights::own_keyring()?;
    rights::give_up(config.capabilities)?;
    rights::install(birth.filter)?;
    let error = sys::exec(&argv, &env);
    Err(Failure::new(STEP, format!("cannot run {}: {error}", config.args.first().map_or("", String::as_str))))
}

/// 0 to 3 as the agent expects them. The way back to the launcher closes itself on exec, everything else is closed here.
fn hand_over(fds: &[OwnedFd], kept: i32) -> Result<()> {
    let [boot, log, handed, ..] = fds else {
        return Err(Failure::new("order", "descriptors for the agent are missing".into()));
    };
    for (fd, at) in [(boot, 0), (log, 1), (log, 2), (handed, crate::HANDED)] {
        sys::place(fd.as_raw_fd(), at)?;
    }
    sys::close_between(crate::HANDED + 1, kept - 1)?;
    sys::close_from(kept + 1)
}
