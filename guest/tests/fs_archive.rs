//! Archives in and out, honest and hostile.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod fs_support;

use atoll_guest::fs::tar_format::{build, kind, pad, Header};
use atoll_guest::op::OpError;
use flate2::write::GzEncoder;
use fs_support::*;
use proptest::prelude::*;
use rmpv::Value;
use std::fs;
use std::io::Write;
use std::os::unix::fs::{symlink, MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::Command;
use tempfile::TempDir;

#[derive(Default)]
struct Archive(Vec<u8>);

impl Archive {
    fn add(mut self, kind: u8, name: &str, link: &str, data: &[u8]) -> Self {
        let header = Header {
            kind,
            name: name.into(),
            link: link.into(),
            mode: 0o6755,
            size: data.len() as u64,
            mtime: 1_000_000,
            uid: 77,
            gid: 88,
            ..Header::default()
        };
        build(&mut self.0, &header);
        self.0.extend_from_slice(data);
        pad(&mut self.0, data.len() as u64);
        self
    }

    fn file(self, name: &str, data: &[u8]) -> Self {
        self.add(kind::FILE, name, "", data)
    }

    fn symlink(self, name: &str, target: &str) -> Self {
        self.add(kind::SYMLINK, name, target, b"")
    }

    fn end(mut self) -> Vec<u8> {
        self.0.resize(self.0.len() + 1024, 0);
        self.0
    }
}

/// A directory to unpack into, and one beside it that must not change.
struct Target {
    dir: TempDir,
}

impl Target {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("root")).unwrap();
        fs::create_dir(dir.path().join("outside")).unwrap();
        fs::write(dir.path().join("outside/canary"), b"alive").unwrap();
        Self { dir }
    }

    fn root(&self) -> std::path::PathBuf {
        self.dir.path().join("root")
    }

    fn outside(&self) -> String {
        self.dir.path().join("outside").to_str().unwrap().to_owned()
    }

    fn unpack(&self, data: &[u8], more: &[(&str, Value)]) -> Result<Value, OpError> {
        let mut pairs = vec![("path", path(self.root()))];
        pairs.extend_from_slice(more);
        let result = run("tar_in", &pairs, &mut Io::with_input(data));
        self.check_outside();
        result
    }

    fn refused(&self, data: &[u8]) -> &'static str {
        code(self.unpack(data, &[]))
    }

    fn check_outside(&self) {
        assert_eq!(names(self.dir.path()), ["outside", "root"]);
        assert_eq!(names(&self.dir.path().join("outside")), ["canary"]);
        let canary = self.dir.path().join("outside/canary");
        assert_eq!(fs::read(&canary).unwrap(), b"alive");
        let meta = fs::metadata(&canary).unwrap();
        assert_eq!((meta.nlink(), meta.mode() & 0o7777), (1, 0o644));
    }
}

fn gzip(data: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(data).unwrap();
    encoder.finish().unwrap()
}

#[test]
fn an_honest_archive_is_unpacked_with_modes_and_times() {
    for compressed in [false, true] {
        let target = Target::new();
        let archive = Archive::default()
            .add(kind::DIRECTORY, "d/", "", b"")
            .file("./d/f", b"data")
            .symlink("d/link", "../../outside/canary")
            .add(kind::HARD_LINK, "d/hard", "d/f", b"")
            .file(&format!("{}/f", "long".repeat(40)), b"x")
            .file("empty", b"")
            .end();
        let data = if compressed { gzip(&archive) } else { archive };
        let result = target.unpack(&data, &[]).unwrap();
        assert_eq!((number(&result, "files"), number(&result, "bytes")), (6, 5));
        let meta = fs::metadata(target.root().join("d/f")).unwrap();
        assert_eq!((meta.mode() & 0o7777, meta.mtime(), meta.nlink()), (0o755, 1_000_000, 2));
        let meta = fs::metadata(target.root().join("d")).unwrap();
        assert_eq!((meta.mode() & 0o7777, meta.mtime()), (0o755, 1_000_000));
        assert_eq!(names(&target.root().join("d")), ["f", "hard", "link"]);
        assert_eq!(fs::read(target.root().join("long".repeat(40)).join("f")).unwrap(), b"x");
    }
}

#[test]
fn options_strip_keep_setid_and_owner() {
    let target = Target::new();
    let archive =
        Archive::default().file("top", b"").file("a/b/f", b"1").add(kind::HARD_LINK, "a/b/g", "a/b/f", b"").end();
    let result = target.unpack(&archive, &[("strip", 1.into()), ("keep_setid", true.into())]).unwrap();
    assert_eq!(number(&result, "files"), 2);
    assert_eq!(names(&target.root()), ["b"]);
    assert_eq!(fs::metadata(target.root().join("b/f")).unwrap().mode() & 0o7777, 0o6755);
    if rustix::process::geteuid().is_root() {
        target.unpack(&archive, &[("same_owner", true.into())]).unwrap();
        let meta = fs::metadata(target.root().join("a/b/f")).unwrap();
        assert_eq!((meta.uid(), meta.gid()), (77, 88));
    }
}

#[test]
fn what_leads_out_is_refused() {
    let target = Target::new();
    let out = target.outside();
    let canary = format!("{out}/canary");
    for (what, archive) in [
        ("dots", Archive::default().file("../outside/canary", b"dead")),
        ("inner dots", Archive::default().file("a/../../outside/canary", b"dead")),
        ("absolute", Archive::default().file(&canary, b"dead")),
        ("dots as directory", Archive::default().add(kind::DIRECTORY, "..", "", b"")),
        ("link then through it", Archive::default().symlink("l", &out).file("l/canary", b"dead")),
        ("relative link then through it", Archive::default().symlink("l", "../outside").file("l/canary", b"dead")),
        ("two links", Archive::default().symlink("a", ".").symlink("a2", "..").file("a2/outside/canary", b"dead")),
        ("hard link out", Archive::default().add(kind::HARD_LINK, "h", "../outside/canary", b"")),
        ("absolute hard link", Archive::default().add(kind::HARD_LINK, "h", &canary, b"")),
        (
            "hard link through a link",
            Archive::default().symlink("hl", &out).add(kind::HARD_LINK, "h", "hl/canary", b""),
        ),
        ("hard link to a link", Archive::default().symlink("s", &canary).add(kind::HARD_LINK, "h", "s", b"")),
        (
            "hard link to a directory",
            Archive::default().add(kind::DIRECTORY, "d", "", b"").add(kind::HARD_LINK, "h", "d", b""),
        ),
        ("device", Archive::default().add(b'3', "dev", "", b"")),
        ("block device", Archive::default().add(b'4', "dev", "", b"")),
        ("fifo", Archive::default().add(b'6', "fifo", "", b"")),
        ("deep", Archive::default().file(&"d/".repeat(1100), b"")),
        ("long name", Archive::default().file(&"n".repeat(256), b"")),
        ("no link target", Archive::default().symlink("l3", "")),
    ] {
        let code = target.refused(&archive.end());
        assert!(matches!(code, "invalid_argument" | "not_a_directory" | "name_too_long"), "{what}: {code}");
    }
    for kind in [b'S', b'M', b'D', b'?'] {
        assert_eq!(target.refused(&Archive::default().add(kind, "x", "", b"").end()), "unsupported");
    }
}

#[test]
fn links_in_the_way_are_replaced_and_never_written_through() {
    let target = Target::new();
    let canary = format!("{}/canary", target.outside());
    symlink(&canary, target.root().join("planted")).unwrap();
    fs::write(target.root().join("old"), b"old").unwrap();
    fs::create_dir(target.root().join("dir")).unwrap();
    let archive = Archive::default()
        .file("planted", b"new")
        .symlink("x", &target.outside())
        .add(kind::DIRECTORY, "x", "", b"")
        .file("x/f", b"inside")
        .symlink("y", &canary)
        .file("y", b"a file now")
        .file("old", b"replaced")
        .file("twice", b"1")
        .file("twice", b"2")
        .file("a", b"a")
        .add(kind::HARD_LINK, "b", "a", b"")
        .file("b", b"b")
        .add(kind::HARD_LINK, "a", "a", b"")
        .add(kind::DIRECTORY, "dir", "", b"")
        .end();
    target.unpack(&archive, &[]).unwrap();
    let read = |name: &str| fs::read_to_string(target.root().join(name)).unwrap();
    let found = ["planted", "x/f", "y", "old", "twice", "a", "b"].map(read);
    assert_eq!(found, ["new", "inside", "a file now", "replaced", "2", "a", "b"]);
    assert!(!fs::symlink_metadata(target.root().join("x")).unwrap().is_symlink());
    assert_eq!(target.refused(&Archive::default().file("dir", b"").end()), "is_a_directory");
    assert_eq!(target.refused(&Archive::default().symlink("dir", "x").end()), "is_a_directory");
}

#[test]
fn too_much_of_anything_is_an_error() {
    let target = Target::new();
    let archive = Archive::default().file("a", &[1; 1000]).file("b", &[1; 1000]).end();
    assert_eq!(code(target.unpack(&archive, &[("max_bytes", 1999.into())])), "exhausted");
    assert_eq!(code(target.unpack(&archive, &[("max_entries", 1.into())])), "exhausted");
    assert!(target.unpack(&archive, &[("max_bytes", 2000.into()), ("max_entries", 2.into())]).is_ok());
    // A size that lies is cut off by the limit or by the end of the stream.
    let mut lying = Vec::new();
    build(&mut lying, &Header { kind: kind::FILE, name: b"big".to_vec(), size: 1 << 50, ..Header::default() });
    assert_eq!(target.refused(&lying), "exhausted");
    assert!(!target.root().join("big").exists());
    let mut pax = Vec::new();
    build(&mut pax, &Header { kind: kind::PAX, name: b"x".to_vec(), size: 1 << 30, ..Header::default() });
    assert_eq!(target.refused(&pax), "invalid_argument");
}

#[test]
fn a_gzip_bomb_is_stopped() {
    let target = Target::new();
    let mut bomb = Vec::new();
    build(&mut bomb, &Header { kind: kind::FILE, name: b"zeros".to_vec(), size: 80 << 20, ..Header::default() });
    bomb.resize(bomb.len() + (80 << 20), 0);
    let compressed = gzip(&bomb);
    assert_eq!(target.refused(&compressed), "exhausted");
    assert_eq!(code(target.unpack(&compressed, &[("max_bytes", (1u64 << 20).into())])), "exhausted");
    assert!(names(&target.root()).is_empty());
}

#[test]
fn broken_archives_are_typed_errors() {
    let target = Target::new();
    let whole = Archive::default().file("f", &[7; 3000]).end();
    for cut in [1, 100, 511, 513, 2000, 3500] {
        assert_eq!(target.refused(&whole[..cut]), "invalid_argument", "{cut}");
        assert!(!target.root().join("f").exists());
    }
    assert_eq!(target.refused(b""), "invalid_argument");
    assert_eq!(target.refused(&[b'x'; 4096]), "invalid_argument");
    assert_eq!(target.refused(&gzip(&whole)[..60]), "invalid_argument");
    assert_eq!(target.refused(b"\x1f\x8bnot gzip at all"), "invalid_argument");
    let mut io = Io::with_input(&whole[..1024]);
    io.input.push_back(Err(OpError::cancelled()));
    assert_eq!(code(run("tar_in", &[("path", path(target.root()))], &mut io)), "cancelled");
    assert!(names(&target.root()).is_empty());
    // An archive that stops at a block after its last member has ended all the same.
    assert!(target.unpack(&whole[..whole.len() - 1024], &[]).is_ok());
}

fn pack(root: &Path, more: &[(&str, Value)]) -> (Vec<u8>, Value) {
    let mut pairs = vec![("path", path(root))];
    pairs.extend_from_slice(more);
    let mut io = Io::new();
    let result = run("tar_out", &pairs, &mut io).unwrap();
    assert_eq!(number(&result, "bytes"), io.sent.len() as u64);
    (io.sent, result)
}

fn sample() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir_all(dir.path().join("a/b")).unwrap();
    fs::write(dir.path().join("a/f"), vec![9; 700_000]).unwrap();
    fs::set_permissions(dir.path().join("a/f"), fs::Permissions::from_mode(0o640)).unwrap();
    fs::hard_link(dir.path().join("a/f"), dir.path().join("a/g")).unwrap();
    symlink("nowhere", dir.path().join("a/b/link")).unwrap();
    let long = dir.path().join("d".repeat(120));
    fs::create_dir(&long).unwrap();
    fs::write(long.join("é".repeat(60)), b"long").unwrap();
    let fifo = dir.path().join("fifo");
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, 0o644.into(), 0).unwrap();
    dir
}

#[test]
fn what_goes_out_comes_in_again() {
    let dir = sample();
    for gzip in [false, true] {
        let (data, result) = pack(dir.path(), &[("gzip", gzip.into())]);
        assert_eq!(field(&result, "skipped"), Some(texts(&["fifo"])));
        assert_eq!(number(&result, "files"), 7);
        let target = Target::new();
        target.unpack(&data, &[]).unwrap();
        let meta = fs::metadata(target.root().join("a/f")).unwrap();
        assert_eq!((meta.len(), meta.nlink(), meta.mode() & 0o7777), (700_000, 2, 0o640));
        assert_eq!(meta.mtime(), fs::metadata(dir.path().join("a/f")).unwrap().mtime());
        assert_eq!(fs::read_link(target.root().join("a/b/link")).unwrap(), Path::new("nowhere"));
        assert_eq!(fs::read(target.root().join("d".repeat(120)).join("é".repeat(60))).unwrap(), b"long");
    }
}

#[test]
fn parts_of_a_tree_and_single_files_go_out() {
    let dir = sample();
    let listing = |data: &[u8]| {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), data).unwrap();
        let out = Command::new("tar").arg("-tf").arg(file.path()).output().unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        String::from_utf8(out.stdout).unwrap().lines().map(str::to_owned).collect::<Vec<_>>()
    };
    let (data, _) = pack(dir.path(), &[("paths", texts(&["a/b", "a/f"]))]);
    assert_eq!(listing(&data), ["a/b/", "a/b/link", "a/f"]);
    let (data, _) = pack(&dir.path().join("a/f"), &[]);
    assert_eq!(listing(&data), ["f"]);
    let (data, _) = pack(dir.path(), &[("exclude", texts(&["b/", "d*"]))]);
    assert_eq!(listing(&data), ["a/", "a/f", "a/g"]);
    for bad in ["../x", "/etc", "a/../.."] {
        let result = call("tar_out", &[("path", path(dir.path())), ("paths", texts(&[bad]))]);
        assert_eq!(code(result), "invalid_argument");
    }
    let missing = call("tar_out", &[("path", path(dir.path())), ("paths", texts(&["none"]))]);
    assert_eq!(code(missing), "file_not_found");
    symlink("/etc", dir.path().join("etc")).unwrap();
    let through = call("tar_out", &[("path", path(dir.path())), ("paths", texts(&["etc/passwd"]))]);
    assert_eq!(code(through), "not_a_directory");
}

#[test]
fn archives_of_the_system_tar_come_in() {
    let dir = sample();
    for format in ["gnu", "pax", "ustar", "v7"] {
        let mut tar = Command::new("tar");
        tar.arg("-C").arg(dir.path()).arg(format!("--format={format}")).arg("-cf").arg("-");
        if matches!(format, "gnu" | "pax") {
            tar.args(["--exclude=fifo", "."]);
        } else {
            tar.arg("a");
        }
        let out = tar.output().unwrap();
        assert!(out.status.success());
        let target = Target::new();
        target.unpack(&out.stdout, &[]).unwrap();
        assert_eq!(fs::metadata(target.root().join("a/g")).unwrap().nlink(), 2);
        if format == "gnu" || format == "pax" {
            assert!(target.root().join("d".repeat(120)).join("é".repeat(60)).exists());
        }
    }
    let sparse = dir.path().join("sparse");
    fs::File::create(&sparse).unwrap().set_len(10 << 20).unwrap();
    for format in ["gnu", "pax"] {
        let mut tar = Command::new("tar");
        tar.arg("-C").arg(dir.path()).args(["-S", &format!("--format={format}"), "-cf", "-", "sparse"]);
        let target = Target::new();
        assert_eq!(target.refused(&tar.output().unwrap().stdout), "unsupported");
    }
}

fn encoded_elsewhere(data: Vec<u8>) -> Vec<u8> {
    std::thread::spawn(move || gzip(&data)).join().unwrap()
}

#[test]
fn a_deep_tree_goes_out_on_a_small_stack() {
    on_small_stack(|| {
        let dir = fast_dir();
        deep_tree(dir.path(), 3_000);
        let (_, result) = pack(dir.path(), &[("gzip", true.into())]);
        assert_eq!(number(&result, "files"), 3_001);
        let small = Archive::default().file("a/b", b"x").end();
        Target::new().unpack(&encoded_elsewhere(small), &[]).unwrap();
        call("remove", &[("path", path(dir.path().join("d"))), ("recursive", true.into())]).unwrap();
    });
}

fn member() -> impl Strategy<Value = (u8, String, String, Vec<u8>)> {
    let part =
        prop_oneof![Just("a"), Just("b"), Just(".."), Just("."), Just("l"), Just(""), Just("outside"), Just("canary")];
    let name = || proptest::collection::vec(part.clone(), 1..5).prop_map(|parts| parts.join("/"));
    let kind = prop_oneof![
        4 => Just(kind::FILE), 3 => Just(kind::SYMLINK), 3 => Just(kind::DIRECTORY), 2 => Just(kind::HARD_LINK),
        1 => Just(kind::GNU_LONG_NAME), 1 => Just(kind::GNU_LONG_LINK), 1 => Just(0u8), 1 => any::<u8>()
    ];
    (kind, name(), name(), name().prop_map(String::into_bytes))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    /// Whatever members an archive has, nothing beside the root is made or changed.
    #[test]
    fn nothing_outside_ever_exists(members in proptest::collection::vec(member(), 1..12), with_absolute in any::<bool>()) {
        let target = Target::new();
        let mut good = Archive::default();
        for (kind, name, link, data) in &members {
            let link = if with_absolute && kind == &kind::SYMLINK { target.outside() } else { link.clone() };
            let single = Archive::default().add(*kind, name, &link, data).end();
            // Each member alone, so that refusals do not hide what comes later, and then all together.
            let _ = target.unpack(&single, &[]);
            good = good.add(*kind, name, &link, data);
        }
        let _ = target.unpack(&good.end(), &[]);
    }

    /// Bytes that are no archive, or a damaged one, never panic and never get out.
    #[test]
    fn damaged_archives_never_panic(damage in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..8), noise in proptest::collection::vec(any::<u8>(), 0..600), compressed in any::<bool>()) {
        let target = Target::new();
        let mut data = Archive::default().file("a/f", b"data").symlink("l", "../outside").file(&"n/".repeat(80), b"x").end();
        if compressed {
            data = gzip(&data);
        }
        for (at, byte) in damage {
            let at = at.index(data.len());
            data[at] = byte;
        }
        let _ = target.unpack(&data, &[("max_bytes", 100_000.into())]);
        let _ = target.unpack(&noise, &[]);
    }
}
