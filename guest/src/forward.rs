//! A TCP connection to a port inside the sandbox, carried over a stream.

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use crate::op::{words_of_errno, OpError, Req};
use crate::sys::{self, IN, OUT};

pub const WINDOW: u64 = 1024 * 1024;
const READ: usize = 64 * 1024;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    Connecting,
    Open,
    Broken,
}

/// One forwarded connection.
pub struct Forward {
    pub fd: OwnedFd,
    pub phase: Phase,
    /// Addresses to try when this one refuses.
    pub others: Vec<SocketAddr>,
    pub credit: u64,
    pub in_credit: u64,
    pub interest: u32,
    /// Bytes written to the socket since credit was last given.
    pub drained: u64,
    /// Bytes read from the socket and not sent yet.
    pub outgoing: Vec<u8>,
    /// The peer inside will send no more.
    pub read_end: bool,
    pub eof_sent: bool,
    queue: VecDeque<Vec<u8>>,
    offset: usize,
    /// The host will send no more.
    finishing: bool,
    write_end: bool,
}

impl Forward {
    /// Begins to connect.
    pub fn open(addresses: &[SocketAddr]) -> Result<Self, OpError> {
        let (first, others) = addresses.split_first().ok_or_else(|| OpError::invalid("no address"))?;
        let fd = connect(first).map_err(refused)?;
        Ok(Self { others: others.to_vec(), ..Self::over(fd, Phase::Connecting) })
    }

    /// Carries a connection that is open already.
    pub fn over(fd: OwnedFd, phase: Phase) -> Self {
        Self {
            fd,
            phase,
            others: Vec::new(),
            credit: 0,
            in_credit: 0,
            interest: 0,
            drained: 0,
            outgoing: Vec::new(),
            read_end: false,
            eof_sent: false,
            queue: VecDeque::new(),
            offset: 0,
            finishing: false,
            write_end: false,
        }
    }

    pub fn raw(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    pub fn push(&mut self, data: &[u8]) {
        if self.write_end {
            self.drained += data.len() as u64;
        } else if !data.is_empty() {
            self.queue.push_back(data.to_vec());
            self.write();
        }
    }

    /// The host sends no more: half close, after what is queued.
    pub fn finish(&mut self) {
        self.finishing = true;
        self.write();
    }

    /// Whether the connect has worked.
    pub fn connected(&mut self) -> io::Result<()> {
        connect_error(self.raw())?;
        self.phase = Phase::Open;
        let one: libc::c_int = 1;
        unsafe { libc::setsockopt(self.raw(), libc::IPPROTO_TCP, libc::TCP_NODELAY, (&raw const one).cast(), 4) };
        Ok(())
    }

    /// Tries the next address; false when there is none.
    pub fn retry(&mut self) -> bool {
        while !self.others.is_empty() {
            if let Ok(fd) = connect(&self.others.remove(0)) {
                self.fd = fd;
                self.interest = 0;
                return true;
            }
        }
        false
    }

    pub fn write(&mut self) {
        if self.phase != Phase::Open {
            return;
        }
        while let Some(piece) = self.queue.front() {
            match sys::send(self.raw(), piece.get(self.offset..).unwrap_or_default()) {
                Ok(n) => {
                    self.drained += n as u64;
                    self.offset += n;
                    if self.offset >= piece.len() {
                        self.queue.pop_front();
                        self.offset = 0;
                    }
                }
                Err(e) if sys::would_block(&e) => return,
                Err(_) => return self.broken(),
            }
        }
        if self.finishing && !self.write_end {
            self.write_end = true;
            unsafe { libc::shutdown(self.raw(), libc::SHUT_WR) };
        }
    }

    pub fn read(&mut self) {
        if self.phase != Phase::Open || self.read_end || !self.outgoing.is_empty() {
            return;
        }
        self.outgoing.resize(READ, 0);
        let got = sys::read(self.fd.as_raw_fd(), &mut self.outgoing);
        self.outgoing.truncate(*got.as_ref().unwrap_or(&0));
        match got {
            Ok(0) => self.read_end = true,
            Ok(_) => {}
            Err(e) if sys::would_block(&e) => {}
            Err(_) => self.broken(),
        }
    }

    fn broken(&mut self) {
        self.phase = Phase::Broken;
        self.read_end = true;
        self.write_end = true;
        self.queue.clear();
    }

    /// Both directions are done and delivered.
    pub fn is_over(&self) -> bool {
        self.read_end && self.write_end && self.outgoing.is_empty()
    }

    pub fn wanted(&self) -> u32 {
        match self.phase {
            Phase::Connecting => OUT,
            Phase::Broken => 0,
            Phase::Open => {
                let read = if !self.read_end && self.outgoing.is_empty() && self.credit > 0 { IN } else { 0 };
                read | if self.queue.is_empty() { 0 } else { OUT }
            }
        }
    }
}

/// Where a request wants to go: an address, or both loopbacks for `localhost`.
pub fn addresses(req: &Req) -> Result<Vec<SocketAddr>, OpError> {
    let port = req.u64("port")?;
    let port = u16::try_from(port)
        .ok()
        .filter(|p| *p > 0)
        .ok_or_else(|| OpError::invalid("`port` must be within 1..65535"))?;
    let hosts = match req.opt_str("host")?.unwrap_or("localhost") {
        "localhost" => vec![IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)],
        text => vec![text.parse().map_err(|_| OpError::invalid("`host` must be an IP address"))?],
    };
    Ok(hosts.into_iter().map(|host| SocketAddr::new(host, port)).collect())
}

pub fn refused(error: io::Error) -> OpError {
    let code = match error.raw_os_error() {
        Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM) => "exhausted",
        _ => "refused",
    };
    let message = error.raw_os_error().map_or_else(|| error.to_string(), words_of_errno);
    OpError { code, message, errno: error.raw_os_error() }
}

/// How a connect that was under way has ended.
pub fn connect_error(fd: RawFd) -> io::Result<()> {
    let mut error: libc::c_int = 0;
    let mut size = 4;
    sys::check(unsafe {
        libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_ERROR, (&raw mut error).cast(), &raw mut size)
    })?;
    if error != 0 {
        return Err(io::Error::from_raw_os_error(error));
    }
    Ok(())
}

/// Begins to connect, and does not wait for it.
pub fn connect(address: &SocketAddr) -> io::Result<OwnedFd> {
    let family = if address.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    let fd = sys::check(unsafe { libc::socket(family, kind, 0) })?;
    // SAFETY: fresh from the kernel.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    let result = unsafe {
        match address {
            SocketAddr::V4(v4) => {
                let mut raw: libc::sockaddr_in = std::mem::zeroed();
                raw.sin_family = libc::AF_INET as u16;
                raw.sin_port = v4.port().to_be();
                raw.sin_addr.s_addr = u32::from_ne_bytes(v4.ip().octets());
                libc::connect(fd.as_raw_fd(), (&raw const raw).cast(), std::mem::size_of_val(&raw) as u32)
            }
            SocketAddr::V6(v6) => {
                let mut raw: libc::sockaddr_in6 = std::mem::zeroed();
                raw.sin6_family = libc::AF_INET6 as u16;
                raw.sin6_port = v6.port().to_be();
                raw.sin6_addr.s6_addr = v6.ip().octets();
                libc::connect(fd.as_raw_fd(), (&raw const raw).cast(), std::mem::size_of_val(&raw) as u32)
            }
        }
    };
    match sys::check(result) {
        Err(e) if e.raw_os_error() != Some(libc::EINPROGRESS) => Err(e),
        _ => Ok(fd),
    }
}
