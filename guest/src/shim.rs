//! The shim: a forked subreaper above every process the agent starts. It waits for the process and for every orphan the
//! process leaves, so that the whole tree stays below one pid. One spare shim is kept ready, which makes starting a
//! process a message, a fork and an exec. A shim below which nothing is left can be the next spare.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::spec::{self, Spec, SpecFds};
use crate::{affinity, sys};

/// A shim and the socket it is spoken to.
pub struct Shim {
    pub pid: i32,
    pub control: OwnedFd,
}

/// A report of a shim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Report {
    /// The process exists and is about to exec. It says so itself: once it runs it may kill its shim.
    Born {
        pid: i32,
    },
    Started {
        pid: i32,
    },
    Failed {
        stage: Stage,
        errno: i32,
    },
    /// A warm interpreter waits for its request below this shim.
    Ready {
        pid: i32,
        shim: i32,
    },
    Exited {
        status: i32,
        user_us: u64,
        sys_us: u64,
        max_rss_kb: u64,
    },
    /// The process has ended, nothing is left below, and the shim waits for another spec.
    Idle,
}

/// The step before the exec that went wrong.
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
const STACK: usize = 64 * 1024;
/// The signal that gVisor reports as having killed a child which has only stopped.
const GVISOR_STOPPED: i32 = 0x7f;
/// Whether orphans come to this shim. Where the kernel has no subreapers they live on unseen in the session of the shim,
/// which then cannot serve another command.
static ADOPTS: AtomicBool = AtomicBool::new(false);

/// Forks a shim that waits for its spec.
pub fn spare() -> io::Result<Shim> {
    fork_shim(serve)
}

/// Takes one spec after another, until the agent lets go of it or something is not as it should be.
fn serve(control: RawFd) {
    while let Some((spec, fds)) = spec::receive(control) {
        if !run(control, &spec, fds) {
            return;
        }
    }
}

/// Gives the spec to the spare, or to a shim of its own when there is none or the spec is large.
pub fn launch(spare: Option<Shim>, spec: &Spec, fds: SpecFds) -> io::Result<Shim> {
    let bytes = spec::encode(spec);
    let Some(shim) = spare.filter(|_| bytes.len() <= spec::LONGEST) else { return launch_fresh(spec, fds) };
    let raw: Vec<RawFd> = fds.iter().map(AsRawFd::as_raw_fd).collect();
    match spec::send(shim.control.as_raw_fd(), &bytes, &raw) {
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
            Ok(owned) => {
                if run(control, spec, owned) {
                    serve(control);
                }
            }
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
        4 => Report::Born { pid: next() as i32 },
        5 => Report::Ready { pid: next() as i32, shim: next() as i32 },
        6 => Report::Idle,
        3 => Report::Exited { status: next() as i32, user_us: next(), sys_us: next(), max_rss_kb: next() },
        _ => return None,
    })
}

/// Starts a program as a child of the agent itself, without a shim: its pid.
pub fn bare(spec: &Spec, fds: &SpecFds) -> io::Result<i32> {
    let birth = Birth::new(spec, fds, -1);
    let mut kept: Vec<RawFd> = fds.iter().map(AsRawFd::as_raw_fd).collect();
    kept.sort_unstable();
    let pid = sys::check(unsafe { libc::fork() })?;
    if pid == 0 {
        // Numbers below three would be overwritten while they are still needed; the agent keeps those for itself.
        sys::close_all_but(&kept);
        affinity::narrow();
        become_process(&birth);
        exit_now();
    }
    Ok(pid)
}

/// The life of a shim that was a warm interpreter a moment ago, whose child waits for a request. It has its session already.
pub fn adopt(control: RawFd, main: i32) {
    unsafe {
        libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0);
        libc::prctl(libc::PR_SET_NAME, c"atoll-shim".as_ptr(), 0, 0, 0);
        libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
        let mut all: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const all, std::ptr::null_mut());
    }
    sys::default_signals();
    sys::close_all_but(&[control]);
    if let Ok(null) = sys::open(c"/dev/null", libc::O_RDWR) {
        for fd in 0..3 {
            unsafe { libc::dup2(null.as_raw_fd(), fd) };
        }
    }
    report(control, [5, main as u64, std::process::id().into(), 0, 0]);
    let _ = watch(control, main);
}

fn pointers(list: &[CString]) -> Vec<*const libc::c_char> {
    list.iter().map(|s| s.as_ptr()).chain([std::ptr::null()]).collect()
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
        ADOPTS.store(libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0, Ordering::Relaxed);
        // A session of its own: signals to the agent's process group are not for shims.
        libc::setsid();
    }
    affinity::narrow();
    let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| body(control)));
    exit_now()
}

fn exit_now() -> ! {
    unsafe { libc::_exit(0) }
}

/// Inputs of the child that becomes the process, and the place where it leaves an error.
struct Birth<'a> {
    spec: &'a Spec,
    fds: &'a SpecFds,
    control: RawFd,
    argv: Vec<*const libc::c_char>,
    otherwise: Vec<*const libc::c_char>,
    env: Vec<*const libc::c_char>,
    failure: Option<(Stage, i32)>,
}

impl<'a> Birth<'a> {
    fn new(spec: &'a Spec, fds: &'a SpecFds, control: RawFd) -> Self {
        let (argv, otherwise, env) = (pointers(&spec.argv), pointers(&spec.otherwise), pointers(&spec.env));
        Self { spec, fds, control, argv, otherwise, env, failure: None }
    }
}

/// Runs in the child, on a stack of its own but in the shim's memory; the shim stands still until it execs or exits.
extern "C" fn be_born(birth: *mut libc::c_void) -> libc::c_int {
    // SAFETY: the shim waits, so nobody else touches what is behind the pointer.
    let birth = unsafe { &mut *birth.cast::<Birth>() };
    birth.failure = Some(become_process(birth));
    127
}

/// Starts the process, tells how it ended, and stays until nothing is left below. Whether it can take another one.
fn run(control: RawFd, spec: &Spec, fds: SpecFds) -> bool {
    let mut birth = Birth::new(spec, &fds, control);
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
        report(control, [2, Stage::Fork as u64, errno as u64, 0, 0]);
        return false;
    }
    if let Some((stage, errno)) = failure {
        unsafe { libc::waitpid(main, std::ptr::null_mut(), 0) };
        report(control, [2, stage as u64, errno as u64, 0, 0]);
        return false;
    }
    report(control, [1, main as u64, 0, 0, 0]);
    let empty = watch(control, main) && ADOPTS.load(Ordering::Relaxed);
    if empty {
        report(control, [6, 0, 0, 0, 0]);
    }
    empty
}

/// Reaps until nothing is left below, and reports the end of the main process. Whether it saw all that.
fn watch(control: RawFd, main: i32) -> bool {
    let mut told = false;
    loop {
        match next_death() {
            Ok(Change::Stopped { pid, signal }) => sys::untrace(pid, signal),
            Ok(Change::Died { pid, status, usage }) if pid == main => {
                let micros = |t: libc::timeval| t.tv_sec as u64 * 1_000_000 + t.tv_usec as u64;
                let (user, sys) = (micros(usage.ru_utime), micros(usage.ru_stime));
                report(control, [3, status as u64, user, sys, usage.ru_maxrss as u64]);
                unsafe { libc::waitpid(pid, std::ptr::null_mut(), 0) };
                told = true;
            }
            Ok(Change::Died { pid, .. }) => unsafe {
                libc::waitpid(pid, std::ptr::null_mut(), 0);
            },
            Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
            Err(error) => return told && error.raw_os_error() == Some(libc::ECHILD),
        }
    }
}

/// A child's change of state, as its parent is told.
enum Change {
    Died {
        pid: i32,
        status: i32,
        usage: libc::rusage,
    },
    /// It asked to be traced by its parent and came to a signal.
    Stopped {
        pid: i32,
        signal: i32,
    },
}

/// Waits for a child to die and leaves it to be reaped: were the shim killed in between, the agent can still see how it
/// ended. By the bare system call, which also tells the resources used. The kernel reports the stop of a traced child
/// too, although only deaths are asked for.
fn next_death() -> io::Result<Change> {
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    let flags = libc::WEXITED | libc::WNOWAIT;
    let done = unsafe { libc::syscall(libc::SYS_waitid, libc::P_ALL, 0, &raw mut info, flags, &raw mut usage) };
    sys::check(done as i32)?;
    let (pid, detail) = unsafe { (info.si_pid(), info.si_status()) };
    let status = match info.si_code {
        libc::CLD_EXITED => (detail & 0xff) << 8,
        libc::CLD_DUMPED => detail | 0x80,
        libc::CLD_KILLED if detail != GVISOR_STOPPED => detail,
        _ => return Ok(stop_of(pid)),
    };
    Ok(Change::Died { pid, status, usage })
}

/// At which signal a traced child has stopped. It may have been killed since, and is reaped then.
fn stop_of(pid: i32) -> Change {
    let mut status = 0;
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    let got = unsafe { libc::wait4(pid, &raw mut status, libc::WNOHANG | libc::__WALL, &raw mut usage) };
    match got == pid {
        true if libc::WIFSTOPPED(status) => Change::Stopped { pid, signal: libc::WSTOPSIG(status) },
        true => Change::Died { pid, status, usage },
        false => Change::Stopped { pid, signal: 0 },
    }
}

fn report(control: RawFd, words: [u64; 5]) {
    let mut bytes = [0; REPORT_BYTES];
    for (place, word) in bytes.chunks_exact_mut(8).zip(words) {
        place.copy_from_slice(&word.to_ne_bytes());
    }
    let _ = sys::send(control, &bytes);
}

/// Turns the forked child into the process. Comes back only with what went wrong.
fn become_process(birth: &Birth) -> (Stage, i32) {
    let (spec, fds) = (birth.spec, birth.fds);
    let errno = || io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
    unsafe {
        let other_user = spec.user.as_ref().is_some_and(|(uid, ..)| *uid != 0);
        if spec.pty || other_user {
            // Only the leader of a session can take a terminal. And within a session every process may send SIGCONT to
            // every other: another user's command is not in that of its shim, which is root's.
            libc::setsid();
        } else {
            // A group of its own in the session of its shim. With a parent of the same session its group is not an
            // orphaned one: gVisor ends an orphaned group by SIGHUP as soon as one member is stopped and another exits.
            libc::setpgid(0, 0);
        }
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
    report(birth.control, [4, std::process::id().into(), 0, 0, 0]);
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
    let failed = exec_program(birth);
    let Some(shell) = birth.spec.otherwise.first() else { return failed };
    unsafe { libc::execve(shell.as_ptr(), birth.otherwise.as_ptr(), birth.env.as_ptr()) };
    io::Error::last_os_error().raw_os_error().unwrap_or(libc::ENOENT)
}

fn exec_program(birth: &Birth) -> i32 {
    let mut worst = libc::ENOENT;
    for program in &birth.spec.programs {
        unsafe { libc::execve(program.as_ptr(), birth.argv.as_ptr(), birth.env.as_ptr()) };
        match io::Error::last_os_error().raw_os_error().unwrap_or(libc::ENOENT) {
            // So says gVisor of arguments that are too long, not only of names.
            libc::ENAMETOOLONG if is_short(program.to_bytes()) => return libc::E2BIG,
            libc::ENOENT | libc::ENOTDIR | libc::ELOOP | libc::ENAMETOOLONG => {}
            libc::EACCES => worst = libc::EACCES,
            other => return other,
        }
    }
    worst
}

fn is_short(path: &[u8]) -> bool {
    path.len() < 4096 && path.split(|b| *b == b'/').all(|part| part.len() < 256)
}
