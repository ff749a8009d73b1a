//! Watching directories. Every wait has an end far beyond what it should take.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod fs_support;

use fs_support::*;
use rmpv::Value;
use std::fs;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{channel, Receiver};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tempfile::TempDir;

const PATIENCE: Duration = Duration::from_secs(60);

struct Watch {
    events: Receiver<Value>,
    cancel: std::sync::Arc<std::sync::atomic::AtomicBool>,
    wake: UnixStream,
    thread: Option<JoinHandle<Result<Value, &'static str>>>,
    root: PathBuf,
    seen: Vec<(String, String)>,
}

impl Watch {
    fn start(root: &Path, recursive: bool) -> Self {
        let mut io = Io::new();
        let (sender, events) = channel();
        io.forward = Some(sender);
        let cancel = io.cancel.clone();
        let wake = UnixStream::from(io.wake.1.try_clone().unwrap());
        let pairs = [("path", path(root)), ("recursive", recursive.into())];
        let thread = std::thread::spawn(move || run("watch", &pairs, &mut io).map_err(|error| error.code));
        let ready = events.recv_timeout(PATIENCE).unwrap();
        assert!(flag(&ready, "ready"));
        Self { events, cancel, wake, thread: Some(thread), root: root.to_path_buf(), seen: Vec::new() }
    }

    /// Waits until a change of this path and kind was seen.
    fn expect(&mut self, path: &str, kind: &str) {
        let wanted = (path.to_owned(), kind.to_owned());
        let deadline = Instant::now() + PATIENCE;
        while !self.seen.contains(&wanted) {
            let left = deadline.saturating_duration_since(Instant::now());
            let event = self.events.recv_timeout(left).unwrap_or_else(|_| panic!("no {wanted:?} in {:?}", self.seen));
            self.note(&event);
        }
    }

    fn note(&mut self, event: &Value) {
        let relative = |full: String| {
            let root = self.root.to_str().unwrap();
            full.strip_prefix(root).unwrap().trim_start_matches('/').to_owned()
        };
        for change in field(event, "changes").map(|v| v.as_array().unwrap().clone()).unwrap_or_default() {
            let mut path = relative(text(&change, "path"));
            if field(&change, "to").is_some() {
                path = format!("{path} -> {}", relative(text(&change, "to")));
            }
            self.seen.push((path, text(&change, "kind")));
        }
        if field(event, "overflow").is_some() {
            self.seen.push((String::new(), "overflow".into()));
        }
    }

    fn stop(mut self) -> Vec<(String, String)> {
        self.cancel.store(true, Ordering::SeqCst);
        self.wake.write_all(b"x").unwrap();
        self.thread.take().unwrap().join().unwrap().unwrap();
        while let Ok(event) = self.events.try_recv() {
            self.note(&event);
        }
        std::mem::take(&mut self.seen)
    }
}

fn dir() -> TempDir {
    tempfile::tempdir().unwrap()
}

#[test]
fn changes_are_told_in_order() {
    let dir = dir();
    let mut watch = Watch::start(dir.path(), false);
    let at = |name: &str| dir.path().join(name);
    fs::write(at("f"), b"data").unwrap();
    fs::set_permissions(at("f"), std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    fs::rename(at("f"), at("g")).unwrap();
    fs::remove_file(at("g")).unwrap();
    fs::create_dir(at("d")).unwrap();
    watch.expect("d", "create");
    fs::write(at("d/unseen"), b"").unwrap();
    fs::write(at("last"), b"").unwrap();
    watch.expect("last", "create");
    let seen = watch.stop();
    let expected =
        [("f", "create"), ("f", "write"), ("f", "chmod"), ("f -> g", "rename"), ("g", "remove"), ("d", "create")];
    let told: Vec<(&str, &str)> = seen.iter().map(|(p, k)| (p.as_str(), k.as_str())).take(6).collect();
    assert_eq!(told, expected);
    assert!(!seen.iter().any(|(path, _)| path == "d/unseen"));
}

#[test]
fn new_directories_are_watched_too() {
    let dir = dir();
    let at = |name: &str| dir.path().join(name);
    fs::create_dir_all(at("old/deep")).unwrap();
    let mut watch = Watch::start(dir.path(), true);
    fs::write(at("old/deep/f"), b"").unwrap();
    watch.expect("old/deep/f", "create");
    fs::create_dir_all(at("new/a/b")).unwrap();
    fs::write(at("new/a/b/at once"), b"").unwrap();
    watch.expect("new/a/b/at once", "create");
    fs::write(at("new/a/later"), b"").unwrap();
    watch.expect("new/a/later", "create");
    fs::rename(at("new"), at("moved")).unwrap();
    watch.expect("new -> moved", "rename");
    fs::write(at("moved/a/after"), b"").unwrap();
    watch.expect("moved/a/after", "create");
    let elsewhere = tempfile::tempdir_in(dir.path().parent().unwrap()).unwrap();
    fs::rename(at("moved"), elsewhere.path().join("x")).unwrap();
    watch.expect("moved", "rename");
    fs::write(elsewhere.path().join("x/a/gone"), b"").unwrap();
    fs::rename(elsewhere.path().join("x"), at("back")).unwrap();
    watch.expect("back/a/b", "create");
    fs::write(at("back/a/b/again"), b"").unwrap();
    watch.expect("back/a/b/again", "create");
    let seen = watch.stop();
    assert_eq!(seen.iter().filter(|(path, kind)| path == "new/a/b/at once" && kind == "create").count(), 1);
    assert!(!seen.iter().any(|(path, _)| path.contains("moved/a/gone")));
}

#[test]
fn an_atomic_write_is_a_create_and_a_write() {
    let dir = dir();
    let mut watch = Watch::start(dir.path(), false);
    run("write", &[("path", path(dir.path().join("f")))], &mut Io::with_input(b"x")).unwrap();
    watch.expect("f", "write");
    let seen = watch.stop();
    let told: Vec<(&str, &str)> = seen.iter().map(|(p, k)| (p.as_str(), k.as_str())).collect();
    assert_eq!(told, [("f", "create"), ("f", "write")]);
}

#[test]
fn an_upload_in_place_is_create_chmod_write() {
    let dir = dir();
    let mut watch = Watch::start(dir.path(), false);
    let owner = rustix::process::geteuid().as_raw();
    let pairs = [("path", path(dir.path().join("f"))), ("atomic", false.into()), ("uid", owner.into())];
    run("write", &pairs, &mut Io::with_input(b"x")).unwrap();
    watch.expect("f", "write");
    let seen = watch.stop();
    let told: Vec<&str> = seen.iter().map(|(_, kind)| kind.as_str()).collect();
    assert_eq!(told, ["create", "chmod", "write"]);
}

#[test]
fn a_watch_ends_with_what_it_watches() {
    let dir = dir();
    let root = dir.path().join("root");
    fs::create_dir(&root).unwrap();
    let mut watch = Watch::start(&root, true);
    fs::remove_dir(&root).unwrap();
    watch.expect("", "remove");
    watch.thread.take().unwrap().join().unwrap().unwrap();
    assert_eq!(code(call("watch", &[("path", path(&root))])), "file_not_found");
    fs::write(&root, b"").unwrap();
    assert_eq!(code(call("watch", &[("path", path(&root))])), "not_a_directory");
}
