//! Warm interpreters: which requests one can serve, what it is told, and how it is started.
//!
//! A *zygote* is an interpreter of this sandbox that has started and only forks. A *spare* is a fork of it that waits for one
//! request below a native shim, so that giving it the request is all there is to do. See `warm/python.py`.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;

use crate::launch::{Launcher, Plan};
use crate::op::{base_dir, OpError};
use crate::shim::{self, Shim};
use crate::spec::{self, Spec, SpecFds};
use crate::{place, sys};

pub mod node;

const PYTHON: &str = include_str!("warm/python.py");
/// Executes what the agent has put into descriptor 0, and leaves nothing of it in `__main__`.
const FIRST_LINE: &CStr = c"exec(__import__('os').read(0,1<<17),{})";
/// How the zygote exits when this interpreter cannot be kept warm at all.
pub const UNSUPPORTED: i32 = 3;
/// How it exits when a fresh start would find other packages' path files.
pub const STALE: i32 = 4;

/// Variables that an interpreter or its C library reads when it starts. Where one differs, only a fresh start is right.
const DECISIVE: [&[u8]; 9] = [b"PYTHON", b"LD_", b"LC_", b"LANG", b"MALLOC_", b"GLIBC_", b"TZ", b"HOME", b"OPENSSL_"];

/// An interpreter: as it was called, where it is, and that it is still the same file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interpreter {
    name: CString,
    program: CString,
    file: (u64, u64, i64, i64),
}

/// The interpreters to keep warm, by the operator's settings.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Wish {
    pub python: bool,
    /// Start at once, not after the first run.
    pub early: bool,
    pub preload: Vec<String>,
    pub node: bool,
    /// Start a Node at once, not after the first run of one.
    pub node_early: bool,
    /// The sandbox's limits.
    pub memory_mb: u64,
}

/// A started interpreter that makes spares.
pub struct Zygote {
    pub pid: i32,
    pub control: OwnedFd,
    pub interpreter: Interpreter,
    pub env: Vec<CString>,
    pub ready: bool,
    pub preloads: bool,
    /// The agent's own program, which the parent of a spare becomes.
    program: OwnedFd,
}

/// A fork of the zygote below its shim, known to be ready once `main` is set.
pub struct Spare {
    pub shim: Shim,
    pub request: OwnedFd,
    pub main: i32,
    pub hot: bool,
}

impl Interpreter {
    /// The interpreter a plan would start, if the plan asks nothing else of it.
    pub fn of(plan: &Plan) -> Option<Self> {
        let spec = &plan.spec;
        let [name, first, rest @ ..] = spec.argv.as_slice() else { return None };
        if plan.pty.is_some() || plan.limited || spec.user.is_some() || !is_python(name.to_bytes()) {
            return None;
        }
        let first = first.to_bytes();
        let code = first == b"-c" && rest.first().is_some_and(|code| std::str::from_utf8(code.to_bytes()).is_ok());
        let file = first.ends_with(b".py") && !first.starts_with(b"-");
        if code || file {
            Self::look(name, &spec.programs)
        } else {
            None
        }
    }

    /// The same program, but another file by now.
    pub fn replaced_by(&self, other: &Self) -> bool {
        self.program == other.program && self.file != other.file
    }

    /// Finds the file that an exec would take.
    pub fn look(name: &CStr, programs: &[CString]) -> Option<Self> {
        let program = programs.iter().find(|p| unsafe { libc::access(p.as_ptr(), libc::X_OK) == 0 })?;
        let path = std::path::Path::new(std::ffi::OsStr::from_bytes(program.to_bytes()));
        let meta = std::fs::metadata(path).ok().filter(|meta| path.is_absolute() && meta.is_file())?;
        let file = (meta.dev(), meta.ino(), meta.mtime(), meta.mtime_nsec());
        Some(Self { name: name.to_owned(), program: program.clone(), file })
    }
}

/// `python`, `python3`, `python3.11`, with or without a directory.
fn is_python(name: &[u8]) -> bool {
    let base = name.rsplit(|b| *b == b'/').next().unwrap_or_default();
    base.strip_prefix(b"python").is_some_and(|rest| rest.iter().all(|b| b.is_ascii_digit() || *b == b'.'))
}

impl Zygote {
    /// Starts the interpreter with the environment every plain run would have.
    pub fn start(launcher: &mut Launcher, interpreter: Interpreter, wish: &Wish) -> Result<Self, OpError> {
        let preload: String = wish.preload.iter().map(|name| format!("{name:?},")).collect();
        let (ours, theirs) = sys::socketpair()?;
        let text = format!("PRELOAD=[{preload}]\n{PYTHON}");
        if sys::send(ours.as_raw_fd(), text.as_bytes())? != text.len() {
            return Err(OpError::new("internal", "the interpreter cannot be told what to do"));
        }
        sys::set_nonblocking(ours.as_raw_fd())?;
        let mut spec = launcher.plain()?;
        spec.programs = vec![interpreter.program.clone()];
        spec.argv = vec![interpreter.name.clone(), c"-c".into(), FIRST_LINE.into()];
        // Pipes, as a program's output is: what the interpreter finds out about them at its start stays true.
        let (_, out) = sys::pipe()?;
        let (_, err) = sys::pipe()?;
        let pid = shim::bare(&spec, &[theirs, out, err, place::open_dir(base_dir())?])?;
        let preloads = !wish.preload.is_empty();
        let program = sys::open(c"/proc/self/exe", libc::O_RDONLY)?;
        Ok(Self { pid, control: ours, interpreter, env: spec.env, ready: false, preloads, program })
    }

    /// Asks for a spare. It is one when its shim says so. A hot one has its own copy of all memory a program will touch.
    pub fn order(&self, hot: bool) -> io::Result<Spare> {
        let (control, their_control) = sys::socketpair()?;
        let (request, their_request) = sys::socketpair()?;
        sys::set_nonblocking(control.as_raw_fd())?;
        let fds: [RawFd; 3] = [their_control.as_raw_fd(), their_request.as_raw_fd(), self.program.as_raw_fd()];
        spec::send(self.control.as_raw_fd(), if hot { b"h" } else { b"l" }, &fds)?;
        Ok(Spare { shim: Shim { pid: 0, control }, request, main: 0, hot })
    }

    /// Whether a fresh start with this environment would not be another one. A script's PYTHONPATH can be taken on later.
    pub fn suits(&self, env: &[CString], script: bool) -> bool {
        let counts = |entry: &&CString| {
            let entry = entry.to_bytes();
            // Preloaded modules may have looked at anything when they were imported.
            let decides = match self.preloads {
                true => !entry.starts_with(b"PWD="),
                false => DECISIVE.iter().any(|start| entry.starts_with(start)),
            };
            decides && !(script && entry.starts_with(b"PYTHONPATH="))
        };
        self.env.iter().filter(counts).eq(env.iter().filter(counts))
    }
}

impl Spare {
    /// Hands over the request. What is wrong with it makes the caller start the program itself.
    pub fn give(&self, spec: &Spec, stdin: bool, fds: &SpecFds) -> io::Result<()> {
        let program = spec.programs.iter().find(|p| unsafe { libc::access(p.as_ptr(), libc::X_OK) == 0 });
        let program = program.ok_or(io::ErrorKind::NotFound)?;
        let mut words = vec![0; 4];
        words.extend_from_slice(format!("{}\0{:o}\0{}\0", u8::from(stdin), spec.umask, spec.argv.len()).as_bytes());
        for text in [program].into_iter().chain(&spec.argv).chain(&spec.env) {
            words.extend_from_slice(text.as_bytes_with_nul());
        }
        words.pop();
        let length = (words.len() - 4) as u32;
        if let Some(front) = words.first_chunk_mut::<4>() {
            *front = length.to_ne_bytes();
        }
        if words.len() > spec::LONGEST {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let fds: Vec<RawFd> = fds.iter().map(AsRawFd::as_raw_fd).collect();
        spec::send(self.request.as_raw_fd(), &words, &fds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_pythons_are_pythons() {
        for name in ["python", "python3", "python3.11", "/usr/bin/python3"] {
            assert!(is_python(name.as_bytes()), "{name}");
        }
        for name in ["python3-config", "pythonx", "ipython3", "/python3/x", "", "py"] {
            assert!(!is_python(name.as_bytes()), "{name}");
        }
    }
}
