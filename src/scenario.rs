//! The scenario of FM-03.
