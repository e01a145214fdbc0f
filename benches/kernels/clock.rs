//! The clock of criterion: it measures device time.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use criterion::Throughput;
use criterion::measurement::{Measurement, ValueFormatter};
use dsv4_runtime::{Device, Result};

/// A clock that runs only while the device works. It advances by the time between two CUDA events
/// around work that was recorded as a graph (on the emulator: by the wall clock). Host time does
/// not count. Without a graph, two launches of a few microseconds would take as long as the host
/// needs to enqueue them.
#[derive(Clone, Default)]
pub struct DeviceTime {
    now: Rc<Cell<Duration>>,
}

impl DeviceTime {
    /// Runs the work that `work` enqueues between two events, advances the clock and returns the
    /// time.
    ///
    /// # Errors
    /// Those of `work` and of the device.
    pub fn interval(
        &self,
        device: &Device,
        work: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Duration> {
        let elapsed = device.backend().time_recorded(work)?;
        self.now.set(self.now.get() + elapsed);
        Ok(elapsed)
    }
}

impl Measurement for DeviceTime {
    type Intermediate = Duration;
    type Value = Duration;

    fn start(&self) -> Duration {
        self.now.get()
    }

    fn end(&self, start: Duration) -> Duration {
        self.now.get() - start
    }

    fn add(&self, a: &Duration, b: &Duration) -> Duration {
        *a + *b
    }

    fn zero(&self) -> Duration {
        Duration::ZERO
    }

    fn to_f64(&self, value: &Duration) -> f64 {
        value.as_nanos() as f64
    }

    fn formatter(&self) -> &dyn ValueFormatter {
        &DeviceFormatter
    }
}

/// Microseconds, decimal gigabytes per second, and teraflops per second (one element is one FLOP).
struct DeviceFormatter;

impl ValueFormatter for DeviceFormatter {
    fn scale_values(&self, _typical_ns: f64, values: &mut [f64]) -> &'static str {
        values.iter_mut().for_each(|ns| *ns *= 1e-3);
        "µs"
    }

    fn scale_throughputs(
        &self,
        _typical_ns: f64,
        throughput: &Throughput,
        values: &mut [f64],
    ) -> &'static str {
        let (amount, unit) = match *throughput {
            Throughput::Bits(bits) => (bits as f64 / 8.0, "GB/s"),
            Throughput::Bytes(bytes) | Throughput::BytesDecimal(bytes) => (bytes as f64, "GB/s"),
            Throughput::Elements(flops) | Throughput::ElementsAndBytes { elements: flops, .. } => {
                (flops as f64 * 1e-3, "TFLOP/s")
            }
        };
        // One per nanosecond is 1e9 per second.
        values.iter_mut().for_each(|ns| *ns = amount / *ns);
        unit
    }

    fn scale_for_machines(&self, _values: &mut [f64]) -> &'static str {
        "ns"
    }
}
