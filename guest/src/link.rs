//! The connection to the host: what is queued for it, and how a peer proves who it is.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::time::Instant;

use rmpv::Value;

use crate::op::Req;
use crate::sys;
use crate::wire::{self, Decoder, Kind, HEAD, MAX_HELLO};

const BATCH: usize = 64 * 1024;

/// A connection. `outgoing` is always finished before another frame starts.
pub struct Link {
    pub fd: OwnedFd,
    pub decoder: Decoder,
    pub interest: u32,
    pub blocked: bool,
    control: VecDeque<Vec<u8>>,
    control_bytes: usize,
    outgoing: Vec<u8>,
    sent: usize,
}

impl Link {
    pub fn new(fd: OwnedFd, decoder: Decoder) -> Self {
        let size: libc::c_int = 1024 * 1024;
        unsafe {
            libc::setsockopt(fd.as_raw_fd(), libc::SOL_SOCKET, libc::SO_SNDBUF, (&raw const size).cast(), 4);
        }
        Self {
            fd,
            decoder,
            interest: 0,
            blocked: false,
            control: VecDeque::new(),
            control_bytes: 0,
            outgoing: Vec::new(),
            sent: 0,
        }
    }

    pub fn raw(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    pub fn push(&mut self, frame: Vec<u8>) {
        self.control_bytes += frame.len();
        self.control.push_back(frame);
    }

    /// Bytes of control messages that wait.
    pub fn queued(&self) -> usize {
        self.control_bytes
    }

    /// Sends what is begun and all control messages. False when the socket takes no more.
    pub fn flush(&mut self) -> io::Result<bool> {
        loop {
            if self.sent == self.outgoing.len() {
                self.outgoing.clear();
                self.outgoing.shrink_to(BATCH);
                self.sent = 0;
                while self.outgoing.len() < BATCH {
                    let Some(frame) = self.control.pop_front() else { break };
                    self.control_bytes -= frame.len();
                    self.outgoing.extend_from_slice(&frame);
                }
                if self.outgoing.is_empty() {
                    self.blocked = false;
                    return Ok(true);
                }
            }
            match sys::send(self.raw(), self.outgoing.get(self.sent..).unwrap_or_default()) {
                Ok(n) => self.sent += n,
                Err(e) if sys::would_block(&e) => {
                    self.blocked = true;
                    return Ok(false);
                }
                Err(e) => return Err(e),
            }
        }
    }

    /// Sends a DATA frame straight from where its bytes are. Only after a `flush` that said true.
    pub fn send_data(&mut self, stream: u32, channel: u8, first: &[u8], second: &[u8]) -> io::Result<()> {
        let head = wire::data_head(first.len() + second.len(), stream, channel);
        let pieces = [head.as_slice(), first, second];
        let mut done = match sys::send3(self.raw(), pieces) {
            Ok(n) => n,
            Err(e) if sys::would_block(&e) => 0,
            Err(e) => return Err(e),
        };
        for piece in pieces {
            let skip = done.min(piece.len());
            done -= skip;
            self.outgoing.extend_from_slice(piece.get(skip..).unwrap_or_default());
        }
        Ok(())
    }
}

/// A connection whose peer has not proved itself yet.
pub struct Pending {
    pub id: u32,
    pub fd: OwnedFd,
    pub decoder: Decoder,
    pub until: Instant,
}

/// How far a HELLO has come.
pub enum Greeting {
    Incomplete,
    Accepted,
    Refused,
}

impl Pending {
    /// Reads what is there and judges it. Nothing is answered to a peer that is refused.
    pub fn read_hello(&mut self, secret: &str) -> Greeting {
        let room = (MAX_HELLO + HEAD).saturating_sub(self.decoder.pending());
        let space = self.decoder.space();
        let most = room.min(space.len());
        match sys::read(self.fd.as_raw_fd(), space.get_mut(..most).unwrap_or_default()) {
            Ok(0) => return Greeting::Refused,
            Ok(n) => self.decoder.filled(n),
            Err(e) if sys::would_block(&e) => return Greeting::Incomplete,
            Err(_) => return Greeting::Refused,
        }
        let full = self.decoder.pending() >= MAX_HELLO + HEAD;
        match self.decoder.next_frame() {
            Ok(Some(frame)) if frame.kind == Kind::Hello => {
                let hello = wire::decode_map(frame.payload).map(Req::new);
                match hello.is_some_and(|hello| is_good_hello(&hello, secret)) {
                    true => Greeting::Accepted,
                    false => Greeting::Refused,
                }
            }
            Ok(None) if !full => Greeting::Incomplete,
            _ => Greeting::Refused,
        }
    }
}

fn is_good_hello(hello: &Req, secret: &str) -> bool {
    let version = hello.get("v").and_then(Value::as_u64) == Some(wire::VERSION);
    let said = hello.get("secret").and_then(Value::as_str).unwrap_or_default();
    same_secret(said.as_bytes(), secret.as_bytes()) && version
}

/// Compares in a time that does not depend on where the two differ.
fn same_secret(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && std::hint::black_box(a.iter().zip(b).fold(0, |acc, (x, y)| acc | (x ^ y))) == 0
}

/// Connects to a Unix socket by path; such a connect is done or failed at once.
pub fn dial(path: &str) -> io::Result<OwnedFd> {
    let stream = std::os::unix::net::UnixStream::connect(path)?;
    stream.set_nonblocking(true)?;
    Ok(stream.into())
}
