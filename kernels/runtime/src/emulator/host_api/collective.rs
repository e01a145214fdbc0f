//! Collectives of a warp, and barriers of a block and of a cluster.

use std::ffi::{c_char, c_void};

use super::super::block::{
    Block, State, ThreadContext, abandon, maybe_yield, name, scheduler, suspend,
};
use super::super::meeting::Meeting;

/// `emulator::CollectiveOp`: runs once over the payloads of all lanes of the mask.
pub type CollectiveOp = unsafe extern "C" fn(payloads: *const *mut c_void, mask: u32);

fn lanes(mask: u32) -> impl Iterator<Item = u32> + Clone {
    (0..32).filter(move |lane| mask & (1 << lane) != 0)
}

impl Block {
    /// Thread `thread` arrives at a collective; returns whether all lanes of the mask have arrived.
    ///
    /// # Errors
    /// Why they can never meet.
    fn arrive(&mut self, thread: u32, mask: u32, op: usize) -> Result<bool, String> {
        let (warp_base, lane) = (thread / 32 * 32, thread % 32);
        let meeting = &mut self.meetings[(thread / 32) as usize];
        if meeting.expects(lane, mask, op) {
            return Ok(meeting.arrive(lane));
        }
        if let Some(reason) = self.impossible_collective(warp_base, lane, mask, op) {
            return Err(reason);
        }
        // Checks one lane at a time: another collective of this warp is in progress, or this one
        // starts.
        let state = |other: u32| &self.states[(warp_base + other) as usize];
        let here = |other: u32| matches!(state(other), State::AtCollective { mask: m, op: o, .. } if (*m, *o) == (mask, op));
        let elsewhere =
            |other: u32| matches!(state(other), State::AtCollective { .. }) && !here(other);
        let arrived =
            lanes(mask).filter(|&other| here(other)).fold(0, |bits, other| bits | 1 << other);
        let alone = !lanes(mask).any(elsewhere);
        let meeting = &mut self.meetings[(thread / 32) as usize];
        *meeting = Meeting { mask, op, arrived, alone, ..*meeting };
        Ok(meeting.arrive(lane))
    }

    /// The payloads of the lanes of the mask, all of which have arrived.
    fn payloads(&self, warp_base: u32, mask: u32) -> [*mut c_void; 32] {
        let mut payloads = [std::ptr::null_mut(); 32];
        for lane in lanes(mask) {
            if let State::AtCollective { payload, .. } = self.states[(warp_base + lane) as usize] {
                payloads[lane as usize] = payload;
            }
        }
        payloads
    }

    /// The collective is complete: its lanes may continue.
    fn release_collective(&mut self, warp_base: u32, mask: u32) {
        self.meetings[(warp_base / 32) as usize].arrived = 0;
        for lane in lanes(mask) {
            let thread = warp_base + lane;
            if thread != self.current {
                self.make_ready(thread);
            }
        }
        self.states[self.current as usize] = State::Ready;
    }

    /// Why lane `lane` can never meet the others of `mask`, if so.
    fn impossible_collective(
        &self,
        warp_base: u32,
        lane: u32,
        mask: u32,
        op: usize,
    ) -> Option<String> {
        if mask & (1 << lane) == 0 {
            return Some(format!("is not named in its own mask {mask:#010x}"));
        }
        lanes(mask).find_map(|other| {
            let thread = (warp_base + other) as usize;
            match self.states.get(thread) {
                None => Some(format!(
                    "mask {mask:#010x} names lane {other}, which the block does not have"
                )),
                Some(State::Exited) => {
                    Some(format!("mask {mask:#010x} names lane {other}, which has exited"))
                }
                Some(State::AtCollective { mask: theirs, op: their_op, what, .. })
                    if *theirs != mask || *their_op != op =>
                {
                    (theirs & (1 << lane) != 0).then(|| {
                        format!(
                            "mask {mask:#010x}: lane {other} waits in {} with mask {theirs:#010x}",
                            name(*what)
                        )
                    })
                }
                Some(_) => None,
            }
        })
    }
}

// SAFETY of the functions below: see `scheduler`.

pub unsafe extern "C" fn collective(
    context: *mut ThreadContext,
    mask: u32,
    what: *const c_char,
    op: CollectiveOp,
    payload: *mut c_void,
) {
    let block = unsafe { scheduler(context) };
    let thread = block.current;
    let all_here = match block.arrive(thread, mask, op as usize) {
        Ok(all_here) => all_here,
        Err(reason) => unsafe {
            abandon(context, format!("{}: {reason} (divergence)", name(what)))
        },
    };
    block.states[thread as usize] = State::AtCollective { mask, op: op as usize, what, payload };
    let warp_base = thread / 32 * 32;
    if all_here {
        let payloads = block.payloads(warp_base, mask);
        // SAFETY: every payload points into the stack of a suspended (or this) coroutine, whose
        // type is the one that `op` was instantiated for: all lanes arrived with the same `op`.
        // `op` may call the host API, so no reference to the block is alive here.
        unsafe { op(payloads.as_ptr(), mask) };
        let block = unsafe { scheduler(context) };
        block.release_collective(warp_base, mask);
        if block.failure.is_some() {
            unsafe { suspend(context) };
        }
        unsafe { maybe_yield(context) };
    } else {
        unsafe { suspend(context) };
    }
}

pub unsafe extern "C" fn barrier(
    context: *mut ThreadContext,
    id: u32,
    count: u32,
    wait: u32,
    vote: u32,
    place: *const c_char,
) -> u32 {
    let block = unsafe { scheduler(context) };
    let thread = block.current;
    if id >= 16 {
        unsafe { abandon(context, format!("uses barrier {id}; a block has barriers 0 to 15")) };
    }
    let barrier = &mut block.barriers[id as usize];
    if barrier.arrived > 0 && barrier.expected != count {
        let expected = barrier.expected;
        unsafe {
            abandon(
                context,
                format!(
                    "arrives at barrier {id} for {count} threads while others wait for {expected}"
                ),
            )
        };
    }
    // Usually the same literal; the text is read only for different ones. All places of a named
    // barrier are null, none of the block's barrier is.
    if barrier.arrived > 0 && barrier.place != place && name(barrier.place) != name(place) {
        // Two places of one line differ in what follows #.
        let line = |place| name(place).split('#').next().unwrap_or_default().to_owned();
        let [here, there] = [place, barrier.place].map(line);
        let what = format!(
            "calls __syncthreads at {here} while others of its block wait at {there} (divergence)"
        );
        unsafe { abandon(context, what) };
    }
    barrier.place = place;
    barrier.expected = count;
    barrier.arrived += 1;
    barrier.votes += u32::from(vote != 0);
    let mut release = std::mem::take(&mut barrier.release);
    block.told(thread, |races, who| races.release(who, &mut release));
    let barrier = &mut block.barriers[id as usize];
    barrier.release = release;
    if barrier.arrived == count {
        let released = std::mem::take(&mut barrier.waiting);
        barrier.result = barrier.votes;
        (barrier.arrived, barrier.votes) = (0, 0);
        let clock = std::mem::take(&mut barrier.release).clock();
        // One that only arrives learns nothing.
        let waits = (wait != 0).then_some(thread);
        for waiting in released.iter().copied().chain(waits) {
            block.told(waiting, |races, who| races.acquire(who, &clock));
        }
        released.into_iter().for_each(|other| block.make_ready(other));
        unsafe { maybe_yield(context) };
    } else if wait != 0 {
        barrier.waiting.push(thread);
        block.states[thread as usize] = State::AtBarrier { id };
        unsafe { suspend(context) };
    }
    unsafe { scheduler(context) }.barriers[id as usize].result
}

/// The lanes of the mask meet in a `__syncwarp`: called by one of them, in a collective.
pub unsafe extern "C" fn warp_sync(context: *mut ThreadContext, mask: u32) {
    let block = unsafe { scheduler(context) };
    let warp_base = block.current / 32 * 32;
    block.told(block.current, |races, (rank, _)| {
        races.meet(rank, lanes(mask).map(|lane| warp_base + lane))
    });
}

pub unsafe extern "C" fn cluster_barrier(context: *mut ThreadContext, wait: u32) {
    let block = unsafe { scheduler(context) };
    let waits = if wait == 0 {
        block.arrive_at_cluster().map(|()| false)
    } else {
        block.waits_at_cluster()
    };
    match waits {
        Ok(true) => unsafe { suspend(context) },
        Ok(false) => unsafe { maybe_yield(context) },
        Err(what) => unsafe { abandon(context, what) },
    }
}
