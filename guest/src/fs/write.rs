//! `write`: a file from a stream, replaced as a whole or changed in place.

use super::node;
use super::paths::{became_a_link, Paths};
use super::replace::{set_owner, write_all, Place, Temporary};
use super::{mkdir, owner_id, Owner};
use crate::op::{map, OpError, OpIo, Req};
use rmpv::Value;
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{FileType, Mode, OFlags, SeekFrom, Stat};
use rustix::io::Errno;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

const DEFAULT_MODE: u32 = 0o644;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Create {
    Any,
    New,
    Existing,
}

struct Plan {
    path: PathBuf,
    mode: Option<u32>,
    owner: Owner,
    offset: Option<u64>,
    append: bool,
    create: Create,
    atomic: bool,
    fsync: bool,
    follow: bool,
    paths: Paths,
}

impl Plan {
    fn of(req: &Req) -> Result<Self, OpError> {
        let offset = req.opt_u64("offset")?;
        let append = req.opt_bool("append", false)?;
        if offset.is_some() && append {
            return Err(OpError::invalid("`offset` and `append` exclude each other"));
        }
        if offset.is_some_and(|offset| offset > i64::MAX as u64) {
            return Err(OpError::invalid("`offset` is too large"));
        }
        let create = match req.opt_str("create")?.unwrap_or("any") {
            "any" => Create::Any,
            "new" => Create::New,
            "existing" => Create::Existing,
            _ => return Err(OpError::invalid("`create` must be any, new or existing")),
        };
        let partial = offset.is_some() || append;
        let atomic = req.opt_bool("atomic", !partial)?;
        if atomic && partial {
            return Err(OpError::invalid("`atomic` replaces the whole file: it takes no `offset` or `append`"));
        }
        Ok(Self {
            path: req.path("path")?,
            mode: super::mode(req)?,
            owner: Owner { uid: owner_id(req, "uid")?, gid: owner_id(req, "gid")? },
            offset,
            append,
            create,
            atomic,
            fsync: req.opt_bool("fsync", false)?,
            follow: req.opt_bool("follow", true)?,
            paths: Paths::of(req)?,
        })
    }

    fn existing(&self, found: bool) -> Result<(), OpError> {
        match (self.create, found) {
            (Create::New, true) => Err(Errno::EXIST.into()),
            (Create::Existing, false) => Err(Errno::NOENT.into()),
            _ => Ok(()),
        }
    }
}

pub fn write(req: &Req, io: &mut dyn OpIo) -> Result<Value, OpError> {
    let plan = Plan::of(req)?;
    let written = run(&plan, req.opt_bool("parents", false)?, io);
    let (bytes, stat) =
        written.map_err(|error| if error.code == "cancelled" { error } else { error.at(plan.path.display()) })?;
    let stat = Value::Map(node::describe(&stat, node::name_of(&plan.path), None));
    Ok(map([("bytes", Value::from(bytes)), ("stat", stat)]))
}

fn run(plan: &Plan, parents: bool, io: &mut dyn OpIo) -> Result<(u64, Stat), OpError> {
    if parents {
        if let Some(parent) = plan.path.parent() {
            mkdir::ensure(parent, &plan.owner, plan.paths)?;
        }
    }
    if !plan.atomic {
        return in_place(plan, io);
    }
    let place = Place::of(&plan.path, plan.follow, plan.paths)?;
    plan.existing(place.stat.is_some())?;
    match place.kind() {
        None | Some(FileType::RegularFile) => {}
        Some(FileType::Symlink) if !plan.follow => {}
        Some(FileType::Symlink) => return Err(became_a_link()),
        Some(FileType::Directory) => return Err(Errno::ISDIR.into()),
        Some(_) => return Err(OpError::new("not_a_regular_file", "not a regular file")),
    }
    let is_file = place.kind() == Some(FileType::RegularFile);
    if is_file && node::is_pseudo(&place.dir) {
        return in_place(plan, io);
    }
    let uid = rustix::process::geteuid();
    if !uid.is_root() && place.stat.as_ref().is_some_and(|stat| is_file && stat.st_uid != uid.as_raw()) {
        // Another user's file is not to be replaced by one's own: it is written if its mode allows that.
        return in_place(plan, io);
    }
    let temporary = match Temporary::create(place.dir.as_fd()) {
        // The directory is not the user's, the file is.
        Err(Errno::ACCESS) if is_file => return in_place(plan, io),
        // A writable file bound into a read-only tree has no room for a sibling.
        Err(Errno::ROFS) if is_file => return in_place(plan, io),
        other => other?,
    };
    ready(io)?;
    let bytes = receive(temporary.fd(), io)?;
    let old = place.stat.filter(|_| is_file);
    let mode = plan.mode.unwrap_or(old.as_ref().map_or(DEFAULT_MODE, node::permissions));
    temporary.dress(mode, &plan.owner, old.as_ref())?;
    if plan.fsync {
        rustix::fs::fsync(temporary.fd())?;
    }
    if io.cancelled() {
        return Err(OpError::cancelled());
    }
    let stat = rustix::fs::fstat(temporary.fd())?;
    let source = temporary.fd().try_clone()?;
    match temporary.commit(place.dir.as_fd(), &place.name, plan.create == Create::New) {
        Ok(()) => {}
        // The target is itself a mount point: its content can be changed, its name cannot.
        Err(Errno::BUSY) if is_file => return pour(plan, &source, &place, bytes),
        Err(errno) => return Err(errno.into()),
    }
    if plan.fsync {
        rustix::fs::fsync(&place.dir)?;
    }
    Ok((bytes, stat))
}

fn ready(io: &mut dyn OpIo) -> Result<(), OpError> {
    io.event(map([("ready", Value::from(true))]))
}

fn receive(fd: &OwnedFd, io: &mut dyn OpIo) -> Result<u64, OpError> {
    let mut bytes = 0;
    while let Some(data) = io.recv()? {
        write_all(fd, &data)?;
        bytes += data.len() as u64;
    }
    Ok(bytes)
}

fn in_place(plan: &Plan, io: &mut dyn OpIo) -> Result<(u64, Stat), OpError> {
    let mut flags = OFlags::WRONLY;
    if plan.append {
        flags |= OFlags::APPEND;
    }
    if !plan.paths.follow(plan.follow) {
        flags |= OFlags::NOFOLLOW;
    }
    let (fd, stat, created) = open_for_writing(plan, flags)?;
    if plan.owner.is_set() {
        set_owner(fd.as_fd(), plan.owner.uid, plan.owner.gid)?;
    }
    let mode = plan.mode.or(created.then_some(DEFAULT_MODE));
    if let Some(mode) = mode.filter(|mode| *mode != node::permissions(&stat)) {
        rustix::fs::fchmod(&fd, Mode::from_raw_mode(mode))?;
    }
    match plan.offset {
        Some(offset) => drop(rustix::fs::seek(&fd, SeekFrom::Start(offset))?),
        None if !plan.append && !created && stat.st_size > 0 => rustix::fs::ftruncate(&fd, 0)?,
        None => {}
    }
    ready(io)?;
    let bytes = receive(&fd, io)?;
    if plan.fsync {
        rustix::fs::fsync(&fd)?;
    }
    Ok((bytes, rustix::fs::fstat(&fd)?))
}

/// Opens the target, and tells whether this call made it. O_EXCL tells that; where a dangling link makes it impossible
/// a plain create does.
fn open_for_writing(plan: &Plan, flags: OFlags) -> Result<(OwnedFd, Stat, bool), OpError> {
    let spot = plan.paths.spot(plan.path.as_os_str().as_bytes())?;
    let mode = plan.mode.unwrap_or(DEFAULT_MODE);
    let mut exists = false;
    if plan.create != Create::Existing {
        match node::open_regular(spot.dir(), &spot.name, flags | OFlags::CREATE | OFlags::EXCL, mode) {
            Ok((fd, stat)) => return Ok((fd, stat, true)),
            Err(error) if error.errno == Some(libc::EEXIST) && plan.create == Create::Any => exists = true,
            Err(error) => return Err(error),
        }
    }
    match node::open_regular(spot.dir(), &spot.name, flags, 0) {
        Ok((fd, stat)) => Ok((fd, stat, false)),
        Err(error) if exists && error.errno == Some(libc::ENOENT) => {
            let (fd, stat) = node::open_regular(spot.dir(), &spot.name, flags | OFlags::CREATE, mode)?;
            Ok((fd, stat, true))
        }
        Err(error) => Err(error),
    }
}

/// Copies what was received into a target that could not be replaced.
fn pour(plan: &Plan, source: &OwnedFd, place: &Place, bytes: u64) -> Result<(u64, Stat), OpError> {
    let (fd, _) = node::open_regular(place.dir.as_fd(), &place.name, OFlags::WRONLY | OFlags::NOFOLLOW, 0)?;
    rustix::fs::ftruncate(&fd, 0)?;
    rustix::fs::seek(source, SeekFrom::Start(0))?;
    let mut buffer = vec![0u8; 64 << 10];
    loop {
        let got = node::retry(|| rustix::io::read(source, &mut *buffer))?;
        if got == 0 {
            break;
        }
        write_all(&fd, buffer.get(..got).unwrap_or_default())?;
    }
    if let Some(mode) = plan.mode {
        rustix::fs::fchmod(&fd, Mode::from_raw_mode(mode))?;
    }
    if plan.fsync {
        rustix::fs::fsync(&fd)?;
    }
    Ok((bytes, rustix::fs::fstat(&fd)?))
}
