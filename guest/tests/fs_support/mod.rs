//! A stream for operations under test: what goes in is given, what comes out is kept.
#![allow(dead_code, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use atoll_guest::op::{OpError, OpIo, Req};
use rmpv::Value;
use std::collections::VecDeque;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::Arc;

pub struct Io {
    pub events: Vec<Value>,
    pub sent: Vec<u8>,
    pub input: VecDeque<Result<Vec<u8>, OpError>>,
    pub cancel: Arc<AtomicBool>,
    pub cancel_after_sends: Option<usize>,
    pub forward: Option<Sender<Value>>,
    pub wake: (OwnedFd, OwnedFd),
}

impl Io {
    pub fn new() -> Self {
        let (reader, writer) = std::os::unix::net::UnixStream::pair().unwrap();
        Self {
            events: Vec::new(),
            sent: Vec::new(),
            input: VecDeque::new(),
            cancel: Arc::new(AtomicBool::new(false)),
            cancel_after_sends: None,
            forward: None,
            wake: (reader.into(), writer.into()),
        }
    }

    pub fn with_input(data: &[u8]) -> Self {
        let mut io = Self::new();
        for chunk in data.chunks(64 << 10) {
            io.input.push_back(Ok(chunk.to_vec()));
        }
        io
    }

    /// All values of the events' lists under `key`.
    pub fn all(&self, key: &str) -> Vec<Value> {
        self.events.iter().filter_map(|event| field(event, key)).flat_map(|v| v.as_array().unwrap().clone()).collect()
    }
}

impl OpIo for Io {
    fn event(&mut self, value: Value) -> Result<(), OpError> {
        let mut bytes = Vec::new();
        rmpv::encode::write_value(&mut bytes, &value).unwrap();
        assert!(bytes.len() <= 1 << 20, "an event outgrew its frame");
        if let Some(forward) = &self.forward {
            let _ = forward.send(value);
        } else {
            self.events.push(value);
        }
        Ok(())
    }

    fn send(&mut self, data: &[u8]) -> Result<(), OpError> {
        self.sent.extend_from_slice(data);
        if let Some(left) = self.cancel_after_sends.as_mut() {
            *left -= 1;
            if *left == 0 {
                self.cancel.store(true, Ordering::SeqCst);
            }
        }
        Ok(())
    }

    fn recv(&mut self) -> Result<Option<Vec<u8>>, OpError> {
        self.input.pop_front().transpose()
    }

    fn cancelled(&self) -> bool {
        self.cancel.load(Ordering::SeqCst)
    }

    fn wake_fd(&self) -> RawFd {
        self.wake.0.as_raw_fd()
    }
}

pub fn field(value: &Value, key: &str) -> Option<Value> {
    value.as_map()?.iter().find(|(k, _)| k.as_str() == Some(key)).map(|(_, v)| v.clone())
}

pub fn text(value: &Value, key: &str) -> String {
    field(value, key).and_then(|v| v.as_str().map(str::to_owned)).unwrap_or_else(|| panic!("no text {key} in {value}"))
}

pub fn number(value: &Value, key: &str) -> u64 {
    field(value, key).and_then(|v| v.as_u64()).unwrap_or_else(|| panic!("no number {key} in {value}"))
}

pub fn flag(value: &Value, key: &str) -> bool {
    field(value, key).and_then(|v| v.as_bool()).unwrap_or_else(|| panic!("no flag {key} in {value}"))
}

pub fn path(path: impl AsRef<Path>) -> Value {
    use std::os::unix::ffi::OsStrExt;
    atoll_guest::op::text_or_bin(path.as_ref().as_os_str().as_bytes())
}

pub fn texts(items: &[&str]) -> Value {
    Value::Array(items.iter().map(|item| Value::from(*item)).collect())
}

pub fn request(pairs: &[(&str, Value)]) -> Req {
    Req::new(pairs.iter().map(|(k, v)| (Value::from(*k), v.clone())).collect())
}

pub fn run(op: &str, pairs: &[(&str, Value)], io: &mut Io) -> Result<Value, OpError> {
    let function = atoll_guest::fs::lookup(op).unwrap_or_else(|| panic!("no operation {op}"));
    function(&request(pairs), io)
}

pub fn call(op: &str, pairs: &[(&str, Value)]) -> Result<Value, OpError> {
    run(op, pairs, &mut Io::new())
}

pub fn code(result: Result<Value, OpError>) -> &'static str {
    match result {
        Ok(value) => panic!("no error but {value}"),
        Err(error) => error.code,
    }
}

pub fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// A directory in memory where there is one: deep trees cost a journal dearly.
pub fn fast_dir() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

/// A tree so deep that no path can name its bottom.
pub fn deep_tree(root: &Path, depth: usize) {
    use rustix::fs::{mkdirat, openat, Mode, OFlags};
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let mut at = openat(rustix::fs::CWD, root, flags, Mode::empty()).unwrap();
    for _ in 0..depth {
        mkdirat(&at, "d", Mode::from_raw_mode(0o755)).unwrap();
        at = openat(&at, "d", flags, Mode::empty()).unwrap();
    }
    let file = openat(&at, "bottom", OFlags::WRONLY | OFlags::CREATE, Mode::from_raw_mode(0o644)).unwrap();
    rustix::io::write(&file, b"needle\n").unwrap();
}

/// Runs on a stack as small as the agent's threads have.
pub fn on_small_stack<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    std::thread::Builder::new().stack_size(256 << 10).spawn(work).unwrap().join().unwrap()
}
