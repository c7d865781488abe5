//! The alphabet of byte-level BPE: every byte is written as one printable character.
//!
//! Printable ASCII and most of Latin-1 stand for themselves; the 68 other bytes take the
//! characters from U+0100 on, in order (so a space is U+0120). Source: GPT-2's
//! `bytes_to_unicode`.

/// Whether the byte is its own character.
const fn is_printable(byte: u8) -> bool {
    matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff)
}

/// The character that stands for a byte.
pub(super) fn char_of(byte: u8) -> char {
    if is_printable(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|&other| !is_printable(other)).count();
    u32::try_from(before)
        .ok()
        .and_then(|before| char::from_u32(0x100 + before))
        .unwrap_or(' ')
}

/// The bytes that a token's text stands for. Characters outside the alphabet stand for their own
/// UTF-8 bytes, as llama.cpp reads them.
pub(super) fn decode(text: &str, table: &Alphabet, out: &mut Vec<u8>) {
    for char in text.chars() {
        match table.byte_of(char) {
            Some(byte) => out.push(byte),
            None => out.extend_from_slice(char.encode_utf8(&mut [0; 4]).as_bytes()),
        }
    }
}

/// The alphabet as a table from characters to bytes.
pub(super) struct Alphabet([Option<u8>; 0x200]);

impl Alphabet {
    pub(super) fn new() -> Self {
        let mut table = [None; 0x200];
        for byte in 0..=u8::MAX {
            if let Some(entry) = table.get_mut(char_of(byte) as usize) {
                *entry = Some(byte);
            }
        }
        Self(table)
    }

    fn byte_of(&self, char: char) -> Option<u8> {
        *self.0.get(char as usize)?
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_alphabet_has_one_character_for_each_byte() {
        let table = Alphabet::new();
        for byte in 0..=u8::MAX {
            assert_eq!(table.byte_of(char_of(byte)), Some(byte));
        }
        assert_eq!(char_of(b' '), '\u{120}');
        assert_eq!(char_of(b'\n'), '\u{10a}');
        assert_eq!(char_of(0x7f), '\u{121}');
        assert_eq!(char_of(0xad), '\u{143}');
    }

    #[test]
    fn foreign_characters_stand_for_their_own_bytes() {
        let mut out = Vec::new();
        decode("a\u{120}\u{2581}", &Alphabet::new(), &mut out);
        assert_eq!(out, "a \u{2581}".as_bytes());
    }
}
