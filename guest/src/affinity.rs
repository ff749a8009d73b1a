//! On which processors the programs of a sandbox run: as many as its limit has, so that they count no more than that. Which ones
//! depends on the sandbox's id, so that sandboxes spread over the machine. The limit itself is the control group's; a program may
//! ask for other processors.

use std::sync::OnceLock;

static CHOSEN: OnceLock<libc::cpu_set_t> = OnceLock::new();

/// Chooses once, in the agent, which itself may go on running anywhere.
pub fn choose(count: usize, sandbox: &str) {
    let Some(allowed) = allowed() else { return };
    if count >= allowed.len() {
        return;
    }
    // SAFETY: a set of processors is plain data.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    for cpu in some_of(&allowed, count, sandbox) {
        // SAFETY: the kernel has named this number itself.
        unsafe { libc::CPU_SET(cpu, &mut set) };
    }
    let _ = CHOSEN.set(set);
}

/// In a process below which programs are started. Best effort: refused, programs see all processors.
pub fn narrow() {
    if let Some(set) = CHOSEN.get() {
        // SAFETY: the set is as large as said.
        unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), set) };
    }
}

fn allowed() -> Option<Vec<usize>> {
    // SAFETY: the set is as large as said.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        if libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set) != 0 {
            return None;
        }
        Some((0..libc::CPU_SETSIZE as usize).filter(|cpu| libc::CPU_ISSET(*cpu, &set)).collect())
    }
}

fn some_of<'a>(all: &'a [usize], count: usize, name: &str) -> impl Iterator<Item = usize> + 'a {
    let first = name.bytes().fold(0usize, |sum, byte| sum.wrapping_mul(31).wrapping_add(byte.into()));
    all.iter().copied().cycle().skip(first % all.len().max(1)).take(count.min(all.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sandboxes_spread_over_all_processors() {
        let all = [0, 1, 4, 5];
        let mut used = std::collections::BTreeSet::new();
        for name in ["aa", "ab", "ac", "ad", "ae"] {
            let chosen: std::collections::BTreeSet<_> = some_of(&all, 2, name).collect();
            assert_eq!(chosen.len(), 2);
            used.extend(chosen);
        }
        assert_eq!(used.into_iter().collect::<Vec<_>>(), all);
        assert_eq!(some_of(&all, 9, "x").count(), 4);
    }
}
