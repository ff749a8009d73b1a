//! `watch`: what changes in a directory, or in the whole tree below it, until the operation is cancelled.
//!
//! Directories that appear are watched too, and read once after that, so that what was made in them before is not missed.
//! The agent's own temporaries are not shown: a file replaced by one was created and written.

use super::list::skip_lost;
use super::node::{self, Id};
use super::paths::Paths;
use super::replace::is_temporary;
use super::walk::{Step, Walk};
use crate::op::{map, text_or_bin, OpError, OpIo, Req};
use rmpv::Value;
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use rustix::fs::{FileType, OFlags, CWD};
use rustix::io::Errno;
use std::collections::{HashMap, HashSet};
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;

const BATCH: usize = 256;
const BATCH_BYTES: usize = 256 << 10;
/// How long the second half of a rename may take to follow the first.
const RENAME_WAIT: Timespec = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
/// Paths remembered to recognise an event for what a scan has reported.
const REMEMBERED: usize = 10_000;

const EVENTS: WatchFlags = WatchFlags::CREATE
    .union(WatchFlags::MODIFY)
    .union(WatchFlags::DELETE)
    .union(WatchFlags::MOVE)
    .union(WatchFlags::ATTRIB)
    .union(WatchFlags::DELETE_SELF)
    .union(WatchFlags::MOVE_SELF)
    .union(WatchFlags::ONLYDIR);

pub fn watch(req: &Req, io: &mut dyn OpIo) -> Result<Value, OpError> {
    let path = req.path("path")?;
    let root = node::open_root(&path, true, Paths::of(req)?)?;
    let mut watcher = Watcher {
        inotify: inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?,
        root: Id::of(&rustix::fs::fstat(&root)?),
        root_path: node::trimmed(path.as_os_str().as_bytes()).to_vec(),
        recursive: req.opt_bool("recursive", false)?,
        directories: HashMap::new(),
        scanned: HashSet::new(),
        moving: None,
        changes: Vec::new(),
        change_bytes: 0,
        last: None,
    };
    watcher.add_root(root).map_err(|error| error.at(path.display()))?;
    if watcher.recursive {
        watcher.add_tree(b"", false, io).map_err(|error| error.at(path.display()))?;
    }
    io.event(map([("ready", Value::from(true))]))?;
    watcher.run(io)?;
    Ok(map([]))
}

/// An event, taken out of the buffer it came in.
struct Event {
    watch: i32,
    flags: ReadFlags,
    cookie: u32,
    name: Vec<u8>,
}

/// The first half of a rename.
struct Moving {
    cookie: u32,
    path: Vec<u8>,
    is_directory: bool,
}

struct Watcher {
    inotify: OwnedFd,
    /// The root is not kept open: the kernel tells that a directory was removed only when nobody holds it.
    root: Id,
    root_path: Vec<u8>,
    recursive: bool,
    /// Watch number to path relative to the root.
    directories: HashMap<i32, Vec<u8>>,
    /// Entries that a scan has reported and the kernel may report again.
    scanned: HashSet<Vec<u8>>,
    moving: Option<Moving>,
    changes: Vec<Value>,
    change_bytes: usize,
    last: Option<(Vec<u8>, &'static str)>,
}

impl Watcher {
    fn add_root(&mut self, root: OwnedFd) -> Result<(), OpError> {
        let added = inotify::add_watch(&self.inotify, node::descriptor_path(root.as_fd()).as_str(), EVENTS);
        let watch = match added {
            // Without /proc the name has to do.
            Err(Errno::NOENT | Errno::NOTDIR) => inotify::add_watch(&self.inotify, self.root_path.as_slice(), EVENTS),
            other => other,
        };
        self.directories.insert(watch.map_err(too_many)?, Vec::new());
        Ok(())
    }

    /// Watches a directory by its name in an open one, before anybody reads what is in it.
    fn add(&mut self, dir: BorrowedFd<'_>, name: &[u8], path: &[u8]) -> Result<(), OpError> {
        let flags = EVENTS | WatchFlags::DONT_FOLLOW;
        let by_descriptor = [format!("/proc/self/fd/{}/", dir.as_raw_fd()).as_bytes(), name].concat();
        let added = match inotify::add_watch(&self.inotify, by_descriptor.as_slice(), flags) {
            Err(Errno::NOENT | Errno::NOTDIR) => {
                inotify::add_watch(&self.inotify, node::join(&self.root_path, path).as_slice(), flags)
            }
            other => other,
        };
        match added {
            Ok(watch) => drop(self.directories.insert(watch, path.to_vec())),
            // Gone again, or no directory any more.
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::ACCESS | Errno::NAMETOOLONG) => {}
            Err(errno) => return Err(too_many(errno)),
        }
        Ok(())
    }

    /// Watches all directories below `path`; with `report`, what is found there is reported as created.
    fn add_tree(&mut self, path: &[u8], report: bool, io: &mut dyn OpIo) -> Result<(), OpError> {
        let Some(top) = self.open_below(path) else { return Ok(()) };
        let mut walk = Walk::new(top)?;
        loop {
            match walk.step()? {
                Step::Done => return Ok(()),
                Step::Leave => continue,
                Step::Entry => super::alive(io)?,
            }
            let below = if path.is_empty() { walk.path().to_vec() } else { node::join(path, walk.path()) };
            let is_directory = walk.kind() == FileType::Directory;
            if is_directory {
                self.add(walk.dir()?, walk.name(), &below)?;
            }
            if report && !is_temporary(walk.name()) {
                self.change(&below, "create", None, io)?;
                if self.scanned.len() < REMEMBERED {
                    self.scanned.insert(below);
                }
            }
            if is_directory {
                skip_lost(walk.descend())?;
            }
        }
    }

    fn run(&mut self, io: &mut dyn OpIo) -> Result<(), OpError> {
        let mut buffer: Vec<u8> = Vec::with_capacity(64 << 10);
        loop {
            if !self.wait(io, None)? {
                return Ok(());
            }
            while !io.cancelled() {
                let events = self.read(buffer.spare_capacity_mut())?;
                if events.is_empty() {
                    // The other half of a rename may be just behind.
                    if self.moving.is_some() && self.wait(io, Some(&RENAME_WAIT))? && self.readable()? {
                        continue;
                    }
                    break;
                }
                for event in events {
                    if !self.event(event, io)? {
                        return self.flush(io);
                    }
                }
                self.flush(io)?;
            }
            self.moved_away(io)?;
            self.scanned.clear();
            self.flush(io)?;
        }
    }

    /// Waits for events; `false` on cancel.
    fn wait(&self, io: &dyn OpIo, limit: Option<&Timespec>) -> Result<bool, OpError> {
        // SAFETY: the stream keeps its descriptor open as long as the operation runs.
        let wake = unsafe { BorrowedFd::borrow_raw(io.wake_fd()) };
        loop {
            if io.cancelled() {
                return Ok(false);
            }
            let mut fds = [PollFd::new(&self.inotify, PollFlags::IN), PollFd::from_borrowed_fd(wake, PollFlags::IN)];
            match poll(&mut fds, limit) {
                Err(Errno::INTR) => continue,
                Err(errno) => return Err(errno.into()),
                Ok(_) => return Ok(!io.cancelled() && fds.get(1).is_some_and(|fd| fd.revents().is_empty())),
            }
        }
    }

    fn readable(&self) -> Result<bool, OpError> {
        let mut fds = [PollFd::new(&self.inotify, PollFlags::IN)];
        Ok(node::retry(|| poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })))? > 0)
    }

    /// The events that are there now.
    fn read(&self, buffer: &mut [MaybeUninit<u8>]) -> Result<Vec<Event>, OpError> {
        let mut reader = inotify::Reader::new(&self.inotify, buffer);
        let mut events = Vec::new();
        loop {
            match reader.next() {
                Ok(event) => events.push(Event {
                    watch: event.wd(),
                    flags: event.events(),
                    cookie: event.cookie(),
                    name: event.file_name().map(|name| name.to_bytes().to_vec()).unwrap_or_default(),
                }),
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => return Ok(events),
                Err(errno) => return Err(errno.into()),
            }
            if reader.is_buffer_empty() {
                return Ok(events);
            }
        }
    }

    /// Deals with one event; `false` when what was watched is gone.
    fn event(&mut self, event: Event, io: &mut dyn OpIo) -> Result<bool, OpError> {
        let flags = event.flags;
        let second_half =
            flags.contains(ReadFlags::MOVED_TO) && self.moving.as_ref().is_some_and(|m| m.cookie == event.cookie);
        if !second_half {
            self.moved_away(io)?;
        }
        if flags.contains(ReadFlags::QUEUE_OVERFLOW) {
            self.overflow(io)?;
            return Ok(true);
        }
        let Some(dir) = self.directories.get(&event.watch).cloned() else { return Ok(true) };
        if flags.contains(ReadFlags::IGNORED) {
            self.directories.remove(&event.watch);
            return Ok(!dir.is_empty());
        }
        if flags.intersects(ReadFlags::DELETE_SELF | ReadFlags::MOVE_SELF | ReadFlags::UNMOUNT) {
            if !dir.is_empty() {
                return Ok(true);
            }
            self.change(b"", if flags.contains(ReadFlags::MOVE_SELF) { "rename" } else { "remove" }, None, io)?;
            return Ok(false);
        }
        let is_directory = flags.contains(ReadFlags::ISDIR);
        if event.name.is_empty() {
            // The directory itself: its parent tells, except for the root.
            if dir.is_empty() && flags.contains(ReadFlags::ATTRIB) {
                self.change(b"", "chmod", None, io)?;
            }
            return Ok(true);
        }
        let path = if dir.is_empty() { event.name.clone() } else { node::join(&dir, &event.name) };
        if flags.contains(ReadFlags::MOVED_FROM) {
            self.moving = Some(Moving { cookie: event.cookie, path, is_directory });
        } else if flags.contains(ReadFlags::MOVED_TO) {
            self.moved_to(path, is_directory, io)?;
        } else if is_temporary(&event.name) {
            return Ok(true);
        } else if flags.contains(ReadFlags::CREATE) {
            self.appeared(&path, is_directory, io)?;
        } else if flags.contains(ReadFlags::DELETE) {
            self.change(&path, "remove", None, io)?;
        } else if flags.contains(ReadFlags::MODIFY) {
            self.change(&path, "write", None, io)?;
        } else if flags.contains(ReadFlags::ATTRIB) {
            self.change(&path, "chmod", None, io)?;
        }
        Ok(true)
    }

    fn appeared(&mut self, path: &[u8], is_directory: bool, io: &mut dyn OpIo) -> Result<(), OpError> {
        if self.scanned.remove(path) {
            return Ok(());
        }
        self.change(path, "create", None, io)?;
        if is_directory && self.recursive {
            let (parent, name) = match path.iter().rposition(|b| *b == b'/') {
                Some(at) => (path.get(..at).unwrap_or_default(), path.get(at + 1..).unwrap_or_default()),
                None => (b"".as_slice(), path),
            };
            let added = match self.open_below(parent) {
                Some(dir) => self.add(dir.as_fd(), name, path).and_then(|()| self.add_tree(path, true, io)),
                None => Ok(()),
            };
            return self.or_overflow(added, io);
        }
        Ok(())
    }

    fn open_below(&self, path: &[u8]) -> Option<OwnedFd> {
        let mut at = node::open(CWD, &self.root_path, OFlags::RDONLY | OFlags::DIRECTORY, 0).ok()?;
        if Id::of(&rustix::fs::fstat(&at).ok()?) != self.root {
            return None;
        }
        for part in path.split(|b| *b == b'/').filter(|part| !part.is_empty()) {
            at = node::open_directory(&at, part).ok()?;
        }
        Some(at)
    }

    fn moved_to(&mut self, path: Vec<u8>, is_directory: bool, io: &mut dyn OpIo) -> Result<(), OpError> {
        match self.moving.take() {
            Some(from) if !is_temporary(node_name(&from.path)) => {
                if from.is_directory {
                    self.relabel(&from.path, &path);
                }
                self.change(&from.path, "rename", Some(&path), io)
            }
            Some(_) if !is_directory => {
                self.change(&path, "create", None, io)?;
                self.change(&path, "write", None, io)
            }
            _ => self.appeared(&path, is_directory, io),
        }
    }

    /// A directory moved within the tree keeps its watches, under new paths.
    fn relabel(&mut self, from: &[u8], to: &[u8]) {
        for path in self.directories.values_mut() {
            let rest = path.strip_prefix(from).filter(|rest| rest.is_empty() || rest.first() == Some(&b'/'));
            if let Some(rest) = rest {
                *path = [to, rest].concat();
            }
        }
    }

    /// Stops watching entries that were moved out of the tree: their arrival was never seen.
    fn moved_away(&mut self, io: &mut dyn OpIo) -> Result<(), OpError> {
        let Some(from) = self.moving.take() else { return Ok(()) };
        if from.is_directory {
            let inside = |path: &[u8]| {
                path.strip_prefix(from.path.as_slice())
                    .is_some_and(|rest| rest.is_empty() || rest.first() == Some(&b'/'))
            };
            let gone: Vec<i32> =
                self.directories.iter().filter(|(_, path)| inside(path)).map(|(watch, _)| *watch).collect();
            for watch in gone {
                self.directories.remove(&watch);
                // It may have gone by itself.
                let _ = inotify::remove_watch(&self.inotify, watch);
            }
        }
        if is_temporary(node_name(&from.path)) {
            return Ok(());
        }
        self.change(&from.path, "rename", None, io)
    }

    /// Events were lost: says so, and looks for directories that are not watched yet.
    fn overflow(&mut self, io: &mut dyn OpIo) -> Result<(), OpError> {
        self.flush(io)?;
        io.event(map([("overflow", Value::from(true))]))?;
        if self.recursive {
            let added = self.add_tree(b"", false, io);
            return self.or_overflow(added, io);
        }
        Ok(())
    }

    /// A directory that cannot be watched means lost events, not the end.
    fn or_overflow(&mut self, result: Result<(), OpError>, io: &mut dyn OpIo) -> Result<(), OpError> {
        match result {
            Err(error) if error.code == "cancelled" => Err(error),
            Err(_) => {
                self.flush(io)?;
                io.event(map([("overflow", Value::from(true))]))
            }
            Ok(()) => Ok(()),
        }
    }

    fn change(&mut self, path: &[u8], kind: &'static str, to: Option<&[u8]>, io: &mut dyn OpIo) -> Result<(), OpError> {
        if to.is_none() && self.last.as_ref().is_some_and(|(last, what)| last == path && *what == kind) {
            return Ok(());
        }
        self.last = to.is_none().then(|| (path.to_vec(), kind));
        let full = node::join(&self.root_path, path);
        let bytes = full.len() + to.map_or(0, |to| self.root_path.len() + to.len());
        if bytes > BATCH_BYTES {
            return Ok(());
        }
        if self.changes.len() >= BATCH || self.change_bytes + bytes > BATCH_BYTES {
            self.send(io)?;
        }
        let mut change = vec![(Value::from("path"), text_or_bin(&full)), (Value::from("kind"), Value::from(kind))];
        if let Some(to) = to {
            change.push((Value::from("to"), text_or_bin(&node::join(&self.root_path, to))));
        }
        self.changes.push(Value::Map(change));
        self.change_bytes += bytes;
        Ok(())
    }

    fn send(&mut self, io: &mut dyn OpIo) -> Result<(), OpError> {
        self.change_bytes = 0;
        if self.changes.is_empty() {
            return Ok(());
        }
        io.event(map([("changes", Value::Array(std::mem::take(&mut self.changes)))]))
    }

    fn flush(&mut self, io: &mut dyn OpIo) -> Result<(), OpError> {
        self.last = None;
        self.send(io)
    }
}

fn node_name(path: &[u8]) -> &[u8] {
    path.rsplit(|b| *b == b'/').next().unwrap_or(path)
}

/// The kernel's limit on watches is ENOSPC, which is no full disk.
fn too_many(errno: Errno) -> OpError {
    match errno {
        Errno::NOSPC => OpError::new("exhausted", "too many directories are watched"),
        errno => errno.into(),
    }
}
