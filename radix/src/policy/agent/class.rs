//! What is told apart when reuse is learned: the class of a page.
//!
//! A class is a group, which the most telling signal decides, and how often the page was used, in
//! octaves. Nothing here says what a class is worth: that is learned, so a signal that lies makes
//! its class less telling and no more.

use super::ages::{self, BINS};
use crate::{ContextKind, ProgramId};
use rootstock_memory::Nanos;

/// Octaves of use that are told apart.
pub(crate) const USES: usize = 8;

const GROUPS: usize = 16;

/// Number of classes.
pub(crate) const CLASSES: usize = GROUPS * USES;

/// Number of cells: a class in a bin of time.
pub(crate) const CELLS: usize = CLASSES * BINS;

/// Groups of expected output: up to 32 tokens, 64, 128, 256, 512, and more.
const OUTPUTS: u32 = 6;

/// What is known best about a page.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub(crate) enum Group {
    /// Nothing.
    #[default]
    Plain,
    /// The model's reasoning.
    Thinking,
    /// Notes that are rewritten.
    Scratchpad,
    /// The answer has this many tokens, in octaves: until it is there nobody comes back.
    Output(u8),
    /// Its program has said that it is done.
    Final,
    /// Its program went on from another prefix, or gave it up.
    Dead,
    /// Several programs use it.
    Shared,
    /// Its program has said when it comes back.
    Due,
}

impl Group {
    const fn index(self) -> usize {
        match self {
            Self::Plain => 0,
            Self::Thinking => 1,
            Self::Scratchpad => 2,
            Self::Output(octave) => 3 + octave as usize,
            Self::Final => 3 + OUTPUTS as usize,
            Self::Dead => 4 + OUTPUTS as usize,
            Self::Shared => 5 + OUTPUTS as usize,
            Self::Due => 6 + OUTPUTS as usize,
        }
    }
}

const _: () = assert!(Group::Due.index() < GROUPS);

/// What a request says about itself. Absent means unknown.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Said {
    /// Its program.
    pub(crate) program: Option<ProgramId>,
    /// Whether it is the program's last.
    pub(crate) last: bool,
    /// When the next one is expected.
    pub(crate) due: Option<Nanos>,
    /// Expected output tokens.
    pub(crate) osl: Option<u32>,
}

impl Said {
    /// The group of a page of this kind that the request used; `shared` with other programs.
    pub(crate) const fn group(&self, kind: ContextKind, shared: bool) -> Group {
        match (kind, self.osl) {
            _ if shared => Group::Shared,
            _ if self.last => Group::Final,
            _ if self.due.is_some() => Group::Due,
            (ContextKind::Thinking, _) => Group::Thinking,
            (ContextKind::Scratchpad, _) => Group::Scratchpad,
            (_, Some(tokens)) => {
                let octave = tokens.saturating_sub(1).checked_ilog2();
                let above = match octave {
                    Some(octave) => octave.saturating_sub(4),
                    None => 0,
                };
                #[expect(clippy::cast_possible_truncation, reason = "below 6")]
                Group::Output(if above < OUTPUTS { above } else { OUTPUTS - 1 } as u8)
            }
            (_, None) => Group::Plain,
        }
    }
}

/// The class of something, and the moment from which its time is counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Mark {
    pub(crate) origin: Nanos,
    class: u8,
}

impl Mark {
    /// Of what nothing is known.
    pub(crate) const NONE: Self = Self {
        origin: 0,
        class: 0,
    };

    /// The mark of what was used `uses` times.
    pub(crate) fn new(group: Group, uses: u32, origin: Nanos) -> Self {
        let octave = (uses.max(1).ilog2() as usize).min(USES - 1);
        let class = u8::try_from(group.index() * USES + octave).expect("fewer than 256 classes");
        Self { origin, class }
    }

    /// The same uses in another group, from another moment.
    pub(crate) fn moved(self, group: Group, origin: Nanos) -> Self {
        Self::new(group, 1 << (usize::from(self.class) % USES), origin)
    }

    /// Where it belongs at `now`.
    pub(crate) fn cell(self, now: Nanos) -> usize {
        usize::from(self.class) * BINS + ages::bin(now, self.origin)
    }

    /// The cells that it passed through from `first` until `now`.
    pub(crate) fn stay(self, first: u16, now: Nanos) -> Stay {
        Stay {
            first: first.into(),
            last: self.cell(now),
        }
    }
}

/// A time that something spent in its class, as cells: from the first to the last, both included.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Stay {
    pub(crate) first: usize,
    pub(crate) last: usize,
}

/// Whether all of a class is expected to be worth nothing.
pub(crate) const fn is_given_up(class: usize) -> bool {
    let group = class / USES;
    group == Group::Final.index() || group == Group::Dead.index()
}

/// Whether the time of a class is counted from a moment that is expected.
pub(crate) const fn is_due(class: usize) -> bool {
    class / USES == Group::Due.index()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_telling_signal_decides_the_group() {
        let all = Said {
            program: None,
            last: true,
            due: Some(9),
            osl: Some(65),
        };
        let kind = ContextKind::Thinking;
        assert_eq!(all.group(kind, true), Group::Shared);
        assert_eq!(all.group(kind, false), Group::Final);
        let goes_on = Said { last: false, ..all };
        assert_eq!(goes_on.group(kind, false), Group::Due);
        let undated = Said {
            due: None,
            ..goes_on
        };
        assert_eq!(undated.group(kind, false), Group::Thinking);
        assert_eq!(undated.group(ContextKind::History, false), Group::Output(2));
        for (tokens, octave) in [
            (0, 0),
            (32, 0),
            (33, 1),
            (64, 1),
            (512, 4),
            (513, 5),
            (9999, 5),
        ] {
            let said = Said {
                osl: Some(tokens),
                ..Said::default()
            };
            let group = said.group(ContextKind::Unknown, false);
            assert_eq!(group, Group::Output(octave), "{tokens} tokens");
        }
        assert_eq!(
            Said::default().group(ContextKind::Tools, false),
            Group::Plain
        );
    }

    #[test]
    fn every_mark_has_a_cell_of_its_own_class() {
        let groups = [Group::Plain, Group::Output(5), Group::Final, Group::Due];
        for group in groups {
            for uses in [0, 1, 2, 3, 200, u32::MAX] {
                let mark = Mark::new(group, uses, 5);
                assert!(mark.cell(u64::MAX) < CELLS);
                assert_eq!(mark.moved(group, 5), mark);
            }
        }
        assert!(is_given_up(usize::from(Mark::new(Group::Dead, 1, 0).class)));
        assert!(is_due(usize::from(Mark::new(Group::Due, 300, 0).class)));
    }
}
