//! Prefixes that sequences of a model share: a saved state, a reused slot and an evicted page
//! change no bit.

use dsv4_kernels::cache::cache_layout::LayerKind::{Csa, Hca};
use dsv4_kernels::model::engine::{Chunk, Limits, Model};

use crate::extent::left_out;
use crate::model::{LIMITS, first_difference, model, text};

/// Rooms whose changes run the long tests of this file.
const PREFIXES: [&str; 2] = ["kernels/src/model/", "kernels/src/cache/"];

/// The logits of what is computed of a prompt, how many of its tokens were cached, and the module's
/// logits after it.
fn answered(model: &mut Model<'_>, prompt: &[u32]) -> (Vec<Vec<f32>>, usize, Vec<Vec<f32>>) {
    let admitted = model.admit(prompt).expect("a sequence");
    let (sequence, cached) = (admitted.sequence, admitted.cached_tokens);
    let chunk = Chunk { sequence, tokens: &prompt[cached..] };
    let logits = model.logits(&[chunk]).expect("logits").remove(0);
    let drafted = model.draft_logits(&[Chunk { sequence, tokens: &[3] }]).expect("logits");
    model.release(sequence).expect("released");
    (logits, cached, drafted)
}

/// The last token of a prompt is a step of its own where the prefix is cached.
#[test]
fn a_shared_prefix_a_reused_slot_and_an_evicted_page_change_no_bit() {
    if left_out(&PREFIXES) {
        return;
    }
    let limits = Limits { num_snapshots: 2, step_tokens: 64, num_pages: 2, drafts: true, ..LIMITS };
    let mut model = model(&[Csa, Hca], limits);
    let first = text(1, 129);
    let cold = answered(&mut model, &first);
    assert_eq!((cold.0.len(), cold.1), (129, 0));
    // The same prompt, from its saved prefix.
    let warm = answered(&mut model, &first);
    assert_eq!(warm.1, 128);
    assert_eq!(first_difference(&cold.0[128..], &warm.0), None);
    assert_eq!(cold.2, warm.2);
    // A prompt that shares no page needs both, and the cached one is evicted.
    let other = text(2, 129);
    let unshared = answered(&mut model, &other);
    assert_eq!(unshared.1, 0);
    let again = answered(&mut model, &first);
    assert_eq!(again.1, 0);
    assert_eq!(first_difference(&cold.0, &again.0), None);
    assert_eq!(cold.2, again.2);
}
