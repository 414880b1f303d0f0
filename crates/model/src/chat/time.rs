//! `strftime_now` of chat templates: the date that some models are told.

use std::time::{SystemTime, UNIX_EPOCH};

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
const DAYS: [&str; 7] =
    ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// Formats `now` in UTC with C's codes. An unknown code stays as it is.
pub(super) fn strftime(format: &str, now: SystemTime) -> String {
    let seconds = now.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let date = Date::from_unix(seconds);
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        match chars.next() {
            // `%-d`: without the leading zero.
            Some('-') => {
                let code = chars.next().unwrap_or('-');
                let padded = date.field(code);
                let bare = padded.trim_start_matches('0');
                out.push_str(if bare.is_empty() { "0" } else { bare });
            }
            Some(code) => out.push_str(&date.field(code)),
            None => out.push('%'),
        }
    }
    out
}

struct Date {
    year: u64,
    month: u64,
    day: u64,
    day_of_year: u64,
    weekday: u64,
    hour: u64,
    minute: u64,
    second: u64,
}

impl Date {
    fn from_unix(seconds: u64) -> Self {
        let days = seconds / 86_400;
        // Years from March on, so that the leap day is the last of its year.
        let shifted = days + 719_468;
        let era = shifted / 146_097;
        let day_of_era = shifted % 146_097;
        let year_of_era =
            (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_from_march = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let month_from_march = (5 * day_from_march + 2) / 153;
        let month = (month_from_march + 2) % 12 + 1;
        let year = era * 400 + year_of_era + u64::from(month <= 2);
        let leap =
            year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
        let day_of_year = if month <= 2 {
            day_from_march - 306 + 1
        } else {
            day_from_march + 59 + u64::from(leap) + 1
        };
        Self {
            year,
            month,
            day: day_from_march - (153 * month_from_march + 2) / 5 + 1,
            day_of_year,
            weekday: (days + 4) % 7,
            hour: seconds / 3600 % 24,
            minute: seconds / 60 % 60,
            second: seconds % 60,
        }
    }

    fn field(&self, code: char) -> String {
        let two = |n: u64| format!("{n:02}");
        let hour12 = (self.hour + 11) % 12 + 1;
        let month = MONTHS[(self.month - 1) as usize];
        let day = DAYS[self.weekday as usize];
        match code {
            'Y' => self.year.to_string(),
            'y' => two(self.year % 100),
            'm' => two(self.month),
            'B' => month.to_owned(),
            'b' | 'h' => month[..3].to_owned(),
            'd' => two(self.day),
            'e' => format!("{:2}", self.day),
            'j' => format!("{:03}", self.day_of_year),
            'A' => day.to_owned(),
            'a' => day[..3].to_owned(),
            'w' => self.weekday.to_string(),
            'H' => two(self.hour),
            'I' => two(hour12),
            'p' => if self.hour < 12 { "AM" } else { "PM" }.to_owned(),
            'M' => two(self.minute),
            'S' => two(self.second),
            'F' => format!("{}-{:02}-{:02}", self.year, self.month, self.day),
            'T' => format!("{:02}:{:02}:{:02}", self.hour, self.minute, self.second),
            'z' => "+0000".to_owned(),
            'Z' => "UTC".to_owned(),
            '%' => "%".to_owned(),
            other => format!("%{other}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Right-hand sides printed by GNU `date -u -d @seconds`.
    #[test]
    fn dates_print_as_by_gnu_date() {
        let format = "%Y-%m-%d %b %B %a %A %j %H:%M:%S %I%p %-d %y";
        for (seconds, printed) in [
            (0, "1970-01-01 Jan January Thu Thursday 001 00:00:00 12AM 1 70"),
            (951_782_399, "2000-02-28 Feb February Mon Monday 059 23:59:59 11PM 28 00"),
            (951_782_400, "2000-02-29 Feb February Tue Tuesday 060 00:00:00 12AM 29 00"),
            (1_735_689_599, "2024-12-31 Dec December Tue Tuesday 366 23:59:59 11PM 31 24"),
            (4_107_542_400, "2100-03-01 Mar March Mon Monday 060 00:00:00 12AM 1 00"),
        ] {
            let now = UNIX_EPOCH + Duration::from_secs(seconds);
            assert_eq!(strftime(format, now), printed);
        }
    }
}
