//! Work that is recorded before it runs: a CUDA graph of the enqueued work of a stream.

use cudarc::driver::sys;

use super::driver::Context;
use crate::backend::Recorded;
use crate::error::Result;

/// Recorded work, on the device and ready to run. Borrows its context, so that it cannot outlive
/// it.
pub(super) struct Graph<'a> {
    context: &'a Context,
    graph: sys::CUgraph,
    executable: sys::CUgraphExec,
}

impl<'a> Graph<'a> {
    /// Records what `work` enqueues on the context's stream; none of it runs.
    ///
    /// # Errors
    /// Errors of `work`, including calls that wait for the device; errors of the driver.
    pub fn record(context: &'a Context, work: &mut dyn FnMut() -> Result<()>) -> Result<Self> {
        context.enter()?;
        let mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives as long as the context, and is the one that `work` enqueues on.
        context.check(
            unsafe { sys::cuStreamBeginCapture_v2(context.stream(), mode) },
            "cuStreamBeginCapture",
        )?;
        let capture = Capture { context };
        let worked = work();
        std::mem::forget(capture);
        let mut recorded =
            Self { context, graph: std::ptr::null_mut(), executable: std::ptr::null_mut() };
        // SAFETY: ends what was begun above, also where `work` failed; writes one handle,
        // destroyed once, in `drop`.
        let ended = unsafe { sys::cuStreamEndCapture(context.stream(), &mut recorded.graph) };
        worked?;
        context.check(ended, "cuStreamEndCapture")?;
        // SAFETY: the graph is whole; writes one handle, destroyed once, in `drop`.
        let made = unsafe {
            sys::cuGraphInstantiateWithFlags(&mut recorded.executable, recorded.graph, 0)
        };
        context.check(made, "cuGraphInstantiate")?;
        // SAFETY: executable and stream are of this context.
        context.check(
            unsafe { sys::cuGraphUpload(recorded.executable, context.stream()) },
            "cuGraphUpload",
        )?;
        Ok(recorded)
    }
}

/// An active capture. It ends when dropped, also after a panic in the work: otherwise all later
/// work would be captured.
struct Capture<'a> {
    context: &'a Context,
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        let mut graph = std::ptr::null_mut();
        // SAFETY: ends what was begun on this stream, by this thread; writes one handle.
        let _ = unsafe { sys::cuStreamEndCapture(self.context.stream(), &mut graph) };
        if !graph.is_null() {
            // SAFETY: made just above, and nothing else uses it.
            let _ = unsafe { sys::cuGraphDestroy(graph) };
        }
    }
}

impl Recorded for Graph<'_> {
    fn launch(&self) -> Result<()> {
        self.context.enter()?;
        // SAFETY: executable and stream are of this context; what the recorded work uses is the
        // caller's to keep.
        self.context.check(
            unsafe { sys::cuGraphLaunch(self.executable, self.context.stream()) },
            "cuGraphLaunch",
        )
    }
}

impl Drop for Graph<'_> {
    fn drop(&mut self) {
        // The work may still be running if waiting for it failed; nothing more can be done about an
        // error here.
        let _ = self.context.synchronize();
        if !self.executable.is_null() {
            // SAFETY: made in `record`, destroyed only here, with nothing of it running.
            let _ = unsafe { sys::cuGraphExecDestroy(self.executable) };
        }
        if !self.graph.is_null() {
            // SAFETY: as above.
            let _ = unsafe { sys::cuGraphDestroy(self.graph) };
        }
    }
}
