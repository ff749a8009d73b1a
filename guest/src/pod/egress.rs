//! The way out of a pod: names and connections are taken on loopback and carried to the broker beside the gateway.
//!
//! One thread with a loop. Nothing is decided here: the broker answers names with addresses that stand for the real ones,
//! says on which ports to listen there, and judges every connection.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rmpv::Value;

use super::door::reset;
use crate::forward::{Forward, Phase};
use crate::link::{Greeting, Link, Pending};
use crate::op::{map, Map, Req};
use crate::sys::{self, Poll, IN, OUT};
use crate::wire::{self, Decoder, Frame, Kind};

const RESOLVER: (Ipv4Addr, u16) = (Ipv4Addr::LOCALHOST, 53);
const WINDOW: u32 = 256 * 1024;
const MOST_PENDING: usize = 4;
const MOST_QUESTIONS: usize = 64;
const MOST_PACKET: usize = 4096;
const MOST_FLOWS: usize = 256;
const MOST_LISTENERS: usize = 512;
const MOST_CONTROL: usize = 256 * 1024;
const AT_ONCE: usize = 8;
const HELLO: Duration = Duration::from_secs(5);
const QUESTION: Duration = Duration::from_secs(20);
const LONGEST: u64 = 24 * 3600;
/// Flags of a DNS header: this is an answer, and the server failed.
const ANSWER: u8 = 0x80;
const FAILED: u8 = 2;

const BELL: u64 = 1;
const HANDED: u64 = 2;
const DNS: u64 = 3;
const PENDING: u64 = 4;
const LINK: u64 = 5;
const LISTEN: u64 = 6;
const FLOW: u64 = 7;

fn token(tag: u64, id: u32) -> u64 {
    tag << 32 | u64::from(id)
}

/// The listeners and routes that an activation opens.
struct Opened {
    socket: Option<UdpSocket>,
    host_secret: String,
    agent_secret: String,
}

/// How an activation reaches the thread.
pub struct Steering {
    opened: Arc<Mutex<Option<Opened>>>,
    bell: Arc<OwnedFd>,
}

impl Steering {
    /// Lets the way out begin; false when no names can be answered here. Secrets: the host's, the agent's.
    pub fn open(&self, secrets: (String, String)) -> bool {
        let socket = UdpSocket::bind(RESOLVER).and_then(|s| s.set_nonblocking(true).map(|()| s)).ok();
        let answers = socket.is_some();
        let opened = Opened { socket, host_secret: secrets.0, agent_secret: secrets.1 };
        *self.opened.lock().unwrap_or_else(PoisonError::into_inner) = Some(opened);
        sys::ring_bell(self.bell.as_raw_fd());
        answers
    }
}

/// A question that the broker has.
struct Question {
    from: SocketAddr,
    packet: Vec<u8>,
    until: Instant,
}

/// A port of a stand-in.
struct Listening {
    listener: TcpListener,
    place: SocketAddrV4,
    until: Instant,
}

/// A connection of a program. When `done`, the gateway has said its last word of it.
struct Flow {
    forward: Forward,
    done: bool,
}

pub struct Egress {
    poll: Poll,
    steering: Steering,
    opened: Option<Opened>,
    pending: Vec<Pending>,
    link: Option<Link>,
    last: u32,
    questions: HashMap<u32, Question>,
    flows: HashMap<u32, Flow>,
    rotation: VecDeque<u32>,
    listeners: HashMap<u32, Listening>,
    places: HashMap<SocketAddrV4, u32>,
    due: Option<Instant>,
}

/// The thread's part, which waits for an activation, and the handle by which that comes.
pub fn prepare() -> io::Result<(Egress, Steering)> {
    let opened = Arc::new(Mutex::new(None));
    let bell = Arc::new(sys::eventfd()?);
    let steering = Steering { opened: opened.clone(), bell: bell.clone() };
    let egress = Egress {
        poll: Poll::new()?,
        steering: Steering { opened, bell },
        opened: None,
        pending: Vec::new(),
        link: None,
        last: 0,
        questions: HashMap::new(),
        flows: HashMap::new(),
        rotation: VecDeque::new(),
        listeners: HashMap::new(),
        places: HashMap::new(),
        due: None,
    };
    Ok((egress, steering))
}

impl Egress {
    pub fn run(mut self, handed: &OwnedFd) {
        self.poll.set(self.steering.bell.as_raw_fd(), token(BELL, 0), 0, IN);
        self.poll.set(handed.as_raw_fd(), token(HANDED, 0), 0, IN);
        let mut events = Vec::new();
        loop {
            self.poll.wait(&mut events, self.due.map(|due| due.saturating_duration_since(Instant::now())));
            for (token, ready) in &events {
                let id = *token as u32;
                match token >> 32 {
                    BELL => self.begin(),
                    HANDED => self.take_connections(handed),
                    DNS => self.take_questions(),
                    PENDING => self.greet(id),
                    LINK if ready & !OUT != 0 => self.read_link(),
                    LISTEN => self.accept(id),
                    FLOW => self.on_flow(id, *ready),
                    _ => {}
                }
            }
            if self.due.is_some_and(|due| due <= Instant::now()) {
                self.expire();
            }
            self.pump();
        }
    }

    fn begin(&mut self) {
        sys::hush_bell(self.steering.bell.as_raw_fd());
        let opened = self.steering.opened.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(opened) = opened {
            if let Some(socket) = &opened.socket {
                self.poll.set(socket.as_raw_fd(), token(DNS, 0), 0, IN);
            }
            self.opened = Some(opened);
        }
    }

    /// Something has to be looked at when this time comes.
    fn remind(&mut self, when: Instant) {
        self.due = Some(self.due.map_or(when, |due| due.min(when)));
    }

    fn expire(&mut self) {
        let now = Instant::now();
        self.pending.retain(|pending| pending.until > now);
        let late: Vec<u32> = self.questions.iter().filter(|(_, q)| q.until <= now).map(|(id, _)| *id).collect();
        late.into_iter().for_each(|id| self.fail_question(id));
        let old: Vec<u32> = self.listeners.iter().filter(|(_, l)| l.until <= now).map(|(id, _)| *id).collect();
        old.into_iter().for_each(|id| self.close_listener(id));
        let pending = self.pending.iter().map(|pending| pending.until);
        let times = self.questions.values().map(|q| q.until).chain(self.listeners.values().map(|l| l.until));
        self.due = times.chain(pending).min();
    }

    // The connection to the gateway

    fn take_connections(&mut self, handed: &OwnedFd) {
        while let Ok(fd) = sys::take_handed(handed.as_raw_fd()) {
            if self.pending.len() >= MOST_PENDING {
                self.pending.remove(0);
            }
            self.last = self.last.wrapping_add(1).max(1);
            let (id, until) = (self.last, Instant::now() + HELLO);
            self.poll.set(fd.as_raw_fd(), token(PENDING, id), 0, IN);
            self.pending.push(Pending { id, fd, decoder: Decoder::default(), until });
            self.remind(until);
        }
    }

    fn greet(&mut self, id: u32) {
        let Some(at) = self.pending.iter().position(|p| p.id == id) else { return };
        let Some(opened) = &self.opened else { return };
        let greeting = self.pending.get_mut(at).map(|p| p.read_hello(&opened.host_secret));
        match greeting {
            Some(Greeting::Accepted) => {
                let hello = map([("v", wire::VERSION.into()), ("secret", opened.agent_secret.as_str().into())]);
                let pending = self.pending.remove(at);
                self.poll.set(pending.fd.as_raw_fd(), 0, IN, 0);
                self.drop_link();
                let mut link = Link::new(pending.fd, pending.decoder);
                link.push(wire::control(0, Kind::Hello, &hello).unwrap_or_default());
                self.link = Some(link);
                self.read_frames();
            }
            Some(Greeting::Refused) => drop(self.pending.remove(at)),
            _ => {}
        }
    }

    /// Ends all that the connection carried.
    fn drop_link(&mut self) {
        self.link = None;
        let waiting: Vec<u32> = self.questions.keys().copied().collect();
        waiting.into_iter().for_each(|id| self.fail_question(id));
        for (_, flow) in self.flows.drain() {
            if !flow.done {
                reset(&TcpStream::from(flow.forward.fd));
            }
        }
        self.rotation.clear();
    }

    fn read_link(&mut self) {
        let Some(link) = &mut self.link else { return };
        let fd = link.raw();
        match sys::read(fd, link.decoder.space()) {
            Ok(0) => self.drop_link(),
            Ok(count) => {
                link.decoder.filled(count);
                self.read_frames();
            }
            Err(error) if sys::would_block(&error) => {}
            Err(_) => self.drop_link(),
        }
    }

    fn read_frames(&mut self) {
        let Some(link) = &mut self.link else { return };
        let mut decoder = std::mem::take(&mut link.decoder);
        loop {
            match decoder.next_frame() {
                Ok(Some(frame)) => {
                    if self.on_frame(&frame).is_none() {
                        return self.drop_link();
                    }
                }
                Ok(None) => break,
                Err(_) => return self.drop_link(),
            }
        }
        if let Some(link) = &mut self.link {
            link.decoder = decoder;
        }
    }

    /// Does what a frame says; `None` when it breaks the protocol.
    fn on_frame(&mut self, frame: &Frame<'_>) -> Option<()> {
        let id = frame.stream;
        match frame.kind {
            Kind::Ping => self.link.as_mut()?.push(wire::raw(0, Kind::Pong, frame.payload)),
            Kind::Pong => {}
            Kind::Result => self.on_result(id, wire::decode_map(frame.payload)?),
            Kind::Data => {
                let (channel, data) = frame.data()?;
                let Some(flow) = self.flows.get_mut(&id) else { return Some(()) };
                let size = data.len() as u64;
                if channel != 0 || flow.forward.in_credit < size {
                    return None;
                }
                flow.forward.in_credit -= size;
                flow.forward.push(data);
            }
            Kind::Eof if frame.eof()? == 0 => {
                if let Some(flow) = self.flows.get_mut(&id) {
                    flow.forward.finish();
                }
            }
            Kind::Credit => {
                let (channel, bytes) = frame.credit()?;
                if let (Some(flow), 1) = (self.flows.get_mut(&id), channel) {
                    flow.forward.credit = flow.forward.credit.saturating_add(bytes.into());
                }
            }
            _ => return None,
        }
        Some(())
    }

    fn on_result(&mut self, id: u32, result: Map) {
        let result = Req::new(result);
        let ok = result.opt_map("ok").ok().flatten().cloned().map(Req::new);
        if let Some(question) = self.questions.remove(&id) {
            let packet = ok.and_then(|ok| self.open_ways(&ok));
            return self.answer(&question, packet);
        }
        let Some(flow) = self.flows.get_mut(&id) else { return };
        flow.done = true;
        if ok.is_some() {
            flow.forward.read_end = true;
            flow.forward.outgoing.clear();
            flow.forward.finish();
        } else if let Some(flow) = self.flows.remove(&id) {
            reset(&TcpStream::from(flow.forward.fd));
        }
    }

    // Names

    fn take_questions(&mut self) {
        let mut packet = [0; MOST_PACKET + 1];
        for _ in 0..AT_ONCE {
            let Some(socket) = self.opened.as_ref().and_then(|opened| opened.socket.as_ref()) else { return };
            let Ok((size, from)) = socket.recv_from(&mut packet) else { return };
            let packet = packet.get(..size).unwrap_or_default().to_vec();
            if !(12..=MOST_PACKET).contains(&size) {
                continue;
            }
            let until = Instant::now() + QUESTION;
            let question = Question { from, packet, until };
            let asked = map([("op", "dns".into()), ("packet", Value::from(question.packet.clone()))]);
            if self.questions.len() >= MOST_QUESTIONS || !self.has_room() {
                self.answer(&question, None);
                continue;
            }
            let id = self.open_stream(&asked);
            self.questions.insert(id, question);
            self.remind(until);
        }
    }

    fn has_room(&self) -> bool {
        self.link.as_ref().is_some_and(|link| link.queued() < MOST_CONTROL)
    }

    fn open_stream(&mut self, request: &Value) -> u32 {
        self.last = self.last.wrapping_add(1).max(1);
        if let Some(link) = &mut self.link {
            link.push(wire::control(self.last, Kind::Request, request).unwrap_or_default());
        }
        self.last
    }

    /// Sends the packet, or the word that no answer could be had.
    fn answer(&self, question: &Question, packet: Option<Vec<u8>>) {
        let Some(socket) = self.opened.as_ref().and_then(|opened| opened.socket.as_ref()) else { return };
        let packet = packet.unwrap_or_else(|| {
            let mut failure = question.packet.clone();
            if let [_, _, high, low, ..] = failure.as_mut_slice() {
                *high |= ANSWER;
                *low = *low & 0xf0 | FAILED;
            }
            failure
        });
        let _ = socket.send_to(&packet, question.from);
    }

    fn fail_question(&mut self, id: u32) {
        if let Some(question) = self.questions.remove(&id) {
            self.answer(&question, None);
        }
    }

    /// Listens where the answer leads to, and only then gives the answer; `None` when one place is taken.
    fn open_ways(&mut self, ok: &Req) -> Option<Vec<u8>> {
        let packet = ok.bytes("packet").ok()?.to_vec();
        let seconds = ok.opt_u64("seconds").ok()?.unwrap_or(0).min(LONGEST);
        let until = Instant::now() + Duration::from_secs(seconds);
        for row in ok.get("open").and_then(Value::as_array).into_iter().flatten() {
            let [address, port] = row.as_array()?.as_slice() else { return None };
            let address: Ipv4Addr = address.as_str()?.parse().ok()?;
            let port = u16::try_from(port.as_u64()?).ok().filter(|port| *port > 0)?;
            if !is_stand_in(address) {
                return None;
            }
            self.listen(SocketAddrV4::new(address, port), until)?;
        }
        Some(packet)
    }

    fn listen(&mut self, place: SocketAddrV4, until: Instant) -> Option<()> {
        if let Some(known) = self.places.get(&place).and_then(|id| self.listeners.get_mut(id)) {
            known.until = known.until.max(until);
            return Some(());
        }
        if self.listeners.len() >= MOST_LISTENERS {
            let oldest = self.listeners.iter().min_by_key(|(_, l)| l.until).map(|(id, _)| *id)?;
            self.close_listener(oldest);
        }
        let listener = TcpListener::bind(place).ok()?;
        listener.set_nonblocking(true).ok()?;
        self.last = self.last.wrapping_add(1).max(1);
        let id = self.last;
        self.poll.set(listener.as_raw_fd(), token(LISTEN, id), 0, IN);
        self.listeners.insert(id, Listening { listener, place, until });
        self.places.insert(place, id);
        self.remind(until);
        Some(())
    }

    fn close_listener(&mut self, id: u32) {
        if let Some(old) = self.listeners.remove(&id) {
            self.places.remove(&old.place);
        }
    }

    // Connections

    fn accept(&mut self, id: u32) {
        for _ in 0..AT_ONCE {
            let Some(listening) = self.listeners.get(&id) else { return };
            let place = listening.place;
            let Ok((tcp, _)) = listening.listener.accept() else { return };
            let ready = tcp.set_nonblocking(true).and(tcp.set_nodelay(true));
            if ready.is_err() || self.flows.len() >= MOST_FLOWS || !self.has_room() {
                reset(&tcp);
                continue;
            }
            let address = place.ip().to_string();
            let request =
                map([("op", "connect".into()), ("address", address.as_str().into()), ("port", place.port().into())]);
            let stream = self.open_stream(&request);
            if let Some(link) = &mut self.link {
                link.push(wire::credit(stream, 0, WINDOW));
            }
            let mut forward = Forward::over(tcp.into(), Phase::Open);
            forward.in_credit = WINDOW.into();
            self.flows.insert(stream, Flow { forward, done: false });
            self.rotation.push_back(stream);
        }
    }

    fn on_flow(&mut self, id: u32, ready: u32) {
        if let Some(Flow { forward, .. }) = self.flows.get_mut(&id) {
            forward.write();
            if ready & !OUT != 0 && forward.credit > 0 {
                forward.read();
            }
        }
    }

    /// Sends until nothing is ready or the connection is full, and keeps interest in step.
    fn pump(&mut self) {
        if self.pump_link().is_err() {
            self.drop_link();
        }
        for (id, flow) in &mut self.flows {
            let wanted = flow.forward.wanted();
            self.poll.set(flow.forward.raw(), token(FLOW, *id), flow.forward.interest, wanted);
            flow.forward.interest = wanted;
        }
        let Some(link) = &mut self.link else { return };
        let wanted = IN | if link.blocked { OUT } else { 0 };
        self.poll.set(link.raw(), token(LINK, 0), link.interest, wanted);
        link.interest = wanted;
    }

    fn pump_link(&mut self) -> io::Result<()> {
        while let Some(link) = &mut self.link {
            if !link.flush()? || !self.next_turn()? {
                break;
            }
        }
        Ok(())
    }

    /// Gives one connection its turn. False when none has anything.
    fn next_turn(&mut self) -> io::Result<bool> {
        for _ in 0..self.rotation.len() {
            let Some(id) = self.rotation.pop_front() else { break };
            let (Some(flow), Some(link)) = (self.flows.get_mut(&id), &mut self.link) else { continue };
            let Flow { forward, done } = flow;
            if *done {
                if forward.phase == Phase::Broken || forward.is_over() {
                    self.flows.remove(&id);
                } else {
                    self.rotation.push_back(id);
                }
                continue;
            }
            if forward.phase == Phase::Broken {
                link.push(wire::raw(id, Kind::Cancel, &[]));
                self.flows.remove(&id);
                return Ok(true);
            }
            self.rotation.push_back(id);
            if take_turn(id, forward, link)? {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// Sends one frame of a connection, if it has something.
fn take_turn(id: u32, forward: &mut Forward, link: &mut Link) -> io::Result<bool> {
    if forward.drained > 0 {
        let grant = std::mem::take(&mut forward.drained);
        forward.in_credit += grant;
        link.push(wire::credit(id, 0, u32::try_from(grant).unwrap_or(u32::MAX)));
        return Ok(true);
    }
    if forward.outgoing.is_empty() && forward.credit > 0 {
        forward.read();
    }
    let most = forward.outgoing.len().min(usize::try_from(forward.credit).unwrap_or(usize::MAX));
    if most > 0 {
        link.send_data(id, 1, forward.outgoing.get(..most).unwrap_or_default(), &[])?;
        forward.credit -= most as u64;
        forward.outgoing.drain(..most);
        return Ok(true);
    }
    if forward.read_end && forward.outgoing.is_empty() && !forward.eof_sent {
        forward.eof_sent = true;
        link.push(wire::raw(id, Kind::Eof, &[1]));
        return Ok(true);
    }
    Ok(false)
}

/// Addresses that the broker gives out: 127.64.0.0/10.
fn is_stand_in(address: Ipv4Addr) -> bool {
    matches!(address.octets(), [127, 64..=127, ..])
}
