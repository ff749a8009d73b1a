//! Processes while they run: their output and input, the reports of their shims, how they end and how they are killed.

use std::collections::HashSet;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use super::{token, Agent, Stream, Timer};
use crate::op::{map, OpError};
use crate::pipes::Got;
use crate::procs::{Exit, Killing, Proc, Step};
use crate::proctree;
use crate::shim::{self, Report, Shim, REPORT_BYTES};
use crate::sys::{self, IN, OUT};
use crate::wire;

/// A shim that has not started its process by then is given up.
const START_TIME: Duration = Duration::from_secs(20);
/// So long a shim may take to tell that its killed process has ended.
const TELL_TIME: Duration = Duration::from_secs(5);
const MOST_REPORTS: usize = 16;
/// A command that runs for longer does not notice when the next one's spares are made beside it.
const FIRST: Duration = Duration::from_millis(25);
/// A command that has ended leaves a shim that can be the next spare, a moment later.
const LEAVES: Duration = Duration::from_millis(1);

impl Agent {
    /// Makes what the next commands will find ready, when that takes no processor from a command that has just begun.
    pub(super) fn replenish(&mut self) {
        if self.calm_at.is_some() {
            return;
        }
        if self.spare.is_none() {
            self.spare = shim::spare().ok();
        }
        self.replenish_warm();
    }

    pub(super) fn stand_back(&mut self) {
        self.stand_back_for(FIRST);
    }

    fn stand_back_for(&mut self, time: Duration) {
        let until = Instant::now() + time;
        self.come_back();
        self.calm_at = Some(until);
        self.at(until, Timer::Calm);
    }

    fn come_back(&mut self) {
        if let Some(old) = self.calm_at.take() {
            self.timers.remove(&(old, Timer::Calm));
        }
    }

    /// Processes that are the agent's own and not the sandbox's.
    pub(super) fn shim_pids(&self) -> HashSet<i32> {
        let shims = self.procs.values().map(|p| p.shim).chain(self.spare.as_ref().map(|s| s.pid));
        shims.chain(self.warm.pids()).chain(self.node.pids()).filter(|pid| *pid > 0).collect()
    }

    pub(super) fn add_proc(&mut self, mut proc: Proc) -> u32 {
        self.next_key = self.next_key.wrapping_add(1);
        let key = self.next_key;
        proc.key = key;
        if let Some(control) = &proc.control {
            self.poll.set(control.as_raw_fd(), token::of(token::CONTROL, key), 0, IN);
        }
        self.ids.insert(proc.id.clone(), key);
        let start_by = proc.started + START_TIME;
        self.procs.insert(key, proc);
        self.at(start_by, Timer::Start(key));
        self.watch_memory();
        key
    }

    /// Keeps interest in the descriptors of a process in step with what can be done.
    pub(super) fn refresh(&mut self, key: u32) {
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

    pub(super) fn on_output(&mut self, key: u32, which: usize) {
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

    pub(super) fn on_stdin(&mut self, key: u32) {
        let Some(stdin) = self.procs.get_mut(&key).and_then(|p| p.stdin.as_mut()) else { return };
        stdin.write();
        self.refresh(key);
        self.grant_stdin(key);
    }

    /// Gives back credit for what the process took.
    pub(super) fn grant_stdin(&mut self, key: u32) {
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

    pub(super) fn end_stdin(&mut self, key: u32) {
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

    pub(super) fn on_control(&mut self, key: u32) {
        // A few at a time: who has got hold of the other end may send without end.
        for _ in 0..MOST_REPORTS {
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

    pub(super) fn on_report(&mut self, key: u32, report: Report) {
        match report {
            Report::Exited { status, user_us, sys_us, max_rss_kb } => {
                self.on_exit(key, status, user_us, sys_us, max_rss_kb);
            }
            Report::Idle => self.on_idle(key),
            // It has started once, whatever is said of that later.
            _ if self.procs.get(&key).is_none_or(|p| p.pid > 0) => {}
            Report::Born { pid } => {
                if let Some(proc) = self.procs.get_mut(&key) {
                    proc.born = pid;
                }
            }
            Report::Started { pid } => self.on_started(key, pid),
            Report::Ready { .. } => {}
            Report::Failed { .. } => self.on_failed(key, report),
        }
    }

    /// Nothing is left below the shim, which may serve the next command. One that was stopped for a kill is let go.
    fn on_idle(&mut self, key: u32) {
        let Some(proc) = self.procs.get_mut(&key).filter(|p| p.exit.is_some() && p.shim > 0) else { return };
        let Some(control) = proc.control.take() else { return };
        self.poll.set(control.as_raw_fd(), token::of(token::CONTROL, key), IN, 0);
        if proc.killed_by_us || proc.killing.is_some() || proc.pty || self.spare.is_some() {
            return;
        }
        let pid = std::mem::take(&mut proc.shim);
        self.spare = Some(Shim { pid, control });
        self.come_back();
        self.after_kill(key);
    }

    /// The shim is dead and reaped. Normally everything is over; if it was killed, its children are ours now.
    pub(super) fn on_shim_reaped(&mut self, key: u32) {
        let Some(proc) = self.procs.get_mut(&key) else { return };
        proc.shim = 0;
        if proc.pid == 0 && proc.born > 0 {
            // The process was quicker to kill its shim than the shim to tell of the start.
            let pid = proc.born;
            self.on_started(key, pid);
        }
        let Some(proc) = self.procs.get_mut(&key) else { return };
        if proc.pid == 0 {
            return self.on_failed(key, Report::Failed { stage: shim::Stage::Fork, errno: libc::ECHILD });
        }
        let ours = std::process::id() as i32;
        if proc.exit.is_none() && proctree::look(proc.pid).is_none_or(|entry| entry.ppid != ours) {
            let wall_ms = proc.started.elapsed().as_millis() as u64;
            self.finish(key, Exit { wall_ms, ..Exit::default() });
        }
        self.after_kill(key);
    }

    pub(super) fn on_exit(&mut self, key: u32, status: i32, user_us: u64, sys_us: u64, max_rss_kb: u64) {
        let Some(proc) = self.procs.get(&key) else { return };
        let code = libc::WIFEXITED(status).then(|| libc::WEXITSTATUS(status));
        let signal = libc::WIFSIGNALED(status).then(|| libc::WTERMSIG(status));
        let suspect = !proc.killed_by_us && (signal == Some(libc::SIGKILL) || code == Some(137));
        let wall_ms = proc.started.elapsed().as_millis() as u64;
        let starved = proc.starved;
        let oom = suspect && self.oom_struck() || starved;
        self.finish(key, Exit { code, signal, oom, wall_ms, user_us, sys_us, max_rss_kb });
    }

    pub(super) fn finish(&mut self, key: u32, exit: Exit) {
        let Some(proc) = self.procs.get_mut(&key) else { return };
        if let Some(timeout) = proc.timeout.take().and_then(|t| proc.started.checked_add(t)) {
            self.timers.remove(&(timeout, Timer::Timeout(key)));
        }
        proc.ended(exit);
        if self.calm_at.is_some() {
            self.stand_back_for(LEAVES);
        }
        self.on_output(key, 0);
        self.on_output(key, 1);
        self.after_kill(key);
    }

    /// Whether the kernel's counter of out-of-memory kills in this sandbox has moved since it was last read.
    pub(super) fn oom_struck(&mut self) -> bool {
        let now = read_oom_kills();
        let before = std::mem::replace(&mut self.oom_kills, now);
        matches!((before, now), (Some(before), Some(now)) if now > before)
    }

    pub(super) fn on_signal(&mut self) {
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

    pub(super) fn reap(&mut self) {
        loop {
            let mut status = 0;
            let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
            let pid = unsafe { libc::wait4(-1, &raw mut status, libc::WNOHANG, &raw mut usage) };
            if pid <= 0 {
                return;
            }
            if libc::WIFSTOPPED(status) {
                sys::untrace(pid, libc::WSTOPSIG(status));
                continue;
            }
            if self.spare.as_ref().is_some_and(|s| s.pid == pid) {
                self.spare = None;
                continue;
            }
            if self.warm_reaped(pid, status) || self.node_reaped(pid) {
                continue;
            }
            let shim = self.procs.values().find(|p| p.shim == pid).map(|p| p.key);
            if let Some(key) = shim {
                // Its last words may still be in the socket.
                self.on_control(key);
                self.on_shim_reaped(key);
                continue;
            }
            // It may be one whose start is told in a socket that was not read yet.
            let starting: Vec<u32> = self.procs.values().filter(|p| p.pid == 0).map(|p| p.key).collect();
            starting.into_iter().for_each(|key| self.on_control(key));
            let is_main = |p: &&Proc| p.exit.is_none() && (p.pid == pid || p.born == pid);
            let main = self.procs.values().find(is_main).map(|p| (p.key, p.pid == 0));
            if let Some((key, untold)) = main {
                if untold {
                    self.on_started(key, pid);
                }
                let micros = |t: libc::timeval| t.tv_sec as u64 * 1_000_000 + t.tv_usec as u64;
                self.on_exit(key, status, micros(usage.ru_utime), micros(usage.ru_stime), usage.ru_maxrss as u64);
            }
        }
    }

    pub(super) fn on_timeout(&mut self, key: u32) {
        let Some(proc) = self.procs.get_mut(&key) else { return };
        if proc.exit.is_none() {
            proc.timed_out = true;
            self.kill_tree(key);
        }
    }

    pub(super) fn forget_start(&mut self, key: u32) {
        if let Some(proc) = self.procs.get(&key) {
            self.timers.remove(&(proc.started + START_TIME, Timer::Start(key)));
        }
    }

    pub(super) fn on_start_timeout(&mut self, key: u32) {
        let silent = |p: &&Proc| p.shim > 0 && (p.pid == 0 || p.exit.is_none() && p.killed_by_us);
        if let Some(proc) = self.procs.get(&key).filter(silent) {
            let _ = sys::kill(proc.shim, libc::SIGKILL);
        }
    }

    pub(super) fn cancel_process(&mut self, key: u32) {
        let Some(proc) = self.procs.get_mut(&key) else { return };
        if proc.exit.is_none() {
            proc.cancelled = true;
        }
        proc.dropping = true;
        self.kill_tree(key);
        self.refresh(key);
    }

    /// Begins to kill the tree of a process; does nothing when that is under way.
    pub(super) fn kill_tree(&mut self, key: u32) {
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

    pub(super) fn kill_step(&mut self, key: u32) {
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
            Step::Dead => {
                if proc.exit.is_none() && proc.shim > 0 {
                    // Its shim now tells of the end. One that does not is ended too, and that is told in its place.
                    self.at(Instant::now() + TELL_TIME, Timer::Start(key));
                }
                self.after_kill(key);
            }
            Step::GaveUp => {
                let waiters = std::mem::take(&mut proc.kill_waiters);
                for stream in waiters {
                    self.answer(stream, Err(OpError::new("internal", "processes of the tree do not die")));
                }
            }
        }
    }

    /// Answers those who wait for the death of a tree.
    pub(super) fn after_kill(&mut self, key: u32) {
        let Some(proc) = self.procs.get_mut(&key) else { return };
        if proc.killing.is_some() || proc.exit.is_none() {
            return;
        }
        for stream in std::mem::take(&mut proc.kill_waiters) {
            self.answer(stream, Ok(map([])));
        }
    }
}

/// The sandbox's own count of out-of-memory kills, where its cgroup can be seen from inside.
pub(super) fn read_oom_kills() -> Option<u64> {
    ["/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"].iter().find_map(|path| {
        let text = std::fs::read_to_string(path).ok()?;
        text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
    })
}
