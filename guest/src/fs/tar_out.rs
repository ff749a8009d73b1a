//! `tar_out`: a tree, or parts of it, as an archive on the stream.

use super::glob::Choice;
use super::list::skip_lost;
use super::node::{self, Id};
use super::paths::Paths;
use super::tar_format::{build, kind, padding, Header};
use super::walk::{Step, Walk};
use super::{alive, on_large_stack};
use crate::op::{map, text_or_bin, OpError, OpIo, Req};
use flate2::write::GzEncoder;
use rmpv::Value;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{AtFlags, FileType, OFlags, Stat, CWD};
use std::collections::HashMap;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;

const CHUNK: usize = 256 << 10;
/// Names reported as skipped, and their bytes, so that the answer fits into a frame.
const SKIPPED_NAMES: usize = 1000;
const SKIPPED_BYTES: usize = 128 << 10;
/// Files with several names that are recognised; beyond it each name is stored as a file of its own.
const LINKED: usize = 100_000;

pub fn tar_out(req: &Req, io: &mut dyn OpIo) -> Result<Value, OpError> {
    let path = req.path("path")?;
    let parts = req.bytes_list("paths")?;
    let gzip = req.opt_bool("gzip", false)?;
    let choice = Choice::new(&[], &req.bytes_list("exclude")?)?;
    let bytes = node::trimmed(path.as_os_str().as_bytes());
    let stat =
        rustix::fs::statat(CWD, bytes, AtFlags::empty()).map_err(|errno| OpError::from(errno).at(path.display()))?;

    let mut roots = Vec::new();
    if node::kind(&stat) == FileType::Directory {
        let base = node::open_root(&path, true, Paths::of(req)?)?;
        for part in &parts {
            roots.push(find(&base, part).map_err(|error| error.at(String::from_utf8_lossy(part)))?);
        }
        if parts.is_empty() {
            roots.push(Root { dir: base, name: b".".to_vec(), path: Vec::new() });
        }
    } else {
        if !parts.is_empty() {
            return Err(OpError::from(rustix::io::Errno::NOTDIR).at(path.display()));
        }
        node::regular(&stat).map_err(|error| error.at(path.display()))?;
        let place = super::replace::Place::of(&path, true, Paths::of(req)?)?;
        roots.push(Root { dir: place.dir, name: place.name, path: node::name_of(&path).to_vec() });
    }

    let mut pack = Pack {
        sink: Sink::new(gzip)?,
        choice,
        linked: HashMap::new(),
        buffer: vec![0; CHUNK],
        files: 0,
        skipped: Vec::new(),
        skipped_bytes: 0,
    };
    for root in roots {
        pack.root(root, io)?;
    }
    let bytes = pack.sink.finish(io)?;
    Ok(map([
        ("bytes", Value::from(bytes)),
        ("files", Value::from(pack.files)),
        ("skipped", Value::Array(pack.skipped)),
    ]))
}

/// Something to archive: a name in a directory, and its path in the archive, empty for the base itself.
struct Root {
    dir: OwnedFd,
    name: Vec<u8>,
    path: Vec<u8>,
}

/// A path of the request below the base, reached without following links.
fn find(base: &OwnedFd, path: &[u8]) -> Result<Root, OpError> {
    if path.first() == Some(&b'/') || path.contains(&0) {
        return Err(OpError::invalid("`paths` must be relative to `path`"));
    }
    let parts: Vec<&[u8]> = path.split(|b| *b == b'/').filter(|part| !part.is_empty() && *part != b".").collect();
    if parts.iter().any(|part| *part == b"..") {
        return Err(OpError::invalid("`paths` must not contain `..`"));
    }
    let mut dir = base.try_clone()?;
    let Some((name, above)) = parts.split_last() else {
        return Ok(Root { dir, name: b".".to_vec(), path: Vec::new() });
    };
    for part in above {
        dir = node::open_directory(&dir, part)?;
    }
    node::lstat(&dir, name)?;
    Ok(Root { dir, name: name.to_vec(), path: parts.join(b"/".as_slice()) })
}

struct Pack {
    sink: Sink,
    choice: Choice,
    linked: HashMap<Id, Vec<u8>>,
    buffer: Vec<u8>,
    files: u64,
    skipped: Vec<Value>,
    skipped_bytes: usize,
}

impl Pack {
    fn root(&mut self, root: Root, io: &mut dyn OpIo) -> Result<(), OpError> {
        if !root.path.is_empty() {
            self.entry(root.dir.as_fd(), &root.name, &root.path, io)?;
        }
        if !root.path.is_empty() && node::kind(&node::lstat(&root.dir, &root.name)?) != FileType::Directory {
            return Ok(());
        }
        let top = node::open_directory(&root.dir, &root.name)?;
        let mut walk = Walk::new(top)?;
        loop {
            match walk.step()? {
                Step::Done => return Ok(()),
                Step::Leave => continue,
                Step::Entry => alive(io)?,
            }
            let path = if root.path.is_empty() { walk.path().to_vec() } else { node::join(&root.path, walk.path()) };
            if self.choice.drops(&path, walk.kind() == FileType::Directory) {
                continue;
            }
            let is_directory = self.entry(walk.dir()?, walk.name(), &path, io)?;
            if is_directory && !skip_lost(walk.descend())? {
                self.skip(&path);
            }
        }
    }

    /// Writes one member; tells whether it is a directory to go into.
    fn entry(&mut self, dir: BorrowedFd<'_>, name: &[u8], path: &[u8], io: &mut dyn OpIo) -> Result<bool, OpError> {
        let Ok(stat) = node::lstat(dir, name) else {
            self.skip(path);
            return Ok(false);
        };
        let mut header = describe(&stat, path);
        match node::kind(&stat) {
            FileType::Directory => {
                header.kind = kind::DIRECTORY;
                header.name.push(b'/');
                self.member(&header, io)?;
                return Ok(true);
            }
            FileType::Symlink => match node::read_link(dir, name) {
                Ok(target) => {
                    header.kind = kind::SYMLINK;
                    header.link = target;
                    self.member(&header, io)?;
                }
                Err(_) => self.skip(path),
            },
            FileType::RegularFile => self.file(dir, name, path, io)?,
            _ => self.skip(path),
        }
        Ok(false)
    }

    fn file(&mut self, dir: BorrowedFd<'_>, name: &[u8], path: &[u8], io: &mut dyn OpIo) -> Result<(), OpError> {
        let Ok((fd, stat)) = node::open_regular(dir, name, OFlags::RDONLY | OFlags::NOFOLLOW, 0) else {
            self.skip(path);
            return Ok(());
        };
        let mut header = describe(&stat, path);
        if stat.st_nlink > 1 {
            if let Some(first) = self.linked.get(&Id::of(&stat)) {
                header.kind = kind::HARD_LINK;
                header.link.clone_from(first);
                return self.member(&header, io);
            }
            if self.linked.len() < LINKED {
                self.linked.insert(Id::of(&stat), path.to_vec());
            }
        }
        header.size = stat.st_size.max(0) as u64;
        self.member(&header, io)?;
        self.content(&fd, header.size, io)
    }

    /// Exactly as many bytes as the header said: zeros where the file became shorter, no more where it grew.
    fn content(&mut self, fd: &OwnedFd, size: u64, io: &mut dyn OpIo) -> Result<(), OpError> {
        let mut left = size;
        while left > 0 {
            alive(io)?;
            let want = left.min(CHUNK as u64) as usize;
            let Some(space) = self.buffer.get_mut(..want) else { break };
            let got = match node::retry(|| rustix::io::read(fd, &mut *space)) {
                Ok(0) | Err(_) => {
                    space.fill(0);
                    want
                }
                Ok(got) => got,
            };
            self.sink.write(space.get(..got).unwrap_or_default(), io)?;
            left -= got as u64;
        }
        self.sink.write(&vec![0; padding(size)], io)
    }

    fn member(&mut self, header: &Header, io: &mut dyn OpIo) -> Result<(), OpError> {
        let mut out = Vec::with_capacity(512);
        build(&mut out, header);
        self.files += 1;
        self.sink.write(&out, io)
    }

    fn skip(&mut self, path: &[u8]) {
        if self.skipped.len() < SKIPPED_NAMES && self.skipped_bytes + path.len() < SKIPPED_BYTES {
            self.skipped_bytes += path.len();
            self.skipped.push(text_or_bin(path));
        }
    }
}

fn describe(stat: &Stat, path: &[u8]) -> Header {
    Header {
        kind: kind::FILE,
        name: path.to_vec(),
        mode: node::permissions(stat),
        uid: u64::from(stat.st_uid),
        gid: u64::from(stat.st_gid),
        mtime: stat.st_mtime,
        ..Header::default()
    }
}

/// Collects what is written, through gzip or not, and sends it in large pieces.
struct Sink {
    encoder: Option<GzEncoder<Vec<u8>>>,
    buffer: Vec<u8>,
    bytes: u64,
}

impl Sink {
    fn new(gzip: bool) -> Result<Self, OpError> {
        // The state of the compressor is built on the stack before it is boxed.
        let new_encoder = || GzEncoder::new(Vec::new(), flate2::Compression::fast());
        let encoder = if gzip { Some(on_large_stack(new_encoder)?) } else { None };
        Ok(Self { encoder, buffer: Vec::new(), bytes: 0 })
    }

    fn write(&mut self, data: &[u8], io: &mut dyn OpIo) -> Result<(), OpError> {
        match &mut self.encoder {
            None => self.buffer.extend_from_slice(data),
            Some(encoder) => {
                encoder.write_all(data)?;
                self.buffer.append(encoder.get_mut());
            }
        }
        if self.buffer.len() >= CHUNK {
            self.send(io)?;
        }
        Ok(())
    }

    fn send(&mut self, io: &mut dyn OpIo) -> Result<(), OpError> {
        io.send(&self.buffer)?;
        self.bytes += self.buffer.len() as u64;
        self.buffer.clear();
        Ok(())
    }

    /// The two empty blocks that end an archive, and the number of bytes in all.
    fn finish(mut self, io: &mut dyn OpIo) -> Result<u64, OpError> {
        self.write(&[0; 1024], io)?;
        if let Some(encoder) = self.encoder.take() {
            self.buffer.append(&mut encoder.finish()?);
        }
        self.send(io)?;
        Ok(self.bytes)
    }
}
