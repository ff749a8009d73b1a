//! Send output to the host: each open stream in turn sends one frame while the connection takes it.

use std::io;
use std::os::fd::AsRawFd;

use super::{token, Agent, Stream, View};
use crate::bridge::Item;
use crate::forward::{self, Phase};
use crate::op::{map, OpError};
use crate::wire::{self, Kind, MAX_DATA};

/// The result of a stream's turn.
enum Turn {
    Idle,
    Sent,
    Over(Result<rmpv::Value, OpError>),
}

impl Agent {
    /// Sends until nothing is ready or the connection is full.
    pub(super) fn pump(&mut self) {
        if let Err(_lost) = self.pump_link() {
            self.drop_link();
        }
        let keys: Vec<u32> = self
            .streams
            .values()
            .filter_map(|s| if let Stream::View(view) = s { Some(view.key) } else { None })
            .collect();
        for key in keys {
            self.refresh_reader(key);
        }
        self.refresh_forwards();
        self.refresh_link();
    }

    fn pump_link(&mut self) -> io::Result<()> {
        loop {
            let Some(link) = &mut self.link else { return Ok(()) };
            if !link.flush()? {
                return Ok(());
            }
            if !self.next_turn()? {
                return Ok(());
            }
        }
    }

    /// Gives one stream its turn. False when no stream has anything.
    fn next_turn(&mut self) -> io::Result<bool> {
        for _ in 0..self.rotation.len() {
            let Some(id) = self.rotation.pop_front() else { break };
            let Some(mut stream) = self.streams.remove(&id) else { continue };
            let turn = match &mut stream {
                Stream::View(view) => self.view_turn(id, view),
                Stream::Op { .. } => self.op_turn(id, &mut stream),
                Stream::Forward(_) => self.forward_turn(id, &mut stream),
                Stream::Waiting => Ok(Turn::Idle),
            };
            self.streams.insert(id, stream);
            match turn? {
                Turn::Idle => self.rotation.push_back(id),
                Turn::Sent => {
                    self.rotation.push_back(id);
                    return Ok(true);
                }
                Turn::Over(outcome) => {
                    self.answer(id, outcome);
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    fn view_turn(&mut self, id: u32, view: &mut View) -> io::Result<Turn> {
        let (Some(link), Some(proc)) = (&mut self.link, self.procs.get_mut(&view.key)) else {
            return Ok(Turn::Over(Err(OpError::new("not_found", "the process record is gone"))));
        };
        if !view.announced {
            return Ok(Turn::Idle);
        }
        let holds = proc.holder == Some(id);
        let ended = proc.exit.is_some();
        let states = proc.outs.iter_mut().zip(&mut view.position).zip(&mut view.credit).zip(&mut view.eof_sent);
        let mut closed = false;
        for (channel, (((out, position), credit), eof_sent)) in (1u8..).zip(states) {
            if view.discard {
                break;
            }
            if *position < out.ring.start() {
                let gap = map([("ch", channel.into()), ("from", (*position).into()), ("to", out.ring.start().into())]);
                *position = out.ring.start();
                link.push(wire::control(id, Kind::Event, &map([("gap", gap)])).unwrap_or_default());
                return Ok(Turn::Sent);
            }
            let end = if view.follow { out.ring.end() } else { out.last.unwrap_or(out.ring.end()) };
            let most = end.saturating_sub(*position).min(*credit).min(MAX_DATA as u64) as usize;
            if most > 0 {
                if closed {
                    break; // data goes out only when nothing waits before it
                }
                let (first, second) = out.ring.slices(*position, most);
                link.send_data(id, channel, first, second)?;
                *position += most as u64;
                *credit -= most as u64;
                if holds {
                    out.reached(*position);
                }
                return Ok(Turn::Sent);
            }
            if out.fd.is_none() && *position >= end && !*eof_sent && !ended && !(proc.pty && channel == 2) {
                *eof_sent = true;
                link.push(wire::raw(id, Kind::Eof, &[channel]));
                closed = true; // mostly both end in the same moment: then both are told in one message
            }
        }
        if closed {
            return Ok(Turn::Sent);
        }
        let delivered = proc.outs.iter().zip(&view.position).all(|(out, position)| match view.follow {
            true => out.fd.is_none() && *position >= out.ring.end(),
            false => out.last.is_some_and(|last| *position >= last),
        });
        if !ended || !(view.discard || delivered) {
            return Ok(Turn::Idle);
        }
        let value = proc.result_value();
        proc.detach(id);
        proc.dropping = true;
        proc.reported = true;
        let key = view.key;
        self.refresh(key);
        Ok(Turn::Over(Ok(value)))
    }

    fn op_turn(&mut self, id: u32, stream: &mut Stream) -> io::Result<Turn> {
        let (Some(link), Stream::Op { running, credit, .. }) = (&mut self.link, stream) else { return Ok(Turn::Idle) };
        match running.take(*credit) {
            Some(Item::Frame(frame)) => {
                running.sent(frame.len(), None);
                link.push(frame);
                Ok(Turn::Sent)
            }
            Some(Item::Data(data, from)) => {
                let rest = data.get(from..).unwrap_or_default();
                let most = rest.len().min(usize::try_from(*credit).unwrap_or(usize::MAX));
                link.send_data(id, 1, rest.get(..most).unwrap_or_default(), &[])?;
                *credit -= most as u64;
                let left = most < rest.len();
                running.sent(most, left.then(|| Item::Data(data, from + most)));
                Ok(Turn::Sent)
            }
            None => Ok(running.finished().map_or(Turn::Idle, Turn::Over)),
        }
    }

    fn forward_turn(&mut self, id: u32, stream: &mut Stream) -> io::Result<Turn> {
        let (Some(link), Stream::Forward(forward)) = (&mut self.link, stream) else { return Ok(Turn::Idle) };
        if forward.drained > 0 {
            let grant = std::mem::take(&mut forward.drained);
            forward.in_credit += grant;
            link.push(wire::credit(id, 0, u32::try_from(grant).unwrap_or(u32::MAX)));
            return Ok(Turn::Sent);
        }
        if forward.outgoing.is_empty() && forward.credit > 0 {
            forward.read();
        }
        let most = forward.outgoing.len().min(usize::try_from(forward.credit).unwrap_or(usize::MAX));
        if most > 0 {
            link.send_data(id, 1, forward.outgoing.get(..most).unwrap_or_default(), &[])?;
            forward.credit -= most as u64;
            forward.outgoing.drain(..most);
            return Ok(Turn::Sent);
        }
        if forward.read_end && forward.outgoing.is_empty() && !forward.eof_sent {
            forward.eof_sent = true;
            link.push(wire::raw(id, Kind::Eof, &[1]));
            return Ok(Turn::Sent);
        }
        Ok(if forward.is_over() { Turn::Over(Ok(map([]))) } else { Turn::Idle })
    }

    /// Room in the ring means that the process may be read again.
    fn refresh_reader(&mut self, key: u32) {
        let Some(proc) = self.procs.get(&key) else { return };
        let drops = proc.drops();
        let stuck = |which: usize| {
            proc.outs.get(which).is_some_and(|out| proc.exit.is_some() && out.last.is_none() && out.wants_read(drops))
        };
        let (first, second) = (stuck(0) && proc.pty, stuck(1) && proc.pty);
        if first {
            self.on_output(key, 0);
        }
        if second {
            self.on_output(key, 1);
        }
        self.refresh(key);
    }

    pub(super) fn on_forward(&mut self, id: u32, ready: u32) {
        let Some(Stream::Forward(forward)) = self.streams.get_mut(&id) else { return };
        if forward.phase == Phase::Connecting {
            match forward.connected() {
                Ok(()) => {
                    forward.in_credit += forward::WINDOW;
                    self.event(id, &map([("connected", true.into())]));
                    self.push(wire::credit(id, 0, forward::WINDOW as u32));
                }
                Err(error) => {
                    if !forward.retry() {
                        self.answer(id, Err(forward::refused(error)));
                    }
                    return;
                }
            }
        }
        if let Some(Stream::Forward(forward)) = self.streams.get_mut(&id) {
            forward.write();
            if ready & !crate::sys::OUT != 0 && forward.credit > 0 {
                forward.read();
            }
        }
    }

    fn refresh_forwards(&mut self) {
        for (id, stream) in &mut self.streams {
            if let Stream::Forward(forward) = stream {
                let wanted = forward.wanted();
                self.poll.set(forward.fd.as_raw_fd(), token::of(token::FORWARD, *id), forward.interest, wanted);
                forward.interest = wanted;
            }
        }
    }
}
