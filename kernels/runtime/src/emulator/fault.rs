//! Signals: an access outside of every buffer, and an endless kernel, become errors.
//!
//! A coroutine that faults (or is interrupted because its launch ran out of time) returns from its
//! stack at once, through corosensei's trap handler. Kernel code has no destructors, so nothing is
//! lost. The scheduler then reads the cause and reports the block and thread.

use std::cell::Cell;
use std::ptr;
use std::sync::Once;

use corosensei::trap::CoroutineTrapHandler;

use super::accesses::AccessKind;
use super::dim3::Dim3;

/// How a coroutine ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The kernel returned.
    Returned,
    /// It accessed this address, which is not its memory.
    Segfault {
        /// The address.
        address: usize,
        /// The coroutine's stack pointer lay in its guard page.
        stack_overflow: bool,
    },
    /// An integer division by zero.
    DivisionByZero,
    /// `abort`: a failed assertion, an uncaught exception, a local array overrun up to its
    /// function's frame.
    Aborted,
    /// An instruction that the compiler put at unreachable code.
    IllegalInstruction,
    /// The launch's time ran out while it ran.
    Interrupted,
}

/// An invalid memory access; [`GuardedMemory::describe`] reports the buffer that it concerns.
///
/// [`GuardedMemory::describe`]: super::memory::GuardedMemory::describe
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BadAccess {
    /// To memory that does not belong to the thread.
    Outside {
        /// The address.
        address: usize,
    },
    /// Of several bytes at once, at an address that is not a multiple of that number.
    Misaligned {
        /// The address.
        address: usize,
        /// Bytes of the access.
        bytes: u32,
        /// The instruction, or the type that was read or written, and its position in the source.
        what: String,
    },
    /// Of a byte that another block also accesses, with no order between the two.
    Unordered {
        /// The address.
        address: usize,
        /// The kind of this access.
        kind: AccessKind,
        /// The other block.
        other: Dim3,
        /// The kind of the other access.
        other_kind: AccessKind,
    },
}

/// The state of this thread's coroutine that the signal handler needs.
#[derive(Clone, Copy)]
pub struct Running {
    /// Makes the coroutine return.
    pub trap: CoroutineTrapHandler<Ending>,
    /// The range of the module's machine code. A coroutine may be interrupted only there, because
    /// other code (the allocator, say) may hold a lock.
    pub code: (usize, usize),
}

thread_local! {
    static RUNNING: Cell<Option<Running>> = const { Cell::new(None) };
}

/// Sets the coroutine that this thread runs, for the handlers; `None` when it runs none.
pub fn set_running(running: Option<Running>) {
    RUNNING.set(running);
}

/// The signal that the watchdog sends. Ignored by default, so a late one is harmless.
pub const INTERRUPT: libc::c_int = libc::SIGURG;

/// Bytes of the stack of a thread's handlers: the thread's own stack may have overflowed.
const SIGNAL_STACK_BYTES: usize = 64 * 1024;

/// The handlers' stack of the calling thread, as long as this lives.
pub struct SignalStack {
    _memory: Box<[u8]>,
}

impl SignalStack {
    /// Gives the calling thread such a stack.
    pub fn of_this_thread() -> Self {
        let mut memory = vec![0; SIGNAL_STACK_BYTES].into_boxed_slice();
        let stack =
            libc::stack_t { ss_sp: memory.as_mut_ptr().cast(), ss_flags: 0, ss_size: memory.len() };
        // SAFETY: the memory lives until `drop` has taken it away from the thread.
        unsafe { libc::sigaltstack(&stack, ptr::null_mut()) };
        Self { _memory: memory }
    }
}

impl Drop for SignalStack {
    fn drop(&mut self) {
        let none = libc::stack_t { ss_sp: ptr::null_mut(), ss_flags: libc::SS_DISABLE, ss_size: 0 };
        // SAFETY: no handler runs on it: this is ordinary code of the same thread.
        unsafe { libc::sigaltstack(&none, ptr::null_mut()) };
    }
}

static INSTALL: Once = Once::new();
static mut PREVIOUS: [Option<libc::sigaction>; 6] = [None; 6];
// At unreachable code the compiler puts an illegal instruction on x86 and a breakpoint on Arm.
const HANDLED: [libc::c_int; 6] =
    [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP, libc::SIGABRT];

/// Installs the handlers, once for the process.
pub fn install_handlers() {
    // SAFETY: `Once` makes this the only writer of PREVIOUS, before any handler can run; the
    // handler is async-signal-safe (it reads a thread-local Cell and edits the interrupted
    // context).
    INSTALL.call_once(|| unsafe {
        for (slot, &signal) in HANDLED.iter().enumerate() {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_signal as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_NODEFER;
            let mut previous: libc::sigaction = std::mem::zeroed();
            libc::sigaction(signal, &action, &mut previous);
            (*ptr::addr_of_mut!(PREVIOUS))[slot] = Some(previous);
        }
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_interrupt as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
        libc::sigaction(INTERRUPT, &action, ptr::null_mut());
    });
}

#[cfg(target_arch = "x86_64")]
mod context {
    use corosensei::trap::TrapHandlerRegs;

    pub fn stack_pointer(context: &libc::ucontext_t) -> usize {
        context.uc_mcontext.gregs[libc::REG_RSP as usize] as usize
    }
    pub fn instruction_pointer(context: &libc::ucontext_t) -> usize {
        context.uc_mcontext.gregs[libc::REG_RIP as usize] as usize
    }
    pub fn redirect(context: &mut libc::ucontext_t, regs: &TrapHandlerRegs) {
        let gregs = &mut context.uc_mcontext.gregs;
        gregs[libc::REG_RIP as usize] = regs.rip as i64;
        gregs[libc::REG_RSP as usize] = regs.rsp as i64;
        gregs[libc::REG_RBP as usize] = regs.rbp as i64;
        gregs[libc::REG_RDI as usize] = regs.rdi as i64;
        gregs[libc::REG_RSI as usize] = regs.rsi as i64;
    }
}

#[cfg(target_arch = "aarch64")]
mod context {
    use corosensei::trap::TrapHandlerRegs;

    pub fn stack_pointer(context: &libc::ucontext_t) -> usize {
        context.uc_mcontext.sp as usize
    }
    pub fn instruction_pointer(context: &libc::ucontext_t) -> usize {
        context.uc_mcontext.pc as usize
    }
    pub fn redirect(context: &mut libc::ucontext_t, regs: &TrapHandlerRegs) {
        let machine = &mut context.uc_mcontext;
        machine.pc = regs.pc;
        machine.sp = regs.sp;
        machine.regs[0] = regs.x0;
        machine.regs[1] = regs.x1;
        machine.regs[29] = regs.x29;
        machine.regs[30] = regs.lr;
    }
}

/// Makes the interrupted coroutine return `ending`, if this thread runs one and is on its stack.
unsafe fn end_coroutine(
    context: *mut libc::c_void,
    ending: impl FnOnce(usize) -> Ending,
    in_code_only: bool,
) -> bool {
    let Some(running) = RUNNING.get() else { return false };
    // SAFETY: the kernel passes a valid ucontext to an SA_SIGINFO handler.
    let context = unsafe { &mut *context.cast::<libc::ucontext_t>() };
    let stack_pointer = context::stack_pointer(context);
    if !running.trap.stack_ptr_in_bounds(stack_pointer) {
        return false;
    }
    let pc = context::instruction_pointer(context);
    if in_code_only && !(running.code.0..running.code.1).contains(&pc) {
        return false;
    }
    let ending = ending(stack_pointer);
    RUNNING.set(None);
    // SAFETY: the stack pointer lies within this coroutine (checked above), the registers are
    // stored into the interrupted context as the trap handler requires, and kernel code owns
    // nothing that would have to be dropped.
    let regs = unsafe { running.trap.setup_trap_handler(move || ending) };
    context::redirect(context, &regs);
    true
}

extern "C" fn on_signal(
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    // SAFETY: `info` is valid in an SA_SIGINFO handler, and si_addr is set for these signals.
    let address = unsafe { (*info).si_addr() } as usize;
    let ending = |stack_pointer: usize| match signal {
        libc::SIGSEGV | libc::SIGBUS => Ending::Segfault {
            address,
            stack_overflow: address.abs_diff(stack_pointer) < 64 * 1024,
        },
        libc::SIGFPE => Ending::DivisionByZero,
        libc::SIGABRT => Ending::Aborted,
        _ => Ending::IllegalInstruction,
    };
    // SAFETY: called from the handler with its own context.
    if unsafe { end_coroutine(context, ending, false) } {
        return;
    }
    // Not ours: pass the signal to the previous handler (Rust's stack-overflow report).
    // SAFETY: PREVIOUS was written before the handler was reachable and never changes.
    unsafe {
        if let Some(slot) = HANDLED.iter().position(|&s| s == signal)
            && let Some(previous) = &(*ptr::addr_of!(PREVIOUS))[slot]
        {
            libc::sigaction(signal, previous, ptr::null_mut());
        }
    }
}

extern "C" fn on_interrupt(
    _signal: libc::c_int,
    _info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    // SAFETY: called from the handler with its own context. Where the thread is not in kernel code
    // nothing happens; the watchdog sends the signal again.
    unsafe { end_coroutine(context, |_| Ending::Interrupted, true) };
}
