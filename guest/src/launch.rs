//! From an `exec` request to everything needed for the start: program, environment, user, directory, terminal.

use std::ffi::CString;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use rmpv::Value;

use crate::op::{base_dir, bytes_of, words_of_errno, OpError, Req};
use crate::place;
use crate::plain;
use crate::shim::{Report, Stage};
use crate::spec::Spec;
use crate::sys;
use crate::users::{Accounts, User};

const PATH: &[u8] = b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// Twice the usual window: what was sent and got lost with a connection is then still here.
const RING_ATTACHED: u64 = 2 * 1024 * 1024;
const RING_DETACHED: u64 = 1024 * 1024;
const RING_MOST: u64 = 16 * 1024 * 1024;
/// The longest argument the kernel takes, with its NUL.
const MOST_ARGUMENT: usize = 128 * 1024;
const PIECE: usize = 96 * 1024;

pub type Env = Vec<(Vec<u8>, Vec<u8>)>;

/// A checked `exec` request.
pub struct Plan {
    pub id: String,
    pub shown: Vec<Vec<u8>>,
    pub spec: Spec,
    pub cwd: OwnedFd,
    pub pty: Option<Terminal>,
    pub stdin: bool,
    /// stderr goes where stdout goes.
    pub merge: bool,
    pub detach: bool,
    pub ring: usize,
    pub timeout: Option<Duration>,
    /// The request has limits of its own.
    pub limited: bool,
}

/// Rows and columns of a terminal.
#[derive(Debug, Clone, Copy)]
pub struct Size {
    pub rows: u16,
    pub cols: u16,
}

/// A terminal as a request has it.
#[derive(Debug, Clone, Copy)]
pub struct Terminal {
    pub size: Size,
    pub echo: bool,
}

/// State that every launch shares: the base environment, and the accounts as last read.
pub struct Launcher {
    pub env: Env,
    /// Soft and hard limit of open files for processes; the agent itself has more.
    pub nofile: Option<(u64, u64)>,
    accounts: Option<(Stamp, Accounts)>,
}

type Stamp = [Option<(u64, u64, i64, i64, u64)>; 2];

impl Launcher {
    pub fn new(env: Env, nofile: Option<(u64, u64)>) -> Self {
        Self { env, nofile, accounts: None }
    }

    pub fn plan(&mut self, req: &Req) -> Result<Plan, OpError> {
        let id = check_id(req.str("id")?)?.to_owned();
        let pty = terminal(req)?;
        let detach = req.opt_bool("detach", false)?;
        let ring = req.opt_u64("ring")?.unwrap_or(if detach { RING_DETACHED } else { RING_ATTACHED });
        let user = match req.opt_str("user")? {
            Some(spec) => Some(self.accounts().resolve(spec)?),
            None => None,
        };
        let (argv, shell) = command(req)?;
        let path = req.opt_path("cwd")?.unwrap_or_else(|| base_dir().to_path_buf());
        let cwd = place::open_dir(&path)?;
        let mut env = self.environment(req, user.as_ref(), &path, pty.is_some(), shell)?;
        let line = req.opt_bytes("shell")?.filter(|_| shell == b"/bin/bash" && pty.is_none());
        let (programs, words, otherwise) =
            match line.and_then(|line| plain::command(line, path.as_os_str().as_bytes(), &mut env)) {
                Some((program, words)) => (vec![program], words, c_list(argv.iter().cloned())?),
                None => (programs(argv.first().map_or(b"", Vec::as_slice), &env)?, argv.clone(), Vec::new()),
            };
        let umask = req.opt_u64("umask")?.unwrap_or(0o022);
        if umask > 0o777 {
            return Err(OpError::invalid("`umask` must be within 0..0777"));
        }
        let mut rlimits: Vec<(u32, u64, u64)> = Vec::new();
        if let Some((soft, hard)) = self.nofile {
            rlimits.push((libc::RLIMIT_NOFILE, soft, hard));
        }
        let own = limits(req)?;
        let limited = !own.is_empty();
        rlimits.extend(own);
        let timeout = req.opt_u64("timeout_ms")?.map(Duration::from_millis);
        if timeout == Some(Duration::ZERO) {
            return Err(OpError::invalid("`timeout_ms` must be greater than 0"));
        }
        let joined = env.iter().map(|(k, v)| [k.as_slice(), b"=", v].concat());
        let spec = Spec {
            programs,
            argv: c_list(words)?,
            otherwise,
            env: c_list(joined)?,
            user: user.map(|u| (u.uid, u.gid, u.groups)),
            umask: umask as u32,
            rlimits,
            pty: pty.is_some(),
        };
        let stdin = req.opt_bool("stdin", false)? || pty.is_some();
        Ok(Plan {
            id,
            shown: shown(&argv),
            spec,
            cwd,
            pty,
            stdin,
            merge: req.opt_bool("merge_stderr", false)?,
            detach,
            ring: ring.clamp(4096, RING_MOST) as usize,
            timeout,
            limited,
        })
    }

    /// Returns the settings of a request that asks for nothing, without its program.
    pub fn plain(&mut self) -> Result<Spec, OpError> {
        let nothing = vec![("id".into(), "plain".into()), ("shell".into(), "true".into())];
        Ok(self.plan(&Req::new(nothing))?.spec)
    }

    /// Where a program of this name would be looked for.
    pub fn look_up(&mut self, name: &[u8]) -> Result<Vec<CString>, OpError> {
        programs(name, &self.env)
    }

    /// The defaults, then the sandbox's own, then the user's, then the request's.
    fn environment(
        &mut self,
        req: &Req,
        user: Option<&User>,
        cwd: &Path,
        pty: bool,
        shell: &[u8],
    ) -> Result<Env, OpError> {
        let clear = req.opt_bool("clear_env", false)?;
        let base = if clear { Vec::new() } else { self.env.clone() };
        let own;
        let who = match user {
            Some(user) => Some(user),
            None => {
                own = self.accounts().by_uid(unsafe { libc::geteuid() });
                own.as_ref()
            }
        };
        let uid = user.map_or(unsafe { libc::geteuid() }, |u| u.uid);
        let home =
            who.and_then(|u| u.home.clone())
                .unwrap_or_else(|| if uid == 0 { b"/root".to_vec() } else { b"/".to_vec() });
        let name = who.and_then(|u| u.name.clone()).unwrap_or_else(|| uid.to_string().into_bytes());
        let term = req
            .opt_map("pty")?
            .and_then(|m| Req::new(m.clone()).opt_str("term").ok().flatten().map(|t| t.as_bytes().to_vec()));
        let mut env: Env = Vec::with_capacity(base.len() + 12);
        let identity = [(b"HOME".to_vec(), home), (b"USER".to_vec(), name.clone()), (b"LOGNAME".to_vec(), name)];
        for (key, value) in identity.iter() {
            set(&mut env, key, value);
        }
        set(&mut env, b"LANG", b"C.UTF-8");
        set(&mut env, b"TERM", if pty { b"xterm-256color" } else { b"dumb" });
        set(&mut env, b"PATH", PATH);
        set(&mut env, b"SHELL", shell);
        for (key, value) in &base {
            set(&mut env, key, value);
        }
        if user.is_some() {
            for (key, value) in &identity {
                set(&mut env, key, value);
            }
        }
        set(&mut env, b"PWD", cwd.as_os_str().as_bytes());
        if let Some(term) = term {
            set(&mut env, b"TERM", &term);
        }
        for (key, value) in req.opt_map("env")?.into_iter().flatten() {
            let (Some(key), Some(value)) = (bytes_of(key), bytes_of(value)) else {
                return Err(OpError::invalid("`env` must map strings to strings"));
            };
            check_env(key, value)?;
            set(&mut env, key, value);
        }
        Ok(env)
    }

    /// Adds to the base environment of every later process; nil takes a name away.
    pub fn configure(&mut self, changes: &[(Value, Value)]) -> Result<(), OpError> {
        let mut env = self.env.clone();
        for (key, value) in changes {
            let key = bytes_of(key).ok_or_else(|| OpError::invalid("`env` must map strings to strings"))?;
            if value.is_nil() {
                env.retain(|(k, _)| k != key);
                continue;
            }
            let value = bytes_of(value).ok_or_else(|| OpError::invalid("`env` must map strings to strings"))?;
            check_env(key, value)?;
            set(&mut env, key, value);
        }
        self.env = env;
        Ok(())
    }

    /// A user of the sandbox by name or number.
    pub fn resolve(&mut self, spec: &str) -> Result<User, OpError> {
        self.accounts().resolve(spec)
    }

    fn accounts(&mut self) -> &Accounts {
        let stamp = ["/etc/passwd", "/etc/group"].map(|path| {
            let meta = std::fs::metadata(path).ok()?;
            Some((meta.dev(), meta.ino(), meta.mtime(), meta.mtime_nsec(), meta.size()))
        });
        if self.accounts.as_ref().is_none_or(|(old, _)| *old != stamp) {
            self.accounts = None;
        }
        &self.accounts.get_or_insert_with(|| (stamp, Accounts::load())).1
    }
}

/// 1 to 64 of `[A-Za-z0-9_-]`.
pub fn check_id(id: &str) -> Result<&str, OpError> {
    let good = (1..=64).contains(&id.len()) && id.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-');
    good.then_some(id).ok_or_else(|| OpError::invalid("`id` must be 1 to 64 of A-Z a-z 0-9 _ -"))
}

pub fn window(req: &Req) -> Result<Size, OpError> {
    let side = |key: &str| match req.u64(key)? {
        n @ 1..=65_535 => Ok(n as u16),
        _ => Err(OpError::invalid(format!("`{key}` must be within 1..65535"))),
    };
    Ok(Size { rows: side("rows")?, cols: side("cols")? })
}

fn terminal(req: &Req) -> Result<Option<Terminal>, OpError> {
    let Some(pty) = req.opt_map("pty")? else { return Ok(None) };
    let pty = Req::new(pty.clone());
    Ok(Some(Terminal { size: window(&pty)?, echo: pty.opt_bool("echo", true)? }))
}

/// The argument list, and the shell of this sandbox.
fn command(req: &Req) -> Result<(Vec<Vec<u8>>, &'static [u8]), OpError> {
    let bash = unsafe { libc::access(c"/bin/bash".as_ptr(), libc::X_OK) == 0 };
    let shell: &[u8] = if bash { b"/bin/bash" } else { b"/bin/sh" };
    let argv = match (req.has("argv"), req.opt_bytes("shell")?) {
        (true, None) => req.bytes_list("argv")?,
        (false, Some(text)) => shell_line(shell, text),
        _ => return Err(OpError::invalid("exactly one of `argv` and `shell` is needed")),
    };
    match argv.first() {
        Some(program) if !program.is_empty() => Ok((argv, shell)),
        _ => Err(OpError::invalid("`argv` names no program")),
    }
}

/// The arguments of a shell that runs `line`. Linux takes no argument of 128 KiB: a longer line goes in pieces, which the
/// shell puts together and evaluates with no arguments left.
fn shell_line(shell: &[u8], line: &[u8]) -> Vec<Vec<u8>> {
    let mut argv = vec![shell.to_vec(), b"-c".to_vec()];
    if line.len() < MOST_ARGUMENT {
        argv.push(line.to_vec());
        return argv;
    }
    let pieces: Vec<&[u8]> = line.chunks(PIECE).collect();
    let joined: String = (1..=pieces.len()).map(|n| format!("${{{n}}}")).collect();
    argv.push(format!("eval \"set --;{joined}\"").into_bytes());
    argv.push(shell.to_vec());
    argv.extend(pieces.iter().map(|piece| piece.to_vec()));
    argv
}

/// Where to look for the program, in order.
fn programs(name: &[u8], env: &Env) -> Result<Vec<CString>, OpError> {
    if name.contains(&b'/') {
        return c_list([name.to_vec()]);
    }
    let path = env.iter().find(|(k, _)| k == b"PATH").map_or(PATH, |(_, v)| v.as_slice());
    c_list(path.split(|b| *b == b':').map(|dir| [if dir.is_empty() { b"." } else { dir }, b"/", name].concat()))
}

fn limits(req: &Req) -> Result<Vec<(u32, u64, u64)>, OpError> {
    let mut out = Vec::new();
    for (name, pair) in req.opt_map("rlimits")?.into_iter().flatten() {
        let resource =
            name.as_str().and_then(sys::resource_of).ok_or_else(|| OpError::invalid("unknown name in `rlimits`"))?;
        let limit = |i: usize| pair.as_array().and_then(|p| p.get(i)).and_then(Value::as_u64);
        let (Some(soft), Some(hard)) = (limit(0), limit(1)) else {
            return Err(OpError::invalid("`rlimits` must map names to [soft, hard]"));
        };
        out.push((resource, soft, hard));
    }
    Ok(out)
}

fn set(env: &mut Env, key: &[u8], value: &[u8]) {
    match env.iter_mut().find(|(k, _)| k == key) {
        Some((_, old)) => *old = value.to_vec(),
        None => env.push((key.to_vec(), value.to_vec())),
    }
}

fn check_env(key: &[u8], value: &[u8]) -> Result<(), OpError> {
    if key.is_empty() || key.contains(&b'=') || key.contains(&0) || value.contains(&0) {
        return Err(OpError::invalid("`env` has a name or value that cannot be set"));
    }
    Ok(())
}

fn c_list(items: impl IntoIterator<Item = Vec<u8>>) -> Result<Vec<CString>, OpError> {
    items
        .into_iter()
        .map(|s| CString::new(s).map_err(|_| OpError::invalid("an argument contains a NUL byte")))
        .collect()
}

/// The start of the argument list, for listings.
fn shown(argv: &[Vec<u8>]) -> Vec<Vec<u8>> {
    argv.iter().take(16).map(|arg| arg.get(..arg.len().min(200)).unwrap_or_default().to_vec()).collect()
}

/// A terminal as it was asked for: (master, slave).
pub fn open_pty(terminal: Terminal, owner: Option<u32>) -> Result<(OwnedFd, OwnedFd), OpError> {
    let failed = |e: std::io::Error| match e.raw_os_error() {
        Some(libc::ENOSPC | libc::EIO) => OpError::new("exhausted", "no terminal is left"),
        Some(libc::ENOENT) => OpError::new("unsupported", "the sandbox has no /dev/ptmx"),
        _ => OpError::from(e).at("terminal"),
    };
    let flags = libc::O_RDWR | libc::O_NOCTTY;
    let master = sys::open(c"/dev/ptmx", flags | libc::O_NONBLOCK).map_err(failed)?;
    let (unlock, mut number): (libc::c_int, libc::c_int) = (0, 0);
    sys::check(unsafe { libc::ioctl(master.as_raw_fd(), libc::TIOCSPTLCK, &raw const unlock) }).map_err(failed)?;
    sys::check(unsafe { libc::ioctl(master.as_raw_fd(), libc::TIOCGPTN, &raw mut number) }).map_err(failed)?;
    let name = CString::new(format!("/dev/pts/{number}")).map_err(|_| OpError::invalid("terminal name"))?;
    let slave = sys::open(&name, flags).map_err(failed)?;
    resize(&master, terminal.size)?;
    if !terminal.echo {
        stop_echo(&slave).map_err(failed)?;
    }
    if let Some(uid) = owner {
        // Best effort: only root may give the terminal away, and a process also works with one it does not own.
        unsafe { libc::fchown(slave.as_raw_fd(), uid, u32::MAX) };
    }
    Ok((master, slave))
}

/// From here on what is typed is not written back. A program may turn it on again.
fn stop_echo(slave: &OwnedFd) -> std::io::Result<()> {
    let mut modes = MaybeUninit::<libc::termios>::uninit();
    // SAFETY: modes is read only after the call has filled it.
    let mut modes = unsafe {
        sys::check(libc::tcgetattr(slave.as_raw_fd(), modes.as_mut_ptr()))?;
        modes.assume_init()
    };
    modes.c_lflag &= !libc::ECHO;
    // SAFETY: modes is the kernel's own, changed in one bit.
    sys::check(unsafe { libc::tcsetattr(slave.as_raw_fd(), libc::TCSANOW, &raw const modes) }).map(|_| ())
}

pub fn resize(master: &OwnedFd, size: Size) -> Result<(), OpError> {
    let window = libc::winsize { ws_row: size.rows, ws_col: size.cols, ws_xpixel: 0, ws_ypixel: 0 };
    sys::check(unsafe { libc::ioctl(master.as_raw_fd(), libc::TIOCSWINSZ, &raw const window) })?;
    Ok(())
}

/// Translates a failed start into the caller's error.
pub fn start_error(report: Report, programs: &[CString], name: &[u8]) -> OpError {
    let Report::Failed { stage, errno } = report else { return OpError::new("internal", "unexpected report") };
    let name = String::from_utf8_lossy(name).into_owned();
    let text = words_of_errno(errno);
    let (code, message) = match (stage, errno) {
        (Stage::Exec, libc::ENOENT) => {
            let exists = programs.iter().any(|p| unsafe { libc::access(p.as_ptr(), libc::F_OK) == 0 });
            let why = if exists { "exists, but the interpreter or loader it needs does not" } else { "not found" };
            ("program_not_found", format!("{name}: {why}"))
        }
        (Stage::Exec, libc::E2BIG) => {
            ("invalid_argument", "arguments and environment are too long: 2 MiB together, 128 KiB each".into())
        }
        (Stage::Exec, libc::ENOMEM | libc::EAGAIN | libc::EMFILE | libc::ENFILE) => {
            ("exhausted", format!("{name}: {text}"))
        }
        (Stage::Exec, _) => ("program_not_executable", format!("{name}: {text}")),
        (Stage::Fork, _) => ("exhausted", format!("cannot start another process: {text}")),
        (Stage::Limits, _) => ("invalid_argument", format!("rlimits: {text}")),
        (Stage::User, _) => ("file_permission", format!("cannot take on the user: {text}")),
        (Stage::Directory, libc::EACCES) => ("file_permission", format!("working directory: {text}")),
        _ => ("internal", format!("cannot start: {text}")),
    };
    OpError { code, message, errno: Some(errno) }
}
