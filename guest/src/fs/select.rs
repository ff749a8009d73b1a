//! Parts that grep and sed share: compiling patterns, and finding the files a request means.

use super::glob::Choice;
use super::list::skip_lost;
use super::node;
use super::paths::{became_a_link, Paths};
use super::walk::{Step, Walk};
use super::{alive, on_large_stack};
use crate::op::{OpError, OpIo, Req};
use regex::bytes::{Regex, RegexBuilder};
use rustix::fd::BorrowedFd;
use rustix::fs::{AtFlags, FileType};
use rustix::io::Errno;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

const MAX_PATTERN: usize = 64 << 10;
const MAX_NESTING: u32 = 128;
/// Patterns this short cannot nest deep enough to matter.
const SHORT: usize = 24;

/// Compiles a pattern. Look-around and back-references do not exist here, so every search takes linear time.
pub fn compile(pattern: &str, ignore_case: bool, lines: bool) -> Result<Regex, OpError> {
    if pattern.len() > MAX_PATTERN {
        return Err(OpError::new("bad_pattern", "the pattern is longer than 64 KiB"));
    }
    let mut builder = RegexBuilder::new(pattern);
    builder.case_insensitive(ignore_case).multi_line(lines).nest_limit(MAX_NESTING);
    let built = if pattern.len() <= SHORT {
        builder.build()
    } else {
        // The compiler of the regex crate recurses with the nesting of a pattern.
        on_large_stack(|| builder.build())?
    };
    built.map_err(|error| OpError::new("bad_pattern", error.to_string()))
}

/// A file that was selected: its name in an open directory, and the path to report.
pub struct Selected<'a> {
    pub dir: BorrowedFd<'a>,
    pub name: &'a [u8],
    pub path: &'a [u8],
    /// The caller named this file itself, so a link there is followed.
    pub is_root: bool,
}

pub fn choice(req: &Req) -> Result<Choice, OpError> {
    Choice::new(&req.bytes_list("include")?, &req.bytes_list("exclude")?)
}

/// Calls `visit` with every chosen regular file at or below `root`, in order, until it answers `false`.
pub fn each_file(
    root: &Path,
    paths: Paths,
    recursive: bool,
    choice: &Choice,
    io: &mut dyn OpIo,
    visit: &mut dyn FnMut(Selected<'_>, &mut dyn OpIo) -> Result<bool, OpError>,
) -> Result<(), OpError> {
    let path = node::trimmed(root.as_os_str().as_bytes());
    let spot = paths.spot(path).map_err(|error| error.at(root.display()))?;
    let flags = if paths.follow(true) { AtFlags::empty() } else { AtFlags::SYMLINK_NOFOLLOW };
    let stat =
        rustix::fs::statat(spot.dir(), &*spot.name, flags).map_err(|errno| OpError::from(errno).at(root.display()))?;
    if node::kind(&stat) == FileType::Symlink {
        return Err(became_a_link().at(root.display()));
    }
    if node::kind(&stat) != FileType::Directory {
        node::regular(&stat).map_err(|error| error.at(root.display()))?;
        if choice.takes(node::name_of(root)) {
            visit(Selected { dir: spot.dir(), name: &spot.name, path, is_root: true }, io)?;
        }
        return Ok(());
    }
    if !recursive {
        return Err(OpError::from(Errno::ISDIR).at(root.display()));
    }
    let mut walk = Walk::new(node::open_root(root, true, paths)?)?;
    let mut full = node::join(path, b"x");
    full.pop();
    let prefix = full.len();
    loop {
        match walk.step()? {
            Step::Done => return Ok(()),
            Step::Leave => continue,
            Step::Entry => alive(io)?,
        }
        match walk.kind() {
            // procfs and sysfs in the middle of a tree are no part of its content.
            FileType::Directory => {
                let goes = !choice.drops(walk.path(), true) && skip_lost(walk.descend())?;
                if goes && walk.crossed() && node::is_pseudo(walk.dir()?) {
                    walk.skip_rest();
                }
            }
            FileType::RegularFile if choice.takes(walk.path()) => {
                full.truncate(prefix);
                full.extend_from_slice(walk.path());
                let selected = Selected { dir: walk.dir()?, name: walk.name(), path: &full, is_root: false };
                if !visit(selected, io)? {
                    return Ok(());
                }
            }
            _ => {}
        }
    }
}
