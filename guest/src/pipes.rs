//! The pipes or the terminal of a process: output into rings, stdin out of a queue.

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, OwnedFd};

use crate::ring::Ring;
use crate::sys;

/// How much the host may send to a stdin ahead of the process.
pub const STDIN_WINDOW: u64 = 1024 * 1024;
const READ: usize = 256 * 1024;
/// From this much output on a pipe gets a larger buffer.
const FLOOD: u64 = 1024 * 1024;
/// Output of a terminal that is still taken after the process has ended.
const PTY_REST: u64 = 4 * 1024 * 1024;

/// One output stream of a process.
pub struct Out {
    pub fd: Option<OwnedFd>,
    pub ring: Ring,
    /// Nothing from here on may be overwritten while output is not dropped.
    pub floor: u64,
    /// Where the output of the main process ends, once that is known.
    pub last: Option<u64>,
    pub interest: u32,
    /// Bytes still to be read after the process has ended while somebody else holds the pipe.
    rest: Option<u64>,
    large: bool,
}

/// The result of a read from the process.
#[derive(Debug, PartialEq, Eq, Clone, Copy)]
pub enum Got {
    Data,
    Nothing,
    End,
}

impl Out {
    pub fn new(fd: Option<OwnedFd>, capacity: usize) -> Self {
        Self { fd, ring: Ring::new(capacity), floor: 0, last: None, interest: 0, rest: None, large: false }
    }

    /// The reader that decides has come to `position`. Half of the ring stays behind it: what was sent is not yet there.
    pub fn reached(&mut self, position: u64) {
        self.floor = position.saturating_sub(self.ring.capacity() as u64 / 2);
    }

    pub fn wants_read(&self, dropping: bool) -> bool {
        self.fd.is_some() && (dropping || self.ring.room(self.floor) > 0)
    }

    /// Reads once into the ring.
    pub fn read(&mut self, dropping: bool, pty: bool) -> Got {
        let Some(fd) = self.fd.as_ref().map(AsRawFd::as_raw_fd) else { return Got::End };
        let floor = if dropping { u64::MAX } else { self.floor };
        let (first, second) = self.ring.space(floor, READ);
        if first.is_empty() {
            return Got::Nothing;
        }
        match sys::readv2(fd, first, second) {
            Ok(0) => Got::End,
            Ok(n) => {
                self.ring.advance(n);
                if let Some(rest) = &mut self.rest {
                    *rest = rest.saturating_sub(n as u64);
                    if *rest == 0 {
                        self.last.get_or_insert(self.ring.end());
                    }
                }
                if !self.large && !pty && self.ring.end() > FLOOD {
                    self.large = true;
                    unsafe { libc::fcntl(fd, libc::F_SETPIPE_SZ, 1024 * 1024) };
                }
                Got::Data
            }
            Err(e) if sys::would_block(&e) => {
                if self.rest.is_some() {
                    self.last.get_or_insert(self.ring.end());
                }
                Got::Nothing
            }
            Err(_) => Got::End,
        }
    }

    /// Nobody can write any more.
    pub fn end(&mut self) {
        self.fd = None;
        self.last.get_or_insert(self.ring.end());
    }

    /// The main process has ended: what is in the pipe now is the last of it.
    pub fn settle(&mut self, pty: bool) {
        let Some(fd) = self.fd.as_ref().map(AsRawFd::as_raw_fd) else {
            self.last.get_or_insert(self.ring.end());
            return;
        };
        if sys::hung_up(fd) {
            return;
        }
        let rest = if pty { PTY_REST } else { sys::readable_bytes(fd) };
        self.rest = Some(rest);
        if rest == 0 {
            self.last.get_or_insert(self.ring.end());
        }
    }
}

/// The way into a process.
pub struct Stdin {
    pub fd: Option<OwnedFd>,
    pub queue: VecDeque<Vec<u8>>,
    pub queued: usize,
    pub eof: bool,
    pub interest: u32,
    /// Bytes taken out of the queue since credit was last given.
    pub drained: u64,
    offset: usize,
}

impl Stdin {
    pub fn new(fd: OwnedFd) -> Self {
        Self { fd: Some(fd), queue: VecDeque::new(), queued: 0, eof: false, interest: 0, drained: 0, offset: 0 }
    }

    pub fn push(&mut self, data: &[u8]) {
        if !self.eof && !data.is_empty() {
            self.queued += data.len();
            self.queue.push_back(data.to_vec());
        }
    }

    /// Writes what the process takes. A process that reads no more swallows the rest.
    pub fn write(&mut self) {
        while let Some(piece) = self.queue.front() {
            let rest = piece.get(self.offset..).unwrap_or_default();
            let result = match &self.fd {
                Some(fd) => sys::write(fd.as_raw_fd(), rest),
                None => Ok(rest.len()),
            };
            let taken = match result {
                Ok(n) => n,
                Err(e) if sys::would_block(&e) => return,
                Err(_) => {
                    self.fd = None;
                    continue;
                }
            };
            self.drained += taken as u64;
            self.queued -= taken;
            self.offset += taken;
            if self.offset >= piece.len() {
                self.queue.pop_front();
                self.offset = 0;
            }
        }
        if self.eof {
            self.fd = None;
        }
    }

    /// Nothing more will be written.
    pub fn close(&mut self) {
        self.fd = None;
        self.eof = true;
        self.drained += self.queued as u64;
        self.queued = 0;
        self.offset = 0;
        self.queue.clear();
    }
}
