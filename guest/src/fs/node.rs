//! One file-system object: opening it safely, its kind, and its description on the wire.
//!
//! `stat` comes from newfstatat and never from statx, which old gVisor builds answer wrongly.

use super::paths::Paths;
use crate::op::{text_or_bin, OpError};
use rmpv::Value;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Flags of every open: no controlling terminal, no waiting on a FIFO, nothing inherited by children.
pub const SAFE: OFlags = OFlags::NOCTTY.union(OFlags::NONBLOCK).union(OFlags::CLOEXEC);

const PROC_MAGIC: u64 = 0x9fa0;
const SYSFS_MAGIC: u64 = 0x6265_6572;
const CGROUP_MAGIC: u64 = 0x27_e0eb;
const CGROUP2_MAGIC: u64 = 0x6367_7270;

/// Entries of the agent's own /proc directory that tell no secret.
const OWN_PROC_READABLE: [&[u8]; 12] = [
    b"status",
    b"stat",
    b"statm",
    b"cmdline",
    b"comm",
    b"cgroup",
    b"mounts",
    b"mountinfo",
    b"limits",
    b"uid_map",
    b"gid_map",
    b"loginuid",
];

pub fn kind(stat: &Stat) -> FileType {
    FileType::from_raw_mode(stat.st_mode)
}

pub fn kind_name(kind: FileType) -> &'static str {
    match kind {
        FileType::RegularFile => "file",
        FileType::Directory => "directory",
        FileType::Symlink => "symlink",
        FileType::Fifo => "fifo",
        FileType::Socket => "socket",
        FileType::CharacterDevice => "char",
        FileType::BlockDevice => "block",
        FileType::Unknown => "file",
    }
}

/// Device and inode: what makes two names the same object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Id {
    pub dev: u64,
    pub ino: u64,
}

impl Id {
    pub fn of(stat: &Stat) -> Self {
        Self { dev: stat.st_dev, ino: stat.st_ino }
    }
}

pub fn mtime(stat: &Stat) -> f64 {
    stat.st_mtime as f64 + stat.st_mtime_nsec as f64 / 1e9
}

/// When content, mode, owner or names last changed; nothing inside can set it back.
pub fn ctime(stat: &Stat) -> f64 {
    stat.st_ctime as f64 + stat.st_ctime_nsec as f64 / 1e9
}

pub fn permissions(stat: &Stat) -> u32 {
    stat.st_mode & 0o7777
}

/// The description of an object as the protocol writes it, as pairs so that callers may add to it.
pub fn describe(stat: &Stat, name: &[u8], target: Option<&[u8]>) -> Vec<(Value, Value)> {
    let mut pairs = vec![
        (Value::from("name"), text_or_bin(name)),
        (Value::from("type"), Value::from(kind_name(kind(stat)))),
        (Value::from("size"), Value::from(stat.st_size.max(0))),
        (Value::from("mode"), Value::from(permissions(stat))),
        (Value::from("uid"), Value::from(stat.st_uid)),
        (Value::from("gid"), Value::from(stat.st_gid)),
        (Value::from("mtime"), Value::from(mtime(stat))),
        (Value::from("ctime"), Value::from(ctime(stat))),
        (Value::from("ino"), Value::from(stat.st_ino)),
        (Value::from("nlink"), Value::from(stat.st_nlink)),
    ];
    if let Some(target) = target {
        pairs.push((Value::from("target"), text_or_bin(target)));
    }
    pairs
}

/// The last component of a path, or the whole path when it has none.
pub fn name_of(path: &Path) -> &[u8] {
    let bytes = trimmed(path.as_os_str().as_bytes());
    match bytes.iter().rposition(|b| *b == b'/') {
        Some(at) if bytes.len() > 1 => bytes.get(at + 1..).unwrap_or(bytes),
        _ => bytes,
    }
}

/// A path without trailing slashes; `/` stays itself. A trailing slash would make the kernel follow a link.
pub fn trimmed(path: &[u8]) -> &[u8] {
    let mut end = path.len();
    while end > 1 && path.get(end - 1) == Some(&b'/') {
        end -= 1;
    }
    path.get(..end).unwrap_or(path)
}

/// `root` and a relative path as one path.
pub fn join(root: &[u8], relative: &[u8]) -> Vec<u8> {
    let mut path = Vec::with_capacity(root.len() + relative.len() + 1);
    path.extend_from_slice(root);
    if !relative.is_empty() {
        if path.last() != Some(&b'/') {
            path.push(b'/');
        }
        path.extend_from_slice(relative);
    }
    path
}

/// Repeats a call that a signal broke off.
pub fn retry<T>(mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    loop {
        match call() {
            Err(Errno::INTR) => continue,
            other => return other,
        }
    }
}

pub fn open(dir: impl AsFd, path: &[u8], flags: OFlags, mode: u32) -> Result<OwnedFd, Errno> {
    let dir = dir.as_fd();
    retry(|| rustix::fs::openat(dir, path, flags | SAFE, Mode::from_raw_mode(mode)))
}

/// Opens a directory, and never one behind a link. gVisor follows the link although O_NOFOLLOW is given together with
/// O_DIRECTORY, so what was opened must be what the name itself stands for.
pub fn open_directory(dir: impl AsFd, name: &[u8]) -> Result<OwnedFd, Errno> {
    let dir = dir.as_fd();
    let fd = match open(dir, name, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW, 0) {
        Err(Errno::LOOP) => return Err(Errno::NOTDIR),
        other => other?,
    };
    let there = lstat(dir, name)?;
    let same = Id::of(&there) == Id::of(&rustix::fs::fstat(&fd)?);
    if same && kind(&there) == FileType::Directory {
        Ok(fd)
    } else {
        Err(Errno::NOTDIR)
    }
}

pub fn lstat(dir: impl AsFd, path: &[u8]) -> Result<Stat, Errno> {
    rustix::fs::statat(dir, path, AtFlags::SYMLINK_NOFOLLOW)
}

pub fn read_link(dir: impl AsFd, path: &[u8]) -> Result<Vec<u8>, Errno> {
    rustix::fs::readlinkat(dir, path, Vec::new()).map(|target| target.into_bytes())
}

/// Opens a directory of the request itself, following links: the caller named it.
pub fn open_root(path: &Path, follow: bool, paths: Paths) -> Result<OwnedFd, OpError> {
    let bytes = trimmed(path.as_os_str().as_bytes());
    let opened =
        if follow { paths.directory(bytes) } else { open_directory(rustix::fs::CWD, bytes).map_err(OpError::from) };
    opened.map_err(|error| error.at(path.display()))
}

/// Opens what should be a regular file. Everything else is a typed error; so is a file that belongs to the agent.
pub fn open_regular(dir: BorrowedFd<'_>, path: &[u8], flags: OFlags, mode: u32) -> Result<(OwnedFd, Stat), OpError> {
    let fd = match open(dir, path, flags, mode) {
        // A socket, or a FIFO without a reader.
        Err(Errno::NXIO) => return Err(not_regular()),
        other => other?,
    };
    let stat = rustix::fs::fstat(&fd)?;
    regular(&stat)?;
    guard(fd.as_fd(), &stat, flags.intersects(OFlags::WRONLY | OFlags::RDWR))?;
    Ok((fd, stat))
}

pub fn regular(stat: &Stat) -> Result<(), OpError> {
    match kind(stat) {
        FileType::RegularFile => Ok(()),
        FileType::Directory => Err(OpError::from(Errno::ISDIR)),
        _ => Err(not_regular()),
    }
}

fn not_regular() -> OpError {
    OpError::new("not_a_regular_file", "not a regular file")
}

/// A file of procfs, sysfs or cgroupfs: written in place, read without trusting its size.
pub fn is_pseudo(fd: impl AsFd) -> bool {
    let fd = fd.as_fd();
    match rustix::fs::fstatfs(fd) {
        Ok(fs) => matches!(fs.f_type as u64 & 0xffff_ffff, PROC_MAGIC | SYSFS_MAGIC | CGROUP_MAGIC | CGROUP2_MAGIC),
        // Old gVisor has no statfs for procfs; then the name has to tell.
        Err(_) => {
            let opened = read_link(rustix::fs::CWD, descriptor_path(fd).as_bytes()).unwrap_or_default();
            opened.starts_with(b"/proc/") || opened.starts_with(b"/sys/")
        }
    }
}

/// Refuses what /proc/self would open to the caller only because the agent is the one who asks: the agent's memory and
/// the host-side log behind its standard descriptors.
pub fn guard(fd: BorrowedFd<'_>, stat: &Stat, writing: bool) -> Result<(), OpError> {
    let id = Id::of(stat);
    for number in 0..3 {
        let path = format!("/proc/self/fd/{number}");
        let own = rustix::fs::statat(rustix::fs::CWD, path.as_str(), AtFlags::empty());
        if own.is_ok_and(|own| kind(&own) == FileType::RegularFile && Id::of(&own) == id) {
            return Err(OpError::from(Errno::ACCESS));
        }
    }
    if !is_pseudo(fd) {
        return Ok(());
    }
    let opened = read_link(rustix::fs::CWD, descriptor_path(fd).as_bytes()).unwrap_or_default();
    let own = format!("/proc/{}/", std::process::id());
    let Some(entry) = opened.strip_prefix(own.as_bytes()) else { return Ok(()) };
    if writing || !OWN_PROC_READABLE.contains(&entry) {
        return Err(OpError::from(Errno::ACCESS));
    }
    Ok(())
}

/// The name under which the kernel lets us reach the object behind a descriptor.
pub fn descriptor_path(fd: BorrowedFd<'_>) -> String {
    use std::os::fd::AsRawFd;
    format!("/proc/self/fd/{}", fd.as_raw_fd())
}
