//! Keeping interpreters warm: when one is started, when it makes a spare, which run gets it. Whatever goes wrong here
//! costs a run its head start and nothing else.

use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use rmpv::Value;

use super::{token, waiting, Agent, Timer};
use crate::launch::Plan;
use crate::op::{map, OpError, Req};
use crate::proctree;
use crate::shim::{self, Report, REPORT_BYTES};
use crate::sys::{self, IN};
use crate::warm::{self, Interpreter, Spare, Wish, Zygote};

/// The first run of an interpreter has the machine for itself; a sandbox made for one run never starts a second one.
const QUIET: Duration = Duration::from_millis(100);
/// A run that comes right behind another waits this long for the next spare, once.
const PATIENCE_MS: i32 = 10;
/// After this many deaths the sandbox does without.
const MOST_DEATHS: u32 = 5;
/// A spare that nobody took for so long gives its memory back; one that did not come by then never will.
const COOLING: Duration = Duration::from_secs(10);
/// An interpreter that has not started by then is given up.
const START_TIME: Duration = Duration::from_secs(60);
const ZYGOTE: u32 = 0;
const SPARE: u32 = 1;

/// The warm interpreters of this sandbox.
#[derive(Default)]
pub struct Warm {
    pub wish: Wish,
    zygote: Option<Zygote>,
    spare: Option<Spare>,
    /// The interpreter to start when it is quiet.
    wanted: Option<Interpreter>,
    /// The last one was taken, and no other has been ordered since.
    used: bool,
    /// The spare was waited for in vain.
    waited: bool,
    look_at: Option<Instant>,
    deaths: u32,
    hits: u64,
    misses: u64,
}

impl Warm {
    pub fn new(wish: Wish) -> Self {
        Self { wish, ..Self::default() }
    }

    /// Processes of the agent's own.
    pub fn pids(&self) -> impl Iterator<Item = i32> + '_ {
        let spare = self.spare.iter().flat_map(|s| [s.shim.pid, s.main]);
        self.zygote.iter().map(|z| z.pid).chain(spare)
    }

    pub fn value(&self, node: Value) -> Value {
        map([
            ("hits", self.hits.into()),
            ("misses", self.misses.into()),
            ("ready", self.spare.as_ref().is_some_and(|s| s.main > 0).into()),
            ("deaths", self.deaths.into()),
            ("node", node),
        ])
    }
}

impl Agent {
    pub(super) fn warm_early(&mut self) {
        if self.warm.wish.early {
            self.at(Instant::now(), Timer::Warm);
        }
    }

    /// The settings changed, or the environment that every run starts with.
    pub(super) fn warm_changed(&mut self, req: &Req) -> Result<(), OpError> {
        let wish = match req.opt_map("warm")? {
            Some(fields) => wish(&Req::new(fields.clone()))?,
            None => self.warm.wish.clone(),
        };
        let old = std::mem::replace(&mut self.warm.wish, wish);
        let same = old.python == self.warm.wish.python && old.preload == self.warm.wish.preload;
        self.node_changed(old.node == self.warm.wish.node);
        let plain = self.launcher.plain()?.env;
        let fits = same && self.warm.zygote.as_ref().is_none_or(|z| z.suits(&plain, false));
        if !fits {
            self.warm.wanted = self.retire_warm();
            if self.warm.wanted.is_some() {
                self.at(Instant::now() + QUIET, Timer::Warm);
            }
        }
        Ok(())
    }

    /// Ends what is warm: the interpreter that was.
    fn retire_warm(&mut self) -> Option<Interpreter> {
        // Both end by themselves when nobody is at the other end; a stopped one does not.
        self.warm.spare = None;
        let zygote = self.warm.zygote.take()?;
        let _ = sys::kill(zygote.pid, libc::SIGKILL);
        Some(zygote.interpreter)
    }

    /// Interpreters that only wait give their memory back.
    pub(super) fn give_up_waiting(&mut self) {
        self.end_node();
        self.retire_warm();
    }

    pub(super) fn on_warm_timer(&mut self) {
        let name = c"python3";
        let wanted = match self.warm.wanted.take() {
            Some(wanted) => Some(wanted),
            None => self.launcher.look_up(name.to_bytes()).ok().and_then(|found| Interpreter::look(name, &found)),
        };
        if !self.warm.wish.python || self.warm.zygote.is_some() || self.warm.deaths >= MOST_DEATHS {
            return;
        }
        let Some(interpreter) = wanted else { return };
        match Zygote::start(&mut self.launcher, interpreter, &self.warm.wish) {
            Ok(zygote) => {
                self.poll.set(zygote.control.as_raw_fd(), token::of(token::WARM, ZYGOTE), 0, IN);
                self.warm.zygote = Some(zygote);
                self.look_again(START_TIME);
            }
            Err(_) => self.warm.deaths += 1,
        }
    }

    pub(super) fn on_warm(&mut self, id: u32) {
        match id {
            SPARE => return self.on_spare(),
            waiting::CONTROL => return self.on_node_control(),
            waiting::VOICE => return self.on_node_voice(),
            _ => {}
        }
        let Some(zygote) = &mut self.warm.zygote else { return };
        let fd = zygote.control.as_raw_fd();
        match sys::read(fd, &mut [0; 16]) {
            Ok(1..) => {
                zygote.ready = true;
                self.order_spare(true);
            }
            Err(e) if sys::would_block(&e) => {}
            // It is ending, and will be reaped.
            _ => self.poll.set(fd, token::of(token::WARM, ZYGOTE), IN, 0),
        }
    }

    fn order_spare(&mut self, hot: bool) {
        if self.warm.spare.is_some() {
            return;
        }
        let ordered = self.warm.zygote.as_ref().filter(|z| z.ready).and_then(|z| z.order(hot).ok());
        if ordered.is_some() {
            self.look_again(COOLING);
        }
        if let Some(spare) = &ordered {
            self.poll.set(spare.shim.control.as_raw_fd(), token::of(token::WARM, SPARE), 0, IN);
        }
        self.warm.spare = ordered;
        self.warm.waited = false;
    }

    fn on_spare(&mut self) {
        let Some(spare) = &mut self.warm.spare else { return };
        let mut raw = [0; REPORT_BYTES];
        match sys::read(spare.shim.control.as_raw_fd(), &mut raw) {
            Ok(REPORT_BYTES) => {
                if let Some(Report::Ready { pid, shim }) = shim::decode_report(&raw).filter(|_| spare.main == 0) {
                    (spare.main, spare.shim.pid) = (pid, shim);
                    return;
                }
            }
            Err(e) if sys::would_block(&e) => return,
            _ => {}
        }
        // Killed, or never born. The next run asks for another one.
        self.warm.spare = None;
    }

    /// A spare for this plan, if a fork is all that its program needs.
    pub(super) fn take_warm(&mut self, plan: &Plan) -> Option<Spare> {
        if !self.warm.wish.python {
            return None;
        }
        let interpreter = Interpreter::of(plan)?;
        let taken = self.find_spare(&interpreter, plan);
        if taken.is_none() {
            self.warm.misses += 1;
        }
        taken
    }

    fn find_spare(&mut self, interpreter: &Interpreter, plan: &Plan) -> Option<Spare> {
        let Some(zygote) = &self.warm.zygote else {
            if self.warm.wanted.is_none() && self.warm.deaths < MOST_DEATHS {
                self.warm.wanted = Some(interpreter.clone());
                self.at(Instant::now() + QUIET, Timer::Warm);
            }
            return None;
        };
        if zygote.interpreter.replaced_by(interpreter) {
            self.warm.wanted = self.retire_warm().map(|_| interpreter.clone());
            self.at(Instant::now() + QUIET, Timer::Warm);
            return None;
        }
        if !zygote.ready || zygote.interpreter != *interpreter {
            return None;
        }
        let script = plan.spec.argv.get(1).is_some_and(|arg| arg.to_bytes() != b"-c");
        if !zygote.suits(&plan.spec.env, script) {
            return None;
        }
        self.order_spare(false);
        let spare = self.warm.spare.as_ref()?;
        if spare.main == 0 && !self.warm.waited {
            self.warm.waited = true;
            sys::await_input(spare.shim.control.as_raw_fd(), PATIENCE_MS);
            self.on_spare();
        }
        let spare = self.warm.spare.take_if(|s| s.main > 0)?;
        self.poll.set(spare.shim.control.as_raw_fd(), token::of(token::WARM, SPARE), IN, 0);
        if self.is_sound(spare.shim.pid, spare.main) {
            return Some(spare);
        }
        self.order_spare(true);
        None
    }

    /// A spare's report comes from an interpreter of the sandbox, which may have been made to lie: a shim that is no
    /// child of ours would never be reaped, and its run never be over. One that was stopped would not begin, and is ended.
    pub(super) fn is_sound(&self, shim: i32, main: i32) -> bool {
        let child =
            |pid: i32, parent: i32| proctree::look(pid).filter(|e| e.ppid == parent && !e.is_dead() && !e.is_killed);
        if shim <= 1 || self.shim_pids().contains(&shim) {
            return false;
        }
        let (Some(above), Some(below)) = (child(shim, std::process::id() as i32), child(main, shim)) else {
            return false;
        };
        let sound = [above, below].iter().all(|e| !matches!(e.state, b'T' | b't'));
        if !sound {
            let _ = sys::kill(main, libc::SIGKILL);
            let _ = sys::kill(shim, libc::SIGKILL);
        }
        sound
    }

    /// A run got its spare; the next one is made when it has ended, or beside it if it takes long.
    pub(super) fn warm_used(&mut self) {
        self.warm.hits += 1;
        self.warm.used = true;
    }

    pub(super) fn replenish_warm(&mut self) {
        if std::mem::take(&mut self.warm.used) {
            self.order_spare(true);
        }
    }

    fn look_again(&mut self, later: Duration) {
        if let Some(old) = self.warm.look_at.take() {
            self.timers.remove(&(old, Timer::WarmLook));
        }
        let when = Instant::now() + later;
        self.warm.look_at = Some(when);
        self.at(when, Timer::WarmLook);
    }

    /// Nothing has changed for a while: what was awaited is given up, what was kept hot for the next run cools down.
    pub(super) fn on_warm_look(&mut self) {
        self.warm.look_at = None;
        let Some(zygote) = &self.warm.zygote else { return };
        let stuck = !zygote.ready || self.warm.spare.as_ref().is_some_and(|s| s.main == 0);
        if stuck {
            self.warm.deaths += 1;
            self.warm.wanted = self.retire_warm();
            self.at(Instant::now(), Timer::Warm);
        } else if self.warm.spare.take_if(|s| s.hot).is_some() {
            self.order_spare(false);
        }
    }

    /// Whether the dead child was one of the warm ones.
    pub(super) fn warm_reaped(&mut self, pid: i32, status: i32) -> bool {
        if self.warm.spare.as_ref().is_some_and(|s| s.shim.pid == pid) {
            self.warm.spare = None;
            return true;
        }
        let Some(zygote) = self.warm.zygote.take_if(|z| z.pid == pid) else { return false };
        self.warm.spare = None;
        match libc::WIFEXITED(status).then(|| libc::WEXITSTATUS(status)) {
            Some(warm::UNSUPPORTED) => self.warm.deaths = MOST_DEATHS,
            Some(warm::STALE) => {
                self.warm.wanted = Some(zygote.interpreter);
                self.at(Instant::now(), Timer::Warm);
            }
            _ => self.warm.deaths += 1,
        }
        true
    }
}

/// Reads the settings as boot and `configure` give them.
pub fn wish(fields: &Req) -> Result<Wish, OpError> {
    let preload = if fields.has("preload") { fields.bytes_list("preload")? } else { Vec::new() };
    let preload = preload.into_iter().filter_map(|name| String::from_utf8(name).ok());
    let is_name = |name: &String| name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'.');
    Ok(Wish {
        python: fields.opt_bool("python", false)?,
        early: fields.opt_bool("early", false)?,
        preload: preload.filter(is_name).collect(),
        node: fields.opt_bool("node", false)?,
        node_early: fields.opt_bool("node_early", false)?,
        memory_mb: fields.opt_u64("memory_mb")?.unwrap_or(0),
    })
}
