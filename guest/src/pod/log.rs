//! The agent's own log: the container's standard output, kept open under another number, and short.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::sys;

const MOST_LINES: usize = 100;
const MOST_BYTES: usize = 200;

pub struct Log {
    out: OwnedFd,
    lines: AtomicUsize,
}

impl Log {
    pub fn open() -> Result<Self, String> {
        let out = sys::dup(1).map_err(|e| format!("standard output: {e}"))?;
        Ok(Self { out, lines: AtomicUsize::new(0) })
    }

    /// Writes a line, unless there were too many; what does not fit is cut, and what is not plain text is left out.
    pub fn say(&self, text: &str) {
        if self.lines.fetch_add(1, Ordering::Relaxed) >= MOST_LINES {
            return;
        }
        let mut line: String = text.chars().filter(|c| c.is_ascii_graphic() || *c == ' ').take(MOST_BYTES).collect();
        line.push('\n');
        let _ = sys::write(self.out.as_raw_fd(), line.as_bytes());
    }
}
