//! A device of either kind, its kernel tree and its loaded modules.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, Weak};

use super::backend::{Backend, BackendKind, Environment, KernelExports, LoadedModule, Recorder};
use super::cache::ModuleCache;
use super::cuda::{self, CudaBackend};
use super::emulator::EmulatorOptions;
use super::error::{Result, RuntimeError};
use super::in_process;
use super::jobs;
use super::matrix::MatrixLibrary;
use super::params::Params;
use super::recording::RecordingBackend;
use super::remote::{RemoteBackend, RemoteOptions};
use super::serial::Serial;
use super::source::{Module, SourceTree, module};
use super::tensor::{HostTensor, TensorView};
use super::tensor_map::{MapWords, TensorMap};
use super::world::crew::{Means, Ranks, Terms};
use super::world::{Silent, World};

/// How to open a [`Device`].
#[derive(Clone, Debug)]
pub struct DeviceOptions {
    /// Kernel sources to compile.
    pub tree: SourceTree,
    /// Directory of compiled modules.
    pub cache_dir: PathBuf,
    /// What the emulator needs to know.
    pub emulator: EmulatorOptions,
    /// Options of the separate process that holds a GPU's context: a kernel that breaks the context
    /// then fails only one case. `None` keeps the context in this process, as a debugger or a
    /// profiler needs it.
    pub remote: Option<RemoteOptions>,
}

impl DeviceOptions {
    /// These kernels, in the default cache, in a separate process.
    pub fn of(tree: SourceTree) -> Self {
        Self {
            tree,
            cache_dir: ModuleCache::default_dir(),
            emulator: EmulatorOptions::default(),
            remote: Some(RemoteOptions::default()),
        }
    }
}

type Modules = Arc<Mutex<HashMap<Module, Arc<dyn LoadedModule>>>>;

/// Named tensors, in upload order.
pub type NamedTensors = Vec<(String, HostTensor)>;

/// How the tensors that an operator uploads are handled.
enum Exchange {
    /// They are uploaded.
    None,
    /// They are recorded, and nothing is launched.
    Record(Mutex<NamedTensors>),
    /// They are replaced by these.
    Replace(BTreeMap<String, HostTensor>),
}

/// One device, with the kernels of one source tree. Threads may share it. A thread that records or
/// measures holds it until it is done. Two devices of one GPU have separate streams. They also have
/// separate contexts, unless they are in this process.
pub struct Device {
    backend: Arc<dyn Backend>,
    tree: Arc<SourceTree>,
    modules: Modules,
    exchange: Arc<Exchange>,
    /// The environment that launchers see, where it is not the backend's own.
    environment: Option<Environment>,
    invariant: bool,
    others: Others,
    /// The world of which this device is a rank.
    world: Option<Arc<dyn World>>,
}

/// The ranks that a device can have.
#[derive(Clone)]
enum Others {
    /// None: the caller owns the device's process.
    None,
    /// Ranks that only record.
    Silent,
    /// Processes with devices of the same kind, and the modules of each.
    Processes(Arc<Ranks>, Arc<Mutex<RankModules>>),
}

/// The modules of each rank, by the process that has loaded them. After a failure ranks are other
/// processes, to which the modules of those before mean nothing.
type RankModules = HashMap<usize, (Weak<RemoteBackend>, Modules)>;

/// The modules of a rank that is this process now.
fn modules_of(known: &Mutex<RankModules>, rank: usize, device: &Arc<RemoteBackend>) -> Modules {
    let mut known = known.lock().unwrap_or_else(|e| e.into_inner());
    let (owner, modules) = known.entry(rank).or_default();
    if !std::ptr::eq(owner.as_ptr(), Arc::as_ptr(device)) {
        (*owner, *modules) = (Arc::downgrade(device), Modules::default());
    }
    modules.clone()
}

impl Others {
    /// The same ranks, for another source tree.
    fn without_modules(&self) -> Self {
        match self {
            Self::Processes(ranks, _) => Self::Processes(ranks.clone(), Arc::default()),
            other => other.clone(),
        }
    }
}

impl Device {
    /// Opens a device of the demanded kind.
    ///
    /// # Errors
    /// [`RuntimeError::BackendMissing`] that lists what was searched for.
    pub fn open(kind: BackendKind, options: DeviceOptions) -> Result<Self> {
        if !jobs::is_linked() {
            let reason = "this program was linked without the initialiser of workers";
            return Err(RuntimeError::system("opening a device", std::io::Error::other(reason)));
        }
        let cache = ModuleCache::new(options.cache_dir.clone());
        let ranks = Ranks::new(kind, options.cache_dir.clone(), options.remote.unwrap_or_default());
        let others = Others::Processes(Arc::new(ranks), Arc::default());
        let backend: Arc<dyn Backend> = match (kind, options.remote) {
            (BackendKind::Cuda, Some(remote)) => {
                // Checked first, so that no process is started where there is no driver.
                cuda::require_driver()?;
                let remote = RemoteBackend::open(kind, options.cache_dir, remote)?;
                Arc::new(Serial::new(Box::new(remote)))
            }
            (BackendKind::Cuda, None) => {
                Arc::new(Serial::new(in_process::open(kind, None, cache, options.emulator)?))
            }
            (BackendKind::Emulator | BackendKind::External, _) => {
                in_process::open(kind, None, cache, options.emulator)?.into()
            }
        };
        Ok(Self { others, ..Self::of(backend, options.tree) })
    }

    /// This backend, with these kernels.
    pub(super) fn of(backend: Arc<dyn Backend>, tree: SourceTree) -> Self {
        Self {
            backend,
            tree: Arc::new(tree),
            modules: Modules::default(),
            exchange: Arc::new(Exchange::None),
            environment: None,
            invariant: false,
            others: Others::None,
            world: None,
        }
    }

    /// A device that launches nothing and records what is uploaded ([`super::recording`]).
    pub fn recording(environment: Environment, tree: SourceTree) -> Self {
        let backend = Arc::new(RecordingBackend::new(environment));
        let exchange = Arc::new(Exchange::Record(Mutex::default()));
        Self { exchange, others: Others::Silent, ..Self::of(backend, tree) }
    }

    /// A device that holds tensors in host memory, for launches that take place elsewhere: a launch
    /// on it is an error.
    pub fn holding(environment: Environment, tree: SourceTree) -> Self {
        Self::of(Arc::new(RecordingBackend::new(environment)), tree)
    }

    /// A device that claims to be `environment`, accepts launches and runs none: outputs keep the
    /// contents of their allocation. It shows which kernels a launcher chooses there.
    pub fn accepting(environment: Environment, tree: SourceTree) -> Self {
        Self::of_accepting(Arc::new(RecordingBackend::accepting(environment)), tree)
    }

    /// A device of [`RecordingBackend::accepting`], whose launches can then be read
    /// ([`RecordingBackend::take_accepted`]).
    pub fn of_accepting(backend: Arc<RecordingBackend>, tree: SourceTree) -> Self {
        Self { others: Others::Silent, ..Self::of(backend, tree) }
    }

    /// The GPU with this number, in its primary context and in this process, for callers that own
    /// tensors there and choose the stream ([`cuda::on_stream`]).
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_gpu(ordinal: u32, options: DeviceOptions) -> Result<Self> {
        let backend = CudaBackend::of_device(ordinal, ModuleCache::new(options.cache_dir))?;
        Ok(Self::of(Arc::new(Serial::new(Box::new(backend))), options.tree))
    }

    /// The uploads since the last call, by name (`_` for spaces); empty for a device that does not
    /// record.
    pub fn take_recorded(&self) -> NamedTensors {
        match &*self.exchange {
            Exchange::Record(recorded) => {
                std::mem::take(&mut recorded.lock().unwrap_or_else(|e| e.into_inner()))
            }
            _ => Vec::new(),
        }
    }

    /// The same device, on which every uploaded tensor is replaced by the tensor of the same name
    /// in `inputs`.
    pub fn with_inputs(&self, inputs: BTreeMap<String, HostTensor>) -> Self {
        Self { exchange: Arc::new(Exchange::Replace(inputs)), ..self.again() }
    }

    /// The same emulated device with that many SMs, by which launchers size their grids. `None`
    /// for a GPU, which has the SMs that it has, and for a device that only records.
    pub fn with_sms(&self, sms: u32) -> Option<Self> {
        let environment = self.environment();
        if environment.backend != BackendKind::Emulator || self.records() {
            return None;
        }
        let environment = Environment { processors: sms.max(1), ..environment.clone() };
        Some(Self { environment: Some(environment), ..self.again() })
    }

    /// The same device, on which launchers choose kernels whose bits do not depend on the batch:
    /// work is divided by what a row itself has, never by the number of rows or SMs.
    pub fn invariant(&self) -> Self {
        Self { invariant: true, ..self.again() }
    }

    /// Whether launchers choose kernels whose bits do not depend on the batch.
    pub fn is_invariant(&self) -> bool {
        self.invariant
    }

    /// The same device: its modules, and what it records or replaces.
    pub(super) fn again(&self) -> Self {
        Self {
            backend: self.backend.clone(),
            tree: self.tree.clone(),
            modules: self.modules.clone(),
            exchange: self.exchange.clone(),
            environment: self.environment.clone(),
            invariant: self.invariant,
            others: self.others.clone(),
            world: self.world.clone(),
        }
    }

    /// What launchers see of this device, on another backend: without ranks, with own modules.
    pub(super) fn on_backend(&self, backend: Arc<dyn Backend>) -> Self {
        Self {
            backend,
            modules: Modules::default(),
            exchange: Arc::new(Exchange::None),
            others: Others::None,
            world: None,
            ..self.again()
        }
    }

    /// The world of which this device is a rank; `None` for a device that is alone.
    pub fn world(&self) -> Option<&(dyn World + 'static)> {
        self.world.as_deref()
    }

    /// How the collectives of `size` ranks of this device move tensors; `None` where it has no
    /// ranks.
    ///
    /// # Errors
    /// As [`Ranks::means`].
    pub fn means(&self, size: usize) -> Result<Option<Means>> {
        match &self.others {
            Others::Processes(ranks, _) => ranks.means(size).map(Some),
            Others::None | Others::Silent => Ok(None),
        }
    }

    /// The processes of this device's ranks.
    pub fn processes_of_ranks(&self) -> Vec<u32> {
        match &self.others {
            Others::Processes(ranks, _) => ranks.processes(),
            Others::None | Others::Silent => Vec::new(),
        }
    }

    /// Does `work` on `size` ranks at the same time and returns the results by rank. Each gets a
    /// device of its own, with these kernels, whose [`Device::world`] has the others. The seed
    /// `delays` delays them before and after collectives. On a device that only records, ranks work
    /// one after the other, and collectives move nothing.
    ///
    /// # Errors
    /// As [`Ranks::run`]; [`RuntimeError::BackendMissing`] for a device that has no ranks.
    pub fn on_ranks<T: Send>(
        &self,
        size: usize,
        delays: Option<u64>,
        work: impl Fn(&Self) -> Result<T> + Sync,
    ) -> Result<Vec<T>> {
        let (ranks, modules) = match &self.others {
            Others::Processes(ranks, modules) => (ranks, modules),
            Others::Silent => {
                let silent = |rank| {
                    let world: Arc<dyn World> = Arc::new(Silent { rank, size });
                    work(&Self { world: Some(world), ..self.again() })
                };
                return (0..size).map(silent).collect();
            }
            Others::None => {
                let reason = "a device in its caller's own context has no ranks".into();
                return Err(RuntimeError::BackendMissing { backend: "ranks", reason });
            }
        };
        let terms = Terms { size, delays, schedule: self.backend.schedule_seed() };
        ranks.run(terms, &|_| {}, &|member| {
            let modules = modules_of(modules, member.world.rank(), &member.device);
            let (backend, world) = (member.device, Some(member.world));
            work(&Self {
                backend,
                modules,
                exchange: Arc::new(Exchange::None),
                others: Others::None,
                world,
                ..self.again()
            })
        })
    }

    /// The replacement for the upload called `name`, from [`Self::with_inputs`].
    pub fn replacement(&self, name: &str) -> Option<&HostTensor> {
        match &*self.exchange {
            Exchange::Replace(inputs) => inputs.get(&name.replace(' ', "_")),
            _ => None,
        }
    }

    /// The same device with another source tree (a mutant, another revision). The two trees share
    /// no compiled modules except through the disk cache.
    pub fn with_tree(&self, tree: SourceTree) -> Self {
        let tree = Arc::new(tree);
        Self {
            backend: self.backend.clone(),
            tree,
            modules: Modules::default(),
            exchange: Arc::new(Exchange::None),
            environment: self.environment.clone(),
            invariant: self.invariant,
            others: self.others.without_modules(),
            world: self.world.clone(),
        }
    }

    /// Whether this device only records uploads and launches nothing.
    pub(super) fn records(&self) -> bool {
        matches!(*self.exchange, Exchange::Record(_))
    }

    /// The tensor to upload under `name`, instead of or equal to `tensor`.
    pub(super) fn exchanged<'t>(
        &self,
        name: &str,
        tensor: &'t HostTensor,
    ) -> Result<Cow<'t, HostTensor>> {
        let name = name.replace(' ', "_");
        match &*self.exchange {
            Exchange::None => Ok(Cow::Borrowed(tensor)),
            Exchange::Record(recorded) => {
                let mut recorded = recorded.lock().unwrap_or_else(|e| e.into_inner());
                match recorded.iter().find(|(other, _)| *other == name) {
                    None => recorded.push((name, tensor.clone())),
                    Some((_, before)) if before == tensor => {}
                    Some(_) => {
                        return Err(refused_input(
                            &name,
                            "two unlike inputs of the operator have this name",
                        ));
                    }
                }
                Ok(Cow::Borrowed(tensor))
            }
            Exchange::Replace(inputs) => {
                // The backward's copy of a forward input is that forward input, unless it is given
                // separately.
                let given = inputs.get(&name).or_else(|| inputs.get(name.strip_prefix("saved_")?));
                let given = given.ok_or_else(|| refused_input(&name, "it is missing"))?;
                if (given.dtype, &given.shape) != (tensor.dtype, &tensor.shape) {
                    return Err(refused_input(
                        &name,
                        &format!("{given:?} where the case has {tensor:?}"),
                    ));
                }
                Ok(Cow::Owned(given.clone()))
            }
        }
    }

    /// The description of the device.
    pub fn environment(&self) -> &Environment {
        self.environment.as_ref().unwrap_or_else(|| self.backend.environment())
    }

    /// The kernel sources in use.
    pub fn tree(&self) -> &SourceTree {
        &self.tree
    }

    /// Memory, time and copies.
    pub fn backend(&self) -> &dyn Backend {
        &*self.backend
    }

    /// Records graphs; `None` where a recording is nothing but its launches again.
    pub fn graphs(&self) -> Option<&dyn Recorder> {
        self.backend.recorder().filter(|_| self.environment().backend == BackendKind::Cuda)
    }

    /// Reads a tensor, densely.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn read(&self, view: &TensorView) -> Result<HostTensor> {
        let mut bytes = vec![0; view.elements() * view.dtype.size()];
        let (offsets, piece) = view.pieces();
        for (offset, part) in offsets.into_iter().zip(bytes.chunks_mut(piece.max(1))) {
            self.backend.download(view.address + offset as u64, part)?;
        }
        Ok(HostTensor { dtype: view.dtype, shape: view.shape.clone(), bytes })
    }

    /// Writes a tensor of the type and the shape of `view`.
    ///
    /// # Errors
    /// A tensor of another type or shape; errors of the device.
    pub fn write(&self, view: &TensorView, tensor: &HostTensor) -> Result<()> {
        if (tensor.dtype, &tensor.shape) != (view.dtype, &view.shape) {
            let reason = format!(
                "{tensor:?} in the place of {} {:?} `{}`",
                view.dtype, view.shape, view.name
            );
            return Err(RuntimeError::argument("Device::write", "tensor", reason));
        }
        let (offsets, piece) = view.pieces();
        for (offset, part) in offsets.into_iter().zip(tensor.bytes.chunks(piece.max(1))) {
            self.backend.upload(view.address + offset as u64, part)?;
        }
        Ok(())
    }

    /// The library for matrix products, with other kernels than the tree's; `None` where there is
    /// no library.
    pub fn matrix_library(&self) -> Option<&dyn MatrixLibrary> {
        self.backend.matrix_library()
    }

    /// The value that a kernel's parameters hold for a tensor of which it copies TMA boxes:
    /// [`Params::tensor_map`] takes it.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn tensor_map(&self, map: &TensorMap) -> Result<MapWords> {
        self.backend.tensor_map(map)
    }

    /// Looks up kernel `name` of `file`, compiled with `defines`.
    ///
    /// # Errors
    /// Compile errors with the log; a missing symbol.
    pub fn kernel(&self, file: &str, defines: &[(&str, String)], name: &str) -> Result<Kernel> {
        let module = self.module(module(file, defines))?;
        let exports = module.exports(name)?;
        let (tree, runs) = (self.tree.clone(), self.backend.runs());
        Ok(Kernel { module, tree, file: file.to_owned(), name: name.to_owned(), exports, runs })
    }

    /// The modules that launches have compiled or loaded so far: file and defines, sorted.
    pub fn loaded_modules(&self) -> Vec<Module> {
        let mut modules: Vec<_> =
            self.modules.lock().unwrap_or_else(|e| e.into_inner()).keys().cloned().collect();
        modules.sort();
        modules
    }

    /// The backend's compiled form of a module: equal in two trees only if both do the same. `None`
    /// on a backend without such a form.
    ///
    /// # Errors
    /// Compile errors with the log.
    pub fn assembly(&self, (file, defines): &Module) -> Result<Option<Vec<u8>>> {
        self.backend.assembly(&self.tree, file, defines)
    }

    pub(super) fn module(&self, key: Module) -> Result<Arc<dyn LoadedModule>> {
        // Before the lock on the modules, which a recording thread takes as well.
        let _turn = self.backend.turn();
        // Held while compiling: two threads that need one module compile it once.
        let mut modules = self.modules.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(module) = modules.get(&key) {
            return Ok(module.clone());
        }
        let module: Arc<dyn LoadedModule> =
            Arc::from(self.backend.load(&self.tree, &key.0, &key.1)?);
        modules.insert(key, module.clone());
        Ok(module)
    }
}

fn refused_input(name: &str, reason: &str) -> RuntimeError {
    let reason = std::io::Error::new(std::io::ErrorKind::InvalidInput, reason);
    RuntimeError::system(format!("exchanging input `{name}`"), reason)
}

/// Grid and block of a launch; the dynamic shared memory is the size that the kernel exports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchConfig {
    /// Blocks along x, y, z.
    pub grid: [u32; 3],
    /// Threads along x, y, z.
    pub block: [u32; 3],
    /// Dynamic shared memory in bytes, in addition to what the kernel exports.
    pub shared_bytes: u32,
}

impl LaunchConfig {
    /// A one-dimensional launch.
    ///
    /// # Errors
    /// [`RuntimeError::Argument`] naming `argument` when `blocks` exceeds CUDA's grid limit.
    pub fn linear(
        operator: &'static str,
        argument: &'static str,
        blocks: u64,
        threads: u32,
    ) -> Result<Self> {
        let x = u32::try_from(blocks).ok().filter(|&x| x <= i32::MAX as u32).ok_or_else(|| {
            RuntimeError::argument(
                operator,
                argument,
                format!("needs {blocks} blocks; a grid has at most 2147483647"),
            )
        })?;
        Ok(Self { grid: [x, 1, 1], block: [threads, 1, 1], shared_bytes: 0 })
    }
}

/// A kernel that is ready to launch.
#[derive(Clone)]
pub struct Kernel {
    module: Arc<dyn LoadedModule>,
    tree: Arc<SourceTree>,
    file: String,
    name: String,
    exports: KernelExports,
    /// Whether launches run, so that the layout of the parameters is known.
    runs: bool,
}

impl Kernel {
    /// The block size that the kernel was compiled for.
    pub fn max_threads(&self) -> u32 {
        self.exports.max_threads
    }

    /// Lower bound on the blocks that this device runs at once, as the kernel exports it.
    pub fn resident_blocks(&self, environment: &Environment) -> usize {
        let of_one = self.exports.resident_blocks.unwrap_or(1);
        usize::try_from(of_one)
            .unwrap_or(usize::MAX)
            .max(1)
            .saturating_mul(environment.processors as usize)
    }

    /// Blocks of a cluster; 1 for a kernel that is launched without clusters.
    pub fn cluster(&self) -> usize {
        self.exports.cluster.max(1) as usize
    }

    /// Clusters that the device runs at once, at least one. Waiting clusters start when others end.
    pub fn resident_clusters(&self, environment: &Environment) -> usize {
        let by_blocks = || self.resident_blocks(environment) / self.cluster();
        self.exports.resident_clusters.map_or_else(by_blocks, |clusters| clusters as usize).max(1)
    }

    /// Whether a block of this device has the shared memory that the kernel needs.
    pub fn fits(&self, environment: &Environment) -> bool {
        self.exports.shared_bytes.unwrap_or(0) <= environment.shared_bytes_per_block
    }

    /// Enqueues a launch of `blocks` blocks in x, with the number of threads that the kernel was
    /// compiled for.
    ///
    /// # Errors
    /// [`RuntimeError::Argument`] naming `argument` when `blocks` exceeds CUDA's grid limit; see
    /// [`Self::launch`].
    pub fn launch_blocks(
        &self,
        argument: &'static str,
        blocks: usize,
        params: &Params,
    ) -> Result<()> {
        self.launch(
            LaunchConfig::linear(params.operator(), argument, blocks as u64, self.max_threads())?,
            params,
        )
    }

    /// As [`Self::launch_blocks`], in whole clusters: enough for this many blocks, at most as many
    /// as fit in `most` blocks, and at least one.
    ///
    /// # Errors
    /// As [`Self::launch_blocks`].
    pub fn launch_clusters(
        &self,
        argument: &'static str,
        blocks: usize,
        most: usize,
        params: &Params,
    ) -> Result<()> {
        let cluster = self.cluster();
        let clusters = blocks.div_ceil(cluster).min((most / cluster).max(1));
        self.launch_blocks(argument, clusters.saturating_mul(cluster), params)
    }

    /// Enqueues a launch on the device's stream; a grid without blocks launches nothing.
    ///
    /// # Errors
    /// [`RuntimeError::ParamsLayout`] when the kernel's parameter struct is a different one; see
    /// [`LoadedModule::launch`].
    pub fn launch(&self, config: LaunchConfig, params: &Params) -> Result<()> {
        if self.runs {
            self.check_layout(params)?;
        }
        if config.grid.contains(&0) {
            return Ok(());
        }
        let own = self.exports.shared_bytes.unwrap_or(0);
        let shared = u32::try_from(own)
            .ok()
            .and_then(|own| own.checked_add(config.shared_bytes))
            .ok_or_else(|| RuntimeError::Launch {
            kernel: self.name.clone(),
            reason: format!("{own} bytes of dynamic shared memory"),
        })?;
        tracing::trace!(kernel = %self.name, grid = ?config.grid, block = ?config.block, shared, "launch");
        self.module.launch(&self.name, config.grid, config.block, shared, &params.bytes())
    }

    fn check_layout(&self, params: &Params) -> Result<()> {
        let (rust_size, rust_hash) = params.layout();
        if (self.exports.params_size, self.exports.params_hash) == (rust_size, rust_hash) {
            return Ok(());
        }
        Err(RuntimeError::ParamsLayout {
            kernel: self.name.clone(),
            rust_size,
            rust_hash,
            kernel_size: self.exports.params_size,
            kernel_hash: self.exports.params_hash,
            difference: params.difference(&self.tree, &self.file, &self.name),
        })
    }
}
