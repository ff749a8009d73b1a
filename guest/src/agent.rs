//! The agent: one thread, one epoll loop. Here is the loop itself, the connection, frames, timers and signals; the
//! operations are in `ops`, what flows to the host is in `pump`.

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rmpv::Value;

use crate::boot::Boot;
use crate::bridge::{Bells, Running};
use crate::forward::Forward;
use crate::launch::Launcher;
use crate::link::{self, Greeting, Link, Pending};
use crate::op::{map, OpError, Req};
use crate::procs::{Exit, Got, Killing, Proc, Step};
use crate::shim::{self, Report, Shim, REPORT_BYTES};
use crate::sys::{self, Poll, IN, OUT};
use crate::wire::{self, Decoder, Frame, Kind};

pub const FEATURES: &[&str] = &["exec", "pty", "attach", "files", "forward", "watch", "tar", "configure"];
const HELLO_TIME: Duration = Duration::from_secs(5);
const START_TIME: Duration = Duration::from_secs(20);
const DIAL_FIRST: Duration = Duration::from_millis(10);
const DIAL_MOST: Duration = Duration::from_secs(1);
const MOST_PENDING: usize = 8;
/// While this much waits to be sent, no further request is read.
const MOST_CONTROL: usize = 1024 * 1024;
const KEPT_FINISHED: usize = 64;
const KEPT_RING_BYTES: usize = 16 * 1024 * 1024;
const KEPT_IDS: usize = 16 * 1024;

/// Who reads a process over a stream.
pub struct View {
    pub key: u32,
    /// Opened by `exec`: cancelling it kills.
    pub owner: bool,
    /// Goes on after the main process has ended, until its pipes are closed.
    pub follow: bool,
    pub position: [u64; 2],
    pub credit: [u64; 2],
    pub eof_sent: [bool; 2],
    pub announced: bool,
    /// Bytes of stdin the host may still send.
    pub stdin_credit: u64,
    /// The host wants no more output, only the end.
    pub discard: bool,
}

/// An operation that is open on the connection.
pub enum Stream {
    View(View),
    Op {
        running: Arc<Running>,
        credit: u64,
        in_credit: u64,
    },
    Forward(Forward),
    /// Its RESULT comes from elsewhere.
    Waiting,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Timer {
    Timeout(u32),
    Kill(u32),
    Start(u32),
    Hello(u32),
    Dial,
    Deadline,
}

pub mod token {
    pub const LISTEN: u64 = 1;
    pub const LINK: u64 = 2;
    pub const PENDING: u64 = 3;
    pub const SIGNAL: u64 = 4;
    pub const BELL: u64 = 5;
    pub const OUT: u64 = 6;
    pub const ERR: u64 = 7;
    pub const STDIN: u64 = 8;
    pub const CONTROL: u64 = 9;
    pub const FORWARD: u64 = 10;

    pub fn of(tag: u64, id: u32) -> u64 {
        tag << 32 | u64::from(id)
    }
}

pub struct Agent {
    pub boot: Boot,
    pub boot_id: String,
    pub started: Instant,
    pub poll: Poll,
    pub bells: Arc<Bells>,
    signals: OwnedFd,
    listener: Option<OwnedFd>,
    dial_pause: Duration,
    pending: Vec<Pending>,
    next_pending: u32,
    pub link: Option<Link>,
    pub streams: HashMap<u32, Stream>,
    /// Streams in the order in which they may send next.
    pub rotation: VecDeque<u32>,
    pub launcher: Launcher,
    pub procs: HashMap<u32, Proc>,
    pub ids: HashMap<String, u32>,
    next_key: u32,
    /// Hashes of ids whose record is gone.
    pub past: HashSet<u64>,
    past_order: VecDeque<u64>,
    spare: Option<Shim>,
    timers: BTreeSet<(Instant, Timer)>,
    pub deadline: Option<Instant>,
    oom_kills: Option<u64>,
    /// The agent ends when this is set and its last words are out.
    pub leaving: Option<String>,
    closing: bool,
}

impl Agent {
    pub fn new(boot: Boot) -> Result<Self, String> {
        let failed = |what: &'static str| move |e: std::io::Error| format!("{what}: {e}");
        sys::default_signals();
        let signals = sys::signalfd(&[libc::SIGCHLD, libc::SIGTERM, libc::SIGINT]).map_err(failed("signalfd"))?;
        let poll = Poll::new().map_err(failed("epoll"))?;
        let bells = Bells::new().map_err(failed("eventfd"))?;
        let nofile = sys::rlimit(libc::RLIMIT_NOFILE).ok();
        if let Some((_, hard)) = nofile {
            let _ = sys::set_rlimit(libc::RLIMIT_NOFILE, hard, hard);
        }
        let listener = match boot.listen_fd {
            Some(fd) => {
                sys::set_nonblocking(fd).map_err(failed("listen_fd"))?;
                // SAFETY: the host passed this descriptor for us alone.
                Some(unsafe { OwnedFd::from_raw_fd(fd) })
            }
            None => None,
        };
        poll.set(signals.as_raw_fd(), token::of(token::SIGNAL, 0), 0, IN);
        poll.set(bells.fd(), token::of(token::BELL, 0), 0, IN);
        if let Some(listener) = &listener {
            poll.set(listener.as_raw_fd(), token::of(token::LISTEN, 0), 0, IN);
        }
        let now = Instant::now();
        let random: [u8; 8] = sys::random();
        let mut agent = Self {
            boot_id: random.iter().map(|b| format!("{b:02x}")).collect(),
            started: now,
            poll,
            bells,
            signals,
            listener,
            dial_pause: DIAL_FIRST,
            pending: Vec::new(),
            next_pending: 0,
            link: None,
            streams: HashMap::new(),
            rotation: VecDeque::new(),
            launcher: Launcher::new(boot.env.clone(), nofile),
            procs: HashMap::new(),
            ids: HashMap::new(),
            next_key: 0,
            past: HashSet::new(),
            past_order: VecDeque::new(),
            spare: None,
            timers: BTreeSet::new(),
            deadline: None,
            oom_kills: read_oom_kills(),
            leaving: None,
            closing: false,
            boot,
        };
        agent.set_deadline(agent.boot.deadline_ms);
        if agent.boot.dial.is_some() {
            agent.at(now, Timer::Dial);
        }
        Ok(agent)
    }

    /// Runs until the sandbox ends.
    pub fn run(&mut self) {
        let mut events = Vec::new();
        while self.leaving.is_none() {
            self.keep_spare();
            self.poll.wait(&mut events, self.next_timeout());
            let turn = AssertUnwindSafe(|| self.turn(&events));
            if catch_unwind(turn).is_err() {
                // A bug in one turn must not end the sandbox; the peer starts over.
                self.drop_link();
            }
        }
        self.leave();
    }

    fn turn(&mut self, events: &[(u64, u32)]) {
        for (token, ready) in events {
            let (tag, id) = (token >> 32, *token as u32);
            match tag {
                token::LISTEN => self.accept(),
                token::LINK => self.on_link(*ready),
                token::PENDING => self.on_pending(id),
                token::SIGNAL => self.on_signal(),
                token::BELL => self.on_bell(),
                token::OUT => self.on_output(id, 0),
                token::ERR => self.on_output(id, 1),
                token::STDIN => self.on_stdin(id),
                token::CONTROL => self.on_control(id),
                token::FORWARD => self.on_forward(id, *ready),
                _ => {}
            }
        }
        self.fire_timers();
        self.pump();
    }

    // Timers

    pub fn at(&mut self, when: Instant, timer: Timer) {
        self.timers.insert((when, timer));
    }

    fn next_timeout(&self) -> Option<Duration> {
        self.timers.first().map(|(when, _)| when.saturating_duration_since(Instant::now()))
    }

    fn fire_timers(&mut self) {
        let now = Instant::now();
        while let Some((when, timer)) = self.timers.first().copied() {
            if when > now {
                return;
            }
            self.timers.pop_first();
            match timer {
                Timer::Timeout(key) => self.on_timeout(key),
                Timer::Kill(key) => self.kill_step(key),
                Timer::Start(key) => self.on_start_timeout(key),
                Timer::Hello(id) => self.drop_pending(id),
                Timer::Dial => self.dial(),
                Timer::Deadline => {
                    if self.deadline.is_some_and(|deadline| deadline <= now) {
                        self.leaving = Some("deadline".into());
                    }
                }
            }
        }
    }

    pub fn set_deadline(&mut self, millis: Option<u64>) {
        if let Some(old) = self.deadline.take() {
            self.timers.remove(&(old, Timer::Deadline));
        }
        self.deadline = millis.and_then(|ms| Instant::now().checked_add(Duration::from_millis(ms)));
        if let Some(when) = self.deadline {
            self.at(when, Timer::Deadline);
        }
    }

    // Connections

    fn hello(&self) -> Vec<u8> {
        let hello = map([
            ("v", wire::VERSION.into()),
            ("secret", Value::from(self.boot.agent_secret.as_str())),
            ("pid", std::process::id().into()),
            ("boot", Value::from(self.boot_id.as_str())),
            ("features", Value::Array(FEATURES.iter().map(|f| Value::from(*f)).collect())),
            ("uptime_ms", (self.started.elapsed().as_millis() as u64).into()),
        ]);
        wire::control(0, Kind::Hello, &hello).unwrap_or_default()
    }

    fn accept(&mut self) {
        while let Some(Ok(fd)) = self.listener.as_ref().map(|l| sys::accept(l.as_raw_fd())) {
            if self.pending.len() >= MOST_PENDING {
                self.pending.remove(0);
            }
            self.add_pending(fd);
        }
    }

    fn add_pending(&mut self, fd: OwnedFd) {
        let until = Instant::now() + HELLO_TIME;
        self.next_pending = self.next_pending.wrapping_add(1);
        let id = self.next_pending;
        self.poll.set(fd.as_raw_fd(), token::of(token::PENDING, id), 0, IN);
        self.pending.push(Pending { id, fd, decoder: Decoder::default(), until });
        self.at(until, Timer::Hello(id));
    }

    fn drop_pending(&mut self, id: u32) {
        let before = self.pending.len();
        self.pending.retain(|p| p.id != id);
        if before != self.pending.len() {
            self.redial();
        }
    }

    fn on_pending(&mut self, id: u32) {
        let Some(at) = self.pending.iter().position(|p| p.id == id) else { return };
        let secret = self.boot.host_secret.clone();
        let greeting = self.pending.get_mut(at).map(|p| p.read_hello(&secret));
        match greeting {
            Some(Greeting::Accepted) => {
                let pending = self.pending.remove(at);
                self.timers.remove(&(pending.until, Timer::Hello(id)));
                self.poll.set(pending.fd.as_raw_fd(), 0, IN, 0);
                self.drop_link();
                let mut link = Link::new(pending.fd, pending.decoder);
                if self.boot.dial.is_none() {
                    link.push(self.hello());
                }
                self.dial_pause = DIAL_FIRST;
                self.link = Some(link);
                self.read_frames();
            }
            Some(Greeting::Refused) => self.drop_pending(id),
            _ => {}
        }
    }

    fn dial(&mut self) {
        let Some(path) = &self.boot.dial else { return };
        if self.link.is_some() || !self.pending.is_empty() {
            return;
        }
        let hello = self.hello();
        match link::dial(path) {
            Ok(fd) if sys::send(fd.as_raw_fd(), &hello).is_ok_and(|n| n == hello.len()) => self.add_pending(fd),
            _ => self.redial(),
        }
    }

    /// Under `dial`, tries again after a pause that grows.
    fn redial(&mut self) {
        if self.boot.dial.is_some() {
            self.at(Instant::now() + self.dial_pause, Timer::Dial);
            self.dial_pause = (self.dial_pause * 2).min(DIAL_MOST);
        }
    }

    /// The connection is gone: what only served its peer ends, processes go on.
    pub fn drop_link(&mut self) {
        let had = self.link.take().is_some();
        self.closing = false;
        for (_, stream) in std::mem::take(&mut self.streams) {
            match stream {
                Stream::Op { running, .. } => running.cancel(),
                Stream::View(view) => {
                    if let Some(proc) = self.procs.get_mut(&view.key) {
                        proc.detach_all();
                    }
                }
                Stream::Forward(_) | Stream::Waiting => {}
            }
        }
        self.rotation.clear();
        for proc in self.procs.values_mut() {
            proc.kill_waiters.clear();
        }
        if had {
            self.redial();
        }
    }

    fn on_link(&mut self, ready: u32) {
        if ready & !OUT == 0 {
            return;
        }
        let Some(link) = &mut self.link else { return };
        let fd = link.raw();
        let space = link.decoder.space();
        let room = space.len();
        match sys::read(fd, space) {
            Ok(0) => self.drop_link(),
            Ok(n) => {
                link.decoder.filled(n);
                self.read_frames();
                if n < room / 4 {
                    if let Some(link) = &mut self.link {
                        link.decoder.relax();
                    }
                }
            }
            Err(e) if sys::would_block(&e) => {}
            Err(_) => self.drop_link(),
        }
    }

    fn read_frames(&mut self) {
        let Some(link) = &mut self.link else { return };
        let mut decoder = std::mem::take(&mut link.decoder);
        loop {
            match decoder.next_frame() {
                Ok(Some(frame)) => self.on_frame(&frame),
                Ok(None) => break,
                Err(_) => self.closing = true,
            }
            if self.closing || self.link.is_none() {
                return self.drop_link();
            }
        }
        if let Some(link) = &mut self.link {
            link.decoder = decoder;
        }
    }

    /// Closes the connection after the frame at hand: the peer broke the protocol.
    pub fn close_link(&mut self) {
        self.closing = true;
    }

    fn on_frame(&mut self, frame: &Frame) {
        match frame.kind {
            Kind::Ping => self.push(wire::raw(0, Kind::Pong, frame.payload)),
            Kind::Pong => {}
            Kind::Request => self.on_request(frame),
            Kind::Data => match frame.data() {
                Some((channel, data)) => self.on_data(frame.stream, channel, data),
                None => self.close_link(),
            },
            Kind::Eof => match frame.eof() {
                Some(channel) => self.on_eof(frame.stream, channel),
                None => self.close_link(),
            },
            Kind::Credit => match frame.credit() {
                Some((channel, bytes)) => self.on_credit(frame.stream, channel, bytes),
                None => self.close_link(),
            },
            Kind::Cancel => self.on_cancel(frame.stream),
            Kind::Hello | Kind::Result | Kind::Event | Kind::Bye => self.close_link(),
        }
    }

    fn on_request(&mut self, frame: &Frame) {
        let stream = frame.stream;
        if self.streams.contains_key(&stream) {
            return self.close_link();
        }
        let Some(map) = wire::decode_map(frame.payload) else {
            return self.answer(stream, Err(OpError::invalid("the request is no map")));
        };
        if self.streams.len() >= self.boot.max_streams {
            return self.answer(stream, Err(OpError::new("exhausted", "too many operations at once")));
        }
        let req = Req::new(map);
        let outcome = catch_unwind(AssertUnwindSafe(|| self.dispatch(stream, &req)))
            .unwrap_or_else(|_| Err(OpError::new("internal", "the operation failed inside the agent")));
        match outcome {
            Ok(Some(value)) => self.answer(stream, Ok(value)),
            Ok(None) => {
                if self.streams.contains_key(&stream) {
                    self.rotation.push_back(stream);
                }
            }
            Err(error) => {
                self.streams.remove(&stream);
                self.answer(stream, Err(error));
            }
        }
    }

    pub fn push(&mut self, frame: Vec<u8>) {
        if let Some(link) = &mut self.link {
            link.push(frame);
        }
    }

    pub fn event(&mut self, stream: u32, value: &Value) {
        if let Some(frame) = wire::control(stream, Kind::Event, value) {
            self.push(frame);
        }
    }

    /// Sends RESULT and closes the stream.
    pub fn answer(&mut self, stream: u32, outcome: Result<Value, OpError>) {
        self.streams.remove(&stream);
        let value = match outcome {
            Ok(value) => map([("ok", value)]),
            Err(error) => map([("err", error.to_value())]),
        };
        let frame = wire::control(stream, Kind::Result, &value).or_else(|| {
            let error = OpError::new("exhausted", "the answer is longer than the protocol allows");
            wire::control(stream, Kind::Result, &map([("err", error.to_value())]))
        });
        self.push(frame.unwrap_or_default());
    }

    fn on_data(&mut self, stream: u32, channel: u8, data: &[u8]) {
        let size = data.len() as u64;
        let key = match self.streams.get_mut(&stream) {
            None | Some(Stream::Waiting) => return,
            Some(Stream::View(view)) if channel == 0 && view.stdin_credit >= size => {
                view.stdin_credit -= size;
                view.key
            }
            Some(Stream::Op { running, in_credit, .. }) if channel == 0 && *in_credit >= size => {
                *in_credit -= size;
                return running.deliver(data.to_vec());
            }
            Some(Stream::Forward(forward)) if channel == 0 && forward.in_credit >= size => {
                forward.in_credit -= size;
                return forward.push(data);
            }
            _ => return self.close_link(),
        };
        if let Some(stdin) = self.procs.get_mut(&key).and_then(|p| p.stdin.as_mut()) {
            stdin.push(data);
            self.on_stdin(key);
        }
    }

    fn on_eof(&mut self, stream: u32, channel: u8) {
        if channel != 0 {
            return;
        }
        match self.streams.get_mut(&stream) {
            Some(Stream::View(view)) => {
                let key = view.key;
                let writes = self.procs.get(&key).is_some_and(|p| p.writer == Some(stream));
                if writes {
                    self.end_stdin(key);
                }
            }
            Some(Stream::Op { running, .. }) => running.deliver_eof(),
            Some(Stream::Forward(forward)) => forward.finish(),
            _ => {}
        }
    }

    fn on_credit(&mut self, stream: u32, channel: u8, bytes: u32) {
        let add = |credit: &mut u64| *credit = credit.saturating_add(u64::from(bytes));
        match (self.streams.get_mut(&stream), channel) {
            (Some(Stream::View(view)), 1) => add(&mut view.credit[0]),
            (Some(Stream::View(view)), 2) => add(&mut view.credit[1]),
            (Some(Stream::Op { credit, .. }), 1) => add(credit),
            (Some(Stream::Forward(forward)), 1) => add(&mut forward.credit),
            _ => {}
        }
    }

    fn on_cancel(&mut self, stream: u32) {
        match self.streams.get_mut(&stream) {
            Some(Stream::Op { running, .. }) => running.cancel(),
            Some(Stream::Forward(_)) => self.answer(stream, Err(OpError::cancelled())),
            Some(Stream::View(view)) => {
                let (key, owner) = (view.key, view.owner);
                view.discard = true;
                if owner {
                    self.cancel_process(key);
                } else {
                    if let Some(proc) = self.procs.get_mut(&key) {
                        proc.detach(stream);
                    }
                    self.answer(stream, Err(OpError::cancelled()));
                }
            }
            Some(Stream::Waiting) | None => {}
        }
    }

    fn on_bell(&mut self) {
        for stream in self.bells.take() {
            let Some(Stream::Op { running, in_credit, .. }) = self.streams.get_mut(&stream) else { continue };
            let grant = running.take_grant();
            if grant > 0 {
                *in_credit += grant;
                self.push(wire::credit(stream, 0, u32::try_from(grant).unwrap_or(u32::MAX)));
            }
        }
    }

    // Processes

    fn keep_spare(&mut self) {
        if self.spare.is_none() {
            self.spare = shim::spare().ok();
        }
    }

    pub fn take_spare(&mut self) -> Option<Shim> {
        self.spare.take()
    }

    pub fn shim_pids(&self) -> HashSet<i32> {
        self.procs.values().map(|p| p.shim).chain(self.spare.as_ref().map(|s| s.pid)).filter(|pid| *pid > 0).collect()
    }

    pub fn add_proc(&mut self, mut proc: Proc) -> u32 {
        self.next_key = self.next_key.wrapping_add(1);
        let key = self.next_key;
        proc.key = key;
        if let Some(control) = &proc.control {
            self.poll.set(control.as_raw_fd(), token::of(token::CONTROL, key), 0, IN);
        }
        self.ids.insert(proc.id.clone(), key);
        self.procs.insert(key, proc);
        self.at(Instant::now() + START_TIME, Timer::Start(key));
        key
    }

    /// Keeps interest in the descriptors of a process in step with what can be done.
    pub fn refresh(&mut self, key: u32) {
        let Some(proc) = self.procs.get_mut(&key) else { return };
        let drops = proc.drops();
        for (out, tag) in proc.outs.iter_mut().zip([token::OUT, token::ERR]) {
            let Some(fd) = out.fd.as_ref().map(AsRawFd::as_raw_fd) else { continue };
            let wanted = if proc.pid > 0 && out.wants_read(drops) { IN } else { 0 };
            self.poll.set(fd, token::of(tag, key), out.interest, wanted);
            out.interest = wanted;
        }
        if let Some(stdin) = &mut proc.stdin {
            if let Some(fd) = stdin.fd.as_ref().map(AsRawFd::as_raw_fd) {
                let wanted = if stdin.queue.is_empty() { 0 } else { OUT };
                self.poll.set(fd, token::of(token::STDIN, key), stdin.interest, wanted);
                stdin.interest = wanted;
            }
        }
    }

    pub fn on_output(&mut self, key: u32, which: usize) {
        let Some(proc) = self.procs.get_mut(&key) else { return };
        let (drops, pty, ended) = (proc.drops(), proc.pty, proc.exit.is_some());
        let Some(out) = proc.outs.get_mut(which) else { return };
        loop {
            match out.read(drops, pty) {
                // After the end of the process the reading goes on to the point where nothing is left.
                Got::Data if ended && out.last.is_none() => continue,
                Got::Data | Got::Nothing => break,
                Got::End => {
                    out.end();
                    break;
                }
            }
        }
        if proc.is_over() {
            self.on_over(key);
        } else {
            self.refresh(key);
        }
    }

    pub fn on_stdin(&mut self, key: u32) {
        let Some(stdin) = self.procs.get_mut(&key).and_then(|p| p.stdin.as_mut()) else { return };
        stdin.write();
        self.refresh(key);
        self.grant_stdin(key);
    }

    /// Gives back credit for what the process took.
    fn grant_stdin(&mut self, key: u32) {
        let Some(proc) = self.procs.get_mut(&key) else { return };
        let (Some(writer), Some(stdin)) = (proc.writer, proc.stdin.as_mut()) else { return };
        let grant = stdin.drained;
        if grant < 64 * 1024 && !stdin.queue.is_empty() || grant == 0 {
            return;
        }
        stdin.drained = 0;
        if let Some(Stream::View(view)) = self.streams.get_mut(&writer) {
            view.stdin_credit += grant;
            self.push(wire::credit(writer, 0, u32::try_from(grant).unwrap_or(u32::MAX)));
        }
    }

    pub fn end_stdin(&mut self, key: u32) {
        let Some(proc) = self.procs.get_mut(&key) else { return };
        let pty = proc.pty;
        if let Some(stdin) = &mut proc.stdin {
            if pty {
                // A terminal has no end: its end-of-file character says it.
                stdin.push(&[4]);
            } else {
                stdin.eof = true;
            }
        }
        self.on_stdin(key);
    }

    fn on_control(&mut self, key: u32) {
        loop {
            let Some(proc) = self.procs.get_mut(&key) else { return };
            let Some(fd) = proc.control.as_ref().map(AsRawFd::as_raw_fd) else { return };
            let mut buf = [0; REPORT_BYTES];
            match sys::read(fd, &mut buf) {
                Ok(n) if n > 0 => proc.control_bytes.extend_from_slice(buf.get(..n).unwrap_or_default()),
                Err(e) if sys::would_block(&e) => return,
                // The shim is ending; what that means is known once it is reaped and its children have a new parent.
                _ => return proc.control = None,
            }
            while let Some(raw) = self.procs.get_mut(&key).and_then(Proc::next_report) {
                if let Some(report) = shim::decode_report(&raw) {
                    self.on_report(key, report);
                }
            }
        }
    }

    fn on_report(&mut self, key: u32, report: Report) {
        match report {
            Report::Started { pid } => self.on_started(key, pid),
            Report::Failed { .. } => self.on_failed(key, report),
            Report::Exited { status, user_us, sys_us, max_rss_kb } => {
                self.on_exit(key, status, user_us, sys_us, max_rss_kb);
            }
        }
    }

    /// The shim is dead and reaped. Normally everything is over; if it was killed, its children are ours now.
    fn on_shim_reaped(&mut self, key: u32) {
        let Some(proc) = self.procs.get_mut(&key) else { return };
        proc.shim = 0;
        if proc.pid == 0 {
            return self.on_failed(key, Report::Failed { stage: shim::Stage::Fork, errno: libc::ECHILD });
        }
        let ours = std::process::id() as i32;
        if proc.exit.is_none() && crate::proctree::look(proc.pid).is_none_or(|entry| entry.ppid != ours) {
            let wall_ms = proc.started.elapsed().as_millis() as u64;
            self.finish(key, Exit { wall_ms, ..Exit::default() });
        }
        self.after_kill(key);
    }

    pub fn on_exit(&mut self, key: u32, status: i32, user_us: u64, sys_us: u64, max_rss_kb: u64) {
        let Some(proc) = self.procs.get(&key) else { return };
        let code = libc::WIFEXITED(status).then(|| libc::WEXITSTATUS(status));
        let signal = libc::WIFSIGNALED(status).then(|| libc::WTERMSIG(status));
        let suspect = !proc.killed_by_us && (signal == Some(libc::SIGKILL) || code == Some(137));
        let wall_ms = proc.started.elapsed().as_millis() as u64;
        let oom = suspect && self.oom_struck();
        self.finish(key, Exit { code, signal, oom, wall_ms, user_us, sys_us, max_rss_kb });
    }

    fn finish(&mut self, key: u32, exit: Exit) {
        let Some(proc) = self.procs.get_mut(&key) else { return };
        if let Some(timeout) = proc.timeout.take().and_then(|t| proc.started.checked_add(t)) {
            self.timers.remove(&(timeout, Timer::Timeout(key)));
        }
        proc.ended(exit);
        self.on_output(key, 0);
        self.on_output(key, 1);
        self.after_kill(key);
    }

    /// Whether the kernel's counter of out-of-memory kills in this sandbox has moved since it was last read.
    fn oom_struck(&mut self) -> bool {
        let now = read_oom_kills();
        let before = std::mem::replace(&mut self.oom_kills, now);
        matches!((before, now), (Some(before), Some(now)) if now > before)
    }

    fn on_signal(&mut self) {
        while let Some((signal, sender)) = sys::next_signal(self.signals.as_raw_fd()) {
            match signal {
                libc::SIGCHLD => {}
                // From inside the sandbox nobody may end it this way; from outside the sender shows as 0.
                _ if sender == 0 || std::process::id() != 1 => self.leaving = Some("signal".into()),
                _ => {}
            }
        }
        self.reap();
    }

    fn reap(&mut self) {
        loop {
            let mut status = 0;
            let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
            let pid = unsafe { libc::wait4(-1, &raw mut status, libc::WNOHANG, &raw mut usage) };
            if pid <= 0 {
                return;
            }
            if self.spare.as_ref().is_some_and(|s| s.pid == pid) {
                self.spare = None;
                continue;
            }
            let shim = self.procs.values().find(|p| p.shim == pid).map(|p| p.key);
            if let Some(key) = shim {
                // Its last words may still be in the socket.
                self.on_control(key);
                self.on_shim_reaped(key);
                continue;
            }
            let main = self.procs.values().find(|p| p.pid == pid && p.exit.is_none()).map(|p| p.key);
            if let Some(key) = main {
                let micros = |t: libc::timeval| t.tv_sec as u64 * 1_000_000 + t.tv_usec as u64;
                self.on_exit(key, status, micros(usage.ru_utime), micros(usage.ru_stime), usage.ru_maxrss as u64);
            }
        }
    }

    fn on_timeout(&mut self, key: u32) {
        let Some(proc) = self.procs.get_mut(&key) else { return };
        if proc.exit.is_none() {
            proc.timed_out = true;
            self.kill_tree(key);
        }
    }

    fn on_start_timeout(&mut self, key: u32) {
        if let Some(proc) = self.procs.get(&key).filter(|p| p.pid == 0 && p.shim > 0) {
            let _ = sys::kill(proc.shim, libc::SIGKILL);
        }
    }

    pub fn cancel_process(&mut self, key: u32) {
        let Some(proc) = self.procs.get_mut(&key) else { return };
        if proc.exit.is_none() {
            proc.cancelled = true;
        }
        proc.dropping = true;
        self.kill_tree(key);
        self.refresh(key);
    }

    /// Begins to kill the tree of a process; does nothing when that is under way.
    pub fn kill_tree(&mut self, key: u32) {
        let Some(proc) = self.procs.get_mut(&key) else { return };
        if proc.killing.is_some() {
            return;
        }
        if proc.exit.is_none() {
            proc.killed_by_us = true;
        }
        proc.killing = Some(Killing { since: Instant::now(), steps: 0 });
        self.kill_step(key);
    }

    fn kill_step(&mut self, key: u32) {
        let Some(proc) = self.procs.get_mut(&key) else { return };
        if proc.killing.is_none() {
            return;
        }
        if proc.pid == 0 && proc.shim > 0 {
            // Not started yet: the start is awaited, or its own time limit ends it.
            return self.at(Instant::now() + Duration::from_millis(2), Timer::Kill(key));
        }
        match proc.kill_step() {
            Step::Again(pause) => self.at(Instant::now() + pause, Timer::Kill(key)),
            Step::Dead => self.after_kill(key),
            Step::GaveUp => {
                let waiters = std::mem::take(&mut proc.kill_waiters);
                for stream in waiters {
                    self.answer(stream, Err(OpError::new("internal", "processes of the tree do not die")));
                }
            }
        }
    }

    /// Answers those who wait for the death of a tree.
    fn after_kill(&mut self, key: u32) {
        let Some(proc) = self.procs.get_mut(&key) else { return };
        if proc.killing.is_some() || proc.exit.is_none() {
            return;
        }
        for stream in std::mem::take(&mut proc.kill_waiters) {
            self.answer(stream, Ok(map([])));
        }
    }

    /// Nothing of the process is left: its rings shrink, and old records make room.
    fn on_over(&mut self, key: u32) {
        let Some(proc) = self.procs.get_mut(&key) else { return };
        for out in &mut proc.outs {
            out.ring.shrink();
        }
        if proc.forgotten {
            self.drop_record(key);
        }
        self.trim_records();
    }

    fn trim_records(&mut self) {
        let busy: HashSet<u32> = self.viewed();
        let mut over: Vec<(u32, bool, usize)> = self
            .procs
            .values()
            .filter(|p| p.is_over() && !busy.contains(&p.key))
            .map(|p| (p.key, p.reported, p.outs.iter().map(|o| o.ring.footprint()).sum()))
            .collect();
        over.sort_unstable();
        let mut bytes: usize = over.iter().map(|(_, _, size)| size).sum();
        let mut count = over.len();
        // Those whose end the host has seen go first; the others stay as long as there is any room.
        for (key, reported, size) in over {
            if (count > KEPT_FINISHED && reported) || count > self.boot.max_procs {
                self.drop_record(key);
                count -= 1;
                bytes -= size;
            } else if bytes > KEPT_RING_BYTES {
                if let Some(proc) = self.procs.get_mut(&key) {
                    proc.outs.iter_mut().for_each(|out| out.ring.clear());
                }
                bytes -= size;
            }
        }
    }

    fn viewed(&self) -> HashSet<u32> {
        self.streams.values().filter_map(|s| if let Stream::View(view) = s { Some(view.key) } else { None }).collect()
    }

    pub fn drop_record(&mut self, key: u32) {
        let Some(proc) = self.procs.remove(&key) else { return };
        if self.ids.get(&proc.id) == Some(&key) {
            self.ids.remove(&proc.id);
        }
        let mark = mark_of(&proc.id);
        if self.past.insert(mark) {
            self.past_order.push_back(mark);
        }
        if self.past_order.len() > KEPT_IDS {
            if let Some(old) = self.past_order.pop_front() {
                self.past.remove(&old);
            }
        }
    }

    // Output to the host

    /// Keeps interest in the connection in step with what waits.
    pub fn refresh_link(&mut self) {
        let Some(link) = &mut self.link else { return };
        let read = if link.queued() < MOST_CONTROL { IN } else { 0 };
        let wanted = read | if link.blocked { OUT } else { 0 };
        self.poll.set(link.raw(), token::of(token::LINK, 0), link.interest, wanted);
        link.interest = wanted;
    }

    /// The last words, and then nothing is left alive.
    fn leave(&mut self) {
        let reason = self.leaving.clone().unwrap_or_default();
        kill_everything();
        if let Some(link) = &mut self.link {
            let bye = map([("reason", Value::from(reason.as_str()))]);
            link.push(wire::control(0, Kind::Bye, &bye).unwrap_or_default());
            unsafe {
                // A peer that does not read must not keep the sandbox alive.
                let limit = libc::timeval { tv_sec: 1, tv_usec: 0 };
                libc::setsockopt(link.raw(), libc::SOL_SOCKET, libc::SO_SNDTIMEO, (&raw const limit).cast(), 16);
                let flags = libc::fcntl(link.raw(), libc::F_GETFL);
                libc::fcntl(link.raw(), libc::F_SETFL, flags & !libc::O_NONBLOCK);
            }
            let _ = link.flush();
        }
    }
}

/// Kills every process of the sandbox but the agent, until none is left.
pub fn kill_everything() {
    let me = std::process::id() as i32;
    for _ in 0..200 {
        let living: Vec<i32> = {
            let table = crate::proctree::scan();
            crate::proctree::below(&table, &[me], None).iter().filter(|e| !e.is_dead()).map(|e| e.pid).collect()
        };
        if me == 1 {
            let _ = sys::kill(-1, libc::SIGKILL);
        }
        if living.is_empty() {
            return;
        }
        for pid in &living {
            let _ = sys::kill(*pid, libc::SIGSTOP);
        }
        for pid in &living {
            let _ = sys::kill(*pid, libc::SIGKILL);
        }
        while unsafe { libc::waitpid(-1, std::ptr::null_mut(), libc::WNOHANG) } > 0 {}
        std::thread::sleep(Duration::from_millis(2));
    }
}

pub fn mark_of(id: &str) -> u64 {
    use std::hash::{DefaultHasher, Hash, Hasher};
    let mut hasher = DefaultHasher::new();
    id.hash(&mut hasher);
    hasher.finish()
}

/// The sandbox's own count of out-of-memory kills, where its cgroup can be seen from inside.
fn read_oom_kills() -> Option<u64> {
    ["/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"].iter().find_map(|path| {
        let text = std::fs::read_to_string(path).ok()?;
        text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
    })
}
