//! `tar_in`: an archive from the stream, unpacked beneath one directory.
//!
//! The archive is hostile. Every component of every name is opened by itself and never through a link, so nothing the
//! archive or anybody else plants can lead out; what may not be made is an error, and so is too much of anything.

use super::node::{self, Id};
use super::paths::Paths;
use super::replace::{set_owner, write_all, Temporary};
use super::tar_format::{broken, kind, padding, parse, text, Extension, Header, BLOCK, LARGEST_EXTENSION};
use super::tar_source::{Compression, Source};
use super::{alive, mkdir, Owner};
use crate::op::{map, OpError, OpIo, Req};
use rmpv::Value;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{AtFlags, FileType, Gid, Mode, Timespec, Timestamps, Uid};
use rustix::io::Errno;

const MAX_BYTES: u64 = 16 << 30;
const MAX_ENTRIES: u64 = 1_000_000;
const MAX_DEPTH: usize = 1024;
const MAX_PATH: usize = 4096;
const MAX_NAME: usize = 255;
const CHUNK: usize = 256 << 10;
/// Bytes of directory names kept until the end, when their modes and times are set.
const KEPT_NAMES: usize = 32 << 20;

struct Limits {
    bytes: u64,
    entries: u64,
}

pub fn tar_in(req: &Req, io: &mut dyn OpIo) -> Result<Value, OpError> {
    let path = req.path("path")?;
    let compression = match req.get("gzip") {
        None => Compression::Detect,
        Some(value) if value.as_str() == Some("auto") => Compression::Detect,
        Some(value) => match value.as_bool() {
            Some(true) => Compression::Gzip,
            Some(false) => Compression::None,
            None => return Err(OpError::invalid("`gzip` must be true, false or auto")),
        },
    };
    let mut limits = Limits {
        bytes: req.opt_u64("max_bytes")?.unwrap_or(MAX_BYTES),
        entries: req.opt_u64("max_entries")?.unwrap_or(MAX_ENTRIES),
    };
    let same_owner = req.opt_bool("same_owner", false)?;
    let mode_mask = if req.opt_bool("keep_setid", false)? { 0o7777 } else { 0o1777 };
    let strip = req.opt_u64("strip")?.unwrap_or(0).min(MAX_DEPTH as u64) as usize;

    let paths = Paths::of(req)?;
    mkdir::ensure(&path, &Owner::default(), paths).map_err(|error| error.at(path.display()))?;
    let root = node::open_root(&path, true, paths)?;
    let mut tree =
        Tree { root, parent: None, directories: Vec::new(), kept: 0, same_owner, mode_mask, bytes: 0, files: 0 };
    let mut source = Source::new(io, compression)?;
    let unpacked = unpack(&mut source, &mut tree, &mut limits, strip);
    tree.finish();
    unpacked?;
    source.drain()?;
    Ok(map([("bytes", Value::from(tree.bytes)), ("files", Value::from(tree.files))]))
}

fn unpack(source: &mut Source<'_>, tree: &mut Tree, limits: &mut Limits, strip: usize) -> Result<(), OpError> {
    let mut extension = Extension::default();
    let mut block = [0u8; BLOCK];
    let mut seen = 0u64;
    loop {
        alive(source.io())?;
        if !source.block(&mut block)? {
            return if seen > 0 { Ok(()) } else { Err(broken("it is empty")) };
        }
        let Some(mut header) = parse(&block)? else { return Ok(()) };
        seen += 1;
        if seen > limits.entries {
            return Err(OpError::new("exhausted", format!("the archive has more than {} entries", limits.entries)));
        }
        match header.kind {
            kind::PAX | kind::PAX_GLOBAL | kind::GNU_LONG_NAME | kind::GNU_LONG_LINK => {
                let data = read_extension(source, &header, limits)?;
                match header.kind {
                    kind::PAX => extension.read(&data)?,
                    // The path of a pax header wins over a GNU name, whichever came first.
                    kind::GNU_LONG_NAME => drop(extension.path.get_or_insert_with(|| text(&data).to_vec())),
                    kind::GNU_LONG_LINK => drop(extension.link.get_or_insert_with(|| text(&data).to_vec())),
                    _ => {}
                }
                continue;
            }
            _ => std::mem::take(&mut extension).apply(&mut header),
        }
        take(limits, header.size)?;
        let described = String::from_utf8_lossy(header.name.get(..200).unwrap_or(&header.name)).into_owned();
        member(source, tree, &header, strip).map_err(|error| match error.code {
            "cancelled" => error,
            _ => error.at(described),
        })?;
    }
}

/// Counts bytes against the limit before anything is done with them.
fn take(limits: &mut Limits, size: u64) -> Result<(), OpError> {
    let left = limits.bytes.checked_sub(size);
    limits.bytes = left.ok_or_else(|| OpError::new("exhausted", "the archive is larger than allowed"))?;
    Ok(())
}

fn read_extension(source: &mut Source<'_>, header: &Header, limits: &mut Limits) -> Result<Vec<u8>, OpError> {
    if header.size > LARGEST_EXTENSION {
        return Err(broken("an extended header is too large"));
    }
    take(limits, header.size)?;
    let mut data = vec![0u8; header.size as usize];
    source.exact(&mut data)?;
    source.skip(padding(header.size) as u64)?;
    Ok(data)
}

fn member(source: &mut Source<'_>, tree: &mut Tree, header: &Header, strip: usize) -> Result<(), OpError> {
    let is_directory =
        header.kind == kind::DIRECTORY || (matches!(header.kind, kind::FILE | 0) && header.name.last() == Some(&b'/'));
    let parts = components(&header.name)?;
    let parts = parts.get(strip..).unwrap_or_default();
    let Some((name, above)) = parts.split_last() else {
        // The root itself, or a member that `strip` leaves nothing of.
        return source.skip_content(header.size);
    };
    if is_directory {
        tree.directory(above, name, header)?;
        return source.skip_content(header.size);
    }
    match header.kind {
        kind::FILE | 0 | b'7' => return tree.file(source, above, name, header),
        kind::SYMLINK => tree.symlink(above, name, header)?,
        kind::HARD_LINK => {
            let target = components(&header.link)?;
            tree.hard_link(above, name, target.get(strip..).unwrap_or_default())?;
        }
        // A volume label.
        b'V' => {}
        b'3' | b'4' | b'6' => return Err(OpError::invalid("devices and FIFOs are not unpacked")),
        b'S' => return Err(OpError::new("unsupported", "sparse members are not supported")),
        _ => return Err(OpError::new("unsupported", "a member of unknown kind")),
    }
    source.skip_content(header.size)
}

/// A name taken apart. Whatever could lead out of the root is refused, not repaired.
fn components(name: &[u8]) -> Result<Vec<&[u8]>, OpError> {
    if name.first() == Some(&b'/') {
        return Err(OpError::invalid("the archive has an absolute name"));
    }
    if name.contains(&0) {
        return Err(OpError::invalid("the archive has a name with a NUL byte"));
    }
    let parts: Vec<&[u8]> = name.split(|b| *b == b'/').filter(|part| !part.is_empty() && *part != b".").collect();
    if parts.iter().any(|part| *part == b"..") {
        return Err(OpError::invalid("the archive has a name with `..`"));
    }
    if name.len() > MAX_PATH || parts.len() > MAX_DEPTH || parts.iter().any(|part| part.len() > MAX_NAME) {
        return Err(Errno::NAMETOOLONG.into());
    }
    Ok(parts)
}

/// The attributes a directory gets when everything in it is done.
struct Pending {
    path: Vec<u8>,
    header: Header,
}

struct Tree {
    root: OwnedFd,
    /// The directory of the last member, because the next one is usually there too.
    parent: Option<(Vec<u8>, OwnedFd)>,
    directories: Vec<Pending>,
    kept: usize,
    same_owner: bool,
    mode_mask: u32,
    bytes: u64,
    files: u64,
}

impl Tree {
    /// Opens a directory component by component, never through a link, and makes what is missing if `make`.
    fn open(&mut self, parts: &[&[u8]], make: bool) -> Result<OwnedFd, OpError> {
        let wanted = parts.join(b"/".as_slice());
        if let Some((path, fd)) = &self.parent {
            if *path == wanted {
                return Ok(fd.try_clone()?);
            }
        }
        let mut at = self.root.try_clone()?;
        for part in parts {
            at = match node::open_directory(&at, part) {
                Err(Errno::NOENT) if make => {
                    match rustix::fs::mkdirat(&at, *part, Mode::from_raw_mode(0o755)) {
                        Ok(()) | Err(Errno::EXIST) => {}
                        Err(errno) => return Err(errno.into()),
                    }
                    node::open_directory(&at, part)?
                }
                other => other?,
            };
        }
        self.parent = Some((wanted, at.try_clone()?));
        Ok(at)
    }

    fn owner(&self, header: &Header) -> Result<Owner, OpError> {
        if !self.same_owner {
            return Ok(Owner::default());
        }
        let id = |id: u64| u32::try_from(id).ok().filter(|id| *id != u32::MAX).ok_or_else(|| broken("an id"));
        Ok(Owner { uid: Some(id(header.uid)?), gid: Some(id(header.gid)?) })
    }

    fn file(&mut self, source: &mut Source<'_>, above: &[&[u8]], name: &[u8], header: &Header) -> Result<(), OpError> {
        let dir = self.open(above, true)?;
        let temporary = Temporary::create(dir.as_fd())?;
        let mut buffer = vec![0u8; CHUNK.min(header.size as usize)];
        let mut left = header.size;
        while left > 0 {
            alive(source.io())?;
            let want = left.min(buffer.len() as u64) as usize;
            let Some(space) = buffer.get_mut(..want) else { break };
            source.exact(space)?;
            write_all(temporary.fd(), space)?;
            left -= want as u64;
        }
        source.skip(padding(header.size) as u64)?;
        rustix::fs::futimens(temporary.fd(), &times(header))?;
        temporary.dress(header.mode & self.mode_mask, &self.owner(header)?, None)?;
        temporary.commit(dir.as_fd(), name, false)?;
        self.bytes += header.size;
        self.files += 1;
        Ok(())
    }

    fn directory(&mut self, above: &[&[u8]], name: &[u8], header: &Header) -> Result<(), OpError> {
        let dir = self.open(above, true)?;
        replacing(dir.as_fd(), name, || rustix::fs::mkdirat(&dir, name, Mode::from_raw_mode(0o700)), true)?;
        let path = [above, &[name]].concat().join(b"/".as_slice());
        if self.kept + path.len() > KEPT_NAMES {
            self.finish();
        }
        self.kept += path.len();
        let header = Header { name: Vec::new(), link: Vec::new(), ..header.clone() };
        self.directories.push(Pending { path, header });
        self.files += 1;
        Ok(())
    }

    fn symlink(&mut self, above: &[&[u8]], name: &[u8], header: &Header) -> Result<(), OpError> {
        if header.link.is_empty() || header.link.contains(&0) {
            return Err(broken("a link without a target"));
        }
        let dir = self.open(above, true)?;
        replacing(dir.as_fd(), name, || rustix::fs::symlinkat(header.link.as_slice(), &dir, name), false)?;
        let owner = self.owner(header)?;
        if owner.is_set() {
            let (uid, gid) = (owner.uid.map(Uid::from_raw), owner.gid.map(Gid::from_raw));
            rustix::fs::chownat(&dir, name, uid, gid, AtFlags::SYMLINK_NOFOLLOW)?;
        }
        // Not every file system keeps times of links.
        let _ = rustix::fs::utimensat(&dir, name, &times(header), AtFlags::SYMLINK_NOFOLLOW);
        self.files += 1;
        Ok(())
    }

    /// A second name for a regular file that is beneath the root.
    fn hard_link(&mut self, above: &[&[u8]], name: &[u8], target: &[&[u8]]) -> Result<(), OpError> {
        let Some((target_name, target_above)) = target.split_last() else {
            return Err(broken("a link without a target"));
        };
        let from = self.open(target_above, false)?;
        let stat = node::lstat(&from, target_name)?;
        if node::kind(&stat) != FileType::RegularFile {
            return Err(OpError::invalid("a hard link to something that is no regular file"));
        }
        let dir = self.open(above, true)?;
        if node::lstat(&dir, name).is_ok_and(|there| Id::of(&there) == Id::of(&stat)) {
            return Ok(());
        }
        replacing(dir.as_fd(), name, || rustix::fs::linkat(&from, *target_name, &dir, name, AtFlags::empty()), false)?;
        self.files += 1;
        Ok(())
    }

    /// Sets modes and times of directories, innermost first. One that was removed or swapped meanwhile is passed over.
    fn finish(&mut self) {
        self.kept = 0;
        for pending in std::mem::take(&mut self.directories).into_iter().rev() {
            let parts: Vec<&[u8]> = pending.path.split(|b| *b == b'/').collect();
            let Ok(dir) = self.open(&parts, false) else { continue };
            if let Ok(owner) = self.owner(&pending.header) {
                if owner.is_set() {
                    let _ = set_owner(dir.as_fd(), owner.uid, owner.gid);
                }
            }
            let _ = rustix::fs::futimens(&dir, &times(&pending.header));
            let _ = rustix::fs::fchmod(&dir, Mode::from_raw_mode(pending.header.mode & self.mode_mask));
        }
    }
}

/// Makes a name, in place of what is there. A directory is never replaced; with `keep_directory` it will do.
fn replacing(
    dir: BorrowedFd<'_>,
    name: &[u8],
    make: impl Fn() -> Result<(), Errno>,
    keep_directory: bool,
) -> Result<(), OpError> {
    match make() {
        Err(Errno::EXIST) => {}
        other => return Ok(other?),
    }
    let there = node::lstat(dir, name)?;
    if node::kind(&there) == FileType::Directory {
        return if keep_directory { Ok(()) } else { Err(Errno::ISDIR.into()) };
    }
    rustix::fs::unlinkat(dir, name, AtFlags::empty())?;
    Ok(make()?)
}

fn times(header: &Header) -> Timestamps {
    let time = Timespec { tv_sec: header.mtime as _, tv_nsec: header.mtime_nanos as _ };
    Timestamps { last_access: time, last_modification: time }
}
