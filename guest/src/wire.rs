//! The frame codec of the guest protocol, without any I/O: bytes in, frames out, and the other way round.

use rmpv::Value;

use crate::op::Map;

pub const VERSION: u64 = 1;
pub const HEAD: usize = 9;
/// Most bytes of one DATA frame, its channel byte not counted.
pub const MAX_DATA: usize = 256 * 1024;
/// Most bytes of any other payload.
pub const MAX_CONTROL: usize = 1024 * 1024;
/// Longest payload of a REQUEST: arguments and environment may have 2 MiB, as Linux allows.
pub const MAX_REQUEST: usize = 4 * 1024 * 1024;
/// A peer that has not said its HELLO yet gets no more than this.
pub const MAX_HELLO: usize = 4096;
/// 32 levels: rmpv counts two for each, and three for the leaf.
const MAX_DEPTH: usize = 67;
const MAX_PING: usize = 64;
const SMALL: usize = 16 * 1024;
const LARGE: usize = HEAD + 1 + MAX_DATA;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    Hello = 0,
    Request = 1,
    Result = 2,
    Event = 3,
    Data = 4,
    Eof = 5,
    Credit = 6,
    Cancel = 7,
    Ping = 8,
    Pong = 9,
    Bye = 10,
}

impl Kind {
    fn from_byte(byte: u8) -> Option<Self> {
        Some(match byte {
            0 => Self::Hello,
            1 => Self::Request,
            2 => Self::Result,
            3 => Self::Event,
            4 => Self::Data,
            5 => Self::Eof,
            6 => Self::Credit,
            7 => Self::Cancel,
            8 => Self::Ping,
            9 => Self::Pong,
            10 => Self::Bye,
            _ => return None,
        })
    }

    fn on_stream_zero(self) -> bool {
        matches!(self, Self::Hello | Self::Ping | Self::Pong | Self::Bye)
    }

    fn longest(self) -> usize {
        match self {
            Self::Data => 1 + MAX_DATA,
            Self::Ping | Self::Pong => MAX_PING,
            Self::Request => MAX_REQUEST,
            _ => MAX_CONTROL,
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
pub struct Frame<'a> {
    pub stream: u32,
    pub kind: Kind,
    pub payload: &'a [u8],
}

impl<'a> Frame<'a> {
    /// Channel and bytes of a DATA frame.
    pub fn data(&self) -> Option<(u8, &'a [u8])> {
        self.payload.split_first().map(|(channel, rest)| (*channel, rest))
    }

    /// Channel of an EOF frame.
    pub fn eof(&self) -> Option<u8> {
        match self.payload {
            [channel] => Some(*channel),
            _ => None,
        }
    }

    /// Channel and bytes allowed by a CREDIT frame.
    pub fn credit(&self) -> Option<(u8, u32)> {
        match self.payload {
            [channel, a, b, c, d] => Some((*channel, u32::from_be_bytes([*a, *b, *c, *d]))),
            _ => None,
        }
    }
}

/// Why a connection cannot go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WireError {
    UnknownKind,
    TooLong,
    WrongStream,
}

/// Collects received bytes and cuts them into frames. Never holds more than one frame of the longest kind.
#[derive(Default)]
pub struct Decoder {
    buf: Vec<u8>,
    start: usize,
    end: usize,
}

impl Decoder {
    /// Room for the next read: never empty.
    pub fn space(&mut self) -> &mut [u8] {
        if self.start == self.end {
            self.start = 0;
            self.end = 0;
        }
        let wanted = self.pending_len().unwrap_or(HEAD).max(SMALL);
        if self.start > 0 && self.buf.len() - self.start < wanted {
            self.buf.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        if self.buf.len() < self.start + wanted || self.end == self.buf.len() {
            let size = (self.start + wanted).max(self.end + SMALL);
            self.buf.resize(size, 0);
        }
        self.buf.get_mut(self.end..).unwrap_or_default()
    }

    /// Says how many bytes were read into `space`.
    pub fn filled(&mut self, count: usize) {
        let full = count > 0 && self.end + count >= self.buf.len();
        self.end = (self.end + count).min(self.buf.len());
        if full && self.buf.len() < LARGE {
            self.buf.resize(LARGE, 0);
        }
    }

    /// Gives memory back when nothing is pending.
    pub fn relax(&mut self) {
        if self.start == self.end && self.buf.len() > SMALL {
            *self = Self::default();
        }
    }

    pub fn pending(&self) -> usize {
        self.end - self.start
    }

    fn pending_len(&self) -> Option<usize> {
        let (length, _, _) = self.head()?;
        Some(HEAD + length.min(MAX_REQUEST))
    }

    fn head(&self) -> Option<(usize, u32, u8)> {
        match self.buf.get(self.start..self.end)? {
            [a, b, c, d, e, f, g, h, kind, ..] => {
                Some((u32::from_be_bytes([*a, *b, *c, *d]) as usize, u32::from_be_bytes([*e, *f, *g, *h]), *kind))
            }
            _ => None,
        }
    }

    /// The next whole frame. An error is final: the connection must be closed.
    pub fn next_frame(&mut self) -> Result<Option<Frame<'_>>, WireError> {
        let Some((length, stream, byte)) = self.head() else { return Ok(None) };
        let kind = Kind::from_byte(byte).ok_or(WireError::UnknownKind)?;
        if length > kind.longest() {
            return Err(WireError::TooLong);
        }
        if kind.on_stream_zero() != (stream == 0) {
            return Err(WireError::WrongStream);
        }
        if self.pending() < HEAD + length {
            return Ok(None);
        }
        let from = self.start + HEAD;
        self.start = from + length;
        let payload = self.buf.get(from..from + length).unwrap_or_default();
        Ok(Some(Frame { stream, kind, payload }))
    }
}

/// The head of a frame.
pub fn head(length: usize, stream: u32, kind: Kind) -> [u8; HEAD] {
    let [a, b, c, d] = u32::try_from(length).unwrap_or(u32::MAX).to_be_bytes();
    let [e, f, g, h] = stream.to_be_bytes();
    [a, b, c, d, e, f, g, h, kind as u8]
}

/// Head and channel byte of a DATA frame that carries `length` bytes.
pub fn data_head(length: usize, stream: u32, channel: u8) -> [u8; HEAD + 1] {
    let mut out = [0; HEAD + 1];
    if let (Some(front), Some(last)) = (out.first_chunk_mut::<HEAD>(), Some(HEAD)) {
        *front = head(length + 1, stream, Kind::Data);
        if let Some(byte) = out.get_mut(last) {
            *byte = channel;
        }
    }
    out
}

/// A whole frame with a raw payload.
pub fn raw(stream: u32, kind: Kind, payload: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(HEAD + payload.len());
    out.extend_from_slice(&head(payload.len(), stream, kind));
    out.extend_from_slice(payload);
    out
}

/// A whole frame with a MessagePack payload; `None` when it would be longer than the protocol allows.
pub fn control(stream: u32, kind: Kind, value: &Value) -> Option<Vec<u8>> {
    let mut out = vec![0; HEAD];
    rmpv::encode::write_value(&mut out, value).ok()?;
    let length = out.len() - HEAD;
    if length > kind.longest() {
        return None;
    }
    if let Some(front) = out.first_chunk_mut::<HEAD>() {
        *front = head(length, stream, kind);
    }
    Some(out)
}

pub fn credit(stream: u32, channel: u8, bytes: u32) -> Vec<u8> {
    let [a, b, c, d] = bytes.to_be_bytes();
    raw(stream, Kind::Credit, &[channel, a, b, c, d])
}

/// Decodes the map of a control message; nesting is limited and nothing may follow it.
pub fn decode_map(mut payload: &[u8]) -> Option<Map> {
    match rmpv::decode::read_value_with_max_depth(&mut payload, MAX_DEPTH) {
        Ok(Value::Map(map)) if payload.is_empty() => Some(map),
        _ => None,
    }
}
