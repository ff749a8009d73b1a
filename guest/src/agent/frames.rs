//! Dispatch the host's frames: requests, data, credit and cancels, each to its stream.

use std::panic::{catch_unwind, AssertUnwindSafe};

use rmpv::Value;

use super::{Agent, Stream};
use crate::op::{map, OpError, Req};
use crate::wire::{self, Frame, Kind};

impl Agent {
    pub(super) fn on_frame(&mut self, frame: &Frame) {
        match frame.kind {
            Kind::Ping => self.push(wire::raw(0, Kind::Pong, frame.payload)),
            Kind::Pong => {}
            Kind::Request => self.on_request(frame),
            Kind::Data => match frame.data() {
                Some((channel, data)) => self.on_data(frame.stream, channel, data),
                None => self.close_link(),
            },
            Kind::Eof => match frame.eof() {
                Some(channel) => self.on_eof(frame.stream, channel),
                None => self.close_link(),
            },
            Kind::Credit => match frame.credit() {
                Some((channel, bytes)) => self.on_credit(frame.stream, channel, bytes),
                None => self.close_link(),
            },
            Kind::Cancel => self.on_cancel(frame.stream),
            Kind::Hello | Kind::Result | Kind::Event | Kind::Bye => self.close_link(),
        }
    }

    pub(super) fn on_request(&mut self, frame: &Frame) {
        let stream = frame.stream;
        if self.streams.contains_key(&stream) {
            return self.close_link();
        }
        let Some(map) = wire::decode_map(frame.payload) else {
            return self.answer(stream, Err(OpError::invalid("the request is no map")));
        };
        if self.streams.len() >= self.boot.max_streams {
            return self.answer(stream, Err(OpError::new("exhausted", "too many operations at once")));
        }
        let req = Req::new(map);
        let outcome = catch_unwind(AssertUnwindSafe(|| self.dispatch(stream, &req)))
            .unwrap_or_else(|_| Err(OpError::new("internal", "the operation failed inside the agent")));
        match outcome {
            Ok(Some(value)) => self.answer(stream, Ok(value)),
            Ok(None) => {
                if self.streams.contains_key(&stream) {
                    self.rotation.push_back(stream);
                }
            }
            Err(error) => {
                self.streams.remove(&stream);
                self.answer(stream, Err(error));
            }
        }
    }

    pub(super) fn push(&mut self, frame: Vec<u8>) {
        if let Some(link) = &mut self.link {
            link.push(frame);
        }
    }

    pub(super) fn event(&mut self, stream: u32, value: &Value) {
        if let Some(frame) = wire::control(stream, Kind::Event, value) {
            self.push(frame);
        }
    }

    /// Sends RESULT and closes the stream.
    pub(super) fn answer(&mut self, stream: u32, outcome: Result<Value, OpError>) {
        self.streams.remove(&stream);
        let value = match outcome {
            Ok(value) => map([("ok", value)]),
            Err(error) => map([("err", error.to_value())]),
        };
        let frame = wire::control(stream, Kind::Result, &value).or_else(|| {
            let error = OpError::new("exhausted", "the answer is longer than the protocol allows");
            wire::control(stream, Kind::Result, &map([("err", error.to_value())]))
        });
        self.push(frame.unwrap_or_default());
    }

    pub(super) fn on_data(&mut self, stream: u32, channel: u8, data: &[u8]) {
        let size = data.len() as u64;
        let key = match self.streams.get_mut(&stream) {
            None | Some(Stream::Waiting) => return,
            Some(Stream::View(view)) if channel == 0 && view.stdin_credit >= size => {
                view.stdin_credit -= size;
                view.key
            }
            Some(Stream::Op { running, in_credit, .. }) if channel == 0 && *in_credit >= size => {
                *in_credit -= size;
                return running.deliver(data.to_vec());
            }
            Some(Stream::Forward(forward)) if channel == 0 && forward.in_credit >= size => {
                forward.in_credit -= size;
                return forward.push(data);
            }
            _ => return self.close_link(),
        };
        if let Some(stdin) = self.procs.get_mut(&key).and_then(|p| p.stdin.as_mut()) {
            stdin.push(data);
            self.on_stdin(key);
        }
    }

    pub(super) fn on_eof(&mut self, stream: u32, channel: u8) {
        if channel != 0 {
            return;
        }
        match self.streams.get_mut(&stream) {
            Some(Stream::View(view)) => {
                let key = view.key;
                let writes = self.procs.get(&key).is_some_and(|p| p.writer == Some(stream));
                if writes {
                    self.end_stdin(key);
                }
            }
            Some(Stream::Op { running, .. }) => running.deliver_eof(),
            Some(Stream::Forward(forward)) => forward.finish(),
            _ => {}
        }
    }

    pub(super) fn on_credit(&mut self, stream: u32, channel: u8, bytes: u32) {
        let add = |credit: &mut u64| *credit = credit.saturating_add(u64::from(bytes));
        match (self.streams.get_mut(&stream), channel) {
            (Some(Stream::View(view)), 1) => add(&mut view.credit[0]),
            (Some(Stream::View(view)), 2) => add(&mut view.credit[1]),
            (Some(Stream::Op { credit, .. }), 1) => add(credit),
            (Some(Stream::Forward(forward)), 1) => add(&mut forward.credit),
            _ => {}
        }
    }

    pub(super) fn on_cancel(&mut self, stream: u32) {
        match self.streams.get_mut(&stream) {
            Some(Stream::Op { running, .. }) => running.cancel(),
            Some(Stream::Forward(_)) => self.answer(stream, Err(OpError::cancelled())),
            Some(Stream::View(view)) => {
                let (key, owner) = (view.key, view.owner);
                view.discard = true;
                if owner {
                    self.cancel_process(key);
                } else {
                    if let Some(proc) = self.procs.get_mut(&key) {
                        proc.detach(stream);
                    }
                    self.answer(stream, Err(OpError::cancelled()));
                }
            }
            Some(Stream::Waiting) | None => {}
        }
    }

    pub(super) fn on_bell(&mut self) {
        for stream in self.bells.take() {
            let Some(Stream::Op { running, in_credit, .. }) = self.streams.get_mut(&stream) else { continue };
            let grant = running.take_grant();
            if grant > 0 {
                *in_credit += grant;
                self.push(wire::credit(stream, 0, u32::try_from(grant).unwrap_or(u32::MAX)));
            }
        }
    }
}
