//! User and network namespace of the sandbox, made together by a process that already has the sandbox's base id.
//!
//! Together, so that the user namespace owns the network one (sysfs can be mounted, low ports bound). By the base id, so that
//! the kernel's per-user counts (inotify instances, pending signals, keys) are charged to the sandbox and not to the daemon.

use crate::failure::{Failure, Result};
use crate::sys;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};

pub struct Spaces {
    pub user: OwnedFd,
    pub net: OwnedFd,
}

/// The sandbox's two namespaces, `count` ids from `base` on mapped to 0 and up.
pub fn make(base: u32, count: u32) -> Result<Spaces> {
    let (uids, gids) = (map("uid_map", base, count)?, map("gid_map", base, count)?);
    let mut made = held(move || unshare_as(base), &uids, &gids, &["user", "net"])?.into_iter();
    match (made.next(), made.next()) {
        (Some(user), Some(net)) => Ok(Spaces { user, net }),
        _ => Err(Failure::new("namespaces", "not both were made".into())),
    }
}

/// The lines of an id map. Each has to lie within one line of our own, of which an ordinary user's daemon has several.
fn map(kind: &str, base: u32, count: u32) -> Result<String> {
    let bad = |why: String| Failure::new("namespaces", format!("{kind}: {why}"));
    let ours = std::fs::read_to_string(format!("/proc/self/{kind}")).map_err(|e| bad(e.to_string()))?;
    let (first, end) = (u64::from(base), u64::from(base) + u64::from(count));
    let mut lines = String::new();
    for line in ours.lines() {
        let fields: Vec<u64> = line.split_whitespace().filter_map(|f| f.parse().ok()).collect();
        let [inside, _, size] = fields[..] else { return Err(bad(format!("cannot read {line:?}"))) };
        let (from, to) = (first.max(inside), end.min(inside + size));
        if from < to {
            lines += &format!("{} {from} {}\n", from - first, to - from);
        }
    }
    if lines.is_empty() {
        return Err(bad(format!("none of {base}..{end} are ours")));
    }
    Ok(lines)
}

/// A user namespace that only says how ids translate: the host's `uid` and `gid` become the sandbox's root.
pub fn translation(uid: u32, gid: u32, base: u32) -> Result<OwnedFd> {
    let unshare = || {
        // SAFETY: no pointers.
        sys::check(unsafe { libc::unshare(libc::CLONE_NEWUSER) }.into(), "namespaces", "unshare(user)").map(|_| ())
    };
    let made = held(unshare, &format!("{uid} {base} 1\n"), &format!("{gid} {base} 1\n"), &["user"])?;
    made.into_iter().next().ok_or_else(|| Failure::new("namespaces", "none was made".into()))
}

/// A user namespace that says how the ids of one sandbox become those of another; root stays root.
pub fn range(from: u32, to: u32, count: u32) -> Result<OwnedFd> {
    let unshare = || {
        // SAFETY: no pointers.
        sys::check(unsafe { libc::unshare(libc::CLONE_NEWUSER) }.into(), "namespaces", "unshare(user)").map(|_| ())
    };
    let map = format!("0 0 1\n{from} {to} {count}\n");
    let made = held(unshare, &map, &map, &["user"])?;
    made.into_iter().next().ok_or_else(|| Failure::new("namespaces", "none was made".into()))
}

/// Become root of the sandbox's own namespaces, and thereby nobody outside of them.
pub fn enter(spaces: &Spaces) -> Result<()> {
    join(spaces)?;
    let others = libc::CLONE_NEWCGROUP | libc::CLONE_NEWIPC | libc::CLONE_NEWUTS;
    // SAFETY: no pointers.
    sys::check(unsafe { libc::unshare(others) }.into(), "namespaces", "unshare(cgroup, ipc, uts)").map(|_| ())
}

/// The user and the network namespace, as root of the one.
pub fn join(spaces: &Spaces) -> Result<()> {
    let step = "namespaces";
    // SAFETY: plain calls on this single-threaded process.
    unsafe {
        for (space, kind) in [(&spaces.net, libc::CLONE_NEWNET), (&spaces.user, libc::CLONE_NEWUSER)] {
            sys::check(libc::setns(space.as_raw_fd(), kind).into(), step, "setns")?;
        }
        drop_groups()?;
        sys::check(libc::setresgid(0, 0, 0).into(), step, "setresgid")?;
        sys::check(libc::setresuid(0, 0, 0).into(), step, "setresuid").map(|_| ())
    }
}

/// Fork a holder which makes namespaces; once they are mapped and we have them by descriptor it is no longer needed.
fn held(unshare: impl FnOnce() -> Result<()>, uids: &str, gids: &str, wanted: &[&str]) -> Result<Vec<OwnedFd>> {
    let (mut told, tell) = sys::pipe("namespaces")?;
    let (wait, go) = sys::pipe("namespaces")?;
    // SAFETY: this process has one thread, so the child may do as it likes.
    let holder = sys::check(unsafe { libc::fork() }.into(), "namespaces", "fork")?;
    if holder == 0 {
        drop((told, go));
        hold(unshare, tell, wait);
    }
    drop((tell, wait));
    let made = pin(holder, uids, gids, wanted, &mut told);
    drop(go);
    // SAFETY: our own child; EOF on its pipe ends it.
    unsafe { libc::waitpid(holder, std::ptr::null_mut(), 0) };
    made
}

fn pin(holder: i32, uids: &str, gids: &str, wanted: &[&str], told: &mut std::fs::File) -> Result<Vec<OwnedFd>> {
    let mut said = String::new();
    let mut byte = [0u8; 1];
    while told.read(&mut byte).map_err(|e| Failure::new("namespaces", e.to_string()))? == 1 {
        if byte[0] == b'\n' {
            break;
        }
        said.push(byte[0] as char);
    }
    if said != "made" {
        return Err(Failure::new("namespaces", if said.is_empty() { "the holder died".into() } else { said }));
    }
    for (kind, map) in [("uid_map", uids), ("gid_map", gids)] {
        let path = format!("/proc/{holder}/{kind}");
        std::fs::write(&path, map).map_err(|e| Failure::new("namespaces", format!("{path}: {e}")))?;
    }
    let open = |name: &&str| {
        let path = sys::c(&format!("/proc/{holder}/ns/{name}"))?;
        sys::open_path(libc::AT_FDCWD, &path, libc::O_RDONLY, "namespaces")
    };
    wanted.iter().map(open).collect()
}

/// The holder: never returns.
fn hold(unshare: impl FnOnce() -> Result<()>, mut tell: std::fs::File, mut wait: std::fs::File) -> ! {
    let said = match unshare() {
        Ok(()) => "made\n".to_string(),
        Err(failure) => format!("{failure:?}\n"),
    };
    let _ = tell.write_all(said.as_bytes());
    let _ = wait.read(&mut [0u8; 1]);
    std::process::exit(0)
}

fn unshare_as(base: u32) -> Result<()> {
    let step = "namespaces";
    // SAFETY: plain calls on this single-threaded process.
    unsafe {
        if libc::geteuid() == 0 {
            // Some hosts let only CAP_SYS_ADMIN make user namespaces: keep that one capability across the change of id.
            drop_groups()?;
            sys::check(libc::setresgid(base, base, base).into(), step, "setresgid")?;
            sys::check(libc::prctl(libc::PR_SET_KEEPCAPS, 1, 0, 0, 0).into(), step, "PR_SET_KEEPCAPS")?;
            sys::check(libc::setresuid(base, base, base).into(), step, "setresuid")?;
            keep_only_sys_admin()?;
        }
        sys::check(libc::unshare(libc::CLONE_NEWUSER | libc::CLONE_NEWNET).into(), step, "unshare(user, net)")?;
    }
    loopback_up()
}

/// Where a user namespace with a single id forbids it there is nothing to drop that its owner did not have anyway.
fn drop_groups() -> Result<()> {
    // SAFETY: an empty list.
    if unsafe { libc::setgroups(0, std::ptr::null()) } == 0 {
        return Ok(());
    }
    let failure = Failure::last("namespaces", "setgroups");
    let forbidden = std::fs::read_to_string("/proc/self/setgroups").is_ok_and(|said| said.trim() == "deny");
    if forbidden {
        return Ok(());
    }
    Err(failure)
}

fn keep_only_sys_admin() -> Result<()> {
    const SYS_ADMIN: u32 = 1 << 21;
    const VERSION_3: u32 = 0x2008_0522;
    let head: [u32; 2] = [VERSION_3, 0];
    let data: [u32; 6] = [SYS_ADMIN, SYS_ADMIN, 0, 0, 0, 0];
    // SAFETY: the layout is the kernel's for version 3: header, then two triples of 32 bits.
    let done = unsafe { libc::syscall(libc::SYS_capset, head.as_ptr(), data.as_ptr()) };
    sys::check(done, "namespaces", "capset").map(|_| ())
}

fn loopback_up() -> Result<()> {
    // SAFETY: ifreq is plain data; the name fits and ends in NUL.
    unsafe {
        let socket = libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0);
        let socket = sys::owned(socket.into(), "namespaces", "socket")?;
        let mut request: libc::ifreq = std::mem::zeroed();
        request.ifr_name[0] = b'l' as _;
        request.ifr_name[1] = b'o' as _;
        request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as _;
        let done = libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS as _, &request);
        sys::check(done.into(), "namespaces", "loopback up").map(|_| ())
    }
}
