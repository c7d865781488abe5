//! What is asked: words, conversations, hints. All of it follows from the seed.

use serde_json::{Value, json};

use super::AgentFlags;

/// Short words that are one token for most models.
const WORDS: [&str; 48] = [
    "time",
    "year",
    "people",
    "way",
    "day",
    "man",
    "thing",
    "woman",
    "life",
    "child",
    "world",
    "school",
    "state",
    "family",
    "student",
    "group",
    "country",
    "problem",
    "hand",
    "part",
    "place",
    "case",
    "week",
    "company",
    "system",
    "program",
    "question",
    "work",
    "government",
    "number",
    "night",
    "point",
    "home",
    "water",
    "room",
    "mother",
    "area",
    "money",
    "story",
    "fact",
    "month",
    "lot",
    "right",
    "study",
    "book",
    "eye",
    "job",
    "word",
];

/// Seconds of jump that a user-facing call asks for.
const USER_JUMP_S: f64 = 10.0;
/// Importance of calls: of users, of the middle, of the background.
pub(super) const HIGH: i32 = 10;
pub(super) const MEDIUM: i32 = 0;
pub(super) const LOW: i32 = -10;

/// Steele's SplitMix64.
#[derive(Clone, Debug)]
pub(super) struct Draws(u64);

impl Draws {
    /// Those of one program of a run.
    pub(super) fn new(seed: u64, program: u64) -> Draws {
        Draws(seed ^ program.wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// From half to one and a half of the mean.
    pub(super) fn around(&mut self, mean: f64) -> f64 {
        let part = f64::from(u32::try_from(self.next() >> 32).unwrap_or(0)) / 4_294_967_296.0;
        mean * (0.5 + part)
    }

    /// So many words.
    pub(super) fn words(&mut self, count: u32) -> String {
        let word = |_| {
            let at = usize::try_from(self.next() % WORDS.len() as u64).unwrap_or(0);
            WORDS[at % WORDS.len()]
        };
        (0..count).map(word).collect::<Vec<_>>().join(" ")
    }
}

/// One conversation.
#[derive(Clone, Debug)]
pub(super) struct Talk {
    messages: Vec<Value>,
    session: String,
}

/// What a call is like.
#[derive(Clone, Copy, Debug)]
pub(super) struct Manner {
    pub(super) output_tokens: u32,
    pub(super) importance: i32,
    pub(super) speculative: bool,
}

impl Talk {
    /// A conversation behind the system prompt that all share.
    pub(super) fn new(flags: &AgentFlags, session: String) -> Talk {
        let system = Draws::new(flags.seed, u64::MAX).words(flags.system_words);
        Talk {
            messages: vec![json!({"role": "system", "content": system})],
            session,
        }
    }

    /// Something is said to the model.
    pub(super) fn say(&mut self, text: &str) {
        self.messages.push(json!({"role": "user", "content": text}));
    }

    /// The model has answered.
    pub(super) fn answered(&mut self, text: &str) {
        self.messages
            .push(json!({"role": "assistant", "content": text}));
    }

    /// The body of the next call.
    pub(super) fn body(&self, flags: &AgentFlags, manner: Manner) -> Value {
        let mut body = json!({
            "model": flags.model,
            "messages": self.messages,
            "max_tokens": manner.output_tokens,
            "temperature": 0,
            "stream": true,
            "stream_options": {"include_usage": true},
        });
        if flags.ignore_eos {
            body["ignore_eos"] = true.into();
        }
        let mut hints = json!({});
        if flags.hints {
            let jump_s = if manner.importance > 0 {
                USER_JUMP_S
            } else {
                0.0
            };
            hints = json!({
                "priority": manner.importance,
                "latency_sensitivity": jump_s,
                "osl": manner.output_tokens,
                "prefix_id": self.session,
            });
        }
        if manner.speculative {
            hints["speculative_prefill"] = true.into();
        }
        if hints.as_object().is_some_and(|fields| !fields.is_empty()) {
            body["nvext"] = json!({"agent_hints": hints});
        }
        body
    }
}
