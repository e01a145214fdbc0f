//! How numbers are written for people: 23.875 and 4.5e19, never 2.3875e1 or 44619224341200674816.
//!
//! Every message, page and terminal line uses these functions.

/// A measure to `digits` significant digits, without insignificant zeros: `1.4`, `0.00305`,
/// `455,898`, `4.5e19`.
pub fn measure(value: f64, digits: usize) -> String {
    without_last_zeros(padded(value, digits))
}

/// The same with as many digits in each row of a table: `1.40`.
pub fn padded(value: f64, digits: usize) -> String {
    if !value.is_finite() {
        return special(value);
    }
    if value == 0.0 {
        return "0".to_owned();
    }
    let scientific = format!("{value:.*e}", digits.saturating_sub(1));
    let exponent: i32 =
        scientific.split_once('e').and_then(|(_, exponent)| exponent.parse().ok()).unwrap_or(0);
    if !(-3..6).contains(&exponent) {
        return scientific;
    }
    let decimals = usize::try_from(digits as i32 - 1 - exponent).unwrap_or(0);
    grouped(&format!("{value:.decimals$}"))
}

/// The value of one element: the shortest digits that identify its f32, or nine digits for values
/// between two f32.
pub fn element(value: f64) -> String {
    if !value.is_finite() {
        return special(value);
    }
    let narrow = value as f32;
    let plain = value == 0.0 || (1e-3..1e7).contains(&value.abs());
    match (f64::from(narrow) == value || value == 0.0, plain) {
        (true, true) => grouped(&format!("{narrow}")),
        (true, false) => format!("{narrow:e}"),
        (false, true) => {
            let decimals = 8 - value.abs().log10().floor() as i32;
            without_last_zeros(grouped(&format!(
                "{value:.*}",
                usize::try_from(decimals).unwrap_or(0)
            )))
        }
        (false, false) => without_last_zeros(format!("{value:.8e}")),
    }
}

/// A field of a case: an integer whole, any other number as [`element`] writes it.
pub fn field(value: f64) -> String {
    if value.fract() == 0.0 && value.abs() < 1e15 { format!("{value:.0}") } else { element(value) }
}

/// Names of NaN and the infinities.
fn special(value: f64) -> String {
    match value {
        value if value.is_nan() => "NaN".to_owned(),
        value if value > 0.0 => "inf".to_owned(),
        _ => "-inf".to_owned(),
    }
}

/// Removes the zeros at the end of a fraction, and its point where no fraction is left.
fn without_last_zeros(text: String) -> String {
    let (digits, exponent) = match text.split_once('e') {
        Some((digits, exponent)) => (digits, Some(exponent)),
        None => (text.as_str(), None),
    };
    if !digits.contains('.') {
        return text;
    }
    let digits = digits.trim_end_matches('0').trim_end_matches('.');
    exponent.map_or_else(|| digits.to_owned(), |exponent| format!("{digits}e{exponent}"))
}

/// Puts commas between groups of three digits of the whole part.
pub fn grouped(number: &str) -> String {
    let (whole, fraction) = match number.split_once('.') {
        Some((whole, fraction)) => (whole, Some(fraction)),
        None => (number, None),
    };
    let (sign, digits) = whole.strip_prefix('-').map_or(("", whole), |digits| ("-", digits));
    let mut text = sign.to_owned();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    fraction.map_or(text.clone(), |fraction| format!("{text}.{fraction}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_written_as_people_write_them() {
        for (value, digits, text) in [
            (23.875, 6, "23.875"),
            (44_619_224_341_200_674_816.0, 2, "4.5e19"),
            (0.003_053, 3, "0.00305"),
            (3.306e-6, 3, "3.31e-6"),
            (-0.988_951_5, 4, "-0.989"),
            (455_898.2, 3, "455,898"),
            (2.0, 3, "2"),
            (1e30, 3, "1e30"),
            (f64::NAN, 3, "NaN"),
            (0.0, 3, "0"),
        ] {
            assert_eq!(measure(value, digits), text);
        }
        assert_eq!(padded(2.0, 3), "2.00");
    }

    #[test]
    fn an_element_is_written_with_the_digits_that_name_it() {
        for (value, text) in [
            (0.015_548_706_054_687_5, "0.015548706"),
            (1.407_308_198_628_015_8, "1.4073082"),
            (-96.0, "-96"),
            (12_345.5, "12,345.5"),
            (1e30, "1e30"),
            (f64::from(1e-20_f32), "1e-20"),
            (-0.0, "-0"),
            (f64::NEG_INFINITY, "-inf"),
        ] {
            assert_eq!(element(value), text);
        }
        assert_eq!((field(512.0), field(0.125)), ("512".into(), "0.125".into()));
    }
}
