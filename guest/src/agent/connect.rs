//! Connections: who may speak to the agent, and what happens when the peer is lost.

use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use rmpv::Value;

use super::renewing::{wipe_bytes, DIAL_QUIET};
use super::{token, Agent, Stream, Timer, FEATURES};
use crate::link::{self, Greeting, Link, Pending};
use crate::op::map;
use crate::sys::{self, IN, OUT};
use crate::wire::{self, Decoder, Kind};

const HELLO_TIME: Duration = Duration::from_secs(5);
pub(super) const DIAL_FIRST: Duration = Duration::from_millis(10);
const DIAL_MOST: Duration = Duration::from_secs(1);
const MOST_PENDING: usize = 8;
/// While this much waits to be sent, no further request is read.
const MOST_CONTROL: usize = 1024 * 1024;

impl Agent {
    pub(super) fn hello(&self) -> Vec<u8> {
        let hello = map([
            ("v", wire::VERSION.into()),
            ("secret", Value::from(self.boot.agent_secret.as_str())),
            ("pid", std::process::id().into()),
            ("boot", Value::from(self.boot_id.as_str())),
            ("features", Value::Array(FEATURES.iter().map(|f| Value::from(*f)).collect())),
            ("uptime_ms", (self.started.elapsed().as_millis() as u64).into()),
        ]);
        wire::control(0, Kind::Hello, &hello).unwrap_or_default()
    }

    pub(super) fn accept(&mut self) {
        let take = if self.boot.handed { sys::take_handed } else { sys::accept };
        while let Some(Ok(fd)) = self.listener.as_ref().map(|l| take(l.as_raw_fd())) {
            if self.pending.len() >= MOST_PENDING {
                self.pending.remove(0);
            }
            self.add_pending(fd);
        }
    }

    pub(super) fn add_pending(&mut self, fd: OwnedFd) {
        let until = Instant::now() + HELLO_TIME;
        self.next_pending = self.next_pending.wrapping_add(1);
        let id = self.next_pending;
        self.poll.set(fd.as_raw_fd(), token::of(token::PENDING, id), 0, IN);
        self.pending.push(Pending { id, fd, decoder: Decoder::default(), until });
        self.at(until, Timer::Hello(id));
    }

    pub(super) fn drop_pending(&mut self, id: u32) {
        let before = self.pending.len();
        self.pending.retain(|p| p.id != id);
        if before != self.pending.len() {
            self.redial();
        }
    }

    pub(super) fn on_pending(&mut self, id: u32) {
        let Some(at) = self.pending.iter().position(|p| p.id == id) else { return };
        let secret = self.boot.host_secret.clone();
        let greeting = self.pending.get_mut(at).map(|p| p.read_hello(&secret));
        match greeting {
            Some(Greeting::Accepted) => {
                let pending = self.pending.remove(at);
                self.timers.remove(&(pending.until, Timer::Hello(id)));
                self.poll.set(pending.fd.as_raw_fd(), 0, IN, 0);
                self.drop_link();
                let mut link = Link::new(pending.fd, pending.decoder);
                if self.boot.dial.is_none() {
                    link.push(self.hello());
                }
                self.dial_pause = DIAL_FIRST;
                self.link = Some(link);
                self.read_frames();
            }
            Some(Greeting::Refused) => self.drop_pending(id),
            _ => {}
        }
    }

    pub(super) fn dial(&mut self) {
        let Some(path) = &self.boot.dial else { return };
        if self.link.is_some() || !self.pending.is_empty() {
            return;
        }
        let mut hello = self.hello();
        match link::dial(path) {
            Ok(fd) if sys::send(fd.as_raw_fd(), &hello).is_ok_and(|n| n == hello.len()) => self.add_pending(fd),
            _ => self.redial(),
        }
        wipe_bytes(&mut hello);
    }

    /// Under `dial`, tries again after a pause that grows.
    pub(super) fn redial(&mut self) {
        if self.boot.dial.is_some() {
            self.at(Instant::now() + self.dial_pause, Timer::Dial);
            let most = if self.quiet { DIAL_QUIET } else { DIAL_MOST };
            self.dial_pause = (self.dial_pause * 2).min(most);
        }
    }

    /// The connection is gone: what only served its peer ends, processes go on.
    pub(super) fn drop_link(&mut self) {
        let had = self.link.take().is_some();
        self.closing = false;
        for (_, stream) in std::mem::take(&mut self.streams) {
            match stream {
                Stream::Op { running, .. } => running.cancel(),
                Stream::View(view) => {
                    if let Some(proc) = self.procs.get_mut(&view.key) {
                        proc.detach_all();
                    }
                }
                Stream::Forward(_) | Stream::Waiting => {}
            }
        }
        self.rotation.clear();
        for proc in self.procs.values_mut() {
            proc.kill_waiters.clear();
        }
        if had {
            self.redial();
        }
    }

    pub(super) fn on_link(&mut self, ready: u32) {
        if ready & !OUT == 0 {
            return;
        }
        let Some(link) = &mut self.link else { return };
        let fd = link.raw();
        let space = link.decoder.space();
        let room = space.len();
        match sys::read(fd, space) {
            Ok(0) => self.drop_link(),
            Ok(n) => {
                link.decoder.filled(n);
                self.read_frames();
                if n < room / 4 {
                    if let Some(link) = &mut self.link {
                        link.decoder.relax();
                    }
                }
            }
            Err(e) if sys::would_block(&e) => {}
            Err(_) => self.drop_link(),
        }
    }

    pub(super) fn read_frames(&mut self) {
        let Some(link) = &mut self.link else { return };
        let mut decoder = std::mem::take(&mut link.decoder);
        loop {
            match decoder.next_frame() {
                Ok(Some(frame)) => self.on_frame(&frame),
                Ok(None) => break,
                Err(_) => self.closing = true,
            }
            if self.closing || self.link.is_none() {
                return self.drop_link();
            }
        }
        if let Some(link) = &mut self.link {
            link.decoder = decoder;
        }
    }

    /// Closes the connection after the frame at hand: the peer broke the protocol.
    pub(super) fn close_link(&mut self) {
        self.closing = true;
    }

    /// Keeps interest in the connection in step with what waits.
    pub(super) fn refresh_link(&mut self) {
        let Some(link) = &mut self.link else { return };
        let read = if link.queued() < MOST_CONTROL { IN } else { 0 };
        let wanted = read | if link.blocked { OUT } else { 0 };
        self.poll.set(link.raw(), token::of(token::LINK, 0), link.interest, wanted);
        link.interest = wanted;
    }
}
