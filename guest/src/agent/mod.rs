//! The agent: one thread, one epoll loop. Here are its state, the loop and the timers. `connect` has the connections,
//! `frames` what comes from the host, `ops`, `acting` and `about` the operations, `pump` what flows to the host, `running`
//! and `records` the processes, `memory` what they use where the kernel does not watch it.

mod about;
mod acting;
mod connect;
mod frames;
mod memory;
mod ops;
mod pump;
mod records;
mod renewing;
mod running;
mod waiting;
mod warming;

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
use crate::link::{Link, Pending};
use crate::op::map;
use crate::procs::Proc;
use crate::shim::Shim;
use crate::sys::{self, Poll, IN};
use crate::wire::{self, Kind};
pub use renewing::wipe_bytes;
use waiting::NodeWarm;
use warming::Warm;

pub const FEATURES: &[&str] =
    &["exec", "pty", "attach", "files", "forward", "watch", "tar", "configure", "warm", "filter", "renew"];
/// The reader of a process over a stream.
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
    Calm,
    Warm,
    WarmLook,
    Node,
    NodeLook,
    Hello(u32),
    Dial,
    Memory,
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
    pub const WARM: u64 = 11;

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
    /// The memory is about to be saved, or has just been: dial often, keep nothing warm.
    quiet: bool,
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
    /// A command that has just begun has the processors to itself until it ends, and at most until then.
    calm_at: Option<Instant>,
    warm: Warm,
    node: NodeWarm,
    timers: BTreeSet<(Instant, Timer)>,
    pub deadline: Option<Instant>,
    oom_kills: Option<u64>,
    watch: Option<memory::Watch>,
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
            dial_pause: connect::DIAL_FIRST,
            quiet: false,
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
            calm_at: None,
            warm: Warm::new(boot.warm.clone()),
            node: NodeWarm::default(),
            timers: BTreeSet::new(),
            deadline: None,
            oom_kills: running::read_oom_kills(),
            watch: memory::Watch::new(boot.memory),
            leaving: None,
            closing: false,
            boot,
        };
        agent.set_deadline(agent.boot.deadline_ms);
        if agent.boot.dial.is_some() {
            agent.at(now, Timer::Dial);
        }
        agent.warm_early();
        agent.node_early();
        Ok(agent)
    }

    /// Runs until the sandbox ends.
    pub fn run(&mut self) {
        let mut events = Vec::new();
        self.fire_timers(); // an agent that dials does so before its first fork, which takes long where it has to dial
        while self.leaving.is_none() {
            self.replenish();
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
                token::WARM => self.on_warm(id),
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
                Timer::Calm => self.calm_at = None,
                Timer::Warm => self.on_warm_timer(),
                Timer::WarmLook => self.on_warm_look(),
                Timer::Node => self.on_node_timer(),
                Timer::NodeLook => self.on_node_look(),
                Timer::Hello(id) => self.drop_pending(id),
                Timer::Dial => self.dial(),
                Timer::Memory => self.on_memory(),
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
