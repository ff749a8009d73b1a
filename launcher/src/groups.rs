//! Entering the sandbox's control groups without waiting for the kernel.
//!
//! A process that is moved by writing `cgroup.procs` waits for a grace period, ten milliseconds and more. A single thread that moves
//! itself by v1's `tasks` does not, and a child can be born into a v2 group at no cost.

use crate::failure::{Failure, Result};
use crate::sys;
use std::os::fd::OwnedFd;
use std::path::Path;

const STEP: &str = "group";

/// Enter every v1 group now; the v2 one, if there is any, is for the child to be born into.
pub fn enter(doors: &[String], expected: &str) -> Result<Option<OwnedFd>> {
    let mut unified = None;
    if doors.is_empty() {
        return Err(Failure::new(STEP, "no control group was named".into()));
    }
    for door in doors {
        let group = directory(door, expected)?;
        if group.join("tasks").exists() {
            let path = group.join("tasks");
            std::fs::write(&path, "0").map_err(|e| Failure::new(STEP, format!("{}: {e}", path.display())))?;
        } else {
            let path = sys::c(&group.to_string_lossy())?;
            unified = Some(sys::open_path(libc::AT_FDCWD, &path, libc::O_RDONLY | libc::O_DIRECTORY, STEP)?);
        }
    }
    Ok(unified)
}

/// The directory of a group; its path has to end as the configuration says.
pub fn directory<'a>(door: &'a str, expected: &str) -> Result<&'a Path> {
    let path = Path::new(door);
    let group = path.parent().filter(|_| path.file_name().is_some_and(|name| name == "cgroup.procs"));
    let wanted = expected.trim_start_matches('/');
    match group {
        Some(group) if !wanted.is_empty() && group.ends_with(wanted) => Ok(group),
        _ => Err(Failure::new(STEP, format!("{door} is not a door of {expected}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_that_the_configuration_does_not_name_is_refused() {
        assert!(directory("/sys/fs/cgroup/pids/atoll/m/b/cgroup.procs", "/atoll/m/b").is_ok());
        for (door, expected) in [
            ("/sys/fs/cgroup/pids/atoll/m/c/cgroup.procs", "/atoll/m/b"),
            ("/sys/fs/cgroup/pids/atoll/m/b/tasks", "/atoll/m/b"),
            ("/sys/fs/cgroup/pids/cgroup.procs", "/"),
        ] {
            assert!(directory(door, expected).is_err(), "{door}");
        }
        assert!(enter(&[], "/atoll/m/b").is_err());
    }
}
