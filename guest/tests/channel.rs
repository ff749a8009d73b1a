//! The channel itself: who may speak, what a broken or hostile peer can do, and that the agent lives through it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod agent_support;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use agent_support::*;
use atoll_guest::op::map;
use atoll_guest::wire::{self, Kind};
use rmpv::Value;

fn hello(secret: &str, version: u64) -> Vec<u8> {
    wire::control(0, Kind::Hello, &map([("v", version.into()), ("secret", secret.into())])).unwrap()
}

/// Close the connection of a peer without the secret, answer it nothing, and leave the living one alone.
#[test]
fn strangers_are_refused() {
    let agent = Agent::start();
    let mut host = agent.connect();
    let good = "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb";
    let long =
        wire::control(0, Kind::Hello, &map([("v", 1.into()), ("secret", good.into()), ("x", "y".repeat(5000).into())]))
            .unwrap();
    let openings = [
        hello("aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", 1),
        hello("", 1),
        hello(&good[1..], 1),
        hello(good, 2),
        long,
        wire::raw(0, Kind::Hello, b"\xc1"),
        wire::raw(0, Kind::Ping, b"x"),
        wire::control(1, Kind::Request, &map([("op", "info".into())])).unwrap(),
        vec![0xff; 64],
    ];
    for opening in openings {
        let mut stranger = agent.dial();
        stranger.write_all(&opening).unwrap();
        let mut answer = Vec::new();
        // A reset is as good as an end: what was sent after the refusal is simply not read.
        let _ = stranger.read_to_end(&mut answer);
        assert!(answer.is_empty(), "{opening:?} got {answer:?}");
    }
    // Silent ones are only kept in a small number, and do not displace the host.
    let silent: Vec<_> = (0..20).map(|_| agent.dial()).collect();
    assert_eq!(host.shell("a", "echo still here").text(), "still here\n");
    drop(silent);
}

/// Let a new authenticated connection take the place of the old one.
#[test]
fn a_new_connection_replaces_the_old() {
    let agent = Agent::start();
    let mut first = agent.connect();
    let boot = first.hello["boot"].clone();
    assert_eq!(first.hello["secret"], "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa".into());
    let mut second = agent.connect();
    assert_eq!(second.hello["boot"], boot);
    assert!(first.is_closed());
    second.write(&wire::raw(0, Kind::Ping, b"are you there"));
    assert!(matches!(second.next_on(0), Message::Other(Kind::Pong, payload) if payload == b"are you there"));
}

/// Dial the host again and again, also when its socket was made anew.
#[test]
fn dialling_survives_restarts_of_the_host() {
    let (agent, mut listener) = Agent::start_dialling();
    let path = agent.dir.path().join("agent.sock");
    for round in 0..3 {
        let (socket, _) = listener.accept().unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut host = Client::new(socket);
        assert_eq!(host.expect_hello()["secret"], "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa".into());
        host.write(&host_hello());
        assert_eq!(host.shell(&format!("r{round}"), "echo hi").text(), "hi\n");
        drop(host);
        drop(listener);
        std::fs::remove_file(&path).unwrap();
        listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    }
}

/// Close the connection on what breaks the protocol, answer what is merely wrong, and live on in both cases.
#[test]
fn broken_frames() {
    let agent = Agent::start();
    let closing: Vec<Vec<u8>> = vec![
        wire::raw(1, Kind::Ping, b""),
        wire::raw(0, Kind::Request, b"\x80"),
        wire::raw(0, Kind::Ping, &[0; 65]),
        wire::raw(0, Kind::Hello, b"\x80"),
        vec![0, 0, 0, 0, 0, 0, 0, 1, 11],
        vec![0xff, 0xff, 0xff, 0xff, 0, 0, 0, 1, 1],
        vec![0, 64, 0, 1, 0, 0, 0, 1, 1],
        vec![0, 4, 0, 2, 0, 0, 0, 1, 4],
        wire::raw(1, Kind::Result, b"\x80"),
        wire::raw(1, Kind::Data, b""),
        wire::raw(1, Kind::Eof, b"ab"),
        wire::raw(1, Kind::Credit, b"abc"),
    ];
    for bytes in &closing {
        let mut host = agent.connect();
        host.write(bytes);
        assert!(host.is_closed(), "{bytes:?}");
    }
    let mut host = agent.connect();
    let (stream, _) = host.open("exec", map([("id", "s".into()), ("argv", argv(&["sleep", "1000"]))]));
    host.data(stream, b"no credit for stdin was given");
    assert!(host.is_closed());
    let mut host = agent.connect();
    let (stream, _) = host.open("attach", map([("id", "s".into())]));
    host.write(&wire::control(stream, Kind::Request, &map([("op", "info".into())])).unwrap());
    assert!(host.is_closed());
    let mut host = agent.connect();
    let mut deep = Value::Nil;
    for _ in 0..40 {
        deep = Value::Array(vec![deep]);
    }
    let odd: Vec<Vec<u8>> = vec![
        b"".to_vec(),
        b"\xc0".to_vec(),
        b"\x80".to_vec(),
        b"\x80\x80".to_vec(),
        b"\xdf\xff\xff\xff\xff".to_vec(),
        b"\xdd\xff\xff\xff\xff".to_vec(),
        b"\x81\xa2op\xc6\xff\xff\xff\xff".to_vec(),
        b"\x81\xa2op\x01".to_vec(),
        wire::control(1, Kind::Request, &map([("op", "info".into()), ("x", deep)])).unwrap()[wire::HEAD..].to_vec(),
    ];
    for (i, payload) in odd.iter().enumerate() {
        let stream = 1000 + i as u32;
        host.write(&wire::raw(stream, Kind::Request, payload));
        assert_eq!(host.finish(stream).error_code(), "invalid_argument", "{payload:?}");
    }
    for kind in [Kind::Eof, Kind::Cancel] {
        host.write(&wire::raw(5000, kind, if kind == Kind::Eof { &[0] } else { &[] }));
    }
    host.write(&wire::raw(5000, Kind::Data, b"\0for nobody"));
    host.ok("info", map([]));
}

/// A small generator of its own, so that a failure can be repeated.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % sides
    }

    fn bytes(&mut self, most: u64) -> Vec<u8> {
        (0..self.roll(most)).map(|_| self.roll(256) as u8).collect()
    }

    fn value(&mut self, depth: u64) -> Value {
        match self.roll(if depth == 0 { 8 } else { 10 }) {
            0 => Value::Nil,
            1 => Value::from(self.roll(2) == 0),
            2 => Value::from(self.roll(u64::MAX)),
            3 => Value::from(-(self.roll(1 << 40) as i64)),
            4 => Value::from(f64::from_bits(self.roll(u64::MAX))),
            5 => Value::from(self.bytes(40)),
            6 => Value::from(["", "a", "id", "/", "..", "live", "f", "true", "\0"][self.roll(9) as usize]),
            7 => Value::Ext(self.roll(100) as i8, self.bytes(5)),
            8 => Value::Array((0..self.roll(4)).map(|_| self.value(depth - 1)).collect()),
            _ => Value::Map((0..self.roll(4)).map(|_| (self.value(0), self.value(depth - 1))).collect()),
        }
    }
}

const OPS: &[&str] = &[
    "exec",
    "attach",
    "poll",
    "output",
    "signal",
    "kill",
    "stdin",
    "resize",
    "foreground",
    "procs",
    "ps",
    "forget",
    "forward",
    "usage",
    "info",
    "configure",
    "read",
    "list",
    "stat",
    "watch",
    "grep",
    "tar_out",
    "du",
    "nonsense",
    "",
];
const KEYS: &[&str] = &[
    "id",
    "argv",
    "shell",
    "cwd",
    "env",
    "user",
    "umask",
    "pty",
    "timeout_ms",
    "ring",
    "detach",
    "out",
    "err",
    "ch",
    "offset",
    "max",
    "signal",
    "group",
    "data",
    "rows",
    "cols",
    "host",
    "port",
    "path",
    "recursive",
    "pattern",
    "limit",
    "follow",
];

/// Live through thousands of random frames: valid requests with random fields, random frames, plain noise.
#[test]
fn fuzzed_frames() {
    let agent = Agent::start();
    let mut dice = Dice(0x9e37_79b9_7f4a_7c15);
    for round in 0..40 {
        let mut host = agent.connect();
        host.socket.set_nonblocking(true).unwrap();
        let mut bytes = Vec::new();
        for n in 0..100 {
            let stream = 1 + dice.roll(60) as u32 + n;
            match dice.roll(20) {
                0..=11 => {
                    let op = OPS[dice.roll(OPS.len() as u64) as usize];
                    let mut pairs = vec![("op".into(), op.into())];
                    for _ in 0..dice.roll(6) {
                        pairs.push((KEYS[dice.roll(KEYS.len() as u64) as usize].into(), dice.value(3)));
                    }
                    bytes.extend(wire::control(stream, Kind::Request, &Value::Map(pairs)).unwrap());
                }
                12..=13 => bytes.extend(wire::credit(stream, dice.roll(4) as u8, dice.roll(1 << 33) as u32)),
                14..=15 => bytes.extend(wire::raw(stream, Kind::Cancel, &[])),
                16 => bytes.extend(wire::raw(stream, Kind::Eof, &[dice.roll(3) as u8])),
                17 => bytes.extend(wire::raw(stream, Kind::Request, &dice.bytes(60))),
                18 if dice.roll(20) == 0 => bytes.extend(wire::raw(stream, Kind::Data, &dice.bytes(60))),
                19 if dice.roll(20) == 0 => bytes.extend(dice.bytes(200)),
                _ => bytes.extend(wire::raw(0, Kind::Ping, &dice.bytes(64))),
            }
        }
        // The agent may close at any byte, and may stop reading while nobody reads its answers.
        let mut sink = [0; 65536];
        for piece in bytes.chunks(4096) {
            let mut rest = piece;
            while !rest.is_empty() {
                match host.socket.write(rest) {
                    Ok(n) => rest = &rest[n..],
                    Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {
                        let _ = host.socket.read(&mut sink);
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    Err(_) => break,
                }
            }
        }
        drop(host);
        let mut check = agent.connect();
        check.ok("info", map([]));
        if round % 10 == 9 {
            check.ok("killall", map([]));
        }
    }
    let mut host = agent.connect();
    assert_eq!(host.shell("after-all", "echo alive").text(), "alive\n");
}

/// Every input that was once interesting: the connection may end, the agent may not.
#[test]
fn corpus_is_survived() {
    let agent = Agent::start();
    let corpus = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz-corpus");
    let mut count = 0;
    for entry in std::fs::read_dir(corpus).unwrap() {
        let bytes = std::fs::read(entry.unwrap().path()).unwrap();
        let mut host = agent.connect();
        let _ = host.socket.write_all(&bytes);
        drop(host);
        let mut stranger = agent.dial();
        let _ = stranger.write_all(&bytes);
        count += 1;
    }
    assert!(count > 5);
    agent.connect().ok("info", map([]));
}

/// Stay small and quiet when there is nothing to do.
#[test]
fn idle_costs_nothing() {
    let agent = Agent::start();
    let mut host = agent.connect();
    host.shell("warm", "echo warm");
    let ticks = |pid: i32| -> u64 {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        stat.rsplit(')')
            .next()
            .unwrap()
            .split_ascii_whitespace()
            .skip(11)
            .take(2)
            .map(|n| n.parse::<u64>().unwrap())
            .sum()
    };
    let switches = |pid: i32| -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let line = status.lines().find(|l| l.starts_with("voluntary_ctxt_switches")).unwrap();
        line.split_ascii_whitespace().nth(1).unwrap().parse().unwrap()
    };
    // Once all is settled there comes a while in which the agent is not woken at all.
    eventually("it sleeps", || {
        let before = (ticks(agent.pid()), switches(agent.pid()));
        std::thread::sleep(Duration::from_millis(200));
        before == (ticks(agent.pid()), switches(agent.pid()))
    });
    let text = std::fs::read_to_string(format!("/proc/{}/status", agent.pid())).unwrap();
    let anon: u64 = text
        .lines()
        .find(|l| l.starts_with("RssAnon:"))
        .unwrap()
        .split_ascii_whitespace()
        .nth(1)
        .unwrap()
        .parse()
        .unwrap();
    assert!(anon < 1024, "{anon} kB of its own");
    if !cfg!(debug_assertions) {
        assert!(agent.rss_kb() < 2048, "{} kB", agent.rss_kb());
    }
    assert!(host.ok("usage", map([]))["agent_rss_kb"].as_u64().unwrap() > 0);
}

/// Forward a TCP connection both ways with half close, and say when nothing listens.
#[test]
fn forwards() {
    let agent = Agent::start();
    let mut host = agent.connect();
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = server.local_addr().unwrap().port();
    let echo = std::thread::spawn(move || {
        let (mut peer, _): (TcpStream, _) = server.accept().unwrap();
        let mut all = Vec::new();
        peer.read_to_end(&mut all).unwrap();
        peer.write_all(&all).unwrap();
    });
    let (stream, event) = host.open("forward", map([("port", port.into())]));
    assert_eq!(event["connected"].as_bool(), Some(true));
    let sent: Vec<u8> = (0..200_000u32).map(|n| (n * 31) as u8).collect();
    host.data(stream, &sent);
    host.eof(stream);
    let done = host.finish(stream);
    assert!(done.out == sent, "{} bytes", done.out.len());
    done.ok();
    echo.join().unwrap();
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    assert_eq!(host.code("forward", map([("port", free.into())])), "refused");
    assert_eq!(host.code("forward", map([("port", 0.into())])), "invalid_argument");
    assert_eq!(host.code("forward", map([("port", 80.into()), ("host", "example".into())])), "invalid_argument");
}

/// Run file operations beside everything else: upload, download, cancel, and a stream too many.
#[test]
fn file_operations_over_the_channel() {
    let agent = Agent::start();
    let mut host = agent.connect();
    let path = agent.dir.path().join("file");
    let place = || Value::from(path.to_str().unwrap());
    let content: Vec<u8> = (0..3_000_000u32).map(|n| (n % 251) as u8).collect();
    let stream = host.request("write", map([("path", place())]));
    let mut allowed = 0;
    for piece in content.chunks(200_000) {
        while allowed < piece.len() {
            if let Message::Credit(0, n) = host.next_on(stream) {
                allowed += n as usize;
            }
        }
        allowed -= piece.len();
        host.data(stream, piece);
    }
    host.eof(stream);
    assert_eq!(host.finish(stream).ok()["bytes"].as_u64(), Some(content.len() as u64));
    assert!(std::fs::read(&path).unwrap() == content);
    let stream = host.request("read", map([("path", place())]));
    assert!(host.finish(stream).out == content);
    // A cut upload leaves the old file; the stream's RESULT still comes.
    let stream = host.request("write", map([("path", place())]));
    while !matches!(host.next_on(stream), Message::Credit(0, _)) {}
    host.data(stream, b"half");
    host.cancel(stream);
    assert_eq!(host.finish(stream).error_code(), "cancelled");
    assert!(std::fs::read(&path).unwrap() == content);
    // A lost connection ends those that only served it.
    let stream = host.request("read", map([("path", place())]));
    host.credit(stream, 1, 10);
    drop(host);
    let mut host = agent.connect();
    assert_eq!(host.ok("stat", map([("path", place())]))["stat"]["size"].as_u64(), Some(content.len() as u64));
}

/// Refuse a stream too many, and accept again when one is gone.
#[test]
fn stream_limit() {
    let agent = Agent::start_with(serde_json::json!({ "max_streams": 2, "max_procs": 3 }));
    let mut host = agent.connect();
    let sleeper = |id: &str| map([("id", id.into()), ("argv", argv(&["sleep", "1000"]))]);
    let (one, _) = host.open("exec", sleeper("a"));
    let (_two, _) = host.open("exec", sleeper("b"));
    assert_eq!(host.code("info", map([])), "exhausted");
    host.cancel(one);
    host.finish(one).ok();
    host.ok("info", map([]));
    let detached = |id: &str| map([("id", id.into()), ("argv", argv(&["sleep", "1000"])), ("detach", true.into())]);
    host.ok("exec", detached("c"));
    host.ok("exec", detached("d"));
    assert_eq!(host.code("exec", detached("e")), "exhausted");
}

/// End the sandbox on request and at its deadline, with a last word, and leave no process behind.
#[test]
fn shutdown_and_deadline() {
    for by_deadline in [false, true] {
        let mut agent = Agent::start();
        let mut host = agent.connect();
        let (_, event) =
            host.open("exec", map([("id", "s".into()), ("shell", "setsid sleep 1000 & sleep 1000".into())]));
        let pid = event["started"]["pid"].as_i64().unwrap();
        if by_deadline {
            host.ok("configure", map([("deadline_ms", 50.into())]));
        } else {
            host.ok("shutdown", map([("reason", "done".into())]));
        }
        match host.next_on(0) {
            Message::Other(Kind::Bye, payload) => {
                let bye = rmpv::decode::read_value(&mut payload.as_slice()).unwrap();
                assert_eq!(bye["reason"], if by_deadline { "deadline" } else { "done" }.into());
            }
            other => panic!("{other:?}"),
        }
        let mut status = None;
        eventually("the agent ends", || {
            status = agent.child.try_wait().unwrap();
            status.is_some()
        });
        assert!(status.unwrap().success());
        assert!(!alive(pid));
    }
}

/// Keep the agent's memory and descriptors from its own children.
#[test]
fn the_agent_is_closed_to_others() {
    let agent = Agent::start();
    let mut host = agent.connect();
    host.ok("info", map([]));
    let status = std::fs::read_to_string(format!("/proc/{}/status", agent.pid())).unwrap();
    assert!(status.contains("SigBlk:"), "{status}");
    assert_eq!(
        std::os::unix::fs::MetadataExt::uid(&std::fs::metadata(format!("/proc/{}/mem", agent.pid())).unwrap()),
        0
    );
    let environ = std::fs::read(format!("/proc/{}/cmdline", agent.pid())).unwrap();
    assert!(!environ.windows(8).any(|w| w == b"aaaaaaaa"));
}
