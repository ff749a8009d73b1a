//! A Node that has started and waits for its program: which requests it can serve, how it is started, how it is told.
//!
//! It is an ordinary process below an ordinary shim whose pipes exist already. The request comes down its stdin, in front of
//! what the program itself will read there. See `node.js`.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;

use super::Interpreter;
use crate::launch::{Launcher, Plan};
use crate::op::{base_dir, OpError};
use crate::pipes::{Out, Stdin};
use crate::shim::{self, Shim};
use crate::{place, sys};

const SCRIPT: &str = include_str!("node.js");
/// How it exits when this Node cannot be made to wait at all.
pub const UNSUPPORTED: i32 = 3;
/// With what Node has not read yet of its script this still fits into a pipe.
const LONGEST: usize = 40 * 1024;
/// The score by which a kernel with no memory left ends this process first.
const FIRST_TO_GO: &str = "1000";

/// Variables that Node or a library of it reads when it starts. `NODE_PATH` can be taken on later.
const DECISIVE: [&[u8]; 11] =
    [b"NODE_", b"LD_", b"LC_", b"LANG", b"MALLOC_", b"GLIBC_", b"TZ", b"OPENSSL_", b"SSL_CERT_", b"ICU_", b"UV_"];

/// A started Node. `main` is its pid once its shim has told.
pub struct Waiting {
    pub shim: Shim,
    pub main: i32,
    pub interpreter: Interpreter,
    /// It can be given a request: either it has said so, or one like it has before and this one need not.
    pub ready: bool,
    input: OwnedFd,
    outs: [OwnedFd; 2],
    env: Vec<CString>,
    /// How soon the kernel would end it, were it not for its waiting.
    usual_score: Option<String>,
}

/// The parts of a running process, taken from a spare that got its request.
pub struct Begun {
    pub shim: Shim,
    pub main: i32,
    pub outs: [Out; 2],
    pub stdin: Option<Stdin>,
}

/// The Node a plan would start, if the plan asks nothing else of it.
pub fn asked(plan: &Plan) -> Option<Interpreter> {
    let spec = &plan.spec;
    let [name, first, rest @ ..] = spec.argv.as_slice() else { return None };
    let base = name.to_bytes().rsplit(|b| *b == b'/').next()?;
    if plan.pty.is_some() || plan.limited || plan.merge || spec.user.is_some() || !matches!(base, b"node" | b"nodejs") {
        return None;
    }
    if spec.argv.iter().chain(&spec.env).any(|text| std::str::from_utf8(text.to_bytes()).is_err()) {
        return None;
    }
    let word = |at: usize| rest.get(at).map(|word| word.to_bytes());
    let is_option = |word: &[u8]| word.starts_with(b"-");
    let served = match first.to_bytes() {
        b"-e" => word(0).is_some_and(|code| !is_option(code)) && !word(1).is_some_and(is_option),
        file => !is_option(file) && [b".js".as_slice(), b".cjs", b".mjs"].iter().any(|end| file.ends_with(end)),
    };
    served.then(|| Interpreter::look(name, &spec.programs)).flatten()
}

impl Waiting {
    /// Starts one with the environment every plain run would have. `announce`: it has to say when it is ready.
    pub fn start(
        launcher: &mut Launcher,
        interpreter: Interpreter,
        announce: bool,
        spare: Option<Shim>,
    ) -> Result<Self, OpError> {
        let mut spec = launcher.plain()?;
        let text = format!("const ANNOUNCE={announce};{SCRIPT}");
        let line = format!(
            "{{const b=Buffer.alloc({});eval(b.toString('latin1',0,require('fs').readSync(0,b)))}}",
            text.len()
        );
        spec.programs = vec![interpreter.program.clone()];
        spec.argv = vec![interpreter.name.clone(), c"-e".into(), CString::new(line).unwrap_or_default()];
        spec.otherwise = Vec::new();
        let (theirs, input) = sys::pipe()?;
        let (out, their_out) = sys::pipe()?;
        let (err, their_err) = sys::pipe()?;
        for fd in [&input, &out, &err] {
            sys::set_nonblocking(fd.as_raw_fd())?;
        }
        put(&input, text.as_bytes())?;
        let env = spec.env.clone();
        let shim = shim::launch(spare, &spec, [theirs, their_out, their_err, place::open_dir(base_dir())?])?;
        Ok(Self { shim, main: 0, interpreter, ready: !announce, input, outs: [out, err], env, usual_score: None })
    }

    /// Where it says that it is ready.
    pub fn voice(&self) -> i32 {
        self.outs[0].as_raw_fd()
    }

    /// It runs now. While it waits, nobody else may die for want of the memory it has.
    pub fn started(&mut self, main: i32) {
        self.main = main;
        let place = format!("/proc/{main}/oom_score_adj");
        self.usual_score = std::fs::read_to_string(&place).ok();
        let _ = std::fs::write(&place, FIRST_TO_GO);
    }

    /// Whether a fresh start with this environment would not be another one.
    pub fn suits(&self, env: &[CString]) -> bool {
        let counts = |entry: &&CString| {
            let entry = entry.to_bytes();
            DECISIVE.iter().any(|start| entry.starts_with(start)) && !entry.starts_with(b"NODE_PATH=")
        };
        self.env.iter().filter(counts).eq(env.iter().filter(counts))
    }

    /// Hands over the request. `None`: this one is of no use, and the caller starts the program himself.
    pub fn give(self, plan: &Plan) -> Option<Begun> {
        if self.tell(plan).is_none() {
            self.end();
            return None;
        }
        let [out, err] = self.outs;
        Some(Begun {
            shim: self.shim,
            main: self.main,
            outs: [Out::new(Some(out), plan.ring), Out::new(Some(err), plan.ring)],
            stdin: plan.stdin.then(|| Stdin::new(self.input)),
        })
    }

    fn tell(&self, plan: &Plan) -> Option<()> {
        let request = encode(plan).filter(|bytes| bytes.len() <= LONGEST)?;
        if let Some(score) = self.usual_score.as_deref().filter(|_| self.main > 0) {
            std::fs::write(format!("/proc/{}/oom_score_adj", self.main), score.trim()).ok()?;
        }
        put(&self.input, &request).ok()
    }

    /// Ends it. Its shim is reaped like any other.
    pub fn end(&self) {
        for pid in [self.main, self.shim.pid] {
            if pid > 1 {
                let _ = sys::kill(pid, libc::SIGKILL);
            }
        }
    }
}

/// stdin?, umask, directory, number of arguments, arguments, environment: separated by NUL, their length in front.
fn encode(plan: &Plan) -> Option<Vec<u8>> {
    let spec = &plan.spec;
    let directory = directory(&plan.cwd)?;
    let mut words = vec![0; 4];
    words.extend_from_slice(format!("{}\0{:o}\0", u8::from(plan.stdin), spec.umask).as_bytes());
    words.extend_from_slice(&directory);
    words.extend_from_slice(format!("\0{}\0", spec.argv.len()).as_bytes());
    for text in spec.argv.iter().chain(&spec.env) {
        words.extend_from_slice(text.as_bytes_with_nul());
    }
    words.pop();
    let length = u32::try_from(words.len() - 4).ok()?;
    *words.first_chunk_mut::<4>()? = length.to_le_bytes();
    Some(words)
}

/// The name of an open directory, if it still has one that Node can be told.
fn directory(fd: &OwnedFd) -> Option<Vec<u8>> {
    let path = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).ok()?;
    let named = std::fs::metadata(&path).ok()?;
    let mut open: libc::stat = unsafe { std::mem::zeroed() };
    sys::check(unsafe { libc::fstat(fd.as_raw_fd(), &raw mut open) }).ok()?;
    let same = (named.dev(), named.ino()) == (open.st_dev as u64, open.st_ino as u64);
    (same && path.to_str().is_some()).then(|| path.as_os_str().as_bytes().to_vec())
}

/// All of it or an error.
fn put(fd: &OwnedFd, bytes: &[u8]) -> io::Result<()> {
    match sys::write(fd.as_raw_fd(), bytes)? {
        n if n == bytes.len() => Ok(()),
        _ => Err(io::ErrorKind::WriteZero.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::Req;
    use rmpv::Value;

    fn served(words: &[&str]) -> bool {
        let argv: Vec<Value> = words.iter().map(|w| Value::from(*w)).collect();
        let fields = vec![
            ("id".into(), "x".into()),
            ("argv".into(), Value::Array(argv)),
            ("env".into(), Value::Map(vec![("PATH".into(), "/nowhere".into())])),
        ];
        let mut plan = Launcher::new(Vec::new(), None).plan(&Req::new(fields)).unwrap();
        plan.spec.programs = vec![c"/bin/sh".into()];
        asked(&plan).is_some()
    }

    #[test]
    fn only_what_node_itself_would_take_for_a_program_is_served() {
        for words in [
            &["node", "-e", "1"][..],
            &["/usr/bin/node", "-e", "", "a", "-b"],
            &["nodejs", "x.js", "-e"],
            &["node", "./x.mjs"],
        ] {
            assert!(served(words), "{words:?}");
        }
        for words in [
            &["node"][..],
            &["node", "-e"],
            &["node", "-e", "-1"],
            &["node", "-e", "1", "--check"],
            &["node", "-e", "1", "--"],
            &["node", "-p", "1"],
            &["node", "x.ts"],
            &["node", "--inspect", "x.js"],
            &["node", "-.js"],
            &["nodemon", "x.js"],
        ] {
            assert!(!served(words), "{words:?}");
        }
    }

    #[test]
    fn the_script_is_plain_text_that_fits_into_a_pipe() {
        assert!(SCRIPT.is_ascii() && SCRIPT.len() + LONGEST < 60 * 1024);
    }
}
