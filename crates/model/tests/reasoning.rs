//! Thoughts told apart from answers, however the text is cut.

use model::{ReasoningFormat, ReasoningParser};
use proptest::prelude::*;

/// Thoughts and answer, from pieces that end at `cuts`.
fn parse(prompt: &str, pieces: &[&str]) -> (String, String) {
    let mut parser = ReasoningParser::after(ReasoningFormat::Think, prompt);
    let (mut reasoning, mut content) = (String::new(), String::new());
    for delta in pieces.iter().map(|piece| parser.push(piece)).collect::<Vec<_>>() {
        reasoning += &delta.reasoning;
        content += &delta.content;
    }
    let rest = parser.finish();
    (reasoning + &rest.reasoning, content + &rest.content)
}

const OPEN: &str = "<|im_start|>assistant\n<think>\n";
const PLAIN: &str = "<|im_start|>assistant\n";
/// Qwen3 with `enable_thinking` false.
const CLOSED: &str = "<|im_start|>assistant\n<think>\n\n</think>\n\n";

#[test]
fn thoughts_and_answers_are_told_apart() {
    for (prompt, text, reasoning, content) in [
        (PLAIN, "<think>\nHm, well.\n</think>\n\nYes.", "Hm, well.", "Yes."),
        (PLAIN, "\n<think>Hm</think>Yes. ", "Hm", "Yes. "),
        (PLAIN, "Yes.", "", "Yes."),
        (PLAIN, " Yes.", "", " Yes."),
        (PLAIN, "<think>\n\n</think>\n\nYes.", "", "Yes."),
        (PLAIN, "<think>Hm", "Hm", ""),
        (PLAIN, "<think>Hm </thi", "Hm </thi", ""),
        (PLAIN, "<thinking>Hm", "", "<thinking>Hm"),
        (PLAIN, "<thi", "", "<thi"),
        (PLAIN, "I say <think>x</think>", "", "I say <think>x</think>"),
        (PLAIN, "<think>a</think>b<think>c</think>d", "a", "b<think>c</think>d"),
        (PLAIN, "", "", ""),
        (OPEN, "Hm, well.\n</think>\n\nYes.", "Hm, well.", "Yes."),
        (OPEN, "\nHm <b>well</b>", "Hm <b>well</b>", ""),
        // Some write the mark once more.
        (OPEN, "<think>\nHm</think>Yes.", "Hm", "Yes."),
        (CLOSED, "Yes.", "", "Yes."),
    ] {
        let expected = (reasoning.to_owned(), content.to_owned());
        assert_eq!(parse(prompt, &[text]), expected, "{prompt:?} {text:?}");
        let letters: Vec<&str> = text.split_inclusive(|_| true).collect();
        assert_eq!(parse(prompt, &letters), expected, "{prompt:?} {text:?} by letters");
    }
}

#[test]
fn only_what_may_become_a_mark_is_held_back() {
    let mut parser = ReasoningParser::after(ReasoningFormat::Think, PLAIN);
    for (piece, reasoning, content) in [
        ("<thi", "", ""),
        ("nk>", "", ""),
        ("\n", "", ""),
        ("a b", "a b", ""),
        (" \n", "", ""),
        ("c <", " \nc", ""),
        ("/b", " </b", ""),
        ("</think", "", ""),
        (">", "", ""),
        ("\n", "", ""),
        ("x", "", "x"),
        (" </think>\n", "", " </think>\n"),
    ] {
        let delta = parser.push(piece);
        assert_eq!(
            (delta.reasoning.as_str(), delta.content.as_str()),
            (reasoning, content),
            "{piece:?}"
        );
    }
    assert_eq!(parser.finish(), Default::default());
}

#[test]
fn templates_show_whether_a_model_thinks() {
    assert_eq!(ReasoningFormat::of_template("{{ '</think>' }}"), Some(ReasoningFormat::Think));
    assert_eq!(ReasoningFormat::of_template("{{ message.content }}"), None);
}

proptest! {
    #[test]
    fn cuts_make_no_difference(
        parts in prop::collection::vec(prop::sample::select(vec!["<think>", "</think>", "<", "/th", " ", "\n", "é", "x"]), 0..12),
        opened: bool,
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..6),
    ) {
        let text = parts.concat();
        let prompt = if opened { OPEN } else { PLAIN };
        let mut at: Vec<usize> = cuts.iter().map(|c| c.index(text.len() + 1)).filter(|&i| text.is_char_boundary(i)).collect();
        at.extend([0, text.len()]);
        at.sort_unstable();
        let pieces: Vec<&str> = at.windows(2).map(|w| &text[w[0]..w[1]]).collect();
        let whole = parse(prompt, &[&text]);
        prop_assert_eq!(parse(prompt, &pieces), whole.clone());
        // Nothing but marks and white space beside them is lost.
        let kept = |s: &str| s.replace("<think>", "").replace("</think>", "").replace([' ', '\n'], "");
        prop_assert!(kept(&(whole.0 + &whole.1)).len() >= kept(&text).len());
    }
}
