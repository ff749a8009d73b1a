//! grep and sed, with the vectors of their contract.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod fs_support;

use fs_support::*;
use proptest::prelude::*;
use rmpv::Value;
use std::fs;
use std::os::unix::fs::{symlink, MetadataExt, PermissionsExt};
use std::path::Path;
use tempfile::TempDir;

fn tree(files: &[(&str, &[u8])]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (name, content) in files {
        let target = dir.path().join(name);
        fs::create_dir_all(target.parent().unwrap()).unwrap();
        fs::write(target, content).unwrap();
    }
    dir
}

struct Found {
    /// `path:line:content`, the path relative to the tree.
    lines: Vec<String>,
    offsets: Vec<u64>,
    truncated: bool,
    files: u64,
}

fn grep(root: &Path, pattern: &str, more: &[(&str, Value)]) -> Result<Found, &'static str> {
    let mut pairs = vec![("path", path(root)), ("pattern", pattern.into())];
    pairs.extend_from_slice(more);
    let mut io = Io::new();
    let result = run("grep", &pairs, &mut io).map_err(|error| error.code)?;
    let prefix = format!("{}/", root.display());
    let line = |found: &Value| {
        let path = text(found, "path");
        let path = path.strip_prefix(&prefix).unwrap_or("").to_owned();
        format!("{path}:{}:{}", number(found, "line"), text(found, "content"))
    };
    let matches = io.all("matches");
    assert_eq!(number(&result, "count"), matches.len() as u64);
    Ok(Found {
        lines: matches.iter().map(line).collect(),
        offsets: matches.iter().map(|found| number(found, "offset")).collect(),
        truncated: flag(&result, "truncated"),
        files: number(&result, "files"),
    })
}

fn lines(root: &Path, pattern: &str) -> Vec<String> {
    grep(root, pattern, &[]).unwrap().lines
}

#[test]
fn grep_ends_lines_at_lf_and_drops_the_cr_before_it() {
    let dir = tree(&[("f", b"alpha\nbeta\r\ngamma")]);
    let found = grep(dir.path(), "a$", &[]).unwrap();
    assert_eq!(found.lines, ["f:1:alpha", "f:2:beta", "f:3:gamma"]);
    assert_eq!(found.offsets, [0, 6, 12]);
    assert_eq!(lines(&dir.path().join("f"), "^b"), [":2:beta"]);
    let dir = tree(&[("f", b"a\rb\nc\r")]);
    assert_eq!(lines(dir.path(), "a$"), Vec::<String>::new());
    assert_eq!(lines(dir.path(), "a.b"), ["f:1:a\rb"]);
    assert_eq!(lines(dir.path(), r"c\r$"), ["f:2:c\r"]);
}

#[test]
fn grep_refuses_patterns_that_are_none() {
    let dir = tree(&[("f", b"x")]);
    for pattern in ["(?=x)", r"(a)\1", "[", "(?<!x)", "a{1000}{1000}{1000}"] {
        assert_eq!(grep(dir.path(), pattern, &[]).err(), Some("bad_pattern"), "{pattern}");
    }
    let nested = "(".repeat(5000) + &")".repeat(5000);
    assert_eq!(grep(dir.path(), &nested, &[]).err(), Some("bad_pattern"));
}

#[test]
fn patterns_nested_as_deep_as_allowed_fit_on_a_small_stack() {
    on_small_stack(|| {
        let dir = tree(&[("f", b"aaaa\n")]);
        for depth in (1..10).chain([30, 42, 43, 63, 64, 127, 128]) {
            for (open, close) in [("(a|", ")"), ("(?:a", ")*"), ("((?:a{2}|", "b))+"), ("(?i:[^é]|", ")?")] {
                let _ = grep(dir.path(), &(open.repeat(depth) + "a" + &close.repeat(depth)), &[]);
            }
        }
    });
}

#[test]
fn grep_takes_linear_time() {
    let dir = tree(&[("f", &[vec![b'a'; 5000], b"b\n".to_vec()].concat())]);
    assert!(lines(dir.path(), "(a+)+$").is_empty());
    // Every line could start a match that runs to the end of the file.
    let many = b"x\n".repeat(200_000);
    let dir = tree(&[("f", &[many, b"q\n".to_vec()].concat())]);
    assert!(lines(dir.path(), "x[^b]*q").is_empty());
}

#[test]
fn grep_cuts_lines_between_characters() {
    let dir = tree(&[("f", "héllo!\n".as_bytes())]);
    for (limit, expected) in [(5, "héll…"), (2, "h…"), (7, "héllo!"), (0, "héllo!"), (1, "h…")] {
        let found = grep(dir.path(), "l", &[("max_line_bytes", limit.into())]).unwrap();
        assert_eq!(found.lines, [format!("f:1:{expected}")]);
    }
}

#[test]
fn grep_tells_whether_there_was_more() {
    let dir = tree(&[("f", b"a\nb\na\n")]);
    for (limit, count, truncated) in [(2, 2, false), (1, 1, true), (0, 2, false), (3, 2, false)] {
        let found = grep(dir.path(), "a", &[("max_matches", limit.into())]).unwrap();
        assert_eq!((found.lines.len(), found.truncated), (count, truncated));
    }
}

#[test]
fn grep_skips_binary_files_and_lines_that_are_no_text() {
    let with_nul = |at: usize| [vec![b'a'; at], vec![0], b"\nneedle\n".to_vec()].concat();
    let dir = tree(&[("early", &with_nul(100)), ("late", &with_nul(9000)), ("latin", b"needle \xff\nneedle 2\n")]);
    let found = grep(dir.path(), "needle", &[]).unwrap();
    assert_eq!(found.lines, ["late:2:needle", "latin:2:needle 2"]);
    assert_eq!(found.files, 2);
}

#[test]
fn grep_gives_one_result_per_line_in_order() {
    let dir = tree(&[("b", b"x x x\n"), ("a/z", b"1\nx\n\nx"), ("a/b", b"x"), (".h", b"x")]);
    assert_eq!(lines(dir.path(), "x"), [".h:1:x", "a/b:1:x", "a/z:2:x", "a/z:4:x", "b:1:x x x"]);
    assert_eq!(lines(dir.path(), "^$"), ["a/z:3:"]);
    assert_eq!(lines(dir.path(), r"\Ax\z"), [".h:1:x", "a/b:1:x", "a/z:2:x", "a/z:4:x"]);
    assert_eq!(lines(dir.path(), r"1\sx"), Vec::<String>::new());
    assert_eq!(lines(dir.path(), r"\s").len(), 1);
    assert_eq!(lines(dir.path(), "").len(), 7);
    let found = grep(dir.path(), "X", &[("ignore_case", true.into()), ("include", texts(&["z", "b"]))]).unwrap();
    assert_eq!(found.lines, ["a/b:1:x", "a/z:2:x", "a/z:4:x", "b:1:x x x"]);
    let found = grep(dir.path(), "x", &[("exclude", texts(&["a/"]))]).unwrap();
    assert_eq!(found.lines, [".h:1:x", "b:1:x x x"]);
    assert_eq!(grep(dir.path(), "x", &[("recursive", false.into())]).err(), Some("is_a_directory"));
    assert_eq!(grep(dir.path(), "x", &[("include", texts(&["!a"]))]).err(), Some("invalid_argument"));
    assert_eq!(grep(&dir.path().join("none"), "x", &[]).err(), Some("file_not_found"));
    let file = dir.path().join("b");
    assert_eq!(grep(&file, "x", &[("recursive", false.into())]).unwrap().lines.len(), 1);
}

#[test]
fn grep_passes_links_fifos_and_loops() {
    let dir = tree(&[("t/f", b"x"), ("outside", b"x")]);
    let root = dir.path().join("t");
    symlink(dir.path(), root.join("loop")).unwrap();
    symlink(dir.path().join("outside"), root.join("link")).unwrap();
    let fifo = root.join("fifo");
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, 0o644.into(), 0).unwrap();
    assert_eq!(lines(&root, "x"), ["f:1:x"]);
    symlink(&root, dir.path().join("to_t")).unwrap();
    assert_eq!(lines(&dir.path().join("to_t"), "x"), ["f:1:x"]);
    assert_eq!(grep(&fifo, "x", &[]).err(), Some("not_a_regular_file"));
}

#[test]
fn grep_finds_matches_wherever_blocks_end() {
    let mut content = Vec::new();
    let mut expected = Vec::new();
    for line in 1..=40_000u32 {
        if line % 997 == 0 {
            content.extend_from_slice(b"a needle here\n");
            expected.push(format!("f:{line}:a needle here"));
        } else {
            content.extend_from_slice(&b"some other text\n"[..(line as usize % 16)]);
            content.push(b'\n');
        }
    }
    let dir = tree(&[("f", &content)]);
    assert_eq!(lines(dir.path(), "needle"), expected);
    let long = [vec![b'a'; 17 << 20], b"needle\nneedle 2\n".to_vec()].concat();
    let dir = tree(&[("f", &long)]);
    assert_eq!(lines(dir.path(), "needle"), ["f:2:needle 2"]);
    let found = grep(dir.path(), "^a", &[("max_line_bytes", 0.into())]).unwrap();
    assert_eq!(found.lines.len(), 1);
}

#[test]
fn grep_reaches_the_bottom_of_any_tree() {
    on_small_stack(|| {
        let dir = fast_dir();
        deep_tree(dir.path(), 10_000);
        assert_eq!(lines(dir.path(), "needle").len(), 1);
        let edit = [("path", path(dir.path())), ("pattern", "needle".into()), ("replacement", "pin".into())];
        assert_eq!(number(&call("sed", &edit).unwrap(), "total"), 1);
        assert_eq!(lines(dir.path(), "pin").len(), 1);
        call("remove", &[("path", path(dir.path().join("d"))), ("recursive", true.into())]).unwrap();
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    /// A block searched at once gives what searching line by line gives.
    #[test]
    fn grep_agrees_with_line_by_line(text in "[ab \r\n\té]{0,60}", pattern in r"(\^|\\b|)(a|b|\[\^a\]|\\s|\.|é|\\W|a\*|)(b|\\s\*|\.\*|\\n|\r|)(\$|\\b|)") {
        let dir = tree(&[("f", text.as_bytes())]);
        let regex = regex::Regex::new(&pattern).unwrap();
        let body = text.strip_suffix('\n').unwrap_or(&text);
        let mut expected = Vec::new();
        if !text.is_empty() {
            let count = body.split('\n').count();
            for (number, line) in body.split('\n').enumerate() {
                let ended = number + 1 < count || text.ends_with('\n');
                let line = if ended { line.strip_suffix('\r').unwrap_or(line) } else { line };
                if regex.is_match(line) {
                    expected.push(format!("f:{}:{line}", number + 1));
                }
            }
        }
        prop_assert_eq!(lines(dir.path(), &pattern), expected);
    }

    #[test]
    fn globs_never_panic_and_match_their_own_literals(pattern in proptest::collection::vec(any::<u8>(), 0..20), path in "[a-c/.*]{1,20}") {
        if let Ok(glob) = atoll_guest::fs::glob::Glob::new(&pattern) {
            let _ = glob.matches(path.as_bytes(), false);
            let _ = glob.matches(&pattern, true);
        }
        let clean = path.trim_matches('/').split('/').filter(|part| !part.is_empty()).collect::<Vec<_>>().join("/");
        if !clean.is_empty() {
            let escaped = clean.replace('*', r"\*");
            let anchored = atoll_guest::fs::glob::Glob::new(format!("/{escaped}").as_bytes()).unwrap();
            prop_assert!(anchored.matches(clean.as_bytes(), false));
            let anywhere = atoll_guest::fs::glob::Glob::new(format!("**/{escaped}").as_bytes()).unwrap();
            let below = format!("x/y/{clean}");
            prop_assert!(anywhere.matches(below.as_bytes(), false));
            prop_assert!(anywhere.matches(clean.as_bytes(), false));
        }
    }
}

fn sed_text(content: &str, pattern: &str, replacement: &str, more: &[(&str, Value)]) -> (String, u64) {
    let dir = tree(&[("f", content.as_bytes())]);
    let file = dir.path().join("f");
    let files = Value::Array(vec![path(&file)]);
    let mut pairs = vec![("files", files), ("pattern", pattern.into()), ("replacement", replacement.into())];
    pairs.extend_from_slice(more);
    let result = call("sed", &pairs).unwrap();
    let results = field(&result, "results").unwrap();
    let entry = &results.as_array().unwrap()[0];
    assert!(field(entry, "error").is_none());
    assert_eq!(number(entry, "replacements"), number(&result, "total"));
    (fs::read_to_string(file).unwrap(), number(&result, "total"))
}

#[test]
fn sed_follows_the_contract() {
    let plain: &[(&str, Value)] = &[];
    let first: &[(&str, Value)] = &[("first_only", true.into())];
    let literal: &[(&str, Value)] = &[("regex", false.into())];
    let literal_any_case: &[(&str, Value)] = &[("regex", false.into()), ("ignore_case", true.into())];
    for (content, pattern, replacement, more, expected, count) in [
        ("foo foo\nfoo\n", "foo", "bar", plain, "bar bar\nbar\n", 3),
        ("foo foo\nfoo\n", "foo", "bar", first, "bar foo\nfoo\n", 1),
        ("foo\nboo", "o$", "0", plain, "fo0\nbo0", 2),
        ("foo\r\n", "o$", "0", plain, "fo0\r\n", 1),
        ("a b\nc", r"\s+", "_", plain, "a_b\nc", 1),
        ("a@b", r"(\w+)@(\w+)", "$2 at ${1}", plain, "b at a", 1),
        ("a", "(a)", "$1x", plain, "", 1),
        ("a", "(a)", "${1}x", plain, "ax", 1),
        ("5", "5", "$$5", plain, "$5", 1),
        ("a.b axb", "a.b", "$1", literal, "$1 axb", 1),
        ("a", "A", "$5", literal_any_case, "$5", 1),
        ("ab", "x*", "-", plain, "-a-b-", 3),
        ("a", "(?P<n>a)", "[$n]$", plain, "[a]$", 1),
        ("", "x*", "-", plain, "", 0),
        ("a\n", "$", "!", plain, "a!\n", 1),
        ("a\r", r"\r", "!", plain, "a!", 1),
    ] {
        assert_eq!(sed_text(content, pattern, replacement, more), (expected.into(), count), "{content:?} {pattern}");
    }
}

#[test]
fn sed_reports_each_file_and_leaves_unmatched_ones_alone() {
    let dir = tree(&[("a", b"foo"), ("b", b"bar"), ("c", b"foo \xff"), ("d/e.txt", b"foo\n"), ("d/x.md", b"foo")]);
    let at = |name: &str| dir.path().join(name);
    fs::set_permissions(at("a"), fs::Permissions::from_mode(0o4711)).unwrap();
    if rustix::process::geteuid().is_root() {
        std::os::unix::fs::chown(at("a"), Some(5), Some(6)).unwrap();
        fs::set_permissions(at("a"), fs::Permissions::from_mode(0o4711)).unwrap();
    }
    fs::hard_link(at("b"), at("b2")).unwrap();
    let before = fs::metadata(at("b")).unwrap();
    symlink("a", at("link")).unwrap();
    let files = Value::Array(["link", "b", "c", "none", "d"].iter().map(|n| path(at(n))).collect());
    let edit = [("pattern", "foo".into()), ("replacement", Value::from("qux"))];
    let result = call("sed", &[edit.clone().as_slice(), &[("files", files.clone())]].concat()).unwrap();
    let results = field(&result, "results").unwrap();
    let summary: Vec<(u64, Option<String>)> = results
        .as_array()
        .unwrap()
        .iter()
        .map(|entry| (number(entry, "replacements"), field(entry, "error").map(|error| text(&error, "code"))))
        .collect();
    let failed = |code: &str| (0, Some(code.to_owned()));
    let expected = [(1, None), (0, None), failed("file_error"), failed("file_not_found"), failed("is_a_directory")];
    assert_eq!(summary, expected);
    assert_eq!(number(&result, "total"), 1);
    assert_eq!(fs::read(at("a")).unwrap(), b"qux");
    assert!(fs::symlink_metadata(at("link")).unwrap().is_symlink());
    let a = fs::metadata(at("a")).unwrap();
    assert_eq!(a.permissions().mode() & 0o7777, 0o4711);
    if rustix::process::geteuid().is_root() {
        assert_eq!((a.uid(), a.gid()), (5, 6));
    }
    let after = fs::metadata(at("b")).unwrap();
    assert_eq!((before.ino(), before.mtime_nsec(), 2), (after.ino(), after.mtime_nsec(), after.nlink()));

    let walk = [edit.as_slice(), &[("path", path(dir.path())), ("include", texts(&["*.txt"]))]].concat();
    assert_eq!(number(&call("sed", &walk).unwrap(), "total"), 1);
    assert_eq!(
        (fs::read(at("d/e.txt")).unwrap(), fs::read(at("d/x.md")).unwrap()),
        (b"qux\n".to_vec(), b"foo".to_vec())
    );
    assert_eq!(names(&at("d")), ["e.txt", "x.md"]);
    let flat = [edit.as_slice(), &[("path", path(dir.path())), ("recursive", false.into())]].concat();
    assert_eq!(code(call("sed", &flat)), "is_a_directory");
    assert_eq!(code(call("sed", &edit)), "invalid_argument");
    assert_eq!(
        code(call("sed", &[edit.as_slice(), &[("files", files), ("path", "/x".into())]].concat())),
        "invalid_argument"
    );
    let empty = [("pattern", "".into()), ("replacement", "".into()), ("regex", false.into()), ("path", "/x".into())];
    assert_eq!(code(call("sed", &empty)), "invalid_argument");
}

#[test]
fn sed_results_too_many_for_a_frame_come_as_events() {
    let dir = tempfile::tempdir().unwrap();
    for n in 0..700 {
        fs::write(dir.path().join(format!("{n}")), b"a").unwrap();
    }
    let mut io = Io::new();
    let edit = [("path", path(dir.path())), ("pattern", "a".into()), ("replacement", "b".into())];
    let result = run("sed", &edit, &mut io).unwrap();
    let rest = field(&result, "results").unwrap().as_array().unwrap().len();
    assert_eq!((io.all("results").len() + rest, number(&result, "total")), (700, 700));
}
