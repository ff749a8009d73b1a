//! Processes of a real agent: exit facts, byte-exact output, flow control, trees that are killed, survival of the channel.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod agent_support;

use agent_support::*;
use atoll_guest::op::map;
use rmpv::Value;

/// Report exit codes and signals as they were, stdout and stderr apart.
#[test]
fn exit_facts_and_separate_streams() {
    let agent = Agent::start();
    let mut host = agent.connect();
    assert_eq!(host.hello["v"].as_i64(), Some(1));
    let done = host.shell("a", "echo out; echo err >&2; exit 7");
    assert_eq!((done.out.as_slice(), done.err.as_slice(), done.code()), (b"out\n".as_slice(), b"err\n".as_slice(), 7));
    assert_eq!((done.ok()["out"].as_u64(), done.ok()["err"].as_u64()), (Some(4), Some(4)));
    assert_eq!(done.ok()["held"].as_bool(), Some(false));
    assert!(done.events[0]["started"]["pid"].as_i64().unwrap() > 1);
    let done = host.shell("b", "kill -SEGV $$");
    assert_eq!((done.exit()["signal"].as_i64(), done.exit()["code"].is_nil()), (Some(11), true));
    let done = host.exec(map([("id", "c".into()), ("argv", argv(&["true"]))]));
    assert_eq!(done.code(), 0);
    for key in ["wall_ms", "user_us", "sys_us", "max_rss_kb"] {
        assert!(done.exit()[key].as_u64().is_some(), "{key}");
    }
    assert!(done.exit()["max_rss_kb"].as_u64().unwrap() > 100);
    assert_eq!(host.ok("poll", map([("id", "a".into())]))["exit"]["code"].as_i64(), Some(7));
}

/// Carry every byte value unchanged through stdin, arguments and stdout.
#[test]
fn bytes_are_exact() {
    let agent = Agent::start();
    let mut host = agent.connect();
    let all: Vec<u8> = (0..=255).cycle().take(300_000).collect();
    let stream = host.request("exec", map([("id", "cat".into()), ("argv", argv(&["cat"])), ("stdin", true.into())]));
    let mut allowed = 0;
    for piece in all.chunks(100_000) {
        while allowed < piece.len() {
            if let Message::Credit(0, n) = host.next_on(stream) {
                allowed += n as usize;
            }
        }
        allowed -= piece.len();
        host.data(stream, piece);
    }
    host.eof(stream);
    let done = host.finish(stream);
    assert!(done.out == all, "{} bytes", done.out.len());
    let odd = Value::from(vec![0xff, 0xfe, b'x']);
    let list = Value::Array(vec!["printf".into(), "%s".into(), odd]);
    let done = host.exec(map([("id", "odd".into()), ("argv", list)]));
    assert_eq!(done.out, [0xff, 0xfe, b'x']);
}

/// Pass a flood with a slow reader while the agent's memory stays flat and others are served.
#[test]
fn flood_with_a_slow_reader() {
    const SIZE: usize = 64 * 1024 * 1024;
    let agent = Agent::start();
    let mut host = agent.connect();
    let script = format!("head -c {SIZE} /dev/zero; echo end >&2");
    let (stream, _) = host.open("exec", map([("id", "flood".into()), ("shell", script.as_str().into())]));
    // No credit: the writer must block, others must not.
    for i in 0..5 {
        assert_eq!(host.shell(&format!("other{i}"), "echo hi").text(), "hi\n");
    }
    assert!(host.ok("poll", map([("id", "flood".into())]))["running"].as_bool().unwrap());
    assert!(host.ok("poll", map([("id", "flood".into())]))["out"].as_u64().unwrap() <= 2 * 1024 * 1024);
    host.credit(stream, 2, 1024);
    let (mut total, mut most) = (0, 0);
    while total < SIZE {
        host.credit(stream, 1, 256 * 1024);
        let mut window = 0;
        while window < 256 * 1024 && total < SIZE {
            match host.next_on(stream) {
                Message::Data(1, data) => {
                    assert!(data.iter().all(|b| *b == 0));
                    window += data.len();
                    total += data.len();
                }
                Message::Data(2, data) => assert_eq!(data, b"end\n"),
                Message::Eof(_) => {}
                other => panic!("{other:?}"),
            }
        }
        assert!(window <= 256 * 1024, "more than the credit");
        most = most.max(agent.rss_kb());
    }
    let done = host.finish(stream);
    assert_eq!((done.ok()["out"].as_u64(), done.code()), (Some(SIZE as u64), 0));
    assert!(most < 16 * 1024, "{most} kB");
}

/// Give the result when the main process ends, though a child keeps its stdout open, and keep what the child writes.
#[test]
fn background_child_does_not_delay_the_result() {
    let agent = Agent::start();
    let mut host = agent.connect();
    let fifo = agent.dir.path().join("go");
    let script = format!("mkfifo {0}; (read x < {0}; echo later) & echo now", fifo.display());
    let done = host.shell("bg", &script);
    assert_eq!(done.text(), "now\n");
    assert_eq!(done.ok()["held"].as_bool(), Some(true));
    std::fs::write(&fifo, "x\n").unwrap();
    let (stream, event) = host.open("attach", map([("id", "bg".into()), ("out", 4.into()), ("follow", true.into())]));
    assert_eq!(event["attached"]["out"].as_u64(), Some(4));
    assert_eq!(host.finish(stream).text(), "later\n");
    eventually("the record is over", || !host.ok("poll", map([("id", "bg".into())]))["held"].as_bool().unwrap());
}

/// Kill children that left session and parent when the time is over, and say that it was the timeout.
#[test]
fn timeout_kills_the_whole_tree() {
    let agent = Agent::start();
    let mut host = agent.connect();
    let mark = agent.dir.path().join("pid");
    let escape =
        "setsid sh -c 'sleep 1000 </dev/null >/dev/null 2>&1 & echo $! > $0.new; mv $0.new $0' $0 & sleep 1000";
    let words = ["/bin/sh", "-c", escape, mark.to_str().unwrap()];
    let stream = host.request("exec", map([("id", "t".into()), ("argv", argv(&words)), ("timeout_ms", 4000.into())]));
    let mut pid = 0;
    eventually("the escapee lives", || {
        pid = std::fs::read_to_string(&mark).ok().and_then(|t| t.trim().parse().ok()).unwrap_or(0);
        pid > 0
    });
    assert!(alive(pid));
    let done = host.finish(stream);
    assert_eq!(done.exit()["timed_out"].as_bool(), Some(true));
    assert_eq!(done.exit()["signal"].as_i64(), Some(9));
    assert_eq!(done.exit()["killed_by_us"].as_bool(), Some(true));
    eventually("the escapee is dead", || !alive(pid));
}

/// Kill the tree on CANCEL and on `kill`, without a client that reads; leave others alone.
#[test]
fn cancel_and_kill() {
    let agent = Agent::start();
    let mut host = agent.connect();
    let start = |host: &mut Client, id: &str| {
        let (stream, event) = host.open("exec", map([("id", id.into()), ("shell", "sleep 1000 & yes".into())]));
        (stream, event["started"]["pid"].as_i64().unwrap())
    };
    let (one, pid_one) = start(&mut host, "one");
    let (_two, pid_two) = start(&mut host, "two");
    host.cancel(one);
    let done = host.finish_without_grant(one);
    assert_eq!(done.exit()["cancelled"].as_bool(), Some(true));
    assert!(!alive(pid_one) && alive(pid_two));
    host.ok("kill", map([("id", "two".into())]));
    assert!(!alive(pid_two));
    let left =
        host.ok("ps", map([]))["processes"].as_array().unwrap().iter().filter(|p| p["state"] != "Z".into()).count();
    assert_eq!(left, 0);
    host.ok("kill", map([("id", "two".into())]));
    assert_eq!(host.code("kill", map([("id", "three".into())])), "not_found");
}

/// Keep processes and unread output over a lost connection, and let a new one take it up at an offset.
#[test]
fn reconnect_keeps_processes_and_output() {
    let agent = Agent::start();
    let mut host = agent.connect();
    let fifo = agent.dir.path().join("go");
    let script = format!("mkfifo {0}; echo first; read x < {0}; echo second; exit 5", fifo.display());
    let (stream, _) = host.open("exec", map([("id", "p".into()), ("shell", script.as_str().into())]));
    host.credit(stream, 1, WINDOW);
    assert!(matches!(host.next_on(stream), Message::Data(1, data) if data == b"first\n"));
    drop(host);
    let mut host = agent.connect();
    assert!(host.ok("poll", map([("id", "p".into())]))["running"].as_bool().unwrap());
    std::fs::write(&fifo, "x\n").unwrap();
    eventually("it ends", || !host.ok("poll", map([("id", "p".into())]))["running"].as_bool().unwrap());
    let stream = host.request("attach", map([("id", "p".into()), ("out", 2.into())]));
    let done = host.finish(stream);
    assert_eq!((done.text().as_str(), done.code()), ("rst\nsecond\n", 5));
    let got = host.ok("output", map([("id", "p".into()), ("ch", 1.into()), ("offset", 6.into()), ("max", 3.into())]));
    assert_eq!(got["data"].as_slice(), Some(b"sec".as_slice()));
    assert_eq!(host.code("poll", map([("id", "never".into())])), "not_found");
    host.ok("forget", map([("id", "p".into())]));
    assert_eq!(host.code("poll", map([("id", "p".into())])), "gone");
    assert_eq!(host.shell("p", "true").error_code(), "already_exists");
}

/// Lose nothing when the connection breaks in the middle of a flood.
#[test]
fn reconnect_in_a_flood_loses_nothing() {
    let agent = Agent::start();
    let mut host = agent.connect();
    let fields = map([("id", "f".into()), ("shell", "seq 1 300000".into())]);
    let (stream, _) = host.open("exec", fields);
    host.credit(stream, 1, WINDOW);
    let mut all = Vec::new();
    while all.len() < 400_000 {
        if let Message::Data(1, data) = host.next_on(stream) {
            all.extend(data);
        }
    }
    drop(host);
    let mut host = agent.connect();
    let stream = host.request("attach", map([("id", "f".into()), ("out", all.len().into())]));
    let done = host.finish(stream);
    assert_eq!(done.events[0]["attached"]["out"].as_u64(), Some(all.len() as u64));
    all.extend(&done.out);
    let wanted: String = (1..=300_000).map(|n| format!("{n}\n")).collect();
    assert!(all == wanted.as_bytes(), "{} of {}", all.len(), wanted.len());
}

/// Run detached processes without a client; drop the oldest output and say from where on it is there.
#[test]
fn detached_processes_drop_their_oldest_output() {
    let agent = Agent::start();
    let mut host = agent.connect();
    let fields = map([
        ("id", "d".into()),
        ("shell", "seq 1 100000; sleep 1000".into()),
        ("detach", true.into()),
        ("ring", 65536.into()),
    ]);
    let done = host.exec(fields);
    assert!(done.ok()["pid"].as_i64().unwrap() > 1);
    let total = (1..=100_000).map(|n| format!("{n}\n").len() as u64).sum::<u64>();
    eventually("all is written", || host.ok("poll", map([("id", "d".into())]))["out"].as_u64() == Some(total));
    let (stream, event) = host.open("attach", map([("id", "d".into()), ("out", 0.into())]));
    assert_eq!(event["attached"]["out"].as_u64(), Some(total - 65536));
    host.credit(stream, 1, WINDOW);
    let mut tail = Vec::new();
    while tail.len() < 65536 {
        if let Message::Data(1, data) = host.next_on(stream) {
            tail.extend(data);
        }
    }
    assert!(tail.ends_with(b"\n99999\n100000\n"));
    let listed = host.ok("procs", map([]));
    assert_eq!(listed["procs"][0]["id"], "d".into());
    host.cancel(stream);
    assert_eq!(host.finish_without_grant(stream).error_code(), "cancelled");
    assert!(host.ok("poll", map([("id", "d".into())]))["running"].as_bool().unwrap());
    host.ok("signal", map([("id", "d".into()), ("signal", 15.into()), ("group", "tree".into())]));
    eventually("it ends", || host.ok("poll", map([("id", "d".into())]))["exit"]["signal"].as_i64() == Some(15));
    assert_eq!(host.code("signal", map([("id", "d".into()), ("signal", 15.into())])), "not_found");
}

/// Feed the stdin of a detached process piece by piece.
#[test]
fn stdin_without_attachment() {
    let agent = Agent::start();
    let mut host = agent.connect();
    host.exec(map([("id", "s".into()), ("argv", argv(&["cat"])), ("stdin", true.into()), ("detach", true.into())]))
        .ok();
    for (data, eof) in [("one ", false), ("two", true)] {
        let got =
            host.ok("stdin", map([("id", "s".into()), ("data", Value::from(data.as_bytes())), ("eof", eof.into())]));
        assert_eq!(got["written"].as_u64(), Some(data.len() as u64));
    }
    let stream = host.request("attach", map([("id", "s".into())]));
    assert_eq!(host.finish(stream).text(), "one two");
}

/// Run on a terminal: size, resize, input, foreground group, and the end.
#[test]
fn terminals() {
    let agent = Agent::start();
    let mut host = agent.connect();
    let size = map([("rows", 24.into()), ("cols", 80.into()), ("term", "vt100".into())]);
    let script = "stty size; tty | cut -c1-9; echo $TERM; read line; echo got $line; stty size; exit 3";
    let stream = host.request("exec", map([("id", "p".into()), ("shell", script.into()), ("pty", size)]));
    host.credit(stream, 1, WINDOW);
    let mut seen = String::new();
    let mut pid = 0;
    while !seen.contains("vt100") {
        match host.next_on(stream) {
            Message::Data(1, data) => seen.push_str(&String::from_utf8_lossy(&data)),
            Message::Event(event) => pid = event["started"]["pid"].as_i64().unwrap(),
            _ => {}
        }
    }
    assert!(seen.starts_with("24 80\r\n/dev/pts/\r\nvt100\r\n"), "{seen:?}");
    assert_eq!(host.ok("foreground", map([("id", "p".into())]))["pgid"].as_i64(), Some(pid));
    host.ok("resize", map([("id", "p".into()), ("rows", 50.into()), ("cols", 132.into())]));
    host.data(stream, b"hello\n");
    let done = host.finish_without_grant(stream);
    assert_eq!(done.text(), "hello\r\ngot hello\r\n50 132\r\n");
    assert_eq!(done.code(), 3);
    assert_eq!(host.code("resize", map([("id", "p".into()), ("rows", 1.into()), ("cols", 1.into())])), "not_found");
    let size = map([("rows", 0.into()), ("cols", 80.into())]);
    assert_eq!(
        host.exec(map([("id", "q".into()), ("shell", "true".into()), ("pty", size)])).error_code(),
        "invalid_argument"
    );
}

/// Interrupt what runs in the foreground of a terminal.
#[test]
fn control_c_reaches_the_foreground() {
    let agent = Agent::start();
    let mut host = agent.connect();
    let size = map([("rows", 24.into()), ("cols", 80.into())]);
    let script = "trap 'echo caught; exit 9' INT; echo ready; while :; do read x; done";
    let stream = host.request("exec", map([("id", "p".into()), ("shell", script.into()), ("pty", size)]));
    host.credit(stream, 1, WINDOW);
    let mut seen = String::new();
    while !seen.contains("ready") {
        if let Message::Data(1, data) = host.next_on(stream) {
            seen.push_str(&String::from_utf8_lossy(&data));
        }
    }
    host.data(stream, &[3]);
    let done = host.finish_without_grant(stream);
    assert!(done.text().contains("caught"), "{:?}", done.text());
    assert_eq!(done.code(), 9);
}

/// Reap what is orphaned and leave no zombie behind after many short commands.
#[test]
fn zombies_are_reaped() {
    let agent = Agent::start();
    let mut host = agent.connect();
    for i in 0..150 {
        assert_eq!(host.shell(&format!("z{i}"), "(true &) ; true").code(), 0);
    }
    eventually("nothing is left", || host.ok("ps", map([]))["processes"].as_array().unwrap().is_empty());
    let known = host.ok("procs", map([]))["procs"].as_array().unwrap().len();
    assert!((1..=66).contains(&known), "{known} records");
}

/// A shim that is killed from inside loses neither the process nor its exit code.
#[test]
fn killed_shim() {
    let agent = Agent::start();
    let mut host = agent.connect();
    let done = host.shell("k", "kill -9 $PPID; while [ $(ps -o ppid= -p $$) = $PPID ]; do :; done; echo alive; exit 4");
    assert_eq!((done.text().as_str(), done.code()), ("alive\n", 4));
    // Also when the shim had no time yet to tell of the start.
    for i in 0..40 {
        let quick = argv(&["/bin/sh", "-c", "kill -9 $PPID; echo alive; exit 4"]);
        let done = host.exec(map([("id", format!("q{i}").as_str().into()), ("argv", quick)]));
        assert_eq!((done.text().as_str(), done.code()), ("alive\n", 4));
    }
    assert_eq!(host.shell("after", "echo fine").text(), "fine\n");
}

/// A shim below which nothing is left serves the next command; one that still has somebody below it, or was killed, does not.
#[test]
fn shims_are_used_again_when_nothing_is_left_below() {
    let agent = Agent::start();
    let mut host = agent.connect();
    let mut parents = (0..200).map(|i| {
        std::thread::sleep(std::time::Duration::from_millis(10));
        host.shell(&format!("p{i}"), "echo $PPID").text()
    });
    let mut before = parents.next().unwrap();
    let again = parents.any(|parent| std::mem::replace(&mut before, parent.clone()) == parent);
    assert!(again, "no shim served twice");
    drop(parents);
    let busy = host.shell("busy", "sleep 300 >/dev/null 2>&1 & echo $PPID").text();
    for i in 0..20 {
        assert_ne!(host.shell(&format!("n{i}"), "echo $PPID").text(), busy);
    }
    let shell = argv(&["/bin/sh", "-c", "echo $PPID; sleep 300"]);
    let done = host.exec(map([("id", "late".into()), ("argv", shell), ("timeout_ms", 300.into())]));
    assert_eq!(done.exit()["timed_out"].as_bool(), Some(true));
    for i in 0..20 {
        assert_ne!(host.shell(&format!("o{i}"), "echo $PPID").text(), done.text());
    }
}
