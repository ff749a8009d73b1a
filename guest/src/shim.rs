//! The shim: a forked subreaper above every process the agent starts. It waits for the process and for every orphan the
//! process leaves, so that the whole tree stays below one pid. One spare shim is kept ready, which makes starting a
//! process a message, a fork and an exec.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use crate::sys;

/// What to start. Everything is resolved: the shim looks nothing up.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Spec {
    /// Paths to try in order, as execvp would.
    pub programs: Vec<CString>,
    pub argv: Vec<CString>,
    pub env: Vec<CString>,
    /// uid, gid and supplementary groups to take on.
    pub user: Option<(u32, u32, Vec<u32>)>,
    pub umask: u32,
    pub rlimits: Vec<(u32, u64, u64)>,
    pub pty: bool,
}

/// stdin, stdout, stderr and working directory of the process, in this order.
pub type SpecFds = [OwnedFd; 4];

/// A shim and the socket it is spoken to.
pub struct Shim {
    pub pid: i32,
    pub control: OwnedFd,
}

/// What a shim reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Report {
    Started { pid: i32 },
    Failed { stage: Stage, errno: i32 },
    Exited { status: i32, user_us: u64, sys_us: u64, max_rss_kb: u64 },
}

/// Which step before the exec went wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u64)]
pub enum Stage {
    Fork = 1,
    Stdio = 2,
    Terminal = 3,
    Limits = 4,
    User = 5,
    Directory = 6,
    Exec = 7,
}

impl Stage {
    fn from_number(number: u64) -> Self {
        match number {
            2 => Self::Stdio,
            3 => Self::Terminal,
            4 => Self::Limits,
            5 => Self::User,
            6 => Self::Directory,
            7 => Self::Exec,
            _ => Self::Fork,
        }
    }
}

pub const REPORT_BYTES: usize = 40;
/// A longer spec does not fit into a socket buffer and goes through a fresh fork instead.
const SPARE_LIMIT: usize = 64 * 1024;
const STACK: usize = 64 * 1024;

/// Forks a shim that waits for its spec.
pub fn spare() -> io::Result<Shim> {
    fork_shim(|control| match receive_spec(control) {
        Some((spec, fds)) => run(control, &spec, fds),
        None => exit_now(),
    })
}

/// Gives the spec to the spare, or to a shim of its own when there is none or the spec is large.
pub fn launch(spare: Option<Shim>, spec: &Spec, fds: SpecFds) -> io::Result<Shim> {
    let bytes = encode(spec);
    let Some(shim) = spare.filter(|_| bytes.len() <= SPARE_LIMIT) else { return launch_fresh(spec, fds) };
    match send_spec(shim.control.as_raw_fd(), &bytes, &fds) {
        Ok(()) => Ok(shim),
        Err(_) => {
            // Killed or stopped from inside the sandbox: it is ours to reap, and of no more use.
            let _ = sys::kill(shim.pid, libc::SIGKILL);
            launch_fresh(spec, fds)
        }
    }
}

fn launch_fresh(spec: &Spec, fds: SpecFds) -> io::Result<Shim> {
    let raw: Vec<RawFd> = fds.iter().map(AsRawFd::as_raw_fd).collect();
    let shim = fork_shim_keeping(&raw, |control| {
        // SAFETY: the parent's descriptors were copied by the fork and belong to this process alone.
        let owned: Vec<OwnedFd> = raw.iter().map(|fd| unsafe { std::os::fd::FromRawFd::from_raw_fd(*fd) }).collect();
        match SpecFds::try_from(owned) {
            Ok(owned) => run(control, spec, owned),
            Err(_) => exit_now(),
        }
    });
    drop(fds);
    shim
}

/// Decodes one report.
pub fn decode_report(raw: &[u8; REPORT_BYTES]) -> Option<Report> {
    let mut words = raw.chunks_exact(8).map(|c| c.try_into().map(u64::from_ne_bytes).unwrap_or(0));
    let mut next = || words.next().unwrap_or(0);
    Some(match next() {
        1 => Report::Started { pid: next() as i32 },
        2 => Report::Failed { stage: Stage::from_number(next()), errno: next() as i32 },
        3 => Report::Exited { status: next() as i32, user_us: next(), sys_us: next(), max_rss_kb: next() },
        _ => return None,
    })
}

fn fork_shim(body: impl FnOnce(RawFd)) -> io::Result<Shim> {
    fork_shim_keeping(&[], body)
}

fn fork_shim_keeping(keep: &[RawFd], body: impl FnOnce(RawFd)) -> io::Result<Shim> {
    let (ours, theirs) = sys::socketpair()?;
    sys::set_nonblocking(ours.as_raw_fd())?;
    let pid = sys::check(unsafe { libc::fork() })?;
    if pid > 0 {
        return Ok(Shim { pid, control: ours });
    }
    let control = theirs.as_raw_fd();
    std::mem::forget((ours, theirs));
    let mut keep = keep.to_vec();
    keep.push(control);
    keep.sort_unstable();
    sys::close_all_but(&keep);
    unsafe {
        libc::prctl(libc::PR_SET_NAME, c"atoll-shim".as_ptr(), 0, 0, 0);
        libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
        // A session of its own: signals to the agent's process group are not for shims.
        libc::setsid();
    }
    let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| body(control)));
    exit_now()
}

fn exit_now() -> ! {
    unsafe { libc::_exit(0) }
}

/// What the child that becomes the process needs, and where it leaves what went wrong.
struct Birth<'a> {
    spec: &'a Spec,
    fds: &'a SpecFds,
    argv: Vec<*const libc::c_char>,
    env: Vec<*const libc::c_char>,
    failure: Option<(Stage, i32)>,
}

/// Runs in the child, on a stack of its own but in the shim's memory; the shim stands still until it execs or exits.
extern "C" fn be_born(birth: *mut libc::c_void) -> libc::c_int {
    // SAFETY: the shim waits, so nobody else touches what is behind the pointer.
    let birth = unsafe { &mut *birth.cast::<Birth>() };
    birth.failure = Some(become_process(birth));
    127
}

/// Starts the process, tells how it ended, and stays until nothing is left below.
fn run(control: RawFd, spec: &Spec, fds: SpecFds) {
    let pointers = |list: &[CString]| list.iter().map(|s| s.as_ptr()).chain([std::ptr::null()]).collect::<Vec<_>>();
    let mut birth = Birth { spec, fds: &fds, argv: pointers(&spec.argv), env: pointers(&spec.env), failure: None };
    let mut stack = vec![0u128; STACK / 16];
    let main = unsafe {
        let top = stack.as_mut_ptr().add(stack.len());
        let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
        libc::clone(be_born, top.cast(), flags, (&raw mut birth).cast())
    };
    let errno = io::Error::last_os_error().raw_os_error().unwrap_or(libc::EAGAIN);
    let failure = birth.failure;
    drop(fds);
    drop(stack);
    // The child may have changed ids, which touches this flag of the memory both had.
    unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0) };
    if main < 0 {
        return report(control, [2, Stage::Fork as u64, errno as u64, 0, 0]);
    }
    if let Some((stage, errno)) = failure {
        unsafe { libc::waitpid(main, std::ptr::null_mut(), 0) };
        return report(control, [2, stage as u64, errno as u64, 0, 0]);
    }
    report(control, [1, main as u64, 0, 0, 0]);
    loop {
        let mut status = 0;
        let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
        let pid = unsafe { libc::wait4(-1, &raw mut status, 0, &raw mut usage) };
        if pid == main {
            let micros = |t: libc::timeval| t.tv_sec as u64 * 1_000_000 + t.tv_usec as u64;
            report(control, [3, status as u64, micros(usage.ru_utime), micros(usage.ru_stime), usage.ru_maxrss as u64]);
        } else if pid < 0 && io::Error::last_os_error().raw_os_error() == Some(libc::ECHILD) {
            return;
        }
    }
}

fn report(control: RawFd, words: [u64; 5]) {
    let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_ne_bytes()).collect();
    let _ = sys::send(control, &bytes);
}

/// Turns the forked child into the process. Comes back only with what went wrong.
fn become_process(birth: &Birth) -> (Stage, i32) {
    let (spec, fds) = (birth.spec, birth.fds);
    let errno = || io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
    unsafe {
        libc::setsid();
        for (target, fd) in fds.iter().take(3).enumerate() {
            if libc::dup2(fd.as_raw_fd(), target as i32) < 0 {
                return (Stage::Stdio, errno());
            }
        }
        if spec.pty && libc::ioctl(0, libc::TIOCSCTTY, 0) < 0 {
            return (Stage::Terminal, errno());
        }
        for (resource, soft, hard) in &spec.rlimits {
            if let Err(e) = sys::set_rlimit(*resource as _, *soft, *hard) {
                return (Stage::Limits, e.raw_os_error().unwrap_or(libc::EPERM));
            }
        }
        libc::umask(spec.umask);
        if let Some((uid, gid, groups)) = &spec.user {
            if let Err(errno) = take_ids(*uid, *gid, groups) {
                return (Stage::User, errno);
            }
        }
        if libc::fchdir(fds.get(3).map_or(-1, AsRawFd::as_raw_fd)) < 0 {
            return (Stage::Directory, errno());
        }
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut());
    }
    (Stage::Exec, exec(birth))
}

/// Takes on the ids and looks whether the kernel really did it.
fn take_ids(uid: u32, gid: u32, groups: &[u32]) -> Result<(), i32> {
    let errno = || io::Error::last_os_error().raw_os_error().unwrap_or(libc::EPERM);
    unsafe {
        let unchanged = libc::geteuid() == uid && libc::getegid() == gid;
        // Bare system calls: the wrappers would want to tell other threads, of which this process has none.
        if libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) < 0 && !unchanged {
            return Err(errno());
        }
        if libc::syscall(libc::SYS_setresgid, gid, gid, gid) < 0
            || libc::syscall(libc::SYS_setresuid, uid, uid, uid) < 0
        {
            return Err(errno());
        }
        let (mut r, mut e, mut s) = (u32::MAX, u32::MAX, u32::MAX);
        libc::getresuid(&raw mut r, &raw mut e, &raw mut s);
        let uids = (r, e, s) == (uid, uid, uid);
        libc::getresgid(&raw mut r, &raw mut e, &raw mut s);
        if !uids || (r, e, s) != (gid, gid, gid) {
            return Err(libc::EPERM);
        }
    }
    Ok(())
}

fn exec(birth: &Birth) -> i32 {
    let mut worst = libc::ENOENT;
    for program in &birth.spec.programs {
        unsafe { libc::execve(program.as_ptr(), birth.argv.as_ptr(), birth.env.as_ptr()) };
        match io::Error::last_os_error().raw_os_error().unwrap_or(libc::ENOENT) {
            libc::ENOENT | libc::ENOTDIR | libc::ELOOP | libc::ENAMETOOLONG => {}
            libc::EACCES => worst = libc::EACCES,
            other => return other,
        }
    }
    worst
}

fn encode(spec: &Spec) -> Vec<u8> {
    let mut out = vec![0; 4];
    let word = |out: &mut Vec<u8>, n: u64| out.extend_from_slice(&n.to_ne_bytes());
    for list in [&spec.programs, &spec.argv, &spec.env] {
        word(&mut out, list.len() as u64);
        for text in list {
            out.extend_from_slice(text.as_bytes_with_nul());
        }
    }
    let (uid, gid, groups) = spec.user.clone().unwrap_or_default();
    word(&mut out, u64::from(spec.user.is_some()));
    word(&mut out, uid.into());
    word(&mut out, gid.into());
    word(&mut out, groups.len() as u64);
    for group in groups {
        word(&mut out, group.into());
    }
    word(&mut out, spec.umask.into());
    word(&mut out, spec.pty.into());
    word(&mut out, spec.rlimits.len() as u64);
    for (resource, soft, hard) in &spec.rlimits {
        word(&mut out, (*resource).into());
        word(&mut out, *soft);
        word(&mut out, *hard);
    }
    let length = (out.len() - 4) as u32;
    if let Some(front) = out.first_chunk_mut::<4>() {
        *front = length.to_ne_bytes();
    }
    out
}

fn decode(raw: &[u8]) -> Option<Spec> {
    let mut rest = raw;
    let word = |rest: &mut &[u8]| {
        let (bytes, tail) = rest.split_first_chunk::<8>()?;
        *rest = tail;
        Some(u64::from_ne_bytes(*bytes))
    };
    let list = |rest: &mut &[u8]| {
        let count = word(rest)?;
        let mut out = Vec::new();
        for _ in 0..count {
            let text = std::ffi::CStr::from_bytes_until_nul(rest).ok()?;
            *rest = rest.get(text.to_bytes_with_nul().len()..)?;
            out.push(text.to_owned());
        }
        Some(out)
    };
    let (programs, argv, env) = (list(&mut rest)?, list(&mut rest)?, list(&mut rest)?);
    let has_user = word(&mut rest)? == 1;
    let (uid, gid) = (word(&mut rest)? as u32, word(&mut rest)? as u32);
    let groups = (0..word(&mut rest)?).map(|_| word(&mut rest).map(|g| g as u32)).collect::<Option<Vec<_>>>()?;
    let (umask, pty) = (word(&mut rest)? as u32, word(&mut rest)? == 1);
    let rlimits = (0..word(&mut rest)?)
        .map(|_| Some((word(&mut rest)? as u32, word(&mut rest)?, word(&mut rest)?)))
        .collect::<Option<Vec<_>>>()?;
    Some(Spec { programs, argv, env, user: has_user.then_some((uid, gid, groups)), umask, rlimits, pty })
}

#[repr(C, align(8))]
struct ControlBuffer([u8; 64]);

fn send_spec(socket: RawFd, bytes: &[u8], fds: &SpecFds) -> io::Result<()> {
    let raw: [RawFd; 4] = [fds[0].as_raw_fd(), fds[1].as_raw_fd(), fds[2].as_raw_fd(), fds[3].as_raw_fd()];
    let mut control = ControlBuffer([0; 64]);
    let mut part = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let size = std::mem::size_of_val(&raw) as u32;
    let sent = unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        message.msg_control = control.0.as_mut_ptr().cast();
        message.msg_controllen = libc::CMSG_SPACE(size) as _;
        let head = libc::CMSG_FIRSTHDR(&raw const message);
        if !head.is_null() {
            (*head).cmsg_level = libc::SOL_SOCKET;
            (*head).cmsg_type = libc::SCM_RIGHTS;
            (*head).cmsg_len = libc::CMSG_LEN(size) as _;
            std::ptr::copy_nonoverlapping(raw.as_ptr(), libc::CMSG_DATA(head).cast(), 4);
        }
        libc::sendmsg(socket, &raw const message, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT)
    };
    match usize::try_from(sent) {
        Ok(n) if n == bytes.len() => Ok(()),
        Ok(_) => Err(io::ErrorKind::WriteZero.into()),
        Err(_) => Err(io::Error::last_os_error()),
    }
}

fn receive_spec(socket: RawFd) -> Option<(Spec, SpecFds)> {
    let mut data = vec![0u8; SPARE_LIMIT + 4];
    let mut fds: Vec<OwnedFd> = Vec::new();
    let mut got = 0;
    loop {
        let length = data.first_chunk::<4>().map_or(0, |b| u32::from_ne_bytes(*b) as usize);
        if got >= 4 && got >= length + 4 {
            let spec = decode(data.get(4..4 + length)?)?;
            return Some((spec, SpecFds::try_from(fds).ok()?));
        }
        let mut control = ControlBuffer([0; 64]);
        let room = data.get_mut(got..)?;
        let mut part = libc::iovec { iov_base: room.as_mut_ptr().cast(), iov_len: room.len() };
        unsafe {
            let mut message: libc::msghdr = std::mem::zeroed();
            message.msg_iov = &raw mut part;
            message.msg_iovlen = 1;
            message.msg_control = control.0.as_mut_ptr().cast();
            message.msg_controllen = 64;
            let count = libc::recvmsg(socket, &raw mut message, libc::MSG_CMSG_CLOEXEC);
            if count < 0 && io::Error::last_os_error().raw_os_error() == Some(libc::EINTR) {
                continue;
            }
            if count <= 0 {
                return None;
            }
            got += count as usize;
            let head = libc::CMSG_FIRSTHDR(&raw const message);
            if !head.is_null() && (*head).cmsg_type == libc::SCM_RIGHTS {
                let bytes = (*head).cmsg_len as usize - libc::CMSG_LEN(0) as usize;
                for i in 0..bytes / 4 {
                    let fd = libc::CMSG_DATA(head).cast::<RawFd>().add(i).read_unaligned();
                    fds.push(std::os::fd::FromRawFd::from_raw_fd(fd));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spec_survives_the_way_to_the_spare() {
        let text = |s: &str| CString::new(s).unwrap();
        let spec = Spec {
            programs: vec![text("/bin/x")],
            argv: vec![text("x"), text(""), text("a b")],
            env: vec![text("A=1")],
            user: Some((1, 2, vec![3, 4])),
            umask: 0o27,
            rlimits: vec![(7, 10, u64::MAX)],
            pty: true,
        };
        assert_eq!(decode(&encode(&spec)[4..]), Some(spec));
    }
}
