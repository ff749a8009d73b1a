//! The operations of the protocol that the event loop does itself; those on files go to threads.

use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use rmpv::Value;

use super::records::mark_of;
use super::{acting, Agent, Stream, Timer, View};
use crate::bridge::Running;
use crate::forward::{addresses, Forward};
use crate::launch::{self, check_id, Plan};
use crate::op::{map, OpError, Req};
use crate::pipes::{Out, Stdin, STDIN_WINDOW};
use crate::procs::Proc;
use crate::shim::{self, Report};
use crate::spec::Spec;
use crate::sys;
use crate::warm::node::{Begun, Waiting};
use crate::warm::Spare;
use crate::wire;

/// Most bytes one `output` answers with.
const MOST_OUTPUT: u64 = 512 * 1024;

pub(super) type Outcome = Result<Option<Value>, OpError>;

impl Agent {
    /// Does the operation, or opens a stream for it (`None`).
    pub(super) fn dispatch(&mut self, stream: u32, req: &Req) -> Outcome {
        match req.str("op")? {
            "exec" => self.op_exec(stream, req),
            "attach" => self.op_attach(stream, req),
            "poll" => Ok(Some(self.find(req)?.poll_value())),
            "output" => self.op_output(req),
            "signal" => self.op_signal(req),
            "kill" => self.op_kill(stream, req),
            "stdin" => self.op_stdin(req),
            "resize" => self.op_resize(req),
            "foreground" => Ok(Some(map([("pgid", acting::foreground(self.find(req)?).unwrap_or(-1).into())]))),
            "procs" => Ok(Some(self.op_procs())),
            "ps" => Ok(Some(self.op_ps())),
            "forget" => self.op_forget(req),
            "killall" => Ok(Some(self.op_killall())),
            "forward" => {
                self.streams.insert(stream, Stream::Forward(Forward::open(&addresses(req)?)?));
                Ok(None)
            }
            "usage" => Ok(Some(self.op_usage())),
            "info" => Ok(Some(self.op_info())),
            "configure" => self.op_configure(req),
            "renew" => self.op_renew(req),
            "shutdown" => {
                let reason = req.opt_str("reason")?.unwrap_or("shutdown").to_owned();
                self.leaving = Some(reason);
                Ok(Some(map([])))
            }
            name => {
                let op = crate::fs::lookup(name).ok_or_else(|| OpError::new("unsupported", "no such operation"))?;
                let user = match req.opt_str("user")? {
                    Some(spec) => Some(self.launcher.resolve(spec)?),
                    None => None,
                };
                let running = Running::start(stream, op, req.clone(), user, &self.bells)?;
                self.streams.insert(stream, Stream::Op { running, credit: 0, in_credit: 0 });
                Ok(None)
            }
        }
    }

    pub(super) fn find(&self, req: &Req) -> Result<&Proc, OpError> {
        let id = check_id(req.str("id")?)?;
        match self.ids.get(id).and_then(|key| self.procs.get(key)) {
            Some(proc) => Ok(proc),
            None if self.past.contains(&mark_of(id)) => {
                Err(OpError::new("gone", "the record of the process was dropped"))
            }
            None => Err(OpError::new("not_found", "no such process")),
        }
    }

    pub(super) fn find_mut(&mut self, req: &Req) -> Result<&mut Proc, OpError> {
        let key = self.find(req)?.key;
        self.procs.get_mut(&key).ok_or_else(|| OpError::new("not_found", "no such process"))
    }

    // Starting

    fn op_exec(&mut self, stream: u32, req: &Req) -> Outcome {
        let id = check_id(req.str("id")?)?;
        if self.ids.contains_key(id) || self.past.contains(&mark_of(id)) {
            return Err(OpError::new("already_exists", "a process of this id exists or existed"));
        }
        if self.procs.values().filter(|p| !p.is_over()).count() >= self.boot.max_procs {
            return Err(OpError::new("exhausted", "too many processes"));
        }
        let plan = self.launcher.plan(req)?;
        let warm = self.take_warm(&plan);
        let node = self.take_node(&plan);
        let (proc, born, by_node) = start(plan, warm, node, || self.spare.take())?;
        let stdin = proc.stdin.is_some();
        let detached = proc.detached;
        let key = self.add_proc(proc);
        if let Some(proc) = self.procs.get_mut(&key) {
            proc.holder = (!detached).then_some(stream);
            proc.writer = (!detached && stdin).then_some(stream);
        }
        self.streams.insert(stream, Stream::View(view(key, true)));
        self.stand_back();
        if born > 0 {
            self.on_started(key, born);
        }
        match by_node {
            true => self.node_used(),
            false if born > 0 => self.warm_used(),
            false => {}
        }
        Ok(None)
    }

    /// The stream that waits for the start of a process.
    fn opener(&self, key: u32) -> Option<u32> {
        self.streams.iter().find_map(|(id, s)| match s {
            Stream::View(view) if view.key == key && view.owner => Some(*id),
            _ => None,
        })
    }

    pub(super) fn on_started(&mut self, key: u32, pid: i32) {
        self.forget_start(key);
        let Some(proc) = self.procs.get_mut(&key) else { return };
        proc.pid = pid;
        if proc.pty {
            proc.session = pid;
        }
        proc.programs = Vec::new();
        let (detached, stdin) = (proc.detached, proc.writer.is_some());
        if let Some(when) = proc.timeout.and_then(|t| proc.started.checked_add(t)) {
            self.at(when, Timer::Timeout(key));
        }
        self.refresh(key);
        let Some(stream) = self.opener(key) else { return };
        if detached {
            return self.answer(stream, Ok(map([("pid", pid.into())])));
        }
        self.event(stream, &map([("started", map([("pid", pid.into())]))]));
        if let Some(Stream::View(view)) = self.streams.get_mut(&stream) {
            view.announced = true;
            if stdin {
                view.stdin_credit = STDIN_WINDOW;
                self.push(wire::credit(stream, 0, STDIN_WINDOW as u32));
            }
        }
    }

    pub(super) fn on_failed(&mut self, key: u32, report: Report) {
        self.forget_start(key);
        let Some(proc) = self.procs.get(&key) else { return };
        let error = match (proc.cancelled, report) {
            (true, _) => OpError::cancelled(),
            (_, Report::Failed { errno: libc::ECHILD, .. }) => OpError::new("internal", "the start was interrupted"),
            _ => launch::start_error(report, &proc.programs, proc.argv.first().map_or(b"", Vec::as_slice)),
        };
        let opener = self.opener(key);
        // It never ran, so its id stays free and a later `poll` says so.
        if let Some(proc) = self.procs.remove(&key) {
            self.ids.remove(&proc.id);
            for waiter in proc.kill_waiters {
                self.answer(waiter, Ok(map([])));
            }
        }
        if let Some(stream) = opener {
            self.answer(stream, Err(error));
        }
    }

    // Watching

    fn op_attach(&mut self, stream: u32, req: &Req) -> Outcome {
        let stdin = req.opt_bool("stdin", false)?;
        let follow = req.opt_bool("follow", false)?;
        let asked = [req.opt_i64("out")?.unwrap_or(0), req.opt_i64("err")?.unwrap_or(0)];
        let proc = self.find_mut(req)?;
        if proc.pid == 0 {
            return Err(OpError::new("busy", "the process is being started"));
        }
        if stdin && proc.stdin.is_none() {
            return Err(OpError::invalid("the process was started without stdin"));
        }
        if stdin && proc.writer.is_some() {
            return Err(OpError::new("busy", "another attachment has the stdin of the process"));
        }
        let mut view = view(proc.key, false);
        view.follow = follow;
        view.announced = true;
        for ((out, want), position) in proc.outs.iter().zip(asked).zip(&mut view.position) {
            *position = u64::try_from(want).map_or(out.ring.end(), |n| n.clamp(out.ring.start(), out.ring.end()));
        }
        if proc.holder.is_none() && !proc.dropping {
            proc.holder = Some(stream);
            for (out, position) in proc.outs.iter_mut().zip(view.position) {
                out.reached(position);
            }
        }
        if stdin {
            proc.writer = Some(stream);
            let queued = proc.stdin.as_mut().map_or(0, |s| {
                s.drained = 0;
                s.queued as u64
            });
            view.stdin_credit = STDIN_WINDOW.saturating_sub(queued);
        }
        let (pid, key, credit) = (proc.pid, proc.key, view.stdin_credit);
        let [out, err] = view.position;
        self.streams.insert(stream, Stream::View(view));
        self.event(stream, &map([("attached", map([("pid", pid.into()), ("out", out.into()), ("err", err.into())]))]));
        if credit > 0 {
            self.push(wire::credit(stream, 0, credit as u32));
        }
        self.refresh(key);
        Ok(None)
    }

    fn op_output(&mut self, req: &Req) -> Outcome {
        let which = match req.u64("ch")? {
            1 => 0,
            2 => 1,
            _ => return Err(OpError::invalid("`ch` must be 1 or 2")),
        };
        let offset = req.opt_u64("offset")?.unwrap_or(0);
        let most = req.opt_u64("max")?.unwrap_or(MOST_OUTPUT).min(MOST_OUTPUT);
        let proc = self.find(req)?;
        let out = proc.outs.get(which).ok_or_else(|| OpError::invalid("`ch` must be 1 or 2"))?;
        let start = offset.clamp(out.ring.start(), out.ring.end());
        let (first, second) = out.ring.slices(start, most as usize);
        Ok(Some(map([
            ("start", start.into()),
            ("data", [first, second].concat().into()),
            ("end", out.ring.end().into()),
        ])))
    }
}

fn view(key: u32, owner: bool) -> View {
    View {
        key,
        owner,
        follow: false,
        position: [0; 2],
        credit: [0; 2],
        eof_sent: [false; 2],
        announced: false,
        stdin_credit: 0,
        discard: false,
    }
}

/// Hands everything to a Node that waits, or to a warm Python, or else to a shim. The pid, where it is known already, and
/// whether it was the Node.
fn start(
    plan: Plan,
    warm: Option<Spare>,
    node: Option<Waiting>,
    spare: impl FnOnce() -> Option<shim::Shim>,
) -> Result<(Proc, i32, bool), OpError> {
    let (begun, by_node) = match node.and_then(|node| node.give(&plan)) {
        Some(begun) => (begun, true),
        None => (begin(&plan.spec, plan.cwd, (plan.pty, plan.stdin, plan.merge, plan.ring), warm, spare)?, false),
    };
    let Begun { shim, main: born, outs, stdin } = begun;
    let started_ms = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_millis() as u64);
    let proc = Proc {
        key: 0,
        id: plan.id,
        argv: plan.shown,
        programs: plan.spec.programs,
        shim: shim.pid,
        control: Some(shim.control),
        control_bytes: Vec::new(),
        pid: 0,
        born,
        session: if plan.pty.is_some() { 0 } else { shim.pid },
        outs,
        stdin,
        pty: plan.pty.is_some(),
        detached: plan.detach,
        dropping: plan.detach,
        holder: None,
        writer: None,
        timeout: plan.timeout,
        started: Instant::now(),
        started_ms,
        timed_out: false,
        cancelled: false,
        killed_by_us: false,
        starved: false,
        exit: None,
        killing: None,
        kill_waiters: Vec::new(),
        forgotten: false,
        reported: plan.detach,
    };
    Ok((proc, born, by_node))
}

/// Makes pipes or a terminal and starts with them.
fn begin(
    spec: &Spec,
    cwd: OwnedFd,
    (pty, with_stdin, merge, ring): (Option<launch::Terminal>, bool, bool, usize),
    warm: Option<Spare>,
    spare: impl FnOnce() -> Option<shim::Shim>,
) -> Result<Begun, OpError> {
    let exhausted = |e: std::io::Error| OpError { code: "exhausted", ..OpError::from(e).at("cannot start") };
    let mut stdin = None;
    let owner = spec.user.as_ref().map(|u| u.0);
    let pipe = || sys::pipe_of(owner).map_err(exhausted);
    let (fds, outs) = if let Some(terminal) = pty {
        let (master, slave) = launch::open_pty(terminal, owner)?;
        let copy = || sys::dup(slave.as_raw_fd()).map_err(exhausted);
        stdin = Some(Stdin::new(sys::dup(master.as_raw_fd()).map_err(exhausted)?));
        ([copy()?, copy()?, copy()?, cwd], [Out::new(Some(master), ring), Out::new(None, 4096)])
    } else {
        let (out_read, out_write) = pipe()?;
        let input = if with_stdin {
            let (read, write) = pipe()?;
            sys::set_nonblocking(write.as_raw_fd()).map_err(exhausted)?;
            stdin = Some(Stdin::new(write));
            read
        } else {
            sys::open(c"/dev/null", libc::O_RDONLY).map_err(exhausted)?
        };
        sys::set_nonblocking(out_read.as_raw_fd()).map_err(exhausted)?;
        let (err, err_write) = if merge {
            (Out::new(None, 4096), sys::dup(out_write.as_raw_fd()).map_err(exhausted)?)
        } else {
            let (read, write) = pipe()?;
            sys::set_nonblocking(read.as_raw_fd()).map_err(exhausted)?;
            (Out::new(Some(read), ring), write)
        };
        let outs = [Out::new(Some(out_read), ring), err];
        ([input, out_write, err_write, cwd], outs)
    };
    let (shim, main) = match warm.filter(|w| w.give(spec, with_stdin, &fds).is_ok()) {
        Some(warm) => (warm.shim, warm.main),
        None => (shim::launch(spare(), spec, fds).map_err(exhausted)?, 0),
    };
    Ok(Begun { shim, main, outs, stdin })
}
