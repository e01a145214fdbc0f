//! Collectives of a launcher, each seen by a tap.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::panic::Location;

use dsv4_runtime::world::{Call, Collective};
use dsv4_runtime::{Device, Result, RuntimeError, TensorView, Views, World};

use crate::model::tap::{Site, Tap};

/// A rank that launches, and who sees it.
pub(super) struct Rank<'a> {
    /// The operator that it launches, as errors name it.
    pub operator: &'static str,
    pub device: &'a Device,
    pub world: &'a (dyn World + 'static),
    pub tap: &'a mut dyn Tap,
    /// Kernels of rows that ran.
    pub rows: RefCell<BTreeSet<&'static str>>,
}

impl<'a> Rank<'a> {
    /// The rank that a device is.
    ///
    /// # Errors
    /// A device that is alone.
    pub fn of(operator: &'static str, device: &'a Device, tap: &'a mut dyn Tap) -> Result<Self> {
        let alone = || RuntimeError::argument(operator, "device", "it is no rank of a world");
        let world = device.world().ok_or_else(alone)?;
        Ok(Self { operator, device, world, tap, rows: RefCell::default() })
    }

    /// Runs `launch`, seen as a launch of `operator`.
    pub fn launch<T>(
        &mut self,
        operator: &'static str,
        name: &str,
        views: &Views,
        launch: impl Fn(&Device) -> Result<T>,
    ) -> Result<Option<T>> {
        let (device, mut done) = (self.device, None);
        self.tap.around(device, Site { operator, name, layer: None, views }, &mut || {
            done = Some(launch(device)?);
            Ok(())
        })?;
        Ok(done)
    }

    /// The sources of all ranks, one behind the other by rank.
    #[track_caller]
    pub fn all_gather(
        &mut self,
        name: &str,
        source: &TensorView,
        target: &TensorView,
    ) -> Result<()> {
        self.moved("all_gather", name, [source, target], &|world| world.all_gather(source, target))
    }

    /// The sum over ranks of this rank's part of their sources.
    #[track_caller]
    pub fn reduce_scatter(
        &mut self,
        name: &str,
        source: &TensorView,
        target: &TensorView,
    ) -> Result<()> {
        let call = |world: &dyn World| world.reduce_scatter(source, target);
        self.moved("reduce_scatter", name, [source, target], &call)
    }

    /// A collective from one tensor to another.
    #[track_caller]
    fn moved(
        &mut self,
        collective: &'static str,
        name: &str,
        [source, target]: [&TensorView; 2],
        call: &dyn Fn(&dyn World) -> Result<()>,
    ) -> Result<()> {
        let (world, place) = (self.world, Location::caller());
        let views = Views::from([("source", source), ("target", target)]);
        self.launch(collective, name, &views, |_| at(place, world, call))?;
        Ok(())
    }

    /// The sum over ranks, in place.
    #[track_caller]
    pub fn all_reduce(&mut self, name: &str, buffer: &TensorView) -> Result<()> {
        let (world, place) = (self.world, Location::caller());
        self.launch("all_reduce", name, &Views::from([("buffer", buffer)]), |_| {
            at(place, world, &|world| world.all_reduce(buffer))
        })?;
        Ok(())
    }

    /// Sends tensors to other ranks and receives some.
    #[track_caller]
    pub fn exchange(
        &mut self,
        name: &str,
        sends: &[(usize, TensorView)],
        receives: &[(usize, TensorView)],
    ) -> Result<()> {
        let (world, place) = (self.world, Location::caller());
        // A tap sees the first of each: halos of more than one rank are rare.
        let first = |all: &[(usize, TensorView)]| all.first().map(|(_, view)| view.clone());
        let mut views = Views::new();
        for (name, view) in [("source", first(sends)), ("target", first(receives))] {
            if let Some(view) = view {
                views.put(name, view);
            }
        }
        self.launch("exchange", name, &views, |_| {
            at(place, world, &|world| world.exchange(sends, receives))
        })?;
        Ok(())
    }
}

/// Calls a collective as from another place: errors name the launcher's line, not this file.
fn at(
    place: &Location<'_>,
    world: &dyn World,
    call: &dyn Fn(&dyn World) -> Result<()>,
) -> Result<()> {
    struct From<'w> {
        place: &'w Location<'w>,
        world: &'w dyn World,
    }
    impl World for From<'_> {
        fn rank(&self) -> usize {
            self.world.rank()
        }

        fn size(&self) -> usize {
            self.world.size()
        }

        fn take_part(&self, call: &Call) -> Result<()> {
            let (file, line) = (self.place.file().to_owned(), self.place.line());
            let collective: Collective = call.collective.clone();
            let site = dsv4_runtime::world::Site { file, line };
            self.world.take_part(&Call { collective, site })
        }
    }
    call(&From { place, world })
}
