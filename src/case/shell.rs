//! Commands as a shell reads them.

/// A text as one word of a shell; in quotes where a shell would read something else than the text.
pub fn quoted(text: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "_-./:,+@%".contains(c);
    if !text.is_empty() && text.chars().all(is_plain) {
        return text.to_owned();
    }
    format!("'{}'", text.replace('\'', "'\\''"))
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_quoted_text_is_one_word_and_a_plain_one_stays_as_it_is() {
        assert_eq!(super::quoted("it's $HOME"), r"'it'\''s $HOME'");
        assert_eq!(super::quoted(""), "''");
        assert_eq!(super::quoted("a=b"), "'a=b'");
        assert_eq!(super::quoted("dir/kernel-1.py"), "dir/kernel-1.py");
    }
}
