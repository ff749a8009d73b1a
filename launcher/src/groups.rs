//! Entering the sandbox's control groups without waiting for the kernel.
//!
//! A process that is moved by writing `cgroup.procs` waits for a grace period, ten milliseconds and more. A single thread that moves
//! itself by v1's `tasks` does not, and a child can be born into a v2 group at no cost.

use crate::failure::{Failure, Result};
use crate::sys;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

const STEP: &str = "group";

/// Enter every v1 group now; the v2 one, if there is any, is for a child to be born into.
pub fn enter(doors: &[String]) -> Result<Option<OwnedFd>> {
    let mut unified = None;
    for door in doors {
        let group = directory(door)?;
        let tasks = group.join("tasks");
        if tasks.exists() {
            write(&tasks)?;
        } else {
            let path = sys::c(&group.to_string_lossy())?;
            unified = Some(sys::open_path(libc::AT_FDCWD, &path, libc::O_RDONLY | libc::O_DIRECTORY, STEP)?);
        }
    }
    Ok(unified)
}

/// Enter all of them, for a process that cannot have a child in its place.
pub fn enter_waiting(doors: &[String]) -> Result<()> {
    if enter(doors)?.is_some() {
        for door in doors.iter().filter(|door| directory(door).is_ok_and(|group| !group.join("tasks").exists())) {
            write(Path::new(door))?;
        }
    }
    Ok(())
}

/// Go on in a child that is in all of the groups. The parent only waits, ends as the child does, and takes it along if it is killed.
pub fn go_on_inside(doors: &[String]) -> Result<()> {
    let Some(unified) = enter(doors)? else { return Ok(()) };
    let parent = std::process::id();
    let child = sys::clone(sys::CLONE_INTO_CGROUP, libc::SIGCHLD, Some(unified.as_raw_fd()))?;
    if child != 0 {
        std::process::exit(sys::wait(child));
    }
    sys::die_with_parent()?;
    if std::os::unix::process::parent_id() != parent {
        std::process::exit(1); // it died before we could ask to go with it
    }
    Ok(())
}

/// Whether these are the doors of the group that a configuration names.
pub fn check(doors: &[String], expected: &str) -> Result<()> {
    let wanted = expected.trim_start_matches('/');
    if wanted.is_empty() || doors.is_empty() {
        return Err(Failure::new(STEP, "no control group was named".into()));
    }
    for door in doors {
        if !directory(door)?.ends_with(wanted) {
            return Err(Failure::new(STEP, format!("{door} is not a door of {expected}")));
        }
    }
    Ok(())
}

fn directory(door: &str) -> Result<&Path> {
    let path = Path::new(door);
    let group = path.parent().filter(|_| path.file_name().is_some_and(|name| name == "cgroup.procs"));
    group.ok_or_else(|| Failure::new(STEP, format!("{door} is not the door of a group")))
}

fn write(door: &Path) -> Result<()> {
    std::fs::write(door, "0").map_err(|e| Failure::new(STEP, format!("{}: {e}", door.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_that_the_configuration_does_not_name_is_refused() {
        let checked = |door: &str, expected: &str| check(&[door.to_string()], expected);
        assert!(checked("/sys/fs/cgroup/pids/atoll/m/b/cgroup.procs", "/atoll/m/b").is_ok());
        for (door, expected) in [
            ("/sys/fs/cgroup/pids/atoll/m/c/cgroup.procs", "/atoll/m/b"),
            ("/sys/fs/cgroup/pids/atoll/m/b/tasks", "/atoll/m/b"),
            ("/sys/fs/cgroup/pids/cgroup.procs", "/"),
        ] {
            assert!(checked(door, expected).is_err(), "{door}");
        }
        assert!(check(&[], "/atoll/m/b").is_err());
    }
}
