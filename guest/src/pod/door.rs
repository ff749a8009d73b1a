//! The pod's one port: TLS with the gateway, and plain bytes to whoever a connection is for.
//!
//! One thread with a loop. What is done for peers that are not known yet is bounded: how many, how long, how many bytes.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustls::{ServerConfig, ServerConnection};

use super::{tls, Shared, Ways};
use crate::sys::{self, Poll, IN, OUT};

const HANDSHAKE: Duration = Duration::from_secs(5);
const ORDER: Duration = Duration::from_secs(40); // an activation with all its canaries, and more
const GOODBYE: Duration = Duration::from_secs(5);
const MOST_UNKNOWN: usize = 16;
const MOST_KNOWN: usize = 32;
const MOST_EARLY: usize = 16 * 1024;
const AT_ONCE: usize = 16;
const CHUNK: usize = 64 * 1024;
const ROUNDS: usize = 8;
const LISTENER: u64 = 0;

pub struct Door {
    listener: TcpListener,
    config: Arc<ServerConfig>,
    ways: Ways,
    shared: Arc<Shared>,
    poll: Poll,
    peers: BTreeMap<u32, Peer>,
    last: u32,
    scratch: Vec<u8>,
}

struct Peer {
    tcp: TcpStream,
    address: IpAddr,
    tls: ServerConnection,
    /// Our end of the pair whose other end the receiver has, once the peer is known.
    plain: Option<OwnedFd>,
    known: bool,
    /// Bytes read before the peer was known.
    early: usize,
    /// Decrypted, and not yet taken by the receiver.
    inward: Vec<u8>,
    taken: usize,
    /// The peer sends no more.
    ended: bool,
    /// Nothing more is read from the receiver; what is left is sent.
    closing: bool,
    until: Option<Instant>,
    interest: [u32; 2],
}

impl Door {
    pub fn new(listener: TcpListener, config: Arc<ServerConfig>, ways: Ways, shared: Arc<Shared>) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let poll = Poll::new()?;
        poll.set(listener.as_raw_fd(), LISTENER, 0, IN);
        let scratch = vec![0; CHUNK];
        Ok(Self { listener, config, ways, shared, poll, peers: BTreeMap::new(), last: 0, scratch })
    }

    pub fn run(mut self) {
        let mut events = Vec::new();
        loop {
            let soonest = self.peers.values().filter_map(|peer| peer.until).min();
            self.poll.wait(&mut events, soonest.map(|when| when.saturating_duration_since(Instant::now())));
            for (token, _) in &events {
                match *token {
                    LISTENER => self.accept(),
                    token => self.serve((token >> 1) as u32),
                }
            }
            let now = Instant::now();
            let late: Vec<u32> =
                self.peers.iter().filter(|(_, p)| p.until.is_some_and(|t| t <= now)).map(|(id, _)| *id).collect();
            late.into_iter().for_each(|id| self.end(id));
        }
    }

    fn accept(&mut self) {
        for _ in 0..AT_ONCE {
            let (tcp, from) = match self.listener.accept() {
                Ok(taken) => taken,
                Err(error) => {
                    if error.kind() != ErrorKind::WouldBlock {
                        std::thread::sleep(Duration::from_millis(10)); // out of descriptors: others may end meanwhile
                    }
                    return;
                }
            };
            let address = from.ip().to_canonical();
            if is_own(address) {
                reset(&tcp);
                continue;
            }
            let unknown = self.peers.iter().filter(|(_, peer)| !peer.known).map(|(id, _)| *id);
            let (count, oldest) = (unknown.clone().count(), unknown.min());
            if let (MOST_UNKNOWN.., Some(oldest)) = (count, oldest) {
                self.end(oldest);
            }
            self.add(tcp, address);
        }
    }

    fn add(&mut self, tcp: TcpStream, address: IpAddr) {
        let Ok(mut tls) = ServerConnection::new(self.config.clone()) else { return };
        tls.set_buffer_limit(Some(tls::MOST_UNSENT));
        if tcp.set_nonblocking(true).is_err() || tcp.set_nodelay(true).is_err() {
            return;
        }
        keep_alive(&tcp);
        self.last = self.last.wrapping_add(1).max(1);
        let peer = Peer {
            tcp,
            address,
            tls,
            plain: None,
            known: false,
            early: 0,
            inward: Vec::new(),
            taken: 0,
            ended: false,
            closing: false,
            until: Some(Instant::now() + HANDSHAKE),
            interest: [0; 2],
        };
        if self.peers.insert(self.last, peer).is_none() {
            self.refresh(self.last);
        }
    }

    /// Moves what can be moved, for one peer.
    fn serve(&mut self, id: u32) {
        for _ in 0..ROUNDS {
            let Some(peer) = self.peers.get_mut(&id) else { return };
            match peer.step(&mut self.scratch) {
                Ok(moved) => {
                    if !peer.known && !peer.tls.is_handshaking() && !self.admit(id) {
                        return self.end(id);
                    }
                    if !moved {
                        break;
                    }
                }
                Err(error) => {
                    if !peer.known && error.kind() == ErrorKind::InvalidData {
                        let text = format!("refused a connection from {}: {error}", peer.address);
                        self.shared.log.say(&text);
                    }
                    return self.end(id);
                }
            }
        }
        match self.peers.get(&id).is_some_and(Peer::is_over) {
            true => self.end(id),
            false => self.refresh(id),
        }
    }

    /// The peer is a gateway: gives its connection to whom it is for. False when there is nobody.
    fn admit(&mut self, id: u32) -> bool {
        let room = self.shared.known.load(Ordering::Acquire) < MOST_KNOWN;
        let activated = self.shared.activated.load(Ordering::Acquire);
        let Some(peer) = self.peers.get_mut(&id) else { return false };
        let way = match peer.tls.alpn_protocol() {
            Some(tls::ACTIVATE) => &self.ways.orders,
            Some(tls::AGENT) if activated => &self.ways.agent,
            Some(tls::EGRESS) if activated => &self.ways.egress,
            _ => return false,
        };
        let until = peer.tls.alpn_protocol().filter(|name| *name == tls::ACTIVATE).map(|_| Instant::now() + ORDER);
        let Ok((ours, theirs)) = sys::socketpair() else { return false };
        let ready = sys::set_nonblocking(ours.as_raw_fd()).and(sys::set_nonblocking(theirs.as_raw_fd()));
        if !room || ready.and_then(|()| sys::hand_over(way.as_raw_fd(), theirs)).is_err() {
            return false;
        }
        peer.plain = Some(ours);
        peer.known = true;
        peer.until = until;
        self.shared.known.fetch_add(1, Ordering::AcqRel);
        true
    }

    fn end(&mut self, id: u32) {
        let Some(mut peer) = self.peers.remove(&id) else { return };
        let _ = peer.tls.write_tls(&mut peer.tcp); // an alert, if there is one
        self.poll.set(peer.tcp.as_raw_fd(), 0, peer.interest[0], 0);
        if let Some(plain) = &peer.plain {
            self.poll.set(plain.as_raw_fd(), 0, peer.interest[1], 0);
        }
        if peer.known {
            self.shared.known.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// Keeps interest in step with what can be done.
    fn refresh(&mut self, id: u32) {
        let Some(peer) = self.peers.get_mut(&id) else { return };
        let wanted = peer.wanted();
        let token = u64::from(id) << 1;
        self.poll.set(peer.tcp.as_raw_fd(), token, peer.interest[0], wanted[0]);
        if let Some(plain) = &peer.plain {
            self.poll.set(plain.as_raw_fd(), token | 1, peer.interest[1], wanted[1]);
        }
        peer.interest = wanted;
    }
}

impl Peer {
    /// One round in each direction; true when something moved.
    fn step(&mut self, scratch: &mut [u8]) -> io::Result<bool> {
        let mut moved = self.send()?;
        moved |= self.receive(scratch)?;
        moved |= self.pass_in()?;
        moved |= self.pass_out(scratch)?;
        Ok(self.send()? || moved)
    }

    /// Encrypted bytes to the network.
    fn send(&mut self) -> io::Result<bool> {
        let mut moved = false;
        while self.tls.wants_write() {
            match self.tls.write_tls(&mut self.tcp) {
                Ok(_) => moved = true,
                Err(error) if blocked(&error) => break,
                Err(error) => return Err(error),
            }
        }
        Ok(moved)
    }

    /// Bytes from the network, decrypted into `inward`. Nothing is read while some of it waits.
    fn receive(&mut self, scratch: &mut [u8]) -> io::Result<bool> {
        if !self.wants_input() {
            return Ok(false);
        }
        let size = if self.known { scratch.len() } else { MOST_EARLY + 1 - self.early };
        let count = match self.tcp.read(scratch.get_mut(..size).unwrap_or_default()) {
            Ok(0) => {
                self.ended = true;
                return Ok(true);
            }
            Ok(count) => count,
            Err(error) if blocked(&error) => return Ok(false),
            Err(error) => return Err(error),
        };
        if !self.known {
            self.early += count;
            if self.early > MOST_EARLY {
                return Err(io::Error::other("too much before the handshake was over"));
            }
        }
        let mut piece = scratch.get(..count).unwrap_or_default();
        while !piece.is_empty() {
            self.tls.read_tls(&mut piece)?;
            let state = self.tls.process_new_packets().map_err(|e| io::Error::new(ErrorKind::InvalidData, e))?;
            let (size, old) = (state.plaintext_bytes_to_read(), self.inward.len());
            self.inward.resize(old + size, 0);
            self.tls.reader().read_exact(self.inward.get_mut(old..).unwrap_or_default())?;
            if state.peer_has_closed() {
                self.ended = true;
                break;
            }
        }
        Ok(true)
    }

    /// Decrypted bytes to the receiver.
    fn pass_in(&mut self) -> io::Result<bool> {
        let Some(plain) = &self.plain else { return Ok(false) };
        let mut moved = false;
        while self.taken < self.inward.len() {
            match sys::send(plain.as_raw_fd(), self.inward.get(self.taken..).unwrap_or_default()) {
                Ok(count) => {
                    self.taken += count;
                    moved = true;
                }
                Err(error) if blocked(&error) => return Ok(moved),
                Err(_) => {
                    self.taken = self.inward.len(); // the receiver has closed; its last words still go out
                    moved = true;
                }
            }
        }
        self.inward.clear();
        self.inward.shrink_to(CHUNK);
        self.taken = 0;
        Ok(moved)
    }

    /// Bytes of the receiver into TLS. Nothing is read while some of it waits to be sent.
    fn pass_out(&mut self, scratch: &mut [u8]) -> io::Result<bool> {
        if self.closing || self.tls.wants_write() {
            return Ok(false);
        }
        let Some(plain) = &self.plain else { return Ok(false) };
        match sys::read(plain.as_raw_fd(), scratch) {
            Ok(0) => self.close(),
            Ok(count) => self.tls.writer().write_all(scratch.get(..count).unwrap_or_default())?,
            Err(error) if blocked(&error) => return Ok(false),
            Err(_) => self.close(),
        }
        Ok(true)
    }

    fn close(&mut self) {
        self.closing = true;
        self.tls.send_close_notify();
        self.until = Some(Instant::now() + GOODBYE);
    }

    fn wants_input(&self) -> bool {
        !self.ended && self.inward.is_empty()
    }

    fn is_over(&self) -> bool {
        let sent = self.closing && !self.tls.wants_write();
        let delivered = self.ended && (self.inward.is_empty() || !self.known);
        sent || delivered
    }

    fn wanted(&self) -> [u32; 2] {
        let waiting = self.tls.wants_write();
        let (input, output) = (|on| if on { IN } else { 0 }, |on| if on { OUT } else { 0 });
        let plain = input(!self.closing && !waiting) | output(!self.inward.is_empty());
        [input(self.wants_input()) | output(waiting), if self.plain.is_some() { plain } else { 0 }]
    }
}

fn blocked(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

/// Whether it is an address of this pod: then the peer is a program of the sandbox.
fn is_own(address: IpAddr) -> bool {
    address.is_loopback() || UdpSocket::bind((address, 0)).is_ok()
}

fn option(fd: RawFd, level: i32, name: i32, value: &[libc::c_int]) {
    let size = std::mem::size_of_val(value) as libc::socklen_t;
    // SAFETY: as many bytes as are said.
    unsafe { libc::setsockopt(fd, level, name, value.as_ptr().cast(), size) };
}

/// A gateway whose machine is gone is found out within minutes.
fn keep_alive(tcp: &TcpStream) {
    option(tcp.as_raw_fd(), libc::SOL_SOCKET, libc::SO_KEEPALIVE, &[1]);
    option(tcp.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, &[30]);
    option(tcp.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, &[10]);
}

/// Makes the close of this connection a reset.
pub fn reset(tcp: &TcpStream) {
    option(tcp.as_raw_fd(), libc::SOL_SOCKET, libc::SO_LINGER, &[1, 0]);
}
