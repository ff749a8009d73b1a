//! Reading, writing, listing and changing files.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod fs_support;

use atoll_guest::op::OpError;
use fs_support::*;
use rmpv::Value;
use std::fs;
use std::os::unix::fs::{symlink, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use tempfile::TempDir;

fn dir() -> TempDir {
    tempfile::tempdir().unwrap()
}

fn mode_of(path: &Path) -> u32 {
    fs::symlink_metadata(path).unwrap().permissions().mode() & 0o7777
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

fn write(target: &Path, data: &[u8], more: &[(&str, Value)]) -> Result<Value, OpError> {
    let mut pairs = vec![("path", path(target))];
    pairs.extend_from_slice(more);
    let mut io = Io::with_input(data);
    let result = run("write", &pairs, &mut io);
    if result.is_ok() {
        assert!(flag(&io.events[0], "ready"));
    }
    result
}

fn read(target: &Path, more: &[(&str, Value)]) -> Result<Vec<u8>, OpError> {
    let mut pairs = vec![("path", path(target))];
    pairs.extend_from_slice(more);
    let mut io = Io::new();
    let result = run("read", &pairs, &mut io)?;
    assert_eq!(number(&result, "bytes"), io.sent.len() as u64);
    assert!(field(&io.events[0], "file").is_some());
    Ok(io.sent)
}

#[test]
fn read_gives_the_file_or_a_part_of_it() {
    let dir = dir();
    let file = dir.path().join("a");
    let data: Vec<u8> = (0..1_000_000u32).map(|n| n as u8).collect();
    fs::write(&file, &data).unwrap();
    assert_eq!(read(&file, &[]).unwrap(), data);
    assert_eq!(read(&file, &[("offset", 10.into()), ("limit", 5.into())]).unwrap(), &data[10..15]);
    assert_eq!(read(&file, &[("offset", 999_999.into())]).unwrap().len(), 1);
    assert_eq!(read(&file, &[("offset", 2_000_000.into())]).unwrap().len(), 0);
    assert_eq!(read(&file, &[("limit", 0.into())]).unwrap().len(), 0);
    symlink(&file, dir.path().join("link")).unwrap();
    assert_eq!(read(&dir.path().join("link"), &[("limit", 3.into())]).unwrap(), &data[..3]);
    assert_eq!(read(&dir.path().join("link"), &[("nofollow", true.into())]).unwrap_err().code, "too_many_links");
}

#[test]
fn read_refuses_what_is_no_regular_file_and_comes_back_at_once() {
    let dir = dir();
    let fifo = dir.path().join("fifo");
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, 0o644.into(), 0).unwrap();
    let socket = dir.path().join("socket");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    for (target, expected) in [
        (dir.path().to_path_buf(), "is_a_directory"),
        (fifo.clone(), "not_a_regular_file"),
        (socket, "not_a_regular_file"),
        ("/dev/zero".into(), "not_a_regular_file"),
        (dir.path().join("none"), "file_not_found"),
        (dir.path().join("none/x"), "file_not_found"),
        ("/dev/null/x".into(), "not_a_directory"),
    ] {
        assert_eq!(read(&target, &[]).unwrap_err().code, expected, "{target:?}");
    }
    assert_eq!(write(&fifo, b"x", &[("atomic", false.into())]).unwrap_err().code, "not_a_regular_file");
    assert_eq!(write(&fifo, b"x", &[]).unwrap_err().code, "not_a_regular_file");
}

#[test]
fn pseudo_files_are_read_although_they_have_no_size() {
    let version = read(Path::new("/proc/version"), &[]).unwrap();
    assert!(version.starts_with(b"Linux"));
}

#[test]
fn the_agents_own_memory_is_not_a_file() {
    for target in ["/proc/self/mem", "/proc/self/environ", "/proc/thread-self/mem", "/proc/self/maps"] {
        assert_eq!(read(Path::new(target), &[]).unwrap_err().code, "file_permission", "{target}");
    }
    let own = format!("/proc/{}/mem", std::process::id());
    assert_eq!(write(Path::new(&own), b"x", &[("offset", 0.into())]).unwrap_err().code, "file_permission");
    assert!(!read(Path::new("/proc/self/status"), &[]).unwrap().is_empty());
}

#[test]
fn a_read_that_is_cancelled_stops() {
    let dir = dir();
    let file = dir.path().join("big");
    fs::File::create(&file).unwrap().set_len(1 << 40).unwrap();
    let mut io = Io::new();
    io.cancel_after_sends = Some(3);
    assert_eq!(code(run("read", &[("path", path(&file))], &mut io)), "cancelled");
}

#[test]
fn odd_paths_are_refused_before_use() {
    for bad in [&b"a\0b"[..], b"", &[b'x'; 300], &[b'/'; 5000]] {
        let result = call("stat", &[("path", Value::from(bad))]);
        assert!(matches!(code(result), "invalid_argument" | "name_too_long"));
    }
    assert_eq!(code(call("stat", &[])), "invalid_argument");
    assert_eq!(code(call("stat", &[("path", 5.into())])), "invalid_argument");
}

#[test]
fn names_of_any_bytes_make_the_round_trip() {
    use std::os::unix::ffi::OsStrExt;
    let dir = dir();
    let file = dir.path().join(std::ffi::OsStr::from_bytes(b"\xff\xfe\n\x1b[31m"));
    write(&file, b"odd", &[]).unwrap();
    assert_eq!(read(&file, &[]).unwrap(), b"odd");
    let mut io = Io::new();
    run("list", &[("path", path(dir.path()))], &mut io).unwrap();
    assert_eq!(field(&io.all("entries")[0], "path"), Some(path(&file)));
}

#[test]
fn write_replaces_as_a_whole_and_keeps_mode_and_owner() {
    let dir = dir();
    let file = dir.path().join("a");
    let result = write(&file, b"first", &[]).unwrap();
    assert_eq!(number(&result, "bytes"), 5);
    assert_eq!(mode_of(&file), 0o644);
    fs::set_permissions(&file, fs::Permissions::from_mode(0o4751)).unwrap();
    if is_root() {
        std::os::unix::fs::chown(&file, Some(12), Some(34)).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o4751)).unwrap();
    }
    let inode = fs::metadata(&file).unwrap().ino();
    write(&file, b"second", &[]).unwrap();
    assert_eq!(fs::read(&file).unwrap(), b"second");
    assert_eq!(mode_of(&file), 0o4751);
    let meta = fs::metadata(&file).unwrap();
    assert_ne!(meta.ino(), inode);
    if is_root() {
        assert_eq!((meta.uid(), meta.gid()), (12, 34));
    }
    let result = write(&file, b"3", &[("mode", 0o600.into())]).unwrap();
    assert_eq!(mode_of(&file), 0o600);
    assert_eq!(number(&field(&result, "stat").unwrap(), "mode"), 0o600);
    assert_eq!(names(dir.path()), ["a"]);
}

#[test]
fn a_cut_write_leaves_the_old_file_and_no_temporary() {
    let dir = dir();
    let file = dir.path().join("a");
    fs::write(&file, b"old").unwrap();
    let mut io = Io::with_input(b"half");
    io.input.push_back(Err(OpError::cancelled()));
    assert_eq!(code(run("write", &[("path", path(&file))], &mut io)), "cancelled");
    assert_eq!(fs::read(&file).unwrap(), b"old");
    assert_eq!(names(dir.path()), ["a"]);
}

#[test]
fn write_in_place_appends_and_overwrites_ranges() {
    let dir = dir();
    let file = dir.path().join("a");
    write(&file, b"0123456789", &[]).unwrap();
    write(&file, b"ab", &[("offset", 3.into())]).unwrap();
    write(&file, b"!", &[("append", true.into())]).unwrap();
    assert_eq!(fs::read(&file).unwrap(), b"012ab56789!");
    write(&file, b"x", &[("offset", 13.into())]).unwrap();
    assert_eq!(fs::read(&file).unwrap(), b"012ab56789!\0\0x");
    write(&file, b"new", &[("atomic", false.into())]).unwrap();
    assert_eq!(fs::read(&file).unwrap(), b"new");
    write(&dir.path().join("b"), b"log", &[("append", true.into()), ("mode", 0o640.into())]).unwrap();
    assert_eq!(mode_of(&dir.path().join("b")), 0o640);
    let both = write(&file, b"", &[("append", true.into()), ("offset", 1.into())]);
    assert_eq!(both.unwrap_err().code, "invalid_argument");
}

#[test]
fn write_creates_only_what_it_may() {
    let dir = dir();
    let file = dir.path().join("a");
    for atomic in [true, false] {
        let existing = &[("create", "existing".into()), ("atomic", atomic.into())];
        assert_eq!(write(&file, b"x", existing).unwrap_err().code, "file_not_found");
        let new = &[("create", "new".into()), ("atomic", atomic.into())];
        write(&file, b"x", new).unwrap();
        assert_eq!(write(&file, b"y", new).unwrap_err().code, "file_exists");
        write(&file, b"z", existing).unwrap();
        assert_eq!(fs::read(&file).unwrap(), b"z");
        fs::remove_file(&file).unwrap();
    }
    let deep = dir.path().join("x/y/z");
    assert_eq!(write(&deep, b"", &[]).unwrap_err().code, "file_not_found");
    write(&deep, b"", &[("parents", true.into())]).unwrap();
    assert!(deep.exists());
    assert_eq!(write(&deep.join("a"), b"", &[("parents", true.into())]).unwrap_err().code, "not_a_directory");
    assert_eq!(write(dir.path(), b"", &[]).unwrap_err().code, "is_a_directory");
    assert_eq!(write(Path::new("/"), b"", &[]).unwrap_err().code, "is_a_directory");
}

#[test]
fn write_goes_through_a_link_or_replaces_it() {
    let dir = dir();
    let (real, link, link2) = (dir.path().join("sub/real"), dir.path().join("link"), dir.path().join("link2"));
    fs::create_dir(dir.path().join("sub")).unwrap();
    symlink("sub/real", &link).unwrap();
    symlink("link", &link2).unwrap();
    write(&link2, b"through", &[]).unwrap();
    assert_eq!(fs::read(&real).unwrap(), b"through");
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    write(&link, b"instead", &[("follow", false.into())]).unwrap();
    assert!(fs::symlink_metadata(&link).unwrap().is_file());
    assert_eq!(fs::read(&real).unwrap(), b"through");
    symlink("round", dir.path().join("round")).unwrap();
    assert_eq!(write(&dir.path().join("round"), b"", &[]).unwrap_err().code, "too_many_links");
}

/// A mount of its own for the test, or `None` where the machine does not allow it.
struct Mount(PathBuf);

impl Mount {
    fn tmpfs(at: &Path, options: &str) -> Option<Self> {
        let status = std::process::Command::new("mount")
            .args(["-t", "tmpfs", "-o", options, "none"])
            .arg(at)
            .stderr(std::process::Stdio::null())
            .status();
        status.is_ok_and(|s| s.success()).then(|| Self(at.to_path_buf()))
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

#[test]
fn a_full_disk_is_a_typed_error_and_leaves_the_old_file_alone() {
    let dir = dir();
    let Some(_mount) = Mount::tmpfs(dir.path(), "size=256k") else { return };
    let file = dir.path().join("a");
    fs::write(&file, b"old").unwrap();
    assert_eq!(write(&file, &vec![1; 1 << 20], &[]).unwrap_err().code, "disk_full");
    assert_eq!(fs::read(&file).unwrap(), b"old");
    assert_eq!(names(dir.path()), ["a"]);
}

#[test]
fn list_is_sorted_and_never_follows_links() {
    let dir = dir();
    for name in ["b/2", "b/1", "a", ".hidden"] {
        write(&dir.path().join(name), b"", &[("parents", true.into())]).unwrap();
    }
    symlink(dir.path(), dir.path().join("b/loop")).unwrap();
    let list = |more: &[(&str, Value)]| {
        let mut io = Io::new();
        let mut pairs = vec![("path", path(dir.path()))];
        pairs.extend_from_slice(more);
        let result = run("list", &pairs, &mut io).unwrap();
        let prefix = format!("{}/", dir.path().display());
        let paths: Vec<String> =
            io.all("entries").iter().map(|e| text(e, "path").strip_prefix(&prefix).unwrap().to_owned()).collect();
        assert_eq!(number(&result, "count"), paths.len() as u64);
        (paths, flag(&result, "truncated"))
    };
    assert_eq!(list(&[]).0, [".hidden", "a", "b"]);
    assert_eq!(list(&[("recursive", true.into())]).0, [".hidden", "a", "b", "b/1", "b/2", "b/loop"]);
    assert_eq!(list(&[("recursive", true.into()), ("depth", 1.into())]).0.len(), 3);
    assert_eq!(list(&[("recursive", true.into()), ("files_only", true.into())]).0.len(), 5);
    assert_eq!(list(&[("limit", 2.into())]), (vec![".hidden".into(), "a".into()], true));
    assert!(!list(&[("limit", 3.into())]).1);
    filetime(&dir.path().join("a"), 1_000);
    assert_eq!(list(&[("since", 1001.0.into())]).0, [".hidden", "b"]);
    assert_eq!(list(&[("since", 1000.into())]).0.len(), 3);
    assert_eq!(code(call("list", &[("path", path(dir.path().join("a")))])), "not_a_directory");
    let link = dir.path().join("b/loop");
    assert_eq!(code(call("list", &[("path", path(&link))])), "not_a_directory");
    assert!(call("list", &[("path", path(&link)), ("follow", true.into())]).is_ok());
    assert_eq!(code(call("list", &[("path", path(dir.path().join("none")))])), "file_not_found");
}

fn filetime(path: &Path, seconds: u64) {
    let time = std::time::UNIX_EPOCH + std::time::Duration::from_secs(seconds);
    fs::File::options().write(true).open(path).unwrap().set_modified(time).unwrap();
}

#[test]
fn large_directories_come_in_batches() {
    let dir = dir();
    for n in 0..1000 {
        fs::write(dir.path().join(format!("{n:0200}")), b"").unwrap();
    }
    let mut io = Io::new();
    let result = run("list", &[("path", path(dir.path()))], &mut io).unwrap();
    assert_eq!(number(&result, "count"), 1000);
    assert!(io.events.len() > 3);
    let mut cancelled = Io::new();
    cancelled.cancel.store(true, std::sync::atomic::Ordering::SeqCst);
    assert_eq!(code(run("list", &[("path", path(dir.path()))], &mut cancelled)), "cancelled");
}

#[test]
fn stat_describes_the_link_itself() {
    let dir = dir();
    let link = dir.path().join("link");
    symlink("nowhere", &link).unwrap();
    let stat = field(&call("stat", &[("path", path(&link))]).unwrap(), "stat").unwrap();
    assert_eq!((text(&stat, "type").as_str(), text(&stat, "target").as_str()), ("symlink", "nowhere"));
    assert_eq!(text(&stat, "name"), "link");
    assert_eq!(code(call("stat", &[("path", path(&link)), ("follow", true.into())])), "file_not_found");
    let root = field(&call("stat", &[("path", "/".into())]).unwrap(), "stat").unwrap();
    assert_eq!((text(&root, "type").as_str(), text(&root, "name").as_str()), ("directory", "/"));
    let slashes = format!("{}//", dir.path().display());
    let stat = field(&call("stat", &[("path", slashes.into())]).unwrap(), "stat").unwrap();
    assert_eq!(text(&stat, "name"), dir.path().file_name().unwrap().to_str().unwrap());
}

#[test]
fn mkdir_follows_the_contract() {
    let dir = dir();
    let mkdir = |name: &str, more: &[(&str, Value)]| {
        let mut pairs = vec![("path", path(dir.path().join(name)))];
        pairs.extend_from_slice(more);
        call("mkdir", &pairs).map(|v| flag(&v, "created"))
    };
    let parents = [("parents", Value::from(true))];
    assert_eq!(mkdir("a", &[("mode", 0o2777.into())]), Ok(true));
    assert_eq!(mode_of(&dir.path().join("a")), 0o2777);
    assert_eq!(mkdir("a", &[]).unwrap_err().code, "file_exists");
    assert_eq!(mkdir("a", &parents), Ok(false));
    assert_eq!(mkdir("a", &[("exist_ok", true.into())]), Ok(false));
    assert_eq!(mkdir("x/y", &[]).unwrap_err().code, "file_not_found");
    assert_eq!(mkdir("x/y/z", &[parents[0].clone(), ("mode", 0o700.into())]), Ok(true));
    assert_eq!((mode_of(&dir.path().join("x/y")), mode_of(&dir.path().join("x/y/z"))), (0o755, 0o700));
    fs::write(dir.path().join("f"), b"").unwrap();
    assert_eq!(mkdir("f", &parents).unwrap_err().code, "file_exists");
    assert_eq!(mkdir("f/g", &parents).unwrap_err().code, "not_a_directory");
    assert_eq!(mkdir("f/g/h", &parents).unwrap_err().code, "not_a_directory");
    assert_eq!(mkdir("bad", &[("mode", 0o10000.into())]).unwrap_err().code, "invalid_argument");
}

#[test]
fn remove_never_follows_links() {
    let dir = dir();
    let (keep, tree) = (dir.path().join("keep"), dir.path().join("tree"));
    fs::create_dir_all(tree.join("a/b")).unwrap();
    fs::create_dir(&keep).unwrap();
    fs::write(keep.join("precious"), b"").unwrap();
    fs::write(tree.join("a/f"), b"").unwrap();
    symlink(&keep, tree.join("a/link")).unwrap();
    symlink(&keep, dir.path().join("link")).unwrap();
    let remove = |target: PathBuf, recursive: bool| {
        call("remove", &[("path", path(target)), ("recursive", recursive.into())]).map(|v| number(&v, "removed"))
    };
    assert_eq!(remove(tree.clone(), false).unwrap_err().code, "not_empty");
    assert_eq!(remove(tree.join("a/b"), false), Ok(1));
    assert_eq!(remove(dir.path().join("link/"), true), Ok(1));
    assert_eq!(remove(tree, true), Ok(4));
    assert_eq!(names(dir.path()), ["keep"]);
    assert!(keep.join("precious").exists());
    assert_eq!(remove(dir.path().join("none"), true).unwrap_err().code, "file_not_found");
    let missing = call("remove", &[("path", path(dir.path().join("none"))), ("missing_ok", true.into())]);
    assert_eq!(number(&missing.unwrap(), "removed"), 0);
    for root in ["/", "/tmp/..", "/tmp/."] {
        assert_eq!(code(call("remove", &[("path", root.into()), ("recursive", true.into())])), "invalid_argument");
    }
}

fn rename(src: &Path, dst: &Path, overwrite: bool) -> Result<Value, OpError> {
    call("move", &[("src", path(src)), ("dst", path(dst)), ("overwrite", overwrite.into())])
}

#[test]
fn move_renames_and_replaces_only_when_asked() {
    let dir = dir();
    let at = |name: &str| dir.path().join(name);
    fs::write(at("a"), b"a").unwrap();
    fs::write(at("b"), b"b").unwrap();
    fs::create_dir_all(at("d/sub")).unwrap();
    fs::create_dir(at("e")).unwrap();
    symlink("nowhere", at("dangling")).unwrap();
    assert_eq!(rename(&at("a"), &at("b"), false).unwrap_err().code, "file_exists");
    rename(&at("a"), &at("b"), true).unwrap();
    assert_eq!(fs::read(at("b")).unwrap(), b"a");
    assert_eq!(rename(&at("b"), &at("d"), false).unwrap_err().code, "file_exists");
    assert_eq!(rename(&at("b"), &at("d"), true).unwrap_err().code, "is_a_directory");
    assert_eq!(rename(&at("e"), &at("d"), true).unwrap_err().code, "not_empty");
    rename(&at("d"), &at("e"), true).unwrap();
    assert!(at("e/sub").is_dir());
    assert_eq!(rename(&at("e"), &at("e/sub/x"), false).unwrap_err().code, "invalid_argument");
    rename(&at("dangling"), &at("moved"), false).unwrap();
    assert_eq!(fs::read_link(at("moved")).unwrap(), Path::new("nowhere"));
    assert_eq!(rename(&at("none"), &at("x"), true).unwrap_err().code, "file_not_found");
    assert_eq!(rename(&at("b"), &at("none/x"), true).unwrap_err().code, "file_not_found");
    fs::hard_link(at("b"), at("b2")).unwrap();
    rename(&at("b"), &at("b2"), true).unwrap();
    assert!(!at("b").exists() && at("b2").exists());
    rename(&at("b2"), &at("b2"), true).unwrap();
    assert!(at("b2").exists());
}

#[test]
fn move_works_across_mounts_for_files_links_and_trees() {
    let dir = dir();
    let other = dir.path().join("mnt");
    fs::create_dir(&other).unwrap();
    let Some(_mount) = Mount::tmpfs(&other, "size=16m") else { return };
    let tree = dir.path().join("tree");
    fs::create_dir_all(tree.join("a/b")).unwrap();
    fs::write(tree.join("a/f"), b"data").unwrap();
    fs::set_permissions(tree.join("a/f"), fs::Permissions::from_mode(0o4711)).unwrap();
    fs::set_permissions(tree.join("a"), fs::Permissions::from_mode(0o500)).unwrap();
    filetime(&tree.join("a/f"), 1234);
    symlink("../x", tree.join("a/b/link")).unwrap();
    rename(&tree, &other.join("t"), false).unwrap();
    assert!(!tree.exists());
    let file = fs::metadata(other.join("t/a/f")).unwrap();
    assert_eq!((file.mtime(), mode_of(&other.join("t/a/f")), mode_of(&other.join("t/a"))), (1234, 0o4711, 0o500));
    assert_eq!(fs::read_link(other.join("t/a/b/link")).unwrap(), Path::new("../x"));
    fs::write(dir.path().join("f"), b"1").unwrap();
    fs::write(other.join("f"), b"2").unwrap();
    assert_eq!(rename(&dir.path().join("f"), &other.join("f"), false).unwrap_err().code, "file_exists");
    rename(&dir.path().join("f"), &other.join("f"), true).unwrap();
    assert_eq!(fs::read(other.join("f")).unwrap(), b"1");
    assert_eq!(names(&other), ["f", "t"]);
    assert_eq!(rename(dir.path(), &other.join("self"), false).unwrap_err().code, "invalid_argument");
    fs::write(dir.path().join("huge"), vec![1; 20 << 20]).unwrap();
    assert_eq!(rename(&dir.path().join("huge"), &other.join("huge"), false).unwrap_err().code, "disk_full");
    assert_eq!(names(&other), ["f", "t"]);
    assert!(dir.path().join("huge").exists());
}

#[test]
fn copy_takes_files_and_trees() {
    let dir = dir();
    let at = |name: &str| dir.path().join(name);
    fs::create_dir_all(at("t/a")).unwrap();
    fs::write(at("t/a/f"), b"data").unwrap();
    symlink("f", at("t/a/link")).unwrap();
    let copy = |src: &str, dst: &str, recursive: bool, overwrite: bool| {
        let flags = [("recursive", recursive.into()), ("overwrite", overwrite.into())];
        let paths = [("src", path(at(src))), ("dst", path(at(dst)))];
        call("copy", &[paths, flags].concat())
    };
    assert_eq!(code(copy("t", "u", false, false)), "is_a_directory");
    let copied = copy("t", "u", true, false).unwrap();
    assert_eq!((number(&copied, "bytes"), number(&copied, "files")), (4, 4));
    assert_eq!(fs::read(at("u/a/link")).unwrap(), b"data");
    assert!(fs::symlink_metadata(at("u/a/link")).unwrap().is_symlink());
    assert_eq!(code(copy("t", "u", true, false)), "file_exists");
    fs::write(at("u/a/f"), b"changed").unwrap();
    copy("t", "u", true, true).unwrap();
    assert_eq!(fs::read(at("u/a/f")).unwrap(), b"data");
    copy("t/a/link", "single", false, false).unwrap();
    assert!(fs::symlink_metadata(at("single")).unwrap().is_file());
    assert_eq!(code(copy("t", "t/a/inside", true, false)), "invalid_argument");
    fs::File::create(at("sparse")).unwrap().set_len(1 << 30).unwrap();
    copy("sparse", "sparse2", false, false).unwrap();
    let meta = fs::metadata(at("sparse2")).unwrap();
    assert!(meta.len() == 1 << 30 && meta.blocks() < 1000);
}

#[test]
fn chmod_stays_inside_its_tree() {
    let dir = dir();
    let (outside, tree) = (dir.path().join("outside"), dir.path().join("tree"));
    fs::write(&outside, b"").unwrap();
    fs::set_permissions(&outside, fs::Permissions::from_mode(0o600)).unwrap();
    fs::create_dir_all(tree.join("d")).unwrap();
    fs::write(tree.join("d/f"), b"").unwrap();
    symlink(&outside, tree.join("d/link")).unwrap();
    symlink(&tree, dir.path().join("link")).unwrap();
    symlink("nowhere", dir.path().join("dangling")).unwrap();
    let chmod = |target: &Path, more: &[(&str, Value)]| {
        let mut pairs = vec![("path", path(target))];
        pairs.extend_from_slice(more);
        call("chmod", &pairs).map(|v| number(&v, "updated"))
    };
    let through_link = chmod(&dir.path().join("link"), &[("mode", 0o777.into()), ("recursive", true.into())]);
    assert_eq!(through_link, Ok(3));
    assert_eq!((mode_of(&tree), mode_of(&tree.join("d/f")), mode_of(&outside)), (0o777, 0o777, 0o600));
    assert_eq!(chmod(&dir.path().join("dangling"), &[("mode", 0.into())]).unwrap_err().code, "file_not_found");
    assert_eq!(chmod(&tree, &[]).unwrap_err().code, "invalid_argument");
    if is_root() {
        assert_eq!(chmod(&tree.join("d/f"), &[("uid", 7.into()), ("mode", 0o4755.into())]), Ok(1));
        let meta = fs::metadata(tree.join("d/f")).unwrap();
        assert_eq!((meta.uid(), meta.gid(), mode_of(&tree.join("d/f"))), (7, 0, 0o4755));
        assert_eq!(chmod(&dir.path().join("link"), &[("gid", 9.into()), ("follow", false.into())]), Ok(1));
        assert_eq!(fs::symlink_metadata(dir.path().join("link")).unwrap().gid(), 9);
        assert_eq!(fs::metadata(&tree).unwrap().gid(), 0);
    }
    assert_eq!(chmod(&tree, &[("uid", u64::from(u32::MAX).into())]).unwrap_err().code, "invalid_argument");
}

#[test]
fn symlinks_are_made_and_du_counts_inodes_once() {
    let dir = dir();
    let link = dir.path().join("link");
    call("symlink", &[("target", "some/where".into()), ("path", path(&link))]).unwrap();
    assert_eq!(fs::read_link(&link).unwrap(), Path::new("some/where"));
    assert_eq!(code(call("symlink", &[("target", "x".into()), ("path", path(&link))])), "file_exists");
    fs::write(dir.path().join("a"), vec![1; 100_000]).unwrap();
    fs::hard_link(dir.path().join("a"), dir.path().join("b")).unwrap();
    let total = call("du", &[("path", path(dir.path()))]).unwrap();
    assert_eq!(number(&total, "inodes"), 3);
    assert!((100_000..200_000).contains(&number(&total, "bytes")));
}

#[test]
fn trees_deeper_than_any_path_are_no_problem() {
    on_small_stack(|| {
        let dir = fast_dir();
        let tree = dir.path().join("tree");
        fs::create_dir(&tree).unwrap();
        deep_tree(&tree, 10_000);
        let at = |key: &'static str, target: &Path| (key, path(target));
        let mut io = Io::new();
        let listed =
            run("list", &[at("path", &tree), ("recursive", true.into()), ("files_only", true.into())], &mut io);
        assert_eq!(number(&listed.unwrap(), "count"), 1);
        assert_eq!(number(&call("du", &[at("path", &tree)]).unwrap(), "inodes"), 10_002);
        let chmod = call("chmod", &[at("path", &tree), ("mode", 0o700.into()), ("recursive", true.into())]);
        assert_eq!(number(&chmod.unwrap(), "updated"), 10_002);
        let twin = dir.path().join("twin");
        call("copy", &[at("src", &tree), at("dst", &twin), ("recursive", true.into())]).unwrap();
        for target in [&tree, &twin] {
            let removed = call("remove", &[at("path", target), ("recursive", true.into())]).unwrap();
            assert_eq!(number(&removed, "removed"), 10_002);
        }
        assert!(names(dir.path()).is_empty());
    });
}
