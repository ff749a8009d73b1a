//! Users of the sandbox, read from its own /etc/passwd and /etc/group by hand: a static binary has no NSS.

use crate::op::OpError;

const MOST_ID: u32 = 65_534;
const MOST_BYTES: u64 = 4 * 1024 * 1024;
const MOST_GROUPS: usize = 64;

/// The user a process runs as.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    pub uid: u32,
    pub gid: u32,
    pub groups: Vec<u32>,
    pub name: Option<Vec<u8>>,
    pub home: Option<Vec<u8>>,
    pub shell: Option<Vec<u8>>,
}

/// The two databases, as bytes.
pub struct Accounts {
    passwd: Vec<u8>,
    group: Vec<u8>,
}

fn unknown(what: &str, name: &str) -> OpError {
    OpError::new("user_not_found", format!("no {what} `{name}` in the sandbox"))
}

impl Accounts {
    pub fn load() -> Self {
        Self { passwd: read_small("/etc/passwd"), group: read_small("/etc/group") }
    }

    pub fn from_bytes(passwd: &[u8], group: &[u8]) -> Self {
        Self { passwd: passwd.to_vec(), group: group.to_vec() }
    }

    /// `name`, `uid`, `name:group` or `uid:gid`. Digits are always a number, never a name.
    pub fn resolve(&self, spec: &str) -> Result<User, OpError> {
        let (user, group) = match spec.split_once(':') {
            Some((user, group)) => (user, Some(group)),
            None => (spec, None),
        };
        let mut found = match parse_id(user)? {
            Some(uid) => self.by_uid(uid).unwrap_or_else(|| User::bare(uid)),
            None => self.by_name(user).ok_or_else(|| unknown("user", user))?,
        };
        if let Some(group) = group {
            found.gid = match parse_id(group)? {
                Some(gid) => gid,
                None => self.gid_of(group).ok_or_else(|| unknown("group", group))?,
            };
        }
        if found.uid > MOST_ID || found.gid > MOST_ID {
            return Err(OpError::invalid("user and group ids must be within 0..65534"));
        }
        found.groups = match &found.name {
            Some(name) => self.groups_of(name, found.gid),
            None => vec![found.gid],
        };
        Ok(found)
    }

    pub fn by_uid(&self, uid: u32) -> Option<User> {
        self.users().find(|user| user.uid == uid)
    }

    fn by_name(&self, name: &str) -> Option<User> {
        self.users().find(|user| user.name.as_deref() == Some(name.as_bytes()))
    }

    fn users(&self) -> impl Iterator<Item = User> + '_ {
        self.passwd.split(|b| *b == b'\n').filter_map(|line| {
            let mut fields = line.split(|b| *b == b':');
            let name = fields.next().filter(|name| !name.is_empty())?;
            let _password = fields.next()?;
            let uid = number(fields.next()?)?;
            let gid = number(fields.next()?)?;
            let _comment = fields.next()?;
            let home = fields.next().filter(|home| home.starts_with(b"/")).map(<[u8]>::to_vec);
            let shell = fields.next().filter(|shell| shell.starts_with(b"/")).map(<[u8]>::to_vec);
            Some(User { uid, gid, groups: vec![gid], name: Some(name.to_vec()), home, shell })
        })
    }

    fn gid_of(&self, name: &str) -> Option<u32> {
        self.group_lines().find(|(group, _, _)| *group == name.as_bytes()).map(|(_, gid, _)| gid)
    }

    fn groups_of(&self, user: &[u8], gid: u32) -> Vec<u32> {
        let mut all = vec![gid];
        for (_, group, members) in self.group_lines() {
            let member = members.split(|b| *b == b',').any(|name| name == user);
            if member && group <= MOST_ID && !all.contains(&group) && all.len() < MOST_GROUPS {
                all.push(group);
            }
        }
        all
    }

    fn group_lines(&self) -> impl Iterator<Item = (&[u8], u32, &[u8])> {
        self.group.split(|b| *b == b'\n').filter_map(|line| {
            let mut fields = line.split(|b| *b == b':');
            let name = fields.next().filter(|name| !name.is_empty())?;
            let _password = fields.next()?;
            let gid = number(fields.next()?)?;
            Some((name, gid, fields.next().unwrap_or_default()))
        })
    }
}

impl User {
    fn bare(uid: u32) -> Self {
        Self { uid, gid: uid, groups: vec![uid], name: None, home: None, shell: None }
    }
}

/// A plain decimal number is an id; anything that only looks like one is refused rather than taken as a name.
fn parse_id(text: &str) -> Result<Option<u32>, OpError> {
    let bad = || OpError::invalid(format!("`{text}` is no user or group"));
    let first = text.bytes().next().ok_or_else(bad)?;
    if text.bytes().all(|b| b.is_ascii_digit()) {
        let id = text.parse::<u32>().ok().filter(|id| *id <= MOST_ID);
        return id.map(Some).ok_or_else(|| OpError::invalid("user and group ids must be within 0..65534"));
    }
    let name = text.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-$".contains(&b)) && text.len() <= 256;
    if first.is_ascii_digit() || first == b'-' || !name {
        return Err(bad());
    }
    Ok(None)
}

fn number(field: &[u8]) -> Option<u32> {
    std::str::from_utf8(field).ok().filter(|text| text.bytes().all(|b| b.is_ascii_digit()))?.parse().ok()
}

fn read_small(path: &str) -> Vec<u8> {
    use std::io::Read;
    use std::os::unix::fs::OpenOptionsExt;
    let mut out = Vec::new();
    let file = std::fs::OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path);
    if let Ok(file) = file {
        if file.metadata().is_ok_and(|meta| meta.is_file()) && file.take(MOST_BYTES).read_to_end(&mut out).is_err() {
            out.clear();
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn accounts() -> Accounts {
        Accounts::from_bytes(
            b"root:x:0:0:root:/root:/bin/bash\nann:x:1000:100:Ann:/home/ann:/bin/sh\nbad line\nhuge:x:70000:70000::/:/bin/sh\n1234:x:0:0::/:/bin/sh\n",
            b"root:x:0:\nusers:x:100:\nwheel:x:10:root,ann\ndocker:x:999:ann\n",
        )
    }

    #[test]
    fn finds_names_and_numbers() {
        let ann = accounts().resolve("ann").unwrap();
        assert_eq!((ann.uid, ann.gid, ann.groups), (1000, 100, vec![100, 10, 999]));
        let two = accounts().resolve("2:3").unwrap();
        assert_eq!((two.uid, two.gid, two.groups), (2, 3, vec![3]));
        assert_eq!(accounts().resolve("ann:wheel").unwrap().gid, 10);
        assert_eq!(accounts().resolve("1000").unwrap().name.as_deref(), Some(b"ann".as_slice()));
        assert_eq!(accounts().resolve("1234").unwrap().uid, 1234, "digits are a number even if a user is called so");
    }

    #[test]
    fn refuses_what_parses_differently_elsewhere() {
        for spec in [
            "",
            ":",
            "0:",
            ":0",
            "-1",
            "+1",
            "0x0",
            "65535",
            "4294967297",
            "2147483648",
            "1.0",
            " 1",
            "1 ",
            "nobody-here",
            "huge",
            "0:0:0",
            "1e3",
            "root\n",
            "root\0",
            "\u{0661}",
        ] {
            assert!(accounts().resolve(spec).is_err(), "{spec:?}");
        }
    }
}
