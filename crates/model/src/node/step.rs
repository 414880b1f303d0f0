//! What goes into a forward pass and what comes out.

use resource_api::{RequestId, ResourceError, Result, Sampled, Segments};

/// The tokens of a step, and where to sample.
#[derive(Debug, Clone, Copy)]
pub struct StepInput<'a> {
    /// The segments that the resources planned. Segments of one label lie side by side.
    pub segments: Segments<'a>,
    /// Ids of the tokens that the segments add, packed in segment order.
    pub token_ids: &'a [u32],
    /// Per token: which sample of the step that was launched before this one it is, where its id is not known
    /// yet, or [`StepInput::KNOWN`]. Empty where all are known.
    pub from_sample: &'a [u32],
    /// Indices of the segments after whose last token to sample, ascending: those that complete
    /// their prompt or go on after it. Each adds at least one token.
    pub sample: &'a [u32],
    /// Per entry of `sample`: how many of the best tokens to report with their log-probabilities.
    /// Empty when nobody asks.
    pub top_logprobs: &'a [u32],
    /// Tokens of prompts whose log-probability is asked for, by ascending row; empty when nobody asks.
    pub score: &'a [Score],
}

/// Asks for the log-probability of a token that is known already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Score {
    /// The packed row of the token before it, after which nobody samples.
    pub row: u32,
    /// The token.
    pub target: u32,
    /// How many of the best tokens to report with it.
    pub top: u32,
}

impl StepInput<'_> {
    /// In [`StepInput::from_sample`]: the token's id is in [`StepInput::token_ids`].
    pub const KNOWN: u32 = u32::MAX;

    /// Checks that the columns agree with each other and ids lie in the vocabulary.
    ///
    /// # Errors
    /// `INVALID` naming the first thing that is wrong.
    pub fn check(&self, vocab: usize) -> Result<()> {
        let Segments { request, label, span } = self.segments;
        if label.len() != request.len() || span.len() != request.len() {
            return invalid(format!(
                "a step has {} requests, {} labels and {} spans",
                request.len(),
                label.len(),
                span.len()
            ));
        }
        let tokens = self.segments.num_tokens();
        if self.token_ids.len() != tokens {
            return invalid(format!(
                "the segments add {tokens} tokens, but there are {} token ids",
                self.token_ids.len()
            ));
        }
        if !self.from_sample.is_empty() && self.from_sample.len() != tokens {
            return invalid(format!(
                "the segments add {tokens} tokens, but it is said of {} where they come from",
                self.from_sample.len()
            ));
        }
        if let Some(at) = self.token_ids.iter().position(|&id| id as usize >= vocab) {
            return invalid(format!(
                "token id {} of request {} is not in the vocabulary of {vocab}",
                self.token_ids[at],
                self.request_of(at)
            ));
        }
        if !self.sample.is_sorted_by(|a, b| a < b) {
            return invalid("the segments to sample after are not in ascending order".into());
        }
        for &segment in self.sample {
            match span.get(segment as usize) {
                Some(0) => {
                    return invalid(format!(
                        "request {} adds no token to sample after",
                        request[segment as usize]
                    ));
                }
                Some(_) => {}
                None => {
                    return invalid(format!(
                        "segment {segment} to sample after is past the step's {}",
                        request.len()
                    ));
                }
            }
        }
        let mut last = None;
        for score in self.score {
            let is_next = last.is_none_or(|row| row < score.row);
            if !is_next || score.row as usize >= tokens || score.target as usize >= vocab {
                return invalid(format!(
                    "{score:?} is out of order, or past {tokens} rows or {vocab} ids"
                ));
            }
            last = Some(score.row);
        }
        if !self.top_logprobs.is_empty() && self.top_logprobs.len() != self.sample.len() {
            return invalid(format!(
                "{} samples, but {} numbers of log-probabilities",
                self.sample.len(),
                self.top_logprobs.len()
            ));
        }
        Ok(())
    }

    fn request_of(&self, token: usize) -> RequestId {
        let mut end = 0;
        let owner = self.segments.iter().find(|s| {
            end += s.span as usize;
            token < end
        });
        owner.map_or(RequestId::padding(0), |s| s.request_id)
    }
}

fn invalid(message: String) -> Result<()> {
    Err(ResourceError::invalid(message))
}

/// What a step sampled. Keeps its memory from step to step.
#[derive(Debug, Default)]
pub struct StepOutput {
    /// Whose samples these are, in the order of [`StepInput::sample`].
    pub requests: Vec<RequestId>,
    /// The samples.
    pub sampled: Vec<Sampled>,
    top: Tops,
    /// The log-probabilities of [`StepInput::score`], in its order.
    pub scores: Vec<f32>,
    score_top: Tops,
    faults: Vec<Fault>,
}

/// Best tokens with their log-probabilities, of several rows.
#[derive(Debug, Default)]
struct Tops {
    /// Per row, where its part of the two columns ends.
    ends: Vec<usize>,
    ids: Vec<u32>,
    logprobs: Vec<f32>,
}

impl Tops {
    fn clear(&mut self) {
        self.ends.clear();
        self.ids.clear();
        self.logprobs.clear();
    }

    fn of(&self, i: usize) -> (&[u32], &[f32]) {
        let Some(&end) = self.ends.get(i) else { return (&[], &[]) };
        let start = if i == 0 { 0 } else { self.ends[i - 1] };
        (&self.ids[start..end], &self.logprobs[start..end])
    }

    fn push(&mut self, k: usize) -> (&mut [u32], &mut [f32]) {
        let start = self.ids.len();
        self.ids.resize(start + k, 0);
        self.logprobs.resize(start + k, 0.0);
        self.ends.push(start + k);
        (&mut self.ids[start..], &mut self.logprobs[start..])
    }
}

/// What a resource answered in a forward pass that cannot be right.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The sample that it spoils; `None` for those whose logits are not numbers.
    pub sample: Option<usize>,
    /// Key of the resource.
    pub resource: String,
    /// What is wrong, as the rest of a sentence that begins with the resource.
    pub what: String,
}

/// The status of a sample before the sampler has written it, and of one that cannot be right.
pub const NOT_SAMPLED: Sampled = Sampled { token: u32::MAX, status: u32::MAX, logprob: f32::NAN };

impl StepOutput {
    /// Empties all columns.
    pub fn clear(&mut self) {
        self.requests.clear();
        self.sampled.clear();
        self.top.clear();
        self.scores.clear();
        self.score_top.clear();
        self.faults.clear();
    }

    /// As [`StepOutput::begin_samples`], of these requests.
    pub fn begin_samples_of(&mut self, requests: &[RequestId]) -> &mut [Sampled] {
        self.requests.clear();
        self.requests.extend_from_slice(requests);
        self.begin_samples(requests.len()).1
    }

    /// Makes room for the samples of `rows` requests, for a sampler to fill.
    pub fn begin_samples(&mut self, rows: usize) -> (&[RequestId], &mut [Sampled]) {
        self.sampled.clear();
        self.sampled.resize(rows, NOT_SAMPLED);
        (&self.requests, &mut self.sampled)
    }

    /// Looks at what the resource `sampler` has written. A sample that cannot be right becomes
    /// [`NOT_SAMPLED`], and a fault says why.
    pub fn check_samples(&mut self, sampler: &str, vocab: usize) {
        for i in 0..self.sampled.len() {
            let Some(what) = self.wrong_sample(i, vocab) else { continue };
            self.sampled[i] = NOT_SAMPLED;
            self.faults.push(Fault { sample: Some(i), resource: sampler.to_owned(), what });
        }
    }

    fn wrong_sample(&self, i: usize, vocab: usize) -> Option<String> {
        let Sampled { token, status, logprob } = self.sampled[i];
        match status {
            Sampled::BAD_LOGITS => return None,
            Sampled::OK => {}
            u32::MAX => return Some("left the request without a token".into()),
            other => return Some(format!("gave status {other}, which the contract does not know")),
        }
        if token as usize >= vocab {
            return Some(format!("picked token {token} from a vocabulary of {vocab}"));
        }
        // A little above 0 is rounding.
        if logprob.is_nan() || logprob > 0.01 {
            return Some(format!("gave token {token} the log-probability {logprob}"));
        }
        let (ids, logprobs) = self.top(i);
        if let Some(id) = ids.iter().find(|&&id| id as usize >= vocab) {
            return Some(format!("named token {id} of a vocabulary of {vocab} among the best"));
        }
        let wrong = logprobs.iter().find(|p| p.is_nan() || **p > 0.01)?;
        Some(format!("gave one of the best tokens the log-probability {wrong}"))
    }

    /// Adds what a resource answered that cannot be right.
    pub fn blame(&mut self, resource: &str, what: String) {
        self.faults.push(Fault { sample: None, resource: resource.to_owned(), what });
    }

    /// What is known of why sample `i` is none.
    pub fn fault_of(&self, i: usize) -> Option<&Fault> {
        let own = self.faults.iter().find(|f| f.sample == Some(i));
        own.or_else(|| self.faults.iter().find(|f| f.sample.is_none()))
    }

    /// The best tokens for sample `i`, best first, and their log-probabilities; empty unless asked
    /// for. At most as many as the vocabulary has.
    pub fn top(&self, i: usize) -> (&[u32], &[f32]) {
        self.top.of(i)
    }

    /// Adds the part of the next sample, `k` long, and gives it to be written.
    pub fn push_top(&mut self, k: usize) -> (&mut [u32], &mut [f32]) {
        self.top.push(k)
    }

    /// The best tokens for score `i`, likewise.
    pub fn score_top(&self, i: usize) -> (&[u32], &[f32]) {
        self.score_top.of(i)
    }

    /// Adds the part of the next score, `k` long, and gives it to be written.
    pub fn push_score_top(&mut self, k: usize) -> (&mut [u32], &mut [f32]) {
        self.score_top.push(k)
    }

    /// Removes what is past the first `k` of the part that was added last.
    pub fn shorten_score_top(&mut self, k: usize) {
        let Tops { ends, ids, logprobs } = &mut self.score_top;
        let start = ends.len().checked_sub(2).map_or(0, |before| ends[before]);
        if let Some(end) = ends.last_mut() {
            *end = (start + k).min(*end);
            ids.truncate(*end);
            logprobs.truncate(*end);
        }
    }
}
