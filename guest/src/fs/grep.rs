//! `grep`: lines that match a pattern, in one file or in a tree.
//!
//! A block of whole lines is searched at once. Only where a match could mean something else than it does for its line
//! alone (it runs over the end of the line, or the file has carriage returns) the lines are searched one by one.

use super::alive;
use super::list::Batch;
use super::node;
use super::paths::Paths;
use super::select::{choice, compile, each_file, Selected};
use crate::op::{map, text_or_bin, OpError, OpIo, Req};
use memchr::{memchr, memchr_iter, memrchr};
use regex::bytes::Regex;
use rmpv::Value;
use rustix::fd::OwnedFd;
use rustix::fs::{FileType, OFlags};

const BLOCK: usize = 256 << 10;
/// The most that is searched of one line; of a longer one only the beginning is searched.
const LONGEST_LINE: usize = 16 << 20;
/// Files with a NUL in this many first bytes count as binary.
const SNIFFED: usize = 8192;
/// No line is reported beyond this, so that each fits into a frame.
const LONGEST_CONTENT: usize = 128 << 10;
const DEFAULT_MATCHES: u64 = 10_000;
const DEFAULT_LINE_BYTES: u64 = 4096;

pub fn grep(req: &Req, io: &mut dyn OpIo) -> Result<Value, OpError> {
    let path = req.path("path")?;
    let pattern = req.str("pattern")?;
    let ignore_case = req.opt_bool("ignore_case", false)?;
    let recursive = req.opt_bool("recursive", true)?;
    let choice = choice(req)?;
    let max_matches = match req.opt_u64("max_matches")?.unwrap_or(DEFAULT_MATCHES) {
        0 => u64::MAX,
        limit => limit,
    };
    let line_bytes = match req.opt_u64("max_line_bytes")?.unwrap_or(DEFAULT_LINE_BYTES) {
        0 => LONGEST_CONTENT,
        limit => limit.min(LONGEST_CONTENT as u64) as usize,
    };
    let line = compile(pattern, ignore_case, false)?;
    let block = if means_the_same_in_a_block(pattern) { Some(compile(pattern, ignore_case, true)?) } else { None };

    let mut search = Search { line, block, buffer: vec![0; BLOCK] };
    let mut report = Report { batch: Batch::new("matches"), count: 0, truncated: false, max_matches, line_bytes };
    let mut files = 0u64;
    each_file(&path, Paths::of(req)?, recursive, &choice, io, &mut |selected, io| {
        files += u64::from(search.file(&selected, &mut report, io)?);
        Ok(!report.truncated)
    })?;
    report.batch.flush(io)?;
    Ok(map([
        ("count", Value::from(report.count)),
        ("truncated", Value::from(report.truncated)),
        ("files", Value::from(files)),
    ]))
}

/// Whether `^` and `$` read as line anchors give a pattern that finds in a block of lines what the original finds in each.
/// `\A`, `\z` and most flags do not, so patterns with them are only used line by line.
fn means_the_same_in_a_block(pattern: &str) -> bool {
    if pattern.contains("\\A") || pattern.contains("\\z") {
        return false;
    }
    let groups = pattern.split("(?").skip(1);
    groups.into_iter().all(|rest| [":", "P<", "<", "i)", "i:"].iter().any(|harmless| rest.starts_with(harmless)))
}

struct Report {
    batch: Batch<'static>,
    count: u64,
    truncated: bool,
    max_matches: u64,
    line_bytes: usize,
}

impl Report {
    /// Reports a line, unless it is not text. `false`: that was one too many.
    fn add(&mut self, path: &[u8], line: u64, offset: u64, content: &[u8], io: &mut dyn OpIo) -> Result<bool, OpError> {
        let Ok(text) = std::str::from_utf8(content) else { return Ok(true) };
        if self.count >= self.max_matches {
            self.truncated = true;
            return Ok(false);
        }
        self.count += 1;
        let content = cut(text, self.line_bytes);
        let bytes = path.len() + content.len();
        let found = map([
            ("path", text_or_bin(path)),
            ("line", Value::from(line)),
            ("offset", Value::from(offset)),
            ("content", Value::from(content)),
        ]);
        self.batch.push(found, bytes, io)?;
        Ok(true)
    }
}

/// At most `limit` bytes of a line, cut between characters and marked where it was cut.
fn cut(text: &str, limit: usize) -> String {
    if text.len() <= limit {
        return text.to_owned();
    }
    let mut end = limit;
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    format!("{}…", text.get(..end).unwrap_or_default())
}

struct Search {
    line: Regex,
    block: Option<Regex>,
    buffer: Vec<u8>,
}

/// Where a block lies in its file.
struct Position {
    line: u64,
    offset: u64,
}

impl Search {
    /// Searches one file. `false`: it was passed over.
    fn file(&mut self, selected: &Selected<'_>, report: &mut Report, io: &mut dyn OpIo) -> Result<bool, OpError> {
        let Some(fd) = open(selected)? else { return Ok(false) };
        let mut at = Position { line: 1, offset: 0 };
        let (mut filled, mut first, mut skipping) = (0, true, false);
        loop {
            alive(io)?;
            let (total, ended) = match self.fill(&fd, filled) {
                Ok(read) => read,
                // Unreadable, as a whole or from here on.
                Err(_) => return Ok(!first),
            };
            let mut buffer = std::mem::take(&mut self.buffer);
            let data = buffer.get(..total).unwrap_or_default();
            if first && memchr(0, data.get(..SNIFFED.min(total)).unwrap_or_default()).is_some() {
                self.buffer = buffer;
                return Ok(false);
            }
            first = false;
            let mut start = 0;
            if skipping {
                start = memchr(b'\n', data).map_or(total, |end| end + 1);
                skipping = start == total && data.last() != Some(&b'\n');
                at.offset += start as u64;
                at.line += u64::from(!skipping);
            }
            let mut end = if ended { total } else { memrchr(b'\n', data).map_or(0, |end| end + 1) };
            if end <= start && !ended && total >= LONGEST_LINE && !skipping {
                end = total;
                skipping = true;
            }
            let block = data.get(start..end).unwrap_or_default();
            let goes_on = self.block(block, selected.path, &at, report, io)?;
            at.offset += block.len() as u64;
            at.line += memchr_iter(b'\n', block).count() as u64;
            let done = start.max(end);
            filled = total - done;
            buffer.copy_within(done..total, 0);
            if filled == buffer.len() {
                let larger = (buffer.len() * 2).min(LONGEST_LINE);
                buffer.resize(larger, 0);
            }
            self.buffer = buffer;
            if ended || !goes_on {
                if self.buffer.len() > BLOCK {
                    self.buffer = vec![0; BLOCK];
                }
                return Ok(true);
            }
        }
    }

    /// Reads until the buffer is full or the file has ended.
    fn fill(&mut self, fd: &OwnedFd, mut filled: usize) -> Result<(usize, bool), OpError> {
        while filled < self.buffer.len() {
            let Some(space) = self.buffer.get_mut(filled..) else { break };
            let got = node::retry(|| rustix::io::read(fd, &mut *space))?;
            if got == 0 {
                return Ok((filled, true));
            }
            filled += got;
        }
        Ok((filled, false))
    }

    /// Searches whole lines. `false`: enough was found.
    fn block(
        &self,
        data: &[u8],
        path: &[u8],
        base: &Position,
        report: &mut Report,
        io: &mut dyn OpIo,
    ) -> Result<bool, OpError> {
        let (mut at, mut line, mut counted) = (0, base.line, 0);
        let mut number = |start: usize| {
            line += memchr_iter(b'\n', data.get(counted..start).unwrap_or_default()).count() as u64;
            counted = start;
            line
        };
        let whole = self.block.as_ref().filter(|_| memchr(b'\r', data).is_none());
        while let Some(found) = whole.filter(|_| at < data.len()).map(|regex| regex.find_at(data, at)) {
            let Some(found) = found else { return Ok(true) };
            if found.start() == data.len() && data.last() == Some(&b'\n') {
                return Ok(true);
            }
            let before = data.get(at..found.start()).unwrap_or_default();
            let start = memrchr(b'\n', before).map_or(at, |end| at + end + 1);
            let rest = data.get(found.start()..).unwrap_or_default();
            let end = memchr(b'\n', rest).map_or(data.len(), |end| found.start() + end);
            if found.end() > end {
                at = start;
                break;
            }
            let content = data.get(start..end).unwrap_or_default();
            if !report.add(path, number(start), base.offset + start as u64, content, io)? {
                return Ok(false);
            }
            at = end + 1;
        }
        let mut lines = 0u32;
        while at < data.len() {
            lines = lines.wrapping_add(1);
            if lines % 4096 == 0 {
                alive(io)?;
            }
            let rest = data.get(at..).unwrap_or_default();
            let (content, next) = match memchr(b'\n', rest) {
                Some(end) => {
                    let content = rest.get(..end).unwrap_or_default();
                    (content.strip_suffix(b"\r").unwrap_or(content), at + end + 1)
                }
                None => (rest, data.len()),
            };
            if self.line.is_match(content) && !report.add(path, number(at), base.offset + at as u64, content, io)? {
                return Ok(false);
            }
            at = next;
        }
        Ok(true)
    }
}

/// Opens a selected file if it still is a regular one that may be read; the one the caller named must be.
fn open(selected: &Selected<'_>) -> Result<Option<OwnedFd>, OpError> {
    if selected.is_root {
        return Ok(Some(node::open_regular(selected.dir, selected.name, OFlags::RDONLY, 0)?.0));
    }
    let Ok(fd) = node::open(selected.dir, selected.name, OFlags::RDONLY | OFlags::NOFOLLOW, 0) else { return Ok(None) };
    let is_file = rustix::fs::fstat(&fd).is_ok_and(|stat| node::kind(&stat) == FileType::RegularFile);
    Ok(is_file.then_some(fd))
}
