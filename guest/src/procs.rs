//! A process as the agent knows it: what it is, how it ended, and how its tree is killed.

use std::collections::HashSet;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rmpv::Value;

use crate::op::{map, text_or_bin};
use crate::pipes::{Out, Stdin};
use crate::proctree;
use crate::shim::REPORT_BYTES;
use crate::sys;

const ESCALATE: Duration = Duration::from_secs(10);
const GIVE_UP: Duration = Duration::from_secs(30);

/// How the main process ended.
#[derive(Debug, Clone, Default)]
pub struct Exit {
    pub code: Option<i32>,
    pub signal: Option<i32>,
    pub oom: bool,
    pub wall_ms: u64,
    pub user_us: u64,
    pub sys_us: u64,
    pub max_rss_kb: u64,
}

/// The killing of a tree, in steps: everything is stopped first so that nothing can fork away, then killed.
pub struct Killing {
    pub since: Instant,
    pub steps: u32,
}

/// The result of one step of the kill.
#[derive(Debug, PartialEq, Eq)]
pub enum Step {
    Dead,
    Again(Duration),
    GaveUp,
}

pub struct Proc {
    pub key: u32,
    pub id: String,
    pub argv: Vec<Vec<u8>>,
    pub programs: Vec<std::ffi::CString>,
    /// Pid of the shim, 0 when it is gone.
    pub shim: i32,
    pub control: Option<OwnedFd>,
    pub control_bytes: Vec<u8>,
    /// Pid of the main process, 0 before it has started.
    pub pid: i32,
    /// The same, already known while it is about to exec.
    pub born: i32,
    /// The session it was started in: its shim's, or on a terminal its own.
    pub session: i32,
    pub outs: [Out; 2],
    pub stdin: Option<Stdin>,
    pub pty: bool,
    pub detached: bool,
    /// Output that nobody waits for pushes the oldest out instead of blocking the process.
    pub dropping: bool,
    /// The stream whose reading decides how far output may go on.
    pub holder: Option<u32>,
    /// The stream that writes stdin.
    pub writer: Option<u32>,
    pub timeout: Option<Duration>,
    pub started: Instant,
    pub started_ms: u64,
    pub timed_out: bool,
    pub cancelled: bool,
    pub killed_by_us: bool,
    /// The agent has killed a process of its tree for want of memory.
    pub starved: bool,
    pub exit: Option<Exit>,
    pub killing: Option<Killing>,
    pub kill_waiters: Vec<u32>,
    pub forgotten: bool,
    /// The RESULT went out, so the host knows.
    pub reported: bool,
}

impl Proc {
    pub fn drops(&self) -> bool {
        self.dropping || self.forgotten
    }

    /// Nothing of it is left but the record.
    pub fn is_over(&self) -> bool {
        self.exit.is_some() && self.outs.iter().all(|out| out.fd.is_none())
    }

    /// The main process has ended and its output is known to the last byte.
    pub fn is_settled(&self) -> bool {
        self.exit.is_some() && self.outs.iter().all(|out| out.last.is_some())
    }

    /// Somebody else still holds an output stream of the ended process.
    pub fn is_held(&self) -> bool {
        self.exit.is_some() && self.outs.iter().any(|out| out.fd.is_some())
    }

    /// The connection is gone. What was sent may not have arrived, so all that the ring has is kept.
    pub fn detach_all(&mut self) {
        self.holder = None;
        self.writer = None;
        for out in &mut self.outs {
            out.floor = out.ring.start();
        }
    }

    /// One reader leaves.
    pub fn detach(&mut self, stream: u32) {
        if self.writer == Some(stream) {
            self.writer = None;
        }
        if self.holder == Some(stream) {
            self.holder = None;
        }
    }

    /// The next whole report of the shim.
    pub fn next_report(&mut self) -> Option<[u8; REPORT_BYTES]> {
        let raw = *self.control_bytes.first_chunk::<REPORT_BYTES>()?;
        self.control_bytes.drain(..REPORT_BYTES);
        Some(raw)
    }

    /// Writes down the end of the main process.
    pub fn ended(&mut self, exit: Exit) {
        if self.exit.is_some() {
            return;
        }
        self.exit = Some(exit);
        if let Some(stdin) = &mut self.stdin {
            stdin.close();
        }
        let pty = self.pty;
        for out in &mut self.outs {
            out.settle(pty);
        }
    }

    pub fn exit_value(&self) -> Option<Value> {
        let exit = self.exit.as_ref()?;
        let number = |n: Option<i32>| n.map_or(Value::Nil, Value::from);
        Some(map([
            ("code", number(exit.code)),
            ("signal", number(exit.signal)),
            ("timed_out", self.timed_out.into()),
            ("cancelled", self.cancelled.into()),
            ("oom", exit.oom.into()),
            ("killed_by_us", self.killed_by_us.into()),
            ("wall_ms", exit.wall_ms.into()),
            ("user_us", exit.user_us.into()),
            ("sys_us", exit.sys_us.into()),
            ("max_rss_kb", exit.max_rss_kb.into()),
        ]))
    }

    /// The answer to `exec` and `attach`.
    pub fn result_value(&self) -> Value {
        let [out, err] = &self.outs;
        map([
            ("exit", self.exit_value().unwrap_or(Value::Nil)),
            ("out", out.last.unwrap_or(out.ring.end()).into()),
            ("err", err.last.unwrap_or(err.ring.end()).into()),
            ("held", self.is_held().into()),
        ])
    }

    pub fn poll_value(&self) -> Value {
        let [out, err] = &self.outs;
        map([
            ("running", self.exit.is_none().into()),
            ("pid", self.pid.into()),
            ("exit", self.exit_value().unwrap_or(Value::Nil)),
            ("out", out.ring.end().into()),
            ("err", err.ring.end().into()),
            ("out_start", out.ring.start().into()),
            ("err_start", err.ring.start().into()),
            ("held", self.is_held().into()),
        ])
    }

    pub fn list_value(&self) -> Value {
        map([
            ("id", Value::from(self.id.as_str())),
            ("pid", self.pid.into()),
            ("argv", Value::Array(self.argv.iter().map(|arg| text_or_bin(arg)).collect())),
            ("running", self.exit.is_none().into()),
            ("exit", self.exit_value().unwrap_or(Value::Nil)),
            ("started_ms", self.started_ms.into()),
            ("pty", self.pty.into()),
            ("detached", self.detached.into()),
        ])
    }

    /// Living processes of the tree. The session it was started in counts too: where the kernel has no subreapers it
    /// is all that ties an orphan to its tree.
    pub fn tree(&self) -> Vec<i32> {
        let mut roots = Vec::new();
        if self.shim > 0 {
            roots.push(self.shim);
        }
        let alive = self.exit.is_none() && self.pid > 0;
        if self.shim == 0 && !alive {
            return Vec::new();
        }
        let table = proctree::scan();
        let session = (self.session > 0).then_some(self.session);
        let mut pids: Vec<i32> =
            proctree::below(&table, &roots, session).iter().filter(|e| !e.is_dead()).map(|e| e.pid).collect();
        if alive && !pids.contains(&self.pid) && table.iter().any(|e| e.pid == self.pid && !e.is_dead()) {
            pids.push(self.pid);
        }
        pids
    }

    /// One step of killing the tree. The shim is stopped meanwhile, so that no pid of the tree is given out anew.
    pub fn kill_step(&mut self) -> Step {
        let Some(killing) = &mut self.killing else { return Step::Dead };
        killing.steps += 1;
        let (steps, age) = (killing.steps, killing.since.elapsed());
        if self.shim > 0 {
            let _ = sys::kill(self.shim, libc::SIGSTOP);
        }
        let mut stopped: HashSet<i32> = HashSet::new();
        for _ in 0..4 {
            let fresh: Vec<i32> = self.tree().into_iter().filter(|pid| stopped.insert(*pid)).collect();
            if fresh.is_empty() {
                break;
            }
            for pid in fresh {
                let _ = sys::kill(pid, libc::SIGSTOP);
            }
        }
        for pid in &stopped {
            let _ = sys::kill(*pid, libc::SIGKILL);
        }
        if stopped.is_empty() || age > GIVE_UP {
            self.killing = None;
            if self.shim > 0 {
                let _ = sys::kill(self.shim, libc::SIGCONT);
            }
            return if stopped.is_empty() { Step::Dead } else { Step::GaveUp };
        }
        if age > ESCALATE && std::process::id() == 1 {
            // The tree does not die one by one: the whole sandbox goes.
            let _ = sys::kill(-1, libc::SIGKILL);
        }
        Step::Again(Duration::from_millis(1 << steps.min(5)))
    }
}
