//! The sandbox's own host name in its /etc/hosts, so that programs which look themselves up find an address.

use std::io::{Read, Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

const PLACE: &str = "/etc/hosts";
const ADDRESS: &str = "127.0.1.1";
/// Ends the line the agent writes, so that a sandbox made from another one's files gets no second line.
const MARK: &str = "# this sandbox";
const MOST_BYTES: u64 = 256 * 1024;

/// Writes the host name into /etc/hosts. Best effort: a read-only or missing file stays as it is.
///
/// Only PID 1 does it: any other agent shares its file system with a machine. A file that is a mount of its own is the
/// user's, and is not touched.
pub fn name_self() {
    if std::process::id() != 1 || is_mounted() {
        return;
    }
    if let Some(name) = host_name() {
        let _ = name_in(Path::new(PLACE), &name);
    }
}

fn name_in(place: &Path, name: &str) -> std::io::Result<()> {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY;
    let mut file = std::fs::OpenOptions::new().read(true).write(true).custom_flags(flags).open(place)?;
    if !file.metadata()?.is_file() {
        return Ok(());
    }
    let mut old = String::new();
    (&mut file).take(MOST_BYTES).read_to_string(&mut old)?;
    let Some(new) = with_name(&old, name).filter(|_| (old.len() as u64) < MOST_BYTES) else { return Ok(()) };
    file.rewind()?;
    file.write_all(new.as_bytes())?;
    file.set_len(new.len() as u64)
}

/// The file with a line for `name`; `None` when it has one already.
fn with_name(old: &str, name: &str) -> Option<String> {
    let has =
        |line: &str| line.split('#').next().is_some_and(|l| l.split_ascii_whitespace().skip(1).any(|w| w == name));
    if old.lines().any(has) {
        return None;
    }
    let mut new: String = old.lines().filter(|line| !line.ends_with(MARK)).flat_map(|line| [line, "\n"]).collect();
    new.push_str(&format!("{ADDRESS}\t{name}\t{MARK}\n"));
    Some(new)
}

/// The host name, if it is one that can stand in the file.
fn host_name() -> Option<String> {
    let mut raw = [0u8; 256];
    let done = unsafe { libc::gethostname(raw.as_mut_ptr().cast(), raw.len()) };
    let length = raw.iter().position(|b| *b == 0)?;
    let name = std::str::from_utf8(raw.get(..length)?).ok()?;
    let good = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b'_');
    (done == 0 && !name.is_empty() && name.bytes().all(good)).then(|| name.to_owned())
}

fn is_mounted() -> bool {
    std::fs::read_to_string("/proc/self/mountinfo")
        .is_ok_and(|table| table.lines().any(|line| line.split(' ').nth(4) == Some(PLACE)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_gets_one_line() {
        let first = with_name("127.0.0.1\tlocalhost", "box-1").unwrap();
        assert_eq!(first, "127.0.0.1\tlocalhost\n127.0.1.1\tbox-1\t# this sandbox\n");
        assert_eq!(with_name(&first, "box-1"), None);
        let second = with_name(&first, "box-2").unwrap();
        assert_eq!(second, "127.0.0.1\tlocalhost\n127.0.1.1\tbox-2\t# this sandbox\n");
        assert_eq!(with_name("10.0.0.7 pod pod.local # x\n", "pod.local"), None);
        assert!(with_name("# 10.0.0.7 pod\npod 10.0.0.7\n", "pod").is_some());
    }

    #[test]
    fn links_and_other_kinds_are_left_alone() {
        let dir = std::env::temp_dir().join(format!("atoll-hosts-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let (file, link) = (dir.join("file"), dir.join("link"));
        std::fs::write(&file, "::1 localhost and a longer line\n127.0.1.1\told\t# this sandbox\n").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        assert!(
            name_in(&link, "x").is_err() && name_in(&dir, "x").is_err() && name_in(&dir.join("none"), "x").is_err()
        );
        name_in(&file, "x").unwrap();
        let text = std::fs::read_to_string(&file).unwrap();
        assert_eq!(text, "::1 localhost and a longer line\n127.0.1.1\tx\t# this sandbox\n");
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
