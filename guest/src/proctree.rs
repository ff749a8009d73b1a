//! Processes as /proc shows them: who descends from whom, and what they are.

use std::collections::{HashMap, HashSet};

use rmpv::Value;

use crate::op::{map, text_or_bin};

/// One line of the process table.
#[derive(Debug, Clone)]
pub struct Entry {
    pub pid: i32,
    pub ppid: i32,
    pub group: i32,
    pub session: i32,
    pub state: u8,
    pub comm: Vec<u8>,
    pub rss_pages: u64,
    /// SIGKILL was sent to it; it runs no instruction of its own any more.
    pub is_killed: bool,
}

impl Entry {
    /// Dead, only not waited for yet.
    pub fn is_dead(&self) -> bool {
        matches!(self.state, b'Z' | b'X' | b'x')
    }
}

/// Every process that can be seen.
pub fn scan() -> Vec<Entry> {
    let Ok(dir) = std::fs::read_dir("/proc") else { return Vec::new() };
    dir.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok()).filter_map(look).collect()
}

/// The entry of one process.
pub fn look(pid: i32) -> Option<Entry> {
    use std::io::Read;
    let mut buf = [0; 1024];
    let got = std::fs::File::open(format!("/proc/{pid}/stat")).ok()?.read(&mut buf).ok()?;
    parse_stat(buf.get(..got)?)
}

/// The name of a process may hold spaces and parentheses: the last `)` ends it.
fn parse_stat(raw: &[u8]) -> Option<Entry> {
    let open = raw.iter().position(|b| *b == b'(')?;
    let close = raw.iter().rposition(|b| *b == b')')?;
    let pid = std::str::from_utf8(raw.get(..open)?).ok()?.trim().parse().ok()?;
    let comm = raw.get(open + 1..close)?.to_vec();
    let fields: Vec<&str> = std::str::from_utf8(raw.get(close + 1..)?).ok()?.split_ascii_whitespace().collect();
    let number = |at: usize| fields.get(at).and_then(|f| f.parse::<i64>().ok());
    Some(Entry {
        pid,
        ppid: number(1)? as i32,
        group: number(2)? as i32,
        session: number(3)? as i32,
        state: *fields.first()?.as_bytes().first()?,
        comm,
        rss_pages: number(21).unwrap_or(0).max(0) as u64,
        is_killed: number(28).unwrap_or(0) & (1 << (libc::SIGKILL - 1)) != 0,
    })
}

/// All that descends from one of `roots` (not the roots themselves), or is in the session `session`.
pub fn below<'a>(table: &'a [Entry], roots: &[i32], session: Option<i32>) -> Vec<&'a Entry> {
    let mut children: HashMap<i32, Vec<&Entry>> = HashMap::new();
    for entry in table {
        children.entry(entry.ppid).or_default().push(entry);
    }
    let mut seen: HashSet<i32> = roots.iter().copied().collect();
    let mut found = Vec::new();
    let mut queue: Vec<i32> = roots.to_vec();
    if let Some(session) = session {
        for entry in table.iter().filter(|e| e.session == session) {
            if seen.insert(entry.pid) {
                found.push(entry);
                queue.push(entry.pid);
            }
        }
    }
    while let Some(pid) = queue.pop() {
        for entry in children.get(&pid).into_iter().flatten() {
            if seen.insert(entry.pid) {
                found.push(entry);
                queue.push(entry.pid);
            }
        }
    }
    found
}

/// One process for the `ps` operation.
pub fn describe(entry: &Entry) -> Value {
    let mut cmdline = std::fs::read(format!("/proc/{}/cmdline", entry.pid)).unwrap_or_default();
    cmdline.truncate(1024);
    let words: Vec<Value> = cmdline
        .strip_suffix(&[0])
        .unwrap_or(&cmdline)
        .split(|b| *b == 0)
        .filter(|_| !cmdline.is_empty())
        .map(text_or_bin)
        .collect();
    let uid = std::fs::read(format!("/proc/{}/status", entry.pid)).ok().and_then(|raw| {
        let text = String::from_utf8_lossy(&raw).into_owned();
        let line = text.lines().find(|l| l.starts_with("Uid:"))?;
        line.split_ascii_whitespace().nth(1)?.parse::<u32>().ok()
    });
    map([
        ("pid", entry.pid.into()),
        ("ppid", entry.ppid.into()),
        ("comm", text_or_bin(&entry.comm)),
        ("state", Value::from((entry.state as char).to_string())),
        ("cmdline", Value::Array(words)),
        ("rss_kb", (entry.rss_pages * page_kb()).into()),
        ("uid", uid.map_or(Value::Nil, Value::from)),
    ])
}

pub fn page_kb() -> u64 {
    u64::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096) / 1024
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hostile_name_does_not_confuse_the_parser() {
        let entry = parse_stat(b"12 (a) R 1 (x) S 5 12 9 0 -1 4194560 1 1 1 1 1 1 1 1 20 0 1 0 100 1000 7 99").unwrap();
        assert_eq!((entry.pid, entry.ppid, entry.group, entry.session), (12, 5, 12, 9));
        assert_eq!((entry.state, entry.rss_pages), (b'S', 7));
        assert_eq!(entry.comm, b"a) R 1 (x");
        assert!(parse_stat(b"").is_none() && parse_stat(b"1 (x").is_none() && parse_stat(b"1 )x(").is_none());
    }

    #[test]
    fn a_process_that_was_sent_sigkill_shows_it() {
        let front = b"12 (x) S 5 12 9 0 -1 4194560 1 1 1 1 1 1 1 1 20 0 1 0 100 1000 7 99 1 1 1 1 1 ".to_vec();
        let killed =
            |pending: &str| parse_stat(&[&front, pending.as_bytes(), b" 0 4096 0"].concat()).unwrap().is_killed;
        assert!(killed("256") && killed("258"));
        assert!(!killed("0") && !killed("512"));
    }

    #[test]
    fn cycles_and_sessions_are_walked_once() {
        let entry = |pid, ppid, session| Entry {
            pid,
            ppid,
            group: pid,
            session,
            state: b'S',
            comm: vec![],
            rss_pages: 0,
            is_killed: false,
        };
        let table = [entry(2, 1, 2), entry(3, 2, 3), entry(4, 5, 9), entry(5, 4, 9), entry(6, 1, 3)];
        let pids = |found: Vec<&Entry>| {
            let mut p: Vec<i32> = found.iter().map(|e| e.pid).collect();
            p.sort();
            p
        };
        assert_eq!(pids(below(&table, &[2], None)), [3]);
        assert_eq!(pids(below(&table, &[4], None)), [5]);
        assert_eq!(pids(below(&table, &[2], Some(3))), [3, 6]);
    }
}
