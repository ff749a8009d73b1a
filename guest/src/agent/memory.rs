//! Memory under a kernel that does not end a program when it runs out (gVisor): there the host would end that kernel, and the
//! sandbox with it. So the agent watches what the host counts, and ends the largest program while there is still some left.
//!
//! It looks the more often the less is left, and not at all while no program runs. What can be given back at once (pages of files,
//! and what the host's kernel remembers of their names) does not count.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use super::{Agent, Timer};
use crate::boot::MemoryLimit;
use crate::procs::Proc;
use crate::proctree::{self, Entry};
use crate::sys;

/// The host's files about the sandbox's control group: what is used, and what of that is pages of files.
const USAGE: &str = "/.atoll/memory/usage";
const STAT: &str = "/.atoll/memory/stat";
/// A new command is looked at for the first time after this.
const FIRST: Duration = Duration::from_millis(8);
const SELDOM: Duration = Duration::from_millis(250);
const OFTEN: Duration = Duration::from_millis(3);
/// As fast as memory can be taken, in bytes per millisecond.
const FASTEST: u64 = 4 << 20;
/// So long a killed program may take to give its memory back before another one is killed in its place.
const RETURN_TIME: Duration = Duration::from_millis(600);
const PRESSING_TIME: Duration = Duration::from_millis(30);

pub(super) struct Watch {
    usage: File,
    stat: File,
    limit: MemoryLimit,
    due: Option<Instant>,
    killed: Option<Killed>,
}

/// Record of kills: the time of the last one, the memory it should give back, the peak since, and the last reading.
struct Killed {
    at: Instant,
    owed: u64,
    peak: u64,
    last: u64,
}

impl Watch {
    /// None where the kernel itself ends programs, or nothing limits memory.
    pub(super) fn new(limit: Option<MemoryLimit>) -> Option<Self> {
        let open = |path| File::open(path).ok();
        Some(Self { usage: open(USAGE)?, stat: open(STAT)?, limit: limit?, due: None, killed: None })
    }

    /// Bytes in use that nobody can give back.
    fn look(&self) -> Option<u64> {
        let (usage, stat) = (read(&self.usage)?, read(&self.stat)?);
        let used = usage.trim().parse::<u64>().ok()?;
        Some(used.saturating_sub(file_pages(&stat)).saturating_sub(names(&stat, used, self.limit.reserve / 2)))
    }

    /// Returns the memory in use once killed programs have given back theirs.
    fn settled(&mut self, used: u64) -> u64 {
        let Some(killed) = &mut self.killed else { return used };
        killed.peak = killed.peak.max(used);
        let outstanding = killed.owed.saturating_sub(killed.peak - used);
        let falling = used < std::mem::replace(&mut killed.last, used);
        // Programs may have shared what each of them seemed to have: near the end of the reserve that is not waited for.
        let pressing = used > self.limit.most + self.limit.reserve / 4 * 3;
        let patience = if pressing { PRESSING_TIME } else { RETURN_TIME };
        if killed.at.elapsed() > patience {
            self.killed = None;
            return used;
        }
        let rest = used.saturating_sub(outstanding);
        // More comes back than was owed, when a program has grown until it died.
        if falling && !pressing {
            rest.min(self.limit.most)
        } else {
            rest
        }
    }

    fn note_killed(&mut self, used: u64, owed: u64) {
        let before = self.killed.take().map_or(0, |k| k.owed.saturating_sub(k.peak.saturating_sub(used)));
        self.killed = Some(Killed { at: Instant::now(), owed: before + owed, peak: used, last: used });
    }
}

fn read(file: &File) -> Option<String> {
    let mut buffer = [0; 8192];
    let got = file.read_at(&mut buffer, 0).ok()?;
    String::from_utf8(buffer.get(..got)?.to_vec()).ok()
}

fn value(stat: &str, name: &str) -> Option<u64> {
    stat.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok())
}

/// Pages of files in memory.stat. The first hierarchy's file counts groups below in lines of their own.
fn file_pages(stat: &str) -> u64 {
    let sum = |names: [&str; 2]| names.iter().map(|name| value(stat, name)).sum::<Option<u64>>();
    sum(["total_active_file", "total_inactive_file"]).or_else(|| sum(["active_file", "inactive_file"])).unwrap_or(0)
}

/// Memory that the host's kernel holds for names of files, and gives back when the group is full: a walk over /usr makes 150 MB of it. The
/// first hierarchy does not tell it from other memory of the kernel, so there all of that is taken for it, up to `most`.
fn names(stat: &str, used: u64, most: u64) -> u64 {
    match (value(stat, "total_rss"), value(stat, "total_cache")) {
        (Some(programs), Some(cache)) => used.saturating_sub(programs).saturating_sub(cache).min(most),
        _ => value(stat, "slab_reclaimable").unwrap_or(0),
    }
}

impl Agent {
    /// A program begins to run.
    pub(super) fn watch_memory(&mut self) {
        let soon = Instant::now() + FIRST;
        let Some(watch) = self.watch.as_mut() else { return };
        if let Some(due) = watch.due.filter(|due| *due > soon) {
            self.timers.remove(&(due, Timer::Memory));
        } else if watch.due.is_some() {
            return;
        }
        watch.due = Some(soon);
        self.at(soon, Timer::Memory);
    }

    pub(super) fn on_memory(&mut self) {
        let Some(watch) = self.watch.as_mut() else { return };
        watch.due = None;
        let Some(used) = watch.look() else { return };
        let most = watch.limit.most;
        let settled = watch.settled(used);
        let pause = if settled > most {
            self.end_largest(used, settled - most);
            OFTEN
        } else {
            let room = most - settled;
            Duration::from_millis(room / FASTEST).clamp(OFTEN, SELDOM)
        };
        if pause == SELDOM && !self.programs_run() {
            return;
        }
        let due = Instant::now() + pause;
        if let Some(watch) = self.watch.as_mut() {
            watch.due = Some(due);
        }
        self.at(due, Timer::Memory);
    }

    fn programs_run(&self) -> bool {
        let hidden = self.shim_pids();
        let me = std::process::id() as i32;
        self.procs.values().any(|p| p.exit.is_none())
            || proctree::scan().iter().any(|e| e.pid != me && !hidden.contains(&e.pid) && !e.is_dead())
    }

    /// Ends the programs with the most memory, as many as have to go for `excess` bytes. Interpreters that only wait go first. When
    /// that has not been enough, all programs of the command that has most go at once: they may grow faster than they can be told apart.
    fn end_largest(&mut self, used: u64, excess: u64) {
        self.give_up_waiting();
        let hidden = self.shim_pids();
        let me = std::process::id() as i32;
        let table = proctree::scan();
        let mut programs: Vec<(Option<u32>, &Entry)> = table
            .iter()
            .filter(|e| e.pid != me && !hidden.contains(&e.pid) && !e.is_dead())
            .map(|e| (self.command_of(&table, e), e))
            .collect();
        programs.sort_by_key(|(_, e)| std::cmp::Reverse(e.rss_pages));
        let pressing = self.watch.as_ref().is_some_and(|w| used > w.limit.most + w.limit.reserve / 4);
        if pressing {
            let largest = largest_group(&programs);
            programs.retain(|(command, _)| *command == largest);
        }
        let mut owed = 0;
        for (command, program) in programs {
            if sys::kill(program.pid, libc::SIGKILL).is_err() {
                continue;
            }
            if let Some(proc) = command.and_then(|key| self.procs.get_mut(&key)) {
                proc.starved = true;
            }
            owed += program.rss_pages * proctree::page_kb() * 1024;
            if owed >= excess && !pressing {
                break;
            }
        }
        if let Some(watch) = self.watch.as_mut().filter(|_| owed > 0) {
            watch.note_killed(used, owed);
        }
    }

    /// The command that a program belongs to, if it still runs.
    fn command_of(&self, table: &[Entry], program: &Entry) -> Option<u32> {
        let mut above = vec![program.pid];
        let mut here = program.ppid;
        while here > 1 && above.len() < 1024 && !above.contains(&here) {
            above.push(here);
            here = table.iter().find(|e| e.pid == here).map_or(0, |e| e.ppid);
        }
        let found = |p: &&Proc| {
            let main = [p.shim, p.pid, p.born].iter().any(|pid| *pid > 1 && above.contains(pid));
            p.exit.is_none() && (main || p.pid > 1 && p.pid == program.session)
        };
        self.procs.values().find(found).map(|p| p.key)
    }
}

/// Whose programs have the most memory together.
fn largest_group(programs: &[(Option<u32>, &Entry)]) -> Option<u32> {
    let mut sums: HashMap<Option<u32>, u64> = HashMap::new();
    for (command, program) in programs {
        *sums.entry(*command).or_default() += program.rss_pages;
    }
    sums.into_iter().max_by_key(|(_, pages)| *pages).and_then(|(command, _)| command)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_files_are_counted_with_the_groups_below() {
        let old = "active_file 1\ninactive_file 2\nhierarchical_memory_limit 9\ntotal_active_file 10\ntotal_inactive_file 20\n";
        assert_eq!(file_pages(old), 30);
        assert_eq!(file_pages("anon 5\nactive_file 3\ninactive_file 4\n"), 7);
        assert_eq!(file_pages("nothing known"), 0);
    }

    #[test]
    fn names_of_files_are_given_back() {
        assert_eq!(names("anon 5\nslab_reclaimable 70\nslab_unreclaimable 9\n", 100, 10), 70);
        let old = "cache 1\nrss 2\ntotal_cache 20\ntotal_rss 30\n";
        assert_eq!(names(old, 100, 1000), 50);
        assert_eq!(names(old, 100, 40), 40);
        assert_eq!(names(old, 10, 40), 0);
        assert_eq!(names("nothing known", 100, 40), 0);
    }
}
