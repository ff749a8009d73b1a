//! The operations of the protocol that the event loop does itself; those on files go to threads.

use std::os::fd::AsRawFd;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use rmpv::Value;

use crate::agent::{mark_of, Agent, Stream, Timer, View, FEATURES};
use crate::bridge::Running;
use crate::forward::{addresses, Forward};
use crate::launch::{self, check_id, Plan};
use crate::op::{map, text_or_bin, OpError, Req};
use crate::procs::{Out, Proc, Stdin, STDIN_WINDOW};
use crate::proctree;
use crate::shim::{self, Report};
use crate::sys;
use crate::wire;

/// Most bytes one `output` answers with.
const MOST_OUTPUT: u64 = 512 * 1024;
/// A listing stops before its answer gets longer than the protocol allows.
const MOST_LISTED: usize = 900 * 1024;

type Outcome = Result<Option<Value>, OpError>;

impl Agent {
    /// Does the operation, or opens a stream for it (`None`).
    pub fn dispatch(&mut self, stream: u32, req: &Req) -> Outcome {
        match req.str("op")? {
            "exec" => self.op_exec(stream, req),
            "attach" => self.op_attach(stream, req),
            "poll" => Ok(Some(self.find(req)?.poll_value())),
            "output" => self.op_output(req),
            "signal" => self.op_signal(req),
            "kill" => self.op_kill(stream, req),
            "stdin" => self.op_stdin(req),
            "resize" => self.op_resize(req),
            "foreground" => Ok(Some(map([("pgid", foreground(self.find(req)?).unwrap_or(-1).into())]))),
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
            "shutdown" => {
                let reason = req.opt_str("reason")?.unwrap_or("shutdown").to_owned();
                self.leaving = Some(reason);
                Ok(Some(map([])))
            }
            name => {
                let op = crate::fs::lookup(name).ok_or_else(|| OpError::new("unsupported", "no such operation"))?;
                let running = Running::start(stream, op, req.clone(), &self.bells)?;
                self.streams.insert(stream, Stream::Op { running, credit: 0, in_credit: 0 });
                Ok(None)
            }
        }
    }

    fn find(&self, req: &Req) -> Result<&Proc, OpError> {
        let id = check_id(req.str("id")?)?;
        match self.ids.get(id).and_then(|key| self.procs.get(key)) {
            Some(proc) => Ok(proc),
            None if self.past.contains(&mark_of(id)) => {
                Err(OpError::new("gone", "the record of the process was dropped"))
            }
            None => Err(OpError::new("not_found", "no such process")),
        }
    }

    fn find_mut(&mut self, req: &Req) -> Result<&mut Proc, OpError> {
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
        let proc = start(plan, self.take_spare())?;
        let stdin = proc.stdin.is_some();
        let detached = proc.detached;
        let key = self.add_proc(proc);
        if let Some(proc) = self.procs.get_mut(&key) {
            proc.holder = (!detached).then_some(stream);
            proc.writer = (!detached && stdin).then_some(stream);
        }
        self.streams.insert(stream, Stream::View(view(key, true)));
        Ok(None)
    }

    /// The stream that waits for the start of a process.
    fn opener(&self, key: u32) -> Option<u32> {
        self.streams.iter().find_map(|(id, s)| match s {
            Stream::View(view) if view.key == key && view.owner => Some(*id),
            _ => None,
        })
    }

    pub fn on_started(&mut self, key: u32, pid: i32) {
        let Some(proc) = self.procs.get_mut(&key) else { return };
        proc.pid = pid;
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

    pub fn on_failed(&mut self, key: u32, report: Report) {
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
                out.floor = position;
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

    fn op_procs(&self) -> Value {
        let mut known: Vec<&Proc> = self.procs.values().filter(|p| !p.forgotten && p.pid > 0).collect();
        known.sort_by_key(|p| p.key);
        let mut procs = Vec::new();
        let mut size = 0;
        for proc in known.iter().rev() {
            size += 300 + proc.argv.iter().map(|arg| arg.len() + 5).sum::<usize>();
            if size > MOST_LISTED {
                break;
            }
            procs.push(proc.list_value());
        }
        procs.reverse();
        let truncated = procs.len() < known.len();
        map([("procs", Value::Array(procs)), ("truncated", truncated.into())])
    }

    fn op_ps(&self) -> Value {
        let hidden = self.shim_pids();
        let me = std::process::id() as i32;
        let table = proctree::scan();
        // As PID 1 all processes are the sandbox's; else only those below the agent are its own.
        let own: Vec<&proctree::Entry> =
            if me == 1 { table.iter().collect() } else { proctree::below(&table, &[me], None) };
        let mut shown: Vec<&proctree::Entry> =
            own.into_iter().filter(|e| e.pid != me && !hidden.contains(&e.pid)).collect();
        shown.sort_by_key(|e| e.pid);
        let truncated = shown.len() > 600;
        let processes = shown.iter().take(600).map(|e| proctree::describe(e)).collect();
        map([("processes", Value::Array(processes)), ("truncated", truncated.into())])
    }

    // Acting

    fn op_signal(&mut self, req: &Req) -> Outcome {
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
                let session = proc.pid;
                proctree::scan().iter().filter(|e| e.session == session && !e.is_dead()).map(|e| e.pid).collect()
            }
            "foreground" => vec![foreground(proc).filter(|pgid| *pgid > 1).map_or(proc.pid, |pgid| -pgid)],
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

    fn op_kill(&mut self, stream: u32, req: &Req) -> Outcome {
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

    fn op_stdin(&mut self, req: &Req) -> Outcome {
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

    fn op_resize(&mut self, req: &Req) -> Outcome {
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

    fn op_forget(&mut self, req: &Req) -> Outcome {
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
    fn op_killall(&mut self) -> Value {
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

    // About the sandbox

    fn op_usage(&self) -> Value {
        let me = std::process::id() as i32;
        let table = proctree::scan();
        let own: Vec<&proctree::Entry> =
            if me == 1 { table.iter().collect() } else { proctree::below(&table, &[me], None) };
        let hidden = self.shim_pids();
        let procs = own.iter().filter(|e| e.pid != me && !hidden.contains(&e.pid) && !e.is_dead()).count();
        let pages: u64 = own.iter().map(|e| e.rss_pages).sum();
        let agent = table.iter().find(|e| e.pid == me).map_or(0, |e| e.rss_pages);
        let mut disk: libc::statvfs = unsafe { std::mem::zeroed() };
        let base = if crate::op::base_dir().as_os_str() == "/" { c"/" } else { c"/workspace" };
        unsafe { libc::statvfs(base.as_ptr(), &raw mut disk) };
        let block = disk.f_frsize as u64;
        map([
            ("uptime_ms", (self.started.elapsed().as_millis() as u64).into()),
            ("procs", (procs as u64).into()),
            ("mem_kb", (pages * proctree::page_kb()).into()),
            ("agent_rss_kb", (agent * proctree::page_kb()).into()),
            (
                "disk",
                map([
                    ("total", (disk.f_blocks as u64 * block).into()),
                    ("free", (disk.f_bavail as u64 * block).into()),
                ]),
            ),
        ])
    }

    fn op_info(&self) -> Value {
        let mut uname: libc::utsname = unsafe { std::mem::zeroed() };
        unsafe { libc::uname(&raw mut uname) };
        let text = |field: &[libc::c_char]| {
            let bytes: Vec<u8> = field.iter().take_while(|c| **c != 0).map(|c| *c as u8).collect();
            text_or_bin(&bytes)
        };
        map([
            ("version", Value::from(env!("CARGO_PKG_VERSION"))),
            ("features", Value::Array(FEATURES.iter().map(|f| Value::from(*f)).collect())),
            ("boot", Value::from(self.boot_id.as_str())),
            (
                "uname",
                map([
                    ("sysname", text(&uname.sysname)),
                    ("nodename", text(&uname.nodename)),
                    ("release", text(&uname.release)),
                    ("machine", text(&uname.machine)),
                ]),
            ),
        ])
    }

    fn op_configure(&mut self, req: &Req) -> Outcome {
        let hostname = req.opt_bytes("hostname")?.map(<[u8]>::to_vec);
        let deadline = req.opt_u64("deadline_ms")?;
        if let Some(env) = req.opt_map("env")? {
            self.launcher.configure(env)?;
        }
        if req.mentions("deadline_ms") {
            self.set_deadline(deadline);
        }
        if let Some(name) = hostname.as_deref().and_then(|n| std::str::from_utf8(n).ok()) {
            crate::boot::set_hostname(name);
        }
        Ok(Some(map([])))
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

/// Makes pipes or a terminal and hands everything to a shim.
fn start(plan: Plan, spare: Option<shim::Shim>) -> Result<Proc, OpError> {
    let exhausted = |e: std::io::Error| OpError { code: "exhausted", ..OpError::from(e).at("cannot start") };
    let mut stdin = None;
    let (fds, outs) = if let Some(size) = plan.pty {
        let (master, slave) = launch::open_pty(size, plan.spec.user.as_ref().map(|u| u.0))?;
        let copy = || sys::dup(slave.as_raw_fd()).map_err(exhausted);
        stdin = Some(Stdin::new(sys::dup(master.as_raw_fd()).map_err(exhausted)?));
        ([copy()?, copy()?, copy()?, plan.cwd], [Out::new(Some(master), plan.ring), Out::new(None, 4096)])
    } else {
        let (out_read, out_write) = sys::pipe().map_err(exhausted)?;
        let (err_read, err_write) = sys::pipe().map_err(exhausted)?;
        let input = if plan.stdin {
            let (read, write) = sys::pipe().map_err(exhausted)?;
            sys::set_nonblocking(write.as_raw_fd()).map_err(exhausted)?;
            stdin = Some(Stdin::new(write));
            read
        } else {
            sys::open(c"/dev/null", libc::O_RDONLY).map_err(exhausted)?
        };
        sys::set_nonblocking(out_read.as_raw_fd()).map_err(exhausted)?;
        sys::set_nonblocking(err_read.as_raw_fd()).map_err(exhausted)?;
        let outs = [Out::new(Some(out_read), plan.ring), Out::new(Some(err_read), plan.ring)];
        ([input, out_write, err_write, plan.cwd], outs)
    };
    let shim = shim::launch(spare, &plan.spec, fds).map_err(exhausted)?;
    let started_ms = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_millis() as u64);
    Ok(Proc {
        key: 0,
        id: plan.id,
        argv: plan.shown,
        programs: plan.spec.programs,
        shim: shim.pid,
        control: Some(shim.control),
        control_bytes: Vec::new(),
        pid: 0,
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
        exit: None,
        killing: None,
        kill_waiters: Vec::new(),
        forgotten: false,
        reported: plan.detach,
    })
}

/// The foreground process group of the terminal of a process.
fn foreground(proc: &Proc) -> Option<i32> {
    let [out, _] = &proc.outs;
    let master = out.fd.as_ref().filter(|_| proc.pty)?;
    let mut pgid: libc::pid_t = 0;
    let done = unsafe { libc::ioctl(master.as_raw_fd(), libc::TIOCGPGRP, &raw mut pgid) };
    (done == 0 && pgid > 0).then_some(pgid)
}
