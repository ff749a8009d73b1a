//! The boot message and what the agent does to itself before anything else runs.

use std::os::fd::RawFd;

use crate::warm::Wish;
use crate::{affinity, filter, hosts, sys};

pub const MAX_BOOT: usize = 1024 * 1024;

/// The host's first message, over fd 0.
#[derive(Debug, Default)]
pub struct Boot {
    pub sandbox: String,
    pub agent_secret: String,
    pub host_secret: String,
    pub listen_fd: Option<RawFd>,
    /// Connections come over `listen_fd` as numbers of descriptors, from another thread of this process.
    pub handed: bool,
    pub dial: Option<String>,
    pub env: Vec<(Vec<u8>, Vec<u8>)>,
    pub hostname: Option<String>,
    pub deadline_ms: Option<u64>,
    pub rlimits: Vec<(u32, u64, u64)>,
    pub filter: Option<Vec<libc::sock_filter>>,
    pub max_streams: usize,
    pub max_procs: usize,
    pub warm: Wish,
    /// How many processors the programs of the sandbox may use at once, where the kernel would show them all.
    pub cpus: Option<usize>,
    /// Where the agent has to keep memory from running out.
    pub memory: Option<MemoryLimit>,
}

/// Bytes that the sandbox may use, and how many the host allows beyond that, in which the agent ends a program.
#[derive(Debug, Clone, Copy)]
pub struct MemoryLimit {
    pub most: u64,
    pub reserve: u64,
}

impl Boot {
    pub fn parse(raw: &[u8]) -> Result<Self, String> {
        let root: serde_json::Value = serde_json::from_slice(raw).map_err(|e| format!("boot message: {e}"))?;
        let text = |key: &str| root.get(key).and_then(|v| v.as_str()).map(str::to_owned);
        let secret = |key: &str| {
            let value = text(key).unwrap_or_default();
            is_secret(&value).then_some(value).ok_or_else(|| format!("boot message: `{key}` must be 32 hex digits"))
        };
        let number = |key: &str| root.get(key).and_then(serde_json::Value::as_u64);
        let mut boot = Self {
            sandbox: text("sandbox").unwrap_or_default(),
            agent_secret: secret("agent_secret")?,
            host_secret: secret("host_secret")?,
            listen_fd: number("listen_fd").and_then(|n| RawFd::try_from(n).ok()),
            dial: text("dial"),
            hostname: text("hostname"),
            deadline_ms: number("deadline_ms"),
            max_streams: number("max_streams").unwrap_or(256).clamp(1, 4096) as usize,
            cpus: number("cpus").filter(|n| *n > 0).and_then(|n| usize::try_from(n).ok()),
            max_procs: number("max_procs").unwrap_or(1024).clamp(1, 16_384) as usize,
            ..Self::default()
        };
        if boot.listen_fd.is_none() == boot.dial.is_none() {
            return Err("boot message: exactly one of `listen_fd` and `dial` is needed".into());
        }
        for (key, value) in root.get("env").and_then(|v| v.as_object()).into_iter().flatten() {
            let value = value.as_str().ok_or_else(|| format!("boot message: env `{key}` is no string"))?;
            if key.is_empty() || key.contains(['=', '\0']) || value.contains('\0') {
                return Err(format!("boot message: env `{key}` cannot be set"));
            }
            boot.env.push((key.as_bytes().to_vec(), value.as_bytes().to_vec()));
        }
        for (name, pair) in root.get("rlimits").and_then(|v| v.as_object()).into_iter().flatten() {
            let resource = sys::resource_of(name).ok_or_else(|| format!("boot message: unknown rlimit `{name}`"))?;
            let limit = |i: usize| pair.get(i).map(|v| v.as_u64().unwrap_or(u64::MAX));
            let (Some(soft), Some(hard)) = (limit(0), limit(1)) else {
                return Err(format!("boot message: rlimit `{name}` must be [soft, hard]"));
            };
            boot.rlimits.push((resource, soft, hard));
        }
        if let Some(warm) = root.get("warm") {
            let is = |key: &str| warm.get(key).and_then(serde_json::Value::as_bool).unwrap_or(false);
            let names = warm.get("preload").and_then(|v| v.as_array()).into_iter().flatten();
            let preload = names.filter_map(|name| name.as_str()).map(str::to_owned).collect();
            let memory_mb = warm.get("memory_mb").and_then(serde_json::Value::as_u64).unwrap_or(0);
            let (node, node_early) = (is("node"), is("node_early"));
            boot.warm = Wish { python: is("python"), early: is("early"), preload, node, node_early, memory_mb };
        }
        if let Some(memory) = root.get("memory").filter(|v| !v.is_null()) {
            let bytes = |key: &str| memory.get(key).and_then(serde_json::Value::as_u64);
            let (Some(most), Some(reserve)) = (bytes("most"), bytes("reserve")) else {
                return Err("boot message: `memory` must have `most` and `reserve`".into());
            };
            boot.memory = Some(MemoryLimit { most, reserve });
        }
        if let Some(program) = root.get("filter").filter(|v| !v.is_null()) {
            let program = program.as_str().and_then(filter::parse);
            boot.filter = Some(program.ok_or("boot message: `filter` is no program")?);
        }
        Ok(boot)
    }
}

/// Whether this has the form of a secret: 32 hex digits.
pub fn is_secret(value: &str) -> bool {
    value.len() == 32 && value.bytes().all(|b| b.is_ascii_hexdigit())
}

/// Reads the boot message from fd 0 to its end, then puts /dev/null there.
pub fn receive() -> Result<Boot, String> {
    let mut raw = Vec::new();
    let mut chunk = [0; 8192];
    loop {
        match sys::read(0, &mut chunk) {
            Ok(0) => break,
            Ok(n) => raw.extend_from_slice(chunk.get(..n).unwrap_or_default()),
            Err(e) if sys::would_block(&e) => continue,
            Err(e) => return Err(format!("boot message: {e}")),
        }
        if raw.len() > MAX_BOOT {
            return Err("boot message: longer than 1 MiB".into());
        }
    }
    let null = sys::open(c"/dev/null", libc::O_RDWR).map_err(|e| format!("/dev/null: {e}"))?;
    unsafe { libc::dup2(std::os::fd::AsRawFd::as_raw_fd(&null), 0) };
    let boot = Boot::parse(&raw);
    for kept in [&mut raw[..], &mut chunk[..]] {
        crate::agent::wipe_bytes(kept); // the secrets are in it
    }
    boot
}

/// Before all else: nobody inside may trace the agent or read its memory, and nothing it holds may leak into a child.
pub fn protect() {
    unsafe {
        libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0);
        libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
        libc::umask(0o022);
        // Small and stable memory: freed buffers go back to the kernel, threads share one arena.
        libc::mallopt(libc::M_ARENA_MAX, 1);
        libc::mallopt(libc::M_MMAP_THRESHOLD, 64 * 1024);
        libc::mallopt(libc::M_TRIM_THRESHOLD, 128 * 1024);
    }
    sys::cloexec_all();
}

/// Nothing is said on standard output or error from here on. They lead to a file of the host, and under a kernel that shows
/// other processes' descriptors anybody inside could open it through /proc and write to it without end.
pub fn hush() -> Result<(), String> {
    let null = sys::open(c"/dev/null", libc::O_RDWR).map_err(|e| format!("/dev/null: {e}"))?;
    for fd in [1, 2] {
        if unsafe { libc::dup2(std::os::fd::AsRawFd::as_raw_fd(&null), fd) } < 0 {
            return Err(format!("/dev/null: {}", std::io::Error::last_os_error()));
        }
    }
    Ok(())
}

/// Lets go of the program's own pages that only starting needed. They are read-only pages of a file that every sandbox of
/// the host shares; what is needed again comes back from the page cache.
pub fn settle() {
    extern "C" {
        static __executable_start: u8;
        static etext: u8;
    }
    let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096);
    let (from, to) = ((&raw const __executable_start) as usize, (&raw const etext) as usize & !(page - 1));
    if from % page == 0 && from < to {
        unsafe { libc::madvise(from as *mut libc::c_void, to - from, libc::MADV_DONTNEED) };
    }
}

/// Sets limits and host name. A limit that cannot be set is an error: the host asked for it.
pub fn apply(boot: &Boot) -> Result<(), String> {
    for (resource, soft, hard) in &boot.rlimits {
        sys::set_rlimit(*resource as _, *soft, *hard).map_err(|e| format!("rlimit {resource}: {e}"))?;
    }
    if let Some(name) = &boot.hostname {
        set_hostname(name);
    }
    hosts::name_self();
    if let Some(cpus) = boot.cpus {
        affinity::choose(cpus, &boot.sandbox);
    }
    match &boot.filter {
        Some(program) => filter::install(program.clone()).map_err(|e| format!("filter of system calls: {e}")),
        None => Ok(()),
    }
}

/// Best effort: not every runtime lets the agent do it.
pub fn set_hostname(name: &str) {
    unsafe { libc::sethostname(name.as_ptr().cast(), name.len()) };
}
