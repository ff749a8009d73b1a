//! Blocking operations on threads of their own, joined to the event loop by bounded queues.

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use rmpv::Value;

use crate::op::{OpError, OpFn, OpIo, Req};
use crate::sys;
use crate::users::User;
use crate::wire::{self, Kind, MAX_DATA};

/// Most bytes an operation may have queued towards the host.
const OUT_LIMIT: usize = 1024 * 1024;
/// How much the host may send ahead of the operation.
const WINDOW: u64 = 1024 * 1024;
/// Credit is given back in pieces of this size.
const GRANT: u64 = 128 * 1024;
const STACK: usize = 256 * 1024;
const MOST_RUNNING: usize = 32;

/// How operations wake the loop: the streams that have something, and a bell.
pub struct Bells {
    ready: Mutex<Vec<u32>>,
    bell: OwnedFd,
    running: AtomicUsize,
}

impl Bells {
    pub fn new() -> std::io::Result<Arc<Self>> {
        Ok(Arc::new(Self { ready: Mutex::new(Vec::new()), bell: sys::eventfd()?, running: AtomicUsize::new(0) }))
    }

    pub fn fd(&self) -> RawFd {
        self.bell.as_raw_fd()
    }

    /// The streams that rang since the last call.
    pub fn take(&self) -> Vec<u32> {
        sys::hush_bell(self.fd());
        std::mem::take(&mut *lock(&self.ready))
    }

    fn ring(&self, stream: u32) {
        let mut ready = lock(&self.ready);
        if !ready.contains(&stream) {
            ready.push(stream);
            sys::ring_bell(self.fd());
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One piece on its way to the host.
pub enum Item {
    /// A whole frame.
    Frame(Vec<u8>),
    /// Raw bytes of channel 1, sent from the offset on.
    Data(Vec<u8>, usize),
}

#[derive(Default)]
struct State {
    out: VecDeque<Item>,
    out_bytes: usize,
    inbox: VecDeque<Vec<u8>>,
    in_eof: bool,
    cancelled: bool,
    receiving: bool,
    /// Credit to be sent to the host.
    grant: u64,
    result: Option<Result<Value, OpError>>,
    wake: Option<OwnedFd>,
}

/// A running operation, as both sides hold it.
pub struct Running {
    stream: u32,
    state: Mutex<State>,
    changed: Condvar,
    bells: Arc<Bells>,
}

/// Makes this thread, and no other, touch files as `user`; the thread ends with its operation. Only the effective ids
/// change: for the real and saved ones, by which processes are signalled and traced, it stays the agent's. Bare system
/// calls, because the C library would change every thread.
fn act_as(user: &User) -> Result<(), OpError> {
    let keep = u32::MAX;
    unsafe {
        if (libc::geteuid(), libc::getegid()) == (user.uid, user.gid) && user.uid == 0 {
            return Ok(());
        }
        let groups = &user.groups;
        sys::check(libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) as i32)?;
        sys::check(libc::syscall(libc::SYS_setresgid, keep, user.gid, keep) as i32)?;
        sys::check(libc::syscall(libc::SYS_setresuid, keep, user.uid, keep) as i32)?;
        let ids = (libc::syscall(libc::SYS_geteuid) as u32, libc::syscall(libc::SYS_getegid) as u32);
        if ids != (user.uid, user.gid) {
            return Err(OpError::from_errno(libc::EPERM));
        }
    }
    Ok(())
}

impl Running {
    /// Runs `op` on a thread, as `user` if there is one. Its RESULT is collected by `finished`.
    pub fn start(
        stream: u32,
        op: OpFn,
        req: Req,
        user: Option<User>,
        bells: &Arc<Bells>,
    ) -> Result<Arc<Self>, OpError> {
        if bells.running.load(Ordering::Relaxed) >= MOST_RUNNING {
            return Err(OpError::new("exhausted", "too many file operations at once"));
        }
        let running = Arc::new(Self { stream, state: Mutex::default(), changed: Condvar::new(), bells: bells.clone() });
        let mut side = ThreadSide { running: running.clone() };
        let body = move || {
            let work = |side: &mut ThreadSide| {
                if let Some(user) = &user {
                    act_as(user)?;
                }
                op(&req, side)
            };
            let result = catch_unwind(AssertUnwindSafe(|| work(&mut side)))
                .unwrap_or_else(|_| Err(OpError::new("internal", "the operation failed inside the agent")));
            side.running.bells.running.fetch_sub(1, Ordering::Relaxed);
            side.running.lock().result = Some(result);
            side.running.bells.ring(stream);
        };
        bells.running.fetch_add(1, Ordering::Relaxed);
        std::thread::Builder::new().stack_size(STACK).spawn(body).map_err(|_| {
            bells.running.fetch_sub(1, Ordering::Relaxed);
            OpError::new("exhausted", "no thread can be started for the operation")
        })?;
        Ok(running)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// The next piece to send. Data only comes out when there is credit.
    pub fn take(&self, credit: u64) -> Option<Item> {
        let mut state = self.lock();
        if credit == 0 && matches!(state.out.front(), Some(Item::Data(..))) {
            return None;
        }
        state.out.pop_front()
    }

    /// Says that `count` bytes of a piece are gone; what is left of it comes back to the front.
    pub fn sent(&self, count: usize, rest: Option<Item>) {
        let mut state = self.lock();
        state.out_bytes = state.out_bytes.saturating_sub(count);
        if let Some(rest) = rest {
            state.out.push_front(rest);
        }
        drop(state);
        self.changed.notify_all();
    }

    pub fn has_output(&self, credit: u64) -> bool {
        match self.lock().out.front() {
            None => false,
            Some(Item::Data(..)) => credit > 0,
            Some(Item::Frame(_)) => true,
        }
    }

    /// Credit the operation wants to give.
    pub fn take_grant(&self) -> u64 {
        std::mem::take(&mut self.lock().grant)
    }

    pub fn deliver(&self, data: Vec<u8>) {
        self.lock().inbox.push_back(data);
        self.changed.notify_all();
    }

    pub fn deliver_eof(&self) {
        self.lock().in_eof = true;
        self.changed.notify_all();
    }

    pub fn cancel(&self) {
        let mut state = self.lock();
        state.cancelled = true;
        state.out.clear();
        state.out_bytes = 0;
        if let Some(fd) = &state.wake {
            sys::ring_bell(fd.as_raw_fd());
        }
        drop(state);
        self.changed.notify_all();
    }

    /// The result, once all that came before it is sent.
    pub fn finished(&self) -> Option<Result<Value, OpError>> {
        let mut state = self.lock();
        if state.out.is_empty() {
            state.result.take()
        } else {
            None
        }
    }
}

struct ThreadSide {
    running: Arc<Running>,
}

impl ThreadSide {
    fn push(&mut self, item: Item, size: usize) -> Result<(), OpError> {
        let mut state = self.running.lock();
        while state.out_bytes > 0 && state.out_bytes + size > OUT_LIMIT && !state.cancelled {
            state = self.running.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if state.cancelled {
            return Err(OpError::cancelled());
        }
        state.out_bytes += size;
        state.out.push_back(item);
        drop(state);
        self.running.bells.ring(self.running.stream);
        Ok(())
    }
}

impl OpIo for ThreadSide {
    fn event(&mut self, value: Value) -> Result<(), OpError> {
        let frame = wire::control(self.running.stream, Kind::Event, &value)
            .ok_or_else(|| OpError::new("exhausted", "an event is longer than the protocol allows"))?;
        let size = frame.len();
        self.push(Item::Frame(frame), size)
    }

    fn send(&mut self, data: &[u8]) -> Result<(), OpError> {
        data.chunks(MAX_DATA).try_for_each(|piece| self.push(Item::Data(piece.to_vec(), 0), piece.len()))
    }

    fn recv(&mut self) -> Result<Option<Vec<u8>>, OpError> {
        let mut state = self.running.lock();
        if !state.receiving {
            state.receiving = true;
            state.grant = WINDOW;
            self.running.bells.ring(self.running.stream);
        }
        loop {
            if state.cancelled {
                return Err(OpError::cancelled());
            }
            if let Some(data) = state.inbox.pop_front() {
                state.grant += data.len() as u64;
                if state.grant >= GRANT || state.inbox.is_empty() {
                    self.running.bells.ring(self.running.stream);
                }
                return Ok(Some(data));
            }
            if state.in_eof {
                return Ok(None);
            }
            state = self.running.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn cancelled(&self) -> bool {
        self.running.lock().cancelled
    }

    fn wake_fd(&self) -> RawFd {
        let mut state = self.running.lock();
        if state.wake.is_none() {
            state.wake = sys::eventfd().ok();
            if let (true, Some(fd)) = (state.cancelled, &state.wake) {
                sys::ring_bell(fd.as_raw_fd());
            }
        }
        state.wake.as_ref().map_or(-1, AsRawFd::as_raw_fd)
    }
}
