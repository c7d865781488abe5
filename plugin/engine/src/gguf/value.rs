//! Metadata values, owned and checked.
//!
//! The twelve scalar types of the format become four, because a reader cares about the value and
//! not about the width it was written in. Text arrays (a vocabulary has up to some 300,000
//! entries) are one string with the ends of its parts, not one allocation an entry.

/// One metadata value.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// Any of the integer types.
    Int(i128),
    /// `f32` or `f64`.
    Float(f64),
    /// A truth value.
    Bool(bool),
    /// Text.
    Text(String),
    /// An array of integers (or of truth values, as 0 and 1) that all fit 64 signed bits.
    Ints(Vec<i64>),
    /// An array of floats, narrowed to 32 bits.
    Floats(Vec<f32>),
    /// An array of texts.
    Texts(TextList),
}

impl Value {
    /// What the value is, for messages.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Int(_) => "integer",
            Self::Float(_) => "float",
            Self::Bool(_) => "bool",
            Self::Text(_) => "text",
            Self::Ints(_) => "array of integers",
            Self::Floats(_) => "array of floats",
            Self::Texts(_) => "array of texts",
        }
    }
}

/// A list of texts in one allocation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TextList {
    text: String,
    ends: Vec<usize>,
}

impl TextList {
    /// Adds a text at the end.
    pub fn push(&mut self, text: &str) {
        self.text.push_str(text);
        self.ends.push(self.text.len());
    }

    /// Number of texts.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The text at `index`.
    #[must_use]
    pub fn get(&self, index: usize) -> Option<&str> {
        let end = *self.ends.get(index)?;
        let start = match index.checked_sub(1) {
            None => 0,
            Some(before) => *self.ends.get(before)?,
        };
        self.text.get(start..end)
    }

    /// All texts in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &str> {
        // The ends are char boundaries by construction, so no entry is ever replaced.
        (0..self.len()).map(|index| self.get(index).unwrap_or_default())
    }
}

impl<S: AsRef<str>> FromIterator<S> for TextList {
    fn from_iter<I: IntoIterator<Item = S>>(texts: I) -> Self {
        let mut list = Self::default();
        for text in texts {
            list.push(text.as_ref());
        }
        list
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_list_gives_back_what_was_pushed() {
        let list: TextList = ["", "ab", "\u{e9}", ""].into_iter().collect();
        assert_eq!(list.iter().collect::<Vec<_>>(), ["", "ab", "\u{e9}", ""]);
        assert_eq!(list.get(1), Some("ab"));
        assert_eq!(list.get(4), None);
        assert_eq!(list.len(), 4);
    }
}
