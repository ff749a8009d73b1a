//! Operations that tell about the sandbox, and the one that changes what boot set.

use rmpv::Value;

use super::ops::Outcome;
use super::{Agent, FEATURES};
use crate::op::{map, text_or_bin, Req};
use crate::procs::Proc;
use crate::proctree;

/// A listing stops before its answer gets longer than the protocol allows.
const MOST_LISTED: usize = 900 * 1024;
/// Processes that `ps` shows at most.
const MOST_SHOWN: usize = 600;

impl Agent {
    pub(super) fn op_procs(&self) -> Value {
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

    pub(super) fn op_ps(&self) -> Value {
        let hidden = self.shim_pids();
        let me = std::process::id() as i32;
        let table = proctree::scan();
        // As PID 1 all processes are the sandbox's; else only those below the agent are its own.
        let own: Vec<&proctree::Entry> =
            if me == 1 { table.iter().collect() } else { proctree::below(&table, &[me], None) };
        let mut shown: Vec<&proctree::Entry> =
            own.into_iter().filter(|e| e.pid != me && !hidden.contains(&e.pid)).collect();
        shown.sort_by_key(|e| e.pid);
        let truncated = shown.len() > MOST_SHOWN;
        let processes = shown.iter().take(MOST_SHOWN).map(|e| proctree::describe(e)).collect();
        map([("processes", Value::Array(processes)), ("truncated", truncated.into())])
    }

    pub(super) fn op_usage(&self) -> Value {
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
            ("warm", self.warm.value(self.node.value())),
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

    pub(super) fn op_info(&self) -> Value {
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

    pub(super) fn op_configure(&mut self, req: &Req) -> Outcome {
        let hostname = req.opt_bytes("hostname")?.map(<[u8]>::to_vec);
        let deadline = req.opt_u64("deadline_ms")?;
        if let Some(env) = req.opt_map("env")? {
            self.launcher.configure(env)?;
        }
        self.warm_changed(req)?;
        if req.mentions("deadline_ms") {
            self.set_deadline(deadline);
        }
        if let Some(name) = hostname.as_deref().and_then(|n| std::str::from_utf8(n).ok()) {
            crate::boot::set_hostname(name);
            crate::hosts::name_self();
        }
        Ok(Some(map([])))
    }
}
