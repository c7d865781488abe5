//! How bytes choose the arguments of calls, and what holds for every answer.

use std::ffi::c_char;

use crate::action::{RootstockAction, RootstockOutcome, RootstockOutcomeKind};
use crate::cache::RootstockNamespace;
use crate::status::{self, RootstockStatus};

/// Room of every buffer.
pub(super) const ROOM: usize = 64;

/// Calls a function of the library.
macro_rules! call {
    ($function:path $(, $argument:expr)* $(,)?) => {{
        // SAFETY: handles are live or null; each other pointer is null, unaligned (which the
        // library must notice before it reads) or to as many values as its length says.
        unsafe { $function($($argument),*) }
    }};
}

pub(super) use call;

/// Bytes that choose what happens; zeros after their end.
pub(super) struct Choices<'a>(pub(super) &'a [u8]);

impl Choices<'_> {
    pub(super) fn byte(&mut self) -> u8 {
        match self.0.split_first() {
            Some((first, rest)) => {
                self.0 = rest;
                *first
            }
            None => 0,
        }
    }

    pub(super) fn below(&mut self, bound: usize) -> usize {
        usize::from(self.byte()) % bound.max(1)
    }

    /// One time in 16.
    pub(super) fn rarely(&mut self) -> bool {
        self.byte().is_multiple_of(16)
    }

    /// Mostly one of what was given out, sometimes another number.
    pub(super) fn one_of(&mut self, given: &[u64]) -> u64 {
        if self.rarely() {
            return [0, 7, u64::MAX][self.below(3)];
        }
        let at = self.below(given.len());
        given.get(at).copied().unwrap_or_default()
    }

    /// A pointer to a value, or one that must be refused.
    pub(super) fn pointer<T>(&mut self, to: &mut T) -> *mut T {
        let pointer = std::ptr::from_mut(to);
        match self.byte() {
            0 => std::ptr::null_mut(),
            1 if align_of::<T>() > 1 => pointer.cast::<u8>().wrapping_add(1).cast(),
            _ => pointer,
        }
    }

    /// A pointer to values with how many there are, or a pair that must be refused.
    pub(super) fn slice<T>(&mut self, of: &[T]) -> (*const T, usize) {
        match self.byte() {
            0 => (std::ptr::null(), of.len()),
            1 => (of.as_ptr(), usize::MAX / size_of::<T>()),
            2 if align_of::<T>() > 1 => (of.as_ptr().cast::<u8>().wrapping_add(1).cast(), of.len()),
            3 => (std::ptr::null(), 0),
            _ => (of.as_ptr(), of.len()),
        }
    }

    pub(super) fn text(&mut self) -> Vec<u8> {
        let len = self.below(6);
        (0..len).map(|_| self.byte()).collect()
    }

    /// The size of a structure, mostly as it is.
    pub(super) fn size<T>(&mut self) -> u32 {
        let size = u32::try_from(size_of::<T>()).unwrap_or(u32::MAX);
        match self.byte() {
            0 => 0,
            1 => size - 1,
            2 => size + 8,
            _ => size,
        }
    }
}

/// Nothing that a host can do may panic or break a count.
pub(super) fn fine(status: RootstockStatus) -> bool {
    assert_ne!(status, RootstockStatus::Panicked, "{}", last_error());
    assert_ne!(status, RootstockStatus::Corrupt, "{}", last_error());
    status == RootstockStatus::Ok
}

pub(super) fn last_error() -> String {
    let mut text = [0_u8; 400];
    let length = call!(
        status::rootstock_last_error,
        text.as_mut_ptr().cast::<c_char>(),
        400
    );
    String::from_utf8_lossy(text.get(..length.min(399)).unwrap_or_default()).into_owned()
}

/// The texts of a namespace, as a host would lay them out.
pub(super) struct Texts([Vec<u8>; 4]);

impl Texts {
    pub(super) fn choose(choices: &mut Choices<'_>) -> Texts {
        Texts(std::array::from_fn(|_| match choices.rarely() {
            true => choices.text(),
            false => vec![b'a'; choices.below(2)],
        }))
    }

    pub(super) fn namespace(&self, choices: &mut Choices<'_>) -> RootstockNamespace {
        let mut part = |at: usize| {
            let (pointer, length) = choices.slice(&self.0[at]);
            (pointer.cast::<c_char>(), length)
        };
        let (model, numerics, lora, salt) = (part(0), part(1), part(2), part(3));
        RootstockNamespace {
            struct_size: choices.size::<RootstockNamespace>(),
            model: model.0,
            model_length: model.1,
            numerics: numerics.0,
            numerics_length: numerics.1,
            lora: lora.0,
            lora_length: lora.1,
            salt: salt.0,
            salt_length: salt.1,
        }
    }
}

/// Tokens of few kinds, so that prompts share prefixes.
pub(super) fn tokens(choices: &mut Choices<'_>) -> Vec<u32> {
    let len = choices.below(ROOM);
    let kind = choices.byte();
    let token = |at: usize| u32::from(kind >> (at % 8) & 1);
    (0..len).map(token).collect()
}

pub(super) const NO_OUTCOME: RootstockOutcome = RootstockOutcome {
    kind: RootstockOutcomeKind::Missing,
    pages: 0,
    asked_pages: 0,
};

pub(super) fn action_of(
    choices: &mut Choices<'_>,
    namespaces: &[u64],
    tokens: &[u32],
) -> RootstockAction {
    let (pointer, length) = choices.slice(tokens);
    RootstockAction {
        struct_size: choices.size::<RootstockAction>(),
        verb: u32::from(choices.byte()) % 6,
        tenant: u32::from(choices.byte()) % 2,
        priority: i32::from(choices.byte()) - 128,
        seconds: [0, 1, 3600, u64::MAX][choices.below(4)],
        replica: [0, 1, 2, u32::MAX][choices.below(4)],
        namespace_id: choices.one_of(namespaces),
        tokens: pointer,
        length,
    }
}
