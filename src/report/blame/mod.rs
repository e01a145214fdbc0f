//! Which operator of a run is to blame, as a page and as text for a terminal.

pub mod page;
pub mod terminal;

use crate::blame::judge::NAMED;
