//! Calls of an operator's kernels on a caller's tensors, without an arena, an oracle
//! or data: for users of the kernels, such as the Python package.
//!
//! A case declares everything about its tensors. So a caller finds the case that declares the
//! tensors at hand, among the operator's own cases with other numbers ([`AnyOperator::call`]), and
//! calls its launches on views of them.

use dsv4_runtime::{Device, Environment, RuntimeError, TensorView, Views};
use proptest::strategy::{Strategy as _, ValueTree as _};
use proptest::test_runner::TestRunner;

use super::Profile;
use super::any::{AnyCase, AnyOperator};
use super::benchmarks::Direction;
use super::declaration::{Part, Specs, TensorSpec};
use super::declared::Launches;
use super::layouts::TensorLayout;
use super::lines::read;
use crate::case::{Case, CaseError};

/// Drawn cases among [`AnyOperator::templates`]. They cover choices that exclude each other.
const DRAWN: usize = 200;

/// A case as a call of its kernels: which tensors it takes, and its launches.
#[derive(Clone)]
pub struct Call {
    case: AnyCase,
    specs: Specs,
}

impl Call {
    /// The tensors of both directions.
    pub fn specs(&self) -> &Specs {
        &self.specs
    }

    /// Its tensors that have memory, each with a view in the layout that the case declares, at the
    /// address that `address_of` gives for its number among all that the operator declares.
    ///
    /// # Errors
    /// A layout beyond all addresses.
    pub fn placed(
        &self,
        address_of: impl Fn(usize) -> u64,
    ) -> Result<Vec<(TensorSpec, TensorView)>, CaseError> {
        let placed = |(number, spec): (usize, &TensorSpec)| {
            let layout = TensorLayout::default().place(spec).map_err(CaseError::Malformed)?;
            let view = TensorView {
                name: spec.name.to_owned(),
                address: address_of(number),
                dtype: spec.dtype,
                shape: spec.shape(),
                strides: layout.strides,
            };
            Ok((spec.clone(), view))
        };
        let declared = self.specs.all().iter().enumerate();
        declared.filter(|(_, spec)| spec.present && spec.is_stored()).map(placed).collect()
    }

    pub(super) fn any_case(&self) -> AnyCase {
        self.case.clone()
    }

    /// The line of the case.
    pub fn line(&self) -> Case {
        self.case.line()
    }

    /// Whether the case has a backward.
    pub fn has_backward(&self) -> bool {
        self.specs.gradients().next().is_some()
    }

    /// Why it cannot run on a device like this one.
    pub fn cannot_run(&self, environment: &Environment) -> Option<String> {
        self.case.cannot_run(environment)
    }

    /// The same call with the fastest kernels of a device like this one, if they take and write the
    /// same tensors; otherwise the call itself.
    pub fn fastest(&self, environment: &Environment) -> Self {
        let case = self.case.fastest(environment);
        let fastest = Self { specs: case.tensors(), case };
        let tensors = |call: &Self| -> Vec<_> {
            let lasting = |spec: &&TensorSpec| spec.is_stored() && spec.part != Part::Scratch;
            let described = |spec: &TensorSpec| (spec.name, spec.dtype, spec.shape(), spec.part);
            call.specs.present().filter(lasting).map(described).collect()
        };
        if tensors(&fastest) == tensors(self) && fastest.cannot_run(environment).is_none() {
            fastest
        } else {
            self.clone()
        }
    }

    /// Names and bytes of the workspaces, 16-byte aligned, that the launches of both directions
    /// take next to the tensors. Only types and layouts of the views count.
    ///
    /// # Errors
    /// The launcher's.
    pub fn workspaces(
        &self,
        views: &Views,
        device: &Device,
    ) -> Result<Vec<(&'static str, usize)>, RuntimeError> {
        self.case.workspaces(views, device)
    }

    /// Enqueues the launches of one direction, and returns the paths that ran. The backward takes
    /// what the forward read and wrote.
    ///
    /// # Errors
    /// What the launcher rejects; on the emulator also what the kernel did wrong.
    pub fn launch(
        &self,
        direction: Direction,
        views: &Views,
        device: &Device,
    ) -> Result<Vec<String>, RuntimeError> {
        let mut run = Launches::timed(device);
        match direction {
            Direction::Forward => self.case.launch(views, &mut run)?,
            Direction::Backward => self.case.launch_backward(views, &mut run)?,
        }
        Ok(run.finish().paths)
    }
}

impl AnyOperator {
    /// A case as a call. Its layouts and special values have no meaning here.
    ///
    /// # Errors
    /// A field that the operator cannot take.
    pub fn call(&self, case: &Case) -> Result<Call, CaseError> {
        let (case, _) = read(self.declaration(), case)?;
        Ok(Call { specs: case.tensors(), case })
    }

    /// Cases that together show how the operator is used, without what the layer chooses: the
    /// typical ones first, then edge cases and drawn ones.
    pub fn templates(&self) -> Vec<Case> {
        let declaration = self.declaration();
        let strategy = declaration.strategy(Profile::Full);
        let mut runner = TestRunner::deterministic();
        let drawn = (0..DRAWN).filter_map(|_| Some(strategy.new_tree(&mut runner).ok()?.current()));
        let typical = declaration.typical().into_iter();
        typical
            .chain(declaration.edge_cases(Profile::Quick))
            .chain(drawn)
            .map(|case| case.line())
            .collect()
    }

    /// The cases that are timed on a device like this one. On a GPU they are the model's.
    pub fn benchmarked(&self, environment: &Environment) -> Vec<Case> {
        let benchmarks = self.declaration().benchmarks(environment);
        benchmarks.iter().map(|benchmark| benchmark.line()).collect()
    }

    /// The sections of the specification that it follows.
    pub fn specification(&self) -> &'static [&'static str] {
        self.declaration().about().specification
    }
}
