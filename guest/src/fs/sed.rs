//! `sed`: replacing what a pattern matches, line by line, in files that are rewritten as a whole or not at all.

use super::alive;
use super::list::Batch;
use super::node;
use super::paths::Paths;
use super::replace::{write_all, Place, Temporary};
use super::select::{choice, compile, each_file};
use super::Owner;
use crate::op::{map, text_or_bin, OpError, OpIo, Req};
use memchr::memchr;
use regex::bytes::{NoExpand, Regex, Replacer};
use rmpv::Value;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::OFlags;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Files are edited in memory, so there is a largest one.
const LARGEST: u64 = 64 << 20;
const OUTPUT: usize = 256 << 10;

struct Edit {
    pattern: Regex,
    replacement: Vec<u8>,
    literal: bool,
    first_only: bool,
}

pub fn sed(req: &Req, io: &mut dyn OpIo) -> Result<Value, OpError> {
    let pattern = req.str("pattern")?;
    let literal = !req.opt_bool("regex", true)?;
    if literal && pattern.is_empty() {
        return Err(OpError::invalid("an empty text cannot be replaced"));
    }
    let pattern = if literal { regex::escape(pattern) } else { pattern.to_owned() };
    let edit = Edit {
        pattern: compile(&pattern, req.opt_bool("ignore_case", false)?, false)?,
        replacement: req.str("replacement")?.as_bytes().to_vec(),
        literal,
        first_only: req.opt_bool("first_only", false)?,
    };
    let files = req.paths("files")?;
    let root = req.opt_path("path")?;
    let choice = choice(req)?;
    let paths = Paths::of(req)?;
    let mut outcome = Outcome { batch: Batch::new("results"), total: 0 };
    match root {
        Some(_) if !files.is_empty() => return Err(OpError::invalid("`files` and `path` exclude each other")),
        None if files.is_empty() => return Err(OpError::invalid("one of `files` and `path` is needed")),
        None => {
            for file in &files {
                alive(io)?;
                let result = edit.file(file, paths, io);
                outcome.add(file.as_os_str().as_bytes(), result, io)?;
            }
        }
        Some(root) => {
            let recursive = req.opt_bool("recursive", true)?;
            each_file(&root, paths, recursive, &choice, io, &mut |selected, io| {
                let result = match selected.is_root {
                    true => edit.file(&root, paths, io),
                    false => edit.at(selected.dir, selected.name, io),
                };
                outcome.add(selected.path, result, io)?;
                Ok(true)
            })?;
        }
    }
    let total = outcome.total;
    Ok(map([("results", Value::Array(outcome.batch.rest())), ("total", Value::from(total))]))
}

struct Outcome {
    batch: Batch<'static>,
    total: u64,
}

impl Outcome {
    /// Notes how it went with one file. Only a cancelled operation ends the others.
    fn add(&mut self, path: &[u8], result: Result<u64, OpError>, io: &mut dyn OpIo) -> Result<(), OpError> {
        let (count, error) = match result {
            Ok(count) => (count, None),
            Err(error) if error.code == "cancelled" => return Err(error),
            Err(error) => (0, Some(error)),
        };
        self.total += count;
        let mut entry =
            vec![(Value::from("path"), text_or_bin(path)), (Value::from("replacements"), Value::from(count))];
        let mut bytes = path.len();
        if let Some(error) = error {
            bytes += error.message.len();
            entry.push((Value::from("error"), error.to_value()));
        }
        self.batch.push(Value::Map(entry), bytes, io)
    }
}

impl Edit {
    /// Edits a file the caller named, behind a link if it is one.
    fn file(&self, path: &Path, paths: Paths, io: &dyn OpIo) -> Result<u64, OpError> {
        let place = Place::of(path, true, paths)?;
        self.at(place.dir.as_fd(), &place.name, io)
    }

    /// Edits one file and tells how many replacements were made; without one it is not touched.
    fn at(&self, dir: BorrowedFd<'_>, name: &[u8], io: &dyn OpIo) -> Result<u64, OpError> {
        let (fd, stat) = node::open_regular(dir, name, OFlags::RDONLY | OFlags::NOFOLLOW, 0)?;
        if stat.st_size.max(0) as u64 > LARGEST {
            return Err(OpError::new("file_error", "larger than 64 MiB"));
        }
        let text = read_all(&fd, io)?;
        if std::str::from_utf8(&text).is_err() {
            return Err(OpError::new("file_error", "not UTF-8 text"));
        }
        let Some(first) = self.first_match(&text, io)? else { return Ok(0) };
        let temporary = Temporary::create(dir)?;
        let mut output = Output { fd: temporary.fd(), buffer: Vec::with_capacity(OUTPUT) };
        output.push(text.get(..first).unwrap_or_default())?;
        let count = self.rewrite(text.get(first..).unwrap_or_default(), &mut output, io)?;
        output.flush()?;
        temporary.dress(node::permissions(&stat), &Owner::default(), Some(&stat))?;
        temporary.commit(dir, name, false)?;
        Ok(count)
    }

    /// Where the first line with a match starts.
    fn first_match(&self, text: &[u8], io: &dyn OpIo) -> Result<Option<usize>, OpError> {
        for (number, line) in Lines::new(text).enumerate() {
            if number % 4096 == 0 {
                alive(io)?;
            }
            if self.pattern.is_match(line.content) {
                return Ok(Some(line.start));
            }
        }
        Ok(None)
    }

    fn rewrite(&self, text: &[u8], output: &mut Output<'_>, io: &dyn OpIo) -> Result<u64, OpError> {
        let mut count = 0;
        for (number, line) in Lines::new(text).enumerate() {
            if number % 4096 == 0 {
                alive(io)?;
            }
            let mut copied = 0;
            if !(self.first_only && count > 0) {
                for captures in self.pattern.captures_iter(line.content) {
                    let Some(found) = captures.get(0) else { break };
                    output.push(line.content.get(copied..found.start()).unwrap_or_default())?;
                    if self.literal {
                        NoExpand(&self.replacement).replace_append(&captures, &mut output.buffer);
                    } else {
                        captures.expand(&self.replacement, &mut output.buffer);
                    }
                    output.spill()?;
                    copied = found.end();
                    count += 1;
                    if self.first_only {
                        break;
                    }
                    if count % 4096 == 0 {
                        alive(io)?;
                    }
                }
            }
            output.push(line.content.get(copied..).unwrap_or_default())?;
            output.push(line.ending)?;
        }
        Ok(count)
    }
}

fn read_all(fd: &OwnedFd, io: &dyn OpIo) -> Result<Vec<u8>, OpError> {
    let mut text = Vec::new();
    let mut buffer = vec![0u8; OUTPUT];
    loop {
        alive(io)?;
        let got = node::retry(|| rustix::io::read(fd, &mut *buffer))?;
        if got == 0 {
            return Ok(text);
        }
        text.extend_from_slice(buffer.get(..got).unwrap_or_default());
        if text.len() as u64 > LARGEST {
            return Err(OpError::new("file_error", "larger than 64 MiB"));
        }
    }
}

struct Output<'a> {
    fd: &'a OwnedFd,
    buffer: Vec<u8>,
}

impl Output<'_> {
    fn push(&mut self, data: &[u8]) -> Result<(), OpError> {
        self.buffer.extend_from_slice(data);
        self.spill()
    }

    fn spill(&mut self) -> Result<(), OpError> {
        if self.buffer.len() >= OUTPUT {
            self.flush()?;
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), OpError> {
        write_all(self.fd, &self.buffer)?;
        self.buffer.clear();
        Ok(())
    }
}

struct Line<'a> {
    start: usize,
    content: &'a [u8],
    /// LF, CRLF, or nothing at the end of the text.
    ending: &'a [u8],
}

struct Lines<'a> {
    text: &'a [u8],
    at: usize,
}

impl<'a> Lines<'a> {
    fn new(text: &'a [u8]) -> Self {
        Self { text, at: 0 }
    }
}

impl<'a> Iterator for Lines<'a> {
    type Item = Line<'a>;

    fn next(&mut self) -> Option<Line<'a>> {
        let start = self.at;
        let rest = self.text.get(start..).filter(|rest| !rest.is_empty())?;
        let Some(end) = memchr(b'\n', rest) else {
            self.at = self.text.len();
            return Some(Line { start, content: rest, ending: b"" });
        };
        self.at = start + end + 1;
        let (content, ending) = if end > 0 && rest.get(end - 1) == Some(&b'\r') {
            (rest.get(..end - 1)?, b"\r\n".as_slice())
        } else {
            (rest.get(..end)?, b"\n".as_slice())
        };
        Some(Line { start, content, ending })
    }
}
