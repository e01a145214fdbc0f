//! Pads around static shared arrays, so that a kernel that writes beyond one is caught at once.
//!
//! A GPU places a block's static shared arrays next to each other: a write beyond one silently
//! corrupts its neighbour. The compiler checks the indices that it can follow; the pads catch the
//! others. Static shared variables are thread-local variables of the module, which the compiler
//! passes to the assembler as zero bytes. [`padded`] adds a pad after each, and one before the
//! first of a row. In the resulting library, the bytes between two variables are a pad
//! ([`Pads::of`]). It is filled with a pattern before a block starts, and must hold it whenever a
//! thread of the block yields. The pattern is NaN in the floating-point types that kernels add in,
//! so that reads are visible as well.

use std::fmt::Write as _;

/// Bytes of a pad: an overrun within this distance is seen.
const PAD_BYTES: usize = 1024;

/// Bytes at either end of a pad that are checked whenever a thread stops running; the others are
/// checked when the block ends. A write beyond an array is usually directly after it, or directly
/// before.
const EDGE_BYTES: usize = 64;

/// The repeated pattern of pads: bf16, fp32 and f64 NaN, and no integer that a kernel would store.
const PATTERN: [u8; 2] = [0xa5, 0xff];

static FILLED: [u8; PAD_BYTES] = {
    let mut filled = [0; PAD_BYTES];
    let mut i = 0;
    while i < PAD_BYTES {
        filled[i] = PATTERN[i % PATTERN.len()];
        i += 1;
    }
    filled
};

/// The compiler's assembly with a pad after each thread-local variable without an initial value,
/// and before the first.
pub fn padded(assembly: &str) -> String {
    let mut text = String::with_capacity(assembly.len() + 4096);
    let mut among_variables = false;
    for line in assembly.lines() {
        let _ = writeln!(text, "{line}");
        let words = line.trim_start();
        if let Some(directive) = words.strip_prefix('.') {
            let ends = [".text", ".data", ".bss", ".previous", ".popsection"]
                .iter()
                .any(|end| words.starts_with(end));
            if directive.starts_with("section") || ends {
                among_variables = words.contains(".tbss");
            }
            if among_variables
                && (directive.starts_with("section") || directive.starts_with("zero"))
            {
                let _ = writeln!(text, "\t.zero\t{PAD_BYTES}");
            }
        }
    }
    text
}

/// A range of a module's thread-local storage that belongs to no variable.
#[derive(Debug, PartialEq, Eq)]
struct Pad {
    /// Bytes from the storage's start.
    start: usize,
    bytes: usize,
    /// The variable before it, and the distance from that variable to the pad's start (its size).
    before: Option<String>,
    /// The variable after it.
    behind: Option<String>,
}

/// The thread-local variables of emulator.h other than static shared memory.
const OWN_VARIABLES: [&str; 2] = ["context", "own_storage"];

/// The pads of a module.
#[derive(Debug, Default)]
pub struct Pads(Vec<Pad>);

impl Pads {
    /// The pads of a shared library of this machine; `None` if it is not such a library.
    pub fn of(library: &[u8]) -> Option<Self> {
        let elf = Elf::of(library)?;
        let mut variables = elf.thread_local_variables()?;
        variables.sort_unstable_by_key(|variable| variable.start);
        let mut pads = Vec::new();
        let (mut end, mut before) = (0, None);
        for Variable { start, bytes, name } in variables {
            if start > end {
                pads.push(Pad {
                    start: end,
                    bytes: start - end,
                    before: before.take(),
                    behind: Some(name.clone()),
                });
            }
            end = end.max(start.checked_add(bytes)?);
            before = Some(name);
        }
        let whole = elf.thread_local_bytes()?;
        if whole > end && before.is_some() {
            pads.push(Pad { start: end, bytes: whole - end, before, behind: None });
        }
        Some(Self(pads))
    }
}

impl Pads {
    /// A static shared variable of the module, if it has any: a thread-local variable that does not
    /// belong to the emulator.
    pub fn static_shared(&self) -> Option<&str> {
        let names = self.0.iter().flat_map(|pad| [&pad.before, &pad.behind]).flatten();
        names.map(String::as_str).find(|name| !OWN_VARIABLES.contains(name))
    }
}

/// The pads in one thread's storage of their module.
pub struct PadsOfThread<'a> {
    pads: &'a [Pad],
    storage: *mut u8,
}

impl<'a> PadsOfThread<'a> {
    /// The pads in this storage.
    ///
    /// # Safety
    /// `storage` is the calling thread's storage of the module that the pads are of, and what is
    /// made stays with the thread.
    pub unsafe fn new(Pads(pads): &'a Pads, storage: *mut u8) -> Self {
        Self { pads, storage }
    }

    /// Writes the pattern.
    pub fn fill(&self) {
        for pad in self.pads {
            for done in (0..pad.bytes).step_by(PAD_BYTES) {
                let bytes = (pad.bytes - done).min(PAD_BYTES);
                // SAFETY: a pad is within the storage, by the contract of `new`.
                unsafe {
                    std::ptr::copy_nonoverlapping(
                        FILLED.as_ptr(),
                        self.storage.add(pad.start + done),
                        bytes,
                    );
                }
            }
        }
    }

    /// Writes to the pads since [`PadsOfThread::fill`]: at the ends of a pad, or anywhere in it.
    pub fn overrun(&self, anywhere: bool) -> Option<String> {
        self.pads.iter().find_map(|pad| {
            // SAFETY: a pad is within the storage, by the contract of `new`, and no thread of
            // the block runs now.
            let held =
                unsafe { std::slice::from_raw_parts(self.storage.add(pad.start), pad.bytes) };
            let edge = if anywhere { held.len() } else { EDGE_BYTES.min(held.len()) };
            let intact = holds_pattern(0, &held[..edge])
                && holds_pattern(held.len() - edge, &held[held.len() - edge..]);
            if intact { None } else { Some(pad.words(held)) }
        })
    }
}

/// Whether these bytes of a pad, starting at byte `start`, hold the pattern.
fn holds_pattern(start: usize, held: &[u8]) -> bool {
    let phase = start % PATTERN.len();
    held.chunks(PAD_BYTES - PATTERN.len()).all(|held| *held == FILLED[phase..phase + held.len()])
}

impl Pad {
    fn words(&self, held: &[u8]) -> String {
        let spoiled = |at: &usize| held[*at] != PATTERN[at % PATTERN.len()];
        let first = (0..held.len()).find(spoiled).unwrap_or_default();
        let from_end = held.len() - (0..held.len()).rev().find(spoiled).unwrap_or_default();
        match (&self.before, &self.behind) {
            (Some(name), _) if self.behind.is_none() || first < from_end => {
                format!(
                    "wrote beyond the end of the static shared variable `{name}`, {first} bytes behind it"
                )
            }
            (_, Some(name)) => {
                format!(
                    "wrote before the start of the static shared variable `{name}`, {from_end} bytes before it"
                )
            }
            (_, None) => "wrote where no static shared variable is".to_owned(),
        }
    }
}

/// A thread-local variable of a library.
struct Variable {
    start: usize,
    bytes: usize,
    name: String,
}

/// A shared library in memory, of 64 bits and this machine's byte order.
struct Elf<'a>(&'a [u8]);

/// Types of the segment of thread-local storage, of the symbol table, and of a thread-local symbol.
const PT_TLS: u32 = 7;
const SHT_SYMTAB: u32 = 2;
const STT_TLS: u8 = 6;

impl<'a> Elf<'a> {
    fn of(library: &'a [u8]) -> Option<Self> {
        library.starts_with(b"\x7fELF\x02").then_some(Self(library))
    }

    fn bytes<const N: usize>(&self, at: usize) -> Option<[u8; N]> {
        self.0.get(at..at.checked_add(N)?)?.try_into().ok()
    }

    fn u16(&self, at: usize) -> Option<usize> {
        self.bytes(at).map(|bytes| usize::from(u16::from_ne_bytes(bytes)))
    }

    fn u32(&self, at: usize) -> Option<u32> {
        self.bytes(at).map(u32::from_ne_bytes)
    }

    fn u64(&self, at: usize) -> Option<usize> {
        self.bytes(at).and_then(|bytes| usize::try_from(u64::from_ne_bytes(bytes)).ok())
    }

    /// Offsets of the entries of a table whose position, entry size and count are at these offsets
    /// of the header.
    fn table(
        &self,
        place: usize,
        entry: usize,
        count: usize,
    ) -> Option<impl Iterator<Item = usize> + use<>> {
        let (start, entry, count) = (self.u64(place)?, self.u16(entry)?, self.u16(count)?);
        self.0.get(start..)?;
        Some((0..count).map(move |number| start + number * entry))
    }

    fn thread_local_bytes(&self) -> Option<usize> {
        let segment = self.table(32, 54, 56)?.find(|&segment| self.u32(segment) == Some(PT_TLS));
        segment.map_or(Some(0), |segment| self.u64(segment + 40))
    }

    fn thread_local_variables(&self) -> Option<Vec<Variable>> {
        let sections: Vec<usize> = self.table(40, 58, 60)?.collect();
        let Some(&symbols) =
            sections.iter().find(|&&section| self.u32(section + 4) == Some(SHT_SYMTAB))
        else {
            return Some(Vec::new());
        };
        let names = self.u64(sections.get(self.u32(symbols + 40)? as usize)? + 24)?;
        let (start, bytes, entry) =
            (self.u64(symbols + 24)?, self.u64(symbols + 32)?, self.u64(symbols + 56)?);
        let end = start.checked_add(bytes)?;
        self.0.get(start..end)?;
        let mut variables = Vec::new();
        for symbol in (start..end).step_by(entry.max(1)) {
            let [kind, _] = self.bytes(symbol + 4)?;
            // A symbol of section 0 belongs to another library.
            if kind & 15 == STT_TLS && self.u16(symbol + 6)? != 0 {
                let name =
                    variable_name(self.text(names.checked_add(self.u32(symbol)? as usize)?)?)
                        .to_owned();
                variables.push(Variable {
                    start: self.u64(symbol + 8)?,
                    bytes: self.u64(symbol + 16)?,
                    name,
                });
            }
        }
        Some(variables)
    }

    fn text(&self, at: usize) -> Option<&'a str> {
        let rest = self.0.get(at..)?;
        std::str::from_utf8(&rest[..rest.iter().position(|&byte| byte == 0)?]).ok()
    }
}

/// The last identifier of a C++ symbol's name, which is the variable's name: an identifier is
/// encoded as its length and its letters. Returns the symbol itself if it is not a C++ symbol.
fn variable_name(symbol: &str) -> &str {
    if !symbol.starts_with("_Z") {
        return symbol;
    }
    let (mut name, mut rest) = (symbol, &symbol[2..]);
    while let Some(at) = rest.find(|c: char| c.is_ascii_digit()) {
        let digits =
            rest[at..].find(|c: char| !c.is_ascii_digit()).map_or(rest.len(), |end| at + end);
        let end =
            rest[at..digits].parse().ok().and_then(|length: usize| digits.checked_add(length));
        match end.and_then(|end| rest.get(digits..end)).filter(|identifier| !identifier.is_empty())
        {
            Some(identifier) => {
                name = identifier;
                rest = &rest[digits + identifier.len()..];
            }
            None => rest = &rest[digits..],
        }
    }
    name
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pad_is_put_before_the_first_and_behind_each_thread_local_variable_and_nowhere_else() {
        let assembly = "\t.section\t.tbss,\"awT\",@nobits\n\t.align 4\na:\n\t.zero\t132\n\t.align 8\nb:\n\t.zero\t8\n\
                        \t.bss\nc:\n\t.zero\t4\n\t.section\t.tbss._Z1d,\"awGT\",@nobits,_Z1d,comdat\nd:\n\t.zero\t4\n\t.text\n\t.zero\t2\n";
        let pad = format!("\t.zero\t{PAD_BYTES}\n");
        assert_eq!(padded(assembly).matches(&pad).count(), 5);
        assert!(padded(assembly).contains(&format!("\t.zero\t132\n{pad}\t.align 8")));
    }

    #[test]
    fn variables_are_called_by_their_last_identifier() {
        assert_eq!(variable_name("_ZZ6kernelE8partials"), "partials");
        assert_eq!(variable_name("_ZZN12_GLOBAL__N_15totalIfLi4EEEvRKT_E4sums_0"), "sums");
        assert_eq!(variable_name("_ZN8emulator7contextE"), "context");
        assert_eq!(variable_name("plain"), "plain");
    }

    #[test]
    fn what_is_no_library_has_no_pads_and_ends_nothing() {
        assert!(Pads::of(b"").is_none());
        let mut library = vec![0xff; 4096];
        library[..5].copy_from_slice(b"\x7fELF\x02");
        assert!(Pads::of(&library).is_none());
        library[5..].fill(0);
        assert!(Pads::of(&library).is_some_and(|pads| pads.0.is_empty()));
    }
}
