//! Operations and sizes that the drivers of the model make up.

use rootstock_radix::PolicyKind;

/// Longest request, in pages.
pub const REQUEST_PAGES: usize = 6;

/// One operation, small numbers only.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Op {
    /// A request arrives and matches at most `len` tokens.
    Start {
        ns: u8,
        replica: u8,
        bits: u8,
        len: u8,
    },
    /// A request computes pages and puts them into the cache.
    Compute {
        slot: u8,
        pages: u8,
        keep: bool,
        busy: u8,
        priority: i8,
    },
    /// A request looks for what others computed since.
    Grow { slot: u8 },
    /// A request ends.
    End { slot: u8, fate: u8 },
    /// Room is made.
    MakeRoom { replica: u8, pages: u8 },
    /// Steps have ended.
    StepDone { replica: u8, step: u8 },
    /// All is to be cleared.
    Flush,
    /// Pages are reserved, some taken and released, the rest cancelled.
    Borrow {
        replica: u8,
        pages: u8,
        take: u8,
        busy: u8,
    },
}

impl Op {
    /// An operation from four numbers; every value is one.
    pub fn decode([kind, a, b, c]: [u8; 4]) -> Self {
        match kind % 16 {
            0..=3 => Self::Start {
                ns: a & 1,
                replica: a >> 1,
                bits: b,
                len: c,
            },
            4..=7 => {
                let priority = (c >> 4) as i8 % 4 - 1;
                Self::Compute {
                    slot: a,
                    pages: b % 4,
                    keep: c & 1 == 1,
                    busy: c >> 1 & 3,
                    priority,
                }
            }
            8 => Self::Grow { slot: a },
            9..=11 => Self::End { slot: a, fate: b },
            12 | 13 => Self::MakeRoom {
                replica: a,
                pages: b,
            },
            14 => Self::StepDone {
                replica: a,
                step: b,
            },
            _ if a == 0 => Self::Flush,
            _ => Self::Borrow {
                replica: a,
                pages: b,
                take: c & 15,
                busy: c >> 4 & 3,
            },
        }
    }
}

/// Sizes of a run.
#[derive(Clone, Debug)]
pub struct Setup {
    pub page_tokens: u32,
    pub device_pages: Vec<u32>,
    pub policy: PolicyKind,
    /// With fewer nodes than pages the model cannot say what is cached; it still says what each
    /// request owns.
    pub max_nodes: u32,
}

impl Setup {
    /// A setup from three numbers; every value is one.
    pub fn decode(page: u8, pages: u8, kind: u8) -> Self {
        let pages_of = |n: u8| u32::from(n % 12) + 1;
        let mut device_pages = vec![pages_of(pages)];
        let few_nodes = kind & 12 == 12;
        if kind & 2 == 2 && !few_nodes {
            device_pages.push(pages_of(pages >> 4));
        }
        Self {
            page_tokens: [1, 2, 3, 16][usize::from(page) % 4],
            device_pages,
            policy: if kind & 1 == 1 {
                PolicyKind::Priority
            } else {
                PolicyKind::Lru
            },
            max_nodes: if few_nodes {
                u32::from(kind >> 4) % 4 + 1
            } else {
                1 << 20
            },
        }
    }
}
