//! The streams that a request says it will have, before it has any.

use resource_api::{HostServices, LabelId, RequestId, RequestOverrides, ResourceError, Result};

use crate::board::Board;
use crate::chain::Chain;
use crate::overrides::{Labels, RequestSettings};
use crate::state::Shared;
use crate::stream::StreamId;

/// A stream that is to come.
#[derive(Debug)]
pub(crate) struct Declared {
    pub(crate) label: LabelId,
    /// Most tokens that it will have.
    pub(crate) tokens: u32,
    pub(crate) chain: Chain,
}

/// What goes to a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Goes {
    pub(crate) prompt: bool,
    pub(crate) outputs: bool,
}

/// The streams of a new request, with the keys of its prompt's pages: `main` alone, or those that it names.
/// Needs no lock.
///
/// # Errors
/// For a label that is named twice, or past those that a cache serves.
pub(crate) fn declare(
    shared: &Shared,
    request: RequestId,
    overrides: &RequestOverrides<'_>,
    settings: &RequestSettings,
) -> Result<Vec<Declared>> {
    let all = match &settings.labels {
        None => vec![(LabelId::MAIN, Goes { prompt: true, outputs: true })],
        Some(labels) => named(shared, labels)?,
    };
    let prompt = u32::try_from(overrides.prompt().len()).unwrap_or(u32::MAX);
    // The last token that is generated goes to no stream.
    let generated = overrides.max_new_tokens().saturating_sub(1);
    let mut declared: Vec<Declared> = Vec::with_capacity(all.len());
    for (label, goes) in all {
        Board::check(StreamId { request, label })?;
        let own = if goes.prompt { prompt } else { 0 };
        let tokens = own.saturating_add(if goes.outputs { generated } else { 0 });
        let alike = declared.iter().map(|d| &d.chain).find(|_| goes.prompt);
        let chain = Chain::new(shared, overrides, settings, goes, alike);
        declared.push(Declared { label, tokens, chain });
    }
    Ok(declared)
}

/// What goes to each stream, those of the prompt first.
fn named(shared: &Shared, labels: &Labels) -> Result<Vec<(LabelId, Goes)>> {
    let mut all: Vec<(LabelId, Goes)> = Vec::new();
    for (names, of_prompt) in [(&labels.prompt, true), (&labels.generated, false)] {
        for (i, name) in names.iter().enumerate() {
            if names[..i].contains(name) {
                let what = format!("`labels` name {name:?} twice for one step");
                return Err(ResourceError::invalid(what));
            }
            let label = shared.host.label_id(name);
            match all.iter_mut().find(|(known, _)| *known == label) {
                Some((_, goes)) => goes.outputs = true,
                None => all.push((label, Goes { prompt: of_prompt, outputs: !of_prompt })),
            }
        }
    }
    Ok(all)
}
