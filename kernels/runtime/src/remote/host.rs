//! The process that contains the device.

use std::collections::HashMap;
use std::convert::Infallible;
use std::io;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use super::Place;
use super::message::{Answer, Request, Span};
use crate::backend::{Backend, LoadedModule, Recorded};
use crate::cache::ModuleCache;
use crate::emulator::EmulatorOptions;
use crate::error::{Result, RuntimeError};
use crate::in_process;
use crate::worker::link::Link;
use crate::world::meeting::{Meeting, Member, Seat, Seated, Transport};
use crate::world::shared::SharedMemory;
use crate::world::{Call, Collectives, World as _};

/// Handles requests until the connection is closed, which is an error.
///
/// # Errors
/// A connection that is closed.
pub fn serve(place: Place, link: &mut Link) -> io::Result<Infallible> {
    let meeting = place.meeting.map(Meeting::of_descriptor).transpose()?.map(Arc::new);
    let backend = match link.receive()?.0 {
        Request::Open { kind, cache_dir, ordinal } => {
            let cache = ModuleCache::new(cache_dir);
            in_process::open(kind, ordinal, cache, EmulatorOptions::default())
        }
        _ => Err(out_of_turn("nothing was opened")),
    };
    let backend = match backend {
        // A GPU's context ends with the process: hanging work in it is not waited for.
        Ok(backend) => ManuallyDrop::new(backend),
        Err(error) => {
            link.answer(&Answer::Failed { failure: error.into(), lost: true }, &[])?;
            // The requesting device no longer needs it.
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    };
    let (environment, records) = (backend.environment().clone(), backend.recorder().is_some());
    link.answer(&Answer::Opened { environment, records }, &[])?;
    let host = Host {
        backend: &**backend,
        modules: HashMap::new(),
        recorded: HashMap::new(),
        meeting,
        shared: SharedMemory::new(&**backend),
        libraries: HashMap::new(),
        seat: None,
        numbers: 0,
        within: 0,
    };
    let mut host = ManuallyDrop::new(host);
    loop {
        let (request, bytes) = link.receive()?;
        host.serve(request, &bytes, link)?;
    }
}

fn out_of_turn(what: &str) -> RuntimeError {
    RuntimeError::system("working for a device", io::Error::other(what))
}

/// The state of the process.
struct Host<'b> {
    backend: &'b dyn Backend,
    modules: HashMap<u64, Box<dyn LoadedModule>>,
    recorded: HashMap<u64, Box<dyn Recorded + 'b>>,
    /// Where it meets the other ranks, if it is one.
    meeting: Option<Arc<Meeting>>,
    shared: SharedMemory<'b>,
    /// Worlds of the library of collectives, by name.
    libraries: HashMap<Vec<u8>, Box<dyn Collectives + 'b>>,
    /// The place in the world, and the name of the library's world.
    seat: Option<(Seated, Vec<u8>)>,
    /// Numbers allocated so far, for modules and recordings.
    numbers: u64,
    /// Spans of work that have started and not ended.
    within: u32,
}

impl Host<'_> {
    /// Handles a request, and answers.
    fn serve(&mut self, request: Request, bytes: &[u8], link: &mut Link) -> io::Result<()> {
        let mut downloaded = Vec::new();
        let done = match request {
            Request::Begin(span) => self.span(span, link)?,
            Request::Download { address, bytes } => {
                downloaded = vec![0; bytes];
                self.backend.download(address, &mut downloaded).map(|()| Answer::Done)
            }
            Request::NameWorld => self.backend.name_of_world().map(|name| {
                downloaded = name;
                Answer::Done
            }),
            other => self.work(other, bytes),
        };
        let answer = done.unwrap_or_else(|error| {
            // After a fault every call fails, including a synchronize without work.
            let lost = self.within == 0 && self.backend.synchronize().is_err();
            downloaded.clear();
            Answer::Failed { failure: error.into(), lost }
        });
        link.answer(&answer, &downloaded)
    }

    fn work(&mut self, request: Request, bytes: &[u8]) -> Result<Answer> {
        let backend = self.backend;
        match request {
            Request::Load { tree, file, defines } => {
                let module = backend.load(&tree, &file, &defines)?;
                let number = self.number();
                self.modules.insert(number, module);
                return Ok(Answer::Module(number));
            }
            Request::Exports { module, kernel } => {
                return self.module(module)?.exports(&kernel).map(Answer::Exports);
            }
            Request::Allocate { name, bytes, placement } => {
                return backend.allocate(&name, bytes, placement).map(Answer::Allocated);
            }
            Request::Reserve { name, bytes, touched, placement } => {
                return backend.reserve(&name, bytes, &touched, placement).map(Answer::Reserved);
            }
            Request::Launch { module, kernel, grid, block, shared_bytes } => {
                self.module(module)?.launch(&kernel, grid, block, shared_bytes, bytes)?;
            }
            Request::Unload { module } => drop(self.modules.remove(&module)),
            Request::Free(allocation) => backend.free(&allocation),
            Request::Fill { address, byte, bytes } => backend.fill(address, byte, bytes)?,
            Request::Upload { address } => backend.upload(address, bytes)?,
            Request::Copy { target, source, bytes } => backend.copy(target, source, bytes)?,
            Request::Synchronize => backend.synchronize()?,
            Request::MatrixLibrary => return Ok(Answer::Has(backend.matrix_library().is_some())),
            Request::Multiply(product) => {
                let library = backend
                    .matrix_library()
                    .ok_or_else(|| out_of_turn("there is no library of products"))?;
                return library.multiply(&product).map(Answer::Has);
            }
            Request::TensorMap(map) => return backend.tensor_map(&map).map(Answer::TensorMap),
            Request::Schedule { seed } => backend.set_schedule_seed(seed),
            Request::Seal(allocation) => backend.seal(&allocation)?,
            Request::Join(seat) => self.join(seat, bytes)?,
            Request::TakePart(call) => self.take_part(&call)?,
            Request::Replay { recorded } => {
                self.recorded
                    .get(&recorded)
                    .ok_or_else(|| out_of_turn("nothing of this number was recorded"))?
                    .launch()?;
            }
            Request::Forget { recorded } => drop(self.recorded.remove(&recorded)),
            Request::Open { .. }
            | Request::Begin(_)
            | Request::Download { .. }
            | Request::NameWorld
            | Request::End { .. } => {
                return Err(out_of_turn("a request came out of its turn"));
            }
        }
        Ok(Answer::Done)
    }

    fn join(&mut self, seat: Seat, name: &[u8]) -> Result<()> {
        let meeting = self.meeting.clone().ok_or_else(|| out_of_turn("it is no rank"))?;
        if !name.is_empty() && !self.libraries.contains_key(name) {
            let library = self.backend.collectives(name, seat.rank, seat.size)?;
            self.libraries.insert(name.to_vec(), library);
        }
        self.seat = Some((Seated::new(meeting, seat), name.to_vec()));
        Ok(())
    }

    fn take_part(&self, call: &Call) -> Result<()> {
        let (seated, name) = self.seat.as_ref().ok_or_else(|| out_of_turn("it is no rank"))?;
        let transport: &dyn Transport = match self.libraries.get(name) {
            Some(library) => library,
            None => &self.shared,
        };
        Member::new(seated, transport).take_part(call)
    }

    /// Handles requests until the span ends, inside the call that measures or records it. The
    /// remaining answer is that of the end, or of the start if it failed.
    fn span(&mut self, span: Span, link: &mut Link) -> io::Result<Result<Answer>> {
        let backend = self.backend;
        let mut broken = Ok(());
        self.within += 1;
        let mut work = || {
            let ended = link.answer(&Answer::Done, &[]).and_then(|()| self.until_end(link));
            match ended {
                Ok(true) => return Ok(()),
                Ok(false) => {}
                Err(error) => broken = Err(error),
            }
            Err(out_of_turn("what was to be measured or recorded could not be done"))
        };
        let done = match span {
            Span::Time => backend.time(&mut work).map(Answer::Taken),
            Span::TimeRecorded => backend.time_recorded(&mut work).map(Answer::Taken),
            Span::Record => match backend.recorder() {
                Some(recorder) => recorder.record(&mut work).map(|recorded| {
                    let number = self.number();
                    self.recorded.insert(number, recorded);
                    Answer::Recorded(number)
                }),
                None => Err(out_of_turn("the device records nothing")),
            },
        };
        self.within -= 1;
        broken.map(|()| done)
    }

    /// Whether the work of the span succeeded.
    fn until_end(&mut self, link: &mut Link) -> io::Result<bool> {
        loop {
            match link.receive()? {
                (Request::End { failed }, _) => return Ok(!failed),
                (request, bytes) => self.serve(request, &bytes, link)?,
            }
        }
    }

    fn number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }

    fn module(&self, number: u64) -> Result<&dyn LoadedModule> {
        self.modules
            .get(&number)
            .map(|module| &**module)
            .ok_or_else(|| out_of_turn("a module is not loaded"))
    }
}
