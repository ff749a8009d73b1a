//! Operations that act on processes: signals, killing, stdin, terminal size, forgetting.

use std::os::fd::{AsRawFd, OwnedFd};

use rmpv::Value;

use super::ops::Outcome;
use super::{Agent, Stream};
use crate::launch;
use crate::op::{map, OpError, Req};
use crate::pipes::STDIN_WINDOW;
use crate::procs::Proc;
use crate::proctree;
use crate::sys;

impl Agent {
    pub(super) fn op_signal(&mut self, req: &Req) -> Outcome {
        let number = req.u64("signal")?;
        let signal = i32::try_from(number)
            .ok()
            .filter(|n| (0..=64).contains(n))
            .ok_or_else(|| OpError::invalid("no such signal"))?;
        let group = req.opt_str("group")?.unwrap_or("process").to_owned();
        let proc = self.find_mut(req)?;
        if proc.pid == 0 || (proc.exit.is_some() && group != "tree") {
            return Err(OpError::new("not_found", "the process has ended"));
        }
        let targets = match group.as_str() {
            "process" => vec![proc.pid],
            "tree" => proc.tree(),
            "session" => {
                let (session, shim) = (proc.session, proc.shim);
                let member = |e: &&proctree::Entry| e.session == session && e.pid != shim && !e.is_dead();
                proctree::scan().iter().filter(member).map(|e| e.pid).collect()
            }
            "foreground" => match foreground_target(proc, signal)? {
                Some(pid) => vec![pid],
                None => return Ok(Some(map([]))),
            },
            _ => return Err(OpError::invalid("`group` must be process, session, tree or foreground")),
        };
        let mut reached = false;
        for pid in targets {
            reached |= sys::kill(pid, signal).is_ok();
        }
        if !reached {
            return Err(OpError::new("not_found", "the process has ended"));
        }
        if signal == libc::SIGKILL && proc.exit.is_none() {
            proc.killed_by_us = true;
        }
        Ok(Some(map([])))
    }

    pub(super) fn op_kill(&mut self, stream: u32, req: &Req) -> Outcome {
        let proc = self.find_mut(req)?;
        let key = proc.key;
        if proc.exit.is_some() && proc.shim == 0 {
            return Ok(Some(map([])));
        }
        proc.kill_waiters.push(stream);
        self.streams.insert(stream, Stream::Waiting);
        self.kill_tree(key);
        Ok(None)
    }

    pub(super) fn op_stdin(&mut self, req: &Req) -> Outcome {
        let data = req.opt_bytes("data")?.unwrap_or_default().to_vec();
        let eof = req.opt_bool("eof", false)?;
        let proc = self.find_mut(req)?;
        let key = proc.key;
        if proc.exit.is_some() {
            return Err(OpError::new("not_found", "the process has ended"));
        }
        if proc.writer.is_some() {
            return Err(OpError::new("busy", "an attachment has the stdin of the process"));
        }
        let Some(stdin) = proc.stdin.as_mut().filter(|s| !s.eof && s.fd.is_some()) else {
            return Err(OpError::invalid("the process has no open stdin"));
        };
        let room = (STDIN_WINDOW as usize).saturating_sub(stdin.queued);
        let taken = data.get(..room.min(data.len())).unwrap_or_default();
        stdin.push(taken);
        let written = taken.len();
        if eof && written == data.len() {
            self.end_stdin(key);
        } else {
            self.on_stdin(key);
        }
        Ok(Some(map([("written", (written as u64).into())])))
    }

    pub(super) fn op_resize(&mut self, req: &Req) -> Outcome {
        let size = launch::window(req)?;
        let proc = self.find_mut(req)?;
        let [out, _] = &proc.outs;
        match &out.fd {
            Some(master) if proc.pty => launch::resize(master, size)?,
            _ if proc.pty => return Err(OpError::new("not_found", "the terminal is closed")),
            _ => return Err(OpError::invalid("the process has no terminal")),
        }
        Ok(Some(map([])))
    }

    pub(super) fn op_forget(&mut self, req: &Req) -> Outcome {
        let proc = self.find_mut(req)?;
        if proc.exit.is_none() {
            return Err(OpError::new("busy", "the process is running"));
        }
        let (key, id) = (proc.key, proc.id.clone());
        if proc.is_over() {
            self.drop_record(key);
        } else {
            // A child still writes to the pipe: closing it would kill that child.
            proc.forgotten = true;
            proc.outs.iter_mut().for_each(|out| out.ring.clear());
            self.ids.remove(&id);
            self.refresh(key);
        }
        Ok(Some(map([])))
    }

    /// Kills all but the agent and its shims, which then report and end by themselves.
    pub(super) fn op_killall(&mut self) -> Value {
        for proc in self.procs.values_mut().filter(|p| p.exit.is_none()) {
            proc.killed_by_us = true;
        }
        let me = std::process::id() as i32;
        let spared = self.shim_pids();
        let mut killed = 0u64;
        for _ in 0..100 {
            let table = proctree::scan();
            let living: Vec<i32> = proctree::below(&table, &[me], None)
                .iter()
                .filter(|e| !e.is_dead() && !spared.contains(&e.pid))
                .map(|e| e.pid)
                .collect();
            if living.is_empty() {
                break;
            }
            killed = killed.max(living.len() as u64);
            for signal in [libc::SIGSTOP, libc::SIGKILL] {
                for pid in &living {
                    let _ = sys::kill(*pid, signal);
                }
            }
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        map([("killed", killed.into())])
    }
}

/// Returns the target of a signal to the foreground; `None` when the terminal itself has sent it.
///
/// gVisor does not tell the foreground group to the owner of the terminal. There the terminal is made to send the signals
/// that have a key, and others reach the foreground only where all processes of the session are in one group.
fn foreground_target(proc: &Proc, signal: i32) -> Result<Option<i32>, OpError> {
    if let Some(pgid) = foreground(proc).filter(|pgid| *pgid > 1) {
        return Ok(Some(-pgid));
    }
    let [out, _] = &proc.outs;
    let Some(master) = out.fd.as_ref().filter(|_| proc.pty) else { return Ok(Some(proc.pid)) };
    if let Some(key) = signal_key(master, signal) {
        return match sys::write(master.as_raw_fd(), &[key]) {
            Ok(_) => Ok(None),
            Err(e) if sys::would_block(&e) => Err(OpError::new("busy", "the terminal takes no input at the moment")),
            Err(e) => Err(OpError::from(e).at("terminal")),
        };
    }
    let table = proctree::scan();
    let mut groups = table.iter().filter(|e| e.session == proc.session && !e.is_dead()).map(|e| e.group);
    let first = groups.next().ok_or_else(|| OpError::new("not_found", "the process has ended"))?;
    if groups.all(|group| group == first) {
        return Ok(Some(-first));
    }
    let why = "this kernel does not tell which processes are in the foreground: signal the process, session or tree";
    Err(OpError::new("unsupported", why))
}

/// The key that makes a terminal in its present mode send `signal` to its foreground.
fn signal_key(master: &OwnedFd, signal: i32) -> Option<u8> {
    let place = match signal {
        libc::SIGINT => libc::VINTR,
        libc::SIGQUIT => libc::VQUIT,
        libc::SIGTSTP => libc::VSUSP,
        _ => return None,
    };
    let mut mode: libc::termios = unsafe { std::mem::zeroed() };
    sys::check(unsafe { libc::tcgetattr(master.as_raw_fd(), &raw mut mode) }).ok()?;
    let key = mode.c_cc.get(place).copied().filter(|key| *key != 0)?;
    (mode.c_lflag & libc::ISIG != 0).then_some(key)
}

/// The foreground process group of the terminal of a process.
pub(super) fn foreground(proc: &Proc) -> Option<i32> {
    let [out, _] = &proc.outs;
    let master = out.fd.as_ref().filter(|_| proc.pty)?;
    let mut pgid: libc::pid_t = 0;
    let done = unsafe { libc::ioctl(master.as_raw_fd(), libc::TIOCGPGRP, &raw mut pgid) };
    (done == 0 && pgid > 0).then_some(pgid)
}
