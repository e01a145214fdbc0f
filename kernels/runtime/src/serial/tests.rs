//! A device with the recording device's memory and one stream, which is captured as CUDA's streams
//! are. So the effects of threads on each other are tested there without a GPU.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Barrier, Mutex, MutexGuard, mpsc};

use super::*;
use crate::params::{DeviceAddress, Params};
use crate::recording::RecordingBackend;
use crate::{BackendKind, Device, LaunchConfig};

/// Threads that use the device at once, and the number of recordings of each.
const THREADS: u8 = 8;
const ROUNDS: u8 = 20;

const BYTES: usize = 64;
const SOURCE: &str = "struct CopyParams { uint8_t* y; const uint8_t* x; };\n\
                      PARAMS_LAYOUT(CopyParams, y, x)\nKERNEL(copy, CopyParams, 32) {}\n";

/// Enqueued work: copies, `[target, source]`.
type Work = Vec<[u64; 2]>;

/// A capture of the stream, or the rest of it.
#[derive(Default)]
struct Capture {
    work: Work,
    invalidated: bool,
}

struct Stream {
    memory: RecordingBackend,
    capture: Mutex<Option<Capture>>,
}

/// The stream, which modules and recorded work also hold.
#[derive(Clone)]
struct OneStream(Arc<Stream>);

fn refused(call: &str, name: &str) -> RuntimeError {
    RuntimeError::Cuda {
        call: call.into(),
        name: format!("CUDA_ERROR_STREAM_CAPTURE_{name}"),
        message: "".into(),
    }
}

impl OneStream {
    fn new() -> Self {
        let environment = Environment {
            backend: BackendKind::Cuda,
            device: "a model of a stream".into(),
            driver: String::new(),
            compiler: String::new(),
            target: "sm_90a".into(),
            processors: 132,
            shared_bytes_per_block: 232448,
        };
        let memory = RecordingBackend::new(environment);
        Self(Arc::new(Stream { memory, capture: Mutex::default() }))
    }

    fn capture(&self) -> MutexGuard<'_, Option<Capture>> {
        self.0.capture.lock().unwrap()
    }

    fn enqueue(&self, work: &[[u64; 2]]) -> Result<()> {
        match &mut *self.capture() {
            Some(Capture { invalidated: true, .. }) => Err(refused("enqueue", "INVALIDATED")),
            // From any thread.
            Some(capture) => {
                capture.work.extend(work);
                Ok(())
            }
            None => work
                .iter()
                .try_for_each(|[target, source]| self.0.memory.copy(*target, *source, BYTES)),
        }
    }

    /// A call that waits for the stream.
    fn wait(&self, call: &str) -> Result<()> {
        match &mut *self.capture() {
            None => Ok(()),
            Some(capture) => {
                capture.invalidated = true;
                Err(refused(call, "UNSUPPORTED"))
            }
        }
    }
}

impl Backend for OneStream {
    fn environment(&self) -> &Environment {
        self.0.memory.environment()
    }

    fn load(
        &self,
        _: &SourceTree,
        _: &str,
        _: &[(String, String)],
    ) -> Result<Box<dyn LoadedModule>> {
        self.wait("load")?;
        Ok(Box::new(Module(self.clone())))
    }

    fn allocate(&self, name: &str, bytes: usize, placement: Placement) -> Result<Allocation> {
        self.wait("allocate")?;
        self.0.memory.allocate(name, bytes, placement)
    }

    fn reserve(
        &self,
        name: &str,
        bytes: usize,
        touched: &[Range<i64>],
        placement: Placement,
    ) -> Result<Reservation> {
        self.wait("reserve")?;
        self.0.memory.reserve(name, bytes, touched, placement)
    }

    fn free(&self, allocation: &Allocation) {
        let _ = self.wait("free");
        self.0.memory.free(allocation);
    }

    fn fill(&self, address: u64, byte: u8, bytes: usize) -> Result<()> {
        self.wait("fill")?;
        self.0.memory.fill(address, byte, bytes)
    }

    fn upload(&self, address: u64, source: &[u8]) -> Result<()> {
        self.wait("upload")?;
        self.0.memory.upload(address, source)
    }

    fn download(&self, address: u64, target: &mut [u8]) -> Result<()> {
        self.wait("download")?;
        self.0.memory.download(address, target)
    }

    fn copy(&self, target: u64, source: u64, bytes: usize) -> Result<()> {
        assert_eq!(bytes, BYTES);
        self.enqueue(&[[target, source]])
    }

    fn synchronize(&self) -> Result<()> {
        self.wait("synchronize")
    }

    fn time(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<Duration> {
        work()?;
        self.wait("time").map(|()| Duration::from_micros(1))
    }

    fn recorder(&self) -> Option<&dyn Recorder> {
        Some(self)
    }
}

impl Recorder for OneStream {
    fn record(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<Box<dyn Recorded + '_>> {
        if self.capture().replace(Capture::default()).is_some() {
            return Err(refused("begin", "UNMATCHED"));
        }
        let worked = work();
        let ended = self.capture().take().ok_or_else(|| refused("end", "UNMATCHED"));
        worked?;
        match ended? {
            Capture { invalidated: true, .. } => Err(refused("end", "INVALIDATED")),
            Capture { work, .. } => Ok(Box::new(Graph(self.clone(), work))),
        }
    }
}

struct Graph(OneStream, Work);

impl Recorded for Graph {
    fn launch(&self) -> Result<()> {
        self.0.enqueue(&self.1)
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let _ = self.0.wait("destroy");
    }
}

/// Its kernel copies; its parameters are two addresses.
struct Module(OneStream);

impl LoadedModule for Module {
    fn exports(&self, _: &str) -> Result<KernelExports> {
        let (params_size, params_hash) = params(0, 0).layout();
        Ok(KernelExports {
            params_size,
            params_hash,
            max_threads: 32,
            shared_bytes: None,
            resident_blocks: None,
            cluster: 1,
            resident_clusters: None,
        })
    }

    fn launch(&self, _: &str, _: [u32; 3], _: [u32; 3], _: u32, params: &[u8]) -> Result<()> {
        let address = |number: usize| u64::from_ne_bytes(params.as_chunks().0[number]);
        self.0.enqueue(&[[address(0), address(1)]])
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        let _ = self.0.wait("unload");
    }
}

fn params(y: u64, x: u64) -> Params {
    Params::new("copy").ptr("y", DeviceAddress(y)).ptr("x", DeviceAddress(x))
}

/// Launches the copy by a kernel from this thread's own tree.
fn launch(device: &Device, y: u64, x: u64) -> Result<()> {
    let config = LaunchConfig { grid: [1; 3], block: [32, 1, 1], shared_bytes: 0 };
    device.kernel("copy.cu", &[], "copy")?.launch(config, &params(y, x))
}

fn device(backend: Arc<dyn Backend>) -> Device {
    Device::of(backend, crate::testing::kernels().with_text("copy.cu", SOURCE.into(), "a copy"))
}

/// Loads modules, allocates, copies, launches, records and replays, one after the other. Returns an
/// error if a result is not this thread's own.
fn use_device(device: &Device, own: u8) -> Result<()> {
    let backend = device.backend();
    let [x, y, z] = ["x", "y", "z"].map(|name| backend.allocate(name, BYTES, Placement::FlushBack));
    let (x, y, z) = (x?, y?, z?);
    for round in 0..ROUNDS {
        // Another revision of the kernels loads separate modules, and drops them.
        let revision = device.with_tree(device.tree().clone());
        launch(&revision, y.address, x.address)?;
        let recorder = backend.recorder().expect("it records");
        let recorded = recorder.record(&mut || {
            backend.copy(y.address, x.address, BYTES)?;
            std::thread::yield_now();
            launch(&revision, z.address, y.address)
        })?;
        for replay in 0..3 {
            let byte = own ^ (round * 3 + replay).rotate_left(3);
            backend.upload(x.address, &[byte; BYTES])?;
            recorded.launch()?;
            let took = backend.time(&mut || launch(&revision, y.address, z.address))?;
            let mut read = [0; BYTES];
            backend.download(y.address, &mut read)?;
            if read != [byte; BYTES] || took.is_zero() {
                return Err(refused("replay", "MIXED"));
            }
        }
    }
    [x, y, z].iter().for_each(|allocation| backend.free(allocation));
    Ok(())
}

/// The result of each of the threads that use this device at once.
fn used_at_once(backend: Arc<dyn Backend>) -> Vec<Result<()>> {
    let (device, start) = (device(backend), Barrier::new(THREADS.into()));
    std::thread::scope(|scope| {
        let works = |own: u8| {
            let (device, start) = (&device, &start);
            scope.spawn(move || {
                start.wait();
                use_device(device, own)
            })
        };
        let threads: Vec<_> = (0..THREADS).map(works).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    })
}

#[test]
fn eight_threads_that_share_a_stream_record_and_replay_at_once_and_none_sees_launches_of_another() {
    for (thread, used) in
        used_at_once(Arc::new(Serial::new(Box::new(OneStream::new())))).into_iter().enumerate()
    {
        used.unwrap_or_else(|error| panic!("thread {thread}: {error}"));
    }
}

#[test]
fn a_stream_that_threads_share_without_turns_fails_those_that_record() {
    let stream = OneStream::new();
    use_device(&device(Arc::new(stream.clone())), 1).expect("one thread alone is fine");
    let elsewhere = |work: &(dyn Fn() -> Result<()> + Sync)| {
        std::thread::scope(|scope| scope.spawn(work).join().expect("no panic"))
    };
    let backend = device(Arc::new(stream.clone()));
    let [x, y] =
        ["x", "y"].map(|name| stream.allocate(name, BYTES, Placement::FlushBack).unwrap().address);
    launch(&backend, y, x).expect("it is loaded");
    let waits = stream.record(&mut || elsewhere(&|| stream.synchronize()).or(Ok(()))).map(drop);
    assert!(waits.is_err_and(|error| error.to_string().contains("INVALIDATED")));
    // No error is reported, and the other thread's launch never runs.
    stream.upload(x, &[7; BYTES]).unwrap();
    stream.record(&mut || elsewhere(&|| launch(&backend, y, x))).expect("recorded");
    let mut read = [0; BYTES];
    stream.download(y, &mut read).unwrap();
    assert_eq!(read, [0; BYTES]);
}

#[test]
fn a_thread_that_records_has_the_device_until_it_is_done_and_others_get_it_in_the_order_in_which_they_ask()
 {
    let (turns, recording) = (Turns::default(), AtomicBool::new(true));
    let (sender, order) = mpsc::channel();
    std::thread::scope(|scope| {
        let own = turns.take();
        for thread in 0..4u64 {
            let sender = sender.clone();
            let (turns, recording) = (&turns, &recording);
            scope.spawn(move || {
                let _turn = turns.take();
                assert!(!recording.load(Ordering::SeqCst), "the device was in use");
                sender.send(thread).unwrap();
            });
            while turns.state().given < thread + 2 {
                std::thread::yield_now();
            }
        }
        // As the calls within a recording do.
        drop(turns.take());
        recording.store(false, Ordering::SeqCst);
        drop(own);
    });
    drop(sender);
    assert_eq!(order.iter().collect::<Vec<_>>(), [0, 1, 2, 3]);
}

#[test]
fn a_turn_ends_with_a_panic_of_its_thread() {
    let turns = Arc::new(Turns::default());
    let other = turns.clone();
    let panics = std::thread::spawn(move || {
        let _turn = other.take();
        panic!("planned");
    });
    assert!(panics.join().is_err());
    drop(turns.take());
    assert!(turns.state().holder.is_none());
}
