//! "Did you mean …?": the nearest valid name for one that is not known.

/// The candidate nearest to `wrong`, or `None` when nothing is near enough to be a plausible slip.
///
/// Case and the choice between `-` and `_` do not count as differences. Up to a third of the
/// longer name may differ (at least one letter). Equally near candidates: the one given first.
pub fn nearest<'a>(wrong: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let wrong = fold(wrong);
    candidates
        .into_iter()
        .filter_map(|candidate| {
            let folded = fold(candidate);
            let distance = strsim::damerau_levenshtein(&wrong, &folded);
            let longer = wrong.chars().count().max(folded.chars().count());
            (distance <= (longer / 3).max(1) && distance < longer).then_some((distance, candidate))
        })
        .min_by_key(|&(distance, _)| distance)
        .map(|(_, candidate)| candidate)
}

/// `; did you mean "max_batch"?`, or the empty string: ready to be put at the end of a message.
pub fn did_you_mean<'a>(wrong: &str, candidates: impl IntoIterator<Item = &'a str>) -> String {
    nearest(wrong, candidates).map_or_else(String::new, |name| format!("; did you mean {name:?}?"))
}

/// `a, b, c`, or `none`: how a list of names is shown in a message.
pub fn listed<'a>(names: impl IntoIterator<Item = &'a str>) -> String {
    let names: Vec<&str> = names.into_iter().collect();
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

// Long input would make the comparison quadratic in it; no valid name comes near this length.
const COMPARED_CHARS: usize = 128;

fn fold(name: &str) -> String {
    name.chars()
        .take(COMPARED_CHARS)
        .map(|c| if c == '-' { '_' } else { c })
        .flat_map(char::to_lowercase)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEYS: [&str; 4] = ["max_batch", "max_batch_tokens", "device", "threads"];

    #[test]
    fn a_slip_finds_its_name() {
        for (wrong, right) in [
            ("max_bach", "max_batch"),
            ("max-batch", "max_batch"),
            ("MAX_BATCH_TOKENS", "max_batch_tokens"),
            ("devcie", "device"),
            ("thread", "threads"),
        ] {
            assert_eq!(nearest(wrong, KEYS), Some(right), "{wrong}");
        }
    }

    #[test]
    fn a_stranger_finds_nothing() {
        for wrong in ["", "x", "temperature", "plugin_dirs", &"d".repeat(100_000)] {
            assert_eq!(nearest(wrong, KEYS), None);
        }
        assert_eq!(nearest("a", ["b"]), None);
    }

    #[test]
    fn messages() {
        assert_eq!(did_you_mean("devise", KEYS), "; did you mean \"device\"?");
        assert_eq!(did_you_mean("zzz", KEYS), "");
        assert_eq!(listed([]), "none");
        assert_eq!(listed(["a", "b"]), "a, b");
    }
}
