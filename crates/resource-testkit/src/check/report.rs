//! What a check found, for people and as JSON.

use std::fmt;

use serde_json::{Value, json};

/// Something that a resource does and must not, or the other way round.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The rule, in a few words.
    pub check: String,
    /// What happened.
    pub what: String,
    /// The shortest sequence of operations that the kit found to show it; empty where the rule
    /// says it all.
    pub operations: Vec<String>,
}

/// How one rule fared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It holds as far as the kit looked.
    Holds,
    /// It does not apply to this resource.
    Skipped(String),
    /// It is broken; see the findings.
    Broken,
}

/// All that the kit says about one kind.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// The kind.
    pub kind: String,
    /// The seed of the random sequences.
    pub seed: u64,
    /// Every rule with its verdict, in the order in which they were tried.
    pub rules: Vec<(String, Verdict)>,
    /// What is wrong.
    pub findings: Vec<Finding>,
    /// Operations that random sequences performed.
    pub operations: u64,
}

impl Report {
    /// Whether nothing is wrong.
    pub fn is_clean(&self) -> bool {
        self.findings.is_empty()
    }

    /// Notes how a rule fared.
    pub fn note(&mut self, rule: &str, outcome: Result<Verdict, (String, Vec<String>)>) {
        let verdict = outcome.unwrap_or_else(|(what, operations)| {
            self.findings.push(Finding { check: rule.into(), what, operations });
            Verdict::Broken
        });
        self.rules.push((rule.into(), verdict));
    }

    /// As JSON: `kind`, `seed`, `operations`, `clean`, `rules` and `findings`.
    pub fn to_json(&self) -> Value {
        let rule = |(name, verdict): &(String, Verdict)| match verdict {
            Verdict::Holds => json!({ "rule": name, "verdict": "holds" }),
            Verdict::Broken => json!({ "rule": name, "verdict": "broken" }),
            Verdict::Skipped(why) => json!({ "rule": name, "verdict": "skipped", "why": why }),
        };
        let finding =
            |f: &Finding| json!({ "rule": f.check, "what": f.what, "operations": f.operations });
        json!({
            "kind": self.kind,
            "seed": self.seed,
            "operations": self.operations,
            "clean": self.is_clean(),
            "rules": self.rules.iter().map(rule).collect::<Vec<_>>(),
            "findings": self.findings.iter().map(finding).collect::<Vec<_>>(),
        })
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "kind {}, seed {}, {} random operations",
            self.kind, self.seed, self.operations
        )?;
        for (rule, verdict) in &self.rules {
            match verdict {
                Verdict::Holds => writeln!(f, "  ok       {rule}")?,
                Verdict::Broken => writeln!(f, "  BROKEN   {rule}")?,
                Verdict::Skipped(why) => writeln!(f, "  skipped  {rule}: {why}")?,
            }
        }
        for finding in &self.findings {
            writeln!(f, "finding: {}: {}", finding.check, finding.what)?;
            for operation in &finding.operations {
                writeln!(f, "    {operation}")?;
            }
        }
        Ok(())
    }
}
