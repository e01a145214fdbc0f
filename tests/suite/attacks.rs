//! How much of an attack on the harness is tried, and what `attacks.sh` is told of it.

/// Whether a test tries all that it has, and not only what a commit pays for.
pub fn everything() -> bool {
    std::env::var("PARITY_TESTS").is_ok_and(|extent| extent == "all")
}

/// Says that so many attacks of a kind were held: `tests/attacks.sh` counts them.
pub fn attacked(kind: &str, held: u64) {
    println!("attack: {held} {kind}");
}
