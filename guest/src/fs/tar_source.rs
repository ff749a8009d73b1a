//! The bytes of an archive as they come from the stream, inflated if need be and never more than is believable.

use super::tar_format::{broken, padding, BLOCK};
use crate::op::{OpError, OpIo};
use flate2::bufread::MultiGzDecoder;
use std::io::{self, BufRead, Read};

/// Bytes inflated before the ratio counts: short archives may well be very regular.
const RATIO_FREE: u64 = 64 << 20;
/// Inflated bytes per compressed one; deflate cannot exceed 1032, and honest archives stay far below this.
const LARGEST_RATIO: u64 = 250;

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    Detect,
    Gzip,
    None,
}

/// The stream as a reader. An error of the stream is kept, because `io::Error` cannot carry it.
struct Incoming<'a> {
    io: &'a mut dyn OpIo,
    chunk: Vec<u8>,
    at: usize,
    received: u64,
    failure: Option<OpError>,
}

impl Incoming<'_> {
    fn refill(&mut self) -> Result<(), OpError> {
        while self.at >= self.chunk.len() {
            let Some(chunk) = self.io.recv()? else { return Ok(()) };
            self.received += chunk.len() as u64;
            self.chunk = chunk;
            self.at = 0;
        }
        Ok(())
    }
}

impl BufRead for Incoming<'_> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        if let Err(error) = self.refill() {
            self.failure = Some(error);
            return Err(io::Error::other("the stream failed"));
        }
        Ok(self.chunk.get(self.at..).unwrap_or_default())
    }

    fn consume(&mut self, amount: usize) {
        self.at += amount;
    }
}

impl Read for Incoming<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let got = self.fill_buf()?.read(buffer)?;
        self.consume(got);
        Ok(got)
    }
}

enum Reader<'a> {
    Plain(Incoming<'a>),
    Gzip(Box<MultiGzDecoder<Incoming<'a>>>),
}

pub struct Source<'a> {
    reader: Reader<'a>,
    inflated: u64,
}

impl<'a> Source<'a> {
    pub fn new(io: &'a mut dyn OpIo, compression: Compression) -> Result<Self, OpError> {
        let mut incoming = Incoming { io, chunk: Vec::new(), at: 0, received: 0, failure: None };
        // Two bytes tell gzip; a first chunk of one byte is joined with the next.
        while incoming.chunk.len() < 2 {
            let Some(mut more) = incoming.io.recv()? else { break };
            incoming.received += more.len() as u64;
            incoming.chunk.append(&mut more);
        }
        let gzip = match compression {
            Compression::Detect => incoming.chunk.starts_with(&[0x1f, 0x8b]),
            Compression::Gzip => true,
            Compression::None => false,
        };
        let reader = if gzip { Reader::Gzip(Box::new(MultiGzDecoder::new(incoming))) } else { Reader::Plain(incoming) };
        Ok(Self { reader, inflated: 0 })
    }

    fn incoming(&mut self) -> &mut Incoming<'a> {
        match &mut self.reader {
            Reader::Plain(incoming) => incoming,
            Reader::Gzip(decoder) => decoder.get_mut(),
        }
    }

    pub fn io(&self) -> &dyn OpIo {
        match &self.reader {
            Reader::Plain(incoming) => &*incoming.io,
            Reader::Gzip(decoder) => &*decoder.get_ref().io,
        }
    }

    fn read(&mut self, buffer: &mut [u8]) -> Result<usize, OpError> {
        let result = match &mut self.reader {
            Reader::Plain(incoming) => incoming.read(buffer),
            Reader::Gzip(decoder) => decoder.read(buffer),
        };
        let got = match result {
            Ok(got) => got,
            Err(error) => {
                let failure = self.incoming().failure.take();
                return Err(failure.unwrap_or_else(|| broken(&error.to_string())));
            }
        };
        self.inflated += got as u64;
        if let Reader::Gzip(decoder) = &self.reader {
            let received = decoder.get_ref().received;
            if self.inflated > RATIO_FREE && self.inflated / LARGEST_RATIO > received {
                return Err(OpError::new("exhausted", "the archive inflates beyond belief"));
            }
        }
        Ok(got)
    }

    /// Fills the buffer or fails.
    pub fn exact(&mut self, buffer: &mut [u8]) -> Result<(), OpError> {
        match self.fill(buffer)? {
            got if got == buffer.len() => Ok(()),
            _ => Err(broken("it ends in the middle")),
        }
    }

    fn fill(&mut self, buffer: &mut [u8]) -> Result<usize, OpError> {
        let mut filled = 0;
        while let Some(space) = buffer.get_mut(filled..).filter(|space| !space.is_empty()) {
            match self.read(space)? {
                0 => break,
                got => filled += got,
            }
        }
        Ok(filled)
    }

    /// The next block; `false` where the stream ends between blocks.
    pub fn block(&mut self, block: &mut [u8; BLOCK]) -> Result<bool, OpError> {
        match self.fill(block)? {
            0 => Ok(false),
            BLOCK => Ok(true),
            _ => Err(broken("it ends in the middle")),
        }
    }

    pub fn skip(&mut self, mut bytes: u64) -> Result<(), OpError> {
        let mut buffer = vec![0u8; bytes.min(64 << 10) as usize];
        while bytes > 0 {
            super::alive(self.io())?;
            let want = bytes.min(buffer.len() as u64) as usize;
            let Some(space) = buffer.get_mut(..want) else { break };
            self.exact(space)?;
            bytes -= want as u64;
        }
        Ok(())
    }

    /// Passes over the content of a member that has none to give.
    pub fn skip_content(&mut self, size: u64) -> Result<(), OpError> {
        self.skip(size)?;
        self.skip(padding(size) as u64)
    }

    /// Takes what is left after the end of the archive off the stream, without inflating it.
    pub fn drain(&mut self) -> Result<(), OpError> {
        while self.incoming().io.recv()?.is_some() {}
        Ok(())
    }
}
