//! Conditions on cases, such as `head_dim = 512 and topk % 128 = 0`.
//!
//! Names are fields of the case's JSON, with dots for nested fields. A field that a case does not
//! have is `null`. It equals only `null` and is neither less nor greater than anything. The syntax
//! has numbers, strings in either kind of quotes, `true`, `false` and `null`; `=` (or `==`), `!=`,
//! `<`, `<=`, `>`, `>=`; `%`; `not`, `and`, `or` and parentheses.

use std::cmp::Ordering;
use std::fmt;

use serde::Deserialize;
use serde_json::Value;

use super::Case;

/// The largest nesting depth of parentheses and `not`.
const DEEPEST: usize = 64;

/// A condition on a case's fields.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(try_from = "String")]
pub struct Condition {
    text: String,
    root: Node,
}

#[derive(Clone, Debug, PartialEq)]
enum Node {
    Value(Value),
    Field(String),
    Not(Box<Node>),
    All(Vec<Node>),
    Any(Vec<Node>),
    Remainder(Box<Node>, Box<Node>),
    Compared(Relation, Box<Node>, Box<Node>),
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Relation {
    Equal,
    Unequal,
    Less,
    AtMost,
    Greater,
    AtLeast,
}

impl fmt::Display for Condition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl TryFrom<String> for Condition {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        Self::parse(&text)
    }
}

impl std::str::FromStr for Condition {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::parse(text)
    }
}

impl Condition {
    /// Parses a condition.
    ///
    /// # Errors
    /// The position, counted in characters from 1, what was found there, and what was expected.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut parser = Parser { tokens: tokens(text)?, at: 0, depth: 0 };
        let root = parser.any()?;
        match parser.tokens.get(parser.at) {
            None => Ok(Self { text: text.trim().to_owned(), root }),
            Some(token) => Err(token.not_expected("`and`, `or` or the end")),
        }
    }

    /// Both conditions, where two are given.
    pub fn both(one: Option<Self>, other: Option<Self>) -> Option<Self> {
        match (one, other) {
            (Some(one), Some(other)) => Some(Self {
                text: format!("({one}) and ({other})"),
                root: Node::All(vec![one.root, other.root]),
            }),
            (one, other) => one.or(other),
        }
    }

    /// Whether it holds for a case.
    ///
    /// # Errors
    /// Values that cannot be compared, or are not a condition.
    pub fn holds(&self, case: &Case) -> Result<bool, String> {
        holds(&self.root, case).map_err(|why| format!("`{self}`: {why}"))
    }

    /// The case with the fields that the condition determines: those that must equal a value, or
    /// leave a remainder, in all matching cases. Drawn cases would rarely match by chance. The
    /// caller still checks the rest of the condition, and whether the case is valid.
    pub fn steered(&self, mut case: Case) -> Case {
        let required = match &self.root {
            Node::All(nodes) => &nodes[..],
            node => std::slice::from_ref(node),
        };
        let mut pending: Vec<&Node> = required.iter().collect();
        while let Some(node) = pending.pop() {
            match node {
                Node::All(nodes) => pending.extend(nodes),
                // One alternative of several; another case may take another one.
                Node::Any(nodes) if holds(node, &case) != Ok(true) => {
                    let seed = case.fields.get("seed").and_then(Value::as_u64).unwrap_or_default();
                    pending.push(&nodes[seed as usize % nodes.len()]);
                }
                node if holds(node, &case) == Ok(true) => {}
                Node::Field(name) => set(&mut case, name, Value::Bool(true)),
                Node::Not(inner) => {
                    if let Node::Field(name) = &**inner {
                        set(&mut case, name, Value::Bool(false));
                    }
                }
                Node::Compared(Relation::Equal, a, b) => match (&**a, &**b) {
                    (Node::Field(name), Node::Value(value))
                    | (Node::Value(value), Node::Field(name)) => {
                        set(&mut case, name, value.clone());
                    }
                    (Node::Remainder(a, b), Node::Value(rest)) => {
                        if let (Node::Field(name), Node::Value(by)) = (&**a, &**b) {
                            round_up(&mut case, name, by, rest);
                        }
                    }
                    _ => {}
                },
                _ => {}
            }
        }
        case
    }

    /// The first field in the condition that none of the cases has.
    pub fn unknown<'a>(&self, cases: impl Iterator<Item = &'a Case> + Clone) -> Option<&str> {
        let mut names = Vec::new();
        name_fields(&self.root, &mut names);
        names.into_iter().find(|name| !cases.clone().any(|case| field(case, name).is_some()))
    }
}

fn name_fields<'a>(node: &'a Node, names: &mut Vec<&'a str>) {
    match node {
        Node::Value(_) => {}
        Node::Field(name) => names.push(name),
        Node::Not(inner) => name_fields(inner, names),
        Node::All(nodes) | Node::Any(nodes) => {
            nodes.iter().for_each(|node| name_fields(node, names))
        }
        Node::Remainder(a, b) | Node::Compared(_, a, b) => {
            name_fields(a, names);
            name_fields(b, names);
        }
    }
}

/// A field of the case, or a nested one.
fn field<'a>(case: &'a Case, name: &str) -> Option<&'a Value> {
    let mut parts = name.split('.');
    let first = case.fields.get(parts.next()?)?;
    parts.try_fold(first, |value, part| value.get(part))
}

/// Sets a field that the case has to another value of the same kind.
fn set(case: &mut Case, name: &str, value: Value) {
    let mut parts = name.split('.');
    let first = parts.next().and_then(|part| case.fields.get_mut(part));
    let Some(place) = parts.fold(first, |place, part| place?.get_mut(part)) else { return };
    let whole =
        value.as_f64().filter(|number| number.fract() == 0.0 && (0.0..9e15).contains(number));
    *place = match whole {
        Some(number) if !place.is_f64() => Value::from(number as u64),
        _ => value,
    };
}

/// Rounds a field up to the next nonzero number that leaves `rest` when it is divided.
fn round_up(case: &mut Case, name: &str, by: &Value, rest: &Value) {
    let (Some(now), Some(by), Some(rest)) =
        (field(case, name).and_then(Value::as_u64), by.as_f64(), rest.as_f64())
    else {
        return;
    };
    let whole = |number: f64| number.fract() == 0.0 && (0.0..9e15).contains(&number);
    if whole(by) && whole(rest) && rest < by {
        let (by, rest) = (by as u64, rest as u64);
        let next = now.saturating_sub(rest).div_ceil(by).saturating_mul(by).saturating_add(rest);
        set(case, name, Value::from(if next == 0 { by } else { next }));
    }
}

fn holds(node: &Node, case: &Case) -> Result<bool, String> {
    match value(node, case)? {
        Value::Bool(holds) => Ok(holds),
        other => Err(format!("{} is {other}, neither true nor false", words(node))),
    }
}

fn value(node: &Node, case: &Case) -> Result<Value, String> {
    Ok(match node {
        Node::Value(value) => value.clone(),
        Node::Field(name) => field(case, name).cloned().unwrap_or(Value::Null),
        Node::Not(inner) => Value::Bool(!holds(inner, case)?),
        Node::All(nodes) => {
            let all = nodes.iter().map(|node| holds(node, case));
            Value::Bool(
                all.into_iter().try_fold(true, |so_far, next| next.map(|next| so_far && next))?,
            )
        }
        Node::Any(nodes) => {
            let any = nodes.iter().map(|node| holds(node, case));
            Value::Bool(
                any.into_iter().try_fold(false, |so_far, next| next.map(|next| so_far || next))?,
            )
        }
        Node::Remainder(a, b) => remainder((a, &value(a, case)?), (b, &value(b, case)?))?,
        Node::Compared(relation, a, b) => {
            Value::Bool(compared(*relation, (a, &value(a, case)?), (b, &value(b, case)?))?)
        }
    })
}

fn remainder((a, left): (&Node, &Value), (b, right): (&Node, &Value)) -> Result<Value, String> {
    if left.is_null() || right.is_null() {
        return Ok(Value::Null);
    }
    match (left.as_f64(), right.as_f64()) {
        (Some(_), Some(0.0)) => {
            Err(format!("{} % {}: nothing is divided by 0", words(a), words(b)))
        }
        (Some(left), Some(right)) => Ok(Value::from(left % right)),
        _ => Err(format!("{} % {}: {left} and {right} are not both numbers", words(a), words(b))),
    }
}

fn compared(
    relation: Relation,
    (a, left): (&Node, &Value),
    (b, right): (&Node, &Value),
) -> Result<bool, String> {
    let order = match (left, right) {
        (Value::Number(left), Value::Number(right)) => left.as_f64().partial_cmp(&right.as_f64()),
        (Value::String(left), Value::String(right)) => Some(left.cmp(right)),
        (Value::Bool(left), Value::Bool(right)) => Some(left.cmp(right)),
        (Value::Null, Value::Null) => Some(Ordering::Equal),
        // An absent value, an object or an array differs from every word.
        (Value::Null | Value::Object(_) | Value::Array(_), _)
        | (_, Value::Null | Value::Object(_) | Value::Array(_)) => None,
        _ => {
            return Err(format!(
                "{} and {}: {left} cannot be compared with {right}",
                words(a),
                words(b)
            ));
        }
    };
    Ok(match relation {
        Relation::Equal => order == Some(Ordering::Equal),
        Relation::Unequal => order != Some(Ordering::Equal),
        Relation::Less => order == Some(Ordering::Less),
        Relation::Greater => order == Some(Ordering::Greater),
        Relation::AtMost => matches!(order, Some(Ordering::Less | Ordering::Equal)),
        Relation::AtLeast => matches!(order, Some(Ordering::Greater | Ordering::Equal)),
    })
}

/// The name of an operand in a message.
fn words(node: &Node) -> String {
    match node {
        Node::Field(name) => format!("`{name}`"),
        Node::Value(value) => value.to_string(),
        _ => "an operand".to_owned(),
    }
}

// ---------------------------------------------------------------- reading

#[derive(Clone, Debug)]
struct Token {
    /// Position, counted in characters from 1.
    place: usize,
    text: String,
    kind: Kind,
}

#[derive(Clone, Debug, PartialEq)]
enum Kind {
    Value(Value),
    Name,
    Sign,
}

impl Token {
    fn not_expected(&self, expected: &str) -> String {
        format!("at character {}, `{}`: expected {expected}", self.place, self.text)
    }

    fn is(&self, word: &str) -> bool {
        !matches!(self.kind, Kind::Value(_)) && self.text == word
    }
}

fn tokens(text: &str) -> Result<Vec<Token>, String> {
    let characters: Vec<char> = text.chars().collect();
    let mut tokens = Vec::new();
    let mut at = 0;
    while let Some(&first) = characters.get(at) {
        if first.is_whitespace() {
            at += 1;
            continue;
        }
        let rest = &characters[at..];
        let (length, kind) =
            token(rest).map_err(|why| format!("at character {}, {why}", at + 1))?;
        tokens.push(Token { place: at + 1, text: rest[..length].iter().collect(), kind });
        at += length;
    }
    Ok(tokens)
}

/// The length and the kind of the token that starts here.
fn token(rest: &[char]) -> Result<(usize, Kind), String> {
    let run =
        |holds: fn(&char) -> bool| rest.iter().take_while(|&character| holds(character)).count();
    let first = rest[0];
    if first == '\'' || first == '"' {
        let length = rest[1..].iter().position(|&character| character == first);
        let length = length.ok_or_else(|| format!("`{first}`: the string has no end"))?;
        return Ok((length + 2, Kind::Value(rest[1..=length].iter().collect::<String>().into())));
    }
    let is_number = first.is_ascii_digit() || first == '.' || first == '-';
    if is_number {
        let mut length =
            1 + rest[1..].iter().take_while(|c| c.is_ascii_alphanumeric() || **c == '.').count();
        // The sign of an exponent.
        if matches!(rest[length - 1], 'e' | 'E') && matches!(rest.get(length), Some('+' | '-')) {
            length += 1 + rest[length + 1..].iter().take_while(|c| c.is_ascii_digit()).count();
        }
        let text: String = rest[..length].iter().collect();
        let number = text.parse::<f64>().ok().filter(|number| number.is_finite());
        let number = number.ok_or_else(|| format!("`{text}`: expected a number"))?;
        return Ok((length, Kind::Value(number.into())));
    }
    if first.is_alphabetic() || first == '_' {
        let length = run(|character| character.is_alphanumeric() || matches!(character, '_' | '.'));
        let text: String = rest[..length].iter().collect();
        let value = match text.as_str() {
            "true" => Kind::Value(true.into()),
            "false" => Kind::Value(false.into()),
            "null" => Kind::Value(Value::Null),
            _ => Kind::Name,
        };
        return Ok((length, value));
    }
    match (first, rest.get(1)) {
        ('=' | '!' | '<' | '>', Some('=')) => Ok((2, Kind::Sign)),
        ('=' | '<' | '>' | '%' | '(' | ')', _) => Ok((1, Kind::Sign)),
        _ => Err(format!("`{first}`: expected a field, a value or a sign")),
    }
}

struct Parser {
    tokens: Vec<Token>,
    at: usize,
    depth: usize,
}

impl Parser {
    /// If the next token is this word or sign, consumes it and returns `true`.
    fn passes(&mut self, word: &str) -> bool {
        let is_next = self.tokens.get(self.at).is_some_and(|token| token.is(word));
        self.at += usize::from(is_next);
        is_next
    }

    fn not_expected(&self, expected: &str) -> String {
        match self.tokens.get(self.at) {
            Some(token) => token.not_expected(expected),
            None => {
                let place =
                    self.tokens.last().map_or(1, |last| last.place + last.text.chars().count());
                format!("at character {place}, the end: expected {expected}")
            }
        }
    }

    fn deeper<T>(
        &mut self,
        read: impl FnOnce(&mut Self) -> Result<T, String>,
    ) -> Result<T, String> {
        if self.depth == DEEPEST {
            return Err(
                self.not_expected(&format!("at most {DEEPEST} parentheses within one another"))
            );
        }
        self.depth += 1;
        let read = read(self);
        self.depth -= 1;
        read
    }

    fn any(&mut self) -> Result<Node, String> {
        let mut nodes = vec![self.all()?];
        while self.passes("or") {
            nodes.push(self.all()?);
        }
        Ok(if nodes.len() == 1 { nodes.remove(0) } else { Node::Any(nodes) })
    }

    fn all(&mut self) -> Result<Node, String> {
        let mut nodes = vec![self.negated()?];
        while self.passes("and") {
            nodes.push(self.negated()?);
        }
        Ok(if nodes.len() == 1 { nodes.remove(0) } else { Node::All(nodes) })
    }

    fn negated(&mut self) -> Result<Node, String> {
        if self.passes("not") {
            return Ok(Node::Not(Box::new(self.deeper(Self::negated)?)));
        }
        self.compared()
    }

    fn compared(&mut self) -> Result<Node, String> {
        let left = self.remainder()?;
        let relations = [
            ("=", Relation::Equal),
            ("==", Relation::Equal),
            ("!=", Relation::Unequal),
            ("<=", Relation::AtMost),
            (">=", Relation::AtLeast),
            ("<", Relation::Less),
            (">", Relation::Greater),
        ];
        match relations.into_iter().find(|(sign, _)| self.passes(sign)) {
            None => Ok(left),
            Some((_, relation)) => {
                Ok(Node::Compared(relation, Box::new(left), Box::new(self.remainder()?)))
            }
        }
    }

    fn remainder(&mut self) -> Result<Node, String> {
        let mut node = self.operand()?;
        while self.passes("%") {
            node = Node::Remainder(Box::new(node), Box::new(self.operand()?));
        }
        Ok(node)
    }

    fn operand(&mut self) -> Result<Node, String> {
        if self.passes("(") {
            let inner = self.deeper(Self::any)?;
            return if self.passes(")") { Ok(inner) } else { Err(self.not_expected("`)`")) };
        }
        let expected = "a field, a value or `(`";
        let Some(token) = self.tokens.get(self.at).cloned() else {
            return Err(self.not_expected(expected));
        };
        let node = match token.kind {
            Kind::Value(value) => Node::Value(value),
            Kind::Name if !["and", "or", "not"].contains(&token.text.as_str()) => {
                Node::Field(token.text)
            }
            _ => return Err(token.not_expected(expected)),
        };
        self.at += 1;
        Ok(node)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn case() -> Case {
        let line = r#"{"operator":"o","head_dim":512,"topk":256,"dtype":"bf16","dlse":true,"scale":0.125,"bias":null,
            "values":{"separate":{"v_dim":64}}}"#;
        Case::parse(line).expect("a case")
    }

    #[test]
    fn a_condition_holds_where_its_words_say_so() {
        for (text, expected) in [
            ("head_dim = 512 and topk % 128 = 0", true),
            ("head_dim == 512 and topk % 100 = 0", false),
            ("head_dim=511 or dtype='bf16'", true),
            ("not dlse or not (dtype != \"f32\")", false),
            ("not not dlse", true),
            ("scale < 1.25e-1", false),
            ("scale >= .125 and scale <= 1.25E-1", true),
            ("-1 < topk and topk > 255", true),
            ("values.separate.v_dim = 64", true),
            // A word where other cases have an object, and an absent field.
            ("values = 'shared'", false),
            ("values != 'shared'", true),
            ("bias = null and absent = null and absent.within != 3", true),
            ("absent < 3 or absent >= 3 or absent % 2 = 0", false),
            ("true", true),
            // `and` binds more closely than `or`.
            ("true or true and false", true),
            ("(true or true) and false", false),
        ] {
            assert_eq!(
                Condition::parse(text).unwrap_or_else(|e| panic!("{text}: {e}")).holds(&case()),
                Ok(expected),
                "{text}"
            );
        }
        let parse = |text: &str| Condition::parse(text).ok();
        let both = Condition::both(parse("dlse"), parse("topk = 1 or dlse")).expect("two");
        assert_eq!(
            (both.to_string().as_str(), both.holds(&case())),
            ("(dlse) and (topk = 1 or dlse)", Ok(true))
        );
        let (cases, condition) =
            ([case()], Condition::parse("topk = 1 and hed_dim = 2").expect("a condition"));
        assert_eq!(condition.unknown(cases.iter()), Some("hed_dim"));
    }

    #[test]
    fn fields_that_a_condition_fixes_are_set_and_nothing_else() {
        let text = "head_dim = 64 and topk % 128 = 0 and (not dlse and 'f32' = dtype) and values.separate.v_dim = 32 and scale < 1";
        let condition = Condition::parse(text).expect("a condition");
        let mut case = case();
        case.fields["topk"] = 129.into();
        let steered = condition.steered(case.clone());
        assert_eq!(condition.holds(&steered), Ok(true), "{}", steered.line());
        let fields: Vec<_> =
            steered.fields.iter().filter(|(name, value)| case.fields[*name] != **value).collect();
        let said: Vec<String> =
            fields.iter().map(|(name, value)| format!("{name} {value}")).collect();
        assert_eq!(
            said.join(", "),
            r#"dlse false, dtype "f32", head_dim 64, topk 256, values {"separate":{"v_dim":32}}"#
        );
        let either =
            Condition::parse("head_dim = 64 or topk = 1 and head_dim = 64").expect("a condition");
        for seed in 0..4 {
            case.fields.insert("seed".into(), seed.into());
            let steered = either.steered(case.clone());
            assert_eq!(
                (steered.fields["head_dim"].as_u64(), steered.fields["topk"] == 1),
                (Some(64), seed % 2 == 1)
            );
        }
        for kept in ["absent = 1", "topk % 0 = 0", "scale % 2 = 1"] {
            assert_eq!(
                Condition::parse(kept).expect("a condition").steered(case.clone()),
                case,
                "{kept}"
            );
        }
    }

    #[test]
    fn what_is_no_condition_is_refused_with_its_place() {
        for (text, message) in [
            ("", "at character 1, the end: expected a field, a value or `(`"),
            ("head_dim = ", "at character 11, the end: expected a field, a value or `(`"),
            ("head_dim 512", "at character 10, `512`: expected `and`, `or` or the end"),
            ("(a = 1", "at character 7, the end: expected `)`"),
            ("a = 1 && b = 2", "at character 7, `&`: expected a field, a value or a sign"),
            ("a = 'x", "at character 5, `'`: the string has no end"),
            ("a = 12x", "at character 5, `12x`: expected a number"),
            ("and a", "at character 1, `and`: expected a field, a value or `(`"),
            ("a = = 2", "at character 5, `=`: expected a field, a value or `(`"),
        ] {
            assert_eq!(Condition::parse(text).expect_err(text), message);
        }
        let deep = format!("{}a{}", "(".repeat(100_000), ")".repeat(100_000));
        assert!(Condition::parse(&deep).expect_err("too deep").contains("at most 64 parentheses"));
        for (text, message) in [
            ("head_dim", "`head_dim`: `head_dim` is 512, neither true nor false"),
            (
                "head_dim = '512'",
                "`head_dim = '512'`: `head_dim` and \"512\": 512 cannot be compared with \"512\"",
            ),
            (
                "dtype % 2 = 0",
                "`dtype % 2 = 0`: `dtype` % 2.0: \"bf16\" and 2.0 are not both numbers",
            ),
            ("topk % 0 = 0", "`topk % 0 = 0`: `topk` % 0.0: nothing is divided by 0"),
        ] {
            assert_eq!(
                Condition::parse(text).expect("it can be read").holds(&case()).expect_err(text),
                message
            );
        }
    }

    proptest! {
        #[test]
        fn no_text_makes_the_reader_panic(text in "[a-c0-2.'\"()=!<>% é]{0,40}|((and|or|not|a|1|%|=|\\(|\\)|'x') ?){0,20}") {
            if let Ok(condition) = Condition::parse(&text) {
                let _ = condition.holds(&case());
            }
        }
    }
}
