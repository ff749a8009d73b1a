//! Orders of a gateway: activate, canary, status. One at a time, on a thread of its own.

use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{mpsc, Arc};
use std::time::{Duration, Instant};

use serde_json::{json, Map, Value};

use super::canary::{self, Seen};
use super::egress::Steering;
use super::{Handed, Shared};
use crate::boot::{Boot, MAX_BOOT};
use crate::sys;

const VERSION: u64 = 1;
const ARRIVE: Duration = Duration::from_secs(10);
const BEGIN: Duration = Duration::from_secs(20);
const MOST_CANARIES: usize = 8;
const MOST_UID: usize = 128;
/// Keys of the boot message that a gateway may set.
const BOOT_KEYS: &[&str] = &[
    "sandbox",
    "agent_secret",
    "host_secret",
    "env",
    "hostname",
    "deadline_ms",
    "cpus",
    "rlimits",
    "filter",
    "memory",
    "tmp_quota",
    "warm",
    "max_streams",
    "max_procs",
];

pub struct Orders {
    shared: Arc<Shared>,
    queue: OwnedFd,
    /// Where the agent takes its connections; its own once it runs.
    agent_end: Option<OwnedFd>,
    hand: mpsc::SyncSender<Handed>,
    egress: Steering,
    active: Option<Active>,
    refused: u64,
}

struct Active {
    claim: String,
    pod: String,
    resolver: bool,
}

/// Why an order is not carried out: a code for programs, and a text for people.
#[derive(Debug)]
struct No(&'static str, String);

impl From<String> for No {
    fn from(text: String) -> Self {
        Self("bad_request", text)
    }
}

impl Orders {
    pub fn new(
        shared: Arc<Shared>,
        queue: OwnedFd,
        agent_end: OwnedFd,
        hand: mpsc::SyncSender<Handed>,
        egress: Steering,
    ) -> Self {
        Self { shared, queue, agent_end: Some(agent_end), hand, egress, active: None, refused: 0 }
    }

    pub fn run(mut self) {
        loop {
            sys::await_input(self.queue.as_raw_fd(), -1);
            match sys::take_handed(self.queue.as_raw_fd()) {
                Ok(fd) => drop(self.serve(UnixStream::from(fd))),
                Err(error) if sys::would_block(&error) => {}
                Err(_) => return,
            }
        }
    }

    /// Reads an order and answers it. Without an order there is no answer.
    fn serve(&mut self, mut peer: UnixStream) -> io::Result<()> {
        peer.set_nonblocking(false)?;
        peer.set_write_timeout(Some(ARRIVE))?;
        let answer = match read_order(&mut peer)?.and_then(|raw| parse(&raw)) {
            Ok(order) => self.obey(&order),
            Err(no) => Err(no),
        };
        let answer = match answer {
            Ok(value) => json!({"v": VERSION, "ok": value}),
            Err(No(code, message)) => json!({"v": VERSION, "err": {"code": code, "message": message}}),
        };
        let body = answer.to_string();
        let size = u32::try_from(body.len()).unwrap_or(0).to_be_bytes();
        peer.write_all(&[size.as_slice(), body.as_bytes()].concat())
    }

    fn obey(&mut self, order: &Map<String, Value>) -> Result<Value, No> {
        match order.get("op").and_then(Value::as_str) {
            Some("activate") => self.activate(order),
            Some("canary") => {
                check_keys(order, &["v", "op", "canaries"], "")?;
                let seen = canary::dial(&canaries(order)?);
                let open = seen.iter().any(Seen::is_open);
                Ok(json!({"canaries": shown(&seen), "open": open}))
            }
            Some("status") => {
                check_keys(order, &["v", "op"], "")?;
                Ok(json!({
                    "version": env!("CARGO_PKG_VERSION"),
                    "activated": self.active.is_some(),
                    "claim": self.active.as_ref().map(|active| &active.claim),
                    "uptime_ms": self.shared.started.elapsed().as_millis() as u64,
                    "refused": self.refused,
                }))
            }
            _ => Err(No("bad_request", "`op` must be activate, canary or status".into())),
        }
    }

    fn activate(&mut self, order: &Map<String, Value>) -> Result<Value, No> {
        let (claim, pod) = (uid(order, "claim")?, uid(order, "pod")?);
        if let Some(active) = &self.active {
            if (&active.claim, &active.pod) == (&claim, &pod) {
                return Ok(json!({
                    "claim": claim, "again": true, "canaries": [], "resolver": active.resolver, "refused": self.refused,
                }));
            }
            self.refused += 1;
            self.shared
                .log
                .say(&format!("refused the activation for claim {claim}: this is the pod of {}", active.claim));
            return Err(No("other_claim", "this pod serves another claim".into()));
        }
        check_keys(order, &["v", "op", "claim", "pod", "boot", "canaries", "unrestricted"], "")?;
        let unrestricted = match order.get("unrestricted") {
            None => false,
            Some(value) => value.as_bool().ok_or_else(|| "`unrestricted` must be true or false".to_owned())?,
        };
        let targets = canaries(order)?;
        if targets.is_empty() && !unrestricted {
            return Err("`canaries` is empty, and the network is not `unrestricted`".to_owned().into());
        }
        let boot = self.read_boot(order)?;
        let secrets = (boot.host_secret.clone(), boot.agent_secret.clone());
        let seen = canary::dial(&targets);
        if let Some(open) = seen.iter().find(|seen| seen.is_open()) {
            self.shared.log.say(&format!("not activated: a connection to {} works", open.target));
            return Err(No("egress_open", format!("a connection to {} works, which no policy allows", open.target)));
        }
        let resolver = self.begin(boot, secrets)?;
        self.active = Some(Active { claim: claim.clone(), pod, resolver });
        Ok(json!({
            "claim": claim, "again": false, "canaries": shown(&seen), "resolver": resolver, "refused": self.refused,
        }))
    }

    /// Lets the agent begin; true when it also answers names.
    fn begin(&mut self, mut boot: Boot, secrets: (String, String)) -> Result<bool, No> {
        let failed = |text: &str| No("failed", text.to_owned());
        let Some(end) = self.agent_end.take() else { return Err(failed("an activation has failed before")) };
        boot.listen_fd = Some(end.into_raw_fd());
        boot.handed = true;
        let resolver = self.egress.open(secrets);
        let (done, result) = mpsc::sync_channel(1);
        self.hand.send(Handed { boot, done }).map_err(|_| failed("the agent has ended"))?;
        match result.recv_timeout(BEGIN) {
            Ok(Ok(())) => Ok(resolver),
            Ok(Err(error)) => {
                self.shared.log.say(&format!("not activated: {error}"));
                Err(failed(&error))
            }
            Err(_) => Err(failed("the agent did not begin in time")),
        }
    }

    fn read_boot(&self, order: &Map<String, Value>) -> Result<Boot, No> {
        let boot = order.get("boot").and_then(Value::as_object).ok_or_else(|| "`boot` must be an object".to_owned())?;
        check_keys(boot, BOOT_KEYS, "boot.")?;
        let mut boot = boot.clone();
        boot.insert("listen_fd".into(), json!(0)); // where its connections come from is decided in `begin`
        Boot::parse(Value::Object(boot).to_string().as_bytes()).map_err(No::from)
    }
}

/// The bytes of an order; the outer error is a peer that went away or was too slow.
fn read_order(peer: &mut UnixStream) -> io::Result<Result<Vec<u8>, No>> {
    let until = Instant::now() + ARRIVE;
    let mut size = [0; 4];
    read_all(peer, &mut size, until)?;
    let size = u32::from_be_bytes(size) as usize;
    if size == 0 || size > MAX_BOOT {
        return Ok(Err(format!("an order has from 1 to {MAX_BOOT} bytes").into()));
    }
    let mut body = vec![0; size];
    read_all(peer, &mut body, until)?;
    Ok(Ok(body))
}

fn read_all(peer: &mut UnixStream, mut room: &mut [u8], until: Instant) -> io::Result<()> {
    while !room.is_empty() {
        let left = until.saturating_duration_since(Instant::now());
        peer.set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
        let count = peer.read(room)?;
        if count == 0 || left.is_zero() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        room = room.get_mut(count..).unwrap_or_default();
    }
    Ok(())
}

fn parse(raw: &[u8]) -> Result<Map<String, Value>, No> {
    let order = match serde_json::from_slice(raw) {
        Ok(Value::Object(order)) => order,
        _ => return Err("an order is a JSON object".to_owned().into()),
    };
    match order.get("v").and_then(Value::as_u64) {
        Some(VERSION) => Ok(order),
        _ => Err(No("wrong_version", format!("`v` must be {VERSION}"))),
    }
}

fn check_keys(map: &Map<String, Value>, known: &[&str], place: &str) -> Result<(), No> {
    match map.keys().find(|key| !known.contains(&key.as_str())) {
        Some(key) => Err(format!("unknown key `{place}{key}`").into()),
        None => Ok(()),
    }
}

fn uid(order: &Map<String, Value>, key: &str) -> Result<String, No> {
    let good = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
    let text = order.get(key).and_then(Value::as_str).unwrap_or_default();
    match (1..=MOST_UID).contains(&text.len()) && text.bytes().all(good) {
        true => Ok(text.to_owned()),
        false => Err(format!("`{key}` must be a UID").into()),
    }
}

fn canaries(order: &Map<String, Value>) -> Result<Vec<SocketAddr>, No> {
    let list = order.get("canaries").and_then(Value::as_array).ok_or_else(|| "`canaries` must be a list".to_owned())?;
    if list.len() > MOST_CANARIES {
        return Err(format!("at most {MOST_CANARIES} `canaries`").into());
    }
    list.iter().map(|item| canary(item).ok_or_else(bad_canary)).collect()
}

fn bad_canary() -> No {
    No("bad_request", "a canary is {host, port}, with an address that is not on loopback".into())
}

fn canary(item: &Value) -> Option<SocketAddr> {
    let item = item.as_object()?;
    check_keys(item, &["host", "port"], "").ok()?;
    let host: IpAddr = item.get("host")?.as_str()?.parse().ok()?;
    let port = u16::try_from(item.get("port")?.as_u64()?).ok().filter(|port| *port > 0)?;
    let host = host.to_canonical();
    (!host.is_loopback() && !host.is_unspecified()).then_some(SocketAddr::new(host, port))
}

fn shown(seen: &[Seen]) -> Vec<Value> {
    seen.iter().map(Seen::to_json).collect()
}
