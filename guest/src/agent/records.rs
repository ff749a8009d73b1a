//! Records of finished processes: how many are kept, and which ids were there once.

use std::collections::HashSet;

use super::{Agent, Stream};

const KEPT_FINISHED: usize = 64;
const KEPT_RING_BYTES: usize = 16 * 1024 * 1024;
const KEPT_IDS: usize = 16 * 1024;

impl Agent {
    /// Nothing of the process is left: its rings shrink, and old records make room.
    pub(super) fn on_over(&mut self, key: u32) {
        let Some(proc) = self.procs.get_mut(&key) else { return };
        for out in &mut proc.outs {
            out.ring.shrink();
        }
        if proc.forgotten {
            self.drop_record(key);
        }
        self.trim_records();
    }

    pub(super) fn trim_records(&mut self) {
        let busy: HashSet<u32> = self.viewed();
        let mut over: Vec<(u32, bool, usize)> = self
            .procs
            .values()
            .filter(|p| p.is_over() && !busy.contains(&p.key))
            .map(|p| (p.key, p.reported, p.outs.iter().map(|o| o.ring.footprint()).sum()))
            .collect();
        over.sort_unstable();
        let mut bytes: usize = over.iter().map(|(_, _, size)| size).sum();
        let mut count = over.len();
        // Those whose end the host has seen go first; the others stay as long as there is any room.
        for (key, reported, size) in over {
            if (count > KEPT_FINISHED && reported) || count > self.boot.max_procs {
                self.drop_record(key);
                count -= 1;
                bytes -= size;
            } else if bytes > KEPT_RING_BYTES {
                if let Some(proc) = self.procs.get_mut(&key) {
                    proc.outs.iter_mut().for_each(|out| out.ring.clear());
                }
                bytes -= size;
            }
        }
    }

    pub(super) fn viewed(&self) -> HashSet<u32> {
        self.streams.values().filter_map(|s| if let Stream::View(view) = s { Some(view.key) } else { None }).collect()
    }

    pub(super) fn drop_record(&mut self, key: u32) {
        let Some(proc) = self.procs.remove(&key) else { return };
        if self.ids.get(&proc.id) == Some(&key) {
            self.ids.remove(&proc.id);
        }
        let mark = mark_of(&proc.id);
        if self.past.insert(mark) {
            self.past_order.push_back(mark);
        }
        if self.past_order.len() > KEPT_IDS {
            if let Some(old) = self.past_order.pop_front() {
                self.past.remove(&old);
            }
        }
    }
}

pub(super) fn mark_of(id: &str) -> u64 {
    use std::hash::{DefaultHasher, Hash, Hasher};
    let mut hasher = DefaultHasher::new();
    id.hash(&mut hasher);
    hasher.finish()
}
