//! Keeping a Node waiting: when one is started, when it is given up, which run gets it. Unlike a warm Python it is used up by
//! one run, and it is large: so there is one only where Node is run, for a while, and where there is ample memory.

use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use rmpv::Value;

use super::{token, Agent, Timer};
use crate::launch::Plan;
use crate::op::map;
use crate::proctree;
use crate::shim::{self, Report, REPORT_BYTES};
use crate::sys::{self, IN};
use crate::warm::node::{self, Waiting};
use crate::warm::Interpreter;

pub const CONTROL: u32 = 2;
pub const VOICE: u32 = 3;
/// A run that was served has the machine for itself for this long, before the next one to wait is started.
const AFTER_HIT: Duration = Duration::from_millis(30);
/// The same for one that started Node itself; a sandbox made for one run never starts a second one.
const AFTER_MISS: Duration = Duration::from_millis(200);
/// One that nobody has asked for so long gives its memory back.
const IDLE: Duration = Duration::from_secs(60);
/// How often the memory of the sandbox is looked at meanwhile.
const LOOK: Duration = Duration::from_secs(1);
const MOST_DEATHS: u32 = 5;
/// Memory of one spare, with a margin.
const SIZE_MB: u64 = 120;

/// State of Node in this sandbox.
#[derive(Default)]
pub struct NodeWarm {
    waiting: Option<Waiting>,
    /// When Node was last run, or one was started for the first run.
    asked: Option<Instant>,
    /// To be started when it is quiet.
    wanted: Option<Interpreter>,
    /// One like it was ready once, so that another need not be waited for.
    proven: Option<Interpreter>,
    deaths: u32,
    hits: u64,
    misses: u64,
}

impl NodeWarm {
    fn is_idle(&self) -> bool {
        self.asked.is_none_or(|when| when.elapsed() >= IDLE)
    }

    pub fn pids(&self) -> impl Iterator<Item = i32> + '_ {
        self.waiting.iter().flat_map(|w| [w.shim.pid, w.main])
    }

    pub fn value(&self) -> Value {
        map([
            ("hits", self.hits.into()),
            ("misses", self.misses.into()),
            ("ready", self.waiting.as_ref().is_some_and(|w| w.ready && w.main > 0).into()),
            ("deaths", self.deaths.into()),
        ])
    }
}

impl Agent {
    /// Starts one for whoever claims this sandbox, where the operator wants that.
    pub(super) fn node_early(&mut self) {
        if self.warm.wish.node && self.warm.wish.node_early {
            let found = self.launcher.look_up(b"node").ok();
            self.node.wanted = found.and_then(|found| Interpreter::look(c"node", &found));
            self.node.asked = Some(Instant::now());
            self.at(Instant::now(), Timer::Node);
        }
    }

    /// One that waits for just such a run as this.
    pub(super) fn take_node(&mut self, plan: &Plan) -> Option<Waiting> {
        if !self.warm.wish.node {
            return None;
        }
        let interpreter = node::asked(plan)?;
        self.node.asked = Some(Instant::now());
        let taken = self.find_waiting(&interpreter, plan);
        let pause = match taken {
            Some(_) => AFTER_HIT,
            None => AFTER_MISS,
        };
        self.node.misses += u64::from(taken.is_none());
        if self.node.waiting.is_none() && self.node.deaths < MOST_DEATHS {
            self.node.wanted = Some(interpreter);
            self.at(Instant::now() + pause, Timer::Node);
        }
        taken
    }

    fn find_waiting(&mut self, interpreter: &Interpreter, plan: &Plan) -> Option<Waiting> {
        let waiting = self.node.waiting.as_ref()?;
        if waiting.interpreter.replaced_by(interpreter) {
            self.end_node();
            return None;
        }
        if !waiting.ready || waiting.interpreter != *interpreter || !waiting.suits(&plan.spec.env) {
            return None;
        }
        let waiting = self.node.waiting.take()?;
        self.poll.set(waiting.shim.control.as_raw_fd(), token::of(token::WARM, CONTROL), IN, 0);
        if waiting.main > 0 && !self.is_sound(waiting.shim.pid, waiting.main) {
            waiting.end();
            return None;
        }
        Some(waiting)
    }

    /// A run got it; the next one is started when this one has had its time.
    pub(super) fn node_used(&mut self) {
        self.node.hits += 1;
    }

    pub(super) fn on_node_timer(&mut self) {
        let Some(interpreter) = self.node.wanted.take() else { return };
        if !self.warm.wish.node || self.node.waiting.is_some() || self.node.deaths >= MOST_DEATHS {
            return;
        }
        let room = self.warm.wish.memory_mb / 2;
        if room < SIZE_MB || self.memory_used_mb() + SIZE_MB > room {
            if room >= SIZE_MB && !self.node.is_idle() {
                self.node.wanted = Some(interpreter);
                self.at(Instant::now() + LOOK, Timer::Node);
            }
            return;
        }
        let announce = self.node.proven.as_ref() != Some(&interpreter);
        let spare = self.spare.take();
        match Waiting::start(&mut self.launcher, interpreter, announce, spare) {
            Ok(waiting) => {
                self.poll.set(waiting.shim.control.as_raw_fd(), token::of(token::WARM, CONTROL), 0, IN);
                if announce {
                    self.poll.set(waiting.voice(), token::of(token::WARM, VOICE), 0, IN);
                }
                self.node.waiting = Some(waiting);
                self.at(Instant::now() + LOOK, Timer::NodeLook);
            }
            Err(_) => self.node.deaths += 1,
        }
    }

    /// Its shim tells of its start and its end.
    pub(super) fn on_node_control(&mut self) {
        let Some(waiting) = &mut self.node.waiting else { return };
        let mut raw = [0; REPORT_BYTES];
        match sys::read(waiting.shim.control.as_raw_fd(), &mut raw) {
            Ok(REPORT_BYTES) => match shim::decode_report(&raw) {
                Some(Report::Started { pid }) if waiting.main == 0 => return waiting.started(pid),
                Some(Report::Born { .. } | Report::Started { .. } | Report::Ready { .. }) => return,
                Some(Report::Exited { status, .. }) if status == node::UNSUPPORTED << 8 => {
                    self.node.deaths = MOST_DEATHS
                }
                _ => {}
            },
            Err(e) if sys::would_block(&e) => return,
            _ => {}
        }
        self.node.deaths += 1;
        self.end_node();
    }

    /// The first of its kind is ready.
    pub(super) fn on_node_voice(&mut self) {
        let Some(waiting) = &mut self.node.waiting else { return };
        let fd = waiting.voice();
        let said = sys::read(fd, &mut [0; 1]);
        if said.as_ref().is_err_and(sys::would_block) {
            return;
        }
        self.poll.set(fd, token::of(token::WARM, VOICE), IN, 0);
        if matches!(said, Ok(1)) {
            waiting.ready = true;
            self.node.proven = Some(waiting.interpreter.clone());
        }
    }

    /// From time to time while one waits: nobody has come, or others need the memory more.
    pub(super) fn on_node_look(&mut self) {
        if self.node.waiting.is_none() {
            return;
        }
        let busy = self.procs.values().any(|p| p.exit.is_none());
        if self.node.is_idle() || busy && self.memory_used_mb() > self.warm.wish.memory_mb / 4 * 3 {
            return self.end_node();
        }
        self.at(Instant::now() + LOOK, Timer::NodeLook);
    }

    /// All memory of all processes: those that share some are counted in full, so this is never too little.
    fn memory_used_mb(&self) -> u64 {
        proctree::scan().iter().map(|e| e.rss_pages).sum::<u64>() * proctree::page_kb() / 1024
    }

    pub(super) fn end_node(&mut self) {
        if let Some(waiting) = self.node.waiting.take() {
            waiting.end();
        }
    }

    /// The settings or the environment are others now.
    pub(super) fn node_changed(&mut self, same: bool) {
        let Ok(plain) = self.launcher.plain() else { return };
        if same && self.node.waiting.as_ref().is_none_or(|w| w.suits(&plain.env)) {
            return;
        }
        if let Some(waiting) = &self.node.waiting {
            self.node.wanted = Some(waiting.interpreter.clone());
            self.at(Instant::now() + AFTER_MISS, Timer::Node);
        }
        self.end_node();
    }

    /// Whether the dead child was the shim of a waiting one.
    pub(super) fn node_reaped(&mut self, pid: i32) -> bool {
        let Some(waiting) = self.node.waiting.as_ref().filter(|w| w.shim.pid == pid) else { return false };
        // Its last words may still be in the socket.
        if waiting.main > 0 {
            self.on_node_control();
        }
        if self.node.waiting.is_some() {
            self.node.deaths += 1;
            self.end_node();
        }
        true
    }
}
