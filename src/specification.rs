//! The specification (`reference/spec`), its sections, and citations of them.
//!
//! A citation is `inference 8.1`, `training 3` or `FM-03`. Lists share their first word: `inference
//! 8, 8.1`, `training 3 and 4`, `inference 8 to 8.4`. [`citations`] finds them in any text.
//! [`Citation::section`] returns the cited section. [`broken`] lists citations of sections that do
//! not exist.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;
use std::sync::LazyLock;

use regex::Regex;
use thiserror::Error;

/// One file of the specification.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Document {
    /// `inference.md`: operators of the forward pass.
    Inference,
    /// `training.md`: forward and backward of the trained operators.
    Training,
    /// `failure_modes.md`: the catalogue of bugs.
    FailureModes,
}

impl Document {
    /// Every document.
    pub const ALL: [Self; 3] = [Self::Inference, Self::Training, Self::FailureModes];

    /// The file's path from the repository's root.
    pub fn file(self) -> &'static str {
        match self {
            Self::Inference => "reference/spec/inference.md",
            Self::Training => "reference/spec/training.md",
            Self::FailureModes => "reference/spec/failure_modes.md",
        }
    }

    /// The file's text at the time when this crate was built.
    pub fn text(self) -> &'static str {
        match self {
            Self::Inference => {
                include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/reference/spec/inference.md"))
            }
            Self::Training => {
                include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/reference/spec/training.md"))
            }
            Self::FailureModes => {
                include_str!(concat!(
                    env!("CARGO_MANIFEST_DIR"),
                    "/reference/spec/failure_modes.md"
                ))
            }
        }
    }
}

/// A section of a numbered document, or an entry of the catalogue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Section {
    /// The citation of this section.
    pub citation: Citation,
    /// Its heading, without the number.
    pub title: &'static str,
    /// The anchor that GitHub gives the heading.
    pub anchor: String,
    /// The text between its heading and the next heading of any level. It does not contain the text
    /// of subsections.
    pub text: &'static str,
}

/// A reference to a section: `inference 8.1`, `training 3`, `FM-03`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Citation {
    /// The document of the section.
    pub document: Document,
    /// The section's number as written: `8`, `8.1`, `03`.
    pub number: String,
}

/// A text that is not exactly one citation.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("`{0}` is not one citation, such as `inference 8.1`, `training 3` or `FM-03`")]
pub struct NotACitation(String);

impl fmt::Display for Citation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.document {
            Document::Inference => write!(f, "inference {}", self.number),
            Document::Training => write!(f, "training {}", self.number),
            Document::FailureModes => write!(f, "FM-{}", self.number),
        }
    }
}

impl FromStr for Citation {
    type Err = NotACitation;

    fn from_str(text: &str) -> Result<Self, NotACitation> {
        match citations(text, None).as_slice() {
            [place] if place.range == (0..text.len()) => Ok(place.citation.clone()),
            _ => Err(NotACitation(text.to_owned())),
        }
    }
}

impl Citation {
    /// The cited section, if it exists.
    pub fn section(&self) -> Option<&'static Section> {
        sections().iter().find(|section| section.citation == *self)
    }
}

/// A citation and its byte range in a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// What is cited.
    pub citation: Citation,
    /// The range of the first citation of a list contains the document's name, the others only a
    /// number.
    pub range: Range<usize>,
}

/// A document's name and the numbers after it; a line may end between the two. `section` without a
/// name means a section of the document that contains it.
static LIST: LazyLock<Regex> = LazyLock::new(|| {
    let gap = r"(?:[ \t]+|[ \t]*\n[ \t]*(?://[/!]?|#)?[ \t]*)";
    let number = r"§?[0-9]+(?:\.[0-9]+)?\b";
    let name =
        format!(r"(?:\b(inference|training)(?:\.md)?`?(?:{gap}sections?)?|\bsections?){gap}");
    Regex::new(&format!(r"(?i){name}({number}(?:(?:,|,? and|,? to){gap}{number})*)"))
        .expect("an expression")
});
static NUMBER: LazyLock<Regex> =
    LazyLock::new(|| Regex::new(r"[0-9]+(?:\.[0-9]+)?").expect("an expression"));
static FAILURE_MODE: LazyLock<Regex> =
    LazyLock::new(|| Regex::new(r"\bFM-([0-9]+)\b").expect("an expression"));
static HEADING: LazyLock<Regex> = LazyLock::new(|| {
    Regex::new(
        r"(?m)^#{1,6} (?:FM-(?P<mode>[0-9]+) |(?P<section>[0-9]+(?:\.[0-9]+)?)\.? )?(?P<title>.*)$",
    )
    .expect("an expression")
});

/// The citations of a text, in order. In a document of the specification, `home`, a bare `section
/// 3` refers to that document.
pub fn citations(text: &str, home: Option<Document>) -> Vec<Place> {
    let mut places = Vec::new();
    for list in LIST.captures_iter(text) {
        let document = match list.get(1) {
            Some(name) if name.as_str().eq_ignore_ascii_case("inference") => {
                Some(Document::Inference)
            }
            Some(_) => Some(Document::Training),
            None => home,
        };
        let (Some(document), Some(whole), Some(numbers)) = (document, list.get(0), list.get(2))
        else {
            continue;
        };
        for (place, number) in NUMBER.find_iter(numbers.as_str()).enumerate() {
            let start = if place == 0 { whole.start() } else { numbers.start() + number.start() };
            let citation = Citation { document, number: number.as_str().to_owned() };
            places.push(Place { citation, range: start..numbers.start() + number.end() });
        }
    }
    places.extend(FAILURE_MODE.captures_iter(text).map(|found| {
        let (range, [number]) = (found.get_match().range(), found.extract().1);
        Place {
            citation: Citation { document: Document::FailureModes, number: number.to_owned() },
            range,
        }
    }));
    places.sort_by_key(|place| place.range.start);
    places
}

/// The citations in a text of sections that do not exist, each with its line, counted from 1.
/// `home` as in [`citations`].
pub fn broken(text: &str, home: Option<Document>) -> Vec<(usize, Citation)> {
    let line = |at: usize| 1 + text[..at].matches('\n').count();
    let missing =
        citations(text, home).into_iter().filter(|place| place.citation.section().is_none());
    missing.map(|place| (line(place.range.start), place.citation)).collect()
}

/// Every section and every failure mode, in the documents' order.
pub fn sections() -> &'static [Section] {
    static SECTIONS: LazyLock<Vec<Section>> =
        LazyLock::new(|| Document::ALL.into_iter().flat_map(parse).collect());
    &SECTIONS
}

fn parse(document: Document) -> Vec<Section> {
    let text = document.text();
    let headings: Vec<_> = HEADING.captures_iter(text).collect();
    let mut sections = Vec::new();
    for (place, heading) in headings.iter().enumerate() {
        let group = if document == Document::FailureModes { "mode" } else { "section" };
        let (Some(number), Some(title)) = (heading.name(group), heading.name("title")) else {
            continue;
        };
        let end = headings.get(place + 1).map_or(text.len(), |next| next.get_match().start());
        let citation = Citation { document, number: number.as_str().to_owned() };
        let line = heading.get_match();
        sections.push(Section {
            citation,
            title: title.as_str().trim(),
            anchor: anchor(line.as_str().trim_start_matches('#').trim()),
            text: text[line.end()..end].trim_matches('\n'),
        });
    }
    sections
}

/// The anchor that GitHub gives a heading: lower-case letters, spaces as hyphens, without other
/// punctuation.
fn anchor(heading: &str) -> String {
    let kept = heading.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.map(|c| if c == ' ' { '-' } else { c }).flat_map(char::to_lowercase).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// In two parts, so that a scan of this file does not find the citations that are broken on
    /// purpose.
    const NAME: &str = concat!("infer", "ence");

    fn cited(text: &str) -> Vec<String> {
        citations(text, None).iter().map(|place| place.citation.to_string()).collect()
    }

    #[test]
    fn citations_are_found_in_every_form() {
        let all = |text: &str, expected: &[&str]| assert_eq!(cited(text), expected, "{text}");
        all("RMSNorm (inference 3, training 11.3): y", &["inference 3", "training 11.3"]);
        all("(inference 8 to 8.4).", &["inference 8", "inference 8.4"]);
        all(
            "inference 8, 8.1, training 3 and 4",
            &["inference 8", "inference 8.1", "training 3", "training 4"],
        );
        all(
            "(inference section 8 and 8.1; training sections 3, 4)",
            &["inference 8", "inference 8.1", "training 3", "training 4"],
        );
        all(
            "inference.md 5.4, training §4, Inference 3.",
            &["inference 5.4", "training 4", "inference 3"],
        );
        all("// as inference\n// 8.1 says", &["inference 8.1"]);
        all("FM-03, FM-101 (training 4)", &["FM-03", "FM-101", "training 4"]);
    }

    #[test]
    fn other_words_and_numbers_are_no_citations() {
        for text in [
            "training in 4 steps",
            "inference_8",
            "section 5",
            "FM-xx",
            "FMA-3",
            "training, 3",
            "pretraining 3",
        ] {
            assert_eq!(cited(text), [""; 0], "{text}");
        }
    }

    #[test]
    fn the_first_of_a_list_holds_the_name_and_the_others_their_number() {
        let text = "see inference 8, 8.1.";
        let parts: Vec<_> =
            citations(text, None).into_iter().map(|place| &text[place.range]).collect();
        assert_eq!(parts, ["inference 8", "8.1"]);
    }

    #[test]
    fn a_bare_section_is_one_of_the_document_in_which_it_stands() {
        let found = citations("list in section 13)", Some(Document::Training));
        assert_eq!(found[0].citation.to_string(), "training 13");
    }

    #[test]
    fn broken_citations_are_named_with_their_line() {
        let text = format!("// training 3\n// {NAME} 8, 8.9\nlet x = 1; // FM{}", "-000");
        let found: Vec<_> =
            broken(&text, None).into_iter().map(|(line, one)| (line, one.to_string())).collect();
        assert_eq!(found, [(2, format!("{NAME} 8.9")), (3, format!("FM{}", "-000"))]);
        assert_eq!(broken("section 99", Some(Document::Training)).len(), 1);
        assert!(broken("training 3, FM-03", None).is_empty());
    }

    #[test]
    fn a_failure_mode_is_written_with_two_digits_at_least() {
        assert!("FM-03".parse::<Citation>().expect("a citation").section().is_some());
        assert!(format!("FM{}", "-3").parse::<Citation>().expect("a citation").section().is_none());
    }

    #[test]
    fn one_citation_is_parsed_and_nothing_else() {
        let citation: Citation = "inference 8.1".parse().expect("a citation");
        assert_eq!((citation.document, citation.number.as_str()), (Document::Inference, "8.1"));
        for text in
            ["", "derived", "inference", "inference 8, 8.1", "inference 8.1 ", "see training 3"]
        {
            assert_eq!(text.parse::<Citation>(), Err(NotACitation(text.to_owned())));
        }
    }

    #[test]
    fn every_document_has_its_sections_once_and_in_order() {
        for (document, first, last) in [
            (Document::Inference, "0", "19"),
            (Document::Training, "0", "14"),
            (Document::FailureModes, "01", "182"),
        ] {
            let own: Vec<_> =
                sections().iter().filter(|section| section.citation.document == document).collect();
            let numbers: Vec<_> =
                own.iter().map(|section| section.citation.number.as_str()).collect();
            assert_eq!((numbers[0], numbers[numbers.len() - 1]), (first, last), "{document:?}");
            let key = |number: &str| -> Vec<u32> {
                number.split('.').map(|part| part.parse().unwrap()).collect()
            };
            assert!(numbers.windows(2).all(|pair| key(pair[0]) < key(pair[1])), "{numbers:?}");
        }
        let modes =
            sections().iter().filter(|section| section.citation.document == Document::FailureModes);
        assert_eq!(modes.count(), 182);
    }

    #[test]
    fn anchors_are_those_of_github_and_distinct_within_a_document() {
        let of = |citation: &str| {
            &citation.parse::<Citation>().expect("a citation").section().expect("a section").anchor
        };
        assert_eq!(of("training 3"), "3-sparse-attention-forward-with-sink");
        assert_eq!(of("inference 8.3"), "83-fp8-kv-row-format-flashmla-model1-584-bytes-per-row");
        assert_eq!(of("FM-03"), "fm-03-in-place-inverse-rope-overwrites-the-saved-o");
        let anchors: BTreeSet<_> =
            sections().iter().map(|section| (section.citation.document, &section.anchor)).collect();
        assert_eq!(anchors.len(), sections().len());
    }

    #[test]
    fn a_sections_text_ends_at_the_next_heading() {
        let section =
            "inference 8".parse::<Citation>().expect("a citation").section().expect("a section");
        assert_eq!(section.title, "Sparse attention core");
        assert!(
            section.text.starts_with("Purpose: one softmax")
                && !section.text.contains("exceptional values")
        );
        let mode = "FM-101".parse::<Citation>().expect("a citation").section().expect("an entry");
        assert!(mode.text.ends_with("- source: cudnn-frontend#395"), "{}", mode.text);
    }
}
