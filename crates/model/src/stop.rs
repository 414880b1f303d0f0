//! Stop strings in a text that comes in pieces.
//!
//! A stop string may be spread over several pieces. What may still become one is held back, and nothing
//! else is: the longest end of the text so far that a stop string begins with.

/// Finds the first stop string of a text. One per request and choice.
#[derive(Debug, Clone, Default)]
pub struct StopStrings {
    stops: Vec<String>,
    /// Whether the stop string itself is part of the text.
    keeps_stop: bool,
    /// The end of the text that may be the beginning of a stop string.
    held: String,
    found: Option<usize>,
}

impl StopStrings {
    /// Looks for `stops`; empty ones are left out. With `keeps_stop` the text ends behind what was found,
    /// otherwise before it.
    pub fn new(stops: impl IntoIterator<Item = String>, keeps_stop: bool) -> Self {
        let stops = stops.into_iter().filter(|stop| !stop.is_empty()).collect();
        Self { stops, keeps_stop, held: String::new(), found: None }
    }

    /// The text that `piece` makes certain: empty while it may be part of a stop string, and after one
    /// was found.
    pub fn push(&mut self, piece: &str) -> String {
        if self.found.is_some() {
            return String::new();
        }
        if self.stops.is_empty() {
            return piece.to_owned();
        }
        let mut text = std::mem::take(&mut self.held);
        text.push_str(piece);
        // The one that is complete first; of those that end at one place, the longest.
        let ends = self.stops.iter().enumerate().filter_map(|(i, stop)| {
            let start = text.find(stop.as_str())?;
            Some((start + stop.len(), start, i))
        });
        if let Some((end, start, i)) = ends.min() {
            self.found = Some(i);
            text.truncate(if self.keeps_stop { end } else { start });
            return text;
        }
        let longest = self.stops.iter().map(|stop| open_end(&text, stop)).max().unwrap_or(0);
        self.held = text.split_off(text.len() - longest);
        text
    }

    /// Lets a piece of text pass in which no stop string counts, with what was held back before it.
    pub fn pass(&mut self, piece: &str) -> String {
        let mut text = std::mem::take(&mut self.held);
        text.push_str(piece);
        text
    }

    /// The stop string that was found.
    pub fn found(&self) -> Option<&str> {
        self.found.map(|i| self.stops[i].as_str())
    }

    /// What was held back, when the text has come to its end.
    pub fn flush(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// Length of the longest end of `text` that `stop` begins with and goes on after.
fn open_end(text: &str, stop: &str) -> usize {
    let starts = stop.char_indices().map(|(at, _)| at).rev();
    starts.filter(|&len| len > 0).find(|&len| text.ends_with(&stop[..len])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn stream(pieces: &[&str], stops: &[&str]) -> (Vec<String>, Option<String>) {
        let mut stop = StopStrings::new(stops.iter().map(|&s| s.to_owned()), false);
        let mut out: Vec<String> = pieces.iter().map(|piece| stop.push(piece)).collect();
        out.push(stop.flush());
        (out, stop.found().map(str::to_owned))
    }

    #[test]
    fn no_part_of_a_stop_string_spread_over_pieces_leaks() {
        let (out, found) = stream(&["ABC", "DEF", "G", "HI", "J", "K"], &["DEFGHIJ"]);
        assert_eq!(out, ["ABC", "", "", "", "", "", ""]);
        assert_eq!(found.as_deref(), Some("DEFGHIJ"));
    }

    #[test]
    fn only_a_real_beginning_is_held_back() {
        let (out, found) = stream(&["one ", "two <", "x <|", "end"], &["<|im_end|> and more"]);
        assert_eq!(out, ["one ", "two ", "<x ", "<|end", ""]);
        assert_eq!(found, None);
        let (out, _) = stream(&["a", "b"], &["abc"]);
        assert_eq!(out, ["", "", "ab"], "the end of the text lets it go");
    }

    #[test]
    fn of_several_the_first_complete_one_counts() {
        assert_eq!(stream(&["xaby"], &["by", "ab"]).0, ["x", ""]);
        assert_eq!(stream(&["xab"], &["b", "ab"]).0, ["x", ""], "of one end the longest");
        assert_eq!(stream(&["aé", "é!"], &["éé"]).0, ["a", "", ""]);
    }

    #[test]
    fn the_stop_string_may_be_kept_and_nothing_behind_it() {
        let mut stop = StopStrings::new(["END".to_owned()], true);
        assert_eq!(stop.push("the E"), "the ");
        assert_eq!(stop.push("ND is near"), "END");
        assert_eq!(stop.push("more"), "");
    }

    proptest! {
        #[test]
        fn any_cutting_of_a_text_gives_the_same(
            text in "[ab<é]{0,24}",
            stops in prop::collection::vec("[ab<é]{1,5}", 0..4),
            cuts in prop::collection::vec(0usize..30, 0..8),
        ) {
            let ends = stops.iter().filter_map(|s| {
                let start = text.find(s.as_str())?;
                Some((start + s.len(), start))
            });
            let expected = ends.min().map_or(text.as_str(), |(_, start)| &text[..start]);
            let mut stop = StopStrings::new(stops.clone(), false);
            let chars: Vec<char> = text.chars().collect();
            let mut out = String::new();
            let mut cuts: Vec<usize> = cuts.into_iter().map(|c| c.min(chars.len())).collect();
            cuts.extend([0, chars.len()]);
            cuts.sort_unstable();
            for pair in cuts.windows(2) {
                let piece: String = chars[pair[0]..pair[1]].iter().collect();
                out += &stop.push(&piece);
                prop_assert!(expected.starts_with(&out), "{out:?} leaked of {expected:?}");
            }
            out += &stop.flush();
            prop_assert_eq!(out, expected);
        }
    }
}
