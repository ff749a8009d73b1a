//! The `start` message. Unknown fields are refused: a launcher that ignores part of an order would be a hole.

use crate::failure::{Failure, Result};
use serde_json::{Map, Value};

pub struct Start {
    /// An existing directory every ancestor of which anybody may traverse; covered by a tmpfs in our own mount namespace only.
    pub stage: String,
    pub disk: Disk,
    /// Whether ids are shifted into the sandbox's range by the mounts. Not where the range begins at our own id: rootless.
    pub shift: bool,
    /// The first has an empty target and is the root; the others lie on top of it.
    pub overlays: Vec<Overlay>,
    pub binds: Vec<Bind>,
    /// Directories that must be there, and be directories, before the engine mounts on them.
    pub mountpoints: Vec<String>,
    pub read_only_root: bool,
    /// Index among the descriptors of a directory with a saved memory; the engine finds it below the stage, read-only.
    pub memory: Option<usize>,
    /// Control groups' `cgroup.procs` to be in before the engine starts; an engine that joins them itself needs none.
    pub groups: Vec<String>,
    /// For an engine that has to run inside the sandbox's own namespaces: the OCI configuration, written where it can read it.
    pub inside: Option<String>,
    /// The filter of the engine's own system calls, as a program in hexadecimal digits.
    pub filter: Option<String>,
    /// For the engine that is ours: what to start instead of `argv`.
    pub direct: Option<Direct>,
    /// For an engine inside that stays, with the sandbox's tree as all it sees and no rights: which descriptors it is given, from 3 on.
    pub jail: Option<Vec<usize>>,
    /// The size of the machine as programs, or an engine inside, shall see it.
    pub seen: Option<Seen>,
    pub argv: Vec<String>,
    pub env: Vec<String>,
}

/// The limits that programs shall see as the size of the machine; 0 where none is held.
pub struct Seen {
    pub cpus: usize,
    pub memory: u64,
    pub groups: Vec<Shown>,
}

/// One of the sandbox's control groups, and under which name it is shown.
pub struct Shown {
    pub name: String,
    pub path: String,
}

pub struct Direct {
    /// The OCI configuration.
    pub config: String,
    /// Its filter of system calls, as a program in hexadecimal digits.
    pub filter: String,
    /// Index among the descriptors sent along of the file for the process id.
    pub pid_file: usize,
}

pub enum Disk {
    /// A file with an ext4 file system, or a directory. A fresh one was made for this start, so that no device can serve it yet.
    /// `of`: the first of the ids that its files have, where those are another sandbox's.
    Image { image: String, fresh: bool, of: Option<u32> },
    /// A tmpfs of that many bytes, where loop devices are out of reach.
    Tmpfs(u64),
}

pub struct Overlay {
    pub target: String,
    /// Top-most first.
    pub lowers: Vec<String>,
    /// Name of this overlay's directories on the disk.
    pub name: String,
}

pub struct Bind {
    pub source: Source,
    pub target: String,
    pub read_only: bool,
    pub idmap: bool,
}

pub enum Source {
    /// Index among the descriptors sent along.
    Fd(usize),
    /// A directory of the disk, made when missing.
    Disk(String),
    /// A directory of another sandbox's disk image.
    Image { image: String, directory: String },
    /// A device of the host, as one of the sandbox's root's own.
    Device(String),
    /// Something of the host, opened with the rights of that user, as whom root inside then acts on it.
    Host { path: String, uid: u32, gid: u32 },
}

pub fn parse(message: &[u8]) -> Result<Start> {
    let value = serde_json::from_slice(message).map_err(|e| bad(&format!("not JSON: {e}")))?;
    let mut order = Fields::of(value)?;
    let start = Start {
        stage: order.text("stage")?,
        disk: disk(order.take("disk")?)?,
        shift: order.flag("shift")?,
        overlays: order.list("overlays", overlay)?,
        binds: order.list("binds", bind)?,
        mountpoints: order.list("mountpoints", text)?,
        read_only_root: order.flag("read_only_root")?,
        memory: if order.has("memory") { Some(order.number("memory")? as usize) } else { None },
        groups: order.list("groups", text)?,
        inside: optional(order.take("inside")?, text)?,
        filter: if order.has("filter") { Some(order.text("filter")?) } else { None },
        direct: if order.has("direct") { Some(direct(order.take("direct")?)?) } else { None },
        jail: if order.has("jail") { Some(order.list("jail", index)?) } else { None },
        seen: if order.has("seen") { Some(seen(order.take("seen")?)?) } else { None },
        argv: order.list("argv", text)?,
        env: order.list("env", text)?,
    };
    order.end()?;
    Ok(start)
}

fn seen(value: Value) -> Result<Seen> {
    let mut fields = Fields::of(value)?;
    let seen = Seen {
        cpus: fields.number("cpus")? as usize,
        memory: fields.number("memory")?,
        groups: fields.list("groups", shown)?,
    };
    fields.end()?;
    Ok(seen)
}

fn shown(value: Value) -> Result<Shown> {
    let mut fields = Fields::of(value)?;
    let shown = Shown { name: fields.text("name")?, path: fields.text("path")? };
    fields.end()?;
    Ok(shown)
}

fn direct(value: Value) -> Result<Direct> {
    let mut fields = Fields::of(value)?;
    let direct = Direct {
        config: fields.text("config")?,
        filter: fields.text("filter")?,
        pid_file: fields.number("pid_file")? as usize,
    };
    fields.end()?;
    Ok(direct)
}

fn disk(value: Value) -> Result<Disk> {
    let mut fields = Fields::of(value)?;
    let disk = if fields.has("image") {
        Disk::Image {
            image: fields.text("image")?,
            fresh: fields.has("fresh") && fields.flag("fresh")?,
            of: if fields.has("of") { Some(fields.id("of")?) } else { None },
        }
    } else {
        Disk::Tmpfs(fields.number("tmpfs")?)
    };
    fields.end()?;
    Ok(disk)
}

fn overlay(value: Value) -> Result<Overlay> {
    let mut fields = Fields::of(value)?;
    let overlay =
        Overlay { target: fields.text("target")?, lowers: fields.list("lowers", text)?, name: fields.text("name")? };
    fields.end()?;
    Ok(overlay)
}

fn bind(value: Value) -> Result<Bind> {
    let mut fields = Fields::of(value)?;
    let mut from = Fields::of(fields.take("source")?)?;
    let source = if from.has("fd") {
        Source::Fd(from.number("fd")? as usize)
    } else if from.has("device") {
        Source::Device(from.text("device")?)
    } else if from.has("path") {
        Source::Host { path: from.text("path")?, uid: from.id("uid")?, gid: from.id("gid")? }
    } else if from.has("image") {
        Source::Image { image: from.text("image")?, directory: from.text("directory")? }
    } else {
        Source::Disk(from.text("disk")?)
    };
    from.end()?;
    let bind = Bind {
        source,
        target: fields.text("target")?,
        read_only: fields.flag("read_only")?,
        idmap: fields.flag("idmap")?,
    };
    fields.end()?;
    Ok(bind)
}

pub fn text(value: Value) -> Result<String> {
    match value {
        Value::String(text) => Ok(text),
        other => Err(bad(&format!("{other} is not a string"))),
    }
}

fn index(value: Value) -> Result<usize> {
    let number = value.as_u64().and_then(|n| usize::try_from(n).ok());
    number.ok_or_else(|| bad(&format!("{value} is no index")))
}

fn optional<T>(value: Value, one: fn(Value) -> Result<T>) -> Result<Option<T>> {
    if value.is_null() {
        return Ok(None);
    }
    one(value).map(Some)
}

fn bad(why: &str) -> Failure {
    Failure::new("order", format!("the start message is not valid: {why}"))
}

/// An object whose fields are taken out one by one; what is left over at the end is an error.
pub struct Fields(Map<String, Value>);

impl Fields {
    pub fn of(value: Value) -> Result<Self> {
        match value {
            Value::Object(map) => Ok(Fields(map)),
            other => Err(bad(&format!("{other} is not an object"))),
        }
    }

    fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    pub fn take(&mut self, name: &str) -> Result<Value> {
        self.0.remove(name).ok_or_else(|| bad(&format!("{name} is missing")))
    }

    pub fn text(&mut self, name: &str) -> Result<String> {
        text(self.take(name)?)
    }

    fn flag(&mut self, name: &str) -> Result<bool> {
        self.take(name)?.as_bool().ok_or_else(|| bad(&format!("{name} is not true or false")))
    }

    fn number(&mut self, name: &str) -> Result<u64> {
        self.take(name)?.as_u64().ok_or_else(|| bad(&format!("{name} is not a number")))
    }

    fn id(&mut self, name: &str) -> Result<u32> {
        u32::try_from(self.number(name)?).map_err(|_| bad(&format!("{name} is not an id")))
    }

    pub fn list<T>(&mut self, name: &str, one: fn(Value) -> Result<T>) -> Result<Vec<T>> {
        match self.take(name)? {
            Value::Array(items) => items.into_iter().map(one).collect(),
            _ => Err(bad(&format!("{name} is not a list"))),
        }
    }

    pub fn end(self) -> Result<()> {
        match self.0.keys().next() {
            Some(name) => Err(bad(&format!("unknown field {name}"))),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"{"stage":"/mnt","disk":{"tmpfs":1},"shift":true,"overlays":[{"target":"","lowers":["/a"],"name":"root"}],
        "binds":[{"source":{"disk":"w"},"target":"w","read_only":false,"idmap":true}],"mountpoints":["proc"],
        "read_only_root":false,"groups":[],"inside":null,"argv":["/bin/true"],"env":[]}"#;

    #[test]
    fn a_full_order_is_understood() {
        assert!(parse(GOOD.as_bytes()).is_ok());
    }

    #[test]
    fn an_unknown_or_missing_field_is_refused_at_every_level() {
        for (old, new) in [
            ("\"env\":[]", "\"env\":[],\"x\":1"),
            ("\"env\":[]", "\"umask\":1"),
            ("\"env\":[]", "\"env\":[],\"jail\":[\"x\"]"),
            ("{\"disk\":\"w\"}", "{\"device\":\"/dev/kvm\",\"x\":1}"),
            ("\"env\":[]", "\"env\":[],\"direct\":{\"config\":\"\",\"filter\":\"\"}"),
            ("\"env\":[]", "\"env\":[],\"direct\":{\"config\":\"\",\"filter\":\"\",\"pid_file\":4,\"x\":1}"),
            ("{\"tmpfs\":1}", "{\"tmpfs\":1,\"image\":\"/x\"}"),
            ("{\"tmpfs\":1}", "{\"image\":\"/x\",\"fresh\":1}"),
            ("\"name\":\"root\"", "\"name\":\"root\",\"x\":1"),
            ("\"idmap\":true", "\"idmap\":true,\"x\":1"),
            ("{\"disk\":\"w\"}", "{\"disk\":\"w\",\"directory\":\"x\"}"),
            ("\"read_only\":false", "\"read_only\":\"no\""),
        ] {
            assert!(parse(GOOD.replace(old, new).as_bytes()).is_err(), "{new}");
        }
    }
}
