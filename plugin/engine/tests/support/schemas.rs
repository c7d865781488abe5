//! Varied JSON schemas, each a function of its number: nested objects, optional fields, names in
//! many alphabets, lists with bounds and fixed places, enums, patterns, formats, numbers with
//! ranges, unions, references, recursion. Two thirds of them are bounded: whatever is chosen, their
//! answers end.

use serde_json::{Map, Value, json};

/// A schema, and whether its answers are bounded in length.
#[derive(Debug)]
pub(crate) struct Made {
    pub(crate) schema: Value,
    pub(crate) bounded: bool,
}

/// `SplitMix64`.
pub(crate) struct Dice(pub(crate) u64);

impl Dice {
    pub(crate) fn roll(&mut self, sides: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^= x >> 31;
        usize::try_from(x % sides.max(1) as u64).unwrap_or(0)
    }

    fn pick<'a, T>(&mut self, all: &'a [T]) -> &'a T {
        &all[self.roll(all.len())]
    }
}

const NAMES: [&str; 24] = [
    "id",
    "name",
    "value",
    "items",
    "is_done",
    "file path",
    "camelCase",
    "UPPER-kebab",
    "with.dot",
    "quo\"ted",
    "back\\slash",
    "slash/ed",
    "\u{df}stra\u{df}e",
    "\u{540d}\u{524d}",
    "\u{438}\u{43c}\u{44f}",
    "\u{627}\u{633}\u{645}",
    "emoji \u{1f600}",
    "e\u{301}t\u{e9}",
    "",
    "$dollar",
    "#hash",
    "tab\there",
    "9",
    "null",
];

const PATTERNS: [&str; 10] = [
    "^[a-z]{3,8}$",
    "^[A-Z]{2}-[0-9]{4}$",
    "^(yes|no|perhaps)$",
    "^#[0-9a-f]{6}$",
    "^v[0-9]{1,2}\\.[0-9]{1,2}$",
    "^[^\"\\\\]{1,6}$",
    "^\\d{3}\\s?\\w{2}$",
    "^(a|bc){2,4}d?$",
    "^[\u{3b1}-\u{3c9}]{2,5}$",
    "^/[a-z]{1,4}(/[a-z]{1,4}){0,2}$",
];

const FORMATS: [&str; 5] = ["date", "time", "date-time", "uuid", "ipv4"];

/// The schema with this number.
pub(crate) fn schema(number: u64) -> Made {
    let mut maker = Maker {
        dice: Dice(number.wrapping_mul(0x2545_f491_4f6c_dd1d)),
        open: number % 3 == 2,
        bounded: true,
        defs: Map::new(),
    };
    let mut schema = maker.object(3);
    let fields = schema.as_object_mut().expect("an object");
    if number.is_multiple_of(5) {
        fields.insert(
            "$schema".into(),
            "https://json-schema.org/draft/2020-12/schema".into(),
        );
    }
    if !maker.defs.is_empty() {
        fields.insert("$defs".into(), Value::Object(maker.defs));
    }
    Made {
        schema,
        bounded: maker.bounded,
    }
}

struct Maker {
    dice: Dice,
    /// Unbounded parts may be made.
    open: bool,
    bounded: bool,
    defs: Map<String, Value>,
}

impl Maker {
    fn any(&mut self, depth: u32) -> Value {
        let leaves = 7;
        match self.dice.roll(if depth == 0 { leaves } else { leaves + 8 }) {
            0 => self.integer(),
            1 => json!({"type": "boolean"}),
            2 | 3 => self.string(),
            4 => self.chosen(),
            5 => self.number(),
            6 => json!({"type": "null"}),
            7 | 8 => self.list(depth - 1),
            9 => self.tuple(depth - 1),
            10 => self.union(depth - 1),
            11 => self.reference(depth - 1),
            12 => self.nullable(),
            13 => self.both(depth - 1),
            _ => self.object(depth - 1),
        }
    }

    fn integer(&mut self) -> Value {
        let low = self.dice.roll(4000) as i64 - 2000;
        let high = low + self.dice.roll(500) as i64 + 10;
        match self.dice.roll(4) {
            0 => json!({"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": high}),
            1 => json!({"type": "integer", "minimum": 0, "maximum": 100, "multipleOf": 5}),
            2 if self.open => {
                self.bounded = false;
                json!({"type": "integer", "minimum": low})
            }
            _ => json!({"type": "integer", "minimum": low, "maximum": high}),
        }
    }

    /// Its digits have no end, so only an open schema has one.
    fn number(&mut self) -> Value {
        if !self.open {
            return self.integer();
        }
        self.bounded = false;
        let low = self.dice.roll(100) as f64 / 8.0 - 6.0;
        match self.dice.roll(3) {
            0 => json!({"type": "number"}),
            1 => json!({"type": "number", "minimum": low, "maximum": low + 2.5}),
            _ => json!({"type": "number", "exclusiveMinimum": low}),
        }
    }

    fn string(&mut self) -> Value {
        match self.dice.roll(6) {
            0 | 1 => json!({"type": "string", "pattern": *self.dice.pick(&PATTERNS)}),
            2 => json!({"type": "string", "format": *self.dice.pick(&FORMATS)}),
            3 if self.open => {
                self.bounded = false;
                json!({"type": "string", "minLength": self.dice.roll(4)})
            }
            _ => {
                let least = self.dice.roll(4);
                let most = least + self.dice.roll(12);
                json!({"type": "string", "minLength": least, "maxLength": most})
            }
        }
    }

    fn chosen(&mut self) -> Value {
        let values = json!([
            "red", "gr\u{fc}n", "blue \"sky\"", "\u{1f333}", 3, -1.5, null, true,
            ["a", 1], {"k": []}
        ]);
        let values = values.as_array().expect("a list");
        if self.dice.roll(4) == 0 {
            return json!({"const": self.dice.pick(values)});
        }
        let count = 1 + self.dice.roll(values.len());
        let first = self.dice.roll(values.len());
        let some: Vec<&Value> = values.iter().cycle().skip(first).take(count).collect();
        json!({"enum": some})
    }

    fn list(&mut self, depth: u32) -> Value {
        let items = self.any(depth);
        let least = self.dice.roll(3);
        if self.open && self.dice.roll(3) == 0 {
            self.bounded = false;
            return json!({"type": "array", "items": items, "minItems": least});
        }
        let most = least + self.dice.roll(3);
        json!({"type": "array", "items": items, "minItems": least, "maxItems": most})
    }

    fn tuple(&mut self, depth: u32) -> Value {
        let (first, second) = (self.any(depth), self.any(0));
        json!({"type": "array", "prefixItems": [first, second], "items": false, "minItems": 2})
    }

    fn union(&mut self, depth: u32) -> Value {
        let (one, other) = (self.object(depth), self.string());
        json!({"anyOf": [one, other, {"type": "boolean"}]})
    }

    fn nullable(&mut self) -> Value {
        let mut string = self.string();
        string["type"] = json!(["string", "null"]);
        string
    }

    /// What has to be of two schemas at once.
    fn both(&mut self, depth: u32) -> Value {
        let (one, other) = (self.any(depth), self.any(0));
        json!({"allOf": [
            {"type": "object", "properties": {"left": one}, "required": ["left"]},
            {"properties": {"right": other}, "required": ["right"]}],
            "type": "object", "properties": {"left": true, "right": true},
            "additionalProperties": false})
    }

    fn reference(&mut self, depth: u32) -> Value {
        let name = format!("def_{}", self.defs.len());
        // The place is taken before the definition is made, which may add others.
        self.defs.insert(name.clone(), Value::Null);
        let target = json!({"$ref": format!("#/$defs/{name}")});
        let definition = if self.open && self.dice.roll(2) == 0 {
            self.bounded = false;
            let value = self.any(0);
            json!({"type": "object", "properties": {"value": value, "next":
                {"anyOf": [target, {"type": "null"}]}}, "required": ["value", "next"],
                "additionalProperties": false})
        } else {
            self.any(depth)
        };
        self.defs.insert(name, definition);
        target
    }

    fn object(&mut self, depth: u32) -> Value {
        let mut properties = Map::new();
        for _ in 0..=self.dice.roll(4) {
            let name = (*self.dice.pick(&NAMES)).to_owned();
            if !properties.contains_key(&name) {
                let value = self.any(depth);
                properties.insert(name, value);
            }
        }
        let names: Vec<String> = properties.keys().cloned().collect();
        let required: Vec<&String> = names.iter().filter(|_| self.dice.roll(3) > 0).collect();
        let mut object = json!({"type": "object", "properties": properties,
            "required": required, "additionalProperties": false});
        if self.open && self.dice.roll(3) == 0 {
            self.bounded = false;
            object["additionalProperties"] = match self.dice.roll(3) {
                0 => true.into(),
                1 => json!({"type": "integer", "minimum": 0, "maximum": 9}),
                _ => json!({"type": "string", "maxLength": 4}),
            };
        }
        object
    }
}
