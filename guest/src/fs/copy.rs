//! `copy`: a file or a tree. Also what a move across mounts is made of.

use super::node::{self, Id};
use super::paths::Paths;
use super::replace::{set_owner, write_all, Place, Temporary};
use super::walk::{Descent, Step, Walk};
use super::{alive, Owner};
use crate::op::{map, OpError, OpIo, Req};
use rmpv::Value;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, SeekFrom, Stat, Timespec, Timestamps};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

const CHUNK: usize = 256 << 10;

/// How a copy deals with what is there, and what it keeps.
#[derive(Clone, Copy)]
pub struct Manner {
    pub overwrite: bool,
    pub keep_times: bool,
}

#[derive(Default, Debug, PartialEq, Eq)]
pub struct Copied {
    pub bytes: u64,
    pub files: u64,
}

pub fn copy(req: &Req, io: &mut dyn OpIo) -> Result<Value, OpError> {
    let (src, dst) = (req.path("src")?, req.path("dst")?);
    let paths = Paths::of(req)?;
    let recursive = req.opt_bool("recursive", false)?;
    let manner = Manner { overwrite: req.opt_bool("overwrite", false)?, keep_times: false };
    // Without `recursive` a link stands for the file behind it, as with cp.
    let from = place(&src, !recursive, paths).map_err(|error| error.at(src.display()))?;
    let stat = from.stat.ok_or_else(|| OpError::from(Errno::NOENT).at(src.display()))?;
    if node::kind(&stat) == FileType::Directory && !recursive {
        return Err(OpError::from(Errno::ISDIR).at(src.display()));
    }
    let to = place(&dst, false, paths).map_err(|error| error.at(dst.display()))?;
    if to.stat.is_some() && !manner.overwrite {
        return Err(OpError::from(Errno::EXIST).at(dst.display()));
    }
    let copied = copy_tree(&from, to.dir.as_fd(), &to.name, manner, io).map_err(|error| error.at(dst.display()))?;
    Ok(map([("bytes", Value::from(copied.bytes)), ("files", Value::from(copied.files))]))
}

pub fn place(path: &Path, follow: bool, paths: Paths) -> Result<Place, OpError> {
    let trimmed = node::trimmed(path.as_os_str().as_bytes());
    Place::of(Path::new(OsStr::from_bytes(trimmed)), follow, paths)
}

/// Copies what is at `from`, links as links, to `name` in `to`.
pub fn copy_tree(
    from: &Place,
    to: BorrowedFd<'_>,
    name: &[u8],
    manner: Manner,
    io: &dyn OpIo,
) -> Result<Copied, OpError> {
    let mut copied = Copied::default();
    let stat = from.stat.ok_or(Errno::NOENT)?;
    if node::kind(&stat) != FileType::Directory {
        copy_entry(from.dir.as_fd(), &from.name, to, name, manner, &mut copied, io)?;
        return Ok(copied);
    }
    if is_within(to, Id::of(&stat))? {
        return Err(OpError::invalid("a directory cannot be put into itself"));
    }
    let source = node::open_directory(&from.dir, &from.name)?;
    let mut open = Descent::default();
    open.push(make_directory(to, name, manner)?)?;
    copied.files += 1;
    let mut stats = vec![stat];
    let mut walk = Walk::unsorted(source)?;
    loop {
        alive(io)?;
        match walk.step()? {
            Step::Entry if walk.kind() == FileType::Directory => {
                let Ok(stat) = walk.stat() else { continue };
                let name = walk.name().to_vec();
                match walk.descend() {
                    Ok(()) => {}
                    Err(error) if error.errno == Some(libc::ENOENT) => continue,
                    Err(error) => return Err(error),
                }
                let made = make_directory(open.top()?, &name, manner)?;
                open.push(made)?;
                stats.push(stat);
                copied.files += 1;
            }
            Step::Entry => copy_entry(walk.dir()?, walk.name(), open.top()?, walk.name(), manner, &mut copied, io)?,
            step => {
                if let Some(stat) = stats.pop() {
                    dress(open.top()?, &stat, manner)?;
                }
                if step == Step::Done {
                    return Ok(copied);
                }
                open.pop()?;
            }
        }
    }
}

/// Whether `dir` is the directory `id` or lies below it.
fn is_within(dir: BorrowedFd<'_>, id: Id) -> Result<bool, OpError> {
    let mut at = node::open(dir, b".", OFlags::RDONLY | OFlags::DIRECTORY, 0)?;
    let mut here = Id::of(&rustix::fs::fstat(&at)?);
    loop {
        if here == id {
            return Ok(true);
        }
        at = node::open(&at, b"..", OFlags::RDONLY | OFlags::DIRECTORY, 0)?;
        let above = Id::of(&rustix::fs::fstat(&at)?);
        if above == here {
            return Ok(false);
        }
        here = above;
    }
}

fn make_directory(dir: BorrowedFd<'_>, name: &[u8], manner: Manner) -> Result<OwnedFd, OpError> {
    match rustix::fs::mkdirat(dir, name, Mode::from_raw_mode(0o700)) {
        Ok(()) => {}
        Err(Errno::EXIST) if manner.overwrite => {}
        Err(errno) => return Err(errno.into()),
    }
    Ok(node::open_directory(dir, name)?)
}

/// Gives a finished directory the owner, mode and times of its original.
fn dress(fd: BorrowedFd<'_>, stat: &Stat, manner: Manner) -> Result<(), OpError> {
    if manner.keep_times {
        rustix::fs::futimens(fd, &times(stat))?;
    }
    keep_owner(set_owner(fd, Some(stat.st_uid), Some(stat.st_gid)))?;
    rustix::fs::fchmod(fd, Mode::from_raw_mode(node::permissions(stat)))?;
    Ok(())
}

/// An owner that cannot be given away is no reason to lose the copy.
fn keep_owner(result: Result<(), Errno>) -> Result<(), Errno> {
    match result {
        Err(Errno::PERM | Errno::INVAL) => Ok(()),
        other => other,
    }
}

fn times(stat: &Stat) -> Timestamps {
    Timestamps {
        last_access: Timespec { tv_sec: stat.st_atime as _, tv_nsec: stat.st_atime_nsec as _ },
        last_modification: Timespec { tv_sec: stat.st_mtime as _, tv_nsec: stat.st_mtime_nsec as _ },
    }
}

fn copy_entry(
    from: BorrowedFd<'_>,
    old: &[u8],
    to: BorrowedFd<'_>,
    new: &[u8],
    manner: Manner,
    copied: &mut Copied,
    io: &dyn OpIo,
) -> Result<(), OpError> {
    let stat = match node::lstat(from, old) {
        Err(Errno::NOENT) => return Ok(()),
        other => other?,
    };
    match node::kind(&stat) {
        FileType::RegularFile => copied.bytes += copy_file(from, old, to, new, manner, io)?,
        FileType::Symlink => {
            let target = node::read_link(from, old)?;
            make_special(to, new, manner, || rustix::fs::symlinkat(target.as_slice(), to, new))?;
            finish_special(to, new, &stat, manner)?;
        }
        kind => {
            let mode = Mode::from_raw_mode(node::permissions(&stat));
            make_special(to, new, manner, || rustix::fs::mknodat(to, new, kind, mode, stat.st_rdev))?;
            finish_special(to, new, &stat, manner)?;
        }
    }
    copied.files += 1;
    Ok(())
}

/// Makes what has no content; with `overwrite` in place of what is there, unless that is a directory.
fn make_special(
    dir: BorrowedFd<'_>,
    name: &[u8],
    manner: Manner,
    make: impl Fn() -> Result<(), Errno>,
) -> Result<(), Errno> {
    match make() {
        Err(Errno::EXIST) if manner.overwrite => {
            rustix::fs::unlinkat(dir, name, AtFlags::empty())?;
            make()
        }
        other => other,
    }
}

fn finish_special(dir: BorrowedFd<'_>, name: &[u8], stat: &Stat, manner: Manner) -> Result<(), Errno> {
    let (uid, gid) = (rustix::fs::Uid::from_raw(stat.st_uid), rustix::fs::Gid::from_raw(stat.st_gid));
    keep_owner(rustix::fs::chownat(dir, name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW))?;
    if manner.keep_times {
        rustix::fs::utimensat(dir, name, &times(stat), AtFlags::SYMLINK_NOFOLLOW)?;
    }
    Ok(())
}

fn copy_file(
    from: BorrowedFd<'_>,
    old: &[u8],
    to: BorrowedFd<'_>,
    new: &[u8],
    manner: Manner,
    io: &dyn OpIo,
) -> Result<u64, OpError> {
    let (source, stat) = node::open_regular(from, old, OFlags::RDONLY | OFlags::NOFOLLOW, 0)?;
    let temporary = Temporary::create(to)?;
    let sparse = (stat.st_blocks.max(0) as u64).saturating_mul(512) < stat.st_size.max(0) as u64;
    // ENXIO: nothing but a hole. Anything else: this file system cannot tell.
    let tells = || matches!(rustix::fs::seek(&source, SeekFrom::Data(0)), Ok(_) | Err(Errno::NXIO));
    let bytes = if sparse && tells() {
        copy_sparse(&source, temporary.fd(), stat.st_size.max(0) as u64, io)?
    } else {
        copy_plain(&source, temporary.fd(), io)?
    };
    if manner.keep_times {
        rustix::fs::futimens(temporary.fd(), &times(&stat))?;
    }
    temporary.dress(node::permissions(&stat), &Owner::default(), Some(&stat))?;
    temporary.commit(to, new, !manner.overwrite)?;
    Ok(bytes)
}

fn copy_plain(source: &OwnedFd, target: &OwnedFd, io: &dyn OpIo) -> Result<u64, OpError> {
    rustix::fs::seek(source, SeekFrom::Start(0))?;
    let mut buffer = vec![0u8; CHUNK];
    let mut bytes = 0;
    loop {
        alive(io)?;
        let got = node::retry(|| rustix::io::read(source, &mut *buffer))?;
        if got == 0 {
            return Ok(bytes);
        }
        write_all(target, buffer.get(..got).unwrap_or_default())?;
        bytes += got as u64;
    }
}

/// Copies the data of a file and leaves its holes alone.
fn copy_sparse(source: &OwnedFd, target: &OwnedFd, size: u64, io: &dyn OpIo) -> Result<u64, OpError> {
    let mut buffer = vec![0u8; CHUNK];
    let mut at = 0;
    while at < size {
        let start = match rustix::fs::seek(source, SeekFrom::Data(at)) {
            Err(Errno::NXIO) => break,
            other => other?,
        };
        let end = rustix::fs::seek(source, SeekFrom::Hole(start))?.min(size);
        at = start;
        rustix::fs::seek(target, SeekFrom::Start(start))?;
        while at < end {
            alive(io)?;
            let want = (end - at).min(CHUNK as u64) as usize;
            let Some(space) = buffer.get_mut(..want) else { break };
            let got = node::retry(|| rustix::io::pread(source, &mut *space, at))?;
            if got == 0 {
                break;
            }
            write_all(target, space.get(..got).unwrap_or_default())?;
            at += got as u64;
        }
        if at < end {
            break;
        }
    }
    rustix::fs::ftruncate(target, size)?;
    Ok(size)
}
