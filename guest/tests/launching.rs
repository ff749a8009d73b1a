//! How a process is started: environment, user, directory, limits, descriptors; and what is refused, with which code.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod agent_support;

use agent_support::*;
use atoll_guest::op::map;
use rmpv::Value;

/// Give every process HOME, LANG, TERM, PATH and what was asked for.
#[test]
fn environment() {
    let agent = Agent::start_with(serde_json::json!({ "env": { "BASE": "1", "BOTH": "base" } }));
    let mut host = agent.connect();
    let env = map([("BOTH", "mine".into()), ("ODD", Value::from(vec![0xff]))]);
    let done = host.exec(map([("id", "a".into()), ("argv", argv(&["env", "-0"])), ("env", env)]));
    let has = |done: &Done, entry: &[u8]| done.out.split(|b| *b == 0).any(|e| e == entry);
    for entry in
        [b"BASE=1".as_slice(), b"BOTH=mine", b"ODD=\xff", b"LANG=C.UTF-8", b"TERM=dumb", b"HOME=/root", b"USER=root"]
    {
        assert!(has(&done, entry), "{}", String::from_utf8_lossy(entry));
    }
    let done = host.exec(map([("id", "b".into()), ("argv", argv(&["env", "-0"])), ("clear_env", true.into())]));
    assert!(!has(&done, b"BASE=1") && done.text().contains("PATH=/usr/local/sbin:") && done.text().contains("PWD=/"));
    host.ok("configure", map([("env", map([("BASE", "2".into()), ("BOTH", Value::Nil)]))]));
    let done = host.shell("c", "echo $BASE-$BOTH-");
    assert_eq!(done.text(), "2--\n");
    for (key, value) in [("", "x"), ("a=b", "x"), ("a", "\0")] {
        let done =
            host.exec(map([("id", "bad".into()), ("shell", "true".into()), ("env", map([(key, value.into())]))]));
        assert_eq!(done.error_code(), "invalid_argument");
    }
}

/// Let nothing of the agent reach its children: descriptors, signal mask, dispositions, session.
#[test]
fn children_inherit_nothing() {
    let agent = Agent::start();
    let mut host = agent.connect();
    let (_other, _) =
        host.open("exec", map([("id", "bg".into()), ("shell", "sleep 1000".into()), ("stdin", true.into())]));
    let looker = "import os\nfor fd in range(1024):\n try: os.fstat(fd); print(fd, end=' ')\n except OSError: pass";
    let script = "grep -E 'Sig(Blk|Ign|Cgt)' /proc/self/status; umask; ps -o pgid=,sid= -p $$; echo $$";
    for i in 0..3 {
        let done =
            host.exec(map([("id", format!("i{i}").as_str().into()), ("argv", argv(&["/bin/sh", "-c", script]))]));
        let text = done.text();
        let lines: Vec<&str> = text.lines().collect();
        let open =
            host.exec(map([("id", format!("fd{i}").as_str().into()), ("argv", argv(&["python3", "-c", looker]))]));
        assert_eq!(open.text(), "0 1 2 ");
        assert!(lines[0].starts_with("SigBlk:\t0000000000000000"), "{text}");
        assert!(lines[1].ends_with("0000000000000000"), "{text}");
        assert_eq!(lines[3], "0022");
        let ids: Vec<&str> = lines[4].split_whitespace().collect();
        let ours = unsafe { libc::getsid(0) }.to_string();
        assert!(ids[0] == lines[5] && ids[1] != ours, "{text}");
    }
}

/// Run as the user that was asked for, or not at all.
#[test]
fn users() {
    if unsafe { libc::geteuid() } != 0 {
        return;
    }
    let agent = Agent::start();
    let mut host = agent.connect();
    for (spec, wanted) in
        [("12345:54321", "12345:54321:54321"), ("0", "0:0:0"), ("nobody", "65534:65534:65534"), ("7", "7:7:7")]
    {
        let user = map([
            ("id", format!("u{}", spec.replace(':', "-")).as_str().into()),
            ("shell", "echo $(id -u):$(id -g):$(id -G)".into()),
            ("user", spec.into()),
            ("cwd", "/".into()),
        ]);
        assert_eq!(host.exec(user).text().trim(), wanted, "{spec}");
    }
    for spec in ["", "-1", "0x0", "4294967297", "2147483648", "65535", "+1", "1:", "1:-1"] {
        let done = host.exec(map([("id", "bad".into()), ("shell", "id -u".into()), ("user", spec.into())]));
        assert_eq!(done.error_code(), "invalid_argument", "{spec}");
    }
    for spec in ["no-such-user", "0:no-such-group"] {
        let done = host.exec(map([("id", "bad".into()), ("shell", "id -u".into()), ("user", spec.into())]));
        assert_eq!(done.error_code(), "user_not_found", "{spec}");
    }
}

/// Refuse what cannot be started with the code that says why, and leave the id free.
#[test]
fn refusals() {
    let agent = Agent::start();
    let mut host = agent.connect();
    let plain = agent.dir.path().join("plain");
    std::fs::write(&plain, "no program").unwrap();
    let script = agent.dir.path().join("script");
    std::fs::write(&script, "#!/no/such/interpreter\n").unwrap();
    std::os::unix::fs::symlink("/proc/self/root", agent.dir.path().join("magic")).unwrap();
    std::fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let at = |name: &str| Value::from(agent.dir.path().join(name).to_str().unwrap());
    let words = |path: &std::path::Path| argv(&[path.to_str().unwrap()]);
    let cases = [
        (vec![("argv", argv(&["no-such-program-here"]))], "program_not_found"),
        (vec![("argv", argv(&["/no/such/program"]))], "program_not_found"),
        (vec![("argv", words(&script))], "program_not_found"),
        (vec![("argv", words(&plain))], "program_not_executable"),
        (vec![("argv", argv(&["/tmp"]))], "program_not_executable"),
        (vec![("argv", argv(&[]))], "invalid_argument"),
        (vec![("argv", argv(&[""]))], "invalid_argument"),
        (vec![("argv", argv(&["a\0b"]))], "invalid_argument"),
        (vec![], "invalid_argument"),
        (vec![("shell", "true".into()), ("argv", argv(&["true"]))], "invalid_argument"),
        (vec![("shell", "true".into()), ("cwd", at("none"))], "file_not_found"),
        (vec![("shell", "true".into()), ("cwd", at("plain"))], "not_a_directory"),
        (vec![("shell", "true".into()), ("cwd", at("magic"))], "invalid_argument"),
        (vec![("shell", "true".into()), ("cwd", "/proc/self/cwd".into())], "invalid_argument"),
        (vec![("shell", "true".into()), ("cwd", "/proc/self/task/../root/tmp".into())], "invalid_argument"),
        (vec![("shell", "true".into()), ("cwd", "a\0".into())], "invalid_argument"),
        (vec![("shell", "true".into()), ("timeout_ms", (-5).into())], "invalid_argument"),
        (vec![("shell", "true".into()), ("timeout_ms", 0.into())], "invalid_argument"),
        (vec![("shell", "true".into()), ("umask", 0o7777.into())], "invalid_argument"),
        (vec![("shell", "true".into()), ("rlimits", map([("bogus", 1.into())]))], "invalid_argument"),
        (vec![("shell", 5.into())], "invalid_argument"),
    ];
    for (fields, code) in cases {
        let mut all: Vec<(Value, Value)> = fields.iter().map(|(k, v)| (Value::from(*k), v.clone())).collect();
        all.push(("id".into(), "same".into()));
        assert_eq!(host.exec(Value::Map(all)).error_code(), code, "{fields:?}");
    }
    for id in ["", "a/b", "..", "a b", &"x".repeat(65)] {
        assert_eq!(host.shell(id, "true").error_code(), "invalid_argument");
    }
    assert_eq!(host.code("no_such_op", map([])), "unsupported");
    let done = host.exec(map([
        ("id", "same".into()),
        ("shell", "pwd".into()),
        ("cwd", "/usr".into()),
        ("timeout_ms", u64::MAX.into()),
    ]));
    assert_eq!(done.text(), "/usr\n");
}

/// Set umask and limits for the process alone, and start one with a very long argument list.
#[test]
fn limits_and_long_arguments() {
    let agent = Agent::start_with(serde_json::json!({ "rlimits": { "nofile": [512, 4096], "core": [0, 0] } }));
    let mut host = agent.connect();
    let limits = map([("nofile", Value::Array(vec![100.into(), 200.into()]))]);
    let fields = map([
        ("id", "l".into()),
        ("shell", "umask; ulimit -Sn; ulimit -Hn; ulimit -c".into()),
        ("umask", 0o77.into()),
        ("rlimits", limits),
    ]);
    assert_eq!(host.exec(fields).text(), "0077\n100\n200\n0\n");
    assert_eq!(host.shell("m", "ulimit -Sn; ulimit -Hn").text(), "512\n4096\n");
    let long = "x".repeat(120_000);
    let done = host.exec(map([("id", "long".into()), ("argv", argv(&["printf", "%s", &long])), ("shell", Value::Nil)]));
    assert!(done.out == long.as_bytes());
    let more: Vec<&str> = std::iter::repeat_n(long.as_str(), 5).collect();
    let done =
        host.exec(map([("id", "longer".into()), ("argv", argv(&[&["printf", "%s"], more.as_slice()].concat()))]));
    assert_eq!(done.out.len(), 600_000);
}

/// A command that needs no shell is started without one, and nobody can tell: not by output, environment, status or name.
#[test]
fn plain_commands_are_as_bash_runs_them() {
    let agent = Agent::start();
    let mut host = agent.connect();
    let dir = std::env::temp_dir().join(format!("atoll-plain-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let write = |name: &str, text: &str, mode: u32| {
        std::fs::write(dir.join(name), text).unwrap();
        std::fs::set_permissions(dir.join(name), std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
    };
    write("headless", "echo headless $0 $1; exit 5\n", 0o755);
    write("lost", "#!/no/such/interpreter\n", 0o755);
    write("shut", "#!/bin/sh\n", 0o644);
    #[rustfmt::skip]
    let lines = [
        "env -0", "/usr/bin/env -0", "/bin/true", "/bin/false", "ls -d /", "cat /proc/self/comm", "cat /proc/self/cmdline",
        "no-such-program", "/no/such/program", "./headless a", "./lost", "./shut", "/", "./", "sh -c exit", "sleep x",
        "-x", "ls /no-such", "readlink /proc/self/exe", "umask", "env -u PATH no-such",
    ];
    for (number, line) in lines.into_iter().enumerate() {
        let mut run = |how: &str, command: (&str, Value)| {
            let id = format!("{how}{number}");
            host.exec(map([("id", id.as_str().into()), command, ("cwd", dir.to_str().unwrap().into())]))
        };
        let plain = run("p", ("shell", line.into()));
        let bash = run("b", ("argv", argv(&["/bin/bash", "-c", line])));
        let sorted = |out: &[u8]| {
            let mut parts: Vec<Vec<u8>> = out.split(|b| *b == 0).map(<[u8]>::to_vec).collect();
            parts.sort();
            parts
        };
        assert_eq!(sorted(&plain.out), sorted(&bash.out), "{line}");
        assert_eq!(plain.err, bash.err, "{line}");
        assert_eq!(plain.code(), bash.code(), "{line}");
    }
    std::fs::remove_dir_all(&dir).unwrap();
}
