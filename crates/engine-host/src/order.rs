//! The order in which resources are built: dependencies first, ties alphabetical.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use crate::suggest;

/// Why there is no order. Displays as one line per problem.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OrderError(pub Vec<OrderProblem>);

/// One reason why there is no order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OrderProblem {
    /// `wanted_by` depends on a key that no resource has.
    UnknownKey {
        /// The key that does not exist.
        key: String,
        /// The resource that depends on it.
        wanted_by: String,
        /// All keys that exist.
        available: Vec<String>,
    },
    /// A resource depends on itself.
    SelfDependency {
        /// Its key.
        key: String,
    },
    /// These resources depend on each other: each on the next, the last on the first. The
    /// alphabetically first member comes first.
    Cycle {
        /// Their keys.
        members: Vec<String>,
    },
}

impl fmt::Display for OrderProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownKey { key, wanted_by, available } => {
                let names = || available.iter().map(String::as_str);
                write!(
                    f,
                    "resource {wanted_by:?} depends on {key:?}, which is not configured{} \
                     (configured: {})",
                    suggest::did_you_mean(key, names().filter(|name| name != wanted_by)),
                    suggest::listed(names()),
                )
            }
            Self::SelfDependency { key } => write!(f, "resource {key:?} depends on itself"),
            Self::Cycle { members } => {
                f.write_str("resources depend on each other in a cycle: ")?;
                for member in members {
                    write!(f, "{member} -> ")?;
                }
                f.write_str(members.first().map_or("", String::as_str))
            }
        }
    }
}

impl fmt::Display for OrderError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, problem) in self.0.iter().enumerate() {
            write!(f, "{}{problem}", if i == 0 { "" } else { "\n" })?;
        }
        Ok(())
    }
}

impl std::error::Error for OrderError {}

/// The keys of `depends_on` in the order of building: each after everything it depends on, and of
/// those that could come next always the alphabetically first. Naming a dependency twice is no
/// error.
///
/// Unknown keys and self-dependencies are reported together; a cycle only without them.
pub fn build_order(depends_on: &BTreeMap<String, Vec<String>>) -> Result<Vec<String>, OrderError> {
    let problems = edge_problems(depends_on);
    if !problems.is_empty() {
        return Err(OrderError(problems));
    }

    let mut waiting_for: BTreeMap<&str, BTreeSet<&str>> = depends_on
        .iter()
        .map(|(key, dependencies)| (&**key, dependencies.iter().map(|d| &**d).collect()))
        .collect();
    let mut dependents: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (&key, dependencies) in &waiting_for {
        for &dependency in dependencies {
            dependents.entry(dependency).or_default().push(key);
        }
    }
    let mut ready: BTreeSet<&str> =
        waiting_for.iter().filter(|(_, deps)| deps.is_empty()).map(|(&key, _)| key).collect();

    let mut order = Vec::with_capacity(depends_on.len());
    while let Some(key) = ready.pop_first() {
        waiting_for.remove(key);
        order.push(key.to_owned());
        for &dependent in dependents.get(key).into_iter().flatten() {
            if let Some(dependencies) = waiting_for.get_mut(dependent) {
                dependencies.remove(key);
                if dependencies.is_empty() {
                    ready.insert(dependent);
                }
            }
        }
    }
    if waiting_for.is_empty() {
        Ok(order)
    } else {
        Err(OrderError(vec![OrderProblem::Cycle { members: find_cycle(&waiting_for) }]))
    }
}

fn edge_problems(depends_on: &BTreeMap<String, Vec<String>>) -> Vec<OrderProblem> {
    let mut problems = Vec::new();
    for (key, dependencies) in depends_on {
        for dependency in dependencies.iter().collect::<BTreeSet<_>>() {
            if dependency == key {
                problems.push(OrderProblem::SelfDependency { key: key.clone() });
            } else if !depends_on.contains_key(dependency) {
                problems.push(OrderProblem::UnknownKey {
                    key: dependency.clone(),
                    wanted_by: key.clone(),
                    available: depends_on.keys().cloned().collect(),
                });
            }
        }
    }
    problems
}

/// A cycle among resources that each wait for at least one other of them: whoever follows the
/// dependencies must come back to a place already visited.
fn find_cycle(waiting_for: &BTreeMap<&str, BTreeSet<&str>>) -> Vec<String> {
    let mut path: Vec<&str> = Vec::new();
    let mut next = waiting_for.keys().next().copied();
    while let Some(key) = next {
        if let Some(start) = path.iter().position(|&visited| visited == key) {
            let mut members = path.split_off(start);
            let first = members.iter().enumerate().min_by_key(|(_, key)| **key).map_or(0, |m| m.0);
            members.rotate_left(first);
            return members.into_iter().map(str::to_owned).collect();
        }
        path.push(key);
        next = waiting_for.get(key).and_then(|dependencies| dependencies.first().copied());
    }
    Vec::new()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn graph(edges: &[(&str, &[&str])]) -> BTreeMap<String, Vec<String>> {
        let owned = |deps: &[&str]| deps.iter().map(|d| (*d).to_owned()).collect();
        edges.iter().map(|(key, deps)| ((*key).to_owned(), owned(deps))).collect()
    }

    fn error(edges: &[(&str, &[&str])]) -> String {
        build_order(&graph(edges)).unwrap_err().to_string()
    }

    #[test]
    fn dependencies_first_then_the_alphabet() {
        let order = build_order(&graph(&[
            ("attn", &["main_kv"]),
            ("zeta", &[]),
            ("main_kv", &[]),
            ("pos", &["main_kv", "main_kv"]),
            ("early", &[]),
        ]));
        assert_eq!(order.unwrap(), ["early", "main_kv", "attn", "pos", "zeta"]);
        assert_eq!(build_order(&graph(&[])).unwrap(), Vec::<String>::new());
    }

    #[test]
    fn problems_name_their_members() {
        assert_eq!(
            error(&[("attn", &["mian_kv"]), ("main_kv", &[]), ("pos", &["pos"])]),
            "resource \"attn\" depends on \"mian_kv\", which is not configured; did you mean \
             \"main_kv\"? (configured: attn, main_kv, pos)\n\
             resource \"pos\" depends on itself"
        );
        // `a` only waits for the cycle and is no member of it.
        assert_eq!(
            error(&[("a", &["d"]), ("b", &["c"]), ("c", &["d"]), ("d", &["b"]), ("e", &[])]),
            "resources depend on each other in a cycle: b -> c -> d -> b"
        );
    }

    /// The definition, straight: again and again the alphabetically first whose dependencies are
    /// all placed.
    fn slow_reference(graph: &BTreeMap<String, Vec<String>>) -> Option<Vec<String>> {
        let mut placed: Vec<String> = Vec::new();
        while placed.len() < graph.len() {
            let next = graph.iter().find(|(key, dependencies)| {
                !placed.contains(key) && dependencies.iter().all(|d| placed.contains(d))
            })?;
            placed.push(next.0.clone());
        }
        Some(placed)
    }

    proptest! {
        #[test]
        fn equals_the_slow_reference(
            size in 1usize..12,
            edges in prop::collection::vec((0usize..12, 0usize..12), 0..24),
        ) {
            let name = |i: usize| format!("r{:02}", (i * 7) % 12);
            let mut graph: BTreeMap<_, Vec<_>> = (0..size).map(|i| (name(i), vec![])).collect();
            for (from, to) in edges {
                if from % size != to % size {
                    graph.get_mut(&name(from % size)).unwrap().push(name(to % size));
                }
            }
            match (build_order(&graph), slow_reference(&graph)) {
                (Ok(order), Some(reference)) => prop_assert_eq!(order, reference),
                (Err(OrderError(problems)), None) => {
                    let [OrderProblem::Cycle { members }] = &problems[..] else {
                        return Err(TestCaseError::fail(format!("{problems:?}")));
                    };
                    let distinct: BTreeSet<_> = members.iter().collect();
                    prop_assert_eq!(distinct.len(), members.len());
                    prop_assert_eq!(distinct.first().copied(), members.first());
                    for (i, member) in members.iter().enumerate() {
                        prop_assert!(graph[member].contains(&members[(i + 1) % members.len()]));
                    }
                }
                (ours, reference) => prop_assert!(false, "{:?} against {:?}", ours, reference),
            }
        }
    }
}
