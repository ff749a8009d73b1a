//! The machine as gVisor sees it: it reads the size of memory in /proc/meminfo and counts the processors it may run on, once, when
//! it starts. Programs inside then see that. Afterwards it may run on all processors again, as far as its quota goes.

use crate::failure::{Failure, Result};
use crate::order::Seen;
use crate::sys;

const STEP: &str = "machine";
/// Below the stage.
const MEMORY: &str = "meminfo";
/// Threads that start while others are being let go are found in a second round.
const ROUNDS: usize = 2;

/// Writes down the size of memory, where only this sandbox's engine looks.
pub fn write(seen: &Seen) -> Result<()> {
    let kb = seen.memory / 1024;
    let text = format!("MemTotal: {kb:15} kB\nMemFree: {kb:16} kB\nMemAvailable: {kb:11} kB\n");
    std::fs::write(MEMORY, text).map_err(|e| Failure::new(STEP, e.to_string()))
}

/// In the process that becomes the engine: the memory that was written down, and the first of the processors it may use. Best effort:
/// what is refused here shows the machine as it is.
pub fn show(seen: &Seen) {
    if let (Ok(from), Ok(to)) = (sys::c(MEMORY), sys::c("/proc/meminfo")) {
        // SAFETY: both are NUL-terminated.
        unsafe {
            libc::mount(from.as_ptr(), to.as_ptr(), std::ptr::null(), libc::MS_BIND, std::ptr::null());
        }
    }
    // SAFETY: a set of processors is plain data, its size given.
    unsafe {
        let size = std::mem::size_of::<libc::cpu_set_t>();
        let (mut allowed, mut few): (libc::cpu_set_t, libc::cpu_set_t) = (std::mem::zeroed(), std::mem::zeroed());
        if libc::sched_getaffinity(0, size, &mut allowed) != 0 {
            return;
        }
        let all = (0..libc::CPU_SETSIZE as usize).filter(|cpu| libc::CPU_ISSET(*cpu, &allowed));
        all.take(seen.cpus.max(1)).for_each(|cpu| libc::CPU_SET(cpu, &mut few));
        libc::sched_setaffinity(0, size, &few);
    }
}

/// In the first process of the engine's pid namespace, which was never narrowed: every thread there may run where this one may.
pub fn widen() {
    // SAFETY: as above.
    unsafe {
        let size = std::mem::size_of::<libc::cpu_set_t>();
        let mut allowed: libc::cpu_set_t = std::mem::zeroed();
        if libc::sched_getaffinity(0, size, &mut allowed) != 0 {
            return;
        }
        for _ in 0..ROUNDS {
            for thread in threads() {
                libc::sched_setaffinity(thread, size, &allowed);
            }
        }
    }
}

fn threads() -> Vec<i32> {
    let numbers = |path: &str| {
        let found = std::fs::read_dir(path).into_iter().flatten().flatten();
        found.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok()).collect::<Vec<_>>()
    };
    numbers("/proc").iter().flat_map(|pid| numbers(&format!("/proc/{pid}/task"))).collect()
}
