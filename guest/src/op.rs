//! An operation's view: its request with typed getters, its errors, and the stream it speaks on.

use rmpv::Value;
use std::ffi::OsString;
use std::os::fd::RawFd;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// The decoded map of a control message.
pub type Map = Vec<(Value, Value)>;

/// A blocking operation, run on a thread of its own.
pub type OpFn = fn(&Req, &mut dyn OpIo) -> Result<Value, OpError>;

const PATH_MAX: usize = 4096;
const NAME_MAX: usize = 255;

/// An error as it goes over the wire: a code of the protocol, a text for a person, and the errno behind it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpError {
    pub code: &'static str,
    pub message: String,
    pub errno: Option<i32>,
}

impl OpError {
    pub fn new(code: &'static str, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), errno: None }
    }

    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new("invalid_argument", message)
    }

    pub fn cancelled() -> Self {
        Self::new("cancelled", "the operation was cancelled")
    }

    pub fn from_errno(errno: i32) -> Self {
        Self { code: code_of_errno(errno), message: words_of_errno(errno), errno: Some(errno) }
    }

    /// The same error with what it was about put in front of its text.
    pub fn at(mut self, what: impl std::fmt::Display) -> Self {
        self.message = format!("{what}: {}", self.message);
        self
    }

    pub fn to_value(&self) -> Value {
        let mut map = vec![
            (Value::from("code"), Value::from(self.code)),
            (Value::from("message"), Value::from(self.message.as_str())),
        ];
        if let Some(errno) = self.errno {
            map.push((Value::from("errno"), Value::from(errno)));
        }
        Value::Map(map)
    }
}

impl std::fmt::Display for OpError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.code, self.message)
    }
}

impl std::error::Error for OpError {}

impl From<std::io::Error> for OpError {
    fn from(error: std::io::Error) -> Self {
        match error.raw_os_error() {
            Some(errno) => Self::from_errno(errno),
            None => Self::new("file_error", error.to_string()),
        }
    }
}

impl From<rustix::io::Errno> for OpError {
    fn from(errno: rustix::io::Errno) -> Self {
        Self::from_errno(errno.raw_os_error())
    }
}

/// Says in plain words what went wrong; what has no words here gets the C library's, without Rust's number behind them.
pub fn words_of_errno(errno: i32) -> String {
    let words = match errno {
        libc::ENOENT => "no such file or directory",
        libc::EEXIST => "something of that name is there already",
        libc::ENOTDIR => "a part of the path is not a directory",
        libc::EISDIR => "this is a directory, not a file",
        libc::ENOTEMPTY => "the directory is not empty",
        libc::EACCES => "the user of this operation has no right to it",
        libc::EPERM => "the sandbox does not allow this",
        libc::ENOSPC => "the disk of the sandbox is full",
        libc::EDQUOT => "the quota of the disk is used up",
        libc::ENAMETOOLONG => "the name is too long",
        libc::ELOOP => "the path leads through too many links",
        libc::EROFS => "this part of the file system is read-only",
        libc::EBUSY => "it is in use",
        libc::ETXTBSY => "the program is running and cannot be changed",
        libc::EXDEV => "the two places are on different file systems",
        libc::EMFILE | libc::ENFILE => "too many files are open in the sandbox",
        libc::ENOMEM => "the sandbox has no memory left for it",
        libc::ENOEXEC => "this is no program: its format is unknown",
        libc::ECONNREFUSED => "nothing listens there",
        _ => {
            let text = std::io::Error::from_raw_os_error(errno).to_string();
            return text.split(" (os error").next().unwrap_or_default().to_lowercase();
        }
    };
    words.to_owned()
}

fn code_of_errno(errno: i32) -> &'static str {
    match errno {
        libc::ENOENT => "file_not_found",
        libc::EEXIST => "file_exists",
        libc::ENOTDIR => "not_a_directory",
        libc::EISDIR => "is_a_directory",
        libc::ENOTEMPTY => "not_empty",
        libc::EACCES | libc::EPERM => "file_permission",
        libc::ENOSPC | libc::EDQUOT => "disk_full",
        libc::ENAMETOOLONG => "name_too_long",
        libc::ELOOP => "too_many_links",
        libc::EROFS => "read_only",
        libc::EBUSY | libc::ETXTBSY => "busy",
        libc::EXDEV => "cross_device",
        libc::EINVAL => "invalid_argument",
        libc::EMFILE | libc::ENFILE | libc::ENOMEM | libc::EAGAIN => "exhausted",
        _ => "file_error",
    }
}

/// Stream operations open to a blocking operation. The agent implements it over the bridge to its event loop.
pub trait OpIo: Send {
    /// Sends an EVENT. Blocks while too much is queued; `cancelled` when the stream is gone.
    fn event(&mut self, value: Value) -> Result<(), OpError>;
    /// Sends DATA on channel 1 in frames of at most 256 KiB. Blocks for credit.
    fn send(&mut self, data: &[u8]) -> Result<(), OpError>;
    /// The next DATA of channel 0; `None` at its EOF.
    fn recv(&mut self) -> Result<Option<Vec<u8>>, OpError>;
    fn cancelled(&self) -> bool;
    /// Becomes readable on cancel.
    fn wake_fd(&self) -> RawFd;
}

/// A request: the map of a REQUEST frame, read through getters that refuse wrong types.
#[derive(Debug, Clone, Default)]
pub struct Req {
    map: Map,
}

impl Req {
    pub fn new(map: Map) -> Self {
        Self { map }
    }

    /// The value under `key`; nil counts as absent.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.map.iter().find(|(k, _)| k.as_str() == Some(key)).map(|(_, v)| v).filter(|v| !v.is_nil())
    }

    /// Whether the key is there at all, even with nil.
    pub fn mentions(&self, key: &str) -> bool {
        self.map.iter().any(|(k, _)| k.as_str() == Some(key))
    }

    pub fn has(&self, key: &str) -> bool {
        self.get(key).is_some()
    }

    pub fn str(&self, key: &str) -> Result<&str, OpError> {
        self.opt_str(key)?.ok_or_else(|| missing(key))
    }

    pub fn opt_str(&self, key: &str) -> Result<Option<&str>, OpError> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => value.as_str().map(Some).ok_or_else(|| mistyped(key, "a string")),
        }
    }

    /// A str or bin value as bytes.
    pub fn opt_bytes(&self, key: &str) -> Result<Option<&[u8]>, OpError> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => bytes_of(value).map(Some).ok_or_else(|| mistyped(key, "a string")),
        }
    }

    pub fn bytes(&self, key: &str) -> Result<&[u8], OpError> {
        self.opt_bytes(key)?.ok_or_else(|| missing(key))
    }

    pub fn u64(&self, key: &str) -> Result<u64, OpError> {
        self.opt_u64(key)?.ok_or_else(|| missing(key))
    }

    pub fn opt_u64(&self, key: &str) -> Result<Option<u64>, OpError> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => value.as_u64().map(Some).ok_or_else(|| mistyped(key, "a number that is not negative")),
        }
    }

    pub fn opt_i64(&self, key: &str) -> Result<Option<i64>, OpError> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => value.as_i64().map(Some).ok_or_else(|| mistyped(key, "a whole number")),
        }
    }

    /// A finite number, whole or not.
    pub fn opt_f64(&self, key: &str) -> Result<Option<f64>, OpError> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => value.as_f64().filter(|n| n.is_finite()).map(Some).ok_or_else(|| mistyped(key, "a number")),
        }
    }

    pub fn opt_bool(&self, key: &str, default: bool) -> Result<bool, OpError> {
        match self.get(key) {
            None => Ok(default),
            Some(value) => value.as_bool().ok_or_else(|| mistyped(key, "true or false")),
        }
    }

    /// A list of str or bin values; empty when absent.
    pub fn bytes_list(&self, key: &str) -> Result<Vec<Vec<u8>>, OpError> {
        let Some(value) = self.get(key) else { return Ok(Vec::new()) };
        let items = value.as_array().ok_or_else(|| mistyped(key, "a list of strings"))?;
        items
            .iter()
            .map(|item| bytes_of(item).map(<[u8]>::to_vec).ok_or_else(|| mistyped(key, "a list of strings")))
            .collect()
    }

    pub fn opt_map(&self, key: &str) -> Result<Option<&Map>, OpError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Map(map)) => Ok(Some(map)),
            Some(_) => Err(mistyped(key, "a map")),
        }
    }

    /// A path, checked and made absolute.
    pub fn path(&self, key: &str) -> Result<PathBuf, OpError> {
        check_path(self.bytes(key)?)
    }

    pub fn opt_path(&self, key: &str) -> Result<Option<PathBuf>, OpError> {
        self.opt_bytes(key)?.map(check_path).transpose()
    }

    /// A list of paths, each checked and made absolute.
    pub fn paths(&self, key: &str) -> Result<Vec<PathBuf>, OpError> {
        self.bytes_list(key)?.iter().map(|raw| check_path(raw)).collect()
    }
}

/// The bytes of a str or bin value.
pub fn bytes_of(value: &Value) -> Option<&[u8]> {
    match value {
        Value::String(text) => Some(text.as_bytes()),
        Value::Binary(bytes) => Some(bytes),
        _ => None,
    }
}

/// Bytes as str when they are UTF-8, else bin: how the protocol writes names that may be any bytes.
pub fn text_or_bin(bytes: &[u8]) -> Value {
    match std::str::from_utf8(bytes) {
        Ok(text) => Value::from(text),
        Err(_) => Value::from(bytes.to_vec()),
    }
}

/// A map value from pairs with text keys.
pub fn map<const N: usize>(pairs: [(&str, Value); N]) -> Value {
    Value::Map(pairs.into_iter().map(|(key, value)| (Value::from(key), value)).collect())
}

/// Where relative paths start: /workspace if there is one, else the root.
pub fn base_dir() -> &'static Path {
    if Path::new("/workspace").is_dir() {
        Path::new("/workspace")
    } else {
        Path::new("/")
    }
}

/// Checks a path from the wire and makes it absolute. Components are left as they are: `..` is the kernel's to resolve.
pub fn check_path(raw: &[u8]) -> Result<PathBuf, OpError> {
    if raw.is_empty() {
        return Err(OpError::invalid("the path is empty"));
    }
    if raw.contains(&0) {
        return Err(OpError::invalid("the path contains a NUL byte"));
    }
    if raw.len() > PATH_MAX || raw.split(|b| *b == b'/').any(|part| part.len() > NAME_MAX) {
        return Err(OpError {
            code: "name_too_long",
            message: "the path or a part of it is too long".into(),
            errno: Some(libc::ENAMETOOLONG),
        });
    }
    let path = PathBuf::from(OsString::from_vec(raw.to_vec()));
    Ok(if path.is_absolute() { path } else { base_dir().join(path) })
}

fn missing(key: &str) -> OpError {
    OpError::invalid(format!("`{key}` is missing"))
}

fn mistyped(key: &str, wanted: &str) -> OpError {
    OpError::invalid(format!("`{key}` must be {wanted}"))
}
