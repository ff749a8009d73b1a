//! Walking a directory tree of any depth without recursion, without following links and without running out of
//! descriptors.
//!
//! Only the first levels keep their directory open. Deeper ones are left when going down and found again by `..`, which
//! is believed only if it leads to the same inode.

use super::node::{self, Id};
use crate::op::OpError;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{FileType, RawDir, Stat};
use rustix::io::Errno;

/// Levels that keep their descriptor; a bound on what one walk holds open.
const OPEN_LEVELS: usize = 32;
/// Bytes of names one walk may hold, all levels together.
const NAME_BYTES: usize = 128 << 20;
const DIRENT_BUFFER: usize = 32 << 10;

/// The names of one directory, in one piece of memory.
#[derive(Default)]
pub struct Names {
    bytes: Vec<u8>,
    index: Vec<(u32, u16, FileType)>,
}

impl Names {
    pub fn get(&self, at: usize) -> Option<(&[u8], FileType)> {
        let (start, len, kind) = *self.index.get(at)?;
        let start = start as usize;
        Some((self.bytes.get(start..start + len as usize)?, kind))
    }

    pub fn len(&self) -> usize {
        self.index.len()
    }

    pub fn is_empty(&self) -> bool {
        self.index.is_empty()
    }

    pub fn push(&mut self, name: &[u8], kind: FileType) -> Result<(), OpError> {
        if self.bytes.len() + name.len() > NAME_BYTES {
            return Err(OpError::new("exhausted", "too many names in one directory"));
        }
        self.index.push((self.bytes.len() as u32, name.len() as u16, kind));
        self.bytes.extend_from_slice(name);
        Ok(())
    }

    fn sort(&mut self) {
        let bytes = &self.bytes;
        let name = |(start, len, _): &(u32, u16, FileType)| {
            bytes.get(*start as usize..*start as usize + *len as usize).unwrap_or_default()
        };
        self.index.sort_unstable_by(|a, b| name(a).cmp(name(b)));
    }
}

/// Reads a directory from its start. `.` and `..` are left out.
pub fn names(dir: BorrowedFd<'_>, sorted: bool) -> Result<Names, OpError> {
    let mut found = Names::default();
    let mut buffer: Vec<u8> = Vec::with_capacity(DIRENT_BUFFER);
    let mut entries = RawDir::new(dir, buffer.spare_capacity_mut());
    while let Some(entry) = entries.next() {
        let entry = match entry {
            Ok(entry) => entry,
            Err(Errno::INTR) => continue,
            // The directory was removed while it was read.
            Err(Errno::NOENT) => break,
            Err(errno) => return Err(errno.into()),
        };
        let name = entry.file_name().to_bytes();
        if name != b"." && name != b".." {
            found.push(name, entry.file_type())?;
        }
    }
    if sorted {
        found.sort();
    }
    Ok(found)
}

/// The open directories from a root down to the current one. Below the first levels only the current one is open.
#[derive(Default)]
pub struct Descent {
    levels: Vec<(Option<OwnedFd>, Id)>,
}

impl Descent {
    pub fn push(&mut self, fd: OwnedFd) -> Result<(), OpError> {
        let id = Id::of(&rustix::fs::fstat(&fd)?);
        if self.levels.len() > OPEN_LEVELS {
            if let Some((above, _)) = self.levels.last_mut() {
                *above = None;
            }
        }
        self.levels.push((Some(fd), id));
        Ok(())
    }

    /// Goes back to the directory above.
    pub fn pop(&mut self) -> Result<(), OpError> {
        let Some((left, _)) = self.levels.pop() else { return Ok(()) };
        let Some((above, id)) = self.levels.last_mut() else { return Ok(()) };
        if above.is_none() {
            let left = left.ok_or_else(lost)?;
            let fd = node::open_directory(&left, b"..")?;
            if Id::of(&rustix::fs::fstat(&fd)?) != *id {
                return Err(OpError::new("file_error", "the tree was moved during the walk"));
            }
            *above = Some(fd);
        }
        Ok(())
    }

    pub fn top(&self) -> Result<BorrowedFd<'_>, OpError> {
        self.levels.last().and_then(|(fd, _)| fd.as_ref()).map(AsFd::as_fd).ok_or_else(lost)
    }

    pub fn len(&self) -> usize {
        self.levels.len()
    }

    pub fn is_empty(&self) -> bool {
        self.levels.is_empty()
    }

    /// Whether the current directory is on another file system than the one above it.
    pub fn crossed(&self) -> bool {
        match self.levels.as_slice() {
            [.., (_, above), (_, top)] => above.dev != top.dev,
            _ => false,
        }
    }
}

fn lost() -> OpError {
    OpError::new("internal", "the walk lost its directory")
}

struct Level {
    names: Names,
    next: usize,
    /// Length of this directory's own relative path.
    path_len: usize,
}

/// The result of `Walk::step`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// An entry: `name`, `path`, `kind` and `dir` tell which. `descend` goes into it.
    Entry,
    /// A directory that was descended into is done; `name`, `path` and `dir` are those of its entry again.
    Leave,
    Done,
}

pub struct Walk {
    directories: Descent,
    levels: Vec<Level>,
    path: Vec<u8>,
    name_start: usize,
    kind: FileType,
    held: usize,
    sorted: bool,
}

impl Walk {
    /// A walk over what is below `root`, names in byte order.
    pub fn new(root: OwnedFd) -> Result<Self, OpError> {
        Self::start(root, true)
    }

    fn start(root: OwnedFd, sorted: bool) -> Result<Self, OpError> {
        let mut walk = Self {
            directories: Descent::default(),
            levels: Vec::new(),
            path: Vec::new(),
            name_start: 0,
            kind: FileType::Directory,
            held: 0,
            sorted,
        };
        walk.push(root)?;
        Ok(walk)
    }

    /// The same in the order the directory gives, for work whose order nobody sees.
    pub fn unsorted(root: OwnedFd) -> Result<Self, OpError> {
        Self::start(root, false)
    }

    fn push(&mut self, fd: OwnedFd) -> Result<(), OpError> {
        let names = names(fd.as_fd(), self.sorted)?;
        if self.held + names.bytes.len() > NAME_BYTES {
            return Err(OpError::new("exhausted", "the tree holds too many names at once"));
        }
        self.held += names.bytes.len();
        self.directories.push(fd)?;
        self.levels.push(Level { names, next: 0, path_len: self.path.len() });
        Ok(())
    }

    /// Directories between the root and the current entry, counted from 1 for an entry of the root itself.
    pub fn depth(&self) -> usize {
        self.levels.len()
    }

    /// The path of the current entry relative to the root.
    pub fn path(&self) -> &[u8] {
        &self.path
    }

    pub fn name(&self) -> &[u8] {
        self.path.get(self.name_start..).unwrap_or_default()
    }

    /// The kind of the entry as the directory gave it; where that was `Unknown`, as stat gave it.
    pub fn kind(&self) -> FileType {
        self.kind
    }

    /// The directory that holds the current entry.
    pub fn dir(&self) -> Result<BorrowedFd<'_>, OpError> {
        self.directories.top()
    }

    pub fn stat(&self) -> Result<Stat, OpError> {
        Ok(node::lstat(self.dir()?, self.name())?)
    }

    pub fn step(&mut self) -> Result<Step, OpError> {
        loop {
            let Some(level) = self.levels.last_mut() else { return Ok(Step::Done) };
            self.path.truncate(level.path_len);
            let Some((name, kind)) = level.names.get(level.next) else { return self.leave() };
            level.next += 1;
            if !self.path.is_empty() {
                self.path.push(b'/');
            }
            self.name_start = self.path.len();
            self.path.extend_from_slice(name);
            self.kind = kind;
            if kind == FileType::Unknown {
                match self.stat() {
                    Ok(stat) => self.kind = node::kind(&stat),
                    Err(_) => continue,
                }
            }
            return Ok(Step::Entry);
        }
    }

    fn leave(&mut self) -> Result<Step, OpError> {
        let Some(left) = self.levels.pop() else { return Ok(Step::Done) };
        self.held = self.held.saturating_sub(left.names.bytes.len());
        self.directories.pop()?;
        let Some(parent) = self.levels.last() else { return Ok(Step::Done) };
        let start = parent.path_len;
        self.name_start = if start == 0 { 0 } else { start + 1 };
        self.kind = FileType::Directory;
        Ok(Step::Leave)
    }

    /// Goes into the current entry if it is a directory and no link. After an error the walk goes on with the next entry.
    pub fn descend(&mut self) -> Result<(), OpError> {
        let fd = node::open_directory(self.dir()?, self.name())?;
        self.push(fd)
    }

    /// Leaves out what is left of the directory just descended into.
    pub fn skip_rest(&mut self) {
        if let Some(level) = self.levels.last_mut() {
            level.next = level.names.len();
        }
    }

    /// Whether the directory just descended into is the root of another file system.
    pub fn crossed(&self) -> bool {
        self.directories.crossed()
    }
}
