//! Files that programs of a container read to learn how large their machine is: they hold the sandbox's limits, and no kernel changes them any more,
//! and its own control groups. All of it is one read-only directory of the stage, of which the engine binds single files.
//!
//! Memory that is free is not followed: `MemAvailable` is what the sandbox had when it started. `memory.current` of the group is true.

use crate::failure::{Failure, Result};
use crate::order::{Seen, Shown};
use crate::{mounts, sys};
use std::fmt::Write;
use std::io::{BufRead, BufReader};
use std::os::fd::AsRawFd;

const STEP: &str = "view";
/// Below the stage. The configuration names the same files.
const TOP: &str = "seen";
const GROUPS: &str = "seen/fs/cgroup";
const TICKS: u64 = 100;

pub fn make(seen: &Seen) -> Result<()> {
    make_directory(TOP)?;
    make_directory("seen/fs")?;
    make_directory(GROUPS)?;
    if seen.memory > 0 {
        write("meminfo", &memory(seen.memory / 1024))?;
    }
    if seen.cpus > 0 {
        let count = seen.cpus.min(machine_cpus());
        write("cpus", &if count == 1 { "0\n".into() } else { format!("0-{}\n", count - 1) })?;
        write("cpuinfo", &processors(count)?)?;
        write("stat", &counters(count))?;
    }
    for group in seen.groups.iter().filter(|group| !group.name.is_empty()) {
        make_directory(&place(group)?)?;
        for name in group.name.split(',').filter(|name| *name != group.name) {
            let link = format!("{GROUPS}/{name}");
            std::os::unix::fs::symlink(&group.name, &link).map_err(|e| Failure::new(STEP, format!("{link}: {e}")))?;
        }
    }
    // Closed down here, by who owns the namespace above: the sandbox's copies of these mounts can never be opened again.
    cover(TOP, TOP)?;
    seen.groups.iter().try_for_each(|group| cover(&group.path, &place(group)?))
}

/// The name is one directory's, or none for the only hierarchy that there is.
fn place(group: &Shown) -> Result<String> {
    if group.name.is_empty() {
        return Ok(GROUPS.into());
    }
    if !group.name.bytes().all(|b| b.is_ascii_lowercase() || b == b',' || b == b'_') {
        return Err(Failure::new("order", format!("{:?} names no control group", group.name)));
    }
    Ok(format!("{GROUPS}/{}", group.name))
}

fn cover(from: &str, on: &str) -> Result<()> {
    let tree = mounts::clone_tree(libc::AT_FDCWD, &sys::c(from)?)?;
    mounts::close_down(&tree)?;
    let on = sys::open_path(libc::AT_FDCWD, &sys::c(on)?, libc::O_PATH | libc::O_DIRECTORY, STEP)?;
    mounts::attach(&tree, on.as_raw_fd())
}

fn make_directory(path: &str) -> Result<()> {
    sys::mkdir(libc::AT_FDCWD, &sys::c(path)?, 0o755, STEP).map(|_| ())
}

fn write(name: &str, text: &str) -> Result<()> {
    let path = format!("{TOP}/{name}");
    std::fs::write(&path, text).map_err(|e| Failure::new(STEP, format!("{path}: {e}")))
}

/// The lines that programs look for; what was not counted is 0.
fn memory(total: u64) -> String {
    const ZERO: [&str; 18] = [
        "Buffers",
        "Cached",
        "SwapCached",
        "Active",
        "Inactive",
        "Unevictable",
        "Mlocked",
        "SwapTotal",
        "SwapFree",
        "Dirty",
        "Writeback",
        "AnonPages",
        "Mapped",
        "Shmem",
        "Slab",
        "SReclaimable",
        "SUnreclaim",
        "PageTables",
    ];
    let values = [("MemTotal", total), ("MemFree", total), ("MemAvailable", total)];
    let rows = values.into_iter().chain(ZERO.map(|name| (name, 0)));
    rows.fold(String::new(), |mut text, (name, kb)| {
        let _ = writeln!(text, "{:<16}{kb:>8} kB", format!("{name}:"));
        text
    })
}

/// As many blocks of the machine's own description as there are processors to be seen, numbered from 0.
fn processors(count: usize) -> Result<String> {
    let failed = |e: std::io::Error| Failure::new(STEP, format!("/proc/cpuinfo: {e}"));
    let file = std::fs::File::open("/proc/cpuinfo").map_err(failed)?;
    let (mut text, mut found) = (String::new(), 0);
    for line in BufReader::new(file).lines() {
        let line = line.map_err(failed)?;
        let name = line.split(':').next().unwrap_or_default().trim_end();
        match name {
            "processor" if found == count => break, // the rest is not even read
            "processor" => {
                let _ = writeln!(text, "processor\t: {found}");
                found += 1;
            }
            _ => text = text + &line + "\n",
        }
    }
    Ok(text)
}

/// /proc/stat of processors that have been idle since the machine started.
fn counters(count: usize) -> String {
    let (now, up) = (seconds(libc::CLOCK_REALTIME), seconds(libc::CLOCK_BOOTTIME));
    let idle = up * TICKS;
    let mut text = format!("cpu  0 0 0 {} 0 0 0 0 0 0\n", idle * count as u64);
    for cpu in 0..count {
        let _ = writeln!(text, "cpu{cpu} 0 0 0 {idle} 0 0 0 0 0 0");
    }
    let started = now.saturating_sub(up);
    text + &format!("intr 0\nctxt 0\nbtime {started}\nprocesses 1\nprocs_running 1\nprocs_blocked 0\nsoftirq 0\n")
}

fn seconds(clock: libc::clockid_t) -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: time is ours.
    unsafe { libc::clock_gettime(clock, &mut time) };
    u64::try_from(time.tv_sec).unwrap_or(0)
}

fn machine_cpus() -> usize {
    // SAFETY: no pointers.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) }).unwrap_or(1).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_reads_as_the_kernels_own() {
        let text = memory(524_288);
        assert!(text.starts_with("MemTotal:         524288 kB\nMemFree:"), "{text}");
        assert!(text.contains("\nSwapTotal:             0 kB\n"), "{text}");
    }

    #[test]
    fn processors_are_counted_from_zero() {
        let text = processors(1).unwrap_or_default();
        assert_eq!(text.lines().filter(|line| line.starts_with("processor")).collect::<Vec<_>>(), ["processor\t: 0"]);
        assert_eq!(counters(3).lines().filter(|line| line.starts_with("cpu")).count(), 4);
    }

    #[test]
    fn a_group_has_a_place_below_its_directory_only() {
        for (name, good) in [("", true), ("cpu,cpuacct", true), ("net_cls", true), ("..", false), ("a/b", false)] {
            assert_eq!(place(&Shown { name: name.into(), path: String::new() }).is_ok(), good, "{name}");
        }
    }
}
