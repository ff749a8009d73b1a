//! Starts the real agent as an ordinary process and speaks to it as the host would.
#![allow(dead_code, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::{HashMap, VecDeque};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use atoll_guest::op::map;
use atoll_guest::wire::{self, Decoder, Kind};
use rmpv::Value;

pub const PATIENCE: Duration = Duration::from_secs(40);
pub const WINDOW: u32 = 1024 * 1024;
const AGENT_SECRET: &str = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";
const HOST_SECRET: &str = "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb";

pub struct Agent {
    pub child: Child,
    pub dir: tempfile::TempDir,
}

impl Agent {
    pub fn start() -> Self {
        Self::start_with(serde_json::json!({}))
    }

    /// Starts an agent that listens on an inherited socket; `extra` goes into the boot message.
    pub fn start_with(extra: serde_json::Value) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("agent.sock")).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_atoll-guest"));
        let fd = listener.as_raw_fd();
        // SAFETY: only async-signal-safe calls between fork and exec.
        unsafe {
            command.pre_exec(move || {
                if libc::dup2(fd, 77) < 0 {
                    return Err(std::io::Error::last_os_error());
                }
                Ok(())
            });
        }
        let mut boot = serde_json::json!({ "listen_fd": 77 });
        boot.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        let child = launch(&mut command, boot);
        Self { child, dir }
    }

    /// Starts an agent that dials `agent.sock` in its directory.
    pub fn start_dialling() -> (Self, UnixListener) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("agent.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_atoll-guest"));
        let child = launch(&mut command, serde_json::json!({ "dial": path.to_str().unwrap() }));
        (Self { child, dir }, listener)
    }

    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    pub fn dial(&self) -> UnixStream {
        let socket = UnixStream::connect(self.dir.path().join("agent.sock")).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        socket.set_write_timeout(Some(PATIENCE)).unwrap();
        socket
    }

    /// An authenticated connection.
    pub fn connect(&self) -> Client {
        let mut client = Client::new(self.dial());
        client.write(&host_hello());
        client.hello = client.expect_hello();
        client
    }

    pub fn rss_kb(&self) -> u64 {
        let text = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap();
        let line = text.lines().find(|l| l.starts_with("VmRSS:")).unwrap();
        line.split_ascii_whitespace().nth(1).unwrap().parse().unwrap()
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        // A polite end first, so that everything below goes too.
        let _ = unsafe { libc::kill(self.pid(), libc::SIGTERM) };
        let until = Instant::now() + Duration::from_secs(10);
        while Instant::now() < until {
            if matches!(self.child.try_wait(), Ok(Some(_))) {
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn launch(command: &mut Command, mut boot: serde_json::Value) -> Child {
    let object = boot.as_object_mut().unwrap();
    object.insert("sandbox".into(), "test".into());
    object.insert("agent_secret".into(), AGENT_SECRET.into());
    object.insert("host_secret".into(), HOST_SECRET.into());
    let mut child = command.arg("agent").stdin(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(boot.to_string().as_bytes()).unwrap();
    child
}

pub fn host_hello() -> Vec<u8> {
    let hello = map([("v", 1.into()), ("secret", HOST_SECRET.into()), ("after", 0.into())]);
    wire::control(0, Kind::Hello, &hello).unwrap()
}

#[derive(Debug)]
pub enum Message {
    Result(Result<Value, Value>),
    Event(Value),
    Data(u8, Vec<u8>),
    Eof(u8),
    Credit(u8, u32),
    Other(Kind, Vec<u8>),
}

/// A finished `exec` or `attach`.
#[derive(Debug, Default)]
pub struct Done {
    pub events: Vec<Value>,
    pub out: Vec<u8>,
    pub err: Vec<u8>,
    pub result: Option<Result<Value, Value>>,
}

impl Done {
    pub fn ok(&self) -> &Value {
        self.result.as_ref().unwrap().as_ref().unwrap_or_else(|e| panic!("error {e}"))
    }

    pub fn error_code(&self) -> &str {
        match self.result.as_ref().unwrap() {
            Err(error) => error["code"].as_str().unwrap(),
            Ok(value) => panic!("no error but {value}"),
        }
    }

    pub fn exit(&self) -> &Value {
        &self.ok()["exit"]
    }

    pub fn code(&self) -> i64 {
        self.exit()["code"].as_i64().unwrap_or(-1)
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.out).into_owned()
    }
}

pub struct Client {
    pub socket: UnixStream,
    pub hello: Value,
    decoder: Decoder,
    next: u32,
    inbox: HashMap<u32, VecDeque<Message>>,
}

impl Client {
    pub fn new(socket: UnixStream) -> Self {
        Self { socket, hello: Value::Nil, decoder: Decoder::default(), next: 1, inbox: HashMap::new() }
    }

    pub fn write(&mut self, bytes: &[u8]) {
        self.socket.write_all(bytes).unwrap();
    }

    pub fn expect_hello(&mut self) -> Value {
        match self.next_on(0) {
            Message::Other(Kind::Hello, payload) => rmpv::decode::read_value(&mut payload.as_slice()).unwrap(),
            other => panic!("no hello but {other:?}"),
        }
    }

    /// True when the agent closed the connection; what came before is thrown away.
    pub fn is_closed(&mut self) -> bool {
        let mut buf = [0; 65536];
        loop {
            match self.socket.read(&mut buf) {
                Ok(0) => return true,
                Ok(_) => {}
                Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset => return true,
                Err(_) => return false,
            }
        }
    }

    pub fn request(&mut self, op: &str, fields: Value) -> u32 {
        let stream = self.next;
        self.next += 1;
        let mut pairs = vec![(Value::from("op"), Value::from(op))];
        pairs.extend(fields.as_map().unwrap().iter().cloned());
        let frame = wire::control(stream, Kind::Request, &Value::Map(pairs)).unwrap();
        self.write(&frame);
        stream
    }

    pub fn credit(&mut self, stream: u32, channel: u8, bytes: u32) {
        self.write(&wire::credit(stream, channel, bytes));
    }

    pub fn data(&mut self, stream: u32, data: &[u8]) {
        let frame = wire::raw(stream, Kind::Data, &[&[0], data].concat());
        self.write(&frame);
    }

    pub fn eof(&mut self, stream: u32) {
        self.write(&wire::raw(stream, Kind::Eof, &[0]));
    }

    pub fn cancel(&mut self, stream: u32) {
        self.write(&wire::raw(stream, Kind::Cancel, &[]));
    }

    pub fn next_on(&mut self, stream: u32) -> Message {
        loop {
            if let Some(message) = self.inbox.get_mut(&stream).and_then(VecDeque::pop_front) {
                return message;
            }
            self.receive();
        }
    }

    fn receive(&mut self) {
        let space = self.decoder.space();
        let got = self.socket.read(space).expect("the agent answers in time");
        assert!(got > 0, "the agent closed the connection");
        self.decoder.filled(got);
        while let Some(frame) = self.decoder.next_frame().unwrap() {
            let value = || rmpv::decode::read_value(&mut &frame.payload[..]).unwrap();
            let message = match frame.kind {
                Kind::Result => {
                    let value = value();
                    match &value["err"] {
                        Value::Nil => Message::Result(Ok(value["ok"].clone())),
                        error => Message::Result(Err(error.clone())),
                    }
                }
                Kind::Event => Message::Event(value()),
                Kind::Data => Message::Data(frame.data().unwrap().0, frame.data().unwrap().1.to_vec()),
                Kind::Eof => Message::Eof(frame.eof().unwrap()),
                Kind::Credit => Message::Credit(frame.credit().unwrap().0, frame.credit().unwrap().1),
                kind => Message::Other(kind, frame.payload.to_vec()),
            };
            self.inbox.entry(frame.stream).or_default().push_back(message);
        }
    }

    /// Reads a stream to its RESULT, giving credit as a host does.
    pub fn finish(&mut self, stream: u32) -> Done {
        self.credit(stream, 1, WINDOW);
        self.credit(stream, 2, WINDOW);
        self.finish_without_grant(stream)
    }

    pub fn finish_without_grant(&mut self, stream: u32) -> Done {
        let mut done = Done::default();
        let mut used = [0u32; 3];
        loop {
            match self.next_on(stream) {
                Message::Result(result) => {
                    done.result = Some(result);
                    return done;
                }
                Message::Event(event) => done.events.push(event),
                Message::Data(channel, data) => {
                    used[channel as usize] += data.len() as u32;
                    if used[channel as usize] > WINDOW / 2 {
                        let grant = std::mem::take(&mut used[channel as usize]);
                        self.credit(stream, channel, grant);
                    }
                    if channel == 1 { &mut done.out } else { &mut done.err }.extend(data);
                }
                _ => {}
            }
        }
    }

    pub fn call(&mut self, op: &str, fields: Value) -> Result<Value, Value> {
        let stream = self.request(op, fields);
        self.finish(stream).result.unwrap()
    }

    pub fn ok(&mut self, op: &str, fields: Value) -> Value {
        self.call(op, fields).unwrap_or_else(|e| panic!("{op}: {e}"))
    }

    pub fn code(&mut self, op: &str, fields: Value) -> String {
        match self.call(op, fields) {
            Err(error) => error["code"].as_str().unwrap().to_owned(),
            Ok(value) => panic!("{op}: no error but {value}"),
        }
    }

    pub fn exec(&mut self, fields: Value) -> Done {
        let stream = self.request("exec", fields);
        self.finish(stream)
    }

    pub fn shell(&mut self, id: &str, script: &str) -> Done {
        self.exec(map([("id", id.into()), ("shell", script.into())]))
    }

    /// Opens a stream and waits for its first event.
    pub fn open(&mut self, op: &str, fields: Value) -> (u32, Value) {
        let stream = self.request(op, fields);
        loop {
            match self.next_on(stream) {
                Message::Event(event) => return (stream, event),
                Message::Credit(..) => {}
                other => panic!("no event but {other:?}"),
            }
        }
    }
}

pub fn argv(words: &[&str]) -> Value {
    Value::Array(words.iter().map(|w| Value::from(*w)).collect())
}

/// Waits until `check` holds; patient, because the machine may be slow.
pub fn eventually(what: &str, mut check: impl FnMut() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !check() {
        assert!(Instant::now() < until, "never happened: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Whether a process lives (a zombie does not).
pub fn alive(pid: i64) -> bool {
    atoll_guest::proctree::look(pid as i32).is_some_and(|e| !e.is_dead())
}
