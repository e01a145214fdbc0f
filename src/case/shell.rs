//! Commands as a shell reads them.

/// A text as one word of a shell.
pub fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "'\\''"))
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_quoted_text_is_one_word_with_its_quotes() {
        assert_eq!(super::quoted("it's $HOME"), r"'it'\''s $HOME'");
    }
}
