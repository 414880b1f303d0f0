//! Which streams of a request a step extends: guidance runs one input under two labels.

use std::collections::{BTreeMap, BTreeSet};

pub use model::RequestLabels;
use resource_api::LabelId;

use crate::error::{Error, Result};
use crate::names::Names;
use crate::suggest;

/// Most names of labels that requests may bring into an engine, `main` included. Names are kept for as
/// long as the engine lives.
const MAX_NAMES: usize = 32;

/// The labels of a request for one node, by its walks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StreamLabels {
    pub prefill: Vec<LabelId>,
    pub decode: Vec<LabelId>,
}

/// Checks the labels and gives them their ids; `None` for `main` alone. `most` is how many a step
/// has room for.
pub(crate) fn resolve(
    labels: &RequestLabels,
    node: &str,
    most: usize,
    names: &Names,
) -> Result<Option<StreamLabels>> {
    if *labels == RequestLabels::default() {
        return Ok(None);
    }
    check(labels, node)?;
    let mut known = names.len();
    let mut ids = |walk: &str| -> Result<Vec<LabelId>> {
        let labels: Vec<&str> = labels.of(node, walk).collect();
        if labels.len() > most {
            return Err(Error::usage(format!(
                "labels name {} streams; a step of this engine has room for {most} tokens \
                 (max_batch_tokens)",
                labels.len()
            )));
        }
        known += labels.iter().filter(|label| names.find(label).is_none()).count();
        if known > MAX_NAMES {
            return Err(Error::usage(format!(
                "labels: the requests of this engine have used {MAX_NAMES} names, which is \
                 the most; use those again"
            )));
        }
        Ok(labels.into_iter().map(|label| LabelId(names.intern(label))).collect())
    };
    let labels = StreamLabels { prefill: ids("prefill")?, decode: ids("decode")? };
    let is_main = |labels: &[LabelId]| labels == [LabelId::MAIN];
    Ok((!is_main(&labels.prefill) || !is_main(&labels.decode)).then_some(labels))
}

fn check(labels: &RequestLabels, node: &str) -> Result<()> {
    let mut nodes = labels.per_node.keys().chain(labels.per_node_walk.keys());
    if let Some(named) = nodes.find(|n| *n != node) {
        let hint = suggest::did_you_mean(named, [node]);
        return Err(Error::usage(format!("labels name node {named:?}{hint}")));
    }
    let walks = labels.per_node_walk.values();
    for walk in walks.clone().flat_map(BTreeMap::keys) {
        if !["prefill", "decode"].contains(&walk.as_str()) {
            let hint = suggest::did_you_mean(walk, ["prefill", "decode"]);
            return Err(Error::usage(format!("labels name walk {walk:?}{hint}")));
        }
    }
    let listed = labels.per_node.values().chain(walks.flat_map(BTreeMap::values));
    for labels in listed.clone() {
        if labels.is_empty() {
            return Err(Error::usage("labels: a node or walk has none; leave it out"));
        }
    }
    for labels in listed.chain([&labels.needed]) {
        let mut seen = BTreeSet::new();
        for label in labels {
            if label.is_empty() || label.len() > 64 {
                return Err(Error::usage(format!(
                    "labels: {label:?} is not a name of 1 to 64 bytes"
                )));
            }
            if !seen.insert(label) {
                return Err(Error::usage(format!("labels name {label:?} twice for one step")));
            }
        }
    }
    Ok(())
}

impl StreamLabels {
    /// Rows that a token takes in a step.
    pub fn width(&self) -> usize {
        self.prefill.len().max(self.decode.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(json: &str) -> RequestLabels {
        serde_json::from_str(json).unwrap()
    }

    const ALL: &str = r#"{"needed": ["a", "b"], "per_node": {"decoder": ["c"]},
        "per_node_walk": {"decoder": {"decode": ["d", "main"]}}}"#;

    #[test]
    fn the_walk_comes_before_the_node_and_that_before_the_request() {
        let all = labels(ALL);
        let of = |l: &RequestLabels, node, walk| l.of(node, walk).collect::<Vec<_>>().join(" ");
        assert_eq!(of(&all, "decoder", "decode"), "d main");
        assert_eq!(of(&all, "decoder", "prefill"), "c");
        assert_eq!(of(&all, "encoder", "decode"), "a b");
        assert_eq!(of(&RequestLabels::default(), "decoder", "decode"), "main");
        let names = Names::with(["main"]);
        let found = resolve(&all, "decoder", 8, &names).unwrap().unwrap();
        assert_eq!(found.prefill, [LabelId(1)]);
        assert_eq!(found.decode, [LabelId(2), LabelId::MAIN]);
        assert_eq!(found.width(), 2);
        let both = labels(r#"{"needed": ["a", "main"]}"#);
        let both = resolve(&both, "decoder", 8, &names).unwrap().unwrap();
        assert_eq!((both.prefill, both.decode.len()), (vec![LabelId(3), LabelId::MAIN], 2));
        assert_eq!(resolve(&labels("{}"), "decoder", 8, &names).unwrap(), None);
        assert_eq!(
            resolve(&labels(r#"{"needed": ["main"]}"#), "decoder", 8, &names).unwrap(),
            None
        );
    }

    #[test]
    fn what_is_wrong_is_told_in_one_line() {
        let names = Names::with(["main"]);
        for (text, said) in [
            (r#"{"per_node": {"decodr": ["a"]}}"#, "did you mean \"decoder\"?"),
            (r#"{"per_node_walk": {"decoder": {"decod": ["a"]}}}"#, "did you mean \"decode\"?"),
            (r#"{"per_node": {"decoder": []}}"#, "has none"),
            (r#"{"needed": ["a", "a"]}"#, "\"a\" twice"),
            (r#"{"needed": [""]}"#, "is not a name"),
            (r#"{"needed": ["a", "b", "c", "d"]}"#, "room for 3 tokens"),
        ] {
            let e = resolve(&labels(text), "decoder", 3, &names).unwrap_err().to_string();
            assert!(e.contains(said) && !e.contains('\n'), "{text}: {e}");
        }
        assert_eq!(names.len(), 1, "a request that is refused leaves no name");
        assert!(serde_json::from_str::<RequestLabels>(r#"{"need": []}"#).is_err());
        let many = |from: usize| RequestLabels {
            needed: (from..from + 20).map(|i| format!("l{i}")).collect(),
            ..RequestLabels::default()
        };
        assert!(resolve(&many(0), "decoder", 64, &names).is_ok());
        let e = resolve(&many(20), "decoder", 64, &names).unwrap_err().to_string();
        assert!(e.contains("32 names"), "{e}");
        assert!(
            resolve(&many(0), "decoder", 64, &names).is_ok(),
            "those there are may be used again"
        );
    }
}
