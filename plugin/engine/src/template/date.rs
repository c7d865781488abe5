//! `strftime_now` for templates: the date in UTC, from seconds given by the caller.

const DAYS: [&str; 7] = [
    "Sunday",
    "Monday",
    "Tuesday",
    "Wednesday",
    "Thursday",
    "Friday",
    "Saturday",
];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// Formats a time as C's `strftime` does, for the directives that templates use; an unknown
/// directive stays as it is.
pub(super) fn format(format: &str, unix_s: u64) -> String {
    let date = Date::new(unix_s);
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(char) = chars.next() {
        if char != '%' {
            out.push(char);
            continue;
        }
        let Some(mut directive) = chars.next() else {
            out.push('%');
            break;
        };
        let padded = directive != '-';
        if !padded {
            directive = chars.next().unwrap_or('%');
        }
        let text = date.directive(directive);
        out.push_str(if padded { &text } else { unpadded(&text) });
    }
    out
}

fn unpadded(text: &str) -> &str {
    let short = text.trim_start_matches('0');
    if short.is_empty() { "0" } else { short }
}

struct Date {
    year: u64,
    month: usize,
    day: u64,
    day_of_year: u64,
    weekday: usize,
    second_of_day: u64,
}

impl Date {
    /// Days are counted from 1970-01-01, a Thursday, year by year: a few dozen steps.
    fn new(unix_s: u64) -> Self {
        // The year 9999: beyond it the numbers would not have four digits.
        let unix_s = unix_s.min(253_402_300_799);
        let days = unix_s / 86_400;
        let (mut year, mut left) = (1970, days);
        while left >= year_days(year) {
            left -= year_days(year);
            year += 1;
        }
        let day_of_year = left + 1;
        let mut month = 0;
        while left >= month_days(year, month) {
            left -= month_days(year, month);
            month += 1;
        }
        let weekday = usize::try_from((days + 4) % 7).unwrap_or(0);
        Self {
            year,
            month,
            day: left + 1,
            day_of_year,
            weekday,
            second_of_day: unix_s % 86_400,
        }
    }

    fn directive(&self, directive: char) -> String {
        let month = MONTHS.get(self.month).copied().unwrap_or_default();
        let weekday = DAYS.get(self.weekday).copied().unwrap_or_default();
        let (hour, minute) = (self.second_of_day / 3600, self.second_of_day / 60 % 60);
        match directive {
            'Y' => self.year.to_string(),
            'y' => format!("{:02}", self.year % 100),
            'm' => format!("{:02}", self.month + 1),
            'd' => format!("{:02}", self.day),
            'e' => format!("{:2}", self.day),
            'j' => format!("{:03}", self.day_of_year),
            'B' => month.to_owned(),
            'b' | 'h' => month.get(..3).unwrap_or_default().to_owned(),
            'A' => weekday.to_owned(),
            'a' => weekday.get(..3).unwrap_or_default().to_owned(),
            'H' => format!("{hour:02}"),
            'I' => format!("{:02}", (hour + 11) % 12 + 1),
            'p' => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            'M' => format!("{minute:02}"),
            'S' => format!("{:02}", self.second_of_day % 60),
            'F' => format!("{}-{:02}-{:02}", self.year, self.month + 1, self.day),
            'T' => format!("{hour:02}:{minute:02}:{:02}", self.second_of_day % 60),
            'Z' => "UTC".to_owned(),
            'z' => "+0000".to_owned(),
            '%' => "%".to_owned(),
            other => format!("%{other}"),
        }
    }
}

fn is_leap(year: u64) -> bool {
    year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
}

fn year_days(year: u64) -> u64 {
    if is_leap(year) { 366 } else { 365 }
}

/// Days of the month, counted from 0.
fn month_days(year: u64, month: usize) -> u64 {
    match month {
        1 => 28 + u64::from(is_leap(year)),
        3 | 5 | 8 | 10 => 30,
        _ => 31,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        let known = [
            (0, "1970-01-01 Thursday 001"),
            (951_782_400, "2000-02-29 Tuesday 060"),
            (1_709_251_199, "2024-02-29 Thursday 060"),
            (1_709_251_200, "2024-03-01 Friday 061"),
            (4_107_542_399, "2100-02-28 Sunday 059"),
            (4_107_542_400, "2100-03-01 Monday 060"),
        ];
        for (unix_s, text) in known {
            assert_eq!(format("%F %A %j", unix_s), text);
        }
        assert_eq!(
            format("%d %b %Y, %-d %I:%M:%S %p", 1_709_251_199),
            "29 Feb 2024, 29 11:59:59 PM"
        );
        assert_eq!(format("%-d %q %", 0), "1 %q %");
        assert_eq!(format("%Y", u64::MAX), "9999");
    }
}
