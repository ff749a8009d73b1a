//! Canary dials: connections that must fail, or the pod's network is open.

use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use serde_json::{json, Value};

use crate::forward;

const DIAL: Duration = Duration::from_secs(1);
const AGAIN: Duration = Duration::from_millis(250);
const IN_ALL: Duration = Duration::from_secs(5);

/// How one dial ended.
pub struct Seen {
    pub target: SocketAddr,
    pub outcome: &'static str,
    pub millis: u64,
}

impl Seen {
    pub fn is_open(&self) -> bool {
        self.outcome == "connected"
    }

    pub fn to_json(&self) -> Value {
        let host = self.target.ip().to_string();
        json!({"host": host, "port": self.target.port(), "outcome": self.outcome, "ms": self.millis})
    }
}

/// Dials all, again and again while one of them connects and there is time. The last round is the answer.
pub fn dial(targets: &[SocketAddr]) -> Vec<Seen> {
    let until = Instant::now() + IN_ALL;
    loop {
        let seen = dial_once(targets);
        if !seen.iter().any(Seen::is_open) || Instant::now() + AGAIN > until {
            return seen;
        }
        std::thread::sleep(AGAIN);
    }
}

/// One round: all dials are under way at once.
fn dial_once(targets: &[SocketAddr]) -> Vec<Seen> {
    let started = Instant::now();
    let mut sockets: Vec<Option<OwnedFd>> = Vec::new();
    let mut seen: Vec<Seen> = Vec::new();
    for target in targets {
        let made = forward::connect(target);
        let outcome = made.as_ref().map_or_else(name_error, |_| "timeout");
        seen.push(Seen { target: *target, outcome, millis: 0 });
        sockets.push(made.ok());
    }
    while sockets.iter().any(Option::is_some) && started.elapsed() < DIAL {
        let left = DIAL.saturating_sub(started.elapsed()).as_millis() as i32 + 1;
        let mut polled: Vec<libc::pollfd> = sockets
            .iter()
            .map(|s| libc::pollfd { fd: s.as_ref().map_or(-1, AsRawFd::as_raw_fd), events: libc::POLLOUT, revents: 0 })
            .collect();
        // SAFETY: as many as there are.
        unsafe { libc::poll(polled.as_mut_ptr(), polled.len() as u64, left) };
        for ((socket, seen), polled) in sockets.iter_mut().zip(&mut seen).zip(&polled) {
            if polled.revents != 0 {
                if let Some(fd) = socket.take() {
                    seen.outcome = forward::connect_error(fd.as_raw_fd()).map_or_else(name_error, |()| "connected");
                    seen.millis = started.elapsed().as_millis() as u64;
                }
            }
        }
    }
    for (socket, seen) in sockets.iter().zip(&mut seen) {
        if socket.is_some() {
            seen.millis = started.elapsed().as_millis() as u64;
        }
    }
    seen
}

fn name_error<E: std::borrow::Borrow<std::io::Error>>(error: E) -> &'static str {
    match error.borrow().raw_os_error() {
        Some(libc::ECONNREFUSED | libc::ECONNRESET) => "refused",
        Some(libc::ETIMEDOUT) => "timeout",
        _ => "unreachable",
    }
}
