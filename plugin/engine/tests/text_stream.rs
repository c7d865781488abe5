//! Streams of text: the pieces joined are the whole, and nothing uncertain is shown.

use proptest::prelude::*;
use rootstock_engine::text::TextStream;

/// All pieces, the stop that was met, and what the end released.
fn run(tokens: &[&[u8]], stops: &[&str]) -> (Vec<String>, Option<usize>, Option<String>) {
    let mut stream = TextStream::new(stops);
    let mut pieces = Vec::new();
    for token in tokens {
        let piece = stream.push(token);
        pieces.extend(piece.text);
        if piece.stop.is_some() {
            return (pieces, piece.stop, stream.finish());
        }
    }
    (pieces, None, stream.finish())
}

fn texts(tokens: &[&str], stops: &[&str]) -> (Vec<String>, Option<usize>, Option<String>) {
    let tokens: Vec<&[u8]> = tokens.iter().map(|token| token.as_bytes()).collect();
    run(&tokens, stops)
}

fn owned(pieces: &[&str]) -> Vec<String> {
    pieces.iter().map(|&piece| piece.to_owned()).collect()
}

#[test]
fn a_stop_over_several_tokens_streams_nothing_of_itself() {
    assert_eq!(
        texts(&["DEF", "G", "HI", "J"], &["DEFGHIJ"]),
        (vec![], Some(0), None)
    );
}

#[test]
fn text_before_a_stop_is_shown_and_the_stop_is_not() {
    let tokens = ["The", " quick", " brown", " fox", " jumps"];
    let (pieces, stop, rest) = texts(&tokens, &["own fox"]);
    assert_eq!(
        (pieces.concat().as_str(), stop, rest),
        ("The quick br", Some(0), None)
    );
}

#[test]
fn an_answer_that_ends_inside_a_stop_releases_what_was_held() {
    let (pieces, stop, rest) = texts(&["The quick br", "own"], &["own fox"]);
    assert_eq!(
        (pieces, stop, rest),
        (owned(&["The quick br"]), None, Some("own".to_owned()))
    );
}

#[test]
fn a_character_over_four_tokens_is_one_piece() {
    let bytes = "\u{1f600}".as_bytes();
    let tokens: Vec<&[u8]> = bytes.chunks(1).collect();
    assert_eq!(run(&tokens, &[]), (owned(&["\u{1f600}"]), None, None));
}

#[test]
fn of_two_stops_the_one_that_is_complete_first_ends_the_answer() {
    // One is a prefix of the other, in both orders.
    assert_eq!(
        texts(&["x", "ab", "c"], &["ab", "abc"]),
        (owned(&["x"]), Some(0), None)
    );
    assert_eq!(
        texts(&["x", "ab", "c"], &["abc", "ab"]),
        (owned(&["x"]), Some(1), None)
    );
    // Both end at the same byte, in one token: the longer one is cut away.
    assert_eq!(
        texts(&["xabc"], &["bc", "abc"]),
        (owned(&["x"]), Some(1), None)
    );
    // The shorter one ends first, inside the beginning of the longer one.
    assert_eq!(
        texts(&["xa", "bc"], &["abcd", "bc"]),
        (owned(&["x", "a"]), Some(1), None)
    );
}

#[test]
fn a_stop_inside_a_token_cuts_the_token() {
    let (pieces, stop, rest) = texts(&["caf\u{e9}STOPmore"], &["STOP"]);
    assert_eq!((pieces, stop, rest), (owned(&["caf\u{e9}"]), Some(0), None));
}

#[test]
fn a_stop_may_begin_and_end_inside_tokens_that_cut_characters() {
    // The stop is one character of three bytes, in a token with the last byte of another.
    let text = "\u{e9}\u{20ac}!".as_bytes();
    let tokens = [&text[..1], &text[1..3], &text[3..]];
    assert_eq!(
        run(&tokens, &["\u{20ac}"]),
        (owned(&["\u{e9}"]), Some(0), None)
    );
    // A character that only shares its first byte with the stop is released whole.
    let text = "\u{20ad}".as_bytes();
    let tokens = [&text[..2], &text[2..]];
    assert_eq!(
        run(&tokens, &["\u{20ac}"]),
        (owned(&["\u{20ad}"]), None, None)
    );
}

#[test]
fn a_false_start_is_released_as_soon_as_it_is_one() {
    let (pieces, stop, _) = texts(&["a", "a", "b", "aab"], &["aac"]);
    assert_eq!((pieces, stop), (owned(&["aab", "aab"]), None));
    // The fallback keeps what can still begin a stop: "aa" of "aaab" when "aaaa" is wanted.
    let (pieces, stop, rest) = texts(&["aaa", "b", "aa"], &["aaaa"]);
    assert_eq!(
        (pieces, stop, rest),
        (owned(&["aaab"]), None, Some("aa".to_owned()))
    );
}

#[test]
fn only_an_answer_that_really_ends_inside_a_character_shows_a_replacement() {
    assert_eq!(
        run(&[b"a\xe2\x82"], &[]),
        (owned(&["a"]), None, Some("\u{fffd}".to_owned()))
    );
    // Bytes that can never become a character do not wait.
    assert_eq!(
        run(&[b"a\xff", b"b"], &[]),
        (owned(&["a\u{fffd}", "b"]), None, None)
    );
    assert_eq!(
        run(&[b"\xe2", b"\x28"], &[]),
        (owned(&["\u{fffd}("]), None, None)
    );
}

#[test]
fn empty_tokens_and_empty_stops_bring_nothing() {
    let mut stream = TextStream::new(&["", "x"]);
    assert_eq!(stream.push(b"").text, None);
    assert_eq!(stream.push(b"a").text.as_deref(), Some("a"));
    assert_eq!(stream.push(b"x").stop, Some(1));
    assert_eq!(
        stream.push(b"more"),
        rootstock_engine::text::Piece::default()
    );
    assert_eq!(stream.finish(), None);
}

/// The plain model: look at the whole answer at once.
fn whole(bytes: &[u8], stops: &[String]) -> (String, Option<usize>) {
    for end in 1..=bytes.len() {
        let longest = stops
            .iter()
            .enumerate()
            .filter(|(_, stop)| !stop.is_empty() && bytes[..end].ends_with(stop.as_bytes()))
            .max_by_key(|(index, stop)| (stop.len(), usize::MAX - index));
        if let Some((index, stop)) = longest {
            let shown = &bytes[..end - stop.len()];
            return (String::from_utf8_lossy(shown).into_owned(), Some(index));
        }
    }
    (String::from_utf8_lossy(bytes).into_owned(), None)
}

/// Bytes from an alphabet in which stops and cut characters are likely.
fn token() -> impl Strategy<Value = Vec<u8>> {
    let piece = prop_oneof![
        4 => prop::sample::select(vec![b"a".to_vec(), b"b".to_vec(), b"ab".to_vec()]),
        3 => prop::sample::select(vec![
            b"\xe2".to_vec(),
            b"\x82".to_vec(),
            b"\xac".to_vec(),
            b"\xe2\x82\xac".to_vec(),
            b"\xf0\x9f".to_vec(),
            b"\x98\x80".to_vec(),
        ]),
        1 => any::<u8>().prop_map(|byte| vec![byte]),
    ];
    prop::collection::vec(piece, 0..4).prop_map(|pieces| pieces.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4096))]

    #[test]
    fn pieces_joined_are_the_whole_answer(
        tokens in prop::collection::vec(token(), 0..12),
        stops in prop::collection::vec("[ab\u{20ac}]{0,4}", 0..4),
    ) {
        let (expected, expected_stop) = whole(&tokens.concat(), &stops);
        let mut stream = TextStream::new(&stops);
        let mut joined = String::new();
        let mut stop = None;
        for token in &tokens {
            let piece = stream.push(token);
            prop_assert!(piece.text.as_deref() != Some(""), "an empty piece");
            joined.extend(piece.text);
            prop_assert!(expected.starts_with(&joined), "{joined:?} was shown of {expected:?}");
            stop = stop.or(piece.stop);
        }
        let rest = stream.finish();
        prop_assert!(rest.as_deref() != Some(""), "an empty rest");
        joined.extend(rest);
        prop_assert_eq!(joined, expected);
        prop_assert_eq!(stop, expected_stop);
    }

    /// Nothing is held that could be shown: with valid text and no stop begun, all of it is out.
    #[test]
    fn what_cannot_be_a_stop_is_not_held(text in "[abc]{0,20}") {
        let mut stream = TextStream::new(&["ab"]);
        let mut joined = String::new();
        for byte in text.bytes() {
            let piece = stream.push(&[byte]);
            joined.extend(piece.text);
            if piece.stop.is_some() {
                return Ok(());
            }
        }
        let held = if text.ends_with('a') { 1 } else { 0 };
        prop_assert_eq!(joined.len() + held, text.len());
    }
}
